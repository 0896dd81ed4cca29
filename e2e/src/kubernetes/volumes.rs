//! What the kubelet and the node plugin do with a volume besides mounting it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::stage::{CLUSTER, LONG, NAMESPACE, Stage};
use super::workload::{CLASS, claim_of, create_class, mounted, pod_with, volume};
use crate::lab::Node;

/// Node of the pods.
const NODE: &str = "compute1";
/// The kubelet measures volumes once a minute.
const MEASURED: Duration = Duration::from_secs(180);
const MIB: u64 = 1 << 20;

/// A claim and pods that use it. Removed when dropped.
struct Users<'a> {
    stage: &'a Stage,
    claim: &'a str,
    pods: &'a [&'a str],
}

impl<'a> Users<'a> {
    fn new(stage: &'a Stage, claim: &'a str, pods: &'a [&'a str]) -> Result<Self> {
        Self::of(CLASS, stage, claim, pods)
    }

    fn of(class: &str, stage: &'a Stage, claim: &'a str, pods: &'a [&'a str]) -> Result<Self> {
        let users = Self { stage, claim, pods };
        stage.kubectl().apply(&claim_of(class, claim, "256Mi"))?;
        Ok(users)
    }

    /// Starts a pod on [`NODE`] with `security` in its security context, and waits until it is ready.
    fn start(&self, pod: &str, security: &str) -> Result<()> {
        const USER: &str = "    runAsUser: 1000\n";
        let manifest = pod_with(self.claim, pod, &self.stage.image()?, NODE, "sleep infinity");
        ensure!(manifest.contains(USER), "the pod's security context");
        self.stage.kubectl().apply(&manifest.replace(USER, &format!("{USER}{security}")))?;
        self.stage.wait_pod(pod)
    }

    fn end(&self, pod: &str) -> Result<()> {
        self.stage.kubectl().run(&["delete", "pod", pod, "--wait=true", "--timeout=300s"]).map(drop)
    }

    /// Removes everything, and waits until the claim is gone.
    fn remove(self) -> Result<()> {
        self.stage
            .kubectl()
            .run(&[&["delete", "pod", "--ignore-not-found", "--timeout=300s"], self.pods].concat())?;
        self.stage.kubectl().run(&["delete", "pvc", self.claim, "--timeout=240s"]).map(drop)
    }
}

impl Drop for Users<'_> {
    fn drop(&mut self) {
        let kubectl = self.stage.kubectl();
        let _ = kubectl.run(&[&["delete", "pod", "--ignore-not-found", "--wait=false"], self.pods].concat());
        let _ = kubectl.run(&["delete", "pvc", self.claim, "--ignore-not-found", "--wait=false"]);
    }
}

/// The value of a kubelet metric for a claim, if there is one.
fn metric(metrics: &str, name: &str, claim: &str) -> Option<f64> {
    let labels = format!("persistentvolumeclaim=\"{claim}\"");
    let line = metrics.lines().find(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{') && rest.contains(&labels))
    })?;
    line.rsplit(' ').next()?.parse().ok()
}

/// Checks that the kubelet's own metrics of a claim match the volume.
pub(super) fn measured(stage: &Stage) -> Result<String> {
    let users = Users::new(stage, "measured", &["measuring"])?;
    users.start("measuring", "")?;
    let written = 8 * MIB;
    stage.exec("measuring", &format!("head -c {written} /dev/urandom > /data/f; sync /data/f"))?;
    let size: u64 = stage.exec("measuring", "df --output=size -B1 /data | tail -n 1")?.trim().parse()?;
    let metrics = || stage.kubectl().run(&["get", "--raw", &format!("/api/v1/nodes/{NODE}/proxy/metrics")]);
    let mut found = [0.0; 3];
    let wait = stage.wait("the kubelet has measured the volume after the write", MEASURED, || {
        let text = metrics()?;
        for (value, name) in found.iter_mut().zip(["capacity", "available", "used"]) {
            let name = format!("kubelet_volume_stats_{name}_bytes");
            *value = metric(&text, &name, "measured").with_context(|| format!("no {name} of the claim"))?;
        }
        Ok(found[2] >= written as f64)
    });
    wait.with_context(|| format!("capacity, available and used: {found:?}"))?;
    let [capacity, available, used] = found;
    ensure!(capacity == size as f64, "the kubelet says {capacity} bytes, df in the pod {size}");
    ensure!(available + used <= capacity && available > 0.0, "{found:?} do not go together");
    users.remove()?;
    Ok(format!("{capacity} bytes, {used} used, {available} available"))
}

