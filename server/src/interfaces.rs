//! The addresses that may be announced to clients ([MS-SMB2] 3.3.5.15.11).

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use forebay_smb::engine::NetworkInterface;
use tracing::warn;

use crate::advertise::{self, Advertised, Local};
use crate::rdma::listener::Listening;

/// The assumed speed of an interface that reports none (bridges, veth), as in Linux clients.
const SPEED_UNKNOWN_BITS_PER_SECOND: u64 = 1_000_000_000;

/// This machine's current addresses that `listening` covers and a client can use. If `advertise` selects among them, only
/// those that it matches: a node has addresses that no client can reach, for example those of its pods' bridges.
#[must_use]
pub fn current(
    listening: &[SocketAddr],
    advertise: &[Advertised],
    rdma: &Listening,
) -> Vec<NetworkInterface> {
    let chooses = advertise.iter().any(Advertised::chooses);
    let is_taken = |interface: &if_addrs::Interface| {
        let local = Local { interface: interface.name.clone(), address: interface.ip() };
        !chooses || advertise.iter().any(|entry| entry.takes(&local))
    };
    found()
        .into_iter()
        .filter(|interface| is_offered(interface.ip(), listening) && is_taken(interface))
        .map(|interface| NetworkInterface {
            rdma_capable: rdma.has(interface.ip()),
            ..describe(&interface.name, interface.index.unwrap_or(0), interface.ip())
        })
        .collect()
}

/// All addresses of this machine.
#[must_use]
pub fn locals() -> Vec<Local> {
    found().into_iter().map(|i| Local { address: i.ip(), interface: i.name }).collect()
}

fn found() -> Vec<if_addrs::Interface> {
    if_addrs::get_if_addrs().unwrap_or_else(|error| {
        warn!(%error, "listing network interfaces");
        Vec::new()
    })
}

fn is_offered(address: IpAddr, listening: &[SocketAddr]) -> bool {
    advertise::listener(address, listening).is_some()
}

fn describe(name: &str, index: u32, address: IpAddr) -> NetworkInterface {
    let class = Path::new("/sys/class/net").join(name);
    let megabits =
        std::fs::read_to_string(class.join("speed")).ok().and_then(|s| s.trim().parse::<i64>().ok());
    let speed_bits_per_second = match megabits {
        Some(speed) if speed > 0 => speed.cast_unsigned() * 1_000_000,
        _ => SPEED_UNKNOWN_BITS_PER_SECOND,
    };
    NetworkInterface {
        index,
        address,
        speed_bits_per_second,
        // Set regardless of the number of receive queues: several connections to one address are spread over the event
        // loops, and Linux opens a second connection only if this is set.
        rss_capable: true,
        rdma_capable: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(address: &str, listening: &[&str]) -> bool {
        let listening: Vec<SocketAddr> = listening.iter().map(|l| l.parse().expect("an address")).collect();
        is_offered(address.parse().expect("an address"), &listening)
    }

    #[test]
    fn only_reachable_interfaces_are_offered() {
        assert!(offered("192.0.2.1", &["[::]:445"]));
        assert!(offered("192.0.2.1", &["0.0.0.0:445"]));
        assert!(!offered("2001:db8::1", &["0.0.0.0:445"]));
        assert!(offered("2001:db8::1", &["[::]:445"]));
        assert!(!offered("fe80::1", &["[::]:445"]));
        assert!(!offered("127.0.0.1", &["[::]:445"]));
        assert!(offered("127.0.0.1", &["127.0.0.1:445"]));
        assert!(!offered("127.0.0.1", &["127.0.0.1:445", "192.0.2.1:445"]));
        assert!(offered("192.0.2.1", &["192.0.2.1:445"]));
        assert!(!offered("192.0.2.2", &["192.0.2.1:445"]));
    }

    #[test]
    fn listening_interface_is_reported_with_its_capabilities() {
        let listening = ["127.0.0.1:445".parse().expect("an address")];
        let found = current(&listening, &[], &Listening::default());
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].address, IpAddr::from([127, 0, 0, 1]));
        assert!(found[0].speed_bits_per_second > 0 && found[0].rss_capable);
        let entry = |text: &str| vec![text.parse::<Advertised>().expect("an entry")];
        assert_eq!(current(&listening, &entry("interface:lo"), &Listening::default()).len(), 1);
        assert_eq!(current(&listening, &entry("storage.example:445"), &Listening::default()).len(), 1);
        assert_eq!(current(&listening, &entry("192.0.2.0/24"), &Listening::default()).len(), 0);
    }
}
