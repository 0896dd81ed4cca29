//! What the inventory crate, and with it the node agent, makes of this node.

use anyhow::Result;
use forebay_inventory::{Host, LinkLayer, Presence, Transport};
use serde::{Deserialize, Serialize};

/// What [`inventory`] found, as far as scenarios look at it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Whether cifs has SMB Direct; none where the crate cannot tell.
    pub cifs_smb_direct: Option<bool>,
    /// RDMA devices.
    pub devices: Vec<Device>,
    /// What it could not read.
    pub oddities: Vec<String>,
}

/// A device with one port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Its driver.
    pub driver: Option<String>,
    /// Whether it speaks iWARP rather than RoCE.
    pub iwarp: bool,
    /// Whether it is software.
    pub software: bool,
    /// State of its port.
    pub state: String,
    /// Network devices of its port.
    pub netdevs: Vec<String>,
}

/// Reads this node.
pub fn inventory((): ()) -> Result<Found> {
    let found = Host::at("/").read();
    let device = |device: &forebay_inventory::RdmaDevice| {
        let port = device.ports.first();
        let ethernet = port.is_some_and(|port| port.link_layer == LinkLayer::Ethernet);
        Device {
            name: device.name.clone(),
            driver: device.driver.clone(),
            iwarp: ethernet && device.transport == Transport::Iwarp,
            software: device.software,
            state: port.map(|port| port.state.clone()).unwrap_or_default(),
            netdevs: port.map(|port| port.netdevs.clone()).unwrap_or_default(),
        }
    };
    Ok(Found {
        cifs_smb_direct: match found.kernel.cifs_smb_direct {
            Presence::Yes => Some(true),
            Presence::No => Some(false),
            Presence::Unknown => None,
        },
        devices: found.rdma.iter().map(device).collect(),
        oddities: found.oddities.iter().map(|oddity| format!("{}: {}", oddity.path, oddity.what)).collect(),
    })
}
