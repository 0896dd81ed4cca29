//! Open.LocalOpen ([MS-SMB2] 3.3.1.10): an open from the point of view of its file.

use std::sync::{Arc, Weak};

use crate::engine::file::leases::LeaseKey;
use crate::engine::file::links::LinkId;
use crate::fs::{RelPath, StreamName};
use crate::ids::FileId;
use crate::wire::{AccessMask, ShareAccess};

/// What a file, and the watches of its volume, require of an open.
pub(crate) trait LocalOpen: Send + Sync {
    fn id(&self) -> FileId;

    /// Open.Session; 0 while the open is kept for a client without a session.
    fn session_id(&self) -> u64;

    fn volume_id(&self) -> &str;

    /// Open.PathName below the volume's root.
    fn path(&self) -> RelPath;

    /// Sets the path after a rename.
    fn set_path(&self, path: &RelPath);

    /// Returns the named stream, if this is an open of one.
    fn stream(&self) -> Option<StreamName> {
        None
    }

    /// Open.ParentOplockKey ([MS-FSA] 2.1.1.6): the lease that its client has on the parent directory.
    fn parent_lease_key(&self) -> Option<LeaseKey>;

    /// Whether CLOSE, or another way to end the open, has begun.
    fn is_closing(&self) -> bool;
}

impl<T: LocalOpen + ?Sized> LocalOpen for Arc<T> {
    fn id(&self) -> FileId {
        (**self).id()
    }

    fn session_id(&self) -> u64 {
        (**self).session_id()
    }

    fn volume_id(&self) -> &str {
        (**self).volume_id()
    }

    fn path(&self) -> RelPath {
        (**self).path()
    }

    fn set_path(&self, path: &RelPath) {
        (**self).set_path(path);
    }

    fn stream(&self) -> Option<StreamName> {
        (**self).stream()
    }

    fn parent_lease_key(&self) -> Option<LeaseKey> {
        (**self).parent_lease_key()
    }

    fn is_closing(&self) -> bool {
        (**self).is_closing()
    }
}

/// An open of a file, in order of arrival.
pub(in crate::engine) struct Registered {
    pub(in crate::engine) id: FileId,
    pub(in crate::engine) access: AccessMask,
    pub(in crate::engine) share: ShareAccess,
    /// The name that it was opened by.
    pub(in crate::engine) link: LinkId,
    pub(in crate::engine) open: Weak<dyn LocalOpen>,
}

impl Registered {
    pub(in crate::engine) fn open(&self) -> Option<Arc<dyn LocalOpen>> {
        self.open.upgrade()
    }

    /// Returns the session with the channels to its client.
    pub(in crate::engine) fn session(&self) -> Option<u64> {
        self.open().map(|open| open.session_id()).filter(|session| *session != 0)
    }

    /// Whether it has outlived its session.
    pub(in crate::engine) fn is_disconnected(&self) -> bool {
        self.open().is_some_and(|open| open.session_id() == 0)
    }
}
