//! ARP (RFC 826) over a packet socket: queries which host has an IPv4 address (RFC 5227), and announces that it is here now.
#![allow(unsafe_code)]

use std::io;
use std::net::Ipv4Addr;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::Hardware;
use super::netlink::Link;
use crate::limits::{ADDRESS_PROBE_PAUSE, ADDRESS_PROBES};

/// Link types that use ARP frames of this format: Ethernet and InfiniBand (RFC 4391), with the same numbers in ARP.
const KINDS: [u16; 2] = [libc::ARPHRD_ETHER, libc::ARPHRD_INFINIBAND];
/// An InfiniBand address has 20 bytes.
const HARDWARE_BYTES_MAX: usize = 32;
const REQUEST: u16 = 1;
const REPLY: u16 = 2;
const PROTOCOL: u16 = libc::ETH_P_ARP as u16;

/// `struct sockaddr_ll` of packet(7), with space for the addresses of all links.
#[repr(C)]
struct PacketAddress {
    family: u16,
    protocol: u16,
    index: i32,
    kind: u16,
    packet_type: u8,
    length: u8,
    address: [u8; HARDWARE_BYTES_MAX],
}

// SAFETY: `f` gets a pointer to all of `self`, which is plain data in the layout that packet(7) defines for AF_PACKET, and
// which outlives the call.
unsafe impl SocketAddrArg for PacketAddress {
    unsafe fn with_sockaddr<R>(&self, f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R) -> R {
        f(std::ptr::from_ref(self).cast(), size_of::<Self>() as SocketAddrLen)
    }
}

/// A packet.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Packet {
    operation: u16,
    sender: Hardware,
    sender_ip: Ipv4Addr,
    target: Hardware,
    target_ip: Ipv4Addr,
}

impl Packet {
    fn encode(&self, kind: u16) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(8 + 2 * (HARDWARE_BYTES_MAX + 4));
        bytes.extend(kind.to_be_bytes());
        bytes.extend((libc::ETH_P_IP as u16).to_be_bytes());
        bytes.extend([self.sender.0.len() as u8, 4]);
        bytes.extend(self.operation.to_be_bytes());
        for (hardware, ip) in [(&self.sender, self.sender_ip), (&self.target, self.target_ip)] {
            bytes.extend(&hardware.0);
            bytes.extend(ip.octets());
        }
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(8)?;
        let length = usize::from(head[4]);
        if head[2..4] != (libc::ETH_P_IP as u16).to_be_bytes() || head[5] != 4 {
            return None;
        }
        let take = |from: usize| -> Option<(Hardware, Ipv4Addr)> {
            let ip: [u8; 4] = rest.get(from + length..from + length + 4)?.try_into().ok()?;
            Some((Hardware(rest.get(from..from + length)?.into()), ip.into()))
        };
        let ((sender, sender_ip), (target, target_ip)) = (take(0)?, take(length + 4)?);
        let operation = u16::from_be_bytes([head[6], head[7]]);
        Some(Self { operation, sender, sender_ip, target, target_ip })
    }
}

/// A socket for the packets of one interface.
#[derive(Debug)]
pub(super) struct Arp {
    socket: OwnedFd,
    link: Link,
}

