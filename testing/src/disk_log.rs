//! The log of a disk, in the format of Linux's dm-log-writes (Documentation/admin-guide/device-mapper/log-writes.rst) as
//! written by QEMU's `blklogwrites`, and the images that a power cut could leave.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const SECTOR: u64 = 512;
const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
/// A request to write zeros can cover gigabytes.
const COPY_BYTES: u64 = 1 << 20;

/// One request that the disk completed.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    offset: u64,
    /// Bytes of data; 0 for a flush without data.
    length: u64,
    flags: u64,
    data_at: u64,
    /// Offset of the next entry in the log.
    end: u64,
}

impl Entry {
    /// Whether it ensures that everything completed before it is on stable storage.
    pub fn is_flush(&self) -> bool {
        self.flags & FLUSH != 0
    }
}

/// All requests that a disk completed, in order.
#[derive(Debug)]
pub struct DiskLog {
    file: File,
    /// The requests.
    pub entries: Vec<Entry>,
}

fn word(bytes: &[u8], nth: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|at| bytes[8 * nth + at]))
}

impl DiskLog {
    /// Reads a log with sectors of 512 bytes. The process that writes it may have been killed, but not during a write.
    ///
    /// # Errors
    /// If it cannot be read, or is not a log.
    pub fn read(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        let mut header = [0; 32];
        if length >= SECTOR {
            file.read_exact_at(&mut header, 0)?;
        }
        // QEMU writes the superblock on the first flush.
        if header != [0; 32] && (word(&header, 0), word(&header, 1)) != (MAGIC, VERSION) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a log of version 1"));
        }
        let mut entries = Vec::new();
        let mut at = SECTOR;
        while at + SECTOR <= length {
            // QEMU allocates the space of an entry before it writes the entry. An unwritten entry reads as zeros, each
            // sector as an entry without data.
            file.read_exact_at(&mut header, at)?;
            let (sector, sectors, flags) = (word(&header, 0), word(&header, 1), word(&header, 2));
            let bytes = if flags & DISCARD == 0 { sectors * SECTOR } else { 0 };
            let end = at + SECTOR + bytes;
            if end > length {
                // The request was not acknowledged, because QEMU acknowledges it only after it has written the whole entry.
                break;
            }
            entries.push(Entry { offset: sector * SECTOR, length: bytes, flags, data_at: at + SECTOR, end });
            at = end;
        }
        Ok(Self { file, entries })
    }

    /// Returns how many entries are entirely within the first `bytes` of the log.
    pub fn count(&self, bytes: u64) -> usize {
        self.entries.partition_point(|entry| entry.end <= bytes)
    }
}

/// What happens to writes that no flush follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// All of them are on the disk.
    Kept,
    /// None of them are, except those with FUA: the disk's volatile cache is lost.
    Lost,
}

/// The disk after a prefix of the log. The prefix can only grow.
#[derive(Debug)]
pub struct Image<'a> {
    log: &'a DiskLog,
    file: File,
    cache: Cache,
    /// Number of entries that were processed.
    seen: usize,
    /// Processed entries that are not on the disk yet.
    pending: Vec<Entry>,
}

impl<'a> Image<'a> {
    /// Creates an image. `file` is the disk before the log, open for reading and writing.
    pub fn new(log: &'a DiskLog, file: File, cache: Cache) -> Self {
        Self { log, file, cache, seen: 0, pending: Vec::new() }
    }

    /// Advances to the first `count` entries. Returns whether the image has changed.
    ///
    /// # Errors
    /// If the log cannot be read, or the image cannot be written.
    pub fn advance(&mut self, count: usize) -> io::Result<bool> {
        let mut changed = false;
        for entry in &self.log.entries[self.seen.min(count)..count] {
            if entry.is_flush() {
                for earlier in std::mem::take(&mut self.pending) {
                    changed |= self.apply(earlier)?;
                }
            }
            if self.cache == Cache::Kept || entry.flags & FUA != 0 {
                changed |= self.apply(*entry)?;
            }
            // An entry with FUA, too: otherwise the flush would overwrite it with earlier writes.
            if self.cache == Cache::Lost {
                self.pending.push(*entry);
            }
        }
        self.seen = self.seen.max(count);
        Ok(changed)
    }

    /// Returns the number of writes that are not on the disk, and their bytes.
    pub fn lost(&self) -> (usize, u64) {
        let lost = || self.pending.iter().filter(|entry| entry.length > 0 && entry.flags & FUA == 0);
        (lost().count(), lost().map(|entry| entry.length).sum())
    }

