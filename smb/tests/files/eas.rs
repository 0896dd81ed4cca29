//! Extended attributes: QUERY_INFO, SET_INFO and CREATE.

use forebay_smb::ids::FileId;
use forebay_smb::limits::EA_BYTES_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::change_notify::{self, CompletionFilter};
use forebay_smb::wire::create::{CreateAction, CreateDisposition};
use forebay_smb::wire::create_context::RequestContext;
use forebay_smb::wire::fscc::ea::{EaFlags, FullEa, GetEa};
use forebay_smb::wire::fscc::file_info::{FileAllInformation, FileEaInformation};
use forebay_smb::wire::fscc::fs_info::{FileFsAttributeInformation, FileSystemAttributes};
use forebay_smb::wire::fscc::notify::FileNotifyInformation;
use forebay_smb::wire::fscc::{FileInformationClass as C, FsInformationClass as F};
use forebay_smb::wire::query_info::Flags;
use forebay_smb::wire::{AccessMask, Command};

use crate::calls::{Lab, close, compound, directory, file, query_eas, query_file, query_fs, set_file};
use crate::support::Client;

const NONE: Flags = Flags::empty();
const ANY_ID: FileId = FileId { persistent: u64::MAX, volatile: u64::MAX };

type Pair<'a> = (&'a str, &'a [u8]);

