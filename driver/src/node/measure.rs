//! Asking the file system at a path how full it is: statfs on threads that may hang, one for each path.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{StatVfs, statvfs};
use rustix::io::Errno;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::error::Error;
use crate::limits::IN_FLIGHT_MAX;

/// The measurements under way.
#[derive(Clone, Default)]
pub(super) struct Measurements(Arc<Mutex<Table>>);

impl fmt::Debug for Measurements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Measurements")
    }
}

#[derive(Default)]
struct Table {
    next: u64,
    running: HashMap<PathBuf, Running>,
    /// Threads that have not ended, including those with a path that was given up.
    threads: usize,
    /// Paths that a call is about to unmount.
    held: HashSet<PathBuf>,
}

#[derive(Clone)]
struct Running {
    id: u64,
    mount_id: u64,
    since: Instant,
    result: watch::Receiver<Option<Measured>>,
}

/// What statfs returned.
pub(super) type Measured = Result<Arc<StatVfs>, Errno>;

/// What a measurement came to.
pub(super) enum Answer {
    Measured(Measured),
    /// Nothing for the whole of the deadline.
    Silent,
}

impl Measurements {
    /// Asks the mount that is at the path, and waits no longer than `deadline`. A call during a measurement of the same mount
    /// shares its result.
    pub(super) async fn measure(
        &self,
        path: &Path,
        mount_id: u64,
        deadline: Duration,
    ) -> Result<Answer, Error> {
        let running = self.join(path, mount_id)?;
        Ok(running.wait(deadline).await)
    }

    fn join(&self, path: &Path, mount_id: u64) -> Result<Running, Error> {
        let mut table = self.table();
        if table.held.contains(path) {
            return Err(Error::InFlight(path.display().to_string()));
        }
        // One that hangs may be of a mount that was there before.
        if let Some(running) = table.running.get(path).filter(|running| running.mount_id == mount_id) {
            return Ok(running.clone());
        }
        if table.threads >= IN_FLIGHT_MAX {
            return Err(Error::TooManyInFlight);
        }
        let id = table.next;
        let (done, result) = watch::channel(None);
        let (of, own) = (self.clone(), path.to_owned());
        thread::Builder::new()
            .name("statfs".to_owned())
            .spawn(move || {
                let measured = statvfs(&own).map(Arc::new);
                of.ended(&own, id);
                done.send_replace(Some(measured));
            })
            .map_err(|_| Error::Thread("statfs"))?;
        let running = Running { id, mount_id, since: Instant::now(), result };
        table.running.insert(path.to_owned(), running.clone());
        table.next += 1;
        table.threads += 1;
        Ok(running)
    }

    /// Keeps new measurements from the path: a statfs makes its mount busy.
    pub(super) fn hold(&self, path: &Path) -> Hold {
        let is_first = self.table().held.insert(path.to_owned());
        debug_assert!(is_first, "a claim is held for the path");
        Hold { path: path.to_owned(), of: self.clone() }
    }

    fn ended(&self, path: &Path, id: u64) {
        let mut table = self.table();
        table.threads -= 1;
        if table.running.get(path).is_some_and(|running| running.id == id) {
            table.running.remove(path);
        }
    }

    /// Threads that have not ended.
    #[cfg(test)]
    pub(super) fn threads(&self) -> usize {
        self.table().threads
    }

    /// Whether a call is about to unmount the path.
    #[cfg(test)]
    pub(super) fn is_held(&self, path: &Path) -> bool {
        self.table().held.contains(path)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // The table is whole whenever something in it could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    /// For what is left of the deadline, which began with the measurement.
    async fn wait(mut self, deadline: Duration) -> Answer {
        let left = deadline.saturating_sub(self.since.elapsed());
        match timeout(left, self.result.wait_for(Option::is_some)).await {
            Ok(Ok(result)) => result.clone().map_or(Answer::Silent, Answer::Measured),
            // The thread panicked, or the deadline has passed.
            Ok(Err(_)) | Err(_) => Answer::Silent,
        }
    }
}

/// As long as this lives, nothing measures the path but what was under way before.
pub(super) struct Hold {
    path: PathBuf,
    of: Measurements,
}

impl Hold {
    /// Waits for the measurement of this mount that is under way, as long as it may take. Whether it hangs.
    pub(super) async fn hangs(&self, mount_id: u64, deadline: Duration) -> bool {
        let running = self.of.table().running.get(&self.path).cloned();
        match running.filter(|running| running.mount_id == mount_id) {
            Some(running) => matches!(running.wait(deadline).await, Answer::Silent),
            None => false,
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.of.table().held.remove(&self.path);
    }
}
