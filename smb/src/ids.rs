//! Identifiers of [MS-SMB2] as distinct types: a session is never looked up by a tree's number.

use std::collections::HashMap;
use std::fmt;

/// A table by identifiers that the server has chosen. Clients cannot choose keys that collide, so it uses a fast hash instead
/// of the standard library's.
pub type IdMap<K, V> = HashMap<K, V, foldhash::fast::RandomState>;

macro_rules! id {
    ($(#[$meta:meta])* $name:ident($int:ty)) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $int);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }

        impl From<$int> for $name {
            fn from(value: $int) -> Self {
                Self(value)
            }
        }
    };
}

id!(
    /// `Session.SessionId` ([MS-SMB2] 3.3.1.8). Zero is no session.
    SessionId(u64)
);
id!(
    /// `TreeConnect.TreeId` ([MS-SMB2] 3.3.1.9), unique within a session.
    TreeId(u32)
);
id!(
    /// The number of a request on a connection ([MS-SMB2] 3.3.1.1).
    MessageId(u64)
);
id!(
    /// The number of a request that is answered asynchronously ([MS-SMB2] 3.3.4.2).
    AsyncId(u64)
);

/// `SMB2_FILEID` ([MS-SMB2] 2.2.14.1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct FileId {
    /// `Open.DurableFileId`: survives a reconnect.
    pub persistent: u64,
    /// `Open.FileId`: changes with every reconnect.
    pub volatile: u64,
}

impl FileId {
    /// "The file of the request before me in this compound" ([MS-SMB2] 3.3.5.2.7.2); never a real file.
    pub const RELATED: Self = Self { persistent: u64::MAX, volatile: u64::MAX };

    /// Whether this is [`FileId::RELATED`].
    #[must_use]
    pub const fn is_related(self) -> bool {
        self.persistent == u64::MAX && self.volatile == u64::MAX
    }
}

impl fmt::Debug for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileId({:#x}:{:#x})", self.persistent, self.volatile)
    }
}
