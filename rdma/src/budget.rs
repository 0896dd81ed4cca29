//! One budget for the memory of all buffers of a process, and the shares of connections and groups in it.
//!
//! Pools draw memory from the budget and keep it when a buffer is returned, so that in steady state nothing here is touched.
//! If the budget is used up, a pool reclaims free memory of other pools; if there is none, the caller waits in a [`Line`].

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::limits::ACCOUNT_RESERVE_BYTES;
use crate::line::{Line, Place};
use crate::memory::Memory;

/// Keeps memory that is not in use.
pub(crate) trait Holder: Send + Sync {
    /// Releases about `bytes` to the kernel and returns the actual number.
    fn give_up(&self, bytes: usize) -> usize;

    /// Passes a free block of a size class, not registered for a device, to another pool.
    fn lend(&self, class: usize) -> Option<Memory>;
}

/// The memory budget of all pools; clones share it.
#[derive(Clone)]
pub struct Budget(Arc<State>);

struct State {
    /// Memory of all pools, in use and free.
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
    /// Creates a budget of `bytes_max` bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self(Arc::new(State {
            bytes: AtomicUsize::new(0),
            bytes_max,
            line: Line::default(),
            holders: Mutex::default(),
        }))
    }

    /// Bytes that pools have drawn, in use and free.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// The limit in bytes.
    #[must_use]
    pub fn bytes_max(&self) -> usize {
        self.0.bytes_max
    }

    /// The line for callers that found the budget used up.
    #[must_use]
    pub fn line(&self) -> &Line {
        &self.0.line
    }

    pub(crate) fn add_holder(&self, holder: Weak<dyn Holder>) {
        let mut holders = self.0.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.retain(|holder| holder.strong_count() > 0);
        holders.push(holder);
    }

    /// Draws `size` bytes if they are available.
    pub(crate) fn draw(&self, size: usize) -> bool {
        let more = |bytes: usize| bytes.checked_add(size).filter(|sum| *sum <= self.0.bytes_max);
        self.0.bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    /// Draws `size` bytes even if they are not available.
    pub(crate) fn overdraw(&self, size: usize) {
        self.0.bytes.fetch_add(size, Ordering::SeqCst);
    }

    /// Releases bytes that were returned to the kernel.
    pub(crate) fn release(&self, size: usize) {
        self.0.bytes.fetch_sub(size, Ordering::SeqCst);
    }

    /// Whether more was drawn than the limit.
    pub(crate) fn is_overdrawn(&self) -> bool {
        self.bytes() > self.0.bytes_max
    }

    /// Makes pools return `bytes` of their free memory to the kernel. False if they have none.
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

    /// Takes a free block of a class from a pool.
    pub(crate) fn borrow(&self, class: usize) -> Option<Memory> {
        self.holders().iter().find_map(|holder| holder.lend(class))
    }

    fn holders(&self) -> Vec<Arc<dyn Holder>> {
        let holders = self.0.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.iter().filter_map(Weak::upgrade).collect()
    }
}

/// Connections of one tenant, which share a limit; clones share the group.
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
    /// Creates a group of at most `bytes_max` bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self(Arc::new(Shared { bytes: AtomicUsize::new(0), bytes_max, line: Line::default() }))
    }

    /// The line for callers that found the group's share used up.
    #[must_use]
    pub fn line(&self) -> &Line {
        &self.0.line
    }

    /// Whether its share is used up.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.0.bytes.load(Ordering::Relaxed) >= self.0.bytes_max
    }

    /// Whether it has no accounts.
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

/// Memory of one connection; clones share it.
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

/// Bytes of an account, returned when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    account: Account,
    size: usize,
    of_group: bool,
}

/// Why a share was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    ByAccount,
    ByGroup,
}

impl Account {
    /// Creates an account of at most `bytes_max` bytes, in a group.
    #[must_use]
    pub fn new(group: Group, bytes_max: usize) -> Self {
        Self(Arc::new(Held { bytes: AtomicUsize::new(0), bytes_max, group }))
    }

    /// Bytes of its buffers.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Whether its share is used up.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.bytes() >= self.0.bytes_max
    }

    /// Its group.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.0.group
    }

    /// Whether `size` more bytes are within the reserve that every connection can have at any time.
    pub(crate) fn is_in_reserve(&self, size: usize) -> bool {
        self.bytes() + size <= ACCOUNT_RESERVE_BYTES
    }

    /// Whether it has more than the reserve that every connection can have at any time.
    #[must_use]
    pub fn is_beyond_reserve(&self) -> bool {
        self.bytes() > ACCOUNT_RESERVE_BYTES
    }

    /// A share beyond all limits. Bytes beyond the reserve count for the group.
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
