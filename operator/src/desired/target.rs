//! The bundled target: one pod on each node that holds namespaces, which exports them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use forebay_api::fabric::TargetBackend;
use forebay_api::names;
use forebay_nvmeof::HostIdentity;
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::ResourceExt as _;
use serde::Serialize;
use serde_json::{Value, json};

use super::objects::{ANNOTATION_CONFIGURATION, ANNOTATION_REVISION, hash, labels, pull_policy, seccomp};
use super::{Desired, Target, View, fabric, internal_ip};
use crate::placement::{self, Reason};

/// Service account of the target's pods. It is the servers' account, which has no rights.
use super::objects::SERVER_ACCOUNT;

const CONFIGURATION: &str = "/etc/forebay/target";
const FILE: &str = "target.toml";
/// Annotation on a target's objects: its node.
pub const ANNOTATION_TARGET: &str = "storage.forebay.io/target";

#[derive(Serialize, Default)]
struct File {
    target: Named,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<Metrics>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    port: Vec<Port>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    subsystem: Vec<Subsystem>,
}

/// The name, by which several targets on a node identify their own objects.
#[derive(Serialize, Default)]
struct Named {
    name: String,
}

#[derive(Serialize)]
struct Metrics {
    listen: String,
}

#[derive(Serialize, PartialEq, Eq)]
struct Port {
    transport: &'static str,
    address: String,
    service: u16,
}

#[derive(Serialize)]
struct Subsystem {
    nqn: String,
    hosts: Vec<String>,
    namespace: Vec<Namespace>,
}

#[derive(Serialize)]
struct Namespace {
    id: u32,
    uuid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    allow_volatile_cache: bool,
}

/// Returns the name of the objects of a cluster's target on a node. Node names contain dots and are long.
#[must_use]
pub fn name(cluster: &str, node: &str) -> String {
    format!("{cluster}-target-{}", &hash(&json!(node))[..8])
}

/// Returns the nodes that hold namespaces of this cluster.
#[must_use]
pub fn nodes(view: &View<'_>) -> BTreeSet<String> {
    let names: BTreeSet<&str> = view.cluster.spec.backends.iter().map(|b| b.name.as_str()).collect();
    let recorded = view.observed.record.places.iter();
    let mine = recorded.filter(|((i, b), _)| view.instances.contains(i) && names.contains(b.as_str()));
    mine.map(|(_, place)| place.node.clone()).collect()
}

/// Returns the host NQNs that an instance may use: those for every node that it may run on, including nodes that do not fit
/// now.
fn hosts(view: &View<'_>, instance: &str) -> Vec<String> {
    let never = |reason| {
        matches!(
            reason,
            Reason::SelectorMismatch
                | Reason::TaintNotTolerated
                | Reason::TopologyKeyMissing
                | Reason::RdmaMissing
                | Reason::DeviceNotSelected
                | Reason::WrongLinkLayer
                | Reason::PlatformMismatch
                | Reason::TooSmall
        )
    };
    // First its own node, then those that could take over now, because the list is truncated at the target's limit.
    let mut nodes: Vec<&placement::Verdict> = view.verdicts.iter().filter(|v| !never(v.reason)).collect();
    nodes.sort_by_key(|v| !v.fits());
    let own = view.seats.get(instance).map(|s| s.node.as_str());
    let others = nodes.iter().map(|v| v.node.as_str()).filter(|node| Some(*node) != own);
    // An instance is identified by names alone until it has moved once. The node that it left keeps that identity until its
    // server there has ended.
    let owned = view.observed.record.owners.contains_key(instance);
    let from = view.observed.record.moved.get(instance).map(|moved| moved.from.as_str());
    let identities = |node: &str| {
        let uid = &view.settings.cluster_uid;
        let by_names = !owned || uid.is_empty() || Some(node) == from;
        let plain = by_names.then(|| HostIdentity::of(instance, node).ok()).flatten();
        let full = HostIdentity::of_machine(uid, &machine_id(view, node), instance, node).ok();
        let full = full.filter(|_| !uid.is_empty());
        full.into_iter().chain(plain).map(|host| host.nqn().as_str().to_owned()).collect::<Vec<_>>()
    };
    let mut hosts: Vec<String> = own.into_iter().chain(others).flat_map(identities).take(HOSTS_MAX).collect();
    // Sorted, so that the order does not depend on which nodes are ready.
    hosts.sort_unstable();
    hosts
}

