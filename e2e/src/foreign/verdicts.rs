//! The results of a run, compared with the lists and reported at its end.

use std::collections::BTreeMap;

use super::known::{KnownFailures, Outcome, Unsteady, Verdict};
use super::lane::TestResult;

/// A test that has run.
struct Judged {
    test: String,
    outcome: Outcome,
    verdict: Verdict,
    lane: String,
}

/// A test that failed first and passed when it was rerun with nothing in parallel.
struct PassedLater {
    test: String,
    first: String,
}

/// All results of a run.
pub(super) struct Verdicts {
    list_name: &'static str,
    known: KnownFailures,
    unsteady: Unsteady,
    /// Every existing smbtorture test, whether selected or not.
    existing: Vec<String>,
    judged: Vec<Judged>,
    passed_later: Vec<PassedLater>,
    /// The end of each lane's server log.
    logs: BTreeMap<String, String>,
}

impl Verdicts {
    pub(super) fn new(list_name: &'static str, known: KnownFailures, unsteady: Unsteady) -> Self {
        Self {
            list_name,
            known,
            unsteady,
            existing: Vec::new(),
            judged: Vec::new(),
            passed_later: Vec::new(),
            logs: BTreeMap::new(),
        }
    }

    /// Records that these tests exist: the lists may name them.
    pub(super) fn know(&mut self, tests: &[String]) {
        self.existing.extend_from_slice(tests);
    }

    /// Stores the end of a lane's server log.
    pub(super) fn keep_log(&mut self, lane: &str, log: String) {
        self.logs.insert(lane.to_owned(), log);
    }

    /// Records and prints a result.
    pub(super) fn record(&mut self, lane: &str, result: TestResult) {
        let TestResult { test, outcome, took } = result;
        let verdict = self.known.judge(&test, &outcome);
        let word = match (&outcome, verdict) {
            (Outcome::Pass, Verdict::Passed) => "ok",
            (Outcome::Pass, _) => "PASSES, which the list does not expect",
            (Outcome::Fail(_), Verdict::Known) => "fails, as listed",
            (Outcome::Fail(_), Verdict::Different) => "FAILS in another way than listed",
            (Outcome::Fail(_), _) => "FAILS",
            (Outcome::Skip(_), Verdict::Known) => "skipped, as listed",
            (Outcome::Skip(_), Verdict::Different) => "SKIPPED in another way than listed",
            (Outcome::Skip(_), _) => "SKIPPED",
        };
        println!("{:7.2} s  {test}: {word}", took.as_secs_f64());
        let judged = Judged { test, outcome, verdict, lane: lane.to_owned() };
        match self.judged.iter_mut().find(|before| before.test == judged.test) {
            // A rerun: keep the first result.
            Some(before) => {
                if judged.verdict == Verdict::Passed
                    && let Outcome::Fail(first) = &before.outcome
                {
                    self.passed_later.push(PassedLater { test: judged.test.clone(), first: first.clone() });
                }
                *before = judged;
            }
            None => {
                if !self.existing.contains(&judged.test) {
                    self.existing.push(judged.test.clone());
                }
                self.judged.push(judged);
            }
        }
    }

    /// Failed tests that the list marks as racing with the machine.
    pub(super) fn to_be_run_again(&self) -> Vec<String> {
        self.judged
            .iter()
            .filter(|judged| judged.verdict == Verdict::Unexpected)
            .filter(|judged| matches!(judged.outcome, Outcome::Fail(_)))
            .filter(|judged| self.unsteady.cause(&judged.test).is_some())
            .map(|judged| judged.test.clone())
            .collect()
    }

    /// The tests that have run, in the order in which they were recorded.
    #[cfg(test)]
    pub(super) fn tests(&self) -> impl Iterator<Item = &str> {
        self.judged.iter().map(|judged| judged.test.as_str())
    }

    fn count(&self, wanted: Verdict) -> usize {
        self.judged.iter().filter(|judged| judged.verdict == wanted).count()
    }

    /// Everything that is not as expected, one line each.
    fn complaints(&self, filter: &str) -> Vec<String> {
        let mut lines: Vec<String> = self.judged.iter().filter_map(|judged| self.complaint(judged)).collect();
        if filter.is_empty() {
            let lists = [
                (self.list_name, self.known.absent(&self.existing)),
                (Unsteady::NAME, self.unsteady.absent(&self.existing)),
            ];
            for (list, absent) in lists {
                lines.extend(
                    absent.iter().map(|name| format!("{name} is on {list}, but there is no such test")),
                );
            }
        }
        lines
    }

