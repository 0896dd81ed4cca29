//! Results of the load: the table, and the same as JSON.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::client::Measured;
use super::plan::{Plan, Workload};
use super::pump::Tally;
use crate::report::median;

const GB: f64 = 1e9;
const MB: f64 = 1e6;
const KB: f64 = 1e3;

/// Resources that a server has used so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Used {
    pub(crate) cpu_seconds: f64,
    /// Peak resident memory during the run.
    pub(crate) peak_bytes: u64,
    /// Current resident memory, with shared pages counted in each process that maps them.
    pub(crate) resident_bytes: u64,
    /// Same, with shared pages counted once.
    pub(crate) proportional_bytes: u64,
}

/// One run of one server. If the server is not ours, its resource usage is unknown. If no payload is transferred, there are
/// no figures per GB.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Run {
    /// A GB is 10⁹ bytes of payload.
    pub(crate) gb_per_second: Option<f64>,
    pub(crate) operations_per_second: f64,
    /// Latency of an operation, in microseconds; in a mixed load, of those that did not overlap a burst.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    /// CPU-seconds of the server per GB.
    pub(crate) server_cpu_per_gb: Option<f64>,
    /// CPU-microseconds of the server per operation.
    pub(crate) server_cpu_us_per_operation: Option<f64>,
    /// The same for the client.
    pub(crate) client_cpu_per_gb: Option<f64>,
    pub(crate) client_cpu_us_per_operation: f64,
    /// Peak resident memory in MB (10⁶ bytes), over the server's processes.
    pub(crate) server_peak_mb: Option<f64>,
    /// Resident memory in MB at the end, summed over the processes.
    pub(crate) server_rss_mb: Option<f64>,
    /// Same, with pages that several processes share counted once.
    pub(crate) server_pss_mb: Option<f64>,
    /// For idle connections: server memory in kB (10³ bytes) per connection.
    pub(crate) connection_rss_kb: Option<f64>,
    pub(crate) connection_pss_kb: Option<f64>,
    /// For a mixed load.
    pub(crate) burst: Option<Burst>,
    /// For a run with at least [`SAMPLES_MIN`] memory samples.
    pub(crate) growth: Option<Growth>,
}

/// Measurements while checkpoints were written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Burst {
    /// Latency of training reads that overlapped a burst, in microseconds.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    /// The ratio of the 99th percentile to that of the reads that did not overlap a burst.
    pub(crate) p99_ratio: f64,
    /// Training reads per second, outside of bursts and within.
    pub(crate) quiet_reads_per_second: f64,
    pub(crate) reads_per_second: f64,
    /// GB/s of all bursts together during their writing time, including flushes.
    pub(crate) write_gb_per_second: f64,
    /// Number of connections that replaced others.
    pub(crate) replaced: f64,
}

/// The memory of a server over a long run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Growth {
    /// Median of the last quarter minus the median of the second, in MB: the first quarter is warm-up.
    pub(crate) rss_mb: f64,
    /// Resident memory in MB, at regular intervals.
    pub(crate) samples_mb: Vec<f64>,
}

/// Minimum number of memory samples for computing the growth.
const SAMPLES_MIN: usize = 8;

impl Run {
    /// `used` is the server's resource usage before and after.
    pub(crate) fn new(plan: &Plan, measured: &Measured, used: Option<(Used, Used)>) -> Self {
        let tally = &measured.tally;
        let bytes = tally.bytes + tally.burst_bytes;
        let gb = (bytes > 0).then_some(bytes as f64 / GB);
        let operations = tally.operations as f64;
        let microseconds = |nanoseconds: Option<u64>| nanoseconds.map_or(f64::NAN, |it| it as f64 / 1e3);
        let quantile = |share| microseconds(tally.latency.quantile(share));
        let cpu = used.map(|(before, after)| after.cpu_seconds - before.cpu_seconds);
        let after = used.map(|(_, after)| after);
        let grown = |bytes: fn(Used) -> u64| {
            let (before, after) = used.filter(|_| plan.workload == Workload::Idle)?;
            Some((bytes(after) as f64 - bytes(before) as f64) / operations / KB)
        };
        Self {
            gb_per_second: gb.map(|gb| gb / measured.seconds),
            operations_per_second: operations / measured.seconds,
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            server_cpu_per_gb: cpu.zip(gb).map(|(cpu, gb)| cpu / gb),
            server_cpu_us_per_operation: cpu.map(|cpu| cpu * 1e6 / operations),
            client_cpu_per_gb: gb.map(|gb| measured.cpu_seconds / gb),
            client_cpu_us_per_operation: measured.cpu_seconds * 1e6 / operations,
            server_peak_mb: after.map(|used| used.peak_bytes as f64 / MB),
            server_rss_mb: after.map(|used| used.resident_bytes as f64 / MB),
            server_pss_mb: after.map(|used| used.proportional_bytes as f64 / MB),
            connection_rss_kb: grown(|used| used.resident_bytes),
            connection_pss_kb: grown(|used| used.proportional_bytes),
            burst: Burst::new(plan, tally, measured.seconds),
            growth: None,
        }
    }

