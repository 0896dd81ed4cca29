//! The power is cut after every request that the disk completed: what a client was told is durable is there.
//!
//! A workload of writes, renames, links, removals, clones and new times runs against a real server, whose pool is an XFS on a
//! disk that logs what it does. Then the disk is put together again as it was at each acknowledgment, and between two of
//! them, with its volatile cache and without, and mounted. `FOREBAY_POWER_CUT_SEED` and `FOREBAY_POWER_CUT_CHANGES` choose
//! another run.
#![allow(clippy::unwrap_used, reason = "tests")]

mod disk;
#[path = "../support/mod.rs"]
mod support;
mod workload;

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
use workload::{Change, DIRECTORIES, Files, Found, Kinds};

const SEED: u64 = 20_261_123;
const CHANGES: u64 = 40;
const VOLUME: &str = "v";

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// A disk that logs; `None` where the test is skipped, which `FOREBAY_ALLOW_SKIP` has to allow.
fn logged_disk(test: &str) -> Option<LoggedDisk> {
    match LoggedDisk::new() {
        Ok(disk) => Some(disk),
        Err(why) => {
            skip(Need::LoggedDisk, format!("{test}: {why}"));
            None
        }
    }
}

/// A server of a pool on the disk, and a client of its volume.
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

/// A change that was acknowledged when the log had so many bytes, and the files after it.
struct Acknowledged {
    change: Change,
    log_bytes: u64,
    files: Files,
}

/// Runs a workload; what was acknowledged, after the state in which it began.
fn workload(disk: &LoggedDisk, served: &mut Served, kinds: Kinds, changes: u64) -> (u64, Vec<Acknowledged>) {
    let mut random = Random(number("FOREBAY_POWER_CUT_SEED", SEED));
    let begun = disk.log_bytes();
    let mut files = Files::default();
    let mut acknowledged = Vec::new();
    for _ in 0..changes {
        let change = Change::choose(&mut random, &files, kinds);
        change.ask(&mut served.client, &files);
        files = files.after(&change);
        acknowledged.push(Acknowledged { change, log_bytes: disk.log_bytes(), files: files.clone() });
    }
    (begun, acknowledged)
}

/// Cuts the power at and between all acknowledgments; what is wrong at the first place where something is.
fn cut_everywhere(disk: &LoggedDisk, begun: u64, acknowledged: &[Acknowledged]) -> Result<usize, String> {
    let log = DiskLog::read(&disk.log()).expect("the disk's log");
    assert!(log.entries.iter().any(|entry| entry.is_flush()), "the disk was never flushed");
    let scratch = disk::scratch();
    let at = scratch.path().join("mounted");
    std::fs::create_dir(&at).expect("a mount point");
    let mut random = Random(number("FOREBAY_POWER_CUT_SEED", SEED) + 1);
    let mut cuts = 0;
    for cache in [Cache::Lost, Cache::Kept] {
        let path = scratch.path().join(format!("{cache:?}"));
        let mut image = Image::new(&log, image(&path), cache);
        let mut files = &Files::default();
        let mut from = log.count(begun);
        for next in acknowledged {
            let to = log.count(next.log_bytes);
            // Two places while it is under way, and the moment of its acknowledgment, where only the cache is to be blamed.
            let mut places: Vec<usize> = (0..2)
                .map(|_| from + random.below((to - from).max(1) as u64) as usize)
                .filter(|place| *place < to)
                .collect();
            places.sort_unstable();
            places.dedup();
            let under_way = places.into_iter().map(|place| (place, files, Some(&next.change)));
            for (place, files, change) in under_way.chain([(to, &next.files, None)]) {
                image.advance(place).expect("an image");
                cuts += 1;
                // A name of its own: the loop device of the one before may still be on its way out.
                let cut = scratch.path().join(format!("cut-{cuts}"));
                copy(&path, &cut);
                let mounted = Mounted::new(cut, &at);
                let found = Found::read(&at.join("pool/volumes").join(VOLUME));
                drop(mounted);
                files.compare(&found, change).map_err(|wrong| {
                    format!("after {place} requests, cache {cache:?}, {change:?} under way: {wrong}")
                })?;
            }
            (files, from) = (&next.files, to);
        }
    }
    Ok(cuts)
}

fn nothing_acknowledged_is_lost(test: &str, engine: &'static str, write_through: bool, kinds: Kinds) {
    let Some(disk) = logged_disk(test) else { return };
    let mut served = serve(&disk, engine, write_through);
    let (begun, acknowledged) =
        workload(&disk, &mut served, kinds, number("FOREBAY_POWER_CUT_CHANGES", CHANGES));
    drop(served);
    match cut_everywhere(&disk, begun, &acknowledged) {
        Ok(cuts) => println!("{test}: {} changes, {cuts} power cuts", acknowledged.len()),
        Err(wrong) => panic!("{test}: {wrong}"),
    }
}

#[test]
fn a_pool_that_is_written_through_keeps_every_acknowledged_change() {
    let test = "a_pool_that_is_written_through_keeps_every_acknowledged_change";
    for engine in ["auto", "readiness"] {
        nothing_acknowledged_is_lost(test, engine, true, Kinds::All);
    }
}

#[test]
fn every_pool_keeps_what_was_flushed_and_renamed() {
    let test = "every_pool_keeps_what_was_flushed_and_renamed";
    nothing_acknowledged_is_lost(test, "auto", false, Kinds::FlushedAndRenamed);
}

/// The tests above can fail: a removal that is not durable when it is answered is seen.
#[test]
fn a_change_that_was_not_durable_is_noticed() {
    let Some(disk) = logged_disk("a_change_that_was_not_durable_is_noticed") else { return };
    let mut served = serve(&disk, "auto", false);
    let begun = disk.log_bytes();
    let name = format!("{}\\0", DIRECTORIES[0]);
    let mut files = Files::default();
    let mut acknowledged = Vec::new();
    for change in [Change::Write { name: name.clone(), content: 1 }, Change::Unlink { name }] {
        change.ask(&mut served.client, &files);
        files = files.after(&change);
        acknowledged.push(Acknowledged { change, log_bytes: disk.log_bytes(), files: files.clone() });
    }
    drop(served);
    let wrong = cut_everywhere(&disk, begun, &acknowledged).expect_err("a pool that is not written through");
    assert!(wrong.contains("is there again"), "{wrong}");
}

#[test]
fn a_flush_that_the_disk_fails_is_never_acknowledged() {
    let test = "a_flush_that_the_disk_fails_is_never_acknowledged";
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
        // The kernel reports a failed write-back once; what was lost then is lost for every later flush, too.
        assert_ne!(client.flush(file_id), NtStatus::SUCCESS, "{engine}");
        // The server is still there and answers.
        let mut other = served.daemon.client(Dialect::SMB2_1);
        assert_eq!(other.log_on(&format!("{VOLUME}-user"), support::PASSWORD), NtStatus::SUCCESS);
        drop(served.place);
    }
}
