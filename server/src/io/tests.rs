//! Tests of the behavior that both engines must have.

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use forebay_smb::fs::{Frame, FsHandle, FsOpKind, FsReply, ObjectKind, OpId, OpenMode, OpenRequest, RelPath};
use forebay_testing::{Need, skip};
use rustix::io::Errno;
use tempfile::TempDir;

use super::readiness::Readiness;
use super::uring::Uring;
use super::{Completion, Engine, Message, Operation, Part, PastCache, Purpose, Token, Waker};
use crate::backend::directory::{self, OpenFile, Volume};
use crate::buffers::BufferPool;
use crate::gate::Passage;
use crate::lanes::{Lane, Lanes, Origin};
use crate::scratch_disk::Disk;

const DEADLINE: Duration = Duration::from_secs(20);

thread_local! {
    static READS: Cell<usize> = const { Cell::new(0) };
}

/// Counts a read that an engine submits to the kernel.
pub(super) fn count_read() {
    READS.set(READS.get() + 1);
}

fn on_both(test: impl Fn(&mut dyn Engine, &Waker)) {
    on_both_with(|engine, waker, _| test(engine, waker));
}

fn on_both_with(test: impl Fn(&mut dyn Engine, &Waker, &Lanes)) {
    let lanes = Lanes::start(2).expect("threads");
    let queues = || lanes.queues().clone();
    let waker = Waker::new().expect("a waker");
    test(&mut Readiness::new(waker.clone(), queues()).expect("epoll"), &waker, &lanes);
    match super::uring::probe() {
        Ok(()) => {
            let waker = Waker::new().expect("a waker");
            test(&mut Uring::new(waker.clone(), queues()).expect("a ring"), &waker, &lanes);
        }
        // If this machine forbids it, the daemon would also fall back.
        Err(unavailable) => {
            assert!(!matches!(unavailable, super::uring::Unavailable::Other(_)), "{unavailable}");
            skip(Need::IoUring, unavailable);
        }
    }
}

fn token(purpose: Purpose) -> Token {
    Token { connection: 1, purpose }
}

fn next(engine: &mut dyn Engine) -> Completion {
    let mut done = Vec::new();
    let began = Instant::now();
    while done.is_empty() {
        assert!(began.elapsed() < DEADLINE, "nothing completed");
        engine.wait(Duration::from_millis(100), &mut done).expect("the engine works");
    }
    assert_eq!(done.len(), 1, "one at a time here");
    done.remove(0)
}

fn pair(engine: &mut dyn Engine) -> (Arc<OwnedFd>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (server, _) = listener.accept().expect("accepted");
    let server = Arc::new(OwnedFd::from(server));
    engine.adopt(&server).expect("adopted");
    (server, client)
}

fn receive(socket: &Arc<OwnedFd>, pool: &BufferPool, filled: usize, least: usize, most: usize) -> Operation {
    let buffer = pool.take(most).expect("a buffer");
    Operation::Receive { socket: Arc::clone(socket), buffer, start: -112, filled, least, most }
}

#[test]
fn receive_returns_available_data_and_waits_for_the_minimum() {
    on_both(|engine, _| {
        let pool = BufferPool::default();
        let (server, mut client) = pair(engine);
        engine.submit(token(Purpose::Receive), receive(&server, &pool, 0, 1, 4096));
        client.write_all(b"few").expect("sent");
        let Completion { operation: Operation::Receive { buffer, filled, .. }, result, .. } = next(engine)
        else {
            panic!("a receive")
        };
        assert_eq!((result, filled), (Ok(()), 3));
        assert_eq!(buffer.bytes(-112..-109), b"few");

        let sent: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        let copy = sent.clone();
        let writer = std::thread::spawn(move || {
            client.write_all(&copy).expect("sent");
            client
        });
        engine.submit(token(Purpose::Receive), receive(&server, &pool, 5, 3_000_005, 3_000_005));
        let Completion { operation: Operation::Receive { buffer, filled, .. }, result, .. } = next(engine)
        else {
            panic!("a receive")
        };
        assert_eq!((result, filled), (Ok(()), 3_000_005));
        assert!(buffer.bytes(-107..3_000_000 - 107) == sent);

        drop(writer.join().expect("no panic"));
        engine.submit(token(Purpose::Receive), receive(&server, &pool, 0, 10, 10));
        let Completion { operation: Operation::Receive { filled, .. }, .. } = next(engine) else {
            panic!("a receive")
        };
        assert_eq!(filled, 0, "the peer is gone");
        engine.forget(&server);
    });
}

