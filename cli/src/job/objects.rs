//! The objects of a load: a claim, and a Job with a pod for each client.

use std::collections::BTreeMap;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use serde_json::json;

use super::Load;

/// The label of everything that a load creates. Its value is the name of the Job.
pub(super) const LABEL: &str = "forebay.io/load";
/// Where the pods have the volume.
pub(crate) const MOUNTED_AT: &str = "/data";
/// No user of the image. The volume's `fsGroup`, or the mount's mode, lets it write.
const USER: i64 = 65532;
/// After a lost connection the plugin cannot remove the Job: Kubernetes does it.
const SECONDS_KEPT: i64 = 3600;
/// Longer than any reasonable load.
const SECONDS_MAX: i64 = 4 * 3600;

pub(super) fn claim(name: &str, load: &Load<'_>) -> serde_json::Result<PersistentVolumeClaim> {
    serde_json::from_value(json!({
        "metadata": { "name": name, "labels": { (LABEL): name } },
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": load.class,
            "resources": { "requests": { "storage": load.bytes.to_string() } },
        },
    }))
}

/// The Job that runs `kubectl-forebay` with these arguments in each of its pods, on different nodes if there are as many.
pub(super) fn job(name: &str, load: &Load<'_>, image: &str) -> serde_json::Result<Job> {
    let selector: BTreeMap<&str, &str> =
        load.place.node_selector.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let secrets: Vec<_> = load.place.image_pull_secret.iter().map(|name| json!({ "name": name })).collect();
    serde_json::from_value(json!({
        "metadata": { "name": name, "labels": { (LABEL): name } },
        "spec": {
            "completionMode": "Indexed",
            "completions": load.pods,
            "parallelism": load.pods,
            "backoffLimit": 0,
            "activeDeadlineSeconds": SECONDS_MAX,
            "ttlSecondsAfterFinished": SECONDS_KEPT,
            "template": {
                "metadata": { "labels": { (LABEL): name } },
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": false,
                    "nodeSelector": selector,
                    "imagePullSecrets": secrets,
                    "topologySpreadConstraints": [{
                        "maxSkew": 1,
                        "topologyKey": "kubernetes.io/hostname",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": { "matchLabels": { (LABEL): name } },
                    }],
                    "securityContext": {
                        "runAsNonRoot": true,
                        "runAsUser": USER,
                        "runAsGroup": USER,
                        "fsGroup": USER,
                        "seccompProfile": { "type": "RuntimeDefault" },
                    },
                    "containers": [{
                        "name": "bench",
                        "image": image,
                        "command": ["kubectl-forebay"],
                        "args": load.arguments,
                        "resources": { "requests": { "cpu": "100m", "memory": "128Mi" } },
                        "securityContext": {
                            "allowPrivilegeEscalation": false,
                            "readOnlyRootFilesystem": true,
                            "capabilities": { "drop": ["ALL"] },
                        },
                        "volumeMounts": [{ "name": "volume", "mountPath": MOUNTED_AT }],
                    }],
                    "volumes": [{ "name": "volume", "persistentVolumeClaim": { "claimName": name } }],
                },
            },
        },
    }))
}

/// The image of Forebay's own pods: that of the first container that runs one of its programs.
pub(super) fn image(pods: &[Pod]) -> Option<String> {
    let ours = |component: &str| {
        let mut pods = pods.iter().filter(|pod| {
            pod.labels().get("app.kubernetes.io/component").is_some_and(|label| label == component)
        });
        pods.find_map(|pod| pod.spec.as_ref()?.containers.first()?.image.clone())
    };
    ours("operator").or_else(|| ours("server"))
}

/// How far the pods are.
#[derive(Debug, PartialEq)]
pub(super) struct Progress {
    /// Pods that run or have run.
    pub(super) started: usize,
    pub(super) succeeded: usize,
    pub(super) failed: usize,
    /// Why the first one that has not started has not.
    pub(super) why: Option<String>,
}

impl Progress {
    pub(super) fn of(pods: &[Pod]) -> Self {
        let phase =
            |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
        let count = |wanted: &str| pods.iter().filter(|pod| phase(pod) == wanted).count();
        let (succeeded, failed) = (count("Succeeded"), count("Failed"));
        Self {
            started: count("Running") + succeeded + failed,
            succeeded,
            failed,
            why: pods.iter().filter(|pod| phase(pod) == "Pending").find_map(waits_for),
        }
    }
}

