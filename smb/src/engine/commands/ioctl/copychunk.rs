//! Server-side copy: FSCTL_SRV_COPYCHUNK ([MS-SMB2] 3.3.5.15.6).

use std::sync::Arc;

use super::ioctl_reply;
use crate::engine::commands::read::OFFSET_END;
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Step};
use crate::fs::{FsOpKind, FsReply};
use crate::ids::FileId;
use crate::limits;
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::fscc::fsctl::{CopyChunk, CopyChunkRequest, CopyChunkResponse, FsctlCode};

/// Identifies an open of this session in a later copy; opaque to the client. Only the session that issued it can use it.
pub(super) fn resume_key(id: FileId) -> [u8; 24] {
    let mut key = [0; 24];
    key[..8].copy_from_slice(&id.persistent.to_le_bytes());
    key[8..16].copy_from_slice(&id.volatile.to_le_bytes());
    key
}

fn open_of_key(key: &[u8; 24]) -> FileId {
    let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| key[at + i]));
    FileId { persistent: u64_at(0), volatile: u64_at(8) }
}

/// A copy in progress.
struct Copy {
    code: FsctlCode,
    source: Arc<Open>,
    target: Arc<Open>,
    /// In reverse order.
    chunks: Vec<CopyChunk>,
    /// The source's size when the copy began.
    source_end: u64,
    /// Bytes copied of the last chunk in `chunks`.
    copied: u32,
    chunks_written: u32,
    total: u32,
}

