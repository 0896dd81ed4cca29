//! Files that are open: share modes, pending deletion and byte-range locks, whatever names and sessions they were
//! opened by ([MS-FSA] 2.1.1.5, 2.1.1.10).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::leases::LeaseId;
use super::locks::{LockList, LockRange};
use super::open::Open;
use super::oplocks::{Cached, Caching, Opener, Waiter as BreakWaiter};
use super::server::{ConnectionId, Mail, Server};
use crate::fs::{FileKey, RelPath, Stat};
use crate::ids::FileId;
use crate::status::NtStatus;
use crate::wire::create::{CreateOptions, OplockLevel};
use crate::wire::create_context::LeaseState;
use crate::wire::{AccessMask, ShareAccess};

const LOCK: &str = "no panic under this lock";

/// The files of a volume that are open.
#[derive(Default)]
pub(crate) struct FileTable {
    files: HashMap<FileKey, Arc<FileState>>,
}

/// One file that is open, once for all its opens.
pub(crate) struct FileState {
    key: FileKey,
    /// Whether `inner.locks` has any, so that READ and WRITE need not look.
    locks_present: AtomicBool,
    /// Whether somebody in `inner.caching` may keep what he has read while another writes, so that WRITE need not look.
    breakable: AtomicBool,
    /// Whether `inner.change_time` is there.
    change_time_set: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    opens: Vec<Registered>,
    /// [MS-FSA] Link.IsDeleted: it goes with its last open.
    delete_pending: bool,
    /// Its last open is being closed and its name removed: nobody may open it any more.
    going: bool,
    /// ChangeTime as the file system has it and as a client set it.
    change_time: Option<(u64, u64)>,
    locks: LockList,
    waiters: Vec<Waiter>,
    caching: Caching,
}

/// An open of a file, in order of arrival.
pub(super) struct Registered {
    pub(super) id: FileId,
    pub(super) access: AccessMask,
    share: ShareAccess,
    open: Weak<Open>,
}

impl Registered {
    pub(super) fn open(&self) -> Option<Arc<Open>> {
        self.open.upgrade()
    }

    /// The session on whose channels its client can be reached.
    pub(super) fn session(&self) -> Option<u64> {
        self.open().filter(|o| !o.is_disconnected()).map(|o| o.session_id())
    }

    /// It outlived its session.
    pub(super) fn is_disconnected(&self) -> bool {
        self.open().is_some_and(|o| o.is_disconnected())
    }
}

/// What became of an attempt to open a file.
pub(crate) enum Admission {
    /// It is open.
    Open,
    /// Somebody has to give up first what he may cache; the waiter will hear of it.
    Wait,
    /// These opens without a connection are in the way: they are to be closed.
    Displaces(Vec<Arc<Open>>),
}

/// A LOCK request that waits, in order of arrival.
struct Waiter {
    owner: FileId,
    range: LockRange,
    connection: ConnectionId,
    token: u64,
}

/// What the end of an open means for its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// The name must go: it was the last open of a file to be deleted. [`FileTable::gone`] must follow.
    pub(crate) unlink: bool,
}

/// Rights that share modes are about ([MS-FSA] 2.1.5.1.2.2); an open without any of them shares with everything.
const SHARED_RIGHTS: AccessMask = AccessMask::FILE_READ_DATA
    .union(AccessMask::FILE_WRITE_DATA)
    .union(AccessMask::FILE_APPEND_DATA)
    .union(AccessMask::FILE_EXECUTE)
    .union(AccessMask::DELETE);

/// Whether two opens of one file tolerate each other.
fn compatible(a: (AccessMask, ShareAccess), b: (AccessMask, ShareAccess)) -> bool {
    let one_way = |access: AccessMask, share: ShareAccess| {
        let reads = access.intersects(AccessMask::FILE_READ_DATA | AccessMask::FILE_EXECUTE);
        let writes = access.intersects(AccessMask::FILE_WRITE_DATA | AccessMask::FILE_APPEND_DATA);
        let deletes = access.contains(AccessMask::DELETE);
        (!reads || share.contains(ShareAccess::READ))
            && (!writes || share.contains(ShareAccess::WRITE))
            && (!deletes || share.contains(ShareAccess::DELETE))
    };
    if !a.0.intersects(SHARED_RIGHTS) || !b.0.intersects(SHARED_RIGHTS) {
        return true;
    }
    one_way(a.0, b.1) && one_way(b.0, a.1)
}

