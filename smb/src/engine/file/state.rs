//! One open file: share modes, names, pending deletion and byte-range locks, across all sessions ([MS-FSA] 2.1.1.5,
//! 2.1.1.10). Opens enter and leave through [`crate::engine::file::table`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::engine::clients::{Breakable, Clients};
use crate::engine::file::leases::{LeaseId, LeaseKey, LeaseTable};
use crate::engine::file::links::{Closed, Disposition, LinkId, Links};
use crate::engine::file::local_open::{LocalOpen, Registered};
use crate::engine::file::locks::{LockList, LockRange};
use crate::engine::file::opener::{Cached, Opener};
use crate::engine::file::oplocks::Caching;
use crate::engine::file::paths::PinnedPath;
use crate::engine::file::share::{compatible, forbids_delete};
use crate::engine::mail::{ConnectionId, Mail, Waiter as BreakWaiter};
use crate::engine::tally::Tally;
use crate::fs::{FileKey, FsHandle, RelPath};
use crate::ids::FileId;
use crate::limits::LOCK_WAITERS_PER_FILE_MAX;
use crate::status::NtStatus;
use crate::sync::{AtomicBool, Mutex, MutexGuard};
use crate::wire::create::OplockLevel;
use crate::wire::create_context::LeaseState;
use crate::wire::{AccessMask, ShareAccess};

const LOCK: &str = "no panic under this lock";

/// The state of one open file, shared by all its opens.
pub(crate) struct FileState {
    file: FileKey,
    /// [`FileKey::stream`]; a rename of the stream changes it.
    stream: AtomicU64,
    /// Whether `inner.locks` has any, so that READ and WRITE can skip the check.
    locks_present: AtomicBool,
    /// Whether a client in `inner.caching` may keep what it has read while another client writes, so that WRITE can skip
    /// the check.
    breakable: AtomicBool,
    /// Whether a client in `inner.caching` may write later.
    write_cached: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    opens: Vec<Registered>,
    /// Opens of its named streams. Each stream has a separate [`FileState`]; these entries keep the names of the file.
    streams: Vec<Registered>,
    links: Links,
    locks: LockList,
    waiters: Vec<Waiter>,
    caching: Caching,
}

/// An open that requests access.
pub(crate) struct Entrant<'a> {
    pub(crate) key: FileKey,
    /// The name that it is opened by. No rename has changed the name since a backend found the file.
    pub(crate) pin: &'a PinnedPath,
    pub(crate) directory: bool,
    pub(crate) end_of_file: u64,
    /// This open created the file, for itself or for the stream.
    pub(crate) made_file: bool,
    /// It can be granted what it requests. Directories are granted only leases of version 2, for clients that support them.
    pub(crate) caches: bool,
    pub(crate) access: AccessMask,
    pub(crate) share: ShareAccess,
    pub(crate) opener: Opener,
    /// Woken if the open has to wait.
    pub(crate) waiter: BreakWaiter,
    pub(crate) leases: &'a LeaseTable,
}

/// Result of an attempt to open a file.
pub(crate) enum Entry<T> {
    /// It is open.
    Open(Arc<T>),
    /// A client must first give up what it may cache of this file. The waiter is woken then.
    Wait(Arc<FileState>),
    /// These opens without a connection are in the way and must be closed.
    Displaces(Vec<FileId>),
    /// The file has lost the name, or is losing it, since the name was found.
    NameGone,
}

/// An open that ends.
pub(crate) struct Leaver<'a> {
    pub(crate) id: FileId,
    /// FILE_DELETE_ON_CLOSE.
    pub(crate) deletes: bool,
    pub(crate) parent_lease_key: Option<LeaseKey>,
    pub(crate) leases: &'a LeaseTable,
    /// The handle to remove the name by, if the name is removed with this open.
    pub(crate) handle: &'a FsHandle,
    /// The handle of the file, if this is an open of a named stream.
    pub(crate) file_handle: Option<&'a FsHandle>,
}

/// A waiting LOCK request, in order of arrival.
struct Waiter {
    owner: FileId,
    range: LockRange,
    connection: ConnectionId,
    token: u64,
}

