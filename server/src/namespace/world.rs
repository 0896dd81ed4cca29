//! Executes the steps of [`super::attach`] on Linux.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use forebay_nvmeof::{
    Acquired, Check, Epoch, Fabrics, InstanceHash, Me, Namespace, NamespaceDevice, Subsystem, acquire,
    announce, check, release, settle,
};
use tracing::{info, warn};

use super::attach::{Found, Leftover, Owned, World};
use super::connect::{LOOK_AGAIN, connected, former, patiently, subsystem};
use super::filesystem::{decide, end_at_the_first_error, format, identity, mount, peek};
use super::growth::Growing;
use super::guard::{Guard, Watched, end_file_system};
use super::mounted::{has_ended, mounted_device, unmount_patiently};
use super::reason::{Reason, io};
use super::record::{self, Claim, PoolRecord};
use super::state::State;
use super::{Attached, content, unmount};
use crate::address::Addresses;
use crate::config::{InstanceSection, NvmeofSection, PoolSection};
use crate::starts::Starts;

/// A pool, its target and this machine.
pub(super) struct Linux<'a> {
    instance: &'a InstanceSection,
    pool: &'a PoolSection,
    section: &'a NvmeofSection,
    addresses: &'a Arc<Addresses>,
    fabrics: Fabrics,
    wanted: Subsystem,
    me: Me,
    until: Instant,
    state: Arc<State>,
    connected: Option<(Namespace, Arc<NamespaceDevice>)>,
    guard: Option<Guard>,
}

impl<'a> Linux<'a> {
    pub(super) fn new(
        instance: &'a InstanceSection,
        pool: &'a PoolSection,
        section: &'a NvmeofSection,
        addresses: &'a Arc<Addresses>,
    ) -> Result<Self, Reason> {
        let wanted = subsystem(instance, section)?;
        let epoch = u32::try_from(instance.epoch).ok().and_then(Epoch::new);
        let epoch = epoch.expect("the configuration was checked");
        let former = (!instance.cluster_uid.is_empty()).then(|| InstanceHash::of(&instance.name));
        let me = Me {
            former,
            adopts: section.adopts(),
            ..Me::new(
                InstanceHash::in_cluster(&instance.cluster_uid, &instance.name),
                epoch,
                wanted.host.id(),
            )
        };
        let names = (section.nqn.to_string(), section.namespace.to_string());
        let state = State::new(pool.name.clone(), names, section.paths.len(), section.loss_time());
        Ok(Self {
            instance,
            pool,
            section,
            addresses,
            fabrics: Fabrics::default(),
            wanted,
            me,
            until: Instant::now() + section.connect_time(),
            state: Arc::new(state),
            connected: None,
            guard: None,
        })
    }

    /// This instance's claim to the pool.
    pub(super) fn claim(&self) -> Claim {
        Claim {
            instance: self.instance.name.clone(),
            ours: PoolRecord { epoch: self.instance.epoch, cluster: self.instance.cluster_uid.clone() },
            adopts: self.section.adopts(),
        }
    }

    /// The attached namespace, after all steps.
    pub(super) fn attached(self) -> Attached {
        let guard = self.guard.expect("it is attached once it is watched");
        Attached { pool: self.pool.name.clone(), path: self.pool.path.clone(), guard, state: self.state }
    }

    fn namespace(&self) -> &Namespace {
        &self.connected.as_ref().expect("connecting is the first step").0
    }

    fn device(&self) -> &Arc<NamespaceDevice> {
        &self.connected.as_ref().expect("connecting is the first step").1
    }

    fn block_device(&self) -> PathBuf {
        Path::new("/dev").join(&self.namespace().name)
    }

    /// Disconnects the subsystem if this instance has it connected as another host: a machine can connect it as only one
    /// host. Before that, ends the file system mounted on it, which holds the state of an earlier epoch.
    fn disconnect_former(&mut self) -> Result<(), Reason> {
        let Some(former) = former(self.instance, self.section, &self.wanted.host)? else { return Ok(()) };
        let found = self.fabrics.sysfs().read();
        let host = Some(former.host.nqn().as_str());
        let is_former = |c: &forebay_nvmeof::Controller| c.host_nqn.as_deref() == host;
        if !found.subsystem(&former.nqn).is_some_and(|s| s.controllers.iter().any(is_former)) {
            return Ok(());
        }
        warn!(pool = self.pool.name, host = %former.host.nqn(), "disconnecting what this instance has connected as another host");
        self.end_leftover()?;
        let gone = self.fabrics.ensure_disconnected(&former);
        gone.map(drop).map_err(io("disconnecting the namespace of an earlier server"))
    }

