//! The objects of a cluster as manifests.

mod server;
mod storage_class;

use std::collections::{BTreeMap, BTreeSet};

use forebay_api::cluster::{Network, PullPolicy};
use forebay_api::names;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

pub use self::server::revision;
pub use self::storage_class::is_ours;
use super::{Desired, Report, Target, View, budgets, record, target};

/// Annotation on every applied object: hash of the manifest, so that an object that is up to date is left alone.
pub const ANNOTATION_APPLIED: &str = "storage.forebay.io/applied";
/// Annotation on a pod template, and so on its pod: hash of the template. A pod with a different hash is out of date.
pub const ANNOTATION_REVISION: &str = "storage.forebay.io/revision";
/// Annotation on a pod template: hash of the server's configuration, so that a change restarts the server.
pub const ANNOTATION_CONFIGURATION: &str = "storage.forebay.io/configuration";
/// Field manager of everything the operator applies.
pub const FIELD_MANAGER: &str = "forebay-operator";
/// Service account of the servers, created by the chart.
pub const SERVER_ACCOUNT: &str = "forebay-server";
/// Key of the configuration in an instance's ConfigMap.
pub const CONFIGURATION_KEY: &str = "server.toml";
/// Capabilities of a server (docs/reference/server.md says what each is for).
pub const CAPABILITIES: [&str; 6] =
    ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "NET_BIND_SERVICE", "SYS_ADMIN"];
/// Further capabilities of a server that has an address of its own.
pub const CAPABILITIES_ADDRESS: [&str; 2] = ["NET_ADMIN", "NET_RAW"];
/// Further capability of a server that registers memory with RDMA devices beyond the limit for locked memory.
pub const CAPABILITY_RDMA: &str = "IPC_LOCK";
/// Annotation on the pod template of an instance that can move: its epoch.
pub const ANNOTATION_EPOCH: &str = "storage.forebay.io/epoch";
const POOLS_SUFFIX: &str = ".pools";

pub use forebay_api::names::placement_record;

/// Returns the name of the ConfigMap with an instance's configuration.
#[must_use]
pub fn configuration_map(instance: &str) -> String {
    format!("{instance}-config")
}

/// Returns the same for the instance's current epoch. The ConfigMap of an earlier epoch stays unchanged for the pod that
/// uses it: a server that restarts with it is the older one, and steps back.
#[must_use]
pub fn configuration_of(view: &View<'_>, instance: &str) -> String {
    if view.movable() {
        return format!("{}-{}", configuration_map(instance), view.epoch(instance));
    }
    configuration_map(instance)
}

/// Returns every port on which an instance listens.
#[must_use]
pub fn ports(network: &Network) -> Vec<u16> {
    let p = &network.ports;
    vec![p.smb, p.smb_direct, p.admin, p.metrics]
}

/// Returns the hash of a manifest in hexadecimal.
#[must_use]
pub fn hash(value: &Value) -> String {
    // Sixteen bytes suffice to distinguish any two manifests.
    Sha256::digest(value.to_string().as_bytes()).iter().take(16).map(|b| format!("{b:02x}")).collect()
}

/// Returns the labels of every object made for a cluster.
#[must_use]
pub fn labels(cluster: &str, instance: Option<&str>) -> Value {
    let mut labels = json!({
        "app.kubernetes.io/name": "forebay",
        "app.kubernetes.io/component": "server",
        (names::LABEL_MANAGED_BY): names::MANAGED_BY_OPERATOR,
        (names::LABEL_CLUSTER): cluster,
    });
    if let Some(instance) = instance {
        labels[names::LABEL_INSTANCE] = instance.into();
    }
    labels
}

