//! Results of the load: the table, and the same as JSON.

use std::fmt::Write;

use serde::Serialize;

use super::client::Measured;
use super::plan::Plan;
use crate::report::median;

const GB: f64 = 1e9;
const MB: f64 = 1e6;

/// What a server used during a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Used {
    pub(crate) cpu_seconds: f64,
    pub(crate) peak_bytes: u64,
}

/// One run of one server. Where the server is not ours, what it used is not known; where no payload moves, nothing is per GB.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Run {
    /// A GB is 10⁹ bytes of payload.
    pub(crate) gb_per_second: Option<f64>,
    pub(crate) operations_per_second: f64,
    /// Latency of an operation, in microseconds.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    /// CPU-seconds of the server per GB.
    pub(crate) server_cpu_per_gb: Option<f64>,
    /// CPU-microseconds of the server per operation.
    pub(crate) server_cpu_us_per_operation: Option<f64>,
    /// The same of the client.
    pub(crate) client_cpu_per_gb: Option<f64>,
    pub(crate) client_cpu_us_per_operation: f64,
    /// MB (10⁶ bytes) that were resident at most, over the server's processes.
    pub(crate) server_peak_mb: Option<f64>,
}

impl Run {
    pub(crate) fn new(measured: &Measured, used: Option<Used>) -> Self {
        let tally = &measured.tally;
        let gb = (tally.bytes > 0).then_some(tally.bytes as f64 / GB);
        let operations = tally.operations as f64;
        let quantile =
            |share| tally.latency.quantile(share).map_or(f64::NAN, |nanoseconds| nanoseconds as f64 / 1e3);
        Self {
            gb_per_second: gb.map(|gb| gb / measured.seconds),
            operations_per_second: operations / measured.seconds,
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            server_cpu_per_gb: used.zip(gb).map(|(used, gb)| used.cpu_seconds / gb),
            server_cpu_us_per_operation: used.map(|used| used.cpu_seconds * 1e6 / operations),
            client_cpu_per_gb: gb.map(|gb| measured.cpu_seconds / gb),
            client_cpu_us_per_operation: measured.cpu_seconds * 1e6 / operations,
            server_peak_mb: used.map(|used| used.peak_bytes as f64 / MB),
        }
    }

    /// The most important figures.
    pub(crate) fn summary(&self) -> String {
        format!(
            "{} GB/s, {:.0} operations/s, p99 {:.0} us, server {} CPU-s/GB, {} CPU-us/operation",
            figure(self.gb_per_second, 2),
            self.operations_per_second,
            self.p99_us,
            figure(self.server_cpu_per_gb, 3),
            figure(self.server_cpu_us_per_operation, 1)
        )
    }

    /// Each figure's median on its own.
    fn median(runs: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| median(runs.iter().map(figure).collect());
        let if_known = |figure: fn(&Self) -> Option<f64>| {
            runs.iter().map(figure).collect::<Option<Vec<f64>>>().map(median)
        };
        Self {
            gb_per_second: if_known(|run| run.gb_per_second),
            operations_per_second: of(|run| run.operations_per_second),
            p50_us: of(|run| run.p50_us),
            p99_us: of(|run| run.p99_us),
            p999_us: of(|run| run.p999_us),
            server_cpu_per_gb: if_known(|run| run.server_cpu_per_gb),
            server_cpu_us_per_operation: if_known(|run| run.server_cpu_us_per_operation),
            client_cpu_per_gb: if_known(|run| run.client_cpu_per_gb),
            client_cpu_us_per_operation: of(|run| run.client_cpu_us_per_operation),
            server_peak_mb: if_known(|run| run.server_peak_mb),
        }
    }
}

/// One server's runs.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Series {
    pub(crate) server: String,
    pub(crate) runs: Vec<Run>,
    pub(crate) median: Run,
}

impl Series {
    /// Of at least one run.
    pub(crate) fn new(server: String, runs: Vec<Run>) -> Self {
        let median = Run::median(&runs);
        Self { server, runs, median }
    }
}

/// Forebay's medians over another server's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Ratio {
    pub(crate) to: String,
    pub(crate) operations_per_second: f64,
    pub(crate) server_cpu_per_operation: Option<f64>,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

/// All of one measurement.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) machine: String,
    pub(crate) plan: Plan,
    pub(crate) series: Vec<Series>,
    pub(crate) ratios: Vec<Ratio>,
}

impl Report {
    pub(crate) fn new(machine: String, plan: Plan, series: Vec<Series>) -> Self {
        let ratios = ratios(&series);
        Self { machine, plan, series, ratios }
    }

