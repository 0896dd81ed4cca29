//! Clients that take as much of the server's memory as they can, and the effect on others.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::collections::HashSet;
use std::io::Write;
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_smb::ids::FileId;
use forebay_smb::limits::{ASYNC_PER_CONNECTION_MAX, IO_BYTES_MAX};
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, OplockLevel};
use forebay_smb::wire::negotiate::Dialect;
use forebay_smb::wire::oplock_break::{self, OplockBreak};
use forebay_smb::wire::query_directory::Flags;
use forebay_smb::wire::{Command as Smb, Header};
use support::{Client, Daemon, Place, peek, until};

const MIB: usize = 1 << 20;
/// `server.memory`.
const MEMORY: usize = 64 * MIB;
/// Additional memory of a server (docs/reference/server.md, Memory): a fixed amount, and an amount for each connection.
const BESIDES: usize = 100 * MIB;
const BESIDES_PER_CONNECTION: usize = 128 << 10;

/// Each test keeps the machine busy and checks how other clients fare in the meantime, so only one runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn place(event_loops: usize, more: &str) -> Place {
    let place = Place::new("auto");
    let text = std::fs::read_to_string(place.config()).unwrap();
    let text = text
        .replace("event_loops = 2", &format!("event_loops = {event_loops}"))
        .replace("[admin]", &format!("memory = \"{MEMORY}\"\n{more}\n[admin]"));
    std::fs::write(place.config(), text).unwrap();
    place
}

/// The server's peak memory, in bytes.
fn peak(daemon: &Daemon) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// Asserts that the server's peak memory stayed within the limit that docs/reference/server.md states for this number of
/// connections.
#[track_caller]
fn is_within_its_memory(daemon: &Daemon, connections: usize) {
    let (peak, most) = (peak(daemon), MEMORY + BESIDES + connections * BESIDES_PER_CONNECTION);
    println!("{} MiB resident at most, and {} MiB are stated", peak / MIB, most / MIB);
    assert!(peak < most, "{} MiB, and {} MiB are stated", peak / MIB, most / MIB);
}

/// Does various operations, each of which must succeed.
fn works(client: &mut Client, name: &str) {
    let data: Vec<u8> = (0..4 * MIB).map(|i| (i % 251) as u8).collect();
    let file = client.open(name, CreateDisposition::OPEN_IF).unwrap();
    assert_eq!(client.write(file, 0, &data), NtStatus::SUCCESS);
    assert!(client.read(file, 0, data.len() as u32).unwrap() == data);
    assert_eq!(client.attributes(file), NtStatus::SUCCESS);
    assert_eq!(client.close(file), NtStatus::SUCCESS);
}

/// The two statuses in the answer to a compound of two.
fn both(frame: &[u8]) -> [NtStatus; 2] {
    let first = Header::parse(frame).unwrap();
    let second = Header::parse(&frame[first.next_command as usize..]).unwrap();
    [first.status, second.status]
}

#[test]
fn compounds_waiting_for_a_break_delay_only_their_own_client() {
    let _alone = alone();
    const COMPOUNDS: usize = 10;
    // With this many loops, a loop's share of the memory was 7 such frames: the eighth ended the connection.
    let place = place(64, "");
    let mut daemon = place.start();
    daemon.create_volume("hostile").unwrap();
    daemon.create_volume("calm").unwrap();
    let mut holder = daemon.mount("hostile", Dialect::SMB2_1);
    let held = holder.open_with("f", CreateDisposition::CREATE, OplockLevel::BATCH).unwrap();

    let mut hostile: Vec<Client> = (0..4).map(|_| daemon.mount("hostile", Dialect::SMB2_1)).collect();
    let send = |client: &mut Client| {
        let mut stream = client.stream.try_clone().unwrap();
        let frames: Vec<Vec<u8>> =
            (0..COMPOUNDS).map(|_| client.create_and_write_frame("f", 4 * MIB as u32)).collect();
        std::thread::spawn(move || {
            let data = vec![7; 4 * MIB];
            for frame in frames {
                stream.write_all(&frame)?;
                stream.write_all(&data)?;
            }
            std::io::Result::Ok(())
        })
    };
    let mut senders = vec![send(&mut hostile[0])];
    let notice = holder.frame().expect("the break");
    assert_eq!(Header::parse(&notice).unwrap().command, Smb::OPLOCK_BREAK);
    // Some wait for the break, some are refused because others of the connection wait, and some wait for memory.
    let waits = hostile[0].frame().expect("the server does not end the connection");
    assert_eq!(Header::parse(&waits).unwrap().status, NtStatus::PENDING);
    senders.extend(hostile[1..].iter_mut().map(send));
    let mut calm = daemon.mount("calm", Dialect::SMB3_1_1);
    works(&mut calm, "f");
    // Another connection of the same user works with the memory that is reserved for each connection.
    let mut other = daemon.mount("hostile", Dialect::SMB2_1);
    let file = other.open("g", CreateDisposition::CREATE).unwrap();
    assert_eq!(other.write(file, 0, b"small"), NtStatus::SUCCESS);
    assert_eq!(other.read(file, 0, 10).unwrap(), b"small");

    let mut body = Vec::new();
    acknowledge(held, &mut body);
    assert_eq!(holder.call(Smb::OPLOCK_BREAK, &body).status(), NtStatus::SUCCESS);
    for client in &mut hostile {
        let mut succeeded = 0;
        let mut done = 0;
        while done < COMPOUNDS {
            let frame = client.frame().expect("the server does not end the connection");
            if Header::parse(&frame).unwrap().status == NtStatus::PENDING {
                continue;
            }
            match both(&frame) {
                [NtStatus::SUCCESS, NtStatus::SUCCESS] => succeeded += 1,
                statuses => assert_eq!(statuses, [NtStatus::INSUFFICIENT_RESOURCES; 2]),
            }
            done += 1;
        }
        assert!(succeeded > 0);
    }
    for sender in senders {
        sender.join().unwrap().unwrap();
    }
    works(&mut other, "h");
    is_within_its_memory(&daemon, 8);
}

