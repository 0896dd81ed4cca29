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
use crate::gate::{Closed, Gate};
use crate::limits::{COPY_PATIENCE, COPY_PAUSE_MAX, SNAPSHOT_GROUP_MAX, SNAPSHOTS_MAX, SNAPSHOTS_SHOWN_MAX};
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

/// A snapshot to be made.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its id.
    pub snapshot_id: String,
    /// Its source.
    pub volume_id: String,
}

/// Selects snapshots. An empty field selects all.
#[derive(Clone, Debug, Default)]
pub struct SnapshotFilter {
    /// The snapshot with this id.
    pub snapshot_id: String,
    /// Snapshots of this volume.
    pub volume_id: String,
    /// Snapshots of this group.
    pub group_id: String,
}

/// A tree to be copied.
struct Copy {
    /// Index of its pool.
    pool: usize,
    source: Source,
    copying: Copying,
    /// The gate of a source that may change.
    gate: Option<Arc<Gate>>,
}

impl Catalog {
    /// Makes a snapshot of a volume; returns an existing snapshot of the same volume.
    ///
    /// # Errors
    /// Why the snapshot was not made.
    pub fn create_snapshot(
        &self,
        member: Member,
        labels: &BTreeMap<String, String>,
    ) -> Result<FoundSnapshot, CatalogError> {
        check_id("snapshot_id", &member.snapshot_id)?;
        check_labels(labels)?;
        let state = self.lock();
        if let Some((index, snapshot)) = state.snapshot(&member.snapshot_id) {
            check_is_ready(&snapshot)?;
            let id = &member.snapshot_id;
            return match &snapshot.group_id {
                Some(group) => {
                    Err(CatalogError::Exists(format!("snapshot {id} exists and belongs to group {group}")))
                }
                None if snapshot.volume_id != member.volume_id => Err(CatalogError::Exists(format!(
                    "snapshot {id} exists and is of volume {}",
                    snapshot.volume_id
                ))),
                None => Ok(FoundSnapshot { pool: state.pools[index].name.clone(), snapshot }),
            };
        }
        let made = self.make_snapshots(state, &[member], labels, None)?;
        Ok(made.into_iter().next().expect("one for each member"))
    }

    /// Makes a snapshot of each of several volumes, all of the same moment, or none. Returns those of an existing group with
    /// the same members, in the order of `members`.
    ///
    /// # Errors
    /// Why the snapshots were not made.
    pub fn create_snapshot_group(
        &self,
        group_id: &str,
        members: &[Member],
        labels: &BTreeMap<String, String>,
    ) -> Result<Vec<FoundSnapshot>, CatalogError> {
        check_id("group_id", group_id)?;
        check_labels(labels)?;
        check_members(members)?;
        let state = self.lock();
        let mut found = state.group(group_id);
        if !found.is_empty() {
            found.iter().try_for_each(|found| check_is_ready(&found.snapshot))?;
            let of = |member: &Member| {
                let matches =
                    |s: &Snapshot| s.snapshot_id == member.snapshot_id && s.volume_id == member.volume_id;
                members.len() == found.len() && found.iter().any(|found| matches(&found.snapshot))
            };
            if !members.iter().all(of) {
                return Err(CatalogError::Exists(format!("group {group_id} exists with other members")));
            }
            let place = |id: &str| members.iter().position(|member| member.snapshot_id == id);
            found.sort_by_key(|found| place(&found.snapshot.snapshot_id));
            return Ok(found);
        }
        if let Some(taken) = members.iter().find(|member| state.snapshot(&member.snapshot_id).is_some()) {
            return Err(CatalogError::Exists(format!("snapshot {} exists", taken.snapshot_id)));
        }
        self.make_snapshots(state, members, labels, Some(group_id))
    }

