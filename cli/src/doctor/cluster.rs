//! The cluster as a whole: its version, Forebay's definitions and pods, StorageClasses, StorageClusters, claims.

use forebay_api::cluster::{BackendKind, InstancePhase, QuotaKind};
use forebay_api::{DRIVER, GROUP, StorageCluster, VERSION, names};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;

use super::{Finding, Report};
use crate::snapshot::Snapshot;

/// Oldest Kubernetes version that the chart supports (charts/forebay/Chart.yaml, kubeVersion).
pub(super) const KUBERNETES_MIN: (u32, u32) = (1, 32);

/// Kinds that must be served.
const KINDS: [&str; 2] = ["StorageCluster", "StorageNode"];

/// Label that distinguishes the chart's components, and the components that must exist.
const COMPONENT: &str = "app.kubernetes.io/component";
const COMPONENTS: [(&str, &str); 3] = [
    ("operator", "deployment/forebay-operator"),
    ("csi-controller", "deployment/forebay-csi-controller"),
    ("csi-node", "daemonset/forebay-csi-node"),
];

pub(crate) fn examine(snapshot: &Snapshot) -> Vec<Finding> {
    let mut report = Report::about("cluster");
    kubernetes(snapshot, &mut report);
    definitions(snapshot, &mut report);
    pods(snapshot, &mut report);
    csi_driver(snapshot, &mut report);
    storage_classes(snapshot, &mut report);
    claims(snapshot, &mut report);
    let mut findings = report.findings;
    match &snapshot.clusters {
        Ok(clusters) => findings.extend(clusters.iter().flat_map(storage_cluster)),
        // If the kind is not served, that has been reported already.
        Err(error) if !matches!(snapshot.served, Ok(None)) => {
            let mut report = Report::about("cluster");
            report.unread("StorageClusters", error);
            findings.extend(report.findings);
        }
        Err(_) => {}
    }
    findings
}

fn kubernetes(snapshot: &Snapshot, report: &mut Report) {
    match &snapshot.version {
        Err(error) => report.unread("the API server's version", error),
        Ok(text) => match version(text) {
            Some(found) if found >= KUBERNETES_MIN => report.ok(format!("Kubernetes {text}")),
            Some(_) => report.error(
                format!("Kubernetes {text} is too old"),
                format!("Forebay needs {}.{} or later", KUBERNETES_MIN.0, KUBERNETES_MIN.1),
                "upgrade the control plane",
            ),
            None => report.note(format!("unknown Kubernetes version {text:?}"), "", ""),
        },
    }
}

