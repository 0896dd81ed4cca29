//! The kubelets' Leases: how long nodes have been silent.
//!
//! A Lease is judged by when it was last *seen* to change, not by the time stored in it, so clock differences do no harm.
//! Only observed time counts: while the API server was away no Lease could be renewed, and no node counts as lost for that.
//!
//! The observed nodes are those of instances that can move, those that can take them over, and some others: whether one node
//! is silent or many are decides whether anything is taken over ([`crate::brake`]).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_api::StorageCluster;
use forebay_api::cluster::NodeVerdict;
use futures::StreamExt as _;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, ResourceExt as _};
use tokio::sync::Notify;

use crate::brake::{Brake, Cause, Pause, Scope, Sight, storm};
use crate::limits::{
    ATTENTION, LEASE_GAP_MAX, LEASE_INTERVAL, LEASE_LOOK_TIME_MAX, LEASES_AT_ONCE_MAX, LONG_OFF,
    SPARES_OBSERVED_MAX, WITNESSES_MAX,
};
use crate::placement::Reason;

/// Namespace of the kubelets' Leases.
pub const NAMESPACE: &str = "kube-node-lease";

/// Observations of one Lease.
#[derive(Clone, Debug)]
struct Seen {
    version: String,
    changed: Instant,
    looked: Instant,
    proven: bool,
    /// The time stored in the Lease, by the kubelet's clock.
    renewed: Option<Timestamp>,
}

impl Seen {
    fn first(version: String, at: Instant) -> Self {
        Self { version, changed: at, looked: at, proven: false, renewed: None }
    }

    /// Records another observation.
    fn again(&mut self, version: String, at: Instant) {
        if version != self.version {
            (self.changed, self.proven) = (at, true);
        } else if at.saturating_duration_since(self.looked) > LEASE_GAP_MAX {
            (self.changed, self.proven) = (at, false);
        }
        self.version = version;
        self.looked = at;
    }

    fn sight(&self) -> Sight {
        Sight { silent: self.looked.saturating_duration_since(self.changed), proven: self.proven }
    }
}

/// Result of reading a Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The node's state.
    Seen(Sight),
    /// There is no Lease.
    None,
    /// The API server did not respond, or reported an error.
    Failed,
}

/// Results of the observation, besides the Leases themselves.
#[derive(Debug, Default)]
struct Watched {
    /// The brake for all nodes.
    brake: Brake,
    /// The brakes for the nodes that can run instances of a cluster, by the cluster's name.
    brakes: BTreeMap<String, Brake>,
    looked: Option<Instant>,
    /// The result of the last whole round. Single reads do not update it: a silence that is too long and the others, by
    /// which it is judged, must be from the same moment.
    sights: BTreeMap<String, Sight>,
    /// Nodes that were chosen without being observed, and when.
    attended: BTreeMap<String, Instant>,
}

impl Watched {
    fn pause(&self, cluster: &str) -> Option<Pause> {
        let (looked, now) = (self.looked?, Instant::now());
        let mine = self.brakes.get(cluster).and_then(|brake| brake.pause(looked, now));
        mine.or_else(|| self.brake.pause(looked, now))
    }
}

/// The facts that reconciliations depend on. Waiters are notified when one of them changes, not for as long as it holds.
#[derive(Debug, Default, PartialEq, Eq)]
struct News {
    /// Nodes with a relevant silence.
    late: BTreeSet<String>,
    /// Nodes to which nothing is moved.
    quiet: BTreeSet<String>,
    pauses: BTreeMap<String, Option<Pause>>,
}

/// The Leases of the nodes that matter to takeovers.
#[derive(Clone)]
pub struct Leases {
    client: Client,
    api: Api<Lease>,
    seen: Arc<Mutex<HashMap<String, Seen>>>,
    watched: Arc<Mutex<Watched>>,
    news: Arc<Notify>,
}

impl std::fmt::Debug for Leases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leases").finish_non_exhaustive()
    }
}

impl Leases {
    /// Creates the observer, without observations.
    #[must_use]
    pub fn new(client: Client) -> Self {
        let api = Api::namespaced(client.clone(), NAMESPACE);
        Self { client, api, seen: Arc::default(), watched: Arc::default(), news: Arc::default() }
    }

