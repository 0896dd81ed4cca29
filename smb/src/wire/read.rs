//! READ ([MS-SMB2] 2.2.19, 2.2.20). Payload stays with the transport.

use super::cursor::{Put, Reader, len_u16, offset_from_header, zeros};
use super::newtype::{open_enum, open_flags};
use super::{HEADER_LEN, Malformed};
use crate::ids::FileId;

open_flags!(
    /// `Flags` of the request.
    Flags(u8) { READ_UNBUFFERED = 0x01, REQUEST_COMPRESSED = 0x02 }
);
open_flags!(
    /// `Flags` of the response, dialect 3.1.1.
    ResponseFlags(u32) { RDMA_TRANSFORM = 0x0000_0001 }
);
open_enum!(
    /// `Channel` of READ and WRITE: how the payload is transferred.
    Channel(u32) { NONE = 0, RDMA_V1 = 1, RDMA_V1_INVALIDATE = 2, RDMA_TRANSFORM = 3 }
);

/// Where the payload begins in every response we encode: directly after header and fixed body.
pub const RESPONSE_DATA_OFFSET: u8 = (HEADER_LEN + RESPONSE_FIXED_LEN) as u8;
/// Bytes that [`Response::encode`] appends.
pub const RESPONSE_FIXED_LEN: usize = 16;

/// A range to read ([MS-SMB2] 2.2.19).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request<'a> {
    /// The client's preferred position of the payload in the response; advice that servers ignore.
    pub padding: u8,
    pub flags: Flags,
    pub length: u32,
    pub offset: u64,
    pub file_id: FileId,
    pub minimum_count: u32,
    pub channel: Channel,
    pub remaining_bytes: u32,
    /// `Buffer`: RDMA descriptors, depending on `channel`.
    pub channel_info: &'a [u8],
}

impl<'a> Request<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 49, "read request")?;
        let padding = r.get()?;
        let flags = r.get()?;
        let length = r.get()?;
        let offset = r.get()?;
        let file_id = r.get()?;
        let minimum_count = r.get()?;
        let channel = r.get()?;
        let remaining_bytes = r.get()?;
        let info_offset = r.get::<u16>()?;
        let info_len = r.get::<u16>()?;
        // [MS-SMB2] 2.2.19: without a channel both fields have no meaning.
        let channel_info = match channel {
            Channel::NONE => &[],
            _ => r.variable(info_offset.into(), info_len.into())?,
        };
        Ok(Self {
            padding,
            flags,
            length,
            offset,
            file_id,
            minimum_count,
            channel,
            remaining_bytes,
            channel_info,
        })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(49);
        out.put(self.padding);
        out.put(self.flags);
        out.put(self.length);
        out.put(self.offset);
        out.put(self.file_id);
        out.put(self.minimum_count);
        out.put(self.channel);
        out.put(self.remaining_bytes);
        if self.channel_info.is_empty() {
            // [MS-SMB2] 2.2.19: the buffer contains at least one byte.
            zeros(out, 5);
        } else {
            out.put(len_u16(offset_from_header(out, start) + 4));
            out.put(len_u16(self.channel_info.len()));
            out.extend_from_slice(self.channel_info);
        }
    }
}

/// The part before the payload ([MS-SMB2] 2.2.20).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response {
    /// From the header; [`RESPONSE_DATA_OFFSET`] in responses that we send.
    pub data_offset: u8,
    pub data_length: u32,
    /// Bytes sent by RDMA.
    pub data_remaining: u32,
    pub flags: ResponseFlags,
}

impl Response {
    /// A response with `data_length` bytes of payload that follow directly.
    #[must_use]
    pub const fn inline(data_length: u32) -> Self {
        Self {
            data_offset: RESPONSE_DATA_OFFSET,
            data_length,
            data_remaining: 0,
            flags: ResponseFlags::empty(),
        }
    }

    /// Reads a message from its SMB2 header on, but not the payload: [`Response::data`] returns it.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 17, "read response")?;
        let data_offset = r.get()?;
        r.skip(1)?;
        Ok(Self { data_offset, data_length: r.get()?, data_remaining: r.get()?, flags: r.get()? })
    }

    /// Appends the fixed part, [`RESPONSE_FIXED_LEN`] bytes; the transport sends the payload after it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(17);
        out.put(self.data_offset);
        zeros(out, 1);
        out.put(self.data_length);
        out.put(self.data_remaining);
        out.put(self.flags);
    }

    /// The payload within a complete message.
    pub fn data<'a>(&self, msg: &'a [u8]) -> Result<&'a [u8], Malformed> {
        let mut r = Reader::new(msg, "read response");
        r.skip(HEADER_LEN + RESPONSE_FIXED_LEN)?;
        r.variable(self.data_offset.into(), self.data_length as usize)
    }
}
