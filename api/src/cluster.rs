//! `StorageCluster`: SMB servers on the nodes that fit, and the StorageClasses that use them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{LocalObjectReference, ResourceRequirements, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fabric::{NvmeofBackend, PoolStatus, Takeover, TakeoverStatus, TargetBackend};
use crate::node::LinkLayer;

/// What is wanted.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "storage.forebay.io",
    version = "v1alpha1",
    kind = "StorageCluster",
    namespaced,
    shortname = "fbc",
    category = "forebay",
    status = "StorageClusterStatus",
    derive = "PartialEq",
    doc = "Forebay's SMB servers: how many, on which nodes, with which backends, and the StorageClasses that provision volumes on them.",
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Instances", type_ = "string", json_path = ".status.summary.instances", description = "Ready of wanted"),
    printcolumn(name = "Transport", type_ = "string", json_path = ".status.summary.transport"),
    printcolumn(name = "Volumes", type_ = "integer", json_path = ".status.summary.volumes"),
    printcolumn(name = "Capacity", type_ = "string", json_path = ".status.summary.capacity", description = "Free of total"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].reason", priority = 1),
    printcolumn(name = "Image", type_ = "string", json_path = ".status.image", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("size(self.metadata.name) <= 40").message("the name may have 40 characters at most: instances, Services and Secrets are named after it"),
    validation = Rule::new("!self.metadata.name.contains('.')").message("the name must not contain dots: Services are named after it")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.network.transport != 'RDMA' || self.placement.rdma.requirement == 'Required'")
        .message("network.transport RDMA needs placement.rdma.requirement Required, else instances may land where there is no RDMA"),
    validation = Rule::new("self.network.transport != 'TCP' || self.placement.rdma.requirement != 'Required'")
        .message("placement.rdma.requirement Required contradicts network.transport TCP: use transport Auto or RDMA, or requirement Preferred or None"),
    validation = Rule::new("self.network.hostNetwork || self.network.transport != 'RDMA' || has(self.network.attachment)")
        .message("network.transport RDMA needs hostNetwork or a network.attachment with the RDMA device"),
    validation = Rule::new("self.network.hostNetwork || !self.backends.exists(b, has(b.nvmeof) && has(b.nvmeof.tlsSecret))")
        .message("nvmeof.tlsSecret needs hostNetwork: a node's tlshd does the handshakes of the node's own network only"),
    validation = Rule::new("!has(self.storageClasses) || self.storageClasses.filter(c, c.default).size() <= 1")
        .message("at most one of storageClasses may be the default"),
    validation = Rule::new("!self.backends.exists(b, b.kind != 'Directory') || !self.network.hostNetwork || (has(self.network.addresses) && self.network.addresses.size() >= self.instances)")
        .message("backends of kind NVMeoF and Target need network.addresses, one for each instance: a node's own address stays behind when another node takes the instance over, and its clients would be lost"),
    validation = Rule::new("self.backends.exists(b, b.kind == 'Directory') || (has(self.takeover) && !self.takeover.enabled) || self.backends.all(b, (!has(b.nvmeof) || b.nvmeof.lossTimeoutSeconds + 10 <= (has(self.takeover) ? self.takeover.afterSeconds : 30)) && (!has(b.target) || b.target.lossTimeoutSeconds + 10 <= (has(self.takeover) ? self.takeover.afterSeconds : 30)))")
        .message("lossTimeoutSeconds of a backend must be at least 10 less than takeover.afterSeconds: a server that is cut off has to stop before another one serves, and the node's last sign of life can be one renewal (10 s) older than the cut"),
    validation = Rule::new("oldSelf.instances == 0 || !has(oldSelf.network.addresses) || (has(self.network.addresses) && oldSelf.network.addresses.all(a, self.network.addresses.indexOf(a) == oldSelf.network.addresses.indexOf(a)))")
        .message("network.addresses that are there cannot be changed, removed or put in another order: clients have mounted them. Others can be added at the end. To change them, unmount all volumes and set instances to 0 first"),
    validation = Rule::new("oldSelf.instances == 0 || (self.network.ports.smb == oldSelf.network.ports.smb && self.network.ports.smbDirect == oldSelf.network.ports.smbDirect)")
        .message("network.ports.smb and smbDirect cannot be changed: clients have mounted them. To change them, unmount all volumes and set instances to 0 first")
)]
pub struct StorageClusterSpec {
    /// Image of the servers. Default: the one the operator runs from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub image: Option<String>,
    /// When the image is pulled.
    #[serde(default)]
    pub image_pull_policy: PullPolicy,
    /// Secrets for pulling the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// Number of servers. Each runs on a node of its own and owns its pools; more of them give more throughput. It cannot
    /// be lowered while the instances to be removed hold volumes.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 64))]
    pub instances: u32,
    /// Which nodes may run instances.
    #[serde(default)]
    pub placement: Placement,
    /// How clients reach the instances.
    #[serde(default)]
    pub network: Network,
    /// Where the instances keep volumes. Every instance has one pool per entry. Entries can be added; name, kind and path of
    /// those that are there cannot be changed.
    // By name: only so can a rule compare a backend with what it was before.
    #[schemars(
        length(min = 1, max = 8),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    #[x_kube(
        validation = Rule::new("self.all(a, self.exists_one(b, b.name == a.name))").message("two backends have the same name"),
        validation = Rule::new("oldSelf.all(o, self.exists(b, b.name == o.name && b.kind == o.kind && has(b.directory) == has(o.directory) && (!has(o.directory) || b.directory.path == o.directory.path)))").message("a backend cannot be removed or renamed, and its kind and path cannot be changed: its volumes would be lost from sight. Add another backend, or make another StorageCluster, and move the volumes there")
    )]
    pub backends: Vec<Backend>,
    /// Protection on the wire, and certificates.
    #[serde(default)]
    pub security: Security,
    /// What a server may use.
    #[serde(default)]
    pub limits: Limits,
    /// How servers read files, and what clients may cache.
    #[serde(default, skip_serializing_if = "Io::is_default")]
    pub io: Io,
    /// StorageClasses that the operator creates and maintains. They are removed with the cluster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(validation = Rule::new("self.all(a, self.exists_one(b, b.name == a.name))").message("two storageClasses have the same name"))]
    pub storage_classes: Vec<StorageClassTemplate>,
    /// How a new image or configuration is rolled out.
    #[serde(default)]
    pub upgrade: Upgrade,
    /// When another node takes an instance over. An instance can move only if all its backends are of kind NVMeoF or Target.
    #[serde(default, skip_serializing_if = "Takeover::is_default")]
    pub takeover: Takeover,
    /// Stops the operator from changing anything in this cluster. Servers keep running.
    #[serde(default)]
    pub paused: bool,
    /// What happens to the volumes when the cluster is deleted.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
}

