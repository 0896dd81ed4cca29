//! How a cluster goes: what becomes of its volumes first, then the servers, then the finalizer.

use forebay_api::cluster::{DeletionPolicy, InstancePhase};
use kube::ResourceExt as _;

use super::objects::{is_ours, placement_record};
use super::status::Said;
use super::{Desired, Target, View, soon};

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
    let policy = view.cluster.spec.deletion_policy;
    if policy != DeletionPolicy::Retain
        && let Err(verdict) = volumes_are_gone(view, policy, desired)
    {
        said.deletable = Some(verdict);
        return;
    }
    tear_down(view, policy, desired, said);
}

fn volumes_are_gone(view: &View<'_>, policy: DeletionPolicy, desired: &mut Desired) -> Result<(), Verdict> {
    // Once servers end their volumes cannot be counted any more, and need not be.
    if view.before.conditions.iter().any(|c| c.type_ == "Deletable" && c.status == "True") {
        return Ok(());
    }
    let mut holding = Vec::new();
    let mut silent = Vec::new();
    let mut unannounced = false;
    for instance in &view.instances {
        // The driver makes no volumes where the phase is Removing; zero counts only once it has been told.
        unannounced |= view.before(instance).is_some_and(|b| b.phase != InstancePhase::Removing);
        match view.volumes(instance) {
            Some(0) => {}
            Some(count) => holding.push((instance.clone(), count)),
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
    if unannounced {
        return Err((false, "Announcing", "the driver is told to make no more volumes".to_owned()));
    }
    if holding.is_empty() {
        return Ok(());
    }
    let list: Vec<String> = holding.iter().map(|(i, n)| format!("{n} on {i}")).collect();
    if policy == DeletionPolicy::Destroy {
        desired.destroy_volumes = holding.into_iter().map(|(i, _)| i).collect();
        return Err((
            false,
            "DestroyingVolumes",
            format!("volumes are being destroyed: {}", list.join(", ")),
        ));
    }
    Err((
        false,
        "VolumesExist",
        format!(
            "{}: delete their PersistentVolumeClaims, or set spec.deletionPolicy to Retain (data stay on the nodes) or Destroy (data are lost)",
            list.join(", ")
        ),
    ))
}

fn tear_down(view: &View<'_>, policy: DeletionPolicy, desired: &mut Desired, said: &mut Said) {
    for (instance, set) in &view.observed.stateful_sets {
        desired.remove.push(Target { kind: "StatefulSet", name: instance.clone(), uid: set.uid() });
    }
    for (instance, service) in &view.observed.services {
        desired.remove.push(Target { kind: "Service", name: instance.clone(), uid: service.uid() });
    }
    if !view.observed.stateful_sets.is_empty() || !view.observed.pods.is_empty() {
        let left: Vec<&str> = view.observed.pods.keys().map(String::as_str).collect();
        said.deletable = Some((true, "ServersEnding", format!("servers are ending: {}", left.join(", "))));
        return;
    }
    for name in &view.observed.config_maps {
        let record = *name == placement_record(&view.name);
        if !(record && policy == DeletionPolicy::Retain) {
            desired.remove.push(Target { kind: "ConfigMap", name: name.clone(), uid: None });
        }
    }
    said.deletable = Some((true, "Gone", "nothing is left to see to".to_owned()));
    desired.release = true;
}
