//! Backends on fabrics, and what goes with them: addresses that move, takeovers, the state of pools.

use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

fn yes() -> bool {
    true
}

fn hundred() -> u32 {
    100
}

fn connect_timeout() -> u32 {
    60
}

fn loss_timeout() -> u32 {
    15
}

/// Seconds of silence that count as the loss of a node, at least. Kubelets renew their Leases every 10 s, so that anything up to
/// twice that may be one request that hung. Nodes that were cut off together fall silent within one renewal of each other, and the
/// operator, which looks every 3 s, must see all of them silent before it takes the first over.
pub const TAKEOVER_AFTER_MIN: u32 = 25;
/// Seconds that a server which cannot confirm its reservation ends before another one takes over: the kubelet's last sign of life
/// can be one renewal older than the loss of the network.
pub const LOSS_MARGIN: u32 = 10;
/// Seconds that a reservation may go unconfirmed, at least.
const LOSS_TIMEOUT_MIN: u32 = 5;

fn keep_alive() -> u32 {
    5
}

/// Namespaces of a target that is there already: an array, or any other NVMe-oF target with reservations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.tlsSecret) || self.paths.all(p, p.startsWith('tcp://'))").message("tlsSecret is for paths over TCP: what goes over RDMA would be in the clear"),
    validation = Rule::new("self.namespaces.all(a, self.namespaces.exists_one(b, b.instance == a.instance))").message("two of namespaces are for the same instance"),
    validation = Rule::new("self.namespaces.all(a, self.namespaces.exists_one(b, b.nqn == a.nqn && has(b.uuid) == has(a.uuid) && (!has(a.uuid) || b.uuid == a.uuid) && has(b.nguid) == has(a.nguid) && (!has(a.nguid) || b.nguid == a.nguid)))").message("two of namespaces are the same namespace: every instance needs one of its own")
)]
pub struct NvmeofBackend {
    /// Addresses of the target, `tcp://ADDRESS:PORT` or `rdma://ADDRESS:PORT`. Several addresses need native multipath.
    #[schemars(
        length(min = 1, max = 8),
        inner(
            length(min = 8, max = 128),
            regex(pattern = r"^(tcp|rdma)://([0-9.]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}$")
        )
    )]
    pub paths: Vec<String>,
    /// The namespace of each instance. An instance without one is not placed.
    #[schemars(
        length(min = 1, max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["instance"])
    )]
    pub namespaces: Vec<InstanceNamespace>,
    /// Create a file system on a blank namespace. Existing data are never overwritten.
    #[serde(default)]
    pub format: bool,
    /// Write every change to the namespace before it is acknowledged, so that data that a program has synced survive a takeover.
    /// If false, data that were written but not flushed are lost with the server, and the Linux client may not notice.
    #[serde(default = "yes")]
    pub write_through: bool,
    /// Secret with DH-HMAC-CHAP keys, in the cluster's namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dhchap_secret: Option<SecretName>,
    /// Secret with the pre-shared key of TLS, in the cluster's namespace: traffic between servers and target is encrypted. Every
    /// node that may run an instance needs `tlshd` (ktls-utils).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_secret: Option<TlsSecretName>,
    /// Seconds that a starting server waits for the target and the namespace.
    #[serde(default = "connect_timeout")]
    #[schemars(range(min = 1, max = 3600))]
    pub connect_timeout_seconds: u32,
    /// How long the reservation may go unconfirmed before a server stops, seconds. At least 10 less than `takeover.afterSeconds`,
    /// so
    /// that a server that is cut off has stopped before another one serves.
    #[serde(default = "loss_timeout")]
    #[schemars(range(min = 5, max = 600))]
    pub loss_timeout_seconds: u32,
    /// Time between two signs of life, after which either end takes a connection for dead, seconds.
    #[serde(default = "keep_alive")]
    #[schemars(range(min = 1, max = 120))]
    pub keep_alive_seconds: u32,
    /// Limit for the sum of the volumes' capacities, in percent of the pool's size.
    #[serde(default = "hundred")]
    #[schemars(range(min = 1, max = 10000))]
    pub overcommit_percent: u32,
}

