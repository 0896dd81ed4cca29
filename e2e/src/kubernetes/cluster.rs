//! A whole cluster: the control plane on this machine, with guests as nodes.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::control_plane::{ControlPlane, Options};
use super::kubectl::Kubectl;
use super::node::{self, Role};
use super::room::{self, Room};
use super::tools::{self, Tools};
use crate::cache::Cache;
use crate::images::{Images, Versions, node as node_image, preloaded};
use crate::lab::{Lab, NodeSpec};
use crate::limits::{
    KUBERNETES_NODE_MEMORY_MIB, KUBERNETES_NODE_PROCESSORS, NODE_READY_DEADLINE, SCRATCH_BYTES,
};
use crate::progress::{say, seconds};
use crate::rundir::RunDir;
use crate::supervise;

/// The API server's port.
pub(super) const PORT: u16 = 6443;

/// The specification of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlan {
    /// Name.
    pub name: String,
    /// Whether it has an RDMA-capable NIC.
    pub rdma: bool,
    /// Whether its kernel's SMB client supports SMB Direct.
    pub smb_direct: bool,
    /// Whether it has space for a pool.
    pub pool: bool,
    /// `key=value` labels.
    pub labels: Vec<String>,
}

/// Parses `storage=1,compute=2`: nodes `storage1`, `compute1`, `compute2`. Storage nodes have an RDMA NIC and the label
/// `forebay.io/storage=true`.
pub fn plan(text: &str) -> Result<Vec<NodePlan>> {
    let mut nodes = Vec::new();
    for part in text.split(',') {
        let (kind, count) = part.split_once('=').with_context(|| format!("{part:?} is not KIND=COUNT"))?;
        let count: usize = count.parse().with_context(|| format!("{count:?} is not a number of nodes"))?;
        let storage = match kind {
            "storage" => true,
            "compute" => false,
            _ => bail!("nodes are storage or compute, not {kind:?}"),
        };
        let labels = if storage { vec!["forebay.io/storage=true".to_owned()] } else { Vec::new() };
        nodes.extend((1..=count).map(|number| NodePlan {
            name: format!("{kind}{number}"),
            rdma: storage,
            smb_direct: false,
            pool: storage,
            labels: labels.clone(),
        }));
    }
    if nodes.is_empty() || nodes.len() > 8 {
        bail!("a cluster has 1 to 8 nodes");
    }
    Ok(nodes)
}

/// A running cluster. Dropping it stops everything.
#[derive(Debug)]
pub struct Cluster {
    // Guests before the control plane: they would log errors when it ends.
    lab: Lab,
    plane: ControlPlane,
    tools: Tools,
    kubeconfig: PathBuf,
    roles: Vec<Role>,
    _rundir: RunDir,
}

/// Same as [`prepare`], plus kernels with SMB Direct.
pub fn prepare_with_smb_direct() -> Result<()> {
    Images::prepare_with_smb_direct(&Cache::open()?, false)?;
    prepare()
}

/// Builds everything that needs the machine's network.
pub fn prepare() -> Result<()> {
    let cache = Cache::open()?;
    Images::prepare(&cache, false)?;
    let tools = Tools::prepare(&cache, &[tools::API, tools::CONTROL, tools::CLIENT])?;
    drop(tools);
    node_disk(&cache).map(drop)
}

fn node_disk(cache: &Cache) -> Result<crate::cache::Artefact> {
    let tools = Tools::prepare(cache, &[tools::NODE, tools::SIDECARS])?;
    node_image::get(cache, &Versions::resolve(cache, false)?, &tools)
}

