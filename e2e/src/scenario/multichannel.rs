//! One session over several connections ([MS-SMB2] 3.3.5.5.2).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::given_up::{self, EAGAIN, GivenUp};
use super::{MIB, ONE, Scenario, ours};
use crate::lab::Node;
use crate::progress::say;
use crate::site::{Mounted, Site};
use crate::wait::Hopeless;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        ours("multichannel: four connections carry the load", four),
        ours("multichannel: connections cut under load", cut),
        ours("multichannel: the server's addresses change under load", changed),
    ]
}

const CHANNELS: usize = 4;

fn mount<'a>(site: &Site, client: &'a Node) -> Result<(crate::site::Volume, Mounted<'a>)> {
    let volume = site.volume(256 * MIB)?;
    let mounted = site.mount(client, &volume, &[("multichannel", ""), ("max_channels", "4")])?;
    client.wait_until("the client has four connections", Duration::from_secs(20), || {
        Ok(connections(site, client)?.len() == CHANNELS)
    })?;
    Ok((volume, mounted))
}

/// The client's ports, and the bytes acknowledged on each connection.
fn connections(site: &Site, client: &Node) -> Result<Vec<(u16, u64)>> {
    let text = client.run(&format!("ss -tinHO state established dst {}:445", site.storage().address()))?;
    let parse = |line: &str| {
        let local = line.split_whitespace().nth(2)?;
        let port = local.rsplit(':').next()?.parse().ok()?;
        let acked = line.split("bytes_acked:").nth(1)?.split_whitespace().next()?.parse().ok()?;
        Some((port, acked))
    };
    Ok(text.lines().filter_map(parse).collect())
}

fn fio(at: &Mounted<'_>, name: &str) -> String {
    format!(
        "cd /tmp; fio --name={name} --directory={} --numjobs={JOBS} --size=6m --rw=randwrite --bs=64k --iodepth=8 --ioengine=libaio \\
         --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=1 --group_reporting --output=/tmp/{name}.out \\
         || {{ cat /tmp/{name}.out >&2; exit 1; }}",
        at.path()
    )
}

fn four(site: &Site) -> Result<String> {
    let client = site.node(ONE);
    let (volume, mounted) = mount(site, client)?;
    let before = connections(site, client)?;
    client.run_within(&fio(&mounted, "four"), Duration::from_secs(60))?;
    let after = connections(site, client)?;
    let carried: Vec<u64> = after
        .iter()
        .map(|(port, bytes)| bytes - before.iter().find(|(p, _)| p == port).map_or(0, |(_, b)| *b))
        .collect();
    ensure!(
        carried.len() == CHANNELS && carried.iter().all(|b| *b > MIB),
        "bytes by connection: {carried:?}"
    );
    mounted.unmount()?;
    site.delete(&volume)?;
    Ok(format!(
        "{} MiB, the least {} MiB",
        carried.iter().sum::<u64>() / MIB,
        carried.iter().min().unwrap_or(&0) / MIB
    ))
}

/// Number of connections that are cut.
const CUTS: usize = 4;
/// Number of names of passes. A pass uses the files of an earlier one.
const NAMES: usize = 3;
/// Number of processes of a pass, each with its own file.
const JOBS: usize = 4;

/// Number of passes that fio completed, and number that an EAGAIN from the client's own kernel stopped.
#[derive(Default)]
struct Passes {
    whole: usize,
    given_up: usize,
}

impl Passes {
    /// Runs one more pass. Returns whether it completed.
    fn run(&mut self, client: &Node, mounted: &Mounted<'_>, deadline: Duration) -> Result<bool> {
        given_up::watch(client)?;
        let name = format!("pass{}", (self.whole + self.given_up) % NAMES);
        let Err(error) = client.run_within(&fio(mounted, &name), deadline) else {
            self.whole += 1;
            return Ok(true);
        };
        let GivenUp { ended, answered } = GivenUp::by(client)?;
        let error = format!("{error:#}");
        ensure!(
            error.contains(EAGAIN) && !ended.is_empty() && answered.is_empty(),
            "{error}\nthe client's kernel gave up {ended:?} and was answered {answered:?}"
        );
        say(format!("by the client's own fault: {error}; its kernel says {ended:?}"));
        self.given_up += 1;
        Ok(false)
    }
}

impl std::fmt::Display for Passes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { whole, given_up } = self;
        match given_up {
            0 => write!(f, "{whole} passes, no error"),
            _ => write!(f, "{whole} passes, and {given_up} ended by an EAGAIN of the client's own"),
        }
    }
}

/// The data files of all passes. Linux's client (7.2: cifs_set_ops) fails an O_DIRECT open of a file that it does not know
/// yet with EINVAL while its first connection is down: it believes that the server's READs are smaller than a page.
fn create_files(client: &Node, mounted: &Mounted<'_>) -> Result<()> {
    let names = (0..NAMES).flat_map(|pass| (0..JOBS).map(move |job| format!("pass{pass}.{job}.0")));
    client.run(&format!("cd {} && touch {}", mounted.path(), names.collect::<Vec<_>>().join(" "))).map(drop)
}

