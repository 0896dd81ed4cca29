//! Pooled, page-aligned buffers for payload. A device can access them if they were allocated for it.
//!
//! A buffer has one page of headroom before its aligned data, so that the transport can place a response's headers (or a
//! transform header) directly before READ data and send or seal both as one piece. Another page after the data holds the
//! parts of a request besides its payload, so that a WRITE of 4 MiB fits a buffer of 4 MiB. The most recently freed buffer is
//! reused first, so that a busy loop keeps working in the same, cache-warm memory. The kernel zeroes the memory once; nothing
//! zeroes it again.
//!
//! Pools draw their memory from one [`Budget`] and keep it until another pool needs it.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::Device;
use crate::Region;
use crate::budget::{Account, Budget, Holder, Refused, Share};
use crate::limits::BUFFER_BYTES_MAX;
use crate::line::Place;
use crate::memory::Memory;

/// Alignment of a buffer's data, and the headroom before it.
pub const PAGE: usize = 4096;

/// Payload bytes of the size classes. The last is for the longest frame; all others are powers of two, like payload lengths.
const CLASSES: [usize; 12] = [
    8 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
    8 << 20,
    (8 << 20) + (64 << 10),
];

/// Bytes after the payload, for the other parts of a request.
const TAILROOM: usize = PAGE;

/// Data bytes of the largest buffer.
pub const BUFFER_BYTES: usize = capacity_of(CLASSES.len() - 1);

/// Memory of the largest buffer.
pub const BUFFER_MEMORY_BYTES: usize = memory_bytes(CLASSES.len() - 1);

/// No buffer of this length is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no payload buffer of {length} bytes to be had: {shortage}")]
pub struct OutOfBuffers {
    /// Requested bytes.
    pub length: usize,
    /// Why.
    pub shortage: Shortage,
}

/// Why no buffer is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Shortage {
    /// The budget is used up, or others are waiting for it: wait in its line.
    #[error("the memory for payload is used up")]
    Budget,
    /// The group's share of the budget is used up, or others of the group are waiting for it: wait in the group's line.
    #[error("its group's share of the memory for payload is used up")]
    Group,
    /// The account has used its share: some of it must be returned first.
    #[error("its share of the memory for payload is used up")]
    Account,
    /// The kernel or the device provides no memory, or no buffer is that large.
    #[error("there is no such memory")]
    Never,
}

/// A pool of buffers; clones share it.
#[derive(Clone, Debug)]
pub struct BufferPool(Arc<Pool>);

struct Pool {
    free: [Mutex<Free>; CLASSES.len()],
    /// Memory of the buffers in use.
    bytes_in_use: AtomicUsize,
    budget: Budget,
    /// The device that can access all buffers.
    device: Option<Arc<Device>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} bytes in use)", self.bytes_in_use.load(Ordering::Relaxed))
    }
}

/// Free buffers of a class.
#[derive(Default)]
struct Free {
    stack: Vec<Memory>,
    /// Minimum number since the last [`BufferPool::trim`]: this many are not needed.
    least: usize,
}

impl Free {
    fn pop(&mut self) -> Option<Memory> {
        let memory = self.stack.pop();
        self.least = self.least.min(self.stack.len());
        memory
    }
}

const fn capacity_of(class: usize) -> usize {
    CLASSES[class] + TAILROOM
}

const fn memory_bytes(class: usize) -> usize {
    PAGE + capacity_of(class)
}

impl Default for BufferPool {
    fn default() -> Self {
        Self::new(BUFFER_BYTES_MAX)
    }
}

