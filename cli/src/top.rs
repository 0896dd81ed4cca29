//! `kubectl forebay top`: the current load of each volume, the busiest first.

use std::cmp::Ordering;
use std::io::{self, IsTerminal};
use std::time::Duration;

use anyhow::bail;
use clap::ValueEnum;
use serde::Serialize;
use tokio::time::{Instant, sleep_until};

use crate::options::{Format, Top};
use crate::paint::{Paint, Tone};
use crate::quantity::bytes;
use crate::scrape::{self, Counts, KINDS, Scrape};
use crate::snapshot;
use crate::table::{Cell, Table};

/// By what volumes are in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
    /// Bytes read and written.
    Throughput,
    /// Operations.
    Operations,
    /// Mean time of an operation.
    Latency,
    /// Operations that waited for the volume's limits.
    Waited,
}

/// The data to show.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct View {
    /// Time between the two queries, in seconds.
    interval_seconds: f64,
    volumes: Vec<Row>,
    /// Servers that could not be queried.
    unread: Vec<String>,
}

/// One volume. Rates are per second.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    claim_namespace: String,
    claim: String,
    volume: String,
    instance: String,
    node: String,
    read_bytes: f64,
    written_bytes: f64,
    reads: f64,
    writes: f64,
    flushes: f64,
    metadata_operations: f64,
    /// Mean of all operations, in seconds; absent if there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_seconds: Option<f64>,
    /// Operations that waited for the volume's limits.
    waited: f64,
    sessions: f64,
    open_files: f64,
}

impl Row {
    /// Computes the rates between two queries.
    fn between(before: &Counts, after: &Counts, seconds: f64) -> Self {
        let change = |before: f64, after: f64| {
            // The counters of a server that was restarted in between begin at zero.
            if after < before { after } else { after - before }
        };
        let rate = |before: f64, after: f64| change(before, after) / seconds;
        let operations: [f64; KINDS.len()] =
            std::array::from_fn(|kind| change(before.operations[kind], after.operations[kind]));
        let took: f64 = (0..KINDS.len()).map(|kind| change(before.seconds[kind], after.seconds[kind])).sum();
        let all: f64 = operations.iter().sum();
        let [reads, writes, flushes, metadata_operations] = operations.map(|count| count / seconds);
        Self {
            claim_namespace: after.claim_namespace.clone(),
            claim: after.claim.clone(),
            read_bytes: rate(before.read_bytes, after.read_bytes),
            written_bytes: rate(before.written_bytes, after.written_bytes),
            reads,
            writes,
            flushes,
            metadata_operations,
            latency_seconds: (all > 0.0).then(|| took / all),
            waited: rate(before.waited, after.waited),
            sessions: after.sessions,
            open_files: after.open_files,
            ..Self::default()
        }
    }

    fn operations(&self) -> f64 {
        self.reads + self.writes + self.flushes + self.metadata_operations
    }

    fn throughput(&self) -> f64 {
        self.read_bytes + self.written_bytes
    }

    /// Orders the busier volume first, and equal ones by name.
    fn order(&self, other: &Self, by: Sort) -> Ordering {
        let key = |row: &Self| match by {
            Sort::Throughput => row.throughput(),
            Sort::Operations => row.operations(),
            Sort::Latency => row.latency_seconds.unwrap_or_default(),
            Sort::Waited => row.waited,
        };
        let name = |row: &Self| (row.claim_namespace.clone(), row.claim.clone(), row.volume.clone());
        key(other).total_cmp(&key(self)).then_with(|| name(self).cmp(&name(other)))
    }

    /// Returns the name of its claim, or of the volume if it was not made for a claim.
    fn name(&self) -> String {
        if self.claim.is_empty() {
            self.volume.clone()
        } else {
            format!("{}/{}", self.claim_namespace, self.claim)
        }
    }
}

/// Returns the volumes that are present in both queries.
fn rows(before: &[Scrape], after: &[Scrape], seconds: f64, sort: Sort) -> Vec<Row> {
    let mut rows = Vec::new();
    for Scrape { instance, node, volumes } in after {
        let Some(earlier) = before.iter().find(|scrape| scrape.instance == *instance) else { continue };
        for (volume, counts) in volumes {
            if let Some(earlier) = earlier.volumes.get(volume) {
                let (volume, instance, node) = (volume.clone(), instance.clone(), node.clone());
                rows.push(Row { volume, instance, node, ..Row::between(earlier, counts, seconds) });
            }
        }
    }
    rows.sort_by(|a, b| a.order(b, sort));
    rows
}

