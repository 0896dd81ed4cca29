//! What is known of a file: the file system's own attributes, and those of DOS in an extended attribute.
//!
//! READONLY, HIDDEN, SYSTEM, ARCHIVE and their like, and a creation time that somebody set, are kept in
//! `user.forebay.dos`. A file without it is an ARCHIVE made at its birth time. A file system without user extended
//! attributes serves all the same; such settings are then forgotten.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};

use forebay_smb::fs::{BasicInfo, FileKey, FileTimes, Stat};
use forebay_smb::status::NtStatus;
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, StatxTimestamp, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use rustix::path::Arg;

use super::{OpenFile, Volume, path, xattr};
use crate::backend::errno::status;
use crate::clock;

const XATTR: &CStr = c"user.forebay.dos";
const XATTR_VERSION: u8 = 1;
const XATTR_BYTES: usize = 13;

// [MS-FSCC] 2.6
const HIDDEN: u32 = 0x2;
const SYSTEM: u32 = 0x4;
const READONLY: u32 = 0x1;
const DIRECTORY: u32 = 0x10;
const ARCHIVE: u32 = 0x20;
const NORMAL: u32 = 0x80;
const TEMPORARY: u32 = 0x100;
const SPARSE_FILE: u32 = 0x200;
const OFFLINE: u32 = 0x1000;
const NOT_CONTENT_INDEXED: u32 = 0x2000;

/// Attributes that are kept; the others follow from what the file is.
const KEPT: u32 =
    READONLY | HIDDEN | SYSTEM | ARCHIVE | TEMPORARY | SPARSE_FILE | OFFLINE | NOT_CONTENT_INDEXED;
/// Those of them that mean nothing on a directory.
const FILES_ONLY: u32 = TEMPORARY | SPARSE_FILE;

/// The contents of the extended attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dos {
    attributes: u32,
    /// 0 where it was never set.
    creation: u64,
}

impl Dos {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; XATTR_BYTES] = bytes.try_into().ok()?;
        let [version, a0, a1, a2, a3, creation @ ..] = *bytes;
        (version == XATTR_VERSION).then(|| Self {
            attributes: u32::from_le_bytes([a0, a1, a2, a3]) & KEPT,
            creation: u64::from_le_bytes(creation),
        })
    }

    fn encode(self) -> [u8; XATTR_BYTES] {
        let mut bytes = [0; XATTR_BYTES];
        bytes[0] = XATTR_VERSION;
        bytes[1..5].copy_from_slice(&self.attributes.to_le_bytes());
        bytes[5..].copy_from_slice(&self.creation.to_le_bytes());
        bytes
    }

    /// What a file without the attribute is taken for.
    fn default_of(directory: bool) -> Self {
        Self { attributes: if directory { 0 } else { ARCHIVE }, creation: 0 }
    }
}

/// Whether the file system under `fd` keeps user extended attributes.
pub(super) fn kept(fd: BorrowedFd<'_>) -> bool {
    let mut bytes = [0; XATTR_BYTES];
    !matches!(rustix::fs::fgetxattr(fd, XATTR, &mut bytes), Err(Errno::OPNOTSUPP | Errno::NOSYS))
}

fn dos_of_fd(volume: &Volume, fd: BorrowedFd<'_>) -> Option<Dos> {
    let mut bytes = [0; XATTR_BYTES];
    if !volume.xattrs {
        return None;
    }
    let length = match rustix::fs::fgetxattr(fd, XATTR, &mut bytes) {
        // Of an O_PATH descriptor.
        Err(Errno::BADF) => rustix::fs::getxattr(path::proc_path(fd), XATTR, &mut bytes),
        result => result,
    };
    Dos::parse(bytes.get(..length.ok()?)?)
}

fn dos_of_entry(volume: &Volume, directory: BorrowedFd<'_>, name: &CStr) -> Option<Dos> {
    let mut bytes = [0; XATTR_BYTES];
    if !volume.xattrs {
        return None;
    }
    let length = xattr::of_entry(directory, name, XATTR, &mut bytes).ok()?;
    Dos::parse(bytes.get(..length)?)
}

/// What `statx` is asked for.
const WANTED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

/// Attributes of an open file.
pub(super) fn stat(file: &OpenFile) -> Result<Stat, NtStatus> {
    stat_fd(&file.volume, file.fd.as_fd()).map_err(status)?.ok_or(NtStatus::ACCESS_DENIED)
}

/// Attributes of what `fd` is open on; `None` where it is neither a file nor a directory.
pub(super) fn stat_fd(volume: &Volume, fd: BorrowedFd<'_>) -> Result<Option<Stat>, Errno> {
    let x = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, WANTED)?;
    Ok(served(&x).then(|| build(&x, dos_of_fd(volume, fd))))
}

