//! Decides which nodes can run instances, and which instance runs on which node. Pure.

use std::collections::{BTreeMap, BTreeSet};

use forebay_api::cluster::{
    Backend, NodeVerdict, Placement, RdmaPlacement, RdmaRequirement, StorageClusterSpec, WhenUnsatisfiable,
};
use forebay_api::fabric::FabricTransport;
use forebay_api::node::{Fact, RdmaDevice, RdmaPort, StorageNode};
use k8s_openapi::api::core::v1::{Node, Taint, Toleration};

use crate::desired::rules::amount;

/// Why a node does not fit, as reported in the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// It fits.
    Fits,
    /// It lacks a label of `placement.nodeSelector`.
    SelectorMismatch,
    /// The kubelet does not report the node as ready.
    NodeNotReady,
    /// Node or StorageNode is marked unschedulable.
    Cordoned,
    /// It has a taint that `placement.tolerations` does not tolerate.
    TaintNotTolerated,
    /// It lacks the label by which instances are spread.
    TopologyKeyMissing,
    /// No node agent has reported its hardware.
    StorageNodeUnknown,
    /// It has no RDMA device.
    RdmaMissing,
    /// `placement.rdma.devices` or `netdevs` select none of its ports.
    DeviceNotSelected,
    /// No selected port has the requested link layer.
    WrongLinkLayer,
    /// No such port can be used now.
    RdmaPortDown,
    /// No such port is fast enough.
    RdmaTooSlow,
    /// An instance of another cluster uses the same ports there.
    Occupied,
    /// The node lacks a directory of `backends`.
    BackendMissing,
    /// Its operating system or architecture differs from that of the servers' image.
    PlatformMismatch,
    /// It has less than the requests of `limits.resources`.
    TooSmall,
    /// The scheduler finds no room for the pod there.
    Unschedulable,
    /// Its kernel has none of the modules that the paths to some backend's namespaces require.
    FabricMissing,
}

impl Reason {
    /// Returns the reason as in the status.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fits => "Fits",
            Self::SelectorMismatch => "SelectorMismatch",
            Self::NodeNotReady => "NodeNotReady",
            Self::Cordoned => "Cordoned",
            Self::TaintNotTolerated => "TaintNotTolerated",
            Self::TopologyKeyMissing => "TopologyKeyMissing",
            Self::StorageNodeUnknown => "StorageNodeUnknown",
            Self::RdmaMissing => "RdmaMissing",
            Self::DeviceNotSelected => "DeviceNotSelected",
            Self::WrongLinkLayer => "WrongLinkLayer",
            Self::RdmaPortDown => "RdmaPortDown",
            Self::RdmaTooSlow => "RdmaTooSlow",
            Self::Occupied => "Occupied",
            Self::BackendMissing => "BackendMissing",
            Self::PlatformMismatch => "PlatformMismatch",
            Self::TooSmall => "TooSmall",
            Self::Unschedulable => "Unschedulable",
            Self::FabricMissing => "FabricMissing",
        }
    }
}

/// A node with its verdict.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Name of the node.
    pub node: String,
    /// Whether it fits, or why not.
    pub reason: Reason,
    /// The reason in a sentence, with its fix.
    pub message: String,
    /// Whether it is preferred, because it has the preferred RDMA port.
    pub preferred: bool,
    /// Its failure domain; empty if instances are not spread or the node has no such label.
    pub domain: String,
}

impl Verdict {
    /// Whether an instance can be placed there.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.reason == Reason::Fits
    }

    /// Returns the verdict as in the status.
    #[must_use]
    pub fn status(&self) -> NodeVerdict {
        NodeVerdict {
            name: self.node.clone(),
            fits: self.fits(),
            reason: self.reason.as_str().to_owned(),
            message: self.message.clone(),
        }
    }
}

/// Other objections to a node, by the node's name: another cluster's instance occupies it, or it is known to lack a
/// directory.
pub type Objections = BTreeMap<String, (Reason, String)>;

