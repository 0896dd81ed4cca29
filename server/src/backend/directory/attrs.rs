//! File attributes: those of the file system, and DOS attributes in an extended attribute.
//!
//! `user.forebay.dos` stores READONLY, HIDDEN, SYSTEM, ARCHIVE and similar attributes, an explicitly set creation time, and
//! whether the file is a reparse point. A file without it is an ARCHIVE created at its birth time. A file system without user
//! extended attributes can still be served, but it loses such settings and has no reparse points.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};

use forebay_smb::fs::{BasicInfo, FileKey, FileKind, FileTimes, Ownership, ReparsePoint, Stat};
use forebay_smb::limits::REPARSE_DATA_BYTES_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::fscc::posix::PERMISSIONS;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, Statx, StatxFlags, StatxTimestamp, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use rustix::path::Arg;

use super::plain_files::Moment;
use super::{OpenFile, Volume, path, plain_files, xattr};
use crate::backend::errno::status;
use crate::clock;

const XATTR: &CStr = c"user.forebay.dos";
/// REPARSE_DATA_BUFFER of a reparse point.
const REPARSE_DATA: &CStr = c"user.forebay.reparse";
/// S_ISGID: entries created in the directory inherit its group.
const SET_GID: u32 = 0o2000;
const XATTR_VERSION: u8 = 1;
const XATTR_BYTES: usize = 13;
/// Version 2 adds the tag and the kind of a reparse point.
const XATTR_VERSION_REPARSE: u8 = 2;
const XATTR_BYTES_MAX: usize = 18;

// [MS-FSCC] 2.6
const HIDDEN: u32 = 0x2;
const SYSTEM: u32 = 0x4;
const READONLY: u32 = 0x1;
const DIRECTORY: u32 = 0x10;
const ARCHIVE: u32 = 0x20;
const NORMAL: u32 = 0x80;
const TEMPORARY: u32 = 0x100;
const SPARSE_FILE: u32 = 0x200;
const REPARSE_POINT: u32 = 0x400;
const OFFLINE: u32 = 0x1000;
const NOT_CONTENT_INDEXED: u32 = 0x2000;

/// Attributes that are stored; the others follow from the kind of file.
const KEPT: u32 =
    READONLY | HIDDEN | SYSTEM | ARCHIVE | TEMPORARY | SPARSE_FILE | OFFLINE | NOT_CONTENT_INDEXED;
/// Stored attributes that have no meaning on a directory.
const FILES_ONLY: u32 = TEMPORARY | SPARSE_FILE;

/// The contents of the extended attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dos {
    attributes: u32,
    /// 0 if it was never set.
    creation: u64,
    reparse: Option<ReparsePoint>,
}

/// Kinds in the order of their on-disk numbers.
const KINDS: [FileKind; 7] = [
    FileKind::Regular,
    FileKind::Directory,
    FileKind::SymbolicLink,
    FileKind::CharacterDevice,
    FileKind::BlockDevice,
    FileKind::Fifo,
    FileKind::Socket,
];

impl Dos {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (head, reparse): (&[u8; XATTR_BYTES], _) = bytes.split_first_chunk()?;
        let [version, a0, a1, a2, a3, creation @ ..] = *head;
        let reparse = match (version, reparse) {
            (XATTR_VERSION, []) => None,
            (XATTR_VERSION_REPARSE, &[t0, t1, t2, t3, kind]) => Some(ReparsePoint {
                tag: u32::from_le_bytes([t0, t1, t2, t3]),
                kind: *KINDS.get(usize::from(kind))?,
            }),
            _ => return None,
        };
        let attributes = u32::from_le_bytes([a0, a1, a2, a3]) & KEPT;
        Some(Self { attributes, creation: u64::from_le_bytes(creation), reparse })
    }

    fn encode(self) -> Vec<u8> {
        let version = if self.reparse.is_some() { XATTR_VERSION_REPARSE } else { XATTR_VERSION };
        let mut bytes = vec![version];
        bytes.extend_from_slice(&self.attributes.to_le_bytes());
        bytes.extend_from_slice(&self.creation.to_le_bytes());
        if let Some(ReparsePoint { tag, kind }) = self.reparse {
            bytes.extend_from_slice(&tag.to_le_bytes());
            bytes.push(KINDS.iter().position(|known| *known == kind).unwrap_or_default() as u8);
        }
        bytes
    }

    /// The value for a file without the attribute.
    fn default_of(directory: bool) -> Self {
        Self { attributes: if directory { 0 } else { ARCHIVE }, creation: 0, reparse: None }
    }
}

