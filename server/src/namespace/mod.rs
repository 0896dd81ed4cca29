//! A pool on a namespace of a fabric: connected, taken, mounted, watched (docs/nvmeof.md).
//!
//! The order is what keeps two servers from one file system: nothing is read for a decision, written or mounted before
//! the reservation is ours, and nothing that an earlier server left in this machine's memory is written after it was not.

mod content;
mod growth;
mod guard;
mod mounted;
mod state;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_nvmeof::{
    Authentication, Check, DhChapKey, EnsureError, Epoch, Fabrics, FindError, HostIdentity, InstanceHash,
    InvalidKey, InvalidName, Loss, Me, Namespace, NamespaceDevice, NotAcquired, OpenError, ReservationError,
    Subsystem, Tls, TlsPsk, acquire, check, release,
};
use rustix::mount::MountFlags;
use tracing::{info, warn};
use uuid::Uuid;

use self::content::Content;
use self::growth::Growing;
use self::guard::{Guard, Watched};
pub(crate) use self::guard::{doubt, vouch, wants_vouching};
use self::mounted::{has_ended, mounted_device, unmount_patiently};
pub use self::state::State;
use crate::address::Addresses;
use crate::config::{Config, InstanceSection, NvmeofSection, PoolSection};
use crate::limits::{KEY_FILE_BYTES_MAX, NAMESPACE_BYTES_MIN};
use crate::pool;
use crate::volume::replace;

/// Name space of the file systems' UUIDs.
const POOLS: Uuid = Uuid::from_u128(0x9e4b_30d2_6c1f_4a8e_b7a5_04f2_d86b_19c7);
/// Label of the file systems: what a person sees in blkid.
const LABEL: &str = "forebay";
/// Between two looks for a namespace that is to appear.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// After which a namespace that a connected target does not show is asked for again.
const RESCAN_AFTER: Duration = Duration::from_secs(3);

/// Why a pool's namespace cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("pool {pool}: {reason}")]
pub struct NamespaceError {
    /// Name.
    pool: String,
    /// Why.
    reason: Reason,
}

#[derive(Debug, thiserror::Error)]
enum Reason {
    #[error(transparent)]
    Name(#[from] InvalidName),
    #[error("{path}: {error}")]
    KeyFile { path: PathBuf, error: io::Error },
    #[error("{path}: {error}")]
    Key { path: PathBuf, error: InvalidKey },
    #[error(transparent)]
    Connect(#[from] EnsureError),
    #[error("the namespace did not appear: {0}")]
    Find(#[from] FindError),
    #[error("no path takes I/O to the namespace")]
    NoPath,
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    NotAcquired(#[from] NotAcquired),
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    #[error("the reservation was lost while the file system was mounted: {0}")]
    Lost(Loss),
    #[error("the namespace is read-only")]
    ReadOnly,
    #[error("the namespace has {0} bytes; a pool needs at least {NAMESPACE_BYTES_MIN}")]
    TooSmall(u64),
    #[error("the namespace is blank: set pool.nvmeof.format = true to make a file system on it")]
    Blank,
    #[error(
        "the namespace holds something that is no pool: nothing was written; if nobody needs it, clear it with wipefs -a"
    )]
    Foreign,
    #[error(
        "the namespace holds the file system {found} (label {label:?}), which is not that of this pool ({expected}): nothing \
         was written"
    )]
    Stranger { found: Uuid, label: String, expected: Uuid },
    #[error("mkfs.xfs: {0}")]
    Format(String),
    #[error(
        "the file system is damaged: unmounted as it is, look at it with xfs_repair -n and mend it with xfs_repair"
    )]
    Damaged,
    #[error("{path} holds another mounted file system: unmount it, or change pool.path")]
    Occupied { path: PathBuf },
    #[error(
        "the pool was used in epoch {recorded} of this instance; this is epoch {ours}, which is the older one and steps back"
    )]
    Superseded { recorded: u64, ours: u64 },
    #[error("{what}: {error}")]
    Io { what: &'static str, error: io::Error },
}

fn io(what: &'static str) -> impl Fn(io::Error) -> Reason {
    move |error| Reason::Io { what, error }
}

/// A pool's namespace, ours and mounted.
#[derive(Debug)]
pub struct Attached {
    pool: String,
    path: PathBuf,
    guard: Guard,
    state: Arc<State>,
}

