//! Byte-range locks of one file ([MS-FSA] 2.1.1.10, 2.1.4.10, 2.1.5.8).

use std::collections::{BTreeSet, HashMap};

use crate::engine::file::intervals::Intervals;
use crate::engine::tally::{Taken, Tally};
use crate::ids::FileId;
use crate::limits;
use crate::status::NtStatus;

/// A range, and whether it is or will be locked exclusively.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LockRange {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) exclusive: bool,
}

/// The locks that are held.
#[derive(Default)]
pub(crate) struct LockList {
    exclusive: Intervals,
    shared: Intervals,
    owners: HashMap<FileId, BTreeSet<Exact>>,
    /// Number of locks of all owners.
    count: usize,
    /// Distinguishes locks of the same range.
    next: u64,
    /// Their share of the volume's limit.
    counted: Option<Taken>,
}

/// A lock in the exact form in which its owner releases it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Exact {
    range: LockRange,
    number: u64,
}

impl LockList {
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether a lock begins before the end of the file. Other locks cover nothing that could be read.
    pub(crate) fn covers(&self, end_of_file: u64) -> bool {
        self.exclusive.meets(0, end_of_file, None) || self.shared.meets(0, end_of_file, None)
    }

    pub(crate) fn count(&self, owner: FileId) -> usize {
        self.owners.get(&owner).map_or(0, BTreeSet::len)
    }

    pub(crate) fn remove_owner(&mut self, owner: FileId) {
        for exact in self.owners.remove(&owner).unwrap_or_default() {
            self.forget(exact);
        }
    }

    /// Whether `owner` could lock `range` now. A shared lock can overlap an exclusive lock of the same owner. An exclusive
    /// lock can never overlap another lock.
    pub(crate) fn grants(&self, owner: FileId, range: LockRange) -> bool {
        let LockRange { offset, length, exclusive } = range;
        if exclusive {
            !self.exclusive.meets(offset, length, None) && !self.shared.meets(offset, length, None)
        } else {
            !self.exclusive.meets(offset, length, Some(owner))
        }
    }

    /// Takes all of `ranges`, one after the other, or none.
    ///
    /// # Errors
    /// `STATUS_LOCK_NOT_GRANTED`; `STATUS_INSUFFICIENT_RESOURCES` beyond the limits of an open, a file or the volume.
    pub(crate) fn lock(
        &mut self,
        owner: FileId,
        ranges: &[LockRange],
        volume: &Tally,
    ) -> Result<(), NtStatus> {
        if self.count(owner) + ranges.len() > limits::LOCKS_PER_OPEN_MAX
            || self.count + ranges.len() > limits::LOCKS_PER_FILE_MAX
        {
            return Err(NtStatus::INSUFFICIENT_RESOURCES);
        }
        let more = volume.take(ranges.len() as u64).ok_or(NtStatus::INSUFFICIENT_RESOURCES)?;
        match &mut self.counted {
            Some(counted) => counted.join(more),
            counted @ None => *counted = Some(more),
        }
        for (done, range) in ranges.iter().enumerate() {
            if !self.grants(owner, *range) {
                for range in ranges.iter().take(done) {
                    self.release(owner, *range);
                }
                self.give_back(ranges.len() - done);
                return Err(NtStatus::LOCK_NOT_GRANTED);
            }
            self.put(owner, *range);
        }
        Ok(())
    }

    /// Adds a granted lock, regardless of limits.
    pub(crate) fn put(&mut self, owner: FileId, range: LockRange) {
        let number = self.next;
        self.next += 1;
        self.tree(range).insert((range.offset, number), range.length, owner);
        self.owners.entry(owner).or_default().insert(Exact { range, number });
        self.count += 1;
    }

    /// Releases one lock of exactly this range, an exclusive one before a shared one.
    pub(crate) fn unlock(&mut self, owner: FileId, offset: u64, length: u64) -> bool {
        [true, false]
            .into_iter()
            .any(|exclusive| self.release(owner, LockRange { offset, length, exclusive }))
    }

    /// Whether an exclusive lock of another owner forbids the read.
    pub(crate) fn forbids_read(&self, reader: FileId, offset: u64, length: u64) -> bool {
        self.exclusive.meets(offset, length, Some(reader))
    }

