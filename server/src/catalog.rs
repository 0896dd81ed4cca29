//! The volumes of all pools: the operations of an administrator, and the configuration that the protocol receives.

mod copies;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_smb::auth::NtHash;
use forebay_smb::engine::{Account, Server, VolumeConfig, VolumeUse};
use tracing::{error, info, warn};

pub use self::copies::{FoundSnapshot, Member, SnapshotFilter};
use crate::backend::directory::Volume;
use crate::clock;
use crate::config::{PoolQuota, is_label};
use crate::eventloop::Loops;
use crate::limits::{
    LABEL_BYTES_MAX, LABELS_MAX, PASSWORD_BYTES_MAX, PASSWORD_CHARS_MIN, USERNAME_CHARS_MAX,
    VOLUME_BYTES_MAX, VOLUME_BYTES_MIN, VOLUMES_MAX,
};
use crate::metrics::{PoolSpace, VolumeFigures};
use crate::pool::{Pool, PoolError, Unserved, empty, keep_reserve};
use crate::qos::Qos;
use crate::volume::{Credential, Phase, Protection, Quota, Record, Root, Source};

/// Labels by which the CSI provisioner names the claim that a volume is made for (`--extra-create-metadata`).
const CLAIM: &str = "csi.storage.k8s.io/pvc/name";
const CLAIM_NAMESPACE: &str = "csi.storage.k8s.io/pvc/namespace";
const PERSISTENT_VOLUME: &str = "csi.storage.k8s.io/pv/name";

/// Why an administrator's request is refused.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// There is no such volume.
    #[error("there is no volume {0}")]
    NotFound(String),
    /// There is no such snapshot.
    #[error("there is no snapshot {0}")]
    NoSnapshot(String),
    /// It exists with other parameters.
    #[error("{0}")]
    Exists(String),
    /// There is no space left.
    #[error("{0}")]
    Exhausted(String),
    /// The current state does not permit it.
    #[error("{0}")]
    Precondition(String),
    /// Another operation is in progress.
    #[error("{0}: try again")]
    Busy(String),
    /// An error of the pool.
    #[error(transparent)]
    Pool(PoolError),
}

impl From<PoolError> for CatalogError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::NoQuota { .. } | PoolError::NoChown { .. } | PoolError::Orphan { .. } => {
                Self::Precondition(error.to_string())
            }
            error => Self::Pool(error),
        }
    }
}

/// The parameters of a new volume.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Its id.
    pub volume_id: String,
    /// Its pool; empty selects the first pool with enough space.
    pub pool: String,
    /// Its capacity in bytes.
    pub capacity_bytes: u64,
    /// How the capacity is enforced; `None` selects the pool's default.
    pub quota: Option<Quota>,
    /// The required protection of its traffic.
    pub protection: Protection,
    /// The account that may open it.
    pub credential: Credential,
    /// The caller's labels.
    pub labels: BTreeMap<String, String>,
    /// The source of its data; `None` makes an empty volume.
    pub source: Option<Source>,
    /// Owner and mode of its root. Must be `None` if there is a source.
    pub root: Option<Root>,
}

/// An existing volume.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its record.
    pub record: Record,
    /// Its pool.
    pub pool: String,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Inodes in use.
    pub used_inodes: u64,
}

/// An existing pool.
#[derive(Clone, Debug)]
pub struct PoolInfo {
    /// Its name.
    pub name: String,
    /// Its directory.
    pub path: String,
    /// How capacity is enforced.
    pub quota: PoolQuota,
    /// Its space.
    pub space: PoolSpace,
}

/// All pools and volumes.
pub struct Catalog {
    state: Mutex<State>,
    server: Arc<Server>,
    loops: Loops,
}

struct State {
    pools: Vec<Pool>,
    unserved: Vec<(String, Unserved)>,
    /// Volumes that are served, by id.
    served: HashMap<String, Arc<Volume>>,
    /// Snapshots that clients can browse, by id.
    shown: HashMap<String, Arc<Volume>>,
    /// Sources that are being copied, one entry per copy.
    sources: Vec<Source>,
}

