//! The objects of a cluster as manifests.

use std::collections::{BTreeMap, BTreeSet};

use forebay_api::cluster::{
    BackendKind, Network, PullPolicy, QuotaKind, ReclaimPolicy, Transport, VolumeProtection,
};
use forebay_api::cluster::{StorageClassTemplate, StorageClusterSpec};
use forebay_api::{DRIVER, names};
use kube::ResourceExt as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::configuration::{self, CERTIFICATES, CONFIGURATION, KEYS, KEYS_TLS, POOLS};
use super::{Desired, Report, Target, View, budgets, fabric, rdma, record, target};

/// Annotation on every object that is applied: hash of the manifest, so that what is as it ought to be is left alone.
pub const ANNOTATION_APPLIED: &str = "storage.forebay.io/applied";
/// Annotation on a pod's template, and so on its pod: hash of the template. A pod with another one is out of date.
pub const ANNOTATION_REVISION: &str = "storage.forebay.io/revision";
/// Annotation on a pod's template: hash of the server's configuration, so that a change restarts it.
pub const ANNOTATION_CONFIGURATION: &str = "storage.forebay.io/configuration";
/// Field manager of everything the operator applies.
pub const FIELD_MANAGER: &str = "forebay-operator";
/// Service account of the servers, of the chart.
pub const SERVER_ACCOUNT: &str = "forebay-server";
/// Keys of the ConfigMap of an instance.
pub const CONFIGURATION_KEY: &str = "server.toml";
/// Capabilities of a server (docs/reference/server.md says what each is for).
pub const CAPABILITIES: [&str; 4] = ["DAC_OVERRIDE", "FOWNER", "NET_BIND_SERVICE", "SYS_ADMIN"];
/// What a server needs beside them to have an address of its own.
pub const CAPABILITIES_ADDRESS: [&str; 2] = ["NET_ADMIN", "NET_RAW"];
/// What a server needs beside them to have memory registered with RDMA devices beyond the limit for locked memory.
pub const CAPABILITY_RDMA: &str = "IPC_LOCK";
/// Annotation on the pod's template of an instance that can move: its epoch.
pub const ANNOTATION_EPOCH: &str = "storage.forebay.io/epoch";
const POOLS_SUFFIX: &str = ".pools";
/// Seconds that a server has beyond the drain for its own end.
const GRACE_SECONDS: u32 = 30;
/// Seconds that a server has for its own start: mounting, and replaying the log of a file system, beside what it waits for.
const STARTUP_SECONDS: u32 = 300;

pub use forebay_api::names::placement_record;

/// Name of the ConfigMap with an instance's configuration.
#[must_use]
pub fn configuration_map(instance: &str) -> String {
    format!("{instance}-config")
}

/// The same for the instance's present epoch. That of an earlier one stays as it was for the pod that has it: a server
/// that is started again with it is the older one, and steps back.
#[must_use]
pub fn configuration_of(view: &View<'_>, instance: &str) -> String {
    if view.movable() {
        return format!("{}-{}", configuration_map(instance), view.epoch(instance));
    }
    configuration_map(instance)
}

/// Every port that an instance listens on.
#[must_use]
pub fn ports(network: &Network) -> Vec<u16> {
    let p = &network.ports;
    vec![p.smb, p.smb_direct, p.admin, p.metrics]
}

/// Hash of a manifest, in hexadecimal.
#[must_use]
pub fn hash(value: &Value) -> String {
    // Sixteen bytes tell any two manifests apart.
    Sha256::digest(value.to_string().as_bytes()).iter().take(16).map(|b| format!("{b:02x}")).collect()
}

/// Labels of everything made for a cluster.
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

