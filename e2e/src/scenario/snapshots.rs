//! Snapshots of a volume that two nodes write through the kernel's client, and volumes created from them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{MIB, ONE, Scenario, TWO, csi, ours};
use crate::guest::calls::grpc::{AdminRequest, Answer, CsiRequest};
use crate::lab::Node;
use crate::site::{Mounted, POOL, Site, Volume};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        ours("snapshots: two nodes write, and each snapshot holds all changes up to one moment", written),
        ours("snapshots: a mounted snapshot shows the old content and is read-only", mounted),
        ours("csi: a snapshot is mounted beside its volume", driven),
        ours("copies: cp --reflink shares extents until one of the files changes", reflinked),
        ours("snapshots: space accounting, and refusal on a file system without shared extents", counted),
    ]
}

const SNAPSHOTS: usize = 3;

/// Each change begins when the previous one is complete: a number is written to one file, then to another, then a file named
/// after the number replaces the previous such file. A file is written back when it is closed.
const WRITE: &str = r#"
set -eu
cd "$1"; name=$2; number=0
while [ ! -e /run/enough ]; do
    number=$((number + 1))
    echo $number > "$name-first"
    echo $number > "$name-second"
    : > "$name-next"; mv "$name-next" "$name-at-$number"
    [ $number -eq 1 ] || rm "$name-at-$((number - 1))"
done
echo $number > /run/written
"#;

/// Files that do not change: many small ones, so that a snapshot takes a while, and a large one.
const FILL: &str = r#"
mkdir many; for n in $(seq 500); do echo $n > many/$n; done
dd if=/dev/urandom of=large bs=1M count=32 status=none
sha256sum large | cut -d' ' -f1
"#;

/// Programs on a node copy by reflink, and the server copies without transferring data.
fn reflinked(site: &Site) -> Result<String> {
    let volume = site.volume(256 * MIB)?;
    let at = site.mount(site.node(ONE), &volume, &[])?;
    let other = site.mount(site.node(TWO), &volume, &[])?;
    // Used space of the pool, in KiB.
    let used = || -> Result<u64> {
        let used = site.storage().run(&format!("sync -f {POOL}; df --output=used -k {POOL} | tail -n 1"))?;
        used.trim().parse().with_context(|| format!("df says {used:?}"))
    };
    let folder = at.path();
    at.node()
        .run(&format!("cd {folder} && dd if=/dev/urandom of=first bs=1M count=64 conv=fsync status=none"))?;
    let before = used()?;
    at.node().run(&format!(
        "cd {folder} && cp --reflink=always first second && sync second && cmp first second"
    ))?;
    let grown = used()?.saturating_sub(before);
    ensure!(grown < 8 * 1024, "a copy of 64 MiB takes {grown} KiB of the pool");
    // Each copy is independent.
    at.node().run(&format!(
        "cd {folder} && sha256sum first > /tmp/sum \
         && dd if=/dev/zero of=second bs=64k seek=3 count=2 conv=notrunc,fsync status=none \
         && sha256sum -c --quiet /tmp/sum && ! cmp -s first second"
    ))?;
    let there = other.path();
    let differs = other.node().run(&format!("cmp -l {there}/first {there}/second | wc -l"))?;
    let differs: u64 = differs.trim().parse().with_context(|| format!("cmp says {differs:?}"))?;
    // Some random bytes are zero.
    ensure!((100_000..=131_072).contains(&differs), "{differs} bytes differ");
    at.unmount()?;
    other.unmount()?;
    site.delete(&volume)?;
    Ok(format!("64 MiB took {grown} KiB"))
}

fn snapshot(site: &Site, id: &str, volume: &Volume) -> Result<(i64, Duration)> {
    let begun = Instant::now();
    let request = AdminRequest::CreateSnapshot { id: id.to_owned(), volume: volume.id.clone() };
    let made = site.admin(request)?.ok().with_context(|| format!("make snapshot {id}"))?;
    Ok((made.bytes, begun.elapsed()))
}

fn delete(site: &Site, id: &str) -> Result<()> {
    site.admin(AdminRequest::DeleteSnapshot { id: id.to_owned() })?.ok()?;
    Ok(())
}