    fn seen(&self) -> MutexGuard<'_, HashMap<String, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the state of each node in the last round, and the pause of a cluster's takeovers, if one is in effect.
    #[must_use]
    pub fn judged(&self, cluster: &str) -> (BTreeMap<String, Sight>, Option<Pause>) {
        let watched = self.watched();
        (watched.sights.clone(), watched.pause(cluster))
    }

    /// Returns the pause of a cluster's takeovers, if one is in effect now.
    #[must_use]
    pub fn pause(&self, cluster: &str) -> Option<Pause> {
        self.watched().pause(cluster)
    }

    /// Records that a request of this process to the API server failed, because the kubelets' requests may fail, too.
    pub fn api_server_failed(&self) {
        self.watched().brake.saw(Some(Cause::ApiServerUnreachable), Instant::now());
    }

    /// Reads one node's Lease now.
    pub async fn look(&self, node: &str) -> Look {
        let lease = match tokio::time::timeout(LEASE_LOOK_TIME_MAX, self.api.get_opt(node)).await {
            Ok(Ok(lease)) => lease,
            Ok(Err(error)) => {
                tracing::debug!(node, %error, "the Lease of a node cannot be read");
                return Look::Failed;
            }
            Err(_) => return Look::Failed,
        };
        let Some(lease) = lease else {
            self.seen().remove(node);
            return Look::None;
        };
        let (version, now) = (lease.resource_version().unwrap_or_default(), Instant::now());
        let mut all = self.seen();
        let seen = all.entry(node.to_owned()).or_insert_with(|| Seen::first(version.clone(), now));
        seen.again(version, now);
        seen.renewed = lease.spec.and_then(|spec| spec.renew_time).map(|time| time.0);
        Look::Seen(seen.sight())
    }

    /// Observes a node for a while although no cluster's status names it: the node was chosen, and nothing is known about
    /// it.
    pub fn attend(&self, node: &str) {
        self.watched().attended.insert(node.to_owned(), Instant::now());
    }

    /// Waits until something that takeovers depend on has changed.
    pub async fn changed(&self) {
        self.news.notified().await;
    }

    /// Reads the Leases at intervals, indefinitely. Every replica does so, not only the leader: an operator that succeeds a
    /// leader on a lost node then already has the duration of that node's silence.
    pub async fn watch(&self, namespace: &str) {
        let (clusters, writer) = reflector::store();
        let api = Api::<DeserializeGuard<StorageCluster>>::namespaced(self.client.clone(), namespace);
        let clusters_come = watcher(api, watcher::Config::default())
            .default_backoff()
            .reflect(writer)
            .for_each(|_| std::future::ready(()));
        tokio::join!(clusters_come, self.poll(clusters));
    }

    async fn poll(&self, clusters: Store<DeserializeGuard<StorageCluster>>) {
        let mut interval = tokio::time::interval(LEASE_INTERVAL);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut reported = News::default();
        loop {
            interval.tick().await;
            let clusters = clusters.state();
            let wanted = Wanted::of(clusters.iter().filter_map(|c| c.0.as_ref().ok()));
            let news = self.round(&wanted).await;
            if news != reported {
                reported = news;
                self.news.notify_one();
            }
        }
    }

