//! ChangeTimes that clients have set ([MS-FSA] 2.1.5.15.2). File systems do not store them. The server reports them until
//! the file changes again, the server restarts, or many other ChangeTimes have been set since.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;

use crate::fs::{FileKey, Stat};
use crate::limits::CHANGE_TIMES_PER_VOLUME_MAX;
use crate::sync::{AtomicBool, Mutex, MutexGuard};

/// The ChangeTime of a file in the file system, and the value that a client set.
#[derive(Clone, Copy, Debug)]
struct Set {
    actual: u64,
    reported: u64,
}

/// The ChangeTimes of a volume.
#[derive(Default)]
pub(crate) struct ChangeTimes {
    /// Whether there are any, so that most volumes skip the lookup.
    any: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    by_file: HashMap<FileKey, Set>,
    /// Oldest first, each file once.
    order: VecDeque<FileKey>,
}

impl ChangeTimes {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// Stores the ChangeTime that a client set. `stat` is the state of the file after that.
    pub(crate) fn set(&self, stat: &Stat, reported: u64) {
        let key = stat.key.file();
        let mut inner = self.inner();
        if inner.by_file.insert(key, Set { actual: stat.times.change, reported }).is_none() {
            inner.order.push_back(key);
        }
        if inner.order.len() > CHANGE_TIMES_PER_VOLUME_MAX
            && let Some(oldest) = inner.order.pop_front()
        {
            inner.by_file.remove(&oldest);
        }
        self.any.store(true, Ordering::Release);
    }

    /// Returns `stat` with the ChangeTime that a client set, if the file has not changed since.
    pub(crate) fn apply(&self, mut stat: Stat) -> Stat {
        if self.any.load(Ordering::Acquire)
            && let Some(set) = self.inner().by_file.get(&stat.key.file())
            && set.actual == stat.times.change
        {
            stat.times.change = set.reported;
        }
        stat
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::FileTimes;

    fn stat(ino: u64, change: u64) -> Stat {
        let times = FileTimes { creation: 0, last_access: 0, last_write: 0, change };
        Stat {
            key: FileKey { dev: 1, ino, stream: 0 },
            directory: false,
            end_of_file: 0,
            allocation_size: 0,
            links: 1,
            times,
            attributes: 0,
            reparse: None,
            mode: 0,
            uid: 0,
            gid: 0,
        }
    }

    #[test]
    fn an_explicit_change_time_is_reported_until_the_file_changes() {
        let times = ChangeTimes::default();
        times.set(&stat(1, 10), 5);
        assert_eq!(times.apply(stat(1, 10)).times.change, 5);
        let stream = Stat { key: FileKey { stream: 7, ..stat(1, 10).key }, ..stat(1, 10) };
        assert_eq!(times.apply(stream).times.change, 5, "of all its streams");
        assert_eq!(times.apply(stat(1, 11)).times.change, 11);
        assert_eq!(times.apply(stat(2, 10)).times.change, 10);
    }

    #[test]
    fn the_oldest_change_times_are_evicted() {
        let times = ChangeTimes::default();
        for ino in 0..=CHANGE_TIMES_PER_VOLUME_MAX as u64 {
            times.set(&stat(ino, 10), 5);
            times.set(&stat(ino, 10), 6);
        }
        assert_eq!(times.apply(stat(0, 10)).times.change, 10);
        assert_eq!(times.apply(stat(1, 10)).times.change, 6);
        let inner = times.inner();
        assert_eq!(
            (inner.by_file.len(), inner.order.len()),
            (CHANGE_TIMES_PER_VOLUME_MAX, CHANGE_TIMES_PER_VOLUME_MAX)
        );
    }
}
