//! SET_INFO ([MS-SMB2] 2.2.39, 2.2.40).

use super::Malformed;
use super::cursor::{Put, Reader, len_u16, len_u32, offset_from_header, zeros};
use super::query_info::InfoType;
use crate::ids::FileId;

/// Information to set ([MS-SMB2] 2.2.39).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request<'a> {
    pub info_type: InfoType,
    /// A [`super::fscc::FileInformationClass`] or [`super::fscc::FsInformationClass`], depending on `info_type`.
    pub file_info_class: u8,
    /// [`super::fscc::security::SecurityInformation`] if `info_type` is SECURITY.
    pub additional_information: u32,
    pub file_id: FileId,
    pub buffer: &'a [u8],
}

impl<'a> Request<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 33, "set info request")?;
        let info_type = r.get()?;
        let file_info_class = r.get()?;
        let len = r.get::<u32>()?;
        let offset = r.get::<u16>()?;
        r.skip(2)?;
        let additional_information = r.get()?;
        let file_id = r.get()?;
        Ok(Self {
            info_type,
            file_info_class,
            additional_information,
            file_id,
            buffer: r.variable(offset.into(), len as usize)?,
        })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(33);
        out.put(self.info_type);
        out.put(self.file_info_class);
        out.put(len_u32(self.buffer.len()));
        out.put(len_u16(offset_from_header(out, start) + 24));
        zeros(out, 2);
        out.put(self.additional_information);
        out.put(self.file_id);
        out.extend_from_slice(self.buffer);
        if self.buffer.is_empty() {
            zeros(out, 1);
        }
    }
}

/// Success ([MS-SMB2] 2.2.40).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Response;

impl Response {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        Reader::body(msg, 2, "set info response")?;
        Ok(Self)
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(2);
    }
}
