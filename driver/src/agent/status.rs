//! Converts the findings about a node to the status of its StorageNode.

use std::collections::BTreeMap;

use forebay_api::node::{
    Fact, KernelFacts, LinkLayer, NodeSummary, NvmeDrive, RdmaDevice, RdmaPort, StorageNodeStatus,
};
use forebay_inventory::{self as inventory, Addresses, Inventory, Presence, Transport, Unusable};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::limits::STATUS_ENTRIES_MAX;

/// Condition type: the agent runs and can read everything.
const READY: &str = "Ready";

/// Condition type: at least one RDMA port is usable.
const RDMA_READY: &str = "RdmaReady";

/// The findings of one read of the node.
pub(crate) struct Findings {
    pub(crate) inventory: Inventory,
    pub(crate) addresses: Addresses,
    /// Output of `uname -m`, used if no file specifies the architecture.
    pub(crate) architecture: String,
}

impl Findings {
    /// Whether SMB Direct can run on at least one port.
    pub(crate) fn has_usable_port(&self) -> bool {
        let inventory = &self.inventory;
        let assess = |d, p| inventory::assess(d, p, &inventory.netdevs, &self.addresses);
        inventory.rdma.iter().any(|d| d.ports.iter().any(|p| assess(d, p).unusable.is_none()))
    }
}

/// The status for these findings. Timestamps of unchanged values are kept from `previous`, so equal findings yield an equal
/// status.
pub(crate) fn status(
    findings: &Findings,
    previous: &StorageNodeStatus,
    generation: Option<i64>,
    now: &Time,
) -> StorageNodeStatus {
    let inventory = &findings.inventory;
    let devices: Vec<Device<'_>> =
        inventory.rdma.iter().take(STATUS_ENTRIES_MAX).map(|d| device(d, findings)).collect();
    let nvme_drives: Vec<NvmeDrive> = inventory.nvme.iter().take(STATUS_ENTRIES_MAX).map(drive).collect();
    let conditions = [ready(inventory), rdma_ready(&devices)];
    let mut status = StorageNodeStatus {
        observed_generation: generation,
        conditions: Vec::new(),
        summary: NodeSummary {
            rdma: rdma_summary(&devices),
            nvme: u32::try_from(inventory.nvme.len()).unwrap_or(u32::MAX),
        },
        rdma_devices: devices.into_iter().map(|d| d.published).collect(),
        nvme_drives,
        kernel: kernel(&inventory.kernel, &findings.architecture),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        last_change_time: previous.last_change_time.clone(),
    };
    status.conditions =
        conditions.into_iter().map(|c| c.finish(&previous.conditions, generation, now)).collect();
    if status != *previous || status.last_change_time.is_none() {
        status.last_change_time = Some(now.clone());
    }
    status
}

/// Why a read of the node yielded nothing to publish.
pub(crate) enum Unknown {
    /// The hardware does not respond.
    Hangs { seconds: u64 },
    /// The kernel does not return the interfaces' addresses, with the reason.
    Addresses(String),
}

/// The status of a node with unknown state: the last known values, marked as possibly wrong.
pub(crate) fn unknown(
    why: &Unknown,
    previous: &StorageNodeStatus,
    generation: Option<i64>,
    now: &Time,
) -> StorageNodeStatus {
    let (reason, message) = match why {
        Unknown::Hangs { seconds } => (
            "ReadHangs",
            format!(
                "reading sysfs did not complete within {seconds} s: a driver hangs; the rest of this status is what was known \
                 before; see the kernel's log"
            ),
        ),
        Unknown::Addresses(error) => (
            "AddressesUnknown",
            format!(
                "the addresses of the network interfaces cannot be read: {error}; the rest of this status is what was \
                 known before"
            ),
        ),
    };
    let finding = Finding { kind: READY, holds: false, reason, message };
    let mut status = previous.clone();
    status.observed_generation = generation;
    status.agent_version = env!("CARGO_PKG_VERSION").to_owned();
    let condition = finding.finish(&previous.conditions, generation, now);
    match status.conditions.iter_mut().find(|c| c.type_ == READY) {
        Some(ready) => *ready = condition,
        None => status.conditions.push(condition),
    }
    if status != *previous {
        status.last_change_time = Some(now.clone());
    }
    status
}

/// A condition without its times.
struct Finding {
    kind: &'static str,
    holds: bool,
    reason: &'static str,
    message: String,
}

