//! Decides from signs of life whether an instance with pools on fabrics moves to another node. Pure.
//!
//! There are two errors: leaving an instance on a dead node, and taking it away from a node that only the operator cannot
//! reach. The second does not harm data (the old server is fenced first), but stops the I/O of all clients for nothing. So
//! the kubelet decides, by its Lease: while the Lease is renewed the node is alive, and so is the server for as long as the
//! kubelet reports it.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;

use crate::limits::{MOVE_PAUSE, UNREADY_FACTOR, UNREADY_MIN};
use crate::placement::is_cordoned;

/// Taint by which an administrator declares that a node is off.
pub const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// State of a node's kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kubelet {
    /// The node is no longer part of the cluster.
    Gone,
    /// An administrator has declared the node off.
    OutOfService,
    /// The node is ready.
    Ready,
    /// The kubelet reports the node as not ready.
    NotReady {
        /// Since when.
        since: Timestamp,
    },
    /// Kubernetes reports that it has not heard from the kubelet for too long.
    Unknown {
        /// Since when.
        since: Timestamp,
    },
}

impl Kubelet {
    /// Returns the state of a node's kubelet; `None` stands for a node that does not exist.
    #[must_use]
    pub fn of(node: Option<&Node>) -> Self {
        let Some(node) = node else { return Self::Gone };
        let taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
        if taints.into_iter().any(|t| t.key == OUT_OF_SERVICE) {
            return Self::OutOfService;
        }
        let conditions = node.status.iter().flat_map(|s| s.conditions.iter().flatten());
        let ready = conditions.into_iter().find(|c| c.type_ == "Ready");
        let since =
            ready.and_then(|c| c.last_transition_time.as_ref()).map_or(Timestamp::UNIX_EPOCH, |t| t.0);
        match ready.map(|c| c.status.as_str()) {
            Some("True") => Self::Ready,
            Some("False") => Self::NotReady { since },
            // A node that has just been created has no condition yet: the kubelet has never reported, so it has not stopped
            // reporting.
            None => Self::Ready,
            Some(_) => Self::Unknown { since },
        }
    }
}

/// State of an instance's pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodSign {
    /// The pod does not exist.
    None,
    /// The pod is ready.
    Ready,
    /// The pod exists but is not ready, or not even started.
    Unready {
        /// Since when.
        since: Timestamp,
    },
    /// The pod is ending.
    Ending,
}

impl PodSign {
    /// Returns the state of a pod.
    #[must_use]
    pub fn of(pod: Option<&Pod>) -> Self {
        let Some(pod) = pod else { return Self::None };
        if pod.metadata.deletion_timestamp.is_some() {
            return Self::Ending;
        }
        let conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
        let ready = conditions.into_iter().find(|c| c.type_ == "Ready");
        if ready.is_some_and(|c| c.status == "True") {
            return Self::Ready;
        }
        let changed = ready.and_then(|c| c.last_transition_time.as_ref());
        let since = changed.or(pod.metadata.creation_timestamp.as_ref()).map(|t| t.0);
        // Without any time, the duration is unknown.
        since.map_or(Self::None, |since| Self::Unready { since })
    }
}

/// The inputs of the decision.
#[derive(Clone, Copy, Debug)]
pub struct Signs {
    /// The current time.
    pub now: Timestamp,
    /// State of the kubelet.
    pub kubelet: Kubelet,
    /// How long the kubelet's Lease has not changed while the operator observed it without a gap; `None` if there is no
    /// Lease, or no observation.
    pub silent: Option<Duration>,
    /// State of the pod.
    pub pod: PodSign,
    /// Whether the server responds to the operator.
    pub answers: bool,
    /// Whether the node is cordoned.
    pub cordoned: bool,
    /// Whether a move was requested.
    pub asked: bool,
    /// When the instance moved to this node, if it has moved.
    pub moved: Option<Timestamp>,
    /// Whether another node may do better: the instance has served before, and its namespaces are available.
    pub promising: bool,
    /// Whether the scheduler has found no room for the pod on this node for a while.
    pub no_room: bool,
    /// Whether takeovers pause: see [`crate::brake`].
    pub paused: bool,
}

impl Signs {
    /// Whether a node is cordoned.
    #[must_use]
    pub fn cordoned(node: Option<&Node>) -> bool {
        node.is_some_and(is_cordoned)
    }
}

