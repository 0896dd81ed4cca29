//! Changes names by handle, and makes them durable.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, PoisonError};
use std::time::SystemTime;

use forebay_smb::fs::RelPath;
use forebay_smb::status::NtStatus;
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::name_locks::NamesHeld;
use super::path::{Place, current, directory, place};
use super::{OpenFile, attrs, descriptors};
use crate::backend::errno::status;
use crate::limits::RACE_ATTEMPTS_MAX;

/// Returns where `file` is now: the name under which the kernel has it or, failing that, the name under which it was opened.
/// `None` if neither refers to it any more.
fn locate(file: &OpenFile) -> Result<Option<Place>, NtStatus> {
    let last = file.path.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let candidates = [current(&file.volume, file.fd.as_fd()), Some(last.as_str().as_bytes().to_vec())];
    for path in candidates.into_iter().flatten().filter(|path| !path.is_empty()) {
        match place(&file.volume, &path) {
            Ok(found) if is_at(file, &found)? => return Ok(Some(found)),
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::NAMETOOLONG) => {}
            Err(errno) => return Err(status(errno)),
        }
    }
    Ok(None)
}

/// Whether the name at `place` refers to `file`.
fn is_at(file: &OpenFile, place: &Place) -> Result<bool, NtStatus> {
    match attrs::key_of_entry(place.parent.as_fd(), &place.name) {
        Ok((key, _)) => Ok(key == file.key),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::NAMETOOLONG) => Ok(false),
        Err(errno) => Err(status(errno)),
    }
}

/// A name of a file, which no other client of the volume can change while this exists.
struct Held<'a> {
    place: Place,
    _names: NamesHeld<'a>,
}

/// Looks up and locks the file's name, together with the names in the directory `also`. `None` if the file has no name.
fn hold<'a>(file: &'a OpenFile, also: Option<&OwnedFd>) -> Result<Option<Held<'a>>, NtStatus> {
    let also = also.map(|fd| attrs::key_of(fd.as_fd())).transpose().map_err(status)?;
    for _ in 0..RACE_ATTEMPTS_MAX {
        let Some(place) = locate(file)? else { return Ok(None) };
        let parent = attrs::key_of(place.parent.as_fd()).map_err(status)?;
        let names = match also {
            Some(also) => file.volume.names.of_both(parent, also),
            None => file.volume.names.of(parent),
        };
        // It was looked up without the lock: it may have been renamed in between.
        if is_at(file, &place)? {
            return Ok(Some(Held { place, _names: names }));
        }
    }
    Err(NtStatus::SHARING_VIOLATION)
}

/// Removes the file's name; a name that is already gone is not an error.
pub(super) fn unlink(file: &OpenFile) -> Result<(), NtStatus> {
    let Some(Held { place, _names }) = hold(file, None)? else { return Ok(()) };
    let flags = if file.directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    match rustix::fs::unlinkat(&place.parent, place.name.as_slice(), flags) {
        Ok(()) => {
            *file.removed_from.lock().unwrap_or_else(PoisonError::into_inner) = Some(place.parent);
            Ok(())
        }
        Err(Errno::NOENT) => Ok(()),
        // Some file systems return EEXIST.
        Err(Errno::EXIST) => Err(NtStatus::DIRECTORY_NOT_EMPTY),
        Err(errno) => Err(status(errno)),
    }
}

/// Makes the removal of the name by [`unlink`] durable.
pub(super) fn settle_removal(file: &OpenFile) -> Result<(), NtStatus> {
    let parent = file.removed_from.lock().unwrap_or_else(PoisonError::into_inner).take();
    parent.map_or(Ok(()), |parent| sync_directory(&parent))
}

