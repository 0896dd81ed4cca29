//! Every dialect and protection that the kernel's client can ask for.

use anyhow::{Result, ensure};

use super::{MIB, ONE, Scenario, TWO, scenario};
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::site::Site;

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
    let line = node.run(&format!("grep ' {} ' /proc/mounts", mounted.path()))?;
    let shown: Vec<&str> = line.split([' ', ',']).collect();
    ensure!(shown.contains(&format!("vers={version}").as_str()), "mounted with other options: {line}");
    if protection != "plain" {
        ensure!(shown.contains(&protection), "mounted without {protection}: {line}");
    }
    let folder = mounted.path().into();
    let shards = Shards { folder, prefix: "f".into(), count: 2, bytes: 1_500_001, seed: 7 };
    let sums: Vec<Sum> = node.call("write-shards", &shards)?;
    let verify = |node: &crate::lab::Node, folder: &str| -> Result<u64> {
        node.call("verify-sums", &Sums { folder: folder.into(), sums: sums.clone() })
    };
    // From the server, not from what the writer's page cache kept.
    mounted.node().run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    verify(node, mounted.path())?;
    let other = site.mount(site.node(TWO), &volume, &options)?;
    verify(site.node(TWO), other.path())?;
    other.unmount()?;
    mounted.unmount()?;
    site.delete(&volume)?;
    Ok(String::new())
}
