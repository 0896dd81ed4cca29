//! Compares the speed of our server with ksmbd, the kernel's server, in the same guests, one after the other in one run, over
//! RDMA and over TCP. Without KVM the guests are emulated, so only the ratios are meaningful.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::smb_direct::{Fabric, Ksmbd, RDMA, ROCE, Unmount, is_over_smb_direct, ksmbd_mount};
use super::{MIB, ONE};
use crate::lab::{Lab, Node, NodeSpec, client, storage};
use crate::progress::say;
use crate::site::{Kind, POOL, Site, check_built};

/// Amount that fio writes and then reads.
const MEBIBYTES: u64 = 64;
const TCP: &[(&str, &str)] = &[("vers", "3.1.1")];

/// A transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Rdma,
    Tcp,
}

/// The result of one run of fio.
#[derive(Debug, Clone, Copy)]
struct Figures {
    /// MB/s.
    rate: f64,
    /// Processor seconds of the server's node per GB, in the guest's time.
    cpu: f64,
}

/// The measurements of one server: writing and reading, over RDMA and over TCP.
#[derive(Debug, Default)]
struct Measured {
    rows: [Vec<Figures>; 4],
}

const ROWS: [(&str, Way, &str); 4] = [
    ("RDMA, write", Way::Rdma, "write"),
    ("RDMA, read", Way::Rdma, "read"),
    ("TCP, write", Way::Tcp, "write"),
    ("TCP, read", Way::Tcp, "read"),
];

/// Measures both servers in turns, prints a table, and returns whether the medians of our rates are at least ksmbd's.
pub fn run(rounds: usize) -> Result<bool> {
    ensure!(rounds > 0, "at least one round");
    check_built(Kind::Forebay)?;
    let nodes = [storage(), client(ONE)].map(NodeSpec::with_smb_direct);
    let lab = Lab::start(&format!("beside-ksmbd-{}", std::process::id()), &nodes)?;
    let site = Site::start(lab, Kind::Forebay)?;
    let (ours, theirs) = measure(&site, rounds)?;
    println!(
        "\nmedians of {rounds} rounds, {MEBIBYTES} MiB in blocks of 1 MiB, depth 16, O_DIRECT; CPU of the server's node"
    );
    println!(
        "{:<12} {:>12} {:>12} {:>7} {:>14} {:>14}",
        "", "ours MB/s", "ksmbd MB/s", "ratio", "ours CPU-s/GB", "ksmbd CPU-s/GB"
    );
    let mut slower = Vec::new();
    for (index, (name, ..)) in ROWS.iter().enumerate() {
        let [a, b] = [&ours, &theirs].map(|of| median(&of.rows[index], |one| one.rate));
        let [c, d] = [&ours, &theirs].map(|of| median(&of.rows[index], |one| one.cpu));
        println!("{name:<12} {a:>12.1} {b:>12.1} {:>7.2} {c:>14.1} {d:>14.1}", a / b);
        if a < b {
            slower.push(*name);
        }
    }
    if slower.is_empty() {
        println!("at least as fast as ksmbd in all of them");
    } else {
        println!("slower than ksmbd: {}", slower.join("; "));
    }
    Ok(slower.is_empty())
}

fn median(figures: &[Figures], of: impl Fn(&Figures) -> f64) -> f64 {
    let mut values: Vec<f64> = figures.iter().map(of).collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn measure(site: &Site, rounds: usize) -> Result<(Measured, Measured)> {
    let (server, client) = (site.storage(), site.node(ONE));
    let _fabric = Fabric::add(site, &ROCE, &[client])?;
    let volume = site.volume(512 * MIB)?;
    let folder = format!("{POOL}/reference");
    server.run(&format!("mkdir -p -m 777 {folder}"))?;
    let (mut ours, mut theirs) = (Measured::default(), Measured::default());
    for round in 1..=rounds {
        say(format!("round {round} of {rounds}: ours"));
        for way in [Way::Rdma, Way::Tcp] {
            let mounted = site.mount(client, &volume, if way == Way::Rdma { RDMA } else { TCP })?;
            if way == Way::Rdma {
                is_over_smb_direct(site, client, &ROCE)?;
            }
            both(server, client, mounted.path(), way, &mut ours)?;
            mounted.unmount()?;
        }
        site.end_server()?;
        say(format!("round {round} of {rounds}: ksmbd"));
        let ksmbd = Ksmbd::start(server, &folder)?;
        for way in [Way::Rdma, Way::Tcp] {
            let at = "/mnt/reference";
            let options = if way == Way::Rdma { RDMA } else { TCP };
            client.call_within::<()>("mount", &ksmbd_mount(server, at, options), Duration::from_secs(60))?;
            let _mounted = Unmount(client, at);
            if way == Way::Rdma {
                is_over_smb_direct(site, client, &ROCE)?;
            }
            both(server, client, at, way, &mut theirs)?;
        }
        drop(ksmbd);
        site.start_server()?;
        server.wait_until("the server listens on the device", Duration::from_secs(20), || {
            Ok(server.run("rdma resource show cm_id | grep 'state LISTEN' || true")?.contains(":445 "))
        })?;
    }
    site.delete(&volume)?;
    Ok((ours, theirs))
}

/// Writes and reads in this folder.
fn both(server: &Node, client: &Node, folder: &str, way: Way, into: &mut Measured) -> Result<()> {
    for (index, (_, its_way, direction)) in ROWS.iter().enumerate() {
        if *its_way == way {
            let before = busy(server)?;
            let (rate, bytes) = fio(client, folder, direction)?;
            let cpu = (busy(server)? - before) / (bytes / 1e9);
            into.rows[index].push(Figures { rate, cpu });
        }
    }
    Ok(())
}

/// Returns millions of bytes per second, and bytes.
fn fio(client: &Node, folder: &str, direction: &str) -> Result<(f64, f64)> {
    let script = format!(
        "cd /tmp; fio --name=measured --directory={folder} --size={MEBIBYTES}m --rw={direction} --bs=1m --iodepth=16 \
         --ioengine=libaio --direct=1 --end_fsync=0 --output-format=json --output=/tmp/fio.json > /dev/null; cat /tmp/fio.json"
    );
    let text = client.run_within(&script, Duration::from_secs(120))?;
    let start = text.find('{').context("fio prints no JSON")?;
    let found: serde_json::Value = serde_json::from_str(&text[start..]).context("what fio prints")?;
    let job = &found["jobs"][0][direction];
    let rate = job["bw_bytes"].as_f64().context("a rate")?;
    let bytes = job["io_bytes"].as_f64().context("a number of bytes")?;
    ensure!(bytes == (MEBIBYTES * MIB) as f64, "fio moved {bytes} bytes");
    Ok((rate / 1e6, bytes))
}

/// Busy seconds of a node's processors since its start.
fn busy(node: &Node) -> Result<f64> {
    let line = node.run("head -n 1 /proc/stat")?;
    let ticks: Vec<f64> = line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
    ensure!(ticks.len() >= 8, "{line}");
    // user, nice, system; idle and iowait left out; irq, softirq, steal.
    Ok((ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7]) / 100.0)
}
