//! Snapshots in a pool. They share extents with their volumes and outlive them.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use super::copy::shares_extents;
use super::{Copying, Pool, PoolError, make_private_directory};
use crate::backend::directory::quota::{self, Usage};
use crate::config::PoolQuota;
use crate::snapshot::Snapshot;
use crate::volume::{Phase, sync_directory};

impl Pool {
    fn snapshot_records_path(&self) -> PathBuf {
        self.path.join(".forebay/snapshots")
    }

    /// Path of a snapshot's data.
    #[must_use]
    pub fn snapshot_path(&self, id: &str) -> PathBuf {
        self.path.join("snapshots").join(id)
    }

    /// Whether files of the pool can share extents. Snapshots and clones require it.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn shares_extents(&self) -> Result<bool, PoolError> {
        if let Some(known) = self.shared_extents.get() {
            return Ok(*known);
        }
        let found = shares_extents(self.directory.as_fd())
            .map_err(|e| self.io("trying whether files can share extents", e))?;
        Ok(*self.shared_extents.get_or_init(|| found))
    }

    /// Usage of a snapshot's files, shared extents included.
    #[must_use]
    pub fn snapshot_usage(&self, snapshot: &Snapshot) -> Usage {
        let counted = snapshot.project.map(|project| quota::usage(self.directory.as_fd(), project));
        counted.and_then(Result::ok).unwrap_or_default()
    }

    /// Reads the records of snapshots, and deletes unfinished snapshots. A damaged record is left unchanged.
    pub(super) fn read_snapshots(&mut self) -> Result<(), PoolError> {
        let entries = match std::fs::read_dir(self.snapshot_records_path()) {
            Ok(entries) => entries,
            // The first snapshot creates the directory.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.io("listing its snapshots", error)),
        };
        for entry in entries {
            let path = entry.map_err(|e| self.io("listing its snapshots", e))?.path();
            if path.extension() != Some("json".as_ref()) {
                continue;
            }
            match Snapshot::read(&path) {
                Ok(snapshot) => drop(self.snapshots.insert(snapshot.snapshot_id.clone(), snapshot)),
                Err(error) => {
                    tracing::error!(pool = self.name, %error, "a snapshot is kept and cannot be used");
                }
            }
        }
        let to_go: Vec<String> = self
            .snapshots
            .values()
            // The catalog deletes those of a group, together with the others of the group.
            .filter(|s| s.phase.is_to_go() && s.group_id.is_none())
            .map(|snapshot| snapshot.snapshot_id.clone())
            .collect();
        for id in to_go {
            if let Err(error) = self.delete_snapshot(&id) {
                tracing::error!(pool = self.name, snapshot = id, %error, "a snapshot is being deleted");
            }
        }
        Ok(())
    }

    /// Begins a snapshot that [`super::copy_tree`] fills from the directory at `source`. [`Pool::complete_snapshot`] makes
    /// it available. Until then its record makes the next start delete it.
    ///
    /// # Errors
    /// Why the snapshot was not begun; nothing of it is left.
    pub fn begin_snapshot(&mut self, mut snapshot: Snapshot, source: &Path) -> Result<Copying, PoolError> {
        let (data, records) = (self.path.join("snapshots"), self.snapshot_records_path());
        for path in [&data, &records] {
            make_private_directory(path)
                .and_then(|()| sync_directory(path.parent().unwrap_or(&self.path)))
                .map_err(|e| self.io("making its directories", e))?;
        }
        let target = self.snapshot_path(&snapshot.snapshot_id);
        if target.exists() {
            return Err(PoolError::Orphan { pool: self.name.clone(), path: target });
        }
        snapshot.phase = Phase::Making;
        if self.quota == PoolQuota::Project {
            snapshot.project = Some(self.free_project()?);
        }
        snapshot.write(&records).map_err(|error| self.record_error(error))?;
        let id = snapshot.snapshot_id.clone();
        let project = snapshot.project;
        self.snapshots.insert(id.clone(), snapshot);
        let made = std::fs::create_dir(&target)
            .map_err(|e| self.io("making the snapshot's directory", e))
            .and_then(|()| self.copying(source, &target));
        let made = made.and_then(|copying| match project {
            Some(project) => quota::assign(copying.target.as_fd(), project)
                .map(|()| copying)
                .map_err(|e| self.io("counting what the snapshot has", e.into())),
            None => Ok(copying),
        });
        if made.is_err()
            && let Err(error) = self.delete_snapshot(&id)
        {
            tracing::error!(pool = self.name, snapshot = id, %error, "a snapshot that failed will be removed at the next start");
        }
        made
    }

    /// Marks a snapshot that was begun as ready, after its data was copied.
    ///
    /// # Errors
    /// Why that could not be recorded.
    pub fn complete_snapshot(&mut self, id: &str) -> Result<(), PoolError> {
        let Some(begun) = self.snapshots.get(id) else { return Ok(()) };
        let used_bytes = self.snapshot_usage(begun).bytes;
        let snapshot = Snapshot { phase: Phase::Ready, used_bytes, ..begun.clone() };
        snapshot.write(&self.snapshot_records_path()).map_err(|error| self.record_error(error))?;
        self.snapshots.insert(id.to_owned(), snapshot);
        Ok(())
    }

    /// Deletes a snapshot. It is deleted as soon as its record says so, even if the server is killed before the end. The
    /// data is moved to the trash, and [`super::empty`] removes it.
    ///
    /// # Errors
    /// Those of the file system; a repeated call continues the deletion.
    pub fn delete_snapshot(&mut self, id: &str) -> Result<(), PoolError> {
        self.mark_snapshot_deleting(id)?;
        let Some(project) = self.snapshots.get(id).map(|snapshot| snapshot.project) else { return Ok(()) };
        self.throw_away(id, project, &self.snapshot_path(id), &self.snapshot_records_path())?;
        self.snapshots.remove(id);
        Ok(())
    }

    /// Records that a snapshot is deleted. Its data remains until [`Pool::delete_snapshot`].
    ///
    /// # Errors
    /// Those of writing the record.
    pub fn mark_snapshot_deleting(&mut self, id: &str) -> Result<(), PoolError> {
        let Some(mut snapshot) = self.snapshots.get(id).cloned() else { return Ok(()) };
        if snapshot.phase != Phase::Deleting {
            snapshot.phase = Phase::Deleting;
            let records = self.snapshot_records_path();
            self.with_reserve(|| snapshot.write(&records)).map_err(|error| self.record_error(error))?;
            self.snapshots.insert(id.to_owned(), snapshot);
        }
        Ok(())
    }
}
