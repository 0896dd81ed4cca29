//! What is on stable storage when an operation is answered: one rule for all operations and both kinds of pools
//! (docs/adr/0015-durability-rule.md).

use std::sync::Arc;

use forebay_smb::fs::{FsHandle, FsOpKind, FsReply};
use forebay_smb::status::NtStatus;
use rustix::io::Errno;

use super::{OpenFile, is_stream, names, of_file, stream};
use crate::backend::errno::status;

/// What a volume guarantees for an operation that was answered but not flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// It survives a crash of the server, but not of the machine. FLUSH, RENAME and links survive that, too.
    AtFlush,
    /// It survives both, regardless of which server serves the volume next.
    AtReply,
}

/// The part of the file system that an operation changes, which determines what its reply may have to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// Nothing.
    None,
    /// The operation itself makes it durable in every volume: FLUSH, and operations that would need an fsync of a directory,
    /// since SMB has none and Linux's client sends nothing for it.
    Settled,
    /// Contents; the write call itself carries the flag (RWF_DSYNC) if the open file or the request requires it.
    Write,
    /// A file or directory that may be created: contents, attributes and name.
    Made,
    /// The removal of a name.
    Removed,
    /// Contents or size of an open file, changed by another call than a write.
    Contents,
    /// Attributes or times of an open file.
    Attributes,
}

/// The rule. The match is exhaustive, so that a new operation does not compile until it is classified here.
fn change(operation: &FsOpKind) -> (Change, Option<&FsHandle>) {
    use FsOpKind as Op;
    match operation {
        Op::Open { .. } => (Change::Made, None),
        Op::Close { unlink: Some(_), handle, .. } => (Change::Removed, Some(handle)),
        Op::Close { unlink: None, .. }
        | Op::Read { .. }
        | Op::Stat { .. }
        | Op::Space { .. }
        | Op::ReadDir { .. }
        | Op::Lookup { .. }
        | Op::CheckEmpty { .. }
        | Op::StatPath { .. }
        | Op::LongPath { .. }
        | Op::GetReparsePoint { .. }
        | Op::GetEas { .. }
        | Op::GetDescriptor { .. }
        | Op::EaSize { .. }
        | Op::Streams { .. }
        | Op::AllocatedRanges { .. } => (Change::None, None),
        Op::Write { .. } | Op::WriteRemote { .. } => (Change::Write, None),
        Op::Flush { .. } | Op::Rename { .. } | Op::RenameStream { .. } | Op::Link { .. } => {
            (Change::Settled, None)
        }
        Op::SetBasic { handle, .. }
        | Op::SetOwnership { handle, .. }
        | Op::SetEas { handle, .. }
        | Op::SetDescriptor { handle, .. }
        | Op::SetReparsePoint { handle, .. } => (Change::Attributes, Some(handle)),
        Op::SetEndOfFile { handle, .. }
        | Op::Overwrite { handle, .. }
        | Op::SetAllocation { handle, .. }
        | Op::ZeroRange { handle, .. }
        | Op::CopyRange { target: handle, .. }
        | Op::CloneRange { target: handle, .. } => (Change::Contents, Some(handle)),
    }
}

/// What remains to be done between the success of an operation and its reply.
#[derive(Debug)]
pub(super) enum Settlement {
    /// Nothing: the operation changed nothing, made the change durable itself, or its volume guarantees less.
    None,
    /// The name that an open created, with the file or directory below it.
    Made,
    /// The directory that a name was removed from.
    Removed(Arc<OpenFile>),
    /// fdatasync.
    Contents(Arc<OpenFile>),
    /// fsync: fdatasync does not sync times.
    Attributes(Arc<OpenFile>),
}

impl Settlement {
    /// Must be called before the operation, which consumes its handle.
    pub(super) fn of(operation: &FsOpKind) -> Result<Self, NtStatus> {
        let (change, handle) = change(operation);
        let written_through = || -> Result<Option<Arc<OpenFile>>, NtStatus> {
            let file = handle.map(of_file).transpose()?;
            Ok(file.filter(|file| file.write_through()))
        };
        let change = match change {
            // A named stream is an attribute of its file.
            Change::Contents | Change::Removed if handle.is_some_and(is_stream) => Change::Attributes,
            change => change,
        };
        Ok(match change {
            Change::None | Change::Settled | Change::Write => Self::None,
            Change::Made => Self::Made,
            Change::Removed => written_through()?.map_or(Self::None, Self::Removed),
            Change::Contents => written_through()?.map_or(Self::None, Self::Contents),
            Change::Attributes => written_through()?.map_or(Self::None, Self::Attributes),
        })
    }

    /// Waits until it is durable.
    pub(super) fn settle(self, reply: &FsReply) -> Result<(), NtStatus> {
        match self {
            Self::None => Ok(()),
            Self::Made => match reply {
                FsReply::Opened(opened) if opened.created => {
                    let made = of_file(&opened.handle)?;
                    if made.volume.promise != Promise::AtReply {
                        return Ok(());
                    }
                    names::flush(&made).inspect_err(|_| {
                        // Report the first error, and leave nothing behind from a failed open.
                        let _ = match stream(&opened.handle) {
                            Some(stream) if !opened.made_file() => stream.remove(),
                            _ => names::unlink(&made),
                        };
                    })
                }
                _ => Ok(()),
            },
            Self::Removed(file) => names::settle_removal(&file),
            Self::Contents(file) => sync(&file, || rustix::fs::fdatasync(&file.fd)),
            Self::Attributes(file) => sync(&file, || rustix::fs::fsync(&file.fd)),
        }
    }
}

/// The kernel reports a failed write once per descriptor, so it is recorded for later flushes.
fn sync(file: &OpenFile, call: impl Fn() -> Result<(), Errno>) -> Result<(), NtStatus> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => {
                return result.map_err(|errno| {
                    file.set_sync_failed();
                    status(errno)
                });
            }
        }
    }
}
