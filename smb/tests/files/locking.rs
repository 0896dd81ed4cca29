//! LOCK, over one connection and over two.

use forebay_smb::status::NtStatus;
use forebay_smb::wire::lock::LockFlags;
use forebay_smb::wire::{Command, Header, HeaderFlags, Ids};

use crate::calls::{
    EXCLUSIVE, Lab, NOW_OR_NEVER, SHARED, UNLOCK, close, file, lock, lock_body, lock_waits, read, write,
};
use crate::support::Client;

const NOW: LockFlags = EXCLUSIVE.union(NOW_OR_NEVER);

fn cancel(client: &mut Client, async_id: u64) {
    let mut header = Header::request(Command::CANCEL, 0);
    header.session_id = client.session_id;
    header.flags.insert(HeaderFlags::ASYNC_COMMAND);
    header.ids = Ids::Async { async_id };
    let message = client.message(header, &[4, 0, 0, 0]);
    client.send(message).unwrap();
}

fn answer(client: &mut Client) -> NtStatus {
    let answer = client.answers.pop_front().expect("an answer");
    assert!(answer.header.flags.contains(HeaderFlags::ASYNC_COMMAND));
    answer.status()
}

#[test]
fn locks_exclude_others_until_their_open_closes() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    write(&mut a, fa, 0, &[1; 100]).unwrap();
    lock(&mut a, fa, &[(10, 10, NOW)]).unwrap();
    assert_eq!(lock(&mut b, fb, &[(19, 1, NOW)]), Err(NtStatus::LOCK_NOT_GRANTED));
    assert_eq!(read(&mut b, fb, 0, 11), Err(NtStatus::FILE_LOCK_CONFLICT));
    assert_eq!(write(&mut b, fb, 19, b"x"), Err(NtStatus::FILE_LOCK_CONFLICT));
    assert!(read(&mut b, fb, 0, 10).is_ok() && read(&mut a, fa, 0, 50).is_ok());
    close(&mut a, fa).unwrap();
    assert!(read(&mut b, fb, 0, 11).is_ok());
    lock(&mut b, fb, &[(19, 1, NOW)]).unwrap();
}

#[test]
fn invalid_requests_are_refused() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let invalid = Err(NtStatus::INVALID_PARAMETER);
    assert_eq!(lock(&mut c, f, &[]), invalid);
    assert_eq!(lock(&mut c, f, &[(0, 0, LockFlags::empty())]), invalid);
    assert_eq!(lock(&mut c, f, &[(0, 1, UNLOCK | EXCLUSIVE)]), invalid);
    assert_eq!(lock(&mut c, f, &[(0, 1, UNLOCK | NOW_OR_NEVER)]), invalid);
    assert_eq!(lock(&mut c, f, &[(0, 1, LockFlags(!0x17))]), invalid);
    assert_eq!(lock(&mut c, f, &[(0, 1, SHARED | NOW_OR_NEVER), (0, 1, SHARED)]), invalid, "only one waits");
    assert_eq!(lock(&mut c, f, &[(u64::MAX, u64::MAX, NOW)]), Err(NtStatus::INVALID_LOCK_RANGE));
    assert_eq!(lock(&mut c, f, &[(u64::MAX, 1, NOW)]), Ok(()));
    assert_eq!(lock(&mut c, f, &[(0, 1, UNLOCK)]), Err(NtStatus::RANGE_NOT_LOCKED));
    assert_eq!(
        lock(&mut c, f, &[(0, 1, UNLOCK), (0, 1, LockFlags::empty())]),
        Err(NtStatus::RANGE_NOT_LOCKED)
    );
}

#[test]
fn several_ranges_are_locked_together_and_unlocked_in_order() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    lock(&mut c, f, &[(10, 10, NOW)]).unwrap();
    assert_eq!(lock(&mut c, f, &[(0, 10, NOW), (10, 10, NOW)]), Err(NtStatus::LOCK_NOT_GRANTED));
    lock(&mut c, f, &[(0, 10, NOW)]).expect("was rolled back");
    // Ranges before the faulty one are unlocked; later ones are not examined.
    assert_eq!(lock(&mut c, f, &[(0, 10, UNLOCK), (10, 10, NOW)]), Err(NtStatus::INVALID_PARAMETER));
    lock(&mut c, f, &[(0, 10, NOW)]).expect("was unlocked");
    assert_eq!(lock(&mut c, f, &[(5, 1, UNLOCK), (0, 10, UNLOCK)]), Err(NtStatus::RANGE_NOT_LOCKED));
    assert_eq!(lock(&mut c, f, &[(0, 10, NOW)]), Err(NtStatus::LOCK_NOT_GRANTED));
}

