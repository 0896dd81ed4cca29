//! FLUSH ([MS-SMB2] 2.2.17, 2.2.18).

use super::Malformed;
use super::cursor::{Put, Reader, zeros};
use crate::ids::FileId;

/// The file to flush to stable storage ([MS-SMB2] 2.2.17).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request {
    pub file_id: FileId,
}

impl Request {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 24, "flush request")?;
        r.skip(6)?;
        Ok(Self { file_id: r.get()? })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(24);
        zeros(out, 6);
        out.put(self.file_id);
    }
}

/// Success ([MS-SMB2] 2.2.18).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Response;

impl Response {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        Reader::body(msg, 4, "flush response")?.skip(2)?;
        Ok(Self)
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(4);
        out.put_u16(0);
    }
}
