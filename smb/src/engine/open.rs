//! An open file or directory ([MS-SMB2] 3.3.1.10).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use crate::engine::app_instances::Membership;
use crate::engine::channel_sequence::ChannelSequence;
use crate::engine::clients::Clients;
use crate::engine::durable::Durable;
use crate::engine::file::leased_directories::Writer;
use crate::engine::file::leases::LeaseKey;
use crate::engine::file::local_open::LocalOpen;
use crate::engine::file::opener::Cached;
use crate::engine::file::state::FileState;
use crate::engine::file::table::Entered;
use crate::engine::names;
use crate::engine::replay::Replayable;
use crate::engine::tally::Taken;
use crate::engine::volume::Volume;
use crate::engine::watches::CONTENTS;
use crate::fs::{DirEntry, FsHandle, RelPath, StreamName};
use crate::ids::FileId;
use crate::sync::{AtomicBool, Mutex, MutexGuard};

/// An open. Its session owns it, so that it can outlive a connection.
pub(crate) struct Open {
    /// Open.FileId and Open.DurableFileId as sent on the wire.
    pub(crate) id: FileId,
    /// 0 while it is kept for a client without a session.
    session_id: AtomicU64,
    tree_id: AtomicU32,
    pub(crate) volume: Arc<Volume>,
    pub(crate) handle: FsHandle,
    /// The handle of the file, if this is an open of a named stream.
    pub(crate) file_handle: Option<FsHandle>,
    /// Share modes and locks of the file, shared by all its opens.
    pub(crate) file: Arc<FileState>,
    pub(crate) directory: bool,
    /// Open.GrantedAccess.
    pub(crate) access: u32,
    /// CreateOptions as requested.
    pub(crate) options: u32,
    /// Its CREATE had the context of the POSIX extensions.
    pub(crate) posix: bool,
    /// Set when CLOSE begins, so that the open is closed only once.
    pub(crate) closing: AtomicBool,
    /// FilePositionInformation: where the last READ or WRITE ended.
    pub(crate) position: AtomicU64,
    /// Requests in flight on it, by channel sequence number.
    pub(crate) channel_sequence: ChannelSequence,
    /// The grant by which the open outlives the channels of its session.
    pub(crate) durable: OnceLock<Durable>,
    /// Finds the open when its CREATE is replayed.
    pub(crate) replayable: Option<Replayable>,
    /// Membership in an application that can move to another client. Set once the client has the open.
    pub(crate) app_instance: OnceLock<Membership>,
    parent_lease_key: Option<LeaseKey>,
    /// It has written, and leases on its directory were not broken for that.
    unreported: AtomicBool,
    /// It is listed among the opens that have written ([`LeasedDirectories::written`]), for WRITEs that it has not flushed
    /// since or for earlier ones.
    ///
    /// [`LeasedDirectories::written`]: crate::engine::file::leased_directories::LeasedDirectories::written
    is_listed: AtomicBool,
    /// [`LeasedDirectories::grants`] when its WRITEs were last reported.
    ///
    /// [`LeasedDirectories::grants`]: crate::engine::file::leased_directories::LeasedDirectories::grants
    reported: AtomicU64,
    pub(crate) state: Mutex<OpenState>,
    /// Its share of the volume's limit for opens.
    pub(super) counted: OnceLock<Taken>,
}

/// Parameters of a new open.
pub(crate) struct NewOpen {
    pub(crate) id: FileId,
    pub(crate) session_id: u64,
    pub(crate) tree_id: u32,
    pub(crate) volume: Arc<Volume>,
    pub(crate) handle: FsHandle,
    pub(crate) file_handle: Option<FsHandle>,
    pub(crate) stream: Option<StreamName>,
    pub(crate) directory: bool,
    pub(crate) access: u32,
    pub(crate) options: u32,
    pub(crate) posix: bool,
    pub(crate) channel_sequence: u16,
    pub(crate) replayable: Option<Replayable>,
    /// ParentLeaseKey, if the client set it.
    pub(crate) parent_lease_key: Option<LeaseKey>,
    pub(crate) path: RelPath,
}

/// The mutable state of an open.
pub(crate) struct OpenState {
    /// Open.PathName below the volume's root; follows renames by this open.
    pub(crate) path: RelPath,
    /// The named stream; follows renames by this open.
    pub(crate) stream: Option<StreamName>,
    /// FileModeInformation.
    pub(crate) mode: u32,
    /// The pattern of the last QUERY_DIRECTORY, and the entries that were fetched but not sent yet.
    pub(crate) directory: DirectoryCursor,
    /// Open.NextEaEntry ([MS-FSA] 2.1.5.12.12), as an index into the extended attributes of the file.
    pub(crate) next_ea: usize,
    /// Open.LockSequenceArray ([MS-SMB2] 3.3.5.14), `0xff` = invalid.
    pub(crate) lock_sequence: [u8; 65],
}