#[test]
fn all_parts_are_sent_in_order_to_a_slow_reader() {
    on_both(|engine, _| {
        let pool = BufferPool::default();
        let (server, mut client) = pair(engine);
        let mut buffer = pool.take(5 << 20).expect("a buffer");
        buffer.bytes_mut(-8..5 << 20).fill(9);
        let parts = vec![
            Part::Prefix([0, 1, 2, 3]),
            Part::Bytes(vec![7; 100_000], None),
            Part::Whole(buffer, -8..5 << 20),
            Part::Bytes(vec![], None),
            Part::Bytes(vec![8], None),
        ];
        let mut message = Message::new(parts);
        assert!(message.gather(&mut Message::new(vec![Part::Bytes(vec![1, 2], None)]), 6 << 20));
        let length = message.length();
        assert_eq!(length, 4 + 100_000 + 8 + (5 << 20) + 1 + 2);
        engine.submit(token(Purpose::Send), Operation::Send { socket: Arc::clone(&server), message });
        let reader = std::thread::spawn(move || {
            let mut all = vec![0; length];
            client.read_exact(&mut all).expect("received");
            all
        });
        let Completion { operation: Operation::Send { message, .. }, result, .. } = next(engine) else {
            panic!("a send")
        };
        assert_eq!((result, message.sent()), (Ok(()), length));
        let all = reader.join().expect("no panic");
        assert_eq!(all[..5], [0, 1, 2, 3, 7]);
        assert!(all[100_004..length - 3].iter().all(|&b| b == 9));
        assert_eq!(all[length - 4..], [9, 8, 1, 2]);
        engine.forget(&server);
    });
}

#[test]
fn mapped_data_is_sent_even_if_the_file_is_truncated() {
    const SIZE: usize = 4 << 20;
    let scratch = TempDir::new().expect("a directory");
    let volume = Volume::open(scratch.path()).expect("a volume").handle();
    let file = open(&volume, "f");
    let by_name = std::fs::File::options().write(true).open(scratch.path().join("f")).expect("it is there");
    let data: Vec<u8> = (0..SIZE).map(|i| (i % 251) as u8).collect();
    on_both(|engine, _| {
        for cut_off_at in [SIZE, SIZE / 4] {
            by_name.set_len(0).expect("emptied");
            by_name.write_all_at(&data, 0).expect("written");
            let (server, mut client) = pair(engine);
            let read = file.mapped_read(0, SIZE as u32).expect("cached");
            let parts = vec![Part::Prefix([1, 2, 3, 4]), Part::Mapped(read), Part::Bytes(vec![5], None)];
            let message = Message::new(parts);
            assert_eq!((message.length(), message.mapped_bytes()), (SIZE + 5, SIZE));
            by_name.set_len(cut_off_at as u64).expect("cut off");
            engine.submit(token(Purpose::Send), Operation::Send { socket: Arc::clone(&server), message });
            let reader = std::thread::spawn(move || {
                let mut all = vec![0; SIZE + 5];
                client.read_exact(&mut all).expect("received");
                all
            });
            assert_eq!(next(engine).result, Ok(()));
            let all = reader.join().expect("no panic");
            assert_eq!((&all[..4], all[SIZE + 4]), (&[1, 2, 3, 4][..], 5));
            assert!(all[4..cut_off_at + 4] == data[..cut_off_at]);
            assert!(all[cut_off_at + 4..SIZE + 4].iter().all(|&byte| byte == 0));
            engine.forget(&server);
        }
    });
}

