//! Metrics of the operator, for Prometheus.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_api::cluster::{InstancePhase, InstanceStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::certificates::Term;

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
    /// `apply`, `patch`, `record`, `create`, `update`, `delete` or `status`.
    pub verb: &'static str,
}

/// Labels of moves of instances to other nodes.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Moved {
    /// Name of the StorageCluster.
    pub cluster: String,
    /// The reason in CamelCase.
    pub reason: String,
}

/// Labels of watch errors.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Watched {
    /// What is watched: `nodes`, `storagenodes`, or `controller` for everything that belongs to StorageClusters.
    pub watch: &'static str,
}

/// Labels of metrics about a cluster.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct OfCluster {
    /// Name of the StorageCluster.
    pub cluster: String,
}

/// Labels of a condition.
#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
pub struct OfCondition {
    /// Name of the StorageCluster.
    pub cluster: String,
    /// Its type, such as `Ready`.
    pub condition: String,
    /// `True`, `False` or `Unknown`.
    pub status: &'static str,
}

/// Labels of a certificate.
#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
pub struct OfCertificate {
    /// Name of the StorageCluster.
    pub cluster: String,
    /// Name of its Secret.
    pub secret: String,
}

/// The statuses that a condition can have.
const STATUSES: [&str; 3] = ["True", "False", "Unknown"];

/// Reported metrics of clusters with labels beyond the cluster's name, kept so that obsolete ones can be removed.
#[derive(Debug, Default)]
struct Reported {
    conditions: BTreeSet<OfCondition>,
    certificates: BTreeSet<OfCertificate>,
}

/// All metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Reconciliations.
    pub reconciles: Family<Reconciled, Counter>,
    /// Duration of reconciliations.
    pub duration: Histogram,
    /// Instances by phase.
    pub instances: Family<Instances, Gauge>,
    /// Writes to the API server.
    pub writes: Family<Written, Counter>,
    /// Pods deleted for a rollout.
    pub restarts: Counter,
    /// Instances that moved to other nodes.
    pub takeovers: Family<Moved, Counter>,
    /// Seconds from the decision until the instance served again.
    pub takeover_duration: Histogram,
    /// Whether this process is the leader.
    pub leader: Gauge<f64, AtomicU64>,
    /// Watch errors.
    pub watch_errors: Family<Watched, Counter>,
    /// When a reconciliation last succeeded, in seconds since 1970.
    pub last_pass: Gauge<f64, AtomicU64>,
    /// StorageClusters that cannot be read.
    pub unreadable: Gauge,
    /// Whether takeovers of a cluster pause.
    pub takeover_paused: Family<OfCluster, Gauge>,
    /// Whether the loop has stalled.
    pub stalled: Gauge,
    conditions: Family<OfCondition, Gauge>,
    certificate_ends: Family<OfCertificate, Gauge<f64, AtomicU64>>,
    certificate_renewals: Family<OfCertificate, Gauge<f64, AtomicU64>>,
    reported: Mutex<Reported>,
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
        let conditions = Family::default();
        let certificate_ends = Family::default();
        let certificate_renewals = Family::default();
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
        registry.register("takeovers", "Instances that moved to another node", takeovers.clone());
        registry.register_with_unit(
            "takeover_duration",
            "Time from the decision to move an instance to another node until it serves there",
            Unit::Seconds,
            takeover_duration.clone(),
        );
        registry.register("leader", "1 if this process holds the Lease", leader.clone());
        registry.register("watch_errors", "Errors of watches and of their consumers", watch_errors.clone());
        registry.register_with_unit(
            "last_pass_timestamp",
            "When a reconciliation last succeeded",
            Unit::Seconds,
            last_pass.clone(),
        );
        registry.register("unreadable_clusters", "StorageClusters that cannot be read", unreadable.clone());
        registry.register(
            "takeover_paused",
            "1 if takeovers of a cluster are paused",
            takeover_paused.clone(),
        );
        registry.register(
            "stalled",
            "1 if the control loop has stalled, as /healthz reports",
            stalled.clone(),
        );
        registry.register(
            "condition",
            "1 for the status that a condition of a StorageCluster has, 0 for the other two",
            conditions.clone(),
        );
        registry.register_with_unit(
            "certificate_expiry_timestamp",
            "When a certificate of the admin API expires",
            Unit::Seconds,
            certificate_ends.clone(),
        );
        registry.register_with_unit(
            "certificate_renewal_timestamp",
            "When a certificate of the admin API is to be replaced",
            Unit::Seconds,
            certificate_renewals.clone(),
        );
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
            conditions,
            certificate_ends,
            certificate_renewals,
            reported: Mutex::default(),
        }
    }
}

