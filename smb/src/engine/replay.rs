//! Data that an open keeps to answer a replay of its CREATE ([MS-SMB2] 3.3.5.9.10).

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use crate::sync::AtomicBool;
use crate::wire::create::CreateAction;

/// The GUID of the client, and Open.CreateGuid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CreateKey {
    pub(crate) client_guid: [u8; 16],
    pub(crate) create_guid: [u8; 16],
}

/// Data that an open keeps to answer a replay of its CREATE.
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

    /// Returns what its CREATE did, once that is about to be answered.
    pub(crate) fn action(&self) -> Option<CreateAction> {
        self.action.get().copied()
    }

    /// Records what its CREATE did. The CREATE is about to be answered. True the first time.
    pub(crate) fn answered(&self, action: CreateAction) -> bool {
        let first = self.action.set(action).is_ok();
        if first {
            self.eligible.store(true, Ordering::Release);
        }
        first
    }

    /// Sets Open.IsReplayEligible to FALSE. True if it was TRUE before.
    pub(crate) fn used(&self) -> bool {
        self.eligible.load(Ordering::Relaxed) && self.eligible.swap(false, Ordering::AcqRel)
    }
}
