//! CANCEL ([MS-SMB2] 2.2.30): identifies the request to cancel in its header and is never answered.

use super::Malformed;
use super::cursor::{Put, Reader};

/// The request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Request;

impl Request {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        Reader::body(msg, 4, "cancel request")?.skip(2)?;
        Ok(Self)
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(4);
        out.put_u16(0);
    }
}
