//! Oplocks and leases: what clients may cache, and how the server breaks it.

use std::time::Duration;

use forebay_smb::engine::Encryption;
use forebay_smb::ids::FileId;
use forebay_smb::limits::{CHANNELS_PER_SESSION_MAX, OPLOCK_BREAK_RESEND_SECONDS, OPLOCK_BREAK_SECONDS_MAX};
use forebay_smb::status::NtStatus;
use forebay_smb::time::Now;
use forebay_smb::wire::create::{self, CreateDisposition, CreateOptions, OplockLevel};
use forebay_smb::wire::create_context::{
    Lease, LeaseFlags, LeaseState, LeaseV2, RequestContext, ResponseContext,
};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::file_info::FileEndOfFileInformation;
use forebay_smb::wire::fscc::fsctl::FsctlCode;
use forebay_smb::wire::oplock_break::{
    LeaseBreakAcknowledgment, LeaseBreakNotification, Notification, OplockBreak, Request,
};
use forebay_smb::wire::{
    AccessMask, Capabilities, Command, Dialect, FileTime, Header, HeaderFlags, Ids, ShareAccess, close,
    negotiate,
};

use crate::calls::{
    EXCLUSIVE, Lab, NOW_OR_NEVER, Open, close, compound, delete_pending, directory, file, lock, rename,
    set_file, write,
};
use crate::copying;
use crate::memory::FILE_BYTES_MAX;
use crate::support::{Answer, Client, NOW, start};

const NONE: LeaseState = LeaseState::empty();
const R: LeaseState = LeaseState::READ_CACHING;
const W: LeaseState = LeaseState::WRITE_CACHING;
const H: LeaseState = LeaseState::HANDLE_CACHING;
const RH: LeaseState = R.union(H);
const RW: LeaseState = R.union(W);
const RWH: LeaseState = RW.union(H);
const SECOND: Duration = Duration::from_secs(1);

/// The answer to a CREATE.
#[derive(Debug)]
pub struct Granted {
    pub id: FileId,
    pub level: OplockLevel,
    pub lease: Option<Lease>,
    pub end_of_file: u64,
}

pub fn body(open: &Open<'_>, level: OplockLevel) -> Vec<u8> {
    let mut body = open.body();
    body[3] = level.0;
    body
}

pub fn lease(open: Open<'_>, key: u8, lease_state: LeaseState) -> Vec<u8> {
    let lease = Lease { lease_key: [key; 16], lease_state, lease_flags: LeaseFlags::empty(), v2: None };
    body(&open.context(RequestContext::Lease(lease)), OplockLevel::LEASE)
}

pub fn granted(answer: &Answer) -> Result<Granted, NtStatus> {
    if answer.status() != NtStatus::SUCCESS {
        return Err(answer.status());
    }
    let response = create::Response::parse(&answer.message).unwrap();
    let lease = response.contexts.iter().find_map(|context| match context {
        ResponseContext::Lease(lease) => Some(*lease),
        _ => None,
    });
    Ok(Granted {
        id: response.file_id,
        level: response.oplock_level,
        lease,
        end_of_file: response.end_of_file,
    })
}

pub fn send(client: &mut Client, body: &[u8]) -> Result<Granted, NtStatus> {
    granted(&client.call(Command::CREATE, body).unwrap())
}

fn oplock(client: &mut Client, name: &str, level: OplockLevel) -> Granted {
    send(client, &body(&file(name), level)).unwrap()
}

/// Opens with a lease. Returns the open and the lease's state.
fn leased(client: &mut Client, name: &str, key: u8, state: LeaseState) -> (FileId, LeaseState) {
    let granted = send(client, &lease(file(name), key, state)).unwrap();
    assert_eq!(granted.level, OplockLevel::LEASE);
    (granted.id, granted.lease.unwrap().lease_state)
}

/// Sends a request that has to wait and gets an interim response. Returns its AsyncId.
pub fn waits(client: &mut Client, command: Command, body: &[u8]) -> u64 {
    let answer = client.call(command, body).unwrap();
    assert_eq!(answer.status(), NtStatus::PENDING);
    answer.header.async_id().expect("an interim response")
}

/// The answer to a request that waited.
pub fn waited(client: &mut Client) -> Answer {
    let answer = client.answers.pop_front().expect("an answer");
    let asynchronous = answer.header.flags.contains(HeaderFlags::ASYNC_COMMAND);
    assert_eq!(asynchronous, answer.header.command != Command::SET_INFO);
    answer
}

