//! Deliberate split brain: the table of docs/guides/failover.md, in which there must never be a second writer.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::instance::{EXIT_FENCED, EXIT_POOL, FILE_BYTES, Instance, LOSS_TIME_S, Load, offer, offered};
use super::{first_and_load, late_writes_are_refused};
use crate::guest::calls::nvmeof::Written;
use crate::lab::Lab;
use crate::progress::say;
use crate::scenario::nvmeof::{Cut, FIRST, Fabric, SECOND, TARGET};

/// One order of events and its expected outcome. A and B are the hosts.
pub(super) struct Case {
    /// Name of the scenario.
    pub(super) name: &'static str,
    /// The events, in this order.
    order: &'static str,
    /// The expected final state.
    expected: &'static str,
    run: fn(&Lab, &Fabric<'_>) -> Result<String>,
}

impl Case {
    /// Its line in docs/guides/failover.md.
    #[cfg(test)]
    fn line(&self) -> String {
        format!("| {} | {} | {} |", self.name, self.order, self.expected)
    }
}

/// All cases.
pub(super) const CASES: &[Case] = &[
    Case {
        name: "stopped process",
        order: "A serves in epoch 1; its process is stopped; B starts in epoch 2; A's process runs on",
        expected: "B serves as soon as A's address has run out; A exits (7) when it looks; A's late writes are refused",
        run: stopped_process,
    },
    Case {
        name: "paused machine",
        order: "A serves in epoch 1; its whole machine is paused; B starts in epoch 2; A's machine runs on",
        expected: "B serves; A exits (7) and gives up the address; A's late writes are refused",
        run: paused_machine,
    },
    Case {
        name: "started again late",
        order: "A serves in epoch 1 and is killed; B starts in epoch 2 and ends in good order; A starts again in epoch 1",
        expected: "B's reservation outlasts its server, so that nothing of A's is written, by its kernel neither; A steps back (4)",
        run: started_again_late,
    },
    Case {
        name: "target restarts, one alive",
        order: "A serves in epoch 1; the target restarts and forgets reservations; A starts again in epoch 1",
        expected: "A exits (7) when it finds the reservation forgotten; started again it takes it, and serves",
        run: target_restarts_with_one,
    },
    Case {
        name: "target restarts, both alive",
        order: "A in epoch 1 is stopped; B serves in epoch 2; the target restarts and forgets; A runs on; B and A start again, each in its epoch",
        expected: "both end themselves (7); B serves again; A steps back (4)",
        run: target_restarts_with_both,
    },
    Case {
        name: "target is back at once",
        order: "A serves in epoch 1 under load; the target loses what it had not made durable, forgets reservations, and is back before I/O on the lost path fails; A starts again in epoch 1; all that three times",
        expected: "A exits (7) before it acknowledges what its kernel has sent again; started again it takes the reservation, and serves; all that was fsynced is there",
        run: target_is_back_at_once,
    },
    Case {
        name: "both at once, same epoch",
        order: "A and B start at the same moment in epoch 1",
        expected: "one serves; the other steps back (4) without having had the address",
        run: twins,
    },
    Case {
        name: "both at once, two epochs",
        order: "A starts in epoch 1 and B in epoch 2, at the same moment",
        expected: "B serves; A does not get there (4), or exits (7)",
        run: two_epochs,
    },
    Case {
        name: "lost while writing",
        order: "A serves in epoch 1 under load; a host preempts its reservation as epoch 2; B starts in epoch 3",
        expected: "A exits (7); its late writes are refused; B serves; all that was fsynced is there",
        run: lost_while_writing,
    },
];

/// Runs a case on a blank namespace.
pub(super) fn run(lab: &Lab, case: &Case) -> Result<String> {
    say(format!("{}: {}", case.order, case.expected));
    let fabric = offered(lab, &[lab.node(TARGET).address()])?;
    (case.run)(lab, &fabric)
}

const PATIENCE: Duration = Duration::from_secs(LOSS_TIME_S);

/// Checks that `the_one` serves: the client continues, all data is intact, and no other host has the address.
fn serves(mut load: Load<'_>, the_one: &Instance<'_>) -> Result<String> {
    load.goes_on("in the end", 4)?;
    the_one.is_the_one()?;
    let written = load.finish(the_one)?.without_error()?;
    the_one.stop()?;
    Ok(written.to_string())
}

fn stopped_process(lab: &Lab, fabric: &Fabric<'_>) -> Result<String> {
    let (a, mut load) = first_and_load(lab, fabric)?;
    a.signal("STOP")?;
    let b = Instance::start(fabric, SECOND, 2)?;
    b.is_the_one()?;
    load.goes_on("with the old one stopped", 4)?;
    a.signal("CONT")?;
    a.ends_with(EXIT_FENCED, PATIENCE)?;
    late_writes_are_refused(fabric, &a)?;
    serves(load, &b)
}

fn paused_machine(lab: &Lab, fabric: &Fabric<'_>) -> Result<String> {
    let (a, mut load) = first_and_load(lab, fabric)?;
    lab.pause(FIRST, true)?;
    let b = Instance::start(fabric, SECOND, 2);
    let gone_on = b.as_ref().ok().map(|_| load.goes_on("with the old one paused", 4));
    lab.pause(FIRST, false)?;
    let b = b?;
    gone_on.transpose()?;
    a.ends_with(EXIT_FENCED, PATIENCE)?;
    fabric.wait_for_paths(&a.seen(), 1)?;
    late_writes_are_refused(fabric, &a)?;
    serves(load, &b)
}

fn started_again_late(lab: &Lab, fabric: &Fabric<'_>) -> Result<String> {
    let (a, mut load) = first_and_load(lab, fabric)?;
    a.kill()?;
    let b = Instance::start(fabric, SECOND, 2)?;
    load.goes_on("on the second host", 4)?;
    b.stop()?;
    drop(b);
    let late = Instance::begin(fabric, FIRST, 1)?;
    let log = late.ends_with(EXIT_POOL, PATIENCE)?;
    ensure!(log.contains("epoch 2 of this instance has the namespace"), "{log}");
    ensure!(!log.contains("the address is ours"), "{log}");
    late_writes_are_refused(fabric, &late)?;
    drop(late);
    let b = Instance::start(fabric, SECOND, 3)?;
    drop(a);
    serves(load, &b)
}

/// The target's machine loses power and comes back with empty memory. It offers the content of its file again.
fn restart_target(lab: &Lab, fabric: &Fabric<'_>) -> Result<()> {
    let target = fabric.target();
    lab.power_off(TARGET)?;
    lab.power_on(TARGET)?;
    fabric.prepare(0)?;
    offer(fabric, &[target.address()])
}

fn target_restarts_with_one(lab: &Lab, fabric: &Fabric<'_>) -> Result<String> {
    let (a, load) = first_and_load(lab, fabric)?;
    restart_target(lab, fabric)?;
    a.ends_with(EXIT_FENCED, PATIENCE)?;
    fabric.wait_for_paths(&a.seen(), 1)?;
    // Its mount stays, so that the next server finds it.
    std::mem::forget(a);
    let again = Instance::start(fabric, FIRST, 1)?;
    serves(load, &again)
}

/// As after a power loss, but faster than a machine boots: the kernel of A resends its unanswered requests.
fn target_is_back_at_once(lab: &Lab, fabric: &Fabric<'_>) -> Result<String> {
    let (mut a, mut load) = first_and_load(lab, fabric)?;
    let target = fabric.target();
    for _ in 0..3 {
        let cut = Cut::at(a.node, target.address())?;
        // Shut down without writing the log, as in a power loss.
        target.run("xfs_io -x -c shutdown /srv/fabric")?;
        target.call::<()>("nvmet-withdraw", &())?;
        target.run("umount /srv/fabric")?;
        fabric.prepare(0)?;
        offer(fabric, &[target.address()])?;
        drop(cut);
        a.ends_with(EXIT_FENCED, PATIENCE)?;
        fabric.wait_for_paths(&a.seen(), 1)?;
        // Its mount stays, so that the next server finds it.
        std::mem::forget(a);
        a = Instance::start(fabric, FIRST, 1)?;
        load.goes_on("with the target back", 8)?;
    }
    serves(load, &a)
}

fn target_restarts_with_both(lab: &Lab, fabric: &Fabric<'_>) -> Result<String> {
    let (a, mut load) = first_and_load(lab, fabric)?;
    a.signal("STOP")?;
    let b = Instance::start(fabric, SECOND, 2)?;
    load.goes_on("with the old one stopped", 2)?;
    restart_target(lab, fabric)?;
    b.ends_with(EXIT_FENCED, PATIENCE)?;
    a.signal("CONT")?;
    a.ends_with(EXIT_FENCED, PATIENCE)?;
    fabric.wait_for_paths(&b.seen(), 1)?;
    std::mem::forget(b);
    std::mem::forget(a);
    // Either can start first; the pool's record decides.
    let b = Instance::start(fabric, SECOND, 2)?;
    let a = Instance::begin(fabric, FIRST, 1)?;
    a.ends_with(EXIT_POOL, PATIENCE)?;
    late_writes_are_refused(fabric, &a)?;
    serves(load, &b)
}

/// Starts both as close to each other as possible.
fn at_once<'a>(fabric: &'a Fabric<'a>, epochs: [u32; 2]) -> Result<[Instance<'a>; 2]> {
    std::thread::scope(|scope| {
        let a = scope.spawn(|| Instance::begin(fabric, FIRST, epochs[0]));
        let b = scope.spawn(|| Instance::begin(fabric, SECOND, epochs[1]));
        Ok([a.join().expect("no panic")?, b.join().expect("no panic")?])
    })
}

