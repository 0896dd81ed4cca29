//! FLUSH ([MS-SMB2] 3.3.5.11).

use crate::engine::access::DATA_CHANGING;
use crate::engine::step::{Ctx, Reply, Step};
use crate::fs::FsOpKind;
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
        Err(status) => return status.into(),
    };
    // [MS-SMB2] 3.3.5.11
    if !AccessMask(open.access).intersects(DATA_CHANGING) {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    Step::Fs(
        FsOpKind::Flush { handle: open.handle.clone() },
        Box::new(|_, result| match result {
            Ok(_) => {
                let mut body = Vec::with_capacity(4);
                Response.encode(&mut body);
                Step::Reply(Reply::ok(body))
            }
            Err(status) => Step::Fail(status),
        }),
    )
}