/// Each of two pods on one node sees the files with its own group.
pub(super) fn groups(stage: &Stage) -> Result<String> {
    let node = stage.cluster().context("only in the lab")?.lab().node(NODE);
    let pods = ["group1", "group2", "group3"];
    let users = Users::new(stage, "groups", &pods)?;
    let groups = ["3001", "3002"];
    for (pod, group) in pods.iter().zip(groups) {
        users.start(pod, &format!("    fsGroup: {group}\n"))?;
    }
    let look = |pod: &str, group: &str| -> Result<()> {
        let script =
            format!("echo {pod} >> /data/shared; stat -c %g /data /data/shared; id -G; cat /data/shared");
        let said = stage.exec(pod, &script)?;
        let lines: Vec<&str> = said.lines().collect();
        ensure!(lines.len() > 3 && lines[..2] == [group, group], "{pod}, of fsGroup {group}, sees {said:?}");
        ensure!(lines[2].split(' ').any(|one| one == group), "{pod} is not in {group}: {said:?}");
        Ok(())
    };
    for (pod, group) in pods.iter().zip(groups) {
        look(pod, group)?;
    }
    let both = stage.exec(pods[0], "cat /data/shared")?;
    ensure!(both.lines().eq(pods[..2].iter().copied()), "the pods have written {both:?}");
    // The first pod's group is that of the staged mount. When that pod ends, the other's group is unaffected, and the first
    // group can be used again.
    users.end(pods[0])?;
    look(pods[1], groups[1])?;
    users.start(pods[2], &format!("    fsGroup: {}\n", groups[0]))?;
    look(pods[2], groups[0])?;
    let name = volume(stage, "groups")?;
    for pod in &pods[1..] {
        users.end(pod)?;
    }
    stage.wait("the node has unmounted it for every group", LONG, || Ok(mounted(node, &name).is_err()))?;
    users.remove()?;
    Ok(format!("fsGroup {} beside {} on {NODE}, each in its pod", groups[0], groups[1]))
}

/// Blocks all traffic between a node and a server. Dropping this unblocks it.
struct Cut<'a>(&'a Node, String);

impl<'a> Cut<'a> {
    fn new(node: &'a Node, server: &str) -> Result<Self> {
        let cut = Self(node, server.to_owned());
        cut.rules("-I")?;
        Ok(cut)
    }

    fn rules(&self, action: &str) -> Result<()> {
        let Self(node, server) = self;
        node.run(&format!("iptables -w {action} OUTPUT -d {server} -p tcp --dport 445 -j DROP")).map(drop)
    }
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        let _ = self.rules("-D");
    }
}

/// A StorageClass with mounts that cache attributes for an hour: before the kubelet calls NodeUnstageVolume, it stats the
/// directory, and would itself hang there. Removed when dropped.
struct Caching<'a>(&'a Stage);

impl<'a> Caching<'a> {
    const NAME: &'static str = "caching";

    fn new(stage: &'a Stage) -> Result<Self> {
        create_class(stage, Self::NAME, &["actimeo=3600"], &[])?;
        Ok(Self(stage))
    }
}

impl Drop for Caching<'_> {
    fn drop(&mut self) {
        let _ = self.0.kubectl().run(&["delete", "storageclass", Self::NAME]);
    }
}

