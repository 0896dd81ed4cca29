//! Named streams. Each is an extended attribute `user.DosStream.NAME:$DATA` of its file, with a zero byte after its contents,
//! as in Samba's `vfs_streams_xattr`. A change replaces the whole attribute, so streams are short.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_smb::fs::{
    FileKey, FsHandle, ObjectKind, OpenMode, OpenRequest, Opened, OpenedFile, Payload, Stat, StreamEntry,
    StreamName,
};
use forebay_smb::status::NtStatus;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::{OpenFile, Volume, attrs, eas, names, open};
use crate::backend::errno::status;
use crate::buffers::{BufferPool, ReadBuffer};

/// Prefix and suffix of the names of the extended attributes.
const PREFIX: &[u8] = b"user.DosStream.";
const SUFFIX: &[u8] = b":$DATA";
/// Bytes of the longest stream: XATTR_SIZE_MAX minus the zero byte.
const STREAM_BYTES_MAX: usize = eas::VALUE_BYTES_MAX - 1;
/// Limit for the list of a file's attribute names, up to which streams are added: a longer list could not be read, and extended
/// attributes need space, too.
const LIST_BYTES_MAX: usize = eas::LIST_BYTES_MAX / 2;
/// Allocation unit that is reported, for want of a better number for an attribute.
const UNIT_BYTES: u64 = 8;

/// An open named stream.
#[derive(Debug)]
pub(super) struct OpenStream {
    file: Arc<OpenFile>,
    /// Tracks renames through this handle; `None` after a rename to the file's data.
    key: Mutex<Option<CString>>,
}

/// The attribute name and the contents of a stream.
struct Found {
    key: CString,
    contents: Vec<u8>,
}

/// Whether an extended attribute is a stream.
pub(super) fn is_stream(key: &CStr) -> bool {
    name_of(key).is_some()
}

fn name_of(key: &CStr) -> Option<StreamName> {
    let name = key.to_bytes().strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    StreamName::new(str::from_utf8(name).ok()?).ok()
}

/// Returns the extended attribute for a new stream.
fn key_of(name: &StreamName) -> Result<CString, NtStatus> {
    let key = CString::new([PREFIX, name.as_str().as_bytes(), SUFFIX].concat());
    key.ok().filter(|key| key.count_bytes() <= eas::NAME_BYTES_MAX).ok_or(NtStatus::OBJECT_NAME_INVALID)
}

/// Finds the extended attribute of the stream `name`, ignoring case.
fn find(file: &OpenFile, name: &StreamName) -> Result<Option<CString>, NtStatus> {
    eas::with_list(file, |list| {
        Ok(eas::keys(list).find(|key| name_of(key).as_ref() == Some(name)).map(CStr::to_owned))
    })
}

fn size_of(file: &OpenFile, key: &CStr) -> Result<u64, NtStatus> {
    match rustix::fs::fgetxattr_query(&file.fd, key) {
        // Without Samba's trailing zero byte.
        Ok(length) => Ok(length.saturating_sub(1) as u64),
        Err(Errno::NODATA) => Err(NtStatus::FILE_DELETED),
        Err(errno) => Err(status(errno)),
    }
}

fn store(file: &OpenFile, key: &CStr, contents: &[u8], flags: XattrFlags) -> Result<(), NtStatus> {
    let value = [contents, &[0]].concat();
    rustix::fs::fsetxattr(&file.fd, key, &value, flags).map_err(|errno| match errno {
        Errno::EXIST => NtStatus::OBJECT_NAME_COLLISION,
        Errno::NODATA => NtStatus::FILE_DELETED,
        Errno::TOOBIG | Errno::RANGE => NtStatus::FILE_SYSTEM_LIMITATION,
        Errno::OPNOTSUPP | Errno::NOSYS => NtStatus::NOT_SUPPORTED,
        errno => status(errno),
    })
}

fn remove_key(file: &OpenFile, key: &CStr) -> Result<(), NtStatus> {
    match rustix::fs::fremovexattr(&file.fd, key) {
        Ok(()) | Err(Errno::NODATA) => Ok(()),
        Err(errno) => Err(status(errno)),
    }
}

