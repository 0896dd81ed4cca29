//! Network devices: `/sys/class/net`.

use crate::limits::NETDEV_BYTES_MAX;
use crate::tree::{Identity, Tree};

/// IFF_UP of `flags` (linux/if.h): an administrator or a program has enabled the device.
const IFF_UP: u32 = 1;

/// ARPHRD_INFINIBAND (linux/if_arp.h): IP over InfiniBand.
const ARPHRD_INFINIBAND: u32 = 32;

/// One network device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Netdev {
    /// Its name.
    pub name: String,
    /// `up`, `down`, `lowerlayerdown`, `dormant`, `unknown` and so on; empty if unknown.
    pub operstate: String,
    /// Whether an administrator or a program has enabled it.
    pub enabled: bool,
    /// Whether it has a link; `None` if the kernel does not report that (it does not for a disabled device).
    pub carrier: Option<bool>,
    /// MTU in bytes; 0 if unknown.
    pub mtu: u32,
    /// Hardware address in the kernel's notation; empty if there is none.
    pub hardware_address: String,
    /// Whether it is IP over InfiniBand.
    pub infiniband: bool,
}

impl Netdev {
    /// Whether packets can pass. Some drivers always report `unknown`.
    #[must_use]
    pub fn is_up(&self) -> bool {
        match self.operstate.as_str() {
            "up" => true,
            "unknown" => self.enabled && self.carrier != Some(false),
            _ => false,
        }
    }
}

/// A network device, and the properties by which it is matched with RDMA devices.
pub(crate) struct Found {
    pub(crate) netdev: Netdev,
    /// The bus device to which it belongs; `None` for virtual devices.
    pub(crate) device: Option<Identity>,
    /// Port of that device, from 0.
    pub(crate) port: u32,
    /// Whether it represents another function's port (switchdev representor) or is a partition's child.
    pub(crate) secondary: bool,
}

/// Whether a text is a valid name of a network device, and so a valid path component (dev_valid_name of the kernel).
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() < NETDEV_BYTES_MAX
        && text != "."
        && text != ".."
        && !text.contains(|c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control())
}

pub(crate) fn read(tree: &Tree<'_>) -> Vec<Found> {
    tree.names("sys/class/net")
        .into_iter()
        .filter(|name| is_name(name))
        .filter_map(|n| one(tree, n))
        .collect()
}

fn one(tree: &Tree<'_>, name: String) -> Option<Found> {
    let at = format!("sys/class/net/{name}");
    // `bonding_masters` is a file among the devices.
    if !tree.exists(&format!("{at}/operstate")) && !tree.exists(&format!("{at}/mtu")) {
        return None;
    }
    let flags = tree.attribute(&format!("{at}/flags")).and_then(|text| hexadecimal(&text)).unwrap_or(0);
    let port = tree.natural(&format!("{at}/dev_port")).filter(|&port| port != 0);
    // Drivers before dev_port (Linux 3.15) report the port in dev_id.
    let port = port.or_else(|| tree.attribute(&format!("{at}/dev_id")).and_then(|text| hexadecimal(&text)));
    let port_name = tree.attribute(&format!("{at}/phys_port_name")).unwrap_or_default();
    let representor = port_name.contains("vf") || port_name.contains("sf");
    let child = tree.exists(&format!("{at}/parent"));
    Some(Found {
        device: tree.identity(&format!("{at}/device")),
        port: port.unwrap_or(0),
        secondary: representor || child,
        netdev: Netdev {
            operstate: tree.attribute(&format!("{at}/operstate")).unwrap_or_default(),
            enabled: flags & IFF_UP != 0,
            carrier: tree.number::<u8>(&format!("{at}/carrier")).map(|c| c != 0),
            mtu: tree.natural(&format!("{at}/mtu")).unwrap_or(0),
            hardware_address: tree.attribute(&format!("{at}/address")).unwrap_or_default(),
            infiniband: tree.natural(&format!("{at}/type")) == Some(ARPHRD_INFINIBAND),
            name,
        },
    })
}

fn hexadecimal(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_interface_names_are_rejected() {
        for name in ["eth0", "enp129s0f0np0", "ib0.8001", "bond0.100"] {
            assert!(is_name(name), "{name}");
        }
        for name in ["", ".", "..", "a/b", "../eth0", "a b", "eth0:1", "sixteen-letters-", "a\0b"] {
            assert!(!is_name(name), "{name:?}");
        }
    }

    #[test]
    fn netdev_is_up_only_if_it_can_carry_packets() {
        let netdev = |operstate: &str, enabled, carrier| Netdev {
            operstate: operstate.into(),
            enabled,
            carrier,
            ..Netdev::default()
        };
        assert!(netdev("up", true, Some(true)).is_up());
        assert!(netdev("unknown", true, None).is_up());
        assert!(!netdev("unknown", false, None).is_up());
        assert!(!netdev("unknown", true, Some(false)).is_up());
        assert!(!netdev("down", true, Some(false)).is_up());
        assert!(!netdev("lowerlayerdown", true, None).is_up());
        assert!(!netdev("", true, Some(true)).is_up());
    }
}
