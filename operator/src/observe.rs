//! Reads the observed state from the API server.
//!
//! Nodes are read from a watch: there are many, and a short delay is harmless. The objects of the cluster are listed again
//! every time: a decision such as "all others serve, so restart this one" must not be based on outdated state.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use forebay_api::cluster::StorageCluster;
use forebay_api::names;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Pod, Secret, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ListParams};
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;

use crate::admin::Identity;
use crate::desired::{Observed, objects, ordinal, status};
use crate::limits::{CREATION_FAILURE_AGE_MAX, EVENTS_READ_MAX, MOUNT_FAILURE_AGE_MAX};
use crate::reconcile::Context;
use crate::reports::Visit;

async fn list<K>(client: &Client, namespace: &str, selector: &str) -> Result<Vec<K>, kube::Error>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    Ok(api.list(&ListParams::default().labels(selector)).await?.items)
}

fn by_instance<K: Resource>(cluster: &str, items: Vec<K>) -> BTreeMap<String, K> {
    items
        .into_iter()
        .filter_map(|item| {
            let instance = item.labels().get(names::LABEL_INSTANCE)?.clone();
            ordinal(cluster, &instance)?;
            Some((instance, item))
        })
        .collect()
}

/// Observes everything except the reports and the certificates.
///
/// # Errors
///
/// If the API server does not respond.
pub async fn observe(context: &Context, cluster: &StorageCluster) -> Result<Observed, kube::Error> {
    let name = cluster.name_any();
    let client = &context.client;
    let namespace = context.settings.namespace.as_str();
    let ours =
        format!("{}={},{}={name}", names::LABEL_MANAGED_BY, names::MANAGED_BY_OPERATOR, names::LABEL_CLUSTER);
    let theirs =
        format!("{}={},{}={name}", names::LABEL_MANAGED_BY, names::MANAGED_BY_DRIVER, names::LABEL_CLUSTER);
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let ours_only = ListParams::default().labels(&ours);
    let theirs_only = ListParams::default().labels(&theirs);
    let (sets, pods, services, maps, budgets, our_secrets, volumes) = tokio::try_join!(
        list::<StatefulSet>(client, namespace, &ours),
        list::<Pod>(client, namespace, &ours),
        list::<Service>(client, namespace, &ours),
        list::<ConfigMap>(client, namespace, &ours),
        list::<PodDisruptionBudget>(client, namespace, &ours),
        // Metadata suffice to find out which Secrets exist; credentials of volumes are never read.
        async { Ok(secrets.list_metadata(&ours_only).await?.items) },
        async { Ok(secrets.list_metadata(&theirs_only).await?.items) },
    )?;
    let record = maps.iter().find(|m| m.name_any() == objects::placement_record(&name));
    let version = record.and_then(kube::ResourceExt::resource_version);
    let record = record.and_then(|m| m.data.clone()).unwrap_or_default();
    let mut recorded_volumes: BTreeMap<String, u32> = BTreeMap::new();
    for secret in &volumes {
        if let Some(instance) = secret.labels().get(names::LABEL_INSTANCE) {
            *recorded_volumes.entry(instance.clone()).or_default() += 1;
        }
    }
    let our_secrets =
        our_secrets.iter().map(|s| (s.name_any(), s.labels().get(names::LABEL_INSTANCE).cloned())).collect();
    let is_target = |labels: &BTreeMap<String, String>| {
        labels.get("app.kubernetes.io/component").is_some_and(|c| c == names::COMPONENT_TARGET)
    };
    let (target_pods, pods): (Vec<Pod>, Vec<Pod>) = pods.into_iter().partition(|p| is_target(p.labels()));
    let (target_sets, sets): (Vec<StatefulSet>, Vec<StatefulSet>) =
        sets.into_iter().partition(|s| is_target(s.labels()));
    let pods = by_instance(&name, pods);
    let sets = by_instance(&name, sets);
    let mount_failures = mount_failures(client, namespace, &pods).await;
    let creation_failures = creation_failures(client, namespace, &sets, &pods).await;
    let (sights, pause) = context.leases.judged(&name);
    Ok(Observed {
        now: Timestamp::now(),
        nodes: context.nodes.state(),
        storage_nodes: context
            .storage_nodes
            .state()
            .iter()
            .filter_map(|s| Some(Arc::new(s.0.clone().ok()?)))
            .collect(),
        stateful_sets: sets,
        services: by_instance(&name, services),
        config_maps: maps.iter().map(kube::ResourceExt::name_any).collect(),
        secrets: our_secrets,
        mount_failures,
        creation_failures,
        budgets: budgets.iter().map(kube::ResourceExt::name_any).collect(),
        pools: objects::recorded_pools(&record),
        recorded: record.keys().cloned().collect(),
        record: crate::desired::record::read(version, &record),
        silences: sights.into_iter().map(|(node, sight)| (node, sight.silent)).collect(),
        pause,
        target_sets: target_sets.into_iter().map(|s| (s.name_any(), s)).collect(),
        target_pods,
        bound: record.into_iter().filter(|(i, _)| ordinal(&name, i).is_some()).collect(),
        storage_classes: storage_classes(client, cluster).await?,
        reports: BTreeMap::new(),
        recorded_volumes,
        elsewhere: elsewhere(context, cluster),
        certificates: crate::desired::CertificatesState::default(),
        pods,
    })
}