/// Returns all streams of a file, sorted by name: file systems change their order.
pub(super) fn list(file: &OpenFile) -> Result<Vec<StreamEntry>, NtStatus> {
    if !file.volume.xattrs {
        return Err(NtStatus::NOT_SUPPORTED);
    }
    let mut streams = eas::with_list(file, |list| {
        let named = eas::keys(list).filter_map(|key| Some((key, name_of(key)?)));
        named
            .filter_map(|(key, name)| match size_of(file, key) {
                Ok(size) => Some(Ok(StreamEntry { name, size, allocation_size: allocated(size) })),
                // Removed concurrently.
                Err(NtStatus::FILE_DELETED) => None,
                Err(status) => Some(Err(status)),
            })
            .collect::<Result<Vec<_>, _>>()
    })?;
    streams.sort_unstable_by(|a, b| a.name.as_str().cmp(b.name.as_str()));
    Ok(streams)
}

fn allocated(size: u64) -> u64 {
    size.next_multiple_of(UNIT_BYTES)
}

/// Removes all streams of a file.
pub(super) fn remove_all(file: &OpenFile) -> Result<(), NtStatus> {
    if !file.volume.xattrs {
        return Ok(());
    }
    eas::with_list(file, |list| {
        eas::keys(list).filter(|key| is_stream(key)).try_for_each(|key| remove_key(file, key))
    })
}

/// Opens or creates a stream, together with its file.
pub(super) fn open(
    volume: &Arc<Volume>,
    request: &OpenRequest,
    name: &StreamName,
) -> Result<Opened, NtStatus> {
    if !volume.xattrs {
        return Err(NtStatus::OBJECT_NAME_INVALID);
    }
    let of_file = OpenRequest {
        mode: if request.mode == OpenMode::Existing { OpenMode::Existing } else { OpenMode::Either },
        kind: ObjectKind::Any,
        read: true,
        write: false,
        allocation_size: 0,
        stream: None,
        ..request.clone()
    };
    let opened = open::open(volume, &of_file)?;
    let file = super::file(&opened.handle)?;
    let stream = find_or_make(&file, request.mode, name).inspect_err(|_| {
        // Report the first error, and leave nothing behind from a failed open.
        if opened.created {
            let _ = names::unlink(&file);
        }
    });
    let (key, created) = stream?;
    let stream = OpenStream { file, key: Mutex::new(Some(key)) };
    let stat = of_stream(&stream, if created { None } else { Some(opened.stat) })?;
    let descriptors = opened.descriptors;
    let file = Some(OpenedFile { handle: opened.handle, created: opened.created });
    Ok(Opened { handle: FsHandle(Arc::new(stream)), created, stat, file, descriptors })
}

fn find_or_make(file: &OpenFile, mode: OpenMode, name: &StreamName) -> Result<(CString, bool), NtStatus> {
    let _held = file.volume.names.of(file.key);
    match (find(file, name)?, mode) {
        (Some(_), OpenMode::New) => Err(NtStatus::OBJECT_NAME_COLLISION),
        (Some(key), OpenMode::Existing | OpenMode::Either) => Ok((key, false)),
        (None, OpenMode::Existing) => Err(NtStatus::OBJECT_NAME_NOT_FOUND),
        (None, OpenMode::New | OpenMode::Either) => {
            let key = key_of(name)?;
            if eas::with_list(file, |list| Ok(list.len()))? + key.count_bytes() >= LIST_BYTES_MAX {
                return Err(NtStatus::FILE_SYSTEM_LIMITATION);
            }
            store(file, &key, &[], XattrFlags::CREATE)?;
            Ok((key, true))
        }
    }
}

/// Returns the attributes of a stream, based on `file`, the attributes of its file, if they are known.
fn of_stream(stream: &OpenStream, file: Option<Stat>) -> Result<Stat, NtStatus> {
    let stat = file.map_or_else(|| attrs::stat(&stream.file), Ok)?;
    let key = stream.key()?;
    let size = size_of(&stream.file, &key)?;
    let number = name_of(&key).as_ref().map_or(0, StreamName::number);
    Ok(Stat {
        key: FileKey { stream: number, ..stat.key },
        directory: false,
        end_of_file: size,
        allocation_size: allocated(size),
        attributes: attrs::without_directory(stat.attributes),
        ..stat
    })
}

impl OpenStream {
    /// The file that the stream belongs to.
    pub(super) fn file(&self) -> &Arc<OpenFile> {
        &self.file
    }

    fn key(&self) -> Result<CString, NtStatus> {
        let key = self.key.lock().unwrap_or_else(PoisonError::into_inner).clone();
        key.ok_or(NtStatus::FILE_DELETED)
    }

