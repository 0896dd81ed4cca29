//! SESSION_SETUP ([MS-SMB2] 2.2.5, 2.2.6).

use super::cursor::{Put, Reader, len_u16, offset_from_header};
use super::newtype::open_flags;
use super::{Capabilities, Malformed, SecurityMode};

open_flags!(
    /// `Flags` of the request.
    Flags(u8) { BINDING = 0x01 }
);
open_flags!(
    /// `SessionFlags` of the response.
    SessionFlags(u16) { IS_GUEST = 0x0001, IS_NULL = 0x0002, ENCRYPT_DATA = 0x0004 }
);

/// One step of authentication, from the client ([MS-SMB2] 2.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request<'a> {
    pub flags: Flags,
    /// One byte on the wire.
    pub security_mode: SecurityMode,
    pub capabilities: Capabilities,
    /// Reserved.
    pub channel: u32,
    pub previous_session_id: u64,
    pub security_buffer: &'a [u8],
}

impl<'a> Request<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 25, "session setup request")?;
        let flags = r.get()?;
        let security_mode = SecurityMode(r.get::<u8>()?.into());
        let capabilities = r.get()?;
        let channel = r.get()?;
        let offset = r.get::<u16>()?;
        let len = r.get::<u16>()?;
        let previous_session_id = r.get()?;
        let security_buffer = r.variable(offset.into(), len.into())?;
        Ok(Self { flags, security_mode, capabilities, channel, previous_session_id, security_buffer })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(25);
        out.put(self.flags);
        out.put(self.security_mode.0 as u8);
        out.put(self.capabilities);
        out.put(self.channel);
        out.put(len_u16(offset_from_header(out, start) + 12));
        out.put(len_u16(self.security_buffer.len()));
        out.put(self.previous_session_id);
        out.extend_from_slice(self.security_buffer);
    }
}

/// One step of authentication, from the server ([MS-SMB2] 2.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response<'a> {
    pub session_flags: SessionFlags,
    pub security_buffer: &'a [u8],
}

impl<'a> Response<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 9, "session setup response")?;
        let session_flags = r.get()?;
        let offset = r.get::<u16>()?;
        let len = r.get::<u16>()?;
        Ok(Self { session_flags, security_buffer: r.variable(offset.into(), len.into())? })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(9);
        out.put(self.session_flags);
        out.put(len_u16(offset_from_header(out, start) + 4));
        out.put(len_u16(self.security_buffer.len()));
        out.extend_from_slice(self.security_buffer);
    }
}
