//! A volume is exactly as large as it reports.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{MIB, ONE, Scenario, TWO, ours, scenario};
use crate::guest::calls::space::{Fill, Filled};
use crate::site::{Mounted, Site};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("quota: full, expanded, freed", |site| full(site, "default", 96 * MIB, 160 * MIB)),
        ours("quota on ext4: full, expanded, freed", |site| full(site, "ext4", 48 * MIB, 96 * MIB)),
    ]
}

fn full(site: &Site, pool: &str, first: u64, later: u64) -> Result<String> {
    let volume = site.volume_in(pool, first)?;
    let one = site.mount(site.node(ONE), &volume, &[])?;
    let two = site.mount(site.node(TWO), &volume, &[])?;
    is_total(&two, first)?;

    let filled = fill(&one, "big", u64::MAX)?;
    ensure!(filled.no_space, "{} bytes went into {first}", filled.bytes);
    // As seen by the other node: the writer's view of the size includes data that the server refused.
    let size = |name: &str| -> Result<u64> {
        Ok(two.node().run(&format!("stat -c %s {}", two.join(name)))?.parse()?)
    };
    let kept = size("big")?;
    ensure!((first / 10 * 9..=first).contains(&kept), "full after {kept} bytes of {first}");
    // The other node cannot write either.
    let other = fill(&two, "other", u64::MAX)?;
    ensure!(other.no_space, "the other node wrote {} bytes more", other.bytes);
    two.node().run(&format!("rm -f {}", two.join("other")))?;

    site.expand(&volume, later)?;
    one.node()
        .wait_until("df shows the new size", Duration::from_secs(5), || Ok(is_total(&one, later).is_ok()))?;
    let more = fill(&one, "more", 32 * MIB)?;
    ensure!(!more.no_space && size("more")? == 32 * MIB, "no room after the expansion: {more:?}");

    one.node().run(&format!("rm {} {}", one.join("big"), one.join("more")))?;
    two.node().wait_until("what is deleted is free", Duration::from_secs(10), || {
        Ok(two.space()?.free_bytes >= later - 8 * MIB)
    })?;
    one.unmount()?;
    two.unmount()?;
    site.delete(&volume)?;
    Ok(format!("full at {} of {} MiB", kept / MIB, first / MIB))
}

fn is_total(mounted: &Mounted<'_>, bytes: u64) -> Result<()> {
    let total = mounted.space()?.total_bytes;
    ensure!(total == bytes, "df says {total} instead of {bytes} bytes");
    Ok(())
}

fn fill(mounted: &Mounted<'_>, name: &str, bytes_max: u64) -> Result<Filled> {
    let fill = Fill { path: mounted.join(name).into(), block_bytes: 1 << 20, bytes_max };
    mounted.node().call_within("fill", &fill, Duration::from_secs(60))
}
