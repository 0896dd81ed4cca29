//! Reparse points: symbolic links and special files ([MS-FSCC] 2.1.2, [MS-FSA] 2.1.5.10).

use forebay_smb::ids::FileId;
use forebay_smb::limits::REPARSE_DATA_BYTES_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, CreateOptions};
use forebay_smb::wire::create_context::RequestContext;
use forebay_smb::wire::error::{self, ErrorContext, SYMLINK_FLAG_RELATIVE, SymbolicLinkError};
use forebay_smb::wire::fscc::FileInformationClass as C;
use forebay_smb::wire::fscc::file_info::FileAttributeTagInformation;
use forebay_smb::wire::fscc::fsctl::FsctlCode;
use forebay_smb::wire::fscc::posix::PosixFileType;
use forebay_smb::wire::fscc::reparse::{NfsSpecialFile, ReparseDataBuffer, ReparseTag, SymbolicLink};
use forebay_smb::wire::fscc::security::{Ace, Acl, SecurityDescriptor, Sid};
use forebay_smb::wire::query_directory::Flags;
use forebay_smb::wire::{AccessMask, Command, Dialect, FileAttributes};

use crate::calls::{
    Lab, Open, close, compound, directory, file, fsctl, list_class, query_file, set_security, write,
};
use crate::support::Client;

const RELATED: FileId = FileId::RELATED;

fn symlink(target: &str) -> Vec<u8> {
    let mut data = Vec::new();
    SymbolicLink {
        substitute_name: target.to_owned(),
        print_name: target.to_owned(),
        flags: SYMLINK_FLAG_RELATIVE,
    }
    .encode(&mut data);
    buffer(ReparseTag::SYMLINK, &data)
}

fn nfs(kind: NfsSpecialFile) -> Vec<u8> {
    buffer(ReparseTag::NFS, &kind.0.to_le_bytes())
}

fn buffer(reparse_tag: ReparseTag, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    ReparseDataBuffer { reparse_tag, data }.encode(&mut out);
    out
}

/// The reparse point itself.
fn itself(open: Open<'_>) -> Open<'_> {
    open.option(CreateOptions::OPEN_REPARSE_POINT)
}

fn existing(name: &str) -> Open<'_> {
    file(name).disposition(CreateDisposition::OPEN)
}

fn make(client: &mut Client, name: &str, data: &[u8]) {
    let id = itself(file(name)).disposition(CreateDisposition::CREATE).id(client);
    assert_eq!(fsctl(client, id, FsctlCode::SET_REPARSE_POINT, data, 0).0, NtStatus::SUCCESS);
    close(client, id).unwrap();
}

/// The point at which the server reports that it stopped.
fn stopped(client: &mut Client, open: &Open<'_>) -> String {
    let answer = client.call(Command::CREATE, &open.body()).unwrap();
    assert_eq!(answer.status(), NtStatus::STOPPED_ON_SYMLINK);
    let response = error::Response::parse(&answer.message).unwrap();
    let link = match response.error_context_count {
        0 => SymbolicLinkError::parse(response.error_data).unwrap(),
        _ => SymbolicLinkError::parse(ErrorContext::parse_list(&response).unwrap()[0].error_context_data)
            .unwrap(),
    };
    assert_eq!((link.flags, link.unparsed_path_length), (SYMLINK_FLAG_RELATIVE, 0));
    link.substitute_name
}