fn twins(lab: &Lab, fabric: &Fabric<'_>) -> Result<String> {
    let [a, b] = at_once(fabric, [1, 1])?;
    let ended = |instance: &Instance<'_>| -> Result<bool> { Ok(instance.exit()?.is_some()) };
    a.node.wait_until("one of them ends", Duration::from_secs(60), || Ok(ended(&a)? || ended(&b)?))?;
    let (winner, loser) = if ended(&a)? { (b, a) } else { (a, b) };
    let log = loser.ends_with(EXIT_POOL, PATIENCE)?;
    ensure!(!log.contains("the address is ours"), "{log}");
    winner.wait_until_it_serves()?;
    winner.volume()?;
    let load = Load::start(lab)?;
    late_writes_are_refused(fabric, &loser)?;
    let host = winner.node.name();
    serves(load, &winner).map(|written| format!("{host} had it; {written}"))
}

fn two_epochs(lab: &Lab, fabric: &Fabric<'_>) -> Result<String> {
    let [a, b] = at_once(fabric, [1, 2])?;
    b.wait_until_it_serves()?;
    a.node.wait_until("the earlier one ends", Duration::from_secs(60), || Ok(a.exit()?.is_some()))?;
    let exit = a.exit()?;
    ensure!(matches!(exit, Some(EXIT_POOL | EXIT_FENCED)), "{exit:?}: {}", a.log()?);
    b.volume()?;
    let load = Load::start(lab)?;
    late_writes_are_refused(fabric, &a)?;
    serves(load, &b).map(|written| format!("the earlier one ended with {exit:?}; {written}"))
}

