//! The `directory` backend: a volume is a directory of a local file system.
//!
//! Every path is resolved by `openat2` with `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS` below the
//! volume's root, so that no name and no symlink leads out of the volume, even if a symlink is swapped in concurrently.
//! Symbolic links, devices, sockets and pipes that other programs created there are not served: opening one returns
//! `STATUS_ACCESS_DENIED`, and listings omit them. Those that clients create are reparse points: files with the reparse data
//! in an extended attribute.
//!
//! Files are created with mode 0666 and directories with mode 0777, minus the daemon's umask, and belong to the daemon's user,
//! unless the client specifies owner and mode. Access is controlled by the volume's credentials and, in a pod, by the client's
//! kernel.

mod attrs;
pub mod data;
mod descriptors;
mod direct;
mod dirs;
mod durability;
mod eas;
mod ioctl;
mod mapped;
mod name_locks;
mod names;
mod open;
mod path;
mod plain_files;
pub mod quota;
mod streams;
mod xattr;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

pub use self::durability::Promise;
use self::durability::Settlement;
pub use self::mapped::MappedRead;
use self::name_locks::NameLocks;
use self::streams::{Data, OpenStream};
use forebay_smb::fs::{FileKey, FsHandle, FsOpKind, FsReply, FsResult, RelPath, Space, Stat};
use forebay_smb::status::NtStatus;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::backend::errno::status;
use crate::buffers::BufferPool;
use crate::gate::{Gate, Gated};
use crate::lanes::Descriptor;
use crate::qos::Limiter;

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// A volume's root.
#[derive(Debug)]
pub struct Volume {
    root: OwnedFd,
    /// Whether the file system supports user extended attributes.
    xattrs: bool,
    /// Whether files have security descriptors.
    secured: AtomicBool,
    /// Whether the file system is in memory (tmpfs), where no read or write waits for a device.
    in_memory: bool,
    /// Which changes are on stable storage before the reply.
    promise: Promise,
    /// Holds new links until they replace a name: a directory of the same file system that clients cannot see.
    aside: Option<OwnedFd>,
    names: NameLocks,
    limiter: Arc<Limiter>,
    gate: Arc<Gate>,
}

impl Volume {
    /// Opens the volume with the root directory `path`.
    ///
    /// # Errors
    /// Errors from opening it.
    pub fn open(path: &Path) -> Result<Arc<Self>, Errno> {
        Self::open_with(path, Promise::AtFlush, None)
    }

    /// Like [`Volume::open`], with a durability promise and a directory of the same file system for temporary links. Without that
    /// directory, temporary links are visible next to the name that they replace.
    ///
    /// # Errors
    /// Errors from opening it.
    pub fn open_with(path: &Path, promise: Promise, aside: Option<&Path>) -> Result<Arc<Self>, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty())?;
        let aside = aside.map(|path| rustix::fs::open(path, flags, Mode::empty())).transpose()?;
        let xattrs = attrs::kept(root.as_fd());
        let secured = AtomicBool::new(descriptors::marked(root.as_fd())?);
        let in_memory = rustix::fs::fstatfs(&root)?.f_type == TMPFS_MAGIC;
        let (names, limiter, gate) = (NameLocks::default(), Arc::default(), Arc::default());
        Ok(Arc::new(Self { root, xattrs, secured, in_memory, promise, aside, names, limiter, gate }))
    }

    /// Opens a snapshot of the volume with the root directory `path`. Clients only read it. It shares the limits of the volume.
    ///
    /// # Errors
    /// Errors from opening it.
    pub fn snapshot_at(&self, path: &Path) -> Result<Arc<Self>, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Arc::new(Self {
            secured: AtomicBool::new(descriptors::marked(root.as_fd())?),
            root,
            xattrs: self.xattrs,
            in_memory: self.in_memory,
            promise: self.promise,
            aside: None,
            names: NameLocks::default(),
            limiter: Arc::clone(&self.limiter),
            gate: Arc::default(),
        }))
    }

    /// Whether files can have extended attributes.
    #[must_use]
    pub fn keeps_extended_attributes(&self) -> bool {
        self.xattrs
    }

    /// Enforces the limits of the volume. There are none until they are set.
    #[must_use]
    pub fn limiter(&self) -> &Arc<Limiter> {
        &self.limiter
    }

    /// The gate that changes of the volume must pass.
    #[must_use]
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Returns the volume as a handle for the protocol layer.
    #[must_use]
    pub fn handle(self: &Arc<Self>) -> FsHandle {
        FsHandle(Arc::clone(self) as _)
    }

    /// Returns the space as reported by the quota or the file system.
    ///
    /// # Errors
    /// Errors from fstatfs.
    pub fn space(&self) -> Result<Space, Errno> {
        // XFS and ext4 report the limits of the project for a directory with project inheritance.
        let space = rustix::fs::fstatvfs(&self.root)?;
        Ok(Space {
            total: space.f_blocks * space.f_frsize,
            free: space.f_bavail * space.f_frsize,
            file_nodes: space.f_files,
            free_file_nodes: space.f_favail,
        })
    }

    /// Writes the whole file system of the volume to stable storage.
    ///
    /// # Errors
    /// Errors from syncfs.
    pub fn sync(&self) -> Result<(), Errno> {
        rustix::fs::syncfs(&self.root)
    }
}

