//! CREATEs that are sent again because their answers were lost.

use std::time::Duration;

use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateAction, CreateDisposition};
use forebay_smb::wire::{Command, FileAttributes, ShareAccess};

use crate::calls::{Lab, Open, close, file, read, write};
use crate::durable::{Made, make, wanted};
use crate::support::{Client, start};

const GUID: [u8; 16] = [0x9e; 16];
const DUPLICATE: Result<Made, NtStatus> = Err(NtStatus::DUPLICATE_OBJECTID);

fn new() -> Open<'static> {
    file("f").share(ShareAccess::empty()).disposition(CreateDisposition::CREATE).context(wanted(0, GUID))
}

fn again(client: &mut Client, open: &Open<'_>) -> Result<Made, NtStatus> {
    client.replay = true;
    let made = make(client, open);
    client.replay = false;
    made
}

#[test]
fn a_replayed_create_gets_the_same_answer() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let first = make(&mut a, &new()).unwrap();
    assert_eq!(first.action, CreateAction::CREATED);
    b.channel_sequence = 1;
    for client in [&mut a, &mut b] {
        assert_eq!(again(client, &new()).unwrap(), first);
    }
    let changed = new().disposition(CreateDisposition::OPEN).attributes(FileAttributes::HIDDEN);
    assert_eq!(again(&mut b, &changed).unwrap(), first, "other parameters are ignored");
    let renamed = Open { name: "g", ..new() };
    assert_eq!(again(&mut b, &renamed), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(lab.server.open_infos(None).len(), 1);
    write(&mut b, first.id, 0, b"x").unwrap();
}

#[test]
fn a_create_guid_is_unique_among_opens_unless_replayed() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let shared = || new().share(ShareAccess(7)).disposition(CreateDisposition::OPEN_IF);
    let first = make(&mut a, &shared()).unwrap();
    assert_eq!(make(&mut a, &shared()), DUPLICATE);
    // The client has the answer: a CREATE with this CreateGuid is a new one.
    close(&mut a, first.id).unwrap();
    let second = again(&mut a, &shared()).unwrap();
    assert_ne!(first.id, second.id);
    assert_eq!(make(&mut a, &shared()), DUPLICATE);
    assert_eq!(again(&mut a, &shared()).unwrap(), second);
}

#[test]
fn a_create_in_flight_is_neither_repeated_nor_lost() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let op = a.begin(Command::CREATE, &new().body());
    assert_eq!(again(&mut b, &new()), Err(NtStatus::FILE_NOT_AVAILABLE));
    assert_eq!(make(&mut b, &new()), DUPLICATE);
    a.finish(op);
    let first = crate::durable::made(&a.answers.pop_front().unwrap().message);
    assert_eq!(again(&mut b, &new()).unwrap(), first);
    close(&mut b, first.id).unwrap();
    // A CREATE that failed can be retried.
    assert_eq!(make(&mut b, &new()), Err(NtStatus::OBJECT_NAME_COLLISION));
    assert_eq!(again(&mut b, &new()), Err(NtStatus::OBJECT_NAME_COLLISION));
    // A CREATE completes after the loss of its connection: its file neither disappears nor is delete-pending for the replay.
    let lost = Open { name: "lost", ..new() };
    let op = a.begin(Command::CREATE, &lost.body());
    // Without a CreateGuid, no client can find the open.
    let unnamed = file("unnamed").disposition(CreateDisposition::CREATE);
    let unnamed_op = a.begin(Command::CREATE, &unnamed.body());
    a.disconnect();
    assert_eq!(again(&mut b, &lost), Err(NtStatus::FILE_NOT_AVAILABLE));
    a.finish(op);
    a.finish(unnamed_op);
    assert_eq!(lab.server.open_infos(None).len(), 1);
    let first = again(&mut b, &lost).unwrap();
    assert_eq!(first.action, CreateAction::CREATED);
    assert_eq!(again(&mut b, &lost).unwrap(), first);
    assert_eq!(make(&mut b, &unnamed).unwrap().action, CreateAction::CREATED);
    // If the connection was the last of the session, the CREATE leaves nothing behind.
    let next = || {
        let open = file("next").share(ShareAccess::empty()).disposition(CreateDisposition::CREATE);
        open.context(wanted(0, [0x9f; 16]))
    };
    let mut c = lab.client();
    let op = c.begin(Command::CREATE, &next().body());
    c.disconnect();
    c.finish(op);
    let mut d = lab.client();
    assert_eq!(again(&mut d, &next()).unwrap().action, CreateAction::CREATED);
}

#[test]
fn a_replay_reclaims_an_open_after_the_last_connection_is_lost() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let first = make(&mut a, &new()).unwrap();
    a.disconnect();
    let mut other = lab.back("second-user", "second-secret", 0);
    assert_eq!(again(&mut other, &new()), Err(NtStatus::ACCESS_DENIED));
    let mut b = lab.back("vol-user", "vol-secret", 0);
    assert_eq!(make(&mut b, &new()), DUPLICATE);
    assert_eq!(again(&mut b, &new()).unwrap(), first);
    write(&mut b, first.id, 0, b"x").unwrap();
    assert_eq!(read(&mut b, first.id, 0, 1).unwrap(), b"x");
    // An open that another session of the same user still holds belongs to that session.
    let next = Open { name: "next", ..new() };
    let next_made = make(&mut b, &next).unwrap();
    let mut c = lab.back("vol-user", "vol-secret", 0);
    assert_eq!(again(&mut c, &next), DUPLICATE);
    b.disconnect();
    assert_eq!(again(&mut c, &next).unwrap(), next_made);
}

#[test]
fn without_caching_a_replayed_create_is_a_new_create() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let shared = || new().share(ShareAccess(7)).disposition(CreateDisposition::OPEN_IF);
    let first = make(&mut a, &shared()).unwrap();
    assert_ne!(make(&mut a, &shared()).unwrap().id, first.id);
    assert_ne!(again(&mut a, &shared()).unwrap().id, first.id);
}

#[test]
fn a_waiting_create_stays_in_flight_after_its_connection_is_lost() {
    let mut lab = Lab::caching();
    let mut holder = lab.client();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let shared = || file("f").context(wanted(0, GUID));
    let held = make(&mut holder, &file("f")).unwrap();
    let answer = a.call(Command::CREATE, &shared().body()).unwrap();
    assert_eq!(answer.status(), NtStatus::PENDING);
    assert_eq!(again(&mut b, &shared()), Err(NtStatus::FILE_NOT_AVAILABLE));
    assert_eq!(make(&mut b, &shared()), DUPLICATE);
    a.disconnect();
    for now in [start(), start() + Duration::from_secs(1)] {
        let _ = lab.server.handle_timeout(now);
        assert_eq!(again(&mut b, &shared()), Err(NtStatus::FILE_NOT_AVAILABLE));
        assert_eq!(make(&mut b, &shared()), DUPLICATE);
    }
    lab.deliver(&mut [&mut holder, &mut a, &mut b]);
    holder.answers.clear();
    close(&mut holder, held.id).unwrap();
    let made = again(&mut b, &shared()).unwrap();
    assert!(made.durable.is_some());
    assert_eq!(again(&mut b, &shared()).unwrap(), made);
}