/// Attaches the namespaces of all pools that have one. The addresses are given up where one is lost.
///
/// # Errors
/// The first one's that cannot be; those before it are given back.
pub fn attach_all(config: &Config, addresses: &Arc<Addresses>) -> Result<Vec<Attached>, NamespaceError> {
    let mut all = Vec::new();
    for pool in &config.pool {
        let Some(section) = &pool.nvmeof else { continue };
        match attach(&config.instance, pool, section, addresses) {
            Ok(attached) => all.push(attached),
            Err(reason) => {
                all.into_iter().for_each(Attached::detach);
                return Err(NamespaceError { pool: pool.name.clone(), reason });
            }
        }
    }
    Ok(all)
}

fn attach(
    instance: &InstanceSection,
    pool: &PoolSection,
    section: &NvmeofSection,
    addresses: &Arc<Addresses>,
) -> Result<Attached, Reason> {
    let wanted = subsystem(instance, section)?;
    let epoch = u32::try_from(instance.epoch).ok().and_then(Epoch::new);
    let epoch = epoch.expect("the configuration was checked");
    let me = Me { instance: InstanceHash::of(&instance.name), epoch, host: wanted.host.id() };
    let fabrics = Fabrics::default();
    let tls = wanted.tls.is_some();
    info!(pool = pool.name, host = %wanted.host.nqn(), nqn = %wanted.nqn, tls, "connecting the namespace");
    let namespace = connected(&fabrics, &wanted, section)?;
    info!(pool = pool.name, device = namespace.name, key = %me.key(), "namespace found");
    // Before the reservation: a target may refuse every command on what is write-protected, reports among them.
    if namespace.read_only {
        return Err(Reason::ReadOnly);
    }
    let device = Arc::new(fabrics.open(&namespace)?);

    // A server before us on this machine may have left it mounted. Only where the reservation was ours all the time is
    // what it has in memory still true.
    let until = Instant::now() + section.connect_time();
    let before = patiently(&fabrics, section, until, || Ok(check(&*device, &me)?))?;
    let ended = has_ended(&pool.path);
    let goes_on = before == Check::Held && !ended;
    let mounted = match mounted_device(&pool.path) {
        Some(number) if number == namespace.device || ended => true,
        Some(_) => return Err(Reason::Occupied { path: pool.path.clone() }),
        None => false,
    };
    if matches!(before, Check::Lost(Loss::OtherKey(_))) {
        // One of an earlier epoch may still run here: it ends itself when it sees our key.
        patiently(&fabrics, section, until, || Ok(acquire(&*device, &me)?))?;
    }
    if mounted && !goes_on {
        warn!(
            pool = pool.name,
            ended, "ending the file system of an earlier server, which is not to be relied on"
        );
        guard::end_file_system(&pool.path).map_err(io("ending the file system of an earlier server"))?;
        unmount_patiently(&pool.path).map_err(io("unmounting the file system of an earlier server"))?;
    }
    patiently(&fabrics, section, until, || Ok(acquire(&*device, &me)?))?;
    info!(pool = pool.name, key = %me.key(), "the reservation is ours");

    let fresh = !(mounted && goes_on);
    let names = (section.nqn.to_string(), section.namespace.to_string());
    let state = Arc::new(State::new(pool.name.clone(), names, section.paths.len(), section.loss_time()));
    let prepared = prepare(instance, pool, section, &namespace, fresh).and_then(|()| {
        // Mounting may have taken longer than a reservation may go unconfirmed.
        let asked = Instant::now();
        match check(&*device, &me)? {
            Check::Held => state.confirm(asked),
            Check::Lost(loss) => return Err(Reason::Lost(loss)),
        }
        let watched = Watched {
            pool: pool.name.clone(),
            device: Arc::clone(&device),
            me,
            sysfs: fabrics.sysfs().clone(),
            nqn: section.nqn.clone(),
            namespace: section.namespace,
            state: Arc::clone(&state),
            addresses: Arc::clone(addresses),
            directory: File::open(&pool.path).map_err(io("opening the mount point"))?,
            growing: Growing { device: Path::new("/dev").join(&namespace.name), path: pool.path.clone() },
        };
        Guard::start(watched).map_err(io("starting to watch the namespace"))
    });
    match prepared {
        Ok(guard) => Ok(Attached { pool: pool.name.clone(), path: pool.path.clone(), guard, state }),
        Err(reason) => {
            give_back(&pool.name, &pool.path, &device, &me);
            Err(reason)
        }
    }
}

impl Attached {
    /// How it is, now and later.
    #[must_use]
    pub fn state(&self) -> Arc<State> {
        Arc::clone(&self.state)
    }

