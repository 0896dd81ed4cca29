//! The files of a volume that are open, and the only ways in and out.
//!
//! A [`FileState`] is in the table exactly as long as it has an open or a name that is being removed. It is looked up and
//! entered under one lock ([`FileTable::enter`]), and only there can an open get hold of it: two opens of one file have
//! the same state, always. An open leaves by [`FileTable::leave`]; where a name goes with it, that hands out an [`Unlink`],
//! and until that is dropped no CREATE opens the name.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::engine::clients::Clients;
use crate::engine::file::leases::LeaseKey;
use crate::engine::file::links::LinkId;
use crate::engine::file::local_open::LocalOpen;
use crate::engine::file::paths::PathsInUse;
use crate::engine::file::state::{Entrant, Entry, FileState, Leaver, LeavingOutcome};
use crate::engine::mail::{Mail, Waiter};
use crate::engine::mailbox::Mailbox;
use crate::fs::{FileKey, FsHandle, RelPath, Unlink};
use crate::ids::FileId;
use crate::status::NtStatus;
use crate::sync::{Mutex, MutexGuard};

/// The files of a volume that are open.
#[derive(Default)]
pub(crate) struct FileTable {
    /// In the same order whenever they are gone through: without that no model could repeat a run.
    files: BTreeMap<FileKey, Arc<FileState>>,
    paths: PathsInUse,
    /// Its volume is being removed.
    closed: bool,
}

/// The state of a file, as its table hands it out to an open that is registered in the same step.
pub(crate) struct Entered(Arc<FileState>);

impl Entered {
    pub(in crate::engine) fn into_file(self) -> Arc<FileState> {
        self.0
    }
}

/// What the end of an open means for the name that it was opened by.
#[must_use]
pub(crate) enum LinkFate {
    /// It stays.
    Stays,
    /// It goes when others have closed it, too.
    DeletePending,
    /// It goes now.
    Unlinked {
        /// To remove it by.
        handle: FsHandle,
        unlink: Unlink,
        /// The lease on the directory that is not to be broken by that.
        parent: Option<LeaseKey>,
        /// It is a named stream, and its file stays.
        stream: bool,
    },
}

/// A name that a backend removes.
struct Removal {
    files: Arc<Files>,
    file: Arc<FileState>,
    link: LinkId,
}

impl Drop for Removal {
    fn drop(&mut self) {
        let waiters = self.files.lock().unlinked(&self.file, self.link);
        self.files.wake(waiters);
    }
}

/// The files of a volume that are open, shared by all that hold something of them.
pub(crate) struct Files {
    table: Mutex<FileTable>,
    /// The server's.
    mailbox: Arc<Mailbox>,
}

impl Files {
    pub(in crate::engine) fn new(mailbox: Arc<Mailbox>) -> Self {
        Self { table: Mutex::default(), mailbox }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, FileTable> {
        self.table.lock().expect("no panic under this lock")
    }

    /// Has requests look again at what they wait for.
    pub(in crate::engine) fn wake(&self, waiters: Vec<Waiter>) {
        for waiter in waiters {
            self.mailbox.post(waiter.connection, Mail::Wake(waiter.token));
        }
    }

    fn unlink(self: &Arc<Self>, file: &Arc<FileState>, link: LinkId) -> Unlink {
        Unlink::new(Removal { files: Arc::clone(self), file: Arc::clone(file), link })
    }
}

impl FileTable {
    /// Nothing is opened any more. With opens, those of clients that are away included, only if forced; else how many there are,
    /// and nothing has changed.
    pub(in crate::engine) fn close(&mut self, force: bool) -> Result<(), usize> {
        let open = self.files.values().map(|file| file.open_count()).sum();
        if open > 0 && !force {
            return Err(open);
        }
        self.closed = true;
        Ok(())
    }

    /// The state of a file that is open.
    pub(crate) fn find(&self, key: FileKey) -> Option<Arc<FileState>> {
        self.files.get(&key).cloned()
    }

    /// Opens a file if its other opens tolerate that ([MS-FSA] 2.1.5.1.2), and grants what may be cached. `make` makes the open
    /// where they do.
    ///
    /// # Errors
    /// `STATUS_DELETE_PENDING`, `STATUS_SHARING_VIOLATION`; `STATUS_INVALID_PARAMETER` for a lease key of another file;
    /// `STATUS_NETWORK_NAME_DELETED` once the table is closed.
    pub(crate) fn enter<T: LocalOpen + 'static>(
        &mut self,
        entrant: &Entrant<'_>,
        clients: &dyn Clients,
        make: impl FnOnce(Entered) -> T,
    ) -> Result<Entry<T>, NtStatus> {
        if self.closed {
            return Err(NtStatus::NETWORK_NAME_DELETED);
        }
        // Found before its name was removed.
        let lost = |key| self.paths.has_lost(entrant.pin, key);
        if entrant.opener.existed && lost(entrant.key) || !entrant.made_file && lost(entrant.key.file()) {
            return Err(NtStatus::DELETE_PENDING);
        }
        let of_stream = entrant.key.is_stream().then(|| self.state(entrant.key.file()));
        if let Some(file) = &of_stream {
            file.admits_stream(entrant.pin.path())?;
        }
        let file = self.state(entrant.key);
        let entry = file.admit(entrant, clients, || make(Entered(Arc::clone(&file))))?;
        if let Entry::Open(open) = &entry {
            self.files.entry(entrant.key).or_insert(file);
            if let Some(file) = of_stream {
                file.enter_stream(open, entrant);
                self.files.entry(entrant.key.file()).or_insert(file);
            }
        }
        Ok(entry)
    }

