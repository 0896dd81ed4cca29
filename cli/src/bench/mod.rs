//! `kubectl forebay bench`: measures a StorageClass with the shapes of MLPerf Storage's workloads. A Job mounts a new volume in
//! one or more pods, each of which runs `kubectl-forebay measure`; the results are read from their logs.

mod files;
mod measure;
mod objects;
mod outcome;
mod plan;

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DeleteParams, ListParams, LogParams, PostParams};
use kube::{Client, ResourceExt};

use self::objects::{LABEL, Progress};
use self::outcome::Measured;
use self::plan::Scope;
pub(crate) use self::plan::{Plan, Workload, size};
use crate::limits::{BENCH_POLL, BENCH_START_DEADLINE, BENCH_UNREACHABLE_MAX};
use crate::options::{Bench, BenchFormat, Measure};
use crate::paint::Paint;
use crate::snapshot::{self, words};

/// Lines of a failed pod's log that are shown.
const LOG_LINES: i64 = 20;

/// Measures a StorageClass, and returns the results for the terminal.
pub(crate) fn run(options: &Bench, paint: Paint) -> anyhow::Result<String> {
    let scope = Scope {
        pods: options.pods,
        accelerators: options.accelerators,
        seconds: options.seconds,
        volume_bytes: options.size,
        scale: options.scale,
    };
    let mut workloads = options.workload.clone();
    workloads.sort_unstable();
    workloads.dedup();
    let plans = workloads
        .into_iter()
        .map(|workload| Plan::new(workload, &scope))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    let results = outcome::combine(&runtime.block_on(measured(options, &plans))?)?;
    match options.output {
        BenchFormat::Json => crate::json(&results),
        BenchFormat::Table => Ok(outcome::render(&results, paint)),
    }
}

/// The part of one pod.
pub(crate) fn measure(options: &Measure) -> anyhow::Result<()> {
    let plans: Vec<Plan> = serde_json::from_str(&options.plans).context("--plans")?;
    ensure!(options.index < options.pods, "--index {} of {} pods", options.index, options.pods);
    let pod = measure::Pod { index: options.index, of: options.pods };
    outcome::print(&measure::run(&plans, pod, &options.folder)?)
}

/// Creates the objects, waits for the results, and removes the objects in any case but `--keep`.
async fn measured(options: &Bench, plans: &[Plan]) -> anyhow::Result<Vec<Vec<Measured>>> {
    let (client, forebay) = snapshot::connect(&options.connection).await?;
    let classes: Api<StorageClass> = Api::all(client.clone());
    let class = classes.get_opt(&options.class).await.map_err(|error| anyhow::anyhow!(words(&error)))?;
    ensure!(class.is_some(), "there is no StorageClass {}", options.class);
    let image = match &options.image {
        Some(image) => image.clone(),
        None => {
            let pods = snapshot::pods(&client, forebay.as_deref()).await.map_err(anyhow::Error::msg)?;
            objects::image(&pods)
                .context("Forebay has no pods here to take the image of: name one with --image")?
        }
    };
    let bench = Running::new(client, options);
    let results = tokio::select! {
        results = bench.results(options, &image, plans) => results,
        () = interrupted() => Err(anyhow::anyhow!("interrupted")),
    };
    if options.keep {
        eprintln!("kept: Job and claim {} in namespace {}", bench.name, options.job_namespace);
        return results;
    }
    let removed = bench.remove().await;
    let results = results?;
    removed?;
    Ok(results)
}

/// Returns on SIGINT or SIGTERM.
async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return std::future::pending().await };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

/// The objects of a measurement, all of the same name.
struct Running {
    name: String,
    claims: Api<PersistentVolumeClaim>,
    jobs: Api<Job>,
    pods: Api<Pod>,
}

