//! Checks every node: whether pods there can use volumes, and whether servers and RDMA can run.

use forebay_api::cluster::{RdmaRequirement, Transport};
use forebay_api::fabric::FabricTransport;
use forebay_api::node::{Fact, LinkLayer, RdmaDevice, RdmaPort, StorageNodeStatus};
use forebay_api::{DRIVER, StorageCluster, StorageNode};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;

use super::{Finding, Report, Severity};
use crate::snapshot::Snapshot;

/// Minimum MTU of a network device at which RoCE uses RDMA's largest MTU, 4096, in addition to its own headers.
const ROCE_MTU_MIN: u32 = 4200;

/// The combined RDMA requirement of the StorageClusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Wish {
    /// Nothing.
    None,
    /// RDMA is used if available.
    Used,
    /// RDMA is required.
    Required,
}

/// The RDMA requirements of its two possible users.
#[derive(Clone, Copy, Debug)]
struct Wishes {
    /// Servers: their placement, and the transports on which they listen.
    servers: Wish,
    /// Mounts: they use TCP unless the transport must be RDMA.
    mounts: Wish,
}

pub(crate) fn examine(snapshot: &Snapshot) -> Vec<Finding> {
    let nodes = match &snapshot.nodes {
        Ok(nodes) => nodes,
        Err(error) => {
            let mut report = Report::about("nodes");
            report.unread("Nodes", error);
            return report.findings;
        }
    };
    let mut report = Report::about("nodes");
    if let (Err(error), false) = (&snapshot.storage_nodes, matches!(snapshot.served, Ok(None))) {
        report.unread("StorageNodes", error);
    }
    if let Err(error) = &snapshot.csi_nodes {
        report.unread("CSINodes", error);
    }
    let wishes = wishes(snapshot);
    let mut findings = report.findings;
    findings.extend(nodes.iter().flat_map(|node| one(snapshot, node, wishes)));
    findings
}

fn wishes(snapshot: &Snapshot) -> Wishes {
    let most = |of_one: fn(RdmaRequirement, Transport) -> Wish| {
        let clusters = snapshot.clusters.as_deref().unwrap_or_default().iter();
        let wishes = clusters.map(|c| of_one(c.spec.placement.rdma.requirement, c.spec.network.transport));
        wishes.max().unwrap_or(Wish::Used)
    };
    Wishes {
        servers: most(|rdma, transport| match (rdma, transport) {
            (_, Transport::TCP) | (RdmaRequirement::None, _) => Wish::None,
            (RdmaRequirement::Required, _) | (_, Transport::RDMA) => Wish::Required,
            (RdmaRequirement::Preferred, Transport::Auto) => Wish::Used,
        }),
        mounts: most(|rdma, transport| match (rdma, transport) {
            (_, Transport::TCP) | (RdmaRequirement::None, _) => Wish::None,
            (_, Transport::RDMA) => Wish::Required,
            (_, Transport::Auto) => Wish::Used,
        }),
    }
}

fn one(snapshot: &Snapshot, node: &Node, wishes: Wishes) -> Vec<Finding> {
    let name = node.name_any();
    let mut report = Report::about(format!("node {name}"));
    kubelet(node, &mut report);
    let pods = snapshot.pods.as_deref().unwrap_or_default();
    let plugin = pods.iter().find(|p| is_node_plugin(p) && node_of(p) == Some(&name));
    if plugin.is_none() && snapshot.pods.is_ok() {
        // The DaemonSet's selector and tolerations determine where it runs: a control plane node is excluded.
        let evidence = match taints(node).as_slice() {
            [] => "no pod of daemonset/forebay-csi-node runs on it".to_owned(),
            taints => format!(
                "no pod of daemonset/forebay-csi-node runs on it; the node has taints: {}",
                taints.join(", ")
            ),
        };
        report.note(
            "the node plugin does not run here: no pod on it can use a volume",
            evidence,
            "if that is not intended: check csi.node.nodeSelector and csi.node.tolerations of the chart",
        );
        return report.findings;
    }
    registration(snapshot, &name, &mut report);
    if let Ok(storage_nodes) = &snapshot.storage_nodes {
        match storage_nodes.iter().find(|n| n.name_any() == name) {
            Some(storage_node) => {
                published(storage_node, wishes, snapshot.clusters.as_deref().unwrap_or_default(), &mut report)
            }
            None => report.error(
                "its agent has not reported",
                format!("there is no StorageNode {name}"),
                match plugin {
                    Some(pod) => format!(
                        "read the node plugin's log: kubectl -n {} logs {}",
                        pod.namespace().unwrap_or_default(),
                        pod.name_any()
                    ),
                    None => "read the node plugin's log".to_owned(),
                },
            ),
        }
    }
    report.findings
}

