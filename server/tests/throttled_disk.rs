//! More writers than the memory allows, against a real server with 64 event loops, on a disk slower than all of them together.
//!
//! The pool is a write-through XFS on a disk that QEMU throttles: every WRITE waits for that disk.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::CreateDisposition;
use forebay_smb::wire::negotiate::Dialect;
use forebay_testing::{Need, skip};
use support::disk::{Disk, Mounted, copy, scratch};
use support::{Client, Place, until};

const MIB: usize = 1 << 20;
const EVENT_LOOPS: usize = 64;
/// Volumes with clients that write, and writers per volume.
const VOLUMES: usize = 8;
const WRITERS: usize = 8;
const WRITE_BYTES: usize = 4 * MIB;
/// WRITEs that the first writer of a volume has in flight, and each of the others.
const WRITES_MOST: usize = 4;
const WRITES: usize = 1;
const WRITTEN_BYTES: usize = VOLUMES * (WRITES_MOST + (WRITERS - 1) * WRITES) * WRITE_BYTES;
/// Bytes that the disk writes per second.
const DISK_BYTES_PER_SECOND: usize = 64 * MIB;
const DISK_BYTES: usize = 1 << 30;
/// `server.memory`, and the server's additional memory (docs/reference/server.md, Memory).
const MEMORY: usize = 64 * MIB;
const BESIDES: usize = 100 * MIB;
const BESIDES_PER_CONNECTION: usize = 128 << 10;

fn throttled_disk(test: &str) -> Option<Disk> {
    let options = |_: &Path| {
        [
            "--object".to_owned(),
            format!("throttle-group,id=slow,limits.bps-write={DISK_BYTES_PER_SECOND}"),
            "--blockdev".to_owned(),
            "driver=throttle,file=disk,throttle-group=slow,node-name=top".to_owned(),
        ]
        .to_vec()
    };
    match Disk::new(DISK_BYTES as u64, options) {
        Ok(disk) => Some(disk),
        Err(why) => {
            skip(Need::LoggedDisk, format!("{test}: {why}"));
            None
        }
    }
}

/// The data of WRITE `nth` of a writer.
fn data(writer: usize, nth: usize) -> Vec<u8> {
    let seed = (writer * WRITES_MOST + nth + 1) as u32;
    let mut data = vec![seed as u8; WRITE_BYTES];
    for (i, block) in data.chunks_mut(512).enumerate() {
        block[..4].copy_from_slice(&seed.to_le_bytes());
        block[4..8].copy_from_slice(&(i as u32).to_le_bytes());
    }
    data
}

const fn writes(writer: usize) -> usize {
    if writer < VOLUMES { WRITES_MOST } else { WRITES }
}

fn volume(writer: usize) -> String {
    format!("busy{}", writer % VOLUMES)
}

/// Sends all WRITEs of writer `writer` without waiting in between, and flushes them to stable storage.
fn write(mut client: Client, writer: usize) {
    let file = client.open(&format!("f{writer}"), CreateDisposition::CREATE).unwrap();
    let frames: Vec<Vec<u8>> = (0..writes(writer))
        .map(|nth| client.write_frame(file, (nth * WRITE_BYTES) as u64, WRITE_BYTES as u32))
        .collect();
    for (nth, frame) in frames.iter().enumerate() {
        client.stream.write_all(frame).unwrap();
        client.stream.write_all(&data(writer, nth)).unwrap();
    }
    for _ in frames {
        assert_eq!(client.answer().status(), NtStatus::SUCCESS);
    }
    assert_eq!(client.flush(file), NtStatus::SUCCESS);
    assert_eq!(client.close(file), NtStatus::SUCCESS);
}

