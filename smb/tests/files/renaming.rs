//! FileRenameInformation and FileLinkInformation.

use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::CreateDisposition;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::file_info::FileAllInformation;
use forebay_smb::wire::fscc::name_info::FileRenameInformation;
use forebay_smb::wire::{AccessMask, ShareAccess};

use crate::calls::{
    ALL, Lab, close, delete_pending, directory, file, query_file, read, rename, set_file, write,
};

const NO_DELETE: ShareAccess = ShareAccess::READ.union(ShareAccess::WRITE);

#[test]
fn all_opens_follow_the_file_to_its_new_name() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    directory("d").touch(&mut a);
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    rename(&mut a, fa, r"d\g", false).unwrap();
    assert_eq!(lab.memory.contents("f"), None);
    let all = query_file(&mut b, fb, FileInformationClass::FILE_ALL_INFORMATION, 4096).unwrap();
    assert_eq!(FileAllInformation::parse(&all).unwrap().name, r"\d\g");
    assert_eq!(rename(&mut a, fa, r"d\g", false), Ok(()), "to itself");
    assert_eq!(rename(&mut a, fa, r"no\g", false), Err(NtStatus::OBJECT_PATH_NOT_FOUND));
    assert_eq!(rename(&mut a, fa, r"d\*", false), Err(NtStatus::OBJECT_NAME_INVALID));
}

#[test]
fn an_existing_file_is_replaced_if_requested_and_permitted() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let f = file("f").id(&mut a);
    write(&mut a, f, 0, b"new").unwrap();
    let g = file("g").id(&mut b);
    write(&mut b, g, 0, b"old").unwrap();
    assert_eq!(rename(&mut a, f, "g", false), Err(NtStatus::OBJECT_NAME_COLLISION));
    // As with clients that have POSIX semantics: the client that has the old file open still reads it.
    rename(&mut a, f, "g", true).unwrap();
    assert_eq!(read(&mut b, g, 0, 10).as_deref(), Ok(&b"old"[..]));
    assert_eq!(lab.memory.contents("g").as_deref(), Some(&b"new"[..]));
    // The end of the old file removes no name.
    delete_pending(&mut b, g, true).unwrap();
    close(&mut b, g).unwrap();
    assert_eq!(lab.memory.contents("g").as_deref(), Some(&b"new"[..]));

    let h = file("h").share(NO_DELETE).id(&mut b);
    assert_eq!(rename(&mut a, f, "h", true), Err(NtStatus::ACCESS_DENIED), "its share mode forbids it");
    close(&mut b, h).unwrap();
    rename(&mut a, f, "h", true).unwrap();
    let d = directory("d").id(&mut b);
    close(&mut b, d).unwrap();
    assert_eq!(rename(&mut a, f, "d", true), Err(NtStatus::ACCESS_DENIED));
}

#[test]
fn rename_checks_rights_and_share_modes() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    directory("d").touch(&mut c);
    let f = file(r"d\f").access(ALL.without(AccessMask::DELETE)).id(&mut c);
    assert_eq!(rename(&mut c, f, r"d\g", false), Err(NtStatus::ACCESS_DENIED));
    close(&mut c, f).unwrap();
    let f = file(r"d\f").id(&mut c);
    let parent = directory("d").disposition(CreateDisposition::OPEN);
    for (access, share, expected) in [
        (AccessMask::DELETE, ShareAccess(7), Err(NtStatus::SHARING_VIOLATION)),
        (AccessMask::FILE_READ_DATA, ShareAccess::READ, Err(NtStatus::SHARING_VIOLATION)),
        (AccessMask::FILE_READ_DATA, ShareAccess(7), Ok(())),
        (AccessMask::FILE_READ_ATTRIBUTES, ShareAccess::empty(), Ok(())),
    ] {
        let d = parent.clone().access(access).share(share).id(&mut c);
        assert_eq!(rename(&mut c, f, r"d\g", false), expected, "{access:?}");
        close(&mut c, d).unwrap();
        rename(&mut c, f, r"d\f", false).unwrap();
    }
    delete_pending(&mut c, f, true).unwrap();
    assert_eq!(rename(&mut c, f, r"d\g", false), Err(NtStatus::ACCESS_DENIED));
}

#[test]
fn a_directory_with_open_files_is_not_renamed() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let d = directory("d").id(&mut c);
    let f = file(r"d\f").id(&mut c);
    let neighbour = file("d2").id(&mut c);
    assert_eq!(rename(&mut c, d, "e", false), Err(NtStatus::ACCESS_DENIED));
    close(&mut c, f).unwrap();
    rename(&mut c, d, "e", false).unwrap();
    close(&mut c, neighbour).unwrap();
    assert!(lab.memory.contents("e/f").is_some());
    let root = directory("").disposition(CreateDisposition::OPEN).id(&mut c);
    assert_eq!(rename(&mut c, root, "x", false), Err(NtStatus::ACCESS_DENIED));
}

#[test]
fn a_hard_link_adds_a_name() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    write(&mut c, f, 0, b"shared").unwrap();
    let mut link = |to: &str, replace_if_exists| {
        set_file(&mut c, f, FileInformationClass::FILE_LINK_INFORMATION, |b| {
            FileRenameInformation { replace_if_exists, root_directory: 0, file_name: to.to_owned() }
                .encode(b);
        })
    };
    link("g", false).unwrap();
    assert_eq!(link("g", false), Err(NtStatus::OBJECT_NAME_COLLISION));
    assert_eq!(lab.memory.contents("g").as_deref(), Some(&b"shared"[..]));
}
