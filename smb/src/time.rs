//! The current time by two clocks, both read by the caller.
//!
//! Timeouts are measured with [`Instant`], which never steps. Peers see wall-clock time, a [`FileTime`], which an
//! administrator or NTP can set at any moment. The types differ, so one cannot be mistaken for the other.

use std::time::{Duration, Instant};

use crate::wire::FileTime;

/// One moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Monotonic clock: for every timeout.
    pub instant: Instant,
    /// Wall clock: for times that peers and administrators see.
    pub wall: FileTime,
}

/// When the next action is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Due {
    /// Immediately.
    Now,
    /// Not before this time.
    At(Instant),
}

/// Converts a limit in milliseconds.
pub(crate) const fn ms(ms: u32) -> Duration {
    Duration::from_millis(ms as u64)
}