fn list(pairs: &[Pair<'_>]) -> Vec<u8> {
    let flags = EaFlags::empty();
    let eas: Vec<_> =
        pairs.iter().map(|(name, value)| FullEa { flags, name: name.as_bytes(), value }).collect();
    let mut out = Vec::new();
    FullEa::encode_list(&eas, &mut out);
    out
}

fn names(names: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    GetEa::encode_list(
        &names.iter().map(|name| GetEa { name: name.as_bytes() }).collect::<Vec<_>>(),
        &mut out,
    );
    out
}

fn set(client: &mut Client, id: FileId, pairs: &[Pair<'_>]) -> Result<(), NtStatus> {
    set_raw(client, id, &list(pairs))
}

fn set_raw(client: &mut Client, id: FileId, bytes: &[u8]) -> Result<(), NtStatus> {
    set_file(client, id, C::FILE_FULL_EA_INFORMATION, |b| b.extend_from_slice(bytes))
}

fn pairs(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    FullEa::parse_list(bytes)
        .unwrap()
        .into_iter()
        .map(|ea| (String::from_utf8(ea.name.to_vec()).unwrap(), ea.value.to_vec()))
        .collect()
}

/// All extended attributes, queried like Linux's client does.
fn all(client: &mut Client, id: FileId) -> Result<Vec<(String, Vec<u8>)>, NtStatus> {
    query_eas(client, id, NONE, 0, &[], 16_000).map(|(_, bytes)| pairs(&bytes))
}

fn owned(list: &[Pair<'_>]) -> Result<Vec<(String, Vec<u8>)>, NtStatus> {
    Ok(list.iter().map(|(name, value)| ((*name).to_owned(), value.to_vec())).collect())
}

fn size(client: &mut Client, id: FileId) -> u32 {
    let size = FileEaInformation::parse(&query_file(client, id, C::FILE_EA_INFORMATION, 4).unwrap()).unwrap();
    let all =
        FileAllInformation::parse(&query_file(client, id, C::FILE_ALL_INFORMATION, 4096).unwrap()).unwrap();
    assert_eq!(all.ea, size);
    size.ea_size
}

#[test]
fn attributes_are_set_replaced_and_removed() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    for id in [file("f").id(&mut c), directory("d").id(&mut c)] {
        assert_eq!(all(&mut c, id), Err(NtStatus::NO_EAS_ON_FILE));
        assert_eq!(size(&mut c, id), 0);
        set(&mut c, id, &[("epoch", b"12"), ("Epoch", b"another"), ("com.example:key=/", b"x")]).unwrap();
        let there: &[Pair<'_>] = &[("epoch", b"12"), ("Epoch", b"another"), ("com.example:key=/", b"x")];
        assert_eq!(all(&mut c, id), owned(there), "names are case-sensitive");
        assert_eq!(all(&mut c, id), owned(there), "Linux queries twice with one handle");
        // [MS-FSA] 2.1.5.12.10: 4, plus 5 and the lengths of name and value for each.
        assert_eq!(size(&mut c, id), 4 + (5 + 7) + (5 + 12) + (5 + 18));
        set(&mut c, id, &[("epoch", b"13"), ("Epoch", b""), ("none", b"")]).unwrap();
        assert_eq!(all(&mut c, id), owned(&[("com.example:key=/", b"x"), ("epoch", b"13")]));
        set(&mut c, id, &[("epoch", b""), ("com.example:key=/", b"")]).unwrap();
        assert_eq!(all(&mut c, id), Err(NtStatus::NO_EAS_ON_FILE));
        set(&mut c, id, &[]).expect("nothing to set");
    }
}

#[test]
fn a_linux_compound_with_trailing_bytes_sets_an_attribute() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    file("f").touch(&mut c);
    let open = file("f").disposition(CreateDisposition::OPEN).access(AccessMask::FILE_WRITE_EA).body();
    let mut ea = list(&[("k", b"value")]);
    ea.push(0);
    let mut set = Vec::new();
    forebay_smb::wire::set_info::Request {
        info_type: forebay_smb::wire::query_info::InfoType::FILE,
        file_info_class: C::FILE_FULL_EA_INFORMATION.0,
        additional_information: 0,
        file_id: ANY_ID,
        buffer: &ea,
    }
    .encode(&mut set);
    let mut end = Vec::new();
    let flags = forebay_smb::wire::close::Flags::empty();
    forebay_smb::wire::close::Request { flags, file_id: ANY_ID }.encode(&mut end);
    let requests = [(Command::CREATE, open), (Command::SET_INFO, set), (Command::CLOSE, end)];
    for answer in compound(&mut c, &requests) {
        assert_eq!(answer.status(), NtStatus::SUCCESS);
    }
    let reader = file("f").access(AccessMask::FILE_READ_EA).id(&mut c);
    assert_eq!(all(&mut c, reader), owned(&[("k", b"value")]));
}

#[test]
fn invalid_lists_are_refused_and_change_nothing() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    set(&mut c, f, &[("kept", b"1")]).unwrap();
    for name in ["", "a\0b", "bell\u{7}", "gr\u{fc}n"] {
        let refused = set(&mut c, f, &[("kept", b"2"), (name, b"x")]);
        assert_eq!(refused, Err(NtStatus::INVALID_EA_NAME), "{name:?}");
        let named = query_eas(&mut c, f, NONE, 0, &names(&["kept", name]), 4096);
        assert_eq!(named.err(), Some(NtStatus::INVALID_EA_NAME), "{name:?}");
    }
    let mut needed = list(&[("kept", b"2")]);
    needed[4] = EaFlags::FILE_NEED_EA.0;
    assert_eq!(set_raw(&mut c, f, &needed), Err(NtStatus::INVALID_EA_FLAG));
    let good = list(&[("kept", b"2"), ("more", b"3")]);
    let first = list(&[("kept", b"2")]).len().next_multiple_of(4);
    for length in (1..good.len()).filter(|length| *length != first) {
        let cut = set_raw(&mut c, f, &good[..length]);
        assert_eq!(cut, Err(NtStatus::EA_LIST_INCONSISTENT), "{length}");
    }
    let inconsistent = query_eas(&mut c, f, NONE, 0, &[1; 9], 4096);
    assert_eq!(inconsistent.err(), Some(NtStatus::EA_LIST_INCONSISTENT));
    assert_eq!(set(&mut c, f, &[("kept", b"2"), ("own.x", b"3")]), Err(NtStatus::ACCESS_DENIED));
    let large = vec![7; EA_BYTES_MAX - 5 - 5 + 1];
    assert_eq!(set(&mut c, f, &[("large", &large)]), Err(NtStatus::EA_TOO_LARGE));
    assert_eq!(all(&mut c, f), owned(&[("kept", b"1")]));
}

#[test]
fn the_largest_attribute_is_set_and_read() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let value = vec![7; EA_BYTES_MAX - 5 - 1];
    set(&mut c, f, &[("v", &value)]).unwrap();
    let (status, bytes) = query_eas(&mut c, f, NONE, 0, &[], 65_536).unwrap();
    assert_eq!((status, pairs(&bytes)), (NtStatus::SUCCESS, owned(&[("v", &value)]).unwrap()));
    assert_eq!(query_eas(&mut c, f, NONE, 0, &[], 16_000).err(), Some(NtStatus::BUFFER_TOO_SMALL));
    assert_eq!(set(&mut c, f, &[("w", b"1")]), Err(NtStatus::EA_TOO_LARGE));
    set(&mut c, f, &[("v", b""), ("w", b"1")]).expect("the removal makes room first");
}