    /// Reports what the target promises. A power loss of the target is detected because it loses the reservation: a target
    /// that keeps reservations but not its cache loses flushed data undetected.
    fn look_at_the_target(&self, namespace: &Namespace, device: &NamespaceDevice) {
        let pool = &self.pool.name;
        let volatile = self.fabrics.sysfs().has_volatile_cache(namespace);
        let can = match device.reservation_capabilities() {
            Ok(can) => can,
            Err(error) => {
                warn!(pool, %error, "the target does not say what its reservations can do");
                return;
            }
        };
        info!(
            pool,
            reservations_persist = can.persist,
            volatile_cache = volatile,
            "what the target says of itself"
        );
        if can.persist && volatile == Some(true) {
            let why = "its target says that it has a volatile cache and keeps reservations without power: what it loses with \
                       its power cannot be noticed (switch the cache off, or let the target tell that it is kept)";
            warn!(pool, "{why}");
            self.state.set_unreliable(why.to_owned());
        }
    }

    fn patiently<T>(&self, ask: impl Fn() -> Result<T, Reason>) -> Result<T, Reason> {
        patiently(&self.fabrics, self.section, self.until, ask)
    }
}

impl World for Linux<'_> {
    type Failure = Reason;

    fn connect(&mut self) -> Result<(), Reason> {
        self.disconnect_former()?;
        let (pool, host, tls) = (&self.pool.name, self.wanted.host.nqn(), self.wanted.tls.is_some());
        info!(pool, %host, nqn = %self.wanted.nqn, tls, "connecting the namespace");
        let until = Instant::now() + self.section.connect_time();
        let (namespace, device) = loop {
            let namespace = connected(&self.fabrics, &self.wanted, self.section)?;
            info!(pool, device = namespace.name, key = %self.me.key(), "namespace found");
            // Before the reservation: a target may refuse every command on a write-protected namespace, including
            // reservation reports.
            if namespace.read_only {
                return Err(Reason::ReadOnly);
            }
            match self.fabrics.open(&namespace) {
                Ok(device) => break (namespace, Arc::new(device)),
                // After a restart of the target, the kernel may remove and recreate the device.
                Err(error) if error.is_passing() && Instant::now() < until => {
                    info!(pool, %error, "looking for the namespace again");
                    std::thread::sleep(LOOK_AGAIN);
                }
                Err(error) => return Err(error.into()),
            }
        };
        self.look_at_the_target(&namespace, &device);
        self.connected = Some((namespace, device));
        self.until = Instant::now() + self.section.connect_time();
        Ok(())
    }

    fn check(&mut self) -> Result<Check, Reason> {
        self.patiently(|| Ok(check(&**self.device(), &self.me)?))
    }

    fn leftover(&mut self) -> Result<Leftover, Reason> {
        let ended = has_ended(&self.pool.path);
        match mounted_device(&self.pool.path) {
            None => Ok(Leftover::Nothing),
            Some(_) if ended => Ok(Leftover::Ended),
            Some(number) if number == self.namespace().device => Ok(Leftover::Mounted),
            Some(_) => Err(Reason::Occupied { path: self.pool.path.clone() }),
        }
    }

    fn announce(&mut self) -> Result<(), Reason> {
        self.patiently(|| Ok(announce(&**self.device(), &self.me)?))
    }

    fn acquire(&mut self) -> Result<Acquired, Reason> {
        let acquired = self.patiently(|| Ok(acquire(&**self.device(), &self.me)?))?;
        let (pool, key) = (&self.pool.name, self.me.key());
        match acquired {
            Acquired::Settled { preempted } => info!(pool, %key, preempted, "the reservation is ours"),
            Acquired::Pending => {
                let (key, seconds) = (self.me.pending_key(), self.section.cut_off_time().as_secs());
                warn!(
                    pool, %key, seconds,
                    "the reservation was taken without an answer: waiting until the former holder is certainly cut off"
                );
            }
        }
        Ok(acquired)
    }

    fn outwait(&mut self) -> Result<(), Reason> {
        std::thread::sleep(self.section.cut_off_time());
        // This time was not spent waiting for the target.
        self.until = Instant::now() + self.section.connect_time();
        Ok(())
    }

    fn settle(&mut self) -> Result<Check, Reason> {
        let check = self.patiently(|| Ok(settle(&**self.device(), &self.me)?))?;
        if check == Check::Held {
            info!(pool = self.pool.name, key = %self.me.key(), preempted = true, "the reservation is ours");
        }
        Ok(check)
    }

    fn end_leftover(&mut self) -> Result<(), Reason> {
        let path = &self.pool.path;
        if mounted_device(path).is_none() {
            return Ok(());
        }
        warn!(pool = self.pool.name, "ending the file system that is mounted, which is not to be relied on");
        end_file_system(path).map_err(io("ending the file system of an earlier server"))?;
        unmount_patiently(path).map_err(io("unmounting the file system of an earlier server"))
    }

    fn look(&mut self, _: &Owned) -> Result<Found<Reason>, Reason> {
        let expected = identity(self.instance, self.pool);
        let file = File::open(self.block_device()).map_err(io("opening the namespace"))?;
        let content =
            content::look(&file, self.namespace().size_bytes).map_err(io("reading the namespace"))?;
        Ok(decide(content, expected, self.section.format, self.namespace()))
    }

    fn format(&mut self, _: &Owned, force: bool) -> Result<(), Reason> {
        let expected = identity(self.instance, self.pool);
        format(&self.block_device(), expected, force)?;
        info!(pool = self.pool.name, uuid = %expected, "made a file system on the blank namespace");
        Ok(())
    }

    fn recorded_before_replay(&mut self, _: &Owned) -> Result<Option<PoolRecord>, Reason> {
        let peeked = peek(&self.block_device(), &self.pool.path);
        if let Err(error) = &peeked {
            // Data read before the log is replayed may be inconsistent: it is judged once the file system is mounted.
            warn!(pool = self.pool.name, %error, "the pool's epoch cannot be read before its log is replayed");
        }
        if mounted_device(&self.pool.path).is_some() {
            return peeked;
        }
        Ok(peeked.unwrap_or_default())
    }

    fn mount(&mut self, _: &Owned) -> Result<(), Reason> {
        let started = Instant::now();
        mount(&self.block_device(), &self.pool.path)?;
        if let Err(error) = end_at_the_first_error(Path::new("/sys/fs/xfs"), &self.namespace().name) {
            warn!(pool = self.pool.name, %error, "XFS will try again and again to write metadata that the target refuses");
        }
        let milliseconds = started.elapsed().as_millis() as u64;
        info!(pool = self.pool.name, milliseconds, "mounted, its log replayed");
        Ok(())
    }

    fn recorded(&mut self, _: &Owned) -> Result<Option<PoolRecord>, Reason> {
        record::read(&self.pool.path).map_err(io("reading the pool's epoch"))
    }

    fn distrust_starts(&mut self, _: &Owned) -> Result<(), Reason> {
        let noted = Starts::of(&self.pool.path).distrust();
        noted.map_err(io("noting that earlier starts may have lost data"))
    }

    fn record(&mut self, _: &Owned, record: &PoolRecord) -> Result<(), Reason> {
        record::write(&self.pool.path, record).map_err(io("recording the pool's epoch"))
    }

    fn confirm(&mut self, _: &Owned) -> Result<Check, Reason> {
        let asked = Instant::now();
        let check = check(&**self.device(), &self.me)?;
        if check == Check::Held {
            self.state.confirm(asked);
        }
        Ok(check)
    }

    fn watch(&mut self, _: &Owned) -> Result<(), Reason> {
        let watched = Watched {
            pool: self.pool.name.clone(),
            device: Arc::clone(self.device()),
            me: self.me,
            sysfs: self.fabrics.sysfs().clone(),
            nqn: self.section.nqn.clone(),
            namespace: self.section.namespace,
            state: Arc::clone(&self.state),
            addresses: Arc::clone(self.addresses),
            directory: File::open(&self.pool.path).map_err(io("opening the mount point"))?,
            growing: Growing { device: self.block_device(), path: self.pool.path.clone() },
        };
        self.guard = Some(Guard::start(watched).map_err(io("starting to watch the namespace"))?);
        Ok(())
    }

    fn unmount(&mut self) {
        warn!(
            pool = self.pool.name,
            "the start has failed: the reservation stays, a later start goes on with it"
        );
        unmount(&self.pool.name, &self.pool.path);
    }

    fn release(&mut self, _: Owned) {
        if let Err(error) = release(&**self.device(), &self.me) {
            warn!(pool = self.pool.name, %error, "the reservation could not be given back");
        }
    }
}
