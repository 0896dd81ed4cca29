//! `status`: clusters, instances, nodes and volumes at a glance.

use std::collections::BTreeMap;

use anyhow::anyhow;
use forebay_api::cluster::{InstancePhase, InstanceStatus};
use forebay_api::fabric::PoolStatus;
use forebay_api::node::Fact;
use forebay_api::{DRIVER, StorageCluster, StorageNode};
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;

use crate::limits::VOLUMES_SHOWN;
use crate::paint::{Paint, Tone};
use crate::quantity::{age, bytes};
use crate::snapshot::Snapshot;
use crate::table::{Cell, Table};

/// The data to show.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct View {
    /// Namespace that was read; absent if all were.
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    ready: bool,
    clusters: Vec<Cluster>,
    instances: Vec<Instance>,
    /// Pools on fabrics.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pools: Vec<Pool>,
    nodes: Vec<Node>,
    volumes: Vec<Volume>,
    /// What is not ready, and why.
    not_ready: Vec<Complaint>,
    /// What could not be read.
    unread: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Cluster {
    name: String,
    namespace: String,
    ready: bool,
    reason: String,
    message: String,
    paused: bool,
    instances: String,
    transport: String,
    volumes: u32,
    capacity: String,
    image: String,
    age: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Instance {
    name: String,
    cluster: String,
    namespace: String,
    phase: String,
    node: String,
    address: String,
    transports: Vec<String>,
    volumes: u32,
    sessions: u32,
    free_bytes: i64,
    capacity_bytes: i64,
    version: String,
    epoch: u64,
    message: String,
}

/// A pool that another node can take over.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Pool {
    instance: String,
    namespace: String,
    epoch: u64,
    /// How the instance moved to its node; empty if it has always been there.
    came: String,
    #[serde(flatten)]
    reported: PoolStatus,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    name: String,
    ready: bool,
    rdma: String,
    nvme: u32,
    smb_direct: String,
    /// Whether the driver is registered with the kubelet; absent if that could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    registered: Option<bool>,
    unschedulable: bool,
    kernel: String,
    agent_version: String,
    message: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Volume {
    name: String,
    claim: String,
    instance: String,
    capacity: String,
    phase: String,
    storage_class: String,
    age: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Complaint {
    what: String,
    why: String,
}

impl View {
    /// Builds the view. Fails without StorageClusters, because there is nothing to show then.
    pub(crate) fn new(snapshot: &Snapshot, now: Timestamp) -> anyhow::Result<Self> {
        let clusters = match (&snapshot.served, &snapshot.clusters) {
            (Ok(None), _) => {
                return Err(anyhow!(
                    "Forebay is not installed here: the API server does not serve storage.forebay.io (docs/get-started/install.md)"
                ));
            }
            (_, Err(error)) => return Err(anyhow!("read StorageClusters: {error}")),
            (_, Ok(clusters)) => clusters,
        };
        let mut unread = Vec::new();
        let storage_nodes = or_none(&snapshot.storage_nodes, "StorageNodes", &mut unread);
        let volumes = or_none(&snapshot.volumes, "PersistentVolumes", &mut unread);
        let registered = snapshot.csi_nodes.as_ref().map(|nodes| {
            let has = |node: &&k8s_openapi::api::storage::v1::CSINode| {
                node.spec.drivers.iter().any(|driver| driver.name == DRIVER)
            };
            nodes.iter().filter(has).map(ResourceExt::name_any).collect::<Vec<String>>()
        });
        if let Err(error) = &registered {
            unread.push(format!("CSINodes: {error}"));
        }
        let mut view = Self {
            namespace: snapshot.namespace.clone(),
            ready: false,
            clusters: clusters.iter().map(|c| cluster(c, now)).collect(),
            instances: clusters.iter().flat_map(instances).collect(),
            pools: clusters.iter().flat_map(pools).collect(),
            nodes: storage_nodes
                .iter()
                .map(|n| node(n, registered.as_ref().ok().map(|names| names.contains(&n.name_any()))))
                .collect(),
            volumes: volumes.iter().map(|v| volume(v, now)).collect(),
            not_ready: Vec::new(),
            unread,
        };
        view.not_ready = view.complaints();
        view.ready = view.not_ready.is_empty();
        Ok(view)
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready
    }

    fn complaints(&self) -> Vec<Complaint> {
        let complaint = |what: String, why: String| Complaint { what, why };
        let mut complaints = Vec::new();
        if self.clusters.is_empty() {
            let place = self.namespace.as_ref().map_or_else(String::new, |n| format!(" in namespace {n}"));
            complaints.push(complaint(
                "storagecluster".into(),
                format!(
                    "there is none{place}: apply one (docs/get-started/first-volume.md), or search elsewhere with -n or -A"
                ),
            ));
        }
        for cluster in self.clusters.iter().filter(|c| !c.ready) {
            let why = match (cluster.reason.as_str(), cluster.message.as_str()) {
                ("", "") => "the operator has not reconciled it yet: is it running?".to_owned(),
                (reason, message) => format!("{reason}: {message}"),
            };
            complaints.push(complaint(format!("storagecluster {}", cluster.name), why));
        }
        for instance in self.instances.iter().filter(|i| i.phase != "Ready") {
            let why = match instance.message.as_str() {
                "" => instance.phase.clone(),
                message => format!("{}: {message}", instance.phase),
            };
            complaints.push(complaint(format!("instance {}", instance.name), why));
        }
        for pool in self.pools.iter().filter(|p| !p.reported.health.is_empty()) {
            let what = format!("pool {} of {}", pool.reported.name, pool.instance);
            complaints.push(complaint(what, pool.reported.health.clone()));
        }
        for node in &self.nodes {
            if !node.ready {
                complaints.push(complaint(format!("node {}", node.name), node.message.clone()));
            } else if node.registered == Some(false) {
                let why = "its kubelet has not registered the driver: pods with volumes cannot run there";
                complaints.push(complaint(format!("node {}", node.name), why.into()));
            }
        }
        for volume in self.volumes.iter().filter(|v| v.phase == "Failed") {
            complaints.push(complaint(format!("volume {}", volume.name), "it could not be reclaimed".into()));
        }
        complaints
    }
}

fn or_none<'a, T>(read: &'a Result<Vec<T>, String>, what: &str, unread: &mut Vec<String>) -> &'a [T] {
    match read {
        Ok(items) => items,
        Err(error) => {
            unread.push(format!("{what}: {error}"));
            &[]
        }
    }
}

