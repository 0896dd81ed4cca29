//! The server service ([MS-SRVS]): lists the shares, and describes the server.

use super::ndr::{Parameters, Results};
use super::pdu::Syntax;
use super::{Exposed, FaultStatus, Share, ShareKind};

pub(super) const SYNTAX: Syntax = Syntax::new(0x4b32_4fc8_1670_01d3_1278_5a47_bf6e_e188, 3, 0);

// Operations ([MS-SRVS] 3.1.4).
const SHARE_ENUM: u16 = 15;
const SHARE_GET_INFO: u16 = 16;
const SERVER_GET_INFO: u16 = 21;

// Return values ([MS-ERREF] 2.2, [MS-SRVS] 2.2.2.9).
pub(super) const ERROR_SUCCESS: u32 = 0;
pub(super) const ERROR_ACCESS_DENIED: u32 = 5;
pub(super) const ERROR_INVALID_LEVEL: u32 = 124;
const NERR_NET_NAME_NOT_FOUND: u32 = 2310;

/// PLATFORM_ID_NT ([MS-SRVS] 2.2.2.6).
pub(super) const PLATFORM_ID: u32 = 500;
/// The version that clients associate with a server of SMB 3.1.1: Windows 10.0.
pub(super) const VERSION: (u32, u32) = (10, 0);
/// SV_TYPE_WORKSTATION, _SERVER, _XENIX_SERVER, _NT, _SERVER_NT ([MS-SRVS] 2.2.2.7).
const SERVER_TYPE: u32 = 0x0000_9803;

pub(super) fn call(opnum: u16, stub: &[u8], exposed: &Exposed) -> Result<Vec<u8>, FaultStatus> {
    let mut parameters = Parameters::new(stub);
    let mut results = Results::default();
    // ServerName, which the connection has determined already.
    let _ = match opnum {
        SHARE_ENUM | SHARE_GET_INFO | SERVER_GET_INFO => parameters.optional_string()?,
        _ => return Err(FaultStatus::OP_RANGE),
    };
    let status = match opnum {
        SHARE_ENUM => share_enum(&mut parameters, &mut results, exposed)?,
        SHARE_GET_INFO => share_get_info(&mut parameters, &mut results, exposed)?,
        _ => server_get_info(&mut parameters, &mut results, exposed)?,
    };
    results.u32(status);
    Ok(results.into_stub())
}

/// Checks an information level for shares.
fn checked_level(level: u32) -> Result<u32, u32> {
    match level {
        0 | 1 | 501 => Ok(level),
        // [MS-SRVS] 3.1.4.8: for administrators.
        2 | 502 | 503 => Err(ERROR_ACCESS_DENIED),
        _ => Err(ERROR_INVALID_LEVEL),
    }
}

/// NetrShareEnum ([MS-SRVS] 3.1.4.8). The list is short: PreferedMaximumLength and ResumeHandle do not split it.
fn share_enum(
    parameters: &mut Parameters<'_>,
    results: &mut Results,
    exposed: &Exposed,
) -> Result<u32, FaultStatus> {
    let level = parameters.u32()?;
    let arm = parameters.u32()?;
    if parameters.pointer()? {
        // EntriesRead and Buffer, empty from every client.
        parameters.u32()?;
        if parameters.pointer()? {
            return Err(FaultStatus::BAD_STUB_DATA);
        }
    }
    parameters.u32()?;
    let resume = parameters.pointer()?;
    if arm != level {
        return Err(FaultStatus::BAD_STUB_DATA);
    }
    results.u32(level).u32(level);
    let (total, status) = match checked_level(level) {
        Ok(level) => {
            let count = exposed.shares.len() as u32;
            results.pointer().u32(count).pointer().u32(count);
            for share in &exposed.shares {
                share_fixed(results, share, level);
            }
            for share in &exposed.shares {
                share_strings(results, share, level);
            }
            (count, ERROR_SUCCESS)
        }
        Err(status) => {
            results.null();
            (0, status)
        }
    };
    results.u32(total);
    if resume {
        results.pointer().u32(0);
    } else {
        results.null();
    }
    Ok(status)
}

/// NetrShareGetInfo ([MS-SRVS] 3.1.4.10).
fn share_get_info(
    parameters: &mut Parameters<'_>,
    results: &mut Results,
    exposed: &Exposed,
) -> Result<u32, FaultStatus> {
    let name = parameters.string()?;
    let level = parameters.u32()?;
    results.u32(level);
    let share = exposed.shares.iter().find(|share| share.name.eq_ignore_ascii_case(&name));
    let found = checked_level(level).and_then(|level| Ok((share.ok_or(NERR_NET_NAME_NOT_FOUND)?, level)));
    Ok(match found {
        Ok((share, level)) => {
            share_fixed(results.pointer(), share, level);
            share_strings(results, share, level);
            ERROR_SUCCESS
        }
        Err(status) => {
            results.null();
            status
        }
    })
}

/// SHARE_INFO_0, _1 and _501 ([MS-SRVS] 2.2.4.22, 2.2.4.23, 2.2.4.25) without the values that they point to.
fn share_fixed(results: &mut Results, share: &Share, level: u32) {
    results.pointer();
    if level == 0 {
        return;
    }
    // [MS-SRVS] 2.2.2.4
    let kind = match share.kind {
        ShareKind::Disk => 0,
        ShareKind::Pipes => 0x8000_0003,
    };
    results.u32(kind).pointer();
    if level == 501 {
        results.u32(0);
    }
}

fn share_strings(results: &mut Results, share: &Share, level: u32) {
    results.string(&share.name);
    if level != 0 {
        results.string(&share.remark);
    }
}

/// NetrServerGetInfo ([MS-SRVS] 3.1.4.17).
fn server_get_info(
    parameters: &mut Parameters<'_>,
    results: &mut Results,
    exposed: &Exposed,
) -> Result<u32, FaultStatus> {
    let level = parameters.u32()?;
    results.u32(level);
    Ok(match level {
        // SERVER_INFO_100, SERVER_INFO_101 ([MS-SRVS] 2.2.4.40, 2.2.4.41)
        100 => {
            results.pointer().u32(PLATFORM_ID).pointer().string(&exposed.server_name);
            ERROR_SUCCESS
        }
        101 => {
            results.pointer().u32(PLATFORM_ID).pointer();
            results.u32(VERSION.0).u32(VERSION.1).u32(SERVER_TYPE).pointer();
            results.string(&exposed.server_name).string("Forebay");
            ERROR_SUCCESS
        }
        102 | 103 | 502 | 503 => {
            results.null();
            ERROR_ACCESS_DENIED
        }
        _ => {
            results.null();
            ERROR_INVALID_LEVEL
        }
    })
}
