//! A server with an engine that is monitored and delayed: more writers than the memory allows, on a disk that is slower than
//! all of them together; and the work of an event loop in one turn.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_server::eventloop::EventLoop;
use forebay_server::io::readiness::Readiness;
use forebay_server::io::uring::Uring;
use forebay_server::io::{Completion, Engine, Operation, Token, Waker};
use forebay_server::limits::{STALL_TIME_DEFAULT_MAX, TURN_BYTES_MAX};
use forebay_smb::engine::Server;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, OplockLevel};
use forebay_smb::wire::{Command as Smb, Header};
use rustix::io::Errno;
use support::in_process::{InProcess, Setup};
use support::until;
use tempfile::TempDir;

const MIB: usize = 1 << 20;
const EVENT_LOOPS: usize = 64;
/// Volumes with clients that write, and writers per volume.
const VOLUMES: usize = 8;
const WRITERS: usize = 8;
const WRITE_BYTES: usize = 4 * MIB;
/// WRITEs that the first writer of a volume has in flight, and each of the others.
const WRITES_MOST: usize = 10;
const WRITES: usize = 2;
const MEMORY: usize = 128 * MIB;
/// The memory that the process needs in addition to its memory for payload, including the writers' threads.
const BESIDES: usize = 96 * MIB;

/// The memory of this process is measured: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A disk that completes WRITEs only when allowed to, and observations of the loops that use it.
#[derive(Default)]
struct Disk {
    allowed: AtomicU64,
    ended: AtomicU64,
    wakers: Mutex<Vec<Waker>>,
    /// The engine holds back what it received.
    receives_held: AtomicBool,
    /// Receives that it holds back.
    receives: AtomicUsize,
    /// The maximum number of READ bytes that one turn started.
    turn_bytes_most: AtomicUsize,
    /// A loop has waited with mail undelivered.
    mail_left: AtomicBool,
    server: OnceLock<Arc<Server>>,
}

impl Disk {
    fn allow(&self, writes: u64) {
        self.allowed.fetch_add(writes, Ordering::SeqCst);
        self.wake();
    }

    fn hold_receives(&self, hold: bool) {
        self.receives_held.store(hold, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        for waker in &*self.wakers.lock().unwrap() {
            waker.wake();
        }
    }

    fn end_one(&self) -> bool {
        let less = |allowed: u64| allowed.checked_sub(1);
        let ends = self.allowed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok();
        if ends {
            self.ended.fetch_add(1, Ordering::SeqCst);
        }
        ends
    }
}

/// An engine with its files on that disk.
struct Throttled<E> {
    engine: E,
    disk: Arc<Disk>,
    writes: Vec<Completion>,
    receives: Vec<Completion>,
    /// Bytes of READs started in this turn.
    bytes: usize,
}

impl<E> Throttled<E> {
    fn new(engine: E, disk: Arc<Disk>) -> Self {
        Self { engine, disk, writes: Vec::new(), receives: Vec::new(), bytes: 0 }
    }
}

impl<E: Engine> Engine for Throttled<E> {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn adopt(&mut self, socket: &Arc<OwnedFd>) -> Result<(), Errno> {
        self.engine.adopt(socket)
    }

    fn forget(&mut self, socket: &Arc<OwnedFd>) {
        self.engine.forget(socket);
    }

    fn submit(&mut self, token: Token, operation: Operation) {
        if let Operation::Read { length, .. } = &operation {
            self.bytes += length;
        }
        self.engine.submit(token, operation);
    }

