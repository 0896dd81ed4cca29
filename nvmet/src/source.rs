//! The backing devices and files of the configured namespaces: finds and examines them, and claims them while they are being
//! offered.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::{IFlags, OFlags, SeekFrom, seek};
use rustix::io::Errno;

use crate::config::{Config, Source};
use crate::content::{self, Content};
use crate::limits::UNFIT_FOR;
use crate::observed::Observed;
use crate::plan::Tells;

/// A namespace: subsystem and identifier.
pub(crate) type Key = (String, u32);

/// The configured and the current backing device or file of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ground {
    pub(crate) there: There,
    /// The backing device or file of the kernel's namespace, if it is a different one.
    pub(crate) held: Held,
    /// Durability of writes on a power loss.
    pub(crate) cache: Cache,
    /// Size that was last reported to hosts.
    pub(crate) reported_bytes: Option<u64>,
}

/// What exists at the configured path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum There {
    /// A file that must be created.
    ToMake,
    /// The backing device or file that the namespace offers now.
    Offered { bytes: u64 },
    /// Can be offered: blank, or a Forebay pool, and not in use.
    Fit { path: PathBuf, bytes: u64 },
    /// Must not be offered, with the reason.
    Unfit(String),
}

/// Durability of writes that were acknowledged to hosts but not flushed, when this machine loses power.
///
/// Hosts flush, so lost writes alone do no harm. But a flush in progress at a power loss is resent by the host's kernel when
/// the target is back, and succeeds even if earlier writes were lost. So no acknowledged write may be lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cache {
    /// The writes are durable.
    Durable,
    /// The writes would be durable if the file had the attribute.
    CanBeDurable,
    /// The writes are lost, with the reason.
    Volatile(String),
}

/// The backing device or file of an enabled namespace, if it is not the configured one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    Nothing,
    /// It no longer exists.
    Gone(PathBuf),
    /// A different one.
    Other(PathBuf),
}

/// Identifies a drive or file independently of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Identity {
    /// Device number.
    Device(u64),
    /// Device number of the file system, and inode number.
    File(u64, u64),
}

/// The results of a survey, and the claims that exclude other users from drives while they are being offered.
#[derive(Debug, Default)]
pub(crate) struct Grounds {
    pub(crate) by_key: BTreeMap<Key, Ground>,
    /// Closed when dropped.
    claims: Vec<File>,
}

/// A drive that is removed and reattached is a new drive for the kernel, even under the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Appearance {
    identity: Identity,
    /// Sequence number of the disk, among all disks that have appeared since boot.
    sequence: Option<u64>,
}

/// Repeats surveys, and caches results that are expensive or cannot be read from the kernel.
#[derive(Debug, Default)]
pub(crate) struct Surveyor {
    /// The backing devices and files of enabled namespaces when they were first observed.
    appearances: BTreeMap<Key, Appearance>,
    reported_bytes: BTreeMap<Key, u64>,
    unfit: BTreeMap<PathBuf, (Instant, String)>,
}

impl Surveyor {
    /// Discards the results for unfit drives.
    pub(crate) fn look_again(&mut self) {
        self.unfit.clear();
    }

    /// Records what has been reported to hosts.
    pub(crate) fn reported(&mut self, key: &Key, tells: Tells) {
        let (Tells::Offered(bytes) | Tells::Size(bytes)) = tells;
        self.reported_bytes.insert(key.clone(), bytes);
        if let Tells::Offered(_) = tells {
            // A reattached drive is the current one from now on.
            self.appearances.remove(key);
        }
    }

