//! Computes the desired state from the spec and the observed state: a pure function. Nothing here sends requests, waits or
//! reads the clock; the time is an argument.

pub mod budgets;
pub mod configuration;
pub mod deletion;
pub mod fabric;
pub mod moves;
pub mod objects;
pub mod rdma;
pub mod record;
pub mod rollout;
pub mod rules;
pub mod status;
pub mod target;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use forebay_api::cluster::{InstanceStatus, StorageCluster, StorageClusterStatus};
use forebay_api::fabric::PoolStatus;
use forebay_api::names;
use forebay_api::node::StorageNode;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use serde_json::Value;

use crate::brake::Pause;
use crate::certificates::Term;
use crate::limits::{RESYNC, UNSCHEDULABLE_MAX, WAIT};
use crate::placement::{self, Objections, Reason, Seat, Verdict};

/// The operator's settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Namespace that it works in.
    pub namespace: String,
    /// Image of servers if their StorageCluster names none.
    pub image: String,
    /// Seccomp profile of the servers: `RuntimeDefault`, `Unconfined` or `localhost/<file below the kubelet's folder>`.
    pub seccomp_profile: String,
    /// Priority class of the servers; empty for none.
    pub priority_class: String,
    /// How long the driver must have been able to see that an instance is being removed before the operator relies on it.
    pub announcement: Duration,
    /// UID of the Kubernetes cluster, which is the UID of its namespace kube-system.
    pub cluster_uid: String,
    /// Whether PodDisruptionBudgets are made.
    pub disruption_budgets: bool,
}

/// An instance's last report.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// The server responded.
    Answered(Box<ServerReport>),
    /// The server did not respond, and why.
    Silent(String),
}

/// A server's report about itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerReport {
    /// Its version.
    pub version: String,
    /// Transports in use: "TCP", "RDMA".
    pub transports: Vec<String>,
    /// Sum of its pools, bytes.
    pub capacity_bytes: i64,
    /// Bytes that can still be provisioned.
    pub free_bytes: i64,
    /// Number of volumes, served or not.
    pub volumes: u32,
    /// Of these, the number that cannot be served.
    pub unserved: u32,
    /// Number of snapshots.
    pub snapshots: u32,
    /// Pools by name, as reported by the server.
    pub pools: BTreeMap<String, PoolStatus>,
    /// SMB sessions.
    pub sessions: u32,
    /// Whether it accepts no more connections.
    pub draining: bool,
    /// Problems that do not keep it from serving.
    pub problems: Vec<String>,
    /// RDMA devices that only a new container can open.
    pub later_rdma_devices: Vec<String>,
}

/// State of a cluster's certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificatesState {
    /// Why they are not ready; `None` if they are.
    pub problem: Option<String>,
    /// When the next renewal is due.
    pub renewal: Option<Timestamp>,
    /// Names of the instances that have their certificates.
    pub issued: Vec<String>,
    /// Terms of the existing certificates.
    pub terms: Vec<Term>,
}

