//! Counting with `perf stat`: the kernel counts, and does not stop the server.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::process::{Resource, getrlimit};

use super::{Beside, COUNTER_DEADLINE, Count, Counts, interrupt, kill};

/// Where the kernel lists its events.
const TRACEFS: [&str; 2] = ["/sys/kernel/tracing/events", "/sys/kernel/debug/tracing/events"];

const CALL: &str = "syscalls:sys_enter_";
const FUTEX: &str = "syscalls:sys_enter_futex";
const SUBMISSION: &str = "io_uring:io_uring_submit_req";
const CONTENTION: &str = "lock:contention_begin";

/// The operations of futex(2) that wait: FUTEX_WAIT (0), FUTEX_LOCK_PI (6) and FUTEX_WAIT_BITSET (9), also with
/// FUTEX_PRIVATE_FLAG (128) and FUTEX_CLOCK_REALTIME (256).
const WAITS: [u32; 3] = [0, 6, 9];
const WAIT_FLAGS: [u32; 4] = [0, 128, 256, 384];

/// Several `perf stat` processes: one process cannot open as many events as there are combinations of system calls and
/// threads.
pub(super) struct Perf {
    /// Each counts a part of the system calls.
    calls: Vec<Stat>,
    /// Counts events other than system calls and, once more, the futex calls that wait.
    beside: Stat,
}

impl Perf {
    /// Counts the activity of a process's threads from now on.
    pub(super) fn start(pid: u32, scratch: &Path) -> Result<Self> {
        let tracefs = TRACEFS.iter().map(Path::new).find(|folder| folder.join("syscalls").is_dir());
        let tracefs = tracefs.context(
            "the kernel does not show its tracepoints of system calls (CONFIG_FTRACE_SYSCALLS); as root, try: \
             mount -t tracefs nodev /sys/kernel/tracing, or --with strace",
        )?;
        let mut events = Vec::new();
        for entry in fs::read_dir(tracefs.join("syscalls"))? {
            let event = format!("syscalls:{}", entry?.file_name().to_string_lossy());
            if event.starts_with(CALL) {
                events.push(event);
            }
        }
        events.sort();
        // One descriptor for each event and thread, plus some spare.
        let threads = fs::read_dir(format!("/proc/{pid}/task"))?.count();
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).min(1 << 20) as usize;
        let at_once = (descriptors / threads.max(1) * 8 / 10).max(1);
        let mut calls = Vec::new();
        for (number, events) in events.chunks(at_once).enumerate() {
            calls.push(Stat::start(pid, scratch.join(format!("calls-{number}")), events, None)?);
        }
        let has = |event: &&str| tracefs.join(event.replace(':', "/")).is_dir();
        let mut events: Vec<String> =
            [SUBMISSION, CONTENTION].iter().filter(|it| has(it)).map(|it| (*it).to_owned()).collect();
        events.push(FUTEX.to_owned());
        let waits = WAITS.iter().flat_map(|wait| WAIT_FLAGS.map(|flags| format!("op == {}", wait + flags)));
        let filter = waits.collect::<Vec<_>>().join(" || ");
        let beside = Stat::start(pid, scratch.join("beside"), &events, Some(&filter))?;
        let mut perf = Self { calls, beside };
        perf.all(|stat| stat.command("enable"))?;
        Ok(perf)
    }

    fn all(&mut self, each: impl FnMut(&mut Stat) -> Result<()>) -> Result<()> {
        self.calls.iter_mut().chain([&mut self.beside]).try_for_each(each)
    }
}