fn condition<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|c| c.type_ == kind)
}

fn cluster(found: &StorageCluster, now: Timestamp) -> Cluster {
    let status = found.status.clone().unwrap_or_default();
    let ready = condition(&status.conditions, "Ready");
    Cluster {
        name: found.name_any(),
        namespace: found.namespace().unwrap_or_default(),
        // A condition for an older spec does not apply to this one.
        ready: ready.is_some_and(|c| c.status == "True")
            && status.observed_generation == found.metadata.generation,
        reason: ready.map(|c| c.reason.clone()).unwrap_or_default(),
        message: match ready {
            Some(_) if status.observed_generation != found.metadata.generation => {
                "its spec has changed and the operator has not acted on it yet".into()
            }
            Some(condition) => condition.message.clone(),
            None => String::new(),
        },
        paused: found.spec.paused,
        instances: status.summary.instances,
        transport: status.summary.transport,
        volumes: status.summary.volumes,
        capacity: status.summary.capacity,
        image: status.image,
        age: age(found.metadata.creation_timestamp.as_ref(), now),
    }
}

fn instances(cluster: &StorageCluster) -> impl Iterator<Item = Instance> {
    let instances = cluster.status.as_ref().map(|s| s.instances.as_slice()).unwrap_or_default();
    instances.iter().map(move |i| instance(cluster, i))
}

