//! READs that are sent from a memory mapping of the file: the kernel copies the data once, from the page cache to the socket.
//!
//! A mapping covers the whole file and lives as long as the file is open. Only ranges in the page cache are sent from it, so
//! that no event loop waits for a disk. This process never reads the mapped bytes: a file can lose pages at any time, and
//! reading a missing page kills the process with SIGBUS, while the kernel's copy fails with EFAULT.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError};

use forebay_smb::fs::Payload;
use rustix::fs::{Access, AtFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::OpenFile;
use crate::lanes::drop_elsewhere;
use crate::limits::{
    MAPPED_BYTES_MAX, MAPPED_FILE_BYTES_MIN, MAPPED_PIECE_BYTES, MAPPED_READ_BYTES_MIN, MAPPINGS_MAX,
};
use forebay_smb::limits::IO_BYTES_MAX;

/// Mappings of the process. The kernel allows 65,530, including those of threads and memory.
static MAPPINGS: AtomicUsize = AtomicUsize::new(0);
/// Total bytes of the mappings.
static MAPPED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Smallest page size of any machine.
const PAGE_BYTES_MIN: usize = 4096;

/// State of an open file's mapping.
#[derive(Debug, Default)]
pub(super) enum Mapped {
    /// No READ has requested it.
    #[default]
    Not,
    /// The file is small. Counts the bytes that were requested, and copied, so far.
    Small(usize),
    /// The file cannot be mapped.
    Refused,
    /// The file is mapped.
    There(Arc<Mapping>),
}

/// A file, from its first byte, in this process's address space, for the kernel to read.
#[derive(Debug)]
pub(super) struct Mapping(Option<Range>);

/// The address range that a mapping releases when it is dropped.
#[derive(Debug)]
struct Range {
    start: NonNull<c_void>,
    length: usize,
}

// SAFETY: it is an address range that is never read or written through this type; the system calls that take it can be made
// from any thread.
unsafe impl Send for Range {}
// SAFETY: the same.
unsafe impl Sync for Range {}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the range came from mmap, and nothing uses its address any more: every `MappedRead` holds its mapping.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.length) };
        release(self.length);
    }
}

/// Counts a mapping of `length` bytes. Returns false if the limits are exceeded.
fn count(length: usize) -> bool {
    let add = |all: &AtomicUsize, more: usize, most: usize| {
        let sum = |now: usize| now.checked_add(more).filter(|sum| *sum <= most);
        all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).is_ok()
    };
    if !add(&MAPPED_BYTES, length, MAPPED_BYTES_MAX) {
        return false;
    }
    let counted = add(&MAPPINGS, 1, MAPPINGS_MAX);
    if !counted {
        MAPPED_BYTES.fetch_sub(length, Ordering::Relaxed);
    }
    counted
}

fn release(length: usize) {
    MAPPINGS.fetch_sub(1, Ordering::Relaxed);
    MAPPED_BYTES.fetch_sub(length, Ordering::Relaxed);
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop_elsewhere(self.0.take());
    }
}

impl Mapping {
    fn new(file: BorrowedFd<'_>, length: usize) -> Result<Self, Errno> {
        if !count(length) {
            return Err(Errno::NOMEM);
        }
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in use.
        let mapped = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, 0)
        };
        let start = mapped.and_then(|start| NonNull::new(start).ok_or(Errno::NOMEM));
        match start {
            Ok(start) => Ok(Self(Some(Range { start, length }))),
            Err(errno) => {
                release(length);
                Err(errno)
            }
        }
    }

    fn range(&self) -> &Range {
        self.0.as_ref().expect("until it is dropped")
    }

    /// Whether a whole range is in the page cache.
    fn is_cached(&self, offset: usize, length: usize) -> bool {
        let page = rustix::param::page_size();
        let first = offset / page * page;
        let pages = (offset + length - first).div_ceil(page);
        let mut cached = [0_u8; IO_BYTES_MAX as usize / PAGE_BYTES_MIN + 1];
        let Some(cached) = cached.get_mut(..pages) else { return false };
        if first + pages * page > self.range().length {
            return false;
        }
        // SAFETY: the range is within the mapping, and mincore writes one byte for each of its pages.
        let result = unsafe {
            let start = self.range().start.as_ptr().byte_add(first);
            libc::mincore(start, pages * page, cached.as_mut_ptr())
        };
        result == 0 && cached.iter().all(|state| state & 1 == 1)
    }
}

