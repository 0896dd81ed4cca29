//! Security descriptors of files.

use forebay_smb::descriptor::{Kept, Owner};
use forebay_smb::wire::AccessMask;
use forebay_smb::wire::fscc::security::{Ace, AceFlags, Acl, Control, SecurityDescriptor, Sid};

use super::*;

const READ: AccessMask = AccessMask::FILE_READ_DATA;

fn list(aces: Vec<Ace>) -> Box<Kept> {
    let dacl = Some(Acl { acl_revision: 2, aces });
    let control = Control::DACL_PRESENT;
    let kept = Kept::new(SecurityDescriptor { control, dacl, ..SecurityDescriptor::default() });
    Box::new(kept.expect("a list"))
}

fn everyone(mask: AccessMask) -> Box<Kept> {
    list(vec![Ace::allow(Sid::everyone(), mask)])
}

/// A descriptor that a directory passes on.
fn passed_on(mask: AccessMask) -> Box<Kept> {
    let ace_flags = AceFlags::OBJECT_INHERIT | AceFlags::CONTAINER_INHERIT;
    let all = Ace::allow(Sid::everyone(), AccessMask::FILE_ALL_ACCESS);
    list(vec![Ace { ace_flags, ..Ace::allow(Sid::everyone(), mask) }, all])
}

impl Fixture {
    fn descriptor(&self, handle: &FsHandle) -> Option<Box<Kept>> {
        match self.run(FsOpKind::GetDescriptor { handle: handle.clone() }) {
            Ok(FsReply::Descriptor(kept)) => kept,
            _ => panic!("a query answers Descriptor"),
        }
    }

    fn set_descriptor(&self, handle: &FsHandle, descriptor: Option<Box<Kept>>) {
        self.done(FsOpKind::SetDescriptor { handle: handle.clone(), descriptor }).expect("set");
    }

    /// Reopens the volume, as a server does when it starts.
    fn again(&mut self) {
        self.volume = Volume::open(&self.root).expect("a volume").handle();
    }
}

fn new(path: &str, kind: ObjectKind) -> OpenRequest {
    OpenRequest { mode: OpenMode::New, kind, ..request(path) }
}

#[test]
fn security_descriptor_is_stored_and_follows_a_rename() {
    let mut f = Fixture::new();
    let (file, other) = (f.file("a"), f.file("b"));
    assert_eq!(f.descriptor(&file), None);
    let marked = |f: &Fixture| rustix::fs::getxattr(&f.root, "user.forebay.secured", &mut [0_u8; 8]).is_ok();
    assert!(!marked(&f), "a volume without descriptors is not asked for any");
    f.set_descriptor(&file, Some(everyone(READ)));
    assert!(marked(&f));
    f.rename(&file, "c", false).expect("renamed");
    assert_eq!((f.descriptor(&file), f.descriptor(&other)), (Some(everyone(READ)), None));
    f.again();
    let opened = f.open(request("c")).expect("opened");
    let descriptors = opened.descriptors.expect("kept");
    assert_eq!((descriptors.own, descriptors.directory), (Some(*everyone(READ)), None));
    assert_eq!(f.open(request("b")).expect("opened").descriptors, None);
    // Clients do not see it as an extended attribute.
    assert_eq!(f.eas(&opened.handle), Ok(Vec::new()));
    f.set_descriptor(&opened.handle, None);
    f.set_descriptor(&opened.handle, None);
    assert_eq!(f.open(request("c")).expect("opened").descriptors, None);
}

#[test]
fn long_acls_are_stored_if_the_file_system_has_room() {
    let f = Fixture::new();
    let file = f.file("a");
    // More than the first read returns, less than a block of ext4.
    let long = list((0..100).map(|uid| Ace::allow(Sid::unix_user(uid), READ)).collect());
    assert!(long.encode().expect("short enough").len() > 2048);
    f.set_descriptor(&file, Some(long.clone()));
    assert_eq!(f.descriptor(&file), Some(long.clone()));
    assert_eq!(f.open(request("a")).expect("opened").descriptors.expect("kept").own, Some(*long));
    let too_long = list((0..4000).map(|uid| Ace::allow(Sid::unix_user(uid), READ)).collect());
    let descriptor = Some(too_long);
    assert!(f.done(FsOpKind::SetDescriptor { handle: file.clone(), descriptor }).is_err());
    assert!(f.descriptor(&file).is_some(), "a list that does not fit changes nothing");
}

#[test]
fn damaged_security_descriptor_grants_no_access() {
    let f = Fixture::new();
    f.set_descriptor(&f.file("a"), Some(everyone(READ)));
    let none = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(f.root.join("a"), "user.forebay.security", b"\x01what", none).expect("set");
    let opened = f.open(request("a")).expect("opened");
    let rights = opened.descriptors.expect("kept").own.expect("one").rights(Owner { uid: 0, gid: 0 });
    assert!(!rights.intersects(READ | AccessMask::FILE_WRITE_DATA));
}

