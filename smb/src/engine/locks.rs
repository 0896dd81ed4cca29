//! Byte-range locks of one file ([MS-FSA] 2.1.1.10, 2.1.4.10, 2.1.5.8).

use crate::ids::FileId;
use crate::limits;
use crate::status::NtStatus;

/// A range and how it is, or is to be, locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockRange {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) exclusive: bool,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    owner: FileId,
    range: LockRange,
}

/// The locks that are held.
#[derive(Default)]
pub(crate) struct LockList(Vec<Held>);

/// Whether two ranges meet. One of no length lies between bytes: it meets a range that has bytes on both sides of it,
/// and never another one of no length.
fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    // Ends beyond 2^64 were refused when the lock was asked for; reads and writes end far below.
    let end = |(offset, length): (u64, u64)| u128::from(offset) + u128::from(length);
    match (a.1, b.1) {
        (0, 0) => false,
        (0, _) => b.0 < a.0 && u128::from(a.0) < end(b),
        (_, 0) => a.0 < b.0 && u128::from(b.0) < end(a),
        _ => u128::from(a.0) < end(b) && u128::from(b.0) < end(a),
    }
}

impl LockRange {
    fn span(self) -> (u64, u64) {
        (self.offset, self.length)
    }

    /// Whether this lock of `owner` stands in the way of a lock `other` of `asker`. A shared lock may be put on one's
    /// own exclusive lock; nothing exclusive is ever put on anything.
    pub(crate) fn excludes(self, owner: FileId, other: LockRange, asker: FileId) -> bool {
        overlap(self.span(), other.span()) && (other.exclusive || self.exclusive && owner != asker)
    }
}

impl LockList {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn count(&self, owner: FileId) -> usize {
        self.0.iter().filter(|l| l.owner == owner).count()
    }

    pub(crate) fn remove_owner(&mut self, owner: FileId) {
        self.0.retain(|l| l.owner != owner);
    }

    /// Whether `owner` could have `range` now.
    pub(crate) fn grants(&self, owner: FileId, range: LockRange) -> bool {
        !self.0.iter().any(|held| held.range.excludes(held.owner, range, owner))
    }

    /// Takes all of `ranges`, each after those before it, or none.
    pub(crate) fn lock(&mut self, owner: FileId, ranges: &[LockRange]) -> Result<(), NtStatus> {
        if self.count(owner) + ranges.len() > limits::LOCKS_PER_OPEN_MAX {
            return Err(NtStatus::INSUFFICIENT_RESOURCES);
        }
        let before = self.0.len();
        for range in ranges {
            if !self.grants(owner, *range) {
                self.0.truncate(before);
                return Err(NtStatus::LOCK_NOT_GRANTED);
            }
            self.0.push(Held { owner, range: *range });
        }
        Ok(())
    }

    /// Releases one lock of exactly this range, an exclusive one before a shared one.
    pub(crate) fn unlock(&mut self, owner: FileId, offset: u64, length: u64) -> bool {
        let find = |exclusive| {
            self.0.iter().position(|l| l.owner == owner && l.range == LockRange { offset, length, exclusive })
        };
        match find(true).or_else(|| find(false)) {
            Some(at) => {
                self.0.remove(at);
                true
            }
            None => false,
        }
    }

    /// Reading is forbidden by others' exclusive locks.
    pub(crate) fn forbids_read(&self, reader: FileId, offset: u64, length: u64) -> bool {
        self.0
            .iter()
            .any(|l| l.range.exclusive && l.owner != reader && overlap(l.range.span(), (offset, length)))
    }

