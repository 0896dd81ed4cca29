//! Watches, and reconciles on every change.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Instant;

use forebay_api::names;
use forebay_api::node::StorageNode;
use futures::StreamExt as _;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Secret, Service};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, PartialObjectMeta};
use kube::core::DeserializeGuard;
use kube::runtime::events::Reporter;
use kube::runtime::reflector::store::WriterDropped;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{Config, Controller, WatchStreamExt as _, controller, watcher};
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};

use crate::desired::Settings;
use crate::leader::Tenure;
use crate::leases::Leases;
use crate::limits::{DEBOUNCE, LIST_CHECK_INTERVAL, LISTS_WAIT, PROGRESS_INTERVAL, RECONCILES_AT_ONCE_MAX};
use crate::metrics::{Metrics, Watched};
use crate::placement;
use crate::progress::Progress;
use crate::reconcile::{Context, Guarded, ReconcileError, error_policy, reconcile};
use crate::reports::Reports;
use crate::teller::Teller;

/// Returns the cluster to which an object belongs, by its label.
fn cluster_of<K: Resource>(namespace: String) -> impl Fn(K) -> Option<ObjectRef<Guarded>> {
    move |object| {
        let labels = object.labels();
        let name = labels.get(names::LABEL_CLUSTER)?;
        let theirs = labels.get(names::LABEL_CLUSTER_NAMESPACE);
        theirs.is_none_or(|n| *n == namespace).then(|| ObjectRef::new(name).within(&namespace))
    }
}

/// Hashes the fields of a node that matter for placement and addresses; heartbeats do not.
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

/// Hashes the relevant fields of a StorageNode. The nodes publish these objects themselves, so an unreadable one must not
/// block the others.
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

/// Receivers of watch errors: the log, the metrics and /healthz.
#[derive(Clone)]
struct Trouble {
    watch: &'static str,
    metrics: Arc<Metrics>,
    progress: Arc<Progress>,
}

impl Trouble {
    fn tell(&self, error: &watcher::Error) {
        self.metrics.watch_errors.get_or_create(&Watched { watch: self.watch }).inc();
        let why = words(error);
        // A watch that expires is normal; one that cannot start is not.
        let expected = matches!(error, watcher::Error::WatchError(status) if status.code == 410);
        if expected {
            tracing::debug!(watch = self.watch, why, "a watch has ended; restarting it");
        } else {
            tracing::warn!(watch = self.watch, why, "a watch has failed; retrying it");
            self.progress.watch_failed(self.watch, why, Instant::now());
        }
    }
}

/// Describes a watch error with its causes and, if known, the fix.
fn words(error: &watcher::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        let more = next.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = next.source();
    }
    let missing = matches!(
        error,
        watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 404
    );
    if missing {
        text.push_str(
            "; a CustomResourceDefinition is missing: kubectl apply --server-side -f charts/forebay/crds/ of this version",
        );
    }
    text
}

/// Waits until a store has its first list. Fails if there will be none.
///
/// The store wakes only the task that polled it last, and several tasks wait for each store. So this polls at intervals.
async fn first_list<K>(store: &Store<K>) -> Result<(), WriterDropped>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    loop {
        if let Ok(ready) = tokio::time::timeout(LIST_CHECK_INTERVAL, store.wait_until_ready()).await {
            return ready;
        }
    }
}

/// Waits for a list, and marks it as arrived.
async fn await_list<K>(store: Store<K>, list: &'static str, progress: Arc<Progress>)
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    if first_list(&store).await.is_ok() {
        progress.listed(list);
    }
}

/// Exports the loop's progress to the metrics, indefinitely.
async fn look_after(clusters: Store<Guarded>, metrics: Arc<Metrics>, progress: Arc<Progress>) {
    let mut interval = tokio::time::interval(PROGRESS_INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut said = None;
    loop {
        interval.tick().await;
        let all = clusters.state();
        progress.known(all.iter().map(|c| c.name_any()), Instant::now());
        let unreadable = all.iter().filter(|c| c.0.is_err()).count();
        metrics.unreadable.set(i64::try_from(unreadable).unwrap_or(i64::MAX));
        let stalled = progress.stalled(Instant::now());
        metrics.stalled.set(i64::from(stalled.is_some()));
        if stalled.is_some() && said.is_none() {
            tracing::error!(why = stalled, "the control loop has stalled");
        }
        said = stalled;
    }
}

/// Keeps a store up to date, indefinitely, and notifies `changed` when something relevant has changed.
async fn follow<K>(
    api: Api<K>,
    writer: reflector::store::Writer<K>,
    facts: fn(&K) -> u64,
    changed: mpsc::Sender<()>,
    trouble: Trouble,
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
            // After a lost watch, nothing reports what was deleted in the meantime.
            Ok(watcher::Event::InitDone) => true,
            Ok(watcher::Event::Init) => false,
            Err(error) => {
                trouble.tell(error);
                false
            }
        };
        if news && changed.send(()).await.is_err() {
            return;
        }
    }
}

