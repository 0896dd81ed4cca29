//! Nodes with SMB Direct in the kernel: checks that it is available and reported, and that it carries files, with ksmbd, the
//! kernel's own server, and with ours.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::exercised::exercise;
use super::{MIB, ONE, Place, Scenario, TWO, ours, scenario};
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::guest::calls::inventory::{Device, Found};
use crate::guest::calls::mounting::Mount;
use crate::lab::Node;
use crate::progress::say;
use crate::site::Site;

pub(super) fn scenarios() -> Vec<Scenario> {
    let on_fabric = |scenario: Scenario| Scenario { place: Place::SmbDirect, ..scenario };
    vec![
        scenario("inventory reports a kernel without SMB Direct", without),
        on_fabric(scenario("inventory reports a kernel with SMB Direct", with)),
        on_fabric(scenario("ksmbd and cifs over soft-RoCE", |site| carries(site, &ROCE))),
        on_fabric(scenario("ksmbd and cifs over software iWARP", |site| carries(site, &IWARP))),
        on_fabric(ours("SMB Direct over soft-RoCE", |site| served(site, &ROCE))),
        on_fabric(ours("SMB Direct over software iWARP", |site| served(site, &IWARP))),
        on_fabric(ours("SMB Direct and TCP clients at once", mixed)),
        on_fabric(ours("SMB Direct with reads that bypass the page cache", past_the_page_cache)),
        on_fabric(ours("SMB Direct mounted and unmounted 50 times", remounted)),
    ]
}

/// The inventory before cifs is loaded, and after.
fn reported(node: &Node) -> Result<[Found; 2]> {
    // An earlier scenario may have used it.
    node.run("rmmod cifs 2>/dev/null || [ ! -e /sys/module/cifs ]")?;
    let on_disk = node.call("inventory", &())?;
    node.run("modprobe cifs")?;
    Ok([on_disk, node.call("inventory", &())?])
}

fn features(node: &Node) -> Result<String> {
    node.run("grep ^Features: /proc/fs/cifs/DebugData")
}

fn without(site: &Site) -> Result<String> {
    let node = site.node(ONE);
    for found in reported(node)? {
        ensure!(found.cifs_smb_direct == Some(false) && found.oddities.is_empty(), "{found:?}");
    }
    let features = features(node)?;
    ensure!(!features.contains("SMB_DIRECT"), "{features}");
    Ok(String::new())
}

fn with(site: &Site) -> Result<String> {
    let node = site.node(ONE);
    for found in reported(node)? {
        ensure!(found.cifs_smb_direct == Some(true) && found.oddities.is_empty(), "{found:?}");
    }
    let features = features(node)?;
    ensure!(features.contains("SMB_DIRECT"), "{features}");
    for module in ["cifs", "ksmbd", "siw", "smbdirect"] {
        let file = node.run(&format!("modinfo -n {module}"))?;
        ensure!(file.contains("/updates/"), "{module} is {file}");
    }
    Ok(String::new())
}

/// A software RDMA device.
pub(super) struct Link {
    kind: &'static str,
    module: &'static str,
    iwarp: bool,
}

pub(super) const ROCE: Link = Link { kind: "rxe", module: "rdma_rxe", iwarp: false };
pub(super) const IWARP: Link = Link { kind: "siw", module: "siw", iwarp: true };

impl Link {
    /// Creates one on the node's network device. Removed when dropped.
    pub(super) fn add<'a>(&'a self, node: &'a Node) -> Result<Added<'a>> {
        let Self { kind, module, .. } = self;
        node.run(&format!("modprobe {module}; rdma link add {kind}0 type {kind} netdev eth0"))?;
        Ok(Added { node, name: format!("{kind}0") })
    }
}

/// A software RDMA device that was created.
pub(super) struct Added<'a> {
    node: &'a Node,
    name: String,
}

impl Drop for Added<'_> {
    fn drop(&mut self) {
        let _ = self.node.run(&format!("rdma link delete {}", self.name));
    }
}

/// ksmbd, the kernel's server. Stopped when dropped.
pub(super) struct Ksmbd<'a> {
    node: &'a Node,
}

