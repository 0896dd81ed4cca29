//! `forebay-bench suite`: every workload that has a target, in one run: results, plots, and a table that compares ratios with
//! targets.

mod cases;
mod verdict;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use clap::Args;
use forebay_e2e::cache::Cache;
use forebay_e2e::progress::say;

use crate::load::{self, Report, Setup};
use crate::place::Place;
use crate::{forebay, machine, plot, samba};
use cases::{Case, Effort};
use verdict::Line;

#[derive(Args)]
pub(crate) struct SuiteArguments {
    /// The folder for the results: a JSON file for each workload, plots, and results.md.
    #[arg(long, value_name = "FOLDER", default_value = "results")]
    out: PathBuf,
    /// Number of runs of each server; the servers take turns. Workloads without a target are run at most three times, memory
    /// once.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Seconds of each run.
    #[arg(long, default_value_t = 1.5, value_parser = load::parse_seconds)]
    time: f64,
    /// Smoke test: one short run of each server, one Samba, small sizes. The figures are not meaningful.
    #[arg(long, conflicts_with_all = ["runs", "time"])]
    quick: bool,
    /// Only the cases with these names, such as read-1m-c8; --list shows them.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// List the names of the cases and exit.
    #[arg(long)]
    list: bool,
    /// The forebay-server binary; a release build.
    #[arg(long, value_name = "FILE", default_value_os_t = forebay::default_binary())]
    server: PathBuf,
    /// TOML lines for the `[server]` section of forebay-server's configuration.
    #[arg(long, value_name = "TOML", default_value = "")]
    server_option: String,
    /// Folder of the files to serve. The targets are for tmpfs.
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    dir: PathBuf,
    /// Priority of both servers and client, as in nice(1).
    #[arg(long, default_value_t = 0, allow_hyphen_values = true, value_parser = clap::value_parser!(i32).range(-20..=19))]
    nice: i32,
}

/// Parts of the acceptance table that this command cannot measure, with the reason.
const MISSING: [(&str, &str); 3] = [
    (
        "cold reads of a file larger than memory",
        "needs fio and a disk: use `load --workload read --cold --dir`",
    ),
    ("SMB Direct over soft-RoCE", "needs the lab's guests: the load generator speaks TCP only"),
    ("ksmbd and knfsd", "need the lab's guests"),
];

