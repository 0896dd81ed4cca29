//! The command line.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::config::{self, Config, DEFAULT_PATH, Log, LogFormat, SAMPLE};
use crate::daemon;
use crate::machine;
use crate::observed::Observed;
use crate::plan::{Tells, Wanted, forgets};
use crate::round::{self, Report, lock};
use crate::source::{Surveyor, There};
use crate::step::Kernel;

/// An operation failed, or the state deviates from the configuration.
const FAILED: u8 = 1;
/// The configuration is invalid; clap uses 2 for the command line.
const CONFIG: u8 = 3;

/// The bundled NVMe-oF target of Forebay: offers drives, partitions and files of this machine, using the kernel's nvmet.
///
/// Without a command, it runs until SIGTERM and keeps the kernel's target as configured. Namespaces stay available when it
/// stops; `remove` removes them.
#[derive(Debug, Parser)]
#[command(name = "forebay-target", version, max_term_width = 120)]
#[command(
    after_help = "Exit codes: 0 done; 1 failed, or not everything is as configured; 2 invalid usage; 3 invalid configuration."
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,

    /// The configuration file.
    #[arg(long, global = true, value_name = "FILE", env = "FOREBAY_TARGET_CONFIG", default_value = DEFAULT_PATH)]
    config: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Keep the target as configured until SIGTERM (the default).
    Run,
    /// Check the configuration and inspect its drives, without changing anything.
    Check,
    /// Show what is offered, what is not, and why. Changes nothing.
    Status,
    /// Remove everything that this target has created in the kernel, and nothing else. Hosts are disconnected; drives and
    /// files keep their data.
    Remove,
    /// Print a configuration with every option explained.
    SampleConfig,
    /// Print completions for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// Parses the command line and executes the command.
pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse();
    let text = match cli.command {
        Some(Command::SampleConfig) => return end(print(SAMPLE).map(|()| true)),
        Some(Command::Completions { shell }) => {
            clap_complete::generate(shell, &mut Cli::command(), "forebay-target", &mut io::stdout());
            return ExitCode::SUCCESS;
        }
        _ => config::text(&cli.config),
    };
    let config = text.and_then(|text| Ok((Config::read(&cli.config)?, text)));
    let (config, text) = match config {
        Ok(config) => config,
        Err(error) => return fail(CONFIG, &error),
    };
    match cli.command {
        Some(Command::Check) => end(check(&config)),
        Some(Command::Status) => end(status(&config)),
        Some(Command::Remove) => {
            log(&config.log);
            end(remove(&config))
        }
        _ => {
            log(&config.log);
            end(daemon::run(&cli.config, config, text).map(|()| true))
        }
    }
}

fn end(result: anyhow::Result<bool>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => FAILED.into(),
        Err(error) => fail(FAILED, &format!("{error:#}")),
    }
}

fn fail(code: u8, error: &dyn std::fmt::Display) -> ExitCode {
    // If standard error is closed, there is no way to report the error.
    let _ = writeln!(io::stderr(), "forebay-target: {error}");
    code.into()
}

fn print(text: &str) -> anyhow::Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        // The reader closed the pipe.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// `FOREBAY_LOG` overrides the level.
fn log(log: &Log) {
    let filter = std::env::var("FOREBAY_LOG")
        .ok()
        .and_then(|level| EnvFilter::try_new(level).ok())
        .unwrap_or_else(|| EnvFilter::new(&log.level));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match log.format {
        LogFormat::Text => lines.with_ansi(false).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}

fn check(config: &Config) -> anyhow::Result<bool> {
    let observed = match machine::find() {
        Some(root) => observe(&root)?,
        None => Observed::default(),
    };
    let mut lines = String::new();
    let mut right = true;
    for port in machine::ports(config) {
        lines += &match port.address {
            Ok(address) => format!("port {}: {address}\n", port.config),
            Err(why) => {
                right = false;
                format!("port {}: {why}\n", port.config)
            }
        };
    }
    let grounds = Surveyor::default().survey(config, &observed, std::time::Instant::now());
    for subsystem in &config.subsystems {
        for namespace in &subsystem.namespaces {
            let (nqn, id) = (&subsystem.nqn, namespace.id);
            let Some(ground) = grounds.by_key.get(&(nqn.to_string(), id)) else { continue };
            let shown = match (&ground.there, forgets(namespace, ground)) {
                (There::Unfit(why), _) => Err(why.clone()),
                (_, Some(why)) => Err(why),
                (There::ToMake, _) => Ok("the file will be created".into()),
                (There::Offered { bytes }, _) => Ok(format!("offered, {bytes} bytes")),
                (There::Fit { bytes, .. }, _) => Ok(format!("can be offered, {bytes} bytes")),
            };
            right &= shown.is_ok();
            let (Ok(shown) | Err(shown)) = shown;
            lines += &format!("namespace {id} of {nqn}: {shown}\n");
        }
    }
    print(&format!("{lines}{}\n", if right { "valid" } else { "not everything can be offered" }))?;
    Ok(right)
}

fn observe(root: &Path) -> anyhow::Result<Observed> {
    Observed::read(root).with_context(|| format!("read {}", root.display()))
}

fn status(config: &Config) -> anyhow::Result<bool> {
    let Some(root) = machine::find() else {
        print("the kernel's target is not loaded: nothing is offered\n")?;
        return Ok(false);
    };
    let _lock = lock(&root).with_context(|| format!("lock {}", root.display()))?;
    let wanted = Wanted::of(config, machine::ports(config));
    let looked = round::look(&root, config, &wanted, &mut Surveyor::default())?;
    let report = round::report(&looked, config, &wanted, Vec::new());
    let mut text = shown(&report);
    // Every process that has just started reports the size again.
    let mut pending =
        looked.plan.tasks.iter().filter(|task| !matches!(task.tells, Some(Tells::Size(_)))).peekable();
    let right = report.problems.is_empty() && pending.peek().is_none();
    for task in pending {
        text += &format!("to be done: {}: {}\n", task.subject, task.what);
    }
    print(&text)?;
    Ok(right)
}

fn shown(report: &Report) -> String {
    let word = |up: bool| if up { "up" } else { "down" };
    let ports = report.ports.iter().map(|port| format!("port {}: {}\n", port.shown, word(port.up)));
    let namespaces = report.namespaces.iter().map(|namespace| {
        let round::NamespaceState { nqn, id, device, up, bytes } = namespace;
        format!("namespace {id} of {nqn}: {}, {bytes} bytes, {device}\n", word(*up))
    });
    let problems =
        report.problems.iter().map(|problem| format!("problem: {}: {}\n", problem.subject, problem.why));
    ports.chain(namespaces).chain(problems).collect()
}

fn remove(config: &Config) -> anyhow::Result<bool> {
    let Some(root) = machine::find() else { return Ok(true) };
    let _lock = lock(&root).with_context(|| format!("lock {}", root.display()))?;
    let wanted = Wanted::nothing(config);
    let report = round::round(&root, config, &wanted, &mut Surveyor::default(), &mut Kernel::at(&root))
        .with_context(|| format!("read {}", root.display()))?;
    for problem in &report.problems {
        let _ = writeln!(io::stderr(), "forebay-target: {}: {}", problem.subject, problem.why);
    }
    Ok(report.problems.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_valid_and_config_option_works_in_any_position() {
        Cli::command().debug_assert();
        for line in
            [&["forebay-target", "--config", "/f"][..], &["forebay-target", "remove", "--config", "/f"]]
        {
            let cli = Cli::try_parse_from(line).expect("a valid command line");
            assert_eq!(cli.config, Path::new("/f"));
        }
    }
}
