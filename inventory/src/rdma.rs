//! RDMA devices and their ports: `/sys/class/infiniband` (Documentation/ABI/stable/sysfs-class-infiniband of the kernel).

use crate::limits::GIDS_MAX;
use crate::net::{self, Found};
use crate::tree::{Identity, Tree};

/// One RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaDevice {
    /// Its name.
    pub name: String,
    /// The kernel's driver; `None` if unknown.
    pub driver: Option<String>,
    /// Board id, or else the model; `None` if the device reports neither.
    pub board: Option<String>,
    /// Firmware version; `None` if there is none.
    pub firmware: Option<String>,
    /// Its RDMA transport.
    pub transport: Transport,
    /// Whether it is emulated on an ordinary network device (rxe, siw).
    pub software: bool,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// Its ports, from 1.
    pub ports: Vec<RdmaPort>,
}

/// RDMA transport of a device, by its node type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// InfiniBand, or RoCE if a port's link layer is Ethernet.
    InfiniBand,
    /// RDMA over TCP.
    Iwarp,
    /// Another one, without the RDMA connection manager, such as EFA or usNIC.
    Other,
}

/// One port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaPort {
    /// Number, from 1.
    pub number: u32,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Logical state, such as `ACTIVE`; empty if unknown.
    pub state: String,
    /// Physical state, such as `LinkUp`; empty if unknown.
    pub physical_state: String,
    /// Rate in Mb/s; 0 if unknown.
    pub rate_mbps: u32,
    /// Network devices with the port's addresses: first the port's own, then those stacked on it (bonds, VLANs).
    pub netdevs: Vec<String>,
}

/// Link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// RoCE or iWARP.
    Ethernet,
    /// InfiniBand.
    InfiniBand,
    /// The kernel does not report it.
    Unknown,
}

/// Drivers of network functions with the drivers of their RDMA devices, because the kernel names the function's driver.
#[rustfmt::skip]
const RDMA_DRIVERS: &[(&str, &str)] = &[
    ("bnxt_en", "bnxt_re"),
    ("cxgb4", "iw_cxgb4"),
    ("hns3", "hns_roce_hw_v2"),
    ("i40e", "irdma"),
    ("ice", "irdma"),
    ("idpf", "irdma"),
    ("ionic", "ionic_rdma"),
    ("mana", "mana_ib"),
    ("qede", "qedr"),
];

pub(crate) fn read(tree: &Tree<'_>, netdevs: &[Found]) -> Vec<RdmaDevice> {
    tree.names("sys/class/infiniband").into_iter().filter_map(|name| one(tree, name, netdevs)).collect()
}

fn one(tree: &Tree<'_>, name: String, netdevs: &[Found]) -> Option<RdmaDevice> {
    let at = format!("sys/class/infiniband/{name}");
    let node_type = tree.attribute(&format!("{at}/node_type"))?;
    let description = tree.attribute(&format!("{at}/node_desc")).unwrap_or_default();
    // Only rxe has this attribute, which names the underlying network device.
    let parent = tree.attribute(&format!("{at}/parent")).filter(|p| net::is_name(p));
    let software = if parent.is_some() || description == "rxe" {
        Some("rdma_rxe")
    } else if description.starts_with("Software iWARP") {
        Some("siw")
    } else {
        None
    };
    let device = tree.identity(&format!("{at}/device"));
    let driver = match software {
        // Some kernels place these devices below the network device's bus device, which has a different driver.
        Some(driver) => Some(driver.to_owned()),
        None => tree.link_name(&format!("{at}/device/driver")).map(|d| rdma_driver(&d)),
    };
    let board = tree.attribute(&format!("{at}/board_id"));
    let board = board.or_else(|| tree.attribute(&format!("{at}/hca_type")));
    let numa_node = tree.natural(&format!("{at}/device/numa_node"));
    // The attribute is 0.0.0 if a software device has no firmware.
    let firmware =
        tree.attribute(&format!("{at}/fw_ver")).filter(|v| v.chars().any(|c| matches!(c, '1'..='9')));
    let node = Node {
        at: &at,
        device,
        parent: parent.as_deref(),
        guid: tree.attribute(&format!("{at}/node_guid")).and_then(|text| guid(&text)),
    };
    let ports = tree.names(&format!("{at}/ports")).into_iter();
    let ports =
        ports.filter_map(|number| number.parse().ok()).map(|n| port(tree, &node, n, netdevs)).collect();
    Some(RdmaDevice {
        driver,
        board: board.filter(|b| b.chars().any(|c| c.is_ascii_alphanumeric())),
        firmware,
        transport: transport(&node_type),
        software: software.is_some() || device.is_none(),
        numa_node,
        ports,
        name,
    })
}

