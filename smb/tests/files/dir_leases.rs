//! Leases on directories: when they are granted, and what breaks them.

use std::time::Duration;

use forebay_smb::engine::ServerConfig;
use forebay_smb::ids::FileId;
use forebay_smb::limits::{OPLOCK_BREAK_SECONDS_MAX, WRITES_UNREPORTED_SECONDS_MAX};
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{self, CreateDisposition, CreateOptions, OplockLevel};
use forebay_smb::wire::create_context::{
    DurableFlags, Lease, LeaseFlags, LeaseState, LeaseV2, RequestContext, ResponseContext,
};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::file_info::FileEndOfFileInformation;
use forebay_smb::wire::fscc::name_info::FileRenameInformation;
use forebay_smb::wire::oplock_break::Notification;
use forebay_smb::wire::query_directory::Flags;
use forebay_smb::wire::{AccessMask, Capabilities, Command, Dialect, FileAttributes, FileTime, negotiate};

use crate::caching::{acknowledge_lease, broken, granted, send, waited, waits};
use crate::calls::{
    Lab, Open, basic, close, delete_pending, directory, file, flush, list, rename, set_file, write,
};
use crate::support::{Client, config, start};

const NONE: LeaseState = LeaseState::empty();
const R: LeaseState = LeaseState::READ_CACHING;
const W: LeaseState = LeaseState::WRITE_CACHING;
const H: LeaseState = LeaseState::HANDLE_CACHING;
const RH: LeaseState = R.union(H);
const RWH: LeaseState = RH.union(W);

/// The keys of a client's lease on `d` and of another lease.
const D: u8 = 0xd;
const OTHER: u8 = 0xe;

/// A client that caches directories.
fn client(lab: &mut Lab, guid: u8) -> Client {
    lab.client_with(guid, Capabilities::DIRECTORY_LEASING)
}

fn two(lab: &mut Lab) -> (Client, Client) {
    (client(lab, 1), client(lab, 2))
}

fn with_lease(open: Open<'_>, key: u8, lease_state: LeaseState, parent: Option<u8>) -> Vec<u8> {
    let lease_flags = if parent.is_some() { LeaseFlags::PARENT_LEASE_KEY_SET } else { LeaseFlags::empty() };
    let v2 = Some(LeaseV2 { parent_lease_key: [parent.unwrap_or_default(); 16], epoch: 0 });
    let lease = Lease { lease_key: [key; 16], lease_state, lease_flags, v2 };
    let mut body = open.context(RequestContext::Lease(lease)).body();
    body[3] = OplockLevel::LEASE.0;
    body
}

/// A directory as cifs.ko opens it for its cache.
fn cached(name: &str) -> Open<'_> {
    directory(name).access(AccessMask::FILE_GENERIC_READ)
}

/// Opens a directory with a lease. Returns the open and the lease's state and epoch.
fn leased(client: &mut Client, name: &str, key: u8, state: LeaseState) -> (FileId, LeaseState, u16) {
    let opened = send(client, &with_lease(cached(name), key, state, None)).unwrap();
    let lease = opened.lease.expect("a lease");
    assert_eq!((opened.level, lease.lease_key), (OplockLevel::LEASE, [key; 16]));
    (opened.id, lease.lease_state, lease.v2.expect("version 2").epoch)
}

/// A file with a lease; the open names `parent` as the lease on its directory.
fn opened_under(client: &mut Client, name: &str, key: u8, state: LeaseState, parent: Option<u8>) -> FileId {
    send(client, &with_lease(file(name), key, state, parent)).unwrap().id
}

/// An open without oplock or lease.
fn plain(client: &mut Client, open: &Open<'_>) -> FileId {
    let mut body = open.body();
    body[3] = OplockLevel::NONE.0;
    send(client, &body).unwrap().id
}

/// A lease break: the key, from, to, and whether it requires an acknowledgment.
fn lease_broken(client: &mut Client) -> (u8, LeaseState, LeaseState, bool) {
    let Notification::Lease(n) = broken(client) else { panic!("an oplock's") };
    (n.lease_key[0], n.current_lease_state, n.new_lease_state, n.flags.0 != 0)
}

