//! The files of a volume that are open, and the only ways in and out.
//!
//! A [`FileState`] is in the table exactly as long as it has an open or a name that is being removed. It is looked up and
//! entered under one lock ([`FileTable::enter`]), and only there can an [`Open`] get hold of it: two opens of one file have
//! the same state, always. An open leaves by [`FileTable::leave`]; where a name goes with it, that hands out an [`Unlink`],
//! and until that is dropped nobody opens the name.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::files::{FileState, Left};
use super::leases::LeaseTable;
use super::links::LinkId;
use super::open::Open;
use super::oplocks::{Opener, Waiter};
use super::paths::{PathPin, PathsInUse};
use super::server::Server;
use super::volume::Volume;
use crate::fs::{FileKey, FsHandle, RelPath};
use crate::status::NtStatus;
use crate::wire::{AccessMask, ShareAccess};

/// The files of a volume that are open.
#[derive(Default)]
pub(crate) struct FileTable {
    /// In the same order whenever they are gone through: without that no model could repeat a run.
    files: BTreeMap<FileKey, Arc<FileState>>,
    paths: PathsInUse,
    /// Its volume is being removed.
    closed: bool,
}

/// An open that asks to be let in.
pub(crate) struct Entrant<'a> {
    pub(crate) key: FileKey,
    /// The name that it was opened by: no rename has changed it since a backend has found the file.
    pub(crate) pin: &'a PathPin,
    pub(crate) directory: bool,
    pub(crate) access: AccessMask,
    pub(crate) share: ShareAccess,
    pub(crate) opener: Opener,
    /// Woken where it has to wait.
    pub(crate) waiter: Waiter,
    pub(crate) leases: &'a LeaseTable,
}

/// The state of a file, as its table hands it out to an open that is registered in the same step.
pub(crate) struct Entered(Arc<FileState>);

impl Entered {
    pub(super) fn into_file(self) -> Arc<FileState> {
        self.0
    }
}

/// What became of an attempt to open a file.
pub(crate) enum Entry {
    /// It is open.
    Open(Arc<Open>),
    /// A client has to give up first what it may cache of this file; the waiter is woken then.
    Wait(Arc<FileState>),
    /// These opens without a connection are in the way: they are to be closed.
    Displaces(Vec<Arc<Open>>),
}

/// What the end of an open means for the name that it was opened by.
#[must_use]
pub(crate) enum Ended {
    /// It stays.
    Stays,
    /// It goes when others have closed it, too.
    Doomed,
    /// It goes now: the handle to remove it by.
    Goes(FsHandle, Unlink),
}

/// A name that is being removed: whoever carries [`crate::fs::FsOpKind::Close`] out drops this when the name is gone, or could
/// not be removed. Until then CREATE answers STATUS_DELETE_PENDING for it, and so does a CREATE that was under way by then; other
/// names of the file stay in use.
#[must_use]
pub struct Unlink(Option<Removal>);

struct Removal {
    volume: Arc<Volume>,
    file: Arc<FileState>,
    link: LinkId,
}

impl Unlink {
    /// For a backend's own use: nobody waits for the name.
    pub fn unregistered() -> Self {
        Self(None)
    }

    fn new(volume: &Arc<Volume>, file: &Arc<FileState>, link: LinkId) -> Self {
        Self(Some(Removal { volume: Arc::clone(volume), file: Arc::clone(file), link }))
    }
}

impl Drop for Unlink {
    fn drop(&mut self) {
        if let Some(Removal { volume, file, link }) = self.0.take() {
            let waiters = volume.files().unlinked(&file, link);
            volume.wake(waiters);
        }
    }
}

impl FileTable {
    /// Nothing is opened any more. With opens, those of clients that are away included, only if forced; else how many there are,
    /// and nothing has changed.
    pub(super) fn close(&mut self, force: bool) -> Result<(), usize> {
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
    pub(crate) fn enter(
        &mut self,
        entrant: &Entrant<'_>,
        server: &Server,
        make: impl FnOnce(Entered) -> Open,
    ) -> Result<Entry, NtStatus> {
        if self.closed {
            return Err(NtStatus::NETWORK_NAME_DELETED);
        }
        // Found before its name was removed.
        if entrant.opener.existed && entrant.pin.has_lost(entrant.key, &self.paths) {
            return Err(NtStatus::DELETE_PENDING);
        }
        let known = self.files.get(&entrant.key).cloned();
        let file = known.unwrap_or_else(|| Arc::new(FileState::new(entrant.key)));
        let entry = file.admit(entrant, server, || make(Entered(Arc::clone(&file))))?;
        if matches!(entry, Entry::Open(_)) {
            self.files.entry(entrant.key).or_insert(file);
        }
        Ok(entry)
    }

    /// Ends an open: its locks, its waiting requests and what it may cache; wakes those that waited for them.
    pub(crate) fn leave(&mut self, open: &Open, server: &Server) -> Ended {
        open.used(server);
        let file = &open.file;
        let ended = match file.leave(open, server) {
            Left::Stays => Ended::Stays,
            Left::Doomed => Ended::Doomed,
            Left::Goes { link, path, named_by } => {
                self.paths.begin_unlink(file.key(), link, path);
                let by = named_by.unwrap_or_else(|| open.handle.clone());
                Ended::Goes(by, Unlink::new(&open.volume, file, link))
            }
        };
        self.forget_if_idle(file);
        ended
    }

    /// A file that was made for an open that comes to nothing goes with it, unless somebody else has it open meanwhile.
    pub(crate) fn discard(&mut self, open: &Open) {
        open.file.discard(open);
    }

    /// As [`Self::discard`], of a file at `path` that no open has entered.
    pub(crate) fn undo(&mut self, volume: &Arc<Volume>, key: FileKey, path: &RelPath) -> Option<Unlink> {
        if self.files.contains_key(&key) {
            return None;
        }
        let file = Arc::new(FileState::new(key));
        let link = file.undo(path);
        self.paths.begin_unlink(key, link, path.clone());
        self.files.insert(key, Arc::clone(&file));
        Some(Unlink::new(volume, &file, link))
    }

    /// Who may go on now.
    fn unlinked(&mut self, file: &Arc<FileState>, link: LinkId) -> Vec<Waiter> {
        self.paths.end_unlink(file.key(), link);
        if let Some(path) = file.unlinked(link) {
            self.paths.removed(&path, file.key());
        }
        self.forget_if_idle(file);
        self.paths.take_waiters()
    }

    pub(super) fn paths(&mut self) -> &mut PathsInUse {
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
        server: &Server,
    ) -> bool {
        let below: Vec<&Arc<FileState>> =
            self.files.values().filter(|file| file.is_open_below(directory)).collect();
        if below.iter().any(|file| file.has_other_handles()) {
            return false;
        }
        below.into_iter().fold(false, |waits, file| {
            let asked = if first {
                file.break_handles(None, waiter, server)
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
pub(super) mod models;
