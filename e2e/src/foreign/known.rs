//! The list of known failures: an unexpected pass is an error, too, so that the list can only shrink.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

/// How a test ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// As its author wanted.
    Pass,
    /// It did not, for this reason: assertion, crash, or time.
    Fail(String),
    /// It did not run, for this reason: it misses something in the server, says the suite.
    Skip(String),
}

/// What the list says of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Fail,
    Skip,
}

/// Tests that are expected not to pass, each with a reason.
#[derive(Debug, Default)]
pub(super) struct KnownFailures {
    tests: BTreeMap<String, (Expected, String)>,
}

/// A result and what was expected of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Passed, as it should.
    Passed,
    /// Failed or was skipped, as the list says.
    Known,
    /// Failed or was skipped, and the list does not say so.
    Unexpected,
    /// On the list, and not as the list says: strike it out.
    Stale,
}

impl KnownFailures {
    /// Reads the list. A line is `fail TEST: REASON` or `skip TEST: REASON`; empty lines and `#` comments are free.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut tests = BTreeMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let entry = || -> Result<_> {
                let (word, rest) = line.split_once(' ').context("no test")?;
                let expected = match word {
                    "fail" => Expected::Fail,
                    "skip" => Expected::Skip,
                    _ => bail!("{word:?} is neither fail nor skip"),
                };
                let (test, reason) = rest.split_once(": ").context("no reason")?;
                if tests.contains_key(test) {
                    bail!("{test} is listed twice");
                }
                Ok((test.to_owned(), (expected, reason.trim().to_owned())))
            };
            let (test, value) = entry().with_context(|| format!("known failures, line {}", number + 1))?;
            tests.insert(test, value);
        }
        Ok(Self { tests })
    }

    /// Judges a result.
    pub(super) fn judge(&self, test: &str, outcome: &Outcome) -> Verdict {
        match (self.tests.get(test).map(|(expected, _)| expected), outcome) {
            (None, Outcome::Pass) => Verdict::Passed,
            (None, _) => Verdict::Unexpected,
            (Some(Expected::Fail), Outcome::Fail(_)) | (Some(Expected::Skip), Outcome::Skip(_)) => {
                Verdict::Known
            }
            (Some(_), _) => Verdict::Stale,
        }
    }

    /// The reason why a test is on the list.
    pub(super) fn reason(&self, test: &str) -> Option<&str> {
        self.tests.get(test).map(|(_, reason)| reason.as_str())
    }

    /// Listed tests that are none of these: they were renamed or removed.
    pub(super) fn absent<'a>(&'a self, tests: &'a [String]) -> impl Iterator<Item = &'a str> {
        self.tests.keys().map(String::as_str).filter(|name| !tests.iter().any(|test| test == name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> KnownFailures {
        KnownFailures::parse("# why\n\nfail a.b c: because: so\nskip d: lacks x\n").expect("a good list")
    }

    #[test]
    fn only_what_the_list_says_is_expected() {
        let (fail, skip) = (Outcome::Fail(String::new()), Outcome::Skip(String::new()));
        for (test, outcome, verdict) in [
            ("new", &Outcome::Pass, Verdict::Passed),
            ("new", &fail, Verdict::Unexpected),
            ("new", &skip, Verdict::Unexpected),
            ("a.b c", &fail, Verdict::Known),
            ("a.b c", &Outcome::Pass, Verdict::Stale),
            ("a.b c", &skip, Verdict::Stale),
            ("d", &skip, Verdict::Known),
            ("d", &Outcome::Pass, Verdict::Stale),
            ("d", &fail, Verdict::Stale),
        ] {
            assert_eq!(list().judge(test, outcome), verdict, "{test} {outcome:?}");
        }
        assert_eq!(list().reason("a.b c"), Some("because: so"));
        assert_eq!(list().absent(&["d".to_owned()]).collect::<Vec<_>>(), ["a.b c"]);
    }

    #[test]
    fn every_entry_has_a_kind_a_test_and_a_reason_and_comes_once() {
        for bad in ["fail a.b", "a.b: reason", "fails a.b: reason", "fail a: x\nskip a: y"] {
            KnownFailures::parse(bad).expect_err(bad);
        }
    }

    #[test]
    fn the_lists_of_this_tree_can_be_read() {
        KnownFailures::parse(include_str!("../../foreign/known-failures.txt")).expect("forebay's");
        KnownFailures::parse(include_str!("../../foreign/known-failures-samba.txt")).expect("Samba's");
    }
}
