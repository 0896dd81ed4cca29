//! Conformance tests that every backend must pass.
//!
//! They run on a temporary directory, and on the directory named by `FOREBAY_TEST_POOL` if that is set (a file system of another
//! kind, in the lab). Operations go through [`super::execute`], as they do for the protocol.

mod descriptors;
mod short_names;
mod streams;

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use forebay_smb::fs::{
    BasicInfo, DirEntry, Ea, FileKind, Frame, FsHandle, FsOpKind, FsReply, FsResult, ObjectKind, OpenMode,
    OpenRequest, Opened, Ownership, RelPath, ReparsePoint, Stat, Unlink,
};
use forebay_smb::status::NtStatus;
use tempfile::TempDir;

use super::directory::{self, Volume};
use crate::buffers::BufferPool;

struct Bytes(Vec<u8>);

impl Frame for Bytes {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A volume in a separate directory, below a parent that holds files that must stay out of reach.
struct Fixture {
    _scratch: TempDir,
    outside: PathBuf,
    root: PathBuf,
    volume: FsHandle,
    buffers: BufferPool,
    count: AtomicUsize,
}

fn request(path: &str) -> OpenRequest {
    OpenRequest {
        path: RelPath::new(path).expect("a path"),
        mode: OpenMode::Existing,
        kind: ObjectKind::Any,
        read: true,
        write: true,
        write_through: false,
        attributes: 0,
        allocation_size: 0,
        ownership: None,
        stream: None,
        descriptor: None,
        checked: true,
    }
}

impl Fixture {
    fn new() -> Self {
        match std::env::var_os("FOREBAY_TEST_POOL") {
            Some(pool) => Self::at(&PathBuf::from(pool)),
            None => Self::at(&std::env::temp_dir()),
        }
    }

    fn at(base: &Path) -> Self {
        let scratch = TempDir::new_in(base).expect("a scratch directory");
        let outside = scratch.path().join("outside");
        let root = scratch.path().join("volume");
        std::fs::create_dir(&root).expect("a root");
        std::fs::create_dir(&outside).expect("an outside");
        std::fs::write(outside.join("secret"), "secret").expect("a secret");
        let volume = Volume::open(&root).expect("a volume").handle();
        Self {
            _scratch: scratch,
            outside,
            root,
            volume,
            buffers: BufferPool::default(),
            count: AtomicUsize::new(0),
        }
    }

    /// Executes an operation as the event loop does: from memory if possible.
    fn run(&self, operation: FsOpKind) -> FsResult {
        // Alternates between both ways, so that each test checks both.
        if self.count.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            return super::execute(operation, &self.buffers);
        }
        match super::execute_cached(operation) {
            Ok(result) => result,
            Err(operation) => super::execute(operation, &self.buffers),
        }
    }

    fn open(&self, request: OpenRequest) -> Result<Opened, NtStatus> {
        match self.run(FsOpKind::Open { volume: self.volume.clone(), request })? {
            FsReply::Opened(opened) => Ok(*opened),
            _ => panic!("open answers Opened"),
        }
    }

    fn existing(&self, path: &str) -> Result<FsHandle, NtStatus> {
        self.open(request(path)).map(|o| o.handle)
    }

    fn file(&self, path: &str) -> FsHandle {
        let opened = self
            .open(OpenRequest { mode: OpenMode::New, kind: ObjectKind::File, ..request(path) })
            .expect("a new file");
        assert!(opened.created);
        opened.handle
    }

    fn directory(&self, path: &str) -> FsHandle {
        let opened = self
            .open(OpenRequest { mode: OpenMode::New, kind: ObjectKind::Directory, ..request(path) })
            .expect("a new directory");
        assert!(opened.created && opened.stat.directory);
        opened.handle
    }

    fn write(&self, handle: &FsHandle, offset: u64, bytes: &[u8]) -> Result<u32, NtStatus> {
        let frame = Arc::new(Bytes([b"head", bytes].concat()));
        let range = 4..4 + bytes.len();
        let write = FsOpKind::Write { handle: handle.clone(), offset, frame, range, write_through: false };
        match self.run(write)? {
            FsReply::Written(n) => Ok(n),
            _ => panic!("write answers Written"),
        }
    }

    fn read(&self, handle: &FsHandle, offset: u64, length: u32) -> Result<Vec<u8>, NtStatus> {
        match self.run(FsOpKind::Read { handle: handle.clone(), offset, length, plain: false })? {
            FsReply::Read(payload) => Ok(payload.bytes().to_vec()),
            _ => panic!("read answers Read"),
        }
    }

    /// Like [`Fixture::read`], but bypasses the page cache if the file system can. Offset and length suit any device.
    fn read_past_cache(&self, handle: &FsHandle, offset: u64, length: usize) -> Vec<u8> {
        let file = directory::file(handle).expect("a file");
        file.prepare_direct();
        let descriptor = file.direct_fd().unwrap_or(file.as_fd());
        let mut buffer = self.buffers.take(length).expect("a buffer");
        let length = length.cast_signed();
        let found = rustix::io::pread(descriptor, buffer.bytes_mut(0..length), offset).expect("read");
        buffer.bytes(0..found.cast_signed()).to_vec()
    }

    fn stat(&self, handle: &FsHandle) -> Stat {
        match self.run(FsOpKind::Stat { handle: handle.clone() }) {
            Ok(FsReply::Stat(stat)) => stat,
            _ => panic!("stat answers Stat"),
        }
    }

    fn done(&self, operation: FsOpKind) -> Result<(), NtStatus> {
        match self.run(operation)? {
            FsReply::Done => Ok(()),
            _ => panic!("the operation answers Done"),
        }
    }

    fn unlink(&self, handle: FsHandle) -> Result<(), NtStatus> {
        self.done(FsOpKind::Close { handle, unlink: Some(Unlink::unregistered()), stat: false })
    }

    fn rename(&self, handle: &FsHandle, to: &str, replace: bool) -> Result<(), NtStatus> {
        let to = RelPath::new(to).expect("a path");
        self.done(FsOpKind::Rename { handle: handle.clone(), to, replace })
    }

