//! The record of a snapshot. It is stored in the snapshot's pool and replaced atomically.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::is_label;
use crate::limits::RECORD_BYTES_MAX;
use crate::volume::{Phase, RecordError, replace};

/// The version of records that this server writes and reads.
const VERSION: u32 = 1;

/// The metadata of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// 1..=63 of `[a-z0-9-]`.
    pub snapshot_id: String,
    /// The source volume, which may have been deleted.
    pub volume_id: String,
    /// That volume's capacity at the time, in bytes.
    pub capacity_bytes: u64,
    /// The size of its files in bytes; 0 if the pool has no quota and so does not count.
    pub used_bytes: u64,
    /// The project on its files, if the pool has quotas.
    pub project: Option<u32>,
    /// The caller's labels.
    pub labels: BTreeMap<String, String>,
    /// FILETIME.
    pub created: u64,
    /// The group that it was made in.
    pub group_id: Option<String>,
    /// Its current phase.
    pub phase: Phase,
}

/// The record as it is stored.
#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    snapshot_id: String,
    volume_id: String,
    capacity_bytes: u64,
    used_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    project: Option<u32>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    created: u64,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    group_id: Option<String>,
    #[serde(default)]
    deleting: bool,
}

impl Snapshot {
    /// Reads the record at `path`; its name must be the snapshot's id with `.json`.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn read(path: &Path) -> Result<Self, RecordError> {
        let io = |error| RecordError::Io { path: path.to_owned(), error };
        let damaged = |reason: String| RecordError::Damaged { path: path.to_owned(), reason };
        let mut bytes = Vec::new();
        std::fs::File::open(path).map_err(io)?.take(RECORD_BYTES_MAX).read_to_end(&mut bytes).map_err(io)?;
        let stored: Stored = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        if stored.version != VERSION {
            return Err(damaged(format!("version {} where {VERSION} is known", stored.version)));
        }
        if !is_label(&stored.snapshot_id) || path.file_stem() != Some(stored.snapshot_id.as_ref()) {
            return Err(damaged("its snapshot id is not its file's name".to_owned()));
        }
        Ok(Self {
            snapshot_id: stored.snapshot_id,
            volume_id: stored.volume_id,
            capacity_bytes: stored.capacity_bytes,
            used_bytes: stored.used_bytes,
            project: stored.project,
            labels: stored.labels,
            created: stored.created,
            group_id: stored.group_id,
            phase: Phase::stored(stored.deleting),
        })
    }

    /// Replaces the record in `directory` atomically: a reader finds the complete old or new record, even after a power cut.
    ///
    /// # Errors
    /// Those of writing it; the old record then still exists.
    pub fn write(&self, directory: &Path) -> Result<(), RecordError> {
        let path = directory.join(format!("{}.json", self.snapshot_id));
        let io = |error: std::io::Error| RecordError::Io { path: path.clone(), error };
        let stored = Stored {
            version: VERSION,
            snapshot_id: self.snapshot_id.clone(),
            volume_id: self.volume_id.clone(),
            capacity_bytes: self.capacity_bytes,
            used_bytes: self.used_bytes,
            project: self.project,
            labels: self.labels.clone(),
            created: self.created,
            group_id: self.group_id.clone(),
            deleting: self.phase.is_to_go(),
        };
        let mut bytes = serde_json::to_vec_pretty(&stored).map_err(|e| io(e.into()))?;
        bytes.push(b'\n');
        replace(&path, &bytes).map_err(io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_round_trips_and_an_unfinished_snapshot_is_to_be_deleted() {
        let scratch = tempfile::tempdir().expect("a directory");
        let snapshot = Snapshot {
            snapshot_id: "s-1".to_owned(),
            volume_id: "pvc-1".to_owned(),
            capacity_bytes: 1 << 30,
            used_bytes: 4096,
            project: Some(7),
            labels: BTreeMap::from([("name".to_owned(), "snapshot-1".to_owned())]),
            created: 133_000_000_000_000_000,
            group_id: Some("g-1".to_owned()),
            phase: Phase::Ready,
        };
        let path = scratch.path().join("s-1.json");
        snapshot.write(scratch.path()).expect("written");
        assert_eq!(Snapshot::read(&path).expect("read"), snapshot);
        Snapshot { phase: Phase::Making, ..snapshot.clone() }.write(scratch.path()).expect("written");
        assert_eq!(Snapshot::read(&path).expect("read"), Snapshot { phase: Phase::Deleting, ..snapshot });
        let other = scratch.path().join("s-2.json");
        std::fs::rename(&path, &other).expect("renamed");
        let error = Snapshot::read(&other).expect_err("not its name").to_string();
        assert!(error.contains("s-2.json: damaged record: its snapshot id"), "{error}");
    }
}
