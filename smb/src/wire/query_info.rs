//! QUERY_INFO ([MS-SMB2] 2.2.37, 2.2.38).

use super::Malformed;
use super::cursor::{Put, Reader, len_u16, len_u32, offset_from_header, zeros};
use super::newtype::{open_enum, open_flags};
use super::query_directory::{encode_output, parse_output};
use crate::ids::FileId;

open_enum!(
    /// `InfoType` of QUERY_INFO and SET_INFO.
    InfoType(u8) { FILE = 0x01, FILESYSTEM = 0x02, SECURITY = 0x03, QUOTA = 0x04 }
);
open_flags!(
    /// `Flags`, for extended attributes only.
    Flags(u32) { RESTART_SCAN = 0x0000_0001, RETURN_SINGLE_ENTRY = 0x0000_0002, INDEX_SPECIFIED = 0x0000_0004 }
);

/// Requested information ([MS-SMB2] 2.2.37).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request<'a> {
    pub info_type: InfoType,
    /// A [`super::fscc::FileInformationClass`] or [`super::fscc::FsInformationClass`], depending on `info_type`.
    pub file_info_class: u8,
    pub output_buffer_length: u32,
    /// [`super::fscc::security::SecurityInformation`] if `info_type` is SECURITY.
    pub additional_information: u32,
    pub flags: Flags,
    pub file_id: FileId,
    /// The names of extended attributes, or a quota query.
    pub input_buffer: &'a [u8],
}

impl<'a> Request<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 41, "query info request")?;
        let info_type = r.get()?;
        let file_info_class = r.get()?;
        let output_buffer_length = r.get()?;
        let input_offset = r.get::<u16>()?;
        r.skip(2)?;
        let input_len = r.get::<u32>()?;
        let additional_information = r.get()?;
        let flags = r.get()?;
        let file_id = r.get()?;
        Ok(Self {
            info_type,
            file_info_class,
            output_buffer_length,
            additional_information,
            flags,
            file_id,
            input_buffer: r.variable(input_offset.into(), input_len as usize)?,
        })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(41);
        out.put(self.info_type);
        out.put(self.file_info_class);
        out.put(self.output_buffer_length);
        out.put(len_u16(offset_from_header(out, start) + 32));
        zeros(out, 2);
        out.put(len_u32(self.input_buffer.len()));
        out.put(self.additional_information);
        out.put(self.flags);
        out.put(self.file_id);
        out.extend_from_slice(self.input_buffer);
        if self.input_buffer.is_empty() {
            zeros(out, 1);
        }
    }
}

/// Information ([MS-SMB2] 2.2.38), in the layout of the requested class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response<'a> {
    pub output_buffer: &'a [u8],
}

impl<'a> Response<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        Ok(Self { output_buffer: parse_output(msg, "query info response")? })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        encode_output(self.output_buffer, out);
    }
}
