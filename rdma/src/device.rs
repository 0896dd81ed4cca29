//! RDMA devices, memory registered with them, and the descriptors that signal completions.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rdma_sys::{
    ibv_access_flags, ibv_comp_channel, ibv_context, ibv_device_attr, ibv_device_cap_flags, ibv_mr, ibv_pd,
};
use rustix::io::Errno;

use crate::library::Library;
use crate::pages::Pages;
use crate::{check, last_errno};

/// Identifies a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceKey(usize);

/// An RDMA device and the protection domain of this process on it.
pub struct Device {
    library: &'static Library,
    context: NonNull<ibv_context>,
    domain: NonNull<ibv_pd>,
    name: String,
    is_iwarp: bool,
    /// Maximum number of work requests of one queue.
    pub(crate) work_max: u32,
    /// Maximum number of pieces of memory of one work request.
    pub(crate) pieces_max: u32,
    /// Maximum number of RDMA READs in flight on one connection.
    pub(crate) reads_max: u8,
    has_windows: bool,
    /// Interrupts that can signal completions.
    vectors: usize,
    /// The NUMA node on which to allocate its buffers.
    pub(crate) numa_node: Option<u32>,
}

// SAFETY: verbs are thread-safe; the context belongs to librdmacm and lives as long as the process.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name)
    }
}

/// Memory windows of type 2, of either variant.
const WINDOWS: u32 = ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2A.0
    | ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0;

/// All devices in use, so that each has one protection domain.
static DEVICES: Mutex<Option<HashMap<DeviceKey, Weak<Device>>>> = Mutex::new(None);

impl Device {
    /// The device of a context of librdmacm.
    pub(crate) fn of(library: &'static Library, context: *mut ibv_context) -> Result<Arc<Self>, Errno> {
        let context = NonNull::new(context).ok_or(Errno::NODEV)?;
        let key = DeviceKey(context.as_ptr() as usize);
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        let devices = devices.get_or_insert_default();
        if let Some(device) = devices.get(&key).and_then(Weak::upgrade) {
            return Ok(device);
        }
        // SAFETY: the structure is plain numbers; the context is librdmacm's.
        let attributes = unsafe {
            let mut attributes: ibv_device_attr = std::mem::zeroed();
            check((library.ibv_query_device)(context.as_ptr(), &raw mut attributes))?;
            attributes
        };
        // SAFETY: the context and its device live; the name is a string within the device.
        let (name, domain, is_iwarp, vectors) = unsafe {
            let device = (*context.as_ptr()).device;
            let name = CStr::from_ptr((library.ibv_get_device_name)(device)).to_string_lossy().into_owned();
            let is_iwarp = (*device).transport_type == rdma_sys::ibv_transport_type::IBV_TRANSPORT_IWARP;
            let domain = (library.ibv_alloc_pd)(context.as_ptr());
            (name, domain, is_iwarp, (*context.as_ptr()).num_comp_vectors)
        };
        let device = Arc::new(Self {
            library,
            context,
            domain: NonNull::new(domain).ok_or_else(last_errno)?,
            numa_node: crate::numa::node_of(&name),
            name,
            is_iwarp,
            work_max: attributes.max_qp_wr.max(0).cast_unsigned(),
            pieces_max: attributes.max_sge.max(1).cast_unsigned(),
            reads_max: attributes.max_qp_init_rd_atom.clamp(0, u8::MAX.into()) as u8,
            has_windows: attributes.device_cap_flags & WINDOWS != 0,
            vectors: usize::try_from(vectors).unwrap_or(0),
        });
        devices.retain(|_, device| device.strong_count() > 0);
        devices.insert(key, Arc::downgrade(&device));
        Ok(device)
    }

    /// Its identifier.
    #[must_use]
    pub fn key(&self) -> DeviceKey {
        DeviceKey(self.context.as_ptr() as usize)
    }

    /// Its name, such as `mlx5_0`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it uses iWARP.
    #[must_use]
    pub fn is_iwarp(&self) -> bool {
        self.is_iwarp
    }

