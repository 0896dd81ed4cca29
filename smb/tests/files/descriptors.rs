//! Access control lists of files as clients see them: QUERY_INFO, SET_INFO and what CREATE grants.

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::AccessMask;
use forebay_smb::wire::create::{CreateDisposition, CreateOptions};
use forebay_smb::wire::create_context::RequestContext;
use forebay_smb::wire::fscc::FsInformationClass;
use forebay_smb::wire::fscc::fs_info::{FileFsAttributeInformation, FileSystemAttributes};
use forebay_smb::wire::fscc::security::{Ace, AceFlags, AceType, Acl, Control, SecurityDescriptor, Sid};

use crate::calls::{Lab, Open, close, directory, file, query_fs, query_security, rename, set_security};
use crate::support::Client;

const DACL: u32 = 4;
const READ: AccessMask = AccessMask::FILE_READ_DATA;
const WRITE: AccessMask = AccessMask::FILE_WRITE_DATA;
const TO_CHANGE: AccessMask = AccessMask::WRITE_DAC.union(AccessMask::READ_CONTROL);
const DENIED: NtStatus = NtStatus::ACCESS_DENIED;

fn with_list(aces: Vec<Ace>) -> SecurityDescriptor {
    let dacl = Some(Acl { acl_revision: 2, aces });
    SecurityDescriptor { control: Control::DACL_PRESENT, dacl, ..SecurityDescriptor::default() }
}

fn encoded(descriptor: &SecurityDescriptor) -> Vec<u8> {
    let mut bytes = Vec::new();
    descriptor.encode(&mut bytes);
    bytes
}

fn everyone(mask: AccessMask) -> Ace {
    Ace::allow(Sid::everyone(), mask)
}

fn set(client: &mut Client, id: FileId, aces: Vec<Ace>) {
    set_security(client, id, DACL, &encoded(&with_list(aces))).unwrap();
}

fn aces(client: &mut Client, id: FileId) -> Vec<Ace> {
    let bytes = query_security(client, id, DACL, 65_536).unwrap();
    SecurityDescriptor::parse(&bytes).unwrap().dacl.unwrap().aces
}

/// Creates the file with a list.
fn with_aces(client: &mut Client, open: &Open<'_>, aces: Vec<Ace>) {
    let id = open.id(client);
    set(client, id, aces);
    close(client, id).unwrap();
}

fn may(client: &mut Client, open: Open<'_>, access: AccessMask) -> Result<(), NtStatus> {
    let open = open.disposition(CreateDisposition::OPEN).access(access);
    open.send(client).map(|opened| close(client, opened.id).unwrap())
}

#[test]
fn a_dacl_grants_and_denies_access() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    let list = vec![
        Ace { ace_type: AceType::ACCESS_DENIED, ..everyone(AccessMask::FILE_EXECUTE) },
        everyone(READ | AccessMask::FILE_EXECUTE),
    ];
    with_aces(&mut client, &file("a"), list.clone());
    assert_eq!(may(&mut client, file("a"), READ), Ok(()));
    assert_eq!(may(&mut client, file("a"), WRITE), Err(DENIED));
    assert_eq!(may(&mut client, file("a"), READ | AccessMask::FILE_EXECUTE), Err(DENIED));
    assert_eq!(may(&mut client, file("a"), AccessMask::GENERIC_WRITE), Err(DENIED));
    // The maximal access.
    let query = RequestContext::QueryMaximalAccess(None);
    let open = file("a").access(AccessMask::MAXIMUM_ALLOWED).context(query);
    let opened = open.send(&mut client).unwrap();
    let of_directory = AccessMask::DELETE | AccessMask::FILE_READ_ATTRIBUTES;
    assert_eq!(opened.maximal_access, Some(READ | TO_CHANGE | of_directory));
    assert_eq!(aces(&mut client, opened.id), list);
    // The owner can change the list again, and then all access is granted.
    let all =
        vec![Ace::allow(Sid::unix_mode(0o600), AccessMask::empty()), everyone(AccessMask::FILE_ALL_ACCESS)];
    set(&mut client, opened.id, all.clone());
    assert_eq!(may(&mut client, file("a"), WRITE), Ok(()));
    assert_eq!(aces(&mut client, opened.id), all);
}