impl Metrics {
    /// Returns the metrics in the format that Prometheus reads.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string cannot fail");
        text
    }

    /// Returns how often a cluster was reconciled.
    #[must_use]
    pub fn reconciled(&self, cluster: &str) -> u64 {
        ["done", "failed"]
            .map(|result| {
                self.reconciles.get_or_create(&Reconciled { cluster: cluster.to_owned(), result }).get()
            })
            .iter()
            .sum()
    }

    /// Sets the phases of a cluster's instances.
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

    fn reported(&self) -> MutexGuard<'_, Reported> {
        // Every change leaves it consistent.
        self.reported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets a cluster's conditions in place of the previous ones.
    pub fn set_conditions(&self, cluster: &str, conditions: &[Condition]) {
        let labels = |condition: &Condition, status| OfCondition {
            cluster: cluster.to_owned(),
            condition: condition.type_.clone(),
            status,
        };
        let mut reported = self.reported();
        let now: BTreeSet<OfCondition> =
            conditions.iter().flat_map(|c| STATUSES.map(|status| labels(c, status))).collect();
        let over = reported.conditions.iter().filter(|l| l.cluster == cluster && !now.contains(*l));
        for labels in over {
            self.conditions.remove(labels);
        }
        for condition in conditions {
            for status in STATUSES {
                let labels = labels(condition, status);
                self.conditions.get_or_create(&labels).set(i64::from(condition.status == status));
            }
        }
        reported.conditions.retain(|labels| labels.cluster != cluster);
        reported.conditions.extend(now);
    }

    /// Sets the expiry and renewal times of a cluster's certificates in place of the previous ones.
    pub fn set_certificates(&self, cluster: &str, certificates: &[Term]) {
        let labels = |term: &Term| OfCertificate { cluster: cluster.to_owned(), secret: term.secret.clone() };
        let mut reported = self.reported();
        let now: BTreeSet<OfCertificate> = certificates.iter().map(labels).collect();
        for labels in reported.certificates.iter().filter(|l| l.cluster == cluster && !now.contains(*l)) {
            self.certificate_ends.remove(labels);
            self.certificate_renewals.remove(labels);
        }
        for term in certificates {
            let labels = labels(term);
            self.certificate_ends.get_or_create(&labels).set(term.end.as_second() as f64);
            self.certificate_renewals.get_or_create(&labels).set(term.renewal.as_second() as f64);
        }
        reported.certificates.retain(|labels| labels.cluster != cluster);
        reported.certificates.extend(now);
    }

    /// Removes the metrics of a deleted cluster.
    pub fn forget(&self, cluster: &str) {
        self.set_conditions(cluster, &[]);
        self.set_certificates(cluster, &[]);
        for phase in ["Pending", "Starting", "Ready", "Draining", "NotReady", "Removing"] {
            self.instances.remove(&Instances { cluster: cluster.to_owned(), phase });
        }
        self.takeover_paused.remove(&OfCluster { cluster: cluster.to_owned() });
        for result in ["done", "failed"] {
            self.reconciles.remove(&Reconciled { cluster: cluster.to_owned(), result });
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    fn condition(type_: &str, status: &str) -> Condition {
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: "Reason".to_owned(),
            message: String::new(),
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
            observed_generation: None,
        }
    }

    fn term(secret: &str) -> Term {
        let at = |second| Timestamp::from_second(second).expect("in range");
        Term { secret: secret.to_owned(), end: at(200), renewal: at(100) }
    }

    /// Returns the lines about conditions and certificates, without the comments.
    fn shown(metrics: &Metrics) -> Vec<String> {
        let text = metrics.text();
        let is_one = |line: &&str| {
            ["forebay_operator_condition{", "forebay_operator_certificate_"]
                .iter()
                .any(|p| line.starts_with(p))
        };
        text.lines().filter(is_one).map(str::to_owned).collect()
    }

    #[test]
    fn condition_and_certificate_metrics_drop_outdated_series() {
        let metrics = Metrics::default();
        metrics.set_conditions("a", &[condition("Ready", "True"), condition("Deletable", "False")]);
        metrics.set_conditions("b", &[condition("Ready", "Unknown")]);
        metrics.set_certificates("a", &[term("a-ca"), term("a-0-tls")]);
        assert_eq!(shown(&metrics).len(), 9 + 4);
        metrics.set_conditions("a", &[condition("Ready", "False")]);
        metrics.set_certificates("a", &[term("a-ca")]);
        let mut lines = shown(&metrics);
        lines.sort();
        let ready = "forebay_operator_condition{cluster=";
        let certificate = "forebay_operator_certificate_";
        assert_eq!(
            lines,
            [
                format!("{certificate}expiry_timestamp_seconds{{cluster=\"a\",secret=\"a-ca\"}} 200.0"),
                format!("{certificate}renewal_timestamp_seconds{{cluster=\"a\",secret=\"a-ca\"}} 100.0"),
                format!("{ready}\"a\",condition=\"Ready\",status=\"False\"}} 1"),
                format!("{ready}\"a\",condition=\"Ready\",status=\"True\"}} 0"),
                format!("{ready}\"a\",condition=\"Ready\",status=\"Unknown\"}} 0"),
                format!("{ready}\"b\",condition=\"Ready\",status=\"False\"}} 0"),
                format!("{ready}\"b\",condition=\"Ready\",status=\"True\"}} 0"),
                format!("{ready}\"b\",condition=\"Ready\",status=\"Unknown\"}} 1"),
            ]
        );
        metrics.forget("a");
        metrics.forget("b");
        assert_eq!(shown(&metrics), Vec::<String>::new());
    }
}
