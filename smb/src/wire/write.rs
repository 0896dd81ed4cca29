//! WRITE ([MS-SMB2] 2.2.21, 2.2.22). Payload stays with the transport.

use super::cursor::{Put, Reader, len_u16, offset_from_header, zeros};
use super::newtype::open_flags;
use super::read::Channel;
use super::{HEADER_LEN, Malformed};
use crate::ids::FileId;

open_flags!(
    /// `Flags`.
    Flags(u32) { WRITE_THROUGH = 0x0000_0001, WRITE_UNBUFFERED = 0x0000_0002, REQUEST_TRANSPORT_ENCRYPTION = 0x0000_0004 }
);

/// Bytes of the fixed part of a request.
pub const REQUEST_FIXED_LEN: usize = 48;
/// Where the payload begins in every request we encode, and in those of all known clients.
pub const REQUEST_DATA_OFFSET: u16 = (HEADER_LEN + REQUEST_FIXED_LEN) as u16;

/// A range to write ([MS-SMB2] 2.2.21). `data_offset` and `length` locate the payload in the message. The transport checks
/// that it is present, see [`Request::data`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request<'a> {
    /// From the header to the payload.
    pub data_offset: u16,
    pub length: u32,
    pub offset: u64,
    pub file_id: FileId,
    pub channel: Channel,
    pub remaining_bytes: u32,
    pub flags: Flags,
    /// RDMA descriptors, depending on `channel`.
    pub channel_info: &'a [u8],
}

impl<'a> Request<'a> {
    /// Reads a message from its SMB2 header on; it can end where its payload begins.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 49, "write request")?;
        let data_offset: u16 = r.get()?;
        let length = r.get()?;
        let offset = r.get()?;
        let file_id = r.get()?;
        let channel = r.get()?;
        let remaining_bytes = r.get()?;
        let info_offset = r.get::<u16>()?;
        let info_len = r.get::<u16>()?;
        let flags = r.get()?;
        let channel_info = match channel {
            Channel::NONE => &[],
            _ => r.variable(info_offset.into(), info_len.into())?,
        };
        if length > 0 && usize::from(data_offset) < r.position() {
            return Err(Malformed {
                fault: super::Fault::Offset,
                what: "write request",
                offset: data_offset.into(),
            });
        }
        Ok(Self { data_offset, length, offset, file_id, channel, remaining_bytes, flags, channel_info })
    }

    /// Appends everything except the payload, which begins at `data_offset` from the header: set it to
    /// [`REQUEST_DATA_OFFSET`] and send the payload directly after it, unless there is channel info.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(49);
        out.put(self.data_offset);
        out.put(self.length);
        out.put(self.offset);
        out.put(self.file_id);
        out.put(self.channel);
        out.put(self.remaining_bytes);
        if self.channel_info.is_empty() {
            zeros(out, 4);
        } else {
            out.put(len_u16(offset_from_header(out, start) + 8));
            out.put(len_u16(self.channel_info.len()));
        }
        out.put(self.flags);
        out.extend_from_slice(self.channel_info);
    }

    /// The payload within a complete message.
    pub fn data<'m>(&self, msg: &'m [u8]) -> Result<&'m [u8], Malformed> {
        let mut r = Reader::new(msg, "write request");
        r.skip(HEADER_LEN + REQUEST_FIXED_LEN)?;
        r.variable(self.data_offset.into(), self.length as usize)
    }
}

/// Number of bytes written ([MS-SMB2] 2.2.22).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response {
    pub count: u32,
    /// Reserved; all servers send zero.
    pub remaining: u32,
}

impl Response {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 17, "write response")?;
        r.skip(2)?;
        let response = Self { count: r.get()?, remaining: r.get()? };
        r.skip(4)?;
        Ok(response)
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(17);
        out.put_u16(0);
        out.put(self.count);
        out.put(self.remaining);
        zeros(out, 4);
    }
}