/// Parses a version: `v1.36.3+k3s1` is (1, 36).
fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.strip_prefix('v')?.split(['.', '+', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn definitions(snapshot: &Snapshot, report: &mut Report) {
    let fix =
        "kubectl apply --server-side -f charts/forebay/crds/ (of the chart's version that is installed)";
    match &snapshot.served {
        Err(error) => report.unread("the served kinds", error),
        Ok(None) => report.error(
            "Forebay's kinds are not installed",
            format!("{GROUP}/{VERSION} is not served"),
            format!("install the chart (docs/get-started/install.md), or: {fix}"),
        ),
        Ok(Some(kinds)) => {
            let missing: Vec<&str> =
                KINDS.into_iter().filter(|k| !kinds.iter().any(|found| found == k)).collect();
            if missing.is_empty() {
                report.ok(format!("{GROUP}/{VERSION} is served with all kinds that this program needs"));
            } else {
                report.error(
                    format!("{} is not installed", missing.join(" and ")),
                    format!("{GROUP}/{VERSION} serves only {}", kinds.join(", ")),
                    fix,
                );
            }
        }
    }
}

fn component(pod: &Pod) -> &str {
    pod.labels().get(COMPONENT).map_or("", String::as_str)
}

fn pods(snapshot: &Snapshot, report: &mut Report) {
    let pods = match &snapshot.pods {
        Ok(pods) => pods,
        Err(error) => return report.unread("Forebay's pods", error),
    };
    let place =
        snapshot.namespace.as_deref().map_or("any namespace".to_owned(), |n| format!("namespace {n}"));
    for (name, object) in COMPONENTS {
        let present = pods.iter().filter(|p| component(p) == name && !is_replaced(p, pods));
        let (ready, waiting): (Vec<&Pod>, Vec<&Pod>) = present.partition(|p| trouble(p).is_none());
        if ready.is_empty() && waiting.is_empty() {
            report.error(
                format!("no pod of {object} in {place}"),
                "",
                format!("is Forebay in another namespace (-n)? If not: kubectl describe {object}"),
            );
        } else if waiting.is_empty() {
            report.ok(format!("{object}: {} of {0} pods ready", ready.len()));
        }
    }
    // The test's pod may be the one that is running this program.
    for pod in pods.iter().filter(|p| component(p) != "test") {
        if let Some((what, fix)) = trouble(pod) {
            let namespace = pod.namespace().unwrap_or_default();
            let node = pod.spec.as_ref().and_then(|s| s.node_name.as_deref()).unwrap_or("no node");
            let evidence = format!("{what} (on {node})");
            if is_replaced(pod, pods) {
                report.note(
                    format!(
                        "pod {} has terminated or is terminating; another pod replaces it",
                        pod.name_any()
                    ),
                    evidence,
                    format!("if it stays: kubectl -n {namespace} delete pod {}", pod.name_any()),
                );
                continue;
            }
            report.error(
                format!("pod {} is not ready", pod.name_any()),
                evidence,
                format!("{fix}; kubectl -n {namespace} describe pod {}", pod.name_any()),
            );
        }
    }
}

/// Whether other pods have replaced a pod that was evicted, has failed or is being deleted: evicted pods of a Deployment
/// stay until they are deleted. Only a pod on the same node replaces one of the node plugin, and nothing replaces a server.
fn is_replaced(pod: &Pod, pods: &[Pod]) -> bool {
    let is_going = |pod: &Pod| {
        let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
        pod.metadata.deletion_timestamp.is_some() || phase == Some("Failed")
    };
    let node = |pod: &Pod| pod.spec.as_ref().and_then(|s| s.node_name.clone());
    let does_the_same = |other: &Pod| match component(pod) {
        "operator" | "csi-controller" => true,
        "csi-node" => node(other) == node(pod),
        _ => false,
    };
    let stands_in = |other: &Pod| {
        component(other) == component(pod)
            && other.namespace() == pod.namespace()
            && !is_going(other)
            && trouble(other).is_none()
            && does_the_same(other)
    };
    is_going(pod) && pods.iter().any(stands_in)
}

/// Returns why a pod is not ready, and what may help.
fn trouble(pod: &Pod) -> Option<(String, &'static str)> {
    let status = pod.status.as_ref()?;
    let condition = |kind: &str| status.conditions.iter().flatten().find(|c| c.type_ == kind);
    if status.phase.as_deref() == Some("Succeeded") || condition("Ready").is_some_and(|c| c.status == "True")
    {
        return None;
    }
    if let Some(unscheduled) = condition("PodScheduled").filter(|c| c.status != "True") {
        let message = unscheduled.message.clone().unwrap_or_default();
        return Some((
            format!("cannot be scheduled: {message}"),
            "free space, or fix what the message names",
        ));
    }
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    for container in containers {
        if let Some(found) = container_trouble(container) {
            return Some(found);
        }
    }
    let phase = status.phase.as_deref().unwrap_or("Unknown");
    // The message of an evicted pod contains the reason.
    let message = status.message.clone().or_else(|| condition("Ready")?.message.clone()).unwrap_or_default();
    Some((format!("{phase}: {message}").trim_end_matches([':', ' ']).to_owned(), "wait, or read its log"))
}

fn container_trouble(container: &ContainerStatus) -> Option<(String, &'static str)> {
    let state = container.state.as_ref()?;
    if let Some(waiting) = &state.waiting {
        let reason = waiting.reason.as_deref().unwrap_or_default();
        let fix = match reason {
            "ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull" | "InvalidImageName" => {
                "push or import the image, or correct image.repository and image.tag"
            }
            "CrashLoopBackOff" => "read its log with --previous",
            "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => {
                "create the object that the message names"
            }
            // The container is still starting.
            _ => return None,
        };
        let mut what = format!("container {}: {reason}", container.name);
        if let Some(message) = waiting.message.as_deref().filter(|m| !m.is_empty()) {
            what.push_str(": ");
            what.push_str(message);
        }
        let last = container.last_state.as_ref().and_then(|s| s.terminated.as_ref());
        if let Some(last) = last {
            what.push_str(&format!("; exited with code {}", last.exit_code));
        }
        return Some((what, fix));
    }
    let ended = state.terminated.as_ref().filter(|t| t.exit_code != 0)?;
    Some((format!("container {} exited with code {}", container.name, ended.exit_code), "read its log"))
}

fn csi_driver(snapshot: &Snapshot, report: &mut Report) {
    match &snapshot.csi_driver {
        Err(error) => report.unread("the CSIDriver", error),
        Ok(None) => report.error(
            format!("there is no CSIDriver {DRIVER}"),
            "without it Kubernetes waits for an attacher that Forebay does not have",
            "install the chart (docs/get-started/install.md)",
        ),
        Ok(Some(driver)) if driver.spec.attach_required != Some(false) => report.error(
            format!("CSIDriver {DRIVER} requires volumes to be attached"),
            "spec.attachRequired is not false: pods wait for an attacher that Forebay does not have",
            "install the chart's CSIDriver (the field cannot be changed: delete it first)",
        ),
        Ok(Some(_)) => report.ok(format!("CSIDriver {DRIVER}")),
    }
}

fn storage_classes(snapshot: &Snapshot, report: &mut Report) {
    let classes = match &snapshot.storage_classes {
        Ok(classes) => classes,
        Err(error) => return report.unread("StorageClasses", error),
    };
    let clusters = snapshot.clusters.as_deref().unwrap_or_default();
    if classes.is_empty() {
        let fix = "name one in spec.storageClasses of a StorageCluster (docs/get-started/first-volume.md)";
        // This is normal after an installation.
        if clusters.is_empty() {
            report.note("there is no StorageCluster and no StorageClass yet", "", fix);
        } else {
            report.warning(format!("no StorageClass uses {DRIVER}"), "so no claim can request a volume", fix);
        }
        return;
    }
    for class in classes {
        let parameters = class.parameters.clone().unwrap_or_default();
        let Some(cluster) = parameters.get(names::PARAMETER_CLUSTER) else {
            report.error(
                format!("StorageClass {} names no StorageCluster", class.name_any()),
                format!("parameters.{} is missing", names::PARAMETER_CLUSTER),
                "let the operator create it: set spec.storageClasses of the StorageCluster",
            );
            continue;
        };
        let namespace = parameters.get(names::PARAMETER_CLUSTER_NAMESPACE).or(snapshot.namespace.as_ref());
        let looked_there = snapshot.namespace.is_none() || snapshot.namespace.as_ref() == namespace;
        let is_it = |c: &StorageCluster| {
            c.name_any() == *cluster && namespace.is_none_or(|n| c.namespace().as_ref() == Some(n))
        };
        if snapshot.clusters.is_ok() && looked_there && !clusters.iter().any(is_it) {
            report.error(
                format!("StorageClass {} names a StorageCluster that does not exist", class.name_any()),
                format!("{}/{cluster}", namespace.map_or("?", String::as_str)),
                "create the StorageCluster, or delete the StorageClass",
            );
        } else {
            report.ok(format!("StorageClass {} on StorageCluster {cluster}", class.name_any()));
        }
    }
}

/// Reports claims of Forebay's StorageClasses that wait for a volume.
fn claims(snapshot: &Snapshot, report: &mut Report) {
    let (Ok(claims), Ok(classes)) = (&snapshot.claims, &snapshot.storage_classes) else {
        if let Err(error) = &snapshot.claims {
            report.unread("PersistentVolumeClaims", error);
        }
        return;
    };
    let waits_for_pod = |class: &str| {
        let class = classes.iter().find(|c| c.name_any() == class);
        class.and_then(|c| c.volume_binding_mode.as_deref()) == Some("WaitForFirstConsumer")
    };
    let mut bound = 0;
    for claim in claims {
        let class = claim.spec.as_ref().and_then(|s| s.storage_class_name.as_deref()).unwrap_or_default();
        if !classes.iter().any(|c| c.name_any() == class) {
            continue;
        }
        let name = format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any());
        let events =
            format!("kubectl -n {} describe pvc {}", claim.namespace().unwrap_or_default(), claim.name_any());
        match claim.status.as_ref().and_then(|s| s.phase.as_deref()) {
            Some("Bound") => bound += 1,
            Some("Lost") => report.error(
                format!("claim {name} has lost its volume"),
                "its PersistentVolume no longer exists",
                "restore the PersistentVolume, or delete the claim",
            ),
            _ if waits_for_pod(class) => {
                report.note(
                    format!("claim {name} waits for its first pod"),
                    format!("StorageClass {class}"),
                    "",
                );
            }
            _ => report.warning(
                format!("claim {name} is pending"),
                format!("StorageClass {class}"),
                format!("see its Events: {events}"),
            ),
        }
    }
    if bound > 0 {
        report.ok(format!("claims bound to volumes: {bound}"));
    }
}

