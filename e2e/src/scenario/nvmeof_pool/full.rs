//! A pool that another node takes over while its file system is full.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::records::{EPOCH, STARTS};
use super::server::*;
use super::takeover::{Off, Rebooted, intact, synced};
use crate::guest::GUEST_BINARY;
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::guest::calls::space::{Fill, Filled, Space};
use crate::lab::Lab;
use crate::scenario::MIB;
use crate::scenario::nvmeof::{FIRST, SECOND};
use crate::site::POOL;

/// Space left for the client when the rest is used up.
const LEFT_BYTES: u64 = 24 * MIB;
/// Writes that fail before the power is cut.
const REFUSED: usize = 8;

/// Writes of a file that failed because of missing space, and those that failed for another reason.
fn refused(lines: &[String]) -> (usize, Vec<&String>) {
    let failed = lines.iter().filter(|line| line.starts_with("failed "));
    let (full, other): (Vec<_>, Vec<_>) = failed.partition(|line| line.contains("(os error 28)"));
    (full.len(), other)
}

/// Fills the rest of the file system with small files outside of the volumes.
fn nothing_left(server: &Server<'_>) -> Result<()> {
    let script = format!(
        "cd {POOL}/volumes/{ID}/small
         i=0; while echo x 2> /dev/null > $i; do i=$((i + 1)); done; sync -f ."
    );
    server.node.run_within(&script, Duration::from_secs(60)).map(drop)
}

const ID: &str = "full";

pub(in crate::scenario) fn full(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let client = Rebooted(lab);
    // Volumes without a quota share the file system's space.
    let settings = |epoch| Settings { quota: "none", ..Settings::epoch(epoch) };
    let first = Server::start(&fabric, FIRST, Settings { format: true, ..settings(1) })?;
    first.volume(ID)?;
    let mounted = first.mount(ID)?;
    let space: Space = first.node.call("space", &POOL)?;
    ensure!(space.free_bytes > LEFT_BYTES, "{space:?}");
    let large = space.free_bytes - LEFT_BYTES;
    first.node.run(&format!("cd {POOL}/volumes/{ID}; mkdir small; fallocate -l {large} large"))?;
    let seed = SEED.to_string();
    let mut writer = mounted.client.spawn(&[GUEST_BINARY, "record-writes", &mounted.at, &seed])?;
    let until = Duration::from_secs(120);
    writer.wait_for("writes are refused", until, |lines| refused(lines).0 >= REFUSED)?;
    nothing_left(&first)?;

    // The node cannot run commands any more, not even to clean up.
    std::mem::forget(first);
    let off = Off::cut(lab, FIRST)?;
    let lines = writer.lines().to_vec();
    let (numbers, (for_space, other)) = (synced(&lines), refused(&lines));
    ensure!(other.is_empty() && !numbers.is_empty(), "{} synced, failed: {other:?}", numbers.len());
    // A hard mount cannot be unmounted when its server is gone.
    drop(writer);
    std::mem::forget(mounted);
    drop(client);

    let second = Server::start(&fabric, SECOND, settings(2))?;
    second.holds_the_reservation()?;
    let epoch = EPOCH.text(second.node, POOL)?;
    ensure!(epoch.contains("epoch 2\n"), "the epoch is not recorded: {epoch:?}");
    let starts = STARTS.text(second.node, POOL)?;
    ensure!(starts.lines().count() == 2, "the start is not noted: {starts:?}");
    let again = second.mount(ID)?;
    let bytes = intact(&second, ID, &numbers, &again)?;
    let fill = |name: &str, bytes_max: u64| -> Result<Filled> {
        let fill = Fill { path: format!("{}/{name}", again.at).into(), block_bytes: 64 << 10, bytes_max };
        again.client.call_within("fill", &fill, Duration::from_secs(60))
    };
    let filled = fill("more", MIB)?;
    ensure!(filled.no_space, "it was not full: {filled:?}");

    // Deleting frees space.
    // There may not even have been space for the name `more`.
    again.client.run(&format!("rm {0}/large; rm -f {0}/more; rm -r {0}/small", again.at))?;
    let shards =
        Shards { folder: again.at.as_str().into(), prefix: "s".into(), count: 4, bytes: 4 * MIB, seed: SEED };
    let sums: Vec<Sum> = again.client.call_within("write-shards", &shards, Duration::from_secs(60))?;
    again.client.run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    let sums = Sums { folder: again.at.as_str().into(), sums };
    let _: u64 = again.client.call_within("verify-sums", &sums, Duration::from_secs(60))?;
    intact(&second, ID, &numbers, &again)?;
    again.unmount()?;
    second.stop()?;
    drop(off);
    fabric.node(FIRST).run("modprobe -a nvme-fabrics nvme-tcp")?;
    Ok(format!(
        "{} files ({} KiB) synced and intact, {for_space} writes refused before the takeover",
        numbers.len(),
        bytes >> 10
    ))
}
