//! Limits on the server memory that one client can occupy, so that others have room.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_smb::fs::{Frame, FsHandle};
use forebay_smb::ids::FileId;
use forebay_smb::limits::{
    IO_BYTES_MAX, PARKED_BYTES_PER_CONNECTION_MAX, PARKED_BYTES_PER_VOLUME_MAX,
    PINNED_BYTES_PER_CONNECTION_MAX,
};
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create_context::{Lease, LeaseFlags, LeaseState, RequestContext};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::oplock_break::{LeaseBreakAcknowledgment, Request as Acknowledge};
use forebay_smb::wire::{AccessMask, Command, HeaderFlags, create, query_directory};

use crate::calls::{
    EXCLUSIVE, Lab, NEWEST, close, directory, file, lock, lock_body, read_body, success, write, write_body,
};
use crate::support::{Bytes, Client, volume};

const KEY: [u8; 16] = [7; 16];
const RELATED: FileId = FileId { persistent: u64::MAX, volatile: u64::MAX };

/// A frame that is counted while it is in memory.
struct Counted {
    bytes: Vec<u8>,
    live: Arc<AtomicU64>,
}

impl Counted {
    fn new(bytes: Vec<u8>, live: &Arc<AtomicU64>) -> Self {
        live.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Self { bytes, live: Arc::clone(live) }
    }
}

impl Frame for Counted {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.live.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
    }
}

/// Has the server grant `client` all the credits there are.
fn request_all_credits(client: &mut Client) {
    let mut header = client.header(Command::ECHO, 1);
    header.credits = u16::MAX;
    let message = client.message(header, &[4, 0, 0, 0]);
    client.send_raw(message).unwrap();
    success(&client.answers.pop_front().unwrap()).unwrap();
}

/// [CREATE, WRITE of `length` zeros], related.
fn create_and_write(client: &mut Client, name: &str, length: u32) -> Vec<u8> {
    let mut header = client.header(Command::CREATE, 1);
    header.credits = u16::MAX;
    let mut frame = client.message(header, &file(name).body());
    frame.resize(frame.len().next_multiple_of(8), 0);
    let next = frame.len() as u32;
    frame[20..24].copy_from_slice(&next.to_le_bytes());
    let mut header = client.header(Command::WRITE, length.div_ceil(65_536) as u16);
    header.flags.insert(HeaderFlags::RELATED_OPERATIONS);
    header.credits = u16::MAX;
    let mut body = write_body(RELATED, 0, &[0; 8]);
    body[4..8].copy_from_slice(&length.to_le_bytes());
    let write = client.message(header, &body[..48]);
    // Zeros from the allocator: their pages are never touched.
    let mut whole = vec![0; frame.len() + write.len() + length as usize];
    whole[..frame.len()].copy_from_slice(&frame);
    whole[frame.len()..][..write.len()].copy_from_slice(&write);
    whole
}

/// Hands a frame to the server as a transport does: not while the client occupies too much. Returns whether the server took it.
fn receive(client: &mut Client, frame: impl FnOnce(&mut Client) -> Vec<u8>, live: &Arc<AtomicU64>) -> bool {
    if client.connection.pinned_bytes() > PINNED_BYTES_PER_CONNECTION_MAX {
        return false;
    }
    let frame = Counted::new(frame(client), live);
    client.connection.handle(client.now, Arc::new(frame), None).unwrap();
    client.run().unwrap();
    true
}

fn leased(client: &mut Client, name: &str) {
    let lease_state = LeaseState::READ_CACHING | LeaseState::WRITE_CACHING | LeaseState::HANDLE_CACHING;
    let lease = Lease { lease_key: KEY, lease_state, lease_flags: LeaseFlags::empty(), v2: None };
    let mut body = file(name).context(RequestContext::Lease(lease)).body();
    body[3] = 0xff;
    success(&client.call(Command::CREATE, &body).unwrap()).unwrap();
}

/// Opens a file without an oplock.
fn plain(client: &mut Client, name: &str) -> FileId {
    let mut body = file(name).body();
    body[3] = 0;
    let answer = client.call(Command::CREATE, &body).unwrap();
    success(&answer).unwrap();
    create::Response::parse(&answer.message).unwrap().file_id
}

fn acknowledge_lease_break(client: &mut Client) {
    let mut body = Vec::new();
    Acknowledge::Lease(LeaseBreakAcknowledgment { lease_key: KEY, lease_state: LeaseState::empty() })
        .encode(&mut body);
    client.answers.clear();
    success(&client.call(Command::OPLOCK_BREAK, &body).unwrap()).unwrap();
}

