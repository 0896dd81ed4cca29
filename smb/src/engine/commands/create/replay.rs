//! The answer to a replayed CREATE ([MS-SMB2] 3.3.5.9.10).

use std::sync::Arc;

use super::answer::respond;
use super::reconnect::{granted, lease_of, reclaim};
use crate::engine::durable::Durable;
use crate::engine::open::Open;
use crate::engine::replay::Replayable;
use crate::engine::request::step::{Ctx, Step};
use crate::fs::{FsOpKind, FsReply};
use crate::status::NtStatus;
use crate::wire::create::{CreateAction, OplockLevel, Request};

/// Answers a replayed CREATE. Only its name and lease must match the original request.
pub(crate) fn answer(ctx: &mut Ctx<'_>, request: &Request<'_>, open: Arc<Open>) -> Step {
    match check(ctx, request, &open) {
        Ok(()) => {}
        Err(status) => return status.into(),
    }
    ctx.request.related_file = Some(open.id);
    let asked = request.requested_oplock_level;
    let stat = FsOpKind::Stat { handle: open.handle.clone() };
    Step::Fs(
        stat,
        Box::new(move |_, result| {
            let stat = match result {
                Ok(FsReply::Stat(stat)) => stat,
                Ok(_) => return Step::Fail(NtStatus::INTERNAL_ERROR),
                Err(status) => return Step::Fail(status),
            };
            let action = open.replayable.as_ref().and_then(Replayable::action);
            let mut cached = open.cached();
            // If a client requests less than the oplock it holds, the answer has the requested level, as on Windows; the
            // oplock is kept.
            if cached.lease.is_none() && asked < cached.level {
                cached.level = asked;
            }
            let keeps = cached.level == OplockLevel::BATCH || cached.lease.is_some();
            let contexts = granted(&open).filter(|_| keeps).into_iter().collect();
            respond(&open, stat, action.unwrap_or(CreateAction::OPENED), cached, contexts)
        }),
    )
}

fn check(ctx: &mut Ctx<'_>, request: &Request<'_>, open: &Open) -> Result<(), NtStatus> {
    let session = ctx.session();
    if !open.is_named(&request.name) {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let lease = lease_of(request).map(|lease| lease.lease_key);
    if lease.is_some() && lease != open.cached().lease.map(|l| l.lease_key) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if open.is_disconnected() {
        // Its session ended with the connection on which the answer was lost.
        let owner = |_: &Open, durable: &Durable| {
            let ours = durable.is_owned_by(&session.username);
            if ours { Ok(()) } else { Err(NtStatus::ACCESS_DENIED) }
        };
        return reclaim(ctx, open.id.persistent, owner).map(drop);
    }
    if open.session_id() != session.id {
        let theirs = ctx.server.sessions().get(&open.session_id()).cloned();
        let ours = theirs.is_none_or(|s| s.username.eq_ignore_ascii_case(&session.username));
        return Err(if ours { NtStatus::DUPLICATE_OBJECTID } else { NtStatus::ACCESS_DENIED });
    }
    if open.tree_id() == ctx.tree().id { Ok(()) } else { Err(NtStatus::INVALID_PARAMETER) }
}