impl<'a> Ksmbd<'a> {
    /// Serves this folder so that [`ksmbd_mount`] can mount it.
    pub(super) fn start(node: &'a Node, folder: &str) -> Result<Self> {
        let config = format!(
            "[global]\n interfaces = eth0\n smb3 encryption = disabled\n[s]\n path = {folder}\n read only = no\n"
        );
        node.put("/etc/ksmbd/ksmbd.conf", config.as_bytes(), 0o600)?;
        node.run(
            "modprobe ksmbd
             ksmbd.adduser -a -p reference-1 reference > /dev/null 2>&1 || ksmbd.adduser -u -p reference-1 reference
             ksmbd.mountd",
        )?;
        let ksmbd = Self { node };
        node.wait_until("ksmbd listens", Duration::from_secs(10), || {
            Ok(node.attempt(&["nc", "-z", node.address(), "445"], &[], Duration::from_secs(5))?.success())
        })?;
        Ok(ksmbd)
    }
}

impl Drop for Ksmbd<'_> {
    fn drop(&mut self) {
        let _ = self.node.run("ksmbd.control -s; rmmod ksmbd");
    }
}

/// The mount of a share that [`Ksmbd`] serves, with these options added.
pub(super) fn ksmbd_mount(server: &Node, at: &str, options: &[(&str, &str)]) -> Mount {
    let login = [("username", "reference"), ("password", "reference-1")];
    let options = login.iter().chain(options).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Mount { server: server.address().into(), share: "s".into(), at: at.into(), options: options.collect() }
}

/// A tmpfs on the node. Unmounted when dropped.
struct InMemory<'a>(&'a Node, &'static str);

impl<'a> InMemory<'a> {
    fn new(node: &'a Node, at: &'static str) -> Result<Self> {
        node.run(&format!("mkdir -p {at}; mountpoint -q {at} || mount -t tmpfs -o mode=777 tmpfs {at}"))?;
        Ok(Self(node, at))
    }
}

impl Drop for InMemory<'_> {
    fn drop(&mut self) {
        let _ = self.0.run(&format!("umount {}", self.1));
    }
}

/// ksmbd on the first client, because port 445 of the storage node is taken; cifs on the storage node.
fn carries(site: &Site, link: &Link) -> Result<String> {
    let (server, client) = (site.node(ONE), site.storage());
    let fabric = Fabric { site, links: vec![link.add(server)?, link.add(client)?] };
    for Added { node, name } in &fabric.links {
        let found: Found = node.call("inventory", &())?;
        let wanted = Device {
            name: name.clone(),
            driver: Some(link.module.to_owned()),
            iwarp: link.iwarp,
            software: true,
            state: "ACTIVE".to_owned(),
            netdevs: vec!["eth0".to_owned()],
        };
        ensure!(found.devices == [wanted] && found.oddities.is_empty(), "{}: {found:?}", node.name());
    }
    let folder = InMemory::new(server, "/srv/reference")?;
    let _ksmbd = Ksmbd::start(server, folder.1)?;
    let at = "/mnt/reference";
    client.call_within::<()>("mount", &ksmbd_mount(server, at, RDMA), Duration::from_secs(60))?;
    let _mounted = Unmount(client, at);
    let status = || statuses(client);
    ensure!(status()?.starts_with("CONNECTED"), "not over SMB Direct: {}", status()?);
    let shards = Shards { folder: at.into(), prefix: "f".into(), count: 2, bytes: 1_500_001, seed: 7 };
    let sums: Vec<Sum> = client.call("write-shards", &shards)?;
    let verify = |node: &Node, folder: &str| -> Result<u64> {
        node.call("verify-sums", &Sums { folder: folder.into(), sums: sums.clone() })
    };
    client.run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    verify(client, at).context("read over SMB Direct")?;
    verify(server, folder.1).context("on the server's disk")?;
    ensure!(status()?.starts_with("CONNECTED"), "not over SMB Direct any more: {}", status()?);
    let connected = client.run("rdma resource show cm_id | grep 'state CONNECT'")?;
    let to = format!("dst-addr {}:{}", server.address(), link.port());
    ensure!(connected.trim_end().ends_with(&to), "{connected}");

    client.call::<()>("unmount", &at)?;
    no_queue_pair_is_left(&[client, server])?;
    Ok(format!("port {}", link.port()))
}

