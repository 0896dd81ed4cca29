//! Resolves paths, and only below a volume's root.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use forebay_smb::fs::RelPath;
use forebay_smb::short_name;
use forebay_smb::status::NtStatus;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{Volume, dirs};
use crate::backend::errno::status;
use crate::limits::RACE_ATTEMPTS_MAX;

/// How every path is resolved. O_NOFOLLOW is omitted on purpose: with it, the kernel opens the symlink itself (O_PATH) or
/// returns ENOTDIR; without it, every symlink returns ELOOP. Mounts below a volume are excluded: they would escape its quota.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// `openat2` below the volume's root.
pub(super) fn open_below(volume: &Volume, path: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { b"." } else { path };
    let mut attempts = 0;
    loop {
        #[cfg(test)]
        count_call();
        match rustix::fs::openat2(
            &volume.root,
            OsStr::from_bytes(path),
            flags | OFlags::CLOEXEC,
            mode,
            BENEATH,
        ) {
            // RESOLVE_BENEATH returns EAGAIN if a concurrent rename might have moved the path out of the tree.
            Err(Errno::AGAIN) if attempts < RACE_ATTEMPTS_MAX => attempts += 1,
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Like [`open_below`], from the kernel's caches alone. `None` if the caches cannot answer, or if the device might answer
/// differently. A cached negative entry is as reliable as the file system.
pub(super) fn open_cached(volume: &Volume, path: &[u8], flags: OFlags) -> Option<Result<OwnedFd, Errno>> {
    let path = if path.is_empty() { b"." } else { path };
    let how = BENEATH | ResolveFlags::CACHED;
    #[cfg(test)]
    count_call();
    let flags = flags | OFlags::CLOEXEC;
    match rustix::fs::openat2(&volume.root, OsStr::from_bytes(path), flags, Mode::empty(), how) {
        Ok(fd) => Some(Ok(fd)),
        Err(errno @ (Errno::NOENT | Errno::NOTDIR | Errno::ISDIR)) => Some(Err(errno)),
        Err(_) => None,
    }
}

/// Opens the directory at `path`, to look up names in it.
pub(super) fn directory(volume: &Volume, path: &RelPath) -> Result<OwnedFd, NtStatus> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    open_below(volume, path.as_str().as_bytes(), flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT | Errno::NOTDIR => NtStatus::OBJECT_PATH_NOT_FOUND,
        errno => status(errno),
    })
}

/// Returns the status for `errno` from `openat2` of `path`: distinguishes a missing file from a missing parent directory.
pub(super) fn error(volume: &Volume, path: &RelPath, errno: Errno) -> NtStatus {
    match parent_in_doubt(path, errno) {
        Some(parent) => directory(volume, &parent).err().unwrap_or_else(|| status(errno)),
        None => status(errno),
    }
}

/// Like [`error`], from the kernel's caches alone; `None` if they cannot answer.
pub(super) fn error_cached(volume: &Volume, path: &RelPath, errno: Errno) -> Option<NtStatus> {
    let Some(parent) = parent_in_doubt(path, errno) else { return Some(status(errno)) };
    match open_cached(volume, parent.as_str().as_bytes(), OFlags::PATH | OFlags::DIRECTORY)? {
        Ok(_) => Some(status(errno)),
        Err(Errno::NOENT | Errno::NOTDIR) => Some(NtStatus::OBJECT_PATH_NOT_FOUND),
        Err(_) => None,
    }
}

/// Returns the parent of `path` if it may be the missing part. The root always exists.
fn parent_in_doubt(path: &RelPath, errno: Errno) -> Option<RelPath> {
    let is_missing = matches!(errno, Errno::NOENT | Errno::NOTDIR);
    is_missing.then(|| path.parent()).filter(|parent| !parent.is_root())
}

/// The current location of an open file's name.
pub(super) struct Place {
    /// The directory that holds it.
    pub(super) parent: OwnedFd,
    /// Its name there.
    pub(super) name: Vec<u8>,
}

/// Returns the path below the volume's root where `fd` was last seen under any name. The kernel tracks renames of the file and
/// of the directories above it. `None` without /proc or if the file is outside of the volume.
pub(super) fn current(volume: &Volume, fd: BorrowedFd<'_>) -> Option<Vec<u8>> {
    let root = rustix::fs::readlink(proc_path(volume.root.as_fd()), Vec::new()).ok()?.into_bytes();
    let path = rustix::fs::readlink(proc_path(fd), Vec::new()).ok()?.into_bytes();
    let below = match root.as_slice() {
        b"/" => path.strip_prefix(b"/")?,
        root => path.strip_prefix(root)?.strip_prefix(b"/")?,
    };
    Some(below.to_vec())
}

/// The path of an open file of this process in /proc.
pub(super) fn proc_path(fd: BorrowedFd<'_>) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Opens the parent directory of `path` (bytes below the root), and splits off the name.
pub(super) fn place(volume: &Volume, path: &[u8]) -> Result<Place, Errno> {
    let split = path.iter().rposition(|&b| b == b'/');
    let (parent, name) = split.map_or((&b""[..], path), |at| (&path[..at], &path[at + 1..]));
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let parent = open_below(volume, parent, flags, Mode::empty())?;
    Ok(Place { parent, name: name.to_vec() })
}

/// Replaces short names in the path by long names, as [`forebay_smb::fs::FsOpKind::LongPath`] requires.
pub(super) fn long(volume: &Volume, path: &RelPath) -> Result<RelPath, NtStatus> {
    let mut long = String::with_capacity(path.as_str().len());
    for (at, component) in path.as_str().split('/').enumerate() {
        let may_be_short = short_name::may_be_made(component);
        let name = if may_be_short { name_behind(volume, &long, component)? } else { None };
        if at > 0 {
            long.push('/');
        }
        long.push_str(name.as_deref().unwrap_or(component));
    }
    RelPath::new(&long)
}

/// Returns the name of the one file with this short name; `None` if a file has exactly this name, or if not exactly one file
/// matches.
fn name_behind(volume: &Volume, directory: &str, short: &str) -> Result<Option<String>, NtStatus> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    // Opening the file reports errors in its path.
    let Ok(directory) = open_below(volume, directory.as_bytes(), flags, Mode::empty()) else {
        return Ok(None);
    };
    match rustix::fs::statat(&directory, short, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => dirs::name_of_short(directory.as_fd(), short),
        _ => Ok(None),
    }
}

#[cfg(test)]
thread_local! {
    static CALLS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
fn count_call() {
    CALLS.set(CALLS.get() + 1);
}

#[cfg(test)]
mod tests {
    use forebay_smb::fs::{FsHandle, FsOpKind, FsResult, ObjectKind, OpenMode, OpenRequest};

    use super::*;
    use crate::backend;
    use crate::buffers::BufferPool;

    /// Executes an operation as an event loop does. Returns the result, the number of `openat2` calls, and whether it needed a
    /// thread of a lane.
    fn run(operation: FsOpKind) -> (FsResult, usize, bool) {
        CALLS.set(0);
        let (result, elsewhere) = match backend::execute_cached(operation) {
            Ok(result) => (result, false),
            Err(operation) => (backend::execute(operation, &BufferPool::default()), true),
        };
        (result, CALLS.get(), elsewhere)
    }

    fn open(volume: &FsHandle, path: &str, kind: ObjectKind) -> FsOpKind {
        let request = OpenRequest {
            path: RelPath::new(path).expect("a path"),
            mode: OpenMode::Existing,
            kind,
            read: true,
            write: false,
            write_through: false,
            attributes: 0,
            allocation_size: 0,
            ownership: None,
            stream: None,
            descriptor: None,
            checked: true,
        };
        FsOpKind::Open { volume: volume.clone(), request }
    }

    #[test]
    fn lookup_of_a_cached_missing_name_needs_no_other_thread() {
        let scratch = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(scratch.path().join("a/b")).expect("free");
        std::fs::write(scratch.path().join("file"), "").expect("free");
        let volume = Volume::open(scratch.path()).expect("a volume").handle();
        let stat = |path: &str| {
            let path = RelPath::new(path).expect("a path");
            FsOpKind::StatPath { volume: volume.clone(), path }
        };
        let (missing, no_path) = (NtStatus::OBJECT_NAME_NOT_FOUND, NtStatus::OBJECT_PATH_NOT_FOUND);
        for (path, calls, expected) in
            [("missing", 1, missing), ("a/b/missing", 2, missing), ("a/missing/name", 2, no_path)]
        {
            for operation in [
                &|| open(&volume, path, ObjectKind::Any),
                &|| open(&volume, path, ObjectKind::Directory),
                &|| stat(path),
            ] as [&dyn Fn() -> FsOpKind; 3]
            {
                // The first one queries the file system, and the kernel caches the result.
                let (result, _, _) = run(operation());
                assert_eq!(result.err(), Some(expected), "{path}");
                let (result, took, elsewhere) = run(operation());
                assert_eq!((result.err(), took, elsewhere), (Some(expected), calls, false), "{path}");
            }
        }
        // A path that was never looked up: one call by the loop, one by the thread, and none for the parent, which is the root.
        let (result, took, elsewhere) = run(stat("never asked for"));
        assert_eq!((result.err(), took, elsewhere), (Some(missing), 2, true));
        // A file that is created after it was missing is found.
        std::fs::write(scratch.path().join("a/b/missing"), "").expect("free");
        assert!(run(stat("a/b/missing")).0.is_ok());
        assert_eq!(
            run(open(&volume, "file", ObjectKind::Directory)).0.err(),
            Some(NtStatus::NOT_A_DIRECTORY)
        );
    }
}
