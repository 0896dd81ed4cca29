//! How a cluster goes: what becomes of its volumes first, then the servers, then the finalizer.

use forebay_api::cluster::DeletionPolicy;
use kube::ResourceExt as _;

use super::objects::{is_ours, placement_record};
use super::status::Said;
use super::{Desired, Report, Target, View, budgets, record, soon, target};
use crate::limits::SOON;

/// What the condition `Deletable` says.
pub type Verdict = (bool, &'static str, String);

/// A paused cluster is not deleted.
#[must_use]
pub fn paused() -> Verdict {
    (false, "Paused", "spec.paused is true, so nothing is deleted: set it to false".to_owned())
}

/// What is done next.
pub fn plan(view: &View<'_>, desired: &mut Desired, said: &mut Said) {
    soon(desired);
    said.waits = true;
    // First, so that no new volumes are asked for.
    for (name, class) in view.observed.storage_classes.iter().filter(|(_, c)| is_ours(view, c)) {
        desired.remove.push(Target { kind: "StorageClass", name: name.clone(), uid: class.uid() });
    }
    // Once servers end their volumes cannot be counted any more. That they need not be is in the status before the first
    // of them ends, and with it by which policy: another one comes too late then.
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
        Some((true, "Decided", format!("servers are removed now, by deletionPolicy {policy:?}")));
    desired.again = SOON;
}

/// Volumes of an instance, and those of them that cannot be served; `None` if that is unknown now.
fn volumes(view: &View<'_>, policy: DeletionPolicy, instance: &str) -> Option<(u32, u32)> {
    let unserved = match view.observed.reports.get(instance) {
        Some(Report::Answered(report)) => report.unserved,
        _ => 0,
    };
    if policy == DeletionPolicy::Destroy {
        // What the driver has recorded stays recorded until all is over: here only what is there counts.
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
                "{} cannot be asked for volumes: bring it back, or set spec.deletionPolicy to Retain to leave its data where they are",
                silent.join(", ")
            ),
        ));
    }
    // The driver makes no volumes where the phase is Removing; zero counts only once it has been able to know that.
    if view.instances.iter().any(|i| !view.announced(i))
        && (holding.is_empty() || policy == DeletionPolicy::Destroy)
    {
        return Err((false, "Announcing", "the driver is asked to make no more volumes".to_owned()));
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
                    "volumes are damaged, so that they may not be destroyed by asking: {}; the servers' logs name them and say why: repair or remove their records, or set spec.deletionPolicy to Retain",
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
        some => format!(" (of these damaged, see the servers' logs: {})", some.join(", ")),
    };
    Err((
        false,
        "VolumesExist",
        format!(
            "{list}{damaged}: delete their PersistentVolumeClaims and VolumeSnapshots, or set spec.deletionPolicy to Retain (data stay on the nodes) or Destroy (data are lost)",
        ),
    ))
}

/// What goes of the record of nodes; whether anything stays. Epochs, and where the bundled target has namespaces, stay whatever the
/// policy says: pool and reservation keep the last epoch, and would refuse a cluster of the same name that begins with the first.
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

/// Everything is removed by name: with owners the garbage collector would do it whatever the policy says.
fn tear_down(view: &View<'_>, policy: DeletionPolicy, desired: &mut Desired, said: &mut Said) {
    let came_too_late = match view.cluster.spec.deletion_policy {
        same if same == policy => String::new(),
        other => format!("; spec.deletionPolicy {other:?} came after it was decided by {policy:?}"),
    };
    for (instance, set) in &view.observed.stateful_sets {
        desired.remove.push(Target { kind: "StatefulSet", name: instance.clone(), uid: set.uid() });
    }
    for (instance, service) in &view.observed.services {
        desired.remove.push(Target { kind: "Service", name: instance.clone(), uid: service.uid() });
    }
    if !view.observed.stateful_sets.is_empty() || !view.observed.pods.is_empty() {
        let left: Vec<&str> = view.observed.pods.keys().map(String::as_str).collect();
        let message = format!("servers are ending: {}{came_too_late}", left.join(", "));
        said.deletable = Some((true, "ServersEnding", message));
        return;
    }
    // Servers first, then what their pools lie on.
    if !target::tear_down(view, desired) {
        let message = format!("the bundled target stops offering what it has{came_too_late}");
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
    said.deletable = Some((true, "Gone", format!("nothing is left to see to{came_too_late}")));
    desired.release = true;
}