    pub(super) fn stat(&self) -> Result<Stat, NtStatus> {
        of_stream(self, None)
    }

    fn contents(&self) -> Result<Found, NtStatus> {
        let key = self.key()?;
        let mut contents = vec![0; eas::VALUE_BYTES_MAX];
        match rustix::fs::fgetxattr(&self.file.fd, &key, contents.as_mut_slice()) {
            Ok(length) => {
                contents.truncate(length.saturating_sub(1));
                Ok(Found { key, contents })
            }
            Err(Errno::NODATA) => Err(NtStatus::FILE_DELETED),
            Err(errno) => Err(status(errno)),
        }
    }

    /// Replaces the contents by the result of `change`, with no concurrent change in between.
    fn change(&self, change: impl FnOnce(&mut Vec<u8>) -> Result<(), NtStatus>) -> Result<(), NtStatus> {
        let _held = self.file.volume.names.of(self.file.key);
        let Found { key, mut contents } = self.contents()?;
        change(&mut contents)?;
        store(&self.file, &key, &contents, XattrFlags::REPLACE)
    }

    /// Returns at most `length` bytes at `offset`.
    fn part(&self, offset: u64, length: u64) -> Result<Vec<u8>, NtStatus> {
        let Found { contents, .. } = self.contents()?;
        let end = (contents.len() as u64).min(offset.saturating_add(length));
        Ok(if offset < end { contents[offset as usize..end as usize].to_vec() } else { Vec::new() })
    }

    pub(super) fn read(
        &self,
        offset: u64,
        length: u32,
        buffers: &BufferPool,
    ) -> Result<Box<dyn Payload>, NtStatus> {
        let part = self.part(offset, length.into())?;
        if part.is_empty() && length > 0 {
            return Err(NtStatus::END_OF_FILE);
        }
        let mut buffer = buffers.take(part.len()).map_err(|_| NtStatus::INSUFFICIENT_RESOURCES)?;
        buffer.bytes_mut(0..part.len().cast_signed()).copy_from_slice(&part);
        Ok(Box::new(ReadBuffer::new(buffer, part.len())))
    }

    /// Writes at `offset`; `u64::MAX` appends.
    pub(super) fn write(&self, offset: u64, bytes: &[u8], write_through: bool) -> Result<u32, NtStatus> {
        self.change(|contents| {
            let at = if offset == u64::MAX { contents.len() as u64 } else { offset };
            let end = end_of(at, bytes.len() as u64)?;
            if contents.len() < end {
                contents.resize(end, 0);
            }
            contents[end - bytes.len()..end].copy_from_slice(bytes);
            Ok(())
        })?;
        if write_through || self.file.write_through {
            self.flush()?;
        }
        Ok(bytes.len() as u32)
    }

    pub(super) fn flush(&self) -> Result<(), NtStatus> {
        names::flush(&self.file)
    }

    pub(super) fn set_end(&self, size: u64) -> Result<(), NtStatus> {
        let size = end_of(size, 0)?;
        self.change(|contents| {
            contents.resize(size, 0);
            Ok(())
        })
    }

    /// Only truncates: no space is reserved for an extended attribute.
    pub(super) fn set_allocation(&self, size: u64) -> Result<(), NtStatus> {
        let size = end_of(size, 0)?;
        self.change(|contents| {
            contents.truncate(size);
            Ok(())
        })
    }

    pub(super) fn zero(&self, offset: u64, length: u64) -> Result<(), NtStatus> {
        self.change(|contents| {
            let end = (contents.len() as u64).min(offset.saturating_add(length));
            if offset < end {
                contents[offset as usize..end as usize].fill(0);
            }
            Ok(())
        })
    }

    /// Streams have no holes.
    pub(super) fn ranges(&self, offset: u64, length: u64) -> Result<Vec<(u64, u64)>, NtStatus> {
        let end = size_of(&self.file, &self.key()?)?.min(offset.saturating_add(length));
        Ok(if offset < end { vec![(offset, end - offset)] } else { Vec::new() })
    }

    pub(super) fn remove(&self) -> Result<(), NtStatus> {
        match self.key() {
            Ok(key) => remove_key(&self.file, &key),
            Err(_) => Ok(()),
        }
    }

