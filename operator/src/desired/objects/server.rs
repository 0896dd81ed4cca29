//! The objects of one instance: Service, ConfigMap, StatefulSet.

use std::collections::BTreeSet;

use forebay_api::cluster::{BackendKind, StorageClusterSpec};
use forebay_api::names;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::{
    ANNOTATION_CONFIGURATION, ANNOTATION_EPOCH, ANNOTATION_REVISION, CAPABILITIES, CAPABILITIES_ADDRESS,
    CAPABILITY_RDMA, CONFIGURATION_KEY, SERVER_ACCOUNT, configuration_of, hash, labels, made_pools,
    pull_policy, seccomp,
};
use crate::desired::configuration::{self, CERTIFICATES, CONFIGURATION, KEYS, KEYS_TLS, POOLS};
use crate::desired::{Desired, Target, View, fabric, rdma};

/// Seconds that a server has for its shutdown after the drain.
const GRACE_SECONDS: u32 = 30;

/// Seconds that a server has for its own startup, such as mounting and replaying a file system's log, besides what it waits
/// for.
const STARTUP_SECONDS: u32 = 300;

fn metadata(view: &View<'_>, name: &str, instance: &str) -> Value {
    json!({
        "name": name,
        "namespace": view.settings.namespace,
        // No owner: `kubectl delete --cascade=foreground` would make the garbage collector end servers that hold volumes.
        "labels": labels(&view.name, Some(instance)),
    })
}

pub(super) fn instance_objects(view: &View<'_>, instance: &str, desired: &mut Desired) {
    if !view.cluster.spec.network.host_network {
        desired.objects.push(service(view, instance));
    }
    let Some(seat) = view.seats.get(instance) else {
        // An instance that was placed before and has no node now must not keep its pod there. If it can move, its node will
        // be known in a moment.
        if !view.movable()
            && let Some(set) = view.observed.stateful_sets.get(instance)
        {
            desired.remove.push(Target { kind: "StatefulSet", name: instance.to_owned(), uid: set.uid() });
        }
        return;
    };
    // The Service's address is available in the next reconciliation. Without certificates the server would not start.
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
            // The operator queries the admin API for the reason while an instance is not ready.
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

/// Returns the revision that an instance's pod must have, if known.
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
                // The server mounts the pool there for its own container only, so the pool is unmounted with the container.
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
        // Without any request, a server would be the first pod to be evicted if memory runs short.
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
        // Namespaces are devices that appear and disappear while the container runs, so no device list can name them.
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
    // Computed as if no pool had been made, because a pool that exists now is no reason for a restart.
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

/// Returns how long a server can take until it responds. It waits for each of its namespaces to appear and for its
/// reservation, one pool after another, and then for its address, which the previous server may still have.
fn startup_seconds(view: &View<'_>, instance: &str) -> u32 {
    let fabrics = view.cluster.spec.backends.iter().filter(|b| b.is_on_fabric());
    let found = fabrics.filter_map(|b| fabric::of(view, instance, b).ok());
    let waits = found.map(|f| f.connect_time_s.saturating_mul(2).saturating_add(f.loss_time_s));
    waits.fold(STARTUP_SECONDS, u32::saturating_add)
}

/// Returns the cluster's tolerations, and further ones for nodes that are away: an instance can run nowhere else, so
/// evicting it does not help.
fn tolerations(spec: &StorageClusterSpec) -> Value {
    let mut tolerations: Vec<Value> = spec.placement.tolerations.iter().map(|t| json!(t)).collect();
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        tolerations.push(json!({ "key": key, "operator": "Exists", "effect": "NoExecute" }));
    }
    tolerations.into()
}