fn one() -> u32 {
    1
}

/// As in a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PullPolicy {
    /// At every start.
    Always,
    /// Where the node does not have it.
    #[default]
    IfNotPresent,
    /// The node must have it.
    Never,
}

/// What happens to the volumes when the cluster is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DeletionPolicy {
    /// The deletion waits until no volume is left.
    #[default]
    Protect,
    /// The servers go, the volumes' data stay where they are: a cluster of the same name on the same nodes finds them.
    Retain,
    /// The volumes and all their data are destroyed.
    Destroy,
}

/// Which nodes may run instances. All that is said must hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Placement {
    /// Requirements for the node's RDMA ports.
    pub rdma: RdmaPlacement,
    /// Labels that the node must have.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints of the node that are tolerated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// How instances are spread over failure domains. Two instances never share a node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
}

/// What a node's RDMA ports must be like: one port at least that is usable and meets all of this.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.requirement != 'None' || (!has(self.linkLayer) && self.minRateGbps == 0 && !has(self.devices) && !has(self.netdevs))")
        .message("with requirement None there is nothing that linkLayer, minRateGbps, devices or netdevs could select")
)]
pub struct RdmaPlacement {
    /// Whether RDMA is needed.
    #[serde(default)]
    pub requirement: RdmaRequirement,
    /// Link layer that the port must have. Default: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_layer: Option<RequiredLinkLayer>,
    /// Least rate of the port, Gb/s.
    #[serde(default)]
    #[schemars(range(min = 0, max = 10000))]
    pub min_rate_gbps: u32,
    /// Names of RDMA devices, `*` and `?` allowed, such as `mlx5_*`. Default: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z0-9_.*?-]+$")))]
    pub devices: Vec<String>,
    /// Names of network devices, `*` and `?` allowed, such as `ens*np0`. Default: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        inner(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z0-9_.:@*?-]+$"))
    )]
    pub netdevs: Vec<String>,
}

