//! Nodes whose kernel has SMB Direct: that it is there and told, and that it carries files, shown with ksmbd, the
//! kernel's own server.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{MIB, ONE, Scenario, ours, scenario};
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::guest::calls::inventory::{Device, Found};
use crate::guest::calls::mounting::Mount;
use crate::lab::Node;
use crate::site::Site;

pub(super) fn scenarios() -> Vec<Scenario> {
    let on_fabric = |scenario: Scenario| Scenario { smb_direct: true, ..scenario };
    vec![
        scenario("kernel without SMB Direct: the inventory says so", without),
        on_fabric(scenario("kernel with SMB Direct: the inventory says so", with)),
        on_fabric(scenario("ksmbd and cifs over soft-RoCE", |site| {
            carries(site, &Link { kind: "rxe", module: "rdma_rxe", iwarp: false })
        })),
        on_fabric(scenario("ksmbd and cifs over software iWARP", |site| {
            carries(site, &Link { kind: "siw", module: "siw", iwarp: true })
        })),
        on_fabric(ours("SMB Direct over soft-RoCE", |site| {
            served(site, &Link { kind: "rxe", module: "rdma_rxe", iwarp: false })
        })),
        on_fabric(ours("SMB Direct over software iWARP", |site| {
            served(site, &Link { kind: "siw", module: "siw", iwarp: true })
        })),
    ]
}

/// What the inventory says before cifs is loaded, and after.
fn told(node: &Node) -> Result<[Found; 2]> {
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
    for found in told(node)? {
        ensure!(found.cifs_smb_direct == Some(false) && found.oddities.is_empty(), "{found:?}");
    }
    let features = features(node)?;
    ensure!(!features.contains("SMB_DIRECT"), "{features}");
    Ok(String::new())
}

fn with(site: &Site) -> Result<String> {
    let node = site.node(ONE);
    for found in told(node)? {
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
struct Link {
    kind: &'static str,
    module: &'static str,
    iwarp: bool,
}

impl Link {
    /// Makes one on the node's network device. Removed when dropped.
    fn add<'a>(&'a self, node: &'a Node) -> Result<Added<'a>> {
        let Self { kind, module, .. } = self;
        node.run(&format!("modprobe {module}; rdma link add {kind}0 type {kind} netdev eth0"))?;
        Ok(Added { node, name: format!("{kind}0") })
    }
}

struct Added<'a> {
    node: &'a Node,
    name: String,
}

impl Drop for Added<'_> {
    fn drop(&mut self) {
        let _ = self.node.run(&format!("rdma link delete {}", self.name));
    }
}

const CONFIG: &str = "[global]\n interfaces = eth0\n smb3 encryption = disabled\n[s]\n path = /srv/reference\n read only = no\n";

/// The kernel's server; ended when dropped.
struct Ksmbd<'a>(&'a Node);

impl<'a> Ksmbd<'a> {
    fn start(node: &'a Node) -> Result<Self> {
        node.put("/etc/ksmbd/ksmbd.conf", CONFIG.as_bytes(), 0o600)?;
        node.run(
            "mkdir -p /srv/reference; mountpoint -q /srv/reference || mount -t tmpfs -o mode=777 tmpfs /srv/reference
             modprobe ksmbd
             ksmbd.adduser -a -p reference-1 reference > /dev/null 2>&1 || ksmbd.adduser -u -p reference-1 reference
             ksmbd.mountd",
        )?;
        let ksmbd = Self(node);
        node.wait_until("ksmbd listens", Duration::from_secs(10), || {
            Ok(node.attempt(&["nc", "-z", node.address(), "445"], &[], Duration::from_secs(5))?.success())
        })?;
        Ok(ksmbd)
    }
}

impl Drop for Ksmbd<'_> {
    fn drop(&mut self) {
        let _ = self.0.run("ksmbd.control -s; umount /srv/reference; rmmod ksmbd");
    }
}

