//! Instances on the bundled target, and the loss of the node of one of them.
//!
//! compute1 has the target. The instances may be anywhere and had rather be where a NIC can RDMA, so that one of them is on
//! storage1, which is to be lost; the node without an instance is to spare.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::cluster::Cluster;
use super::stage::{LONG, NAMESPACE, Stage, condition};
use super::workload::{OnError, Pace, Stream, claim_of};

const NAME: &str = "moving";
const TARGET: &str = "compute1";
const LOST: &str = "storage1";
/// The last addresses of the lab's network, which no node has.
const ADDRESSES: [&str; 2] = ["192.168.77.250", "192.168.77.251"];

/// Times as emulated nodes that share two cores keep them. Other ports than those of the story's cluster, which is on one of the nodes.
fn cluster() -> String {
    let [one, two] = ADDRESSES;
    format!(
        "apiVersion: storage.forebay.io/v1alpha1
kind: StorageCluster
metadata: {{name: {NAME}, namespace: {NAMESPACE}}}
spec:
  instances: 2
  placement:
    rdma: {{requirement: Preferred}}
  network:
    transport: TCP
    addresses: [{one}/24, {two}/24]
    ports: {{smb: 1445, smbDirect: 15445, admin: 19444, metrics: 19445}}
  backends:
  - name: files
    kind: Target
    target:
      nodes: [{{name: {TARGET}, directory: /scratch/forebay-target}}]
      sizeGib: 1
      connectTimeoutSeconds: 180
      keepAliveSeconds: 12
      lossTimeoutSeconds: 30
  storageClasses:
  - name: {NAME}
  takeover: {{afterSeconds: 40}}
  upgrade: {{drainTimeoutSeconds: 10}}
"
    )
}

fn found(stage: &Stage) -> Result<Value> {
    stage.kubectl().get(&["storagecluster", NAME, "-n", NAMESPACE])
}

/// What its status says of an instance.
fn told(cluster: &Value, instance: impl Fn(&Value) -> bool) -> Result<Value> {
    let all = cluster["status"]["instances"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|one| instance(one)).with_context(|| format!("no such instance in {cluster}"))
}

/// The instance that a claim's volume is on, by the volume's attributes.
fn instance_of(stage: &Stage, claim: &str) -> Result<String> {
    let volume = stage.kubectl().run(&["get", "pvc", claim, "-o=jsonpath={.spec.volumeName}"])?;
    let path = "-o=jsonpath={.spec.csi.volumeAttributes.instance}";
    stage.kubectl().run(&["get", "pv", &volume, path])
}

fn lab(stage: &Stage) -> Result<&Cluster> {
    stage.cluster().context("only in the lab: nobody else's nodes are switched off")
}

/// Two instances, and a claim on each that a pod writes and another one reads.
pub(super) struct Moving<'a> {
    stage: &'a Stage,
    streams: Vec<Stream<'a>>,
    /// The one on the node that is to be lost, as its status was.
    instance: Value,
}

impl<'a> Moving<'a> {
    /// Applies a StorageCluster and claims; what came of it.
    pub(super) fn start(stage: &'a Stage) -> Result<(Self, String)> {
        for node in lab(stage)?.lab().nodes() {
            let target = if node.name() == TARGET { "nvmet nvmet-tcp" } else { "" };
            node.run(&format!("modprobe -a nvme-fabrics nvme-tcp {target}"))?;
        }
        stage.kubectl().apply(&cluster())?;
        stage.wait("both instances are ready", LONG, || {
            Ok(condition(&found(stage)?, "Ready")["status"] == "True")
        })?;
        let mut streams = Vec::new();
        let mut used = Vec::new();
        for number in 0..2 {
            let claim = format!("{NAME}-{number}");
            stage.kubectl().apply(&claim_of(NAME, &claim, "256Mi"))?;
            let nodes = if number == 0 { ["compute1", "compute2"] } else { ["compute2", "compute1"] };
            let prefix = format!("{claim}-");
            streams.push(Stream::start_on(stage, &claim, &prefix, nodes, OnError::End, Pace::Slow)?);
            used.push(instance_of(stage, &claim)?);
        }
        ensure!(used[0] != used[1], "both claims are on {}", used[0]);
        let now = found(stage)?;
        let instance = told(&now, |one| one["node"] == LOST)?;
        let places: Vec<String> = used
            .iter()
            .map(|name| Ok(format!("{name} on {}", told(&now, |one| one["name"] == name.as_str())?["node"])))
            .collect::<Result<_>>()?;
        Ok((Self { stage, streams, instance }, places.join(", ").replace('"', "")))
    }