/// A notification of a break.
pub fn broken(client: &mut Client) -> Notification {
    let answer = client.answers.pop_front().expect("a notification");
    let header = answer.header;
    assert_eq!((header.command, header.message_id), (Command::OPLOCK_BREAK, u64::MAX));
    assert_eq!((header.session_id, header.ids), (0, Ids::Sync { process_id: 0, tree_id: 0 }));
    assert!(!header.flags.contains(HeaderFlags::SIGNED) && header.credits == 0);
    Notification::parse(&answer.message).unwrap()
}

/// A lease break: from, to, and whether it requires an acknowledgment.
fn lease_broken(client: &mut Client) -> (LeaseState, LeaseState, bool) {
    let Notification::Lease(notification) = broken(client) else { panic!("an oplock's") };
    let LeaseBreakNotification { current_lease_state, new_lease_state, flags, .. } = notification;
    (current_lease_state, new_lease_state, flags.0 != 0)
}

fn oplock_broken(client: &mut Client) -> OplockBreak {
    let Notification::Oplock(notification) = broken(client) else { panic!("a lease's") };
    notification
}

fn acknowledge(client: &mut Client, request: &Request) -> NtStatus {
    let mut body = Vec::new();
    request.encode(&mut body);
    client.call(Command::OPLOCK_BREAK, &body).unwrap().status()
}

pub fn acknowledge_lease(client: &mut Client, key: u8, lease_state: LeaseState) -> NtStatus {
    acknowledge(client, &Request::Lease(LeaseBreakAcknowledgment { lease_key: [key; 16], lease_state }))
}

fn acknowledge_oplock(client: &mut Client, file_id: FileId, oplock_level: OplockLevel) -> NtStatus {
    acknowledge(client, &Request::Oplock(OplockBreak { oplock_level, file_id }))
}

#[test]
fn no_oplock_or_lease_is_granted_without_caching() {
    let mut lab = Lab::new();
    let mut client = Client::new(&lab.server, 1, Dialect::SMB3_1_1);
    let answer = client.negotiate().unwrap();
    let capabilities = negotiate::Response::parse(&answer.message).unwrap().capabilities;
    assert!(!capabilities.contains(Capabilities::LEASING));
    let mut client = lab.client();
    assert_eq!(oplock(&mut client, "f", OplockLevel::BATCH).level, OplockLevel::NONE);
    let answered = send(&mut client, &lease(file("g"), 1, RWH)).unwrap();
    assert_eq!((answered.level, answered.lease), (OplockLevel::NONE, None));
}

#[test]
fn leasing_is_announced_from_smb_2_1_on() {
    let lab = Lab::caching();
    for (id, dialect, expected) in
        [(1, Dialect::SMB2_0_2, false), (2, Dialect::SMB2_1, true), (3, Dialect::SMB3_1_1, true)]
    {
        let mut client = Client::new(&lab.server, id, dialect);
        let answer = client.negotiate().unwrap();
        let capabilities = negotiate::Response::parse(&answer.message).unwrap().capabilities;
        assert_eq!(capabilities.contains(Capabilities::LEASING), expected, "{dialect:?}");
    }
}

#[test]
fn oplocks_and_leases_granted_to_a_sole_opener() {
    let mut lab = Lab::caching();
    let mut a = lab.client_of(1);
    for level in [OplockLevel::NONE, OplockLevel::II, OplockLevel::EXCLUSIVE, OplockLevel::BATCH] {
        let granted = oplock(&mut a, "f", level);
        assert_eq!((granted.level, granted.lease), (level, None));
        close(&mut a, granted.id).unwrap();
    }
    for (asked, expected) in [(NONE, NONE), (R, R), (H, NONE), (W, NONE), (RH, RH), (RW, RW), (RWH, RWH)] {
        let (id, state) = leased(&mut a, "f", 1, asked);
        assert_eq!(state, expected, "{asked:?}");
        close(&mut a, id).unwrap();
    }
    let none = send(&mut a, &lease(directory("d"), 1, RWH)).unwrap();
    assert_eq!((none.level, none.lease), (OplockLevel::NONE, None), "directories are not cached");
    // A level without its context, and a context without its level.
    assert_eq!(oplock(&mut a, "f", OplockLevel::LEASE).level, OplockLevel::NONE);
    let mut body = lease(file("g"), 2, RWH);
    body[3] = OplockLevel::BATCH.0;
    let batch = send(&mut a, &body).unwrap();
    assert_eq!((batch.level, batch.lease), (OplockLevel::BATCH, None));
}