    /// Examines the backing devices and files of all namespaces.
    pub(crate) fn survey(&mut self, config: &Config, observed: &Observed, now: Instant) -> Grounds {
        self.unfit.retain(|_, (at, _)| now.duration_since(*at) < UNFIT_FOR);
        let mut users = users(observed);
        let mut grounds = Grounds::default();
        for subsystem in &config.subsystems {
            let nqn = subsystem.nqn.as_str();
            for namespace in &subsystem.namespaces {
                let key = (nqn.to_owned(), namespace.id);
                let enabled = observed
                    .subsystems
                    .get(nqn)
                    .and_then(|found| found.namespaces.get(&namespace.id))
                    .filter(|found| found.enabled);
                if enabled.is_none() {
                    self.reported_bytes.remove(&key);
                    self.appearances.remove(&key);
                }
                let now_on = enabled.and_then(|found| found.device.as_deref());
                let there = self.there(&namespace.source, &key, now_on, &mut users, &mut grounds.claims, now);
                let held = match (&there, now_on) {
                    (There::Offered { .. }, _) | (_, None) => Held::Nothing,
                    (_, Some(path)) if is_gone(path) || self.has_come_back(&key, path) => {
                        Held::Gone(path.into())
                    }
                    (There::Unfit(_), Some(path)) if path == namespace.source.path() => Held::Nothing,
                    (_, Some(path)) => Held::Other(path.into()),
                };
                let reported_bytes = self.reported_bytes.get(&key).copied();
                let cache = cache_of(&namespace.source);
                grounds.by_key.insert(key, Ground { there, held, cache, reported_bytes });
            }
        }
        grounds
    }

    fn there(
        &mut self,
        source: &Source,
        key: &Key,
        now_on: Option<&Path>,
        users: &mut BTreeMap<Identity, Key>,
        claims: &mut Vec<File>,
        now: Instant,
    ) -> There {
        let path = source.path();
        let (canonical, identity) = match identify(source) {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound && matches!(source, Source::File { .. }) => {
                return There::ToMake;
            }
            Err(error) => return There::Unfit(format!("{}: {error}", path.display())),
        };
        // A device or file that is already offered is not opened and not examined: hosts use it.
        if let Some(on) = now_on
            && identity_of(on).is_ok_and(|on| on == identity)
            && self.has_stayed(key, identity)
        {
            return match bytes_of(&canonical, identity) {
                Ok(bytes) => There::Offered { bytes },
                Err(error) => There::Unfit(format!("{}: {error}", path.display())),
            };
        }
        if let Some((nqn, id)) = users.get(&identity).filter(|user| *user != key) {
            return There::Unfit(format!("{}: namespace {id} of {nqn} lies on it", path.display()));
        }
        if let Some((_, why)) = self.unfit.get(path) {
            return There::Unfit(why.clone());
        }
        match examine(&canonical, identity) {
            Ok((claim, bytes)) => {
                users.insert(identity, key.clone());
                claims.push(claim);
                There::Fit { path: canonical, bytes }
            }
            Err(why) => {
                let why = format!("{}: {why}", path.display());
                self.unfit.insert(path.into(), (now, why.clone()));
                There::Unfit(why)
            }
        }
    }
}

impl Surveyor {
    /// Whether the enabled namespace still uses the drive or file that exists under this name.
    fn has_stayed(&mut self, key: &Key, identity: Identity) -> bool {
        let now = Appearance { identity, sequence: sequence_of(identity) };
        *self.appearances.entry(key.clone()).or_insert(now) == now
    }

    /// Whether a drive was removed and reattached: the kernel's namespace uses its stale device.
    fn has_come_back(&self, key: &Key, path: &Path) -> bool {
        let before = self.appearances.get(key);
        identity_of(path).is_ok_and(|identity| {
            matches!(identity, Identity::Device(_))
                && before.is_some_and(|before| before.sequence != sequence_of(identity))
        })
    }
}

/// The disk's sequence number, also for a partition of it; `None` for files, and before Linux 5.15.
fn sequence_of(identity: Identity) -> Option<u64> {
    let Identity::Device(device) = identity else { return None };
    disk_attribute(device, "diskseq").ok()?.parse().ok()
}

/// An attribute of a disk, also for a partition of it.
fn disk_attribute(device: u64, name: &str) -> io::Result<String> {
    let at = format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let text = fs::read_to_string(format!("{at}/{name}"))
        .or_else(|_| fs::read_to_string(format!("{at}/../{name}")))?;
    Ok(text.trim().to_owned())
}