#[test]
fn waiting_locks_are_granted_in_order_across_connections() {
    let mut lab = Lab::new();
    let (mut a, mut b, mut c) = (lab.client(), lab.client(), lab.client());
    let (fa, fb, fc) = (file("f").id(&mut a), file("f").id(&mut b), file("f").id(&mut c));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    lock_waits(&mut b, fb, (0, 10, EXCLUSIVE));
    lock_waits(&mut c, fc, (5, 10, EXCLUSIVE));
    lab.deliver(&mut [&mut a, &mut b, &mut c]);
    assert!(b.answers.is_empty() && c.answers.is_empty());
    lock(&mut a, fa, &[(0, 10, UNLOCK)]).unwrap();
    lab.deliver(&mut [&mut a, &mut b, &mut c]);
    assert_eq!(answer(&mut b), NtStatus::SUCCESS);
    assert!(c.answers.is_empty(), "the second still waits");
    assert_eq!(lock(&mut a, fa, &[(0, 1, NOW)]), Err(NtStatus::LOCK_NOT_GRANTED));
    close(&mut b, fb).unwrap();
    lab.deliver(&mut [&mut a, &mut b, &mut c]);
    assert_eq!(answer(&mut c), NtStatus::SUCCESS);
}

#[test]
fn a_waiting_lock_can_be_cancelled() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    let async_id = lock_waits(&mut b, fb, (0, 10, EXCLUSIVE));
    assert_eq!(lock(&mut b, fb, &[(0, 10, UNLOCK)]), Err(NtStatus::RANGE_NOT_LOCKED));
    cancel(&mut b, async_id);
    assert_eq!(answer(&mut b), NtStatus::CANCELLED);
    lock(&mut a, fa, &[(0, 10, UNLOCK)]).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(b.answers.is_empty());
    lock(&mut a, fa, &[(0, 10, NOW)]).expect("the cancelled request took nothing");
}

#[test]
fn an_interim_response_is_unsigned_and_the_final_one_is_signed() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    b.sign = true;
    let interim = b.call(Command::LOCK, &lock_body(fb, &[(0, 10, EXCLUSIVE)])).unwrap();
    assert_eq!(interim.status(), NtStatus::PENDING);
    assert_eq!(
        (interim.header.flags.contains(HeaderFlags::SIGNED), interim.header.signature),
        (false, [0; 16])
    );
    lock(&mut a, fa, &[(0, 10, UNLOCK)]).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    let last = b.answers.pop_front().expect("an answer");
    assert_eq!(last.status(), NtStatus::SUCCESS);
    assert!(last.header.flags.contains(HeaderFlags::SIGNED));
}

#[test]
fn a_cancelled_lock_unblocks_the_locks_behind_it() {
    let mut lab = Lab::new();
    let (mut a, mut b, mut c) = (lab.client(), lab.client(), lab.client());
    let (fa, fb, fc) = (file("f").id(&mut a), file("f").id(&mut b), file("f").id(&mut c));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    let async_id = lock_waits(&mut b, fb, (0, 30, EXCLUSIVE));
    lock_waits(&mut c, fc, (0, 10, EXCLUSIVE));
    // Both requests are asked to retry, but the first is cancelled before it does.
    lock(&mut a, fa, &[(0, 10, UNLOCK)]).unwrap();
    cancel(&mut b, async_id);
    lab.deliver(&mut [&mut a, &mut b, &mut c]);
    assert_eq!(answer(&mut b), NtStatus::CANCELLED);
    assert_eq!(answer(&mut c), NtStatus::SUCCESS);
}

#[test]
fn a_waiting_lock_ends_with_its_open() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    lock_waits(&mut b, fb, (0, 10, EXCLUSIVE));
    close(&mut b, fb).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(answer(&mut b), NtStatus::RANGE_NOT_LOCKED);
    lock(&mut a, fa, &[(0, 10, UNLOCK)]).unwrap();
    lock(&mut a, fa, &[(0, 10, NOW)]).expect("no other client has it");
}

#[test]
fn a_lost_connection_releases_its_locks() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    lock_waits(&mut b, fb, (0, 10, EXCLUSIVE));
    a.connection.close(a.now);
    a.run().unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(answer(&mut b), NtStatus::SUCCESS);
    assert!(a.connection.is_finished());
}

#[test]
fn waiting_locks_of_a_lost_connection_are_dropped() {
    let mut lab = Lab::new();
    let (mut a, mut b, mut c) = (lab.client(), lab.client(), lab.client());
    let (fa, fb, fc) = (file("f").id(&mut a), file("f").id(&mut b), file("f").id(&mut c));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    lock_waits(&mut b, fb, (0, 10, EXCLUSIVE));
    lock_waits(&mut c, fc, (0, 10, EXCLUSIVE));
    b.connection.close(b.now);
    b.run().unwrap();
    lock(&mut a, fa, &[(0, 10, UNLOCK)]).unwrap();
    lab.deliver(&mut [&mut a, &mut b, &mut c]);
    assert_eq!(answer(&mut c), NtStatus::SUCCESS);
}

#[test]
fn a_lock_in_the_middle_of_a_compound_does_not_wait() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    lock(&mut a, fa, &[(0, 10, EXCLUSIVE)]).unwrap();
    let wait = lock_body(fb, &[(0, 10, EXCLUSIVE)]);
    let answers = crate::calls::compound(&mut b, &[(Command::LOCK, wait), (Command::ECHO, vec![4, 0, 0, 0])]);
    assert!(answers[0].status().is_error());
    lock(&mut a, fa, &[(0, 10, UNLOCK)]).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    lock(&mut a, fa, &[(0, 10, NOW)]).expect("nothing was left waiting");
}
