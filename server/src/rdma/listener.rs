//! Listens for connections over RDMA at the addresses of active devices, which can appear and disappear.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_inventory::{Host, Inventory, Transport};
use forebay_rdma::{CmEvent, EventChannel, Listener};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::{debug, info, warn};

use crate::advertise::{self, Local};
use crate::eventloop::{Arrival, Loops};
use crate::interfaces;
use crate::limits::LISTEN_BACKLOG;
use crate::metrics::Metrics;

/// How often devices and addresses are checked.
const REFRESH: Duration = Duration::from_secs(5);

/// The ports to listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// InfiniBand and RoCE, which have a separate port space.
    pub rdma: u16,
    /// iWARP, which uses TCP connections ([MS-SMBD] 1.9).
    pub iwarp: u16,
}

impl Default for Ports {
    fn default() -> Self {
        Self { rdma: 445, iwarp: 5445 }
    }
}

/// The addresses that the server listens on.
#[derive(Clone, Debug, Default)]
pub struct Listening(Arc<Mutex<BTreeSet<SocketAddr>>>);

impl Listening {
    /// The addresses.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    /// Whether this address may be announced to clients for RDMA.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|a| a.ip() == address)
    }

    fn set(&self, addresses: BTreeSet<SocketAddr>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = addresses;
    }
}

/// The configuration of the listener thread.
pub struct Listeners {
    /// The TCP listening addresses: the server listens on those that have an RDMA device.
    pub tcp: Vec<SocketAddr>,
    /// The ports.
    pub ports: Ports,
    /// The event loops that handle the connections.
    pub loops: Loops,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Updated with the current addresses.
    pub listening: Listening,
}

impl Listeners {
    /// Listens on a separate thread for the lifetime of the process.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub fn start(self) -> Result<(), std::io::Error> {
        std::thread::Builder::new().name("rdma".to_owned()).spawn(move || self.run()).map(drop)
    }

    fn run(&self) {
        let mut said = String::new();
        loop {
            match EventChannel::new() {
                Ok(channel) => self.listen(&Arc::new(channel)),
                Err(error) => {
                    let error = error.to_string();
                    if said != error {
                        info!(reason = error, "no RDMA here: serving over TCP only, and looking again");
                        said = error;
                    }
                }
            }
            std::thread::sleep(REFRESH);
        }
    }

    /// Listens until the channel breaks.
    fn listen(&self, channel: &Arc<EventChannel>) {
        let mut held: HashMap<SocketAddr, Listener> = HashMap::new();
        let mut failed: BTreeMap<SocketAddr, Errno> = BTreeMap::new();
        let mut looked: Option<Instant> = None;
        let descriptor = channel.descriptor();
        loop {
            if looked.is_none_or(|at| at.elapsed() >= REFRESH) {
                let is_first = looked.replace(Instant::now()).is_none();
                self.renew(channel, &mut held, &mut failed);
                if is_first && held.is_empty() && failed.is_empty() {
                    let reason = "no device is up at an address that clients may come to";
                    info!(reason, "no RDMA here: serving over TCP only, and looking again");
                }
            }
            let mut waited = [PollFd::new(&*descriptor, PollFlags::IN)];
            let timeout = Timespec::try_from(REFRESH).expect("a few seconds");
            match poll(&mut waited, Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    warn!(%error, "waiting for connections over RDMA");
                    break;
                }
            }
            while let Some(event) = channel.next() {
                match event {
                    CmEvent::Connect(incoming) => {
                        let Some(peer) = incoming.peer() else { continue };
                        if !self.loops.accept(Arrival::Rdma(incoming), peer, &self.metrics) {
                            self.metrics.connections_refused.inc();
                        }
                    }
                    CmEvent::DeviceRemoved(key) | CmEvent::Ended(key, _) => {
                        // Its identifier must be released before the device can be removed.
                        held.retain(|_, listener| listener.key() != key);
                        looked = None;
                    }
                    CmEvent::Established(_) | CmEvent::Resolved(_) => {}
                }
            }
        }
        self.listening.set(BTreeSet::new());
    }

    fn renew(
        &self,
        channel: &Arc<EventChannel>,
        held: &mut HashMap<SocketAddr, Listener>,
        failed: &mut BTreeMap<SocketAddr, Errno>,
    ) {
        let wanted = wanted(&Host::at("/").read(), &interfaces::locals(), &self.tcp, self.ports);
        held.retain(|address, _| {
            let stays = wanted.contains_key(address);
            if !stays {
                info!(%address, "no longer taking connections over RDMA: no device is up there");
            }
            stays
        });
        failed.retain(|address, _| wanted.contains_key(address));
        for (address, device) in wanted {
            if held.contains_key(&address) {
                continue;
            }
            match Listener::bind(channel, address, LISTEN_BACKLOG) {
                Ok(listener) => {
                    info!(%address, device, "taking connections over RDMA (SMB Direct)");
                    failed.remove(&address);
                    held.insert(address, listener);
                }
                Err(errno) => {
                    if failed.insert(address, errno) != Some(errno) {
                        warn!(%address, device, %errno, "cannot take connections over RDMA");
                    } else {
                        debug!(%address, device, %errno, "cannot take connections over RDMA");
                    }
                }
            }
        }
        self.listening.set(held.keys().copied().collect());
    }
}