/// Checks a user name and makes a credential from its password.
///
/// # Errors
/// What is wrong with them; never contains the password.
pub fn credential(username: &str, password: &str) -> Result<Credential, CatalogError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if username.is_empty() || username.len() > USERNAME_CHARS_MAX || !username.chars().all(allowed) {
        return Err(CatalogError::Invalid(format!(
            "credentials.username must be 1 to {USERNAME_CHARS_MAX} of A-Z, a-z, 0-9, '.', '_' and '-'"
        )));
    }
    if password.chars().count() < PASSWORD_CHARS_MIN || password.len() > PASSWORD_BYTES_MAX {
        return Err(CatalogError::Invalid(format!(
            "credentials.password must have at least {PASSWORD_CHARS_MIN} characters and at most {PASSWORD_BYTES_MAX} bytes"
        )));
    }
    Ok(Credential { username: username.to_owned(), hashes: vec![NtHash::from_password(password)] })
}

fn check_id(field: &str, id: &str) -> Result<(), CatalogError> {
    if is_label(id) {
        return Ok(());
    }
    let shown: String = id.chars().take(80).collect();
    Err(CatalogError::Invalid(format!(
        "{field} {shown:?} must be 1 to 63 of a-z, 0-9 and '-', and begin and end with a letter or digit"
    )))
}

fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), CatalogError> {
    if labels.len() > LABELS_MAX {
        return Err(CatalogError::Invalid(format!("at most {LABELS_MAX} labels")));
    }
    if labels.iter().any(|(k, v)| k.is_empty() || k.len() > LABEL_BYTES_MAX || v.len() > LABEL_BYTES_MAX) {
        return Err(CatalogError::Invalid(format!(
            "labels must have a key, and at most {LABEL_BYTES_MAX} bytes in key and value"
        )));
    }
    Ok(())
}

impl Wish {
    fn check(&self) -> Result<(), CatalogError> {
        let invalid = |message: String| Err(CatalogError::Invalid(message));
        check_id("volume_id", &self.volume_id)?;
        if self.quota != Some(Quota::None)
            && !(VOLUME_BYTES_MIN..=VOLUME_BYTES_MAX).contains(&self.capacity_bytes)
        {
            return invalid(format!("capacity_bytes must be from {VOLUME_BYTES_MIN} to {VOLUME_BYTES_MAX}"));
        }
        if let Some(root) = self.root {
            root.check().or_else(|reason| invalid(reason.to_owned()))?;
            if self.source.is_some() {
                return invalid("root must be absent: a copy has the root of its source".to_owned());
            }
        }
        check_labels(&self.labels)
    }

    /// The record of a volume that is made to these parameters.
    fn record(&self, quota: Quota) -> Record {
        let mut serial = [0; 4];
        getrandom::fill(&mut serial).expect("the kernel has randomness once it has booted");
        Record {
            volume_id: self.volume_id.clone(),
            capacity_bytes: self.capacity_bytes,
            quota,
            project: None,
            protection: self.protection,
            accounts: vec![self.credential.clone()],
            labels: self.labels.clone(),
            created: clock::wall().0,
            serial: u32::from_le_bytes(serial),
            qos: Qos::default(),
            source: self.source.clone(),
            root: self.root,
            phase: Phase::Ready,
        }
    }

    /// Whether `found` matches these parameters.
    fn is(&self, found: &Record, pool: &str) -> Result<(), &'static str> {
        let credential = found.accounts.iter().any(|account| {
            account.username == self.credential.username
                && self.credential.hashes.iter().all(|hash| account.hashes.contains(hash))
        });
        match () {
            () if !self.pool.is_empty() && self.pool != pool => Err("pool"),
            () if self.capacity_bytes != found.capacity_bytes => Err("capacity_bytes"),
            () if self.quota.is_some_and(|quota| quota != found.quota) => Err("quota"),
            () if self.protection != found.protection => Err("protection"),
            () if !credential => Err("credentials"),
            () if self.labels != found.labels => Err("labels"),
            () if self.source != found.source => Err("source"),
            () if self.root.is_some() && self.root != found.root => Err("root"),
            () => Ok(()),
        }
    }
}

