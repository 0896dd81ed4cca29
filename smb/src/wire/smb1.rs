//! The only SMB1 message that an SMB2 server reads: a NEGOTIATE that can offer SMB2 among its dialects ([MS-SMB2] 3.3.5.3,
//! [MS-CIFS] 2.2.4.52.1).

use super::cursor::{Put, Reader, patch_u16, zeros};
use super::{Fault, Malformed, limits};

/// The first four bytes of an SMB1 message.
pub const PROTOCOL_ID: [u8; 4] = *b"\xffSMB";
/// Offers dialect 2.0.2 ([MS-SMB2] 3.3.5.3.2).
pub const DIALECT_2_002: &[u8] = b"SMB 2.002";
/// Offers any dialect of SMB2 ([MS-SMB2] 3.3.5.3.1).
pub const DIALECT_2_WILDCARD: &[u8] = b"SMB 2.???";

const HEADER_LEN: usize = 32;
const COM_NEGOTIATE: u8 = 0x72;
const BUFFER_FORMAT_DIALECT: u8 = 0x02;

/// Dialect strings of an SMB1 NEGOTIATE, without their terminators. Any other SMB1 message is [`Fault::Value`].
pub fn parse_negotiate(frame: &[u8]) -> Result<Vec<&[u8]>, Malformed> {
    let mut r = Reader::new(frame, "smb1 negotiate");
    if r.array()? != PROTOCOL_ID {
        return Err(Malformed { fault: Fault::ProtocolId, what: "smb1 negotiate", offset: 0 });
    }
    if r.get::<u8>()? != COM_NEGOTIATE {
        return Err(r.fault(Fault::Value));
    }
    r.skip(HEADER_LEN - 5)?;
    let word_count = r.get::<u8>()?;
    r.skip(2 * usize::from(word_count))?;
    let byte_count = r.get::<u16>()?;
    let mut rest = r.take(byte_count.into())?;
    let mut dialects = Vec::new();
    while let Some((format, tail)) = rest.split_first() {
        let end = tail.iter().position(|byte| *byte == 0).ok_or(r.fault(Fault::Truncated))?;
        if *format != BUFFER_FORMAT_DIALECT {
            return Err(r.fault(Fault::Value));
        }
        if dialects.len() == limits::DIALECTS_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        dialects.push(&tail[..end]);
        rest = &tail[end + 1..];
    }
    Ok(dialects)
}

/// Appends an SMB1 NEGOTIATE that offers `dialects`, for tests of how we refuse or upgrade it.
pub fn encode_negotiate(dialects: &[&[u8]], out: &mut Vec<u8>) {
    out.put(PROTOCOL_ID);
    out.put(COM_NEGOTIATE);
    zeros(out, HEADER_LEN - 5 + 1);
    let count_at = out.len();
    zeros(out, 2);
    for dialect in dialects {
        out.put(BUFFER_FORMAT_DIALECT);
        out.extend_from_slice(dialect);
        zeros(out, 1);
    }
    let len = out.len() - count_at - 2;
    patch_u16(out, count_at, len);
}