#[test]
fn a_symbolic_link_is_reported_to_the_client_and_not_followed() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    make(&mut c, "link", &symlink("../elsewhere/f"));
    assert_eq!(stopped(&mut c, &existing("link")), "../elsewhere/f");
    let overwritten = file("link").disposition(CreateDisposition::OVERWRITE_IF);
    assert_eq!(stopped(&mut c, &overwritten), "../elsewhere/f", "its target is not replaced");
    let mut old = lab.dialect(Dialect::SMB3_0_2);
    assert_eq!(stopped(&mut old, &existing("link")), "../elsewhere/f", "without error contexts");
    let opened = itself(existing("link")).send(&mut c).unwrap();
    assert!(opened.reparse_point && opened.attributes.contains(FileAttributes::REPARSE_POINT));
    let (status, data) = fsctl(&mut c, opened.id, FsctlCode::GET_REPARSE_POINT, &[], 4096);
    assert_eq!((status, data), (NtStatus::SUCCESS, symlink("../elsewhere/f")));
    let (status, data) = fsctl(&mut c, opened.id, FsctlCode::GET_REPARSE_POINT, &[], 10);
    assert_eq!((status, data.len()), (NtStatus::BUFFER_OVERFLOW, 10));
    let bytes = query_file(&mut c, opened.id, C::FILE_ATTRIBUTE_TAG_INFORMATION, 8).unwrap();
    assert_eq!(FileAttributeTagInformation::parse(&bytes).unwrap().reparse_tag, ReparseTag::SYMLINK);
    // Later requests in the same compound have no file.
    let query = |class: C| {
        let mut body = Vec::new();
        forebay_smb::wire::query_info::Request {
            info_type: forebay_smb::wire::query_info::InfoType::FILE,
            file_info_class: class.0,
            output_buffer_length: 4096,
            additional_information: 0,
            flags: forebay_smb::wire::query_info::Flags::empty(),
            file_id: RELATED,
            input_buffer: &[],
        }
        .encode(&mut body);
        body
    };
    let answers = compound(
        &mut c,
        &[(Command::CREATE, existing("link").body()), (Command::QUERY_INFO, query(C::FILE_ALL_INFORMATION))],
    );
    let statuses: Vec<_> = answers.iter().map(|a| a.status()).collect();
    assert_eq!(statuses, [NtStatus::STOPPED_ON_SYMLINK, NtStatus::STOPPED_ON_SYMLINK]);
}

/// Linux's client resolves links itself, and opens the link without OPEN_REPARSE_POINT for `chown -h` and `touch -h`.
#[test]
fn posix_clients_change_the_attributes_of_a_reparse_point_itself() {
    let mut lab = Lab::new();
    let (mut linux, mut plain) = (lab.posix(), lab.client());
    make(&mut plain, "link", &symlink("f"));
    make(&mut plain, "fifo", &nfs(NfsSpecialFile::FIFO));
    let posix = |open: Open<'static>| open.context(RequestContext::Posix { mode: 0xffff });
    let (dac, attributes) = (AccessMask::WRITE_DAC, AccessMask::FILE_WRITE_ATTRIBUTES);
    for name in ["link", "fifo"] {
        let stop = match name {
            "link" => NtStatus::STOPPED_ON_SYMLINK,
            _ => NtStatus::IO_REPARSE_TAG_NOT_HANDLED,
        };
        for access in [attributes, AccessMask::READ_CONTROL, dac | AccessMask::WRITE_OWNER] {
            let opened = posix(existing(name).access(access)).send(&mut linux).unwrap();
            assert!(opened.reparse_point, "{name} {access:?}");
            close(&mut linux, opened.id).unwrap();
            assert_eq!(existing(name).access(access).send(&mut plain).err(), Some(stop), "{name} {access:?}");
        }
        for access in [attributes | AccessMask::FILE_READ_DATA, AccessMask::FILE_READ_ATTRIBUTES] {
            let answer = posix(existing(name).access(access)).send(&mut linux);
            assert_eq!(answer.err(), Some(stop), "{name} {access:?}");
        }
    }
    let id = posix(existing("fifo").access(dac)).id(&mut linux);
    let mut descriptor = Vec::new();
    SecurityDescriptor {
        dacl: Some(Acl {
            acl_revision: 2,
            aces: vec![Ace::allow(Sid::unix_mode(0o640), AccessMask::empty())],
        }),
        ..SecurityDescriptor::default()
    }
    .encode(&mut descriptor);
    // DACL_SECURITY_INFORMATION ([MS-SMB2] 2.2.39)
    set_security(&mut linux, id, 4, &descriptor).unwrap();
    let opened = posix(itself(existing("fifo"))).send(&mut linux).unwrap();
    assert_eq!(opened.posix.unwrap().2, PosixFileType::FIFO.mode(0o640));
}

