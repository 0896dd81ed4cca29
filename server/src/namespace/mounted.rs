//! Finds what is mounted at a pool's directory, even if its file system was shut down and answers everything with errors.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::mount::UnmountFlags;

use crate::limits::UNMOUNT_TIME_MAX;

/// Interval between two attempts to unmount.
const TRY_AGAIN: Duration = Duration::from_millis(100);

/// Device number of the file system that is mounted at this directory itself. It is read from the kernel's list of mounts,
/// because a file system that was shut down refuses even stat.
pub(crate) fn mounted_device(at: &Path) -> Option<(u32, u32)> {
    let at = at.parent()?.canonicalize().ok()?.join(at.file_name()?);
    listed(&fs::read("/proc/self/mountinfo").ok()?, &at)
}

/// The last mount at a place is the visible one (proc(5): the third field is the device, the fifth the place).
fn listed(mounts: &[u8], at: &Path) -> Option<(u32, u32)> {
    let device = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ');
        let device = std::str::from_utf8(fields.nth(2)?).ok()?;
        if unescape(fields.nth(1)?) != at.as_os_str().as_bytes() {
            return None;
        }
        let (major, minor) = device.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    mounts.split(|byte| *byte == b'\n').filter_map(device).next_back()
}

/// Spaces, tabs, newlines and backslashes are written as three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let escaped = (*first == b'\\').then(|| after.get(..3)).flatten();
        let digits = escaped.and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &after[3..];
            }
            None => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}

/// Whether the file system there was shut down, by us or by XFS itself: XFS then answers everything with EIO.
pub(crate) fn has_ended(at: &Path) -> bool {
    fs::metadata(at).is_err_and(|error| error.raw_os_error() == Some(libc::EIO))
}

/// Unmounts a file system that a process may still use while it ends.
pub(crate) fn unmount_patiently(at: &Path) -> io::Result<()> {
    let until = Instant::now() + UNMOUNT_TIME_MAX;
    loop {
        match rustix::mount::unmount(at, UnmountFlags::empty()) {
            Err(rustix::io::Errno::BUSY) if Instant::now() < until => std::thread::sleep(TRY_AGAIN),
            result => return result.map_err(Into::into),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"22 1 254:1 / / rw shared:1 - ext4 /dev/root rw\n\
        31 22 259:3 / /srv/pool rw,nosuid - xfs /dev/nvme0n1 rw,prjquota\n\
        32 31 0:44 /x /srv/pool/b rw - tmpfs none rw\n\
        33 22 8:1 / /srv/a\\040b rw - xfs /dev/sda1 rw\n\
        34 22 8:2 / /srv/twice rw - xfs /dev/sda2 rw\n\
        35 34 8:3 / /srv/twice rw - xfs /dev/sda3 rw\n";

    #[test]
    fn last_listed_mount_of_a_directory_is_used() {
        let listed = |at| listed(MOUNTS, Path::new(at));
        assert_eq!(listed("/srv/pool"), Some((259, 3)));
        assert_eq!(listed("/srv/twice"), Some((8, 3)));
        assert_eq!(listed("/srv/a b"), Some((8, 1)));
        for nothing in ["/srv", "/srv/pool/c", "/srv/a\\040b"] {
            assert_eq!(listed(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn malformed_mountinfo_lines_are_ignored() {
        for line in ["", "1", "1 2 3", "1 2 8:1", "1 2 8 / /p rw", "1 2 a:b / /p rw"] {
            assert_eq!(listed(line.as_bytes(), Path::new("/p")), None, "{line}");
        }
        assert_eq!(unescape(b"\\04 \\999 \\"), b"\\04 \\999 \\");
    }

    #[test]
    fn directory_without_a_mount_has_no_device() {
        let pool = tempfile::tempdir().expect("tmp");
        assert_eq!(mounted_device(pool.path()), None);
        assert_eq!(mounted_device(Path::new("/nonexistent/pool")), None);
        assert!(mounted_device(Path::new("/proc")).is_some());
        assert!(!has_ended(pool.path()) && !has_ended(Path::new("/nonexistent/pool")));
    }
}