/// The observed state.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// The current time.
    pub now: Timestamp,
    /// Every node.
    pub nodes: Vec<Arc<Node>>,
    /// Reports of the node agents.
    pub storage_nodes: Vec<Arc<StorageNode>>,
    /// StatefulSets of this cluster, by instance.
    pub stateful_sets: BTreeMap<String, StatefulSet>,
    /// Pods of this cluster, by instance.
    pub pods: BTreeMap<String, Pod>,
    /// Services of this cluster, by instance.
    pub services: BTreeMap<String, Service>,
    /// Names of the ConfigMaps of this cluster.
    pub config_maps: Vec<String>,
    /// Names of the operator's Secrets of this cluster, with the instance that each belongs to.
    pub secrets: BTreeMap<String, Option<String>>,
    /// The kubelet's messages about volumes that it cannot mount, by instance.
    pub mount_failures: BTreeMap<String, String>,
    /// Recorded nodes of the instances that have served.
    pub bound: BTreeMap<String, String>,
    /// Recorded pools that have been made, by instance.
    pub pools: BTreeMap<String, BTreeSet<String>>,
    /// The record of the instances that can move.
    pub record: record::Record,
    /// How long nodes have been silent, by name, if their Leases are observed.
    pub silences: BTreeMap<String, Duration>,
    /// The pause of takeovers, if one is in effect.
    pub pause: Option<Pause>,
    /// The StatefulSet controller's messages about pods that it cannot create, by instance.
    pub creation_failures: BTreeMap<String, String>,
    /// Names of the PodDisruptionBudgets of this cluster.
    pub budgets: BTreeSet<String>,
    /// StatefulSets of the bundled target, by name.
    pub target_sets: BTreeMap<String, StatefulSet>,
    /// Pods of the bundled target.
    pub target_pods: Vec<Pod>,
    /// Every key of the record.
    pub recorded: BTreeSet<String>,
    /// StorageClasses by name: those of this cluster, and others with names that it requires.
    pub storage_classes: BTreeMap<String, StorageClass>,
    /// Last reports of the servers.
    pub reports: BTreeMap<String, Report>,
    /// Volumes that the driver has recorded, by instance, made or about to be made.
    pub recorded_volumes: BTreeMap<String, u32>,
    /// Nodes on which instances of other clusters use the host's ports: node, instance, ports.
    pub elsewhere: Vec<(String, String, Vec<u16>)>,
    /// The certificates.
    pub certificates: CertificatesState,
}

/// An object by kind and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// Its kind, as in its manifest.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
    /// UID of the only object that qualifies; any object does if `None`.
    pub uid: Option<String>,
}

/// A pod to be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodDeletion {
    /// Its name.
    pub name: String,
    /// Its instance.
    pub instance: String,
    /// UID; no other pod of the same name is deleted.
    pub uid: String,
    /// Why, for the Event.
    pub why: String,
    /// Whether to delete it without waiting for the kubelet, because that is not there.
    pub force: bool,
}

/// The desired state.
#[derive(Clone, Debug, Default)]
pub struct Desired {
    /// Objects to be applied, in this order.
    pub objects: Vec<Value>,
    /// Objects to be removed, before anything is applied.
    pub remove: Vec<Target>,
    /// The pod to be restarted now; never more than one.
    pub restart: Option<PodDeletion>,
    /// Places to be recorded before anything else is done. After that, everything is decided again.
    pub moves: Vec<record::Move>,
    /// Pods of earlier epochs to be deleted.
    pub end: Vec<PodDeletion>,
    /// Keys to be removed from the record of nodes, no matter which field manager set them.
    pub forget: Vec<String>,
    /// Instances with volumes that are to be destroyed.
    pub destroy_volumes: Vec<String>,
    /// Whether the credentials of volumes are to be removed, because the volumes are destroyed.
    pub forget_credentials: bool,
    /// Nothing is left to do, so the finalizer can be removed.
    pub release: bool,
    /// The status, except for the transition times of its conditions.
    pub status: StorageClusterStatus,
    /// When to reconcile again.
    pub again: Duration,
}

/// The cluster and everything that can be derived without further requests; shared by the parts of this module.
#[derive(Debug)]
pub struct View<'a> {
    /// The cluster.
    pub cluster: &'a StorageCluster,
    /// Its name.
    pub name: String,
    /// The operator's settings.
    pub settings: &'a Settings,
    /// The observed state.
    pub observed: &'a Observed,
    /// The previous status.
    pub before: StorageClusterStatus,
    /// Verdicts on all nodes.
    pub verdicts: Vec<Verdict>,
    /// Names of the wanted instances, and of those that are to be removed but still hold volumes.
    pub instances: Vec<String>,
    /// Those of `instances` that are to be removed.
    pub leaving: Vec<String>,
    /// Nodes of the instances.
    pub seats: BTreeMap<String, Seat>,
    /// Locations of the bundled target's namespaces, present or future, by instance and backend.
    pub places: BTreeMap<(String, String), fabric::Place>,
}

