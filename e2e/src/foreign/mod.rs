//! Foreign suites and clients against a server: smbtorture, smbclient, impacket, smbprotocol.
//!
//! They come from the nodes' root and run natively, without a guest, in a network of their own. What fails or is skipped must be on the list of
//! known failures with its reason; what is on the list and passes fails the run, too.

mod clients;
mod forebay;
mod known;
mod network;
mod room;
mod samba;
mod target;
mod torture;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::cache::Cache;
use crate::{host, rundir};
use known::{KnownFailures, Outcome, Verdict};
use room::Room;
use target::{Server, Share, Target};

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

/// What is asked of a run.
#[derive(Debug)]
pub struct Options {
    /// Only tests whose name contains this.
    pub filter: String,
    /// The server.
    pub server: ServerKind,
    /// Where the suites' whole output goes, a file per test; nowhere if there is no such folder.
    pub logs: Option<PathBuf>,
}

/// Runs what is asked; whether all went as it should. Needs root, for changing root.
pub fn run(options: &Options) -> Result<bool> {
    if !host::is_root() {
        bail!("foreign suites change root, which needs root; run this with sudo");
    }
    let (list_name, known) = options.server.known_failures();
    let known = known?;
    if let Some(logs) = &options.logs {
        fs::create_dir_all(logs).with_context(|| format!("--logs {}", logs.display()))?;
    }
    let cache = Cache::open()?;
    network::enter(&cache)?;
    let folder = tempfile::Builder::new().prefix("forebay-foreign-").tempdir_in("/var/tmp")?;
    rundir::guard_path(folder.path());
    // Samba's users must be able to pass.
    fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
    let result = Run {
        options,
        known: &known,
        list_name,
        work: folder.path(),
        results: Vec::new(),
        unsteady: Vec::new(),
    }
    .all(&cache);
    rundir::release_path(folder.path());
    remove(&folder.keep())?;
    result
}

/// Removes a folder in which processes that have been told to end may still remove files of theirs.
fn remove(folder: &Path) -> Result<()> {
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

struct Run<'a> {
    options: &'a Options,
    known: &'a KnownFailures,
    list_name: &'a str,
    work: &'a Path,
    results: Vec<(String, Outcome, Verdict)>,
    /// Tests that failed and passed when they ran again, with what was wrong at first.
    unsteady: Vec<(String, String)>,
}

/// So many tests of a run may fail once: they race with a server on machines that are stopped for moments. Each is told,
/// and has a cause to be found.
const UNSTEADY_MAX: usize = 2;

