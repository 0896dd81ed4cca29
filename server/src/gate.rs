//! The gate of a volume: changes pass through it, and a snapshot closes it.
//!
//! A snapshot copies one file after the other. It contains all changes up to one moment, and none after it, only if nothing
//! changes in the meantime. So the gate is closed, active changes complete, and new changes wait until it is open again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::limits::{GATE_POLL, GATE_SHARDS};

/// Admits the changes of one volume.
#[derive(Debug, Default)]
pub struct Gate {
    closed: AtomicBool,
    /// Active changes. A thread always counts in the same shard, so that event loops do not contend.
    under_way: [Shard; GATE_SHARDS],
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard(AtomicUsize);

/// An object that holds a volume's gate.
pub trait Gated {
    /// The gate.
    fn gate(&self) -> &Gate;
}

impl Gated for Arc<Gate> {
    fn gate(&self) -> &Gate {
        self
    }
}

/// An active change. It ends when this is dropped.
#[derive(Debug)]
pub struct Passage<T: Gated> {
    through: T,
    shard: usize,
}

impl<T: Gated> Passage<T> {
    /// Begins a change.
    ///
    /// # Errors
    /// Returns `through`: the gate is closed, and nothing may be changed.
    pub fn begin(through: T) -> Result<Self, T> {
        let (gate, shard) = (through.gate(), shard());
        // Counted first: either the thread that closes the gate sees this change, or this change sees that the gate is closed.
        gate.under_way[shard].0.fetch_add(1, Ordering::SeqCst);
        if gate.closed.load(Ordering::SeqCst) {
            gate.under_way[shard].0.fetch_sub(1, Ordering::SeqCst);
            return Err(through);
        }
        Ok(Self { through, shard })
    }

    /// Begins a change on a thread that may block.
    pub fn wait(mut through: T) -> Self {
        loop {
            match Self::begin(through) {
                Ok(passage) => return passage,
                Err(back) => through = back,
            }
            std::thread::sleep(GATE_POLL);
        }
    }

    /// The object that the change was begun with.
    pub fn through(&self) -> &T {
        &self.through
    }
}

impl<T: Gated> Drop for Passage<T> {
    fn drop(&mut self) {
        self.through.gate().under_way[self.shard].0.fetch_sub(1, Ordering::Release);
    }
}

/// The shard of this thread.
fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: usize = NEXT.fetch_add(1, Ordering::Relaxed) % GATE_SHARDS;
    }
    SHARD.with(|shard| *shard)
}

/// Why a gate was not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotClosed {
    /// Another snapshot or clone has closed it.
    #[error("another snapshot or clone of it is being made")]
    Taken,
    /// Changes that had begun did not end in time.
    #[error("changes that are under way did not end")]
    Busy,
}

/// A gate that is closed. It opens when this is dropped.
#[derive(Debug)]
pub struct Closed(Arc<Gate>);

impl Gate {
    /// Whether changes must wait.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Closes the gate, and waits at most `patience` until no change is active.
    ///
    /// # Errors
    /// Why the gate was not closed; it is open then.
    pub fn close(self: &Arc<Self>, patience: Duration) -> Result<Closed, NotClosed> {
        if self.closed.swap(true, Ordering::SeqCst) {
            return Err(NotClosed::Taken);
        }
        let closed = Closed(Arc::clone(self));
        let begun = Instant::now();
        // Check the shards in turn: no new change begins, so a count of 0 stays 0, except for changes that find the gate
        // closed.
        for shard in &self.under_way {
            while shard.0.load(Ordering::SeqCst) > 0 {
                if begun.elapsed() >= patience {
                    return Err(NotClosed::Busy);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        Ok(closed)
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        self.0.closed.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn gate_closes_after_changes_in_progress_and_blocks_until_reopened() {
        let gate = Arc::new(Gate::default());
        let passage = Passage::begin(Arc::clone(&gate)).expect("open");
        assert_eq!(gate.close(Duration::ZERO).expect_err("one is under way"), NotClosed::Busy);
        assert!(Passage::begin(Arc::clone(&gate)).is_ok(), "it was opened again");
        drop(passage);
        let closed = gate.close(PATIENCE).expect("nothing is under way");
        assert!(gate.is_closed() && Passage::begin(Arc::clone(&gate)).is_err());
        assert_eq!(gate.close(PATIENCE).expect_err("it is closed"), NotClosed::Taken);
        drop(closed);
        assert!(!gate.is_closed() && Passage::begin(gate).is_ok());
    }

    /// Threads change two numbers that are equal before and after each change; the thread that closed the gate must find
    /// them equal.
    #[test]
    fn no_partial_change_is_visible_while_the_gate_is_closed() {
        let gate = Arc::new(Gate::default());
        let pair = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        let ended = Arc::new(AtomicBool::new(false));
        let changers: Vec<_> = (0..GATE_SHARDS + 3)
            .map(|_| {
                let (gate, pair, ended) = (Arc::clone(&gate), Arc::clone(&pair), Arc::clone(&ended));
                std::thread::spawn(move || {
                    while !ended.load(Ordering::Relaxed) {
                        let _passage = Passage::wait(Arc::clone(&gate));
                        pair[0].fetch_add(1, Ordering::Relaxed);
                        std::thread::yield_now();
                        pair[1].fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let mut last = 0;
        for _ in 0..50 {
            let closed = gate.close(PATIENCE).expect("changes end");
            let first = pair[0].load(Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
            assert_eq!(first, pair[1].load(Ordering::Relaxed));
            assert_eq!(first, pair[0].load(Ordering::Relaxed));
            drop(closed);
            while pair[0].load(Ordering::Relaxed) == first {
                std::thread::yield_now();
            }
            assert!(first >= last);
            last = first;
        }
        ended.store(true, Ordering::Relaxed);
        changers.into_iter().for_each(|thread| thread.join().expect("no panic"));
    }
}
