//! `StorageNode`: what a node has for storage, as the node agent of the CSI driver finds it.

use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What an administrator may say of a node.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "storage.forebay.io",
    version = "v1alpha1",
    kind = "StorageNode",
    shortname = "fbn",
    category = "forebay",
    status = "StorageNodeStatus",
    derive = "PartialEq",
    doc = "What a node has for storage: RDMA devices, NVMe drives and facts of its kernel. The node agent of the CSI driver publishes one per node, under the node's name.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(
        name = "RDMA",
        type_ = "string",
        json_path = ".status.summary.rdma",
        description = "RDMA ports that are up"
    ),
    printcolumn(
        name = "NVMe",
        type_ = "integer",
        json_path = ".status.summary.nvme",
        description = "Local NVMe drives"
    ),
    printcolumn(
        name = "SMB-Direct",
        type_ = "string",
        json_path = ".status.kernel.cifsSmbDirect",
        description = "Whether this kernel's SMB client speaks SMB Direct"
    ),
    printcolumn(name = "Kernel", type_ = "string", json_path = ".status.kernel.release", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct StorageNodeSpec {
    /// No new instances are placed on this node. Running instances stay.
    #[serde(default)]
    pub unschedulable: bool,
}

/// What the node agent found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct StorageNodeStatus {
    /// The generation of the spec that this status refers to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`: the agent runs and could read everything. `RdmaReady`: at least one RDMA port is usable; its reason says
    /// why not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Summary for printer columns.
    pub summary: NodeSummary,
    /// RDMA devices of the host, in order of their name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rdma_devices: Vec<RdmaDevice>,
    /// Local NVMe drives (namespaces of PCIe controllers), in order of their name. Those of fabrics are not listed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nvme_drives: Vec<NvmeDrive>,
    /// Facts of the running kernel.
    pub kernel: KernelFacts,
    /// Version of the agent that wrote this.
    pub agent_version: String,
    /// When this status last changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_change_time: Option<Time>,
}

/// The node in a few words.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSummary {
    /// Such as "2/2 RoCE 200G", "0/1 RoCE (port down)" or "none".
    pub rdma: String,
    /// Number of local NVMe drives.
    pub nvme: u32,
}

/// One RDMA device (`/sys/class/infiniband/<name>`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaDevice {
    /// Name, such as `mlx5_0`, `bnxt_re0`, `irdma0`, `rxe0`, `siw0`.
    pub name: String,
    /// Kernel driver, such as `mlx5_core`, `bnxt_re`, `irdma`, `rdma_rxe`, `siw`; empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub driver: String,
    /// Board id or model as reported by the device; empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub board: String,
    /// Firmware version; empty where there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub firmware: String,
    /// Whether the device is emulated in software (rxe, siw).
    pub software: bool,
    /// Whether it is an iWARP device: SMB Direct is then on port 5445 instead of 445.
    pub iwarp: bool,
    /// NUMA node; absent if the kernel reports none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// Its ports, from 1.
    pub ports: Vec<RdmaPort>,
}

/// One port of an RDMA device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaPort {
    /// Number, from 1.
    pub port: u32,
    /// Ethernet (RoCE, iWARP) or InfiniBand.
    pub link_layer: LinkLayer,
    /// Logical state: `ACTIVE`, `DOWN`, `INIT`, `ARMED`, as the kernel names it.
    pub state: String,
    /// Physical state: `LinkUp`, `Disabled`, `Polling`, as the kernel names it.
    pub physical_state: String,
    /// Rate in Gb/s, rounded down.
    pub rate_gbps: u32,
    /// Network device that carries the port's addresses; absent where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub netdev: Option<String>,
    /// MTU of the network device, bytes; 0 where there is none.
    pub mtu: u32,
    /// Addresses of the network device, without link-local ones.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpAddr>,
    /// Whether SMB Direct can run here now: active, with a network device that is up and has an address.
    pub usable: bool,
    /// Why it cannot be used; empty where it can.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// Link layer of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LinkLayer {
    /// RoCE or iWARP.
    Ethernet,
    /// InfiniBand.
    InfiniBand,
    /// The kernel does not say.
    #[default]
    Unknown,
}

/// One local NVMe drive.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NvmeDrive {
    /// Block device, such as `nvme0n1`.
    pub name: String,
    /// Model as reported by the controller.
    pub model: String,
    /// Serial number.
    pub serial: String,
    /// Globally unique name (`uuid.…`, `eui.…`, `nguid`), for `/dev/disk/by-id`; empty where there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub wwid: String,
    /// Size in bytes.
    pub size_bytes: i64,
    /// NUMA node; absent if the kernel reports none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// Whether something uses it: partitions, a mount, a holder such as LVM or RAID.
    pub in_use: bool,
}

/// Facts of a kernel that decide what Forebay can do there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KernelFacts {
    /// As `uname -r`.
    pub release: String,
    /// Whether the SMB client (cifs) is loaded, built in or can be loaded.
    pub cifs: Fact,
    /// Whether that client speaks SMB Direct.
    pub cifs_smb_direct: Fact,
    /// NVMe over TCP, the host's side.
    pub nvme_tcp: Fact,
    /// NVMe over RDMA, the host's side.
    pub nvme_rdma: Fact,
    /// The kernel's NVMe target, for the bundled target.
    pub nvmet: Fact,
    /// Whether programs may use io_uring (`kernel.io_uring_disabled`).
    pub io_uring: Fact,
    /// Architecture, as `uname -m`.
    pub architecture: String,
    /// Operating system, `PRETTY_NAME` of os-release.
    pub operating_system: String,
}

/// What is known of a feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Fact {
    /// It is there.
    Yes,
    /// It is not there.
    No,
    /// It cannot be determined from here.
    #[default]
    Unknown,
}
