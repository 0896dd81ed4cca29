//! Connects and disconnects through `/dev/nvme-fabrics`.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::attributes;
use crate::device::{NamespaceDevice, OpenError};
use crate::discovery::{self, DiscoveryError, Record};
use crate::kernel_log::KernelLog;
use crate::keyring::{KeySerial, Keyring, KeyringError};
use crate::limits::REPLY_BYTES_MAX;
use crate::nqn::Nqn;
use crate::options::{FabricPath, Options, Subsystem, Timing};
use crate::plan::{NotPlanned, check_transports, plan};
use crate::refusal::{Failure, Refusal};
use crate::sysfs::{ControllerState, Namespace, Sysfs};

/// The kernel as an NVMe-oF host.
#[derive(Clone, Debug)]
pub struct Fabrics {
    dev: PathBuf,
    proc: PathBuf,
    sysfs: Sysfs,
}

/// The kernel's response to a connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Number of the controller: 3 for `nvme3`.
    pub instance: u32,
    /// The target's number for it.
    pub controller_id: u16,
}

/// A path that was connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connected {
    /// The path.
    pub path: FabricPath,
    /// The kernel's name for its controller.
    pub controller: String,
}

/// Why a path was not connected.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// There is no `/dev/nvme-fabrics`, or it may not be opened.
    #[error("cannot open {path}: {source} (load nvme-fabrics, and give this process CAP_SYS_ADMIN)")]
    Unavailable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The TLS key is not in the kernel's keyring.
    #[error("cannot connect {nqn} with TLS: {source}")]
    Key {
        /// Subsystem.
        nqn: String,
        /// Why.
        source: KeyringError,
    },
    /// The request must not be executed.
    #[error(transparent)]
    NotPlanned(#[from] NotPlanned),
    /// The kernel or the target refused.
    #[error("cannot connect {nqn} over {path}: {refusal}")]
    Refused {
        /// Subsystem.
        nqn: String,
        /// Path.
        path: Box<FabricPath>,
        /// Why.
        refusal: Refusal,
    },
    /// The kernel reported success, but no controller.
    #[error("the kernel connected {nqn} over {path} and answered {answer:?}, which names no controller")]
    Answer {
        /// Subsystem.
        nqn: String,
        /// Path.
        path: Box<FabricPath>,
        /// The kernel's response.
        answer: String,
    },
}

/// The result of [`Fabrics::ensure_connected`]. Some paths may have failed while others work.
#[derive(Debug, Default)]
pub struct Ensured {
    /// Controllers that existed.
    pub kept: Vec<String>,
    /// Paths that were connected.
    pub connected: Vec<Connected>,
    /// Controllers that were not required and are gone.
    pub disconnected: Vec<String>,
    /// What failed.
    pub failed: Vec<ConnectError>,
    /// Controllers that are not required and were kept, since no required one is live.
    pub spared: Vec<String>,
    /// Controllers that could not be disconnected, or with timing that could not be set.
    pub odd: Vec<String>,
}

/// Why nothing is connected.
#[derive(Debug, thiserror::Error)]
pub enum EnsureError {
    /// The request must not be executed in the current state.
    #[error(transparent)]
    NotPlanned(#[from] NotPlanned),
    /// No path could be connected and none existed.
    #[error("{}", failures(.0))]
    NoPath(Vec<ConnectError>),
    /// The TLS key is not in the kernel's keyring.
    #[error(transparent)]
    Key(ConnectError),
    /// TLS is required, but existing controllers do not use it and could not be replaced.
    #[error(
        "{} without TLS, which is wanted now, and no connection with TLS is in its place, so nothing was changed{}",
        clear(.controllers), because(.failed)
    )]
    InClear {
        /// The kernel's names of controllers without TLS.
        controllers: Vec<String>,
        /// What failed.
        failed: Vec<ConnectError>,
    },
}

