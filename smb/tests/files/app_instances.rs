//! Applications that move with their open files from one client to another.

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, CreateOptions, OplockLevel};
use forebay_smb::wire::create_context::RequestContext;
use forebay_smb::wire::{Dialect, ShareAccess};

use crate::calls::{EXCLUSIVE, Lab, Open, close, file, lock, read, write};
use crate::durable::{make, wanted};
use crate::support::Client;

const APPLICATION: [u8; 16] = [0xa9; 16];

/// An open that shares nothing.
fn owned(name: &str) -> Open<'_> {
    file(name).share(ShareAccess::empty()).context(RequestContext::AppInstanceId(APPLICATION))
}

fn version(open: Open<'_>, high: u64, low: u64) -> Open<'_> {
    open.context(RequestContext::AppInstanceVersion { high, low })
}

fn id(client: &mut Client, open: &Open<'_>) -> Result<FileId, NtStatus> {
    make(client, open).map(|made| made.id)
}

#[test]
fn an_app_instance_moves_its_opens_to_another_client() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let first = make(&mut a, &owned("f").context(wanted(0, [1; 16]))).unwrap();
    assert_eq!((first.oplock, first.durable.is_some()), (OplockLevel::BATCH, true));
    write(&mut a, first.id, 0, b"saved").unwrap();
    lock(&mut a, first.id, &[(0, 5, EXCLUSIVE)]).unwrap();

    let second = make(&mut b, &owned("f").context(wanted(0, [2; 16]))).unwrap();
    assert!(!lab.server.has_mail(), "no break is sent to the previous client");
    assert_eq!(read(&mut b, second.id, 0, 5).unwrap(), b"saved", "its locks are released, too");
    assert_eq!(write(&mut a, first.id, 0, b"late"), Err(NtStatus::FILE_CLOSED));
    assert_eq!(close(&mut a, first.id), Err(NtStatus::FILE_CLOSED));
    assert_eq!(lab.server.open_infos(None).len(), 1);

    // And back again.
    let third = id(&mut a, &owned("f")).unwrap();
    assert_eq!(read(&mut b, second.id, 0, 5), Err(NtStatus::FILE_CLOSED));
    close(&mut a, third).unwrap();
}

#[test]
fn takeover_requires_the_same_file_and_app_instance_on_another_client() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let (f, g) = (id(&mut a, &owned("f")).unwrap(), id(&mut a, &owned("g")).unwrap());
    assert_eq!(id(&mut a, &owned("f")), Err(NtStatus::SHARING_VIOLATION), "the same client");
    let other = file("f").share(ShareAccess::empty()).context(RequestContext::AppInstanceId([1; 16]));
    assert_eq!(id(&mut b, &other), Err(NtStatus::SHARING_VIOLATION), "another application");
    let mut old = lab.dialect(Dialect::SMB2_1);
    assert_eq!(id(&mut old, &owned("f")), Err(NtStatus::SHARING_VIOLATION), "SMB 2.1 does not have it");
    id(&mut b, &owned("f")).unwrap();
    assert_eq!(write(&mut a, f, 0, b"x"), Err(NtStatus::FILE_CLOSED));
    write(&mut a, g, 0, b"x").unwrap();
}

#[test]
fn takeover_requires_a_newer_app_instance_version() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let first = id(&mut a, &version(owned("f"), 1, 5)).unwrap();
    for open in [version(owned("f"), 1, 5), version(owned("f"), 0, 9), owned("f")] {
        assert_eq!(id(&mut b, &open), Err(NtStatus::FILE_FORCED_CLOSED));
        write(&mut a, first, 0, b"x").unwrap();
    }
    id(&mut b, &version(owned("f"), 1, 6)).unwrap();
    assert_eq!(write(&mut a, first, 0, b"x"), Err(NtStatus::FILE_CLOSED));
}

#[test]
fn takeover_ends_preserved_opens_and_completes_pending_deletes() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let kept = make(&mut a, &owned("f").context(wanted(0, [1; 16]))).unwrap();
    write(&mut a, kept.id, 0, b"old").unwrap();
    a.disconnect();
    assert_eq!(lab.server.open_infos(None).len(), 1, "preserved");
    let second = id(&mut b, &owned("f")).unwrap();
    assert_eq!(read(&mut b, second, 0, 3).unwrap(), b"old");
    assert_eq!(lab.server.open_infos(None).len(), 1);

    let mut c = lab.client_of(3);
    let temporary = owned("t").options(CreateOptions::NON_DIRECTORY_FILE | CreateOptions::DELETE_ON_CLOSE);
    id(&mut b, &temporary).unwrap();
    let new = owned("t").disposition(CreateDisposition::CREATE);
    id(&mut c, &new).expect("the takeover completes the pending delete");
}
