//! `kubectl forebay rehearse`: what a program notices of a server that fails. A pod writes to a new volume while the server's
//! pod is removed; a timeline has both sides.

mod beat;

use std::convert::Infallible;
use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use forebay_api::DRIVER;
use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use kube::api::{Api, DeleteParams, ListParams};
use kube::{Client, ResourceExt};
use serde::Serialize;
use tokio::time::timeout;

use self::beat::{Gap, Seen};
use crate::confirm;
use crate::job::{Load, MOUNTED_AT, Running, Until};
use crate::limits::{REHEARSE_DEADLINE, REHEARSE_POLL};
use crate::options::{Beat, BenchFormat, How, Rehearse};
use crate::paint::{Paint, Tone};
use crate::snapshot::{self, words};
use crate::who;

/// Before the result in the pod's log.
const MARK: &str = "forebay-rehearse-result: ";
/// Room for the records of the longest rehearsal: 3600 s × 10 × 4 KiB.
const VOLUME_BYTES: u64 = 256 << 20;
/// Between the first record and the disturbance.
const QUIET: Duration = Duration::from_secs(5);
/// For the first record, on a pod that has started.
const FIRST_RECORD_DEADLINE: Duration = Duration::from_secs(60);

/// The part of the pod.
pub(crate) fn beat(options: &Beat) -> anyhow::Result<()> {
    beat::run(&options.folder, Duration::from_secs(options.seconds))
}

/// Something that happened, in milliseconds from the disturbance on.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Event {
    milliseconds: i64,
    what: String,
}

/// The result of a rehearsal.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    instance: String,
    timeline: Vec<Event>,
    stood_still_milliseconds: u64,
    #[serde(flatten)]
    seen: Seen,
}

impl Report {
    fn new(instance: String, disturbed_at: u64, mut timeline: Vec<Event>, seen: Seen) -> Self {
        for Gap { from, milliseconds } in seen.gaps.iter().copied() {
            let at = |time: u64| time as i64 - disturbed_at as i64;
            timeline.push(Event { milliseconds: at(from), what: "the writer stands still".to_owned() });
            let what = format!("the writer goes on, after {:.1} s", milliseconds as f64 / 1e3);
            timeline.push(Event { milliseconds: at(from + milliseconds), what });
        }
        timeline.sort_by_key(|event| event.milliseconds);
        let stood_still_milliseconds = seen.gaps.iter().map(|gap| gap.milliseconds).max().unwrap_or(0);
        Self { instance, timeline, stood_still_milliseconds, seen }
    }

    /// Whether no program got an error and nothing was lost.
    fn is_good(&self) -> bool {
        self.seen.failed == 0 && self.seen.lost == 0
    }
}

/// Rehearses, and returns the report for the terminal and whether it is good.
pub(crate) fn run(options: &Rehearse, paint: Paint) -> anyhow::Result<(String, bool)> {
    ensure!(options.yes || confirm::is_possible(), "there is no terminal to ask for confirmation: use --yes");
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    let load = Load {
        verb: "rehearse",
        class: &options.class,
        place: &options.place,
        pods: 1,
        bytes: VOLUME_BYTES,
        arguments: vec![
            "beat".to_owned(),
            format!("--folder={MOUNTED_AT}"),
            format!("--seconds={}", options.seconds),
        ],
    };
    let report = runtime
        .block_on(load.with(&options.connection, async |running| rehearsed(options, running).await))?;
    let text = match options.output {
        BenchFormat::Json => crate::json(&report)?,
        BenchFormat::Table => render(&report, paint),
    };
    Ok((text, report.is_good()))
}

async fn rehearsed(options: &Rehearse, running: &Running) -> anyhow::Result<Report> {
    let writer = running.wait(Until::Started).await?.first().map(ResourceExt::name_any).unwrap_or_default();
    let instance = instance(running).await?;
    let server = server(running, &instance).await?;
    let (name, namespace) = (server.name_any(), server.namespace().unwrap_or_default());
    if !options.yes {
        confirm(&instance, &name).await?;
    }
    first_record(running, &writer).await?;
    tokio::time::sleep(QUIET).await;

    let pods: Api<Pod> = Api::namespaced(running.client.clone(), &namespace);
    let before = servers(&running.client, &namespace, &instance).await?;
    let disturbed_at = milliseconds_now();
    let (parameters, done) = match options.how {
        // Not 0, which removes the object while the process may still run.
        How::Kill => (DeleteParams::background().grace_period(1), "has one second to end"),
        How::Restart => (DeleteParams::background(), "is deleted"),
    };
    pods.delete(&name, &parameters)
        .await
        .map_err(|error| anyhow::anyhow!(words(&error)))
        .context("remove the server's pod")?;
    let mut timeline = vec![Event { milliseconds: 0, what: format!("server pod {name} {done}") }];
    running.say(&timeline[0].what);
    tokio::select! {
        pods = running.wait(Until::Succeeded) => drop(pods?),
        never = watch(running, &namespace, &instance, before, disturbed_at, &mut timeline) => match never {},
    }
    let log = running.log(&writer, None).await?;
    let line = log
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix(MARK))
        .context("the writer's log has no result")?;
    let seen: Seen = serde_json::from_str(line).context("the writer's result")?;
    Ok(Report::new(instance, disturbed_at, timeline, seen))
}

