//! Keeps nvmet in the configured state until SIGTERM.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

use crate::config::{self, Config, Transport};
use crate::http;
use crate::limits::{ROUND_EVERY, ROUND_TIME_MAX};
use crate::machine;
use crate::plan::Wanted;
use crate::round::{Report, lock, round};
use crate::source::Surveyor;
use crate::step::Kernel;

/// The state that is shared with the HTTP endpoints.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    state: Mutex<State>,
}

/// State after the last round.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    /// `None` until the first round has ended.
    pub(crate) report: Option<Report>,
    /// Failures that prevent rounds, or that prevent the file from being applied.
    pub(crate) troubles: Vec<String>,
    /// Start of the round in progress.
    pub(crate) under_way: Option<Instant>,
    pub(crate) rounds: u64,
    pub(crate) changes: u64,
}

impl State {
    /// All deviations from the configuration.
    pub(crate) fn problems(&self) -> Vec<String> {
        let problems = self.report.iter().flat_map(|report| &report.problems);
        let shown = problems.map(|problem| format!("{}: {}", problem.subject, problem.why));
        self.troubles.iter().cloned().chain(shown).collect()
    }

    /// Whether the current round hangs: a drive or a port of the kernel hangs.
    pub(crate) fn hangs(&self, now: Instant) -> bool {
        self.under_way.is_some_and(|since| now.duration_since(since) > ROUND_TIME_MAX)
    }
}

impl Watched {
    pub(crate) fn state(&self) -> State {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent even after a panic: it changes only by assignments.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The configuration file, and the state that was derived from it.
struct Keeper {
    path: PathBuf,
    text: String,
    config: Config,
    surveyor: Surveyor,
    /// Transports with modules that have already been requested.
    asked: BTreeSet<Transport>,
    watched: Arc<Watched>,
    said: Vec<String>,
}

/// Runs until SIGTERM or SIGINT. The kernel's target stays as it is.
///
/// # Errors
/// If it cannot be started.
pub(crate) fn run(path: &Path, config: Config, text: String) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let watched = Arc::new(Watched::default());
    let listen = config.listen;
    let keeper = Keeper {
        path: path.into(),
        text,
        config,
        surveyor: Surveyor::default(),
        asked: BTreeSet::new(),
        watched: Arc::clone(&watched),
        said: Vec::new(),
    };
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
        if let Some(address) = listen {
            let listener = TcpListener::bind(address).await.with_context(|| format!("metrics.listen: {address}"))?;
            info!(%address, "metrics and health");
            let router = http::router(Arc::clone(&watched));
            tokio::spawn(async move { axum::serve(listener, router).await });
        }
        info!(version = env!("CARGO_PKG_VERSION"), config = %path.display(), "keeping the target as the file says");
        // A thread, not a task: a round that hangs in the kernel must not block shutdown.
        std::thread::Builder::new().name("rounds".into()).spawn(move || keeper.keep())?;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        info!("ended; what is offered stays offered");
        Ok(())
    })
}

impl Keeper {
    fn keep(mut self) {
        loop {
            let started = Instant::now();
            self.watched.lock().under_way = Some(started);
            let mut troubles = Vec::new();
            if let Err(why) = self.read_again() {
                troubles.push(format!("the configuration is not followed, but the one before: {why}"));
            }
            let report = self.round().unwrap_or_else(|why| {
                troubles.push(format!("{why:#}"));
                None
            });
            {
                let mut state = self.watched.lock();
                state.rounds += 1;
                state.under_way = None;
                state.troubles = troubles;
                if let Some(report) = report {
                    state.changes += report.done as u64;
                    state.report = Some(report);
                }
            }
            self.say();
            std::thread::sleep(ROUND_EVERY.saturating_sub(started.elapsed()));
        }
    }

    /// Applies the file if its contents have changed. Kubernetes replaces the file: its modification time and inode number are
    /// not reliable.
    fn read_again(&mut self) -> Result<(), String> {
        let text = config::text(&self.path).map_err(|error| error.to_string())?;
        if text == self.text {
            return Ok(());
        }
        let mut config = Config::parse(&text)?;
        if config.name != self.config.name {
            return Err("target.name cannot be changed: remove the target first".into());
        }
        if config.listen != self.config.listen || config.log != self.config.log {
            warn!("[metrics] and [log] are followed by the next start only");
        }
        (config.listen, config.log) = (self.config.listen, self.config.log.clone());
        info!("the configuration has changed");
        self.surveyor.look_again();
        (self.text, self.config) = (text, config);
        Ok(())
    }

    fn round(&mut self) -> anyhow::Result<Option<Report>> {
        let root = machine::prepare(&self.config, &mut self.asked)?;
        let _lock = lock(&root).with_context(|| format!("lock {}", root.display()))?;
        let wanted = Wanted::of(&self.config, machine::ports(&self.config));
        let mut kernel = Kernel::at(&root);
        let report = round(&root, &self.config, &wanted, &mut self.surveyor, &mut kernel);
        Ok(Some(report.with_context(|| format!("read {}", root.display()))?))
    }

    /// Logs changes of the problems.
    fn say(&mut self) {
        let problems = self.watched.lock().problems();
        for problem in problems.iter().filter(|problem| !self.said.contains(problem)) {
            warn!("{problem}");
        }
        for solved in self.said.iter().filter(|said| !problems.contains(said)) {
            info!(was = %solved, "solved");
        }
        if problems.is_empty() && self.watched.lock().rounds == 1 {
            info!("all is offered");
        }
        self.said = problems;
    }
}
