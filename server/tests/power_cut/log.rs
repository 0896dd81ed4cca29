//! The log of a disk, in the format of Linux's dm-log-writes (Documentation/admin-guide/device-mapper/log-writes.rst), and the
//! images that a power cut could leave.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::disk::{BYTES, run};

const SECTOR: u64 = 512;
const MAGIC: u64 = 0x006a_7366_7773_6872;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;

/// One request that the disk completed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    offset: u64,
    /// Bytes of data; 0 for a flush alone.
    length: u64,
    flags: u64,
    data_at: u64,
    /// Where the next entry begins in the log.
    pub(crate) end: u64,
}

/// Everything that the disk completed, in order.
pub(crate) struct Log {
    file: File,
    pub(crate) entries: Vec<Entry>,
}

fn word(bytes: &[u8], nth: usize) -> u64 {
    u64::from_le_bytes(bytes[8 * nth..8 * nth + 8].try_into().expect("eight bytes"))
}

impl Log {
    pub(crate) fn read(path: &Path) -> Self {
        let file = File::open(path).expect("the log");
        let length = file.metadata().expect("the log").len();
        let mut header = [0; 32];
        file.read_exact_at(&mut header, 0).expect("the log's superblock");
        assert_eq!((word(&header, 0), word(&header, 1)), (MAGIC, 1), "a log of version 1");
        let mut entries = Vec::new();
        let mut at = SECTOR;
        while at + SECTOR <= length {
            file.read_exact_at(&mut header, at).expect("an entry");
            let (sector, sectors, flags) = (word(&header, 0), word(&header, 1), word(&header, 2));
            let bytes = if flags & DISCARD == 0 { sectors * SECTOR } else { 0 };
            let end = at + SECTOR + bytes;
            entries.push(Entry { offset: sector * SECTOR, length: bytes, flags, data_at: at + SECTOR, end });
            at = end;
        }
        assert!(entries.iter().any(|entry| entry.flags & FLUSH != 0), "the disk was never flushed");
        Self { file, entries }
    }

    /// How many entries lie within the first `bytes` of the log.
    pub(crate) fn count(&self, bytes: u64) -> usize {
        self.entries.partition_point(|entry| entry.end <= bytes)
    }
}

/// What happens to writes that no flush has followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cache {
    /// All of them are on the disk.
    Kept,
    /// None of them is, except those with FUA: the disk's volatile cache is lost.
    Lost,
}

/// The disk as it is after a prefix of the log. Prefixes only grow.
pub(crate) struct Image<'a> {
    log: &'a Log,
    file: File,
    path: PathBuf,
    cache: Cache,
    /// Entries that were looked at.
    seen: usize,
    /// Those among them that are not on the disk yet.
    pending: Vec<Entry>,
}

impl<'a> Image<'a> {
    pub(crate) fn new(log: &'a Log, path: PathBuf, cache: Cache) -> Self {
        let file = File::options().read(true).write(true).create_new(true).open(&path).expect("an image");
        file.set_len(BYTES).expect("room for an image");
        Self { log, file, path, cache, seen: 0, pending: Vec::new() }
    }

    /// Moves on to the first `count` entries.
    pub(crate) fn advance(&mut self, count: usize) {
        for entry in &self.log.entries[self.seen.min(count)..count] {
            if entry.flags & FLUSH != 0 {
                for earlier in std::mem::take(&mut self.pending) {
                    self.apply(earlier);
                }
            }
            if self.cache == Cache::Kept || entry.flags & FUA != 0 {
                self.apply(*entry);
            }
            // One with FUA too: what the flush writes back before it must not hide it.
            if self.cache == Cache::Lost {
                self.pending.push(*entry);
            }
        }
        self.seen = self.seen.max(count);
    }

    fn apply(&self, entry: Entry) {
        let mut data = vec![0; usize::try_from(entry.length).expect("a write fits memory")];
        self.log.file.read_exact_at(&mut data, entry.data_at).expect("an entry's data");
        self.file.write_all_at(&data, entry.offset).expect("a block");
    }

    /// A copy to be mounted, at `to`.
    pub(crate) fn copy(&self, to: &Path) {
        run(Command::new("cp").args(["--sparse=always", "--reflink=auto"]).arg(&self.path).arg(to))
            .expect("a copy");
    }
}