    fn link(&self, handle: &FsHandle, to: &str, replace: bool) -> Result<(), NtStatus> {
        let to = RelPath::new(to).expect("a path");
        self.done(FsOpKind::Link { handle: handle.clone(), to, replace })
    }

    fn list(&self, handle: &FsHandle, restart: bool, limit: usize) -> Vec<DirEntry> {
        match self.run(FsOpKind::ReadDir { handle: handle.clone(), restart, limit }) {
            Ok(FsReply::Entries(entries)) => entries,
            _ => panic!("readdir answers Entries"),
        }
    }

    fn names(&self, path: &str) -> Vec<String> {
        let handle = self.existing(path).expect("a directory");
        let mut names: Vec<_> = self.list(&handle, true, usize::MAX).into_iter().map(|e| e.name).collect();
        names.sort();
        names
    }

    fn eas(&self, handle: &FsHandle) -> Result<Vec<(String, Vec<u8>)>, NtStatus> {
        match self.run(FsOpKind::GetEas { handle: handle.clone() })? {
            FsReply::Eas(eas) => {
                let text = |name| String::from_utf8(name).expect("ASCII");
                Ok(eas.into_iter().map(|ea| (text(ea.name), ea.value)).collect())
            }
            _ => panic!("a query answers Eas"),
        }
    }

    fn ea_size(&self, handle: &FsHandle) -> u32 {
        match self.run(FsOpKind::EaSize { handle: handle.clone() }) {
            Ok(FsReply::EaSize(size)) => size,
            _ => panic!("a query answers EaSize"),
        }
    }

    fn set_eas(&self, handle: &FsHandle, eas: &[(&str, &[u8])]) -> Result<(), NtStatus> {
        let ea = |(name, value): &(&str, &[u8])| Ea { name: name.as_bytes().to_vec(), value: value.to_vec() };
        self.done(FsOpKind::SetEas { handle: handle.clone(), eas: eas.iter().map(ea).collect() })
    }

    fn stat_path(&self, path: &str) -> Result<Stat, NtStatus> {
        let path = RelPath::new(path).expect("a path");
        match self.run(FsOpKind::StatPath { volume: self.volume.clone(), path })? {
            FsReply::Stat(stat) => Ok(stat),
            _ => panic!("stat answers Stat"),
        }
    }
}

#[test]
fn open_modes_open_or_create_files() {
    let f = Fixture::new();
    assert_eq!(f.existing("a").err(), Some(NtStatus::OBJECT_NAME_NOT_FOUND));
    assert_eq!(f.existing("no/a").err(), Some(NtStatus::OBJECT_PATH_NOT_FOUND));
    let made = f.open(OpenRequest { mode: OpenMode::Either, ..request("a") }).expect("made");
    assert!(made.created && !made.stat.directory);
    let found = f.open(OpenRequest { mode: OpenMode::Either, ..request("a") }).expect("found");
    assert!(!found.created);
    assert_eq!(made.stat.key, found.stat.key);
    let again = f.open(OpenRequest { mode: OpenMode::New, ..request("a") });
    assert_eq!(again.err(), Some(NtStatus::OBJECT_NAME_COLLISION));
    assert_eq!(f.existing("a/b").err(), Some(NtStatus::OBJECT_PATH_NOT_FOUND));
    let below = f.open(OpenRequest { mode: OpenMode::New, ..request("no/b") });
    assert_eq!(below.err(), Some(NtStatus::OBJECT_PATH_NOT_FOUND));
}

#[test]
fn files_and_directories_are_distinguished() {
    let f = Fixture::new();
    f.file("file");
    f.directory("dir");
    let as_kind = |path, kind| f.open(OpenRequest { kind, ..request(path) }).map(|o| o.stat.directory);
    assert_eq!(as_kind("file", ObjectKind::File), Ok(false));
    assert_eq!(as_kind("file", ObjectKind::Directory), Err(NtStatus::NOT_A_DIRECTORY));
    assert_eq!(as_kind("dir", ObjectKind::Directory), Ok(true));
    assert_eq!(as_kind("dir", ObjectKind::File), Err(NtStatus::FILE_IS_A_DIRECTORY));
    assert_eq!(as_kind("dir", ObjectKind::Any), Ok(true));
    assert_eq!(as_kind("", ObjectKind::Any), Ok(true));
    let read_only = f.open(OpenRequest { kind: ObjectKind::File, write: false, ..request("dir") });
    assert_eq!(read_only.err(), Some(NtStatus::FILE_IS_A_DIRECTORY));
    let either = OpenRequest { mode: OpenMode::Either, kind: ObjectKind::Directory, ..request("file") };
    assert_eq!(f.open(either).err(), Some(NtStatus::NOT_A_DIRECTORY));
}

