//! libibverbs and librdmacm, loaded on first use: the server also runs without them.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use rdma_sys::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_mr, ibv_pd, ibv_qp_init_attr,
    rdma_cm_event, rdma_cm_id, rdma_conn_param, rdma_event_channel, rdma_port_space,
};

/// Why RDMA is unavailable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// The library could not be loaded.
    #[error("{0}: install the packages librdmacm1 and ibverbs-providers")]
    Library(String),
    /// The library lacks a function.
    #[error("librdmacm lacks {0}: rdma-core 28 or newer is needed")]
    Function(&'static str),
}

macro_rules! library {
    ($($(#[$doc:meta])* $name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The library functions in use. rdma-sys provides the inline functions.
        pub(crate) struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn load() -> Result<Self, Unavailable> {
                // SAFETY: loading these libraries runs only their initialisers, which have no preconditions.
                let handle = unsafe { libc::dlopen(c"librdmacm.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
                if handle.is_null() {
                    return Err(Unavailable::Library(last_error()));
                }
                Ok(Self { $($name: {
                    let symbol = concat!(stringify!($name), "\0");
                    // SAFETY: the name ends with a zero; the handle is never closed. librdmacm depends on libibverbs, so the
                    // handle resolves the symbols of both.
                    let found = unsafe { libc::dlsym(handle, symbol.as_ptr().cast()) };
                    if found.is_null() {
                        return Err(Unavailable::Function(stringify!($name)));
                    }
                    // SAFETY: the type matches the function in rdma-core's headers.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(found) }
                },)* })
            }
        }
    };
}

library! {
    ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    ibv_get_device_name: fn(*mut ibv_device) -> *const c_char;
    ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
    ibv_get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut ibv_cq, c_uint);
    rdma_create_event_channel: fn() -> *mut rdma_event_channel;
    rdma_destroy_event_channel: fn(*mut rdma_event_channel);
    rdma_create_id: fn(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, rdma_port_space::Type) -> c_int;
    rdma_destroy_id: fn(*mut rdma_cm_id) -> c_int;
    rdma_bind_addr: fn(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
    rdma_listen: fn(*mut rdma_cm_id, c_int) -> c_int;
    rdma_get_cm_event: fn(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
    rdma_ack_cm_event: fn(*mut rdma_cm_event) -> c_int;
    rdma_migrate_id: fn(*mut rdma_cm_id, *mut rdma_event_channel) -> c_int;
    rdma_create_qp: fn(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
    rdma_destroy_qp: fn(*mut rdma_cm_id);
    rdma_resolve_addr: fn(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
    rdma_resolve_route: fn(*mut rdma_cm_id, c_int) -> c_int;
    rdma_connect: fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    rdma_accept: fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    rdma_disconnect: fn(*mut rdma_cm_id) -> c_int;
}

impl Library {
    /// Returns the libraries; the first call loads them.
    ///
    /// # Errors
    /// Why they could not be loaded; the result is cached.
    pub(crate) fn get() -> Result<&'static Self, Unavailable> {
        static LIBRARY: OnceLock<Result<Library, Unavailable>> = OnceLock::new();
        LIBRARY.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }
}

fn last_error() -> String {
    // SAFETY: dlerror returns null or a string that is valid until the next call of this thread.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "librdmacm.so.1 could not be loaded".to_owned();
    }
    // SAFETY: it is not null.
    unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned()
}