    /// Applies an entry. Returns whether it changes the image. Data that the image already contains are not written, so
    /// zeros leave the image as sparse as it was.
    fn apply(&self, entry: Entry) -> io::Result<bool> {
        let mut data = vec![0; entry.length.min(COPY_BYTES) as usize];
        let mut there = data.clone();
        let (mut done, mut changed) = (0, false);
        while done < entry.length {
            let bytes = (entry.length - done).min(COPY_BYTES) as usize;
            let (part, old) = (&mut data[..bytes], &mut there[..bytes]);
            self.log.file.read_exact_at(part, entry.data_at + done)?;
            self.file.read_exact_at(old, entry.offset + done)?;
            if part != old {
                self.file.write_all_at(part, entry.offset + done)?;
                changed = true;
            }
            done += bytes as u64;
        }
        Ok(changed)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Builds a log of requests: sector, fill byte (`None` for no data), flags.
    fn log(requests: &[(u64, Option<u8>, u64)]) -> Vec<u8> {
        let sector = |words: &[u64]| {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.resize(SECTOR as usize, 0);
            bytes
        };
        let mut bytes = sector(&[MAGIC, VERSION, requests.len() as u64, SECTOR]);
        for (at, fill, flags) in requests {
            bytes.extend(sector(&[*at, fill.is_some().into(), *flags, 0]));
            bytes.extend(fill.iter().flat_map(|byte| [*byte; SECTOR as usize]));
        }
        bytes
    }

    /// Returns the first byte of each of four sectors after a power cut at the end of this log, and the number of lost
    /// writes.
    fn after(log: &[u8], cache: Cache) -> ([u8; 4], usize) {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(log).expect("written");
        let log = DiskLog::read(file.path()).expect("a log");
        let disk = tempfile::tempfile().expect("a file");
        disk.set_len(4 * SECTOR).expect("it has a size");
        let mut image = Image::new(&log, disk.try_clone().expect("a second one"), cache);
        image.advance(log.entries.len()).expect("replayed");
        let sector = |nth: u64| {
            let mut byte = [0];
            disk.read_exact_at(&mut byte, nth * SECTOR).expect("a sector");
            byte[0]
        };
        (std::array::from_fn(|nth| sector(nth as u64)), image.lost().0)
    }

    #[test]
    fn only_flushed_or_fua_writes_survive_a_power_cut() {
        let requests =
            log(&[(0, Some(1), 0), (1, Some(2), 0), (0, None, FLUSH), (1, Some(3), 0), (2, Some(4), FUA)]);
        assert_eq!(after(&requests, Cache::Lost), ([1, 2, 4, 0], 1));
        assert_eq!(after(&requests, Cache::Kept), ([1, 3, 4, 0], 0));
    }

    #[test]
    fn advance_reports_whether_the_image_content_changed() {
        let requests =
            log(&[(0, Some(1), 0), (0, None, FLUSH), (0, None, FLUSH), (0, Some(1), 0), (0, Some(2), FUA)]);
        for (cache, expected) in [
            (Cache::Kept, [true, false, false, false, true]),
            (Cache::Lost, [false, true, false, false, true]),
        ] {
            let mut file = tempfile::NamedTempFile::new().expect("a file");
            file.write_all(&requests).expect("written");
            let log = DiskLog::read(file.path()).expect("a log");
            let disk = tempfile::tempfile().expect("a file");
            disk.set_len(SECTOR).expect("it has a size");
            let mut image = Image::new(&log, disk, cache);
            let changed = std::array::from_fn(|nth| image.advance(nth + 1).expect("replayed"));
            assert_eq!(changed, expected, "{cache:?}");
        }
    }

    #[test]
    fn flush_does_not_replay_an_older_write_over_a_fua_write() {
        let requests = log(&[(0, Some(1), 0), (0, Some(2), FUA), (0, None, FLUSH)]);
        assert_eq!(after(&requests, Cache::Lost), ([2, 0, 0, 0], 0));
    }

    #[test]
    fn unwritten_and_torn_log_entries_are_ignored() {
        let begun = log(&[(0, Some(1), 0), (0, None, FLUSH)]);
        let entry_bytes = 2 * SECTOR as usize;
        // The entry's space contains zeros, and a flush follows.
        let hole = [&log(&[])[..], &vec![0; entry_bytes], &begun[SECTOR as usize..]].concat();
        assert_eq!(after(&hole, Cache::Lost), ([1, 0, 0, 0], 0));
        // The log ends inside the entry.
        let torn = [&begun[..], &log(&[(3, Some(9), FUA)])[SECTOR as usize..][..entry_bytes - 1]].concat();
        assert_eq!(after(&torn, Cache::Kept), ([1, 0, 0, 0], 0));
    }

    #[test]
    fn log_without_a_superblock_is_read_if_nothing_was_flushed() {
        assert_eq!(after(&[], Cache::Lost), ([0; 4], 0));
        let begun = log(&[(0, Some(1), 0)]);
        let headless = [&vec![0; SECTOR as usize][..], &begun[SECTOR as usize..]].concat();
        assert_eq!(after(&headless, Cache::Lost), ([0; 4], 1));
        assert_eq!(after(&headless, Cache::Kept), ([1, 0, 0, 0], 0));
    }

    #[test]
    fn file_that_is_not_a_log_is_refused() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(&[7; 4096]).expect("written");
        assert_eq!(DiskLog::read(file.path()).expect_err("no log").kind(), io::ErrorKind::InvalidData);
    }
}
