//! A lane: a network, a server and a room of its own, in which one job runs after the other.

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

/// The name of the lane in which tests run again, with nothing beside them.
pub(super) const AGAIN: &str = "again";

/// What a lane does at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Job {
    /// One test of smbtorture.
    Torture(String),
    /// A group of `clients.py`: the checks of one client with one way to protect its traffic.
    Clients(String),
}

impl Job {
    /// Whether it is begun before the others: it waits for most of its time.
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

/// A lane that is open.
pub(super) struct Lane<'a> {
    options: &'a Options,
    work: PathBuf,
    // Before the server: it holds what may still use it.
    room: Room,
    target: Target,
    server: Server,
    _kdc: Option<Kdc>,
    /// The file system of our server's pool. Unmounted last.
    _disk: Option<Xfs>,
}

impl<'a> Lane<'a> {
    /// Opens it for this thread, which is in a network of its own from now on. `work` is its folder.
    ///
    /// This thread must live as long as the lane: the server ends with it.
    pub(super) fn open(options: &'a Options, cache: &Cache, work: &Path) -> Result<Self> {
        fs::create_dir_all(work)?;
        // Samba's users must be able to pass.
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

    /// Its name: that of its folder.
    pub(super) fn name(&self) -> String {
        self.work.file_name().unwrap_or_default().display().to_string()
    }

    /// Runs a job to its end. An error where the server did not survive it.
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

    /// One test of smbtorture, its whole output kept where that is asked for.
    fn torture(&mut self, test: &str) -> Result<Outcome> {
        let (outcome, output) = torture::run(&mut self.room, &self.target, test)?;
        if let Some(logs) = &self.options.logs {
            // Where it runs again, both are kept.
            let ending = if self.name() == AGAIN { "again.log" } else { "log" };
            let log = logs.join(format!("{}.{ending}", test.replace([' ', '/'], "_")));
            fs::write(log, output)?;
        }
        Ok(outcome)
    }

    /// Closes it; the end of its server's log. The whole log is kept where that is asked for.
    pub(super) fn close(self) -> Result<String> {
        let tail = self.server.log_tail();
        if let Some(logs) = &self.options.logs {
            fs::copy(self.server.log(), logs.join(format!("server-of-{}.log", self.name())))?;
        }
        Ok(tail)
    }
}