impl FileTable {
    /// The state of a file, made where there is none; [`Self::register`] or [`Self::abandon`] must follow.
    pub(crate) fn state(&mut self, key: FileKey) -> Arc<FileState> {
        let file = self.files.entry(key).or_insert_with(|| {
            Arc::new(FileState {
                key,
                locks_present: AtomicBool::new(false),
                breakable: AtomicBool::new(false),
                change_time_set: AtomicBool::new(false),
                inner: Mutex::default(),
            })
        });
        Arc::clone(file)
    }

    /// The state of a file that is open.
    pub(crate) fn find(&self, key: FileKey) -> Option<Arc<FileState>> {
        self.files.get(&key).cloned()
    }

    /// Adds an open if the others tolerate it ([MS-FSA] 2.1.5.1.2), and grants it what it may cache. Where somebody has to
    /// give something up first, `waiter` is woken when he has.
    ///
    /// # Errors
    /// `STATUS_DELETE_PENDING`, `STATUS_SHARING_VIOLATION`; `STATUS_INVALID_PARAMETER` for a lease key of another file.
    pub(crate) fn register(
        &mut self,
        open: &Arc<Open>,
        opener: &Opener,
        waiter: BreakWaiter,
        server: &Server,
    ) -> Result<Admission, NtStatus> {
        let admission = open.file.admit(open, opener, waiter, server);
        if !matches!(admission, Ok(Admission::Open)) {
            self.abandon(&open.file);
        }
        admission
    }

    /// Forgets a state that no open was added to. False where others have the file open.
    pub(crate) fn abandon(&mut self, file: &Arc<FileState>) -> bool {
        let idle = {
            let inner = file.inner();
            inner.opens.is_empty() && !inner.going
        };
        if idle {
            self.files.remove(&file.key);
        }
        idle
    }

    /// Removes an open, its locks and its waiting requests, and wakes those that waited for its locks.
    pub(crate) fn unregister(&mut self, open: &Open, server: &Server) -> Ended {
        let file = &open.file;
        open.used(server);
        let mut guard = file.inner();
        let inner = &mut *guard;
        // [MS-FSA] 2.1.5.5: delete-on-close becomes the file's business when that open ends.
        if CreateOptions(open.options).contains(CreateOptions::DELETE_ON_CLOSE) {
            inner.delete_pending = true;
            inner.caching.break_handles(Some(open.id), &inner.opens, server);
        }
        inner.caching.closed(open.id, &open.volume.leases, server);
        inner.opens.retain(|o| o.id != open.id);
        file.caching_changed(inner, server);
        inner.locks.remove_owner(open.id);
        inner.end_waits(open.id, server);
        file.locks_changed(inner, server);
        if !inner.opens.is_empty() {
            return Ended { unlink: false };
        }
        if inner.delete_pending {
            inner.going = true;
            return Ended { unlink: true };
        }
        drop(guard);
        self.files.remove(&file.key);
        Ended { unlink: false }
    }

    /// A file that was made for an open that comes to nothing goes with it, unless somebody else has found it meanwhile.
    pub(crate) fn discard(&mut self, open: &Open) {
        let mut inner = open.file.inner();
        if inner.opens.iter().all(|o| o.id == open.id) {
            inner.delete_pending = true;
        }
    }

    /// The name of a file that was to go is removed (or could not be).
    pub(crate) fn gone(&mut self, file: &FileState) {
        self.files.remove(&file.key);
    }

    /// Whether anything below a directory is open.
    pub(crate) fn any_open_below(&self, directory: &RelPath) -> bool {
        self.files.values().any(|file| file.is_open_below(directory))
    }

