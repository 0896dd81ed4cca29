//! The workloads, each as the work of one connection.

mod checkpoint;
mod create;
mod files;
pub(crate) mod idle;
mod list;
mod mixed;
mod sessions;
mod stat;
mod stream;
mod tensors;

use std::time::Instant;

use anyhow::Result;

use super::client::Place;
use super::connection::{Answer, Connection};
use super::plan::{Plan, Workload};
use super::pump::{Step, Tally, Work, pump};
use super::request::Request;

/// The work of one connection, ready to start.
pub(crate) struct Part {
    what: What,
}

enum What {
    /// Operations that do not depend on each other.
    Pumped(Box<dyn Work>),
    Checkpoint(checkpoint::Rank),
    Training(Box<mixed::Training>),
    Burst(Box<mixed::Burst>),
    Sessions(Box<sessions::Sessions>),
}

impl Part {
    /// Opens what the connection needs. Differs between runs, but is the same for every server.
    pub(crate) fn prepare(connection: &mut Connection, place: &Place<'_>) -> Result<Self> {
        let &Place { plan, index, round, .. } = place;
        let random = Random::new(u64::from(round) << 32 | index as u64);
        let what = match plan.workload {
            Workload::Read | Workload::Write | Workload::RandRead | Workload::RandWrite => {
                What::Pumped(Box::new(stream::Stream::prepare(connection, plan, index, random)?))
            }
            Workload::Safetensors => {
                What::Pumped(Box::new(tensors::Tensors::prepare(connection, plan, random)?))
            }
            Workload::Retinanet | Workload::Unet3d => What::Pumped(Box::new(files::Files::new(plan, random))),
            Workload::Create => What::Pumped(Box::new(create::Creations::new(plan, index, round))),
            Workload::Stat => What::Pumped(Box::new(stat::Stats::new(plan, random))),
            Workload::List => What::Pumped(Box::new(list::Listings::new(plan))),
            Workload::Checkpoint => What::Checkpoint(checkpoint::Rank::new(plan, index)),
            Workload::Mixed if index < plan.connections => {
                What::Training(Box::new(mixed::Training::prepare(connection, place, random)?))
            }
            Workload::Mixed => What::Burst(Box::new(mixed::Burst::new(place)?)),
            Workload::Sessions | Workload::Idle => What::Sessions(Box::new(sessions::Sessions::new(place))),
        };
        Ok(Self { what })
    }

    /// Works until the time is over, or all operations of the plan are complete.
    pub(crate) fn run(&mut self, connection: &mut Connection, plan: &Plan, until: Instant) -> Result<Tally> {
        let depth = plan.depth;
        match &mut self.what {
            What::Pumped(work) => {
                let mut limited = Limited { work: &mut **work, left: plan.operations.unwrap_or(u64::MAX) };
                pump(connection, &mut limited, depth, Some(until))
            }
            What::Checkpoint(rank) => rank.run(connection, depth, until),
            What::Training(training) => training.run(connection, depth, until),
            What::Burst(burst) => burst.run(connection, depth, until),
            What::Sessions(sessions) => sessions.run(until),
        }
    }
}

/// Work that is limited to a number of operations.
struct Limited<'a> {
    work: &'a mut dyn Work,
    left: u64,
}

impl Work for Limited<'_> {
    fn begin(&mut self, slot: usize, request: &mut Request) -> Result<bool> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(false) };
        self.left = left;
        self.work.begin(slot, request)
    }

    fn answered(&mut self, slot: usize, answer: &Answer<'_>, request: &mut Request) -> Result<Step> {
        self.work.answered(slot, answer, request)
    }

    fn keeps_payload(&self) -> bool {
        self.work.keeps_payload()
    }

    fn is_during_burst(&self) -> bool {
        self.work.is_during_burst()
    }
}

/// Waits until this time.
fn wait_until(time: Instant) {
    std::thread::sleep(time.saturating_duration_since(Instant::now()));
}

/// Pseudorandom numbers, the same for the same seed: xorshift64*.
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number in `0..end`.
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = u128::from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)) * u128::from(end);
        (high >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_cover_the_whole_range_below_the_bound() {
        let mut random = Random::new(0);
        let mut seen = [0; 10];
        (0..1000).for_each(|_| seen[random.below(10) as usize] += 1);
        assert!(seen.iter().all(|count| (50..200).contains(count)), "{seen:?}");
        assert_ne!(Random::new(1).below(1 << 40), Random::new(2).below(1 << 40));
    }
}
