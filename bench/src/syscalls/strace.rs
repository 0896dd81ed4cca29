//! Counting with `strace -c`: every call stops the server.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{COUNTER_DEADLINE, Count, Counts, interrupt, kill};

/// A `strace -c` process.
pub(super) struct Strace {
    child: Child,
    out: PathBuf,
}

impl Strace {
    /// Counts the activity of a process's threads from now on.
    pub(super) fn start(pid: u32, scratch: &Path) -> Result<Self> {
        let (out, said) = (scratch.join("counts"), scratch.join("strace.log"));
        let mut command = Command::new("strace");
        command.args(["-c", "-f", "-U", "calls,name", "-p", &pid.to_string(), "-o"]).arg(&out);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&said)?);
        let child = match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("strace is missing; run: sudo apt-get install -y --no-install-recommends strace")
            }
            child => child.context("start strace")?,
        };
        let mut strace = Self { child, out };
        let deadline = Instant::now() + COUNTER_DEADLINE;
        loop {
            let text = std::fs::read_to_string(&said).unwrap_or_default();
            // strace prints "strace: Process 123 attached with 5 threads" once it has attached to all of them.
            if text.contains(" attached") && text.ends_with('\n') {
                return Ok(strace);
            }
            if strace.child.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("strace cannot attach to the server:\n{}", text.trim_end());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Count for Strace {
    fn finish(mut self: Box<Self>) -> Result<Counts> {
        interrupt(&mut self.child).context("end strace")?;
        let text = std::fs::read_to_string(&self.out).context("read what strace counted")?;
        let calls = parse(&text);
        if calls.is_empty() {
            bail!("strace counted no system call:\n{}", text.trim_end());
        }
        Ok((calls, None))
    }
}

impl Drop for Strace {
    fn drop(&mut self) {
        kill(&mut self.child);
    }
}

/// Parses lines of a count and a name, between rules.
fn parse(text: &str) -> BTreeMap<String, u64> {
    let mut calls = BTreeMap::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        if let &[count, name] = &fields[..]
            && let Ok(count) = count.parse::<u64>()
            && name != "total"
        {
            calls.insert(name.to_owned(), count);
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strace_counts_are_parsed_without_header_and_total() {
        let text = "    calls syscall\n--------- ----------------\n     1200 io_uring_enter\n       \
            12 futex\n--------- ----------------\n     1212 total\n";
        let wanted = [("io_uring_enter".to_owned(), 1200), ("futex".to_owned(), 12)].into();
        assert_eq!(parse(text), wanted);
    }
}
