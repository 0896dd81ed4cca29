//! Applies objects, and removes objects that are no longer wanted.

use std::collections::BTreeMap;

use forebay_api::cluster::StorageCluster;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};

use super::Context;
use super::difference::holds;
use crate::desired::objects::{self, ANNOTATION_APPLIED, FIELD_MANAGER, hash};
use crate::desired::{Desired, Observed, Target};
use crate::metrics::Written;

/// Removes and applies objects, and returns the errors of the API server; one error does not stop the rest. Stops if another
/// replica may be working by now.
pub(super) async fn execute(
    context: &Context,
    cluster: &StorageCluster,
    observed: &Observed,
    desired: &Desired,
) -> Vec<String> {
    let mut refusals = Vec::new();
    // Before the servers are removed: a replica that takes over in between must not wait for servers that are gone.
    if let Err(error) = forget(context, cluster, &desired.forget).await {
        refusals.push(format!("the record of nodes cannot be changed: {error}"));
        return refusals;
    }
    for target in desired.remove.iter().take_while(|_| context.tenure.lasts()) {
        if let Err(error) = remove(context, target).await {
            refusals.push(format!("{} {} cannot be removed: {error}", target.kind, target.name));
        }
    }
    for object in desired.objects.iter().take_while(|_| context.tenure.lasts()) {
        if let Err(error) = apply(context, object, observed).await {
            let (kind, name) = (&object["kind"], &object["metadata"]["name"]);
            refusals.push(format!(
                "{} {} cannot be applied: {error}",
                kind.as_str().unwrap_or_default(),
                name.as_str().unwrap_or_default()
            ));
        }
    }
    if !desired.objects.is_empty() || !desired.remove.is_empty() {
        tracing::debug!(cluster = cluster.name_any(), refused = refusals.len(), "applied");
    }
    refusals
}

/// Removes keys from the record of nodes, no matter which field manager set them.
async fn forget(context: &Context, cluster: &StorageCluster, keys: &[String]) -> Result<(), kube::Error> {
    if keys.is_empty() {
        return Ok(());
    }
    let data: BTreeMap<&String, Value> = keys.iter().map(|key| (key, Value::Null)).collect();
    let name = objects::placement_record(&cluster.name_any());
    context.metrics.writes.get_or_create(&Written { kind: "ConfigMap".to_owned(), verb: "patch" }).inc();
    let patch = Patch::Merge(json!({ "data": data }));
    match api_of(context, "ConfigMap").patch(&name, &PatchParams::default(), &patch).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other.map(|_| ()),
    }
}

async fn remove(context: &Context, target: &Target) -> Result<(), kube::Error> {
    let mut parameters = DeleteParams::background();
    if let Some(uid) = &target.uid {
        parameters =
            parameters.preconditions(Preconditions { uid: Some(uid.clone()), resource_version: None });
    }
    tracing::info!(kind = target.kind, name = target.name, "removed");
    context.metrics.writes.get_or_create(&Written { kind: target.kind.to_owned(), verb: "delete" }).inc();
    match api_of(context, target.kind).delete(&target.name, &parameters).await {
        // The object is gone, or replaced by another one of that name.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        other => other.map(|_| ()),
    }
}

async fn apply(context: &Context, object: &Value, observed: &Observed) -> Result<(), kube::Error> {
    let kind = object["kind"].as_str().unwrap_or_default();
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let fingerprint = hash(object);
    let mut wanted = object.clone();
    wanted["metadata"]["annotations"][ANNOTATION_APPLIED] = fingerprint.into();
    let api = api_of(context, kind);
    let found = match kind {
        "StatefulSet" => {
            let set = observed.stateful_sets.get(name).or_else(|| observed.target_sets.get(name));
            set.and_then(|s| serde_json::to_value(s).ok())
        }
        "Service" => observed.services.get(name).and_then(|s| serde_json::to_value(s).ok()),
        "StorageClass" => observed.storage_classes.get(name).and_then(|s| serde_json::to_value(s).ok()),
        _ => api.get_opt(name).await?.and_then(|o| serde_json::to_value(o).ok()),
    };
    let mut needed = wanted.clone();
    // Typed objects do not contain these fields.
    if let Some(fields) = needed.as_object_mut() {
        fields.remove("apiVersion");
        fields.remove("kind");
    }
    if found.is_some_and(|found| holds(&found, &needed)) {
        return Ok(());
    }
    context.metrics.writes.get_or_create(&Written { kind: kind.to_owned(), verb: "apply" }).inc();
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    api.patch(name, &parameters, &Patch::Apply(&wanted)).await?;
    tracing::info!(kind, name, "applied");
    Ok(())
}

/// Returns the kinds that the operator handles: group, version, plural, and whether they are namespaced.
fn resource(kind: &str) -> Option<(ApiResource, bool)> {
    let (group, version, plural, namespaced) = match kind {
        "ConfigMap" => ("", "v1", "configmaps", true),
        "Secret" => ("", "v1", "secrets", true),
        "Service" => ("", "v1", "services", true),
        "PodDisruptionBudget" => ("policy", "v1", "poddisruptionbudgets", true),
        "StatefulSet" => ("apps", "v1", "statefulsets", true),
        "StorageClass" => ("storage.k8s.io", "v1", "storageclasses", false),
        _ => return None,
    };
    Some((
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural),
        namespaced,
    ))
}

fn api_of(context: &Context, kind: &str) -> Api<DynamicObject> {
    let (resource, namespaced) = resource(kind).expect("desired() makes these kinds only");
    if namespaced {
        Api::namespaced_with(context.client.clone(), &context.settings.namespace, &resource)
    } else {
        Api::all_with(context.client.clone(), &resource)
    }
}
