//! The contract between the protocol and a file-system backend.
//!
//! The protocol decides *what* happens to files and emits [`FsOp`]s. The transport's event loop has a backend execute them
//! and returns an [`FsResult`]. Nothing here does I/O. Handles and payload are opaque to the protocol: it keeps them, counts
//! their bytes and passes them on.

use std::any::Any;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use crate::descriptor::{Descriptors, Kept};
use crate::remote::{RemoteBuffer, RemoteProof};
use crate::status::NtStatus;

/// Identifies an operation in flight on one connection. Chosen by the connection, returned on completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// An open file or directory of a backend. Dropping the last clone closes it without effect on the name space.
#[derive(Clone)]
pub struct FsHandle(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for FsHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FsHandle")
    }
}

/// A received frame (without the 4-byte transport length prefix), decrypted, in the transport's buffer.
///
/// The protocol reads headers from it and passes ranges of it back in [`FsOpKind::Write`].
pub trait Frame: Any + Send + Sync {
    /// The whole frame from the first SMB2 header on.
    fn bytes(&self) -> &[u8];

    /// Bytes of memory that it occupies: at least its length, more if its buffer is larger.
    fn held_bytes(&self) -> usize {
        self.bytes().len()
    }
}

/// Data that a backend has read, on its way to the wire.
pub trait Payload: Any + Send {
    /// Bytes read, which is the count that the READ reports.
    fn length(&self) -> usize;
    /// The bytes read. This call copies data that the backend has not copied yet.
    fn bytes(&self) -> &[u8];
    /// The same, for sealing in place.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Lets the transport get its own buffer type back without copying.
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// Identifies a file for share modes and byte-range locks, regardless of the name by which it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    /// Device number.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// [`StreamName::number`] of a named stream; 0 for the file itself.
    pub stream: u64,
}

impl FileKey {
    /// The file that a named stream belongs to.
    #[must_use]
    pub fn file(self) -> Self {
        Self { stream: 0, ..self }
    }

    /// Whether it is a named stream.
    #[must_use]
    pub fn is_stream(self) -> bool {
        self.stream != 0
    }
}

/// The name of a stream besides the file's own data ([MS-FSCC] 2.1.5.3): 1 to 255 UTF-16 code units, without `\`, `/`, `:` and NUL.
/// Names that differ in case are the same.
#[derive(Clone, Debug)]
pub struct StreamName(Box<str>);

impl StreamName {
    /// Checks `name`.
    ///
    /// # Errors
    /// `STATUS_OBJECT_NAME_INVALID` if it is not a valid stream name.
    pub fn new(name: &str) -> Result<Self, NtStatus> {
        let length = name.encode_utf16().count();
        if length == 0 || length > 255 || name.contains(['\\', '/', ':', '\0']) {
            return Err(NtStatus::OBJECT_NAME_INVALID);
        }
        Ok(Self(name.into()))
    }

    /// The name, in its original case.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn folded(&self) -> impl Iterator<Item = char> {
        self.0.chars().flat_map(char::to_uppercase)
    }

    /// A number for the name, constant for the lifetime of the process and never 0. It is keyed, so that no client can find
    /// two names with the same number.
    #[must_use]
    pub fn number(&self) -> u64 {
        static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        let mut hasher = KEY.build_hasher();
        self.folded().for_each(|c| hasher.write_u32(c.into()));
        hasher.finish().max(1)
    }
}

impl PartialEq for StreamName {
    fn eq(&self, other: &Self) -> bool {
        self.folded().eq(other.folded())
    }
}

impl Eq for StreamName {}

/// A named stream in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamEntry {
    /// Name.
    pub name: StreamName,
    /// Bytes.
    pub size: u64,
    /// Bytes allocated on the file system.
    pub allocation_size: u64,
}

/// A path below the volume's root: components joined by `/`, no leading or trailing `/`, empty for the root itself.
///
/// Checked at construction: no empty, `.` or `..` component, no NUL, each component at most 255 UTF-8 bytes
/// (the limit of the file systems below), the whole at most [`crate::limits::PATH_BYTES_MAX`]. Only paths of the POSIX
/// extensions ([`Self::posix`]) may contain `\`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RelPath(Box<str>);

impl RelPath {
    /// The volume's root.
    #[must_use]
    pub fn root() -> Self {
        Self(Box::default())
    }