fn set_size(client: &mut Client, id: FileId, end_of_file: u64) {
    set_file(client, id, FileInformationClass::FILE_END_OF_FILE_INFORMATION, |out| {
        FileEndOfFileInformation { end_of_file }.encode(out);
    })
    .unwrap();
}

fn set_times(client: &mut Client, id: FileId, times: u64) {
    set_file(client, id, FileInformationClass::FILE_BASIC_INFORMATION, |out| {
        basic(FileTime(times), FileAttributes::empty()).encode(out);
    })
    .unwrap();
}

fn link(client: &mut Client, id: FileId, to: &str) {
    set_file(client, id, FileInformationClass::FILE_LINK_INFORMATION, |out| {
        FileRenameInformation { replace_if_exists: false, root_directory: 0, file_name: to.to_owned() }
            .encode(out);
    })
    .unwrap();
}

#[test]
fn directory_leasing_is_announced_to_capable_smb3_clients() {
    let capabilities = |caching, dialect, can| {
        let lab = Lab::of(ServerConfig { caching, min_dialect: Dialect::SMB2_0_2, ..config() }, |_| {});
        let mut client = Client::new(&lab.server, 1, dialect);
        if can {
            client.capabilities.insert(Capabilities::DIRECTORY_LEASING);
        }
        let answer = client.negotiate().unwrap();
        let answered = negotiate::Response::parse(&answer.message).unwrap().capabilities;
        answered.contains(Capabilities::DIRECTORY_LEASING)
    };
    for (dialect, expected) in [
        (Dialect::SMB2_0_2, false),
        (Dialect::SMB2_1, false),
        (Dialect::SMB3_0, true),
        (Dialect::SMB3_1_1, true),
    ] {
        assert_eq!(capabilities(true, dialect, true), expected, "{dialect:?}");
        assert!(!capabilities(true, dialect, false), "{dialect:?}");
        assert!(!capabilities(false, dialect, true), "{dialect:?}");
    }
}

#[test]
fn at_most_read_and_handle_caching_is_granted() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    for (asked, expected) in
        [(NONE, NONE), (R, R), (H, NONE), (W, NONE), (RH, RH), (R | W, R), (RWH, RH), (W | H, NONE)]
    {
        let (id, state, epoch) = leased(&mut a, "d", D, asked);
        assert_eq!((state, epoch), (expected, u16::from(expected != NONE)), "{asked:?}");
        // While another client has a lease.
        let (other, state, _) = leased(&mut b, "d", D, asked);
        assert_eq!(state, expected, "{asked:?}");
        close(&mut a, id).unwrap();
        close(&mut b, other).unwrap();
    }
    let key_of_another = with_lease(cached("e"), D, RH, None);
    leased(&mut a, "d", D, RH);
    assert_eq!(send(&mut a, &key_of_another).unwrap_err(), NtStatus::INVALID_PARAMETER);
}

#[test]
fn only_v2_leases_of_capable_clients_are_granted_on_directories() {
    let mut lab = Lab::caching();
    let (mut a, mut without) = (client(&mut lab, 1), lab.client_of(2));
    let nothing = |client: &mut Client, body: &[u8]| {
        let opened = send(client, body).unwrap();
        assert_eq!((opened.level, opened.lease), (OplockLevel::NONE, None));
    };
    for level in [OplockLevel::II, OplockLevel::EXCLUSIVE, OplockLevel::BATCH] {
        let mut body = cached("d").body();
        body[3] = level.0;
        nothing(&mut a, &body);
    }
    let lease = Lease { lease_key: [D; 16], lease_state: RH, lease_flags: LeaseFlags::empty(), v2: None };
    let mut body = cached("d").context(RequestContext::Lease(lease)).body();
    body[3] = OplockLevel::LEASE.0;
    nothing(&mut a, &body);
    send(&mut a, &with_lease(file("g"), D, RH, None)).unwrap();
    assert_eq!(send(&mut a, &body).unwrap_err(), NtStatus::INVALID_PARAMETER, "the key of another file");
    nothing(&mut without, &with_lease(cached("d"), D, RH, None));
    let file = send(&mut without, &with_lease(file("f"), 1, RH, None)).unwrap();
    assert_eq!(file.lease.unwrap().lease_state, RH, "file leases are granted");
}

