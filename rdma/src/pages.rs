//! Whole pages of memory, mapped from the kernel and unmapped directly, so that the counted memory is exactly the memory that
//! the process has. With an allocator in between the count would be inexact.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// A block of pages, zeroed by the kernel on first access. Its address never changes.
pub(crate) struct Pages {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to this value alone and is accessed only through references to it.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps at least `length` bytes.
    ///
    /// # Errors
    /// ENOMEM.
    pub(crate) fn new(length: usize) -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces no existing one.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), length, protection, MapFlags::PRIVATE)? };
        Ok(Self { start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?, length })
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has `length` readable bytes, initialised by the kernel, until it is dropped.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and writable; the exclusive borrow makes this the only reference.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length; nothing borrows it any more.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.length) } {
            tracing::error!(%error, bytes = self.length, "memory was not unmapped");
        }
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pages({} bytes)", self.length)
    }
}
