//! Unsolicited neighbour advertisements (RFC 4861 7.2.6): announce to all nodes that an IPv6 address is here now.

use std::io;
use std::net::{Ipv6Addr, SocketAddrV6};

use rustix::net::sockopt::{set_ipv6_multicast_hops, set_ipv6_multicast_if};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto};

use super::netlink::Link;

const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// ICMPv6 (RFC 4861 4.4).
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// It replaces existing cache entries.
const OVERRIDE: u8 = 0x20;
const TARGET_LINK_LAYER_ADDRESS: u8 = 2;

/// The message without its checksum, which the kernel fills in (RFC 3542 3.1).
fn encode(address: Ipv6Addr, hardware: &[u8]) -> Vec<u8> {
    let mut bytes = vec![NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, OVERRIDE, 0, 0, 0];
    bytes.extend(address.octets());
    if !hardware.is_empty() {
        // RFC 4861 4.6.1: the length counts groups of eight bytes.
        let length = (2 + hardware.len()).next_multiple_of(8);
        bytes.extend([TARGET_LINK_LAYER_ADDRESS, (length / 8) as u8]);
        bytes.extend(hardware);
        bytes.resize(24 + length, 0);
    }
    bytes
}

/// Announces the address to all nodes on the link.
pub(super) fn announce(link: &Link, address: Ipv6Addr) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let family = AddressFamily::INET6;
    let socket = rustix::net::socket_with(family, SocketType::RAW, flags, Some(ipproto::ICMPV6))?;
    // RFC 4861 7.1.2: messages with another hop limit are not from this link, and are ignored.
    set_ipv6_multicast_hops(&socket, 255)?;
    set_ipv6_multicast_if(&socket, link.index)?;
    let to = SocketAddrV6::new(ALL_NODES, 0, 0, link.index);
    rustix::net::sendto(&socket, &encode(address, &link.hardware), SendFlags::empty(), &to)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbour_advertisement_carries_the_ip_and_link_layer_addresses() {
        let address: Ipv6Addr = "fd00::200".parse().expect("an address");
        let bytes = encode(address, &[2, 0, 0, 0, 0, 9]);
        assert_eq!(bytes.len(), 32);
        assert_eq!((bytes[0], bytes[4]), (136, 0x20));
        assert_eq!(bytes[8..24], address.octets());
        assert_eq!(bytes[24..], [2, 1, 2, 0, 0, 0, 0, 9]);
        assert_eq!(encode(address, &[1; 20]).len(), 24 + 24);
        assert_eq!(encode(address, &[]).len(), 24);
    }
}