    pub(super) fn rename(&self, to: Option<&StreamName>, replace: bool) -> Result<(), NtStatus> {
        let held = self.file.volume.names.of(self.file.key);
        let Found { key, contents } = self.contents()?;
        let after = match to {
            None => {
                self.becomes_data(&contents)?;
                None
            }
            Some(name) => {
                let there = find(&self.file, name)?.filter(|there| *there != key);
                if let Some(there) = &there {
                    if !replace {
                        return Err(NtStatus::OBJECT_NAME_COLLISION);
                    }
                    if size_of(&self.file, there)? > 0 {
                        return Err(NtStatus::INVALID_PARAMETER);
                    }
                    remove_key(&self.file, there)?;
                }
                let after = key_of(name)?;
                store(&self.file, &after, &contents, XattrFlags::empty())?;
                Some(after)
            }
        };
        if after.as_ref() != Some(&key) {
            remove_key(&self.file, &key)?;
        }
        *self.key.lock().unwrap_or_else(PoisonError::into_inner) = after;
        drop(held);
        self.flush()
    }

    /// Writes the contents to the file, which must be empty.
    fn becomes_data(&self, contents: &[u8]) -> Result<(), NtStatus> {
        let stat = attrs::stat(&self.file)?;
        if stat.directory || stat.end_of_file > 0 {
            return Err(NtStatus::INVALID_PARAMETER);
        }
        if contents.is_empty() {
            return Ok(());
        }
        // This handle was opened for reading. The data must be on stable storage before the attribute is removed.
        let writable = File::from(open::reopen_for_writing(&self.file)?);
        let written = writable.write_all_at(contents, 0).and_then(|()| writable.sync_data());
        written.map_err(|error| {
            let _ = writable.set_len(0);
            Errno::from_io_error(&error).map_or(NtStatus::DISK_FULL, status)
        })
    }
}

/// Returns the end of a range, if it is within the maximum length of a stream.
fn end_of(offset: u64, length: u64) -> Result<usize, NtStatus> {
    let end = offset.checked_add(length).and_then(|end| usize::try_from(end).ok());
    end.filter(|end| *end <= STREAM_BYTES_MAX).ok_or(NtStatus::FILE_SYSTEM_LIMITATION)
}

/// A file or a stream, for copies between them.
pub(super) enum Data {
    File(Arc<OpenFile>),
    Stream(Arc<OpenStream>),
}

/// Copies data if at least one side is a stream: short, or as long as the source.
pub(super) fn copy(
    source: &Data,
    source_offset: u64,
    target: &Data,
    target_offset: u64,
    length: u64,
    buffers: &BufferPool,
) -> Result<u64, NtStatus> {
    let length = length.min(STREAM_BYTES_MAX as u64);
    let read;
    let bytes: &[u8] = match source {
        Data::Stream(source) => &source.part(source_offset, length)?,
        Data::File(source) => match super::data::read(source, source_offset, length as u32, buffers) {
            Ok(payload) => {
                read = payload;
                read.bytes()
            }
            Err(NtStatus::END_OF_FILE) => &[],
            Err(status) => return Err(status),
        },
    };
    if bytes.is_empty() {
        return Ok(0);
    }
    let written = match target {
        Data::Stream(target) => target.write(target_offset, bytes, false)?,
        Data::File(target) => super::data::write(target, target_offset, bytes, false)?,
    };
    Ok(written.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_xattr_names_match_samba() {
        let name = StreamName::new("Zone.Identifier").expect("a name");
        assert_eq!(key_of(&name).as_deref(), Ok(c"user.DosStream.Zone.Identifier:$DATA"));
        assert_eq!(name_of(c"user.DosStream.Zone.Identifier:$DATA"), Some(name));
        for other in [c"user.DosStream.a", c"user.DosStream.:$DATA", c"user.a", c"user.forebay.dos"] {
            assert!(!is_stream(other), "{other:?}");
        }
        let longest = StreamName::new(&"n".repeat(234)).expect("a name");
        assert!(key_of(&longest).is_ok());
        let longer = StreamName::new(&"n".repeat(235)).expect("a name");
        assert_eq!(key_of(&longer), Err(NtStatus::OBJECT_NAME_INVALID));
    }

    #[test]
    fn stream_length_is_limited_to_an_xattr_value() {
        assert_eq!(end_of(65_535, 0), Ok(65_535));
        assert_eq!(end_of(65_535, 1), Err(NtStatus::FILE_SYSTEM_LIMITATION));
        assert_eq!(end_of(u64::MAX, 1), Err(NtStatus::FILE_SYSTEM_LIMITATION));
    }
}
