//! The configuration file: TOML, every option explained once in [`options`], from which `--help` and the sample come.

mod dialect;
mod instance;
mod nvmeof;

use std::collections::HashSet;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::advertise::Advertised;
use crate::backend::directory::Promise;
use crate::limits::{
    EVENT_LOOPS_MAX, MEMORY_BYTES_MIN, STALL_SECONDS_MAX, STALL_TIME_DEFAULT_MAX, WORKERS_DEFAULT,
    WORKERS_MAX,
};
pub use crate::rdma::listener::Ports;
pub use dialect::MinDialect;
pub use instance::{InstanceAddress, InstanceSection};
pub use nvmeof::NvmeofSection;

/// Where the daemon looks for its configuration by default.
pub const DEFAULT_PATH: &str = "/etc/forebay/server.toml";

/// One option of the configuration.
#[derive(Debug)]
pub struct OptionHelp {
    /// Section, or "" where it stands above all.
    pub section: &'static str,
    /// Key.
    pub key: &'static str,
    /// The default, or an example where there is none, as TOML.
    pub value: &'static str,
    /// Whether the sample sets it (rather than showing its default in a comment).
    pub set: bool,
    /// What it does.
    pub help: &'static str,
}

/// Every option but those of `[pool.nvmeof]`, which [`options`] adds.
pub const OPTIONS: &[OptionHelp] = &[
    OptionHelp {
        section: "instance",
        key: "name",
        value: "\"\"",
        set: false,
        help: "Name of this instance, 1 to 63 of a-z, 0-9 and '-', as reported by the admin API. An operator sets it; \"\": none.",
    },
    OptionHelp {
        section: "instance",
        key: "epoch",
        value: "0",
        set: false,
        help: "A number that grows whenever the instance is placed again, as reported by the admin API.",
    },
    OptionHelp {
        section: "instance",
        key: "cluster_uid",
        value: "\"\"",
        set: false,
        help: "Which cluster the instance is of, such as the UID of the namespace kube-system: part of its reservation's key, its host NQN and the record of its pools, so that an instance of the same name in another cluster is a stranger. Change it together with a higher epoch. An operator sets it; \"\": none.",
    },
    OptionHelp {
        section: "instance",
        key: "takeover_after_s",
        value: "0",
        set: false,
        help: "Seconds after which another node takes the instance over when this one is silent. Pools with a loss_time_s that is not less are refused. An operator sets it; 0: unknown.",
    },
    OptionHelp {
        section: "instance",
        key: "addresses",
        value: "[]",
        set: false,
        help: "Addresses of this instance, like \"192.168.77.200/24\": put on an interface when its pools are served, announced, and taken off at the end, so that they move with it. No others are announced to clients, unless `server.advertise` chooses. Needs CAP_NET_ADMIN and CAP_NET_RAW.",
    },
    OptionHelp {
        section: "instance",
        key: "interface",
        value: "\"\"",
        set: false,
        help: "Interface for the addresses, like \"eth1\". \"\": the one that has an address in their network.",
    },
    OptionHelp {
        section: "server",
        key: "listen",
        value: "[\"[::]:445\"]",
        set: false,
        help: "Addresses of the SMB transport, \"ip:port\" each.",
    },
    OptionHelp {
        section: "server",
        key: "advertise",
        value: "[]",
        set: false,
        help: "Addresses that clients should mount, as reported by the admin API: \"host:port\" or \"ip:port\"; \"10.1.0.0/16\" for this machine's addresses in that network, \"interface:eth1\" for those of an interface, each with the port it listens on. If a network or an interface is named, no other addresses are announced to clients for multichannel. Empty: those it listens on. `--advertise` and FOREBAY_ADVERTISE override it.",
    },
    OptionHelp {
        section: "server",
        key: "name",
        value: "\"FOREBAY\"",
        set: false,
        help: "Name sent to clients while they log in, 1 to 15 of A-Z, 0-9 and '-'.",
    },
    OptionHelp {
        section: "server",
        key: "min_dialect",
        value: "\"3.1.1\"",
        set: false,
        help: "Oldest dialect that clients may speak: \"2.0.2\", \"2.1\", \"3.0\", \"3.0.2\" or \"3.1.1\". In 3.1.1 a logon that was relayed from elsewhere is of no use. Below it, set `signing` or `encryption` to \"required\".",
    },
    OptionHelp {
        section: "server",
        key: "target_names",
        value: "[]",
        set: false,
        help: "Names and addresses by which clients mount from this server, like \"server.example\". A client that says which server it means (newer kernels, Windows and smbclient do) is refused where it means another. Empty: not looked at.",
    },
    OptionHelp {
        section: "server",
        key: "signing",
        value: "\"optional\"",
        set: false,
        help: "\"optional\": sessions are signed where the client asks for it. \"required\": every session is signed or sealed.",
    },
    OptionHelp {
        section: "server",
        key: "encryption",
        value: "\"offered\"",
        set: false,
        help: "\"off\": not offered. \"offered\": used where the client or the volume asks for it. \"required\": sessions that cannot seal are refused. Where integrity is wanted, sealing costs a tenth of signing.",
    },
    OptionHelp {
        section: "server",
        key: "max_io",
        value: "\"8MiB\"",
        set: false,
        help: "Largest READ and WRITE, 64KiB to 8MiB.",
    },
    OptionHelp {
        section: "server",
        key: "caching",
        value: "true",
        set: false,
        help: "Oplocks, leases and durable handles are granted, so that clients cache; false: none are.",
    },
    OptionHelp {
        section: "server",
        key: "event_loops",
        value: "0",
        set: false,
        help: "Threads that serve connections. 0: one per core.",
    },
    OptionHelp {
        section: "server",
        key: "workers",
        value: "16",
        set: false,
        help: "Threads for file-system calls that block, in each lane: look-ups, changes, contents.",
    },
    OptionHelp {
        section: "server",
        key: "io_engine",
        value: "\"auto\"",
        set: false,
        help: "\"io_uring\", \"readiness\" (epoll and threads), or \"auto\": io_uring where it is allowed.",
    },
    OptionHelp {
        section: "server",
        key: "rdma",
        value: "\"auto\"",
        set: false,
        help: "\"auto\": clients may come by RDMA (SMB Direct) to those addresses of `listen` that belong to an RDMA device, as long as its port is up; devices may come later. \"off\": TCP only.",
    },
    OptionHelp {
        section: "server",
        key: "rdma_port",
        value: "445",
        set: false,
        help: "Port of SMB Direct over InfiniBand and RoCE. Linux and Windows know no other than 445.",
    },
    OptionHelp {
        section: "server",
        key: "iwarp_port",
        value: "5445",
        set: false,
        help: "Port of SMB Direct over iWARP, which shares TCP's ports. Linux and Windows know no other than 5445.",
    },
    OptionHelp {
        section: "server",
        key: "direct_reads",
        value: "false",
        set: false,
        help: "READs over RDMA of 64 KiB and more: read what is not in the page cache past it (O_DIRECT), straight into the memory that the device sends from, where kernel (Linux 6.5) and file system can. That saves a copy, and keeps nothing for the next reader. Off until it has been measured on hardware: measure your own.",
    },
    OptionHelp {
        section: "server",
        key: "memory",
        value: "0",
        set: false,
        help: "Memory for payload: requests being received and served, data read and not yet sent, and what is kept for the next; \"4GiB\", at least 64MiB. Connections share it: where it is used up they wait, and none is ended or refused for it. One volume's clients have a quarter of it at most. 0: a quarter of the machine's memory, or of what the control group allows, from 64MiB to 16GiB. Beside it the server needs some 100 MiB, and up to 128 KiB for each connection.",
    },
    OptionHelp {
        section: "server",
        key: "stall_timeout_s",
        value: "120",
        set: false,
        help: "Seconds that a client has to take what is sent to it, and to send the rest of a request that it has begun; then its connection is ended. 1 to 3600.",
    },
    OptionHelp {
        section: "server",
        key: "drain_timeout_s",
        value: "30",
        set: false,
        help: "Seconds that requests in flight have to finish after SIGTERM. A second SIGTERM ends at once.",
    },
    OptionHelp {
        section: "admin",
        key: "socket",
        value: "\"/run/forebay/admin.sock\"",
        set: false,
        help: "Unix socket of the admin API (gRPC), mode 0600. Whoever may open it may do everything.",
    },
    OptionHelp {
        section: "admin",
        key: "listen",
        value: "\"\"",
        set: false,
        help: "Address of the admin API over mutual TLS 1.3, \"ip:port\"; \"\": the socket alone. Needs certificate, key and client_ca.",
    },
    OptionHelp {
        section: "admin",
        key: "certificate",
        value: "\"\"",
        set: false,
        help: "PEM file with the server's certificate and what it was signed with. It, key and client_ca are looked at every few seconds: a change counts for the next connection, without a restart.",
    },
    OptionHelp {
        section: "admin",
        key: "key",
        value: "\"\"",
        set: false,
        help: "PEM file with the certificate's private key.",
    },
    OptionHelp {
        section: "admin",
        key: "client_ca",
        value: "\"\"",
        set: false,
        help: "PEM file with the authorities that sign clients' certificates.",
    },
    OptionHelp {
        section: "admin",
        key: "allowed_clients",
        value: "[\"forebay-operator\", \"forebay-csi\"]",
        set: false,
        help: "Who may use the admin API over TLS: a DNS or URI name of the client's certificate, or its common name.",
    },
    OptionHelp {
        section: "http",
        key: "listen",
        value: "\"127.0.0.1:9445\"",
        set: false,
        help: "Address of /metrics (Prometheus), /healthz and /readyz. \"\": none.",
    },
    OptionHelp {
        section: "log",
        key: "level",
        value: "\"info\"",
        set: false,
        help: "\"error\", \"warn\", \"info\", \"debug\" or \"trace\", or directives as in \"info,forebay_server=debug\".",
    },
    OptionHelp {
        section: "log",
        key: "format",
        value: "\"text\"",
        set: false,
        help: "\"text\" or \"json\", one line per event, to standard error.",
    },
    OptionHelp {
        section: "[pool]",
        key: "name",
        value: "\"default\"",
        set: true,
        help: "Name of the pool, 1 to 63 of a-z, 0-9 and '-'. A server has one pool or more; each is a [[pool]] section.",
    },
    OptionHelp {
        section: "[pool]",
        key: "path",
        value: "\"/var/lib/forebay\"",
        set: true,
        help: "Directory that holds the pool's volumes and their records. It must exist (or see create), and belongs to one server at a time.",
    },
    OptionHelp {
        section: "[pool]",
        key: "create",
        value: "false",
        set: false,
        help: "Make the directory, mode 0700, where it does not exist. The directory above it must.",
    },
    OptionHelp {
        section: "[pool]",
        key: "existing",
        value: "false",
        set: false,
        help: "The directory must hold a pool already. Where its disk is not mounted the server then does not start, instead of serving an empty pool.",
    },
    OptionHelp {
        section: "[pool]",
        key: "quota",
        value: "\"project\"",
        set: true,
        help: "\"project\": capacity is a hard limit by project quota (XFS or ext4 mounted with -o prjquota). \"none\": volumes without limit, which must be asked for.",
    },
    OptionHelp {
        section: "[pool]",
        key: "overcommit",
        value: "1.0",
        set: false,
        help: "The volumes' capacities together may be so many times the pool's size.",
    },
    OptionHelp {
        section: "[pool]",
        key: "write_through",
        value: "false",
        set: false,
        help: "Everything is on stable storage before it is answered, as on namespaces (pool.nvmeof.write_through). Without, a power cut can take what was answered and not flushed, and Linux's client may not notice: it opens a file again by a new handle, and a flush of that succeeds.",
    },
];

