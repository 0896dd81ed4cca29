//! Replay of a CREATE ([MS-SMB2] 3.3.5.9.10): a client that has lost the response finds its open by the CreateGuid that it
//! chose, as long as it has not used the open.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use crate::engine::file::state::FileState;
use crate::engine::open::Open;
use crate::engine::replay::{CreateKey, Replayable};
use crate::limits::ABANDONED_CREATES_MAX;
use crate::status::NtStatus;
use crate::sync::{Mutex, MutexGuard};
use crate::wire::create::CreateAction;

/// CREATEs that a replay can find.
#[derive(Default)]
pub(crate) struct Creations(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    slots: HashMap<CreateKey, Slot>,
    /// CREATEs that lost their connection while they waited for other clients to give up what they cache, with the files in
    /// question. The breaks are still in progress. Until these end, the CREATEs count as in flight for their clients.
    abandoned: HashMap<CreateKey, Weak<FileState>>,
}

enum Slot {
    InFlight,
    Done(Weak<Open>),
}

/// A CREATE in progress. Dropped if it fails.
pub(crate) struct Creation {
    all: Arc<Creations>,
    key: CreateKey,
}

/// Result of the lookup of a CREATE with a CreateGuid.
pub(crate) enum Begun {
    /// A new CREATE.
    New(Creation),
    /// A replay, with the open that the CREATE made.
    Replay(Arc<Open>),
}

impl Creations {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("no panic under this lock")
    }

    /// # Errors
    /// `STATUS_DUPLICATE_OBJECTID` if the CreateGuid is in use and this is no replay, `STATUS_FILE_NOT_AVAILABLE` if this
    /// is a replay of a CREATE that is in progress.
    pub(crate) fn begin(self: &Arc<Self>, key: CreateKey, replay: bool) -> Result<Begun, NtStatus> {
        let in_flight = if replay { NtStatus::FILE_NOT_AVAILABLE } else { NtStatus::DUPLICATE_OBJECTID };
        let mut creations = self.lock();
        // A CREATE that waits, or waited, is always in one of the two maps.
        if let Some(file) = creations.abandoned.get(&key).and_then(Weak::upgrade) {
            // Do not access the state of a file under this lock.
            drop(creations);
            if file.is_breaking() {
                return Err(in_flight);
            }
            creations = self.lock();
        }
        match creations.slots.get(&key) {
            Some(Slot::InFlight) => return Err(in_flight),
            Some(Slot::Done(open)) => match open.upgrade().filter(|open| !open.is_closing()) {
                Some(open) if replay => return Ok(Begun::Replay(open)),
                Some(_) => return Err(NtStatus::DUPLICATE_OBJECTID),
                None => {}
            },
            None => {}
        }
        creations.abandoned.remove(&key);
        creations.slots.insert(key, Slot::InFlight);
        Ok(Begun::New(Creation { all: Arc::clone(self), key }))
    }

    /// Removes the CREATE of an open that its client uses: the client has received the response.
    pub(crate) fn used(&self, open: &Open) {
        if let Some(replayable) = open.replayable.as_ref().filter(|replayable| replayable.used()) {
            self.lock().slots.remove(&replayable.key());
        }
    }

    /// Removes the abandoned CREATEs that no client waits for any more.
    pub(super) fn forget_abandoned(&self) {
        let abandoned = self.lock().abandoned.clone();
        let over = |file: &Weak<FileState>| file.upgrade().is_none_or(|file| !file.is_breaking());
        let over: HashSet<CreateKey> =
            abandoned.iter().filter(|(_, file)| over(file)).map(|(k, _)| *k).collect();
        self.lock().abandoned.retain(|key, _| !over.contains(key));
    }
}

impl Creation {
    /// Creates the [`Replayable`] of the open that this CREATE makes.
    pub(crate) fn replayable(&self) -> Replayable {
        Replayable::new(self.key)
    }

    /// Abandons the CREATE: its connection was lost while it waits for a break of `file`.
    pub(crate) fn abandoned(self, file: &Arc<FileState>) {
        let mut creations = self.all.lock();
        if creations.abandoned.len() < ABANDONED_CREATES_MAX {
            creations.abandoned.insert(self.key, Arc::downgrade(file));
        }
    }

    /// Completes the CREATE, which is about to be answered.
    pub(crate) fn done(self, open: &Arc<Open>, action: CreateAction) {
        let Some(replayable) = &open.replayable else { return };
        if replayable.answered(action) {
            self.all.lock().slots.insert(self.key, Slot::Done(Arc::downgrade(open)));
        }
    }
}

impl Drop for Creation {
    fn drop(&mut self) {
        let mut creations = self.all.lock();
        if matches!(creations.slots.get(&self.key), Some(Slot::InFlight)) {
            creations.slots.remove(&self.key);
        }
    }
}
