//! Durable opens in CREATE: granting them, and returning them to a client that lost its connections ([MS-SMB2] 3.3.5.9.6 to
//! 3.3.5.9.12).

use std::sync::Arc;

use super::answer::respond;
use crate::engine::durable::{Durable, DurableReconnect, DurableRequest, timeout_ms};
use crate::engine::mail::Waiter;
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Step, Wake};
use crate::engine::session::{Session, Share};
use crate::fs::{FsOpKind, FsReply};
use crate::limits::DURABLE_TIMEOUT_DEFAULT_MS;
use crate::status::NtStatus;
use crate::wire::create::{CreateAction, Request};
use crate::wire::create_context::{DurableFlags, Lease, RequestContext, ResponseContext};

/// Makes an open durable if possible. Returns the context for the answer.
pub(crate) fn grant(
    ctx: &Ctx<'_>,
    open: &Open,
    request: Option<DurableRequest>,
) -> Option<ResponseContext<'static>> {
    let request = request?;
    if open.directory || !open.keeps_handle() {
        return None;
    }
    let (timeout_ms, create_guid) = match request {
        DurableRequest::V1 => (DURABLE_TIMEOUT_DEFAULT_MS, None),
        DurableRequest::V2 { timeout_ms: asked, create_guid } => (timeout_ms(asked), Some(create_guid)),
    };
    let username = ctx.session().username.clone();
    let durable = Durable { username, client_guid: ctx.core.client_guid(), timeout_ms, create_guid };
    open.durable.set(durable).ok()?;
    granted(open)
}

/// The context that a CREATE's answer has for a durable open.
pub(crate) fn granted(open: &Open) -> Option<ResponseContext<'static>> {
    let Durable { timeout_ms, create_guid, .. } = open.durable.get()?;
    Some(match create_guid {
        None => ResponseContext::DurableHandle,
        Some(_) => ResponseContext::DurableHandleV2 { timeout_ms: *timeout_ms, flags: DurableFlags::empty() },
    })
}

/// The lease that a CREATE requests.
pub(crate) fn lease_of(request: &Request<'_>) -> Option<Lease> {
    request.contexts.iter().find_map(|context| match context {
        RequestContext::Lease(lease) => Some(*lease),
        _ => None,
    })
}

/// Handles CREATE with `DHnC` or `DH2C` ([MS-SMB2] 3.3.5.9.7, 3.3.5.9.12). Apart from the lease and the name of its file,
/// the rest of the request is ignored. `first` is true if the request has not waited yet.
pub(crate) fn reconnect(
    ctx: &mut Ctx<'_>,
    request: &Request<'_>,
    claim: DurableReconnect,
    first: bool,
) -> Step {
    let (session, tree) = (ctx.session(), ctx.tree());
    let Share::Volume(volume) = &tree.share else { return NtStatus::OBJECT_NAME_NOT_FOUND.into() };
    let client_guid = ctx.core.client_guid();
    let lease = lease_of(request);
    let check = |open: &Open, durable: &Durable| {
        let held = open.cached().lease;
        let kind = |lease: Option<Lease>| lease.map(|l| (l.lease_key, l.v2.is_some()));
        if !Arc::ptr_eq(&open.volume, volume)
            || !claim.names(durable)
            || kind(held) != kind(lease)
            || !open.keeps_handle()
            || (held.is_some() && durable.client_guid != client_guid)
        {
            return Err(NtStatus::OBJECT_NAME_NOT_FOUND);
        }
        // The client associates a lease with a file of this name.
        if held.is_some() && !open.is_named(&request.name) {
            return Err(NtStatus::INVALID_PARAMETER);
        }
        if !durable.is_owned_by(&session.username) {
            return Err(NtStatus::ACCESS_DENIED);
        }
        Ok(())
    };
    match reclaim(ctx, claim.persistent, check) {
        Ok(open) => answer(ctx, open),
        Err(NtStatus::OBJECT_NAME_NOT_FOUND) if first && is_held_elsewhere(ctx, claim) => wait(ctx, claim),
        Err(status) => status.into(),
    }
}

/// Whether another session of this user has the open: the server may not have detected its end yet.
fn is_held_elsewhere(ctx: &Ctx<'_>, claim: DurableReconnect) -> bool {
    let id = ctx.server.file_ids.of(claim.persistent);
    let own = ctx.session();
    let others: Vec<Arc<Session>> = ctx.server.sessions().values().cloned().collect();
    others
        .iter()
        .filter(|s| s.id != own.id && s.username.eq_ignore_ascii_case(&own.username))
        .filter_map(|s| s.open(id))
        .any(|open| open.durable.get().is_some_and(|durable| claim.names(durable)))
}

/// Waits briefly until the open is kept: a client that lost its connection may reconnect before the server detects the
/// loss.
fn wait(ctx: &mut Ctx<'_>, claim: DurableReconnect) -> Step {
    let waiter = Waiter { connection: ctx.core.id, token: ctx.wake_token() };
    ctx.server.kept().wait(claim.persistent, waiter);
    // The other session may have been lost since the check.
    if !is_held_elsewhere(ctx, claim) {
        ctx.server.kept().wake_for(claim.persistent, ctx.server);
    }
    Step::Park(Box::new(move |ctx, wake| match wake {
        Wake::Ready => {
            let frame = Arc::clone(&ctx.request.frame);
            let message = frame.bytes().get(ctx.request.range.clone()).unwrap_or_default();
            match Request::parse(message) {
                Ok(request) => reconnect(ctx, &request, claim, false),
                Err(error) => error.into(),
            }
        }
        Wake::Cancelled | Wake::Closed => {
            let token = ctx.wake_token();
            ctx.server.kept().stop_waiting(token);
            Step::Fail(NtStatus::CANCELLED)
        }
    }))
}

/// Gives a kept open to this request's session if `check` permits it.
pub(crate) fn reclaim(
    ctx: &mut Ctx<'_>,
    persistent: u64,
    check: impl FnOnce(&Open, &Durable) -> Result<(), NtStatus>,
) -> Result<Arc<Open>, NtStatus> {
    let (session, tree) = (ctx.session(), ctx.tree());
    let sequence = ctx.request.header.channel_sequence();
    let attach = |open: &Open| open.attach(session.id, tree.id, sequence);
    let kept = ctx.server.kept().take(persistent, check, attach)?;
    if let Err(status) = session.add_open(Arc::clone(&kept.open)) {
        let mut all = ctx.server.kept();
        kept.open.detach();
        all.put(kept);
        return Err(status);
    }
    Ok(kept.open)
}

fn answer(ctx: &mut Ctx<'_>, open: Arc<Open>) -> Step {
    ctx.request.related_file = Some(open.id);
    let stat = FsOpKind::Stat { handle: open.handle.clone() };
    Step::Fs(
        stat,
        Box::new(move |ctx, result| match result {
            Ok(FsReply::Stat(stat)) => respond(&open, stat, CreateAction::OPENED, open.cached(), Vec::new()),
            // The client has not received the open yet.
            other => {
                let ours = ctx.session().remove_open(open.id).is_some();
                if ours && open.begin_close() {
                    ctx.core.close_open(ctx.server, &open);
                }
                Step::Fail(other.err().unwrap_or(NtStatus::INTERNAL_ERROR))
            }
        }),
    )
}
