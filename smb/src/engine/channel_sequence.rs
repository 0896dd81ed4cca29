//! Open.ChannelSequence, Open.OutstandingRequestCount and Open.OutstandingPreRequestCount ([MS-SMB2] 3.3.1.10,
//! 3.3.5.2.10).
//!
//! A client that has lost a channel resends the requests that it has no response for, under the next channel sequence
//! number. Requests that were sent under an earlier number can still be in flight. A change that arrives late must not undo
//! later changes, and a request must not be executed again while its first execution is in progress.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::limits;

/// Largest difference at which a number is no older than another ([MS-SMB2] 3.3.5.2.10, unsigned, 16 bits).
const NEWER_MAX: u16 = 0x7fff;
const COUNT_BITS: u32 = 24;
const COUNT_MAX: u64 = (1 << COUNT_BITS) - 1;

const _: () = assert!(
    limits::CHANNELS_PER_SESSION_MAX as u64 * limits::CREDITS_MAX as u64 <= COUNT_MAX,
    "every request that can be in flight is counted"
);

/// Counts the requests in flight on one open. Channels count without a lock.
pub(crate) struct ChannelSequence(AtomicU64);

/// Open.ChannelSequence, Open.OutstandingRequestCount and Open.OutstandingPreRequestCount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    sequence: u16,
    now: u64,
    before: u64,
}

impl Counts {
    fn unpack(bits: u64) -> Self {
        Self {
            sequence: (bits >> (2 * COUNT_BITS)) as u16,
            now: bits >> COUNT_BITS & COUNT_MAX,
            before: bits & COUNT_MAX,
        }
    }

    fn pack(self) -> u64 {
        let (now, before) = (self.now.min(COUNT_MAX), self.before.min(COUNT_MAX));
        u64::from(self.sequence) << (2 * COUNT_BITS) | now << COUNT_BITS | before
    }
}

/// Verdict on a request, by its channel sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The request is counted: [`ChannelSequence::ended`] must follow.
    Counted,
    /// The request is late, or replays a request that may still be in flight. WRITE, SET_INFO and IOCTL fail with
    /// STATUS_FILE_NOT_AVAILABLE; other commands continue uncounted.
    Stale,
}

impl ChannelSequence {
    /// Creates the sequence of an open that a CREATE with `sequence` made.
    pub(crate) fn new(sequence: u16) -> Self {
        Self(AtomicU64::new(Counts { sequence, now: 0, before: 0 }.pack()))
    }

    /// Checks and counts a request.
    pub(crate) fn begun(&self, sequence: u16, replay: bool) -> Verdict {
        let mut verdict = Verdict::Stale;
        let update = |bits| {
            let mut counts = Counts::unpack(bits);
            let newer = sequence.wrapping_sub(counts.sequence);
            verdict = Verdict::Counted;
            if newer > NEWER_MAX {
                verdict = Verdict::Stale;
            } else if newer > 0 {
                counts.before += counts.now;
                counts.sequence = sequence;
                counts.now = 0;
            }
            if replay && counts.before > 0 {
                verdict = Verdict::Stale;
            }
            if verdict == Verdict::Counted {
                counts.now += 1;
            }
            Some(counts.pack())
        };
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, update);
        verdict
    }

    /// Restarts at `sequence` for a client that has reconnected. Requests in flight count as sent before.
    pub(crate) fn restart(&self, sequence: u16) {
        let update = |bits| {
            let counts = Counts::unpack(bits);
            Some(Counts { sequence, now: 0, before: counts.before + counts.now }.pack())
        };
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, update);
    }

    /// Ends a request that was counted under `sequence`: it has been answered, or no client is left to answer.
    pub(crate) fn ended(&self, sequence: u16) {
        let update = |bits| {
            let mut counts = Counts::unpack(bits);
            // Numbers wrap: an old number can equal the current one again.
            if counts.before > 0 && (counts.sequence != sequence || counts.now == 0) {
                counts.before -= 1;
            } else {
                counts.now = counts.now.saturating_sub(1);
            }
            Some(counts.pack())
        };
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, update);
    }

    #[cfg(test)]
    fn counts(&self) -> Counts {
        Counts::unpack(self.0.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Verdict::{Counted, Stale};
    use super::*;

    #[test]
    fn older_sequence_numbers_are_stale_and_comparison_wraps() {
        let open = ChannelSequence::new(0);
        for (sequence, verdict) in [
            (0, Counted),
            (0x8000, Stale),
            (0xffff, Stale),
            (0x7fff, Counted),
            (0x7ffe, Stale),
            (0, Stale),
            (0x8000, Counted),
            (0xffff, Counted),
            (0, Counted),
            (0xffff, Stale),
        ] {
            for replay in [false, true] {
                assert_eq!(open.begun(sequence, replay), verdict, "{sequence:#x}");
                if verdict == Counted {
                    open.ended(sequence);
                }
            }
        }
    }

    #[test]
    fn replays_are_stale_while_earlier_requests_are_in_flight() {
        let open = ChannelSequence::new(5);
        assert_eq!(open.begun(5, false), Counted);
        // The channel is lost; the request continues at the backend.
        assert_eq!(open.begun(6, true), Stale);
        assert_eq!(open.begun(6, true), Stale);
        assert_eq!(open.begun(6, false), Counted, "a new request does not wait");
        open.ended(5);
        assert_eq!(open.begun(6, true), Counted);
        open.ended(6);
        open.ended(6);
        assert_eq!(open.counts(), Counts { sequence: 6, now: 0, before: 0 });
    }

    #[test]
    fn in_flight_request_stays_counted_after_the_sequence_wraps() {
        let open = ChannelSequence::new(0);
        assert_eq!(open.begun(0, false), Counted);
        for sequence in [30_000, 60_000, 0] {
            assert_eq!(open.begun(sequence, false), Counted);
            open.ended(sequence);
        }
        assert_eq!(open.counts(), Counts { sequence: 0, now: 0, before: 1 });
        open.ended(0);
        assert_eq!(open.counts(), Counts { sequence: 0, now: 0, before: 0 });
    }

    proptest! {
        #[test]
        fn counts_match_the_requests_in_flight(
            steps in prop::collection::vec((any::<bool>(), 0..4_u16, any::<bool>(), any::<prop::sample::Index>()), 1..200),
        ) {
            let open = ChannelSequence::new(0);
            let mut current = 0_u16;
            let mut in_flight: Vec<u16> = Vec::new();
            for (begin, ahead, replay, which) in steps {
                if begin {
                    let sequence = current.wrapping_add(ahead).wrapping_sub(1);
                    let earlier = in_flight.iter().any(|s| *s != sequence);
                    let verdict = open.begun(sequence, replay);
                    prop_assert_eq!(verdict == Counted, ahead > 0 && !(replay && earlier));
                    if ahead > 0 {
                        current = sequence;
                    }
                    if verdict == Counted {
                        in_flight.push(sequence);
                    }
                } else if !in_flight.is_empty() {
                    open.ended(in_flight.swap_remove(which.index(in_flight.len())));
                }
                let now = in_flight.iter().filter(|s| **s == current).count() as u64;
                let before = in_flight.len() as u64 - now;
                prop_assert_eq!(open.counts(), Counts { sequence: current, now, before });
            }
        }
    }
}