impl OpenFile {
    /// Returns the READ of a range that is in the page cache; `None` if it must be read in another way.
    #[must_use]
    pub fn mapped_read(self: &Arc<Self>, offset: u64, length: u32) -> Option<MappedRead> {
        if self.directory || length < MAPPED_READ_BYTES_MIN {
            return None;
        }
        let (offset, length) = (usize::try_from(offset).ok()?, length as usize);
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = match &mut *mapped {
            Mapped::Refused => return None,
            Mapped::Small(copied) if *copied < MAPPED_FILE_BYTES_MIN => {
                *copied += length;
                return None;
            }
            Mapped::Not => true,
            Mapped::Small(_) | Mapped::There(_) => false,
        };
        let size = usize::try_from(rustix::fs::fstat(&self.fd).ok()?.st_size).ok()?;
        if is_new && size < MAPPED_FILE_BYTES_MIN {
            *mapped = Mapped::Small(length.min(size));
            return None;
        }
        let length = length.min(size.checked_sub(offset)?);
        if length == 0 {
            return None;
        }
        let mapping = self.mapping(&mut mapped, size)?;
        drop(mapped);
        mapping.is_cached(offset, length).then(|| MappedRead {
            file: Arc::clone(self),
            mapping,
            offset,
            length,
            copy: OnceLock::new(),
            piece: None,
        })
    }

    /// Returns a mapping of `size` bytes or more, and creates it if necessary.
    fn mapping(&self, mapped: &mut Mapped, size: usize) -> Option<Arc<Mapping>> {
        if let Mapped::There(mapping) = mapped
            && mapping.range().length >= size
        {
            return Some(Arc::clone(mapping));
        }
        let made = if tells_what_is_cached(self.fd.as_fd()) {
            // Address space beyond the end of the file costs nothing, and a growing file is rarely mapped again.
            size.checked_next_power_of_two()
                .ok_or(Errno::NOMEM)
                .and_then(|length| Mapping::new(self.fd.as_fd(), length))
        } else {
            Err(Errno::ACCESS)
        };
        match made {
            Ok(mapping) => {
                let mapping = Arc::new(mapping);
                *mapped = Mapped::There(Arc::clone(&mapping));
                Some(mapping)
            }
            Err(errno) => {
                tracing::debug!(%errno, "a file is not mapped: its data are copied");
                *mapped = Mapped::Refused;
                None
            }
        }
    }
}

/// Whether mincore(2) reports the real state of a file: only to its owner and to processes that can write to it.
fn tells_what_is_cached(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_uid == rustix::process::geteuid().as_raw())
        || rustix::fs::accessat(file, c"", Access::WRITE_OK, AtFlags::EMPTY_PATH | AtFlags::EACCESS).is_ok()
}

/// READ data in a mapping.
pub struct MappedRead {
    file: Arc<OpenFile>,
    mapping: Arc<Mapping>,
    offset: usize,
    length: usize,
    /// A copy of the data, once a caller in this process had to read them.
    copy: OnceLock<Vec<u8>>,
    /// Offset and bytes of a copied part that the kernel could not read from the mapping.
    piece: Option<(usize, Vec<u8>)>,
}

impl fmt::Debug for MappedRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedRead({} bytes at {})", self.length, self.offset)
    }
}

