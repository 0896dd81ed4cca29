//! One timed run: a thread for each connection, all of them at work for the same time.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};

use super::connection::Connection;
use super::plan::Plan;
use super::pump::Tally;
use super::target::Target;
use super::work::Part;

/// What the client did and saw.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    pub(crate) tally: Tally,
    /// From the first request to the last answer.
    pub(crate) seconds: f64,
    /// User and system time of this process.
    pub(crate) cpu_seconds: f64,
}

/// Runs the workload once. `look` is called right before the first request and right after the last answer, while all
/// connections exist: what it sees of the server contains neither their beginning nor their end.
pub(crate) fn run<T>(
    target: &Target,
    plan: &Plan,
    round: u32,
    mut look: impl FnMut() -> Result<T>,
) -> Result<(T, Measured, T)> {
    let connections = target.connect_all(plan)?;
    std::thread::scope(|scope| {
        let (report, reports) = channel();
        let mut starts = Vec::new();
        for (index, mut connection) in connections.into_iter().enumerate() {
            let (start, started) = channel();
            let report = report.clone();
            scope.spawn(move || {
                if let Err(error) = work(&mut connection, plan, index, round, &report, &started) {
                    // If nobody listens, another connection has failed before.
                    let _ = report.send(Err(error));
                }
            });
            starts.push(start);
        }
        // The threads' ends alone keep the channel open.
        drop(report);
        collect(&reports, plan.connections)?;
        let before = look()?;
        let (cpu, began) = (cpu_seconds(), Instant::now());
        let until = began + Duration::from_secs_f64(plan.seconds);
        for start in &starts {
            start.send(until).context("a connection has ended")?;
        }
        let tally = collect(&reports, plan.connections)?;
        ensure!(tally.operations > 0, "no operation was begun within {} s", plan.seconds);
        let measured =
            Measured { tally, seconds: began.elapsed().as_secs_f64(), cpu_seconds: cpu_seconds() - cpu };
        let after = look()?;
        Ok((before, measured, after))
    })
}

/// One report of each connection.
fn collect(reports: &Receiver<Result<Tally>>, connections: usize) -> Result<Tally> {
    let mut all = Tally::default();
    for _ in 0..connections {
        all.merge(&reports.recv().context("a connection's thread has ended")??);
    }
    Ok(all)
}

/// Reports twice: when it is ready, and when the time is over. Stays connected until the other end of `started` is gone.
fn work(
    connection: &mut Connection,
    plan: &Plan,
    index: usize,
    round: u32,
    report: &Sender<Result<Tally>>,
    started: &Receiver<Instant>,
) -> Result<()> {
    let mut part = Part::prepare(connection, plan, index, round)?;
    if report.send(Ok(Tally::default())).is_err() {
        return Ok(());
    }
    let Ok(until) = started.recv() else { return Ok(()) };
    let tally = part.run(connection, plan.depth, until)?;
    if report.send(Ok(tally)).is_ok() {
        let _ = started.recv();
    }
    Ok(())
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