/// Runs fio repeatedly until `enough` is set, and then until one more pass completes.
fn load(client: &Node, mounted: &Mounted<'_>, enough: &AtomicBool) -> Result<Passes> {
    let mut passes = Passes::default();
    loop {
        let last = enough.load(Ordering::Relaxed);
        let whole = passes.run(client, mounted, Duration::from_secs(60))?;
        ensure!(passes.given_up <= CUTS, "more errors than cuts: {passes}");
        if last && whole {
            return Ok(passes);
        }
    }
}

/// One connection after the other is reset while fio writes and verifies.
fn cut(site: &Site) -> Result<String> {
    let client = site.node(ONE);
    let (volume, mounted) = mount(site, client)?;
    create_files(client, &mounted)?;
    let enough = AtomicBool::new(false);
    let passes = std::thread::scope(|scope| -> Result<Passes> {
        let load = scope.spawn(|| load(client, &mounted, &enough));
        let cuts = (0..CUTS).try_for_each(|_| {
            let mut port = None;
            client.wait_until("a connection is there, and carries load", Duration::from_secs(60), || {
                port = connections(site, client)?
                    .last()
                    .filter(|(_, bytes)| *bytes > MIB / 4)
                    .map(|(port, _)| *port);
                Ok(port.is_some() || load.is_finished())
            })?;
            let Some(port) = port else { bail!("fio has ended") };
            let server = site.storage().address();
            client.run(&format!("ss -K dst {server}:445 sport = :{port} > /dev/null")).map(drop)
        });
        enough.store(true, Ordering::Relaxed);
        let passes = load.join().expect("no panic")?;
        cuts.map(|()| passes)
    })?;
    mounted.unmount()?;
    site.delete(&volume)?;
    Ok(format!("{CUTS} cut, {passes}"))
}

/// An additional address of the server's node. Removed when dropped.
struct Address<'a>(&'a Node, String);

impl<'a> Address<'a> {
    fn add(node: &'a Node, last: u8) -> Result<Self> {
        let (network, _) = node.address().rsplit_once('.').context("an IPv4 address")?;
        let address = format!("{network}.{last}");
        node.run(&format!("ip address add {address}/24 dev eth0"))?;
        Ok(Self(node, address))
    }

    /// Also kills all connections to it, as a lost link eventually does.
    fn remove(&self) -> Result<()> {
        let Self(node, address) = self;
        node.run(&format!("ip address del {address}/24 dev eth0; ss -K src {address} > /dev/null")).map(drop)
    }
}

impl Drop for Address<'_> {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}

/// An address that carries channels is removed and another is added while fio writes and verifies.
fn changed(site: &Site) -> Result<String> {
    let (server, client) = (site.storage(), site.node(ONE));
    let first = Address::add(server, 101)?;
    // The server reads its addresses at start and then periodically.
    site.end_server()?;
    site.start_server()?;
    let volume = site.volume(256 * MIB)?;
    // A removed address answers nothing: the client gives up its connections after three echoes.
    let options = [("multichannel", ""), ("max_channels", "4"), ("echo_interval", "3")];
    let mounted = site.mount(client, &volume, &options)?;
    create_files(client, &mounted)?;
    let to = |address: &str| -> Result<usize> {
        Ok(client.run(&format!("ss -tnHO state established dst {address}:445 | wc -l"))?.trim().parse()?)
    };
    client.wait_until("channels go to both addresses", Duration::from_secs(20), || {
        Ok(to(&first.1)? > 0 && to(server.address())? > 0)
    })?;
    let mut second = None;
    let mut lost = 0;
    let ended = std::thread::scope(|scope| -> Result<Passes> {
        let load = scope.spawn(|| {
            let mut passes = Passes::default();
            while passes.whole + passes.given_up < 4 {
                passes.run(client, &mounted, Duration::from_secs(90))?;
            }
            Ok(passes)
        });
        client.wait_until("channels to the first address carry load", Duration::from_secs(20), || {
            Hopeless::unless(!load.is_finished(), || "fio has ended before anything changed".into())?;
            let busy = "grep -cE 'bytes_received:[0-9]{6}' || :";
            let count = server.run(&format!("ss -tinHO state established src {} | {busy}", first.1))?;
            Ok(count.trim() != "0")
        })?;
        lost = to(&first.1)?;
        first.remove()?;
        second = Some(Address::add(server, 102)?);
        ensure!(!load.is_finished(), "fio has ended before anything changed");
        load.join().expect("no panic")
    });
    let passes = ended?;
    ensure!(passes.whole > 0, "{passes}");
    ensure!(lost > 0, "no channel went to the address that was removed");
    mounted.unmount()?;
    site.delete(&volume)?;
    drop(second);
    Ok(format!("{lost} channels lost with their address, {passes}"))
}