fn milliseconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// The instance that serves the claim's volume.
async fn instance(running: &Running) -> anyhow::Result<String> {
    let name =
        running.claim().await?.spec.and_then(|spec| spec.volume_name).context("the claim has no volume")?;
    let volumes: Api<PersistentVolume> = Api::all(running.client.clone());
    let volume = volumes
        .get(&name)
        .await
        .map_err(|error| anyhow::anyhow!(words(&error)))
        .context("read the volume")?;
    let csi = volume.spec.and_then(|spec| spec.csi).filter(|csi| csi.driver == DRIVER);
    let csi = csi.context("the StorageClass is not one of Forebay")?;
    let (instance, _) =
        csi.volume_handle.rsplit_once('/').context("the volume's handle names no instance")?;
    Ok(instance.to_owned())
}

/// The pod of the instance's server.
async fn server(running: &Running, instance: &str) -> anyhow::Result<Pod> {
    let pods =
        snapshot::pods(&running.client, running.forebay.as_deref()).await.map_err(anyhow::Error::msg)?;
    let mut servers = pods.into_iter().filter(|pod| who::serves(pod, instance));
    let server = servers.next().with_context(|| format!("instance {instance} has no pod"))?;
    ensure!(
        servers.next().is_none(),
        "several pods serve instance {instance}: wait until its move or update is done"
    );
    Ok(server)
}

/// Asks in a thread of its own, so that SIGINT ends the rehearsal meanwhile.
async fn confirm(instance: &str, pod: &str) -> anyhow::Result<()> {
    let question = format!(
        "All volumes of instance {instance} stand still until its server, pod {pod}, is back or replaced.\nType yes to disturb it: "
    );
    let (sender, answer) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || sender.send(confirm::confirmed(&question)));
    ensure!(answer.await.context("no answer")??, "nothing was disturbed");
    Ok(())
}

/// Waits until the writer has opened its file.
async fn first_record(running: &Running, writer: &str) -> anyhow::Result<()> {
    let wait = async {
        while running.log(writer, None).await.unwrap_or_default().is_empty() {
            tokio::time::sleep(REHEARSE_POLL).await;
        }
    };
    timeout(FIRST_RECORD_DEADLINE, wait).await.context("the writer does not write: see its pod with --keep")
}

/// What the timeline shows of a server's pod.
#[derive(Clone, Debug, PartialEq)]
struct Server {
    uid: String,
    name: String,
    node: Option<String>,
    ready: bool,
}

impl Server {
    fn new(pod: &Pod) -> Self {
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        Self {
            uid: pod.uid().unwrap_or_default(),
            name: pod.name_any(),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            ready: conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True"),
        }
    }
}

async fn servers(client: &Client, namespace: &str, instance: &str) -> anyhow::Result<Vec<Server>> {
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let of_servers = ListParams::default().labels("app.kubernetes.io/component=server");
    let pods = timeout(REHEARSE_DEADLINE, snapshot::list(api, &of_servers))
        .await
        .context("the API server does not answer")?;
    let pods = pods.map_err(anyhow::Error::msg)?;
    Ok(pods.iter().filter(|pod| who::serves(pod, instance)).map(Server::new).collect())
}

/// Adds every change of the instance's pods to the timeline. A reading that fails is repeated.
async fn watch(
    running: &Running,
    namespace: &str,
    instance: &str,
    mut before: Vec<Server>,
    disturbed_at: u64,
    timeline: &mut Vec<Event>,
) -> Infallible {
    loop {
        if let Ok(now) = servers(&running.client, namespace, instance).await {
            let milliseconds = milliseconds_now() as i64 - disturbed_at as i64;
            for what in changes(&before, &now) {
                running.say(&what);
                timeline.push(Event { milliseconds, what });
            }
            before = now;
        }
        tokio::time::sleep(REHEARSE_POLL).await;
    }
}

