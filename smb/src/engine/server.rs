//! State that outlives connections ([MS-SMB2] 3.3.1.5).

mod keeping;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, Weak};
use std::time::Instant;

use crate::auth::NtHash;
use crate::crypto::Cipher;
use crate::engine::activity::Activity;
use crate::engine::app_instances::AppInstances;
use crate::engine::clients::{Breakable, Clients};
use crate::engine::config::{NetworkInterface, Predecessor, ServerConfig};
use crate::engine::creations::Creations;
use crate::engine::kept_opens::KeptOpens;
use crate::engine::mail::{BreakNotice, ConnectionId, Mail};
use crate::engine::mailbox::Mailbox;
use crate::engine::open::{FileIds, Open, OpenInfo};
use crate::engine::session::Session;
use crate::engine::volume::{Account, Accounts, InUse, SnapshotConfig, Volume, VolumeConfig};
use crate::ids::FileId;
use crate::sync::{AtomicBool, Mutex, MutexGuard};

/// A session, as listed for an administrator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// SessionId.
    pub id: u64,
    /// The user who logged in.
    pub username: String,
    /// The transports' names for the peer, one for each channel, oldest first.
    pub client_addresses: Vec<String>,
    /// It was established over RDMA.
    pub over_rdma: bool,
    /// How each of its channels carries payload: "tcp", "tcp-sealed" …
    pub transports: Vec<&'static str>,
    /// "3.1.1" …
    pub dialect: &'static str,
    /// Its messages must be signed.
    pub signed: bool,
    /// Empty, or the cipher that its messages are sealed with.
    pub cipher: &'static str,
    /// FILETIME.
    pub established: u64,
    /// Volumes with a tree connect.
    pub volume_ids: Vec<String>,
    /// Open files and directories.
    pub open_files: u32,
}

/// Usage and activity of the clients of a volume.
#[derive(Clone, Debug)]
pub struct VolumeUse {
    /// The volume's id.
    pub id: String,
    /// Active sessions.
    pub sessions: u64,
    /// Open files and directories, including those that are kept for disconnected clients.
    pub open_files: u64,
    /// Work completed so far.
    pub activity: Arc<Activity>,
}

/// The server as a whole. Cheap to share; all locks in it are for cold paths. A thread that holds one takes only locks that
/// come later in this order: kept opens; the files of a volume; one file; the leases of its volume, CREATEs that can be
/// replayed, files with breaks, sessions, one session; watches; the state of an open; mail.
pub struct Server {
    pub(crate) config: ServerConfig,
    pub(crate) file_ids: FileIds,
    volumes: RwLock<HashMap<String, Arc<Volume>>>,
    accounts: RwLock<Accounts>,
    interfaces: RwLock<Vec<NetworkInterface>>,
    sessions: Mutex<HashMap<u64, Arc<Session>>>,
    next_wake: AtomicU64,
    mailbox: Arc<Mailbox>,
    kept_opens: Mutex<KeptOpens>,
    pub(crate) creations: Arc<Creations>,
    pub(crate) app_instances: Arc<AppInstances>,
    /// Files with a break that awaits acknowledgment.
    breaking: Mutex<Vec<Weak<dyn Breakable>>>,
    is_breaking: AtomicBool,
}

impl Server {
    /// Creates a server without volumes.
    #[must_use]
    pub fn new(config: ServerConfig) -> Arc<Self> {
        Arc::new(Self {
            file_ids: FileIds::new(config.instance),
            config,
            volumes: RwLock::default(),
            accounts: RwLock::default(),
            interfaces: RwLock::default(),
            sessions: Mutex::default(),
            next_wake: AtomicU64::new(1),
            mailbox: Arc::default(),
            kept_opens: Mutex::default(),
            creations: Arc::default(),
            app_instances: Arc::default(),
            breaking: Mutex::default(),
            is_breaking: AtomicBool::new(false),
        })
    }

    /// Starts serving a volume. Replaces a removed volume with the same id.
    ///
    /// # Errors
    /// The user name of an account that another volume already has.
    pub fn add_volume(&self, config: VolumeConfig) -> Result<(), String> {
        self.accounts.write().expect(LOCK).set(&config.id, config.accounts.clone())?;
        let volume = Arc::new(Volume::new(config, Arc::clone(&self.mailbox)));
        self.volumes.write().expect(LOCK).insert(volume.id.clone(), volume);
        Ok(())
    }

