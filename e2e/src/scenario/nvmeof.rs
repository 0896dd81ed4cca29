//! NVMe over Fabrics: a kernel target, two hosts, and a namespace that only one of them may write.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::smb_direct::{Added, ROCE};
use super::{Scenario, bundled, on_fabric};
use crate::guest::calls::nvmeof::{Blocks, Held, Outcome, Paths, Seen, Written};
use crate::guest::calls::nvmet::{AllowedHost, Offer, Offered, Port};
use crate::lab::{Lab, Node, NodeSpec, client};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        on_fabric("nvmeof: the second host fences the first, over TCP", |lab| fenced(lab, "tcp")),
        on_fabric("nvmeof: the second host fences the first, over RDMA", |lab| fenced(lab, "rdma")),
        on_fabric("nvmeof: writes in flight during a network cut are fenced", late),
        on_fabric("nvmeof: discovery and refusals", refusals),
        on_fabric("nvmeof: two paths, one down, both down, both back", paths),
        on_fabric("nvmeof: a target restart that loses reservations is detected", restarted),
        on_fabric("nvmeof: a power cut of the target loses unflushed writes", unflushed),
    ]
}

pub(super) const TARGET: &str = "target";
pub(super) const FIRST: &str = "host1";
pub(super) const SECOND: &str = "host2";
/// Mounts what the hosts serve.
pub(super) const CLIENT: &str = "client";

/// The fabric's nodes.
pub(super) fn nodes() -> [NodeSpec; 4] {
    let target = NodeSpec { scratch_bytes: 2 << 30, volatile_cache: true, ..client(TARGET) };
    [target, client(FIRST), client(SECOND), client(CLIENT).with_smb_direct()]
}

pub(super) const NQN: &str = "nqn.2026-01.io.forebay:lab";
pub(super) const UUID: &str = "8bd9bb5c-6ec9-4a0c-a0a6-2e7c0c6b4f11";
pub(super) const INSTANCE: &str = "lab-0";
/// The namespace's file on the target.
pub(super) const FILE: &str = "/srv/fabric/namespace";
const FILE_BYTES: u64 = 64 << 20;
pub(super) const TCP: u16 = 4420;
pub(super) const RDMA: u16 = 4421;
/// A key (DHHC-1) and another one.
pub(super) const KEY: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
pub(super) const OTHER_KEY: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// A value that an emulated guest on a busy machine can meet.
pub(super) const KEEP_ALIVE_S: u32 = 15;
const FAST_IO_FAIL_S: u32 = 10;

/// The target and what it offers. Dropping this disconnects and withdraws everything.
pub(super) struct Fabric<'a> {
    lab: &'a Lab,
    links: Vec<Added<'a>>,
}

impl<'a> Fabric<'a> {
    /// A target that offers nothing yet.
    pub(super) fn start(lab: &'a Lab) -> Result<Self> {
        let fabric = Self { lab, links: Vec::new() };
        fabric.prepare(FILE_BYTES)?;
        for host in [FIRST, SECOND] {
            lab.node(host).run("modprobe -a nvme-fabrics nvme-tcp")?;
        }
        Ok(fabric)
    }

    /// Prepares its file system and modules, also after a power cut. Creates a new file if `bytes` is not 0.
    pub(super) fn prepare(&self, bytes: u64) -> Result<()> {
        let new = match bytes {
            0 => String::new(),
            bytes => format!("rm -f {FILE}; fallocate -l {bytes} {FILE}; sync {FILE}"),
        };
        let script = format!(
            "modprobe -a configfs nvmet nvmet-tcp xfs
             mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
             mkdir -p /srv/fabric
             blkid /dev/vdd > /dev/null || mkfs.xfs -q /dev/vdd
             mountpoint -q /srv/fabric || mount /dev/vdd /srv/fabric
             {new}"
        );
        self.target().run(&script).map(drop)
    }

