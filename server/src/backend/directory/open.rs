//! Opens and creates files and directories.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use forebay_smb::fs::{FsHandle, ObjectKind, OpenMode, OpenRequest, Opened, RelPath, Stat};
use forebay_smb::status::NtStatus;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::durability::Promise;
use super::{OpenFile, Volume, attrs, descriptors, dirs, path, streams};
use crate::backend::errno::status;
use crate::lanes::Descriptor;
use crate::limits::RACE_ATTEMPTS_MAX;

pub(super) const FILE_MODE: Mode = Mode::from_raw_mode(0o666);
pub(super) const DIRECTORY_MODE: Mode = Mode::from_raw_mode(0o777);

pub(super) fn open(volume: &Arc<Volume>, request: &OpenRequest) -> Result<Opened, NtStatus> {
    if let Some(stream) = &request.stream {
        return streams::open(volume, request, stream);
    }
    let (fd, created) = find_or_make(volume, request)?;
    finish(volume, request, fd, created)
}

/// Opens a file that is in the kernel's caches, or fails if the caches already determine the error; `None` if that takes more.
pub(super) fn open_cached(volume: &Arc<Volume>, request: &OpenRequest) -> Option<Result<Opened, NtStatus>> {
    let asks_device = request.stream.is_some() || volume.secured.load(Ordering::Acquire);
    if request.mode == OpenMode::New || asks_device {
        return None;
    }
    let kind = if request.kind == ObjectKind::Directory { OFlags::DIRECTORY } else { access(request) };
    let name = request.path.as_str().as_bytes();
    let found = match path::open_cached(volume, name, FIND | kind)? {
        Err(Errno::ISDIR) if request.kind == ObjectKind::Any => {
            path::open_cached(volume, name, FIND | OFlags::DIRECTORY)?
        }
        found => found,
    };
    match found {
        Ok(fd) => Some(finish(volume, request, fd, false)),
        Err(Errno::NOENT) if request.mode == OpenMode::Either => None,
        Err(errno) => path::error_cached(volume, &request.path, errno).map(Err),
    }
}

fn finish(
    volume: &Arc<Volume>,
    request: &OpenRequest,
    fd: OwnedFd,
    created: bool,
) -> Result<Opened, NtStatus> {
    let mut fd = Descriptor::new(fd);
    let stat = if created { attrs::stat_new(fd.as_fd()) } else { attrs::stat_fd(volume, fd.as_fd()) };
    let stat = stat.map_err(status)?.ok_or(NtStatus::ACCESS_DENIED)?;
    match request.kind {
        ObjectKind::File if stat.directory => return Err(NtStatus::FILE_IS_A_DIRECTORY),
        ObjectKind::Directory if !stat.directory => return Err(NtStatus::NOT_A_DIRECTORY),
        _ => {}
    }
    if stat.directory {
        fd.set_directory();
    }
    let file = Arc::new(OpenFile {
        fd,
        volume: Arc::clone(volume),
        key: stat.key,
        directory: stat.directory,
        write_through: request.write_through || volume.promise == Promise::AtReply,
        checked: request.checked,
        path: Mutex::new(request.path.clone()),
        name_unsynced: AtomicBool::new(created),
        removed_from: Mutex::default(),
        sync_failed: AtomicBool::new(false),
        position: Mutex::new(dirs::Position::default()),
        direct: OnceLock::new(),
        mapped: Mutex::default(),
    });
    let stat = if created { furnish(&file, request, stat)? } else { stat };
    let descriptors = descriptors::around(volume, file.as_fd(), &request.path).inspect_err(|_| {
        if created {
            // Report the first error, and leave nothing behind from a failed open.
            let _ = super::names::unlink(&file);
        }
    })?;
    Ok(Opened { handle: FsHandle(file), created, stat, file: None, descriptors })
}

/// Gives a new file the properties that its creator requested, and returns its attributes (`stat` before that). If it fails,
/// the file is removed.
fn furnish(file: &Arc<OpenFile>, request: &OpenRequest, stat: Stat) -> Result<Stat, NtStatus> {
    let allocates = request.allocation_size > 0 && !file.directory;
    if request.ownership.is_none() && !allocates && !attrs::keeps_new(file, request.attributes) {
        return Ok(stat);
    }
    let owned = match request.ownership {
        Some(asked) => path::directory(&file.volume, &request.path.parent())
            .and_then(|directory| attrs::own_new(file, directory.as_fd(), asked)),
        None => Ok(()),
    };
    let furnished = owned.and_then(|()| attrs::set_new(file, request.attributes)).and_then(|()| {
        if allocates {
            match rustix::fs::fallocate(&file.fd, FallocateFlags::KEEP_SIZE, 0, request.allocation_size) {
                Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
                Err(errno) => return Err(status(errno)),
            }
        }
        attrs::stat(file)
    });
    if furnished.is_err() {
        // Report the first error.
        let _ = super::names::unlink(file);
    }
    furnished
}