impl<'a> View<'a> {
    fn new(cluster: &'a StorageCluster, settings: &'a Settings, observed: &'a Observed) -> Self {
        let name = cluster.name_any();
        let spec = &cluster.spec;
        let wanted: Vec<String> = (0..spec.instances).map(|n| names::instance(&name, n)).collect();
        let mut instances = wanted.clone();
        let mut leaving: Vec<String> = observed
            .stateful_sets
            .keys()
            .chain(observed.bound.keys())
            .filter(|i| !wanted.contains(i) && ordinal(&name, i).is_some())
            .cloned()
            .collect();
        leaving.sort_by_key(|i| ordinal(&name, i));
        leaving.dedup();
        instances.extend(leaving.iter().cloned());
        let before = cluster.status.clone().unwrap_or_default();
        let mut seats = BTreeMap::new();
        let movable = spec.can_move();
        for instance in &instances {
            // For an instance that can move, only the record counts, because the record also has its epoch.
            let found =
                if movable { recorded_seat(instance, observed) } else { seat(instance, observed, &before) };
            if let Some(seat) = found {
                seats.insert(instance.clone(), seat);
            }
        }
        let verdicts =
            placement::judge(spec, &observed.nodes, &observed.storage_nodes, &objections(cluster, observed));
        let seats = if movable { seats } else { placement::assign(spec, &instances, &seats, &verdicts) };
        let places = fabric::places(&spec.backends, &instances, &known_places(observed, &before));
        Self { cluster, name, settings, observed, before, verdicts, instances, leaving, seats, places }
    }

    /// Whether the cluster is being deleted.
    #[must_use]
    pub fn deleting(&self) -> bool {
        self.cluster.metadata.deletion_timestamp.is_some()
    }

    /// Returns the previous status of an instance.
    #[must_use]
    pub fn before(&self, instance: &str) -> Option<&InstanceStatus> {
        self.before.instances.iter().find(|i| i.name == instance)
    }

    /// Returns the node that an instance belongs to, if that node exists.
    #[must_use]
    pub fn node(&self, instance: &str) -> Option<&Node> {
        let seat = self.seats.get(instance)?;
        self.observed.nodes.iter().map(AsRef::as_ref).find(|n| n.metadata.name.as_deref() == Some(&seat.node))
    }

    /// Whether other nodes can take over the instances.
    #[must_use]
    pub fn movable(&self) -> bool {
        self.cluster.spec.can_move()
    }

    /// Returns why unrequested takeovers pause, if they do. An administrator can override the pause.
    #[must_use]
    pub fn pause(&self) -> Option<Pause> {
        self.observed.pause.filter(|_| !self.overridden())
    }

    /// Whether an administrator has overridden the pause of takeovers.
    #[must_use]
    pub fn overridden(&self) -> bool {
        self.cluster.annotations().get(names::ANNOTATION_TAKE_OVER_ANYWAY).is_some_and(|v| v == "true")
    }

    /// Returns the instance's epoch, never less than a reported one.
    #[must_use]
    pub fn epoch(&self, instance: &str) -> u64 {
        self.known_epoch(instance).max(1)
    }

    /// As [`Self::epoch`], but 0 if the instance was never placed.
    #[must_use]
    pub fn known_epoch(&self, instance: &str) -> u64 {
        let reported = self.before(instance).filter(|b| !b.node.is_empty()).map_or(0, |b| b.epoch);
        // An instance that now has a directory beside its namespace may have moved before.
        if !self.cluster.spec.uses_fabric() {
            return reported;
        }
        let made = self.observed.stateful_sets.get(instance).and_then(|set| {
            let template = set.spec.as_ref()?.template.metadata.as_ref()?;
            template.annotations.as_ref()?.get(objects::ANNOTATION_EPOCH)?.parse().ok()
        });
        let recorded = self.observed.record.epochs.get(instance).copied();
        [Some(reported), made, recorded].into_iter().flatten().max().unwrap_or_default()
    }