    /// Checks `path`, a list of components separated by `/`.
    ///
    /// # Errors
    /// `STATUS_OBJECT_NAME_INVALID` for names that no file can have, `STATUS_OBJECT_PATH_SYNTAX_BAD` for `..` and empty
    /// components.
    pub fn new(path: &str) -> Result<Self, NtStatus> {
        if path.contains('\\') {
            return Err(NtStatus::OBJECT_NAME_INVALID);
        }
        Self::posix(path)
    }

    /// As [`Self::new`], for a path of the POSIX extensions: `\` is an ordinary character.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn posix(path: &str) -> Result<Self, NtStatus> {
        if path.is_empty() {
            return Ok(Self::root());
        }
        if path.len() > crate::limits::PATH_BYTES_MAX {
            return Err(NtStatus::OBJECT_NAME_INVALID);
        }
        for component in path.split('/') {
            match component {
                "" | "." | ".." => return Err(NtStatus::OBJECT_PATH_SYNTAX_BAD),
                c if c.len() > 255 || c.contains('\0') => return Err(NtStatus::OBJECT_NAME_INVALID),
                _ => {}
            }
        }
        Ok(Self(path.into()))
    }

    /// The path with `/` between components.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is the volume's root.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this is a name in `directory` or further below.
    #[must_use]
    pub fn is_below(&self, directory: &Self) -> bool {
        if directory.is_root() {
            return !self.is_root();
        }
        self.0.strip_prefix(&*directory.0).is_some_and(|rest| rest.starts_with('/'))
    }

    /// The last component; empty for the root.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or("")
    }

    /// The directory that contains it; the root for top-level names and for the root itself.
    #[must_use]
    pub fn parent(&self) -> RelPath {
        Self(self.0.rsplit_once('/').map_or("", |(parent, _)| parent).into())
    }
}

impl fmt::Debug for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Times of a file, each in 100 ns since 1601 ([MS-DTYP] FILETIME).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileTimes {
    /// CreationTime.
    pub creation: u64,
    /// LastAccessTime.
    pub last_access: u64,
    /// LastWriteTime.
    pub last_write: u64,
    /// ChangeTime.
    pub change: u64,
}

/// What a file represents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum FileKind {
    /// A file, or a reparse point that is none of the others.
    #[default]
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    SymbolicLink,
    /// A character device.
    CharacterDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

/// A reparse point as listings show it ([MS-FSCC] 2.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReparsePoint {
    /// ReparseTag.
    pub tag: u32,
    /// What its data describe.
    pub kind: FileKind,
}

/// Owner and permission bits to set; `None` leaves the value unchanged or, for a new file, to the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ownership {
    /// Permission bits, at most 0o7777.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
}

/// Attributes of a file as a backend reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Identity.
    pub key: FileKey,
    /// Whether it is a directory.
    pub directory: bool,
    /// Size in bytes; 0 for directories.
    pub end_of_file: u64,
    /// Bytes allocated on the file system.
    pub allocation_size: u64,
    /// Number of hard links.
    pub links: u32,
    /// Times.
    pub times: FileTimes,
    /// FILE_ATTRIBUTE_* ([MS-FSCC] 2.6). DIRECTORY is consistent with `directory`, REPARSE_POINT with `reparse`; never 0
    /// (NORMAL if no other bit is set).
    pub attributes: u32,
    /// Set if it is a reparse point.
    pub reparse: Option<ReparsePoint>,
    /// Permission bits, at most 0o7777.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl Stat {
    /// What the file represents.
    #[must_use]
    pub fn kind(&self) -> FileKind {
        match self.reparse {
            Some(ReparsePoint { kind, .. }) if kind != FileKind::Regular => kind,
            _ if self.directory => FileKind::Directory,
            _ => FileKind::Regular,
        }
    }
}

/// How a name is opened ([MS-SMB2] 2.2.13 CreateDisposition without the truncation, which is requested separately).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// It must exist (FILE_OPEN, FILE_OVERWRITE).
    Existing,
    /// It must not exist (FILE_CREATE): `STATUS_OBJECT_NAME_COLLISION` otherwise.
    New,
    /// Either (FILE_OPEN_IF, FILE_OVERWRITE_IF, FILE_SUPERSEDE).
    Either,
}

