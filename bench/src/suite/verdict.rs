//! Compares figures with targets.

use std::fmt::Write;

use super::cases::{Bound, Case, Goal, Peer};
use crate::load::figure::{Figure, digits, figures, is_samba};
use crate::load::{Report, Series};

/// A line of the table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    case: String,
    measure: String,
    ours: String,
    theirs: String,
    ratio: Option<f64>,
    target: String,
    is_met: Option<bool>,
}

/// One line for each goal of a case.
pub(crate) fn lines(case: &Case, reports: &[Report]) -> Vec<Line> {
    case.goals.iter().filter_map(|goal| line(case, goal, reports)).collect()
}

fn line(case: &Case, goal: &Goal, reports: &[Report]) -> Option<Line> {
    let report = reports.first()?;
    let ours = |report: &Report| goal.figure.of(&report.of("forebay")?.median);
    let unit = goal.figure.unit();
    let (value, theirs) = match goal.peer {
        Peer::Samba => (ours(report), goal.figure.best(report, is_samba)),
        Peer::Floor(name) => (ours(report), goal.figure.best(report, |server| server.starts_with(name))),
        Peer::None => (ours(report), None),
        Peer::Fewer => {
            let values: Vec<f64> = reports.iter().filter_map(ours).collect();
            let (value, best) = worst_step(&values)?;
            (Some(value), Some(("forebay with fewer", best)))
        }
    };
    let ratio = match (value, theirs) {
        (Some(value), _) if goal.peer == Peer::None => Some(value),
        (Some(value), Some((_, theirs))) => Some(value / theirs),
        _ => None,
    };
    let suffix = match goal.peer {
        Peer::Samba => " × Samba",
        Peer::Floor(_) => " × floor",
        Peer::None => "",
        Peer::Fewer => " × its own best",
    };
    let (sign, bound) = match goal.bound {
        Bound::AtLeast(bound) => ("≥", bound),
        Bound::AtMost(bound) => ("≤", bound),
    };
    let label = if case.connections.is_empty() {
        report.plan.label()
    } else {
        format!("{}, from {} to {} connections", report.plan.workload.name(), first(case), last(case))
    };
    Some(Line {
        case: case.name.to_owned(),
        measure: format!("{label}: {}", goal.figure.name()),
        ours: value.map_or("-".to_owned(), |value| format!("{} {unit}", digits(value))),
        theirs: theirs.map_or("-".to_owned(), |(name, value)| format!("{name} {}", digits(value))),
        ratio,
        target: format!("{sign} {}{suffix}", digits(bound)),
        is_met: ratio.map(|ratio| match goal.bound {
            Bound::AtLeast(bound) => ratio >= bound,
            Bound::AtMost(bound) => ratio <= bound,
        }),
    })
}

fn first(case: &Case) -> usize {
    case.connections.first().copied().unwrap_or_default()
}

fn last(case: &Case) -> usize {
    case.connections.last().copied().unwrap_or_default()
}

/// The value that is lowest relative to the best value up to and including it, and that best value.
fn worst_step(values: &[f64]) -> Option<(f64, f64)> {
    let mut best = 0.0_f64;
    let steps = values.iter().map(|&value| {
        best = best.max(value);
        (value, best)
    });
    steps.min_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)))
}

/// The table of targets.
pub(crate) fn table(lines: &[Line]) -> String {
    let mut text = String::from("## Targets\n\n");
    let met = lines.iter().filter(|line| line.is_met == Some(true)).count();
    let known = lines.iter().filter(|line| line.is_met.is_some()).count();
    let _ = writeln!(
        text,
        "{met} of {known} are met. Ratios are of medians; Samba is the better one for the figure.\n"
    );
    text.push_str(
        "| case | measure | Forebay | beside | ratio | target | met |\n|---|---|---|---|---|---|---|\n",
    );
    for line in lines {
        let ratio = line.ratio.map_or("-".to_owned(), digits);
        let is_met = match line.is_met {
            Some(true) => "yes",
            Some(false) => "**no**",
            None => "not measured",
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {ratio} | {} | {is_met} |",
            line.case, line.measure, line.ours, line.theirs, line.target
        );
    }
    text
}