impl Finding {
    fn finish(self, previous: &[Condition], generation: Option<i64>, now: &Time) -> Condition {
        let status = if self.holds { "True" } else { "False" };
        let before = previous.iter().find(|c| c.type_ == self.kind && c.status == status);
        Condition {
            last_transition_time: before.map_or_else(|| now.clone(), |c| c.last_transition_time.clone()),
            message: self.message,
            observed_generation: generation,
            reason: self.reason.to_owned(),
            status: status.to_owned(),
            type_: self.kind.to_owned(),
        }
    }
}

/// A device as published, with the usability of each port.
struct Device<'a> {
    found: &'a inventory::RdmaDevice,
    published: RdmaDevice,
    unusable: Vec<Option<Unusable>>,
}

fn device<'a>(found: &'a inventory::RdmaDevice, findings: &Findings) -> Device<'a> {
    let (ports, unusable) =
        found.ports.iter().take(STATUS_ENTRIES_MAX).map(|p| port(found, p, findings)).unzip();
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    Device {
        found,
        published: RdmaDevice {
            name: found.name.clone(),
            driver: text(&found.driver),
            board: text(&found.board),
            firmware: text(&found.firmware),
            software: found.software,
            iwarp: found.transport == Transport::Iwarp,
            numa_node: found.numa_node,
            ports,
        },
        unusable,
    }
}

fn port(
    device: &inventory::RdmaDevice,
    found: &inventory::RdmaPort,
    findings: &Findings,
) -> (RdmaPort, Option<Unusable>) {
    let assessment = inventory::assess(device, found, &findings.inventory.netdevs, &findings.addresses);
    let published = RdmaPort {
        port: found.number,
        link_layer: match found.link_layer {
            inventory::LinkLayer::Ethernet => LinkLayer::Ethernet,
            inventory::LinkLayer::InfiniBand => LinkLayer::InfiniBand,
            inventory::LinkLayer::Unknown => LinkLayer::Unknown,
        },
        state: found.state.clone(),
        physical_state: found.physical_state.clone(),
        rate_gbps: found.rate_mbps / 1000,
        netdev: assessment.netdev,
        mtu: assessment.mtu,
        addresses: assessment.addresses.into_iter().take(STATUS_ENTRIES_MAX).collect(),
        usable: assessment.unusable.is_none(),
        reason: assessment.unusable.as_ref().map(Unusable::to_string).unwrap_or_default(),
    };
    (published, assessment.unusable)
}

fn drive(found: &inventory::NvmeDrive) -> NvmeDrive {
    NvmeDrive {
        name: found.name.clone(),
        model: found.model.clone(),
        serial: found.serial.clone(),
        wwid: found.wwid.clone().unwrap_or_default(),
        size_bytes: i64::try_from(found.size_bytes).unwrap_or(i64::MAX),
        numa_node: found.numa_node,
        in_use: found.in_use,
    }
}

fn kernel(found: &inventory::Kernel, architecture: &str) -> KernelFacts {
    let fact = |presence| match presence {
        Presence::Yes => Fact::Yes,
        Presence::No => Fact::No,
        Presence::Unknown => Fact::Unknown,
    };
    KernelFacts {
        release: found.release.clone().unwrap_or_default(),
        cifs: fact(found.cifs),
        cifs_smb_direct: fact(found.cifs_smb_direct),
        nvme_tcp: fact(found.nvme_tcp),
        nvme_rdma: fact(found.nvme_rdma),
        nvmet: fact(found.nvmet),
        io_uring: fact(found.io_uring),
        architecture: found.architecture.clone().unwrap_or_else(|| architecture.to_owned()),
        operating_system: found.operating_system.clone().unwrap_or_default(),
    }
}

fn ready(inventory: &Inventory) -> Finding {
    let holds = inventory.oddities.is_empty();
    let odd: Vec<String> =
        inventory.oddities.iter().take(4).map(|o| format!("{}: {}", o.path, o.what)).collect();
    Finding {
        kind: READY,
        holds,
        reason: if holds { "Reported" } else { "PartlyUnreadable" },
        message: match (holds, inventory.oddities.len() - odd.len()) {
            (true, _) => "the agent runs and can read everything".to_owned(),
            (false, 0) => odd.join("; "),
            (false, more) => format!("{}; and {more} more", odd.join("; ")),
        },
    }
}