fn failures(failed: &[ConnectError]) -> String {
    failed.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn clear(controllers: &[String]) -> String {
    let verb = if controllers.len() == 1 { "is" } else { "are" };
    format!("{} {verb} connected", controllers.join(", "))
}

fn because(failed: &[ConnectError]) -> String {
    if failed.is_empty() { String::new() } else { format!(": {}", failures(failed)) }
}

/// Serializes connects, so that the kernel's messages during a connect are about that connect.
static CONNECTING: Mutex<()> = Mutex::new(());

impl Default for Fabrics {
    fn default() -> Self {
        Self::at("/dev", Sysfs::at("/sys"))
    }
}

impl Fabrics {
    /// Uses the kernel's devices in this directory.
    #[must_use]
    pub fn at(dev: impl Into<PathBuf>, sysfs: Sysfs) -> Self {
        Self { dev: dev.into(), proc: "/proc".into(), sysfs }
    }

    /// Sets the path of `/proc`.
    #[must_use]
    pub fn with_proc(self, proc: impl Into<PathBuf>) -> Self {
        Self { proc: proc.into(), ..self }
    }

    /// The sysfs that lists the connections.
    #[must_use]
    pub fn sysfs(&self) -> &Sysfs {
        &self.sysfs
    }

    /// Opens a namespace for its reservations.
    ///
    /// # Errors
    /// If it cannot be opened, or its name belongs to another device now.
    pub fn open(&self, namespace: &Namespace) -> Result<NamespaceDevice, OpenError> {
        NamespaceDevice::open(&self.dev, namespace)
    }

    /// Connects one path. Blocks until the target has responded or the kernel has given up, which can take minutes.
    ///
    /// # Errors
    /// If it is refused; [`Refusal::AlreadyConnected`] if it is already connected.
    pub fn connect(&self, wanted: &Subsystem, path: &FabricPath) -> Result<Connected, ConnectError> {
        check_transports(wanted, [&path])?;
        let tls = self.put_key(wanted, &wanted.nqn)?;
        self.connect_by(wanted, path, &wanted.options(path, tls))
    }

    fn connect_by(
        &self,
        wanted: &Subsystem,
        path: &FabricPath,
        options: &Options,
    ) -> Result<Connected, ConnectError> {
        let reply = self.create(wanted.nqn.as_str(), path, options)?;
        Ok(Connected { path: path.clone(), controller: format!("nvme{}", reply.instance) })
    }

    /// Adds the TLS key to the kernel's keyring, if TLS is required and the key is not there yet.
    fn put_key(&self, wanted: &Subsystem, nqn: &Nqn) -> Result<Option<KeySerial>, ConnectError> {
        let Some(tls) = &wanted.tls else { return Ok(None) };
        let put = || -> Result<KeySerial, KeyringError> {
            let pair = tls.pair(wanted.host.nqn(), nqn)?;
            Keyring::of_nvme(&self.proc)?.put(&pair)
        };
        put().map(Some).map_err(|source| ConnectError::Key { nqn: nqn.to_string(), source })
    }

    /// Removes unused TLS keys of this host and subsystem from the keyring. A controller needs the key that it was connected
    /// with whenever it reconnects.
    fn retire_keys(&self, wanted: &Subsystem, keep: KeySerial) {
        let found = self.sysfs.read();
        let controllers = found.subsystems.iter().flat_map(|subsystem| &subsystem.controllers);
        let with_tls = controllers.filter_map(|controller| controller.tls);
        // If a controller's key is unknown, it may be any of them.
        let Some(used) = with_tls.map(|tls| tls.key).collect::<Option<Vec<KeySerial>>>() else { return };
        // A surplus key in the keyring grants no access: the target decides.
        let _ = Keyring::of_nvme(&self.proc)
            .and_then(|ring| ring.retire(wanted.host.nqn(), &wanted.nqn, keep, &used));
    }

    /// Removes a controller. Does nothing if it is gone. Blocks until its I/O has ended.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn disconnect(&self, controller: &str) -> io::Result<()> {
        self.tell(controller, "delete_controller")
    }

    /// Makes the kernel read the namespaces of a controller again. Does nothing if the controller is gone. The kernel rescans
    /// when the target reports a change, but can miss one that arrives during a scan.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn rescan(&self, controller: &str) -> io::Result<()> {
        self.tell(controller, "rescan_controller")
    }

    fn tell(&self, controller: &str, attribute: &str) -> io::Result<()> {
        let at = self.sysfs.controller(controller).join(attribute);
        match OpenOptions::new().write(true).open(at).and_then(|mut file| file.write_all(b"1")) {
            // It was gone before, or vanished during the write: the attribute removes itself.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            result => result,
        }
    }

    /// Makes these the only paths to the subsystem. First missing paths are connected, then paths that are not required are
    /// disconnected, unless no required path is live: a surplus path is better than none.
    ///
    /// A path that the kernel tries to reconnect counts as existing. A path without the required TLS does not: a new one is
    /// connected in parallel and replaces it. If TLS is required and a connection without it remains, the call always returns
    /// an error.
    ///
    /// # Errors
    /// If the request must not be executed, or if no path exists at the end.
    pub fn ensure_connected(&self, wanted: &Subsystem, paths: &[FabricPath]) -> Result<Ensured, EnsureError> {
        check_transports(wanted, &paths.iter().collect::<Vec<_>>())?;
        let tls = self.put_key(wanted, &wanted.nqn).map_err(EnsureError::Key)?;
        let plan = plan(wanted, tls, paths, &self.sysfs.read())?;
        let mut ensured = Ensured::default();
        for controller in plan.keep {
            if !self.tune(&controller, &wanted.timing) {
                ensured.odd.push(controller.clone());
            }
            ensured.kept.push(controller);
        }
        let replace = plan.replace.iter().map(|path| (path, true));
        for (path, beside) in plan.connect.iter().map(|path| (path, false)).chain(replace) {
            let mut options = wanted.options(path, tls);
            if beside {
                options.beside();
            }
            match self.connect_by(wanted, path, &options) {
                Ok(connected) => ensured.connected.push(connected),
                // Another process was faster, or the path exists in a form that we did not recognize.
                Err(ConnectError::Refused { refusal: Refusal::AlreadyConnected, .. }) => {}
                Err(error) => ensured.failed.push(error),
            }
        }
        let found = self.sysfs.read();
        let live = found.subsystem(&wanted.nqn).is_some_and(|subsystem| {
            let wanted = |c: &&crate::Controller| !plan.disconnect.contains(&c.name);
            subsystem.controllers.iter().filter(wanted).any(|c| c.state == ControllerState::Live)
        });
        for controller in plan.disconnect {
            if !live {
                ensured.spared.push(controller);
            } else if self.disconnect(&controller).is_ok() {
                ensured.disconnected.push(controller);
            } else {
                ensured.odd.push(controller);
            }
        }
        if let Some(key) = tls {
            let found = self.sysfs.read();
            let there = found.subsystem(&wanted.nqn).into_iter().flat_map(|s| &s.controllers);
            let clear: Vec<String> =
                there.filter(|c| c.tls.is_none() && !c.state.is_going()).map(|c| c.name.clone()).collect();
            if !clear.is_empty() {
                return Err(EnsureError::InClear { controllers: clear, failed: ensured.failed });
            }
            self.retire_keys(wanted, key);
        }
        let any = found.subsystem(&wanted.nqn).is_some();
        if any { Ok(ensured) } else { Err(EnsureError::NoPath(ensured.failed)) }
    }

    /// Disconnects all our controllers of the subsystem; returns their names.
    ///
    /// # Errors
    /// The first failure; the remaining controllers are tried anyway.
    pub fn ensure_disconnected(&self, wanted: &Subsystem) -> io::Result<Vec<String>> {
        let found = self.sysfs.read();
        let ours = wanted.host.nqn().as_str();
        let mut gone = Vec::new();
        let mut result = Ok(());
        for subsystem in found.subsystems.iter().filter(|s| s.nqn == wanted.nqn.as_str()) {
            for controller in subsystem.controllers.iter().filter(|c| c.host_nqn.as_deref() == Some(ours)) {
                match self.disconnect(&controller.name) {
                    Ok(()) => gone.push(controller.name.clone()),
                    Err(error) => result = result.and(Err(error)),
                }
            }
        }
        result.map(|()| gone)
    }

    /// Reads the log of the discovery controller at this path: the subsystems that this host may connect there.
    ///
    /// # Errors
    /// If it cannot be connected or read.
    pub fn discover(&self, wanted: &Subsystem, path: &FabricPath) -> Result<Vec<Record>, DiscoveryError> {
        check_transports(wanted, [&path]).map_err(ConnectError::from)?;
        let tls = self.put_key(wanted, &Nqn::discovery())?;
        let options = wanted.discovery_options(path, tls);
        let reply = self.create(crate::DISCOVERY_NQN, path, &options)?;
        let controller = format!("nvme{}", reply.instance);
        let records = discovery::read(&self.dev.join(&controller));
        // Otherwise it would stay until the next boot.
        let gone = self.disconnect(&controller);
        let records = records?;
        gone.map_err(DiscoveryError::Left)?;
        Ok(records)
    }

    /// Options that this kernel supports (since 5.17); empty for older kernels, or if the device cannot be read.
    #[must_use]
    pub fn known_options(&self) -> Vec<String> {
        let read = || -> io::Result<String> {
            let mut text = String::new();
            let limit = u64::try_from(REPLY_BYTES_MAX).expect("limits are small");
            File::open(self.dev.join("nvme-fabrics"))?.take(limit).read_to_string(&mut text)?;
            Ok(text)
        };
        option_names(&read().unwrap_or_default())
    }

    /// Sets the timing of an existing controller if it differs; returns whether this succeeded.
    fn tune(&self, controller: &str, timing: &Timing) -> bool {
        let at = self.sysfs.controller(controller);
        // nvme_core rounds ctrl_loss_tmo up to a multiple of reconnect_delay.
        let delay = timing.reconnect_delay_s.max(1);
        let loss = timing.controller_loss_s.map(|s| s.div_ceil(delay).saturating_mul(delay));
        let wanted = [
            ("reconnect_delay", Some(timing.reconnect_delay_s)),
            ("ctrl_loss_tmo", loss),
            ("fast_io_fail_tmo", Some(timing.fast_io_fail_s)),
        ];
        wanted.into_iter().all(|(attribute, value)| {
            let at = at.join(attribute);
            // Kernels before 5.14 lack some of these.
            let Some(text) = attributes::text(&at) else { return true };
            let shown = value.map_or_else(|| "off".to_owned(), |v| v.to_string());
            let written = value.map_or_else(|| "-1".to_owned(), |v| v.to_string());
            text == shown || std::fs::write(&at, written).is_ok()
        })
    }

    fn create(&self, nqn: &str, path: &FabricPath, options: &Options) -> Result<Reply, ConnectError> {
        let device = self.dev.join("nvme-fabrics");
        let _one = CONNECTING.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = OpenOptions::new().read(true).write(true).open(&device);
        let mut file = opened.map_err(|source| ConnectError::Unavailable { path: device, source })?;
        let log = KernelLog::from_now(&self.dev.join("kmsg"));
        // In one write: the kernel treats each write as a complete request.
        let answer = match file.write(options.expose()) {
            Ok(_) => reply(&mut file),
            Err(error) => Err(error),
        };
        let refused = |error: io::Error| {
            let lines = log.lines();
            let known =
                if error.raw_os_error() == Some(libc::EINVAL) { self.known_options() } else { Vec::new() };
            let unknown: Vec<&'static str> = match known.is_empty() {
                true => Vec::new(),
                false => options.names().iter().copied().filter(|n| !known.iter().any(|k| k == n)).collect(),
            };
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            let tls = options.names().contains(&"tls");
            let failure = Failure { errno, log: &lines, transport: path.transport, tls, unknown: &unknown };
            ConnectError::Refused {
                nqn: nqn.into(),
                path: Box::new(path.clone()),
                refusal: failure.refusal(),
            }
        };
        let answer = answer.map_err(refused)?;
        parse_reply(&answer).ok_or_else(|| ConnectError::Answer {
            nqn: nqn.into(),
            path: Box::new(path.clone()),
            answer,
        })
    }
}

