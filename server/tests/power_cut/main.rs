//! Power cuts after every request that the disk completed: changes that were acknowledged to a client as durable must exist.
//!
//! A workload of writes, sizes, renames, links, removals, clones, directories and new times runs against a real server. Its
//! pool is an XFS on a disk that logs its operations. Then the test reconstructs the disk as it was after every entry of that
//! log, with and without its volatile cache, and mounts it wherever its bytes differ from those at the previous position.
//! Everything that an answer promised must exist. What the request in progress changes must be in its old or its new state.
//!
//! `FOREBAY_POWER_CUT_SEEDS` is the number of workloads that each test runs (1; 8 in `./test --nightly`),
//! `FOREBAY_POWER_CUT_SEED` the seed of the first, and `FOREBAY_POWER_CUT_CHANGES` the length of each.
#![allow(clippy::unwrap_used, reason = "tests")]

mod disk;
#[path = "../support/mod.rs"]
mod support;
mod workload;

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write as _;

use disk::{LoggedDisk, Mounted, copy, image};
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::CreateDisposition;
use forebay_smb::wire::negotiate::Dialect;
use forebay_testing::disk_log::{Cache, DiskLog, Image};
use forebay_testing::{Need, skip};
use support::random::Random;
use support::{Client, Daemon, Place};
use workload::{Change, DIRECTORIES, Durable, Files, Found};

const SEED: u64 = 20_261_123;
const CHANGES: u64 = 60;
const VOLUME: &str = "v";

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// A disk that logs, or `None` if the test is skipped, which `FOREBAY_ALLOW_SKIP` has to allow.
fn logged_disk(test: &str) -> Option<LoggedDisk> {
    match LoggedDisk::new() {
        Ok(disk) => Some(disk),
        Err(why) => {
            skip(Need::LoggedDisk, format!("{test}: {why}"));
            None
        }
    }
}

/// A server with a pool on the disk, and a client of its volume.
struct Served {
    place: Place,
    daemon: Daemon,
    client: Client,
}

fn serve(disk: &LoggedDisk, engine: &'static str, write_through: bool) -> Served {
    let place = Place::new(engine);
    let pool = disk.path().join("pool");
    std::fs::create_dir(&pool).expect("the pool's directory");
    place.configure("127.0.0.1:0", &pool);
    let mut config = OpenOptions::new().append(true).open(place.config()).expect("the configuration");
    writeln!(config, "write_through = {write_through}").expect("one option more");
    let mut daemon = place.start();
    daemon.create_volume(VOLUME).expect("a volume");
    let client = daemon.mount(VOLUME, Dialect::SMB2_1);
    for directory in DIRECTORIES {
        std::fs::create_dir(pool.join("volumes").join(VOLUME).join(directory)).expect("a directory");
    }
    rustix::fs::syncfs(std::fs::File::open(&pool).expect("the pool")).expect("the start is durable");
    Served { place, daemon, client }
}

/// The state that was promised when the log had this size: the files after a request of a change.
struct Acknowledged {
    change: Change,
    log_bytes: u64,
    files: Files,
}

/// Requests a change. Returns what was acknowledged, request by request.
fn ask(
    disk: &LoggedDisk,
    served: &mut Served,
    files: &Files,
    change: &Change,
    durable: Durable,
) -> Vec<Acknowledged> {
    let mut log_bytes = Vec::new();
    change.ask(&mut served.client, files, durable, &mut || log_bytes.push(disk.log_bytes()));
    let states = files.after(change, durable);
    assert_eq!(states.len(), log_bytes.len(), "{change:?}");
    let answers = log_bytes.into_iter().zip(states);
    answers.map(|(log_bytes, files)| Acknowledged { change: change.clone(), log_bytes, files }).collect()
}

/// The changes of a workload.
fn changes(seed: u64, count: u64, durable: Durable) -> Vec<Change> {
    let mut random = Random(seed);
    let mut files = Files::default();
    let next = |_| {
        let change = Change::choose(&mut random, &files, durable);
        files = files.after(&change, durable).pop().expect("a state");
        change
    };
    (0..count).map(next).collect()
}

/// Counts of the states that were checked.
#[derive(Default)]
struct Cuts {
    /// Prefixes of the log, with and without the cache.
    prefixes: usize,
    /// The prefixes with bytes that differ from the previous one.
    mounted: usize,
}

