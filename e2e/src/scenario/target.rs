//! The bundled target: what it offers, to hosts that must not notice its restarts, and what it must not offer or touch.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::bundled::{CONFIG, NVMET, OTHER_FILE, PROGRAM, Says, Target, at, file};
use super::nvmeof::{FILE, FIRST, Fabric, INSTANCE, NQN, SECOND, TARGET, TCP, UUID, port};
use super::{MIB, Scenario, on_fabric};
use crate::guest::calls::nvmeof::{Held, Outcome, Seen, Written};
use crate::guest::calls::nvmet::{AllowedHost, Offer, Offered};
use crate::lab::{Lab, Node};
use crate::site::{ADMIN_SOCKET, POOL, SERVER_CONFIG};
use crate::wait::Hopeless;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        on_fabric("bundled target: replaced, killed and changed under I/O, over TCP", |lab| {
            under_io(lab, "tcp")
        }),
        on_fabric("bundled target: replaced, killed and changed under I/O, over RDMA", |lab| {
            under_io(lab, "rdma")
        }),
        on_fabric("bundled target: killed at any moment, and removed completely", killed),
        on_fabric(
            "bundled target: drives in use, foreign drives and foreign subsystems are not touched",
            foreign,
        ),
        on_fabric("bundled target: a drive is pulled and put back", comes_back),
        on_fabric("bundled target: a pool grows with its file, which is exported again", grows),
    ]
}

fn with_transport<'a>(lab: &'a Lab, transport: &str) -> Result<Fabric<'a>> {
    let fabric = Fabric::start(lab)?;
    if transport == "rdma" { fabric.with_rdma() } else { Ok(fabric) }
}

fn hosts(fabric: &Fabric<'_>, names: &[&str]) -> Result<Vec<String>> {
    names.iter().map(|host| Ok(fabric.allowed(host, None)?.nqn)).collect()
}

/// Number of blocks per call.
const BLOCKS: u64 = 128;

