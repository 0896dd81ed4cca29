//! Keeps operations in flight on one connection. An operation is one request, or several sequential requests.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::connection::{Answer, Connection};
use super::histogram::Histogram;
use super::request::Request;

/// The source of operations.
pub(crate) trait Work {
    /// Builds the first request of the slot's next operation. Returns false if there is none.
    fn begin(&mut self, slot: usize, request: &mut Request) -> Result<bool>;

    /// Processes the response to the slot's request, and builds the next request unless the operation is complete.
    fn answered(&mut self, slot: usize, answer: &Answer<'_>, request: &mut Request) -> Result<Step>;

    /// Whether the payload of READs is used.
    fn keeps_payload(&self) -> bool {
        false
    }

    /// Whether other connections are currently writing a burst: latencies of operations that overlap a burst are counted
    /// separately.
    fn is_during_burst(&self) -> bool {
        false
    }
}

/// The next step of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Send the request that was built.
    Next,
    /// It is complete, and has transferred this many bytes of payload.
    Done(u64),
}

/// Results so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tally {
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
    /// Of operations that did not overlap a burst.
    pub(crate) latency: Histogram,
    /// Of operations that overlapped one.
    pub(crate) burst_latency: Histogram,
    /// Bytes that bursts wrote, and for how long, summed over their connections.
    pub(crate) burst_bytes: u64,
    pub(crate) burst_seconds: f64,
    /// Number of connections that replaced others.
    pub(crate) replaced: u64,
}

impl Tally {
    /// Counts an operation that took from `began` until now.
    pub(crate) fn record(&mut self, began: Instant, bytes: u64) {
        self.record_as(began, bytes, false);
    }

    /// Same, for an operation that did or did not overlap a burst.
    pub(crate) fn record_as(&mut self, began: Instant, bytes: u64, met_burst: bool) {
        self.operations += 1;
        self.bytes += bytes;
        let latency = if met_burst { &mut self.burst_latency } else { &mut self.latency };
        latency.record(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds the results of another connection.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.latency.merge(&other.latency);
        self.burst_latency.merge(&other.burst_latency);
        self.burst_bytes += other.burst_bytes;
        self.burst_seconds += other.burst_seconds;
        self.replaced += other.replaced;
    }
}

struct Slot {
    request: Request,
    began: Instant,
    met_burst: bool,
}

/// Runs operations, `depth` at a time, until the work has no more or the time is over, and waits until they end.
pub(crate) fn pump(
    connection: &mut Connection,
    work: &mut dyn Work,
    depth: usize,
    until: Option<Instant>,
) -> Result<Tally> {
    let mut tally = Tally::default();
    let mut slots: Vec<Slot> = (0..depth)
        .map(|_| Slot { request: Request::default(), began: Instant::now(), met_burst: false })
        .collect();
    let mut idle: Vec<usize> = (0..depth).rev().collect();
    let mut ready = VecDeque::new();
    let mut sent: VecDeque<(u64, usize)> = VecDeque::with_capacity(depth);
    let mut has_more = true;
    loop {
        while has_more && let Some(&slot) = idle.last() {
            let now = Instant::now();
            has_more = until.is_none_or(|until| now < until) && work.begin(slot, &mut slots[slot].request)?;
            if has_more {
                slots[slot].began = now;
                slots[slot].met_burst = work.is_during_burst();
                idle.pop();
                ready.push_back(slot);
            }
        }
        while let Some(&slot) = ready.front() {
            let Some(id) = connection.send(&mut slots[slot].request)? else { break };
            sent.push_back((id, slot));
            ready.pop_front();
        }
        connection.flush()?;
        if sent.is_empty() {
            ensure!(ready.is_empty(), "the server grants too few credits for this size of request");
            return Ok(tally);
        }
        loop {
            let answer = connection.receive(work.keeps_payload())?;
            let id = answer.header.message_id;
            // Responses usually arrive in order.
            let at = sent.iter().position(|(sent, _)| *sent == id).context("an answer to no request")?;
            let (_, slot) = sent.remove(at).context("it was just found")?;
            match work.answered(slot, &answer, &mut slots[slot].request)? {
                Step::Next => ready.push_back(slot),
                Step::Done(bytes) => {
                    let met_burst = slots[slot].met_burst || work.is_during_burst();
                    tally.record_as(slots[slot].began, bytes, met_burst);
                    idle.push(slot);
                }
            }
            if sent.is_empty() || !connection.has_answer() {
                break;
            }
        }
    }
}