/// Returns the addresses to listen on, with their devices: addresses of active ports that may be announced to clients.
fn wanted(
    inventory: &Inventory,
    locals: &[Local],
    tcp: &[SocketAddr],
    ports: Ports,
) -> BTreeMap<SocketAddr, String> {
    let mut wanted = BTreeMap::new();
    for device in &inventory.rdma {
        let number = match device.transport {
            Transport::InfiniBand => ports.rdma,
            Transport::Iwarp => ports.iwarp,
            Transport::Other => continue,
        };
        let netdevs =
            device.ports.iter().filter(|port| port.state == "ACTIVE").flat_map(|port| &port.netdevs);
        for netdev in netdevs {
            for local in locals.iter().filter(|local| local.interface == *netdev) {
                if advertise::listener(local.address, tcp).is_some() {
                    let address = SocketAddr::new(local.address, number);
                    wanted.entry(address).or_insert_with(|| device.name.clone());
                }
            }
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_inventory::{LinkLayer, RdmaDevice, RdmaPort};

    fn device(name: &str, transport: Transport, state: &str, netdev: &str) -> RdmaDevice {
        RdmaDevice {
            name: name.into(),
            driver: None,
            board: None,
            firmware: None,
            transport,
            software: false,
            numa_node: None,
            ports: vec![RdmaPort {
                number: 1,
                link_layer: LinkLayer::Ethernet,
                state: state.into(),
                physical_state: "LinkUp".into(),
                rate_mbps: 100_000,
                netdevs: vec![netdev.into()],
            }],
        }
    }

    #[test]
    fn rdma_listeners_are_on_active_ports_of_the_tcp_addresses() {
        let inventory = Inventory {
            rdma: vec![
                device("mlx5_0", Transport::InfiniBand, "ACTIVE", "eth1"),
                device("mlx5_1", Transport::InfiniBand, "DOWN", "eth2"),
                device("siw0", Transport::Iwarp, "ACTIVE", "eth3"),
                device("efa0", Transport::Other, "ACTIVE", "eth1"),
            ],
            ..Inventory::default()
        };
        let locals: Vec<Local> = [
            ("eth0", "192.0.2.1"),
            ("eth1", "10.1.0.1"),
            ("eth1", "fe80::1"),
            ("eth1", "fd00::1"),
            ("eth2", "10.2.0.1"),
            ("eth3", "10.3.0.1"),
        ]
        .map(|(interface, address)| Local {
            interface: interface.into(),
            address: address.parse().expect("an address"),
        })
        .to_vec();
        let of = |tcp: &str| -> Vec<String> {
            let tcp = [tcp.parse().expect("an address")];
            let found = wanted(&inventory, &locals, &tcp, Ports::default());
            found.into_iter().map(|(address, device)| format!("{device} {address}")).collect()
        };
        assert_eq!(of("[::]:445"), ["mlx5_0 10.1.0.1:445", "siw0 10.3.0.1:5445", "mlx5_0 [fd00::1]:445"]);
        assert_eq!(of("10.1.0.1:1445"), ["mlx5_0 10.1.0.1:445"]);
        assert_eq!(of("192.0.2.1:445"), Vec::<String>::new());
    }
}
