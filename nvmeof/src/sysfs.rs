//! Reads what is connected: `/sys/class/nvme-subsystem` and `/sys/class/nvme`.
//!
//! Namespaces are identified by the NQN of their subsystem and their own UUID or NGUID. Names such as `nvme0n1` change between
//! boots and serve only to open a device that has just been found.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use uuid::Uuid;

use crate::attributes::{entries, parsed, text};
use crate::keyring::KeySerial;
use crate::nqn::Nqn;
use crate::options::FabricPath;

/// Unit of `size` in sysfs, independent of a namespace's own block size.
const SECTOR_BYTES: u64 = 512;

/// A sysfs below a given root.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
}

/// All NVMe subsystems at one point in time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// In order of the kernel's numbers.
    pub subsystems: Vec<FoundSubsystem>,
    /// Whether paths to one namespace become one device (`nvme_core.multipath`); `None` if the kernel does not report it.
    pub multipath: Option<bool>,
}

/// A subsystem with its controllers and namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundSubsystem {
    /// Its name.
    pub nqn: String,
    /// Its controllers: one per path.
    pub controllers: Vec<Controller>,
    /// Its namespaces: one per block device.
    pub namespaces: Vec<Namespace>,
}

/// A controller: a connection, or a drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// The kernel's name now, such as `nvme0`.
    pub name: String,
    /// `tcp`, `rdma`, `pcie`, …
    pub transport: String,
    /// The address that it connects to.
    pub address: ControllerAddress,
    /// Its state.
    pub state: ControllerState,
    /// Host NQN that it is connected with; `None` for drives.
    pub host_nqn: Option<String>,
    /// Its path to each namespace; empty without native multipath.
    pub paths: Vec<NamespacePath>,
    /// TLS; `None` if the connection is not encrypted.
    pub tls: Option<ControllerTls>,
}

/// TLS of a controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerTls {
    /// The key of its last handshake; `None` before the first handshake.
    pub key: Option<KeySerial>,
}

/// The address of a controller, as in the kernel's `address`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControllerAddress {
    /// The target's address.
    pub traddr: Option<String>,
    /// The target's port.
    pub trsvcid: Option<String>,
    /// Source address that was requested.
    pub host_traddr: Option<String>,
    /// Network device that was requested for outgoing connections.
    pub host_iface: Option<String>,
}

/// State of a controller (`state`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControllerState {
    /// Being set up.
    New,
    /// Accepts I/O.
    Live,
    /// Being reset.
    Resetting,
    /// Connection lost; the kernel tries to reconnect.
    Connecting,
    /// Being removed.
    Deleting,
    /// Given up by the kernel.
    Dead,
    /// Any other.
    Other(String),
}

impl ControllerState {
    fn from_text(text: &str) -> Self {
        match text {
            "new" => Self::New,
            "live" => Self::Live,
            "resetting" => Self::Resetting,
            "connecting" | "reconnecting" => Self::Connecting,
            "deleting" | "deleting (no IO)" => Self::Deleting,
            "dead" => Self::Dead,
            other => Self::Other(other.into()),
        }
    }

    /// Whether the controller is being removed or is dead.
    #[must_use]
    pub fn is_going(&self) -> bool {
        matches!(self, Self::Deleting | Self::Dead)
    }
}

/// A controller's path to one namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespacePath {
    /// The namespace, within the subsystem.
    pub nsid: u32,
    /// Its ANA state (NVMe Base 8.1).
    pub ana_state: AnaState,
}

/// Asymmetric namespace access (NVMe Base 8.1.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnaState {
    /// The best state; also used if a target does not support ANA.
    Optimized,
    /// Works, but more slowly.
    NonOptimized,
    /// Does not work now.
    Inaccessible,
    /// Will not work again.
    PersistentLoss,
    /// In transition between two states.
    Change,
    /// Any other.
    Other(String),
}

impl std::fmt::Display for AnaState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Optimized => "optimized",
            Self::NonOptimized => "non-optimized",
            Self::Inaccessible => "inaccessible",
            Self::PersistentLoss => "persistent-loss",
            Self::Change => "change",
            Self::Other(text) => text,
        })
    }
}

impl AnaState {
    fn from_text(text: &str) -> Self {
        match text {
            "optimized" => Self::Optimized,
            "non-optimized" => Self::NonOptimized,
            "inaccessible" => Self::Inaccessible,
            "persistent-loss" => Self::PersistentLoss,
            "change" => Self::Change,
            other => Self::Other(other.into()),
        }
    }

    /// Whether the path accepts I/O.
    #[must_use]
    pub fn takes_io(&self) -> bool {
        matches!(self, Self::Optimized | Self::NonOptimized)
    }
}