impl Catalog {
    /// Serves the volumes of `pools`. A volume that cannot be served is logged and left unchanged.
    #[must_use]
    pub fn new(pools: Vec<(Pool, Vec<Unserved>)>, server: Arc<Server>, loops: Loops) -> Self {
        let mut state = State {
            pools: Vec::new(),
            unserved: Vec::new(),
            served: HashMap::new(),
            shown: HashMap::new(),
            sources: Vec::new(),
        };
        for (pool, unserved) in pools {
            if pool.quota == PoolQuota::Project && !pool.enforces_quota() {
                let path = pool.path.display();
                warn!(
                    pool = pool.name, %path,
                    "the file system enforces no project quota, so volumes will be refused: mount it with -o prjquota, \
                     or set quota = \"none\" for the pool"
                );
            }
            state.unserved.extend(unserved.into_iter().map(|u| (pool.name.clone(), u)));
            state.pools.push(pool);
        }
        let catalog = Self { state: Mutex::new(state), server, loops };
        catalog.serve_all();
        catalog
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve_all(&self) {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.delete_incomplete_groups();
        for pool in &state.pools {
            for record in pool.records.values() {
                match self.serve(pool, record) {
                    Ok(volume) => {
                        info!(pool = pool.name, volume = record.volume_id, "serving");
                        state.served.insert(record.volume_id.clone(), volume);
                    }
                    Err(error) => {
                        let unserved = Unserved { name: record.volume_id.clone(), reason: error.to_string() };
                        state.unserved.push((pool.name.clone(), unserved));
                    }
                }
            }
            empty_trash(pool);
        }
        let volumes: BTreeSet<String> = state.with_snapshots();
        volumes.iter().for_each(|id| self.show_snapshots(state, id));
        for (pool, Unserved { name, reason }) in &state.unserved {
            error!(pool, volume = name, reason, "volume is not served");
        }
    }

    fn serve(&self, pool: &Pool, record: &Record) -> Result<Arc<Volume>, CatalogError> {
        let volume = pool.serve(record)?;
        volume.limiter().set(&record.qos);
        let config = VolumeConfig {
            id: record.volume_id.clone(),
            backend: volume.handle(),
            accounts: record.accounts.iter().map(Account::from).collect(),
            protection: record.protection.into(),
            read_only: false,
            extended_attributes: volume.keeps_extended_attributes(),
            // If this cannot be determined, for example on a full pool, clients copy.
            shared_extents: pool.shares_extents().unwrap_or(false),
            serial: record.serial,
            created: record.created,
        };
        self.server.add_volume(config).map_err(|username| taken(&username))?;
        Ok(volume)
    }

    /// Makes a volume and serves it; returns an existing volume with the same parameters.
    ///
    /// # Errors
    /// Why the volume was not created.
    pub fn create(&self, wish: &Wish) -> Result<Found, CatalogError> {
        wish.check()?;
        let mut state = self.lock();
        if let Some(pool) = state.pools.iter().find(|pool| pool.records.contains_key(&wish.volume_id)) {
            let record = &pool.records[&wish.volume_id];
            match record.phase {
                Phase::Ready => {}
                Phase::Making => {
                    return Err(CatalogError::Busy(format!("volume {} is being made", wish.volume_id)));
                }
                Phase::Deleting => {
                    return Err(CatalogError::Precondition(format!(
                        "volume {} is being deleted: try again",
                        wish.volume_id
                    )));
                }
            }
            return match wish.is(record, &pool.name) {
                Ok(()) => Ok(found(pool, record)),
                Err(what) => Err(CatalogError::Exists(format!(
                    "volume {} exists with other parameters: {what} differs",
                    wish.volume_id
                ))),
            };
        }
        if state.unserved.iter().any(|(_, unserved)| unserved.name == wish.volume_id) {
            return Err(CatalogError::Precondition(format!(
                "volume {} exists and its record is damaged: the server's log says how to repair it",
                wish.volume_id
            )));
        }
        state.check_username(&wish.volume_id, &wish.credential.username)?;
        if state.pools.iter().map(|pool| pool.records.len()).sum::<usize>() >= VOLUMES_MAX {
            return Err(CatalogError::Exhausted(format!("the server has its {VOLUMES_MAX} volumes")));
        }
        if let Some(source) = &wish.source {
            return self.create_from(state, wish, source);
        }
        let (index, quota) = state.choose(wish)?;
        state.pools[index].create(wish.record(quota))?;
        self.begin_serving(&mut state, index, &wish.volume_id)
    }

    /// Serves a new volume, or removes it if that fails.
    fn begin_serving(&self, state: &mut State, index: usize, id: &str) -> Result<Found, CatalogError> {
        let State { pools, served, .. } = state;
        let pool = &mut pools[index];
        match self.serve(pool, &pool.records[id]) {
            Ok(volume) => drop(served.insert(id.to_owned(), volume)),
            Err(error) => {
                remove_failed(pool, id);
                return Err(error);
            }
        }
        let record = &pool.records[id];
        info!(
            volume = id,
            pool = pool.name,
            capacity_bytes = record.capacity_bytes,
            source = ?record.source,
            "volume created"
        );
        Ok(found(pool, record))
    }

    /// Removes a volume with its data; a missing volume is not an error.
    ///
    /// # Errors
    /// Why the volume was not removed.
    pub fn delete(&self, id: &str, force: bool) -> Result<(), CatalogError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let sources = &state.sources;
        let Some(pool) = state.pools.iter_mut().find(|pool| pool.records.contains_key(id)) else {
            return match state.unserved.iter().find(|(_, unserved)| unserved.name == id) {
                Some((pool, _)) => Err(CatalogError::Precondition(format!(
                    "the record of volume {id} in pool {pool} is damaged: repair or remove it by hand"
                ))),
                None => Ok(()),
            };
        };
        if pool.records[id].phase == Phase::Making {
            return Err(CatalogError::Busy(format!("volume {id} is being made")));
        }
        if sources.contains(&Source::Volume(id.to_owned())) {
            return Err(CatalogError::Busy(format!("volume {id} is being copied")));
        }
        let removed = self.server.remove_volume(id, force);
        self.loops.route(&self.server);
        removed.map_err(|in_use| {
            CatalogError::Precondition(format!(
                "volume {id} has {} open files: unmount it, or delete it with force",
                in_use.open_files
            ))
        })?;
        pool.delete(id)?;
        empty_trash(pool);
        state.unserved.retain(|(_, unserved)| unserved.name != id);
        state.served.remove(id);
        state.hide_snapshots(id);
        info!(volume = id, "volume deleted");
        Ok(())
    }

