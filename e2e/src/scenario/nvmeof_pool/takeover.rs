//! A pool that is taken over by another host, or by its own host after a period without its target.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::server::*;
use crate::guest::GUEST_BINARY;
use crate::guest::calls::writer::Records;
use crate::lab::Lab;
use crate::progress::say;
use crate::scenario::crash::refused;
use crate::scenario::nvmeof::{CLIENT, Cut, FIRST, SECOND, conflict};
use crate::site::POOL;

/// A node without power. Dropping this powers it on.
pub(in crate::scenario) struct Off<'a>(&'a Lab, &'static str);

impl<'a> Off<'a> {
    pub(in crate::scenario) fn cut(lab: &'a Lab, name: &'static str) -> Result<Self> {
        lab.power_off(name)?;
        Ok(Self(lab, name))
    }
}

impl Drop for Off<'_> {
    fn drop(&mut self) {
        let _ = self.0.power_on(self.1);
    }
}

/// The client. Dropping this reboots it: a hard mount cannot be unmounted when its server is gone.
pub(in crate::scenario) struct Rebooted<'a>(pub(in crate::scenario) &'a Lab);

impl Drop for Rebooted<'_> {
    fn drop(&mut self) {
        let _ = self.0.power_off(CLIENT).and_then(|()| self.0.power_on(CLIENT));
    }
}

pub(in crate::scenario) fn synced(lines: &[String]) -> Vec<u64> {
    lines.iter().filter_map(|line| line.strip_prefix("synced ")?.parse().ok()).collect()
}

/// Writes that may fail while a server is away: the one in flight, and those that are attempted while no server listens.
const REFUSED_MAX: usize = 8;

/// Files that are fsynced before the first server is lost.
pub(in crate::scenario) const FILES: usize = 20;

/// The phases of a takeover, from the second server's log.
pub(in crate::scenario) fn breakdown(server: &Server<'_>, mounted_ms: u128) -> Result<String> {
    let at = server.times(&["namespace found", "the reservation is ours", "its log replayed", " serving"])?;
    Ok(format!(
        "connect {} ms, preempt {} ms, mount and log replay {} ms, until it serves {} ms; with start of the process and the \
         client's mount {mounted_ms} ms",
        at[0],
        at[1] - at[0],
        at[2] - at[1],
        at[3] - at[2],
    ))
}

/// Checks the fsynced files through a client of this server and in the server's own file system.
pub(in crate::scenario) fn intact(
    server: &Server<'_>,
    id: &str,
    numbers: &[u64],
    mounted: &Mounted<'_>,
) -> Result<u64> {
    let records = |folder: String| Records { folder: folder.into(), seed: SEED, numbers: numbers.to_vec() };
    let deadline = Duration::from_secs(60);
    let on_server = records(format!("{POOL}/volumes/{id}"));
    let bytes: u64 = server.node.call_within("verify-records", &on_server, deadline)?;
    let read: u64 = mounted.client.call_within("verify-records", &records(mounted.at.clone()), deadline)?;
    ensure!(read == bytes, "{read} bytes through the mount, {bytes} on the server");
    Ok(bytes)
}

pub(in crate::scenario) fn killed(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let client = Rebooted(lab);
    let id = "killed";
    let first = Server::start(&fabric, FIRST, Settings { format: true, ..Settings::epoch(1) })?;
    first.volume(id)?;
    let mounted = first.mount(id)?;
    let seed = SEED.to_string();
    let mut writer = mounted.client.spawn(&[GUEST_BINARY, "record-writes", &mounted.at, &seed])?;
    writer.wait_for("files are synced", Duration::from_secs(60), |lines| synced(lines).len() >= FILES)?;

    // The node cannot run commands any more, not even to clean up.
    std::mem::forget(first);
    let off = Off::cut(lab, FIRST)?;
    let started = Instant::now();
    let numbers = synced(writer.lines());
    let second = Server::start(&fabric, SECOND, Settings::epoch(2))?;
    let again = second.mount(id)?;
    let took = started.elapsed().as_millis();
    let numbers_after = synced(writer.lines());
    ensure!(
        numbers_after.len() <= numbers.len() + 1,
        "the writer goes on without a server: {numbers_after:?}"
    );
    second.holds_the_reservation()?;
    let bytes = intact(&second, id, &numbers_after, &again)?;
    let parts = breakdown(&second, took)?;
    say(&parts);

    // The first host's node comes back, and its server steps back. The client is rebooted: if a node refuses connections,
    // Linux retries a hard mount's writes without a pause, which starves everything else on a single processor.
    drop(writer);
    std::mem::forget((mounted, again));
    drop(client);
    let again = second.mount(id)?;
    drop(off);
    fabric.node(FIRST).run("modprobe -a nvme-fabrics nvme-tcp")?;
    ended_with(&fabric, FIRST, Settings::epoch(1), "epoch 2 of this instance has the namespace")?;
    second.holds_the_reservation()?;
    intact(&second, id, &numbers_after, &again)?;
    again.unmount()?;
    second.stop()?;
    Ok(format!("{} files ({} KiB) synced and intact; {parts}", numbers_after.len(), bytes >> 10))
}

