//! Memory of a server: its process and its children.

use std::fs;

use anyhow::Result;

use crate::cpu;

/// Resets the peak, so that [`peak`] returns the maximum since now.
pub(crate) fn reset_peak(root: u32) -> Result<()> {
    for pid in cpu::members(root)? {
        // proc_pid_clear_refs(5). If a process has ended or the write is refused, its peak covers its whole life.
        let _ = fs::write(format!("/proc/{pid}/clear_refs"), "5");
    }
    Ok(())
}

/// Peak resident memory, summed over the processes. Shared pages count in each process, and the peaks may occur at different
/// times.
pub(crate) fn peak(root: u32) -> Result<u64> {
    let statuses =
        cpu::members(root)?.into_iter().map(|pid| fs::read_to_string(format!("/proc/{pid}/status")));
    Ok(statuses.flatten().filter_map(|text| high_water(&text)).sum())
}

/// Current resident memory, summed over the processes: first with a shared page counted in each process, second with it
/// counted once, in equal shares (proportional set size).
pub(crate) fn now(root: u32) -> Result<(u64, u64)> {
    let mut sums = (0, 0);
    for pid in cpu::members(root)? {
        // It may have ended.
        let Ok(text) = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) else { continue };
        sums.0 += field(&text, "Rss:").unwrap_or(0);
        sums.1 += field(&text, "Pss:").unwrap_or(0);
    }
    Ok(sums)
}

/// Current resident memory from VmRSS, summed over the processes: cheap enough for sampling during a run.
pub(crate) fn resident(root: u32) -> Result<u64> {
    let statuses =
        cpu::members(root)?.into_iter().map(|pid| fs::read_to_string(format!("/proc/{pid}/status")));
    Ok(statuses.flatten().filter_map(|text| field(&text, "VmRSS:")).sum())
}

/// VmHWM of a `/proc/<pid>/status`, in bytes.
fn high_water(status: &str) -> Option<u64> {
    field(status, "VmHWM:")
}

/// A field in bytes; the kernel's kB are KiB.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn high_water_mark_is_parsed_into_bytes() {
        assert_eq!(high_water("Name:\tx\nVmHWM:\t    1234 kB\nVmRSS:\t 5 kB\n"), Some(1234 * 1024));
        assert_eq!(high_water("Name:\tkthreadd\n"), None, "a kernel thread has none");
    }

    #[test]
    fn memory_figures_of_this_process_are_plausible() {
        let own = std::process::id();
        let (resident, proportional) = now(own).expect("the process is alive");
        assert!(resident > 100_000 && proportional > 0 && proportional <= resident);
        assert!(peak(own).expect("the process is alive") > 100_000);
        assert!(super::resident(own).expect("the process is alive") > 100_000);
    }
}
