//! The state of a pool's namespace at the last look. Its guard acts on it, and health and metrics report it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_nvmeof::Loss;

use crate::limits::NAMESPACE_UNCONFIRMED_TOLD;

/// Why the server stops.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fence {
    /// The reservation is not ours.
    #[error("the reservation is lost: {0}")]
    Lost(Loss),
    /// It is unknown for this long whether the reservation is ours.
    #[error(
        "for {0} s the target could not be asked whether the reservation is still ours (last answer: {1})"
    )]
    Unconfirmed(u64, String),
    /// A failed operation is not reported to clients: the next server repeats it.
    #[error("an operation failed, and no path to the namespace takes I/O")]
    OutOfReach,
    /// XFS shuts down if it cannot write its log. It is served again only after another mount, which replays the log.
    #[error("the file system has shut down, as after an I/O error: the kernel's log says why")]
    FileSystem,
}

/// The state of a pool's namespace.
#[derive(Debug)]
pub struct State {
    pool: String,
    /// Subsystem and namespace.
    names: (String, String),
    paths: usize,
    loss_time: Duration,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// When the reservation was last confirmed to be ours.
    confirmed: Instant,
    /// Why it could not be confirmed since then.
    said: String,
    paths_up: usize,
    ana_states: Vec<String>,
    /// Why the file system does not fill its namespace.
    not_grown: Option<String>,
    /// Why it may lose flushed data.
    unreliable: Option<String>,
}

impl State {
    /// A state without problems, confirmed now.
    pub(crate) fn new(pool: String, names: (String, String), paths: usize, loss_time: Duration) -> Self {
        let (confirmed, said) = (Instant::now(), "nothing yet".to_owned());
        let seen = Mutex::new(Seen {
            confirmed,
            said,
            paths_up: paths,
            ana_states: Vec::new(),
            not_grown: None,
            unreliable: None,
        });
        Self { pool, names, paths, loss_time, seen }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the reservation was ours at this time.
    pub(crate) fn confirm(&self, at: Instant) {
        self.seen().confirmed = at;
    }

    /// When the reservation was last confirmed to be ours.
    pub(crate) fn confirmed(&self) -> Instant {
        self.seen().confirmed
    }

    /// Records why the target is unreliable; one sentence.
    pub(crate) fn set_unreliable(&self, why: String) {
        self.seen().unreliable = Some(why);
    }

    /// Records that the target could not be queried.
    pub(crate) fn not_confirmed(&self, said: String) {
        self.seen().said = said;
    }

    /// Records the number of paths that take I/O.
    pub(crate) fn set_paths_up(&self, up: usize) {
        self.seen().paths_up = up;
    }

    /// Records the ANA states of the paths.
    pub(crate) fn set_ana_states(&self, states: Vec<String>) {
        self.seen().ana_states = states;
    }

    /// The subsystem's NQN, and the namespace as configured.
    #[must_use]
    pub fn names(&self) -> (&str, &str) {
        (&self.names.0, &self.names.1)
    }

    /// ANA states of the paths, each once.
    #[must_use]
    pub fn ana_states(&self) -> Vec<String> {
        self.seen().ana_states.clone()
    }

    /// Records the result of growing.
    pub(crate) fn set_grown(&self, result: Result<(), String>) {
        self.seen().not_grown = result.err();
    }

    /// Whether the reservation was last confirmed too long ago.
    pub(crate) fn overdue(&self, now: Instant) -> Option<Fence> {
        let seen = self.seen();
        let ago = now.saturating_duration_since(seen.confirmed);
        (ago > self.loss_time).then(|| Fence::Unconfirmed(ago.as_secs(), seen.said.clone()))
    }

    /// The pool's name.
    #[must_use]
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// How many paths take I/O, and how many are configured.
    #[must_use]
    pub fn paths(&self) -> (usize, usize) {
        (self.seen().paths_up, self.paths)
    }

    /// How long ago the reservation was last confirmed to be ours.
    #[must_use]
    pub fn confirmed_ago(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.seen().confirmed)
    }

    /// One sentence for each problem.
    #[must_use]
    pub fn problems(&self, now: Instant) -> Vec<String> {
        let pool = &self.pool;
        let mut problems = Vec::new();
        let (up, paths) = self.paths();
        if up < paths {
            problems.push(format!("pool {pool}: {up} of {paths} paths to its namespace take I/O"));
        }
        let ago = self.confirmed_ago(now);
        let seen = self.seen();
        if ago > NAMESPACE_UNCONFIRMED_TOLD {
            problems.push(format!(
                "pool {pool}: for {} s the target could not be asked whether the reservation is still ours ({}); after {} s \
                 the server stops",
                ago.as_secs(),
                seen.said,
                self.loss_time.as_secs()
            ));
        }
        if let Some(why) = &seen.not_grown {
            problems.push(format!("pool {pool}: its file system does not grow with its namespace: {why}"));
        }
        if let Some(why) = &seen.unreliable {
            problems.push(format!("pool {pool}: {why}"));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn names() -> (String, String) {
        ("nqn.2026-01.io.example:p".into(), "uuid:u".into())
    }

    #[test]
    fn reservation_not_confirmed_in_time_is_overdue() {
        let state = State::new("p".into(), names(), 1, LIMIT);
        let at = Instant::now();
        state.confirm(at);
        state.not_confirmed("no path".into());
        assert_eq!(state.overdue(at), None);
        assert_eq!(state.overdue(at + LIMIT), None);
        let late = at + LIMIT + Duration::from_millis(1);
        assert_eq!(state.overdue(late), Some(Fence::Unconfirmed(30, "no path".into())));
        state.confirm(late);
        assert_eq!(state.overdue(late), None);
    }

    #[test]
    fn problems_are_reported_until_they_are_resolved() {
        let state = State::new("p".into(), names(), 2, LIMIT);
        let at = Instant::now();
        state.confirm(at);
        assert_eq!(state.problems(at + NAMESPACE_UNCONFIRMED_TOLD), [] as [String; 0]);
        state.set_paths_up(1);
        state.not_confirmed("no path".into());
        state.set_grown(Err("no room".into()));
        let reported = state.problems(at + NAMESPACE_UNCONFIRMED_TOLD + Duration::from_secs(1));
        assert_eq!(reported.len(), 3, "{reported:?}");
        assert_eq!(reported[0], "pool p: 1 of 2 paths to its namespace take I/O");
        assert!(
            reported[1].contains("for 6 s") && reported[1].contains("(no path); after 30 s"),
            "{reported:?}"
        );
        assert!(reported[2].ends_with("namespace: no room"), "{reported:?}");
        state.set_paths_up(2);
        state.confirm(at + LIMIT);
        state.set_grown(Ok(()));
        assert_eq!(state.problems(at + LIMIT), [] as [String; 0]);
    }
}
