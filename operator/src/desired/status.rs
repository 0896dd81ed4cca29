//! The status: instances, nodes, conditions.

use std::collections::BTreeMap;

use forebay_api::cluster::{
    Backend, ClusterSummary, DeletionPolicy, InstancePhase, InstanceStatus, StorageClusterStatus,
};
use forebay_api::fabric::{PoolStatus, TakeoverStatus};
use forebay_api::names;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use super::rules::Problem;
use super::{Desired, Report, ServerReport, View, fabric, ordinal, soon};
use crate::limits::{
    CONDITION_MESSAGE_MAX, LEASE_QUIET, NODE_VERDICTS_MAX, SPARES_OBSERVED_MAX, UNREADY_RESYNC,
};
use crate::placement::{self, Reason};

/// Findings of the other parts, for the conditions and the instances' messages.
#[derive(Debug, Default)]
pub struct Said {
    /// Whether something is pending, so that the next reconciliation is soon.
    pub waits: bool,
    /// Why instances beyond the number wanted are not removed.
    pub scale_down: Option<String>,
    /// Progress of a rollout: reason and message.
    pub rollout: Option<(&'static str, String)>,
    /// Whether the cluster can be deleted.
    pub deletable: Option<super::deletion::Verdict>,
    /// The deletion policy, if it is decided now.
    pub deletion_policy: Option<DeletionPolicy>,
    /// Why an instance that could move has no node, by its name.
    pub homeless: BTreeMap<String, String>,
    /// Further messages about instances, by name.
    pub notes: BTreeMap<String, String>,
}

/// Returns since when a pod has been ready; `None` if it is not ready, or is ending.
#[must_use]
pub fn pod_ready_since(pod: &Pod) -> Option<Timestamp> {
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|c| c.type_ == "Ready" && c.status == "True")?;
    // A kubelet always sets the time. If another component made the pod ready, it counts as having always been ready.
    Some(ready.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |t| t.0))
}

/// Fills in `desired.status`.
pub fn compose(view: &View<'_>, problems: &[Problem], said: &Said, desired: &mut Desired) {
    let mut instances: Vec<InstanceStatus> = view.instances.iter().map(|i| instance(view, said, i)).collect();
    instances.sort_by_key(|i| ordinal(&view.name, &i.name));
    if said.waits || instances.iter().any(|i| i.phase == InstancePhase::Starting) {
        soon(desired);
    }
    if instances.iter().any(|i| i.phase != InstancePhase::Ready) {
        // The instance may be waiting for something that no watch reports, such as another cluster's instance leaving a
        // node.
        desired.again = desired.again.min(UNREADY_RESYNC);
    }
    let conditions = conditions(view, problems, said, &instances);
    desired.status = StorageClusterStatus {
        observed_generation: view.cluster.metadata.generation,
        conditions: merge(&view.before.conditions, conditions, view.observed.now),
        deletion_policy: said.deletion_policy.or(view.before.deletion_policy).filter(|_| view.deleting()),
        summary: summary(view, &instances),
        image: view.image().to_owned(),
        instances,
        nodes: nodes(view),
    };
}

fn nodes(view: &View<'_>) -> Vec<forebay_api::cluster::NodeVerdict> {
    let (unfit, fit): (Vec<_>, Vec<_>) = view.verdicts.iter().partition(|v| !v.fits());
    // There may be few or many fitting nodes. Some are always reported, because takeovers observe them.
    let (first, rest) = fit.split_at(fit.len().min(SPARES_OBSERVED_MAX + view.seats.len()));
    let all = first.iter().copied().chain(unfit).chain(rest.iter().copied());
    let mut chosen: Vec<_> = all.take(NODE_VERDICTS_MAX).map(placement::Verdict::status).collect();
    // The instance stays and starts once the directory exists. Moving it to another node would only hide what is missing.
    for (instance, failure) in &view.observed.mount_failures {
        let lacks = failure.contains("hostPath type check failed");
        let seat = view.seats.get(instance).filter(|_| lacks);
        if let Some(verdict) = seat.and_then(|s| chosen.iter_mut().find(|v| v.name == s.node)) {
            verdict.fits = false;
            verdict.reason = Reason::BackendMissing.as_str().to_owned();
            verdict.message =
                "a directory of spec.backends does not exist on this node: create it, or set directory.create".to_owned();
        }
    }
    chosen.sort_by(|a, b| a.name.cmp(&b.name));
    chosen
}