fn find_or_make(volume: &Volume, request: &OpenRequest) -> Result<(OwnedFd, bool), NtStatus> {
    for _ in 0..RACE_ATTEMPTS_MAX {
        if request.mode != OpenMode::New {
            match find(volume, request) {
                Ok(fd) => return Ok((fd, false)),
                Err(Errno::NOENT) if request.mode == OpenMode::Either => {}
                Err(errno) => return Err(path::error(volume, &request.path, errno)),
            }
        }
        match make(volume, request) {
            Ok(fd) => return Ok((fd, true)),
            // Another process or client created it concurrently: the next attempt opens it, or creates it if it is deleted again.
            Err(NtStatus::OBJECT_NAME_COLLISION) if request.mode == OpenMode::Either => {}
            Err(status) => return Err(status),
        }
    }
    Err(NtStatus::SHARING_VIOLATION)
}

pub(super) fn access(request: &OpenRequest) -> OFlags {
    match (request.read, request.write) {
        (true, true) => OFlags::RDWR,
        (false, true) => OFlags::WRONLY,
        // Even without access to data, attributes need a descriptor that is more than O_PATH.
        (_, false) => OFlags::RDONLY,
    }
}

/// O_NONBLOCK: a pipe that another program created must not block this thread before it is recognized as a pipe.
const FIND: OFlags = OFlags::NOCTTY.union(OFlags::NONBLOCK);

fn find(volume: &Volume, request: &OpenRequest) -> Result<OwnedFd, Errno> {
    let flags = FIND;
    let name = request.path.as_str().as_bytes();
    match request.kind {
        ObjectKind::Directory => path::open_below(volume, name, flags | OFlags::DIRECTORY, Mode::empty()),
        ObjectKind::File => path::open_below(volume, name, flags | access(request), Mode::empty()),
        ObjectKind::Any => match path::open_below(volume, name, flags | access(request), Mode::empty()) {
            Err(Errno::ISDIR) => path::open_below(volume, name, flags | OFlags::DIRECTORY, Mode::empty()),
            result => result,
        },
    }
}

fn make(volume: &Volume, request: &OpenRequest) -> Result<OwnedFd, NtStatus> {
    if request.path.is_root() {
        return Err(NtStatus::OBJECT_NAME_COLLISION);
    }
    if let Some(made) = descriptors::make(volume, request)? {
        return Ok(made);
    }
    if request.kind != ObjectKind::Directory {
        let flags = access(request) | OFlags::CREATE | OFlags::EXCL;
        return path::open_below(volume, request.path.as_str().as_bytes(), flags, FILE_MODE)
            .map_err(|errno| path::error(volume, &request.path, errno));
    }
    let parent = path::directory(volume, &request.path.parent())?;
    rustix::fs::mkdirat(&parent, request.path.name(), DIRECTORY_MODE).map_err(status)?;
    find(volume, request).map_err(|errno| path::error(volume, &request.path, errno))
}

/// Opens a writable descriptor of the same file.
pub(super) fn reopen_for_writing(file: &OpenFile) -> Result<OwnedFd, NtStatus> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    rustix::fs::open(path::proc_path(file.as_fd()), flags, Mode::empty()).map_err(status)
}

/// Like [`stat_path`], from the kernel's caches alone.
pub(super) fn stat_path_cached(volume: &Volume, path: &RelPath) -> Option<Result<Stat, NtStatus>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW;
    match path::open_cached(volume, path.as_str().as_bytes(), flags)? {
        Ok(fd) => attrs::stat_fd(volume, fd.as_fd()).ok()?.map(Ok),
        Err(errno) => path::error_cached(volume, path, errno).map(Err),
    }
}

pub(super) fn stat_path(volume: &Volume, path: &RelPath) -> Result<Stat, NtStatus> {
    let fd =
        path::open_below(volume, path.as_str().as_bytes(), OFlags::PATH | OFlags::NOFOLLOW, Mode::empty())
            .map_err(|errno| path::error(volume, path, errno))?;
    attrs::stat_fd(volume, fd.as_fd()).map_err(status)?.ok_or(NtStatus::ACCESS_DENIED)
}