    /// Adds samples of the server's memory, in bytes.
    pub(crate) fn with_samples(self, samples: &[u64]) -> Self {
        if samples.len() < SAMPLES_MIN {
            return self;
        }
        let samples_mb: Vec<f64> = samples.iter().map(|bytes| *bytes as f64 / MB).collect();
        let quarter = samples.len() / 4;
        let early = median(samples_mb[quarter..2 * quarter].to_vec());
        let late = median(samples_mb[samples.len() - quarter..].to_vec());
        Self { growth: Some(Growth { rss_mb: late - early, samples_mb }), ..self }
    }

    /// The most important figures.
    pub(crate) fn summary(&self) -> String {
        let mut text = format!(
            "{} GB/s, {:.0} operations/s, p99 {:.0} us, server {} CPU-s/GB, {} CPU-us/operation",
            figure(self.gb_per_second, 2),
            self.operations_per_second,
            self.p99_us,
            figure(self.server_cpu_per_gb, 3),
            figure(self.server_cpu_us_per_operation, 1)
        );
        for line in self.extras() {
            let _ = write!(text, "; {line}");
        }
        text
    }

    /// Named figures that only some workloads have.
    fn extras(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let (Some(rss), Some(pss)) = (self.connection_rss_kb, self.connection_pss_kb) {
            lines.push(format!("each connection {rss:.1} kB resident, {pss:.1} kB with shared pages once"));
        }
        if let Some(burst) = &self.burst {
            lines.push(format!(
                "reads during a burst: p50 {:.0} us, p99 {:.0} us ({:.2} x that without), {:.0} a second instead of {:.0}; \
                 the burst wrote {:.2} GB/s; {:.0} connections replaced",
                burst.p50_us,
                burst.p99_us,
                burst.p99_ratio,
                burst.reads_per_second,
                burst.quiet_reads_per_second,
                burst.write_gb_per_second,
                burst.replaced
            ));
        }
        if let Some(growth) = &self.growth {
            lines.push(format!("resident memory grew by {:.1} MB", growth.rss_mb));
        }
        lines
    }

    /// The median of each figure separately.
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
            server_rss_mb: if_known(|run| run.server_rss_mb),
            server_pss_mb: if_known(|run| run.server_pss_mb),
            connection_rss_kb: if_known(|run| run.connection_rss_kb),
            connection_pss_kb: if_known(|run| run.connection_pss_kb),
            burst: runs.iter().map(|run| run.burst.as_ref()).collect::<Option<Vec<_>>>().map(Burst::median),
            growth: None,
        }
    }
}

impl Burst {
    fn new(plan: &Plan, tally: &Tally, seconds: f64) -> Option<Self> {
        let connections = plan.mix.as_ref()?.burst_connections as f64;
        let quantile = |share| Some(tally.burst_latency.quantile(share)? as f64 / 1e3);
        let quiet_p99 = tally.latency.quantile(0.99)? as f64 / 1e3;
        let burst_seconds = tally.burst_seconds / connections;
        Some(Self {
            p50_us: quantile(0.5)?,
            p99_us: quantile(0.99)?,
            p999_us: quantile(0.999)?,
            p99_ratio: quantile(0.99)? / quiet_p99,
            quiet_reads_per_second: tally.latency.total() as f64 / (seconds - burst_seconds),
            reads_per_second: tally.burst_latency.total() as f64 / burst_seconds,
            write_gb_per_second: tally.burst_bytes as f64 / GB / burst_seconds,
            replaced: tally.replaced as f64,
        })
    }

