//! CHANGE_NOTIFY ([MS-SMB2] 2.2.35, 2.2.36).

use super::Malformed;
use super::cursor::{Put, Reader, zeros};
use super::newtype::open_flags;
use super::query_directory::{encode_output, parse_output};
use crate::ids::FileId;

open_flags!(
    /// `Flags`.
    Flags(u16) { WATCH_TREE = 0x0001 }
);
open_flags!(
    /// `CompletionFilter`.
    CompletionFilter(u32) {
        FILE_NAME = 0x001, DIR_NAME = 0x002, ATTRIBUTES = 0x004, SIZE = 0x008, LAST_WRITE = 0x010,
        LAST_ACCESS = 0x020, CREATION = 0x040, EA = 0x080, SECURITY = 0x100, STREAM_NAME = 0x200,
        STREAM_SIZE = 0x400, STREAM_WRITE = 0x800,
    }
);

/// A directory to watch ([MS-SMB2] 2.2.35).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request {
    pub flags: Flags,
    pub output_buffer_length: u32,
    pub file_id: FileId,
    pub completion_filter: CompletionFilter,
}

impl Request {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 32, "change notify request")?;
        let request = Self {
            flags: r.get()?,
            output_buffer_length: r.get()?,
            file_id: r.get()?,
            completion_filter: r.get()?,
        };
        r.skip(4)?;
        Ok(request)
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(32);
        out.put(self.flags);
        out.put(self.output_buffer_length);
        out.put(self.file_id);
        out.put(self.completion_filter);
        zeros(out, 4);
    }
}

/// Changes ([MS-SMB2] 2.2.36): a list of [`super::fscc::notify::FileNotifyInformation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response<'a> {
    pub output_buffer: &'a [u8],
}

impl<'a> Response<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        Ok(Self { output_buffer: parse_output(msg, "change notify response")? })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        encode_output(self.output_buffer, out);
    }
}