fn instance(view: &View<'_>, said: &Said, name: &str) -> InstanceStatus {
    let before = view.before(name);
    let report = match view.observed.reports.get(name) {
        Some(Report::Answered(report)) => Some(report.as_ref()),
        _ => None,
    };
    let pod = view.observed.pods.get(name);
    let present = pod.filter(|pod| !super::moves::is_stale(view, name, pod));
    let (mut phase, mut message) = phase(view, name, present, report);
    if present.is_none() && pod.is_some() {
        message = "its pod of the previous epoch is terminating".to_owned();
    }
    if let Some(why) = said.homeless.get(name) {
        (phase, message) = (InstancePhase::Pending, why.clone());
    }
    if let Some(note) = said.notes.get(name) {
        message = if message.is_empty() { note.clone() } else { format!("{message}; {note}") };
    }
    let going = view.deleting() && !view.cluster.spec.paused;
    if going || view.leaving.iter().any(|i| i == name) {
        phase = InstancePhase::Removing;
        message = if message.is_empty() { "it is being removed".to_owned() } else { message };
    }
    // The operator has read the phase back, so it was published before, and every client that reads the status from now on
    // finds it.
    let reported = before.filter(|b| b.phase == InstancePhase::Removing && phase == InstancePhase::Removing);
    let removing_since =
        reported.map(|b| b.removing_since.clone().unwrap_or_else(|| Time(whole_seconds(view.observed.now))));
    let ports = &view.cluster.spec.network.ports;
    let address = view.address(name).unwrap_or_default();
    let admin_endpoint = view
        .node_address(name)
        .unwrap_or_default()
        .parse::<std::net::IpAddr>()
        .map(|ip| std::net::SocketAddr::new(ip, ports.admin).to_string())
        .unwrap_or_default();
    // The server's last values are kept while it is away: its volumes and their space still exist.
    let kept = |of: fn(&ServerReport) -> i64, was: fn(&InstanceStatus) -> i64| {
        report.map(of).or_else(|| before.map(was)).unwrap_or_default()
    };
    InstanceStatus {
        name: name.to_owned(),
        phase,
        removing_since,
        node: view.seats.get(name).map(|s| s.node.clone()).unwrap_or_default(),
        address,
        port: ports.smb,
        admin_endpoint,
        transports: report.map(|r| r.transports.clone()).unwrap_or_default(),
        image: pod.and_then(|p| p.spec.as_ref()?.containers.first()?.image.clone()).unwrap_or_default(),
        version: report.map(|r| r.version.clone()).unwrap_or_default(),
        capacity_bytes: kept(|r| r.capacity_bytes, |b| b.capacity_bytes),
        free_bytes: kept(|r| r.free_bytes, |b| b.free_bytes),
        volumes: view.volumes(name).or(before.map(|b| b.volumes)).unwrap_or_default(),
        sessions: report.map_or(0, |r| r.sessions),
        epoch: view.epoch(name),
        pools: pools(view, name, report),
        takeover: takeover(view, name, phase, present),
        message,
    }
}

