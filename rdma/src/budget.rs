//! One budget for the memory of all buffers of a process, and the shares that connections and groups of them have of it.
//!
//! Pools draw memory from the budget and keep it when a buffer comes back, so that in a steady state nothing here is
//! touched. If the budget is used up, a pool takes what other pools keep and do not use; if nothing is kept, the caller
//! waits in a [`Line`].

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::limits::ACCOUNT_RESERVE_BYTES;
use crate::line::{Line, Place};
use crate::memory::Memory;

/// What keeps memory that is not in use.
pub(crate) trait Holder: Send + Sync {
    /// Gives about `bytes` back to the kernel; how much it was.
    fn give_up(&self, bytes: usize) -> usize;

    /// Gives a free block of a size class that no device is registered for to another pool.
    fn lend(&self, class: usize) -> Option<Memory>;
}

/// The memory that all pools together may have; clones are the same one.
#[derive(Clone)]
pub struct Budget(Arc<State>);

struct State {
    /// Memory of all pools, in use and kept.
    bytes: AtomicUsize,
    bytes_max: usize,
    line: Line,
    holders: Mutex<Vec<Weak<dyn Holder>>>,
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Budget({} of {} bytes)", self.bytes(), self.0.bytes_max)
    }
}

impl Budget {
    /// Of so many bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self(Arc::new(State {
            bytes: AtomicUsize::new(0),
            bytes_max,
            line: Line::default(),
            holders: Mutex::default(),
        }))
    }

    /// Bytes that pools have, in use and kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Bytes that they may have.
    #[must_use]
    pub fn bytes_max(&self) -> usize {
        self.0.bytes_max
    }

    /// Where one waits that found it used up.
    #[must_use]
    pub fn line(&self) -> &Line {
        &self.0.line
    }

    pub(crate) fn add_holder(&self, holder: Weak<dyn Holder>) {
        let mut holders = self.0.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.retain(|holder| holder.strong_count() > 0);
        holders.push(holder);
    }

    /// Draws `size` bytes, if there are so many.
    pub(crate) fn draw(&self, size: usize) -> bool {
        let more = |bytes: usize| bytes.checked_add(size).filter(|sum| *sum <= self.0.bytes_max);
        self.0.bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    /// Draws `size` bytes whether there are so many or not.
    pub(crate) fn overdraw(&self, size: usize) {
        self.0.bytes.fetch_add(size, Ordering::SeqCst);
    }

    /// Memory went back to the kernel.
    pub(crate) fn release(&self, size: usize) {
        self.0.bytes.fetch_sub(size, Ordering::SeqCst);
    }

    /// Whether more was drawn than there is.
    pub(crate) fn is_overdrawn(&self) -> bool {
        self.bytes() > self.0.bytes_max
    }

    /// Has pools give back `bytes` of what they keep. False where they keep nothing.
    pub(crate) fn reclaim(&self, bytes: usize) -> bool {
        let mut left = bytes;
        for holder in self.holders() {
            left = left.saturating_sub(holder.give_up(left));
            if left == 0 {
                break;
            }
        }
        left < bytes
    }

    /// A block of a class that a pool keeps.
    pub(crate) fn borrow(&self, class: usize) -> Option<Memory> {
        self.holders().iter().find_map(|holder| holder.lend(class))
    }

    fn holders(&self) -> Vec<Arc<dyn Holder>> {
        let holders = self.0.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.iter().filter_map(Weak::upgrade).collect()
    }
}

/// Connections of one tenant, which have so much between them; clones are the same one.
#[derive(Clone)]
pub struct Group(Arc<Shared>);

struct Shared {
    bytes: AtomicUsize,
    bytes_max: usize,
    line: Line,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({} of {} bytes)", self.0.bytes.load(Ordering::Relaxed), self.0.bytes_max)
    }
}

impl Group {
    /// Of at most so many bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self(Arc::new(Shared { bytes: AtomicUsize::new(0), bytes_max, line: Line::default() }))
    }

    /// Where one waits that found the group's share used up.
    #[must_use]
    pub fn line(&self) -> &Line {
        &self.0.line
    }

    /// Whether it has all that it may have.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.0.bytes.load(Ordering::Relaxed) >= self.0.bytes_max
    }

    /// Whether no account is in it.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    fn enter(&self, size: usize, place: Option<&Place>) -> bool {
        if !self.0.line.is_turn_of(place) {
            return false;
        }
        let more = |bytes: usize| bytes.checked_add(size).filter(|sum| *sum <= self.0.bytes_max);
        self.0.bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    fn leave(&self, size: usize) {
        self.0.bytes.fetch_sub(size, Ordering::SeqCst);
        self.0.line.nudge();
    }
}

/// What one connection has; clones are the same one.
#[derive(Clone)]
pub struct Account(Arc<Held>);

struct Held {
    bytes: AtomicUsize,
    bytes_max: usize,
    group: Group,
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Account({} of {} bytes)", self.bytes(), self.0.bytes_max)
    }
}

/// Bytes of an account, until it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    account: Account,
    size: usize,
    of_group: bool,
}

/// Why a share is not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    ByAccount,
    ByGroup,
}

impl Account {
    /// Of at most `bytes_max`, in a group.
    #[must_use]
    pub fn new(group: Group, bytes_max: usize) -> Self {
        Self(Arc::new(Held { bytes: AtomicUsize::new(0), bytes_max, group }))
    }

    /// Bytes of the buffers that it has.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Whether it has all that it may have.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.bytes() >= self.0.bytes_max
    }

    /// Its group.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.0.group
    }

    /// Whether `size` more is within what every connection can have at any time.
    pub(crate) fn is_in_reserve(&self, size: usize) -> bool {
        self.bytes() + size <= ACCOUNT_RESERVE_BYTES
    }

    /// Whether it has more than every connection can have at any time.
    #[must_use]
    pub fn is_beyond_reserve(&self) -> bool {
        self.bytes() > ACCOUNT_RESERVE_BYTES
    }

    /// A share beyond all limits. What is beyond the reserve counts for the group.
    pub(crate) fn owed(&self, size: usize) -> Share {
        let of_group = !self.is_in_reserve(size);
        if of_group {
            self.0.group.0.bytes.fetch_add(size, Ordering::SeqCst);
        }
        self.share(size, of_group)
    }

    pub(crate) fn ask(&self, size: usize, place: Option<&Place>) -> Result<Share, Refused> {
        if self.bytes() + size > self.0.bytes_max {
            return Err(Refused::ByAccount);
        }
        if !self.0.group.enter(size, place) {
            return Err(Refused::ByGroup);
        }
        Ok(self.share(size, true))
    }

    fn share(&self, size: usize, of_group: bool) -> Share {
        self.0.bytes.fetch_add(size, Ordering::Relaxed);
        Share { account: self.clone(), size, of_group }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.account.0.bytes.fetch_sub(self.size, Ordering::Relaxed);
        if self.of_group {
            self.account.0.group.leave(self.size);
        }
    }
}
