//! Transports of mounts: RDMA if server and node have it, and what is reported and refused otherwise.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::scenario::{FURTHER_NIC, instance, pod_uid, resumed, stream, wait_replaced};
use super::stage::{CLUSTER, LONG, NAMESPACE, Stage};
use super::workload::{CLASS, OnError, claim_of, mounted, pod_with, volume};
use crate::lab::Node;

/// A class like [`CLASS`], which leaves `transport` to the driver, except that it sets it.
const RDMA: &str = "forebay-rdma";
/// For state that the node plugin polls every ten seconds.
const NOTICED: Duration = Duration::from_secs(120);

/// Soft-RoCE on the network device that connects to the server. Removed when dropped.
struct Nic<'a>(&'a Node);

impl<'a> Nic<'a> {
    fn new(node: &'a Node) -> Result<Self> {
        node.run("modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0")?;
        Ok(Self(node))
    }

    /// Packets that it sent and received, according to its own counters.
    fn packets(&self) -> Result<u64> {
        let counters = "cd /sys/class/infiniband/rxe0/ports/1/hw_counters; echo $(( $(cat sent_pkts) + $(cat rcvd_pkts) ))";
        Ok(self.0.run(counters)?.trim().parse()?)
    }
}

impl Drop for Nic<'_> {
    fn drop(&mut self) {
        let _ = self.0.run("rdma link delete rxe0");
    }
}

/// Waits until the node's plugin has detected whether the node has a usable port.
fn wait_noticed(stage: &Stage, node: &str, has: bool) -> Result<()> {
    stage.wait(&format!("the StorageNode of {node} shows its port: {has}"), NOTICED, || {
        let found = stage.kubectl().get(&["storagenode", node])?;
        let devices = found["status"]["rdmaDevices"].as_array().cloned().unwrap_or_default();
        Ok(devices.iter().any(|device| device["ports"][0]["usable"] == true) == has)
    })
}

/// Creates the class [`RDMA`] from the story's class.
fn make_class(stage: &Stage) -> Result<()> {
    let found = stage.kubectl().get(&["storageclass", CLASS])?;
    // The default is auto.
    ensure!(found["parameters"]["transport"].is_null(), "the story's class is {}", found["parameters"]);
    let mut parameters = found["parameters"].clone();
    parameters["transport"] = "rdma".into();
    let class = serde_json::json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": RDMA},
        "provisioner": found["provisioner"],
        "parameters": parameters,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": found["volumeBindingMode"],
    });
    stage.kubectl().apply(&class.to_string()).map(drop)
}

/// The notes of a pod's Events with this reason.
fn events(stage: &Stage, pod: &str, reason: &str) -> Result<Vec<String>> {
    let selector = format!("involvedObject.name={pod},reason={reason}");
    let found = stage.kubectl().get(&["events", "--field-selector", &selector])?;
    let items = found["items"].as_array().cloned().unwrap_or_default();
    Ok(items.iter().filter_map(|event: &Value| event["message"].as_str().map(str::to_owned)).collect())
}

fn wait_event(stage: &Stage, pod: &str, reason: &str, part: &str) -> Result<String> {
    let mut note = String::new();
    stage.wait(&format!("an Event {reason} of {pod} says {part:?}"), LONG, || {
        let found = events(stage, pod, reason)?.into_iter().find(|note| note.contains(part));
        let is_there = found.is_some();
        note = found.unwrap_or_default();
        Ok(is_there)
    })?;
    Ok(note)
}

/// Amount that one pod writes and the other verifies.
const MEBIBYTES: u64 = 8;

pub(super) fn chosen(stage: &Stage) -> Result<String> {
    let cluster = stage.cluster().context("only in the lab")?;
    let kubectl = stage.kubectl();
    stage.wait("the instance serves RDMA", NOTICED, || {
        let path = "-o=jsonpath={.status.instances[0].transports}";
        let transports = kubectl.run(&["get", "storagecluster", CLUSTER, "-n", NAMESPACE, path])?;
        Ok(transports.contains("RDMA") && transports.contains("TCP"))
    })?;
    make_class(stage)?;
    let done = both_kinds(stage, cluster.lab().node("compute1"), cluster.lab().node("compute2"));
    let gone = kubectl.run(&[
        "delete",
        "pod/fast1",
        "pod/fast2",
        "pod/slow",
        "pod/refused",
        "pvc/fast",
        "pvc/any",
        "storageclass/forebay-rdma",
        "--ignore-not-found",
        "--timeout=240s",
    ]);
    let reported = done?;
    gone?;
    Ok(reported)
}