fn rdma_ready(devices: &[Device<'_>]) -> Finding {
    let ports: Vec<(String, &Option<Unusable>)> = devices
        .iter()
        .flat_map(|d| {
            let name = move |port: &RdmaPort| format!("{}/{}", d.published.name, port.port);
            d.published.ports.iter().map(name).zip(&d.unusable)
        })
        .collect();
    let usable: Vec<&str> =
        ports.iter().filter(|(_, why)| why.is_none()).map(|(name, _)| name.as_str()).collect();
    let why: Vec<String> =
        ports.iter().filter_map(|(name, why)| Some(format!("{name}: {}", why.as_ref()?))).collect();
    let (reason, message) = if !usable.is_empty() {
        ("PortUsable", format!("{} of {} ports are usable: {}", usable.len(), ports.len(), usable.join(", ")))
    } else if let Some(first) = ports.iter().find_map(|(_, why)| why.as_ref()) {
        (first.reason(), why.join("; "))
    } else {
        ("NoRdmaDevice", "the kernel has no RDMA device: is the NIC's RDMA driver loaded?".to_owned())
    };
    Finding { kind: RDMA_READY, holds: !usable.is_empty(), reason, message }
}

/// Returns for example "2/2 RoCE 200G", "0/1 RoCE (port down)" or "none".
fn rdma_summary(devices: &[Device<'_>]) -> String {
    #[derive(Default)]
    struct Group {
        usable: u32,
        ports: u32,
        rate_gbps: u32,
        why: Option<&'static str>,
    }
    let mut groups: BTreeMap<&str, Group> = BTreeMap::new();
    for device in devices {
        for (port, unusable) in device.published.ports.iter().zip(&device.unusable) {
            let group = groups.entry(kind(device.found, port)).or_default();
            group.ports += 1;
            match unusable {
                None => {
                    group.usable += 1;
                    group.rate_gbps = group.rate_gbps.max(port.rate_gbps);
                }
                Some(why) => group.why = group.why.or(Some(in_two_words(why))),
            }
        }
    }
    if groups.is_empty() {
        return "none".to_owned();
    }
    let shown = groups.into_iter().map(|(kind, group)| {
        let Group { usable, ports, rate_gbps, why } = group;
        match why.filter(|_| usable == 0) {
            Some(why) => format!("{usable}/{ports} {kind} ({why})"),
            None => format!("{usable}/{ports} {kind} {rate_gbps}G"),
        }
    });
    shown.collect::<Vec<_>>().join(", ")
}

fn kind(device: &inventory::RdmaDevice, port: &RdmaPort) -> &'static str {
    match (device.transport, port.link_layer, device.software) {
        (Transport::Iwarp, _, false) => "iWARP",
        (Transport::Iwarp, _, true) => "soft-iWARP",
        (Transport::Other, ..) => "other",
        (Transport::InfiniBand, LinkLayer::Ethernet, false) => "RoCE",
        (Transport::InfiniBand, LinkLayer::Ethernet, true) => "soft-RoCE",
        (Transport::InfiniBand, ..) => "InfiniBand",
    }
}

fn in_two_words(why: &Unusable) -> &'static str {
    match why {
        Unusable::Transport => "not supported",
        Unusable::NotActive { .. } => "port down",
        Unusable::NoNetdev => "no netdev",
        Unusable::NetdevElsewhere(_) => "netdev elsewhere",
        Unusable::NetdevDown { .. } => "netdev down",
        Unusable::NoAddress(_) => "no address",
    }
}

#[cfg(test)]
mod tests {
    use forebay_inventory::{Kernel, Netdev, Oddity};

    use super::*;

    fn time(second: i64) -> Time {
        Time(k8s_openapi::jiff::Timestamp::from_second(second).expect("a time"))
    }

    fn found(
        name: &str,
        transport: Transport,
        rate_mbps: u32,
        state: &str,
        netdev: &str,
    ) -> inventory::RdmaDevice {
        inventory::RdmaDevice {
            name: name.into(),
            driver: Some("mlx5_core".into()),
            board: None,
            firmware: Some("28.39.2048".into()),
            transport,
            software: false,
            numa_node: Some(1),
            ports: vec![inventory::RdmaPort {
                number: 1,
                link_layer: inventory::LinkLayer::Ethernet,
                state: state.into(),
                physical_state: if state == "ACTIVE" { "LinkUp" } else { "Disabled" }.into(),
                rate_mbps,
                netdevs: vec![netdev.into()],
            }],
        }
    }