    /// Makes snapshots of different volumes, all of the same moment, or none.
    fn make_snapshots(
        &self,
        mut state: MutexGuard<'_, State>,
        members: &[Member],
        labels: &BTreeMap<String, String>,
        group_id: Option<&str>,
    ) -> Result<Vec<FoundSnapshot>, CatalogError> {
        let existing: usize = state.pools.iter().map(|pool| pool.snapshots.len()).sum();
        if existing + members.len() > SNAPSHOTS_MAX {
            return Err(CatalogError::Exhausted(format!(
                "the server has {existing} snapshots, and at most {SNAPSHOTS_MAX}"
            )));
        }
        let created = clock::wall().0;
        let mut wanted: BTreeMap<usize, u64> = BTreeMap::new();
        let mut planned = Vec::new();
        for Member { snapshot_id, volume_id } in members {
            let index = state.index_of(volume_id)?;
            state.check_shares_extents(index)?;
            let pool = &state.pools[index];
            let record = &pool.records[volume_id];
            let used_bytes = pool.usage(record).bytes;
            if pool.quota == PoolQuota::Project {
                let wanted = wanted.entry(index).or_default();
                *wanted = wanted.saturating_add(used_bytes);
                let room = pool.unprovisioned()?;
                if *wanted > room {
                    return Err(CatalogError::Exhausted(no_room(pool, *wanted, room)));
                }
            }
            let snapshot = Snapshot {
                snapshot_id: snapshot_id.clone(),
                volume_id: volume_id.clone(),
                capacity_bytes: record.capacity_bytes,
                used_bytes,
                project: None,
                labels: labels.clone(),
                created,
                group_id: group_id.map(str::to_owned),
                phase: Phase::Making,
            };
            planned.push((index, snapshot));
        }
        let mut copies = Vec::new();
        for (index, snapshot) in planned {
            let gate = state.gate(&snapshot.volume_id);
            let pool = &mut state.pools[index];
            let source = Source::Volume(snapshot.volume_id.clone());
            match pool.begin_snapshot(snapshot.clone(), &pool.data_path(&snapshot.volume_id)) {
                Ok(copying) => copies.push(Copy { pool: index, source, copying, gate }),
                Err(reason) => {
                    state.discard(members);
                    return Err(reason.into());
                }
            }
        }
        let (mut state, copied) = self.copy(state, &copies);
        let completed = copied.and_then(|copied| {
            for (Member { snapshot_id, .. }, copy) in members.iter().zip(&copies) {
                state.pools[copy.pool].complete_snapshot(snapshot_id)?;
            }
            Ok(copied)
        });
        let copied = match completed {
            Ok(copied) => copied,
            Err(reason) => {
                state.discard(members);
                return Err(reason);
            }
        };
        let mut made = Vec::new();
        for ((Member { snapshot_id, volume_id }, copy), Copied { inodes, .. }) in
            members.iter().zip(&copies).zip(copied)
        {
            self.show_snapshots(&mut state, volume_id);
            let pool = &state.pools[copy.pool];
            let (snapshot, pool) = (pool.snapshots[snapshot_id].clone(), pool.name.clone());
            let used_bytes = snapshot.used_bytes;
            info!(
                snapshot = snapshot_id,
                volume = volume_id,
                group = group_id,
                pool,
                inodes,
                used_bytes,
                "snapshot created"
            );
            made.push(FoundSnapshot { snapshot, pool });
        }
        Ok(made)
    }

    /// Removes a snapshot; a missing snapshot is not an error.
    ///
    /// # Errors
    /// Why the snapshot was not removed.
    pub fn delete_snapshot(&self, id: &str) -> Result<(), CatalogError> {
        let mut state = self.lock();
        let Some((index, snapshot)) = state.snapshot(id) else { return Ok(()) };
        if let Some(group) = &snapshot.group_id {
            return Err(CatalogError::Invalid(format!(
                "snapshot {id} belongs to group {group}, and is deleted with it"
            )));
        }
        state.check_is_idle(&snapshot)?;
        self.delete_found(&mut state, index, &snapshot)
    }

    /// Removes all snapshots of a group; a missing group is not an error. If the server is killed meanwhile, its next start
    /// removes the rest.
    ///
    /// # Errors
    /// Why a snapshot was not removed; others of the group may be removed then, and a repeated call removes the rest.
    pub fn delete_snapshot_group(&self, group_id: &str) -> Result<(), CatalogError> {
        let mut state = self.lock();
        let found = state.group(group_id);
        found.iter().try_for_each(|found| state.check_is_idle(&found.snapshot))?;
        state.mark_deleting(&found)?;
        for FoundSnapshot { snapshot, .. } in found {
            let Some((index, _)) = state.snapshot(&snapshot.snapshot_id) else { continue };
            self.delete_found(&mut state, index, &snapshot)?;
        }
        Ok(())
    }