/// An open file or directory.
#[derive(Debug)]
pub struct OpenFile {
    fd: Descriptor,
    volume: Arc<Volume>,
    key: FileKey,
    directory: bool,
    write_through: bool,
    /// Whether security descriptors are enforced for the opener.
    checked: bool,
    /// The name under which it was last opened or renamed, used if `/proc` is not available.
    path: Mutex<RelPath>,
    /// Whether its name was created or changed and the parent directory is not synced yet.
    name_unsynced: AtomicBool,
    /// The directory that its name was removed from, until the removal is synced.
    removed_from: Mutex<Option<OwnedFd>>,
    /// Whether a writeback failed: the lost data is unknown, so no later flush may succeed.
    sync_failed: AtomicBool,
    position: Mutex<dirs::Position>,
    /// How reads bypass the page cache, set by the first request for that; the inner `None` means that they cannot.
    direct: OnceLock<Option<direct::Direct>>,
    /// Its memory mapping, created by the first READ that is sent from it.
    mapped: Mutex<mapped::Mapped>,
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl OpenFile {
    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.directory
    }

    /// Whether every write must be on stable storage before it is acknowledged.
    #[must_use]
    pub fn write_through(&self) -> bool {
        self.write_through
    }

    /// Whether it is in memory, where no read or write waits for a device.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.volume.in_memory
    }

    /// Whether the file ends at or before `end`.
    #[must_use]
    pub fn ends_by(&self, end: u64) -> bool {
        rustix::fs::fstat(&self.fd).is_ok_and(|stat| stat.st_size.cast_unsigned() <= end)
    }

    /// Records that an fsync failed.
    pub(super) fn set_sync_failed(&self) {
        self.sync_failed.store(true, Ordering::Release);
    }
}

impl Gated for Arc<OpenFile> {
    fn gate(&self) -> &Gate {
        &self.volume.gate
    }
}

/// The open file behind a handle.
///
/// # Errors
/// `STATUS_INVALID_HANDLE` if the handle does not refer to an open file.
pub fn file(handle: &FsHandle) -> Result<Arc<OpenFile>, NtStatus> {
    Arc::clone(&handle.0).downcast().map_err(|_| NtStatus::INVALID_HANDLE)
}

fn stream(handle: &FsHandle) -> Option<Arc<OpenStream>> {
    Arc::clone(&handle.0).downcast().ok()
}

/// The open file behind a handle. For a stream, the file that it belongs to, which has the attributes.
fn of_file(handle: &FsHandle) -> Result<Arc<OpenFile>, NtStatus> {
    stream(handle).map_or_else(|| file(handle), |stream| Ok(Arc::clone(stream.file())))
}

fn is_stream(handle: &FsHandle) -> bool {
    handle.0.is::<OpenStream>()
}

fn data_of(handle: &FsHandle) -> Result<Data, NtStatus> {
    stream(handle).map_or_else(|| file(handle).map(Data::File), |stream| Ok(Data::Stream(stream)))
}

/// Whether every change through a volume or file handle must be on stable storage before it is acknowledged.
pub(super) fn writes_through(handle: &FsHandle) -> bool {
    of_file(handle).map_or_else(
        |_| volume(handle).is_ok_and(|volume| volume.promise == Promise::AtReply),
        |file| file.write_through,
    )
}

/// The limiter of the volume behind a volume or file handle.
pub(super) fn limiter(handle: &FsHandle) -> Option<&Arc<Limiter>> {
    volume_of(handle).map(Volume::limiter)
}

/// The gate of the volume behind a volume or file handle.
pub(super) fn gate(handle: &FsHandle) -> Option<&Arc<Gate>> {
    volume_of(handle).map(Volume::gate)
}

fn volume_of(handle: &FsHandle) -> Option<&Volume> {
    if let Some(file) = handle.0.downcast_ref::<OpenFile>() {
        return Some(&file.volume);
    }
    if let Some(stream) = handle.0.downcast_ref::<OpenStream>() {
        return Some(&stream.file().volume);
    }
    handle.0.downcast_ref()
}

