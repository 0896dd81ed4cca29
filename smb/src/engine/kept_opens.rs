//! Opens without a session ([MS-SMB2] 3.3.7.1). When a session loses its last channel, a durable open is kept for a time,
//! with share modes, byte-range locks and what it caches, until its client reconnects. If such an open denies access to
//! another client, that client does not wait for the disconnected one: the open is closed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::engine::clients::Clients;
use crate::engine::durable::Durable;
use crate::engine::mail::{Mail, Waiter};
use crate::engine::open::Open;
use crate::engine::tally::Taken;
use crate::fs::FsOpKind;
use crate::ids::FileId;
use crate::limits::{KEPT_OPENS_MAX, RECONNECT_WAIT_MS};
use crate::status::NtStatus;
use crate::time::{Due, ms};
use crate::wire::create::OplockLevel;
use crate::wire::create_context::LeaseState;

/// Opens without a session.
#[derive(Default)]
pub(crate) struct KeptOpens {
    /// By Open.DurableFileId.
    by_id: HashMap<u64, Kept>,
    /// Requests that reclaim an open that is not lost yet, as far as the server knows.
    waiting: Vec<Waiting>,
    /// The server is stopping and keeps no more opens.
    stopped: bool,
    /// Backend operations for opens that have ended.
    left: Vec<FsOpKind>,
}

/// An open without a session.
pub(crate) struct Kept {
    pub(crate) open: Arc<Open>,
    until: Instant,
    /// Its share of the volume's limit for kept opens.
    _counted: Taken,
}

struct Waiting {
    persistent: u64,
    /// Time of its first tick.
    since: Option<Instant>,
    waiter: Waiter,
}

impl KeptOpens {
    fn wake(&mut self, clients: &dyn Clients, which: impl Fn(&Waiting) -> bool) {
        for waiting in self.waiting.extract_if(.., |w| which(w)) {
            clients.post(waiting.waiter.connection, Mail::Wake(waiting.waiter.token));
        }
    }

    /// Wakes the requests that have waited long enough.
    pub(super) fn tick(&mut self, clients: &dyn Clients, now: Instant) {
        let enough = ms(RECONNECT_WAIT_MS);
        for waiting in &mut self.waiting {
            waiting.since.get_or_insert(now);
        }
        self.wake(clients, |w| w.since.is_some_and(|since| now.saturating_duration_since(since) >= enough));
    }

    /// Queues a request that waits for an open that is not lost yet, as far as the server knows.
    pub(crate) fn wait(&mut self, persistent: u64, waiter: Waiter) {
        self.waiting.push(Waiting { persistent, since: None, waiter });
    }

    /// Removes a request that no longer waits.
    pub(crate) fn stop_waiting(&mut self, token: u64) {
        self.waiting.retain(|w| w.waiter.token != token);
    }

    /// Wakes the requests that wait for an open.
    pub(crate) fn wake_for(&mut self, persistent: u64, clients: &dyn Clients) {
        self.wake(clients, |w| w.persistent == persistent);
    }

    pub(crate) fn find(&self, persistent: u64) -> Option<&Arc<Open>> {
        self.by_id.get(&persistent).map(|kept| &kept.open)
    }

    pub(crate) fn put(&mut self, kept: Kept) {
        self.by_id.insert(kept.open.id.persistent, kept);
    }

    pub(crate) fn take(
        &mut self,
        persistent: u64,
        check: impl FnOnce(&Open, &Durable) -> Result<(), NtStatus>,
        attach: impl FnOnce(&Open),
    ) -> Result<Kept, NtStatus> {
        let found = self.by_id.get(&persistent).filter(|kept| !kept.open.is_closing());
        let (open, durable) = found
            .and_then(|kept| Some((&kept.open, kept.open.durable.get()?)))
            .ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
        check(open, durable)?;
        // Attach in the same step, so that no request finds the open neither kept nor in use.
        attach(open);
        self.by_id.remove(&persistent).ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)
    }

    pub(crate) fn forget(&mut self, id: FileId) -> Option<Arc<Open>> {
        self.by_id.remove(&id.persistent).map(|kept| kept.open)
    }

    pub(super) fn take_all(&mut self, which: impl Fn(&Open, Instant) -> bool) -> Vec<Arc<Open>> {
        self.by_id.extract_if(|_, kept| which(&kept.open, kept.until)).map(|(_, kept)| kept.open).collect()
    }

    pub(crate) fn opens(&self) -> impl Iterator<Item = &Arc<Open>> {
        self.by_id.values().map(|kept| &kept.open)
    }

    /// Keeps an open that [`may_keep`] has accepted, if there is room for it.
    pub(super) fn keep(
        &mut self,
        now: Instant,
        open: &Arc<Open>,
        timeout_ms: u32,
        clients: &dyn Clients,
    ) -> bool {
        if self.stopped || self.by_id.len() >= KEPT_OPENS_MAX || open.volume.removed.load(Ordering::Acquire) {
            return false;
        }
        let Some(counted) = open.volume.used.kept.take(1) else { return false };
        open.detach();
        // Do not grant a LOCK that waits on a connection that is lost but not yet removed.
        open.file.end_waits(open.id, clients);
        self.put(Kept { open: Arc::clone(open), until: now + ms(timeout_ms), _counted: counted });
        self.wake_for(open.id.persistent, clients);
        true
    }

    /// Stops keeping opens. Returns those that were kept.
    pub(super) fn stop(&mut self) -> Vec<Arc<Open>> {
        self.stopped = true;
        self.take_all(|_, _| true)
    }

    /// Returns when the next open has been kept long enough, or [`Due::Now`] if there are backend operations.
    pub(super) fn next_timeout(&self) -> Option<Due> {
        if !self.left.is_empty() {
            return Some(Due::Now);
        }
        self.by_id.values().map(|kept| Due::At(kept.until)).min()
    }

    /// Queues a backend operation for an open that has ended.
    pub(super) fn leave_to_backend(&mut self, op: FsOpKind) {
        self.left.push(op);
    }

    pub(super) fn take_left(&mut self) -> Vec<FsOpKind> {
        std::mem::take(&mut self.left)
    }
}

/// Returns how long an open may be kept after its session has lost the last channel, in milliseconds ([MS-SMB2] 3.3.7.1).
pub(super) fn may_keep(open: &Open) -> Option<u32> {
    let durable = open.durable.get()?;
    if !open.keeps_handle() {
        return None;
    }
    // Other clients can work beside an open that does not cache writes. They must not wait for locks of a disconnected
    // client.
    if open.file.locks_of(open.id) > 0 && !keeps_writes(open) {
        return None;
    }
    Some(durable.timeout_ms)
}

fn keeps_writes(open: &Open) -> bool {
    let cached = open.cached();
    cached
        .lease
        .map_or(cached.level == OplockLevel::BATCH, |l| l.lease_state.contains(LeaseState::WRITE_CACHING))
}