/// The position of a directory enumeration.
#[derive(Default)]
pub(crate) struct DirectoryCursor {
    /// Open.EnumerationSearchPattern; `None` before the first query.
    pub(crate) pattern: Option<String>,
    /// Fetched from the backend, not yet sent, in reverse order (pop from the end).
    pub(crate) pending: Vec<DirEntry>,
    /// Share of `pending` in the volume's limit. Short fetches are not counted.
    pub(crate) counted: Option<Taken>,
    /// How many of `.` and `..` were sent.
    pub(crate) dots_sent: u8,
    /// The backend has no more entries.
    pub(crate) end: bool,
    /// At least one entry was returned since the start.
    pub(crate) any: bool,
    /// The next fetch from the backend starts at the beginning.
    pub(crate) restart: bool,
}

impl DirectoryCursor {
    /// Adds fetched entries and their share of the volume's limit.
    pub(crate) fn fetched(&mut self, mut entries: Vec<DirEntry>, counted: Option<Taken>) {
        self.end |= entries.is_empty();
        entries.reverse();
        // Another query on the same open may have fetched in the meantime: its entries come first.
        entries.append(&mut self.pending);
        self.pending = entries;
        match (&mut self.counted, counted) {
            (Some(all), Some(more)) => all.join(more),
            (none, more) => *none = more.or(none.take()),
        }
    }

    /// Completes a response: entries that it took from `pending` no longer count against the limit.
    pub(crate) fn settle(&mut self) {
        if self.pending.is_empty() {
            // Free the memory, too: the open can live for a long time.
            self.pending = Vec::new();
            self.counted = None;
        } else if let Some(counted) = &mut self.counted {
            counted.keep(self.pending.len() as u64);
        }
    }
}

impl OpenState {
    pub(crate) fn new(path: RelPath, stream: Option<StreamName>) -> Self {
        let directory = DirectoryCursor::default();
        Self { path, stream, mode: 0, directory, next_ea: 0, lock_sequence: [0xff; 65] }
    }

    /// Returns the path, separated by `/`, followed by `:` and the name of the stream if this is an open of one.
    pub(crate) fn full_name(&self) -> String {
        match &self.stream {
            Some(stream) => format!("{}:{}", self.path.as_str(), stream.as_str()),
            None => self.path.as_str().to_owned(),
        }
    }
}

impl Open {
    pub(crate) fn new(new: NewOpen, entered: Entered) -> Self {
        Self {
            id: new.id,
            session_id: AtomicU64::new(new.session_id),
            tree_id: AtomicU32::new(new.tree_id),
            volume: new.volume,
            handle: new.handle,
            file_handle: new.file_handle,
            file: entered.into_file(),
            directory: new.directory,
            access: new.access,
            options: new.options,
            posix: new.posix,
            closing: AtomicBool::new(false),
            position: AtomicU64::new(0),
            channel_sequence: ChannelSequence::new(new.channel_sequence),
            durable: OnceLock::new(),
            replayable: new.replayable,
            app_instance: OnceLock::new(),
            parent_lease_key: new.parent_lease_key,
            unreported: AtomicBool::new(false),
            is_listed: AtomicBool::new(false),
            reported: AtomicU64::new(0),
            state: Mutex::new(OpenState::new(new.path, new.stream)),
            counted: OnceLock::new(),
        }
    }

    /// Open.Session; 0 while the open is kept for a client without a session.
    pub(crate) fn session_id(&self) -> u64 {
        self.session_id.load(Ordering::Acquire)
    }

    /// Open.TreeConnect.
    pub(crate) fn tree_id(&self) -> u32 {
        self.tree_id.load(Ordering::Acquire)
    }

    /// Whether the open has no session: its client lost the last channel and has not reconnected. No break can be sent.
    pub(crate) fn is_disconnected(&self) -> bool {
        self.session_id() == 0
    }

    /// Detaches the open from its session, which is gone.
    pub(super) fn detach(&self) {
        self.session_id.store(0, Ordering::Release);
    }

    /// Attaches the open to the session of its client, which has reconnected.
    pub(super) fn attach(&self, session_id: u64, tree_id: u32, channel_sequence: u16) {
        self.channel_sequence.restart(channel_sequence);
        self.tree_id.store(tree_id, Ordering::Release);
        self.session_id.store(session_id, Ordering::Release);
    }

    /// Marks the open as closing. True for the one caller that must then close it.
    pub(crate) fn begin_close(&self) -> bool {
        !self.closing.swap(true, Ordering::AcqRel)
    }

