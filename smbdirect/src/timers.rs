//! What a connection waits for, and until when ([MS-SMBD] 3.1.2).

use std::time::{Duration, Instant};

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
    /// The rest of a message.
    pub(crate) rest: Option<Instant>,
    /// The end of a shutdown.
    pub(crate) shutdown: Option<Instant>,
}

impl Timers {
    /// The first deadline.
    pub(crate) fn next(&self) -> Option<Instant> {
        [self.negotiation, self.idle, self.credits, self.rest, self.shutdown].into_iter().flatten().min()
    }
}

/// How long the peer has been waited for during the message that it has begun.
#[derive(Debug, Default)]
pub(crate) struct Rest {
    spent: Duration,
    /// It is being waited for since then.
    since: Option<Instant>,
}

impl Rest {
    /// It is waited for; until when, where it may take `time_max` in all.
    pub(crate) fn wait(&mut self, now: Instant, time_max: Duration) -> Instant {
        *self.since.get_or_insert(now) + time_max.saturating_sub(self.spent)
    }

    /// It cannot go on.
    pub(crate) fn pause(&mut self, now: Instant) {
        self.spent += self.since.take().map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
    }
}

/// Whether a deadline has come.
pub(crate) fn is_due(deadline: Option<Instant>, now: Instant) -> bool {
    deadline.is_some_and(|deadline| deadline <= now)
}