    fn median(bursts: Vec<&Self>) -> Self {
        let of = |figure: fn(&Self) -> f64| median(bursts.iter().map(|burst| figure(burst)).collect());
        Self {
            p50_us: of(|burst| burst.p50_us),
            p99_us: of(|burst| burst.p99_us),
            p999_us: of(|burst| burst.p999_us),
            p99_ratio: of(|burst| burst.p99_ratio),
            quiet_reads_per_second: of(|burst| burst.quiet_reads_per_second),
            reads_per_second: of(|burst| burst.reads_per_second),
            write_gb_per_second: of(|burst| burst.write_gb_per_second),
            replaced: of(|burst| burst.replaced),
        }
    }
}

/// One server's runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Series {
    pub(crate) server: String,
    pub(crate) runs: Vec<Run>,
    pub(crate) median: Run,
}

impl Series {
    /// Requires at least one run.
    pub(crate) fn new(server: String, runs: Vec<Run>) -> Self {
        let median = Run::median(&runs);
        Self { server, runs, median }
    }
}

/// Ratios of Forebay's medians to another server's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Ratio {
    pub(crate) to: String,
    pub(crate) operations_per_second: f64,
    pub(crate) server_cpu_per_operation: Option<f64>,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    /// Ratio of the memory at the end, with shared pages counted once.
    pub(crate) server_pss: Option<f64>,
}

/// The complete results of one measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) machine: String,
    pub(crate) plan: Plan,
    pub(crate) series: Vec<Series>,
    /// Recomputed when a report is read.
    #[serde(skip_deserializing)]
    pub(crate) ratios: Vec<Ratio>,
}

impl Report {
    pub(crate) fn new(machine: String, plan: Plan, series: Vec<Series>) -> Self {
        let ratios = ratios(&series);
        Self { machine, plan, series, ratios }
    }

    /// Reads a file that [`Self::write`] has written.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        let report: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} does not hold results of forebay-bench load", path.display()))?;
        Ok(Self::new(report.machine, report.plan, report.series))
    }

    /// Writes everything as JSON.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }

    /// The figures of one server.
    pub(crate) fn of(&self, server: &str) -> Option<&Series> {
        self.series.iter().find(|series| series.server == server)
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
            "{:<15} {:>6} {:>7} {:>9} {:>9} {:>9} {:>9} {:>11} {:>12} {:>11} {:>12} {:>8} {:>8} {:>8}",
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
            "peak MB",
            "RSS MB",
            "PSS MB"
        );
        for series in &self.series {
            for (number, run) in series.runs.iter().enumerate() {
                let _ = writeln!(text, "{}", row(&series.server, &(number + 1).to_string(), run));
            }
        }
        for series in &self.series {
            let _ = writeln!(text, "{}", row(&series.server, "median", &series.median));
        }
        for series in &self.series {
            for line in series.median.extras() {
                let _ = writeln!(text, "{}: {line}", series.server);
            }
            for growth in series.runs.iter().filter_map(|run| run.growth.as_ref()) {
                let _ = writeln!(text, "{}: resident memory grew by {:.1} MB", series.server, growth.rss_mb);
            }
        }
        for ratio in &self.ratios {
            let cpu = figure(ratio.server_cpu_per_operation, 2);
            let pss = figure(ratio.server_pss, 2);
            let _ = writeln!(
                text,
                "forebay / {}: {:.2} x the operations/s, {cpu} x the CPU per operation, {:.2} x the p50, {:.2} x the p99, \
                 {pss} x the PSS",
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
                server_pss: ours.server_pss_mb.zip(its.server_pss_mb).map(|(ours, its)| ours / its),
            }
        })
        .collect()
}

fn figure(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}

