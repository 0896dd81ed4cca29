//! LOGOFF ([MS-SMB2] 3.3.5.6).

use crate::engine::request::step::{Ctx, Reply, Step};
use crate::wire::logoff;

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    if let Err(e) = logoff::Request::parse(ctx.request.message()) {
        return e.into();
    }
    let session_id = ctx.request.header.session_id;
    // The answer is still signed and sealed with the keys of the session that it ends.
    if let Some(channel) = ctx.core.channels.get_mut(&session_id) {
        ctx.request.signing = Some(channel.signing.clone());
        ctx.core.last_sealing = channel.seal.take().map(|keys| (session_id, keys));
    }
    ctx.core.lose_session(ctx.server, ctx.now.instant, session_id);
    let mut body = Vec::new();
    logoff::Response {}.encode(&mut body);
    Step::Reply(Reply::ok(body))
}