    /// Raises a volume's capacity.
    ///
    /// # Errors
    /// Why it was not raised.
    pub fn expand(&self, id: &str, capacity_bytes: u64) -> Result<Found, CatalogError> {
        if capacity_bytes == 0 || capacity_bytes > VOLUME_BYTES_MAX {
            return Err(CatalogError::Invalid(format!(
                "capacity_bytes must be from 1 to {VOLUME_BYTES_MAX}"
            )));
        }
        let mut state = self.lock();
        let pool = state.pool_of(id)?;
        let mut record = pool.records[id].clone();
        if capacity_bytes > record.capacity_bytes {
            let more = capacity_bytes - record.capacity_bytes;
            if record.quota == Quota::Hard {
                let room = pool.unprovisioned()?;
                if more > room {
                    return Err(CatalogError::Exhausted(no_room(pool, more, room)));
                }
            }
            record.capacity_bytes = capacity_bytes;
            pool.update(record)?;
            info!(volume = id, capacity_bytes, "volume expanded");
        }
        Ok(found(pool, &pool.records[id]))
    }

    /// Replaces a volume's credentials.
    ///
    /// # Errors
    /// Why they were not replaced.
    pub fn set_credentials(
        &self,
        id: &str,
        new: Credential,
        keep_previous: bool,
    ) -> Result<(), CatalogError> {
        let mut state = self.lock();
        state.check_username(id, &new.username)?;
        let pool = state.pool_of(id)?;
        let mut record = pool.records[id].clone();
        let previous = std::mem::take(&mut record.accounts).into_iter().next();
        record.accounts = match previous {
            // A repeated call with the same credential: hashes kept by the first call stay.
            Some(account)
                if account.username == new.username && account.hashes.first() == new.hashes.first() =>
            {
                let kept = if keep_previous { account.hashes } else { new.hashes };
                vec![Credential { username: new.username, hashes: kept }]
            }
            Some(account) if keep_previous && account.username.eq_ignore_ascii_case(&new.username) => {
                let hashes = new.hashes.into_iter().chain(account.hashes.into_iter().take(1)).collect();
                vec![Credential { username: new.username, hashes }]
            }
            Some(account) if keep_previous => vec![new, account],
            _ => vec![new],
        };
        let accounts: Vec<Account> = record.accounts.iter().map(Account::from).collect();
        pool.update(record)?;
        self.server.set_accounts(id, accounts).map_err(|username| taken(&username))?;
        info!(volume = id, keep_previous, "credentials replaced");
        Ok(())
    }

