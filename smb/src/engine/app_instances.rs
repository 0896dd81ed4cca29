//! Application instances that move from one client to another and take their files along ([MS-SMB2] 3.3.5.9.13). When a
//! virtual machine or a clustered database starts on another node, it closes its opens on the previous node without waiting
//! for the session of that node to end.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crate::engine::file::local_open::LocalOpen;
use crate::fs::{RelPath, StreamName};
use crate::ids::FileId;
use crate::status::NtStatus;
use crate::sync::{Mutex, MutexGuard};
use crate::wire::Dialect;
use crate::wire::create_context::RequestContext;

/// Open.ApplicationInstanceVersionHigh and Open.ApplicationInstanceVersionLow.
type Version = (u64, u64);

/// The application that a CREATE is for, according to its contexts, and the client that the application runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AppInstance {
    /// Open.AppInstanceId.
    id: [u8; 16],
    version: Option<Version>,
    client_guid: [u8; 16],
}

impl AppInstance {
    /// Returns `None` if the CREATE has no AppInstanceId or the dialect does not support it.
    pub(crate) fn of(
        contexts: &[RequestContext<'_>],
        dialect: Dialect,
        client_guid: [u8; 16],
    ) -> Option<Self> {
        if matches!(dialect, Dialect::SMB2_0_2 | Dialect::SMB2_1) {
            return None;
        }
        let (mut id, mut version) = (None, None);
        for context in contexts {
            match *context {
                RequestContext::AppInstanceId(given) => id = Some(given),
                RequestContext::AppInstanceVersion { high, low } if dialect == Dialect::SMB3_1_1 => {
                    version = Some((high, low));
                }
                _ => {}
            }
        }
        Some(Self { id: id?, version, client_guid })
    }

    /// Whether this is the same application on another client.
    fn has_moved_from(&self, earlier: &Self) -> bool {
        self.id == earlier.id && self.client_guid != earlier.client_guid
    }

    /// Whether an open of this version gives way to `later`. It does not if `later` may be the older instance.
    fn gives_way_to(&self, later: &Self) -> bool {
        self.version.is_none_or(|version| later.version.is_some_and(|later| version < later))
    }
}

/// Opens of applications that have an AppInstanceId.
#[derive(Default)]
pub(crate) struct AppInstances(Mutex<HashMap<[u8; 16], Vec<Member>>>);

struct Member {
    instance: AppInstance,
    open: Weak<dyn LocalOpen>,
}

/// Keeps an open registered with its application for as long as the open lives.
pub(crate) struct Membership {
    all: Arc<AppInstances>,
    id: [u8; 16],
}

/// An open to close, and its session: 0 if the open is kept for a client without a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superseded {
    pub(crate) id: FileId,
    pub(crate) session_id: u64,
}

impl AppInstances {
    fn lock(&self) -> MutexGuard<'_, HashMap<[u8; 16], Vec<Member>>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Adds an open.
    pub(crate) fn add(self: &Arc<Self>, instance: AppInstance, open: Weak<dyn LocalOpen>) -> Membership {
        self.lock().entry(instance.id).or_default().push(Member { instance, open });
        Membership { all: Arc::clone(self), id: instance.id }
    }

    /// Returns the opens of this name that the same application has on other clients.
    ///
    /// # Errors
    /// `STATUS_FILE_FORCED_CLOSED` if one of them has a version that is not older.
    pub(crate) fn superseded(
        &self,
        by: &AppInstance,
        volume_id: &str,
        path: &RelPath,
        stream: Option<&StreamName>,
    ) -> Result<Vec<Superseded>, NtStatus> {
        // Query the opens without this lock: the last reference to an open can be dropped here, and its drop takes the
        // lock.
        let members: Vec<(AppInstance, Arc<dyn LocalOpen>)> = match self.lock().get(&by.id) {
            None => return Ok(Vec::new()),
            Some(members) => members.iter().filter_map(|m| Some((m.instance, m.open.upgrade()?))).collect(),
        };
        let mut superseded = Vec::new();
        for (instance, open) in members {
            let same = by.has_moved_from(&instance)
                && !open.is_closing()
                && open.volume_id() == volume_id
                && open.path() == *path
                && open.stream().as_ref() == stream;
            if same && !instance.gives_way_to(by) {
                return Err(NtStatus::FILE_FORCED_CLOSED);
            }
            if same {
                superseded.push(Superseded { id: open.id(), session_id: open.session_id() });
            }
        }
        Ok(superseded)
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        if let Some(members) = all.get_mut(&self.id) {
            members.retain(|member| member.open.strong_count() > 0);
            if members.is_empty() {
                all.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUIDS: [[u8; 16]; 2] = [[1; 16], [2; 16]];

    fn instance(client: usize, version: Option<Version>) -> AppInstance {
        AppInstance { id: [7; 16], version, client_guid: GUIDS[client] }
    }

    #[test]
    fn only_a_higher_version_takes_over_from_a_versioned_app_instance() {
        let table = [
            (None, None, true),
            (None, Some((0, 0)), true),
            (Some((1, 5)), None, false),
            (Some((1, 5)), Some((1, 5)), false),
            (Some((1, 5)), Some((1, 4)), false),
            (Some((1, 5)), Some((0, 9)), false),
            (Some((1, 5)), Some((1, 6)), true),
            (Some((1, 5)), Some((2, 0)), true),
        ];
        for (earlier, later, gives_way) in table {
            assert_eq!(
                instance(0, earlier).gives_way_to(&instance(1, later)),
                gives_way,
                "{earlier:?} {later:?}"
            );
        }
        assert!(instance(1, None).has_moved_from(&instance(0, None)));
        assert!(!instance(0, None).has_moved_from(&instance(0, None)), "the same client");
        let other = AppInstance { id: [8; 16], ..instance(1, None) };
        assert!(!other.has_moved_from(&instance(0, None)));
    }

    #[test]
    fn app_instance_contexts_are_ignored_in_older_dialects() {
        let id = RequestContext::AppInstanceId([7; 16]);
        let version = RequestContext::AppInstanceVersion { high: 1, low: 5 };
        let of = |contexts: &[RequestContext<'_>], dialect| AppInstance::of(contexts, dialect, GUIDS[0]);
        assert_eq!(of(&[id, version], Dialect::SMB3_1_1), Some(instance(0, Some((1, 5)))));
        assert_eq!(of(&[version, id], Dialect::SMB3_0_2), Some(instance(0, None)));
        assert_eq!(of(&[id], Dialect::SMB2_1), None);
        assert_eq!(of(&[version], Dialect::SMB3_1_1), None, "a version of nothing");
    }
}