#[test]
fn a_directory_lease_makes_no_handle_durable() {
    let mut lab = Lab::caching();
    let mut a = client(&mut lab, 1);
    let flags = DurableFlags::empty();
    let durable = RequestContext::DurableHandleRequestV2 { timeout_ms: 0, flags, create_guid: [7; 16] };
    let answer = a.call(Command::CREATE, &with_lease(cached("d").context(durable), D, RH, None)).unwrap();
    assert_eq!(granted(&answer).unwrap().lease.unwrap().lease_state, RH);
    let response = create::Response::parse(&answer.message).unwrap();
    assert!(response.contexts.iter().all(|c| matches!(c, ResponseContext::Lease(_))));
}

/// A change in `d`, by a client that has `d\f` open as `f`.
type Change = fn(&mut Client, FileId);

const CHANGES: [(&str, Change); 11] = [
    ("a new file", |b, _| close_of(b, &file("d\\new"))),
    ("a new directory", |b, _| close_of(b, &directory("d\\sub"))),
    ("an overwritten file", |b, _| {
        close_of(b, &file("d\\old").disposition(CreateDisposition::OVERWRITE));
    }),
    ("a deleted file", |b, _| {
        let id = plain(b, &file("d\\old"));
        delete_pending(b, id, true).unwrap();
        close(b, id).unwrap();
    }),
    ("a file deleted on close", |b, _| {
        close_of(b, &file("d\\old").option(CreateOptions::DELETE_ON_CLOSE));
    }),
    ("another name", |b, f| rename(b, f, "d\\g", false).unwrap()),
    ("one more name", |b, f| link(b, f, "d\\h")),
    ("a name from elsewhere", |b, _| {
        let id = plain(b, &file("elsewhere"));
        rename(b, id, "d\\here", false).unwrap();
        close(b, id).unwrap();
    }),
    ("other times", |b, f| set_times(b, f, 0x1d0_0000_0000_0000)),
    ("another size", |b, f| set_size(b, f, 7)),
    ("other contents", |b, f| {
        write(b, f, 0, b"new").unwrap();
    }),
];

fn close_of(client: &mut Client, open: &Open<'_>) {
    let id = plain(client, open);
    close(client, id).unwrap();
}

#[test]
fn a_change_breaks_the_lease_once_and_it_can_be_granted_again() {
    for (what, change) in CHANGES {
        let mut lab = Lab::caching();
        let (mut a, mut b) = two(&mut lab);
        close_of(&mut b, &directory("d"));
        close_of(&mut b, &file("d\\old"));
        close_of(&mut b, &file("elsewhere"));
        let f = plain(&mut b, &file("d\\f"));
        let (d, state, epoch) = leased(&mut a, "d", D, RH);
        assert_eq!((state, epoch), (RH, 1));
        change(&mut b, f);
        lab.deliver(&mut [&mut a, &mut b]);
        let Notification::Lease(notification) = broken(&mut a) else { panic!("an oplock's") };
        assert_eq!(notification.new_epoch, 2, "{what}");
        assert_eq!(
            (notification.current_lease_state, notification.new_lease_state, notification.flags.0),
            (RH, NONE, 1),
            "{what}"
        );
        // Changes before the acknowledgment cause no further notification.
        set_times(&mut b, f, 0x1d1_0000_0000_0000);
        lab.deliver(&mut [&mut a, &mut b]);
        assert!(a.answers.is_empty(), "{what}");
        assert_eq!(acknowledge_lease(&mut a, D, NONE), NtStatus::SUCCESS);
        set_times(&mut b, f, 0x1d2_0000_0000_0000);
        lab.deliver(&mut [&mut a, &mut b]);
        assert!(a.answers.is_empty(), "{what}: there is nothing left to break");
        let (again, state, epoch) = leased(&mut a, "d", D, RH);
        assert_eq!((state, epoch), (RH, 3), "{what}");
        // The first handle keeps the lease.
        close(&mut a, again).unwrap();
        set_times(&mut b, f, 0x1d3_0000_0000_0000);
        lab.deliver(&mut [&mut a, &mut b]);
        assert_eq!(lease_broken(&mut a), (D, RH, NONE, true), "{what}");
        close(&mut a, d).unwrap();
        assert!(b.answers.is_empty());
    }
}