/// Kind of object that the opener requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// FILE_NON_DIRECTORY_FILE: an existing directory yields `STATUS_FILE_IS_A_DIRECTORY`.
    File,
    /// FILE_DIRECTORY_FILE: an existing file yields `STATUS_NOT_A_DIRECTORY`.
    Directory,
    /// Either; a file if it has to be created.
    Any,
}

/// Opens or creates a file or directory. Never truncates. Never follows symbolic links of the backing file system out of the
/// volume; opening a link itself yields `STATUS_STOPPED_ON_SYMLINK` or `STATUS_ACCESS_DENIED`.
#[derive(Clone, Debug)]
pub struct OpenRequest {
    /// Path below the volume's root.
    pub path: RelPath,
    /// Whether it must exist.
    pub mode: OpenMode,
    /// File or directory.
    pub kind: ObjectKind,
    /// Data will be read (also for directories: enumeration).
    pub read: bool,
    /// Data will be written, truncated or appended.
    pub write: bool,
    /// Every write must reach stable storage before it is acknowledged (FILE_WRITE_THROUGH).
    pub write_through: bool,
    /// FILE_ATTRIBUTE_* for a new file.
    pub attributes: u32,
    /// Bytes to reserve for a new file (AlSi); 0 for none.
    pub allocation_size: u64,
    /// Owner and permission bits of a new file, with POSIX semantics: an unspecified owner or group is the directory's, and
    /// the set-gid bit of the directory is inherited. `None` leaves the choice to the backend.
    pub ownership: Option<Ownership>,
    /// The named stream to open. `mode` then applies to the stream: if the stream may be created, a missing file is created
    /// too, with the attributes and the owner of this request. The stream can belong to a directory.
    pub stream: Option<Box<StreamName>>,
    /// The part of its creator's security descriptor that a new file stores. A missing list is inherited.
    pub descriptor: Option<Box<Kept>>,
    /// Enforce the security descriptors of directories: `STATUS_ACCESS_DENIED` if one does not allow the opener to add this
    /// name, or later another one by this handle.
    pub checked: bool,
}

/// One entry of a directory.
#[derive(Clone, Debug)]
pub struct DirEntry {
    /// Name, one component. The backend leaves out names that are not UTF-8.
    pub name: String,
    /// Its attributes.
    pub stat: Stat,
}

/// Space of a volume, in bytes, within its quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// The volume's hard capacity (the file system's size without a quota).
    pub total: u64,
    /// Bytes that can still be written.
    pub free: u64,
    /// Files that the file system can have in total; 0 if it does not count them.
    pub file_nodes: u64,
    /// How many more files the file system can have.
    pub free_file_nodes: u64,
}

/// Times and attributes to set; `None` leaves the value unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BasicInfo {
    /// CreationTime.
    pub creation: Option<u64>,
    /// LastAccessTime.
    pub last_access: Option<u64>,
    /// LastWriteTime.
    pub last_write: Option<u64>,
    /// ChangeTime (ignored by a backend that cannot set it).
    pub change: Option<u64>,
    /// FILE_ATTRIBUTE_*. REPARSE_POINT is left unchanged.
    pub attributes: Option<u32>,
}

/// An extended attribute ([MS-FSCC] 2.4.15).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ea {
    /// 1..=255 printable ASCII bytes, in their original case.
    pub name: Vec<u8>,
    /// Value. When set, an empty one removes the attribute.
    pub value: Vec<u8>,
}

impl Ea {
    /// Bytes of [`crate::limits::EA_BYTES_MAX`] that an attribute with a name and a value of these lengths uses.
    #[must_use]
    pub const fn size(name: usize, value: usize) -> usize {
        // Flags, both lengths, and the zero byte after the name.
        5 + name + value
    }
}

/// A name that is being removed. The backend that executes [`FsOpKind::Close`] drops this once the name is removed or its
/// removal has failed. Until then a CREATE for the name waits. Other names of the file stay in use.
#[must_use]
pub struct Unlink {
    _removal: Option<Box<dyn Any + Send + Sync>>,
}

impl Unlink {
    /// For a backend's internal use: no request waits for the name.
    pub fn unregistered() -> Self {
        Self { _removal: None }
    }

    /// Drops `removal` together with this.
    pub(crate) fn new(removal: impl Any + Send + Sync) -> Self {
        Self { _removal: Some(Box::new(removal)) }
    }

    /// Combines both in one operation.
    pub(crate) fn and(self, other: Self) -> Self {
        Self::new((self, other))
    }
}

