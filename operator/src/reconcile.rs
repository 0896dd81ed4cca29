//! Looks, applies the difference between what is and what ought to be, and tells.

mod moves;

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_api::cluster::{StorageCluster, StorageClusterStatus};
use forebay_api::node::StorageNode;
use forebay_api::{GROUP, VERSION, names};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Node, Secret};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{ApiResource, DeserializeGuard, GroupVersionKind};
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, Resource as _, ResourceExt as _};
use serde_json::{Value, json};

use crate::admin::{Admin, Identity};
use crate::certificates::{self, Authority, AuthorityStep, Due, Leaf, Rule};
use crate::desired::objects::{self, ANNOTATION_APPLIED, FIELD_MANAGER, hash, labels};
use crate::desired::rules;
use crate::desired::{self, CertificatesState, Desired, Observed, PodDeletion, Settings, Target, status};
use crate::events::{Notice, notices};
use crate::leader::Tenure;
use crate::leases::Leases;
use crate::limits::{BACKOFF_FIRST, BACKOFF_MAX, RECONCILE_TIME_MAX, SOON, UNREADABLE_RESYNC};
use crate::metrics::{Metrics, OfCluster, Reconciled, Written};
use crate::observe::{self, observe};
use crate::progress::Progress;
use crate::reports::Reports;
use crate::teller::Teller;

/// Why a reconciliation did not end well. It is tried again, later and later.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// The API server.
    #[error("the API server: {0}")]
    Kube(#[from] kube::Error),
    /// Certificates.
    #[error(transparent)]
    Certificates(#[from] certificates::CertificateError),
    /// An object was refused.
    #[error("{0}")]
    Refused(String),
    /// It took too long.
    #[error("the reconciliation took longer than {} s", RECONCILE_TIME_MAX.as_secs())]
    Time,
    /// What everything is decided by has not come.
    #[error(
        "nodes and StorageNodes have not been listed yet: the operator may lack rights, or a definition is missing"
    )]
    NotListed,
    /// Another replica may work by now.
    #[error(
        "the Lease has not been renewed in time, so that another replica may work by now: nothing is written"
    )]
    NotLeading,
    /// What was read makes no sense.
    #[error("an object is not what it ought to be: {0}")]
    Object(#[from] serde_json::Error),
}

/// A StorageCluster, or why it cannot be read: one that an older definition let through must not keep the others from being seen to.
pub type Guarded = DeserializeGuard<StorageCluster>;