/// Adds every wanted object, and removes those that are no longer wanted.
pub fn objects(view: &View<'_>, removing: &[String], desired: &mut Desired) {
    let record = placement_record_object(view, removing, desired);
    desired.objects.push(record);
    for instance in view.instances.iter().filter(|i| !removing.contains(i)) {
        server::instance_objects(view, instance, desired);
    }
    target::objects(view, desired);
    budgets::objects(view, desired);
    for template in &view.cluster.spec.storage_classes {
        storage_class::storage_class(view, template, desired);
    }
    for (name, class) in &view.observed.storage_classes {
        if is_ours(view, class) && !view.cluster.spec.storage_classes.iter().any(|t| t.name == *name) {
            desired.remove.push(Target { kind: "StorageClass", name: name.clone(), uid: class.uid() });
        }
    }
    let kept = |i: &String| view.instances.contains(i) && !removing.contains(i);
    for (instance, set) in view.observed.stateful_sets.iter().filter(|(i, _)| !kept(i)) {
        desired.remove.push(Target { kind: "StatefulSet", name: instance.clone(), uid: set.uid() });
    }
    let host_network = view.cluster.spec.network.host_network;
    for (instance, service) in view.observed.services.iter().filter(|(i, _)| !kept(i) || host_network) {
        desired.remove.push(Target { kind: "Service", name: instance.clone(), uid: service.uid() });
    }
    let gone = |i: &Option<String>| i.as_ref().is_some_and(|i| !kept(i));
    for (name, _) in view.observed.secrets.iter().filter(|(_, i)| gone(i)) {
        desired.remove.push(Target { kind: "Secret", name: name.clone(), uid: None });
    }
    for name in &view.observed.config_maps {
        let ours = view.instances.iter().filter(|i| kept(i)).any(|i| configuration_of(view, i) == *name);
        let of_target = view.observed.target_sets.contains_key(name)
            || target::nodes(view).iter().any(|node| target::name(&view.name, node) == *name);
        if !ours && !of_target && *name != placement_record(&view.name) {
            desired.remove.push(Target { kind: "ConfigMap", name: name.clone(), uid: None });
        }
    }
}

/// Returns the key in the record that lists an instance's pools that have been made, separated by blanks. A pool that has
/// disappeared is never made again: its disk is not mounted.
#[must_use]
pub fn pools_key(instance: &str) -> String {
    format!("{instance}{POOLS_SUFFIX}")
}

/// Returns the pools in a record, by instance.
#[must_use]
pub fn recorded_pools(record: &BTreeMap<String, String>) -> BTreeMap<String, BTreeSet<String>> {
    let pools = |text: &String| text.split_whitespace().map(str::to_owned).collect();
    record
        .iter()
        .filter_map(|(key, text)| Some((key.strip_suffix(POOLS_SUFFIX)?.to_owned(), pools(text))))
        .collect()
}

/// Returns the pools of an instance that have been made, either recorded or currently served.
#[must_use]
pub fn made_pools(view: &View<'_>, instance: &str) -> BTreeSet<String> {
    let mut pools = view.observed.pools.get(instance).cloned().unwrap_or_default();
    if let Some(Report::Answered(report)) = view.observed.reports.get(instance) {
        pools.extend(report.pools.keys().cloned());
    }
    pools
}

fn placement_record_object(view: &View<'_>, removing: &[String], desired: &mut Desired) -> Value {
    let mut data = serde_json::Map::new();
    for (instance, seat) in view.seats.iter().filter(|(i, seat)| seat.bound && !removing.contains(i)) {
        // If the instance can move, moves write this key.
        if !view.movable() {
            data.insert(instance.clone(), seat.node.clone().into());
        }
        let pools = made_pools(view, instance);
        if !pools.is_empty() {
            data.insert(pools_key(instance), pools.into_iter().collect::<Vec<_>>().join(" ").into());
        }
    }
    // Keys that a person has written remain when the operator stops applying them, so they are removed by name.
    let movable: BTreeSet<String> = if view.movable() {
        view.seats.keys().filter(|i| !removing.contains(i)).cloned().collect()
    } else {
        BTreeSet::new()
    };
    let kept =
        |key: &String| data.contains_key(key) || record::is_kept(key) || record::is_of_moves(key, &movable);
    desired.forget = view.observed.recorded.iter().filter(|key| !kept(key)).cloned().collect();
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": placement_record(&view.name),
            "namespace": view.settings.namespace,
            // No owner: if volumes are retained, the record is needed to find them again.
            "labels": labels(&view.name, None),
        },
        "data": data,
    })
}

pub(super) fn seccomp(profile: &str) -> Value {
    match profile.strip_prefix("localhost/") {
        Some(file) => json!({ "type": "Localhost", "localhostProfile": file }),
        None => json!({ "type": profile }),
    }
}

pub(super) fn pull_policy(policy: PullPolicy) -> &'static str {
    match policy {
        PullPolicy::Always => "Always",
        PullPolicy::IfNotPresent => "IfNotPresent",
        PullPolicy::Never => "Never",
    }
}
