//! TREE_CONNECT ([MS-SMB2] 2.2.9, 2.2.10).

use super::cursor::{Put, Reader, len_u16, offset_from_header, zeros};
use super::newtype::{open_enum, open_flags};
use super::{AccessMask, Malformed, utf16};

open_flags!(
    /// `Flags` of the request, dialect 3.1.1.
    Flags(u16) { CLUSTER_RECONNECT = 0x0001, REDIRECT_TO_OWNER = 0x0002, EXTENSION_PRESENT = 0x0004 }
);
open_enum!(
    /// `ShareType`.
    ShareType(u8) { DISK = 0x01, PIPE = 0x02, PRINT = 0x03 }
);
open_flags!(
    /// `ShareFlags`. Caching is a two-bit number; zero is manual caching.
    ShareFlags(u32) {
        AUTO_CACHING = 0x0000_0010, VDO_CACHING = 0x0000_0020, DFS = 0x0000_0001, DFS_ROOT = 0x0000_0002,
        RESTRICT_EXCLUSIVE_OPENS = 0x0000_0100, FORCE_SHARED_DELETE = 0x0000_0200,
        ALLOW_NAMESPACE_CACHING = 0x0000_0400, ACCESS_BASED_DIRECTORY_ENUM = 0x0000_0800,
        FORCE_LEVELII_OPLOCK = 0x0000_1000, ENABLE_HASH_V1 = 0x0000_2000, ENABLE_HASH_V2 = 0x0000_4000,
        ENCRYPT_DATA = 0x0000_8000, IDENTITY_REMOTING = 0x0004_0000, COMPRESS_DATA = 0x0010_0000,
        ISOLATED_TRANSPORT = 0x0020_0000,
    }
);
impl ShareFlags {
    /// No offline files.
    pub const NO_CACHING: Self = Self(0x30);
}
open_flags!(
    /// `Capabilities` of the share.
    ShareCapabilities(u32) {
        DFS = 0x08, CONTINUOUS_AVAILABILITY = 0x10, SCALEOUT = 0x20, CLUSTER = 0x40, ASYMMETRIC = 0x80,
        REDIRECT_TO_OWNER = 0x100,
    }
);

/// A share by name ([MS-SMB2] 2.2.9). The extension of 3.1.1 (remoted identities, for clusters of Windows) is skipped:
/// `PathOffset` points past it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request {
    pub flags: Flags,
    /// `\\server\share`.
    pub path: String,
}

impl Request {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 9, "tree connect request")?;
        let flags = r.get()?;
        let offset = r.get::<u16>()?;
        let len = r.get::<u16>()?;
        Ok(Self { flags, path: utf16::decode(r.variable(offset.into(), len.into())?)? })
    }

    /// Appends the body, without an extension.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(9);
        out.put(self.flags);
        out.put(len_u16(offset_from_header(out, start) + 4));
        out.put(len_u16(utf16::encoded_len(&self.path)));
        utf16::encode(&self.path, out);
    }

    /// The last component of the path: the name of the share.
    #[must_use]
    pub fn share(&self) -> &str {
        self.path.rsplit('\\').next().unwrap_or_default()
    }
}

/// The share's properties ([MS-SMB2] 2.2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response {
    pub share_type: ShareType,
    pub share_flags: ShareFlags,
    pub capabilities: ShareCapabilities,
    pub maximal_access: AccessMask,
}

impl Response {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 16, "tree connect response")?;
        let share_type = r.get()?;
        r.skip(1)?;
        Ok(Self { share_type, share_flags: r.get()?, capabilities: r.get()?, maximal_access: r.get()? })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(16);
        out.put(self.share_type);
        zeros(out, 1);
        out.put(self.share_flags);
        out.put(self.capabilities);
        out.put(self.maximal_access);
    }
}
