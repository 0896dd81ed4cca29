//! Interfaces and their addresses, as reported by rtnetlink(7).

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader,
    NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, CacheInfo};
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendFlags, SocketFlags, SocketType};
use tracing::debug;

use crate::config::InstanceAddress;

/// The kernel answers from its memory, but may wait for another change of an interface.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(2);
/// The largest datagram that the kernel sends.
const DATAGRAM_BYTES_MAX: usize = 64 << 10;
/// An infinite lifetime.
const FOR_EVER: u32 = u32::MAX;

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    /// Its index.
    pub(super) index: u32,
    /// Its name.
    pub(super) name: String,
    /// ARPHRD_…
    pub(super) kind: u16,
    /// Its own hardware address on the link.
    pub(super) hardware: Vec<u8>,
    /// The link's broadcast address.
    pub(super) broadcast: Vec<u8>,
}

/// An address of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The interface's index.
    pub(super) index: u32,
    /// Address and length of its network's prefix.
    pub(super) address: InstanceAddress,
    /// Seconds until the kernel removes it; `None`: never.
    pub(super) seconds: Option<u32>,
    /// Duplicate detection is still running (IPv6).
    pub(super) tentative: bool,
    /// Another host has it (IPv6).
    pub(super) duplicate: bool,
}

/// A socket for the kernel's tables.
#[derive(Debug)]
pub(super) struct Tables {
    socket: OwnedFd,
    sequence: u32,
}

impl Tables {
    pub(super) fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let family = rustix::net::AddressFamily::NETLINK;
        // NETLINK_ROUTE is 0, the default protocol.
        let socket = rustix::net::socket_with(family, SocketType::RAW, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIME_MAX))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// All interfaces.
    pub(super) fn links(&mut self) -> io::Result<Vec<Link>> {
        let answers = self.ask(RouteNetlinkMessage::GetLink(LinkMessage::default()), NLM_F_DUMP)?;
        Ok(answers.into_iter().filter_map(link).collect())
    }

    /// All addresses of all interfaces.
    pub(super) fn addresses(&mut self) -> io::Result<Vec<Entry>> {
        let answers = self.ask(RouteNetlinkMessage::GetAddress(AddressMessage::default()), NLM_F_DUMP)?;
        Ok(answers.into_iter().filter_map(entry).collect())
    }

    /// Adds an address to an interface for the time `stay`, or renews it there.
    pub(super) fn put(&mut self, index: u32, address: InstanceAddress, stay: Duration) -> io::Result<()> {
        let seconds = u32::try_from(stay.as_secs()).unwrap_or(FOR_EVER);
        let mut message = message(index, address);
        if let (IpAddr::V4(of), 0..=30) = (address.ip(), address.prefix()) {
            let hosts = u32::MAX >> address.prefix();
            message.attributes.push(AddressAttribute::Broadcast(Ipv4Addr::from_bits(of.to_bits() | hosts)));
        }
        let mut times = CacheInfo::default();
        (times.ifa_preferred, times.ifa_valid) = (seconds, seconds);
        message.attributes.push(AddressAttribute::CacheInfo(times));
        let flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
        self.ask(RouteNetlinkMessage::NewAddress(message), flags).map(drop)
    }

    /// Removes an address from an interface; a missing address is not an error.
    pub(super) fn take_off(&mut self, index: u32, address: InstanceAddress) -> io::Result<()> {
        match self.ask(RouteNetlinkMessage::DelAddress(message(index, address)), NLM_F_ACK) {
            // The interface may have been removed, too.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::ENODEV)) => Ok(()),
            result => result.map(drop),
        }
    }

    fn ask(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        rustix::net::sendto(&self.socket, &bytes, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        let mut answers = Vec::new();
        let mut datagram = vec![0; DATAGRAM_BYTES_MAX];
        loop {
            let (length, _) = rustix::net::recv(&self.socket, datagram.as_mut_slice(), RecvFlags::empty())?;
            if self.collect(&datagram[..length], &mut answers)? {
                return Ok(answers);
            }
        }
    }

    /// Collects the messages of a datagram; returns whether the last message was among them.
    fn collect(&self, mut datagram: &[u8], answers: &mut Vec<RouteNetlinkMessage>) -> io::Result<bool> {
        while let Ok(buffer) = NetlinkBuffer::new_checked(&datagram) {
            let (length, sequence) = (buffer.length() as usize, buffer.sequence_number());
            let Some(bytes) = datagram.get(..length) else { break };
            match NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes).map(|message| message.payload) {
                // An answer to an abandoned request.
                _ if sequence != self.sequence => {}
                Ok(NetlinkPayload::Error(error)) if error.code.is_some() => return Err(error.to_io()),
                Ok(NetlinkPayload::Error(_) | NetlinkPayload::Done(_)) => return Ok(true),
                Ok(NetlinkPayload::InnerMessage(message)) => answers.push(message),
                Ok(_) => {}
                // An interface that a later kernel describes in another way does not hide the others.
                Err(error) => debug!(%error, "a message of rtnetlink that is not understood"),
            }
            // Messages begin at multiples of four.
            datagram = datagram.get(length.next_multiple_of(4).max(4)..).unwrap_or_default();
        }
        Ok(false)
    }
}

fn message(index: u32, address: InstanceAddress) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = if address.ip().is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.prefix_len = address.prefix();
    message.header.index = index;
    message.attributes = vec![AddressAttribute::Local(address.ip()), AddressAttribute::Address(address.ip())];
    message
}

fn link(message: RouteNetlinkMessage) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(message) = message else { return None };
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        kind: message.header.link_layer_type.into(),
        hardware: Vec::new(),
        broadcast: Vec::new(),
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Address(address) => link.hardware = address,
            LinkAttribute::Broadcast(address) => link.broadcast = address,
            _ => {}
        }
    }
    (!link.name.is_empty()).then_some(link)
}

fn entry(message: RouteNetlinkMessage) -> Option<Entry> {
    let RouteNetlinkMessage::NewAddress(message) = message else { return None };
    let (mut local, mut address, mut seconds) = (None, None, None);
    let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => address = Some(*ip),
            AddressAttribute::CacheInfo(times) => {
                seconds = (times.ifa_valid != FOR_EVER).then_some(times.ifa_valid);
            }
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    // If both are present, the other one is the peer's address of a point-to-point link.
    let address = InstanceAddress::new(local.or(address)?, message.header.prefix_len)?;
    let index = message.header.index;
    let (tentative, duplicate) =
        (flags.contains(AddressFlags::Tentative), flags.contains(AddressFlags::Dadfailed));
    Some(Entry { index, address, seconds, tentative, duplicate })
}