#[test]
fn writes_behind_a_waiting_create_are_limited_per_connection() {
    let mut lab = Lab::caching();
    let (mut holder, mut hostile, mut other) = (lab.client_of(1), lab.client_of(2), lab.client_of(3));
    leased(&mut holder, "f");
    request_all_credits(&mut hostile);
    let live = Arc::default();
    let (mut waiting, mut refused) = (0, 0);
    for _ in 0..511 {
        if !receive(&mut hostile, |c| create_and_write(c, "f", IO_BYTES_MAX), &live) {
            break;
        }
        for answer in hostile.answers.drain(..) {
            match answer.status() {
                NtStatus::PENDING => waiting += 1,
                NtStatus::INSUFFICIENT_RESOURCES => refused += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(live.load(Ordering::Relaxed) <= PARKED_BYTES_PER_CONNECTION_MAX);
        assert!(hostile.connection.pinned_bytes() >= live.load(Ordering::Relaxed), "all frames are counted");
    }
    assert!(waiting > 0 && refused > 0, "{waiting} wait, {refused} were refused");
    // Others are served, and small requests of the hostile client can wait.
    let theirs = plain(&mut other, "other");
    assert_eq!(write(&mut other, theirs, 0, b"data"), Ok(4));
    lock(&mut other, theirs, &[(0, 1, EXCLUSIVE)]).unwrap();
    let own = plain(&mut hostile, "other");
    let waits = hostile.call(Command::LOCK, &lock_body(own, &[(0, 1, EXCLUSIVE)])).unwrap();
    assert_eq!(waits.status(), NtStatus::PENDING);
    close(&mut other, theirs).unwrap();
    acknowledge_lease_break(&mut holder);
    lab.deliver(&mut [&mut holder, &mut hostile, &mut other]);
    assert_eq!(live.load(Ordering::Relaxed), 0, "all is answered");
    assert_eq!(hostile.connection.pinned_bytes(), 0);
}

#[test]
fn parked_requests_of_one_volume_leave_room_for_other_volumes() {
    const MIB: u32 = 1 << 20;
    let mut lab = Lab::caching();
    lab.server.add_volume(volume("third", FsHandle(Arc::new(())))).unwrap();
    let mut holder = lab.client_of(1);
    leased(&mut holder, "f");
    let live = Arc::default();
    let mut refused = 0;
    let mut clients: Vec<Client> = (0..40).map(|_| lab.client_of(2)).collect();
    for hostile in &mut clients {
        request_all_credits(hostile);
        for _ in 0..2 {
            assert!(receive(hostile, |c| create_and_write(c, "f", 7 * MIB), &live));
        }
        let statuses = hostile.answers.drain(..).map(|answer| answer.status());
        refused += statuses.filter(|s| *s == NtStatus::INSUFFICIENT_RESOURCES).count();
        assert!(live.load(Ordering::Relaxed) <= PARKED_BYTES_PER_VOLUME_MAX);
    }
    assert!(refused > 0, "a limit was met");
    let mut other = Client::new(&lab.server, 777, NEWEST);
    other.backend = lab.memory.backend();
    success(&other.negotiate().unwrap()).unwrap();
    success(&other.logon("third-user", "third-secret", 0).unwrap()).unwrap();
    success(&other.tree_connect("third").unwrap()).unwrap();
    let (one, two) = (plain(&mut other, "theirs"), plain(&mut other, "theirs"));
    lock(&mut other, one, &[(0, 1, EXCLUSIVE)]).unwrap();
    let waits = other.call(Command::LOCK, &lock_body(two, &[(0, 1, EXCLUSIVE)])).unwrap();
    assert_eq!(waits.status(), NtStatus::PENDING, "clients of another volume may wait");
}

fn listing(client: &mut Client, directory: FileId) -> Vec<u8> {
    let mut header = client.header(Command::QUERY_DIRECTORY, (IO_BYTES_MAX / 65_536) as u16);
    header.credits = u16::MAX;
    let mut body = Vec::new();
    query_directory::Request {
        file_information_class: FileInformationClass::FILE_ID_BOTH_DIRECTORY_INFORMATION,
        flags: query_directory::Flags::RESTART_SCANS,
        file_index: 0,
        file_id: directory,
        output_buffer_length: IO_BYTES_MAX,
        file_name: "*".to_owned(),
    }
    .encode(&mut body);
    client.message(header, &body)
}

#[test]
fn answers_in_preparation_count_against_the_connection_limit() {
    let mut lab = Lab::new();
    let mut hostile = lab.client();
    let listed = directory("d").access(AccessMask::FILE_LIST_DIRECTORY).id(&mut hostile);
    request_all_credits(&mut hostile);
    let mut taken = 0;
    // The backend is slow: the server answers nothing in the meantime.
    while taken < 63 && hostile.connection.pinned_bytes() <= PINNED_BYTES_PER_CONNECTION_MAX {
        let frame = listing(&mut hostile, listed);
        hostile.connection.handle(hostile.now, Arc::new(Bytes(frame)), None).unwrap();
        taken += 1;
    }
    let most = PINNED_BYTES_PER_CONNECTION_MAX / u64::from(IO_BYTES_MAX);
    assert!((most..=most + 1).contains(&taken), "{taken} answers of 8 MiB are prepared at a time");
    hostile.run().unwrap();
    assert_eq!(hostile.answers.len() as u64, taken, "all are answered");
    assert_eq!(hostile.connection.pinned_bytes(), 0);
}

#[test]
fn answers_to_a_compound_must_fit_in_one_frame() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    write(&mut c, f, (IO_BYTES_MAX - 1).into(), b"x").unwrap();
    request_all_credits(&mut c);
    let mut frame = Vec::new();
    for last in [false, false, true] {
        let header = c.header(Command::READ, (IO_BYTES_MAX / 65_536) as u16);
        let mut message = c.message(header, &read_body(f, 0, IO_BYTES_MAX, 0));
        if !last {
            message.resize(message.len().next_multiple_of(8), 0);
            let next = message.len() as u32;
            message[20..24].copy_from_slice(&next.to_le_bytes());
        }
        frame.extend_from_slice(&message);
    }
    c.send_raw(frame).unwrap();
    let statuses: Vec<NtStatus> = c.answers.drain(..).map(|answer| answer.status()).collect();
    let no_room = NtStatus::INSUFFICIENT_RESOURCES;
    assert_eq!(statuses, [NtStatus::SUCCESS, no_room, no_room]);
}