    pub(super) fn target(&self) -> &'a Node {
        self.lab.node(TARGET)
    }

    pub(super) fn node(&self, name: &str) -> &'a Node {
        self.lab.node(name)
    }

    /// Adds RDMA devices on all nodes.
    pub(super) fn with_rdma(mut self) -> Result<Self> {
        self.target().run("modprobe nvmet-rdma")?;
        for name in [TARGET, FIRST, SECOND, CLIENT] {
            self.links.push(ROCE.add(self.lab.node(name))?);
        }
        for host in [FIRST, SECOND] {
            self.node(host).run("modprobe nvme-rdma")?;
        }
        Ok(self)
    }

    pub(super) fn allowed(&self, host: &str, key: Option<&str>) -> Result<AllowedHost> {
        let nqn = self.node(host).call("nvmeof-host", &(INSTANCE, host))?;
        Ok(AllowedHost { nqn, key: key.map(str::to_owned) })
    }

    /// Makes the bundled target offer the namespace, which is blank, to both hosts at these addresses, over TCP.
    fn offer(&self, addresses: &[&str]) -> Result<()> {
        let ports = (1..).zip(addresses).map(|(id, address)| port(id, "tcp", address, TCP)).collect();
        self.offer_bundled(ports)
    }

    fn offer_bundled(&self, ports: Vec<Port>) -> Result<()> {
        let hosts = vec![self.allowed(FIRST, None)?, self.allowed(SECOND, None)?];
        bundled::offer(self, hosts, ports, FILE_BYTES).context("have the bundled target offer the namespace")
    }

    /// Offers the file regardless of its content, with keys if there are any: the bundled target would not.
    pub(super) fn offer_to(&self, hosts: Vec<AllowedHost>, ports: Vec<Port>) -> Result<Offered> {
        let offer = Offer { nqn: NQN.into(), file: FILE.into(), uuid: UUID.into(), hosts, ports };
        self.target().call("nvmet-offer", &offer).context("offer the namespace")
    }

    /// The namespace as a host sees it at the target's own address.
    pub(super) fn seen(&self, host: &str, epoch: u32, transport: &str) -> Seen {
        let service = if transport == "rdma" { RDMA } else { TCP };
        Seen {
            instance: INSTANCE.into(),
            node: host.into(),
            epoch,
            nqn: NQN.into(),
            namespace: format!("uuid:{UUID}"),
            paths: vec![(transport.into(), format!("{}:{service}", self.target().address()))],
            key: None,
            keep_alive_s: KEEP_ALIVE_S,
            fast_io_fail_s: FAST_IO_FAIL_S,
        }
    }

    /// Connects, and waits until all paths accept I/O.
    pub(super) fn connect(&self, seen: &Seen) -> Result<Outcome> {
        let outcome: Outcome = self.ask(seen, "nvmeof-connect")?;
        ensure!(outcome.error.is_none(), "{outcome:?}");
        self.wait_for_paths(seen, seen.paths.len())?;
        Ok(outcome)
    }

    pub(super) fn wait_for_paths(&self, seen: &Seen, up: usize) -> Result<()> {
        self.node(&seen.node).wait_until(&format!("{up} paths take I/O"), Duration::from_secs(60), || {
            let paths: Paths = self.ask(seen, "nvmeof-watch")?;
            Ok(paths.up == up)
        })
    }

    /// Runs a function on the host of this `Seen`.
    pub(super) fn ask<R: serde::de::DeserializeOwned>(&self, seen: &Seen, function: &str) -> Result<R> {
        self.node(&seen.node).call_within(function, seen, Duration::from_secs(60))
    }

    /// Acquires the reservation.
    fn take(&self, seen: &Seen) -> Result<()> {
        let refused: Option<String> = self.ask(seen, "nvmeof-acquire")?;
        ensure!(refused.is_none(), "{} epoch {}: {refused:?}", seen.node, seen.epoch);
        let held: Held = self.ask(seen, "nvmeof-check")?;
        ensure!(held.held, "{held:?}");
        Ok(())
    }

    /// Tries to acquire the reservation and expects a refusal.
    fn refused(&self, seen: &Seen, reason: &str) -> Result<()> {
        let refused: Option<String> = self.ask(seen, "nvmeof-acquire")?;
        ensure!(refused.as_ref().is_some_and(|why| why.starts_with(reason)), "{reason}, but {refused:?}");
        Ok(())
    }

    pub(super) fn lost(&self, seen: &Seen, reason: &str) -> Result<()> {
        let held: Held = self.ask(seen, "nvmeof-check")?;
        ensure!(!held.held && held.why.starts_with(reason), "lost ({reason}), but {held:?}");
        Ok(())
    }

    pub(super) fn write(&self, seen: &Seen, writer: u64, first: u64, count: u64) -> Result<Written> {
        let arguments = (seen, Blocks { first, count, writer });
        self.node(&seen.node).call_within("nvmeof-write", &arguments, Duration::from_secs(120))
    }

    /// The writers of these blocks, read on the target.
    pub(super) fn writers(&self, first: u64, count: u64) -> Result<Vec<u64>> {
        self.target().call("nvmeof-writers", &(FILE, Blocks { first, count, writer: 0 }))
    }
}

