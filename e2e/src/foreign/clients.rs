//! smbclient, impacket, smbprotocol, and raw SMB1. The checks are in `foreign/clients.py`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};

use super::known::Outcome;
use super::room::Room;
use super::target::Target;

/// Time limit of one group.
const LIMIT: Duration = Duration::from_secs(120);

/// Writes the checks and their parameters into the room's folder.
pub(super) fn write(work: &Path, target: &Target) -> Result<()> {
    write_checks(work)?;
    target.write_json(&work.join("target.json"))
}

fn write_checks(work: &Path) -> Result<()> {
    Ok(fs::write(work.join("clients.py"), include_str!("../../foreign/clients.py"))?)
}

/// The groups. The checks of a group run one after the other, in one lane.
pub(super) fn groups(room: &mut Room, work: &Path) -> Result<Vec<String>> {
    write_checks(work)?;
    let done = room.run(&["python3", "/scratch/clients.py", "--groups"], LIMIT)?;
    let groups: Vec<String> = done.output.lines().map(str::to_owned).collect();
    if done.status != 0 || groups.is_empty() {
        bail!("clients.py --groups ended with {}:\n{}", done.status, done.output);
    }
    Ok(groups)
}

/// Runs the checks of a group with names that contain `filter`.
pub(super) fn run(room: &mut Room, group: &str, filter: &str) -> Result<Vec<(String, Outcome)>> {
    let done = room.run(&["python3", "/scratch/clients.py", "/scratch/target.json", group, filter], LIMIT)?;
    let mut results = parse(&done.output);
    if !done.output.lines().any(|line| line == "done") {
        let tail: Vec<&str> = done.output.lines().rev().take(5).collect();
        let reason = format!("ended with status {} before all was done: {}", done.status, tail.join(" | "));
        results.push((group.to_owned(), Outcome::Fail(reason)));
    }
    Ok(results)
}

fn parse(output: &str) -> Vec<(String, Outcome)> {
    let mut results = Vec::new();
    for line in output.lines() {
        if let Some(name) = line.strip_prefix("ok ") {
            results.push((name.to_owned(), Outcome::Pass));
        } else if let Some((name, reason)) =
            line.strip_prefix("not ok ").and_then(|rest| rest.split_once(": "))
        {
            results.push((name.to_owned(), Outcome::Fail(reason.to_owned())));
        }
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_check_results_are_parsed() {
        let output = "ok smbclient.a.put-get\nnoise\nnot ok impacket.b.list: listed: {}\ndone\n";
        assert_eq!(
            parse(output),
            [
                ("smbclient.a.put-get".into(), Outcome::Pass),
                ("impacket.b.list".into(), Outcome::Fail("listed: {}".into())),
            ]
        );
    }
}
