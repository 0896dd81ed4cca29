//! The queue of one lane: origins take turns, and none of them can occupy all threads.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Origin;
use crate::limits::LANE_LINES_SPARE_MAX;

pub(super) type Job = Box<dyn FnOnce() + Send>;

pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Jobs that have not started; written with the lock held, read without it.
    waiting: AtomicUsize,
    /// Threads that one connection may occupy.
    share: usize,
    /// How long a woken thread waits for more jobs to accumulate.
    pause: Option<Duration>,
}

#[derive(Default)]
struct State {
    lines: HashMap<Origin, Line>,
    /// Origins with a job that may start, each listed once.
    turns: VecDeque<Origin>,
    /// Job lists of earlier lines, for reuse.
    spare: Vec<VecDeque<Job>>,
    idle: usize,
    /// Threads that were woken and have not checked for a job yet.
    woken: usize,
    ended: bool,
}

/// Jobs of one origin. Exists while a job waits or runs.
struct Line {
    jobs: VecDeque<Job>,
    running: usize,
    in_turns: bool,
}

impl Queue {
    /// Creates the queue for `threads` threads. An idle thread starts `pause` after the first job arrives: it then finds several
    /// jobs, and each of them costs less than waking a thread.
    pub(super) fn new(threads: usize, pause: Option<Duration>) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            // A quarter is reserved for others, if there are enough threads.
            share: (threads - threads / 4).max(1),
            pause,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Queues a job; returns it after [`Queue::end`].
    pub(super) fn push(&self, origin: Origin, job: Job) -> Result<(), Job> {
        let mut state = self.lock();
        if state.ended {
            return Err(job);
        }
        let State { lines, turns, spare, .. } = &mut *state;
        let line = lines.entry(origin).or_insert_with(|| Line {
            jobs: spare.pop().unwrap_or_default(),
            running: 0,
            in_turns: false,
        });
        line.jobs.push_back(job);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let enters = line.enters(origin, self.share, turns);
        // Many jobs that arrive together wake one thread, which wakes the next.
        let wake = enters && state.woken == 0 && state.wakes();
        drop(state);
        if wake {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Runs jobs until [`Queue::end`], including those queued by then.
    pub(super) fn serve(&self) {
        let mut state = self.lock();
        loop {
            if let Some((origin, job)) = self.take(&mut state) {
                let wake = !state.turns.is_empty() && state.wakes();
                drop(state);
                if wake {
                    self.changed.notify_one();
                }
                // The panic hook has already reported the panic.
                let _ = catch_unwind(AssertUnwindSafe(job));
                state = self.lock();
                self.ran(&mut state, origin);
            } else if state.ended {
                return;
            } else {
                state = self.wait(state);
            }
        }
    }

    /// Waits until there may be a job.
    fn wait<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.idle += 1;
        state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        if let Some(pause) = self.pause
            && !state.ended
        {
            drop(state);
            std::thread::sleep(pause);
            state = self.lock();
        }
        state.idle -= 1;
        // Zero after a spurious wakeup.
        state.woken = state.woken.saturating_sub(1);
        state
    }

    fn take(&self, state: &mut State) -> Option<(Origin, Job)> {
        let origin = state.turns.pop_front()?;
        let line = state.lines.get_mut(&origin).expect("an origin with a turn has a line");
        line.in_turns = false;
        let job = line.jobs.pop_front().expect("an origin with a turn has a job");
        line.running += 1;
        line.enters(origin, self.share, &mut state.turns);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Some((origin, job))
    }

    fn ran(&self, state: &mut State, origin: Origin) {
        let line = state.lines.get_mut(&origin).expect("a line with a job that runs");
        line.running -= 1;
        // This thread takes it if no other origin has a turn.
        line.enters(origin, self.share, &mut state.turns);
        if line.running == 0 && line.jobs.is_empty() {
            let line = state.lines.remove(&origin).expect("it was just there");
            if state.spare.len() < LANE_LINES_SPARE_MAX {
                state.spare.push(line.jobs);
            }
        }
    }

    /// Rejects new jobs; threads exit when no job is left.
    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }
}

impl State {
    /// Whether to wake a thread: one that is idle and not woken yet. It then counts as woken.
    fn wakes(&mut self) -> bool {
        let wakes = self.idle > self.woken;
        self.woken += usize::from(wakes);
        wakes
    }
}

