//! The directories that clients have leases on, by path: what changes in one of them breaks its leases ([MS-FSA] 2.1.4.12 with
//! PARENT_OBJECT). What each lease allows is kept with the directory ([`crate::engine::file::oplocks`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::engine::clients::{Breakable, Clients};
use crate::engine::file::leases::LeaseKey;
use crate::engine::file::state::FileState;
use crate::engine::mail::ConnectionId;
use crate::fs::RelPath;
use crate::ids::FileId;
use crate::sync::{AtomicBool, Mutex, MutexGuard};

/// The leased directories of a volume. As many as there are opens with leases.
#[derive(Default)]
pub(crate) struct LeasedDirectories {
    /// Whether there are any, so that a change without them takes no lock.
    any: AtomicBool,
    /// How many opens were added, so that a writer need not look again at what it has broken.
    grants: AtomicU64,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    by_path: HashMap<RelPath, Vec<(FileId, Arc<FileState>)>>,
    /// Where the directory of each open is.
    by_open: HashMap<FileId, RelPath>,
    /// Names that backends are removing for clients that are gone.
    leaving: Vec<(Arc<FileState>, RelPath)>,
}

impl LeasedDirectories {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Differs from what it was before if an open was added since.
    pub(crate) fn grants(&self) -> u64 {
        self.grants.load(Ordering::Acquire)
    }

    /// An open of a directory has a lease. To be called before its client reads the directory, while the path keeps its name.
    pub(crate) fn add(&self, open: FileId, path: &RelPath, directory: &Arc<FileState>) {
        let mut inner = self.inner();
        inner.by_path.entry(path.clone()).or_default().push((open, Arc::clone(directory)));
        inner.by_open.insert(open, path.clone());
        self.grants.fetch_add(1, Ordering::AcqRel);
        self.any.store(true, Ordering::Release);
    }

    /// An open has ended; any open of a directory.
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

    /// A directory has another name; nothing below it is open.
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

    /// The entries of a directory have changed, by an open that names `parent` as the lease of its directory.
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

    /// A backend is about to remove a name of `file`, and no request waits for it: leases on the directory that are granted before
    /// it has are broken when it has.
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
    fn tick(&self, _: Instant, clients: &dyn Clients) -> bool {
        let all = std::mem::take(&mut self.inner().leaving);
        let (there, gone): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(file, path)| file.delete_pending_at(path));
        for (_, path) in gone {
            self.changed(&path.parent(), None, clients);
        }
        let mut inner = self.inner();
        inner.leaving.extend(there);
        !inner.leaving.is_empty()
    }

    fn channel_lost(&self, _: ConnectionId, _: &dyn Clients) {}
}
