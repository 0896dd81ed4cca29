//! Control codes of files ([MS-SMB2] 3.3.5.15, [MS-FSCC] 2.3).

use std::sync::Arc;

use super::ioctl_reply;
use super::{copychunk, reparse};
use crate::engine::access::{CHANGING, DATA_CHANGING};
use crate::engine::commands::read::OFFSET_END;
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Step};
use crate::fs::{BasicInfo, FsOpKind, FsReply};
use crate::ids::FileId;
use crate::limits;
use crate::status::NtStatus;
use crate::wire::change_notify::CompletionFilter;
use crate::wire::fscc::fsctl::{
    CompressionState, DuplicateExtents, FileRange, FsctlCode, ObjectIdBuffer, ResumeKeyResponse,
    SnapshotArray, ZeroData, parse_set_sparse,
};
use crate::wire::ioctl::Request;
use crate::wire::{AccessMask, FileAttributes};

/// The size of SRV_SNAPSHOT_ARRAY without its list ([MS-SMB2] 2.2.32.2).
const SNAPSHOT_ARRAY_HEADER_BYTES: usize = 12;
/// The minimum size of a client's buffer ([MS-SMB2] 3.3.5.15.1).
const SNAPSHOT_ARRAY_BYTES_MIN: usize = 16;

pub(crate) fn handle(ctx: &mut Ctx<'_>, code: FsctlCode, request: &Request<'_>) -> Step {
    let open = match ctx.open(request.file_id) {
        Ok(o) => o,
        Err(status) => return status.into(),
    };
    file(ctx, open, code, request).unwrap_or_else(Step::Fail)
}

fn file(
    ctx: &mut Ctx<'_>,
    open: Arc<Open>,
    code: FsctlCode,
    request: &Request<'_>,
) -> Result<Step, NtStatus> {
    let (input, room) = (request.input, request.max_output_response as usize);
    let id = open.id;
    match code {
        FsctlCode::SRV_REQUEST_RESUME_KEY => {
            // [MS-SMB2] 3.3.5.15.5
            let key = ResumeKeyResponse { resume_key: copychunk::resume_key(id) };
            output(code, id, room, ResumeKeyResponse::LEN, |out| key.encode(out))
        }
        FsctlCode::SRV_COPYCHUNK | FsctlCode::SRV_COPYCHUNK_WRITE => {
            copychunk::handle(ctx, code, open, input, room)
        }
        FsctlCode::SRV_ENUMERATE_SNAPSHOTS => {
            let tokens = ctx.volume().map(|volume| volume.snapshots.tokens()).unwrap_or_default();
            snapshots(id, room, tokens)
        }
        FsctlCode::SET_SPARSE => set_sparse(open, parse_set_sparse(input)),
        FsctlCode::CREATE_OR_GET_OBJECT_ID => {
            // [MS-FSA] 2.1.5.10.1: derived from the file's identity, so it need not be stored.
            let key = open.file.key();
            let mut object_id = [0; 16];
            object_id[..8].copy_from_slice(&key.dev.to_le_bytes());
            object_id[8..].copy_from_slice(&key.ino.to_le_bytes());
            output(code, id, room, ObjectIdBuffer::LEN, |out| {
                ObjectIdBuffer { object_id, ..ObjectIdBuffer::default() }.encode(out);
            })
        }
        FsctlCode::SET_ZERO_DATA => zero(open, input),
        FsctlCode::QUERY_ALLOCATED_RANGES => allocated_ranges(open, input, room),
        FsctlCode::DUPLICATE_EXTENTS_TO_FILE => duplicate_extents(ctx, open, input),
        FsctlCode::GET_COMPRESSION => {
            // [MS-FSCC] 2.3.11: COMPRESSION_FORMAT_NONE.
            output(code, id, room, CompressionState::LEN, |out| CompressionState { state: 0 }.encode(out))
        }
        FsctlCode::SET_COMPRESSION => {
            needs(&open, CHANGING)?;
            let state = CompressionState::parse(input).map_err(|_| NtStatus::INVALID_PARAMETER)?;
            if state.state == 0 { Ok(empty(code, id)) } else { Err(NtStatus::NOT_SUPPORTED) }
        }
        FsctlCode::GET_REPARSE_POINT => Ok(reparse::get(open, room)),
        FsctlCode::SET_REPARSE_POINT => reparse::set(open, input),
        FsctlCode::DELETE_REPARSE_POINT => reparse::delete(open, input),
        // [MS-SMB2] 3.3.5.15.8: control codes that the object store does not support.
        _ => Err(NtStatus::INVALID_DEVICE_REQUEST),
    }
}

