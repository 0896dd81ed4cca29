//! The ioctl that no safe wrapper covers: sharing a range of extents between files.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// `struct file_clone_range` of linux/fs.h.
#[repr(C)]
struct FileCloneRange {
    src_fd: i64,
    src_offset: u64,
    src_length: u64,
    dest_offset: u64,
}

/// `_IOW(0x94, 13, struct file_clone_range)`.
const FICLONERANGE: libc::Ioctl = 0x4020_940d;

/// Makes `length` bytes of `target` share the extents of `source`.
pub(super) fn clone_range(
    source: BorrowedFd<'_>,
    source_offset: u64,
    target: BorrowedFd<'_>,
    target_offset: u64,
    length: u64,
) -> Result<(), Errno> {
    if length == 0 {
        // To the kernel 0 means "to the end".
        return Ok(());
    }
    let argument = FileCloneRange {
        src_fd: source.as_raw_fd().into(),
        src_offset: source_offset,
        src_length: length,
        dest_offset: target_offset,
    };
    // SAFETY: FICLONERANGE reads one file_clone_range, which lives for the call; both descriptors are borrowed open.
    let result = unsafe { libc::ioctl(target.as_raw_fd(), FICLONERANGE, &raw const argument) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
