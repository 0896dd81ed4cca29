//! Named streams: what they share with their file and what belongs to each.

use forebay_smb::status::NtStatus;
use forebay_smb::wire::change_notify::{CompletionFilter, Flags, Request, Response};
use forebay_smb::wire::create::{CreateAction, CreateDisposition, CreateOptions, OplockLevel};
use forebay_smb::wire::create_context::LeaseState;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::FsInformationClass;
use forebay_smb::wire::fscc::file_info::{FileAllInformation, FileStandardInformation};
use forebay_smb::wire::fscc::fs_info::{FileFsAttributeInformation, FileSystemAttributes};
use forebay_smb::wire::fscc::fsctl::{DuplicateExtents, FsctlCode};
use forebay_smb::wire::fscc::name_info::{FileRenameInformation, FileStreamInformation};
use forebay_smb::wire::fscc::notify::{FileNotifyInformation, NotifyAction};
use forebay_smb::wire::{AccessMask, Command, FileAttributes, ShareAccess};

use crate::caching::{acknowledge_lease, body, broken, granted, lease, send, waits};
use crate::calls::{
    ALL, Lab, SHARE_ALL, close, close_stat, delete_pending, directory, file, fsctl, query_file, query_fs,
    read, rename, set_file, write,
};
use crate::support::Client;

const NO_DELETE: ShareAccess = ShareAccess::READ.union(ShareAccess::WRITE);
const OPEN: CreateDisposition = CreateDisposition::OPEN;

/// The streams of a file, by a handle of the file or of one of its streams.
fn streams(client: &mut Client, id: forebay_smb::ids::FileId) -> Vec<(String, u64)> {
    let list = query_file(client, id, FileInformationClass::FILE_STREAM_INFORMATION, 4096).unwrap();
    let list = FileStreamInformation::parse_list(&list).unwrap();
    list.into_iter().map(|stream| (stream.stream_name, stream.stream_size)).collect()
}

fn named(streams: &[(&str, u64)]) -> Vec<(String, u64)> {
    streams.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect()
}

#[test]
fn a_stream_is_created_with_its_file_and_has_separate_contents() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    assert_eq!(file("f:s").disposition(OPEN).send(&mut c), Err(NtStatus::OBJECT_NAME_NOT_FOUND));
    let s = file("f:s").send(&mut c).unwrap();
    assert_eq!(s.action, CreateAction::CREATED);
    write(&mut c, s.id, 0, b"stream").unwrap();
    let f = file("f").disposition(OPEN).send(&mut c).unwrap();
    assert_eq!((f.action, f.end_of_file), (CreateAction::OPENED, 0));
    write(&mut c, f.id, 0, b"data").unwrap();
    assert_eq!(read(&mut c, s.id, 0, 10).as_deref(), Ok(&b"stream"[..]));
    let expected = named(&[("::$DATA", 4), (":s:$DATA", 6)]);
    assert_eq!(streams(&mut c, f.id), expected);
    assert_eq!(streams(&mut c, s.id), expected);
    let again = file("f:S:$DATA").disposition(OPEN).send(&mut c).unwrap();
    assert_eq!((again.end_of_file, again.attributes), (6, f.attributes));
    let all = query_file(&mut c, again.id, FileInformationClass::FILE_ALL_INFORMATION, 4096).unwrap();
    assert_eq!(FileAllInformation::parse(&all).unwrap().name, r"\f:S");
    assert_eq!(close_stat(&mut c, s.id).unwrap().end_of_file, 6);
    let info = query_fs(&mut c, f.id, FsInformationClass::FILE_FS_ATTRIBUTE_INFORMATION, 4096).unwrap();
    let info = FileFsAttributeInformation::parse(&info).unwrap();
    assert!(info.file_system_attributes.contains(FileSystemAttributes::NAMED_STREAMS));
}

#[test]
fn directories_have_named_streams_and_no_data() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let d = directory("d").id(&mut c);
    assert_eq!(directory("d::$DATA").send(&mut c), Err(NtStatus::NOT_A_DIRECTORY));
    assert_eq!(
        file("d::$DATA").options(CreateOptions::empty()).send(&mut c),
        Err(NtStatus::FILE_IS_A_DIRECTORY)
    );
    assert_eq!(directory("d:s").send(&mut c), Err(NtStatus::NOT_A_DIRECTORY));
    let s = file("d:s").id(&mut c);
    write(&mut c, s, 0, b"x").unwrap();
    let standard = query_file(&mut c, s, FileInformationClass::FILE_STANDARD_INFORMATION, 100).unwrap();
    assert!(!FileStandardInformation::parse(&standard).unwrap().directory);
    assert_eq!(streams(&mut c, d), named(&[(":s:$DATA", 1)]));
}