/// One instance's namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.uuid) != has(self.nguid)").message("a namespace is named by uuid or by nguid, one of them"))]
#[x_kube(validation = Rule::new("(!has(self.uuid) || !self.uuid.matches('^[0-]*$')) && (!has(self.nguid) || !self.nguid.matches('^0*$'))").message("a uuid or nguid of zeros names no namespace"))]
#[x_kube(validation = Rule::new("self.nqn == oldSelf.nqn && has(self.uuid) == has(oldSelf.uuid) && (!has(self.uuid) || self.uuid == oldSelf.uuid) && has(self.nguid) == has(oldSelf.nguid) && (!has(self.nguid) || self.nguid == oldSelf.nguid)").message("an instance's namespace cannot be replaced by another: its volumes would be lost from sight. Make another StorageCluster, and move the volumes there"))]
pub struct InstanceNamespace {
    /// Ordinal of the instance, from 0.
    #[schemars(range(min = 0, max = 63))]
    pub instance: u32,
    /// NQN of the subsystem.
    #[schemars(length(min = 12, max = 223), regex(pattern = r"^nqn\.[0-9]{4}-[0-9]{2}\.[!-~]+$"))]
    pub nqn: String,
    /// UUID of the namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$"), length(max = 36))]
    pub uuid: Option<String>,
    /// NGUID of the namespace, 32 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9a-fA-F]{32}$"), length(max = 32))]
    pub nguid: Option<String>,
}

/// A Secret of the cluster's namespace, with the keys `host` and, where the target is to prove itself, `controller`
/// (`DHHC-1:…`). Only servers get it, as files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretName {
    /// Its name.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub name: String,
    /// The Secret also has the key `controller`: the target must authenticate as well.
    #[serde(default)]
    pub mutual: bool,
}

/// A Secret of the cluster's namespace, with the key `psk` (`NVMeTLSkey-1:…`). Only servers get it, as a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TlsSecretName {
    /// Its name.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub name: String,
    /// Version of the TLS identity. 0 is for targets that do not support version 1.
    #[serde(default = "identity")]
    #[schemars(range(min = 0, max = 1))]
    pub identity: u8,
}

fn identity() -> u8 {
    1
}

/// The bundled target: drives, partitions or files of nodes, offered over a fabric by the kernel's nvmet. Every instance
/// gets a namespace of its own, which stays where it is: there is no second copy of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.nodes.all(a, self.nodes.exists_one(b, b.name == a.name))").message("two of nodes have the same name"),
    validation = Rule::new("self.nodes.all(n, (has(n.devices) && n.devices.size() > 0) != has(n.directory))").message("a node of a target offers devices, or files of a directory: one of them"),
    validation = Rule::new("!self.nodes.exists(n, has(n.directory)) || has(self.sizeGib)").message("files of a directory need sizeGib")
)]
pub struct TargetBackend {
    /// Transport to the namespaces.
    #[serde(default)]
    pub transport: FabricTransport,
    /// Port.
    #[serde(default = "nvme_port")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: u16,
    /// Network of the nodes' addresses, such as `192.168.77.0/24`. Default: the nodes' addresses in Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 4, max = 64), regex(pattern = r"^[0-9a-fA-F:.]+/[0-9]{1,3}$"))]
    pub network: Option<String>,
    /// The nodes that offer drives or files.
    #[schemars(
        length(min = 1, max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub nodes: Vec<TargetNode>,
    /// Size of a file, for nodes with a directory, GiB. It can be raised; a file never shrinks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub size_gib: Option<u32>,
    /// Offer drives with a volatile write cache, and files without making every write to them
    /// durable. What clients have flushed can then be lost when a target's node loses its power.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_volatile_cache: bool,
    /// Create a file system on a blank namespace. Existing data are never overwritten.
    #[serde(default = "yes")]
    pub format: bool,
    /// Write every change to the namespace before it is acknowledged, so that data that a program has synced survive a takeover.
    /// If false, data that were written but not flushed are lost with the server, and the Linux client may not notice.
    #[serde(default = "yes")]
    pub write_through: bool,
    /// CPU and memory of each target's container. Default: requests of 50m and 64Mi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// Port of the target's metrics and health.
    #[serde(default = "metrics_port")]
    #[schemars(range(min = 1, max = 65535))]
    pub metrics_port: u16,
    /// Seconds that a starting server waits for the target and the namespace.
    #[serde(default = "connect_timeout")]
    #[schemars(range(min = 1, max = 3600))]
    pub connect_timeout_seconds: u32,
    /// How long the reservation may go unconfirmed before a server stops, seconds. At least 10 less than `takeover.afterSeconds`,
    /// so
    /// that a server that is cut off has stopped before another one serves.
    #[serde(default = "loss_timeout")]
    #[schemars(range(min = 5, max = 600))]
    pub loss_timeout_seconds: u32,
    /// Time between two signs of life, after which either end takes a connection for dead, seconds.
    #[serde(default = "keep_alive")]
    #[schemars(range(min = 1, max = 120))]
    pub keep_alive_seconds: u32,
    /// Limit for the sum of the volumes' capacities, in percent of the pool's size.
    #[serde(default = "hundred")]
    #[schemars(range(min = 1, max = 10000))]
    pub overcommit_percent: u32,
}

fn nvme_port() -> u16 {
    4420
}

fn metrics_port() -> u16 {
    9447
}

/// A node that offers namespaces.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(oldSelf.directory) || (has(self.directory) && self.directory == oldSelf.directory)").message("the directory of a target's node cannot be changed: the namespaces in it would be lost from sight"))]
pub struct TargetNode {
    /// Name of the node.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub name: String,
    /// Drives and partitions, by names that do not change: below /dev/disk/by-id, by-path, by-partuuid or by-partlabel. Each
    /// is one namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(
            length(max = 512),
            regex(pattern = r"^/dev/disk/by-(id|path|partuuid|partlabel)/[A-Za-z0-9_.:+@%=-]+$")
        )
    )]
    pub devices: Vec<String>,
    /// Directory in which each namespace is a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 1024))]
    #[x_kube(
        validation = Rule::new("self.startsWith('/') && !self.contains('..') && !self.contains('//') && !self.endsWith('/')").message("directory must be absolute, without '..', '//' or a '/' at its end"),
        validation = Rule::new("!(self in ['/bin','/boot','/dev','/etc','/home','/lib','/opt','/proc','/root','/run','/sbin','/srv','/sys','/tmp','/usr','/var','/var/lib','/var/lib/kubelet']) && !self.startsWith('/proc/') && !self.startsWith('/sys/') && !self.startsWith('/dev/') && !self.startsWith('/etc/') && !self.startsWith('/var/lib/kubelet/')").message("directory must be one of its own, not one of the system's")
    )]
    pub directory: Option<String>,
    /// Address at which hosts reach the node. Default: the one in `network`, else that of Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 45), regex(pattern = r"^[0-9a-fA-F:.]+$"))]
    pub address: Option<String>,
}