fn number(at: &Mounted<'_>, name: &str) -> Result<u64> {
    // A file that was just created, or truncated to be rewritten, has no number. Then the previous number counts, which is no
    // longer stored.
    let text = at.node().run(&format!("cat {}", at.join(name)))?;
    match text.trim() {
        "" => Ok(0),
        text => text.parse().with_context(|| format!("{name} holds {text:?}")),
    }
}

/// Checks that a snapshot's view of one node's changes existed at a single moment.
fn check(at: &Mounted<'_>, name: &str) -> Result<u64> {
    let (first, second) = (number(at, &format!("{name}-first"))?, number(at, &format!("{name}-second"))?);
    let found =
        at.node().run(&format!("cd {} && ls | grep '^{name}-at-' | grep -o '[0-9]*$' || true", at.path()))?;
    let mut numbers: Vec<u64> = found.lines().map(str::parse).collect::<Result<_, _>>()?;
    numbers.sort_unstable();
    let latest = first.max(second).max(numbers.last().copied().unwrap_or_default());
    // A truncated file is about to receive the next number.
    let first = if first == 0 { latest } else { first };
    let second_is_due = second == 0 || second == first || second + 1 == first;
    let done = if second == 0 { first } else { second };
    let in_order = match numbers.as_slice() {
        [] => done <= 1,
        [only] => *only == done || *only + 1 == done || *only + 1 == first,
        [before, last] => before + 1 == *last && (*last == done || *last == first),
        _ => false,
    };
    ensure!(
        second_is_due && in_order,
        "{name}: the first file has {first}, the second {second}, and there are {numbers:?}"
    );
    Ok(latest)
}

fn wait_for(node: &Node, at: &Mounted<'_>, name: &str, more_than: u64) -> Result<u64> {
    let mut latest = 0;
    node.wait_until("changes go on", Duration::from_secs(30), || {
        let found =
            node.run(&format!("cd {} && ls | grep '^{name}-at-' | grep -o '[0-9]*$' || true", at.path()))?;
        latest = found.lines().filter_map(|line| line.parse().ok()).max().unwrap_or(0);
        Ok(latest > more_than)
    })?;
    Ok(latest)
}

fn written(site: &Site) -> Result<String> {
    let volume = site.volume(128 * MIB)?;
    let nodes = [(ONE, "one"), (TWO, "two")];
    let here = site.mount(site.node(ONE), &volume, &[])?;
    let there = site.mount(site.node(TWO), &volume, &[])?;
    let sum = here.node().run_within(&format!("cd {}\n{FILL}", here.path()), Duration::from_secs(60))?;
    for (mounted, (_, name)) in [&here, &there].into_iter().zip(nodes) {
        mounted.node().run("rm -f /run/enough /run/written")?;
        let argv = ["sh", "-c", WRITE, "write", mounted.path(), name];
        mounted.node().start_service("snapshot-writer", &argv)?;
    }
    let mut longest = Duration::ZERO;
    let mut latest = 0;
    for index in 0..SNAPSHOTS {
        for (mounted, (_, name)) in [&here, &there].into_iter().zip(nodes) {
            latest = wait_for(mounted.node(), mounted, name, latest + 2)?;
        }
        let (_, took) = snapshot(site, &format!("{}-{index}", volume.id), &volume)?;
        longest = longest.max(took);
    }
    for mounted in [&here, &there] {
        let node = mounted.node();
        node.run(": > /run/enough")?;
        node.wait_until("the writer ends", Duration::from_secs(30), || {
            Ok(node.attempt(&["test", "-s", "/run/written"], &[], Duration::from_secs(5))?.success())
        })?;
    }
    let mut seen = Vec::new();
    for index in 0..SNAPSHOTS {
        let id = format!("{}-{index}", volume.id);
        let made = site.volume_of(&id, 128 * MIB)?;
        let mounted = site.mount(site.node(ONE), &made, &[])?;
        let large =
            mounted.node().run(&format!("cd {} && sha256sum large | cut -d' ' -f1", mounted.path()))?;
        ensure!(large == sum, "the large file of snapshot {index} is another");
        let many =
            mounted.node().run(&format!("cd {}/many && cat $(seq 500) | sha256sum", mounted.path()))?;
        ensure!(
            many == here.node().run("seq 500 | sha256sum")?,
            "the small files of snapshot {index} are others"
        );
        for (_, name) in nodes {
            seen.push(check(&mounted, name).with_context(|| format!("snapshot {index}"))?);
        }
        mounted.unmount()?;
        site.delete(&made)?;
        delete(site, &id)?;
    }
    here.unmount()?;
    there.unmount()?;
    site.delete(&volume)?;
    Ok(format!("{SNAPSHOTS} while both wrote, at {seen:?}; the longest took {} ms", longest.as_millis()))
}

