//! The kubelets' Leases: for how long nodes have given no sign of life.
//!
//! A Lease is judged by when it was last *seen* to change, not by the time in it, so that clocks may differ. And only time
//! in which somebody looked counts: where the API server was away nobody could renew a Lease, and nobody is lost for that.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_api::StorageCluster;
use futures::StreamExt as _;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, ResourceExt as _};
use tokio::sync::Notify;

use crate::limits::{LEASE_GAP_MAX, LEASE_INTERVAL, LEASE_LOOK_TIME_MAX, LEASES_AT_ONCE_MAX};

/// Where kubelets have theirs.
pub const NAMESPACE: &str = "kube-node-lease";

/// What was seen of one Lease.
#[derive(Clone, Debug)]
struct Seen {
    version: String,
    changed: Instant,
    looked: Instant,
}

impl Seen {
    fn first(version: String, at: Instant) -> Self {
        Self { version, changed: at, looked: at }
    }

    /// It was looked at.
    fn again(&mut self, version: String, at: Instant) {
        if version != self.version || at.saturating_duration_since(self.looked) > LEASE_GAP_MAX {
            self.changed = at;
        }
        self.version = version;
        self.looked = at;
    }

    fn silent(&self) -> Duration {
        self.looked.saturating_duration_since(self.changed)
    }
}

/// What a look at a Lease told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// It has not changed for so long.
    Silent(Duration),
    /// There is none.
    None,
    /// The API server did not tell.
    Failed,
}

/// The Leases of the nodes that instances are on which could move.
#[derive(Clone)]
pub struct Leases {
    client: Client,
    api: Api<Lease>,
    seen: Arc<Mutex<HashMap<String, Seen>>>,
    late: Arc<Notify>,
}

impl std::fmt::Debug for Leases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leases").finish_non_exhaustive()
    }
}

impl Leases {
    /// Nothing has been seen yet.
    #[must_use]
    pub fn new(client: Client) -> Self {
        let api = Api::namespaced(client.clone(), NAMESPACE);
        Self { client, api, seen: Arc::default(), late: Arc::default() }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, HashMap<String, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how long each node was silent when it was last looked at.
    #[must_use]
    pub fn silences(&self) -> BTreeMap<String, Duration> {
        self.seen().iter().map(|(node, seen)| (node.clone(), seen.silent())).collect()
    }

    /// Looks at one node's Lease now.
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
        Look::Silent(seen.silent())
    }

    /// Waits until somebody has been silent for so long that it matters.
    pub async fn late(&self) {
        self.late.notified().await;
    }

    /// Looks at intervals, for ever. Not only who works has to: who takes over from an operator whose own node was lost knows
    /// by then for how long it has been silent.
    pub async fn watch(&self, namespace: &str) {
        let (clusters, writer) = reflector::store();
        let api = Api::<StorageCluster>::namespaced(self.client.clone(), namespace);
        let clusters_come = watcher(api, watcher::Config::default())
            .default_backoff()
            .reflect(writer)
            .for_each(|_| std::future::ready(()));
        tokio::join!(clusters_come, self.poll(clusters));
    }

    async fn poll(&self, clusters: Store<StorageCluster>) {
        let mut interval = tokio::time::interval(LEASE_INTERVAL);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let (nodes, patience) = wanted(&clusters.state());
            self.seen().retain(|node, _| nodes.contains(node));
            let looks: Vec<Look> = futures::stream::iter(nodes)
                .map(|node| async move { self.look(&node).await })
                .buffer_unordered(LEASES_AT_ONCE_MAX)
                .collect()
                .await;
            let matters =
                |look: Look| matches!(look, Look::Silent(silent) if silent + LEASE_INTERVAL >= patience);
            if looks.into_iter().any(matters) {
                self.late.notify_one();
            }
        }
    }
}

/// The nodes whose Leases matter, and the least silence that does.
fn wanted(clusters: &[Arc<StorageCluster>]) -> (BTreeSet<String>, Duration) {
    let mut nodes = BTreeSet::new();
    let mut patience = Duration::MAX;
    for cluster in clusters.iter().filter(|c| c.spec.can_move()) {
        patience = patience.min(Duration::from_secs(cluster.spec.takeover.after_seconds.into()));
        for instance in cluster.status.iter().flat_map(|s| &s.instances) {
            // The node before, too, until its pod has gone: whether that can still be asked to end.
            let before = instance.takeover.as_ref().filter(|t| t.serving.is_none()).map(|t| &t.from);
            nodes.extend(before.into_iter().chain([&instance.node]).filter(|n| !n.is_empty()).cloned());
        }
    }
    (nodes, patience)
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
        seen.silent()
    }

    #[test]
    fn silence_counts_from_the_last_change_that_was_seen() {
        assert_eq!(seen_at(&[(0, "1")]), Duration::ZERO);
        assert_eq!(seen_at(&[(0, "1"), (3, "1"), (6, "1")]), Duration::from_secs(6));
        assert_eq!(seen_at(&[(0, "1"), (3, "1"), (6, "2"), (9, "2")]), Duration::from_secs(3));
    }

    #[test]
    fn time_in_which_nobody_looked_does_not_count() {
        let gap = LEASE_GAP_MAX.as_secs();
        assert_eq!(seen_at(&[(0, "1"), (3, "1"), (3 + gap + 1, "1")]), Duration::ZERO);
        assert_eq!(seen_at(&[(0, "1"), (gap, "1")]), Duration::from_secs(gap));
    }
}