impl Drop for Fabric<'_> {
    fn drop(&mut self) {
        for host in [FIRST, SECOND] {
            let _ = self.ask::<usize>(&self.seen(host, 1, "tcp"), "nvmeof-disconnect");
        }
        let _ = self.target().call::<()>("nvmet-withdraw", &());
        self.links.clear();
    }
}

pub(super) fn port(id: u16, transport: &str, address: &str, service: u16) -> Port {
    Port { id, transport: transport.into(), address: address.into(), service, tls: false }
}

/// The result of a write that conflicts with the reservation.
pub(super) fn conflict() -> Written {
    Written { written: 0, errno: Some(libc::EBADE) }
}

fn all(count: u64) -> Written {
    Written { written: count, errno: None }
}

/// Blocks all traffic to and from an address while this exists.
pub(super) struct Cut<'a> {
    node: &'a Node,
    address: String,
}

impl<'a> Cut<'a> {
    pub(super) fn at(node: &'a Node, address: &str) -> Result<Self> {
        let cut = Self { node, address: address.into() };
        cut.rules("-I")?;
        Ok(cut)
    }

    fn rules(&self, what: &str) -> Result<()> {
        let Self { node, address } = self;
        node.run(&format!(
            "iptables -w {what} OUTPUT -d {address} -j DROP; iptables -w {what} INPUT -s {address} -j DROP"
        ))
        .map(drop)
    }
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        let _ = self.rules("-D");
    }
}

fn fenced(lab: &Lab, transport: &str) -> Result<String> {
    let mut fabric = Fabric::start(lab)?;
    if transport == "rdma" {
        fabric = fabric.with_rdma()?;
    }
    let service = if transport == "rdma" { RDMA } else { TCP };
    fabric.offer_bundled(vec![port(1, transport, fabric.target().address(), service)])?;
    let (first, second) = (fabric.seen(FIRST, 1, transport), fabric.seen(SECOND, 2, transport));
    fabric.connect(&first)?;
    fabric.connect(&second)?;

    fabric.take(&first)?;
    let written = fabric.write(&first, 1, 0, 64)?;
    ensure!(written == all(64), "the holder's writes: {written:?}");
    // The same epoch on another host is refused, and so are writes without the reservation.
    fabric.refused(&fabric.seen(SECOND, 1, transport), "Twin")?;
    let written = fabric.write(&second, 2, 0, 64)?;
    ensure!(written == conflict(), "writes before the takeover: {written:?}");

    let started = std::time::Instant::now();
    fabric.take(&second)?;
    let took = started.elapsed();
    let written = fabric.write(&first, 1, 64, 32)?;
    ensure!(written == conflict(), "late writes of the first host: {written:?}");
    fabric.lost(&first, "Taken")?;
    fabric.refused(&first, "Superseded")?;
    let written = fabric.write(&second, 2, 32, 64)?;
    ensure!(written == all(64), "the new holder's writes: {written:?}");

    let expected = [vec![1; 32], vec![2; 64], vec![0; 32]].concat();
    let found = fabric.writers(0, 128)?;
    ensure!(found == expected, "the target's blocks are those of {found:?}");
    let registered: usize = fabric.ask(&second, "nvmeof-release")?;
    ensure!(registered == 0, "{registered} hosts are registered after the release");
    Ok(format!("taken over in {} ms", took.as_millis()))
}

