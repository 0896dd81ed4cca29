//! Security descriptors, self-relative ([MS-DTYP] 2.4.6, 2.4.2, 2.4.4, 2.4.5).

use std::fmt;

use crate::wire::cursor::{Put, Reader, patch_u16, patch_u32, zeros};
use crate::wire::newtype::{open_enum, open_flags};
use crate::wire::{AccessMask, Fault, Malformed, limits};

open_flags!(
    /// Parts of a descriptor: `AdditionalInformation` of QUERY_INFO and SET_INFO ([MS-SMB2] 2.2.37).
    SecurityInformation(u32) {
        OWNER = 0x0000_0001, GROUP = 0x0000_0002, DACL = 0x0000_0004, SACL = 0x0000_0008, LABEL = 0x0000_0010,
        ATTRIBUTE = 0x0000_0020, SCOPE = 0x0000_0040, BACKUP = 0x0001_0000,
    }
);
open_flags!(
    /// `Control`.
    Control(u16) {
        OWNER_DEFAULTED = 0x0001, GROUP_DEFAULTED = 0x0002, DACL_PRESENT = 0x0004, DACL_DEFAULTED = 0x0008,
        SACL_PRESENT = 0x0010, SACL_DEFAULTED = 0x0020, DACL_TRUSTED = 0x0040, SERVER_SECURITY = 0x0080,
        DACL_COMPUTED_INHERITANCE_REQUIRED = 0x0100, SACL_COMPUTED_INHERITANCE_REQUIRED = 0x0200,
        DACL_AUTO_INHERITED = 0x0400, SACL_AUTO_INHERITED = 0x0800, DACL_PROTECTED = 0x1000,
        SACL_PROTECTED = 0x2000, RM_CONTROL_VALID = 0x4000, SELF_RELATIVE = 0x8000,
    }
);
open_enum!(
    /// `AceType`.
    AceType(u8) {
        ACCESS_ALLOWED = 0x00, ACCESS_DENIED = 0x01, SYSTEM_AUDIT = 0x02, ACCESS_ALLOWED_OBJECT = 0x05,
        ACCESS_DENIED_OBJECT = 0x06, ACCESS_ALLOWED_CALLBACK = 0x09, ACCESS_DENIED_CALLBACK = 0x0a,
        SYSTEM_MANDATORY_LABEL = 0x11, SYSTEM_RESOURCE_ATTRIBUTE = 0x12, SYSTEM_SCOPED_POLICY_ID = 0x13,
    }
);
open_flags!(
    /// `AceFlags`.
    AceFlags(u8) {
        OBJECT_INHERIT = 0x01, CONTAINER_INHERIT = 0x02, NO_PROPAGATE_INHERIT = 0x04, INHERIT_ONLY = 0x08,
        INHERITED = 0x10, SUCCESSFUL_ACCESS = 0x40, FAILED_ACCESS = 0x80,
    }
);

/// `SID` ([MS-DTYP] 2.4.2.2).
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Sid {
    /// `IdentifierAuthority`, 48 bits.
    pub identifier_authority: u64,
    /// `SubAuthority`, at most [`limits::SUB_AUTHORITIES_MAX`].
    pub sub_authorities: Vec<u32>,
}

const SID_REVISION: u8 = 1;
/// First sub-authority of the SIDs that carry uid, gid and mode of a Unix file.
const UNIX: u32 = 88;

impl Sid {
    /// S-1-1-0, everyone.
    #[must_use]
    pub fn everyone() -> Self {
        Self { identifier_authority: 1, sub_authorities: vec![0] }
    }

    /// S-1-5-88-1-uid, a Unix user.
    #[must_use]
    pub fn unix_user(uid: u32) -> Self {
        Self { identifier_authority: 5, sub_authorities: vec![UNIX, 1, uid] }
    }

    /// S-1-5-88-2-gid, a Unix group.
    #[must_use]
    pub fn unix_group(gid: u32) -> Self {
        Self { identifier_authority: 5, sub_authorities: vec![UNIX, 2, gid] }
    }