/// Everything that ought to be, and what ought not to be any more.
pub fn objects(view: &View<'_>, removing: &[String], desired: &mut Desired) {
    let record = placement_record_object(view, removing, desired);
    desired.objects.push(record);
    for instance in view.instances.iter().filter(|i| !removing.contains(i)) {
        instance_objects(view, instance, desired);
    }
    target::objects(view, desired);
    budgets::objects(view, desired);
    for template in &view.cluster.spec.storage_classes {
        storage_class(view, template, desired);
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

/// Key in the record that lists the pools of an instance that have been made, with blanks between their names.
/// A pool that is not there any more is never made again: its disk is not mounted.
#[must_use]
pub fn pools_key(instance: &str) -> String {
    format!("{instance}{POOLS_SUFFIX}")
}

/// The pools that a record tells of, by instance.
#[must_use]
pub fn recorded_pools(record: &BTreeMap<String, String>) -> BTreeMap<String, BTreeSet<String>> {
    let pools = |text: &String| text.split_whitespace().map(str::to_owned).collect();
    record
        .iter()
        .filter_map(|(key, text)| Some((key.strip_suffix(POOLS_SUFFIX)?.to_owned(), pools(text))))
        .collect()
}

/// Pools of an instance that have been made: recorded, or served now.
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
        // Written by moves where it can move.
        if !view.movable() {
            data.insert(instance.clone(), seat.node.clone().into());
        }
        let pools = made_pools(view, instance);
        if !pools.is_empty() {
            data.insert(pools_key(instance), pools.into_iter().collect::<Vec<_>>().join(" ").into());
        }
    }
    // What a person has written stays when the operator does not apply it any more, so it is taken out by name.
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
            // No owner: where volumes are retained it is needed to find them again.
            "labels": labels(&view.name, None),
        },
        "data": data,
    })
}

fn metadata(view: &View<'_>, name: &str, instance: &str) -> Value {
    json!({
        "name": name,
        "namespace": view.settings.namespace,
        // No owner: `kubectl delete --cascade=foreground` would have the garbage collector end servers that hold volumes.
        "labels": labels(&view.name, Some(instance)),
    })
}

fn instance_objects(view: &View<'_>, instance: &str, desired: &mut Desired) {
    if !view.cluster.spec.network.host_network {
        desired.objects.push(service(view, instance));
    }
    let Some(seat) = view.seats.get(instance) else {
        // What was placed before and has no node now must not keep its pod there. Where one that can move is, is known in
        // a moment.
        if !view.movable()
            && let Some(set) = view.observed.stateful_sets.get(instance)
        {
            desired.remove.push(Target { kind: "StatefulSet", name: instance.to_owned(), uid: set.uid() });
        }
        return;
    };
    // The Service's address comes with the next reconciliation; without certificates the server would not start.
    let Some(address) = view.node_address(instance).and_then(|a| a.parse().ok()) else { return };
    if !fabric::missing(view, instance).is_empty() {
        return;
    }
    if !view.observed.certificates.issued.iter().any(|i| i == instance) {
        return;
    }
    let file = configuration::file(view, instance, address, &made_pools(view, instance));
    let mut map_metadata = metadata(view, &configuration_of(view, instance), instance);
    map_metadata["annotations"] = json!({ (names::ANNOTATION_NODE): seat.node });
    let template = template(view, instance, &seat.node, address);
    desired.objects.push(json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": map_metadata,
        "data": { (CONFIGURATION_KEY): file },
    }));
    desired.objects.push(stateful_set(view, instance, &seat.node, &template));
}

fn service(view: &View<'_>, instance: &str) -> Value {
    let p = &view.cluster.spec.network.ports;
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(view, instance, instance),
        "spec": {
            "type": "ClusterIP",
            "selector": { (names::LABEL_INSTANCE): instance },
            // The admin API is asked for the reason while an instance is not ready.
            "publishNotReadyAddresses": true,
            "ports": [
                { "name": "smb", "port": p.smb, "targetPort": p.smb, "protocol": "TCP" },
                { "name": "admin", "port": p.admin, "targetPort": p.admin, "protocol": "TCP" },
                { "name": "metrics", "port": p.metrics, "targetPort": p.metrics, "protocol": "TCP" },
            ],
        },
    })
}

fn stateful_set(view: &View<'_>, instance: &str, node: &str, template: &Value) -> Value {
    let mut metadata = metadata(view, instance, instance);
    metadata["annotations"] = json!({ (names::ANNOTATION_NODE): node });
    json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "serviceName": instance,
            "podManagementPolicy": "OrderedReady",
            "updateStrategy": { "type": "OnDelete" },
            "revisionHistoryLimit": 2,
            "selector": { "matchLabels": { (names::LABEL_INSTANCE): instance } },
            "template": template,
        },
    })
}