#[test]
fn named_streams_require_extended_attributes() {
    let mut lab = Lab::with(|volume| volume.extended_attributes = false);
    let mut c = lab.client();
    assert_eq!(file("f:s").send(&mut c), Err(NtStatus::OBJECT_NAME_INVALID));
    let f = file("f::$DATA").id(&mut c);
    assert_eq!(streams(&mut c, f), named(&[("::$DATA", 0)]));
}

#[test]
fn share_modes_apply_per_stream_except_for_deletion_of_the_file() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let nothing = ShareAccess::empty();
    let s = file("f:s").share(nothing).access(AccessMask::FILE_GENERIC_READ).id(&mut a);
    assert_eq!(file("f:s").send(&mut b), Err(NtStatus::SHARING_VIOLATION));
    file("f:other").touch(&mut b);
    file("f").access(AccessMask::FILE_GENERIC_WRITE).touch(&mut b);
    let delete = file("f").access(AccessMask::DELETE);
    assert_eq!(delete.send(&mut b), Err(NtStatus::SHARING_VIOLATION), "the stream forbids it");
    close(&mut a, s).unwrap();
    // An open for attributes only forbids nothing, and neither does one that shares deletion.
    let looks = file("f:s").share(nothing).access(AccessMask::FILE_READ_ATTRIBUTES).id(&mut a);
    let shares = file("f:s").share(SHARE_ALL).id(&mut a);
    let f = file("f").access(AccessMask::DELETE).share(NO_DELETE).id(&mut b);
    // The open of the file does not forbid the deletion of its streams.
    file("f:other").access(AccessMask::DELETE).touch(&mut a);
    for (client, id) in [(&mut a, looks), (&mut b, f)] {
        close(client, id).unwrap();
    }
    close(&mut a, shares).unwrap();
}

#[test]
fn a_file_is_deleted_after_its_streams_are_closed() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let s = file("f:s").id(&mut a);
    write(&mut a, s, 0, b"stream").unwrap();
    let f = file("f").disposition(OPEN).id(&mut b);
    delete_pending(&mut b, f, true).unwrap();
    close(&mut b, f).unwrap();
    assert!(lab.memory.contents("f").is_some());
    assert_eq!(read(&mut a, s, 0, 10).as_deref(), Ok(&b"stream"[..]));
    for name in ["f", "f:s", "f:other"] {
        assert_eq!(file(name).send(&mut b), Err(NtStatus::DELETE_PENDING), "{name}");
    }
    close(&mut a, s).unwrap();
    assert_eq!(lab.memory.contents("f"), None);
    assert_eq!(file("f:s").disposition(OPEN).send(&mut b), Err(NtStatus::OBJECT_NAME_NOT_FOUND));
    assert_eq!(lab.server.volume_uses().iter().map(|v| v.open_files).sum::<u64>(), 0);
}

#[test]
fn a_file_and_its_stream_are_deleted_together() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let s = file("f:s").id(&mut c);
    let f = file("f").disposition(OPEN).id(&mut c);
    delete_pending(&mut c, s, true).unwrap();
    delete_pending(&mut c, f, true).unwrap();
    close(&mut c, f).unwrap();
    close(&mut c, s).unwrap();
    assert_eq!(lab.memory.contents("f"), None);
    let s = file("f:s").send(&mut c).unwrap();
    assert_eq!(s.action, CreateAction::CREATED, "no old stream remains");
}

#[test]
fn a_stream_is_deleted_without_its_file() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let f = file("f").id(&mut a);
    let s = file("f:s").id(&mut a);
    write(&mut a, s, 0, b"stream").unwrap();
    let held = file("f:s").id(&mut b);
    delete_pending(&mut a, s, true).unwrap();
    close(&mut a, s).unwrap();
    assert_eq!(file("f:s").send(&mut a), Err(NtStatus::DELETE_PENDING));
    assert_eq!(read(&mut b, held, 0, 10).as_deref(), Ok(&b"stream"[..]));
    file("f").disposition(OPEN).touch(&mut a);
    close(&mut b, held).unwrap();
    assert_eq!(streams(&mut a, f), named(&[("::$DATA", 0)]));
    file("f:t").option(CreateOptions::DELETE_ON_CLOSE).touch(&mut b);
    assert_eq!(streams(&mut a, f), named(&[("::$DATA", 0)]));
}

