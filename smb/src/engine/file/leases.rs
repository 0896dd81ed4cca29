//! GlobalLeaseTableList ([MS-SMB2] 3.3.1.11, 3.3.1.12): the file that a client's lease key belongs to. What a lease allows
//! is stored with the file ([`crate::engine::file::oplocks`]).

use std::collections::HashMap;

use crate::fs::FileKey;
use crate::sync::{Mutex, MutexGuard};

/// LeaseKey, chosen by a client.
pub(crate) type LeaseKey = [u8; 16];

/// A lease. The same key of another client denotes another lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LeaseId {
    pub(crate) client: [u8; 16],
    pub(crate) key: LeaseKey,
}

/// The file of each lease. Every entry is a lease with at least one open.
#[derive(Default)]
pub(crate) struct LeaseTable(Mutex<HashMap<LeaseId, FileKey>>);

impl LeaseTable {
    fn leases(&self) -> MutexGuard<'_, HashMap<LeaseId, FileKey>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Whether the key is in use for another file.
    pub(crate) fn is_of_another(&self, id: LeaseId, file: FileKey) -> bool {
        self.find(id).is_some_and(|claimed| claimed != file)
    }

    /// Claims the key for a file. False if another file has it.
    pub(crate) fn claim(&self, id: LeaseId, file: FileKey) -> bool {
        *self.leases().entry(id).or_insert(file) == file
    }

    /// Releases the key of a lease that has ended with its last open.
    pub(crate) fn release(&self, id: LeaseId) {
        self.leases().remove(&id);
    }

    /// Updates the leases of a stream that was renamed.
    pub(crate) fn moved(&self, from: FileKey, to: FileKey) {
        self.leases().values_mut().filter(|file| **file == from).for_each(|file| *file = to);
    }

    pub(crate) fn find(&self, id: LeaseId) -> Option<FileKey> {
        self.leases().get(&id).copied()
    }
}
