//! Security descriptors ([MS-SMB2] 3.3.5.20.3, 3.3.5.21.3): owner, group and permission bits of a Unix file as SIDs
//! (S-1-5-88-*), and the access control list that a client set. A file without a list grants everything to everyone.
//! Clients enforce permission bits, the server enforces lists ([`crate::descriptor`]).

use std::sync::Arc;

use super::info::{answer, done, encoded, needs};
use crate::descriptor::{Kept, PARTS, list_to_keep};
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Step};
use crate::fs::{FsOpKind, FsReply, Ownership, Stat};
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::change_notify::CompletionFilter;
use crate::wire::fscc::posix::PERMISSIONS;
use crate::wire::fscc::security::{
    Ace, AceBody, AceType, Acl, Control, SecurityDescriptor, SecurityInformation, Sid,
};
use crate::wire::limits::ACES_MAX;

/// The list of a file without a stored one. The first entry grants nothing: its SID carries the permission bits.
fn default_list(mode: u32) -> Acl {
    Acl {
        acl_revision: 2,
        aces: vec![
            Ace::allow(Sid::unix_mode(mode), AccessMask::empty()),
            Ace::allow(Sid::everyone(), AccessMask::FILE_ALL_ACCESS),
        ],
    }
}

/// The descriptor of a file with the attributes `stat` and the stored descriptor `kept`. For clients with the POSIX
/// extensions, each list carries the permission bits: without them, the Linux client derives some from the list.
fn descriptor(
    stat: &Stat,
    kept: Option<&Kept>,
    asked: SecurityInformation,
    posix: bool,
) -> SecurityDescriptor {
    let kept = kept.map(|kept| kept.descriptor().clone()).unwrap_or_default();
    let mut descriptor = SecurityDescriptor::default();
    if asked.contains(SecurityInformation::OWNER) {
        descriptor.owner = kept.owner.or_else(|| Some(Sid::unix_user(stat.uid)));
    }
    if asked.contains(SecurityInformation::GROUP) {
        descriptor.group = kept.group.or_else(|| Some(Sid::unix_group(stat.gid)));
    }
    if asked.contains(SecurityInformation::DACL) {
        descriptor.control = kept.control | Control::DACL_PRESENT;
        descriptor.dacl = match kept.dacl {
            list if kept.control.contains(Control::DACL_PRESENT) => {
                list.map(|list| with_mode(list, stat.mode, posix))
            }
            _ => Some(default_list(stat.mode)),
        };
    }
    descriptor
}

/// The list with the current permission bits, if it carries any or must carry them (`always`).
fn with_mode(mut list: Acl, mode: u32, always: bool) -> Acl {
    if always && list.aces.len() < ACES_MAX && mode_of(&list).is_none() {
        list.aces.insert(0, Ace::allow(Sid::unix_mode(mode), AccessMask::empty()));
    }
    for ace in &mut list.aces {
        if let AceBody::Basic { sid, .. } = &mut ace.body
            && carries_mode(sid)
        {
            *sid = Sid::unix_mode(mode);
        }
    }
    list
}

fn carries_mode(sid: &Sid) -> bool {
    sid.as_unix_mode().is_some_and(|mode| mode <= PERMISSIONS)
}

/// The permission bits that a list carries.
fn mode_of(dacl: &Acl) -> Option<u32> {
    dacl.aces.iter().find_map(|ace| match &ace.body {
        AceBody::Basic { sid, .. } => sid.as_unix_mode().filter(|mode| *mode <= PERMISSIONS),
        AceBody::Other(_) => None,
    })
}

/// Whether a list only carries permission bits, as the Linux client writes it: apart from them it grants everything.
fn only_carries_mode(dacl: &Acl) -> bool {
    mode_of(dacl).is_some() && dacl.aces.iter().all(restricts_none)
}

/// Whether an entry restricts no one: it carries permission bits, or grants everything to everyone, to all authenticated
/// users (S-1-5-11) or to a Unix user, as the Linux client adds them.
fn restricts_none(ace: &Ace) -> bool {
    let AceBody::Basic { mask, sid } = &ace.body else { return false };
    if carries_mode(sid) {
        return true;
    }
    let authenticated = Sid { identifier_authority: 5, sub_authorities: vec![11] };
    ace.ace_type == AceType::ACCESS_ALLOWED
        && (mask.contains(AccessMask::FILE_ALL_ACCESS) || mask.contains(AccessMask::GENERIC_ALL))
        && (*sid == Sid::everyone() || *sid == authenticated || sid.as_unix_user().is_some())
}

