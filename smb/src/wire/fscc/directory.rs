//! Directory entries ([MS-FSCC] 2.4.10, 2.4.17, 2.4.8, 2.4.22, 2.4.20, 2.4.33, 2.4.24; [SMB2-POSIX] 2.3.1).

use std::borrow::Cow;

use super::FileInformationClass;
use super::posix::{FilePosixFixed, FilePosixInformation};
use super::reparse::ReparseTag;
use crate::wire::cursor::{Put, Reader, align, len_u32, patch_u32, zeros};
use crate::wire::{Fault, FileAttributes, FileTime, Malformed, limits, utf16};

/// Maximum length of a short name in bytes.
const SHORT_NAME_LEN: usize = 24;

/// An entry, with the fields of all classes; each class encodes its own fields.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct DirEntry<'a> {
    pub file_index: u32,
    pub creation_time: FileTime,
    pub last_access_time: FileTime,
    pub last_write_time: FileTime,
    pub change_time: FileTime,
    pub end_of_file: u64,
    pub allocation_size: u64,
    pub file_attributes: FileAttributes,
    /// Bytes of extended attributes; for a reparse point its tag ([MS-FSCC] 2.4.17), except in
    /// FileIdExtdDirectoryInformation, which has a separate field for it.
    pub ea_size: u32,
    pub reparse_tag: ReparseTag,
    /// 8.3 name, at most twelve units; empty from us.
    pub short_name: Cow<'a, str>,
    /// 64 bits in most classes, 128 in FileIdExtdDirectoryInformation.
    pub file_id: u128,
    /// Fields that only entries of FilePosixInformation have.
    pub posix: PosixFields,
    pub name: Cow<'a, str>,
}

/// Fields that only entries of FilePosixInformation have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct PosixFields {
    pub device_id: u32,
    pub hard_links: u32,
    /// File type and permission bits ([`super::posix::PosixFileType::mode`]).
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// The fields that a class has after the common ones (which FileNamesInformation lacks).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Names,
    Directory,
    Full,
    IdFull,
    Both,
    IdBoth,
    IdExtd,
    Posix,
}

impl Layout {
    const fn of(class: FileInformationClass) -> Option<Self> {
        Some(match class {
            FileInformationClass::FILE_NAMES_INFORMATION => Self::Names,
            FileInformationClass::FILE_DIRECTORY_INFORMATION => Self::Directory,
            FileInformationClass::FILE_FULL_DIRECTORY_INFORMATION => Self::Full,
            FileInformationClass::FILE_ID_FULL_DIRECTORY_INFORMATION => Self::IdFull,
            FileInformationClass::FILE_BOTH_DIRECTORY_INFORMATION => Self::Both,
            FileInformationClass::FILE_ID_BOTH_DIRECTORY_INFORMATION => Self::IdBoth,
            FileInformationClass::FILE_ID_EXTD_DIRECTORY_INFORMATION => Self::IdExtd,
            FileInformationClass::FILE_POSIX_INFORMATION => Self::Posix,
            _ => return None,
        })
    }

    /// Bytes before the name.
    const fn fixed_len(self) -> usize {
        match self {
            Self::Names => 12,
            Self::Directory => 64,
            Self::Full => 68,
            Self::IdFull => 80,
            Self::Both => 94,
            Self::IdBoth => 104,
            Self::IdExtd => 88,
            Self::Posix => 8 + FilePosixInformation::LEN + 4,
        }
    }
}

/// Writes entries in sequence, each aligned to eight bytes, as long as they fit.
#[derive(Debug)]
pub struct DirEncoder<'o> {
    layout: Layout,
    out: &'o mut Vec<u8>,
    start: usize,
    limit: usize,
    previous: Option<usize>,
}

impl<'o> DirEncoder<'o> {
    /// Appends at most `limit` bytes to `out`. `None` if the class is not one of directory entries
    /// (STATUS_INVALID_INFO_CLASS).
    pub fn new(class: FileInformationClass, out: &'o mut Vec<u8>, limit: usize) -> Option<Self> {
        let start = out.len();
        Some(Self { layout: Layout::of(class)?, out, start, limit, previous: None })
    }

    /// Bytes before the name in each entry of `class`. If a client's buffer is smaller, the answer is
    /// STATUS_INFO_LENGTH_MISMATCH ([MS-SMB2] 3.3.5.18).
    #[must_use]
    pub fn fixed_len(class: FileInformationClass) -> Option<usize> {
        Layout::of(class).map(Layout::fixed_len)
    }

    /// Appends an entry. If it does not fit, leaves everything unchanged and returns false.
    pub fn push(&mut self, entry: &DirEntry<'_>) -> bool {
        let used = self.out.len() - self.start;
        let padding = used.next_multiple_of(8) - used;
        let len = self.layout.fixed_len() + utf16::encoded_len(&entry.name);
        if used + padding + len > self.limit {
            return false;
        }
        align(self.out, self.start, 8);
        let start = self.out.len();
        if let Some(previous) = self.previous.replace(start) {
            patch_u32(self.out, previous, start - previous);
        }
        encode_entry(self.layout, entry, self.out);
        debug_assert_eq!(self.out.len() - start, len);
        true
    }

    /// Whether no entry has been written.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.previous.is_none()
    }
}

