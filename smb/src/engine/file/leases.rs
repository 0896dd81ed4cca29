//! GlobalLeaseTableList ([MS-SMB2] 3.3.1.11, 3.3.1.12): which file a client's lease key belongs to. What a lease allows is
//! kept with the file ([`crate::engine::file::oplocks`]).

use std::collections::HashMap;

use crate::fs::FileKey;
use crate::sync::{Mutex, MutexGuard};

/// LeaseKey, as a client chose it.
pub(crate) type LeaseKey = [u8; 16];

/// A lease: a client's key means another one than the same key of another client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LeaseId {
    pub(crate) client: [u8; 16],
    pub(crate) key: LeaseKey,
}

/// The files that leases are of. As many as there are leases, of which each has an open.
#[derive(Default)]
pub(crate) struct LeaseTable(Mutex<HashMap<LeaseId, FileKey>>);

impl LeaseTable {
    fn leases(&self) -> MutexGuard<'_, HashMap<LeaseId, FileKey>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Whether the key is in use for another file than this one.
    pub(crate) fn is_of_another(&self, id: LeaseId, file: FileKey) -> bool {
        self.find(id).is_some_and(|claimed| claimed != file)
    }

    /// Gives the key to a file. False where another has it.
    pub(crate) fn claim(&self, id: LeaseId, file: FileKey) -> bool {
        *self.leases().entry(id).or_insert(file) == file
    }

    /// The lease has ended with its last open.
    pub(crate) fn release(&self, id: LeaseId) {
        self.leases().remove(&id);
    }

    /// A stream that leases are of has another name.
    pub(crate) fn moved(&self, from: FileKey, to: FileKey) {
        self.leases().values_mut().filter(|file| **file == from).for_each(|file| *file = to);
    }

    pub(crate) fn find(&self, id: LeaseId) -> Option<FileKey> {
        self.leases().get(&id).copied()
    }
}