#[test]
fn overwriting_a_file_removes_its_streams_overwriting_a_stream_does_not() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let made = |c: &mut Client, name| {
        let id = file(name).id(c);
        write(c, id, 0, b"x").unwrap();
        close(c, id).unwrap();
    };
    for disposition in
        [CreateDisposition::OVERWRITE, CreateDisposition::OVERWRITE_IF, CreateDisposition::SUPERSEDE]
    {
        for name in ["f", "f:s", "f:t"] {
            made(&mut c, name);
        }
        let s = file("f:s").disposition(disposition).id(&mut c);
        assert_eq!(streams(&mut c, s), named(&[("::$DATA", 1), (":s:$DATA", 0), (":t:$DATA", 1)]));
        close(&mut c, s).unwrap();
        let f = file("f").disposition(disposition).id(&mut c);
        assert_eq!(streams(&mut c, f), named(&[("::$DATA", 0)]), "{disposition:?}");
        close(&mut c, f).unwrap();
    }
}

#[test]
fn a_file_with_open_streams_is_neither_renamed_nor_replaced() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let s = file("f:s").id(&mut a);
    let f = file("f").disposition(OPEN).id(&mut b);
    assert_eq!(rename(&mut b, f, "g", false), Err(NtStatus::ACCESS_DENIED));
    let other = file("other").id(&mut b);
    assert_eq!(rename(&mut b, other, "f", true), Err(NtStatus::ACCESS_DENIED), "nor is it replaced");
    directory("d").touch(&mut b);
    close(&mut a, s).unwrap();
    rename(&mut b, f, r"d\g", false).unwrap();
    let s = file(r"d\g:s").disposition(OPEN).id(&mut a);
    let d = directory("d").disposition(OPEN).id(&mut b);
    close(&mut b, f).unwrap();
    assert_eq!(rename(&mut b, d, "e", false), Err(NtStatus::ACCESS_DENIED), "a stream below is open");
    assert_eq!(rename(&mut b, other, "x:y", false), Err(NtStatus::OBJECT_NAME_INVALID));
    close(&mut a, s).unwrap();
}

#[test]
fn a_stream_is_renamed_within_its_file() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let rwh = LeaseState::READ_CACHING | LeaseState::HANDLE_CACHING | LeaseState::WRITE_CACHING;
    let s = granted(&a.call(Command::CREATE, &lease(file("f:s"), 1, rwh)).unwrap()).unwrap();
    write(&mut a, s.id, 0, b"stream").unwrap();
    let held = send(&mut b, &body(&file("f:t"), OplockLevel::NONE)).unwrap().id;
    assert_eq!(rename(&mut a, s.id, ":t", true), Err(NtStatus::ACCESS_DENIED), "it is open");
    write(&mut b, held, 0, b"x").unwrap();
    close(&mut b, held).unwrap();
    assert_eq!(rename(&mut a, s.id, ":t", false), Err(NtStatus::OBJECT_NAME_COLLISION));
    assert_eq!(rename(&mut a, s.id, ":t", true), Err(NtStatus::INVALID_PARAMETER), "it has contents");
    assert_eq!(rename(&mut a, s.id, "g:s", false), Err(NtStatus::SHARING_VIOLATION));
    assert_eq!(rename(&mut a, s.id, ":u:$DATA", false), Ok(()));
    assert_eq!(rename(&mut a, s.id, ":U", false), Ok(()), "the same name");
    let list = streams(&mut a, s.id);
    assert_eq!(list, named(&[("::$DATA", 0), (":t:$DATA", 1), (":u:$DATA", 6)]));
    let free = file("f:s").disposition(CreateDisposition::CREATE);
    send(&mut b, &body(&free, OplockLevel::NONE)).unwrap();
    // Others find the stream by its new name, along with what its client may cache.
    waits(&mut b, Command::CREATE, &lease(file("f:u"), 2, LeaseState::READ_CACHING));
    lab.deliver(&mut [&mut a, &mut b]);
    broken(&mut a);
    assert_eq!(rename(&mut b, held, ":v", false), Err(NtStatus::FILE_CLOSED));
    let rh = LeaseState::READ_CACHING | LeaseState::HANDLE_CACHING;
    assert_eq!(acknowledge_lease(&mut a, 1, rh), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut a, &mut b]);
    let second = granted(&b.answers.pop_front().unwrap()).unwrap();
    let two = "others would continue with the old name";
    assert_eq!(rename(&mut b, second.id, ":v", false), Err(NtStatus::SHARING_VIOLATION), "{two}");
}

