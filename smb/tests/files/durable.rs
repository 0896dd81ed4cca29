//! Opens that outlive their client's connections.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_smb::engine::InUse;
use forebay_smb::fs::{FsHandle, FsOpKind};
use forebay_smb::ids::FileId;
use forebay_smb::limits::{DURABLE_TIMEOUT_DEFAULT_MS, DURABLE_TIMEOUT_MS_MAX, KEPT_OPENS_PER_VOLUME_MAX};
use forebay_smb::status::NtStatus;
use forebay_smb::time::Due;
use forebay_smb::wire::create::{CreateAction, CreateDisposition, CreateOptions, OplockLevel};
use forebay_smb::wire::create_context::{DurableFlags, RequestContext, ResponseContext};
use forebay_smb::wire::{Command, Dialect, ShareAccess, create};

use crate::calls::{
    EXCLUSIVE, Lab, NEWEST, NOW_OR_NEVER, Open, UNLOCK, directory, file, flush, lock, lock_waits, read,
    success, write,
};
use crate::support::{Client, start, volume};

const SECOND: Duration = Duration::from_secs(1);
const GUID: [u8; 16] = [0xc7; 16];
const LOGOFF: [u8; 4] = [4, 0, 0, 0];

/// The parts of a CREATE's answer that the tests check.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    pub id: FileId,
    pub action: CreateAction,
    pub oplock: OplockLevel,
    /// The timeout in milliseconds; 0 for version 1.
    pub durable: Option<u32>,
}

pub fn make(client: &mut Client, open: &Open<'_>) -> Result<Made, NtStatus> {
    let answer = client.call(Command::CREATE, &open.body()).unwrap();
    success(&answer)?;
    Ok(made(&answer.message))
}

pub fn made(message: &[u8]) -> Made {
    let response = create::Response::parse(message).unwrap();
    let durable = response.contexts.iter().find_map(|context| match context {
        ResponseContext::DurableHandle => Some(0),
        ResponseContext::DurableHandleV2 { timeout_ms, flags } => {
            assert!(flags.is_empty(), "never persistent");
            Some(*timeout_ms)
        }
        _ => None,
    });
    Made { id: response.file_id, action: response.create_action, oplock: response.oplock_level, durable }
}

pub fn wanted(timeout_ms: u32, create_guid: [u8; 16]) -> RequestContext<'static> {
    RequestContext::DurableHandleRequestV2 { timeout_ms, flags: DurableFlags::PERSISTENT, create_guid }
}

fn claim(file_id: FileId, create_guid: [u8; 16]) -> Open<'static> {
    let context =
        RequestContext::DurableHandleReconnectV2 { file_id, create_guid, flags: DurableFlags::empty() };
    // The server ignores everything else in the request.
    file("no such file").options(CreateOptions(u32::MAX)).context(context)
}

fn durable(client: &mut Client, name: &str) -> FileId {
    let made = make(client, &file(name).context(wanted(0, GUID))).unwrap();
    assert_eq!(made.durable, Some(DURABLE_TIMEOUT_DEFAULT_MS));
    made.id
}

fn back(lab: &mut Lab) -> Client {
    lab.back("vol-user", "vol-secret", 0)
}

/// Has the lab's backend carry out the operations that are due.
fn tick(lab: &Lab, now: Instant) -> Vec<bool> {
    let mut backend = lab.memory.backend();
    let mut unlinked = Vec::new();
    for op in lab.server.handle_timeout(now) {
        let FsOpKind::Close { unlink, .. } = &op else { panic!("only ends") };
        unlinked.push(unlink.is_some());
        backend(op).map(drop).unwrap();
    }
    unlinked
}

