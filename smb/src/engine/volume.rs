//! Volumes as shares, and the accounts that open them.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Mutex, MutexGuard};

use super::files::FileTable;
use super::leases::LeaseTable;
use super::watches::Watches;
use crate::auth::NtHash;
use crate::fs::FsHandle;

/// A user that may open one volume and nothing else.
#[derive(Clone)]
pub struct Account {
    /// Name, compared without regard to case.
    pub username: String,
    /// Password hashes that are good now; two while credentials are being rotated.
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
    /// The backend's root of this volume, given back in [`crate::fs::FsOpKind::Open`].
    pub backend: FsHandle,
    /// Who may open it.
    pub accounts: Vec<Account>,
    /// What the wire must be.
    pub protection: Protection,
    /// Refuse every change.
    pub read_only: bool,
    /// VolumeSerialNumber of FileFsVolumeInformation.
    pub serial: u32,
    /// VolumeCreationTime, FILETIME.
    pub created: u64,
}

/// A volume being served.
pub(crate) struct Volume {
    pub(crate) id: String,
    pub(crate) backend: FsHandle,
    pub(crate) protection: Protection,
    pub(crate) read_only: bool,
    pub(crate) serial: u32,
    pub(crate) created: u64,
    /// Share modes, byte-range locks and delete-pending state by file.
    files: Mutex<FileTable>,
    /// Its leases: of no use to who may not open it.
    pub(crate) leases: LeaseTable,
    /// Its directories that clients watch.
    pub(crate) watches: Watches,
    /// Set when the volume is being removed: no new tree connects or opens.
    pub(crate) removed: AtomicBool,
    /// Tree connects in being.
    pub(crate) trees: AtomicU32,
}

impl Volume {
    pub(crate) fn new(config: VolumeConfig) -> Self {
        Self {
            id: config.id,
            backend: config.backend,
            protection: config.protection,
            read_only: config.read_only,
            serial: config.serial,
            created: config.created,
            files: Mutex::new(FileTable::default()),
            leases: LeaseTable::default(),
            watches: Watches::default(),
            removed: AtomicBool::new(false),
            trees: AtomicU32::new(0),
        }
    }

    pub(crate) fn files(&self) -> MutexGuard<'_, FileTable> {
        self.files.lock().expect("no panic under this lock")
    }
}

/// Accounts by upper-cased user name, with the id of the volume that each opens.
#[derive(Default)]
pub(crate) struct Accounts {
    by_name: HashMap<String, (Account, String)>,
}

impl Accounts {
    /// Replaces all accounts of `volume`. A name that another volume has is refused by returning it.
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
