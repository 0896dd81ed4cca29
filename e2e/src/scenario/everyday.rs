//! Ordinary programs on a mounted volume.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{MIB, ONE, Scenario, TWO, scenario};
use crate::guest::calls::data::{Sum, Tree, TreeDigest};
use crate::guest::calls::posix::Outcome;
use crate::site::{Mounted, Site};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("tar of 500 small files", |site| on_mount(site, 256, tar)),
        scenario("fio --verify, sequential, 8 jobs", |site| {
            on_mount(site, 256, |at| fio(at, "write", "256k"))
        }),
        scenario("fio --verify, random, 8 jobs", |site| on_mount(site, 256, |at| fio(at, "randwrite", "8k"))),
        scenario("dd with O_DIRECT", |site| on_mount(site, 256, direct)),
        scenario("POSIX operations", |site| on_mount(site, 512, posix)),
    ]
}

/// A fresh volume of this many MiB, mounted on the first node.
fn on_mount(site: &Site, mib: u64, work: impl Fn(&Mounted<'_>) -> Result<String>) -> Result<String> {
    let volume = site.volume(mib * MIB)?;
    let mounted = site.mount(site.node(ONE), &volume, &[])?;
    let note = work(&mounted)?;
    // The other node must see a consistent volume, too.
    let other = site.mount(site.node(TWO), &volume, &[])?;
    let count = |mounted: &Mounted<'_>| mounted.node().run(&format!("find {} | wc -l", mounted.path()));
    let (here, there) = (count(&mounted)?, count(&other)?);
    ensure!(here == there, "{here} entries on one node, {there} on the other");
    other.unmount()?;
    mounted.unmount()?;
    site.delete(&volume)?;
    Ok(note)
}

fn tar(at: &Mounted<'_>) -> Result<String> {
    let node = at.node();
    let tree = Tree { folder: "/tmp/tree".into(), files: 500, bytes_max: 3_000, seed: 5 };
    let _: Vec<Sum> = node.call("make-tree", &tree)?;
    let long = Duration::from_secs(120);
    node.run_within(&format!("tar -C /tmp -cf - tree | tar -C {} -xf -", at.path()), long)?;
    node.run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    let digest = |folder: &str| node.call_within::<TreeDigest>("digest-tree", &folder, long);
    let origin = digest("/tmp/tree")?;
    ensure!(origin.files == 500, "{} files made", origin.files);
    // Extract it again with tar, which reads directories and sets file times in its own way.
    node.run_within(
        &format!("mkdir /tmp/out; tar -C {} -cf - tree | tar -C /tmp/out -xf -", at.path()),
        long,
    )?;
    let back = digest("/tmp/out/tree")?;
    ensure!(origin == back, "written and read differ: {origin:?}, {back:?}");
    node.run_within(&format!("rm -rf /tmp/tree /tmp/out {}", at.join("tree")), long)?;
    Ok(format!("{} bytes", origin.bytes))
}

fn fio(at: &Mounted<'_>, pattern: &str, block: &str) -> Result<String> {
    let folder = at.join("fio");
    at.node().run_within(
        &format!(
            "mkdir {folder}; cd /tmp; fio --name=job --directory={folder} --numjobs=8 --size=2m --rw={pattern} \
             --bs={block} --verify=crc32c --verify_fatal=1 --do_verify=1 --end_fsync=1 --invalidate=1 \
             --ioengine=psync --group_reporting --output=/tmp/fio.out || {{ cat /tmp/fio.out >&2; exit 1; }}"
        ),
        Duration::from_secs(90),
    )?;
    at.node().run(&format!("test $(ls {folder} | wc -l) = 8; rm -r {folder} /tmp/fio.out"))?;
    Ok(format!("8 x 2 MiB in {block}"))
}

fn direct(at: &Mounted<'_>) -> Result<String> {
    let file = at.join("direct");
    at.node().run_within(
        &format!(
            "dd if=/dev/urandom of=/tmp/source bs=1M count=16 status=none
             dd if=/tmp/source of={file} bs=1M oflag=direct status=none
             dd if={file} of=/tmp/copy bs=1M iflag=direct status=none
             cmp /tmp/source /tmp/copy; cmp /tmp/source {file}
             dd if=/tmp/source of={file} bs=4k skip=7 seek=100 count=5 conv=notrunc oflag=direct status=none
             dd if=/tmp/source of=/tmp/source bs=4k skip=7 seek=100 count=5 conv=notrunc status=none
             dd if={file} bs=4k iflag=direct status=none | cmp - /tmp/source
             rm /tmp/source /tmp/copy {file}"
        ),
        Duration::from_secs(60),
    )?;
    Ok("16 MiB".into())
}

fn posix(at: &Mounted<'_>) -> Result<String> {
    let outcomes: Vec<Outcome> = at.node().call_within("posix", &at.path(), Duration::from_secs(120))?;
    let failed: Vec<String> =
        outcomes.iter().filter_map(|(name, why)| why.as_ref().map(|why| format!("{name}: {why}"))).collect();
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(format!("{} cases", outcomes.len()))
}
