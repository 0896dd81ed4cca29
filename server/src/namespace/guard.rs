//! Watches a namespace that is in use, and ends the server where it is no longer ours.
//!
//! Two threads: one looks, which may take as long as a target does not answer; the other sees to it that the last look
//! that found everything right is not too long ago.

use std::fs::File;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_nvmeof::{Check, Loss, Me, NamespaceDevice, Watch, check, shut_down_file_system};
use tracing::{debug, error, info, warn};

use crate::daemon::Exit;
use crate::limits::{FENCE_TIME_MAX, NAMESPACE_GUARD_INTERVAL, NAMESPACE_LOOK_INTERVAL};

/// Why the server ends itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fence {
    /// The reservation is not ours.
    #[error("the reservation is lost: {0}")]
    Lost(Loss),
    /// Whether it is ours could not be told for so long.
    #[error(
        "for {0} s the target could not be asked whether the reservation is still ours (last answer: {1})"
    )]
    Unconfirmed(u64, String),
}

/// When the reservation was last seen to be ours.
#[derive(Debug)]
struct Confirmed {
    at: Instant,
    said: String,
}

impl Confirmed {
    /// Whether that is too long ago.
    fn overdue(&self, now: Instant, limit: Duration) -> Option<Fence> {
        let ago = now.saturating_duration_since(self.at);
        (ago > limit).then(|| Fence::Unconfirmed(ago.as_secs(), self.said.clone()))
    }
}

/// What is watched.
pub(crate) struct Watched {
    pub(crate) pool: String,
    pub(crate) device: Arc<NamespaceDevice>,
    pub(crate) me: Me,
    pub(crate) watch: Watch,
    pub(crate) loss_time: Duration,
    /// Directory on the file system that is ended first.
    pub(crate) directory: File,
}

/// Both threads; dropped, they end.
#[derive(Debug)]
pub(crate) struct Guard {
    senders: [Sender<()>; 2],
    threads: [JoinHandle<()>; 2],
}

impl Guard {
    /// Starts watching.
    pub(crate) fn start(watched: Watched) -> std::io::Result<Self> {
        let Watched { pool, device, me, watch, loss_time, directory } = watched;
        let confirmed = Arc::new(Mutex::new(Confirmed { at: Instant::now(), said: "nothing yet".into() }));
        let directory = Arc::new(directory);
        let (looking, looks_end) = channel();
        let (guarding, guards_end) = channel();
        let looks = Looks {
            pool: pool.clone(),
            device,
            me,
            watch,
            confirmed: Arc::clone(&confirmed),
            directory: Arc::clone(&directory),
        };
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        let looking_thread = thread("namespace").spawn(move || looks.run(&looks_end))?;
        let guarding_thread = thread("namespace-guard").spawn(move || {
            while pause(&guards_end, NAMESPACE_GUARD_INTERVAL) {
                let overdue = lock(&confirmed).overdue(Instant::now(), loss_time);
                if let Some(fence) = overdue {
                    end(&pool, &directory, &fence);
                }
            }
        })?;
        Ok(Self { senders: [looking, guarding], threads: [looking_thread, guarding_thread] })
    }

    /// Stops watching, and waits until nothing is held any more.
    pub(crate) fn stop(self) {
        drop(self.senders);
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

/// Waits; whether to go on.
fn pause(ends: &Receiver<()>, interval: Duration) -> bool {
    ends.recv_timeout(interval) == Err(RecvTimeoutError::Timeout)
}

fn lock(confirmed: &Mutex<Confirmed>) -> std::sync::MutexGuard<'_, Confirmed> {
    confirmed.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Looks {
    pool: String,
    device: Arc<NamespaceDevice>,
    me: Me,
    watch: Watch,
    confirmed: Arc<Mutex<Confirmed>>,
    directory: Arc<File>,
}

impl Looks {
    fn run(mut self, ends: &Receiver<()>) {
        while pause(ends, NAMESPACE_LOOK_INTERVAL) {
            for change in self.watch.poll() {
                info!(pool = self.pool, ?change, "namespace");
            }
            // From before the question: an answer may be as old as that.
            let asked = Instant::now();
            match check(&*self.device, &self.me) {
                Ok(Check::Held) => lock(&self.confirmed).at = asked,
                Ok(Check::Lost(loss)) => end(&self.pool, &self.directory, &Fence::Lost(loss)),
                Err(error) => {
                    debug!(pool = self.pool, %error, "the reservation could not be looked at");
                    lock(&self.confirmed).said = error.to_string();
                }
            }
        }
    }
}

/// Ends the file system and the server, in this order, at once and without asking anybody. What clients were not answered
/// was not done; what they were answered and did not flush may be lost, as by a loss of power.
fn end(pool: &str, directory: &Arc<File>, fence: &Fence) -> ! {
    error!(pool, reason = %fence, "ending at once: another server may have the namespace");
    let (done, is_done) = channel();
    let directory = Arc::clone(directory);
    let ending = std::thread::Builder::new().spawn(move || {
        let _ = done.send(shut_down_file_system(&directory));
    });
    if ending.is_ok() && !matches!(is_done.recv_timeout(FENCE_TIME_MAX), Ok(Ok(()))) {
        warn!(pool, "the file system could not be ended; its target refuses what it still writes");
    }
    std::process::exit(Exit::Fenced as i32)
}

/// Ends a file system that an earlier server has left mounted, without writing anything.
pub(crate) fn end_file_system(at: &Path) -> std::io::Result<()> {
    shut_down_file_system(&File::open(at)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_that_is_not_confirmed_in_time_is_given_up() {
        let at = Instant::now();
        let confirmed = Confirmed { at, said: "no path".into() };
        let limit = Duration::from_secs(30);
        assert_eq!(confirmed.overdue(at, limit), None);
        assert_eq!(confirmed.overdue(at + limit, limit), None);
        let late = at + limit + Duration::from_millis(1);
        assert_eq!(confirmed.overdue(late, limit), Some(Fence::Unconfirmed(30, "no path".into())));
    }
}
