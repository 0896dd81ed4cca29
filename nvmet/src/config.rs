//! The TOML configuration file. Checks it as far as possible without examining the machine.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use forebay_nvmeof::{DISCOVERY_NQN, Nqn};
use serde::Deserialize;
use uuid::Uuid;

use crate::limits::{
    CONFIG_BYTES_MAX, FILE_BYTES_MIN, HOSTS_MAX, INTERFACE_BYTES_MAX, NAME_BYTES_MAX, NAMESPACE_ID_MAX,
    NAMESPACES_MAX, PATH_BYTES_MAX, PORTS_MAX, SUBSYSTEMS_MAX,
};

/// Default path of the configuration file.
pub(crate) const DEFAULT_PATH: &str = "/etc/forebay/target.toml";

/// NVMe's port for I/O (IANA).
const SERVICE_DEFAULT: u16 = 4420;

/// A configuration with every option explained.
pub(crate) const SAMPLE: &str = r#"# forebay-target offers drives, partitions and files of this machine by NVMe over Fabrics, with the kernel's nvmet.
# The file is read again when it changes.

[target]
# Which subsystems and ports in the kernel are this target's. Two targets on one machine need two names; a name never changes.
#name = "default"

[metrics]
# Address of /metrics, /healthz and /readyz, "ip:port". "": none.
#listen = ""

[log]
# "error", "warn", "info", "debug" or "trace"; "text" or "json".
#level = "info"
#format = "text"

# All ports carry all subsystems.
[[port]]
# "tcp" or "rdma".
transport = "tcp"
# An IP address of this machine, or "interface:eth1" for the first one of that interface.
address = "192.168.77.1"
#service = 4420

[[subsystem]]
nqn = "nqn.2026-01.io.forebay:storage.default.data-0"
# Host NQNs that are allowed; no others are.
hosts = ["nqn.2014-08.org.nvmexpress:uuid:2c9f2c59-6c0c-5a53-9a52-5f3b3b7c2a10"]

[[subsystem.namespace]]
id = 1
# What hosts know the namespace by. It never changes.
uuid = "8bd9bb5c-6ec9-4a0c-a0a6-2e7c0c6b4f11"
# A drive or partition, best by a name that stays. It must be blank or hold a pool of Forebay.
device = "/dev/disk/by-id/nvme-EXAMPLE_0123456789"
# Instead, a file. It is made with all its space, grows when the size is raised, and never shrinks.
#file = "/var/lib/forebay-target/data-0.img"
#size = "100GiB"
# Offer a drive with a volatile write cache, or a file without making every write to it durable. What
# hosts have flushed can then be lost when this machine loses its power.
#allow_volatile_cache = false
"#;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// It cannot be read.
    #[error("{path}: {error}")]
    Read {
        /// The path.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// It cannot be parsed, or is inconsistent.
    #[error("{path}: {what}")]
    Wrong {
        /// The path.
        path: PathBuf,
        /// The problem.
        what: String,
    },
}

/// The parsed configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// The owner of the subsystems and ports.
    pub(crate) name: String,
    /// Address for metrics and health.
    pub(crate) listen: Option<SocketAddr>,
    /// Log.
    pub(crate) log: Log,
    /// Ports.
    pub(crate) ports: Vec<Port>,
    /// Subsystems.
    pub(crate) subsystems: Vec<Subsystem>,
}

/// `[log]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Log {
    /// Level or directives.
    pub(crate) level: String,
    /// Format.
    pub(crate) format: LogFormat,
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".into(), format: LogFormat::Text }
    }
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// NVMe transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Transport {
    Tcp,
    Rdma,
}

impl Transport {
    /// Name in configfs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

/// Address of a port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Address {
    Ip(IpAddr),
    /// The first address of a network device.
    Interface(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Interface(name) => write!(f, "interface:{name}"),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(name) = text.strip_prefix("interface:") {
            let fits = !name.is_empty()
                && name.len() <= INTERFACE_BYTES_MAX
                && !name.contains(|c: char| c == '/' || c.is_whitespace() || c.is_control());
            return match fits {
                true => Ok(Self::Interface(name.into())),
                false => Err(format!("{name:?} is no name of an interface")),
            };
        }
        let ip: IpAddr = text.parse().map_err(|_| {
            format!("{text:?} is neither an IP address nor \"interface:\" and the name of an interface")
        })?;
        if ip.is_unspecified() || ip.is_multicast() {
            return Err(format!("{text:?} is the address of no machine: name one of this machine's own"));
        }
        Ok(Self::Ip(ip))
    }
}

