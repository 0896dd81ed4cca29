//! Hard links: deletion removes a name, not the file ([MS-FSA] 2.1.1.5 Link.IsDeleted).

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, CreateOptions};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::file_info::FileStandardInformation;
use forebay_smb::wire::fscc::name_info::FileRenameInformation;

use crate::calls::{Lab, Open, close, delete_pending, file, query_file, rename, set_file, write};
use crate::support::Client;

fn existing(name: &str) -> Open<'_> {
    file(name).disposition(CreateDisposition::OPEN)
}

/// Creates `b` with contents and adds the name `a`. Returns the open of `b`.
fn two_names(client: &mut Client) -> FileId {
    let b = file("b").id(client);
    write(client, b, 0, b"shared").unwrap();
    set_file(client, b, FileInformationClass::FILE_LINK_INFORMATION, |out| {
        let file_name = "a".to_owned();
        FileRenameInformation { replace_if_exists: false, root_directory: 0, file_name }.encode(out);
    })
    .unwrap();
    b
}

fn standard(client: &mut Client, id: FileId) -> FileStandardInformation {
    let bytes = query_file(client, id, FileInformationClass::FILE_STANDARD_INFORMATION, 24).unwrap();
    FileStandardInformation::parse(&bytes).unwrap()
}

#[test]
fn deleting_one_name_keeps_the_other_in_any_close_order() {
    let mut lab = Lab::new();
    let (mut one, mut two) = (lab.client(), lab.client());
    let b = two_names(&mut one);
    let a = existing("a").id(&mut two);
    delete_pending(&mut two, a, true).unwrap();
    close(&mut two, a).unwrap();
    assert_eq!(lab.memory.contents("a"), None, "the name goes with its own last open");
    assert_eq!(lab.memory.contents("b").as_deref(), Some(&b"shared"[..]));
    write(&mut one, b, 0, b"SHARED").unwrap();
    close(&mut one, b).unwrap();
    assert_eq!(lab.memory.contents("b").as_deref(), Some(&b"SHARED"[..]), "the other name stays");
}

#[test]
fn a_second_name_is_usable_while_the_first_is_delete_pending() {
    let mut lab = Lab::new();
    let (mut one, mut two) = (lab.client(), lab.client());
    let b = two_names(&mut one);
    let (a, also_a) = (existing("a").id(&mut two), existing("a").id(&mut one));
    delete_pending(&mut two, a, true).unwrap();
    assert!(standard(&mut one, also_a).delete_pending, "another open of the name");
    assert_eq!(standard(&mut one, also_a).number_of_links, 1, "a delete-pending name is not counted");
    assert!(!standard(&mut one, b).delete_pending, "an open of the other name");
    assert_eq!(existing("a").send(&mut one), Err(NtStatus::DELETE_PENDING));
    existing("b").touch(&mut two);
    rename(&mut one, b, "c", false).unwrap();
    assert_eq!(rename(&mut one, also_a, "d", false), Err(NtStatus::ACCESS_DENIED));
    close(&mut two, a).unwrap();
    assert!(lab.memory.contents("a").is_some(), "it still has an open");
    assert_eq!(existing("a").send(&mut one), Err(NtStatus::DELETE_PENDING));
    close(&mut one, also_a).unwrap();
    assert_eq!((lab.memory.contents("a"), lab.memory.contents("c").is_some()), (None, true));
    assert_eq!(existing("a").send(&mut one), Err(NtStatus::OBJECT_NAME_NOT_FOUND));
}

#[test]
fn delete_on_close_removes_only_the_opened_name() {
    let mut lab = Lab::new();
    let (mut one, mut two) = (lab.client(), lab.client());
    let b = two_names(&mut one);
    let a = existing("a").option(CreateOptions::DELETE_ON_CLOSE).id(&mut two);
    close(&mut one, b).unwrap();
    two.disconnect();
    assert_eq!((lab.memory.contents("a"), lab.memory.contents("b").is_some()), (None, true));
    let _ = a;
}

#[test]
fn a_name_that_replaced_another_link_is_deleted_in_any_close_order() {
    let mut lab = Lab::new();
    let (mut one, mut two) = (lab.client(), lab.client());
    let b = two_names(&mut one);
    let also_b = existing("b").id(&mut two);
    rename(&mut one, b, "a", true).unwrap();
    assert_eq!((lab.memory.contents("a").is_some(), lab.memory.contents("b")), (true, None));
    delete_pending(&mut one, b, true).unwrap();
    close(&mut one, b).unwrap();
    close(&mut two, also_b).unwrap();
    assert_eq!(lab.memory.contents("a"), None);
}