#[test]
fn a_stream_is_renamed_to_the_data_of_an_empty_file() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let s = file("f:s").id(&mut c);
    write(&mut c, s, 0, b"stream").unwrap();
    let f = file("f").disposition(OPEN).id(&mut c);
    assert_eq!(rename(&mut c, s, "::$DATA", true), Err(NtStatus::SHARING_VIOLATION), "its data are in use");
    close(&mut c, f).unwrap();
    rename(&mut c, s, "::$DATA", true).unwrap();
    assert_eq!(lab.memory.contents("f").as_deref(), Some(&b"stream"[..]));
    assert_eq!(read(&mut c, s, 0, 10), Err(NtStatus::FILE_DELETED));
    close(&mut c, s).unwrap();
    let s = file("f:s").id(&mut c);
    assert_eq!(rename(&mut c, s, "::$DATA", true), Err(NtStatus::INVALID_PARAMETER));
    let link = FileInformationClass::FILE_LINK_INFORMATION;
    let linked = set_file(&mut c, s, link, |b| {
        FileRenameInformation { replace_if_exists: false, root_directory: 0, file_name: "g".to_owned() }
            .encode(b);
    });
    assert_eq!(linked, Err(NtStatus::INVALID_PARAMETER));
}

#[test]
fn use_of_a_stream_does_not_break_leases_on_its_file() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = (lab.client_of(1), lab.client_of(2));
    let rwh = LeaseState::READ_CACHING | LeaseState::HANDLE_CACHING | LeaseState::WRITE_CACHING;
    let f = granted(&a.call(Command::CREATE, &lease(file("f"), 1, rwh)).unwrap()).unwrap();
    assert_eq!(f.lease.unwrap().lease_state, rwh);
    let s = granted(&b.call(Command::CREATE, &lease(file("f:s"), 1, rwh)).unwrap()).unwrap();
    assert_eq!((s.level, s.lease.unwrap().lease_state), (OplockLevel::LEASE, rwh));
    write(&mut b, s.id, 0, b"x").unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty() && b.answers.is_empty(), "no break");
    let key_of_another = a.call(Command::CREATE, &lease(file("f:t"), 1, rwh)).unwrap();
    assert_eq!(key_of_another.status(), NtStatus::INVALID_PARAMETER, "a lease belongs to one stream");
    assert_eq!(streams(&mut a, f.id), named(&[("::$DATA", 0), (":s:$DATA", 1)]), "no `t` was created");
}

#[test]
fn a_file_created_for_a_refused_stream_is_removed() {
    let mut lab = Lab::caching();
    let mut c = lab.client_of(1);
    let rh = LeaseState::READ_CACHING | LeaseState::HANDLE_CACHING;
    let _held = granted(&c.call(Command::CREATE, &lease(file("f"), 1, rh)).unwrap()).unwrap();
    let refused = c.call(Command::CREATE, &lease(file("g:s"), 1, rh)).unwrap();
    assert_eq!(refused.status(), NtStatus::INVALID_PARAMETER);
    assert_eq!(lab.memory.contents("g"), None);
}

#[test]
fn file_attributes_apply_to_the_streams_of_a_file() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    file("hidden").attributes(FileAttributes::HIDDEN).touch(&mut c);
    file("hidden:s").touch(&mut c);
    file("hidden:s").disposition(CreateDisposition::OVERWRITE_IF).touch(&mut c);
    let f = file("f").attributes(FileAttributes::READONLY).id(&mut c);
    let writes = file("f:s").access(AccessMask::FILE_GENERIC_WRITE);
    assert_eq!(writes.send(&mut c), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(streams(&mut c, f), named(&[("::$DATA", 0)]), "and the stream is not created");
    let both = file("g:s").attributes(FileAttributes::READONLY).send(&mut c).unwrap();
    write(&mut c, both.id, 0, b"by its maker").unwrap();
    assert!(both.attributes.contains(FileAttributes::READONLY));
}

