//! Directories that clients watch for changes ([MS-FSA] 2.1.1.8, 2.1.4.1, 2.1.5.11). Every change of a volume is made
//! through this server, so the operations themselves show what has changed. The same changes break leases on directories.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::engine::clients::Clients;
use crate::engine::file::leased_directories::LeasedDirectories;
use crate::engine::file::leases::LeaseKey;
use crate::engine::file::local_open::LocalOpen;
use crate::engine::mail::{ConnectionId, Mail};
use crate::fs::{RelPath, StreamName};
use crate::ids::FileId;
use crate::limits;
use crate::status::NtStatus;
use crate::sync::{Mutex, MutexGuard};
use crate::wire::change_notify::CompletionFilter;
use crate::wire::fscc::notify::{FileNotifyInformation, NotifyAction};
use crate::wire::utf16;

/// The filters of [MS-SMB2] 2.2.35. Other bits have no meaning.
const FILTERS: u32 = 0xfff;
/// Size of an entry without its name.
const ENTRY_BYTES: usize = 12;

/// Returns the filter for the name of a file or of a directory.
pub(crate) fn name_of(directory: bool) -> CompletionFilter {
    if directory { CompletionFilter::DIR_NAME } else { CompletionFilter::FILE_NAME }
}

/// The filter for changes of a file's contents.
pub(crate) const CONTENTS: CompletionFilter = CompletionFilter::SIZE.union(CompletionFilter::LAST_WRITE);

/// The filter for changes of a named stream's contents.
const STREAM_CONTENTS: CompletionFilter = CompletionFilter::STREAM_SIZE.union(CompletionFilter::STREAM_WRITE);

/// A change to a file, reported under its name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change<'a> {
    pub(crate) action: NotifyAction,
    /// The watches that it is reported to.
    pub(crate) filter: CompletionFilter,
    pub(crate) path: &'a RelPath,
    /// The named stream that has changed, if it is not the file.
    pub(crate) stream: Option<&'a StreamName>,
}

/// Parameters of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WatchRequest {
    pub(crate) filter: CompletionFilter,
    /// SMB2_WATCH_TREE.
    pub(crate) tree: bool,
    /// OutputBufferLength.
    pub(crate) room: usize,
}

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// A list that fits the request.
    Changes(Vec<FileNotifyInformation>),
    /// More has changed than fits: the client must enumerate the directory itself.
    TooMany,
    /// There is nothing to watch any more.
    Ended(NtStatus),
}

/// A waiting request.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    connection: ConnectionId,
    token: u64,
    room: usize,
}

/// The watch of one open of a directory, from its client's first request on. Changes between requests are kept.
#[derive(Debug)]
struct Watch {
    owner: FileId,
    filter: CompletionFilter,
    tree: bool,
    /// Limit for the kept changes, in bytes: the room in the first request.
    room: usize,
    kept: Vec<FileNotifyInformation>,
    kept_bytes: usize,
    too_many: bool,
    /// Oldest first.
    waiters: VecDeque<Waiter>,
}

/// The watches of a volume.
#[derive(Default)]
pub(crate) struct Watches {
    /// Union of all filters, so that a change that no client asked for costs no further lookup.
    interests: AtomicU32,
    /// Directories that clients cache instead of watching them.
    pub(crate) leased: Arc<LeasedDirectories>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    by_directory: HashMap<RelPath, Vec<Watch>>,
    /// The directory that each open watches.
    by_owner: HashMap<FileId, RelPath>,
    /// Number of watches with each filter.
    wanted: [u32; 12],
    /// Bytes kept by all watches.
    kept_bytes: usize,
    /// Results of requests that were woken, by wake token.
    outcomes: HashMap<u64, Outcome>,
}

/// Size of a change in bytes at the end of a list. If another change follows, the size is rounded up to a multiple of four.
fn size(change: &FileNotifyInformation) -> usize {
    ENTRY_BYTES + utf16::encoded_len(&change.file_name)
}

fn list_size(changes: &[FileNotifyInformation]) -> usize {
    changes.iter().fold(0, |sum: usize, change| sum.next_multiple_of(4) + size(change))
}

/// Returns the name under which a change is reported to clients that watch `directory`, which is above the path.
fn relative(directory: &RelPath, change: &Change<'_>) -> String {
    let below = change.path.as_str().strip_prefix(directory.as_str()).unwrap_or_default();
    let mut name = below.trim_start_matches('/').replace('/', "\\");
    if let Some(stream) = change.stream {
        name.push(':');
        name.push_str(stream.as_str());
        name.push_str(":$DATA");
    }
    name
}

