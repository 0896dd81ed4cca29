//! What an open keeps so that its CREATE is answered again ([MS-SMB2] 3.3.5.9.10).

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use crate::sync::AtomicBool;
use crate::wire::create::CreateAction;

/// The client that asks, and Open.CreateGuid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CreateKey {
    pub(crate) client_guid: [u8; 16],
    pub(crate) create_guid: [u8; 16],
}

/// What an open keeps so that its CREATE is answered again.
pub(crate) struct Replayable {
    key: CreateKey,
    /// Open.IsReplayEligible.
    eligible: AtomicBool,
    action: OnceLock<CreateAction>,
}

impl Replayable {
    pub(crate) fn new(key: CreateKey) -> Self {
        Self { key, eligible: AtomicBool::new(false), action: OnceLock::new() }
    }

    pub(crate) fn key(&self) -> CreateKey {
        self.key
    }

    /// What its CREATE did, once that is about to be answered.
    pub(crate) fn action(&self) -> Option<CreateAction> {
        self.action.get().copied()
    }

    /// Its CREATE is about to be answered. True the first time.
    pub(crate) fn answered(&self, action: CreateAction) -> bool {
        let first = self.action.set(action).is_ok();
        if first {
            self.eligible.store(true, Ordering::Release);
        }
        first
    }

    /// Open.IsReplayEligible becomes FALSE. True where it was not before.
    pub(crate) fn used(&self) -> bool {
        self.eligible.load(Ordering::Relaxed) && self.eligible.swap(false, Ordering::AcqRel)
    }
}
