//! OPLOCK_BREAK: acknowledgments ([MS-SMB2] 3.3.5.22).

use crate::engine::file::leases::LeaseId;
use crate::engine::request::step::{Ctx, Reply, Step};
use crate::engine::session::Share;
use crate::engine::volume::Volume;
use crate::status::NtStatus;
use crate::wire::oplock_break::{LeaseBreakAcknowledgment, OplockBreak, Request, Response};

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let answer = match Request::parse(ctx.request.message()) {
        Ok(Request::Oplock(request)) => oplock(ctx, request).map(Response::Oplock),
        Ok(Request::Lease(request)) => lease(ctx, request).map(Response::Lease),
        Err(e) => return e.into(),
    };
    match answer {
        Ok(response) => {
            let mut body = Vec::with_capacity(36);
            response.encode(&mut body);
            Step::Reply(Reply::ok(body))
        }
        Err(status) => Step::Fail(status),
    }
}

/// [MS-SMB2] 3.3.5.22.1
fn oplock(ctx: &mut Ctx<'_>, request: OplockBreak) -> Result<OplockBreak, NtStatus> {
    let open = ctx.open(request.file_id)?;
    let oplock_level = open.file.acknowledge_oplock(open.id, request.oplock_level, ctx.server)?;
    Ok(OplockBreak { oplock_level, file_id: open.id })
}

/// [MS-SMB2] 3.3.5.22.2
fn lease(ctx: &mut Ctx<'_>, request: LeaseBreakAcknowledgment) -> Result<LeaseBreakAcknowledgment, NtStatus> {
    let client = ctx.core.negotiated.as_ref().map(|n| n.client_guid).unwrap_or_default();
    let id = LeaseId { client, key: request.lease_key };
    let tree = ctx.tree();
    let Share::Volume(volume) = &tree.share else { return Err(NtStatus::OBJECT_NAME_NOT_FOUND) };
    let file_in = |volume: &Volume| volume.leases.find(id).and_then(|key| volume.files().find(key));
    let file = file_in(volume)
        .or_else(|| volume.snapshots.volumes().iter().find_map(|snapshot| file_in(snapshot)))
        .ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
    file.acknowledge_lease(id, request.lease_state, ctx.server)?;
    Ok(request)
}
