//! The ioctl and the system call that no safe wrapper covers: sharing a range of extents between files, and querying which
//! pages of a file are in the page cache.
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

/// Pages of a range in the page cache: `struct cachestat` of linux/mman.h.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct CacheState {
    /// Cached pages, including dirty pages and pages under writeback.
    pub(super) cached: u64,
    /// Dirty pages.
    pub(super) dirty: u64,
    /// Pages under writeback.
    pub(super) writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// `cachestat(2)` (Linux 6.5), with the same number on every architecture that has it.
const CACHESTAT: libc::c_long = 451;

/// Returns the page cache state of `length` bytes, at least one, starting at `offset`. Reads nothing and does not block.
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
