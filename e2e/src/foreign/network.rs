//! The network of a run: a namespace with nothing but a loopback, so that suites may block connections by rules of
//! their own, and every port is free.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::room::Room;
use crate::cache::Cache;
use crate::native;

/// Set in the process that is in the namespace.
const INSIDE: &str = "FOREBAY_FOREIGN_NETWORK";

/// Becomes this process anew in a namespace; returns in the one that is there.
pub(super) fn enter(cache: &Cache) -> Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(());
    }
    // From inside nothing can be fetched.
    native::prepare(cache)?;
    let error = Command::new("unshare")
        .args(["--net", "--"])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .exec();
    Err(error).context("start unshare")
}

/// Makes it usable. What is received is acknowledged at once: smbtorture blocks a channel right after an answer came by it, and
/// where the acknowledgment of that was still being put off, nothing new goes out on it any more, a break least of all.
pub(super) fn begin(room: &mut Room) -> Result<()> {
    let loopback = "local 127.0.0.1 dev lo proto kernel scope host src 127.0.0.1 quickack 1";
    let route = format!("ip link set lo up && ip route replace table local {loopback}");
    let done = room.run(&["sh", "-c", &route], Duration::from_secs(10))?;
    ensure!(done.status == 0, "the loopback does not come up: {}", done.output);
    Ok(())
}
