//! `forebay-bench load`: our own client, lean enough that the server determines the result, against each server in turn.

mod arguments;
mod client;
mod cold;
mod connection;
mod content;
mod credits;
pub(crate) mod figure;
mod files;
mod floor;
mod handshake;
mod histogram;
mod intake;
mod plan;
mod pump;
mod report;
pub(crate) mod request;
mod target;
mod work;

pub(crate) use arguments::{Contender, LoadArguments, parse_seconds};
pub(crate) use floor::{Means, serve as serve_floor};

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_e2e::cache::Cache;
use forebay_e2e::progress::say;

use crate::forebay::BURST_SHARE;
use crate::place::{Place, SHARE, Server, USER};
use crate::{cpu, forebay, machine, memory, samba};
use handshake::Account;
use target::Target;

pub(crate) use handshake::Security;
pub(crate) use plan::{BURST_WRITE_BYTES, Mix, Plan, Workload};
pub(crate) use report::{Report, Series};
use report::{Run, Used};

/// How to measure a plan, and on which servers.
pub(crate) struct Setup<'a> {
    /// How often each server is measured.
    pub(crate) runs: u32,
    pub(crate) servers: &'a [Contender],
    /// forebay-server.
    pub(crate) binary: &'a Path,
    /// A second forebay-server.
    pub(crate) other: Option<&'a Path>,
    pub(crate) server_option: &'a str,
    /// Folder of the servers' files.
    pub(crate) dir: &'a Path,
    /// Whether to evict the files from the page cache before each run.
    pub(crate) cold: bool,
}

/// A server to measure.
struct Entrant {
    name: String,
    target: Target,
    /// `None` if it is not ours.
    server: Option<Server>,
    runs: Vec<Run>,
}

