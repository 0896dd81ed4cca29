//! The bundled target: on each node that holds namespaces a pod that offers them.

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

/// Service account of the target's pods: that of the servers, which has no rights.
use super::objects::SERVER_ACCOUNT;

const CONFIGURATION: &str = "/etc/forebay/target";
const FILE: &str = "target.toml";
/// Annotation on a target's objects: its node.
pub const ANNOTATION_TARGET: &str = "storage.forebay.io/target";

#[derive(Serialize, Default)]
struct File {
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<Metrics>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    port: Vec<Port>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    subsystem: Vec<Subsystem>,
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
}

/// Name of what belongs to a cluster's target on a node. Nodes' names have dots and are long.
#[must_use]
pub fn name(cluster: &str, node: &str) -> String {
    format!("{cluster}-target-{}", &hash(&json!(node))[..8])
}

/// Nodes that hold namespaces of this cluster.
#[must_use]
pub fn nodes(view: &View<'_>) -> BTreeSet<String> {
    let names: BTreeSet<&str> = view.cluster.spec.backends.iter().map(|b| b.name.as_str()).collect();
    let recorded = view.observed.record.places.iter();
    let mine = recorded.filter(|((i, b), _)| view.instances.contains(i) && names.contains(b.as_str()));
    mine.map(|(_, place)| place.node.clone()).collect()
}

/// Host NQNs that an instance may come with: of every node that it may run on, also of those that do not fit just now.
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
        )
    };
    let mut nodes: BTreeSet<&str> =
        view.verdicts.iter().filter(|v| !never(v.reason)).map(|v| v.node.as_str()).collect();
    nodes.extend(view.seats.get(instance).map(|s| s.node.as_str()));
    nodes.iter().filter_map(|n| Some(HostIdentity::of(instance, n).ok()?.nqn().as_str().to_owned())).collect()
}

/// The file of a node's target. Only what is recorded is offered: nobody else may come to hold it later.
fn file(view: &View<'_>, node: &str) -> File {
    let mut file = File::default();
    for backend in &view.cluster.spec.backends {
        let Some(target) = &backend.target else { continue };
        for instance in &view.instances {
            let key = (instance.clone(), backend.name.clone());
            let Some(place) = view.observed.record.places.get(&key).filter(|p| p.node == node) else {
                continue;
            };
            let Some(address) = fabric::target_address(view, target, node) else { continue };
            add_port(&mut file, target, address);
            let folder = target.nodes.iter().find(|n| n.name == node).and_then(|n| n.directory.as_ref());
            let path = folder.map(|folder| format!("{folder}/{}-{instance}.img", backend.name));
            if place.device.is_none() && path.is_none() {
                continue;
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
                }],
            });
        }
    }
    file
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

