//! The lists of known failures and of unsteady tests. An unexpected pass is an error, too, so the lists can only shrink.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

/// How a test ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// As its author intended.
    Pass,
    /// It failed for this reason: assertion, crash, or timeout.
    Fail(String),
    /// It did not run, for this reason: according to the suite, the server lacks a feature.
    Skip(String),
}

/// How a listed test ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Fail,
    Skip,
}

/// A test's entry in the list.
#[derive(Debug)]
struct Entry {
    expected: Expected,
    /// Why the test ends like this.
    reason: String,
    /// A part of the suite's message in that case.
    says: String,
}

/// Shorter texts occur in too many failures.
const SAYS_MIN: usize = 6;

/// Tests that are expected not to pass, each with a reason.
#[derive(Debug, Default)]
pub(crate) struct KnownFailures {
    tests: BTreeMap<String, Entry>,
}

/// A result, compared with its expectation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Passed, as expected.
    Passed,
    /// Failed or was skipped, as listed.
    Known,
    /// Failed or was skipped, but is not listed.
    Unexpected,
    /// Failed or was skipped as listed, but with another message: another defect may hide behind the listed one.
    Different,
    /// Listed, but did not end as listed: remove it from the list.
    Stale,
}

/// Lines of a list with their numbers, without empty lines and comments.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line))
        .filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
}

impl KnownFailures {
    /// Reads the list. A line is `fail TEST: REASON` or `skip TEST: REASON`; the indented line below it is a part of the
    /// suite's message in that case. Empty lines and `#` comments are ignored.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut tests = BTreeMap::new();
        let mut lines = lines(text).peekable();
        while let Some((number, line)) = lines.next() {
            let says = lines.next_if(|(_, line)| line.starts_with(' ')).map(|(_, line)| line.trim());
            let (test, entry) =
                Self::entry(line, says).with_context(|| format!("known failures, line {number}"))?;
            if tests.contains_key(&test) {
                bail!("known failures, line {number}: {test} is listed twice");
            }
            tests.insert(test, entry);
        }
        Ok(Self { tests })
    }

    fn entry(line: &str, says: Option<&str>) -> Result<(String, Entry)> {
        let (word, rest) = line.split_once(' ').context("no test")?;
        let expected = match word {
            "fail" => Expected::Fail,
            "skip" => Expected::Skip,
            _ => bail!("{word:?} is neither fail nor skip"),
        };
        let (test, reason) = rest.split_once(": ").context("no reason")?;
        let says = says.context("the indented line with what the suite says is missing")?;
        ensure!(says.len() >= SAYS_MIN, "{says:?} may be in any failure");
        let (reason, says) = (reason.trim().to_owned(), says.to_owned());
        Ok((test.to_owned(), Entry { expected, reason, says }))
    }

    /// Judges a result.
    pub(crate) fn judge(&self, test: &str, outcome: &Outcome) -> Verdict {
        match (self.tests.get(test), outcome) {
            (None, Outcome::Pass) => Verdict::Passed,
            (None, _) => Verdict::Unexpected,
            (Some(Entry { expected: Expected::Fail, says, .. }), Outcome::Fail(reason))
            | (Some(Entry { expected: Expected::Skip, says, .. }), Outcome::Skip(reason)) => {
                if reason.contains(says.as_str()) { Verdict::Known } else { Verdict::Different }
            }
            (Some(_), _) => Verdict::Stale,
        }
    }

    /// The reason why a test is on the list.
    pub(crate) fn reason(&self, test: &str) -> Option<&str> {
        self.tests.get(test).map(|entry| entry.reason.as_str())
    }

    /// The message that the list expects.
    pub(super) fn says(&self, test: &str) -> Option<&str> {
        self.tests.get(test).map(|entry| entry.says.as_str())
    }

    /// Listed tests that are not among these: they were renamed or removed.
    pub(crate) fn absent<'a>(&'a self, tests: &[String]) -> Vec<&'a str> {
        absent(&self.tests, tests)
    }
}

/// Tests that fail if the machine stalls for a moment, each with its cause. A failed one is run again with nothing in
/// parallel.
#[derive(Debug, Default)]
pub(super) struct Unsteady {
    tests: BTreeMap<String, String>,
}

impl Unsteady {
    /// The list's name.
    pub(super) const NAME: &str = "unsteady.txt";