fn storage_cluster(cluster: &StorageCluster) -> Vec<Finding> {
    let mut report = Report::about(format!("storagecluster {}", cluster.name_any()));
    let status = cluster.status.clone().unwrap_or_default();
    let describe = format!(
        "kubectl -n {} describe storagecluster {}",
        cluster.namespace().unwrap_or_default(),
        cluster.name_any()
    );
    if cluster.metadata.deletion_timestamp.is_some() {
        let deletable = status.conditions.iter().find(|c| c.type_ == "Deletable");
        let message = deletable.map(|c| c.message.clone()).unwrap_or_default();
        report.warning("it is being deleted", message, "delete its volumes, or change spec.deletionPolicy");
    }
    if cluster.spec.paused {
        report.note("it is paused: the operator changes nothing", "spec.paused", "set it to false");
    }
    match status.conditions.iter().find(|c| c.type_ == "Ready") {
        None => report.error(
            "the operator has not reconciled it",
            "it has no condition Ready",
            "is the operator running, and in the same namespace?",
        ),
        Some(_) if status.observed_generation != cluster.metadata.generation => report.warning(
            "the operator has not acted on its latest spec yet",
            format!(
                "generation {}, observed {}",
                cluster.metadata.generation.unwrap_or_default(),
                status.observed_generation.unwrap_or_default()
            ),
            "wait, or read the operator's log",
        ),
        Some(ready) if ready.status == "True" => report.ok("it is ready"),
        Some(ready) => {
            report.error(format!("not ready: {}", ready.reason), ready.message.clone(), describe.clone())
        }
    }
    for condition in status.conditions.iter().filter(|c| c.status == "False" && c.type_ != "Ready") {
        // These conditions are no problem if they are false, or have been reported already.
        if !matches!(condition.type_.as_str(), "Progressing" | "Paused" | "Deletable" | "TakeoverPaused") {
            report.error(
                format!("{}: {}", condition.type_, condition.reason),
                condition.message.clone(),
                describe.clone(),
            );
        }
    }
    if let Some(paused) = status.conditions.iter().find(|c| c.type_ == "TakeoverPaused") {
        if paused.status == "True" {
            report.error(
                format!("takeovers pause: {}", paused.reason),
                paused.message.clone(),
                "check the nodes and the control plane; if nodes are really off, see docs/guides/failover.md",
            );
        } else if paused.reason == "Overridden" {
            report.warning(
                "takeovers never pause",
                paused.message.clone(),
                format!(
                    "when this is over: kubectl annotate storagecluster {} {}-",
                    cluster.name_any(),
                    names::ANNOTATION_TAKE_OVER_ANYWAY
                ),
            );
        }
    }
    for condition in status.conditions.iter().filter(|c| c.type_ == "Progressing" && c.status == "True") {
        match condition.reason.as_str() {
            "ApplyFailed" => report.error(
                "the operator cannot apply its objects",
                condition.message.clone(),
                "fix what the message names; the operator retries automatically",
            ),
            "ScaleDownRefused" => report.warning(
                "it cannot have fewer instances yet",
                condition.message.clone(),
                "delete or move the volumes of the instances to be removed",
            ),
            reason => report.note(format!("it is changing: {reason}"), condition.message.clone(), ""),
        }
    }
    for instance in &status.instances {
        if instance.phase == InstancePhase::Ready {
            report.ok(format!(
                "instance {} serves {} on {}",
                instance.name,
                instance.transports.join(", "),
                instance.node
            ));
        } else {
            let log =
                format!("kubectl -n {} logs {}-0", cluster.namespace().unwrap_or_default(), instance.name);
            report.error(
                format!("instance {} is {:?}", instance.name, instance.phase),
                instance.message.clone(),
                if instance.node.is_empty() { describe.clone() } else { log },
            );
        }
    }
    let unfit: Vec<String> = status
        .nodes
        .iter()
        .filter(|n| !n.fits)
        .map(|n| format!("{}: {}: {}", n.name, n.reason, n.message))
        .collect();
    let placed = status.instances.iter().filter(|i| !i.node.is_empty()).count();
    if placed < usize::try_from(cluster.spec.instances).unwrap_or(usize::MAX) && !unfit.is_empty() {
        let summary = format!("{} of {} instances have a node", placed, cluster.spec.instances);
        report.error(
            summary,
            unfit.join("\n"),
            "widen spec.placement, or fix the nodes (docs/guides/rdma.md)",
        );
    }
    quota(cluster, &mut report);
    takeover(cluster, &mut report);
    report.findings
}

