//! NEGOTIATE ([MS-SMB2] 2.2.3, 2.2.4).

use super::cursor::{Put, Reader, align, len_u16, offset_from_header, patch_u16, patch_u32, zeros};
use super::newtype::{open_enum, open_flags};
use super::{Fault, FileTime, Malformed, NegotiateContext, limits, negotiate_context};

open_enum!(
    /// `DialectRevision`.
    Dialect(u16) {
        SMB2_0_2 = 0x0202, SMB2_1 = 0x0210, SMB3_0 = 0x0300, SMB3_0_2 = 0x0302, SMB3_1_1 = 0x0311,
        // Answer to an SMB1 negotiate that offers "SMB 2.???" ([MS-SMB2] 3.3.5.3.1): negotiate again.
        SMB2_WILDCARD = 0x02ff,
    }
);

impl Dialect {
    /// The usual notation: "3.1.1".
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SMB2_0_2 => "2.0.2",
            Self::SMB2_1 => "2.1",
            Self::SMB3_0 => "3.0",
            Self::SMB3_0_2 => "3.0.2",
            Self::SMB3_1_1 => "3.1.1",
            _ => "unknown",
        }
    }
}

open_flags!(
    /// `SecurityMode` (two bytes here, one in SESSION_SETUP).
    SecurityMode(u16) { SIGNING_ENABLED = 0x1, SIGNING_REQUIRED = 0x2 }
);

open_flags!(
    /// `Capabilities`.
    Capabilities(u32) {
        DFS = 0x01, LEASING = 0x02, LARGE_MTU = 0x04, MULTI_CHANNEL = 0x08, PERSISTENT_HANDLES = 0x10,
        DIRECTORY_LEASING = 0x20, ENCRYPTION = 0x40, NOTIFICATIONS = 0x80,
    }
);

/// The client's offer ([MS-SMB2] 2.2.3).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request<'a> {
    pub security_mode: SecurityMode,
    pub capabilities: Capabilities,
    pub client_guid: [u8; 16],
    /// `ClientStartTime`, reserved; only present if 3.1.1 is not among the dialects.
    pub client_start_time: FileTime,
    pub dialects: Vec<Dialect>,
    /// `NegotiateContextList`; only present if 3.1.1 is among the dialects.
    pub contexts: Vec<NegotiateContext<'a>>,
}

impl<'a> Request<'a> {
    /// Reads a message from its SMB2 header on. A message without dialects is well formed: the engine answers
    /// STATUS_INVALID_PARAMETER ([MS-SMB2] 3.3.5.4).
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 36, "negotiate request")?;
        let dialect_count = r.get::<u16>()?;
        let security_mode = r.get()?;
        r.skip(2)?;
        let capabilities = r.get()?;
        let client_guid = r.get()?;
        let start_time_or_contexts: u64 = r.get()?;
        if usize::from(dialect_count) > limits::DIALECTS_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        let dialects = (0..dialect_count).map(|_| r.get()).collect::<Result<Vec<Dialect>, _>>()?;
        let (client_start_time, contexts) = if dialects.contains(&Dialect::SMB3_1_1) {
            let offset = start_time_or_contexts as u32;
            let count = (start_time_or_contexts >> 32) as u16;
            (FileTime(0), negotiate_context::parse_list(&r, offset, count)?)
        } else {
            (FileTime(start_time_or_contexts), Vec::new())
        };
        Ok(Self { security_mode, capabilities, client_guid, client_start_time, dialects, contexts })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(36);
        out.put(len_u16(self.dialects.len()));
        out.put(self.security_mode);
        out.put_u16(0);
        out.put(self.capabilities);
        out.put(self.client_guid);
        let contexts_at = out.len();
        out.put(self.client_start_time);
        for dialect in &self.dialects {
            out.put(*dialect);
        }
        if self.dialects.contains(&Dialect::SMB3_1_1) {
            align(out, start, 8);
            let offset = offset_from_header(out, start);
            patch_u32(out, contexts_at, offset);
            patch_u16(out, contexts_at + 4, self.contexts.len());
            patch_u16(out, contexts_at + 6, 0);
            negotiate_context::encode_list(&self.contexts, out);
        }
    }
}

/// The server's choice ([MS-SMB2] 2.2.4).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response<'a> {
    pub security_mode: SecurityMode,
    pub dialect_revision: Dialect,
    pub server_guid: [u8; 16],
    pub capabilities: Capabilities,
    pub max_transact_size: u32,
    pub max_read_size: u32,
    pub max_write_size: u32,
    pub system_time: FileTime,
    pub server_start_time: FileTime,
    pub security_buffer: &'a [u8],
    /// Only present in dialect 3.1.1.
    pub contexts: Vec<NegotiateContext<'a>>,
}

impl<'a> Response<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 65, "negotiate response")?;
        let security_mode = r.get()?;
        let dialect_revision = r.get()?;
        let context_count = r.get()?;
        let server_guid = r.get()?;
        let capabilities = r.get()?;
        let max_transact_size = r.get()?;
        let max_read_size = r.get()?;
        let max_write_size = r.get()?;
        let system_time = r.get()?;
        let server_start_time = r.get()?;
        let buffer_offset = r.get::<u16>()?;
        let buffer_len = r.get::<u16>()?;
        let context_offset = r.get()?;
        let security_buffer = r.variable(buffer_offset.into(), buffer_len.into())?;
        let contexts = if dialect_revision == Dialect::SMB3_1_1 {
            negotiate_context::parse_list(&r, context_offset, context_count)?
        } else {
            Vec::new()
        };
        Ok(Self {
            security_mode,
            dialect_revision,
            server_guid,
            capabilities,
            max_transact_size,
            max_read_size,
            max_write_size,
            system_time,
            server_start_time,
            security_buffer,
            contexts,
        })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let with_contexts = self.dialect_revision == Dialect::SMB3_1_1;
        out.put_u16(65);
        out.put(self.security_mode);
        out.put(self.dialect_revision);
        out.put(if with_contexts { len_u16(self.contexts.len()) } else { 0 });
        out.put(self.server_guid);
        out.put(self.capabilities);
        out.put(self.max_transact_size);
        out.put(self.max_read_size);
        out.put(self.max_write_size);
        out.put(self.system_time);
        out.put(self.server_start_time);
        // The buffer's offset is set even if it is empty: some clients check it nevertheless.
        out.put(len_u16(offset_from_header(out, start) + 8));
        out.put(len_u16(self.security_buffer.len()));
        let contexts_at = out.len();
        zeros(out, 4);
        out.extend_from_slice(self.security_buffer);
        if with_contexts {
            align(out, start, 8);
            let offset = offset_from_header(out, start);
            patch_u32(out, contexts_at, offset);
            negotiate_context::encode_list(&self.contexts, out);
        }
    }
}