#[test]
fn a_reconnecting_client_reclaims_its_open_and_locks() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let open = file("f").share(ShareAccess::empty());
    for (request, again, granted) in [
        (wanted(0, GUID), None, Some(DURABLE_TIMEOUT_DEFAULT_MS)),
        (RequestContext::DurableHandleRequest, Some(()), Some(0)),
    ] {
        let made = make(&mut a, &open.clone().context(request)).unwrap();
        assert_eq!((made.oplock, made.durable), (OplockLevel::BATCH, granted));
        write(&mut a, made.id, 0, b"data").unwrap();
        lock(&mut a, made.id, &[(0, 1, EXCLUSIVE | NOW_OR_NEVER)]).unwrap();
        lab.memory.take_log();
        a.disconnect();
        assert!(lab.memory.take_log().is_empty(), "nothing is closed");
        let infos = lab.server.open_infos(Some("vol"));
        assert_eq!((infos.len(), infos[0].session_id, infos[0].byte_range_locks), (1, 0, 1));
        assert!(lab.server.next_timeout().is_some());
        a = back(&mut lab);
        let claim = match again {
            None => claim(made.id, GUID),
            Some(()) => file("").context(RequestContext::DurableHandleReconnect(made.id)),
        };
        let again = make(&mut a, &claim).unwrap();
        let opened = Made { action: CreateAction::OPENED, durable: None, ..made.clone() };
        assert_eq!(again, opened);
        assert_eq!(read(&mut a, made.id, 0, 9).unwrap(), b"data");
        lock(&mut a, made.id, &[(0, 1, UNLOCK)]).unwrap();
        assert_eq!(lab.server.next_timeout(), None);
        // And a second time: the open stays durable.
        a.disconnect();
        a = back(&mut lab);
        make(&mut a, &claim).unwrap();
        crate::calls::close(&mut a, made.id).unwrap();
        assert!(lab.server.open_infos(None).is_empty());
    }
}

#[test]
fn only_opens_with_handle_caching_are_durable() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let made = make(&mut a, &file("f").context(wanted(0, GUID))).unwrap();
    assert_eq!((made.oplock, made.durable), (OplockLevel::NONE, None));
    a.disconnect();
    assert!(lab.server.open_infos(None).is_empty() && lab.server.next_timeout().is_none());
    let mut a = back(&mut lab);
    assert_eq!(make(&mut a, &file("f").context(RequestContext::DurableHandleReconnect(made.id))), NOT_FOUND);
    let mut lab = Lab::caching();
    let mut a = lab.client();
    assert_eq!(make(&mut a, &directory("d").context(wanted(0, GUID))).unwrap().durable, None);
    assert_eq!(make(&mut a, &file("plain")).unwrap().durable, None);
    let mut old = lab.dialect(Dialect::SMB2_1);
    assert_eq!(make(&mut old, &file("old").context(wanted(0, GUID))).unwrap().durable, None, "SMB 3.x only");
    let first = file("first").context(RequestContext::DurableHandleRequest);
    assert_eq!(make(&mut old, &first).unwrap().durable, Some(0));
    a.disconnect();
    assert!(lab.server.open_infos(None).iter().all(|open| open.session_id != 0), "nothing is preserved");
}

const NOT_FOUND: Result<Made, NtStatus> = Err(NtStatus::OBJECT_NAME_NOT_FOUND);

#[test]
fn a_disconnected_open_can_be_flushed_by_its_user_before_reclaim() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let id = durable(&mut a, "f");
    write(&mut a, id, 0, b"data").unwrap();
    let mut b = back(&mut lab);
    assert_eq!(flush(&mut b, id), Err(NtStatus::FILE_CLOSED), "another session has it");
    a.disconnect();
    let mut other = lab.back("second-user", "second-secret", 0);
    assert_eq!(flush(&mut other, id), Err(NtStatus::FILE_CLOSED));
    let unknown = FileId { volatile: id.volatile ^ 1, ..id };
    assert_eq!(flush(&mut b, unknown), Err(NtStatus::FILE_CLOSED));
    lab.memory.take_log();
    flush(&mut b, id).unwrap();
    assert!(!lab.memory.take_log().is_empty(), "the backend flushed it");
    // It is still kept.
    assert_eq!(make(&mut b, &claim(id, GUID)).unwrap().id, id);
    crate::calls::close(&mut b, id).unwrap();
    assert_eq!(flush(&mut b, id), Err(NtStatus::FILE_CLOSED));
}

