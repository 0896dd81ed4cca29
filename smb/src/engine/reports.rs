//! Reports from a connection to its event loop: the end of the connection, and events for the log or metrics.

use std::sync::Arc;
use std::time::Instant;

use crate::engine::activity::Activity;
use crate::status::NtStatus;
use crate::wire::Command;

/// The reason to terminate a connection immediately, without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("peer broke the protocol: {0}")]
pub struct Disconnect(pub &'static str);

/// An event for the log or a metric.
#[derive(Clone, Debug)]
pub enum Event {
    /// A dialect was negotiated.
    Negotiated {
        /// "3.1.1" …
        dialect: &'static str,
    },
    /// A session was set up.
    SessionEstablished {
        /// SessionId.
        session_id: u64,
        /// The user.
        username: String,
    },
    /// Authentication failed; the reason is for the log only.
    AuthenticationFailed {
        /// The user that the client claimed to be; empty if authentication did not get that far.
        username: String,
        /// Why.
        reason: String,
    },
    /// A session ended with its last channel, which was this connection.
    SessionClosed {
        /// SessionId.
        session_id: u64,
    },
    /// The connection was bound to a session as a further channel.
    ChannelBound {
        /// SessionId.
        session_id: u64,
        /// The user.
        username: String,
    },
    /// The connection is no longer a channel of a session that still has other channels.
    ChannelClosed {
        /// SessionId.
        session_id: u64,
    },
    /// A tree connect was refused.
    TreeRefused {
        /// The user.
        username: String,
        /// The share asked for.
        share: String,
        /// The status of the response.
        status: NtStatus,
    },
    /// The connection ends so that its client reconnects.
    Leaving {
        /// Why, for the log.
        why: &'static str,
    },
    /// A request was answered.
    Completed {
        /// The command.
        command: Command,
        /// The status of the response.
        status: NtStatus,
        /// When the request arrived.
        began: Instant,
        /// Payload read or written, in bytes.
        payload_bytes: u32,
        /// Whether the payload was transferred by RDMA rather than in messages.
        by_rdma: bool,
        /// Counters of the volume that the request was for.
        activity: Option<Arc<Activity>>,
    },
}
