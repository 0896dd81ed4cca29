//! Security descriptors that files keep, and what they grant ([MS-DTYP] 2.5.3, [MS-FSA] 2.1.5.1.2.1).
//!
//! All clients open a volume as one user. That user is the owner of each file and a member of its group, and so has the
//! owner's right to read and change the descriptor. A file that keeps none grants everything.

use crate::limits::DESCRIPTOR_BYTES_MAX;
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::fscc::security::{
    Ace, AceBody, AceFlags, AceType, Acl, Control, SecurityDescriptor, SecurityInformation, Sid,
};
use crate::wire::limits::ACES_MAX;

/// First byte of what is stored.
const VERSION: u8 = 1;
/// What an owner may do whatever the list says, unless it has an entry for OWNER RIGHTS.
const OF_OWNERS: AccessMask = AccessMask::READ_CONTROL.union(AccessMask::WRITE_DAC);
/// Bits of `Control` that are about the list and are kept.
const KEPT_CONTROL: Control =
    Control::DACL_PRESENT.union(Control::DACL_AUTO_INHERITED).union(Control::DACL_PROTECTED);
/// Entries that a directory passes on.
const INHERITABLE: AceFlags = AceFlags::OBJECT_INHERIT.union(AceFlags::CONTAINER_INHERIT);

/// Owner and group of a file on the backing file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// What a file keeps of a security descriptor: the access control list, if it has one of its own, and an owner or a group that is no
/// Unix user or group. Never nothing of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept(SecurityDescriptor);

impl Kept {
    /// What there is to keep of `descriptor`; `None` where that is nothing.
    #[must_use]
    pub fn new(descriptor: SecurityDescriptor) -> Option<Self> {
        let foreign = |sid: Option<Sid>, unix: fn(&Sid) -> Option<u32>| sid.filter(|sid| unix(sid).is_none());
        let kept = SecurityDescriptor {
            control: descriptor.control & KEPT_CONTROL,
            owner: foreign(descriptor.owner, Sid::as_unix_user),
            group: foreign(descriptor.group, Sid::as_unix_group),
            sacl: None,
            dacl: descriptor.dacl,
        };
        let kept = Self(kept);
        (kept.has_list() || kept.0.owner.is_some() || kept.0.group.is_some()).then_some(kept)
    }

