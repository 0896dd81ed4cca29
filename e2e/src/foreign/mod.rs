//! Third-party suites and clients against a server: smbtorture, smbclient, impacket, smbprotocol.
//!
//! They come from the nodes' root file system and run natively, without a guest, in several parallel lanes, each with its own
//! network and server. Every failed or skipped test must be on the list of known failures with its reason and its message. A
//! listed test that passes also fails the run.

mod clients;
mod forebay;
mod kdc;
pub(crate) mod known;
mod lane;
mod network;
mod room;
mod samba;
mod target;
mod torture;
mod verdicts;

use std::collections::VecDeque;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use forebay_testing::Need;

use crate::cache::Cache;
use crate::rundir::RunDir;
use crate::{host, native};
use known::{KnownFailures, Unsteady};
use lane::{Job, Lane, TestResult};
use room::Room;
use verdicts::Verdicts;

/// Which server is tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ServerKind {
    /// Ours, from the folder of this binary.
    Forebay,
    /// Samba's, from the nodes' root: holds the runner itself to something.
    Samba,
}

impl ServerKind {
    fn known_failures(self) -> (&'static str, Result<KnownFailures>) {
        let (name, text) = match self {
            Self::Forebay => ("known-failures.txt", include_str!("../../foreign/known-failures.txt")),
            Self::Samba => {
                ("known-failures-samba.txt", include_str!("../../foreign/known-failures-samba.txt"))
            }
        };
        (name, KnownFailures::parse(text).with_context(|| name.to_owned()))
    }
}

/// Options of a run.
#[derive(Debug)]
pub struct Options {
    /// Only tests with a name that contains this.
    pub filter: String,
    /// The server.
    pub server: ServerKind,
    /// Folder for the suites' whole output, one file per test, and the servers' logs. `None` stores nothing.
    pub logs: Option<PathBuf>,
    /// Number of parallel lanes.
    pub lanes: usize,
}