/// The revision that an instance's pod ought to have, if known.
#[must_use]
pub fn revision(view: &View<'_>, instance: &str) -> Option<String> {
    let seat = view.seats.get(instance)?;
    let address = view.node_address(instance)?.parse().ok()?;
    let template = template(view, instance, &seat.node, address);
    template["metadata"]["annotations"][ANNOTATION_REVISION].as_str().map(str::to_owned)
}

fn template(view: &View<'_>, instance: &str, node: &str, address: std::net::IpAddr) -> Value {
    let spec = &view.cluster.spec;
    let ports = &spec.network.ports;
    let probe = |path: &str, period: u32, failures: u32| {
        json!({
            "httpGet": { "path": path, "port": ports.metrics, "scheme": "HTTP" },
            "periodSeconds": period,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        })
    };
    let mut mounts = vec![
        json!({ "name": "config", "mountPath": CONFIGURATION, "readOnly": true }),
        json!({ "name": "tls", "mountPath": CERTIFICATES, "readOnly": true }),
        json!({ "name": "run", "mountPath": "/run/forebay" }),
    ];
    let mut volumes = vec![
        json!({ "name": "config", "configMap": { "name": configuration_of(view, instance), "defaultMode": 0o444 } }),
        json!({ "name": "tls", "secret": { "secretName": names::server_secret(instance), "defaultMode": 0o400 } }),
        json!({ "name": "run", "emptyDir": { "medium": "Memory", "sizeLimit": "16Mi" } }),
    ];
    for backend in &spec.backends {
        match backend.kind {
            BackendKind::Directory => {
                let Some(directory) = &backend.directory else { continue };
                let kind = if directory.create { "DirectoryOrCreate" } else { "Directory" };
                let name = format!("pool-{}", hash(&json!(backend.name)));
                mounts.push(json!({ "name": name, "mountPath": format!("{POOLS}/{}", backend.name) }));
                volumes.push(json!({ "name": name, "hostPath": { "path": directory.path, "type": kind } }));
            }
            BackendKind::NVMeoF | BackendKind::Target => {
                // The server mounts the pool there, for itself alone: it is unmounted with the container.
                let name = format!("pool-{}", hash(&json!(backend.name)));
                mounts.push(json!({ "name": name, "mountPath": format!("{POOLS}/{}", backend.name) }));
                volumes.push(json!({ "name": name, "emptyDir": { "sizeLimit": "1Mi" } }));
                let nvmeof = backend.nvmeof.as_ref();
                let keys = nvmeof.and_then(|b| b.dhchap_secret.as_ref()).map(|s| ("keys", KEYS, &s.name));
                let psk = nvmeof.and_then(|b| b.tls_secret.as_ref()).map(|s| ("psk", KEYS_TLS, &s.name));
                for (prefix, folder, secret) in keys.into_iter().chain(psk) {
                    let name = format!("{prefix}-{}", hash(&json!(backend.name)));
                    let at = format!("{folder}/{}", backend.name);
                    mounts.push(json!({ "name": name, "mountPath": at, "readOnly": true }));
                    volumes.push(
                        json!({ "name": name, "secret": { "secretName": secret, "defaultMode": 0o400 } }),
                    );
                }
            }
        }
    }
    if spec.uses_fabric() {
        mounts.push(json!({ "name": "dev", "mountPath": "/dev" }));
        volumes.push(json!({ "name": "dev", "hostPath": { "path": "/dev", "type": "Directory" } }));
    }
    let mut container = json!({
        "name": "server",
        "image": view.image(),
        "imagePullPolicy": pull_policy(spec.image_pull_policy),
        "command": [
            "/usr/local/bin/forebay-server", "run", "--config", format!("{CONFIGURATION}/{CONFIGURATION_KEY}"),
        ],
        "ports": [
            { "name": "smb", "containerPort": ports.smb, "protocol": "TCP" },
            { "name": "admin", "containerPort": ports.admin, "protocol": "TCP" },
            { "name": "metrics", "containerPort": ports.metrics, "protocol": "TCP" },
        ],
        "volumeMounts": mounts,
        "startupProbe": probe("/healthz", 2, startup_seconds(view, instance).div_ceil(2)),
        "livenessProbe": probe("/healthz", 30, 6),
        "readinessProbe": probe("/readyz", 5, 3),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "runAsUser": 0,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"], "add": CAPABILITIES },
        },
    });
    container["resources"] = match &spec.limits.resources {
        Some(resources) => json!(resources),
        // Without any request a server would be the first to be evicted where memory runs short.
        None => json!({ "requests": { "cpu": "100m", "memory": "256Mi" } }),
    };
    if rdma::wanted(view, instance) {
        for kind in ["requests", "limits"] {
            container["resources"][kind][names::RESOURCE_RDMA] = "1".into();
        }
        let address = CAPABILITIES_ADDRESS.iter().filter(|_| !spec.network.addresses.is_empty());
        let capabilities = CAPABILITIES.iter().chain([&CAPABILITY_RDMA]).chain(address).collect::<Vec<_>>();
        container["securityContext"]["capabilities"]["add"] = json!(capabilities);
    } else if !spec.network.addresses.is_empty() {
        let capabilities = CAPABILITIES.iter().chain(&CAPABILITIES_ADDRESS).collect::<Vec<_>>();
        container["securityContext"]["capabilities"]["add"] = json!(capabilities);
    }
    if spec.uses_fabric() {
        // Namespaces are devices that come and go while the container runs: no list of devices could name them.
        container["securityContext"] =
            json!({ "runAsUser": 0, "readOnlyRootFilesystem": true, "privileged": true });
    }
    let mut pod = json!({
        "serviceAccountName": SERVER_ACCOUNT,
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "hostNetwork": spec.network.host_network,
        "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": spec.upgrade.drain_timeout_seconds + GRACE_SECONDS,
        "securityContext": { "seccompProfile": seccomp(&view.settings.seccomp_profile) },
        "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [
            { "matchFields": [{ "key": "metadata.name", "operator": "In", "values": [node] }] },
        ] } } },
        "tolerations": tolerations(spec),
        "containers": [container],
        "volumes": volumes,
    });
    if !view.settings.priority_class.is_empty() {
        pod["priorityClassName"] = view.settings.priority_class.clone().into();
    }
    if !spec.image_pull_secrets.is_empty() {
        pod["imagePullSecrets"] = json!(spec.image_pull_secrets);
    }
    // As if no pool had been made: that one exists now is no reason for a restart.
    let file = configuration::file(view, instance, address, &BTreeSet::new());
    let mut annotations = json!({ (ANNOTATION_CONFIGURATION): hash(&json!(file)) });
    if let Some(attachment) = &spec.network.attachment {
        annotations["k8s.v1.cni.cncf.io/networks"] = attachment.clone().into();
    }
    if view.movable() {
        annotations[ANNOTATION_EPOCH] = view.epoch(instance).to_string().into();
    }
    let mut template = json!({
        "metadata": { "labels": labels(&view.name, Some(instance)), "annotations": annotations },
        "spec": pod,
    });
    let revision = hash(&template);
    template["metadata"]["annotations"][ANNOTATION_REVISION] = revision.into();
    template
}