fn is_node_plugin(pod: &Pod) -> bool {
    pod.labels().get("app.kubernetes.io/component").is_some_and(|c| c == "csi-node")
}

fn node_of(pod: &Pod) -> Option<&String> {
    pod.spec.as_ref()?.node_name.as_ref()
}

/// Returns the taints that keep pods away.
fn taints(node: &Node) -> Vec<String> {
    let taints = node.spec.as_ref().and_then(|s| s.taints.as_deref()).unwrap_or_default();
    taints
        .iter()
        .filter(|t| t.effect != "PreferNoSchedule")
        .map(|t| format!("{}:{}", t.key, t.effect))
        .collect()
}

fn kubelet(node: &Node, report: &mut Report) {
    let conditions = node.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    match conditions.iter().find(|c| c.type_ == "Ready") {
        Some(ready) if ready.status == "True" => report.ok("its kubelet is ready"),
        ready => report.error(
            "its kubelet is not ready",
            ready.and_then(|c| c.message.clone()).unwrap_or_default(),
            "is the node up and connected? On the node: journalctl -u kubelet",
        ),
    }
}

fn registration(snapshot: &Snapshot, name: &str, report: &mut Report) {
    let Ok(csi_nodes) = &snapshot.csi_nodes else { return };
    let csi_node = csi_nodes.iter().find(|n| n.name_any() == name);
    if csi_node.is_some_and(|n| n.spec.drivers.iter().any(|d| d.name == DRIVER)) {
        report.ok("its kubelet has registered the driver");
    } else {
        report.error(
            "its kubelet has not registered the driver: no pod on it can use a volume",
            format!("CSINode {name} does not list {DRIVER}"),
            "read the node plugin's log; kubeletDir of the chart must be the kubelet's --root-dir",
        );
    }
}

fn published(node: &StorageNode, wishes: Wishes, clusters: &[StorageCluster], report: &mut Report) {
    let status = node.status.clone().unwrap_or_default();
    match status.conditions.iter().find(|c| c.type_ == "Ready") {
        Some(ready) if ready.status == "True" => report.ok("its agent reports"),
        Some(ready) => report.warning(
            format!("its agent could not read everything: {}", ready.reason),
            ready.message.clone(),
            "check the node's kernel log (dmesg)",
        ),
        None => report.error(
            "its agent has not reported",
            "its StorageNode has no status",
            "read the node plugin's log",
        ),
    }
    let own = env!("CARGO_PKG_VERSION");
    if !status.agent_version.is_empty() && status.agent_version != own {
        report.note(
            "its agent and this program have different versions",
            format!("{} there, {own} here", status.agent_version),
            "use the kubectl-forebay of the installed version",
        );
    }
    if node.spec.unschedulable {
        report.note("no new instances are put here", "spec.unschedulable of its StorageNode", "");
    }
    kernel(&status, wishes.mounts, report);
    fabrics(&node.name_any(), &status, clusters, report);
    rdma(&status, wishes.servers, report);
}

/// Reports what backends on fabrics require of the kernel: the host side on nodes that can run servers, the target on nodes
/// that hold namespaces.
fn fabrics(name: &str, status: &StorageNodeStatus, clusters: &[StorageCluster], report: &mut Report) {
    let kernel = &status.kernel;
    for cluster in clusters {
        let verdicts = cluster.status.iter().flat_map(|s| &s.nodes);
        let unfit = verdicts.into_iter().any(|v| v.name == name && !v.fits);
        let mut missing = Vec::new();
        for backend in &cluster.spec.backends {
            let paths = backend.nvmeof.iter().flat_map(|b| b.paths.iter());
            let mut rdma = paths.clone().any(|p| p.starts_with("rdma:"));
            let mut tcp = paths.clone().any(|p| p.starts_with("tcp:"));
            if let Some(target) = &backend.target {
                rdma |= target.transport == FabricTransport::RDMA;
                tcp |= target.transport == FabricTransport::TCP;
                if kernel.nvmet == Fact::No && target.nodes.iter().any(|n| n.name == name) {
                    report.error(
                        "it must export namespaces, but its kernel has no NVMe target",
                        format!(
                            "no module nvmet; backend {} of StorageCluster {}",
                            backend.name,
                            cluster.name_any()
                        ),
                        "install the kernel's extra modules on it, or remove it from target.nodes",
                    );
                }
            }
            if tcp && kernel.nvme_tcp == Fact::No && !unfit {
                missing.push("nvme_tcp");
            }
            if rdma && kernel.nvme_rdma == Fact::No && !unfit {
                missing.push("nvme_rdma");
            }
        }
        if !missing.is_empty() {
            missing.dedup();
            report.error(
                format!(
                    "servers of StorageCluster {} cannot reach their namespaces from here",
                    cluster.name_any()
                ),
                format!("no module {}", missing.join(", ")),
                "install the kernel's extra modules on it, or exclude it with spec.placement",
            );
        }
    }
}

