//! Short sessions: everything that a client does between connecting and disconnecting, with one small READ.

use std::time::Instant;

use anyhow::Result;

use super::idle;
use crate::load::client::Place;
use crate::load::plan::Plan;
use crate::load::pump::Tally;
use crate::load::target::Target;

/// One client that connects and disconnects repeatedly. The connection that the run itself opens stays idle.
pub(crate) struct Sessions {
    target: Target,
    plan: Plan,
}

impl Sessions {
    pub(crate) fn new(place: &Place<'_>) -> Self {
        Self { target: place.target.clone(), plan: place.plan.clone() }
    }

    /// Runs one session after the other. An operation is a whole session.
    pub(crate) fn run(&self, until: Instant) -> Result<Tally> {
        let mut tally = Tally::default();
        while Instant::now() < until {
            let began = Instant::now();
            idle::connect(&self.target, &self.plan)?.log_off()?;
            tally.record(began, 0);
        }
        Ok(tally)
    }
}
