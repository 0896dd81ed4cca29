//! Watches, and reconciles whenever something has changed.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use forebay_api::cluster::StorageCluster;
use forebay_api::names;
use forebay_api::node::StorageNode;
use futures::StreamExt as _;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Secret, Service};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, PartialObjectMeta};
use kube::core::DeserializeGuard;
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::{self, ObjectRef};
use kube::runtime::{Config, Controller, WatchStreamExt as _, watcher};
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};

use crate::desired::Settings;
use crate::leases::Leases;
use crate::limits::{DEBOUNCE, RECONCILES_AT_ONCE_MAX};
use crate::metrics::Metrics;
use crate::placement;
use crate::reconcile::{Context, error_policy, reconcile};
use crate::reports::Reports;

/// The cluster that an object was made for, by its label.
fn cluster_of<K: Resource>(namespace: String) -> impl Fn(K) -> Option<ObjectRef<StorageCluster>> {
    move |object| {
        let labels = object.labels();
        let name = labels.get(names::LABEL_CLUSTER)?;
        let theirs = labels.get(names::LABEL_CLUSTER_NAMESPACE);
        theirs.is_none_or(|n| *n == namespace).then(|| ObjectRef::new(name).within(&namespace))
    }
}

/// What of a node matters for placement and addresses; its heartbeats do not.
fn node_facts(node: &Node) -> u64 {
    let mut hasher = DefaultHasher::new();
    node.metadata.uid.hash(&mut hasher);
    node.metadata.deletion_timestamp.is_some().hash(&mut hasher);
    node.metadata.labels.hash(&mut hasher);
    placement::is_ready(node).hash(&mut hasher);
    placement::is_cordoned(node).hash(&mut hasher);
    crate::desired::internal_ip(node).hash(&mut hasher);
    crate::desired::rdma::offered(node).hash(&mut hasher);
    std::mem::discriminant(&crate::takeover::Kubelet::of(Some(node))).hash(&mut hasher);
    for taint in node.spec.iter().flat_map(|s| s.taints.iter().flatten()) {
        (&taint.key, &taint.value, &taint.effect).hash(&mut hasher);
    }
    hasher.finish()
}

/// As they are published by the nodes themselves, one that cannot be read must not keep the others from being read.
fn storage_node_facts(node: &DeserializeGuard<StorageNode>) -> u64 {
    let mut hasher = DefaultHasher::new();
    let node = match &node.0 {
        Ok(node) => node,
        Err(error) => {
            tracing::warn!(node = error.metadata.name, error = error.error, "a StorageNode cannot be read");
            error.error.hash(&mut hasher);
            return hasher.finish();
        }
    };
    node.spec.unschedulable.hash(&mut hasher);
    let devices = node.status.as_ref().map(|s| &s.rdma_devices);
    serde_json::to_string(&devices).unwrap_or_default().hash(&mut hasher);
    hasher.finish()
}

/// Keeps a store up to date, for ever, and says so where something that matters has changed.
async fn follow<K>(
    api: Api<K>,
    writer: reflector::store::Writer<K>,
    facts: fn(&K) -> u64,
    changed: mpsc::Sender<()>,
) where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Send + Sync + 'static,
{
    let mut known: HashMap<String, u64> = HashMap::new();
    let mut events =
        std::pin::pin!(watcher(api, watcher::Config::default()).default_backoff().reflect(writer));
    while let Some(event) = events.next().await {
        let news = match &event {
            Ok(watcher::Event::Apply(object)) => {
                known.insert(object.name_any(), facts(object)) != Some(facts(object))
            }
            Ok(watcher::Event::Delete(object)) => known.remove(&object.name_any()).is_some(),
            Ok(watcher::Event::InitApply(object)) => {
                known.insert(object.name_any(), facts(object));
                false
            }
            // After a watch was lost nobody says what went meanwhile.
            Ok(watcher::Event::InitDone) => true,
            Ok(watcher::Event::Init) => false,
            Err(error) => {
                tracing::debug!(%error, "a watch was lost, and begins anew");
                false
            }
        };
        if news && changed.send(()).await.is_err() {
            return;
        }
    }
}

