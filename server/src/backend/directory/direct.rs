//! Direct reads, which bypass the page cache (O_DIRECT), into buffers that a device sends from: a READ over RDMA then passes
//! through no other memory.
//!
//! Only ranges that are hardly cached are read directly: copying cached data is faster than reading them again, and dirty data
//! would have to be written first. Both ways are correct: the kernel keeps them coherent.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use tracing::debug;

use super::{OpenFile, ioctl, path};
use crate::buffers::PAGE;
use crate::lanes::Descriptor;
use crate::limits::{DIRECT_READ_ALIGN_MAX, DIRECT_READ_BYTES_MIN, DIRECT_READ_CACHED_SHARE};

/// A second descriptor of a file, for direct reads.
#[derive(Debug)]
pub(super) struct Direct {
    fd: Descriptor,
    /// Offsets and lengths must be multiples of this power of two.
    align: u32,
    /// Whether the file system accepted the descriptor but refused to read from it.
    refused: AtomicBool,
}

impl Direct {
    /// Returns `None` if the file does not support direct reads.
    fn open(file: BorrowedFd<'_>) -> Option<Self> {
        match Self::try_open(file) {
            Ok(direct) => Some(direct),
            Err(errno) => {
                debug!(%errno, "a file cannot be read past the page cache");
                None
            }
        }
    }

    fn try_open(file: BorrowedFd<'_>) -> Result<Self, Errno> {
        // Linux 6.1. File systems that do not report their alignment, such as tmpfs, have nothing to gain.
        let x = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
        let reported = x.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
        let (memory, align) = (x.stx_dio_mem_align, x.stx_dio_offset_align);
        // 0, which is not a power of two, means that this file does not support it.
        let fits = |align: u32, most: u32| align.is_power_of_two() && align <= most;
        if !reported || !fits(memory, PAGE as u32) || !fits(align, DIRECT_READ_ALIGN_MAX) {
            return Err(Errno::OPNOTSUPP);
        }
        // If the kernel does not report what is cached (before 6.5), no direct reads are used.
        ioctl::cache_state(file, 0, PAGE as u64)?;
        // Through /proc, so that it is this file even if its name has changed.
        let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NOCTTY;
        let fd = rustix::fs::open(path::proc_path(file), flags, Mode::empty())?;
        Ok(Self { fd: Descriptor::new(fd), align, refused: AtomicBool::new(false) })
    }
}

impl OpenFile {
    /// Whether [`OpenFile::prepare_direct`] has been called.
    #[must_use]
    pub fn direct_is_prepared(&self) -> bool {
        self.direct.get().is_some()
    }

    /// Determines whether and how the file can be read directly. May block, once.
    pub fn prepare_direct(&self) {
        self.prepared();
    }

    fn prepared(&self) -> Option<&Direct> {
        self.direct.get_or_init(|| if self.directory { None } else { Direct::open(self.fd.as_fd()) }).as_ref()
    }

    /// Returns how many bytes to request so that `length` bytes at `offset` are read directly into a page-aligned buffer of
    /// `capacity` bytes; `None` if they should, or must, be read through the page cache.
    #[must_use]
    pub fn direct_length(&self, offset: u64, length: usize, capacity: usize) -> Option<usize> {
        if length < DIRECT_READ_BYTES_MIN {
            return None;
        }
        let direct = self.prepared().filter(|direct| !direct.refused.load(Ordering::Relaxed))?;
        let padded = length.next_multiple_of(direct.align as usize);
        let fits = offset.is_multiple_of(direct.align.into()) && padded <= capacity;
        (fits && is_cold(self.fd.as_fd(), offset, length as u64)).then_some(padded)
    }

    /// The descriptor for direct reads, if there is one.
    #[must_use]
    pub fn direct_fd(&self) -> Option<BorrowedFd<'_>> {
        self.direct.get()?.as_ref().map(|direct| direct.fd.as_fd())
    }

    /// Records that a direct read was refused.
    pub fn refuse_direct(&self) {
        if let Some(Some(direct)) = self.direct.get()
            && !direct.refused.swap(true, Ordering::Relaxed)
        {
            debug!("the file system takes no reads past the page cache: a file is read through it");
        }
    }
}

