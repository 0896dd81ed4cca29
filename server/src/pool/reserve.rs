//! Space that a pool reserves, so that a volume can be deleted when the pool is full.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::Pool;
use crate::limits::RESERVE_BYTES;
use crate::volume::RecordError;

/// The file that reserves the space.
pub(super) const RESERVE: &str = ".forebay/reserve";

impl Pool {
    /// Runs a write that may need a little space; on a full file system, it uses the reserve.
    pub(super) fn with_reserve(
        &self,
        write: impl Fn() -> Result<(), RecordError>,
    ) -> Result<(), RecordError> {
        match write() {
            Err(RecordError::Io { error, .. }) if is_full(&error) => {
                tracing::warn!(pool = self.name, "the file system is full: using its reserve");
                if let Err(error) = std::fs::remove_file(self.path.join(RESERVE)) {
                    tracing::warn!(pool = self.name, %error, "the reserve cannot be used");
                }
                write()
            }
            written => written,
        }
    }
}

/// Reserves space in a pool for deleting volumes when it is full, unless it is already reserved. On a full file system this
/// is impossible until something is deleted.
pub(crate) fn keep_reserve(pool: &Path) {
    let path = pool.join(RESERVE);
    let kept = || -> std::io::Result<()> {
        if path.metadata().is_ok_and(|found| found.blocks() * 512 >= RESERVE_BYTES) {
            return Ok(());
        }
        let file = std::fs::File::create(&path)?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES) {
            // The file system cannot preallocate space.
            Err(Errno::OPNOTSUPP) => Ok(()),
            result => result.map_err(Into::into),
        }
    };
    if let Err(error) = kept() {
        let _ = std::fs::remove_file(&path);
        tracing::warn!(pool = %pool.display(), %error, "no space can be set aside for deleting volumes of a full pool");
    }
}

pub(super) fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}
