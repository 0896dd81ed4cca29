//! The file systems that store volumes.
//!
//! A backend executes the operations of [`forebay_smb::fs`]. The only kind so far is [`directory`]: a directory of any
//! local file system. Every kind must pass the test suite in `conformance`.

pub mod directory;
pub mod errno;

#[cfg(test)]
mod closing;
#[cfg(test)]
mod conformance;
#[cfg(test)]
mod power_tests;

use std::sync::Arc;

use forebay_smb::fs::{FsOpKind, FsResult, OpenMode};

use crate::buffers::BufferPool;
use crate::gate::Gate;
use crate::lanes::Lane;
use crate::qos::Limiter;

/// Returns the lane in which [`execute`] must be called.
#[must_use]
pub fn lane(operation: &FsOpKind) -> Lane {
    use FsOpKind as Op;
    let unless_written_through =
        |handle, lane| if directory::writes_through(handle) { Lane::Sync } else { lane };
    match operation {
        Op::Open { volume, request } => match request.mode {
            OpenMode::Existing => Lane::LookUp,
            // With write-through, a new file and its name are on stable storage before the reply.
            OpenMode::New | OpenMode::Either => unless_written_through(volume, Lane::Change),
        },
        Op::Stat { .. }
        | Op::StatPath { .. }
        | Op::LongPath { .. }
        | Op::Space { .. }
        | Op::ReadDir { .. }
        | Op::Lookup { .. }
        | Op::GetReparsePoint { .. }
        | Op::GetEas { .. }
        | Op::GetDescriptor { .. }
        | Op::EaSize { .. }
        | Op::Streams { .. }
        | Op::CheckEmpty { .. } => Lane::LookUp,
        Op::Close { unlink: None, .. } => Lane::Close,
        Op::Close { unlink: Some(_), handle, .. }
        | Op::SetBasic { handle, .. }
        | Op::SetOwnership { handle, .. }
        | Op::SetEas { handle, .. }
        | Op::SetDescriptor { handle, .. }
        | Op::SetReparsePoint { handle, .. } => unless_written_through(handle, Lane::Change),
        Op::Read { .. } | Op::AllocatedRanges { .. } => Lane::Data,
        Op::Write { write_through: true, .. } | Op::WriteRemote { write_through: true, .. } => Lane::Sync,
        Op::Write { handle, write_through: false, .. }
        | Op::WriteRemote { handle, write_through: false, .. }
        | Op::SetEndOfFile { handle, .. }
        | Op::Overwrite { handle, .. }
        | Op::SetAllocation { handle, .. }
        | Op::ZeroRange { handle, .. } => unless_written_through(handle, Lane::Data),
        Op::CopyRange { target, .. } | Op::CloneRange { target, .. } => {
            unless_written_through(target, Lane::Data)
        }
        // All of them sync a directory or a file.
        Op::Flush { .. } | Op::Rename { .. } | Op::RenameStream { .. } | Op::Link { .. } => Lane::Sync,
    }
}

/// Returns the limiter of the operation's volume and the number of bytes that `operation` consumes. `None` for operations that
/// are never delayed: they finish or flush earlier work, or are answered from memory.
#[must_use]
pub fn demand(operation: &FsOpKind) -> Option<(&Arc<Limiter>, u64)> {
    use FsOpKind as Op;
    let (handle, bytes) = match operation {
        Op::Close { .. }
        | Op::Flush { .. }
        | Op::Stat { .. }
        | Op::EaSize { .. }
        | Op::Space { .. }
        | Op::CheckEmpty { .. } => return None,
        Op::Read { handle, length, .. } | Op::WriteRemote { handle, length, .. } => {
            (handle, u64::from(*length))
        }
        Op::Write { handle, range, .. } => (handle, range.len() as u64),
        Op::CopyRange { target, length, .. } => (target, *length),
        Op::Open { volume, .. } | Op::StatPath { volume, .. } | Op::LongPath { volume, .. } => (volume, 0),
        Op::CloneRange { target: handle, .. }
        | Op::ReadDir { handle, .. }
        | Op::Lookup { handle, .. }
        | Op::SetBasic { handle, .. }
        | Op::SetOwnership { handle, .. }
        | Op::SetReparsePoint { handle, .. }
        | Op::GetReparsePoint { handle }
        | Op::GetEas { handle }
        | Op::GetDescriptor { handle }
        | Op::SetEas { handle, .. }
        | Op::SetDescriptor { handle, .. }
        | Op::Streams { handle }
        | Op::SetEndOfFile { handle, .. }
        | Op::Overwrite { handle, .. }
        | Op::SetAllocation { handle, .. }
        | Op::Rename { handle, .. }
        | Op::RenameStream { handle, .. }
        | Op::Link { handle, .. }
        | Op::ZeroRange { handle, .. }
        | Op::AllocatedRanges { handle, .. } => (handle, 0),
    };
    Some((directory::limiter(handle)?, bytes))
}