/// Reports whether another node could take over an instance.
fn takeover(cluster: &StorageCluster, report: &mut Report) {
    let conditions = cluster.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    let Some(found) = conditions.iter().find(|c| c.type_ == "TakeoverReady" && c.status == "False") else {
        return;
    };
    match found.reason.as_str() {
        "Disabled" => report.note("automatic takeover is off", found.message.clone(), ""),
        _ => report.warning(
            "no node can take over an instance",
            found.message.clone(),
            "provide one more fitting node than spec.instances (docs/guides/failover.md)",
        ),
    }
}

/// Reports whether the file systems of the backends can enforce the volumes' sizes. Only servers can detect that: they
/// refuse to serve a pool that cannot.
fn quota(cluster: &StorageCluster, report: &mut Report) {
    let wanting: Vec<&str> = cluster
        .spec
        .backends
        .iter()
        .filter(|b| b.kind == BackendKind::Directory)
        .filter(|b| b.directory.as_ref().is_some_and(|d| d.quota == QuotaKind::Project))
        .map(|b| b.name.as_str())
        .collect();
    let instances = cluster.status.as_ref().map(|s| s.instances.as_slice()).unwrap_or_default();
    for instance in instances.iter().filter(|_| !wanting.is_empty()) {
        if instance.message.contains("quota") {
            report.error(
                format!("instance {} cannot limit its volumes' sizes", instance.name),
                instance.message.clone(),
                format!(
                    "on {} mount the file system of backend {} with prjquota (XFS, or ext4 made with -O project,quota), or \
                     set quota: None",
                    instance.node,
                    wanting.join(", ")
                ),
            );
        }
    }
}