/// An OPLOCK_BREAK acknowledgment for an oplock that does not exist.
fn acknowledge(file_id: FileId, body: &mut Vec<u8>) {
    oplock_break::Request::Oplock(OplockBreak { oplock_level: OplockLevel::NONE, file_id }).encode(body);
}

#[test]
fn incomplete_frames_end_their_connection_and_delay_no_other_client() {
    let _alone = alone();
    // More than the memory allows.
    const HOSTILE: usize = 12;
    // One loop, so that all clients share it.
    let place = place(1, "stall_timeout_s = 3");
    let mut daemon = place.start();
    daemon.create_volume("hostile").unwrap();
    daemon.create_volume("calm").unwrap();
    let mut calm = daemon.mount("calm", Dialect::SMB2_1);
    let mut idle = daemon.mount("hostile", Dialect::SMB2_1);
    let began = Instant::now();
    let mut hostile: Vec<Client> = (0..HOSTILE)
        .map(|_| {
            let mut client = daemon.mount("hostile", Dialect::SMB2_1);
            let file = client.open("f", CreateDisposition::OPEN_IF).unwrap();
            let frame = client.write_frame(file, 0, 8 * MIB as u32);
            client.stream.write_all(&frame).unwrap();
            client.stream.write_all(&[7; 1000]).unwrap();
            client
        })
        .collect();
    let mut rounds = 0;
    let ended = until("the end of a frame's time", || {
        works(&mut calm, "f");
        rounds += 1;
        hostile[0].stream.set_nonblocking(true).unwrap();
        let ended = matches!(peek(&hostile[0].stream, &mut [0; 4]), Ok(0));
        ended.then(|| began.elapsed())
    });
    assert!(ended.as_secs() >= 3, "{ended:?}");
    assert!(rounds > 1);
    let log = std::fs::read_to_string(place.log()).unwrap();
    assert!(log.contains("the peer does not send the rest of a frame"), "{log}");
    // The server had no memory for the others, so it had not started to receive their frames. They get it in turn, each with
    // its own timeout.
    for client in &mut hostile[1..] {
        client.stream.set_nonblocking(false).unwrap();
        assert!(client.frame().is_none(), "this connection ends, too");
    }
    works(&mut calm, "f");
    works(&mut idle, "g");
    is_within_its_memory(&daemon, HOSTILE + 2);
}

#[test]
fn peer_that_reads_no_responses_is_disconnected_and_delays_no_other() {
    let _alone = alone();
    let place = place(2, "stall_timeout_s = 2");
    let mut daemon = place.start();
    daemon.create_volume("hostile").unwrap();
    daemon.create_volume("calm").unwrap();
    let mut calm = daemon.mount("calm", Dialect::SMB2_1);
    let mut stalled: Vec<Client> = (0..8)
        .map(|i| {
            let mut client = daemon.mount("hostile", Dialect::SMB2_1);
            let file = client.open(&format!("f{i}"), CreateDisposition::CREATE).unwrap();
            assert_eq!(client.write(file, 0, &vec![1; 4 * MIB]), NtStatus::SUCCESS);
            // More than the buffers of both sockets can hold.
            for _ in 0..8 {
                client.send_read(file, 0, 4 * MIB as u32);
            }
            client
        })
        .collect();
    let log = place.log();
    let watcher = std::thread::spawn(move || {
        until("the end of all stalled connections", || {
            let log = std::fs::read_to_string(&log).unwrap();
            (log.matches("the peer takes no data").count() == 8).then_some(())
        });
    });
    while !watcher.is_finished() {
        works(&mut calm, "f");
    }
    watcher.join().unwrap();
    // The data that was sent before arrives, and then the connection ends.
    for client in &mut stalled {
        while client.frame().is_some() {}
    }
    works(&mut calm, "f");
    is_within_its_memory(&daemon, 9);
}

