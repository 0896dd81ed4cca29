//! One long-lived shell in the nodes' root file system that runs commands one after the other: chroot takes longer than most
//! of the tests.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::{native, rundir};

/// Reads a job number per line, runs that job under its time limit, and prints its status.
const WORKER: &str = r#"
while read -r number seconds; do
    timeout --kill-after=3 "$seconds" sh "jobs/$number" > "jobs/$number.out" 2>&1 < /dev/null
    echo "$number $?"
done
"#;

/// The result of a command.
#[derive(Debug)]
pub(super) struct Done {
    /// Its exit status; 124 after a timeout (137 if it had to be killed).
    pub(super) status: i32,
    /// Its standard output and standard error.
    pub(super) output: String,
}

impl Done {
    /// Whether it timed out.
    pub(super) fn timed_out(&self) -> bool {
        matches!(self.status, 124 | 137)
    }
}

/// The shell. Its folder is `/scratch` inside.
#[derive(Debug)]
pub(super) struct Room {
    work: PathBuf,
    shell: Child,
    jobs: ChildStdin,
    answers: BufReader<ChildStdout>,
    next: u32,
}

impl Room {
    /// Enters the root with `work` as `/scratch`.
    pub(super) fn enter(cache: &Cache, work: &Path) -> Result<Self> {
        fs::create_dir_all(work.join("jobs"))?;
        let mut shell = native::command(cache, work, &["sh".into(), "-uc".into(), WORKER.into()])?
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start unshare")?;
        rundir::guard_process(shell.id());
        let jobs = shell.stdin.take().context("standard input is a pipe")?;
        let answers = BufReader::new(shell.stdout.take().context("standard output is a pipe")?);
        Ok(Self { work: work.to_owned(), shell, jobs, answers, next: 0 })
    }

    /// Runs a command to completion or until its time limit.
    pub(super) fn run(&mut self, argv: &[&str], limit: Duration) -> Result<Done> {
        let number = self.next;
        self.next += 1;
        let job = self.work.join("jobs").join(number.to_string());
        let line: Vec<String> = argv.iter().map(|word| quoted(word)).collect();
        fs::write(&job, format!("exec {}\n", line.join(" ")))?;
        writeln!(self.jobs, "{number} {}", limit.as_secs().max(1)).context("the room's shell is gone")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        let Some((_, status)) = answer.trim_end().split_once(' ') else {
            bail!("the room's shell is gone");
        };
        let output = fs::read(job.with_extension("out"))?;
        Ok(Done { status: status.parse()?, output: String::from_utf8_lossy(&output).into_owned() })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
        rundir::release_process(self.shell.id());
    }
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}