fn late(lab: &Lab) -> Result<String> {
    let fabric = Fabric::start(lab)?;
    let address = fabric.target().address();
    fabric.offer(&[address])?;
    // Makes I/O in flight wait for the target instead of failing.
    let first = Seen { fast_io_fail_s: 3600, ..fabric.seen(FIRST, 1, "tcp") };
    let second = fabric.seen(SECOND, 2, "tcp");
    fabric.connect(&first)?;
    fabric.connect(&second)?;
    fabric.take(&first)?;
    let written = fabric.write(&first, 1, 0, 16)?;
    ensure!(written == all(16), "the holder's writes: {written:?}");

    let late = std::thread::scope(|scope| -> Result<Written> {
        // Dropped inside this scope, also after an error: otherwise the write would wait for its deadline.
        let cut = Cut::at(fabric.node(FIRST), address)?;
        let under_way = scope.spawn(|| fabric.write(&first, 1, 16, 16));
        fabric.wait_for_paths(&first, 0)?;
        ensure!(!under_way.is_finished(), "the write has not waited");
        fabric.take(&second)?;
        let written = fabric.write(&second, 2, 16, 8)?;
        ensure!(written == all(8), "the new holder's writes: {written:?}");
        drop(cut);
        under_way.join().expect("no panic")
    })?;
    ensure!(late == conflict(), "the writes that were under way: {late:?}");
    fabric.wait_for_paths(&first, 1)?;
    fabric.lost(&first, "Taken")?;
    let expected = [vec![1; 16], vec![2; 8], vec![0; 8]].concat();
    let found = fabric.writers(0, 32)?;
    ensure!(found == expected, "the target's blocks are those of {found:?}");
    Ok("refused after the network came back".into())
}

fn refusals(lab: &Lab) -> Result<String> {
    let fabric = Fabric::start(lab)?.with_rdma()?;
    let address = fabric.target().address();
    let ports = vec![port(1, "tcp", address, TCP), port(2, "rdma", address, RDMA)];
    let offered = fabric.offer_to(vec![fabric.allowed(FIRST, None)?], ports)?;
    let first = fabric.seen(FIRST, 1, "tcp");
    let refused = |seen: &Seen, reason: &str| -> Result<()> {
        let outcome: Outcome = fabric.ask(seen, "nvmeof-connect")?;
        ensure!(outcome.refusals == [reason], "{reason} was expected: {outcome:?}");
        ensure!(outcome.controllers.is_empty(), "{outcome:?}");
        Ok(())
    };

    // A discovery service reports only the port that is queried, and only to allowed hosts.
    let listed = |seen: &Seen| -> Result<Vec<(String, String, String)>> {
        let mut records: Vec<(String, String, String)> = fabric.ask(seen, "nvmeof-discover")?;
        records.retain(|(_, nqn, _)| nqn == NQN);
        Ok(records)
    };
    for (transport, service) in [("tcp", TCP), ("rdma", RDMA)] {
        let found = listed(&fabric.seen(FIRST, 1, transport))?;
        let expected = (transport.to_owned(), NQN.to_owned(), format!("{address}:{service}"));
        ensure!(found == [expected], "over {transport}: {found:?}");
    }
    let stranger = fabric.seen(SECOND, 1, "tcp");
    ensure!(listed(&stranger)?.is_empty(), "a host that is not allowed learns of the subsystem");
    let left = fabric.node(FIRST).run("cat /sys/class/nvme/*/subsysnqn 2>/dev/null || true")?;
    ensure!(left.is_empty(), "discovery controllers stay: {left}");

    refused(&stranger, "HostNotAllowed")?;
    refused(&Seen { nqn: format!("{NQN}-other"), ..first.clone() }, "NoSuchSubsystem")?;
    let elsewhere = |target: String| Seen { paths: vec![("tcp".into(), target)], ..first.clone() };
    refused(&elsewhere(format!("{address}:4499")), "NothingListens")?;

    // Connecting is idempotent; then the second path is added, and the first is removed.
    let made = fabric.connect(&first)?;
    ensure!(made.connected == 1, "{made:?}");
    let again = fabric.connect(&first)?;
    ensure!(again == Outcome { connected: 0, ..made.clone() }, "{again:?} after {made:?}");
    let moved = fabric.connect(&fabric.seen(FIRST, 1, "rdma"))?;
    ensure!((moved.connected, moved.disconnected) == (1, 1), "{moved:?}");
    let another: Outcome = {
        let seen = Seen { instance: "lab-1".into(), ..first.clone() };
        fabric.ask(&seen, "nvmeof-connect")?
    };
    ensure!(another.refusals == ["OtherHost"], "{another:?}");
    let missing = Seen { namespace: UUID.replacen('8', "uuid:9", 1), ..first.clone() };
    let paths: Paths = fabric.ask(&missing, "nvmeof-watch")?;
    ensure!(!paths.present && paths.all == 1 && paths.up == 0, "{paths:?}");
    let gone: usize = fabric.ask(&first, "nvmeof-disconnect")?;
    ensure!(gone == 1, "{gone} controllers were disconnected");

    if !offered.authentication {
        return Ok("without authentication, which this kernel's target lacks".into());
    }
    fabric.target().call::<()>("nvmet-withdraw", &())?;
    fabric.offer_to(vec![fabric.allowed(FIRST, Some(KEY))?], vec![port(1, "tcp", address, TCP)])?;
    let with = |key: &str| Seen { key: Some(key.into()), ..first.clone() };
    refused(&first, "AuthenticationRequired")?;
    refused(&with(OTHER_KEY), "AuthenticationFailed")?;
    fabric.connect(&with(KEY))?;
    Ok("with authentication".into())
}

