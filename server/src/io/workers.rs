//! Threads for system calls that block: metadata, and all file I/O of the readiness engine.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    ended: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pool of threads. Dropping it runs what is queued and joins them.
pub struct Workers {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workers({} threads)", self.threads.len())
    }
}

impl Workers {
    /// Starts `count` threads.
    ///
    /// # Errors
    /// Those of starting a thread.
    pub fn start(count: usize) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let threads = (0..count)
            .map(|i| {
                let queue = Arc::clone(&queue);
                std::thread::Builder::new().name(format!("fs-{i}")).spawn(move || work(&queue))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { queue, threads })
    }

    /// Runs `job` on some thread, jobs in the order they come.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.queue.lock();
        state.jobs.push_back(Box::new(job));
        let idle = state.idle > 0;
        drop(state);
        if idle {
            self.queue.changed.notify_one();
        }
    }
}

fn work(queue: &Queue) {
    let mut state = queue.lock();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            job();
            state = queue.lock();
        } else if state.ended {
            return;
        } else {
            state.idle += 1;
            state = queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.queue.lock().ended = true;
        self.queue.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of a job was reported where it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_job_runs_once_also_those_queued_at_the_end() {
        let count = Arc::new(AtomicUsize::new(0));
        let workers = Workers::start(3).expect("threads");
        for _ in 0..1000 {
            let count = Arc::clone(&count);
            workers.submit(move || {
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
        drop(workers);
        assert_eq!(count.load(Ordering::Relaxed), 1000);
    }
}