#[test]
fn shutdown_of_a_socket_completes_its_pending_operations() {
    on_both(|engine, _| {
        let pool = BufferPool::default();
        let (server, _client) = pair(engine);
        engine.submit(token(Purpose::Receive), receive(&server, &pool, 0, 1, 100));
        let mut done = Vec::new();
        engine.wait(Duration::ZERO, &mut done).expect("the engine works");
        assert!(done.is_empty());
        rustix::net::shutdown(&*server, rustix::net::Shutdown::Both).expect("shut down");
        assert!(matches!(next(engine).operation, Operation::Receive { filled: 0, .. }));
        let message = Message::new(vec![Part::Bytes(vec![1; 10], None)]);
        engine.submit(token(Purpose::Send), Operation::Send { socket: Arc::clone(&server), message });
        assert!(next(engine).result.is_err());
        engine.forget(&server);
    });
}

#[test]
fn waker_interrupts_a_wait() {
    on_both(|engine, waker| {
        for _ in 0..3 {
            let waker = waker.clone();
            let thread = std::thread::spawn(move || waker.wake());
            let began = Instant::now();
            engine.wait(DEADLINE, &mut Vec::new()).expect("the engine works");
            assert!(began.elapsed() < DEADLINE);
            thread.join().expect("no panic");
        }
    });
}

struct Bytes(Vec<u8>);

impl Frame for Bytes {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A file operation that began at the same time as the first one.
fn file_op(id: u64) -> Purpose {
    static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);
    Purpose::File(OpId(id), *BEGUN)
}

fn open(volume: &FsHandle, name: &str) -> Arc<OpenFile> {
    let request = OpenRequest {
        path: RelPath::new(name).expect("a path"),
        mode: OpenMode::Either,
        kind: ObjectKind::File,
        read: true,
        write: true,
        write_through: false,
        attributes: 0,
        allocation_size: 0,
        ownership: None,
        stream: None,
        descriptor: None,
        checked: true,
    };
    let operation = FsOpKind::Open { volume: volume.clone(), request };
    match crate::backend::execute(operation, &BufferPool::default()) {
        Ok(FsReply::Opened(opened)) => directory::file(&opened.handle).expect("a file"),
        _ => panic!("opened"),
    }
}

#[test]
fn files_are_written_and_read() {
    written_and_read(&TempDir::new().expect("a directory"));
}

#[test]
fn files_on_tmpfs_are_written_and_read() {
    written_and_read(&TempDir::new_in("/dev/shm").expect("tmpfs"));
}

fn written_and_read(scratch: &TempDir) {
    on_both(|engine, _| {
        let pool = BufferPool::default();
        let volume = Volume::open(scratch.path()).expect("a volume").handle();
        let file = open(&volume, "f");
        let data: Vec<u8> = (0..2_000_000_u32).map(|i| (i % 253) as u8).collect();
        for (durable, id) in [(false, 1), (true, 2)] {
            let write = Operation::Write {
                change: Passage::wait(Arc::clone(&file)),
                frame: Arc::new(Bytes(data.clone())),
                range: 1000..2_000_000,
                offset: 500,
                written: 0,
                durable,
            };
            engine.submit(token(file_op(id)), write);
            let done = next(engine);
            assert_eq!((done.result, done.token), (Ok(()), token(file_op(id))));
            assert!(matches!(done.operation, Operation::Write { written: 1_999_000, .. }));
        }
        let read = |offset, length| Operation::Read {
            file: Arc::clone(&file),
            buffer: pool.take(length).expect("a buffer"),
            offset,
            length,
            filled: 0,
            past_cache: PastCache::default(),
        };
        engine.submit(token(file_op(4)), read(400, 4 << 20));
        let Completion { operation: Operation::Read { buffer, filled, .. }, result: Ok(()), .. } =
            next(engine)
        else {
            panic!("read")
        };
        assert_eq!(filled, 1_999_100, "up to the end");
        assert_eq!(buffer.bytes(0..100), [0; 100]);
        assert!(buffer.bytes(100..1_999_100) == &data[1000..]);
        engine.submit(token(file_op(5)), read(1 << 30, 10));
        assert!(matches!(next(engine).operation, Operation::Read { filled: 0, .. }), "beyond the end");
    });
}