#[test]
fn reads_return_the_written_data() {
    let f = Fixture::new();
    let file = f.file("data");
    assert_eq!(f.read(&file, 0, 10), Err(NtStatus::END_OF_FILE));
    assert_eq!(f.write(&file, 3, b"hello"), Ok(5));
    assert_eq!(f.read(&file, 0, 100).as_deref(), Ok(&b"\0\0\0hello"[..]));
    assert_eq!(f.read(&file, 4, 2).as_deref(), Ok(&b"el"[..]));
    assert_eq!(f.read(&file, 8, 1), Err(NtStatus::END_OF_FILE));
    assert_eq!(f.read(&file, 8, 0), Ok(vec![]));
    assert_eq!(f.write(&file, u64::MAX, b" world"), Ok(6));
    assert_eq!(f.read(&file, 3, 100).as_deref(), Ok(&b"hello world"[..]));
    assert_eq!(f.stat(&file).end_of_file, 14);
    assert_eq!(f.read(&file, u64::MAX - 5, 100), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(f.write(&file, u64::MAX - 5, b"0123456789"), Err(NtStatus::INVALID_PARAMETER));
    let large: Vec<u8> = (0..3_000_000_u32).map(|i| (i * 7) as u8).collect();
    assert_eq!(f.write(&file, 0, &large), Ok(3_000_000));
    assert!(f.read(&file, 0, 8 << 20).expect("data") == large);
    f.done(FsOpKind::Flush { handle: file.clone() }).expect("flushed");
    let through = FsOpKind::Write {
        handle: file,
        offset: 0,
        frame: Arc::new(Bytes(b"through".to_vec())),
        range: 0..7,
        write_through: true,
    };
    assert!(matches!(f.run(through), Ok(FsReply::Written(7))));
}

#[test]
fn direct_reads_see_every_change_of_the_file() {
    let f = Fixture::new();
    let (file, other) = (f.file("data"), f.file("other"));
    let block = 65_536;
    let mut wanted: Vec<u8> = (0..4 * block).map(|i| (i % 251) as u8).collect();
    let check = |wanted: &[u8], after: &str| {
        let found = f.read_past_cache(&file, 0, 8 * block);
        assert!(found == wanted, "after {after}: {} bytes", found.len());
    };
    assert_eq!(f.write(&file, 0, &wanted), Ok(4 * block as u32));
    check(&wanted, "the first write");
    f.done(FsOpKind::Flush { handle: file.clone() }).expect("flushed");
    check(&wanted, "a flush");
    wanted[5..10].copy_from_slice(b"other");
    assert_eq!(f.write(&file, 5, b"other"), Ok(5));
    check(&wanted, "a small write");
    f.done(FsOpKind::ZeroRange { handle: file.clone(), offset: block as u64, length: block as u64 })
        .expect("zeroed");
    wanted[block..2 * block].fill(0);
    check(&wanted, "a hole");
    f.done(FsOpKind::SetEndOfFile { handle: file.clone(), size: 3 * block as u64 + 7 }).expect("shorter");
    wanted.truncate(3 * block + 7);
    check(&wanted, "a new end");
    assert_eq!(f.write(&other, 0, &vec![9; block]), Ok(block as u32));
    let copy = FsOpKind::CopyRange {
        source: other,
        source_offset: 0,
        target: file.clone(),
        target_offset: 0,
        length: block as u64,
    };
    assert!(matches!(f.run(copy), Ok(FsReply::Copied(_))));
    wanted[..block].fill(9);
    check(&wanted, "a copy");
    f.rename(&file, "renamed", false).expect("renamed");
    check(&wanted, "a rename");
}

#[test]
fn data_operations_on_directories_are_refused() {
    let f = Fixture::new();
    let dir = f.directory("d");
    assert_eq!(f.read(&dir, 0, 1), Err(NtStatus::INVALID_DEVICE_REQUEST));
    assert_eq!(f.write(&dir, 0, b"x"), Err(NtStatus::INVALID_DEVICE_REQUEST));
    let end = FsOpKind::SetEndOfFile { handle: dir.clone(), size: 1 };
    assert_eq!(f.done(end), Err(NtStatus::INVALID_DEVICE_REQUEST));
    f.done(FsOpKind::Flush { handle: dir }).expect("a directory can be flushed");
}

#[test]
fn end_of_file_and_allocation_size_can_be_set() {
    let f = Fixture::new();
    let file = f.file("s");
    f.write(&file, 0, b"0123456789").expect("written");
    f.done(FsOpKind::SetEndOfFile { handle: file.clone(), size: 4 }).expect("cut");
    f.done(FsOpKind::SetEndOfFile { handle: file.clone(), size: 6 }).expect("extended");
    assert_eq!(f.read(&file, 0, 10).as_deref(), Ok(&b"0123\0\0"[..]));
    f.done(FsOpKind::SetAllocation { handle: file.clone(), size: 1 << 20 }).expect("reserved");
    assert_eq!(f.stat(&file).end_of_file, 6);
    f.done(FsOpKind::SetAllocation { handle: file.clone(), size: 2 }).expect("cut");
    assert_eq!(f.stat(&file).end_of_file, 2);
    let too_large = FsOpKind::SetEndOfFile { handle: file, size: u64::MAX };
    assert_eq!(f.done(too_large), Err(NtStatus::INVALID_PARAMETER));
}

#[test]
fn allocated_ranges_exclude_holes_and_zeroed_ranges() {
    let f = Fixture::new();
    let file = f.file("sparse");
    let mib = 1_u64 << 20;
    f.write(&file, 4 * mib, &vec![1; mib as usize]).expect("written");
    f.done(FsOpKind::SetEndOfFile { handle: file.clone(), size: 8 * mib }).expect("extended");
    let ranges = |offset, length, limit| {
        let handle = file.clone();
        match f.run(FsOpKind::AllocatedRanges { handle, offset, length, limit }) {
            Ok(FsReply::Ranges(ranges, more)) => (ranges, more),
            _ => panic!("ranges"),
        }
    };
    assert_eq!(ranges(0, 8 * mib, 10), (vec![(4 * mib, mib)], false));
    assert_eq!(ranges(0, 4 * mib, 10), (vec![], false));
    assert_eq!(ranges(4 * mib + 8192, 4096, 10), (vec![(4 * mib + 8192, 4096)], false));
    f.done(FsOpKind::ZeroRange { handle: file.clone(), offset: 4 * mib + mib / 4, length: mib / 2 })
        .expect("zeroed");
    assert_eq!(ranges(0, u64::MAX, 10), (vec![(4 * mib, mib / 4), (4 * mib + 3 * mib / 4, mib / 4)], false));
    assert_eq!(ranges(0, u64::MAX, 1), (vec![(4 * mib, mib / 4)], true));
    assert_eq!(f.read(&file, 4 * mib + mib / 4 - 1, 2).as_deref(), Ok(&[1, 0][..]));
    f.done(FsOpKind::ZeroRange { handle: file.clone(), offset: 7 * mib, length: u64::MAX }).expect("zeroed");
    assert_eq!(f.stat(&file).end_of_file, 8 * mib, "zeroing does not extend");
}

#[test]
fn ranges_are_copied_within_the_volume() {
    let f = Fixture::new();
    let (source, target) = (f.file("from"), f.file("to"));
    f.write(&source, 0, b"0123456789").expect("written");
    let copy = |from: &FsHandle, source_offset, to: &FsHandle, target_offset, length| {
        let (source, target) = (from.clone(), to.clone());
        match f.run(FsOpKind::CopyRange { source, source_offset, target, target_offset, length }) {
            Ok(FsReply::Copied(n)) => n,
            _ => panic!("copied"),
        }
    };
    assert_eq!(copy(&source, 2, &target, 1, 5), 5);
    assert_eq!(f.read(&target, 0, 100).as_deref(), Ok(&b"\x0023456"[..]));
    assert_eq!(copy(&source, 8, &target, 0, 5), 2, "short at the end");
    assert_eq!(copy(&source, 0, &source, 20, 5), 5, "within one file");
    assert_eq!(copy(&source, 0, &source, 2, 5), 5, "overlapping");
}

#[test]
fn clone_range_succeeds_or_fails_with_not_supported() {
    let f = Fixture::new();
    let (source, target) = (f.file("from"), f.file("to"));
    f.write(&source, 0, &[7; 65536]).expect("written");
    let clone = FsOpKind::CloneRange {
        source: source.clone(),
        source_offset: 0,
        target: target.clone(),
        target_offset: 0,
        length: 65536,
    };
    match f.done(clone) {
        Ok(()) => assert_eq!(f.read(&target, 0, 65536), Ok(vec![7; 65536])),
        Err(status) => assert_eq!(status, NtStatus::NOT_SUPPORTED),
    }
}

#[test]
fn rename_moves_and_replaces_files_and_reports_conflicts() {
    let f = Fixture::new();
    let a = f.file("a");
    f.write(&a, 0, b"a").expect("written");
    let b = f.file("b");
    f.write(&b, 0, b"b").expect("written");
    f.directory("d");
    assert_eq!(f.rename(&a, "b", false), Err(NtStatus::OBJECT_NAME_COLLISION));
    assert_eq!(f.rename(&a, "no/x", true), Err(NtStatus::OBJECT_PATH_NOT_FOUND));
    assert_eq!(f.rename(&a, "d", true), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(f.rename(&a, "a", false), Ok(()), "to itself");
    assert_eq!(f.rename(&a, "d/a", false), Ok(()));
    assert_eq!(f.rename(&a, "b", true), Ok(()), "over an open file");
    assert_eq!(f.read(&b, 0, 1).as_deref(), Ok(&b"b"[..]), "which its opener still reads");
    let now = f.existing("b").expect("b");
    assert_eq!(f.read(&now, 0, 1).as_deref(), Ok(&b"a"[..]));
    assert_eq!(f.names(""), ["b", "d"]);
    f.unlink(b).expect("its name is another file's now");
    assert_eq!(f.names(""), ["b", "d"]);
}

#[test]
fn open_files_stay_valid_when_their_directory_is_renamed() {
    let f = Fixture::new();
    let dir = f.directory("old");
    let inner = f.directory("old/inner");
    let file = f.file("old/inner/file");
    assert_eq!(f.rename(&dir, "old/inner/below-itself", false), Err(NtStatus::ACCESS_DENIED));
    f.rename(&dir, "new", false).expect("renamed");
    f.rename(&file, "new/file", false).expect("renamed by what it is called now");
    assert_eq!(f.names("new"), ["file", "inner"]);
    f.unlink(file).expect("deleted");
    f.unlink(inner).expect("deleted");
    f.unlink(dir).expect("deleted");
    assert_eq!(f.names(""), Vec::<String>::new());
}

#[test]
fn close_with_unlink_removes_the_name_but_keeps_open_files() {
    let f = Fixture::new();
    let file = f.file("x");
    f.write(&file, 0, b"still here").expect("written");
    let other = f.existing("x").expect("x");
    f.unlink(file).expect("deleted");
    assert_eq!(f.existing("x").err(), Some(NtStatus::OBJECT_NAME_NOT_FOUND));
    assert_eq!(f.read(&other, 0, 100).as_deref(), Ok(&b"still here"[..]));
    assert_eq!(f.stat(&other).links, 0);
    f.done(FsOpKind::Flush { handle: other.clone() }).expect("an unlinked file can be flushed");
    let replacement = f.file("x");
    f.unlink(other).expect("no error");
    assert!(f.existing("x").is_ok(), "what took its name stays");
    let close = FsOpKind::Close { handle: replacement, unlink: None, stat: true };
    assert!(matches!(f.run(close), Ok(FsReply::Stat(stat)) if stat.links == 1));
}

#[test]
fn close_with_unlink_removes_only_the_link_of_its_handle() {
    let f = Fixture::new();
    let b = f.file("b");
    f.link(&b, "a", false).expect("linked");
    let (a, also_b) = (f.existing("a").expect("a"), f.existing("b").expect("b"));
    f.unlink(a).expect("deleted");
    assert_eq!(f.names(""), ["b"]);
    assert_eq!(f.stat(&b).links, 1);

    f.link(&b, "c", false).expect("linked");
    // The handle that created the name removes it, even if it replaced another link to the file.
    f.rename(&b, "c", true).expect("renamed");
    f.unlink(also_b).expect("its name is gone already");
    assert_eq!(f.names(""), ["c"]);
    f.unlink(b).expect("deleted");
    assert_eq!(f.names(""), Vec::<String>::new());
}

#[test]
fn directories_are_deleted_only_when_empty() {
    let f = Fixture::new();
    let dir = f.directory("d");
    let file = f.file("d/f");
    let empty = || f.done(FsOpKind::CheckEmpty { handle: dir.clone() });
    assert_eq!(empty(), Err(NtStatus::DIRECTORY_NOT_EMPTY));
    assert_eq!(f.unlink(f.existing("d").expect("d")), Err(NtStatus::DIRECTORY_NOT_EMPTY));
    f.unlink(file).expect("deleted");
    assert_eq!(empty(), Ok(()));
    assert_eq!(f.unlink(f.existing("d").expect("d")), Ok(()));
    assert_eq!(f.stat_path("d").err(), Some(NtStatus::OBJECT_NAME_NOT_FOUND));
    assert!(f.list(&dir, true, 10).is_empty());
}

#[test]
fn hard_links_refer_to_one_file() {
    let f = Fixture::new();
    let file = f.file("one");
    f.write(&file, 0, b"1").expect("written");
    f.link(&file, "two", false).expect("linked");
    assert_eq!(f.stat(&file).links, 2);
    assert_eq!(f.stat_path("two").expect("two").key, f.stat(&file).key);
    assert_eq!(f.link(&file, "two", false), Err(NtStatus::OBJECT_NAME_COLLISION));
    f.file("three");
    f.link(&file, "three", true).expect("replaced");
    assert_eq!(f.stat(&file).links, 3);
    f.rename(&file, "two", true).expect("onto another link of itself");
    assert_eq!(f.names(""), ["three", "two"]);
    let dir = f.directory("d");
    assert_eq!(f.link(&dir, "e", false), Err(NtStatus::FILE_IS_A_DIRECTORY));
    assert_eq!(f.link(&file, "d", true), Err(NtStatus::ACCESS_DENIED));
    f.unlink(f.existing("three").expect("three")).expect("deleted");
    assert_eq!(f.names(""), ["d", "two"], "the name that it was opened by is removed");
}

#[test]
fn replacing_a_name_by_a_link_is_atomic() {
    let f = Fixture::new();
    let files = [f.file("one"), f.file("two")];
    f.link(&files[0], "name", false).expect("linked");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let mut missing = 0;
            while !done.load(Ordering::Relaxed) {
                missing += usize::from(f.root.join("name").symlink_metadata().is_err());
            }
            missing
        });
        for round in 1..300 {
            f.link(&files[round % 2], "name", true).expect("replaced");
        }
        done.store(true, Ordering::Relaxed);
        assert_eq!(looking.join().expect("no panic"), 0, "looks that found no name");
    });
    assert_eq!(f.names(""), ["name", "one", "two"], "no temporary links remain");
}

