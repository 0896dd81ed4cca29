//! Clients that take what they can get of the server's memory, and what others notice of them.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::io::Write;
use std::time::Instant;

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, OplockLevel};
use forebay_smb::wire::negotiate::Dialect;
use forebay_smb::wire::oplock_break::{self, OplockBreak};
use forebay_smb::wire::{Command as Smb, Header};
use support::{Client, Daemon, Place, peek, until};

const MIB: usize = 1 << 20;
/// `server.memory`.
const MEMORY: usize = 64 * MIB;
/// What a server needs besides: documented in docs/server.md, more here because it is built without optimisation.
const BESIDES: usize = 160 * MIB;

fn place(event_loops: usize, more: &str) -> Place {
    let place = Place::new("auto");
    let text = std::fs::read_to_string(place.config()).unwrap();
    let text = text
        .replace("event_loops = 2", &format!("event_loops = {event_loops}"))
        .replace("[admin]", &format!("memory = \"{MEMORY}\"\n{more}\n[admin]"));
    std::fs::write(place.config(), text).unwrap();
    place
}

/// The most memory that the server had at any time, in bytes.
fn peak(daemon: &Daemon) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// Does all kinds of things, each of which must succeed.
fn works(client: &mut Client, name: &str) {
    let data: Vec<u8> = (0..4 * MIB).map(|i| (i % 251) as u8).collect();
    let file = client.open(name, CreateDisposition::OPEN_IF).unwrap();
    assert_eq!(client.write(file, 0, &data), NtStatus::SUCCESS);
    assert!(client.read(file, 0, data.len() as u32).unwrap() == data);
    assert_eq!(client.attributes(file), NtStatus::SUCCESS);
    assert_eq!(client.close(file), NtStatus::SUCCESS);
}

/// Statuses of an answer to a compound of two.
fn both(frame: &[u8]) -> [NtStatus; 2] {
    let first = Header::parse(frame).unwrap();
    let second = Header::parse(&frame[first.next_command as usize..]).unwrap();
    [first.status, second.status]
}

#[test]
fn compounds_that_wait_for_a_break_hold_back_their_client_and_nobody_else() {
    const COMPOUNDS: usize = 10;
    // With as many loops as this a loop's share of the memory was 7 such frames: the eighth ended the connection.
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
    // Some wait for the break, some are refused since others of the connection wait, and some wait for memory.
    let waits = hostile[0].frame().expect("the server does not end the connection");
    assert_eq!(Header::parse(&waits).unwrap().status, NtStatus::PENDING);
    senders.extend(hostile[1..].iter_mut().map(send));
    let mut calm = daemon.mount("calm", Dialect::SMB3_1_1);
    works(&mut calm, "f");
    // Another connection of the same user gets along with what is reserved for each.
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
    let peak = peak(&daemon);
    assert!(peak < MEMORY + BESIDES, "{} MiB", peak / MIB);
}

/// OPLOCK_BREAK acknowledgment to no oplock at all.
fn acknowledge(file_id: FileId, body: &mut Vec<u8>) {
    oplock_break::Request::Oplock(OplockBreak { oplock_level: OplockLevel::NONE, file_id }).encode(body);
}

#[test]
fn frames_that_never_end_cost_others_nothing_and_end_their_connection() {
    const HOSTILE: usize = 20;
    // One loop: all are neighbours.
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
    // Those that had no memory had nothing begun; they get it in their turn, and time with it.
    for client in &mut hostile[1..] {
        client.stream.set_nonblocking(false).unwrap();
        assert!(client.frame().is_none(), "it ends, too");
    }
    works(&mut calm, "f");
    works(&mut idle, "g");
    let peak = peak(&daemon);
    assert!(peak < MEMORY + BESIDES, "{} MiB", peak / MIB);
}

#[test]
fn a_peer_that_takes_no_answer_is_ended_and_others_go_on() {
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
            // More than the buffers of both sockets take.
            for _ in 0..8 {
                client.send_read(file, 0, 4 * MIB as u32);
            }
            client
        })
        .collect();
    let log = place.log();
    let watcher = std::thread::spawn(move || {
        until("the end of all that stall", || {
            let log = std::fs::read_to_string(&log).unwrap();
            (log.matches("the peer takes no data").count() == 8).then_some(())
        });
    });
    while !watcher.is_finished() {
        works(&mut calm, "f");
    }
    watcher.join().unwrap();
    // What was sent before comes, and then the end.
    for client in &mut stalled {
        while client.frame().is_some() {}
    }
    works(&mut calm, "f");
    let peak = peak(&daemon);
    assert!(peak < MEMORY + BESIDES, "{} MiB", peak / MIB);
}
