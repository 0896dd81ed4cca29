//! WRITE ([MS-SMB2] 3.3.5.13, [MS-FSA] 2.1.5.4).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::engine::access::DATA_CHANGING;
use crate::engine::commands::read::OFFSET_END;
use crate::engine::commands::remote::{self, Source};
use crate::engine::request::step::{Ctx, Reply, Step, Transfer};
use crate::fs::{FsOpKind, FsReply, FsResult};
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::create::CreateOptions;
use crate::wire::read::Channel;
use crate::wire::write::{Flags, Request, Response};

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let request = match Request::parse(ctx.request.message()) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    let (offset, flags, remaining) = (request.offset, request.flags, request.remaining_bytes);
    let (data_offset, file_id) = (usize::from(request.data_offset), request.file_id);
    let (channel, info) = (request.channel, request.channel_info.to_vec());
    let is_remote = channel != Channel::NONE && ctx.core.is_smb3();
    // [MS-SMB2] 3.3.5.13: with RDMA the message contains no data, and RemainingBytes is the length.
    if is_remote && (request.length != 0 || data_offset != 0) {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    let length = if is_remote { remaining } else { request.length };
    if length > ctx.core.io_bytes_max() {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    let source = match remote::source(ctx, channel, &info, length) {
        Ok(source) => source,
        Err(status) => return status.into(),
    };
    // [MS-SMB2] 3.3.5.13: otherwise the payload is in this message, at most 0x100 bytes from its header.
    let start = ctx.request.range.start + data_offset;
    let end = start + if is_remote { 0 } else { length as usize };
    if end > ctx.request.range.end || data_offset > 0x100 {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    let open = match ctx.open_for_io(file_id) {
        Ok(o) => o,
        Err(step) => return step,
    };
    if open.directory {
        return Step::Fail(NtStatus::INVALID_DEVICE_REQUEST);
    }
    // A client with append access only still specifies the offset: clients that append know the end.
    if !AccessMask(open.access).intersects(DATA_CHANGING) {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    if offset > OFFSET_END || u64::from(length) > OFFSET_END - offset {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    if length == 0 {
        return Step::Reply(fixed(0));
    }
    if open.file.forbids_write(open.id, offset, length.into()) {
        return Step::Fail(NtStatus::FILE_LOCK_CONFLICT);
    }
    let write_through = flags.contains(Flags::WRITE_THROUGH)
        || CreateOptions(open.options).contains(CreateOptions::WRITE_THROUGH);
    let handle = open.handle.clone();
    let kind = match source {
        None => {
            let frame = Arc::clone(&ctx.request.frame);
            FsOpKind::Write { handle, offset, frame, range: start..end, write_through }
        }
        Some(Source { buffer: source, proof }) => {
            FsOpKind::WriteRemote { handle, offset, source, length, proof, write_through }
        }
    };
    Step::Transfer(kind, Transfer { open, offset, minimum_count: 0, then: written })
}

fn written(ctx: &mut Ctx<'_>, transfer: Transfer, result: FsResult) -> Step {
    let Transfer { open, offset, .. } = transfer;
    // A failed write, for example for lack of space, may be partial.
    open.contents_changed(ctx.now.instant, ctx.server);
    match result {
        Ok(FsReply::Written(count)) => {
            open.position.store(offset + u64::from(count), Ordering::Relaxed);
            Step::Reply(fixed(count))
        }
        Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
        Err(status) => Step::Fail(status),
    }
}

fn fixed(count: u32) -> Reply {
    Reply::short(|body| Response { count, remaining: 0 }.encode(body))
}
