//! Code that QUERY_INFO, SET_INFO and the handling of security descriptors share.

use crate::engine::open::Open;
use crate::engine::request::step::{Reply, Step};
use crate::status::NtStatus;
use crate::wire::{AccessMask, query_info, set_info};

/// The answer within the client's buffer: a buffer below `fixed` bytes is an error, a truncated answer is a warning
/// ([MS-SMB2] 3.3.5.20.1).
pub(super) fn answer(mut output: Vec<u8>, fixed: usize, limit: u32) -> Step {
    let limit = limit as usize;
    if limit < fixed {
        return Step::Fail(NtStatus::INFO_LENGTH_MISMATCH);
    }
    let status = if output.len() > limit { NtStatus::BUFFER_OVERFLOW } else { NtStatus::SUCCESS };
    output.truncate(limit);
    let mut body = Vec::with_capacity(8 + output.len());
    query_info::Response { output_buffer: &output }.encode(&mut body);
    Step::Reply(Reply { status, ..Reply::ok(body) })
}

pub(super) fn encoded(encode: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    encode(&mut out);
    out
}

/// The empty answer.
pub(super) fn done() -> Step {
    let mut body = Vec::with_capacity(2);
    set_info::Response.encode(&mut body);
    Step::Reply(Reply::ok(body))
}

/// Requires all of these rights.
pub(super) fn needs(open: &Open, access: AccessMask) -> Result<(), NtStatus> {
    if AccessMask(open.access).contains(access) { Ok(()) } else { Err(NtStatus::ACCESS_DENIED) }
}
