//! CREATE ([MS-SMB2] 3.3.5.9, [MS-FSA] 2.1.5.1).

mod answer;
mod machine;
mod plan;
mod reconnect;
mod replay;

use std::sync::Arc;

pub(super) use self::plan::ATTRIBUTES_SETTABLE;
use crate::engine::creations::Begun;
use crate::engine::durable::{DurableContexts, DurableRequest};
use crate::engine::replay::CreateKey;
use crate::engine::request::step::{Ctx, Step};
use crate::status::NtStatus;
use crate::wire::create::Request;
use crate::wire::{Fault, HeaderFlags};

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let frame = Arc::clone(&ctx.request.frame);
    let message = frame.bytes().get(ctx.request.range.clone()).unwrap_or_default();
    let request = match Request::parse(message) {
        Ok(r) => r,
        // The message is well-formed, but the name is invalid.
        Err(e) if e.fault == Fault::Surrogate => return NtStatus::OBJECT_NAME_INVALID.into(),
        Err(e) => return e.into(),
    };
    // Without caching, nothing is durable.
    if !ctx.server.config.caching {
        return machine::begin(ctx, &request, None, None);
    }
    let contexts = match DurableContexts::of(&request.contexts, ctx.core.is_smb3()) {
        Ok(contexts) => contexts,
        Err(status) => return status.into(),
    };
    if let Some(reconnect) = contexts.reconnect {
        return reconnect::reconnect(ctx, &request, reconnect, true);
    }
    let Some(DurableRequest::V2 { create_guid, .. }) = contexts.request else {
        return machine::begin(ctx, &request, contexts.request, None);
    };
    let key = CreateKey { client_guid: ctx.core.client_guid(), create_guid };
    let is_replay = ctx.request.header.flags.contains(HeaderFlags::REPLAY_OPERATION);
    match ctx.server.creations.begin(key, is_replay) {
        Ok(Begun::New(creation)) => machine::begin(ctx, &request, contexts.request, Some(creation)),
        Ok(Begun::Replay(open)) => replay::answer(ctx, &request, open),
        Err(status) => status.into(),
    }
}