/// A port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Port {
    pub(crate) transport: Transport,
    pub(crate) address: Address,
    /// TCP port, or RDMA service.
    pub(crate) service: u16,
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { transport, address, service } = self;
        match address {
            Address::Ip(IpAddr::V6(ip)) => write!(f, "{}://[{ip}]:{service}", transport.as_str()),
            _ => write!(f, "{}://{address}:{service}", transport.as_str()),
        }
    }
}

/// A subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Subsystem {
    pub(crate) nqn: Nqn,
    /// The allowed hosts.
    pub(crate) hosts: BTreeSet<Nqn>,
    pub(crate) namespaces: Vec<Namespace>,
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Namespace {
    pub(crate) id: u32,
    pub(crate) uuid: Uuid,
    pub(crate) source: Source,
    /// Writes may be acknowledged to hosts before they would survive a power loss.
    pub(crate) volatile_cache: bool,
}

/// Backing device or file of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A drive or partition.
    Device(PathBuf),
    /// A file of at least this size.
    File { path: PathBuf, bytes: u64 },
}

impl Source {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Device(path) | Self::File { path, .. } => path,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    #[serde(default)]
    target: RawTarget,
    #[serde(default)]
    metrics: RawMetrics,
    #[serde(default)]
    log: Log,
    #[serde(default)]
    port: Vec<RawPort>,
    #[serde(default)]
    subsystem: Vec<RawSubsystem>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawTarget {
    name: String,
}

impl Default for RawTarget {
    fn default() -> Self {
        Self { name: "default".into() }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawMetrics {
    listen: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPort {
    transport: Transport,
    address: String,
    #[serde(default = "service_default")]
    service: u16,
}

fn service_default() -> u16 {
    SERVICE_DEFAULT
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSubsystem {
    nqn: String,
    #[serde(default)]
    hosts: Vec<String>,
    #[serde(default)]
    namespace: Vec<RawNamespace>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawNamespace {
    id: u32,
    uuid: String,
    device: Option<PathBuf>,
    file: Option<PathBuf>,
    size: Option<Size>,
    #[serde(default)]
    allow_volatile_cache: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Size {
    Bytes(u64),
    Text(String),
}

impl Size {
    fn bytes(&self) -> Result<u64, String> {
        let text = match self {
            Self::Bytes(bytes) => return Ok(*bytes),
            Self::Text(text) => text.trim(),
        };
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let shift = match unit.trim() {
            "" | "B" => 0,
            "K" | "Ki" | "KiB" => 10,
            "M" | "Mi" | "MiB" => 20,
            "G" | "Gi" | "GiB" => 30,
            "T" | "Ti" | "TiB" => 40,
            _ => return Err(format!("{text:?} is no size: use bytes, KiB, MiB, GiB or TiB")),
        };
        let number: u64 = number.parse().map_err(|_| format!("{text:?} is no size"))?;
        number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is too large"))
    }
}

impl Config {
    /// Reads and checks the file.
    ///
    /// # Errors
    /// If it cannot be read or parsed, or is invalid.
    pub(crate) fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(&text(path)?).map_err(|what| ConfigError::Wrong { path: path.into(), what })
    }

    /// Parses and checks the configuration.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let raw: Raw = toml::from_str(text).map_err(|error| error.to_string())?;
        let name = raw.target.name;
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains(char::is_control) {
            return Err(format!("target.name has 1 to {NAME_BYTES_MAX} bytes, without control characters"));
        }
        let listen = match raw.metrics.listen.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| format!("metrics.listen: {text:?} is not \"ip:port\""))?),
        };
        let config = Self {
            name,
            listen,
            log: raw.log,
            ports: raw.port.into_iter().map(port).collect::<Result<_, _>>()?,
            subsystems: raw.subsystem.into_iter().map(subsystem).collect::<Result<_, _>>()?,
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        // An empty file, for example one that is being written, must not remove everything.
        if self.subsystems.is_empty() {
            return Err("it has no subsystem; to take all away use `forebay-target remove`".into());
        }
        if self.ports.is_empty() {
            return Err("it has no port".into());
        }
        if self.ports.len() > PORTS_MAX || self.subsystems.len() > SUBSYSTEMS_MAX {
            return Err(format!("at most {PORTS_MAX} ports and {SUBSYSTEMS_MAX} subsystems can be had"));
        }
        let mut ports = BTreeSet::new();
        for port in &self.ports {
            if !ports.insert(port) {
                return Err(format!("port {port} is there twice"));
            }
        }
        let (mut nqns, mut uuids, mut paths) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for subsystem in &self.subsystems {
            if !nqns.insert(&subsystem.nqn) {
                return Err(format!("subsystem {} is there twice", subsystem.nqn));
            }
            let mut ids = BTreeSet::new();
            for namespace in &subsystem.namespaces {
                let at = format!("subsystem {}, namespace {}", subsystem.nqn, namespace.id);
                if !ids.insert(namespace.id) {
                    return Err(format!("{at}: it is there twice"));
                }
                if !uuids.insert(namespace.uuid) {
                    return Err(format!("{at}: another namespace has UUID {}, too", namespace.uuid));
                }
                if !paths.insert(namespace.source.path()) {
                    let path = namespace.source.path().display();
                    return Err(format!("{at}: another namespace is on {path}, too"));
                }
            }
        }
        Ok(())
    }
}

/// Reads the file.
pub(crate) fn text(path: &Path) -> Result<String, ConfigError> {
    let read = || -> io::Result<String> {
        let mut text = String::new();
        File::open(path)?.take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text)?;
        if text.len() as u64 > CONFIG_BYTES_MAX {
            return Err(io::Error::other(format!("it has more than {CONFIG_BYTES_MAX} bytes")));
        }
        Ok(text)
    };
    read().map_err(|error| ConfigError::Read { path: path.into(), error })
}

fn port(raw: RawPort) -> Result<Port, String> {
    if raw.service == 0 {
        return Err("port: service is 1 to 65535".into());
    }
    let address = raw.address.parse().map_err(|what| format!("port: {what}"))?;
    Ok(Port { transport: raw.transport, address, service: raw.service })
}

fn subsystem(raw: RawSubsystem) -> Result<Subsystem, String> {
    let nqn = name(&raw.nqn)?;
    let at = format!("subsystem {nqn}");
    if nqn.as_str() == DISCOVERY_NQN {
        return Err(format!("{at}: this is the name of every discovery service"));
    }
    if raw.hosts.len() > HOSTS_MAX || raw.namespace.len() > NAMESPACES_MAX {
        return Err(format!("{at}: at most {HOSTS_MAX} hosts and {NAMESPACES_MAX} namespaces can be had"));
    }
    let hosts = raw.hosts.iter().map(|host| name(host)).collect::<Result<_, _>>();
    Ok(Subsystem {
        hosts: hosts.map_err(|what| format!("{at}: host {what}"))?,
        namespaces: raw
            .namespace
            .into_iter()
            .map(|raw| namespace(raw).map_err(|what| format!("{at}: {what}")))
            .collect::<Result<_, _>>()?,
        nqn,
    })
}

/// A name that is also valid as a directory name in configfs.
fn name(text: &str) -> Result<Nqn, String> {
    let nqn: Nqn = text.parse().map_err(|error| format!("{error}"))?;
    match nqn.as_str().contains('/') {
        true => Err(format!("{text:?}: the kernel's target takes no name with \"/\"")),
        false => Ok(nqn),
    }
}

fn namespace(raw: RawNamespace) -> Result<Namespace, String> {
    let at = format!("namespace {}", raw.id);
    if raw.id == 0 || raw.id > NAMESPACE_ID_MAX {
        return Err(format!("{at}: id is 1 to {NAMESPACE_ID_MAX}"));
    }
    let uuid = Uuid::parse_str(&raw.uuid).map_err(|_| format!("{at}: {:?} is no UUID", raw.uuid))?;
    if uuid.is_nil() {
        return Err(format!("{at}: a UUID of zeros is none"));
    }
    let path = |path: PathBuf| -> Result<PathBuf, String> {
        let text = path.to_str().unwrap_or_default();
        let fits = path.is_absolute()
            && text.len() <= PATH_BYTES_MAX
            && !text.contains(char::is_control)
            && !text.split('/').any(|part| part == "..");
        match fits {
            true => Ok(path),
            false => Err(format!(
                "{at}: {text:?} is no absolute path without \"..\" of up to {PATH_BYTES_MAX} bytes"
            )),
        }
    };
    let source = match (raw.device, raw.file, raw.size) {
        (Some(device), None, None) => Source::Device(path(device)?),
        (None, Some(file), Some(size)) => {
            let bytes = size.bytes().map_err(|what| format!("{at}: size: {what}"))?;
            if bytes < FILE_BYTES_MIN || i64::try_from(bytes).is_err() {
                return Err(format!("{at}: a size of {bytes} bytes cannot be had"));
            }
            // The size that hosts see must be a multiple of the block size.
            Source::File { path: path(file)?, bytes: bytes.next_multiple_of(4096) }
        }
        (None, Some(_), None) => return Err(format!("{at}: a file needs a size")),
        (Some(_), _, Some(_)) => return Err(format!("{at}: a device has its own size")),
        _ => return Err(format!("{at}: either device or file is to be said")),
    };
    Ok(Namespace { id: raw.id, uuid, source, volatile_cache: raw.allow_volatile_cache })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_config_parses_with_and_without_its_options() {
        let config = Config::parse(SAMPLE).expect("the sample");
        assert_eq!(config.name, "default");
        assert_eq!(config.ports[0].to_string(), "tcp://192.168.77.1:4420");
        assert_eq!(config.listen, None);
        let with_options = SAMPLE.replace("\n#", "\n").replace("listen = \"\"", "listen = \"[::1]:9447\"");
        let device = "device = \"/dev/disk/by-id/nvme-EXAMPLE_0123456789\"\n";
        let lines = with_options.lines().filter(|line| line.contains(" = ") || line.starts_with('['));
        let text: String =
            lines.filter(|line| !line.starts_with(' ')).map(|line| format!("{line}\n")).collect();
        let config = Config::parse(&text.replace(device, "")).expect("the sample with its options");
        assert_eq!(
            config.subsystems[0].namespaces[0].source,
            Source::File { path: "/var/lib/forebay-target/data-0.img".into(), bytes: 100 << 30 }
        );
    }

    #[test]
    fn invalid_config_is_rejected_with_a_specific_error() {
        let sample: String =
            SAMPLE.lines().filter(|line| !line.starts_with('#')).map(|l| format!("{l}\n")).collect();
        let twice = |section: &str| {
            let at = sample.find(section).expect("a section");
            format!("{sample}\n{}", &sample[at..])
        };
        let with = |from: &str, to: &str| {
            assert!(sample.contains(from), "{from}");
            sample.replace(from, to)
        };
        for (text, says) in [
            (String::new(), "no subsystem"),
            (twice("[[subsystem]]"), "is there twice"),
            (twice("[[subsystem.namespace]]"), "namespace 1: it is there twice"),
            (with("192.168.77.1", "0.0.0.0"), "no machine"),
            (with("192.168.77.1", "interface:"), "no name of an interface"),
            (with("192.168.77.1", "eth0"), "neither an IP address"),
            (with("\"tcp\"", "\"fc\""), "fc"),
            (with("nqn.2026-01.io.forebay:storage", "nqn.2026-01.io.forebay:a/b"), "no name with"),
            (with("nqn.2026-01.io.forebay:storage", "iqn.2026"), "not an NQN"),
            (with("id = 1", "id = 0"), "id is 1 to"),
            (with("id = 1", "id = 1\nsize = 4096"), "a device has its own size"),
            (with("8bd9bb5c-6ec9-4a0c-a0a6-2e7c0c6b4f11", "8bd9bb5c"), "no UUID"),
            (with("device = \"/dev/disk", "device = \"dev/disk"), "no absolute path"),
            (with("device = \"/dev/disk", "file = \"/dev/disk"), "a file needs a size"),
            (with("device = \"/dev/disk/", "size = \"1TB\"\nfile = \"/srv/"), "is no size"),
            (with("device = \"/dev/disk/", "size = 4096\nfile = \"/srv/"), "cannot be had"),
            (with("id = 1", "id = 1\ncolour = 2"), "colour"),
        ] {
            let error = Config::parse(&text).expect_err(says);
            assert!(error.contains(says), "{says:?} was expected: {error}");
        }
    }
}