impl Running {
    fn new(client: Client, options: &Bench) -> Self {
        let namespace = &options.job_namespace;
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            name: format!("forebay-bench-{:x}", time.as_millis()),
            claims: Api::namespaced(client.clone(), namespace),
            jobs: Api::namespaced(client.clone(), namespace),
            pods: Api::namespaced(client, namespace),
        }
    }

    async fn results(
        &self,
        options: &Bench,
        image: &str,
        plans: &[Plan],
    ) -> anyhow::Result<Vec<Vec<Measured>>> {
        let (name, create) = (&self.name, PostParams::default());
        let claim = objects::claim(name, options)?;
        self.claims
            .create(&create, &claim)
            .await
            .map_err(|error| anyhow::anyhow!(words(&error)))
            .context("create a claim")?;
        let job = objects::job(name, options, image, &serde_json::to_string(plans)?)?;
        self.jobs
            .create(&create, &job)
            .await
            .map_err(|error| anyhow::anyhow!(words(&error)))
            .context("create a Job")?;
        eprintln!("{name}: Job and claim created in namespace {}, with image {image}", options.job_namespace);
        let pods = self.wait(options.pods as usize).await?;
        let mut measured = Vec::new();
        for pod in pods {
            let name = pod.name_any();
            let log = self.log(&name, None).await.with_context(|| format!("the log of pod {name}"))?;
            measured.push(outcome::parse(&log).with_context(|| format!("pod {name}"))?);
        }
        Ok(measured)
    }

    /// Waits until all pods have succeeded, and shows their progress.
    async fn wait(&self, wanted: usize) -> anyhow::Result<Vec<Pod>> {
        let began = Instant::now();
        let mut shown = String::new();
        let mut unreachable = 0;
        loop {
            let selector = ListParams::default().labels(&format!("{LABEL}={}", self.name));
            let pods = match snapshot::list(self.pods.clone(), &selector).await {
                Ok(pods) => pods,
                Err(why) if unreachable < BENCH_UNREACHABLE_MAX => {
                    unreachable += 1;
                    self.say(began, &mut shown, format!("the API server: {why}"));
                    tokio::time::sleep(BENCH_POLL).await;
                    continue;
                }
                Err(why) => bail!("the API server: {why}"),
            };
            unreachable = 0;
            let progress = Progress::of(&pods);
            if progress.failed > 0 {
                bail!(self.failure(&pods).await);
            }
            if progress.succeeded == wanted {
                return Ok(pods);
            }
            if progress.started < wanted {
                let why = match progress.why {
                    Some(why) => why,
                    None => self.claim_state().await,
                };
                let state = format!("{} of {wanted} pods have started; {why}", progress.started);
                ensure!(began.elapsed() < BENCH_START_DEADLINE, "{state}");
                self.say(began, &mut shown, state);
            } else {
                let last = match pods.first() {
                    Some(pod) => self.log(&pod.name_any(), Some(1)).await.unwrap_or_default(),
                    None => String::new(),
                };
                self.say(began, &mut shown, format!("{wanted} pods run. {}", last.trim()));
            }
            tokio::time::sleep(BENCH_POLL).await;
        }
    }

    /// Shows a state when it changes.
    fn say(&self, began: Instant, shown: &mut String, state: String) {
        if *shown != state {
            eprintln!("[{:4} s] {state}", began.elapsed().as_secs());
            *shown = state;
        }
    }

    async fn claim_state(&self) -> String {
        let claim = self.claims.get_opt(&self.name).await.ok().flatten();
        let phase = claim.and_then(|claim| claim.status?.phase).unwrap_or_default();
        match phase.as_str() {
            "Bound" => "the volume is mounted or the image pulled".to_owned(),
            _ => format!("the claim is not bound: `kubectl describe pvc {}` says why", self.name),
        }
    }

    /// The end of the log of the first pod that has failed.
    async fn failure(&self, pods: &[Pod]) -> String {
        let failed = pods
            .iter()
            .find(|pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Failed"));
        let Some(pod) = failed else { return "a pod has failed".to_owned() };
        let name = pod.name_any();
        match self.log(&name, Some(LOG_LINES)).await {
            Ok(log) => format!("pod {name} has failed:\n{}", log.trim_end()),
            Err(error) => format!("pod {name} has failed, and its log cannot be read: {error:#}"),
        }
    }

    async fn log(&self, pod: &str, lines: Option<i64>) -> anyhow::Result<String> {
        let parameters = LogParams { tail_lines: lines, ..LogParams::default() };
        self.pods.logs(pod, &parameters).await.map_err(|error| anyhow::anyhow!(words(&error)))
    }

    /// Removes Job, pods and claim, and with the claim the volume.
    async fn remove(&self) -> anyhow::Result<()> {
        let gone = |error: &kube::Error| matches!(error, kube::Error::Api(status) if status.code == 404);
        let job = self.jobs.delete(&self.name, &DeleteParams::background()).await.map(drop);
        let claim = self.claims.delete(&self.name, &DeleteParams::default()).await.map(drop);
        for result in [job, claim] {
            match result {
                Err(error) if !gone(&error) => bail!(
                    "{}: remove Job and claim by hand, with `kubectl delete job,pvc -l {LABEL}={}`: {}",
                    self.name,
                    self.name,
                    words(&error)
                ),
                _ => {}
            }
        }
        Ok(())
    }
}

/// A factor above 0 and up to 1.
pub(crate) fn scale(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|_| "a number".to_owned())?;
    if factor > 0.0 && factor <= 1.0 { Ok(factor) } else { Err("a number above 0 and up to 1".to_owned()) }
}

/// `KEY=VALUE`.
pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| "KEY=VALUE".to_owned())?;
    Ok((key.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_and_labels() {
        assert_eq!(scale("0.01"), Ok(0.01));
        for bad in ["0", "-1", "1.1", "nan", "x"] {
            assert!(scale(bad).is_err(), "{bad}");
        }
        assert_eq!(label("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert!(label("a").is_err());
    }
}
