//! The RDMA connection manager: connection requests from peers, and events of connections.

use std::fmt;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use rdma_sys::{
    rdma_cm_event, rdma_cm_event_type as event_type, rdma_cm_id, rdma_event_channel, rdma_port_space,
};
use rustix::io::Errno;

use crate::device::{Device, duplicate};
use crate::library::{Library, Unavailable};
use crate::{check, last_errno};

/// Identifies a connection of this process during its lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CmKey(usize);

/// An event of a connection or a listener.
#[derive(Debug)]
pub enum CmEvent {
    /// A peer requests a connection from a listener.
    Connect(Incoming),
    /// The next resolution step is done: the peer's address or the route to it.
    Resolved(CmKey),
    /// The connection is up.
    Established(CmKey),
    /// The connection is down, or was never established.
    Ended(CmKey, &'static str),
    /// The device of a connection or listener is being removed.
    DeviceRemoved(CmKey),
}

/// A channel for events.
pub struct EventChannel {
    library: &'static Library,
    channel: NonNull<rdma_event_channel>,
    descriptor: Arc<OwnedFd>,
}

// SAFETY: librdmacm is thread-safe.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventChannel")
    }
}

/// Why there is no event channel.
#[derive(Debug, thiserror::Error)]
pub enum NoChannel {
    /// The library is unavailable.
    #[error(transparent)]
    Library(#[from] Unavailable),
    /// The kernel has no RDMA, or denies this process access to it.
    #[error("{0}: load the module rdma_cm, and let the server at /dev/infiniband/rdma_cm")]
    Kernel(Errno),
}

impl EventChannel {
    /// Creates a channel.
    ///
    /// # Errors
    /// Why it could not be created; ENODEV if the kernel has no RDMA.
    pub fn new() -> Result<Self, NoChannel> {
        let library = Library::get()?;
        // SAFETY: no arguments.
        let channel = unsafe { (library.rdma_create_event_channel)() };
        let channel = NonNull::new(channel).ok_or_else(|| NoChannel::Kernel(last_errno()))?;
        // SAFETY: just made.
        let fd = unsafe { (*channel.as_ptr()).fd };
        let made = duplicate(fd).and_then(|descriptor| {
            rustix::io::ioctl_fionbio(&*descriptor, true)?;
            Ok(descriptor)
        });
        match made {
            Ok(descriptor) => Ok(Self { library, channel, descriptor }),
            Err(errno) => {
                // SAFETY: nothing uses it.
                unsafe { (library.rdma_destroy_event_channel)(channel.as_ptr()) };
                Err(NoChannel::Kernel(errno))
            }
        }
    }

    /// The descriptor to wait for.
    #[must_use]
    pub fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.descriptor)
    }

    /// The next event; `None` if there is none now.
    pub fn next(self: &Arc<Self>) -> Option<CmEvent> {
        loop {
            let mut event: *mut rdma_cm_event = ptr::null_mut();
            // SAFETY: the channel lives; it does not block.
            if unsafe { (self.library.rdma_get_cm_event)(self.channel.as_ptr(), &raw mut event) } != 0 {
                return None;
            }
            // SAFETY: the library returned a valid event, which is acknowledged once and not used afterwards.
            let translated = unsafe {
                let translated = self.translate(&*event);
                (self.library.rdma_ack_cm_event)(event);
                translated
            };
            if translated.is_some() {
                return translated;
            }
        }
    }

    fn translate(self: &Arc<Self>, event: &rdma_cm_event) -> Option<CmEvent> {
        let key = CmKey(event.id as usize);
        match event.event {
            event_type::RDMA_CM_EVENT_CONNECT_REQUEST => {
                let id = Id { channel: Arc::clone(self), id: NonNull::new(event.id)? };
                // SAFETY: an event of this type, with a port space of connections, has connection parameters.
                let parameters = unsafe { event.param.conn };
                let mut private = [0; 8];
                if !parameters.private_data.is_null()
                    && usize::from(parameters.private_data_len) >= private.len()
                {
                    // SAFETY: the event has at least as many bytes.
                    unsafe {
                        ptr::copy_nonoverlapping(
                            parameters.private_data.cast(),
                            private.as_mut_ptr(),
                            private.len(),
                        );
                    }
                }
                let (reads, read_by_peer) = (parameters.initiator_depth, parameters.responder_resources);
                let incoming = Incoming { id, reads, read_by_peer, private };
                // Dropped, and therefore rejected, if the device is being removed.
                incoming.peer().map(|_| CmEvent::Connect(incoming))
            }
            event_type::RDMA_CM_EVENT_ADDR_RESOLVED | event_type::RDMA_CM_EVENT_ROUTE_RESOLVED => {
                Some(CmEvent::Resolved(key))
            }
            event_type::RDMA_CM_EVENT_ADDR_ERROR | event_type::RDMA_CM_EVENT_ROUTE_ERROR => {
                Some(CmEvent::Ended(key, "there is no way to the peer"))
            }
            event_type::RDMA_CM_EVENT_ESTABLISHED => Some(CmEvent::Established(key)),
            event_type::RDMA_CM_EVENT_DISCONNECTED => Some(CmEvent::Ended(key, "closed by the peer")),
            event_type::RDMA_CM_EVENT_DEVICE_REMOVAL => Some(CmEvent::DeviceRemoved(key)),
            event_type::RDMA_CM_EVENT_CONNECT_ERROR
            | event_type::RDMA_CM_EVENT_UNREACHABLE
            | event_type::RDMA_CM_EVENT_REJECTED => Some(CmEvent::Ended(key, "the connection was not made")),
            event_type::RDMA_CM_EVENT_ADDR_CHANGE => Some(CmEvent::Ended(key, "its address has moved")),
            _ => None,
        }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: identifiers hold their channel, so none refers to it any more.
        unsafe { (self.library.rdma_destroy_event_channel)(self.channel.as_ptr()) };
    }
}