impl MappedRead {
    /// Returns the data from byte `skip` for a system call. Only the kernel may read them.
    #[must_use]
    pub fn slice(&self, skip: usize) -> IoSlice<'_> {
        let skip = skip.min(self.length);
        if let Some(copy) = self.copy.get() {
            return IoSlice::new(copy.get(skip..).unwrap_or_default());
        }
        if let Some(rest) = self.rest_of_piece(skip) {
            return IoSlice::new(rest);
        }
        let length = self.length - skip;
        // SAFETY: the range is within the mapping, which lives as long as `self`. Nothing in this process reads it: only the
        // kernel has to handle concurrent changes and pages that disappear.
        let bytes = unsafe {
            let start = self.mapping.range().start.as_ptr().byte_add(self.offset + skip);
            std::slice::from_raw_parts(start.cast_const().cast::<u8>(), length)
        };
        IoSlice::new(bytes)
    }

    /// Returns the rest of the copied piece from byte `skip`, if `skip` is in the piece.
    fn rest_of_piece(&self, skip: usize) -> Option<&[u8]> {
        let (start, bytes) = self.piece.as_ref()?;
        bytes.get(skip.checked_sub(*start)?..).filter(|rest| !rest.is_empty())
    }

    /// Copies a piece from byte `skip`, to be sent instead of data that the kernel could not read. If the file has been
    /// truncated, zeros replace the missing data. Returns false if the piece is already copied.
    ///
    /// A READ is not atomic: for a range that is truncated concurrently, it can return the old data, zeros or nothing.
    ///
    /// # Errors
    /// Errors from pread. May wait for a disk.
    pub fn copy_piece(&mut self, skip: usize) -> Result<bool, Errno> {
        if self.rest_of_piece(skip).is_some() || self.copy.get().is_some() {
            return Ok(false);
        }
        let length = self.length.saturating_sub(skip).min(MAPPED_PIECE_BYTES);
        self.piece = Some((skip, self.read(skip, length)?));
        Ok(length > 0)
    }

    /// Drops the copied piece after it was sent.
    pub fn drop_piece(&mut self) {
        self.piece = None;
    }

    fn read(&self, skip: usize, length: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; length];
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match rustix::io::pread(&self.file.fd, rest, (self.offset + skip + filled) as u64) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(bytes)
    }

    /// Copies the data once. If the file has been truncated, zeros replace the missing data. Returns true if this call copied.
    ///
    /// # Errors
    /// Errors from pread. May wait for a disk.
    fn copy(&self) -> Result<bool, Errno> {
        if self.copy.get().is_some() {
            return Ok(false);
        }
        Ok(self.copy.set(self.read(0, self.length)?).is_ok())
    }
}

impl Payload for MappedRead {
    fn length(&self) -> usize {
        self.length
    }