fn both_kinds(stage: &Stage, one: &Node, two: &Node) -> Result<String> {
    let (kubectl, image) = (stage.kubectl(), stage.image()?);
    let nics = [Nic::new(one)?, Nic::new(two)?];
    for node in ["compute1", "compute2"] {
        wait_noticed(stage, node, true)?;
    }
    // RDMA on two nodes, according to the devices' own counters.
    kubectl.apply(&claim_of(RDMA, "fast", "256Mi"))?;
    for (pod, node) in [("fast1", "compute1"), ("fast2", "compute2")] {
        kubectl.apply(&pod_with("fast", pod, &image, node, "sleep infinity"))?;
    }
    for pod in ["fast1", "fast2"] {
        stage.wait_pod(pod)?;
    }
    let fast = volume(stage, "fast")?;
    for node in [one, two] {
        let line = mounted(node, &fast)?;
        ensure!(line.contains(",rdma,"), "{}: {line}", node.name());
        let connected = node.run(
            "grep -c 'SMBDirect.*CONNECTED\\|transport status: CONNECTED' /proc/fs/cifs/DebugData || true",
        )?;
        ensure!(connected.trim() != "0", "{} has no connection over SMB Direct", node.name());
    }
    let before = [nics[0].packets()?, nics[1].packets()?];
    let write = format!(
        "head -c {MEBIBYTES}M /dev/urandom > /tmp/f; cp /tmp/f /data/f; sync /data/f; sha256sum < /tmp/f"
    );
    let sum = stage.exec("fast1", &write)?;
    let read = stage.exec("fast2", "sha256sum < /data/f")?;
    ensure!(sum == read, "fast1 wrote {sum}, fast2 read {read}");
    // A RoCE packet carries 4 KiB at most.
    let mut packets = [0; 2];
    for ((packets, nic), before) in packets.iter_mut().zip(&nics).zip(before) {
        *packets = nic.packets()? - before;
        ensure!(*packets >= MEBIBYTES * 256, "{packets} packets by RDMA on {}", nic.0.name());
    }
    kubectl.run(&["delete", "pod", "fast1", "fast2", "--wait=true", "--timeout=240s"])?;
    // cifs closes its connections over the device at unmount.
    stage.wait("the nodes have unmounted it", NOTICED, || {
        Ok(mounted(one, &fast).is_err() && mounted(two, &fast).is_err())
    })?;
    drop(nics);
    wait_noticed(stage, "compute2", false)?;

    // A node without RDMA: uses TCP, and reports that.
    kubectl.apply(&claim_of(CLASS, "any", "256Mi"))?;
    kubectl.apply(&pod_with("any", "slow", &image, "compute2", "sleep infinity"))?;
    stage.wait_pod("slow")?;
    let line = mounted(two, &volume(stage, "any")?)?;
    ensure!(!line.contains(",rdma"), "{line}");
    let reported = wait_event(stage, "slow", "MountedOverTcp", "no RDMA device")?;
    ensure!(stage.exec("slow", "echo 1 > /data/f; cat /data/f")?.trim() == "1", "the volume is not served");

    // A volume that requires RDMA there is refused.
    kubectl.apply(&pod_with("fast", "refused", &image, "compute2", "sleep infinity"))?;
    wait_event(stage, "refused", "FailedMount", "no RDMA device")?;
    let phase = kubectl.run(&["get", "pod", "refused", "-o=jsonpath={.status.phase}"])?;
    ensure!(phase == "Pending", "the refused pod is {phase}");
    Ok(format!(
        "{} and {} packets by RDMA for {MEBIBYTES} MiB; then {reported:?}; then refused",
        packets[0], packets[1]
    ))
}

/// A device on the server's node. The server's container gets the device node only when the container is created.
struct Later<'a>(&'a Node);

impl<'a> Later<'a> {
    fn new(node: &'a Node) -> Result<Self> {
        node.run(FURTHER_NIC)?;
        Ok(Self(node))
    }
}

impl Drop for Later<'_> {
    /// Does not wait: soft-RoCE is removed when the last process that has it open ends, which is the server.
    fn drop(&mut self) {
        let _ = self.0.run("(rdma link delete rxe1; ip link delete rdma0) > /dev/null 2>&1 &");
    }
}

/// A device that appears while the server runs: the server's container is recreated, and no user of a volume notices.
pub(super) fn came_later(stage: &Stage) -> Result<String> {
    let cluster = stage.cluster().context("only in the lab")?;
    let pod = format!("{}-0", instance(stage)?);
    let stream = stream(stage, OnError::End)?;
    let nodes = || stage.kubectl().run(&["exec", &pod, "-n", NAMESPACE, "--", "ls", "/dev/infiniband"]);
    let old = pod_uid(stage, &pod)?;
    ensure!(!nodes()?.contains("uverbs1"), "the node has two devices: {}", nodes()?);
    let later = Later::new(cluster.lab().node("storage1"))?;
    wait_replaced(stage, &pod, &old)?;
    let found = nodes()?;
    ensure!(found.contains("uverbs1"), "the new container has {found}");
    stage.wait_cluster_ready()?;
    let reported = resumed(stream)?;
    let path = "-o=jsonpath={.items[*].message}";
    let said = stage.kubectl().run(&[
        "get",
        "events",
        "-n",
        NAMESPACE,
        "--field-selector=reason=Restarting",
        path,
    ])?;
    ensure!(said.contains("gets RDMA device rxe1"), "the Events say {said}");

    // Back to the original state: the device is removed with the container that has it open.
    drop(later);
    let old = pod_uid(stage, &pod)?;
    stage.kubectl().run(&["delete", "pod", &pod, "-n", NAMESPACE, "--wait=false"])?;
    wait_replaced(stage, &pod, &old)?;
    stage.wait_cluster_ready()?;
    Ok(reported)
}