/// What is wrong with a configuration, in one line that says where and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "{path}: {error}: give the configuration with --config, or make one with `forebay-server sample-config > {path}`"
    )]
    Read {
        /// Of the file.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// It is not TOML, or has an option that does not exist or is of another type.
    #[error("{path}:{line}: {message}")]
    Syntax {
        /// Of the file.
        path: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// An option's value makes no sense.
    #[error("{path}:{line}: {option}: {message}")]
    Value {
        /// Of the file.
        path: String,
        /// Line, from 1.
        line: usize,
        /// `section.key`.
        option: String,
        /// What is wrong and how to put it right.
        message: String,
    },
}

/// The whole configuration, checked.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `[instance]`
    pub instance: InstanceSection,
    /// `[server]`
    pub server: ServerSection,
    /// `[admin]`
    pub admin: AdminSection,
    /// `[http]`
    pub http: HttpSection,
    /// `[log]`
    pub log: LogSection,
    /// `[[pool]]`
    pub pool: Vec<PoolSection>,
}

/// `[server]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerSection {
    /// Addresses of the SMB transport.
    pub listen: Vec<SocketAddr>,
    /// Addresses that clients should mount.
    pub advertise: Vec<Advertised>,
    /// Name in NTLM target information.
    pub name: String,
    /// The oldest dialect that is spoken.
    pub min_dialect: MinDialect,
    /// Names in clients' SPNs.
    pub target_names: Vec<String>,
    /// Whether sessions must be signed.
    pub signing: Signing,
    /// Whether sessions can or must be sealed.
    pub encryption: Encryption,
    /// Largest READ and WRITE.
    pub max_io: Bytes,
    /// Whether clients may cache.
    pub caching: bool,
    /// Event loops; 0 for one per core.
    pub event_loops: usize,
    /// Worker threads.
    pub workers: usize,
    /// Which engine.
    pub io_engine: IoEngine,
    /// Whether clients may come by RDMA.
    pub rdma: Rdma,
    /// Where, over InfiniBand and RoCE.
    pub rdma_port: u16,
    /// Where, over iWARP.
    pub iwarp_port: u16,
    /// Whether READs over RDMA may go past the page cache.
    pub direct_reads: bool,
    /// Memory for payload; 0 for a share of the machine's.
    pub memory: Bytes,
    /// Seconds that a peer may stall.
    pub stall_timeout_s: u64,
    /// Seconds for a graceful end.
    pub drain_timeout_s: u64,
}