/// How long a server may take until it answers: it waits for each of its namespaces to appear and for its reservation, one pool after
/// the other, and then for its address, which the server before may have still.
fn startup_seconds(view: &View<'_>, instance: &str) -> u32 {
    let fabrics = view.cluster.spec.backends.iter().filter(|b| b.is_on_fabric());
    let found = fabrics.filter_map(|b| fabric::of(view, instance, b).ok());
    let waits = found.map(|f| f.connect_time_s.saturating_mul(2).saturating_add(f.loss_time_s));
    waits.fold(STARTUP_SECONDS, u32::saturating_add)
}

/// The cluster's tolerations, and one for nodes that are away: an instance can run nowhere else, so evicting it does
/// not help.
fn tolerations(spec: &StorageClusterSpec) -> Value {
    let mut tolerations: Vec<Value> = spec.placement.tolerations.iter().map(|t| json!(t)).collect();
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        tolerations.push(json!({ "key": key, "operator": "Exists", "effect": "NoExecute" }));
    }
    tolerations.into()
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

/// Whether a StorageClass was made for this cluster.
#[must_use]
pub fn is_ours(view: &View<'_>, class: &k8s_openapi::api::storage::v1::StorageClass) -> bool {
    let labels = class.labels();
    let is = |key: &str, value: &str| labels.get(key).is_some_and(|v| v == value);
    is(names::LABEL_MANAGED_BY, names::MANAGED_BY_OPERATOR)
        && is(names::LABEL_CLUSTER, &view.name)
        && is(names::LABEL_CLUSTER_NAMESPACE, &view.settings.namespace)
}