#[test]
fn read_caching_alone_is_broken_without_an_acknowledgment() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    leased(&mut a, "d", D, R);
    close_of(&mut b, &file("d\\f"));
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, R, NONE, false));
    assert_eq!(acknowledge_lease(&mut a, D, NONE), NtStatus::UNSUCCESSFUL);
    close_of(&mut b, &file("d\\g"));
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
}

#[test]
fn reads_and_changes_elsewhere_do_not_break_the_lease() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    close_of(&mut b, &file("f"));
    close_of(&mut b, &directory("d"));
    close_of(&mut b, &directory("d\\sub"));
    close_of(&mut b, &file("d\\f"));
    leased(&mut a, "d", D, RH);
    // Changes elsewhere, above and below the directory.
    close_of(&mut b, &file("g"));
    close_of(&mut b, &file("d\\sub\\g"));
    let id = plain(&mut b, &file("f"));
    set_times(&mut b, id, 0x1d0_0000_0000_0000);
    // Reads only.
    close_of(&mut b, &file("d\\f"));
    let id = plain(&mut b, &directory("d"));
    list(&mut b, id, "*", Flags::empty(), 4096).unwrap();
    let (other, state, _) = leased(&mut b, "d", OTHER, RH);
    assert_eq!(state, RH);
    close(&mut b, other).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
    // The directory's own attributes are cached with it.
    set_times(&mut b, id, 0x1d0_0000_0000_0000);
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
}

#[test]
fn changes_by_an_open_with_a_parent_lease_key_spare_that_lease() {
    for same_client in [true, false] {
        let mut lab = Lab::caching();
        let (mut a, mut b) = two(&mut lab);
        leased(&mut a, "d", D, RH);
        let mut c = client(&mut lab, 3);
        leased(&mut c, "d", OTHER, RH);
        let changer = if same_client { &mut a } else { &mut b };
        let f = opened_under(changer, "d\\f", 1, RWH, Some(D));
        set_size(changer, f, 5);
        set_times(changer, f, 0x1d0_0000_0000_0000);
        link(changer, f, "d\\h");
        rename(changer, f, "d\\g", false).unwrap();
        write(changer, f, 0, b"new").unwrap();
        flush(changer, f).unwrap();
        delete_pending(changer, f, true).unwrap();
        close(changer, f).unwrap();
        lab.deliver(&mut [&mut a, &mut b, &mut c]);
        assert!(
            a.answers.is_empty(),
            "[MS-FSA] 2.1.4.12.2 compares keys, regardless of which client chose them"
        );
        assert_eq!(lease_broken(&mut c), (OTHER, RH, NONE, true));
        assert!(c.answers.is_empty());
        let changer = if same_client { &mut a } else { &mut b };
        opened_under(changer, "d\\f", 1, RWH, Some(2));
        lab.deliver(&mut [&mut a, &mut b, &mut c]);
        assert_eq!(lease_broken(&mut a), (D, RH, NONE, true), "another key");
    }
}

#[test]
fn a_rename_breaks_leases_on_both_directories_except_its_parent_key() {
    for (named, breaks) in [(None, [true, true]), (Some(D), [false, true]), (Some(OTHER), [true, false])] {
        let mut lab = Lab::caching();
        let (mut a, mut b) = two(&mut lab);
        close_of(&mut b, &directory("d"));
        close_of(&mut b, &directory("e"));
        let f = opened_under(&mut b, "d\\f", 1, RH, named);
        leased(&mut a, "d", D, RH);
        leased(&mut a, "e", OTHER, RH);
        rename(&mut b, f, "e\\f", false).unwrap();
        lab.deliver(&mut [&mut a, &mut b]);
        for (key, _) in [(D, breaks[0]), (OTHER, breaks[1])].into_iter().filter(|(_, breaks)| *breaks) {
            assert_eq!(lease_broken(&mut a), (key, RH, NONE, true), "{named:?}");
        }
        assert!(a.answers.is_empty(), "{named:?}");
        // An additional name affects only its own directory.
        let g = opened_under(&mut b, "d\\g", 2, RH, Some(D));
        if breaks[1] {
            acknowledge_lease(&mut a, OTHER, NONE);
        }
        let (_, state, _) = leased(&mut a, "e", OTHER, RH);
        assert_eq!(state, RH);
        link(&mut b, g, "e\\g");
        lab.deliver(&mut [&mut a, &mut b]);
        assert_eq!(lease_broken(&mut a), (OTHER, RH, NONE, true), "{named:?}");
        assert!(a.answers.is_empty(), "{named:?}");
    }
}

