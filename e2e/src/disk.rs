//! A node's writable disk, and its content after a power loss.
//!
//! A killed QEMU leaves everything that the guest ever wrote in this machine's page cache. For a disk with a volatile cache,
//! QEMU's `blklogwrites` also logs each write. When the power is cut, the disk is rebuilt from that log: its state when the
//! machine was started, plus what was flushed since.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use forebay_testing::disk_log::{Cache, DiskLog, Image};

use crate::host;

/// The files of a node's disk.
#[derive(Debug)]
pub struct Disk {
    /// The disk as the guest sees it.
    file: PathBuf,
    bytes: u64,
    template: Option<PathBuf>,
    has_volatile_cache: bool,
}

impl Disk {
    /// The disk of this size in `folder`, whether or not it exists.
    pub fn new(folder: &Path, node: &str, bytes: u64) -> Self {
        let file = folder.join(format!("{node}.scratch"));
        Self { file, bytes, template: None, has_volatile_cache: false }
    }

    /// Makes the disk a copy of this template, if there is one.
    pub fn with_template(self, template: Option<&Path>) -> Self {
        Self { template: template.map(Path::to_owned), ..self }
    }

    /// Whether the disk loses unflushed writes when its power is cut.
    pub fn with_volatile_cache(self, has_volatile_cache: bool) -> Self {
        Self { has_volatile_cache, ..self }
    }

    /// Log of the guest's writes since its machine was started.
    fn log(&self) -> PathBuf {
        self.file.with_extension("log")
    }

    /// The disk as it was when the machine was started. Created at the first power cut.
    fn stable(&self) -> PathBuf {
        self.file.with_extension("stable")
    }

    /// Creates the disk if it does not exist, and a new log.
    pub fn prepare(&self) -> Result<()> {
        if !self.file.exists() {
            self.begin(&self.file)?;
        }
        if self.has_volatile_cache {
            File::create(self.log())?;
        }
        Ok(())
    }

    /// Creates at `at` the disk of a machine that was never started.
    fn begin(&self, at: &Path) -> Result<()> {
        if let Some(template) = &self.template {
            copy(template, at)?;
        }
        let file = File::options().write(true).create(true).truncate(false).open(at)?;
        file.set_len(self.bytes).map_err(Into::into)
    }

    /// QEMU's option for it. This machine's own power is not cut, so its files need no fsync.
    pub fn drive(&self) -> String {
        let file = self.file.display();
        if !self.has_volatile_cache {
            return format!("file={file},if=virtio,format=raw,cache=unsafe,discard=unmap");
        }
        format!(
            "driver=blklogwrites,if=virtio,cache=writeback,discard=unmap,\
             file.driver=file,file.filename={file},file.cache.no-flush=on,\
             log.driver=file,log.filename={log},log.cache.no-flush=on",
            log = self.log().display()
        )
    }

    /// Removes the unflushed writes and describes them, if the disk has a volatile cache. QEMU has ended.
    ///
    /// A disk may keep any write that it was not asked to flush. This one keeps none, so every run detects a missing flush.
    /// `server/tests/power_cut` covers write orders that show up only if some of the writes are kept.
    pub fn lose_power(&self) -> Result<Option<String>> {
        if !self.has_volatile_cache {
            return Ok(None);
        }
        let (stable, log) = (self.stable(), self.log());
        if !stable.exists() {
            self.begin(&stable)?;
        }
        let log = DiskLog::read(&log).context("the disk's log")?;
        let file = File::options().read(true).write(true).open(&stable)?;
        let mut image = Image::new(&log, file, Cache::Lost);
        image.advance(log.entries.len())?;
        fs::remove_file(&self.file)?;
        copy(&stable, &self.file)?;
        let (writes, bytes) = image.lost();
        let all = log.entries.len();
        Ok(Some(format!("{writes} writes ({} KiB) that were not flushed, of {all} requests", bytes >> 10)))
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let mut copy = Command::new("cp");
    copy.args(["--sparse=always", "--reflink=auto"]);
    host::run(copy.arg(from).arg(to)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a log of requests that each write one sector: the sector, the byte that fills it, and the flags.
    fn log(requests: &[(u64, u8, u64)]) -> Vec<u8> {
        let sector = |words: &[u64]| {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.resize(512, 0);
            bytes
        };
        let mut bytes = sector(&[0x006a_7366_7773_6872, 1, requests.len() as u64, 512]);
        for &(at, fill, flags) in requests {
            bytes.extend(sector(&[at, 1, flags, 0]));
            bytes.extend([fill; 512]);
        }
        bytes
    }

    #[test]
    fn power_cut_keeps_only_flushed_writes() {
        const FLUSH: u64 = 1;
        let folder = tempfile::tempdir().expect("a folder");
        let disk = Disk::new(folder.path(), "node", 4096).with_volatile_cache(true);
        disk.prepare().expect("made");
        fs::write(disk.log(), log(&[(0, 1, 0), (1, 2, FLUSH), (0, 3, 0)])).expect("written");
        let lost = disk.lose_power().expect("lost").expect("it has a volatile cache");
        assert!(lost.starts_with("2 writes"), "{lost}");
        assert_eq!(fs::read(&disk.file).expect("read")[..1024], [[1; 512], [0; 512]].concat());
        // The next start begins with that content.
        disk.prepare().expect("made");
        fs::write(disk.log(), log(&[(2, 4, 0), (3, 5, FLUSH)])).expect("written");
        disk.lose_power().expect("lost");
        let bytes = fs::read(&disk.file).expect("read");
        assert_eq!((bytes[0], bytes[512], bytes[1024], bytes[1536]), (1, 0, 4, 0));
    }
}