#[test]
fn only_its_user_reclaims_an_open_by_file_id_and_create_guid() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let id = durable(&mut a, "f");
    let mut b = back(&mut lab);
    // Its session still exists for the server, so the claim waits for a moment.
    let waits = b.call(Command::CREATE, &claim(id, GUID).body()).unwrap();
    assert_eq!(waits.status(), NtStatus::PENDING);
    for (now, answers) in [(start(), 0), (start() + SECOND, 1)] {
        assert!(lab.server.handle_timeout(now).is_empty());
        lab.deliver(&mut [&mut a, &mut b]);
        assert_eq!(b.answers.len(), answers);
    }
    let answer = b.answers.pop_front().unwrap();
    assert_eq!(answer.status(), NtStatus::OBJECT_NAME_NOT_FOUND, "it is in use");
    assert_eq!(make(&mut a, &claim(id, GUID)), NOT_FOUND, "by the client itself");
    a.disconnect();
    assert_eq!(make(&mut b, &claim(id, [0; 16])), NOT_FOUND);
    let unknown = FileId { persistent: id.persistent + 1, ..id };
    assert_eq!(make(&mut b, &claim(unknown, GUID)), NOT_FOUND);
    let two = claim(id, GUID).context(RequestContext::DurableHandleReconnect(id));
    assert_eq!(make(&mut b, &two), Err(NtStatus::INVALID_PARAMETER));
    let mut other = lab.back("second-user", "second-secret", 0);
    assert_eq!(make(&mut other, &claim(id, GUID)), Err(NtStatus::ACCESS_DENIED));
    let half = FileId { volatile: 0, ..id };
    assert_eq!(make(&mut b, &claim(half, GUID)).unwrap().id, id, "only the persistent half counts");
    assert_eq!(make(&mut b, &claim(id, GUID)), NOT_FOUND, "it is reclaimed once");
}

#[test]
fn a_disconnected_open_is_preserved_for_the_granted_timeout() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    for (asked, granted) in
        [(1000, 1000), (u32::MAX, DURABLE_TIMEOUT_MS_MAX), (0, DURABLE_TIMEOUT_DEFAULT_MS)]
    {
        let made = make(&mut a, &file("f").context(wanted(asked, GUID))).unwrap();
        assert_eq!(made.durable, Some(granted));
        a.disconnect();
        let until = start() + Duration::from_millis(granted.into());
        assert_eq!(lab.server.next_timeout(), Some(Due::At(until)));
        assert!(tick(&lab, until - Duration::from_nanos(1)).is_empty());
        assert_eq!(tick(&lab, until), [false]);
        assert!(lab.server.open_infos(None).is_empty());
        a = back(&mut lab);
        assert_eq!(make(&mut a, &claim(made.id, GUID)), NOT_FOUND);
    }
    let doomed = file("doomed").option(CreateOptions::DELETE_ON_CLOSE).context(wanted(1000, GUID));
    make(&mut a, &doomed).unwrap();
    a.disconnect();
    assert!(lab.memory.contents("doomed").is_some());
    assert_eq!(tick(&lab, start() + SECOND), [true]);
    assert!(lab.memory.contents("doomed").is_none());
}

#[test]
fn a_durable_open_survives_logoff() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let id = durable(&mut a, "f");
    make(&mut a, &file("g")).unwrap();
    success(&b.call(Command::LOGOFF, &LOGOFF).unwrap()).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lab.server.open_infos(None).len(), 1);
    assert!(lab.server.session_infos().is_empty());
    let mut again = back(&mut lab);
    assert_eq!(make(&mut again, &claim(id, GUID)).unwrap().id.persistent, id.persistent);
    // Unless it is claimed, it ends when its timeout expires.
    success(&again.call(Command::LOGOFF, &LOGOFF).unwrap()).unwrap();
    tick(&lab, start() + Duration::from_millis(DURABLE_TIMEOUT_DEFAULT_MS.into()));
    assert!(lab.server.open_infos(None).is_empty());
}

