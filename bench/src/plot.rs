//! `forebay-bench plot`: results of the load as SVG, readable on light and dark pages.

mod svg;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use forebay_e2e::progress::say;

use crate::load::figure::{Figure, digits, figures, is_samba};
use crate::load::{Report, Series};
use svg::{Chart, Row, Section};

#[derive(Args)]
pub(crate) struct PlotArguments {
    /// Results written by `load --json` or `suite`.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The folder for the plots.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
}

/// Draws the results in the files.
pub(crate) fn run(arguments: &PlotArguments) -> Result<()> {
    let mut reports = Vec::new();
    for file in &arguments.files {
        let stem = file.file_stem().and_then(|stem| stem.to_str());
        reports.push((stem.context("a file has a name")?.to_owned(), Report::read(file)?));
    }
    draw(&reports, &arguments.out)
}

/// Draws one plot for each named report, and two over all of them.
pub(crate) fn draw(reports: &[(String, Report)], out: &Path) -> Result<()> {
    std::fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    for (name, report) in reports {
        ensure!(!OVERVIEWS.contains(&name.as_str()), "{name} is the name of a plot over all results");
        write(out, name, &of_report(report))?;
    }
    let all: Vec<&Report> = reports.iter().map(|(_, report)| report).collect();
    for (name, pick) in OVERVIEWS.into_iter().zip([throughput, cpu]) {
        if let Some(chart) = overview(&all, pick) {
            write(out, name, &chart)?;
        }
    }
    Ok(())
}

/// The plots over all reports.
const OVERVIEWS: [&str; 2] = ["throughput", "cpu"];

pub(crate) fn write(out: &Path, name: &str, chart: &Chart) -> Result<()> {
    let path = out.join(format!("{name}.svg"));
    std::fs::write(&path, chart.svg()).with_context(|| format!("write {}", path.display()))?;
    say(format!("plot: {}", path.display()));
    Ok(())
}

fn throughput(report: &Report) -> Option<Figure> {
    figures(&report.plan).into_iter().find(|figure| figure.more_is_better())
}

fn cpu(report: &Report) -> Option<Figure> {
    let is_cpu = |figure: &Figure| matches!(figure, Figure::CpuPerGb | Figure::CpuPerOperation);
    figures(&report.plan).into_iter().find(is_cpu)
}

/// Every figure of one report in absolute values, one section for each.
pub(crate) fn of_report(report: &Report) -> Chart {
    let sections = figures(&report.plan).into_iter().filter_map(|figure| {
        let rows: Vec<Row> =
            report.series.iter().filter_map(|series| row(report, series, figure, 1.0)).collect();
        let largest = rows.iter().map(|row| row.high).fold(0.0, f64::max);
        let direction = if figure.more_is_better() { "more is better" } else { "less is better" };
        let heading = format!("{}, {}: {direction}", capitalized(figure.name()), figure.unit());
        (!rows.is_empty()).then_some(Section { heading, largest, unity: None, rows })
    });
    Chart {
        title: capitalized(&report.plan.label()),
        notes: vec![report.machine.clone(), runs(&[report])],
        sections: sections.collect(),
    }
}

/// One figure of every report that includes a Samba, relative to the best Samba: bars are ratios, labels also have absolute
/// values.
fn overview(reports: &[&Report], pick: fn(&Report) -> Option<Figure>) -> Option<Chart> {
    let mut sections = Vec::new();
    let mut drawn = Vec::new();
    let mut name = "";
    for &report in reports {
        let Some(figure) = pick(report) else { continue };
        let Some((_, unity)) = figure.best(report, is_samba).filter(|(_, value)| *value > 0.0) else {
            continue;
        };
        name = figure.name();
        let rows: Vec<Row> =
            report.series.iter().filter_map(|series| row(report, series, figure, unity)).collect();
        let heading = format!("{}: {}", capitalized(&report.plan.label()), figure.unit());
        sections.push(Section { heading, largest: 0.0, unity: Some(1.0), rows });
        drawn.push(report);
    }
    let largest = sections.iter().flat_map(|section| &section.rows).map(|row| row.high).fold(1.0, f64::max);
    sections.iter_mut().for_each(|section| section.largest = largest);
    let direction = if pick(drawn.first()?)?.more_is_better() { "more is better" } else { "less is better" };
    Some(Chart {
        title: format!("{} over that of the best Samba: {direction}", capitalized(name)),
        notes: vec![drawn.first()?.machine.clone(), runs(&drawn)],
        sections,
    })
}

