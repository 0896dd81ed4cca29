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
