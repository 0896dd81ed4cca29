//! Security descriptors of files, each in an extended attribute `user.forebay.security`, as encoded by `forebay_smb::descriptor`.
//!
//! Most volumes have none, so the root of a volume that has some is marked before the first one is stored. Without the mark, no
//! attribute is read.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use forebay_smb::descriptor::{Descriptors, Kept, Owner};
use forebay_smb::fs::{ObjectKind, OpenMode, OpenRequest, RelPath};
use forebay_smb::status::NtStatus;
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, StatxFlags, XattrFlags};
use rustix::io::Errno;
use rustix::path::Arg;

use super::eas::VALUE_BYTES_MAX;
use super::open::{DIRECTORY_MODE, FILE_MODE, access};
use super::{OpenFile, Volume, names, path, xattr};
use crate::backend::errno::status;

const KEY: &CStr = c"user.forebay.security";
/// Attribute of the volume's root: files of the volume have descriptors.
const MARK: &CStr = c"user.forebay.secured";
/// Bytes of a descriptor with about twenty entries.
const SHORT_BYTES: usize = 1024;
/// Prefix of temporary names of files that receive their descriptor before their name.
const TEMPORARY: &str = ".forebay-new-";

/// Whether files of the volume with this root have descriptors.
pub(super) fn marked(root: BorrowedFd<'_>) -> Result<bool, Errno> {
    match rustix::fs::fgetxattr(root, MARK, &mut [0_u8; 0]) {
        Ok(_) => Ok(true),
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Marks the volume durably: without the mark, a descriptor would be ignored after a crash.
fn mark(volume: &Volume) -> Result<(), NtStatus> {
    if volume.secured.load(Ordering::Acquire) {
        return Ok(());
    }
    rustix::fs::fsetxattr(&volume.root, MARK, b"1", XattrFlags::empty()).map_err(status)?;
    rustix::fs::fsync(&volume.root).map_err(status)?;
    volume.secured.store(true, Ordering::Release);
    Ok(())
}

fn read_by(mut get: impl FnMut(&mut [u8]) -> Result<usize, Errno>) -> Result<Option<Kept>, NtStatus> {
    let mut short = [0; SHORT_BYTES];
    match get(&mut short) {
        Ok(length) => return Ok(Some(Kept::parse(&short[..length]))),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
        Err(Errno::RANGE) => {}
        Err(errno) => return Err(status(errno)),
    }
    let mut long = vec![0; VALUE_BYTES_MAX];
    let length = get(&mut long).map_err(status)?;
    Ok(Some(Kept::parse(&long[..length])))
}

/// Reads the security descriptor of a file or directory through any file descriptor.
fn read(fd: BorrowedFd<'_>) -> Result<Option<Kept>, NtStatus> {
    read_by(|value| match rustix::fs::fgetxattr(fd, KEY, &mut *value) {
        // An O_PATH descriptor.
        Err(Errno::BADF) => rustix::fs::getxattr(path::proc_path(fd), KEY, value),
        result => result,
    })
}

fn owner(directory: BorrowedFd<'_>, name: &CStr, flags: AtFlags) -> Result<Owner, NtStatus> {
    let x = rustix::fs::statx(directory, name, flags, StatxFlags::UID | StatxFlags::GID).map_err(status)?;
    Ok(Owner { uid: x.stx_uid, gid: x.stx_gid })
}

fn owner_of(fd: BorrowedFd<'_>) -> Result<Owner, NtStatus> {
    owner(fd, c"", AtFlags::EMPTY_PATH)
}

fn with_owner(directory: BorrowedFd<'_>) -> Result<Option<(Kept, Owner)>, NtStatus> {
    read(directory)?.map(|kept| Ok((kept, owner_of(directory)?))).transpose()
}

/// Returns the security descriptor of an open file.
pub(super) fn get(file: &OpenFile) -> Result<Option<Kept>, NtStatus> {
    if file.volume.secured.load(Ordering::Acquire) { read(file.as_fd()) } else { Ok(None) }
}

/// Sets or removes the security descriptor of an open file.
pub(super) fn set(file: &OpenFile, kept: Option<&Kept>) -> Result<(), NtStatus> {
    if !file.volume.xattrs {
        return Err(NtStatus::NOT_SUPPORTED);
    }
    match kept {
        Some(kept) => {
            mark(&file.volume)?;
            store(file.as_fd(), kept)
        }
        None => match rustix::fs::fremovexattr(&file.fd, KEY) {
            Ok(()) | Err(Errno::NODATA) => Ok(()),
            Err(errno) => Err(status(errno)),
        },
    }
}

fn store(fd: BorrowedFd<'_>, kept: &Kept) -> Result<(), NtStatus> {
    rustix::fs::fsetxattr(fd, KEY, &kept.encode()?, XattrFlags::empty()).map_err(status)
}

/// Returns the security descriptors of an open file and of its parent directory according to `path`.
pub(super) fn around(
    volume: &Volume,
    file: BorrowedFd<'_>,
    path: &RelPath,
) -> Result<Option<Box<Descriptors>>, NtStatus> {
    if !volume.secured.load(Ordering::Acquire) {
        return Ok(None);
    }
    let own = read(file)?;
    let directory =
        if path.is_root() { None } else { with_owner(path::directory(volume, &path.parent())?.as_fd())? };
    Ok((own.is_some() || directory.is_some()).then(|| Box::new(Descriptors { own, directory })))
}

/// Checks that the opener of `file` may give it the name `name` in `directory`, which another file may have now.
///
/// # Errors
/// `STATUS_ACCESS_DENIED` if not.
pub(super) fn check_name(file: &OpenFile, directory: BorrowedFd<'_>, name: &str) -> Result<(), NtStatus> {
    if !file.checked || !file.volume.secured.load(Ordering::Acquire) {
        return Ok(());
    }
    let above = with_owner(directory)?;
    if let Some((kept, of)) = &above {
        kept.may_add(*of, file.directory)?;
    }
    name.into_with_c_str(|name| {
        let of = match owner(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(of) => of,
            Err(NtStatus::OBJECT_NAME_NOT_FOUND) => return Ok(Ok(())),
            Err(status) => return Ok(Err(status)),
        };
        let own = read_by(|value| xattr::of_entry(directory, name, KEY, value));
        Ok(own.and_then(|own| Descriptors { own, directory: above }.may_remove(of)))
    })
    .map_err(status)?
}

/// Creates a file or directory in a volume that has security descriptors, or is about to: checks the parent directory, and
/// sets the descriptor before the name. `None` if it gets no descriptor and is created like any other.
pub(super) fn make(volume: &Volume, request: &OpenRequest) -> Result<Option<OwnedFd>, NtStatus> {
    if request.descriptor.is_none() && !volume.secured.load(Ordering::Acquire) {
        return Ok(None);
    }
    let parent = path::directory(volume, &request.path.parent())?;
    let name = request.path.name();
    if request.mode == OpenMode::New
        && rustix::fs::statx(&parent, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE).is_ok()
    {
        return Err(NtStatus::OBJECT_NAME_COLLISION);
    }
    let directory = request.kind == ObjectKind::Directory;
    let above = with_owner(parent.as_fd())?;
    if let Some((kept, of)) = above.as_ref().filter(|_| request.checked) {
        kept.may_add(*of, directory)?;
    }
    let of = owner_of_new(request, parent.as_fd())?;
    let above = above.as_ref().map(|(kept, _)| kept);
    let Some(kept) = Kept::of_new(request.descriptor.as_deref(), above, directory, of) else {
        return Ok(None);
    };
    mark(volume)?;
    make_with(&parent, name, request, &kept).map(Some)
}

/// Returns the owner that a new file will have.
fn owner_of_new(request: &OpenRequest, parent: BorrowedFd<'_>) -> Result<Owner, NtStatus> {
    let process =
        Owner { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
    let Some(ownership) = request.ownership else { return Ok(process) };
    let of_parent = owner_of(parent)?;
    Ok(Owner { uid: ownership.uid.unwrap_or(of_parent.uid), gid: ownership.gid.unwrap_or(of_parent.gid) })
}

fn make_with(parent: &OwnedFd, name: &str, request: &OpenRequest, kept: &Kept) -> Result<OwnedFd, NtStatus> {
    let temporary = names::temporary(TEMPORARY);
    let directory = request.kind == ObjectKind::Directory;
    let made = if directory {
        rustix::fs::mkdirat(parent, &temporary, DIRECTORY_MODE).and_then(|()| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::openat(parent, &temporary, flags, Mode::empty())
        })
    } else {
        let flags = access(request) | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::openat(parent, &temporary, flags, FILE_MODE)
    };
    let made = made.map_err(status)?;
    let named = store(made.as_fd(), kept).and_then(|()| {
        rustix::fs::renameat_with(parent, &temporary, parent, name, RenameFlags::NOREPLACE).map_err(status)
    });
    if named.is_err() {
        let flags = if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        // Report the first error.
        let _ = rustix::fs::unlinkat(parent, &temporary, flags);
    }
    named.map(|()| made)
}
