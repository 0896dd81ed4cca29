//! A pool: a directory that holds volumes and all that is needed to serve them.
//!
//! ```text
//! <pool>/.forebay/lock                 held by the one server that uses the pool
//! <pool>/.forebay/server-guid          the server's GUID
//! <pool>/.forebay/volumes/<id>.json    records
//! <pool>/.forebay/trash/               data of deleted volumes, on their way out
//! <pool>/.forebay/reserve              space that is kept for deleting a volume when the pool is full
//! <pool>/.forebay/links/               links on their way to a name that they replace
//! <pool>/volumes/<id>/                 data
//! ```

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_smb::engine::Predecessor;
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::backend::directory::quota::{self, Usage};
use crate::backend::directory::{Promise, Volume};
use crate::config::{PoolQuota, PoolSection};
use crate::limits::{PROJECT_ID_FIRST, RESERVE_BYTES};
use crate::starts::Starts;
use crate::volume::{Quota, Record, RecordError, replace, sync_directory};

/// Why a pool cannot be used, or something cannot be done to it.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// Its directory is not there.
    #[error(
        "pool {pool}: {path} does not exist: make the directory (or mount what belongs there), or change pool.path"
    )]
    Missing {
        /// Name.
        pool: String,
        /// Directory.
        path: PathBuf,
    },
    /// Its directory holds no pool, and should.
    #[error(
        "pool {pool}: {path} holds no pool: is its disk mounted? (to begin an empty one there, set pool.existing = false)"
    )]
    NoPool {
        /// Name.
        pool: String,
        /// Directory.
        path: PathBuf,
    },
    /// Another server uses it.
    #[error(
        "pool {pool}: another forebay-server uses {path}: stop it, or give this one a directory of its own"
    )]
    Locked {
        /// Name.
        pool: String,
        /// Directory.
        path: PathBuf,
    },
    /// The file system said no.
    #[error("pool {pool}: {what}: {error}")]
    Io {
        /// Name.
        pool: String,
        /// Doing what.
        what: String,
        /// Why.
        error: std::io::Error,
    },
    /// Of a record.
    #[error("pool {pool}: {error}")]
    Record {
        /// Name.
        pool: String,
        /// Which and why.
        error: RecordError,
    },
    /// Capacities must be hard, and the file system cannot limit them.
    #[error(
        "pool {pool}: the file system of {path} enforces no project quota: mount it with -o prjquota (XFS, or ext4 with \
         the feature project), or set quota = \"none\" for the pool and ask for volumes without quota"
    )]
    NoQuota {
        /// Name.
        pool: String,
        /// Directory.
        path: PathBuf,
    },
    /// There is data where a new volume's would go.
    #[error("pool {pool}: {path} holds data without a record: move it away or restore the record")]
    Orphan {
        /// Name.
        pool: String,
        /// Directory.
        path: PathBuf,
    },
}

/// What is found of one volume when a pool is opened.
#[derive(Debug)]
pub struct Unserved {
    /// Its id, or the file's name.
    pub name: String,
    /// Why it is not served.
    pub reason: String,
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
    /// Capacities may add up to so many times its size.
    pub overcommit: f64,
    /// What of an operation is on stable storage when it is answered.
    promise: Promise,
    /// Records of its volumes, by id.
    pub records: BTreeMap<String, Record>,
    directory: OwnedFd,
    /// Where links wait that are to replace a name; none where there was no space for it.
    links: Option<PathBuf>,
    _lock: OwnedFd,
}

