//! The state of one connection in its event loop.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use forebay_smb::engine::{Connection, ConnectionId};
use forebay_smb::fs::{FsOp, FsOpKind, OpId};
use forebay_smb::limits::PINNED_BYTES_PER_CONNECTION_MAX;

use super::turn;
use crate::io::{Purpose, Token};
use crate::lanes::Share;
use crate::limits::{
    AUTHENTICATION_TIME_MAX, FS_OPS_IN_FLIGHT_MAX, SEND_QUEUE_BYTES_MAX, WRITE_BYTES_IN_FLIGHT_MAX,
};
use crate::memory::Allowance;
use crate::qos::Priority;
use crate::transport::smb_direct::SmbDirect;
use crate::transport::tcp::TcpLink;

pub(super) struct Client {
    pub(super) id: ConnectionId,
    pub(super) link: Link,
    pub(super) peer: SocketAddr,
    pub(super) protocol: Connection,
    pub(super) accepted: Instant,
    pub(super) authenticated: bool,
    /// The source of its buffers.
    pub(super) memory: Allowance,
    /// READs that wait for earlier ones to be sent, for memory or for the next turn.
    pub(super) reads_waiting: VecDeque<FsOp>,
    /// WRITEs that wait for memory or for the next turn.
    pub(super) writes_waiting: VecDeque<FsOp>,
    /// The lists of the event loop that it is in.
    pub(super) queued: turn::Queued,
    /// WRITEs with data that are being fetched from the peer's memory.
    pub(super) fetching: HashMap<OpId, FsOpKind>,
    pub(super) read_bytes: u64,
    pub(super) write_bytes: u64,
    /// Priority of the volume of the most recent operation.
    pub(super) priority: Priority,
    /// Unanswered operations, except for those that wait in `lanes` or `reads_waiting`.
    pub(super) ops: usize,
    /// Its operations in the lanes, and those that wait for room there.
    pub(super) lanes: Share<FsOp>,
    pub(super) closing: bool,
    /// Set once nothing more is sent. Until this time, received data are discarded, so that the peer receives the last answers.
    pub(super) leaving: Option<Instant>,
}

/// The transport of a client's frames.
pub(super) enum Link {
    Tcp(Box<TcpLink>),
    SmbDirect(Box<SmbDirect>),
}

impl Link {
    /// Bytes of responses that are not sent.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Tcp(link) => link.queue.bytes(),
            Self::SmbDirect(link) => link.bytes(),
        }
    }

    /// Whether the engine has no operation for it.
    pub(super) fn is_idle(&self) -> bool {
        match self {
            Self::Tcp(link) => link.sending.is_none() && !link.receiver.is_waiting(),
            Self::SmbDirect(_) => true,
        }
    }
}

impl Client {
    pub(super) fn token(&self, purpose: Purpose) -> Token {
        Token { connection: self.id.0, purpose }
    }

    /// Whether all requests are answered and all answers are sent.
    pub(super) fn is_idle(&self) -> bool {
        !self.closing && self.protocol.requests_in_flight() == 0 && self.link.bytes() == 0
    }

    /// Whether no more requests are accepted until earlier ones are done.
    pub(super) fn is_held_back(&self) -> bool {
        self.link.bytes() > SEND_QUEUE_BYTES_MAX
            || self.write_bytes > WRITE_BYTES_IN_FLIGHT_MAX
            || self.protocol.pinned_bytes() > PINNED_BYTES_PER_CONNECTION_MAX
            || self.ops + self.reads_waiting.len() + self.writes_waiting.len() > FS_OPS_IN_FLIGHT_MAX
            || self.lanes.is_waiting()
    }
}

/// Returns the reason to end a connection now, if there is one.
pub(super) fn overdue(
    client: &mut Client,
    draining: Option<Instant>,
    stall_time_max: Duration,
) -> Option<&'static str> {
    let now = Instant::now();
    if let Some(until) = client.leaving {
        return (now >= until).then_some("the peer does not take leave");
    }
    if client.closing {
        return None;
    }
    if let Some(until) = draining {
        return (now >= until).then_some("the server is shutting down");
    }
    if !client.authenticated && client.accepted.elapsed() > AUTHENTICATION_TIME_MAX {
        return Some("not logged in in time");
    }
    let Link::Tcp(link) = &mut client.link else { return None };
    if link.is_silent(now) {
        return Some("the peer's machine acknowledges nothing");
    }
    if link.receiver.time_of_rest(now) > stall_time_max {
        return Some("the peer does not send the rest of a frame");
    }
    let stalled = link.sending.is_some_and(|since| since.elapsed() > stall_time_max);
    stalled.then_some("the peer takes no data")
}