/// Returns the pools as the server reports them, or as it last reported them if it is away.
fn pools(view: &View<'_>, name: &str, report: Option<&ServerReport>) -> Vec<PoolStatus> {
    let seat = view.seats.get(name);
    let one = |backend: &Backend| -> PoolStatus {
        let before = view.before(name).and_then(|b| b.pools.iter().find(|p| p.name == backend.name));
        let reported = report.and_then(|r| r.pools.get(&backend.name));
        let mut pool = reported.or(before).cloned().unwrap_or_default();
        pool.name.clone_from(&backend.name);
        pool.kind = backend.kind.as_str().to_owned();
        if !backend.is_on_fabric() {
            return pool;
        }
        if let Ok(found) = fabric::of(view, name, backend) {
            pool.paths = u32::try_from(found.paths.len()).unwrap_or_default();
            pool.nqn = found.nqn;
            pool.namespace = found.namespace;
        }
        pool.target = fabric::place(view, name, &backend.name).map(|p| p.to_string()).unwrap_or_default();
        match (reported, seat) {
            (Some(reported), Some(seat)) if !reported.reservation.is_empty() => {
                pool.reservation = format!("{}, on {}", reported.reservation, seat.node);
            }
            (Some(_), _) => pool.reservation = String::new(),
            (None, _) => {
                // No report: the last known values are kept, except for volatile ones.
                pool.paths_up = 0;
                pool.ana_state = String::new();
                pool.health =
                    if report.is_none() { "its server does not answer" } else { "it is not served" }
                        .to_owned();
            }
        }
        pool
    };
    view.cluster.spec.backends.iter().map(one).collect()
}

/// Returns how the instance moved to its node, and the progress of the move.
fn takeover(view: &View<'_>, name: &str, phase: InstancePhase, pod: Option<&Pod>) -> Option<TakeoverStatus> {
    let moved = view.observed.record.moved.get(name).filter(|_| view.movable())?;
    let epoch = view.epoch(name);
    let before = view.before(name).and_then(|b| b.takeover.as_ref()).filter(|t| t.epoch == epoch);
    let now = Time(Timestamp::from_second(view.observed.now.as_second()).unwrap_or(view.observed.now));
    let placed = pod.and_then(|p| p.spec.as_ref()?.node_name.as_ref()).map(|_| now.clone());
    let serving = (phase == InstancePhase::Ready).then_some(now);
    Some(TakeoverStatus {
        reason: moved.why.clone(),
        from: moved.from.clone(),
        to: view.seats.get(name).map(|s| s.node.clone()).unwrap_or_default(),
        epoch,
        since: Some(Time(moved.since)),
        decided: Some(Time(moved.decided)),
        placed: before.and_then(|b| b.placed.clone()).or(placed),
        serving: before.and_then(|b| b.serving.clone()).or(serving),
    })
}

/// Rounds up to the next second, because the API server stores times in whole seconds.
fn whole_seconds(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second().saturating_add(1)).unwrap_or(at)
}