/// Whether RDMA is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RdmaRequirement {
    /// Instances run only on nodes with a fitting port.
    Required,
    /// Nodes with a fitting port come first.
    #[default]
    Preferred,
    /// RDMA plays no part.
    None,
}

/// A link layer that can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RequiredLinkLayer {
    /// RoCE or iWARP.
    Ethernet,
    /// InfiniBand.
    InfiniBand,
}

impl RequiredLinkLayer {
    /// Whether a port's link layer is this one.
    #[must_use]
    pub fn is(self, found: LinkLayer) -> bool {
        matches!(
            (self, found),
            (Self::Ethernet, LinkLayer::Ethernet) | (Self::InfiniBand, LinkLayer::InfiniBand)
        )
    }
}

/// How instances are spread.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Spread {
    /// Node label; its values are the failure domains.
    #[serde(default = "zone")]
    #[schemars(length(min = 1, max = 317))]
    pub topology_key: String,
    /// How many instances one domain may have more than another.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub max_skew: u32,
    /// What happens to an instance that cannot be placed without exceeding `maxSkew`.
    #[serde(default)]
    pub when_unsatisfiable: WhenUnsatisfiable,
}

fn zone() -> String {
    "topology.kubernetes.io/zone".to_owned()
}

/// What happens where the spread cannot be kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WhenUnsatisfiable {
    /// The instance is not placed.
    DoNotSchedule,
    /// It is placed as well as can be.
    #[default]
    ScheduleAnyway,
}

/// How clients reach the instances.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(self.hostNetwork && has(self.attachment))").message("attachment needs hostNetwork false: a pod on the host's network has no attachments"),
    validation = Rule::new("!self.hostNetwork || self.ports.smb != self.ports.admin && self.ports.smb != self.ports.metrics && self.ports.admin != self.ports.metrics && self.ports.smbDirect != self.ports.admin && self.ports.smbDirect != self.ports.metrics")
        .message("two of ports are the same"),
    validation = Rule::new("!has(self.addresses) || self.addresses.size() == 0 || self.hostNetwork").message("addresses need hostNetwork: in a pod's network the instance's Service has an address that moves with it"),
    validation = Rule::new("!has(self.addresses) || self.addresses.all(a, self.addresses.exists_one(b, b == a))").message("two of addresses are the same"),
    validation = Rule::new("!has(self.interface) || has(self.addresses)").message("interface is where addresses are put: give addresses, too")
)]
pub struct Network {
    /// What clients use.
    #[serde(default)]
    pub transport: Transport,
    /// Run on the host's network. RDMA needs this or an attachment.
    #[serde(default = "yes")]
    pub host_network: bool,
    /// NetworkAttachmentDefinition, `name` or `namespace/name`, of the network for storage traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = 317),
        regex(pattern = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    )]
    pub attachment: Option<String>,
    /// The instances' own addresses with the length of their network's prefix, such as `192.168.77.200/24`, in order of their
    /// ordinals. An instance's address moves with it; nothing else on the storage network may have it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(length(min = 4, max = 64), regex(pattern = r"^[0-9a-fA-F:.]+/[0-9]{1,3}$"))
    )]
    pub addresses: Vec<String>,
    /// Network device of the nodes to which addresses are added. Default: the device with an address in the same network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15), regex(pattern = r"^[A-Za-z0-9_.@-]+$"))]
    pub interface: Option<String>,
    /// Ports of the instances.
    #[serde(default)]
    pub ports: Ports,
}

fn yes() -> bool {
    true
}

impl Default for Network {
    fn default() -> Self {
        Self {
            transport: Transport::Auto,
            host_network: true,
            attachment: None,
            addresses: Vec::new(),
            interface: None,
            ports: Ports::default(),
        }
    }
}

/// What clients use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Transport {
    /// RDMA where both ends have it, else TCP.
    #[default]
    Auto,
    /// RDMA only.
    RDMA,
    /// TCP only.
    TCP,
}