#[test]
fn listings_are_complete_resumable_and_restartable() {
    let f = Fixture::new();
    let dir = f.directory("many");
    for i in 0..1500 {
        std::fs::write(f.root.join(format!("many/file-with-a-longer-name-{i:05}")), "").expect("a file");
    }
    let mut seen = Vec::new();
    let mut restart = true;
    loop {
        let entries = f.list(&dir, restart, 100);
        restart = false;
        if entries.is_empty() {
            break;
        }
        assert!(entries.len() <= 100);
        seen.extend(entries.into_iter().map(|e| e.name));
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 1500);
    assert!(f.list(&dir, false, 10).is_empty(), "the end stays");
    assert_eq!(f.list(&dir, true, 10).len(), 10);
    let lookup = |name: &str| match f.run(FsOpKind::Lookup { handle: dir.clone(), name: name.into() }) {
        Ok(FsReply::Entries(entries)) => entries.len(),
        _ => panic!("entries"),
    };
    assert_eq!(lookup("file-with-a-longer-name-00007"), 1);
    assert_eq!(lookup("other"), 0);
    assert_eq!(lookup(".."), 0);
    assert_eq!(lookup("../many"), 0);
}

#[test]
fn names_are_utf_8_up_to_255_bytes() {
    let f = Fixture::new();
    let longest = "n".repeat(255);
    f.file(&longest);
    f.file("données-数据-😀");
    f.file("trailing dot.");
    std::fs::write(f.root.join(OsStr::from_bytes(b"not-utf8-\xff")), "").expect("a file");
    f.file("trailing");
    let posix = RelPath::posix("back\\slash").expect("a name of the POSIX extensions");
    f.open(OpenRequest { path: posix, mode: OpenMode::New, ..request("") }).expect("made");
    assert_eq!(RelPath::new("back\\slash").err(), Some(NtStatus::OBJECT_NAME_INVALID));
    assert_eq!(
        f.names(""),
        ["back\\slash", "données-数据-😀", longest.as_str(), "trailing", "trailing dot."]
    );
    assert_eq!(RelPath::new(&"n".repeat(256)).err(), Some(NtStatus::OBJECT_NAME_INVALID));
    for bad in ["..", "../x", "a/../b", "a//b", "/a", "a/", "."] {
        assert!(RelPath::new(bad).is_err(), "{bad}");
    }
}