fn phase(
    view: &View<'_>,
    name: &str,
    pod: Option<&Pod>,
    report: Option<&ServerReport>,
) -> (InstancePhase, String) {
    use InstancePhase::{Draining, NotReady, Pending, Ready, Starting};
    let Some(seat) = view.seats.get(name) else {
        if view.movable() {
            return (Pending, "its place is being recorded".to_owned());
        }
        return (Pending, format!("no node fits: {}", placement::explain(&view.verdicts, &view.seats)));
    };
    let verdict = view.verdicts.iter().find(|v| v.node == seat.node);
    let Some(node) = view.node(name) else {
        return (
            NotReady,
            if view.movable() {
                format!("its node {} is no longer part of the Kubernetes cluster", seat.node)
            } else {
                format!(
                    "its node {} is no longer part of the Kubernetes cluster, and its volumes are stored there",
                    seat.node
                )
            },
        );
    };
    let Some(pod) = pod else {
        if let Some(failure) = view.observed.creation_failures.get(name) {
            return (NotReady, format!("its pod was rejected: {failure}"));
        }
        // An unfit node is reported for a bound instance, because it may be the reason why the pod is missing.
        let why = verdict.filter(|v| !v.fits()).map(|v| format!("{}: {}", seat.node, v.message));
        let message = why.unwrap_or_else(|| {
            view.observed
                .certificates
                .problem
                .clone()
                .unwrap_or_else(|| "its pod is being created".to_owned())
        });
        return (Starting, message);
    };
    if pod.metadata.deletion_timestamp.is_some() {
        if !placement::is_ready(node) {
            return (NotReady, format!("its pod cannot terminate because node {} is not ready", seat.node));
        }
        return (Draining, "it completes requests in flight before it stops".to_owned());
    }
    if pod_ready_since(pod).is_some() {
        return match (report, view.observed.reports.get(name)) {
            (Some(report), _) if report.draining => {
                (Draining, "it completes requests in flight before it stops".to_owned())
            }
            (Some(report), _) => {
                let unfit = verdict.filter(|v| {
                    matches!(
                        v.reason,
                        Reason::RdmaMissing
                            | Reason::RdmaPortDown
                            | Reason::RdmaTooSlow
                            | Reason::WrongLinkLayer
                    )
                });
                let mut notes = report.problems.clone();
                notes.extend(
                    unfit.map(|v| format!("it serves, although its node no longer fits: {}", v.message)),
                );
                (Ready, notes.join("; "))
            }
            (None, Some(Report::Silent(why))) => (NotReady, format!("its admin API does not answer: {why}")),
            (None, _) => (Starting, "its admin API has not been queried yet".to_owned()),
        };
    }
    if !placement::is_ready(node) {
        return (
            NotReady,
            format!("its node {} is not ready: kubectl describe node {}", seat.node, seat.node),
        );
    }
    let mount = || {
        let failure = view.observed.mount_failures.get(name)?;
        Some(format!("the kubelet cannot mount its volumes: {failure}"))
    };
    match trouble(pod).or_else(mount) {
        Some(trouble) => (NotReady, trouble),
        None => (Starting, "its pod is being started".to_owned()),
    }
}

/// Returns what keeps a pod from being ready, unless it only needs more time.
fn trouble(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let unscheduled =
        status.conditions.iter().flatten().find(|c| c.type_ == "PodScheduled" && c.status == "False");
    if let Some(condition) = unscheduled {
        return Some(format!(
            "its pod cannot be scheduled: {}",
            condition.message.as_deref().unwrap_or_default()
        ));
    }
    if status.phase.as_deref() == Some("Failed") {
        return Some(format!(
            "its pod failed: {}",
            status.message.as_deref().or(status.reason.as_deref()).unwrap_or_default()
        ));
    }
    let container: &ContainerStatus = status.container_statuses.as_ref()?.first()?;
    let state = container.state.as_ref()?;
    let ended =
        state.terminated.as_ref().or(container.last_state.as_ref().and_then(|s| s.terminated.as_ref()));
    let last = ended
        .and_then(|t| t.message.as_deref())
        .and_then(|m| m.trim().lines().last())
        .map(|m| format!("; its last message: {m}"))
        .unwrap_or_default();
    if let Some(waiting) = &state.waiting {
        let reason = waiting.reason.as_deref().unwrap_or_default();
        if matches!(reason, "ContainerCreating" | "PodInitializing" | "") {
            return None;
        }
        return Some(format!("{reason}: {}{last}", waiting.message.as_deref().unwrap_or_default()));
    }
    if let Some(terminated) = &state.terminated {
        return Some(format!("its server exited with code {}{last}", terminated.exit_code));
    }
    (container.started == Some(true))
        .then(|| "its server runs but reports that it is not ready: see its log".to_owned())
}