/// Reads directly, even if the data are cached, if that is possible at all. Returns the bytes, and how many were read directly.
fn read_past_cache(
    engine: &mut dyn Engine,
    file: &Arc<OpenFile>,
    offset: u64,
    length: usize,
    asked: usize,
) -> (Vec<u8>, usize) {
    let buffer = BufferPool::default().take(asked.max(length)).expect("a buffer");
    let past_cache = PastCache { asked, came: 0 };
    let file = Arc::clone(file);
    engine.submit(token(file_op(1)), Operation::Read { file, buffer, offset, length, filled: 0, past_cache });
    let Completion { operation: Operation::Read { buffer, filled, past_cache, .. }, result, .. } =
        next(engine)
    else {
        panic!("a read")
    };
    assert_eq!(result, Ok(()));
    (buffer.bytes(0..filled.cast_signed()).to_vec(), past_cache.came)
}

fn write(engine: &mut dyn Engine, file: &Arc<OpenFile>, offset: u64, data: &[u8]) {
    let operation = Operation::Write {
        change: Passage::wait(Arc::clone(file)),
        frame: Arc::new(Bytes(data.to_vec())),
        range: 0..data.len(),
        offset,
        written: 0,
        durable: false,
    };
    engine.submit(token(file_op(1)), operation);
    assert_eq!(next(engine).result, Ok(()));
}

#[test]
fn direct_reads_return_data_written_through_the_page_cache() {
    on_both(|engine, _| {
        let scratch = TempDir::new().expect("a directory");
        let volume = Volume::open(scratch.path()).expect("a volume").handle();
        let file = open(&volume, "f");
        file.prepare_direct();
        let possible = file.direct_fd().is_some();
        let mut data: Vec<u8> = (0..1_000_001_u32).map(|i| (i % 239) as u8).collect();
        write(engine, &file, 0, &data);
        // Offset, requested length, length of the direct read: whole blocks, part of a block, across the end, beyond the end.
        for (offset, length, asked) in [
            (0, 131_072, 131_072),
            (65_536, 100_001, 102_400),
            (917_504, 1 << 20, 1 << 20),
            (999_424, 65_536, 65_536),
            (1 << 20, 65_536, 65_536),
        ] {
            // Dirty each time, so that the kernel must write back first.
            data[offset.min(1_000_000)] ^= 1;
            let changed = offset.min(1_000_000);
            write(engine, &file, changed as u64, &data[changed..=changed]);
            let (bytes, came) = read_past_cache(engine, &file, offset as u64, length, asked);
            let wanted = data.get(offset..).unwrap_or_default();
            let wanted = &wanted[..length.min(wanted.len())];
            assert!(bytes == wanted, "{length} bytes at {offset}: {} came", bytes.len());
            assert!(came == bytes.len() || !possible, "{came} of {} past the page cache", bytes.len());
        }
    });
}

