//! One file that is open: share modes, names, pending deletion and byte-range locks, whatever sessions opened it
//! ([MS-FSA] 2.1.1.5, 2.1.1.10). [`crate::engine::file::table`] has the ways in and out.

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

/// One file that is open, once for all its opens.
pub(crate) struct FileState {
    file: FileKey,
    /// [`FileKey::stream`], which a rename of the stream changes.
    stream: AtomicU64,
    /// Whether `inner.locks` has any, so that READ and WRITE need not look.
    locks_present: AtomicBool,
    /// Whether a client in `inner.caching` may keep what it has read while another writes, so that WRITE need not look.
    breakable: AtomicBool,
    /// Whether a client in `inner.caching` may write later.
    write_cached: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    opens: Vec<Registered>,
    /// Opens of its named streams. Each has its own [`FileState`]; here they keep the names of the file.
    streams: Vec<Registered>,
    links: Links,
    locks: LockList,
    waiters: Vec<Waiter>,
    caching: Caching,
}

/// An open that asks for access.
pub(crate) struct Entrant<'a> {
    pub(crate) key: FileKey,
    /// The name that it was opened by: no rename has changed it since a backend has found the file.
    pub(crate) pin: &'a PinnedPath,
    pub(crate) directory: bool,
    pub(crate) end_of_file: u64,
    /// The file was made by this open, for itself or for the stream.
    pub(crate) made_file: bool,
    /// It may be granted what it asks for: a directory only by leases of version 2, to clients that know them.
    pub(crate) caches: bool,
    pub(crate) access: AccessMask,
    pub(crate) share: ShareAccess,
    pub(crate) opener: Opener,
    /// Woken where it has to wait.
    pub(crate) waiter: BreakWaiter,
    pub(crate) leases: &'a LeaseTable,
}

/// What became of an attempt to open a file.
pub(crate) enum Entry<T> {
    /// It is open.
    Open(Arc<T>),
    /// A client has to give up first what it may cache of this file; the waiter is woken then.
    Wait(Arc<FileState>),
    /// These opens without a connection are in the way: they are to be closed.
    Displaces(Vec<FileId>),
}

/// An open that ends.
pub(crate) struct Leaver<'a> {
    pub(crate) id: FileId,
    /// FILE_DELETE_ON_CLOSE.
    pub(crate) deletes: bool,
    pub(crate) parent_lease_key: Option<LeaseKey>,
    pub(crate) leases: &'a LeaseTable,
    /// To remove the name by, if that goes with this open.
    pub(crate) handle: &'a FsHandle,
    /// Of an open of a named stream: the handle of the file.
    pub(crate) file_handle: Option<&'a FsHandle>,
}

/// A LOCK request that waits, in order of arrival.
struct Waiter {
    owner: FileId,
    range: LockRange,
    connection: ConnectionId,
    token: u64,
}

/// What the end of an open means for the name that it was opened by.
pub(in crate::engine) enum LeavingOutcome {
    /// It stays.
    Stays,
    /// It goes when others have closed it, too.
    DeletePending,
    /// It goes now.
    Unlinked {
        link: LinkId,
        path: RelPath,
        /// The handle that gave it the name, where it was not made by that.
        named_by: Option<FsHandle>,
        /// The lease on the directory that both the open that deleted it and the one that closed it last have named.
        parent: Option<LeaseKey>,
    },
}

impl Inner {
    fn link_of(&self, open: FileId) -> Option<LinkId> {
        self.opens.iter().find(|o| o.id == open).map(|o| o.link)
    }

    /// Has an open's LOCK requests that wait look at whether it is still theirs.
    fn end_waits(&mut self, owner: FileId, clients: &dyn Clients) {
        let (own, others): (Vec<Waiter>, Vec<Waiter>) =
            std::mem::take(&mut self.waiters).into_iter().partition(|w| w.owner == owner);
        self.waiters = others;
        for waiter in own {
            clients.post(waiter.connection, Mail::Wake(waiter.token));
        }
    }

    /// `open`, of the file by a name or of a stream, has ended; its client named `parent` as its lease on the directory.
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

    /// No lock outlives its open, not even one that was asked for while it was being closed.
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

    /// The stream has another name. Its table knows.
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