fn volume(handle: &FsHandle) -> Result<Arc<Volume>, NtStatus> {
    if let Ok(volume) = Arc::clone(&handle.0).downcast::<Volume>() {
        return Ok(volume);
    }
    of_file(handle).map(|file| Arc::clone(&file.volume))
}

fn stat(handle: &FsHandle) -> Result<Stat, NtStatus> {
    match stream(handle) {
        Some(stream) => stream.stat(),
        None => attrs::stat(&*file(handle)?),
    }
}

/// Executes an operation if the kernel can answer it from memory. `Err` returns an operation that may have to wait.
pub(super) fn execute_cached(operation: FsOpKind) -> Result<FsResult, FsOpKind> {
    use FsOpKind as Op;
    let done = match &operation {
        Op::Open { volume: at, request } => volume(at)
            .ok()
            .and_then(|volume| open::open_cached(&volume, request))
            .map(|r| r.map(FsReply::from)),
        Op::StatPath { volume: at, path } => volume(at)
            .ok()
            .and_then(|volume| open::stat_path_cached(&volume, path))
            .map(|r| r.map(FsReply::Stat)),
        Op::Stat { handle } => Some(stat(handle).map(FsReply::Stat)),
        Op::GetDescriptor { handle } => match of_file(handle) {
            Ok(file) if file.volume.secured.load(Ordering::Acquire) => None,
            Ok(_) => Some(Ok(FsReply::Descriptor(None))),
            Err(status) => Some(Err(status)),
        },
        Op::EaSize { handle } => match of_file(handle) {
            Ok(file) => eas::size_cached(&file).map(|size| size.map(FsReply::EaSize)),
            Err(status) => Some(Err(status)),
        },
        Op::Space { handle } => {
            Some(volume(handle).and_then(|v| v.space().map_err(status)).map(FsReply::Space))
        }
        Op::Close { handle, unlink: None, stat: true } => Some(stat(handle).map(FsReply::Stat)),
        Op::Close { unlink: None, stat: false, .. } => Some(Ok(FsReply::Done)),
        _ => None,
    };
    done.ok_or(operation)
}

/// Executes one operation and makes it durable as the volume promises.
pub(super) fn execute(operation: FsOpKind, buffers: &BufferPool) -> FsResult {
    let settlement = Settlement::of(&operation)?;
    let reply = carry_out(operation, buffers)?;
    settlement.settle(&reply)?;
    Ok(reply)
}

