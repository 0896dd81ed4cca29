//! The expected state of a file, its opens and its clients' caches, computed without the server.

use std::time::Instant;

use forebay_smb::ids::FileId;
use forebay_smb::wire::create_context::LeaseState;
use forebay_smb::wire::{AccessMask, ShareAccess};

pub const NONE: LeaseState = LeaseState::empty();
pub const R: LeaseState = LeaseState::READ_CACHING;
pub const W: LeaseState = LeaseState::WRITE_CACHING;
pub const H: LeaseState = LeaseState::HANDLE_CACHING;
pub const RH: LeaseState = R.union(H);
pub const RW: LeaseState = R.union(W);
pub const RWH: LeaseState = RW.union(H);

/// Rights that share modes and oplocks depend on.
const DATA: AccessMask = AccessMask::FILE_READ_DATA
    .union(AccessMask::FILE_WRITE_DATA)
    .union(AccessMask::FILE_APPEND_DATA)
    .union(AccessMask::DELETE);

/// A lease of a client, or the oplock of an open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheId {
    Lease { host: usize, key: u8 },
    Oplock(FileId),
}

/// An open that the server has.
#[derive(Clone, Debug)]
pub struct FileOpen {
    pub id: FileId,
    pub host: usize,
    pub access: AccessMask,
    pub share: ShareAccess,
    pub cache: Option<CacheId>,
    /// The program has closed it; the client keeps it for the next open.
    pub kept: bool,
}

impl FileOpen {
    pub fn reads(&self) -> bool {
        self.access.contains(AccessMask::FILE_READ_DATA)
    }

    pub fn writes(&self) -> bool {
        self.access.contains(AccessMask::FILE_WRITE_DATA)
    }

    pub fn is_stat_only(&self) -> bool {
        is_stat_only(self.access)
    }
}

pub fn is_stat_only(access: AccessMask) -> bool {
    !access.intersects(DATA)
}

/// [MS-FSA] 2.1.5.1.2.2: each must share what the other one accesses.
pub fn tolerate(a: (AccessMask, ShareAccess), b: (AccessMask, ShareAccess)) -> bool {
    let shares = |access: AccessMask, share: ShareAccess| {
        [
            (AccessMask::FILE_READ_DATA, ShareAccess::READ),
            (AccessMask::FILE_WRITE_DATA, ShareAccess::WRITE),
            (AccessMask::DELETE, ShareAccess::DELETE),
        ]
        .into_iter()
        .all(|(right, shared)| !access.contains(right) || share.contains(shared))
    };
    is_stat_only(a.0) || is_stat_only(b.0) || shares(a.0, b.1) && shares(b.0, a.1)
}

/// Data that a client has written to its cache only.
#[derive(Clone, Debug)]
pub struct Dirty {
    /// The open that wrote it.
    pub open: FileId,
    pub offset: u64,
    pub bytes: Vec<u8>,
}

/// What a client may cache of a file, and what it caches.
#[derive(Clone, Debug)]
pub struct Cache {
    pub id: CacheId,
    pub host: usize,
    pub state: LeaseState,
    /// The state that a break asks for.
    pub breaking: Option<LeaseState>,
    /// The server's time at the first tick after the break.
    pub seen: Option<Instant>,
    pub epoch: Option<u16>,
    /// Others have changed the file: the client must lose READ caching.
    pub outdated: bool,
    /// The whole file, as the client has it in its cache.
    pub contents: Option<Vec<u8>>,
    pub dirty: Vec<Dirty>,
}

impl Cache {
    pub fn new(id: CacheId, host: usize, state: LeaseState, epoch: Option<u16>) -> Self {
        Self {
            id,
            host,
            state,
            breaking: None,
            seen: None,
            epoch,
            outdated: false,
            contents: None,
            dirty: Vec::new(),
        }
    }

    /// The client's state is now `state`.
    pub fn become_state(&mut self, state: LeaseState) {
        (self.state, self.breaking) = (state, None);
        if !state.contains(R) {
            self.forget_contents();
        }
    }

    pub fn forget_contents(&mut self) {
        (self.contents, self.outdated) = (None, false);
    }