/// A pod is deleted while its server does not answer, so the unmount hangs. When the server is back, another pod on that node
/// gets the volume.
pub(super) fn staged_again(stage: &Stage) -> Result<String> {
    let node = stage.cluster().context("only in the lab")?.lab().node(NODE);
    let kubectl = stage.kubectl();
    let _class = Caching::new(stage)?;
    let users = Users::of(Caching::NAME, stage, "hanging", &["before", "after"])?;
    users.start("before", "")?;
    let sum = stage.exec("before", "head -c 1M /dev/urandom > /data/f; sync /data/f; sha256sum < /data/f")?;
    let name = volume(stage, "hanging")?;
    mounted(node, &name)?;
    let path = "-o=jsonpath={.status.instances[0].address}";
    let address = kubectl.run(&["get", "storagecluster", CLUSTER, "-n", NAMESPACE, path])?;
    let cut = Cut::new(node, &address)?;
    // Immediately: a client that has detected the connection loss unmounts without the server.
    kubectl.run(&["delete", "pod", "before", "--grace-period=1", "--timeout=300s"])?;
    // A mount that the kernel has detached from the tree may still hang in the unmount.
    let selector = "app.kubernetes.io/component=csi-node";
    let on_node = format!("spec.nodeName={NODE}");
    let path = "-o=jsonpath={.items[0].metadata.name}";
    let plugin =
        kubectl.run(&["get", "pod", "-n", NAMESPACE, "-l", selector, "--field-selector", &on_node, path])?;
    let logs = || kubectl.run(&["logs", "-n", NAMESPACE, &plugin, "-c", "driver", "--tail=200"]);
    let mut how = String::new();
    stage.wait("the node plugin detaches the mount that hangs", LONG, || {
        let logs = logs()?;
        let line = logs.lines().find(|line| line.contains("detaching") && line.contains(&name));
        how = line.unwrap_or_default().to_owned();
        Ok(line.is_some() && mounted(node, &name).is_err())
    })?;
    // Staging while the server is still away fails, and must not get in the way later.
    kubectl.apply(&pod_with("hanging", "after", &stage.image()?, NODE, "sleep infinity"))?;
    std::thread::sleep(Duration::from_secs(20));
    let phase = kubectl.run(&["get", "pod", "after", "-o=jsonpath={.status.phase}"])?;
    ensure!(phase == "Pending", "without its server the pod is {phase}");
    drop(cut);
    stage.wait_pod("after")?;
    let again = stage.exec("after", "sha256sum < /data/f; echo more > /data/g; sync /data/g")?;
    ensure!(again == sum, "the file is {again}, it was {sum}");
    users.remove()?;
    let why = if how.contains("statfs") { "a statfs hung" } else { "the unmount hung" };
    Ok(format!("{why}; detached, staged again, the file is whole"))
}

/// The kubelet republishes the pod's volume about once a minute.
const REPUBLISHED: Duration = Duration::from_secs(300);

/// Sets two new passwords while a pod writes. The mount receives each, so that it can reconnect when its original password is
/// no longer valid.
pub(super) fn rotated(stage: &Stage) -> Result<String> {
    let node = stage.cluster().context("only in the lab")?.lab().node(NODE);
    let kubectl = stage.kubectl();
    let users = Users::new(stage, "rotated", &["rotating"])?;
    users.start("rotating", "")?;
    let name = volume(stage, "rotated")?;
    let handle = kubectl.run(&["get", "pv", &name, "-o=jsonpath={.spec.csi.volumeHandle}"])?;
    let write = "cd /data; n=0; while [ ! -e /tmp/enough ]; do n=$((n + 1)); { echo $n > next && mv next last; } || echo $n >> /tmp/failed; \
                 sleep 0.2; done; echo $n > /tmp/used";
    stage.exec("rotating", &format!("nohup sh -c '{write}' > /dev/null 2>&1 &"))?;
    let on_node = format!("spec.nodeName={NODE}");
    let plugin = kubectl.run(&[
        "get",
        "pod",
        "-n",
        NAMESPACE,
        "-l",
        "app.kubernetes.io/component=csi-node",
        "--field-selector",
        &on_node,
        "-o=jsonpath={.items[0].metadata.name}",
    ])?;
    let renewed = || -> Result<usize> {
        let logs = kubectl.run(&["logs", "-n", NAMESPACE, &plugin, "-c", "driver", "--tail=2000"])?;
        let of_it = |line: &&str| line.contains("has the volume's new password") && line.contains(&name);
        Ok(logs.lines().filter(of_it).count())
    };
    let rotate =
        ["exec", "-n", NAMESPACE, "deploy/forebay-csi-controller", "-c", "driver", "--", "forebay-csi"];
    for number in 1..=2 {
        kubectl.run(&[&rotate[..], &["rotate-credentials", &handle]].concat())?;
        stage.wait("the mount has the new password", REPUBLISHED, || Ok(renewed()? >= number))?;
    }
    stage.exec("rotating", "touch /tmp/enough; while [ ! -s /tmp/used ]; do sleep 0.1; done")?;
    let failed = stage.exec("rotating", "cat /tmp/failed 2>/dev/null || true")?;
    ensure!(failed.is_empty(), "these writes failed: {failed}");
    let path = "-o=jsonpath={.status.instances[0].address}";
    let address = kubectl.run(&["get", "storagecluster", CLUSTER, "-n", NAMESPACE, path])?;
    let cut = node.run(&format!("ss -KtnHO state established dst {address}:445"))?;
    ensure!(!cut.is_empty(), "there is no connection to cut");
    let used = stage.exec("rotating", "[ $(cat /data/last) = $(cat /tmp/used) ] && echo more > /data/more && sync /data/more && cat /tmp/used")?;
    users.remove()?;
    Ok(format!("{} writes, 2 passwords, connected again by the second", used.trim()))
}