    /// Has handles below a directory closed that are kept for the cache alone, where there are no others; once, so that who
    /// opens again and again does not keep it for ever. True where somebody has to; `waiter` is woken when one of them has.
    pub(crate) fn break_handles_below(
        &self,
        directory: &RelPath,
        first: bool,
        waiter: BreakWaiter,
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
}

impl FileTable {
    /// A request does not wait any more until somebody closes a handle.
    pub(crate) fn stop_waiting_for_breaks(&self, token: u64) {
        for file in self.files.values() {
            file.stop_waiting_for_break(token);
        }
    }
}

impl Inner {
    /// Has an open's LOCK requests that wait look at whether it is still theirs.
    fn end_waits(&mut self, owner: FileId, server: &Server) {
        let (own, others): (Vec<Waiter>, Vec<Waiter>) =
            std::mem::take(&mut self.waiters).into_iter().partition(|w| w.owner == owner);
        self.waiters = others;
        for waiter in own {
            server.post(waiter.connection, Mail::Wake(waiter.token));
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
        self.key
    }

    fn admit(
        self: &Arc<Self>,
        open: &Arc<Open>,
        opener: &Opener,
        waiter: BreakWaiter,
        server: &Server,
    ) -> Result<Admission, NtStatus> {
        let mut guard = self.inner();
        let inner = &mut *guard;
        if inner.delete_pending || inner.going {
            return Err(NtStatus::DELETE_PENDING);
        }
        // [MS-SMB2] 3.3.5.9.8
        let leases = &open.volume.leases;
        let lease = opener.ask.lease_id();
        if lease.is_some_and(|id| leases.is_of_another(id, self)) {
            return Err(NtStatus::INVALID_PARAMETER);
        }
        let (access, share) = (AccessMask(open.access), ShareAccess(open.share));
        let excluding = |o: &&Registered| !compatible((o.access, o.share), (access, share));
        let violation = inner.opens.iter().any(|o| excluding(&o));
        let mut displaced = inner.caching.displaced(opener, violation, &inner.opens);
        let others = inner.opens.iter().filter(excluding).filter(|o| o.is_disconnected());
        displaced.extend(others.filter_map(Registered::open));
        if !displaced.is_empty() {
            return Ok(Admission::Displaces(displaced));
        }
        let waits = inner.caching.contend(opener, violation, &inner.opens, server);
        self.caching_changed(inner, server);
        if waits {
            inner.caching.wait(waiter);
            return Ok(Admission::Wait);
        }
        if violation {
            return Err(NtStatus::SHARING_VIOLATION);
        }
        // Directories are not cached.
        if !open.directory {
            if lease.is_some_and(|id| !leases.claim(id, self)) {
                return Err(NtStatus::INVALID_PARAMETER);
            }
            let granted = inner.caching.grantable(opener, &inner.opens, !inner.locks.is_empty());
            inner.caching.grant(open.id, &opener.ask, granted);
        }
        inner.opens.push(Registered { id: open.id, access, share, open: Arc::downgrade(open) });
        self.caching_changed(inner, server);
        Ok(Admission::Open)
    }

    /// What a CREATE response tells of what an open may cache.
    pub(crate) fn cached(&self, open: FileId) -> Cached {
        self.inner().caching.cached(open)
    }

    /// Whether an open holds something that lets its client keep the handle, and is not being asked to give it up.
    pub(crate) fn keeps_handle(&self, open: FileId) -> bool {
        self.inner().caching.keeps_handle(open)
    }

    /// The contents have changed by `open`: what others have read of them is not to be used any more.
    pub(crate) fn data_changed(self: &Arc<Self>, open: FileId, server: &Server) {
        self.data_changes(open, false, server);
    }

    /// As [`Self::data_changed`], by the CREATE that made the open.
    pub(crate) fn data_replaced(self: &Arc<Self>, open: FileId, server: &Server) {
        self.data_changes(open, true, server);
    }

    fn data_changes(self: &Arc<Self>, open: FileId, fresh: bool, server: &Server) {
        if !self.breakable.load(Ordering::Acquire) {
            return;
        }
        let mut guard = self.inner();
        let inner = &mut *guard;
        inner.caching.data_changes(open, fresh, &inner.opens, server);
        self.caching_changed(inner, server);
    }

    /// Has handles closed that others than `except` keep for the cache alone. True where somebody has to; `waiter` is woken
    /// when one of them has.
    pub(crate) fn break_handles(
        self: &Arc<Self>,
        except: Option<FileId>,
        waiter: BreakWaiter,
        server: &Server,
    ) -> bool {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let waits = inner.caching.break_handles(except, &inner.opens, server);
        self.caching_changed(inner, server);
        if waits {
            inner.caching.wait(waiter);
        }
        waits
    }

    /// As [`Inner::end_waits`], for an open that stays.
    pub(crate) fn end_waits(&self, owner: FileId, server: &Server) {
        let mut inner = self.inner();
        inner.end_waits(owner, server);
        self.locks_changed(&inner, server);
    }

    /// Whether somebody has yet to give up what he may cache.
    pub(crate) fn is_breaking(&self) -> bool {
        self.inner().caching.is_breaking()
    }

    /// Whether it is open by somebody who does not keep it for the cache alone.
    fn has_other_handles(&self) -> bool {
        let inner = self.inner();
        inner.opens.iter().any(|o| !inner.caching.is_kept(o.id))
    }

    /// True where a break waits for its acknowledgment; `waiter` is woken when it has come.
    fn wait_while_breaking(&self, waiter: BreakWaiter) -> bool {
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
        server: &Server,
    ) -> Result<OplockLevel, NtStatus> {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let answer = inner.caching.acknowledge_oplock(open, level, server);
        self.caching_changed(inner, server);
        answer
    }

    /// [MS-SMB2] 3.3.5.22.2
    pub(crate) fn acknowledge_lease(
        self: &Arc<Self>,
        id: LeaseId,
        state: LeaseState,
        server: &Server,
    ) -> Result<(), NtStatus> {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let answer = inner.caching.acknowledge_lease(id, state, &inner.opens, server);
        self.caching_changed(inner, server);
        answer
    }

    /// True while a break waits for its acknowledgment.
    pub(crate) fn tick(self: &Arc<Self>, now: u64, server: &Server) -> bool {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let breaking = inner.caching.tick(now, &inner.opens, server);
        self.breakable.store(inner.caching.is_breakable(), Ordering::Release);
        breaking
    }

    /// A connection over which a break may have gone out is gone.
    pub(crate) fn channel_lost(&self, connection: ConnectionId, server: &Server) {
        let mut guard = self.inner();
        let inner = &mut *guard;
        inner.caching.channel_lost(connection, &inner.opens, server);
    }

    fn caching_changed(self: &Arc<Self>, inner: &Inner, server: &Server) {
        self.breakable.store(inner.caching.is_breakable(), Ordering::Release);
        if inner.caching.is_breaking() {
            server.watch(self);
        }
    }

    fn is_open_below(&self, directory: &RelPath) -> bool {
        let below = |path: &RelPath| {
            directory.is_root() && !path.is_root()
                || path.as_str().strip_prefix(directory.as_str()).is_some_and(|rest| rest.starts_with('/'))
        };
        let opens: Vec<Arc<Open>> = {
            let inner = self.inner();
            // One that nobody can come back for is as good as closed.
            let counts = |o: &&Registered| !o.is_disconnected() || inner.caching.keeps_handle(o.id);
            inner.opens.iter().filter(counts).filter_map(Registered::open).collect()
        };
        opens.iter().any(|open| below(&open.state().path))
    }

    /// Remembers the ChangeTime that a client set, which no file system keeps: it is told until the file changes again
    /// or is closed by all. `real` is what the file system says after the change.
    pub(crate) fn set_change_time(&self, real: u64, told: u64) {
        self.inner().change_time = Some((real, told));
        self.change_time_set.store(true, Ordering::Release);
    }

    /// `stat` with the ChangeTime that a client set.
    pub(crate) fn told(&self, mut stat: Stat) -> Stat {
        if self.change_time_set.load(Ordering::Acquire)
            && let Some((real, told)) = self.inner().change_time
            && real == stat.times.change
        {
            stat.times.change = told;
        }
        stat
    }

    /// [MS-FSCC] 2.4.45 DeletePending.
    pub(crate) fn delete_pending(&self) -> bool {
        self.inner().delete_pending
    }

    /// FileDispositionInformation.
    pub(crate) fn set_delete_pending(&self, delete: bool) {
        self.inner().delete_pending = delete;
    }

    /// Whether an open with `access` and `share` would be tolerated by the opens there are.
    pub(crate) fn tolerates(&self, access: AccessMask, share: ShareAccess) -> bool {
        self.inner().opens.iter().all(|o| compatible((o.access, o.share), (access, share)))
    }

    /// Whether all its opens but `except` share deletion.
    pub(crate) fn shares_delete(&self, except: FileId) -> bool {
        self.inner().opens.iter().all(|o| o.id == except || o.share.contains(ShareAccess::DELETE))
    }

    /// Gives all opens of it that are known by `from` the name `to`.
    pub(crate) fn renamed(&self, from: &RelPath, to: &RelPath) {
        let opens: Vec<Arc<Open>> = self.inner().opens.iter().filter_map(|o| o.open.upgrade()).collect();
        for open in opens {
            let mut state = open.state();
            if state.path == *from {
                state.path = to.clone();
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

    /// Whether somebody's lock forbids an open to read a range ([MS-FSA] 2.1.4.10).
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
    pub(crate) fn lock(&self, owner: FileId, ranges: &[LockRange]) -> Result<(), NtStatus> {
        let mut inner = self.inner();
        inner.must_be_open(owner)?;
        let result = inner.locks.lock(owner, ranges);
        self.locks_present.store(!inner.locks.is_empty(), Ordering::Release);
        result
    }

    /// As [`Self::lock`] for one range; where it is not free, joins the queue (once) to be woken by
    /// [`Mail::Wake`]. True where it was taken.
    pub(crate) fn lock_or_wait(
        &self,
        owner: FileId,
        range: LockRange,
        connection: ConnectionId,
        token: u64,
    ) -> Result<bool, NtStatus> {
        let mut inner = self.inner();
        inner.must_be_open(owner)?;
        match inner.locks.lock(owner, &[range]) {
            Ok(()) => {
                inner.waiters.retain(|w| w.token != token);
                self.locks_present.store(true, Ordering::Release);
                Ok(true)
            }
            Err(NtStatus::LOCK_NOT_GRANTED) => {
                if !inner.waiters.iter().any(|w| w.token == token) {
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

    /// A request waits no more; who waited behind it may go on.
    pub(crate) fn stop_waiting(&self, token: u64, server: &Server) {
        let mut inner = self.inner();
        inner.waiters.retain(|w| w.token != token);
        self.locks_changed(&inner, server);
    }

    /// Releases a lock with exactly this range. False where there is none.
    pub(crate) fn unlock(&self, owner: FileId, offset: u64, length: u64, server: &Server) -> bool {
        let mut inner = self.inner();
        let found = inner.locks.unlock(owner, offset, length);
        if found {
            self.locks_changed(&inner, server);
        }
        found
    }

    /// Wakes, in order of arrival, the waiters that can all have their ranges now.
    fn locks_changed(&self, inner: &Inner, server: &Server) {
        self.locks_present.store(!inner.locks.is_empty(), Ordering::Release);
        let mut promised: Vec<&Waiter> = Vec::new();
        for waiter in &inner.waiters {
            let free = inner.locks.grants(waiter.owner, waiter.range)
                && promised.iter().all(|p| !p.range.excludes(p.owner, waiter.range, waiter.owner));
            if free {
                server.post(waiter.connection, Mail::Wake(waiter.token));
                promised.push(waiter);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: AccessMask = AccessMask::FILE_READ_DATA;
    const WRITE: AccessMask = AccessMask::FILE_WRITE_DATA;
    const NONE: ShareAccess = ShareAccess::empty();

    #[test]
    fn sharing_is_checked_both_ways() {
        let all = ShareAccess::READ | ShareAccess::WRITE | ShareAccess::DELETE;
        assert!(compatible((READ, ShareAccess::READ), (READ, ShareAccess::READ)));
        assert!(!compatible((READ, NONE), (READ, all)), "the second reads what the first does not share");
        assert!(!compatible((READ, all), (READ, NONE)), "the first reads what the second does not share");
        assert!(!compatible((WRITE, all), (READ, ShareAccess::READ)));
        assert!(compatible((WRITE, all), (READ, all)));
        assert!(!compatible((AccessMask::DELETE, all), (READ, ShareAccess::READ | ShareAccess::WRITE)));
        assert!(!compatible((AccessMask::FILE_EXECUTE, all), (READ, ShareAccess::WRITE)));
    }

    #[test]
    fn opens_for_attributes_share_with_everything() {
        let stat = AccessMask::FILE_READ_ATTRIBUTES | AccessMask::SYNCHRONIZE;
        assert!(compatible((stat, NONE), (READ | WRITE, NONE)));
        assert!(compatible((READ | WRITE, NONE), (stat, NONE)));
    }
}
