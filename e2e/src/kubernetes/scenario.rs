//! What may happen to Forebay in a cluster, and must not be noticed by those who use a volume.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::stage::{CLUSTER, LONG, NAMESPACE, RELEASE, Stage, condition};
use super::story;
use super::workload::{Stream, claim};
use crate::progress::say;
use crate::report::Table;

/// One scenario.
pub struct Scenario {
    /// Its name, which filters match.
    pub name: &'static str,
    /// Whether it needs the lab's own nodes.
    pub lab_only: bool,
    run: fn(&Stage) -> Result<String>,
}

/// All scenarios in the order they run: the last one removes Forebay.
pub const ALL: &[Scenario] = &[
    Scenario { name: "instance pod deleted under a writer and a reader", lab_only: false, run: pod_deleted },
    Scenario { name: "operator killed during a rollout", lab_only: false, run: operator_killed },
    Scenario { name: "upgrade under a writer and a reader", lab_only: false, run: upgraded },
    Scenario { name: "storage node rebooted under a writer and a reader", lab_only: true, run: rebooted },
    Scenario { name: "a NIC that goes down marks its node", lab_only: true, run: nic_down },
    Scenario {
        name: "a cluster that no node fits says why, node by node",
        lab_only: false,
        run: no_node_fits,
    },
    Scenario { name: "uninstall leaves nothing but what the docs say", lab_only: false, run: uninstalled },
];

/// Runs the scenarios whose name contains one of `filters` (all where there are none) after installing Forebay; whether
/// all passed.
pub fn run(stage: &Stage, filters: &[String], table: &mut Table) -> Result<bool> {
    let chosen: Vec<&Scenario> = ALL
        .iter()
        .filter(|scenario| filters.is_empty() || filters.iter().any(|filter| scenario.name.contains(filter)))
        .filter(|scenario| stage.cluster().is_some() || !scenario.lab_only)
        .collect();
    ensure!(!chosen.is_empty(), "no scenario's name contains any of {filters:?}");
    let started = Instant::now();
    if let Err(error) = story::install(stage, table) {
        say(format!("{error:#}\n{}", stage.describe()));
    } else {
        stage.kubectl().apply(&claim("1Gi"))?;
        for scenario in chosen {
            if table.run(scenario.name, || (scenario.run)(stage)).is_none() {
                say(stage.describe());
            }
        }
    }
    print!("\n{}", table.render());
    println!(
        "{} passed, {} failed, {:.0} s in all",
        table.passed(),
        table.failed(),
        started.elapsed().as_secs_f64()
    );
    Ok(table.failed() == 0)
}

fn instance(stage: &Stage) -> Result<String> {
    let path = "-o=jsonpath={.status.instances[0].name}";
    stage.kubectl().run(&["get", "storagecluster", CLUSTER, "-n", NAMESPACE, path])
}

fn pod_uid(stage: &Stage, pod: &str) -> Result<String> {
    stage.kubectl().run(&["get", "pod", pod, "-n", NAMESPACE, "-o=jsonpath={.metadata.uid}"])
}

/// On the lab's two compute nodes; anywhere on someone else's.
fn stream(stage: &Stage) -> Result<Stream<'_>> {
    Stream::start(stage, stage.cluster().map(|_| ["compute1", "compute2"]))
}

/// Waits until both have got on since now, and ends them.
fn resumed(stream: Stream<'_>) -> Result<String> {
    let at = stream.progress()?;
    stream.wait_progress((at.0 + 5, at.1 + 5))?;
    let (written, verified) = stream.finish()?;
    Ok(format!("{written} files written, {verified} verified, no error"))
}

/// Another pod than this one is ready.
fn wait_replaced(stage: &Stage, pod: &str, old: &str) -> Result<()> {
    stage.wait(&format!("another {pod} is ready"), LONG, || {
        let found = stage.kubectl().find(&["pod", pod, "-n", NAMESPACE])?;
        let Some(found) = found else { return Ok(false) };
        Ok(found["metadata"]["uid"] != old && condition(&found, "Ready")["status"] == "True")
    })
}

fn pod_deleted(stage: &Stage) -> Result<String> {
    let stream = stream(stage)?;
    let pod = format!("{}-0", instance(stage)?);
    let old = pod_uid(stage, &pod)?;
    stage.kubectl().run(&["delete", "pod", &pod, "-n", NAMESPACE, "--wait=false"])?;
    wait_replaced(stage, &pod, &old)?;
    stage.wait_cluster_ready()?;
    resumed(stream)
}

