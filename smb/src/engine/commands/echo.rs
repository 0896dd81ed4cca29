//! ECHO ([MS-SMB2] 3.3.5.17).

use crate::engine::request::step::{Ctx, Reply, Step};
use crate::wire::echo;

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    match echo::Request::parse(ctx.request.message()) {
        Err(e) => e.into(),
        Ok(_) => {
            let mut body = Vec::new();
            echo::Response {}.encode(&mut body);
            Step::Reply(Reply::ok(body))
        }
    }
}