/// An identifier of librdmacm: a connection or a listener.
pub(crate) struct Id {
    channel: Arc<EventChannel>,
    id: NonNull<rdma_cm_id>,
}

// SAFETY: librdmacm is thread-safe.
unsafe impl Send for Id {}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Id({:p})", self.id)
    }
}

impl Id {
    fn new(channel: &Arc<EventChannel>) -> Result<Self, Errno> {
        let mut id = ptr::null_mut();
        // SAFETY: the channel lives.
        check(unsafe {
            (channel.library.rdma_create_id)(
                channel.channel.as_ptr(),
                &raw mut id,
                ptr::null_mut(),
                rdma_port_space::RDMA_PS_TCP,
            )
        })?;
        Ok(Self { channel: Arc::clone(channel), id: NonNull::new(id).ok_or(Errno::NOMEM)? })
    }

    pub(crate) fn key(&self) -> CmKey {
        CmKey(self.id.as_ptr() as usize)
    }

    pub(crate) fn raw(&self) -> *mut rdma_cm_id {
        self.id.as_ptr()
    }

    pub(crate) fn device(&self) -> Result<Arc<Device>, Errno> {
        // SAFETY: the identifier lives.
        Device::of(self.channel.library, unsafe { self.id.as_ref() }.verbs)
    }

    /// Moves its events to another channel. Events already taken must have been acknowledged, which [`EventChannel::next`]
    /// does.
    pub(crate) fn migrate(&mut self, channel: &Arc<EventChannel>) -> Result<(), Errno> {
        // SAFETY: both live.
        check(unsafe { (self.channel.library.rdma_migrate_id)(self.id.as_ptr(), channel.channel.as_ptr()) })?;
        self.channel = Arc::clone(channel);
        Ok(())
    }

    fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: the union has room for any address, and reading it as bytes for a family is valid.
        let address = unsafe { &self.id.as_ref().route.addr.dst_addr_union.dst_storage };
        socket_address(address)
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: created by the library and destroyed only here; its queue pair is gone (`Endpoint`).
        unsafe { (self.channel.library.rdma_destroy_id)(self.id.as_ptr()) };
    }
}

/// A peer that waits to be accepted; rejected if dropped.
#[derive(Debug)]
pub struct Incoming {
    pub(crate) id: Id,
    /// RDMA READs that the peer serves at the same time.
    reads: u8,
    /// RDMA READs that the peer requests to have in flight.
    read_by_peer: u8,
    /// The first bytes of its private data.
    private: [u8; 8],
}

impl Incoming {
    /// Its address.
    #[must_use]
    pub fn peer(&self) -> Option<SocketAddr> {
        self.id.peer()
    }

    /// The device through which it arrived.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn device(&self) -> Result<Arc<Device>, Errno> {
        self.id.device()
    }

    /// RDMA READs of ours that can be in flight, and those granted to the peer.
    pub(crate) fn depths(&self, device: &Device) -> (u8, u8) {
        // [MS-SMBD] 3.1.4.1: clients over iWARP without enhanced connections put both numbers into their private data.
        let word = |at: usize| {
            let bytes = [self.private[at], self.private[at + 1], self.private[at + 2], self.private[at + 3]];
            u32::from_be_bytes(bytes).min(u8::MAX.into()) as u8
        };
        let (reads, read_by_peer) = if device.is_iwarp() && self.reads == 0 {
            (word(0), word(4))
        } else {
            (self.reads, self.read_by_peer)
        };
        (reads.min(device.reads_max), read_by_peer.min(device.reads_max))
    }
}

