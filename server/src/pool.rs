//! A pool: a directory that holds volumes and everything needed to serve them.
//!
//! ```text
//! <pool>/.forebay/lock                 held by the one server that uses the pool
//! <pool>/.forebay/server-guid          the server's GUID
//! <pool>/.forebay/volumes/<id>.json    records
//! <pool>/.forebay/trash/               data of deleted volumes that is being removed
//! <pool>/.forebay/reserve              space reserved for deleting a volume when the pool is full
//! <pool>/.forebay/links/               links that are about to replace a name
//! <pool>/.forebay/snapshots/<id>.json  records of snapshots
//! <pool>/volumes/<id>/                 data
//! <pool>/snapshots/<id>/               data of snapshots
//! ```

mod copy;
mod error;
mod reserve;
mod snapshots;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use forebay_smb::engine::Predecessor;
use rustix::fs::{FlockOperation, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

pub use self::copy::{Copied, CopyError, copy_tree};
pub use self::error::PoolError;
use self::reserve::is_full;
pub(crate) use self::reserve::keep_reserve;
use crate::backend::directory::quota::{self, Usage};
use crate::backend::directory::{Promise, Volume};
use crate::config::{PoolQuota, PoolSection};
use crate::limits::PROJECT_ID_FIRST;
use crate::snapshot::Snapshot;
use crate::starts::Starts;
use crate::volume::{Phase, Quota, Record, RecordError, replace, sync_directory};

/// A volume that was found in a pool but is not served.
#[derive(Debug)]
pub struct Unserved {
    /// The volume's id, or the file's name.
    pub name: String,
    /// Why it is not served.
    pub reason: String,
}

/// Source and target directories of a tree copy.
#[derive(Debug)]
pub struct Copying {
    /// Directory to copy from.
    pub source: OwnedFd,
    /// Directory to copy to.
    pub target: OwnedFd,
}

/// A pool in use.
#[derive(Debug)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Its directory.
    pub path: PathBuf,
    /// How capacity is enforced.
    pub quota: PoolQuota,
    /// The sum of capacities may be up to this many times the pool's size.
    pub overcommit: f64,
    /// The part of an operation that is on stable storage when it is answered.
    promise: Promise,
    /// Records of its volumes, by id.
    pub records: BTreeMap<String, Record>,
    /// Records of its snapshots, by id.
    pub snapshots: BTreeMap<String, Snapshot>,
    directory: OwnedFd,
    /// Whether files can share extents; set by the first attempt.
    shared_extents: OnceLock<bool>,
    /// Directory for links that are about to replace a name; `None` if there was no space to create it.
    links: Option<PathBuf>,
    _lock: OwnedFd,
}

