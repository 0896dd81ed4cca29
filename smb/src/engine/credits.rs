//! The window of message ids that a client may use ([MS-SMB2] 3.3.1.1, 3.3.5.2.3).

use crate::limits::CREDITS_MAX;

/// Maximum span of open message ids: a client that never sends one of them must not grow the window without limit.
const SPAN_MAX: u64 = 2 * CREDITS_MAX as u64;
const WORDS: usize = (SPAN_MAX / 64) as usize;

/// Message ids that have been granted and not yet used.
pub(crate) struct CreditWindow {
    /// Every id below has been used.
    low: u64,
    /// First id that has not been granted.
    high: u64,
    /// Ids in `low..high` that have been used, one bit each at `id % SPAN_MAX`.
    used: Box<[u64; WORDS]>,
    /// Granted and not used.
    available: u64,
}

impl CreditWindow {
    /// Creates a window of one credit: message id 0.
    pub(crate) fn new() -> Self {
        Self { low: 0, high: 1, used: Box::new([0; WORDS]), available: 1 }
    }

    fn bit(id: u64) -> (usize, u64) {
        let at = id % SPAN_MAX;
        ((at / 64) as usize, 1 << (at % 64))
    }

    /// Uses `charge` consecutive ids from `id`. False if any of them was not granted or was used before: the connection
    /// must be terminated ([MS-SMB2] 3.3.5.2.3).
    pub(crate) fn consume(&mut self, id: u64, charge: u16) -> bool {
        let charge = u64::from(charge.max(1));
        let Some(end) = id.checked_add(charge) else { return false };
        if id < self.low || end > self.high {
            return false;
        }
        if (id..end).any(|i| {
            let (word, bit) = Self::bit(i);
            self.used[word] & bit != 0
        }) {
            return false;
        }
        for i in id..end {
            let (word, bit) = Self::bit(i);
            self.used[word] |= bit;
        }
        self.available -= charge;
        while self.low < self.high {
            let (word, bit) = Self::bit(self.low);
            if self.used[word] & bit == 0 {
                break;
            }
            self.used[word] &= !bit;
            self.low += 1;
        }
        true
    }

    /// Grants as many of `asked` credits as the limits allow, and at least one if the client has none.
    pub(crate) fn grant(&mut self, asked: u16) -> u16 {
        let room = (u64::from(CREDITS_MAX) - self.available).min(SPAN_MAX - (self.high - self.low));
        let granted = u64::from(asked.max(1)).min(room);
        self.high += granted;
        self.available += granted;
        granted as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_ids_are_used_once_and_within_the_window() {
        let mut w = CreditWindow::new();
        assert!(!w.consume(1, 1), "id 1 was never granted");
        assert!(w.consume(0, 1));
        assert!(!w.consume(0, 1), "id 0 was used");
        assert_eq!(w.grant(10), 10);
        assert!(w.consume(5, 2), "out of order is fine");
        assert!(!w.consume(6, 1));
        assert!(w.consume(1, 4));
        assert!(w.consume(7, 4));
        assert!(!w.consume(11, 1), "nothing left");
        assert_eq!(w.grant(0), 1, "a client without credits gets one");
        assert!(w.consume(11, 1));
    }

    #[test]
    fn credit_grants_stop_at_the_limit_and_the_window_is_bounded() {
        let mut w = CreditWindow::new();
        assert!(w.consume(0, 1));
        assert_eq!(w.grant(u16::MAX), CREDITS_MAX);
        assert_eq!(w.grant(1), 0);
        // Id 1 is never used: the window can span at most SPAN_MAX ids.
        let mut id = 2;
        loop {
            if !w.consume(id, 1) {
                break;
            }
            id += 1;
            w.grant(1);
            assert!(id <= SPAN_MAX + 2);
        }
        assert_eq!(id, SPAN_MAX + 1);
        assert!(w.consume(1, 1), "a delayed id is still valid");
        assert!(w.grant(1) == 1);
    }
}