    fn delete_found(&self, state: &mut State, index: usize, snapshot: &Snapshot) -> Result<(), CatalogError> {
        let id = &snapshot.snapshot_id;
        let deleted = state.pools[index].delete_snapshot(id);
        // Its open files stay readable until they are closed.
        state.shown.remove(id);
        self.show_snapshots(state, &snapshot.volume_id);
        deleted?;
        empty_trash(&state.pools[index]);
        info!(snapshot = id, group = snapshot.group_id, "snapshot deleted");
        Ok(())
    }

    /// At most `limit` snapshots that `filter` selects, with ids after `after`, in order of their id, and whether there are
    /// more.
    #[must_use]
    pub fn list_snapshots(
        &self,
        after: &str,
        limit: usize,
        filter: &SnapshotFilter,
    ) -> (Vec<FoundSnapshot>, bool) {
        let SnapshotFilter { snapshot_id: id, volume_id, group_id } = filter;
        let state = self.lock();
        let mut all: Vec<FoundSnapshot> = state
            .pools
            .iter()
            .flat_map(|pool| pool.snapshots.values().map(move |snapshot| (pool, snapshot)))
            .filter(|(_, snapshot)| snapshot.phase == Phase::Ready && snapshot.snapshot_id.as_str() > after)
            .filter(|(_, snapshot)| id.is_empty() || snapshot.snapshot_id == *id)
            .filter(|(_, snapshot)| volume_id.is_empty() || snapshot.volume_id == *volume_id)
            .filter(|(_, snapshot)| group_id.is_empty() || snapshot.group_id.as_ref() == Some(group_id))
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
        let copy = Copy { pool: index, source: source.clone(), copying, gate };
        let (mut state, copied) = self.copy(state, &[copy]);
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

    /// Copies trees, all of the same moment, and puts them on stable storage, without holding the lock.
    fn copy<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        copies: &[Copy],
    ) -> (MutexGuard<'a, State>, Result<Vec<Copied>, CatalogError>) {
        state.sources.extend(copies.iter().map(|copy| copy.source.clone()));
        drop(state);
        let copied = copy_and_sync(copies);
        let mut state = self.lock();
        for Copy { source, .. } in copies {
            if let Some(at) = state.sources.iter().position(|of| of == source) {
                state.sources.swap_remove(at);
            }
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

    /// The snapshots of a group, whatever their phase.
    fn group(&self, group_id: &str) -> Vec<FoundSnapshot> {
        let all = self.pools.iter().flat_map(|pool| pool.snapshots.values().map(move |s| (pool, s)));
        all.filter(|(_, snapshot)| snapshot.group_id.as_deref() == Some(group_id))
            .map(|(pool, snapshot)| FoundSnapshot { snapshot: snapshot.clone(), pool: pool.name.clone() })
            .collect()
    }

    /// Removes groups that were being made or deleted when the server ended.
    pub(super) fn delete_incomplete_groups(&mut self) {
        let all = self.pools.iter().flat_map(|pool| pool.snapshots.values());
        let groups: BTreeSet<String> =
            all.filter(|snapshot| snapshot.phase.is_to_go()).filter_map(|s| s.group_id.clone()).collect();
        for group in groups {
            let found = self.group(&group);
            if let Err(left) = self.mark_deleting(&found) {
                error!(group, error = %left, "a group of snapshots will be removed at the next start");
                continue;
            }
            found.iter().for_each(|found| self.discard_one(&found.snapshot.snapshot_id));
        }
    }

    /// Records that all these snapshots are deleted, before the first of them is: whenever the server ends, its next start
    /// removes the rest.
    fn mark_deleting(&mut self, group: &[FoundSnapshot]) -> Result<(), CatalogError> {
        for FoundSnapshot { snapshot, .. } in group {
            if let Some((index, _)) = self.snapshot(&snapshot.snapshot_id) {
                self.pools[index].mark_snapshot_deleting(&snapshot.snapshot_id)?;
            }
        }
        Ok(())
    }

    /// Whether nothing is copied to or from a snapshot.
    fn check_is_idle(&self, snapshot: &Snapshot) -> Result<(), CatalogError> {
        let id = &snapshot.snapshot_id;
        if snapshot.phase == Phase::Making {
            return Err(CatalogError::Busy(format!("snapshot {id} is being made")));
        }
        if self.sources.contains(&Source::Snapshot(id.clone())) {
            return Err(CatalogError::Busy(format!("a volume is being made of snapshot {id}")));
        }
        Ok(())
    }

    /// Removes snapshots that could not all be made.
    fn discard(&mut self, members: &[Member]) {
        members.iter().for_each(|member| self.discard_one(&member.snapshot_id));
    }

    fn discard_one(&mut self, id: &str) {
        let Some((index, _)) = self.snapshot(id) else { return };
        let pool = &mut self.pools[index];
        if let Err(left) = pool.delete_snapshot(id) {
            error!(snapshot = id, error = %left, "a snapshot that failed will be removed at the next start");
        }
        empty_trash(pool);
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

fn check_is_ready(snapshot: &Snapshot) -> Result<(), CatalogError> {
    let id = &snapshot.snapshot_id;
    match snapshot.phase {
        Phase::Ready => Ok(()),
        Phase::Making => Err(CatalogError::Busy(format!("snapshot {id} is being made"))),
        Phase::Deleting => Err(CatalogError::Busy(format!("snapshot {id} is being deleted"))),
    }
}

fn check_members(members: &[Member]) -> Result<(), CatalogError> {
    if members.is_empty() || members.len() > SNAPSHOT_GROUP_MAX {
        return Err(CatalogError::Invalid(format!(
            "a group has 1 to {SNAPSHOT_GROUP_MAX} members, not {}",
            members.len()
        )));
    }
    let (mut ids, mut volumes) = (BTreeSet::new(), BTreeSet::new());
    for Member { snapshot_id, volume_id } in members {
        check_id("snapshot_id", snapshot_id)?;
        if !ids.insert(snapshot_id) || !volumes.insert(volume_id) {
            let shown: String = volume_id.chars().take(80).collect();
            return Err(CatalogError::Invalid(format!(
                "volume {shown:?} or its snapshot {snapshot_id} is in the group twice"
            )));
        }
    }
    Ok(())
}

fn copy_and_sync(copies: &[Copy]) -> Result<Vec<Copied>, CatalogError> {
    let failed = |reason: CopyError| match reason {
        reason if reason.is_full() => CatalogError::Exhausted(format!("the copy does not fit: {reason}")),
        reason => CatalogError::Precondition(format!("it cannot be copied: {reason}")),
    };
    let pools: BTreeMap<usize, &Copying> = copies.iter().map(|copy| (copy.pool, &copy.copying)).collect();
    let sync = |copying: &&Copying| {
        rustix::fs::syncfs(&copying.target)
            .map_err(|errno| CatalogError::Precondition(format!("the pool cannot be synced: {errno}")))
    };
    let gates: Vec<&Arc<Gate>> = copies.iter().filter_map(|copy| copy.gate.as_ref()).collect();
    if !gates.is_empty() {
        // Write dirty data now, and not while clients wait.
        pools.values().try_for_each(sync)?;
    }
    // All gates are closed before the first copy, so that the copies are of one moment. Clients of the first gate wait for the
    // last one, so all gates share the time.
    let closed_by = Instant::now() + COPY_PATIENCE;
    let close = |gate: &Arc<Gate>| {
        gate.close(closed_by.saturating_duration_since(Instant::now()))
            .map_err(|reason| CatalogError::Busy(format!("the volume cannot be copied now: {reason}")))
    };
    let closed = gates.iter().map(|gate| close(gate)).collect::<Result<Vec<Closed>, _>>()?;
    let begun = Instant::now();
    let until = (!closed.is_empty()).then(|| begun + COPY_PAUSE_MAX);
    let copied = copies
        .iter()
        .map(|Copy { copying, .. }| copy_tree(&copying.source, &copying.target, until).map_err(failed))
        .collect::<Result<Vec<Copied>, _>>()?;
    drop(closed);
    if !gates.is_empty() {
        let inodes = copied.iter().map(|copied| copied.inodes).sum::<u64>();
        info!(volumes = gates.len(), inodes, pause = ?begun.elapsed(), "changes waited while volumes were copied");
    }
    let left_out = copied.iter().map(|copied| copied.left_out).sum::<u64>();
    if left_out > 0 {
        warn!(entries = left_out, "links, devices, sockets and pipes are not served, and not in the copy");
    }
    pools.values().try_for_each(sync)?;
    Ok(copied)
}
