//! Training reads while checkpoints are written: the effect of a burst of WRITEs on the latency of concurrent READs. In a
//! soak, connections are replaced over time, and everything that is read is compared.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use forebay_smb::ids::FileId;
use forebay_smb::wire::read;

use super::{Random, checkpoint, wait_until};
use crate::load::client::Place;
use crate::load::connection::{Answer, Connection};
use crate::load::content;
use crate::load::plan::{Mix, Plan, checkpoint_name};
use crate::load::pump::{Step, Tally, Work, pump};
use crate::load::request::{Opening, Request};
use crate::load::target::Target;

/// One connection that reads blocks at random offsets.
pub(crate) struct Training {
    target: Target,
    /// Average lifetime of a connection in seconds.
    churn: Option<f64>,
    /// Separate generator for lifetimes: the offsets must not depend on them.
    lifetimes: Random,
    reads: Reads,
}

impl Training {
    /// Opens the files.
    pub(crate) fn prepare(connection: &mut Connection, place: &Place<'_>, random: Random) -> Result<Self> {
        let mix = mix(place.plan)?;
        let reads = Reads {
            handles: open(connection, place.plan)?,
            plan: place.plan.clone(),
            random: random.clone(),
            bursting: Arc::clone(&place.bursting),
            verify: mix.verify,
            slots: vec![(0, 0); place.plan.depth],
        };
        Ok(Self { target: place.target.clone(), churn: mix.churn_seconds, lifetimes: random, reads })
    }

    /// Reads until the time is over. A connection that has reached its lifetime is replaced: every second one logs off
    /// before, the others just disconnect.
    pub(crate) fn run(&mut self, connection: &mut Connection, depth: usize, until: Instant) -> Result<Tally> {
        let mut tally = Tally::default();
        // The initial connections start at a random age.
        let mut share = self.lifetimes.below(1000) as f64 / 1000.0;
        loop {
            let end = match self.churn {
                Some(churn) => until.min(Instant::now() + Duration::from_secs_f64(churn * share)),
                None => until,
            };
            tally.merge(&pump(connection, &mut self.reads, depth, Some(end))?);
            if Instant::now() >= until {
                return Ok(tally);
            }
            if tally.replaced.is_multiple_of(2) {
                connection.log_off()?;
            }
            *connection = self.target.connect(&self.reads.plan).context("connect again")?;
            self.reads.handles = open(connection, &self.reads.plan)?;
            tally.replaced += 1;
            share = 0.5 + self.lifetimes.below(1000) as f64 / 1000.0;
        }
    }
}

fn mix(plan: &Plan) -> Result<&Mix> {
    plan.mix.as_ref().context("a mixed load says what it is mixed of")
}

fn open(connection: &mut Connection, plan: &Plan) -> Result<Vec<FileId>> {
    (0..plan.files)
        .map(|number| connection.create(&plan.file_name(number), number as u64, Opening::READ))
        .collect()
}

struct Reads {
    plan: Plan,
    handles: Vec<FileId>,
    random: Random,
    bursting: Arc<AtomicUsize>,
    verify: bool,
    /// For each slot: the requested file and offset.
    slots: Vec<(usize, u64)>,
}

impl Work for Reads {
    fn begin(&mut self, slot: usize, request: &mut Request) -> Result<bool> {
        let block = self.random.below(self.handles.len() as u64 * self.plan.blocks());
        let (file, offset) = self.plan.place(block);
        self.slots[slot] = (file, offset);
        request.set_read(self.handles[file], offset, u32::try_from(self.plan.io_bytes)?);
        Ok(true)
    }

    fn answered(&mut self, slot: usize, answer: &Answer<'_>, _: &mut Request) -> Result<Step> {
        answer.check("READ")?;
        let wanted = self.plan.io_bytes;
        ensure!(answer.read_bytes == wanted, "a READ of {wanted} B gave {}", answer.read_bytes);
        if self.verify {
            let (file, offset) = self.slots[slot];
            let data = read::Response::parse(answer.message)?.data(answer.message)?;
            ensure!(
                data == content::bytes(file as u64, offset, wanted),
                "the {wanted} B at {offset} of file {file} are not those that were written"
            );
        }
        Ok(Step::Done(wanted as u64))
    }

    fn keeps_payload(&self) -> bool {
        self.verify
    }

    fn is_during_burst(&self) -> bool {
        self.bursting.load(Ordering::Relaxed) > 0
    }
}

/// One connection that writes checkpoints in the middle third of each cycle.
pub(crate) struct Burst {
    rank: checkpoint::Rank,
    mix: Mix,
    duration: Duration,
    bursting: Arc<AtomicUsize>,
}

impl Burst {
    pub(crate) fn new(place: &Place<'_>) -> Result<Self> {
        let mix = mix(place.plan)?.clone();
        let name = checkpoint_name(place.index);
        Ok(Self {
            rank: checkpoint::Rank::with_sizes(name, mix.checkpoint_bytes, mix.write_bytes),
            mix,
            duration: Duration::from_secs_f64(place.plan.seconds),
            bursting: Arc::clone(&place.bursting),
        })
    }

    /// Counts the bytes that it writes. The operations of a mixed load are the reads.
    pub(crate) fn run(&mut self, connection: &mut Connection, depth: usize, until: Instant) -> Result<Tally> {
        let mut tally = Tally::default();
        let third = Duration::from_secs_f64(self.mix.cycle_seconds / 3.0);
        let mut cycle = until.checked_sub(self.duration).context("the run began after the machine")?;
        while cycle + third < until {
            wait_until(cycle + third);
            let end = (cycle + 2 * third).min(until);
            let began = Instant::now();
            self.bursting.fetch_add(1, Ordering::Relaxed);
            let mut bytes = 0;
            while Instant::now() < end {
                bytes = self.rank.save(connection, depth, Some(end))?;
                tally.burst_bytes += bytes;
            }
            self.bursting.fetch_sub(1, Ordering::Relaxed);
            tally.burst_seconds += began.elapsed().as_secs_f64();
            if self.mix.verify {
                self.rank.check(connection, bytes)?;
            }
            cycle += 3 * third;
        }
        Ok(tally)
    }
}
