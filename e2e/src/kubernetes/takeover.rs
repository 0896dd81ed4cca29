//! Instances on the bundled target: one of them loses its node, nodes are cut off from the control plane, and a
//! StorageCluster is deleted and recreated.
//!
//! compute1 has the target. The instances may run anywhere and prefer nodes with an RDMA-capable NIC, so one of them is on
//! storage1, which will be lost. The node without an instance is the spare.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::cluster::{self, Cluster};
use super::room;
use super::stage::{LONG, NAMESPACE, Stage, condition};
use super::workload::{OnError, Pace, Stream, claim_of, pod_with};
use crate::lab::Lab;

/// The StorageCluster.
const NAME: &str = "moving";
/// The ConfigMap that outlives it, with nodes and epochs.
pub(super) const RECORD: &str = "moving-placement";
const TARGET: &str = "compute1";
const LOST: &str = "storage1";
/// The last addresses of the lab's network, which belong to no node.
const ADDRESSES: [&str; 2] = ["192.168.77.250", "192.168.77.251"];

/// Seconds of silence after which a node counts as lost.
const AFTER: u64 = 40;

/// Times that emulated nodes sharing two cores can meet. The ports differ from those of the story's cluster, which is on one
/// of the nodes.
fn manifest() -> String {
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
  takeover: {{afterSeconds: {AFTER}}}
  upgrade: {{drainTimeoutSeconds: 10}}
"
    )
}

fn found(stage: &Stage) -> Result<Value> {
    stage.kubectl().get(&["storagecluster", NAME, "-n", NAMESPACE])
}

/// Creates the StorageCluster, and waits until both instances are ready.
fn apply(stage: &Stage) -> Result<()> {
    for node in lab(stage)?.lab().nodes() {
        let target = if node.name() == TARGET { "nvmet nvmet-tcp" } else { "" };
        node.run(&format!("modprobe -a nvme-fabrics nvme-tcp {target}"))?;
    }
    stage.kubectl().apply(&manifest())?;
    wait_ready(stage)
}

fn wait_ready(stage: &Stage) -> Result<()> {
    stage.wait(
        "both instances are ready",
        LONG,
        || Ok(condition(&found(stage)?, "Ready")["status"] == "True"),
    )
}

/// The status of an instance in the StorageCluster.
fn reported(cluster: &Value, instance: impl Fn(&Value) -> bool) -> Result<Value> {
    let all = cluster["status"]["instances"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|one| instance(one)).with_context(|| format!("no such instance in {cluster}"))
}

/// The instance of a claim's volume, from the volume's attributes.
fn instance_of(stage: &Stage, claim: &str) -> Result<String> {
    let volume = stage.kubectl().run(&["get", "pvc", claim, "-o=jsonpath={.spec.volumeName}"])?;
    let path = "-o=jsonpath={.spec.csi.volumeAttributes.instance}";
    stage.kubectl().run(&["get", "pv", &volume, path])
}

fn lab(stage: &Stage) -> Result<&Cluster> {
    stage.cluster().context("only in the lab: nodes of others are not switched off")
}

/// Two instances, and a claim on each that one pod writes and another one reads.
pub(super) struct Moving<'a> {
    stage: &'a Stage,
    streams: Vec<Stream<'a>>,
    /// The status of the instance on the node that will be lost.
    instance: Value,
}

impl<'a> Moving<'a> {
    /// Applies a StorageCluster and claims. Returns them with a summary.
    pub(super) fn start(stage: &'a Stage) -> Result<(Self, String)> {
        apply(stage)?;
        let mut streams = Vec::new();
        let mut used = Vec::new();
        for number in 0..2 {
            let claim = claim(number);
            stage.kubectl().apply(&claim_of(NAME, &claim, "256Mi"))?;
            let nodes = if number == 0 { ["compute1", "compute2"] } else { ["compute2", "compute1"] };
            let prefix = format!("{claim}-");
            streams.push(Stream::start_on(stage, &claim, &prefix, nodes, OnError::End, Pace::Slow)?);
            used.push(instance_of(stage, &claim)?);
        }
        ensure!(used[0] != used[1], "both claims are on {}", used[0]);
        let now = found(stage)?;
        let instance = reported(&now, |one| one["node"] == LOST)?;
        let places: Vec<String> = used
            .iter()
            .map(|name| {
                Ok(format!("{name} on {}", reported(&now, |one| one["name"] == name.as_str())?["node"]))
            })
            .collect::<Result<_>>()?;
        Ok((Self { stage, streams, instance }, places.join(", ").replace('"', "")))
    }

