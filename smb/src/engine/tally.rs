//! Usage of a shared resource by one tenant, counted against the limit of that tenant.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A count with a limit.
pub(crate) struct Tally {
    used: Arc<AtomicU64>,
    max: u64,
}

/// A part of a [`Tally`] that is taken until this is dropped.
#[must_use = "what is taken is given back when this is dropped"]
pub(crate) struct Taken {
    used: Arc<AtomicU64>,
    amount: u64,
}

impl Tally {
    pub(crate) fn new(max: u64) -> Self {
        Self { used: Arc::default(), max }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes `amount`, or nothing if less than that is left.
    pub(crate) fn take(&self, amount: u64) -> Option<Taken> {
        let more = |used: u64| used.checked_add(amount).filter(|sum| *sum <= self.max);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Taken { used: Arc::clone(&self.used), amount })
    }
}

impl Taken {
    /// Merges `other`, of the same tally, into this.
    pub(crate) fn join(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.used, &other.used), "of one tally");
        self.amount += std::mem::take(&mut other.amount);
    }

    /// Gives back all but `amount`.
    pub(crate) fn keep(&mut self, amount: u64) {
        self.give_back(self.amount.saturating_sub(amount));
    }

    /// Gives a part of it back.
    pub(crate) fn give_back(&mut self, amount: u64) {
        let amount = amount.min(self.amount);
        self.amount -= amount;
        self.used.fetch_sub(amount, Ordering::AcqRel);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.used.fetch_sub(self.amount, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_is_never_exceeded_and_drop_returns_everything() {
        let tally = Tally::new(10);
        let first = tally.take(7).expect("there is enough");
        assert!(tally.take(4).is_none() && tally.take(u64::MAX).is_none());
        let mut second = tally.take(3).expect("just enough");
        drop(first);
        assert!(tally.take(8).is_none());
        let mut third = tally.take(7).expect("it was returned");
        second.give_back(2);
        third.join(second);
        assert!(tally.take(3).is_none() && tally.take(2).is_some());
        third.keep(9);
        assert!(tally.take(3).is_none(), "nothing to return");
        third.keep(1);
        assert!(tally.take(10).is_none() && tally.take(9).is_some());
        drop(third);
        assert_eq!(tally.used.load(Ordering::Relaxed), 0);
    }
}