fn kernel(status: &StorageNodeStatus, wish: Wish, report: &mut Report) {
    let kernel = &status.kernel;
    let release = format!("kernel {}", kernel.release);
    match kernel.cifs {
        Fact::Yes => report.ok("the kernel has the SMB client"),
        Fact::No => report.error(
            "the kernel has no SMB client: no pod on it can use a volume",
            format!("{release}: the module cifs is neither loaded nor available"),
            "install it (Ubuntu: linux-modules-extra-$(uname -r); RHEL: kernel-modules; Debian has it), then modprobe cifs",
        ),
        Fact::Unknown => report.note(
            "it is unknown whether the kernel has the SMB client",
            format!("{release}: /lib/modules could not be read"),
            "modprobe cifs on the node",
        ),
    }
    let has_port = status.rdma_devices.iter().flat_map(|d| &d.ports).any(|p| p.usable);
    match (kernel.cifs_smb_direct, has_port) {
        (Fact::Yes, _) => report.ok("its SMB client supports SMB Direct"),
        (_, false) => {}
        (fact, true) => {
            let severity = match (fact, wish) {
                (Fact::No, Wish::Required) => Severity::Error,
                (Fact::No, Wish::Used) => Severity::Warning,
                _ => Severity::Note,
            };
            let (summary, evidence) = if fact == Fact::No {
                (
                    "its SMB client does not support SMB Direct: mounts use TCP",
                    "cifs is built without CONFIG_CIFS_SMB_DIRECT",
                )
            } else {
                (
                    "it is unknown whether its SMB client supports SMB Direct",
                    "cifs is built in, and its configuration is not readable",
                )
            };
            let fix = "use a kernel with CONFIG_CIFS_SMB_DIRECT (Ubuntu and RHEL have it, Debian does not)";
            report.add(severity, summary, format!("{release}: {evidence}"), fix);
        }
    }
    match kernel.io_uring {
        Fact::Yes => report.ok("io_uring is available"),
        Fact::No => report.warning(
            "io_uring is unavailable: a server on this node is slower",
            format!("{release}: kernel.io_uring_disabled is not 0, or the kernel is built without it"),
            "sysctl -w kernel.io_uring_disabled=0, and permanently in /etc/sysctl.d",
        ),
        Fact::Unknown => {}
    }
}

fn rdma(status: &StorageNodeStatus, wish: Wish, report: &mut Report) {
    let ports: Vec<(&RdmaDevice, &RdmaPort)> =
        status.rdma_devices.iter().flat_map(|d| d.ports.iter().map(move |p| (d, p))).collect();
    if ports.is_empty() {
        if wish == Wish::Required {
            report.note(
                "it has no RDMA device: no instance and no RDMA mount on this node",
                "a StorageCluster requires RDMA; /sys/class/infiniband is empty",
                "if it has an RDMA NIC: load the driver (mlx5_ib, bnxt_re, irdma)",
            );
        }
        return;
    }
    let any_usable = ports.iter().any(|(_, port)| port.usable);
    for (device, port) in ports {
        let name = format!("RDMA port {}/{}", device.name, port.port);
        if !port.usable {
            let severity = match (wish, any_usable) {
                (Wish::None, _) => Severity::Note,
                (Wish::Required, false) => Severity::Error,
                // The second port of a card often has no cable.
                (_, true) => Severity::Note,
                (Wish::Used, false) => Severity::Warning,
            };
            report.add(
                severity,
                format!("{name} cannot be used"),
                format!("{}, {}: {}", port.state, port.physical_state, port.reason),
                "docs/guides/rdma.md; on the node: rdma link",
            );
            continue;
        }
        let netdev = port.netdev.as_deref().unwrap_or_default();
        report.ok(format!("{name} is usable: {} Gb/s on {netdev}", port.rate_gbps));
        let is_roce = port.link_layer == LinkLayer::Ethernet && !device.iwarp;
        if is_roce && port.mtu < ROCE_MTU_MIN {
            report.warning(
                format!("{name} has a small MTU: RDMA sends packets of less than 4096 bytes"),
                format!("{netdev} has MTU {}, but at least {ROCE_MTU_MIN} is needed", port.mtu),
                format!(
                    "ip link set {netdev} mtu 9000, on every host and switch of the fabric (docs/guides/rdma.md)"
                ),
            );
        }
    }
}
