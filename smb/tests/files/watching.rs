//! CHANGE_NOTIFY: which changes of directories are reported, when, and how the requests end.

use forebay_smb::ids::FileId;
use forebay_smb::limits;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::change_notify::{CompletionFilter, Flags, Request, Response};
use forebay_smb::wire::create::{CreateDisposition, CreateOptions};
use forebay_smb::wire::fscc::notify::{FileNotifyInformation, NotifyAction};
use forebay_smb::wire::{AccessMask, Command, Header, HeaderFlags, Ids};

use crate::calls::{Lab, close, delete_pending, directory, file, rename, write};
use crate::support::{Answer, Client};

const NAMES: CompletionFilter = CompletionFilter::FILE_NAME.union(CompletionFilter::DIR_NAME);
const EVERYTHING: CompletionFilter = CompletionFilter(0xfff);
const ADDED: NotifyAction = NotifyAction::ADDED;
const REMOVED: NotifyAction = NotifyAction::REMOVED;
const MODIFIED: NotifyAction = NotifyAction::MODIFIED;
const OLD: NotifyAction = NotifyAction::RENAMED_OLD_NAME;
const NEW: NotifyAction = NotifyAction::RENAMED_NEW_NAME;

fn ask_for(client: &mut Client, id: FileId, filter: CompletionFilter, tree: bool, room: u32) -> Answer {
    let mut body = Vec::new();
    let flags = if tree { Flags::WATCH_TREE } else { Flags::empty() };
    let request = Request { flags, output_buffer_length: room, file_id: id, completion_filter: filter };
    request.encode(&mut body);
    client.call(Command::CHANGE_NOTIFY, &body).unwrap()
}

/// Sends a request that has to wait. Returns the AsyncId.
fn waits(client: &mut Client, id: FileId, filter: CompletionFilter, tree: bool) -> u64 {
    let answer = ask_for(client, id, filter, tree, 4096);
    assert_eq!(answer.status(), NtStatus::PENDING);
    match answer.header.ids {
        Ids::Async { async_id } => async_id,
        other => panic!("{other:?}"),
    }
}

fn changes(answer: &Answer) -> Result<Vec<(NotifyAction, String)>, NtStatus> {
    match answer.status() {
        NtStatus::SUCCESS => {
            let list = Response::parse(&answer.message).unwrap().output_buffer;
            let list = FileNotifyInformation::parse_list(list).unwrap();
            Ok(list.into_iter().map(|c| (c.action, c.file_name)).collect())
        }
        status => Err(status),
    }
}

/// The answer to a request that waited.
fn reported(client: &mut Client) -> Result<Vec<(NotifyAction, String)>, NtStatus> {
    let answer = client.answers.pop_front().expect("an answer");
    assert!(answer.header.flags.contains(HeaderFlags::ASYNC_COMMAND));
    changes(&answer)
}

fn list(changes: &[(NotifyAction, &str)]) -> Result<Vec<(NotifyAction, String)>, NtStatus> {
    Ok(changes.iter().map(|(action, name)| (*action, (*name).to_owned())).collect())
}

fn cancel(client: &mut Client, async_id: u64) {
    let mut header = Header::request(Command::CANCEL, 0);
    header.session_id = client.session_id;
    header.flags.insert(HeaderFlags::ASYNC_COMMAND);
    header.ids = Ids::Async { async_id };
    let message = client.message(header, &[4, 0, 0, 0]);
    client.send(message).unwrap();
}

fn make(client: &mut Client, name: &str) {
    let id = file(name).id(client);
    close(client, id).unwrap();
}

fn remove(client: &mut Client, name: &str) {
    let id = file(name).disposition(CreateDisposition::OPEN).id(client);
    delete_pending(client, id, true).unwrap();
    close(client, id).unwrap();
}