    /// Maximum number of work requests in one queue.
    #[must_use]
    pub fn work_max(&self) -> u32 {
        self.work_max
    }

    /// Maximum number of pieces of memory in one work request.
    #[must_use]
    pub fn pieces_max(&self) -> u32 {
        self.pieces_max
    }

    /// Whether it supports tokens that a peer can invalidate.
    #[must_use]
    pub fn has_windows(&self) -> bool {
        self.has_windows
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.library
    }

    pub(crate) fn context(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    pub(crate) fn domain(&self) -> *mut ibv_pd {
        self.domain.as_ptr()
    }

    /// Registers a block of memory, so that the device can access it. The block must be freed after the region; a structure
    /// with the region field before the block field ensures this. Moving the box does not move the block.
    ///
    /// # Errors
    /// Usually ENOMEM: more memory than may be locked.
    #[allow(clippy::borrowed_box, reason = "only a box promises that the block does not move")]
    pub fn register(self: &Arc<Self>, memory: &mut Box<[u8]>) -> Result<Region, Errno> {
        // SAFETY: the device accesses the block only through work requests, which `Endpoint` creates for memory that it owns;
        // a region of freed memory that no work request refers to has no effect.
        unsafe { self.register_raw(memory.as_mut_ptr(), memory.len(), self.local_access()) }
    }

    /// As [`Device::register`], for pages.
    pub(crate) fn register_pages(self: &Arc<Self>, pages: &mut Pages) -> Result<Region, Errno> {
        // SAFETY: as in `register`.
        unsafe { self.register_raw(pages.as_mut_ptr(), pages.len(), self.local_access()) }
    }

    /// For memory that our own work requests use.
    fn local_access(&self) -> ibv_access_flags {
        let mut access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        if self.is_iwarp {
            // RFC 5040: the peer receives a token for the target of an RDMA READ, and writes there.
            access |= ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        }
        access
    }

    /// Registers memory for access by the device and, depending on the flags, by a peer.
    ///
    /// # Safety
    /// The memory must be valid for every access of device and peer, until the region is dropped.
    pub(crate) unsafe fn register_raw(
        self: &Arc<Self>,
        memory: *mut u8,
        length: usize,
        access: ibv_access_flags,
    ) -> Result<Region, Errno> {
        // SAFETY: the domain lives as long as the device; the caller guarantees the memory.
        let region = unsafe {
            (self.library.ibv_reg_mr)(
                self.domain.as_ptr(),
                memory.cast::<c_void>(),
                length,
                access.0.cast_signed(),
            )
        };
        let region = NonNull::new(region).ok_or_else(last_errno)?;
        // SAFETY: the region was just made.
        let (key, token) = unsafe { ((*region.as_ptr()).lkey, (*region.as_ptr()).rkey) };
        Ok(Region { device: Arc::clone(self), region, key, token })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: every object created in the domain holds the device, so none is left.
        let result = unsafe { (self.library.ibv_dealloc_pd)(self.domain.as_ptr()) };
        if let Err(error) = check(result) {
            tracing::debug!(device = self.name, %error, "the protection domain was not released");
        }
    }
}

/// Memory that a device can access.
pub struct Region {
    device: Arc<Device>,
    region: NonNull<ibv_mr>,
    key: u32,
    token: u32,
}

// SAFETY: a region is used by its key; deregistration may be called from any thread.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({})", self.device.name)
    }
}

impl Region {
    /// The key by which work requests refer to it.
    pub(crate) fn key(&self) -> u32 {
        self.key
    }

