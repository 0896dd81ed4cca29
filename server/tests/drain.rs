//! The shutdown of a server with busy clients, and how they see the next one.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileExt;

use forebay_proto::admin as api;
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::Header;
use forebay_smb::wire::create::CreateDisposition;
use forebay_smb::wire::negotiate::Dialect;
use support::{Daemon, Place, engines, request, until};

const MIB: usize = 1 << 20;

/// Returns the answers up to the end of the connection, each with message id and status. A reset is a failure.
fn answers(mut stream: TcpStream, each: impl Fn(usize)) -> Vec<(u64, NtStatus)> {
    let mut found = Vec::new();
    loop {
        let mut prefix = [0; 4];
        match support::peek(&stream, &mut prefix) {
            Ok(0) => return found,
            Ok(_) => {}
            Err(error) => panic!("after {} answers: {error}", found.len()),
        }
        stream.read_exact(&mut prefix).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(prefix) as usize];
        stream.read_exact(&mut frame).unwrap();
        let header = Header::parse(&frame).unwrap();
        found.push((header.message_id, header.status));
        each(found.len());
    }
}

#[test]
fn exactly_the_acknowledged_writes_are_done_at_shutdown() {
    /// More than the server can process before the signal arrives.
    const WRITES: usize = 300;
    const IN_FLIGHT: usize = 8;
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let file = client.open("f", CreateDisposition::CREATE).unwrap();
        let stream = client.stream.try_clone().unwrap();
        let (answer, wait) = std::sync::mpsc::sync_channel(WRITES);
        // Some are always in flight, so that the signal arrives when one is half received.
        let writer = std::thread::spawn(move || {
            let mut sent = Vec::new();
            for i in 0..WRITES {
                if i >= IN_FLIGHT && wait.recv().is_err() {
                    break;
                }
                let bytes = vec![i as u8 | 1; MIB];
                match client.try_send_write(file, (i * MIB) as u64, &bytes) {
                    Ok(id) => sent.push(id),
                    Err(_) => break,
                }
            }
            sent
        });
        let answered = answers(stream, |count| {
            if count == 10 {
                daemon.terminate();
            }
            let _ = answer.send(());
        });
        drop(answer);
        let sent = writer.join().unwrap();
        assert_eq!(daemon.wait().code(), Some(0));
        assert!(answered.len() >= 10, "{engine}: {} answers", answered.len());
        assert!(
            answered.len() < WRITES,
            "{engine}: the server was never asked to end while it had something to do"
        );
        assert!(answered.iter().all(|(_, status)| *status == NtStatus::SUCCESS), "{engine}: {answered:?}");
        let data = std::fs::File::open(place.pool().join("volumes/v/f")).unwrap();
        for (i, id) in sent.iter().enumerate() {
            let mut bytes = vec![0; MIB];
            let there = data.read_at(&mut bytes, (i * MIB) as u64).unwrap();
            let done = there > 0 && bytes.iter().any(|byte| *byte != 0);
            let was_answered = answered.iter().any(|(answer, _)| answer == id);
            assert_eq!(done, was_answered, "{engine}: write {i} of {}", sent.len());
            assert!(!done || bytes.iter().all(|byte| *byte == i as u8 | 1), "{engine}: write {i} is torn");
        }
    }
}

