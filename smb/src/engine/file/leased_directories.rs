//! The directories that clients have leases on, by path. A change in a directory breaks its leases ([MS-FSA] 2.1.4.12 with
//! PARENT_OBJECT). What each lease allows is stored with the directory ([`crate::engine::file::oplocks`]).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::engine::clients::{Breakable, Clients};
use crate::engine::file::leases::LeaseKey;
use crate::engine::file::state::FileState;
use crate::engine::mail::ConnectionId;
use crate::fs::RelPath;
use crate::ids::FileId;
use crate::limits::WRITES_UNREPORTED_SECONDS_MAX;
use crate::sync::{AtomicBool, Mutex, MutexGuard};

/// Minimum number of writers for a sweep.
const SWEEP_MIN: usize = 64;

/// The leased directories of a volume. Their number is bounded by the number of opens with leases.
#[derive(Default)]
pub(crate) struct LeasedDirectories {
    /// Whether there are any, so that changes take no lock if there are none.
    any: AtomicBool,
    /// Number of opens that were added, so that a writer does not check again the leases that it has already broken.
    grants: AtomicU64,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    by_path: HashMap<RelPath, Vec<(FileId, Arc<FileState>)>>,
    /// The directory of each open.
    by_open: HashMap<FileId, RelPath>,
    /// Names that backends are removing for clients that are gone.
    leaving: Vec<(Arc<FileState>, RelPath)>,
    /// Opens that have written, and when; oldest first. Each open is listed at most once. The list holds at most twice as
    /// many as were alive at the last sweep.
    written: VecDeque<(Instant, Weak<dyn Writer>)>,
    sweep_at: usize,
}

/// An open with WRITEs for which leases on its directory were not broken.
pub(crate) trait Writer: Send + Sync {
    /// Breaks the leases if such WRITEs remain. The open is no longer listed among the opens that have written.
    fn overdue(&self, clients: &dyn Clients);
}

impl LeasedDirectories {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Returns a number that changes whenever an open is added.
    pub(crate) fn grants(&self) -> u64 {
        self.grants.load(Ordering::Acquire)
    }

    /// Adds an open of a directory that has a lease. Call this before its client reads the directory, while the path keeps
    /// its name.
    pub(crate) fn add(&self, open: FileId, path: &RelPath, directory: &Arc<FileState>) {
        let mut inner = self.inner();
        inner.by_path.entry(path.clone()).or_default().push((open, Arc::clone(directory)));
        inner.by_open.insert(open, path.clone());
        self.grants.fetch_add(1, Ordering::AcqRel);
        self.any.store(true, Ordering::Release);
    }

    /// Removes an open of a directory, with or without a lease, that has ended.
    pub(crate) fn remove(&self, open: FileId) {
        if !self.any() {
            return;
        }
        let mut inner = self.inner();
        let Some(path) = inner.by_open.remove(&open) else { return };
        if let Some(opens) = inner.by_path.get_mut(&path) {
            opens.retain(|(id, _)| *id != open);
            if opens.is_empty() {
                inner.by_path.remove(&path);
            }
        }
        self.any.store(!inner.by_open.is_empty(), Ordering::Release);
    }

    /// Renames a directory. Nothing below it is open.
    pub(crate) fn moved(&self, from: &RelPath, to: &RelPath) {
        if !self.any() {
            return;
        }
        let mut inner = self.inner();
        let Some(opens) = inner.by_path.remove(from) else { return };
        for (open, _) in &opens {
            inner.by_open.insert(*open, to.clone());
        }
        inner.by_path.entry(to.clone()).or_default().extend(opens);
    }

    /// Breaks leases after a change of the entries of a directory by an open that names `parent` as the lease of its
    /// directory.
    pub(crate) fn changed(&self, directory: &RelPath, parent: Option<LeaseKey>, clients: &dyn Clients) {
        if !self.any() {
            return;
        }
        let mut states: Vec<Arc<FileState>> = Vec::new();
        if let Some(opens) = self.inner().by_path.get(directory) {
            for (_, state) in opens {
                if !states.iter().any(|known| Arc::ptr_eq(known, state)) {
                    states.push(Arc::clone(state));
                }
            }
        }
        for state in states {
            state.entries_changed(parent, clients);
        }
    }

    /// Records that a client that may send more later has written. Leases on the directory are broken when it flushes or
    /// closes the file, or after [`WRITES_UNREPORTED_SECONDS_MAX`]. Must not be called again for this writer until it is
    /// overdue.
    pub(crate) fn written(self: &Arc<Self>, now: Instant, writer: Weak<dyn Writer>, clients: &dyn Clients) {
        let mut inner = self.inner();
        if inner.written.len() >= inner.sweep_at {
            inner.written.retain(|(_, writer)| writer.strong_count() > 0);
            inner.sweep_at = (2 * inner.written.len()).max(SWEEP_MIN);
        }
        inner.written.push_back((now, writer));
        let is_first = inner.written.len() == 1;
        drop(inner);
        if is_first {
            let all: Arc<Self> = Arc::clone(self);
            clients.watch(all);
        }
    }

    /// Removes and returns the opens that wrote long enough ago.
    fn due(&self, now: Instant) -> Vec<Arc<dyn Writer>> {
        let mut inner = self.inner();
        let is_due = |(written, _): &(Instant, Weak<dyn Writer>)| {
            now.saturating_duration_since(*written).as_secs() >= WRITES_UNREPORTED_SECONDS_MAX
        };
        let count = inner.written.iter().take_while(|entry| is_due(entry)).count();
        inner.written.drain(..count).filter_map(|(_, writer)| writer.upgrade()).collect()
    }

    /// Records that a backend is about to remove a name of `file` and that no request waits for it. Leases on the directory
    /// that are granted before the removal are broken after it.
    pub(crate) fn leaves(self: &Arc<Self>, file: &Arc<FileState>, path: &RelPath, clients: &dyn Clients) {
        if !self.any() {
            return;
        }
        self.inner().leaving.push((Arc::clone(file), path.clone()));
        let all: Arc<Self> = Arc::clone(self);
        clients.watch(all);
    }
}

impl Breakable for LeasedDirectories {
    fn tick(&self, now: Instant, clients: &dyn Clients) -> bool {
        for writer in self.due(now) {
            writer.overdue(clients);
        }
        let all = std::mem::take(&mut self.inner().leaving);
        let (there, gone): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(file, path)| file.delete_pending_at(path));
        for (_, path) in gone {
            self.changed(&path.parent(), None, clients);
        }
        let mut inner = self.inner();
        inner.leaving.extend(there);
        !inner.leaving.is_empty() || !inner.written.is_empty()
    }

    fn channel_lost(&self, _: ConnectionId, _: &dyn Clients) {}
}
