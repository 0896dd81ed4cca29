//! Measures the usage of file systems: statfs on threads that may hang, one for each path.

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

/// The measurements in progress.
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
    /// Threads that have not ended, including those of abandoned paths.
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

/// The result of statfs.
pub(super) type Measured = Result<Arc<StatVfs>, Errno>;

/// The outcome of a measurement.
pub(super) enum Answer {
    Measured(Measured),
    /// No result within the deadline.
    Silent,
}

impl Measurements {
    /// Measures the mount at the path, and waits at most `deadline`. A call during a measurement of the same mount shares its
    /// result.
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
        // A hanging measurement may belong to an earlier mount.
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

    /// Blocks new measurements of the path: a statfs makes its mount busy.
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
        // The table is consistent at every point that could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    /// Waits for the rest of the deadline, which started with the measurement.
    async fn wait(mut self, deadline: Duration) -> Answer {
        let left = deadline.saturating_sub(self.since.elapsed());
        match timeout(left, self.result.wait_for(Option::is_some)).await {
            Ok(Ok(result)) => result.clone().map_or(Answer::Silent, Answer::Measured),
            // The thread panicked, or the deadline has passed.
            Ok(Err(_)) | Err(_) => Answer::Silent,
        }
    }
}

/// While this exists, no new measurement of the path starts.
pub(super) struct Hold {
    path: PathBuf,
    of: Measurements,
}

impl Hold {
    /// Waits for the measurement of this mount in progress, up to its deadline. Returns whether it hangs.
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