    fn wait(&mut self, time_max: Duration, done: &mut Vec<Completion>) -> Result<(), Errno> {
        self.disk.turn_bytes_most.fetch_max(std::mem::take(&mut self.bytes), Ordering::SeqCst);
        if self.disk.server.get().is_some_and(|server| server.has_mail()) {
            self.disk.mail_left.store(true, Ordering::SeqCst);
        }
        let mut all = Vec::new();
        self.engine.wait(time_max, &mut all)?;
        for completion in all {
            match completion.operation {
                Operation::Write { .. } => self.writes.push(completion),
                Operation::Receive { .. } if self.disk.receives_held.load(Ordering::SeqCst) => {
                    self.receives.push(completion);
                    self.disk.receives.fetch_add(1, Ordering::SeqCst);
                }
                _ => done.push(completion),
            }
        }
        if !self.disk.receives_held.load(Ordering::SeqCst) {
            done.append(&mut self.receives);
        }
        while !self.writes.is_empty() && self.disk.end_one() {
            done.push(self.writes.remove(0));
        }
        Ok(())
    }
}

fn serve(
    root: &Path,
    volumes: &[String],
    disk: &Arc<Disk>,
    event_loops: usize,
    stall_time_max: Duration,
) -> InProcess {
    let setup = Setup { root, volumes, event_loops, memory: MEMORY, stall_time_max };
    let of_loops = Arc::clone(disk);
    setup.start(move |waker, shared, index| {
        let disk = Arc::clone(&of_loops);
        disk.server.get_or_init(|| Arc::clone(&shared.server));
        disk.wakers.lock().unwrap().push(waker.clone());
        if let Ok(engine) = Uring::new(waker.clone(), shared.lanes.queues().clone()) {
            return EventLoop::new(Throttled::new(engine, disk), shared, index).run();
        }
        let engine = Readiness::new(waker, shared.lanes.queues().clone())?;
        EventLoop::new(Throttled::new(engine, disk), shared, index).run()
    })
}

/// A line of /proc/self/status, in bytes.
fn status(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

#[test]
fn writers_on_a_slow_disk_wait_without_disconnects_or_errors() {
    let _alone = alone();
    let scratch = TempDir::new().unwrap();
    let disk = Arc::new(Disk::default());
    let mut volumes: Vec<String> = (0..VOLUMES).map(|i| format!("busy{i}")).collect();
    volumes.push("calm".to_owned());
    let server = serve(scratch.path(), &volumes, &disk, EVENT_LOOPS, STALL_TIME_DEFAULT_MAX);
    let data: &'static [u8] = Box::leak((0..WRITE_BYTES).map(|i| (i % 251) as u8).collect());
    std::fs::write(scratch.path().join("calm/f"), data).unwrap();
    let mut calm = server.mount("calm");
    let before = status("VmRSS");

    let writers: Vec<JoinHandle<()>> = (0..VOLUMES * WRITERS)
        .map(|i| {
            let (volume, writes) = (&volumes[i % VOLUMES], if i < VOLUMES { WRITES_MOST } else { WRITES });
            let mut client = server.mount(volume);
            std::thread::spawn(move || {
                let file = client.open(&format!("f{i}"), CreateDisposition::CREATE).unwrap();
                let frame: Vec<Vec<u8>> =
                    (0..writes).map(|_| client.write_frame(file, 0, WRITE_BYTES as u32)).collect();
                for frame in frame {
                    client.stream.write_all(&frame).unwrap();
                    client.stream.write_all(data).unwrap();
                }
                for _ in 0..writes {
                    assert_eq!(client.answer().status(), NtStatus::SUCCESS);
                }
                assert_eq!(client.close(file), NtStatus::SUCCESS);
            })
        })
        .collect();

    // The disk completes nothing: the memory is used up, and connections wait for it.
    let budget = server.memory.budget();
    until("the end of the memory", || {
        (budget.bytes() + WRITE_BYTES > MEMORY && server.metrics.memory_waits.get() > 32).then_some(())
    });
    for _ in 0..10 {
        let file = calm.open("f", CreateDisposition::OPEN).unwrap();
        assert!(calm.read(file, 0, 32 << 10).unwrap() == data[..32 << 10]);
        assert_eq!(calm.attributes(file), NtStatus::SUCCESS);
        assert_eq!(calm.close(file), NtStatus::SUCCESS);
    }
    assert_eq!(disk.ended.load(Ordering::Relaxed), 0);
    assert!(budget.bytes() < MEMORY + 8 * MIB, "{budget:?}");

    // It completes one WRITE after the other.
    let all = (VOLUMES * (WRITES_MOST + (WRITERS - 1) * WRITES)) as u64 + 1;
    let slow = Arc::clone(&disk);
    let ending = std::thread::spawn(move || {
        for write in 0..all {
            slow.allow(1);
            until("a WRITE", || (slow.ended.load(Ordering::SeqCst) > write).then_some(()));
        }
    });
    let file = calm.open("f", CreateDisposition::OPEN).unwrap();
    assert!(calm.read(file, 0, WRITE_BYTES as u32).unwrap() == data);
    assert_eq!(calm.write(file, 0, &data[1..]), NtStatus::SUCCESS);
    for writer in writers {
        writer.join().unwrap();
    }
    ending.join().unwrap();
    for i in 0..VOLUMES * WRITERS {
        let path = scratch.path().join(&volumes[i % VOLUMES]).join(format!("f{i}"));
        assert!(std::fs::read(path).unwrap() == data, "file {i}");
    }
    let most = status("VmHWM") - before;
    println!("{} MiB of memory for payload: {} MiB more resident at most", MEMORY / MIB, most / MIB);
    assert!(most < MEMORY + BESIDES, "{} MiB", most / MIB);
    server.end();
}

#[test]
fn reads_started_per_turn_are_limited_and_all_are_answered() {
    const READERS: usize = 16;
    let _alone = alone();
    let scratch = TempDir::new().unwrap();
    let disk = Arc::new(Disk::default());
    let server = serve(scratch.path(), &["v".to_owned()], &disk, 1, STALL_TIME_DEFAULT_MAX);
    let data: Vec<u8> = (0..4 * MIB).map(|i| (i % 251) as u8).collect();
    std::fs::write(scratch.path().join("v/f"), &data).unwrap();
    let mut readers: Vec<_> = (0..READERS)
        .map(|_| {
            let mut client = server.mount("v");
            let file = client.open("f", CreateDisposition::OPEN).unwrap();
            (client, file)
        })
        .collect();
    disk.hold_receives(true);
    for (client, file) in &mut readers {
        client.send_read(*file, 0, 4 * MIB as u32);
    }
    until("all requests", || (disk.receives.load(Ordering::SeqCst) >= READERS).then_some(()));
    // They arrive in one turn.
    disk.hold_receives(false);
    for (client, _) in &mut readers {
        assert!(support::data(&client.answer()).unwrap() == data);
    }
    let most = disk.turn_bytes_most.load(Ordering::SeqCst);
    assert!(most < TURN_BYTES_MAX as usize + 4 * MIB, "{} MiB in one turn", most / MIB);
    server.end();
}

#[test]
fn effects_of_a_disconnect_are_delivered_before_the_loop_waits() {
    let _alone = alone();
    let scratch = TempDir::new().unwrap();
    let disk = Arc::new(Disk::default());
    let server = serve(scratch.path(), &["v".to_owned()], &disk, 1, Duration::from_secs(1));
    let mut holder = server.mount("v");
    let held = holder.open_with("f", CreateDisposition::CREATE, OplockLevel::BATCH).unwrap();
    let mut waiting = server.mount("v");
    let asks = std::thread::spawn(move || waiting.open("f", CreateDisposition::OPEN).map(drop));
    let notice = holder.frame().expect("the break");
    assert_eq!(Header::parse(&notice).unwrap().command, Smb::OPLOCK_BREAK);
    // The holder does not answer. Its connection ends because it does not finish a frame.
    let frame = holder.write_frame(held, 0, MIB as u32);
    holder.stream.write_all(&frame).unwrap();
    assert!(holder.frame().is_none());
    assert_eq!(asks.join().unwrap(), Ok(()));
    assert!(!disk.mail_left.load(Ordering::SeqCst), "mail has waited for the next turn");
    server.end();
}
