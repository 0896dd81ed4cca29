use super::*;

const OF: Owner = Owner { uid: 1000, gid: 100 };
const READ: AccessMask = AccessMask::FILE_READ_DATA;
const WRITE: AccessMask = AccessMask::FILE_WRITE_DATA;

fn deny(sid: Sid, mask: AccessMask) -> Ace {
    Ace { ace_type: AceType::ACCESS_DENIED, ..Ace::allow(sid, mask) }
}

fn with_flags(ace: Ace, ace_flags: AceFlags) -> Ace {
    Ace { ace_flags, ..ace }
}

fn kept(aces: Vec<Ace>) -> Kept {
    let dacl = Some(Acl { acl_revision: 2, aces });
    let control = Control::DACL_PRESENT;
    Kept::new(SecurityDescriptor { control, dacl, ..SecurityDescriptor::default() }).expect("kept")
}

fn aces(kept: &Kept) -> &[Ace] {
    &kept.descriptor().dacl.as_ref().expect("a list").aces
}

#[test]
fn the_first_matching_ace_decides_each_right() {
    let owner = Sid::unix_user(1000);
    let list = |aces: Vec<Ace>| kept(aces).rights(OF).without(OF_OWNERS);
    let (allow_read, deny_read) = (Ace::allow(owner.clone(), READ | WRITE), deny(owner.clone(), READ));
    assert_eq!(list(vec![allow_read.clone(), deny_read.clone()]), READ | WRITE);
    assert_eq!(list(vec![deny_read, allow_read.clone()]), WRITE);
    // Entries for other users, or only for new objects, do not count.
    assert_eq!(list(vec![Ace::allow(Sid::unix_user(1), READ)]), AccessMask::empty());
    assert_eq!(list(vec![with_flags(allow_read, AceFlags::INHERIT_ONLY)]), AccessMask::empty());
    for sid in [Sid::unix_group(100), Sid::everyone(), of_everyone()[1].clone()] {
        assert_eq!(list(vec![Ace::allow(sid, READ)]), READ);
    }
    let as_samba = Sid { identifier_authority: 22, sub_authorities: vec![1, 1000] };
    assert_eq!(list(vec![Ace::allow(as_samba, READ)]), READ);
    assert_eq!(
        list(vec![Ace::allow(owner, AccessMask::GENERIC_ALL)]),
        AccessMask::FILE_ALL_ACCESS.without(OF_OWNERS)
    );
}

#[test]
fn conditional_aces_can_deny_but_not_allow() {
    let conditional = |ace_type, body: &[u8]| Ace {
        ace_type,
        ace_flags: AceFlags::empty(),
        body: AceBody::Other(body.to_vec()),
    };
    let read = READ.0.to_le_bytes();
    let rights =
        |first| kept(vec![first, Ace::allow(Sid::everyone(), READ | WRITE)]).rights(OF).without(OF_OWNERS);
    assert_eq!(rights(conditional(AceType::ACCESS_DENIED_CALLBACK, &read)), WRITE);
    assert_eq!(rights(conditional(AceType::ACCESS_DENIED_OBJECT, &read)), WRITE);
    assert_eq!(rights(conditional(AceType::ACCESS_DENIED_OBJECT, &[1])), AccessMask::empty());
    let allows = kept(vec![conditional(AceType::ACCESS_ALLOWED_CALLBACK, &read)]);
    assert_eq!(allows.rights(OF), OF_OWNERS);
}

#[test]
fn owners_can_change_the_dacl_unless_owner_rights_limit_them() {
    assert_eq!(kept(Vec::new()).rights(OF), OF_OWNERS);
    assert_eq!(kept(vec![deny(Sid::everyone(), AccessMask::FILE_ALL_ACCESS)]).rights(OF), OF_OWNERS);
    assert_eq!(kept(vec![Ace::allow(owner_rights(), READ)]).rights(OF), READ);
}

#[test]
fn a_null_dacl_grants_all_access_and_a_damaged_one_only_owner_rights() {
    let control = Control::DACL_PRESENT;
    let null = SecurityDescriptor { control, ..SecurityDescriptor::default() };
    let null = Kept::new(null).expect("kept");
    assert_eq!(null.rights(OF), AccessMask::FILE_ALL_ACCESS);
    assert_eq!(Kept::parse(&null.encode().expect("short")), null);
    let list = kept(vec![Ace::allow(Sid::everyone(), READ)]);
    let bytes = list.encode().expect("short");
    assert_eq!(Kept::parse(&bytes), list);
    for damaged in [&bytes[..bytes.len() - 1], &[], &[2], &[VERSION]] {
        assert_eq!(Kept::parse(damaged).rights(OF), OF_OWNERS, "{damaged:?}");
    }
    assert_eq!(Kept::new(SecurityDescriptor::default()), None);
}

/// Flags of an entry of the directory, of the inherited entry of a new file, and of those of a new directory.
type Inherits<'a> = (AceFlags, Option<AceFlags>, &'a [AceFlags]);