#[test]
fn a_deliberately_ended_open_is_not_preserved() {
    let mut lab = Lab::caching();
    for case in 0..4 {
        let mut a = lab.client();
        durable(&mut a, "f");
        match case {
            0 => success(&a.call(Command::TREE_DISCONNECT, &LOGOFF).unwrap()).unwrap(),
            1 => {
                lab.server.close_session(a.session_id);
                for (_, mail) in lab.server.take_mail() {
                    a.connection.deliver(a.now, mail).unwrap_err();
                }
            }
            2 => {
                // The connection is lost before it learns about the end of its session.
                lab.server.close_session(a.session_id);
            }
            _ => lab.server.stop_keeping(),
        }
        a.disconnect();
        assert!(lab.server.open_infos(None).is_empty(), "case {case}");
        let _ = lab.server.take_mail();
    }
}

#[test]
fn preserved_opens_end_with_their_volume_and_with_the_server() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    durable(&mut a, "f");
    a.disconnect();
    // A client that is away for a moment still uses its volume.
    assert_eq!(lab.server.remove_volume("vol", false), Err(InUse { open_files: 1 }));
    lab.server.remove_volume("vol", true).unwrap();
    assert!(lab.server.open_infos(None).is_empty());
    assert_eq!(tick(&lab, start()), [false]);
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let doomed = file("doomed").option(CreateOptions::DELETE_ON_CLOSE).context(wanted(0, GUID));
    make(&mut a, &doomed).unwrap();
    a.disconnect();
    lab.server.stop_keeping();
    assert_eq!(lab.server.next_timeout(), Some(Due::Now));
    assert_eq!(tick(&lab, start()), [true]);
}

#[test]
fn a_client_with_a_previous_session_id_reclaims_its_open_at_once() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let id = durable(&mut a, "f");
    make(&mut a, &file("not durable")).unwrap();
    lab.memory.take_log();
    let mut b = lab.back("vol-user", "vol-secret", a.session_id);
    assert_eq!(lab.memory.take_log(), ["close"], "the open that is not durable");
    assert_eq!(make(&mut b, &claim(id, GUID)).unwrap().id, id);
    assert_eq!(read(&mut a, id, 0, 1), Err(NtStatus::USER_SESSION_DELETED));
    for (_, mail) in lab.server.take_mail() {
        a.connection.deliver(a.now, mail).unwrap();
    }
    a.disconnect();
    write(&mut b, id, 0, b"x").unwrap();
    assert_eq!(lab.server.open_infos(None).len(), 1);
}

#[test]
fn losing_one_of_two_channels_does_not_disconnect_an_open() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let mut b = lab.channel(&a);
    let id = durable(&mut a, "f");
    a.disconnect();
    assert_eq!(lab.server.next_timeout(), None);
    write(&mut b, id, 0, b"x").unwrap();
    b.disconnect();
    assert!(lab.server.next_timeout().is_some());
}

#[test]
fn a_connected_client_does_not_wait_for_a_disconnected_one() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let mut b = lab.client();
    let id = make(&mut a, &file("f").share(ShareAccess::empty()).context(wanted(0, GUID))).unwrap().id;
    let doomed = file("doomed").option(CreateOptions::DELETE_ON_CLOSE).context(wanted(0, [1; 16]));
    make(&mut a, &doomed).unwrap();
    a.disconnect();
    assert_eq!(make(&mut b, &file("f")).unwrap().action, CreateAction::OPENED);
    // The file was to be deleted at its last close; this happens before another file of its name is created.
    assert_eq!(make(&mut b, &file("doomed")).unwrap().action, CreateAction::CREATED);
    assert!(lab.memory.contents("doomed").is_some());
    assert_eq!(lab.server.open_infos(None).len(), 2);
    let mut a = back(&mut lab);
    assert_eq!(make(&mut a, &claim(id, GUID)), NOT_FOUND);
}