    /// Adds the open that `make` makes if the others tolerate it ([MS-FSA] 2.1.5.1.2), and grants it what it may cache.
    pub(in crate::engine) fn admit<T: LocalOpen + 'static>(
        self: &Arc<Self>,
        entrant: &Entrant<'_>,
        clients: &dyn Clients,
        make: impl FnOnce() -> T,
    ) -> Result<Entry<T>, NtStatus> {
        let Entrant { access, share, opener, leases, .. } = entrant;
        let mut guard = self.inner();
        let inner = &mut *guard;
        if inner.links.is_delete_pending_at(entrant.pin.path()) {
            return Err(NtStatus::DELETE_PENDING);
        }
        // [MS-SMB2] 3.3.5.9.8
        let lease = opener.ask.lease_id();
        if lease.is_some_and(|id| leases.is_of_another(id, self.key())) {
            return Err(NtStatus::INVALID_PARAMETER);
        }
        // To replace the contents is to write, also for an opener that may only read them afterwards.
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

    /// Removes an open, its locks and its waiting requests, and wakes those that waited for its locks.
    pub(in crate::engine) fn leave(
        self: &Arc<Self>,
        leaver: &Leaver<'_>,
        clients: &dyn Clients,
    ) -> LeavingOutcome {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let Some(link) = inner.link_of(leaver.id) else { return LeavingOutcome::Stays };
        // [MS-FSA] 2.1.5.5: delete-on-close becomes the name's business when that open ends.
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

    /// Whether a named stream of the file may be opened by a name of the file.
    ///
    /// # Errors
    /// `STATUS_DELETE_PENDING`
    pub(in crate::engine) fn admits_stream(&self, path: &RelPath) -> Result<(), NtStatus> {
        if self.delete_pending_at(path) { Err(NtStatus::DELETE_PENDING) } else { Ok(()) }
    }

    /// A named stream of the file is open.
    pub(in crate::engine) fn enter_stream<T: LocalOpen + 'static>(&self, open: &Arc<T>, by: &Entrant<'_>) {
        let mut inner = self.inner();
        let link = inner.links.enter(by.pin.path());
        let weak: Weak<T> = Arc::downgrade(open);
        let registered = Registered { id: open.id(), access: by.access, share: by.share, link, open: weak };
        inner.streams.push(registered);
    }

    /// An open of a named stream of the file has ended: what that means for the name of the file.
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

    /// Its name goes with an open that alone has it.
    pub(in crate::engine) fn discard(&self, open: FileId) {
        let mut inner = self.inner();
        if let Some(link) = inner.link_of(open)
            && inner.opens.iter().all(|o| o.id == open)
        {
            inner.links.set_delete_pending(link, Disposition::Delete, None);
        }
    }

    /// A name that was made and is removed again before anything opens it.
    pub(in crate::engine) fn undo(&self, path: &RelPath) -> LinkId {
        self.inner().links.undo(path)
    }

    /// A name that was to go has been removed, or could not be; which one.
    pub(in crate::engine) fn unlinked(&self, link: LinkId) -> Option<RelPath> {
        self.inner().links.forget(link)
    }

    pub(in crate::engine) fn open_count(&self) -> usize {
        self.inner().opens.len()
    }

    /// Neither open nor losing a name.
    pub(in crate::engine) fn is_idle(&self) -> bool {
        let inner = self.inner();
        inner.opens.is_empty() && inner.streams.is_empty() && inner.links.is_empty()
    }

    /// What a CREATE response says of what an open may cache.
    pub(crate) fn cached(&self, open: FileId) -> Cached {
        self.inner().caching.cached(open)
    }

    /// Whether an open holds something that lets its client keep the handle, and is not being asked to give it up.
    pub(crate) fn keeps_handle(&self, open: FileId) -> bool {
        self.inner().caching.keeps_handle(open)
    }

    /// The contents have changed by `open`: what others have read of them is not to be used any more.
    pub(crate) fn data_changed(self: &Arc<Self>, open: FileId, clients: &dyn Clients) {
        self.data_changes(open, false, clients);
    }

    /// As [`Self::data_changed`], by the CREATE that made the open.
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

    /// The entries of this directory have changed, by an open that names `parent` as its client's lease on it.
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

    /// Whether a client may write later: other clients that look at the file do not see all that it has written.
    pub(crate) fn is_write_cached(&self) -> bool {
        self.write_cached.load(Ordering::Acquire)
    }

    /// Has handles closed that others than `except` keep for the cache alone. True where a client has to; `waiter` is woken
    /// when one of them has.
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

    /// As [`Inner::end_waits`], for an open that stays.
    pub(crate) fn end_waits(&self, owner: FileId, clients: &dyn Clients) {
        let mut inner = self.inner();
        inner.end_waits(owner, clients);
        self.locks_changed(&inner, clients);
    }

    /// Whether a client has yet to give up what it may cache.
    pub(crate) fn is_breaking(&self) -> bool {
        self.inner().caching.is_breaking()
    }

    /// Whether it is open by a client that does not keep it for the cache alone.
    pub(in crate::engine) fn has_other_handles(&self) -> bool {
        let inner = self.inner();
        inner.opens.iter().any(|o| !inner.caching.is_kept(o.id))
    }

    /// True where a break waits for its acknowledgment; `waiter` is woken when it has come.
    pub(in crate::engine) fn wait_while_breaking(&self, waiter: BreakWaiter) -> bool {
        let mut inner = self.inner();
        let breaking = inner.caching.is_breaking();
        if breaking {
            inner.caching.wait(waiter);
        }
        breaking
    }

    /// A request does not wait for a break any more.
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
        // One that no client can come back for is as good as closed.
        let counts = |o: &&Registered| !o.is_disconnected() || inner.caching.keeps_handle(o.id);
        let mut paths = inner.opens.iter().filter(counts).filter_map(|o| inner.links.path(o.link));
        paths.any(|path| path.is_below(directory))
    }

    /// [MS-FSCC] 2.4.45 DeletePending: of the name that `open` has.
    pub(crate) fn delete_pending(&self, open: FileId) -> bool {
        let inner = self.inner();
        inner.link_of(open).is_some_and(|link| inner.links.is_delete_pending(link))
    }

    /// As [`Self::delete_pending`], of the name at `path`.
    pub(crate) fn delete_pending_at(&self, path: &RelPath) -> bool {
        self.inner().links.is_delete_pending_at(path)
    }

    /// FileDispositionInformation, of the name that `open` has.
    ///
    /// # Errors
    /// `STATUS_FILE_CLOSED` where that has ended.
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

    /// Whether an open with `access` and `share` would be tolerated by the opens there are.
    pub(crate) fn tolerates(&self, access: AccessMask, share: ShareAccess) -> bool {
        self.inner().opens.iter().all(|o| compatible((o.access, o.share), (access, share)))
    }

    /// Whether all its opens but `except` share deletion.
    pub(crate) fn shares_delete(&self, except: FileId) -> bool {
        self.inner().opens.iter().all(|o| o.id == except || o.share.contains(ShareAccess::DELETE))
    }

    /// Gives all opens of it that are known by `from` the name `to`, which the backend gave it by the handle `by`.
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

    /// Byte-range locks that an open holds.
    pub(crate) fn locks_of(&self, owner: FileId) -> usize {
        if !self.locks_present.load(Ordering::Acquire) {
            return 0;
        }
        self.inner().locks.count(owner)
    }

    /// Whether a lock forbids an open to read a range ([MS-FSA] 2.1.4.10).
    pub(crate) fn forbids_read(&self, owner: FileId, offset: u64, length: u64) -> bool {
        self.locks_present.load(Ordering::Acquire) && self.inner().locks.forbids_read(owner, offset, length)
    }

    /// Whether a lock forbids an open to write a range ([MS-FSA] 2.1.4.10).
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

    /// As [`Self::lock`] for one range; where it is not free, joins the queue (once) to be woken by
    /// [`Mail::Wake`]. True where it was taken.
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

    /// A request waits no more; requests that waited behind it may go on.
    pub(crate) fn stop_waiting(&self, token: u64, clients: &dyn Clients) {
        let mut inner = self.inner();
        inner.waiters.retain(|w| w.token != token);
        self.locks_changed(&inner, clients);
    }

    /// Releases locks with exactly these ranges, up to the first that is not there. False where one is not.
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