    /// Reads every Lease once.
    async fn round(&self, wanted: &Wanted) -> News {
        let mut nodes = wanted.nodes.clone();
        {
            let mut watched = self.watched();
            watched.attended.retain(|_, since| since.elapsed() < ATTENTION);
            nodes.extend(watched.attended.keys().cloned());
        }
        self.seen().retain(|node, _| nodes.contains(node));
        let looks: Vec<(String, Look)> = futures::stream::iter(nodes)
            .map(|node| async move {
                let look = self.look(&node).await;
                (node, look)
            })
            .buffer_unordered(LEASES_AT_ONCE_MAX)
            .collect()
            .await;
        let now = Instant::now();
        let all = self.seen().clone();
        let sights: BTreeMap<String, Sight> =
            all.iter().map(|(node, seen)| (node.clone(), seen.sight())).collect();
        let newest = all.values().filter_map(|seen| seen.renewed).max();
        let counts = |node: &String| all.get(node).is_some_and(|seen| !was_off(seen, newest));
        let of = |nodes: &mut dyn Iterator<Item = &String>| -> Vec<Sight> {
            nodes.filter(|node| counts(node)).filter_map(|node| sights.get(node).copied()).collect()
        };
        let failed = looks.iter().filter(|(_, look)| *look == Look::Failed).count();
        let mut watched = self.watched();
        watched.looked = Some(now);
        watched.brakes.retain(|cluster, _| wanted.clusters.contains_key(cluster));
        let trouble = (2 * failed > looks.len()).then_some(Cause::ApiServerUnreachable);
        watched.brake.saw(trouble.or_else(|| storm(Scope::All, of(&mut sights.keys()))), now);
        for (cluster, nodes) in &wanted.clusters {
            let cause = storm(Scope::Cluster, of(&mut nodes.iter()));
            watched.brakes.entry(cluster.clone()).or_default().saw(cause, now);
        }
        watched.sights.clone_from(&sights);
        drop(watched);
        let all = |is: &dyn Fn(&Sight) -> bool| {
            sights.iter().filter(|(_, sight)| is(sight)).map(|(node, _)| node.clone()).collect()
        };
        News {
            late: all(&|sight| sight.silent + LEASE_INTERVAL >= wanted.patience),
            quiet: all(&Sight::is_quiet),
            pauses: wanted.clusters.keys().map(|c| (c.clone(), self.pause(c))).collect(),
        }
    }
}

/// Whether a node was off long before the operator began to observe. Only this check uses the time stored in a Lease: clock
/// differences of minutes do no harm.
fn was_off(seen: &Seen, newest: Option<Timestamp>) -> bool {
    let (Some(newest), Some(renewed)) = (newest, seen.renewed) else { return false };
    let behind = Duration::try_from(newest.duration_since(renewed)).unwrap_or_default();
    !seen.proven && behind > LONG_OFF
}

/// The nodes to observe.
#[derive(Debug)]
struct Wanted {
    nodes: BTreeSet<String>,
    /// Of these, the nodes that can run instances of a cluster.
    clusters: BTreeMap<String, BTreeSet<String>>,
    /// The shortest relevant silence.
    patience: Duration,
}

impl Wanted {
    fn of<'c>(clusters: impl Iterator<Item = &'c StorageCluster>) -> Self {
        let mut wanted = Self { nodes: BTreeSet::new(), clusters: BTreeMap::new(), patience: Duration::MAX };
        for cluster in clusters.filter(|c| c.spec.can_move()) {
            if cluster.spec.takeover.enabled {
                wanted.patience = wanted.patience.min(cluster.spec.takeover.after());
            }
            let mut mine: BTreeSet<String> = BTreeSet::new();
            let Some(status) = &cluster.status else { continue };
            for instance in &status.instances {
                if !instance.node.is_empty() {
                    mine.insert(instance.node.clone());
                }
                // The previous node as well until its pod is gone, to determine whether the pod can still be ended.
                let before = instance.takeover.as_ref().filter(|t| t.serving.is_none()).map(|t| &t.from);
                wanted.nodes.extend(before.filter(|n| !n.is_empty()).cloned());
            }
            let spares = status.nodes.iter().filter(|n| could_serve(n) && !mine.contains(&n.name));
            let spares: Vec<String> = spares.take(SPARES_OBSERVED_MAX).map(|n| n.name.clone()).collect();
            mine.extend(spares);
            let mut others: Vec<&str> =
                status.nodes.iter().map(|n| n.name.as_str()).filter(|n| !mine.contains(*n)).collect();
            // Names of the same rack sort together, so they are sorted by hash: the witnesses come from all racks, and are
            // always the same.
            others.sort_by_cached_key(|name| scattered(name));
            wanted.nodes.extend(others.into_iter().take(WITNESSES_MAX).map(str::to_owned));
            wanted.nodes.extend(mine.iter().cloned());
            wanted.clusters.insert(cluster.name_any(), mine);
        }
        wanted
    }
}