/// The settings that a descriptor in a CREATE requests: owner and permission bits, and the descriptor that the file keeps.
/// A list with all bits set does not set permission bits: mounted with `idsfromsid` alone, the Linux client sends it if it
/// only has an owner to set. A descriptor that cannot be parsed is ignored.
pub(super) fn of_new_file(descriptor: &[u8]) -> (Ownership, Option<Box<Kept>>) {
    let Ok(given) = SecurityDescriptor::parse(descriptor) else { return Default::default() };
    let ownership = Ownership {
        uid: given.owner.as_ref().and_then(Sid::as_unix_user),
        gid: given.group.as_ref().and_then(Sid::as_unix_group),
        mode: given.dacl.as_ref().and_then(mode_of).filter(|mode| *mode != PERMISSIONS),
    };
    let says_nothing =
        !given.control.contains(Control::DACL_PRESENT) || given.dacl.as_ref().is_some_and(only_carries_mode);
    let (control, dacl) = if says_nothing { (Control::empty(), None) } else { list_to_keep(&given) };
    (ownership, Kept::new(SecurityDescriptor { control, dacl, ..given }).map(Box::new))
}

/// The changes that a descriptor makes to a file with the attributes `stat` and the stored descriptor `kept`: its owner and
/// permission bits, and the descriptor that it keeps from now on.
///
/// # Errors
/// `STATUS_INVALID_PARAMETER` if the request sets an owner or a group and the descriptor has none.
fn change(
    given: SecurityDescriptor,
    asked: SecurityInformation,
    stat: &Stat,
    kept: Option<&Kept>,
) -> Result<(Ownership, Option<Kept>), NtStatus> {
    let mut change = Ownership::default();
    let mut keep = kept.map(|kept| kept.descriptor().clone()).unwrap_or_default();
    if asked.contains(SecurityInformation::DACL) {
        change.mode = given.dacl.as_ref().and_then(mode_of).filter(|mode| *mode != stat.mode);
        (keep.control, keep.dacl) = match &given.dacl {
            Some(list) if only_carries_mode(list) => (Control::empty(), None),
            _ => list_to_keep(&given),
        };
    }
    if asked.contains(SecurityInformation::OWNER) {
        let owner = given.owner.ok_or(NtStatus::INVALID_PARAMETER)?;
        change.uid = owner.as_unix_user().filter(|uid| *uid != stat.uid);
        keep.owner = Some(owner);
    }
    if asked.contains(SecurityInformation::GROUP) {
        let group = given.group.ok_or(NtStatus::INVALID_PARAMETER)?;
        change.gid = group.as_unix_group().filter(|gid| *gid != stat.gid);
        keep.group = Some(group);
    }
    Ok((change, Kept::new(keep)))
}