#[test]
fn attributes_are_queried_by_name() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let ask = |c: &mut _, wanted: &[&str], flags, room| query_eas(c, f, flags, 0, &names(wanted), room);
    assert_eq!(ask(&mut c, &["a"], NONE, 4096).err(), Some(NtStatus::NO_EAS_ON_FILE));
    set(&mut c, f, &[("a", b"1"), ("b", b"22"), ("c", b"333")]).unwrap();
    let (status, bytes) = ask(&mut c, &["c", "none", "a"], NONE, 4096).unwrap();
    assert_eq!(status, NtStatus::SUCCESS);
    assert_eq!(pairs(&bytes), owned(&[("c", b"333"), ("none", b""), ("a", b"1")]).unwrap());
    let (status, short) = ask(&mut c, &["c", "none", "a"], NONE, bytes.len() as u32 - 1).unwrap();
    assert_eq!(status, NtStatus::BUFFER_OVERFLOW);
    assert_eq!(pairs(&short), owned(&[("c", b"333"), ("none", b"")]).unwrap(), "whole entries only");
    let (status, single) = ask(&mut c, &["c", "a"], Flags::RETURN_SINGLE_ENTRY, 4096).unwrap();
    assert_eq!((status, pairs(&single)), (NtStatus::SUCCESS, owned(&[("c", b"333")]).unwrap()));
    // These queries do not move a scan's position.
    assert_eq!(all(&mut c, f).unwrap().len(), 3);
}

#[test]
fn a_scan_continues_where_it_stopped() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    set(&mut c, f, &[("a", b"1"), ("b", b"22"), ("c", b"333")]).unwrap();
    let single = Flags::RETURN_SINGLE_ENTRY;
    let ask = |c: &mut _, flags, index, room| {
        query_eas(c, f, flags, index, &[], room).map(|(status, bytes)| {
            let names: Vec<String> = pairs(&bytes).into_iter().map(|(name, _)| name).collect();
            (status, names.join(" "))
        })
    };
    let one = |name: &str| Ok((NtStatus::SUCCESS, name.to_owned()));
    for name in ["a", "b", "c"] {
        assert_eq!(ask(&mut c, single, 0, 4096), one(name));
    }
    assert_eq!(ask(&mut c, single, 0, 4096), Err(NtStatus::NO_MORE_EAS));
    assert_eq!(ask(&mut c, NONE, 0, 4096), Err(NtStatus::NO_MORE_EAS));
    assert_eq!(ask(&mut c, single | Flags::RESTART_SCAN, 0, 4096), one("a"));
    assert_eq!(ask(&mut c, NONE, 0, 4096), one("b c"));
    assert_eq!(ask(&mut c, Flags::RESTART_SCAN, 0, 28), Ok((NtStatus::BUFFER_OVERFLOW, "a b".to_owned())));
    assert_eq!(ask(&mut c, NONE, 0, 12), Err(NtStatus::BUFFER_TOO_SMALL), "nothing is skipped");
    assert_eq!(ask(&mut c, NONE, 0, 28), one("c"));
    assert_eq!(ask(&mut c, Flags::INDEX_SPECIFIED, 2, 4096), one("b c"));
    assert_eq!(ask(&mut c, Flags::INDEX_SPECIFIED | single, 1, 4096), one("a"));
    assert_eq!(ask(&mut c, single, 0, 4096), one("b"));
    assert_eq!(ask(&mut c, Flags::INDEX_SPECIFIED, 4, 4096), Err(NtStatus::NO_MORE_EAS));
    for index in [0, 5, u32::MAX] {
        assert_eq!(ask(&mut c, Flags::INDEX_SPECIFIED, index, 4096), Err(NtStatus::NONEXISTENT_EA_ENTRY));
    }
}