    /// Takes the node's power; returns when another one serves the instance and all pods have got on.
    pub(super) fn lose_node(&self) -> Result<String> {
        let (stage, name) = (self.stage, &self.instance["name"]);
        let started = Instant::now();
        lab(stage)?.lab().power_off(LOST)?;
        let mut after = Value::Null;
        stage.wait("another node serves the instance", LONG, || {
            after = told(&found(stage)?, |one| one["name"] == *name)?;
            Ok(after["epoch"] != self.instance["epoch"] && after["phase"] == "Ready" && after["node"] != LOST)
        })?;
        let took = started.elapsed().as_secs();
        for stream in &self.streams {
            let at = stream.progress()?;
            stream.wait_progress((at.0 + 5, at.1 + 5))?;
        }
        let resumed = started.elapsed().as_secs();
        let verified = self.verify_again()?;
        ensure!(after["address"] == self.instance["address"], "it has another address: {after}");
        let status = stage.forebay_status()?;
        ensure!(status.contains(&format!("NodeLost from {LOST}")), "the status does not tell it:\n{status}");
        Ok(format!(
            "{name} serves on {} after {took} s, all four pods have got on after {resumed} s, {verified} files of before are whole",
            after["node"]
        )
        .replace('"', ""))
    }

    /// The node is back; the instance stays where it is.
    pub(super) fn node_returns(&self) -> Result<String> {
        let (stage, name) = (self.stage, &self.instance["name"]);
        lab(stage)?.lab().power_on(LOST)?;
        lab(stage)?.start_again(LOST)?;
        stage.wait_cluster_ready()?;
        let now = told(&found(stage)?, |one| one["name"] == *name)?;
        ensure!(now["phase"] == "Ready" && now["node"] != LOST, "{now}");
        let verified = self.verify_again()?;
        Ok(format!("{name} stays on {}, {verified} files are whole", now["node"]).replace('"', ""))
    }

    /// Everything that was fsynced and verified before is read again: on both instances, past the caches.
    fn verify_again(&self) -> Result<u32> {
        self.streams.iter().map(Stream::verify_again).sum()
    }

    /// Ends the pods; how much they have written and verified, without an error.
    pub(super) fn finish(self) -> Result<String> {
        let mut told = Vec::new();
        for stream in self.streams {
            let (written, verified) = stream.finish()?;
            told.push(format!("{written} files written, {verified} verified"));
        }
        Ok(told.join("; "))
    }
}

pub(super) fn node_lost(stage: &Stage) -> Result<String> {
    let done = Moving::start(stage).and_then(|(moving, places)| {
        let lost = moving.lose_node();
        // As it was, for the scenarios that come.
        let back = moving.node_returns();
        let (lost, back) = (lost?, back?);
        Ok(format!("{places}; {lost}; {back}; {}", moving.finish()?))
    });
    let gone = stage.kubectl().run(&[
        "delete",
        "pvc",
        &format!("{NAME}-0"),
        &format!("{NAME}-1"),
        "--ignore-not-found",
        "--timeout=240s",
    ]);
    let removed = stage.kubectl().run(&["delete", "storagecluster", NAME, "-n", NAMESPACE, "--timeout=400s"]);
    let told = done?;
    gone?;
    removed?;
    Ok(told)
}