/// An additional address of the target. Removed when dropped.
struct Address<'a>(&'a Node, String);

impl<'a> Address<'a> {
    fn add(node: &'a Node, last: u8) -> Result<Self> {
        let (network, _) = node.address().rsplit_once('.').context("an IPv4 address")?;
        let address = format!("{network}.{last}");
        node.run(&format!("ip address add {address}/24 dev eth0"))?;
        Ok(Self(node, address))
    }
}

impl Drop for Address<'_> {
    fn drop(&mut self) {
        let _ = self.0.run(&format!("ip address del {}/24 dev eth0", self.1));
    }
}

fn paths(lab: &Lab) -> Result<String> {
    let fabric = Fabric::start(lab)?;
    let one = fabric.target().address();
    let other = Address::add(fabric.target(), 101)?;
    fabric.offer(&[one, &other.1])?;
    let both = Seen {
        paths: [one, &other.1].map(|address| ("tcp".to_owned(), format!("{address}:{TCP}"))).into(),
        ..fabric.seen(FIRST, 1, "tcp")
    };
    fabric.connect(&both)?;
    fabric.take(&both)?;
    let host = fabric.node(FIRST);
    let written = |first: u64, what: &str| -> Result<()> {
        let written = fabric.write(&both, 1, first, 64)?;
        ensure!(written == all(64), "{what}: {written:?}");
        Ok(())
    };
    written(0, "with both paths")?;

    // The other path alone carries the I/O without an error. The reservation still holds because it belongs to the host.
    let cut = Cut::at(host, one)?;
    written(64, "with one path cut")?;
    fabric.wait_for_paths(&both, 1)?;
    written(128, "with one path down")?;
    let held: Held = fabric.ask(&both, "nvmeof-check")?;
    ensure!(held.held, "with one path down: {held:?}");
    drop(cut);
    fabric.wait_for_paths(&both, 2)?;
    let first = 192;

    let cuts = [Cut::at(host, one)?, Cut::at(host, &other.1)?];
    let started = std::time::Instant::now();
    let failed = fabric.write(&both, 1, first, 64)?;
    let took = started.elapsed();
    ensure!(failed.errno.is_some(), "with both paths cut: {failed:?}");
    let paths: Paths = fabric.ask(&both, "nvmeof-watch")?;
    ensure!(paths.up == 0 && paths.all == 2, "with both paths cut: {paths:?}");
    drop(cuts);
    fabric.wait_for_paths(&both, 2)?;
    written(first, "with both paths back")?;
    let held: Held = fabric.ask(&both, "nvmeof-check")?;
    ensure!(held.held, "with both paths back: {held:?}");
    let found = fabric.writers(0, first + 64)?;
    ensure!(found.iter().all(|writer| *writer == 1), "the target's blocks are those of {found:?}");
    Ok(format!("I/O failed {} s after both were cut", took.as_secs()))
}

