//! CANCEL: only the session that sent a request can cancel it.

use forebay_smb::engine::{Encryption, Protection, ServerConfig};
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::{Command, Header, HeaderFlags, Ids};

use crate::calls::{EXCLUSIVE, Lab, UNLOCK, file, lock, lock_body, success};
use crate::support::{Client, config};

/// Sends a LOCK of `client` that waits. Returns its AsyncId.
fn waits(client: &mut Client, id: FileId) -> u64 {
    let interim = client.call(Command::LOCK, &lock_body(id, &[(0, 10, EXCLUSIVE)])).unwrap();
    assert_eq!(interim.status(), NtStatus::PENDING);
    interim.header.async_id().expect("an interim response")
}

fn cancel(session_id: u64, async_id: u64, flags: HeaderFlags) -> Header {
    let ids = Ids::Async { async_id };
    Header {
        session_id,
        ids,
        flags: flags | HeaderFlags::ASYNC_COMMAND,
        ..Header::request(Command::CANCEL, 0)
    }
}

/// Sends a CANCEL without the protection that `client` uses. Returns whether the request was cancelled.
fn in_clear(client: &mut Client, header: Header) -> bool {
    let message = client.message(header, &[4, 0, 0, 0]);
    client.send_raw(message).expect("the connection stays open");
    cancelled(client)
}

/// Sends a CANCEL with the protection that `client` uses. Returns whether the request was cancelled.
fn protected(client: &mut Client, header: Header) -> bool {
    let message = client.message(header, &[4, 0, 0, 0]);
    client.send(message).expect("the connection stays open");
    cancelled(client)
}

fn cancelled(client: &mut Client) -> bool {
    match client.answers.pop_front() {
        None => false,
        Some(answer) => {
            assert_eq!(answer.status(), NtStatus::CANCELLED);
            true
        }
    }
}

const NONE: HeaderFlags = HeaderFlags::empty();

#[test]
fn a_cancel_with_a_wrong_signature_is_ignored() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    let waiting = waits(&mut b, fb);
    let session = b.session_id;
    assert!(!in_clear(&mut b, cancel(session, waiting, HeaderFlags::SIGNED)), "signed with zeros");
    b.sign = true;
    assert!(protected(&mut b, cancel(session, waiting, NONE)));
}

#[test]
fn an_unsigned_cancel_is_ignored_where_signing_is_required() {
    let mut lab = Lab::with(|volume| volume.protection = Protection::Sign);
    let (mut a, mut b) = (lab.client(), lab.client());
    (a.sign, b.sign) = (true, true);
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    let waiting = waits(&mut b, fb);
    let session = b.session_id;
    assert!(!in_clear(&mut b, cancel(session, waiting, NONE)));
    assert!(protected(&mut b, cancel(session, waiting, NONE)));
    lock(&mut a, fa, &[(0, 10, UNLOCK)]).unwrap();
}

#[test]
fn an_unsealed_cancel_is_ignored_where_sealing_is_required() {
    let mut lab = Lab::of(ServerConfig { encryption: Encryption::Required, ..config() }, |_| {});
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    let waiting = waits(&mut b, fb);
    let session = b.session_id;
    assert!(!in_clear(&mut b, cancel(session, waiting, NONE)));
    assert!(protected(&mut b, cancel(session, waiting, NONE)));
}

#[test]
fn a_sealed_request_is_not_cancelled_by_an_unsealed_cancel() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    b.seal = true;
    let waiting = waits(&mut b, fb);
    let session = b.session_id;
    assert!(!in_clear(&mut b, cancel(session, waiting, NONE)), "the session need not seal, but it does");
    assert!(protected(&mut b, cancel(session, waiting, NONE)));
}

#[test]
fn a_cancel_from_another_session_is_ignored() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    let waiting = waits(&mut b, fb);
    let first = b.session_id;
    // A second session on the same connection.
    b.session_id = 0;
    success(&b.logon("vol-user", "vol-secret", 0).unwrap()).unwrap();
    let second = b.session_id;
    assert_ne!(first, second);
    assert!(!in_clear(&mut b, cancel(second, waiting, NONE)), "another session's");
    assert!(!in_clear(&mut b, cancel(0, waiting, NONE)), "no session");
    assert!(!in_clear(&mut b, cancel(second + 1, waiting, NONE)), "an unknown session");
    assert!(in_clear(&mut b, cancel(first, waiting, NONE)));
}
