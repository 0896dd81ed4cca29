//! The current state of nvmet in configfs, read below a root.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use crate::limits::{ATTRIBUTE_BYTES_MAX, ENTRIES_MAX};

/// The whole state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    pub(crate) ports: BTreeMap<u16, Port>,
    /// Keyed by NQN.
    pub(crate) subsystems: BTreeMap<String, Subsystem>,
    /// Keyed by NQN.
    pub(crate) hosts: BTreeMap<String, Host>,
}

/// A port. Attributes that are not set yet are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) transport: String,
    pub(crate) family: String,
    pub(crate) address: String,
    pub(crate) service: String,
    /// NQNs of the subsystems that it carries, keyed by the names of their links.
    pub(crate) subsystems: BTreeMap<String, String>,
    /// Names of referrals.
    pub(crate) referrals: BTreeSet<String>,
}

/// A subsystem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Subsystem {
    pub(crate) model: String,
    pub(crate) serial: String,
    pub(crate) any_host: bool,
    /// Host NQNs, keyed by the names of their links.
    pub(crate) hosts: BTreeMap<String, String>,
    pub(crate) namespaces: BTreeMap<u32, Namespace>,
    /// Whether it passes another controller's commands through.
    pub(crate) passthrough: bool,
}

/// A namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Namespace {
    pub(crate) device: Option<PathBuf>,
    pub(crate) uuid: Option<Uuid>,
    pub(crate) enabled: bool,
    /// `None` if the kernel does not support reservations.
    pub(crate) reservations: Option<bool>,
}

/// A host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Host {
    /// Whether it must authenticate with a key.
    pub(crate) has_key: bool,
}

impl Observed {
    /// Reads the state. Objects that vanish during the read are treated as absent.
    ///
    /// # Errors
    /// If the root itself cannot be read.
    pub(crate) fn read(root: &Path) -> io::Result<Self> {
        fs::read_dir(root)?;
        let ports = entries(&root.join("ports"))?;
        let subsystems = entries(&root.join("subsystems"))?;
        let hosts = entries(&root.join("hosts"))?;
        Ok(Self {
            ports: ports
                .into_iter()
                .filter_map(|(name, at)| Some((name.parse().ok()?, port(&at).ok()?)))
                .collect(),
            subsystems: subsystems
                .into_iter()
                .filter_map(|(name, at)| Some((name, subsystem(&at).ok()?)))
                .collect(),
            hosts: hosts
                .into_iter()
                .map(|(name, at)| {
                    let has_key = text(&at.join("dhchap_key")).is_some_and(|key| !key.is_empty());
                    (name, Host { has_key })
                })
                .collect(),
        })
    }

    /// Ports that carry a subsystem.
    pub(crate) fn carriers(&self, nqn: &str) -> impl Iterator<Item = (u16, &Port)> {
        let carries = move |port: &Port| port.subsystems.values().any(|carried| carried == nqn);
        self.ports.iter().filter(move |(_, port)| carries(port)).map(|(id, port)| (*id, port))
    }

    /// How many subsystems allow a host.
    pub(crate) fn uses(&self, host: &str) -> usize {
        let allowing = |subsystem: &&Subsystem| subsystem.hosts.values().any(|name| name == host);
        self.subsystems.values().filter(allowing).count()
    }
}

fn port(at: &Path) -> io::Result<Port> {
    let attribute = |name: &str| text(&at.join(name)).unwrap_or_default();
    Ok(Port {
        transport: attribute("addr_trtype"),
        family: attribute("addr_adrfam"),
        address: attribute("addr_traddr"),
        service: attribute("addr_trsvcid"),
        subsystems: links(&at.join("subsystems"))?,
        referrals: entries(&at.join("referrals"))?.into_iter().map(|(name, _)| name).collect(),
    })
}

fn subsystem(at: &Path) -> io::Result<Subsystem> {
    let attribute = |name: &str| text(&at.join(name)).unwrap_or_default();
    let namespaces = entries(&at.join("namespaces"))?;
    Ok(Subsystem {
        model: attribute("attr_model"),
        serial: attribute("attr_serial"),
        any_host: attribute("attr_allow_any_host") == "1",
        hosts: links(&at.join("allowed_hosts"))?,
        namespaces: namespaces
            .into_iter()
            .filter_map(|(name, at)| Some((name.parse().ok()?, namespace(&at))))
            .collect(),
        passthrough: attribute("passthru/enable") == "1",
    })
}

fn namespace(at: &Path) -> Namespace {
    let attribute = |name: &str| text(&at.join(name));
    Namespace {
        // The kernel prints a null pointer for an unset path.
        device: attribute("device_path").filter(|path| path.starts_with('/')).map(PathBuf::from),
        uuid: attribute("device_uuid").and_then(|text| text.parse().ok()),
        enabled: attribute("enable").is_some_and(|text| text == "1"),
        reservations: attribute("resv_enable").map(|text| text == "1"),
    }
}

/// Names of the targets of links, keyed by the links' names.
fn links(at: &Path) -> io::Result<BTreeMap<String, String>> {
    let found = entries(at)?;
    Ok(found
        .into_iter()
        .filter_map(|(name, path)| {
            let to = fs::read_link(path).ok()?;
            Some((name, to.file_name()?.to_str()?.to_owned()))
        })
        .collect())
}

fn entries(at: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let found = match fs::read_dir(at) {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let entry = |entry: fs::DirEntry| {
        // Attributes are plain files; created objects are directories or links.
        let kind = entry.file_type().ok()?;
        let name = entry.file_name().into_string().ok()?;
        (kind.is_dir() || kind.is_symlink()).then(|| (name, entry.path()))
    };
    Ok(found.take(ENTRIES_MAX).flatten().filter_map(entry).collect())
}

fn text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(ATTRIBUTE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    Some(text.trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned())
}
