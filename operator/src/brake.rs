//! Decides from the Leases of the nodes whether takeovers pause. Pure.
//!
//! A single silent node is most likely dead. Many nodes that fall silent together are most likely alive but cut off from the
//! control plane: taking them all over would restart every server at once, and again when the partition heals. So takeovers
//! that no person has requested pause while more than half of the observed nodes are silent, and while the API server itself
//! is in trouble. They stay paused for a while after that, because the kubelets do not all reconnect at the same moment.

use std::time::{Duration, Instant};

use crate::limits::{API_SERVER_SETTLE, LEASE_QUIET, STORM_NODES_MIN, STORM_SETTLE, STORM_WINDOW};

/// State of a node, derived from its Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// How long the Lease has been observed without a change.
    pub silent: Duration,
    /// Whether the Lease has changed since observation began: if so, a node that is not silent is alive, and not merely new
    /// to the operator.
    pub proven: bool,
}

impl Sight {
    /// The kubelet has missed a renewal.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.silent >= LEASE_QUIET
    }

    /// The kubelet is certainly alive.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.proven && !self.is_quiet()
    }
}

/// The set of nodes that was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Nodes that can run instances of the cluster.
    Cluster,
    /// All observed nodes.
    All,
}

/// Why takeovers pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Too many nodes are silent at once.
    ManyNodesSilent {
        /// The set of nodes.
        scope: Scope,
        /// Number of silent nodes.
        silent: usize,
        /// Number of silent and live nodes.
        of: usize,
    },
    /// The API server did not respond, or rejected the operator's own renewal, so kubelets cannot renew either.
    ApiServerUnreachable,
}

impl Cause {
    /// The cause in CamelCase.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ManyNodesSilent { .. } => "ManyNodesSilent",
            Self::ApiServerUnreachable => "ApiServerUnreachable",
        }
    }

    /// How long takeovers pause after the cause was last seen.
    fn settle(self) -> Duration {
        match self {
            Self::ManyNodesSilent { .. } => STORM_SETTLE,
            Self::ApiServerUnreachable => API_SERVER_SETTLE,
        }
    }
}

/// A pause of takeovers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Why.
    pub cause: Cause,
    /// Whether the cause is over and the nodes are given time to recover.
    pub settling: bool,
}

impl Pause {
    /// Describes the pause in a sentence without elapsed seconds, because it is written to the status.
    #[must_use]
    pub fn message(&self) -> String {
        let cause = match self.cause {
            Cause::ManyNodesSilent { scope, silent, of } => {
                let which = match scope {
                    Scope::Cluster => "nodes that can run instances of this cluster",
                    Scope::All => "observed nodes",
                };
                format!(
                    "{silent} of {of} {which} do not renew their Leases: they may be alive but cut off from the control plane"
                )
            }
            Cause::ApiServerUnreachable => {
                "the API server did not answer, or did not accept the renewal of the operator's own Lease"
                    .to_owned()
            }
        };
        if self.settling {
            format!(
                "{cause}; this has ended, and the nodes have {} s to recover",
                self.cause.settle().as_secs()
            )
        } else {
            cause
        }
    }
}

/// Detects a storm: more than one node has fallen silent within one window, and these nodes outnumber the live ones. Nodes
/// that have only just come under observation count as neither. Nodes that fell silent at other times do not count together:
/// a node that has been off for days says nothing about the control plane.
#[must_use]
pub fn storm(scope: Scope, nodes: impl IntoIterator<Item = Sight>) -> Option<Cause> {
    let (mut silent, mut alive) = (Vec::new(), 0);
    for sight in nodes {
        if sight.is_quiet() {
            silent.push(sight.silent);
        } else if sight.is_fresh() {
            alive += 1;
        }
    }
    let together =
        |first: &Duration| silent.iter().filter(|s| *s >= first && **s - *first <= STORM_WINDOW).count();
    let most = silent.iter().map(together).max().unwrap_or_default();
    let cause = Cause::ManyNodesSilent { scope, silent: most, of: most + alive };
    (most >= STORM_NODES_MIN && most > alive).then_some(cause)
}

/// The last cause, and when it was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Brake {
    last: Option<(Cause, Instant)>,
}

impl Brake {
    /// Records the result of a round of observations.
    pub fn saw(&mut self, cause: Option<Cause>, at: Instant) {
        if let Some(cause) = cause {
            self.last = Some((cause, at));
        }
    }