    /// The list in this source tree.
    pub(super) fn of_this_tree() -> Result<Self> {
        Self::parse(include_str!("../../foreign/unsteady.txt"))
    }

    /// Reads the list. A line is `TEST: CAUSE`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut tests = BTreeMap::new();
        for (number, line) in lines(text) {
            let entry = line.split_once(": ").filter(|(_, cause)| !cause.trim().is_empty());
            let (test, cause) = entry.with_context(|| format!("{}, line {number}: no cause", Self::NAME))?;
            if tests.insert(test.to_owned(), cause.trim().to_owned()).is_some() {
                bail!("{}, line {number}: {test} is listed twice", Self::NAME);
            }
        }
        ensure!(tests.len() <= UNSTEADY_MAX, "{} names more than {UNSTEADY_MAX} tests", Self::NAME);
        Ok(Self { tests })
    }

    /// Why a test is on the list.
    pub(super) fn cause(&self, test: &str) -> Option<&str> {
        self.tests.get(test).map(String::as_str)
    }

    /// Listed tests that are not among these.
    pub(crate) fn absent<'a>(&'a self, tests: &[String]) -> Vec<&'a str> {
        absent(&self.tests, tests)
    }
}

/// With more than this many, the cause is the runner.
const UNSTEADY_MAX: usize = 8;

fn absent<'a, T>(listed: &'a BTreeMap<String, T>, tests: &[String]) -> Vec<&'a str> {
    listed.keys().map(String::as_str).filter(|name| !tests.iter().any(|test| test == name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> KnownFailures {
        KnownFailures::parse(
            "# why\n\nfail a.b c: because: so\n    no streams\nskip d: lacks x\n  x is absent\n",
        )
        .expect("a good list")
    }

    #[test]
    fn only_listed_outcomes_are_expected() {
        let (fail, skip) = (Outcome::Fail("status: no streams".into()), Outcome::Skip("x is absent".into()));
        let (late, other) = (Outcome::Fail("not done after 60 s".into()), Outcome::Skip(String::new()));
        for (test, outcome, verdict) in [
            ("new", &Outcome::Pass, Verdict::Passed),
            ("new", &fail, Verdict::Unexpected),
            ("new", &skip, Verdict::Unexpected),
            ("a.b c", &fail, Verdict::Known),
            ("a.b c", &late, Verdict::Different),
            ("a.b c", &Outcome::Pass, Verdict::Stale),
            ("a.b c", &skip, Verdict::Stale),
            ("d", &skip, Verdict::Known),
            ("d", &other, Verdict::Different),
            ("d", &Outcome::Pass, Verdict::Stale),
            ("d", &fail, Verdict::Stale),
        ] {
            assert_eq!(list().judge(test, outcome), verdict, "{test} {outcome:?}");
        }
        assert_eq!((list().reason("a.b c"), list().says("a.b c")), (Some("because: so"), Some("no streams")));
        assert_eq!(list().absent(&["d".to_owned()]), ["a.b c"]);
    }

    #[test]
    fn malformed_and_duplicate_known_failures_are_refused() {
        for bad in [
            "fail a.b",
            "a.b: reason",
            "fails a.b: reason\n  it says this",
            "fail a: x\n  it says this\nskip a: y\n  it says this",
            "fail a.b: it says nothing",
            "fail a.b: it says too little\n  no",
            "  it says this\nfail a.b: reason",
        ] {
            KnownFailures::parse(bad).expect_err(bad);
        }
    }

    #[test]
    fn unsteady_tests_need_a_cause_and_are_listed_once() {
        let list = Unsteady::parse("# why\na.b c: waits: a second\n").expect("a good list");
        assert_eq!((list.cause("a.b c"), list.cause("a")), (Some("waits: a second"), None));
        let many: String = (0..=UNSTEADY_MAX).map(|number| format!("test{number}: cause\n")).collect();
        for bad in ["a.b", "a.b:", "a.b: ", "a: x\na: y", &many] {
            Unsteady::parse(bad).expect_err(bad);
        }
    }

    #[test]
    fn committed_lists_parse() {
        KnownFailures::parse(include_str!("../../foreign/known-failures.txt")).expect("forebay's");
        KnownFailures::parse(include_str!("../../foreign/known-failures-samba.txt")).expect("Samba's");
        Unsteady::of_this_tree().expect("the unsteady ones");
    }
}