/// A bar: the figure of one server relative to `unity`, with its range.
fn row(report: &Report, series: &Series, figure: Figure, unity: f64) -> Option<Row> {
    let value = figure.of(&series.median)?;
    let (low, high) = figure.range(series)?;
    let mut label = digits(value);
    if series.runs.len() > 1 {
        label = format!("{label} ({} to {})", digits(low), digits(high));
    }
    // A ratio of ratios is meaningless.
    let samba = figure.best(report, is_samba).filter(|(_, its)| *its > 0.0 && figure != Figure::BurstRatio);
    if let Some((samba, its)) = samba.filter(|(samba, _)| *samba != series.server) {
        label = format!("{label} = {} × {samba}", digits(value / its));
    }
    Some(Row {
        name: series.server.clone(),
        server: series.server.clone(),
        value: value / unity,
        low: low / unity,
        high: high / unity,
        label,
    })
}

/// The number of runs behind each bar.
fn runs(reports: &[&Report]) -> String {
    let counts = reports.iter().flat_map(|report| &report.series).map(|series| series.runs.len());
    let (least, most) =
        counts.fold((usize::MAX, 0), |(least, most), count| (least.min(count), most.max(count)));
    if most <= 1 {
        return "Bars: one run of each.".to_owned();
    }
    let counts = if least == most { most.to_string() } else { format!("{least} to {most}") };
    format!("Bars: medians of {counts} runs. Lines and parentheses: lowest to highest.")
}

/// One figure of several reports that differ in the number of connections.
pub(crate) fn by_connections(reports: &[Report]) -> Option<Chart> {
    let first = reports.first()?;
    let figure = throughput(first)?;
    let rows: Vec<Row> = reports
        .iter()
        .filter_map(|report| {
            let row = row(report, report.series.first()?, figure, 1.0)?;
            Some(Row { name: report.plan.connections.to_string(), ..row })
        })
        .collect();
    let largest = rows.iter().map(|row| row.high).fold(0.0, f64::max);
    let heading = format!("{}, {}, by the number of connections", capitalized(figure.name()), figure.unit());
    let mut notes = vec![first.machine.clone()];
    notes.push(runs(&reports.iter().collect::<Vec<_>>()));
    Some(Chart {
        title: format!("{} of 1 MiB from one connection to many", capitalized(&first.plan.workload.name())),
        notes,
        sections: vec![Section { heading, largest, unity: None, rows }],
    })
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use super::svg::tests::bars;
    use super::*;
    use crate::load::Workload;
    use crate::load::figure::tests::report;

    fn sample(workload: Workload) -> Report {
        report(
            workload,
            &[
                ("samba", &[(2.0, 0.8), (1.0, 0.8), (3.0, 0.8)]),
                ("samba-uring", &[(2.5, 0.5)]),
                ("forebay", &[(5.0, 0.2)]),
                ("floor-sendfile", &[(4.0, 0.4)]),
            ],
        )
    }

    #[test]
    fn report_plot_has_a_bar_for_each_server_and_figure() {
        let bars = bars(&of_report(&sample(Workload::Read)).svg());
        let classes: Vec<&str> = bars.iter().map(|(class, _)| class.as_str()).collect();
        assert_eq!(classes, ["samba", "samba-uring", "forebay", "floor"].repeat(4));
        let widths: Vec<f64> = bars.iter().map(|(_, width)| *width).collect();
        assert_eq!(widths[..8], [152.0, 190.0, 380.0, 304.0, 380.0, 237.5, 95.0, 190.0]);
    }

    #[test]
    fn the_overview_shows_ratios_to_the_best_samba_and_absolute_values() {
        let reports = [sample(Workload::Read), report(Workload::Write, &[("forebay", &[(1.0, 1.0)])])];
        let all: Vec<&Report> = reports.iter().collect();
        let text = overview(&all, throughput).expect("one has a Samba").svg();
        assert_eq!(bars(&text).len(), 4, "the other has none and is left out");
        assert!(text.contains(">5.00 = 2.00 × samba-uring<"), "{text}");
        assert!(text.contains(">2.00 (1.00 to 3.00) = 0.800 × samba-uring<"), "{text}");
        let text = overview(&all, cpu).expect("one has a Samba").svg();
        assert!(text.contains(">0.200 = 0.400 × samba-uring<"), "{text}");
        assert_eq!(overview(&all[1..], cpu), None);
    }

    #[test]
    fn plots_are_drawn_from_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("read-1m.json");
        sample(Workload::Read).write(&file).expect("written");
        let out = folder.path().join("plots");
        run(&PlotArguments { files: vec![file], out: out.clone() }).expect("drawn");
        for name in ["read-1m", "throughput", "cpu"] {
            let text = std::fs::read_to_string(out.join(format!("{name}.svg"))).expect("a plot");
            assert!(bars(&text).len() >= 4, "{name}");
        }
    }

    #[test]
    fn connection_plot_has_a_bar_for_each_connection_count() {
        let reports = [1.0, 2.0].map(|gb| report(Workload::Read, &[("forebay", &[(gb, 0.1)])]));
        let bars = bars(&by_connections(&reports).expect("a chart").svg());
        assert_eq!(bars, [("forebay".to_owned(), 190.0), ("forebay".to_owned(), 380.0)]);
    }
}
