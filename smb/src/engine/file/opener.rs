//! What a CREATE requests to cache of a file, and what it takes from clients that cache it ([MS-SMB2] 3.3.5.9, [MS-FSA]
//! 2.1.5.18).

use crate::engine::file::leases::LeaseId;
use crate::wire::AccessMask;
use crate::wire::create::OplockLevel;
use crate::wire::create_context::{Lease, LeaseState};

pub(crate) const NONE: LeaseState = LeaseState::empty();
pub(in crate::engine) const R: LeaseState = LeaseState::READ_CACHING;
pub(in crate::engine) const H: LeaseState = LeaseState::HANDLE_CACHING;
pub(in crate::engine) const W: LeaseState = LeaseState::WRITE_CACHING;
pub(in crate::engine) const RH: LeaseState = R.union(H);
pub(in crate::engine) const RW: LeaseState = R.union(W);
pub(in crate::engine) const RWH: LeaseState = RW.union(H);

/// Rights of an open that only accesses attributes. It breaks nothing.
const STAT_ONLY: AccessMask =
    AccessMask::SYNCHRONIZE.union(AccessMask::FILE_READ_ATTRIBUTES).union(AccessMask::FILE_WRITE_ATTRIBUTES);
/// The same for leases, which do not cover the security descriptor either.
const LEASE_STAT_ONLY: AccessMask = STAT_ONLY.union(AccessMask::READ_CONTROL);

/// The caching that a CREATE requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum RequestedCaching {
    #[default]
    Nothing,
    Oplock(LeaseState),
    Lease {
        client: [u8; 16],
        lease: Lease,
    },
}

impl RequestedCaching {
    /// Converts the RequestedOplockLevel of an oplock.
    pub(crate) fn oplock(level: OplockLevel) -> Self {
        match level {
            OplockLevel::II => Self::Oplock(R),
            OplockLevel::EXCLUSIVE => Self::Oplock(RW),
            OplockLevel::BATCH => Self::Oplock(RWH),
            _ => Self::Nothing,
        }
    }

    pub(in crate::engine) fn lease_id(&self) -> Option<LeaseId> {
        match self {
            Self::Lease { client, lease } => Some(LeaseId { client: *client, key: lease.lease_key }),
            _ => None,
        }
    }

    pub(in crate::engine) fn state(&self) -> LeaseState {
        match self {
            Self::Nothing => NONE,
            Self::Oplock(state) => *state,
            Self::Lease { lease, .. } => lease.lease_state,
        }
    }
}

/// An opener of a file, from the point of view of the file's holders.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opener {
    /// Open.GrantedAccess, including the access that overwriting requires.
    pub(crate) access: AccessMask,
    /// The contents will be replaced.
    pub(crate) overwrites: bool,
    /// FILE_DELETE_ON_CLOSE.
    pub(crate) deletes: bool,
    /// The file existed before.
    pub(crate) existed: bool,
    /// The opener has not waited yet.
    pub(crate) first: bool,
    pub(crate) ask: RequestedCaching,
}

impl Opener {
    /// Returns the caching that an opener takes from clients that have the file open: after a sharing violation HANDLE caching,
    /// because their handles may be open only for the cache; otherwise WRITE caching.
    pub(in crate::engine) fn takes(&self, violation: bool) -> LeaseState {
        match (violation, self.deletes) {
            (true, _) => H,
            // [MS-FSA] 2.1.5.1.2: the name is removed when this open ends.
            (false, true) => W | H,
            (false, false) => W,
        }
    }
}

/// Whether an open with these rights does not involve oplocks.
pub(in crate::engine) fn is_stat_only(access: AccessMask) -> bool {
    access.intersects(STAT_ONLY) && access.without(STAT_ONLY).is_empty()
}

/// Whether an open with these rights does not break leases.
pub(in crate::engine) fn is_lease_stat_only(access: AccessMask) -> bool {
    access.intersects(LEASE_STAT_ONLY) && access.without(LEASE_STAT_ONLY).is_empty()
}

/// Caching information in a CREATE response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cached {
    pub(crate) level: OplockLevel,
    pub(crate) lease: Option<Lease>,
}

impl Cached {
    pub(crate) const NOTHING: Self = Self { level: OplockLevel::NONE, lease: None };
}
