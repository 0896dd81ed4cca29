//! CPU time of a server: its process, its threads and its children, including those that have ended.

use std::collections::HashMap;
use std::fs;

use anyhow::{Context, Result};

/// The relevant fields of `/proc/<pid>/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    parent: u32,
    /// User and system time of all its threads and of the children that it has waited for, in clock ticks.
    ticks: u64,
    /// The same for the children alone.
    ticks_children: u64,
}

impl Stat {
    /// Parses proc_pid_stat(5). The name, in parentheses, may itself contain spaces and parentheses.
    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        // The first of these is field 3, the state.
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let ticks_children = field(16)? + field(17)?;
        Some(Self {
            parent: u32::try_from(field(4)?).ok()?,
            ticks: field(14)? + field(15)? + ticks_children,
            ticks_children,
        })
    }
}

/// A process and its descendants, and their CPU time so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Usage {
    /// CPU-seconds, user and system.
    pub(crate) seconds: f64,
    /// Number of running processes.
    pub(crate) processes: usize,
}

/// CPU time of `root` and all its descendants. A process that ends between two calls adds its time to its parent's, so the
/// difference of two calls is correct as long as the parents wait for their children.
pub(crate) fn tree(root: u32) -> Result<Usage> {
    let stats = descent(root)?;
    let ticks: u64 = stats.values().map(|stat| stat.ticks).sum();
    Ok(Usage { seconds: seconds(ticks), processes: stats.len() })
}

/// `root` and all its descendants.
pub(crate) fn members(root: u32) -> Result<Vec<u32>> {
    Ok(descent(root)?.into_keys().collect())
}

fn descent(root: u32) -> Result<HashMap<u32, Stat>> {
    let mut stats = HashMap::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // The process may end meanwhile.
        let Ok(text) = fs::read_to_string(entry.path().join("stat")) else { continue };
        stats.insert(pid, Stat::parse(&text).context("read /proc/<pid>/stat")?);
    }
    anyhow::ensure!(stats.contains_key(&root), "the server (process {root}) has ended");
    let mut members = vec![root];
    let mut next = 0;
    while let Some(&parent) = members.get(next) {
        members.extend(stats.iter().filter(|(_, stat)| stat.parent == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    stats.retain(|pid, _| members.contains(pid));
    Ok(stats)
}

/// CPU-seconds of the children that this process has waited for.
pub(crate) fn waited_for() -> Result<f64> {
    let text = fs::read_to_string("/proc/self/stat")?;
    Ok(seconds(Stat::parse(&text).context("read /proc/self/stat")?.ticks_children))
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn process_name_with_parentheses_does_not_shift_stat_fields() {
        let text = "7 (a) b 1 (2)) S 3 7 7 0 -1 4194304 100 5 0 0 11 22 33 44 20 0 1 0 5";
        assert_eq!(Stat::parse(text), Some(Stat { parent: 3, ticks: 110, ticks_children: 77 }));
        assert_eq!(Stat::parse("7 (a) S 3"), None);
        assert_eq!(Stat::parse(""), None);
    }

    #[test]
    fn cpu_time_includes_children_that_have_ended() {
        // A shell that burns CPU in a child, waits for it, and keeps running.
        let script = "sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'; echo done; read line";
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a shell starts");
        let mut said = String::new();
        let stdout = shell.stdout.take().expect("its output is a pipe");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut said).expect("a line");
        let usage = tree(shell.id()).expect("the process is alive");
        drop(shell.stdin.take());
        shell.wait().expect("the process ends");
        assert_eq!(usage.processes, 1);
        assert!(usage.seconds >= 0.02, "{usage:?}");
        assert!(waited_for().expect("our own") >= usage.seconds);
    }

    #[test]
    fn cpu_time_of_an_ended_server_is_an_error() {
        let mut child = Command::new("true").spawn().expect("true starts");
        let pid = child.id();
        child.wait().expect("the process ends");
        assert!(tree(pid).expect_err("the process has ended").to_string().contains("has ended"));
    }
}
