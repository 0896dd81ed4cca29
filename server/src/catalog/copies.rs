//! Snapshots, and volumes that are made from snapshots or from other volumes.
//!
//! A tree is copied without the catalog's lock, so that other operations continue. Meanwhile the copy's record marks it as
//! being made, and its source is registered so that it is not deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use forebay_smb::engine::SnapshotConfig;
use tracing::{error, info, warn};

use super::{
    Catalog, CatalogError, Found, State, Wish, admit, check_id, check_labels, empty_trash, no_room,
    remove_failed,
};
use crate::clock;
use crate::config::PoolQuota;
use crate::gate::Gate;
use crate::limits::{COPY_PATIENCE, COPY_PAUSE_MAX, SNAPSHOTS_MAX, SNAPSHOTS_SHOWN_MAX};
use crate::pool::{Copied, CopyError, Copying, copy_tree};
use crate::snapshot::Snapshot;
use crate::volume::{Phase, Source};

/// An existing snapshot.
#[derive(Clone, Debug)]
pub struct FoundSnapshot {
    /// Its record.
    pub snapshot: Snapshot,
    /// Its pool.
    pub pool: String,
}

impl Catalog {
    /// Makes a snapshot of a volume; returns an existing snapshot of the same volume.
    ///
    /// # Errors
    /// Why the snapshot was not made.
    pub fn create_snapshot(
        &self,
        id: &str,
        volume_id: &str,
        labels: BTreeMap<String, String>,
    ) -> Result<FoundSnapshot, CatalogError> {
        check_id("snapshot_id", id)?;
        check_labels(&labels)?;
        let mut state = self.lock();
        if let Some((index, snapshot)) = state.snapshot(id) {
            return match snapshot.phase {
                Phase::Making => Err(CatalogError::Busy(format!("snapshot {id} is being made"))),
                Phase::Deleting => Err(CatalogError::Busy(format!("snapshot {id} is being deleted"))),
                Phase::Ready if snapshot.volume_id != volume_id => Err(CatalogError::Exists(format!(
                    "snapshot {id} exists and is of volume {}",
                    snapshot.volume_id
                ))),
                Phase::Ready => Ok(FoundSnapshot { pool: state.pools[index].name.clone(), snapshot }),
            };
        }
        if state.pools.iter().map(|pool| pool.snapshots.len()).sum::<usize>() >= SNAPSHOTS_MAX {
            return Err(CatalogError::Exhausted(format!("the server has its {SNAPSHOTS_MAX} snapshots")));
        }
        let index = state.index_of(volume_id)?;
        state.check_shares_extents(index)?;
        let gate = state.gate(volume_id);
        let pool = &mut state.pools[index];
        let record = pool.records[volume_id].clone();
        let used_bytes = pool.usage(&record).bytes;
        if pool.quota == PoolQuota::Project {
            let room = pool.unprovisioned()?;
            if used_bytes > room {
                return Err(CatalogError::Exhausted(no_room(pool, used_bytes, room)));
            }
        }
        let snapshot = Snapshot {
            snapshot_id: id.to_owned(),
            volume_id: volume_id.to_owned(),
            capacity_bytes: record.capacity_bytes,
            used_bytes,
            project: None,
            labels,
            created: clock::wall().0,
            phase: Phase::Making,
        };
        let source = pool.data_path(volume_id);
        let copying = pool.begin_snapshot(snapshot, &source)?;
        let (mut state, copied) =
            self.copy(state, Source::Volume(volume_id.to_owned()), &copying, gate.as_ref());
        let pool = &mut state.pools[index];
        let done = copied.and_then(|copied| {
            pool.complete_snapshot(id)?;
            Ok(copied)
        });
        match done {
            Ok(Copied { inodes, .. }) => {
                self.show_snapshots(&mut state, volume_id);
                let pool = &state.pools[index];
                let snapshot = pool.snapshots[id].clone();
                let used_bytes = snapshot.used_bytes;
                info!(
                    snapshot = id,
                    volume = volume_id,
                    pool = pool.name,
                    inodes,
                    used_bytes,
                    "snapshot created"
                );
                Ok(FoundSnapshot { pool: pool.name.clone(), snapshot })
            }
            Err(reason) => {
                if let Err(left) = pool.delete_snapshot(id) {
                    error!(snapshot = id, error = %left, "a snapshot that failed will be removed at the next start");
                }
                empty_trash(pool);
                Err(reason)
            }
        }
    }