/// Measures everything.
pub(crate) fn run(arguments: &SuiteArguments) -> Result<ExitCode> {
    let effort = if arguments.quick {
        Effort::quick()
    } else {
        Effort { runs: arguments.runs, seconds: arguments.time, is_quick: false }
    };
    let mut cases = cases::all(effort);
    if arguments.list {
        cases.iter().for_each(|case| println!("{:<16} {}", case.name, case.plan.label()));
        return Ok(ExitCode::SUCCESS);
    }
    for name in &arguments.only {
        ensure!(cases.iter().any(|case| case.name == *name), "no case has the name {name}; see --list");
    }
    cases.retain(|case| arguments.only.is_empty() || arguments.only.iter().any(|name| name == case.name));
    load::prepare(arguments.nice)?;
    std::fs::create_dir_all(&arguments.out).with_context(|| format!("make {}", arguments.out.display()))?;
    let mut skipped: Vec<(String, String)> = Vec::new();
    if let Err(error) = probe_samba(&arguments.dir) {
        let reason = format!(
            "cannot be started here (it needs root, and what `forebay-lab prepare` makes): {error:#}"
        );
        say(format!("Samba {reason}"));
        skipped.push(("Samba".to_owned(), reason.lines().next().unwrap_or_default().to_owned()));
        for case in &mut cases {
            case.servers.retain(|who| who.samba_option().is_none());
        }
    }
    let began = Instant::now();
    let (mut reports, mut lines) = (Vec::new(), Vec::new());
    for (number, case) in cases.iter().enumerate() {
        say(format!("case {} of {}: {}: {}", number + 1, cases.len(), case.name, case.plan.label()));
        match measure(case, arguments) {
            Ok(measured) => {
                for report in &measured {
                    let name = case.name_of(report);
                    report.write(&arguments.out.join(format!("{name}.json")))?;
                }
                lines.extend(verdict::lines(case, &measured));
                if !case.connections.is_empty()
                    && let Some(chart) = plot::by_connections(&measured)
                {
                    plot::write(&arguments.out, case.name, &chart)?;
                } else {
                    reports.extend(measured.into_iter().map(|report| (case.name.to_owned(), report)));
                }
            }
            // The other cases are still useful.
            Err(error) => {
                say(format!("{}: {error:#}", case.name));
                skipped.push((case.name.to_owned(), format!("failed: {}", first_lines(&error))));
            }
        }
    }
    plot::draw(&reports, &arguments.out)?;
    let failed = skipped.iter().any(|(_, reason)| reason.starts_with("failed"));
    skipped.extend(MISSING.map(|(what, why)| (what.to_owned(), why.to_owned())));
    let text = document(arguments, effort, &reports, &lines, &skipped);
    let path = arguments.out.join("results.md");
    std::fs::write(&path, &text).with_context(|| format!("write {}", path.display()))?;
    print!("{text}");
    say(format!("{} after {:.0} s", path.display(), began.elapsed().as_secs_f64()));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn first_lines(error: &anyhow::Error) -> String {
    format!("{error:#}").lines().take(2).collect::<Vec<_>>().join(" ")
}

/// Checks whether a Samba starts here, without building the root that it needs, because that takes long.
fn probe_samba(dir: &Path) -> Result<()> {
    let place = Place::create(dir)?;
    samba::start(&Cache::open()?.looking(), &place, "samba", "").map(drop)
}

fn measure(case: &Case, arguments: &SuiteArguments) -> Result<Vec<Report>> {
    let setup = Setup {
        runs: case.runs,
        servers: &case.servers,
        binary: &arguments.server,
        other: None,
        server_option: &arguments.server_option,
        dir: &arguments.dir,
        cold: false,
    };
    if case.connections.is_empty() {
        return load::compare(&setup, &case.plan).map(|report| vec![report]);
    }
    load::compare_connections(&setup, &case.plan, &case.connections)
}

/// The content of results.md.
fn document(
    arguments: &SuiteArguments,
    effort: Effort,
    reports: &[(String, Report)],
    lines: &[Line],
    skipped: &[(String, String)],
) -> String {
    use std::fmt::Write;
    let mut text = String::from("# Results of `forebay-bench suite`\n\n");
    let version = std::process::Command::new(&arguments.server).arg("--version").output();
    let version = version.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    let _ = writeln!(
        text,
        "{}, {}; {}. Alternating runs, {} at most, of {} s: medians; client and servers on the same cores, over loopback.{}\n",
        date(),
        version.unwrap_or_else(|_| "version unknown".to_owned()),
        machine::describe(&arguments.dir),
        effort.runs,
        effort.seconds,
        if effort.is_quick { " **A quick run: the figures mean little.**" } else { "" }
    );
    text.push_str(&verdict::table(lines));
    text.push_str("\n## All figures\n\nMedians. Samba: all that were measured.\n\n");
    text.push_str(
        "| case | server | throughput | server CPU | p99 | memory (PSS) |\n|---|---|---|---|---|---|\n",
    );
    for (name, report) in reports {
        for series in &report.series {
            let _ = writeln!(
                text,
                "| {name} | {} | {} |",
                series.server,
                verdict::cells(report, series).join(" | ")
            );
        }
    }
    text.push_str("\n## Not measured\n\n");
    for (what, why) in skipped {
        let _ = writeln!(text, "* {what}: {why}");
    }
    text
}

/// The current day, in UTC.
fn date() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (year, month, day) = civil(seconds / 86_400);
    format!("{year}-{month:02}-{day:02}")
}

/// Converts a number of days since 1970 to year, month and day.
fn civil(mut days: u64) -> (u64, usize, u64) {
    let mut year = 1970_u64;
    loop {
        let is_leap = (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
        let months = [31, if is_leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        for (month, length) in months.into_iter().enumerate() {
            if days < length {
                return (year, month + 1, days + 1);
            }
            days -= length;
        }
        year += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_since_the_epoch_convert_to_civil_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(19_782), (2024, 2, 29));
        assert_eq!(civil(20_781), (2026, 11, 24));
    }
}