/// Ports of the instances.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Ports {
    /// SMB over TCP, and SMB Direct over RoCE and InfiniBand.
    #[schemars(range(min = 1, max = 65535))]
    pub smb: u16,
    /// SMB Direct over iWARP.
    #[schemars(range(min = 1, max = 65535))]
    pub smb_direct: u16,
    /// Admin API, mutual TLS.
    #[schemars(range(min = 1, max = 65535))]
    pub admin: u16,
    /// Metrics and health.
    #[schemars(range(min = 1, max = 65535))]
    pub metrics: u16,
}

impl Default for Ports {
    fn default() -> Self {
        Self { smb: 445, smb_direct: 5445, admin: 9444, metrics: 9445 }
    }
}

/// One backend. `kind` says which of the other fields is set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.kind != 'Directory' || has(self.directory)").message("kind Directory needs the field directory"),
    validation = Rule::new("self.kind != 'NVMeoF' || has(self.nvmeof)").message("kind NVMeoF needs the field nvmeof"),
    validation = Rule::new("self.kind != 'Target' || has(self.target)").message("kind Target needs the field target"),
    validation = Rule::new("(self.kind == 'NVMeoF' || !has(self.nvmeof)) && (self.kind == 'Target' || !has(self.target)) && (self.kind == 'Directory' || !has(self.directory))").message("a backend has the field of its kind only")
)]
pub struct Backend {
    /// Name of the pool that it makes on every instance.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
    /// What it is.
    pub kind: BackendKind,
    /// A directory of the node, for kind Directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<DirectoryBackend>,
    /// Namespaces of a target that is there already, for kind NVMeoF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvmeof: Option<NvmeofBackend>,
    /// Drives or files of nodes offered by the bundled target, for kind Target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<TargetBackend>,
}

impl Backend {
    /// Whether its pools can be reached from every node.
    #[must_use]
    pub fn is_on_fabric(&self) -> bool {
        self.kind != BackendKind::Directory
    }

    /// Percent of a pool's size that may be given to volumes.
    #[must_use]
    pub fn overcommit_percent(&self) -> u32 {
        let directory = self.directory.as_ref().map(|b| b.overcommit_percent);
        let nvmeof = || self.nvmeof.as_ref().map(|b| b.overcommit_percent);
        let target = || self.target.as_ref().map(|b| b.overcommit_percent);
        directory.or_else(nvmeof).or_else(target).unwrap_or_else(hundred)
    }
}

impl StorageClusterSpec {
    /// Whether another node can take instances over: all their pools lie on fabrics.
    #[must_use]
    pub fn can_move(&self) -> bool {
        !self.backends.is_empty() && self.backends.iter().all(Backend::is_on_fabric)
    }

    /// Whether some of the pools lie on fabrics.
    #[must_use]
    pub fn uses_fabric(&self) -> bool {
        self.backends.iter().any(Backend::is_on_fabric)
    }
}

/// Kinds of backends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum BackendKind {
    /// A directory of the node that an instance runs on: the instance stays on that node.
    #[default]
    Directory,
    /// Namespaces of an NVMe-oF target that is there already: another node can take the instance over.
    NVMeoF,
    /// Namespaces that the bundled target offers from drives or files of nodes: another node can take the instance over, as
    /// long as the node with the namespace is there.
    Target,
}

impl BackendKind {
    /// As in the spec.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Directory => "Directory",
            Self::NVMeoF => "NVMeoF",
            Self::Target => "Target",
        }
    }
}

/// A directory of the node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct DirectoryBackend {
    /// Absolute path on the node. An instance keeps its pool in the folder `<path>/<instance>`.
    #[schemars(length(min = 2, max = 1024))]
    #[x_kube(
        validation = Rule::new("self.startsWith('/') && !self.contains('..') && !self.contains('//') && !self.endsWith('/')").message("path must be absolute, without '..', '//' or a '/' at its end"),
        validation = Rule::new("!(self in ['/bin','/boot','/dev','/etc','/home','/lib','/opt','/proc','/root','/run','/sbin','/srv','/sys','/tmp','/usr','/var','/var/lib','/var/lib/kubelet']) && !self.startsWith('/proc/') && !self.startsWith('/sys/') && !self.startsWith('/dev/') && !self.startsWith('/etc/') && !self.startsWith('/var/lib/kubelet/')").message("path must be a directory of its own, not one of the system's")
    )]
    pub path: String,
    /// Create the directory if it is missing. Otherwise a node without it does not fit.
    #[serde(default)]
    pub create: bool,
    /// How capacity is enforced.
    #[serde(default)]
    pub quota: QuotaKind,
    /// Limit for the sum of the volumes' capacities, in percent of the pool's size.
    #[serde(default = "hundred")]
    #[schemars(range(min = 1, max = 10000))]
    pub overcommit_percent: u32,
}

