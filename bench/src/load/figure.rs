//! The figures of a run that plots and targets use: name, unit, and which of two values is better.

use super::plan::{Plan, Workload};
use super::report::{Report, Run, Series};

/// A figure of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Figure {
    /// Payload per second.
    GbPerSecond,
    /// Operations per second.
    OperationsPerSecond,
    /// CPU time of the server per GB of payload.
    CpuPerGb,
    /// CPU time of the server per operation.
    CpuPerOperation,
    /// 99th percentile of the latency; in a mixed load, outside of bursts.
    P99,
    /// The same during a burst.
    BurstP99,
    /// The ratio of burst to non-burst latency.
    BurstRatio,
    /// Resident memory of the server, shared pages counted once.
    Pss,
    /// Resident memory per connection.
    ConnectionRss,
    /// The same with shared pages counted once.
    ConnectionPss,
}

impl Figure {
    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::GbPerSecond | Self::OperationsPerSecond => "throughput",
            Self::CpuPerGb | Self::CpuPerOperation => "server CPU time",
            Self::P99 => "99th percentile of the latency",
            Self::BurstP99 => "99th percentile of the latency during a burst",
            Self::BurstRatio => "99th percentile during a burst over that without",
            Self::Pss => "memory of the server (PSS)",
            Self::ConnectionRss => "RSS of a connection",
            Self::ConnectionPss => "PSS of a connection",
        }
    }

    /// Its unit.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::GbPerSecond => "GB/s",
            Self::OperationsPerSecond => "operations/s",
            Self::CpuPerGb => "CPU-s/GB",
            Self::CpuPerOperation => "CPU-µs/operation",
            Self::P99 | Self::BurstP99 => "µs",
            Self::BurstRatio => "×",
            Self::Pss => "MB",
            Self::ConnectionRss | Self::ConnectionPss => "kB",
        }
    }

    /// Whether a higher value is better.
    pub(crate) fn more_is_better(self) -> bool {
        matches!(self, Self::GbPerSecond | Self::OperationsPerSecond)
    }

    /// Its value in a run, if it has one.
    pub(crate) fn of(self, run: &Run) -> Option<f64> {
        match self {
            Self::GbPerSecond => run.gb_per_second,
            Self::OperationsPerSecond => Some(run.operations_per_second),
            Self::CpuPerGb => run.server_cpu_per_gb,
            Self::CpuPerOperation => run.server_cpu_us_per_operation,
            Self::P99 => Some(run.p99_us),
            Self::BurstP99 => Some(run.burst.as_ref()?.p99_us),
            Self::BurstRatio => Some(run.burst.as_ref()?.p99_ratio),
            Self::Pss => run.server_pss_mb,
            Self::ConnectionRss => run.connection_rss_kb,
            Self::ConnectionPss => run.connection_pss_kb,
        }
    }

    /// Lowest and highest value of all runs.
    pub(crate) fn range(self, series: &Series) -> Option<(f64, f64)> {
        let values: Vec<f64> = series.runs.iter().filter_map(|run| self.of(run)).collect();
        let (first, rest) = values.split_first()?;
        Some(rest.iter().fold((*first, *first), |(low, high), value| (low.min(*value), high.max(*value))))
    }

    /// The best median of the servers that `who` selects, and the server's name.
    pub(crate) fn best(self, report: &Report, who: impl Fn(&str) -> bool) -> Option<(&str, f64)> {
        let medians = report.series.iter().filter(|series| who(&series.server));
        let known = medians.filter_map(|series| Some((series.server.as_str(), self.of(&series.median)?)));
        known.reduce(|best, next| {
            let is_better = if self.more_is_better() { next.1 > best.1 } else { next.1 < best.1 };
            if is_better { next } else { best }
        })
    }
}

/// Whether a server of that name is a Samba.
pub(crate) fn is_samba(server: &str) -> bool {
    server.starts_with("samba")
}

/// For READs and WRITEs up to this size, operations are counted instead of bytes.
const COUNTED_BYTES: usize = 16 << 10;

/// The relevant figures of a workload: throughput, CPU time, then the rest.
pub(crate) fn figures(plan: &Plan) -> Vec<Figure> {
    match plan.workload {
        Workload::Idle => vec![Figure::ConnectionRss, Figure::ConnectionPss],
        Workload::Mixed => {
            vec![Figure::GbPerSecond, Figure::CpuPerGb, Figure::P99, Figure::BurstP99, Figure::BurstRatio]
        }
        Workload::Create | Workload::Stat | Workload::List | Workload::Sessions | Workload::Retinanet => {
            vec![Figure::OperationsPerSecond, Figure::CpuPerOperation, Figure::P99, Figure::Pss]
        }
        _ if plan.io_bytes <= COUNTED_BYTES => {
            vec![Figure::OperationsPerSecond, Figure::CpuPerOperation, Figure::P99, Figure::Pss]
        }
        _ => vec![Figure::GbPerSecond, Figure::CpuPerGb, Figure::P99, Figure::Pss],
    }
}

/// A value with about three digits.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        large if large >= 1000.0 => {
            let whole = format!("{:.0}", value.abs());
            let mut text = String::new();
            for (at, digit) in whole.chars().enumerate() {
                if at > 0 && (whole.len() - at).is_multiple_of(3) {
                    text.push(',');
                }
                text.push(digit);
            }
            if value < 0.0 { format!("-{text}") } else { text }
        }
        large if large >= 100.0 => format!("{value:.0}"),
        some if some >= 10.0 => format!("{value:.1}"),
        some if some >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::load::plan::tests::plan;

    /// A report of one workload: servers with their GB/s and CPU-seconds per GB, run by run.
    pub(crate) fn report(workload: Workload, servers: &[(&str, &[(f64, f64)])]) -> Report {
        let run = |&(gb, cpu): &(f64, f64)| Run {
            gb_per_second: Some(gb),
            operations_per_second: gb * 1000.0,
            server_cpu_per_gb: Some(cpu),
            server_cpu_us_per_operation: Some(cpu * 1000.0),
            p99_us: 100.0,
            server_pss_mb: Some(10.0),
            ..Run::default()
        };
        let series = servers
            .iter()
            .map(|(name, runs)| Series::new((*name).to_owned(), runs.iter().map(run).collect()))
            .collect();
        Report::new("a machine".into(), Plan { io_bytes: 1 << 20, ..plan(workload) }, series)
    }

    #[test]
    fn best_peer_is_the_fastest_or_the_cheapest_per_figure() {
        let report = report(
            Workload::Read,
            &[("samba", &[(2.0, 0.7)]), ("samba-uring", &[(3.0, 0.8)]), ("forebay", &[(9.0, 0.1)])],
        );
        assert_eq!(Figure::GbPerSecond.best(&report, is_samba), Some(("samba-uring", 3.0)));
        assert_eq!(Figure::CpuPerGb.best(&report, is_samba), Some(("samba", 0.7)));
        assert_eq!(Figure::CpuPerGb.best(&report, |name| name == "floor"), None);
        assert_eq!(Figure::ConnectionRss.best(&report, is_samba), None);
    }

    #[test]
    fn values_have_three_significant_digits_or_all_integer_digits() {
        let texts = [0.1476, 2.345, 23.45, 234.5, 2345.6, 1_234_567.0].map(digits);
        assert_eq!(texts, ["0.148", "2.35", "23.4", "234", "2,346", "1,234,567"]);
    }
}
