//! The quickstart: one volume, two nodes, step by step.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::guest::GUEST_BINARY;
use crate::guest::calls::data::{Shards, Sum, Sums, Tree};
use crate::guest::calls::grpc::{Answer, CsiRequest};
use crate::guest::calls::space::{Fill, Filled, Space};
use crate::lab::{Lab, Node, client, storage};
use crate::machine::Acceleration;
use crate::progress::say;
use crate::report::Table;
use crate::site::{Kind, Site, check_built};
use crate::supervise;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// Size of the volume at first, and after its expansion.
const FIRST: u64 = GIB;
const LATER: u64 = GIB + GIB / 4;
/// Ranks of the training job: one checkpoint file each.
const RANKS: u32 = 4;
/// Files of the data set.
const SAMPLES: u32 = 400;
const STAGING: &str = "/var/lib/kubelet/plugins/csi.forebay.io/demo/globalmount";
const POD: &str = "/var/lib/kubelet/pods/demo/mount";
const NODES: [&str; 2] = ["node1", "node2"];

/// Runs the story. Returns whether every step succeeded. With `keep`, the lab and the volume are kept.
pub fn tell(keep: bool) -> Result<bool> {
    let started = Instant::now();
    check_built(Kind::Forebay)?;
    let mut table = Table::default();
    let name = if keep { "quickstart".to_owned() } else { format!("quickstart-{}", std::process::id()) };
    let mut lab = None;
    table.run("boot a storage node and two client nodes", || {
        let booted = if keep {
            supervise::up(&name, "storage,node1,node2", false)?;
            Lab::attach(&supervise::find(Some(&name))?)?
        } else {
            Lab::start(&name, &[storage(), client(NODES[0]), client(NODES[1])])?
        };
        let how = if booted.acceleration() == Acceleration::Kvm { "KVM" } else { "emulated" };
        lab = Some(booted);
        Ok(how.to_owned())
    });
    let Some(lab) = lab else { return finish(&table, started) };
    let mut site = None;
    table.run("start forebay-server, and forebay-csi on each node", || {
        site = Some(Site::start(lab, Kind::Forebay)?);
        Ok(String::new())
    });
    let Some(site) = site else { return finish(&table, started) };
    if let Err(error) = steps(&site, &mut table, keep) {
        say(format!("{error:#}\nthe server's log ends with:\n{}", site.server_log()));
        for node in site.lab().nodes() {
            say(format!(
                "the driver's log on {} ends with:\n{}",
                node.name(),
                node.service_log("forebay-csi")
            ));
        }
    }
    let result = finish(&table, started);
    let lab = own_name();
    if keep {
        println!("The lab stays up. To look around:");
        println!("  {lab} shell --lab {name} node1      the volume is at {POD}");
        println!("  {lab} shell --lab {name} storage    try: forebay-server sessions");
        println!("  {lab} down --lab {name}             ends it");
    } else {
        println!("What to try next:");
        println!("  ./quickstart --plain --keep          the same, and leaves the nodes and the volume up");
        println!("  {lab} test --list    shows the scenarios; `test NAME` runs those of that name");
        println!("  {lab} up             boots nodes of your own, then `shell node1`, `down`");
        println!("  ./test                               all tests");
    }
    result
}

/// This program's name as a user can call it from the current folder.
fn own_name() -> String {
    let (Ok(own), Ok(here)) = (std::env::current_exe(), std::env::current_dir()) else {
        return "forebay-lab".to_owned();
    };
    own.strip_prefix(here).unwrap_or(&own).display().to_string()
}

fn finish(table: &Table, started: Instant) -> Result<bool> {
    print!("\n{}", table.render());
    println!(
        "{} steps done, {} failed, {:.0} s in all\n",
        table.passed(),
        table.failed(),
        started.elapsed().as_secs_f64()
    );
    Ok(table.failed() == 0)
}

/// Fails if a step failed: the following steps need it.
fn must(done: Option<String>) -> Result<()> {
    done.map(drop).context("the story ends here: a step failed")
}