/// Works until `end` says true, and then finishes what is in hand. `leases` are being watched.
pub async fn operate(
    client: Client,
    settings: Settings,
    metrics: Arc<Metrics>,
    leases: Leases,
    mut end: watch::Receiver<bool>,
) {
    let namespace = settings.namespace.clone();
    let (nodes, nodes_writer) = reflector::store();
    let (storage_nodes, storage_nodes_writer) = reflector::store();
    let ours = watcher::Config::default().labels(names::LABEL_CLUSTER);
    let controller = Controller::new(
        Api::<StorageCluster>::namespaced(client.clone(), &namespace),
        watcher::Config::default(),
    );
    let reports = Reports::default();
    let (changed, changes) = mpsc::channel(1);
    let changes = futures::stream::unfold(changes, |mut changes: mpsc::Receiver<()>| async {
        changes.recv().await.map(|change| (change, changes))
    });
    let recorder = Recorder::new(
        client.clone(),
        Reporter {
            controller: "forebay-operator".to_owned(),
            instance: std::env::var("POD_NAME").ok().filter(|n| !n.is_empty()),
        },
    );
    let context = Arc::new(Context {
        client: client.clone(),
        settings,
        nodes: nodes.clone(),
        storage_nodes: storage_nodes.clone(),
        clusters: controller.store(),
        reports: reports.clone(),
        leases: leases.clone(),
        metrics,
        recorder,
        failures: std::sync::Mutex::default(),
    });
    let mut followers = tokio::task::JoinSet::new();
    followers.spawn(follow(Api::<Node>::all(client.clone()), nodes_writer, node_facts, changed.clone()));
    let storage_node_api = Api::<DeserializeGuard<StorageNode>>::all(client.clone());
    followers.spawn(follow(storage_node_api, storage_nodes_writer, storage_node_facts, changed.clone()));
    let late = changed.clone();
    followers.spawn(async move {
        loop {
            leases.late().await;
            if late.send(()).await.is_err() {
                return;
            }
        }
    });
    followers.spawn(reports.poll(changed));
    let stop = async move {
        // An error means that whoever could say so is gone: then it is the end, too.
        let _ = end.wait_for(|end| *end).await;
    };
    let n = namespace;
    let c = client;
    controller
        .with_config(Config::default().debounce(DEBOUNCE).concurrency(RECONCILES_AT_ONCE_MAX))
        .watches(Api::<StatefulSet>::namespaced(c.clone(), &n), ours.clone(), cluster_of(n.clone()))
        .watches(Api::<Pod>::namespaced(c.clone(), &n), ours.clone(), cluster_of(n.clone()))
        .watches(Api::<Service>::namespaced(c.clone(), &n), ours.clone(), cluster_of(n.clone()))
        .watches(Api::<ConfigMap>::namespaced(c.clone(), &n), ours.clone(), cluster_of(n.clone()))
        .watches(Api::<StorageClass>::all(c.clone()), ours.clone(), cluster_of(n.clone()))
        .watches(Api::<PartialObjectMeta<Secret>>::namespaced(c, &n), ours, cluster_of(n.clone()))
        .reconcile_all_on(changes)
        .graceful_shutdown_on(stop)
        .run(
            move |cluster, context: Arc<Context>| {
                let (nodes, storage_nodes) = (nodes.clone(), storage_nodes.clone());
                async move {
                    // Judging by a list of nodes that has not come yet would move what need not move.
                    let _ = nodes.wait_until_ready().await;
                    let _ = storage_nodes.wait_until_ready().await;
                    reconcile(cluster, context).await
                }
            },
            error_policy,
            context,
        )
        .for_each(|result| async move {
            if let Err(error) = result {
                tracing::debug!(%error, "controller");
            }
        })
        .await;
    followers.abort_all();
}