impl Run<'_> {
    fn all(mut self, cache: &Cache) -> Result<bool> {
        let volume = Share { share: "volume".into(), user: "alice".into(), password: password()? };
        let other = Share { share: "other".into(), user: "bob".into(), password: password()? };
        let mut room = Room::enter(cache, self.work)?;
        network::begin(&mut room)?;
        let (target, mut server) = match self.options.server {
            ServerKind::Forebay => forebay::start(self.work, volume, other)?,
            ServerKind::Samba => samba::start(cache, self.work, volume, other)?,
        };
        target.write_auth(&self.work.join("volume.auth"))?;

        let all = torture::tests(&mut room)?;
        for test in all.iter().filter(|test| test.contains(&self.options.filter)) {
            let started = Instant::now();
            let mut outcome = self.run_one(&mut room, &target, test, "log")?;
            still_runs(&mut server, test)?;
            if let Outcome::Fail(reason) = &outcome
                && self.known.judge(test, &outcome) == Verdict::Unexpected
                && self.unsteady.len() < UNSTEADY_MAX
            {
                let reason = reason.clone();
                println!("           {test}: FAILS, and is run again: {reason}");
                outcome = self.run_one(&mut room, &target, test, "again.log")?;
                still_runs(&mut server, test)?;
                if outcome == Outcome::Pass {
                    self.unsteady.push((test.clone(), reason));
                }
            }
            self.record(test, outcome, started.elapsed());
        }
        let started = Instant::now();
        let results = clients::run(&mut room, self.work, &target, &self.options.filter)?;
        let each = started.elapsed() / u32::try_from(results.len().max(1))?;
        let mut names = all;
        for (name, outcome) in results {
            self.record(&name, outcome, each);
            names.push(name);
        }
        still_runs(&mut server, "the clients")?;
        Ok(self.report(&names, &server))
    }

    /// One test of smbtorture, its whole output kept where that is asked for.
    fn run_one(&self, room: &mut Room, target: &Target, test: &str, ending: &str) -> Result<Outcome> {
        let (outcome, output) = torture::run(room, target, test)?;
        if let Some(logs) = &self.options.logs {
            fs::write(logs.join(format!("{}.{ending}", test.replace([' ', '/'], "_"))), output)?;
        }
        Ok(outcome)
    }

    fn record(&mut self, test: &str, outcome: Outcome, took: Duration) {
        let verdict = self.known.judge(test, &outcome);
        let word = match (&outcome, verdict) {
            (Outcome::Pass, Verdict::Passed) => "ok",
            (Outcome::Pass, _) => "PASSES, which the list does not expect",
            (Outcome::Fail(_), Verdict::Known) => "fails, as listed",
            (Outcome::Fail(_), _) => "FAILS",
            (Outcome::Skip(_), Verdict::Known) => "skipped, as listed",
            (Outcome::Skip(_), _) => "SKIPPED",
        };
        println!("{:7.2} s  {test}: {word}", took.as_secs_f64());
        self.results.push((test.to_owned(), outcome, verdict));
    }

    fn report(&self, names: &[String], server: &Server) -> bool {
        let count = |wanted| self.results.iter().filter(|(_, _, verdict)| *verdict == wanted).count();
        let mut wrong = count(Verdict::Unexpected) + count(Verdict::Stale);
        if wrong > 0 {
            println!("\nNot as expected ({} is the list):", self.list_name);
        }
        for (test, outcome, verdict) in &self.results {
            let listed = self.known.reason(test).unwrap_or_default();
            match (verdict, outcome) {
                (Verdict::Unexpected, Outcome::Fail(reason)) => println!("  {test} failed: {reason}"),
                (Verdict::Unexpected, Outcome::Skip(reason)) => println!("  {test} was skipped: {reason}"),
                (Verdict::Stale, Outcome::Pass) => println!("  {test} passes; listed because: {listed}"),
                (Verdict::Stale, Outcome::Fail(reason)) => {
                    println!("  {test} failed instead of being skipped: {reason}; listed because: {listed}");
                }
                (Verdict::Stale, Outcome::Skip(reason)) => {
                    println!("  {test} was skipped instead of failing: {reason}; listed because: {listed}");
                }
                _ => {}
            }
        }
        if self.options.filter.is_empty() {
            for name in self.known.absent(names) {
                println!("  {name} is on the list, but there is no such test");
                wrong += 1;
            }
        }
        if wrong > 0 {
            println!("\nEnd of the server's log:\n{}", server.log_tail());
        }
        if !self.unsteady.is_empty() {
            println!("\nFailed once, and passed when run again; the cause is to be found:");
        }
        for (test, reason) in &self.unsteady {
            println!("  {test} failed: {reason}");
        }
        println!(
            "\n{} passed ({} of them not at once), {} known failures, {wrong} failed",
            count(Verdict::Passed),
            self.unsteady.len(),
            count(Verdict::Known)
        );
        // A filter that chooses nothing is a mistyped one.
        wrong == 0 && !self.results.is_empty()
    }
}

fn still_runs(server: &mut Server, after: &str) -> Result<()> {
    if server.is_running() {
        return Ok(());
    }
    bail!("the server ended during {after}; the end of its log:\n{}", server.log_tail())
}

/// A password made up for this run.
fn password() -> Result<String> {
    let mut bytes = [0; 12];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(crate::cache::hex(&bytes))
}