fn memory(pid: u32, line: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|text| text.strip_prefix(line)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// The file of writer `writer` below a pool.
fn path(pool: &Path, writer: usize) -> PathBuf {
    pool.join("volumes").join(volume(writer)).join(format!("f{writer}"))
}

#[test]
fn writers_on_a_throttled_disk_wait_without_disconnects_or_errors() {
    let Some(mut disk) = throttled_disk("writers on a throttled disk") else { return };
    let place = Place::new("auto");
    let pool = disk.path().join("pool");
    std::fs::create_dir(&pool).unwrap();
    place.configure("127.0.0.1:0", &pool);
    let text = std::fs::read_to_string(place.config()).unwrap();
    let text = text
        .replace("event_loops = 2", &format!("event_loops = {EVENT_LOOPS}\nmemory = \"{MEMORY}\""))
        .replace("quota = \"none\"", "quota = \"none\"\nwrite_through = true");
    std::fs::write(place.config(), text).unwrap();
    let mut daemon = place.start();
    for i in 0..VOLUMES {
        daemon.create_volume(&format!("busy{i}")).unwrap();
    }
    daemon.create_volume("calm").unwrap();
    let mut calm = daemon.mount("calm", Dialect::SMB3_1_1);
    let mine = data(VOLUMES * WRITERS, 0);
    let file = calm.open("f", CreateDisposition::CREATE).unwrap();
    assert_eq!(calm.write(file, 0, &mine), NtStatus::SUCCESS);
    assert_eq!(calm.close(file), NtStatus::SUCCESS);

    let began = Instant::now();
    let writers: Vec<JoinHandle<()>> = (0..VOLUMES * WRITERS)
        .map(|writer| {
            let client = daemon.mount(&volume(writer), Dialect::SMB2_1);
            std::thread::spawn(move || write(client, writer))
        })
        .collect();
    // A client that only reads, and one that writes a little to the same disk.
    let over = Arc::new(AtomicBool::new(false));
    let (mut little, is_over) = (daemon.mount("calm", Dialect::SMB2_1), Arc::clone(&over));
    let little = std::thread::spawn(move || {
        let mut written: u64 = 0;
        let file = little.open("little", CreateDisposition::CREATE).unwrap();
        while !is_over.load(Ordering::Relaxed) {
            assert_eq!(little.write(file, written * 4096, &[written as u8; 4096]), NtStatus::SUCCESS);
            written += 1;
            assert_eq!(little.flush(file), NtStatus::SUCCESS);
        }
        assert_eq!(little.close(file), NtStatus::SUCCESS);
        written
    });
    let pid = daemon.child.id();
    let (mut rounds, mut longest) = (0, Duration::ZERO);
    until("the end of all writers", || {
        let round = Instant::now();
        let file = calm.open("f", CreateDisposition::OPEN).unwrap();
        assert!(calm.read(file, 0, WRITE_BYTES as u32).unwrap() == mine);
        assert_eq!(calm.attributes(file), NtStatus::SUCCESS);
        assert_eq!(calm.close(file), NtStatus::SUCCESS);
        longest = longest.max(round.elapsed());
        rounds += 1;
        writers.iter().all(JoinHandle::is_finished).then_some(())
    });
    for writer in writers {
        writer.join().unwrap();
    }
    let took = began.elapsed();
    over.store(true, Ordering::Relaxed);
    let written = little.join().unwrap();
    let (peak, connections) = (memory(pid, "VmHWM"), VOLUMES * WRITERS + 2);
    println!(
        "{} MiB in {took:.1?}; meanwhile {rounds} rounds of another client, the longest {longest:.1?}, and {written} small \
         writes; {} MiB resident at most",
        WRITTEN_BYTES / MIB,
        peak / MIB
    );
    // The disk was slow, and the writers had more data in flight than the server's memory holds.
    let least = Duration::from_secs((WRITTEN_BYTES / DISK_BYTES_PER_SECOND) as u64) * 3 / 4;
    assert!(took > least, "{took:?}");
    assert!(rounds > 1 && written > 1);
    assert!(peak > MEMORY, "{} MiB", peak / MIB);
    assert!(peak < MEMORY + BESIDES + connections * BESIDES_PER_CONNECTION, "{} MiB", peak / MIB);
    let log = std::fs::read_to_string(place.log()).unwrap();
    assert!(!log.contains("disconnecting"), "{log}");

    // Server and disk lose power: everything that was answered is on the disk.
    daemon.kill();
    disk.fail();
    let after = scratch();
    copy(&disk.image(), &after.path().join("image"));
    drop(disk);
    let at = after.path().join("mounted");
    std::fs::create_dir(&at).unwrap();
    let mounted = Mounted::new(after.path().join("image"), &at);
    let pool = at.join("pool");
    for writer in 0..VOLUMES * WRITERS {
        let found = std::fs::read(path(&pool, writer)).unwrap();
        assert_eq!(found.len(), writes(writer) * WRITE_BYTES);
        for (nth, part) in found.chunks(WRITE_BYTES).enumerate() {
            assert!(part == data(writer, nth), "WRITE {nth} of writer {writer}");
        }
    }
    let little = std::fs::read(pool.join("volumes/calm/little")).unwrap();
    assert_eq!(little.len() as u64, written * 4096);
    assert!(little.chunks(4096).enumerate().all(|(i, part)| part.iter().all(|byte| *byte == i as u8)));
    assert!(std::fs::read(pool.join("volumes/calm/f")).unwrap() == mine);
    drop(mounted);
}
