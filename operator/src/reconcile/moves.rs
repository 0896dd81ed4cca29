//! Records moves of instances, in one write that fails if another client has written since.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_api::cluster::StorageCluster;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;

use super::publish::tell;
use super::{Context, ReconcileError};
use crate::desired::Observed;
use crate::desired::objects::{labels, placement_record};
use crate::desired::record::Move;
use crate::events::Notice;
use crate::leases::Look;
use crate::limits::SOON;
use crate::metrics::{Moved, Written};
use crate::takeover::Why;

/// Field manager for the keys that moves write; the operator's other changes to the record do not touch these keys.
const FIELD_MANAGER: &str = "forebay-operator-moves";

/// Records the places. Nothing else has been changed for these instances yet, so if the operator ends now, the next one
/// reads either none of the keys or all of them.
pub(super) async fn record(
    context: &Context,
    cluster: &StorageCluster,
    observed: &Observed,
    moves: &[Move],
) -> Result<Duration, ReconcileError> {
    let mut chosen = Vec::new();
    for one in moves {
        if still_lost(context, cluster, one).await && lives(context, one).await {
            chosen.push(one);
        }
    }
    let data: BTreeMap<String, String> = chosen.iter().flat_map(|one| one.data()).collect();
    if data.is_empty() {
        return Ok(crate::limits::LEASE_INTERVAL);
    }
    let api: Api<ConfigMap> = Api::namespaced(context.client.clone(), &context.settings.namespace);
    let name = placement_record(&cluster.name_any());
    let written = match &observed.record.version {
        Some(version) => {
            let patch = json!({ "metadata": { "resourceVersion": version }, "data": data });
            let parameters =
                PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
            api.patch(&name, &parameters, &Patch::Merge(&patch)).await
        }
        None => {
            let map: ConfigMap = serde_json::from_value(json!({
                "metadata": { "name": name, "labels": labels(&cluster.name_any(), None) },
                "data": data,
            }))?;
            let parameters =
                PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
            api.create(&parameters, &map).await
        }
    };
    context.metrics.writes.get_or_create(&Written { kind: "ConfigMap".to_owned(), verb: "record" }).inc();
    match written {
        // Another client wrote first, so everything is decided again.
        Err(kube::Error::Api(status)) if status.code == 409 => return Ok(SOON),
        other => other?,
    };
    for one in chosen {
        say(context, cluster, one).await;
    }
    Ok(SOON)
}

async fn say(context: &Context, cluster: &StorageCluster, one: &Move) {
    let Some(moved) = &one.moved else {
        tracing::info!(instance = one.instance, node = one.node, epoch = one.epoch, "place recorded");
        return;
    };
    tracing::warn!(
        instance = one.instance,
        why = moved.why,
        from = moved.from,
        to = one.node,
        epoch = one.epoch,
        "moves"
    );
    let labels = Moved { cluster: cluster.name_any(), reason: moved.why.clone() };
    context.metrics.takeovers.get_or_create(&labels).inc();
    let planned = [Why::NodeCordoned, Why::Asked].iter().any(|w| w.as_str() == moved.why);
    let seconds = moved.decided.duration_since(moved.since).as_secs().max(0);
    let notice = Notice {
        warning: !planned,
        reason: if planned { "HandingOver" } else { "TakingOver" },
        note: format!(
            "{} moves from node {} to {} in epoch {} ({}, for {seconds} s)",
            one.instance, moved.from, one.node, one.epoch, moved.why
        ),
        instance: Some(one.instance.clone()),
    };
    tell(context, cluster, &notice).await;
}

/// Nodes are read from a watch, which may lag: before an instance is taken away from a node that is silent or gone, the API
/// server is queried once more.
async fn still_lost(context: &Context, cluster: &StorageCluster, one: &Move) -> bool {
    let Some(moved) = &one.moved else { return true };
    if moved.why == Why::NodeGone.as_str() {
        let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(context.client.clone());
        return matches!(nodes.get_opt(&moved.from).await, Ok(None));
    }
    if moved.why == Why::NodeLost.as_str() {
        let patience = cluster.spec.takeover.after();
        let nodes = context.nodes.state();
        let node = nodes.iter().find(|n| n.metadata.name.as_ref() == Some(&moved.from));
        let silent = match context.leases.look(&moved.from).await {
            Look::Seen(sight) => sight.silent >= patience,
            // In this case the reason was the kubelet's state in the Node object.
            Look::None => true,
            Look::Failed => false,
        };
        let off = matches!(
            crate::takeover::Kubelet::of(node.map(AsRef::as_ref)),
            crate::takeover::Kubelet::OutOfService | crate::takeover::Kubelet::Gone
        );
        return off || silent;
    }
    true
}

/// Whether the node that will take over an instance is alive now: its Lease has changed since observation began, and did so
/// recently. If that is not known, the node is observed from now on, and the move waits.
async fn lives(context: &Context, one: &Move) -> bool {
    let unplanned = [Why::NodeLost, Why::NodeGone, Why::ServerDown];
    if !one.moved.as_ref().is_some_and(|moved| unplanned.iter().any(|why| why.as_str() == moved.why)) {
        return true;
    }
    match context.leases.look(&one.node).await {
        Look::Seen(sight) if sight.is_fresh() => true,
        Look::Seen(sight) => {
            context.leases.attend(&one.node);
            tracing::warn!(
                instance = one.instance,
                node = one.node,
                silent_s = sight.silent.as_secs(),
                "the chosen node has not proven that it is alive"
            );
            false
        }
        // In this case only the Node object is available.
        Look::None => true,
        Look::Failed => false,
    }
}
