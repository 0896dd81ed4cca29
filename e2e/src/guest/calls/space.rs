//! Fills a volume and queries its usage.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::data::Noise;

/// Arguments of [`fill`].
#[derive(Debug, Serialize, Deserialize)]
pub struct Fill {
    /// The file to write.
    pub path: PathBuf,
    /// Bytes per write.
    pub block_bytes: usize,
    /// Limit at which to stop even if there is space.
    pub bytes_max: u64,
}

/// How a [`fill`] ended.
#[derive(Debug, Serialize, Deserialize)]
pub struct Filled {
    /// Bytes that were accepted by write and fsync.
    pub bytes: u64,
    /// Whether it ended with ENOSPC (or EDQUOT, which some file systems return instead).
    pub no_space: bool,
}

/// Writes until the volume is full. Buffered writes can fail as late as in fsync: both count.
pub fn fill(Fill { path, block_bytes, bytes_max }: Fill) -> Result<Filled> {
    let block = Noise::new(1).bytes(block_bytes);
    let mut file = match File::create(&path) {
        Ok(file) => file,
        Err(error) if is_no_space(&error) => return Ok(Filled { bytes: 0, no_space: true }),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let mut bytes = 0;
    let mut no_space = false;
    while bytes < bytes_max {
        let result = file.write(&block).and_then(|count| {
            bytes += count as u64;
            // Otherwise the page cache could accept a gigabyte before the server's limit is reported.
            if bytes % (32 << 20) < count as u64 { file.sync_data() } else { Ok(()) }
        });
        match result {
            Ok(()) => {}
            Err(error) if is_no_space(&error) => {
                no_space = true;
                break;
            }
            Err(error) => return Err(error).with_context(|| format!("after {bytes} bytes")),
        }
    }
    match file.sync_all() {
        Err(error) if is_no_space(&error) => no_space = true,
        Err(error) => return Err(error).context("fsync"),
        Ok(()) => {}
    }
    Ok(Filled { bytes, no_space })
}

fn is_no_space(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}

/// The values that statfs returns.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Space {
    /// Size of the volume.
    pub total_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
}

/// `df` of this path.
pub fn space(path: PathBuf) -> Result<Space> {
    let found = rustix::fs::statvfs(&path).with_context(|| path.display().to_string())?;
    Ok(Space { total_bytes: found.f_blocks * found.f_frsize, free_bytes: found.f_bavail * found.f_frsize })
}
