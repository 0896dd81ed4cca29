//! Programs of users ([`crate::programs`]) on a mounted volume.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{MIB, ONE, Scenario, TWO, scenario};
use crate::lab::Node;
use crate::programs::{Mounts, PROGRAMS, Program};
use crate::site::{Mounted, Site};

/// On hardware; a lab of emulated guests waits longer.
const LIMIT: Duration = Duration::from_secs(180);

pub(super) fn scenarios() -> Vec<Scenario> {
    let default = PROGRAMS.iter().filter(|program| program.mounts != Mounts::Posix).map(|program| {
        scenario(format!("programs: {}", program.name), move |site| run(site, program, false))
    });
    // `./test --kubernetes` runs all of them on volumes with `posix`.
    let posix = PROGRAMS.iter().filter(|program| program.mounts == Mounts::Posix).map(|program| {
        scenario(format!("programs, posix mount: {}", program.name), move |site| run(site, program, true))
    });
    default.chain(posix).collect()
}

fn run(site: &Site, program: &Program, posix: bool) -> Result<String> {
    let volume = site.volume(256 * MIB)?;
    let options: &[(&str, &str)] = if program.mounts == Mounts::LocalLocks { &[("nobrl", "")] } else { &[] };
    let mount = |node: &str| -> Result<Mounted<'_>> {
        let node = site.node(node);
        if posix { site.mount_posix_with(node, &volume, options) } else { site.mount(node, &volume, options) }
    };
    let (here, there) = (mount(ONE)?, mount(TWO)?);
    let started = Instant::now();
    execute(here.node(), here.path(), program.work)?;
    let spent = started.elapsed();
    // Both nodes mount the volume at the same path. Attributes are cached for a second.
    there.node().run("sleep 2")?;
    execute(there.node(), there.path(), program.check).context("on the other node")?;
    here.unmount()?;
    there.unmount()?;
    site.delete(&volume)?;
    Ok(format!("{:.0} s, and the other node agrees", spent.as_secs_f64()))
}

fn execute(node: &Node, folder: &str, script: &str) -> Result<String> {
    node.run_within(
        &format!("local=$(mktemp -d); trap 'rm -rf $local' EXIT\nmkdir -p {folder}/work && cd {folder}/work\n{script}"),
        LIMIT,
    )
}