/// Returns the system UUID that a node's kubelet reports; empty if it reports none.
#[must_use]
pub fn machine_id(view: &View<'_>, node: &str) -> String {
    let found = view.observed.nodes.iter().find(|n| n.metadata.name.as_deref() == Some(node));
    let info = found.and_then(|n| n.status.as_ref()?.node_info.as_ref());
    info.map(|info| info.system_uuid.clone()).unwrap_or_default()
}

/// Returns the configuration file of a node's target. Only recorded namespaces are exported, so that no other node can hold
/// them later. Returns `None` if part of it is unknown now, because existing exports must not be removed for that.
fn file(view: &View<'_>, node: &str) -> Option<File> {
    let mut file = File { target: Named { name: name(&view.name, node) }, ..File::default() };
    for backend in &view.cluster.spec.backends {
        let Some(target) = &backend.target else { continue };
        for instance in &view.instances {
            let key = (instance.clone(), backend.name.clone());
            let Some(place) = view.observed.record.places.get(&key).filter(|p| p.node == node) else {
                continue;
            };
            let address = fabric::target_address(view, target, node)?;
            add_port(&mut file, target, address);
            let folder = target.nodes.iter().find(|n| n.name == node).and_then(|n| n.directory.as_ref());
            let path = folder.map(|folder| format!("{folder}/{}-{instance}.img", backend.name));
            if place.device.is_none() && path.is_none() {
                return None;
            }
            file.subsystem.push(Subsystem {
                nqn: fabric::nqn(view, instance, &backend.name),
                hosts: hosts(view, instance),
                namespace: vec![Namespace {
                    id: 1,
                    uuid: fabric::uuid(view, instance, &backend.name).to_string(),
                    size: place.device.is_none().then(|| format!("{}GiB", target.size_gib.unwrap_or(1))),
                    file: path.filter(|_| place.device.is_none()),
                    device: place.device.clone(),
                    allow_volatile_cache: target.allow_volatile_cache,
                }],
            });
        }
    }
    (!file.subsystem.is_empty()).then_some(file)
}

fn add_port(file: &mut File, target: &TargetBackend, address: IpAddr) {
    let port =
        Port { transport: target.transport.as_str(), address: address.to_string(), service: target.port };
    if !file.port.contains(&port) {
        file.port.push(port);
    }
}

fn metrics_port(view: &View<'_>) -> u16 {
    view.cluster.spec.backends.iter().find_map(|b| Some(b.target.as_ref()?.metrics_port)).unwrap_or(9447)
}

/// Adds the objects of all targets, and ends targets that are no longer wanted.
pub fn objects(view: &View<'_>, desired: &mut Desired) {
    let nodes = nodes(view);
    for node in &nodes {
        if let Some(file) = file(view, node) {
            desired.objects.extend(offering(view, node, file));
        }
    }
    for (name, set) in &view.observed.target_sets {
        let node = node_of(set);
        if !nodes.contains(&node) {
            end(view, name, &node, set, desired);
        }
    }
}

fn node_of(set: &StatefulSet) -> String {
    set.annotations().get(ANNOTATION_TARGET).cloned().unwrap_or_default()
}

/// Ends the targets of a cluster that is being deleted; each target first removes its exports. Returns whether all are gone.
pub fn tear_down(view: &View<'_>, desired: &mut Desired) -> bool {
    for (name, set) in &view.observed.target_sets {
        end(view, name, &node_of(set), set, desired);
    }
    view.observed.target_sets.is_empty()
}

