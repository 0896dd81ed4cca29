//! READ ([MS-SMB2] 3.3.5.12, [MS-FSA] 2.1.5.3).

use std::sync::atomic::Ordering;

use crate::engine::commands::{remote, remote::Target, transform};
use crate::engine::request::step::{Ctx, RemoteWrite, Reply, Step, Transfer};
use crate::fs::{FsOpKind, FsReply, FsResult, Payload};
use crate::status::NtStatus;
use crate::wire::read::{RESPONSE_FIXED_LEN, Request, Response, ResponseFlags};
use crate::wire::{AccessMask, HeaderFlags};

/// The first offset that no file reaches ([MS-FSA] 2.1.5.3: offsets are signed).
pub(super) const OFFSET_END: u64 = i64::MAX as u64;

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let request = match Request::parse(ctx.request.message()) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    let (length, offset, minimum_count) = (request.length, request.offset, request.minimum_count);
    let (file_id, channel) = (request.file_id, request.channel);
    let info = request.channel_info.to_vec();
    let open = match ctx.open_for_io(file_id) {
        Ok(o) => o,
        Err(step) => return step,
    };
    if open.directory {
        return Step::Fail(NtStatus::INVALID_DEVICE_REQUEST);
    }
    // [MS-SMB2] 3.3.5.12
    if !AccessMask(open.access).intersects(AccessMask::FILE_READ_DATA | AccessMask::FILE_EXECUTE) {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    if length > ctx.core.io_bytes_max() {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    let target = match remote::target(ctx, channel, &info, length) {
        Ok(target) => target,
        Err(status) => return status.into(),
    };
    if offset > OFFSET_END || u64::from(length) > OFFSET_END - offset {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    if length == 0 {
        return if minimum_count > 0 { NtStatus::END_OF_FILE.into() } else { Step::Reply(fixed(0)) };
    }
    if open.file.forbids_read(open.id, offset, length.into()) {
        return Step::Fail(NtStatus::FILE_LOCK_CONFLICT);
    }
    let handle = open.handle.clone();
    let Some(Target { buffer, outgoing }) = target else {
        let plain = !ctx.must_protect() && !ctx.request.header.flags.contains(HeaderFlags::SIGNED);
        let transfer = Transfer { open, offset, minimum_count, then: in_the_answer };
        return Step::Transfer(FsOpKind::Read { handle, offset, length, plain }, transfer);
    };
    Step::Fs(
        FsOpKind::Read { handle, offset, length, plain: false },
        Box::new(move |ctx, result| {
            let (mut payload, count) = match found(result, minimum_count) {
                Ok(found) => found,
                Err(status) => return Step::Fail(status),
            };
            let transform = match outgoing {
                None => Vec::new(),
                Some(outgoing) => match transform::protect(ctx, outgoing, payload.as_mut()) {
                    Ok(transform) => transform,
                    Err(status) => return Step::Fail(status),
                },
            };
            open.position.store(offset + u64::from(count), Ordering::Relaxed);
            let remote = Some(RemoteWrite { payload, target: buffer });
            Step::Reply(Reply { remote, ..Reply::ok(elsewhere(count, &transform)) })
        }),
    )
}

/// Puts the data that was read into the answer.
fn in_the_answer(_ctx: &mut Ctx<'_>, transfer: Transfer, result: FsResult) -> Step {
    let (payload, count) = match found(result, transfer.minimum_count) {
        Ok(found) => found,
        Err(status) => return Step::Fail(status),
    };
    transfer.open.position.store(transfer.offset + u64::from(count), Ordering::Relaxed);
    Step::Reply(Reply { payload: Some(payload), ..fixed(count) })
}

/// The data that a backend has read, and its length.
fn found(result: FsResult, minimum_count: u32) -> Result<(Box<dyn Payload>, u32), NtStatus> {
    let FsReply::Read(payload) = result? else { return Err(NtStatus::INTERNAL_ERROR) };
    let count = payload.length() as u32;
    if count == 0 || count < minimum_count {
        return Err(NtStatus::END_OF_FILE);
    }
    Ok((payload, count))
}

fn fixed(count: u32) -> Reply {
    Reply::short(|body| Response::inline(count).encode(body))
}

/// The body of a response to a READ by RDMA. If `transform` is not empty, the data went through it.
fn elsewhere(count: u32, transform: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(RESPONSE_FIXED_LEN + transform.len());
    let flags = if transform.is_empty() { ResponseFlags::empty() } else { ResponseFlags::RDMA_TRANSFORM };
    Response { data_remaining: count, flags, ..Response::inline(transform.len() as u32) }.encode(&mut body);
    body.extend_from_slice(transform);
    body
}