async fn storage_classes(
    client: &Client,
    cluster: &StorageCluster,
) -> Result<BTreeMap<String, StorageClass>, kube::Error> {
    let api: Api<StorageClass> = Api::all(client.clone());
    let selector = format!("{}={}", names::LABEL_CLUSTER, cluster.name_any());
    let mut classes: BTreeMap<String, StorageClass> = api
        .list(&ListParams::default().labels(&selector))
        .await?
        .items
        .into_iter()
        .map(|class| (class.name_any(), class))
        .collect();
    let wanted: BTreeSet<&str> = cluster.spec.storage_classes.iter().map(|t| t.name.as_str()).collect();
    for name in wanted {
        if !classes.contains_key(name)
            && let Some(other) = api.get_opt(name).await?
        {
            classes.insert(name.to_owned(), other);
        }
    }
    Ok(classes)
}

/// Returns the message of the newest of some Events. Events are not in chronological order, and old ones say nothing about
/// the current state.
fn latest(events: Vec<Event>, now: Timestamp, age_max: Duration) -> Option<String> {
    let recent = events.into_iter().filter_map(|event| {
        let at = last_seen(&event)?;
        let age = Duration::try_from(now.duration_since(at)).unwrap_or_default();
        (age <= age_max).then_some((at, event.message?))
    });
    recent.max_by_key(|(at, _)| *at).map(|(_, message)| message)
}

/// Returns when an Event last occurred: each reporting program fills in only some of these times.
fn last_seen(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref().and_then(|s| s.last_observed_time.as_ref()).map(|t| t.0);
    let last = event.last_timestamp.as_ref().map(|t| t.0);
    let at = event.event_time.as_ref().map(|t| t.0);
    let made = event.metadata.creation_timestamp.as_ref().map(|t| t.0);
    [series, last, at].into_iter().flatten().max().or(made)
}

/// Returns the messages of Events about volumes that cannot be mounted, because the pod's own status does not contain them.
/// Best effort.
async fn mount_failures(
    client: &Client,
    namespace: &str,
    pods: &BTreeMap<String, Pod>,
) -> BTreeMap<String, String> {
    let mut failures = BTreeMap::new();
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    for (instance, pod) in pods {
        let status = pod.status.as_ref();
        let waits = status.and_then(|s| s.phase.as_deref()) == Some("Pending")
            && pod.spec.as_ref().is_some_and(|s| s.node_name.is_some());
        if !waits {
            continue;
        }
        let fields = format!("involvedObject.uid={},reason=FailedMount", pod.uid().unwrap_or_default());
        match api.list(&ListParams::default().fields(&fields).limit(EVENTS_READ_MAX)).await {
            Ok(events) => {
                if let Some(message) = latest(events.items, Timestamp::now(), MOUNT_FAILURE_AGE_MAX) {
                    failures.insert(instance.clone(), message);
                }
            }
            Err(error) => tracing::debug!(%error, "Events cannot be read"),
        }
    }
    failures
}

/// Returns the messages of Events about StatefulSets with pods that an admission plugin or a quota rejects, because the
/// StatefulSets' own status does not contain them. Best effort.
async fn creation_failures(
    client: &Client,
    namespace: &str,
    sets: &BTreeMap<String, StatefulSet>,
    pods: &BTreeMap<String, Pod>,
) -> BTreeMap<String, String> {
    let mut failures = BTreeMap::new();
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    for (instance, set) in sets.iter().filter(|(instance, _)| !pods.contains_key(*instance)) {
        let fields = format!("involvedObject.uid={},reason=FailedCreate", set.uid().unwrap_or_default());
        match api.list(&ListParams::default().fields(&fields).limit(EVENTS_READ_MAX)).await {
            Ok(events) => {
                if let Some(message) = latest(events.items, Timestamp::now(), CREATION_FAILURE_AGE_MAX) {
                    failures.insert(instance.clone(), message);
                }
            }
            Err(error) => tracing::debug!(%error, "Events cannot be read"),
        }
    }
    failures
}

