//! Share modes ([MS-FSA] 2.1.5.1.2.2).

use crate::wire::{AccessMask, ShareAccess};

/// Rights that share modes apply to. An open without any of them shares with everything.
const SHARED_RIGHTS: AccessMask = AccessMask::FILE_READ_DATA
    .union(AccessMask::FILE_WRITE_DATA)
    .union(AccessMask::FILE_APPEND_DATA)
    .union(AccessMask::FILE_EXECUTE)
    .union(AccessMask::DELETE);

/// Whether the share modes of two opens of one file are compatible.
pub(in crate::engine) fn compatible(a: (AccessMask, ShareAccess), b: (AccessMask, ShareAccess)) -> bool {
    let one_way = |access: AccessMask, share: ShareAccess| {
        let reads = access.intersects(AccessMask::FILE_READ_DATA | AccessMask::FILE_EXECUTE);
        let writes = access.intersects(AccessMask::FILE_WRITE_DATA | AccessMask::FILE_APPEND_DATA);
        let deletes = access.contains(AccessMask::DELETE);
        (!reads || share.contains(ShareAccess::READ))
            && (!writes || share.contains(ShareAccess::WRITE))
            && (!deletes || share.contains(ShareAccess::DELETE))
    };
    if !a.0.intersects(SHARED_RIGHTS) || !b.0.intersects(SHARED_RIGHTS) {
        return true;
    }
    one_way(a.0, b.1) && one_way(b.0, a.1)
}

/// Whether an open of a named stream forbids opening its file for deletion ([MS-FSA] 2.1.5.1.2.2).
pub(in crate::engine) fn forbids_delete(access: AccessMask, share: ShareAccess) -> bool {
    access.intersects(SHARED_RIGHTS) && !share.contains(ShareAccess::DELETE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: AccessMask = AccessMask::FILE_READ_DATA;
    const WRITE: AccessMask = AccessMask::FILE_WRITE_DATA;
    const NONE: ShareAccess = ShareAccess::empty();

    #[test]
    fn sharing_is_checked_both_ways() {
        let all = ShareAccess::READ | ShareAccess::WRITE | ShareAccess::DELETE;
        assert!(compatible((READ, ShareAccess::READ), (READ, ShareAccess::READ)));
        assert!(!compatible((READ, NONE), (READ, all)), "the second reads what the first does not share");
        assert!(!compatible((READ, all), (READ, NONE)), "the first reads what the second does not share");
        assert!(!compatible((WRITE, all), (READ, ShareAccess::READ)));
        assert!(compatible((WRITE, all), (READ, all)));
        assert!(!compatible((AccessMask::DELETE, all), (READ, ShareAccess::READ | ShareAccess::WRITE)));
        assert!(!compatible((AccessMask::FILE_EXECUTE, all), (READ, ShareAccess::WRITE)));
    }

    #[test]
    fn attribute_only_opens_share_with_everything() {
        let stat = AccessMask::FILE_READ_ATTRIBUTES | AccessMask::SYNCHRONIZE;
        assert!(compatible((stat, NONE), (READ | WRITE, NONE)));
        assert!(compatible((READ | WRITE, NONE), (stat, NONE)));
    }
}
