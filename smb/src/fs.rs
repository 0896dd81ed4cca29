//! The contract between the protocol and a file-system backend.
//!
//! The protocol decides *what* happens to files and emits [`FsOp`]s; the transport's event loop has a backend carry
//! them out and hands back an [`FsResult`]. Nothing here does I/O. Handles and payload are opaque to the protocol:
//! it keeps them, counts their bytes and passes them on.

use std::any::Any;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use crate::descriptor::{Descriptors, Kept};
use crate::remote::{RemoteBuffer, RemoteProof};
use crate::status::NtStatus;

/// Identifies an operation in flight on one connection. Chosen by the connection, echoed on completion.
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
/// The protocol reads headers from it and hands ranges of it back in [`FsOpKind::Write`].
pub trait Frame: Any + Send + Sync {
    /// The whole frame from the first SMB2 header on.
    fn bytes(&self) -> &[u8];

    /// Bytes of memory that it occupies: no less than its length, more where its buffer is larger.
    fn held_bytes(&self) -> usize {
        self.bytes().len()
    }
}

/// Data that a backend has read, on its way to the wire.
pub trait Payload: Any + Send {
    /// Bytes read: as many as the READ reports.
    fn length(&self) -> usize;
    /// The bytes read. Data that a backend has not copied yet are copied by this call.
    fn bytes(&self) -> &[u8];
    /// The same, to be sealed where they lie.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// For the transport to get its own buffer type back without copying.
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// What identifies a file for share modes and byte-range locks, whatever name it was opened by.
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
    /// `STATUS_OBJECT_NAME_INVALID` for what no stream can be called.
    pub fn new(name: &str) -> Result<Self, NtStatus> {
        let length = name.encode_utf16().count();
        if length == 0 || length > 255 || name.contains(['\\', '/', ':', '\0']) {
            return Err(NtStatus::OBJECT_NAME_INVALID);
        }
        Ok(Self(name.into()))
    }

    /// In the case that it was given in.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn folded(&self) -> impl Iterator<Item = char> {
        self.0.chars().flat_map(char::to_uppercase)
    }

    /// A number for the name, the same for as long as the process lives; never 0. It is keyed, so that no client finds two names
    /// with one number.
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

/// A named stream as a list shows it.
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
    /// `STATUS_OBJECT_NAME_INVALID` for what no file can be called, `STATUS_OBJECT_PATH_SYNTAX_BAD` for `..` and
    /// empty components.
    pub fn new(path: &str) -> Result<Self, NtStatus> {
        if path.contains('\\') {
            return Err(NtStatus::OBJECT_NAME_INVALID);
        }
        Self::posix(path)
    }

    /// As [`Self::new`], for a path of the POSIX extensions: `\` is a character like others.
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

    /// The directory that holds it; the root for top-level names and for the root itself.
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

/// What a file stands for.
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

/// Owner and permission bits to set; `None` leaves as is, or to the backend where a file is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ownership {
    /// Permission bits, at most 0o7777.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
}

/// What a backend knows of a file.
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
    /// (NORMAL where nothing else).
    pub attributes: u32,
    /// Whether it is a reparse point.
    pub reparse: Option<ReparsePoint>,
    /// Permission bits, at most 0o7777.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl Stat {
    /// What it stands for.
    #[must_use]
    pub fn kind(&self) -> FileKind {
        match self.reparse {
            Some(ReparsePoint { kind, .. }) if kind != FileKind::Regular => kind,
            _ if self.directory => FileKind::Directory,
            _ => FileKind::Regular,
        }
    }
}

/// How a name is opened ([MS-SMB2] 2.2.13 CreateDisposition without the truncation, which is asked for separately).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// It must exist (FILE_OPEN, FILE_OVERWRITE).
    Existing,
    /// It must not exist (FILE_CREATE): `STATUS_OBJECT_NAME_COLLISION` otherwise.
    New,
    /// Either (FILE_OPEN_IF, FILE_OVERWRITE_IF, FILE_SUPERSEDE).
    Either,
}

/// What kind of object the opener asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// FILE_NON_DIRECTORY_FILE: an existing directory answers `STATUS_FILE_IS_A_DIRECTORY`.
    File,
    /// FILE_DIRECTORY_FILE: an existing file answers `STATUS_NOT_A_DIRECTORY`.
    Directory,
    /// Whatever is there; a file where it has to be made.
    Any,
}