/// Judges every node, in order of the names.
#[must_use]
pub fn judge<N, S>(
    spec: &StorageClusterSpec,
    nodes: &[N],
    storage: &[S],
    objections: &Objections,
) -> Vec<Verdict>
where
    N: AsRef<Node>,
    S: AsRef<StorageNode>,
{
    let storage: BTreeMap<&str, &StorageNode> =
        storage.iter().map(AsRef::as_ref).filter_map(|s| Some((s.metadata.name.as_deref()?, s))).collect();
    let mut verdicts: Vec<Verdict> = nodes
        .iter()
        .map(AsRef::as_ref)
        .filter_map(|node| {
            let name = node.metadata.name.as_deref()?;
            Some(judge_node(spec, name, node, storage.get(name).copied(), objections.get(name)))
        })
        .collect();
    verdicts.sort_by(|a, b| a.node.cmp(&b.node));
    verdicts
}

fn judge_node(
    spec: &StorageClusterSpec,
    name: &str,
    node: &Node,
    storage: Option<&StorageNode>,
    objection: Option<&(Reason, String)>,
) -> Verdict {
    let domain = spec
        .placement
        .spread
        .as_ref()
        .and_then(|s| label(node, &s.topology_key))
        .unwrap_or_default()
        .to_owned();
    let verdict = |reason, message, preferred| Verdict {
        node: name.to_owned(),
        reason,
        message,
        preferred,
        domain: domain.clone(),
    };
    let refusal = refused_by_node(&spec.placement, name, node)
        .or_else(|| too_small(spec, node))
        .or_else(|| without_fabric(spec, name, storage))
        .or_else(|| {
            storage.filter(|s| s.spec.unschedulable).map(|_| {
                (
                    Reason::Cordoned,
                    format!("StorageNode {name} has spec.unschedulable: set it to false to use the node"),
                )
            })
        })
        .or_else(|| objection.cloned());
    let rdma = &spec.placement.rdma;
    if let Some((reason, message)) = refusal {
        // If the scheduler finds no room on this node, its rank determines which node is tried next.
        let ordered = reason == Reason::Unschedulable && rdma.requirement != RdmaRequirement::None;
        let preferred = ordered && fitting_port(rdma, name, storage).is_ok();
        return verdict(reason, message, preferred);
    }
    match (rdma.requirement, fitting_port(rdma, name, storage)) {
        (RdmaRequirement::None, _) => verdict(Reason::Fits, String::new(), false),
        (_, Ok(port)) => verdict(Reason::Fits, port, true),
        (RdmaRequirement::Required, Err((reason, message))) => verdict(reason, message, false),
        (RdmaRequirement::Preferred, Err((_, message))) => {
            verdict(Reason::Fits, format!("without RDMA, although RDMA is preferred: {message}"), false)
        }
    }
}

fn label<'n>(node: &'n Node, key: &str) -> Option<&'n str> {
    node.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// Whether the kubelet reports the node as ready.
#[must_use]
pub fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions.is_some_and(|c| c.iter().any(|c| c.type_ == "Ready" && c.status == "True"))
}

/// Taints of components that remove nodes in an orderly way without marking them unschedulable.
const LEAVING: [&str; 3] =
    ["ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"];

/// Whether the scheduler places no new pods on the node because it is being drained.
#[must_use]
pub fn is_cordoned(node: &Node) -> bool {
    let Some(spec) = &node.spec else { return false };
    let leaving = |taint: &Taint| LEAVING.contains(&taint.key.as_str()) && taint.effect != "PreferNoSchedule";
    spec.unschedulable.unwrap_or_default() || spec.taints.iter().flatten().any(leaving)
}

/// Labels of nodes with the values that they must have if they exist, because the servers' image is built for these.
const PLATFORM: [(&str, &str); 2] = [("kubernetes.io/os", "linux"), ("kubernetes.io/arch", "amd64")];

fn platform(node: &Node) -> Option<(Reason, String)> {
    let (key, wanted, found) = PLATFORM.iter().find_map(|(key, wanted)| {
        let found = label(node, key).filter(|found| found != wanted)?;
        Some((key, wanted, found))
    })?;
    Some((Reason::PlatformMismatch, format!("the node has {key}={found}; servers run only on {wanted}")))
}

