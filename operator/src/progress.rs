//! Detects whether the operator's loop makes progress. Pure, except for the clock that is passed in.
//!
//! A process that holds the Lease and does nothing looks healthy from outside: servers keep running, but nothing is
//! repaired. So three things are watched: the lists that every decision depends on have arrived, watches do not fail
//! continuously, and every StorageCluster is processed at intervals.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::limits::{LISTS_TIME_MAX, PASS_AGE_MAX, WATCH_ERRORS_GAP, WATCH_ERRORS_MAX};

/// Consecutive errors of a watch.
#[derive(Clone, Debug)]
struct Streak {
    first: Instant,
    last: Instant,
    error: String,
}

#[derive(Debug, Default)]
struct State {
    /// When the work of this process began; nothing can stall before that.
    began: Option<Instant>,
    /// Lists that have not arrived yet.
    awaited: Vec<&'static str>,
    streaks: BTreeMap<&'static str, Streak>,
    /// StorageClusters, and when each was last processed, or first found.
    passes: BTreeMap<String, Instant>,
}

/// Progress of the loop.
#[derive(Debug, Default)]
pub struct Progress {
    state: Mutex<State>,
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the beginning of the work. The lists in `lists` must arrive.
    pub fn begin(&self, lists: &[&'static str], now: Instant) {
        let mut state = self.state();
        state.began = Some(now);
        state.awaited = lists.to_vec();
    }

    /// Marks a list as arrived.
    pub fn listed(&self, list: &'static str) {
        self.state().awaited.retain(|awaited| *awaited != list);
    }

    /// Records that a watch has failed; it is retried. Only the absence of further errors shows that it works again, because
    /// a watch of objects that never change reports nothing.
    pub fn watch_failed(&self, watch: &'static str, error: String, now: Instant) {
        let mut state = self.state();
        let streak = state.streaks.entry(watch).or_insert_with(|| Streak {
            first: now,
            last: now,
            error: String::new(),
        });
        if now.saturating_duration_since(streak.last) > WATCH_ERRORS_GAP {
            streak.first = now;
        }
        (streak.last, streak.error) = (now, error);
    }

    /// Sets the list of all StorageClusters.
    pub fn known(&self, clusters: impl IntoIterator<Item = String>, now: Instant) {
        let mut state = self.state();
        let mut passes = BTreeMap::new();
        for cluster in clusters {
            let at = state.passes.get(&cluster).copied().unwrap_or(now);
            passes.insert(cluster, at);
        }
        state.passes = passes;
    }

    /// Records that a cluster was processed, with any result.
    pub fn passed(&self, cluster: &str, now: Instant) {
        self.state().passes.insert(cluster.to_owned(), now);
    }

    /// Returns why the loop has stalled, if it has.
    #[must_use]
    pub fn stalled(&self, now: Instant) -> Option<String> {
        let state = self.state();
        let since = |then: Instant| now.saturating_duration_since(then);
        let began = state.began?;
        if !state.awaited.is_empty() && since(began) > LISTS_TIME_MAX {
            let last = state.streaks.values().max_by_key(|s| s.last).map(|s| format!(": {}", s.error));
            return Some(format!(
                "{} have not been listed for {} s{}",
                state.awaited.join(", "),
                since(began).as_secs(),
                last.unwrap_or_default()
            ));
        }
        for (watch, streak) in &state.streaks {
            let lasts: Duration = streak.last.saturating_duration_since(streak.first);
            if lasts > WATCH_ERRORS_MAX && since(streak.last) <= WATCH_ERRORS_GAP {
                return Some(format!(
                    "the watch of {watch} has failed for {} s: {}",
                    lasts.as_secs(),
                    streak.error
                ));
            }
        }
        let late = state.passes.iter().find(|(_, at)| since(**at) > PASS_AGE_MAX);
        late.map(|(cluster, at)| {
            format!("StorageCluster {cluster} has not been reconciled for {} s", since(*at).as_secs())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn standby_without_the_lease_never_counts_as_stalled() {
        let (progress, start) = (Progress::default(), Instant::now());
        progress.watch_failed("nodes", "no".to_owned(), start);
        assert_eq!(progress.stalled(at(start, 100_000)), None);
    }

    #[test]
    fn initial_list_that_does_not_complete_in_time_is_a_stall() {
        let (progress, start) = (Progress::default(), Instant::now());
        progress.begin(&["StorageClusters", "nodes"], start);
        progress.listed("nodes");
        progress.watch_failed("controller", "404 page not found".to_owned(), at(start, 10));
        assert_eq!(progress.stalled(at(start, 10)), None, "an API server may be slow");
        let why = progress.stalled(at(start, LISTS_TIME_MAX.as_secs() + 1)).expect("a stall");
        assert!(why.contains("StorageClusters have not") && why.contains("404 page not found"), "{why}");
        progress.listed("StorageClusters");
        assert_eq!(progress.stalled(at(start, LISTS_TIME_MAX.as_secs() + 1)), None);
    }

    #[test]
    fn persistent_watch_errors_are_a_stall_but_occasional_ones_are_not() {
        let (progress, start) = (Progress::default(), Instant::now());
        progress.begin(&[], start);
        let mut seconds = 0;
        while seconds <= WATCH_ERRORS_MAX.as_secs() + 30 {
            progress.watch_failed("nodes", "forbidden".to_owned(), at(start, seconds));
            seconds += 30;
        }
        let why = progress.stalled(at(start, seconds)).expect("a stall");
        assert!(why.contains("nodes") && why.contains("forbidden"), "{why}");
        let later = seconds + WATCH_ERRORS_GAP.as_secs() + 1;
        assert_eq!(progress.stalled(at(start, later)), None, "no further errors");
        for hour in 1..24 {
            progress.watch_failed("nodes", "gone".to_owned(), at(start, later + hour * 3600));
            assert_eq!(progress.stalled(at(start, later + hour * 3600)), None);
        }
    }

    #[test]
    fn cluster_not_reconciled_in_time_is_a_stall() {
        let (progress, start) = (Progress::default(), Instant::now());
        progress.begin(&[], start);
        let names = || ["a".to_owned(), "b".to_owned()];
        progress.known(names(), start);
        let late = PASS_AGE_MAX.as_secs() + 1;
        progress.passed("a", at(start, 100));
        assert_eq!(progress.stalled(at(start, late - 1)), None);
        let why = progress.stalled(at(start, late)).expect("a stall");
        assert!(why.contains("StorageCluster b"), "{why}");
        progress.known(["a".to_owned()], at(start, late));
        assert_eq!(progress.stalled(at(start, late)), None, "it is gone");
    }
}