/// As with a PersistentVolume that has `snapshot=` in its mount options.
fn driven(site: &Site) -> Result<String> {
    const LIVE: [&str; 2] = ["/var/lib/kubelet/shown/staging", "/var/lib/kubelet/shown/pod"];
    const THEN: [&str; 2] = ["/var/lib/kubelet/then/staging", "/var/lib/kubelet/then/pod"];
    let volume = site.csi(site.storage(), csi::create("shown", 64 * MIB))?.ok()?;
    let node = site.node(ONE);
    node.run(&format!("mkdir -p {} {} $(dirname {}) $(dirname {})", LIVE[0], THEN[0], LIVE[1], THEN[1]))?;
    site.csi(node, csi::stage(&volume, LIVE[0]))?.ok()?;
    site.csi(node, csi::publish(&volume, LIVE[0], LIVE[1], false))?.ok()?;
    node.run(&format!("echo before > {}/file && sync -f {}/file", LIVE[1], LIVE[1]))?;
    let share = volume.context.get("share").context("the context names the share")?.clone();
    let id = format!("{share}-then");
    let made = site.admin(AdminRequest::CreateSnapshot { id: id.clone(), volume: share })?.ok()?;
    let time: i64 = made.names.first().context("the server says when the snapshot was taken")?.parse()?;
    node.run(&format!("echo after > {}/file", LIVE[1]))?;

    let unix = time / 10_000_000 - 11_644_473_600;
    let token = node.run(&format!("date -u -d @{unix} +@GMT-%Y.%m.%d-%H.%M.%S"))?;
    let token = token.trim();
    let then = Answer { id: "then".into(), ..volume.clone() };
    let option = format!("snapshot={token}");
    site.csi(node, csi::stage_with(&then, THEN[0], &[option.as_str()]))?.ok()?;
    site.csi(node, csi::publish(&then, THEN[0], THEN[1], true))?.ok()?;
    let shown = node.run(&format!("cat {}/file {}/file", THEN[1], LIVE[1]))?;
    ensure!(shown.trim_end() == "before\nafter", "they show {shown:?}");
    let output =
        node.attempt(&["sh", "-c", &format!("echo x > {}/file", THEN[1])], &[], Duration::from_secs(20))?;
    ensure!(!output.success(), "the snapshot can be written");
    for (volume, [staging, target]) in [(&then, THEN), (&volume, LIVE)] {
        let (id, target) = (volume.id.clone(), target.into());
        site.csi(node, CsiRequest::NodeUnpublishVolume { id: id.clone(), target })?.ok()?;
        site.csi(node, CsiRequest::NodeUnstageVolume { id, staging: staging.into() })?.ok()?;
    }
    delete(site, &id)?;
    site.csi(site.storage(), CsiRequest::DeleteVolume { id: volume.id.clone() })?.ok()?;
    Ok(token.into())
}