#[test]
fn writes_under_write_caching_break_the_lease_at_flush_or_close() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    let f = opened_under(&mut b, "f", 1, RWH, None);
    // In the root.
    leased(&mut a, "", D, RH);
    write(&mut b, f, 0, b"later").unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
    flush(&mut b, f).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
    acknowledge_lease(&mut a, D, NONE);
    leased(&mut a, "", D, RH);
    flush(&mut b, f).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty(), "nothing was written");
    write(&mut b, f, 0, b"later").unwrap();
    close(&mut b, f).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
    acknowledge_lease(&mut a, D, NONE);
    leased(&mut a, "", D, RH);
    let f = opened_under(&mut b, "f", 1, RWH, None);
    close(&mut b, f).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty(), "nothing was written");
}

#[test]
fn writes_without_a_flush_break_the_lease_after_a_timeout() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    let f = opened_under(&mut b, "f", 1, RWH, None);
    let own = opened_under(&mut b, "own", 2, RWH, Some(D));
    leased(&mut a, "", D, RH);
    for _ in 0..2 {
        write(&mut b, f, 0, b"a line").unwrap();
    }
    lab.server.tick(start() + Duration::from_secs(WRITES_UNREPORTED_SECONDS_MAX - 1));
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty(), "the client may have more to send");
    lab.server.tick(start() + Duration::from_secs(WRITES_UNREPORTED_SECONDS_MAX));
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
    acknowledge_lease(&mut a, D, NONE);
    leased(&mut a, "", D, RH);
    // Again, although it was listed before. A flush reports immediately, so nothing is left for later.
    write(&mut b, f, 0, b"a line").unwrap();
    flush(&mut b, f).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
    acknowledge_lease(&mut a, D, NONE);
    leased(&mut a, "", D, RH);
    write(&mut b, f, 0, b"a line").unwrap();
    lab.server.tick(start() + Duration::from_secs(2 * WRITES_UNREPORTED_SECONDS_MAX));
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
    acknowledge_lease(&mut a, D, NONE);
    leased(&mut a, "", D, RH);
    // Nothing more from this open, and the other one names the lease of its directory.
    write(&mut b, own, 0, b"a line").unwrap();
    lab.server.tick(start() + Duration::from_secs(60));
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
}

#[test]
fn writes_without_write_caching_break_each_lease_at_once() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    let f = opened_under(&mut b, "f", 1, RH, None);
    for _ in 0..3 {
        leased(&mut a, "", D, RH);
        for _ in 0..2 {
            write(&mut b, f, 0, b"now").unwrap();
        }
        lab.deliver(&mut [&mut a, &mut b]);
        assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
        assert!(a.answers.is_empty());
        acknowledge_lease(&mut a, D, NONE);
    }
    // Another directory can have other leases.
    close_of(&mut b, &directory("d"));
    let (_, state, _) = leased(&mut a, "d", OTHER, RH);
    assert_eq!(state, RH);
    let mover = opened_under(&mut b, "f", 1, RH, Some(OTHER));
    rename(&mut b, mover, "d\\f", false).unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
    write(&mut b, f, 0, b"now").unwrap();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (OTHER, RH, NONE, true));
}

#[test]
fn a_delete_spares_the_lease_named_by_both_deleter_and_last_closer() {
    // Whether the first or the second handle deletes, and what breaks when the second is closed.
    for (deleter, by_option, expected) in
        [(0, false, &[D, OTHER][..]), (1, false, &[D][..]), (0, true, &[D, OTHER][..]), (1, true, &[D][..])]
    {
        let mut lab = Lab::caching();
        let mut a = client(&mut lab, 1);
        close_of(&mut a, &directory("d"));
        close_of(&mut a, &file("d\\f"));
        leased(&mut a, "d", D, RH);
        leased(&mut a, "d", OTHER, RH);
        let handles = [(1, D), (2, OTHER)].map(|(key, parent)| {
            let open = file("d\\f");
            let by_option = by_option && deleter + 1 == usize::from(key);
            let open = if by_option { open.option(CreateOptions::DELETE_ON_CLOSE) } else { open };
            send(&mut a, &with_lease(open, key, R, Some(parent))).unwrap().id
        });
        if !by_option {
            delete_pending(&mut a, handles[deleter], true).unwrap();
        }
        close(&mut a, handles[0]).unwrap();
        lab.deliver(&mut [&mut a]);
        assert!(a.answers.is_empty(), "the name still exists");
        close(&mut a, handles[1]).unwrap();
        lab.deliver(&mut [&mut a]);
        for key in expected {
            assert_eq!(lease_broken(&mut a), (*key, RH, NONE, true), "{deleter} {by_option}");
        }
        assert!(a.answers.is_empty(), "{deleter} {by_option}");
    }
}