/// Called also if it is offered: a file is opened only for its attributes, and a drive not at all.
fn cache_of(source: &Source) -> Cache {
    let look = || match identify(source)? {
        (_, Identity::Device(device)) => Ok(cache_of_drive(&disk_attribute(device, "queue/write_cache")?)),
        (path, Identity::File(..)) => {
            let flags = rustix::fs::ioctl_getflags(&File::open(path)?)?;
            Ok(if flags.contains(IFlags::SYNC) { Cache::Durable } else { Cache::CanBeDurable })
        }
    };
    look().unwrap_or_else(|error: io::Error| {
        Cache::Volatile(format!("whether its writes last is not known: {error}"))
    })
}

/// Evaluates the kernel's report of a disk's cache (Documentation/ABI/stable/sysfs-block, `write_cache`).
fn cache_of_drive(says: &str) -> Cache {
    match says {
        "write through" => Cache::Durable,
        _ => Cache::Volatile("it has a write cache that loses what is in it with the power".into()),
    }
}

/// The backing devices and files of all namespaces in the kernel.
fn users(observed: &Observed) -> BTreeMap<Identity, Key> {
    let namespaces = observed.subsystems.iter().flat_map(|(nqn, subsystem)| {
        subsystem.namespaces.iter().map(move |(id, namespace)| (nqn, *id, namespace))
    });
    namespaces
        .filter(|(_, _, namespace)| namespace.enabled)
        .filter_map(|(nqn, id, namespace)| {
            Some((identity_of(namespace.device.as_deref()?).ok()?, (nqn.clone(), id)))
        })
        .collect()
}

/// The path without links, and its identity.
fn identify(source: &Source) -> io::Result<(PathBuf, Identity)> {
    let canonical = fs::canonicalize(source.path())?;
    let identity = identity_of(&canonical)?;
    match (source, identity) {
        (Source::Device(_), Identity::Device(_)) | (Source::File { .. }, Identity::File(..)) => {
            Ok((canonical, identity))
        }
        (Source::Device(_), _) => Err(io::Error::other("it is no drive or partition")),
        (Source::File { .. }, _) => Err(io::Error::other("it is a device: say device, not file")),
    }
}

fn identity_of(path: &Path) -> io::Result<Identity> {
    let found = fs::metadata(path)?;
    let kind = found.file_type();
    if kind.is_block_device() {
        Ok(Identity::Device(found.rdev()))
    } else if kind.is_file() {
        Ok(Identity::File(found.dev(), found.ino()))
    } else {
        Err(io::Error::other("it is neither a block device nor a file"))
    }
}

fn bytes_of(path: &Path, identity: Identity) -> io::Result<u64> {
    match identity {
        Identity::File(..) => Ok(fs::metadata(path)?.len()),
        Identity::Device(_) => Ok(seek(File::open(path)?, SeekFrom::End(0))?),
    }
}

/// Whether a drive that the kernel was given has been removed from the machine. Its name can remain in a container's /dev.
fn is_gone(path: &Path) -> bool {
    let Err(error) = identity_of(path).and_then(|identity| bytes_of(path, identity)) else { return false };
    error.kind() == ErrorKind::NotFound
        || [Errno::NXIO, Errno::NODEV].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Claims and examines it; returns its size, or why it must not be offered.
fn examine(path: &Path, identity: Identity) -> Result<(File, u64), String> {
    let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
    if let Identity::Device(_) = identity {
        // open(2): fails with EBUSY if a file system, swap, LVM, md or another program uses it, or a partition of it.
        flags |= OFlags::EXCL;
    }
    // Opened for writing, too, as the kernel does: a drive that cannot be written is unusable for a pool.
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags.bits() as i32).open(path);
    let file = opened.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::BUSY) => {
            "it is in use on this machine: mounted, swap, or a part of LVM, a RAID or another drive"
                .to_owned()
        }
        _ => error.to_string(),
    })?;
    if let Identity::File(device, inode) = identity
        && let Some(name) = loop_device_on(device, inode)
    {
        return Err(format!("it is in use on this machine: {name} lies on it"));
    }
    let bytes = bytes_of(path, identity).map_err(|error| error.to_string())?;
    match content::look(&file, bytes).map_err(|error| error.to_string())? {
        Content::Blank | Content::Pool if bytes == 0 => Err("it has no space".into()),
        Content::Blank | Content::Pool => Ok((file, bytes)),
        Content::Other(what) => Err(format!(
            "it holds {what}; what is to be offered must be blank (zeros in its first and last 4 MiB) or hold a pool of Forebay"
        )),
    }
}

