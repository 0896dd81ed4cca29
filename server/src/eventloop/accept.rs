//! New connections: prepares and counts them, and drops them if they do not log in.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay_smb::engine::{Connection, ConnectionId, Disconnect};
use forebay_smb::time::Now;
use rustix::io::Errno;
use tracing::{debug, warn};

use super::client::{Client, Link};
use super::{EventLoop, turn};
use crate::buffers::BufferPool;
use crate::io::Engine;
use crate::lanes::Share;
use crate::limits::CONNECTIONS_UNAUTHENTICATED_MAX;
use crate::memory::Allowance;
use crate::qos::Priority;
use crate::rdma::Rdma;
use crate::transport::smb_direct::SmbDirect;
use crate::transport::tcp::TcpLink;

impl<E: Engine> EventLoop<E> {
    pub(super) fn accepted(&mut self, now: Now, socket: OwnedFd, peer: SocketAddr) {
        let socket = Arc::new(socket);
        if self.draining.is_some() || prepare(&socket).and_then(|()| self.engine.adopt(&socket)).is_err() {
            return self.turned_away();
        }
        let id = self.next_id();
        let buffers = self.shared.buffers.clone();
        self.admit(now, id, peer, Link::Tcp(Box::new(TcpLink::new(socket))), buffers);
    }

    pub(super) fn accepted_rdma(&mut self, now: Now, incoming: forebay_rdma::Incoming, peer: SocketAddr) {
        if self.draining.is_some() {
            return self.turned_away();
        }
        let id = self.next_id();
        match self.let_in(id, incoming, peer) {
            Ok((link, buffers)) => self.admit(now, id, peer, Link::SmbDirect(Box::new(link)), buffers),
            Err(reason) => {
                warn!(%peer, reason, "a connection over RDMA could not be accepted");
                self.turned_away();
            }
        }
    }

    pub(super) fn let_in(
        &mut self,
        id: ConnectionId,
        incoming: forebay_rdma::Incoming,
        peer: SocketAddr,
    ) -> Result<(SmbDirect, BufferPool), String> {
        if self.rdma.is_none() {
            let rdma = Rdma::new(self.shared.memory.budget().clone(), self.index)?;
            self.watch(rdma.events());
            self.rdma = Some(rdma);
        }
        let rdma = self.rdma.as_mut().expect("it was just made");
        let (link, buffers, watched) = rdma.accept(id.0, incoming, peer, self.shared.stall_time_max)?;
        if let Some(descriptor) = watched {
            self.watch(descriptor);
        }
        Ok((link, buffers))
    }

    pub(super) fn turned_away(&self) {
        self.inbox.connections.fetch_sub(1, Ordering::Relaxed);
        self.shared.metrics.connections.dec();
        self.shared.metrics.connections_unauthenticated.dec();
    }

    pub(super) fn next_id(&mut self) -> ConnectionId {
        let id = ConnectionId(self.next_id * self.shared.loops.0.len() as u64 + self.index as u64);
        self.next_id += 1;
        id
    }

    pub(super) fn admit(
        &mut self,
        now: Now,
        id: ConnectionId,
        peer: SocketAddr,
        link: Link,
        buffers: BufferPool,
    ) {
        let entropy = Box::new(|bytes: &mut [u8]| {
            getrandom::fill(bytes).expect("the kernel has randomness once it has booted");
        });
        let mut protocol = Connection::new(Arc::clone(&self.shared.server), id, peer.to_string(), entropy);
        let transport = match link {
            Link::Tcp(_) => "TCP",
            Link::SmbDirect(_) => {
                protocol.set_over_rdma();
                "SMB Direct"
            }
        };
        debug!(%peer, connection = id.0, transport, "connected");
        let client = Client {
            id,
            link,
            peer,
            protocol,
            accepted: Instant::now(),
            authenticated: false,
            memory: Allowance::new(buffers, self.shared.memory.stranger(), self.turn.wake()),
            reads_waiting: VecDeque::new(),
            writes_waiting: VecDeque::new(),
            queued: turn::Queued::default(),
            fetching: HashMap::new(),
            read_bytes: 0,
            write_bytes: 0,
            priority: Priority::default(),
            ops: 0,
            lanes: Share::default(),
            closing: false,
            leaving: None,
        };
        self.clients.insert(id.0, Box::new(client));
        self.unauthenticated.insert(id.0);
        self.with(now, id.0, |_, _| Ok(()));
        self.make_room(now);
    }

    /// Closes the oldest connection without a login if there are too many, so that idle peers do not keep others out.
    pub(super) fn make_room(&mut self, now: Now) {
        let max = CONNECTIONS_UNAUTHENTICATED_MAX.div_ceil(self.shared.loops.0.len());
        if self.unauthenticated.len() > max
            && let Some(oldest) = self.unauthenticated.pop_first()
        {
            self.shared.metrics.connections_refused.inc();
            self.with(now, oldest, |_, _| Err(Disconnect("too many connections without a login")));
        }
    }

    pub(super) fn authenticated(&mut self, client: &mut Client, username: &str) {
        if !std::mem::replace(&mut client.authenticated, true) {
            self.unauthenticated.remove(&client.id.0);
            self.shared.metrics.connections_unauthenticated.dec();
            // [MS-SMB2] allows a connection to carry sessions of several users; it uses the share of the first one.
            client.memory.change(self.shared.memory.of_user(username));
        }
    }
}

fn prepare(socket: &OwnedFd) -> Result<(), Errno> {
    rustix::net::sockopt::set_tcp_nodelay(socket, true)?;
    rustix::net::sockopt::set_socket_keepalive(socket, true)?;
    rustix::net::sockopt::set_tcp_keepidle(socket, Duration::from_secs(60))?;
    rustix::net::sockopt::set_tcp_keepintvl(socket, Duration::from_secs(10))?;
    rustix::net::sockopt::set_tcp_keepcnt(socket, 6)
}
