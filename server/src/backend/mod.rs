//! File systems behind volumes.
//!
//! A backend carries out the operations of [`forebay_smb::fs`]. The only kind so far is [`directory`]: any local file
//! system, below one directory. Every kind is held to the one suite in `conformance`.

pub mod directory;
pub mod errno;

#[cfg(test)]
mod conformance;

use forebay_smb::fs::{FsOpKind, FsResult};

use crate::buffers::BufferPool;

/// Carries `operation` out on the calling thread, which may block.
///
/// # Errors
/// The status to give to the client.
pub fn execute(operation: FsOpKind, buffers: &BufferPool) -> FsResult {
    directory::execute(operation, buffers)
}

/// Carries `operation` out on a thread that must not block, where the kernel can answer it from memory.
///
/// # Errors
/// The operation, to be carried out by [`execute`].
pub fn execute_cached(operation: FsOpKind) -> Result<FsResult, FsOpKind> {
    directory::execute_cached(operation)
}