#[test]
fn attributes_and_times_are_stored() {
    let f = Fixture::new();
    let file = f.file("t");
    let before = f.stat(&file);
    assert_eq!(before.attributes, 0x20, "a new file is to be archived");
    let (hour, day) = (36_000_000_000, 864_000_000_000);
    let info = BasicInfo {
        creation: Some(before.times.creation - 2 * day),
        last_access: Some(before.times.last_access - hour),
        last_write: Some(before.times.last_write - day),
        change: None,
        attributes: Some(0x3),
    };
    f.done(FsOpKind::SetBasic { handle: file.clone(), info }).expect("set");
    let after = f.stat(&file);
    assert_eq!(after.times.creation, before.times.creation - 2 * day);
    assert_eq!(after.times.last_access, before.times.last_access - hour);
    assert_eq!(after.times.last_write, before.times.last_write - day);
    assert_eq!(after.attributes, 0x3);
    assert_eq!(f.stat_path("t").expect("t"), after);
    assert_eq!(f.list(&f.existing("").expect("root"), true, 10)[0].stat, after);
    let plain = BasicInfo { attributes: Some(0x80), ..BasicInfo::default() };
    f.done(FsOpKind::SetBasic { handle: file.clone(), info: plain }).expect("set");
    assert_eq!(f.stat(&file).attributes, 0x80);
    assert_eq!(f.stat(&file).times.creation, before.times.creation - 2 * day, "kept beside the attributes");

    let hidden = OpenRequest { mode: OpenMode::New, attributes: 0x2, ..request("h") };
    assert_eq!(f.open(hidden).expect("made").stat.attributes, 0x22);
    let dir = f.directory("d");
    assert_eq!(f.stat(&dir).attributes, 0x10);
    let hide = BasicInfo { attributes: Some(0x2), ..BasicInfo::default() };
    f.done(FsOpKind::SetBasic { handle: dir.clone(), info: hide }).expect("set");
    assert_eq!(f.stat(&dir).attributes, 0x12);
}

