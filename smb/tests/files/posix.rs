//! The POSIX extensions ([SMB2-POSIX]).

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateAction, CreateDisposition};
use forebay_smb::wire::create_context::RequestContext;
use forebay_smb::wire::fscc::posix::{FileFsPosixInformation, FilePosixInformation, PosixFileType};
use forebay_smb::wire::fscc::security::{Ace, Acl, SecurityDescriptor, Sid};
use forebay_smb::wire::fscc::{FileInformationClass as C, FsInformationClass as F};
use forebay_smb::wire::query_directory::Flags;
use forebay_smb::wire::{AccessMask, Dialect, FileAttributes};

use crate::calls::{
    Lab, Open, close, directory, file, list, list_class, query_file, query_fs, rename, set_file, write,
};
use crate::support::Client;

/// The mode that Linux's client sends if it has no permission bits.
const NO_MODE: u32 = 0xffff;

fn posix(open: Open<'_>, mode: u32) -> Open<'_> {
    open.context(RequestContext::Posix { mode })
}

fn information(client: &mut Client, id: FileId) -> FilePosixInformation {
    FilePosixInformation::parse(&query_file(client, id, C::FILE_POSIX_INFORMATION, 4096).unwrap()).unwrap()
}

#[test]
fn posix_extensions_require_negotiation_and_smb_3_1_1() {
    let mut lab = Lab::new();
    let mut plain = lab.client();
    assert!(!plain.posix_answered);
    let f = file("f").id(&mut plain);
    assert_eq!(query_file(&mut plain, f, C::FILE_POSIX_INFORMATION, 4096), Err(NtStatus::INVALID_INFO_CLASS));
    assert_eq!(
        query_fs(&mut plain, f, F::FILE_FS_POSIX_INFORMATION, 4096),
        Err(NtStatus::INVALID_INFO_CLASS)
    );
    let root = directory("").disposition(CreateDisposition::OPEN).id(&mut plain);
    let listed = list_class(&mut plain, root, C::FILE_POSIX_INFORMATION, "*", Flags::empty(), 4096);
    assert_eq!(listed.err(), Some(NtStatus::INVALID_INFO_CLASS));
    let opened = posix(file("also-plain"), 0o600).send(&mut plain).unwrap();
    assert_eq!(opened.posix, None, "a context that was not negotiated is ignored");
    let mut old = Client::new(&lab.server, 99, Dialect::SMB3_0_2);
    old.posix = true;
    old.negotiate().unwrap();
    assert!(!old.posix_answered);
}

#[test]
fn a_new_file_gets_owner_and_mode_from_its_create() {
    let mut lab = Lab::new();
    let mut c = lab.posix();
    let mut descriptor = Vec::new();
    SecurityDescriptor {
        owner: Some(Sid::unix_user(1000)),
        group: Some(Sid::unix_group(100)),
        ..SecurityDescriptor::default()
    }
    .encode(&mut descriptor);
    let opened =
        posix(file("f"), 0o4640).context(RequestContext::SdBuffer(&descriptor)).send(&mut c).unwrap();
    let mut sids = Vec::new();
    Sid::unix_user(1000).encode(&mut sids);
    Sid::unix_group(100).encode(&mut sids);
    assert_eq!(opened.posix, Some((1, 0, 0o4640, sids)));
    let info = information(&mut c, opened.id);
    assert_eq!((info.uid, info.gid, info.fixed.mode), (1000, 100, 0o4640));
    assert_eq!((info.fixed.hard_links, info.fixed.inode > 0), (1, true));
    // Opening an existing file changes nothing.
    let again = posix(file("f"), 0o777).context(RequestContext::SdBuffer(b"garbage")).send(&mut c).unwrap();
    assert_eq!(again.posix.unwrap().2, 0o4640);
    // DOS attribute bits have no effect here; the mode's bits do.
    let read_only = posix(file("r"), 0o444).attributes(FileAttributes::READONLY).send(&mut c).unwrap();
    assert!(!read_only.attributes.contains(FileAttributes::READONLY));
    let d = posix(directory("d"), 0o750).send(&mut c).unwrap();
    assert_eq!(d.posix.unwrap().2, PosixFileType::DIRECTORY.mode(0o750));
    assert_eq!(posix(file("n"), NO_MODE).send(&mut c).unwrap().posix.unwrap().2, 0o644);
}

/// As Linux 7.2's client with `idsfromsid` sends it: the mode in the context includes the file's type, and the descriptor has
/// an owner and, because it has no mode, all bits.
#[test]
fn the_posix_context_sets_the_mode_of_a_new_file_not_the_descriptor() {
    let mut lab = Lab::new();
    let mut c = lab.posix();
    let mut descriptor = Vec::new();
    SecurityDescriptor {
        owner: Some(Sid::unix_user(1000)),
        dacl: Some(Acl {
            acl_revision: 2,
            aces: vec![Ace::allow(Sid::unix_mode(0o7777), AccessMask::empty())],
        }),
        ..SecurityDescriptor::default()
    }
    .encode(&mut descriptor);
    for (name, mode) in [("f", 0o100_600), ("g", 0o600)] {
        let made =
            posix(file(name), mode).context(RequestContext::SdBuffer(&descriptor)).send(&mut c).unwrap();
        assert_eq!(made.posix.unwrap().2, 0o600, "{name}");
    }
    // A FIFO is created without a context.
    let made = file("h").context(RequestContext::SdBuffer(&descriptor)).id(&mut c);
    let info = information(&mut c, made);
    assert_eq!((info.uid, info.fixed.mode), (1000, 0o644));
}

/// Linux's client checks its user's permissions only after the CREATE, and then sets the size itself.
#[test]
fn overwrite_keeps_the_contents_until_the_client_sets_the_size() {
    let mut lab = Lab::new();
    let (mut linux, mut plain) = (lab.posix(), lab.client());
    let f = posix(file("f"), 0o600).id(&mut linux);
    write(&mut linux, f, 0, b"alice").unwrap();
    close(&mut linux, f).unwrap();
    for disposition in [CreateDisposition::OVERWRITE, CreateDisposition::OVERWRITE_IF] {
        let opened = posix(file("f"), 0o644).disposition(disposition).send(&mut linux).unwrap();
        assert_eq!((opened.action, opened.end_of_file), (CreateAction::OPENED, 5));
        assert_eq!(opened.posix.unwrap().2, 0o600);
        close(&mut linux, opened.id).unwrap();
        assert_eq!(lab.memory.contents("f").as_deref(), Some(&b"alice"[..]));
    }
    let missing = posix(file("g"), 0o644).disposition(CreateDisposition::OVERWRITE).send(&mut linux);
    assert_eq!(missing.err(), Some(NtStatus::OBJECT_NAME_NOT_FOUND));
    let made = posix(file("g"), 0o644).disposition(CreateDisposition::OVERWRITE_IF).send(&mut linux).unwrap();
    assert_eq!(made.action, CreateAction::CREATED);
    let again = posix(file("f"), 0o644).disposition(CreateDisposition::OVERWRITE_IF).id(&mut linux);
    set_file(&mut linux, again, C::FILE_END_OF_FILE_INFORMATION, |out| out.extend_from_slice(&[0; 8]))
        .unwrap();
    assert_eq!(lab.memory.contents("f").as_deref(), Some(&b""[..]));
    write(&mut linux, again, 0, b"bob").unwrap();
    close(&mut linux, again).unwrap();
    // Without the extensions, the server checks permissions and overwrites.
    let opened = file("f").disposition(CreateDisposition::OVERWRITE_IF).send(&mut plain).unwrap();
    assert_eq!((opened.action, opened.end_of_file), (CreateAction::OVERWRITTEN, 0));
}

#[test]
fn new_files_inherit_the_owner_of_their_directory_by_default() {
    let mut lab = Lab::new();
    let mut c = lab.posix();
    let mut descriptor = Vec::new();
    let owner = Some(Sid::unix_user(7));
    SecurityDescriptor { owner, ..SecurityDescriptor::default() }.encode(&mut descriptor);
    posix(directory("d"), 0o755).context(RequestContext::SdBuffer(&descriptor)).touch(&mut c);
    let below = posix(directory("d/e"), 0o755).id(&mut c);
    assert_eq!(information(&mut c, below).uid, 7);
}

#[test]
fn posix_names_may_contain_characters_reserved_on_windows() {
    let mut lab = Lab::new();
    let (mut c, mut plain) = (lab.posix(), lab.client());
    posix(directory("d:*"), 0o755).touch(&mut c);
    for name in ["d:*/a?b", r"d:*/back\slash", "d:*/CON"] {
        posix(file(name), 0o644).touch(&mut c);
    }
    let d = posix(directory("d:*"), NO_MODE).disposition(CreateDisposition::OPEN).id(&mut c);
    let names = list(&mut c, d, "*", Flags::empty(), 4096).unwrap();
    assert_eq!(names, [".", "..", "CON", "a?b", r"back\slash"]);
    close(&mut c, d).unwrap();
    let f = posix(file("d:*/CON"), NO_MODE).disposition(CreateDisposition::OPEN).id(&mut c);
    rename(&mut c, f, "d:*/x|y", false).unwrap();
    posix(file("d:*/x|y"), NO_MODE).disposition(CreateDisposition::OPEN).touch(&mut c);
    posix(file(r"top\level"), 0o644).touch(&mut c);
    posix(file("top"), 0o644).touch(&mut c);
    let root = directory("").disposition(CreateDisposition::OPEN).id(&mut plain);
    let names = list(&mut plain, root, "*", Flags::empty(), 4096).unwrap();
    assert_eq!(names, [".", "..", "d:*", "top"], "a name with a separator in it cannot be opened");
    for bad in ["/abs", "a//b", "../f"] {
        let refused = posix(file(bad), NO_MODE).send(&mut c);
        assert_eq!(refused, Err(NtStatus::OBJECT_PATH_SYNTAX_BAD), "{bad}");
    }
}

#[test]
fn listings_contain_type_mode_and_link_count() {
    let mut lab = Lab::new();
    let mut c = lab.posix();
    posix(directory("d"), 0o700).touch(&mut c);
    posix(file("f"), 0o640).touch(&mut c);
    let root = posix(directory(""), NO_MODE).disposition(CreateDisposition::OPEN).id(&mut c);
    let entries = list_class(&mut c, root, C::FILE_POSIX_INFORMATION, "*", Flags::empty(), 4096).unwrap();
    let seen: Vec<_> = entries.iter().map(|e| (e.name.as_ref(), e.posix.mode, e.posix.hard_links)).collect();
    let directory = |mode| PosixFileType::DIRECTORY.mode(mode);
    assert_eq!(
        seen,
        [
            (".", directory(0o755), 1),
            ("..", directory(0o755), 1),
            ("d", directory(0o700), 1),
            ("f", 0o640, 1)
        ]
    );
    let short = list_class(&mut c, root, C::FILE_POSIX_INFORMATION, "*", Flags::RESTART_SCANS, 131);
    assert_eq!(short.err(), Some(NtStatus::INFO_LENGTH_MISMATCH));
}

#[test]
fn the_file_system_reports_blocks_and_file_nodes() {
    let mut lab = Lab::new();
    let mut c = lab.posix();
    let root = posix(directory(""), NO_MODE).disposition(CreateDisposition::OPEN).id(&mut c);
    let bytes = query_fs(&mut c, root, F::FILE_FS_POSIX_INFORMATION, 56).unwrap();
    let info = FileFsPosixInformation::parse(&bytes).unwrap();
    assert_eq!(info.total_blocks * u64::from(info.block_size), 1 << 30);
    assert_eq!(info.user_blocks_available * u64::from(info.block_size), 1 << 29);
    assert_eq!((info.total_file_nodes, info.free_file_nodes), (1000, 900));
}
