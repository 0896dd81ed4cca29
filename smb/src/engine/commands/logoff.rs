//! LOGOFF ([MS-SMB2] 3.3.5.6).

use std::sync::Arc;

use crate::engine::step::{Ctx, Reply, Step};
use crate::wire::logoff;

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    if let Err(e) = logoff::Request::parse(ctx.request.message()) {
        return e.into();
    }
    let session_id = ctx.request.header.session_id;
    // The answer is still signed and sealed with the keys of the session that it ends.
    if let Some(channel) = ctx.core.channels.get(&session_id) {
        ctx.request.signing = Some(Arc::clone(&channel.signing));
        ctx.core.last_sealing = channel.sealing.clone().map(|key| (session_id, key));
    }
    ctx.core.end_session(ctx.server, session_id);
    let mut body = Vec::new();
    logoff::Response {}.encode(&mut body);
    Step::Reply(Reply::ok(body))
}