#[test]
fn attributes_beyond_one_answer_are_read_by_a_scan() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    // With alignment they take more space on the wire than the size that is reported.
    let made: Vec<String> = (0..1000).map(|i| format!("n{i:05}")).collect();
    let value = [9; 54];
    for half in made.chunks(500) {
        set(&mut c, f, &half.iter().map(|name| (name.as_str(), &value[..])).collect::<Vec<_>>()).unwrap();
    }
    let mut found = Vec::new();
    loop {
        let (status, bytes) = query_eas(&mut c, f, NONE, 0, &[], 65_536).unwrap();
        assert!(bytes.len() <= 65_536);
        found.extend(pairs(&bytes).into_iter().map(|(name, _)| name));
        if status == NtStatus::SUCCESS {
            break;
        }
        assert_eq!(status, NtStatus::BUFFER_OVERFLOW);
    }
    assert_eq!(found, made);
}

#[test]
fn reading_and_setting_attributes_needs_rights() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let reader = file("f").access(AccessMask::FILE_READ_EA).id(&mut c);
    let writer = file("f").access(AccessMask::FILE_WRITE_EA).id(&mut c);
    set(&mut c, writer, &[("a", b"1")]).unwrap();
    assert_eq!(set(&mut c, reader, &[("a", b"2")]), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(all(&mut c, reader), owned(&[("a", b"1")]));
    assert_eq!(all(&mut c, writer), Err(NtStatus::ACCESS_DENIED));
    assert!(query_file(&mut c, writer, C::FILE_EA_INFORMATION, 4).is_ok(), "the size needs no right");
}

#[test]
fn a_file_is_created_with_its_attributes() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let eas = list(&[("a", b"1"), ("b", b"2")]);
    let with = |eas| file("f").context(RequestContext::EaBuffer(eas));
    let made = with(&eas).send(&mut c).unwrap();
    assert_eq!(made.action, CreateAction::CREATED);
    assert_eq!(all(&mut c, made.id), owned(&[("a", b"1"), ("b", b"2")]));
    let other = list(&[("b", b"3")]);
    let opened = with(&other).send(&mut c).unwrap();
    assert_eq!(opened.action, CreateAction::OPENED);
    assert_eq!(
        all(&mut c, opened.id),
        owned(&[("a", b"1"), ("b", b"2")]),
        "attributes of an existing file stay"
    );
    let overwritten = with(&other).disposition(CreateDisposition::OVERWRITE_IF).send(&mut c).unwrap();
    assert_eq!(overwritten.action, CreateAction::OVERWRITTEN);
    assert_eq!(all(&mut c, overwritten.id), owned(&[("a", b"1"), ("b", b"3")]), "O_TRUNC keeps them");
    let d = directory("d").context(RequestContext::EaBuffer(&eas)).id(&mut c);
    assert_eq!(all(&mut c, d).unwrap().len(), 2);
}