    /// Reads what [`Self::encode`] has made. What is damaged grants nothing but the owner's rights.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let descriptor = match bytes.split_first() {
            Some((&VERSION, descriptor)) => SecurityDescriptor::parse(descriptor).ok(),
            _ => None,
        };
        descriptor.and_then(Self::new).unwrap_or_else(|| {
            let control = Control::DACL_PRESENT;
            let dacl = Some(Acl { acl_revision: 2, aces: Vec::new() });
            Self(SecurityDescriptor { control, dacl, ..SecurityDescriptor::default() })
        })
    }

    /// The bytes to store.
    ///
    /// # Errors
    /// `STATUS_INSUFFICIENT_RESOURCES` where it is longer than [`DESCRIPTOR_BYTES_MAX`], or has too many entries to be read again:
    /// what is inherited can be longer than the list that it comes from.
    pub fn encode(&self) -> Result<Vec<u8>, NtStatus> {
        let mut bytes = vec![VERSION];
        self.0.encode(&mut bytes);
        let entries = self.0.dacl.as_ref().map_or(0, |list| list.aces.len());
        if bytes.len() > DESCRIPTOR_BYTES_MAX || entries > ACES_MAX {
            return Err(NtStatus::INSUFFICIENT_RESOURCES);
        }
        Ok(bytes)
    }

    /// As a descriptor.
    #[must_use]
    pub fn descriptor(&self) -> &SecurityDescriptor {
        &self.0
    }

    /// Whether the file has a list of its own, be it the null list, which grants everything.
    fn has_list(&self) -> bool {
        self.0.control.contains(Control::DACL_PRESENT)
    }

    fn owner(&self, of: Owner) -> Sid {
        self.0.owner.clone().unwrap_or_else(|| Sid::unix_user(of.uid))
    }

    fn group(&self, of: Owner) -> Sid {
        self.0.group.clone().unwrap_or_else(|| Sid::unix_group(of.gid))
    }

    /// What the volume's user may do with the file, which belongs to `of`: for each right the first entry that has it decides
    /// ([MS-DTYP] 2.5.3.2).
    #[must_use]
    pub fn rights(&self, of: Owner) -> AccessMask {
        let list = match &self.0.dacl {
            Some(list) if self.has_list() => list,
            _ => return AccessMask::FILE_ALL_ACCESS,
        };
        let (owner, group, everyone) = (self.owner(of), self.group(of), of_everyone());
        let applies = |sid: &Sid| {
            // Equal in either of the ways in which Unix users are written.
            let is_owner = *sid == owner || self.0.owner.is_none() && sid.as_unix_user() == Some(of.uid);
            let is_group = *sid == group || self.0.group.is_none() && sid.as_unix_group() == Some(of.gid);
            is_owner || is_group || *sid == owner_rights() || everyone.contains(sid)
        };
        let entries = list.aces.iter().filter(|ace| !ace.ace_flags.contains(AceFlags::INHERIT_ONLY));
        let for_owners =
            |ace: &Ace| matches!(&ace.body, AceBody::Basic { sid, .. } if *sid == owner_rights());
        let restricted = entries.clone().any(for_owners);
        let mut allowed = if restricted { AccessMask::empty() } else { OF_OWNERS };
        let mut denied = AccessMask::empty();
        for ace in entries {
            match (ace.ace_type, &ace.body) {
                (AceType::ACCESS_ALLOWED, AceBody::Basic { mask, sid }) if applies(sid) => {
                    allowed |= mask.map_generic().without(denied);
                }
                (AceType::ACCESS_DENIED, AceBody::Basic { mask, sid }) if applies(sid) => {
                    denied |= mask.map_generic().without(allowed);
                }
                // Conditions and kinds of objects are not looked at: what may deny denies, what may allow does not.
                (AceType::ACCESS_DENIED_OBJECT | AceType::ACCESS_DENIED_CALLBACK, AceBody::Other(body)) => {
                    denied |= leading_mask(body).map_generic().without(allowed);
                }
                _ => {}
            }
        }
        allowed & AccessMask::FILE_ALL_ACCESS
    }

    /// Whether the volume's user may add a file, or a directory, to this directory, which belongs to `of`.
    ///
    /// # Errors
    /// `STATUS_ACCESS_DENIED` if not.
    pub fn may_add(&self, of: Owner, directory: bool) -> Result<(), NtStatus> {
        let needed = if directory { AccessMask::FILE_ADD_SUBDIRECTORY } else { AccessMask::FILE_ADD_FILE };
        if self.rights(of).contains(needed) { Ok(()) } else { Err(NtStatus::ACCESS_DENIED) }
    }

    /// What a new file or directory keeps: what its maker gave it and, where that was no list, what the entries of its directory
    /// pass on ([MS-DTYP] 2.5.3.4).
    #[must_use]
    pub fn of_new(given: Option<&Self>, parent: Option<&Self>, directory: bool, of: Owner) -> Option<Self> {
        let given = given.map(|kept| kept.0.clone()).unwrap_or_default();
        if given.control.contains(Control::DACL_PRESENT) {
            return Self::new(given);
        }
        let owner = given.owner.clone().unwrap_or_else(|| Sid::unix_user(of.uid));
        let group = given.group.clone().unwrap_or_else(|| Sid::unix_group(of.gid));
        let inherited = parent.and_then(|parent| parent.inherited(directory, &owner, &group));
        let (control, dacl) =
            inherited.map_or((Control::empty(), None), |(control, acl)| (control, Some(acl)));
        Self::new(SecurityDescriptor { control, dacl, ..given })
    }

    /// What entries of this directory make of the list of something new in it. `None` where there is none to pass on.
    fn inherited(&self, directory: bool, owner: &Sid, group: &Sid) -> Option<(Control, Acl)> {
        let list = self.0.dacl.as_ref().filter(|_| self.has_list())?;
        let automatic = self.0.control & Control::DACL_AUTO_INHERITED;
        let mark = if automatic.is_empty() { AceFlags::empty() } else { AceFlags::INHERITED };
        let mut aces = Vec::new();
        for ace in &list.aces {
            inherit(ace, directory, owner, group, |flags, body| {
                aces.push(Ace { ace_type: ace.ace_type, ace_flags: flags | mark, body });
            });
        }
        let acl = Acl { acl_revision: list.acl_revision, aces };
        (!acl.aces.is_empty()).then_some((Control::DACL_PRESENT | automatic, acl))
    }
}

