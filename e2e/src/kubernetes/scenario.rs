//! Events that can happen to Forebay in a cluster and that the users of a volume must not notice.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::stage::{CLUSTER, LONG, NAMESPACE, RELEASE, Stage, condition};
use super::workload::{OnError, Stream, claim};
use super::{programs, rdma, story, takeover, volumes};
use crate::lab::Node;
use crate::progress::say;
use crate::report::Table;

/// Pods of the additional StorageCluster next to the story's.
const PICKY: &str = "storage.forebay.io/cluster=picky";

/// One scenario.
pub struct Scenario {
    /// Its name. Filters match it.
    pub name: &'static str,
    run: fn(&Stage) -> Result<String>,
}

/// All scenarios in the order they run: the last one removes Forebay.
pub const ALL: &[Scenario] = &[
    Scenario { name: "instance pod deleted under a writer and a reader", run: pod_deleted },
    Scenario { name: "operator killed during a rollout", run: operator_killed },
    Scenario { name: "upgrade under a writer and a reader", run: upgraded },
    Scenario { name: "storage node rebooted under a writer and a reader", run: rebooted },
    Scenario { name: "servers run only on nodes with a matching RDMA NIC", run: lands_where_it_fits },
    Scenario { name: "a NIC that goes down clears RdmaReady of its node", run: nic_down },
    Scenario { name: "a cluster that fits no node reports the reason of each node", run: no_node_fits },
    Scenario {
        name: "RDMA: a claim on two nodes, TCP on a node without RDMA, refusal where RDMA is required",
        run: rdma::chosen,
    },
    Scenario {
        name: "RDMA: a device that appears later is added to the server, under a writer and a reader",
        run: rdma::came_later,
    },
    Scenario { name: "kubelet metrics of a claim", run: volumes::measured },
    Scenario { name: "two pods on one node with different fsGroups", run: volumes::groups },
    Scenario { name: "a volume is staged again after a hung unmount", run: volumes::staged_again },
    Scenario { name: "password rotation of a volume in use", run: volumes::rotated },
    Scenario {
        name: "programs in pods: git, pip, Hugging Face, tar, sqlite3, rsync",
        run: programs::programs,
    },
    Scenario { name: "posix volume: files of two users on two nodes", run: programs::owners },
    Scenario { name: "kubectl forebay bench", run: volumes::benched },
    Scenario { name: "kubectl forebay rehearse", run: volumes::rehearsed },
    Scenario { name: "helm test", run: tested },
    Scenario { name: "instances on a bundled target outlive their node", run: takeover::node_lost },
    Scenario { name: "nodes cut off from the control plane: no takeover", run: takeover::cut_off },
    Scenario {
        name: "a recreated StorageCluster serves its volumes, also without its record",
        run: takeover::made_again,
    },
    Scenario { name: "uninstall leaves only what the documentation lists", run: uninstalled },
];

/// Installs Forebay, then runs the scenarios with a name that contains one of `filters` (all if there are none). Returns
/// whether all passed.
pub fn run(stage: &Stage, filters: &[String], table: &mut Table) -> Result<bool> {
    let chosen: Vec<&Scenario> = ALL
        .iter()
        .filter(|scenario| filters.is_empty() || filters.iter().any(|filter| scenario.name.contains(filter)))
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

pub(super) fn instance(stage: &Stage) -> Result<String> {
    let path = "-o=jsonpath={.status.instances[0].name}";
    stage.kubectl().run(&["get", "storagecluster", CLUSTER, "-n", NAMESPACE, path])
}

pub(super) fn pod_uid(stage: &Stage, pod: &str) -> Result<String> {
    stage.kubectl().run(&["get", "pod", pod, "-n", NAMESPACE, "-o=jsonpath={.metadata.uid}"])
}

pub(super) fn stream(stage: &Stage, on_error: OnError) -> Result<Stream<'_>> {
    Stream::start(stage, ["compute1", "compute2"], on_error)
}

