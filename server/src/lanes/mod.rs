//! Lanes: the threads for system calls that block.
//!
//! Each lane waits for one kind of resource and has its own threads and queue: writes to stable storage do not delay look-ups.
//! Within a lane, connections take turns, and none of them can occupy all threads. `backend::lane` assigns operations to lanes;
//! [`Share`] limits how much a connection has in one lane.

mod closing;
mod queue;
mod share;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

pub use self::closing::{ClosesElsewhere, Descriptor, drop_elsewhere};
use self::queue::Queue;
pub use self::share::Share;
use crate::limits::{
    CLOSE_PAUSE, CLOSE_THREADS, CLOSES_WAITING_MAX, LANE_JOBS_GUARANTEED, LANE_JOBS_MAX,
    LANE_JOBS_PER_CONNECTION_MAX, SYNC_THREADS_PER_WORKER, VOUCH_THREADS, WORKERS_MAX,
};

/// A lane, by what its threads wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Reads of names, attributes and listings.
    LookUp,
    /// Changes of names and attributes, without stable storage.
    Change,
    /// Contents of files, without stable storage.
    Data,
    /// Writes to stable storage.
    Sync,
    /// Waits for a target to confirm that it has not lost acknowledged data.
    Vouch,
    /// Closes descriptors: the last close of an unlinked file frees its extents.
    Close,
}

impl Lane {
    /// All lanes, in the order in which they end: each can submit jobs to those after it.
    pub const ALL: [Self; 6] = [Self::LookUp, Self::Change, Self::Data, Self::Sync, Self::Vouch, Self::Close];

    /// Its name in metrics and thread names.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::LookUp => "look-up",
            Self::Change => "change",
            Self::Data => "data",
            Self::Sync => "sync",
            Self::Vouch => "vouch",
            Self::Close => "close",
        }
    }

    /// Whether completing a job promises a client that a change was made, which a target must not have lost.
    #[must_use]
    pub fn promises(self) -> bool {
        match self {
            Self::Change | Self::Data | Self::Sync => true,
            Self::LookUp | Self::Vouch | Self::Close => false,
        }
    }

    /// Number of its threads if `workers` are configured.
    #[must_use]
    pub fn threads(self, workers: usize) -> usize {
        match self {
            Self::LookUp | Self::Change | Self::Data => workers,
            // They use no CPU time, and the file system commits concurrent requests together.
            Self::Sync => (workers * SYNC_THREADS_PER_WORKER).min(WORKERS_MAX),
            Self::Vouch => VOUCH_THREADS,
            Self::Close => CLOSE_THREADS,
        }
    }

    /// How long an idle thread waits for jobs to accumulate before it starts.
    fn pause(self) -> Option<Duration> {
        match self {
            Self::LookUp | Self::Change | Self::Data | Self::Sync | Self::Vouch => None,
            // Clients receive their answer before the descriptor is closed.
            Self::Close => Some(CLOSE_PAUSE),
        }
    }
}

/// The origin of a job: the jobs of different origins take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A connection, by its id.
    Connection(u64),
    /// The server itself.
    Server,
}

/// The queues of all lanes.
#[derive(Clone)]
pub struct Queues(Arc<[Queue; Lane::ALL.len()]>);

impl fmt::Debug for Queues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(Lane::ALL.map(|lane| (lane, self.waiting(lane)))).finish()
    }
}

impl Queues {
    fn of(&self, lane: Lane) -> &Queue {
        &self.0[lane as usize]
    }

    /// Runs `job` on a thread of the lane; jobs of one origin start in order of arrival.
    pub fn submit(&self, lane: Lane, origin: Origin, job: impl FnOnce() + Send + 'static) {
        if let Err(job) = self.of(lane).push(origin, Box::new(job)) {
            // The server is shutting down, and the threads of the lane have already exited.
            job();
        }
    }

    /// Number of jobs that wait for a thread.
    #[must_use]
    pub fn waiting(&self, lane: Lane) -> usize {
        self.of(lane).waiting()
    }

    /// Whether a connection with `begun` jobs in the lane may add another.
    #[must_use]
    pub fn has_room(&self, lane: Lane, begun: usize) -> bool {
        begun < LANE_JOBS_GUARANTEED
            || (begun < LANE_JOBS_PER_CONNECTION_MAX && self.waiting(lane) < LANE_JOBS_MAX)
    }