#[test]
fn changes_and_opens_do_not_wait_for_the_acknowledgment() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    leased(&mut a, "d", D, RH);
    close_of(&mut b, &file("d\\f"));
    // Nor does an open of the directory in the meantime, even by the same client with another key.
    let (_, state, _) = leased(&mut b, "d", OTHER, RH);
    assert_eq!(state, RH);
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
    let (_, state, _) = leased(&mut a, "d", 3, RH);
    assert_eq!(state, RH);
    let again = send(&mut a, &with_lease(cached("d"), D, RH, None)).unwrap().lease.unwrap();
    assert!(again.lease_flags.contains(LeaseFlags::BREAK_IN_PROGRESS));
    assert_eq!(acknowledge_lease(&mut a, D, R), NtStatus::REQUEST_NOT_ACCEPTED);
    assert_eq!(acknowledge_lease(&mut a, D, NONE), NtStatus::SUCCESS);
    assert_eq!(leased(&mut a, "d", D, RH).1, RH);
}

#[test]
fn an_unacknowledged_break_revokes_the_lease_on_timeout() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    leased(&mut a, "d", D, RH);
    close_of(&mut b, &file("d\\f"));
    lab.server.tick(start());
    lab.server.tick(start() + Duration::from_secs(OPLOCK_BREAK_SECONDS_MAX));
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
    assert_eq!(acknowledge_lease(&mut a, D, NONE), NtStatus::UNSUCCESSFUL);
}

#[test]
fn a_conflicting_open_breaks_handle_caching() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    let alone = || directory("d").share(forebay_smb::wire::ShareAccess::empty());
    for gives_up in [false, true] {
        let (d, ..) = leased(&mut a, "d", D, RH);
        let mut body = alone().body();
        body[3] = OplockLevel::NONE.0;
        waits(&mut b, Command::CREATE, &body);
        lab.deliver(&mut [&mut a, &mut b]);
        assert_eq!(lease_broken(&mut a), (D, RH, R, true));
        if gives_up {
            close(&mut a, d).unwrap();
        } else {
            assert_eq!(acknowledge_lease(&mut a, D, R), NtStatus::SUCCESS);
        }
        lab.deliver(&mut [&mut a, &mut b]);
        let answer = granted(&waited(&mut b));
        if gives_up {
            close(&mut b, answer.unwrap().id).unwrap();
        } else {
            assert_eq!(answer.unwrap_err(), NtStatus::SHARING_VIOLATION);
            close(&mut a, d).unwrap();
        }
    }
}

/// A request that has to wait for `a`, which closes its handle `held`.
fn after_close(lab: &Lab, a: &mut Client, b: &mut Client, held: FileId, set_info: impl FnOnce(&mut Client)) {
    set_info(b);
    lab.deliver(&mut [a, b]);
    assert_eq!(lease_broken(a), (D, RH, R, true));
    assert!(b.answers.is_empty(), "it waits");
    close(a, held).unwrap();
    lab.deliver(&mut [a, b]);
    assert_eq!(waited(b).status(), NtStatus::SUCCESS);
}

fn set_info_waits(client: &mut Client, id: FileId, class: FileInformationClass, buffer: &[u8]) {
    let mut body = Vec::new();
    forebay_smb::wire::set_info::Request {
        info_type: forebay_smb::wire::query_info::InfoType::FILE,
        file_info_class: class.0,
        additional_information: 0,
        file_id: id,
        buffer,
    }
    .encode(&mut body);
    assert!(client.ask(Command::SET_INFO, &body).is_none());
}