/// The configuration.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Whether unrequested takeovers are enabled.
    pub enabled: bool,
    /// How long a node may be silent.
    pub after: Duration,
}

impl Rule {
    /// Returns how long a server can be unready on a live node before another node is tried.
    #[must_use]
    pub fn unready(&self) -> Duration {
        self.after.saturating_mul(UNREADY_FACTOR).max(UNREADY_MIN)
    }
}

/// Why an instance moves to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its node is silent.
    NodeLost,
    /// Its node is no longer part of the cluster.
    NodeGone,
    /// Its server does not start on a live node.
    ServerDown,
    /// Its node is cordoned.
    NodeCordoned,
    /// A move was requested.
    Asked,
}

impl Why {
    /// Returns the reason as in the status, Events and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NodeLost => "NodeLost",
            Self::NodeGone => "NodeGone",
            Self::ServerDown => "ServerDown",
            Self::NodeCordoned => "NodeCordoned",
            Self::Asked => "Asked",
        }
    }

    /// Whether the old server can be ended cleanly.
    #[must_use]
    pub fn is_planned(self) -> bool {
        matches!(self, Self::NodeCordoned | Self::Asked)
    }
}

/// What to do with an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing, and there is nothing to wait for.
    Stay,
    /// Nothing yet; decide again after this time.
    Wait(Duration),
    /// The instance would move for this reason, but takeovers pause.
    Paused(Why),
    /// The instance moves to another node.
    Move {
        /// Why.
        why: Why,
        /// When the reason arose.
        since: Timestamp,
    },
}

fn since(now: Timestamp, ago: Duration) -> Timestamp {
    now.checked_sub(ago).unwrap_or(now)
}