    fn netdev(name: &str) -> Netdev {
        Netdev { name: name.into(), operstate: "up".into(), enabled: true, mtu: 9000, ..Netdev::default() }
    }

    fn findings(rdma: Vec<inventory::RdmaDevice>) -> Findings {
        Findings {
            inventory: Inventory {
                rdma,
                netdevs: vec![netdev("e0"), netdev("e1")],
                nvme: vec![inventory::NvmeDrive {
                    name: "nvme0n1".into(),
                    size_bytes: u64::MAX,
                    ..Default::default()
                }],
                kernel: Kernel { release: Some("7.2".into()), cifs: Presence::Yes, ..Kernel::default() },
                oddities: Vec::new(),
            },
            addresses: [
                ("e0".to_owned(), vec!["10.0.0.1".parse().expect("an address")]),
                ("e1".to_owned(), vec!["fe80::1".parse().expect("an address")]),
            ]
            .into(),
            architecture: "x86_64".into(),
        }
    }

    fn first(findings: &Findings) -> StorageNodeStatus {
        status(findings, &StorageNodeStatus::default(), Some(1), &time(100))
    }

    fn condition<'a>(status: &'a StorageNodeStatus, kind: &str) -> &'a Condition {
        status.conditions.iter().find(|c| c.type_ == kind).expect("there")
    }

    #[test]
    fn status_contains_the_discovered_hardware_and_kernel() {
        let found = findings(vec![
            found("mlx5_0", Transport::InfiniBand, 200_000, "ACTIVE", "e0"),
            found("mlx5_1", Transport::InfiniBand, 40_000, "DOWN", "e1"),
        ]);
        let status = first(&found);
        assert_eq!(status.summary, NodeSummary { rdma: "1/2 RoCE 200G".into(), nvme: 1 });
        let port = &status.rdma_devices[0].ports[0];
        assert_eq!((port.usable, port.rate_gbps, port.mtu, port.reason.as_str()), (true, 200, 9000, ""));
        assert_eq!(port.addresses, ["10.0.0.1".parse::<std::net::IpAddr>().expect("an address")]);
        let port = &status.rdma_devices[1].ports[0];
        assert!(!port.usable && port.reason.contains("DOWN (Disabled)"), "{}", port.reason);
        assert_eq!(status.nvme_drives[0].size_bytes, i64::MAX);
        assert_eq!((status.kernel.release.as_str(), status.kernel.architecture.as_str()), ("7.2", "x86_64"));
        assert_eq!((status.kernel.cifs, status.kernel.cifs_smb_direct), (Fact::Yes, Fact::Unknown));
        assert_eq!(condition(&status, "Ready").status, "True");
        let ready = condition(&status, "RdmaReady");
        assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("True", "PortUsable"));
        assert_eq!(ready.message, "1 of 2 ports are usable: mlx5_0/1");
        assert_eq!((ready.observed_generation, &ready.last_transition_time), (Some(1), &time(100)));
    }

    #[test]
    fn rdma_summary_groups_devices_by_kind_and_gives_the_cause() {
        let roce = |state: &str, netdev: &str| found("a", Transport::InfiniBand, 100_000, state, netdev);
        let mut soft = roce("ACTIVE", "e0");
        soft.software = true;
        soft.ports[0].rate_mbps = 2_500;
        let mut infiniband = roce("ACTIVE", "e0");
        infiniband.ports[0].link_layer = inventory::LinkLayer::InfiniBand;
        let mut bare = roce("ACTIVE", "e0");
        bare.ports[0].netdevs.clear();
        for (devices, summary, reason) in [
            (vec![], "none", "NoRdmaDevice"),
            (vec![roce("ACTIVE", "e0"), roce("ACTIVE", "e0")], "2/2 RoCE 100G", "PortUsable"),
            (vec![roce("DOWN", "e0")], "0/1 RoCE (port down)", "PortNotActive"),
            (vec![roce("ACTIVE", "e1")], "0/1 RoCE (no address)", "NoAddress"),
            (vec![roce("ACTIVE", "e9")], "0/1 RoCE (netdev elsewhere)", "NetworkDeviceElsewhere"),
            (vec![bare], "0/1 RoCE (no netdev)", "NoNetworkDevice"),
            (vec![soft], "1/1 soft-RoCE 2G", "PortUsable"),
            (
                vec![infiniband, roce("ACTIVE", "e0"), found("i", Transport::Iwarp, 10_000, "DOWN", "e0")],
                "1/1 InfiniBand 100G, 1/1 RoCE 100G, 0/1 iWARP (port down)",
                "PortUsable",
            ),
            (
                vec![found("efa", Transport::Other, 0, "ACTIVE", "e0")],
                "0/1 other (not supported)",
                "UnsupportedTransport",
            ),
        ] {
            let status = first(&findings(devices));
            assert_eq!(status.summary.rdma, summary);
            assert_eq!(condition(&status, "RdmaReady").reason, reason, "{summary}");
        }
    }

    #[test]
    fn status_is_stable_while_the_node_is_unchanged() {
        let up = findings(vec![found("mlx5_0", Transport::InfiniBand, 200_000, "ACTIVE", "e0")]);
        let before = first(&up);
        assert_eq!(status(&up, &before, Some(1), &time(200)), before);
        // The same applies after a round trip through the API server.
        let text = serde_json::to_string(&before).expect("serializable");
        let read: StorageNodeStatus = serde_json::from_str(&text).expect("readable");
        assert_eq!(status(&up, &read, Some(1), &time(200)), before);

        // A NIC that goes down updates the node's condition.
        let down = findings(vec![found("mlx5_0", Transport::InfiniBand, 40_000, "DOWN", "e0")]);
        let after = status(&down, &before, Some(1), &time(300));
        assert_eq!(after.last_change_time, Some(time(300)));
        let ready = condition(&after, "RdmaReady");
        assert_eq!((ready.status.as_str(), &ready.last_transition_time), ("False", &time(300)));
        assert_eq!(condition(&after, "Ready").last_transition_time, time(100));

        // Another reason with the same status is not a transition.
        let gone = status(&findings(vec![]), &after, Some(1), &time(400));
        let ready = condition(&gone, "RdmaReady");
        assert_eq!((ready.reason.as_str(), &ready.last_transition_time), ("NoRdmaDevice", &time(300)));
    }

    #[test]
    fn unreadable_files_are_reported_in_the_ready_condition() {
        let mut odd = findings(vec![]);
        odd.inventory.oddities =
            (0..6).map(|n| Oddity { path: format!("sys/{n}"), what: "permission denied".into() }).collect();
        let status = first(&odd);
        let ready = condition(&status, "Ready");
        assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("False", "PartlyUnreadable"));
        assert!(
            ready.message.starts_with("sys/0: permission denied; ")
                && ready.message.ends_with("; and 2 more")
        );
    }

    #[test]
    fn status_keeps_the_last_known_devices_while_a_read_hangs() {
        let before = first(&findings(vec![found("mlx5_0", Transport::InfiniBand, 200_000, "ACTIVE", "e0")]));
        let hangs = Unknown::Hangs { seconds: 30 };
        let after = unknown(&hangs, &before, Some(2), &time(200));
        assert_eq!(after.rdma_devices, before.rdma_devices);
        assert_eq!(condition(&after, "Ready").reason, "ReadHangs");
        assert_eq!(after.last_change_time, Some(time(200)));
        assert_eq!(unknown(&hangs, &after, Some(2), &time(300)), after);
        assert_eq!(unknown(&hangs, &StorageNodeStatus::default(), None, &time(1)).conditions.len(), 1);
    }

    #[test]
    fn unreadable_addresses_do_not_make_ports_unusable() {
        let up = findings(vec![found("mlx5_0", Transport::InfiniBand, 200_000, "ACTIVE", "e0")]);
        let before = first(&up);
        let why = Unknown::Addresses("Too many open files (os error 24)".into());
        let after = unknown(&why, &before, Some(1), &time(200));
        assert_eq!((&after.rdma_devices, &after.summary), (&before.rdma_devices, &before.summary));
        assert_eq!(condition(&after, "RdmaReady"), condition(&before, "RdmaReady"));
        let ready = condition(&after, "Ready");
        assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("False", "AddressesUnknown"));
        assert!(ready.message.contains("Too many open files"), "{}", ready.message);
        assert_eq!(condition(&status(&up, &after, Some(1), &time(300)), "Ready").status, "True");
    }
}
