//! An instance that moves from one host to another together with its address, under load and deliberately at the worst
//! moments.

mod instance;
mod split_brain;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use self::instance::{ADDRESS, EXIT_FENCED, FILE_BYTES, Instance, LOSS_TIME_S, Load, offered};
use self::split_brain::CASES;
use super::given_up::GivenUp;
use super::nvmeof::{CLIENT, Cut, FIRST, Fabric, SECOND, conflict};
use super::{Scenario, on_fabric};
use crate::lab::{Lab, Node};
use crate::progress::say;

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = vec![
        on_fabric("failover: the storage node dies under load, the address moves", node_dies),
        on_fabric("failover: a large file is half written when the storage node dies", large_file),
        on_fabric("failover: a planned handover under load", handed_over),
    ];
    // They take ten more minutes, and have not passed often enough to gate every change.
    let mut on_trial = vec![
        on_fabric("failover: server cut off from the target under load", cut_off),
        on_fabric("failover: one of two paths cut under load, then both", paths_cut),
        on_fabric("failover: ten takeovers back and forth under load", to_and_fro),
    ];
    for case in CASES {
        let scenario =
            on_fabric(format!("failover: split brain: {}", case.name), |lab| split_brain::run(lab, case));
        let kind = if case.name == ALWAYS { &mut scenarios } else { &mut on_trial };
        kind.push(scenario);
    }
    scenarios.extend(on_trial.into_iter().map(|scenario| Scenario { on_trial: true, ..scenario }));
    scenarios
}

/// The case that has lost data in the past. It is part of every run.
const ALWAYS: &str = "target is back at once";

/// Upper limit of a takeover, also if everything is emulated.
const TAKEOVER_TIME_MAX: Duration = Duration::from_secs(60);
/// Upper limit of a planned takeover.
const HANDOVER_TIME_MAX: Duration = Duration::from_secs(10);
/// Extra time that emulation may add to the time after which a server stops.
const EMULATED: Duration = Duration::from_secs(15);
/// Number of consecutive unanswered probes after which a server counts as gone.
const LOOKS: usize = 3;
const ROUNDS: u32 = 10;

/// A node without power. Dropping this powers it on.
struct Off<'a>(&'a Lab, &'static str);

impl<'a> Off<'a> {
    fn cut(lab: &'a Lab, name: &'static str) -> Result<Self> {
        lab.power_off(name)?;
        Ok(Self(lab, name))
    }
}

impl Drop for Off<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.power_on(self.1) {
            say(format!("{} does not come back: {error:#}", self.1));
        }
    }
}

/// Returns whether the instance's server reports that it is ready.
fn is_ready(client: &Node) -> Result<bool> {
    let ask = format!("printf 'GET /readyz HTTP/1.0\\r\\n\\r\\n' | nc -w 1 {ADDRESS} 9445 || true");
    Ok(client.run(&ask)?.contains(" 200 "))
}

/// Waits until the instance's server has missed several probes in a row. Returns how long that took.
fn detected(client: &Node) -> Result<Duration> {
    let started = Instant::now();
    let mut silent = 0;
    while silent < LOOKS {
        silent = if is_ready(client)? { 0 } else { silent + 1 };
        ensure!(started.elapsed() < TAKEOVER_TIME_MAX, "the old server still answers");
    }
    Ok(started.elapsed())
}

/// The phases of a takeover's time, once the writer has continued.
struct Breakdown {
    detect: Duration,
    /// From the server's start until it serves, by its own clock: connect, preempt, mount, address, serve.
    parts: [u64; 5],
    reconnect: Duration,
    total: Duration,
}

impl Breakdown {
    fn of(second: &Instance<'_>, died: Instant, detect: Duration, load: &mut Load<'_>) -> Result<Self> {
        second.wait_until_it_serves()?;
        let serves = Instant::now();
        load.writes("after a takeover", 1)?;
        let (reconnect, total) = (serves.elapsed(), died.elapsed());
        let marks = [
            "namespace found",
            "the reservation is ours",
            "its log replayed",
            "the address is ours",
            " serving version=",
        ];
        let at = second.times(&marks)?;
        let parts = [at[0], at[1] - at[0], at[2] - at[1], at[3] - at[2], at[4] - at[3]];
        Ok(Self { detect, parts, reconnect, total })
    }
}

