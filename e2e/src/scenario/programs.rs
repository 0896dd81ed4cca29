//! Programs of users ([`crate::programs`]) on a mounted volume.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{MIB, ONE, Scenario, TWO, scenario};
use crate::programs::{Mounts, PROGRAMS, Program};
use crate::site::{Mounted, Site};

/// On hardware; a lab of emulated guests waits longer.
const LIMIT: Duration = Duration::from_secs(180);

pub(super) fn scenarios() -> Vec<Scenario> {
    let default = PROGRAMS.iter().filter(|program| program.mounts != Mounts::Posix).map(|program| {
        scenario(format!("programs: {}", program.name), move |site| run(site, program, false))
    });
    // `./test --kubernetes` runs all of them on volumes with `posix`.
    let posix = PROGRAMS.iter().filter(|program| !program.slow).map(|program| {
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
    // New directories belong to the owner of the directory that contains them.
    here.node()
        .run(&format!("mkdir {0}/work; if {posix}; then chown {USER}:{USER} {0}/work; fi", here.path()))?;
    let started = Instant::now();
    execute(&here, program.work, posix)?;
    let spent = started.elapsed();
    // Attributes are cached for a second.
    there.node().run("sleep 2")?;
    execute(&there, program.check, posix).context("on the other node")?;
    here.unmount()?;
    there.unmount()?;
    site.delete(&volume)?;
    Ok(format!("{:.0} s, and the other node agrees", spent.as_secs_f64()))
}

/// Owners and modes matter to users without privileges.
const USER: &str = "1000";

fn execute(mounted: &Mounted<'_>, script: &str, as_user: bool) -> Result<()> {
    let script = format!(
        "export HOME=/tmp LC_ALL=C.UTF-8; local=$(mktemp -d); trap 'rm -rf $local' EXIT\ncd {}/work\n{script}",
        mounted.path()
    );
    let (user, group) = (format!("--reuid={USER}"), format!("--regid={USER}"));
    let mut argv = vec!["sh", "-euc", &script];
    if as_user {
        argv.splice(..0, ["setpriv", &user, &group, "--clear-groups", "--inh-caps=-all"]);
    }
    let done = mounted.node().attempt(&argv, &[], LIMIT)?;
    ensure!(done.success(), "{script}\n{}{}", done.text(), done.complaint());
    Ok(())
}