/// Waits until writer and reader have made progress from now on, and ends them.
pub(super) fn resumed(stream: Stream<'_>) -> Result<String> {
    let at = stream.progress()?;
    stream.wait_progress((at.0 + 5, at.1 + 5))?;
    let (written, verified) = stream.finish()?;
    Ok(format!("{written} files written, {verified} verified, no error"))
}

/// Waits until another pod than this one is ready.
pub(super) fn wait_replaced(stage: &Stage, pod: &str, old: &str) -> Result<()> {
    stage.wait(&format!("another {pod} is ready"), LONG, || {
        let found = stage.kubectl().find(&["pod", pod, "-n", NAMESPACE])?;
        let Some(found) = found else { return Ok(false) };
        Ok(found["metadata"]["uid"] != old && condition(&found, "Ready")["status"] == "True")
    })
}

fn pod_deleted(stage: &Stage) -> Result<String> {
    let stream = stream(stage, OnError::End)?;
    let pod = format!("{}-0", instance(stage)?);
    let old = pod_uid(stage, &pod)?;
    stage.kubectl().run(&["delete", "pod", &pod, "-n", NAMESPACE, "--wait=false"])?;
    wait_replaced(stage, &pod, &old)?;
    stage.wait_cluster_ready()?;
    resumed(stream)
}

/// Changes the pod template without changing what runs: the operator must roll it out.
fn touch(stage: &Stage, size: &str) -> Result<()> {
    let patch = format!(r#"{{"spec":{{"limits":{{"resources":{{"requests":{{"memory":"{size}"}}}}}}}}}}"#);
    let patched = ["patch", "storagecluster", CLUSTER, "-n", NAMESPACE, "--type=merge", "-p", patch.as_str()];
    stage.kubectl().run(&patched).map(drop)
}

fn operator_killed(stage: &Stage) -> Result<String> {
    let pod = format!("{}-0", instance(stage)?);
    let mut kills = 0;
    // At three different points of a rollout: immediately, when the old pod is removed, and when the new one appears.
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
    let stream = stream(stage, OnError::End)?;
    let pod = format!("{}-0", instance(stage)?);
    let old = pod_uid(stage, &pod)?;
    stage.install(&["--set", "image.tag=0.1.0-next"])?;
    wait_replaced(stage, &pod, &old)?;
    stage.wait_cluster_ready()?;
    let path = "-o=jsonpath={.spec.containers[0].image}";
    let runs = stage.kubectl().run(&["get", "pod", &pod, "-n", NAMESPACE, path])?;
    ensure!(runs == "docker.io/forebay/forebay:0.1.0-next", "the instance runs {runs}");
    resumed(stream)
}

fn rebooted(stage: &Stage) -> Result<String> {
    let cluster = stage.cluster().context("only in the lab")?;
    // Data that the power cut destroys before it is synced is reported to its writer as an error, and the writer writes it
    // again.
    let stream = stream(stage, OnError::Again)?;
    let started = Instant::now();
    cluster.reboot("storage1")?;
    let pod = format!("{}-0", instance(stage)?);
    stage.wait("the instance is ready again", LONG, || {
        let found = stage.kubectl().get(&["pod", &pod, "-n", NAMESPACE])?;
        Ok(condition(&found, "Ready")["status"] == "True")
    })?;
    stage.wait_cluster_ready()?;
    let back = started.elapsed().as_secs();
    let at = stream.progress()?;
    stream.wait_progress((at.0 + 5, at.1 + 5))?;
    stream.verify_again()?;
    let again = stream.repetitions()?;
    let (written, verified) = stream.finish()?;
    Ok(format!("back after {back} s; {written} files written, {verified} verified, {again} calls done again"))
}

/// Creates an additional RDMA-capable NIC: soft-RoCE on a network device that is not connected.
pub(super) const FURTHER_NIC: &str = "modprobe -a dummy rdma_rxe\n\
     ip link add rdma0 type dummy\n\
     ip address add 192.168.78.1/24 dev rdma0\n\
     ip link set rdma0 up\n\
     rdma link add rxe1 type rxe netdev rdma0";

/// That NIC. Removed when dropped.
struct FurtherNic<'a>(&'a Node);