impl Default for ServerSection {
    fn default() -> Self {
        Self {
            listen: vec![SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, 445))],
            advertise: Vec::new(),
            name: "FOREBAY".to_owned(),
            min_dialect: MinDialect::default(),
            target_names: Vec::new(),
            signing: Signing::default(),
            encryption: Encryption::default(),
            max_io: Bytes(8 << 20),
            caching: true,
            event_loops: 0,
            workers: WORKERS_DEFAULT,
            io_engine: IoEngine::default(),
            rdma: Rdma::default(),
            rdma_port: Ports::default().rdma,
            iwarp_port: Ports::default().iwarp,
            direct_reads: false,
            memory: Bytes(0),
            stall_timeout_s: STALL_TIME_DEFAULT_MAX.as_secs(),
            drain_timeout_s: 30,
        }
    }
}

impl ServerSection {
    /// Whether a session with a relayed logon can be of use: its requests need no key.
    #[must_use]
    pub fn may_be_relayed(&self) -> bool {
        self.min_dialect != MinDialect::Smb311
            && self.signing != Signing::Required
            && self.encryption != Encryption::Required
    }

    /// Time for a graceful end.
    #[must_use]
    pub fn drain_time_max(&self) -> Duration {
        Duration::from_secs(self.drain_timeout_s)
    }
}