    /// Returns the last node of an instance, from any source.
    #[must_use]
    pub fn last_node(&self, instance: &str) -> Option<String> {
        let set = self.observed.stateful_sets.get(instance);
        let annotated =
            set.and_then(|s| s.metadata.annotations.as_ref()?.get(names::ANNOTATION_NODE).cloned());
        annotated.or_else(|| self.before(instance).map(|b| b.node.clone())).filter(|n| !n.is_empty())
    }

    /// Returns the address that clients mount.
    #[must_use]
    pub fn address(&self, instance: &str) -> Option<String> {
        match fabric::own_address(self, instance) {
            Some(own) => self.seats.contains_key(instance).then(|| own.to_string()),
            None => self.node_address(instance),
        }
    }

    /// Returns the address of the admin API, which is the node's or the Service's. If the node is away for a moment, returns
    /// its last known address.
    #[must_use]
    pub fn node_address(&self, instance: &str) -> Option<String> {
        let found = if self.cluster.spec.network.host_network {
            self.node(instance).and_then(internal_ip)
        } else {
            let service = self.observed.services.get(instance)?;
            service
                .spec
                .as_ref()
                .and_then(|s| s.cluster_ip.clone())
                .filter(|ip| !ip.is_empty() && ip != "None")
        };
        found.or_else(|| {
            let seat = self.seats.get(instance)?;
            let before = self.before(instance).filter(|b| b.node == seat.node && !b.address.is_empty())?;
            let own = fabric::own_address(self, instance).is_some();
            let of_node =
                || Some(before.admin_endpoint.parse::<std::net::SocketAddr>().ok()?.ip().to_string());
            let remembered = if own { of_node() } else { Some(before.address.clone()) };
            remembered.filter(|_| self.cluster.spec.network.host_network)
        })
    }

    /// Returns the image that servers must run.
    #[must_use]
    pub fn image(&self) -> &str {
        self.cluster.spec.image.as_deref().unwrap_or(&self.settings.image)
    }

    /// Whether the driver has had enough time to see that an instance is being removed: no CreateVolume that began before
    /// can still make a volume there.
    #[must_use]
    pub fn announced(&self, instance: &str) -> bool {
        let since = self.before(instance).and_then(|b| b.removing_since.as_ref());
        let known = since.and_then(|s| Duration::try_from(self.observed.now.duration_since(s.0)).ok());
        known.is_some_and(|known| known >= self.settings.announcement)
    }

    /// Returns the number of an instance's volumes, made or about to be made; `None` if that is unknown now.
    #[must_use]
    pub fn volumes(&self, instance: &str) -> Option<u32> {
        let recorded = self.observed.recorded_volumes.get(instance).copied().unwrap_or_default();
        match self.observed.reports.get(instance) {
            Some(Report::Answered(report)) => Some(report.volumes.max(recorded)),
            // An instance that never served holds no volumes, except for those that the driver is about to make.
            _ if self.seats.get(instance).is_none_or(|s| !s.bound) => Some(recorded),
            _ => None,
        }
    }

    /// Returns the number of an instance's snapshots; 0 if it does not respond, in which case its volumes are unknown.
    #[must_use]
    pub fn snapshots(&self, instance: &str) -> u32 {
        match self.observed.reports.get(instance) {
            Some(Report::Answered(report)) => report.snapshots,
            _ => 0,
        }
    }
}

/// Returns the ordinal in an instance's name.
#[must_use]
pub fn ordinal(cluster: &str, instance: &str) -> Option<u32> {
    let digits = instance.strip_prefix(cluster)?.strip_prefix('-')?;
    let ordinal: u32 = digits.parse().ok()?;
    (ordinal.to_string() == digits).then_some(ordinal)
}