/// A namespace with its block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// The kernel's name now, such as `nvme0n1`.
    pub name: String,
    /// Device number, major and minor: the file that is opened must have the same.
    pub device: (u32, u32),
    /// Number within the subsystem.
    pub nsid: u32,
    /// UUID; if the namespace has none, the kernel reports its NGUID here.
    pub uuid: Option<Uuid>,
    /// NGUID; `None` if it is all zeros.
    pub nguid: Option<[u8; 16]>,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Logical block size in bytes; 0 if the kernel does not report it.
    pub block_bytes: u32,
    /// Whether it refuses writes.
    pub read_only: bool,
}

/// The identifier of a namespace in a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NamespaceId {
    /// By its UUID.
    Uuid(Uuid),
    /// By its NGUID.
    Nguid([u8; 16]),
}

impl std::fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Uuid(uuid) => write!(f, "UUID {uuid}"),
            Self::Nguid(nguid) => write!(f, "NGUID {}", Uuid::from_bytes(*nguid).simple()),
        }
    }
}

impl FromStr for NamespaceId {
    type Err = crate::InvalidName;

    /// `uuid:…` or `nguid:…`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = match text.split_once(':') {
            Some(("uuid", rest)) => Uuid::parse_str(rest).ok().map(Self::Uuid),
            Some(("nguid", rest)) => Uuid::parse_str(rest).ok().map(|id| Self::Nguid(id.into_bytes())),
            _ => None,
        };
        let parsed =
            parsed.filter(|id| !matches!(id, Self::Uuid(id) if id.is_nil()) && *id != Self::Nguid([0; 16]));
        parsed.ok_or_else(|| Self::Err::new(text, "a namespace (uuid:… or nguid:…, not all zeros)"))
    }
}

/// Why a namespace was not found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    /// Nothing of this name is connected.
    #[error("no subsystem {0} is connected")]
    NoSubsystem(Nqn),
    /// It has none such.
    #[error("{nqn} has no namespace with {wanted}; it has {}", if present.is_empty() { "none" } else { present.as_str() })]
    NoNamespace {
        /// The subsystem.
        nqn: Nqn,
        /// The identifier.
        wanted: NamespaceId,
        /// The namespaces that it has.
        present: String,
    },
    /// A namespace of another subsystem has this identifier, and Linux ignores later namespaces with the same identifier.
    #[error(
        "{wanted} is also that of {name} of the subsystem {other}, for which the kernel ignores ours: one of them is a copy that \
         must be given another identifier"
    )]
    Copied {
        /// The identifier.
        wanted: NamespaceId,
        /// Its name now.
        name: String,
        /// The other subsystem.
        other: String,
    },
    /// Several devices have the same identifier, so it identifies none.
    #[error(
        "{wanted} is that of several namespaces ({names}): one of them is a copy that must be given another identifier"
    )]
    Ambiguous {
        /// The identifier.
        wanted: NamespaceId,
        /// Their names now.
        names: String,
    },
}

impl Namespace {
    /// Whether it has this identifier.
    #[must_use]
    pub fn is(&self, id: &NamespaceId) -> bool {
        match id {
            NamespaceId::Uuid(uuid) => self.uuid == Some(*uuid),
            NamespaceId::Nguid(nguid) => self.nguid == Some(*nguid),
        }
    }

    fn described(&self) -> String {
        let id = match (self.uuid, self.nguid) {
            (Some(uuid), _) => NamespaceId::Uuid(uuid).to_string(),
            (None, Some(nguid)) => NamespaceId::Nguid(nguid).to_string(),
            (None, None) => "no identifier".into(),
        };
        format!("namespace {} with {id}", self.nsid)
    }
}

impl Found {
    /// The subsystem of this name, if it is connected.
    #[must_use]
    pub fn subsystem(&self, nqn: &Nqn) -> Option<&FoundSubsystem> {
        self.subsystems.iter().find(|s| s.nqn == nqn.as_str() && !s.controllers.is_empty())
    }

    /// The one namespace with this identifier.
    ///
    /// # Errors
    /// If there is none, or if another namespace in any subsystem has the same identifier.
    pub fn namespace(&self, nqn: &Nqn, id: &NamespaceId) -> Result<&Namespace, FindError> {
        let subsystem = self.subsystem(nqn).ok_or_else(|| FindError::NoSubsystem(nqn.clone()))?;
        let same: Vec<&Namespace> =
            self.subsystems.iter().flat_map(|s| &s.namespaces).filter(|n| n.is(id)).collect();
        if same.len() > 1 {
            let names: Vec<&str> = same.iter().map(|n| n.name.as_str()).collect();
            return Err(FindError::Ambiguous { wanted: *id, names: names.join(", ") });
        }
        subsystem.namespaces.iter().find(|n| n.is(id)).ok_or_else(|| {
            let has = |other: &&FoundSubsystem| other.namespaces.iter().any(|n| n.is(id));
            if let (Some(other), [copy]) = (self.subsystems.iter().find(has), same.as_slice()) {
                let (name, other) = (copy.name.clone(), other.nqn.clone());
                return FindError::Copied { wanted: *id, name, other };
            }
            let present: Vec<String> = subsystem.namespaces.iter().map(Namespace::described).collect();
            FindError::NoNamespace { nqn: nqn.clone(), wanted: *id, present: present.join(", ") }
        })
    }
}

