//! Changing names by handle, and making them durable.

use std::os::fd::AsFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use forebay_smb::fs::RelPath;
use forebay_smb::status::NtStatus;
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::path::{Place, current, directory, open_below, place};
use super::{OpenFile, attrs};
use crate::backend::errno::status;

/// Where `file` is now: the name the kernel knows it by or, without that, the one it was opened by; `None` where
/// neither denotes it any more. To be called, and its answer used, with the volume's `names` held.
fn locate(file: &OpenFile) -> Result<Option<Place>, NtStatus> {
    let last = file.path.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let candidates = [current(&file.volume, file.fd.as_fd()), Some(last.as_str().as_bytes().to_vec())];
    for path in candidates.into_iter().flatten().filter(|path| !path.is_empty()) {
        match place(&file.volume, &path) {
            Ok(found) if matches!(attrs::key_of_entry(found.parent.as_fd(), &found.name), Ok((key, _)) if key == file.key) =>
            {
                return Ok(Some(found));
            }
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::NAMETOOLONG) => {}
            Err(errno) => return Err(status(errno)),
        }
    }
    Ok(None)
}

/// Removes the file's name; one that is gone already is no error.
pub(super) fn unlink(file: &OpenFile) -> Result<(), NtStatus> {
    let _names = file.volume.names.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = locate(file)? else { return Ok(()) };
    let flags = if file.directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    match rustix::fs::unlinkat(&place.parent, place.name.as_slice(), flags) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        // Some file systems say so.
        Err(Errno::EXIST) => Err(NtStatus::DIRECTORY_NOT_EMPTY),
        Err(errno) => Err(status(errno)),
    }
}

/// Gives the file another name, on stable storage: Linux takes it for that and sends nothing when a program then syncs the
/// directory, as it does after it has put a checkpoint in its place.
pub(super) fn rename(file: &OpenFile, to: &RelPath, replace: bool) -> Result<(), NtStatus> {
    if to.is_root() {
        return Err(NtStatus::ACCESS_DENIED);
    }
    let names = file.volume.names.lock().unwrap_or_else(PoisonError::into_inner);
    let from = locate(file)?.ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
    let target = directory(&file.volume, &to.parent())?;
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
            drop(names);
            return settle_name(file);
        }
        Ok(_) if !replace => return Err(NtStatus::OBJECT_NAME_COLLISION),
        // [MS-FSA] 2.1.5.15.11: neither is a directory replaced nor by a directory replaced.
        Ok((_, directory)) if directory || file.directory => return Err(NtStatus::ACCESS_DENIED),
        Ok(_) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(status(errno)),
    }
    let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    let name = to.name().as_bytes();
    match rustix::fs::renameat_with(&from.parent, from.name.as_slice(), &target, name, flags) {
        // A file system without NOREPLACE, whose target was just seen to be free; or a directory moved into itself.
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
    drop(names);
    settle_name(file)
}

fn renamed(file: &OpenFile, to: &RelPath) {
    file.path.lock().unwrap_or_else(PoisonError::into_inner).clone_from(to);
    file.name_unsynced.store(true, Ordering::Release);
}

/// Adds a name.
pub(super) fn link(file: &OpenFile, to: &RelPath, replace: bool) -> Result<(), NtStatus> {
    if file.directory {
        return Err(NtStatus::FILE_IS_A_DIRECTORY);
    }
    if to.is_root() {
        return Err(NtStatus::ACCESS_DENIED);
    }
    let _names = file.volume.names.lock().unwrap_or_else(PoisonError::into_inner);
    let from = locate(file)?.ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
    let target = directory(&file.volume, &to.parent())?;
    let name = to.name().as_bytes();
    match attrs::key_of_entry(target.as_fd(), name) {
        Ok((key, _)) if replace && key == file.key => return Ok(()),
        Ok(_) if !replace => return Err(NtStatus::OBJECT_NAME_COLLISION),
        Ok((_, true)) => return Err(NtStatus::ACCESS_DENIED),
        Ok(_) => rustix::fs::unlinkat(&target, name, AtFlags::empty()).map_err(status)?,
        Err(Errno::NOENT) => {}
        Err(errno) => return Err(status(errno)),
    }
    rustix::fs::linkat(&from.parent, from.name.as_slice(), &target, name, AtFlags::empty())
        .map_err(status)?;
    drop(from);
    let parent = open_directory(file, &to.parent())?;
    rustix::fs::fsync(parent).map_err(status)
}

fn open_directory(file: &OpenFile, path: &RelPath) -> Result<std::os::fd::OwnedFd, NtStatus> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    open_below(&file.volume, path.as_str().as_bytes(), flags, Mode::empty()).map_err(status)
}

/// Puts data, attributes and, where it was made or renamed by this handle, the name on stable storage. SMB clients
/// have no dependable way to sync a directory, so the name is part of the file's flush.
pub(super) fn flush(file: &OpenFile) -> Result<(), NtStatus> {
    // The kernel reports a lost write once per descriptor and then forgets it.
    if file.sync_failed.load(Ordering::Acquire) {
        return Err(NtStatus::UNEXPECTED_IO_ERROR);
    }
    rustix::fs::fsync(&file.fd).map_err(|errno| {
        file.set_sync_failed();
        status(errno)
    })?;
    settle_name(file)
}

/// Puts the name on stable storage, where this handle made or changed it.
fn settle_name(file: &OpenFile) -> Result<(), NtStatus> {
    if file.name_unsynced.swap(false, Ordering::AcqRel) {
        sync_name(file).inspect_err(|_| file.name_unsynced.store(true, Ordering::Release))?;
    }
    Ok(())
}

fn sync_name(file: &OpenFile) -> Result<(), NtStatus> {
    let parent = {
        let _names = file.volume.names.lock().unwrap_or_else(PoisonError::into_inner);
        // Unlinked meanwhile: there is no name to keep.
        let Some(place) = locate(file)? else { return Ok(()) };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(&place.parent, c".", flags, Mode::empty()).map_err(status)?
    };
    rustix::fs::fsync(parent).map_err(status)
}