/// Whether the node's allocatable resources are less than a server requests. The scheduler accounts for the other pods
/// there.
fn too_small(spec: &StorageClusterSpec, node: &Node) -> Option<(Reason, String)> {
    let requests = spec.limits.resources.as_ref()?.requests.as_ref()?;
    let allocatable = node.status.as_ref()?.allocatable.as_ref()?;
    requests.iter().find_map(|(resource, wanted)| {
        let found = allocatable.get(resource);
        let has = found.map_or(Some(0.0), amount)?;
        (has < amount(wanted)?).then(|| {
            let found = found.map_or("none", |f| f.0.as_str());
            let message = format!(
                "limits.resources.requests.{resource} is {}, but the node has {found} in total",
                wanted.0
            );
            (Reason::TooSmall, message)
        })
    })
}

/// Whether some backend cannot be connected from the node over any of its paths. Unknown facts are no objection.
fn without_fabric(
    spec: &StorageClusterSpec,
    name: &str,
    storage: Option<&StorageNode>,
) -> Option<(Reason, String)> {
    let kernel = &storage?.status.as_ref()?.kernel;
    let modules = |backend: &Backend| -> BTreeSet<(&'static str, Fact)> {
        let (tcp, rdma) = (("nvme-tcp", kernel.nvme_tcp), ("nvme-rdma", kernel.nvme_rdma));
        match (&backend.nvmeof, &backend.target) {
            (Some(nvmeof), _) => {
                nvmeof.paths.iter().map(|p| if p.starts_with("rdma:") { rdma } else { tcp }).collect()
            }
            (None, Some(target)) => match target.transport {
                FabricTransport::TCP => [tcp].into(),
                FabricTransport::RDMA => [rdma].into(),
            },
            (None, None) => BTreeSet::new(),
        }
    };
    spec.backends.iter().find_map(|backend| {
        let modules = modules(backend);
        let missing = !modules.is_empty() && modules.iter().all(|(_, fact)| *fact == Fact::No);
        missing.then(|| {
            let names: Vec<&str> = modules.iter().map(|(module, _)| *module).collect();
            let message = format!(
                "the kernel lacks {} for backend {}: on node {name}, modprobe {}, and load it at boot",
                names.join(" and "),
                backend.name,
                names[0]
            );
            (Reason::FabricMissing, message)
        })
    })
}

fn refused_by_node(placement: &Placement, name: &str, node: &Node) -> Option<(Reason, String)> {
    for (key, wanted) in &placement.node_selector {
        let found = label(node, key);
        if found != Some(wanted) {
            let found = found.map_or("has no such label".to_owned(), |f| format!("has {key}={f}"));
            return Some((
                Reason::SelectorMismatch,
                format!(
                    "placement.nodeSelector requires {key}={wanted}, the node {found}: kubectl label node {name} --overwrite {key}={wanted}"
                ),
            ));
        }
    }
    if let Some(refusal) = platform(node) {
        return Some(refusal);
    }
    if node.metadata.deletion_timestamp.is_some() {
        return Some((Reason::NodeNotReady, "the node is being deleted".to_owned()));
    }
    if is_cordoned(node) {
        return Some((Reason::Cordoned, format!("the node is cordoned: kubectl uncordon {name}")));
    }
    if !is_ready(node) {
        return Some((
            Reason::NodeNotReady,
            format!("the kubelet is not ready: see kubectl describe node {name}"),
        ));
    }
    let taints = node.spec.as_ref().and_then(|s| s.taints.as_deref()).unwrap_or_default();
    for taint in taints.iter().filter(|t| t.effect != "PreferNoSchedule") {
        if !placement.tolerations.iter().any(|t| tolerates(t, taint)) {
            let value = taint.value.as_deref().map(|v| format!("={v}")).unwrap_or_default();
            return Some((
                Reason::TaintNotTolerated,
                format!(
                    "taint {}{value}:{} is not tolerated: add it to placement.tolerations",
                    taint.key, taint.effect
                ),
            ));
        }
    }
    if let Some(spread) = &placement.spread
        && spread.when_unsatisfiable == WhenUnsatisfiable::DoNotSchedule
        && label(node, &spread.topology_key).is_none()
    {
        return Some((
            Reason::TopologyKeyMissing,
            format!("placement.spread needs the label {}, which the node lacks", spread.topology_key),
        ));
    }
    None
}