#[test]
fn a_lease_key_belongs_to_one_file_of_one_client() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let (f, _) = leased(&mut a, "f", 1, RH);
    assert_eq!(send(&mut a, &lease(file("g"), 1, R)).unwrap_err(), NtStatus::INVALID_PARAMETER);
    assert_eq!(lab.memory.contents("g"), None, "the refused open creates no file");
    leased(&mut b, "g", 1, R);
    close(&mut a, f).unwrap();
    leased(&mut a, "g", 1, R);
}

#[test]
fn a_lease_is_upgraded_to_a_superset_and_never_downgraded() {
    let mut lab = Lab::caching();
    let mut a = lab.client_of(1);
    for (held, asked, expected) in [
        (NONE, R, R),
        (R, RW, RW),
        (RH, RW, RH),
        (RH, RWH, RWH),
        (RW, RH, RW),
        (RWH, R, RWH),
        (RWH, NONE, RWH),
    ] {
        let (first, _) = leased(&mut a, "f", 1, held);
        let (second, state) = leased(&mut a, "f", 1, asked);
        assert_eq!(state, expected, "{held:?} {asked:?}");
        close(&mut a, first).unwrap();
        close(&mut a, second).unwrap();
    }
}

#[test]
fn open_waits_for_the_batch_oplock_break_and_sees_earlier_writes() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let held = oplock(&mut a, "f", OplockLevel::BATCH);
    waits(&mut b, Command::CREATE, &body(&file("f"), OplockLevel::BATCH));
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(oplock_broken(&mut a), OplockBreak { oplock_level: OplockLevel::II, file_id: held.id });
    assert!(b.answers.is_empty());
    write(&mut a, held.id, 0, b"late").unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(b.answers.is_empty());
    assert_eq!(acknowledge_oplock(&mut a, held.id, OplockLevel::II), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut a, &mut b]);
    let answer = granted(&waited(&mut b)).unwrap();
    assert_eq!((answer.level, answer.end_of_file), (OplockLevel::II, 4));
    assert!(a.answers.is_empty());
    // A break of level II needs no acknowledgment: the server notifies its holder and also the writer.
    write(&mut b, answer.id, 0, b"x").unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(oplock_broken(&mut a).oplock_level, OplockLevel::NONE);
    assert_eq!(oplock_broken(&mut b).oplock_level, OplockLevel::NONE);
    assert_eq!(acknowledge_oplock(&mut a, held.id, OplockLevel::NONE), NtStatus::INVALID_OPLOCK_PROTOCOL);
}

#[test]
fn an_attribute_only_open_breaks_nothing_and_gets_no_oplock() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let held = oplock(&mut a, "f", OplockLevel::BATCH);
    let stat = file("f").access(AccessMask::FILE_READ_ATTRIBUTES);
    assert_eq!(send(&mut b, &body(&stat, OplockLevel::BATCH)).unwrap().level, OplockLevel::NONE);
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
    write(&mut a, held.id, 0, b"alone").unwrap();
}

#[test]
fn an_unacknowledged_break_revokes_the_oplock_or_lease_on_timeout() {
    for use_lease in [false, true] {
        let mut lab = Lab::caching();
        let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
        let id = match use_lease {
            true => leased(&mut a, "f", 1, RWH).0,
            false => oplock(&mut a, "f", OplockLevel::BATCH).id,
        };
        waits(&mut b, Command::CREATE, &lease(file("f"), 2, RWH));
        lab.server.tick(start());
        lab.server.tick(start() + Duration::from_secs(OPLOCK_BREAK_SECONDS_MAX - 1));
        lab.deliver(&mut [&mut a, &mut b]);
        assert!(b.answers.is_empty());
        lab.server.tick(start() + Duration::from_secs(OPLOCK_BREAK_SECONDS_MAX));
        lab.deliver(&mut [&mut a, &mut b]);
        let answer = granted(&waited(&mut b)).unwrap();
        assert_eq!(answer.lease.unwrap().lease_state, RH);
        broken(&mut a);
        let (status, expected) = match use_lease {
            true => (acknowledge_lease(&mut a, 1, RH), NtStatus::UNSUCCESSFUL),
            false => (acknowledge_oplock(&mut a, id, OplockLevel::II), NtStatus::INVALID_OPLOCK_PROTOCOL),
        };
        assert_eq!(status, expected, "too late");
        if use_lease {
            assert_eq!(leased(&mut a, "f", 1, NONE).1, NONE);
        }
    }
}