fn lost_while_writing(lab: &Lab, fabric: &Fabric<'_>) -> Result<String> {
    let (a, load) = first_and_load(lab, fabric)?;
    let thief = fabric.seen(SECOND, 2, "tcp");
    fabric.connect(&thief)?;
    let refused: Option<String> = fabric.ask(&thief, "nvmeof-acquire")?;
    ensure!(refused.is_none(), "{refused:?}");
    // Immediately, before it has checked, and afterwards.
    let end = FILE_BYTES / 4096 - 16;
    let late = fabric.write(&a.seen(), 1, end, 4)?;
    ensure!(late == Written { written: 0, errno: Some(libc::EBADE) }, "{late:?}");
    a.ends_with(EXIT_FENCED, PATIENCE)?;
    late_writes_are_refused(fabric, &a)?;
    let b = Instance::start(fabric, SECOND, 3)?;
    serves(load, &b)
}

#[cfg(test)]
mod tests {
    use super::CASES;

    #[test]
    fn documented_split_brain_table_matches_the_cases() {
        let text = include_str!("../../../../docs/guides/failover.md");
        let table: Vec<&str> = text
            .lines()
            .skip_while(|line| *line != "## Split brain, on purpose")
            .skip_while(|line| !line.starts_with("|---"))
            .skip(1)
            .take_while(|line| line.starts_with('|'))
            .collect();
        let expected: Vec<String> = CASES.iter().map(super::Case::line).collect();
        assert_eq!(table, expected, "docs/guides/failover.md");
    }
}