/// Opens or makes a file or directory. Never truncates. Symbolic links of the backing file system are never followed
/// out of the volume; one that is opened itself answers `STATUS_STOPPED_ON_SYMLINK` or `STATUS_ACCESS_DENIED`.
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
    /// Owner and permission bits of a new file, as POSIX has them: a group or owner that is not named is that of the directory, and
    /// the set-gid bit of the directory is inherited. `None` leaves all of it to the backend.
    pub ownership: Option<Ownership>,
    /// The named stream to open. `mode` is about the stream then: a file that is not there is made where the stream may be, with
    /// the attributes and the owner of this request. It may be a stream of a directory.
    pub stream: Option<Box<StreamName>>,
    /// What a new file keeps of the security descriptor that its maker gave it. A list that it does not have is inherited.
    pub descriptor: Option<Box<Kept>>,
    /// Security descriptors of directories hold for the opener: `STATUS_ACCESS_DENIED` where one does not let it add this name, or later
    /// another one by this handle.
    pub checked: bool,
}

/// One entry of a directory.
#[derive(Clone, Debug)]
pub struct DirEntry {
    /// Name, one component. Names that are not UTF-8 are left out by the backend.
    pub name: String,
    /// What the backend knows of it.
    pub stat: Stat,
}

/// Space of a volume, in bytes, as its quota allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// The volume's hard capacity (the file system's size without a quota).
    pub total: u64,
    /// What can still be written.
    pub free: u64,
    /// Files that the file system can have, and how many more; 0 where it does not count them.
    pub file_nodes: u64,
    /// How many more files the file system can have.
    pub free_file_nodes: u64,
}

/// Times and attributes to set; `None` leaves as is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BasicInfo {
    /// CreationTime.
    pub creation: Option<u64>,
    /// LastAccessTime.
    pub last_access: Option<u64>,
    /// LastWriteTime.
    pub last_write: Option<u64>,
    /// ChangeTime (a backend that cannot set it leaves it).
    pub change: Option<u64>,
    /// FILE_ATTRIBUTE_*. REPARSE_POINT stays as it is.
    pub attributes: Option<u32>,
}

/// An extended attribute ([MS-FSCC] 2.4.15).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ea {
    /// 1..=255 printable ASCII bytes, in the case they were given in.
    pub name: Vec<u8>,
    /// To set: an empty one removes the attribute.
    pub value: Vec<u8>,
}

impl Ea {
    /// What an attribute with a name and a value of these lengths takes of [`crate::limits::EA_BYTES_MAX`].
    #[must_use]
    pub const fn size(name: usize, value: usize) -> usize {
        // Flags, both lengths, and the zero byte after the name.
        5 + name + value
    }
}

/// A name that is being removed: the backend that carries out [`FsOpKind::Close`] drops this when the name is gone, or could
/// not be removed. Until then CREATE answers STATUS_DELETE_PENDING for it, and so does a CREATE that was under way by then; other
/// names of the file stay in use.
#[must_use]
pub struct Unlink {
    _removal: Option<Box<dyn Any + Send + Sync>>,
}

impl Unlink {
    /// For a backend's own use: no request waits for the name.
    pub fn unregistered() -> Self {
        Self { _removal: None }
    }

    /// `removal` is dropped with it.
    pub(crate) fn new(removal: impl Any + Send + Sync) -> Self {
        Self { _removal: Some(Box::new(removal)) }
    }