/// ksmbd on the first client, because port 445 of the storage node is taken; cifs on the storage node.
fn carries(site: &Site, link: &Link) -> Result<String> {
    let (server, client) = (site.node(ONE), site.storage());
    let links = [link.add(server)?, link.add(client)?];
    for Added { node, name } in &links {
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
    let _ksmbd = Ksmbd::start(server)?;
    let at = "/mnt/reference";
    let options = [("username", "reference"), ("password", "reference-1"), ("vers", "3.1.1"), ("rdma", "")];
    let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let mount = Mount { server: server.address().into(), share: "s".into(), at: at.into(), options };
    client.call_within::<()>("mount", &mount, Duration::from_secs(60))?;
    let _mounted = Unmount(client, at);
    let status = || client.run("sed -n 's/.*transport status: //p' /proc/fs/cifs/DebugData");
    ensure!(status()?.starts_with("CONNECTED"), "not over SMB Direct: {}", status()?);
    let shards = Shards { folder: at.into(), prefix: "f".into(), count: 2, bytes: 1_500_001, seed: 7 };
    let sums: Vec<Sum> = client.call("write-shards", &shards)?;
    let verify = |node: &Node, folder: &str| -> Result<u64> {
        node.call("verify-sums", &Sums { folder: folder.into(), sums: sums.clone() })
    };
    client.run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    verify(client, at).context("read over SMB Direct")?;
    verify(server, "/srv/reference").context("on the server's disk")?;
    ensure!(status()?.starts_with("CONNECTED"), "not over SMB Direct any more: {}", status()?);
    // [MS-SMBD] 1.9: iWARP has a port of its own, because its connections are TCP's.
    let port = if link.iwarp { "5445" } else { "445" };
    let connected = client.run("rdma resource show cm_id | grep 'state CONNECT'")?;
    ensure!(connected.trim_end().ends_with(&format!("dst-addr {}:{port}", server.address())), "{connected}");

    client.call::<()>("unmount", &at)?;
    for node in [client, server] {
        node.wait_until("no queue pair is left", Duration::from_secs(20), || {
            Ok(node.run("rdma resource show qp | grep -c 'type RC' || true")? == "0")
        })?;
    }
    Ok(format!("port {port}"))
}

/// Our own server, to which the devices come while it runs.
fn served(site: &Site, link: &Link) -> Result<String> {
    let (server, client) = (site.storage(), site.node(ONE));
    let _links = [link.add(server)?, link.add(client)?];
    // [MS-SMBD] 1.9
    let port = if link.iwarp { "5445" } else { "445" };
    server.wait_until("the server listens on the device", Duration::from_secs(20), || {
        let listening = server.run("rdma resource show cm_id | grep 'state LISTEN' || true")?;
        Ok(listening.contains(&format!(":{port} ")))
    })?;
    let volume = site.volume(256 * MIB)?;
    let mounted = site.mount(client, &volume, &[("vers", "3.1.1"), ("rdma", "")])?;
    let status = || client.run("sed -n 's/.*transport status: //p' /proc/fs/cifs/DebugData");
    ensure!(status()?.starts_with("CONNECTED"), "not over SMB Direct: {}", status()?);
    let connected = client.run("rdma resource show cm_id | grep 'state CONNECT'")?;
    ensure!(connected.trim_end().ends_with(&format!("dst-addr {}:{port}", server.address())), "{connected}");
    let shards =
        Shards { folder: mounted.path().into(), prefix: "f".into(), count: 2, bytes: 5_500_001, seed: 7 };
    let sums: Vec<Sum> = client.call("write-shards", &shards)?;
    client.run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    client
        .call::<u64>("verify-sums", &Sums { folder: mounted.path().into(), sums })
        .context("read over SMB Direct")?;
    ensure!(status()?.starts_with("CONNECTED"), "not over SMB Direct any more: {}", status()?);
    mounted.unmount()?;
    for node in [client, server] {
        node.wait_until("no queue pair is left", Duration::from_secs(20), || {
            Ok(node.run("rdma resource show qp | grep -c 'type RC' || true")? == "0")
        })?;
    }
    site.delete(&volume)?;
    Ok(format!("port {port}"))
}

struct Unmount<'a>(&'a Node, &'static str);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = self.0.attempt(&["umount", self.1], &[], Duration::from_secs(20));
    }
}
