//! `forebay-target` on the target's node: its configuration file, its lifecycle, and what it has created in the kernel.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::MIB;
use super::nvmeof::{FILE, Fabric, NQN, RDMA, TCP, UUID, port};
use crate::guest::calls::nvmet::{AllowedHost, Port};
use crate::images::product;
use crate::lab::Node;

pub(super) const PROGRAM: &str = "forebay-target";
pub(super) const CONFIG: &str = "/etc/forebay/target.toml";
pub(super) const NVMET: &str = "/sys/kernel/config/nvmet";
/// A second subsystem, and its file.
pub(super) const OTHER_NQN: &str = "nqn.2026-01.io.forebay:lab-other";
pub(super) const OTHER_FILE: &str = "/srv/fabric/other";
pub(super) const METRICS: &str = "127.0.0.1:9447";

/// The content of the file.
#[derive(Clone)]
pub(super) struct Says {
    pub(super) ports: Vec<Port>,
    pub(super) hosts: Vec<String>,
    /// Backing storage of the first subsystem's namespaces. The first namespace has the lab's UUID.
    pub(super) namespaces: Vec<String>,
    /// Whether there is a second subsystem.
    pub(super) other: bool,
}

pub(super) fn file(path: &str, mib: u64) -> String {
    format!("file = \"{path}\"\nsize = \"{mib}MiB\"")
}

impl Says {
    pub(super) fn text(&self) -> String {
        let mut text = format!("[target]\nname = \"lab\"\n[metrics]\nlisten = \"{METRICS}\"\n");
        for Port { transport, address, service, .. } in &self.ports {
            text += &format!(
                "[[port]]\ntransport = \"{transport}\"\naddress = \"{address}\"\nservice = {service}\n"
            );
        }
        text += &format!("[[subsystem]]\nnqn = \"{NQN}\"\nhosts = {:?}\n", self.hosts);
        for (id, backing) in (1..).zip(&self.namespaces) {
            let uuid = format!("{}{id}", &UUID[..UUID.len() - 1]);
            text += &format!("[[subsystem.namespace]]\nid = {id}\nuuid = \"{uuid}\"\n{backing}\n");
        }
        if self.other {
            text += &format!(
                "[[subsystem]]\nnqn = \"{OTHER_NQN}\"\nhosts = {:?}\n[[subsystem.namespace]]\nid = 1\n\
                 uuid = \"2c9f2c59-6c0c-4a53-9a52-5f3b3b7c2a10\"\n{}\n",
                self.hosts,
                file(OTHER_FILE, 16)
            );
        }
        text
    }
}

/// The program on the target's node. Dropping this kills it.
pub(super) struct Target<'a> {
    pub(super) node: &'a Node,
}

impl<'a> Target<'a> {
    /// On a node that offers nothing and has no configuration file.
    pub(super) fn new(fabric: &Fabric<'a>) -> Result<Self> {
        ensure!(product::has(PROGRAM), "{PROGRAM} is not built beside forebay-lab");
        let node = fabric.target();
        node.run(&format!("rm -f {FILE} {OTHER_FILE}"))?;
        Ok(Self { node })
    }

    pub(super) fn says(&self, says: &Says) -> Result<()> {
        self.node.put(CONFIG, says.text().as_bytes(), 0o600)
    }

    pub(super) fn start(&self) -> Result<()> {
        self.node.start_service(PROGRAM, &[PROGRAM])
    }

    pub(super) fn stop(&self) -> Result<()> {
        ensure!(self.node.signal_service(PROGRAM, "TERM")?, "it was not running: {}", self.log());
        Ok(())
    }

    pub(super) fn kill(&self) -> Result<()> {
        ensure!(self.node.signal_service(PROGRAM, "KILL")?, "it was not running: {}", self.log());
        Ok(())
    }

    pub(super) fn log(&self) -> String {
        self.node.service_log(PROGRAM)
    }

    /// Runs one of its commands. Returns exit status and output.
    pub(super) fn ask(&self, command: &str) -> Result<(Option<i32>, String)> {
        let output = self.node.attempt(&[PROGRAM, command], &[], Duration::from_secs(30))?;
        Ok((output.exit.code, format!("{}{}", output.text(), output.complaint())))
    }

    /// Waits until the kernel's configuration matches the file.
    pub(super) fn wait(&self) -> Result<()> {
        let mut said = String::new();
        self.node
            .wait_until("the target is as the file says", Duration::from_secs(20), || {
                let (code, text) = self.ask("status")?;
                said = text;
                Ok(code == Some(0))
            })
            .with_context(|| format!("status: {said}\nlog: {}", self.log()))
    }

    pub(super) fn remove(&self) -> Result<()> {
        let (code, said) = self.ask("remove")?;
        ensure!(code == Some(0), "remove: {code:?}: {said}");
        Ok(())
    }

    pub(super) fn is_bare(&self) -> Result<()> {
        let left = self.tree()?;
        ensure!(left.is_empty(), "left in the kernel: {left}");
        Ok(())
    }

    /// The whole configuration in the kernel's target, from any program. Port numbers are left out: the target chooses them.
    pub(super) fn tree(&self) -> Result<String> {
        self.node.run(&format!(
            "cd {NVMET}; {{ find subsystems ports hosts -mindepth 1 \\( -type l -o -type d \\); \
             grep -s . subsystems/*/namespaces/*/device_path subsystems/*/namespaces/*/device_uuid \
             subsystems/*/namespaces/*/enable subsystems/*/attr_model subsystems/*/attr_serial ports/*/addr_*; }} | \
             sed -E 's:^ports/[0-9]+:ports/N:' | sort || true"
        ))
    }

    pub(super) fn http(&self, path: &str) -> Result<String> {
        let (address, port) = METRICS.split_once(':').context("an address with a port")?;
        self.node.run(&format!("printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' | nc -w 5 {address} {port}"))
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        let _ = self.node.signal_service(PROGRAM, "KILL");
        let _ = self.ask("remove");
    }
}

/// The port that hosts of this transport connect to.
pub(super) fn at(fabric: &Fabric<'_>, transport: &str) -> Vec<Port> {
    let service = if transport == "rdma" { RDMA } else { TCP };
    vec![port(1, transport, fabric.target().address(), service)]
}

/// Makes the program offer the lab's file, which must be blank, and end. The offer persists.
pub(super) fn offer(
    fabric: &Fabric<'_>,
    hosts: Vec<AllowedHost>,
    ports: Vec<Port>,
    bytes: u64,
) -> Result<()> {
    ensure!(hosts.iter().all(|host| host.key.is_none()), "the program knows no keys");
    let target = Target { node: fabric.target() };
    let hosts = hosts.into_iter().map(|host| host.nqn).collect();
    target.says(&Says { ports, hosts, namespaces: vec![file(FILE, bytes / MIB)], other: false })?;
    target.start()?;
    target.wait()?;
    target.stop()?;
    // The fabric removes everything.
    std::mem::forget(target);
    Ok(())
}