/// Queries all servers twice.
pub(crate) fn run(options: &Top, paint: Paint) -> anyhow::Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let view = runtime.block_on(look(options))?;
    Ok(match options.output {
        Format::Json => crate::json(&view)?,
        Format::Table => render(&view, false, options.limit, paint),
        Format::Wide => render(&view, true, options.limit, paint),
    })
}

async fn look(options: &Top) -> anyhow::Result<View> {
    let (client, namespace) = snapshot::connect(&options.connection).await?;
    let pods = match snapshot::pods(&client, namespace.as_deref()).await {
        Ok(pods) => pods,
        Err(why) => bail!("pods cannot be listed: {why}"),
    };
    let (before, unread) = scrape::servers(&client, &pods).await;
    if before.is_empty() {
        match unread.first() {
            Some(why) => bail!("no server can be queried (this needs permission to get pods/proxy): {why}"),
            None => bail!("no server runs here; -A searches every namespace"),
        }
    }
    let begun = Instant::now();
    if io::stderr().is_terminal() {
        eprintln!("measuring for {} s …", options.interval);
    }
    sleep_until(begun + Duration::from_secs(options.interval)).await;
    let (after, unread) = scrape::servers(&client, &pods).await;
    let interval_seconds = begun.elapsed().as_secs_f64();
    Ok(View { volumes: rows(&before, &after, interval_seconds, options.sort), interval_seconds, unread })
}

fn render(view: &View, wide: bool, limit: usize, paint: Paint) -> String {
    let heads = [
        "CLAIM", "INSTANCE", "READ", "WRITTEN", "READS", "WRITES", "METADATA", "LATENCY", "SESSIONS", "FILES",
    ];
    let more = ["FLUSHES", "WAITED", "NODE", "VOLUME"];
    let mut table = Table::new(&if wide { [&heads[..], &more].concat() } else { heads.to_vec() });
    let shown = if limit == 0 { view.volumes.len() } else { limit.min(view.volumes.len()) };
    let mut sum = Row { claim: "total".to_owned(), ..Row::default() };
    for row in &view.volumes {
        sum.read_bytes += row.read_bytes;
        sum.written_bytes += row.written_bytes;
        sum.reads += row.reads;
        sum.writes += row.writes;
        sum.flushes += row.flushes;
        sum.metadata_operations += row.metadata_operations;
        sum.waited += row.waited;
        sum.sessions += row.sessions;
        sum.open_files += row.open_files;
    }
    for row in &view.volumes[..shown] {
        table.row(cells(row, row.name().into(), wide));
    }
    if view.volumes.len() > 1 {
        table.row(cells(&sum, Cell::toned(format!("total of {}", view.volumes.len()), Tone::Strong), wide));
    }
    let mut text = table.render(paint);
    if shown < view.volumes.len() {
        let rest = format!("and {} more; --limit 0 shows all", view.volumes.len() - shown);
        text.push_str(&paint.text(Tone::Faint, &rest));
        text.push('\n');
    }
    if !view.unread.is_empty() {
        text.push_str(&format!("\n{}\n", paint.text(Tone::Doubtful, "Not read")));
        view.unread.iter().for_each(|line| text.push_str(&format!("  {line}\n")));
    }
    text
}