    /// Stops serving a volume: no new sessions, tree connects or opens. Its sessions are closed.
    ///
    /// # Errors
    /// [`InUse`] if files are open and `force` is not set; its clients are not affected then. It is not an error if the
    /// volume does not exist.
    pub fn remove_volume(&self, id: &str, force: bool) -> Result<(), InUse> {
        let Some(volume) = self.volume(id) else { return Ok(()) };
        volume.remove(force)?;
        self.accounts.write().expect(LOCK).remove(id);
        self.volumes.write().expect(LOCK).remove(id);
        let sessions: Vec<u64> =
            self.sessions().values().filter(|s| s.volume_id == id).map(|s| s.id).collect();
        for session in sessions {
            self.close_session(session);
        }
        self.end_kept_of(id);
        Ok(())
    }

    /// Replaces the snapshots of a volume that clients may access.
    pub fn set_snapshots(&self, volume: &str, snapshots: Vec<SnapshotConfig>) {
        if let Some(volume) = self.volume(volume) {
            volume.snapshots.set(&volume, snapshots, &self.mailbox);
        }
    }

    /// Replaces the accounts of a volume. Active sessions continue.
    ///
    /// # Errors
    /// The user name of an account that another volume already has.
    pub fn set_accounts(&self, volume: &str, accounts: Vec<Account>) -> Result<(), String> {
        self.accounts.write().expect(LOCK).set(volume, accounts)
    }

    /// Sets the interfaces that FSCTL_QUERY_NETWORK_INTERFACE_INFO reports from now on.
    pub fn set_interfaces(&self, interfaces: Vec<NetworkInterface>) {
        *self.interfaces.write().expect(LOCK) = interfaces;
    }

    /// Returns usage and activity of the clients of each volume, in no particular order.
    #[must_use]
    pub fn volume_uses(&self) -> Vec<VolumeUse> {
        let volumes = self.volumes.read().expect(LOCK);
        let uses = volumes.values().map(|volume| VolumeUse {
            id: volume.id.clone(),
            sessions: volume.used.sessions.used(),
            open_files: volume.used.opens.used(),
            activity: Arc::clone(&volume.activity),
        });
        uses.collect()
    }

    /// Returns the active sessions, sorted by id.
    #[must_use]
    pub fn session_infos(&self) -> Vec<SessionInfo> {
        let mut infos: Vec<SessionInfo> = self
            .sessions()
            .values()
            .map(|s| {
                let (open_files, volume_ids) = s.counts();
                let (links, sealed) = (s.links(), s.is_sealed());
                let signed = s.signing_required.load(Ordering::Relaxed);
                SessionInfo {
                    id: s.id,
                    username: s.username.clone(),
                    transports: links.iter().map(|link| link.transport(sealed, signed)).collect(),
                    client_addresses: links.into_iter().map(|link| link.address).collect(),
                    over_rdma: s.over_rdma,
                    dialect: s.dialect.name(),
                    signed,
                    cipher: s.cipher.filter(|_| sealed).map_or("", Cipher::name),
                    established: s.established.wall.0,
                    volume_ids,
                    open_files: open_files as u32,
                }
            })
            .collect();
        infos.sort_by_key(|i| i.id);
        infos
    }

    /// Returns the open files and directories of one volume or of all, sorted by session. Opens that are kept for clients
    /// without a session come first.
    #[must_use]
    pub fn open_infos(&self, volume: Option<&str>) -> Vec<OpenInfo> {
        let sessions: Vec<Arc<Session>> = self.sessions().values().cloned().collect();
        let kept: Vec<Arc<Open>> = self.kept().opens().cloned().collect();
        let mut infos: Vec<OpenInfo> = sessions
            .iter()
            .flat_map(|s| s.opens())
            .chain(kept)
            .map(|o| o.info())
            .filter(|i| volume.is_none_or(|v| i.volume_id == v))
            .collect();
        infos.sort_by(|a, b| (a.session_id, &a.path).cmp(&(b.session_id, &b.path)));
        infos
    }

    /// Closes a session and all its opens. False if there is no such session.
    pub fn close_session(&self, id: u64) -> bool {
        let Some(session) = self.sessions().remove(&id) else { return false };
        // Its connections close the opens: only connections can emit backend operations.
        for connection in session.end() {
            self.post(connection, Mail::SessionClosed(id));
        }
        true
    }