impl std::fmt::Display for Breakdown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [connect, preempt, replay, address, serve] = self.parts;
        write!(
            f,
            "{:.1} s: detect {:.1} s, connect {connect} ms, preempt {preempt} ms, mount and log replay {replay} ms, address \
             {address} ms, serve {serve} ms, reconnect {:.1} s",
            self.total.as_secs_f32(),
            self.detect.as_secs_f32(),
            self.reconnect.as_secs_f32()
        )
    }
}

fn first_and_load<'a>(lab: &'a Lab, fabric: &'a Fabric<'a>) -> Result<(Instance<'a>, Load<'a>)> {
    let first = Instance::start(fabric, FIRST, 1)?;
    first.is_the_one()?;
    first.volume()?;
    let load = Load::start(lab)?;
    Ok((first, load))
}

/// Checks that every write from the old host is refused.
fn late_writes_are_refused(fabric: &Fabric<'_>, old: &Instance<'_>) -> Result<()> {
    let end = FILE_BYTES / 4096 - 16;
    let late = fabric.write(&old.seen(), old.epoch.into(), end, 4)?;
    ensure!(late == conflict(), "late writes of {} epoch {}: {late:?}", old.node.name(), old.epoch);
    let found = fabric.writers(end, 4)?;
    ensure!(found == [0; 4], "the target has blocks of {found:?}");
    Ok(())
}

fn node_dies(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, &[lab.node(super::nvmeof::TARGET).address()])?;
    let (first, mut load) = first_and_load(lab, &fabric)?;
    let before = load.synced().len();

    // The node cannot run commands any more, not even to clean up.
    std::mem::forget(first);
    let died = Instant::now();
    let off = Off::cut(lab, FIRST)?;
    let detect = detected(lab.node(CLIENT))?;
    let second = Instance::begin(&fabric, SECOND, 2)?;
    let parts = Breakdown::of(&second, died, detect, &mut load)?;
    say(parts.to_string());
    ensure!(parts.total < TAKEOVER_TIME_MAX, "the takeover took too long: {parts}");
    load.goes_on("on the second host", 8)?;
    second.is_the_one_of(&[SECOND])?;

    // The first host's node comes back, and its server steps back without having held the address.
    drop(off);
    fabric.node(FIRST).run("modprobe -a nvme-fabrics nvme-tcp")?;
    let old = Instance::begin(&fabric, FIRST, 1)?;
    let log = old.ends_with(instance::EXIT_POOL, Duration::from_secs(60))?;
    ensure!(log.contains("epoch 2 of this instance has the namespace"), "{log}");
    ensure!(!log.contains("the address is ours"), "{log}");
    late_writes_are_refused(&fabric, &old)?;
    second.is_the_one()?;
    load.goes_on("with the first node back", 4)?;
    let written = load.finish(&second)?.without_error()?;
    second.stop()?;
    Ok(format!("{parts}; {before} files before, {written}"))
}

/// Written through the page cache and fsynced at the end, as checkpoints are. The result of fsync must be true.
const LARGE_MIB: u64 = 48;
const WRITE_LARGE: &str =
    "dd if=/tmp/large of=$1/large bs=1M conv=fsync 2> /dev/null && echo synced || echo failed";

/// Checks the large file's content, bypassing the client's cache.
fn whole(client: &Node) -> Result<()> {
    let read = format!("{}/large", instance::READ);
    let same = client.attempt(&["cmp", "/tmp/large", &read], &[], Duration::from_secs(60))?;
    ensure!(same.success(), "{}{}", same.text(), same.complaint());
    Ok(())
}

/// Writes the large file without any disturbance.
fn written_and_whole(client: &Node, when: &str) -> Result<()> {
    let argv = ["sh", "-c", WRITE_LARGE, "write", instance::WRITTEN];
    let said = client.attempt(&argv, &[], Duration::from_secs(60))?.text();
    ensure!(said == "synced", "a large file {when}: {said:?}");
    whole(client).with_context(|| format!("a large file {when}"))
}