/// A peer to connect to; the attempt is abandoned if this is dropped. [`crate::Endpoint::connecting`] creates the end of the
/// connection once both steps are done.
#[derive(Debug)]
pub struct Outgoing {
    pub(crate) id: Id,
}

impl Outgoing {
    /// First step: finds the device through which the peer is reachable. [`CmEvent::Resolved`] reports its completion.
    ///
    /// # Errors
    /// ENODEV if no RDMA device reaches the peer.
    pub fn resolve_address(
        channel: &Arc<EventChannel>,
        peer: SocketAddr,
        patience: Duration,
    ) -> Result<Self, Errno> {
        let id = Id::new(channel)?;
        let mut storage = raw_address(peer);
        // SAFETY: the identifier lives, and the storage holds an address of its family.
        check(unsafe {
            (channel.library.rdma_resolve_addr)(
                id.raw(),
                ptr::null_mut(),
                (&raw mut storage).cast(),
                milliseconds(patience),
            )
        })?;
        Ok(Self { id })
    }

    /// Second step: resolves the route. [`CmEvent::Resolved`] reports its completion.
    ///
    /// # Errors
    /// Errors of the connection manager.
    pub fn resolve_route(&mut self, patience: Duration) -> Result<(), Errno> {
        let library = self.id.channel.library;
        // SAFETY: the identifier lives.
        check(unsafe { (library.rdma_resolve_route)(self.id.raw(), milliseconds(patience)) })
    }

    /// The key under which events refer to it.
    #[must_use]
    pub fn key(&self) -> CmKey {
        self.id.key()
    }

    /// The device that reaches the peer, after the first step.
    ///
    /// # Errors
    /// Errors of the device; ENODEV before the first step.
    pub fn device(&self) -> Result<Arc<Device>, Errno> {
        self.id.device()
    }
}

fn milliseconds(patience: Duration) -> i32 {
    patience.as_millis().min(i32::MAX as u128) as i32
}

/// Listens for connections to an address.
#[derive(Debug)]
pub struct Listener {
    id: Id,
}

impl Listener {
    /// Starts to listen; requests arrive at the channel.
    ///
    /// # Errors
    /// EADDRNOTAVAIL or ENODEV if no RDMA device has the address; EADDRINUSE.
    pub fn bind(channel: &Arc<EventChannel>, address: SocketAddr, backlog: i32) -> Result<Self, Errno> {
        let library = channel.library;
        let id = Id::new(channel)?;
        let mut storage = raw_address(address);
        // SAFETY: the identifier lives, and the storage holds an address of its family.
        check(unsafe { (library.rdma_bind_addr)(id.raw(), (&raw mut storage).cast()) })?;
        // SAFETY: as above.
        check(unsafe { (library.rdma_listen)(id.raw(), backlog) })?;
        Ok(Self { id })
    }

    /// The key under which events refer to it.
    #[must_use]
    pub fn key(&self) -> CmKey {
        self.id.key()
    }
}

fn raw_address(address: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: plain numbers.
    let mut storage: libc::sockaddr_storage = unsafe { mem::zeroed() };
    let at = &raw mut storage;
    match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage is large and aligned enough for every address.
            unsafe { at.cast::<libc::sockaddr_in>().write(raw) };
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { at.cast::<libc::sockaddr_in6>().write(raw) };
        }
    }
    storage
}

fn socket_address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let at = &raw const *storage;
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family determines the type of the address.
            let raw = unsafe { at.cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let raw = unsafe { at.cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            let port = u16::from_be(raw.sin6_port);
            Some(match IpAddr::V6(ip).to_canonical() {
                IpAddr::V4(v4) => SocketAddr::new(v4.into(), port),
                IpAddr::V6(_) => SocketAddrV6::new(ip, port, raw.sin6_flowinfo, raw.sin6_scope_id).into(),
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_addresses_round_trip() {
        for text in ["192.0.2.7:445", "[2001:db8::7]:5445", "[fe80::1%3]:445"] {
            let address: SocketAddr = text.parse().expect("an address");
            assert_eq!(socket_address(&raw_address(address)), Some(address));
        }
        // SAFETY: plain numbers.
        assert_eq!(socket_address(&unsafe { mem::zeroed() }), None);
    }
}