    /// Both go with one operation.
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
    /// Ends a handle. With `unlink`, removes the name that it was opened by, or was given by a rename with it, if that name
    /// still denotes this file; other names of the file stay. A directory that is not empty stays and answers
    /// `STATUS_DIRECTORY_NOT_EMPTY`. With the handle of a named stream, `unlink` removes the stream.
    /// Answered by [`FsReply::Stat`] taken before the end if `stat`, else [`FsReply::Done`].
    Close {
        /// The handle. Other operations on it may be in flight: they hold it, and come to their end.
        handle: FsHandle,
        /// Remove its name. To be dropped when that is done or has failed.
        unlink: Option<Unlink>,
        /// Report the final attributes.
        stat: bool,
    },
    /// Answered by [`FsReply::Read`]; `STATUS_END_OF_FILE` where nothing is at `offset`.
    Read {
        /// The handle.
        handle: FsHandle,
        /// First byte.
        offset: u64,
        /// At most so many bytes, ≤ [`crate::limits::IO_BYTES_MAX`].
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
        /// Where in the frame.
        range: Range<usize>,
        /// On stable storage before the answer.
        write_through: bool,
    },
    /// As [`FsOpKind::Write`], but the data are still with the peer: the transport fetches them, and what a backend sees
    /// is a write. Answered by [`FsReply::Written`].
    WriteRemote {
        /// The handle.
        handle: FsHandle,
        /// First byte; `u64::MAX` appends.
        offset: u64,
        /// Where the data are.
        source: RemoteBuffer,
        /// Bytes, as many as the source has or fewer.
        length: u32,
        /// What the data as fetched have to go through first.
        proof: Option<RemoteProof>,
        /// On stable storage before the answer.
        write_through: bool,
    },
    /// Data and metadata on stable storage. Answered by [`FsReply::Done`].
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
    /// The next entries of a directory (without `.` and `..`), at most `limit`. Answered by [`FsReply::Entries`].
    ReadDir {
        /// A directory's handle; it keeps the position.
        handle: FsHandle,
        /// From the beginning.
        restart: bool,
        /// At most so many entries.
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
    /// Makes a file or directory a reparse point, with its data, or one that is none. Answered by [`FsReply::Done`];
    /// `STATUS_NOT_SUPPORTED` where the backend cannot keep them.
    SetReparsePoint {
        /// The handle.
        handle: FsHandle,
        /// The reparse point and its REPARSE_DATA_BUFFER ([MS-FSCC] 2.1.2.2), ≤ [`crate::limits::REPARSE_DATA_BYTES_MAX`].
        point: Option<(ReparsePoint, Vec<u8>)>,
    },
    /// Data of a reparse point. Answered by [`FsReply::ReparseData`], `STATUS_NOT_A_REPARSE_POINT` where it is none.
    GetReparsePoint {
        /// The handle.
        handle: FsHandle,
    },
    /// All extended attributes of a file or directory, in an order that stays as long as none is added or removed. Those with
    /// an empty value are left out, and so is what a backend keeps for itself. Answered by [`FsReply::Eas`];
    /// `STATUS_EA_TOO_LARGE` beyond [`crate::limits::EA_BYTES_MAX`] or [`crate::limits::EAS_PER_FILE_MAX`].
    GetEas {
        /// The handle.
        handle: FsHandle,
    },
    /// The sum of [`Ea::size`] of what [`FsOpKind::GetEas`] finds, at most [`crate::limits::EA_BYTES_MAX`]. Answered by
    /// [`FsReply::EaSize`].
    EaSize {
        /// The handle.
        handle: FsHandle,
    },
    /// Sets, replaces or removes extended attributes, in this order. Nothing changes if one of the names cannot be used
    /// (`STATUS_INVALID_EA_NAME`), one is the backend's own (`STATUS_ACCESS_DENIED`), or the file would have more than
    /// [`FsOpKind::GetEas`] can answer (`STATUS_EA_TOO_LARGE`). If the file system fails in the middle, the attributes
    /// before that one stay changed. Answered by [`FsReply::Done`].
    SetEas {
        /// The handle.
        handle: FsHandle,
        /// What to set.
        eas: Vec<Ea>,
    },
    /// What a file keeps of a security descriptor. Answered by [`FsReply::Descriptor`].
    GetDescriptor {
        /// The handle.
        handle: FsHandle,
    },
    /// Sets what a file keeps of a security descriptor. Answered by [`FsReply::Done`]; `STATUS_NOT_SUPPORTED` where the backend
    /// cannot keep it.
    SetDescriptor {
        /// The handle.
        handle: FsHandle,
        /// Nothing: everything is granted.
        descriptor: Option<Box<Kept>>,
    },
    /// The named streams of a file or directory, by a handle of it or of one of them. Answered by [`FsReply::Streams`];
    /// `STATUS_NOT_SUPPORTED` where the backend keeps none.
    Streams {
        /// The handle.
        handle: FsHandle,
    },
    /// Replaces the contents of a file or stream by none (FILE_OVERWRITE, FILE_SUPERSEDE). Answered by [`FsReply::Done`].
    Overwrite {
        /// The handle.
        handle: FsHandle,
        /// Removes the named streams of the file, too.
        streams: bool,
    },
    /// Gives a named stream another name. Answered by [`FsReply::Done`]; `STATUS_OBJECT_NAME_COLLISION` where there is a stream
    /// `to` and `replace` is not set, `STATUS_INVALID_PARAMETER` where that has contents ([MS-FSA] 2.1.5.15.11.1).
    RenameStream {
        /// The handle of a named stream.
        handle: FsHandle,
        /// The new name. `None` makes it the file's data, if that has none; the handle then denotes a stream that is gone.
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
    /// Reserves (without changing the size) or, where smaller than the size, truncates. Answered by [`FsReply::Done`].
    SetAllocation {
        /// The handle.
        handle: FsHandle,
        /// Bytes.
        size: u64,
    },
    /// Gives the file another name in the same volume. Answered by [`FsReply::Done`];
    /// `STATUS_OBJECT_NAME_COLLISION` where `to` exists and `replace` is not set.
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
    /// Whether a directory may be deleted. Answered by [`FsReply::Done`], `STATUS_DIRECTORY_NOT_EMPTY` otherwise.
    CheckEmpty {
        /// A directory's handle.
        handle: FsHandle,
    },
    /// Identity of what a path denotes now, without opening it. Answered by [`FsReply::Stat`].
    StatPath {
        /// The volume's backend.
        volume: FsHandle,
        /// The path.
        path: RelPath,
    },
    /// Names instead of short names ([`crate::short_name`]): each component of the path that denotes nothing, and is the short name
    /// of one file of its directory, is replaced by that file's name. Answered by [`FsReply::Path`].
    LongPath {
        /// The volume's backend.
        volume: FsHandle,
        /// The path.
        path: RelPath,
    },
    /// Copies within the volume, server-side. Answered by [`FsReply::Copied`], which may be short at the source's end.
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
    /// Shares extents (reflink); `STATUS_NOT_SUPPORTED` where the file system cannot. Answered by [`FsReply::Done`].
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
    /// Turns a range to zeros (deallocating where possible), never extends. Answered by [`FsReply::Done`].
    ZeroRange {
        /// The handle.
        handle: FsHandle,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Data ranges that overlap a range. Answered by [`FsReply::Ranges`].
    AllocatedRanges {
        /// The handle.
        handle: FsHandle,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// At most so many ranges.
        limit: usize,
    },
}

/// An operation and the id its completion must carry.
pub struct FsOp {
    /// The id.
    pub id: OpId,
    /// What to do.
    pub kind: FsOpKind,
}

/// What [`FsOpKind::Open`] found or made.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The handle.
    pub handle: FsHandle,
    /// Whether it was made by this open.
    pub created: bool,
    /// Its attributes. Of a named stream: its sizes, and the rest as of its file; it is no directory.
    pub stat: Stat,
    /// The file that a named stream belongs to.
    pub file: Option<OpenedFile>,
    /// Security descriptors, if the file or its directory keeps one: of a named stream, those of its file.
    pub descriptors: Option<Box<Descriptors>>,
}

impl Opened {
    /// Whether a file was made, for itself or for the stream.
    #[must_use]
    pub fn made_file(&self) -> bool {
        self.file.as_ref().map_or(self.created, |file| file.created)
    }
}

/// The file of a named stream that was opened.
#[derive(Clone, Debug)]
pub struct OpenedFile {
    /// Its handle, to remove its name by.
    pub handle: FsHandle,
    /// Whether it was made by this open.
    pub created: bool,
}

/// A backend's answer.
pub enum FsReply {
    /// To [`FsOpKind::Open`]. In a box: all replies are moved about, and this one is the largest and rare.
    Opened(Box<Opened>),
    /// Nothing to say.
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
    /// Ranges as (offset, length), ascending; the flag says that there are more than the limit.
    Ranges(Vec<(u64, u64)>, bool),
    /// Bytes copied.
    Copied(u64),
    /// REPARSE_DATA_BUFFER of a reparse point.
    ReparseData(Vec<u8>),
    /// Extended attributes.
    Eas(Vec<Ea>),
    /// Bytes of extended attributes.
    EaSize(u32),
    /// What a file keeps of a security descriptor.
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

/// Success or the status to give to the client.
pub type FsResult = Result<FsReply, NtStatus>;
