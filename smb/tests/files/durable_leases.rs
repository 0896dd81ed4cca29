//! Opens that are durable because of a lease.

use std::sync::Barrier;
use std::thread;

use forebay_smb::fs::FsOpKind;
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{self, CreateOptions, OplockLevel};
use forebay_smb::wire::create_context::{
    DurableFlags, Lease, LeaseFlags, LeaseState, LeaseV2, RequestContext, ResponseContext,
};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::name_info::FileRenameInformation;
use forebay_smb::wire::{AccessMask, Command, ShareAccess};

use crate::calls::{
    EXCLUSIVE, Lab, NOW_OR_NEVER, Open, UNLOCK, close, file, lock, rename, set_file, success, write,
};
use crate::durable::{make, wanted};
use crate::support::{Answer, Client, start};

const GUID: [u8; 16] = [0x1e; 16];
const RH: LeaseState = LeaseState::READ_CACHING.union(LeaseState::HANDLE_CACHING);
const RWH: LeaseState = RH.union(LeaseState::WRITE_CACHING);

fn lease(key: u8, lease_state: LeaseState) -> Lease {
    Lease { lease_key: [key; 16], lease_state, lease_flags: LeaseFlags::empty(), v2: None }
}

/// Sends the open with a lease. Returns the open, the lease's state, and whether the open is durable.
fn leased(
    client: &mut Client,
    open: &Open<'_>,
    lease: Lease,
) -> Result<(FileId, LeaseState, bool), NtStatus> {
    granted(&ask(client, open, lease))
}

fn ask(client: &mut Client, open: &Open<'_>, lease: Lease) -> Answer {
    let mut body = open.clone().context(RequestContext::Lease(lease)).body();
    body[3] = OplockLevel::LEASE.0;
    client.call(Command::CREATE, &body).unwrap()
}

fn granted(answer: &Answer) -> Result<(FileId, LeaseState, bool), NtStatus> {
    success(answer)?;
    let response = create::Response::parse(&answer.message).unwrap();
    let state = response.contexts.iter().find_map(|context| match context {
        ResponseContext::Lease(lease) => Some(lease.lease_state),
        _ => None,
    });
    let durable = response.contexts.iter().any(|c| matches!(c, ResponseContext::DurableHandleV2 { .. }));
    Ok((response.file_id, state.expect("a lease"), durable))
}

fn durable(client: &mut Client, name: &str, state: LeaseState) -> FileId {
    let (id, granted, durable) =
        leased(client, &file(name).context(wanted(0, GUID)), lease(1, state)).unwrap();
    assert_eq!((granted, durable), (state, true));
    id
}

fn claim(name: &str, file_id: FileId) -> Open<'_> {
    let flags = DurableFlags::empty();
    file(name).context(RequestContext::DurableHandleReconnectV2 { file_id, create_guid: GUID, flags })
}

fn back(lab: &mut Lab) -> Client {
    lab.back("vol-user", "vol-secret", 0)
}

/// An open without oplock or lease.
fn plain(client: &mut Client, open: &Open<'_>) -> FileId {
    let mut body = open.body();
    body[3] = OplockLevel::NONE.0;
    let answer = client.call(Command::CREATE, &body).unwrap();
    success(&answer).unwrap();
    create::Response::parse(&answer.message).unwrap().file_id
}

const NOT_FOUND: NtStatus = NtStatus::OBJECT_NAME_NOT_FOUND;

#[test]
fn an_open_is_reclaimed_only_by_its_client_with_its_lease_and_name() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let id = durable(&mut a, "f", RWH);
    lock(&mut a, id, &[(0, 1, EXCLUSIVE | NOW_OR_NEVER)]).unwrap();
    a.disconnect();
    let mut other = lab.client_of(9);
    assert_eq!(leased(&mut other, &claim("f", id), lease(1, RWH)).unwrap_err(), NOT_FOUND, "another client");
    let mut b = back(&mut lab);
    assert_eq!(make(&mut b, &claim("f", id)).unwrap_err(), NOT_FOUND, "no lease");
    assert_eq!(leased(&mut b, &claim("f", id), lease(2, RWH)).unwrap_err(), NOT_FOUND, "another lease");
    let version_2 = Lease { v2: Some(LeaseV2 { parent_lease_key: [0; 16], epoch: 0 }), ..lease(1, RWH) };
    assert_eq!(leased(&mut b, &claim("f", id), version_2).unwrap_err(), NOT_FOUND);
    let wrong_name = leased(&mut b, &claim("g", id), lease(1, RWH));
    assert_eq!(wrong_name.unwrap_err(), NtStatus::INVALID_PARAMETER);
    let again = leased(&mut b, &claim("f", id), lease(1, LeaseState::empty()));
    assert_eq!(again, Ok((id, RWH, false)), "the requested state is ignored");
    lock(&mut b, id, &[(0, 1, UNLOCK)]).unwrap();
}

