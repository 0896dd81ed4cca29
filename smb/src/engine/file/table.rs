//! The open files of a volume, and the only ways to enter and leave them.
//!
//! A [`FileState`] is in the table exactly as long as it has an open or a name that is being removed. It is looked up and
//! entered under one lock ([`FileTable::enter`]), and only there does an open get a reference to it. Therefore two opens of
//! one file always have the same state. An open leaves by [`FileTable::leave`]. If a name is removed with it, this returns
//! an [`Unlink`], and no CREATE opens the name until that is dropped.

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

/// The open files of a volume.
#[derive(Default)]
pub(crate) struct FileTable {
    /// Ordered, so that every iteration has the same order: otherwise a model could not repeat a run.
    files: BTreeMap<FileKey, Arc<FileState>>,
    paths: PathsInUse,
    /// Its volume is being removed.
    closed: bool,
}

/// The state of a file, as its table passes it to an open that is registered in the same step.
pub(crate) struct Entered(Arc<FileState>);

impl Entered {
    pub(in crate::engine) fn into_file(self) -> Arc<FileState> {
        self.0
    }
}

/// The effect of the end of an open on the name that it was opened by.
#[must_use]
pub(crate) enum LinkFate {
    /// It stays.
    Stays,
    /// It is removed when the other opens have ended, too.
    DeletePending,
    /// It is removed now.
    Unlinked {
        /// The handle to remove it by.
        handle: FsHandle,
        unlink: Unlink,
        /// The lease on the directory that the removal does not break.
        parent: Option<LeaseKey>,
        /// Only a named stream is removed; its file stays.
        stream: bool,
    },
}

/// A name that a backend is removing.
struct Removal {
    files: Arc<Files>,
    file: Arc<FileState>,
    /// Its key when the removal began. A rename in progress can change that of a stream.
    key: FileKey,
    link: LinkId,
}

impl Drop for Removal {
    fn drop(&mut self) {
        let waiters = self.files.lock().unlinked(&self.file, self.key, self.link);
        self.files.wake(waiters);
    }
}

/// The open files of a volume, shared by everything that refers to them.
pub(crate) struct Files {
    table: Mutex<FileTable>,
    /// The mailbox of the server.
    mailbox: Arc<Mailbox>,
}

impl Files {
    pub(in crate::engine) fn new(mailbox: Arc<Mailbox>) -> Self {
        Self { table: Mutex::default(), mailbox }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, FileTable> {
        self.table.lock().expect("no panic under this lock")
    }

    /// Wakes requests, so that they check again what they wait for.
    pub(in crate::engine) fn wake(&self, waiters: Vec<Waiter>) {
        for waiter in waiters {
            self.mailbox.post(waiter.connection, Mail::Wake(waiter.token));
        }
    }

    /// `key`: as for [`PathsInUse::begin_unlink`].
    fn unlink(self: &Arc<Self>, file: &Arc<FileState>, key: FileKey, link: LinkId) -> Unlink {
        Unlink::new(Removal { files: Arc::clone(self), file: Arc::clone(file), key, link })
    }
}

impl FileTable {
    /// Closes the table: nothing can be opened any more. If there are opens, including those of disconnected clients, this
    /// requires `force`; otherwise it returns their number and changes nothing.
    pub(in crate::engine) fn close(&mut self, force: bool) -> Result<(), usize> {
        let open = self.files.values().map(|file| file.open_count()).sum();
        if open > 0 && !force {
            return Err(open);
        }
        self.closed = true;
        Ok(())
    }

    /// Returns the state of an open file.
    pub(crate) fn find(&self, key: FileKey) -> Option<Arc<FileState>> {
        self.files.get(&key).cloned()
    }

    /// Opens a file if its other opens tolerate that ([MS-FSA] 2.1.5.1.2), and grants what may be cached. If they do,
    /// `make` creates the open.
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
        // The file was found before its name was removed.
        let lost = |key| self.paths.has_lost(entrant.pin, key);
        if entrant.opener.existed && lost(entrant.key) || !entrant.made_file && lost(entrant.key.file()) {
            return Ok(Entry::NameGone);
        }
        let of_stream = entrant.key.is_stream().then(|| self.state(entrant.key.file()));
        if let Some(file) = &of_stream
            && !file.admits_stream(entrant.pin.path(), entrant.made_file)?
        {
            return Ok(Entry::NameGone);
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

    /// Returns the state of a file, or a new state that is not in the table yet.
    fn state(&self, key: FileKey) -> Arc<FileState> {
        self.find(key).unwrap_or_else(|| Arc::new(FileState::new(key)))
    }

    /// Ends an open of a file of this table, `files`: its locks, its waiting requests and what it may cache. Wakes requests
    /// that waited for them.
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
            // The stream is removed with the file.
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
                let key = file.key();
                self.paths.begin_unlink(key, link, path);
                let handle = named_by.unwrap_or_else(|| handle.clone());
                let unlink = files.unlink(file, key, link);
                LinkFate::Unlinked { handle, unlink, parent, stream: key.is_stream() }
            }
        }
    }

    /// Updates the table after a rename of an open named stream.
    pub(crate) fn stream_renamed(&mut self, file: &Arc<FileState>, number: u64) {
        let before = file.key();
        if let Some(state) = self.files.remove(&before) {
            state.set_stream(number);
            self.files.insert(state.key(), state);
        }
    }

    /// Discards a file that was created for an open that failed, unless another client has it open by now.
    pub(crate) fn discard(&mut self, file: &FileState, open: FileId) {
        file.discard(open);
    }

    /// Like [`Self::discard`], for a file at `path` that no open has entered.
    pub(crate) fn undo(&mut self, files: &Arc<Files>, key: FileKey, path: &RelPath) -> Option<Unlink> {
        if self.files.contains_key(&key) {
            return None;
        }
        let file = Arc::new(FileState::new(key));
        let link = file.undo(path);
        self.paths.begin_unlink(key, link, path.clone());
        self.files.insert(key, Arc::clone(&file));
        Some(files.unlink(&file, key, link))
    }

    /// Ends the removal of a name. Returns the requests that can continue.
    fn unlinked(&mut self, file: &Arc<FileState>, key: FileKey, link: LinkId) -> Vec<Waiter> {
        self.paths.end_unlink(key, link);
        if let Some(path) = file.unlinked(link) {
            self.paths.removed(&path, key);
        }
        self.forget_if_idle(file);
        self.paths.take_waiters()
    }

    pub(in crate::engine) fn paths(&mut self) -> &mut PathsInUse {
        &mut self.paths
    }

    /// Removes a request that no longer waits for a rename, or for what is in its way, to end.
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

    /// Makes clients close handles below a directory that they keep only for the cache, if there are no other handles. Does
    /// so only the `first` time, so that a client that opens again and again cannot block the request forever. True if a
    /// client has to close a handle; `waiter` is woken when one of them has.
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

    /// Removes a request that no longer waits for a client to close a handle.
    pub(crate) fn stop_waiting_for_breaks(&self, token: u64) {
        for file in self.files.values() {
            file.stop_waiting_for_break(token);
        }
    }
}

#[cfg(test)]
pub(in crate::engine) mod models;