type Next = Box<dyn FnOnce(&mut Ctx<'_>, &Stat, Option<Box<Kept>>) -> Step + Send>;

/// Reads the attributes, and the stored descriptor if the volume keeps any.
fn read(open: &Open, next: Next) -> Step {
    let get =
        open.volume.extended_attributes.then(|| FsOpKind::GetDescriptor { handle: open.handle.clone() });
    Step::Fs(
        FsOpKind::Stat { handle: open.handle.clone() },
        Box::new(move |ctx, result| {
            let stat = match result {
                Ok(FsReply::Stat(stat)) => stat,
                Ok(_) => return Step::Fail(NtStatus::INTERNAL_ERROR),
                Err(status) => return Step::Fail(status),
            };
            let Some(get) = get else { return next(ctx, &stat, None) };
            Step::Fs(
                get,
                Box::new(move |ctx, result| match result {
                    Ok(FsReply::Descriptor(kept)) => next(ctx, &stat, kept),
                    Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
                    Err(status) => Step::Fail(status),
                }),
            )
        }),
    )
}

/// Handles QUERY_INFO of the descriptor.
pub(super) fn query(open: &Arc<Open>, asked: SecurityInformation, limit: u32) -> Step {
    if asked.intersects(PARTS) && !AccessMask(open.access).contains(AccessMask::READ_CONTROL)
        || asked.contains(SecurityInformation::SACL)
    {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    let posix = open.posix;
    read(
        open,
        Box::new(move |_, stat, kept| {
            let output = encoded(|out| descriptor(stat, kept.as_deref(), asked, posix).encode(out));
            // [MS-SMB2] 3.3.5.20.3: a partial descriptor is useless.
            if output.len() > limit as usize {
                return Step::Fail(NtStatus::BUFFER_TOO_SMALL);
            }
            answer(output, 0, limit)
        }),
    )
}

/// Handles SET_INFO of the descriptor.
pub(super) fn set(open: &Arc<Open>, asked: SecurityInformation, buffer: &[u8]) -> Result<Step, NtStatus> {
    let owner = SecurityInformation::OWNER | SecurityInformation::GROUP;
    if asked.contains(SecurityInformation::SACL)
        || asked.contains(SecurityInformation::DACL) && needs(open, AccessMask::WRITE_DAC).is_err()
        || asked.intersects(owner) && needs(open, AccessMask::WRITE_OWNER).is_err()
    {
        return Err(NtStatus::ACCESS_DENIED);
    }
    let given = SecurityDescriptor::parse(buffer).map_err(|_| NtStatus::INVALID_PARAMETER)?;
    let changed = Arc::clone(open);
    let next = Box::new(move |ctx: &mut Ctx<'_>, stat: &Stat, kept: Option<Box<Kept>>| {
        let (ownership, keep) = match change(given, asked, stat, kept.as_deref()) {
            Ok(change) => change,
            Err(status) => return Step::Fail(status),
        };
        let keep = keep.map(Box::new);
        let replaced = keep != kept;
        if replaced && !changed.volume.extended_attributes {
            return Step::Fail(NtStatus::NOT_SUPPORTED);
        }
        let handle = changed.handle.clone();
        let set = replaced.then_some(FsOpKind::SetDescriptor { handle, descriptor: keep });
        if ownership == Ownership::default() {
            let Some(set) = set else {
                // As on Windows, a request that changes nothing is reported, too.
                report(&changed, ctx);
                return done();
            };
            return carry_out(changed, set);
        }
        let own = FsOpKind::SetOwnership { handle: changed.handle.clone(), ownership };
        let Some(set) = set else { return carry_out(changed, own) };
        Step::Fs(own, Box::new(move |_, result| result.map_or_else(Step::Fail, |_| carry_out(changed, set))))
    });
    Ok(read(open, next))
}

/// Performs the last operation of a change.
fn carry_out(open: Arc<Open>, op: FsOpKind) -> Step {
    Step::Fs(
        op,
        Box::new(move |ctx, result| {
            if let Err(status) = result {
                return Step::Fail(status);
            }
            report(&open, ctx);
            done()
        }),
    )
}

/// Reports to CHANGE_NOTIFY that a descriptor was set.
fn report(open: &Arc<Open>, ctx: &Ctx<'_>) {
    open.volume.watches.modified(CompletionFilter::SECURITY, open, ctx.server);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::{FileKey, FileTimes};

    fn stat() -> Stat {
        Stat {
            key: FileKey { dev: 1, ino: 1, stream: 0 },
            directory: false,
            end_of_file: 0,
            allocation_size: 0,
            links: 1,
            times: FileTimes::default(),
            attributes: 0x80,
            reparse: None,
            mode: 0o640,
            uid: 1000,
            gid: 100,
        }
    }

    fn with_list(aces: Vec<Ace>) -> SecurityDescriptor {
        let dacl = Some(Acl { acl_revision: 2, aces });
        SecurityDescriptor { control: Control::DACL_PRESENT, dacl, ..SecurityDescriptor::default() }
    }

    #[test]
    fn writing_back_a_queried_descriptor_changes_nothing() {
        let read = descriptor(&stat(), None, PARTS, false);
        assert_eq!(change(read, PARTS, &stat(), None), Ok((Ownership::default(), None)));
        let kept = Kept::new(with_list(vec![Ace::allow(Sid::unix_user(1000), AccessMask::FILE_READ_DATA)]));
        let read = descriptor(&stat(), kept.as_ref(), PARTS, false);
        assert_eq!(change(read, PARTS, &stat(), kept.as_ref()), Ok((Ownership::default(), kept)));
    }

    #[test]
    fn posix_clients_see_the_mode_in_every_dacl() {
        let read = Ace::allow(Sid::everyone(), AccessMask::FILE_READ_DATA);
        let kept = Kept::new(with_list(vec![read.clone()]));
        let shown = |posix| descriptor(&stat(), kept.as_ref(), SecurityInformation::DACL, posix);
        let list = shown(true).dacl.expect("a list");
        assert_eq!((mode_of(&list), &list.aces[1..]), (Some(0o640), std::slice::from_ref(&read)));
        assert_eq!(shown(false).dacl.expect("a list").aces, [read]);
    }

    #[test]
    fn owner_group_and_mode_are_set_from_their_sids() {
        let given = SecurityDescriptor {
            owner: Some(Sid { identifier_authority: 22, sub_authorities: vec![1, 7] }),
            group: Some(Sid::unix_group(8)),
            ..with_list(vec![Ace::allow(Sid::unix_mode(0o4755), AccessMask::empty())])
        };
        let all = Ownership { mode: Some(0o4755), uid: Some(7), gid: Some(8) };
        assert_eq!(change(given.clone(), PARTS, &stat(), None), Ok((all, None)));
        let owner = Ownership { uid: Some(7), ..Ownership::default() };
        assert_eq!(change(given, SecurityInformation::OWNER, &stat(), None), Ok((owner, None)));
    }

    #[test]
    fn a_restricting_dacl_is_kept_and_reports_the_current_mode() {
        let deny =
            Ace { ace_type: AceType::ACCESS_DENIED, ..Ace::allow(Sid::everyone(), AccessMask::DELETE) };
        let aces = [vec![deny], default_list(0o600).aces].concat();
        let given = with_list(aces.clone());
        let changed = change(given, SecurityInformation::DACL, &stat(), None);
        let (ownership, kept) = changed.expect("possible");
        assert_eq!(ownership, Ownership { mode: Some(0o600), ..Ownership::default() });
        let shown = |mode| {
            let stat = Stat { mode, ..stat() };
            descriptor(&stat, kept.as_ref(), SecurityInformation::DACL, false).dacl.expect("a list").aces
        };
        assert_eq!(shown(0o600), aces);
        assert_eq!(mode_of(&Acl { acl_revision: 2, aces: shown(0o644) }), Some(0o644));
        // Permission bits alone, as Linux sets them, remove the list.
        let given = with_list(default_list(0o600).aces);
        let changed = change(given, SecurityInformation::DACL, &stat(), kept.as_ref());
        assert_eq!(changed, Ok((ownership, None)));
    }

    #[test]
    fn a_non_unix_owner_is_kept_until_it_is_replaced() {
        let given = SecurityDescriptor { owner: Some(Sid::everyone()), ..SecurityDescriptor::default() };
        let owner = SecurityInformation::OWNER;
        let (ownership, kept) = change(given.clone(), owner, &stat(), None).expect("possible");
        assert_eq!(ownership, Ownership::default());
        assert_eq!(descriptor(&stat(), kept.as_ref(), owner, false).owner, Some(Sid::everyone()));
        let unix = SecurityDescriptor { owner: Some(Sid::unix_user(1000)), ..SecurityDescriptor::default() };
        assert_eq!(change(unix, owner, &stat(), kept.as_ref()), Ok((Ownership::default(), None)));
        let none = change(given, SecurityInformation::GROUP, &stat(), None);
        assert_eq!(none, Err(NtStatus::INVALID_PARAMETER));
    }

    #[test]
    fn a_new_file_keeps_the_given_dacl_unless_it_only_encodes_the_mode() {
        let encoded = |given: &SecurityDescriptor| {
            let mut bytes = Vec::new();
            given.encode(&mut bytes);
            bytes
        };
        let given = with_list(default_list(0o640).aces);
        let mode = Ownership { mode: Some(0o640), ..Ownership::default() };
        assert_eq!(of_new_file(&encoded(&given)), (mode, None));
        let given = with_list(vec![Ace::allow(Sid::everyone(), AccessMask::GENERIC_READ)]);
        let (ownership, kept) = of_new_file(&encoded(&given));
        assert_eq!(ownership, Ownership::default());
        let read = vec![Ace::allow(Sid::everyone(), AccessMask::FILE_GENERIC_READ)];
        assert_eq!(kept.expect("kept").descriptor(), &with_list(read));
        // A null list counts as a list.
        let null = SecurityDescriptor { dacl: None, ..given };
        assert_eq!(of_new_file(&encoded(&null)).1.expect("kept").descriptor(), &null);
        assert_eq!(of_new_file(b"damaged"), Default::default());
    }
}