impl Arp {
    /// `None` if the link has no ARP.
    pub(super) fn open(link: &Link) -> io::Result<Option<Self>> {
        if !KINDS.contains(&link.kind)
            || !(1..=HARDWARE_BYTES_MAX).contains(&link.hardware.len())
            || link.broadcast.len() != link.hardware.len()
        {
            return Ok(None);
        }
        let protocol = NonZeroU32::new(PROTOCOL.to_be().into()).map(Protocol::from_raw);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::PACKET, SocketType::DGRAM, flags, protocol)?;
        let arp = Self { socket, link: link.clone() };
        rustix::net::bind(&arp.socket, &arp.broadcast())?;
        Ok(Some(arp))
    }

    fn broadcast(&self) -> PacketAddress {
        let mut address = [0; HARDWARE_BYTES_MAX];
        address[..self.link.broadcast.len()].copy_from_slice(&self.link.broadcast);
        PacketAddress {
            family: libc::AF_PACKET as u16,
            protocol: PROTOCOL.to_be(),
            index: self.link.index.cast_signed(),
            kind: self.link.kind,
            packet_type: 0,
            length: self.link.broadcast.len() as u8,
            address,
        }
    }

    fn send(
        &self,
        operation: u16,
        sender_ip: Ipv4Addr,
        target: Vec<u8>,
        target_ip: Ipv4Addr,
    ) -> io::Result<()> {
        let sender = Hardware(self.link.hardware.clone());
        let packet = Packet { operation, sender, sender_ip, target: Hardware(target), target_ip };
        let bytes = packet.encode(self.link.kind);
        rustix::net::sendto(&self.socket, &bytes, SendFlags::empty(), &self.broadcast())?;
        Ok(())
    }

    /// Queries which host has the address, as a host without an address does. Returns the host that answers within about a
    /// second.
    // RFC 5227 2.1.1, with shorter times: the server that holds the pools' reservations is entitled to the address, and the
    // previous server answers immediately if it is still running.
    pub(super) fn probe(&self, address: Ipv4Addr) -> io::Result<Option<Hardware>> {
        for _ in 0..ADDRESS_PROBES {
            let unknown = vec![0; self.link.hardware.len()];
            self.send(REQUEST, Ipv4Addr::UNSPECIFIED, unknown, address)?;
            let until = Instant::now() + ADDRESS_PROBE_PAUSE;
            while let Some(packet) = self.receive(until)? {
                if let Some(other) = self.other(&packet, address) {
                    return Ok(Some(other));
                }
            }
        }
        Ok(None)
    }

    /// Another host that has claimed the address since the last call.
    pub(super) fn conflict(&self, address: Ipv4Addr) -> io::Result<Option<Hardware>> {
        let mut found = None;
        while let Some(packet) = self.receive(Instant::now())? {
            // Probes are not claims: the kernel will answer the host that probes.
            let claims = packet.sender_ip == address;
            found = found.or_else(|| self.other(&packet, address).filter(|_| claims));
        }
        Ok(found)
    }

    /// The host other than this one that uses the address or is about to (RFC 5227 2.1.1).
    fn other(&self, packet: &Packet, address: Ipv4Addr) -> Option<Hardware> {
        let uses = packet.sender_ip == address;
        let probes = packet.operation == REQUEST
            && packet.sender_ip == Ipv4Addr::UNSPECIFIED
            && packet.target_ip == address;
        ((uses || probes) && packet.sender.0 != self.link.hardware).then(|| packet.sender.clone())
    }

    /// Announces to all hosts on the link that the address is here: as a request (RFC 5227 2.3) and as a reply, since some hosts
    /// accept only one of them.
    pub(super) fn announce(&self, address: Ipv4Addr) -> io::Result<()> {
        self.send(REQUEST, address, vec![0; self.link.hardware.len()], address)?;
        self.send(REPLY, address, self.link.broadcast.clone(), address)
    }

    /// The next valid packet, until that time.
    fn receive(&self, until: Instant) -> io::Result<Option<Packet>> {
        loop {
            let mut bytes = [0; 256];
            match rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
                Ok((length, _)) => {
                    if let Some(packet) = bytes.get(..length).and_then(Packet::parse) {
                        return Ok(Some(packet));
                    }
                }
                Err(rustix::io::Errno::AGAIN) => {
                    let left = until.saturating_duration_since(Instant::now());
                    let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
                    let mut socket = [PollFd::new(&self.socket, PollFlags::IN)];
                    match poll(&mut socket, Some(&timeout)) {
                        Ok(0) => return Ok(None),
                        Ok(_) | Err(rustix::io::Errno::INTR) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                }
                // The interface went down; it may come up again.
                Err(rustix::io::Errno::INTR | rustix::io::Errno::NETDOWN) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arp_packet_round_trips_and_truncated_packets_are_rejected() {
        for length in [6, 20] {
            let packet = Packet {
                operation: REPLY,
                sender: Hardware(vec![7; length]),
                sender_ip: Ipv4Addr::new(192, 0, 2, 1),
                target: Hardware(vec![9; length]),
                target_ip: Ipv4Addr::new(192, 0, 2, 2),
            };
            let bytes = packet.encode(1);
            assert_eq!(bytes.len(), 8 + 2 * (length + 4));
            assert_eq!(Packet::parse(&bytes), Some(packet));
            for short in 0..bytes.len() {
                assert_eq!(Packet::parse(&bytes[..short]), None);
            }
        }
        let mut other = vec![0; 28];
        other[2..6].copy_from_slice(&[0x86, 0xdd, 6, 16]);
        assert_eq!(Packet::parse(&other), None);
    }
}