/// Permission bits, owner and group.
fn ownership(stat: &Stat) -> (u32, u32, u32) {
    (stat.mode, stat.uid, stat.gid)
}

#[test]
fn ownership_and_mode_are_stored_in_the_file_system() {
    let f = Fixture::new();
    let plain = f.stat(&f.file("plain"));
    let (me, mine) = (plain.uid, plain.gid);
    let asked = |mode, uid, gid| Some(Ownership { mode: Some(mode), uid, gid });
    let made = |path: &str, kind, ownership| {
        f.open(OpenRequest { mode: OpenMode::New, kind, ownership, ..request(path) }).expect("made")
    };
    let file = made("f", ObjectKind::File, asked(0o640, None, None));
    assert_eq!(ownership(&file.stat), (0o640, me, mine));
    let directory = made("d", ObjectKind::Directory, asked(0o2750, None, None));
    assert_eq!(ownership(&directory.stat), (0o2750, me, mine));
    let below = made("d/e", ObjectKind::Directory, asked(0o700, None, None));
    assert_eq!(below.stat.mode, 0o2700, "the bit for set-gid is inherited");
    let listed = f.list(&f.existing("").expect("root"), true, 10);
    let entry = listed.iter().find(|entry| entry.name == "f").expect("listed");
    assert_eq!(ownership(&entry.stat), (0o640, me, mine));
    let set = |ownership| f.done(FsOpKind::SetOwnership { handle: file.handle.clone(), ownership });
    set(Ownership { mode: Some(0o4711), ..Ownership::default() }).expect("set");
    assert_eq!(f.stat(&file.handle).mode, 0o4711);
    let all_ones = Ownership { uid: Some(u32::MAX), ..Ownership::default() };
    assert_eq!(set(all_ones), Err(NtStatus::INVALID_PARAMETER), "all ones are no owner");
    if !rustix::process::geteuid().is_root() {
        assert_eq!(
            set(Ownership { uid: Some(me + 1), ..Ownership::default() }),
            Err(NtStatus::ACCESS_DENIED)
        );
        return;
    }
    set(Ownership { uid: Some(1000), gid: Some(100), mode: Some(0o4711) }).expect("set");
    assert_eq!(
        ownership(&f.stat(&file.handle)),
        (0o4711, 1000, 100),
        "the bits survive the change of the owner"
    );
    let theirs = made("t", ObjectKind::Directory, asked(0o755, Some(1000), Some(100)));
    assert_eq!(ownership(&theirs.stat), (0o755, 1000, 100));
    let inherited = made("t/i", ObjectKind::File, asked(0o600, None, None));
    assert_eq!(ownership(&inherited.stat), (0o600, 1000, 100), "of the owner of its directory");
}

#[test]
fn reparse_data_is_stored_without_creating_a_symlink() {
    let f = Fixture::new();
    let point = ReparsePoint { tag: 0xa000_000c, kind: FileKind::SymbolicLink };
    let data = vec![7; 1000];
    for (name, directory) in [("link", false), ("junction", true)] {
        let handle = if directory { f.directory(name) } else { f.file(name) };
        let get = || f.run(FsOpKind::GetReparsePoint { handle: handle.clone() });
        let set = |point| f.done(FsOpKind::SetReparsePoint { handle: handle.clone(), point });
        assert_eq!(get().err(), Some(NtStatus::NOT_A_REPARSE_POINT));
        set(Some((point, data.clone()))).expect("set");
        let Ok(FsReply::ReparseData(found)) = get() else { panic!("data") };
        assert_eq!(found, data);
        let stat = f.stat_path(name).expect("there");
        assert_eq!((stat.reparse, stat.attributes & 0x400), (Some(point), 0x400));
        assert_eq!(
            stat,
            f.list(&f.existing("").expect("root"), true, 10)
                .iter()
                .find(|e| e.name == name)
                .expect("listed")
                .stat
        );
        // Setting attributes later does not change it.
        let info = BasicInfo { attributes: Some(0x2), ..BasicInfo::default() };
        f.done(FsOpKind::SetBasic { handle: handle.clone(), info }).expect("set");
        assert_eq!(f.stat(&handle).reparse, Some(point));
        set(None).expect("removed");
        assert_eq!((f.stat(&handle).reparse, get().err()), (None, Some(NtStatus::NOT_A_REPARSE_POINT)));
    }
    let link = f.root.join("link");
    assert!(link.symlink_metadata().expect("there").is_file());
}

#[test]
fn concurrent_attribute_changes_keep_the_reparse_point() {
    let f = Fixture::new();
    let handle = f.file("link");
    let point = ReparsePoint { tag: 0xa000_000c, kind: FileKind::SymbolicLink };
    for round in 0..2000 {
        let set = |point| f.done(FsOpKind::SetReparsePoint { handle: handle.clone(), point }).expect("set");
        set(None);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let info = BasicInfo { attributes: Some(0x2 + round % 2), ..BasicInfo::default() };
                f.done(FsOpKind::SetBasic { handle: handle.clone(), info }).expect("set");
            });
            set(Some((point, vec![7; 100])));
        });
        assert_eq!(f.stat(&handle).reparse, Some(point), "round {round}");
    }
}