#[test]
fn refused_direct_reads_fall_back_to_the_page_cache() {
    on_both(|engine, _| {
        let scratch = TempDir::new().expect("a directory");
        let volume = Volume::open(scratch.path()).expect("a volume").handle();
        let file = open(&volume, "f");
        let data: Vec<u8> = (0..300_000_u32).map(|i| (i % 233) as u8).collect();
        write(engine, &file, 0, &data);
        rustix::fs::fsync(&*file).expect("synced");
        file.prepare_direct();
        // Not aligned to the blocks of any device.
        let (bytes, _) = read_past_cache(engine, &file, 3, 100_000, 100_000);
        assert!(bytes == data[3..100_003]);
        let mut buffer = BufferPool::default().take(100_000).expect("a buffer");
        let refused = file.direct_fd().is_some_and(|descriptor| {
            rustix::io::pread(descriptor, buffer.bytes_mut(0..100_000), 3) == Err(Errno::INVAL)
        });
        if refused {
            // A second handle shows when the file is no longer cached.
            let other = open(&volume, "f");
            let until = Instant::now() + DEADLINE;
            while other.direct_length(0, 65_536, 65_536).is_none() {
                assert!(Instant::now() < until, "the page cache keeps it");
                rustix::fs::fadvise(&*file, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
                std::thread::yield_now();
            }
            assert_eq!(file.direct_length(0, 65_536, 65_536), None, "it is remembered");
        }
    });
}

fn read_at(file: &Arc<OpenFile>, offset: u64, length: usize) -> Operation {
    Operation::Read {
        file: Arc::clone(file),
        buffer: BufferPool::default().take(length).expect("a buffer"),
        offset,
        length,
        filled: 0,
        past_cache: PastCache::default(),
    }
}

#[test]
fn read_up_to_the_end_of_file_takes_one_system_call() {
    on_both(|engine, _| {
        let scratch = TempDir::new().expect("a directory");
        let volume = Volume::open(scratch.path()).expect("a volume").handle();
        let file = open(&volume, "f");
        write(engine, &file, 0, &[7; 100_000]);
        for (offset, length, expected) in
            [(0, 100_000, 100_000), (0, 1 << 20, 100_000), (99_999, 4096, 1), (100_000, 10, 0)]
        {
            READS.set(0);
            engine.submit(token(file_op(1)), read_at(&file, offset, length));
            let Completion { operation: Operation::Read { filled, .. }, result, .. } = next(engine) else {
                panic!("a read")
            };
            assert_eq!((result, filled), (Ok(()), expected), "{length} bytes at {offset}");
            assert_eq!(READS.get(), 1, "{length} bytes at {offset} on {}", engine.name());
        }
    });
}

#[test]
fn short_read_within_the_file_is_continued() {
    let scratch = TempDir::new().expect("a directory");
    let volume = Volume::open(scratch.path()).expect("a volume").handle();
    let file = open(&volume, "f");
    rustix::fs::ftruncate(&*file, 1000).expect("longer");
    let mut operation = read_at(&file, 100, 600);
    assert!(!operation.advance(10), "interrupted");
    assert!(operation.advance(590));
    let mut operation = read_at(&file, 100, 4096);
    assert!(!operation.advance(899), "one byte is missing");
    assert!(operation.advance(1));
    let mut operation = read_at(&file, 100, 4096);
    assert!(operation.advance(900));
}

/// Data that become available only when the sender is dropped, like a page that must be fetched: a thread that reads them blocks.
struct Late {
    come: Mutex<Receiver<()>>,
    bytes: Vec<u8>,
}

impl Frame for Late {
    fn bytes(&self) -> &[u8] {
        let come = self.come.lock().expect("no panic");
        assert!(
            come.recv_timeout(DEADLINE)
                .is_err_and(|error| error == std::sync::mpsc::RecvTimeoutError::Disconnected),
            "waited for on a thread that must not wait"
        );
        &self.bytes
    }
}

#[test]
fn blocked_durable_writes_do_not_delay_other_operations() {
    on_both_with(|engine, _, lanes| {
        let scratch = TempDir::new().expect("a directory");
        let volume = Volume::open(scratch.path()).expect("a volume").handle();
        let file = open(&volume, "f");
        write(engine, &file, 0, &[1; 8192]);
        let mut releases = Vec::new();
        for id in 0..64 {
            let (release, come) = channel();
            let frame = Late { come: Mutex::new(come), bytes: vec![2; 10] };
            let operation = Operation::Write {
                change: Passage::wait(Arc::clone(&file)),
                frame: Arc::new(frame),
                range: 0..10,
                offset: 10 * id,
                written: 0,
                durable: true,
            };
            engine.submit(token(file_op(id)), operation);
            releases.push(release);
        }
        engine.submit(token(file_op(100)), read_at(&file, 4096, 4096));
        assert_eq!(next(engine).token, token(file_op(100)));
        write(engine, &file, 8192, b"more");
        let (found, is_found) = channel();
        lanes.queues().submit(Lane::LookUp, Origin::Connection(1), move || found.send(()).expect("heard"));
        is_found.recv_timeout(DEADLINE).expect("a look-up waits for stable storage");
        drop(releases);
        let (mut done, began) = (Vec::new(), Instant::now());
        while done.len() < 64 {
            assert!(began.elapsed() < DEADLINE, "{} of 64 are done", done.len());
            engine.wait(Duration::from_millis(100), &mut done).expect("the engine works");
        }
        assert!(done.iter().all(|completion| completion.result == Ok(())));
    });
}

#[test]
fn more_operations_than_ring_entries_can_be_submitted_at_once() {
    if super::uring::probe().is_err() {
        return;
    }
    const COUNT: usize = 500;
    let lanes = Lanes::start(1).expect("threads");
    let waker = Waker::new().expect("a waker");
    // Space for eight completions.
    let engine = &mut Uring::with_entries(2, waker, lanes.queues().clone()).expect("a ring");
    let scratch = TempDir::new().expect("a directory");
    let volume = Volume::open(scratch.path()).expect("a volume").handle();
    let file = open(&volume, "f");
    write(engine, &file, 0, &[1; 4096]);
    for id in 0..COUNT {
        engine.submit(token(file_op(id as u64)), read_at(&file, 0, 16));
    }
    let (mut done, began) = (Vec::new(), Instant::now());
    while done.len() < COUNT {
        assert!(began.elapsed() < DEADLINE, "{} of {COUNT} are done", done.len());
        engine.wait(Duration::from_millis(100), &mut done).expect("the engine works");
    }
    let mut ids: Vec<_> = done
        .iter()
        .map(|completion| match completion.token.purpose {
            Purpose::File(id, _) => id.0 as usize,
            purpose => panic!("{purpose:?}"),
        })
        .collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..COUNT).collect::<Vec<_>>());
}