impl Pool {
    /// Opens the pool and reads its records. A record that is damaged does not keep the others from being served.
    ///
    /// # Errors
    /// Why it cannot be used.
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
            // Filled under a version that had none: its volumes are served all the same.
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
        // Of links that a server has begun and not put in their place.
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
            directory,
            links,
            _lock: lock,
        };
        let unserved = pool.read_records()?;
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

    /// Where the configuration says that the pool is there already: an empty directory in its place, as below the mount
    /// point of a disk that is away, would be served without the volumes.
    ///
    /// # Errors
    /// Where it is not.
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
            self.records.values().filter(|r| r.deleting).map(|r| r.volume_id.clone()).collect();
        for id in deleting {
            // The others can be served all the same; the next start tries again.
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

    /// Where a volume's data are.
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

    /// Size of the file system and what is free of it, in bytes.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn space(&self) -> Result<(u64, u64), PoolError> {
        let space =
            rustix::fs::fstatvfs(&self.directory).map_err(|e| self.io("asking for its space", e.into()))?;
        Ok((space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize))
    }

    /// Sum of the hard capacities of its volumes, in bytes.
    #[must_use]
    pub fn provisioned(&self) -> u64 {
        let hard = self.records.values().filter(|r| r.quota == Quota::Hard && !r.deleting);
        hard.fold(0, |sum, record| sum.saturating_add(record.capacity_bytes))
    }

    /// Bytes that further volumes may be given.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn unprovisioned(&self) -> Result<u64, PoolError> {
        let (total, _) = self.space()?;
        Ok(((total as f64 * self.overcommit) as u64).saturating_sub(self.provisioned()))
    }

    /// What a volume uses, as its quota counts it.
    #[must_use]
    pub fn usage(&self, record: &Record) -> Usage {
        let counted = record.project.map(|project| quota::usage(self.directory.as_fd(), project));
        counted.and_then(Result::ok).unwrap_or_default()
    }

    /// Makes a volume's directory with its quota, then its record, which is what makes it exist.
    ///
    /// # Errors
    /// Why not; nothing of it is left then.
    pub fn create(&mut self, mut record: Record) -> Result<(), PoolError> {
        let path = self.data_path(&record.volume_id);
        if record.quota == Quota::Hard && !self.enforces_quota() {
            return Err(self.no_quota());
        }
        // An attempt that was cut off leaves an empty directory.
        match std::fs::remove_dir(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(_) => return Err(PoolError::Orphan { pool: self.name.clone(), path }),
        }
        std::fs::create_dir(&path).map_err(|e| self.io("making the volume's directory", e))?;
        let made = self
            .furnish(&path, &mut record)
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

    fn furnish(&self, path: &Path, record: &mut Record) -> Result<(), PoolError> {
        let directory =
            std::fs::File::open(path).map_err(|e| self.io("opening the volume's directory", e))?;
        // Everybody may do everything in it, as in the root of a fresh disk: the credentials are the guard, and above it
        // only the server's user gets through.
        let mode = Mode::from_raw_mode(0o777);
        rustix::fs::fchmod(&directory, mode).map_err(|e| self.io("setting the volume's mode", e.into()))?;
        if record.quota == Quota::Hard {
            let project = self.free_project()?;
            record.project = Some(project);
            quota::set_limit(self.directory.as_fd(), project, record.capacity_bytes)
                .and_then(|()| quota::assign(directory.as_fd(), project))
                .map_err(|e| self.io("setting the volume's quota", e.into()))?;
        }
        directory
            .sync_all()
            .and_then(|()| sync_directory(&self.path.join("volumes")))
            .map_err(|e| self.io("syncing the volume's directory", e))
    }

    /// A project that no volume has and no file carries.
    fn free_project(&self) -> Result<u32, PoolError> {
        let taken: Vec<u32> = self.records.values().filter_map(|record| record.project).collect();
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

    /// Opens a volume to serve it, after making sure that its quota holds.
    ///
    /// # Errors
    /// Why it cannot be served.
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

    /// Replaces a volume's record and, where its capacity is larger now, raises the limit first.
    ///
    /// # Errors
    /// Why not; the old record stays.
    pub fn update(&mut self, record: Record) -> Result<(), PoolError> {
        if let (Quota::Hard, Some(project)) = (record.quota, record.project) {
            quota::set_limit(self.directory.as_fd(), project, record.capacity_bytes)
                .map_err(|e| self.io("setting the volume's quota", e.into()))?;
        }
        record.write(&self.records_path()).map_err(|error| self.record_error(error))?;
        self.records.insert(record.volume_id.clone(), record);
        Ok(())
    }

    /// Deletes a volume: from the moment its record says so it is gone, also if the server is killed on the way. The
    /// data are moved to the trash, for [`Pool::trash`] to remove.
    ///
    /// # Errors
    /// Those of the file system; calling it again goes on.
    pub fn delete(&mut self, id: &str) -> Result<(), PoolError> {
        let Some(mut record) = self.records.get(id).cloned() else { return Ok(()) };
        if !record.deleting {
            record.deleting = true;
            self.with_reserve(|| record.write(&self.records_path()))
                .map_err(|error| self.record_error(error))?;
            self.records.insert(id.to_owned(), record.clone());
        }
        let project = record.project.unwrap_or(0);
        let trash = self.trash_path().join(format!("{id}.{project}.{}", uuid::Uuid::new_v4().simple()));
        match std::fs::rename(self.data_path(id), trash) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(self.io("moving the volume to the trash", error));
            }
            _ => {}
        }
        sync_directory(&self.trash_path())
            .and_then(|()| sync_directory(&self.path.join("volumes")))
            .and_then(|()| std::fs::remove_file(self.records_path().join(format!("{id}.json"))))
            .and_then(|()| sync_directory(&self.records_path()))
            .map_err(|e| self.io("removing the volume's record", e))?;
        self.records.remove(id);
        Ok(())
    }

    /// Does what may need a little space; on a full file system with that of the reserve.
    fn with_reserve(&self, write: impl Fn() -> Result<(), RecordError>) -> Result<(), RecordError> {
        match write() {
            Err(RecordError::Io { error, .. }) if is_full(&error) => {
                tracing::warn!(pool = self.name, "the file system is full: using its reserve");
                if let Err(error) = std::fs::remove_file(self.path.join(RESERVE)) {
                    tracing::warn!(pool = self.name, %error, "the reserve cannot be used");
                }
                write()
            }
            written => written,
        }
    }

    /// What is to be removed, for [`empty`] on a thread of its own.
    #[must_use]
    pub fn trash(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.trash_path()).into_iter().flatten();
        entries.filter_map(|entry| entry.ok().map(|e| e.path())).collect()
    }

    /// The server's GUID as this pool remembers it, a new one where it does not.
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

    /// Puts on stable storage what servers before this one acknowledged, and says which starts those were. What a start
    /// before this boot of the machine had in memory may be lost, if it did not write through. Remembers `instance`, of this
    /// start, for those to come.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn predecessors(&self, instance: u64) -> Result<Vec<Predecessor>, PoolError> {
        let sync = || rustix::fs::syncfs(&self.directory).map_err(Into::into);
        let found = Starts::of(&self.path).begin(instance, self.promise, sync);
        found.map_err(|e| self.io("reading the list of starts", e))
    }
}

