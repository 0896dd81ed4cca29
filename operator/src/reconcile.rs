//! Observes, applies the difference between the observed and the desired state, and reports.

mod apply;
mod certify;
mod difference;
mod moves;
mod publish;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_api::cluster::StorageCluster;
use forebay_api::names;
use forebay_api::node::StorageNode;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::DeserializeGuard;
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, Resource as _, ResourceExt as _};
use serde_json::json;

use self::apply::execute;
use self::certify::{certify, forget_credentials};
use self::publish::{publish, tell, tell_failed_destruction, tell_refusal};
use crate::admin::Admin;
use crate::certificates;
use crate::desired::{self, CertificatesState, PodDeletion, Settings};
use crate::events::Notice;
use crate::leader::Tenure;
use crate::leases::Leases;
use crate::limits::{BACKOFF_FIRST, BACKOFF_MAX, RECONCILE_TIME_MAX, SOON, UNREADABLE_RESYNC};
use crate::metrics::{Metrics, Reconciled};
use crate::observe::{self, observe};
use crate::progress::Progress;
use crate::reports::Reports;
use crate::teller::Teller;

/// Why a reconciliation failed. It is retried with growing delays.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// A request to the API server failed.
    #[error("the API server: {0}")]
    Kube(#[from] kube::Error),
    /// A certificate could not be made.
    #[error(transparent)]
    Certificates(#[from] certificates::CertificateError),
    /// The API server rejected an object.
    #[error("{0}")]
    Refused(String),
    /// It took too long.
    #[error("the reconciliation took longer than {} s", RECONCILE_TIME_MAX.as_secs())]
    Time,
    /// The lists that every decision depends on have not arrived.
    #[error(
        "nodes and StorageNodes have not been listed yet: the operator may lack permissions, or a CustomResourceDefinition is missing"
    )]
    NotListed,
    /// Another replica may be working by now.
    #[error("the Lease was not renewed in time, so another replica may be active: nothing is written")]
    NotLeading,
    /// An object could not be parsed.
    #[error("an object cannot be parsed: {0}")]
    Object(#[from] serde_json::Error),
}

/// A StorageCluster, or why it cannot be read. One that only an older definition accepted must not block the others.
pub type Guarded = DeserializeGuard<StorageCluster>;

/// State shared by all reconciliations.
pub struct Context {
    /// The API server.
    pub client: Client,
    /// The operator's settings.
    pub settings: Settings,
    /// Nodes, from a watch.
    pub nodes: Store<Node>,
    /// StorageNodes, from a watch.
    pub storage_nodes: Store<DeserializeGuard<StorageNode>>,
    /// StorageClusters, from a watch.
    pub clusters: Store<Guarded>,
    /// Reports of the instances.
    pub reports: Reports,
    /// The kubelets' Leases.
    pub leases: Leases,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Events.
    pub teller: Teller,
    /// Whether this replica is the leader.
    pub tenure: Tenure,
    /// Progress of the loop.
    pub progress: Arc<Progress>,
    /// Consecutive failures.
    pub failures: Mutex<HashMap<ObjectRef<StorageCluster>, u32>>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Runs one reconciliation with a time limit, and counts it.
///
/// # Errors
///
/// Any failure; [`error_policy`] determines when it is retried.
pub async fn reconcile(guarded: Arc<Guarded>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let name = guarded.name_any();
    let cluster = match &guarded.0 {
        Ok(cluster) => cluster,
        Err(error) => {
            tracing::error!(cluster = name, error = error.error, "a StorageCluster cannot be read");
            let note = format!(
                "the operator cannot read this StorageCluster, so it does not reconcile it: {}",
                error.error
            );
            let notice = Notice { warning: true, reason: "Unreadable", note, instance: None };
            context.teller.tell(&context.settings.namespace, &guarded.object_ref(&()), &notice).await;
            context.progress.passed(&name, Instant::now());
            return Ok(Action::requeue(UNREADABLE_RESYNC));
        }
    };
    let start = Instant::now();
    let reference = ObjectRef::from_obj(cluster);
    let result = match tokio::time::timeout(RECONCILE_TIME_MAX, Box::pin(one(cluster, &context))).await {
        Ok(result) => result,
        Err(_) => Err(ReconcileError::Time),
    };
    context.metrics.duration.observe(start.elapsed().as_secs_f64());
    context.count(cluster, &reference, result.as_ref().map(Option::is_none));
    context.progress.passed(&name, Instant::now());
    result.map(|again| again.map_or_else(Action::await_change, Action::requeue))
}

impl Context {
    /// Refuses to write if another replica may be working by now: this decision may be older than what that replica has
    /// written, and objects are applied without the resource version with which they were read. A replica that is suspended
    /// between this check and the write is not caught.
    fn still_leads(&self) -> Result<(), ReconcileError> {
        if self.tenure.lasts() { Ok(()) } else { Err(ReconcileError::NotLeading) }
    }

