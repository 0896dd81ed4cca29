//! IOCTL ([MS-SMB2] 2.2.31, 2.2.32). The structures inside are in [`super::fscc::fsctl`].

use super::Malformed;
use super::cursor::{Put, Reader, align, len_u32, offset_from_header, patch_u32, zeros};
use super::fscc::fsctl::FsctlCode;
use super::newtype::open_flags;
use crate::ids::FileId;

open_flags!(
    /// `Flags` of the request. Without [`Flags::IS_FSCTL`] it is an I/O control, which no server supports.
    Flags(u32) { IS_FSCTL = 0x0000_0001 }
);

/// A control ([MS-SMB2] 2.2.31).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request<'a> {
    pub ctl_code: FsctlCode,
    pub file_id: FileId,
    pub input: &'a [u8],
    /// Maximum bytes of input in the response.
    pub max_input_response: u32,
    /// Empty in the requests of all clients.
    pub output: &'a [u8],
    /// Maximum bytes of output in the response.
    pub max_output_response: u32,
    pub flags: Flags,
}

impl<'a> Request<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 57, "ioctl request")?;
        r.skip(2)?;
        let ctl_code = r.get()?;
        let file_id = r.get()?;
        let input_offset = r.get::<u32>()?;
        let input_count = r.get::<u32>()?;
        let max_input_response = r.get()?;
        let output_offset = r.get::<u32>()?;
        let output_count = r.get::<u32>()?;
        let max_output_response = r.get()?;
        let flags = r.get()?;
        r.skip(4)?;
        Ok(Self {
            ctl_code,
            file_id,
            input: r.variable(input_offset as usize, input_count as usize)?,
            max_input_response,
            output: r.variable(output_offset as usize, output_count as usize)?,
            max_output_response,
            flags,
        })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(57);
        out.put_u16(0);
        out.put(self.ctl_code);
        out.put(self.file_id);
        let input_at = out.len();
        zeros(out, 4);
        out.put(len_u32(self.input.len()));
        out.put(self.max_input_response);
        let output_at = out.len();
        zeros(out, 4);
        out.put(len_u32(self.output.len()));
        out.put(self.max_output_response);
        out.put(self.flags);
        zeros(out, 4);
        encode_buffers(out, start, (input_at, self.input), (output_at, self.output));
        if self.input.is_empty() && self.output.is_empty() {
            zeros(out, 1);
        }
    }
}

/// The result of the control ([MS-SMB2] 2.2.32).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response<'a> {
    pub ctl_code: FsctlCode,
    pub file_id: FileId,
    /// Only pass-through controls return input; we send none.
    pub input: &'a [u8],
    pub output: &'a [u8],
    pub flags: u32,
}

impl<'a> Response<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 49, "ioctl response")?;
        r.skip(2)?;
        let ctl_code = r.get()?;
        let file_id = r.get()?;
        let input_offset = r.get::<u32>()?;
        let input_count = r.get::<u32>()?;
        let output_offset = r.get::<u32>()?;
        let output_count = r.get::<u32>()?;
        let flags = r.get()?;
        r.skip(4)?;
        Ok(Self {
            ctl_code,
            file_id,
            input: r.variable(input_offset as usize, input_count as usize)?,
            output: r.variable(output_offset as usize, output_count as usize)?,
            flags,
        })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(49);
        out.put_u16(0);
        out.put(self.ctl_code);
        out.put(self.file_id);
        let input_at = out.len();
        zeros(out, 4);
        out.put(len_u32(self.input.len()));
        let output_at = out.len();
        zeros(out, 4);
        out.put(len_u32(self.output.len()));
        out.put(self.flags);
        zeros(out, 4);
        encode_buffers(out, start, (input_at, self.input), (output_at, self.output));
    }
}

/// Input, then output, the output aligned ([MS-SMB2] 2.2.32). Offsets are set even for empty buffers, as by Windows.
fn encode_buffers(out: &mut Vec<u8>, start: usize, input: (usize, &[u8]), output: (usize, &[u8])) {
    for (at, buffer) in [input, output] {
        align(out, start, 8);
        let offset = offset_from_header(out, start);
        patch_u32(out, at, offset);
        out.extend_from_slice(buffer);
    }
}