/// `kubectl forebay bench` with two pods: results that are possible, and nothing left of it.
pub(super) fn benched(stage: &Stage) -> Result<String> {
    // Small enough for emulated nodes.
    let scale = ["--pods=2", "--size=48Mi", "--scale=0.001", "--seconds=10", "--output=json"];
    let (said, code) = stage.forebay(&[&["bench", CLASS], &scale[..]].concat())?;
    ensure!(code == Some(0), "kubectl forebay bench: {code:?} {said}");
    // Its progress, on standard error, follows.
    let mut results = serde_json::Deserializer::from_str(&said).into_iter::<Vec<serde_json::Value>>();
    let results = results.next().context("no results")?.with_context(|| said.clone())?;
    let [training, checkpoint] = &results[..] else { anyhow::bail!("{said}") };
    let number =
        |of: &serde_json::Value, name: &str| of[name].as_f64().with_context(|| format!("{name} of {of}"));
    let utilisation = number(training, "utilisationPercent")?;
    ensure!(training["accelerators"] == 2 && utilisation > 0.0 && utilisation <= 100.0, "{training}");
    ensure!(
        number(checkpoint, "bytes")? > 1e6 && number(checkpoint, "writeGigabytesPerSecond")? > 0.0,
        "{checkpoint}"
    );
    no_load_is_left(stage)?;
    Ok(format!("{utilisation:.1} % utilisation of 2 simulated accelerators"))
}

fn no_load_is_left(stage: &Stage) -> Result<()> {
    stage.wait("nothing is left of it", LONG, || {
        let left = stage.kubectl().run(&["get", "job,pod,pvc", "-A", "-l", "forebay.io/load", "-o=name"])?;
        Ok(left.trim().is_empty())
    })
}

/// `kubectl forebay rehearse`: a server is killed under a writer, which notices only that it takes longer.
pub(super) fn rehearsed(stage: &Stage) -> Result<String> {
    let (said, code) = stage.forebay(&["rehearse", CLASS, "--yes", "--seconds=150", "--output=json"])?;
    ensure!(code == Some(0), "kubectl forebay rehearse: {code:?} {said}");
    // Its progress, on standard error, follows.
    let mut reports = serde_json::Deserializer::from_str(&said).into_iter::<serde_json::Value>();
    let report = reports.next().context("no report")?.with_context(|| said.clone())?;
    let timeline = report["timeline"].as_array().context("no timeline")?;
    let at = |end: &str| {
        timeline.iter().position(|one| one["what"].as_str().is_some_and(|what| what.contains(end)))
    };
    let [killed, still, ready, on] =
        ["has one second to end", "the writer stands still", "is ready", "the writer goes on"].map(at);
    // The clocks of nodes and of this machine differ, and the writer may go on before the kubelet has noticed that the server is
    // ready.
    ensure!(killed.is_some() && killed < ready, "the timeline: {timeline:?}");
    ensure!(still.is_some() && still < on, "the timeline: {timeline:?}");
    let number = |name: &str| report[name].as_u64().with_context(|| format!("{name} of {report}"));
    ensure!(number("acknowledged")? > 10 && number("lost")? == 0 && number("failed")? == 0, "{report}");
    no_load_is_left(stage)?;
    stage.wait_cluster_ready()?;
    Ok(format!("the writer stood still for {} ms", number("stoodStillMilliseconds")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_is_selected_by_name_and_claim() {
        let text = "# HELP kubelet_volume_stats_used_bytes [ALPHA] Number of used bytes in the volume\n\
            kubelet_volume_stats_used_bytes{namespace=\"default\",persistentvolumeclaim=\"other\"} 1\n\
            kubelet_volume_stats_used_bytes{namespace=\"default\",persistentvolumeclaim=\"mine\"} 8.388608e+06\n";
        assert_eq!(metric(text, "kubelet_volume_stats_used_bytes", "mine"), Some(8_388_608.0));
        assert_eq!(metric(text, "kubelet_volume_stats_used", "mine"), None);
        assert_eq!(metric(text, "kubelet_volume_stats_used_bytes", "min"), None);
    }
}