/// Devices that our server may use: one is on its node.
pub(super) struct Fabric<'a> {
    site: &'a Site,
    links: Vec<Added<'a>>,
}

impl Drop for Fabric<'_> {
    fn drop(&mut self) {
        // The kernel does not remove a software device that a process has open.
        if let Err(error) = self.site.end_server() {
            say(format!("the server does not end: {error:#}"));
            return std::mem::take(&mut self.links).into_iter().for_each(std::mem::forget);
        }
        self.links.clear();
        if let Err(error) = self.site.start_server() {
            say(format!("the server does not start again: {error:#}"));
        }
    }
}

pub(super) const RDMA: &[(&str, &str)] = &[("vers", "3.1.1"), ("rdma", "")];

impl<'a> Fabric<'a> {
    /// Adds a device on each node while the server runs. When this returns, our server listens on its own device.
    pub(super) fn add(site: &'a Site, link: &'a Link, clients: &[&'a Node]) -> Result<Self> {
        let server = site.storage();
        let mut fabric = Self { site, links: Vec::new() };
        for node in [server].iter().chain(clients) {
            fabric.links.push(link.add(node)?);
        }
        server.wait_until("the server listens on the device", Duration::from_secs(20), || {
            let listening = server.run("rdma resource show cm_id | grep 'state LISTEN' || true")?;
            Ok(listening.contains(&format!(":{} ", link.port())))
        })?;
        Ok(fabric)
    }
}

impl Link {
    /// [MS-SMBD] 1.9: iWARP has a separate port, because its connections are TCP connections.
    pub(super) fn port(&self) -> u16 {
        if self.iwarp { 5445 } else { 445 }
    }

