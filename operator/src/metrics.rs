//! Metrics of the operator, for Prometheus.

use std::sync::atomic::AtomicU64;

use forebay_api::cluster::{InstancePhase, InstanceStatus};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// Labels of a reconciliation.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Reconciled {
    /// Name of the StorageCluster.
    pub cluster: String,
    /// `done` or `failed`.
    pub result: &'static str,
}

/// Labels of instances.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Instances {
    /// Name of the StorageCluster.
    pub cluster: String,
    /// Their phase.
    pub phase: &'static str,
}

/// Labels of writes to the API server.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Written {
    /// Kind of the object.
    pub kind: String,
    /// `apply`, `delete` or `status`.
    pub verb: &'static str,
}

/// Labels of moves of instances to other nodes.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Moved {
    /// Name of the StorageCluster.
    pub cluster: String,
    /// Why, in CamelCase.
    pub reason: String,
}

/// Labels of errors of watches.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Watched {
    /// What is watched: `nodes`, `storagenodes`, or `controller` for everything that belongs to StorageClusters.
    pub watch: &'static str,
}

/// Labels of what is reported of a cluster.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct OfCluster {
    /// Name of the StorageCluster.
    pub cluster: String,
}

/// All metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Reconciliations.
    pub reconciles: Family<Reconciled, Counter>,
    /// How long they took.
    pub duration: Histogram,
    /// Instances by phase.
    pub instances: Family<Instances, Gauge>,
    /// Writes to the API server.
    pub writes: Family<Written, Counter>,
    /// Pods deleted for a rollout.
    pub restarts: Counter,
    /// Instances that went to other nodes.
    pub takeovers: Family<Moved, Counter>,
    /// Seconds from the decision until the instance served again.
    pub takeover_duration: Histogram,
    /// Whether this process is the one that works.
    pub leader: Gauge<f64, AtomicU64>,
    /// Errors of watches.
    pub watch_errors: Family<Watched, Counter>,
    /// When a reconciliation last ended well, seconds since 1970.
    pub last_pass: Gauge<f64, AtomicU64>,
    /// StorageClusters that cannot be read.
    pub unreadable: Gauge,
    /// Whether takeovers of a cluster pause.
    pub takeover_paused: Family<OfCluster, Gauge>,
    /// Whether the loop has stalled.
    pub stalled: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("forebay_operator");
        let reconciles = Family::default();
        let duration = Histogram::new(exponential_buckets(0.005, 2.0, 14));
        let instances = Family::default();
        let writes = Family::default();
        let restarts = Counter::default();
        let takeovers = Family::default();
        let takeover_duration = Histogram::new(exponential_buckets(1.0, 2.0, 10));
        let leader = Gauge::default();
        let watch_errors = Family::default();
        let last_pass = Gauge::default();
        let unreadable = Gauge::default();
        let takeover_paused = Family::default();
        let stalled = Gauge::default();
        registry.register("reconciles", "Reconciliations of StorageClusters", reconciles.clone());
        registry.register_with_unit(
            "reconcile_duration",
            "Time of a reconciliation",
            Unit::Seconds,
            duration.clone(),
        );
        registry.register("instances", "Instances by phase", instances.clone());
        registry.register("api_writes", "Writes to the API server", writes.clone());
        registry.register("restarts", "Pods deleted for a rollout", restarts.clone());
        registry.register("takeovers", "Instances that went to another node", takeovers.clone());
        registry.register_with_unit(
            "takeover_duration",
            "Time from the decision that an instance goes to another node until it serves there",
            Unit::Seconds,
            takeover_duration.clone(),
        );
        registry.register("leader", "1 where this process holds the Lease", leader.clone());
        registry.register(
            "watch_errors",
            "Errors of watches, and of what follows them",
            watch_errors.clone(),
        );
        registry.register_with_unit(
            "last_pass_timestamp",
            "When a reconciliation last ended well",
            Unit::Seconds,
            last_pass.clone(),
        );
        registry.register("unreadable_clusters", "StorageClusters that cannot be read", unreadable.clone());
        registry.register("takeover_paused", "1 where takeovers of a cluster pause", takeover_paused.clone());
        registry.register("stalled", "1 where the loop does not go on, as /healthz says", stalled.clone());
        Self {
            registry,
            reconciles,
            duration,
            instances,
            writes,
            restarts,
            takeovers,
            takeover_duration,
            leader,
            watch_errors,
            last_pass,
            unreadable,
            takeover_paused,
            stalled,
        }
    }
}

impl Metrics {
    /// As Prometheus reads them.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string cannot fail");
        text
    }

    /// How often a cluster was reconciled.
    #[must_use]
    pub fn reconciled(&self, cluster: &str) -> u64 {
        ["done", "failed"]
            .map(|result| {
                self.reconciles.get_or_create(&Reconciled { cluster: cluster.to_owned(), result }).get()
            })
            .iter()
            .sum()
    }

    /// Takes over the phases of a cluster's instances.
    pub fn set_instances(&self, cluster: &str, instances: &[InstanceStatus]) {
        use InstancePhase::{Draining, NotReady, Pending, Ready, Removing, Starting};
        for (phase, name) in [
            (Pending, "Pending"),
            (Starting, "Starting"),
            (Ready, "Ready"),
            (Draining, "Draining"),
            (NotReady, "NotReady"),
            (Removing, "Removing"),
        ] {
            let count = instances.iter().filter(|i| i.phase == phase).count();
            let labels = Instances { cluster: cluster.to_owned(), phase: name };
            self.instances.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Drops what is reported of a cluster that is gone.
    pub fn forget(&self, cluster: &str) {
        for phase in ["Pending", "Starting", "Ready", "Draining", "NotReady", "Removing"] {
            self.instances.remove(&Instances { cluster: cluster.to_owned(), phase });
        }
        self.takeover_paused.remove(&OfCluster { cluster: cluster.to_owned() });
        for result in ["done", "failed"] {
            self.reconciles.remove(&Reconciled { cluster: cluster.to_owned(), result });
        }
    }
}
