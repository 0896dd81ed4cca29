//! Every dialect and protection that the kernel's client can request.

use anyhow::{Result, bail, ensure};

use super::{MIB, ONE, Scenario, TWO, scenario};
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::site::{Kind, Site};

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut out = Vec::new();
    for version in ["3.1.1", "3.0.2", "3.0", "2.1"] {
        for protection in ["plain", "sign", "seal"] {
            // SMB 2.1 has no encryption.
            if (version, protection) != ("2.1", "seal") {
                let name = format!("mount vers={version} {protection}");
                out.push(scenario(name, move |site| mount(site, version, protection)));
            }
        }
    }
    out
}

fn mount(site: &Site, version: &str, protection: &str) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let mut options = vec![("vers", version)];
    if protection != "plain" {
        options.push((protection, ""));
    }
    let node = site.node(ONE);
    let mounted = site.mount(node, &volume, &options)?;
    // The kernel's own report about the connection: /proc/mounts shows only a part of what was requested.
    let account = node.run("cat /proc/fs/cifs/DebugData")?;
    let number = match version {
        "3.1.1" => "0x311",
        "3.0.2" => "0x302",
        "3.0" => "0x300",
        _ => "0x210",
    };
    let connection = account.lines().find(|line| line.contains(&format!("Dialect {number}")));
    let Some(connection) = connection else { bail!("no connection of dialect {number}:\n{account}") };
    ensure!(protection != "sign" || connection.contains(" signed"), "not signed: {connection}");
    ensure!(protection != "seal" || account.contains(" encrypted"), "not encrypted:\n{account}");
    if site.kind() == Kind::Forebay {
        let transport = match protection {
            "sign" => "tcp-signed",
            "seal" => "tcp-sealed",
            _ => "tcp",
        };
        site.must_go(&volume, transport)?;
    }
    let folder = mounted.path().into();
    let shards = Shards { folder, prefix: "f".into(), count: 2, bytes: 1_500_001, seed: 7 };
    let sums: Vec<Sum> = node.call("write-shards", &shards)?;
    let verify = |node: &crate::lab::Node, folder: &str| -> Result<u64> {
        node.call("verify-sums", &Sums { folder: folder.into(), sums: sums.clone() })
    };
    // From the server, not from the writer's page cache.
    mounted.node().run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    verify(node, mounted.path())?;
    let other = site.mount(site.node(TWO), &volume, &options)?;
    verify(site.node(TWO), other.path())?;
    other.unmount()?;
    mounted.unmount()?;
    site.delete(&volume)?;
    Ok(String::new())
}
