//! The jobs of one connection in the lanes, and those that wait for room there.

use std::collections::VecDeque;

use super::{Lane, Queues};

/// A connection's share of the lanes. While anything waits here, nothing more is received from its peer.
#[derive(Debug)]
pub struct Share<T> {
    lanes: [Part<T>; Lane::ALL.len()],
    /// Total of all lanes.
    waiting: usize,
}

#[derive(Debug)]
struct Part<T> {
    /// Submitted to the lane and not ended.
    begun: usize,
    waiting: VecDeque<T>,
}

impl<T> Default for Share<T> {
    fn default() -> Self {
        Self { lanes: Lane::ALL.map(|_| Part { begun: 0, waiting: VecDeque::new() }), waiting: 0 }
    }
}

impl<T> Share<T> {
    /// Whether anything waits for room.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Queues an item; [`Share::next`] returns it.
    pub fn queue(&mut self, lane: Lane, what: T) {
        self.lanes[lane as usize].waiting.push_back(what);
        self.waiting += 1;
    }

    /// Returns the next item that may start, and its lane. It counts as begun.
    pub fn next(&mut self, queues: &Queues) -> Option<(Lane, T)> {
        if self.waiting == 0 {
            return None;
        }
        let next = Lane::ALL.into_iter().find_map(|lane| {
            let part = &mut self.lanes[lane as usize];
            if part.waiting.is_empty() || !queues.has_room(lane, part.begun) {
                return None;
            }
            part.begun += 1;
            part.waiting.pop_front().map(|what| (lane, what))
        });
        self.waiting -= usize::from(next.is_some());
        next
    }

    /// Counts a job that was submitted to a lane without checking for room.
    pub fn begun(&mut self, lane: Lane) {
        self.lanes[lane as usize].begun += 1;
    }

    /// Records that a job in a lane has ended.
    pub fn ended(&mut self, lane: Lane) {
        self.lanes[lane as usize].begun -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::lanes::{Lanes, Origin};
    use crate::limits::{LANE_JOBS_GUARANTEED, LANE_JOBS_MAX, LANE_JOBS_PER_CONNECTION_MAX};

    fn begin_all(share: &mut Share<usize>, queues: &Queues) -> Vec<usize> {
        std::iter::from_fn(|| share.next(queues)).map(|(_, what)| what).collect()
    }

    #[test]
    fn jobs_of_a_connection_per_lane_are_limited_and_stay_in_order() {
        let lanes = Lanes::start(1).expect("threads");
        let queues = lanes.queues();
        let mut share = Share::default();
        for what in 0..LANE_JOBS_PER_CONNECTION_MAX + 3 {
            share.queue(Lane::Sync, what);
        }
        assert_eq!(begin_all(&mut share, queues), (0..LANE_JOBS_PER_CONNECTION_MAX).collect::<Vec<_>>());
        assert!(share.is_waiting());
        share.queue(Lane::LookUp, 7);
        assert_eq!(share.next(queues), Some((Lane::LookUp, 7)), "another lane has room");
        assert_eq!(share.next(queues), None);
        for next in 0..3 {
            share.ended(Lane::Sync);
            assert_eq!(share.next(queues), Some((Lane::Sync, LANE_JOBS_PER_CONNECTION_MAX + next)));
        }
        assert!(!share.is_waiting());
    }

    #[test]
    fn connection_keeps_its_guaranteed_share_of_a_full_lane() {
        let lanes = Lanes::start(1).expect("threads");
        let queues = lanes.queues();
        let (release, held) = channel::<()>();
        queues.submit(Lane::LookUp, Origin::Connection(1), move || {
            let _ = held.recv();
        });
        for _ in 0..=LANE_JOBS_MAX {
            queues.submit(Lane::LookUp, Origin::Connection(1), || ());
        }
        let mut share = Share::default();
        for what in 0..2 * LANE_JOBS_GUARANTEED {
            share.queue(Lane::LookUp, what);
        }
        assert_eq!(begin_all(&mut share, queues).len(), LANE_JOBS_GUARANTEED);
        drop(release);
    }
}