impl Count for Perf {
    fn finish(mut self: Box<Self>) -> Result<Counts> {
        self.all(|stat| stat.command("disable"))?;
        let mut calls = BTreeMap::new();
        for stat in &mut self.calls {
            for count in parse(&stat.finish()?) {
                let Some(name) = count.event.strip_prefix(CALL) else { continue };
                *calls.entry(name.to_owned()).or_default() += count.count;
            }
        }
        calls.retain(|_, count| *count > 0);
        if calls.is_empty() {
            bail!("perf counted no system call");
        }
        let mut beside = Beside::default();
        for count in parse(&self.beside.finish()?) {
            match &count.event[..] {
                SUBMISSION => beside.io_uring_requests += count.count,
                CONTENTION => beside.kernel_contentions += count.count,
                _ if count.count > 0 => *beside.futex_waits.entry(count.threads).or_default() += count.count,
                _ => {}
            }
        }
        Ok((calls, Some(beside)))
    }
}

/// One `perf stat` process.
struct Stat {
    child: Child,
    control: File,
    acknowledged: File,
    folder: PathBuf,
}

impl Stat {
    /// Attaches to the threads of a process without counting. `filter` applies to the last event.
    fn start(pid: u32, folder: PathBuf, events: &[String], filter: Option<&str>) -> Result<Self> {
        fs::create_dir(&folder)?;
        let (control, acknowledged) = (fifo(&folder.join("control"))?, fifo(&folder.join("acknowledged"))?);
        let mut command = Command::new("perf");
        command.args(["stat", "--field-separator", ",", "--per-thread", "--delay", "-1"]);
        command.arg("--output").arg(folder.join("counts"));
        let fifos = format!("fifo:{0}/control,{0}/acknowledged", folder.display());
        command.args(["--control", &fifos, "--pid", &pid.to_string()]);
        for event in events {
            command.args(["--event", event]);
        }
        if let Some(filter) = filter {
            command.args(["--filter", filter]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(folder.join("log"))?);
        let child = match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("perf is missing; run: sudo apt-get install -y --no-install-recommends linux-perf")
            }
            child => child.context("start perf")?,
        };
        Ok(Self { child, control, acknowledged, folder })
    }

    /// Sends a command to it, and waits until it is complete.
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
            if self.child.try_wait()?.is_some() || Instant::now() > deadline {
                let said = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
                bail!(
                    "perf cannot count system calls here; run this as root, or try --with strace. It said:\n{}",
                    said.trim_end()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it and returns its counts.
    fn finish(&mut self) -> Result<String> {
        interrupt(&mut self.child).context("end perf")?;
        fs::read_to_string(self.folder.join("counts")).context("read what perf counted")
    }
}

impl Drop for Stat {
    fn drop(&mut self) {
        kill(&mut self.child);
    }
}

/// A FIFO with both ends open, so that no call blocks on the other side.
fn fifo(path: &Path) -> Result<File> {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    Ok(OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?)
}

/// A count of some threads.
#[derive(Debug, PartialEq, Eq)]
struct ByThread {
    /// Their name, without a number.
    threads: String,
    event: String,
    count: u64,
}

/// Parses lines of `name-thread,count,unit,event,…`.
fn parse(text: &str) -> Vec<ByThread> {
    let mut counts = Vec::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split(',').collect();
        let &[thread, count, _, event, ..] = &fields[..] else { continue };
        // `<not counted>` if the thread has not run.
        let count = count.parse().unwrap_or(0);
        let name = thread.trim().rsplit_once('-').map_or(thread, |(name, _)| name);
        let threads = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-').to_owned();
        counts.push(ByThread { threads, event: event.to_owned(), count });
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perf_counts_are_parsed_per_thread_name_and_event() {
        let text = "# started on Wed Nov 25\n\nlook-up-10-24974,9,,syscalls:sys_enter_futex,9,100.00,,\n\
            loop-0-2500,<not counted>,,syscalls:sys_enter_read,0,100.00,,\n\
            forebay-server-2400,40,,io_uring:io_uring_submit_req,9,100.00,,\n";
        let by = |threads: &str, event: &str, count| ByThread {
            threads: threads.to_owned(),
            event: event.to_owned(),
            count,
        };
        let wanted = [
            by("look-up", FUTEX, 9),
            by("loop", "syscalls:sys_enter_read", 0),
            by("forebay-server", SUBMISSION, 40),
        ];
        assert_eq!(parse(text), wanted);
    }
}