/// An operation for a backend.
pub enum FsOpKind {
    /// Answered by [`FsReply::Opened`].
    Open {
        /// The volume's backend, as the server registered it.
        volume: FsHandle,
        /// What to open.
        request: OpenRequest,
    },
    /// Closes a handle. With `unlink`, removes the name by which it was opened, or that a rename with it has set, if that
    /// name still denotes this file; other names of the file stay. A directory that is not empty stays and yields
    /// `STATUS_DIRECTORY_NOT_EMPTY`. With the handle of a named stream, `unlink` removes the stream. Answered by
    /// [`FsReply::Stat`] taken before the close if `stat`, else [`FsReply::Done`].
    Close {
        /// The handle. Other operations on it can be in flight: they hold it, and run to completion.
        handle: FsHandle,
        /// Remove its name. Dropped when the removal is done or has failed.
        unlink: Option<Unlink>,
        /// Report the final attributes.
        stat: bool,
    },
    /// Answered by [`FsReply::Read`]; `STATUS_END_OF_FILE` if there is no data at `offset`.
    Read {
        /// The handle.
        handle: FsHandle,
        /// First byte.
        offset: u64,
        /// Maximum number of bytes, ≤ [`crate::limits::IO_BYTES_MAX`].
        length: u32,
        /// The response is neither signed nor sealed, and its data follow it: they need not pass through this process.
        plain: bool,
    },
    /// Writes all of `range` of the frame. Answered by [`FsReply::Written`].
    Write {
        /// The handle.
        handle: FsHandle,
        /// First byte; `u64::MAX` appends.
        offset: u64,
        /// The frame that holds the data.
        frame: Arc<dyn Frame>,
        /// Range of the data in the frame.
        range: Range<usize>,
        /// Data must be on stable storage before the answer.
        write_through: bool,
    },
    /// As [`FsOpKind::Write`], but the data are still in the peer's memory: the transport fetches them, and passes a write to
    /// the backend. Answered by [`FsReply::Written`].
    WriteRemote {
        /// The handle.
        handle: FsHandle,
        /// First byte; `u64::MAX` appends.
        offset: u64,
        /// Location of the data.
        source: RemoteBuffer,
        /// Number of bytes, at most the length of the source.
        length: u32,
        /// Verification or decryption that the fetched data need first.
        proof: Option<RemoteProof>,
        /// Data must be on stable storage before the answer.
        write_through: bool,
    },
    /// Brings data and metadata to stable storage. Answered by [`FsReply::Done`].
    Flush {
        /// The handle.
        handle: FsHandle,
    },
    /// Answered by [`FsReply::Stat`].
    Stat {
        /// The handle.
        handle: FsHandle,
    },
    /// Answered by [`FsReply::Space`].
    Space {
        /// Any handle of the volume.
        handle: FsHandle,
    },
    /// Returns the next entries of a directory (without `.` and `..`), at most `limit`. Answered by [`FsReply::Entries`].
    ReadDir {
        /// A directory's handle, which holds the position.
        handle: FsHandle,
        /// Start from the beginning.
        restart: bool,
        /// Maximum number of entries.
        limit: usize,
    },
    /// Looks one name up in a directory (a QUERY_DIRECTORY without wildcards). Answered by [`FsReply::Entries`].
    Lookup {
        /// A directory's handle.
        handle: FsHandle,
        /// The name, one component.
        name: String,
    },
    /// Answered by [`FsReply::Done`].
    SetBasic {
        /// The handle.
        handle: FsHandle,
        /// What to set.
        info: BasicInfo,
    },
    /// Sets owner and permission bits. Answered by [`FsReply::Done`].
    SetOwnership {
        /// The handle.
        handle: FsHandle,
        /// What to set.
        ownership: Ownership,
    },
    /// Makes a file or directory a reparse point with the given data, or turns it back into an ordinary one. Answered by
    /// [`FsReply::Done`]; `STATUS_NOT_SUPPORTED` if the backend cannot store reparse points.
    SetReparsePoint {
        /// The handle.
        handle: FsHandle,
        /// The reparse point and its REPARSE_DATA_BUFFER ([MS-FSCC] 2.1.2.2), ≤ [`crate::limits::REPARSE_DATA_BYTES_MAX`].
        point: Option<(ReparsePoint, Vec<u8>)>,
    },
    /// Returns the data of a reparse point. Answered by [`FsReply::ReparseData`], `STATUS_NOT_A_REPARSE_POINT` if it is not a
    /// reparse point.
    GetReparsePoint {
        /// The handle.
        handle: FsHandle,
    },
    /// Returns all extended attributes of a file or directory, in an order that is stable as long as none is added or
    /// removed. Attributes with an empty value and the backend's internal attributes are left out. Answered by
    /// [`FsReply::Eas`]; `STATUS_EA_TOO_LARGE` beyond [`crate::limits::EA_BYTES_MAX`] or [`crate::limits::EAS_PER_FILE_MAX`].
    GetEas {
        /// The handle.
        handle: FsHandle,
    },
    /// Returns the sum of [`Ea::size`] over the attributes that [`FsOpKind::GetEas`] returns, at most
    /// [`crate::limits::EA_BYTES_MAX`]. Answered by [`FsReply::EaSize`].
    EaSize {
        /// The handle.
        handle: FsHandle,
    },
    /// Sets, replaces or removes extended attributes, in this order. Nothing changes if one of the names is invalid
    /// (`STATUS_INVALID_EA_NAME`), one is internal to the backend (`STATUS_ACCESS_DENIED`), or the file would have more than
    /// [`FsOpKind::GetEas`] can return (`STATUS_EA_TOO_LARGE`). If the file system fails in the middle, the changes made
    /// before that attribute remain. Answered by [`FsReply::Done`].
    SetEas {
        /// The handle.
        handle: FsHandle,
        /// What to set.
        eas: Vec<Ea>,
    },
    /// Returns the stored part of a file's security descriptor. Answered by [`FsReply::Descriptor`].
    GetDescriptor {
        /// The handle.
        handle: FsHandle,
    },
    /// Sets the stored part of a file's security descriptor. Answered by [`FsReply::Done`]; `STATUS_NOT_SUPPORTED` if the
    /// backend cannot store it.
    SetDescriptor {
        /// The handle.
        handle: FsHandle,
        /// `None` grants all access.
        descriptor: Option<Box<Kept>>,
    },
    /// Lists the named streams of a file or directory, by its handle or that of one of its streams. Answered by
    /// [`FsReply::Streams`]; `STATUS_NOT_SUPPORTED` if the backend does not support them.
    Streams {
        /// The handle.
        handle: FsHandle,
    },
    /// Truncates the contents of a file or stream (FILE_OVERWRITE, FILE_SUPERSEDE). Answered by [`FsReply::Done`].
    Overwrite {
        /// The handle.
        handle: FsHandle,
        /// Remove the named streams of the file, too.
        streams: bool,
    },
    /// Renames a named stream. Answered by [`FsReply::Done`]; `STATUS_OBJECT_NAME_COLLISION` if a stream `to` exists and
    /// `replace` is not set, `STATUS_INVALID_PARAMETER` if that stream has contents ([MS-FSA] 2.1.5.15.11.1).
    RenameStream {
        /// The handle of a named stream.
        handle: FsHandle,
        /// The new name. `None` makes the stream the file's data, if the file has none; the handle then denotes a stream that
        /// no longer exists.
        to: Option<StreamName>,
        /// Replace an empty stream.
        replace: bool,
    },
    /// Sets the size (truncates or extends with zeros). Answered by [`FsReply::Done`].
    SetEndOfFile {
        /// The handle.
        handle: FsHandle,
        /// New size in bytes.
        size: u64,
    },
    /// Reserves space (without changing the size) or, if smaller than the size, truncates. Answered by [`FsReply::Done`].
    SetAllocation {
        /// The handle.
        handle: FsHandle,
        /// Bytes.
        size: u64,
    },
    /// Renames the file within the volume. Answered by [`FsReply::Done`]; `STATUS_OBJECT_NAME_COLLISION` if `to` exists and
    /// `replace` is not set.
    Rename {
        /// The handle.
        handle: FsHandle,
        /// The new path.
        to: RelPath,
        /// Replace an existing file (never a directory: `STATUS_ACCESS_DENIED`).
        replace: bool,
    },
    /// Adds a hard link. Answered by [`FsReply::Done`].
    Link {
        /// The handle of a file.
        handle: FsHandle,
        /// The additional path.
        to: RelPath,
        /// Replace an existing file.
        replace: bool,
    },
    /// Checks whether a directory can be deleted. Answered by [`FsReply::Done`], `STATUS_DIRECTORY_NOT_EMPTY` otherwise.
    CheckEmpty {
        /// A directory's handle.
        handle: FsHandle,
    },
    /// Returns the identity of the file that a path denotes now, without opening it. Answered by [`FsReply::Stat`].
    StatPath {
        /// The volume's backend.
        volume: FsHandle,
        /// The path.
        path: RelPath,
    },
    /// Resolves short names ([`crate::short_name`]): replaces each component of the path that does not exist, and is the
    /// short name of one file of its directory, by that file's name. Answered by [`FsReply::Path`].
    LongPath {
        /// The volume's backend.
        volume: FsHandle,
        /// The path.
        path: RelPath,
    },
    /// Copies within the volume, server-side. Answered by [`FsReply::Copied`], which can be short at the source's end.
    CopyRange {
        /// Source handle.
        source: FsHandle,
        /// Source offset.
        source_offset: u64,
        /// Target handle.
        target: FsHandle,
        /// Target offset.
        target_offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Shares extents (reflink); `STATUS_NOT_SUPPORTED` if the file system cannot. Answered by [`FsReply::Done`].
    CloneRange {
        /// Source handle.
        source: FsHandle,
        /// Source offset.
        source_offset: u64,
        /// Target handle.
        target: FsHandle,
        /// Target offset.
        target_offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Zeroes a range (deallocating if possible), never extends. Answered by [`FsReply::Done`].
    ZeroRange {
        /// The handle.
        handle: FsHandle,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Returns the data ranges that overlap a range. Answered by [`FsReply::Ranges`].
    AllocatedRanges {
        /// The handle.
        handle: FsHandle,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Maximum number of ranges.
        limit: usize,
    },
}

/// An operation and the id that its completion must carry.
pub struct FsOp {
    /// The id.
    pub id: OpId,
    /// What to do.
    pub kind: FsOpKind,
}

/// The file or stream that [`FsOpKind::Open`] opened or created.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The handle.
    pub handle: FsHandle,
    /// Whether this open created it.
    pub created: bool,
    /// Its attributes. For a named stream: the stream's sizes and the other attributes of its file; never a directory.
    pub stat: Stat,
    /// The file that a named stream belongs to.
    pub file: Option<OpenedFile>,
    /// Security descriptors, if the file or its directory stores one; for a named stream, those of its file.
    pub descriptors: Option<Box<Descriptors>>,
}

impl Opened {
    /// Whether a file was created, for itself or for the stream.
    #[must_use]
    pub fn made_file(&self) -> bool {
        self.file.as_ref().map_or(self.created, |file| file.created)
    }
}

/// The file of a named stream that was opened.
#[derive(Clone, Debug)]
pub struct OpenedFile {
    /// Its handle, for removing its name.
    pub handle: FsHandle,
    /// Whether this open created it.
    pub created: bool,
}

/// A backend's answer.
pub enum FsReply {
    /// For [`FsOpKind::Open`]. Boxed, because replies are moved often, and this variant is the largest and rare.
    Opened(Box<Opened>),
    /// No data.
    Done,
    /// Attributes.
    Stat(Stat),
    /// Space of the volume.
    Space(Space),
    /// Data read.
    Read(Box<dyn Payload>),
    /// Bytes written.
    Written(u32),
    /// Directory entries; empty at the end.
    Entries(Vec<DirEntry>),
    /// Ranges as (offset, length), ascending; the flag is set if there are more than the limit.
    Ranges(Vec<(u64, u64)>, bool),
    /// Bytes copied.
    Copied(u64),
    /// REPARSE_DATA_BUFFER of a reparse point.
    ReparseData(Vec<u8>),
    /// Extended attributes.
    Eas(Vec<Ea>),
    /// Bytes of extended attributes.
    EaSize(u32),
    /// The stored part of a file's security descriptor.
    Descriptor(Option<Box<Kept>>),
    /// Named streams.
    Streams(Vec<StreamEntry>),
    /// A path below the volume's root.
    Path(RelPath),
}

impl From<Opened> for FsReply {
    fn from(opened: Opened) -> Self {
        Self::Opened(Box::new(opened))
    }
}

/// Success or the status to return to the client.
pub type FsResult = Result<FsReply, NtStatus>;
