//! STUB, replaced by branch leases: a batch oplock for whoever asks.
use super::open::Open;
use crate::wire::create::OplockLevel;
use crate::wire::create_context::Lease;
use std::sync::atomic::Ordering;

pub(crate) struct Cached {
    pub(crate) level: OplockLevel,
    pub(crate) lease: Option<Lease>,
}

impl Open {
    pub(crate) fn keeps_handle(&self) -> bool {
        self.stub_batch.load(Ordering::Acquire)
    }
    pub(crate) fn cached(&self) -> Cached {
        Cached {
            level: if self.keeps_handle() { OplockLevel::BATCH } else { OplockLevel::NONE },
            lease: None,
        }
    }
}
