//! CLOSE ([MS-SMB2] 2.2.15, 2.2.16).

use super::cursor::{Put, Reader, zeros};
use super::newtype::open_flags;
use super::{FileAttributes, FileTime, Malformed};
use crate::ids::FileId;

open_flags!(
    /// `Flags`, in both directions.
    Flags(u16) { POSTQUERY_ATTRIB = 0x0001 }
);

/// The file to close ([MS-SMB2] 2.2.15).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request {
    pub flags: Flags,
    pub file_id: FileId,
}

impl Request {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 24, "close request")?;
        let flags = r.get()?;
        r.skip(4)?;
        Ok(Self { flags, file_id: r.get()? })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(24);
        out.put(self.flags);
        zeros(out, 4);
        out.put(self.file_id);
    }
}

/// Final attributes of the file ([MS-SMB2] 2.2.16): all zero unless [`Flags::POSTQUERY_ATTRIB`] is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response {
    pub flags: Flags,
    pub creation_time: FileTime,
    pub last_access_time: FileTime,
    pub last_write_time: FileTime,
    pub change_time: FileTime,
    pub allocation_size: u64,
    pub end_of_file: u64,
    pub file_attributes: FileAttributes,
}

impl Response {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 60, "close response")?;
        let flags = r.get()?;
        r.skip(4)?;
        Ok(Self {
            flags,
            creation_time: r.get()?,
            last_access_time: r.get()?,
            last_write_time: r.get()?,
            change_time: r.get()?,
            allocation_size: r.get()?,
            end_of_file: r.get()?,
            file_attributes: r.get()?,
        })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(60);
        out.put(self.flags);
        zeros(out, 4);
        out.put(self.creation_time);
        out.put(self.last_access_time);
        out.put(self.last_write_time);
        out.put(self.change_time);
        out.put(self.allocation_size);
        out.put(self.end_of_file);
        out.put(self.file_attributes);
    }
}