/// A reply of fixed size.
fn output(
    code: FsctlCode,
    id: FileId,
    room: usize,
    size: usize,
    encode: impl FnOnce(&mut Vec<u8>),
) -> Result<Step, NtStatus> {
    if room < size {
        // [MS-SMB2] 3.3.5.15.1, 3.3.5.15.5
        return Err(if code == FsctlCode::GET_COMPRESSION {
            NtStatus::BUFFER_TOO_SMALL
        } else {
            NtStatus::INVALID_PARAMETER
        });
    }
    let mut out = Vec::with_capacity(size);
    encode(&mut out);
    Ok(Step::Reply(ioctl_reply(code, id, &out)))
}

/// [MS-SMB2] 3.3.5.15.1
fn snapshots(id: FileId, room: usize, tokens: Vec<String>) -> Result<Step, NtStatus> {
    let code = FsctlCode::SRV_ENUMERATE_SNAPSHOTS;
    let all = SnapshotArray::complete(tokens);
    let size = SNAPSHOT_ARRAY_HEADER_BYTES + all.snapshot_array_size as usize;
    if room >= size.max(SNAPSHOT_ARRAY_BYTES_MIN) {
        return output(code, id, room, size, |out| all.encode(out));
    }
    // Only the number of snapshots, and the buffer size that they need.
    let counted = SnapshotArray { snapshots: Vec::new(), ..all };
    output(code, id, room, SNAPSHOT_ARRAY_BYTES_MIN, |out| counted.encode(out))
}

fn empty(code: FsctlCode, id: FileId) -> Step {
    Step::Reply(ioctl_reply(code, id, &[]))
}

/// Requires any of these rights.
fn needs(open: &Open, any: AccessMask) -> Result<(), NtStatus> {
    if AccessMask(open.access).intersects(any) { Ok(()) } else { Err(NtStatus::ACCESS_DENIED) }
}