#[test]
fn writes_locks_and_size_changes_break_read_caching_of_others() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let changes: [fn(&mut Client, FileId); 3] = [
        |client, id| {
            write(client, id, 0, b"new").unwrap();
        },
        |client, id| lock(client, id, &[(0, 1, EXCLUSIVE | NOW_OR_NEVER)]).unwrap(),
        |client, id| {
            set_file(client, id, FileInformationClass::FILE_END_OF_FILE_INFORMATION, |out| {
                FileEndOfFileInformation { end_of_file: 1 }.encode(out);
            })
            .unwrap();
        },
    ];
    for change in changes {
        let (held, state) = leased(&mut a, "f", 1, RH);
        assert_eq!(state, RH);
        let (writer, state) = leased(&mut b, "f", 2, RWH);
        assert_eq!(state, RH, "write caching needs a sole opener");
        change(&mut b, writer);
        lab.deliver(&mut [&mut a, &mut b]);
        assert_eq!(lease_broken(&mut a), (RH, NONE, true));
        assert!(b.answers.is_empty(), "the writer's own lease stays");
        close(&mut a, held).unwrap();
        let (held, _) = leased(&mut a, "g", 3, R);
        let (other, _) = leased(&mut b, "g", 4, R);
        change(&mut b, other);
        lab.deliver(&mut [&mut a, &mut b]);
        assert_eq!(lease_broken(&mut a), (R, NONE, false), "nothing to acknowledge");
        assert_eq!(acknowledge_lease(&mut a, 3, NONE), NtStatus::UNSUCCESSFUL);
        close(&mut a, held).unwrap();
        close(&mut b, writer).unwrap();
        close(&mut b, other).unwrap();
    }
}

#[test]
fn byte_range_locks_within_the_file_prevent_read_caching() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let plain = oplock(&mut a, "f", OplockLevel::NONE);
    write(&mut a, plain.id, 0, b"content").unwrap();
    // A range beyond the end of the file is never read from a cache.
    lock(&mut a, plain.id, &[(7, 1, EXCLUSIVE | NOW_OR_NEVER)]).unwrap();
    let (leased_file, state) = leased(&mut b, "f", 1, RWH);
    assert_eq!(state, RH);
    close(&mut b, leased_file).unwrap();
    lock(&mut a, plain.id, &[(6, 1, EXCLUSIVE | NOW_OR_NEVER)]).unwrap();
    assert_eq!(leased(&mut b, "f", 1, RWH).1, NONE);
}

#[test]
fn a_sharing_conflict_is_rechecked_after_the_handle_lease_break() {
    for closes in [true, false] {
        let mut lab = Lab::caching();
        let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
        let alone = lease(file("f").share(ShareAccess::empty()), 1, RWH);
        let held = send(&mut a, &alone).unwrap();
        waits(&mut b, Command::CREATE, &lease(file("f"), 2, RWH));
        lab.deliver(&mut [&mut a, &mut b]);
        assert_eq!(lease_broken(&mut a), (RWH, RW, true));
        if closes {
            close(&mut a, held.id).unwrap();
        } else {
            assert_eq!(acknowledge_lease(&mut a, 1, RW), NtStatus::SUCCESS);
        }
        lab.deliver(&mut [&mut a, &mut b]);
        match granted(&waited(&mut b)) {
            Ok(answer) => assert!(closes && answer.lease.unwrap().lease_state == RWH),
            Err(status) => assert!(!closes && status == NtStatus::SHARING_VIOLATION),
        }
    }
}

#[test]
fn a_lease_is_broken_in_steps_one_notification_at_a_time() {
    let mut lab = Lab::caching();
    let (mut a, mut b, mut c) = (lab.client_of(1), lab.client_of(2), lab.client_of(3));
    leased(&mut a, "f", 1, RWH);
    waits(&mut b, Command::CREATE, &lease(file("f"), 2, R));
    let overwrite = file("f").disposition(CreateDisposition::OVERWRITE);
    waits(&mut c, Command::CREATE, &body(&overwrite, OplockLevel::NONE));
    lab.deliver(&mut [&mut a, &mut b, &mut c]);
    assert_eq!(lease_broken(&mut a), (RWH, RH, true));
    assert!(a.answers.is_empty(), "one break at a time");
    let flags = send(&mut a, &lease(file("f"), 1, RWH)).unwrap().lease.unwrap();
    assert_eq!((flags.lease_state, flags.lease_flags), (RWH, LeaseFlags::BREAK_IN_PROGRESS));
    for more in [RWH, RW, W] {
        assert_eq!(acknowledge_lease(&mut a, 1, more), NtStatus::REQUEST_NOT_ACCEPTED);
    }
    assert_eq!(acknowledge_lease(&mut a, 9, RH), NtStatus::OBJECT_NAME_NOT_FOUND);
    assert_eq!(acknowledge_lease(&mut a, 1, RH), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut a, &mut b, &mut c]);
    assert_eq!(lease_broken(&mut a), (RH, R, true));
    assert_eq!(acknowledge_lease(&mut a, 1, R), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut a, &mut b, &mut c]);
    assert_eq!(lease_broken(&mut a), (R, NONE, false));
    assert_eq!(acknowledge_lease(&mut a, 1, NONE), NtStatus::UNSUCCESSFUL);
    assert!(granted(&waited(&mut b)).is_ok() && granted(&waited(&mut c)).is_ok());
}

