//! Resolving paths below a volume's root, and nowhere else.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use forebay_smb::fs::RelPath;
use forebay_smb::status::NtStatus;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::Volume;
use crate::backend::errno::status;
use crate::limits::RACE_ATTEMPTS_MAX;

/// How every path is resolved. O_NOFOLLOW is left out on purpose: with it the kernel opens a symlink itself (O_PATH) or
/// calls it no directory, without it every symlink is ELOOP. Mounts below a volume are no part of it: they would escape its quota.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// `openat2` below the volume's root.
pub(super) fn open_below(volume: &Volume, path: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { b"." } else { path };
    let mut attempts = 0;
    loop {
        match rustix::fs::openat2(
            &volume.root,
            OsStr::from_bytes(path),
            flags | OFlags::CLOEXEC,
            mode,
            BENEATH,
        ) {
            // RESOLVE_BENEATH answers so when a rename anywhere might have moved it out of the tree meanwhile.
            Err(Errno::AGAIN) if attempts < RACE_ATTEMPTS_MAX => attempts += 1,
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// As [`open_below`], from the kernel's caches alone: `None` where anything would have to be waited for, or failed.
pub(super) fn open_cached(volume: &Volume, path: &[u8], flags: OFlags) -> Option<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let how = BENEATH | ResolveFlags::CACHED;
    rustix::fs::openat2(&volume.root, OsStr::from_bytes(path), flags | OFlags::CLOEXEC, Mode::empty(), how)
        .ok()
}

/// The directory at `path`, to look names up in.
pub(super) fn directory(volume: &Volume, path: &RelPath) -> Result<OwnedFd, NtStatus> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    open_below(volume, path.as_str().as_bytes(), flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT | Errno::NOTDIR => NtStatus::OBJECT_PATH_NOT_FOUND,
        errno => status(errno),
    })
}

/// The status for `errno` from `openat2` of `path`: tells a missing file from a missing directory on the way to it.
pub(super) fn error(volume: &Volume, path: &RelPath, errno: Errno) -> NtStatus {
    match errno {
        Errno::NOENT | Errno::NOTDIR if !path.is_root() => match directory(volume, &path.parent()) {
            Ok(_) => status(errno),
            Err(status) => status,
        },
        errno => status(errno),
    }
}

/// Where an open file's name is now.
pub(super) struct Place {
    /// The directory that holds it.
    pub(super) parent: OwnedFd,
    /// Its name there.
    pub(super) name: Vec<u8>,
}

/// Below the volume's root, where `fd` was last seen under any name. The kernel follows renames of the file and of
/// the directories above it; `None` without /proc or where the file is out of the volume.
pub(super) fn current(volume: &Volume, fd: BorrowedFd<'_>) -> Option<Vec<u8>> {
    let root = rustix::fs::readlink(proc_path(volume.root.as_fd()), Vec::new()).ok()?.into_bytes();
    let path = rustix::fs::readlink(proc_path(fd), Vec::new()).ok()?.into_bytes();
    let below = match root.as_slice() {
        b"/" => path.strip_prefix(b"/")?,
        root => path.strip_prefix(root)?.strip_prefix(b"/")?,
    };
    Some(below.to_vec())
}

/// The kernel's name for an open file of this process.
pub(super) fn proc_path(fd: BorrowedFd<'_>) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Opens the directory that `path` (bytes below the root) lies in, and splits its name off.
pub(super) fn place(volume: &Volume, path: &[u8]) -> Result<Place, Errno> {
    let split = path.iter().rposition(|&b| b == b'/');
    let (parent, name) = split.map_or((&b""[..], path), |at| (&path[..at], &path[at + 1..]));
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let parent = open_below(volume, parent, flags, Mode::empty())?;
    Ok(Place { parent, name: name.to_vec() })
}
