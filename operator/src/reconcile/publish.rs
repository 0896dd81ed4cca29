//! Writes the status of a StorageCluster, and Events for the changes.

use std::time::Duration;

use forebay_api::cluster::{StorageCluster, StorageClusterStatus};
use forebay_api::{GROUP, VERSION};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams};
use kube::{Resource as _, ResourceExt as _};
use serde_json::json;

use super::{Context, ReconcileError};
use crate::desired::objects::FIELD_MANAGER;
use crate::desired::{Desired, status};
use crate::events::{Notice, notices};
use crate::metrics::{OfCluster, Written};

pub(super) fn tell_refusal(
    status: &mut StorageClusterStatus,
    cluster: &StorageCluster,
    why: &str,
    now: Timestamp,
) {
    let reported = |type_: &str, status: &str| Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: "ApplyFailed".to_owned(),
        message: why.chars().take(crate::limits::CONDITION_MESSAGE_MAX / 4).collect(),
        last_transition_time: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now),
        observed_generation: cluster.metadata.generation,
    };
    let before = cluster.status.clone().unwrap_or_default().conditions;
    let mut conditions = std::mem::take(&mut status.conditions);
    conditions.retain(|c| c.type_ != "Progressing" && c.type_ != "Ready");
    conditions.push(reported("Progressing", "True"));
    conditions.push(reported("Ready", "False"));
    status.conditions = status::merge(&before, conditions, now);
}

pub(super) fn tell_failed_destruction(status: &mut StorageClusterStatus, why: &str) {
    if let Some(deletable) = status.conditions.iter_mut().find(|c| c.type_ == "Deletable") {
        deletable.reason = "DestroyFailed".to_owned();
        deletable.message = why.chars().take(crate::limits::CONDITION_MESSAGE_MAX / 4).collect();
    }
}

/// Writes the status if it differs, and Events for the changes. Returns `false` if another client has changed the cluster
/// since it was read; the caller must then observe everything again.
pub(super) async fn publish(
    context: &Context,
    api: &Api<StorageCluster>,
    cluster: &StorageCluster,
    desired: &Desired,
) -> Result<bool, ReconcileError> {
    let name = cluster.name_any();
    let before = cluster.status.clone().unwrap_or_default();
    context.metrics.set_instances(&name, &desired.status.instances);
    context.metrics.set_conditions(&name, &desired.status.conditions);
    let paused = desired.status.conditions.iter().find(|c| c.type_ == "TakeoverPaused");
    if let Some(paused) = paused {
        let labels = OfCluster { cluster: name.clone() };
        context.metrics.takeover_paused.get_or_create(&labels).set(i64::from(paused.status == "True"));
    }
    if cluster.status.is_none() || before != desired.status {
        let mut patch = json!({
            "apiVersion": format!("{GROUP}/{VERSION}"),
            "kind": "StorageCluster",
            "metadata": { "name": name },
            "status": desired.status,
        });
        context
            .metrics
            .writes
            .get_or_create(&Written { kind: "StorageCluster".to_owned(), verb: "status" })
            .inc();
        if cluster.spec.can_move() {
            // An operator that was suspended in between must not restore an earlier epoch.
            patch["metadata"]["resourceVersion"] = cluster.resource_version().into();
        }
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch_status(&name, &parameters, &Patch::Apply(&patch)).await {
            Err(kube::Error::Api(status)) if status.code == 409 && cluster.spec.can_move() => {
                return Ok(false);
            }
            other => other?,
        };
    }
    for instance in &desired.status.instances {
        let was = before.instances.iter().find(|b| b.name == instance.name).and_then(|b| b.takeover.as_ref());
        if let Some(moved) = instance.takeover.as_ref()
            && was.is_none_or(|w| w.serving.is_none() || w.epoch != moved.epoch)
            && let (Some(decided), Some(serving)) = (&moved.decided, &moved.serving)
        {
            let took = Duration::try_from(serving.0.duration_since(decided.0)).unwrap_or_default();
            context.metrics.takeover_duration.observe(took.as_secs_f64());
        }
    }
    for notice in notices(&before, &desired.status) {
        tell(context, cluster, &notice).await;
    }
    Ok(true)
}

pub(super) async fn tell(context: &Context, cluster: &StorageCluster, notice: &Notice) {
    context.teller.tell(&context.settings.namespace, &cluster.object_ref(&()), notice).await;
}