impl<'a> FurtherNic<'a> {
    fn new(node: &'a Node) -> Result<Self> {
        node.run(FURTHER_NIC)?;
        Ok(Self(node))
    }

    fn set(&self, state: &str) -> Result<()> {
        self.0.run(&format!("ip link set rdma0 {state}")).map(drop)
    }
}

impl Drop for FurtherNic<'_> {
    fn drop(&mut self) {
        let _ = self.0.run("rdma link delete rxe1; ip link delete rdma0");
    }
}

/// The port of the node's [`FurtherNic`] in its StorageNode; null if it is not listed.
fn further_port(stage: &Stage, node: &str) -> Result<Value> {
    let found = stage.kubectl().get(&["storagenode", node])?;
    let devices = found["status"]["rdmaDevices"].as_array();
    let device = devices.and_then(|all| all.iter().find(|device| device["name"] == "rxe1"));
    Ok(device.map_or(Value::Null, |device| device["ports"][0].clone()))
}

/// Waits until the StorageCluster `picky` reports these verdicts for the nodes.
fn wait_verdicts(stage: &Stage, what: &str, wanted: &[(&str, &str)]) -> Result<()> {
    stage.wait(&format!("{what}: {wanted:?}"), Duration::from_secs(120), || {
        let cluster = stage.kubectl().get(&["storagecluster", "picky", "-n", NAMESPACE])?;
        let nodes = cluster["status"]["nodes"].as_array().cloned().unwrap_or_default();
        Ok(wanted.iter().all(|(name, reason)| {
            nodes.iter().any(|node| node["name"] == *name && node["reason"] == *reason)
        }))
    })
}

/// An additional StorageCluster on other ports, with these lines in its `placement.rdma` and a directory that exists on every
/// node.
fn picky(rdma: &str) -> String {
    story::STORAGE_CLUSTER
        .replace("name: main", "name: picky")
        .replace("      linkLayer: Ethernet\n", rdma)
        .replace(
            "    transport: Auto\n",
            "    ports: {smb: 1445, smbDirect: 1446, admin: 19443, metrics: 19444}\n",
        )
        .replace("path: /var/lib/forebay", "path: /var/lib/forebay-picky")
        .replace("quota: Project", "quota: None")
        .replace("    - name: forebay\n      default: true\n", "    - name: picky\n")
}

fn lands_where_it_fits(stage: &Stage) -> Result<String> {
    let cluster = stage.cluster().context("only in the lab")?;
    let kubectl = stage.kubectl();
    let nic = FurtherNic::new(cluster.lab().node("compute1"))?;
    stage.wait("the StorageNode shows the further NIC", Duration::from_secs(120), || {
        Ok(further_port(stage, "compute1")?["usable"] == true)
    })?;
    let done = (|| {
        // On no node: each of these requires more than any port offers.
        for (rdma, storage1, compute1) in [
            ("      linkLayer: InfiniBand\n", "WrongLinkLayer", "WrongLinkLayer"),
            ("      minRateGbps: 400\n", "RdmaTooSlow", "RdmaTooSlow"),
            ("      devices: [mlx5_*]\n", "DeviceNotSelected", "DeviceNotSelected"),
        ] {
            kubectl.apply(&picky(rdma))?;
            let wanted = [("storage1", storage1), ("compute1", compute1), ("compute2", "RdmaMissing")];
            wait_verdicts(stage, rdma.trim(), &wanted)?;
        }
        let wanted =
            [("storage1", "DeviceNotSelected"), ("compute1", "RdmaPortDown"), ("compute2", "RdmaMissing")];
        nic.set("down")?;
        stage.wait("the StorageNode shows that it is down", Duration::from_secs(120), || {
            Ok(further_port(stage, "compute1")?["usable"] == false)
        })?;
        kubectl.apply(&picky("      netdevs: [rdma0]\n"))?;
        wait_verdicts(stage, "the link is down", &wanted)?;
        let none = kubectl.run(&["get", "pods", "-n", NAMESPACE, "-l", PICKY, "-o", "name"])?;
        ensure!(none.is_empty(), "it runs though no node fits: {none}");
        // And only on the node with a suitable port.
        nic.set("up")?;
        stage.wait("the cluster on the further NIC is Ready", LONG, || {
            let found = kubectl.get(&["storagecluster", "picky", "-n", NAMESPACE])?;
            Ok(condition(&found, "Ready")["status"] == "True")
        })?;
        kubectl.run(&["get", "pods", "-n", NAMESPACE, "-l", PICKY, "-o=jsonpath={.items[*].spec.nodeName}"])
    })();
    let gone = kubectl.run(&[
        "delete",
        "storagecluster",
        "picky",
        "-n",
        NAMESPACE,
        "--ignore-not-found",
        "--timeout=240s",
    ]);
    let landed = done?;
    gone?;
    ensure!(landed == "compute1", "it runs on {landed:?}");
    Ok("4 times nowhere, with the reason of each node; then on compute1 alone".into())
}