/// Returns an address of the node inside the cluster, preferring IPv4 over IPv6.
#[must_use]
pub fn internal_ip(node: &Node) -> Option<String> {
    let addresses = node.status.as_ref()?.addresses.as_ref()?;
    let mut found: Vec<std::net::IpAddr> =
        addresses.iter().filter(|a| a.type_ == "InternalIP").filter_map(|a| a.address.parse().ok()).collect();
    found.sort_by_key(std::net::IpAddr::is_ipv6);
    found.first().map(ToString::to_string)
}

fn recorded_seat(instance: &str, observed: &Observed) -> Option<Seat> {
    // A node without an epoch was recorded when the instance could not move.
    observed.record.epochs.get(instance)?;
    observed.bound.get(instance).map(|node| Seat { node: node.clone(), bound: true })
}

/// Returns the locations of the bundled target's namespaces from the record or, if that was lost, from the status.
fn known_places(
    observed: &Observed,
    before: &StorageClusterStatus,
) -> BTreeMap<(String, String), fabric::Place> {
    let mut known = BTreeMap::new();
    for instance in &before.instances {
        let reported = instance.pools.iter().filter_map(|p| Some((p.name.clone(), p.target.parse().ok()?)));
        known.extend(reported.map(|(pool, place)| ((instance.name.clone(), pool), place)));
    }
    known.extend(observed.record.places.clone());
    known
}

fn seat(instance: &str, observed: &Observed, before: &StorageClusterStatus) -> Option<Seat> {
    // The record is written before an instance is reported as ready, so it takes precedence over the other sources.
    if let Some(node) = observed.bound.get(instance) {
        return Some(Seat { node: node.clone(), bound: true });
    }
    let annotated = observed
        .stateful_sets
        .get(instance)
        .and_then(|s| s.metadata.annotations.as_ref()?.get(names::ANNOTATION_NODE).cloned());
    let known = before.instances.iter().find(|i| i.name == instance);
    let node = annotated.or_else(|| known.map(|k| k.node.clone())).filter(|n| !n.is_empty())?;
    // Two further signs that it has served, if the record was lost: its pod is ready, or the status says so.
    let serves = observed.pods.get(instance).is_some_and(|pod| {
        status::pod_ready_since(pod).is_some()
            && pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node.as_str())
    });
    let served = known.is_some_and(|k| k.node == node && k.capacity_bytes > 0);
    Some(Seat { node, bound: serves || served })
}

/// Returns the objections to nodes that do not follow from the Node and StorageNode objects.
fn objections(cluster: &StorageCluster, observed: &Observed) -> Objections {
    let mut objections = Objections::new();
    let network = &cluster.spec.network;
    if network.host_network {
        let ports = objects::ports(network);
        for (node, instance, theirs) in &observed.elsewhere {
            if theirs.iter().any(|p| ports.contains(p)) {
                objections.insert(
                    node.clone(),
                    (
                        Reason::Occupied,
                        format!("instance {instance} of another StorageCluster uses the same ports: give this cluster other network.ports, or other nodes"),
                    ),
                );
            }
        }
    }
    objections.extend(unschedulable(cluster, observed));
    objections
}

/// Returns nodes on which the scheduler has found no room for a pod for a while. This does not move a bound instance,
/// because its volumes are on the node.
fn unschedulable(cluster: &StorageCluster, observed: &Observed) -> Objections {
    let mut found = Objections::new();
    for (instance, pod) in &observed.pods {
        let conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
        let refused = conditions.into_iter().find(|c| {
            c.type_ == "PodScheduled" && c.status == "False" && c.reason.as_deref() == Some("Unschedulable")
        });
        let Some(refused) = refused else { continue };
        let since = refused.last_transition_time.as_ref().map_or(observed.now, |t| t.0);
        let waited = Duration::try_from(observed.now.duration_since(since)).unwrap_or_default();
        if let Some(node) = pinned_to(pod).filter(|_| waited >= UNSCHEDULABLE_MAX) {
            let why = refused.message.as_deref().unwrap_or_default();
            let message =
                format!("the scheduler finds no room for {instance} of {}: {why}", cluster.name_any());
            found.insert(node.to_owned(), (Reason::Unschedulable, message));
        }
    }
    found
}