/// A fabric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FabricTransport {
    /// NVMe over TCP.
    #[default]
    TCP,
    /// NVMe over RDMA.
    RDMA,
}

impl FabricTransport {
    /// As in a path and in the target's configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TCP => "tcp",
            Self::RDMA => "rdma",
        }
    }
}

/// When another node takes over an instance with pools on fabrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Takeover {
    /// Whether the operator takes over without a request. Planned moves are done in any case.
    pub enabled: bool,
    /// Seconds without a heartbeat (Lease renewal) of the node after which it counts as lost. A kubelet sends one every 10 s; 25
    /// at least, so that
    /// one request that hung is no loss, and so that all nodes of a partition are seen to be silent before the first is taken over.
    #[schemars(range(min = 25, max = 600))]
    pub after_seconds: u32,
}

impl Default for Takeover {
    fn default() -> Self {
        Self { enabled: true, after_seconds: 30 }
    }
}

impl Takeover {
    /// `after_seconds`; the least that is allowed where an object of an earlier version has less.
    #[must_use]
    pub fn after(&self) -> Duration {
        Duration::from_secs(self.after_seconds.max(TAKEOVER_AFTER_MIN).into())
    }

    /// Seconds that a server may go without a confirmed reservation, where so many are configured: less than the margin that
    /// remains until another server takes over.
    #[must_use]
    pub fn loss_seconds(&self, configured: u32) -> u32 {
        if !self.enabled {
            return configured;
        }
        let most = self.after_seconds.max(TAKEOVER_AFTER_MIN) - LOSS_MARGIN;
        configured.clamp(LOSS_TIMEOUT_MIN, most.max(LOSS_TIMEOUT_MIN))
    }
}

impl Takeover {
    /// Whether nothing was said.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// One pool of an instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolStatus {
    /// Name of its backend.
    pub name: String,
    /// Kind of its backend.
    pub kind: String,
    /// Its size, bytes.
    pub capacity_bytes: i64,
    /// Bytes that can still be provisioned.
    pub free_bytes: i64,
    /// NQN of the subsystem; empty for directories.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub nqn: String,
    /// The namespace, `uuid:…` or `nguid:…`; empty for directories.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Node of the bundled target that holds it; empty for others.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub target: String,
    /// Paths that can do I/O.
    #[serde(skip_serializing_if = "is_zero")]
    pub paths_up: u32,
    /// Paths that are configured.
    #[serde(skip_serializing_if = "is_zero")]
    pub paths: u32,
    /// ANA states of the paths, such as "optimized".
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ana_state: String,
    /// Holder of the reservation, if known, such as "fast-0, epoch 2, on node-a".
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reservation: String,
    /// What is wrong, in a sentence; empty if healthy.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub health: String,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The last time that an instance went to another node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TakeoverStatus {
    /// `NodeLost`, `NodeGone`, `ServerDown`, `NodeCordoned` or `Asked`.
    pub reason: String,
    /// Node that it came from.
    pub from: String,
    /// Node that it went to.
    pub to: String,
    /// Epoch since then.
    pub epoch: u64,
    /// Time of the node's last heartbeat, or since when the reason existed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// When the operator decided the move and raised the epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decided: Option<Time>,
    /// When its new pod was scheduled to the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed: Option<Time>,
    /// When it served again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serving: Option<Time>,
}