#[test]
fn special_files_are_stored_as_reparse_points() {
    let mut lab = Lab::new();
    let mut c = lab.posix();
    let no_mode = RequestContext::Posix { mode: 0xffff };
    for (name, data, kind) in [
        ("fifo", nfs(NfsSpecialFile::FIFO), PosixFileType::FIFO),
        ("link", nfs(NfsSpecialFile::SYMLINK), PosixFileType::SYMLINK),
        ("socket", buffer(ReparseTag::AF_UNIX, &[]), PosixFileType::SOCKET),
        ("tty", nfs(NfsSpecialFile::CHARACTER_DEVICE), PosixFileType::CHARACTER_DEVICE),
        ("wsl", buffer(ReparseTag::LX_BLK, &[]), PosixFileType::BLOCK_DEVICE),
    ] {
        make(&mut c, name, &data);
        assert_eq!(existing(name).send(&mut c), Err(NtStatus::IO_REPARSE_TAG_NOT_HANDLED), "{name}");
        let opened = itself(existing(name)).context(no_mode).send(&mut c).unwrap();
        let (_, tag, mode, _) = opened.posix.unwrap();
        assert_eq!(
            (PosixFileType::of_mode(mode), tag),
            (kind, ReparseDataBuffer::parse(&data).unwrap().reparse_tag.0)
        );
    }
    let root = directory("").disposition(CreateDisposition::OPEN).context(no_mode).id(&mut c);
    let entries = list_class(&mut c, root, C::FILE_POSIX_INFORMATION, "fifo", Flags::empty(), 4096).unwrap();
    assert_eq!(PosixFileType::of_mode(entries[0].posix.mode), PosixFileType::FIFO);
    assert_eq!(entries[0].reparse_tag, ReparseTag::NFS);
    let entries =
        list_class(&mut c, root, C::FILE_FULL_DIRECTORY_INFORMATION, "fifo", Flags::RESTART_SCANS, 4096)
            .unwrap();
    assert_eq!(entries[0].ea_size, ReparseTag::NFS.0, "the tag is where others have the size of attributes");
}

#[test]
fn invalid_reparse_point_changes_are_refused() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let set = |c: &mut _, id, data: &[u8]| fsctl(c, id, FsctlCode::SET_REPARSE_POINT, data, 0).0;
    let invalid = NtStatus::IO_REPARSE_DATA_INVALID;
    for (data, status) in [
        (b"short".to_vec(), invalid),
        (buffer(ReparseTag::RESERVED_ZERO, &[]), NtStatus::IO_REPARSE_TAG_INVALID),
        (buffer(ReparseTag(0x1234), &[0; 16]), NtStatus::NOT_SUPPORTED),
        (buffer(ReparseTag::SYMLINK, b"no names"), invalid),
        (symlink(""), invalid),
        (buffer(ReparseTag::NFS, &[1; 8]), invalid),
        (buffer(ReparseTag::MOUNT_POINT, &vec![0; REPARSE_DATA_BYTES_MAX - 7]), invalid),
    ] {
        assert_eq!(set(&mut c, f, &data), status, "{} bytes", data.len());
    }
    let reader = existing("f").access(AccessMask::FILE_READ_ATTRIBUTES).id(&mut c);
    assert_eq!(set(&mut c, reader, &symlink("x")), NtStatus::ACCESS_DENIED);
    write(&mut c, f, 0, b"contents").unwrap();
    assert_eq!(set(&mut c, f, &symlink("x")), invalid, "contents would become inaccessible");
    let d = directory("d").id(&mut c);
    assert_eq!(set(&mut c, d, &nfs(NfsSpecialFile::FIFO)), invalid);
    let root = directory("").disposition(CreateDisposition::OPEN).id(&mut c);
    assert_eq!(set(&mut c, root, &symlink("x")), NtStatus::NOT_SUPPORTED);
    assert_eq!(fsctl(&mut c, f, FsctlCode::GET_REPARSE_POINT, &[], 4096).0, NtStatus::NOT_A_REPARSE_POINT);
    make(&mut c, "link", &symlink("x"));
    let link = itself(existing("link")).id(&mut c);
    assert_eq!(set(&mut c, link, &nfs(NfsSpecialFile::FIFO)), NtStatus::IO_REPARSE_TAG_MISMATCH);
    assert_eq!(set(&mut c, link, &symlink("y")), NtStatus::SUCCESS);
    let delete = |c: &mut _, data: &[u8]| fsctl(c, link, FsctlCode::DELETE_REPARSE_POINT, data, 0).0;
    assert_eq!(delete(&mut c, &buffer(ReparseTag::NFS, &[])), NtStatus::IO_REPARSE_TAG_MISMATCH);
    assert_eq!(delete(&mut c, &symlink("y")), invalid);
    assert_eq!(delete(&mut c, &buffer(ReparseTag::SYMLINK, &[])), NtStatus::SUCCESS);
    assert_eq!(delete(&mut c, &buffer(ReparseTag::SYMLINK, &[])), NtStatus::NOT_A_REPARSE_POINT);
    existing("link").touch(&mut c);
}