#[test]
fn lease_epochs_count_changes_and_parent_keys_are_returned() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let second = |state, lease_flags| {
        let v2 = Some(LeaseV2 { parent_lease_key: [9; 16], epoch: 0x4711 });
        let lease = Lease { lease_key: [1; 16], lease_state: state, lease_flags, v2 };
        body(&file("f").context(RequestContext::Lease(lease)), OplockLevel::LEASE)
    };
    let parent = LeaseFlags::PARENT_LEASE_KEY_SET;
    let first = send(&mut a, &second(R, parent)).unwrap().lease.unwrap();
    assert_eq!(first.lease_flags, parent);
    assert_eq!(first.v2, Some(LeaseV2 { parent_lease_key: [9; 16], epoch: 0x4712 }));
    let same = send(&mut a, &second(R, parent)).unwrap().lease.unwrap();
    assert_eq!(same.v2.unwrap().epoch, 0x4712);
    let more = send(&mut a, &second(RWH, parent)).unwrap().lease.unwrap();
    assert_eq!(more.v2.unwrap().epoch, 0x4713);
    waits(&mut b, Command::CREATE, &body(&file("f"), OplockLevel::NONE));
    lab.deliver(&mut [&mut a, &mut b]);
    let Notification::Lease(notification) = broken(&mut a) else { panic!("an oplock's") };
    assert_eq!((notification.new_epoch, notification.lease_key), (0x4714, [1; 16]));
    let mut other = lab.client_of(3);
    let plain = send(&mut other, &lease(file("g"), 1, R)).unwrap().lease.unwrap();
    assert_eq!(plain.v2, None, "a version 1 request gets a version 1 answer");
}

#[test]
fn oplocks_and_leases_coexist_at_compatible_levels() {
    for (held, asked, left, granted_level) in [
        (R, OplockLevel::BATCH, R, OplockLevel::II),
        (RH, OplockLevel::BATCH, RH, OplockLevel::NONE),
        (RW, OplockLevel::EXCLUSIVE, R, OplockLevel::II),
        (RWH, OplockLevel::II, RH, OplockLevel::NONE),
    ] {
        let mut lab = Lab::caching();
        let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
        leased(&mut a, "f", 1, held);
        let answer = b.call(Command::CREATE, &body(&file("f"), asked)).unwrap();
        let answer = if answer.status() == NtStatus::PENDING {
            lab.deliver(&mut [&mut a, &mut b]);
            assert_eq!(lease_broken(&mut a), (held, left, true));
            assert_eq!(acknowledge_lease(&mut a, 1, left), NtStatus::SUCCESS);
            lab.deliver(&mut [&mut a, &mut b]);
            waited(&mut b)
        } else {
            answer
        };
        assert_eq!(granted(&answer).unwrap().level, granted_level, "{held:?}");
    }
}

#[test]
fn a_break_is_resent_on_another_channel_if_its_own_is_lost_or_silent() {
    for lost in [true, false] {
        let mut lab = Lab::caching();
        let mut a = lab.client_of(1);
        let mut second = lab.channel(&a);
        let mut b = lab.client_of(2);
        leased(&mut a, "f", 1, RWH);
        waits(&mut b, Command::CREATE, &body(&file("f"), OplockLevel::NONE));
        lab.deliver(&mut [&mut a, &mut second, &mut b]);
        assert_eq!(lease_broken(&mut a), (RWH, RH, true));
        assert!(second.answers.is_empty());
        if lost {
            a.disconnect();
        } else {
            lab.server.tick(start());
            lab.server.tick(start() + Duration::from_secs(OPLOCK_BREAK_RESEND_SECONDS));
        }
        lab.deliver(&mut [&mut a, &mut second, &mut b]);
        assert_eq!(lease_broken(&mut second), (RWH, RH, true));
        assert_eq!(acknowledge_lease(&mut second, 1, RH), NtStatus::SUCCESS);
        lab.deliver(&mut [&mut a, &mut second, &mut b]);
        assert!(granted(&waited(&mut b)).is_ok());
    }
}

