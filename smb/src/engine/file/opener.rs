//! What a CREATE asks to cache of a file, and what it takes from clients that cache it ([MS-SMB2] 3.3.5.9, [MS-FSA] 2.1.5.18).

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

/// Rights of an open that looks at attributes only: it breaks nothing.
const STAT_ONLY: AccessMask =
    AccessMask::SYNCHRONIZE.union(AccessMask::FILE_READ_ATTRIBUTES).union(AccessMask::FILE_WRITE_ATTRIBUTES);
/// As that, for leases, which are not about the descriptor either.
const LEASE_STAT_ONLY: AccessMask = STAT_ONLY.union(AccessMask::READ_CONTROL);

/// What a CREATE asks for.
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
    /// RequestedOplockLevel of an oplock.
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

/// An opener of a file, as its holders see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opener {
    /// Open.GrantedAccess, with that of overwriting.
    pub(crate) access: AccessMask,
    /// The contents will be replaced.
    pub(crate) overwrites: bool,
    /// FILE_DELETE_ON_CLOSE.
    pub(crate) deletes: bool,
    /// The file was there before.
    pub(crate) existed: bool,
    /// It has not waited yet.
    pub(crate) first: bool,
    pub(crate) ask: RequestedCaching,
}

impl Opener {
    /// What an opener takes from clients that have the file open: handles, if they keep it out and may be there for the
    /// cache alone, and the right to write later.
    pub(in crate::engine) fn takes(&self, violation: bool) -> LeaseState {
        match (violation, self.deletes) {
            (true, _) => H,
            // [MS-FSA] 2.1.5.1.2: the name is to go when this open does.
            (false, true) => W | H,
            (false, false) => W,
        }
    }
}

/// Whether an open with these rights does without oplocks.
pub(in crate::engine) fn is_stat_only(access: AccessMask) -> bool {
    access.intersects(STAT_ONLY) && access.without(STAT_ONLY).is_empty()
}

/// Whether an open with these rights leaves leases alone.
pub(in crate::engine) fn is_lease_stat_only(access: AccessMask) -> bool {
    access.intersects(LEASE_STAT_ONLY) && access.without(LEASE_STAT_ONLY).is_empty()
}

/// What a CREATE response says of caching.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cached {
    pub(crate) level: OplockLevel,
    pub(crate) lease: Option<Lease>,
}

impl Cached {
    pub(crate) const NOTHING: Self = Self { level: OplockLevel::NONE, lease: None };
}
