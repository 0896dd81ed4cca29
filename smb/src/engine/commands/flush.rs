//! FLUSH ([MS-SMB2] 3.3.5.11).

use std::sync::Arc;

use crate::engine::access::DATA_CHANGING;
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Reply, Step};
use crate::engine::session::Share;
use crate::fs::FsOpKind;
use crate::ids::FileId;
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::flush::{Request, Response};

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let request = match Request::parse(ctx.request.message()) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    let open = match ctx.open(request.file_id) {
        Ok(o) => o,
        // [MS-SMB2] 3.3.5.11 requires a failure. But Linux flushes with the handle from before it reconnected to a
        // restarted server, and would report to the program that its data is lost, although it is not.
        Err(NtStatus::FILE_CLOSED) if ctx.server.is_durable_since(request.file_id) => return done(),
        // If Linux has only lost the connection, it does not reclaim its durable handle first, either.
        Err(NtStatus::FILE_CLOSED) => match kept_of_user(ctx, request.file_id) {
            Some(open) => open,
            None => return Step::Fail(NtStatus::FILE_CLOSED),
        },
        Err(status) => return status.into(),
    };
    // [MS-SMB2] 3.3.5.11
    if !AccessMask(open.access).intersects(DATA_CHANGING) {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    Step::Fs(
        FsOpKind::Flush { handle: open.handle.clone() },
        Box::new(move |ctx, result| match result {
            Ok(_) => {
                open.flushed(ctx.server);
                done()
            }
            Err(status) => Step::Fail(status),
        }),
    )
}

/// A kept open that its user names before reclaiming it.
fn kept_of_user(ctx: &Ctx<'_>, id: FileId) -> Option<Arc<Open>> {
    let session = ctx.request.session.as_ref()?;
    let Share::Volume(volume) = &ctx.request.tree.as_ref()?.share else { return None };
    let kept = ctx.server.kept();
    let open = kept.find(id.persistent)?;
    let is_its = open.id == id
        && Arc::ptr_eq(&open.volume, volume)
        && open.durable.get().is_some_and(|durable| durable.is_owned_by(&session.username));
    (is_its && !open.is_closing()).then(|| Arc::clone(open))
}

fn done() -> Step {
    let mut body = Vec::with_capacity(4);
    Response.encode(&mut body);
    Step::Reply(Reply::ok(body))
}