/// Whether a toleration matches a taint, by the scheduler's rules.
#[must_use]
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    let exists = toleration.operator.as_deref() == Some("Exists");
    (effect.is_empty() || effect == taint.effect)
        && (key == taint.key || key.is_empty() && exists)
        && (exists
            || toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default())
}

/// Returns a description of the fastest port that meets all requirements, or the first requirement that no port is left to meet.
pub(crate) fn fitting_port(
    rdma: &RdmaPlacement,
    name: &str,
    storage: Option<&StorageNode>,
) -> Result<String, (Reason, String)> {
    let Some(status) = storage.and_then(|s| s.status.as_ref()) else {
        return Err((
            Reason::StorageNodeUnknown,
            format!(
                "no node agent has reported StorageNode {name}: is the pod of DaemonSet forebay-csi-node running there?"
            ),
        ));
    };
    let ports: Vec<(&RdmaDevice, &RdmaPort)> =
        status.rdma_devices.iter().flat_map(|d| d.ports.iter().map(move |p| (d, p))).collect();
    if ports.is_empty() {
        return Err((
            Reason::RdmaMissing,
            "the node has no RDMA device: install the driver of its NIC, or for soft-RoCE `rdma link add rxe0 type rxe netdev <name>`".to_owned(),
        ));
    }
    let chosen: Vec<_> = ports
        .iter()
        .filter(|(device, port)| {
            selected(&rdma.devices, Some(&device.name)) && selected(&rdma.netdevs, port.netdev.as_deref())
        })
        .collect();
    if chosen.is_empty() {
        let found: Vec<String> = ports
            .iter()
            .map(|(d, p)| format!("{} ({})", d.name, p.netdev.as_deref().unwrap_or("no netdev")))
            .collect();
        return Err((
            Reason::DeviceNotSelected,
            format!("placement.rdma.devices and netdevs match none of {}", found.join(", ")),
        ));
    }
    let layered: Vec<_> =
        chosen.iter().filter(|(_, p)| rdma.link_layer.is_none_or(|wanted| wanted.is(p.link_layer))).collect();
    let Some(first) = layered.first() else {
        let found: Vec<String> =
            chosen.iter().map(|(d, p)| format!("{} is {:?}", at(d, p), p.link_layer)).collect();
        return Err((
            Reason::WrongLinkLayer,
            format!("no port has the link layer of placement.rdma.linkLayer: {}", found.join(", ")),
        ));
    };
    let usable: Vec<_> = layered.iter().filter(|(_, p)| p.usable).collect();
    if usable.is_empty() {
        let (device, port) = first;
        let why = if port.reason.is_empty() { &port.state } else { &port.reason };
        return Err((Reason::RdmaPortDown, format!("no port is usable; {}: {why}", at(device, port))));
    }
    let fastest = usable.iter().max_by_key(|(_, p)| p.rate_gbps).expect("there is one at least");
    if fastest.1.rate_gbps < rdma.min_rate_gbps {
        return Err((
            Reason::RdmaTooSlow,
            format!(
                "placement.rdma.minRateGbps is {}, but the fastest port, {}, has {} Gb/s",
                rdma.min_rate_gbps,
                at(fastest.0, fastest.1),
                fastest.1.rate_gbps
            ),
        ));
    }
    Ok(format!("RDMA {}, {} Gb/s", at(fastest.0, fastest.1), fastest.1.rate_gbps))
}

fn at(device: &RdmaDevice, port: &RdmaPort) -> String {
    format!("{}/{}", device.name, port.port)
}

pub(crate) fn selected(patterns: &[String], name: Option<&str>) -> bool {
    patterns.is_empty() || name.is_some_and(|name| patterns.iter().any(|p| matches(p, name)))
}

