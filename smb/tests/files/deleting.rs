//! Deletion: delete-on-close and FileDispositionInformation.

use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, CreateOptions};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::file_info::FileStandardInformation;
use forebay_smb::wire::{AccessMask, FileAttributes, ShareAccess};

use crate::calls::{Lab, close, close_stat, delete_pending, directory, file, query_file, write};

#[test]
fn a_file_goes_with_its_last_open() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    delete_pending(&mut a, fa, true).unwrap();
    let bytes = query_file(&mut b, fb, FileInformationClass::FILE_STANDARD_INFORMATION, 24).unwrap();
    let standard = FileStandardInformation::parse(&bytes).unwrap();
    assert!(standard.delete_pending);
    assert_eq!(standard.number_of_links, 0);
    assert_eq!(file("f").send(&mut a), Err(NtStatus::DELETE_PENDING));
    close(&mut a, fa).unwrap();
    assert_eq!(file("f").send(&mut a), Err(NtStatus::DELETE_PENDING));
    write(&mut b, fb, 0, b"still here").unwrap();
    assert_eq!(close_stat(&mut b, fb).unwrap().end_of_file, 10);
    assert_eq!(lab.memory.contents("f"), None);
    assert!(file("f").disposition(CreateDisposition::CREATE).send(&mut a).is_ok());
}

#[test]
fn a_mind_can_be_changed() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    delete_pending(&mut c, f, true).unwrap();
    delete_pending(&mut c, f, false).unwrap();
    close(&mut c, f).unwrap();
    assert!(lab.memory.contents("f").is_some());
}

#[test]
fn delete_on_close_waits_for_that_close() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let doomed = file("f").option(CreateOptions::DELETE_ON_CLOSE).id(&mut c);
    let other = file("f").disposition(CreateDisposition::OPEN).id(&mut c);
    close(&mut c, doomed).unwrap();
    assert!(lab.memory.contents("f").is_some());
    assert_eq!(file("f").send(&mut c), Err(NtStatus::DELETE_PENDING));
    close(&mut c, other).unwrap();
    assert_eq!(lab.memory.contents("f"), None);
}

#[test]
fn a_lost_connection_deletes_what_it_had_promised_to() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    file("f").option(CreateOptions::DELETE_ON_CLOSE).id(&mut c);
    c.connection.close(c.now);
    c.run().unwrap();
    assert_eq!(lab.memory.contents("f"), None);
}

#[test]
fn directories_must_be_empty() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let d = directory("d").id(&mut c);
    let f = file(r"d\f").id(&mut c);
    assert_eq!(delete_pending(&mut c, d, true), Err(NtStatus::DIRECTORY_NOT_EMPTY));
    close(&mut c, d).unwrap();
    // Delete-on-close cannot know: the directory stays.
    let d = directory("d").option(CreateOptions::DELETE_ON_CLOSE).id(&mut c);
    close(&mut c, d).unwrap();
    let d = directory("d").disposition(CreateDisposition::OPEN).id(&mut c);
    delete_pending(&mut c, f, true).unwrap();
    close(&mut c, f).unwrap();
    delete_pending(&mut c, d, true).unwrap();
    close(&mut c, d).unwrap();
    assert_eq!(
        directory("d").disposition(CreateDisposition::OPEN).send(&mut c),
        Err(NtStatus::OBJECT_NAME_NOT_FOUND)
    );
}

#[test]
fn not_everything_can_be_deleted() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let readonly = file("f").attributes(FileAttributes::READONLY);
    let f = readonly.id(&mut c);
    assert_eq!(delete_pending(&mut c, f, true), Err(NtStatus::CANNOT_DELETE));
    close(&mut c, f).unwrap();
    let doomed = file("f").option(CreateOptions::DELETE_ON_CLOSE).access(AccessMask::DELETE);
    assert_eq!(doomed.send(&mut c), Err(NtStatus::CANNOT_DELETE));
    let f = file("f").access(AccessMask::FILE_READ_DATA).id(&mut c);
    assert_eq!(delete_pending(&mut c, f, true), Err(NtStatus::ACCESS_DENIED));
    close(&mut c, f).unwrap();
    let root = directory("").disposition(CreateDisposition::OPEN).id(&mut c);
    assert_eq!(delete_pending(&mut c, root, true), Err(NtStatus::CANNOT_DELETE));
    let g = file("g").share(ShareAccess::READ | ShareAccess::WRITE).id(&mut c);
    let deleting = file("g").access(AccessMask::DELETE);
    assert_eq!(deleting.send(&mut c), Err(NtStatus::SHARING_VIOLATION));
    close(&mut c, g).unwrap();
}