impl BufferPool {
    /// Creates a pool with its own budget.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self::made(Budget::new(bytes_max), None)
    }

    /// Creates a pool with its own budget, with buffers that `device` can access.
    #[must_use]
    pub fn registered(bytes_max: usize, device: Arc<Device>) -> Self {
        Self::made(Budget::new(bytes_max), Some(device))
    }

    /// Creates a pool that draws from `budget`, with buffers that `device` can access if it is given.
    #[must_use]
    pub fn of(budget: &Budget, device: Option<Arc<Device>>) -> Self {
        Self::made(budget.clone(), device)
    }

    fn made(budget: Budget, device: Option<Arc<Device>>) -> Self {
        let pool = Arc::new(Pool {
            free: Default::default(),
            bytes_in_use: AtomicUsize::new(0),
            budget: budget.clone(),
            device,
        });
        let holder: Weak<dyn Holder> = Arc::<Pool>::downgrade(&pool);
        budget.add_holder(holder);
        Self(pool)
    }

    /// The budget that it draws from.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.0.budget
    }

    /// Returns a buffer of at least `length` data bytes, for any user. It still contains the data of its previous user.
    ///
    /// # Errors
    /// [`Shortage::Budget`] and [`Shortage::Never`].
    pub fn take(&self, length: usize) -> Result<Buffer, OutOfBuffers> {
        let class = class_of(length)?;
        let memory = self.0.obtain(class).map_err(|shortage| OutOfBuffers { length, shortage })?;
        Ok(self.buffer(class, memory, None))
    }

    /// As [`Self::take`], for an account; `place` is its place in a line if it has waited. Within the reserve of each account
    /// a buffer is always available.
    ///
    /// # Errors
    /// Where to wait, or why waiting is useless.
    pub fn take_for(
        &self,
        length: usize,
        account: &Account,
        place: Option<&Place>,
    ) -> Result<Buffer, OutOfBuffers> {
        let class = class_of(length)?;
        let size = memory_bytes(class);
        if account.is_in_reserve(size) {
            return self.take_owed(length, account);
        }
        let short = |shortage| OutOfBuffers { length, shortage };
        let share = account.ask(size, place).map_err(|refused| match refused {
            Refused::ByAccount => short(Shortage::Account),
            Refused::ByGroup => short(Shortage::Group),
        })?;
        if !self.0.budget.line().is_turn_of(place) {
            return Err(short(Shortage::Budget));
        }
        let memory = self.0.obtain(class).map_err(short)?;
        Ok(self.buffer(class, memory, Some(share)))
    }

    /// As [`Self::take`], for operations that have begun and must finish, such as an answer to an accepted request. Overdraws
    /// the budget if it is used up.
    ///
    /// # Errors
    /// [`Shortage::Never`].
    pub fn take_owed(&self, length: usize, account: &Account) -> Result<Buffer, OutOfBuffers> {
        let class = class_of(length)?;
        let memory = match self.0.obtain(class) {
            Err(Shortage::Budget) => {
                self.0.budget.overdraw(memory_bytes(class));
                self.0.make(class)
            }
            other => other,
        };
        let memory = memory.map_err(|shortage| OutOfBuffers { length, shortage })?;
        Ok(self.buffer(class, memory, Some(account.owed(memory_bytes(class)))))
    }

    fn buffer(&self, class: usize, memory: Memory, share: Option<Share>) -> Buffer {
        self.0.bytes_in_use.fetch_add(memory_bytes(class), Ordering::Relaxed);
        Buffer { memory: Some(memory), class, share, pool: Arc::clone(&self.0) }
    }

    /// Counts memory outside of buffers, such as a long answer that waits to be sent, until the returned charge is dropped.
    #[must_use]
    pub fn charge(&self, bytes: usize, account: &Account) -> Charge {
        self.0.budget.overdraw(bytes);
        Charge { budget: self.0.budget.clone(), bytes, share: Some(account.owed(bytes)) }
    }

    /// Releases memory to the kernel that was not needed since the last call, at most about `bytes_max` bytes.
    pub fn trim(&self, bytes_max: usize) {
        let mut left = bytes_max;
        for class in (0..CLASSES.len()).rev() {
            let mut free = self.0.free(class);
            let count = free.least.min(left / memory_bytes(class));
            // The coldest are at the bottom.
            let unused: Vec<Memory> = free.stack.drain(..count).collect();
            free.least = free.stack.len();
            drop(free);
            left -= self.0.discard(class, unused);
        }
    }

    /// Memory of the buffers in use.
    #[must_use]
    pub fn bytes_in_use(&self) -> usize {
        self.0.bytes_in_use.load(Ordering::Relaxed)
    }
}

fn class_of(length: usize) -> Result<usize, OutOfBuffers> {
    let found = (0..CLASSES.len()).find(|class| capacity_of(*class) >= length);
    found.ok_or(OutOfBuffers { length, shortage: Shortage::Never })
}

impl Pool {
    fn free(&self, class: usize) -> MutexGuard<'_, Free> {
        self.free[class].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Obtains memory of a class. The sources, in this order: free memory of this pool, new memory, free memory of other
    /// pools, and new memory in place of free memory of other classes.
    fn obtain(&self, class: usize) -> Result<Memory, Shortage> {
        if let Some(memory) = self.free(class).pop() {
            return Ok(memory);
        }
        let size = memory_bytes(class);
        loop {
            if self.budget.draw(size) {
                return self.make(class);
            }
            if self.device.is_none()
                && let Some(memory) = self.budget.borrow(class)
            {
                return Ok(memory);
            }
            if !self.budget.reclaim(size) {
                return Err(Shortage::Budget);
            }
        }
    }