/// Returns the nodes on which other clusters' instances use the host's network.
fn elsewhere(context: &Context, cluster: &StorageCluster) -> Vec<(String, String, Vec<u16>)> {
    let mut found = Vec::new();
    let clusters = context.clusters.state();
    // A cluster that cannot be read counts as having no instances.
    for other in clusters.iter().filter_map(|c| c.0.as_ref().ok()) {
        if other.metadata.uid == cluster.metadata.uid || !other.spec.network.host_network {
            continue;
        }
        let ports = objects::ports(&other.spec.network);
        // Otherwise two clusters that have both taken a node and not served there would both leave it, again and again.
        let age = |c: &StorageCluster| (c.creation_timestamp(), c.name_any());
        let older = age(other) < age(cluster);
        for instance in other.status.iter().flat_map(|s| &s.instances) {
            if !instance.node.is_empty() && (older || instance.capacity_bytes > 0) {
                found.push((instance.node.clone(), instance.name.clone(), ports.clone()));
            }
        }
    }
    found
}

/// Returns the instances that can be queried now: their pod is ready, and their address is known.
#[must_use]
pub fn visits(
    cluster: &StorageCluster,
    namespace: &str,
    observed: &Observed,
    addresses: &[(String, std::net::IpAddr)],
    identity: Option<&Identity>,
) -> BTreeMap<String, Visit> {
    let Some(identity) = identity else { return BTreeMap::new() };
    let overcommit: BTreeMap<String, u32> =
        cluster.spec.backends.iter().map(|b| (b.name.clone(), b.overcommit_percent())).collect();
    addresses
        .iter()
        .filter_map(|(instance, address)| {
            let pod = observed.pods.get(instance)?;
            status::pod_ready_since(pod)?;
            // The pod of an earlier epoch is on a different node than the address.
            let node = pod.spec.as_ref().and_then(|s| s.node_name.as_deref());
            if cluster.spec.can_move() && node != observed.bound.get(instance).map(String::as_str) {
                return None;
            }
            let visit = Visit {
                pod_uid: pod.uid()?,
                endpoint: std::net::SocketAddr::new(*address, cluster.spec.network.ports.admin),
                server_name: names::admin_server_name(instance, namespace),
                identity: identity.clone(),
                overcommit: overcommit.clone(),
            };
            Some((instance.clone(), visit))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn event(message: &str, times: serde_json::Value) -> Event {
        let mut event = json!({ "metadata": {}, "involvedObject": {}, "message": message });
        for (key, value) in times.as_object().expect("fields") {
            event[key.as_str()] = value.clone();
        }
        serde_json::from_value(event).expect("an Event")
    }

    #[test]
    fn newest_recent_event_is_chosen_by_any_of_its_timestamps() {
        let now: Timestamp = "2026-01-01T12:00:00Z".parse().expect("a moment");
        let old = || event("old", json!({ "lastTimestamp": "2026-01-01T11:49:59Z" }));
        let last = || event("last", json!({ "lastTimestamp": "2026-01-01T11:55:00Z" }));
        let once = || event("once", json!({ "eventTime": "2026-01-01T11:56:00.000000Z" }));
        let often = || {
            let series = json!({ "count": 9, "lastObservedTime": "2026-01-01T11:57:00.000000Z" });
            event("often", json!({ "eventTime": "2026-01-01T01:00:00.000000Z", "series": series }))
        };
        let made = || event("made", json!({ "metadata": { "creationTimestamp": "2026-01-01T11:58:00Z" } }));
        let ahead = || event("ahead", json!({ "lastTimestamp": "2026-01-01T12:00:03Z" }));
        let reported = |events: Vec<Event>| latest(events, now, Duration::from_secs(600));
        assert_eq!(reported(vec![last(), old()]).as_deref(), Some("last"), "it is not the last of the list");
        assert_eq!(reported(vec![once(), last(), old()]).as_deref(), Some("once"));
        assert_eq!(reported(vec![often(), once(), last()]).as_deref(), Some("often"));
        assert_eq!(reported(vec![made(), often(), once()]).as_deref(), Some("made"));
        assert_eq!(reported(vec![ahead(), made()]).as_deref(), Some("ahead"), "clocks differ a little");
        assert_eq!(reported(vec![old(), event("never", json!({}))]), None);
        assert_eq!(reported(vec![]), None);
    }
}