/// Parses a node type, such as `1: CA` or `4: RNIC`.
fn transport(node_type: &str) -> Transport {
    match value(node_type) {
        "CA" => Transport::InfiniBand,
        "RNIC" => Transport::Iwarp,
        _ => Transport::Other,
    }
}

fn rdma_driver(function: &str) -> String {
    // The driver of a subfunction is called `mlx5_core.sf`.
    let function = function.split('.').next().unwrap_or_default();
    let driver = RDMA_DRIVERS.iter().find(|(f, _)| *f == function).map_or(function, |(_, rdma)| rdma);
    driver.to_owned()
}

/// The properties by which a device is matched with network devices.
struct Node<'a> {
    at: &'a str,
    device: Option<Identity>,
    parent: Option<&'a str>,
    guid: Option<[u8; 8]>,
}

fn port(tree: &Tree<'_>, node: &Node<'_>, number: u32, netdevs: &[Found]) -> RdmaPort {
    let at = format!("{}/ports/{number}", node.at);
    let text = |name: &str| tree.attribute(&format!("{at}/{name}")).unwrap_or_default();
    let link_layer = match text("link_layer").as_str() {
        "Ethernet" => LinkLayer::Ethernet,
        "InfiniBand" => LinkLayer::InfiniBand,
        _ => LinkLayer::Unknown,
    };
    let rate = text("rate");
    let rate_mbps = rate_mbps(&rate);
    if rate_mbps.is_none() && !rate.is_empty() {
        tree.odd(&format!("{at}/rate"), format!("{rate:?} is not a rate"));
    }
    RdmaPort {
        number,
        link_layer,
        state: value(&text("state")).to_owned(),
        physical_state: value(&text("phys_state")).to_owned(),
        rate_mbps: rate_mbps.unwrap_or(0),
        netdevs: port_netdevs(tree, node, &at, number, link_layer, netdevs),
    }
}

/// Returns the part after the number, as in `4: ACTIVE`.
fn value(text: &str) -> &str {
    text.split_once(':').map_or(text, |(_, value)| value).trim()
}

/// Parses a rate, such as `2.5 Gb/sec (1X)` or `100 Gb/sec (4X EDR)`.
fn rate_mbps(text: &str) -> Option<u32> {
    let (rate, unit) = text.split_once(' ')?;
    if !unit.starts_with("Gb/sec") {
        return None;
    }
    let (whole, tenth) = rate.split_once('.').unwrap_or((rate, "0"));
    let tenth: u32 = tenth.parse().ok().filter(|t| *t < 10)?;
    whole.parse::<u32>().ok()?.checked_mul(1000)?.checked_add(tenth * 100)
}