/// Whether the file system of `fd` supports user extended attributes.
pub(super) fn kept(fd: BorrowedFd<'_>) -> bool {
    let mut bytes = [0; XATTR_BYTES_MAX];
    !matches!(rustix::fs::fgetxattr(fd, XATTR, &mut bytes), Err(Errno::OPNOTSUPP | Errno::NOSYS))
}

fn read_dos(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize, Errno> {
    match rustix::fs::fgetxattr(fd, XATTR, &mut *bytes) {
        // An O_PATH descriptor.
        Err(Errno::BADF) => rustix::fs::getxattr(path::proc_path(fd), XATTR, bytes),
        result => result,
    }
}

/// Returns the stored attributes of an open file, in order to change them.
fn dos_of_fd(volume: &Volume, fd: BorrowedFd<'_>) -> Option<Dos> {
    let mut bytes = [0; XATTR_BYTES_MAX];
    if !volume.xattrs {
        return None;
    }
    let length = read_dos(fd, &mut bytes).ok()?;
    Dos::parse(bytes.get(..length)?)
}

/// Returns the stored attributes of a file with the attributes `x`, using `read` unless the file is known to have none.
fn dos_of(volume: &Volume, x: &Statx, read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>) -> Option<Dos> {
    if !volume.xattrs {
        return None;
    }
    let moment = Moment::new(key(x).dev, x.stx_ino, x.stx_ctime);
    if plain_files::is_plain(&moment) {
        return None;
    }
    let mut bytes = [0; XATTR_BYTES_MAX];
    match read(&mut bytes) {
        Ok(length) => Dos::parse(bytes.get(..length)?),
        Err(errno) => {
            if errno == Errno::NODATA {
                plain_files::seen(moment);
            }
            None
        }
    }
}

/// The fields requested from `statx`.
const WANTED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

/// Attributes of an open file.
pub(super) fn stat(file: &OpenFile) -> Result<Stat, NtStatus> {
    stat_fd(&file.volume, file.fd.as_fd()).map_err(status)?.ok_or(NtStatus::ACCESS_DENIED)
}

/// Attributes of the file or directory behind `fd`; `None` if it is neither.
pub(super) fn stat_fd(volume: &Volume, fd: BorrowedFd<'_>) -> Result<Option<Stat>, Errno> {
    let x = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, WANTED)?;
    Ok(served(&x).then(|| build(&x, dos_of(volume, &x, |bytes| read_dos(fd, bytes)))))
}

/// Like [`stat_fd`], for a newly created file, which has no DOS attributes yet.
pub(super) fn stat_new(fd: BorrowedFd<'_>) -> Result<Option<Stat>, Errno> {
    let x = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, WANTED)?;
    Ok(served(&x).then(|| build(&x, None)))
}

/// Attributes of the entry `name` of a directory; `None` if it is neither a file nor a directory.
pub(super) fn stat_entry(
    volume: &Volume,
    directory: BorrowedFd<'_>,
    name: &str,
) -> Result<Option<Stat>, Errno> {
    name.into_with_c_str(|name| {
        let x = rustix::fs::statx(directory, name, AtFlags::SYMLINK_NOFOLLOW, WANTED)?;
        let read = |bytes: &mut [u8]| xattr::of_entry(directory, name, XATTR, bytes);
        Ok(served(&x).then(|| build(&x, dos_of(volume, &x, read))))
    })
}

