//! CREATE that is sent again ([MS-SMB2] 3.3.5.9.10): a client that has lost the answer finds the open that it made by the
//! CreateGuid that it gave it, for as long as it has not used the open.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use crate::engine::file::state::FileState;
use crate::engine::open::Open;
use crate::engine::replay::{CreateKey, Replayable};
use crate::limits::ABANDONED_CREATES_MAX;
use crate::status::NtStatus;
use crate::sync::{Mutex, MutexGuard};
use crate::wire::create::CreateAction;

/// CREATEs that can be found again.
#[derive(Default)]
pub(crate) struct Creations(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    slots: HashMap<CreateKey, Slot>,
    /// Those that lost their connection while they waited for others to give up what they cache, with the files of that.
    /// What they waited for is under way still: until it has come to its end they are in flight for their clients.
    abandoned: HashMap<CreateKey, Weak<FileState>>,
}

enum Slot {
    InFlight,
    Done(Weak<Open>),
}

/// A CREATE under way; dropped where it comes to nothing.
pub(crate) struct Creation {
    all: Arc<Creations>,
    key: CreateKey,
}

/// What a CREATE with a CreateGuid is.
pub(crate) enum Begun {
    /// New.
    New(Creation),
    /// Sent again: this is what it made.
    Replay(Arc<Open>),
}

impl Creations {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("no panic under this lock")
    }

    /// # Errors
    /// `STATUS_DUPLICATE_OBJECTID` where the CreateGuid is in use and this is no replay, `STATUS_FILE_NOT_AVAILABLE` where it
    /// is one of a CREATE that is under way.
    pub(crate) fn begin(self: &Arc<Self>, key: CreateKey, replay: bool) -> Result<Begun, NtStatus> {
        let in_flight = if replay { NtStatus::FILE_NOT_AVAILABLE } else { NtStatus::DUPLICATE_OBJECTID };
        let mut creations = self.lock();
        // At any time a CREATE that waits, or did, is found in one of the two.
        if let Some(file) = creations.abandoned.get(&key).and_then(Weak::upgrade) {
            // A file's state is not looked at under this lock.
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

    /// The client works with an open, so it has the answer to its CREATE.
    pub(crate) fn used(&self, open: &Open) {
        if let Some(replayable) = open.replayable.as_ref().filter(|replayable| replayable.used()) {
            self.lock().slots.remove(&replayable.key());
        }
    }

    /// Forgets what no client waits for any more.
    pub(super) fn forget_abandoned(&self) {
        let abandoned = self.lock().abandoned.clone();
        let over = |file: &Weak<FileState>| file.upgrade().is_none_or(|file| !file.is_breaking());
        let over: HashSet<CreateKey> =
            abandoned.iter().filter(|(_, file)| over(file)).map(|(k, _)| *k).collect();
        self.lock().abandoned.retain(|key, _| !over.contains(key));
    }
}

impl Creation {
    /// For the open that it makes.
    pub(crate) fn replayable(&self) -> Replayable {
        Replayable::new(self.key)
    }

    /// Its connection is lost while it waits for a break of `file`.
    pub(crate) fn abandoned(self, file: &Arc<FileState>) {
        let mut creations = self.all.lock();
        if creations.abandoned.len() < ABANDONED_CREATES_MAX {
            creations.abandoned.insert(self.key, Arc::downgrade(file));
        }
    }

    /// It is about to be answered.
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