/// Throughput, CPU time, latency and memory of a server.
pub(crate) fn cells(report: &Report, series: &Series) -> Vec<String> {
    let figures = figures(&report.plan);
    let find = |wanted: &[Figure]| wanted.iter().copied().find(|figure| figures.contains(figure));
    let cell = |figure: Option<Figure>| {
        let known = figure.and_then(|figure| Some((figure.of(&series.median)?, figure.unit())));
        known.map_or("-".to_owned(), |(value, unit)| format!("{} {unit}", digits(value)))
    };
    let burst = match (cell(find(&[Figure::P99])), find(&[Figure::BurstP99])) {
        (quiet, Some(burst)) => format!("{quiet}, in a burst {}", cell(Some(burst))),
        (quiet, None) => quiet,
    };
    let memory = match find(&[Figure::ConnectionPss]) {
        Some(figure) => format!("{} a connection", cell(Some(figure))),
        None => cell(Some(Figure::Pss)),
    };
    vec![
        cell(find(&[Figure::GbPerSecond, Figure::OperationsPerSecond])),
        cell(find(&[Figure::CpuPerGb, Figure::CpuPerOperation])),
        burst,
        memory,
    ]
}

#[cfg(test)]
mod tests {
    use super::super::cases::{Effort, all};
    use super::*;
    use crate::load::Workload;
    use crate::load::figure::tests::report;

    fn case(name: &str) -> Case {
        all(Effort::quick()).into_iter().find(|case| case.name == name).expect("a case of that name")
    }

    #[test]
    fn each_goal_is_judged_against_its_own_peer() {
        let report = report(
            Workload::Read,
            &[
                ("samba", &[(4.0, 0.5)]),
                ("samba-uring", &[(3.0, 0.4)]),
                ("forebay", &[(8.0, 0.18)]),
                ("floor-sendfile", &[(9.0, 0.16)]),
            ],
        );
        let lines = lines(&case("read-1m-c8"), &[report]);
        let met: Vec<_> = lines.iter().map(|line| line.is_met).collect();
        assert_eq!(met, [Some(true), Some(false), Some(true)], "{lines:?}");
        let text = table(&lines);
        assert!(text.contains("2 of 3 are met"), "{text}");
        assert!(
            text.contains("| 0.180 CPU-s/GB | samba-uring 0.400 | 0.450 | ≤ 0.400 × Samba | **no** |"),
            "{text}"
        );
        assert!(text.contains("| 8.00 GB/s | samba 4.00 | 2.00 | ≥ 1.80 × Samba | yes |"), "{text}");
    }

    #[test]
    fn goal_without_a_peer_is_not_measured() {
        let report = report(Workload::Read, &[("forebay", &[(8.0, 0.18)])]);
        let lines = lines(&case("read-1m-c1"), &[report]);
        assert_eq!(lines[0].is_met, None);
        assert!(table(&lines).contains("| - | - | ≥ 1.50 × Samba | not measured |"), "{}", table(&lines));
    }

    #[test]
    fn worst_step_finds_a_throughput_drop_with_more_connections() {
        assert_eq!(worst_step(&[1.0, 2.0, 3.0]), Some((1.0, 1.0)));
        assert_eq!(worst_step(&[1.0, 4.0, 3.0, 5.0]), Some((3.0, 4.0)));
        assert_eq!(worst_step(&[]), None);
    }

    #[test]
    fn table_row_of_a_server_has_all_cells() {
        let report = report(Workload::Read, &[("forebay", &[(8.0, 0.18)])]);
        assert_eq!(cells(&report, &report.series[0]), ["8.00 GB/s", "0.180 CPU-s/GB", "100 µs", "10.0 MB"]);
    }
}
