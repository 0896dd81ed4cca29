//! Deadlines of a connection ([MS-SMBD] 3.1.2).

use std::time::{Duration, Instant};

/// Connection.KeepaliveRequested ([MS-SMBD] 3.1.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeepAlive {
    /// No keep-alive is pending.
    None,
    /// To be requested with the next message.
    Pending,
    /// Requested.
    Sent,
}

/// Deadlines; `None` for those that are not active.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    /// The end of the negotiation.
    pub(crate) negotiation: Option<Instant>,
    /// Sending a keep-alive request, or having received no answer to it.
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

/// Time spent waiting for the rest of the message that the peer has begun.
#[derive(Debug, Default)]
pub(crate) struct Rest {
    spent: Duration,
    /// Start of the current wait.
    since: Option<Instant>,
}

impl Rest {
    /// Starts or continues the wait. Returns its deadline, given `time_max` in total.
    pub(crate) fn wait(&mut self, now: Instant, time_max: Duration) -> Instant {
        *self.since.get_or_insert(now) + time_max.saturating_sub(self.spent)
    }

    /// The peer cannot continue.
    pub(crate) fn pause(&mut self, now: Instant) {
        self.spent += self.since.take().map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
    }
}

/// Whether a deadline has passed.
pub(crate) fn is_due(deadline: Option<Instant>, now: Instant) -> bool {
    deadline.is_some_and(|deadline| deadline <= now)
}