#[test]
fn overwrite_delete_and_stream_opens_need_rights_from_the_dacl() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    // The directory's list does not grant deletion either.
    with_aces(
        &mut client,
        &directory("d"),
        vec![everyone(AccessMask::FILE_ALL_ACCESS.without(AccessMask::FILE_DELETE_CHILD))],
    );
    with_aces(&mut client, &file("d\\a"), vec![everyone(READ)]);
    let open = |disposition| file("d\\a").access(READ).disposition(disposition);
    for disposition in
        [CreateDisposition::OVERWRITE, CreateDisposition::OVERWRITE_IF, CreateDisposition::SUPERSEDE]
    {
        assert_eq!(open(disposition).send(&mut client).err(), Some(DENIED), "{disposition:?}");
    }
    let delete = open(CreateDisposition::OPEN)
        .access(AccessMask::MAXIMUM_ALLOWED)
        .option(CreateOptions::DELETE_ON_CLOSE);
    assert_eq!(delete.send(&mut client).err(), Some(DENIED));
    assert_eq!(may(&mut client, file("d\\a"), AccessMask::DELETE), Err(DENIED));
    // A stream is part of its file's data.
    assert_eq!(may(&mut client, file("d\\a:s"), READ), Err(NtStatus::OBJECT_NAME_NOT_FOUND));
    assert_eq!(file("d\\a:s").access(WRITE).send(&mut client).err(), Some(DENIED));
    // The open that creates a file has the access that it asked for, regardless of the file's list.
    let given = encoded(&with_list(vec![everyone(READ)]));
    let open =
        file("d\\new").option(CreateOptions::DELETE_ON_CLOSE).context(RequestContext::SdBuffer(&given));
    let id = open.id(&mut client);
    assert_eq!(aces(&mut client, id), [everyone(READ)]);
    close(&mut client, id).unwrap();
    assert_eq!(may(&mut client, file("d\\new"), READ), Err(NtStatus::OBJECT_NAME_NOT_FOUND));
}

#[test]
fn directory_dacls_control_new_names_and_are_inherited() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    let flags = AceFlags::OBJECT_INHERIT;
    let inherited = Ace { ace_flags: flags, ..everyone(READ | AccessMask::DELETE) };
    with_aces(&mut client, &directory("d"), vec![inherited, everyone(AccessMask::FILE_ADD_FILE)]);
    assert_eq!(directory("d\\sub").send(&mut client).err(), Some(DENIED));
    let id = file("d\\a").id(&mut client);
    assert_eq!(aces(&mut client, id), [everyone(READ | AccessMask::DELETE)]);
    close(&mut client, id).unwrap();
    assert_eq!(may(&mut client, file("d\\a"), WRITE), Err(DENIED));
    assert_eq!(may(&mut client, file("d\\a"), AccessMask::DELETE), Ok(()));
    let moved = directory("elsewhere").id(&mut client);
    assert_eq!(rename(&mut client, moved, "d\\elsewhere", false), Err(DENIED));
}

#[test]
fn posix_clients_are_not_checked_against_the_dacl() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    with_aces(&mut client, &file("a"), vec![everyone(READ)]);
    let mut linux = lab.posix();
    let open = file("a").context(RequestContext::Posix { mode: 0o644 });
    assert!(open.send(&mut linux).is_ok());
    assert_eq!(may(&mut client, file("a"), WRITE), Err(DENIED));
}

#[test]
fn a_volume_without_extended_attributes_stores_no_dacl() {
    let announces_acls = |client: &mut Client, id| {
        let bytes = query_fs(client, id, FsInformationClass::FILE_FS_ATTRIBUTE_INFORMATION, 4096).unwrap();
        let info = FileFsAttributeInformation::parse(&bytes).unwrap();
        info.file_system_attributes.contains(FileSystemAttributes::PERSISTENT_ACLS)
    };
    let mut with = Lab::new().client();
    let id = file("a").id(&mut with);
    assert!(announces_acls(&mut with, id));
    let mut lab = Lab::with(|volume| volume.extended_attributes = false);
    let mut client = lab.client();
    let id = file("a").id(&mut client);
    assert!(!announces_acls(&mut client, id));
    let list = encoded(&with_list(vec![everyone(READ)]));
    assert_eq!(set_security(&mut client, id, DACL, &list), Err(NtStatus::NOT_SUPPORTED));
    let given = file("b").context(RequestContext::SdBuffer(&list)).id(&mut client);
    assert_eq!(aces(&mut client, given).len(), 2, "the default DACL");
    assert_eq!(may(&mut client, file("b"), WRITE), Ok(()));
}