/// Renames the file durably: Linux assumes that a rename is durable, and sends nothing when a program then syncs the directory,
/// as it does after it has moved a checkpoint into place.
pub(super) fn rename(file: &OpenFile, to: &RelPath, replace: bool) -> Result<(), NtStatus> {
    if to.is_root() {
        return Err(NtStatus::ACCESS_DENIED);
    }
    let target = directory(&file.volume, &to.parent())?;
    let held = hold(file, Some(&target))?.ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
    let from = &held.place;
    descriptors::check_name(file, target.as_fd(), to.name())?;
    match attrs::key_of_entry(target.as_fd(), to.name().as_bytes()) {
        Ok((key, _)) if key == file.key => {
            let same_name = from.name == to.name().as_bytes()
                && attrs::same(from.parent.as_fd(), target.as_fd()).map_err(status)?;
            if same_name {
                return Ok(());
            }
            if !replace {
                return Err(NtStatus::OBJECT_NAME_COLLISION);
            }
            // Another link to the same file: rename(2) would leave both.
            rustix::fs::unlinkat(&from.parent, from.name.as_slice(), AtFlags::empty()).map_err(status)?;
            renamed(file, to);
            sync_directory(&from.parent)?;
            drop(held);
            return settle_name(file);
        }
        Ok(_) if !replace => return Err(NtStatus::OBJECT_NAME_COLLISION),
        // [MS-FSA] 2.1.5.15.11: a directory neither replaces an entry nor is replaced.
        Ok((_, directory)) if directory || file.directory => return Err(NtStatus::ACCESS_DENIED),
        Ok(_) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(status(errno)),
    }
    let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    let name = to.name().as_bytes();
    match rustix::fs::renameat_with(&from.parent, from.name.as_slice(), &target, name, flags) {
        // A file system without NOREPLACE, and the target was just free; or a directory moved into itself.
        Err(Errno::INVAL) if !replace => {
            rustix::fs::renameat(&from.parent, from.name.as_slice(), &target, name).map_err(|errno| {
                match errno {
                    Errno::INVAL => NtStatus::ACCESS_DENIED,
                    errno => status(errno),
                }
            })?;
        }
        Err(Errno::INVAL) => return Err(NtStatus::ACCESS_DENIED),
        result => result.map_err(status)?,
    }
    renamed(file, to);
    drop(held);
    settle_name(file)
}

fn renamed(file: &OpenFile, to: &RelPath) {
    file.path.lock().unwrap_or_else(PoisonError::into_inner).clone_from(to);
    file.name_unsynced.store(true, Ordering::Release);
}

/// Adds a name durably.
pub(super) fn link(file: &OpenFile, to: &RelPath, replace: bool) -> Result<(), NtStatus> {
    if file.directory {
        return Err(NtStatus::FILE_IS_A_DIRECTORY);
    }
    if to.is_root() {
        return Err(NtStatus::ACCESS_DENIED);
    }
    let target = directory(&file.volume, &to.parent())?;
    let held = hold(file, Some(&target))?.ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
    let from = &held.place;
    descriptors::check_name(file, target.as_fd(), to.name())?;
    let name = to.name().as_bytes();
    match attrs::key_of_entry(target.as_fd(), name) {
        Ok((key, _)) if replace && key == file.key => return Ok(()),
        Ok(_) if !replace => return Err(NtStatus::OBJECT_NAME_COLLISION),
        Ok((_, true)) => return Err(NtStatus::ACCESS_DENIED),
        Ok(_) => link_over(file, from, &target, name)?,
        Err(Errno::NOENT) => {
            rustix::fs::linkat(&from.parent, from.name.as_slice(), &target, name, AtFlags::empty())
                .map_err(status)?;
        }
        Err(errno) => return Err(status(errno)),
    }
    drop(held);
    sync_directory(&target)
}

/// Atomically replaces the name of another file by a new name of this file, so that the name always exists: link(2) replaces
/// nothing, rename(2) does.
fn link_over(file: &OpenFile, from: &Place, target: &OwnedFd, name: &[u8]) -> Result<(), NtStatus> {
    let aside = file.volume.aside.as_ref().unwrap_or(target);
    let temporary = temporary(TEMPORARY);
    rustix::fs::linkat(&from.parent, from.name.as_slice(), aside, &temporary, AtFlags::empty())
        .map_err(status)?;
    rustix::fs::renameat(aside, &temporary, target, name).map_err(|errno| {
        let _ = rustix::fs::unlinkat(aside, &temporary, AtFlags::empty());
        status(errno)
    })
}