    /// Returns the pause that is in effect now, if any. `looked` is the time of the last round.
    #[must_use]
    pub fn pause(&self, looked: Instant, now: Instant) -> Option<Pause> {
        let (cause, seen) = self.last?;
        let ago = now.saturating_duration_since(seen);
        (ago < cause.settle()).then_some(Pause { cause, settling: seen < looked })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{LEASE_INTERVAL, RENEWAL_MAX};
    use forebay_api::fabric::TAKEOVER_AFTER_MIN;

    fn sight(silent: u64) -> Sight {
        Sight { silent: Duration::from_secs(silent), proven: true }
    }

    fn new(silent: u64) -> Sight {
        Sight { proven: false, ..sight(silent) }
    }

    #[test]
    fn storm_detection_follows_the_decision_table() {
        type Row = (&'static str, Vec<Sight>, Option<(usize, usize)>);
        let table: Vec<Row> = vec![
            ("nothing is observed", vec![], None),
            ("all live", vec![sight(0), sight(3), sight(9)], None),
            ("one node of two is lost", vec![sight(40), sight(0)], None),
            ("the only node is lost", vec![sight(40)], None),
            ("one node of four is silent", vec![sight(40), sight(0), sight(3), sight(3)], None),
            (
                "two nodes of four: a double failure is possible",
                vec![sight(40), sight(40), sight(0), sight(0)],
                None,
            ),
            ("two nodes of three are silent", vec![sight(40), sight(30), sight(0)], Some((2, 3))),
            (
                "all workers are silent, the control-plane node is live",
                vec![sight(31), sight(25), sight(28), sight(1)],
                Some((3, 4)),
            ),
            ("all nodes are silent", vec![sight(31), sight(25)], Some((2, 2))),
            (
                "the other nodes have missed one renewal only: they renewed their Leases later than the first",
                vec![sight(30), sight(17), sight(12), sight(0)],
                Some((3, 4)),
            ),
            ("newly observed nodes are not counted", vec![sight(40), new(3), new(3)], None),
            (
                "newly observed nodes do not hide two silent nodes of two",
                vec![sight(40), sight(40), new(0), new(0)],
                Some((2, 2)),
            ),
            (
                "two nodes silent for hours, and a third one",
                vec![sight(9000), sight(9000), sight(40), sight(0)],
                Some((2, 3)),
            ),
            (
                "the nodes fell silent at different times",
                vec![sight(9000), sight(4000), sight(40), sight(0)],
                None,
            ),
            (
                "a storm that lasts for an hour",
                vec![sight(3600), sight(3630), sight(3610), sight(0)],
                Some((3, 4)),
            ),
            (
                "a newly observed node that stays silent is counted",
                vec![sight(40), new(40), sight(0)],
                Some((2, 3)),
            ),
        ];
        for (what, nodes, expected) in table {
            let expected =
                expected.map(|(silent, of)| Cause::ManyNodesSilent { scope: Scope::Cluster, silent, of });
            assert_eq!(storm(Scope::Cluster, nodes), expected, "{what}");
        }
    }

    /// Kubelets renew at different moments. When the first of them exceeds the configured silence, all nodes that were cut
    /// off with it must already count as silent, and no live node can.
    #[test]
    fn shortest_takeover_delay_outlasts_a_lease_renewal_of_the_other_nodes() {
        let interval = LEASE_INTERVAL;
        // The longest silence of a live node: Leases are read at this interval, and the read that finds a change counts from
        // zero.
        let looks = RENEWAL_MAX.as_secs_f64() / interval.as_secs_f64();
        let alive = interval.mul_f64(looks.ceil() - 1.0);
        assert!(alive < LEASE_QUIET, "{alive:?}");
        let least = Duration::from_secs(TAKEOVER_AFTER_MIN.into());
        assert!(least >= LEASE_QUIET + RENEWAL_MAX + interval, "{least:?}");
        assert!(least > RENEWAL_MAX * 2);
    }

    #[test]
    fn takeovers_stay_paused_for_a_settling_time_after_a_storm() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let cause = storm(Scope::All, [sight(40), sight(40)]).expect("a storm");
        let mut brake = Brake::default();
        assert_eq!(brake.pause(at(0), at(0)), None);
        brake.saw(Some(cause), at(10));
        assert_eq!(brake.pause(at(10), at(11)), Some(Pause { cause, settling: false }));
        // The partition heals: the kubelets renew one after another.
        brake.saw(None, at(13));
        assert_eq!(brake.pause(at(13), at(14)), Some(Pause { cause, settling: true }));
        let over = 10 + STORM_SETTLE.as_secs();
        assert!(brake.pause(at(over - 1), at(over - 1)).is_some());
        assert_eq!(brake.pause(at(over), at(over)), None);
        // The partition recurs, so the time starts again.
        brake.saw(Some(cause), at(over + 5));
        assert!(brake.pause(at(over + 5), at(over + 6)).is_some_and(|p| !p.settling));
    }
}
