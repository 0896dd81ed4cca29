//! `forebay-bench load`: our own client, lean enough that the server is what is measured, against each server in turn.

mod arguments;
mod client;
mod cold;
mod connection;
mod content;
mod credits;
mod files;
mod floor;
mod handshake;
mod histogram;
mod intake;
mod plan;
mod pump;
mod report;
mod request;
mod target;
mod work;

pub(crate) use arguments::LoadArguments;
pub(crate) use floor::{Means, serve as serve_floor};

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use forebay_e2e::cache::Cache;
use forebay_e2e::progress::say;

use crate::place::{Place, SHARE, Server, USER};
use crate::{cpu, forebay, machine, memory, samba};
use arguments::Contender;
use handshake::Account;
use plan::Plan;
use report::{Report, Run, Series, Used};
use target::Target;

/// A server that takes part.
struct Entrant {
    name: String,
    target: Target,
    /// `None` if it is not ours.
    server: Option<Server>,
    runs: Vec<Run>,
}

/// Measures.
pub(crate) fn run(arguments: &LoadArguments) -> Result<ExitCode> {
    let plan = arguments.plan()?;
    if arguments.common.nice != 0 {
        machine::set_priority(arguments.common.nice)?;
    }
    if let Some((name, target)) = arguments.foreign()? {
        let entrant = Entrant { name, target, server: None, runs: Vec::new() };
        let target = entrant.target.clone();
        let measured = measure_all(arguments, &plan, vec![entrant], || Ok(()));
        // Nothing stays there, if that can be helped.
        let removed = files::remove(&target, &plan).context("remove the files");
        return measured.and_then(|code| removed.map(|()| code));
    }
    if cfg!(debug_assertions) {
        say("this is no release build: the client costs more than it should");
    }
    let place = Place::create(&arguments.common.dir)?;
    let mut entrants = Vec::new();
    for &who in &arguments.servers {
        if who.serves(plan.workload) {
            entrants.push(enter(who, arguments, &plan, &place)?);
        } else {
            say(format!("{} does not serve this workload and is left out", who.name()));
        }
    }
    if let Some(binary) = &arguments.other {
        entrants.push(ours("forebay-other", binary, arguments, &plan, &place)?);
    }
    // What one server has left to be written must not be the next one's burden.
    let folder = File::open(place.path())?;
    measure_all(arguments, &plan, entrants, || {
        rustix::fs::syncfs(&folder)?;
        if arguments.cold { cold::drop_pages(place.path()) } else { Ok(()) }
    })
}

fn measure_all(
    arguments: &LoadArguments,
    plan: &Plan,
    mut entrants: Vec<Entrant>,
    settle: impl Fn() -> Result<()>,
) -> Result<ExitCode> {
    ensure!(!entrants.is_empty(), "none of --servers serves this workload");
    for entrant in &entrants {
        files::make(&entrant.target, plan).map_err(|error| blame(entrant, &error))?;
    }
    for round in 1..=arguments.runs {
        for entrant in &mut entrants {
            settle()?;
            let run = measure(entrant, plan, round)
                .map_err(|error| blame(entrant, &error))
                .with_context(|| format!("run {round}"))?;
            say(format!("run {round} of {}: {}: {}", arguments.runs, entrant.name, run.summary()));
            entrant.runs.push(run);
        }
    }
    if plan.workload.writes() {
        for entrant in &entrants {
            files::check(&entrant.target, plan).map_err(|error| blame(entrant, &error))?;
        }
    }
    let series = entrants.into_iter().map(|entrant| Series::new(entrant.name, entrant.runs)).collect();
    let report = Report::new(machine::describe(&arguments.common.dir), plan.clone(), series);
    print!("{}", report.table());
    if let Some(path) = &arguments.common.json {
        let mut text = serde_json::to_string_pretty(&report)?;
        text.push('\n');
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts a server.
fn enter(who: Contender, arguments: &LoadArguments, plan: &Plan, place: &Place) -> Result<Entrant> {
    let name = who.name();
    let (server, target) = if let Some(option) = who.samba_option() {
        let (server, port) = samba::start(&Cache::open()?, place, name, option)?;
        (server, smb(port, plan, place))
    } else if let Some(means) = who.means() {
        let (server, address) = floor::start(place, name, means, plan)?;
        (server, Target::Floor { address })
    } else {
        return ours(name, &arguments.common.server, arguments, plan, place);
    };
    Ok(Entrant { name: name.to_owned(), target, server: Some(server), runs: Vec::new() })
}

/// Starts a server of ours.
fn ours(
    name: &'static str,
    binary: &Path,
    arguments: &LoadArguments,
    plan: &Plan,
    place: &Place,
) -> Result<Entrant> {
    let (server, port) = forebay::start(place, name, binary, &arguments.common.server_option)?;
    Ok(Entrant {
        name: name.to_owned(),
        target: smb(port, plan, place),
        server: Some(server),
        runs: Vec::new(),
    })
}

/// A server of this machine that speaks SMB.
fn smb(port: u16, plan: &Plan, place: &Place) -> Target {
    Target::Smb {
        address: (Ipv4Addr::LOCALHOST, port).into(),
        account: Account {
            user: USER.to_owned(),
            password: place.password().to_owned(),
            share: SHARE.to_owned(),
            security: plan.security,
        },
    }
}

fn measure(entrant: &Entrant, plan: &Plan, round: u32) -> Result<Run> {
    let Some(server) = &entrant.server else {
        let ((), measured, ()) = client::run(&entrant.target, plan, round, || Ok(()))?;
        return Ok(Run::new(&measured, None));
    };
    let pid = server.pid();
    let mut is_first = true;
    let (before, measured, after) = client::run(&entrant.target, plan, round, || {
        if std::mem::take(&mut is_first) {
            memory::reset_peak(pid)?;
        }
        Ok(Used { peak_bytes: memory::peak(pid)?, cpu_seconds: cpu::tree(pid)?.seconds })
    })?;
    let used = Used { cpu_seconds: after.cpu_seconds - before.cpu_seconds, ..after };
    Ok(Run::new(&measured, Some(used)))
}

/// An error with the name of the server, and what that has said.
fn blame(entrant: &Entrant, error: &anyhow::Error) -> anyhow::Error {
    match &entrant.server {
        Some(server) => anyhow::anyhow!("{}: {error:#}\nit said:\n{}", entrant.name, server.said()),
        None => anyhow::anyhow!("{}: {error:#}", entrant.name),
    }
}
