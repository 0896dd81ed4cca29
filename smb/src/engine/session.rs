//! Sessions and their tree connects ([MS-SMB2] 3.3.1.8, 3.3.1.9). They outlive connections and are shared by channels.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::crypto::{Cipher, OpeningKey, SealingKey, SigningKey};
use crate::engine::channels::{ChannelLink, ChannelList, NoncePart};
use crate::engine::mail::ConnectionId;
use crate::engine::open::Open;
use crate::engine::pipe::Pipe;
use crate::engine::tally::Taken;
use crate::engine::volume::Volume;
use crate::ids::FileId;
use crate::limits;
use crate::status::NtStatus;
use crate::sync::{AtomicBool, Mutex, MutexGuard};
use crate::time::Now;
use crate::wire::{Dialect, FileTime};

/// An authenticated session.
pub(crate) struct Session {
    pub(crate) id: u64,
    /// The user who logged in, as the client spelled the name.
    pub(crate) username: String,
    /// The one volume that this user may open.
    pub(crate) volume_id: String,
    /// Session.Connection.Dialect and others: properties that a connection must share with the connection that the session
    /// was established on, to become a channel.
    pub(crate) dialect: Dialect,
    pub(crate) client_guid: [u8; 16],
    pub(crate) cipher: Option<Cipher>,
    /// Session.SigningKey: signs the binding of further channels, which then have separate keys.
    pub(crate) signing: SigningKey,
    /// Session.EncryptionKey and Session.DecryptionKey, shared by all channels.
    pub(crate) sealing: Option<(SealingKey, OpeningKey)>,
    pub(crate) established: Now,
    /// Session.ExpirationTime, in milliseconds after `established`; [`NEVER`] if the user's authentication does not expire.
    expires_ms: AtomicU64,
    /// The connection that it was established on uses RDMA.
    pub(crate) over_rdma: bool,
    /// Session.SigningRequired.
    pub(crate) signing_required: AtomicBool,
    /// Session.EncryptData: every request but NEGOTIATE and SESSION_SETUP must be sealed.
    pub(crate) encrypt: AtomicBool,
    /// The client has sent a sealed request.
    pub(crate) seals: AtomicBool,
    /// Logged off, closed by an administrator, or without channels.
    pub(crate) closed: AtomicBool,
    inner: Mutex<Inner>,
    /// Its share of the volume's limit for sessions.
    _counted: Taken,
}

/// See [`Session::is_expired`].
const NEVER: u64 = u64::MAX;

struct Inner {
    channels: ChannelList,
    trees: HashMap<u32, Arc<TreeConnect>>,
    next_tree: u32,
    opens: HashMap<u64, Arc<Open>>,
    pipes: HashMap<u64, Arc<Pipe>>,
}

impl Inner {
    fn take_opens(&mut self) -> Vec<Arc<Open>> {
        for (_, tree) in self.trees.drain() {
            tree.disconnected.store(true, Ordering::Release);
        }
        self.pipes.clear();
        self.opens.drain().map(|(_, open)| open).collect()
    }
}

/// A tree connect.
pub(crate) struct TreeConnect {
    pub(crate) id: u32,
    pub(crate) share: Share,
    /// TreeConnect.MaximalAccess.
    pub(crate) access: u32,
    /// Share.EncryptData of a volume that requires it.
    pub(crate) encrypt: bool,
    disconnected: AtomicBool,
}

impl TreeConnect {
    /// Whether TREE_DISCONNECT or the end of the session has removed it.
    pub(crate) fn is_disconnected(&self) -> bool {
        self.disconnected.load(Ordering::Acquire)
    }
}

/// The target of a tree connect.
pub(crate) enum Share {
    /// A volume.
    Volume(Arc<Volume>),
    /// `IPC$`: named pipes, and FSCTLs on the server as a whole.
    Ipc,
}

