//! GlobalLeaseTableList ([MS-SMB2] 3.3.1.11, 3.3.1.12): which file a client's lease key belongs to. What a lease allows is
//! kept with the file ([`super::oplocks`]).

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::files::FileState;
use crate::sync::{Mutex, MutexGuard};

/// A lease: a client's key means another one than the same key of another client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LeaseId {
    pub(crate) client: [u8; 16],
    pub(crate) key: [u8; 16],
}

/// The files that leases are of. As many as there are leases, of which each has an open.
#[derive(Default)]
pub(crate) struct LeaseTable(Mutex<HashMap<LeaseId, Weak<FileState>>>);

impl LeaseTable {
    fn leases(&self) -> MutexGuard<'_, HashMap<LeaseId, Weak<FileState>>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Whether the key is in use for another file than this one.
    pub(crate) fn is_of_another(&self, id: LeaseId, file: &Arc<FileState>) -> bool {
        is_another(self.leases().get(&id), file)
    }

    /// Gives the key to a file. False where another has it.
    pub(crate) fn claim(&self, id: LeaseId, file: &Arc<FileState>) -> bool {
        let mut leases = self.leases();
        if is_another(leases.get(&id), file) {
            return false;
        }
        leases.insert(id, Arc::downgrade(file));
        true
    }

    /// The lease has ended with its last open.
    pub(crate) fn release(&self, id: LeaseId) {
        self.leases().remove(&id);
    }

    pub(crate) fn find(&self, id: LeaseId) -> Option<Arc<FileState>> {
        self.leases().get(&id)?.upgrade()
    }
}

fn is_another(claimed: Option<&Weak<FileState>>, file: &Arc<FileState>) -> bool {
    claimed.is_some_and(|claimed| claimed.strong_count() > 0 && claimed.as_ptr() != Arc::as_ptr(file))
}