/// The pod's own template, changed without a change of what runs: it must be rolled out.
fn touch(stage: &Stage, size: &str) -> Result<()> {
    let patch = format!(r#"{{"spec":{{"limits":{{"resources":{{"requests":{{"memory":"{size}"}}}}}}}}}}"#);
    let patched = ["patch", "storagecluster", CLUSTER, "-n", NAMESPACE, "--type=merge", "-p", patch.as_str()];
    stage.kubectl().run(&patched).map(drop)
}

fn operator_killed(stage: &Stage) -> Result<String> {
    let pod = format!("{}-0", instance(stage)?);
    let mut kills = 0;
    // At three different points of a rollout: at once, when the old pod goes, when the new one comes.
    for (round, size) in ["65Mi", "66Mi", "67Mi"].into_iter().enumerate() {
        let old = pod_uid(stage, &pod)?;
        touch(stage, size)?;
        if round > 0 {
            stage.wait("the old pod ends", LONG, || {
                let found = stage.kubectl().find(&["pod", &pod, "-n", NAMESPACE])?;
                let Some(found) = found else { return Ok(true) };
                let ending = !found["metadata"]["deletionTimestamp"].is_null();
                Ok(if round == 1 {
                    ending || found["metadata"]["uid"] != old
                } else {
                    found["metadata"]["uid"] != old
                })
            })?;
        }
        let selector = "app.kubernetes.io/component=operator";
        stage.kubectl().run(&[
            "delete",
            "pod",
            "-n",
            NAMESPACE,
            "-l",
            selector,
            "--grace-period=0",
            "--force",
        ])?;
        kills += 1;
        wait_replaced(stage, &pod, &old)?;
        stage.wait_cluster_ready()?;
    }
    stage.wait_rolled_out()?;
    Ok(format!("killed {kills} times, converged each time"))
}

fn upgraded(stage: &Stage) -> Result<String> {
    let stream = stream(stage)?;
    let pod = format!("{}-0", instance(stage)?);
    let old = pod_uid(stage, &pod)?;
    // The same bytes under another name, where no second image is at hand: every part is replaced all the same.
    let image = "docker.io/forebay/forebay:0.1.0-next";
    if stage.cluster().is_none() {
        touch(stage, "80Mi")?;
    } else {
        stage.install(&["--set", "image.tag=0.1.0-next"])?;
    }
    wait_replaced(stage, &pod, &old)?;
    stage.wait_cluster_ready()?;
    if stage.cluster().is_some() {
        let path = "-o=jsonpath={.spec.containers[0].image}";
        let runs = stage.kubectl().run(&["get", "pod", &pod, "-n", NAMESPACE, path])?;
        ensure!(runs == image, "the instance runs {runs}");
    }
    resumed(stream)
}

fn rebooted(stage: &Stage) -> Result<String> {
    let cluster = stage.cluster().context("only in the lab")?;
    let stream = stream(stage)?;
    let started = Instant::now();
    cluster.reboot("storage1")?;
    let pod = format!("{}-0", instance(stage)?);
    stage.wait("the instance is ready again", LONG, || {
        let found = stage.kubectl().get(&["pod", &pod, "-n", NAMESPACE])?;
        Ok(condition(&found, "Ready")["status"] == "True")
    })?;
    stage.wait_cluster_ready()?;
    let back = started.elapsed().as_secs();
    Ok(format!("back after {back} s; {}", resumed(stream)?))
}

fn nic_down(stage: &Stage) -> Result<String> {
    let cluster = stage.cluster().context("only in the lab")?;
    let node = cluster.lab().node("storage1");
    let devices = || -> Result<usize> {
        let found = stage.kubectl().get(&["storagenode", "storage1"])?;
        Ok(found["status"]["rdmaDevices"].as_array().map_or(0, Vec::len))
    };
    ensure!(devices()? > 0, "storage1 shows no RDMA device");
    node.run("rdma link delete rxe0")?;
    let gone =
        stage.wait("the StorageNode shows no device", Duration::from_secs(240), || Ok(devices()? == 0));
    let netdev = "ip -o link show | sed -n 's/^[0-9]*: \\(e[^:@]*\\)[:@].*/\\1/p' | head -n 1";
    node.run(&format!("rdma link add rxe0 type rxe netdev $({netdev})"))?;
    gone?;
    stage.wait("the StorageNode shows it again", Duration::from_secs(240), || Ok(devices()? > 0))?;
    Ok("seen to go and to come".into())
}

fn no_node_fits(stage: &Stage) -> Result<String> {
    let other = story::STORAGE_CLUSTER
        .replace("name: main", "name: picky")
        .replace("linkLayer: Ethernet", "linkLayer: InfiniBand")
        .replace("    - name: forebay\n      default: true\n", "    - name: picky\n");
    stage.kubectl().apply(&other)?;
    let get = || stage.kubectl().get(&["storagecluster", "picky", "-n", NAMESPACE]);
    let explained = stage.wait("a condition names every node", Duration::from_secs(120), || {
        let text = get()?["status"].to_string();
        let nodes = stage.kubectl().get(&["nodes"])?;
        let names = nodes["items"].as_array().map_or(&[][..], Vec::as_slice);
        Ok(names.iter().all(|node| node["metadata"]["name"].as_str().is_some_and(|name| text.contains(name))))
    });
    let cluster = get()?;
    let ready = condition(&cluster, "Ready").clone();
    stage.kubectl().run(&["delete", "storagecluster", "picky", "-n", NAMESPACE, "--timeout=240s"])?;
    explained?;
    ensure!(ready["status"] == "False", "Ready is {ready}");
    Ok(ready["reason"].as_str().unwrap_or("").to_owned())
}

fn uninstalled(stage: &Stage) -> Result<String> {
    let kubectl = stage.kubectl();
    kubectl.run(&["delete", "job,pod", "--all", "-n", "default", "--wait=true"])?;
    kubectl.run(&["delete", "pvc", "training", "--wait=true", "--timeout=180s"])?;
    stage.wait("the volume is gone", Duration::from_secs(180), || {
        Ok(kubectl.get(&["pv"])?["items"].as_array().is_some_and(Vec::is_empty))
    })?;
    kubectl.run(&["delete", "storagecluster", CLUSTER, "-n", NAMESPACE, "--timeout=360s"])?;
    stage.helm(&["uninstall", RELEASE, "--wait", "--timeout", "240s"])?;
    let mut left = Vec::new();
    let mut look = |kinds: &[&str]| -> Result<()> {
        let found: Value = kubectl.get(kinds)?;
        for object in found["items"].as_array().into_iter().flatten() {
            let name = object["metadata"]["name"].as_str().unwrap_or("");
            let kind = object["kind"].as_str().unwrap_or("");
            // Every namespace has these.
            if !matches!(name, "kube-root-ca.crt" | "default") {
                left.push(format!("{kind}/{name}"));
            }
        }
        Ok(())
    };
    stage.wait("pods have ended", Duration::from_secs(180), || {
        Ok(kubectl.get(&["pods", "-n", NAMESPACE])?["items"].as_array().is_some_and(Vec::is_empty))
    })?;
    let namespaced = "statefulset,deployment,daemonset,service,configmap,secret,serviceaccount,role,rolebinding,lease,networkpolicy,poddisruptionbudget";
    look(&[namespaced, "-n", NAMESPACE])?;
    let everywhere = "clusterrole,clusterrolebinding,csidriver,storageclass,validatingadmissionpolicy,validatingadmissionpolicybinding,priorityclass";
    let found = kubectl.get(&[everywhere])?;
    for object in found["items"].as_array().into_iter().flatten() {
        let name = object["metadata"]["name"].as_str().unwrap_or("");
        if name.contains("forebay") {
            left.push(format!("{}/{name}", object["kind"].as_str().unwrap_or("")));
        }
    }
    if !left.is_empty() {
        bail!("left behind: {}", left.join(", "));
    }
    // By choice: CRDs, and the data on the nodes.
    let crds = kubectl.run(&["get", "crd", "-o", "name"])?;
    ensure!(crds.contains("storageclusters.storage.forebay.io"), "helm keeps the CRDs, the docs say: {crds}");
    Ok("the CRDs stay, as the docs say".into())
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_unique() {
        let mut names: Vec<&str> = super::ALL.iter().map(|scenario| scenario.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), super::ALL.len());
    }

    #[test]
    fn the_cluster_that_fits_nowhere_differs_from_the_one_that_does() {
        let other = super::story::STORAGE_CLUSTER.replace("linkLayer: Ethernet", "linkLayer: InfiniBand");
        assert_ne!(other, super::story::STORAGE_CLUSTER);
    }
}