/// Notes that all that starts of this boot acknowledged is on stable storage, whoever serves the pool next and wherever: at
/// an orderly end, when nothing is acknowledged any more.
///
/// # Errors
/// Those of the file system; then they are relied on in this boot only.
pub(crate) fn settle_starts(pool: &Path) -> std::io::Result<()> {
    rustix::fs::syncfs(std::fs::File::open(pool)?)?;
    Starts::of(pool).settle()
}

/// Sets space aside in a pool for deleting volumes when it is full, where that is not done. A full file system has none until
/// something was deleted.
pub(crate) fn keep_reserve(pool: &Path) {
    let path = pool.join(RESERVE);
    let kept = || -> std::io::Result<()> {
        if path.metadata().is_ok_and(|found| found.blocks() * 512 >= RESERVE_BYTES) {
            return Ok(());
        }
        let file = std::fs::File::create(&path)?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES) {
            // A file system that cannot promise space.
            Err(Errno::OPNOTSUPP) => Ok(()),
            result => result.map_err(Into::into),
        }
    };
    if let Err(error) = kept() {
        let _ = std::fs::remove_file(&path);
        tracing::warn!(pool = %pool.display(), %error, "no space can be set aside for deleting volumes of a full pool");
    }
}

/// Space that is set aside.
const RESERVE: &str = ".forebay/reserve";

/// Below `.forebay`: links on their way.
const LINKS: &str = "links";

/// Removes one thing from the trash and, where it was a volume with a quota, the limit of its project.
///
/// # Errors
/// Those of the file system.
pub fn empty(trash: &Path) -> std::io::Result<()> {
    std::fs::remove_dir_all(trash)?;
    let project = trash.file_name().and_then(|n| n.to_str()).and_then(|n| n.split('.').nth(1)?.parse().ok());
    if let (Some(project @ 1..), Some(parent)) = (project, trash.parent()) {
        // A limit that stays behind is harmless: the project's next owner sets its own.
        let _ = quota::set_limit(std::fs::File::open(parent)?.as_fd(), project, 0);
    }
    Ok(())
}

fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}

fn make_private_directory(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use forebay_smb::fs::{FsHandle, FsOpKind, FsReply, ObjectKind, OpenMode, OpenRequest, RelPath};

    use super::*;
    use crate::buffers::BufferPool;
    use crate::qos::Qos;
    use crate::scratch_disk::Disk;
    use crate::volume::Protection;

    fn section(path: &Path) -> PoolSection {
        PoolSection {
            name: "p".to_owned(),
            path: path.to_owned(),
            create: false,
            existing: false,
            quota: PoolQuota::None,
            overcommit: 1.0,
            write_through: false,
            nvmeof: None,
        }
    }

    fn record(id: &str, quota: Quota) -> Record {
        Record {
            volume_id: id.to_owned(),
            capacity_bytes: 64 << 20,
            quota,
            project: None,
            protection: Protection::Optional,
            accounts: Vec::new(),
            labels: BTreeMap::new(),
            created: 0,
            serial: 1,
            qos: Qos::default(),
            deleting: false,
        }
    }

    #[test]
    fn a_missing_directory_is_named() {
        let error = Pool::open(&section(Path::new("/nowhere/at/all"))).expect_err("missing").to_string();
        assert!(error.contains("/nowhere/at/all does not exist"), "{error}");
    }

    #[test]
    fn a_pool_that_must_be_there_is_not_made() {
        let scratch = tempfile::tempdir().expect("a directory");
        let expected = PoolSection { create: true, existing: true, ..section(scratch.path()) };
        let error = Pool::open(&expected).expect_err("its disk is away").to_string();
        assert!(error.contains("is its disk mounted?"), "{error}");
        assert_eq!(std::fs::read_dir(scratch.path()).expect("listed").count(), 0, "nothing is written");
        drop(Pool::open(&section(scratch.path())).expect("made"));
        assert!(Pool::open(&expected).is_ok());
    }

    #[test]
    fn two_servers_never_share_a_pool() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (first, _) = Pool::open(&section(scratch.path())).expect("opened");
        assert!(matches!(Pool::open(&section(scratch.path())), Err(PoolError::Locked { .. })));
        drop(first);
        assert!(Pool::open(&section(scratch.path())).is_ok());
    }

    #[test]
    fn volumes_outlive_the_server_and_a_damaged_one_harms_no_other() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (mut pool, _) = Pool::open(&section(scratch.path())).expect("opened");
        let guid = pool.server_guid().expect("a guid");
        pool.create(record("a", Quota::None)).expect("made");
        pool.create(record("b", Quota::None)).expect("made");
        drop(pool);
        std::fs::write(scratch.path().join(".forebay/volumes/b.json"), "{").expect("damaged");
        std::fs::write(scratch.path().join(".forebay/volumes/c.tmp"), "{").expect("left behind");
        let (pool, unserved) = Pool::open(&section(scratch.path())).expect("opened");
        assert_eq!(pool.records.keys().collect::<Vec<_>>(), ["a"]);
        assert!(unserved.len() == 1 && unserved[0].name == "b" && unserved[0].reason.contains("damaged"));
        assert!(pool.serve(&pool.records["a"]).is_ok());
        assert_eq!(pool.server_guid().expect("a guid"), guid);
    }

    #[test]
    fn a_hard_quota_is_refused_where_none_can_be_enforced() {
        // tmpfs enforces no project quota.
        let scratch = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let (mut pool, _) = Pool::open(&section(scratch.path())).expect("opened");
        let error = pool.create(record("a", Quota::Hard)).expect_err("refused").to_string();
        assert!(error.contains("prjquota") && error.contains("quota = \"none\""), "{error}");
        assert!(!pool.data_path("a").exists());
    }

    #[test]
    fn links_that_were_on_their_way_when_a_server_was_killed_are_removed() {
        let scratch = tempfile::tempdir().expect("a directory");
        drop(Pool::open(&section(scratch.path())).expect("opened"));
        let left = scratch.path().join(".forebay/links/.forebay-link-7-0");
        std::fs::write(&left, "a file's second name").expect("made");
        drop(Pool::open(&section(scratch.path())).expect("opened"));
        assert!(!left.exists());
    }

    #[test]
    fn deletion_goes_on_after_a_kill_at_any_point() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (mut pool, _) = Pool::open(&section(scratch.path())).expect("opened");
        for id in ["marked", "moved", "whole"] {
            pool.create(record(id, Quota::None)).expect("made");
            std::fs::write(pool.data_path(id).join("file"), "data").expect("written");
        }
        for id in ["marked", "moved"] {
            let mut record = pool.records[id].clone();
            record.deleting = true;
            record.write(&pool.records_path()).expect("marked");
        }
        std::fs::rename(pool.data_path("moved"), pool.trash_path().join("moved.0.x")).expect("moved");
        drop(pool);
        let (mut pool, unserved) = Pool::open(&section(scratch.path())).expect("opened");
        assert!(unserved.is_empty());
        assert_eq!(pool.records.keys().collect::<Vec<_>>(), ["whole"]);
        assert_eq!(pool.trash().len(), 2);
        pool.delete("whole").expect("deleted");
        pool.delete("whole").expect("deleted already");
        for path in pool.trash() {
            empty(&path).expect("removed");
        }
        assert!(pool.trash().is_empty());
        assert_eq!(std::fs::read_dir(scratch.path().join("volumes")).expect("listed").count(), 0);
        assert_eq!(std::fs::read_dir(pool.records_path()).expect("listed").count(), 0);
    }

    #[test]
    fn a_volume_of_a_pool_that_it_has_filled_is_deleted() {
        let Some(disk) = Disk::new("a_volume_of_a_pool_that_it_has_filled_is_deleted") else { return };
        let (mut pool, _) = Pool::open(&section(&disk.path())).expect("opened");
        pool.create(record("full", Quota::None)).expect("made");
        pool.create(record("other", Quota::None)).expect("made");
        drop(pool);
        disk.fill();
        // Taken over full.
        let (mut pool, unserved) = Pool::open(&section(&disk.path())).expect("opened");
        assert!(unserved.is_empty(), "{unserved:?}");
        pool.predecessors(1).expect("noted, or not");
        pool.delete("full").expect("the reserve is for that");
        drop(pool);
        let (pool, unserved) = Pool::open(&section(&disk.path())).expect("opened");
        assert!(unserved.is_empty(), "{unserved:?}");
        assert_eq!(pool.records.keys().collect::<Vec<_>>(), ["other"]);
    }

    #[test]
    fn a_pool_that_was_filled_before_there_was_a_directory_for_links_is_served() {
        let name = "a_pool_that_was_filled_before_there_was_a_directory_for_links_is_served";
        let Some(disk) = Disk::new(name) else { return };
        let (mut pool, _) = Pool::open(&section(&disk.path())).expect("opened");
        pool.create(record("a", Quota::None)).expect("made");
        let [a, b] = ["a", "b"].map(|name| pool.data_path("a").join(name));
        std::fs::write(&a, "a").and_then(|()| std::fs::write(&b, "b")).expect("there is space");
        drop(pool);
        let links = disk.path().join(".forebay/links");
        std::fs::remove_dir(&links).expect("as before it was made");
        disk.fill();
        // Nor is an inode left that was made with others, or room for a name of that length.
        let names = (0_u32..10_000).map(|nth| disk.path().join(".forebay").join(nth.to_string()));
        let made: Vec<PathBuf> = names.take_while(|path| std::fs::create_dir(path).is_ok()).collect();
        let full = std::fs::create_dir(&links).expect_err("there is no space");
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        let (pool, unserved) = Pool::open(&section(&disk.path())).expect("opened");
        assert!(unserved.is_empty(), "{unserved:?}");
        // A link replaces a name all the same, by way of the volume's own directory.
        let volume = pool.serve(&pool.records["a"]).expect("served").handle();
        replace_by_link(&volume, "a", "b");
        assert_eq!(std::fs::read(&b).expect("it is there"), b"a");
        assert_eq!(std::fs::read_dir(pool.data_path("a")).expect("listed").count(), 2);
        drop((volume, pool));
        for path in made {
            std::fs::remove_dir(path).expect("removed");
        }
        std::fs::remove_dir_all(disk.path().join("filler")).expect("removed");
        let (pool, _) = Pool::open(&section(&disk.path())).expect("opened");
        assert!(links.is_dir(), "there is space now");
        let volume = pool.serve(&pool.records["a"]).expect("served").handle();
        replace_by_link(&volume, "a", "b");
    }

    /// Gives a file of the volume a further name, which another file has.
    fn replace_by_link(volume: &FsHandle, from: &str, to: &str) {
        let request = OpenRequest {
            path: RelPath::new(from).expect("a path"),
            mode: OpenMode::Existing,
            kind: ObjectKind::File,
            read: true,
            write: false,
            write_through: false,
            attributes: 0,
            allocation_size: 0,
        };
        let run = |operation| crate::backend::execute(operation, &BufferPool::default());
        let opened = run(FsOpKind::Open { volume: volume.clone(), request });
        let Ok(FsReply::Opened(opened)) = opened else { panic!("it is there") };
        let to = RelPath::new(to).expect("a path");
        let linked = run(FsOpKind::Link { handle: opened.handle, to, replace: true });
        assert!(matches!(linked, Ok(FsReply::Done)), "{:?}", linked.err());
    }

    #[test]
    fn data_without_a_record_are_never_taken_over() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (mut pool, _) = Pool::open(&section(scratch.path())).expect("opened");
        std::fs::create_dir(pool.data_path("a")).expect("made");
        std::fs::write(pool.data_path("a").join("precious"), "data").expect("written");
        assert!(matches!(pool.create(record("a", Quota::None)), Err(PoolError::Orphan { .. })));
        assert!(pool.data_path("a").join("precious").exists());
        std::fs::create_dir(pool.data_path("b")).expect("left by an attempt that was cut off");
        pool.create(record("b", Quota::None)).expect("made");
    }

    #[test]
    fn a_hard_quota_is_refused_where_nothing_enforces_it() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (mut pool, _) = Pool::open(&section(scratch.path())).expect("opened");
        assert!(!pool.enforces_quota(), "no temporary folder is mounted with project quota");
        assert!(matches!(pool.create(record("q", Quota::Hard)), Err(PoolError::NoQuota { .. })));
    }

    #[test]
    fn a_hard_quota_holds_and_grows() {
        let Some(xfs) = forebay_testing::Xfs::new() else { return };
        quota::obey_limits().expect("as the daemon does");
        let (mut pool, _) = Pool::open(&section(&xfs.path())).expect("opened");
        assert!(pool.enforces_quota());
        pool.create(record("q", Quota::Hard)).expect("made");
        pool.create(record("r", Quota::Hard)).expect("made");
        assert_ne!(pool.records["q"].project, pool.records["r"].project);
        let volume = pool.serve(&pool.records["q"]).expect("served");
        assert_eq!(volume.space().expect("space").total, 64 << 20);
        let file = pool.data_path("q").join("file");
        let mut written = 0_u64;
        let error = loop {
            use std::io::Write;
            let mut out = std::fs::OpenOptions::new().append(true).create(true).open(&file).expect("opened");
            match out.write(&[1; 1 << 20]).and_then(|n| out.sync_all().map(|()| n)) {
                Ok(n) => written += n as u64,
                Err(error) => break error,
            }
            assert!(written <= 64 << 20, "the limit does not hold");
        };
        let errno = error.raw_os_error().map(Errno::from_raw_os_error);
        assert!(matches!(errno, Some(Errno::NOSPC | Errno::DQUOT)), "{error}");
        assert!(written >= 60 << 20, "{written} is far below the limit");
        assert!(pool.usage(&pool.records["q"]).bytes >= written);
        let mut larger = pool.records["q"].clone();
        larger.capacity_bytes = 80 << 20;
        pool.update(larger).expect("grown");
        assert_eq!(volume.space().expect("space").total, 80 << 20);
        std::fs::write(pool.data_path("q").join("more"), vec![1; 10 << 20]).expect("fits now");
        pool.delete("q").expect("deleted");
        for path in pool.trash() {
            empty(&path).expect("removed");
        }
    }
}
