//! `forebay-bench syscalls`: the system calls that the server makes for each operation, and how often it waits for a lock.

mod allowed;
mod perf;
mod strace;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use forebay_e2e::progress::say;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;

use crate::load::{self, Contender, Plan, Security, Setup, Workload};
use crate::{forebay, machine};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Time limit for a counter to start, to respond, or to end.
const COUNTER_DEADLINE: Duration = Duration::from_secs(60);
/// Time limit for the operations of one workload.
const SECONDS_MAX: f64 = 600.0;
/// Calls that occur in less than one of a thousand operations are not listed.
const LISTED_MIN: f64 = 0.001;
/// Number of futex(2) calls per READ or WRITE from which the operation counts as taking a contended lock. A lock that every
/// operation takes and that is contended one time in ten exceeds it. strace itself interrupts the waits of idle threads,
/// which then wait again: once per thread.
const FUTEX_CALLS_MAX: f64 = 0.05;

#[derive(Args)]
pub(crate) struct SyscallsArguments {
    /// The forebay-server binary; a release build.
    #[arg(long, value_name = "FILE", default_value_os_t = forebay::default_binary())]
    server: PathBuf,
    /// TOML lines for the `[server]` section of forebay-server's configuration, to compare settings.
    #[arg(long, value_name = "TOML", default_value = "")]
    server_option: String,
    /// Folder of the server's files. On a file system other than tmpfs, the server may make other calls.
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    dir: PathBuf,
    /// What counts the calls. perf does not disturb the server; strace stops it at each call, and the slower server makes
    /// fewer of them.
    #[arg(long, value_enum, default_value = "perf")]
    with: Counter,
    /// Connections of the client, each with its own thread and session.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    connections: u32,
    /// Operations in flight on each connection; the default depends on the workload.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=512))]
    depth: Option<u32>,
    /// Operations of each connection; the default depends on the workload.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    operations: Option<u64>,
    /// Count only in these workloads.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    only: Vec<Name>,
    /// Exit with status 1 if READs or WRITEs call futex(2): a lock was held by another thread, or a thread was woken.
    #[arg(long)]
    require_no_futex: bool,
    /// Exit with status 1 if the server makes a system call that this seccomp profile does not allow.
    #[arg(long, value_name = "FILE")]
    allowed: Option<PathBuf>,
    /// Also write all counts here, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Counter {
    /// `perf stat` with the kernel's tracepoints; needs root and tracefs.
    Perf,
    /// `strace -c`.
    Strace,
}

/// The workloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    /// READs of 1 MiB in order.
    #[value(name = "read-1m")]
    Read1m,
    /// READs of 64 KiB in order.
    #[value(name = "read-64k")]
    Read64k,
    /// READs of 4 KiB at random offsets.
    #[value(name = "randread-4k")]
    RandRead4k,
    /// WRITEs of 1 MiB in order.
    #[value(name = "write-1m")]
    Write1m,
    /// WRITEs of 4 KiB at random offsets.
    #[value(name = "randwrite-4k")]
    RandWrite4k,
    /// Open, read and close files of 323 KB.
    Retinanet,
    /// Create and close a file, open it to remove it, close it.
    Create,
    /// List a directory of 10,000 names.
    List,
}