impl Line {
    /// Queues a turn if it has a job that may start and no turn yet. Returns whether it did.
    fn enters(&mut self, origin: Origin, share: usize, turns: &mut VecDeque<Origin>) -> bool {
        let may_run = match origin {
            Origin::Connection(_) => self.running < share,
            Origin::Server => true,
        };
        let enters = !self.in_turns && !self.jobs.is_empty() && may_run;
        if enters {
            self.in_turns = true;
            turns.push_back(origin);
        }
        enters
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(20);

    /// A queue with threads, and the numbers that its jobs report.
    struct Served {
        queue: Arc<Queue>,
        threads: Vec<std::thread::JoinHandle<()>>,
        said: (Sender<u64>, Receiver<u64>),
    }

    impl Served {
        fn new(threads: usize) -> Self {
            Self::with_pause(threads, None)
        }

        fn with_pause(threads: usize, pause: Option<Duration>) -> Self {
            let queue = Arc::new(Queue::new(threads, pause));
            let serve = |_| {
                let queue = Arc::clone(&queue);
                std::thread::spawn(move || queue.serve())
            };
            let threads = (0..threads).map(serve).collect();
            Self { queue, threads, said: channel() }
        }

        /// Queues a job that reports its number and then waits until the sender is dropped.
        fn blocking(&self, origin: u64, number: u64) -> Sender<()> {
            let (release, blocked) = channel();
            let said = self.said.0.clone();
            self.push(origin, move || {
                said.send(number).expect("heard");
                let _ = blocked.recv();
            });
            release
        }

        fn push(&self, origin: u64, job: impl FnOnce() + Send + 'static) {
            assert!(self.queue.push(Origin::Connection(origin), Box::new(job)).is_ok(), "not ended");
        }

        fn hear(&self) -> u64 {
            self.said.1.recv_timeout(DEADLINE).expect("a job begins")
        }
    }

    impl Drop for Served {
        fn drop(&mut self) {
            self.queue.end();
            for thread in self.threads.drain(..) {
                let joined = thread.join();
                assert!(joined.is_ok() || std::thread::panicking());
            }
        }
    }

    #[test]
    fn jobs_of_one_origin_run_on_all_threads_but_one() {
        for pause in [None, Some(Duration::from_millis(1))] {
            let served = Served::with_pause(4, pause);
            // Three of four: the last thread is for others.
            let releases: Vec<_> = (0..3).map(|number| served.blocking(1, number)).collect();
            let mut begun: Vec<_> = (0..3).map(|_| served.hear()).collect();
            begun.sort_unstable();
            assert_eq!(begun, [0, 1, 2]);
            drop(releases);
        }
    }

    #[test]
    fn no_job_stays_queued_while_a_thread_is_idle() {
        for pause in [None, Some(Duration::from_micros(50))] {
            let served = Served::with_pause(3, pause);
            // Each job is queued while threads fall asleep, wake up or are about to.
            for number in 0..5000 {
                let said = served.said.0.clone();
                served.push(number % 2, move || said.send(number).expect("heard"));
                if number % 3 == 0 {
                    assert!(served.hear() <= number);
                }
            }
            for _ in 0..5000 - 1667 {
                served.hear();
            }
            assert_eq!(served.queue.waiting(), 0);
        }
    }

    #[test]
    fn one_connection_leaves_a_thread_free_for_others() {
        let served = Served::new(4);
        let mut flood: Vec<_> = (0..64).map(|number| Some(served.blocking(1, number))).collect();
        let begun: Vec<_> = (0..3).map(|_| served.hear()).collect();
        let other = served.blocking(2, 100);
        assert_eq!(served.hear(), 100, "a thread is free for other connections");
        drop(other);
        // The next job of the connection starts only after one has ended.
        assert!(served.said.1.try_recv().is_err());
        for number in begun {
            flood[number as usize] = None;
        }
        for _ in 3..64 {
            flood[served.hear() as usize] = None;
        }
        assert_eq!(served.queue.waiting(), 0);
    }

    #[test]
    fn origins_are_served_round_robin() {
        let served = Served::new(1);
        let first = served.blocking(9, 900);
        assert_eq!(served.hear(), 900);
        let mut releases: Vec<_> = (0..50).map(|number| served.blocking(1, number)).collect();
        releases.push(served.blocking(2, 200));
        releases.push(served.blocking(3, 300));
        releases.push(served.blocking(2, 201));
        drop(first);
        drop(releases);
        let begun: Vec<_> = (0..6).map(|_| served.hear()).collect();
        assert_eq!(begun, [0, 200, 300, 1, 201, 2]);
    }

    #[test]
    fn lines_are_removed_after_their_last_job() {
        let served = Served::new(2);
        for origin in 0..500 {
            drop(served.blocking(origin, origin));
            assert_eq!(served.hear(), origin);
        }
        let until = std::time::Instant::now() + DEADLINE;
        while !served.queue.lock().lines.is_empty() {
            assert!(std::time::Instant::now() < until, "a line without jobs stays");
            std::thread::yield_now();
        }
        assert!(served.queue.lock().spare.len() <= LANE_LINES_SPARE_MAX);
    }
}