impl Pool {
    /// Opens the pool and reads its records. A damaged record does not keep the other volumes from being served.
    ///
    /// # Errors
    /// Why the pool cannot be used.
    pub fn open(section: &PoolSection) -> Result<(Self, Vec<Unserved>), PoolError> {
        if section.create && !section.existing && !section.path.is_dir() {
            make_private_directory(&section.path).map_err(|error| PoolError::Io {
                pool: section.name.clone(),
                what: format!("making {}", section.path.display()),
                error,
            })?;
            if let Some(above) = section.path.parent() {
                sync_directory(above).map_err(|error| PoolError::Io {
                    pool: section.name.clone(),
                    what: format!("syncing {}", above.display()),
                    error,
                })?;
            }
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory =
            rustix::fs::open(&section.path, flags, Mode::empty()).map_err(|errno| match errno {
                Errno::NOENT | Errno::NOTDIR => {
                    PoolError::Missing { pool: section.name.clone(), path: section.path.clone() }
                }
                errno => PoolError::Io {
                    pool: section.name.clone(),
                    what: format!("opening {}", section.path.display()),
                    error: errno.into(),
                },
            })?;
        let io = |what: &'static str| {
            move |error: std::io::Error| PoolError::Io {
                pool: section.name.clone(),
                what: what.to_owned(),
                error,
            }
        };
        Self::expected(section)?;
        let private = section.path.join(".forebay");
        let [links, data] = [private.join(LINKS), section.path.join("volumes")];
        for path in [&private, &private.join("volumes"), &private.join("trash"), &data] {
            make_private_directory(path).map_err(io("making its directories"))?;
        }
        let links = match make_private_directory(&links) {
            Ok(()) => Some(links),
            // An older version that had no such directory filled the pool: its volumes are served anyway.
            Err(error) if is_full(&error) => {
                tracing::warn!(
                    pool = section.name,
                    %error,
                    "no directory can be made for links that are to replace a name: such a link is seen beside that name for a moment \
                     (.forebay-link-…), and stays there if the server is killed then; the next start tries again"
                );
                None
            }
            Err(error) => return Err(io("making its directories")(error)),
        };
        sync_directory(&private)
            .and_then(|()| sync_directory(&section.path))
            .map_err(io("making its directories"))?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = rustix::fs::open(private.join("lock"), flags, Mode::from_raw_mode(0o600))
            .map_err(|errno| io("opening its lock")(errno.into()))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| PoolError::Locked { pool: section.name.clone(), path: section.path.clone() })?;
        // Links that a server began and did not move into place.
        if let Some(links) = &links {
            for left in std::fs::read_dir(links).map_err(io("looking for links"))?.flatten() {
                std::fs::remove_file(left.path()).map_err(io("removing links that are left"))?;
            }
        }
        let mut pool = Self {
            name: section.name.clone(),
            path: section.path.clone(),
            quota: section.quota,
            overcommit: section.overcommit,
            promise: section.promise(),
            records: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            directory,
            shared_extents: OnceLock::new(),
            links,
            _lock: lock,
        };
        let unserved = pool.read_records()?;
        pool.read_snapshots()?;
        keep_reserve(&pool.path);
        if pool.promise == Promise::AtFlush {
            let option =
                if section.nvmeof.is_some() { "pool.nvmeof.write_through" } else { "pool.write_through" };
            tracing::info!(
                pool = pool.name,
                option,
                "what clients have not flushed is lost when the power of this machine is, and Linux's client may not notice; \
                 with the option everything that is answered is on stable storage"
            );
        }
        Ok((pool, unserved))
    }

    /// Checks that the pool exists if the configuration says so. An empty directory in its place, such as the mount point of
    /// a missing disk, would be served without the volumes.
    ///
    /// # Errors
    /// [`PoolError::NoPool`] if it does not.
    pub fn expected(section: &PoolSection) -> Result<(), PoolError> {
        if section.existing && !section.path.join(".forebay/volumes").is_dir() {
            return Err(PoolError::NoPool { pool: section.name.clone(), path: section.path.clone() });
        }
        Ok(())
    }

    fn read_records(&mut self) -> Result<Vec<Unserved>, PoolError> {
        let mut unserved = Vec::new();
        let entries =
            std::fs::read_dir(self.records_path()).map_err(|e| self.io("listing its records", e))?;
        for entry in entries {
            let path = entry.map_err(|e| self.io("listing its records", e))?.path();
            if path.extension() != Some("json".as_ref()) {
                continue;
            }
            match Record::read(&path) {
                Ok(record) => {
                    self.records.insert(record.volume_id.clone(), record);
                }
                Err(error) => unserved.push(Unserved {
                    name: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
                    reason: error.to_string(),
                }),
            }
        }
        let deleting: Vec<String> =
            self.records.values().filter(|r| r.phase.is_to_go()).map(|r| r.volume_id.clone()).collect();
        for id in deleting {
            // The other volumes can still be served; the next start tries again.
            if let Err(error) = self.delete(&id) {
                unserved.push(Unserved { name: id, reason: format!("it is being deleted: {error}") });
            }
        }
        Ok(unserved)
    }

    fn records_path(&self) -> PathBuf {
        self.path.join(".forebay/volumes")
    }

    fn trash_path(&self) -> PathBuf {
        self.path.join(".forebay/trash")
    }

    /// Path of a volume's data.
    #[must_use]
    pub fn data_path(&self, id: &str) -> PathBuf {
        self.path.join("volumes").join(id)
    }

    fn io(&self, what: &str, error: std::io::Error) -> PoolError {
        PoolError::Io { pool: self.name.clone(), what: what.to_owned(), error }
    }

    fn record_error(&self, error: RecordError) -> PoolError {
        PoolError::Record { pool: self.name.clone(), error }
    }

    /// Whether the file system enforces project quotas.
    #[must_use]
    pub fn enforces_quota(&self) -> bool {
        quota::enforced(self.directory.as_fd())
    }

    fn no_quota(&self) -> PoolError {
        PoolError::NoQuota { pool: self.name.clone(), path: self.path.clone() }
    }

    /// Size and free space of the file system, in bytes.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn space(&self) -> Result<(u64, u64), PoolError> {
        let space =
            rustix::fs::fstatvfs(&self.directory).map_err(|e| self.io("asking for its space", e.into()))?;
        Ok((space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize))
    }

    /// Sum of the hard capacities of its volumes and the sizes of its snapshots, in bytes. A snapshot counts in full,
    /// because the volume may replace every extent that it shares with the snapshot.
    #[must_use]
    pub fn provisioned(&self) -> u64 {
        let hard = self.records.values().filter(|r| r.quota == Quota::Hard && r.phase != Phase::Deleting);
        let kept = self.snapshots.values().filter(|s| s.phase != Phase::Deleting).map(|s| s.used_bytes);
        hard.map(|record| record.capacity_bytes).chain(kept).fold(0, u64::saturating_add)
    }

    /// Bytes that can still be provisioned to volumes.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn unprovisioned(&self) -> Result<u64, PoolError> {
        let (total, _) = self.space()?;
        Ok(((total as f64 * self.overcommit) as u64).saturating_sub(self.provisioned()))
    }

    /// A volume's usage as counted by its quota.
    #[must_use]
    pub fn usage(&self, record: &Record) -> Usage {
        let counted = record.project.map(|project| quota::usage(self.directory.as_fd(), project));
        counted.and_then(Result::ok).unwrap_or_default()
    }

    /// Creates a volume's directory with its quota, then its record. The volume exists once its record does.
    ///
    /// # Errors
    /// Why the volume was not created; nothing of it is left.
    pub fn create(&mut self, record: Record) -> Result<(), PoolError> {
        let limit_bytes = record.capacity_bytes;
        self.make(record, limit_bytes)
    }

    /// Begins a volume that [`copy_tree`] fills from the directory at `source`. [`Pool::complete`] makes it available. Until
    /// then its record makes the next start delete it.
    ///
    /// # Errors
    /// Why the volume was not begun; nothing of it is left.
    pub fn begin(&mut self, record: Record, source: &Path) -> Result<Copying, PoolError> {
        let id = record.volume_id.clone();
        // The copy may take a few blocks more than the original; the limit is set when it is complete.
        self.make(Record { phase: Phase::Making, ..record }, 0)?;
        let copying = self.copying(source, &self.data_path(&id));
        if copying.is_err()
            && let Err(error) = self.delete(&id)
        {
            tracing::error!(pool = self.name, volume = id, %error, "a volume that failed will be removed at the next start");
        }
        copying
    }

    /// Marks a volume that was begun as ready, after its data was copied.
    ///
    /// # Errors
    /// Why that could not be recorded.
    pub fn complete(&mut self, id: &str) -> Result<(), PoolError> {
        let Some(record) = self.records.get(id) else { return Ok(()) };
        self.update(Record { phase: Phase::Ready, ..record.clone() })
    }

    fn copying(&self, source: &Path, target: &Path) -> Result<Copying, PoolError> {
        let open = |path: &Path| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty())
                .map_err(|e| self.io(&format!("opening {}", path.display()), e.into()))
        };
        Ok(Copying { source: open(source)?, target: open(target)? })
    }

    fn make(&mut self, mut record: Record, limit_bytes: u64) -> Result<(), PoolError> {
        let path = self.data_path(&record.volume_id);
        if record.quota == Quota::Hard && !self.enforces_quota() {
            return Err(self.no_quota());
        }
        // An interrupted attempt leaves an empty directory.
        match std::fs::remove_dir(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(_) => return Err(PoolError::Orphan { pool: self.name.clone(), path }),
        }
        std::fs::create_dir(&path).map_err(|e| self.io("making the volume's directory", e))?;
        let made = self
            .furnish(&path, &mut record, limit_bytes)
            .and_then(|()| record.write(&self.records_path()).map_err(|error| self.record_error(error)));
        if let Err(error) = made {
            let _ = std::fs::remove_dir(&path);
            if let Some(project) = record.project {
                let _ = quota::set_limit(self.directory.as_fd(), project, 0);
            }
            return Err(error);
        }
        self.records.insert(record.volume_id.clone(), record);
        Ok(())
    }

    fn furnish(&self, path: &Path, record: &mut Record, limit_bytes: u64) -> Result<(), PoolError> {
        let directory =
            std::fs::File::open(path).map_err(|e| self.io("opening the volume's directory", e))?;
        let root = record.root.unwrap_or_default();
        // By default every user has full access, as in the root of a fresh disk: the credentials control access, and only the
        // server's user can traverse the directories above.
        let mode = Mode::from_raw_mode(root.mode.unwrap_or(0o777));
        rustix::fs::fchmod(&directory, mode).map_err(|e| self.io("setting the volume's mode", e.into()))?;
        if record.quota == Quota::Hard {
            let project = self.free_project()?;
            record.project = Some(project);
            quota::set_limit(self.directory.as_fd(), project, limit_bytes)
                .and_then(|()| quota::assign(directory.as_fd(), project))
                .map_err(|e| self.io("setting the volume's quota", e.into()))?;
        }
        // Last: mode and project of another user's directory need CAP_FOWNER.
        if root.uid.is_some() || root.gid.is_some() {
            let (uid, gid) = (root.uid.map(Uid::from_raw), root.gid.map(Gid::from_raw));
            rustix::fs::fchown(&directory, uid, gid).map_err(|errno| match errno {
                Errno::PERM => PoolError::NoChown { pool: self.name.clone() },
                errno => self.io("setting the volume's owner", errno.into()),
            })?;
        }
        directory
            .sync_all()
            .and_then(|()| sync_directory(&self.path.join("volumes")))
            .map_err(|e| self.io("syncing the volume's directory", e))
    }

    /// A project that no volume uses and no file is assigned to.
    fn free_project(&self) -> Result<u32, PoolError> {
        let of_snapshots = self.snapshots.values().filter_map(|snapshot| snapshot.project);
        let taken: Vec<u32> =
            self.records.values().filter_map(|record| record.project).chain(of_snapshots).collect();
        let first = taken.iter().copied().max().map_or(PROJECT_ID_FIRST, |max| max.saturating_add(1));
        for project in (first..u32::MAX).chain(PROJECT_ID_FIRST..first) {
            if taken.contains(&project) {
                continue;
            }
            let usage = quota::usage(self.directory.as_fd(), project)
                .map_err(|e| self.io("looking for a free project id", e.into()))?;
            if usage.inodes == 0 && usage.bytes == 0 {
                return Ok(project);
            }
        }
        Err(self.io("looking for a free project id", Errno::NOSPC.into()))
    }

    /// Opens a volume to serve it, after making sure that its quota is enforced.
    ///
    /// # Errors
    /// Why the volume cannot be served.
    pub fn serve(&self, record: &Record) -> Result<Arc<Volume>, PoolError> {
        let path = self.data_path(&record.volume_id);
        let what = format!("opening {}", path.display());
        let volume = Volume::open_with(&path, self.promise, self.links.as_deref())
            .map_err(|e| self.io(&what, e.into()))?;
        if let (Quota::Hard, Some(project)) = (record.quota, record.project) {
            if !self.enforces_quota() {
                return Err(self.no_quota());
            }
            let directory = std::fs::File::open(&path).map_err(|e| self.io(&what, e))?;
            let assigned =
                quota::assigned(directory.as_fd()).map_err(|e| self.io("reading its project", e.into()))?;
            if assigned != Some(project) {
                let error = std::io::Error::other(format!(
                    "its project is {assigned:?} and not {project}: set it with `xfs_quota -x -c 'project -s'` or chattr -p"
                ));
                return Err(self.io(&format!("volume {}", record.volume_id), error));
            }
            quota::set_limit(self.directory.as_fd(), project, record.capacity_bytes)
                .map_err(|e| self.io("setting the volume's quota", e.into()))?;
        }
        Ok(volume)
    }

    /// Replaces a volume's record. Sets the quota limit to the record's capacity first.
    ///
    /// # Errors
    /// Why the record was not replaced; the old record stays.
    pub fn update(&mut self, record: Record) -> Result<(), PoolError> {
        if let (Quota::Hard, Some(project)) = (record.quota, record.project) {
            quota::set_limit(self.directory.as_fd(), project, record.capacity_bytes)
                .map_err(|e| self.io("setting the volume's quota", e.into()))?;
        }
        record.write(&self.records_path()).map_err(|error| self.record_error(error))?;
        self.records.insert(record.volume_id.clone(), record);
        Ok(())
    }

    /// Deletes a volume. It is deleted as soon as its record says so, even if the server is killed before the end. The data
    /// is moved to the trash, and [`empty`] removes it.
    ///
    /// # Errors
    /// Those of the file system; a repeated call continues the deletion.
    pub fn delete(&mut self, id: &str) -> Result<(), PoolError> {
        let Some(mut record) = self.records.get(id).cloned() else { return Ok(()) };
        if record.phase != Phase::Deleting {
            record.phase = Phase::Deleting;
            self.with_reserve(|| record.write(&self.records_path()))
                .map_err(|error| self.record_error(error))?;
            self.records.insert(id.to_owned(), record.clone());
        }
        self.throw_away(id, record.project, &self.data_path(id), &self.records_path())?;
        self.records.remove(id);
        Ok(())
    }

    /// Moves the directory `data` to the trash and then removes the record of `id` from `records`.
    fn throw_away(
        &self,
        id: &str,
        project: Option<u32>,
        data: &Path,
        records: &Path,
    ) -> Result<(), PoolError> {
        let project = project.unwrap_or(0);
        let trash = self.trash_path().join(format!("{id}.{project}.{}", uuid::Uuid::new_v4().simple()));
        match std::fs::rename(data, trash) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(self.io("moving its data to the trash", error));
            }
            _ => {}
        }
        sync_directory(&self.trash_path())
            .and_then(|()| sync_directory(data.parent().unwrap_or(&self.path)))
            .and_then(|()| std::fs::remove_file(records.join(format!("{id}.json"))))
            .and_then(|()| sync_directory(records))
            .map_err(|e| self.io("removing its record", e))
    }

    /// Paths in the trash, for [`empty`] to remove on a separate thread.
    #[must_use]
    pub fn trash(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.trash_path()).into_iter().flatten();
        entries.filter_map(|entry| entry.ok().map(|e| e.path())).collect()
    }

    /// The server's GUID that is stored in this pool, or a new one if none is stored.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn server_guid(&self) -> Result<uuid::Uuid, PoolError> {
        let path = self.path.join(".forebay/server-guid");
        if let Some(guid) = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok()) {
            return Ok(guid);
        }
        let guid = uuid::Uuid::new_v4();
        replace(&path, format!("{guid}\n").as_bytes())
            .map_err(|e| self.io("writing the server's GUID", e))?;
        Ok(guid)
    }

    /// Puts on stable storage what earlier servers acknowledged, and returns those starts. Data that a
    /// start before this boot of the machine had in memory may be lost if that start did not write through. Records
    /// `instance`, the current start, for later starts.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn predecessors(&self, instance: u64) -> Result<Vec<Predecessor>, PoolError> {
        let sync = || rustix::fs::syncfs(&self.directory).map_err(Into::into);
        let found = Starts::of(&self.path).begin(instance, self.promise, sync);
        found.map_err(|e| self.io("reading the list of starts", e))
    }
}

/// Records that everything acknowledged by the starts of this boot is on stable storage, regardless of which server serves
/// the pool next, and on which machine. Called at an orderly shutdown, when nothing is acknowledged any more.
///
/// # Errors
/// Those of the file system; the starts are then relied on in this boot only.
pub(crate) fn settle_starts(pool: &Path) -> std::io::Result<()> {
    rustix::fs::syncfs(std::fs::File::open(pool)?)?;
    Starts::of(pool).settle()
}

/// Directory below `.forebay` for links that are about to replace a name.
const LINKS: &str = "links";

/// Removes one entry of the trash and, if it was a volume with a quota, the limit of its project.
///
/// # Errors
/// Those of the file system.
pub fn empty(trash: &Path) -> std::io::Result<()> {
    std::fs::remove_dir_all(trash)?;
    let project = trash.file_name().and_then(|n| n.to_str()).and_then(|n| n.split('.').nth(1)?.parse().ok());
    if let (Some(project @ 1..), Some(parent)) = (project, trash.parent()) {
        // A leftover limit is harmless: the project's next owner sets its own.
        let _ = quota::set_limit(std::fs::File::open(parent)?.as_fd(), project, 0);
    }
    Ok(())
}

fn make_private_directory(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        result => result,
    }
}
