//! Mail from one connection to another.

use crate::wire::oplock_break::Notification;

/// Identifies a connection for as long as the server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// Work for one connection that another connection causes.
#[derive(Debug)]
pub enum Mail {
    /// A parked request can continue.
    Wake(u64),
    /// A session of this connection was closed elsewhere. The connection removes it, and ends if no session is left.
    SessionClosed(u64),
    /// A session of this connection ended on another of its channels. The connection removes it.
    SessionEnded(u64),
    /// The client must give up what it may cache.
    Break(BreakNotice),
}

/// An oplock or lease break on its way to a client ([MS-SMB2] 3.3.4.6, 3.3.4.7).
#[derive(Clone, Debug)]
pub struct BreakNotice {
    /// The session with the channel that carries the notification.
    pub(crate) session_id: u64,
    /// Sessions with channels that can carry it if that channel is gone.
    pub(crate) sessions: Vec<u64>,
    /// Channels that were tried so far.
    pub(crate) tried: Vec<ConnectionId>,
    pub(crate) notification: Notification,
}

/// A request that waits, and its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) connection: ConnectionId,
    pub(crate) token: u64,
}