fn rename_waits(client: &mut Client, id: FileId, to: &str) {
    let mut buffer = Vec::new();
    FileRenameInformation { replace_if_exists: false, root_directory: 0, file_name: to.to_owned() }
        .encode(&mut buffer);
    set_info_waits(client, id, FileInformationClass::FILE_RENAME_INFORMATION, &buffer);
}

#[test]
fn rename_and_delete_wait_for_cached_directory_handles() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    let d = plain(&mut b, &directory("d"));
    let (held, ..) = leased(&mut a, "d", D, RH);
    after_close(&lab, &mut a, &mut b, held, |b| rename_waits(b, d, "e"));
    // The same for a directory inside it.
    close_of(&mut b, &directory("e\\sub"));
    let (held, ..) = leased(&mut a, "e\\sub", D, RH);
    after_close(&lab, &mut a, &mut b, held, |b| rename_waits(b, d, "d"));
    close_of(&mut b, &directory("d\\sub").option(CreateOptions::DELETE_ON_CLOSE));
    let (held, ..) = leased(&mut a, "d", D, RH);
    let disposition = FileInformationClass::FILE_DISPOSITION_INFORMATION;
    after_close(&lab, &mut a, &mut b, held, |b| set_info_waits(b, d, disposition, &[1]));
    close(&mut b, d).unwrap();
    let gone = cached("d").disposition(CreateDisposition::OPEN);
    assert_eq!(gone.send(&mut b).unwrap_err(), NtStatus::OBJECT_NAME_NOT_FOUND);
}

#[test]
fn rename_into_a_directory_waits_for_a_conflicting_handle() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    let f = plain(&mut b, &file("f"));
    close_of(&mut b, &directory("d"));
    let keeps_out = || directory("d").access(AccessMask::DELETE);
    let held = send(&mut a, &with_lease(keeps_out(), D, RH, None)).unwrap().id;
    rename_waits(&mut b, f, "d\\f");
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, R, true));
    acknowledge_lease(&mut a, D, R);
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(waited(&mut b).status(), NtStatus::SHARING_VIOLATION, "the handle stays open");
    close(&mut a, held).unwrap();
    let held = send(&mut a, &with_lease(keeps_out(), D, RH, None)).unwrap().id;
    after_close(&lab, &mut a, &mut b, held, |b| rename_waits(b, f, "d\\f"));
}

#[test]
fn the_lease_follows_its_directory_through_a_rename() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    let d = plain(&mut b, &directory("d"));
    let (held, ..) = leased(&mut a, "d", D, R);
    rename(&mut b, d, "e", false).unwrap();
    close(&mut b, d).unwrap();
    close_of(&mut b, &directory("d"));
    close_of(&mut b, &file("d\\f"));
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty(), "another directory");
    close_of(&mut b, &file("e\\f"));
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, R, NONE, false));
    close(&mut a, held).unwrap();
}

#[test]
fn the_lease_ends_with_its_last_handle_or_its_client() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    let (d, ..) = leased(&mut a, "d", D, RH);
    close(&mut a, d).unwrap();
    close_of(&mut b, &file("d\\f"));
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty());
    leased(&mut a, "e", D, RH);
    a.disconnect();
    close_of(&mut b, &file("e\\f"));
    assert!(lab.server.take_mail().is_empty());
}

#[test]
fn a_delete_on_close_of_a_lost_client_breaks_the_lease() {
    let mut lab = Lab::caching();
    let (mut a, mut b) = two(&mut lab);
    plain(&mut b, &file("f").option(CreateOptions::DELETE_ON_CLOSE));
    leased(&mut a, "", D, RH);
    b.disconnect();
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
    acknowledge_lease(&mut a, D, NONE);
    // The client may have read the name before a backend removed it.
    leased(&mut a, "", D, RH);
    lab.server.tick(start());
    lab.deliver(&mut [&mut a, &mut b]);
    assert_eq!(lease_broken(&mut a), (D, RH, NONE, true));
    acknowledge_lease(&mut a, D, NONE);
    leased(&mut a, "", D, RH);
    lab.server.tick(start());
    lab.deliver(&mut [&mut a, &mut b]);
    assert!(a.answers.is_empty(), "once");
}
