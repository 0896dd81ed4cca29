//! QUERY_DIRECTORY ([MS-SMB2] 2.2.33, 2.2.34).

use super::cursor::{Put, Reader, len_u16, len_u32, offset_from_header, zeros};
use super::fscc::FileInformationClass;
use super::newtype::open_flags;
use super::{HEADER_LEN, Malformed, utf16};
use crate::ids::FileId;

open_flags!(
    /// `Flags`.
    Flags(u8) { RESTART_SCANS = 0x01, RETURN_SINGLE_ENTRY = 0x02, INDEX_SPECIFIED = 0x04, REOPEN = 0x10 }
);

/// Requested entries ([MS-SMB2] 2.2.33).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request {
    pub file_information_class: FileInformationClass,
    pub flags: Flags,
    pub file_index: u32,
    pub file_id: FileId,
    pub output_buffer_length: u32,
    /// The pattern, with wildcards of [MS-FSA] 2.1.4.4.
    pub file_name: String,
}

impl Request {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 33, "query directory request")?;
        let file_information_class = r.get()?;
        let flags = r.get()?;
        let file_index = r.get()?;
        let file_id = r.get()?;
        let name_offset = r.get::<u16>()?;
        let name_len = r.get::<u16>()?;
        let output_buffer_length = r.get()?;
        let file_name = utf16::decode(r.variable(name_offset.into(), name_len.into())?)?;
        Ok(Self { file_information_class, flags, file_index, file_id, output_buffer_length, file_name })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(33);
        out.put(self.file_information_class);
        out.put(self.flags);
        out.put(self.file_index);
        out.put(self.file_id);
        out.put(len_u16(offset_from_header(out, start) + 8));
        out.put(len_u16(utf16::encoded_len(&self.file_name)));
        out.put(self.output_buffer_length);
        utf16::encode(&self.file_name, out);
        if self.file_name.is_empty() {
            zeros(out, 1);
        }
    }
}

/// Entries ([MS-SMB2] 2.2.34), in the layout of the requested class: [`super::fscc::directory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response<'a> {
    pub output_buffer: &'a [u8],
}

/// Where the output of [`Response::encode`] begins, counted from the header. The same for QUERY_DIRECTORY, QUERY_INFO and
/// CHANGE_NOTIFY.
pub const RESPONSE_OUTPUT_OFFSET: u16 = HEADER_LEN as u16 + 8;

impl<'a> Response<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        Ok(Self { output_buffer: parse_output(msg, "query directory response")? })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        encode_output(self.output_buffer, out);
    }
}

/// The body that three responses share: structure size 9, offset, length, bytes.
pub(crate) fn parse_output<'a>(msg: &'a [u8], what: &'static str) -> Result<&'a [u8], Malformed> {
    let mut r = Reader::body(msg, 9, what)?;
    let offset = r.get::<u16>()?;
    let len = r.get::<u32>()?;
    r.variable(offset.into(), len as usize)
}

/// See [`parse_output`].
pub(crate) fn encode_output(output: &[u8], out: &mut Vec<u8>) {
    out.put_u16(9);
    out.put_u16(RESPONSE_OUTPUT_OFFSET);
    out.put(len_u32(output.len()));
    out.extend_from_slice(output);
}