    /// Allocates memory that was drawn from the budget.
    fn make(&self, class: usize) -> Result<Memory, Shortage> {
        let size = memory_bytes(class);
        Memory::new(size, self.device.as_ref()).map_err(|error| {
            self.budget.release(size);
            tracing::warn!(%error, bytes = size, "no memory for a payload buffer");
            Shortage::Never
        })
    }

    /// Releases memory to the kernel and returns its size.
    fn discard(&self, class: usize, memory: Vec<Memory>) -> usize {
        let bytes = memory.len() * memory_bytes(class);
        drop(memory);
        if bytes > 0 {
            self.budget.release(bytes);
            self.budget.line().nudge();
        }
        bytes
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for class in 0..CLASSES.len() {
            let kept = std::mem::take(&mut self.free(class).stack);
            self.discard(class, kept);
        }
    }
}

impl Holder for Pool {
    fn give_up(&self, bytes: usize) -> usize {
        let mut given = 0;
        for class in (0..CLASSES.len()).rev() {
            if given >= bytes {
                break;
            }
            let count = (bytes - given).div_ceil(memory_bytes(class));
            let mut free = self.free(class);
            let count = count.min(free.stack.len());
            let memory: Vec<Memory> = free.stack.drain(..count).collect();
            free.least = free.least.min(free.stack.len());
            drop(free);
            // The caller is first in the line, or the line is empty.
            drop(memory);
            self.budget.release(count * memory_bytes(class));
            given += count * memory_bytes(class);
        }
        given
    }

    fn lend(&self, class: usize) -> Option<Memory> {
        if self.device.is_some() {
            return None;
        }
        self.free(class).pop()
    }
}

/// Counted memory outside of buffers, until it is dropped.
#[derive(Debug)]
pub struct Charge {
    budget: Budget,
    bytes: usize,
    share: Option<Share>,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.release(self.bytes);
        drop(self.share.take());
        self.budget.line().nudge();
    }
}

/// One buffer; returned to its pool when dropped.
pub struct Buffer {
    memory: Option<Memory>,
    class: usize,
    /// Dropped after the memory was returned.
    share: Option<Share>,
    pool: Arc<Pool>,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", CLASSES[self.class])
    }
}

impl Buffer {
    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("a buffer has its memory until it is dropped")
    }

    /// Number of aligned data bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        capacity_of(self.class)
    }

    /// The region through which a device can access it, if any.
    #[must_use]
    pub fn region(&self) -> Option<&Region> {
        self.memory().region.as_ref()
    }

    /// `range` of the buffer, relative to the aligned data; negative positions down to `-PAGE` are the headroom.
    #[must_use]
    pub fn bytes(&self, range: Range<isize>) -> &[u8] {
        &self.memory().pages[place(&range)]
    }

    /// As [`Buffer::bytes`], for writing.
    #[must_use]
    pub fn bytes_mut(&mut self, range: Range<isize>) -> &mut [u8] {
        let memory = self.memory.as_mut().expect("a buffer has its memory until it is dropped");
        &mut memory.pages[place(&range)]
    }
}

