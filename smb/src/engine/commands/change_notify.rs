//! CHANGE_NOTIFY ([MS-SMB2] 3.3.5.19, [MS-FSA] 2.1.5.11).

use std::sync::Arc;

use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Reply, Step, Wake};
use crate::engine::watches::{Outcome, WatchRequest};
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::change_notify::{Flags, Request, Response};
use crate::wire::fscc::notify::FileNotifyInformation;

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let request = match Request::parse(ctx.request.message()) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    let open = match ctx.open(request.file_id) {
        Ok(o) => o,
        Err(status) => return status.into(),
    };
    if !open.directory {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    if !AccessMask(open.access).contains(AccessMask::FILE_LIST_DIRECTORY) {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    let asked = WatchRequest {
        filter: request.completion_filter,
        tree: request.flags.contains(Flags::WATCH_TREE),
        room: request.output_buffer_length as usize,
    };
    let token = ctx.wake_token();
    match open.volume.watches.ask(&open, asked, ctx.core.id, token) {
        Ok(Some(outcome)) => answer(outcome),
        // Deletion of the directory may have been requested in the meantime.
        Ok(None) if open.file.delete_pending(open.id) => {
            open.volume.watches.stop_waiting(open.id, token);
            Step::Fail(NtStatus::DELETE_PENDING)
        }
        Ok(None) => {
            // The answer is still signed if the end of the session causes it.
            let channel = ctx.core.channels.get(&ctx.request.header.session_id);
            ctx.request.signing = channel.map(|c| c.signing.clone());
            wait(open, token)
        }
        Err(status) => status.into(),
    }
}

fn wait(open: Arc<Open>, token: u64) -> Step {
    Step::Park(Box::new(move |ctx, wake| {
        let watches = &open.volume.watches;
        match wake {
            Wake::Ready => match watches.outcome(token) {
                Some(outcome) => answer(outcome),
                None => wait(open, token),
            },
            // Changes that have already arrived are not lost.
            Wake::Cancelled => {
                watches.stop_waiting(open.id, token).map_or(Step::Fail(NtStatus::CANCELLED), answer)
            }
            Wake::Closed => {
                if matches!(
                    watches.stop_waiting(open.id, token),
                    Some(Outcome::Changes(_) | Outcome::TooMany)
                ) {
                    watches.lost(open.id, ctx.server);
                }
                Step::Fail(NtStatus::NOTIFY_CLEANUP)
            }
        }
    }))
}

fn answer(outcome: Outcome) -> Step {
    let mut list = Vec::new();
    let status = match outcome {
        Outcome::Changes(changes) => {
            FileNotifyInformation::encode_list(&changes, &mut list, usize::MAX);
            NtStatus::SUCCESS
        }
        // [MS-SMB2] 3.3.5.19: an ordinary response without data.
        Outcome::TooMany => NtStatus::NOTIFY_ENUM_DIR,
        Outcome::Ended(status) => return Step::Fail(status),
    };
    let mut body = Vec::with_capacity(8 + list.len());
    Response { output_buffer: &list }.encode(&mut body);
    Step::Reply(Reply { status, ..Reply::ok(body) })
}