/// `[admin]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminSection {
    /// Path of the unix socket.
    pub socket: PathBuf,
    /// Address for mutual TLS, or empty for none.
    pub listen: String,
    /// PEM file of the certificate and its chain.
    pub certificate: PathBuf,
    /// PEM file of its key.
    pub key: PathBuf,
    /// PEM file of the authorities of clients.
    pub client_ca: PathBuf,
    /// Names of clients.
    pub allowed_clients: Vec<String>,
}

/// Where the admin socket is unless the configuration says otherwise.
pub const ADMIN_SOCKET: &str = "/run/forebay/admin.sock";

/// Who may use the admin API over TLS unless the configuration says otherwise.
pub const ADMIN_CLIENTS: [&str; 2] = ["forebay-operator", "forebay-csi"];

impl Default for AdminSection {
    fn default() -> Self {
        Self {
            socket: PathBuf::from(ADMIN_SOCKET),
            listen: String::new(),
            certificate: PathBuf::new(),
            key: PathBuf::new(),
            client_ca: PathBuf::new(),
            allowed_clients: ADMIN_CLIENTS.map(str::to_owned).to_vec(),
        }
    }
}

/// `[http]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpSection {
    /// Address, or empty for none.
    pub listen: String,
}

impl Default for HttpSection {
    fn default() -> Self {
        Self { listen: "127.0.0.1:9445".to_owned() }
    }
}

/// `[log]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSection {
    /// Level or directives.
    pub level: String,
    /// Shape of a line.
    pub format: LogFormat,
}

impl Default for LogSection {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::default() }
    }
}

/// `[[pool]]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolSection {
    /// Name.
    pub name: String,
    /// Directory.
    pub path: PathBuf,
    /// Make it where it is not there.
    #[serde(default)]
    pub create: bool,
    /// It must be a pool already.
    #[serde(default)]
    pub existing: bool,
    /// How capacity is enforced.
    #[serde(default)]
    pub quota: PoolQuota,
    /// Capacities may add up to so many times the pool's size.
    #[serde(default = "one")]
    pub overcommit: f64,
    /// Every operation is on stable storage before it is answered. On a namespace `nvmeof.write_through` decides.
    #[serde(default)]
    pub write_through: bool,
    /// `[pool.nvmeof]`: the directory is the mount point of a namespace.
    #[serde(default)]
    pub nvmeof: Option<NvmeofSection>,
}

