//! Security descriptors stored with files, and the rights that they grant ([MS-DTYP] 2.5.3, [MS-FSA] 2.1.5.1.2.1).
//!
//! All clients open a volume as one user. That user is the owner of each file and a member of its group, and therefore has
//! the owner's right to read and change the descriptor. A file without a stored descriptor grants all access.

use crate::limits::DESCRIPTOR_BYTES_MAX;
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::fscc::security::{
    Ace, AceBody, AceFlags, AceType, Acl, Control, SecurityDescriptor, SecurityInformation, Sid,
};
use crate::wire::limits::ACES_MAX;

/// Version of the stored format: its first byte.
const VERSION: u8 = 1;
/// Rights of an owner regardless of the list, unless the list has an entry for OWNER RIGHTS.
const OF_OWNERS: AccessMask = AccessMask::READ_CONTROL.union(AccessMask::WRITE_DAC);
/// Bits of `Control` that apply to the list and are stored.
const KEPT_CONTROL: Control =
    Control::DACL_PRESENT.union(Control::DACL_AUTO_INHERITED).union(Control::DACL_PROTECTED);
/// Flags of entries that a directory passes on.
const INHERITABLE: AceFlags = AceFlags::OBJECT_INHERIT.union(AceFlags::CONTAINER_INHERIT);

/// Owner and group of a file on the backing file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// The stored part of a file's security descriptor: the access control list, if the file has its own, and an owner or a group
/// that is not a Unix user or group. Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept(SecurityDescriptor);

impl Kept {
    /// The part of `descriptor` to store; `None` if it is empty.
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

    /// Reads the output of [`Self::encode`]. Damaged bytes grant only the owner's rights.
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
    /// `STATUS_INSUFFICIENT_RESOURCES` if the result is longer than [`DESCRIPTOR_BYTES_MAX`], or has too many entries to be
    /// parsed again: an inherited list can be longer than the list that it comes from.
    pub fn encode(&self) -> Result<Vec<u8>, NtStatus> {
        let mut bytes = vec![VERSION];
        self.0.encode(&mut bytes);
        let entries = self.0.dacl.as_ref().map_or(0, |list| list.aces.len());
        if bytes.len() > DESCRIPTOR_BYTES_MAX || entries > ACES_MAX {
            return Err(NtStatus::INSUFFICIENT_RESOURCES);
        }
        Ok(bytes)
    }

    /// Returns it as a descriptor.
    #[must_use]
    pub fn descriptor(&self) -> &SecurityDescriptor {
        &self.0
    }

    /// Whether the file has its own list. A null list counts; it grants all access.
    fn has_list(&self) -> bool {
        self.0.control.contains(Control::DACL_PRESENT)
    }

    fn owner(&self, of: Owner) -> Sid {
        self.0.owner.clone().unwrap_or_else(|| Sid::unix_user(of.uid))
    }

    fn group(&self, of: Owner) -> Sid {
        self.0.group.clone().unwrap_or_else(|| Sid::unix_group(of.gid))
    }

    /// Rights of the volume's user on the file, which belongs to `of`. For each right, the first entry that contains it
    /// decides ([MS-DTYP] 2.5.3.2).
    #[must_use]
    pub fn rights(&self, of: Owner) -> AccessMask {
        let list = match &self.0.dacl {
            Some(list) if self.has_list() => list,
            _ => return AccessMask::FILE_ALL_ACCESS,
        };
        let (owner, group, everyone) = (self.owner(of), self.group(of), of_everyone());
        let applies = |sid: &Sid| {
            // Unix users can be written in two ways; both match.
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
                // Conditions and object types are not evaluated: an entry that could deny denies, one that could allow does
                // not.
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

    /// The descriptor that a new file or directory stores: the one from its creator and, if that has no list, the entries
    /// inherited from its directory ([MS-DTYP] 2.5.3.4).
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

    /// The list that a new object in this directory inherits. `None` if the directory has no entry to pass on.
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

/// Adds the entries that one entry of a directory passes on.
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
        // One entry for the new directory, one for objects created in it later.
        add(AceFlags::empty(), resolved);
        add(passed_on | AceFlags::INHERIT_ONLY, ace.body.clone());
    }
}

/// `Mask`, the first field of every entry; all access if it is truncated.
fn leading_mask(body: &[u8]) -> AccessMask {
    body.first_chunk().map_or(AccessMask::FILE_ALL_ACCESS, |mask| AccessMask(u32::from_le_bytes(*mask)))
}

/// S-1-3-0 CREATOR OWNER, S-1-3-1 CREATOR GROUP: in inherited entries, the owner and the group of the new object.
fn creator(which: u32) -> Sid {
    Sid { identifier_authority: 3, sub_authorities: vec![which] }
}

/// S-1-3-4: an entry for it replaces the rights that owners have by default.
fn owner_rights() -> Sid {
    creator(4)
}

/// Groups that contain every user who has logged on over a network.
fn of_everyone() -> [Sid; 3] {
    let of_nt = |which| Sid { identifier_authority: 5, sub_authorities: vec![which] };
    [Sid::everyone(), of_nt(11), of_nt(2)]
}

/// The list that is being set, in the form to store: generic rights are mapped, and `Control` has the bits that remain by
/// [MS-DTYP] 2.5.3.4.2.
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

/// The parts of a descriptor that [`Kept`] covers.
pub(crate) const PARTS: SecurityInformation =
    SecurityInformation::OWNER.union(SecurityInformation::GROUP).union(SecurityInformation::DACL);

/// Descriptors that decide about the rights of an opener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// Descriptor of the file.
    pub own: Option<Kept>,
    /// Descriptor of the directory that contains the file, and the directory's owner.
    pub directory: Option<(Kept, Owner)>,
}

impl Descriptors {
    /// Rights of the volume's user on the file, which belongs to `of`. A directory can allow more than the file does: to
    /// delete its files, and to read attributes that a listing shows.
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

    /// Whether the volume's user may remove or replace the file, which belongs to `of`.
    ///
    /// # Errors
    /// `STATUS_ACCESS_DENIED` if not.
    pub fn may_remove(&self, of: Owner) -> Result<(), NtStatus> {
        if self.rights(of).contains(AccessMask::DELETE) { Ok(()) } else { Err(NtStatus::ACCESS_DENIED) }
    }
}

#[cfg(test)]
mod tests;