fn instance(cluster: &StorageCluster, found: &InstanceStatus) -> Instance {
    Instance {
        name: found.name.clone(),
        cluster: cluster.name_any(),
        namespace: cluster.namespace().unwrap_or_default(),
        phase: phase(found.phase).to_owned(),
        node: found.node.clone(),
        address: match (found.address.as_str(), found.address.contains(':')) {
            ("", _) => String::new(),
            (v6, true) => format!("[{v6}]:{}", found.port),
            (v4, false) => format!("{v4}:{}", found.port),
        },
        transports: found.transports.clone(),
        volumes: found.volumes,
        sessions: found.sessions,
        free_bytes: found.free_bytes,
        capacity_bytes: found.capacity_bytes,
        version: found.version.clone(),
        epoch: found.epoch,
        message: found.message.clone(),
    }
}

fn pools(cluster: &StorageCluster) -> Vec<Pool> {
    let instances = cluster.status.as_ref().map(|s| s.instances.as_slice()).unwrap_or_default();
    let of = |instance: &InstanceStatus| {
        let came =
            instance.takeover.as_ref().map(|t| format!("{} from {}", t.reason, t.from)).unwrap_or_default();
        let reported = instance.pools.iter().filter(|pool| !pool.nqn.is_empty());
        let pool = |reported: &PoolStatus| Pool {
            instance: instance.name.clone(),
            namespace: cluster.namespace().unwrap_or_default(),
            epoch: instance.epoch,
            came: came.clone(),
            reported: reported.clone(),
        };
        reported.map(pool).collect::<Vec<_>>()
    };
    instances.iter().flat_map(of).collect()
}

fn phase(phase: InstancePhase) -> &'static str {
    match phase {
        InstancePhase::Pending => "Pending",
        InstancePhase::Starting => "Starting",
        InstancePhase::Ready => "Ready",
        InstancePhase::Draining => "Draining",
        InstancePhase::NotReady => "NotReady",
        InstancePhase::Removing => "Removing",
    }
}

fn node(found: &StorageNode, registered: Option<bool>) -> Node {
    let status = found.status.clone().unwrap_or_default();
    let ready = condition(&status.conditions, "Ready");
    Node {
        name: found.name_any(),
        ready: ready.is_some_and(|c| c.status == "True"),
        rdma: status.summary.rdma,
        nvme: status.summary.nvme,
        smb_direct: match status.kernel.cifs_smb_direct {
            Fact::Yes => "Yes".into(),
            Fact::No => "No".into(),
            Fact::Unknown => "Unknown".into(),
        },
        registered,
        unschedulable: found.spec.unschedulable,
        kernel: status.kernel.release,
        agent_version: status.agent_version,
        message: match ready {
            Some(condition) => format!("{}: {}", condition.reason, condition.message),
            None => "its agent has not reported: check the forebay-csi-node pod on it".into(),
        },
    }
}

