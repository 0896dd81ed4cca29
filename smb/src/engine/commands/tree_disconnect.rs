//! TREE_DISCONNECT ([MS-SMB2] 3.3.5.8).

use crate::engine::request::step::{Ctx, Reply, Step};
use crate::status::NtStatus;
use crate::wire::tree_disconnect;

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    if let Err(e) = tree_disconnect::Request::parse(ctx.request.message()) {
        return e.into();
    }
    let session = ctx.session();
    let Some((_, opens)) = session.disconnect(ctx.tree().id) else {
        return Step::Fail(NtStatus::NETWORK_NAME_DELETED);
    };
    for open in opens {
        if open.begin_close() {
            ctx.core.close_open(ctx.server, &open);
        }
    }
    let mut body = Vec::new();
    tree_disconnect::Response {}.encode(&mut body);
    Step::Reply(Reply::ok(body))
}