    /// Replaces a volume's limits and priority. They apply immediately, also to open files.
    ///
    /// # Errors
    /// Why they were not replaced.
    pub fn set_qos(&self, id: &str, qos: Qos) -> Result<Found, CatalogError> {
        qos.check().map_err(CatalogError::Invalid)?;
        let mut state = self.lock();
        let pool = state.pool_of(id)?;
        if pool.records[id].qos != qos {
            pool.update(Record { qos, ..pool.records[id].clone() })?;
            info!(
                volume = id,
                bytes_per_second = qos.bytes_per_second,
                operations_per_second = qos.operations_per_second,
                priority = ?qos.priority,
                "limits and priority replaced"
            );
        }
        let found = found(pool, &pool.records[id]);
        // A volume that is not served has no limiter; the limits in its record apply once it is served.
        if let Some(volume) = state.served.get(id) {
            volume.limiter().set(&qos);
        }
        Ok(found)
    }

    /// One volume.
    ///
    /// # Errors
    /// [`CatalogError::NotFound`] if there is none.
    pub fn find(&self, id: &str) -> Result<Found, CatalogError> {
        let mut state = self.lock();
        let pool = state.pool_of(id)?;
        Ok(found(pool, &pool.records[id]))
    }

    /// At most `limit` volumes with ids after `after`, in order of their id, and whether there are more.
    #[must_use]
    pub fn list(&self, after: &str, limit: usize) -> (Vec<Found>, bool) {
        let state = self.lock();
        let mut all: Vec<(&Pool, &Record)> = state
            .pools
            .iter()
            .flat_map(|pool| pool.records.values().map(move |record| (pool, record)))
            .filter(|(_, record)| record.phase == Phase::Ready && record.volume_id.as_str() > after)
            .collect();
        all.sort_by(|a, b| a.1.volume_id.cmp(&b.1.volume_id));
        let more = all.len() > limit;
        (all.into_iter().take(limit).map(|(pool, record)| found(pool, record)).collect(), more)
    }

    /// Volumes that exist and cannot be served, each with its pool.
    #[must_use]
    pub fn unserved(&self) -> Vec<(String, String)> {
        let state = self.lock();
        state.unserved.iter().map(|(pool, unserved)| (pool.clone(), unserved.name.clone())).collect()
    }

    /// All pools.
    ///
    /// # Errors
    /// Those of querying the space of a file system.
    pub fn pools(&self) -> Result<Vec<PoolInfo>, CatalogError> {
        let state = self.lock();
        state
            .pools
            .iter()
            .map(|pool| {
                Ok(PoolInfo {
                    name: pool.name.clone(),
                    path: pool.path.display().to_string(),
                    quota: pool.quota,
                    space: state.space(pool)?,
                })
            })
            .collect()
    }

    /// Figures of the volumes that are served, ordered by id.
    #[must_use]
    pub fn volume_figures(&self) -> Vec<VolumeFigures> {
        let mut uses = self.server.volume_uses();
        uses.sort_by(|a, b| a.id.cmp(&b.id));
        let state = self.lock();
        let figures = uses.into_iter().filter_map(|VolumeUse { id, sessions, open_files, activity }| {
            let pool = state.pools.iter().find(|pool| pool.records.contains_key(&id))?;
            let record = &pool.records[&id];
            let label = |key: &str| record.labels.get(key).cloned().unwrap_or_default();
            Some(VolumeFigures {
                pool: pool.name.clone(),
                claim: label(CLAIM),
                claim_namespace: label(CLAIM_NAMESPACE),
                persistent_volume: label(PERSISTENT_VOLUME),
                capacity_bytes: record.capacity_bytes,
                sessions,
                open_files,
                throttled: state.served.get(&id).map_or(0, |volume| volume.limiter().throttled()),
                activity,
                id,
            })
        });
        figures.collect()
    }
}

impl State {
    fn pool_of(&mut self, id: &str) -> Result<&mut Pool, CatalogError> {
        let holds =
            |pool: &&mut Pool| pool.records.get(id).is_some_and(|record| record.phase == Phase::Ready);
        self.pools.iter_mut().find(holds).ok_or_else(|| CatalogError::NotFound(id.chars().take(80).collect()))
    }

    /// A user has access to exactly one volume, so no two volumes can have the same user name.
    fn check_username(&self, volume_id: &str, username: &str) -> Result<(), CatalogError> {
        let mut others = self
            .pools
            .iter()
            .flat_map(|pool| pool.records.values())
            .filter(|record| record.volume_id != volume_id);
        let is_taken =
            others.any(|record| record.accounts.iter().any(|a| a.username.eq_ignore_ascii_case(username)));
        if is_taken { Err(taken(username)) } else { Ok(()) }
    }