/// Runs the selected tests. Returns whether all results were as expected. Needs root, for chroot.
pub fn run(options: &Options) -> Result<bool> {
    if !host::is_root() {
        bail!("foreign suites change root, which needs root; run this with sudo");
    }
    let (list_name, known) = options.server.known_failures();
    let mut verdicts = Verdicts::new(list_name, known?, Unsteady::of_this_tree()?);
    if let Some(logs) = &options.logs {
        fs::create_dir_all(logs).with_context(|| format!("--logs {}", logs.display()))?;
    }
    let cache = Cache::open()?;
    // Inside a lane nothing can be downloaded.
    native::prepare(&cache)?;
    let rundir = RunDir::create(&format!("foreign-{}", std::process::id()))?;
    // Samba's users must be able to traverse it.
    fs::set_permissions(rundir.scratch(), std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
    let result = run_in(options, &cache, rundir.scratch(), &mut verdicts);
    empty(rundir.scratch())?;
    result.map(|()| verdicts.report(&options.filter))
}

/// Removes a folder while processes that were asked to end may still be removing their own files in it.
fn empty(folder: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(error) = fs::remove_dir_all(folder) {
        if !folder.exists() {
            break;
        }
        if Instant::now() > deadline {
            return Err(error).with_context(|| format!("remove {}", folder.display()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn run_in(options: &Options, cache: &Cache, folder: &Path, verdicts: &mut Verdicts) -> Result<()> {
    let jobs = {
        let work = folder.join("list");
        fs::create_dir_all(&work)?;
        let mut room = Room::enter(cache, &work)?;
        let tests = torture::tests(&mut room)?;
        verdicts.know(&tests);
        // The list of known failures does not apply to a pool without XFS.
        let without_xfs = options.server == ServerKind::Forebay && forebay_testing::may_miss(Need::Xfs);
        let tests = tests
            .into_iter()
            .filter(|test| test.contains(&options.filter))
            .filter(|test| !without_xfs || !test.contains(".dup_extents_"))
            .map(Job::Torture);
        let groups = clients::groups(&mut room, &work)?.into_iter().map(Job::Clients);
        tests.chain(groups).collect()
    };
    let lanes = options.lanes.clamp(1, LANES_MAX);
    let folders: Vec<PathBuf> = (1..=lanes).map(|lane| folder.join(format!("lane-{lane}"))).collect();
    beside_each_other(options, cache, &folders, jobs, verdicts)?;
    // Rerun with nothing in parallel, but only tests that the list marks as racy, with the cause.
    let again = verdicts.to_be_run_again();
    if !again.is_empty() {
        let jobs = again.into_iter().map(Job::Torture).collect();
        beside_each_other(options, cache, &[folder.join(lane::AGAIN)], jobs, verdicts)?;
    }
    Ok(())
}

/// More lanes than this only wait for processors.
const LANES_MAX: usize = 32;

/// Runs jobs in a lane per folder, and records their results in the order of the jobs.
fn beside_each_other(
    options: &Options,
    cache: &Cache,
    folders: &[PathBuf],
    jobs: Vec<Job>,
    verdicts: &mut Verdicts,
) -> Result<()> {
    let begun_first = jobs.iter().enumerate().filter(|(_, job)| job.is_slow());
    let begun_then = jobs.iter().enumerate().filter(|(_, job)| !job.is_slow());
    let queue: Mutex<VecDeque<(usize, &Job)>> = Mutex::new(begun_first.chain(begun_then).collect());
    let results = Mutex::new(InOrder::new(jobs.len(), verdicts));
    let work = |folder: &PathBuf| -> Result<()> {
        let mut lane = Lane::open(options, cache, folder)?;
        let name = lane.name();
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some((index, job)) = next else { break };
            let found = lane.run(job)?;
            results.lock().unwrap_or_else(PoisonError::into_inner).put(index, &name, found);
        }
        let log = lane.close()?;
        results.lock().unwrap_or_else(PoisonError::into_inner).verdicts.keep_log(&name, log);
        Ok(())
    };
    std::thread::scope(|scope| {
        let work = &work;
        let lanes: Vec<_> = folders
            .iter()
            .map(|folder| {
                let queue = &queue;
                scope.spawn(move || {
                    let result = work(folder);
                    if result.is_err() {
                        // The other lanes finish the jobs that they have started.
                        queue.lock().unwrap_or_else(PoisonError::into_inner).clear();
                    }
                    result
                })
            })
            .collect();
        let ends: Vec<Result<()>> = lanes
            .into_iter()
            .map(|lane| lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        ends.into_iter().collect()
    })
}

/// Results in the order of the jobs: early results wait for those before them.
struct InOrder<'a> {
    waiting: Vec<Option<(String, Vec<TestResult>)>>,
    next: usize,
    verdicts: &'a mut Verdicts,
}

impl<'a> InOrder<'a> {
    fn new(count: usize, verdicts: &'a mut Verdicts) -> Self {
        Self { waiting: std::iter::repeat_with(|| None).take(count).collect(), next: 0, verdicts }
    }

    fn put(&mut self, index: usize, lane: &str, results: Vec<TestResult>) {
        self.waiting[index] = Some((lane.to_owned(), results));
        while let Some((lane, results)) = self.waiting.get_mut(self.next).and_then(Option::take) {
            for result in results {
                self.verdicts.record(&lane, result);
            }
            self.next += 1;
        }
    }
}

/// A random password for this run.
fn password() -> Result<String> {
    let mut bytes = [0; 12];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(crate::cache::hex(&bytes))
}

#[cfg(test)]
mod tests {
    use super::known::Outcome;
    use super::*;

    #[test]
    fn results_are_recorded_in_job_order_regardless_of_lane() {
        let known = KnownFailures::parse("").expect("an empty list");
        let unsteady = Unsteady::parse("").expect("an empty list");
        let mut verdicts = Verdicts::new("list", known, unsteady);
        let result =
            |name: &str| TestResult { test: name.to_owned(), outcome: Outcome::Pass, took: Duration::ZERO };
        let mut results = InOrder::new(3, &mut verdicts);
        results.put(2, "lane-1", vec![result("d")]);
        results.put(0, "lane-2", vec![result("a"), result("b")]);
        results.put(1, "lane-1", vec![result("c")]);
        assert_eq!(verdicts.tests().collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    }
}