#[test]
fn cached_listings_return_current_attributes() {
    let f = Fixture::new();
    let file = f.file("d-none").clone();
    f.file("other");
    // Long enough for listings to cache the files without the attribute.
    std::thread::sleep(std::time::Duration::from_millis(2_500));
    let attributes = || {
        let root = f.existing("").expect("the root");
        let entries = f.list(&root, true, usize::MAX);
        let mut all: Vec<_> = entries.into_iter().map(|entry| (entry.name, entry.stat.attributes)).collect();
        all.sort();
        all
    };
    let both = |first: u32| vec![("d-none".to_owned(), first), ("other".to_owned(), 0x20)];
    for _ in 0..3 {
        assert_eq!(attributes(), both(0x20));
    }
    let set = |attributes| {
        let info = BasicInfo { attributes: Some(attributes), ..BasicInfo::default() };
        f.done(FsOpKind::SetBasic { handle: file.clone(), info }).expect("set");
    };
    for wanted in [0x2, 0x20, 0x3] {
        set(wanted);
        assert_eq!(attributes(), both(wanted));
    }
}

#[test]
fn allocation_size_of_a_new_file_does_not_change_its_end_of_file() {
    let f = Fixture::new();
    let made =
        f.open(OpenRequest { mode: OpenMode::New, allocation_size: 1 << 20, ..request("r") }).expect("made");
    assert_eq!(made.stat.end_of_file, 0);
    assert!(made.stat.allocation_size >= 1 << 20);
}

#[test]
fn symlinks_are_neither_followed_nor_listed() {
    let f = Fixture::new();
    f.file("inside");
    symlink(&f.outside, f.root.join("absolute")).expect("a link");
    symlink("../outside", f.root.join("relative")).expect("a link");
    symlink("inside", f.root.join("friendly")).expect("a link");
    symlink("/", f.root.join("slash")).expect("a link");
    symlink("/proc/self/root", f.root.join("magic")).expect("a link");
    for path in ["absolute", "relative", "friendly", "slash", "magic"] {
        assert_eq!(f.existing(path).err(), Some(NtStatus::ACCESS_DENIED), "{path}");
        assert_eq!(f.stat_path(path).err(), Some(NtStatus::ACCESS_DENIED), "{path}");
        let inner = format!("{path}/secret");
        assert_eq!(f.existing(&inner).err(), Some(NtStatus::ACCESS_DENIED), "{inner}");
        let new = f.open(OpenRequest { mode: OpenMode::Either, ..request(&format!("{path}/new")) });
        assert_eq!(new.err(), Some(NtStatus::ACCESS_DENIED), "{path}");
        let dir = OpenRequest {
            mode: OpenMode::New,
            kind: ObjectKind::Directory,
            ..request(&format!("{path}/dir"))
        };
        assert_eq!(f.open(dir).err(), Some(NtStatus::ACCESS_DENIED), "{path}");
        let file = f.existing("inside").expect("inside");
        assert_eq!(f.rename(&file, &format!("{path}/moved"), true), Err(NtStatus::ACCESS_DENIED), "{path}");
        assert_eq!(f.link(&file, &format!("{path}/linked"), true), Err(NtStatus::ACCESS_DENIED), "{path}");
    }
    assert_eq!(f.names(""), ["inside"], "nor are they listed");
    let outside: Vec<_> =
        std::fs::read_dir(&f.outside).expect("outside").map(|e| e.expect("entry").file_name()).collect();
    assert_eq!(outside, ["secret"]);
}

#[test]
fn symlink_swapped_in_during_a_lookup_is_not_followed() {
    let f = Fixture::new();
    f.directory("swap");
    f.directory("aside");
    std::fs::write(f.root.join("swap/secret"), "harmless").expect("a file");
    symlink(&f.outside, f.root.join("aside/link")).expect("a link");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use rustix::fs::{CWD, RenameFlags, renameat_with};
            let (a, b) = (f.root.join("swap"), f.root.join("aside/link"));
            while !stop.load(Ordering::Relaxed) {
                renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE).expect("exchanged");
            }
        });
        let moving = f.file("moving");
        let mut read = 0;
        for round in 0..3000 {
            if let Ok(handle) = f.open(OpenRequest { write: false, ..request("swap/secret") }) {
                assert_eq!(f.read(&handle.handle, 0, 100).as_deref(), Ok(&b"harmless"[..]));
                read += 1;
            }
            let _ = f.open(OpenRequest { mode: OpenMode::Either, ..request(&format!("swap/new-{round}")) });
            let _ = f.rename(&moving, &format!("swap/moved-{round}"), true);
            let _ = f.rename(&moving, "moving", true);
        }
        stop.store(true, Ordering::Relaxed);
        assert!(read > 0, "the directory was present at times");
    });
    let outside: Vec<_> =
        std::fs::read_dir(&f.outside).expect("outside").map(|e| e.expect("entry").file_name()).collect();
    assert_eq!(outside, ["secret"], "nothing was made or moved there");
    assert_eq!(std::fs::read_to_string(f.outside.join("secret")).expect("secret"), "secret");
}

#[test]
fn handle_of_a_file_moved_out_of_the_volume_cannot_rename_or_unlink() {
    let f = Fixture::new();
    let file = f.file("gone");
    std::fs::rename(f.root.join("gone"), f.outside.join("gone")).expect("moved out by an administrator");
    assert_eq!(f.rename(&file, "back", true), Err(NtStatus::OBJECT_NAME_NOT_FOUND));
    f.unlink(file).expect("no error");
    assert!(f.outside.join("gone").exists());
}

#[test]
fn pipes_and_sockets_are_not_served() {
    let f = Fixture::new();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, f.root.join("pipe"), rustix::fs::FileType::Fifo, mode, 0)
        .expect("a pipe");
    let _socket = std::os::unix::net::UnixListener::bind(f.root.join("socket")).expect("a socket");
    for (read, write) in [(true, true), (true, false), (false, true), (false, false)] {
        for path in ["pipe", "socket"] {
            let opened = f.open(OpenRequest { read, write, ..request(path) });
            assert_eq!(opened.err(), Some(NtStatus::ACCESS_DENIED), "{path}");
        }
    }
    assert!(f.names("").is_empty());
}