pub(super) fn handle(
    ctx: &mut Ctx<'_>,
    code: FsctlCode,
    target: Arc<Open>,
    input: &[u8],
    room: usize,
) -> Result<Step, NtStatus> {
    if room < CopyChunkResponse::LEN {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    // A chunk count above the limit is answered with the limits, even if the chunks cannot be parsed.
    let count = input.get(24..28).and_then(|c| c.try_into().ok()).map(u32::from_le_bytes);
    if count.is_some_and(|count| count > limits::COPYCHUNK_COUNT_MAX) {
        return Ok(too_much(code, target.id));
    }
    let request = CopyChunkRequest::parse(input).map_err(|_| NtStatus::INVALID_PARAMETER)?;
    let source =
        ctx.session().open(open_of_key(&request.source_key)).ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
    // The tree connects may differ, and the source may be in a snapshot.
    if source.volume.id != target.volume.id {
        return Err(NtStatus::OBJECT_NAME_NOT_FOUND);
    }
    check_access(code, &source, &target)?;
    let total = request.chunks.iter().map(|c| u64::from(c.length)).sum::<u64>();
    if total > limits::COPYCHUNK_TOTAL_BYTES_MAX.into()
        || request.chunks.iter().any(|c| c.length == 0 || c.length > limits::COPYCHUNK_CHUNK_BYTES_MAX)
    {
        return Ok(too_much(code, target.id));
    }
    let beyond = |start: u64, length: u32| start > OFFSET_END || u64::from(length) > OFFSET_END - start;
    if request.chunks.iter().any(|c| beyond(c.source_offset, c.length) || beyond(c.target_offset, c.length)) {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let mut chunks = request.chunks;
    chunks.reverse();
    let mut copy =
        Copy { code, source, target, chunks, source_end: 0, copied: 0, chunks_written: 0, total: 0 };
    let stat = FsOpKind::Stat { handle: copy.source.handle.clone() };
    Ok(Step::Fs(
        stat,
        Box::new(move |_, result| match result {
            Ok(FsReply::Stat(stat)) => {
                copy.source_end = stat.end_of_file;
                next(copy)
            }
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    ))
}

/// [MS-SMB2] 3.3.5.15.6: the target must be writable, and readable too unless COPYCHUNK_WRITE is used.
fn check_access(code: FsctlCode, source: &Open, target: &Open) -> Result<(), NtStatus> {
    let read = AccessMask::FILE_READ_DATA | AccessMask::FILE_EXECUTE;
    let write = AccessMask::FILE_WRITE_DATA | AccessMask::FILE_APPEND_DATA;
    let allowed = AccessMask(source.access).intersects(read)
        && AccessMask(target.access).intersects(write)
        && (code == FsctlCode::SRV_COPYCHUNK_WRITE
            || AccessMask(target.access).contains(AccessMask::FILE_READ_DATA));
    if !allowed {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if source.directory || target.directory {
        return Err(NtStatus::INVALID_DEVICE_REQUEST);
    }
    Ok(())
}

/// STATUS_INVALID_PARAMETER with the limits instead of counts ([MS-SMB2] 3.3.5.15.6.2).
fn too_much(code: FsctlCode, target: FileId) -> Step {
    let limits = CopyChunkResponse {
        chunks_written: limits::COPYCHUNK_COUNT_MAX,
        chunk_bytes_written: limits::COPYCHUNK_CHUNK_BYTES_MAX,
        total_bytes_written: limits::COPYCHUNK_TOTAL_BYTES_MAX,
    };
    answer(code, target, NtStatus::INVALID_PARAMETER, &limits)
}

fn answer(code: FsctlCode, target: FileId, status: NtStatus, response: &CopyChunkResponse) -> Step {
    let mut out = Vec::with_capacity(CopyChunkResponse::LEN);
    response.encode(&mut out);
    let mut reply = ioctl_reply(code, target, &out);
    reply.status = status;
    Step::Reply(reply)
}

/// Copies the remaining chunks, one operation after the other.
fn next(mut copy: Copy) -> Step {
    let Some(chunk) = copy.chunks.last().copied() else { return copy.finished(NtStatus::SUCCESS) };
    let (from, to) = (chunk.source_offset, chunk.target_offset);
    // [MS-SMB2] 3.3.5.15.6: a chunk must lie within the source, or none of it is copied. If the source is also the target,
    // previous chunks may have extended it.
    let in_itself = Arc::ptr_eq(&copy.source.file, &copy.target.file);
    if from + u64::from(chunk.length) > copy.source_end && !in_itself {
        return copy.finished(NtStatus::INVALID_VIEW_SIZE);
    }
    if copy.copied == 0
        && (copy.source.file.forbids_read(copy.source.id, from, chunk.length.into())
            || copy.target.file.forbids_write(copy.target.id, to, chunk.length.into()))
    {
        return copy.finished(NtStatus::FILE_LOCK_CONFLICT);
    }
    let op = FsOpKind::CopyRange {
        source: copy.source.handle.clone(),
        source_offset: from + u64::from(copy.copied),
        target: copy.target.handle.clone(),
        target_offset: to + u64::from(copy.copied),
        length: u64::from(chunk.length - copy.copied),
    };
    Step::Fs(
        op,
        Box::new(move |ctx, result| {
            // A failed copy may be partial.
            copy.target.contents_changed(ctx.now.instant, ctx.server);
            match result {
                Ok(FsReply::Copied(0)) => copy.finished(NtStatus::INVALID_VIEW_SIZE),
                Ok(FsReply::Copied(bytes)) => {
                    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX).min(chunk.length - copy.copied);
                    copy.copied += bytes;
                    copy.total += bytes;
                    if copy.copied == chunk.length {
                        copy.chunks.pop();
                        copy.copied = 0;
                        copy.chunks_written += 1;
                    }
                    next(copy)
                }
                Ok(_) => copy.finished(NtStatus::INTERNAL_ERROR),
                Err(status) => copy.finished(status),
            }
        }),
    )
}

impl Copy {
    /// Reports what was copied, even if an error ended the copy early.
    fn finished(self, status: NtStatus) -> Step {
        let response = CopyChunkResponse {
            chunks_written: self.chunks_written,
            chunk_bytes_written: self.copied,
            total_bytes_written: self.total,
        };
        answer(self.code, self.target.id, status, &response)
    }
}
