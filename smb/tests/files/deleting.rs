//! Deletion: delete-on-close and FileDispositionInformation.

use forebay_smb::fs::{FsOpKind, FsReply, Unlink};
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{self, CreateAction, CreateDisposition, CreateOptions};
use forebay_smb::wire::create_context::RequestContext;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::file_info::{
    DispositionFlags, FileDispositionInformationEx, FileStandardInformation,
};
use forebay_smb::wire::fscc::fs_info::{FileFsAttributeInformation, FileSystemAttributes};
use forebay_smb::wire::{AccessMask, Command, FileAttributes, ShareAccess};

use crate::calls::{
    Lab, close, close_stat, delete_pending, directory, file, query_file, read, set_file, write,
};
use crate::support::Client;

fn removes(op: &FsOpKind) -> bool {
    matches!(op, FsOpKind::Close { unlink: Some(_), .. })
}

#[test]
fn a_file_is_deleted_at_its_last_close() {
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

/// FileDispositionInformationEx.
fn dispose(client: &mut Client, id: FileId, flags: DispositionFlags) -> Result<(), NtStatus> {
    set_file(client, id, FileInformationClass::FILE_DISPOSITION_INFORMATION_EX, |b| {
        FileDispositionInformationEx { flags }.encode(b);
    })
}

#[test]
fn posix_delete_removes_the_name_before_other_opens_close() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let info = query_fs_attributes(&mut a);
    assert!(info.contains(FileSystemAttributes::SUPPORTS_POSIX_UNLINK_RENAME));
    let (fa, fb, s) = (file("f").id(&mut a), file("f").id(&mut b), file("f:s").id(&mut b));
    let posix = DispositionFlags::DELETE | DispositionFlags::POSIX_SEMANTICS;
    dispose(&mut a, fa, posix).unwrap();
    assert_eq!(file("f").send(&mut b), Err(NtStatus::DELETE_PENDING));
    dispose(&mut a, fa, DispositionFlags::empty()).unwrap();
    file("f").touch(&mut b);
    dispose(&mut a, fa, posix).unwrap();
    close(&mut a, fa).unwrap();
    assert_eq!(lab.memory.contents("f"), None);
    // A client that has the old file open continues, next to a new file of that name.
    write(&mut b, fb, 0, b"old").unwrap();
    write(&mut b, s, 0, b"stream").unwrap();
    let new = file("f").disposition(CreateDisposition::CREATE).id(&mut a);
    write(&mut a, new, 0, b"new").unwrap();
    assert_eq!(read(&mut b, fb, 0, 10).as_deref(), Ok(&b"old"[..]));
    let bytes = query_file(&mut b, fb, FileInformationClass::FILE_STANDARD_INFORMATION, 24).unwrap();
    assert_eq!(FileStandardInformation::parse(&bytes).unwrap().number_of_links, 0);
    delete_pending(&mut b, fb, true).unwrap();
    close(&mut b, fb).unwrap();
    close(&mut b, s).unwrap();
    assert_eq!(lab.memory.contents("f").as_deref(), Some(&b"new"[..]), "a new file of the same name");
    close(&mut a, new).unwrap();
    assert_eq!(lab.server.volume_uses().iter().map(|v| v.open_files).sum::<u64>(), 0);
}

fn query_fs_attributes(client: &mut Client) -> FileSystemAttributes {
    let id = directory("").id(client);
    let class = forebay_smb::wire::fscc::FsInformationClass::FILE_FS_ATTRIBUTE_INFORMATION;
    let info = crate::calls::query_fs(client, id, class, 4096).unwrap();
    close(client, id).unwrap();
    FileFsAttributeInformation::parse(&info).unwrap().file_system_attributes
}

#[test]
fn a_pending_delete_can_be_withdrawn() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    delete_pending(&mut c, f, true).unwrap();
    delete_pending(&mut c, f, false).unwrap();
    close(&mut c, f).unwrap();
    assert!(lab.memory.contents("f").is_some());
}

#[test]
fn delete_on_close_marks_the_file_and_the_last_close_deletes_it() {
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
fn a_lost_connection_deletes_its_delete_on_close_files() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    file("f").option(CreateOptions::DELETE_ON_CLOSE).id(&mut c);
    c.connection.close(c.now);
    c.run().unwrap();
    assert_eq!(lab.memory.contents("f"), None);
}