/// Works until `end` is true, and then finishes the work in progress. `leases` must be watched already; `tenure` belongs to
/// the Lease that this replica holds.
pub async fn operate(
    client: Client,
    settings: Settings,
    metrics: Arc<Metrics>,
    leases: Leases,
    tenure: Tenure,
    progress: Arc<Progress>,
    mut end: watch::Receiver<bool>,
) {
    progress.begin(&["StorageClusters", "nodes", "StorageNodes"], Instant::now());
    let namespace = settings.namespace.clone();
    let (nodes, nodes_writer) = reflector::store();
    let (storage_nodes, storage_nodes_writer) = reflector::store();
    let ours = watcher::Config::default().labels(names::LABEL_CLUSTER);
    let controller =
        Controller::new(Api::<Guarded>::namespaced(client.clone(), &namespace), watcher::Config::default());
    let reports = Reports::default();
    let (changed, changes) = mpsc::channel(1);
    let changes = futures::stream::unfold(changes, |mut changes: mpsc::Receiver<()>| async {
        changes.recv().await.map(|change| (change, changes))
    });
    let teller = Teller::new(
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
        tenure,
        metrics: Arc::clone(&metrics),
        teller,
        progress: Arc::clone(&progress),
        failures: std::sync::Mutex::default(),
    });
    let trouble = |watch| Trouble { watch, metrics: Arc::clone(&metrics), progress: Arc::clone(&progress) };
    let mut followers = tokio::task::JoinSet::new();
    let node_api = Api::<Node>::all(client.clone());
    followers.spawn(follow(node_api, nodes_writer, node_facts, changed.clone(), trouble("nodes")));
    let storage_node_api = Api::<DeserializeGuard<StorageNode>>::all(client.clone());
    let of_storage_nodes = trouble("storagenodes");
    followers.spawn(follow(
        storage_node_api,
        storage_nodes_writer,
        storage_node_facts,
        changed.clone(),
        of_storage_nodes,
    ));
    let clusters = controller.store();
    followers.spawn(await_list(clusters.clone(), "StorageClusters", Arc::clone(&progress)));
    followers.spawn(await_list(nodes.clone(), "nodes", Arc::clone(&progress)));
    followers.spawn(await_list(storage_nodes.clone(), "StorageNodes", Arc::clone(&progress)));
    followers.spawn(look_after(clusters, Arc::clone(&metrics), Arc::clone(&progress)));
    let of_controller = trouble("controller");
    let late = changed.clone();
    followers.spawn(async move {
        loop {
            leases.changed().await;
            if late.send(()).await.is_err() {
                return;
            }
        }
    });
    followers.spawn(reports.poll(changed));
    let stop = async move {
        // An error means that the sender of `end` was dropped, which also ends the work.
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
                    // Without a complete list of nodes, instances would be moved needlessly.
                    let lists = async { tokio::join!(first_list(&nodes), first_list(&storage_nodes)) };
                    match tokio::time::timeout(LISTS_WAIT, lists).await {
                        Ok((Ok(()), Ok(()))) => reconcile(cluster, context).await,
                        _ => Err(context.not_begun(&cluster, ReconcileError::NotListed)),
                    }
                }
            },
            error_policy,
            context,
        )
        .for_each(|result| {
            match result {
                Err(controller::Error::QueueError(error)) => of_controller.tell(&error),
                // Failures of a reconciliation are reported there.
                Err(error @ controller::Error::ReconcilerFailed(..)) => tracing::debug!(%error, "controller"),
                Err(error) => tracing::debug!(%error, "controller"),
                Ok(_) => {}
            }
            std::future::ready(())
        })
        .await;
    followers.abort_all();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watch_error_reports_a_missing_custom_resource_definition() {
        let status = |code: u16| {
            let value =
                serde_json::json!({ "message": "404 page not found", "reason": "NotFound", "code": code });
            serde_json::from_value(value).expect("a Status")
        };
        let error = |code: u16| watcher::Error::InitialListFailed(kube::Error::Api(status(code)));
        assert!(words(&error(404)).contains("CustomResourceDefinition is missing"), "{}", words(&error(404)));
        assert!(!words(&error(403)).contains("CustomResourceDefinition"));
    }

    #[tokio::test]
    async fn all_tasks_that_wait_for_a_list_get_it() {
        let (store, mut writer) = reflector::store::<Node>();
        let (early, late) = (store.clone(), store);
        let mut early = tokio::spawn(async move { first_list(&early).await });
        assert!(
            tokio::time::timeout(LIST_CHECK_INTERVAL / 10, &mut early).await.is_err(),
            "nothing is listed"
        );
        // The last one that polls the store, and never polls it again: a task that waits for something else meanwhile.
        let waiting = late.wait_until_ready();
        let mut waiting = std::pin::pin!(waiting);
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        writer.apply_watcher_event(&watcher::Event::Init);
        writer.apply_watcher_event(&watcher::Event::InitDone);
        let listed = tokio::time::timeout(LIST_CHECK_INTERVAL * 50, early).await;
        listed.expect("the first task gets the list, too").expect("no panic").expect("a list");
    }
}