    /// Removes a snapshot; a missing snapshot is not an error.
    ///
    /// # Errors
    /// Why the snapshot was not removed.
    pub fn delete_snapshot(&self, id: &str) -> Result<(), CatalogError> {
        let mut state = self.lock();
        let Some((index, snapshot)) = state.snapshot(id) else { return Ok(()) };
        if snapshot.phase == Phase::Making {
            return Err(CatalogError::Busy(format!("snapshot {id} is being made")));
        }
        if state.sources.contains(&Source::Snapshot(id.to_owned())) {
            return Err(CatalogError::Busy(format!("a volume is being made of snapshot {id}")));
        }
        let deleted = state.pools[index].delete_snapshot(id);
        // Its open files stay readable until they are closed.
        state.shown.remove(id);
        self.show_snapshots(&mut state, &snapshot.volume_id);
        deleted?;
        empty_trash(&state.pools[index]);
        info!(snapshot = id, "snapshot deleted");
        Ok(())
    }

    /// At most `limit` snapshots with ids after `after`, in order of their id, and whether there are more. `id` and
    /// `volume_id` restrict the list to one snapshot and to one volume's snapshots, unless they are empty.
    #[must_use]
    pub fn list_snapshots(
        &self,
        after: &str,
        limit: usize,
        id: &str,
        volume_id: &str,
    ) -> (Vec<FoundSnapshot>, bool) {
        let state = self.lock();
        let mut all: Vec<FoundSnapshot> = state
            .pools
            .iter()
            .flat_map(|pool| pool.snapshots.values().map(move |snapshot| (pool, snapshot)))
            .filter(|(_, snapshot)| snapshot.phase == Phase::Ready && snapshot.snapshot_id.as_str() > after)
            .filter(|(_, snapshot)| id.is_empty() || snapshot.snapshot_id == id)
            .filter(|(_, snapshot)| volume_id.is_empty() || snapshot.volume_id == volume_id)
            .map(|(pool, snapshot)| FoundSnapshot { snapshot: snapshot.clone(), pool: pool.name.clone() })
            .collect();
        all.sort_by(|a, b| a.snapshot.snapshot_id.cmp(&b.snapshot.snapshot_id));
        let more = all.len() > limit;
        all.truncate(limit);
        (all, more)
    }

    /// Makes a volume from a snapshot or from another volume.
    pub(super) fn create_from(
        &self,
        mut state: MutexGuard<'_, State>,
        wish: &Wish,
        source: &Source,
    ) -> Result<Found, CatalogError> {
        let (index, path, capacity_bytes, gate) = match source {
            Source::Snapshot(id) => {
                let found = state.snapshot(id).filter(|(_, snapshot)| snapshot.phase == Phase::Ready);
                let (index, snapshot) =
                    found.ok_or_else(|| CatalogError::NoSnapshot(id.chars().take(80).collect()))?;
                (index, state.pools[index].snapshot_path(id), snapshot.capacity_bytes, None)
            }
            Source::Volume(id) => {
                let index = state.index_of(id)?;
                let pool = &state.pools[index];
                (index, pool.data_path(id), pool.records[id].capacity_bytes, state.gate(id))
            }
        };
        state.check_shares_extents(index)?;
        let pool = &mut state.pools[index];
        if !wish.pool.is_empty() && wish.pool != pool.name {
            return Err(CatalogError::Invalid(format!(
                "pool must be that of the source, {}: files share extents only within one file system",
                pool.name
            )));
        }
        if wish.capacity_bytes < capacity_bytes {
            return Err(CatalogError::Invalid(format!(
                "capacity_bytes must be at least that of the source, {capacity_bytes}"
            )));
        }
        let quota = admit(pool, wish)?;
        let copying = pool.begin(wish.record(quota), &path)?;
        let (mut state, copied) = self.copy(state, source.clone(), &copying, gate.as_ref());
        let pool = &mut state.pools[index];
        if let Err(reason) = copied.and_then(|_| Ok(pool.complete(&wish.volume_id)?)) {
            remove_failed(pool, &wish.volume_id);
            return Err(reason);
        }
        self.begin_serving(&mut state, index, &wish.volume_id)
    }

