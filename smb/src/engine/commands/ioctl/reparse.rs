//! Reparse points ([MS-FSA] 2.1.5.10.14, 2.1.5.10.37, 2.1.5.10.3): symbolic links and special files. The server stores
//! their data and follows none of them.

use std::sync::Arc;

use super::ioctl_reply;
use crate::engine::access::CHANGING;
use crate::engine::open::Open;
use crate::engine::request::step::Step;
use crate::fs::{FileKind, FsOpKind, FsReply, ReparsePoint};
use crate::limits;
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::change_notify::CompletionFilter;
use crate::wire::fscc::fsctl::FsctlCode;
use crate::wire::fscc::reparse::{NfsSpecialFile, ReparseDataBuffer, ReparseTag, SymbolicLink};

/// Bit of tags with a header without a GUID before the data ([MS-FSCC] 2.1.2.1).
const MICROSOFT: u32 = 0x8000_0000;

/// Parses and checks a REPARSE_DATA_BUFFER.
fn parse(input: &[u8]) -> Result<ReparsePoint, NtStatus> {
    if input.len() > limits::REPARSE_DATA_BYTES_MAX {
        return Err(NtStatus::IO_REPARSE_DATA_INVALID);
    }
    let buffer = ReparseDataBuffer::parse(input).map_err(|_| NtStatus::IO_REPARSE_DATA_INVALID)?;
    if matches!(buffer.reparse_tag, ReparseTag::RESERVED_ZERO | ReparseTag::RESERVED_ONE) {
        return Err(NtStatus::IO_REPARSE_TAG_INVALID);
    }
    // Data of third-party tags starts with a GUID, and no client here uses such tags.
    if buffer.reparse_tag.0 & MICROSOFT == 0 {
        return Err(NtStatus::NOT_SUPPORTED);
    }
    let kind = match buffer.reparse_tag {
        ReparseTag::SYMLINK => {
            let link = SymbolicLink::parse(buffer.data).map_err(|_| NtStatus::IO_REPARSE_DATA_INVALID)?;
            if link.substitute_name.is_empty() {
                return Err(NtStatus::IO_REPARSE_DATA_INVALID);
            }
            FileKind::SymbolicLink
        }
        ReparseTag::NFS => {
            match NfsSpecialFile::parse(buffer.data).map_err(|_| NtStatus::IO_REPARSE_DATA_INVALID)? {
                NfsSpecialFile::SYMLINK => FileKind::SymbolicLink,
                NfsSpecialFile::CHARACTER_DEVICE => FileKind::CharacterDevice,
                NfsSpecialFile::BLOCK_DEVICE => FileKind::BlockDevice,
                NfsSpecialFile::FIFO => FileKind::Fifo,
                NfsSpecialFile::SOCKET => FileKind::Socket,
                _ => return Err(NtStatus::IO_REPARSE_DATA_INVALID),
            }
        }
        ReparseTag::LX_SYMLINK => FileKind::SymbolicLink,
        ReparseTag::LX_CHR => FileKind::CharacterDevice,
        ReparseTag::LX_BLK => FileKind::BlockDevice,
        ReparseTag::LX_FIFO => FileKind::Fifo,
        ReparseTag::AF_UNIX => FileKind::Socket,
        _ => FileKind::Regular,
    };
    Ok(ReparsePoint { tag: buffer.reparse_tag.0, kind })
}

/// FSCTL_GET_REPARSE_POINT.
pub(super) fn get(open: Arc<Open>, room: usize) -> Step {
    Step::Fs(
        FsOpKind::GetReparsePoint { handle: open.handle.clone() },
        Box::new(move |_, result| match result {
            Ok(FsReply::ReparseData(data)) => {
                let mut reply =
                    ioctl_reply(FsctlCode::GET_REPARSE_POINT, open.id, &data[..data.len().min(room)]);
                if data.len() > room {
                    reply.status = NtStatus::BUFFER_OVERFLOW;
                }
                Step::Reply(reply)
            }
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    )
}

/// FSCTL_SET_REPARSE_POINT.
pub(super) fn set(open: Arc<Open>, input: &[u8]) -> Result<Step, NtStatus> {
    let any = CHANGING | AccessMask::FILE_WRITE_ATTRIBUTES;
    if !AccessMask(open.access).intersects(any) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if open.state().path.is_root() {
        return Err(NtStatus::NOT_SUPPORTED);
    }
    let point = parse(input)?;
    let input = input.to_vec();
    replace(open, FsctlCode::SET_REPARSE_POINT, move |before, directory| match before {
        Some(before) if before.tag != point.tag => Err(NtStatus::IO_REPARSE_TAG_MISMATCH),
        // A directory that becomes a link remains a directory; it cannot become a special file.
        _ if directory && !matches!(point.kind, FileKind::SymbolicLink | FileKind::Regular) => {
            Err(NtStatus::IO_REPARSE_DATA_INVALID)
        }
        _ => Ok(Some((point, input))),
    })
}

/// FSCTL_DELETE_REPARSE_POINT.
pub(super) fn delete(open: Arc<Open>, input: &[u8]) -> Result<Step, NtStatus> {
    let any = CHANGING | AccessMask::FILE_WRITE_ATTRIBUTES;
    if !AccessMask(open.access).intersects(any) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    let buffer = ReparseDataBuffer::parse(input).map_err(|_| NtStatus::IO_REPARSE_DATA_INVALID)?;
    if !buffer.data.is_empty() {
        return Err(NtStatus::IO_REPARSE_DATA_INVALID);
    }
    let tag = buffer.reparse_tag.0;
    replace(open, FsctlCode::DELETE_REPARSE_POINT, move |before, _| match before {
        None => Err(NtStatus::NOT_A_REPARSE_POINT),
        Some(before) if before.tag != tag => Err(NtStatus::IO_REPARSE_TAG_MISMATCH),
        Some(_) => Ok(None),
    })
}

type Point = (ReparsePoint, Vec<u8>);

/// Replaces the reparse point of a file with the result of `next`, which gets the previous reparse point and whether the
/// file is a directory.
fn replace(
    open: Arc<Open>,
    code: FsctlCode,
    next: impl FnOnce(Option<ReparsePoint>, bool) -> Result<Option<Point>, NtStatus> + Send + 'static,
) -> Result<Step, NtStatus> {
    Ok(Step::Fs(
        FsOpKind::Stat { handle: open.handle.clone() },
        Box::new(move |_, result| {
            let stat = match result {
                Ok(FsReply::Stat(stat)) => stat,
                Ok(_) => return Step::Fail(NtStatus::INTERNAL_ERROR),
                Err(status) => return Step::Fail(status),
            };
            let point = match next(stat.reparse, stat.directory) {
                Ok(point) => point,
                Err(status) => return Step::Fail(status),
            };
            // A file with contents cannot become a reparse point: the contents would be out of reach.
            if point.is_some() && stat.end_of_file > 0 {
                return Step::Fail(NtStatus::IO_REPARSE_DATA_INVALID);
            }
            Step::Fs(
                FsOpKind::SetReparsePoint { handle: open.handle.clone(), point },
                Box::new(move |ctx, result| match result {
                    Ok(_) => {
                        open.volume.watches.modified(CompletionFilter::ATTRIBUTES, &open, ctx.server);
                        Step::Reply(ioctl_reply(code, open.id, &[]))
                    }
                    Err(status) => Step::Fail(status),
                }),
            )
        }),
    ))
}
