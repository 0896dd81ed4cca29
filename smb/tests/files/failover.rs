//! Opens of a session with several channels: they belong to the session, regardless of which channels come and go.

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::fsctl::FsctlCode;
use forebay_smb::wire::lock::{self, LockElement, LockFlags};
use forebay_smb::wire::{Command, create};

use crate::calls::{
    EXCLUSIVE, Lab, NOW_OR_NEVER, UNLOCK, close, file, fsctl, lock, lock_waits, query_file, read, set_file,
    success, write, write_body,
};
use crate::support::Client;

const NOW: LockFlags = EXCLUSIVE.union(NOW_OR_NEVER);
const POSITION: FileInformationClass = FileInformationClass::FILE_POSITION_INFORMATION;

/// A LOCK that may be sent twice ([MS-SMB2] 2.2.26).
fn numbered_lock(client: &mut Client, file_id: FileId, number: u32, index: u32) -> Result<(), NtStatus> {
    let mut body = Vec::new();
    lock::Request {
        lock_sequence: index << 4 | number,
        file_id,
        locks: vec![LockElement { offset: 0, length: 1, flags: NOW }],
    }
    .encode(&mut body);
    success(&client.call(Command::LOCK, &body).unwrap())
}

fn write_in_flight(client: &mut Client, file_id: FileId, data: &[u8]) -> forebay_smb::fs::FsOp {
    client.begin(Command::WRITE, &write_body(file_id, 0, data))
}

#[test]
fn an_open_is_usable_on_every_channel_of_its_session() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let f = file("f").id(&mut a);
    write(&mut b, f, 0, b"over the second").unwrap();
    assert_eq!(read(&mut a, f, 0, 64).unwrap(), b"over the second");
    lock(&mut a, f, &[(0, 1, NOW)]).unwrap();
    lock(&mut b, f, &[(0, 1, UNLOCK)]).unwrap();
    close(&mut b, f).unwrap();
    assert_eq!(read(&mut a, f, 0, 64), Err(NtStatus::FILE_CLOSED));
    let (f, g) = (file("f").id(&mut a), file("g").id(&mut b));
    let answer = b.call(Command::TREE_DISCONNECT, &[4, 0, 0, 0]).unwrap();
    assert_eq!(answer.status(), NtStatus::SUCCESS);
    for id in [f, g] {
        assert_eq!(read(&mut a, id, 0, 64), Err(NtStatus::NETWORK_NAME_DELETED));
    }
    assert!(lab.server.open_infos(None).is_empty());
}

#[test]
fn opens_locks_and_requests_in_flight_survive_a_lost_channel() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let mut other = lab.client();
    let f = file("f").id(&mut a);
    let theirs = file("f").id(&mut other);
    lock(&mut a, f, &[(100, 1, NOW)]).unwrap();
    let op = write_in_flight(&mut a, f, b"written");
    a.disconnect();
    assert!(!a.connection.is_finished(), "the backend is still working");
    a.finish(op);
    assert!(a.connection.is_finished());
    assert_eq!(read(&mut b, f, 0, 64).unwrap(), b"written");
    assert_eq!(lock(&mut other, theirs, &[(100, 1, NOW)]), Err(NtStatus::LOCK_NOT_GRANTED));
    assert_eq!(lab.server.open_infos(None).len(), 2);
    lab.memory.take_log();
    b.disconnect();
    assert_eq!(lab.memory.take_log(), ["close"], "with the last channel");
    lock(&mut other, theirs, &[(100, 1, NOW)]).unwrap();
}

#[test]
fn a_create_with_a_lost_answer_leaves_nothing_open() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let made = a.begin(Command::CREATE, &file("made").body());
    a.disconnect();
    a.finish(made);
    assert!(lab.server.open_infos(None).is_empty());
    assert_eq!(lab.memory.contents("made"), None, "a retry creates it again");
    let new = file("made").disposition(create::CreateDisposition::CREATE);
    let id = new.id(&mut b);
    // Another client has opened the created file: it stays.
    let mut c = lab.channel(&b);
    let opened = c.begin(Command::CREATE, &file("found").body());
    let found = file("found").id(&mut b);
    c.disconnect();
    c.finish(opened);
    close(&mut b, found).unwrap();
    close(&mut b, id).unwrap();
    assert!(lab.memory.contents("found").is_some());
}

#[test]
fn waiting_requests_are_answered_on_their_channel_and_end_with_it() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let mut other = lab.client();
    let (f, theirs) = (file("f").id(&mut a), file("f").id(&mut other));
    lock(&mut other, theirs, &[(0, 1, NOW)]).unwrap();
    // One LOCK waits on each channel; the first channel is lost.
    lock_waits(&mut a, f, (0, 1, EXCLUSIVE));
    lock_waits(&mut b, f, (0, 1, EXCLUSIVE));
    a.disconnect();
    lock(&mut other, theirs, &[(0, 1, UNLOCK)]).unwrap();
    lab.deliver(&mut [&mut a, &mut b, &mut other]);
    assert_eq!(b.answers.pop_front().expect("an answer").status(), NtStatus::SUCCESS);
    assert!(a.answers.is_empty());
    lock(&mut b, f, &[(0, 1, UNLOCK)]).unwrap();
    lock(&mut other, theirs, &[(0, 1, NOW)]).unwrap();
}

