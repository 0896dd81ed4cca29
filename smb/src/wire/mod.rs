//! Messages of [MS-SMB2] and information classes of [MS-FSCC].
//!
//! `Request::parse` and `Response::parse` take a message that starts at its SMB2 header, because the offsets in it count from
//! there; variable parts are borrowed. `encode` appends the body only, and assumes that a header of [`HEADER_LEN`] bytes
//! directly precedes it. Nothing here allocates more than a small multiple of the bytes that the peer sent. Enumerations keep
//! unknown values; reserved fields are ignored on read and zero on write.

pub mod access;
pub mod cancel;
pub mod change_notify;
pub mod close;
pub mod compound;
pub mod create;
pub mod create_context;
pub(crate) mod cursor;
pub mod echo;
pub mod error;
pub mod filetime;
pub mod flush;
pub mod fscc;
pub mod header;
pub mod ioctl;
pub mod limits;
pub mod lock;
pub mod logoff;
pub mod negotiate;
pub mod negotiate_context;
pub(crate) mod newtype;
pub mod oplock_break;
pub mod query_directory;
pub mod query_info;
pub mod read;
pub mod session_setup;
pub mod set_info;
pub mod smb1;
pub mod transform;
pub mod tree_connect;
pub mod tree_disconnect;
pub mod utf16;
pub mod write;

pub use access::{AccessMask, ShareAccess};
pub use create_context::{RequestContext, ResponseContext};
pub use filetime::FileTime;
pub use fscc::FileAttributes;
pub use header::{Command, HEADER_LEN, Header, HeaderFlags, Ids};
pub use negotiate::{Capabilities, Dialect, SecurityMode};
pub use negotiate_context::NegotiateContext;

/// Bytes that violate the rules of their structure: location, structure and fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{fault} in {what} at offset {offset}")]
pub struct Malformed {
    /// What is wrong.
    pub fault: Fault,
    /// The structure being read.
    pub what: &'static str,
    /// Bytes from the start of the given message or buffer.
    pub offset: u32,
}

/// Kinds of malformed input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Fewer bytes than the structure or its lengths need.
    #[error("truncated")]
    Truncated,
    /// `StructureSize` differs from the specification's value.
    #[error("bad structure size")]
    StructureSize,
    /// An offset points outside the valid range of its target, or is not aligned.
    #[error("bad offset")]
    Offset,
    /// UTF-16 with an odd number of bytes.
    #[error("odd string length")]
    OddString,
    /// UTF-16 with an unpaired surrogate: the message is well formed, the name is invalid.
    #[error("unpaired surrogate")]
    Surrogate,
    /// A field has a value that the specification excludes.
    #[error("bad value")]
    Value,
    /// Not the expected protocol.
    #[error("bad protocol id")]
    ProtocolId,
    /// More elements than [`limits`] allows.
    #[error("too many elements")]
    TooMany,
}