fn reply(file: &mut File) -> io::Result<String> {
    let mut text = vec![0; REPLY_BYTES_MAX];
    let count = file.read(&mut text)?;
    Ok(String::from_utf8_lossy(&text[..count]).trim().to_owned())
}

/// `instance=3,cntlid=1`.
fn parse_reply(text: &str) -> Option<Reply> {
    let value = |name: &str| {
        text.split(',').filter_map(|pair| pair.split_once('=')).find(|(n, _)| *n == name).map(|(_, v)| v)
    };
    Some(Reply { instance: value("instance")?.parse().ok()?, controller_id: value("cntlid")?.parse().ok()? })
}

/// `instance=-1,cntlid=-1,transport=%s,…,tls`.
fn option_names(text: &str) -> Vec<String> {
    let names = text.trim().split(',').map(|pair| pair.split('=').next().unwrap_or_default());
    let names = names.filter(|name| !name.is_empty() && *name != "instance" && *name != "cntlid");
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_reply_is_parsed_into_instance_and_cntlid() {
        assert_eq!(parse_reply("instance=3,cntlid=17"), Some(Reply { instance: 3, controller_id: 17 }));
        for text in ["", "instance=-1,cntlid=-1", "instance=3", "cntlid=1,instance=x", "3,1"] {
            assert_eq!(parse_reply(text), None, "{text}");
        }
    }

    #[test]
    fn supported_options_are_parsed_by_name() {
        let text = "instance=-1,cntlid=-1,transport=%s,traddr=%s,hdr_digest,tls\n";
        assert_eq!(option_names(text), ["transport", "traddr", "hdr_digest", "tls"]);
        assert_eq!(option_names(""), Vec::<String>::new());
        assert_eq!(option_names("instance=-1,cntlid=-1\n"), Vec::<String>::new());
    }
}
