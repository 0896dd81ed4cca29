//! Locks for looking up and then changing a name or an attribute of a file, so that no other client changes it in between.

use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_smb::fs::FileKey;

use crate::limits::NAME_LOCKS;

/// One lock for each of [`NAME_LOCKS`] groups of directories: clients in different directories rarely wait for each other.
#[derive(Debug)]
pub(super) struct NameLocks(Vec<Mutex<()>>);

/// Guard for looking up and changing names in one or two directories.
#[must_use]
pub(super) struct NamesHeld<'a> {
    _first: MutexGuard<'a, ()>,
    _second: Option<MutexGuard<'a, ()>>,
}

impl Default for NameLocks {
    fn default() -> Self {
        Self((0..NAME_LOCKS).map(|_| Mutex::new(())).collect())
    }
}

impl NameLocks {
    fn group(directory: FileKey) -> usize {
        // Subdirectories of one parent often have consecutive inode numbers, which get different locks.
        (directory.ino ^ directory.dev) as usize % NAME_LOCKS
    }

    fn lock(&self, group: usize) -> MutexGuard<'_, ()> {
        self.0[group].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the names of one directory.
    pub(super) fn of(&self, directory: FileKey) -> NamesHeld<'_> {
        NamesHeld { _first: self.lock(Self::group(directory)), _second: None }
    }

    /// Locks the names of two directories, in the same order on every thread.
    pub(super) fn of_both(&self, one: FileKey, other: FileKey) -> NamesHeld<'_> {
        let (one, other) = (Self::group(one), Self::group(other));
        let first = self.lock(one.min(other));
        let second = (one != other).then(|| self.lock(one.max(other)));
        NamesHeld { _first: first, _second: second }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_sharing_a_lock_take_it_once_and_others_do_not_wait() {
        let locks = NameLocks::default();
        let key = |ino| FileKey { dev: 0, ino, stream: 0 };
        drop(locks.of_both(key(1), key(1)));
        drop(locks.of_both(key(1), key(1 + NAME_LOCKS as u64)));
        let held = locks.of_both(key(2), key(1));
        assert!(locks.0[1].try_lock().is_err() && locks.0[2].try_lock().is_err());
        assert!(locks.0[3].try_lock().is_ok());
        drop(held);
        let _all = locks.of(key(1));
        assert!(locks.0[2].try_lock().is_ok());
    }
}