fn hundred() -> u32 {
    100
}

/// How capacity is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum QuotaKind {
    /// Project quota of XFS or ext4 (mounted with prjquota): volumes have hard limits.
    #[default]
    Project,
    /// No limits; volumes can fill the file system.
    None,
}

/// Protection on the wire, and certificates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Security {
    /// Encryption of SMB traffic.
    pub sealing: Sealing,
    /// Signing of SMB traffic.
    pub signing: Signing,
    /// Certificates of the admin API.
    pub certificates: Certificates,
}

/// Encryption of SMB traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Sealing {
    /// Not offered.
    Disabled,
    /// Used where a volume or client asks for it.
    #[default]
    Offered,
    /// Every session is sealed.
    Required,
}

/// Signing of SMB traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Signing {
    /// Where a volume or client asks for it.
    #[default]
    Optional,
    /// Every session is signed or sealed.
    Required,
}

/// Certificates of the admin API, made by the cluster's own authority.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.renewBeforeHours < self.validityHours").message("renewBeforeHours must be less than validityHours"))]
pub struct Certificates {
    /// How long a certificate is valid, hours.
    #[serde(default = "ninety_days")]
    #[schemars(range(min = 1, max = 87600))]
    pub validity_hours: u32,
    /// Hours before its expiry at which a certificate is replaced. Servers and drivers use the new one without a restart.
    #[serde(default = "thirty_days")]
    #[schemars(range(min = 0, max = 87599))]
    pub renew_before_hours: u32,
}

fn ninety_days() -> u32 {
    90 * 24
}

fn thirty_days() -> u32 {
    30 * 24
}

impl Default for Certificates {
    fn default() -> Self {
        Self { validity_hours: ninety_days(), renew_before_hours: thirty_days() }
    }
}

/// How servers read files, and what clients may cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Io {
    /// Clients may cache files (leases and oplocks). If false, every request goes to the server.
    pub caching: bool,
    /// Clients may cache the names in a directory and the attributes of its files, too (leases on directories).
    pub directory_leases: bool,
    /// Large READs bypass the page cache: for data sets that are larger than memory and read once.
    pub direct_reads: bool,
}

impl Default for Io {
    fn default() -> Self {
        Self { caching: true, directory_leases: true, direct_reads: false }
    }
}

impl Io {
    /// Whether nothing was said.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// What a server may use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Limits {
    /// CPU and memory of each server's container. Default: requests of 100m and 256Mi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// Threads that serve connections. Default: one per core.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub event_loops: Option<u32>,
    /// Threads for file-system calls that block. Default: the server's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub workers: Option<u32>,
    /// Largest READ and WRITE, KiB. Default: 8192.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 64, max = 8192))]
    pub max_io_kib: Option<u32>,
}

/// A StorageClass to make.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct StorageClassTemplate {
    /// Its name.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub name: String,
    /// Whether PersistentVolumeClaims without a class get this one.
    #[serde(default)]
    pub default: bool,
    /// What happens to a volume when its claim is deleted.
    #[serde(default)]
    pub reclaim_policy: ReclaimPolicy,
    /// Backend with the pools for the volumes. Default: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub backend: Option<String>,
    /// Protection of the volumes' traffic. Default: the cluster's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<VolumeProtection>,
    /// Options for the mounts on the nodes, such as `rsize=4194304`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub mount_options: Vec<String>,
    /// Further parameters for the CSI driver.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, String>,
}

/// What happens to a volume when its claim is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ReclaimPolicy {
    /// It is destroyed.
    #[default]
    Delete,
    /// It stays until an administrator deletes it.
    Retain,
}

