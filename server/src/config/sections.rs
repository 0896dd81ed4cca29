//! The sections of the configuration file, with their defaults.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::bytes::Bytes;
use super::dialect::MinDialect;
use super::nvmeof::NvmeofSection;
use crate::advertise::Advertised;
use crate::backend::directory::Promise;
use crate::limits::{STALL_TIME_DEFAULT_MAX, WORKERS_DEFAULT};
use crate::rdma::listener::Ports;

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
    /// The oldest dialect that is accepted.
    pub min_dialect: MinDialect,
    /// Names in clients' SPNs.
    pub target_names: Vec<String>,
    /// Whether users may log on with NTLM.
    pub ntlm: bool,
    /// Keys for Kerberos, or empty for none.
    pub keytab: PathBuf,
    /// Whether sessions must be signed.
    pub signing: Signing,
    /// Whether sessions can or must be sealed.
    pub encryption: Encryption,
    /// Largest READ and WRITE.
    pub max_io: Bytes,
    /// Whether clients may cache.
    pub caching: bool,
    /// Whether directories can be leased too, so that clients cache names and attributes.
    pub directory_leases: bool,
    /// Event loops; 0 for one per core.
    pub event_loops: usize,
    /// Worker threads.
    pub workers: usize,
    /// The I/O engine.
    pub io_engine: IoEngine,
    /// Whether clients may connect over RDMA.
    pub rdma: Rdma,
    /// Port for InfiniBand and RoCE.
    pub rdma_port: u16,
    /// Port for iWARP.
    pub iwarp_port: u16,
    /// Whether READs over RDMA may bypass the page cache.
    pub direct_reads: bool,
    /// Memory for payload; 0 for a share of the machine's.
    pub memory: Bytes,
    /// Seconds that a peer may stall.
    pub stall_timeout_s: u64,
    /// Seconds for a graceful shutdown.
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
            ntlm: true,
            keytab: PathBuf::new(),
            signing: Signing::default(),
            encryption: Encryption::default(),
            max_io: Bytes(8 << 20),
            caching: true,
            directory_leases: true,
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
    /// Whether a session with a relayed logon can be of use, because its requests need no key.
    #[must_use]
    pub fn may_be_relayed(&self) -> bool {
        self.min_dialect != MinDialect::Smb311
            && self.signing != Signing::Required
            && self.encryption != Encryption::Required
    }

    /// Time for a graceful shutdown.
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
    /// PEM file of the certificate authorities of clients.
    pub client_ca: PathBuf,
    /// Names of clients.
    pub allowed_clients: Vec<String>,
}

/// Default path of the admin socket.
pub const ADMIN_SOCKET: &str = "/run/forebay/admin.sock";

/// Default names of clients that may use the admin API over TLS.
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
    /// Format of a line.
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
    /// Make the directory if it does not exist.
    #[serde(default)]
    pub create: bool,
    /// The directory must already be a pool.
    #[serde(default)]
    pub existing: bool,
    /// How capacity is enforced.
    #[serde(default)]
    pub quota: PoolQuota,
    /// The sum of capacities may be up to this many times the pool's size.
    #[serde(default = "one")]
    pub overcommit: f64,
    /// Every operation is on stable storage before it is answered. On a namespace, `nvmeof.write_through` applies instead.
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
    /// The durability guarantee for clients of this pool's volumes.
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
    /// If the client requires it.
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
    /// If the client or the volume requires it.
    #[default]
    Offered,
    /// Always.
    Required,
}

/// `server.io_engine`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoEngine {
    /// io_uring if it is permitted.
    #[default]
    Auto,
    /// io_uring; the server does not start without it.
    IoUring,
    /// epoll and threads.
    Readiness,
}

/// `server.rdma`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rdma {
    /// On all RDMA devices, including those that appear later.
    #[default]
    Auto,
    /// TCP only.
    Off,
}

/// `log.format`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For humans.
    #[default]
    Text,
    /// For programs.
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