fn carry_out(operation: FsOpKind, buffers: &BufferPool) -> FsResult {
    use FsOpKind as Op;
    match operation {
        Op::Open { volume: at, request } => open::open(&volume(&at)?, &request).map(FsReply::from),
        Op::Close { handle, unlink, stat: with_stat } => {
            // Read first, so that the attributes do not reflect the removal of the name.
            let last = if with_stat { Some(stat(&handle)?) } else { None };
            // The name cannot be opened until the token is dropped.
            if let Some(_token) = unlink {
                match stream(&handle) {
                    Some(stream) => stream.remove()?,
                    None => names::unlink(&*file(&handle)?)?,
                }
            }
            Ok(last.map_or(FsReply::Done, FsReply::Stat))
        }
        Op::Read { handle, offset, length, .. } => match stream(&handle) {
            Some(stream) => stream.read(offset, length, buffers),
            None => data::read(&*file(&handle)?, offset, length, buffers),
        }
        .map(FsReply::Read),
        // Transports fetch the data first and then submit a `Write`.
        Op::WriteRemote { .. } => Err(NtStatus::INTERNAL_ERROR),
        Op::Write { handle, offset, frame, range, write_through } => {
            let bytes = frame.bytes().get(range).ok_or(NtStatus::INVALID_PARAMETER)?;
            match stream(&handle) {
                Some(stream) => stream.write(offset, bytes, write_through),
                None => data::write(&*file(&handle)?, offset, bytes, write_through),
            }
            .map(FsReply::Written)
        }
        Op::Flush { handle } => names::flush(&*of_file(&handle)?).map(|()| FsReply::Done),
        Op::Stat { handle } => stat(&handle).map(FsReply::Stat),
        Op::Space { handle } => volume(&handle)?.space().map(FsReply::Space).map_err(status),
        Op::ReadDir { handle, restart, limit } => {
            dirs::read(&*file(&handle)?, restart, limit).map(FsReply::Entries)
        }
        Op::Lookup { handle, name } => dirs::lookup(&*file(&handle)?, &name).map(FsReply::Entries),
        Op::SetBasic { handle, info } => attrs::set(&*of_file(&handle)?, &info).map(|()| FsReply::Done),
        Op::SetOwnership { handle, ownership } => {
            attrs::own(&*of_file(&handle)?, ownership).map(|()| FsReply::Done)
        }
        Op::SetReparsePoint { handle, point } => {
            attrs::set_reparse_point(&*file(&handle)?, point).map(|()| FsReply::Done)
        }
        Op::GetReparsePoint { handle } => attrs::reparse_data(&*file(&handle)?).map(FsReply::ReparseData),
        Op::GetEas { handle } => eas::get(&*of_file(&handle)?).map(FsReply::Eas),
        Op::EaSize { handle } => eas::size(&*of_file(&handle)?).map(FsReply::EaSize),
        Op::SetEas { handle, eas } => eas::set(&*of_file(&handle)?, &eas).map(|()| FsReply::Done),
        Op::GetDescriptor { handle } => descriptors::get(&*of_file(&handle)?)
            .map(|descriptor| FsReply::Descriptor(descriptor.map(Box::new))),
        Op::SetDescriptor { handle, descriptor } => {
            descriptors::set(&*of_file(&handle)?, descriptor.as_deref()).map(|()| FsReply::Done)
        }
        Op::Streams { handle } => streams::list(&*of_file(&handle)?).map(FsReply::Streams),
        Op::Overwrite { handle, streams } => {
            match stream(&handle) {
                Some(stream) => stream.set_end(0)?,
                None => overwrite(&*file(&handle)?, streams)?,
            }
            Ok(FsReply::Done)
        }
        Op::RenameStream { handle, to, replace } => {
            let stream = stream(&handle).ok_or(NtStatus::INVALID_HANDLE)?;
            stream.rename(to.as_ref(), replace).map(|()| FsReply::Done)
        }
        Op::SetEndOfFile { handle, size } => match stream(&handle) {
            Some(stream) => stream.set_end(size),
            None => data::set_end(&*file(&handle)?, size),
        }
        .map(|()| FsReply::Done),
        Op::SetAllocation { handle, size } => match stream(&handle) {
            Some(stream) => stream.set_allocation(size),
            None => data::set_allocation(&*file(&handle)?, size),
        }
        .map(|()| FsReply::Done),
        Op::Rename { handle, to, replace } => {
            names::rename(&*file(&handle)?, &to, replace).map(|()| FsReply::Done)
        }
        Op::Link { handle, to, replace } => {
            names::link(&*file(&handle)?, &to, replace).map(|()| FsReply::Done)
        }
        Op::CheckEmpty { handle } => dirs::check_empty(&*file(&handle)?).map(|()| FsReply::Done),
        Op::StatPath { volume: at, path } => open::stat_path(&*volume(&at)?, &path).map(FsReply::Stat),
        Op::LongPath { volume: at, path } => path::long(&*volume(&at)?, &path).map(FsReply::Path),
        Op::CopyRange { source, source_offset, target, target_offset, length } => {
            match (data_of(&source)?, data_of(&target)?) {
                (Data::File(source), Data::File(target)) => {
                    data::copy(&source, source_offset, &target, target_offset, length)
                }
                (source, target) => {
                    streams::copy(&source, source_offset, &target, target_offset, length, buffers)
                }
            }
            .map(FsReply::Copied)
        }
        Op::CloneRange { source, source_offset, target, target_offset, length } => {
            let (source, target) = (file(&source)?, file(&target)?);
            ioctl::clone_range(source.as_fd(), source_offset, target.as_fd(), target_offset, length)
                .map(|()| FsReply::Done)
                .map_err(|errno| match errno {
                    Errno::XDEV | Errno::NOTTY => NtStatus::NOT_SUPPORTED,
                    errno => status(errno),
                })
        }
        Op::ZeroRange { handle, offset, length } => match stream(&handle) {
            Some(stream) => stream.zero(offset, length),
            None => data::zero(&*file(&handle)?, offset, length),
        }
        .map(|()| FsReply::Done),
        Op::AllocatedRanges { handle, offset, length, limit } => match stream(&handle) {
            Some(stream) => stream.ranges(offset, length).map(|ranges| (ranges, false)),
            None => data::ranges(&*file(&handle)?, offset, length, limit),
        }
        .map(|(ranges, more)| FsReply::Ranges(ranges, more)),
    }
}

fn overwrite(file: &OpenFile, with_streams: bool) -> Result<(), NtStatus> {
    data::set_end(file, 0)?;
    if with_streams { streams::remove_all(file) } else { Ok(()) }
}