#[test]
fn a_file_with_invalid_attributes_is_not_created() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let refused = |c: &mut _, eas: &[u8]| file("f").context(RequestContext::EaBuffer(eas)).send(c).err();
    assert_eq!(refused(&mut c, &list(&[("own.x", b"1")])), Some(NtStatus::ACCESS_DENIED));
    assert_eq!(refused(&mut c, &list(&[("", b"1")])), Some(NtStatus::INVALID_EA_NAME));
    assert_eq!(refused(&mut c, &[1; 7]), Some(NtStatus::EA_LIST_INCONSISTENT));
    assert_eq!(lab.memory.contents("f"), None);
    let id = file("f").context(RequestContext::EaBuffer(&[])).id(&mut c);
    assert_eq!(all(&mut c, id), Err(NtStatus::NO_EAS_ON_FILE));
}

#[test]
fn attribute_changes_are_reported_by_change_notify() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let d = directory("d").id(&mut c);
    let f = file(r"d\f").id(&mut c);
    for filter in [CompletionFilter::EA, CompletionFilter::ATTRIBUTES] {
        let d = directory("d").id(&mut c);
        let mut body = Vec::new();
        change_notify::Request {
            flags: change_notify::Flags::empty(),
            output_buffer_length: 4096,
            file_id: d,
            completion_filter: filter,
        }
        .encode(&mut body);
        assert_eq!(c.call(Command::CHANGE_NOTIFY, &body).unwrap().status(), NtStatus::PENDING);
        assert_eq!(set(&mut c, f, &[("", b"1")]), Err(NtStatus::INVALID_EA_NAME));
        set(&mut c, f, &[("a", b"1")]).unwrap();
        lab.deliver(&mut [&mut c]);
        let answer = c.answers.pop_front().expect("an answer");
        let changes = change_notify::Response::parse(&answer.message).unwrap().output_buffer;
        let changes = FileNotifyInformation::parse_list(changes).unwrap();
        assert_eq!(changes.len(), 1);
        assert_eq!(changes[0].file_name, "f");
        close(&mut c, d).unwrap();
    }
    close(&mut c, d).unwrap();
}

#[test]
fn a_volume_announces_whether_it_supports_attributes() {
    for keeps in [false, true] {
        let mut lab = Lab::with(|v| v.extended_attributes = keeps);
        let mut c = lab.client();
        let f = file("f").id(&mut c);
        let attributes = query_fs(&mut c, f, F::FILE_FS_ATTRIBUTE_INFORMATION, 4096).unwrap();
        let attributes = FileFsAttributeInformation::parse(&attributes).unwrap().file_system_attributes;
        assert_eq!(attributes.contains(FileSystemAttributes::SUPPORTS_EXTENDED_ATTRIBUTES), keeps);
        if keeps {
            continue;
        }
        assert_eq!(size(&mut c, f), 0);
        let unsupported = NtStatus::EAS_NOT_SUPPORTED;
        assert_eq!(all(&mut c, f), Err(unsupported));
        assert_eq!(set(&mut c, f, &[("a", b"1")]), Err(unsupported));
        let eas = list(&[("a", b"1")]);
        let made = file("g").context(RequestContext::EaBuffer(&eas)).send(&mut c);
        assert_eq!(made.err(), Some(unsupported));
    }
}

#[test]
fn a_read_only_volume_refuses_attribute_changes() {
    let mut lab = Lab::with(|v| v.read_only = true);
    let mut c = lab.client();
    let root =
        directory("").disposition(CreateDisposition::OPEN).access(AccessMask::MAXIMUM_ALLOWED).id(&mut c);
    assert_eq!(set(&mut c, root, &[("a", b"1")]), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(all(&mut c, root), Err(NtStatus::NO_EAS_ON_FILE));
}