/// The effect of the end of an open on the name that it was opened by.
pub(in crate::engine) enum LeavingOutcome {
    /// It stays.
    Stays,
    /// It is removed when the other opens have ended, too.
    DeletePending,
    /// It is removed now.
    Unlinked {
        link: LinkId,
        path: RelPath,
        /// The handle that gave the file the name, if the file was not created with it.
        named_by: Option<FsHandle>,
        /// The lease on the directory, if both the open that deleted the name and the one that closed it last have named
        /// it.
        parent: Option<LeaseKey>,
    },
}

impl Inner {
    fn link_of(&self, open: FileId) -> Option<LinkId> {
        self.opens.iter().find(|o| o.id == open).map(|o| o.link)
    }

    /// Wakes the waiting LOCK requests of an open, so that they check whether the open is still theirs.
    fn end_waits(&mut self, owner: FileId, clients: &dyn Clients) {
        let (own, others): (Vec<Waiter>, Vec<Waiter>) =
            std::mem::take(&mut self.waiters).into_iter().partition(|w| w.owner == owner);
        self.waiters = others;
        for waiter in own {
            clients.post(waiter.connection, Mail::Wake(waiter.token));
        }
    }

    /// Handles the end of `open`, which is an open of the file by a name or of a stream. Its client named `parent` as its
    /// lease on the directory.
    fn left(&mut self, open: FileId, link: LinkId, parent: Option<LeaseKey>) -> LeavingOutcome {
        let last = !self.opens.iter().chain(&self.streams).any(|o| o.link == link);
        let path = self.links.path(link).cloned();
        let parent = self.links.deleted_by(link).filter(|key| parent == Some(*key));
        match (self.links.closed(link, open, last), path) {
            (Closed::Unlinked(named_by), Some(path)) => {
                LeavingOutcome::Unlinked { link, path, named_by, parent }
            }
            (Closed::DeletePending, _) => LeavingOutcome::DeletePending,
            (Closed::Stays | Closed::Unlinked(_), _) => LeavingOutcome::Stays,
        }
    }

    /// Checks that the open exists: no lock outlives its open, not even one that was requested while the open was being
    /// closed.
    fn must_be_open(&self, owner: FileId) -> Result<(), NtStatus> {
        if self.opens.iter().any(|o| o.id == owner) { Ok(()) } else { Err(NtStatus::FILE_CLOSED) }
    }
}