/// Whether a name matches a pattern with `*` and `?`, in time linear in the product of their lengths.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if p < pattern.len() && pattern[p] == b'*' {
            star = Some((p, n));
            p += 1;
        } else if p < pattern.len() && (pattern[p] == b'?' || pattern[p] == name[n]) {
            p += 1;
            n += 1;
        } else if let Some((at, from)) = star {
            star = Some((at, from + 1));
            p = at + 1;
            n = from + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

/// The node of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Name of the node.
    pub node: String,
    /// Whether placement must keep it there: its volumes are stored on that node, or only a takeover or a planned move changes its node.
    pub bound: bool,
}

/// Assigns a node to every instance. Bound instances keep theirs, regardless of its state. Others keep theirs while it fits,
/// so that nothing moves without need. The rest get the best node that is left, in order of the instances. An instance
/// without room on its node gets the node that ranks next, and after the last node the first one again, because earlier
/// nodes without room are not remembered.
#[must_use]
pub fn assign(
    spec: &StorageClusterSpec,
    instances: &[String],
    seats: &BTreeMap<String, Seat>,
    verdicts: &[Verdict],
) -> BTreeMap<String, Seat> {
    let mut given: BTreeMap<String, Seat> = BTreeMap::new();
    let taken = |given: &BTreeMap<String, Seat>, node: &str| given.values().any(|s| s.node == node);
    for name in instances {
        if let Some(seat) = seats.get(name).filter(|s| s.bound) {
            given.insert(name.clone(), seat.clone());
        }
    }
    for name in instances {
        let Some(seat) = seats.get(name).filter(|s| !s.bound) else { continue };
        let fits = verdicts.iter().any(|v| v.node == seat.node && v.fits());
        if fits && !taken(&given, &seat.node) {
            given.insert(name.clone(), seat.clone());
        }
    }
    for name in instances {
        if given.contains_key(name) {
            continue;
        }
        let counts = domains(verdicts, &given);
        let least = counts.values().copied().min().unwrap_or_default();
        let rank = |v: &Verdict| {
            (!v.preferred, counts.get(v.domain.as_str()).copied().unwrap_or_default(), v.node.clone())
        };
        let refused = seats.get(name).and_then(|seat| {
            verdicts.iter().find(|v| v.node == seat.node && v.reason == Reason::Unschedulable).map(rank)
        });
        let best = verdicts
            .iter()
            .filter(|v| v.fits() && !taken(&given, &v.node))
            .filter(|v| {
                let Some(spread) = &spec.placement.spread else { return true };
                let skew = counts.get(v.domain.as_str()).copied().unwrap_or_default() + 1 - least;
                spread.when_unsatisfiable == WhenUnsatisfiable::ScheduleAnyway || skew <= spread.max_skew
            })
            .min_by_key(|v| {
                let rank = rank(v);
                (refused.as_ref().is_some_and(|refused| rank <= *refused), rank)
            });
        if let Some(best) = best {
            given.insert(name.clone(), Seat { node: best.node.clone(), bound: false });
        }
    }
    given
}

/// Returns the number of instances per failure domain, for every domain with a fitting node.
fn domains<'v>(verdicts: &'v [Verdict], given: &BTreeMap<String, Seat>) -> BTreeMap<&'v str, u32> {
    let mut counts = BTreeMap::new();
    for verdict in verdicts {
        let here = u32::from(given.values().any(|s| s.node == verdict.node));
        if verdict.fits() || here > 0 {
            *counts.entry(verdict.domain.as_str()).or_default() += here;
        }
    }
    counts
}

/// Explains from the verdicts why an instance has no node: every reason with its number of nodes, the most common one first.
#[must_use]
pub fn explain(verdicts: &[Verdict], given: &BTreeMap<String, Seat>) -> String {
    if verdicts.is_empty() {
        return "there are no nodes".to_owned();
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for verdict in verdicts {
        let reason = match verdict.reason {
            Reason::Fits if given.values().any(|s| s.node == verdict.node) => "already runs another instance",
            Reason::Fits => "violates placement.spread",
            other => other.as_str(),
        };
        *counts.entry(reason).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(reason, count)| (usize::MAX - count, *reason));
    let counts: Vec<String> = counts.into_iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    format!("of {} nodes: {}; see status.nodes for the fix", verdicts.len(), counts.join(", "))
}

#[cfg(test)]
#[path = "placement_tests.rs"]
mod tests;