/// Cuts the power after every entry of the log from `begun`, where the files were `files`, to the last acknowledgment. Returns
/// the error at the first position that has one.
fn cut_everywhere(
    disk: &LoggedDisk,
    begun: u64,
    files: &Files,
    acknowledged: &[Acknowledged],
    durable: Durable,
) -> Result<Cuts, String> {
    let log = DiskLog::read(&disk.log()).expect("the disk's log");
    assert!(log.entries.iter().any(|entry| entry.is_flush()), "the disk was never flushed");
    let scratch = disk::scratch();
    let at = scratch.path().join("mounted");
    std::fs::create_dir(&at).expect("a mount point");
    let mut cuts = Cuts::default();
    for cache in [Cache::Lost, Cache::Kept] {
        let path = scratch.path().join(format!("{cache:?}"));
        let mut image = Image::new(&log, image(&path), cache);
        let mut place = log.count(begun);
        image.advance(place).expect("an image");
        let mut look = || {
            cuts.mounted += 1;
            // A unique name: the previous loop device may still be detaching.
            let cut = scratch.path().join(format!("cut-{}", cuts.mounted));
            copy(&path, &cut);
            let _mounted = Mounted::new(cut, &at);
            Found::read(&at.join("pool/volumes").join(VOLUME))
        };
        let wrong_at =
            |place: usize, wrong: String| format!("after {place} requests, cache {cache:?}: {wrong}");
        let mut found = look();
        let mut files = files;
        files.compare(&found).map_err(|wrong| wrong_at(place, wrong))?;
        for next in acknowledged {
            let to = log.count(next.log_bytes);
            while place < to {
                place += 1;
                cuts.prefixes += 1;
                if image.advance(place).expect("an image") {
                    found = look();
                }
                files
                    .compare_under_way(&found, &next.change, &next.files, durable)
                    .map_err(|wrong| wrong_at(place, wrong))?;
            }
            // The moment of the acknowledgment: anything missing was only in the cache.
            next.files
                .compare(&found)
                .map_err(|wrong| wrong_at(place, format!("{wrong}, after {:?}", next.change)))?;
            files = &next.files;
        }
    }
    Ok(cuts)
}

fn assert_acknowledged_changes_survive(test: &str, engine: &'static str, durable: Durable) {
    let first = number("FOREBAY_POWER_CUT_SEED", SEED);
    for seed in first..first + number("FOREBAY_POWER_CUT_SEEDS", 1) {
        let Some(disk) = logged_disk(test) else { return };
        let mut served = serve(&disk, engine, durable == Durable::AtReply);
        let begun = disk.log_bytes();
        let start = Files::default();
        let mut acknowledged: Vec<Acknowledged> = Vec::new();
        for change in changes(seed, number("FOREBAY_POWER_CUT_CHANGES", CHANGES), durable) {
            let files = acknowledged.last().map_or(&start, |last| &last.files);
            let answers = ask(&disk, &mut served, files, &change, durable);
            acknowledged.extend(answers);
        }
        drop(served);
        match cut_everywhere(&disk, begun, &start, &acknowledged, durable) {
            Ok(Cuts { prefixes, mounted }) => println!(
                "{test}: {engine}, seed {seed}: {} answers, {prefixes} prefixes, {mounted} of them mounted",
                acknowledged.len()
            ),
            Err(wrong) => panic!("{test}: {engine}, seed {seed}: {wrong}"),
        }
    }
}

#[test]
fn write_through_pool_keeps_every_acknowledged_change() {
    let test = "write_through_pool_keeps_every_acknowledged_change";
    for engine in support::engines() {
        assert_acknowledged_changes_survive(test, engine, Durable::AtReply);
    }
}

#[test]
fn every_pool_keeps_flushed_writes_and_renames() {
    let test = "every_pool_keeps_flushed_writes_and_renames";
    assert_acknowledged_changes_survive(test, "auto", Durable::AtFlush);
}

#[test]
fn workload_contains_every_kind_of_change() {
    let kinds =
        |durable| -> BTreeSet<_> { changes(SEED, CHANGES, durable).iter().map(Change::kind).collect() };
    let expected =
        ["flushed write", "write", "rename", "link", "unlink", "clone", "time", "size", "mkdir", "rmdir"];
    assert_eq!(kinds(Durable::AtReply), expected.into());
    assert_eq!(kinds(Durable::AtFlush), ["flushed write", "rename", "size"].into());
}