impl Name {
    fn text(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Workload, bytes of a READ or WRITE, operations in flight, operations of each connection.
    fn sizes(self) -> (Workload, usize, usize, u64) {
        match self {
            Self::Read1m => (Workload::Read, MIB, 4, 1000),
            Self::Read64k => (Workload::Read, 64 * KIB, 8, 4000),
            Self::RandRead4k => (Workload::RandRead, 4 * KIB, 16, 20_000),
            Self::Write1m => (Workload::Write, MIB, 4, 500),
            Self::RandWrite4k => (Workload::RandWrite, 4 * KIB, 16, 10_000),
            Self::Retinanet => (Workload::Retinanet, MIB, 4, 1000),
            Self::Create => (Workload::Create, MIB, 4, 1000),
            Self::List => (Workload::List, MIB, 1, 10),
        }
    }
}

impl SyscallsArguments {
    fn plan(&self, name: Name) -> Plan {
        let (workload, io_bytes, depth, operations) = name.sizes();
        let connections = self.connections as usize;
        Plan {
            workload,
            io_bytes,
            connections,
            channels: 1,
            depth: self.depth.map_or(depth, |depth| depth as usize),
            seconds: SECONDS_MAX,
            operations: Some(self.operations.unwrap_or(operations)),
            files: workload.default_files(connections),
            file_bytes: workload.default_file_bytes(),
            security: Security::Plain,
            mix: None,
        }
    }
}

/// The counts of one workload.
#[derive(Debug, Clone, Serialize)]
struct Counted {
    workload: String,
    /// Whether an operation is a single READ or WRITE.
    #[serde(skip)]
    is_plain_io: bool,
    connections: usize,
    depth: usize,
    operations: u64,
    /// Calls by name.
    calls: BTreeMap<String, u64>,
    /// Counts other than system calls, if the counter supports them.
    #[serde(skip_serializing_if = "Option::is_none")]
    beside: Option<Beside>,
}

/// Counts of perf other than system calls.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
struct Beside {
    /// Calls of futex(2) that wait, for a lock or for work, by the names of the calling threads.
    futex_waits: BTreeMap<String, u64>,
    /// Requests submitted to io_uring: without it, each would be a system call.
    io_uring_requests: u64,
    /// Number of contended kernel locks.
    kernel_contentions: u64,
}

/// A counter's result.
type Counts = (BTreeMap<String, u64>, Option<Beside>);

/// Counts in one workload after the other, each with a separate server.
pub(crate) fn run(arguments: &SyscallsArguments) -> Result<ExitCode> {
    load::prepare(0)?;
    let chosen = match &arguments.only[..] {
        [] => Name::value_variants(),
        only => only,
    };
    let setup = Setup {
        runs: 1,
        servers: &[Contender::Forebay],
        binary: &arguments.server,
        other: None,
        server_option: &arguments.server_option,
        dir: &arguments.dir,
        cold: false,
    };
    println!("{}", machine::describe(&arguments.dir));
    let mut all = Vec::new();
    for &name in chosen {
        let counted = count(arguments, &setup, name).with_context(|| name.text())?;
        print!("{}", counted.table());
        all.push(counted);
    }
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(&all)? + "\n";
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    let blocked: Vec<&str> = all.iter().filter(|it| it.takes_locks()).map(|it| &it.workload[..]).collect();
    if arguments.require_no_futex && !blocked.is_empty() {
        eprintln!(
            "{}: more than {FUTEX_CALLS_MAX} calls of futex(2) for each operation. A READ or WRITE of cached data takes no lock that \
             another thread may hold, and wakes no thread. To see who waits: forebay-bench syscalls --only {}",
            blocked.join(", "),
            blocked.join(",")
        );
        return Ok(ExitCode::FAILURE);
    }
    if let Some(path) = &arguments.allowed {
        let allowed = allowed::read(path)?;
        let made: BTreeSet<&String> = all.iter().flat_map(|it| it.calls.keys()).collect();
        let missing: Vec<&str> =
            made.into_iter().filter(|name| !allowed.contains(*name)).map(|name| &name[..]).collect();
        if !missing.is_empty() {
            eprintln!(
                "the server makes calls that {} does not allow: {}",
                path.display(),
                missing.join(", ")
            );
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn count(arguments: &SyscallsArguments, setup: &Setup<'_>, name: Name) -> Result<Counted> {
    let plan = arguments.plan(name);
    say(format!("counting in {}", name.text()));
    let scratch = tempfile::tempdir()?;
    let mut running: Option<Box<dyn Count>> = None;
    let (_, operations, counts) = load::observe(setup, &plan, |pid| match running.take() {
        None => {
            running = Some(start(arguments.with, pid, scratch.path())?);
            Ok(None)
        }
        Some(counter) => Ok(Some(counter.finish()?)),
    })?;
    let (calls, beside) = counts.context("nothing was counted")?;
    Ok(Counted {
        workload: name.text(),
        is_plain_io: plan.workload.is_plain_io(),
        connections: plan.connections,
        depth: plan.depth,
        operations,
        calls,
        beside,
    })
}

/// A running counter.
trait Count {
    /// Ends it.
    fn finish(self: Box<Self>) -> Result<Counts>;
}

fn start(with: Counter, pid: u32, scratch: &Path) -> Result<Box<dyn Count>> {
    Ok(match with {
        Counter::Perf => Box::new(perf::Perf::start(pid, scratch)?),
        Counter::Strace => Box::new(strace::Strace::start(pid, scratch)?),
    })
}

impl Counted {
    fn per_operation(&self, count: u64) -> f64 {
        count as f64 / self.operations as f64
    }

    /// Whether READs or WRITEs wait for locks.
    fn takes_locks(&self) -> bool {
        let calls = self.calls.get("futex").copied().unwrap_or(0);
        self.is_plain_io && self.per_operation(calls) > FUTEX_CALLS_MAX
    }

    fn table(&self) -> String {
        let mut text = format!(
            "\n{}: {} operations, {} connections, depth {}\n",
            self.workload, self.operations, self.connections, self.depth
        );
        let mut line = |what: &str, count: u64| {
            let _ = writeln!(text, "{:>12.3}  {what}", self.per_operation(count));
        };
        line("system calls", self.calls.values().sum());
        let mut calls: Vec<_> = self.calls.iter().collect();
        calls.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        for (name, &count) in calls {
            if self.per_operation(count) >= LISTED_MIN {
                line(&format!("  {name}"), count);
            }
        }
        if let Some(beside) = &self.beside {
            line("futex calls that wait", beside.futex_waits.values().sum());
            for (threads, &count) in &beside.futex_waits {
                line(&format!("  in threads {threads}"), count);
            }
            line("requests through io_uring", beside.io_uring_requests);
            line("locks of the kernel that were taken", beside.kernel_contentions);
        }
        text
    }
}

/// Interrupts a counter as with Ctrl-C, and waits until it ends.
fn interrupt(child: &mut Child) -> Result<ExitStatus> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process has an id")?;
    kill_process(pid, Signal::INT)?;
    let deadline = Instant::now() + COUNTER_DEADLINE;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() > deadline {
            bail!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Kills a counter that is no longer needed because something else has failed.
fn kill(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(is_plain_io: bool, futex: u64) -> Counted {
        let calls =
            [("pread64".to_owned(), 1000), ("futex".to_owned(), futex), ("mmap".to_owned(), 1)].into();
        let beside = Beside { futex_waits: [("loop".to_owned(), futex / 2)].into(), ..Beside::default() };
        let workload = "a".to_owned();
        Counted {
            workload,
            is_plain_io,
            connections: 8,
            depth: 1,
            operations: 1000,
            calls,
            beside: Some(beside),
        }
    }

    #[test]
    fn plain_io_with_contended_locks_is_detected() {
        assert!(counted(true, 100).takes_locks());
        assert!(!counted(true, 20).takes_locks(), "idle threads that strace has interrupted");
        assert!(!counted(false, 1000).takes_locks(), "other operations may hand work to other threads");
    }

    #[test]
    fn table_sorts_calls_by_frequency_and_names_waiting_threads() {
        let text = counted(true, 200).table();
        let wanted = ["1.201  system calls", "1.000    pread64", "0.200    futex", "0.001    mmap"];
        let places: Vec<_> = wanted.iter().map(|line| text.find(line)).collect();
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{text}");
        assert!(text.contains("0.100    in threads loop"), "{text}");
    }
}