    /// Whether an exclusive lock of another owner, or any shared lock, forbids the write.
    pub(crate) fn forbids_write(&self, writer: FileId, offset: u64, length: u64) -> bool {
        self.exclusive.meets(offset, length, Some(writer)) || self.shared.meets(offset, length, None)
    }

    fn tree(&mut self, range: LockRange) -> &mut Intervals {
        if range.exclusive { &mut self.exclusive } else { &mut self.shared }
    }

    fn release(&mut self, owner: FileId, range: LockRange) -> bool {
        let Some(held) = self.owners.get_mut(&owner) else { return false };
        let exact = |number| Exact { range, number };
        let Some(found) = held.range(exact(0)..=exact(u64::MAX)).next().copied() else { return false };
        held.remove(&found);
        if held.is_empty() {
            self.owners.remove(&owner);
        }
        self.forget(found);
        true
    }

    fn forget(&mut self, Exact { range, number }: Exact) {
        self.tree(range).remove((range.offset, number));
        self.count -= 1;
        self.give_back(1);
    }

    fn give_back(&mut self, locks: usize) {
        if let Some(counted) = &mut self.counted {
            counted.give_back(locks as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::LazyLock;

    use super::*;
    use crate::engine::file::intervals::counter::STEPS;

    /// A volume without a limit.
    fn plenty() -> &'static Tally {
        static PLENTY: LazyLock<Tally> = LazyLock::new(|| Tally::new(u64::MAX));
        &PLENTY
    }

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
        list.lock(A, &[first], plenty()).expect("the first is free");
        list.lock(B, &[second], plenty()).is_ok()
    }

    #[test]
    fn a_zero_length_lock_lies_between_bytes() {
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
    fn shared_locks_stack_on_own_locks_and_exclusive_locks_never_stack() {
        let mut list = LockList::default();
        list.lock(A, &[exclusive(0, 10)], plenty()).expect("free");
        list.lock(A, &[shared(0, 10)], plenty()).expect("shared on an own exclusive lock");
        assert_eq!(list.lock(B, &[shared(5, 1)], plenty()), Err(NtStatus::LOCK_NOT_GRANTED));
        assert_eq!(list.lock(A, &[exclusive(0, 10)], plenty()), Err(NtStatus::LOCK_NOT_GRANTED));
        assert!(list.unlock(A, 0, 10), "the exclusive lock is released first");
        list.lock(B, &[shared(5, 1)], plenty()).expect("only shared locks remain");
    }

    #[test]
    fn multiple_lock_elements_are_granted_all_or_none() {
        let mut list = LockList::default();
        list.lock(B, &[exclusive(20, 5)], plenty()).expect("free");
        assert_eq!(
            list.lock(A, &[exclusive(0, 5), exclusive(24, 1)], plenty()),
            Err(NtStatus::LOCK_NOT_GRANTED)
        );
        assert_eq!(list.count(A), 0);
        assert_eq!(
            list.lock(A, &[exclusive(0, 5), exclusive(4, 1)], plenty()),
            Err(NtStatus::LOCK_NOT_GRANTED),
            "elements must not overlap each other"
        );
    }

    #[test]
    fn unlock_requires_the_exact_range_and_owner() {
        let mut list = LockList::default();
        list.lock(A, &[exclusive(0, 10)], plenty()).expect("free");
        assert!(!list.unlock(A, 0, 9));
        assert!(!list.unlock(B, 0, 10));
        assert!(list.unlock(A, 0, 10));
        assert!(!list.unlock(A, 0, 10));
    }

    #[test]
    fn reads_and_writes_respect_locks() {
        let mut list = LockList::default();
        list.lock(A, &[exclusive(0, 10)], plenty()).expect("free");
        assert!(!list.forbids_read(A, 0, 10) && !list.forbids_write(A, 0, 10));
        assert!(list.forbids_read(B, 9, 1) && list.forbids_write(B, 9, 5));
        assert!(!list.forbids_read(B, 10, 5));
        list.unlock(A, 0, 10);
        list.lock(A, &[shared(0, 10)], plenty()).expect("free");
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
    fn locks_are_limited_per_open_per_file_and_per_volume() {
        let (mut list, volume) = (LockList::default(), Tally::new(u64::MAX));
        let ranges: Vec<LockRange> =
            (0..limits::LOCKS_PER_OPEN_MAX as u64).map(|i| shared(i * 2, 1)).collect();
        list.lock(A, &ranges, &volume).expect("the limit of one open");
        let last = [shared(u64::MAX, 1)];
        assert_eq!(list.lock(A, &last, &volume), Err(NtStatus::INSUFFICIENT_RESOURCES));
        list.lock(B, &last, &volume).expect("another open has its own limit");
        let opens = (limits::LOCKS_PER_FILE_MAX / limits::LOCKS_PER_OPEN_MAX) as u64;
        for number in 3..=opens {
            list.lock(FileId { persistent: number, volatile: number }, &ranges, &volume).expect("room");
        }
        let more = FileId { persistent: 0, volatile: 0 };
        assert_eq!(list.lock(more, &ranges, &volume), Err(NtStatus::INSUFFICIENT_RESOURCES));
        let volume = Tally::new(2);
        let (mut one, mut two) = (LockList::default(), LockList::default());
        one.lock(A, &[shared(0, 1), shared(0, 1)], &volume).expect("room for two");
        assert_eq!(two.lock(A, &last, &volume), Err(NtStatus::INSUFFICIENT_RESOURCES));
        assert!(one.unlock(A, 0, 1));
        assert_eq!(one.lock(B, &[exclusive(0, 1)], &volume), Err(NtStatus::LOCK_NOT_GRANTED));
        two.lock(A, &last, &volume).expect("one was released, and a refused request takes none");
        drop((one, two));
        assert!(volume.take(2).is_some(), "dropping the files releases all");
    }

    /// Counts the steps that `work` takes.
    fn steps(work: impl FnOnce()) -> u64 {
        let before = STEPS.with(Cell::get);
        work();
        STEPS.with(Cell::get) - before
    }

    #[test]
    fn lock_cost_is_linear_in_elements_and_logarithmic_in_held_locks() {
        let volume = Tally::new(u64::MAX);
        let held = limits::LOCKS_PER_FILE_MAX as u64 / 4;
        let elements = limits::LOCKS_PER_REQUEST_MAX as u64;
        // An AVL tree of n nodes is no higher than 1.45 log2(n + 2).
        let height = (1.45 * ((held + elements + 2) as f64).log2()) as u64;
        // Locks of others in the least favorable arrangements: in order, and nested.
        let others: [&dyn Fn(u64) -> LockRange; 3] =
            [&|i| shared(i * 2, 1), &|i| shared(held - i, 2 * i + 1), &|i| exclusive(i * 2, 1)];
        for lay in others {
            let mut list = LockList::default();
            for i in 0..held {
                let owner = FileId { persistent: 9, volatile: i / limits::LOCKS_PER_OPEN_MAX as u64 };
                list.lock(owner, &[lay(i)], &volume).expect("free");
            }
            let far = 4 * held + 1;
            let ranges: Vec<LockRange> = (0..elements).map(|i| exclusive(far + 2 * i, 1)).collect();
            // Two lookups, one way down, and one way up with a rotation or two.
            let bound = elements * height * 6;
            let taken = steps(|| list.lock(A, &ranges, &volume).expect("free"));
            assert!(taken <= bound, "{taken} steps for {elements} elements beside {held}");
            let whole = [shared(far - 1, 2 * elements), exclusive(0, 4 * far)];
            assert!(steps(|| assert!(list.lock(B, &whole, &volume).is_err())) <= bound);
            let looks = steps(|| {
                for i in 0..elements {
                    let _ = list.forbids_read(B, 0, far + i) | list.forbids_write(B, i, far);
                }
            });
            assert!(looks <= bound, "{looks} steps to look {elements} times");
            let released = steps(|| {
                for range in &ranges {
                    assert!(list.unlock(A, range.offset, range.length));
                }
            });
            assert!(released <= bound, "{released} steps to release {elements}");
        }
    }
}
