//! Counting with `perf stat`: the kernel counts by itself, and the server runs on as before.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::{Beside, COUNTER_DEADLINE, Count, Counts, interrupt, kill};

const CALL: &str = "syscalls:sys_enter_";
const FUTEX: &str = "syscalls:sys_enter_futex";
const SUBMISSION: &str = "io_uring:io_uring_submit_req";
const CONTENTION: &str = "lock:contention_begin";
/// The operations of futex(2) that wait, with and without FUTEX_PRIVATE_FLAG (128) and FUTEX_CLOCK_REALTIME (256): FUTEX_WAIT (0),
/// FUTEX_LOCK_PI (6), FUTEX_WAIT_BITSET (9).
const WAITS: [u32; 9] = [0, 128, 6, 134, 9, 137, 256 + 9, 256 + 137, 256 + 128];

/// A `perf stat`.
pub(super) struct Perf {
    child: Child,
    control: File,
    acknowledged: File,
    out: PathBuf,
    said: PathBuf,
}

impl Perf {
    /// Counts what the threads of a process do from now on.
    pub(super) fn start(pid: u32, scratch: &Path) -> Result<Self> {
        let (control, acknowledged) = (fifo(&scratch.join("control"))?, fifo(&scratch.join("acknowledged"))?);
        let (out, said) = (scratch.join("counts"), scratch.join("perf.log"));
        raise_descriptors();
        let filter: Vec<String> = WAITS.iter().map(|wait| format!("op == {wait}")).collect();
        let mut command = Command::new("perf");
        command
            .args(["stat", "--field-separator", ",", "--no-big-num", "--delay", "-1", "--output"])
            .arg(&out);
        let fifos = format!("fifo:{0}/control,{0}/acknowledged", scratch.display());
        command.args(["--control", &fifos, "--pid", &pid.to_string()]);
        for event in [&format!("{CALL}*"), SUBMISSION, CONTENTION, FUTEX] {
            command.args(["--event", event]);
        }
        // Of the last event: the futex calls once more, as far as they wait.
        command.args(["--filter", &filter.join(" || ")]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&said)?);
        let child = match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("perf is missing; run: sudo apt-get install -y --no-install-recommends linux-perf")
            }
            child => child.context("start perf")?,
        };
        let mut perf = Self { child, control, acknowledged, out, said };
        perf.command("enable")?;
        Ok(perf)
    }

    /// Has it do something, and waits until it is done.
    fn command(&mut self, what: &str) -> Result<()> {
        self.control.write_all(format!("{what}\n").as_bytes())?;
        let deadline = Instant::now() + COUNTER_DEADLINE;
        let mut answer = [0; 16];
        loop {
            match self.acknowledged.read(&mut answer) {
                Ok(count) if answer[..count].starts_with(b"ack") => return Ok(()),
                Ok(count) => bail!("perf answered {:?}", String::from_utf8_lossy(&answer[..count])),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
            let has_ended = self.child.try_wait()?.is_some();
            if has_ended || Instant::now() > deadline {
                let said = std::fs::read_to_string(&self.said).unwrap_or_default();
                bail!(
                    "perf cannot count system calls here (it needs root, tracefs in /sys/kernel/tracing, and a kernel with \
                     CONFIG_FTRACE_SYSCALLS); try --with strace. It said:\n{}",
                    said.trim_end()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Count for Perf {
    fn finish(mut self: Box<Self>) -> Result<Counts> {
        self.command("disable")?;
        interrupt(&mut self.child).context("end perf")?;
        let text = std::fs::read_to_string(&self.out).context("read what perf counted")?;
        parse(&text)
    }
}

impl Drop for Perf {
    fn drop(&mut self) {
        kill(&mut self.child);
    }
}

/// Allows what is started as many descriptors as the kernel allows: perf needs one for each event, thread and processor. Without
/// the right to do so, perf says what is missing.
fn raise_descriptors() {
    let limit =
        std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|text| text.trim().parse().ok());
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit });
}

/// A FIFO with both ends open, so that no call waits for the other side.
fn fifo(path: &Path) -> Result<File> {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    Ok(OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?)
}

/// Reads lines of `count,unit,event,…`.
fn parse(text: &str) -> Result<Counts> {
    let mut calls = BTreeMap::new();
    let mut beside = Beside::default();
    for line in text.lines() {
        let fields: Vec<&str> = line.split(',').collect();
        let &[count, _, event, ..] = &fields[..] else { continue };
        // `<not counted>` where no thread has made the call.
        let count = count.parse::<u64>().unwrap_or(0);
        match event {
            SUBMISSION => beside.io_uring_requests = count,
            CONTENTION => beside.kernel_contentions = count,
            FUTEX if calls.contains_key("futex") => beside.futex_waits = count,
            _ => {
                if let Some(name) = event.strip_prefix(CALL) {
                    calls.insert(name.to_owned(), count);
                }
            }
        }
    }
    if calls.values().all(|count| *count == 0) {
        bail!("perf counted no system call:\n{}", text.trim_end());
    }
    calls.retain(|_, count| *count > 0);
    Ok((calls, Some(beside)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_by_their_events_and_waits_from_the_second_line_of_futex() {
        let text = "# started on Wed Nov 25\n\n0,,syscalls:sys_enter_read,9,100.00,,\n\
            12,,syscalls:sys_enter_io_uring_enter,9,100.00,,\n<not counted>,,syscalls:sys_enter_openat,0,100.00,,\n\
            5,,syscalls:sys_enter_futex,9,100.00,,\n40,,io_uring:io_uring_submit_req,9,100.00,,\n\
            3,,lock:contention_begin,9,100.00,,\n2,,syscalls:sys_enter_futex,9,100.00,,\n";
        let (calls, beside) = parse(text).expect("counts");
        assert_eq!(calls, [("io_uring_enter".to_owned(), 12), ("futex".to_owned(), 5)].into());
        let wanted = Beside { futex_waits: 2, io_uring_requests: 40, kernel_contentions: 3 };
        assert_eq!(beside, Some(wanted));
        assert!(parse("# started on Wed Nov 25\n").is_err());
    }
}
