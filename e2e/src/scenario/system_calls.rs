//! pjdfstest: what system calls do on a POSIX file system, for several users and for every kind of file. The server's own file
//! system must pass all of it; what a mount does not pass is on a list, with reasons.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{MIB, ONE, Scenario, scenario};
use crate::cache::Cache;
use crate::foreign::known::{KnownFailures, Outcome, Verdict};
use crate::images::suites::PJDFSTEST;
use crate::lab::Node;
use crate::site::{Kind, POOL, Site};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![Scenario { on_trial: true, ..scenario("posix mount: pjdfstest", compared) }]
}

const KNOWN: &str = include_str!("../../foreign/known-failures-pjdfstest.txt");

const SETTINGS: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
# More than the clocks of two guests differ.
naptime = 0.1
allow_remount = false
[dummy_auth]
entries = [["daemon", "daemon"], ["bin", "bin"]]
"#;

fn compared(site: &Site) -> Result<String> {
    let local = run(site.storage(), POOL)?;
    let failed = |(_, outcome): &&(String, Outcome)| matches!(outcome, Outcome::Fail(_));
    ensure!(local.iter().filter(failed).count() == 0, "the server's own file system: {local:#?}");

    let volume = site.volume(64 * MIB)?;
    // Times that the server sets are seen immediately.
    let mounted = site.mount_posix_with(site.node(ONE), &volume, &[("actimeo", "0")])?;
    let results = run(mounted.node(), mounted.path())?;
    mounted.unmount()?;
    site.delete(&volume)?;

    let known = KnownFailures::parse(KNOWN)?;
    match site.kind() {
        Kind::Forebay => judge(&known, &results, &local),
        Kind::Samba => judge_samba(&known, &results),
    }
}

/// Every result is as on a local file system, or as listed.
fn judge(
    known: &KnownFailures,
    results: &[(String, Outcome)],
    local: &[(String, Outcome)],
) -> Result<String> {
    let names: Vec<String> = results.iter().map(|(name, _)| name.clone()).collect();
    let mut wrong: Vec<String> =
        known.absent(&names).iter().map(|name| format!("{name}: listed, but not a test")).collect();
    let (mut passed, mut listed) = (0, 0);
    for ((name, outcome), (other, at_home)) in results.iter().zip(local) {
        ensure!(name == other, "{name} ran where {other} ran before");
        match known.judge(name, outcome) {
            Verdict::Passed => passed += 1,
            Verdict::Known => listed += 1,
            // The suite does not run it on a local file system either.
            Verdict::Unexpected if matches!((outcome, at_home), (Outcome::Skip(_), Outcome::Skip(_))) => {}
            verdict => wrong.push(format!("{name}: {verdict:?}: {outcome:?}")),
        }
    }
    ensure!(wrong.is_empty(), "{passed} passed, {listed} as listed, and\n{}", wrong.join("\n"));
    Ok(format!("{passed} passed, {listed} known failures"))
}

/// What does not pass on our server does not pass on Samba either.
fn judge_samba(known: &KnownFailures, results: &[(String, Outcome)]) -> Result<String> {
    let passed: Vec<&str> = results
        .iter()
        .filter(|(_, outcome)| *outcome == Outcome::Pass)
        .map(|(name, _)| name.as_str())
        .collect();
    let more: Vec<&str> = passed.iter().copied().filter(|name| known.reason(name).is_some()).collect();
    ensure!(more.is_empty(), "only Samba passes {}", more.join(", "));
    Ok(format!("{} passed, each of which passes on our server", passed.len()))
}

/// Runs the suite in this folder. Returns the tests' results in the order of the suite.
fn run(node: &Node, folder: &str) -> Result<Vec<(String, Outcome)>> {
    node.put("/tmp/pjdfstest", &PJDFSTEST.get(&Cache::open()?)?, 0o700)?;
    node.put("/tmp/pjdfstest.toml", SETTINGS.as_bytes(), 0o600)?;
    // It exits with an error after a failed test; the last line is there only if it has run to its end.
    let output = node.run_within(
        &format!(
            "mkdir -m 755 {folder}/tests\n\
             NO_COLOR=1 /tmp/pjdfstest -c /tmp/pjdfstest.toml -p {folder}/tests > /tmp/pjdfstest.out 2>&1 || true\n\
             cat /tmp/pjdfstest.out; rm -r /tmp/pjdfstest /tmp/pjdfstest.toml /tmp/pjdfstest.out {folder}/tests || true"
        ),
        Duration::from_secs(600),
    )?;
    parse(&output).with_context(|| format!("pjdfstest printed:\n{output}"))
}

/// A test's result is a line; the reason for a failure or skip follows on lines that begin with a tabulator.
fn parse(output: &str) -> Result<Vec<(String, Outcome)>> {
    let mut results: Vec<(String, Outcome)> = Vec::new();
    let mut summary = None;
    for line in output.lines() {
        if let Some(reason) = line.strip_prefix('\t') {
            if let Some((_, Outcome::Fail(all) | Outcome::Skip(all))) = results.last_mut() {
                *all = format!("{all} {}", reason.trim()).trim().to_owned();
            }
            continue;
        }
        if let Some(counts) = line.strip_prefix("Summary: ") {
            summary = Some(counts);
            continue;
        }
        let Some((name, outcome)) = line.split_once(' ') else { continue };
        let outcome = match outcome.trim() {
            "ok" => Outcome::Pass,
            "FAILED" => Outcome::Fail(String::new()),
            "skipped" => Outcome::Skip(String::new()),
            _ => continue,
        };
        results.push((name.to_owned(), outcome));
    }
    let summary = summary.context("the suite did not run to its end")?;
    ensure!(
        summary.ends_with(&format!(" {} total", results.len())),
        "{} results were found of {summary:?}",
        results.len()
    );
    results.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::{KNOWN, parse};
    use crate::foreign::known::{KnownFailures, Outcome};

    #[test]
    fn pjdfstest_results_are_parsed_with_their_reasons() {
        let output = "\nchmod::eloop    ok\nchown::many     FAILED\n\tassertion failed\n\tleft: 1\nutimensat::set   skipped\n\
                      \tno clock\n\nSummary: 1 failed, 1 skipped, 1 passed, 0 expected failures, 3 total\n";
        let expected = [
            ("chmod::eloop".to_owned(), Outcome::Pass),
            ("chown::many".to_owned(), Outcome::Fail("assertion failed left: 1".into())),
            ("utimensat::set".to_owned(), Outcome::Skip("no clock".into())),
        ];
        assert_eq!(parse(output).expect("a whole run"), expected);
        parse(&output.replace("3 total", "4 total")).expect_err("one is missing");
        parse("chmod::eloop    ok\n").expect_err("no summary");
    }

    #[test]
    fn list_of_known_failures_parses() {
        KnownFailures::parse(KNOWN).expect("a good list");
    }
}
