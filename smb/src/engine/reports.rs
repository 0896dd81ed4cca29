//! What a connection reports to its event loop: its end, and what is worth a log line or a metric.

use std::sync::Arc;
use std::time::Instant;

use crate::engine::activity::Activity;
use crate::status::NtStatus;
use crate::wire::Command;

/// Why a connection must be ended now, without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("peer broke the protocol: {0}")]
pub struct Disconnect(pub &'static str);

/// Something worth a log line or a metric.
#[derive(Clone, Debug)]
pub enum Event {
    /// A dialect was agreed on.
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
        /// The user that the client claimed to be; empty if it did not come that far.
        username: String,
        /// Why.
        reason: String,
    },
    /// A session ended: with its last channel, which was this connection.
    SessionClosed {
        /// SessionId.
        session_id: u64,
    },
    /// The connection became a further channel of a session.
    ChannelBound {
        /// SessionId.
        session_id: u64,
        /// The user.
        username: String,
    },
    /// The connection is no channel of a session any more, but others are.
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
        /// With what.
        status: NtStatus,
    },
    /// The connection is to end so that its client connects again.
    Leaving {
        /// Why, for the log.
        why: &'static str,
    },
    /// A request was answered.
    Completed {
        /// The command.
        command: Command,
        /// The answer.
        status: NtStatus,
        /// When it came in.
        began: Instant,
        /// Payload read or written, in bytes.
        payload_bytes: u32,
        /// Which went by RDMA rather than in messages.
        by_rdma: bool,
        /// Counts of the volume that it was for.
        activity: Option<Arc<Activity>>,
    },
}