    /// Counts the outcome of a reconciliation.
    fn count(
        &self,
        cluster: &StorageCluster,
        reference: &ObjectRef<StorageCluster>,
        gone: Result<bool, &ReconcileError>,
    ) {
        let name = cluster.name_any();
        let outcome = if gone.is_ok() { "done" } else { "failed" };
        self.metrics.reconciles.get_or_create(&Reconciled { cluster: name.clone(), result: outcome }).inc();
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        match gone {
            Ok(gone) => {
                failures.remove(reference);
                drop(failures);
                self.metrics.last_pass.set(Timestamp::now().as_second() as f64);
                if gone {
                    self.reports.forget(reference);
                    self.metrics.forget(&name);
                    self.teller.forget(&name);
                }
            }
            Err(error) => {
                *failures.entry(reference.clone()).or_default() += 1;
                tracing::warn!(cluster = name, %error, "reconciliation failed");
            }
        }
    }

    /// Counts a reconciliation that could not begin.
    #[must_use]
    pub fn not_begun(&self, guarded: &Guarded, error: ReconcileError) -> ReconcileError {
        if let Ok(cluster) = &guarded.0 {
            self.count(cluster, &ObjectRef::from_obj(cluster), Err(&error));
        }
        error
    }
}

/// Returns when to retry: with a delay that grows with every failure, spread slightly by the cluster's name.
#[must_use]
pub fn error_policy(guarded: Arc<Guarded>, _: &ReconcileError, context: Arc<Context>) -> Action {
    let failures = context.failures.lock().unwrap_or_else(PoisonError::into_inner);
    let reference = guarded.0.as_ref().ok().map(ObjectRef::from_obj);
    let count = reference.and_then(|reference| failures.get(&reference).copied()).unwrap_or(1);
    Action::requeue(backoff(count, &guarded.name_any()))
}

/// Returns the delay after this number of consecutive failures.
#[must_use]
pub fn backoff(failures: u32, name: &str) -> Duration {
    let delay = BACKOFF_FIRST.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(BACKOFF_MAX);
    let spread = name.bytes().fold(0_u32, |sum, b| sum.wrapping_mul(31).wrapping_add(b.into())) % 25;
    delay + delay * spread / 100
}

/// Runs one reconciliation. Returns `None` if the cluster is gone.
async fn one(seen: &StorageCluster, context: &Context) -> Result<Option<Duration>, ReconcileError> {
    let namespace = &context.settings.namespace;
    let api: Api<StorageCluster> = Api::namespaced(context.client.clone(), namespace);
    // The watch may lag behind the operator's own last status.
    let Some(cluster) = api.get_opt(&seen.name_any()).await? else { return Ok(None) };
    let has_finalizer = cluster.finalizers().iter().any(|f| f == names::FINALIZER_CLUSTER);
    let deleting = cluster.metadata.deletion_timestamp.is_some();
    if deleting && !has_finalizer {
        return Ok(None);
    }
    if !deleting && !has_finalizer {
        set_finalizer(&api, &cluster, true).await?;
        // The watch reports the change. Continuing now would work on an old version.
        return Ok(Some(crate::limits::WAIT));
    }
    let mut observed = observe(context, &cluster).await?;
    let servers = desired::certificates(&cluster, &context.settings, &observed);
    context.still_leads()?;
    // Unused certificates are removed and not made again.
    let over = deleting && observed.stateful_sets.is_empty() && observed.pods.is_empty();
    let (certificates, identity) = if over {
        (CertificatesState::default(), None)
    } else {
        certify(context, &cluster, &servers, observed.now).await?
    };
    context.metrics.set_certificates(&cluster.name_any(), &certificates.terms);
    observed.certificates = certificates;
    let visits = observe::visits(&cluster, namespace, &observed, &servers, identity.as_ref());
    let visited = visits.clone();
    observed.reports = context.reports.of(&ObjectRef::from_obj(&cluster), visits).await;
    let mut desired = desired::desired(&cluster, &context.settings, &observed);
    context.still_leads()?;
    if !desired.moves.is_empty() {
        return moves::record(context, &cluster, &observed, &desired.moves).await.map(Some);
    }
    let refusals = execute(context, &cluster, &observed, &desired).await;
    context.still_leads()?;
    if let Some(refusal) = refusals.first() {
        tell_refusal(&mut desired.status, &cluster, &refusals.join("; "), observed.now);
        tracing::warn!(cluster = cluster.name_any(), refusal, "the API server refused an object");
    }
    let mut failed = refusals.clone();
    for instance in &desired.destroy_volumes {
        if let Some(visit) = visited.get(instance) {
            let destroyed = match Admin::connect(visit.endpoint, &visit.server_name, &visit.identity).await {
                Ok(mut admin) => admin.destroy_volumes().await,
                Err(error) => Err(error),
            };
            match destroyed {
                Ok(count) => {
                    tracing::info!(
                        instance,
                        count,
                        "volumes and snapshots destroyed according to spec.deletionPolicy"
                    )
                }
                Err(error) => failed.push(format!("volumes of {instance} cannot be destroyed: {error}")),
            }
        }
    }
    if failed.len() > refusals.len() {
        tell_failed_destruction(&mut desired.status, &failed[refusals.len()..].join("; "));
    }
    if !publish(context, &api, &cluster, &desired).await? {
        return Ok(Some(SOON));
    }
    for pod in desired.end.iter().filter(|_| refusals.is_empty()) {
        delete_pod(context, &cluster, pod, "EndingOldEpoch").await?;
    }
    if let Some(restart) = &desired.restart
        && refusals.is_empty()
    {
        delete_pod(context, &cluster, restart, "Restarting").await?;
    }
    // The finalizer stays for as long as anything is left, because nothing else would remove it.
    if desired.release && failed.is_empty() {
        if desired.forget_credentials {
            forget_credentials(context, &cluster).await?;
        }
        // The operator's own last status may have changed the version: then the next reconciliation has nothing to report,
        // and removes the finalizer.
        return match set_finalizer(&api, &cluster, false).await {
            Err(ReconcileError::Kube(kube::Error::Api(status))) if status.code == 409 => Ok(Some(SOON)),
            Err(error) => Err(error),
            Ok(()) => {
                tracing::info!(cluster = cluster.name_any(), "gone");
                Ok(None)
            }
        };
    }
    if !failed.is_empty() {
        return Err(ReconcileError::Refused(failed.join("; ")));
    }
    Ok(Some(desired.again))
}

async fn set_finalizer(
    api: &Api<StorageCluster>,
    cluster: &StorageCluster,
    wanted: bool,
) -> Result<(), ReconcileError> {
    let mut finalizers = cluster.finalizers().to_vec();
    finalizers.retain(|f| f != names::FINALIZER_CLUSTER);
    if wanted {
        finalizers.push(names::FINALIZER_CLUSTER.to_owned());
    }
    // Includes the resource version, so that a finalizer that another client has added in between is not lost.
    let patch =
        json!({ "metadata": { "finalizers": finalizers, "resourceVersion": cluster.resource_version() } });
    match api.patch(&cluster.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await {
        Err(kube::Error::Api(status)) if status.code == 404 && !wanted => Ok(()),
        other => Ok(other.map(|_| ())?),
    }
}

async fn delete_pod(
    context: &Context,
    cluster: &StorageCluster,
    restart: &PodDeletion,
    reason: &'static str,
) -> Result<(), ReconcileError> {
    let api: Api<k8s_openapi::api::core::v1::Pod> =
        Api::namespaced(context.client.clone(), &context.settings.namespace);
    let uid = Preconditions { uid: Some(restart.uid.clone()), resource_version: None };
    let mut parameters = DeleteParams::default().preconditions(uid);
    if restart.force {
        parameters = parameters.grace_period(0);
    }
    match api.delete(&restart.name, &parameters).await {
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return Ok(()),
        other => other?,
    };
    if reason == "Restarting" {
        context.metrics.restarts.inc();
    }
    tracing::info!(pod = restart.name, why = restart.why, force = restart.force, "pod deleted");
    let instance = Some(restart.instance.clone());
    let notice = Notice { warning: false, reason, note: restart.why.clone(), instance };
    tell(context, cluster, &notice).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_grows_up_to_its_maximum() {
        let delays: Vec<Duration> = (1..40).map(|n| backoff(n, "a")).collect();
        assert!(delays.windows(2).all(|w| w[0] <= w[1]));
        assert!(delays[0] < Duration::from_secs(1));
        assert!(*delays.last().expect("some") <= BACKOFF_MAX + BACKOFF_MAX / 4);
    }
}
