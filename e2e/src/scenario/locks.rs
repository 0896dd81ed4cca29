//! Locks across the nodes: exclusion, waiting, release.

use std::time::Duration;

use anyhow::{Result, bail, ensure};

use super::{MIB, ONE, Scenario, TWO, scenario};
use crate::guest::GUEST_BINARY;
use crate::site::{Mounted, Site};

pub(super) fn scenarios() -> Vec<Scenario> {
    ["flock", "fcntl"]
        .map(|kind| scenario(format!("{kind} across the nodes"), move |site| across(site, kind)))
        .into_iter()
        .collect()
}

const SOON: Duration = Duration::from_secs(10);

fn across(site: &Site, kind: &str) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let one = site.mount(site.node(ONE), &volume, &[])?;
    let two = site.mount(site.node(TWO), &volume, &[])?;
    let says = |word: &'static str| move |lines: &[String]| lines.iter().any(|line| line == word);
    for (first, second) in [(&one, &two), (&two, &one)] {
        let mut holder = hold(first, kind, false)?;
        holder.wait_for("it is locked", SOON, says("locked"))?;

        let refused = hold(second, kind, false)?.finish(SOON)?;
        ensure!(refused == ["busy"], "the other node's attempt says {refused:?}");

        let mut waiter = hold(second, kind, true)?;
        waiter.wait_for("it waits", SOON, says("waiting"))?;
        // Leaves time to detect a server that grants the lock wrongly or a client that gives up.
        let early = waiter.wait_for("(nothing)", Duration::from_millis(500), says("locked"));
        match early {
            Ok(()) => bail!("the waiter got a lock that is held"),
            Err(error) if format!("{error:#}").contains("ended") => return Err(error),
            Err(_) => {}
        }
        let held = holder.finish(SOON)?;
        ensure!(held == ["locked", "closed"], "the holder says {held:?}");
        waiter.wait_for("the lock passes on when its holder closes", SOON, says("locked"))?;

        // Released because the process ends, not by an orderly close.
        drop(waiter);
        let mut next = None;
        first.node().wait_until("a killed holder's lock is free", SOON, || {
            let mut attempt = hold(first, kind, false)?;
            attempt.wait_for("an answer", SOON, |lines| !lines.is_empty())?;
            let free = attempt.lines() == ["locked"];
            next = free.then_some(attempt);
            Ok(free)
        })?;
        if let Some(next) = next {
            next.finish(SOON)?;
        }
    }
    one.unmount()?;
    two.unmount()?;
    site.delete(&volume)?;
    Ok("excluded, waited for, passed on".into())
}

fn hold(at: &Mounted<'_>, kind: &str, wait: bool) -> Result<crate::lab::Process> {
    let path = at.join("lock");
    let mut argv = vec![GUEST_BINARY, "hold-lock", &path, kind];
    if wait {
        argv.push("--wait");
    }
    at.node().spawn(&argv)
}
