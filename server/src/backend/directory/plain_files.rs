//! Cache of files without `user.forebay.dos`, so that listings and opens do not query it again: most files have no such
//! attribute, and the query costs as much as all other attributes together.
//!
//! The key includes the change time, which changes when an attribute is set. A recently changed file is not cached: the clock
//! for change times is coarse, and setting an attribute in the same tick would not change it.

use std::sync::{LazyLock, Mutex, PoisonError};

use rustix::fs::{StatxTimestamp, Timespec};

use crate::limits::PLAIN_FILES_MAX;

/// Time since the last change, in seconds, after which a file can be cached: many times a tick of any kernel.
const SETTLED_SECONDS: i64 = 2;
/// Files that share a lock: neighbours in a directory, which one thread lists.
const GROUP: usize = 64;

/// A file in its state at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) dev: u64,
    pub(super) ino: u64,
    pub(super) changed: (i64, u32),
}

type Group = Mutex<[Option<Moment>; GROUP]>;

/// The files of all volumes. A newer entry replaces an older one.
#[derive(Debug)]
struct PlainFiles(Vec<Group>);

impl PlainFiles {
    fn new() -> Self {
        Self((0..PLAIN_FILES_MAX / GROUP).map(|_| Mutex::new([None; GROUP])).collect())
    }

    fn place(&self, moment: &Moment) -> (&Group, usize) {
        // Inodes of one directory are often neighbours.
        let at = (moment.ino ^ moment.dev.rotate_left(17)) as usize % (self.0.len() * GROUP);
        (&self.0[at / GROUP], at % GROUP)
    }

    fn contains(&self, moment: &Moment) -> bool {
        let (group, at) = self.place(moment);
        group.lock().unwrap_or_else(PoisonError::into_inner)[at].as_ref() == Some(moment)
    }

    fn insert(&self, moment: Moment, now: Timespec) {
        if now.tv_sec.saturating_sub(moment.changed.0) < SETTLED_SECONDS {
            return;
        }
        let (group, at) = self.place(&moment);
        group.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(moment);
    }
}

static FILES: LazyLock<PlainFiles> = LazyLock::new(PlainFiles::new);

/// Whether a file that has not changed since `moment` has no attribute.
pub(super) fn is_plain(moment: &Moment) -> bool {
    FILES.contains(moment)
}

/// Records that a file had no attribute. `moment` must have been read before the attribute.
pub(super) fn seen(moment: Moment) {
    FILES.insert(moment, rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse));
}

impl Moment {
    pub(super) fn new(dev: u64, ino: u64, changed: StatxTimestamp) -> Self {
        Self { dev, ino, changed: (changed.tv_sec, changed.tv_nsec) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(ino: u64, seconds: i64) -> Moment {
        Moment { dev: 1, ino, changed: (seconds, 5) }
    }

    fn at(tv_sec: i64) -> Timespec {
        Timespec { tv_sec, tv_nsec: 0 }
    }

    #[test]
    fn cache_hit_requires_an_unchanged_file() {
        let files = PlainFiles::new();
        files.insert(moment(7, 100), at(102));
        assert!(files.contains(&moment(7, 100)));
        assert!(!files.contains(&moment(7, 101)), "it has changed");
        assert!(!files.contains(&Moment { changed: (100, 6), ..moment(7, 100) }));
        assert!(!files.contains(&Moment { dev: 2, ..moment(7, 100) }));
        assert!(!files.contains(&moment(8, 100)));
    }

    #[test]
    fn recent_and_future_change_times_are_not_cached() {
        let files = PlainFiles::new();
        for now in [101, 100, 50] {
            files.insert(moment(7, 100), at(now));
            assert!(!files.contains(&moment(7, 100)), "{now}");
        }
    }

    #[test]
    fn number_of_cached_files_is_limited() {
        let files = PlainFiles::new();
        let count = PLAIN_FILES_MAX as u64;
        (0..count).for_each(|ino| files.insert(moment(ino, 1), at(10)));
        assert!(
            (0..count).all(|ino| files.contains(&moment(ino, 1))),
            "neighbours do not displace each other"
        );
        files.insert(moment(count, 1), at(10));
        assert_eq!((0..=count).filter(|ino| files.contains(&moment(*ino, 1))).count() as u64, count);
    }
}
