//! The present by two clocks, both read by the caller.
//!
//! Timeouts are measured with [`Instant`], which never steps. What a peer sees is wall-clock time, a [`FileTime`], which an
//! administrator or NTP may set at any moment. The types differ, so one cannot be taken for the other.

use std::time::{Duration, Instant};

use crate::wire::FileTime;

/// One moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// By the clock that never steps: for every timeout.
    pub instant: Instant,
    /// By the wall clock: for what peers and administrators see.
    pub wall: FileTime,
}

/// When something is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Due {
    /// At once.
    Now,
    /// Not before this.
    At(Instant),
}

/// Milliseconds of a limit.
pub(crate) const fn ms(ms: u32) -> Duration {
    Duration::from_millis(ms as u64)
}