#[test]
fn full_file_system_returns_disk_full_and_keeps_existing_data() {
    let tiny = TempDir::new().expect("a mount point");
    let options = Some(c"size=1m");
    if let Err(errno) =
        rustix::mount::mount(c"tmpfs", tiny.path(), c"tmpfs", rustix::mount::MountFlags::empty(), options)
    {
        // Mounting is the only part of the suite that needs a privilege, which the lab always has.
        assert_eq!(errno, rustix::io::Errno::PERM);
        return;
    }
    struct Unmount<'a>(&'a Path);
    impl Drop for Unmount<'_> {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
        }
    }
    let _unmount = Unmount(tiny.path());
    let f = Fixture::at(tiny.path());
    let file = f.file("big");
    f.write(&file, 0, &[1; 4096]).expect("fits");
    assert_eq!(f.write(&file, 4096, &vec![2; 4 << 20]), Err(NtStatus::DISK_FULL));
    assert_eq!(f.read(&file, 0, 4096), Ok(vec![1; 4096]));
    let reserve = FsOpKind::SetAllocation { handle: file.clone(), size: 64 << 20 };
    assert_eq!(f.done(reserve), Err(NtStatus::DISK_FULL));
    let made = f.open(OpenRequest { mode: OpenMode::New, allocation_size: 64 << 20, ..request("never") });
    assert_eq!(made.err(), Some(NtStatus::DISK_FULL));
    assert_eq!(f.names(""), ["big"], "a file that could not be furnished is not left behind");
    f.unlink(file).expect("deleted");
    match f.run(FsOpKind::Space { handle: f.volume.clone() }) {
        Ok(FsReply::Space(space)) => assert!(space.total == 1 << 20 && space.free > 0),
        _ => panic!("space"),
    }
}

#[test]
fn extended_attributes_are_stored_as_user_xattrs() {
    let f = Fixture::new();
    f.file("file");
    let there =
        |list: &[(&str, &[u8])]| Ok(list.iter().map(|(n, v)| ((*n).to_owned(), v.to_vec())).collect());
    // A handle with read access suffices: Linux's client sets attributes through such a handle.
    let reader = f.open(OpenRequest { write: false, ..request("file") }).expect("opened").handle;
    for (name, handle) in [("file", reader), ("d", f.directory("d"))] {
        let path = f.root.join(name);
        assert_eq!(f.eas(&handle), Ok(Vec::new()));
        assert_eq!(f.ea_size(&handle), 0);
        f.set_eas(&handle, &[("b", b"2"), ("a", b"1"), ("A", &[0, 255])]).expect("set");
        let all: &[(&str, &[u8])] = &[("A", &[0, 255]), ("a", b"1"), ("b", b"2")];
        assert_eq!(f.eas(&handle), there(all));
        assert_eq!(f.ea_size(&handle), (5 + 3) + 2 * (5 + 2));
        let mut value = [0; 8];
        assert_eq!(rustix::fs::getxattr(&path, "user.b", &mut value), Ok(1), "others in the pool see them");
        // Attributes that are internal to the server, empty ones, and names that are not ASCII.
        let info = BasicInfo { attributes: Some(0x2), ..BasicInfo::default() };
        f.done(FsOpKind::SetBasic { handle: handle.clone(), info }).expect("hidden");
        let none = rustix::fs::XattrFlags::empty();
        for (key, value) in [("user.forebay.other", &b"x"[..]), ("user.empty", b""), ("user.gr\u{fc}n", b"x")]
        {
            rustix::fs::setxattr(&path, key, value, none).expect("set");
        }
        rustix::fs::setxattr(&path, "user.copied", b"here", none).expect("set");
        f.set_eas(&handle, &[("b", b"22"), ("none", b""), ("A", b""), ("a", b"")]).expect("replaced");
        assert_eq!(f.eas(&handle), there(&[("b", b"22"), ("copied", b"here")]));
        assert_eq!(f.ea_size(&handle), (5 + 3) + (5 + 10));
        assert_eq!(f.stat(&handle).attributes & 0x2, 0x2);
    }
}

#[test]
fn refused_extended_attributes_change_nothing() {
    let f = Fixture::new();
    let file = f.file("file");
    let long = "n".repeat(250);
    f.set_eas(&file, &[("kept", b"1"), (&long, b"1")]).expect("set");
    let before = f.eas(&file);
    let refused = |name: &str, value: &[u8]| f.set_eas(&file, &[("kept", b"2"), (name, value)]);
    assert_eq!(refused("forebay.dos", b"x"), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(refused("forebay.dos", b""), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(refused(&"n".repeat(251), b"x"), Err(NtStatus::INVALID_EA_NAME));
    assert_eq!(refused("large", &vec![7; 65_520]), Err(NtStatus::EA_TOO_LARGE));
    let many: Vec<String> = (0..1023).map(|i| format!("{i}")).collect();
    let many: Vec<(&str, &[u8])> = many.iter().map(|name| (name.as_str(), &b"x"[..])).collect();
    assert_eq!(f.set_eas(&file, &many), Err(NtStatus::EA_TOO_LARGE));
    assert_eq!(f.eas(&file), before);
    // If the file system has less space, the call fails; the other attributes are unchanged.
    match f.set_eas(&file, &[("large", &vec![7; 60_000])]) {
        Ok(()) => assert_eq!(f.eas(&file).expect("read").len(), 3),
        Err(status) => {
            assert!(matches!(status, NtStatus::DISK_FULL | NtStatus::EA_TOO_LARGE), "{status:?}");
            assert_eq!(f.eas(&file), before);
        }
    }
}

#[test]
fn concurrent_opens_of_one_name_create_it_once() {
    let f = Fixture::new();
    for round in 0..50 {
        let path = format!("contested-{round}");
        let created: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let opened = f.open(OpenRequest { mode: OpenMode::Either, ..request(&path) });
                        usize::from(opened.expect("opened").created)
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).sum()
        });
        assert_eq!(created, 1);
    }
}