    /// Cuts the node's power. Returns when another node serves the instance and all pods have made progress.
    pub(super) fn lose_node(&self) -> Result<String> {
        let (stage, name) = (self.stage, &self.instance["name"]);
        let started = Instant::now();
        lab(stage)?.lab().power_off(LOST)?;
        let mut after = Value::Null;
        stage.wait("another node serves the instance", LONG, || {
            after = reported(&found(stage)?, |one| one["name"] == *name)?;
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

    /// Brings the node back. The instance stays where it is.
    pub(super) fn node_returns(&self) -> Result<String> {
        let (stage, name) = (self.stage, &self.instance["name"]);
        lab(stage)?.lab().power_on(LOST)?;
        lab(stage)?.start_again(LOST)?;
        stage.wait_cluster_ready()?;
        let now = reported(&found(stage)?, |one| one["name"] == *name)?;
        ensure!(now["phase"] == "Ready" && now["node"] != LOST, "{now}");
        let verified = self.verify_again()?;
        Ok(format!("{name} stays on {}, {verified} files are whole", now["node"]).replace('"', ""))
    }

    /// Cuts all kubelets off from the API server, and then the operator as well, for longer than it takes to declare a node
    /// lost.
    fn cut_off(&self) -> Result<String> {
        let (stage, lab) = (self.stage, lab(self.stage)?);
        let before = standing(stage)?;
        let mut cut = CutOff { lab: lab.lab(), chains: Vec::new() };
        cut.add("OUTPUT")?;
        let started = Instant::now();
        let enough = Duration::from_secs(2 * AFTER);
        stage.wait("the operator says that takeovers pause", enough, || paused(stage))?;
        let noticed = started.elapsed().as_secs();
        std::thread::sleep(enough.saturating_sub(started.elapsed()));
        ensure!(standing(stage)? == before, "it was {before:?}, and is {:?}", standing(stage)?);
        // Now the API server is unreachable.
        cut.add("FORWARD")?;
        std::thread::sleep(enough);
        ensure!(standing(stage)? == before, "it was {before:?}, and is {:?}", standing(stage)?);
        cut.end()?;
        let cut_for = started.elapsed().as_secs();
        for node in lab.lab().nodes() {
            lab.wait_ready(node.name())?;
        }
        stage.wait("takeovers do not pause any more", LONG, || Ok(!paused(stage)?))?;
        wait_ready(stage)?;
        // Ignores what was written before and during the cut: the pods must make progress after it.
        let progress = self.progress()?;
        // By now, a node that was wrongly declared lost would have been replaced.
        std::thread::sleep(Duration::from_secs(AFTER));
        ensure!(standing(stage)? == before, "it was {before:?}, and is {:?}", standing(stage)?);
        for (stream, at) in self.streams.iter().zip(progress) {
            stream.wait_progress((at.0 + 5, at.1 + 5))?;
        }
        Ok(format!(
            "paused after {noticed} s, cut off for {cut_for} s; every server runs on where it was, all four pods have got on"
        ))
    }

    fn progress(&self) -> Result<Vec<(u32, u32)>> {
        self.streams.iter().map(Stream::progress).collect()
    }

    /// Rereads everything that was fsynced and verified before, on both instances, bypassing the caches.
    fn verify_again(&self) -> Result<u32> {
        self.streams.iter().map(Stream::verify_again).sum()
    }

    /// Ends the pods. Returns how much they have written and verified without an error.
    pub(super) fn finish(self) -> Result<String> {
        let mut reported = Vec::new();
        for stream in self.streams {
            let (written, verified) = stream.finish()?;
            reported.push(format!("{written} files written, {verified} verified"));
        }
        Ok(reported.join("; "))
    }
}

/// Deletes claims and StorageCluster, regardless of the earlier result.
fn cleaned_up(stage: &Stage, done: Result<String>) -> Result<String> {
    let claims = [0, 1].map(claim);
    let gone = stage.kubectl().run(&[
        "delete",
        "pvc",
        &claims[0],
        &claims[1],
        "--ignore-not-found",
        "--timeout=240s",
    ]);
    let removed = delete(stage);
    let reported = done?;
    gone?;
    removed?;
    Ok(reported)
}

fn delete(stage: &Stage) -> Result<()> {
    let delete = ["delete", "storagecluster", NAME, "-n", NAMESPACE, "--ignore-not-found", "--timeout=400s"];
    stage.kubectl().run(&delete).map(drop)
}

pub(super) fn node_lost(stage: &Stage) -> Result<String> {
    let done = Moving::start(stage).and_then(|(moving, places)| {
        let lost = moving.lose_node();
        // Restores the original state for the following scenarios.
        let back = moving.node_returns();
        let (lost, back) = (lost?, back?);
        Ok(format!("{places}; {lost}; {back}; {}", moving.finish()?))
    });
    cleaned_up(stage, done)
}

/// Drops packets from all nodes to the API server. Dropping this lets them through again.
struct CutOff<'a> {
    lab: &'a Lab,
    chains: Vec<&'static str>,
}

impl<'a> CutOff<'a> {
    /// Adds the rule to this chain: `OUTPUT` matches packets of the nodes themselves, `FORWARD` those of their pods.
    fn add(&mut self, chain: &'static str) -> Result<()> {
        self.chains.push(chain);
        self.lab.nodes().try_for_each(|node| Self::rule(node, "-I", chain))
    }

    fn rule(node: &crate::lab::Node, action: &str, chain: &str) -> Result<()> {
        let (address, port) = (room::ADDRESS, cluster::PORT);
        node.run(&format!("iptables -w {action} {chain} -d {address} -p tcp --dport {port} -j DROP"))
            .map(drop)
    }

    fn end(&mut self) -> Result<()> {
        let chains = std::mem::take(&mut self.chains);
        let all = chains.iter().flat_map(|chain| self.lab.nodes().map(move |node| (node, chain)));
        let ended: Vec<_> = all.map(|(node, chain)| Self::rule(node, "-D", chain)).collect();
        ended.into_iter().collect()
    }
}

impl Drop for CutOff<'_> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Node and epoch of each instance, and its running containers.
fn standing(stage: &Stage) -> Result<Vec<String>> {
    let cluster = found(stage)?;
    let mut all: Vec<String> = cluster["status"]["instances"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|one| format!("{} on {} in epoch {}", one["name"], one["node"], one["epoch"]))
        .collect();
    let selector = format!("storage.forebay.io/cluster={NAME},app.kubernetes.io/component=server");
    let path = "-o=jsonpath={range .items[*]}{.metadata.uid} {.status.containerStatuses[*].containerID}{\"\\n\"}{end}";
    let pods = stage.kubectl().run(&["get", "pods", "-n", NAMESPACE, "-l", &selector, path])?;
    all.extend(pods.lines().map(str::to_owned));
    all.sort_unstable();
    Ok(all)
}

fn paused(stage: &Stage) -> Result<bool> {
    Ok(condition(&found(stage)?, "TakeoverPaused")["status"] == "True")
}

pub(super) fn cut_off(stage: &Stage) -> Result<String> {
    let done = Moving::start(stage).and_then(|(moving, places)| {
        let cut = moving.cut_off()?;
        Ok(format!("{places}; {cut}; {}", moving.finish()?))
    });
    cleaned_up(stage, done)
}

fn claim(number: usize) -> String {
    format!("{NAME}-{number}")
}

/// Runs a script in a pod that uses a claim, and then removes the pod. Returns the output.
fn once(stage: &Stage, claim: &str, script: &str) -> Result<String> {
    let pod = format!("{claim}-once");
    let kubectl = stage.kubectl();
    kubectl.apply(&pod_with(claim, &pod, &stage.image()?, "compute2", "sleep infinity"))?;
    let said = stage.wait_pod(&pod).and_then(|()| stage.exec(&pod, script));
    let gone = kubectl.run(&["delete", "pod", &pod, "--wait=true", "--timeout=300s"]);
    let said = said?;
    gone?;
    Ok(said)
}

/// The checksums of the claims' content.
fn sums(stage: &Stage) -> Result<Vec<String>> {
    (0..2).map(|number| once(stage, &claim(number), "sha256sum < /data/kept")).collect()
}

/// Deletes a StorageCluster with `Retain` and recreates it: with its record, and without it, as if the Kubernetes cluster
/// itself had been lost.
pub(super) fn made_again(stage: &Stage) -> Result<String> {
    let done = apply(stage).and_then(|()| {
        let kubectl = stage.kubectl();
        let patch = r#"{"spec":{"deletionPolicy":"Retain"}}"#;
        let retain = ["patch", "storagecluster", NAME, "-n", NAMESPACE, "--type=merge", "-p", patch];
        let mut written = Vec::new();
        for number in 0..2 {
            kubectl.apply(&claim_of(NAME, &claim(number), "256Mi"))?;
            let write = "head -c 4M /dev/urandom > /data/kept; sync /data/kept; sha256sum < /data/kept";
            written.push(once(stage, &claim(number), write)?);
        }
        let epochs = |reported: &Value| -> Vec<u64> {
            let all = reported["status"]["instances"].as_array().cloned().unwrap_or_default();
            all.iter().map(|one| one["epoch"].as_u64().unwrap_or_default()).collect()
        };
        let before = epochs(&found(stage)?);

        kubectl.run(&retain)?;
        delete(stage)?;
        apply(stage)?;
        ensure!(sums(stage)? == written, "what the volumes hold is not what was written");
        let after = epochs(&found(stage)?);
        ensure!(before.iter().zip(&after).all(|(b, a)| a >= b), "the epochs went from {before:?} to {after:?}");

        // The pools have later epochs than the first, which a StorageCluster without a record starts with.
        let at = once_moved(stage)?;
        kubectl.run(&retain)?;
        delete(stage)?;
        kubectl.run(&["delete", "configmap", RECORD, "-n", NAMESPACE])?;
        kubectl.apply(&manifest())?;
        let mut said = String::new();
        stage.wait("a server steps back, and `kubectl forebay adopt` can tell why", LONG, || {
            let (text, code) = stage.forebay(&["adopt", NAME, "-n", NAMESPACE, "--dry-run"])?;
            said = text;
            Ok(code == Some(0) && said.contains("its pool was used in epoch"))
        })?;
        stage.wait("all that was found is adopted, and both instances are ready", LONG, || {
            let (said, code) = stage.forebay(&["adopt", NAME, "-n", NAMESPACE, "--yes"])?;
            ensure!(code == Some(0), "kubectl forebay adopt: {said}");
            Ok(condition(&found(stage)?, "Ready")["status"] == "True")
        })?;
        ensure!(sums(stage)? == written, "what the volumes hold is not what was written");
        let adopted = epochs(&found(stage)?);
        Ok(format!(
            "epochs {before:?}, {after:?} when made again; {at}; adopted without the record in {adopted:?}; all files whole"
        ))
    });
    cleaned_up(stage, done)
}

/// Requests that one instance move to another node, which raises its epoch.
fn once_moved(stage: &Stage) -> Result<String> {
    let before = found(stage)?["status"]["instances"][0].clone();
    let name = before["name"].as_str().context("an instance")?;
    stage.kubectl().run(&[
        "annotate",
        "pod",
        &format!("{name}-0"),
        "-n",
        NAMESPACE,
        "storage.forebay.io/move=",
    ])?;
    stage.wait("the instance has moved", LONG, || {
        let now = reported(&found(stage)?, |one| one["name"] == name)?;
        Ok(now["epoch"] != before["epoch"] && now["phase"] == "Ready")
    })?;
    wait_ready(stage)?;
    let now = reported(&found(stage)?, |one| one["name"] == name)?;
    Ok(format!("{name} moved to {} in epoch {}", now["node"], now["epoch"]).replace('"', ""))
}