#[test]
fn preserved_opens_are_limited_per_volume() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    for number in 0..=KEPT_OPENS_PER_VOLUME_MAX {
        let mut guid = GUID;
        guid[..8].copy_from_slice(&number.to_le_bytes());
        let name = number.to_string();
        let new = file(&name).disposition(CreateDisposition::CREATE).context(wanted(0, guid));
        assert!(make(&mut a, &new).unwrap().durable.is_some());
    }
    lab.server.add_volume(volume("third", FsHandle(Arc::new(())))).unwrap();
    let mut other = Client::new(&lab.server, 777, NEWEST);
    other.backend = lab.memory.backend();
    success(&other.negotiate().unwrap()).unwrap();
    success(&other.logon("third-user", "third-secret", 0).unwrap()).unwrap();
    success(&other.tree_connect("third").unwrap()).unwrap();
    durable(&mut other, "theirs");
    a.disconnect();
    let of = |volume| lab.server.open_infos(Some(volume)).len() as u64;
    assert_eq!(of("vol"), KEPT_OPENS_PER_VOLUME_MAX);
    other.disconnect();
    assert_eq!(of("third"), 1, "one volume leaves room for others");
    assert_eq!(a.dialect, NEWEST);
}

#[test]
fn a_lock_waiting_on_a_lost_connection_is_never_granted() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let id = durable(&mut a, "f");
    lock(&mut a, id, &[(0, 1, EXCLUSIVE | NOW_OR_NEVER)]).unwrap();
    // An open can wait for itself only with a lock on a range that it has locked itself.
    lock_waits(&mut a, id, (0, 1, EXCLUSIVE));
    let mut b = lab.back("vol-user", "vol-secret", a.session_id);
    make(&mut b, &claim(id, GUID)).unwrap();
    lock(&mut b, id, &[(0, 1, UNLOCK)]).unwrap();
    for (to, mail) in lab.server.take_mail() {
        assert_eq!(to.0, a.id);
        a.connection.deliver(a.now, mail).unwrap();
        a.run().unwrap();
    }
    lock(&mut b, id, &[(0, 1, EXCLUSIVE | NOW_OR_NEVER)]).unwrap();
}

#[test]
fn either_version_reclaims_an_open_with_the_right_create_guid() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let second = durable(&mut a, "second");
    let first = make(&mut a, &file("first").context(RequestContext::DurableHandleRequest)).unwrap().id;
    a.disconnect();
    let mut b = back(&mut lab);
    assert_eq!(make(&mut b, &claim(first, GUID)), NOT_FOUND);
    assert_eq!(make(&mut b, &claim(first, [0; 16])).unwrap().id, first, "version 1 has a zero CreateGuid");
    let by_version_1 = file("second").context(RequestContext::DurableHandleReconnect(second));
    assert_eq!(make(&mut b, &by_version_1).unwrap().id, second);
}

#[test]
fn a_reclaim_waits_until_the_old_connection_is_lost() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let id = durable(&mut a, "f");
    let mut b = back(&mut lab);
    let waits = b.call(Command::CREATE, &claim(id, GUID).body()).unwrap();
    assert_eq!(waits.status(), NtStatus::PENDING);
    a.disconnect();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(made(&b.answers.pop_front().unwrap().message).id, id);
    write(&mut b, id, 0, b"x").unwrap();
}

#[test]
fn a_create_waits_until_the_backend_has_unlinked_the_name_of_an_expired_open() {
    let mut lab = Lab::caching();
    let mut a = lab.client();
    let doomed = file("doomed").option(CreateOptions::DELETE_ON_CLOSE).context(wanted(0, GUID));
    make(&mut a, &doomed).unwrap();
    a.disconnect();
    let mut ops = lab.server.handle_timeout(start() + Duration::from_secs(1000));
    let mut b = back(&mut lab);
    let waits = b.call(Command::CREATE, &file("doomed").body()).unwrap();
    assert_eq!(waits.status(), NtStatus::PENDING);
    let op = ops.pop().expect("an end");
    assert!(ops.is_empty());
    (lab.memory.backend())(op).map(drop).unwrap();
    assert_eq!(lab.memory.contents("doomed"), None);
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(made(&b.answers.pop_front().unwrap().message).action, CreateAction::CREATED);
}
