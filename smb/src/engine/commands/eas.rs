//! Lists of extended attributes as clients send them ([MS-FSCC] 2.4.15, 2.4.15.1).

use crate::fs::Ea;
use crate::limits::EA_BYTES_MAX;
use crate::status::NtStatus;
use crate::wire::fscc::ea::{FullEa, GetEa};

/// Printable ASCII. Linux uses characters in names that [MS-FSCC] 2.4.15 forbids (docs/reference/spec-exceptions.md).
fn check_name(name: &[u8]) -> Result<(), NtStatus> {
    let printable = |byte: &u8| matches!(byte, b' '..=b'~');
    if !name.is_empty() && name.iter().all(printable) { Ok(()) } else { Err(NtStatus::INVALID_EA_NAME) }
}

/// The attributes that a client sets.
pub(super) fn to_set(list: &[u8]) -> Result<Vec<Ea>, NtStatus> {
    let list = FullEa::parse_list(list).map_err(|_| NtStatus::EA_LIST_INCONSISTENT)?;
    let mut bytes = 0;
    for ea in &list {
        check_name(ea.name)?;
        // FILE_NEED_EA would prevent clients that do not support it from opening the file; no backend stores it.
        if !ea.flags.is_empty() {
            return Err(NtStatus::INVALID_EA_FLAG);
        }
        bytes += Ea::size(ea.name.len(), ea.value.len());
    }
    if bytes > EA_BYTES_MAX {
        return Err(NtStatus::EA_TOO_LARGE);
    }
    Ok(list.iter().map(|ea| Ea { name: ea.name.to_vec(), value: ea.value.to_vec() }).collect())
}

/// The names that a client requests.
pub(super) fn to_get(list: &[u8]) -> Result<Vec<Vec<u8>>, NtStatus> {
    let list = GetEa::parse_list(list).map_err(|_| NtStatus::EA_LIST_INCONSISTENT)?;
    list.iter().map(|ea| check_name(ea.name).map(|()| ea.name.to_vec())).collect()
}