fn condition(type_: &str, status: bool, reason: &str, message: impl Into<String>) -> Condition {
    let mut message: String = message.into();
    if message.len() > CONDITION_MESSAGE_MAX {
        let end =
            (0..=CONDITION_MESSAGE_MAX).rev().find(|n| message.is_char_boundary(*n)).unwrap_or_default();
        message.truncate(end);
        message.push('…');
    }
    Condition {
        type_: type_.to_owned(),
        status: if status { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
        observed_generation: None,
    }
}

fn conditions(
    view: &View<'_>,
    problems: &[Problem],
    said: &Said,
    instances: &[InstanceStatus],
) -> Vec<Condition> {
    let staying: Vec<&InstanceStatus> =
        instances.iter().filter(|i| !view.leaving.contains(&i.name)).collect();
    let mut list = vec![
        valid(problems),
        placed(view, &staying),
        match &view.observed.certificates.problem {
            None => condition("CertificatesReady", true, "Issued", ""),
            Some(problem) => condition("CertificatesReady", false, "NotIssued", problem.clone()),
        },
        progressing(said, &staying),
        if view.cluster.spec.paused {
            condition(
                "Paused",
                true,
                "Paused",
                "spec.paused is true: the operator changes nothing; servers continue",
            )
        } else {
            condition("Paused", false, "NotPaused", "")
        },
    ];
    if view.movable() {
        list.push(takeover_ready(view));
        list.push(takeover_paused(view));
    }
    if let Some((status, reason, message)) = &said.deletable {
        list.push(condition("Deletable", *status, reason, message.clone()));
    }
    let ready = ready(problems, &staying);
    list.push(ready);
    for condition in &mut list {
        condition.observed_generation = view.cluster.metadata.generation;
    }
    list
}

/// Whether unrequested takeovers pause.
fn takeover_paused(view: &View<'_>) -> Condition {
    let annotation = names::ANNOTATION_TAKE_OVER_ANYWAY;
    match view.observed.pause {
        Some(pause) if view.overridden() => condition(
            "TakeoverPaused",
            false,
            "Overridden",
            format!(
                "{}; the annotation {annotation} overrides the pause: remove it when this is over",
                pause.message()
            ),
        ),
        Some(pause) => condition(
            "TakeoverPaused",
            true,
            pause.cause.as_str(),
            format!(
                "{}. If a node is certainly off, add the taint {} to it; if all of them are, set the annotation {annotation}=true \
                 on this StorageCluster",
                pause.message(),
                crate::takeover::OUT_OF_SERVICE
            ),
        ),
        None if view.overridden() => condition(
            "TakeoverPaused",
            false,
            "Overridden",
            format!(
                "the annotation {annotation} keeps takeovers from pausing: remove it when it is no longer needed"
            ),
        ),
        None => condition("TakeoverPaused", false, "NotPaused", ""),
    }
}

/// Whether an instance could move to another node now.
fn takeover_ready(view: &View<'_>) -> Condition {
    if !view.cluster.spec.takeover.enabled {
        return condition(
            "TakeoverReady",
            false,
            "Disabled",
            "spec.takeover.enabled is false: only planned moves are made",
        );
    }
    let quiet = |node: &str| view.observed.silences.get(node).is_some_and(|s| *s >= LEASE_QUIET);
    let free = |v: &&placement::Verdict| !view.seats.values().any(|s| s.node == v.node) && !quiet(&v.node);
    if !view.verdicts.iter().filter(|v| v.fits()).any(|v| free(&v)) {
        let why = placement::explain(&view.verdicts, &view.seats);
        let message = format!("no spare node can take over an instance: {why}");
        return condition("TakeoverReady", false, "NoSpareNode", message);
    }
    condition("TakeoverReady", true, "SpareNode", "")
}

fn valid(problems: &[Problem]) -> Condition {
    let Some(first) = problems.first() else { return condition("Valid", true, "Valid", "") };
    let messages: Vec<&str> = problems.iter().map(|p| p.message.as_str()).collect();
    condition("Valid", false, first.reason, messages.join("; "))
}

fn placed(view: &View<'_>, staying: &[&InstanceStatus]) -> Condition {
    let homeless: Vec<&str> = staying.iter().filter(|i| i.node.is_empty()).map(|i| i.name.as_str()).collect();
    if homeless.is_empty() {
        return condition("InstancesPlaced", true, "AllPlaced", "");
    }
    if view.movable() {
        let why = staying.iter().filter(|i| i.node.is_empty()).map(|i| format!("{}: {}", i.name, i.message));
        return condition("InstancesPlaced", false, "NotPlaced", why.collect::<Vec<_>>().join(" | "));
    }
    let mut message =
        format!("{}: no node fits: {}", homeless.join(", "), placement::explain(&view.verdicts, &view.seats));
    for verdict in view.verdicts.iter().filter(|v| !v.fits()) {
        message.push_str(&format!(" | {}: {}: {}", verdict.node, verdict.reason.as_str(), verdict.message));
    }
    condition("InstancesPlaced", false, "NoNodeFits", message)
}

fn progressing(said: &Said, staying: &[&InstanceStatus]) -> Condition {
    if let Some((reason, message)) = &said.rollout {
        return condition("Progressing", true, reason, message.clone());
    }
    if let Some(message) = &said.scale_down {
        return condition("Progressing", true, "ScaleDownRefused", message.clone());
    }
    let starting: Vec<&str> =
        staying.iter().filter(|i| i.phase == InstancePhase::Starting).map(|i| i.name.as_str()).collect();
    if !starting.is_empty() {
        return condition("Progressing", true, "Starting", format!("starting: {}", starting.join(", ")));
    }
    if said.waits {
        return condition("Progressing", true, "Removing", "instances are being removed");
    }
    condition("Progressing", false, "UpToDate", "")
}

fn ready(problems: &[Problem], staying: &[&InstanceStatus]) -> Condition {
    if let Some(fatal) = problems.iter().find(|p| p.fatal) {
        return condition("Ready", false, "Invalid", fatal.message.clone());
    }
    let unready: Vec<String> = staying
        .iter()
        .filter(|i| i.phase != InstancePhase::Ready)
        .map(|i| format!("{} is {:?}: {}", i.name, i.phase, i.message))
        .collect();
    if staying.is_empty() {
        return condition("Ready", true, "NoInstancesWanted", "spec.instances is 0");
    }
    if unready.is_empty() {
        return condition("Ready", true, "AllInstancesReady", "");
    }
    condition("Ready", false, "InstancesNotReady", unready.join(" | "))
}

/// Returns the new conditions, with the transition times of old ones that have the same status.
#[must_use]
pub fn merge(old: &[Condition], new: Vec<Condition>, now: Timestamp) -> Vec<Condition> {
    new.into_iter()
        .map(|mut condition| {
            let same = old.iter().find(|o| o.type_ == condition.type_ && o.status == condition.status);
            condition.last_transition_time = same.map_or(Time(now), |o| o.last_transition_time.clone());
            condition
        })
        .collect()
}

fn summary(view: &View<'_>, instances: &[InstanceStatus]) -> ClusterSummary {
    let ready = instances
        .iter()
        .filter(|i| i.phase == InstancePhase::Ready && !view.leaving.contains(&i.name))
        .count();
    let mut transports: Vec<&str> =
        instances.iter().flat_map(|i| i.transports.iter().map(String::as_str)).collect();
    transports.sort_unstable();
    transports.dedup();
    let sum = |of: fn(&InstanceStatus) -> i64| instances.iter().map(of).fold(0_i64, i64::saturating_add);
    let total = sum(|i| i.capacity_bytes);
    ClusterSummary {
        instances: format!("{ready}/{}", view.cluster.spec.instances),
        transport: transports.join(", "),
        volumes: instances.iter().map(|i| i.volumes).fold(0, u32::saturating_add),
        capacity: if total == 0 {
            String::new()
        } else {
            format!("{} free of {}", bytes(sum(|i| i.free_bytes)), bytes(total))
        },
    }
}

/// Formats bytes in binary units, with one decimal digit below 10.
#[must_use]
pub fn bytes(count: i64) -> String {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value < 10.0 && unit > 0 {
        format!("{value:.1}{}", UNITS[unit])
    } else {
        format!("{value:.0}{}", UNITS[unit])
    }
}