impl Cluster {
    /// Starts the cluster in a room and returns when all nodes are Ready. `archives` are images for every node.
    ///
    /// The calling thread must live as long as the cluster.
    pub fn start(name: &str, room: &Room, plan: &[NodePlan], archives: &[PathBuf]) -> Result<Self> {
        let cache = Cache::open()?;
        let disk = node_disk(&cache)?;
        let tools = Tools::prepare(&cache, &[tools::API, tools::CONTROL, tools::CLIENT])?;
        let archives = archives
            .iter()
            .map(|archive| archive.canonicalize().with_context(|| format!("the image {}", archive.display())))
            .collect::<Result<Vec<_>>>()?;
        let preloaded = preloaded::get(&cache, &disk, &archives, SCRATCH_BYTES)?;
        let mut disks = vec![disk.file("node.erofs")];
        let archives = if preloaded.is_some() { Vec::new() } else { archives };
        disks.extend(archives.iter().cloned());
        let specs: Vec<NodeSpec> = plan
            .iter()
            .map(|node| NodeSpec {
                name: node.name.clone(),
                memory_mib: KUBERNETES_NODE_MEMORY_MIB,
                processors: KUBERNETES_NODE_PROCESSORS,
                scratch_bytes: SCRATCH_BYTES,
                scratch_template: preloaded.as_ref().map(|entry| entry.file("scratch.ext4")),
                volatile_cache: true,
                disks: disks.clone(),
                smb_direct: node.smb_direct,
            })
            .collect();
        let rundir = RunDir::create(&format!("{name}-control"))?;
        let options = Options { address: room::ADDRESS, port: PORT, controllers: true, scheduler: true };
        let started = Instant::now();
        // In parallel to the boot of the guests. A long-lived thread starts the control plane's programs.
        let (plane, lab) = std::thread::scope(|scope| {
            let plane = scope.spawn(|| {
                let plane = ControlPlane::start(tools.clone(), rundir.path(), &options);
                if plane.is_ok() {
                    say(format!("the control plane is ready after {}", seconds(started.elapsed())));
                }
                plane
            });
            let lab = Lab::start(name, &specs);
            (plane.join(), lab)
        });
        let plane = plane.map_err(|_| anyhow::anyhow!("the control plane's thread panicked"))??;
        let lab = lab?;
        room.plug(&lab.folder().context("the lab runs in this process")?.join("lan"))?;
        room.open_relay(PORT)?;
        let kubeconfig = plane.pki().kubeconfig_file(
            "outside.kubeconfig",
            &format!("https://127.0.0.1:{}", room.relay_port()),
            "admin",
            Some("system:masters"),
        )?;
        let roles: Vec<Role> = plan
            .iter()
            .enumerate()
            .map(|(index, node)| Role {
                number: index as u8 + 1,
                rdma: node.rdma,
                pool: node.pool,
                archives: archives.len(),
                labels: node.labels.clone(),
            })
            .collect();
        let cluster = Self { lab, plane, tools, kubeconfig, roles, _rundir: rundir };
        for (plan, role) in plan.iter().zip(&cluster.roles) {
            room.route(&node::pod_network(role.number), cluster.lab.node(&plan.name).address())?;
        }
        supervise::open_doors(&cluster.lab)?;
        cluster.start_nodes(&plan.iter().map(|node| node.name.as_str()).collect::<Vec<_>>())?;
        Ok(cluster)
    }

    /// Starts the node components on these guests in parallel, and waits until they are Ready.
    fn start_nodes(&self, names: &[&str]) -> Result<()> {
        let started = Instant::now();
        std::thread::scope(|scope| {
            let starts: Vec<_> = names.iter().map(|name| scope.spawn(|| self.start_node(name))).collect();
            starts.into_iter().try_for_each(|start| {
                start.join().map_err(|_| anyhow::anyhow!("a node's thread panicked"))?
            })
        })?;
        for name in names {
            self.wait_ready(name)?;
            say(format!("node {name} is Ready after {}", seconds(started.elapsed())));
        }
        Ok(())
    }

    fn start_node(&self, name: &str) -> Result<()> {
        let peers: Vec<(u8, String)> =
            self.roles.iter().map(|role| (role.number, format!("192.168.77.{}", role.number))).collect();
        let node = self.lab.node(name);
        let role = self.roles.iter().find(|role| format!("192.168.77.{}", role.number) == node.address());
        node::start(node, &self.plane, role.context("every node has a role")?, &peers)
            .with_context(|| format!("start node {name}"))
    }

    /// Waits until a node is Ready.
    pub fn wait_ready(&self, name: &str) -> Result<()> {
        let kubectl = self.kubectl();
        kubectl.wait_until(
            &format!("node {name} is Ready"),
            NODE_READY_DEADLINE,
            || {
                self.lab.check()?;
                let path = "-o=jsonpath={.status.conditions[?(@.type==\"Ready\")].status}";
                Ok(kubectl.run(&["get", "node", name, path])? == "True")
            },
            || {
                let described = kubectl.run(&["describe", "node", name]).unwrap_or_default();
                format!("{described}\nkubelet:\n{}", self.lab.node(name).service_log("kubelet"))
            },
        )
    }

    /// Cuts a node's power, boots it again, and waits until it is Ready.
    pub fn reboot(&self, name: &str) -> Result<()> {
        self.lab.power_off(name)?;
        self.lab.power_on(name)?;
        self.start_again(name)
    }

    /// Starts the node components after a boot, and waits until the node is Ready.
    pub fn start_again(&self, name: &str) -> Result<()> {
        self.start_node(name)?;
        self.wait_ready(name)
    }

    /// The guests.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// A client with all permissions, inside the lab's network.
    pub fn kubectl(&self) -> Kubectl {
        self.plane.kubectl()
    }

    /// A kubeconfig for the machine's own user, outside of the lab's network.
    pub fn outside_kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Its programs.
    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// Fails if a guest or a part of the control plane has died.
    pub fn check(&mut self) -> Result<()> {
        self.lab.check()?;
        self.plane.check()
    }
}

/// Time limit from a pod's creation to Ready, on emulated nodes that share two cores.
pub const POD_DEADLINE: Duration = Duration::from_secs(240);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_assigns_node_names_and_rdma() {
        let nodes = plan("storage=1,compute=2").expect("a plan");
        let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
        assert_eq!(names, ["storage1", "compute1", "compute2"]);
        assert!(nodes[0].rdma && !nodes[1].rdma);
        for bad in ["", "storage", "storage=x", "gpu=1", "storage=0", "compute=9"] {
            assert!(plan(bad).is_err(), "{bad:?}");
        }
    }
}
