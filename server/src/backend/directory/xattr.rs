//! Extended attributes of directory entries, read without opening them.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use super::path;

/// Number of getxattrat(2), the same on every architecture. Linux 6.13 and later have it.
const SYS_GETXATTRAT: libc::c_long = 464;

/// `struct xattr_args` of linux/xattr.h.
#[repr(C, align(8))]
struct Args {
    value: u64,
    size: u32,
    flags: u32,
}

const _: () = assert!(size_of::<Args>() == 16, "XATTR_ARGS_SIZE_VER0");

/// Set once the kernel, or a seccomp profile, has refused the system call.
static MISSING: AtomicBool = AtomicBool::new(false);

/// Reads attribute `key` of entry `name` of a directory into `value` and returns its length. Does not follow symbolic links.
///
/// # Errors
/// Errors from lgetxattr(2).
pub(super) fn of_entry(
    directory: BorrowedFd<'_>,
    name: &CStr,
    key: &CStr,
    value: &mut [u8],
) -> Result<usize, Errno> {
    if !MISSING.load(Ordering::Relaxed) {
        match getxattrat(directory, name, key, value) {
            // Neither is a possible result of reading an attribute.
            Err(Errno::NOSYS | Errno::PERM) => MISSING.store(true, Ordering::Relaxed),
            result => return result,
        }
    }
    through_proc(directory, name, key, value)
}

fn getxattrat(directory: BorrowedFd<'_>, name: &CStr, key: &CStr, value: &mut [u8]) -> Result<usize, Errno> {
    let args = Args {
        value: value.as_mut_ptr() as u64,
        size: u32::try_from(value.len()).map_err(|_| Errno::TOOBIG)?,
        flags: 0,
    };
    // SAFETY: both strings end with a zero byte, `args` has the layout that the kernel expects and points to `value`, of which
    // at most `size` bytes are written; all of them outlive the call.
    let result = unsafe {
        libc::syscall(
            SYS_GETXATTRAT,
            directory.as_raw_fd(),
            name.as_ptr(),
            libc::AT_SYMLINK_NOFOLLOW,
            key.as_ptr(),
            &raw const args,
            size_of::<Args>(),
        )
    };
    usize::try_from(result).map_err(|_| {
        let error = std::io::Error::last_os_error();
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    })
}

/// Fallback for older kernels: looks the attribute up by path, which costs several times as much.
fn through_proc(
    directory: BorrowedFd<'_>,
    name: &CStr,
    key: &CStr,
    value: &mut [u8],
) -> Result<usize, Errno> {
    let path = [path::proc_path(directory).as_bytes(), b"/", name.to_bytes()].concat();
    rustix::fs::lgetxattr(path, key, value)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn both_xattr_read_paths_return_the_same_results() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("file");
        std::fs::write(&path, b"").expect("written");
        std::os::unix::fs::symlink("file", scratch.path().join("link")).expect("linked");
        let directory = std::fs::File::open(scratch.path()).expect("open");
        let key = c"user.forebay.test";
        rustix::fs::setxattr(&path, key, b"some value", rustix::fs::XattrFlags::empty()).expect("set");
        for read in [of_entry, through_proc] {
            let mut value = [0; 32];
            let length = read(directory.as_fd(), c"file", key, &mut value).expect("read");
            assert_eq!(&value[..length], b"some value");
            let fails = |name, key, value: &mut [u8]| {
                read(directory.as_fd(), name, key, value).expect_err("it fails")
            };
            assert_eq!(fails(c"file", c"user.forebay.other", &mut value), Errno::NODATA);
            assert_eq!(fails(c"nothing", key, &mut value), Errno::NOENT);
            assert_eq!(fails(c"file", key, &mut [0; 3]), Errno::RANGE);
            assert_eq!(fails(c"link", key, &mut value), Errno::NODATA, "the link itself has none");
        }
    }
}
