//! A load on a new volume: a claim, and a Job with one or more pods that run this program on it. Both are removed when the
//! work with them is done, has failed, or is interrupted.

mod objects;

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DeleteParams, ListParams, LogParams, PostParams};
use kube::{Client, ResourceExt};

pub(crate) use self::objects::MOUNTED_AT;
use self::objects::{LABEL, Progress};
use crate::limits::{JOB_POLL, JOB_START_DEADLINE, JOB_UNREACHABLE_MAX};
use crate::options::{Connection, Place};
use crate::snapshot::{self, words};

/// Lines of a failed pod's log that are shown.
const LOG_LINES: i64 = 20;

/// The load to start.
pub(crate) struct Load<'a> {
    /// The command, for the names of the objects.
    pub(crate) verb: &'static str,
    pub(crate) class: &'a str,
    pub(crate) place: &'a Place,
    pub(crate) pods: u32,
    /// Size of the volume.
    pub(crate) bytes: u64,
    /// What each pod runs: arguments of this program.
    pub(crate) arguments: Vec<String>,
}

impl Load<'_> {
    /// Creates the objects, does `work` with them, and removes them in any case but `--keep`.
    pub(crate) async fn with<T>(
        &self,
        connection: &Connection,
        work: impl AsyncFnOnce(&Running) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let (client, forebay) = snapshot::connect(connection).await?;
        let classes: Api<StorageClass> = Api::all(client.clone());
        let class = classes.get_opt(self.class).await.map_err(|error| anyhow::anyhow!(words(&error)))?;
        ensure!(class.is_some(), "there is no StorageClass {}", self.class);
        let image = match &self.place.image {
            Some(image) => image.clone(),
            None => {
                let pods = snapshot::pods(&client, forebay.as_deref()).await.map_err(anyhow::Error::msg)?;
                objects::image(&pods)
                    .context("Forebay has no pods here to take the image of: name one with --image")?
            }
        };
        let running = Running::new(client, forebay, self);
        let result = tokio::select! {
            result = async {
                running.create(self, &image).await?;
                work(&running).await
            } => result,
            () = interrupted() => Err(anyhow::anyhow!("interrupted")),
        };
        if self.place.keep {
            eprintln!("kept: Job and claim {} in namespace {}", running.name, self.place.job_namespace);
            return result;
        }
        let removed = running.remove().await;
        let result = result?;
        removed?;
        Ok(result)
    }
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

/// How far pods must be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    Started,
    Succeeded,
}

/// The objects of a load, all of the same name.
pub(crate) struct Running {
    name: String,
    pub(crate) client: Client,
    /// Forebay's namespace, or `None` for all.
    pub(crate) forebay: Option<String>,
    wanted: usize,
    claims: Api<PersistentVolumeClaim>,
    jobs: Api<Job>,
    pods: Api<Pod>,
    began: Instant,
}

impl Running {
    fn new(client: Client, forebay: Option<String>, load: &Load<'_>) -> Self {
        let namespace = &load.place.job_namespace;
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            name: format!("forebay-{}-{:x}", load.verb, time.as_millis()),
            claims: Api::namespaced(client.clone(), namespace),
            jobs: Api::namespaced(client.clone(), namespace),
            pods: Api::namespaced(client.clone(), namespace),
            client,
            forebay,
            wanted: load.pods as usize,
            began: Instant::now(),
        }
    }

    async fn create(&self, load: &Load<'_>, image: &str) -> anyhow::Result<()> {
        let (name, create) = (&self.name, PostParams::default());
        let refused = |error: kube::Error| anyhow::anyhow!(words(&error));
        let claim = objects::claim(name, load)?;
        self.claims.create(&create, &claim).await.map_err(refused).context("create a claim")?;
        let job = objects::job(name, load, image)?;
        self.jobs.create(&create, &job).await.map_err(refused).context("create a Job")?;
        let namespace = &load.place.job_namespace;
        eprintln!("{name}: Job and claim created in namespace {namespace}, with image {image}");
        Ok(())
    }

    /// Waits until all pods are that far, and shows their progress.
    pub(crate) async fn wait(&self, until: Until) -> anyhow::Result<Vec<Pod>> {
        let began = Instant::now();
        let mut shown = String::new();
        let mut unreachable = 0;
        loop {
            let pods = match self.list().await {
                Ok(pods) => pods,
                Err(error) if unreachable < JOB_UNREACHABLE_MAX => {
                    unreachable += 1;
                    self.show(&mut shown, format!("{error:#}"));
                    tokio::time::sleep(JOB_POLL).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            unreachable = 0;
            let progress = Progress::of(&pods);
            if progress.failed > 0 {
                bail!(self.failure(&pods).await);
            }
            let done = match until {
                Until::Started => progress.started,
                Until::Succeeded => progress.succeeded,
            };
            if done == self.wanted {
                return Ok(pods);
            }
            if progress.started < self.wanted {
                let why = match progress.why {
                    Some(why) => why,
                    None => self.claim_state().await,
                };
                let state = format!("{} of {} pods have started; {why}", progress.started, self.wanted);
                ensure!(began.elapsed() < JOB_START_DEADLINE, "{state}");
                self.show(&mut shown, state);
            } else {
                let last = match pods.first() {
                    Some(pod) => self.log(&pod.name_any(), Some(1)).await.unwrap_or_default(),
                    None => String::new(),
                };
                self.show(
                    &mut shown,
                    format!("{} of {} pods are done. {}", progress.succeeded, self.wanted, last.trim()),
                );
            }
            tokio::time::sleep(JOB_POLL).await;
        }
    }

    async fn list(&self) -> anyhow::Result<Vec<Pod>> {
        let selector = ListParams::default().labels(&format!("{LABEL}={}", self.name));
        snapshot::list(self.pods.clone(), &selector)
            .await
            .map_err(|why| anyhow::anyhow!("list the pods: {why}"))
    }

    /// Shows a state when it changes.
    fn show(&self, shown: &mut String, state: String) {
        if *shown != state {
            self.say(&state);
            *shown = state;
        }
    }

    /// Shows a line of progress.
    pub(crate) fn say(&self, state: &str) {
        eprintln!("[{:4} s] {state}", self.began.elapsed().as_secs());
    }

    /// The claim, as it is now.
    pub(crate) async fn claim(&self) -> anyhow::Result<PersistentVolumeClaim> {
        self.claims
            .get(&self.name)
            .await
            .map_err(|error| anyhow::anyhow!(words(&error)))
            .context("read the claim")
    }

    async fn claim_state(&self) -> String {
        let phase = self.claim().await.ok().and_then(|claim| claim.status?.phase).unwrap_or_default();
        match phase.as_str() {
            "Bound" => "the volume is being mounted, or the image pulled".to_owned(),
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

    /// The log of a pod, or its last lines.
    pub(crate) async fn log(&self, pod: &str, lines: Option<i64>) -> anyhow::Result<String> {
        let parameters = LogParams { tail_lines: lines, ..LogParams::default() };
        let log = self.pods.logs(pod, &parameters).await;
        log.map_err(|error| anyhow::anyhow!(words(&error))).with_context(|| format!("the log of pod {pod}"))
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