impl FileState {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect(LOCK)
    }

    pub(crate) fn key(&self) -> FileKey {
        FileKey { stream: self.stream.load(Ordering::Acquire), ..self.file }
    }

    /// Sets the stream after a rename. Its table updates the key.
    pub(in crate::engine) fn set_stream(&self, number: u64) {
        self.stream.store(number, Ordering::Release);
    }

    pub(in crate::engine) fn new(key: FileKey) -> Self {
        Self {
            file: key.file(),
            stream: AtomicU64::new(key.stream),
            locks_present: AtomicBool::new(false),
            breakable: AtomicBool::new(false),
            write_cached: AtomicBool::new(false),
            inner: Mutex::default(),
        }
    }

    /// Adds the open that `make` creates if the others tolerate it ([MS-FSA] 2.1.5.1.2), and grants it what it may cache.
    pub(in crate::engine) fn admit<T: LocalOpen + 'static>(
        self: &Arc<Self>,
        entrant: &Entrant<'_>,
        clients: &dyn Clients,
        make: impl FnOnce() -> T,
    ) -> Result<Entry<T>, NtStatus> {
        let Entrant { access, share, opener, leases, .. } = entrant;
        let mut guard = self.inner();
        let inner = &mut *guard;
        // A new file can get the inode number, and so the state, of the file that has just lost the name.
        if opener.existed && inner.links.is_unlinking_at(entrant.pin.path()) {
            return Ok(Entry::NameGone);
        }
        if inner.links.awaits_close_at(entrant.pin.path()) {
            return Err(NtStatus::DELETE_PENDING);
        }
        // [MS-SMB2] 3.3.5.9.8
        let lease = opener.ask.lease_id();
        if lease.is_some_and(|id| leases.is_of_another(id, self.key())) {
            return Err(NtStatus::INVALID_PARAMETER);
        }
        // Replacing the contents is a write, even if the opener may only read them afterwards.
        let excluding = |o: &&Registered| !compatible((o.access, o.share), (opener.access, *share));
        let deletes = access.contains(AccessMask::DELETE);
        let keeping = |o: &&Registered| deletes && forbids_delete(o.access, o.share);
        let in_the_way = || inner.opens.iter().filter(excluding).chain(inner.streams.iter().filter(keeping));
        let violation = in_the_way().next().is_some();
        let mut displaced = inner.caching.displaced(opener, violation, &inner.opens);
        displaced.extend(in_the_way().filter(|o| o.is_disconnected()).map(|o| o.id));
        if !displaced.is_empty() {
            return Ok(Entry::Displaces(displaced));
        }
        let waits = inner.caching.contend(opener, violation, entrant.directory, &inner.opens, clients);
        self.caching_changed(inner, clients);
        if waits {
            inner.caching.wait(entrant.waiter);
            return Ok(Entry::Wait(Arc::clone(self)));
        }
        if violation {
            return Err(NtStatus::SHARING_VIOLATION);
        }
        if entrant.caches && lease.is_some_and(|id| !leases.claim(id, self.key())) {
            return Err(NtStatus::INVALID_PARAMETER);
        }
        let open = Arc::new(make());
        if entrant.caches {
            let locked = inner.locks.covers(entrant.end_of_file);
            let granted = inner.caching.grantable(opener, entrant.directory, &inner.opens, locked);
            inner.caching.grant(open.id(), &opener.ask, granted);
        }
        let link = inner.links.enter(entrant.pin.path());
        let (access, share) = (*access, *share);
        let weak: Weak<T> = Arc::downgrade(&open);
        inner.opens.push(Registered { id: open.id(), access, share, link, open: weak });
        self.caching_changed(inner, clients);
        Ok(Entry::Open(open))
    }

    /// Removes an open, its locks and its waiting requests, and wakes requests that waited for its locks.
    pub(in crate::engine) fn leave(
        self: &Arc<Self>,
        leaver: &Leaver<'_>,
        clients: &dyn Clients,
    ) -> LeavingOutcome {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let Some(link) = inner.link_of(leaver.id) else { return LeavingOutcome::Stays };
        // [MS-FSA] 2.1.5.5: when an open with delete-on-close ends, its name becomes delete-pending.
        if leaver.deletes {
            inner.links.set_delete_pending(link, Disposition::Delete, leaver.parent_lease_key);
            inner.caching.break_handles(Some(leaver.id), &inner.opens, clients);
        }
        inner.caching.closed(leaver.id, leaver.leases, clients);
        inner.opens.retain(|o| o.id != leaver.id);
        self.caching_changed(inner, clients);
        inner.locks.remove_owner(leaver.id);
        inner.end_waits(leaver.id, clients);
        self.locks_changed(inner, clients);
        inner.left(leaver.id, link, leaver.parent_lease_key)
    }

    /// Checks whether a named stream of the file may be opened by a name of the file. False if the name is being removed.
    /// `new` if the file was created together with its stream.
    ///
    /// # Errors
    /// `STATUS_DELETE_PENDING`
    pub(in crate::engine) fn admits_stream(&self, path: &RelPath, new: bool) -> Result<bool, NtStatus> {
        let inner = self.inner();
        if !new && inner.links.is_unlinking_at(path) {
            return Ok(false);
        }
        if inner.links.awaits_close_at(path) { Err(NtStatus::DELETE_PENDING) } else { Ok(true) }
    }

    /// Registers an open of a named stream of the file.
    pub(in crate::engine) fn enter_stream<T: LocalOpen + 'static>(&self, open: &Arc<T>, by: &Entrant<'_>) {
        let mut inner = self.inner();
        let link = inner.links.enter(by.pin.path());
        let weak: Weak<T> = Arc::downgrade(open);
        let registered = Registered { id: open.id(), access: by.access, share: by.share, link, open: weak };
        inner.streams.push(registered);
    }

    /// Removes an open of a named stream of the file that has ended. Returns the effect on the name of the file.
    pub(in crate::engine) fn leave_stream(&self, leaver: &Leaver<'_>) -> LeavingOutcome {
        let mut inner = self.inner();
        let Some(at) = inner.streams.iter().position(|o| o.id == leaver.id) else {
            return LeavingOutcome::Stays;
        };
        let link = inner.streams.swap_remove(at).link;
        inner.left(leaver.id, link, leaver.parent_lease_key)
    }

    /// Whether named streams of the file are open.
    pub(crate) fn has_open_streams(&self) -> bool {
        !self.inner().streams.is_empty()
    }

    /// Marks the name of an open for deletion if no other open has the file.
    pub(in crate::engine) fn discard(&self, open: FileId) {
        let mut inner = self.inner();
        if let Some(link) = inner.link_of(open)
            && inner.opens.iter().all(|o| o.id == open)
        {
            inner.links.set_delete_pending(link, Disposition::Delete, None);
        }
    }

    /// Adds a name that was created and is removed again before it is opened.
    pub(in crate::engine) fn undo(&self, path: &RelPath) -> LinkId {
        self.inner().links.undo(path)
    }

    /// Ends the removal of a name, whether it succeeded or not. Returns the name.
    pub(in crate::engine) fn unlinked(&self, link: LinkId) -> Option<RelPath> {
        self.inner().links.forget(link)
    }

    pub(in crate::engine) fn open_count(&self) -> usize {
        self.inner().opens.len()
    }

    /// Whether the file is neither open nor losing a name.
    pub(in crate::engine) fn is_idle(&self) -> bool {
        let inner = self.inner();
        inner.opens.is_empty() && inner.streams.is_empty() && inner.links.is_empty()
    }

    /// Returns what an open may cache, in the form of a CREATE response.
    pub(crate) fn cached(&self, open: FileId) -> Cached {
        self.inner().caching.cached(open)
    }

    /// Whether an open has a grant that allows its client to keep the handle, and that is not being broken.
    pub(crate) fn keeps_handle(&self, open: FileId) -> bool {
        self.inner().caching.keeps_handle(open)
    }

    /// Handles a change of the contents by `open`: data that other clients have read becomes invalid.
    pub(crate) fn data_changed(self: &Arc<Self>, open: FileId, clients: &dyn Clients) {
        self.data_changes(open, false, clients);
    }

    /// Like [`Self::data_changed`], for a change by the CREATE that made the open.
    pub(crate) fn data_replaced(self: &Arc<Self>, open: FileId, clients: &dyn Clients) {
        self.data_changes(open, true, clients);
    }

    fn data_changes(self: &Arc<Self>, open: FileId, fresh: bool, clients: &dyn Clients) {
        if !self.breakable.load(Ordering::Acquire) {
            return;
        }
        let mut guard = self.inner();
        let inner = &mut *guard;
        inner.caching.data_changes(open, fresh, &inner.opens, clients);
        self.caching_changed(inner, clients);
    }

    /// Handles a change of the entries of this directory by an open that names `parent` as its client's lease on it.
    pub(in crate::engine) fn entries_changed(
        self: &Arc<Self>,
        parent: Option<LeaseKey>,
        clients: &dyn Clients,
    ) {
        let mut guard = self.inner();
        let inner = &mut *guard;
        inner.caching.entries_change(parent, &inner.opens, clients);
        self.caching_changed(inner, clients);
    }

    /// Whether a client may write later, so that other clients do not see all that it has written.
    pub(crate) fn is_write_cached(&self) -> bool {
        self.write_cached.load(Ordering::Acquire)
    }

    /// Makes clients close handles that they keep only for the cache, except those of `except`. True if a client has to;
    /// `waiter` is woken when one of them has.
    pub(crate) fn break_handles(
        self: &Arc<Self>,
        except: Option<FileId>,
        waiter: BreakWaiter,
        clients: &dyn Clients,
    ) -> bool {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let waits = inner.caching.break_handles(except, &inner.opens, clients);
        self.caching_changed(inner, clients);
        if waits {
            inner.caching.wait(waiter);
        }
        waits
    }

    /// Like [`Inner::end_waits`], for an open that stays.
    pub(crate) fn end_waits(&self, owner: FileId, clients: &dyn Clients) {
        let mut inner = self.inner();
        inner.end_waits(owner, clients);
        self.locks_changed(&inner, clients);
    }

    /// Whether a client has yet to give up what it may cache.
    pub(crate) fn is_breaking(&self) -> bool {
        self.inner().caching.is_breaking()
    }

    /// Whether a client has it open and does not keep it only for the cache.
    pub(in crate::engine) fn has_other_handles(&self) -> bool {
        let inner = self.inner();
        inner.opens.iter().any(|o| !inner.caching.is_kept(o.id))
    }

    /// True if a break awaits acknowledgment. `waiter` is woken when the acknowledgment has arrived.
    pub(in crate::engine) fn wait_while_breaking(&self, waiter: BreakWaiter) -> bool {
        let mut inner = self.inner();
        let breaking = inner.caching.is_breaking();
        if breaking {
            inner.caching.wait(waiter);
        }
        breaking
    }

    /// Removes a request that no longer waits for a break.
    pub(crate) fn stop_waiting_for_break(&self, token: u64) {
        self.inner().caching.stop_waiting(token);
    }

    /// [MS-SMB2] 3.3.5.22.1
    pub(crate) fn acknowledge_oplock(
        self: &Arc<Self>,
        open: FileId,
        level: OplockLevel,
        clients: &dyn Clients,
    ) -> Result<OplockLevel, NtStatus> {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let answer = inner.caching.acknowledge_oplock(open, level, clients);
        self.caching_changed(inner, clients);
        answer
    }

    /// [MS-SMB2] 3.3.5.22.2
    pub(crate) fn acknowledge_lease(
        self: &Arc<Self>,
        id: LeaseId,
        state: LeaseState,
        clients: &dyn Clients,
    ) -> Result<(), NtStatus> {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let answer = inner.caching.acknowledge_lease(id, state, &inner.opens, clients);
        self.caching_changed(inner, clients);
        answer
    }

    fn note_caching(&self, inner: &Inner) {
        self.breakable.store(inner.caching.is_breakable(), Ordering::Release);
        self.write_cached.store(inner.caching.is_write_cached(), Ordering::Release);
    }

    fn caching_changed(self: &Arc<Self>, inner: &Inner, clients: &dyn Clients) {
        self.note_caching(inner);
        if inner.caching.is_breaking() {
            let file: Arc<Self> = Arc::clone(self);
            clients.watch(file);
        }
    }

    pub(in crate::engine) fn is_open_below(&self, directory: &RelPath) -> bool {
        let inner = self.inner();
        // An open that no client can reclaim counts as closed.
        let counts = |o: &&Registered| !o.is_disconnected() || inner.caching.keeps_handle(o.id);
        let mut paths = inner.opens.iter().filter(counts).filter_map(|o| inner.links.path(o.link));
        paths.any(|path| path.is_below(directory))
    }

    /// [MS-FSCC] 2.4.45 DeletePending, for the name of `open`.
    pub(crate) fn delete_pending(&self, open: FileId) -> bool {
        let inner = self.inner();
        inner.link_of(open).is_some_and(|link| inner.links.is_delete_pending(link))
    }

    /// Like [`Self::delete_pending`], for the name at `path`.
    pub(crate) fn delete_pending_at(&self, path: &RelPath) -> bool {
        self.inner().links.is_delete_pending_at(path)
    }

    /// Applies FileDispositionInformation to the name of `open`.
    ///
    /// # Errors
    /// `STATUS_FILE_CLOSED` if the open has ended.
    pub(crate) fn set_delete_pending(
        &self,
        open: &dyn LocalOpen,
        disposition: Disposition,
    ) -> Result<(), NtStatus> {
        let mut inner = self.inner();
        let link = inner.link_of(open.id()).ok_or(NtStatus::FILE_CLOSED)?;
        inner.links.set_delete_pending(link, disposition, open.parent_lease_key());
        Ok(())
    }

    /// Whether the existing opens tolerate an open with `access` and `share`.
    pub(crate) fn tolerates(&self, access: AccessMask, share: ShareAccess) -> bool {
        self.inner().opens.iter().all(|o| compatible((o.access, o.share), (access, share)))
    }

    /// Whether all its opens but `except` share deletion.
    pub(crate) fn shares_delete(&self, except: FileId) -> bool {
        self.inner().opens.iter().all(|o| o.id == except || o.share.contains(ShareAccess::DELETE))
    }

    /// Renames all opens of the name `from` to `to`, which the backend gave it by the handle `by`.
    pub(crate) fn renamed(&self, from: &RelPath, to: &RelPath, by: &FsHandle) {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let Some((link, replaced)) = inner.links.renamed(from, to, by) else { return };
        for registered in &mut inner.opens {
            if Some(registered.link) == replaced {
                registered.link = link;
            }
            if registered.link == link
                && let Some(open) = registered.open()
            {
                open.set_path(to);
            }
        }
    }

    /// Returns the number of byte-range locks that an open holds.
    pub(crate) fn locks_of(&self, owner: FileId) -> usize {
        if !self.locks_present.load(Ordering::Acquire) {
            return 0;
        }
        self.inner().locks.count(owner)
    }

    /// Whether a lock forbids an open from reading a range ([MS-FSA] 2.1.4.10).
    pub(crate) fn forbids_read(&self, owner: FileId, offset: u64, length: u64) -> bool {
        self.locks_present.load(Ordering::Acquire) && self.inner().locks.forbids_read(owner, offset, length)
    }

    /// Whether a lock forbids an open from writing a range ([MS-FSA] 2.1.4.10).
    pub(crate) fn forbids_write(&self, owner: FileId, offset: u64, length: u64) -> bool {
        self.locks_present.load(Ordering::Acquire) && self.inner().locks.forbids_write(owner, offset, length)
    }

    /// Takes all of `ranges` or none.
    ///
    /// # Errors
    /// `STATUS_LOCK_NOT_GRANTED`, `STATUS_INSUFFICIENT_RESOURCES`.
    pub(crate) fn lock(&self, owner: FileId, ranges: &[LockRange], volume: &Tally) -> Result<(), NtStatus> {
        let mut inner = self.inner();
        inner.must_be_open(owner)?;
        let result = inner.locks.lock(owner, ranges, volume);
        self.locks_present.store(!inner.locks.is_empty(), Ordering::Release);
        result
    }

    /// Like [`Self::lock`] for one range. If the range is not free, joins the queue (once) to be woken by [`Mail::Wake`].
    /// True if the lock was taken.
    pub(crate) fn lock_or_wait(
        &self,
        owner: FileId,
        range: LockRange,
        volume: &Tally,
        connection: ConnectionId,
        token: u64,
    ) -> Result<bool, NtStatus> {
        let mut inner = self.inner();
        inner.must_be_open(owner)?;
        match inner.locks.lock(owner, &[range], volume) {
            Ok(()) => {
                inner.waiters.retain(|w| w.token != token);
                self.locks_present.store(true, Ordering::Release);
                Ok(true)
            }
            Err(NtStatus::LOCK_NOT_GRANTED) => {
                if !inner.waiters.iter().any(|w| w.token == token) {
                    if inner.waiters.len() >= LOCK_WAITERS_PER_FILE_MAX {
                        return Err(NtStatus::INSUFFICIENT_RESOURCES);
                    }
                    inner.waiters.push(Waiter { owner, range, connection, token });
                }
                Ok(false)
            }
            Err(status) => {
                inner.waiters.retain(|w| w.token != token);
                Err(status)
            }
        }
    }

    /// Removes a request that no longer waits. Requests that waited behind it can continue.
    pub(crate) fn stop_waiting(&self, token: u64, clients: &dyn Clients) {
        let mut inner = self.inner();
        inner.waiters.retain(|w| w.token != token);
        self.locks_changed(&inner, clients);
    }

    /// Releases the locks with exactly these ranges, up to the first range without a lock. False if there is such a range.
    pub(crate) fn unlock(
        &self,
        owner: FileId,
        ranges: impl IntoIterator<Item = (u64, u64)>,
        clients: &dyn Clients,
    ) -> bool {
        let mut inner = self.inner();
        let found = ranges.into_iter().all(|(offset, length)| inner.locks.unlock(owner, offset, length));
        self.locks_changed(&inner, clients);
        found
    }

    /// Wakes, in order of arrival, the waiters that can all have their ranges now.
    fn locks_changed(&self, inner: &Inner, clients: &dyn Clients) {
        self.locks_present.store(!inner.locks.is_empty(), Ordering::Release);
        let mut promised = LockList::default();
        for waiter in &inner.waiters {
            let Waiter { owner, range, .. } = *waiter;
            if inner.locks.grants(owner, range) && promised.grants(owner, range) {
                clients.post(waiter.connection, Mail::Wake(waiter.token));
                promised.put(owner, range);
            }
        }
    }
}

impl Breakable for FileState {
    fn tick(&self, now: Instant, clients: &dyn Clients) -> bool {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let breaking = inner.caching.tick(now, &inner.opens, clients);
        self.note_caching(inner);
        breaking
    }

    fn channel_lost(&self, connection: ConnectionId, clients: &dyn Clients) {
        let mut guard = self.inner();
        let inner = &mut *guard;
        inner.caching.channel_lost(connection, &inner.opens, clients);
    }
}