fn under_io(lab: &Lab, transport: &'static str) -> Result<String> {
    let fabric = with_transport(lab, transport)?;
    let target = Target::new(&fabric)?;
    let says = |hosts: Vec<String>, other| Says {
        ports: at(&fabric, transport),
        hosts,
        namespaces: vec![file(FILE, 256)],
        other,
    };
    let (both, only_first) = (hosts(&fabric, &[FIRST, SECOND])?, hosts(&fabric, &[FIRST])?);
    target.says(&says(only_first.clone(), false))?;
    target.start()?;
    target.wait()?;
    let ready = target.http("/readyz")?;
    ensure!(ready.trim_end().ends_with("\nready"), "{ready}");
    let metrics = target.http("/metrics")?;
    let up = format!("forebay_target_namespace_up{{nqn=\"{NQN}\",namespace=\"1\"}} 1");
    ensure!(metrics.contains(&up), "{up}: {metrics}");

    let (first, second) = (fabric.seen(FIRST, 1, transport), fabric.seen(SECOND, 2, transport));
    fabric.connect(&first)?;
    let refused: Option<String> = fabric.ask(&first, "nvmeof-acquire")?;
    ensure!(refused.is_none(), "the reservation: {refused:?}");
    let connection = || fabric.node(FIRST).run("cat /sys/class/nvme/nvme*/cntlid");
    let before = connection()?;

    let (done, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let written = std::thread::scope(|scope| -> Result<u64> {
        let writer = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                let at = rounds.load(Ordering::Relaxed) * BLOCKS;
                let written = fabric.write(&first, 1, at, BLOCKS)?;
                ensure!(written == Written { written: BLOCKS, errno: None }, "at block {at}: {written:?}");
                rounds.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        let result = changes(&fabric, &target, &says, &only_first, &both, &second);
        done.store(true, Ordering::Relaxed);
        writer.join().expect("no panic").context("the writer")?;
        result?;
        Ok(rounds.load(Ordering::Relaxed) * BLOCKS)
    })?;
    ensure!(connection()? == before, "the host was cut: controller {before} became {}", connection()?);
    let held: Held = fabric.ask(&first, "nvmeof-check")?;
    ensure!(held.held, "{held:?}");
    let found = fabric.writers(0, written)?;
    ensure!(found.iter().all(|writer| *writer == 1), "blocks of others: {found:?}");

    for seen in [&first, &second] {
        fabric.ask::<usize>(seen, "nvmeof-disconnect")?;
    }
    target.stop()?;
    target.remove()?;
    target.is_bare()?;
    let found = fabric.writers(0, written)?;
    ensure!(found.iter().all(|writer| *writer == 1), "the file after removal: {found:?}");
    Ok(format!("{written} blocks without an error"))
}

/// Changes in a target's lifecycle: shutdowns, kills, other configuration files. The first host is allowed all the time.
fn changes(
    fabric: &Fabric<'_>,
    target: &Target<'_>,
    says: &dyn Fn(Vec<String>, bool) -> Says,
    only_first: &[String],
    both: &[String],
    second: &Seen,
) -> Result<()> {
    let refused = || -> Result<()> {
        let outcome: Outcome = fabric.ask(second, "nvmeof-connect")?;
        ensure!(outcome.refusals == ["HostNotAllowed"], "the second host: {outcome:?}");
        Ok(())
    };
    refused()?;
    target.stop()?;
    target.start()?;
    target.wait()?;
    target.kill()?;
    target.says(&says(both.to_vec(), false))?;
    target.start()?;
    target.wait()?;
    fabric.connect(second)?;
    fabric.ask::<usize>(second, "nvmeof-disconnect")?;
    // While it runs: the second host is removed and a subsystem is added, then both changes are undone.
    target.says(&says(only_first.to_vec(), true))?;
    target.wait()?;
    refused()?;
    target.says(&says(both.to_vec(), false))?;
    target.wait()?;
    let left = target.node.run(&format!("ls {NVMET}/subsystems"))?;
    ensure!(left == NQN, "subsystems: {left}");
    // An empty or invalid file changes nothing.
    let before = target.tree()?;
    for text in ["", "[[port]]\n", "not TOML"] {
        target.node.put(CONFIG, text.as_bytes(), 0o600)?;
        target.node.wait_until("the file is reported as wrong", Duration::from_secs(20), || {
            Ok(target.http("/readyz")?.contains("is not followed"))
        })?;
        ensure!(target.tree()? == before, "{text:?} has changed the target");
    }
    target.says(&says(both.to_vec(), false))?;
    target.wait()
}

/// The next moment to kill it, as a fraction of the interval between too early and too late.
const MOMENTS: [f64; 5] = [0.5, 0.3, 0.7, 0.4, 0.6];
/// Number of kills while it creates everything, and while it removes everything.
const KILLS: usize = 20;
/// Number of kills that must hit it half way, for each command. It adds more kills to reach this number.
const HALF_WAY_MIN: usize = 2;
/// If this many kills do not suffice, the program does everything in one step.
const KILLS_MAX: usize = 60;
/// By then it has completed, also under emulation.
const TOO_LATE_S: f64 = 2.0;

fn killed(lab: &Lab) -> Result<String> {
    let fabric = with_transport(lab, "tcp")?;
    let target = Target::new(&fabric)?;
    let says = Says {
        ports: at(&fabric, "tcp"),
        hosts: hosts(&fabric, &[FIRST, SECOND])?,
        namespaces: vec![file(FILE, 64), file("/srv/fabric/second", 16)],
        other: true,
    };
    target.says(&says)?;
    // Neither configfs nor the modules are loaded yet.
    target.node.run(&format!(
        "modprobe -r nvmet-rdma nvmet-tcp nvmet; umount /sys/kernel/config; test ! -e {NVMET}"
    ))?;
    let made = || -> Result<String> {
        target.start()?;
        target.wait()?;
        target.kill()?;
        target.tree()
    };
    let all = made()?;
    // Paths of its subsystems, their content, and hosts. Not the content of files, and not ports, which have other numbers.
    let in_file = |line: &str| ["/attr_", "/device_", "/enable:"].iter().any(|part| line.contains(part));
    let entries: Vec<&str> =
        all.lines().filter(|line| !line.starts_with("ports") && !in_file(line)).collect();
    ensure!(!entries.is_empty(), "nothing was made: {all}");
    let mut half = [0, 0];
    let mut kills = [0, 0];
    for ((command, half), kills) in ["run", "remove"].into_iter().zip(&mut half).zip(&mut kills) {
        let (mut early, mut late) = (0.0, TOO_LATE_S);
        while *kills < KILLS || *half < HALF_WAY_MIN {
            ensure!(
                *kills < KILLS_MAX,
                "{command} was killed {KILLS_MAX} times, and half way only {half} times"
            );
            let kill = *kills;
            *kills += 1;
            // From an empty target, or from a complete one.
            if command == "run" {
                target.remove()?;
                target.is_bare()?;
            }
            let moment = early + (late - early) * MOMENTS[kill % MOMENTS.len()];
            let script = if kill < KILLS {
                format!("timeout -s KILL {moment:.4} {PROGRAM} {command} > /dev/null 2>&1 || true")
            } else {
                // The time between nothing and all is too short for timed kills: kill it when it has created or removed a
                // given entry.
                let sign = if command == "run" { "-e" } else { "! -e" };
                let seen = format!("{NVMET}/{}", entries[kill % entries.len()]);
                format!(
                    "{PROGRAM} {command} > /dev/null 2>&1 & pid=$!
                     until [ {sign} {seen} ] || ! kill -0 $pid 2> /dev/null; do :; done
                     kill -9 $pid 2> /dev/null || true; wait $pid || true"
                )
            };
            target.node.run_within(&script, Duration::from_secs(30))?;
            let tree = target.tree()?;
            let (is_early, is_late) = match command {
                "run" => (tree.is_empty(), tree == all),
                _ => (tree == all, tree.is_empty()),
            };
            match (is_early, is_late) {
                (true, _) => early = moment,
                (_, true) => late = moment,
                _ => *half += 1,
            }
            // Continuing from there must lead to the expected state both ways. Run times vary, so widen the narrowed
            // interval.
            early *= 0.95;
            late *= 1.05;
            if command == "run" && kill % 2 == 0 {
                continue;
            }
            if command == "remove" && kill % 2 == 0 {
                target.remove()?;
                target.is_bare()?;
            }
            let tree = made()?;
            ensure!(tree == all, "after {command} was killed at {moment} s: {tree}\ninstead of: {all}");
        }
    }
    let first = fabric.seen(FIRST, 1, "tcp");
    fabric.connect(&first)?;
    fabric.ask::<usize>(&first, "nvmeof-disconnect")?;
    target.remove()?;
    target.is_bare()?;
    let files = target
        .node
        .run("cd /srv/fabric; stat -c '%n %s' namespace second other; ls -A | grep forebay-new || true")?;
    let expected = format!("namespace {}\nsecond {}\nother {}", 64 * MIB, 16 * MIB, 16 * MIB);
    ensure!(files == expected, "files after removal: {files}");
    target.node.run("rm -f /srv/fabric/second")?;
    Ok(format!(
        "killed {} times while it made and {} while it removed, half way {} and {} times",
        kills[0], kills[1], half[0], half[1]
    ))
}

/// Drives that must not be offered: the command that makes a file on a loop device look like one, and the reported reason.
const FOREIGN: &[(&str, &str)] = &[
    ("mkfs.ext4 -q -F $f", "an ext2, ext3 or ext4 file system"),
    ("mkfs.xfs -q -f -L data $f", "an XFS file system labelled"),
    ("mkswap -q $f", "swap space"),
    ("printf 'EFI PART' | dd of=$f bs=1 seek=512 conv=notrunc status=none", "a partition table (GPT)"),
    ("printf LABELONE | dd of=$f bs=1 seek=512 conv=notrunc status=none", "a physical volume of LVM"),
    ("printf x | dd of=$f bs=1 seek=314572799 conv=notrunc status=none", "data (from byte 314572799 on)"),
    (
        "mkfs.xfs -q -f -L forebay $f; losetup $l $f; mkdir -p /mnt/pool; mount $l /mnt/pool",
        "it is in use on this machine",
    ),
    ("losetup $l $f; mkswap -q $l; swapon $l", "it is in use on this machine"),
];

fn foreign(lab: &Lab) -> Result<String> {
    let fabric = with_transport(lab, "tcp")?;
    let target = Target::new(&fabric)?;
    let node = target.node;
    let (drive, image) = ("/dev/loop7", "/srv/fabric/drive");
    node.run("modprobe loop; [ -b /dev/loop7 ] || mknod /dev/loop7 b 7 7")?;
    let free = format!(
        "swapoff {drive} 2>/dev/null || true; umount /mnt/pool 2>/dev/null || true; losetup -d {drive} 2>/dev/null || true"
    );
    let with = |backing: String| Says {
        ports: at(&fabric, "tcp"),
        hosts: hosts(&fabric, &[FIRST]).unwrap_or_default(),
        namespaces: vec![backing],
        other: false,
    };
    let device = |path: &str| format!("device = \"{path}\"");

    // A subsystem of another program, with a host and an address that we need here, too.
    node.run(&format!("truncate -s 16M {OTHER_FILE}"))?;
    let theirs = Offer {
        nqn: "nqn.2026-01.org.example:theirs".into(),
        file: OTHER_FILE.into(),
        uuid: "2c9f2c59-6c0c-4a53-9a52-5f3b3b7c2a10".into(),
        hosts: vec![AllowedHost { nqn: fabric.allowed(FIRST, None)?.nqn, key: None }],
        ports: vec![port(1, "tcp", node.address(), TCP + 10)],
    };
    node.call::<Offered>("nvmet-offer", &theirs)?;
    let before = target.tree()?;

    let refused = |backing: String, says: &str| -> Result<()> {
        target.says(&with(backing))?;
        let (code, said) = target.ask("check")?;
        ensure!(code == Some(1) && said.contains(says), "check, {says:?}: {code:?}: {said}");
        target.start()?;
        node.wait_until("it is refused", Duration::from_secs(20), || {
            Ok(target.http("/readyz")?.contains(says))
        })
        .with_context(|| format!("{says:?}: {}", target.log()))?;
        let offered =
            node.run(&format!("cat {NVMET}/subsystems/{NQN}/namespaces/*/enable 2>/dev/null || true"))?;
        ensure!(offered.is_empty(), "{says:?}: offered: {offered}");
        target.stop()?;
        target.remove()?;
        ensure!(target.tree()? == before, "what others made: {before}\nthen: {}", target.tree()?);
        Ok(())
    };
    for (script, says) in FOREIGN {
        node.run(&free)?;
        let make = format!(
            "f={image}; l={drive}; rm -f $f; truncate -s 300M $f; {script}; losetup $l > /dev/null 2>&1 || losetup $l $f; sync"
        );
        node.run_within(&make, Duration::from_secs(60))?;
        // Any write changes the file's times.
        let state = || node.run(&format!("sync {image}; stat -c '%b %y %z' {image}"));
        let untouched = state()?;
        refused(device(drive), says)?;
        ensure!(state()? == untouched, "{says:?}: it was written to");
    }
    node.run(&free)?;
    // The disk with the lab's files, which is mounted; a file behind a loop device; a file that others offer.
    refused(device("/dev/vdd"), "it is in use on this machine")?;
    node.run(&format!("rm -f {image}; truncate -s 300M {image}; losetup {drive} {image}"))?;
    refused(file(image, 300), "lies on it")?;
    node.run(&free)?;
    refused(file(OTHER_FILE, 16), "namespace 1 of nqn.2026-01.org.example:theirs lies on it")?;
    refused(device("/dev/disk/by-id/nvme-absent"), "No such file")?;

    // A drive without an owner is offered, and so is a pool of ours, unless its cache could lose flushed data.
    let accepted = format!("{}\nallow_volatile_cache = true", device(drive));
    for script in ["true", "mkfs.xfs -q -f -L forebay $l"] {
        let make =
            format!("l={drive}; rm -f {image}; truncate -s 300M {image}; losetup $l {image}; {script}; sync");
        let cache = |kind: &str| node.run(&format!("echo '{kind}' > /sys/block/loop7/queue/write_cache"));
        node.run_within(&make, Duration::from_secs(60))?;
        cache("write back")?;
        refused(device(drive), "a write cache that loses what is in it")?;
        for (kind, backing) in [("write back", &accepted), ("write through", &device(drive))] {
            cache(kind)?;
            target.says(&with(backing.clone()))?;
            target.start()?;
            target.wait()?;
            target.stop()?;
            target.remove()?;
            ensure!(target.tree()? == before, "what others made: {before}\nthen: {}", target.tree()?);
        }
        node.run(&free)?;
    }
    node.run(&format!("rm -f {image}"))?;
    Ok(format!("{} refused", FOREIGN.len() + 5))
}

/// A drive (in memory) that can be pulled and put back.
const PULLED: &str = "/sys/kernel/config/nullb/nullb0";

fn comes_back(lab: &Lab) -> Result<String> {
    let fabric = with_transport(lab, "tcp")?;
    let target = Target::new(&fabric)?;
    let node = target.node;
    node.run(&format!(
        "modprobe null_blk nr_devices=0; mkdir -p {PULLED}; cd {PULLED}; echo 320 > size; echo 1 > memory_backed; \
         echo 1 > power; mkfs.xfs -q -L forebay /dev/nullb0"
    ))?;
    let result = pulled(&fabric, &target);
    let _ = node.signal_service(PROGRAM, "KILL");
    let _ = fabric.ask::<usize>(&fabric.seen(FIRST, 1, "tcp"), "nvmeof-disconnect");
    target.remove()?;
    node.run(&format!("echo 0 > {PULLED}/power; rmdir {PULLED}"))?;
    result
}

fn pulled(fabric: &Fabric<'_>, target: &Target<'_>) -> Result<String> {
    let node = target.node;
    target.says(&Says {
        ports: at(fabric, "tcp"),
        hosts: hosts(fabric, &[FIRST])?,
        namespaces: vec!["device = \"/dev/nullb0\"".into()],
        other: false,
    })?;
    target.start()?;
    target.wait()?;
    let first = fabric.seen(FIRST, 1, "tcp");
    fabric.connect(&first)?;
    let write = |what: &str| -> Result<bool> {
        Ok(fabric.write(&first, 1, 20_000, 4).with_context(|| what.to_owned())?.errno.is_none())
    };
    ensure!(write("before")?, "a write to the drive fails");
    let up = |value: u8| -> Result<bool> {
        let line = format!("forebay_target_namespace_up{{nqn=\"{NQN}\",namespace=\"1\"}} {value}");
        Ok(target.http("/metrics")?.contains(&line))
    };
    ensure!(up(1)?, "it is not reported as up");
    node.run(&format!("echo 0 > {PULLED}/power"))?;
    node.wait_until("the drive is reported as away", Duration::from_secs(20), || {
        Ok(target.http("/readyz")?.contains("/dev/nullb0: No such file") && up(0)?)
    })?;
    ensure!(!write("without the drive")?, "a write to a drive that is away does not fail");
    node.run(&format!("echo 1 > {PULLED}/power"))?;
    node.wait_until("it is offered again", Duration::from_secs(20), || up(1))
        .with_context(|| format!("{}\n{}", target.log(), target.http("/readyz").unwrap_or_default()))?;
    target.wait()?;
    fabric.wait_for_paths(&first, 1)?;
    node.wait_until("hosts write to it again", Duration::from_secs(20), || write("after"))?;
    Ok("reported, and offered again".into())
}

fn grows(lab: &Lab) -> Result<String> {
    let fabric = with_transport(lab, "tcp")?;
    let target = Target::new(&fabric)?;
    let says = |mib| -> Result<Says> {
        let hosts = hosts(&fabric, &[FIRST])?;
        Ok(Says { ports: at(&fabric, "tcp"), hosts, namespaces: vec![file(FILE, mib)], other: false })
    };
    target.says(&says(600)?)?;
    target.start()?;
    target.wait()?;

    let host = fabric.node(FIRST);
    let config = format!(
        "[instance]\nname = \"{INSTANCE}\"\nepoch = 1\n[server]\nlisten = [\"0.0.0.0:445\"]\nrdma = \"off\"\n\
         [admin]\nsocket = \"{ADMIN_SOCKET}\"\n[[pool]]\nname = \"default\"\npath = \"{POOL}\"\nquota = \"project\"\n\
         [pool.nvmeof]\nnqn = \"{NQN}\"\nnamespace = \"uuid:{UUID}\"\npaths = [\"tcp://{}:{TCP}\"]\nformat = true\n\
         connect_time_s = 200\nkeep_alive_s = 30\nloss_time_s = 60\n",
        target.node.address(),
    );
    host.put(SERVER_CONFIG, config.as_bytes(), 0o600)?;
    host.run("mkdir -p /run/forebay; rm -f /var/log/grown-server.log")?;
    host.start_service("grown-server", &["forebay-server", "run", "--config", SERVER_CONFIG])?;
    let result = grown(&fabric, &target, host, &says);
    let log = host.service_log("grown-server");
    host.signal_service("grown-server", "TERM")?;
    host.run(&format!("while grep -q ' {POOL} ' /proc/mounts; do umount {POOL} || umount -l {POOL}; done"))?;
    let seen = fabric.seen(FIRST, 1, "tcp");
    fabric.ask::<usize>(&seen, "nvmeof-disconnect")?;
    let said = result.with_context(|| format!("the server says: {log}"))?;
    target.stop()?;
    target.remove()?;
    target.is_bare()?;

    // A drive that contains a pool is offered again: after a removal, and after a reboot.
    target.says(&says(600)?)?;
    target.start()?;
    target.wait()?;
    lab.power_off(TARGET)?;
    lab.power_on(TARGET)?;
    fabric.prepare(0)?;
    target.says(&says(600)?)?;
    target.start()?;
    target.wait()?;
    // The connect waits until the namespace accepts I/O.
    fabric.connect(&seen)?;
    fabric.ask::<usize>(&seen, "nvmeof-disconnect")?;
    target.stop()?;
    target.remove()?;
    target.is_bare()?;
    Ok(said)
}

fn grown(
    fabric: &Fabric<'_>,
    target: &Target<'_>,
    host: &Node,
    says: &dyn Fn(u64) -> Result<Says>,
) -> Result<String> {
    host.wait_until("the server serves", Duration::from_secs(60), || {
        Hopeless::unless(host.service_runs("grown-server")?, || "it has ended".into())?;
        Ok(host.run("cat /var/log/grown-server.log")?.contains(" serving"))
    })?;
    let bytes = || -> Result<u64> {
        let text = host.run(&format!("df -B1 --output=size {POOL} | tail -n 1"))?;
        text.trim().parse().with_context(|| format!("df says {text:?}"))
    };
    let before = bytes()?;
    host.run(&format!("dd if=/dev/urandom of={POOL}/.forebay/lab bs=1M count=8 conv=fsync status=none"))?;
    let sum = || host.run(&format!("echo 3 > /proc/sys/vm/drop_caches; md5sum < {POOL}/.forebay/lab"));
    let content = sum()?;
    target.says(&says(900)?)?;
    let wanted = before + 280 * MIB;
    host.wait_until("the pool grows", Duration::from_secs(60), || Ok(bytes()? >= wanted))
        .with_context(|| format!("the target says: {}", target.log()))?;
    ensure!(sum()? == content, "what was in the pool has changed");
    // Growth is permanent.
    target.says(&says(600)?)?;
    target.wait()?;
    let size = target.node.run(&format!("stat -c %s {FILE}"))?;
    ensure!(size == (900 * MIB).to_string(), "the file has {size} bytes");
    let held: Held = fabric.ask(&fabric.seen(FIRST, 1, "tcp"), "nvmeof-check")?;
    ensure!(held.held, "{held:?}");
    Ok(format!("from {} to {} MiB", before / MIB, bytes()? / MIB))
}
