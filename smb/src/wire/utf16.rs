//! UTF-16LE, the encoding of every name on the wire. Names have no terminator unless their structure requires one.

use super::{Fault, Malformed};

/// Decodes a name. An odd number of bytes is [`Fault::OddString`]; an unpaired surrogate is [`Fault::Surrogate`], so that
/// the caller can answer `STATUS_OBJECT_NAME_INVALID`: such a name has no UTF-8 form and cannot exist on our disks.
pub fn decode(bytes: &[u8]) -> Result<String, Malformed> {
    let malformed = |fault, offset| Malformed { fault, what: "name", offset };
    let (units, odd) = bytes.as_chunks::<2>();
    if !odd.is_empty() {
        return Err(malformed(Fault::OddString, bytes.len() as u32));
    }
    // At most three bytes of UTF-8 for each unit; ASCII is the common case.
    let mut name = String::with_capacity(units.len());
    for (index, unit) in char::decode_utf16(units.iter().map(|unit| u16::from_le_bytes(*unit))).enumerate() {
        name.push(unit.map_err(|_| malformed(Fault::Surrogate, index as u32))?);
    }
    Ok(name)
}

/// Appends `name` as UTF-16LE.
pub fn encode(name: &str, out: &mut Vec<u8>) {
    out.reserve(name.len() * 2);
    for unit in name.encode_utf16() {
        out.extend_from_slice(&unit.to_le_bytes());
    }
}

/// Length of `name` on the wire, in bytes.
#[must_use]
pub fn encoded_len(name: &str) -> usize {
    name.encode_utf16().count() * 2
}

/// Returns `name` as UTF-16LE.
#[must_use]
pub fn to_vec(name: &str) -> Vec<u8> {
    let mut out = Vec::new();
    encode(name, &mut out);
    out
}