fn large_file(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, &[lab.node(super::nvmeof::TARGET).address()])?;
    let (first, mut load) = first_and_load(lab, &fabric)?;
    let client = lab.node(CLIENT);
    client.run(&format!("dd if=/dev/urandom of=/tmp/large bs=1M count={LARGE_MIB} 2> /dev/null"))?;
    // Without this check, a server that refuses every large file would pass the following steps.
    written_and_whole(client, "before")?;
    client.run(&format!("rm {}/large", instance::WRITTEN))?;
    let mut writing = client.spawn(&["sh", "-c", WRITE_LARGE, "write", instance::WRITTEN])?;
    let there = || -> Result<u64> {
        let size =
            first.node.run(&format!("stat -c %s {}/large 2> /dev/null || echo 0", instance::data()))?;
        Ok(size.trim().parse()?)
    };
    first.node.wait_until("a part is there", Duration::from_secs(30), || Ok(there()? >= LARGE_MIB << 18))?;
    std::mem::forget(first);
    let off = Off::cut(lab, FIRST)?;
    let second = Instance::start(&fabric, SECOND, 2)?;
    writing.wait_for("the file is written", Duration::from_secs(40), |lines| !lines.is_empty())?;
    let said = writing.lines().join(" ");
    match said.as_str() {
        "synced" => whole(client).context("fsync said that it is written")?,
        // On a write-through pool, only the client's own kernel can make fsync fail (docs/guides/failover.md).
        "failed" => {
            let GivenUp { ended, answered } = GivenUp::by(client)?;
            ensure!(
                !ended.is_empty() && answered.is_empty(),
                "writing the large file failed, and the client's kernel did not give a request up by itself"
            );
        }
        _ => bail!("it said {said:?}"),
    }
    load.goes_on("on the second host", 4)?;
    written_and_whole(client, "after the takeover")?;
    let written = load.finish(&second)?.without_error()?;
    second.stop()?;
    drop(off);
    Ok(format!("fsync of {LARGE_MIB} MiB: {said}, and so it is; {written}"))
}

fn handed_over(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, &[lab.node(super::nvmeof::TARGET).address()])?;
    let (first, mut load) = first_and_load(lab, &fabric)?;
    let handover = || -> Result<Instance<'_>> {
        first.stop()?;
        Instance::start(&fabric, SECOND, 2)
    };
    let (second, pause) = load.longest_pause(handover)?;
    second.is_the_one()?;
    say(format!("handed over in {} ms", pause.as_millis()));
    let marks = ["the reservation is ours", "its log replayed", "the address is ours", " serving version="];
    let parts = second.times(&marks)?;
    let back = || -> Result<Instance<'_>> {
        second.stop()?;
        Instance::start(&fabric, FIRST, 3)
    };
    let (third, again) = load.longest_pause(back)?;
    third.is_the_one()?;
    let written = load.finish(&third)?.without_error()?;
    third.stop()?;
    for pause in [pause, again] {
        ensure!(
            pause < HANDOVER_TIME_MAX,
            "the writer stood still for {} ms (at {parts:?} ms)",
            pause.as_millis()
        );
    }
    Ok(format!(
        "the writer stood still for {} and {} ms (reserved, mounted, address, serving after {parts:?} ms); {written}",
        pause.as_millis(),
        again.as_millis()
    ))
}

fn cut_off(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, &[lab.node(super::nvmeof::TARGET).address()])?;
    let (first, mut load) = first_and_load(lab, &fabric)?;
    let died = Instant::now();
    let cut = Cut::at(first.node, fabric.target().address())?;
    // In parallel: the second does not wait until the first has stopped.
    let second = Instance::begin(&fabric, SECOND, 2)?;
    let parts = Breakdown::of(&second, died, second.started() - died, &mut load)?;
    let log = first.ends_with(EXIT_FENCED, Duration::from_secs(LOSS_TIME_S))?;
    let reason = log.lines().find_map(|line| line.split_once("reason=")).map(|(_, reason)| reason.to_owned());
    second.is_the_one()?;
    load.goes_on("on the second host", 8)?;

    // The network is back, and the remaining writes of the first host's kernel are refused.
    drop(cut);
    fabric.wait_for_paths(&first.seen(), 1)?;
    fabric.lost(&first.seen(), "Taken")?;
    late_writes_are_refused(&fabric, &first)?;
    load.goes_on("with the network back", 4)?;
    let written = load.finish(&second)?.without_error()?;
    ensure!(parts.total < Duration::from_secs(LOSS_TIME_S) + TAKEOVER_TIME_MAX, "{parts}");
    drop(first);
    second.stop()?;
    Ok(format!("{parts}; the first stopped: {}; {written}", reason.unwrap_or_default()))
}