impl Watch {
    /// Takes the kept changes for a request with room for `room` bytes, or discards them.
    fn take(&mut self, room: usize) -> Outcome {
        self.kept_bytes = 0;
        let kept = std::mem::take(&mut self.kept);
        let fits = list_size(&kept) <= room.min(self.room);
        if std::mem::take(&mut self.too_many) || !fits { Outcome::TooMany } else { Outcome::Changes(kept) }
    }

    fn has_changes(&self) -> bool {
        self.too_many || !self.kept.is_empty()
    }

    fn keep(&mut self, change: FileNotifyInformation, bytes_max: usize) {
        // A repeated change adds no information.
        if self.too_many || self.kept.last() == Some(&change) {
            return;
        }
        let bytes = self.kept_bytes.next_multiple_of(4) + size(&change);
        if bytes > self.room.min(limits::NOTIFY_BUFFER_BYTES_MAX) || bytes > bytes_max {
            return self.give_up();
        }
        self.kept_bytes = bytes;
        self.kept.push(change);
    }

    fn give_up(&mut self) {
        self.too_many = true;
        self.kept = Vec::new();
        self.kept_bytes = 0;
    }
}

impl Inner {
    /// Passes changes that are visible from one directory to the watches of that directory.
    fn keep_for(&mut self, at: &RelPath, is_parent: bool, changes: &[Change<'_>], clients: &dyn Clients) {
        let Some(watches) = self.by_directory.get_mut(at) else { return };
        for watch in watches.iter_mut().filter(|w| is_parent || w.tree) {
            let before = watch.kept_bytes;
            let filter = watch.filter;
            for change in changes.iter().filter(|c| filter.intersects(c.filter)) {
                let file_name = relative(at, change);
                let left = limits::NOTIFY_VOLUME_BYTES_MAX.saturating_sub(self.kept_bytes - before);
                watch.keep(FileNotifyInformation { action: change.action, file_name }, left);
            }
            if watch.has_changes()
                && let Some(waiter) = watch.waiters.pop_front()
            {
                let outcome = watch.take(waiter.room);
                self.outcomes.insert(waiter.token, outcome);
                clients.post(waiter.connection, Mail::Wake(waiter.token));
            }
            self.kept_bytes = self.kept_bytes - before + watch.kept_bytes;
        }
    }

    fn watch(&mut self, owner: FileId) -> Option<&mut Watch> {
        let directory = self.by_owner.get(&owner)?;
        self.by_directory.get_mut(directory)?.iter_mut().find(|w| w.owner == owner)
    }

    fn add(&mut self, open: &dyn LocalOpen, asked: WatchRequest) -> Result<(), NtStatus> {
        if self.by_owner.contains_key(&open.id()) {
            return Ok(());
        }
        if self.by_owner.len() >= limits::WATCHES_PER_VOLUME_MAX {
            return Err(NtStatus::INSUFFICIENT_RESOURCES);
        }
        let directory = open.path();
        // The parameters that are set now apply until the handle is closed.
        let watch = Watch {
            owner: open.id(),
            filter: CompletionFilter(asked.filter.0 & FILTERS),
            tree: asked.tree,
            room: asked.room,
            kept: Vec::new(),
            kept_bytes: 0,
            too_many: false,
            waiters: VecDeque::new(),
        };
        self.count(watch.filter, 1);
        self.by_owner.insert(open.id(), directory.clone());
        self.by_directory.entry(directory).or_default().push(watch);
        Ok(())
    }

    fn count(&mut self, filter: CompletionFilter, by: i32) {
        for (bit, wanted) in self.wanted.iter_mut().enumerate() {
            if filter.0 & 1 << bit != 0 {
                *wanted = wanted.saturating_add_signed(by);
            }
        }
    }

    fn interests(&self) -> u32 {
        self.wanted.iter().enumerate().filter(|(_, wanted)| **wanted > 0).map(|(bit, _)| 1 << bit).sum()
    }

    fn remove(&mut self, owner: FileId) -> Option<Watch> {
        let directory = self.by_owner.remove(&owner)?;
        let watches = self.by_directory.get_mut(&directory)?;
        let at = watches.iter().position(|w| w.owner == owner)?;
        let watch = watches.swap_remove(at);
        if watches.is_empty() {
            self.by_directory.remove(&directory);
        }
        self.count(watch.filter, -1);
        self.kept_bytes -= watch.kept_bytes;
        Some(watch)
    }

    /// Removes a watch and completes all requests that wait for it.
    fn end(&mut self, owner: FileId, status: NtStatus, clients: &dyn Clients) {
        let Some(watch) = self.remove(owner) else { return };
        for waiter in watch.waiters {
            self.outcomes.insert(waiter.token, Outcome::Ended(status));
            clients.post(waiter.connection, Mail::Wake(waiter.token));
        }
    }
}

impl Watches {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// Reports changes that happened together, by an open that names `parent` as its client's lease on the directory. Two
    /// loads if no client watches or caches.
    pub(crate) fn report(&self, changes: &[Change<'_>], parent: Option<LeaseKey>, clients: &dyn Clients) {
        if self.leased.any() {
            for change in changes {
                self.leased.changed(&change.path.parent(), parent, clients);
            }
        }
        self.notify(changes, clients);
    }

    /// Like [`Self::report`], but only to clients that watch.
    pub(crate) fn notify(&self, changes: &[Change<'_>], clients: &dyn Clients) {
        let interests = CompletionFilter(self.interests.load(Ordering::Relaxed));
        if !changes.iter().any(|change| interests.intersects(change.filter)) {
            return;
        }
        let mut inner = self.inner();
        // Report the changes of one directory together: the two names of a rename belong together.
        let mut rest = changes;
        while let Some(first) = rest.first() {
            let parent = first.path.parent();
            let (here, others) =
                rest.split_at(rest.iter().take_while(|c| c.path.parent() == parent).count().max(1));
            rest = others;
            if first.path.is_root() {
                continue;
            }
            let mut at = parent;
            let mut is_parent = true;
            loop {
                inner.keep_for(&at, is_parent, here, clients);
                if at.is_root() {
                    break;
                }
                at = at.parent();
                is_parent = false;
            }
        }
    }

    /// Like [`Self::report`], for a change that an open made to its file.
    pub(crate) fn changed(
        &self,
        action: NotifyAction,
        filter: CompletionFilter,
        open: &dyn LocalOpen,
        clients: &dyn Clients,
    ) {
        self.changed_by(open.parent_lease_key(), action, filter, open, clients);
    }

    /// Like [`Self::changed`], with another lease on the directory than the one that the open names.
    pub(crate) fn changed_by(
        &self,
        parent: Option<LeaseKey>,
        action: NotifyAction,
        filter: CompletionFilter,
        open: &dyn LocalOpen,
        clients: &dyn Clients,
    ) {
        if self.interests.load(Ordering::Relaxed) & filter.0 == 0 && !self.leased.any() {
            return;
        }
        let path = open.path();
        self.report(&[Change { action, filter, path: &path, stream: None }], parent, clients);
    }

    /// Like [`Self::modified`], but only to clients that watch.
    pub(crate) fn notify_modified(
        &self,
        filter: CompletionFilter,
        open: &dyn LocalOpen,
        clients: &dyn Clients,
    ) {
        let interests = CompletionFilter(self.interests.load(Ordering::Relaxed));
        if !interests.intersects(filter | STREAM_CONTENTS) {
            return;
        }
        let (path, stream) = (open.path(), open.stream());
        let (action, filter) = match stream {
            Some(_) if filter == CONTENTS => (NotifyAction::MODIFIED_STREAM, STREAM_CONTENTS),
            _ => (NotifyAction::MODIFIED, filter),
        };
        let stream = stream.as_ref().filter(|_| action == NotifyAction::MODIFIED_STREAM);
        self.notify(&[Change { action, filter, path: &path, stream }], clients);
    }

    /// Reports that an open of a named stream created or removed the stream.
    pub(crate) fn stream_changed(&self, action: NotifyAction, open: &dyn LocalOpen, clients: &dyn Clients) {
        let filter = CompletionFilter::STREAM_NAME;
        if self.interests.load(Ordering::Relaxed) & filter.0 == 0 {
            return;
        }
        let (path, stream) = (open.path(), open.stream());
        self.notify(&[Change { action, filter, path: &path, stream: stream.as_ref() }], clients);
    }

    /// Like [`Self::changed`], for the modification of a file that stays.
    pub(crate) fn modified(&self, filter: CompletionFilter, open: &dyn LocalOpen, clients: &dyn Clients) {
        if filter == CONTENTS && open.stream().is_some() {
            return self.notify_modified(filter, open, clients);
        }
        self.changed(NotifyAction::MODIFIED, filter, open, clients);
    }

    /// [MS-FSA] 2.1.5.11: returns what has changed since the last request of this open. If nothing has, returns `None`: the
    /// request is woken later with `token`, and [`Self::outcome`] then returns its result.
    ///
    /// # Errors
    /// `STATUS_INSUFFICIENT_RESOURCES` beyond the limit; `STATUS_FILE_CLOSED`.
    pub(crate) fn ask(
        &self,
        open: &dyn LocalOpen,
        asked: WatchRequest,
        connection: ConnectionId,
        token: u64,
    ) -> Result<Option<Outcome>, NtStatus> {
        let mut guard = self.inner();
        let inner = &mut *guard;
        inner.add(open, asked)?;
        self.interests.store(inner.interests(), Ordering::Relaxed);
        // A thread that closes the open first marks it and then removes the watch.
        if open.is_closing() {
            inner.remove(open.id());
            self.interests.store(inner.interests(), Ordering::Relaxed);
            return Err(NtStatus::FILE_CLOSED);
        }
        let watch = inner.watch(open.id()).ok_or(NtStatus::FILE_CLOSED)?;
        if watch.has_changes() && watch.waiters.is_empty() {
            let kept = watch.kept_bytes;
            let outcome = watch.take(asked.room);
            inner.kept_bytes -= kept;
            return Ok(Some(outcome));
        }
        watch.waiters.push_back(Waiter { connection, token, room: asked.room });
        Ok(None)
    }

    /// Takes the result of a woken request, which no longer waits.
    pub(crate) fn outcome(&self, token: u64) -> Option<Outcome> {
        self.inner().outcomes.remove(&token)
    }

    /// Removes a request that no longer waits. Returns its result if there already is one.
    pub(crate) fn stop_waiting(&self, owner: FileId, token: u64) -> Option<Outcome> {
        let mut inner = self.inner();
        if let Some(watch) = inner.watch(owner) {
            watch.waiters.retain(|w| w.token != token);
        }
        inner.outcomes.remove(&token)
    }

    /// Handles a response that was lost with its connection: the client, which may have others, must enumerate the
    /// directory itself.
    pub(crate) fn lost(&self, owner: FileId, clients: &dyn Clients) {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let Some(watch) = inner.watch(owner) else { return };
        let kept = watch.kept_bytes;
        watch.give_up();
        let waiter = watch.waiters.pop_front();
        if waiter.is_some() {
            watch.too_many = false;
        }
        inner.kept_bytes -= kept;
        if let Some(waiter) = waiter {
            inner.outcomes.insert(waiter.token, Outcome::TooMany);
            clients.post(waiter.connection, Mail::Wake(waiter.token));
        }
    }

    /// Removes the watch of an open that has ended ([MS-FSA] 2.1.5.5).
    pub(crate) fn closed(&self, owner: FileId, clients: &dyn Clients) {
        self.leased.remove(owner);
        let mut inner = self.inner();
        inner.end(owner, NtStatus::NOTIFY_CLEANUP, clients);
        self.interests.store(inner.interests(), Ordering::Relaxed);
    }

    /// Ends the watches of a directory that is about to be removed ([MS-FSA] 2.1.5.15.3).
    pub(crate) fn deleted(&self, directory: &RelPath, clients: &dyn Clients) {
        let mut inner = self.inner();
        let watches = inner.by_directory.get(directory);
        let owners: Vec<FileId> = watches.into_iter().flatten().map(|w| w.owner).collect();
        for owner in owners {
            inner.end(owner, NtStatus::DELETE_PENDING, clients);
        }
        self.interests.store(inner.interests(), Ordering::Relaxed);
    }

    /// Renames a directory that clients watch. Nothing below it is open.
    pub(crate) fn moved(&self, from: &RelPath, to: &RelPath) {
        self.leased.moved(from, to);
        let mut inner = self.inner();
        let Some(watches) = inner.by_directory.remove(from) else { return };
        for watch in &watches {
            inner.by_owner.insert(watch.owner, to.clone());
        }
        inner.by_directory.entry(to.clone()).or_default().extend(watches);
    }
}