pub(in crate::scenario) fn cut_off(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let _client = Rebooted(lab);
    let id = "cut-off";
    let first = Server::start(&fabric, FIRST, Settings { format: true, ..Settings::epoch(1) })?;
    first.volume(id)?;
    let mounted = first.mount(id)?;
    let seed = SEED.to_string();
    let mut writer = mounted.client.spawn(&[GUEST_BINARY, "record-writes", &mounted.at, &seed])?;
    writer.wait_for("files are synced", Duration::from_secs(60), |lines| synced(lines).len() >= FILES)?;

    let cut = Cut::at(first.node, fabric.target().address())?;
    let started = Instant::now();
    // In parallel: the second does not wait until the first has stopped.
    let second = Server::start(&fabric, SECOND, Settings::epoch(2))?;
    let again = second.mount(id)?;
    let parts = breakdown(&second, started.elapsed().as_millis())?;
    let exit = first.wait_for_exit(Duration::from_secs(LOSS_TIME_S + 10))?;
    let fenced = started.elapsed();
    let said = first.log()?;
    ensure!(exit == EXIT_FENCED, "the server that was cut off ended with {exit}: {said}");
    let reason =
        said.lines().find_map(|line| line.split_once("reason=")).map(|(_, reason)| reason.to_owned());
    let reason = reason.with_context(|| format!("no reason in {said}"))?;
    let limit = Duration::from_secs(LOSS_TIME_S + EMULATED_S);
    ensure!(fenced <= limit, "it stopped {} s after the cut", fenced.as_secs());
    let numbers = synced(writer.lines());
    intact(&second, id, &numbers, &again)?;

    // The network is back. The target refuses the pending writes of the first host's kernel, and any other write from that
    // host.
    drop(cut);
    fabric.wait_for_paths(&first.seen(), 1)?;
    fabric.lost(&first.seen(), "Taken")?;
    let end = FILE_BYTES / 4096 - 16;
    let late = fabric.write(&first.seen(), 1, end, 4)?;
    ensure!(late == conflict(), "late writes of the first host: {late:?}");
    let found = fabric.writers(end, 4)?;
    ensure!(found == [0; 4], "the target has blocks of {found:?}");
    // A server on that host finds what its predecessor has left, ends it without writing, and steps back.
    let superseded = Server::begin(&fabric, FIRST, Settings::epoch(1))?;
    let exit = superseded.wait_for_exit(Duration::from_secs(60))?;
    let log = superseded.log()?;
    let says = "epoch 2 of this instance has the namespace";
    ensure!(exit == EXIT_POOL && log.contains(says), "{exit}: {log}");
    drop(superseded);
    drop(first);
    second.holds_the_reservation()?;
    std::mem::forget(mounted);
    let bytes = intact(&second, id, &numbers, &again)?;
    again.unmount()?;

    // Back again with a later epoch, on the node with that history.
    second.stop()?;
    drop(second);
    let third = Server::start(&fabric, FIRST, Settings::epoch(3))?;
    let again = third.mount(id)?;
    intact(&third, id, &numbers, &again)?;
    again.unmount()?;
    third.stop()?;
    Ok(format!(
        "{} files ({} KiB) synced and intact; {parts}; the first ended after {} s: {reason}",
        numbers.len(),
        bytes >> 10,
        fenced.as_secs()
    ))
}

/// An outage longer than the file system tolerates, which is as long as I/O waits for a path.
pub(in crate::scenario) fn away(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let _client = Rebooted(lab);
    let id = "away";
    let first = Server::start(&fabric, FIRST, Settings { format: true, ..Settings::epoch(1) })?;
    first.volume(id)?;
    let mounted = first.mount(id)?;
    let seed = SEED.to_string();
    let mut writer = mounted.client.spawn(&[GUEST_BINARY, "record-writes", &mounted.at, &seed])?;
    let reach = |writer: &mut crate::lab::Process, what: &str, count: usize| {
        writer.wait_for(what, Duration::from_secs(60), move |lines| synced(lines).len() >= count)
    };
    reach(&mut writer, "files are synced", FILES)?;
    let cut = Cut::at(first.node, fabric.target().address())?;
    let started = Instant::now();
    let exit = first.wait_for_exit(Duration::from_secs(LOSS_TIME_S + 10))?;
    let ended = started.elapsed();
    ensure!(exit == EXIT_FENCED, "the server ended with {exit}: {}", first.log()?);
    drop(cut);
    fabric.wait_for_paths(&first.seen(), 1)?;
    first.holds_the_reservation()?;

    // It stays mounted, but shut down, so that the next server finds it.
    std::mem::forget(first);
    let again = Server::start(&fabric, FIRST, Settings::epoch(1))?;
    let before = synced(writer.lines()).len();
    reach(&mut writer, "the client reconnects by itself and writes on", before + FILES)?;
    let lines = writer.finish(Duration::from_secs(60))?;
    let numbers = synced(&lines);
    let failed = refused(&lines, REFUSED_MAX)?;
    let bytes = intact(&again, id, &numbers, &mounted)?;
    mounted.unmount()?;
    again.stop()?;
    Ok(format!(
        "stopped after {} s; {} files ({} KiB) synced and intact, {failed} writes failed",
        ended.as_secs(),
        numbers.len(),
        bytes >> 10
    ))
}
