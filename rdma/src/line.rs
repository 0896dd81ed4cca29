//! A FIFO line of waiters from any number of threads.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Wakes the thread of a waiter; callable from any thread.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// A line; clones share it.
#[derive(Clone)]
pub struct Line(Arc<State>);

struct State {
    /// Number of the first place; 0 without waiters. Written under the lock, read without it.
    first: AtomicU64,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    /// The number that was issued last.
    given: u64,
    places: VecDeque<(u64, Wake)>,
    /// The first waiter was woken and has not tried since.
    woken: bool,
}

/// A place in a line; dropping it leaves the line.
pub struct Place {
    line: Line,
    number: u64,
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Line({} wait)", self.0.lock().places.len())
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Place({})", self.number)
    }
}

impl Default for Line {
    fn default() -> Self {
        Self(Arc::new(State { first: AtomicU64::new(0), queue: Mutex::default() }))
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    /// Takes the last place.
    pub fn join(&self, wake: Wake) -> Place {
        let mut queue = self.0.lock();
        queue.given += 1;
        let number = queue.given;
        queue.places.push_back((number, wake));
        if queue.places.len() == 1 {
            queue.woken = false;
            self.0.first.store(number, Ordering::SeqCst);
        }
        Place { line: self.clone(), number }
    }

    /// Whether the line is empty, or `place` is first in it.
    #[must_use]
    pub fn is_turn_of(&self, place: Option<&Place>) -> bool {
        match self.0.first.load(Ordering::SeqCst) {
            0 => true,
            first => place.is_some_and(|place| self.is_of(place) && place.number == first),
        }
    }

    /// Whether `place` is in this line.
    #[must_use]
    pub fn is_of(&self, place: &Place) -> bool {
        Arc::ptr_eq(&self.0, &place.line.0)
    }

    /// Wakes the first waiter, once until it has tried again.
    pub fn nudge(&self) {
        if self.0.first.load(Ordering::SeqCst) != 0 {
            wake_first(self.0.lock());
        }
    }
}

/// Calls the waker outside of the lock.
fn wake_first(mut queue: MutexGuard<'_, Queue>) {
    if queue.woken {
        return;
    }
    let Some(wake) = queue.places.front().map(|(_, wake)| Arc::clone(wake)) else { return };
    queue.woken = true;
    drop(queue);
    wake();
}

impl Place {
    /// Whether this place is first.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.line.0.first.load(Ordering::SeqCst) == self.number
    }

    /// Call it before each attempt: memory returned afterwards wakes the waiter again.
    pub fn try_again(&self) {
        let mut queue = self.line.0.lock();
        if queue.places.front().is_some_and(|(number, _)| *number == self.number) {
            queue.woken = false;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queue = self.line.0.lock();
        let Some(at) = queue.places.iter().position(|(number, _)| *number == self.number) else { return };
        queue.places.remove(at);
        if at > 0 {
            return;
        }
        let next = queue.places.front().map_or(0, |(number, _)| *number);
        self.line.0.first.store(next, Ordering::SeqCst);
        queue.woken = false;
        wake_first(queue);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn counted() -> (Arc<AtomicUsize>, Wake) {
        let count = Arc::new(AtomicUsize::new(0));
        let woken = Arc::clone(&count);
        (count, Arc::new(move || _ = woken.fetch_add(1, Ordering::Relaxed)))
    }

    #[test]
    fn the_first_waiter_is_woken_and_the_next_when_the_first_leaves() {
        let line = Line::default();
        assert!(line.is_turn_of(None));
        let ((first, wake_first), (second, wake_second)) = (counted(), counted());
        let a = line.join(wake_first);
        let b = line.join(wake_second);
        assert!(!line.is_turn_of(None) && line.is_turn_of(Some(&a)) && !line.is_turn_of(Some(&b)));
        line.nudge();
        line.nudge();
        assert_eq!((first.load(Ordering::Relaxed), second.load(Ordering::Relaxed)), (1, 0), "once per try");
        a.try_again();
        line.nudge();
        assert_eq!(first.load(Ordering::Relaxed), 2);
        drop(a);
        assert!(b.is_first());
        assert_eq!(second.load(Ordering::Relaxed), 1);
        drop(b);
        assert!(line.is_turn_of(None));
    }

    #[test]
    fn a_waiter_can_leave_from_the_middle_of_the_line() {
        let line = Line::default();
        let [a, b, c] = [(); 3].map(|()| line.join(counted().1));
        drop(b);
        assert!(a.is_first());
        drop(a);
        assert!(c.is_first());
        let other = Line::default();
        assert!(!other.is_of(&c) && line.is_of(&c));
    }
}
