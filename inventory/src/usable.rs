//! Whether SMB Direct can run on a port, and if not, why.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::net::Netdev;
use crate::rdma::{RdmaDevice, RdmaPort, Transport};

/// Addresses, by the name of their network device.
pub type Addresses = BTreeMap<String, Vec<IpAddr>>;

/// The usability of a port at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assessment {
    /// The network device for connections; `None` if the port has none.
    pub netdev: Option<String>,
    /// Its MTU; 0 if there is none.
    pub mtu: u32,
    /// Its addresses except link-local ones, in order.
    pub addresses: Vec<IpAddr>,
    /// Why SMB Direct cannot run on it; `None` if it can.
    pub unusable: Option<Unusable>,
}

/// Why SMB Direct cannot run on a port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// The device has no RDMA connection manager.
    #[error("the device is neither InfiniBand, RoCE nor iWARP")]
    Transport,
    /// The port is not active.
    #[error(
        "the port is {state} ({physical}): check cable, switch port and, on InfiniBand, the subnet manager"
    )]
    NotActive {
        /// Logical state.
        state: String,
        /// Physical state.
        physical: String,
    },
    /// No network device belongs to the port.
    #[error("no network device belongs to the port: on InfiniBand load ib_ipoib")]
    NoNetdev,
    /// Its network device is not in the network namespace that was read.
    #[error("its network device {0} is in another network namespace")]
    NetdevElsewhere(String),
    /// Its network device is down.
    #[error("its network device {name} is {operstate}")]
    NetdevDown {
        /// Name.
        name: String,
        /// The state as named by the kernel.
        operstate: String,
    },
    /// Its network device has only link-local addresses.
    #[error("its network device {0} has no IP address")]
    NoAddress(String),
}

impl Unusable {
    /// The reason as a word, for conditions.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Transport => "UnsupportedTransport",
            Self::NotActive { .. } => "PortNotActive",
            Self::NoNetdev => "NoNetworkDevice",
            Self::NetdevElsewhere(_) => "NetworkDeviceElsewhere",
            Self::NetdevDown { .. } => "NetworkDeviceDown",
            Self::NoAddress(_) => "NoAddress",
        }
    }
}

/// Assesses a port. Of several network devices the first usable one counts: for example, a bond's address is on the bond.
#[must_use]
pub fn assess(device: &RdmaDevice, port: &RdmaPort, netdevs: &[Netdev], addresses: &Addresses) -> Assessment {
    let mut candidates = port.netdevs.iter().map(|name| netdev(name, netdevs, addresses));
    let first = candidates.next();
    let working = match &first {
        Some(first) if first.unusable.is_none() => None,
        _ => candidates.find(|c| c.unusable.is_none()),
    };
    let mut assessment = working
        .or(first)
        .unwrap_or_else(|| Assessment { unusable: Some(Unusable::NoNetdev), ..Assessment::default() });
    // Lower layers take precedence: an address does not help a port without a link.
    if device.transport == Transport::Other {
        assessment.unusable = Some(Unusable::Transport);
    } else if port.state != "ACTIVE" {
        let shown = |text: &str| if text.is_empty() { "unknown".to_owned() } else { text.to_owned() };
        assessment.unusable =
            Some(Unusable::NotActive { state: shown(&port.state), physical: shown(&port.physical_state) });
    }
    assessment
}

fn netdev(name: &str, netdevs: &[Netdev], addresses: &Addresses) -> Assessment {
    let Some(found) = netdevs.iter().find(|n| n.name == name) else {
        return Assessment {
            netdev: Some(name.to_owned()),
            unusable: Some(Unusable::NetdevElsewhere(name.to_owned())),
            ..Assessment::default()
        };
    };
    let mut usable: Vec<IpAddr> =
        addresses.get(name).into_iter().flatten().copied().filter(|a| is_reachable(*a)).collect();
    usable.sort_unstable();
    usable.dedup();
    let unusable = if !found.is_up() {
        let operstate = if found.operstate.is_empty() { "unknown" } else { &found.operstate };
        Some(Unusable::NetdevDown { name: name.to_owned(), operstate: operstate.to_owned() })
    } else if usable.is_empty() {
        Some(Unusable::NoAddress(name.to_owned()))
    } else {
        None
    };
    Assessment { netdev: Some(name.to_owned()), mtu: found.mtu, addresses: usable, unusable }
}

/// Whether another node could connect to the address.
fn is_reachable(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !link_local && !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
}