fn mounted(site: &Site) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let here = site.mount(site.node(ONE), &volume, &[])?;
    let fill = "mkdir -p a/b; echo before > a/b/file; echo kept > kept; echo unread > unread; ln a/b/file hard; dd if=/dev/urandom of=large bs=1M count=8 status=none";
    here.node().run(&format!("cd {}\n{fill}", here.path()))?;
    let id = format!("{}-shown", volume.id);
    let request = AdminRequest::CreateSnapshot { id: id.clone(), volume: volume.id.clone() };
    let made = site.admin(request)?.ok()?;
    let time = made.names.first().context("the server says when the snapshot was taken")?;
    let sum = here.node().run(&format!("cd {} && sha256sum large", here.path()))?;
    let change = "echo after > a/b/file; rm kept; mv a c; : > large; echo new > new";
    here.node().run(&format!("cd {}\n{change}", here.path()))?;

    let at = format!("/mnt/{id}");
    let there = site.mount_at(site.node(TWO), &volume, &at, &[("snapshot", time)])?;
    let shown = there.node().run(&format!(
        "cd {at} && find . | LC_ALL=C sort | tr '\n' ' ' && cat a/b/file kept hard && sha256sum large"
    ))?;
    let expected = format!(
        ". ./a ./a/b ./a/b/file ./hard ./kept ./large ./unread before\nkept\nbefore\n{}\n",
        sum.trim_end()
    );
    ensure!(shown.trim_end() == expected.trim_end(), "the snapshot shows {shown:?} instead of {expected:?}");
    for change in [
        "echo x > kept",
        "echo x > new",
        "rm kept",
        "mkdir d",
        "mv kept other",
        "chmod 600 kept",
        "ln kept link",
    ] {
        let output = there.node().attempt(
            &["sh", "-c", &format!("cd {at}; {change}")],
            &[],
            Duration::from_secs(20),
        )?;
        ensure!(!output.success(), "{change:?} succeeds in a snapshot");
    }
    let still = there.node().run(&format!("cd {at} && cat kept a/b/file"))?;
    ensure!(still.trim_end() == "kept\nbefore", "the snapshot was changed: {still:?}");
    // Next to the volume itself on the same node.
    let beside = site.mount(site.node(TWO), &volume, &[])?;
    let now = beside.node().run(&format!("cat {}", beside.join("c/b/file")))?;
    ensure!(now.trim_end() == "after", "the volume shows {now:?} beside its snapshot");
    delete(site, &id)?;
    // Listing is no test: glibc treats ENOENT from a removed directory as its end, as POSIX requires.
    let gone = there.node().attempt(&["cat", &format!("{at}/unread")], &[], Duration::from_secs(20))?;
    ensure!(!gone.success(), "a snapshot that is deleted shows {:?}", gone.text());
    for mounted in [there, beside, here] {
        mounted.unmount()?;
    }
    site.delete(&volume)?;
    Ok(String::new())
}

fn counted(site: &Site) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let here = site.mount(site.node(ONE), &volume, &[])?;
    here.node().run(&format!("dd if=/dev/urandom of={} bs=1M count=40 status=none", here.join("model")))?;
    let id = format!("{}-kept", volume.id);
    let (bytes, _) = snapshot(site, &id, &volume)?;
    ensure!((40 << 20..48 << 20).contains(&bytes), "a snapshot of 40 MiB has {bytes} bytes");
    // The snapshot's data does not count against the volume: its whole capacity can be written again.
    here.node().run(&format!(
        "dd if=/dev/urandom of={} bs=1M count=40 conv=notrunc status=none",
        here.join("model")
    ))?;
    let made = site.volume_of(&id, 64 * MIB)?;
    let there = site.mount(site.node(TWO), &made, &[])?;
    let space = there.space()?;
    ensure!(space.total_bytes == 64 * MIB, "the volume that is made of it has {} bytes", space.total_bytes);
    let full = there.node().attempt(
        &["dd", "if=/dev/zero", &format!("of={}", there.join("more")), "bs=1M", "count=40", "conv=fsync"],
        &[],
        Duration::from_secs(60),
    )?;
    ensure!(
        !full.success() && full.complaint().contains("No space left"),
        "40 MiB more fit into 64 MiB: {}",
        full.complaint()
    );
    let small = site.volume_of(&id, 32 * MIB).map(drop);
    ensure!(
        small.is_err_and(|error| format!("{error:#}").contains("at least that of the source")),
        "a volume is smaller than its source"
    );
    let on_ext4 = site.volume_in("ext4", 16 * MIB)?;
    let refused = snapshot(site, &format!("{}-kept", on_ext4.id), &on_ext4).map(drop);
    let why = refused.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(why.contains("shares no extents"), "ext4 cannot share extents, and the server says {why:?}");
    there.unmount()?;
    here.unmount()?;
    for volume in [&made, &volume, &on_ext4] {
        site.delete(volume)?;
    }
    delete(site, &id)?;
    Ok(String::new())
}