/// Returns the identity of the entry `name` of a directory, for any file type, and whether it is a directory.
pub(super) fn key_of_entry(directory: BorrowedFd<'_>, name: &[u8]) -> Result<(FileKey, bool), Errno> {
    let x =
        rustix::fs::statx(directory, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE | StatxFlags::INO)?;
    Ok((key(&x), file_type(&x) == FileType::Directory))
}

/// Returns the identity of the file behind a descriptor.
pub(super) fn key_of(fd: BorrowedFd<'_>) -> Result<FileKey, Errno> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::INO).map(|x| key(&x))
}

/// Whether two descriptors refer to the same directory.
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
    FileKey { dev: u64::from(x.stx_dev_major) << 32 | u64::from(x.stx_dev_minor), ino: x.stx_ino, stream: 0 }
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
    let reparse = if dos.reparse.is_some() { REPARSE_POINT } else { 0 };
    let attributes = match (directory, dos.attributes | reparse) {
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
        reparse: dos.reparse,
        mode: u32::from(x.stx_mode) & PERMISSIONS,
        uid: x.stx_uid,
        gid: x.stx_gid,
    }
}

/// Attributes of a stream of a file with `attributes`.
pub(super) fn without_directory(attributes: u32) -> u32 {
    match attributes & !DIRECTORY {
        0 => NORMAL,
        others => others,
    }
}

/// Sets the attributes that the creator of a new file requested.
pub(super) fn set_new(file: &OpenFile, asked: u32) -> Result<(), NtStatus> {
    if !keeps_new(file, asked) {
        return Ok(());
    }
    let default = Dos::default_of(file.directory);
    store(file, Dos { attributes: attributes_of_new(default, asked), ..default })
}

/// Whether the attributes of a new file must be stored because they differ from the defaults.
pub(super) fn keeps_new(file: &OpenFile, asked: u32) -> bool {
    let default = Dos::default_of(file.directory);
    attributes_of_new(default, asked) != default.attributes
}

/// A new file always has ARCHIVE ([MS-FSA] 2.1.5.1.1).
fn attributes_of_new(default: Dos, asked: u32) -> u32 {
    (asked & KEPT) | default.attributes
}