/// Whether a node could run instances if it were alive.
fn could_serve(verdict: &NodeVerdict) -> bool {
    verdict.fits || verdict.reason == Reason::NodeNotReady.as_str()
}

fn scattered(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen_at(looks: &[(u64, &str)]) -> Duration {
        let start = Instant::now();
        let at = |seconds: &u64| start + Duration::from_secs(*seconds);
        let mut seen = Seen::first(looks[0].1.to_owned(), at(&looks[0].0));
        for (seconds, version) in looks {
            seen.again((*version).to_owned(), at(seconds));
        }
        seen.sight().silent
    }

    #[test]
    fn silence_counts_from_the_last_observed_lease_change() {
        assert_eq!(seen_at(&[(0, "1")]), Duration::ZERO);
        assert_eq!(seen_at(&[(0, "1"), (3, "1"), (6, "1")]), Duration::from_secs(6));
        assert_eq!(seen_at(&[(0, "1"), (3, "1"), (6, "2"), (9, "2")]), Duration::from_secs(3));
    }

    #[test]
    fn node_is_fresh_only_after_an_observed_lease_change() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut seen = Seen::first("1".to_owned(), at(0));
        seen.again("1".to_owned(), at(3));
        assert!(!seen.sight().is_fresh(), "it may have died before it was observed");
        seen.again("2".to_owned(), at(6));
        assert!(seen.sight().is_fresh());
        seen.again("2".to_owned(), at(6 + LEASE_GAP_MAX.as_secs() + 1));
        assert!(!seen.sight().is_fresh(), "nor without observation");
    }

    #[test]
    fn node_with_a_long_expired_lease_is_not_part_of_a_storm() {
        let newest = Timestamp::from_second(1_800_000_000).expect("a moment");
        let seen = |behind: u64, proven: bool| Seen {
            proven,
            renewed: Some(newest - Duration::from_secs(behind)),
            ..Seen::first("1".to_owned(), Instant::now())
        };
        assert!(was_off(&seen(3600, false), Some(newest)));
        assert!(!was_off(&seen(60, false), Some(newest)), "clocks differ");
        assert!(!was_off(&seen(3600, true), Some(newest)), "it was seen alive");
        assert!(!was_off(&Seen::first("1".to_owned(), Instant::now()), Some(newest)));
    }

    #[test]
    fn leases_of_spares_and_witnesses_are_observed_up_to_a_limit() {
        let nodes: Vec<serde_json::Value> = (0..100)
            .map(|n| serde_json::json!({ "name": format!("n{n:02}"), "fits": n < 30, "reason": if n < 30 { "Fits" } else { "SelectorMismatch" } }))
            .collect();
        let cluster: StorageCluster = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "a" },
            "spec": { "backends": [{ "name": "m", "kind": "NVMeoF", "nvmeof": { "paths": [], "namespaces": [] } }],
                "takeover": { "afterSeconds": 40 } },
            "status": { "instances": [{ "name": "a-0", "node": "n05" }], "nodes": nodes },
        }))
        .expect("a StorageCluster");
        let wanted = Wanted::of([&cluster].into_iter());
        let mine = &wanted.clusters["a"];
        assert!(mine.contains("n05") && mine.contains("n00") && !mine.contains("n30"), "{mine:?}");
        assert_eq!(mine.len(), 1 + SPARES_OBSERVED_MAX);
        assert_eq!(wanted.nodes.len(), 1 + SPARES_OBSERVED_MAX + WITNESSES_MAX);
        assert_eq!(wanted.patience, Duration::from_secs(40));
    }

    #[test]
    fn observation_gaps_do_not_count_as_silence() {
        let gap = LEASE_GAP_MAX.as_secs();
        assert_eq!(seen_at(&[(0, "1"), (3, "1"), (3 + gap + 1, "1")]), Duration::ZERO);
        assert_eq!(seen_at(&[(0, "1"), (gap, "1")]), Duration::from_secs(gap));
    }
}