fn volume(found: &PersistentVolume, now: Timestamp) -> Volume {
    let spec = found.spec.clone().unwrap_or_default();
    let csi = spec.csi.unwrap_or_default();
    let instance = csi.volume_attributes.unwrap_or_default().get("instance").cloned();
    // The handle begins with the instance if there are several.
    let instance =
        instance.or_else(|| csi.volume_handle.split_once('/').map(|(instance, _)| instance.to_owned()));
    let claim = spec.claim_ref.unwrap_or_default();
    Volume {
        name: found.name_any(),
        claim: match (claim.namespace, claim.name) {
            (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
            _ => String::new(),
        },
        instance: instance.unwrap_or_default(),
        capacity: spec.capacity.unwrap_or_default().get("storage").map(|q| q.0.clone()).unwrap_or_default(),
        phase: found.status.clone().unwrap_or_default().phase.unwrap_or_default(),
        storage_class: spec.storage_class_name.unwrap_or_default(),
        age: age(found.metadata.creation_timestamp.as_ref(), now),
    }
}

/// Formats the tables, followed by what is not ready.
pub(crate) fn render(view: &View, wide: bool, paint: Paint) -> String {
    let mut parts = Vec::new();
    if !view.clusters.is_empty() {
        parts.push(cluster_table(view, wide).render(paint));
    }
    if !view.instances.is_empty() {
        parts.push(instance_table(view, wide).render(paint));
    }
    if !view.pools.is_empty() {
        parts.push(pool_table(view, wide).render(paint));
    }
    if !view.nodes.is_empty() {
        parts.push(node_table(view, wide).render(paint));
    }
    if !view.volumes.is_empty() {
        parts.push(volume_table(view, wide, paint));
    }
    if !view.not_ready.is_empty() {
        let mut text = paint.text(Tone::Bad, "Not ready") + "\n";
        for complaint in &view.not_ready {
            text.push_str(&format!("  {}: {}\n", complaint.what, complaint.why));
        }
        text.push_str("Run `kubectl forebay doctor` for details.\n");
        parts.push(text);
    }
    if !view.unread.is_empty() {
        let mut text = paint.text(Tone::Doubtful, "Not read") + "\n";
        view.unread.iter().for_each(|line| text.push_str(&format!("  {line}\n")));
        parts.push(text);
    }
    parts.join("\n")
}

/// Returns the columns for every table, plus those for the wide one.
fn columns<T: Clone>(always: &[T], wide: &[T], is_wide: bool) -> Vec<T> {
    let wide = if is_wide { wide } else { &[] };
    [always, wide].concat()
}

fn judged(good: bool, text: impl Into<String>) -> Cell {
    Cell::toned(text, if good { Tone::Good } else { Tone::Bad })
}

fn cluster_table(view: &View, wide: bool) -> Table {
    let heads = ["STORAGECLUSTER", "READY", "INSTANCES", "TRANSPORT", "VOLUMES", "CAPACITY", "AGE"];
    let mut table = Table::new(&columns(&heads, &["REASON", "IMAGE"], wide));
    for c in &view.clusters {
        let name =
            if view.namespace.is_none() { format!("{}/{}", c.namespace, c.name) } else { c.name.clone() };
        let ready = match (c.ready, c.paused) {
            (true, false) => judged(true, "True"),
            (false, false) => judged(false, "False"),
            (ready, true) => {
                Cell::toned(format!("{} (paused)", if ready { "True" } else { "False" }), Tone::Doubtful)
            }
        };
        let cells: [Cell; 7] = [
            name.into(),
            ready,
            c.instances.as_str().into(),
            c.transport.as_str().into(),
            c.volumes.to_string().into(),
            c.capacity.as_str().into(),
            c.age.as_str().into(),
        ];
        table.row(columns(&cells, &[c.reason.as_str().into(), c.image.as_str().into()], wide));
    }
    table
}

fn instance_table(view: &View, wide: bool) -> Table {
    let heads = ["INSTANCE", "PHASE", "NODE", "ADDRESS", "TRANSPORT", "VOLUMES", "SESSIONS", "FREE", "SIZE"];
    let mut table = Table::new(&columns(&heads, &["EPOCH", "VERSION"], wide));
    for i in &view.instances {
        let name =
            if view.namespace.is_none() { format!("{}/{}", i.namespace, i.name) } else { i.name.clone() };
        let cells: [Cell; 9] = [
            name.into(),
            judged(i.phase == "Ready", i.phase.as_str()),
            i.node.as_str().into(),
            i.address.as_str().into(),
            i.transports.join(", ").into(),
            i.volumes.to_string().into(),
            i.sessions.to_string().into(),
            bytes(i.free_bytes).into(),
            bytes(i.capacity_bytes).into(),
        ];
        table.row(columns(&cells, &[i.epoch.to_string().into(), i.version.as_str().into()], wide));
    }
    table
}

fn pool_table(view: &View, wide: bool) -> Table {
    let heads = ["POOL", "INSTANCE", "PATHS", "ANA", "RESERVATION", "EPOCH", "CAME", "FREE", "SIZE"];
    let mut table = Table::new(&columns(&heads, &["TARGET", "NAMESPACE"], wide));
    for p in &view.pools {
        let reported = &p.reported;
        let instance = if view.namespace.is_none() {
            format!("{}/{}", p.namespace, p.instance)
        } else {
            p.instance.clone()
        };
        let cells: [Cell; 9] = [
            reported.name.as_str().into(),
            instance.into(),
            judged(reported.paths_up >= reported.paths, format!("{}/{}", reported.paths_up, reported.paths)),
            reported.ana_state.as_str().into(),
            reported.reservation.as_str().into(),
            p.epoch.to_string().into(),
            p.came.as_str().into(),
            bytes(reported.free_bytes).into(),
            bytes(reported.capacity_bytes).into(),
        ];
        table.row(columns(
            &cells,
            &[reported.target.as_str().into(), reported.namespace.as_str().into()],
            wide,
        ));
    }
    table
}

fn node_table(view: &View, wide: bool) -> Table {
    let heads = ["NODE", "READY", "DRIVER", "RDMA", "NVME", "SMB-DIRECT"];
    let mut table = Table::new(&columns(&heads, &["KERNEL", "AGENT"], wide));
    for n in &view.nodes {
        let ready = match (n.ready, n.unschedulable) {
            (true, false) => judged(true, "True"),
            (false, _) => judged(false, "False"),
            (true, true) => Cell::toned("True (unschedulable)", Tone::Doubtful),
        };
        let driver = match n.registered {
            Some(true) => judged(true, "registered"),
            Some(false) => judged(false, "missing"),
            None => "".into(),
        };
        let cells: [Cell; 6] = [
            n.name.as_str().into(),
            ready,
            driver,
            n.rdma.as_str().into(),
            n.nvme.to_string().into(),
            n.smb_direct.as_str().into(),
        ];
        table.row(columns(&cells, &[n.kernel.as_str().into(), n.agent_version.as_str().into()], wide));
    }
    table
}

fn volume_table(view: &View, wide: bool, paint: Paint) -> String {
    let heads = ["VOLUME", "CLAIM", "INSTANCE", "CAPACITY", "PHASE", "STORAGECLASS"];
    let mut table = Table::new(&columns(&heads, &["AGE"], wide));
    let shown = if wide { view.volumes.len() } else { VOLUMES_SHOWN };
    for v in view.volumes.iter().take(shown) {
        let tone = match v.phase.as_str() {
            "Bound" => Tone::Good,
            "Failed" => Tone::Bad,
            _ => Tone::Doubtful,
        };
        let cells: [Cell; 6] = [
            v.name.as_str().into(),
            v.claim.as_str().into(),
            v.instance.as_str().into(),
            v.capacity.as_str().into(),
            Cell::toned(v.phase.as_str(), tone),
            v.storage_class.as_str().into(),
        ];
        table.row(columns(&cells, &[v.age.as_str().into()], wide));
    }
    let mut text = table.render(paint);
    if let Some(more) = view.volumes.len().checked_sub(shown).filter(|&more| more > 0) {
        let mut phases: BTreeMap<&str, usize> = BTreeMap::new();
        view.volumes.iter().skip(shown).for_each(|v| *phases.entry(v.phase.as_str()).or_default() += 1);
        let phases: Vec<String> = phases.iter().map(|(phase, count)| format!("{count} {phase}")).collect();
        text.push_str(
            &paint.text(Tone::Faint, &format!("and {more} more ({}); -o wide shows all", phases.join(", "))),
        );
        text.push('\n');
    }
    text
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