fn nic_down(stage: &Stage) -> Result<String> {
    let cluster = stage.cluster().context("only in the lab")?;
    let nic = FurtherNic::new(cluster.lab().node("compute1"))?;
    let deadline = Duration::from_secs(120);
    let ready = || -> Result<Value> {
        let found = stage.kubectl().get(&["storagenode", "compute1"])?;
        Ok(condition(&found, "RdmaReady").clone())
    };
    stage.wait("compute1 is RdmaReady", deadline, || Ok(ready()?["status"] == "True"))?;
    nic.set("down")?;
    let mut reason = String::new();
    stage.wait("compute1 is marked", deadline, || {
        let now = ready()?;
        reason = now["message"].as_str().unwrap_or("").to_owned();
        Ok(now["status"] == "False" && further_port(stage, "compute1")?["usable"] == false)
    })?;
    nic.set("up")?;
    stage.wait("compute1 is RdmaReady again", deadline, || Ok(ready()?["status"] == "True"))?;
    drop(nic);
    stage.wait("the device is gone", deadline, || Ok(further_port(stage, "compute1")?.is_null()))?;
    Ok(format!("marked ({reason}), and not any more"))
}

fn no_node_fits(stage: &Stage) -> Result<String> {
    stage.kubectl().apply(&picky("      linkLayer: InfiniBand\n"))?;
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

/// Runs the doctor as described in NOTES.txt, in a pod with read-only permissions.
fn tested(stage: &Stage) -> Result<String> {
    let said = stage.helm(&["test", RELEASE, "--logs", "--timeout", "240s"])?;
    let verdict = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default().trim().to_owned();
    ensure!(said.contains("Succeeded"), "{said}");
    ensure!(!verdict.is_empty(), "the doctor's words are not shown:\n{said}");
    Ok(verdict)
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
            // Every namespace has the first two; the rest is left on purpose (docs/guides/operations.md).
            let expected = ["kube-root-ca.crt", "default"].contains(&name)
                || kind == "ConfigMap" && name == takeover::RECORD
                || kind == "Lease"
                    && ["forebay-operator", "csi-forebay-io", "external-resizer-csi-forebay-io"]
                        .contains(&name);
            if !expected {
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
    // Kept on purpose: the CRDs, and the data on the nodes.
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
    fn picky_cluster_differs_from_the_minimal_example() {
        let other = super::picky("      linkLayer: InfiniBand\n");
        for wanted in [
            "name: picky\n",
            "linkLayer: InfiniBand",
            "forebay-picky",
            "smb: 1445",
            "quota: None",
            "- name: picky\n",
        ] {
            assert!(other.contains(wanted), "{wanted} in {other}");
        }
        assert!(!other.contains("linkLayer: Ethernet") && !other.contains("default: true"));
    }
}
