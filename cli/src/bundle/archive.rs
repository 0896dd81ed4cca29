//! The archive of a bundle.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, Header};

/// A compressed archive that contains one folder.
pub(super) struct Archive {
    builder: Builder<GzEncoder<File>>,
    folder: String,
    /// Seconds since 1970.
    time: u64,
    files: usize,
}

impl Archive {
    /// Creates the file with access for its owner only. An existing file is not overwritten.
    pub(super) fn create(path: &Path, folder: &str, time: u64) -> anyhow::Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let file = file.with_context(|| format!("make {}", path.display()))?;
        let builder = Builder::new(GzEncoder::new(file, Compression::default()));
        Ok(Self { builder, folder: folder.to_owned(), time, files: 0 })
    }

    /// Adds a file.
    pub(super) fn add(&mut self, name: &str, contents: &[u8]) -> anyhow::Result<()> {
        let mut header = Header::new_gnu();
        header.set_size(contents.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.time);
        self.builder
            .append_data(&mut header, format!("{}/{name}", self.folder), contents)
            .with_context(|| format!("write {name} to the archive"))?;
        self.files += 1;
        Ok(())
    }

    /// Completes the archive and returns its number of files.
    pub(super) fn finish(self) -> anyhow::Result<usize> {
        let end = || -> std::io::Result<()> {
            let mut file = self.builder.into_inner()?.finish()?;
            file.flush()?;
            file.sync_all()
        };
        end().context("write the end of the archive")?;
        Ok(self.files)
    }
}
