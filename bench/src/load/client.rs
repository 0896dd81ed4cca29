//! One timed run: a thread for each connection, all active for the same time.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};

use super::connection::Connection;
use super::plan::{Plan, Workload};
use super::pump::Tally;
use super::target::Target;
use super::work::{Part, idle};

/// The client's work and measurements.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    pub(crate) tally: Tally,
    /// From the first request to the last response.
    pub(crate) seconds: f64,
    /// User and system time of this process.
    pub(crate) cpu_seconds: f64,
}

/// Runs the workload once. `look` is called right before the first request and right after the last response, while all
/// connections exist: its view of the server includes neither their setup nor their teardown.
pub(crate) fn run<T>(
    target: &Target,
    plan: &Plan,
    round: u32,
    mut look: impl FnMut() -> Result<T>,
) -> Result<(T, Measured, T)> {
    if plan.workload == Workload::Idle {
        return run_idle(target, plan, look);
    }
    let connections = target.connect_all(plan)?;
    let count = connections.len();
    let bursting = Arc::new(AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let (report, reports) = channel();
        let mut starts = Vec::new();
        for (index, mut connection) in connections.into_iter().enumerate() {
            let (start, started) = channel();
            let report = report.clone();
            let place = Place { target, plan, index, round, bursting: Arc::clone(&bursting) };
            scope.spawn(move || {
                if let Err(error) = work(&mut connection, &place, &report, &started) {
                    // If there is no receiver any more, another connection has failed before.
                    let _ = report.send(Err(error));
                }
            });
            starts.push(start);
        }
        // From now on, only the threads' senders keep the channel open.
        drop(report);
        collect(&reports, count)?;
        let before = look()?;
        let (cpu, began) = (cpu_seconds(), Instant::now());
        let until = began + Duration::from_secs_f64(plan.seconds);
        for start in &starts {
            start.send(until).context("a connection has ended")?;
        }
        let tally = collect(&reports, count)?;
        ensure!(tally.operations > 0, "no operation was begun within {} s", plan.seconds);
        let measured =
            Measured { tally, seconds: began.elapsed().as_secs_f64(), cpu_seconds: cpu_seconds() - cpu };
        let after = look()?;
        Ok((before, measured, after))
    })
}

/// Runs idle connections. Unlike in other workloads, the first look is taken before they exist.
fn run_idle<T>(
    target: &Target,
    plan: &Plan,
    mut look: impl FnMut() -> Result<T>,
) -> Result<(T, Measured, T)> {
    let before = look()?;
    let (cpu, began) = (cpu_seconds(), Instant::now());
    let mut tally = Tally::default();
    let mut connections = Vec::new();
    for number in 0..plan.connections {
        let began = Instant::now();
        let connection = idle::connect(target, plan);
        connections.push(connection.with_context(|| format!("connection {}", number + 1))?);
        tally.record(began, 0);
    }
    let measured =
        Measured { tally, seconds: began.elapsed().as_secs_f64(), cpu_seconds: cpu_seconds() - cpu };
    let after = look()?;
    Ok((before, measured, after))
}

/// The role of one connection in a run.
pub(crate) struct Place<'a> {
    pub(crate) target: &'a Target,
    pub(crate) plan: &'a Plan,
    /// The connection's number.
    pub(crate) index: usize,
    /// The run's number.
    pub(crate) round: u32,
    /// Number of connections that are currently writing a burst.
    pub(crate) bursting: Arc<AtomicUsize>,
}

/// Collects one report from each connection.
fn collect(reports: &Receiver<Result<Tally>>, connections: usize) -> Result<Tally> {
    let mut all = Tally::default();
    for _ in 0..connections {
        all.merge(&reports.recv().context("a connection's thread has ended")??);
    }
    Ok(all)
}

/// Reports twice: when it is ready, and when the time is over. Stays connected until the other end of `started` is dropped.
fn work(
    connection: &mut Connection,
    place: &Place<'_>,
    report: &Sender<Result<Tally>>,
    started: &Receiver<Instant>,
) -> Result<()> {
    let mut part = Part::prepare(connection, place)?;
    if report.send(Ok(Tally::default())).is_err() {
        return Ok(());
    }
    let Ok(until) = started.recv() else { return Ok(()) };
    let tally = part.run(connection, place.plan, until)?;
    if report.send(Ok(tally)).is_ok() {
        let _ = started.recv();
    }
    Ok(())
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