/// What all reconciliations share.
pub struct Context {
    /// The API server.
    pub client: Client,
    /// How the operator was started.
    pub settings: Settings,
    /// Nodes, as watched.
    pub nodes: Store<Node>,
    /// StorageNodes, as watched.
    pub storage_nodes: Store<DeserializeGuard<StorageNode>>,
    /// StorageClusters, as watched.
    pub clusters: Store<Guarded>,
    /// What the instances reported.
    pub reports: Reports,
    /// The kubelets' signs of life.
    pub leases: Leases,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Events.
    pub teller: Teller,
    /// Whether this replica is the one that works.
    pub tenure: Tenure,
    /// Whether the loop goes on.
    pub progress: Arc<Progress>,
    /// Failures in a row.
    pub failures: Mutex<HashMap<ObjectRef<StorageCluster>, u32>>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// One reconciliation, bounded in time, counted.
///
/// # Errors
///
/// Whatever went wrong; [`error_policy`] says when it is tried again.
pub async fn reconcile(guarded: Arc<Guarded>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let name = guarded.name_any();
    let cluster = match &guarded.0 {
        Ok(cluster) => cluster,
        Err(error) => {
            tracing::error!(cluster = name, error = error.error, "a StorageCluster cannot be read");
            let note = format!(
                "the operator cannot read this StorageCluster, so nothing of it is seen to: {}",
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
    /// Refuses to write where another replica may work by now: what was decided here may be older than what that one has written, and
    /// objects are applied without the version that they were read with. A replica that is stopped just between this and the write is not
    /// caught.
    fn still_leads(&self) -> Result<(), ReconcileError> {
        if self.tenure.lasts() { Ok(()) } else { Err(ReconcileError::NotLeading) }
    }

    /// Counts how a reconciliation ended.
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

    /// Counts a reconciliation that could not even begin.
    #[must_use]
    pub fn not_begun(&self, guarded: &Guarded, error: ReconcileError) -> ReconcileError {
        if let Ok(cluster) = &guarded.0 {
            self.count(cluster, &ObjectRef::from_obj(cluster), Err(&error));
        }
        error
    }
}

/// When to try again: later after every failure, spread a little by the cluster's name.
#[must_use]
pub fn error_policy(guarded: Arc<Guarded>, _: &ReconcileError, context: Arc<Context>) -> Action {
    let failures = context.failures.lock().unwrap_or_else(PoisonError::into_inner);
    let reference = guarded.0.as_ref().ok().map(ObjectRef::from_obj);
    let count = reference.and_then(|reference| failures.get(&reference).copied()).unwrap_or(1);
    Action::requeue(backoff(count, &guarded.name_any()))
}

/// The delay after so many failures in a row.
#[must_use]
pub fn backoff(failures: u32, name: &str) -> Duration {
    let delay = BACKOFF_FIRST.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(BACKOFF_MAX);
    let spread = name.bytes().fold(0_u32, |sum, b| sum.wrapping_mul(31).wrapping_add(b.into())) % 25;
    delay + delay * spread / 100
}

/// `None`: the cluster is gone.
async fn one(seen: &StorageCluster, context: &Context) -> Result<Option<Duration>, ReconcileError> {
    let namespace = &context.settings.namespace;
    let api: Api<StorageCluster> = Api::namespaced(context.client.clone(), namespace);
    // The watch may be behind our own last status.
    let Some(cluster) = api.get_opt(&seen.name_any()).await? else { return Ok(None) };
    let has_finalizer = cluster.finalizers().iter().any(|f| f == names::FINALIZER_CLUSTER);
    let deleting = cluster.metadata.deletion_timestamp.is_some();
    if deleting && !has_finalizer {
        return Ok(None);
    }
    if !deleting && !has_finalizer {
        set_finalizer(&api, &cluster, true).await?;
        // The change comes back by the watch; doing the rest now would work on an old version.
        return Ok(Some(crate::limits::WAIT));
    }
    let mut observed = observe(context, &cluster).await?;
    let servers = desired::certificates(&cluster, &context.settings, &observed);
    context.still_leads()?;
    // Without users they go, and are not made again.
    let over = deleting && observed.stateful_sets.is_empty() && observed.pods.is_empty();
    let (certificates, identity) = if over {
        (CertificatesState::default(), None)
    } else {
        certify(context, &cluster, &servers, observed.now).await?
    };
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
                    tracing::info!(instance, count, "volumes destroyed, as spec.deletionPolicy says")
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
    // The finalizer stays for as long as anything is left: nothing else would remove it.
    if desired.release && failed.is_empty() {
        if desired.forget_credentials {
            forget_credentials(context, &cluster).await?;
        }
        // Our own last status may have made another version of it: then the next look finds nothing to tell, and lets go.
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
    // With the version: somebody else's finalizer that came in between is not lost.
    let patch =
        json!({ "metadata": { "finalizers": finalizers, "resourceVersion": cluster.resource_version() } });
    match api.patch(&cluster.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await {
        Err(kube::Error::Api(status)) if status.code == 404 && !wanted => Ok(()),
        other => Ok(other.map(|_| ())?),
    }
}

/// The kinds that the operator handles: group, version, plural, and whether they are of a namespace.
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

/// Removes and applies. What the API server refuses is reported; one refusal does not keep the rest from being done. Stops where another
/// replica may work by now.
async fn execute(
    context: &Context,
    cluster: &StorageCluster,
    observed: &Observed,
    desired: &Desired,
) -> Vec<String> {
    let mut refusals = Vec::new();
    // Before their servers go: whoever takes over between the two must not wait for servers that are gone.
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

/// Takes keys out of the record of nodes, whoever has put them there.
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
        // Gone, or another of that name by now.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        other => other.map(|_| ()),
    }
}

/// Whether everything wanted is found, whatever else there is. Lists must have the same length: the API server adds
/// fields to their items, not items.
#[must_use]
pub fn holds(found: &Value, wanted: &Value) -> bool {
    match (found, wanted) {
        (Value::Object(found), Value::Object(wanted)) => {
            wanted.iter().all(|(key, wanted)| match found.get(key) {
                Some(found) if matches!(key.as_str(), "limits" | "requests") => same_amounts(found, wanted),
                Some(found) => holds(found, wanted),
                None => is_nothing(wanted),
            })
        }
        (Value::Array(found), Value::Array(wanted)) => {
            found.len() == wanted.len() && found.iter().zip(wanted).all(|(f, w)| holds(f, w))
        }
        _ => found == wanted,
    }
}

/// As [`holds`], for quantities: the API server writes 1024Mi as 1Gi and 0.5 as 500m.
fn same_amounts(found: &Value, wanted: &Value) -> bool {
    let (Value::Object(found), Value::Object(wanted)) = (found, wanted) else { return holds(found, wanted) };
    let amount = |value: &Value| rules::amount(&Quantity(value.as_str()?.to_owned()));
    found.len() == wanted.len()
        && wanted.iter().all(|(key, wanted)| {
            found.get(key).is_some_and(|found| match (amount(found), amount(wanted)) {
                (Some(a), Some(b)) => (a - b).abs() <= a.abs().max(b.abs()) * 1e-12,
                _ => found == wanted,
            })
        })
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_nothing),
        Value::String(text) => text.is_empty(),
        Value::Bool(flag) => !flag,
        Value::Number(_) => false,
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
    // Typed objects come without them.
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

fn tell_refusal(status: &mut StorageClusterStatus, cluster: &StorageCluster, why: &str, now: Timestamp) {
    let reported = |type_: &str, status: &str| Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: "ApplyFailed".to_owned(),
        message: why.chars().take(crate::limits::CONDITION_MESSAGE_MAX / 4).collect(),
        last_transition_time: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now),
        observed_generation: cluster.metadata.generation,
    };
    let before = cluster.status.clone().unwrap_or_default().conditions;
    let mut conditions = std::mem::take(&mut status.conditions);
    conditions.retain(|c| c.type_ != "Progressing" && c.type_ != "Ready");
    conditions.push(reported("Progressing", "True"));
    conditions.push(reported("Ready", "False"));
    status.conditions = status::merge(&before, conditions, now);
}

fn tell_failed_destruction(status: &mut StorageClusterStatus, why: &str) {
    if let Some(deletable) = status.conditions.iter_mut().find(|c| c.type_ == "Deletable") {
        deletable.reason = "DestroyFailed".to_owned();
        deletable.message = why.chars().take(crate::limits::CONDITION_MESSAGE_MAX / 4).collect();
    }
}

/// Writes the status where it differs, and Events for what has changed. `false`: somebody else has changed the cluster
/// since it was read, and all is to be looked at again.
async fn publish(
    context: &Context,
    api: &Api<StorageCluster>,
    cluster: &StorageCluster,
    desired: &Desired,
) -> Result<bool, ReconcileError> {
    let name = cluster.name_any();
    let before = cluster.status.clone().unwrap_or_default();
    context.metrics.set_instances(&name, &desired.status.instances);
    let paused = desired.status.conditions.iter().find(|c| c.type_ == "TakeoverPaused");
    if let Some(paused) = paused {
        let labels = OfCluster { cluster: name.clone() };
        context.metrics.takeover_paused.get_or_create(&labels).set(i64::from(paused.status == "True"));
    }
    if cluster.status.is_none() || before != desired.status {
        let mut patch = json!({
            "apiVersion": format!("{GROUP}/{VERSION}"),
            "kind": "StorageCluster",
            "metadata": { "name": name },
            "status": desired.status,
        });
        context
            .metrics
            .writes
            .get_or_create(&Written { kind: "StorageCluster".to_owned(), verb: "status" })
            .inc();
        if cluster.spec.can_move() {
            // An operator that was stopped in between must not put back an epoch that is over.
            patch["metadata"]["resourceVersion"] = cluster.resource_version().into();
        }
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch_status(&name, &parameters, &Patch::Apply(&patch)).await {
            Err(kube::Error::Api(status)) if status.code == 409 && cluster.spec.can_move() => {
                return Ok(false);
            }
            other => other?,
        };
    }
    for instance in &desired.status.instances {
        let was = before.instances.iter().find(|b| b.name == instance.name).and_then(|b| b.takeover.as_ref());
        if let Some(moved) = instance.takeover.as_ref()
            && was.is_none_or(|w| w.serving.is_none() || w.epoch != moved.epoch)
            && let (Some(decided), Some(serving)) = (&moved.decided, &moved.serving)
        {
            let took = Duration::try_from(serving.0.duration_since(decided.0)).unwrap_or_default();
            context.metrics.takeover_duration.observe(took.as_secs_f64());
        }
    }
    for notice in notices(&before, &desired.status) {
        tell(context, cluster, &notice).await;
    }
    Ok(true)
}

async fn tell(context: &Context, cluster: &StorageCluster, notice: &Notice) {
    context.teller.tell(&context.settings.namespace, &cluster.object_ref(&()), notice).await;
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

/// The credentials of volumes that are destroyed.
async fn forget_credentials(context: &Context, cluster: &StorageCluster) -> Result<(), ReconcileError> {
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &context.settings.namespace);
    let selector = format!(
        "{}={},{}={}",
        names::LABEL_MANAGED_BY,
        names::MANAGED_BY_DRIVER,
        names::LABEL_CLUSTER,
        cluster.name_any()
    );
    for secret in api.list_metadata(&kube::api::ListParams::default().labels(&selector)).await?.items {
        // The driver's finalizer keeps the Secret as long as its volume is there.
        let finalizers = secret.finalizers();
        let kept: Vec<&String> = finalizers.iter().filter(|f| *f != names::FINALIZER_VOLUME).collect();
        if kept.len() < finalizers.len() {
            let patch = json!({ "metadata": { "uid": secret.uid(), "finalizers": kept } });
            let patched =
                api.patch_metadata(&secret.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await;
            match patched {
                Err(kube::Error::Api(status)) if status.code == 404 => continue,
                other => other?,
            };
        }
        match api.delete(&secret.name_any(), &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            other => {
                other?;
            }
        }
    }
    Ok(())
}

/// Makes and renews certificates. A paused cluster's are only looked at.
async fn certify(
    context: &Context,
    cluster: &StorageCluster,
    servers: &[(String, IpAddr)],
    now: Timestamp,
) -> Result<(CertificatesState, Option<Identity>), ReconcileError> {
    let name = cluster.name_any();
    let namespace = &context.settings.namespace;
    let rule = Rule::new(&cluster.spec.security.certificates);
    let api: Api<Secret> = Api::namespaced(context.client.clone(), namespace);
    let mut state = CertificatesState::default();
    let authority_name = names::authority_secret(&name);
    let found = api.get_opt(&authority_name).await?;
    if let Some(found) = &found
        && found.labels().get(names::LABEL_CLUSTER) != Some(&name)
    {
        state.problem =
            Some(format!("Secret {authority_name} is there and was not made for this cluster: delete it"));
        return Ok((state, None));
    }
    let mut authority = found.as_ref().and_then(|s| Authority::read(s.data.as_ref()?));
    let step = certificates::authority_step(now, rule, authority.as_ref());
    let writing = !cluster.spec.paused;
    if step != AuthorityStep::Keep && writing {
        let after = match authority {
            Some(authority) => authority.after(step, &name, now, rule)?,
            None => Authority::create(&name, now, rule)?,
        };
        write_secret(context, cluster, &api, found, &authority_name, None, after.write()).await?;
        tracing::info!(cluster = name, ?step, "certificate authority");
        authority = Some(after);
    }
    let Some(authority) = authority else {
        state.problem = Some("there is no certificate authority, and spec.paused is true".to_owned());
        return Ok((state, None));
    };
    let mut renewals: Vec<Timestamp> =
        certificates::authority_renewal(rule, &authority).into_iter().collect();
    let mut identity = None;
    let mut problems = Vec::new();
    for leaf in leaves(&name, namespace, servers) {
        let found = api.get_opt(&leaf.secret).await?;
        let strange = found.as_ref().is_some_and(|s| s.labels().get(names::LABEL_CLUSTER) != Some(&name));
        if strange {
            problems.push(format!(
                "Secret {} is there and was not made for this cluster: delete it",
                leaf.secret
            ));
            continue;
        }
        let mut data = found.as_ref().and_then(|s| s.data.clone());
        let due = certificates::due(now, rule, &authority, &leaf, data.as_ref());
        let fresh = match &due {
            Due::Keep(_) => None,
            Due::Bundle(_) => data.clone().map(|mut data| {
                data.insert(names::tls::AUTHORITY.to_owned(), ByteString(authority.bundle().into_bytes()));
                data
            }),
            Due::Issue(_) => Some(certificates::secret_data(&authority.issue(&leaf, now, rule)?, &authority)),
        };
        match due {
            Due::Keep(renewal) | Due::Bundle(renewal) => renewals.push(renewal),
            Due::Issue(why) if !writing => {
                problems.push(format!("{}: {why}, and spec.paused is true", leaf.secret))
            }
            Due::Issue(why) => {
                renewals.push(now + rule.validity - rule.renew_before);
                tracing::info!(secret = leaf.secret, why, "certificate issued");
            }
        }
        if let Some(fresh) = fresh
            && writing
        {
            write_secret(
                context,
                cluster,
                &api,
                found,
                &leaf.secret,
                leaf.instance.as_deref(),
                fresh.clone(),
            )
            .await?;
            data = Some(fresh);
        }
        if let Some(instance) = &leaf.instance {
            state.issued.push(instance.clone());
        }
        if leaf.secret == names::operator_secret(&name) {
            identity = data.as_ref().and_then(|d| Identity::new(d).ok());
        }
    }
    state.renewal = renewals.into_iter().min();
    state.problem = (!problems.is_empty()).then(|| problems.join("; "));
    Ok((state, identity))
}

/// Every certificate that ought to be.
fn leaves(cluster: &str, namespace: &str, servers: &[(String, IpAddr)]) -> Vec<Leaf> {
    let client = |secret: String, name: &str| Leaf {
        secret,
        name: name.to_owned(),
        dns: [name.to_owned()].into(),
        ips: std::collections::BTreeSet::new(),
        server: false,
        instance: None,
    };
    let mut leaves = vec![
        client(names::operator_secret(cluster), names::CLIENT_OPERATOR),
        client(names::driver_secret(cluster), names::CLIENT_DRIVER),
    ];
    leaves.extend(servers.iter().map(|(instance, address)| Leaf {
        secret: names::server_secret(instance),
        name: instance.clone(),
        dns: [names::admin_server_name(instance, namespace)].into(),
        ips: [*address].into(),
        server: true,
        instance: Some(instance.clone()),
    }));
    leaves
}

/// Writes a Secret as it was read or made: with its version, so that two operators never overwrite one another's keys.
async fn write_secret(
    context: &Context,
    cluster: &StorageCluster,
    api: &Api<Secret>,
    found: Option<Secret>,
    name: &str,
    instance: Option<&str>,
    data: BTreeMap<String, ByteString>,
) -> Result<(), ReconcileError> {
    let verb = if found.is_some() { "update" } else { "create" };
    context.metrics.writes.get_or_create(&Written { kind: "Secret".to_owned(), verb }).inc();
    if let Some(mut secret) = found {
        secret.data = Some(data);
        api.replace(name, &PostParams::default(), &secret).await?;
        return Ok(());
    }
    let mut secret: Secret = serde_json::from_value(json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {
            "name": name,
            "namespace": context.settings.namespace,
            "labels": labels(&cluster.name_any(), instance),
        },
    }))?;
    secret.data = Some(data);
    api.create(&PostParams::default(), &secret).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_api_server_adds_is_no_difference() {
        let wanted = json!({ "a": [{ "b": 1 }], "none": [], "off": false });
        assert!(holds(&json!({ "a": [{ "b": 1, "added": true }], "c": 2 }), &wanted));
        assert!(!holds(&json!({ "a": [{ "b": 2 }] }), &wanted));
        assert!(!holds(&json!({ "a": [{ "b": 1 }, { "b": 1 }] }), &wanted));
        assert!(!holds(&json!({}), &wanted));
    }

    #[test]
    fn the_same_amount_in_other_words_is_no_difference() {
        let of =
            |memory: &str, cpu: &str| json!({ "resources": { "limits": { "memory": memory, "cpu": cpu } } });
        assert!(holds(&of("1Gi", "500m"), &of("1024Mi", "0.5")));
        assert!(holds(&of("1536Mi", "700m"), &of("1.5Gi", "0.7")));
        assert!(!holds(&of("1Gi", "500m"), &of("1025Mi", "0.5")));
        assert!(!holds(&of("1Gi", "500m"), &json!({ "resources": { "limits": { "memory": "1Gi" } } })));
        assert!(!holds(&json!({ "resources": {} }), &of("1Gi", "1")));
    }

    #[test]
    fn delays_double_and_end() {
        let delays: Vec<Duration> = (1..40).map(|n| backoff(n, "a")).collect();
        assert!(delays.windows(2).all(|w| w[0] <= w[1]));
        assert!(delays[0] < Duration::from_secs(1));
        assert!(*delays.last().expect("some") <= BACKOFF_MAX + BACKOFF_MAX / 4);
    }
}