    /// Whether too many descriptors wait to be closed, so that a CLOSE is answered only after them.
    #[must_use]
    pub fn closes_are_late(&self) -> bool {
        self.waiting(Lane::Close) >= CLOSES_WAITING_MAX
    }
}

/// The threads of all lanes. Dropping it runs all queued jobs and joins the threads.
pub struct Lanes {
    queues: Queues,
    threads: Vec<(Lane, JoinHandle<()>)>,
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lanes({} threads)", self.threads.len())
    }
}

impl Lanes {
    /// Starts the number of threads that [`Lane::threads`] returns for `workers`.
    ///
    /// # Errors
    /// Errors from starting a thread.
    pub fn start(workers: usize) -> std::io::Result<Self> {
        let queues = Queues(Arc::new(Lane::ALL.map(|lane| Queue::new(lane.threads(workers), lane.pause()))));
        let mut lanes = Self { queues, threads: Vec::new() };
        for lane in Lane::ALL {
            for index in 0..lane.threads(workers) {
                let queues = lanes.queues.clone();
                let name = format!("{}-{index}", lane.name());
                let thread = std::thread::Builder::new().name(name).spawn(move || serve(lane, &queues))?;
                lanes.threads.push((lane, thread));
            }
        }
        Ok(lanes)
    }

    /// The queues. A clone of them does not keep the threads running.
    #[must_use]
    pub fn queues(&self) -> &Queues {
        &self.queues
    }
}

fn serve(lane: Lane, queues: &Queues) {
    // Descriptors that a job drops are closed by the close lane.
    let _elsewhere = (lane != Lane::Close).then(|| ClosesElsewhere::on_this_thread(queues));
    queues.of(lane).serve();
}

impl Drop for Lanes {
    fn drop(&mut self) {
        for lane in Lane::ALL {
            self.queues.of(lane).end();
            for (_, thread) in self.threads.extract_if(.., |(of, _)| *of == lane) {
                // The panic hook has already reported a panic of a job.
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(20);

    #[test]
    fn every_job_runs_once_including_jobs_queued_during_shutdown() {
        let count = Arc::new(AtomicUsize::new(0));
        let lanes = Lanes::start(3).expect("threads");
        for index in 0..1000 {
            let (count, queues) = (Arc::clone(&count), lanes.queues().clone());
            lanes.queues().submit(Lane::LookUp, Origin::Connection(index % 7), move || {
                queues.submit(Lane::Sync, Origin::Server, move || {
                    count.fetch_add(1, Ordering::Relaxed);
                });
            });
        }
        drop(lanes);
        assert_eq!(count.load(Ordering::Relaxed), 1000);
    }

    #[test]
    fn blocked_jobs_in_one_lane_do_not_delay_other_lanes() {
        let lanes = Lanes::start(2).expect("threads");
        let (release, blocked) = channel::<()>();
        let blocked = Arc::new(std::sync::Mutex::new(blocked));
        for _ in 0..64 {
            let blocked = Arc::clone(&blocked);
            lanes.queues().submit(Lane::Sync, Origin::Connection(1), move || {
                let _ = blocked.lock().expect("no panic").recv();
            });
        }
        // Even for the same connection.
        for lane in [Lane::LookUp, Lane::Change, Lane::Data, Lane::Vouch, Lane::Close] {
            let (done, is_done) = channel();
            lanes.queues().submit(lane, Origin::Connection(1), move || done.send(()).expect("waited for"));
            is_done.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("{lane:?} waits for another lane"));
        }
        drop(release);
    }

    #[test]
    fn panic_of_a_job_does_not_end_a_lane_thread() {
        let lanes = Lanes::start(1).expect("threads");
        for _ in 0..3 {
            lanes.queues().submit(Lane::LookUp, Origin::Server, || panic!("expected by this test"));
        }
        let (done, is_done) = channel();
        lanes.queues().submit(Lane::LookUp, Origin::Server, move || done.send(()).expect("waited for"));
        is_done.recv_timeout(DEADLINE).expect("the thread is still there");
    }
}