/// [MS-FSA] 2.1.5.10.35: an attribute that makes clients look for holes; the underlying file systems do not need it.
fn set_sparse(open: Arc<Open>, sparse: bool) -> Result<Step, NtStatus> {
    needs(&open, DATA_CHANGING | AccessMask::FILE_WRITE_ATTRIBUTES)?;
    if open.directory {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let stat = FsOpKind::Stat { handle: open.handle.clone() };
    Ok(Step::Fs(
        stat,
        Box::new(move |_, result| {
            let stat = match result {
                Ok(FsReply::Stat(stat)) => stat,
                Ok(_) => return Step::Fail(NtStatus::INTERNAL_ERROR),
                Err(status) => return Step::Fail(status),
            };
            let before = FileAttributes(stat.attributes);
            let mut after = before;
            if sparse {
                after.insert(FileAttributes::SPARSE_FILE);
            } else {
                after.remove(FileAttributes::SPARSE_FILE);
            }
            if after == before {
                return empty(FsctlCode::SET_SPARSE, open.id);
            }
            let info = BasicInfo { attributes: Some(after.0), ..BasicInfo::default() };
            let op = FsOpKind::SetBasic { handle: open.handle.clone(), info };
            Step::Fs(
                op,
                Box::new(move |ctx, result| match result {
                    Ok(_) => {
                        open.volume.watches.modified(CompletionFilter::ATTRIBUTES, &open, ctx.server);
                        empty(FsctlCode::SET_SPARSE, open.id)
                    }
                    Err(status) => Step::Fail(status),
                }),
            )
        }),
    ))
}

/// [MS-FSA] 2.1.5.10.38
fn zero(open: Arc<Open>, input: &[u8]) -> Result<Step, NtStatus> {
    let range = ZeroData::parse(input).map_err(|_| NtStatus::INVALID_PARAMETER)?;
    if open.directory || range.file_offset > range.beyond_final_zero || range.beyond_final_zero > OFFSET_END {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    needs(&open, AccessMask::FILE_WRITE_DATA)?;
    let (offset, length) = (range.file_offset, range.beyond_final_zero - range.file_offset);
    if length == 0 {
        return Ok(empty(FsctlCode::SET_ZERO_DATA, open.id));
    }
    if open.file.forbids_write(open.id, offset, length) {
        return Err(NtStatus::FILE_LOCK_CONFLICT);
    }
    let op = FsOpKind::ZeroRange { handle: open.handle.clone(), offset, length };
    Ok(done_after_change(FsctlCode::SET_ZERO_DATA, open, op))
}

/// Returns the answer after a backend has changed the contents.
fn done_after_change(code: FsctlCode, open: Arc<Open>, op: FsOpKind) -> Step {
    Step::Fs(
        op,
        Box::new(move |ctx, result| {
            open.contents_changed(ctx.now.instant, ctx.server);
            result.map_or_else(Step::Fail, |_| empty(code, open.id))
        }),
    )
}

/// [MS-FSA] 2.1.5.10.22
fn allocated_ranges(open: Arc<Open>, input: &[u8], room: usize) -> Result<Step, NtStatus> {
    let range = FileRange::parse(input).map_err(|_| NtStatus::INVALID_PARAMETER)?;
    needs(&open, AccessMask::FILE_READ_DATA)?;
    if open.directory || range.file_offset > OFFSET_END || range.length > OFFSET_END - range.file_offset {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let limit = (room / FileRange::LEN).min(limits::ALLOCATED_RANGES_MAX);
    if range.length == 0 {
        return Ok(empty(FsctlCode::QUERY_ALLOCATED_RANGES, open.id));
    }
    let stat = FsOpKind::Stat { handle: open.handle.clone() };
    Ok(Step::Fs(
        stat,
        Box::new(move |_, result| match result {
            // A file that is not sparse counts as fully allocated.
            Ok(FsReply::Stat(stat))
                if !FileAttributes(stat.attributes).contains(FileAttributes::SPARSE_FILE) =>
            {
                let end = stat.end_of_file.min(range.file_offset + range.length);
                let data = (range.file_offset < end).then(|| (range.file_offset, end - range.file_offset));
                ranges(&open, &Vec::from_iter(data), false, limit)
            }
            Ok(FsReply::Stat(_)) => find_ranges(open, range, limit),
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    ))
}

fn find_ranges(open: Arc<Open>, range: FileRange, limit: usize) -> Step {
    let op = FsOpKind::AllocatedRanges {
        handle: open.handle.clone(),
        offset: range.file_offset,
        length: range.length,
        limit: limit.max(1),
    };
    Step::Fs(
        op,
        Box::new(move |_, result| match result {
            Ok(FsReply::Ranges(found, more)) => ranges(&open, &found, more, limit),
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    )
}

fn ranges(open: &Open, found: &[(u64, u64)], more: bool, limit: usize) -> Step {
    if !found.is_empty() && limit == 0 {
        return Step::Fail(NtStatus::BUFFER_TOO_SMALL);
    }
    let mut out = Vec::with_capacity(found.len() * FileRange::LEN);
    for &(file_offset, length) in found {
        FileRange { file_offset, length }.encode(&mut out);
    }
    let mut reply = ioctl_reply(FsctlCode::QUERY_ALLOCATED_RANGES, open.id, &out);
    if more {
        reply.status = NtStatus::BUFFER_OVERFLOW;
    }
    Step::Reply(reply)
}

/// [MS-FSA] 2.1.5.10.4
fn duplicate_extents(ctx: &mut Ctx<'_>, open: Arc<Open>, input: &[u8]) -> Result<Step, NtStatus> {
    let request = DuplicateExtents::parse(input).map_err(|_| NtStatus::INVALID_PARAMETER)?;
    needs(&open, AccessMask::FILE_WRITE_DATA)?;
    let source = ctx.session().open(request.source_file_id).ok_or(NtStatus::INVALID_HANDLE)?;
    needs(&source, AccessMask::FILE_READ_DATA)?;
    if !Arc::ptr_eq(&source.volume, &open.volume) || source.directory || open.directory {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let (from, to, length) = (request.source_file_offset, request.target_file_offset, request.byte_count);
    if [from, to].iter().any(|start| *start > OFFSET_END || length > OFFSET_END - *start) {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    if source.file.forbids_read(source.id, from, length) || open.file.forbids_write(open.id, to, length) {
        return Err(NtStatus::FILE_LOCK_CONFLICT);
    }
    if length == 0 {
        return Ok(empty(FsctlCode::DUPLICATE_EXTENTS_TO_FILE, open.id));
    }
    // [MS-FSCC] 2.3.8: overlapping ranges and named streams are not supported.
    let overlaps = Arc::ptr_eq(&source.file, &open.file) && from < to + length && to < from + length;
    if overlaps || source.is_stream() || open.is_stream() {
        return Err(NtStatus::NOT_SUPPORTED);
    }
    let stat = FsOpKind::Stat { handle: source.handle.clone() };
    Ok(Step::Fs(
        stat,
        Box::new(move |_, result| match result {
            Ok(FsReply::Stat(stat)) if from + length > stat.end_of_file => {
                Step::Fail(NtStatus::NOT_SUPPORTED)
            }
            Ok(FsReply::Stat(_)) => {
                let op = FsOpKind::CloneRange {
                    source: source.handle.clone(),
                    source_offset: from,
                    target: open.handle.clone(),
                    target_offset: to,
                    length,
                };
                done_after_change(FsctlCode::DUPLICATE_EXTENTS_TO_FILE, open, op)
            }
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    ))
}