    fn complaint(&self, Judged { test, outcome, verdict, .. }: &Judged) -> Option<String> {
        let listed = self.known.reason(test).unwrap_or_default();
        Some(match (verdict, outcome) {
            (Verdict::Passed | Verdict::Known, _) => return None,
            (Verdict::Unexpected, Outcome::Fail(reason)) => format!("{test} failed: {reason}"),
            (Verdict::Unexpected, Outcome::Skip(reason)) => format!("{test} was skipped: {reason}"),
            (Verdict::Different, Outcome::Fail(reason) | Outcome::Skip(reason)) => {
                let expected = self.known.says(test).unwrap_or_default();
                format!(
                    "{test} says another thing than listed ({expected:?}): {reason}; listed because: {listed}"
                )
            }
            (Verdict::Stale, Outcome::Fail(reason)) => {
                format!("{test} failed instead of being skipped: {reason}; listed because: {listed}")
            }
            (Verdict::Stale, Outcome::Skip(reason)) => {
                format!("{test} was skipped instead of failing: {reason}; listed because: {listed}")
            }
            (_, Outcome::Pass) => format!("{test} passes; listed because: {listed}"),
        })
    }

    /// Prints the end of the run. Returns whether all results were as expected.
    pub(super) fn report(&self, filter: &str) -> bool {
        let complaints = self.complaints(filter);
        if !complaints.is_empty() {
            println!("\nNot as expected ({} is the list):", self.list_name);
        }
        for complaint in &complaints {
            println!("  {complaint}");
        }
        for (lane, log) in &self.logs {
            let wrong: Vec<&str> = self
                .judged
                .iter()
                .filter(|judged| judged.lane == *lane && self.complaint(judged).is_some())
                .map(|judged| judged.test.as_str())
                .collect();
            if !wrong.is_empty() {
                println!("\nEnd of the log of the server of {lane} ({}):\n{log}", wrong.join(", "));
            }
        }
        if !self.passed_later.is_empty() {
            println!("\nFailed first, and passed with nothing beside them ({} is the list):", Unsteady::NAME);
        }
        for PassedLater { test, first } in &self.passed_later {
            println!("  {test} failed: {first}; {}", self.unsteady.cause(test).unwrap_or_default());
        }
        println!(
            "\n{} passed ({} of them not at once), {} known failures, {} failed",
            self.count(Verdict::Passed),
            self.passed_later.len(),
            self.count(Verdict::Known),
            complaints.len()
        );
        // A filter that selects nothing is probably mistyped.
        complaints.is_empty() && !self.judged.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn verdicts() -> Verdicts {
        let known = KnownFailures::parse("fail listed: a reason\n  what it says\n").expect("a good list");
        let unsteady = Unsteady::parse("races: waits for a second, and counts\n").expect("a good list");
        let mut verdicts = Verdicts::new("list", known, unsteady);
        verdicts.know(&["listed".to_owned(), "races".to_owned(), "other".to_owned()]);
        verdicts
    }

    fn record(verdicts: &mut Verdicts, test: &str, outcome: Outcome) {
        verdicts.record("lane-1", TestResult { test: test.to_owned(), outcome, took: Duration::ZERO });
    }

    #[test]
    fn only_listed_racy_tests_are_run_again() {
        let mut found = verdicts();
        record(&mut found, "races", Outcome::Fail("too late".into()));
        record(&mut found, "other", Outcome::Fail("broken".into()));
        assert_eq!(found.to_be_run_again(), ["races"]);
        record(&mut found, "races", Outcome::Pass);
        assert_eq!(found.complaints(""), ["other failed: broken"]);
        assert_eq!(found.passed_later.len(), 1);

        let mut found = verdicts();
        record(&mut found, "races", Outcome::Fail("too late".into()));
        record(&mut found, "races", Outcome::Fail("too late again".into()));
        assert_eq!(found.complaints(""), ["races failed: too late again"]);
    }

    #[test]
    fn known_failure_with_another_reason_fails_the_run() {
        let mut found = verdicts();
        record(&mut found, "listed", Outcome::Fail("says: what it says".into()));
        assert!(found.complaints("").is_empty());
        for other in ["not done after 60 s", "ended with status 139 and no result: "] {
            let mut found = verdicts();
            record(&mut found, "listed", Outcome::Fail(other.into()));
            let complaints = found.complaints("");
            assert!(complaints.len() == 1 && complaints[0].contains(other), "{complaints:?}");
        }
    }

    #[test]
    fn listed_tests_that_do_not_exist_fail_an_unfiltered_run() {
        let mut found = verdicts();
        found.existing.retain(|test| test == "other");
        assert_eq!(found.complaints("").len(), 2);
        assert!(found.complaints("a filter").is_empty());
    }
}