    /// Writing is forbidden by others' exclusive locks and by everybody's shared ones.
    pub(crate) fn forbids_write(&self, writer: FileId, offset: u64, length: u64) -> bool {
        self.0
            .iter()
            .any(|l| (!l.range.exclusive || l.owner != writer) && overlap(l.range.span(), (offset, length)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: FileId = FileId { persistent: 1, volatile: 1 };
    const B: FileId = FileId { persistent: 2, volatile: 2 };

    fn exclusive(offset: u64, length: u64) -> LockRange {
        LockRange { offset, length, exclusive: true }
    }

    fn shared(offset: u64, length: u64) -> LockRange {
        LockRange { offset, length, exclusive: false }
    }

    fn second_is_granted(first: LockRange, second: LockRange) -> bool {
        let mut list = LockList::default();
        list.lock(A, &[first]).expect("the first is free");
        list.lock(B, &[second]).is_ok()
    }

    #[test]
    fn a_lock_without_length_lies_between_bytes() {
        let zero = exclusive(10, 0);
        for (range, granted) in [
            ((10, 0), true),
            ((9, 1), true),
            ((10, 1), true),
            ((11, 1), true),
            ((9, 2), false),
            ((10, 2), true),
            ((9, 3), false),
        ] {
            let other = exclusive(range.0, range.1);
            assert_eq!(second_is_granted(zero, other), granted, "{range:?} after");
            assert_eq!(second_is_granted(other, zero), granted, "{range:?} before");
        }
    }

    #[test]
    fn shared_stacks_on_ones_own_and_exclusive_on_nothing() {
        let mut list = LockList::default();
        list.lock(A, &[exclusive(0, 10)]).expect("free");
        list.lock(A, &[shared(0, 10)]).expect("shared on one's own exclusive");
        assert_eq!(list.lock(B, &[shared(5, 1)]), Err(NtStatus::LOCK_NOT_GRANTED));
        assert_eq!(list.lock(A, &[exclusive(0, 10)]), Err(NtStatus::LOCK_NOT_GRANTED));
        assert!(list.unlock(A, 0, 10), "the exclusive one goes first");
        list.lock(B, &[shared(5, 1)]).expect("only shared ones are left");
    }

    #[test]
    fn several_are_taken_together_or_not_at_all() {
        let mut list = LockList::default();
        list.lock(B, &[exclusive(20, 5)]).expect("free");
        assert_eq!(list.lock(A, &[exclusive(0, 5), exclusive(24, 1)]), Err(NtStatus::LOCK_NOT_GRANTED));
        assert_eq!(list.count(A), 0);
        assert_eq!(
            list.lock(A, &[exclusive(0, 5), exclusive(4, 1)]),
            Err(NtStatus::LOCK_NOT_GRANTED),
            "they must not overlap each other either"
        );
    }

    #[test]
    fn unlock_asks_for_the_exact_range_and_owner() {
        let mut list = LockList::default();
        list.lock(A, &[exclusive(0, 10)]).expect("free");
        assert!(!list.unlock(A, 0, 9));
        assert!(!list.unlock(B, 0, 10));
        assert!(list.unlock(A, 0, 10));
        assert!(!list.unlock(A, 0, 10));
    }

    #[test]
    fn reading_and_writing_respect_locks() {
        let mut list = LockList::default();
        list.lock(A, &[exclusive(0, 10)]).expect("free");
        assert!(!list.forbids_read(A, 0, 10) && !list.forbids_write(A, 0, 10));
        assert!(list.forbids_read(B, 9, 1) && list.forbids_write(B, 9, 5));
        assert!(!list.forbids_read(B, 10, 5));
        list.unlock(A, 0, 10);
        list.lock(A, &[shared(0, 10)]).expect("free");
        assert!(!list.forbids_read(B, 0, 10));
        assert!(
            list.forbids_write(B, 0, 1) && list.forbids_write(A, 0, 1),
            "a shared lock binds its owner too"
        );
    }

    #[test]
    fn the_last_byte_can_be_locked() {
        assert!(!second_is_granted(exclusive(u64::MAX, 1), exclusive(u64::MAX - 1, 2)));
        assert!(second_is_granted(exclusive(u64::MAX, 1), exclusive(u64::MAX - 1, 1)));
    }

    #[test]
    fn one_open_holds_no_more_than_the_limit() {
        let mut list = LockList::default();
        for i in 0..limits::LOCKS_PER_OPEN_MAX as u64 {
            // Straight into the list: asking for each would make this test quadratic.
            list.0.push(Held { owner: A, range: exclusive(i * 2, 1) });
        }
        assert_eq!(list.lock(A, &[exclusive(u64::MAX, 1)]), Err(NtStatus::INSUFFICIENT_RESOURCES));
        list.lock(B, &[exclusive(u64::MAX, 1)]).expect("the limit is one's own");
    }
}