#[test]
fn handles_of_an_earlier_start_are_not_reused_and_can_be_flushed() {
    let place = Place::new("auto");
    let mut daemon = place.start();
    daemon.create_volume("v").unwrap();
    let mut client = daemon.mount("v", Dialect::SMB2_1);
    let old = client.open("old", CreateDisposition::CREATE).unwrap();
    assert_eq!(client.write(old, 0, b"written, not flushed"), NtStatus::SUCCESS);
    daemon.terminate();
    assert_eq!(daemon.wait().code(), Some(0));

    let restarted = |change: &dyn Fn()| {
        change();
        let daemon = place.start();
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let new = client.open("new", CreateDisposition::OPEN_IF).unwrap();
        assert_ne!(new, old, "the first open of each start");
        assert_eq!(client.close(old), NtStatus::FILE_CLOSED);
        let unknown = FileId { persistent: old.persistent ^ 0x100, volatile: old.volatile };
        assert_eq!(client.flush(unknown), NtStatus::FILE_CLOSED);
        assert_eq!(client.close(new), NtStatus::SUCCESS);
        // A closed handle of this start is reported as closed.
        assert_eq!(client.flush(new), NtStatus::FILE_CLOSED);
        client.flush(old)
    };
    assert_eq!(restarted(&|| ()), NtStatus::SUCCESS);
    assert_eq!(restarted(&|| ()), NtStatus::SUCCESS, "nor does a second start forget");
    // Data that an earlier boot of the machine had in memory may be lost.
    let starts = place.pool().join(".forebay/starts");
    let other_boot = || {
        // Two slots, each with magic, sequence, length and checksum before the list. The test writes the format of versions
        // before slots.
        let slots = std::fs::read(&starts).unwrap();
        let number = |slot: &&[u8]| u64::from_le_bytes(slot[8..16].try_into().unwrap());
        let newest = slots.chunks(slots.len() / 2).max_by_key(number).unwrap();
        let length = u32::from_le_bytes(newest[16..20].try_into().unwrap()) as usize;
        let text = std::str::from_utf8(&newest[36..36 + length]).unwrap();
        let lines =
            text.lines().map(|line| format!("{} 00000000-another\n", line.split(' ').next().unwrap()));
        std::fs::write(&starts, lines.collect::<String>()).unwrap();
    };
    assert_eq!(restarted(&other_boot), NtStatus::FILE_CLOSED);
}

#[test]
fn io_on_a_handle_of_an_earlier_start_ends_the_connection() {
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let earlier = client.open("earlier", CreateDisposition::CREATE).unwrap();
        daemon.terminate();
        assert_eq!(daemon.wait().code(), Some(0));

        let daemon = place.start();
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let lost = client.open("f", CreateDisposition::CREATE).unwrap();
        let whole = vec![7; MIB];
        assert_eq!(client.write(lost, 0, &whole), NtStatus::SUCCESS);
        drop(client);
        for old in [earlier, lost] {
            for round in 0..forebay_smb::limits::RETURNS_PER_OPEN_MAX {
                let mut client = daemon.mount("v", Dialect::SMB2_1);
                let new = client.open("f", CreateDisposition::OPEN).unwrap();
                let asked = client.send_read(new, 0, MIB as u32);
                if round % 2 == 0 {
                    client.send_read(old, 0, 10);
                } else {
                    client.send_write(old, 0, b"astray");
                }
                // Earlier requests are answered. The connection does not end with a reset, which would overtake the answer.
                assert_eq!(answers(client.stream, |_| ()), [(asked, NtStatus::SUCCESS)], "{engine}");
            }
            // A client that never opens the file again eventually gets an answer.
            let mut client = daemon.mount("v", Dialect::SMB2_1);
            assert_eq!(client.read(old, 0, 10), Err(NtStatus::FILE_CLOSED));
            assert_eq!(client.write(old, 0, b"astray"), NtStatus::FILE_CLOSED);
            for _ in 0..forebay_smb::limits::RETRIES_PER_OPEN_MAX {
                assert_eq!(client.attributes(old), NtStatus::RETRY);
            }
            assert_eq!(client.attributes(old), NtStatus::FILE_CLOSED);
        }
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let new = client.open("f", CreateDisposition::OPEN).unwrap();
        assert!(client.read(new, 0, MIB as u32).unwrap() == whole);
        // A handle that its client closed is reported as closed.
        assert_eq!(client.close(new), NtStatus::SUCCESS);
        assert_eq!(client.read(new, 0, 10), Err(NtStatus::FILE_CLOSED));
        assert_eq!(client.attributes(new), NtStatus::FILE_CLOSED);
    }
}