#[test]
fn added_removed_and_renamed_files_are_reported() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    // An open that may delete the directory prevents renames in it by others.
    let d = directory("d").access(AccessMask::FILE_GENERIC_READ).id(&mut a);
    waits(&mut a, d, NAMES, false);
    make(&mut b, "elsewhere");
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty(), "only changes in the directory");
    make(&mut b, "d\\f");
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), list(&[(ADDED, "f")]));
    // Changes between two requests are kept.
    let f = file("d\\f").id(&mut b);
    rename(&mut b, f, "d\\g", false).unwrap();
    close(&mut b, f).unwrap();
    remove(&mut b, "d\\g");
    let between = changes(&ask_for(&mut a, d, NAMES, false, 4096));
    assert_eq!(between, list(&[(OLD, "f"), (NEW, "g"), (REMOVED, "g")]));
    // A file moves into the directory from another one, and back.
    waits(&mut a, d, NAMES, false);
    let e = file("elsewhere").id(&mut b);
    rename(&mut b, e, "d\\here", false).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), list(&[(ADDED, "here")]));
    waits(&mut a, d, NAMES, false);
    rename(&mut b, e, "elsewhere", false).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), list(&[(REMOVED, "here")]));
}

#[test]
fn only_filtered_changes_are_reported_and_the_first_filter_stays() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let d = directory("d").id(&mut a);
    let f = file("d\\f").id(&mut b);
    let dirs = waits(&mut a, d, CompletionFilter::DIR_NAME, false);
    make(&mut b, "d\\g");
    write(&mut b, f, 0, b"x").unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
    cancel(&mut a, dirs);
    assert_eq!(reported(&mut a), Err(NtStatus::CANCELLED));
    waits(&mut a, d, EVERYTHING, true);
    make(&mut b, "d\\h");
    let sub = directory("d\\sub").id(&mut b);
    close(&mut b, sub).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), list(&[(ADDED, "sub")]));

    let other = directory("d").disposition(CreateDisposition::OPEN).id(&mut a);
    waits(&mut a, other, CompletionFilter::LAST_WRITE, false);
    write(&mut b, f, 0, b"y").unwrap();
    write(&mut b, f, 1, b"z").unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), list(&[(MODIFIED, "f")]));
    assert_eq!(changes(&ask_for(&mut a, other, NAMES, false, 4096)), list(&[(MODIFIED, "f")]), "once");

    // Without a filter, only the end is ever reported.
    let blind = directory("d").disposition(CreateDisposition::OPEN).id(&mut a);
    waits(&mut a, blind, CompletionFilter(0xffff_f000), true);
    make(&mut b, "d\\i");
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
    close(&mut a, blind).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), Err(NtStatus::NOTIFY_CLEANUP));
}

#[test]
fn watch_tree_reports_changes_at_any_depth() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let root = directory("").disposition(CreateDisposition::OPEN).id(&mut a);
    let d = directory("d").id(&mut a);
    let deep = directory("d\\e").id(&mut b);
    close(&mut b, deep).unwrap();
    waits(&mut a, root, NAMES, true);
    waits(&mut a, d, NAMES, true);
    make(&mut b, "d\\e\\f");
    lab.deliver(&mut [&mut a, &mut b]);
    let mut reported = [reported(&mut a).unwrap(), reported(&mut a).unwrap()].concat();
    reported.sort_by(|x, y| x.1.cmp(&y.1));
    assert_eq!(Ok(reported), list(&[(ADDED, "d\\e\\f"), (ADDED, "e\\f")]));
    // A directory that only shares a name prefix is not below.
    waits(&mut a, d, NAMES, true);
    let like = directory("d2").id(&mut b);
    close(&mut b, like).unwrap();
    make(&mut b, "d2\\f");
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
}

#[test]
fn a_watch_follows_a_renamed_directory() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let d = directory("d").id(&mut a);
    waits(&mut a, d, NAMES, false);
    rename(&mut a, d, "moved", false).unwrap();
    make(&mut b, "moved\\f");
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), list(&[(ADDED, "f")]));
    waits(&mut a, d, NAMES, false);
    close(&mut a, d).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), Err(NtStatus::NOTIFY_CLEANUP));
}