fn ago(now: Timestamp, then: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

/// Whether the node is lost, so that nothing on it can be ended cleanly.
#[must_use]
pub fn is_lost(signs: &Signs, after: Duration) -> bool {
    match (signs.kubelet, signs.silent) {
        (Kubelet::Gone | Kubelet::OutOfService, _) => true,
        (_, Some(silent)) => silent >= after,
        (Kubelet::Unknown { since }, None) => ago(signs.now, since) >= after,
        (Kubelet::Ready | Kubelet::NotReady { .. }, None) => false,
    }
}

/// Decides whether the instance moves.
#[must_use]
pub fn decide(signs: &Signs, rule: Rule) -> Decision {
    let now = signs.now;
    if is_lost(signs, rule.after) {
        if !rule.enabled {
            return Decision::Stay;
        }
        return match (signs.kubelet, signs.silent) {
            // An administrator's declaration about this node counts even during a pause.
            (Kubelet::Gone, _) if signs.paused => Decision::Paused(Why::NodeGone),
            (kubelet, _) if signs.paused && kubelet != Kubelet::OutOfService => {
                Decision::Paused(Why::NodeLost)
            }
            (Kubelet::Gone, _) => Decision::Move { why: Why::NodeGone, since: now },
            (Kubelet::OutOfService, _) => Decision::Move { why: Why::NodeLost, since: now },
            (Kubelet::Unknown { since }, None) => Decision::Move { why: Why::NodeLost, since },
            (_, silent) => {
                Decision::Move { why: Why::NodeLost, since: since(now, silent.unwrap_or_default()) }
            }
        };
    }
    // If a silence has begun, decide again when it would be too long.
    let silence = signs.silent.filter(|s| !s.is_zero()).map(|s| rule.after.saturating_sub(s));
    let wait = |wait: Option<Duration>| match wait.into_iter().chain(silence).min() {
        Some(wait) if rule.enabled => Decision::Wait(wait),
        _ => Decision::Stay,
    };
    if signs.asked && signs.pod != PodSign::Ending {
        return Decision::Move { why: Why::Asked, since: now };
    }
    if signs.cordoned {
        return Decision::Move { why: Why::NodeCordoned, since: now };
    }
    if signs.answers || !(signs.promising || signs.no_room) || !rule.enabled {
        return wait(None);
    }
    match signs.pod {
        PodSign::Unready { since } => {
            let unready = ago(now, since);
            let rested = signs.moved.map(|moved| MOVE_PAUSE.saturating_sub(ago(now, moved)));
            let left = rule.unready().saturating_sub(unready).max(rested.unwrap_or_default());
            match left.is_zero() {
                // A pod becomes ready again some time after its kubelet has reconnected.
                true if signs.paused => Decision::Paused(Why::ServerDown),
                true => Decision::Move { why: Why::ServerDown, since },
                false => wait(Some(left)),
            }
        }
        PodSign::None | PodSign::Ready | PodSign::Ending => wait(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Rule = Rule { enabled: true, after: Duration::from_secs(20) };

    fn now() -> Timestamp {
        Timestamp::from_second(1_800_000_000).expect("a moment")
    }

    fn before(seconds: u64) -> Timestamp {
        since(now(), Duration::from_secs(seconds))
    }

    /// Signs of a healthy instance.
    fn well() -> Signs {
        Signs {
            now: now(),
            kubelet: Kubelet::Ready,
            silent: Some(Duration::ZERO),
            pod: PodSign::Ready,
            answers: true,
            cordoned: false,
            asked: false,
            moved: None,
            promising: true,
            no_room: false,
            paused: false,
        }
    }

    fn moves(why: Why, ago: u64) -> Decision {
        Decision::Move { why, since: before(ago) }
    }

    fn wait(seconds: u64) -> Decision {
        Decision::Wait(Duration::from_secs(seconds))
    }

    #[test]
    fn takeover_follows_the_decision_table() {
        use Decision::Stay;
        let silent = |s: u64| Some(Duration::from_secs(s));
        let unready = |s: u64| PodSign::Unready { since: before(s) };
        let unknown = |s: u64| Kubelet::Unknown { since: before(s) };
        let away = Kubelet::NotReady { since: before(500) };
        let table: Vec<(&str, Signs, Decision)> = vec![
            ("a healthy instance stays", well(), Stay),
            ("a late Lease is waited for", Signs { silent: silent(12), ..well() }, wait(8)),
            ("a silent node is lost", Signs { silent: silent(20), ..well() }, moves(Why::NodeLost, 20)),
            (
                "a silent node is lost although Kubernetes reports node and pod as ready",
                Signs { silent: silent(31), answers: false, ..well() },
                moves(Why::NodeLost, 31),
            ),
            ("the operator alone cannot reach the admin API", Signs { answers: false, ..well() }, Stay),
            (
                "the node is NotReady, but its Lease is renewed and the server is up",
                Signs { kubelet: away, ..well() },
                Stay,
            ),
            (
                "the Lease is newer than the status of the node",
                Signs { kubelet: unknown(100), silent: silent(3), ..well() },
                wait(17),
            ),
            (
                "without a Lease the node's status counts",
                Signs { kubelet: unknown(25), silent: None, ..well() },
                moves(Why::NodeLost, 25),
            ),
            (
                "without a Lease, a recent Unknown is not enough",
                Signs { kubelet: unknown(5), silent: None, ..well() },
                Stay,
            ),
            ("no observation yet", Signs { silent: None, answers: false, ..well() }, Stay),
            (
                "the node is deleted",
                Signs { kubelet: Kubelet::Gone, silent: None, ..well() },
                moves(Why::NodeGone, 0),
            ),
            (
                "the node has the out-of-service taint",
                Signs { kubelet: Kubelet::OutOfService, ..well() },
                moves(Why::NodeLost, 0),
            ),
            (
                "a restarted server gets time to become ready",
                Signs { pod: unready(30), answers: false, ..well() },
                wait(90),
            ),
            (
                "a server that does not become ready moves",
                Signs { pod: unready(120), answers: false, ..well() },
                moves(Why::ServerDown, 120),
            ),
            (
                "not if it has never served or its target is down",
                Signs { pod: unready(120), answers: false, promising: false, ..well() },
                Stay,
            ),
            (
                "it moves if its node has no room for it",
                Signs { pod: unready(120), answers: false, promising: false, no_room: true, ..well() },
                moves(Why::ServerDown, 120),
            ),
            (
                "not soon after the previous move",
                Signs { pod: unready(200), answers: false, moved: Some(before(300)), ..well() },
                wait(300),
            ),
            (
                "again once the previous move is long enough ago",
                Signs { pod: unready(200), answers: false, moved: Some(before(601)), ..well() },
                moves(Why::ServerDown, 200),
            ),
            (
                "a silence that begins during the wait shortens it",
                Signs { pod: unready(30), answers: false, silent: silent(15), ..well() },
                wait(5),
            ),
            ("a cordoned node is left", Signs { cordoned: true, ..well() }, moves(Why::NodeCordoned, 0)),
            (
                "a drained node is left",
                Signs { cordoned: true, pod: PodSign::Ending, ..well() },
                moves(Why::NodeCordoned, 0),
            ),
            ("an administrator requests a move", Signs { asked: true, ..well() }, moves(Why::Asked, 0)),
            (
                "a requested move with a terminating pod needs nothing more",
                Signs { asked: true, pod: PodSign::Ending, ..well() },
                Stay,
            ),
            (
                "node loss takes precedence over planned moves",
                Signs { asked: true, cordoned: true, silent: silent(40), ..well() },
                moves(Why::NodeLost, 40),
            ),
            (
                "takeovers are paused: a silent node is not left",
                Signs { silent: silent(60), paused: true, ..well() },
                Decision::Paused(Why::NodeLost),
            ),
            (
                "takeovers are paused: an Unknown node is not left",
                Signs { kubelet: unknown(60), silent: None, paused: true, ..well() },
                Decision::Paused(Why::NodeLost),
            ),
            (
                "takeovers are paused: a deleted node is not left (clouds delete unreachable nodes)",
                Signs { kubelet: Kubelet::Gone, silent: None, paused: true, ..well() },
                Decision::Paused(Why::NodeGone),
            ),
            (
                "the out-of-service taint overrides the pause",
                Signs { kubelet: Kubelet::OutOfService, silent: silent(60), paused: true, ..well() },
                moves(Why::NodeLost, 0),
            ),
            (
                "after a partition, unready pods are waited for",
                Signs { pod: unready(600), answers: false, paused: true, ..well() },
                Decision::Paused(Why::ServerDown),
            ),
            (
                "planned moves continue during the pause",
                Signs { asked: true, paused: true, ..well() },
                moves(Why::Asked, 0),
            ),
            (
                "a terminating pod is recreated on its node",
                Signs { pod: PodSign::Ending, answers: false, ..well() },
                Stay,
            ),
        ];
        for (what, signs, expected) in table {
            assert_eq!(decide(&signs, RULE), expected, "{what}");
        }
    }

    #[test]
    fn disabled_takeover_still_performs_requested_moves() {
        let off = Rule { enabled: false, ..RULE };
        let lost = Signs { silent: Some(Duration::from_secs(99)), ..well() };
        assert_eq!(decide(&lost, off), Decision::Stay);
        assert_eq!(decide(&Signs { kubelet: Kubelet::Gone, ..well() }, off), Decision::Stay);
        let down = Signs { pod: PodSign::Unready { since: before(999) }, answers: false, ..well() };
        assert_eq!(decide(&down, off), Decision::Stay);
        assert_eq!(decide(&Signs { asked: true, ..well() }, off), moves(Why::Asked, 0));
    }

    #[test]
    fn kubelet_and_pod_states_are_derived_from_kubernetes_objects() {
        let node = |value: serde_json::Value| serde_json::from_value::<Node>(value).expect("a Node");
        let with = |status: &str| {
            node(serde_json::json!({ "status": { "conditions": [{ "type": "Ready", "status": status,
                "lastTransitionTime": "2026-01-01T00:00:00Z" }] } }))
        };
        let at = "2026-01-01T00:00:00Z".parse().expect("a moment");
        assert_eq!(Kubelet::of(None), Kubelet::Gone);
        assert_eq!(Kubelet::of(Some(&with("True"))), Kubelet::Ready);
        assert_eq!(Kubelet::of(Some(&with("False"))), Kubelet::NotReady { since: at });
        assert_eq!(Kubelet::of(Some(&with("Unknown"))), Kubelet::Unknown { since: at });
        assert_eq!(Kubelet::of(Some(&node(serde_json::json!({})))), Kubelet::Ready);
        let off =
            serde_json::json!({ "spec": { "taints": [{ "key": OUT_OF_SERVICE, "effect": "NoExecute" }] } });
        assert_eq!(Kubelet::of(Some(&node(off))), Kubelet::OutOfService);
        let pod = |value: serde_json::Value| serde_json::from_value::<Pod>(value).expect("a Pod");
        assert_eq!(PodSign::of(None), PodSign::None);
        let new = pod(serde_json::json!({ "metadata": { "creationTimestamp": "2026-01-01T00:00:00Z" } }));
        assert_eq!(PodSign::of(Some(&new)), PodSign::Unready { since: at });
    }
}