/// Checks that the tests above can fail: for each kind, they detect a change that is not durable when it is answered.
#[test]
fn change_that_is_not_durable_is_detected() {
    let Some(disk) = logged_disk("change_that_is_not_durable_is_detected") else { return };
    // The pool promises less than the test requires.
    let (durable, mut served) = (Durable::AtReply, serve(&disk, "auto", false));
    let at = |name: &str| format!("{}\\{name}", DIRECTORIES[0]);
    let write = |name: &str, content| Change::Write { name: at(name), content, flush: false };
    let mut files = Files::default();
    let mut seen = Vec::new();
    for (change, expected) in [
        (write("0", 1), "0 is lost"),
        (write("0", 2), "0 has other contents"),
        (Change::Truncate { name: at("0"), size: 100, flush: false }, "0 has other contents"),
        (Change::Truncate { name: at("0"), size: 9000, flush: false }, "0 has other contents"),
        (Change::SetTime { name: at("0"), seconds: 1_000_000_000 }, "0 was modified at"),
        (write("1", 3), "1 is lost"),
        (Change::Clone { from: at("1"), to: at("2") }, "2 is lost"),
        (Change::Unlink { name: at("0") }, "0 is there again"),
        (Change::MakeDirectory { name: at("made-0") }, "made-0 is lost"),
        (Change::RemoveDirectory { name: at("made-0") }, "made-0 is there again"),
    ] {
        let begun = disk.log_bytes();
        let acknowledged = ask(&disk, &mut served, &files, &change, durable);
        let before = std::mem::replace(&mut files, acknowledged.last().expect("an answer").files.clone());
        seen.push((change, expected, begun, before, acknowledged));
        // The next change finds this one on the disk.
        rustix::fs::syncfs(std::fs::File::open(disk.path()).expect("the disk")).expect("synced");
    }
    drop(served);
    for (change, expected, begun, before, acknowledged) in seen {
        match cut_everywhere(&disk, begun, &before, &acknowledged, durable) {
            Ok(_) => panic!("{change:?} is kept by a pool that is not written through"),
            Err(wrong) => assert!(wrong.contains(expected), "{change:?}: {wrong}"),
        }
    }
}

/// Checks that the second half of the tests above can fail, too: they check the state while a request is in progress.
#[test]
fn half_done_change_is_detected() {
    let Some(disk) = logged_disk("half_done_change_is_detected") else { return };
    let (durable, mut served) = (Durable::AtReply, serve(&disk, "auto", true));
    let (name, other) = (format!("{}\\0", DIRECTORIES[0]), format!("{}\\0", DIRECTORIES[1]));
    let start = Files::default();
    let begun = disk.log_bytes();
    let written = ask(
        &disk,
        &mut served,
        &start,
        &Change::Write { name: name.clone(), content: 1, flush: false },
        durable,
    );
    let middle = &written.last().expect("an answer").files;
    let unlink = Change::Unlink { name: name.clone() };
    let unlinked = ask(&disk, &mut served, middle, &unlink, durable);
    drop(served);
    // A rename from one name to the other was requested, but the file exists under neither.
    let change = Change::Rename { from: name, to: other, replace: false };
    let files = middle.after(&change, durable).pop().expect("a state");
    let log_bytes = unlinked.last().expect("an answer").log_bytes;
    let claimed: Vec<_> = written.into_iter().chain([Acknowledged { change, log_bytes, files }]).collect();
    let wrong = match cut_everywhere(&disk, begun, &start, &claimed, durable) {
        Ok(_) => panic!("the file is at neither name"),
        Err(wrong) => wrong,
    };
    assert!(wrong.contains("is half done"), "{wrong}");
}

#[test]
fn flush_that_fails_on_the_disk_is_never_acknowledged() {
    let test = "flush_that_fails_on_the_disk_is_never_acknowledged";
    for engine in ["auto", "readiness"] {
        let Some(mut disk) = logged_disk(test) else { return };
        let mut served = serve(&disk, engine, false);
        let client = &mut served.client;
        let name = format!("{}\\0", DIRECTORIES[0]);
        let file_id = client.open(&name, CreateDisposition::CREATE).expect("a file");
        assert_eq!(client.write(file_id, 0, &[7; 4096]), NtStatus::SUCCESS);
        assert_eq!(client.flush(file_id), NtStatus::SUCCESS);
        assert_eq!(client.write(file_id, 0, &[8; 4096]), NtStatus::SUCCESS);
        disk.fail();
        assert_ne!(client.flush(file_id), NtStatus::SUCCESS, "{engine}");
        // The kernel reports a failed write-back once. The data stays lost, so every later flush must fail, too.
        assert_ne!(client.flush(file_id), NtStatus::SUCCESS, "{engine}");
        // The server is still running and answers.
        let mut other = served.daemon.client(Dialect::SMB2_1);
        assert_eq!(other.log_on(&format!("{VOLUME}-user"), support::PASSWORD), NtStatus::SUCCESS);
        drop(served.place);
    }
}
