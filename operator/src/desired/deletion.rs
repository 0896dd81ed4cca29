//! Deletion of a cluster: first its volumes, then the servers, then the finalizer.

use forebay_api::cluster::DeletionPolicy;
use kube::ResourceExt as _;

use super::objects::{is_ours, placement_record};
use super::status::Said;
use super::{Desired, Report, Target, View, budgets, record, soon, target};
use crate::limits::SOON;

/// Status, reason and message of the condition `Deletable`.
pub type Verdict = (bool, &'static str, String);

/// The verdict for a paused cluster, which is not deleted.
#[must_use]
pub fn paused() -> Verdict {
    (false, "Paused", "spec.paused is true, so nothing is deleted: set it to false".to_owned())
}

/// Plans the next step of the deletion.
pub fn plan(view: &View<'_>, desired: &mut Desired, said: &mut Said) {
    soon(desired);
    said.waits = true;
    // Removed first, so that no new volumes are requested.
    for (name, class) in view.observed.storage_classes.iter().filter(|(_, c)| is_ours(view, c)) {
        desired.remove.push(Target { kind: "StorageClass", name: name.clone(), uid: class.uid() });
    }
    // Volumes cannot be counted any more once servers end. So before the first server ends, the status records that no count
    // is needed and which policy applies. A later change of the policy has no effect.
    if let Some(policy) = view.before.deletion_policy {
        tear_down(view, policy, desired, said);
        return;
    }
    let policy = view.cluster.spec.deletion_policy;
    if policy != DeletionPolicy::Retain
        && let Err(verdict) = volumes_are_gone(view, policy, desired)
    {
        said.deletable = Some(verdict);
        return;
    }
    said.deletion_policy = Some(policy);
    said.deletable =
        Some((true, "Decided", format!("servers are being removed; deletionPolicy is {policy:?}")));
    desired.again = SOON;
}

/// Returns the number of an instance's volumes, and of those that cannot be served; `None` if that is unknown now.
fn volumes(view: &View<'_>, policy: DeletionPolicy, instance: &str) -> Option<(u32, u32)> {
    let unserved = match view.observed.reports.get(instance) {
        Some(Report::Answered(report)) => report.unserved,
        _ => 0,
    };
    if policy == DeletionPolicy::Destroy {
        // The driver's records stay until the deletion is complete, so only existing volumes count here.
        return match view.observed.reports.get(instance) {
            Some(Report::Answered(report)) => Some((report.volumes, unserved)),
            _ => view.seats.get(instance).is_none_or(|s| !s.bound).then_some((0, 0)),
        };
    }
    view.volumes(instance).map(|count| (count, unserved))
}

fn volumes_are_gone(view: &View<'_>, policy: DeletionPolicy, desired: &mut Desired) -> Result<(), Verdict> {
    let mut holding = Vec::new();
    let mut silent = Vec::new();
    let mut damaged = Vec::new();
    for instance in &view.instances {
        match volumes(view, policy, instance) {
            Some((0, _)) if view.snapshots(instance) == 0 => {}
            Some((count, unserved)) => {
                if unserved > 0 {
                    damaged.push(format!("{unserved} on {instance}"));
                }
                let snapshots = view.snapshots(instance);
                let destroyable = count.saturating_sub(unserved).saturating_add(snapshots);
                let what = match snapshots {
                    0 => format!("{count} on {instance}"),
                    snapshots => format!("{count} and {snapshots} snapshots on {instance}"),
                };
                holding.push((instance.clone(), what, destroyable));
            }
            None => silent.push(instance.clone()),
        }
    }
    if !silent.is_empty() {
        return Err((
            false,
            "VolumesUnknown",
            format!(
                "{} does not answer, so its volumes are unknown: make it available, or set spec.deletionPolicy to Retain to keep its data",
                silent.join(", ")
            ),
        ));
    }
    // The driver creates no volumes on an instance with the phase Removing. A count of zero is valid only after the driver
    // has had time to read that phase.
    if view.instances.iter().any(|i| !view.announced(i))
        && (holding.is_empty() || policy == DeletionPolicy::Destroy)
    {
        return Err((false, "Announcing", "waiting for the CSI driver to stop creating volumes".to_owned()));
    }
    if holding.is_empty() {
        return Ok(());
    }
    let list: Vec<&str> = holding.iter().map(|(_, what, _)| what.as_str()).collect();
    let list = list.join(", ");
    if policy == DeletionPolicy::Destroy {
        let verdict = if holding.iter().all(|(_, _, destroyable)| *destroyable == 0) {
            (
                false,
                "VolumesUnserved",
                format!(
                    "damaged volumes are not destroyed automatically: {}; the servers' logs name them and the damage: repair or remove their records, or set spec.deletionPolicy to Retain",
                    damaged.join(", ")
                ),
            )
        } else {
            (false, "DestroyingVolumes", format!("volumes are being destroyed: {list}"))
        };
        desired.destroy_volumes = holding.into_iter().map(|(i, ..)| i).collect();
        return Err(verdict);
    }
    let damaged = match damaged.as_slice() {
        [] => String::new(),
        some => format!(" (damaged: {}; see the servers' logs)", some.join(", ")),
    };
    Err((
        false,
        "VolumesExist",
        format!(
            "{list}{damaged}: delete their PersistentVolumeClaims and VolumeSnapshots, or set spec.deletionPolicy to Retain (data stay on the nodes) or Destroy (data are lost)",
        ),
    ))
}

/// Removes keys from the record of nodes, and returns whether any key stays. Epochs and the places of the bundled target's
/// namespaces stay regardless of the policy: the pool and the reservation keep the last epoch, and would reject a cluster of
/// the same name that starts with the first.
fn forget_places(view: &View<'_>, policy: DeletionPolicy, desired: &mut Desired) -> bool {
    if policy == DeletionPolicy::Retain {
        return true;
    }
    let (stay, go): (Vec<&String>, Vec<&String>) =
        view.observed.recorded.iter().partition(|key| record::is_kept(key));
    if stay.is_empty() {
        return false;
    }
    desired.forget = go.into_iter().cloned().collect();
    true
}

/// Removes every object by name: with owner references the garbage collector would remove them regardless of the policy.
fn tear_down(view: &View<'_>, policy: DeletionPolicy, desired: &mut Desired, said: &mut Said) {
    let came_too_late = match view.cluster.spec.deletion_policy {
        same if same == policy => String::new(),
        other => format!(
            "; spec.deletionPolicy {other:?} has no effect, because the deletion has begun with {policy:?}"
        ),
    };
    for (instance, set) in &view.observed.stateful_sets {
        desired.remove.push(Target { kind: "StatefulSet", name: instance.clone(), uid: set.uid() });
    }
    for (instance, service) in &view.observed.services {
        desired.remove.push(Target { kind: "Service", name: instance.clone(), uid: service.uid() });
    }
    if !view.observed.stateful_sets.is_empty() || !view.observed.pods.is_empty() {
        let left: Vec<&str> = view.observed.pods.keys().map(String::as_str).collect();
        let message = format!("servers are stopping: {}{came_too_late}", left.join(", "));
        said.deletable = Some((true, "ServersEnding", message));
        return;
    }
    // Servers first, then the targets that hold their pools.
    if !target::tear_down(view, desired) {
        let message = format!("the bundled target is withdrawing its namespaces{came_too_late}");
        said.deletable = Some((true, "TargetsEnding", message));
        return;
    }
    let record_stays = forget_places(view, policy, desired);
    for name in &view.observed.config_maps {
        if !(*name == placement_record(&view.name) && record_stays) {
            desired.remove.push(Target { kind: "ConfigMap", name: name.clone(), uid: None });
        }
    }
    budgets::tear_down(view, desired);
    for name in view.observed.secrets.keys() {
        desired.remove.push(Target { kind: "Secret", name: name.clone(), uid: None });
    }
    desired.forget_credentials = policy == DeletionPolicy::Destroy;
    said.deletable = Some((true, "Gone", format!("nothing is left to remove{came_too_late}")));
    desired.release = true;
}