fn waits_for(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let container = status.container_statuses.iter().flatten().find_map(|container| {
        let waiting = container.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.clone().filter(|reason| reason != "ContainerCreating")?;
        Some(waiting.message.as_ref().map_or(reason.clone(), |message| format!("{reason}: {message}")))
    });
    container.or_else(|| {
        let mut conditions = status.conditions.iter().flatten();
        let scheduled = conditions.find(|one| one.type_ == "PodScheduled" && one.status == "False")?;
        scheduled.message.clone().or_else(|| scheduled.reason.clone())
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::fixture;
    use crate::options::{Bench, Cli, Command};

    fn options(arguments: &[&str]) -> Bench {
        let cli =
            Cli::try_parse_from([&["kubectl-forebay", "bench"], arguments].concat()).expect("the options");
        let Command::Bench(options) = cli.command else { panic!("not bench") };
        options
    }

    #[test]
    fn job_runs_one_unprivileged_pod_per_client() {
        let options = options(&["fast", "--node-selector=gpu=true,zone=a", "--image-pull-secret=registry"]);
        let load = Load {
            verb: "bench",
            class: "fast",
            place: &options.place,
            pods: 3,
            bytes: 64 << 30,
            arguments: vec!["measure".to_owned()],
        };
        let claim = claim("forebay-bench-x", &load).expect("a claim");
        let spec = claim.spec.expect("a spec");
        assert_eq!(spec.storage_class_name.as_deref(), Some("fast"));
        assert_eq!(spec.access_modes.expect("modes"), ["ReadWriteMany"]);
        let requests = spec.resources.expect("resources").requests.expect("requests");
        assert_eq!(requests["storage"].0, (64_u64 << 30).to_string());
        let job = job("forebay-bench-x", &load, "image:1").expect("a job").spec.expect("a spec");
        assert_eq!((job.parallelism, job.completions, job.backoff_limit), (Some(3), Some(3), Some(0)));
        let pod = job.template.spec.expect("a pod");
        assert_eq!(pod.node_selector.expect("a selector")["zone"], "a");
        assert_eq!(pod.image_pull_secrets.expect("secrets")[0].name, "registry");
        assert_eq!(pod.automount_service_account_token, Some(false));
        let container = &pod.containers[0];
        assert_eq!(container.image.as_deref(), Some("image:1"));
        assert_eq!(container.args.as_deref(), Some(&["measure".to_owned()][..]));
        let security = container.security_context.as_ref().expect("a context");
        assert_eq!(security.allow_privilege_escalation, Some(false));
    }

    #[test]
    fn image_is_taken_from_the_operator_or_else_from_a_server() {
        let pod = |component: &str, image: &str| -> Pod {
            let mut value = fixture::pod("p", component, "node");
            value["spec"]["containers"] = json!([{ "name": "c", "image": image }]);
            fixture::object(value)
        };
        let pods = [pod("csi-node", "a"), pod("server", "b"), pod("operator", "c")];
        assert_eq!(image(&pods).as_deref(), Some("c"));
        assert_eq!(image(&pods[..2]).as_deref(), Some("b"));
        assert_eq!(image(&pods[..1]), None);
    }

    #[test]
    fn progress_reports_why_a_pod_is_waiting() {
        let pod = |status: serde_json::Value| -> Pod {
            fixture::object(json!({ "metadata": {}, "status": status }))
        };
        let unscheduled = pod(json!({ "phase": "Pending", "conditions": [
            { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available" }] }));
        let pulling = pod(json!({ "phase": "Pending", "containerStatuses": [
            { "name": "bench", "image": "", "imageID": "", "ready": false, "restartCount": 0,
              "state": { "waiting": { "reason": "ImagePullBackOff", "message": "not found" } } }] }));
        let creating = pod(json!({ "phase": "Pending", "containerStatuses": [
            { "name": "bench", "image": "", "imageID": "", "ready": false, "restartCount": 0,
              "state": { "waiting": { "reason": "ContainerCreating" } } }] }));
        let running = pod(json!({ "phase": "Running" }));
        let progress = Progress::of(&[running, unscheduled]);
        assert_eq!((progress.started, progress.failed), (1, 0));
        assert_eq!(progress.why.as_deref(), Some("0/3 nodes are available"));
        assert_eq!(Progress::of(&[pulling]).why.as_deref(), Some("ImagePullBackOff: not found"));
        assert_eq!(Progress::of(&[creating]).why, None);
        assert_eq!(Progress::of(&[pod(json!({ "phase": "Failed" }))]).failed, 1);
    }
}