#[test]
fn a_preserved_open_survives_opens_that_its_lease_permits() {
    for (state, open, stays) in [
        (RH, file("f"), true),
        (RH, file("f").share(ShareAccess::empty()), false),
        (RWH, file("f").access(AccessMask::FILE_READ_ATTRIBUTES), true),
        (RWH, file("f").access(AccessMask::FILE_READ_DATA), false),
    ] {
        let mut lab = Lab::caching();
        let mut a = lab.client();
        let id = durable(&mut a, "f", state);
        a.disconnect();
        let mut other = lab.client_of(9);
        plain(&mut other, &open);
        assert_eq!(lab.server.open_infos(None).len(), 1 + usize::from(stays));
        let mut b = back(&mut lab);
        let again = leased(&mut b, &claim("f", id), lease(1, state));
        let expected = if stays { Ok((id, state, false)) } else { Err(NOT_FOUND) };
        assert_eq!(again, expected, "{state:?} {:?}", open.access);
    }
}

#[test]
fn an_open_is_not_reclaimed_after_a_change_broke_its_lease() {
    for renames in [false, true] {
        let mut lab = Lab::caching();
        let mut a = lab.client();
        let id = durable(&mut a, "f", RH);
        a.disconnect();
        let mut other = lab.client_of(9);
        let theirs = plain(&mut other, &file("f"));
        if renames {
            rename(&mut other, theirs, "g", false).unwrap();
        } else {
            write(&mut other, theirs, 0, b"x").unwrap();
        }
        let mut b = back(&mut lab);
        assert_eq!(leased(&mut b, &claim("f", id), lease(1, RH)).unwrap_err(), NOT_FOUND);
        let ops = lab.server.handle_timeout(start());
        assert!(matches!(ops.as_slice(), [FsOpKind::Close { unlink: None, .. }]), "renames: {renames}");
        assert_eq!(lab.server.open_infos(None).len(), 1);
    }
}

#[test]
fn a_conflicting_open_ends_preserved_opens_and_deletes_their_names() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let f = plain(&mut a, &file("f"));
    for name in ["g", "h"] {
        set_file(&mut a, f, FileInformationClass::FILE_LINK_INFORMATION, |out| {
            let file_name = name.to_owned();
            FileRenameInformation { replace_if_exists: false, root_directory: 0, file_name }.encode(out);
        })
        .unwrap();
    }
    close(&mut a, f).unwrap();
    for (name, guid) in [("f", GUID), ("g", [0x1f; 16])] {
        let doomed = file(name).option(CreateOptions::DELETE_ON_CLOSE).context(wanted(0, guid));
        let (_, _, durable) = leased(&mut a, &doomed, lease(1, RH)).unwrap();
        assert!(durable);
    }
    a.disconnect();
    assert_eq!(lab.server.open_infos(None).len(), 2, "both are preserved");
    let mut other = lab.client_of(9);
    plain(&mut other, &file("h").share(ShareAccess::empty()));
    let left = ["f", "g", "h"].map(|name| lab.memory.contents(name).is_some());
    assert_eq!(left, [false, false, true]);
}

#[test]
fn locked_opens_are_preserved_only_with_write_caching() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let id = durable(&mut a, "f", RH);
    lock(&mut a, id, &[(0, 1, EXCLUSIVE | NOW_OR_NEVER)]).unwrap();
    a.disconnect();
    assert!(lab.server.open_infos(None).is_empty());
}

#[test]
fn a_replayed_create_must_not_name_another_lease() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let first = durable(&mut a, "f", RWH);
    let batch = make(&mut a, &file("batch").context(wanted(0, [2; 16]))).unwrap();
    a.replay = true;
    let denied = Err(NtStatus::ACCESS_DENIED);
    let f = file("f").context(wanted(0, GUID));
    assert_eq!(leased(&mut a, &f, lease(2, RWH)), denied, "another lease");
    assert_eq!(leased(&mut a, &f, lease(1, RH)), Ok((first, RWH, true)));
    assert_eq!(make(&mut a, &f).unwrap().id, first, "without a lease");
    let b = file("batch").context(wanted(0, [2; 16]));
    assert_eq!(leased(&mut a, &b, lease(1, RH)), denied, "it has an oplock");
    let mut body = b.body();
    body[3] = OplockLevel::NONE.0;
    let answer = a.call(Command::CREATE, &body).unwrap();
    let response = create::Response::parse(&answer.message).unwrap();
    assert_eq!((response.file_id, response.oplock_level), (batch.id, OplockLevel::NONE));
    assert!(response.contexts.is_empty(), "a client that asks for less gets less");
    assert_eq!(make(&mut a, &b).unwrap(), batch, "the granted oplock stays");
}

/// With many opens, preserving them takes long enough for another open to interleave.
#[test]
fn an_open_racing_a_disconnect_is_granted_the_requested_lease() {
    const FILES: usize = 50;
    let names: Vec<String> = (0..FILES).map(|number| format!("f{number}")).collect();
    for round in 0..200 {
        let mut lab = Lab::caching();
        let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
        for (name, key) in names.iter().zip(1..) {
            let (_, state, _) =
                leased(&mut a, &file(name).context(wanted(0, [key; 16])), lease(key, RWH)).unwrap();
            assert_eq!(state, RWH);
        }
        let start = Barrier::new(2);
        let (name, key) = (&names[round % FILES], 100);
        let mut answer = thread::scope(|threads| {
            threads.spawn(|| {
                start.wait();
                a.disconnect();
            });
            start.wait();
            ask(&mut b, &file(name), lease(key, RWH))
        });
        if answer.status() == NtStatus::PENDING {
            lab.deliver(&mut [&mut a, &mut b]);
            answer = b.answers.pop_front().expect("no client is left to wait for");
        }
        assert_eq!(granted(&answer).unwrap().1, RWH, "round {round}");
    }
}
