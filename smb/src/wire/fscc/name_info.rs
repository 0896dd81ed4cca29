//! Information classes that contain names ([MS-FSCC] 2.4).

use crate::wire::cursor::{Put, Reader, align, len_u32, patch_u32, zeros};
use crate::wire::newtype::open_flags;
use crate::wire::{Fault, Malformed, limits, utf16};

/// A name and its length: FileNameInformation ([MS-FSCC] 2.1.7), FileAlternateNameInformation (2.4.5),
/// FileNormalizedNameInformation (2.4.36), FileShortNameInformation (2.4.46).
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FileNameInformation {
    pub file_name: String,
}

impl FileNameInformation {
    /// Bytes before the name.
    pub const FIXED_LEN: usize = 4;

    /// Reads the structure.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "FileNameInformation");
        let len = r.get::<u32>()?;
        Ok(Self { file_name: utf16::decode(r.take(len as usize)?)? })
    }

    /// Appends the structure.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(len_u32(utf16::encoded_len(&self.file_name)));
        utf16::encode(&self.file_name, out);
    }
}

/// A new name, in the layout for SMB2: FileRenameInformation ([MS-FSCC] 2.4.42.2) and FileLinkInformation (2.4.28.2).
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FileRenameInformation {
    pub replace_if_exists: bool,
    /// Zero over the network.
    pub root_directory: u64,
    /// Path relative to the share.
    pub file_name: String,
}

/// FileLinkInformation ([MS-FSCC] 2.4.28.2) has the same fields.
pub type FileLinkInformation = FileRenameInformation;

impl FileRenameInformation {
    /// Reads the structure.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "FileRenameInformation");
        let replace_if_exists = r.get()?;
        r.skip(7)?;
        let root_directory = r.get()?;
        let len = r.get::<u32>()?;
        Ok(Self { replace_if_exists, root_directory, file_name: utf16::decode(r.take(len as usize)?)? })
    }

    /// Appends the structure.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put(self.replace_if_exists);
        zeros(out, 7);
        encode_target(out, start, self.root_directory, &self.file_name);
    }
}

open_flags!(
    /// `Flags` of [`FileRenameInformationEx`].
    RenameFlags(u32) {
        REPLACE_IF_EXISTS = 0x01, POSIX_SEMANTICS = 0x02, SUPPRESS_PIN_STATE_INHERITANCE = 0x04,
        SUPPRESS_STORAGE_RESERVE_INHERITANCE = 0x08, NO_INCREASE_AVAILABLE_SPACE = 0x10,
        NO_DECREASE_AVAILABLE_SPACE = 0x20, IGNORE_READONLY_ATTRIBUTE = 0x40,
    }
);

/// A new name and flags for the rename ([MS-FSCC] 2.4.43).
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FileRenameInformationEx {
    pub flags: RenameFlags,
    /// Zero over the network.
    pub root_directory: u64,
    pub file_name: String,
}

impl FileRenameInformationEx {
    /// Reads the structure.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "FileRenameInformationEx");
        let flags = r.get()?;
        r.skip(4)?;
        let root_directory = r.get()?;
        let len = r.get::<u32>()?;
        Ok(Self { flags, root_directory, file_name: utf16::decode(r.take(len as usize)?)? })
    }

    /// Appends the structure.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put(self.flags);
        zeros(out, 4);
        encode_target(out, start, self.root_directory, &self.file_name);
    }
}

fn encode_target(out: &mut Vec<u8>, start: usize, root_directory: u64, file_name: &str) {
    out.put(root_directory);
    out.put(len_u32(utf16::encoded_len(file_name)));
    utf16::encode(file_name, out);
    // [MS-FSCC] 2.4.42.2: at least 24 bytes, so short names are padded.
    let len = out.len() - start;
    zeros(out, 24usize.saturating_sub(len));
}

/// A stream of a file ([MS-FSCC] 2.4.49).
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FileStreamInformation {
    pub stream_size: u64,
    pub stream_allocation_size: u64,
    /// `::$DATA` for the unnamed stream.
    pub stream_name: String,
}

impl FileStreamInformation {
    /// Reads a list; an empty buffer has no streams.
    pub fn parse_list(bytes: &[u8]) -> Result<Vec<Self>, Malformed> {
        let mut streams = Vec::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            let mut r = Reader::new(rest, "FileStreamInformation");
            if streams.len() == limits::LIST_MAX {
                return Err(r.fault(Fault::TooMany));
            }
            let next = r.get::<u32>()? as usize;
            let len = r.get::<u32>()?;
            let stream_size = r.get()?;
            let stream_allocation_size = r.get()?;
            let stream_name = utf16::decode(r.take(len as usize)?)?;
            streams.push(Self { stream_size, stream_allocation_size, stream_name });
            if next == 0 {
                break;
            }
            if next < r.position() || next > rest.len() {
                return Err(r.fault(Fault::Offset));
            }
            rest = &rest[next..];
        }
        Ok(streams)
    }

    /// Appends a list.
    pub fn encode_list(streams: &[Self], out: &mut Vec<u8>) {
        for (index, stream) in streams.iter().enumerate() {
            let start = out.len();
            zeros(out, 4);
            out.put(len_u32(utf16::encoded_len(&stream.stream_name)));
            out.put(stream.stream_size);
            out.put(stream.stream_allocation_size);
            utf16::encode(&stream.stream_name, out);
            if index + 1 < streams.len() {
                align(out, start, 8);
                let next = out.len() - start;
                patch_u32(out, start, next);
            }
        }
    }
}