#[test]
fn only_empty_directories_are_deleted() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let d = directory("d").id(&mut c);
    let f = file(r"d\f").id(&mut c);
    assert_eq!(delete_pending(&mut c, d, true), Err(NtStatus::DIRECTORY_NOT_EMPTY));
    close(&mut c, d).unwrap();
    // Delete-on-close cannot detect that the directory is not empty: the directory stays.
    let d = directory("d").option(CreateOptions::DELETE_ON_CLOSE).id(&mut c);
    assert_eq!(close(&mut c, d), Ok(()));
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
fn deletion_is_refused_for_read_only_files_the_root_and_missing_rights() {
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

#[test]
fn close_reports_a_failed_unlink() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    delete_pending(&mut c, f, true).unwrap();
    let mut backend = lab.memory.backend();
    c.backend = Box::new(move |op| match removes(&op) {
        true => Err(NtStatus::UNEXPECTED_IO_ERROR),
        false => backend(op),
    });
    assert_eq!(close(&mut c, f), Err(NtStatus::UNEXPECTED_IO_ERROR));
    assert!(lab.server.open_infos(None).is_empty(), "the open has ended regardless");
    let again = file("f").disposition(CreateDisposition::OPEN).id(&mut c);
    assert_eq!(close(&mut c, again), Ok(()), "the name stays, and no delete is pending");
}

#[test]
fn a_create_waits_until_the_backend_has_unlinked_its_name() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    file("f").option(CreateOptions::DELETE_ON_CLOSE).id(&mut a);
    a.connection.close(a.now);
    let answer = b.call(Command::CREATE, &file("f").body()).unwrap();
    assert_eq!(answer.status(), NtStatus::PENDING, "the backend is slow");
    file("g").touch(&mut b);
    a.run().unwrap();
    assert_eq!(lab.memory.contents("f"), None);
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(action(&mut b), CreateAction::CREATED);
    assert_eq!(lab.memory.contents("f").as_deref(), Some(&b""[..]));
}

#[test]
fn a_new_file_can_have_the_inode_number_of_the_removed_one() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let doomed = file("f").option(CreateOptions::DELETE_ON_CLOSE).context(RequestContext::QueryOnDiskId);
    let number = doomed.send(&mut a).unwrap().disk_id.expect("a number");
    let creating = b.begin(Command::CREATE, &file("f").body());
    a.connection.close(a.now);
    // The backend has removed the name and creates it again, before it reports the removal.
    let FsOpKind::Close { handle, unlink: Some(removal), stat } = a.connection.poll_fs().unwrap().kind else {
        panic!("the last open has ended");
    };
    let unlink = Some(Unlink::unregistered());
    (a.backend)(FsOpKind::Close { handle, unlink, stat }).unwrap();
    let created = (b.backend)(creating.kind).map(|reply| match reply {
        FsReply::Opened(mut opened) => {
            opened.stat.key.ino = number;
            FsReply::Opened(opened)
        }
        _ => panic!("it is opened"),
    });
    b.connection.complete(b.now, creating.id, created).unwrap();
    b.run().unwrap();
    assert_eq!(action(&mut b), CreateAction::CREATED);
    drop(removal);
    assert!(lab.memory.contents("f").is_some());
    assert_eq!(lab.server.open_infos(None).len(), 1);
    assert_eq!(file("f").send(&mut b).unwrap().action, CreateAction::OPENED);
}

/// What the CREATE of the next answer has done.
fn action(client: &mut Client) -> CreateAction {
    let answer = client.answers.pop_front().expect("an answer");
    create::Response::parse(&answer.message).expect("success").create_action
}

#[test]
fn a_file_is_looked_up_again_if_its_name_is_removed_during_the_open() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let f = file("f").id(&mut a);
    let op = b.begin(Command::CREATE, &file("f").body());
    // The backend finds the file, but its answer arrives after the removal.
    let found = (b.backend)(op.kind);
    delete_pending(&mut a, f, true).unwrap();
    close(&mut a, f).unwrap();
    b.connection.complete(b.now, op.id, found).unwrap();
    b.run().unwrap();
    assert_eq!(action(&mut b), CreateAction::CREATED);
    assert!(lab.memory.contents("f").is_some());
}