#[test]
fn posix_clients_have_no_streams_and_preserve_existing_ones() {
    let mut lab = Lab::new();
    let (mut windows, mut linux) = (lab.client(), lab.posix());
    file("f:s").touch(&mut windows);
    let posix = |name, disposition| {
        file(name)
            .disposition(disposition)
            .context(forebay_smb::wire::create_context::RequestContext::Posix { mode: 0o644 })
            .access(ALL)
    };
    posix("f:s", CreateDisposition::OPEN_IF).touch(&mut linux);
    assert!(lab.memory.contents("f:s").is_some(), "a file of that name");
    posix("f", CreateDisposition::OVERWRITE).touch(&mut linux);
    let f = file("f").disposition(OPEN).id(&mut windows);
    assert_eq!(streams(&mut windows, f), named(&[("::$DATA", 0), (":s:$DATA", 0)]));
}

#[test]
fn extents_are_not_shared_with_streams_or_between_invalid_ranges() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let (f, s) = (file("f").id(&mut c), file("f:s").id(&mut c));
    for id in [f, s] {
        write(&mut c, id, 0, &[7; 16]).unwrap();
    }
    let mut share = |source_file_id, source_file_offset, target, target_file_offset, byte_count| {
        let mut request = Vec::new();
        let extents = DuplicateExtents { source_file_id, source_file_offset, target_file_offset, byte_count };
        extents.encode(&mut request);
        lab.memory.take_log();
        let (status, _) = fsctl(&mut c, target, FsctlCode::DUPLICATE_EXTENTS_TO_FILE, &request, 0);
        assert_eq!(status, NtStatus::NOT_SUPPORTED);
        lab.memory.take_log().contains(&"clone")
    };
    assert!(share(f, 0, f, 8, 8), "only the backend refuses");
    assert!(!share(s, 0, f, 0, 1) && !share(f, 0, s, 0, 1));
    assert!(!share(f, 0, f, 4, 8), "they overlap");
    assert!(!share(f, 8, f, 64, 9), "beyond the end of the source");
}

#[test]
fn stream_changes_are_reported_by_change_notify() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let d = directory("d").access(AccessMask::FILE_GENERIC_READ).id(&mut a);
    let all = CompletionFilter(0xfff);
    let ask = |a: &mut Client, b: &mut Client, change: &mut dyn FnMut(&mut Client)| {
        let mut body = Vec::new();
        Request { flags: Flags::empty(), output_buffer_length: 4096, file_id: d, completion_filter: all }
            .encode(&mut body);
        let mut answer = a.call(Command::CHANGE_NOTIFY, &body).unwrap();
        change(b);
        lab.deliver(&mut [a, b]);
        if answer.status() == NtStatus::PENDING {
            answer = a.answers.pop_front().expect("reported");
        }
        let list = FileNotifyInformation::parse_list(Response::parse(&answer.message).unwrap().output_buffer);
        list.unwrap().into_iter().map(|c| (c.action, c.file_name)).collect::<Vec<_>>()
    };
    let mut s = None;
    let made = ask(&mut a, &mut b, &mut |b| s = Some(file(r"d\f:s").id(b)));
    assert_eq!(made, [(NotifyAction::ADDED, "f".to_owned())]);
    let s = s.unwrap();
    let stream = |action| (action, "f:s:$DATA".to_owned());
    let added = ask(&mut a, &mut b, &mut |_| {});
    assert_eq!(added, [stream(NotifyAction::ADDED_STREAM)], "kept since");
    let written = ask(&mut a, &mut b, &mut |b| {
        write(b, s, 0, b"x").unwrap();
    });
    assert_eq!(written, [stream(NotifyAction::MODIFIED_STREAM)]);
    let renamed = ask(&mut a, &mut b, &mut |b| rename(b, s, ":t", false).unwrap());
    let after = (NotifyAction::ADDED_STREAM, "f:t:$DATA".to_owned());
    assert_eq!(renamed, [stream(NotifyAction::REMOVED_STREAM), after]);
    let removed = ask(&mut a, &mut b, &mut |b| {
        delete_pending(b, s, true).unwrap();
        close(b, s).unwrap();
    });
    assert_eq!(removed, [(NotifyAction::REMOVED_STREAM, "f:t:$DATA".to_owned())]);
}