impl Drop for TreeConnect {
    fn drop(&mut self) {
        if let Share::Volume(volume) = &self.share {
            volume.trees.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Result of the removal of a channel.
pub(crate) struct RemovedChannel {
    /// It was the session's last channel.
    pub(crate) last: bool,
    /// Opens to close, or to keep if `lost`.
    pub(crate) opens: Vec<Arc<Open>>,
    /// The session was active until then: no request ended it.
    pub(crate) lost: bool,
}

/// Parameters of a new session.
pub(crate) struct NewSession {
    pub(crate) id: u64,
    pub(crate) username: String,
    pub(crate) volume_id: String,
    pub(crate) dialect: Dialect,
    pub(crate) client_guid: [u8; 16],
    pub(crate) cipher: Option<Cipher>,
    pub(crate) signing: SigningKey,
    pub(crate) sealing: Option<(SealingKey, OpeningKey)>,
    pub(crate) established: Now,
    /// When the user's authentication expires.
    pub(crate) expires: Option<FileTime>,
    pub(crate) signing_required: bool,
    pub(crate) encrypt: bool,
    /// The connection that the session is established on, and the peer of that connection.
    pub(crate) connection: ConnectionId,
    pub(crate) link: ChannelLink,
    pub(crate) counted: Taken,
}

impl Session {
    pub(crate) fn new(new: NewSession) -> Self {
        let session = Self {
            id: new.id,
            username: new.username,
            volume_id: new.volume_id,
            dialect: new.dialect,
            client_guid: new.client_guid,
            cipher: new.cipher,
            signing: new.signing,
            sealing: new.sealing,
            established: new.established,
            expires_ms: AtomicU64::new(NEVER),
            over_rdma: new.link.over_rdma,
            signing_required: AtomicBool::new(new.signing_required),
            encrypt: AtomicBool::new(new.encrypt),
            seals: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            inner: Mutex::new(Inner {
                channels: ChannelList::new(new.connection, new.link),
                trees: HashMap::new(),
                next_tree: 1,
                opens: HashMap::new(),
                pipes: HashMap::new(),
            }),
            _counted: new.counted,
        };
        session.set_expires(new.expires, new.established);
        session
    }

    /// Sets Session.ExpirationTime. From then on, it is measured by the monotonic clock.
    pub(crate) fn set_expires(&self, expires: Option<FileTime>, now: Now) {
        let expires_ms = expires.map_or(NEVER, |expires| {
            let left_ms = expires.0.saturating_sub(now.wall.0) / 10_000;
            let age = now.instant.saturating_duration_since(self.established.instant);
            left_ms.saturating_add(age.as_millis() as u64)
        });
        self.expires_ms.store(expires_ms, Ordering::Relaxed);
    }

    /// Whether Session.State is Expired ([MS-SMB2] 3.3.5.2.9): the user must authenticate again.
    pub(crate) fn is_expired(&self, now: Instant) -> bool {
        let expires_ms = self.expires_ms.load(Ordering::Relaxed);
        expires_ms != NEVER
            && now.saturating_duration_since(self.established.instant).as_millis() >= u128::from(expires_ms)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// Connects a tree. `STATUS_INSUFFICIENT_RESOURCES` beyond the limit.
    pub(crate) fn connect(
        &self,
        share: Share,
        access: u32,
        encrypt: bool,
    ) -> Result<Arc<TreeConnect>, NtStatus> {
        if let Share::Volume(volume) = &share {
            volume.trees.fetch_add(1, Ordering::AcqRel);
        }
        let mut tree = TreeConnect { id: 0, share, access, encrypt, disconnected: AtomicBool::new(false) };
        let mut inner = self.inner();
        if inner.trees.len() >= limits::TREES_PER_SESSION_MAX {
            return Err(NtStatus::INSUFFICIENT_RESOURCES);
        }
        while tree.id == 0 || tree.id == u32::MAX || inner.trees.contains_key(&tree.id) {
            tree.id = inner.next_tree;
            inner.next_tree = inner.next_tree.wrapping_add(1);
        }
        let tree = Arc::new(tree);
        inner.trees.insert(tree.id, Arc::clone(&tree));
        Ok(tree)
    }

    pub(crate) fn tree(&self, id: u32) -> Option<Arc<TreeConnect>> {
        self.inner().trees.get(&id).cloned()
    }

    /// Removes a tree and returns it with its opens.
    pub(crate) fn disconnect(&self, id: u32) -> Option<(Arc<TreeConnect>, Vec<Arc<Open>>)> {
        let mut inner = self.inner();
        let tree = inner.trees.remove(&id)?;
        tree.disconnected.store(true, Ordering::Release);
        inner.pipes.retain(|_, pipe| pipe.tree_id != id);
        let ids: Vec<u64> =
            inner.opens.iter().filter(|(_, o)| o.tree_id() == id).map(|(volatile, _)| *volatile).collect();
        let opens = ids.iter().filter_map(|volatile| inner.opens.remove(volatile)).collect();
        Some((tree, opens))
    }

    /// Makes a connection a channel. Returns its nonce part, which no other channel has.
    ///
    /// # Errors
    /// Those of [`ChannelList::join`], and `STATUS_USER_SESSION_DELETED` if the session has ended.
    pub(crate) fn join(&self, connection: ConnectionId, link: ChannelLink) -> Result<NoncePart, NtStatus> {
        let mut inner = self.inner();
        if self.closed.load(Ordering::Acquire) {
            return Err(NtStatus::USER_SESSION_DELETED);
        }
        inner.channels.join(connection, link)
    }

    /// Returns the error that [`ChannelList::join`] would return, without joining.
    pub(crate) fn may_join(&self, connection: ConnectionId) -> Result<(), NtStatus> {
        self.inner().channels.may_join(connection)
    }

    /// Sets Session.State while the session is reauthenticated on a channel.
    pub(crate) fn reauthenticate(&self, connection: ConnectionId) {
        self.inner().channels.reauthenticate(connection);
    }

    pub(crate) fn reauthenticated(&self, connection: ConnectionId) {
        self.inner().channels.reauthenticated(connection);
    }

    /// Returns its channels, oldest first; none once the session has ended.
    pub(crate) fn connections(&self) -> Vec<ConnectionId> {
        if self.closed.load(Ordering::Acquire) { Vec::new() } else { self.inner().channels.connections() }
    }

    /// Returns the properties of its channels, oldest first.
    pub(crate) fn links(&self) -> Vec<ChannelLink> {
        self.inner().channels.links()
    }

    /// Whether its messages are sealed, because sealing is required or because the client seals.
    pub(crate) fn is_sealed(&self) -> bool {
        self.encrypt.load(Ordering::Relaxed)
            || self.seals.load(Ordering::Relaxed)
            || self.inner().trees.values().any(|tree| tree.encrypt)
    }

    /// Ends the session. Each of the returned connections must then [`Self::leave`] it.
    pub(crate) fn end(&self) -> Vec<ConnectionId> {
        let inner = self.inner();
        self.closed.store(true, Ordering::Release);
        inner.channels.connections()
    }

    /// Removes a channel. A session without channels has ended. The first caller on an ended session gets all opens that
    /// must be closed.
    pub(crate) fn leave(&self, connection: ConnectionId) -> RemovedChannel {
        let mut inner = self.inner();
        let last = inner.channels.leave(connection);
        let lost = last && !self.closed.load(Ordering::Acquire);
        if last {
            self.closed.store(true, Ordering::Release);
        }
        if !self.closed.load(Ordering::Acquire) {
            return RemovedChannel { last, opens: Vec::new(), lost };
        }
        RemovedChannel { last, opens: inner.take_opens(), lost }
    }

    /// Takes the opens of a session that has ended.
    pub(crate) fn take_opens(&self) -> Vec<Arc<Open>> {
        self.inner().take_opens()
    }

    /// Adds an open. `STATUS_TOO_MANY_OPENED_FILES` beyond the limit, `STATUS_USER_SESSION_DELETED` or
    /// `STATUS_NETWORK_NAME_DELETED` if the session or tree has ended in the meantime.
    pub(crate) fn add_open(&self, open: Arc<Open>) -> Result<(), NtStatus> {
        let mut inner = self.inner();
        if self.closed.load(Ordering::Acquire) {
            return Err(NtStatus::USER_SESSION_DELETED);
        }
        if !inner.trees.contains_key(&open.tree_id()) {
            return Err(NtStatus::NETWORK_NAME_DELETED);
        }
        if inner.opens.len() >= limits::OPENS_PER_SESSION_MAX {
            return Err(NtStatus::TOO_MANY_OPENED_FILES);
        }
        // An open that its client has reclaimed is already counted.
        if open.counted.get().is_none() {
            let taken = open.volume.used.opens.take(1).ok_or(NtStatus::TOO_MANY_OPENED_FILES)?;
            let _ = open.counted.set(taken);
        }
        inner.opens.insert(open.id.volatile, open);
        Ok(())
    }

    pub(crate) fn open(&self, id: FileId) -> Option<Arc<Open>> {
        self.inner().opens.get(&id.volatile).filter(|o| o.id == id).cloned()
    }

    pub(crate) fn remove_open(&self, id: FileId) -> Option<Arc<Open>> {
        self.inner().opens.remove(&id.volatile)
    }

    /// Adds a named pipe. Like [`Self::add_open`], but `STATUS_INSUFFICIENT_RESOURCES` beyond the limit.
    pub(crate) fn add_pipe(&self, pipe: Arc<Pipe>) -> Result<(), NtStatus> {
        let mut inner = self.inner();
        if self.closed.load(Ordering::Acquire) {
            return Err(NtStatus::USER_SESSION_DELETED);
        }
        if !inner.trees.contains_key(&pipe.tree_id) {
            return Err(NtStatus::NETWORK_NAME_DELETED);
        }
        if inner.pipes.len() >= limits::PIPES_PER_SESSION_MAX {
            return Err(NtStatus::INSUFFICIENT_RESOURCES);
        }
        inner.pipes.insert(pipe.id.volatile, pipe);
        Ok(())
    }

    pub(crate) fn pipe(&self, id: FileId) -> Option<Arc<Pipe>> {
        self.inner().pipes.get(&id.volatile).filter(|pipe| pipe.id == id).cloned()
    }

    pub(crate) fn remove_pipe(&self, id: FileId) {
        self.inner().pipes.remove(&id.volatile);
    }

    /// Returns all opens, to list or to end them.
    pub(crate) fn opens(&self) -> Vec<Arc<Open>> {
        self.inner().opens.values().cloned().collect()
    }

    pub(crate) fn counts(&self) -> (usize, Vec<String>) {
        let inner = self.inner();
        let mut volumes: Vec<String> = inner
            .trees
            .values()
            .filter_map(|t| match &t.share {
                Share::Volume(v) => Some(v.id.clone()),
                Share::Ipc => None,
            })
            .collect();
        volumes.sort();
        volumes.dedup();
        (inner.opens.len(), volumes)
    }
}

#[cfg(test)]
pub(super) mod models;