/// Sets times and attributes.
pub(super) fn set(file: &OpenFile, info: &BasicInfo) -> Result<(), NtStatus> {
    if info.attributes.is_some() || info.creation.is_some() {
        // Nothing else changes the attribute between read and write.
        let _held = file.volume.names.of(file.key);
        let before = dos_of_fd(&file.volume, file.fd.as_fd()).unwrap_or(Dos::default_of(file.directory));
        let after = Dos {
            attributes: info.attributes.map_or(before.attributes, |a| a & KEPT),
            creation: info.creation.unwrap_or(before.creation),
            ..before
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

/// Sets owner and permission bits.
pub(super) fn own(file: &OpenFile, ownership: Ownership) -> Result<(), NtStatus> {
    let Ownership { mode, uid, gid } = ownership;
    if uid.is_some() || gid.is_some() {
        // All ones mean no change, as for the system call.
        if [uid, gid].contains(&Some(u32::MAX)) {
            return Err(NtStatus::INVALID_PARAMETER);
        }
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        rustix::fs::fchown(&file.fd, uid, gid).map_err(status)?;
    }
    // Set the mode last: chown clears the set-uid and set-gid bits.
    if let Some(mode) = mode {
        rustix::fs::fchmod(&file.fd, Mode::from_raw_mode(mode & PERMISSIONS)).map_err(status)?;
    }
    Ok(())
}

/// Sets owner and permission bits of a new file as a POSIX file system does: an unspecified owner or group is inherited from
/// `directory`. If `directory` has the set-gid bit, the file inherits its group and a directory also inherits the bit.
pub(super) fn own_new(file: &OpenFile, directory: BorrowedFd<'_>, asked: Ownership) -> Result<(), NtStatus> {
    let parent = rustix::fs::statx(directory, c"", AtFlags::EMPTY_PATH, WANTED).map_err(status)?;
    let made = rustix::fs::statx(&file.fd, c"", AtFlags::EMPTY_PATH, WANTED).map_err(status)?;
    let passes_group_on = u32::from(parent.stx_mode) & SET_GID != 0;
    let uid = asked.uid.unwrap_or(parent.stx_uid);
    let gid = asked.gid.filter(|_| !passes_group_on).unwrap_or(parent.stx_gid);
    let owner = Ownership {
        mode: None,
        uid: Some(uid).filter(|uid| *uid != made.stx_uid),
        gid: Some(gid).filter(|gid| *gid != made.stx_gid),
    };
    match own(file, owner) {
        // A server without CAP_CHOWN continues anyway.
        Ok(()) | Err(NtStatus::ACCESS_DENIED) => {}
        Err(status) => return Err(status),
    }
    let inherited = if passes_group_on && file.directory { SET_GID } else { 0 };
    let before = u32::from(made.stx_mode) & PERMISSIONS;
    let mode = asked.mode.unwrap_or(before) | inherited;
    // chown may have cleared bits of the mode.
    let mode = Some(mode).filter(|mode| *mode != before || owner.uid.is_some() || owner.gid.is_some());
    own(file, Ownership { mode, ..Ownership::default() })
}

/// Makes a file a reparse point, or removes the reparse point.
pub(super) fn set_reparse_point(
    file: &OpenFile,
    point: Option<(ReparsePoint, Vec<u8>)>,
) -> Result<(), NtStatus> {
    if !file.volume.xattrs {
        return Err(NtStatus::NOT_SUPPORTED);
    }
    let _held = file.volume.names.of(file.key);
    let before = dos_of_fd(&file.volume, file.fd.as_fd()).unwrap_or(Dos::default_of(file.directory));
    let reparse = point.as_ref().map(|(point, _)| *point);
    // Write the data first: a reader that finds the mark then also finds the data.
    if let Some((_, data)) = &point {
        rustix::fs::fsetxattr(&file.fd, REPARSE_DATA, data, XattrFlags::empty()).map_err(status)?;
    }
    store(file, Dos { reparse, ..before })?;
    if point.is_none() {
        match rustix::fs::fremovexattr(&file.fd, REPARSE_DATA) {
            Ok(()) | Err(Errno::NODATA) => {}
            Err(errno) => return Err(status(errno)),
        }
    }
    Ok(())
}

/// Data of a reparse point.
pub(super) fn reparse_data(file: &OpenFile) -> Result<Vec<u8>, NtStatus> {
    let dos = dos_of_fd(&file.volume, file.fd.as_fd());
    if dos.is_none_or(|dos| dos.reparse.is_none()) {
        return Err(NtStatus::NOT_A_REPARSE_POINT);
    }
    let mut data = vec![0; REPARSE_DATA_BYTES_MAX];
    match rustix::fs::fgetxattr(&file.fd, REPARSE_DATA, data.as_mut_slice()) {
        Ok(length) => {
            data.truncate(length);
            Ok(data)
        }
        Err(Errno::NODATA) => Err(NtStatus::NOT_A_REPARSE_POINT),
        Err(errno) => Err(status(errno)),
    }
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
    fn dos_attribute_round_trips_and_damaged_values_are_ignored() {
        let dos = Dos { attributes: READONLY | HIDDEN, creation: 0x0123_4567_89ab_cdef, reparse: None };
        let bytes = dos.encode();
        assert_eq!(Dos::parse(&bytes), Some(dos));
        let fifo = Dos { reparse: Some(ReparsePoint { tag: 0x8000_0014, kind: FileKind::Fifo }), ..dos };
        assert_eq!(Dos::parse(&fifo.encode()), Some(fifo));
        assert_eq!(Dos::parse(&fifo.encode()[..17]), None);
        assert_eq!(Dos::parse(&bytes[..12]), None);
        let mut newer = bytes;
        newer[0] = 3;
        assert_eq!(Dos::parse(&newer), None);
    }
}