fn place(range: &Range<isize>) -> Range<usize> {
    let at = |position: isize| PAGE.checked_add_signed(position).expect("inside of the buffer");
    at(range.start)..at(range.end)
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        let size = memory_bytes(self.class);
        let pool = &self.pool;
        pool.bytes_in_use.fetch_sub(size, Ordering::Relaxed);
        if pool.budget.is_overdrawn() {
            drop(memory);
            pool.budget.release(size);
        } else {
            pool.free(self.class).stack.push(memory);
        }
        drop(self.share.take());
        pool.budget.line().nudge();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::budget::Group;
    use crate::limits::ACCOUNT_RESERVE_BYTES;
    use crate::line::Wake;

    const MIB: usize = 1 << 20;

    fn counted() -> (Arc<AtomicUsize>, Wake) {
        let count = Arc::new(AtomicUsize::new(0));
        let woken = Arc::clone(&count);
        (count, Arc::new(move || _ = woken.fetch_add(1, Ordering::Relaxed)))
    }

    fn shortage(result: Result<Buffer, OutOfBuffers>) -> Shortage {
        result.expect_err("no buffer").shortage
    }

    /// An account without limits.
    fn account() -> Account {
        Account::new(Group::new(usize::MAX / 2), usize::MAX / 2)
    }

    #[test]
    fn buffers_are_page_aligned_and_have_a_page_of_headroom() {
        let pool = BufferPool::default();
        for length in [1, 8 << 10, 100_000, 1 << 20, 8 << 20] {
            let mut buffer = pool.take(length).expect("memory");
            assert!(buffer.capacity() >= length);
            assert_eq!(buffer.bytes(0..1).as_ptr().align_offset(PAGE), 0);
            buffer.bytes_mut(-(PAGE.cast_signed())..0).fill(1);
            let all = buffer.capacity().cast_signed();
            buffer.bytes_mut(0..all).fill(2);
        }
    }

    #[test]
    fn a_buffer_occupies_its_payload_size_plus_two_pages() {
        let pool = BufferPool::default();
        for payload in (13..=23).map(|shift| 1_usize << shift) {
            // Transform header, header and WRITE, and the rest of a compound.
            for besides in [0, 112, 164, 4096] {
                let buffer = pool.take(payload + besides).expect("memory");
                assert_eq!(pool.bytes_in_use(), payload + 2 * PAGE, "{payload} and {besides} bytes");
                drop(buffer);
            }
        }
    }

    #[test]
    fn the_most_recently_freed_buffer_is_reused_first() {
        let pool = BufferPool::default();
        let (mut a, b) = (pool.take(10).expect("memory"), pool.take(10).expect("memory"));
        a.bytes_mut(0..1)[0] = 7;
        drop(b);
        drop(a);
        assert_eq!(pool.take(10).expect("memory").bytes(0..1), [7]);
    }

    #[test]
    fn take_fails_at_the_limit_until_a_buffer_is_dropped() {
        let one = MIB + 2 * PAGE;
        let pool = BufferPool::new(one);
        let buffer = pool.take(MIB).expect("the first fits");
        assert_eq!(shortage(pool.take(MIB)), Shortage::Budget);
        assert_eq!(pool.bytes_in_use(), one);
        drop(buffer);
        assert_eq!(pool.bytes_in_use(), 0);
        assert!(pool.take(MIB).is_ok());
        assert_eq!(shortage(pool.take(16 * MIB)), Shortage::Never);
    }

    #[test]
    fn steady_state_neither_allocates_nor_frees_memory() {
        let pool = BufferPool::new(1 << 30);
        let take = || (0..64).map(|_| pool.take(4 * MIB).expect("memory")).collect::<Vec<_>>();
        let places = |buffers: &[Buffer]| {
            let mut places: Vec<_> = buffers.iter().map(|buffer| buffer.bytes(0..1).as_ptr()).collect();
            places.sort_unstable();
            places
        };
        let first = take();
        let (there, drawn) = (places(&first), pool.budget().bytes());
        drop(first);
        assert_eq!(pool.budget().bytes(), drawn, "256 MiB are cached");
        assert!(places(&take()) == there);
    }

    #[test]
    fn cached_buffers_are_freed_for_other_size_classes_and_pools() {
        let budget = Budget::new(16 * MIB);
        let (a, b) = (BufferPool::of(&budget, None), BufferPool::of(&budget, None));
        let small: Vec<Buffer> = (0..200).map(|_| a.take(64 << 10).expect("memory")).collect();
        drop(small);
        assert!(budget.bytes() > 12 * MIB);
        let large = a.take(8 * MIB).expect("small buffers are freed");
        drop(large);
        let here = b.take(8 * MIB).expect("the other pool's buffers are freed");
        assert!(budget.bytes() <= 16 * MIB);
        assert_eq!(shortage(a.take(8 * MIB)), Shortage::Budget);
        drop(here);
        assert!(a.take(8 * MIB).is_ok());
    }

    #[test]
    fn a_waiter_is_served_before_newcomers() {
        let budget = Budget::new(8 * MIB + 2 * PAGE);
        let (a, b) = (BufferPool::of(&budget, None), BufferPool::of(&budget, None));
        let (first, second) = (account(), account());
        let held = a.take_for(8 * MIB, &first, None).expect("memory");
        let (woken, wake) = counted();
        assert_eq!(shortage(b.take_for(8 * MIB, &second, None)), Shortage::Budget);
        let place = budget.line().join(wake);
        drop(held);
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        assert_eq!(shortage(a.take_for(8 * MIB, &first, None)), Shortage::Budget, "another account waits");
        place.try_again();
        let held = b.take_for(8 * MIB, &second, Some(&place)).expect("its turn");
        drop(place);
        drop(held);
        assert!(a.take_for(8 * MIB, &first, None).is_ok());
    }

    #[test]
    fn every_account_has_its_reserve_when_the_budget_is_used_up() {
        let budget = Budget::new(8 * MIB + 2 * PAGE);
        let pool = BufferPool::of(&budget, None);
        let (greedy, modest) = (account(), account());
        let held = pool.take_for(8 * MIB, &greedy, None).expect("memory");
        let small: Vec<Buffer> = std::iter::from_fn(|| pool.take_for(100, &modest, None).ok()).collect();
        assert_eq!(small.len(), ACCOUNT_RESERVE_BYTES / memory_bytes(0));
        assert_eq!(modest.bytes(), ACCOUNT_RESERVE_BYTES);
        assert!(budget.is_overdrawn());
        // An answer is always granted, even if nothing is left.
        let answer = pool.take_owed(MIB, &modest).expect("overdrawn");
        drop((answer, small));
        assert_eq!(budget.bytes(), 8 * MIB + 2 * PAGE, "overdrawn memory is not cached");
        assert_eq!(modest.bytes(), 0);
        drop(held);
    }

    #[test]
    fn charged_memory_counts_like_buffer_memory() {
        let budget = Budget::new(8 * MIB + 2 * PAGE);
        let pool = BufferPool::of(&budget, None);
        let (group, other) = (Group::new(9 * MIB), account());
        let answers = Account::new(group.clone(), 16 * MIB);
        let charge = pool.charge(10 * MIB, &answers);
        assert!(!answers.is_full() && group.is_full());
        assert_eq!(shortage(pool.take_for(MIB, &answers, None)), Shortage::Group);
        assert_eq!(shortage(pool.take_for(MIB, &other, None)), Shortage::Budget);
        let (woken, wake) = counted();
        let place = budget.line().join(wake);
        drop(charge);
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        assert!(!group.is_full());
        assert!(pool.take_for(MIB, &other, Some(&place)).is_ok());
    }

    #[test]
    fn accounts_and_groups_cannot_exceed_their_limits() {
        let pool = BufferPool::new(1 << 30);
        let group = Group::new(24 * MIB);
        let (a, b) = (Account::new(group.clone(), 16 * MIB), Account::new(group.clone(), 16 * MIB));
        let held: Vec<Buffer> = std::iter::from_fn(|| pool.take_for(4 * MIB, &a, None).ok()).collect();
        assert_eq!(held.len(), 3);
        assert_eq!(shortage(pool.take_for(4 * MIB, &a, None)), Shortage::Account);
        let more = pool.take_for(4 * MIB, &b, None).expect("of the group's share");
        let other = pool.take_for(4 * MIB, &b, None).expect("of the group's share");
        assert_eq!(shortage(pool.take_for(4 * MIB, &b, None)), Shortage::Group);
        let (woken, wake) = counted();
        let place = group.line().join(wake);
        drop(other);
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        assert!(pool.take_for(4 * MIB, &b, Some(&place)).is_ok());
        drop((held, more));
        assert_eq!((a.bytes(), b.bytes()), (0, 0));
    }

    #[test]
    fn trim_returns_unused_buffers_to_the_kernel() {
        let pool = BufferPool::new(1 << 30);
        let many: Vec<Buffer> = (0..10).map(|_| pool.take(4 * MIB).expect("memory")).collect();
        drop(many);
        pool.trim(usize::MAX);
        let two: Vec<Buffer> = (0..2).map(|_| pool.take(4 * MIB).expect("memory")).collect();
        drop(two);
        pool.trim(usize::MAX);
        assert_eq!(pool.budget().bytes(), 2 * (4 * MIB + 2 * PAGE), "as many as were needed at once");
        pool.trim(usize::MAX);
        assert_eq!(pool.budget().bytes(), 0);
    }

    #[test]
    fn no_waiter_misses_a_wakeup_when_buffers_are_freed() {
        let budget = Budget::new(2 * (MIB + 2 * PAGE));
        let threads: Vec<_> = (0..6)
            .map(|_| {
                let budget = budget.clone();
                std::thread::spawn(move || {
                    let (pool, account) = (BufferPool::of(&budget, None), account());
                    let thread = std::thread::current();
                    let wake: Wake = Arc::new(move || thread.unpark());
                    for _ in 0..300 {
                        let mut place: Option<Place> = None;
                        let buffer = loop {
                            match pool.take_for(MIB, &account, place.as_ref()) {
                                Ok(buffer) => break buffer,
                                Err(_) if place.is_none() => {
                                    place = Some(budget.line().join(Arc::clone(&wake)))
                                }
                                Err(_) => {
                                    let began = std::time::Instant::now();
                                    std::thread::park_timeout(std::time::Duration::from_secs(30));
                                    assert!(began.elapsed().as_secs() < 30, "a wake-up was lost");
                                    place.as_ref().expect("it has a place in the line").try_again();
                                }
                            }
                        };
                        drop(place);
                        drop(buffer);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("no panic");
        }
        assert!(budget.line().is_turn_of(None));
    }
}
