//! Why a pool's namespace cannot be used.

use std::io;
use std::path::PathBuf;

use forebay_nvmeof::{
    EnsureError, FindError, InvalidKey, InvalidName, Loss, NotAcquired, OpenError, ReservationError,
};
use uuid::Uuid;

use super::record::Refused;
use crate::limits::NAMESPACE_BYTES_MIN;

/// Why a pool's namespace cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("pool {pool}: {reason}")]
pub struct NamespaceError {
    /// Name.
    pub(super) pool: String,
    /// Why.
    pub(super) reason: Reason,
}

impl NamespaceError {
    /// For programs, as JSON in one line: the other owner or epoch that keeps the pool from this instance, if that is the
    /// reason.
    #[must_use]
    pub fn refusal(&self, epoch: u64) -> Option<String> {
        let (reason, recorded, key) = match &self.reason {
            Reason::Refused(Refused::Superseded { recorded, .. }) => ("Superseded", *recorded, None),
            Reason::NotAcquired(NotAcquired::Superseded { theirs, .. }) => {
                ("Superseded", theirs.number().into(), None)
            }
            Reason::Refused(Refused::OtherOwner { epoch, key, .. }) => ("OtherOwner", *epoch, Some(key)),
            // The lower half of a key is its epoch.
            Reason::NotAcquired(NotAcquired::Stranger { key, .. }) => {
                ("OtherOwner", key.number() & u64::from(u32::MAX), Some(key))
            }
            _ => return None,
        };
        let text = serde_json::json!({
            "reason": reason, "pool": self.pool, "epoch": epoch, "recordedEpoch": recorded,
            "recordedKey": key.map(ToString::to_string), "message": self.to_string(),
        });
        Some(text.to_string())
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Reason {
    #[error(transparent)]
    Name(#[from] InvalidName),
    #[error("{path}: {error}")]
    KeyFile { path: PathBuf, error: io::Error },
    #[error("{path}: {error}")]
    Key { path: PathBuf, error: InvalidKey },
    #[error(transparent)]
    Connect(#[from] EnsureError),
    #[error("the namespace did not appear: {0}")]
    Find(#[from] FindError),
    #[error("no path takes I/O to the namespace")]
    NoPath,
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    NotAcquired(#[from] NotAcquired),
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    #[error("the reservation was lost during the start: {0}")]
    Lost(#[from] Loss),
    #[error("the namespace is read-only")]
    ReadOnly,
    #[error("the namespace has {0} bytes; a pool needs at least {NAMESPACE_BYTES_MIN}")]
    TooSmall(u64),
    #[error("the namespace is blank: set pool.nvmeof.format = true to make a file system on it")]
    Blank,
    #[error(
        "the namespace holds something that is no pool: nothing was written; if it is not needed, clear it with wipefs -a"
    )]
    Foreign,
    #[error(
        "the namespace holds the file system {found} (label {label:?}), which is not that of this pool ({expected}): nothing \
         was written"
    )]
    Stranger { found: Uuid, label: String, expected: Uuid },
    #[error("mkfs.xfs: {0}")]
    Format(String),
    #[error(
        "the file system is damaged: unmounted as it is, look at it with xfs_repair -n and repair it with xfs_repair"
    )]
    Damaged,
    #[error("{path} holds another mounted file system: unmount it, or change pool.path")]
    Occupied { path: PathBuf },
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("{what}: {error}")]
    Io { what: &'static str, error: io::Error },
}

pub(super) fn io(what: &'static str) -> impl Fn(io::Error) -> Reason {
    move |error| Reason::Io { what, error }
}

#[cfg(test)]
mod tests {
    use forebay_nvmeof::{HostId, ReservationKey};

    use super::*;

    #[test]
    fn refusal_reports_the_owner_of_the_pool_as_json() {
        let refusal = |reason| {
            let error = NamespaceError { pool: "main".into(), reason };
            let text = error.refusal(1)?;
            Some(serde_json::from_str::<serde_json::Value>(&text).expect("JSON"))
        };
        let recorded =
            refusal(Reason::Refused(Refused::Superseded { recorded: 7, ours: 1 })).expect("an answer");
        assert_eq!(recorded["reason"], "Superseded");
        assert_eq!((&recorded["recordedEpoch"], &recorded["epoch"]), (&7.into(), &1.into()));
        let key = ReservationKey::from_number(0x035e_8849_0000_0007);
        let stranger = NotAcquired::Stranger { host: HostId([1; 16]), key };
        let stranger = refusal(Reason::NotAcquired(stranger)).expect("an answer");
        assert_eq!((&stranger["reason"], &stranger["recordedEpoch"]), (&"OtherOwner".into(), &7.into()));
        assert_eq!(stranger["recordedKey"], "0x035e884900000007");
        assert_eq!(refusal(Reason::Blank), None);
    }
}
