//! A lane: a separate network, server and room, in which jobs run one after the other.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use forebay_testing::Xfs;

use super::kdc::Kdc;
use super::known::Outcome;
use super::room::Room;
use super::target::{Server, Share, Target};
use super::{Options, ServerKind, clients, forebay, network, password, samba, torture};
use crate::cache::Cache;

/// Name of the lane in which tests are rerun with nothing in parallel.
pub(super) const AGAIN: &str = "again";

/// A unit of work of a lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Job {
    /// One smbtorture test.
    Torture(String),
    /// A group of `clients.py`: the checks of one client with one way to protect its traffic.
    Clients(String),
}

impl Job {
    /// Whether to start it before the others: it spends most of its time waiting.
    pub(super) fn is_slow(&self) -> bool {
        matches!(self, Self::Torture(test) if torture::is_slow(test))
    }
}

/// How one test ended.
#[derive(Debug)]
pub(super) struct TestResult {
    /// Its name.
    pub(super) test: String,
    /// How it ended.
    pub(super) outcome: Outcome,
    /// How long it took.
    pub(super) took: Duration,
}

/// An open lane.
pub(super) struct Lane<'a> {
    options: &'a Options,
    work: PathBuf,
    // Dropped before the server: it contains processes that may still use the server.
    room: Room,
    target: Target,
    server: Server,
    _kdc: Option<Kdc>,
    /// The file system of our server's pool. Unmounted last.
    _disk: Option<Xfs>,
}

impl<'a> Lane<'a> {
    /// Opens the lane for this thread, which moves into a new network namespace. `work` is the lane's folder.
    ///
    /// This thread must live as long as the lane: the kernel kills the server when it ends.
    pub(super) fn open(options: &'a Options, cache: &Cache, work: &Path) -> Result<Self> {
        fs::create_dir_all(work)?;
        // Samba's users must be able to traverse it.
        fs::set_permissions(work, std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
        network::enter()?;
        let volume = Share { share: "volume".into(), user: "alice".into(), password: password()? };
        let other = Share { share: "other".into(), user: "bob".into(), password: password()? };
        let mut room = Room::enter(cache, work)?;
        let disk = if options.server == ServerKind::Forebay { Xfs::without_quota() } else { None };
        let (target, server, kdc) = match options.server {
            ServerKind::Forebay => {
                let pool = disk.as_ref().map_or_else(|| work.join("pool"), Xfs::path);
                let kdc = Kdc::start(cache, &mut room, work, [&volume, &other])?;
                let (target, server) = forebay::start(work, &pool, volume, other)?;
                (target, server, Some(kdc))
            }
            ServerKind::Samba => {
                let (target, server) = samba::start(cache, work, volume, other)?;
                (target, server, None)
            }
        };
        target.write_auth(&work.join("volume.auth"))?;
        clients::write(work, &target)?;
        Ok(Self { options, work: work.to_owned(), room, target, server, _kdc: kdc, _disk: disk })
    }

    /// Its name, which is its folder's name.
    pub(super) fn name(&self) -> String {
        self.work.file_name().unwrap_or_default().display().to_string()
    }

    /// Runs a job to completion. Fails if the server did not survive it.
    pub(super) fn run(&mut self, job: &Job) -> Result<Vec<TestResult>> {
        let started = Instant::now();
        let outcomes = match job {
            Job::Torture(test) => vec![(test.clone(), self.torture(test)?)],
            Job::Clients(group) => clients::run(&mut self.room, group, &self.options.filter)?,
        };
        if !self.server.is_running() {
            bail!("the server ended during {job:?}; the end of its log:\n{}", self.server.log_tail());
        }
        let took = started.elapsed() / u32::try_from(outcomes.len().max(1))?;
        Ok(outcomes.into_iter().map(|(test, outcome)| TestResult { test, outcome, took }).collect())
    }

    /// Runs one smbtorture test, and stores its whole output if the options require it.
    fn torture(&mut self, test: &str) -> Result<Outcome> {
        let (outcome, output) = torture::run(&mut self.room, &self.target, test)?;
        if let Some(logs) = &self.options.logs {
            // If the test is rerun, both outputs are stored.
            let ending = if self.name() == AGAIN { "again.log" } else { "log" };
            let log = logs.join(format!("{}.{ending}", test.replace([' ', '/'], "_")));
            fs::write(log, output)?;
        }
        Ok(outcome)
    }

    /// Closes the lane and returns the end of its server's log. Stores the whole log if the options require it.
    pub(super) fn close(self) -> Result<String> {
        let tail = self.server.log_tail();
        if let Some(logs) = &self.options.logs {
            fs::copy(self.server.log(), logs.join(format!("server-of-{}.log", self.name())))?;
        }
        Ok(tail)
    }
}