/// The credits that a client has left, shared by its sending and its receiving thread.
#[derive(Default)]
struct Credits {
    left: Mutex<u64>,
    more: Condvar,
}

impl Credits {
    fn give(&self, credits: u64) {
        *self.left.lock().unwrap() += credits;
        self.more.notify_one();
    }

    fn take(&self, credits: u64) {
        let left = self.left.lock().unwrap();
        *self.more.wait_while(left, |left| *left < credits).unwrap() -= credits;
    }
}

/// The outcomes of one client's compounds.
#[derive(Debug, Default, Clone, Copy)]
struct Became {
    /// They have received an interim response.
    waits: usize,
    succeeded: usize,
    /// Refused with STATUS_INSUFFICIENT_RESOURCES.
    refused: usize,
}

/// A client that sends compounds of CREATE and WRITE as fast as its credits allow, while another thread receives its answers.
struct Flood {
    became: Arc<Mutex<Became>>,
    threads: [JoinHandle<()>; 2],
}

impl Flood {
    fn begin(mut client: Client, compounds: usize, bytes: u32) -> Self {
        let credits = Arc::new(Credits::default());
        credits.give(client.rich());
        let frames: Vec<Vec<u8>> =
            (0..compounds).map(|_| client.create_and_write_frame("f", bytes)).collect();
        let (mut stream, mine) = (client.stream.try_clone().unwrap(), Arc::clone(&credits));
        let sender = std::thread::spawn(move || {
            let data = vec![7; bytes as usize];
            for frame in frames {
                mine.take(1 + u64::from(bytes.div_ceil(65536)));
                stream.write_all(&frame).expect("the server does not end the connection");
                stream.write_all(&data).expect("the server does not end the connection");
            }
        });
        let became = Arc::<Mutex<Became>>::default();
        let counted = Arc::clone(&became);
        let receiver = std::thread::spawn(move || {
            loop {
                let frame = client.frame().expect("the server does not end the connection");
                let first = Header::parse(&frame).unwrap();
                credits.give(first.credits.into());
                let mut became = counted.lock().unwrap();
                if first.status == NtStatus::PENDING {
                    became.waits += 1;
                    continue;
                }
                credits.give(Header::parse(&frame[first.next_command as usize..]).unwrap().credits.into());
                match both(&frame) {
                    [NtStatus::SUCCESS, NtStatus::SUCCESS] => became.succeeded += 1,
                    statuses => {
                        assert_eq!(statuses, [NtStatus::INSUFFICIENT_RESOURCES; 2]);
                        became.refused += 1;
                    }
                }
                if became.succeeded + became.refused == compounds {
                    return;
                }
            }
        });
        Self { became, threads: [sender, receiver] }
    }

    fn became(&self) -> Became {
        *self.became.lock().unwrap()
    }

    fn end(self) -> Became {
        for thread in self.threads {
            thread.join().unwrap();
        }
        *self.became.lock().unwrap()
    }
}

/// protocol.md 4: the maximum number of waiting compounds of the maximum size that a client may have.
#[test]
fn compounds_up_to_the_limits_do_not_affect_other_clients() {
    let _alone = alone();
    const COMPOUNDS: usize = ASYNC_PER_CONNECTION_MAX;
    const MORE: usize = 9;
    let place = place(64, "");
    let mut daemon = place.start();
    daemon.create_volume("hostile").unwrap();
    daemon.create_volume("calm").unwrap();
    let mut holder = daemon.mount("hostile", Dialect::SMB2_1);
    let held = holder.open_with("f", CreateDisposition::CREATE, OplockLevel::BATCH).unwrap();
    let mut calm = daemon.mount("calm", Dialect::SMB3_1_1);
    let large = Flood::begin(daemon.mount("hostile", Dialect::SMB2_1), COMPOUNDS, IO_BYTES_MAX);
    let small = Flood::begin(daemon.mount("hostile", Dialect::SMB2_1), COMPOUNDS + MORE, 4096);
    let notice = holder.frame().expect("the break");
    assert_eq!(Header::parse(&notice).unwrap().command, Smb::OPLOCK_BREAK);
    let mut rounds = 0;
    until("all compounds that the limits admit", || {
        works(&mut calm, "f");
        is_within_its_memory(&daemon, 4);
        rounds += 1;
        let (large, small) = (large.became(), small.became());
        let is_done = large.waits + large.refused == COMPOUNDS && small.waits + small.refused >= COMPOUNDS;
        is_done.then_some(())
    });
    assert!(rounds > 1);
    // One of the largest waits, and as many of the smaller ones as allowed.
    assert_eq!((large.became().waits, small.became().waits), (1, COMPOUNDS));
    // Additional ones of the largest size take the rest of the user's share and wait for it.
    let more: Vec<Flood> =
        (0..4).map(|_| Flood::begin(daemon.mount("hostile", Dialect::SMB2_1), 4, IO_BYTES_MAX)).collect();
    for _ in 0..3 {
        works(&mut calm, "f");
    }
    let mut body = Vec::new();
    acknowledge(held, &mut body);
    assert_eq!(holder.call(Smb::OPLOCK_BREAK, &body).status(), NtStatus::SUCCESS);
    let (large, small) = (large.end(), small.end());
    assert_eq!((large.succeeded, large.refused), (1, COMPOUNDS - 1));
    assert_eq!((small.succeeded, small.refused), (COMPOUNDS, MORE));
    for flood in more {
        assert!(flood.end().succeeded > 0);
    }
    works(&mut calm, "f");
    works(&mut holder, "g");
    is_within_its_memory(&daemon, 8);
}

