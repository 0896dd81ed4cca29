//! The quickstart: Forebay on Kubernetes as a new user experiences it, step by step.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::stage::{CLUSTER, LONG, NAMESPACE, Stage};
use super::takeover::Moving;
use super::workload::{claim, pod, training};
use crate::progress::say;
use crate::report::Table;

/// The StorageCluster of the story: one server, on a node with an RDMA NIC. In the lab, only the storage node qualifies.
pub const STORAGE_CLUSTER: &str = "apiVersion: storage.forebay.io/v1alpha1
kind: StorageCluster
metadata:
  name: main
  namespace: forebay-system
spec:
  instances: 1
  placement:
    rdma:
      requirement: Required
      linkLayer: Ethernet
  network:
    transport: Auto
  backends:
    - name: disk
      kind: Directory
      directory:
        path: /var/lib/forebay
        create: true
        quota: Project
  storageClasses:
    - name: forebay
      default: true
";

/// The same for a user's own, unknown cluster: the minimal example of the documentation, and not the default class.
const STORAGE_CLUSTER_ANYWHERE: &str = include_str!("../../../manifests/examples/cluster-minimal.yaml");

const FIRST: &str = "512Mi";
const LATER: &str = "640Mi";

/// Fails if a step failed that the next ones need.
fn must(done: Option<String>) -> Result<()> {
    done.map(drop).context("the story ends here: a step failed")
}

/// Installs Forebay and creates a StorageCluster.
pub fn install(stage: &Stage, table: &mut Table) -> Result<()> {
    must(table.run("helm install forebay", || {
        // A user's existing installation is not ours to change.
        if stage.cluster().is_none() && stage.is_installed()? {
            return Ok("there already: left as it is".into());
        }
        stage.install(&[])?;
        Ok("operator, CSI controller, a node plugin on every node".into())
    }))?;
    must(table.run("every node says what it has (StorageNode)", || {
        let nodes = stage.kubectl().get(&["nodes"])?["items"].as_array().map_or(0, Vec::len);
        stage.wait("a StorageNode for every node", LONG, || {
            let found = stage.kubectl().get(&["storagenodes"])?;
            Ok(found["items"].as_array().map_or(0, Vec::len) >= nodes)
        })?;
        Ok(format!("{nodes} nodes"))
    }))?;
    must(table.run("kubectl apply a StorageCluster", || {
        if stage.cluster().is_some() {
            stage.kubectl().apply(STORAGE_CLUSTER)?;
        } else if stage.kubectl().find(&["storagecluster", CLUSTER, "-n", NAMESPACE])?.is_none() {
            let kubectl = stage.kubectl().clone().within(NAMESPACE);
            kubectl.apply(&STORAGE_CLUSTER_ANYWHERE.replace("default: true", "default: false"))?;
        }
        stage.wait_cluster_ready()?;
        let path = "-o=jsonpath={range .status.instances[*]}{.name} on {.node} at {.address}{end}";
        stage.kubectl().run(&["get", "storagecluster", CLUSTER, "-n", NAMESPACE, path])
    }))
}