    /// The token by which a peer refers to it, if it has access.
    pub(crate) fn token(&self) -> u32 {
        self.token
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn raw(&self) -> *mut ibv_mr {
        self.region.as_ptr()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: created by ibv_reg_mr and released only here.
        let result = unsafe { (self.device.library.ibv_dereg_mr)(self.region.as_ptr()) };
        if let Err(error) = check(result) {
            tracing::debug!(device = self.device.name, %error, "memory was not released");
        }
    }
}

/// A descriptor that becomes readable when work was completed on one of its endpoints.
pub struct Notifier {
    device: Arc<Device>,
    channel: NonNull<ibv_comp_channel>,
    descriptor: Arc<OwnedFd>,
    /// The interrupt that signals its endpoints' completions.
    vector: i32,
}

// SAFETY: verbs are thread-safe.
unsafe impl Send for Notifier {}
// SAFETY: as above.
unsafe impl Sync for Notifier {}

impl fmt::Debug for Notifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Notifier({})", self.device.name)
    }
}

impl Notifier {
    /// Creates a notifier for endpoints on `device`.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(device: &Arc<Device>) -> Result<Self, Errno> {
        Self::of_loop(device, 0)
    }

    /// Same, for an event loop: different interrupts signal the completions of different loops, so that no processor handles
    /// them all.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn of_loop(device: &Arc<Device>, index: usize) -> Result<Self, Errno> {
        // SAFETY: the context lives as long as the process.
        let channel = unsafe { (device.library.ibv_create_comp_channel)(device.context()) };
        let channel = NonNull::new(channel).ok_or_else(last_errno)?;
        // SAFETY: just made.
        let fd = unsafe { (*channel.as_ptr()).fd };
        let made = duplicate(fd).and_then(|descriptor| {
            rustix::io::ioctl_fionbio(&*descriptor, true)?;
            Ok(descriptor)
        });
        match made {
            Ok(descriptor) => {
                let vector = vector_of(index, device.vectors);
                Ok(Self { device: Arc::clone(device), channel, descriptor, vector })
            }
            Err(errno) => {
                // SAFETY: nothing uses it.
                unsafe { (device.library.ibv_destroy_comp_channel)(channel.as_ptr()) };
                Err(errno)
            }
        }
    }

    /// The descriptor to wait for.
    #[must_use]
    pub fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.descriptor)
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn vector(&self) -> i32 {
        self.vector
    }

    pub(crate) fn channel(&self) -> *mut ibv_comp_channel {
        self.channel.as_ptr()
    }

    /// Appends the names of the endpoints to poll.
    ///
    /// # Errors
    /// The device is gone.
    pub fn take(&self, contexts: &mut Vec<u64>) -> Result<(), Errno> {
        loop {
            let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: channel and results are valid; the descriptor does not block.
            let result = unsafe {
                (self.device.library.ibv_get_cq_event)(
                    self.channel.as_ptr(),
                    &raw mut queue,
                    &raw mut context,
                )
            };
            if result != 0 {
                return match last_errno() {
                    Errno::AGAIN | Errno::INTR => Ok(()),
                    errno => Err(errno),
                };
            }
            // SAFETY: a completion queue with an unacknowledged event cannot be destroyed.
            unsafe { (self.device.library.ibv_ack_cq_events)(queue, 1) };
            contexts.push(context as u64);
        }
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        // SAFETY: endpoints hold their notifier, so no completion queue uses the channel any more.
        unsafe { (self.device.library.ibv_destroy_comp_channel)(self.channel.as_ptr()) };
    }
}

/// The vector of the event loop `index` on a device with `vectors` of them.
fn vector_of(index: usize, vectors: usize) -> i32 {
    (index % vectors.max(1)) as i32
}

/// Duplicates the descriptor: a waiter can outlive the library's own descriptor.
pub(crate) fn duplicate(fd: i32) -> Result<Arc<OwnedFd>, Errno> {
    // SAFETY: the descriptor belongs to an object that the caller holds.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(Arc::new(rustix::io::fcntl_dupfd_cloexec(borrowed, 0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_loops_spread_over_the_completion_vectors_of_a_device() {
        let of = |vectors| (0..5).map(|index| vector_of(index, vectors)).collect::<Vec<_>>();
        assert_eq!(of(8), [0, 1, 2, 3, 4]);
        assert_eq!(of(2), [0, 1, 0, 1, 0]);
        assert_eq!(of(0), [0; 5], "without a reported count, one vector is assumed");
    }
}
