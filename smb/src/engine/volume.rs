//! Volumes as shares, and the accounts that can open them.

mod snapshots;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use self::snapshots::SnapshotConfig;
use self::snapshots::Snapshots;
use crate::auth::NtHash;
use crate::engine::activity::Activity;
use crate::engine::change_times::ChangeTimes;
use crate::engine::file::leases::LeaseTable;
use crate::engine::file::table::{FileTable, Files};
use crate::engine::lost::LostOpens;
use crate::engine::mailbox::Mailbox;
use crate::engine::tally::Tally;
use crate::engine::watches::Watches;
use crate::fs::FsHandle;
use crate::limits;
use crate::sync::{AtomicBool, Mutex, MutexGuard};

/// A user that may open one volume and nothing else.
#[derive(Clone)]
pub struct Account {
    /// Name, compared without regard to case.
    pub username: String,
    /// Password hashes that are valid now; two during a rotation of credentials.
    pub hashes: Vec<NtHash>,
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Account").field("username", &self.username).finish_non_exhaustive()
    }
}

/// How a volume's traffic must be protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Protection {
    /// The client decides.
    #[default]
    Optional,
    /// Signed or sealed.
    Sign,
    /// Sealed (SMB 3.x).
    Seal,
}

/// A volume as the daemon registers it.
#[derive(Clone, Debug)]
pub struct VolumeConfig {
    /// The share's name: 1..=63 of `[a-z0-9-]`.
    pub id: String,
    /// Root of this volume in the backend, passed back in [`crate::fs::FsOpKind::Open`].
    pub backend: FsHandle,
    /// The accounts that may open it.
    pub accounts: Vec<Account>,
    /// Required protection of the traffic.
    pub protection: Protection,
    /// Refuse every change.
    pub read_only: bool,
    /// The backend stores extended attributes.
    pub extended_attributes: bool,
    /// Files of the backend can share extents ([`crate::fs::FsOpKind::CloneRange`]), as reported in
    /// FileFsAttributeInformation.
    pub shared_extents: bool,
    /// VolumeSerialNumber of FileFsVolumeInformation.
    pub serial: u32,
    /// VolumeCreationTime, FILETIME.
    pub created: u64,
}

/// A volume that is still in use.
#[derive(Debug, PartialEq, Eq)]
pub struct InUse {
    /// Open files and directories, including those that are kept for disconnected clients.
    pub open_files: usize,
}

/// A volume being served.
pub(crate) struct Volume {
    pub(crate) id: String,
    pub(crate) backend: FsHandle,
    pub(crate) protection: Protection,
    pub(crate) read_only: bool,
    pub(crate) extended_attributes: bool,
    pub(crate) shared_extents: bool,
    pub(crate) serial: u32,
    pub(crate) created: u64,
    /// Share modes, byte-range locks and delete-pending state by file.
    pub(crate) files: Arc<Files>,
    /// Its leases. Clients that may not open the volume cannot use them.
    pub(crate) leases: LeaseTable,
    /// Directories of the volume that clients watch.
    pub(crate) watches: Watches,
    pub(crate) change_times: ChangeTimes,
    /// Server resources that its clients use.
    pub(crate) used: Used,
    /// Work that its clients cause.
    pub(crate) activity: Arc<Activity>,
    /// Its opens that ended with their session.
    lost: Mutex<LostOpens>,
    /// Set under the lock of `files` when the volume is being removed: no new tree connects or opens. Also set for a
    /// snapshot that clients may no longer access.
    pub(crate) removed: AtomicBool,
    /// Active TreeConnects.
    pub(crate) trees: AtomicU32,
    pub(crate) snapshots: Snapshots,
    /// It is a snapshot.
    pub(crate) is_snapshot: bool,
}

/// Resources that the clients of one volume use, limited so that enough is left for other volumes.
pub(crate) struct Used {
    pub(crate) sessions: Tally,
    /// Connections on which a user of this volume was the first to log on.
    pub(crate) connections: Tally,
    pub(crate) opens: Tally,
    /// Named pipes of its users.
    pub(crate) pipes: Tally,
    /// Opens without a session.
    pub(crate) kept: Tally,
    /// Byte-range locks.
    pub(crate) locks: Tally,
    /// Waiting requests.
    pub(crate) waiting: Tally,
    /// Bytes of the frames of waiting requests.
    pub(crate) parked_bytes: Tally,
    /// Directory entries that were fetched and not sent yet.
    pub(crate) listed: Tally,
    /// Bytes of QUERY_DIRECTORY responses that are being built or not sent yet.
    pub(crate) dir_answers: Tally,
}