/// The objects of all targets, and what ought not to be any more.
pub fn objects(view: &View<'_>, desired: &mut Desired) {
    let nodes = nodes(view);
    for node in &nodes {
        push(view, node, file(view, node), desired);
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

/// Ends the targets of a cluster that goes: each is told first to offer nothing. Whether all are gone.
pub fn tear_down(view: &View<'_>, desired: &mut Desired) -> bool {
    for (name, set) in &view.observed.target_sets {
        end(view, name, &node_of(set), set, desired);
    }
    view.observed.target_sets.is_empty()
}

fn end(view: &View<'_>, name: &str, node: &str, set: &StatefulSet, desired: &mut Desired) {
    let found = view.observed.nodes.iter().find(|n| n.metadata.name.as_deref() == Some(node));
    let lives = found.is_some_and(|n| placement::is_ready(n));
    let wanted = objects_of(view, node, File::default());
    let revision = &wanted[1]["spec"]["template"]["metadata"]["annotations"][ANNOTATION_REVISION];
    // Ready in this revision means that the kernel offers nothing any more.
    let empty = view.observed.target_pods.iter().any(|pod| {
        pod.name_any() == format!("{name}-0")
            && pod.annotations().get(ANNOTATION_REVISION).map(String::as_str) == revision.as_str()
            && super::status::pod_ready_since(pod).is_some()
    });
    if lives && !empty {
        desired.objects.extend(wanted);
        return;
    }
    desired.remove.push(Target { kind: "StatefulSet", name: name.to_owned(), uid: set.uid() });
    desired.remove.push(Target { kind: "ConfigMap", name: name.to_owned(), uid: None });
}

fn push(view: &View<'_>, node: &str, file: File, desired: &mut Desired) {
    desired.objects.extend(objects_of(view, node, file));
}

fn objects_of(view: &View<'_>, node: &str, mut file: File) -> [Value; 2] {
    let spec = &view.cluster.spec;
    let port = metrics_port(view);
    let found = view.observed.nodes.iter().find(|n| n.metadata.name.as_deref() == Some(node));
    let six = found.and_then(|n| internal_ip(n)).is_some_and(|ip| ip.contains(':'));
    let any = if six { "[::]" } else { "0.0.0.0" };
    file.metrics = Some(Metrics { listen: format!("{any}:{port}") });
    let text = toml::to_string(&file).expect("strings, numbers and lists are TOML");
    let name = name(&view.name, node);
    let mut labels = labels(&view.name, None);
    labels["app.kubernetes.io/component"] = names::COMPONENT_TARGET.into();
    let metadata = json!({
        "name": name,
        "namespace": view.settings.namespace,
        // No owner, as with servers: their pools lie here.
        "labels": labels,
        "annotations": { (ANNOTATION_TARGET): node },
    });
    let mut pod_labels = labels.clone();
    pod_labels["storage.forebay.io/target"] = name.clone().into();
    let probe = |path: &str, period: u32, failures: u32| {
        json!({
            "httpGet": { "path": path, "port": port, "scheme": "HTTP" },
            "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures,
        })
    };
    let mut mounts = vec![
        json!({ "name": "config", "mountPath": CONFIGURATION, "readOnly": true }),
        json!({ "name": "dev", "mountPath": "/dev" }),
        // It may be mounted on the node only when the module is loaded.
        json!({ "name": "configfs", "mountPath": "/sys/kernel/config", "mountPropagation": "HostToContainer" }),
        json!({ "name": "modules", "mountPath": "/lib/modules", "readOnly": true }),
        json!({ "name": "state", "mountPath": "/var/lib/forebay-target" }),
    ];
    let host = |name: &str, path: &str, kind: &str| json!({ "name": name, "hostPath": { "path": path, "type": kind } });
    let mut volumes = vec![
        json!({ "name": "config", "configMap": { "name": name, "defaultMode": 0o444 } }),
        host("dev", "/dev", "Directory"),
        host("configfs", "/sys/kernel/config", "Directory"),
        host("modules", "/lib/modules", "Directory"),
        host("state", "/var/lib/forebay-target", "DirectoryOrCreate"),
    ];
    let mut folders: BTreeMap<String, String> = BTreeMap::new();
    for target in spec.backends.iter().filter_map(|b| b.target.as_ref()) {
        let folder = target.nodes.iter().find(|n| n.name == node).and_then(|n| n.directory.clone());
        folders.extend(folder.map(|f| (format!("files-{}", hash(&json!(f))), f)));
    }
    for (volume, folder) in &folders {
        mounts.push(json!({ "name": volume, "mountPath": folder }));
        volumes.push(host(volume, folder, "DirectoryOrCreate"));
    }
    let mut pod = json!({
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
        // It belongs to its node whatever becomes of that: what it offers is there and nowhere else.
        "tolerations": [{ "operator": "Exists" }],
        "containers": [{
            "name": "target",
            "image": view.image(),
            "imagePullPolicy": pull_policy(spec.image_pull_policy),
            "command": ["/usr/local/bin/forebay-target", "--config", format!("{CONFIGURATION}/{FILE}")],
            "ports": [{ "name": "metrics", "containerPort": port, "protocol": "TCP" }],
            "volumeMounts": mounts,
            "startupProbe": probe("/healthz", 2, 60),
            "livenessProbe": probe("/healthz", 30, 6),
            "readinessProbe": probe("/readyz", 3, 3),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            // The kernel's target is made by writing to configfs and by loading modules, from devices of the node.
            "securityContext": { "runAsUser": 0, "readOnlyRootFilesystem": true, "privileged": true },
        }],
        "volumes": volumes,
    });
    if !view.settings.priority_class.is_empty() {
        pod["priorityClassName"] = view.settings.priority_class.clone().into();
    }
    if !spec.image_pull_secrets.is_empty() {
        pod["imagePullSecrets"] = json!(spec.image_pull_secrets);
    }
    let mut template = json!({
        "metadata": {
            "labels": pod_labels,
            // A pod that is made anew reads its file at once; the kubelet takes a minute to change it under a pod.
            "annotations": { (ANNOTATION_CONFIGURATION): hash(&json!(text)) },
        },
        "spec": pod,
    });
    let revision = hash(&template);
    template["metadata"]["annotations"][ANNOTATION_REVISION] = revision.into();
    let map =
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": { (FILE): text } });
    let set = json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "serviceName": name,
            // What is offered is in the kernel and goes on without the pod.
            "updateStrategy": { "type": "RollingUpdate" },
            "revisionHistoryLimit": 2,
            "selector": { "matchLabels": { "storage.forebay.io/target": name } },
            "template": template,
        },
    });
    [map, set]
}
