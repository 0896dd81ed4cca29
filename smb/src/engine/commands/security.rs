//! Security descriptors ([MS-SMB2] 3.3.5.20.3, 3.3.5.21.3): owner, group and permission bits of a Unix file as SIDs
//! (S-1-5-88-*). A volume's credentials may do everything, so the list grants everything to everyone; clients enforce
//! the permission bits.

use std::sync::Arc;

use super::info::{answer, done, encoded, needs};
use crate::engine::open::Open;
use crate::engine::request::step::Step;
use crate::fs::{FsOpKind, FsReply, Ownership, Stat};
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::change_notify::CompletionFilter;
use crate::wire::fscc::posix::PERMISSIONS;
use crate::wire::fscc::security::{
    Ace, AceBody, AceType, Acl, Control, SecurityDescriptor, SecurityInformation, Sid,
};

/// The list that every file has. The first entry grants nothing: its SID carries the permission bits.
fn dacl(mode: u32) -> Acl {
    Acl {
        acl_revision: 2,
        aces: vec![
            Ace::allow(Sid::unix_mode(mode), AccessMask::empty()),
            Ace::allow(Sid::everyone(), AccessMask::FILE_ALL_ACCESS),
        ],
    }
}

fn descriptor(stat: &Stat, asked: SecurityInformation) -> SecurityDescriptor {
    let mut descriptor = SecurityDescriptor::default();
    if asked.contains(SecurityInformation::OWNER) {
        descriptor.owner = Some(Sid::unix_user(stat.uid));
    }
    if asked.contains(SecurityInformation::GROUP) {
        descriptor.group = Some(Sid::unix_group(stat.gid));
    }
    if asked.contains(SecurityInformation::DACL) {
        descriptor.control.insert(Control::DACL_PRESENT);
        descriptor.dacl = Some(dacl(stat.mode));
    }
    descriptor
}

/// The permission bits that a list carries.
fn mode_of(dacl: &Acl) -> Option<u32> {
    dacl.aces.iter().find_map(|ace| match &ace.body {
        AceBody::Basic { sid, .. } => sid.as_unix_mode().filter(|mode| *mode <= PERMISSIONS),
        AceBody::Other(_) => None,
    })
}

/// Whether an entry restricts no one: it carries permission bits, or grants everything to everyone, to all who have logged on
/// (S-1-5-11) or to a Unix user, as Linux's client adds them.
fn restricts_none(ace: &Ace) -> bool {
    let AceBody::Basic { mask, sid } = &ace.body else { return false };
    if sid.as_unix_mode().is_some_and(|mode| mode <= PERMISSIONS) {
        return true;
    }
    let authenticated = Sid { identifier_authority: 5, sub_authorities: vec![11] };
    ace.ace_type == AceType::ACCESS_ALLOWED
        && (mask.contains(AccessMask::FILE_ALL_ACCESS) || mask.contains(AccessMask::GENERIC_ALL))
        && (*sid == Sid::everyone() || *sid == authenticated || sid.as_unix_user().is_some())
}

/// Owner and permission bits that the descriptor in a CREATE asks for; the rest of it is ignored. A list with all bits set says
/// nothing of them: mounted with `idsfromsid` alone, Linux's client sends it where it has only an owner to tell.
pub(super) fn of_new_file(descriptor: &[u8]) -> Ownership {
    let Ok(given) = SecurityDescriptor::parse(descriptor) else { return Ownership::default() };
    Ownership {
        uid: given.owner.and_then(|sid| sid.as_unix_user()),
        gid: given.group.and_then(|sid| sid.as_unix_group()),
        mode: given.dacl.as_ref().and_then(mode_of).filter(|mode| *mode != PERMISSIONS),
    }
}

/// What a descriptor changes of a file.
///
/// # Errors
/// `STATUS_NOT_SUPPORTED` for an owner, a group or a list that a Unix file cannot have (docs/reference/spec-exceptions.md).
fn change(
    given: &SecurityDescriptor,
    asked: SecurityInformation,
    stat: &Stat,
) -> Result<Ownership, NtStatus> {
    let mut change = Ownership::default();
    if asked.contains(SecurityInformation::OWNER) {
        let owner = given.owner.as_ref().ok_or(NtStatus::INVALID_PARAMETER)?;
        let uid = owner.as_unix_user().ok_or(NtStatus::NOT_SUPPORTED)?;
        change.uid = Some(uid).filter(|uid| *uid != stat.uid);
    }
    if asked.contains(SecurityInformation::GROUP) {
        let group = given.group.as_ref().ok_or(NtStatus::INVALID_PARAMETER)?;
        let gid = group.as_unix_group().ok_or(NtStatus::NOT_SUPPORTED)?;
        change.gid = Some(gid).filter(|gid| *gid != stat.gid);
    }
    if asked.contains(SecurityInformation::DACL) {
        match &given.dacl {
            Some(dacl) if !dacl.aces.iter().all(restricts_none) => return Err(NtStatus::NOT_SUPPORTED),
            Some(dacl) => {
                // Without permission bits they stay as they are; an empty list would deny everything.
                if dacl.aces.is_empty() {
                    return Err(NtStatus::NOT_SUPPORTED);
                }
                change.mode = mode_of(dacl).filter(|mode| *mode != stat.mode);
            }
            None => return Err(NtStatus::NOT_SUPPORTED),
        }
    }
    Ok(change)
}

