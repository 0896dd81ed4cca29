//! The workstation service ([MS-WKST]): reports the server's name.

use super::ndr::{Parameters, Results};
use super::pdu::Syntax;
use super::srvsvc::{ERROR_ACCESS_DENIED, ERROR_INVALID_LEVEL, ERROR_SUCCESS, PLATFORM_ID, VERSION};
use super::{Exposed, FaultStatus};

pub(super) const SYNTAX: Syntax = Syntax::new(0x6bff_d098_a112_3610_9833_46c3_f87e_345a, 1, 0);

/// NetrWkstaGetInfo ([MS-WKST] 3.2.4.1).
const WKSTA_GET_INFO: u16 = 0;

pub(super) fn call(opnum: u16, stub: &[u8], exposed: &Exposed) -> Result<Vec<u8>, FaultStatus> {
    if opnum != WKSTA_GET_INFO {
        return Err(FaultStatus::OP_RANGE);
    }
    let mut parameters = Parameters::new(stub);
    parameters.optional_string()?;
    let level = parameters.u32()?;
    let mut results = Results::default();
    results.u32(level);
    let status = match level {
        // WKSTA_INFO_100 ([MS-WKST] 2.2.5.1). A server without a domain is its own domain, as in NTLM.
        100 => {
            results.pointer().u32(PLATFORM_ID).pointer().pointer().u32(VERSION.0).u32(VERSION.1);
            results.string(&exposed.server_name).string(&exposed.server_name);
            ERROR_SUCCESS
        }
        101 | 102 | 502 => {
            results.null();
            ERROR_ACCESS_DENIED
        }
        _ => {
            results.null();
            ERROR_INVALID_LEVEL
        }
    };
    results.u32(status);
    Ok(results.into_stub())
}
