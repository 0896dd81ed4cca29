//! `kubectl forebay`: shows the state (`status`), finds problems (`doctor`), shows how much each volume is used (`top`) and
//! by which pods (`who`), measures a StorageClass (`bench`), rehearses the failure of a server (`rehearse`), collects all of that in one archive for support (`bundle`), pauses
//! and resumes the operator's work on a StorageCluster (`pause`, `resume`), and continues instances if their record was lost
//! (`adopt`).
//!
//! It runs with its user's permissions; only `pause`, `resume`, `adopt`, `bench` and `rehearse` change anything. Everything is read first; pure
//! functions then derive what is shown, found and done.

mod adopt;
mod bench;
mod bundle;
mod complete;
mod confirm;
mod doctor;
#[cfg(test)]
mod fixture;
mod job;
mod limits;
mod options;
mod paint;
mod pause;
mod quantity;
mod rehearse;
mod scrape;
mod snapshot;
mod status;
mod table;
mod top;
mod who;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use k8s_openapi::jiff::Timestamp;

use crate::options::{Cli, Command, Connection, Format};
use crate::paint::Paint;
use crate::snapshot::Snapshot;

/// Everything is in order.
const GOOD: u8 = 0;
/// Something is not ready, or the doctor found an error.
const NOT_READY: u8 = 1;
/// It could not be determined.
const FAILED: u8 = 2;

fn main() -> ExitCode {
    if complete::is_wanted(std::env::args_os().next().as_deref()) {
        let words: Vec<String> =
            std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
        print!("{}", complete::answer(Cli::command(), &words));
        return ExitCode::from(GOOD);
    }
    let cli = Cli::parse();
    match run(cli) {
        Ok(good) => ExitCode::from(if good { GOOD } else { NOT_READY }),
        // For example, if the output is piped to `head`.
        Err(error)
            if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) =>
        {
            ExitCode::from(GOOD)
        }
        Err(error) => {
            eprintln!("kubectl-forebay: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

/// Runs the command. Returns whether everything is in order.
fn run(cli: Cli) -> anyhow::Result<bool> {
    let paint = Paint::new(cli.color.is_wanted(io::stdout().is_terminal()));
    let (text, good) = match cli.command {
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "kubectl-forebay", &mut script);
            (String::from_utf8(script).context("a completion script")?, true)
        }
        Command::Status { connection, output } => {
            let snapshot = take(&connection)?;
            let view = status::View::new(&snapshot, Timestamp::now())?;
            let text = match output {
                Format::Json => json(&view)?,
                Format::Table => status::render(&view, false, paint),
                Format::Wide => status::render(&view, true, paint),
            };
            (text, view.is_ready())
        }
        Command::Doctor { connection, output, all } => {
            let snapshot = take(&connection)?;
            let findings = doctor::examine(&snapshot);
            let text = match output {
                doctor::Format::Json => json(&findings)?,
                doctor::Format::Text => doctor::render(&findings, all, paint),
            };
            (text, !doctor::has_errors(&findings))
        }
        Command::Top(options) => (top::run(&options, paint)?, true),
        Command::Who(options) => (who::run(&options, paint)?, true),
        Command::Bench(options) => (bench::run(&options, paint)?, true),
        Command::Measure(options) => {
            bench::measure(&options)?;
            (String::new(), true)
        }
        Command::Rehearse(options) => rehearse::run(&options, paint)?,
        Command::Beat(options) => {
            rehearse::beat(&options)?;
            (String::new(), true)
        }
        Command::Bundle(options) => (bundle::run(&options)?, true),
        Command::Pause(options) => (pause::run(&options, true)?, true),
        Command::Resume(options) => (pause::run(&options, false)?, true),
        Command::Adopt(options) => adopt::run(&options)?,
    };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(good)
}

fn take(connection: &Connection) -> anyhow::Result<Snapshot> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?
        .block_on(Snapshot::take(connection))
}

fn json(value: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}
