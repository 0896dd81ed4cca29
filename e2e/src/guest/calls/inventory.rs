//! What the inventory crate, and with it the node agent, reports about this node.

use anyhow::Result;
use forebay_inventory::{Host, LinkLayer, Presence, Transport};
use serde::{Deserialize, Serialize};

/// The part of [`inventory`]'s result that scenarios check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Whether cifs has SMB Direct; `None` if the crate cannot determine it.
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
    /// Whether it is iWARP rather than RoCE.
    pub iwarp: bool,
    /// Whether it is a software device.
    pub software: bool,
    /// State of its port.
    pub state: String,
    /// Network devices of its port.
    pub netdevs: Vec<String>,
}

/// Takes inventory of this node.
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
