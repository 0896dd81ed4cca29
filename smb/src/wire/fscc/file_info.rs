//! Fixed-size information about files ([MS-FSCC] 2.4), and the class that combines it.
//!
//! Sizes and offsets are signed on the wire and never negative in valid messages; here they are unsigned, and negative values
//! become values beyond `i64::MAX`.

use super::reparse::ReparseTag;
use crate::wire::create::CreateOptions;
use crate::wire::cursor::{Put, Reader, len_u32};
use crate::wire::newtype::{layout, open_flags};
use crate::wire::{AccessMask, FileAttributes, FileTime, Malformed, utf16};

layout!(
    /// [MS-FSCC] 2.4.7, to query and to set.
    FileBasicInformation[40] {
        creation_time: FileTime, last_access_time: FileTime, last_write_time: FileTime, change_time: FileTime,
        file_attributes: FileAttributes, _: 4,
    }
);
layout!(
    /// [MS-FSCC] 2.4.47.
    FileStandardInformation[24] {
        allocation_size: u64, end_of_file: u64, number_of_links: u32, delete_pending: bool, directory: bool, _: 2,
    }
);
layout!(
    /// [MS-FSCC] 2.4.27: a number that identifies the file on its volume.
    FileInternalInformation[8] { index_number: u64, }
);
layout!(
    /// [MS-FSCC] 2.4.13.
    FileEaInformation[4] { ea_size: u32, }
);
layout!(
    /// [MS-FSCC] 2.4.1: the access that the handle grants.
    FileAccessInformation[4] { access_flags: AccessMask, }
);
layout!(
    /// [MS-FSCC] 2.4.40, to query and to set.
    FilePositionInformation[8] { current_byte_offset: u64, }
);
layout!(
    /// [MS-FSCC] 2.4.31, to query and to set: bits of [`CreateOptions`].
    FileModeInformation[4] { mode: CreateOptions, }
);
layout!(
    /// [MS-FSCC] 2.4.3: alignment of buffers less one; zero for bytes.
    FileAlignmentInformation[4] { alignment_requirement: u32, }
);
layout!(
    /// [MS-FSCC] 2.4.34.
    FileNetworkOpenInformation[56] {
        creation_time: FileTime, last_access_time: FileTime, last_write_time: FileTime, change_time: FileTime,
        allocation_size: u64, end_of_file: u64, file_attributes: FileAttributes, _: 4,
    }
);
layout!(
    /// [MS-FSCC] 2.4.6.
    FileAttributeTagInformation[8] { file_attributes: FileAttributes, reparse_tag: ReparseTag, }
);
layout!(
    /// [MS-FSCC] 2.4.9.
    FileCompressionInformation[16] {
        compressed_file_size: u64, compression_format: u16, compression_unit_shift: u8, chunk_shift: u8,
        cluster_shift: u8, _: 3,
    }
);
layout!(
    /// [MS-FSCC] 2.4.4, to set.
    FileAllocationInformation[8] { allocation_size: u64, }
);
layout!(
    /// [MS-FSCC] 2.4.14, to set.
    FileEndOfFileInformation[8] { end_of_file: u64, }
);
layout!(
    /// [MS-FSCC] 2.4.54, to set.
    FileValidDataLengthInformation[8] { valid_data_length: u64, }
);
layout!(
    /// [MS-FSCC] 2.4.11, to set.
    FileDispositionInformation[1] { delete_pending: bool, }
);
open_flags!(
    /// `Flags` of [`FileDispositionInformationEx`].
    DispositionFlags(u32) {
        DELETE = 0x01, POSIX_SEMANTICS = 0x02, FORCE_IMAGE_SECTION_CHECK = 0x04, ON_CLOSE = 0x08,
        IGNORE_READONLY_ATTRIBUTE = 0x10,
    }
);
layout!(
    /// [MS-FSCC] 2.4.12, to set.
    FileDispositionInformationEx[4] { flags: DispositionFlags, }
);
layout!(
    /// [MS-FSCC] 2.4.26.
    FileIdInformation[24] { volume_serial_number: u64, file_id: [u8; 16], }
);
layout!(
    /// [MS-FSCC] 2.4.48.
    FileStandardLinkInformation[12] {
        number_of_accessible_links: u32, total_number_of_links: u32, delete_pending: bool, directory: bool, _: 2,
    }
);
layout!(
    /// [MS-FSCC] 2.4.37, of pipes, to query and to set.
    FilePipeInformation[8] { read_mode: u32, completion_mode: u32, }
);
layout!(
    /// [MS-FSCC] 2.4.38, of pipes.
    FilePipeLocalInformation[40] {
        named_pipe_type: u32, named_pipe_configuration: u32, maximum_instances: u32, current_instances: u32,
        inbound_quota: u32, read_data_available: u32, outbound_quota: u32, write_quota_available: u32,
        named_pipe_state: u32, named_pipe_end: u32,
    }
);

/// [MS-FSCC] 2.4.2: several classes combined.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FileAllInformation {
    pub basic: FileBasicInformation,
    pub standard: FileStandardInformation,
    pub internal: FileInternalInformation,
    pub ea: FileEaInformation,
    pub access: FileAccessInformation,
    pub position: FilePositionInformation,
    pub mode: FileModeInformation,
    pub alignment: FileAlignmentInformation,
    /// Path relative to the share, with a leading `\`.
    pub name: String,
}

impl FileAllInformation {
    /// Bytes before the name. If a client's buffer is smaller, the answer is STATUS_INFO_LENGTH_MISMATCH; a name that does
    /// not fit is truncated, with STATUS_BUFFER_OVERFLOW.
    pub const FIXED_LEN: usize = 100;

    /// Reads the structure.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "FileAllInformation");
        Ok(Self {
            basic: r.get()?,
            standard: r.get()?,
            internal: r.get()?,
            ea: r.get()?,
            access: r.get()?,
            position: r.get()?,
            mode: r.get()?,
            alignment: r.get()?,
            name: {
                let len = r.get::<u32>()?;
                utf16::decode(r.take(len as usize)?)?
            },
        })
    }

    /// Appends the structure.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.basic.encode(out);
        self.standard.encode(out);
        self.internal.encode(out);
        self.ea.encode(out);
        self.access.encode(out);
        self.position.encode(out);
        self.mode.encode(out);
        self.alignment.encode(out);
        out.put(len_u32(utf16::encoded_len(&self.name)));
        utf16::encode(&self.name, out);
    }
}