fn row(server: &str, number: &str, run: &Run) -> String {
    format!(
        "{server:<15} {number:>6} {:>7} {:>9.0} {:>9.0} {:>9.0} {:>9.0} {:>11} {:>12} {:>11} {:>12.1} {:>8} {:>8} {:>8}",
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
        figure(run.server_rss_mb, 1),
        figure(run.server_pss_mb, 1),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::plan::{Mix, tests::plan};

    fn measured(operations: u64, bytes: u64) -> Measured {
        let mut tally = Tally { operations, bytes, ..Tally::default() };
        (0..operations).for_each(|_| tally.latency.record(100_000));
        Measured { tally, seconds: 2.0, cpu_seconds: 0.5 }
    }

    /// The resource usage before and after a run.
    fn used() -> Option<(Used, Used)> {
        let before =
            Used { cpu_seconds: 7.0, peak_bytes: 0, resident_bytes: 1_000_000, proportional_bytes: 500_000 };
        let after = Used {
            cpu_seconds: 8.0,
            peak_bytes: 3_000_000,
            resident_bytes: 2_000_000,
            proportional_bytes: 900_000,
        };
        Some((before, after))
    }

    #[test]
    fn figures_are_computed_per_gb_of_payload_and_per_operation() {
        let run = Run::new(&plan(Workload::Read), &measured(1000, 2_000_000_000), used());
        assert_eq!((run.gb_per_second, run.operations_per_second), (Some(1.0), 500.0));
        assert_eq!((run.server_cpu_per_gb, run.server_cpu_us_per_operation), (Some(0.5), Some(1000.0)));
        assert_eq!((run.client_cpu_per_gb, run.client_cpu_us_per_operation), (Some(0.25), 500.0));
        assert!((run.p99_us - 100.0).abs() < 2.0 && run.server_peak_mb == Some(3.0));
        let run = Run::new(&plan(Workload::Create), &measured(1000, 0), None);
        assert_eq!((run.gb_per_second, run.server_cpu_us_per_operation), (None, None));
    }

    #[test]
    fn connection_size_is_reported_only_for_the_idle_workload() {
        let run = Run::new(&plan(Workload::Idle), &measured(100, 0), used());
        assert_eq!((run.connection_rss_kb, run.connection_pss_kb), (Some(10.0), Some(4.0)));
        assert_eq!((run.server_rss_mb, run.server_pss_mb), (Some(2.0), Some(0.9)));
        assert_eq!(Run::new(&plan(Workload::Read), &measured(100, 0), used()).connection_rss_kb, None);
    }

    #[test]
    fn burst_latency_is_compared_with_the_quiet_time() {
        let mix = Mix {
            burst_connections: 2,
            checkpoint_bytes: 1,
            write_bytes: 1,
            cycle_seconds: 2.0,
            churn_seconds: None,
            verify: false,
        };
        let plan = Plan { mix: Some(mix), ..plan(Workload::Mixed) };
        let mut measured = measured(300, 1000);
        (0..100).for_each(|_| measured.tally.burst_latency.record(400_000));
        (measured.tally.burst_bytes, measured.tally.burst_seconds) = (3_000_000_000, 1.0);
        let burst = Run::new(&plan, &measured, None).burst.expect("it is a mixed load");
        assert!((burst.p99_ratio - 4.0).abs() < 0.1, "{burst:?}");
        assert_eq!((burst.quiet_reads_per_second, burst.reads_per_second), (200.0, 200.0));
        assert_eq!(burst.write_gb_per_second, 6.0);
    }

    #[test]
    fn growth_needs_enough_samples_and_ignores_the_first_ones() {
        let run = || Run::default();
        assert_eq!(run().with_samples(&[1_000_000; 7]).growth, None);
        let samples: Vec<u64> = [1, 5, 10, 10, 10, 10, 11, 12].map(|mb| mb * 1_000_000).into();
        let growth = run().with_samples(&samples).growth.expect("there are enough");
        assert_eq!((growth.rss_mb, growth.samples_mb.len()), (1.5, 8));
    }

    #[test]
    fn report_round_trips_through_a_file_and_other_json_is_rejected() {
        let run = Run::new(&plan(Workload::Read), &measured(10, 10), used());
        let series = Series::new("forebay".into(), vec![run.clone()]);
        let report = Report::new("a machine".into(), plan(Workload::Read), vec![series]);
        let file = tempfile::NamedTempFile::new().expect("a file");
        report.write(file.path()).expect("written");
        let again = Report::read(file.path()).expect("read");
        assert_eq!(again.of("forebay").expect("it is there").runs, [run]);
        std::fs::write(file.path(), "{}").expect("written");
        let error = Report::read(file.path()).expect_err("something else");
        assert!(error.to_string().contains("does not hold results"), "{error}");
    }

    #[test]
    fn table_and_ratios_compare_medians() {
        let series = |server: &str, operations: &[u64]| {
            let plan = plan(Workload::Read);
            let runs =
                operations.iter().map(|count| Run::new(&plan, &measured(*count, 1000 * count), used()));
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