fn end(view: &View<'_>, name: &str, node: &str, set: &StatefulSet, desired: &mut Desired) {
    let found = view.observed.nodes.iter().find(|n| n.metadata.name.as_deref() == Some(node));
    let lives = found.is_some_and(|n| placement::is_ready(n));
    let wanted = removing(view, node);
    let revision = &wanted["spec"]["template"]["metadata"]["annotations"][ANNOTATION_REVISION];
    // Ready in this revision means that the kernel no longer exports anything.
    let empty = view.observed.target_pods.iter().any(|pod| {
        pod.name_any() == format!("{name}-0")
            && pod.annotations().get(ANNOTATION_REVISION).map(String::as_str) == revision.as_str()
            && super::status::pod_ready_since(pod).is_some()
    });
    if lives && !empty {
        desired.objects.push(wanted);
        return;
    }
    desired.remove.push(Target { kind: "StatefulSet", name: name.to_owned(), uid: set.uid() });
    desired.remove.push(Target { kind: "ConfigMap", name: name.to_owned(), uid: None });
}

/// Maximum number of host NQNs.
const HOSTS_MAX: usize = 256;
const PROGRAM: &str = "/usr/local/bin/forebay-target";

/// Returns the ConfigMap and the StatefulSet of a target.
fn offering(view: &View<'_>, node: &str, mut file: File) -> [Value; 2] {
    let port = metrics_port(view);
    let found = view.observed.nodes.iter().find(|n| n.metadata.name.as_deref() == Some(node));
    let six = found.and_then(|n| internal_ip(n)).is_some_and(|ip| ip.contains(':'));
    let any = if six { "[::]" } else { "0.0.0.0" };
    file.metrics = Some(Metrics { listen: format!("{any}:{port}") });
    let text = toml::to_string(&file).expect("strings, numbers and lists are TOML");
    let path = format!("{CONFIGURATION}/{FILE}");
    let probe = |path: &str, period: u32, failures: u32| {
        json!({
            "httpGet": { "path": path, "port": port, "scheme": "HTTP" },
            "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures,
        })
    };
    let mut container = container(view, node, "target", &[PROGRAM, "--config", &path]);
    container["ports"] = json!([{ "name": "metrics", "containerPort": port, "protocol": "TCP" }]);
    container["startupProbe"] = probe("/healthz", 2, 60);
    container["livenessProbe"] = probe("/healthz", 30, 6);
    container["readinessProbe"] = probe("/readyz", 3, 3);
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(view, node), "data": { (FILE): text },
    });
    // A new pod reads its file immediately. For a running pod, the kubelet takes a minute to update the file, and the pod
    // then applies it. That is soon enough for hosts: nodes are added and removed, and that must not restart the target's
    // pod.
    for subsystem in &mut file.subsystem {
        subsystem.hosts.clear();
    }
    let lasting = toml::to_string(&file).expect("strings, numbers and lists are TOML");
    [map, stateful_set(view, node, &hash(&json!(lasting)), json!({ "containers": [container] }))]
}

/// Returns the StatefulSet of a target to be removed, with an unchanged ConfigMap. An init container removes all exports,
/// and only then does the pod become ready.
fn removing(view: &View<'_>, node: &str) -> Value {
    let path = format!("{CONFIGURATION}/{FILE}");
    let remove = container(view, node, "remove", &[PROGRAM, "--config", &path, "remove"]);
    let rest = container(view, node, "target", &["/bin/sleep", "infinity"]);
    stateful_set(view, node, "removed", json!({ "initContainers": [remove], "containers": [rest] }))
}

fn metadata(view: &View<'_>, node: &str) -> Value {
    let name = name(&view.name, node);
    let mut labels = labels(&view.name, None);
    labels["app.kubernetes.io/component"] = names::COMPONENT_TARGET.into();
    json!({
        "name": name,
        "namespace": view.settings.namespace,
        // No owner, as for servers: their pools are stored here.
        "labels": labels,
        "annotations": { (ANNOTATION_TARGET): node },
    })
}

/// Returns the directories of a node's files, by the names of their volumes.
fn folders(view: &View<'_>, node: &str) -> BTreeMap<String, String> {
    let targets = view.cluster.spec.backends.iter().filter_map(|b| b.target.as_ref());
    let of = |target: &TargetBackend| {
        target.nodes.iter().find(|n| n.name == node).and_then(|n| n.directory.clone())
    };
    targets.filter_map(of).map(|f| (format!("files-{}", hash(&json!(f))), f)).collect()
}