/// Returns a unique temporary name. It does not collide with leftovers of a killed server, even if every server has the same
/// process id, as in a container.
pub(super) fn temporary(prefix: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static STARTED: LazyLock<u128> = LazyLock::new(|| {
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos())
    });
    format!("{prefix}{:x}-{}", *STARTED, COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Prefix of temporary names of links.
const TEMPORARY: &str = ".forebay-link-";

/// Makes data and attributes durable and, if this handle created or renamed the file, its name. SMB clients have no reliable
/// way to sync a directory, so the name is part of the file's flush.
pub(super) fn flush(file: &OpenFile) -> Result<(), NtStatus> {
    // The kernel reports a lost write only once per descriptor.
    if file.sync_failed.load(Ordering::Acquire) {
        return Err(NtStatus::UNEXPECTED_IO_ERROR);
    }
    rustix::fs::fsync(&file.fd).map_err(|errno| {
        file.set_sync_failed();
        status(errno)
    })?;
    settle_name(file)
}

/// Makes the name durable if this handle created or changed it.
fn settle_name(file: &OpenFile) -> Result<(), NtStatus> {
    if file.name_unsynced.swap(false, Ordering::AcqRel) {
        sync_name(file).inspect_err(|_| file.name_unsynced.store(true, Ordering::Release))?;
    }
    Ok(())
}

fn sync_name(file: &OpenFile) -> Result<(), NtStatus> {
    // Unlinked in the meantime: there is no name to keep.
    let Some(place) = locate(file)? else { return Ok(()) };
    sync_directory(&place.parent)
}

/// Syncs a directory. The descriptor may be O_PATH, so the directory is opened again.
fn sync_directory(directory: &OwnedFd) -> Result<(), NtStatus> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = match rustix::fs::openat(directory, c".", flags, Mode::empty()) {
        Ok(open) => open,
        // The directory itself was removed: the operation that removes it makes that durable.
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(status(errno)),
    };
    rustix::fs::fsync(open).map_err(status)
}

#[cfg(test)]
mod tests {
    use forebay_smb::fs::{FsHandle, FsOpKind, FsReply, ObjectKind, OpenMode, OpenRequest};

    use super::*;
    use crate::backend;
    use crate::backend::directory::{Volume, file};
    use crate::buffers::BufferPool;

    fn open(volume: &FsHandle) -> FsHandle {
        let request = OpenRequest {
            path: RelPath::new("file").expect("a path"),
            mode: OpenMode::Existing,
            kind: ObjectKind::File,
            read: true,
            write: true,
            write_through: false,
            attributes: 0,
            allocation_size: 0,
            ownership: None,
            stream: None,
            descriptor: None,
            checked: true,
        };
        let operation = FsOpKind::Open { volume: volume.clone(), request };
        match backend::execute(operation, &BufferPool::default()) {
            Ok(FsReply::Opened(opened)) => opened.handle,
            _ => panic!("it is there"),
        }
    }

    /// The kernel reports a lost write once per descriptor, and the next fsync succeeds.
    #[test]
    fn every_flush_of_a_handle_fails_after_the_first_failure() {
        let scratch = tempfile::tempdir().expect("a directory");
        std::fs::write(scratch.path().join("file"), "data").expect("written");
        let volume = Volume::open(scratch.path()).expect("a volume").handle();
        let flush = |handle: &FsHandle| {
            let flushed =
                backend::execute(FsOpKind::Flush { handle: handle.clone() }, &BufferPool::default());
            flushed.map(drop)
        };
        let [failed, other] = [open(&volume), open(&volume)];
        assert_eq!(flush(&failed), Ok(()));
        file(&failed).expect("a file").set_sync_failed();
        for _ in 0..2 {
            assert_eq!(flush(&failed), Err(NtStatus::UNEXPECTED_IO_ERROR));
        }
        // The kernel reports to each descriptor only what was lost since it was opened.
        assert_eq!(flush(&other), Ok(()));
        assert_eq!(flush(&open(&volume)), Ok(()));
    }
}