    pub(super) fn is_iwarp(&self) -> bool {
        self.iwarp
    }
}

/// The connection states that the client's kernel reports.
pub(super) fn statuses(client: &Node) -> Result<String> {
    client.run("sed -n 's/.*transport status: //p' /proc/fs/cifs/DebugData")
}

pub(super) fn is_over_smb_direct(site: &Site, client: &Node, link: &Link) -> Result<()> {
    let status = statuses(client)?;
    ensure!(status.starts_with("CONNECTED"), "not over SMB Direct: {status}");
    let connected = client.run("rdma resource show cm_id | grep 'state CONNECT'")?;
    let to = format!("dst-addr {}:{}", site.storage().address(), link.port());
    ensure!(connected.trim_end().ends_with(&to), "{connected}");
    Ok(())
}

/// A counter of our server.
pub(super) fn metric(site: &Site, name: &str) -> Result<u64> {
    let text = site.storage().run("printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' | nc -w 5 127.0.0.1 9445")?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = value.with_context(|| format!("no {name} in\n{text}"))?;
    Ok(value.trim().parse::<f64>()? as u64)
}

pub(super) fn no_queue_pair_is_left(nodes: &[&Node]) -> Result<()> {
    for node in nodes {
        node.wait_until("no queue pair is left", Duration::from_secs(20), || {
            Ok(node.run("rdma resource show qp | grep -c 'type RC' || true")? == "0")
        })?;
    }
    Ok(())
}

/// Our own server.
fn served(site: &Site, link: &Link) -> Result<String> {
    let (server, client) = (site.storage(), site.node(ONE));
    let _fabric = Fabric::add(site, link, &[client])?;
    let volume = site.volume(256 * MIB)?;
    let mounted = site.mount(client, &volume, RDMA)?;
    is_over_smb_direct(site, client, link)?;
    site.must_go(&volume, "rdma")?;
    let by_rdma =
        |direction: &str| metric(site, &format!("forebay_{direction}_bytes_total{{path=\"rdma-direct\"}}"));
    let (read, written) = (by_rdma("read")?, by_rdma("written")?);
    let folder = mounted.path();
    for block in ["4k", "64k", "1m", "4m"] {
        client
            .run_within(
                &format!(
                    "cd /tmp; fio --name=v{block} --directory={folder} --size=16m --rw=randwrite --bs={block} --iodepth=16 \
                     --ioengine=libaio --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=1 --output=/tmp/fio.out \
                     || {{ cat /tmp/fio.out >&2; exit 1; }}"
                ),
                Duration::from_secs(60),
            )
            .with_context(|| format!("blocks of {block}"))?;
    }
    exercise(client, &format!("{folder}/exercised"), EXERCISES, SEED, Duration::from_secs(120))?;
    is_over_smb_direct(site, client, link)?;
    let (read, written) = (by_rdma("read")? - read, by_rdma("written")? - written);
    // What fio wrote and read. The 4 KiB blocks are exactly at the client's threshold.
    ensure!(read >= 64 * MIB && written >= 64 * MIB, "{read} bytes read and {written} written by RDMA");
    let copied = metric(site, "forebay_rdma_copied_bytes_total")?;
    ensure!(copied == 0, "{copied} bytes were copied by a CPU");
    mounted.unmount()?;
    no_queue_pair_is_left(&[client, server])?;
    site.delete(&volume)?;
    Ok(format!("port {}, {} MiB by RDMA", link.port(), (read + written) / MIB))
}

const EXERCISES: u32 = 1000;
const SEED: u32 = 17;

/// A checkpoint in shards is written over RDMA, then read by another node over RDMA and TCP at the same time.
fn mixed(site: &Site) -> Result<String> {
    let (server, one, two) = (site.storage(), site.node(ONE), site.node(TWO));
    let _fabric = Fabric::add(site, &ROCE, &[one, two])?;
    let volume = site.volume(256 * MIB)?;
    let writer = site.mount(one, &volume, RDMA)?;
    let shards = Shards {
        folder: writer.path().into(),
        prefix: "checkpoint".into(),
        count: 4,
        bytes: 5_500_001,
        seed: 11,
    };
    let sums: Vec<Sum> = one.call("write-shards", &shards)?;
    let by_rdma = site.mount(two, &volume, RDMA)?;
    let by_tcp = site.mount(two, &volume, &[])?;
    let connections = two.run("grep -c '^[0-9]*) ConnectionId' /proc/fs/cifs/DebugData")?;
    ensure!(connections == "2" && statuses(two)?.lines().count() == 1, "{connections} connections");
    std::thread::scope(|scope| {
        let readers = [&by_rdma, &by_tcp].map(|at| {
            let sums = Sums { folder: at.path().into(), sums: sums.clone() };
            scope.spawn(move || two.call::<u64>("verify-sums", &sums))
        });
        readers.into_iter().try_for_each(|reader| reader.join().expect("no panic").map(drop))
    })?;
    for at in [by_tcp, by_rdma, writer] {
        at.unmount()?;
    }
    no_queue_pair_is_left(&[one, two, server])?;
    site.delete(&volume)?;
    Ok(String::new())
}

/// On both file systems, the server reads uncached data past its page cache, and cached data from the page cache.
fn past_the_page_cache(site: &Site) -> Result<String> {
    let (server, client) = (site.storage(), site.node(ONE));
    let _switched = site.switched("direct_reads", "true")?;
    let _fabric = Fabric::add(site, &ROCE, &[client])?;
    let by = |path: &str| metric(site, &format!("forebay_file_read_bytes_total{{path=\"{path}\"}}"));
    let forget = |node: &Node| node.run("sync; echo 3 > /proc/sys/vm/drop_caches");
    let mut direct_bytes = 0;
    for pool in ["default", "ext4"] {
        let volume = site.volume_in(pool, 64 * MIB)?;
        let mounted = site.mount(client, &volume, RDMA)?;
        is_over_smb_direct(site, client, &ROCE)?;
        let folder = mounted.path();
        let shards =
            Shards { folder: folder.into(), prefix: "f".into(), count: 4, bytes: 5_500_001, seed: 23 };
        let sums: Vec<Sum> = client.call("write-shards", &shards)?;
        let bytes: u64 = sums.iter().map(|sum| sum.bytes).sum();
        let verify = || -> Result<u64> {
            client.call("verify-sums", &Sums { folder: folder.into(), sums: sums.clone() })
        };
        // The client's own read-ahead decides the size of requests; most of them are large enough.
        forget(server)?;
        forget(client)?;
        let before = by("direct")?;
        verify().with_context(|| format!("past the page cache, on {pool}"))?;
        let came = by("direct")? - before;
        ensure!(came >= bytes / 2, "{came} of {bytes} bytes came past the page cache, on {pool}");
        // Reads of 1 MiB, and of the remainder at the end of a file.
        let read_all = format!(
            "for file in {folder}/*; do dd if=$file of=/dev/null bs=1M iflag=direct status=none || exit 1; done"
        );
        let read_all = || client.run_within(&read_all, Duration::from_secs(60));
        forget(server)?;
        let before = by("direct")?;
        read_all()?;
        let came = by("direct")? - before;
        ensure!(came >= bytes, "{came} of {bytes} bytes came past the page cache, on {pool}");
        direct_bytes += came;
        // Just written and therefore cached: served from the page cache.
        let sums: Vec<Sum> = client.call("write-shards", &Shards { seed: 29, ..shards })?;
        forget(client)?;
        let before = by("direct")?;
        read_all()?;
        let came = by("direct")? - before;
        ensure!(came == 0, "{came} of {bytes} cached bytes came past the page cache, on {pool}");
        client
            .call::<u64>("verify-sums", &Sums { folder: folder.into(), sums })
            .with_context(|| format!("just written, on {pool}"))?;
        exercise(client, &format!("{folder}/exercised"), EXERCISES, SEED, Duration::from_secs(120))?;
        mounted.unmount()?;
        site.delete(&volume)?;
    }
    let copied = metric(site, "forebay_rdma_copied_bytes_total")?;
    ensure!(copied == 0, "{copied} bytes were copied by a CPU");
    no_queue_pair_is_left(&[client, server])?;
    Ok(format!("{} MiB past the page cache", direct_bytes / MIB))
}

/// Mounts and unmounts. The server's RDMA resources must not grow.
fn remounted(site: &Site) -> Result<String> {
    let (server, client) = (site.storage(), site.node(ONE));
    let _fabric = Fabric::add(site, &ROCE, &[client])?;
    let volume = site.volume(64 * MIB)?;
    let count = |kind: &str| -> Result<usize> {
        Ok(server.run(&format!("rdma resource show {kind} | wc -l"))?.parse()?)
    };
    let resources = || -> Result<Vec<usize>> {
        no_queue_pair_is_left(&[client, server])?;
        let mut found = ["qp", "cq", "pd", "cm_id"].map(count).into_iter().collect::<Result<Vec<_>>>()?;
        found.push(server.run("ls /proc/$(pidof forebay-server)/fd | wc -l")?.parse()?);
        Ok(found)
    };
    let mut first = Vec::new();
    let mut regions = 0;
    for round in 0..REMOUNTS {
        let mounted = site.mount(client, &volume, RDMA)?;
        let name = mounted.join("f");
        client.run(&format!("echo {round} > {name}; test $(cat {name}) = {round}"))?;
        mounted.unmount()?;
        // By then, resources that belong to the device and not to a connection exist.
        if round == 2 {
            first = resources()?;
            regions = count("mr")?;
        }
    }
    let last = resources()?;
    ensure!(
        first == last,
        "queue pairs, completion queues, domains, identifiers, descriptors: {first:?}, then {last:?}"
    );
    // Buffers stay pooled: up to the maximum that was ever in use at the same time.
    let now = count("mr")?;
    ensure!(now < regions + 8, "{regions} regions after 3 mounts, {now} after {REMOUNTS}");
    site.delete(&volume)?;
    Ok(format!("{REMOUNTS} times; {now} pooled buffers"))
}

const REMOUNTS: usize = 50;

pub(super) struct Unmount<'a>(pub(super) &'a Node, pub(super) &'static str);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = self.0.attempt(&["umount", self.1], &[], Duration::from_secs(20));
    }
}
