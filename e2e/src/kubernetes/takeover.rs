//! Instances on the bundled target, and the loss of the node of one of them.
//!
//! Needs three storage nodes (`--nodes storage=3,compute=2`): two instances and one to spare. compute1 has the target.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::stage::{LONG, NAMESPACE, Stage, condition};
use super::workload::{OnError, Stream, claim_of};

const NAME: &str = "moving";
/// The last addresses of the lab's network, which no node has.
const ADDRESSES: [&str; 2] = ["192.168.77.250", "192.168.77.251"];

/// Other ports than those of the story's cluster, which is on one of the nodes.
fn cluster() -> String {
    let [one, two] = ADDRESSES;
    format!(
        "apiVersion: storage.forebay.io/v1alpha1
kind: StorageCluster
metadata: {{name: {NAME}, namespace: {NAMESPACE}}}
spec:
  instances: 2
  placement:
    nodeSelector: {{forebay.io/storage: \"true\"}}
    rdma: {{requirement: None}}
  network:
    transport: TCP
    addresses: [{one}/24, {two}/24]
    ports: {{smb: 1445, smbDirect: 15445, admin: 19444, metrics: 19445}}
  backends:
  - name: files
    kind: Target
    target:
      nodes: [{{name: compute1, directory: /var/lib/forebay-files}}]
      sizeGib: 1
  storageClasses:
  - name: {NAME}
  upgrade: {{drainTimeoutSeconds: 10}}
"
    )
}

fn found(stage: &Stage) -> Result<Value> {
    stage.kubectl().get(&["storagecluster", NAME, "-n", NAMESPACE])
}

fn wait_ready(stage: &Stage) -> Result<()> {
    stage.wait(
        "both instances are ready",
        LONG,
        || Ok(condition(&found(stage)?, "Ready")["status"] == "True"),
    )
}

/// The instance that a claim's volume is on, by the volume's attributes.
fn instance_of(stage: &Stage, claim: &str) -> Result<String> {
    let volume = stage.kubectl().run(&["get", "pvc", claim, "-o=jsonpath={.spec.volumeName}"])?;
    let path = "-o=jsonpath={.spec.csi.volumeAttributes.instance}";
    stage.kubectl().run(&["get", "pv", &volume, path])
}

pub(super) fn node_lost(stage: &Stage) -> Result<String> {
    let cluster = stage.cluster().context("only in the lab")?;
    let storage = cluster.lab().nodes().filter(|n| n.name().starts_with("storage")).count();
    ensure!(storage >= 3, "it needs --nodes storage=3,compute=2");
    for node in cluster.lab().nodes() {
        let target = if node.name() == "compute1" { "nvmet nvmet-tcp" } else { "" };
        node.run(&format!("modprobe -a nvme-fabrics nvme-tcp {target}"))?;
    }
    stage.kubectl().apply(&self::cluster())?;
    let mut lost = None;
    let done = through(stage, &mut lost);
    // As it was, for the scenarios that come.
    if let Some(node) = lost {
        cluster.lab().power_on(&node)?;
        cluster.start_again(&node)?;
    }
    let pvcs = ["delete", "pvc", "moving-0", "moving-1", "--ignore-not-found", "--timeout=240s"];
    let gone = stage.kubectl().run(&pvcs);
    let removed = ["delete", "storagecluster", NAME, "-n", NAMESPACE, "--timeout=400s"];
    let removed = stage.kubectl().run(&removed);
    let told = done?;
    gone?;
    removed?;
    Ok(told)
}

fn through(stage: &Stage, lost: &mut Option<String>) -> Result<String> {
    let cluster = stage.cluster().context("only in the lab")?;
    wait_ready(stage)?;
    let mut streams = Vec::new();
    let mut instances = Vec::new();
    for number in 0..2 {
        let claim = format!("moving-{number}");
        stage.kubectl().apply(&claim_of(NAME, &claim, "256Mi"))?;
        let nodes = if number == 0 { ["compute1", "compute2"] } else { ["compute2", "compute1"] };
        streams.push(Stream::start_on(stage, &claim, &format!("{claim}-"), nodes, OnError::End)?);
        instances.push(instance_of(stage, &claim)?);
    }
    let before = found(stage)?;
    let of = |status: &Value, name: &str| -> Value {
        let all = status["status"]["instances"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|i| i["name"] == name).unwrap_or_default()
    };
    let instance = instances[0].clone();
    let node = of(&before, &instance)["node"].as_str().context("no node")?.to_owned();
    let started = Instant::now();
    cluster.lab().power_off(&node)?;
    *lost = Some(node.clone());
    stage.wait("another node serves the instance", LONG, || {
        let now = of(&found(stage)?, &instance);
        Ok(now["epoch"] == 2 && now["phase"] == "Ready" && now["node"] != node.as_str())
    })?;
    let took = started.elapsed().as_secs();
    let mut told = Vec::new();
    for stream in streams {
        let at = stream.progress()?;
        stream.wait_progress((at.0 + 5, at.1 + 5))?;
        let (written, verified) = stream.finish()?;
        told.push(format!("{written} written, {verified} verified"));
    }
    let after = of(&found(stage)?, &instance);
    let address = |of: &Value| of["address"].as_str().unwrap_or_default().to_owned();
    ensure!(address(&of(&before, &instance)) == address(&after), "it has another address: {after}");
    let status = stage.kubectl_forebay(&["status", "-n", NAMESPACE])?;
    ensure!(status.contains(&format!("NodeLost from {node}")), "the status does not tell it:\n{status}");
    Ok(format!("serving after {took} s ({}); {}", after["takeover"], told.join("; ")))
}
