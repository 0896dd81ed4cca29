//! What a connection waits for, and until when ([MS-SMBD] 3.1.2).

use std::time::Instant;

/// Connection.KeepaliveRequested ([MS-SMBD] 3.1.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeepAlive {
    /// The peer is not being asked.
    None,
    /// It is to be asked with the next message.
    Pending,
    /// It was asked.
    Sent,
}

/// Deadlines; none where nothing is waited for.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    /// The end of the negotiation.
    pub(crate) negotiation: Option<Instant>,
    /// Asking for a sign of life, or having got none.
    pub(crate) idle: Option<Instant>,
    /// A send credit.
    pub(crate) credits: Option<Instant>,
    /// The end of a shutdown.
    pub(crate) shutdown: Option<Instant>,
}

impl Timers {
    /// The first deadline.
    pub(crate) fn next(&self) -> Option<Instant> {
        [self.negotiation, self.idle, self.credits, self.shutdown].into_iter().flatten().min()
    }
}

/// Whether a deadline has come.
pub(crate) fn is_due(deadline: Option<Instant>, now: Instant) -> bool {
    deadline.is_some_and(|deadline| deadline <= now)
}
