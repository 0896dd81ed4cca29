//! A small safe layer over verbs and the RDMA connection manager.
//!
//! Its safety guarantees: memory that a device can access is owned by the object that accesses it ([`Region`], [`Endpoint`])
//! until the work is completed or the queue pair is destroyed. Objects are destroyed in the order of their dependencies,
//! because each holds the objects that it depends on.
//!
//! # Example
//!
//! Buffers come from a budget, with or without a device that can reach them:
//!
//! ```
//! use forebay_rdma::{BufferPool, EventChannel};
//!
//! let pool = BufferPool::new(64 << 20);
//! let mut buffer = pool.take(1 << 20)?;
//! buffer.bytes_mut(0..4).copy_from_slice(b"data");
//! assert_eq!(buffer.bytes(0..4), b"data");
//! assert!(buffer.region().is_none(), "no device was given");
//!
//! // On a machine without RDMA the reason is there to be reported.
//! match EventChannel::new() {
//!     Ok(_) => println!("connections can be made and accepted"),
//!     Err(reason) => println!("no RDMA here: {reason}"),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![allow(unsafe_code)]

mod budget;
mod buffers;
mod cm;
mod device;
mod endpoint;
mod exposed;
mod library;
pub mod limits;
mod line;
mod memory;
mod numa;
mod pages;
mod transfers;

pub use budget::{Account, Budget, Group};
pub use buffers::{
    BUFFER_BYTES, BUFFER_MEMORY_BYTES, Buffer, BufferPool, Charge, OutOfBuffers, PAGE, Shortage,
};
pub use cm::{CmEvent, CmKey, EventChannel, Incoming, Listener, NoChannel, Outgoing};
pub use device::{Device, DeviceKey, Notifier, Region};
pub use endpoint::{Completed, Endpoint, Failure, PIECES_MAX, Piece, Remote, Sizes};
pub use exposed::{Exposed, Window};
pub use library::Unavailable;
pub use line::{Line, Place, Wake};

use rustix::io::Errno;

/// The errno of the last call.
fn last_errno() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// Converts the result of a call of librdmacm or libibverbs: -1 and errno, or an error number.
fn check(result: std::ffi::c_int) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        -1 => Err(last_errno()),
        errno => Err(Errno::from_raw_os_error(errno.abs())),
    }
}