/// Protection of a volume's traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum VolumeProtection {
    /// The client decides.
    Optional,
    /// Every request is signed or sealed.
    Sign,
    /// Every request is sealed.
    Seal,
}

/// How a new image or configuration is rolled out: one instance at a time, the next when all are healthy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Upgrade {
    /// How.
    pub strategy: UpgradeStrategy,
    /// Seconds that an instance has to finish requests in flight before it ends.
    #[schemars(range(min = 1, max = 3600))]
    pub drain_timeout_seconds: u32,
    /// Seconds that a restarted instance must be healthy before the next one is restarted.
    #[schemars(range(min = 0, max = 3600))]
    pub min_ready_seconds: u32,
}

impl Default for Upgrade {
    fn default() -> Self {
        Self { strategy: UpgradeStrategy::RollingUpdate, drain_timeout_seconds: 60, min_ready_seconds: 10 }
    }
}

/// How a new image or configuration is rolled out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UpgradeStrategy {
    /// The operator restarts one instance after another.
    #[default]
    RollingUpdate,
    /// An instance is updated when its pod is deleted.
    OnDelete,
}

/// What is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct StorageClusterStatus {
    /// The generation of the spec that this status refers to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`, `Progressing`, `InstancesPlaced`, `CertificatesReady`, `Valid`, `Paused`, `TakeoverReady` and `TakeoverPaused`
    /// where
    /// instances can move, and while it is being deleted `Deletable`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The policy by which it is deleted, once its servers are being removed: what the spec says from then on comes too late.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<DeletionPolicy>,
    /// Summary for printer columns.
    pub summary: ClusterSummary,
    /// Image that is rolled out.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image: String,
    /// The instances, in order of their ordinal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub instances: Vec<InstanceStatus>,
    /// Every node that was considered and whether it fits, in order of their name; 200 at most, those that do not fit first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub nodes: Vec<NodeVerdict>,
}

/// The cluster in a few words.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterSummary {
    /// Such as "2/3".
    pub instances: String,
    /// Such as "TCP" or "RDMA, TCP".
    pub transport: String,
    /// Number of volumes.
    pub volumes: u32,
    /// Such as "1.2Ti free of 3.4Ti".
    pub capacity: String,
}

/// One instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct InstanceStatus {
    /// Its name, `<cluster>-<ordinal>`, for as long as the cluster exists.
    pub name: String,
    /// Phase of its life cycle.
    pub phase: InstancePhase,
    /// When the phase `Removing` was published. No new volumes are placed on the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub removing_since: Option<Time>,
    /// Node that it belongs to; empty until it has been placed. With a backend of kind Directory it never changes.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node: String,
    /// Address that clients mount, an IP address without port; empty until it is known. It outlives restarts.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub address: String,
    /// Port of SMB at that address.
    pub port: u16,
    /// Endpoint of the admin API, `ip:port`, mutual TLS; empty until it is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub admin_endpoint: String,
    /// Transports that it serves: "TCP", "RDMA".
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub transports: Vec<String>,
    /// Image that its pod runs.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image: String,
    /// Version that the server reports.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Sum of its pools, bytes.
    pub capacity_bytes: i64,
    /// Bytes in its pools that can still be provisioned.
    pub free_bytes: i64,
    /// Number of its volumes.
    pub volumes: u32,
    /// Number of SMB sessions.
    pub sessions: u32,
    /// How often it has been started on another node; raised by takeovers. Starts at 1.
    pub epoch: u64,
    /// Its pools, in order of the backends.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub pools: Vec<PoolStatus>,
    /// The last move to another node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub takeover: Option<TakeoverStatus>,
    /// Why it is not ready, and what to do; empty where it is.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Where an instance is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum InstancePhase {
    /// No node fits yet.
    #[default]
    Pending,
    /// Its pod is being started.
    Starting,
    /// It serves.
    Ready,
    /// It finishes what is in flight before it ends.
    Draining,
    /// It should serve, and does not.
    NotReady,
    /// It is being removed.
    Removing,
}

/// Whether a node can run an instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeVerdict {
    /// Name of the node.
    pub name: String,
    /// Whether it fits.
    pub fits: bool,
    /// Why not, in CamelCase; `Fits` where it does.
    pub reason: String,
    /// The reason in a sentence, with its fix.
    pub message: String,
}