#[test]
fn aces_are_inherited_according_to_their_flags() {
    let none = AceFlags::empty();
    let (file, directory) = (AceFlags::OBJECT_INHERIT, AceFlags::CONTAINER_INHERIT);
    let (only, ends) = (AceFlags::INHERIT_ONLY, AceFlags::NO_PROPAGATE_INHERIT);
    let all: &[Inherits<'_>] = &[
        (none, None, &[]),
        (only, None, &[]),
        (file, Some(none), &[file | only]),
        (directory, None, &[directory]),
        (file | directory, Some(none), &[file | directory]),
        (file | only, Some(none), &[file | only]),
        (directory | only, None, &[directory]),
        (file | ends, Some(none), &[]),
        (directory | ends, None, &[none]),
        (file | directory | ends, Some(none), &[none]),
    ];
    let passed_on = |above: &Kept, directory| {
        let new = Kept::of_new(None, Some(above), directory, OF);
        new.map(|new| aces(&new).to_vec()).unwrap_or_default()
    };
    for &(flags, of_file, of_directory) in all {
        let ace = Ace::allow(Sid::everyone(), READ);
        let above = kept(vec![with_flags(ace.clone(), flags)]);
        let expected = |flags: &[AceFlags]| -> Vec<Ace> {
            flags.iter().map(|flags| with_flags(ace.clone(), *flags)).collect()
        };
        assert_eq!(passed_on(&above, false), expected(of_file.as_slice()), "{flags:?}");
        assert_eq!(passed_on(&above, true), expected(of_directory), "{flags:?}");
    }
    // CREATOR OWNER: the user who creates the object; a directory also passes the entry on to objects created in it.
    let both = file | directory;
    let above = kept(vec![with_flags(Ace::allow(creator(0), AccessMask::GENERIC_READ), both)]);
    let own = Ace::allow(Sid::unix_user(1000), AccessMask::FILE_GENERIC_READ);
    assert_eq!(passed_on(&above, false), std::slice::from_ref(&own));
    let rest = with_flags(Ace::allow(creator(0), AccessMask::GENERIC_READ), both | only);
    assert_eq!(passed_on(&above, true), [own, rest]);
}

#[test]
fn an_explicit_dacl_replaces_inherited_aces() {
    let flags = AceFlags::OBJECT_INHERIT;
    let above = kept(vec![with_flags(Ace::allow(Sid::everyone(), READ), flags)]);
    let given = kept(vec![Ace::allow(Sid::everyone(), WRITE)]);
    assert_eq!(Kept::of_new(Some(&given), Some(&above), false, OF), Some(given));
    let owner = SecurityDescriptor { owner: Some(Sid::everyone()), ..SecurityDescriptor::default() };
    let owner = Kept::new(owner).expect("kept");
    let new = Kept::of_new(Some(&owner), Some(&above), false, OF).expect("kept");
    assert_eq!((aces(&new).len(), &new.descriptor().owner), (1, &Some(Sid::everyone())));
    // Automatic inheritance is recorded in the flags if requested.
    let automatic = Control::DACL_AUTO_INHERITED | Control::DACL_COMPUTED_INHERITANCE_REQUIRED;
    for (control, automatic) in [(automatic, true), (Control::DACL_AUTO_INHERITED, false)] {
        let given = SecurityDescriptor { control, ..above.descriptor().clone() };
        let (control, dacl) = list_to_keep(&given);
        let above = Kept::new(SecurityDescriptor { control, dacl, ..given }).expect("kept");
        let new = Kept::of_new(None, Some(&above), false, OF).expect("kept");
        assert_eq!(aces(&new)[0].ace_flags.contains(AceFlags::INHERITED), automatic);
        assert_eq!(new.descriptor().control.contains(Control::DACL_AUTO_INHERITED), automatic);
    }
}

#[test]
fn oversized_descriptors_are_not_stored() {
    let creator =
        with_flags(Ace::allow(creator(0), READ), AceFlags::OBJECT_INHERIT | AceFlags::CONTAINER_INHERIT);
    let above = kept(vec![creator; 1000]);
    assert!(above.encode().is_ok());
    // One entry for the directory itself, and one to pass on.
    let below = Kept::of_new(None, Some(&above), true, OF).expect("inherited");
    assert_eq!((aces(&below).len(), below.encode()), (2000, Err(NtStatus::INSUFFICIENT_RESOURCES)));
    let longest = Sid { identifier_authority: 5, sub_authorities: vec![u32::MAX; 15] };
    let long = kept(vec![Ace::allow(longest, READ); 500]);
    assert_eq!(long.encode(), Err(NtStatus::INSUFFICIENT_RESOURCES));
}

#[test]
fn a_parent_directory_can_grant_delete_and_read_attributes() {
    let own = Some(kept(vec![Ace::allow(Sid::everyone(), READ)]));
    let rights = |above: Option<AccessMask>| {
        let directory = above.map(|mask| (kept(vec![Ace::allow(Sid::everyone(), mask)]), OF));
        Descriptors { own: own.clone(), directory }.rights(OF).without(OF_OWNERS)
    };
    let (delete, attributes) = (AccessMask::DELETE, AccessMask::FILE_READ_ATTRIBUTES);
    assert_eq!(rights(None), READ | delete | attributes);
    assert_eq!(rights(Some(AccessMask::FILE_DELETE_CHILD)), READ | delete);
    assert_eq!(rights(Some(AccessMask::FILE_LIST_DIRECTORY)), READ | attributes);
    assert_eq!(rights(Some(AccessMask::FILE_ADD_FILE)), READ);
    let above = kept(vec![Ace::allow(Sid::everyone(), AccessMask::FILE_ADD_FILE)]);
    assert_eq!(above.may_add(OF, false), Ok(()));
    assert_eq!(above.may_add(OF, true), Err(NtStatus::ACCESS_DENIED));
}