    /// S-1-5-88-3-mode, the permission bits of a file, as the principal of an access control entry.
    #[must_use]
    pub fn unix_mode(mode: u32) -> Self {
        Self { identifier_authority: 5, sub_authorities: vec![UNIX, 3, mode] }
    }

    /// Appends [`Self::unix_user`] and [`Self::unix_group`] without allocating them: listings have them in each entry.
    pub fn encode_owner(uid: u32, gid: u32, out: &mut Vec<u8>) {
        for (kind, id) in [(1, uid), (2, gid)] {
            out.extend_from_slice(&[SID_REVISION, 3, 0, 0, 0, 0, 0, 5]);
            [UNIX, kind, id].into_iter().for_each(|sub| out.put(sub));
        }
    }

    /// The uid of a Unix user: S-1-5-88-1-uid, or Samba's form S-1-22-1-uid.
    #[must_use]
    pub fn as_unix_user(&self) -> Option<u32> {
        self.unix(1)
    }

    /// The gid of a Unix group: S-1-5-88-2-gid, or Samba's form S-1-22-2-gid.
    #[must_use]
    pub fn as_unix_group(&self) -> Option<u32> {
        self.unix(2)
    }

    /// The permission bits of S-1-5-88-3-mode.
    #[must_use]
    pub fn as_unix_mode(&self) -> Option<u32> {
        self.unix(3)
    }

    fn unix(&self, kind: u32) -> Option<u32> {
        match (self.identifier_authority, self.sub_authorities.as_slice()) {
            (5, &[UNIX, found, id]) if found == kind => Some(id),
            (22, &[found, id]) if found == kind && kind != 3 => Some(id),
            _ => None,
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let revision = r.get::<u8>()?;
        let count = r.get::<u8>()?;
        if revision != SID_REVISION || usize::from(count) > limits::SUB_AUTHORITIES_MAX {
            return Err(r.fault(Fault::Value));
        }
        let authority = r.array::<6>()?;
        let identifier_authority = authority.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
        let sub_authorities = (0..count).map(|_| r.get()).collect::<Result<_, _>>()?;
        Ok(Self { identifier_authority, sub_authorities })
    }

    /// Reads a SID; bytes after it are ignored.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        Self::read(&mut Reader::new(bytes, "sid"))
    }

    /// Appends the SID.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let count = self.sub_authorities.len().min(limits::SUB_AUTHORITIES_MAX);
        out.put(SID_REVISION);
        out.put(count as u8);
        out.extend_from_slice(&self.identifier_authority.to_be_bytes()[2..]);
        self.sub_authorities[..count].iter().for_each(|sub| out.put(*sub));
    }
}

impl fmt::Display for Sid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S-{SID_REVISION}-{}", self.identifier_authority)?;
        self.sub_authorities.iter().try_for_each(|sub| write!(f, "-{sub}"))
    }
}

impl fmt::Debug for Sid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An access control entry ([MS-DTYP] 2.4.4).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Ace {
    pub ace_type: AceType,
    pub ace_flags: AceFlags,
    pub body: AceBody,
}

/// Body of an entry, after its header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AceBody {
    /// Body of the types ACCESS_ALLOWED, ACCESS_DENIED, SYSTEM_AUDIT and SYSTEM_MANDATORY_LABEL.
    Basic {
        /// `Mask`.
        mask: AccessMask,
        /// `Sid`.
        sid: Sid,
    },
    /// Body of all other types, kept unchanged.
    Other(Vec<u8>),
}

const ACE_HEADER_LEN: usize = 4;