/// A claim, a pod that holds it, two training pods, an expansion.
pub fn use_it(stage: &Stage, table: &mut Table) -> Result<()> {
    must(table.run("a PersistentVolumeClaim, ReadWriteMany", || {
        stage.kubectl().apply(&claim(FIRST))?;
        stage.wait("the claim is Bound", Duration::from_secs(180), || {
            Ok(stage.kubectl().run(&["get", "pvc", "training", "-o=jsonpath={.status.phase}"])? == "Bound")
        })?;
        Ok(format!("{FIRST}, Bound"))
    }))?;
    must(table.run("a pod mounts it", || {
        stage.kubectl().apply(&pod("notebook", &stage.image()?, None, "sleep infinity"))?;
        stage.wait_pod("notebook")?;
        Ok(stage.exec("notebook", "df -h --output=size,target /data | tail -n 1")?.trim().to_owned())
    }))?;
    must(table.run("two training pods on two nodes: data set and checkpoint verified across them", || {
        stage.kubectl().apply(&training(&stage.image()?))?;
        stage.wait_job("training")?;
        let logs = stage.job_logs("training")?;
        // A restarted rank prints it twice.
        for line in ["rank 0 on", "rank 1 on", "rank 0: checkpoint of rank 1", "rank 1: checkpoint of rank 0"]
        {
            let said = logs.lines().any(|one| one.contains(line) && one.ends_with(" verified"));
            ensure!(said, "no pod prints {line:?} … verified:\n{logs}");
        }
        let path = "-o=jsonpath={range .items[*]}{.spec.nodeName} {end}";
        let done = ["-l", "job-name=training", "--field-selector=status.phase=Succeeded", path];
        let nodes = stage.kubectl().run(&[&["get", "pods"], &done[..]].concat())?;
        let mut nodes: Vec<&str> = nodes.split_whitespace().collect();
        nodes.sort_unstable();
        nodes.dedup();
        let all = stage.kubectl().get(&["nodes"])?["items"].as_array().map_or(0, Vec::len);
        ensure!(nodes.len() == all.min(2), "the pods ran on {nodes:?}");
        Ok(format!("on {}", nodes.join(" and ")))
    }))?;
    must(table.run("the claim grows while a pod uses it", || {
        let patch = format!(r#"{{"spec":{{"resources":{{"requests":{{"storage":"{LATER}"}}}}}}}}"#);
        stage.kubectl().run(&["patch", "pvc", "training", "-p", &patch])?;
        // Without quotas, which is possible on a user's own nodes, the volume is as large as the disk.
        if stage.cluster().is_some() {
            stage.wait("df in the running pod shows the new size", Duration::from_secs(180), || {
                Ok(stage.exec("notebook", "df --output=size -BM /data | tail -n 1")?.trim() == "640M")
            })?;
        }
        stage.wait("the claim shows the new size", Duration::from_secs(120), || {
            let path = "-o=jsonpath={.status.capacity.storage}";
            Ok(stage.kubectl().run(&["get", "pvc", "training", path])? == LATER)
        })?;
        Ok(format!("{FIRST} to {LATER}, nothing remounted"))
    }))?;
    must(table.run("the checkpoint is still whole", || checkpoint_is_whole(stage)))?;
    // A user's own installation may have a history.
    if stage.cluster().is_some() {
        must(table.run("no container of Forebay has restarted", || stage.nothing_restarted()))?;
    }
    Ok(())
}

fn checkpoint_is_whole(stage: &Stage) -> Result<String> {
    let script = "cd /data/checkpoint/*/ && sha256sum --quiet -c rank-*.sum && du -sh . | cut -f1";
    Ok(format!("{} verified by the third pod", stage.exec("notebook", script)?.trim()))
}

/// Prints what a user looks at.
fn look(stage: &Stage, table: &mut Table) {
    let mut shown = String::new();
    table.run("kubectl get storagecluster,storagenode,pvc; kubectl forebay status", || {
        let get = ["get", "storagecluster,storagenode,pvc", "-A"];
        shown = format!("$ kubectl {}\n{}", get.join(" "), stage.kubectl().run(&get)?);
        shown.push_str("\n$ kubectl forebay status\n");
        shown.push_str(&stage.forebay_status()?);
        Ok(String::new())
    });
    println!("\n{shown}");
}

/// Loses a node, so that another one serves its instance. Not on a user's own cluster: its nodes are not ours.
fn lose_a_node(stage: &Stage, table: &mut Table) -> Result<()> {
    let mut moving = None;
    must(table.run(
        "a StorageCluster of two instances on an NVMe-oF target, pods that write and read on both",
        || {
            let (begun, places) = Moving::start(stage)?;
            moving = Some(begun);
            Ok(places)
        },
    ))?;
    let moving = moving.context("it has begun")?;
    must(table.run("the storage node loses its power, and no person acts", || moving.lose_node()))?;
    must(table.run("the node is back", || moving.node_returns()))?;
    must(table.run("all four pods have gone on", || moving.finish()))?;
    must(
        table.run("the checkpoint, on the node that was lost, is still whole", || checkpoint_is_whole(stage)),
    )
}

/// Runs the story on this stage, with the loss of a node if `node_loss` is set. Returns whether every step succeeded.
pub fn tell(stage: &Stage, table: &mut Table, started: Instant, node_loss: bool) -> bool {
    let reported = install(stage, table).and_then(|()| use_it(stage, table)).and_then(|()| {
        if node_loss && stage.cluster().is_some() {
            lose_a_node(stage, table)?;
        }
        look(stage, table);
        Ok(())
    });
    if let Err(error) = reported {
        say(format!("{error:#}\n{}", stage.describe()));
    }
    print!("\n{}", table.render());
    println!(
        "{} steps done, {} failed, {:.0} s in all\n",
        table.passed(),
        table.failed(),
        started.elapsed().as_secs_f64()
    );
    if let Some(farewell) = stage.farewell() {
        println!("{farewell}");
    }
    table.failed() == 0
}