/// Attributes of the entry `name` of a directory; `None` where it is neither a file nor a directory.
pub(super) fn stat_entry(
    volume: &Volume,
    directory: BorrowedFd<'_>,
    name: &str,
) -> Result<Option<Stat>, Errno> {
    name.into_with_c_str(|name| {
        let x = rustix::fs::statx(directory, name, AtFlags::SYMLINK_NOFOLLOW, WANTED)?;
        Ok(served(&x).then(|| build(&x, dos_of_entry(volume, directory, name))))
    })
}

/// Identity of the entry `name` of a directory, whatever it is, and whether it is a directory.
pub(super) fn key_of_entry(directory: BorrowedFd<'_>, name: &[u8]) -> Result<(FileKey, bool), Errno> {
    let x =
        rustix::fs::statx(directory, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE | StatxFlags::INO)?;
    Ok((key(&x), file_type(&x) == FileType::Directory))
}

/// Identity of what a descriptor is open on.
pub(super) fn key_of(fd: BorrowedFd<'_>) -> Result<FileKey, Errno> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::INO).map(|x| key(&x))
}

/// Whether two descriptors are open on the same directory.
pub(super) fn same(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(key_of(a)? == key_of(b)?)
}

fn file_type(x: &Statx) -> FileType {
    FileType::from_raw_mode(u32::from(x.stx_mode))
}

fn served(x: &Statx) -> bool {
    matches!(file_type(x), FileType::RegularFile | FileType::Directory)
}

fn key(x: &Statx) -> FileKey {
    FileKey { dev: u64::from(x.stx_dev_major) << 32 | u64::from(x.stx_dev_minor), ino: x.stx_ino }
}

fn build(x: &Statx, dos: Option<Dos>) -> Stat {
    let directory = file_type(x) == FileType::Directory;
    let dos = dos.unwrap_or(Dos::default_of(directory));
    let time = |t: StatxTimestamp| clock::from_unix(t.tv_sec, t.tv_nsec);
    let born = if StatxFlags::from_bits_retain(x.stx_mask).contains(StatxFlags::BTIME) {
        time(x.stx_btime)
    } else {
        time(x.stx_mtime).min(time(x.stx_ctime))
    };
    let attributes = match (directory, dos.attributes) {
        (true, kept) => DIRECTORY | (kept & !FILES_ONLY),
        (false, 0) => NORMAL,
        (false, kept) => kept,
    };
    Stat {
        key: key(x),
        directory,
        end_of_file: if directory { 0 } else { x.stx_size },
        allocation_size: if directory { 0 } else { x.stx_blocks * 512 },
        links: x.stx_nlink,
        times: FileTimes {
            creation: if dos.creation == 0 { born } else { dos.creation },
            last_access: time(x.stx_atime),
            last_write: time(x.stx_mtime),
            change: time(x.stx_ctime),
        },
        attributes,
    }
}

/// Gives a new file the attributes that its maker asked for.
pub(super) fn set_new(file: &OpenFile, asked: u32) -> Result<(), NtStatus> {
    let default = Dos::default_of(file.directory);
    // A new file is always to be archived ([MS-FSA] 2.1.5.1.1).
    let attributes = (asked & KEPT) | default.attributes;
    if attributes == default.attributes { Ok(()) } else { store(file, Dos { attributes, creation: 0 }) }
}

/// Sets times and attributes.
pub(super) fn set(file: &OpenFile, info: &BasicInfo) -> Result<(), NtStatus> {
    if info.attributes.is_some() || info.creation.is_some() {
        let before = dos_of_fd(&file.volume, file.fd.as_fd()).unwrap_or(Dos::default_of(file.directory));
        let after = Dos {
            attributes: info.attributes.map_or(before.attributes, |a| a & KEPT),
            creation: info.creation.unwrap_or(before.creation),
        };
        if after != before {
            store(file, after)?;
        }
    }
    if info.last_access.is_some() || info.last_write.is_some() {
        let times = Timestamps {
            last_access: timespec(info.last_access),
            last_modification: timespec(info.last_write),
        };
        rustix::fs::futimens(&file.fd, &times).map_err(status)?;
    }
    Ok(())
}

fn timespec(time: Option<u64>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        Some(time) => {
            let (tv_sec, nanos) = clock::to_unix(time);
            Timespec { tv_sec, tv_nsec: nanos.into() }
        }
    }
}

fn store(file: &OpenFile, dos: Dos) -> Result<(), NtStatus> {
    if !file.volume.xattrs {
        return Ok(());
    }
    rustix::fs::fsetxattr(&file.fd, XATTR, &dos.encode(), XattrFlags::empty()).map_err(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attribute_round_trips_and_damage_is_ignored() {
        let dos = Dos { attributes: READONLY | HIDDEN, creation: 0x0123_4567_89ab_cdef };
        let bytes = dos.encode();
        assert_eq!(Dos::parse(&bytes), Some(dos));
        assert_eq!(Dos::parse(&bytes[..12]), None);
        let mut newer = bytes;
        newer[0] = 2;
        assert_eq!(Dos::parse(&newer), None);
    }
}