    /// Not during a break, even one that leaves READ caching: the server reports later changes of the contents only after it
    /// has the acknowledgment ([MS-SMB2] 3.3.4.7: one break at a time).
    pub fn may_read(&self) -> bool {
        self.state.contains(R) && self.breaking.is_none()
    }

    pub fn may_write(&self) -> bool {
        self.state.contains(W) && self.breaking.is_none_or(|to| to.contains(W))
    }

    pub fn may_keep_handles(&self) -> bool {
        self.state.contains(H) && self.breaking.is_none()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lock {
    pub open: FileId,
    pub offset: u64,
    pub length: u64,
    pub exclusive: bool,
}

impl Lock {
    fn meets(&self, offset: u64, length: u64) -> bool {
        self.offset < offset + length && offset < self.offset + self.length
    }

    /// [MS-FSA] 2.1.5.8. A shared lock may overlap an exclusive lock of the same open.
    fn excludes(&self, new: &Self) -> bool {
        self.meets(new.offset, new.length) && (new.exclusive || self.exclusive && self.open != new.open)
    }
}

/// A name, and the file that it refers to.
pub struct FileModel {
    pub name: String,
    pub exists: bool,
    /// What a program that reads the file now sees, on any client.
    pub contents: Vec<u8>,
    pub delete_pending: bool,
    pub opens: Vec<FileOpen>,
    pub caches: Vec<Cache>,
    pub locks: Vec<Lock>,
}

pub fn write_to(contents: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let end = offset as usize + bytes.len();
    if contents.len() < end {
        contents.resize(end, 0);
    }
    contents[offset as usize..end].copy_from_slice(bytes);
}

impl FileModel {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            exists: false,
            contents: Vec::new(),
            delete_pending: false,
            opens: Vec::new(),
            caches: Vec::new(),
            locks: Vec::new(),
        }
    }

    pub fn open(&self, id: FileId) -> Option<&FileOpen> {
        self.opens.iter().find(|o| o.id == id)
    }

    pub fn cache(&self, id: CacheId) -> Option<&Cache> {
        self.caches.iter().find(|c| c.id == id)
    }

    pub fn cache_mut(&mut self, id: CacheId) -> Option<&mut Cache> {
        self.caches.iter_mut().find(|c| c.id == id)
    }

    pub fn cache_of(&self, open: FileId) -> Option<&Cache> {
        self.open(open).and_then(|o| o.cache).and_then(|id| self.cache(id))
    }

    /// Opens that conflict with another open with these rights.
    pub fn in_the_way(&self, access: AccessMask, share: ShareAccess) -> Vec<&FileOpen> {
        self.opens.iter().filter(|o| !tolerate((o.access, o.share), (access, share))).collect()
    }

    /// The contents have changed: every other client that has read them must stop using them.
    pub fn outdate(&mut self, by: Option<CacheId>) {
        for cache in self.caches.iter_mut().filter(|c| Some(c.id) != by && c.state.contains(R)) {
            cache.outdated = true;
        }
    }

    pub fn is_breaking(&self) -> bool {
        self.caches.iter().any(|c| c.breaking.is_some())
    }

    /// [MS-FSA] 2.1.4.10
    pub fn may_read(&self, open: FileId, offset: u64, length: u64) -> bool {
        !self.locks.iter().any(|l| l.exclusive && l.open != open && l.meets(offset, length))
    }

    /// [MS-FSA] 2.1.4.10
    pub fn may_write(&self, open: FileId, offset: u64, length: u64) -> bool {
        !self.locks.iter().any(|l| (!l.exclusive || l.open != open) && l.meets(offset, length))
    }

    pub fn may_lock(&self, new: &Lock) -> bool {
        !self.locks.iter().any(|l| l.excludes(new))
    }

    /// The expected state of the server after an open has ended.
    pub fn closed(&mut self, id: FileId) {
        self.opens.retain(|o| o.id != id);
        self.locks.retain(|l| l.open != id);
        let opens = &self.opens;
        self.caches.retain(|c| opens.iter().any(|o| o.cache == Some(c.id)));
        if self.opens.is_empty() && self.delete_pending {
            *self = Self::new(&self.name);
        }
    }
}
