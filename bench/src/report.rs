//! Results: a table for people, the same as JSON, and the verdict.

use std::fmt::Write;

use serde::Serialize;

use crate::torture::Load;

/// One run of one server.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Run {
    /// GB/s that the client received; a GB is 10⁹ bytes.
    pub(crate) gb_per_second: f64,
    /// CPU-seconds of the server per GB.
    pub(crate) server_cpu_per_gb: f64,
    /// CPU-seconds of the client per GB; unknown for the bare loops.
    pub(crate) client_cpu_per_gb: Option<f64>,
}

/// One server's runs.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Series {
    pub(crate) server: &'static str,
    pub(crate) is_samba: bool,
    pub(crate) runs: Vec<Run>,
    /// The median of each figure separately.
    pub(crate) median: Run,
}

impl Series {
    pub(crate) fn new(server: &'static str, is_samba: bool, runs: Vec<Run>) -> Self {
        let of = |figure: fn(&Run) -> f64| median(runs.iter().map(figure).collect());
        let clients: Option<Vec<f64>> = runs.iter().map(|run| run.client_cpu_per_gb).collect();
        let median = Run {
            gb_per_second: of(|run| run.gb_per_second),
            server_cpu_per_gb: of(|run| run.server_cpu_per_gb),
            client_cpu_per_gb: clients.map(median),
        };
        Self { server, is_samba, runs, median }
    }
}

/// The complete results of one measurement.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) machine: String,
    pub(crate) load: Load,
    pub(crate) series: Vec<Series>,
}

impl Report {
    /// The table.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        let load = &self.load;
        let _ = writeln!(
            text,
            "{} B reads, {} connections, depth {}, {} s a run; {}",
            load.io_bytes, load.connections, load.depth, load.seconds, self.machine
        );
        let _ = writeln!(
            text,
            "{:<15} {:>6} {:>7} {:>16} {:>16}",
            "", "run", "GB/s", "server CPU-s/GB", "client CPU-s/GB"
        );
        for series in &self.series {
            for (number, run) in series.runs.iter().enumerate() {
                let _ = writeln!(text, "{}", row(series.server, &(number + 1).to_string(), run));
            }
        }
        for series in &self.series {
            let _ = writeln!(text, "{}", row(series.server, "median", &series.median));
        }
        for (samba, speed, cpu) in self.ratios() {
            let _ = writeln!(text, "forebay / {samba}: {speed:.2} x the GB/s, {cpu:.2} x the CPU per GB");
        }
        text
    }

    /// Ratios of ours to each Samba: GB/s, and server CPU per GB.
    fn ratios(&self) -> Vec<(&'static str, f64, f64)> {
        let Some(ours) = self.series.iter().find(|series| series.server == "forebay") else {
            return Vec::new();
        };
        let sambas = self.series.iter().filter(|series| series.is_samba);
        sambas
            .map(|samba| {
                let speed = ours.median.gb_per_second / samba.median.gb_per_second;
                (samba.server, speed, ours.median.server_cpu_per_gb / samba.median.server_cpu_per_gb)
            })
            .collect()
    }

    /// Whether our server is at least as fast as every measured Samba, at no more CPU time per GB. False if there was nothing
    /// to compare.
    pub(crate) fn has_parity(&self) -> bool {
        let ratios = self.ratios();
        !ratios.is_empty() && ratios.iter().all(|(_, speed, cpu)| *speed >= 1.0 && *cpu <= 1.0)
    }
}

fn row(server: &str, run: &str, figures: &Run) -> String {
    let client = figures.client_cpu_per_gb.map_or("-".to_owned(), |cpu| format!("{cpu:.3}"));
    format!(
        "{server:<15} {run:>6} {:>7.2} {:>16.3} {client:>16}",
        figures.gb_per_second, figures.server_cpu_per_gb
    )
}

/// Requires at least one value.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(server: &'static str, runs: &[(f64, f64)]) -> Series {
        let run = |&(gb_per_second, server_cpu_per_gb)| Run {
            gb_per_second,
            server_cpu_per_gb,
            client_cpu_per_gb: Some(0.5),
        };
        Series::new(server, server.starts_with("samba"), runs.iter().map(run).collect())
    }

    fn report(series: Vec<Series>) -> Report {
        let load = Load { io_bytes: 1 << 20, connections: 2, depth: 8, seconds: 10 };
        Report { machine: "a machine".into(), load, series }
    }

    #[test]
    fn medians_are_computed_per_figure_and_ignore_outliers() {
        let series = series("samba", &[(1.0, 0.9), (3.0, 0.1), (2.0, 0.5)]);
        assert_eq!((series.median.gb_per_second, series.median.server_cpu_per_gb), (2.0, 0.5));
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
    }

    #[test]
    fn parity_requires_both_figures_against_every_samba() {
        let samba = || series("samba", &[(1.0, 0.6)]);
        let sendfile = || series("samba-sendfile", &[(1.2, 0.5)]);
        let all = |ours| report(vec![samba(), sendfile(), series("forebay", &[ours])]).has_parity();
        assert!(all((1.2, 0.5)));
        assert!(!all((1.1, 0.4)), "slower than one of them");
        assert!(!all((1.3, 0.55)), "more CPU than one of them");
        assert!(!report(vec![samba(), sendfile()]).has_parity(), "ours was not measured");
        assert!(!report(vec![series("forebay", &[(9.0, 0.1)])]).has_parity(), "nothing to compare with");
    }

    #[test]
    fn table_lists_every_run_the_medians_and_the_ratio() {
        let text = report(vec![series("samba", &[(1.0, 0.6), (2.0, 0.4)]), series("forebay", &[(3.0, 0.3)])])
            .table();
        assert_eq!(text.lines().filter(|line| line.starts_with("samba")).count(), 3, "{text}");
        assert!(text.contains("forebay / samba: 2.00 x the GB/s, 0.60 x the CPU per GB"), "{text}");
    }
}