/// Returns the node that a pod was made for. Its StatefulSet may name another node by now.
fn pinned_to(pod: &Pod) -> Option<&str> {
    let affinity = pod.spec.as_ref()?.affinity.as_ref()?.node_affinity.as_ref()?;
    let terms = &affinity.required_during_scheduling_ignored_during_execution.as_ref()?.node_selector_terms;
    let mut fields = terms.iter().flat_map(|t| t.match_fields.iter().flatten());
    let name = fields.find(|f| f.key == "metadata.name" && f.operator == "In")?;
    name.values.as_ref()?.first().map(String::as_str)
}

/// Returns the server certificates that must exist: instance and the address at which it is reached.
#[must_use]
pub fn certificates(
    cluster: &StorageCluster,
    settings: &Settings,
    observed: &Observed,
) -> Vec<(String, std::net::IpAddr)> {
    let view = View::new(cluster, settings, observed);
    let placed = view.instances.iter().filter(|i| view.seats.contains_key(*i));
    placed.filter_map(|i| Some((i.clone(), view.node_address(i)?.parse().ok()?))).collect()
}

/// Computes the desired state.
#[must_use]
pub fn desired(cluster: &StorageCluster, settings: &Settings, observed: &Observed) -> Desired {
    let view = View::new(cluster, settings, observed);
    let problems = rules::problems(&view);
    let refused = problems.iter().any(|p| p.fatal);
    let deleting = view.deleting();
    let mut desired = Desired { again: RESYNC, ..Desired::default() };
    let mut said = status::Said::default();
    if cluster.spec.paused {
        if deleting {
            said.deletable = Some(deletion::paused());
        }
    } else if deleting {
        deletion::plan(&view, &mut desired, &mut said);
    } else if !refused {
        let removing = removal(&view, &mut said);
        moves::plan(&view, &mut desired, &mut said);
        objects::objects(&view, &removing, &mut desired);
        rollout::plan(&view, &removing, &mut desired, &mut said);
    }
    status::compose(&view, &problems, &said, &mut desired);
    if let Some(renewal) = observed.certificates.renewal {
        let until = Duration::try_from(renewal.duration_since(observed.now)).unwrap_or_default();
        desired.again = desired.again.min(until.max(Duration::from_secs(1)));
    }
    desired
}

/// Returns the instances that can be removed now: they exceed the wanted number, the status has announced their removal (so
/// the driver makes no new volumes there), and they hold no volumes or snapshots.
fn removal(view: &View<'_>, said: &mut status::Said) -> Vec<String> {
    let mut removing = Vec::new();
    let mut refusals = Vec::new();
    for instance in &view.leaving {
        match (view.volumes(instance), view.snapshots(instance)) {
            (Some(0), 0) if view.announced(instance) => removing.push(instance.clone()),
            (Some(0), 0) => said.waits = true,
            (Some(count), 0) => refusals.push(format!("{instance} holds {count} volumes")),
            (Some(0), count) => refusals.push(format!("{instance} holds {count} snapshots")),
            (Some(volumes), snapshots) => {
                refusals.push(format!("{instance} holds {volumes} volumes and {snapshots} snapshots"));
            }
            (None, _) => {
                refusals.push(format!("{instance} does not answer, so its volumes cannot be counted"))
            }
        }
    }
    if !refusals.is_empty() {
        said.waits = true;
        said.scale_down = Some(format!(
            "{}: delete these, or set spec.instances to {}",
            refusals.join("; "),
            view.instances.last().and_then(|i| ordinal(&view.name, i)).map_or(0, |o| o + 1)
        ));
    }
    removing
}

/// Shortens the wait before the next reconciliation, because something is in progress.
fn soon(desired: &mut Desired) {
    desired.again = desired.again.min(WAIT);
}

#[cfg(test)]
mod tests;