    /// Whether the name in a repeated CREATE denotes this open.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        let state = self.state();
        names::denotes(name, self.posix, &state.path, state.stream.as_ref())
    }

    /// Whether this is an open of a named stream.
    pub(crate) fn is_stream(&self) -> bool {
        self.file_handle.is_some()
    }

    /// Whether CLOSE, or another way to end the open, has begun.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Whether its client may keep the handle, by a batch oplock or a lease with HANDLE caching that is not being broken.
    pub(crate) fn keeps_handle(&self) -> bool {
        self.file.keeps_handle(self.id)
    }

    /// Returns what its client may cache, in the form of a CREATE response.
    pub(crate) fn cached(&self) -> Cached {
        self.file.cached(self.id)
    }

    /// Reports a change of the contents. A failed change counts as well, because it may have changed a part of them. Data
    /// that other clients have read becomes invalid, and CHANGE_NOTIFY reports the change.
    pub(crate) fn contents_changed(self: &Arc<Self>, now: Instant, clients: &dyn Clients) {
        self.file.data_changed(self.id, clients);
        self.volume.watches.notify_modified(CONTENTS, self, clients);
        // Changes of named streams do not change the listing of a directory.
        let leased = &self.volume.watches.leased;
        if self.is_stream() || !leased.any() {
            return;
        }
        if !self.file.is_write_cached() {
            self.report_writes(clients);
        } else if !self.unreported.load(Ordering::Acquire) {
            // As on Windows, the report can wait: other clients cannot see what this client has not sent yet either.
            self.unreported.store(true, Ordering::Release);
            if !self.is_listed.swap(true, Ordering::AcqRel) {
                let writer: Weak<Self> = Arc::downgrade(self);
                leased.written(now, writer, clients);
            }
        }
    }

    /// Reports that the client has sent all its writes for the time being: clients that cache the directory get the size
    /// and times.
    pub(crate) fn flushed(&self, clients: &dyn Clients) {
        if self.unreported.swap(false, Ordering::AcqRel) {
            self.report_writes(clients);
        }
    }

    /// Breaks leases on the directory if there may be one that was not yet broken for this open.
    fn report_writes(&self, clients: &dyn Clients) {
        let leased = &self.volume.watches.leased;
        let grants = leased.grants();
        if self.reported.swap(grants, Ordering::AcqRel) != grants {
            leased.changed(&self.path().parent(), self.parent_lease_key, clients);
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, OpenState> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Returns an entry for the list of open files.
    pub(crate) fn info(&self) -> OpenInfo {
        OpenInfo {
            session_id: self.session_id(),
            volume_id: self.volume.id.clone(),
            path: self.state().full_name(),
            access: self.access,
            directory: self.directory,
            byte_range_locks: self.file.locks_of(self.id) as u32,
        }
    }
}

impl Writer for Open {
    fn overdue(&self, clients: &dyn Clients) {
        // A WRITE that finds the open listed has set `unreported` before; this swap makes that visible here.
        self.is_listed.swap(false, Ordering::AcqRel);
        self.flushed(clients);
    }
}

impl LocalOpen for Open {
    fn id(&self) -> FileId {
        self.id
    }

    fn session_id(&self) -> u64 {
        self.session_id()
    }

    fn volume_id(&self) -> &str {
        &self.volume.id
    }

    fn path(&self) -> RelPath {
        self.state().path.clone()
    }

    fn set_path(&self, path: &RelPath) {
        self.state().path.clone_from(path);
        // It may be in another directory now.
        self.reported.store(0, Ordering::Release);
    }

    fn stream(&self) -> Option<StreamName> {
        if self.is_stream() { self.state().stream.clone() } else { None }
    }

    fn parent_lease_key(&self) -> Option<LeaseKey> {
        self.parent_lease_key
    }

    fn is_closing(&self) -> bool {
        self.is_closing()
    }
}

/// An open, as listed for an administrator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenInfo {
    /// The session that holds it; 0 if it is kept for a client that has lost its connections.
    pub session_id: u64,
    /// The volume it is in.
    pub volume_id: String,
    /// Path below the volume's root, followed by `:` and the name of the stream if it is an open of one.
    pub path: String,
    /// Granted access mask.
    pub access: u32,
    /// A directory.
    pub directory: bool,
    /// Byte-range locks that it holds.
    pub byte_range_locks: u32,
}

/// Issues FileIds. A client that has not detected a restart of the server yet still uses ids from before. They must not
/// denote another file, so the ids of each start are distinct.
pub(crate) struct FileIds {
    instance: u64,
    last: AtomicU64,
}

impl FileIds {
    pub(crate) fn new(instance: u64) -> Self {
        Self { instance, last: AtomicU64::new(0) }
    }

    pub(crate) fn next(&self) -> FileId {
        let n = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        FileId { persistent: self.instance.wrapping_add(n), volatile: n }
    }

    /// Returns the id with this persistent half.
    pub(crate) fn of(&self, persistent: u64) -> FileId {
        FileId { persistent, volatile: persistent.wrapping_sub(self.instance) }
    }

    /// Returns the start of the server that issued this id.
    pub(crate) fn instance_of(id: FileId) -> u64 {
        id.persistent.wrapping_sub(id.volatile)
    }
}