    /// Whether [`Self::take_mail`] would return any. One load.
    #[must_use]
    pub fn has_mail(&self) -> bool {
        self.mailbox.has_mail()
    }

    /// Takes the mail for other connections, in order. Call this after every call into a connection or the server.
    #[must_use]
    pub fn take_mail(&self) -> Vec<(ConnectionId, Mail)> {
        self.mailbox.take()
    }

    /// Ends breaks that no client acknowledges in time. Call this about once a second; it can post mail.
    pub fn tick(&self, now: Instant) {
        for file in self.breaking() {
            if file.tick(now, self) {
                self.watch(file);
            }
        }
    }

    /// Takes the notifications for the client of this connection.
    pub(crate) fn take_breaks(&self, of: ConnectionId) -> Vec<BreakNotice> {
        self.mailbox.take_breaks(of)
    }

    /// Handles the loss of a channel: breaks that were sent on it are sent on another one.
    pub(crate) fn channel_lost(&self, connection: ConnectionId) {
        for file in self.breaking() {
            file.channel_lost(connection, self);
            self.watch(file);
        }
    }

    /// Takes the files with breaks in progress.
    fn breaking(&self) -> Vec<Arc<dyn Breakable>> {
        if !self.is_breaking.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        let files = std::mem::take(&mut *self.breaking.lock().expect(LOCK));
        files.iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn sessions(&self) -> MutexGuard<'_, HashMap<u64, Arc<Session>>> {
        self.sessions.lock().expect(LOCK)
    }

    pub(crate) fn volume(&self, id: &str) -> Option<Arc<Volume>> {
        self.volumes.read().expect(LOCK).get(id).cloned()
    }

    pub(crate) fn interfaces(&self) -> Vec<NetworkInterface> {
        self.interfaces.read().expect(LOCK).clone()
    }

    pub(crate) fn hashes_of(&self, username: &str) -> Vec<NtHash> {
        self.accounts.read().expect(LOCK).hashes(username)
    }

    pub(crate) fn volume_of(&self, username: &str) -> Option<String> {
        self.accounts.read().expect(LOCK).volume_of(username).map(str::to_owned)
    }

    /// Returns the earlier start that issued this id.
    fn predecessor(&self, id: FileId) -> Option<&Predecessor> {
        let instance = FileIds::instance_of(id);
        if instance == self.config.instance {
            return None;
        }
        self.config.predecessors.iter().find(|start| start.instance == instance)
    }

    /// Whether all acknowledged writes of this open are on stable storage, although the open no longer exists: it belonged
    /// to an earlier start of the server.
    pub(crate) fn is_durable_since(&self, id: FileId) -> bool {
        self.predecessor(id).is_some_and(|start| start.durable)
    }

    /// Whether an earlier start may have issued this id.
    pub(crate) fn is_of_predecessor(&self, id: FileId) -> bool {
        self.predecessor(id).is_some()
    }

    pub(crate) fn next_wake(&self) -> u64 {
        self.next_wake.fetch_add(1, Ordering::Relaxed)
    }
}

impl Clients for Server {
    fn post(&self, to: ConnectionId, what: Mail) {
        self.mailbox.post(to, what);
    }

    fn channels(&self, session_id: u64) -> Vec<ConnectionId> {
        let session = self.sessions().get(&session_id).cloned();
        session.map(|session| session.connections()).unwrap_or_default()
    }

    fn sessions_of_client(&self, client: [u8; 16], volume: &str) -> Vec<u64> {
        let sessions = self.sessions();
        let its = sessions.values().filter(|s| s.client_guid == client && s.volume_id == volume);
        let mut its: Vec<(Instant, u64)> = its.map(|s| (s.established.instant, s.id)).collect();
        its.sort_unstable();
        its.into_iter().map(|(_, id)| id).collect()
    }

    fn watch(&self, file: Arc<dyn Breakable>) {
        let mut breaking = self.breaking.lock().expect(LOCK);
        if !breaking.iter().any(|known| std::ptr::addr_eq(known.as_ptr(), Arc::as_ptr(&file))) {
            breaking.push(Arc::downgrade(&file));
        }
        self.is_breaking.store(true, Ordering::Release);
    }
}

const LOCK: &str = "no panic under this lock";