#[test]
fn a_partial_write_or_copy_on_a_full_disk_breaks_read_caching() {
    for copies in [false, true] {
        let mut lab = Lab::caching();
        let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
        assert_eq!(leased(&mut a, "f", 1, R).1, R);
        let target = oplock(&mut b, "f", OplockLevel::NONE).id;
        if copies {
            let source = oplock(&mut b, "source", OplockLevel::NONE).id;
            write(&mut b, source, 0, b"data").unwrap();
            let key = copying::key(&mut b, source);
            let chunks = [(0, FILE_BYTES_MAX - 2, 4)];
            let (status, _) = copying::copy(&mut b, FsctlCode::SRV_COPYCHUNK_WRITE, key, target, &chunks);
            assert_eq!(status, NtStatus::DISK_FULL);
        } else {
            assert_eq!(write(&mut b, target, FILE_BYTES_MAX - 2, b"data"), Err(NtStatus::DISK_FULL));
        }
        lab.deliver(&mut [&mut a, &mut b]);
        let contents = lab.memory.contents("f").unwrap();
        assert!(contents.ends_with(b"\0da"), "the part that fits is written");
        assert_eq!(lease_broken(&mut a), (R, NONE, false), "copies: {copies}");
    }
}

#[test]
fn a_wall_clock_step_does_not_expire_a_break() {
    let mut lab = Lab::caching();
    let (mut a, mut b, mut c) = (lab.client_of(1), lab.client_of(2), lab.client_of(3));
    leased(&mut a, "f", 1, RWH);
    waits(&mut b, Command::CREATE, &body(&file("f"), OplockLevel::NONE));
    lab.server.tick(start());
    // An administrator sets the clock: an hour ahead, then an hour back.
    for wall in [FileTime(NOW + 36_000_000_000), FileTime(NOW - 36_000_000_000)] {
        for client in [&mut a, &mut b, &mut c] {
            client.now = Now { instant: start() + SECOND, wall };
        }
        let other = oplock(&mut c, "other", OplockLevel::NONE).id;
        close(&mut c, other).unwrap();
        lab.server.tick(start() + SECOND);
        lab.deliver(&mut [&mut a, &mut b]);
        assert!(b.answers.is_empty(), "the holder still has time");
    }
    assert_eq!(lease_broken(&mut a), (RWH, RH, true));
    assert_eq!(acknowledge_lease(&mut a, 1, RH), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(granted(&waited(&mut b)).is_ok());
}

#[test]
fn a_break_is_sent_once_on_every_channel_before_it_times_out() {
    let mut lab = Lab::caching();
    let mut a = lab.client_of(1);
    let mut others: Vec<_> = (1..CHANNELS_PER_SESSION_MAX).map(|_| lab.channel(&a)).collect();
    let mut b = lab.client_of(2);
    leased(&mut a, "f", 1, RWH);
    waits(&mut b, Command::CREATE, &body(&file("f"), OplockLevel::NONE));
    for second in 0..OPLOCK_BREAK_SECONDS_MAX {
        lab.server.tick(start() + Duration::from_secs(second));
        let mut all: Vec<_> = others.iter_mut().chain([&mut a, &mut b]).collect();
        lab.deliver(&mut all);
    }
    for channel in others.iter_mut().chain([&mut a]) {
        assert_eq!(lease_broken(channel), (RWH, RH, true));
        assert!(channel.answers.is_empty(), "notified once");
    }
}

#[test]
fn a_break_is_resent_channel_by_channel_as_channels_fail() {
    let mut lab = Lab::caching();
    let mut a = lab.client_of(1);
    let mut others: Vec<_> = (1..6).map(|_| lab.channel(&a)).collect();
    let mut b = lab.client_of(2);
    leased(&mut a, "f", 1, RWH);
    waits(&mut b, Command::CREATE, &body(&file("f"), OplockLevel::NONE));
    let mut deliver = |lab: &Lab, a: &mut _, others: &mut Vec<Client>| {
        let mut all: Vec<_> = [a].into_iter().chain(others.iter_mut()).chain([&mut b]).collect();
        lab.deliver(&mut all);
    };
    let asked = |others: &Vec<Client>| others.iter().filter(|c| !c.answers.is_empty()).count();
    deliver(&lab, &mut a, &mut others);
    lab.server.tick(start());
    lab.server.tick(start() + 5 * SECOND);
    deliver(&lab, &mut a, &mut others);
    assert_eq!(asked(&others), 1, "the first was silent");
    a.disconnect();
    deliver(&lab, &mut a, &mut others);
    assert_eq!(asked(&others), 1, "the second still has time");
    lab.server.tick(start() + 5 * SECOND + SECOND / 10);
    deliver(&lab, &mut a, &mut others);
    assert_eq!(asked(&others), 1, "not at once");
    lab.server.tick(start() + 6 * SECOND);
    lab.server.tick(start() + 7 * SECOND);
    deliver(&lab, &mut a, &mut others);
    assert_eq!(asked(&others), 2, "one resend for the lost channel");
    lab.server.tick(start() + 10 * SECOND);
    deliver(&lab, &mut a, &mut others);
    assert_eq!(asked(&others), 3, "the resend timer continues");
    for channel in &mut others {
        channel.disconnect();
    }
    deliver(&lab, &mut a, &mut others);
    assert!(lab.server.open_infos(None).iter().all(|open| open.session_id == b.session_id));
}

#[test]
fn a_break_queued_for_a_lost_channel_is_sent_on_another() {
    let mut lab = Lab::caching();
    let mut a = lab.client_of(1);
    let mut second = lab.channel(&a);
    let mut b = lab.client_of(2);
    leased(&mut a, "f", 1, R);
    let (writer, _) = leased(&mut b, "f", 2, R);
    write(&mut b, writer, 0, b"x").unwrap();
    a.disconnect();
    lab.deliver(&mut [&mut a, &mut second, &mut b]);
    assert!(a.answers.is_empty());
    assert_eq!(lease_broken(&mut second), (R, NONE, false));
}

#[test]
fn a_lost_client_no_longer_holds_its_lease() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    leased(&mut a, "f", 1, RWH);
    waits(&mut b, Command::CREATE, &lease(file("f"), 2, RWH));
    lab.deliver(&mut [&mut a, &mut b]);
    a.disconnect();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(granted(&waited(&mut b)).unwrap().lease.unwrap().lease_state, RWH);
}