    /// The table.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        let plan = &self.plan;
        let _ = writeln!(
            text,
            "{} of {} B, {} connections, {} a session, depth {}, {} files of {} B, {} s a run, {:?}; {}",
            plan.workload.name(),
            plan.io_bytes,
            plan.connections,
            plan.channels,
            plan.depth,
            plan.files,
            plan.file_bytes,
            plan.seconds,
            plan.security,
            self.machine
        );
        let _ = writeln!(
            text,
            "{:<15} {:>6} {:>7} {:>9} {:>9} {:>9} {:>9} {:>11} {:>12} {:>11} {:>12} {:>8}",
            "",
            "run",
            "GB/s",
            "ops/s",
            "p50 us",
            "p99 us",
            "p99.9 us",
            "server s/GB",
            "server us/op",
            "client s/GB",
            "client us/op",
            "peak MB"
        );
        for series in &self.series {
            for (number, run) in series.runs.iter().enumerate() {
                let _ = writeln!(text, "{}", row(&series.server, &(number + 1).to_string(), run));
            }
        }
        for series in &self.series {
            let _ = writeln!(text, "{}", row(&series.server, "median", &series.median));
        }
        for ratio in &self.ratios {
            let cpu = figure(ratio.server_cpu_per_operation, 2);
            let _ = writeln!(
                text,
                "forebay / {}: {:.2} x the operations/s, {cpu} x the CPU per operation, {:.2} x the p50, {:.2} x the p99",
                ratio.to, ratio.operations_per_second, ratio.p50, ratio.p99
            );
        }
        text
    }
}

fn ratios(series: &[Series]) -> Vec<Ratio> {
    let Some(ours) = series.iter().find(|series| series.server == "forebay") else { return Vec::new() };
    let ours = &ours.median;
    let others = series.iter().filter(|series| series.server != "forebay");
    others
        .map(|other| {
            let its = &other.median;
            let cpu = ours.server_cpu_us_per_operation.zip(its.server_cpu_us_per_operation);
            Ratio {
                to: other.server.clone(),
                operations_per_second: ours.operations_per_second / its.operations_per_second,
                server_cpu_per_operation: cpu.map(|(ours, its)| ours / its),
                p50: ours.p50_us / its.p50_us,
                p99: ours.p99_us / its.p99_us,
            }
        })
        .collect()
}

fn figure(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}

fn row(server: &str, number: &str, run: &Run) -> String {
    format!(
        "{server:<15} {number:>6} {:>7} {:>9.0} {:>9.0} {:>9.0} {:>9.0} {:>11} {:>12} {:>11} {:>12.1} {:>8}",
        figure(run.gb_per_second, 3),
        run.operations_per_second,
        run.p50_us,
        run.p99_us,
        run.p999_us,
        figure(run.server_cpu_per_gb, 3),
        figure(run.server_cpu_us_per_operation, 1),
        figure(run.client_cpu_per_gb, 3),
        run.client_cpu_us_per_operation,
        figure(run.server_peak_mb, 0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::plan::{Workload, tests::plan};
    use crate::load::pump::Tally;

    fn measured(operations: u64, bytes: u64) -> Measured {
        let mut tally = Tally { operations, bytes, ..Tally::default() };
        (0..operations).for_each(|_| tally.latency.record(100_000));
        Measured { tally, seconds: 2.0, cpu_seconds: 0.5 }
    }

    const USED: Used = Used { cpu_seconds: 1.0, peak_bytes: 3_000_000 };

    #[test]
    fn figures_are_per_gb_of_payload_and_per_operation() {
        let run = Run::new(&measured(1000, 2_000_000_000), Some(USED));
        assert_eq!((run.gb_per_second, run.operations_per_second), (Some(1.0), 500.0));
        assert_eq!((run.server_cpu_per_gb, run.server_cpu_us_per_operation), (Some(0.5), Some(1000.0)));
        assert_eq!((run.client_cpu_per_gb, run.client_cpu_us_per_operation), (Some(0.25), 500.0));
        assert!((run.p99_us - 100.0).abs() < 2.0 && run.server_peak_mb == Some(3.0));
        let run = Run::new(&measured(1000, 0), None);
        assert_eq!((run.gb_per_second, run.server_cpu_us_per_operation), (None, None));
    }

    #[test]
    fn the_table_and_the_ratios_compare_medians() {
        let series = |server: &str, operations: &[u64]| {
            let runs = operations.iter().map(|count| Run::new(&measured(*count, 1000 * count), Some(USED)));
            Series::new(server.to_owned(), runs.collect())
        };
        let report = Report::new(
            "a machine".into(),
            plan(Workload::Read),
            vec![series("samba", &[100, 900, 200]), series("forebay", &[400])],
        );
        let text = report.table();
        assert!(
            text.contains("forebay / samba: 2.00 x the operations/s, 0.50 x the CPU per operation"),
            "{text}"
        );
        assert_eq!(text.lines().filter(|line| line.starts_with("samba")).count(), 4, "{text}");
        let json = serde_json::to_value(&report).expect("JSON");
        assert_eq!(json["series"][0]["runs"].as_array().map(Vec::len), Some(3));
        assert_eq!(json["plan"]["workload"], "read");
    }
}
