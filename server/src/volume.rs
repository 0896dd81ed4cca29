//! The record of a volume: everything needed to serve it. It is stored next to the volume's data and replaced atomically.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use forebay_smb::auth::NtHash;
use forebay_smb::engine::{Account, Protection as WireProtection};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::config::is_label;
use crate::limits::RECORD_BYTES_MAX;
use crate::namespace;
use crate::qos::Qos;

/// The version of records that this server writes and reads.
const VERSION: u32 = 1;

/// How a volume's capacity is enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quota {
    /// By project quota.
    Hard,
    /// Not at all.
    None,
}

/// The protection that a volume requires of its traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protection {
    /// The client decides.
    #[default]
    Optional,
    /// Signed or sealed.
    Sign,
    /// Sealed.
    Seal,
}

impl From<Protection> for WireProtection {
    fn from(protection: Protection) -> Self {
        match protection {
            Protection::Optional => Self::Optional,
            Protection::Sign => Self::Sign,
            Protection::Seal => Self::Seal,
        }
    }
}

/// The phase of a volume or snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its data is being copied. If the server ends now, the next start deletes it.
    Making,
    /// It is ready for use.
    Ready,
    /// It is being deleted: the data is removed first, the record last.
    Deleting,
}

impl Phase {
    /// Whether the next start deletes it. Records store only this.
    pub(crate) fn is_to_go(self) -> bool {
        self != Self::Ready
    }

    /// The phase that a record stores.
    pub(crate) fn stored(to_go: bool) -> Self {
        if to_go { Self::Deleting } else { Self::Ready }
    }
}

/// The source that a volume was made from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// A snapshot, by its id.
    Snapshot(String),
    /// Another volume, by its id.
    Volume(String),
}

/// Owner and mode that were requested for the root of an empty volume. What is `None` is the server's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// Owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// Permission bits, at most 0o7777.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
}

impl Root {
    /// # Errors
    /// What is wrong with it.
    pub fn check(self) -> Result<(), &'static str> {
        // All ones mean no change for chown(2).
        if [self.uid, self.gid].contains(&Some(u32::MAX)) {
            return Err("root: 4294967295 is no uid and no gid");
        }
        if self.mode.is_some_and(|mode| mode > 0o7777) {
            return Err("root: the mode must be at most 07777");
        }
        Ok(())
    }
}

/// A user of one volume. The hashes are equivalent to passwords: never printed, and stored only in files of mode 0600.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// Name.
    pub username: String,
    /// Hashes of the valid passwords, newest first.
    pub hashes: Vec<NtHash>,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential").field("username", &self.username).finish_non_exhaustive()
    }
}

impl From<&Credential> for Account {
    fn from(credential: &Credential) -> Self {
        Self { username: credential.username.clone(), hashes: credential.hashes.clone() }
    }
}

/// A volume's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// 1..=63 of `[a-z0-9-]`; the share's name.
    pub volume_id: String,
    /// Requested capacity in bytes; enforced only if `quota` is hard.
    pub capacity_bytes: u64,
    /// How it is enforced.
    pub quota: Quota,
    /// The project on its files, if it has a hard quota.
    pub project: Option<u32>,
    /// The required protection of its traffic.
    pub protection: Protection,
    /// The accounts that may open it; the first is the current one.
    pub accounts: Vec<Credential>,
    /// The caller's labels.
    pub labels: BTreeMap<String, String>,
    /// FILETIME.
    pub created: u64,
    /// Volume serial number.
    pub serial: u32,
    /// Limits and priority.
    pub qos: Qos,
    /// The source that it was made from; `None` if it began empty.
    pub source: Option<Source>,
    /// What was requested for its root.
    pub root: Option<Root>,
    /// Its current phase.
    pub phase: Phase,
}

/// The record as it is stored.
#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    volume_id: String,
    capacity_bytes: u64,
    quota: Quota,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    project: Option<u32>,
    protection: Protection,
    accounts: Vec<StoredAccount>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    created: u64,
    serial: u32,
    #[serde(default, skip_serializing_if = "Qos::is_default")]
    qos: Qos,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source: Option<Source>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root: Option<Root>,
    #[serde(default)]
    deleting: bool,
}