#[test]
fn changes_beyond_the_buffer_are_answered_with_notify_enum_dir() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let d = directory("d").id(&mut a);
    // The server keeps as many changes as the first request has room for.
    let first = ask_for(&mut a, d, NAMES, false, 30);
    let Ids::Async { async_id } = first.header.ids else { panic!("it waits") };
    cancel(&mut a, async_id);
    assert_eq!(reported(&mut a), Err(NtStatus::CANCELLED));
    for name in ["d\\f", "d\\g", "d\\h"] {
        make(&mut b, name);
    }
    let answer = ask_for(&mut a, d, NAMES, false, 4096);
    assert_eq!(answer.status(), NtStatus::NOTIFY_ENUM_DIR);
    assert!(Response::parse(&answer.message).unwrap().output_buffer.is_empty());
    // That ends with the answer.
    waits(&mut a, d, NAMES, false);
    make(&mut b, "d\\i");
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), list(&[(ADDED, "i")]));
    // An empty buffer only asks whether something has changed.
    assert_eq!(ask_for(&mut a, d, NAMES, false, 0).status(), NtStatus::PENDING);
    make(&mut b, "d\\j");
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), Err(NtStatus::NOTIFY_ENUM_DIR));
}

#[test]
fn buffered_changes_are_limited_regardless_of_the_client_buffer() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let d = directory("d").id(&mut a);
    let mut body = Vec::new();
    let room = 8 << 20;
    Request { flags: Flags::empty(), output_buffer_length: room, file_id: d, completion_filter: NAMES }
        .encode(&mut body);
    while a.credits < 200 {
        a.call(Command::ECHO, &[4, 0, 0, 0]).unwrap();
    }
    let interim = a.call_charged(Command::CHANGE_NOTIFY, &body, 128).unwrap();
    let Ids::Async { async_id } = interim.header.ids else { panic!("it waits") };
    cancel(&mut a, async_id);
    reported(&mut a).unwrap_err();
    let long = "x".repeat(200);
    for i in 0..=limits::NOTIFY_BUFFER_BYTES_MAX / 400 {
        make(&mut b, &format!("d\\{long}{i}"));
    }
    let answer = a.call_charged(Command::CHANGE_NOTIFY, &body, 128).unwrap();
    assert_eq!(answer.status(), NtStatus::NOTIFY_ENUM_DIR);
}

#[test]
fn requests_of_one_open_are_answered_in_order() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let d = directory("d").id(&mut a);
    let first = waits(&mut a, d, NAMES, false);
    let second = waits(&mut a, d, NAMES, false);
    assert_ne!(first, second);
    make(&mut b, "d\\f");
    make(&mut b, "d\\g");
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(reported(&mut a), list(&[(ADDED, "f")]));
    assert_eq!(reported(&mut a), list(&[(ADDED, "g")]));
    assert!(a.answers.is_empty());
}

#[test]
fn a_cancelled_request_reports_changes_that_preceded_the_cancel() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let d = directory("d").id(&mut a);
    let async_id = waits(&mut a, d, NAMES, false);
    make(&mut b, "d\\f");
    // The wake-up is still on its way.
    cancel(&mut a, async_id);
    assert_eq!(reported(&mut a), list(&[(ADDED, "f")]));
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
}

#[test]
fn a_watch_ends_with_its_tree_session_or_directory() {
    for end in ["tree", "logoff", "deletion", "delete on close"] {
        let mut lab = Lab::new();
        let (mut a, mut b) = (lab.client(), lab.client());
        a.sign = true;
        let d = directory("d").id(&mut a);
        waits(&mut a, d, NAMES, false);
        let mut expected = NtStatus::NOTIFY_CLEANUP;
        match end {
            "tree" => assert_eq!(
                a.call(Command::TREE_DISCONNECT, &[4, 0, 0, 0]).unwrap().status(),
                NtStatus::SUCCESS
            ),
            "logoff" => {
                assert_eq!(a.call(Command::LOGOFF, &[4, 0, 0, 0]).unwrap().status(), NtStatus::SUCCESS);
            }
            "deletion" => {
                let again = directory("d").disposition(CreateDisposition::OPEN).id(&mut b);
                delete_pending(&mut b, again, true).unwrap();
                expected = NtStatus::DELETE_PENDING;
            }
            _ => {
                let options = CreateOptions::DIRECTORY_FILE | CreateOptions::DELETE_ON_CLOSE;
                let again = directory("d").disposition(CreateDisposition::OPEN).options(options).id(&mut b);
                close(&mut b, again).unwrap();
                expected = NtStatus::DELETE_PENDING;
            }
        }
        lab.deliver(&mut [&mut a, &mut b]);
        let answer = a.answers.pop_front().expect("an answer");
        assert_eq!(answer.status(), expected, "{end}");
        assert!(answer.header.flags.contains(HeaderFlags::SIGNED), "{end}");
        if expected == NtStatus::DELETE_PENDING {
            assert_eq!(ask_for(&mut a, d, NAMES, false, 4096).status(), NtStatus::DELETE_PENDING, "{end}");
        }
    }
}

