//! The machine used for the measurement: its description, and the priority of its processes.

use std::path::Path;

use anyhow::{Context, Result};
use forebay_e2e::progress::say;
use rustix::process::{Resource, Rlimit};

/// Sets the priority of this process and its future children, as in nice(1).
pub(crate) fn set_priority(nice: i32) -> Result<()> {
    rustix::process::setpriority_process(None, nice).context("set the priority (--nice)")?;
    // With autogroups, a process's nice value counts only within its session (sched(7)).
    let grouped = std::fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled");
    if grouped.is_ok_and(|enabled| enabled.trim() == "1") {
        let own = rustix::process::getpid();
        if rustix::process::getsid(None)? == own {
            std::fs::write("/proc/self/autogroup", nice.to_string()).context("set the session's priority")?;
        } else {
            say(
                "--nice counts only within this session here (autogroups): start this with `setsid --wait` to be heard",
            );
        }
    }
    Ok(())
}

/// Raises the limit of open files of this process and its future children to the maximum: a connection uses one.
pub(crate) fn raise_descriptors() -> Result<()> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    rustix::process::setrlimit(Resource::Nofile, raised).context("raise the number of open files")
}

/// Describes the machine.
pub(crate) fn describe(dir: &Path) -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = rustix::system::uname();
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("?", |(_, it)| it);
    format!(
        "{cores} cores ({model}), Linux {}, loopback, files in {}",
        kernel.release().to_string_lossy(),
        dir.display()
    )
}