#[test]
fn a_waiting_create_can_be_cancelled_and_leaves_no_open() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let held = oplock(&mut a, "f", OplockLevel::BATCH);
    let async_id = waits(&mut b, Command::CREATE, &body(&file("f"), OplockLevel::NONE));
    let mut header = Header::request(Command::CANCEL, 0);
    header.session_id = b.session_id;
    header.ids = Ids::Async { async_id };
    let message = b.message(header, &[4, 0, 0, 0]);
    b.send(message).unwrap();
    assert_eq!(waited(&mut b).status(), NtStatus::CANCELLED);
    lab.deliver(&mut [&mut a, &mut b]);
    oplock_broken(&mut a);
    assert_eq!(acknowledge_oplock(&mut a, held.id, OplockLevel::NONE), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(b.answers.is_empty());
    assert_eq!(lab.server.open_infos(None).len(), 1);
}

#[test]
fn a_compound_continues_after_a_waiting_create() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let held = oplock(&mut a, "f", OplockLevel::BATCH);
    let mut end = Vec::new();
    close::Request {
        flags: close::Flags::empty(),
        file_id: FileId { persistent: u64::MAX, volatile: u64::MAX },
    }
    .encode(&mut end);
    let create = body(&file("f"), OplockLevel::NONE);
    let interim = compound(&mut b, &[(Command::CREATE, create), (Command::CLOSE, end)]);
    assert_eq!(interim.len(), 1);
    assert_eq!(interim[0].status(), NtStatus::PENDING);
    lab.deliver(&mut [&mut a, &mut b]);
    oplock_broken(&mut a);
    close(&mut a, held.id).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(waited(&mut b).status(), NtStatus::SUCCESS);
    let closed = b.answers.pop_front().expect("the second answer");
    assert_eq!((closed.status(), closed.header.async_id()), (NtStatus::SUCCESS, None));
}