/// Status and body of a GET.
fn get(place: &Place, path: &str) -> (u16, String) {
    let log = std::fs::read_to_string(place.log()).unwrap();
    let line = log.lines().find(|line| line.contains("\"serving\"") && line.contains("\"http\"")).unwrap();
    let value: serde_json::Value = serde_json::from_str(line).unwrap();
    let address = value["http"].as_str().unwrap().trim_start_matches("Some(").trim_end_matches(')');
    let mut stream = TcpStream::connect(address.parse::<SocketAddr>().unwrap()).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn info(daemon: &mut Daemon) -> api::GetServerInfoResponse {
    daemon
        .admin(async |admin| admin.get_server_info(api::GetServerInfoRequest {}).await)
        .unwrap()
        .into_inner()
}

#[test]
fn drained_server_runs_until_it_is_asked_to_exit() {
    let place = Place::new("auto");
    let mut daemon = place.start();
    daemon.create_volume("v").unwrap();
    let mut client = daemon.mount("v", Dialect::SMB3_1_1);
    let before = info(&mut daemon);
    assert_eq!((before.connections, before.sessions, before.volumes), (1, 1, 1));
    assert!(!before.draining && !before.drained);
    assert_eq!(get(&place, "/readyz"), (200, "ready\n".to_owned()));
    daemon.admin(async |admin| admin.drain(api::DrainRequest { exit: false }).await).unwrap();
    assert!(info(&mut daemon).draining);
    assert!(client.frame().is_none(), "an idle client is disconnected at once");
    drop(client);
    until("the end of draining", || info(&mut daemon).drained.then_some(()));
    assert_eq!(info(&mut daemon).connections, 0);
    assert!(TcpStream::connect(daemon.address()).is_err());
    assert_eq!(get(&place, "/readyz"), (503, "drained\n".to_owned()));
    assert_eq!(get(&place, "/healthz").0, 200);
    assert_eq!(daemon.create(request("w")).unwrap_err().code(), tonic::Code::Unavailable);
    assert!(daemon.child.try_wait().unwrap().is_none());
    daemon.admin(async |admin| admin.drain(api::DrainRequest { exit: true }).await).unwrap();
    assert_eq!(daemon.wait().code(), Some(0));
}

#[test]
fn sigterm_during_draining_ends_the_server_with_exit_code_0() {
    let place = Place::new("auto");
    let mut daemon = place.start();
    daemon.create_volume("v").unwrap();
    let _client = daemon.mount("v", Dialect::SMB2_1);
    // A client that does not disconnect keeps the server draining for a while.
    daemon.admin(async |admin| admin.drain(api::DrainRequest { exit: false }).await).unwrap();
    daemon.terminate();
    assert_eq!(daemon.wait().code(), Some(0));
}

#[test]
fn problems_of_a_serving_server_are_reported_as_degraded() {
    let place = Place::new("auto");
    let mut daemon = place.start();
    daemon.create_volume("v").unwrap();
    daemon.kill();
    std::fs::write(place.pool().join(".forebay/volumes/v.json"), "torn").unwrap();
    let config = std::fs::read_to_string(place.config()).unwrap();
    std::fs::write(place.config(), config.replace("[admin]", "advertise = [\"240.1.2.0/24\"]\n[admin]"))
        .unwrap();
    let mut daemon = place.start();
    let info = info(&mut daemon);
    assert_eq!((info.volumes, info.volumes_unserved), (0, 1));
    assert!(info.advertised_addresses.is_empty());
    assert_eq!(info.problems.len(), 2, "{:?}", info.problems);
    let (status, body) = get(&place, "/readyz");
    assert_eq!(status, 200);
    assert!(
        body.starts_with("degraded\n")
            && body.contains("volume v of pool p")
            && body.contains("240.1.2.0/24"),
        "{body}"
    );
}
