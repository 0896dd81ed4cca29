//! What one connection has for another.

use crate::wire::oplock_break::Notification;

/// Identifies a connection for as long as the server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// What one connection has to do because of another.
#[derive(Debug)]
pub enum Mail {
    /// A parked request may go on.
    Wake(u64),
    /// A session of this connection was closed elsewhere: forget it, and end the connection if none is left.
    SessionClosed(u64),
    /// A session of this connection ended on another of its channels: forget it.
    SessionEnded(u64),
    /// The client is to give up what it may cache.
    Break(BreakNotice),
}

/// An oplock or lease break on its way to a client ([MS-SMB2] 3.3.4.6, 3.3.4.7).
#[derive(Clone, Debug)]
pub struct BreakNotice {
    /// The session with the channel that it goes on.
    pub(crate) session_id: u64,
    /// Sessions with channels that it may go on, where that one is gone.
    pub(crate) sessions: Vec<u64>,
    /// Channels that it was given to.
    pub(crate) tried: Vec<ConnectionId>,
    pub(crate) notification: Notification,
}

/// A request that waits, and on which connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) connection: ConnectionId,
    pub(crate) token: u64,
}