    /// Unmounts the pool, for an orderly end. Where something still uses the file system, it stays, and the next server of
    /// this instance on this machine goes on with it.
    ///
    /// The reservation stays in any case. Where a server was killed, its machine's kernel still has the file system as it was
    /// then, and tries again and again to write what it has of it: that must be refused when nobody serves, too. A later
    /// epoch takes it, wherever.
    pub fn detach(self) {
        self.guard.stop();
        unmount(&self.pool, &self.path);
    }
}

/// After a start that failed. The reservation goes last, and only from what is not mounted.
fn give_back(pool: &str, path: &Path, device: &NamespaceDevice, me: &Me) {
    if !unmount(pool, path) {
        return;
    }
    if let Err(error) = release(device, me) {
        warn!(pool, %error, "the reservation could not be given back");
    }
}

/// Whether nothing is mounted there any more.
fn unmount(pool: &str, path: &Path) -> bool {
    // What has served it lets go of it, but the kernel may take a moment to close all files.
    if mounted_device(path).is_some()
        && let Err(error) = unmount_patiently(path)
    {
        warn!(pool, %error, "the pool stays mounted");
        return false;
    }
    true
}

fn subsystem(instance: &InstanceSection, section: &NvmeofSection) -> Result<Subsystem, Reason> {
    let node = match section.node.as_str() {
        "" => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        node => node.to_owned(),
    };
    let host = HostIdentity::of(&instance.name, &node)?;
    let mut wanted = Subsystem::new(section.nqn.clone(), host);
    wanted.timing.keep_alive_s = section.keep_alive_s;
    if let Some(host) = key(&section.dhchap_key, DhChapKey::parse)? {
        let controller = key(&section.dhchap_controller_key, DhChapKey::parse)?;
        wanted.authentication = Some(Authentication { host, controller });
    }
    if let Some(psk) = key(&section.tls_key, TlsPsk::parse)? {
        let identity = section.identity_version().expect("the configuration was checked");
        wanted.tls = Some(Tls { psk, identity });
    }
    Ok(wanted)
}

