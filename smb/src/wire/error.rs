//! The ERROR response ([MS-SMB2] 2.2.2).

use super::cursor::{Put, Reader, align, len_u32, patch_u16, patch_u32, zeros};
use super::newtype::open_enum;
use super::{Fault, Malformed, limits, utf16};

open_enum!(
    /// `ErrorId` ([MS-SMB2] 2.2.2.1).
    ErrorId(u32) { DEFAULT = 0x0000_0000, SHARE_REDIRECT = 0x7264_5253 }
);

/// Any failed response ([MS-SMB2] 2.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response<'a> {
    /// Contexts in `error_data`; zero before dialect 3.1.1, which has the data without a context.
    pub error_context_count: u8,
    /// Empty, or the output of [`ErrorContext::encode_list`] or [`SymbolicLinkError::encode`].
    pub error_data: &'a [u8],
}

impl<'a> Response<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 9, "error response")?;
        let error_context_count = r.get()?;
        r.skip(1)?;
        let byte_count = r.get::<u32>()?;
        Ok(Self { error_context_count, error_data: r.take(byte_count as usize)? })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(9);
        out.put(self.error_context_count);
        zeros(out, 1);
        out.put(len_u32(self.error_data.len()));
        out.extend_from_slice(self.error_data);
        if self.error_data.is_empty() {
            // [MS-SMB2] 2.2.2: one byte, which ByteCount does not include.
            zeros(out, 1);
        }
    }
}

/// Error data of dialect 3.1.1 ([MS-SMB2] 2.2.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct ErrorContext<'a> {
    pub error_id: ErrorId,
    pub error_context_data: &'a [u8],
}

impl<'a> ErrorContext<'a> {
    /// Reads the contexts in the data of a response.
    pub fn parse_list(response: &Response<'a>) -> Result<Vec<Self>, Malformed> {
        let mut r = Reader::new(response.error_data, "error context");
        let mut contexts = Vec::new();
        for index in 0..response.error_context_count {
            if usize::from(index) == limits::NEGOTIATE_CONTEXTS_MAX {
                return Err(r.fault(Fault::TooMany));
            }
            if index > 0 {
                r.skip(r.position().next_multiple_of(8) - r.position())?;
            }
            let len = r.get::<u32>()?;
            let error_id = r.get()?;
            contexts.push(Self { error_id, error_context_data: r.take(len as usize)? });
        }
        Ok(contexts)
    }

    /// Appends contexts, as the error data of a response.
    pub fn encode_list(contexts: &[Self], out: &mut Vec<u8>) {
        let start = out.len();
        for context in contexts {
            align(out, start, 8);
            out.put(len_u32(context.error_context_data.len()));
            out.put(context.error_id);
            out.extend_from_slice(context.error_context_data);
        }
    }
}

const SYMLINK_ERROR_TAG: u32 = 0x4c4d_5953;
/// `Flags`: the target is relative to the link ([MS-SMB2] 2.2.2.2.1).
pub const SYMLINK_FLAG_RELATIVE: u32 = 1;

/// Sent with STATUS_STOPPED_ON_SYMLINK: the target of the link ([MS-SMB2] 2.2.2.2.1).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct SymbolicLinkError {
    /// Bytes of UTF-16 of the path after the link.
    pub unparsed_path_length: u16,
    pub flags: u32,
    pub substitute_name: String,
    pub print_name: String,
}

impl SymbolicLinkError {
    /// Reads error data.
    pub fn parse(data: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(data, "symbolic link error");
        r.skip(4)?;
        if r.get::<u32>()? != SYMLINK_ERROR_TAG
            || r.get::<u32>()? != super::fscc::reparse::ReparseTag::SYMLINK.0
        {
            return Err(r.fault(Fault::Value));
        }
        r.skip(2)?;
        let unparsed_path_length = r.get()?;
        let mut field = || r.get::<u16>().map(usize::from);
        let (substitute_offset, substitute_len, print_offset, print_len) =
            (field()?, field()?, field()?, field()?);
        let flags = r.get()?;
        let names = Reader::new(r.rest(), "symbolic link error");
        Ok(Self {
            unparsed_path_length,
            flags,
            substitute_name: utf16::decode(names.variable(substitute_offset, substitute_len)?)?,
            print_name: utf16::decode(names.variable(print_offset, print_len)?)?,
        })
    }

    /// Appends error data.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let substitute_len = utf16::encoded_len(&self.substitute_name);
        let print_len = utf16::encoded_len(&self.print_name);
        zeros(out, 4);
        out.put_u32(SYMLINK_ERROR_TAG);
        out.put(super::fscc::reparse::ReparseTag::SYMLINK);
        out.put_u16((12 + substitute_len + print_len) as u16);
        out.put(self.unparsed_path_length);
        let names_at = out.len();
        zeros(out, 8);
        out.put(self.flags);
        utf16::encode(&self.substitute_name, out);
        utf16::encode(&self.print_name, out);
        for (index, value) in [0, substitute_len, substitute_len, print_len].into_iter().enumerate() {
            patch_u16(out, names_at + 2 * index, value);
        }
        let len = out.len() - start - 4;
        patch_u32(out, start, len);
    }
}