/// Measures and reports.
pub(crate) fn run(arguments: &LoadArguments) -> Result<ExitCode> {
    let plan = arguments.plan()?;
    prepare(arguments.common.nice)?;
    let report = match arguments.foreign()? {
        Some((name, target)) => measure_foreign(name, target, &plan, arguments)?,
        None => compare(&arguments.setup(), &plan)?,
    };
    print!("{}", report.table());
    if let Some(path) = &arguments.common.json {
        report.write(path)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Sets the priority of this process, and raises its limit of descriptors to the maximum.
pub(crate) fn prepare(nice: i32) -> Result<()> {
    if nice != 0 {
        machine::set_priority(nice)?;
    }
    if cfg!(debug_assertions) {
        say("this is no release build: the client costs more than it should");
    }
    machine::raise_descriptors()
}

fn measure_foreign(name: String, target: Target, plan: &Plan, arguments: &LoadArguments) -> Result<Report> {
    let entrant = Entrant { name, target: target.clone(), server: None, runs: Vec::new() };
    let measured = measure_all(vec![entrant], plan, arguments.runs, &arguments.common.dir, || Ok(()));
    // Leave nothing behind on the server, if possible.
    let removed = files::remove(&target, plan).context("remove the files");
    measured.and_then(|report| removed.map(|()| report))
}

/// Starts the servers, and measures each of them in turn.
pub(crate) fn compare(setup: &Setup<'_>, plan: &Plan) -> Result<Report> {
    let place = Place::create(setup.dir)?;
    let mut entrants = Vec::new();
    for &who in setup.servers {
        if who.serves(plan.workload) {
            entrants.push(enter(who, setup, plan, &place)?);
        } else {
            say(format!("{} does not serve this workload and is left out", who.name()));
        }
    }
    if let Some(binary) = setup.other {
        entrants.push(ours("forebay-other", binary, setup, plan, &place, false)?);
    }
    // Data that one server has not written back yet must not slow down the next one.
    let folder = File::open(place.path())?;
    measure_all(entrants, plan, setup.runs, setup.dir, || {
        rustix::fs::syncfs(&folder)?;
        if setup.cold { cold::drop_pages(place.path()) } else { Ok(()) }
    })
}

/// Measures one server with several numbers of connections in turn. Returns a report for each.
pub(crate) fn compare_connections(
    setup: &Setup<'_>,
    plan: &Plan,
    connections: &[usize],
) -> Result<Vec<Report>> {
    let place = Place::create(setup.dir)?;
    let who = *setup.servers.first().context("a server is measured")?;
    let entrant = enter(who, setup, plan, &place)?;
    let plans: Vec<Plan> =
        connections.iter().map(|&connections| Plan { connections, ..plan.clone() }).collect();
    let mut runs = vec![Vec::new(); plans.len()];
    files::make(&entrant.target, plan).map_err(|error| blame(&entrant, &error))?;
    for round in 1..=setup.runs {
        for (plan, runs) in plans.iter().zip(&mut runs) {
            let run = measure(&entrant, plan, round).map_err(|error| blame(&entrant, &error))?;
            let (name, count) = (&entrant.name, plan.connections);
            say(format!("run {round} of {}: {name}, {count} connections: {}", setup.runs, run.summary()));
            runs.push(run);
        }
    }
    let machine = machine::describe(setup.dir);
    let reports = plans.into_iter().zip(runs).map(|(plan, runs)| {
        Report::new(machine.clone(), plan, vec![Series::new(entrant.name.clone(), runs)])
    });
    Ok(reports.collect())
}

/// Runs a plan once on the first of the servers. `look` inspects the server's process right before the first request and
/// right after the last response. Returns its results and the number of operations.
pub(crate) fn observe<T>(
    setup: &Setup<'_>,
    plan: &Plan,
    mut look: impl FnMut(u32) -> Result<T>,
) -> Result<(T, u64, T)> {
    let place = Place::create(setup.dir)?;
    let who = *setup.servers.first().context("a server is measured")?;
    let entrant = enter(who, setup, plan, &place)?;
    let pid = entrant.server.as_ref().context("the server is one of ours")?.pid();
    files::make(&entrant.target, plan).map_err(|error| blame(&entrant, &error))?;
    let outcome = client::run(&entrant.target, plan, 1, || look(pid));
    let (before, measured, after) = outcome.map_err(|error| blame(&entrant, &error))?;
    Ok((before, measured.tally.operations, after))
}

fn measure_all(
    mut entrants: Vec<Entrant>,
    plan: &Plan,
    runs: u32,
    dir: &Path,
    settle: impl Fn() -> Result<()>,
) -> Result<Report> {
    ensure!(!entrants.is_empty(), "none of --servers serves this workload");
    for entrant in &entrants {
        files::make(&entrant.target, plan).map_err(|error| blame(entrant, &error))?;
    }
    for round in 1..=runs {
        for entrant in &mut entrants {
            settle()?;
            let run = measure(entrant, plan, round)
                .map_err(|error| blame(entrant, &error))
                .with_context(|| format!("run {round}"))?;
            say(format!("run {round} of {runs}: {}: {}", entrant.name, run.summary()));
            entrant.runs.push(run);
        }
    }
    if plan.workload.writes() {
        for entrant in &entrants {
            files::check(&entrant.target, plan).map_err(|error| blame(entrant, &error))?;
        }
    }
    let series = entrants.into_iter().map(|entrant| Series::new(entrant.name, entrant.runs)).collect();
    Ok(Report::new(machine::describe(dir), plan.clone(), series))
}

/// Starts a server.
fn enter(who: Contender, setup: &Setup<'_>, plan: &Plan, place: &Place) -> Result<Entrant> {
    let name = who.name();
    let (server, target) = if let Some(option) = who.samba_option() {
        let (server, port) = samba::start(&Cache::open()?, place, name, option)?;
        (server, smb(port, plan, place))
    } else if let Some(means) = who.means() {
        let (server, address) = floor::start(place, name, means, plan)?;
        (server, Target::Floor { address })
    } else {
        return ours(name, setup.binary, setup, plan, place, who == Contender::ForebayLimited);
    };
    Ok(Entrant { name: name.to_owned(), target, server: Some(server), runs: Vec::new() })
}

/// Starts one of our servers, with a limited volume for bursts if `limits` is set.
fn ours(
    name: &'static str,
    binary: &Path,
    setup: &Setup<'_>,
    plan: &Plan,
    place: &Place,
    limits: bool,
) -> Result<Entrant> {
    let started = forebay::start(place, name, binary, setup.server_option)?;
    let mut target = smb(started.port, plan, place);
    if let (true, Target::Smb { account, burst, .. }) = (limits, &mut target) {
        started.add_limited_volume()?;
        let (user, share) = (BURST_SHARE.to_owned(), BURST_SHARE.to_owned());
        *burst = Some(Account { user, share, ..account.clone() });
    }
    let server = started.server;
    Ok(Entrant { name: name.to_owned(), target, server: Some(server), runs: Vec::new() })
}

/// An SMB server on this machine.
fn smb(port: u16, plan: &Plan, place: &Place) -> Target {
    Target::Smb {
        address: (Ipv4Addr::LOCALHOST, port).into(),
        account: Account {
            user: USER.to_owned(),
            password: place.password().to_owned(),
            share: SHARE.to_owned(),
            security: plan.security,
        },
        burst: None,
    }
}

fn measure(entrant: &Entrant, plan: &Plan, round: u32) -> Result<Run> {
    let Some(server) = &entrant.server else {
        let ((), measured, ()) = client::run(&entrant.target, plan, round, || Ok(()))?;
        return Ok(Run::new(plan, &measured, None));
    };
    let pid = server.pid();
    let mut is_first = true;
    let (stop, stopped) = channel::<()>();
    std::thread::scope(|scope| {
        let samples = scope.spawn(move || {
            let mut samples = Vec::new();
            if plan.seconds < SAMPLED_SECONDS_MIN {
                return samples;
            }
            let interval = Duration::from_secs_f64((plan.seconds / SAMPLES).max(1.0));
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                samples.extend(memory::resident(pid).ok());
            }
            samples
        });
        let outcome = client::run(&entrant.target, plan, round, || {
            if std::mem::take(&mut is_first) {
                memory::reset_peak(pid)?;
            }
            let cpu_seconds = cpu::tree(pid)?.seconds;
            let (resident_bytes, proportional_bytes) = memory::now(pid)?;
            Ok(Used { cpu_seconds, peak_bytes: memory::peak(pid)?, resident_bytes, proportional_bytes })
        });
        drop(stop);
        let samples = samples.join().expect("the sampling thread does not panic");
        let (before, measured, after) = outcome?;
        Ok(Run::new(plan, &measured, Some((before, after))).with_samples(&samples))
    })
}

/// How often to sample the memory of a server during a long run, and the minimum length of such a run: sampling disturbs.
const SAMPLES: f64 = 60.0;
const SAMPLED_SECONDS_MIN: f64 = 10.0;

/// An error with the server's name and its output.
fn blame(entrant: &Entrant, error: &anyhow::Error) -> anyhow::Error {
    match &entrant.server {
        Some(server) => anyhow::anyhow!("{}: {error:#}\nit said:\n{}", entrant.name, server.said()),
        None => anyhow::anyhow!("{}: {error:#}", entrant.name),
    }
}
