//! Whether takeovers pause. Pure: decided from what the Leases of the nodes tell.
//!
//! One silent node is most likely dead. Many nodes that fall silent together are most likely alive, and cut off from the control
//! plane: to take all of them over would restart every server at once, and once more when the partition heals. So takeovers
//! that no person has requested pause while more than half of the observed nodes are silent, and while the API server itself is
//! in trouble; and for a while after that, because not every kubelet finds its way back in the same moment.

use std::time::{Duration, Instant};

use crate::limits::{API_SERVER_SETTLE, LEASE_QUIET, STORM_NODES_MIN, STORM_SETTLE, STORM_WINDOW};

/// What is known of one node by its Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// For how long the Lease has been seen not to change.
    pub silent: Duration,
    /// It was seen to change since looking began: what is not silent yet is alive, and not only new to us.
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

/// The cluster with the nodes that were counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those that can run instances of the cluster.
    Cluster,
    /// All that are observed.
    All,
}

/// Why takeovers pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Too many nodes are silent at once.
    ManyNodesSilent {
        /// The cluster with these nodes.
        scope: Scope,
        /// So many of them are silent ...
        silent: usize,
        /// ... of so many that are known.
        of: usize,
    },
    /// The API server did not answer, or did not take the operator's own renewal: then kubelets cannot renew, either.
    ApiServerUnreachable,
}

impl Cause {
    /// In CamelCase.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ManyNodesSilent { .. } => "ManyNodesSilent",
            Self::ApiServerUnreachable => "ApiServerUnreachable",
        }
    }

    /// How long takeovers pause after it was last seen.
    fn settle(self) -> Duration {
        match self {
            Self::ManyNodesSilent { .. } => STORM_SETTLE,
            Self::ApiServerUnreachable => API_SERVER_SETTLE,
        }
    }
}

/// Takeovers pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Why.
    pub cause: Cause,
    /// The cause is over, and the nodes are given time to come back.
    pub settling: bool,
}

impl Pause {
    /// In a sentence without anything that counts seconds: it goes into the status.
    #[must_use]
    pub fn message(&self) -> String {
        let cause = match self.cause {
            Cause::ManyNodesSilent { scope, silent, of } => {
                let which = match scope {
                    Scope::Cluster => "nodes that can run instances of this cluster",
                    Scope::All => "observed nodes",
                };
                format!(
                    "{silent} of {of} {which} do not renew their Leases: they may be cut off from the control plane and alive"
                )
            }
            Cause::ApiServerUnreachable => {
                "the API server did not answer or did not take the operator's own renewal".to_owned()
            }
        };
        if self.settling {
            format!(
                "{cause}; that is over, and the nodes are given {} s to come back",
                self.cause.settle().as_secs()
            )
        } else {
            cause
        }
    }
}

/// The rule: more than one node has fallen silent within one window, and they are more than those that live. Nodes that were just begun
/// to be looked at are neither. Nodes that fell silent at another time are another matter: what has been off for days says
/// nothing of the control plane.
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
    /// What a look found.
    pub fn saw(&mut self, cause: Option<Cause>, at: Instant) {
        if let Some(cause) = cause {
            self.last = Some((cause, at));
        }
    }

    /// Whether takeovers pause at this moment, where the last look was at `looked`.
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
    fn the_table() {
        type Row = (&'static str, Vec<Sight>, Option<(usize, usize)>);
        let table: Vec<Row> = vec![
            ("nothing is observed", vec![], None),
            ("all live", vec![sight(0), sight(3), sight(9)], None),
            ("one node of two is lost", vec![sight(40), sight(0)], None),
            ("the only node is lost", vec![sight(40)], None),
            ("one of many", vec![sight(40), sight(0), sight(3), sight(3)], None),
            ("two of four may both be dead", vec![sight(40), sight(40), sight(0), sight(0)], None),
            ("two of three", vec![sight(40), sight(30), sight(0)], Some((2, 3))),
            (
                "all workers, and the node of the control plane lives",
                vec![sight(31), sight(25), sight(28), sight(1)],
                Some((3, 4)),
            ),
            ("all of them", vec![sight(31), sight(25)], Some((2, 2))),
            (
                "the others have missed one renewal only: their silence began as much later as their last renewal was",
                vec![sight(30), sight(17), sight(12), sight(0)],
                Some((3, 4)),
            ),
            ("what was just begun to be looked at says nothing", vec![sight(40), new(3), new(3)], None),
            (
                "neither does it make two of two out of two",
                vec![sight(40), sight(40), new(0), new(0)],
                Some((2, 2)),
            ),
            (
                "two that are off for hours, and one more",
                vec![sight(9000), sight(9000), sight(40), sight(0)],
                Some((2, 3)),
            ),
            ("each of them since another time", vec![sight(9000), sight(4000), sight(40), sight(0)], None),
            (
                "a storm of an hour is one",
                vec![sight(3600), sight(3630), sight(3610), sight(0)],
                Some((3, 4)),
            ),
            ("a new one that stays silent is silent", vec![sight(40), new(40), sight(0)], Some((2, 3))),
        ];
        for (what, nodes, expected) in table {
            let expected =
                expected.map(|(silent, of)| Cause::ManyNodesSilent { scope: Scope::Cluster, silent, of });
            assert_eq!(storm(Scope::Cluster, nodes), expected, "{what}");
        }
    }

    /// Kubelets renew at different moments. When the first of them is silent for as long as is configured, all that were cut off
    /// with it have to count as silent, and none that lives may.
    #[test]
    fn the_shortest_patience_outlasts_a_renewal_of_the_others() {
        let interval = LEASE_INTERVAL;
        // Seen silent for this long at most: it is looked at that often, and the look that sees the change counts from zero.
        let looks = RENEWAL_MAX.as_secs_f64() / interval.as_secs_f64();
        let alive = interval.mul_f64(looks.ceil() - 1.0);
        assert!(alive < LEASE_QUIET, "{alive:?}");
        let least = Duration::from_secs(TAKEOVER_AFTER_MIN.into());
        assert!(least >= LEASE_QUIET + RENEWAL_MAX + interval, "{least:?}");
        assert!(least > RENEWAL_MAX * 2);
    }

    #[test]
    fn takeovers_pause_until_the_nodes_have_had_time_to_come_back() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let cause = storm(Scope::All, [sight(40), sight(40)]).expect("a storm");
        let mut brake = Brake::default();
        assert_eq!(brake.pause(at(0), at(0)), None);
        brake.saw(Some(cause), at(10));
        assert_eq!(brake.pause(at(10), at(11)), Some(Pause { cause, settling: false }));
        // It heals: one kubelet after the other renews.
        brake.saw(None, at(13));
        assert_eq!(brake.pause(at(13), at(14)), Some(Pause { cause, settling: true }));
        let over = 10 + STORM_SETTLE.as_secs();
        assert!(brake.pause(at(over - 1), at(over - 1)).is_some());
        assert_eq!(brake.pause(at(over), at(over)), None);
        // It begins again: so does the time.
        brake.saw(Some(cause), at(over + 5));
        assert!(brake.pause(at(over + 5), at(over + 6)).is_some_and(|p| !p.settling));
    }
}