fn container(view: &View<'_>, node: &str, name: &str, command: &[&str]) -> Value {
    let mut mounts = vec![
        json!({ "name": "config", "mountPath": CONFIGURATION, "readOnly": true }),
        json!({ "name": "dev", "mountPath": "/dev" }),
        // The node may mount configfs only when the module is loaded.
        json!({ "name": "configfs", "mountPath": "/sys/kernel/config", "mountPropagation": "HostToContainer" }),
        json!({ "name": "modules", "mountPath": "/lib/modules", "readOnly": true }),
        json!({ "name": "state", "mountPath": "/var/lib/forebay-target" }),
    ];
    mounts.extend(folders(view, node).iter().map(|(volume, at)| json!({ "name": volume, "mountPath": at })));
    let of_node = |t: &&TargetBackend| t.nodes.iter().any(|n| n.name == node);
    let mut targets = view.cluster.spec.backends.iter().filter_map(|b| b.target.as_ref()).filter(of_node);
    let resources = targets.find_map(|t| t.resources.as_ref());
    json!({
        "name": name,
        "resources": resources.map_or_else(|| json!({ "requests": { "cpu": "50m", "memory": "64Mi" } }), |r| json!(r)),
        "image": view.image(),
        "imagePullPolicy": pull_policy(view.cluster.spec.image_pull_policy),
        "command": command,
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        // The kernel's target is configured by writing to configfs and by loading modules, and uses devices of the node.
        "securityContext": { "runAsUser": 0, "readOnlyRootFilesystem": true, "privileged": true },
    })
}

fn stateful_set(view: &View<'_>, node: &str, configuration: &str, containers: Value) -> Value {
    let spec = &view.cluster.spec;
    let metadata = metadata(view, node);
    let name = metadata["name"].clone();
    let mut pod_labels = metadata["labels"].clone();
    pod_labels["storage.forebay.io/target"] = name.clone();
    let host = |name: &str, path: &str, kind: &str| json!({ "name": name, "hostPath": { "path": path, "type": kind } });
    let mut volumes = vec![
        json!({ "name": "config", "configMap": { "name": name, "defaultMode": 0o444 } }),
        host("dev", "/dev", "Directory"),
        host("configfs", "/sys/kernel/config", "Directory"),
        host("modules", "/lib/modules", "Directory"),
        host("state", "/var/lib/forebay-target", "DirectoryOrCreate"),
    ];
    volumes.extend(folders(view, node).iter().map(|(volume, at)| host(volume, at, "DirectoryOrCreate")));
    let mut pod = containers;
    let rest = json!({
        "serviceAccountName": SERVER_ACCOUNT,
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "hostNetwork": true,
        "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": 30,
        "securityContext": { "seccompProfile": seccomp(&view.settings.seccomp_profile) },
        "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [
            { "matchFields": [{ "key": "metadata.name", "operator": "In", "values": [node] }] },
        ] } } },
        // The pod belongs to its node regardless of the node's state: its namespaces exist there and nowhere else.
        "tolerations": [{ "operator": "Exists" }],
        "volumes": volumes,
    });
    for (key, value) in rest.as_object().into_iter().flatten() {
        pod[key.as_str()] = value.clone();
    }
    if !view.settings.priority_class.is_empty() {
        pod["priorityClassName"] = view.settings.priority_class.clone().into();
    }
    if !spec.image_pull_secrets.is_empty() {
        pod["imagePullSecrets"] = json!(spec.image_pull_secrets);
    }
    let mut template = json!({
        "metadata": { "labels": pod_labels, "annotations": { (ANNOTATION_CONFIGURATION): configuration } },
        "spec": pod,
    });
    let revision = hash(&template);
    template["metadata"]["annotations"][ANNOTATION_REVISION] = revision.into();
    json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "serviceName": name,
            // Exports are in the kernel and continue to work without the pod.
            "updateStrategy": { "type": "RollingUpdate" },
            "revisionHistoryLimit": 2,
            "selector": { "matchLabels": { "storage.forebay.io/target": name } },
            "template": template,
        },
    })
}