/// Whether the page cache has almost nothing of a range, and nothing that must be written.
fn is_cold(file: BorrowedFd<'_>, offset: u64, length: u64) -> bool {
    let Ok(state) = ioctl::cache_state(file, offset, length) else { return false };
    if state.dirty > 0 || state.writeback > 0 {
        return false;
    }
    // Clamp to the file's size: a READ can extend far beyond the end of the file.
    let there = |size: u64| size.saturating_sub(offset).min(length);
    let cached = state.cached.saturating_mul(rustix::param::page_size() as u64);
    cached == 0
        || rustix::fs::fstat(file)
            .is_ok_and(|stat| cached <= there(stat.st_size.cast_unsigned()) / DIRECT_READ_CACHED_SHARE)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use forebay_smb::fs::{FsOpKind, FsReply, ObjectKind, OpenMode, OpenRequest, RelPath};
    use tempfile::TempDir;

    use super::*;
    use crate::backend::directory::{Volume, file};
    use crate::buffers::BufferPool;

    const MIB: usize = 1 << 20;

    /// Creates a file of 1 MiB in a volume.
    fn made() -> (TempDir, std::fs::File, Arc<OpenFile>) {
        let scratch = TempDir::new().expect("a directory");
        let by_name = scratch.path().join("f");
        std::fs::write(&by_name, vec![7; MIB]).expect("written");
        let by_name = std::fs::OpenOptions::new().read(true).write(true).open(by_name).expect("it is there");
        let opened = open(scratch.path(), "f", ObjectKind::File);
        (scratch, by_name, opened)
    }

    fn open(root: &Path, name: &str, kind: ObjectKind) -> Arc<OpenFile> {
        let volume = Volume::open(root).expect("a volume").handle();
        let path = RelPath::new(name).expect("a path");
        let mode = OpenMode::Existing;
        let (read, write, write_through) = (true, false, false);
        let (attributes, allocation_size) = (0, 0);
        let request = OpenRequest {
            path,
            mode,
            kind,
            read,
            write,
            write_through,
            attributes,
            allocation_size,
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

    /// Evicts the file from the page cache. Returns false if the file system keeps its files there.
    fn cool(by_name: &std::fs::File) -> bool {
        by_name.sync_all().expect("synced");
        let until = Instant::now() + Duration::from_secs(5);
        while !is_cold(by_name.as_fd(), 0, MIB as u64) {
            if Instant::now() > until {
                return false;
            }
            rustix::fs::fadvise(by_name, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
            std::thread::yield_now();
        }
        true
    }

    /// Whether this file system supports direct reads on this machine.
    fn possible(opened: &OpenFile) -> bool {
        opened.prepare_direct();
        opened.direct_fd().is_some()
    }

    /// Whether this file supports direct reads and is not cached now. If not, records a skipped test.
    fn can_be_tried(by_name: &std::fs::File, opened: &OpenFile) -> bool {
        let can = possible(opened) && cool(by_name);
        if !can {
            let folder = std::env::temp_dir();
            forebay_testing::skip(forebay_testing::Need::PastCache, format!("files in {}", folder.display()));
        }
        can
    }

    #[test]
    fn only_uncached_clean_ranges_are_read_directly() {
        let (_scratch, by_name, opened) = made();
        assert!(!opened.direct_is_prepared());
        assert_eq!(opened.direct_length(0, MIB, MIB), None, "just written");
        assert!(opened.direct_is_prepared());
        by_name.sync_all().expect("synced");
        assert_eq!(opened.direct_length(0, MIB, MIB), None, "still cached");
        if can_be_tried(&by_name, &opened) {
            assert_eq!(opened.direct_length(0, MIB, MIB), Some(MIB));
            assert!(by_name.write_at(b"x", 700_000).is_ok());
            assert_eq!(opened.direct_length(0, MIB, MIB), None, "a page is dirty");
            assert_eq!(opened.direct_length(0, MIB / 2, MIB), Some(MIB / 2), "which is elsewhere");
            assert!(cool(&by_name), "it was before");
            assert!(by_name.read_at(&mut [0], 700_416).is_ok());
            by_name.set_len(704_512).expect("shorter");
            by_name.sync_all().expect("synced");
            assert_eq!(opened.direct_length(700_416, MIB, MIB), None, "all of the rest is cached");
        }
    }

    #[test]
    fn only_large_aligned_reads_that_fit_the_buffer_are_direct() {
        let (_scratch, by_name, opened) = made();
        if !can_be_tried(&by_name, &opened) {
            return;
        }
        let align = opened.prepared().expect("it is possible").align as usize;
        assert_eq!(
            opened.direct_length(align as u64, 100_001, MIB),
            Some(100_001_usize.next_multiple_of(align))
        );
        assert_eq!(
            opened.direct_length(0, 100_001, 100_001),
            None,
            "no room for the whole of the last block"
        );
        assert_eq!(opened.direct_length(1, MIB, 2 * MIB), None, "between two blocks");
        assert_eq!(opened.direct_length(0, DIRECT_READ_BYTES_MIN - 1, MIB), None, "small");
        opened.refuse_direct();
        assert_eq!(opened.direct_length(0, MIB, MIB), None, "refused");
    }

    #[test]
    fn unlinked_file_is_read_directly_and_a_directory_is_not() {
        let (scratch, by_name, opened) = made();
        std::fs::remove_file(scratch.path().join("f")).expect("removed");
        std::fs::write(scratch.path().join("f"), vec![8; MIB]).expect("another of that name");
        if can_be_tried(&by_name, &opened) {
            assert_eq!(opened.direct_length(0, MIB, MIB), Some(MIB));
            let mut buffer = BufferPool::default().take(MIB).expect("a buffer");
            let fd = opened.direct_fd().expect("it is possible");
            assert_eq!(rustix::io::pread(fd, buffer.bytes_mut(0..MIB as isize), 0), Ok(MIB));
            assert!(buffer.bytes(0..MIB as isize).iter().all(|&byte| byte == 7));
        }
        std::fs::create_dir(scratch.path().join("d")).expect("a directory");
        let directory = open(scratch.path(), "d", ObjectKind::Directory);
        assert_eq!(directory.direct_length(0, MIB, MIB), None);
        assert!(directory.direct_fd().is_none());
    }
}