/// What differs between two readings.
fn changes(before: &[Server], now: &[Server]) -> Vec<String> {
    let mut changes = Vec::new();
    for old in before {
        if !now.iter().any(|new| new.uid == old.uid) {
            changes.push(format!("server pod {} is gone", old.name));
        }
    }
    for new in now {
        let old = before.iter().find(|old| old.uid == new.uid);
        if old.is_none() {
            changes.push(format!("a new server pod {} is there", new.name));
        }
        if let Some(node) = &new.node
            && old.is_none_or(|old| old.node.is_none())
        {
            changes.push(format!("server pod {} is on node {node}", new.name));
        }
        match (old.is_some_and(|old| old.ready), new.ready) {
            (false, true) => changes.push(format!("server pod {} is ready", new.name)),
            (true, false) => changes.push(format!("server pod {} is not ready", new.name)),
            _ => {}
        }
    }
    changes
}

fn render(report: &Report, paint: Paint) -> String {
    let mut text = String::new();
    for Event { milliseconds, what } in &report.timeline {
        let _ = writeln!(text, "{:>8.1} s  {what}", *milliseconds as f64 / 1e3);
    }
    let Report { seen, stood_still_milliseconds, .. } = report;
    let still = *stood_still_milliseconds as f64 / 1e3;
    let verdict = if report.is_good() {
        let verdict = format!(
            "The writer got no error and stood still for {still:.1} s at most. All of its {} acknowledged records are there.",
            seen.acknowledged
        );
        paint.text(Tone::Good, &verdict)
    } else {
        let verdict = format!(
            "{} writes failed, and {} of {} acknowledged records are lost. The writer stood still for {still:.1} s at most.",
            seen.failed, seen.lost, seen.acknowledged
        );
        paint.text(Tone::Bad, &verdict)
    };
    let _ = writeln!(text, "\n{verdict}");
    for error in &seen.errors {
        let _ = writeln!(text, "  {error}");
    }
    text.push_str(
        "Times of the writer are by the clock of its node, those of pods by the clock of this machine.\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(uid: &str, node: Option<&str>, ready: bool) -> Server {
        Server { uid: uid.to_owned(), name: "main-0-0".to_owned(), node: node.map(str::to_owned), ready }
    }

    #[test]
    fn pod_changes_are_reported_once() {
        let old = [server("a", Some("n1"), true)];
        assert_eq!(changes(&old, &old), Vec::<String>::new());
        assert_eq!(changes(&old, &[server("a", Some("n1"), false)]), ["server pod main-0-0 is not ready"]);
        assert_eq!(changes(&old, &[]), ["server pod main-0-0 is gone"]);
        let new = [server("b", None, false)];
        assert_eq!(changes(&[], &new), ["a new server pod main-0-0 is there"]);
        let placed = [server("b", Some("n2"), false)];
        assert_eq!(changes(&new, &placed), ["server pod main-0-0 is on node n2"]);
        assert_eq!(changes(&placed, &[server("b", Some("n2"), true)]), ["server pod main-0-0 is ready"]);
    }

    fn seen(failed: u64, lost: u64) -> Seen {
        let gaps =
            vec![Gap { from: 1_000_300, milliseconds: 4_200 }, Gap { from: 1_009_000, milliseconds: 600 }];
        let errors = if failed > 0 { vec!["record 7: Input/output error".to_owned()] } else { Vec::new() };
        Seen { acknowledged: 900, gaps, failed, errors, lost }
    }

    #[test]
    fn timeline_merges_pod_events_and_write_gaps_in_order() {
        let pods = vec![
            Event { milliseconds: 0, what: "removed".to_owned() },
            Event { milliseconds: 2_000, what: "ready".to_owned() },
        ];
        let report = Report::new("main-0".to_owned(), 1_000_000, pods, seen(0, 0));
        let times: Vec<i64> = report.timeline.iter().map(|event| event.milliseconds).collect();
        assert_eq!(times, [0, 300, 2_000, 4_500, 9_000, 9_600]);
        assert!(report.is_good());
        let text = render(&report, Paint::new(false));
        assert!(text.contains("     0.3 s  the writer stands still"), "{text}");
        assert!(
            text.contains("stood still for 4.2 s at most. All of its 900 acknowledged records are there."),
            "{text}"
        );
    }

    #[test]
    fn write_errors_and_lost_records_fail_the_rehearsal() {
        for (failed, lost) in [(1, 0), (0, 1)] {
            let report = Report::new("main-0".to_owned(), 0, Vec::new(), seen(failed, lost));
            assert!(!report.is_good());
            let text = render(&report, Paint::new(false));
            assert!(text.contains(&format!("{failed} writes failed, and {lost} of 900")), "{text}");
            assert_eq!(text.contains("record 7: Input/output error"), failed > 0);
        }
    }
}