fn cells(row: &Row, name: Cell, wide: bool) -> Vec<Cell> {
    let throughput = |value: f64| if value < 1.0 { String::new() } else { bytes(value as i64) + "/s" };
    let count = |value: f64| match value {
        0.0 => String::new(),
        value if value < 10.0 => format!("{value:.1}/s"),
        value => format!("{value:.0}/s"),
    };
    let waited = match row.waited {
        0.0 => "".into(),
        waited => Cell::toned(count(waited), Tone::Doubtful),
    };
    let mut cells: Vec<Cell> = vec![
        name,
        row.instance.as_str().into(),
        throughput(row.read_bytes).into(),
        throughput(row.written_bytes).into(),
        count(row.reads).into(),
        count(row.writes).into(),
        count(row.metadata_operations).into(),
        row.latency_seconds.map(|seconds| format!("{:.2}ms", seconds * 1e3)).unwrap_or_default().into(),
        format!("{:.0}", row.sessions).into(),
        format!("{:.0}", row.open_files).into(),
    ];
    if wide {
        cells.extend([
            count(row.flushes).into(),
            waited,
            row.node.as_str().into(),
            row.volume.as_str().into(),
        ]);
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(claim: &str, read: f64, operations: f64, seconds: f64) -> Counts {
        Counts {
            claim_namespace: "team".to_owned(),
            claim: claim.to_owned(),
            sessions: 1.0,
            open_files: 2.0,
            read_bytes: read,
            operations: [operations, 0.0, 0.0, operations],
            seconds: [seconds, 0.0, 0.0, 0.0],
            ..Counts::default()
        }
    }

    fn scrape(instance: &str, volumes: &[(&str, Counts)]) -> Scrape {
        let volumes = volumes.iter().map(|(id, counts)| ((*id).to_owned(), counts.clone())).collect();
        Scrape { instance: instance.to_owned(), node: "storage-1".to_owned(), volumes }
    }

    #[test]
    fn rates_are_computed_between_scrapes_and_sorted_descending() {
        let before = [
            scrape("main-0", &[("a", counts("quiet", 5.0, 10.0, 1.0)), ("b", counts("busy", 0.0, 0.0, 0.0))]),
            scrape("main-1", &[("c", counts("restarted", 9e9, 500.0, 70.0))]),
        ];
        let after = [
            scrape(
                "main-0",
                &[
                    ("a", counts("quiet", 5.0, 10.0, 1.0)),
                    ("b", counts("busy", 4096.0, 40.0, 0.02)),
                    ("new", counts("new", 1e12, 1.0, 1.0)),
                ],
            ),
            scrape("main-1", &[("c", counts("restarted", 1024.0, 2.0, 0.4))]),
        ];
        let found = rows(&before, &after, 2.0, Sort::Throughput);
        let names: Vec<String> = found.iter().map(Row::name).collect();
        assert_eq!(names, ["team/busy", "team/restarted", "team/quiet"]);
        assert_eq!((found[0].read_bytes, found[0].reads, found[0].metadata_operations), (2048.0, 20.0, 20.0));
        assert_eq!(found[0].latency_seconds, Some(0.02 / 80.0));
        assert_eq!((found[1].read_bytes, found[1].reads), (512.0, 1.0));
        assert_eq!((found[2].read_bytes, found[2].latency_seconds), (0.0, None));
        let slowest = rows(&before, &after, 2.0, Sort::Latency);
        assert_eq!(slowest[0].name(), "team/restarted");
    }

    #[test]
    fn table_shows_the_busiest_volumes_and_the_total() {
        let row = |claim: &str, read_bytes: f64| Row {
            claim_namespace: "team".to_owned(),
            claim: claim.to_owned(),
            volume: format!("pvc-{claim}"),
            instance: "main-0".to_owned(),
            node: "storage-1".to_owned(),
            read_bytes,
            reads: read_bytes / 1024.0,
            latency_seconds: Some(0.00125),
            sessions: 2.0,
            open_files: 3.0,
            ..Row::default()
        };
        let view = View {
            interval_seconds: 5.0,
            volumes: vec![row("a", 3.0 * 1024.0), row("b", 1024.0)],
            unread: vec!["metrics of pod main-1-0: it does not answer".to_owned()],
        };
        let text = render(&view, false, 1, Paint::new(false));
        let expected = "\
CLAIM        INSTANCE   READ    WRITTEN   READS   WRITES   METADATA   LATENCY   SESSIONS   FILES
team/a       main-0     3Ki/s   -         3.0/s   -        -          1.25ms    2          3
total of 2   -          4Ki/s   -         4.0/s   -        -          -         4          6
and 1 more; --limit 0 shows all

Not read
  metrics of pod main-1-0: it does not answer
";
        assert_eq!(text, expected);
        assert!(render(&view, true, 0, Paint::new(false)).contains("storage-1   pvc-b\n"));
    }
}