    /// Makes the newest [`SNAPSHOTS_SHOWN_MAX`] snapshots of a volume visible to its clients. Snapshots of a deleted volume
    /// with the same id are excluded.
    pub(super) fn show_snapshots(&self, state: &mut State, volume_id: &str) {
        let State { pools, served, shown, .. } = state;
        let Some(volume) = served.get(volume_id) else { return };
        let Some(pool) = pools.iter().find(|pool| pool.records.contains_key(volume_id)) else { return };
        let since = pool.records[volume_id].created;
        let mut own: Vec<&Snapshot> = pool
            .snapshots
            .values()
            .filter(|s| s.volume_id == volume_id && s.phase == Phase::Ready && s.created >= since)
            .collect();
        own.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.created));
        for hidden in own.drain(own.len().min(SNAPSHOTS_SHOWN_MAX)..) {
            shown.remove(&hidden.snapshot_id);
        }
        let configs = own.into_iter().filter_map(|Snapshot { snapshot_id, created, .. }| {
            let backend = match shown.get(snapshot_id) {
                Some(open) => Arc::clone(open),
                None => match volume.snapshot_at(&pool.snapshot_path(snapshot_id)) {
                    Ok(open) => {
                        shown.insert(snapshot_id.clone(), Arc::clone(&open));
                        open
                    }
                    Err(error) => {
                        warn!(snapshot = snapshot_id, %error, "clients cannot look into a snapshot");
                        return None;
                    }
                },
            };
            Some(SnapshotConfig { taken: *created, backend: backend.handle() })
        });
        self.server.set_snapshots(volume_id, configs.collect());
    }

    /// Copies a tree and puts it on stable storage, without holding the lock.
    fn copy<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        source: Source,
        copying: &Copying,
        gate: Option<&Arc<Gate>>,
    ) -> (MutexGuard<'a, State>, Result<Copied, CatalogError>) {
        state.sources.push(source.clone());
        drop(state);
        let copied = copy_and_sync(copying, gate);
        let mut state = self.lock();
        if let Some(at) = state.sources.iter().position(|of| *of == source) {
            state.sources.swap_remove(at);
        }
        (state, copied)
    }
}

impl State {
    /// Volumes that have snapshots.
    pub(super) fn with_snapshots(&self) -> BTreeSet<String> {
        let snapshots = self.pools.iter().flat_map(|pool| pool.snapshots.values());
        snapshots.map(|snapshot| snapshot.volume_id.clone()).collect()
    }

    /// Hides the snapshots of a deleted volume.
    pub(super) fn hide_snapshots(&mut self, volume_id: &str) {
        let all = self.pools.iter().flat_map(|pool| pool.snapshots.values());
        for snapshot in all.filter(|snapshot| snapshot.volume_id == volume_id) {
            self.shown.remove(&snapshot.snapshot_id);
        }
    }

    fn index_of(&self, volume_id: &str) -> Result<usize, CatalogError> {
        let holds = |pool: &crate::pool::Pool| {
            pool.records.get(volume_id).is_some_and(|record| record.phase == Phase::Ready)
        };
        let index = self.pools.iter().position(holds);
        index.ok_or_else(|| CatalogError::NotFound(volume_id.chars().take(80).collect()))
    }

    fn snapshot(&self, id: &str) -> Option<(usize, Snapshot)> {
        let mut pools = self.pools.iter().enumerate();
        pools.find_map(|(index, pool)| pool.snapshots.get(id).map(|snapshot| (index, snapshot.clone())))
    }

    /// The gate of a volume that is served; a volume that is not served does not change.
    fn gate(&self, volume_id: &str) -> Option<Arc<Gate>> {
        self.served.get(volume_id).map(|volume| Arc::clone(volume.gate()))
    }

    fn check_shares_extents(&self, index: usize) -> Result<(), CatalogError> {
        let pool = &self.pools[index];
        match pool.shares_extents()? {
            true => Ok(()),
            false => Err(CatalogError::Precondition(format!("pool {}: {}", pool.name, CopyError::NoReflink))),
        }
    }
}

fn copy_and_sync(copying: &Copying, gate: Option<&Arc<Gate>>) -> Result<Copied, CatalogError> {
    let failed = |reason: CopyError| match reason {
        reason if reason.is_full() => CatalogError::Exhausted(format!("the copy does not fit: {reason}")),
        reason => CatalogError::Precondition(format!("it cannot be copied: {reason}")),
    };
    let sync = || {
        rustix::fs::syncfs(&copying.target)
            .map_err(|errno| CatalogError::Precondition(format!("the pool cannot be synced: {errno}")))
    };
    let closed =
        match gate {
            Some(gate) => {
                // Write dirty data now, and not while clients wait.
                sync()?;
                let closed = gate.close(COPY_PATIENCE);
                Some(closed.map_err(|reason| {
                    CatalogError::Busy(format!("the volume cannot be copied now: {reason}"))
                })?)
            }
            None => None,
        };
    let begun = Instant::now();
    let until = closed.is_some().then(|| begun + COPY_PAUSE_MAX);
    let copied = copy_tree(&copying.source, &copying.target, until).map_err(failed)?;
    drop(closed);
    if gate.is_some() {
        info!(inodes = copied.inodes, pause = ?begun.elapsed(), "changes of the volume waited while it was copied");
    }
    if copied.left_out > 0 {
        warn!(
            entries = copied.left_out,
            "links, devices, sockets and pipes are not served, and not in the copy"
        );
    }
    sync()?;
    Ok(copied)
}