impl Default for Used {
    fn default() -> Self {
        Self {
            sessions: Tally::new(limits::SESSIONS_PER_VOLUME_MAX),
            connections: Tally::new(limits::CONNECTIONS_PER_VOLUME_MAX),
            opens: Tally::new(limits::OPENS_PER_VOLUME_MAX),
            pipes: Tally::new(limits::PIPES_PER_VOLUME_MAX),
            kept: Tally::new(limits::KEPT_OPENS_PER_VOLUME_MAX),
            locks: Tally::new(limits::LOCKS_PER_VOLUME_MAX),
            waiting: Tally::new(limits::ASYNC_PER_VOLUME_MAX),
            parked_bytes: Tally::new(limits::PARKED_BYTES_PER_VOLUME_MAX),
            listed: Tally::new(limits::DIR_PENDING_PER_VOLUME_MAX),
            dir_answers: Tally::new(limits::DIR_ANSWER_BYTES_PER_VOLUME_MAX),
        }
    }
}

impl Volume {
    pub(crate) fn new(config: VolumeConfig, mailbox: Arc<Mailbox>) -> Self {
        Self {
            id: config.id,
            backend: config.backend,
            protection: config.protection,
            read_only: config.read_only,
            extended_attributes: config.extended_attributes,
            shared_extents: config.shared_extents,
            serial: config.serial,
            created: config.created,
            files: Arc::new(Files::new(mailbox)),
            leases: LeaseTable::default(),
            watches: Watches::default(),
            change_times: ChangeTimes::default(),
            used: Used::default(),
            activity: Arc::default(),
            lost: Mutex::default(),
            removed: AtomicBool::new(false),
            trees: AtomicU32::new(0),
            snapshots: Snapshots::default(),
            is_snapshot: false,
        }
    }

    /// Creates a snapshot of `volume`.
    pub(crate) fn snapshot_of(volume: &Self, backend: FsHandle, mailbox: Arc<Mailbox>) -> Self {
        let config = VolumeConfig {
            id: volume.id.clone(),
            backend,
            accounts: Vec::new(),
            protection: volume.protection,
            read_only: true,
            extended_attributes: volume.extended_attributes,
            shared_extents: volume.shared_extents,
            serial: volume.serial,
            created: volume.created,
        };
        Self { is_snapshot: true, ..Self::new(config, mailbox) }
    }

    pub(crate) fn lost(&self) -> MutexGuard<'_, LostOpens> {
        self.lost.lock().expect("no panic under this lock")
    }

    /// Closes the volume for new opens, unless it has opens and `force` is not set. This is decided under the lock under
    /// which opens are registered, so that clients of a volume that stays are not affected.
    pub(crate) fn remove(&self, force: bool) -> Result<(), InUse> {
        let mut files = self.files();
        files.close(force).map_err(|open_files| InUse { open_files })?;
        self.removed.store(true, Ordering::Release);
        Ok(())
    }

    pub(crate) fn files(&self) -> MutexGuard<'_, FileTable> {
        self.files.lock()
    }
}

/// Accounts by upper-cased user name, each with the id of the volume that it can open.
#[derive(Default)]
pub(crate) struct Accounts {
    by_name: HashMap<String, (Account, String)>,
}

impl Accounts {
    /// Replaces all accounts of `volume`. If another volume has one of the names, returns that name as the error.
    pub(crate) fn set(&mut self, volume: &str, accounts: Vec<Account>) -> Result<(), String> {
        for account in &accounts {
            if let Some((_, owner)) = self.by_name.get(&account.username.to_uppercase())
                && owner != volume
            {
                return Err(account.username.clone());
            }
        }
        self.by_name.retain(|_, (_, owner)| owner != volume);
        for account in accounts {
            self.by_name.insert(account.username.to_uppercase(), (account, volume.to_owned()));
        }
        Ok(())
    }

    pub(crate) fn remove(&mut self, volume: &str) {
        self.by_name.retain(|_, (_, owner)| owner != volume);
    }

    pub(crate) fn hashes(&self, username: &str) -> Vec<NtHash> {
        self.by_name.get(&username.to_uppercase()).map(|(a, _)| a.hashes.clone()).unwrap_or_default()
    }

    pub(crate) fn volume_of(&self, username: &str) -> Option<&str> {
        self.by_name.get(&username.to_uppercase()).map(|(_, v)| v.as_str())
    }
}
