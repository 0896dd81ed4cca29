//! fsx: random operations on one file. Each result is compared with the expected content.

use std::time::Duration;

use anyhow::{Context, Result};

use super::{MIB, ONE, Scenario, TWO, scenario};
use crate::cache::Cache;
use crate::images::suites::FSX;
use crate::lab::Node;
use crate::site::{Mounted, Site};

/// On emulated guests an operation takes 13 ms (release) to 30 ms (debug).
const FEW: u32 = 1_000;
const MANY: u32 = 100_000;

pub(super) fn scenarios() -> Vec<Scenario> {
    let nightly = |scenario: Scenario| Scenario { on_trial: true, ..scenario };
    vec![
        scenario("fsx on two nodes, with memory mappings", |site| on_two_nodes(site, &[], FEW)),
        nightly(scenario("fsx on two nodes, without caches", |site| {
            on_two_nodes(site, &[("cache", "none")], FEW)
        })),
        nightly(scenario("fsx on two nodes, for hours", |site| on_two_nodes(site, &[], MANY))),
    ]
}

/// Each node works on a separate file, at the same time, in the same directory.
fn on_two_nodes(site: &Site, options: &[(&str, &str)], operations: u32) -> Result<String> {
    let within = Duration::from_millis(100) * operations;
    let volume = site.volume(256 * MIB)?;
    let one = site.mount(site.node(ONE), &volume, options)?;
    let two = site.mount(site.node(TWO), &volume, options)?;
    let work = |mounted: &Mounted<'_>, seed| {
        exercise(mounted.node(), &mounted.join(&format!("exercised-{seed}")), operations, seed, within)
    };
    std::thread::scope(|scope| -> Result<()> {
        let other = scope.spawn(|| work(&two, 2));
        work(&one, 1)?;
        other.join().expect("no panic")
    })?;
    one.unmount()?;
    two.unmount()?;
    site.delete(&volume)?;
    Ok(format!("{operations} operations each"))
}

/// Runs random reads, writes, truncations, mappings and similar operations on the file at `path`, and verifies each.
pub(super) fn exercise(node: &Node, path: &str, operations: u32, seed: u32, within: Duration) -> Result<()> {
    node.put("/tmp/fsx", &FSX.get(&Cache::open()?)?, 0o700)?;
    node.run_within(
        &format!(
            "/tmp/fsx -q -N {operations} -S {seed} -P /tmp {path} > /tmp/fsx.out 2>&1 \
             || {{ tail -n 40 /tmp/fsx.out; exit 1; }}"
        ),
        within,
    )
    .with_context(|| format!("fsx with seed {seed}"))?;
    Ok(())
}