#[test]
fn logoff_answers_requests_that_wait_on_other_channels() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let mut other = lab.client();
    let (f, theirs) = (file("f").id(&mut a), file("f").id(&mut other));
    lock(&mut other, theirs, &[(100, 1, NOW)]).unwrap();
    lock_waits(&mut b, f, (100, 1, EXCLUSIVE));
    let op = write_in_flight(&mut b, f, b"late");
    assert_eq!(a.call(Command::LOGOFF, &[4, 0, 0, 0]).unwrap().status(), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut a, &mut b, &mut other]);
    assert_eq!(b.answers.pop_front().expect("an answer").status(), NtStatus::RANGE_NOT_LOCKED);
    b.finish(op);
    assert_eq!(b.answers.pop_front().expect("an answer").status(), NtStatus::SUCCESS);
    assert_eq!(lab.server.open_infos(None).len(), 1);
}

#[test]
fn modifying_requests_with_an_old_channel_sequence_are_refused() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let f = file("f").id(&mut a);
    let position = |buffer: &mut Vec<u8>| buffer.extend_from_slice(&7_u64.to_le_bytes());
    b.channel_sequence = 1;
    write(&mut b, f, 0, b"new").unwrap();
    for replay in [false, true] {
        a.replay = replay;
        let stale = Err(NtStatus::FILE_NOT_AVAILABLE);
        assert_eq!(write(&mut a, f, 0, b"old").map(|_| ()), stale);
        assert_eq!(set_file(&mut a, f, POSITION, position), stale);
        let (control, _) = fsctl(&mut a, f, FsctlCode::CREATE_OR_GET_OBJECT_ID, &[], 64);
        assert_eq!(control, NtStatus::FILE_NOT_AVAILABLE);
        assert_eq!(read(&mut a, f, 0, 64).unwrap(), b"new", "reads are not refused");
        query_file(&mut a, f, POSITION, 64).unwrap();
        lock(&mut a, f, &[(0, 1, NOW), (1, 1, NOW)]).unwrap();
        lock(&mut a, f, &[(0, 1, UNLOCK), (1, 1, UNLOCK)]).unwrap();
    }
    (a.channel_sequence, a.replay) = (1, false);
    write(&mut a, f, 0, b"NEW").unwrap();
    set_file(&mut a, f, POSITION, position).unwrap();
    close(&mut a, f).unwrap();
    // Dialects without this field contain zeros or arbitrary values in its place.
    let mut old = lab.dialect(forebay_smb::wire::Dialect::SMB2_1);
    let f = file("f").id(&mut old);
    old.channel_sequence = 0x9000;
    write(&mut old, f, 0, b"2.1").unwrap();
}

#[test]
fn a_replayed_write_is_refused_while_the_original_is_in_flight() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let f = file("f").id(&mut a);
    let op = write_in_flight(&mut a, f, b"once");
    a.disconnect();
    (b.channel_sequence, b.replay) = (1, true);
    assert_eq!(write(&mut b, f, 0, b"once"), Err(NtStatus::FILE_NOT_AVAILABLE));
    a.finish(op);
    write(&mut b, f, 0, b"once").unwrap();
    b.replay = false;
    write(&mut b, f, 0, b"then").unwrap();
    assert_eq!(lab.memory.contents("f").unwrap(), b"then");
}

#[test]
fn an_open_starts_with_the_channel_sequence_of_its_create() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    a.channel_sequence = 0x9000;
    let f = file("f").id(&mut a);
    write(&mut a, f, 0, b"x").unwrap();
}

#[test]
fn a_replayed_lock_is_granted_once() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let f = file("f").id(&mut a);
    numbered_lock(&mut a, f, 3, 64).unwrap();
    a.disconnect();
    b.replay = true;
    numbered_lock(&mut b, f, 3, 64).unwrap();
    assert_eq!(numbered_lock(&mut b, f, 4, 64), Err(NtStatus::LOCK_NOT_GRANTED), "another lock");
    assert_eq!(numbered_lock(&mut b, f, 3, 64), Err(NtStatus::LOCK_NOT_GRANTED), "the index was reused");
    assert_eq!(numbered_lock(&mut b, f, 3, 65), Err(NtStatus::LOCK_NOT_GRANTED), "no such index");
    lock(&mut b, f, &[(0, 1, UNLOCK)]).unwrap();
    assert_eq!(lock(&mut b, f, &[(0, 1, UNLOCK)]), Err(NtStatus::RANGE_NOT_LOCKED), "only one was granted");
    // If only one channel is possible, no request is sent twice.
    let mut single = Client::new(&lab.server, 50, crate::calls::NEWEST);
    single.capabilities = forebay_smb::wire::Capabilities::LARGE_MTU;
    single.backend = lab.memory.backend();
    single.negotiate().unwrap();
    single.logon("vol-user", "vol-secret", 0).unwrap();
    single.tree_connect("vol").unwrap();
    let f = file("g").id(&mut single);
    numbered_lock(&mut single, f, 3, 1).unwrap();
    assert_eq!(numbered_lock(&mut single, f, 3, 1), Err(NtStatus::LOCK_NOT_GRANTED));
}
