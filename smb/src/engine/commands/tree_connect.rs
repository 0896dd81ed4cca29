//! TREE_CONNECT ([MS-SMB2] 3.3.5.7).

use std::sync::atomic::Ordering;

use crate::engine::access::{ALL, READ_ONLY};
use crate::engine::reports::Event;
use crate::engine::request::step::{Ctx, Reply, Step};
use crate::engine::session::Share;
use crate::engine::volume::Protection;
use crate::status::NtStatus;
use crate::wire::tree_connect::{Request, Response, ShareCapabilities, ShareFlags, ShareType};
use crate::wire::{AccessMask, Dialect, HeaderFlags, Ids};

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let request = match Request::parse(ctx.request.message()) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    // [MS-SMB2] 3.3.5.7: in SMB 3.1.1, the first signed request proves that NEGOTIATE was not tampered with.
    let signed = ctx.request.header.flags.contains(HeaderFlags::SIGNED);
    if ctx.core.dialect() == Dialect::SMB3_1_1 && !signed && !ctx.request.sealed {
        return Step::Disconnect("TREE_CONNECT of 3.1.1 neither signed nor sealed");
    }
    match connect(ctx, request.share()) {
        Ok(body) => Step::Reply(Reply::ok(body)),
        Err(status) => {
            let username = ctx.session().username.clone();
            let share = request.share().chars().take(80).collect();
            ctx.core.events.push_back(Event::TreeRefused { username, share, status });
            Step::Fail(status)
        }
    }
}

fn connect(ctx: &mut Ctx<'_>, name: &str) -> Result<Vec<u8>, NtStatus> {
    let session = ctx.session();
    let (share, access, share_type, encrypt) = if name.eq_ignore_ascii_case("IPC$") {
        (Share::Ipc, READ_ONLY, ShareType::PIPE, false)
    } else {
        let id = name.to_ascii_lowercase();
        let volume = ctx.server.volume(&id).filter(|v| !v.removed.load(Ordering::Acquire));
        let volume = volume.ok_or(NtStatus::BAD_NETWORK_NAME)?;
        // A volume's credentials only give access to that volume.
        if session.volume_id != volume.id {
            return Err(NtStatus::ACCESS_DENIED);
        }
        let encrypt = volume.protection == Protection::Seal;
        let can_seal = ctx.core.channels.get(&session.id).is_some_and(|c| c.seal.is_some());
        if encrypt && !can_seal {
            return Err(NtStatus::ACCESS_DENIED);
        }
        let access = if volume.read_only { READ_ONLY } else { ALL };
        (Share::Volume(volume), access, ShareType::DISK, encrypt)
    };
    let tree = session.connect(share, access, encrypt)?;
    if let Ids::Sync { tree_id, .. } = &mut ctx.request.header.ids {
        *tree_id = tree.id;
    }
    let mut share_flags = ShareFlags::NO_CACHING;
    if encrypt {
        share_flags.insert(ShareFlags::ENCRYPT_DATA);
    }
    let mut body = Vec::new();
    Response {
        share_type,
        share_flags,
        capabilities: ShareCapabilities::empty(),
        maximal_access: AccessMask(access),
    }
    .encode(&mut body);
    Ok(body)
}