fn storage_class(view: &View<'_>, template: &StorageClassTemplate, desired: &mut Desired) {
    let wanted = storage_class_object(view, template);
    if let Some(found) = view.observed.storage_classes.get(&template.name) {
        if !is_ours(view, found) {
            return;
        }
        // These fields cannot be changed: the class is recreated.
        let found_now = json!({
            "parameters": found.parameters, "reclaimPolicy": found.reclaim_policy, "provisioner": found.provisioner,
            "mountOptions": found.mount_options.clone().unwrap_or_default(),
        });
        let differs = ["parameters", "reclaimPolicy", "provisioner", "mountOptions"]
            .iter()
            .any(|field| found_now[field] != wanted[field]);
        if differs {
            desired.remove.push(Target {
                kind: "StorageClass",
                name: template.name.clone(),
                uid: found.uid(),
            });
        }
    }
    desired.objects.push(wanted);
}

fn storage_class_object(view: &View<'_>, template: &StorageClassTemplate) -> Value {
    let namespace = &view.settings.namespace;
    let mut parameters = json!({
        (names::PARAMETER_CLUSTER): view.name,
        (names::PARAMETER_CLUSTER_NAMESPACE): namespace,
        "csi.storage.k8s.io/node-stage-secret-name": names::volume_secret("${pv.name}"),
        "csi.storage.k8s.io/node-stage-secret-namespace": namespace,
        // A further fsGroup on a node is mounted when its pod is published.
        "csi.storage.k8s.io/node-publish-secret-name": names::volume_secret("${pv.name}"),
        "csi.storage.k8s.io/node-publish-secret-namespace": namespace,
    });
    if let Some(backend) = &template.backend {
        parameters["backend"] = backend.clone().into();
    }
    let protection = template.protection.map(|p| match p {
        VolumeProtection::Optional => "optional",
        VolumeProtection::Sign => "sign",
        VolumeProtection::Seal => "seal",
    });
    if let Some(protection) = protection {
        parameters["protection"] = protection.into();
    }
    // The driver's own default is auto, which asks the instance: only what is more than that is said.
    let transport = match view.cluster.spec.network.transport {
        Transport::Auto => None,
        Transport::RDMA => Some("rdma"),
        Transport::TCP => Some("tcp"),
    };
    if let Some(transport) = transport {
        parameters[names::PARAMETER_TRANSPORT] = transport.into();
    }
    if unlimited(&view.cluster.spec, template) {
        parameters["quota"] = "none".into();
    }
    for (key, value) in &template.parameters {
        parameters[key.as_str()] = value.clone().into();
    }
    let mut labels = labels(&view.name, None);
    labels[names::LABEL_CLUSTER_NAMESPACE] = namespace.clone().into();
    json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": template.name,
            "labels": labels,
            "annotations": { "storageclass.kubernetes.io/is-default-class": template.default.to_string() },
        },
        "provisioner": DRIVER,
        "reclaimPolicy": match template.reclaim_policy {
            ReclaimPolicy::Delete => "Delete",
            ReclaimPolicy::Retain => "Retain",
        },
        "volumeBindingMode": "Immediate",
        "allowVolumeExpansion": true,
        "mountOptions": template.mount_options,
        "parameters": parameters,
    })
}

/// Whether volumes of a class can have no limit, because no pool that may hold them enforces one.
fn unlimited(spec: &StorageClusterSpec, template: &StorageClassTemplate) -> bool {
    let mut fitting =
        spec.backends.iter().filter(|b| template.backend.as_ref().is_none_or(|name| *name == b.name));
    fitting.all(|b| b.directory.as_ref().is_some_and(|d| d.quota == QuotaKind::None))
}