#[derive(Serialize, Deserialize)]
struct StoredAccount {
    username: String,
    nt_hashes: Vec<Zeroizing<String>>,
}

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Reading or writing it failed.
    #[error("{path}: {error}")]
    Io {
        /// Of the record.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It is not in the format that this server writes.
    #[error("{path}: damaged record: {reason}: restore it from a backup")]
    Damaged {
        /// Of the record.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

impl Record {
    /// Reads the record at `path`; its name must be the volume's id with `.json`.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn read(path: &Path) -> Result<Self, RecordError> {
        let io = |error| RecordError::Io { path: path.to_owned(), error };
        let damaged = |reason: String| RecordError::Damaged { path: path.to_owned(), reason };
        let mut bytes = Zeroizing::new(Vec::new());
        std::fs::File::open(path).map_err(io)?.take(RECORD_BYTES_MAX).read_to_end(&mut bytes).map_err(io)?;
        // serde_json's errors name fields and positions, not values of text fields.
        let stored: Stored = serde_json::from_slice(&bytes)
            .map_err(|error| damaged(format!("line {} column {}", error.line(), error.column())))?;
        if stored.version != VERSION {
            return Err(damaged(format!("version {} where {VERSION} is known", stored.version)));
        }
        if !is_label(&stored.volume_id) || path.file_stem() != Some(stored.volume_id.as_ref()) {
            return Err(damaged("its volume id is not its file's name".to_owned()));
        }
        if stored.quota == Quota::Hard && (stored.project.is_none() || stored.capacity_bytes == 0) {
            return Err(damaged("a hard quota without project or capacity".to_owned()));
        }
        stored.qos.check().map_err(&damaged)?;
        let accounts = stored
            .accounts
            .into_iter()
            .map(|account| {
                let hashes: Result<Vec<_>, _> =
                    account.nt_hashes.iter().map(|hex| NtHash::from_hex(hex)).collect();
                hashes.map(|hashes| Credential { username: account.username, hashes })
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| damaged("an account's hash is no hash".to_owned()))?;
        Ok(Self {
            volume_id: stored.volume_id,
            capacity_bytes: stored.capacity_bytes,
            quota: stored.quota,
            project: stored.project,
            protection: stored.protection,
            accounts,
            labels: stored.labels,
            created: stored.created,
            serial: stored.serial,
            qos: stored.qos,
            source: stored.source,
            root: stored.root,
            phase: Phase::stored(stored.deleting),
        })
    }

    /// Replaces the record in `directory` atomically: a reader finds the complete old or new record, even after a power cut.
    ///
    /// # Errors
    /// Those of writing it; the old record then still exists.
    pub fn write(&self, directory: &Path) -> Result<(), RecordError> {
        let path = directory.join(format!("{}.json", self.volume_id));
        let io = |error: std::io::Error| RecordError::Io { path: path.clone(), error };
        let stored = Stored {
            version: VERSION,
            volume_id: self.volume_id.clone(),
            capacity_bytes: self.capacity_bytes,
            quota: self.quota,
            project: self.project,
            protection: self.protection,
            accounts: self
                .accounts
                .iter()
                .map(|account| StoredAccount {
                    username: account.username.clone(),
                    nt_hashes: account.hashes.iter().map(NtHash::to_hex).collect(),
                })
                .collect(),
            labels: self.labels.clone(),
            created: self.created,
            serial: self.serial,
            qos: self.qos,
            source: self.source.clone(),
            root: self.root,
            deleting: self.phase.is_to_go(),
        };
        let mut bytes = Zeroizing::new(serde_json::to_vec_pretty(&stored).map_err(|e| io(e.into()))?);
        bytes.push(b'\n');
        replace(&path, &bytes).map_err(io)
    }
}

/// Replaces a file of mode 0600 atomically and durably.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let begun = Instant::now();
    let temporary = path.with_extension("tmp");
    let result = (|| {
        // A temporary file that a killed server left here may have any mode.
        match std::fs::remove_file(&temporary) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&temporary, flags, Mode::from_raw_mode(0o600))?;
        let mut file = std::fs::File::from(fd);
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        sync_directory(path.parent().unwrap_or(Path::new("/")))
    })();
    match &result {
        Ok(()) => namespace::vouch(begun),
        Err(_) => drop(std::fs::remove_file(&temporary)),
    }
    result
}

/// Makes the names in a directory durable.
pub(crate) fn sync_directory(path: &Path) -> std::io::Result<()> {
    std::fs::File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::qos::Priority;

    fn record() -> Record {
        Record {
            volume_id: "pvc-1".to_owned(),
            capacity_bytes: 1 << 30,
            quota: Quota::Hard,
            project: Some(17),
            protection: Protection::Seal,
            accounts: vec![Credential {
                username: "u".to_owned(),
                hashes: vec![NtHash::from_password("correct horse"), NtHash::from_password("old")],
            }],
            labels: BTreeMap::from([("namespace".to_owned(), "default".to_owned())]),
            created: 133_000_000_000_000_000,
            serial: 0x1234_5678,
            qos: Qos { operations_per_second: 500, priority: Priority::Low, ..Qos::default() },
            source: Some(Source::Snapshot("s-1".to_owned())),
            root: Some(Root { uid: Some(1000), gid: None, mode: Some(0o1770) }),
            phase: Phase::Ready,
        }
    }

    #[test]
    fn records_round_trip_and_have_mode_0600() {
        let scratch = tempfile::tempdir().expect("a directory");
        std::fs::write(scratch.path().join("pvc-1.tmp"), "left behind").expect("written");
        record().write(scratch.path()).expect("written");
        let path = scratch.path().join("pvc-1.json");
        assert_eq!(Record::read(&path).expect("read"), record());
        assert_eq!(path.metadata().expect("there").permissions().mode() & 0o777, 0o600);
        let mut second = record();
        second.capacity_bytes = 2 << 30;
        second.write(scratch.path()).expect("replaced");
        assert_eq!(Record::read(&path).expect("read"), second);
        assert_eq!(std::fs::read_dir(scratch.path()).expect("listed").count(), 1, "nothing is left over");
        assert!(!format!("{:?}", record()).contains(&*NtHash::from_password("old").to_hex()));
    }

    #[test]
    fn damaged_record_is_reported_without_its_secrets() {
        let scratch = tempfile::tempdir().expect("a directory");
        record().write(scratch.path()).expect("written");
        let path = scratch.path().join("pvc-1.json");
        let good = std::fs::read_to_string(&path).expect("read");
        let hash = NtHash::from_password("correct horse").to_hex();
        for bad in [
            String::new(),
            good[..good.len() / 2].to_owned(),
            good.replace("\"version\": 1", "\"version\": 2"),
            good.replace("pvc-1", "pvc-2"),
            good.replace("\"project\": 17,", ""),
            good.replace("\"operations_per_second\": 500", "\"operations_per_second\": 1"),
            good.replace(&*hash, "nonsense-that-is-secret"),
            good.replace(&format!("\"{}\"", &*hash), "{\"secret\": 1}"),
        ] {
            assert_ne!(bad, good);
            std::fs::write(&path, &bad).expect("written");
            let error = Record::read(&path).expect_err("damaged").to_string();
            assert!(error.contains("pvc-1.json: damaged record"), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
