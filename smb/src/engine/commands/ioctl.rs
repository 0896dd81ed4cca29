//! IOCTL ([MS-SMB2] 3.3.5.15): controls of the server itself; those of files are in [`super::fsctl_file`] and
//! [`super::copychunk`].

use std::net::IpAddr;
use std::sync::Arc;

use super::fsctl_file;
use crate::engine::session::Share;
use crate::engine::step::{Ctx, Reply, Step};
use crate::ids::FileId;
use crate::status::NtStatus;
use crate::wire::fscc::fsctl::FsctlCode;
use crate::wire::ioctl::{Flags, Request, Response};
use crate::wire::{Capabilities, Dialect, SecurityMode};

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let frame = Arc::clone(&ctx.request.frame);
    let message = frame.bytes().get(ctx.request.range.clone()).unwrap_or_default();
    let request = match Request::parse(message) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    if !request.flags.contains(Flags::IS_FSCTL) {
        return Step::Fail(NtStatus::NOT_SUPPORTED);
    }
    match request.ctl_code {
        FsctlCode::VALIDATE_NEGOTIATE_INFO => validate_negotiate(ctx, &request),
        FsctlCode::QUERY_NETWORK_INTERFACE_INFO => interfaces(ctx, &request),
        // [MS-SMB2] 3.3.5.15.2: no DFS here.
        FsctlCode::DFS_GET_REFERRALS | FsctlCode::DFS_GET_REFERRALS_EX => Step::Fail(NtStatus::FS_DRIVER_REQUIRED),
        FsctlCode::PIPE_WAIT | FsctlCode::PIPE_TRANSCEIVE | FsctlCode::PIPE_PEEK => {
            Step::Fail(NtStatus::NOT_SUPPORTED)
        }
        code => match ctx.tree().share {
            Share::Volume(_) => fsctl_file::handle(ctx, code, &request),
            Share::Ipc => Step::Fail(NtStatus::INVALID_DEVICE_REQUEST),
        },
    }
}

/// The successful answer to a control.
pub(crate) fn ioctl_reply(ctl_code: FsctlCode, file_id: FileId, output: &[u8]) -> Reply {
    let mut body = Vec::new();
    Response { ctl_code, file_id, input: &[], output, flags: 0 }.encode(&mut body);
    Reply::ok(body)
}

const NO_FILE: FileId = FileId { persistent: u64::MAX, volatile: u64::MAX };

/// [MS-SMB2] 3.3.5.15.12: NEGOTIATE once more, under a signature. Any difference ends the connection.
fn validate_negotiate(ctx: &mut Ctx<'_>, request: &Request<'_>) -> Step {
    const DIFFERS: &str = "VALIDATE_NEGOTIATE_INFO differs from NEGOTIATE";
    let Some(n) = &ctx.core.negotiated else { return Step::Disconnect(DIFFERS) };
    // 3.1.1 has preauthentication integrity instead.
    if n.dialect == Dialect::SMB3_1_1 {
        return Step::Disconnect("VALIDATE_NEGOTIATE_INFO in 3.1.1");
    }
    let input = request.input;
    let u32_at = |at: usize| input.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    let u16_at = |at: usize| input.get(at..at + 2).and_then(|b| b.try_into().ok()).map(u16::from_le_bytes);
    let (Some(capabilities), Some(guid), Some(mode), Some(count)) =
        (u32_at(0), input.get(4..20), u16_at(20), u16_at(22))
    else {
        return Step::Disconnect(DIFFERS);
    };
    let dialects: Option<Vec<Dialect>> =
        (0..usize::from(count)).map(|i| u16_at(24 + 2 * i).map(Dialect)).collect();
    let same = Capabilities(capabilities) == n.client_capabilities
        && guid == n.client_guid
        && SecurityMode(mode) == n.client_security_mode
        && dialects.is_some_and(|d| d == n.client_dialects);
    if !same {
        return Step::Disconnect(DIFFERS);
    }
    if request.max_output_response < 24 {
        return Step::Disconnect(DIFFERS);
    }
    let mut output = Vec::with_capacity(24);
    output.extend_from_slice(&n.capabilities.0.to_le_bytes());
    output.extend_from_slice(&ctx.server.config.guid);
    output.extend_from_slice(&n.security_mode.0.to_le_bytes());
    output.extend_from_slice(&n.dialect.0.to_le_bytes());
    Step::Reply(ioctl_reply(request.ctl_code, NO_FILE, &output))
}

/// [MS-SMB2] 3.3.5.15.11, 2.2.32.5: 152 bytes an address.
fn interfaces(ctx: &mut Ctx<'_>, request: &Request<'_>) -> Step {
    const ENTRY: usize = 152;
    const AF_INET: u16 = 2;
    const AF_INET6: u16 = 23;
    if matches!(ctx.core.dialect(), Dialect::SMB2_0_2 | Dialect::SMB2_1) {
        return Step::Fail(NtStatus::INVALID_DEVICE_REQUEST);
    }
    let interfaces = ctx.server.interfaces();
    let room = request.max_output_response as usize / ENTRY;
    if interfaces.is_empty() {
        return Step::Fail(NtStatus::NOT_SUPPORTED);
    }
    if room == 0 {
        return Step::Fail(NtStatus::BUFFER_TOO_SMALL);
    }
    let mut output = Vec::new();
    let count = interfaces.len().min(room);
    for (index, interface) in interfaces.iter().take(count).enumerate() {
        let start = output.len();
        let next = if index + 1 == count { 0 } else { ENTRY as u32 };
        let capability = u32::from(interface.rss_capable) | u32::from(interface.rdma_capable) << 1;
        output.extend_from_slice(&next.to_le_bytes());
        output.extend_from_slice(&interface.index.to_le_bytes());
        output.extend_from_slice(&capability.to_le_bytes());
        output.extend_from_slice(&[0; 4]);
        output.extend_from_slice(&interface.speed_bits_per_second.to_le_bytes());
        match interface.address {
            IpAddr::V4(a) => {
                output.extend_from_slice(&AF_INET.to_le_bytes());
                output.extend_from_slice(&[0; 2]);
                output.extend_from_slice(&a.octets());
            }
            IpAddr::V6(a) => {
                output.extend_from_slice(&AF_INET6.to_le_bytes());
                output.extend_from_slice(&[0; 6]);
                output.extend_from_slice(&a.octets());
            }
        }
        output.resize(start + ENTRY, 0);
    }
    Step::Reply(ioctl_reply(request.ctl_code, NO_FILE, &output))
}