/// Adds what one entry of a directory passes on.
fn inherit(ace: &Ace, directory: bool, owner: &Sid, group: &Sid, mut add: impl FnMut(AceFlags, AceBody)) {
    let passed_on = ace.ace_flags & INHERITABLE;
    let ends = ace.ace_flags.contains(AceFlags::NO_PROPAGATE_INHERIT);
    let resolved = match &ace.body {
        AceBody::Basic { mask, sid } => {
            let known = [(creator(0), owner), (creator(1), group)];
            let sid = known.iter().find(|(creator, _)| creator == sid).map_or(sid, |(_, resolved)| resolved);
            AceBody::Basic { mask: mask.map_generic(), sid: sid.clone() }
        }
        other @ AceBody::Other(_) => other.clone(),
    };
    let applies = if directory { AceFlags::CONTAINER_INHERIT } else { AceFlags::OBJECT_INHERIT };
    if !ace.ace_flags.contains(applies) {
        if directory && passed_on.contains(AceFlags::OBJECT_INHERIT) && !ends {
            add(passed_on | AceFlags::INHERIT_ONLY, ace.body.clone());
        }
    } else if !directory || ends {
        add(AceFlags::empty(), resolved);
    } else if resolved == ace.body {
        add(passed_on, resolved);
    } else {
        // For the new directory, and for what will be made in it.
        add(AceFlags::empty(), resolved);
        add(passed_on | AceFlags::INHERIT_ONLY, ace.body.clone());
    }
}

/// `Mask`, which an entry of any kind begins with; everything where it is cut off.
fn leading_mask(body: &[u8]) -> AccessMask {
    body.first_chunk().map_or(AccessMask::FILE_ALL_ACCESS, |mask| AccessMask(u32::from_le_bytes(*mask)))
}

/// S-1-3-0 CREATOR OWNER, S-1-3-1 CREATOR GROUP: in entries that are passed on, the owner and the group of what is made.
fn creator(which: u32) -> Sid {
    Sid { identifier_authority: 3, sub_authorities: vec![which] }
}

/// S-1-3-4: an entry for it takes the place of what owners may always do.
fn owner_rights() -> Sid {
    creator(4)
}

/// Groups that every user who has logged on over a network is in.
fn of_everyone() -> [Sid; 3] {
    let of_nt = |which| Sid { identifier_authority: 5, sub_authorities: vec![which] };
    [Sid::everyone(), of_nt(11), of_nt(2)]
}

/// The list that is set as it is kept: generic rights are replaced, and `Control` has what [MS-DTYP] 2.5.3.4.2 leaves of it.
#[must_use]
pub fn list_to_keep(given: &SecurityDescriptor) -> (Control, Option<Acl>) {
    let mut control = (given.control & Control::DACL_PROTECTED) | Control::DACL_PRESENT;
    let automatic = Control::DACL_AUTO_INHERITED | Control::DACL_COMPUTED_INHERITANCE_REQUIRED;
    if given.control.contains(automatic) {
        control |= Control::DACL_AUTO_INHERITED;
    }
    let mut list = given.dacl.clone();
    for ace in list.iter_mut().flat_map(|list| &mut list.aces) {
        if let AceBody::Basic { mask, .. } = &mut ace.body
            && !ace.ace_flags.contains(AceFlags::INHERIT_ONLY)
        {
            *mask = mask.map_generic();
        }
    }
    (control, list)
}

/// The parts of a descriptor that [`Kept`] is about.
pub(crate) const PARTS: SecurityInformation =
    SecurityInformation::OWNER.union(SecurityInformation::GROUP).union(SecurityInformation::DACL);

/// Descriptors that decide what an opener may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// That of the file.
    pub own: Option<Kept>,
    /// That of the directory it lies in, and its owner.
    pub directory: Option<(Kept, Owner)>,
}

impl Descriptors {
    /// What the volume's user may do with the file, which belongs to `of`. A directory can allow what the file does not: to
    /// delete what is in it, and to read attributes that listing it shows.
    #[must_use]
    pub fn rights(&self, of: Owner) -> AccessMask {
        let all = AccessMask::FILE_ALL_ACCESS;
        let mut rights = self.own.as_ref().map_or(all, |own| own.rights(of));
        let above = self.directory.as_ref().map_or(all, |(kept, of)| kept.rights(*of));
        if above.contains(AccessMask::FILE_DELETE_CHILD) {
            rights |= AccessMask::DELETE;
        }
        if above.contains(AccessMask::FILE_LIST_DIRECTORY) {
            rights |= AccessMask::FILE_READ_ATTRIBUTES;
        }
        rights
    }

    /// Whether the volume's user may remove the file, which belongs to `of`, or put another in its place.
    ///
    /// # Errors
    /// `STATUS_ACCESS_DENIED` if not.
    pub fn may_remove(&self, of: Owner) -> Result<(), NtStatus> {
        if self.rights(of).contains(AccessMask::DELETE) { Ok(()) } else { Err(NtStatus::ACCESS_DENIED) }
    }
}

#[cfg(test)]
mod tests;