#[test]
fn submission_of_a_durable_write_on_xfs_does_not_block() {
    let Some(disk) = Disk::new("submission_of_a_durable_write_on_xfs_does_not_block") else { return };
    on_both(|engine, _| {
        let volume = Volume::open(&disk.path()).expect("a volume").handle();
        let file = open(&volume, engine.name());
        // The blocks exist already, so that this measures the flush of the device and no work of the file system.
        write(engine, &file, 0, &[1; 64 * 4096]);
        rustix::fs::fsync(&*file).expect("synced");
        let (mut submitting, mut all) = (Duration::ZERO, Duration::ZERO);
        for id in 0..32 {
            let operation = Operation::Write {
                change: Passage::wait(Arc::clone(&file)),
                frame: Arc::new(Bytes(vec![2; 4096])),
                range: 0..4096,
                offset: id * 4096,
                written: 0,
                durable: true,
            };
            // If the modification time is already current, the kernel has nothing to hand to another thread.
            write(engine, &file, id * 4096, &[3; 4096]);
            let began = Instant::now();
            engine.submit(token(file_op(id)), operation);
            let mut done = Vec::new();
            engine.wait(Duration::ZERO, &mut done).expect("the engine works");
            submitting += began.elapsed();
            if done.is_empty() {
                done.push(next(engine));
            }
            all += began.elapsed();
            assert_eq!(done[0].result, Ok(()));
        }
        let engine = engine.name();
        assert!(submitting < all / 2, "{engine}: {submitting:?} of {all:?} were spent at the submission");
    });
}