impl Ace {
    /// An entry that grants `mask` to `sid`.
    #[must_use]
    pub const fn allow(sid: Sid, mask: AccessMask) -> Self {
        Self {
            ace_type: AceType::ACCESS_ALLOWED,
            ace_flags: AceFlags::empty(),
            body: AceBody::Basic { mask, sid },
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let ace_type = r.get()?;
        let ace_flags = r.get()?;
        let size = usize::from(r.get::<u16>()?);
        let body = r.take(size.checked_sub(ACE_HEADER_LEN).ok_or(r.fault(Fault::Value))?)?;
        let body = match ace_type {
            AceType::ACCESS_ALLOWED
            | AceType::ACCESS_DENIED
            | AceType::SYSTEM_AUDIT
            | AceType::SYSTEM_MANDATORY_LABEL => {
                let mut r = Reader::new(body, "ace");
                AceBody::Basic { mask: r.get()?, sid: Sid::read(&mut r)? }
            }
            _ => AceBody::Other(body.to_vec()),
        };
        Ok(Self { ace_type, ace_flags, body })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put(self.ace_type);
        out.put(self.ace_flags);
        zeros(out, 2);
        match &self.body {
            AceBody::Basic { mask, sid } => {
                out.put(*mask);
                sid.encode(out);
            }
            AceBody::Other(body) => out.extend_from_slice(body),
        }
        let len = out.len() - start;
        patch_u16(out, start + 2, len);
    }
}

/// `ACL` ([MS-DTYP] 2.4.5).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Acl {
    /// 2, or 4 with object entries.
    pub acl_revision: u8,
    pub aces: Vec<Ace>,
}

impl Acl {
    fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "acl");
        let acl_revision = r.get()?;
        r.skip(1)?;
        let size = usize::from(r.get::<u16>()?);
        let count = r.get::<u16>()?;
        r.skip(2)?;
        if usize::from(count) > limits::ACES_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        let entries = size.checked_sub(r.position()).ok_or(r.fault(Fault::Value))?;
        let mut r = Reader::new(r.take(entries)?, "acl");
        let aces = (0..count).map(|_| Ace::read(&mut r)).collect::<Result<_, _>>()?;
        Ok(Self { acl_revision, aces })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put(self.acl_revision);
        zeros(out, 3);
        out.put(self.aces.len() as u16);
        zeros(out, 2);
        self.aces.iter().for_each(|ace| ace.encode(out));
        let len = out.len() - start;
        patch_u16(out, start + 2, len);
    }
}

/// `SECURITY_DESCRIPTOR` ([MS-DTYP] 2.4.6). A list that is present but `None` is the null list, which grants all access.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct SecurityDescriptor {
    /// [`Control::SELF_RELATIVE`] is always set when encoded.
    pub control: Control,
    pub owner: Option<Sid>,
    pub group: Option<Sid>,
    pub sacl: Option<Acl>,
    pub dacl: Option<Acl>,
}

impl SecurityDescriptor {
    const REVISION: u8 = 1;

    /// Reads a descriptor.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "security descriptor");
        if r.get::<u8>()? != Self::REVISION {
            return Err(r.fault(Fault::Value));
        }
        r.skip(1)?;
        // A descriptor in a message is always self-relative, even without the flag.
        let control = r.get::<Control>()? | Control::SELF_RELATIVE;
        let mut part = || -> Result<u32, Malformed> { r.get() };
        let (owner, group, sacl, dacl) = (part()?, part()?, part()?, part()?);
        let part = |offset: u32| match offset {
            0 => Ok(None),
            offset => r.variable_to_end(offset as usize).map(Some),
        };
        Ok(Self {
            control,
            owner: part(owner)?.map(Sid::parse).transpose()?,
            group: part(group)?.map(Sid::parse).transpose()?,
            sacl: part(sacl)?.map(Acl::parse).transpose()?,
            dacl: part(dacl)?.map(Acl::parse).transpose()?,
        })
    }

    /// Appends the descriptor.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put(Self::REVISION);
        zeros(out, 1);
        out.put(self.control | Control::SELF_RELATIVE);
        zeros(out, 16);
        for (field, sid) in [(4, &self.owner), (8, &self.group)] {
            if let Some(sid) = sid {
                let offset = out.len() - start;
                patch_u32(out, start + field, offset);
                sid.encode(out);
            }
        }
        for (field, acl) in [(12, &self.sacl), (16, &self.dacl)] {
            if let Some(acl) = acl {
                let offset = out.len() - start;
                patch_u32(out, start + field, offset);
                acl.encode(out);
            }
        }
    }
}