/// Processor time that the server has used, in kernel ticks (10 ms).
fn ticks(daemon: &Daemon) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.child.id())).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Unread bytes in the client's socket.
fn unread(stream: &TcpStream) -> u64 {
    rustix::io::ioctl_fionread(stream).unwrap()
}

/// protocol.md 4: 64 QUERY_DIRECTORY of 8 MiB on each connection, with answers that are not read.
#[test]
fn unread_listings_do_not_affect_other_clients() {
    let _alone = alone();
    const HOSTILE: usize = 32;
    const LISTINGS: usize = 64;
    const DIRECTORIES: usize = 8;
    // Names so long that all of them exceed the longest answer.
    const NAMES: usize = 13_700;
    let place = place(4, "");
    let mut daemon = place.start();
    daemon.create_volume("hostile").unwrap();
    daemon.create_volume("calm").unwrap();
    let directory = place.pool().join("volumes/hostile/d");
    std::fs::create_dir(&directory).unwrap();
    let all: HashSet<String> = (0..NAMES).map(|i| format!("{i:0>255}")).collect();
    for name in &all {
        std::fs::File::create(directory.join(name)).unwrap();
    }
    let mut calm = daemon.mount("calm", Dialect::SMB3_1_1);
    let mut other = daemon.mount("hostile", Dialect::SMB3_1_1);
    works(&mut calm, "f");
    let hostile: Vec<Client> = (0..HOSTILE)
        .map(|i| {
            // Sealed answers are stored in buffers, others in the protocol's memory.
            let dialect = if i % 2 == 0 { Dialect::SMB2_1 } else { Dialect::SMB3_1_1 };
            let mut client = daemon.mount("hostile", dialect);
            let opens: Vec<FileId> =
                (0..DIRECTORIES).map(|_| client.open("d", CreateDisposition::OPEN).unwrap()).collect();
            client.rich();
            for listing in 0..LISTINGS {
                client.send_list(opens[listing % DIRECTORIES], Flags::RESTART_SCANS, IO_BYTES_MAX);
            }
            client
        })
        .collect();
    let connections = HOSTILE + 2;
    until("the server to have nothing more to do", || {
        works(&mut calm, "f");
        is_within_its_memory(&daemon, connections);
        let used = ticks(&daemon);
        std::thread::park_timeout(Duration::from_millis(300));
        let is_idle = ticks(&daemon) - used < 3;
        (is_idle && hostile.iter().all(|client| unread(&client.stream) > 0)).then_some(())
    });
    // Another client of the volume gets shorter answers, but still finds every name once.
    let list = |client: &mut Client| {
        let open = client.open("d", CreateDisposition::OPEN).unwrap();
        let mut answers = Vec::new();
        while let Some(names) = client.list(open, Flags::empty(), IO_BYTES_MAX).unwrap() {
            answers.push(names);
        }
        assert_eq!(client.close(open), NtStatus::SUCCESS);
        let found = || answers.iter().flatten().filter(|name| !name.starts_with('.'));
        assert!(found().count() == NAMES && found().all(|name| all.contains(name)));
        answers.len()
    };
    assert!(list(&mut other) > 2);
    works(&mut calm, "f");
    works(&mut other, "f");
    is_within_its_memory(&daemon, connections);
    drop(hostile);
    until("the memory of the closed connections", || (list(&mut other) == 2).then_some(()));
    is_within_its_memory(&daemon, connections);
}
