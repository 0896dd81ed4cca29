//! Access rights of an open ([MS-FSA] 2.1.5.1.2.1, [MS-SMB2] 3.3.5.9). The credentials of a volume give access to all of
//! it, so only the tree connect and the READONLY attribute limit rights.

use crate::status::NtStatus;
use crate::wire::{AccessMask, FileAttributes};

/// All rights on a file: FILE_ALL_ACCESS.
pub(crate) const ALL: u32 = 0x001f_01ff;
/// Rights that change nothing: read, execute, synchronize.
pub(crate) const READ_ONLY: u32 = 0x0012_00a9;

/// Rights that change something.
pub(crate) const CHANGING: AccessMask = AccessMask::FILE_WRITE_DATA
    .union(AccessMask::FILE_APPEND_DATA)
    .union(AccessMask::FILE_WRITE_EA)
    .union(AccessMask::FILE_DELETE_CHILD)
    .union(AccessMask::FILE_WRITE_ATTRIBUTES)
    .union(AccessMask::DELETE)
    .union(AccessMask::WRITE_DAC)
    .union(AccessMask::WRITE_OWNER);

/// Rights to change a file's data.
pub(crate) const DATA_CHANGING: AccessMask = AccessMask::FILE_WRITE_DATA.union(AccessMask::FILE_APPEND_DATA);

/// Rights that MAXIMUM_ALLOWED does not grant on a READONLY file ([MS-FSA] 2.1.5.1.2.1).
const DENIED_ON_READONLY: AccessMask = DATA_CHANGING.union(AccessMask::FILE_DELETE_CHILD);

/// Returns the rights that a CREATE requests, with generic rights replaced, on a tree connect that allows `maximal`.
///
/// MAXIMUM_ALLOWED stays in the result: its meaning depends on the file ([`grant`]).
///
/// # Errors
/// `STATUS_ACCESS_DENIED`; `STATUS_PRIVILEGE_NOT_HELD` for access to the audit list (SACL), which files do not have.
pub(crate) fn desired(asked: AccessMask, maximal: AccessMask) -> Result<AccessMask, NtStatus> {
    if asked.intersects(AccessMask::RESERVED) || asked.is_empty() {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if asked.contains(AccessMask::ACCESS_SYSTEM_SECURITY) {
        return Err(NtStatus::PRIVILEGE_NOT_HELD);
    }
    let desired = asked.map_generic();
    if !desired.without(maximal | AccessMask::MAXIMUM_ALLOWED).is_empty() {
        return Err(NtStatus::ACCESS_DENIED);
    }
    Ok(desired)
}

/// Returns Open.GrantedAccess on a file with these attributes. If `created`, the attributes do not limit the access.
///
/// # Errors
/// `STATUS_ACCESS_DENIED` if the open could change data of a READONLY file.
pub(crate) fn grant(
    desired: AccessMask,
    maximal: AccessMask,
    attributes: FileAttributes,
    created: bool,
) -> Result<AccessMask, NtStatus> {
    let protected = !created
        && attributes.contains(FileAttributes::READONLY)
        && !attributes.contains(FileAttributes::DIRECTORY);
    let explicit = desired.without(AccessMask::MAXIMUM_ALLOWED);
    if protected && explicit.intersects(DATA_CHANGING) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if !desired.contains(AccessMask::MAXIMUM_ALLOWED) {
        return Ok(explicit);
    }
    Ok(if protected { maximal.without(DENIED_ON_READONLY) } else { maximal } | explicit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: AccessMask = AccessMask::FILE_ALL_ACCESS;

    #[test]
    fn empty_or_reserved_access_rights_are_denied() {
        assert_eq!(desired(AccessMask::empty(), ALL), Err(NtStatus::ACCESS_DENIED));
        assert_eq!(desired(AccessMask(0x0400_0000), ALL), Err(NtStatus::ACCESS_DENIED));
        assert_eq!(desired(AccessMask::ACCESS_SYSTEM_SECURITY, ALL), Err(NtStatus::PRIVILEGE_NOT_HELD));
        assert_eq!(desired(AccessMask::SYNCHRONIZE, ALL), Ok(AccessMask::SYNCHRONIZE));
    }

    #[test]
    fn generic_rights_are_mapped_and_limited_by_the_tree_connect() {
        assert_eq!(desired(AccessMask::GENERIC_ALL, ALL), Ok(ALL));
        let read_only = AccessMask(0x0012_00a9);
        assert_eq!(desired(AccessMask::GENERIC_READ, read_only), Ok(AccessMask::FILE_GENERIC_READ));
        assert_eq!(desired(AccessMask::GENERIC_WRITE, read_only), Err(NtStatus::ACCESS_DENIED));
        let maximum = desired(AccessMask::MAXIMUM_ALLOWED, read_only).expect("always allowed to ask");
        assert_eq!(grant(maximum, read_only, FileAttributes::NORMAL, false), Ok(read_only));
    }

    #[test]
    fn a_readonly_file_is_writable_only_by_the_open_that_created_it() {
        let write = AccessMask::FILE_WRITE_DATA;
        let readonly = FileAttributes::READONLY;
        assert_eq!(grant(write, ALL, readonly, false), Err(NtStatus::ACCESS_DENIED));
        assert_eq!(grant(write, ALL, readonly, true), Ok(write));
        assert_eq!(grant(AccessMask::DELETE, ALL, readonly, false), Ok(AccessMask::DELETE));
        let maximum =
            grant(AccessMask::MAXIMUM_ALLOWED, ALL, readonly, false).expect("MAXIMUM_ALLOWED never fails");
        assert_eq!(maximum.0, 0x001f_01b9);
        assert_eq!(grant(write, ALL, readonly | FileAttributes::DIRECTORY, false), Ok(write));
    }
}