/// Returns the gate that `operation` must pass; `None` if it changes nothing.
#[must_use]
pub fn gate(operation: &FsOpKind) -> Option<&Arc<Gate>> {
    use FsOpKind as Op;
    let handle = match operation {
        Op::Open { volume, request } => match request.mode {
            OpenMode::Existing => return None,
            OpenMode::New | OpenMode::Either => volume,
        },
        Op::Close { unlink: Some(_), handle, .. }
        | Op::SetBasic { handle, .. }
        | Op::SetOwnership { handle, .. }
        | Op::SetEas { handle, .. }
        | Op::SetDescriptor { handle, .. }
        | Op::SetReparsePoint { handle, .. }
        | Op::Write { handle, .. }
        | Op::WriteRemote { handle, .. }
        | Op::SetEndOfFile { handle, .. }
        | Op::Overwrite { handle, .. }
        | Op::SetAllocation { handle, .. }
        | Op::ZeroRange { handle, .. }
        | Op::Rename { handle, .. }
        | Op::RenameStream { handle, .. }
        | Op::Link { handle, .. }
        | Op::CopyRange { target: handle, .. }
        | Op::CloneRange { target: handle, .. } => handle,
        Op::Close { unlink: None, .. }
        | Op::Stat { .. }
        | Op::StatPath { .. }
        | Op::LongPath { .. }
        | Op::Space { .. }
        | Op::ReadDir { .. }
        | Op::Lookup { .. }
        | Op::GetReparsePoint { .. }
        | Op::GetEas { .. }
        | Op::GetDescriptor { .. }
        | Op::EaSize { .. }
        | Op::Streams { .. }
        | Op::CheckEmpty { .. }
        | Op::Read { .. }
        | Op::AllocatedRanges { .. }
        | Op::Flush { .. } => return None,
    };
    directory::gate(handle)
}

/// Returns the limiter of the operation's volume. `operation` must be of a kind for which [`gate`] returns a gate.
#[must_use]
pub fn limiter(operation: &FsOpKind) -> Option<&Arc<Limiter>> {
    match operation {
        FsOpKind::Close { handle, .. } => directory::limiter(handle),
        operation => demand(operation).map(|(limiter, _)| limiter),
    }
}

/// Executes `operation` on the calling thread, which may block.
///
/// # Errors
/// The status to return to the client.
pub fn execute(operation: FsOpKind, buffers: &BufferPool) -> FsResult {
    directory::execute(operation, buffers)
}

/// Executes `operation` on a thread that must not block, if the kernel can answer it from memory.
///
/// # Errors
/// The operation, if it must be executed by [`execute`].
pub fn execute_cached(operation: FsOpKind) -> Result<FsResult, FsOpKind> {
    directory::execute_cached(operation)
}

#[cfg(test)]
mod tests {
    use forebay_smb::fs::{FsHandle, FsReply, ObjectKind, OpenRequest, RelPath, Unlink};

    use super::directory::{Promise, Volume};
    use super::*;

    fn open(volume: &FsHandle, mode: OpenMode) -> FsOpKind {
        let request = OpenRequest {
            path: RelPath::new("it").expect("a path"),
            mode,
            kind: ObjectKind::File,
            read: true,
            write: true,
            write_through: false,
            attributes: 0,
            allocation_size: 0,
            ownership: None,
            stream: None,
            descriptor: None,
            checked: true,
        };
        FsOpKind::Open { volume: volume.clone(), request }
    }

    #[test]
    fn operations_that_wait_for_stable_storage_use_the_sync_lane() {
        for (promise, change, data) in
            [(Promise::AtFlush, Lane::Change, Lane::Data), (Promise::AtReply, Lane::Sync, Lane::Sync)]
        {
            let scratch = tempfile::tempdir().expect("a directory");
            let volume = Volume::open_with(scratch.path(), promise, None).expect("a volume").handle();
            assert_eq!(lane(&open(&volume, OpenMode::Existing)), Lane::LookUp);
            assert_eq!(lane(&open(&volume, OpenMode::New)), change);
            assert_eq!(lane(&open(&volume, OpenMode::Either)), change);
            let Ok(FsReply::Opened(opened)) = execute(open(&volume, OpenMode::New), &BufferPool::default())
            else {
                panic!("opened")
            };
            let handle = opened.handle;
            let close = |unlink| FsOpKind::Close { handle: handle.clone(), unlink, stat: false };
            assert_eq!(lane(&close(None)), Lane::Close);
            assert_eq!(lane(&close(Some(Unlink::unregistered()))), change);
            assert_eq!(lane(&FsOpKind::Stat { handle: handle.clone() }), Lane::LookUp);
            assert_eq!(lane(&FsOpKind::GetEas { handle: handle.clone() }), Lane::LookUp);
            assert_eq!(lane(&FsOpKind::SetEas { handle: handle.clone(), eas: Vec::new() }), change);
            assert_eq!(lane(&FsOpKind::SetEndOfFile { handle: handle.clone(), size: 0 }), data);
            assert_eq!(lane(&FsOpKind::Flush { handle: handle.clone() }), Lane::Sync);
            let to = RelPath::new("other").expect("a path");
            assert_eq!(lane(&FsOpKind::Rename { handle, to, replace: true }), Lane::Sync);
        }
    }
}
