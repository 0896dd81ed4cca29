//! Selects the pod to restart next, for a new image or configuration or for an RDMA device that appeared later: one at a
//! time, while all others serve.

use std::time::Duration;

use forebay_api::cluster::UpgradeStrategy;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::objects::{ANNOTATION_REVISION, revision};
use super::status::{Said, pod_ready_since};
use super::{Desired, PodDeletion, Report, View, moves, rdma, soon};
use crate::placement;

/// Selects the pod to restart, and reports the progress of the rollout.
pub fn plan(view: &View<'_>, removing: &[String], desired: &mut Desired, said: &mut Said) {
    let staying: Vec<&String> =
        view.instances.iter().filter(|i| !removing.contains(i) && view.seats.contains_key(*i)).collect();
    let mut outdated = Vec::new();
    let mut current = 0;
    for instance in &staying {
        let Some(pod) = view.observed.pods.get(*instance) else { continue };
        // A pod of another epoch is not restarted but ended.
        if moves::is_stale(view, instance, pod) {
            continue;
        }
        match revision(view, instance) {
            Some(wanted) if pod.annotations().get(ANNOTATION_REVISION) != Some(&wanted) => {
                let why = format!("{instance} gets the new image or configuration");
                outdated.push(Outdated { instance, pod, wanted, why });
            }
            Some(wanted) => match rdma::other_devices(view, instance, pod) {
                Some((wait, why)) if wait.is_zero() => {
                    outdated.push(Outdated { instance, pod, wanted, why });
                }
                Some((wait, _)) => desired.again = desired.again.min(wait),
                None => current += 1,
            },
            None => {}
        }
    }
    if outdated.is_empty() {
        return;
    }
    let progress = format!("{current} of {} instances run the new revision", staying.len());
    if view.cluster.spec.upgrade.strategy == UpgradeStrategy::OnDelete {
        let names: Vec<String> = outdated.iter().map(|o| o.pod.name_any()).collect();
        said.rollout =
            Some(("WaitingForPodDeletion", format!("{progress}; delete pod {}", names.join(", "))));
        return;
    }
    soon(desired);
    let ending = staying.iter().find(|i| view.observed.pods.get(**i).is_some_and(is_ending));
    if let Some(ending) = ending {
        said.rollout = Some(("RollingOut", format!("{progress}; {ending} is terminating")));
        return;
    }
    outdated.retain(|o| template_is_known(view.observed.stateful_sets.get(o.instance), &o.wanted));
    // A pod that does not serve is restarted first: nothing is lost, and it may be the reason why the last rollout failed.
    outdated.sort_by_key(|o| pod_ready_since(o.pod).is_some());
    let mut reasons = Vec::new();
    for Outdated { instance, pod, why, .. } in outdated {
        if let Some(node) = view.node(instance) {
            // The old pod's node, not the seat's, determines whether the kubelet can end the pod; for bound instances they
            // are the same. On a cordoned node the pod would not come back.
            if view.seats.get(instance).is_some_and(|s| s.bound) {
                if !placement::is_ready(node) {
                    reasons.push(format!("the node of {instance} is not ready"));
                    continue;
                }
                if placement::is_cordoned(node) {
                    reasons.push(format!("the node of {instance} is cordoned"));
                    continue;
                }
            }
        }
        let serves = pod_ready_since(pod).is_some();
        if serves && let Err(blocked) = others_serve(view, &staying, instance) {
            if let Some(wait) = blocked.wait {
                desired.again = desired.again.min(wait);
            }
            reasons.push(blocked.why);
            continue;
        }
        said.rollout = Some(("RollingOut", format!("{progress}; {instance} is being restarted")));
        desired.restart = Some(PodDeletion {
            name: pod.name_any(),
            instance: instance.clone(),
            uid: pod.uid().unwrap_or_default(),
            why: format!("{why}; {progress}"),
            force: false,
        });
        return;
    }
    let why = reasons
        .first()
        .cloned()
        .unwrap_or_else(|| "the StatefulSet has not applied the new template yet".to_owned());
    said.rollout = Some(("WaitingForHealth", format!("{progress}; {why}")));
}

/// A pod that is to be recreated.
struct Outdated<'v> {
    instance: &'v String,
    pod: &'v Pod,
    wanted: String,
    why: String,
}

fn is_ending(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// Whether the pod that would replace the old one has the new template: the StatefulSet has it, and its controller has
/// observed it.
#[must_use]
pub(super) fn template_is_known(set: Option<&StatefulSet>, wanted: &str) -> bool {
    let Some(set) = set else { return false };
    let template = set.spec.as_ref().and_then(|s| s.template.metadata.as_ref());
    let has = template
        .and_then(|m| m.annotations.as_ref())
        .and_then(|a| a.get(ANNOTATION_REVISION))
        .is_some_and(|found| found == wanted);
    let seen = set.status.as_ref().and_then(|s| s.observed_generation).unwrap_or_default();
    has && seen >= set.metadata.generation.unwrap_or_default()
}

struct Blocked {
    why: String,
    wait: Option<Duration>,
}

/// Whether all instances but one serve, and have served for long enough.
fn others_serve(view: &View<'_>, staying: &[&String], but: &str) -> Result<(), Blocked> {
    let least = i64::from(view.cluster.spec.upgrade.min_ready_seconds);
    for other in staying.iter().filter(|i| i.as_str() != but) {
        let since = view.observed.pods.get(*other).and_then(pod_ready_since);
        let Some(since) = since else {
            return Err(Blocked { why: format!("{other} is not ready"), wait: None });
        };
        match view.observed.reports.get(*other) {
            Some(Report::Answered(report)) if !report.draining => {}
            _ => return Err(Blocked { why: format!("the server of {other} does not answer"), wait: None }),
        }
        let ready_s = view.observed.now.duration_since(since).as_secs();
        if ready_s < least {
            let wait = Duration::from_secs(u64::try_from((least - ready_s).max(1)).unwrap_or(1));
            // No elapsed seconds, which would change the status every time.
            let why = format!("{other} has been ready for less than {least} s");
            return Err(Blocked { why, wait: Some(wait) });
        }
    }
    Ok(())
}
