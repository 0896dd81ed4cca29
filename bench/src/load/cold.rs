//! A cold start: evicts the servers' files from the page cache.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{Advice, fadvise};

/// Evicts all files below a folder from the page cache. They must have been written back before: dirty pages stay, and so
/// does everything on tmpfs.
pub(crate) fn drop_pages(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            drop_pages(&entry.path())?;
        } else if kind.is_file() {
            // A server may remove one of its own files meanwhile.
            let Ok(file) = File::open(entry.path()) else { continue };
            fadvise(&file, 0, None, Advice::DontNeed)?;
        }
    }
    Ok(())
}