    /// The state of a file, or one that is not in the table yet.
    fn state(&self, key: FileKey) -> Arc<FileState> {
        self.find(key).unwrap_or_else(|| Arc::new(FileState::new(key)))
    }

    /// Ends an open of a file of this table, `files`: its locks, its waiting requests and what it may cache; wakes those that
    /// waited for them.
    pub(crate) fn leave(
        &mut self,
        files: &Arc<Files>,
        file: &Arc<FileState>,
        leaver: &Leaver<'_>,
        clients: &dyn Clients,
    ) -> LinkFate {
        let outcome = file.leave(leaver, clients);
        let ended = self.fate(files, file, outcome, leaver.handle);
        self.forget_if_idle(file);
        let of_stream = leaver.file_handle.zip(self.find(file.key().file()));
        let Some((handle, file)) = of_stream else { return ended };
        let outcome = file.leave_stream(leaver);
        let with_file = self.fate(files, &file, outcome, handle);
        self.forget_if_idle(&file);
        match (ended, with_file) {
            // The file takes the stream with it.
            (
                LinkFate::Unlinked { unlink: stream, .. },
                LinkFate::Unlinked { handle, unlink, parent, .. },
            ) => LinkFate::Unlinked { handle, unlink: unlink.and(stream), parent, stream: false },
            (_, with_file @ LinkFate::Unlinked { .. }) => with_file,
            (ended, _) => ended,
        }
    }

    fn fate(
        &mut self,
        files: &Arc<Files>,
        file: &Arc<FileState>,
        outcome: LeavingOutcome,
        handle: &FsHandle,
    ) -> LinkFate {
        match outcome {
            LeavingOutcome::Stays => LinkFate::Stays,
            LeavingOutcome::DeletePending => LinkFate::DeletePending,
            LeavingOutcome::Unlinked { link, path, named_by, parent } => {
                self.paths.begin_unlink(file.key(), link, path);
                let handle = named_by.unwrap_or_else(|| handle.clone());
                let stream = file.key().is_stream();
                LinkFate::Unlinked { handle, unlink: files.unlink(file, link), parent, stream }
            }
        }
    }

    /// A named stream that is open has another name.
    pub(crate) fn stream_renamed(&mut self, file: &Arc<FileState>, number: u64) {
        let before = file.key();
        if let Some(state) = self.files.remove(&before) {
            state.set_stream(number);
            self.files.insert(state.key(), state);
        }
    }

    /// A file that was made for an open that comes to nothing goes with it, unless another client has it open meanwhile.
    pub(crate) fn discard(&mut self, file: &FileState, open: FileId) {
        file.discard(open);
    }

    /// As [`Self::discard`], of a file at `path` that no open has entered.
    pub(crate) fn undo(&mut self, files: &Arc<Files>, key: FileKey, path: &RelPath) -> Option<Unlink> {
        if self.files.contains_key(&key) {
            return None;
        }
        let file = Arc::new(FileState::new(key));
        let link = file.undo(path);
        self.paths.begin_unlink(key, link, path.clone());
        self.files.insert(key, Arc::clone(&file));
        Some(files.unlink(&file, link))
    }

    /// The requests that may go on now.
    fn unlinked(&mut self, file: &Arc<FileState>, link: LinkId) -> Vec<Waiter> {
        self.paths.end_unlink(file.key(), link);
        if let Some(path) = file.unlinked(link) {
            self.paths.removed(&path, file.key());
        }
        self.forget_if_idle(file);
        self.paths.take_waiters()
    }

    pub(in crate::engine) fn paths(&mut self) -> &mut PathsInUse {
        &mut self.paths
    }

    /// A request does not wait any more until a rename or what is in its way has ended.
    pub(crate) fn stop_waiting_for_paths(&mut self, token: u64) {
        self.paths.stop_waiting(token);
    }

    fn forget_if_idle(&mut self, file: &Arc<FileState>) {
        if file.is_idle() && self.files.get(&file.key()).is_some_and(|known| Arc::ptr_eq(known, file)) {
            self.files.remove(&file.key());
        }
    }

    /// Whether anything below a directory is open.
    pub(crate) fn any_open_below(&self, directory: &RelPath) -> bool {
        self.files.values().any(|file| file.is_open_below(directory))
    }

    /// Has handles below a directory closed that are kept for the cache alone, where there are no others; once, so that a client
    /// that opens again and again does not keep it for ever. True where a client has to; `waiter` is woken when one of them has.
    pub(crate) fn break_handles_below(
        &self,
        directory: &RelPath,
        first: bool,
        waiter: Waiter,
        clients: &dyn Clients,
    ) -> bool {
        let below: Vec<&Arc<FileState>> =
            self.files.values().filter(|file| file.is_open_below(directory)).collect();
        if below.iter().any(|file| file.has_other_handles()) {
            return false;
        }
        below.into_iter().fold(false, |waits, file| {
            let asked = if first {
                file.break_handles(None, waiter, clients)
            } else {
                file.wait_while_breaking(waiter)
            };
            asked || waits
        })
    }

    /// A request does not wait any more until a client closes a handle.
    pub(crate) fn stop_waiting_for_breaks(&self, token: u64) {
        for file in self.files.values() {
            file.stop_waiting_for_break(token);
        }
    }
}

#[cfg(test)]
pub(in crate::engine) mod models;