/// The key in a file; none where no file is named.
fn key<T>(path: &Path, parse: impl Fn(&str) -> Result<T, InvalidKey>) -> Result<Option<T>, Reason> {
    if path.as_os_str().is_empty() {
        return Ok(None);
    }
    let read = || -> io::Result<zeroize::Zeroizing<String>> {
        let mut text = zeroize::Zeroizing::new(String::with_capacity(KEY_FILE_BYTES_MAX as usize));
        File::open(path)?.take(KEY_FILE_BYTES_MAX).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = read().map_err(|error| Reason::KeyFile { path: path.to_owned(), error })?;
    parse(text.trim()).map(Some).map_err(|error| Reason::Key { path: path.to_owned(), error })
}

/// Connects until there is a path that takes I/O, or the time is over. The target may come up after us.
fn connected(fabrics: &Fabrics, wanted: &Subsystem, section: &NvmeofSection) -> Result<Namespace, Reason> {
    let until = Instant::now() + section.connect_time();
    loop {
        let found = match fabrics.ensure_connected(wanted, &section.paths) {
            Ok(ensured) => {
                for error in &ensured.failed {
                    warn!(%error, "a path to a namespace is missing");
                }
                wait_for(fabrics, section, until)
            }
            // Waiting does not help.
            Err(error @ (EnsureError::NotPlanned(_) | EnsureError::Key(_))) => return Err(error.into()),
            Err(error) => Err(error.into()),
        };
        match found {
            Ok(namespace) => return Ok(namespace),
            Err(reason) if Instant::now() >= until => return Err(reason),
            Err(_) => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

/// The kernel lists namespaces a moment after it has connected.
fn wait_for(fabrics: &Fabrics, section: &NvmeofSection, until: Instant) -> Result<Namespace, Reason> {
    let mut rescan = Instant::now() + RESCAN_AFTER;
    loop {
        let found = fabrics.sysfs().read();
        let reason = match found.namespace(&section.nqn, &section.namespace) {
            Ok(namespace) => {
                let takes_io = found.subsystem(&section.nqn).is_some_and(|s| s.takes_io(namespace.nsid));
                if takes_io {
                    return Ok(namespace.clone());
                }
                Reason::NoPath
            }
            Err(error) => error.into(),
        };
        let now = Instant::now();
        if now >= until {
            return Err(reason);
        }
        if now >= rescan && matches!(reason, Reason::Find(FindError::NoNamespace { .. })) {
            rescan = now + RESCAN_AFTER;
            for controller in found.subsystem(&section.nqn).into_iter().flat_map(|s| &s.controllers) {
                if let Err(error) = fabrics.rescan(&controller.name) {
                    warn!(controller = controller.name, %error, "the kernel does not look for namespaces again");
                }
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Asks the target again where its answer did not come. It may have done what it was told to and still wait for what the host
/// that lost the reservation has on its way. Nobody is told when that has ended, but a host that is silent is cut off after
/// its keep-alive time, and what it had on its way with it.
fn patiently<T>(
    fabrics: &Fabrics,
    section: &NvmeofSection,
    until: Instant,
    ask: impl Fn() -> Result<T, Reason>,
) -> Result<T, Reason> {
    loop {
        let reason = match ask() {
            Err(
                reason @ (Reason::Reservation(ReservationError::NoPath)
                | Reason::NotAcquired(NotAcquired::Reservation(ReservationError::NoPath))),
            ) => reason,
            answer => return answer,
        };
        if Instant::now() >= until {
            return Err(reason);
        }
        warn!(%reason, "the reservation is asked about again when whoever had it is cut off for certain");
        std::thread::sleep(section.cut_off_time());
        wait_for(fabrics, section, until)?;
    }
}

/// Everything between the reservation and the pool. Writes only to what is blank or ours.
fn prepare(
    instance: &InstanceSection,
    pool: &PoolSection,
    section: &NvmeofSection,
    namespace: &Namespace,
    fresh: bool,
) -> Result<(), Reason> {
    if fresh {
        let device = Path::new("/dev").join(&namespace.name);
        let expected = identity(instance, pool);
        let file = File::open(&device).map_err(io("opening the namespace"))?;
        let content = content::look(&file, namespace.size_bytes).map_err(io("reading the namespace"))?;
        drop(file);
        if let Some(force) = decide(content, expected, section.format, namespace)? {
            format(&device, expected, force)?;
            info!(pool = pool.name, uuid = %expected, "made a file system on the blank namespace");
        }
        let started = Instant::now();
        mount(&device, &pool.path)?;
        if let Err(error) = end_at_the_first_error(Path::new("/sys/fs/xfs"), &namespace.name) {
            warn!(pool = pool.name, %error, "XFS will try again and again to write metadata that the target refuses");
        }
        info!(
            pool = pool.name,
            milliseconds = started.elapsed().as_millis() as u64,
            "mounted, its log replayed"
        );
        pool::distrust_starts(&pool.path).map_err(io("noting that earlier starts may have lost data"))?;
    }
    record_epoch(&pool.path, instance.epoch)
}

/// The UUID that this pool's file system has.
fn identity(instance: &InstanceSection, pool: &PoolSection) -> Uuid {
    Uuid::new_v5(&POOLS, format!("{}\0{}", instance.name, pool.name).as_bytes())
}

/// Whether a file system is to be made; if so, whether over one of ours that was not finished.
fn decide(
    content: Content,
    expected: Uuid,
    format: bool,
    namespace: &Namespace,
) -> Result<Option<bool>, Reason> {
    let make = |force| match (format, namespace.size_bytes) {
        (false, _) => Err(Reason::Blank),
        (true, bytes) if bytes < NAMESPACE_BYTES_MIN => Err(Reason::TooSmall(bytes)),
        (true, _) => Ok(Some(force)),
    };
    match content {
        Content::Xfs { uuid, unfinished: true, .. } if uuid == expected => make(true),
        Content::Xfs { uuid, .. } if uuid == expected => Ok(None),
        Content::Xfs { uuid, label, .. } => Err(Reason::Stranger { found: uuid, label, expected }),
        Content::Blank => make(false),
        Content::Foreign => Err(Reason::Foreign),
    }
}

fn format(device: &Path, uuid: Uuid, force: bool) -> Result<(), Reason> {
    let mut command = Command::new("mkfs.xfs");
    // Without -f it refuses by itself what it recognises.
    command.args(["-q", "-L", LABEL, "-m"]).arg(format!("uuid={uuid}"));
    if force {
        command.arg("-f");
    }
    let output = command.arg(device).output().map_err(io("starting mkfs.xfs"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Reason::Format(said.trim().chars().take(500).collect()))
}

fn mount(device: &Path, at: &Path) -> Result<(), Reason> {
    std::fs::create_dir_all(at).map_err(io("making the mount point"))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID;
    rustix::mount::mount(device, at, "xfs", flags, Some(c"prjquota")).map_err(|errno| match errno {
        // XFS: structure needs cleaning, or a checksum is wrong.
        rustix::io::Errno::UCLEAN | rustix::io::Errno::BADMSG => Reason::Damaged,
        errno => io("mounting the file system")(errno.into()),
    })
}

/// By default XFS tries for ever to write metadata, also where another host has the namespace by now, and would do so with
/// what is long out of date at the first moment in which nothing refuses it. So it ends at the first error instead.
fn end_at_the_first_error(xfs: &Path, device: &str) -> io::Result<()> {
    for class in ["default", "EIO", "ENODEV"] {
        std::fs::write(xfs.join(device).join("error/metadata").join(class).join("max_retries"), "0")?;
    }
    Ok(())
}

/// The epoch lies in the pool, too: a target that forgets reservations when it restarts would let in whoever comes first.
fn record_epoch(pool: &Path, ours: u64) -> Result<(), Reason> {
    let folder = pool.join(".forebay");
    let path = folder.join("epoch");
    let recorded = match std::fs::read_to_string(&path) {
        Ok(text) => text
            .trim()
            .parse()
            .map_err(|_| io("reading the pool's epoch")(io::ErrorKind::InvalidData.into()))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        Err(error) => return Err(io("reading the pool's epoch")(error)),
    };
    if recorded > ours {
        return Err(Reason::Superseded { recorded, ours });
    }
    if recorded == ours {
        return Ok(());
    }
    let record = || -> io::Result<()> {
        match std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        replace(&path, format!("{ours}\n").as_bytes())
    };
    record().map_err(io("recording the pool's epoch"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(size_bytes: u64) -> Namespace {
        Namespace {
            name: "nvme0n1".into(),
            device: (259, 0),
            nsid: 1,
            uuid: None,
            nguid: None,
            size_bytes,
            block_bytes: 4096,
            read_only: false,
        }
    }

    #[test]
    fn a_file_system_is_made_on_what_is_blank_and_only_when_that_is_wanted() {
        let expected = Uuid::from_u128(7);
        let large = namespace(1 << 40);
        let xfs = |uuid, unfinished| Content::Xfs { uuid, label: "x".into(), unfinished };
        let decided = |content, format| decide(content, expected, format, &large);
        assert!(matches!(decided(Content::Blank, true), Ok(Some(false))));
        assert!(matches!(decided(Content::Blank, false), Err(Reason::Blank)));
        for format in [true, false] {
            assert!(matches!(decided(xfs(expected, false), format), Ok(None)));
            assert!(matches!(decided(Content::Foreign, format), Err(Reason::Foreign)));
            for unfinished in [true, false] {
                let stranger = decided(xfs(Uuid::from_u128(8), unfinished), format);
                assert!(matches!(stranger, Err(Reason::Stranger { .. })));
            }
        }
        assert!(matches!(decided(xfs(expected, true), true), Ok(Some(true))));
        assert!(matches!(decided(xfs(expected, true), false), Err(Reason::Blank)));
        let small = decide(Content::Blank, expected, true, &namespace(1 << 20));
        assert!(matches!(small, Err(Reason::TooSmall(_))));
    }

    #[test]
    fn an_older_epoch_steps_back_from_what_a_later_one_has_used() {
        let pool = tempfile::tempdir().expect("tmp");
        record_epoch(pool.path(), 3).expect("it is the first");
        record_epoch(pool.path(), 3).expect("it is the same");
        record_epoch(pool.path(), 4).expect("it is later");
        let older = record_epoch(pool.path(), 3);
        assert!(matches!(older, Err(Reason::Superseded { recorded: 4, ours: 3 })), "{older:?}");
        std::fs::write(pool.path().join(".forebay/epoch"), "many").expect("written");
        assert!(matches!(record_epoch(pool.path(), 9), Err(Reason::Io { .. })));
    }

    #[test]
    fn a_key_that_cannot_be_read_is_told_by_its_file_alone() {
        let file = tempfile::NamedTempFile::new().expect("tmp");
        std::fs::write(file.path(), "DHHC-1:00:c2VjcmV0:\n").expect("written");
        let told = [
            key(file.path(), DhChapKey::parse).expect_err("it is none"),
            key(file.path(), TlsPsk::parse).expect_err("it is none"),
        ];
        for error in told.map(|error| error.to_string()) {
            let named = error.contains(&file.path().display().to_string());
            assert!(named && !error.contains("c2VjcmV0"), "{error}");
        }
        assert!(matches!(key(Path::new("/nonexistent/key"), TlsPsk::parse), Err(Reason::KeyFile { .. })));
        assert!(matches!(key(Path::new(""), DhChapKey::parse), Ok(None)));
    }
}