fn after_stat(open: &Open, next: impl FnOnce(&Stat) -> Step + Send + 'static) -> Step {
    Step::Fs(
        FsOpKind::Stat { handle: open.handle.clone() },
        Box::new(move |_, result| match result {
            Ok(FsReply::Stat(stat)) => next(&stat),
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    )
}

/// QUERY_INFO of the descriptor.
pub(super) fn query(open: &Arc<Open>, asked: SecurityInformation, limit: u32) -> Step {
    let control = SecurityInformation::OWNER | SecurityInformation::GROUP | SecurityInformation::DACL;
    if asked.intersects(control) && !AccessMask(open.access).contains(AccessMask::READ_CONTROL)
        || asked.contains(SecurityInformation::SACL)
    {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    after_stat(open, move |stat| {
        let output = encoded(|out| descriptor(stat, asked).encode(out));
        // [MS-SMB2] 3.3.5.20.3: half a descriptor is of no use.
        if output.len() > limit as usize {
            return Step::Fail(NtStatus::BUFFER_TOO_SMALL);
        }
        answer(output, 0, limit)
    })
}

/// SET_INFO of the descriptor.
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
    Ok(after_stat(open, move |stat| match change(&given, asked, stat) {
        Ok(ownership) if ownership == Ownership::default() => done(),
        Ok(ownership) => set_ownership(changed, ownership),
        Err(status) => Step::Fail(status),
    }))
}

fn set_ownership(open: Arc<Open>, ownership: Ownership) -> Step {
    Step::Fs(
        FsOpKind::SetOwnership { handle: open.handle.clone(), ownership },
        Box::new(move |ctx, result| {
            if let Err(status) = result {
                return Step::Fail(status);
            }
            open.volume.watches.modified(CompletionFilter::SECURITY, &open, ctx.server);
            done()
        }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::{FileKey, FileTimes};

    const ALL: SecurityInformation = SecurityInformation(
        SecurityInformation::OWNER.0 | SecurityInformation::GROUP.0 | SecurityInformation::DACL.0,
    );

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

    #[test]
    fn what_a_client_has_read_changes_nothing_when_it_writes_it_back() {
        let read = descriptor(&stat(), ALL);
        assert_eq!(change(&read, ALL, &stat()), Ok(Ownership::default()));
    }

    #[test]
    fn owner_group_and_permission_bits_change_by_their_sids() {
        let given = SecurityDescriptor {
            owner: Some(Sid { identifier_authority: 22, sub_authorities: vec![1, 7] }),
            group: Some(Sid::unix_group(8)),
            dacl: Some(Acl {
                acl_revision: 2,
                aces: vec![Ace::allow(Sid::unix_mode(0o4755), AccessMask::empty())],
            }),
            ..SecurityDescriptor::default()
        };
        let all = Ownership { mode: Some(0o4755), uid: Some(7), gid: Some(8) };
        assert_eq!(change(&given, ALL, &stat()), Ok(all));
        let owner = Ownership { uid: Some(7), ..Ownership::default() };
        assert_eq!(change(&given, SecurityInformation::OWNER, &stat()), Ok(owner));
    }

    #[test]
    fn a_list_that_restricts_anyone_is_refused_also_beside_permission_bits() {
        let mut list = dacl(0o600);
        let with = |dacl: &Acl| {
            let given = SecurityDescriptor { dacl: Some(dacl.clone()), ..SecurityDescriptor::default() };
            change(&given, SecurityInformation::DACL, &stat()).map(|change| change.mode)
        };
        assert_eq!(with(&list), Ok(Some(0o600)));
        list.aces.push(Ace::allow(Sid::everyone(), AccessMask::FILE_READ_DATA));
        assert_eq!(with(&list), Err(NtStatus::NOT_SUPPORTED));
        list.aces.pop();
        list.aces.push(Ace {
            ace_type: AceType::ACCESS_DENIED,
            ..Ace::allow(Sid::unix_user(1), AccessMask::FILE_ALL_ACCESS)
        });
        assert_eq!(with(&list), Err(NtStatus::NOT_SUPPORTED));
    }

    #[test]
    fn what_a_unix_file_cannot_have_is_refused() {
        let given = SecurityDescriptor {
            owner: Some(Sid::everyone()),
            group: None,
            dacl: Some(Acl {
                acl_revision: 2,
                aces: vec![Ace::allow(Sid::unix_mode(0o10000), AccessMask::empty())],
            }),
            ..SecurityDescriptor::default()
        };
        assert_eq!(change(&given, SecurityInformation::OWNER, &stat()), Err(NtStatus::NOT_SUPPORTED));
        assert_eq!(change(&given, SecurityInformation::GROUP, &stat()), Err(NtStatus::INVALID_PARAMETER));
        assert_eq!(change(&given, SecurityInformation::DACL, &stat()), Err(NtStatus::NOT_SUPPORTED));
        assert_eq!(
            change(&SecurityDescriptor::default(), SecurityInformation::DACL, &stat()),
            Err(NtStatus::NOT_SUPPORTED)
        );
    }
}