impl FoundSubsystem {
    /// Whether at least one path to this namespace accepts I/O now.
    #[must_use]
    pub fn takes_io(&self, nsid: u32) -> bool {
        self.controllers.iter().any(|c| c.takes_io(nsid))
    }
}

impl Controller {
    /// Whether it accepts I/O to this namespace now.
    #[must_use]
    pub fn takes_io(&self, nsid: u32) -> bool {
        // Without native multipath, no paths are listed.
        self.state == ControllerState::Live
            && (self.paths.is_empty() || self.paths.iter().any(|p| p.nsid == nsid && p.ana_state.takes_io()))
    }

    /// Whether it uses TLS with this key, or no TLS if `wanted` is `None`.
    #[must_use]
    pub fn has_tls(&self, wanted: Option<KeySerial>) -> bool {
        match (wanted, self.tls) {
            (None, None) => true,
            (Some(key), Some(tls)) => tls.key.is_none_or(|has| has == key),
            _ => false,
        }
    }

    /// Whether it connects this path.
    #[must_use]
    pub fn goes(&self, path: &FabricPath) -> bool {
        let same_address = |text: &Option<String>, wanted: Option<IpAddr>| match (text, wanted) {
            (Some(text), Some(wanted)) => text.parse() == Ok(wanted),
            (text, None) => text.is_none(),
            (None, Some(_)) => false,
        };
        let ControllerAddress { traddr, trsvcid, host_traddr, host_iface } = &self.address;
        self.transport == path.transport.as_str()
            && same_address(traddr, Some(path.target.ip()))
            && trsvcid.as_ref().and_then(|port| port.parse().ok()) == Some(path.target.port())
            && same_address(host_traddr, path.host_address)
            && host_iface.as_deref() == path.host_interface.as_ref().map(|i| i.as_str())
    }
}

impl Sysfs {
    /// The sysfs at this directory: `/sys`, or the path at which a container has the host's sysfs.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Directory of a controller's attributes.
    pub(crate) fn controller(&self, name: &str) -> PathBuf {
        self.root.join("class/nvme").join(name)
    }

    /// Whether a namespace has a cache that loses its contents when the target loses power; `None` if the kernel does not
    /// report it.
    #[must_use]
    pub fn has_volatile_cache(&self, namespace: &Namespace) -> Option<bool> {
        let (major, minor) = namespace.device;
        let at = self.root.join(format!("dev/block/{major}:{minor}/queue/write_cache"));
        match text(&at)?.as_str() {
            "write back" => Some(true),
            "write through" => Some(false),
            _ => None,
        }
    }

    /// Reads all subsystems. Entries that vanish during the read are treated as absent.
    #[must_use]
    pub fn read(&self) -> Found {
        let multipath = text(&self.root.join("module/nvme_core/parameters/multipath"));
        let multipath = multipath.map(|switch| switch.starts_with(['Y', 'y', '1']));
        let subsystems =
            entries(&self.root.join("class/nvme-subsystem"), |name| name.starts_with("nvme-subsys"));
        let subsystems = subsystems.iter().filter_map(|(_, at)| subsystem(at)).collect();
        Found { subsystems, multipath }
    }
}

fn subsystem(at: &Path) -> Option<FoundSubsystem> {
    let nqn = text(&at.join("subsysnqn"))?;
    let links = entries(at, |name| numbers(name).is_some_and(|n| n.len() == 1));
    let controllers = links.iter().filter_map(|(name, at)| controller(name, at)).collect();
    // With native multipath, the devices belong to the subsystem; without it, to the controllers.
    let folders = std::iter::once(at).chain(links.iter().map(|(_, at)| at.as_path()));
    let namespaces = folders
        .flat_map(|folder| entries(folder, |name| numbers(name).is_some_and(|n| n.len() == 2)))
        .filter_map(|(name, at)| namespace(name, &at))
        .collect();
    Some(FoundSubsystem { nqn, controllers, namespaces })
}