fn restarted(lab: &Lab) -> Result<String> {
    let fabric = Fabric::start(lab)?;
    let address = fabric.target().address();
    // Its blocks are not from a pool, so the bundled target would not offer it again.
    let offer = || {
        let hosts = vec![fabric.allowed(FIRST, None)?, fabric.allowed(SECOND, None)?];
        fabric.offer_to(hosts, vec![port(1, "tcp", address, TCP)])
    };
    offer()?;
    let first = fabric.seen(FIRST, 1, "tcp");
    fabric.connect(&first)?;
    fabric.take(&first)?;
    let written = fabric.write(&first, 1, 0, 32)?;
    ensure!(written == all(32), "the holder's writes: {written:?}");
    fabric.target().run(&format!("sync {FILE}"))?;

    lab.power_off(TARGET)?;
    fabric.wait_for_paths(&first, 0)?;
    lab.power_on(TARGET)?;
    fabric.prepare(0)?;
    offer()?;
    // Reconnected by the kernel: nothing here connects again.
    fabric.wait_for_paths(&first, 1)?;
    fabric.lost(&first, "Forgotten")?;
    // The next epoch acquires it on any host, and then the old one is fenced.
    let second = fabric.seen(SECOND, 2, "tcp");
    fabric.connect(&second)?;
    fabric.take(&second)?;
    fabric.refused(&first, "Superseded")?;
    let written = fabric.write(&first, 1, 32, 32)?;
    ensure!(written == conflict(), "late writes of the first host: {written:?}");
    let written = fabric.write(&second, 2, 16, 32)?;
    ensure!(written == all(32), "the new holder's writes: {written:?}");
    let found = fabric.writers(0, 64)?;
    let expected = [vec![1; 16], vec![2; 32], vec![0; 16]].concat();
    ensure!(found == expected, "the target's blocks are those of {found:?}");
    Ok("found again by itself, reservation forgotten".into())
}

/// Bytes of each of the two areas at the end of the target's disk that its file system does not use.
const PLACE_BYTES: u64 = 64 << 10;

/// The assumption behind all scenarios that cut the target's power.
fn unflushed(lab: &Lab) -> Result<String> {
    let fabric = Fabric::start(lab)?;
    let target = fabric.target();
    // Without its file system, which would flush the disk at any time, and bypassing the page cache, which is lost with the
    // guest anyway.
    let place = |nth: u64| format!("$(($(blockdev --getsize64 /dev/vdd) / {PLACE_BYTES} - {nth}))");
    let write = |text: &str, nth: u64, sync: &str| {
        target.run(&format!(
            "yes {text} | dd of=/dev/vdd bs={PLACE_BYTES} count=1 iflag=fullblock oflag=direct seek={} {sync} status=none",
            place(nth)
        ))
    };
    let read = |nth: u64| {
        target.run(&format!(
            "dd if=/dev/vdd bs={PLACE_BYTES} count=1 iflag=direct skip={} status=none | sort -u",
            place(nth)
        ))
    };
    target.run("umount /srv/fabric")?;
    for nth in [1, 2] {
        write("old", nth, "conv=fsync")?;
    }
    write("new", 1, "conv=fsync")?;
    write("new", 2, "")?;
    let before = [read(1)?, read(2)?];
    ensure!(before == ["new", "new"], "{before:?}");
    lab.power_off(TARGET)?;
    lab.power_on(TARGET)?;
    let after = [read(1)?, read(2)?];
    ensure!(after == ["new", "old"], "flushed and not flushed, after the power was cut: {after:?}");
    fabric.prepare(0)?;
    Ok("what was flushed is there, what was not is not".into())
}