fn steps(site: &Site, table: &mut Table, keep: bool) -> Result<()> {
    let controller = site.storage();
    let [one, two] = NODES.map(|name| site.node(name));
    // Emulation transfers tens of MB per second: the shards show the layout, not the size.
    let shard_bytes = if site.lab().acceleration() == Acceleration::Kvm { 64 * MIB } else { 6 * MIB };

    let mut volume = Answer::default();
    must(table.run("CreateVolume: 1 GiB, ReadWriteMany", || {
        let request = CsiRequest::CreateVolume {
            name: "pvc-quickstart".into(),
            bytes: FIRST as i64,
            parameters: HashMap::new(),
            secrets: secrets(),
            block: false,
        };
        volume = site.csi(controller, request)?.ok()?;
        Ok(volume.id.clone())
    }))?;
    must(table.run("NodeStageVolume, NodePublishVolume on both nodes", || {
        for node in [one, two] {
            node.run(&format!("mkdir -p {STAGING} $(dirname {POD})"))?;
            let stage = CsiRequest::NodeStageVolume {
                id: volume.id.clone(),
                staging: STAGING.into(),
                context: volume.context.clone(),
                secrets: secrets(),
                mount_flags: Vec::new(),
            };
            site.csi(node, stage)?.ok().with_context(|| format!("stage on {}", node.name()))?;
            let publish = CsiRequest::NodePublishVolume {
                secrets: HashMap::new(),
                id: volume.id.clone(),
                staging: STAGING.into(),
                target: POD.into(),
                context: volume.context.clone(),
                readonly: false,
            };
            site.csi(node, publish)?.ok().with_context(|| format!("publish on {}", node.name()))?;
        }
        let shown = one.run(&format!(
            "grep -o 'vers=[0-9.]*' /proc/mounts | head -n 1; df -h --output=size {POD} | tail -n 1"
        ))?;
        Ok(shown.split_whitespace().collect::<Vec<_>>().join(", "))
    }))?;

    let mut checkpoint: Vec<Sum> = Vec::new();
    must(table.run("node1 writes a checkpoint, one fsynced file per rank", || {
        let shards = Shards {
            folder: format!("{POD}/checkpoint-100").into(),
            prefix: "rank".into(),
            count: RANKS,
            bytes: shard_bytes,
            seed: 100,
        };
        checkpoint = one.call_within("write-shards", &shards, Duration::from_secs(60))?;
        Ok(format!("{RANKS} x {} MiB", shard_bytes / MIB))
    }))?;
    let mut samples: Vec<Sum> = Vec::new();
    must(table.run("node1 writes a data set of small files", || {
        let tree =
            Tree { folder: format!("{POD}/dataset").into(), files: SAMPLES, bytes_max: 16_000, seed: 200 };
        samples = one.call_within("make-tree", &tree, Duration::from_secs(60))?;
        Ok(format!("{SAMPLES} files"))
    }))?;
    must(table.run("node2 verifies every checksum while node1 goes on writing", || {
        one.run(&format!("mkdir -p {POD}/running"))?;
        let mut writer = one.spawn(&[GUEST_BINARY, "record-writes", &format!("{POD}/running"), "5"])?;
        let said = |lines: &[String]| lines.iter().filter(|line| line.starts_with("synced")).count();
        writer.wait_for("the first file", Duration::from_secs(20), |lines| said(lines) > 0)?;
        let before = said(writer.lines());
        let mut bytes = 0;
        for (folder, sums) in [("checkpoint-100", &checkpoint), ("dataset", &samples)] {
            let sums = Sums { folder: format!("{POD}/{folder}").into(), sums: sums.clone() };
            bytes += two.call_within::<u64>("verify-sums", &sums, Duration::from_secs(90))?;
        }
        let lines = writer.finish(Duration::from_secs(30))?;
        ensure!(!lines.iter().any(|line| line.starts_with("failed")), "node1 failed to write: {lines:?}");
        ensure!(said(&lines) > before, "node1 did not write meanwhile");
        Ok(format!(
            "{} files, {} MiB; node1 wrote {} meanwhile",
            checkpoint.len() + samples.len(),
            bytes / MIB,
            said(&lines) - before
        ))
    }))?;

    must(table.run("ControllerExpandVolume: 1 GiB to 1.25 GiB", || {
        let request = CsiRequest::ControllerExpandVolume { id: volume.id.clone(), bytes: LATER as i64 };
        site.csi(controller, request)?.ok()?;
        two.wait_until("df on node2 shows it", Duration::from_secs(5), || {
            Ok(space(two)?.total_bytes == LATER)
        })?;
        Ok("df on node2 shows 1.25 GiB".into())
    }))?;
    must(table.run("node2 fills the volume to ENOSPC", || {
        let path = format!("{POD}/filler");
        let fill = Fill { path: path.clone().into(), block_bytes: 4 << 20, bytes_max: 2 * LATER };
        let filled: Filled = two.call_within("fill", &fill, Duration::from_secs(120))?;
        ensure!(filled.no_space, "{} bytes were taken and no ENOSPC came", filled.bytes);
        let left = space(two)?;
        ensure!(left.free_bytes < LATER / 20, "ENOSPC although {} bytes are free", left.free_bytes);
        let size: u64 = one.run(&format!("stat -c %s {path}"))?.parse()?;
        ensure!(size <= LATER, "a file of {size} bytes in a volume of {LATER}");
        two.run(&format!("rm {path}"))?;
        Ok(format!("after {} MiB more", size / MIB))
    }))?;
    must(table.run("the checkpoint is still whole", || {
        let sums = Sums { folder: format!("{POD}/checkpoint-100").into(), sums: checkpoint.clone() };
        let bytes: u64 = one.call_within("verify-sums", &sums, Duration::from_secs(60))?;
        Ok(format!("{} MiB", bytes / MIB))
    }))?;
    if keep {
        return Ok(());
    }
    must(table.run("unpublish, unstage, DeleteVolume", || {
        for node in [one, two] {
            let target = POD.to_owned();
            site.csi(node, CsiRequest::NodeUnpublishVolume { id: volume.id.clone(), target })?.ok()?;
            let staging = STAGING.to_owned();
            site.csi(node, CsiRequest::NodeUnstageVolume { id: volume.id.clone(), staging })?.ok()?;
        }
        site.csi(controller, CsiRequest::DeleteVolume { id: volume.id.clone() })?.ok()?;
        let listed = site.csi(controller, CsiRequest::ListVolumes)?.ok()?.names;
        ensure!(!listed.contains(&volume.id), "it is still listed");
        Ok(String::new())
    }))
}

fn space(node: &Node) -> Result<Space> {
    node.call("space", &POD)
}

/// The content of a Kubernetes Secret. A lab's volume holds nothing that needs better protection.
fn secrets() -> HashMap<String, String> {
    [("username", "quickstart"), ("password", "quickstart-password")]
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .into()
}