fn one() -> f64 {
    1.0
}

impl PoolSection {
    /// What clients of this pool's volumes may rely on.
    #[must_use]
    pub fn promise(&self) -> Promise {
        let at_reply = self.nvmeof.as_ref().map_or(self.write_through, |nvmeof| nvmeof.write_through);
        if at_reply { Promise::AtReply } else { Promise::AtFlush }
    }
}

/// `server.signing`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Signing {
    /// Where the client asks for it.
    #[default]
    Optional,
    /// Always.
    Required,
}

/// `server.encryption`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encryption {
    /// Not offered.
    Off,
    /// Where the client or the volume asks for it.
    #[default]
    Offered,
    /// Always.
    Required,
}

/// `server.io_engine`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoEngine {
    /// io_uring where it is allowed.
    #[default]
    Auto,
    /// io_uring or nothing.
    IoUring,
    /// epoll and threads.
    Readiness,
}

/// `server.rdma`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rdma {
    /// Where there are devices, and as they come.
    #[default]
    Auto,
    /// TCP only.
    Off,
}

/// `log.format`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For machines.
    Json,
}

/// `pool.quota`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PoolQuota {
    /// Project quota.
    #[default]
    Project,
    /// None.
    None,
}

/// A size: a number of bytes, or text with a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl std::str::FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let shift = match unit.trim() {
            "" | "B" => 0,
            "K" | "Ki" | "KiB" => 10,
            "M" | "Mi" | "MiB" => 20,
            "G" | "Gi" | "GiB" => 30,
            "T" | "Ti" | "TiB" => 40,
            _ => {
                return Err(format!(
                    "{text:?} is no size: use a number of bytes, or one with KiB, MiB, GiB or TiB"
                ));
            }
        };
        let number: u64 =
            number.parse().map_err(|_| format!("{text:?} is no size: it must begin with a number"))?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| format!("{text:?} is too large"))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Raw {
            Number(u64),
            Text(String),
        }
        match Raw::deserialize(deserializer)? {
            Raw::Number(bytes) => Ok(Self(bytes)),
            Raw::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

impl Config {
    /// What is announced to clients for mounting: as configured, and addresses of the instance where that chooses none, since those of
    /// the node stay behind when it moves.
    #[must_use]
    pub fn advertised(&self) -> Vec<Advertised> {
        let mut entries = self.server.advertise.clone();
        if !entries.iter().any(Advertised::chooses) {
            let own = self.instance.addresses.iter().map(|address| Advertised::address(address.ip()));
            entries.extend(own);
        }
        entries
    }

    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let shown = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::Read { path: shown.clone(), error })?;
        Self::parse(&shown, &text)
    }

    /// Checks `text`, the contents of the file called `path`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(path: &str, text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| ConfigError::Syntax {
            path: path.to_owned(),
            line: error.span().map_or(1, |span| line_at(text, span.start)),
            message: error.message().replace('\n', " "),
        })?;
        config.check().map_err(|(section, nth, key, message)| ConfigError::Value {
            path: path.to_owned(),
            line: line_of(text, section, nth, key),
            option: format!("{}.{key}", section.trim_matches(['[', ']'])),
            message,
        })?;
        Ok(config)
    }

    fn check(&self) -> Result<(), (&'static str, usize, &'static str, String)> {
        let server = |key, message: &str| Err(("server", 0, key, message.to_owned()));
        let s = &self.server;
        if s.listen.is_empty() {
            return server("listen", "no address: give at least one, like \"[::]:445\"");
        }
        let named = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '-';
        if s.name.is_empty() || s.name.len() > 15 || !s.name.chars().all(named) {
            return server("name", "must be 1 to 15 of A-Z, 0-9 and '-'");
        }
        if !(64 << 10..=u64::from(forebay_smb::limits::IO_BYTES_MAX)).contains(&s.max_io.0) {
            return server("max_io", "must be from 64KiB to 8MiB");
        }
        if s.event_loops > EVENT_LOOPS_MAX {
            return server(
                "event_loops",
                &format!("must be at most {EVENT_LOOPS_MAX}; 0 means one per core"),
            );
        }
        if !(1..=WORKERS_MAX).contains(&s.workers) {
            return server("workers", &format!("must be from 1 to {WORKERS_MAX}"));
        }
        if s.memory.0 != 0 && s.memory.0 < MEMORY_BYTES_MIN {
            return server("memory", "must be at least 64MiB; 0 means a quarter of the machine's memory");
        }
        if !(1..=STALL_SECONDS_MAX).contains(&s.stall_timeout_s) {
            return server("stall_timeout_s", &format!("must be from 1 to {STALL_SECONDS_MAX}"));
        }
        self.check_admin()?;
        self.instance.check().map_err(|(key, message)| ("instance", 0, key, message))?;
        for address in &self.instance.addresses {
            if s.listen.iter().any(|listen| listen.ip() == address.ip()) {
                let ip = address.ip();
                return server(
                    "listen",
                    &format!("{ip} is not there before the pools are: listen on \"[::]:445\""),
                );
            }
        }
        if !self.http.listen.is_empty() && self.http.listen.parse::<SocketAddr>().is_err() {
            return Err(("http", 0, "listen", "must be \"ip:port\", or \"\" for none".to_owned()));
        }
        if tracing_subscriber::EnvFilter::try_new(&self.log.level).is_err() {
            return Err(("log", 0, "level", "must be error, warn, info, debug or trace".to_owned()));
        }
        if self.pool.is_empty() {
            return Err((
                "[pool]",
                0,
                "path",
                "no pool: add a [[pool]] section with name and path".to_owned(),
            ));
        }
        let mut names = HashSet::new();
        let mut paths = HashSet::new();
        for (nth, pool) in self.pool.iter().enumerate() {
            let bad = |key, message: &str| Err(("[pool]", nth, key, message.to_owned()));
            if !is_label(&pool.name) {
                return bad(
                    "name",
                    "must be 1 to 63 of a-z, 0-9 and '-', and begin and end with a letter or digit",
                );
            }
            if !names.insert(&pool.name) {
                return bad("name", "another pool has this name: give each its own");
            }
            if !pool.path.is_absolute() {
                return bad("path", "must be an absolute path");
            }
            if !paths.insert(&pool.path) {
                return bad("path", "another pool has this directory: give each its own");
            }
            if !(pool.overcommit.is_finite() && (0.0..=1000.0).contains(&pool.overcommit)) {
                return bad("overcommit", "must be a number from 0 to 1000");
            }
            if let Some(nvmeof) = &pool.nvmeof {
                if pool.write_through {
                    return bad(
                        "write_through",
                        "is for pools in directories: set pool.nvmeof.write_through",
                    );
                }
                let before = self.pool[..nth].iter().filter(|pool| pool.nvmeof.is_some()).count();
                let wrong = nvmeof.check(&self.instance);
                wrong.map_err(|(key, message)| ("pool.nvmeof", before, key, message))?;
            }
        }
        Ok(())
    }

    fn check_admin(&self) -> Result<(), (&'static str, usize, &'static str, String)> {
        let wrong = |key, message: &str| Err(("admin", 0, key, message.to_owned()));
        let a = &self.admin;
        if !a.socket.is_absolute() {
            return wrong("socket", "must be an absolute path");
        }
        if a.listen.is_empty() {
            return Ok(());
        }
        if a.listen.parse::<SocketAddr>().is_err() {
            return wrong("listen", "must be \"ip:port\", or \"\" for none");
        }
        // Whoever reaches the admin API may delete every volume: over a network there is no way to it without TLS.
        for (key, path) in [("certificate", &a.certificate), ("key", &a.key), ("client_ca", &a.client_ca)] {
            if path.as_os_str().is_empty() {
                return wrong(
                    key,
                    "admin.listen is served over mutual TLS alone: name the PEM file, or take admin.listen away",
                );
            }
            if !path.is_absolute() {
                return wrong(key, "must be an absolute path");
            }
        }
        if a.allowed_clients.is_empty() || a.allowed_clients.iter().any(String::is_empty) {
            return wrong("allowed_clients", "name at least one client, and none by an empty name");
        }
        Ok(())
    }
}