    /// The pool for a new volume, and how its capacity is enforced there.
    fn choose(&self, wish: &Wish) -> Result<(usize, Quota), CatalogError> {
        let mut refusal = None;
        for (index, pool) in self.pools.iter().enumerate() {
            if !wish.pool.is_empty() && wish.pool != pool.name {
                continue;
            }
            match admit(pool, wish) {
                Ok(quota) => return Ok((index, quota)),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        Err(refusal.unwrap_or_else(|| {
            let shown: String = wish.pool.chars().take(80).collect();
            let names: Vec<&str> = self.pools.iter().map(|pool| pool.name.as_str()).collect();
            CatalogError::Invalid(format!("there is no pool {shown:?}; there are: {}", names.join(", ")))
        }))
    }

    fn space(&self, pool: &Pool) -> Result<PoolSpace, PoolError> {
        let (total_bytes, free_bytes) = pool.space()?;
        let unserved = self.unserved.iter().filter(|(name, _)| *name == pool.name).count();
        let damaged = self
            .unserved
            .iter()
            .filter(|(name, unserved)| *name == pool.name && !pool.records.contains_key(&unserved.name))
            .count();
        Ok(PoolSpace {
            pool: pool.name.clone(),
            total_bytes,
            free_bytes,
            provisioned_bytes: pool.provisioned(),
            volumes: (pool.records.len() + damaged).saturating_sub(unserved),
            snapshots: pool.snapshots.len(),
            unserved,
        })
    }
}

fn admit(pool: &Pool, wish: &Wish) -> Result<Quota, CatalogError> {
    let quota = match (pool.quota, wish.quota) {
        (PoolQuota::Project, None | Some(Quota::Hard)) => Quota::Hard,
        (PoolQuota::None, None | Some(Quota::None)) => Quota::None,
        (PoolQuota::Project, Some(Quota::None)) => {
            return Err(CatalogError::Precondition(format!(
                "pool {} has hard quotas: a volume without needs a pool with quota = \"none\"",
                pool.name
            )));
        }
        (PoolQuota::None, Some(Quota::Hard)) => {
            return Err(CatalogError::Precondition(format!(
                "pool {} has quota = \"none\": a hard capacity needs a pool with quota = \"project\"",
                pool.name
            )));
        }
    };
    if quota == Quota::Hard {
        let room = pool.unprovisioned()?;
        if wish.capacity_bytes > room {
            return Err(CatalogError::Exhausted(no_room(pool, wish.capacity_bytes, room)));
        }
    }
    Ok(quota)
}

fn no_room(pool: &Pool, wanted: u64, room: u64) -> String {
    format!(
        "pool {} has room for {room} bytes and not for {wanted}: delete volumes, enlarge it, or raise its overcommit",
        pool.name
    )
}

fn taken(username: &str) -> CatalogError {
    CatalogError::Invalid(format!(
        "credentials.username {username:?} belongs to another volume: use another name"
    ))
}

fn found(pool: &Pool, record: &Record) -> Found {
    let usage = pool.usage(record);
    Found {
        record: record.clone(),
        pool: pool.name.clone(),
        used_bytes: usage.bytes,
        used_inodes: usage.inodes,
    }
}

/// Removes a new volume that cannot be served.
fn remove_failed(pool: &mut Pool, id: &str) {
    if let Err(left) = pool.delete(id) {
        error!(volume = id, error = %left, "a volume that cannot be served could not be removed");
    }
    empty_trash(pool);
}

/// Empties a pool's trash on a separate thread: removing large volumes takes time.
fn empty_trash(pool: &Pool) {
    let trash = pool.trash();
    if trash.is_empty() {
        return;
    }
    let pool = pool.path.clone();
    let remove = move || {
        for path in trash {
            match empty(&path) {
                Ok(()) => info!(path = %path.display(), "deleted data removed"),
                // Another thread may already have removed it.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    warn!(path = %path.display(), %error, "deleted data could not be removed; tried again at the next start")
                }
            }
        }
        keep_reserve(&pool);
    };
    if let Err(error) = std::thread::Builder::new().name("trash".to_owned()).spawn(remove) {
        warn!(%error, "deleted data will be removed at the next start");
    }
}
