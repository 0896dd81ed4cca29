//! IOCTL ([MS-SMB2] 3.3.5.15): control codes of the server itself. Those of files are in [`file`] and [`copychunk`].

mod copychunk;
mod file;
mod reparse;

use std::net::IpAddr;
use std::sync::Arc;

use crate::engine::config::NetworkInterface;
use crate::engine::request::step::{Ctx, Reply, Step};
use crate::engine::session::Share;
use crate::ids::FileId;
use crate::status::NtStatus;
use crate::wire::Dialect;
use crate::wire::fscc::fsctl::{
    FsctlCode, InterfaceCapability, NetworkInterfaceInfo, SocketAddress, ValidateNegotiateInfoRequest,
    ValidateNegotiateInfoResponse,
};
use crate::wire::ioctl::{Flags, Request, Response};

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
        FsctlCode::DFS_GET_REFERRALS | FsctlCode::DFS_GET_REFERRALS_EX => {
            Step::Fail(NtStatus::FS_DRIVER_REQUIRED)
        }
        FsctlCode::PIPE_WAIT | FsctlCode::PIPE_TRANSCEIVE | FsctlCode::PIPE_PEEK => {
            Step::Fail(NtStatus::NOT_SUPPORTED)
        }
        code => match ctx.tree().share {
            Share::Volume(_) => file::handle(ctx, code, &request),
            Share::Ipc => Step::Fail(NtStatus::INVALID_DEVICE_REQUEST),
        },
    }
}

/// The successful answer to a control code.
pub(crate) fn ioctl_reply(ctl_code: FsctlCode, file_id: FileId, output: &[u8]) -> Reply {
    let mut body = Vec::new();
    Response { ctl_code, file_id, input: &[], output, flags: 0 }.encode(&mut body);
    Reply::ok(body)
}

/// [MS-SMB2] 3.3.5.15.12: repeats NEGOTIATE under a signature. Any difference ends the connection.
fn validate_negotiate(ctx: &mut Ctx<'_>, request: &Request<'_>) -> Step {
    const DIFFERS: &str = "VALIDATE_NEGOTIATE_INFO differs from NEGOTIATE";
    let Some(n) = &ctx.core.negotiated else { return Step::Disconnect(DIFFERS) };
    // SMB 3.1.1 has preauthentication integrity instead.
    if n.dialect == Dialect::SMB3_1_1 {
        return Step::Disconnect("VALIDATE_NEGOTIATE_INFO in 3.1.1");
    }
    let Ok(seen) = ValidateNegotiateInfoRequest::parse(request.input) else {
        return Step::Disconnect(DIFFERS);
    };
    let same = seen.capabilities == n.client_capabilities
        && seen.guid == n.client_guid
        && seen.security_mode == n.client_security_mode
        && seen.dialects == n.client_dialects;
    if !same || (request.max_output_response as usize) < ValidateNegotiateInfoResponse::LEN {
        return Step::Disconnect(DIFFERS);
    }
    let mut output = Vec::new();
    ValidateNegotiateInfoResponse {
        capabilities: n.capabilities,
        guid: ctx.server.config.guid,
        security_mode: n.security_mode,
        dialect: n.dialect,
    }
    .encode(&mut output);
    Step::Reply(ioctl_reply(request.ctl_code, FileId::RELATED, &output))
}

/// [MS-SMB2] 3.3.5.15.11
fn interfaces(ctx: &mut Ctx<'_>, request: &Request<'_>) -> Step {
    if matches!(ctx.core.dialect(), Dialect::SMB2_0_2 | Dialect::SMB2_1) {
        return Step::Fail(NtStatus::INVALID_DEVICE_REQUEST);
    }
    // [MS-SMB2] 2.2.31: it refers to no file.
    if request.file_id != FileId::RELATED {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    let interfaces: Vec<NetworkInterfaceInfo> = ctx.server.interfaces().iter().map(describe).collect();
    if interfaces.is_empty() {
        return Step::Fail(NtStatus::NOT_SUPPORTED);
    }
    let mut output = Vec::new();
    NetworkInterfaceInfo::encode_list(&interfaces, &mut output);
    if output.len() > request.max_output_response as usize {
        return Step::Fail(NtStatus::BUFFER_TOO_SMALL);
    }
    Step::Reply(ioctl_reply(request.ctl_code, FileId::RELATED, &output))
}

fn describe(interface: &NetworkInterface) -> NetworkInterfaceInfo {
    let mut capability = InterfaceCapability::empty();
    if interface.rss_capable {
        capability.insert(InterfaceCapability::RSS_CAPABLE);
    }
    if interface.rdma_capable {
        capability.insert(InterfaceCapability::RDMA_CAPABLE);
    }
    NetworkInterfaceInfo {
        if_index: interface.index,
        capability,
        link_speed_bps: interface.speed_bits_per_second,
        sockaddr: match interface.address {
            IpAddr::V4(address) => SocketAddress::V4 { port: 0, address },
            IpAddr::V6(address) => SocketAddress::V6 { port: 0, flow_info: 0, address, scope_id: 0 },
        },
    }
}