/// Whether `text` is 1..=63 of `[a-z0-9-]`, beginning and ending with a letter or digit.
#[must_use]
pub fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=crate::limits::VOLUME_ID_CHARS_MAX).contains(&text.len())
        && text.chars().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn line_at(text: &str, position: usize) -> usize {
    1 + text.get(..position).unwrap_or(text).matches('\n').count()
}

/// The line of `key` in the `nth` section called `section`, or of the section, or the first.
fn line_of(text: &str, section: &str, nth: usize, key: &str) -> usize {
    let header = format!("[{section}]");
    let mut seen = 0;
    let mut section_line = None;
    for (line, content) in (1..).zip(text.lines()) {
        let content = content.trim_start();
        if content.starts_with('[') {
            if section_line.is_some() {
                break;
            }
            if content.trim_end().starts_with(&header) {
                if seen == nth {
                    section_line = Some(line);
                }
                seen += 1;
            }
        } else if section_line.is_some()
            && content.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with('='))
        {
            return line;
        }
    }
    section_line.unwrap_or(1)
}

/// A configuration with every option explained; it works as it is where its pool's directory exists.
#[must_use]
pub fn sample() -> String {
    let mut text = String::from(
        "# Configuration of forebay-server. Options that are commented out show their defaults.\n\
         # Check changes with `forebay-server check-config`.\n",
    );
    let mut section = "";
    for option in options() {
        if option.section != section {
            section = option.section;
            if section == nvmeof::SECTION {
                text.push_str("\n# Only for a pool on an NVMe-oF namespace (docs/guides/nvmeof.md); the section follows its [[pool]].\n");
                let _ = writeln!(text, "# [{section}]");
            } else {
                let _ = write!(text, "\n[{section}]\n");
            }
        } else {
            text.push('\n');
        }
        for line in wrap(option.help, 110) {
            let _ = writeln!(text, "# {line}");
        }
        let comment = if option.set { "" } else { "# " };
        let _ = writeln!(text, "{comment}{} = {}", option.key, option.value);
    }
    text
}