    fn bytes(&self) -> &[u8] {
        // Empty if the disk fails, which invalidates any signature or encryption. But signed or encrypted data are not mapped.
        let _ = self.copy();
        self.copy.get().map(Vec::as_slice).unwrap_or_default()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let _ = self.copy();
        self.copy.get_mut().map(Vec::as_mut_slice).unwrap_or_default()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::time::{Duration, Instant};

    use forebay_smb::fs::{FsOpKind, FsReply, ObjectKind, OpenMode, OpenRequest, RelPath};
    use tempfile::TempDir;

    use super::*;
    use crate::backend::directory::{Volume, file};
    use crate::buffers::BufferPool;

    const SIZE: usize = 2 * MAPPED_FILE_BYTES_MIN;

    fn contents(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at % 251) as u8).collect()
    }

    /// Returns a file of `length` bytes, opened by name and as a client opens it.
    fn made(length: usize) -> (TempDir, File, Arc<OpenFile>) {
        let scratch = TempDir::new().expect("a directory");
        let by_name = scratch.path().join("f");
        std::fs::write(&by_name, contents(length)).expect("written");
        let by_name = File::options().read(true).write(true).open(by_name).expect("it is there");
        let opened = open(scratch.path());
        (scratch, by_name, opened)
    }

    fn open(root: &Path) -> Arc<OpenFile> {
        let volume = Volume::open(root).expect("a volume").handle();
        let request = OpenRequest {
            path: RelPath::new("f").expect("a path"),
            mode: OpenMode::Existing,
            kind: ObjectKind::File,
            read: true,
            write: false,
            write_through: false,
            attributes: 0,
            allocation_size: 0,
            ownership: None,
            stream: None,
            descriptor: None,
            checked: true,
        };
        match crate::backend::execute(FsOpKind::Open { volume, request }, &BufferPool::default()) {
            Ok(FsReply::Opened(opened)) => file(&opened.handle).expect("a file"),
            _ => panic!("opened"),
        }
    }

    /// Returns the bytes that the kernel reads there.
    fn sent(read: &MappedRead) -> Result<Vec<u8>, Errno> {
        let target = tempfile::tempfile().expect("a file");
        let written = rustix::io::pwritev(&target, &[read.slice(0)], 0)?;
        let mut bytes = vec![0; written];
        target.read_exact_at(&mut bytes, 0).expect("it was just written");
        Ok(bytes)
    }

    #[test]
    fn cached_ranges_of_large_files_are_sent_from_a_mapping() {
        let (_scratch, by_name, opened) = made(SIZE);
        let read = opened.mapped_read(5000, 100_000).expect("just written");
        assert_eq!(read.length(), 100_000);
        assert!(sent(&read).expect("sent") == contents(SIZE)[5000..105_000]);
        let end = opened.mapped_read(SIZE as u64 - 10, 100_000).expect("cached");
        assert!(sent(&end).expect("sent") == contents(SIZE)[SIZE - 10..]);
        assert!(opened.mapped_read(SIZE as u64, 100_000).is_none(), "at the end");
        assert!(opened.mapped_read(u64::MAX, 100_000).is_none(), "beyond it");
        assert!(opened.mapped_read(0, MAPPED_READ_BYTES_MIN - 1).is_none(), "a small READ");
        // Later writes are visible, even to an earlier READ that is not sent yet, and so is the growth of the file.
        by_name.write_all_at(b"new", 5000).expect("written");
        assert!(sent(&read).expect("sent").starts_with(b"new"));
        by_name.write_all_at(&contents(3 * SIZE), SIZE as u64).expect("written");
        let grown = opened.mapped_read(3 * SIZE as u64, 100_000).expect("cached");
        assert!(sent(&grown).expect("sent") == contents(3 * SIZE)[2 * SIZE..][..100_000]);
    }

    #[test]
    fn small_file_is_mapped_after_repeated_reads() {
        const SMALL: usize = 100_000;
        let (_scratch, _by_name, opened) = made(SMALL);
        for _ in 0..MAPPED_FILE_BYTES_MIN.div_ceil(SMALL) {
            assert!(opened.mapped_read(0, SMALL as u32).is_none(), "copied");
        }
        for _ in 0..2 {
            let read = opened.mapped_read(10, SMALL as u32).expect("cached");
            assert!(sent(&read).expect("sent") == contents(SMALL)[10..]);
        }
        let mapping = |file: &OpenFile| match &*file.mapped.lock().expect("no panic") {
            Mapped::There(mapping) => Arc::as_ptr(mapping),
            other => panic!("{other:?}"),
        };
        let first = mapping(&opened);
        assert!(opened.mapped_read(0, SMALL as u32).is_some());
        assert_eq!(mapping(&opened), first, "made once");
    }

    #[test]
    fn uncached_ranges_are_not_sent_from_a_mapping() {
        let (_scratch, by_name, opened) = made(SIZE);
        assert!(opened.mapped_read(0, 100_000).is_some());
        by_name.sync_all().expect("synced");
        let until = Instant::now() + Duration::from_secs(5);
        // A mapping does not pin pages that were never read. On tmpfs, pages cannot be evicted.
        while opened.mapped_read(0, SIZE as u32).is_some() && Instant::now() < until {
            rustix::fs::fadvise(&by_name, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
            std::thread::yield_now();
        }
        if opened.mapped_read(0, SIZE as u32).is_some() {
            let folder = std::env::temp_dir();
            forebay_testing::skip(forebay_testing::Need::PastCache, format!("files in {}", folder.display()));
            return;
        }
        by_name.read_at(&mut [0; 8192], 500_000).expect("read");
        assert!(opened.mapped_read(0, SIZE as u32).is_none(), "not all of it");
        by_name.read_exact_at(&mut vec![0; SIZE], 0).expect("read");
        assert!(opened.mapped_read(0, SIZE as u32).is_some());
    }

    #[test]
    fn truncated_file_is_sent_as_a_copy_padded_with_zeros() {
        let (_scratch, by_name, opened) = made(SIZE);
        let read = opened.mapped_read(0, SIZE as u32).expect("cached");
        by_name.set_len(100_000).expect("shorter");
        let tail = MappedRead {
            file: Arc::clone(&read.file),
            mapping: Arc::clone(&read.mapping),
            offset: SIZE / 2,
            length: SIZE / 2,
            copy: OnceLock::new(),
            piece: None,
        };
        assert_eq!(sent(&tail).expect_err("no pages"), Errno::FAULT);
        assert_eq!((read.copy(), read.copy()), (Ok(true), Ok(false)));
        let sent = sent(&read).expect("a copy");
        assert_eq!(sent.len(), SIZE);
        assert!(sent[..100_000] == contents(100_000) && sent[100_000..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn file_beyond_the_address_space_limit_is_not_mapped() {
        let (_scratch, by_name, opened) = made(SIZE);
        by_name.set_len(2 * MAPPED_BYTES_MAX as u64).expect("sparse");
        assert!(opened.mapped_read(0, 100_000).is_none(), "copied");
    }

    #[test]
    fn mapping_outlives_the_handle_until_its_data_is_sent() {
        let (scratch, _by_name, opened) = made(SIZE);
        let read = opened.mapped_read(0, 100_000).expect("cached");
        let mapping = Arc::downgrade(&read.mapping);
        drop(opened);
        std::fs::remove_file(scratch.path().join("f")).expect("removed");
        assert!(sent(&read).expect("sent") == contents(100_000));
        drop(read);
        assert!(mapping.upgrade().is_none());
    }
}
