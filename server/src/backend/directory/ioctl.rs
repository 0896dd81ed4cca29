//! The ioctl and the system call that no safe wrapper covers: sharing a range of extents between files, and what the page cache
//! has of a file.
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

/// `struct cachestat_range` of linux/mman.h.
#[repr(C)]
struct CacheRange {
    offset: u64,
    length: u64,
}

/// What the page cache has of a range, in pages: `struct cachestat` of linux/mman.h.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct CacheState {
    /// Cached, dirty ones and those being written included.
    pub(super) cached: u64,
    /// Not written yet.
    pub(super) dirty: u64,
    /// Being written.
    pub(super) writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// `cachestat`, which has this number on every architecture that has it since it is there (Linux 6.5).
const CACHESTAT: libc::c_long = 451;

/// What the page cache has of `length` bytes, at least one, from `offset` on. Reads nothing and waits for nothing.
pub(super) fn cache_state(file: BorrowedFd<'_>, offset: u64, length: u64) -> Result<CacheState, Errno> {
    let range = CacheRange { offset, length };
    let mut state = CacheState::default();
    // SAFETY: cachestat reads one range and writes one state, which live for the call; the descriptor is borrowed open.
    let result = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut state, 0 as libc::c_uint)
    };
    if result == 0 { Ok(state) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