/// Every option of every section, in the order of the sample.
pub fn options() -> impl Iterator<Item = &'static OptionHelp> {
    OPTIONS.iter().chain(nvmeof::OPTIONS)
}

/// The options for `--help`.
#[must_use]
pub fn help() -> String {
    let mut text = String::from("Options of the configuration file (TOML):\n");
    for option in options() {
        let _ = write!(
            text,
            "\n  {}.{} = {}\n",
            option.section.trim_matches(['[', ']']),
            option.key,
            option.value
        );
        for line in wrap(option.help, 90) {
            let _ = writeln!(text, "      {line}");
        }
    }
    text
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is always a line");
        if !last.is_empty() && last.len() + 1 + word.len() > width {
            lines.push(word.to_owned());
        } else {
            if !last.is_empty() {
                last.push(' ');
            }
            last.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Config::parse("server.toml", text).expect_err("it is wrong").to_string()
    }

    #[test]
    fn the_sample_is_a_configuration_of_the_defaults() {
        let config = Config::parse("sample", &sample()).expect("the sample is right");
        assert_eq!(config.pool[0].path, Path::new("/var/lib/forebay"));
        assert_eq!(config.pool[0].quota, PoolQuota::Project);
        // Commented-out values are the defaults: with the comments taken off, the same comes out.
        let all: String = sample()
            .lines()
            .take_while(|line| *line != "# [pool.nvmeof]")
            .map(|line| match line.strip_prefix("# ") {
                Some(option) if OPTIONS.iter().any(|o| option.starts_with(&format!("{} = ", o.key))) => {
                    option
                }
                _ => line,
            })
            .fold(String::new(), |text, line| text + line + "\n");
        let explicit = Config::parse("sample", &all).expect("the defaults are right");
        assert_eq!(format!("{explicit:?}"), format!("{config:?}"));
        assert!(options().all(|o| help().contains(o.key) && o.help.len() > 10));
    }

    /// The keys that the parser accepts in a section, read from its answer to a key that does not exist.
    fn accepted_keys(section: &str) -> std::collections::BTreeSet<String> {
        let text = match section {
            "" => "no_such_key = 1\n".to_owned(),
            "pool" => "[[pool]]\nno_such_key = 1\n".to_owned(),
            "pool.nvmeof" => "[[pool]]\n[pool.nvmeof]\nno_such_key = 1\n".to_owned(),
            section => format!("[{section}]\nno_such_key = 1\n"),
        };
        let message = error(&text);
        let (_, expected) = message.split_once("expected ").expect("the error lists the keys");
        expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn every_key_that_the_parser_accepts_is_explained() {
        let mut sections = accepted_keys("");
        assert!(sections.contains("pool") && sections.contains("server"), "{sections:?}");
        sections.insert("pool.nvmeof".to_owned());
        for section in sections {
            let explained: std::collections::BTreeSet<String> = options()
                .filter(|option| option.section.trim_matches(['[', ']']) == section)
                .map(|option| option.key.to_owned())
                .collect();
            let mut accepted = accepted_keys(&section);
            // A section of its own.
            accepted.remove("nvmeof");
            assert_eq!(explained, accepted, "[{section}]");
        }
    }

    #[test]
    fn the_sample_of_a_namespace_is_one_of_the_defaults() {
        let text: String = sample()
            .lines()
            .skip_while(|line| *line != "# [pool.nvmeof]")
            .filter_map(|line| {
                let line = line.strip_prefix("# ")?;
                let option = nvmeof::OPTIONS.iter().any(|o| line.starts_with(&format!("{} = ", o.key)));
                (option || line == "[pool.nvmeof]").then(|| format!("{line}\n"))
            })
            .collect();
        let head = "[instance]\nname = \"a\"\nepoch = 1\n[[pool]]\nname = \"p\"\npath = \"/p\"\n".to_owned();
        let least: String =
            text.lines().filter(|line| nvmeof::is_required(line)).fold(String::new(), |t, l| t + l + "\n");
        let explicit = Config::parse("sample", &(head.clone() + &text)).expect("the sample is right");
        let least = Config::parse("sample", &(head + &least)).expect("the required keys are enough");
        assert_eq!(format!("{explicit:?}"), format!("{least:?}"));
    }

    #[test]
    fn errors_say_file_line_option_and_what_to_do() {
        let pool = "[[pool]]\nname = \"p\"\npath = \"/p\"\n";
        assert_eq!(
            error(&format!("{pool}\n[server]\nworkerz = 3\n")).split(", expected").next(),
            Some("server.toml:6: unknown field `workerz`")
        );
        assert!(error(&format!("{pool}[server]\nlisten = 5\n")).starts_with("server.toml:5: "));
        assert!(error("[server\n").starts_with("server.toml:1: "));
        assert_eq!(
            error(&format!("{pool}\n[server]\nname = \"x\"\nworkers = 0\n")),
            "server.toml:6: server.name: must be 1 to 15 of A-Z, 0-9 and '-'"
        );
        assert_eq!(
            error(&format!("{pool}[[pool]]\nname = \"q\"\npath = \"relative\"\n")),
            "server.toml:6: pool.path: must be an absolute path"
        );
        assert!(error(&format!("{pool}{pool}")).contains("server.toml:5: pool.name: another pool"));
        assert!(error("").contains("no pool: add a [[pool]] section"));
        assert!(error(&format!("{pool}overcommit = -1\n")).contains("server.toml:4: pool.overcommit"));
        assert!(error(&format!("{pool}quota = \"soft\"\n")).contains("server.toml:4: "));
        let missing = Config::read(Path::new("/nowhere/server.toml")).expect_err("not there").to_string();
        assert!(missing.contains("/nowhere/server.toml") && missing.contains("sample-config"), "{missing}");
    }

    #[test]
    fn the_admin_api_is_not_served_over_a_network_without_tls() {
        let pool = "[[pool]]\nname = \"p\"\npath = \"/p\"\n";
        let admin = |lines: &str| error(&format!("{pool}[admin]\nlisten = \"0.0.0.0:9444\"\n{lines}"));
        assert!(admin("").contains("admin.certificate: admin.listen is served over mutual TLS alone"));
        let two = "certificate = \"/c\"\nkey = \"/k\"\n";
        assert!(admin(two).contains("admin.client_ca: "));
        assert!(admin(&format!("{two}client_ca = \"ca\"\n")).contains("must be an absolute path"));
        let nothing = format!("{two}client_ca = \"/ca\"\nallowed_clients = []\n");
        assert!(admin(&nothing).contains("server.toml:9: admin.allowed_clients"), "{}", admin(&nothing));
        let right = format!("{pool}[admin]\nlisten = \"0.0.0.0:9444\"\n{two}client_ca = \"/ca\"\n");
        let config = Config::parse("server.toml", &right).expect("all is named");
        assert_eq!(config.admin.allowed_clients, ADMIN_CLIENTS);
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!("8MiB".parse(), Ok(Bytes(8 << 20)));
        assert_eq!("10 Gi".parse(), Ok(Bytes(10 << 30)));
        assert_eq!("512".parse(), Ok(Bytes(512)));
        for bad in ["", "MiB", "1.5GiB", "8 MB", "99999999999TiB"] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
        }
    }
}
