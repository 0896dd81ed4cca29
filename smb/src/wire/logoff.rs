//! LOGOFF ([MS-SMB2] 2.2.7, 2.2.8): only a structure size in both directions.

use super::Malformed;
use super::cursor::{Put, Reader};

/// The request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Request;

impl Request {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        Reader::body(msg, 4, "logoff request")?.skip(2)?;
        Ok(Self)
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(4);
        out.put_u16(0);
    }
}

/// The response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Response;

impl Response {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        Reader::body(msg, 4, "logoff response")?.skip(2)?;
        Ok(Self)
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(4);
        out.put_u16(0);
    }
}