/// Returns the network devices of a port. The kernel reports those of RoCE GIDs; the others must be derived.
fn port_netdevs(
    tree: &Tree<'_>,
    node: &Node<'_>,
    at: &str,
    number: u32,
    link_layer: LinkLayer,
    netdevs: &[Found],
) -> Vec<String> {
    let mut names = Vec::new();
    let gids = format!("{at}/gid_attrs/ndevs");
    for index in tree.names(&gids).iter().take(GIDS_MAX) {
        if let Some(name) = tree.attribute(&format!("{gids}/{index}")) {
            add(&mut names, &name);
        }
    }
    if let Some(parent) = node.parent {
        add(&mut names, parent);
    }
    let infiniband = link_layer == LinkLayer::InfiniBand;
    let is_own = |found: &Found| {
        node.device.is_some()
            && found.device == node.device
            && found.port + 1 == number
            && found.netdev.infiniband == infiniband
    };
    for secondary in [false, true] {
        for found in netdevs.iter().filter(|f| is_own(f) && f.secondary == secondary) {
            // A representor never carries the port's own addresses.
            if !secondary || infiniband {
                add(&mut names, &found.netdev.name);
            }
        }
    }
    if names.is_empty() {
        let mut of_guid =
            netdevs.iter().filter(|f| node.guid.is_some_and(|g| is_guid_of(g, &f.netdev.hardware_address)));
        // A bond and its members share an address.
        if let (Some(only), None) = (of_guid.next(), of_guid.next()) {
            add(&mut names, &only.netdev.name);
        }
    }
    names.sort_by_key(|name| !netdevs.iter().any(|f| f.netdev.name == *name && is_own(f)));
    names
}

fn add(names: &mut Vec<String>, name: &str) {
    if net::is_name(name) && !names.iter().any(|n| n == name) {
        names.push(name.to_owned());
    }
}

/// Parses a GUID, such as `0200:c0ff:fe00:0001`.
fn guid(text: &str) -> Option<[u8; 8]> {
    let mut bytes = [0; 8];
    let mut parts = text.split(':');
    for pair in bytes.chunks_exact_mut(2) {
        pair.copy_from_slice(&u16::from_str_radix(parts.next()?, 16).ok()?.to_be_bytes());
    }
    (parts.next().is_none() && bytes != [0; 8]).then_some(bytes)
}

/// Whether a software device's GUID is derived from this hardware address: as a modified EUI-64 (RFC 4291 appendix A) or,
/// with siw before Linux 6.5, as the address and two zero bytes.
fn is_guid_of(guid: [u8; 8], hardware_address: &str) -> bool {
    let mut mac = [0; 6];
    let mut parts = hardware_address.split(':');
    for byte in &mut mac {
        match parts.next().and_then(|p| u8::from_str_radix(p, 16).ok()) {
            Some(value) => *byte = value,
            None => return false,
        }
    }
    let [a, b, c, d, e, f] = mac;
    parts.next().is_none()
        && mac != [0; 6]
        && (guid == [a ^ 2, b, c, 0xff, 0xfe, d, e, f] || guid == [a, b, c, d, e, f, 0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_rates_are_parsed_from_sysfs_text() {
        for (text, mbps) in [
            ("2.5 Gb/sec (1X)", Some(2_500)),
            ("10 Gb/sec (4X)", Some(10_000)),
            ("40 Gb/sec (4X QDR)", Some(40_000)),
            ("100 Gb/sec (4X EDR)", Some(100_000)),
            ("400 Gb/sec (4X NDR)", Some(400_000)),
            ("800 Gb/sec (4X XDR)", Some(800_000)),
            ("100", None),
            ("fast Gb/sec", None),
            ("100 Mb/sec", None),
            ("2.55 Gb/sec", None),
            ("-1 Gb/sec", None),
            ("4294967295 Gb/sec", None),
            ("", None),
        ] {
            assert_eq!(rate_mbps(text), mbps, "{text}");
        }
    }

    #[test]
    fn guids_are_matched_with_hardware_addresses() {
        let eui = guid("5054:00ff:fe12:3456").expect("a guid");
        assert!(is_guid_of(eui, "52:54:00:12:34:56"));
        assert!(!is_guid_of(eui, "52:54:00:12:34:57") && !is_guid_of(eui, "52:54:00:12:34:56:00"));
        assert!(is_guid_of(guid("5254:0012:3456:0000").expect("a guid"), "52:54:00:12:34:56"));
        for text in ["", "0000:0000:0000:0000", "1:2:3", "1:2:3:4:5", "x:2:3:4", "12345:2:3:4"] {
            assert_eq!(guid(text), None, "{text}");
        }
    }
}