/// The loop device that is backed by a file.
fn loop_device_on(device: u64, inode: u64) -> Option<String> {
    let loops = fs::read_dir("/sys/block").ok()?.flatten();
    let name = |entry: fs::DirEntry| entry.file_name().into_string().ok();
    loops.filter_map(name).filter(|name| name.starts_with("loop")).find(|name| {
        let at = format!("/sys/block/{name}/loop/backing_file");
        let path = fs::read_to_string(at).unwrap_or_default();
        let path = path.trim_end_matches('\n');
        fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (device, inode))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use super::*;
    use crate::observed::{Namespace, Subsystem};

    const NQN: &str = "nqn.2026-01.io.forebay:a";

    fn config(files: &[&Path]) -> Config {
        let namespaces: String = (1..)
            .zip(files)
            .map(|(id, path)| {
                format!(
                    "[[subsystem.namespace]]\nid = {id}\nuuid = \"00000000-0000-0000-0000-{id:012}\"\n\
                     file = {path:?}\nsize = \"1MiB\"\n"
                )
            })
            .collect();
        let text = format!(
            "[[port]]\ntransport = \"tcp\"\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \"{NQN}\"\n{namespaces}"
        );
        Config::parse(&text).expect("a configuration")
    }

    fn offering(path: &Path) -> Observed {
        let namespace = Namespace { device: Some(path.into()), enabled: true, ..Namespace::default() };
        let subsystem = Subsystem { namespaces: [(1, namespace)].into(), ..Subsystem::default() };
        Observed { subsystems: [(NQN.to_owned(), subsystem)].into(), ..Observed::default() }
    }

    fn file(folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        File::create(&path).expect("a file").set_len(1 << 20).expect("room");
        path
    }

    #[test]
    fn survey_classifies_files_and_rechecks_unfit_ones_after_a_delay() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().canonicalize().expect("the folder exists");
        let (absent, fit, foreign) = (folder.join("absent"), file(&folder, "fit"), file(&folder, "foreign"));
        let link = folder.join("link");
        std::os::unix::fs::symlink(&fit, &link).expect("a link");
        File::options()
            .write(true)
            .open(&foreign)
            .expect("open")
            .write_all_at(b"\x53\xef", 1080)
            .expect("written");
        let mut surveyor = Surveyor::default();
        let now = Instant::now();
        let config = config(&[&absent, &fit, &foreign, &link]);
        let grounds = surveyor.survey(&config, &Observed::default(), now);
        let there = |id: u32| grounds.by_key[&(NQN.to_owned(), id)].there.clone();
        let unfit = |id: u32, says: &str| match there(id) {
            There::Unfit(why) => assert!(why.contains(says), "{why}"),
            other => panic!("{other:?}"),
        };
        assert_eq!(there(1), There::ToMake);
        assert_eq!(there(2), There::Fit { path: fit.clone(), bytes: 1 << 20 });
        unfit(3, "an ext2, ext3 or ext4 file system");
        // Under another name.
        unfit(4, &format!("namespace 2 of {NQN} lies on it"));

        // An unfit drive is examined again only after some time.
        File::create(&foreign).expect("emptied").set_len(1 << 20).expect("room");
        let later = now + UNFIT_FOR - Duration::from_millis(1);
        let grounds = surveyor.survey(&config, &Observed::default(), later);
        assert!(matches!(grounds.by_key[&(NQN.to_owned(), 3)].there, There::Unfit(_)));
        let grounds = surveyor.survey(&config, &Observed::default(), now + UNFIT_FOR);
        assert!(matches!(grounds.by_key[&(NQN.to_owned(), 3)].there, There::Fit { .. }));
    }

    #[test]
    fn backing_file_of_an_enabled_namespace_is_recognized_by_any_path() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().canonicalize().expect("the folder exists");
        let (one, other) = (file(&folder, "one"), file(&folder, "other"));
        let link = folder.join("link");
        std::os::unix::fs::symlink(&one, &link).expect("a link");
        let mut surveyor = Surveyor::default();
        let mut ground = |wanted: &Path, on: &Path| {
            let grounds = surveyor.survey(&config(&[wanted]), &offering(on), Instant::now());
            grounds.by_key[&(NQN.to_owned(), 1)].clone()
        };
        assert_eq!(ground(&link, &one).there, There::Offered { bytes: 1 << 20 });
        assert_eq!(ground(&other, &one).held, Held::Other(one.clone()));
        let gone = folder.join("gone");
        assert_eq!(ground(&other, &gone).held, Held::Gone(gone.clone()));
        let deleted = ground(&gone, &gone);
        assert_eq!((deleted.there, deleted.held), (There::ToMake, Held::Gone(gone)));
    }

    #[test]
    fn replaced_backing_file_is_detected() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().canonicalize().expect("the folder exists");
        let (one, other) = (file(&folder, "one"), file(&folder, "other"));
        let mut surveyor = Surveyor::default();
        let mut ground = || {
            let grounds = surveyor.survey(&config(&[&one]), &offering(&one), Instant::now());
            grounds.by_key[&(NQN.to_owned(), 1)].clone()
        };
        assert_eq!(ground().held, Held::Nothing);
        fs::rename(&other, &one).expect("replaced");
        assert_eq!(ground().held, Held::Other(one.clone()));
    }

    #[test]
    fn reoffered_backing_file_replaces_the_recorded_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().canonicalize().expect("the folder exists");
        let (one, other) = (file(&folder, "one"), file(&folder, "other"));
        let key = (NQN.to_owned(), 1);
        let mut surveyor = Surveyor::default();
        let there = |surveyor: &mut Surveyor| {
            let grounds = surveyor.survey(&config(&[&one]), &offering(&one), Instant::now());
            grounds.by_key[&key].there.clone()
        };
        let offered = There::Offered { bytes: 1 << 20 };
        assert_eq!(there(&mut surveyor), offered);
        // Like a drive that was reattached under the same name; a file has no sequence number.
        fs::rename(&other, &one).expect("replaced");
        assert!(matches!(there(&mut surveyor), There::Fit { .. }));
        surveyor.reported(&key, Tells::Size(1 << 20));
        assert!(matches!(there(&mut surveyor), There::Fit { .. }));
        surveyor.reported(&key, Tells::Offered(1 << 20));
        assert_eq!(there(&mut surveyor), offered);
    }

    #[test]
    fn only_a_write_through_cache_is_durable() {
        assert_eq!(cache_of_drive("write through"), Cache::Durable);
        assert!(matches!(cache_of_drive("write back"), Cache::Volatile(why) if why.contains("write cache")));
        let absent = cache_of(&Source::Device("/dev/forebay-absent".into()));
        assert!(matches!(absent, Cache::Volatile(why) if why.contains("not known")));
    }

    #[test]
    fn device_source_must_be_a_block_device() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = file(folder.path(), "file");
        let why = identify(&Source::Device(path)).expect_err("a file").to_string();
        assert_eq!(why, "it is no drive or partition");
        let why = identify(&Source::Device("/dev/null".into())).expect_err("no block device").to_string();
        assert_eq!(why, "it is neither a block device nor a file");
    }
}