/// The numbers in `nvme0`, `nvme0n1` or `nvme0c1n1`; `None` for any other name.
fn numbers(name: &str) -> Option<Vec<u32>> {
    let rest = name.strip_prefix("nvme")?;
    let (front, namespace) = rest.split_once('n').map_or((rest, None), |(front, ns)| (front, Some(ns)));
    let (first, controller) = front.split_once('c').map_or((front, None), |(first, c)| (first, Some(c)));
    let parts = [Some(first), controller, namespace];
    let digits = |text: &str| if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None };
    parts.into_iter().flatten().map(digits).collect()
}

fn controller(name: &str, at: &Path) -> Option<Controller> {
    let paths = entries(at, |name| numbers(name).is_some_and(|n| n.len() == 3));
    let paths = paths.iter().filter_map(|(_, at)| {
        Some(NamespacePath {
            nsid: parsed(&at.join("nsid"))?,
            // A target without ANA reports no state, or `optimized`.
            ana_state: text(&at.join("ana_state")).map_or(AnaState::Optimized, |s| AnaState::from_text(&s)),
        })
    });
    Some(Controller {
        name: name.into(),
        transport: text(&at.join("transport"))?,
        address: address(&text(&at.join("address")).unwrap_or_default()),
        state: ControllerState::from_text(&text(&at.join("state"))?),
        host_nqn: text(&at.join("hostnqn")),
        paths: paths.collect(),
        tls: tls(at),
    })
}

/// `tls_key` exists only on controllers with TLS, and is empty until the first handshake. Some kernels also have
/// `tls_configured_key`, which is set from the beginning.
fn tls(at: &Path) -> Option<ControllerTls> {
    let serial = |attribute: &str| {
        let number = u32::from_str_radix(&text(&at.join(attribute))?, 16).ok()?;
        Some(KeySerial(number.cast_signed())).filter(|serial| serial.0 != 0)
    };
    at.join("tls_key")
        .exists()
        .then(|| ControllerTls { key: serial("tls_configured_key").or_else(|| serial("tls_key")) })
}

/// `traddr=192.168.77.1,trsvcid=4420,src_addr=192.168.77.2`.
fn address(text: &str) -> ControllerAddress {
    let mut address = ControllerAddress::default();
    for (name, value) in text.split(',').filter_map(|pair| pair.split_once('=')) {
        let value = Some(value.to_owned()).filter(|v| !v.is_empty() && v != "none");
        match name {
            "traddr" => address.traddr = value,
            "trsvcid" => address.trsvcid = value,
            "host_traddr" => address.host_traddr = value,
            "host_iface" => address.host_iface = value,
            _ => {}
        }
    }
    address
}

fn namespace(name: String, at: &Path) -> Option<Namespace> {
    let device = text(&at.join("dev"))?;
    let (major, minor) = device.split_once(':')?;
    let uuid = |attribute: &str| text(&at.join(attribute)).and_then(|t| Uuid::parse_str(&t).ok());
    let sectors: u64 = parsed(&at.join("size")).unwrap_or(0);
    Some(Namespace {
        device: (major.parse().ok()?, minor.parse().ok()?),
        nsid: parsed(&at.join("nsid"))?,
        uuid: uuid("uuid").filter(|id| !id.is_nil()),
        nguid: uuid("nguid").filter(|id| !id.is_nil()).map(Uuid::into_bytes),
        size_bytes: sectors.saturating_mul(SECTOR_BYTES),
        block_bytes: parsed(&at.join("queue/logical_block_size")).unwrap_or(0),
        read_only: text(&at.join("ro")).as_deref() == Some("1"),
        name,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_parsed_into_their_numbers() {
        for (name, count) in [
            ("nvme0", Some(1)),
            ("nvme10n2", Some(2)),
            ("nvme0c11n2", Some(3)),
            ("nvme0n1p1", None),
            ("nvme", None),
            ("nvmen1", None),
            ("nvme-subsys0", None),
            ("power", None),
        ] {
            assert_eq!(numbers(name).map(|n| n.len()), count, "{name}");
        }
    }

    #[test]
    fn namespace_id_must_be_a_valid_uuid_or_nguid() {
        let uuid = "uuid:8bd9bb5c-6ec9-4a0c-a0a6-2e7c0c6b4f11".parse::<NamespaceId>();
        assert!(matches!(uuid, Ok(NamespaceId::Uuid(_))));
        let nguid = "nguid:8bd9bb5c6ec94a0ca0a62e7c0c6b4f11".parse::<NamespaceId>();
        assert!(matches!(nguid, Ok(NamespaceId::Nguid(_))));
        for text in ["", "nvme0n1", "/dev/nvme0n1", "uuid:", "nguid:0", "eui:8bd9bb5c6ec94a0c"] {
            assert!(text.parse::<NamespaceId>().is_err(), "{text:?}");
        }
        assert!("nguid:00000000000000000000000000000000".parse::<NamespaceId>().is_err());
    }
}