#[test]
fn a_sealed_watch_is_answered_sealed_when_its_session_is_replaced() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    a.seal = true;
    let d = directory("d").id(&mut a);
    waits(&mut a, d, NAMES, false);
    let mut back = lab.back("vol-user", "vol-secret", a.session_id);
    lab.deliver(&mut [&mut a, &mut back]);
    let answer = a.answers.pop_front().expect("an answer");
    assert_eq!((answer.status(), answer.sealed), (NtStatus::NOTIFY_CLEANUP, true));
}

#[test]
fn a_lost_channel_ends_its_request_and_no_change_is_missed() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let mut second = lab.channel(&a);
    let mut b = lab.client();
    let d = directory("d").id(&mut a);
    waits(&mut a, d, NAMES, false);
    make(&mut b, "d\\f");
    // Lost before the wake-up: the other channel is asked to retry.
    a.disconnect();
    lab.deliver(&mut [&mut a, &mut second, &mut b]);
    assert_eq!(ask_for(&mut second, d, NAMES, false, 4096).status(), NtStatus::NOTIFY_ENUM_DIR);
    waits(&mut second, d, NAMES, false);
    make(&mut b, "d\\g");
    lab.deliver(&mut [&mut a, &mut second, &mut b]);
    assert_eq!(reported(&mut second), list(&[(ADDED, "g")]));
}

#[test]
fn a_request_on_another_channel_reports_changes_of_a_lost_answer() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let mut second = lab.channel(&a);
    let mut b = lab.client();
    let d = directory("d").id(&mut a);
    waits(&mut a, d, NAMES, false);
    waits(&mut second, d, NAMES, false);
    make(&mut b, "d\\f");
    a.disconnect();
    lab.deliver(&mut [&mut a, &mut second, &mut b]);
    assert_eq!(reported(&mut second), Err(NtStatus::NOTIFY_ENUM_DIR));
    waits(&mut second, d, NAMES, false);
}

#[test]
fn invalid_change_notify_requests_are_refused() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let f = file("f").id(&mut a);
    assert_eq!(ask_for(&mut a, f, NAMES, false, 4096).status(), NtStatus::INVALID_PARAMETER);
    let blind = directory("d").access(AccessMask::FILE_READ_ATTRIBUTES).id(&mut a);
    assert_eq!(ask_for(&mut a, blind, NAMES, false, 4096).status(), NtStatus::ACCESS_DENIED);
    let d = directory("d").disposition(CreateDisposition::OPEN).id(&mut a);
    assert_eq!(ask_for(&mut a, d, NAMES, false, 16 << 20).status(), NtStatus::INVALID_PARAMETER);
    close(&mut a, d).unwrap();
    assert_eq!(ask_for(&mut a, d, NAMES, false, 4096).status(), NtStatus::FILE_CLOSED);
}

#[test]
fn waiting_requests_are_limited_per_connection() {
    let mut lab = Lab::new();
    let mut a = lab.client();
    let d = directory("d").id(&mut a);
    for _ in 0..limits::ASYNC_PER_CONNECTION_MAX {
        waits(&mut a, d, NAMES, false);
    }
    let answer = ask_for(&mut a, d, NAMES, false, 4096);
    assert_eq!(answer.status(), NtStatus::INSUFFICIENT_RESOURCES);
    close(&mut a, d).unwrap();
    lab.deliver(&mut [&mut a]);
    assert_eq!(a.answers.len(), limits::ASYNC_PER_CONNECTION_MAX);
}