#[test]
fn new_files_inherit_a_descriptor_or_get_the_requested_one() {
    let f = Fixture::new();
    let directory = f.directory("d");
    f.set_descriptor(&directory, Some(passed_on(READ)));
    for (path, kind) in [("d/file", ObjectKind::File), ("d/directory", ObjectKind::Directory)] {
        let opened = f.open(new(path, kind)).expect("made");
        let own = opened.descriptors.expect("kept").own;
        let inherited = Kept::of_new(None, Some(&passed_on(READ)), kind == ObjectKind::Directory, OWNER);
        assert!(opened.created && own.is_some(), "{path}");
        assert_eq!(own, inherited, "{path}");
        assert_eq!(f.open(new(path, kind)).err(), Some(NtStatus::OBJECT_NAME_COLLISION), "{path}");
    }
    assert_eq!(f.names("d"), ["directory", "file"], "no temporary names remain");
    // Without an inheritable descriptor, the file has none.
    assert_eq!(f.open(new("plain", ObjectKind::File)).expect("made").descriptors, None);
    // A descriptor in the request, in a volume that has none yet.
    let f = Fixture::new();
    let descriptor = Some(everyone(READ));
    let given = OpenRequest { descriptor: descriptor.clone(), ..new("given", ObjectKind::File) };
    let opened = f.open(given).expect("made");
    assert_eq!(f.write(&opened.handle, 0, b"data"), Ok(4));
    assert_eq!(f.read(&opened.handle, 0, 10).as_deref(), Ok(&b"data"[..]));
    assert_eq!(f.descriptor(&opened.handle), descriptor);
    let renamed = f.rename(&opened.handle, "renamed", false);
    assert_eq!((renamed, f.names("")), (Ok(()), vec!["renamed".to_owned()]), "it is found by its handle");
    f.unlink(opened.handle).expect("removed");
    assert!(f.names("").is_empty());
}

/// The owner of files that the tests create.
const OWNER: Owner = Owner { uid: 0, gid: 0 };

#[test]
fn directory_acl_limits_which_children_can_be_added() {
    let f = Fixture::new();
    let of = |path, mask| {
        let directory = f.directory(path);
        f.set_descriptor(&directory, Some(everyone(mask)));
    };
    of("files", AccessMask::FILE_ADD_FILE);
    of("directories", AccessMask::FILE_ADD_SUBDIRECTORY);
    let make = |path, kind, checked| f.open(OpenRequest { checked, ..new(path, kind) }).map(|o| o.handle);
    let (file, directory) = (ObjectKind::File, ObjectKind::Directory);
    let denied = Err(NtStatus::ACCESS_DENIED);
    let handle = make("files/a", file, true).expect("allowed");
    assert_eq!(make("files/b", directory, true).map(drop), denied);
    let sub = make("directories/a", directory, true).expect("allowed");
    assert_eq!(make("directories/b", file, true).map(drop), denied);
    // A rename or a link adds a name to the target directory.
    assert_eq!(f.rename(&handle, "directories/c", false), denied);
    assert_eq!(f.link(&handle, "directories/c", false), denied);
    assert_eq!(f.rename(&sub, "files/c", false), denied);
    assert_eq!(f.link(&handle, "files/c", false), Ok(()));
    // Access lists are not enforced for a client with the POSIX extensions.
    let unchecked = make("directories/d", file, false).expect("allowed");
    assert_eq!(f.rename(&unchecked, "directories/e", false), Ok(()));
}

#[test]
fn replacing_a_file_requires_delete_or_delete_child_access() {
    let f = Fixture::new();
    let directory = f.directory("d");
    let (target, source) = (f.file("d/target"), f.file("source"));
    f.set_descriptor(&target, Some(everyone(READ)));
    let add = AccessMask::FILE_ADD_FILE;
    f.set_descriptor(&directory, Some(everyone(add)));
    assert_eq!(f.rename(&source, "d/target", true), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(f.link(&source, "d/target", true), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(f.names(""), ["d", "source"]);
    f.set_descriptor(&directory, Some(everyone(add | AccessMask::FILE_DELETE_CHILD)));
    assert_eq!(f.rename(&source, "d/target", true), Ok(()));
    let other = f.file("other");
    f.set_descriptor(&source, Some(everyone(AccessMask::DELETE)));
    f.set_descriptor(&directory, Some(everyone(add)));
    assert_eq!(f.rename(&other, "d/target", true), Ok(()));
}
