//! The run of `forebay-bench read`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use forebay_e2e::cache::Cache;
use forebay_e2e::progress::say;

use crate::place::{Place, Server};
use crate::report::{Report, Run, Series};
use crate::torture::{self, Load};
use crate::{Contestant, ReadArguments, bare, cpu, forebay, machine, samba};

/// Time limit for a server to end its processes for a disconnected client.
const SETTLE_DEADLINE: Duration = Duration::from_secs(10);

/// Bytes of a GB.
const GB: f64 = 1e9;

struct Entrant {
    who: Contestant,
    server: Server,
    port: u16,
    processes_idle: usize,
    runs: Vec<Run>,
}

pub(crate) fn run(arguments: &ReadArguments) -> Result<ExitCode> {
    if cfg!(debug_assertions) && arguments.servers.contains(&Contestant::Forebay) {
        say(format!("make sure that {} is a release build", arguments.common.server.display()));
    }
    if arguments.common.nice != 0 {
        machine::set_priority(arguments.common.nice)?;
    }
    let cache = Cache::open()?;
    let place = Place::create(&arguments.common.dir)?;
    let load = Load {
        io_bytes: arguments.io_size,
        connections: arguments.connections,
        depth: arguments.depth,
        seconds: arguments.time,
    };
    let mut entrants = Vec::new();
    for &who in &arguments.servers {
        entrants.push(enter(who, arguments, &cache, &place)?);
    }
    for round in 0..arguments.runs {
        for entrant in &mut entrants {
            let run = measure(entrant, &cache, &place, &load)
                .with_context(|| format!("run {} of {}", round + 1, entrant.who.name()))?;
            say(format!(
                "run {} of {}: {}: {:.2} GB/s, {:.3} CPU-s/GB",
                round + 1,
                arguments.runs,
                entrant.who.name(),
                run.gb_per_second,
                run.server_cpu_per_gb
            ));
            entrant.runs.push(run);
        }
    }
    let report = Report {
        machine: machine::describe(&arguments.common.dir),
        load,
        series: entrants.into_iter().map(series).collect(),
    };
    print!("{}", report.table());
    if let Some(path) = &arguments.common.json {
        let mut text = serde_json::to_string_pretty(&report)?;
        text.push('\n');
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(if arguments.require_parity && !report.has_parity() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn series(entrant: Entrant) -> Series {
    Series::new(entrant.who.name(), entrant.who.is_samba(), entrant.runs)
}

fn enter(who: Contestant, arguments: &ReadArguments, cache: &Cache, place: &Place) -> Result<Entrant> {
    let name = who.name();
    let (server, port) = match who {
        Contestant::Forebay => {
            forebay::start(place, name, &arguments.common.server, &arguments.common.server_option)
                .map(|started| (started.server, started.port))
        }
        Contestant::Samba => samba::start(cache, place, name, ""),
        Contestant::SambaSendfile => samba::start(cache, place, name, "use sendfile = yes"),
        Contestant::SambaUring => samba::start(cache, place, name, "vfs objects = io_uring"),
        Contestant::BareSendfile => bare::start(place, name, bare::Means::Sendfile, arguments.io_size),
        Contestant::BareRead => bare::start(place, name, bare::Means::Read, arguments.io_size),
    }?;
    let processes_idle = cpu::tree(server.pid())?.processes;
    Ok(Entrant { who, server, port, processes_idle, runs: Vec::new() })
}

fn measure(entrant: &mut Entrant, cache: &Cache, place: &Place, load: &Load) -> Result<Run> {
    let before = cpu::tree(entrant.server.pid())?;
    let client_before = cpu::waited_for()?;
    let is_bare = matches!(entrant.who, Contestant::BareSendfile | Contestant::BareRead);
    let rate = if is_bare {
        bare::load(entrant.port, load)
    } else {
        torture::read(cache, place, entrant.port, load)
    };
    let rate = rate.map_err(|error| {
        anyhow::anyhow!("{error:#}\n{} said:\n{}", entrant.server.name(), entrant.server.said())
    })?;
    let client = cpu::waited_for()? - client_before;
    let server = settled(entrant)?.seconds - before.seconds;
    let gb = rate.bytes as f64 / GB;
    Ok(Run {
        gb_per_second: rate.bytes_per_second / GB,
        server_cpu_per_gb: server / gb,
        client_cpu_per_gb: (!is_bare).then_some(client / gb),
    })
}

/// The server's usage once it has ended the processes for this client: a process that is still ending has not added its time
/// to its parent's yet.
fn settled(entrant: &mut Entrant) -> Result<cpu::Usage> {
    let deadline = Instant::now() + SETTLE_DEADLINE;
    loop {
        let usage = cpu::tree(entrant.server.pid())?;
        // A first client may make the server start helpers that stay.
        if usage.processes <= entrant.processes_idle {
            return Ok(usage);
        }
        if Instant::now() > deadline {
            entrant.processes_idle = usage.processes;
            return Ok(usage);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
