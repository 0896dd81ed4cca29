//! A healthy cluster for tests; each test breaks a part of it.

use k8s_openapi::jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::snapshot::Snapshot;

pub(crate) fn now() -> Timestamp {
    "2026-11-21T16:00:00Z".parse().expect("a time")
}

pub(crate) fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object")
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-11-21T12:00:00Z"})
}

pub(crate) fn cluster() -> Value {
    let instance = |ordinal: u32, node: &str| {
        json!({"name": format!("main-{ordinal}"), "phase": "Ready", "node": node, "address": format!("10.0.0.{ordinal}"),
            "port": 445, "adminEndpoint": "10.0.0.1:9444", "transports": ["RDMA", "TCP"], "version": "0.1.0",
            "capacityBytes": 2_i64 << 40, "freeBytes": 3_i64 << 39, "volumes": 7, "sessions": 4, "epoch": 1})
    };
    json!({
        "apiVersion": "storage.forebay.io/v1alpha1", "kind": "StorageCluster",
        "metadata": {"name": "main", "namespace": "forebay-system", "generation": 3,
            "creationTimestamp": "2026-11-18T16:00:00Z"},
        "spec": {"instances": 2, "backends": [{"name": "fast", "kind": "Directory", "directory": {"path": "/srv/fast"}}]},
        "status": {
            "observedGeneration": 3,
            "conditions": [condition("Ready", "True", "AllInstancesReady", "2 of 2 instances serve"),
                condition("Progressing", "False", "Done", "nothing to do")],
            "summary": {"instances": "2/2", "transport": "RDMA, TCP", "volumes": 14, "capacity": "3Ti free of 4Ti"},
            "image": "docker.io/forebay/forebay:0.1.0",
            "instances": [instance(0, "storage-1"), instance(1, "storage-2")],
            "nodes": [{"name": "cpu-1", "fits": false, "reason": "RdmaMissing", "message": "it has no RDMA device"}],
        }
    })
}

pub(crate) fn node(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {}, "status": {"conditions": [
        {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}]}})
}

pub(crate) fn storage_node(name: &str) -> Value {
    json!({
        "apiVersion": "storage.forebay.io/v1alpha1", "kind": "StorageNode",
        "metadata": {"name": name}, "spec": {"unschedulable": false},
        "status": {
            "conditions": [condition("Ready", "True", "Reported", ""), condition("RdmaReady", "True", "PortUsable", "")],
            "summary": {"rdma": "1/1 RoCE 200G", "nvme": 4},
            "rdmaDevices": [{"name": "mlx5_0", "driver": "mlx5_core", "software": false, "iwarp": false, "ports": [
                {"port": 1, "linkLayer": "Ethernet", "state": "ACTIVE", "physicalState": "LinkUp", "rateGbps": 200,
                    "netdev": "ens1f0np0", "mtu": 9000, "addresses": ["10.0.0.1"], "usable": true}]}],
            "kernel": {"release": "6.8.0-90-generic", "cifs": "Yes", "cifsSmbDirect": "Yes", "nvmeTcp": "Yes",
                "nvmeRdma": "Yes", "ioUring": "Yes", "architecture": "x86_64", "operatingSystem": "Ubuntu 24.04"},
            "agentVersion": env!("CARGO_PKG_VERSION"),
        }
    })
}

pub(crate) fn csi_node(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"drivers": [{"name": "csi.forebay.io", "nodeID": name}]}})
}

pub(crate) fn pod(name: &str, component: &str, node: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "forebay-system", "labels": {
            "app.kubernetes.io/name": "forebay", "app.kubernetes.io/component": component}},
        "spec": {"nodeName": node, "containers": []},
        "status": {"phase": "Running", "conditions": [{"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True"}]},
    })
}

pub(crate) fn volume(number: u32, instance: &str, phase: &str) -> Value {
    json!({
        "metadata": {"name": format!("pvc-{number}"), "creationTimestamp": "2026-11-21T15:00:00Z"},
        "spec": {"capacity": {"storage": "500Gi"}, "storageClassName": "forebay",
            "claimRef": {"namespace": "training", "name": format!("data-{number}")},
            "csi": {"driver": "csi.forebay.io", "volumeHandle": format!("{instance}/pvc-{number}"),
                "volumeAttributes": {"instance": instance}}},
        "status": {"phase": phase},
    })
}

pub(crate) fn storage_class() -> Value {
    json!({"metadata": {"name": "forebay"}, "provisioner": "csi.forebay.io",
        "parameters": {"cluster": "main", "clusterNamespace": "forebay-system"}, "volumeBindingMode": "Immediate"})
}

pub(crate) fn claim(name: &str, phase: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "training"}, "spec": {"storageClassName": "forebay"},
        "status": {"phase": phase}})
}

pub(crate) const NODES: [&str; 2] = ["storage-1", "storage-2"];

/// Returns a healthy cluster: two storage nodes, two instances, two volumes.
pub(crate) fn healthy() -> Snapshot {
    let pods = [
        pod("forebay-operator-a", "operator", NODES[0]),
        pod("forebay-csi-controller-a", "csi-controller", NODES[1]),
        pod("forebay-csi-node-1", "csi-node", NODES[0]),
        pod("forebay-csi-node-2", "csi-node", NODES[1]),
    ];
    Snapshot {
        namespace: Some("forebay-system".into()),
        version: Ok("v1.36.3".into()),
        served: Ok(Some(vec!["StorageCluster".into(), "StorageNode".into()])),
        clusters: Ok(vec![object(cluster())]),
        storage_nodes: Ok(NODES.map(|n| object(storage_node(n))).into()),
        nodes: Ok(NODES.map(|n| object(node(n))).into()),
        pods: Ok(pods.map(object).into()),
        volumes: Ok(vec![object(volume(1, "main-0", "Bound")), object(volume(2, "main-1", "Bound"))]),
        claims: Ok(vec![object(claim("data-1", "Bound")), object(claim("data-2", "Bound"))]),
        csi_nodes: Ok(NODES.map(|n| object(csi_node(n))).into()),
        csi_driver: Ok(Some(object(
            json!({"metadata": {"name": "csi.forebay.io"}, "spec": {"attachRequired": false}}),
        ))),
        storage_classes: Ok(vec![object(storage_class())]),
    }
}

/// Returns a fresh installation.
pub(crate) fn fresh() -> Snapshot {
    Snapshot {
        clusters: Ok(vec![]),
        volumes: Ok(vec![]),
        claims: Ok(vec![]),
        storage_classes: Ok(vec![]),
        ..healthy()
    }
}