fn paths_cut(lab: &Lab) -> Result<String> {
    let target = lab.node(super::nvmeof::TARGET);
    let (network, _) = target.address().rsplit_once('.').context("an IPv4 address")?;
    let (one, other) = (target.address().to_owned(), format!("{network}.101"));
    target.run(&format!("ip address replace {other}/24 dev eth0"))?;
    let both = [one.as_str(), other.as_str()];
    let fabric = offered(lab, &both)?;
    let first = Instance::begin_at(&fabric, FIRST, 1, &both)?;
    first.wait_until_it_serves()?;
    first.volume()?;
    let mut load = Load::start(lab)?;
    for address in both {
        let cut = Cut::at(first.node, address)?;
        load.goes_on("with one path cut", 6)?;
        drop(cut);
        fabric.wait_for_paths(&first.seen(), 2)?;
    }
    let (writer, reader) = load.failed();
    ensure!(writer.is_empty() && reader.is_empty(), "errors with one path: {writer:?} {reader:?}");

    // Both paths: the file system or the server gives up in time, logs the reason, and releases the address.
    let cuts = [Cut::at(first.node, &one)?, Cut::at(first.node, &other)?];
    let started = Instant::now();
    let log = first.ends_with(EXIT_FENCED, Duration::from_secs(LOSS_TIME_S))?;
    let ended = started.elapsed();
    ensure!(ended < Duration::from_secs(LOSS_TIME_S) + EMULATED, "it ended after {} s", ended.as_secs());
    ensure!(log.contains("the addresses are taken off"), "{log}");
    drop(cuts);
    fabric.wait_for_paths(&first.seen(), 2)?;
    // Its mount stays, so that the next server finds it.
    std::mem::forget(first);
    let again = Instance::begin_at(&fabric, FIRST, 1, &both)?;
    again.wait_until_it_serves()?;
    again.is_the_one()?;
    load.goes_on("with both paths back", 8)?;
    let written = load.finish(&again)?.without_error()?;
    again.stop()?;
    drop(again);
    target.run(&format!("ip address del {other}/24 dev eth0"))?;
    Ok(format!("no error with one path; with none the server stopped after {} s; {written}", ended.as_secs()))
}

fn to_and_fro(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, &[lab.node(super::nvmeof::TARGET).address()])?;
    let (mut holder, mut load) = first_and_load(lab, &fabric)?;
    let mut times = Vec::new();
    for epoch in 2..2 + ROUNDS {
        let host = if epoch % 2 == 0 { SECOND } else { FIRST };
        let died = Instant::now();
        // Its node keeps running, with its address for some seconds, its mount and the mount's pending writes.
        holder.kill()?;
        let detect = detected(lab.node(CLIENT))?;
        let next = Instance::begin(&fabric, host, epoch)?;
        let parts = Breakdown::of(&next, died, detect, &mut load)?;
        say(format!("{epoch}: {parts}"));
        ensure!(parts.total < TAKEOVER_TIME_MAX, "takeover {epoch} took too long: {parts}");
        next.is_the_one()?;
        // The state that a killed server leaves behind.
        std::mem::forget(std::mem::replace(&mut holder, next));
        load.goes_on("after a takeover", 2)?;
        times.push(parts.total.as_secs());
    }
    let written = load.finish(&holder)?.without_error()?;
    holder.stop()?;
    for host in [FIRST, SECOND] {
        drop(Instance::left(&fabric, host));
    }
    Ok(format!("{times:?} s; {written}"))
}