fn encode_entry(layout: Layout, entry: &DirEntry<'_>, out: &mut Vec<u8>) {
    zeros(out, 4);
    out.put(entry.file_index);
    if layout == Layout::Posix {
        posix(entry).encode(out);
    } else if layout != Layout::Names {
        out.put(entry.creation_time);
        out.put(entry.last_access_time);
        out.put(entry.last_write_time);
        out.put(entry.change_time);
        out.put(entry.end_of_file);
        out.put(entry.allocation_size);
        out.put(entry.file_attributes);
    }
    out.put(len_u32(utf16::encoded_len(&entry.name)));
    match layout {
        Layout::Names | Layout::Directory | Layout::Posix => {}
        Layout::Full => out.put(entry.ea_size),
        Layout::IdFull => {
            out.put(entry.ea_size);
            zeros(out, 4);
            out.put(entry.file_id as u64);
        }
        Layout::Both => encode_short_name(entry, out),
        Layout::IdBoth => {
            encode_short_name(entry, out);
            zeros(out, 2);
            out.put(entry.file_id as u64);
        }
        Layout::IdExtd => {
            out.put(entry.ea_size);
            out.put(entry.reparse_tag);
            out.put(entry.file_id.to_le_bytes());
        }
    }
    utf16::encode(&entry.name, out);
}

/// An entry of FilePosixInformation without its name.
fn posix(entry: &DirEntry<'_>) -> FilePosixInformation {
    let PosixFields { device_id, hard_links, mode, uid, gid } = entry.posix;
    FilePosixInformation {
        fixed: FilePosixFixed {
            creation_time: entry.creation_time,
            last_access_time: entry.last_access_time,
            last_write_time: entry.last_write_time,
            change_time: entry.change_time,
            end_of_file: entry.end_of_file,
            allocation_size: entry.allocation_size,
            file_attributes: entry.file_attributes,
            inode: entry.file_id as u64,
            device_id,
            hard_links,
            reparse_tag: entry.reparse_tag,
            mode,
        },
        uid,
        gid,
    }
}

/// The inverse of [`posix`].
fn from_posix(file_index: u32, info: FilePosixInformation) -> DirEntry<'static> {
    let FilePosixInformation { fixed, uid, gid } = info;
    DirEntry {
        file_index,
        creation_time: fixed.creation_time,
        last_access_time: fixed.last_access_time,
        last_write_time: fixed.last_write_time,
        change_time: fixed.change_time,
        end_of_file: fixed.end_of_file,
        allocation_size: fixed.allocation_size,
        file_attributes: fixed.file_attributes,
        file_id: fixed.inode.into(),
        reparse_tag: fixed.reparse_tag,
        posix: PosixFields {
            device_id: fixed.device_id,
            hard_links: fixed.hard_links,
            mode: fixed.mode,
            uid,
            gid,
        },
        ..DirEntry::default()
    }
}

fn encode_short_name(entry: &DirEntry<'_>, out: &mut Vec<u8>) {
    out.put(entry.ea_size);
    let len_at = out.len();
    zeros(out, 2);
    let start = out.len();
    for unit in entry.short_name.encode_utf16().take(SHORT_NAME_LEN / 2) {
        out.put(unit);
    }
    let len = out.len() - start;
    out[len_at] = len as u8;
    zeros(out, SHORT_NAME_LEN - len);
}

/// Reads the entries of a response.
pub fn parse_entries(class: FileInformationClass, bytes: &[u8]) -> Result<Vec<DirEntry<'static>>, Malformed> {
    let what = "directory entries";
    let layout = Layout::of(class).ok_or(Malformed { fault: Fault::Value, what, offset: 0 })?;
    let mut entries = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let mut r = Reader::new(rest, what);
        // A listing in an 8 MiB response can be longer than other lists; its length still limits it.
        if entries.len() == limits::DIRECTORY_ENTRIES_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        let next = r.get::<u32>()? as usize;
        entries.push(parse_entry(layout, &mut r)?);
        if next == 0 {
            break;
        }
        if next < r.position() || !next.is_multiple_of(8) || next > rest.len() {
            return Err(r.fault(Fault::Offset));
        }
        rest = &rest[next..];
    }
    Ok(entries)
}

fn parse_entry(layout: Layout, r: &mut Reader<'_>) -> Result<DirEntry<'static>, Malformed> {
    let mut entry = DirEntry { file_index: r.get()?, ..DirEntry::default() };
    if layout == Layout::Posix {
        entry = from_posix(entry.file_index, FilePosixInformation::read(r)?);
    } else if layout != Layout::Names {
        entry.creation_time = r.get()?;
        entry.last_access_time = r.get()?;
        entry.last_write_time = r.get()?;
        entry.change_time = r.get()?;
        entry.end_of_file = r.get()?;
        entry.allocation_size = r.get()?;
        entry.file_attributes = r.get()?;
    }
    let name_len = r.get::<u32>()?;
    match layout {
        Layout::Names | Layout::Directory | Layout::Posix => {}
        Layout::Full => entry.ea_size = r.get()?,
        Layout::IdFull => {
            entry.ea_size = r.get()?;
            r.skip(4)?;
            entry.file_id = r.get::<u64>()?.into();
        }
        Layout::Both | Layout::IdBoth => {
            entry.ea_size = r.get()?;
            let len = usize::from(r.get::<u8>()?);
            r.skip(1)?;
            let short_name = r.take(SHORT_NAME_LEN)?;
            let short_name = short_name.get(..len).ok_or(r.fault(Fault::Value))?;
            entry.short_name = Cow::Owned(utf16::decode(short_name)?);
            if layout == Layout::IdBoth {
                r.skip(2)?;
                entry.file_id = r.get::<u64>()?.into();
            }
        }
        Layout::IdExtd => {
            entry.ea_size = r.get()?;
            entry.reparse_tag = r.get()?;
            entry.file_id = u128::from_le_bytes(r.array()?);
        }
    }
    entry.name = Cow::Owned(utf16::decode(r.take(name_len as usize)?)?);
    Ok(entry)
}
