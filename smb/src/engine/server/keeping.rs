//! Opens that the server keeps without a session, and their end.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::Server;
use crate::engine::app_instances::Superseded;
use crate::engine::kept_opens::{KeptOpens, may_keep};
use crate::engine::open::Open;
use crate::engine::open_end;
use crate::fs::FsOpKind;
use crate::ids::FileId;
use crate::sync::MutexGuard;
use crate::time::Due;

impl Server {
    pub(crate) fn kept(&self) -> MutexGuard<'_, KeptOpens> {
        self.kept_opens.lock().expect("no panic under this lock")
    }

    /// Ends an open that its owner lost, like [`open_end::end`]. Returns the backend operation for it.
    pub(crate) fn end_open(&self, open: &Open) -> FsOpKind {
        open_end::end(open, &self.creations, self)
    }

    /// Keeps an open after its session has lost the last channel ([MS-SMB2] 3.3.7.1). False if it must be closed.
    pub(crate) fn keep(&self, now: Instant, open: &Arc<Open>) -> bool {
        may_keep(open).is_some_and(|timeout_ms| self.kept().keep(now, open, timeout_ms, self))
    }

    /// Ends a kept open that is in the way of another client. Returns the backend operation for it.
    pub(crate) fn displace(&self, id: FileId) -> Option<FsOpKind> {
        let open = self.kept().forget(id)?;
        open.begin_close().then(|| self.end_open(&open))
    }

    /// Ends an open of an application that has moved to another client. Returns the backend operation for it.
    pub(crate) fn supersede(&self, open: Superseded) -> Option<FsOpKind> {
        let session = self.sessions().get(&open.session_id).cloned();
        match session.and_then(|session| session.remove_open(open.id)) {
            Some(open) => open.begin_close().then(|| self.end_open(&open)),
            // Its session has ended in the meantime, or before.
            None => self.displace(open.id),
        }
    }

    /// Returns when to call [`Self::handle_timeout`] next.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Due> {
        self.kept().next_timeout()
    }

    /// Ends opens that have been kept long enough for clients that did not reconnect. Returns operations for a backend; no
    /// request waits for their outcome.
    #[must_use]
    pub fn handle_timeout(&self, now: Instant) -> Vec<FsOpKind> {
        // A kept open is useless once a rename or write by another client has taken HANDLE caching from its lease.
        let all: Vec<Arc<Open>> = self.kept().opens().cloned().collect();
        let useless: HashSet<FileId> =
            all.iter().filter(|open| !open.keeps_handle()).map(|open| open.id).collect();
        let late = self.kept().take_all(|open, until| until <= now || useless.contains(&open.id));
        self.end_kept(late);
        self.creations.forget_abandoned();
        self.kept().tick(self, now);
        self.kept().take_left()
    }

    /// Stops keeping opens, because the server stops. [`Self::handle_timeout`] returns the backend operations for that.
    pub fn stop_keeping(&self) {
        let all = self.kept().stop();
        self.end_kept(all);
    }

    /// Ends the kept opens of a volume that is being removed.
    pub(crate) fn end_kept_of(&self, volume: &str) {
        let all = self.kept().take_all(|open, _| open.volume.id == volume);
        self.end_kept(all);
    }

    fn end_kept(&self, opens: Vec<Arc<Open>>) {
        for open in opens {
            if open.begin_close() {
                let op = self.end_open(&open);
                self.kept().leave_to_backend(op);
            }
        }
    }
}