#[test]
fn rename_and_delete_wait_for_others_to_close_cached_handles() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let d = send(&mut b, &body(&directory("d"), OplockLevel::NONE)).unwrap();
    close(&mut b, d.id).unwrap();
    let (held, _) = leased(&mut a, "d\\f", 1, RH);
    let mine = oplock(&mut b, "d\\f", OplockLevel::NONE);
    assert_eq!(rename(&mut b, mine.id, "d\\g", false), Err(NtStatus::PENDING));
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (RH, R, true));
    assert!(lab.memory.contents("d/f").is_some());
    assert_eq!(acknowledge_lease(&mut a, 1, R), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(waited(&mut b).status(), NtStatus::SUCCESS);
    assert!(lab.memory.contents("d/g").is_some());
    close(&mut a, held).unwrap();

    let (held, _) = leased(&mut a, "d\\g", 1, RH);
    assert_eq!(delete_pending(&mut b, mine.id, true), Err(NtStatus::PENDING));
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (RH, R, true));
    close(&mut a, held).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(waited(&mut b).status(), NtStatus::SUCCESS);
    close(&mut b, mine.id).unwrap();
    assert_eq!(lab.memory.contents("d/g"), None);

    let (held, _) = leased(&mut a, "d\\h", 1, RH);
    let parent = send(&mut b, &body(&directory("d"), OplockLevel::NONE)).unwrap();
    assert_eq!(rename(&mut b, parent.id, "e", false), Err(NtStatus::PENDING));
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (RH, R, true));
    close(&mut a, held).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(waited(&mut b).status(), NtStatus::SUCCESS);
    assert!(lab.memory.contents("e/h").is_some());
}

#[test]
fn an_open_with_delete_on_close_breaks_handle_caching_first() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let (held, _) = leased(&mut a, "f", 1, RH);
    let delete = file("f").access(AccessMask::DELETE).option(CreateOptions::DELETE_ON_CLOSE);
    waits(&mut b, Command::CREATE, &body(&delete, OplockLevel::NONE));
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (RH, R, true));
    close(&mut a, held).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    let opened = granted(&waited(&mut b)).unwrap();
    close(&mut b, opened.id).unwrap();
    assert_eq!(lab.memory.contents("f"), None);
}

#[test]
fn a_waiting_open_does_not_find_a_file_that_the_holder_deleted() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let held = oplock(&mut a, "f", OplockLevel::BATCH);
    let existing = file("f").disposition(CreateDisposition::OPEN);
    waits(&mut b, Command::CREATE, &body(&existing, OplockLevel::NONE));
    delete_pending(&mut a, held.id, true).unwrap();
    close(&mut a, held.id).unwrap();
    a.answers.clear();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(waited(&mut b).status(), NtStatus::OBJECT_NAME_NOT_FOUND);
}

#[test]
fn an_overwrite_breaks_a_lease_granted_during_its_truncation() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let made = oplock(&mut a, "f", OplockLevel::NONE);
    close(&mut a, made.id).unwrap();
    let overwrite = file("f").disposition(CreateDisposition::OVERWRITE);
    let open = a.begin(Command::CREATE, &body(&overwrite, OplockLevel::NONE));
    let result = (a.backend)(open.kind);
    a.connection.complete(a.now, open.id, result).unwrap();
    let truncate = a.connection.poll_fs().expect("an operation");
    assert_eq!(leased(&mut b, "f", 2, RH).1, RH);
    a.finish(truncate);
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut b), (RH, NONE, true));
}

#[test]
fn breaks_are_sealed_on_sealed_sessions() {
    let mut lab = Lab::caching_with(Encryption::Required);
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    leased(&mut a, "f", 1, RWH);
    waits(&mut b, Command::CREATE, &lease(file("f"), 2, R));
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.front().expect("a notification").sealed);
    assert_eq!(lease_broken(&mut a), (RWH, RH, true));
}

#[test]
fn invalid_acknowledgments_are_refused() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let held = oplock(&mut a, "f", OplockLevel::EXCLUSIVE);
    assert_eq!(acknowledge_oplock(&mut a, held.id, OplockLevel::II), NtStatus::INVALID_OPLOCK_PROTOCOL);
    assert_eq!(acknowledge_oplock(&mut a, held.id, OplockLevel::LEASE), NtStatus::INVALID_PARAMETER);
    let unknown = FileId { persistent: 1, volatile: 1 };
    assert_eq!(acknowledge_oplock(&mut a, unknown, OplockLevel::II), NtStatus::FILE_CLOSED);
    waits(&mut b, Command::CREATE, &body(&file("f"), OplockLevel::II));
    lab.deliver(&mut [&mut a, &mut b]);
    oplock_broken(&mut a);
    assert_eq!(
        acknowledge_oplock(&mut a, held.id, OplockLevel::BATCH),
        NtStatus::INVALID_OPLOCK_PROTOCOL,
        "and no longer has an oplock"
    );
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(granted(&waited(&mut b)).unwrap().level, OplockLevel::II);
}
