//! SET_INFO ([MS-SMB2] 3.3.5.21, [MS-FSA] 2.1.5.15).

mod eas;
mod rename;
mod streams;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use self::rename::Target;
use crate::engine::commands::create::ATTRIBUTES_SETTABLE;
use crate::engine::commands::handles::{self, CachedHandles};
use crate::engine::commands::info::{done, needs};
use crate::engine::commands::read::OFFSET_END;
use crate::engine::commands::security;
use crate::engine::file::links::Disposition;
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Step};
use crate::engine::watches::CONTENTS;
use crate::fs::{BasicInfo, FsOpKind, FsReply};
use crate::status::NtStatus;
use crate::wire::change_notify::CompletionFilter;
use crate::wire::create::CreateOptions;
use crate::wire::fscc::FileInformationClass as Class;
use crate::wire::fscc::file_info::{
    DispositionFlags, FileAllocationInformation, FileBasicInformation, FileDispositionInformation,
    FileDispositionInformationEx, FileEndOfFileInformation, FileModeInformation, FilePositionInformation,
};
use crate::wire::fscc::name_info::{FileRenameInformation, FileRenameInformationEx, RenameFlags};
use crate::wire::fscc::security::SecurityInformation;
use crate::wire::query_info::InfoType;
use crate::wire::set_info::Request;
use crate::wire::{AccessMask, Fault, FileAttributes, FileTime, Malformed};

/// Bits of FileModeInformation that can be set ([MS-FSCC] 2.4.31).
const MODE_SETTABLE: CreateOptions = CreateOptions::WRITE_THROUGH
    .union(CreateOptions::SEQUENTIAL_ONLY)
    .union(CreateOptions::NO_INTERMEDIATE_BUFFERING)
    .union(CreateOptions::SYNCHRONOUS_IO_ALERT)
    .union(CreateOptions::SYNCHRONOUS_IO_NONALERT);

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let frame = Arc::clone(&ctx.request.frame);
    let message = frame.bytes().get(ctx.request.range.clone()).unwrap_or_default();
    let request = match Request::parse(message) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    let open = match ctx.open(request.file_id) {
        Ok(o) => o,
        Err(status) => return status.into(),
    };
    let step = match request.info_type {
        InfoType::FILE => file(ctx, &open, Class(request.file_info_class), request.buffer),
        // Only an administrator sets label, quota and object id.
        InfoType::FILESYSTEM => Err(NtStatus::ACCESS_DENIED),
        InfoType::SECURITY => {
            security::set(&open, SecurityInformation(request.additional_information), request.buffer)
        }
        InfoType::QUOTA => Err(NtStatus::NOT_SUPPORTED),
        _ => Err(NtStatus::INVALID_PARAMETER),
    };
    step.unwrap_or_else(Step::Fail)
}

/// Returns the empty answer after a backend has changed the contents.
fn done_after_change(open: &Arc<Open>, op: FsOpKind) -> Step {
    let open = Arc::clone(open);
    Step::Fs(
        op,
        Box::new(move |ctx, result| {
            open.file.data_changed(open.id, ctx.server);
            open.volume.watches.modified(CONTENTS, &open, ctx.server);
            result.map_or_else(Step::Fail, |_| done())
        }),
    )
}

/// Maps parse errors to statuses: a structure that is too short is a length mismatch ([MS-SMB2] 3.3.5.21.1).
fn parsed<T>(result: Result<T, Malformed>) -> Result<T, NtStatus> {
    result.map_err(|e| match e.fault {
        Fault::Truncated => NtStatus::INFO_LENGTH_MISMATCH,
        Fault::Surrogate => NtStatus::OBJECT_NAME_INVALID,
        _ => NtStatus::INVALID_PARAMETER,
    })
}

fn file(ctx: &mut Ctx<'_>, open: &Arc<Open>, class: Class, buffer: &[u8]) -> Result<Step, NtStatus> {
    match class {
        Class::FILE_BASIC_INFORMATION => basic(open, parsed(FileBasicInformation::parse(buffer))?),
        Class::FILE_END_OF_FILE_INFORMATION => {
            let size = parsed(FileEndOfFileInformation::parse(buffer))?.end_of_file;
            check_size(open, size)?;
            Ok(done_after_change(open, FsOpKind::SetEndOfFile { handle: open.handle.clone(), size }))
        }
        Class::FILE_ALLOCATION_INFORMATION => {
            let size = parsed(FileAllocationInformation::parse(buffer))?.allocation_size;
            check_size(open, size)?;
            Ok(done_after_change(open, FsOpKind::SetAllocation { handle: open.handle.clone(), size }))
        }
        Class::FILE_DISPOSITION_INFORMATION => {
            let delete = parsed(FileDispositionInformation::parse(buffer))?.delete_pending;
            let disposition = if delete { Disposition::Delete } else { Disposition::Keep };
            dispose(ctx, open, disposition, false)
        }
        Class::FILE_DISPOSITION_INFORMATION_EX => {
            let flags = parsed(FileDispositionInformationEx::parse(buffer))?.flags;
            // Delete-on-close is requested in CREATE.
            if flags.contains(DispositionFlags::ON_CLOSE) {
                return Err(NtStatus::NOT_SUPPORTED);
            }
            let ignore_readonly = flags.contains(DispositionFlags::IGNORE_READONLY_ATTRIBUTE);
            let disposition = if !flags.contains(DispositionFlags::DELETE) {
                Disposition::Keep
            } else if flags.contains(DispositionFlags::POSIX_SEMANTICS) {
                Disposition::DeleteWith(open.id)
            } else {
                Disposition::Delete
            };
            dispose(ctx, open, disposition, ignore_readonly)
        }
        Class::FILE_RENAME_INFORMATION => {
            let info = parsed(FileRenameInformation::parse(buffer))?;
            let replace = info.replace_if_exists;
            rename(ctx, open, Target::new(open, &info.file_name, info.root_directory, replace)?)
        }
        Class::FILE_RENAME_INFORMATION_EX => {
            let info = parsed(FileRenameInformationEx::parse(buffer))?;
            let replace = info.flags.contains(RenameFlags::REPLACE_IF_EXISTS);
            rename(ctx, open, Target::new(open, &info.file_name, info.root_directory, replace)?)
        }
        Class::FILE_LINK_INFORMATION => {
            let info = parsed(FileRenameInformation::parse(buffer))?;
            rename::link(
                ctx,
                open,
                Target::new(open, &info.file_name, info.root_directory, info.replace_if_exists)?,
            )
        }
        Class::FILE_POSITION_INFORMATION => {
            let position = parsed(FilePositionInformation::parse(buffer))?.current_byte_offset;
            if position > OFFSET_END {
                return Err(NtStatus::INVALID_PARAMETER);
            }
            open.position.store(position, Ordering::Relaxed);
            Ok(done())
        }
        Class::FILE_MODE_INFORMATION => {
            let mode = parsed(FileModeInformation::parse(buffer))?.mode;
            if !mode.without(MODE_SETTABLE).is_empty() {
                return Err(NtStatus::INVALID_PARAMETER);
            }
            open.state().mode = mode.0;
            Ok(done())
        }
        Class::FILE_FULL_EA_INFORMATION => eas::set(open, buffer),
        // [MS-FSA] 2.1.5.15.15: a privilege that no user of a volume has. Short names are made by the server and cannot be set.
        Class::FILE_VALID_DATA_LENGTH_INFORMATION | Class::FILE_SHORT_NAME_INFORMATION => {
            Err(NtStatus::PRIVILEGE_NOT_HELD)
        }
        Class::FILE_PIPE_INFORMATION | Class::FILE_OBJECT_ID_INFORMATION | Class::FILE_QUOTA_INFORMATION => {
            Err(NtStatus::NOT_SUPPORTED)
        }
        _ => Err(NtStatus::INVALID_INFO_CLASS),
    }
}

/// A file is renamed within its volume, a named stream within its file.
fn rename(ctx: &mut Ctx<'_>, open: &Arc<Open>, target: Target) -> Result<Step, NtStatus> {
    if open.is_stream() { streams::rename(ctx, open, target) } else { rename::rename(ctx, open, target) }
}

/// [MS-FSA] 2.1.5.15.2
fn basic(open: &Arc<Open>, info: FileBasicInformation) -> Result<Step, NtStatus> {
    needs(open, AccessMask::FILE_WRITE_ATTRIBUTES)?;
    let attributes = info.file_attributes;
    if attributes.contains(FileAttributes::DIRECTORY) && !open.directory
        || attributes.contains(FileAttributes::TEMPORARY) && open.directory
    {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    // Zero leaves a time unchanged. The other values say whether the server continues to update it, which it always does
    // here.
    let time = |time: FileTime| match time {
        FileTime::UNCHANGED | FileTime::FREEZE | FileTime::THAW => Ok(None),
        FileTime(t) if t > i64::MAX as u64 => Err(NtStatus::INVALID_PARAMETER),
        FileTime(t) => Ok(Some(t)),
    };
    let info = BasicInfo {
        creation: time(info.creation_time)?,
        last_access: time(info.last_access_time)?,
        last_write: time(info.last_write_time)?,
        change: time(info.change_time)?,
        // Zero leaves them unchanged, NORMAL clears them.
        attributes: (!attributes.is_empty()).then(|| match attributes & ATTRIBUTES_SETTABLE {
            FileAttributes(0) => FileAttributes::NORMAL.0,
            set => set.0,
        }),
    };
    if info == BasicInfo::default() {
        return Ok(done());
    }
    let open = Arc::clone(open);
    if info.attributes.is_none() {
        return Ok(set_basic(open, info));
    }
    // This request cannot change SPARSE, which describes the file itself.
    let stat = FsOpKind::Stat { handle: open.handle.clone() };
    Ok(Step::Fs(
        stat,
        Box::new(move |_, result| match result {
            Ok(FsReply::Stat(stat)) => {
                let sparse = FileAttributes(stat.attributes) & FileAttributes::SPARSE_FILE;
                let attributes = info.attributes.map(|a| (FileAttributes(a) | sparse).0);
                set_basic(open, BasicInfo { attributes, ..info })
            }
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    ))
}

/// The changes that watchers can be notified of.
fn watched(info: &BasicInfo) -> CompletionFilter {
    let all = [
        (info.creation.is_some(), CompletionFilter::CREATION),
        (info.last_access.is_some(), CompletionFilter::LAST_ACCESS),
        (info.last_write.is_some(), CompletionFilter::LAST_WRITE),
        (info.attributes.is_some(), CompletionFilter::ATTRIBUTES),
    ];
    all.into_iter().filter(|(set, _)| *set).fold(CompletionFilter::empty(), |sum, (_, one)| sum | one)
}

fn set_basic(open: Arc<Open>, info: BasicInfo) -> Step {
    let set = FsOpKind::SetBasic { handle: open.handle.clone(), info };
    Step::Fs(
        set,
        Box::new(move |ctx, result| {
            if let Err(status) = result {
                return Step::Fail(status);
            }
            if open.directory {
                // Clients that cache the directory cache its attributes, too.
                open.file.data_changed(open.id, ctx.server);
            }
            open.volume.watches.modified(watched(&info), &open, ctx.server);
            match info.change {
                Some(change_time) => keep_change_time(open, change_time),
                None => done(),
            }
        }),
    )
}

fn keep_change_time(open: Arc<Open>, change_time: u64) -> Step {
    Step::Fs(
        FsOpKind::Stat { handle: open.handle.clone() },
        Box::new(move |_, result| {
            if let Ok(FsReply::Stat(stat)) = result {
                open.volume.change_times.set(&stat, change_time);
            }
            done()
        }),
    )
}

/// [MS-FSA] 2.1.5.15.1, 2.1.5.15.4
fn check_size(open: &Open, size: u64) -> Result<(), NtStatus> {
    if open.directory || size > OFFSET_END {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    needs(open, AccessMask::FILE_WRITE_DATA)
}

/// [MS-FSA] 2.1.5.15.3
fn dispose(
    ctx: &mut Ctx<'_>,
    open: &Arc<Open>,
    disposition: Disposition,
    ignore_readonly: bool,
) -> Result<Step, NtStatus> {
    needs(open, AccessMask::DELETE)?;
    if disposition == Disposition::Keep {
        open.file.set_delete_pending(open, disposition)?;
        return Ok(done());
    }
    if open.state().path.is_root() {
        return Err(NtStatus::CANNOT_DELETE);
    }
    let to_go = Arc::clone(open);
    let next = Box::new(move |_: &mut Ctx<'_>| delete_later(to_go, disposition, ignore_readonly));
    Ok(handles::once_closed(ctx, Arc::clone(open), CachedHandles::OtherOpens, next))
}

fn delete_later(open: Arc<Open>, disposition: Disposition, ignore_readonly: bool) -> Step {
    let op = if open.directory {
        FsOpKind::CheckEmpty { handle: open.handle.clone() }
    } else {
        FsOpKind::Stat { handle: open.handle.clone() }
    };
    Step::Fs(
        op,
        Box::new(move |ctx, result| match result {
            Ok(FsReply::Stat(stat))
                if FileAttributes(stat.attributes).contains(FileAttributes::READONLY) && !ignore_readonly =>
            {
                Step::Fail(NtStatus::CANNOT_DELETE)
            }
            Ok(_) => {
                // It may have been closed in the meantime.
                if let Err(status) = open.file.set_delete_pending(&open, disposition) {
                    return Step::Fail(status);
                }
                if open.directory {
                    let path = open.state().path.clone();
                    open.volume.watches.deleted(&path, ctx.server);
                }
                done()
            }
            Err(status) => Step::Fail(status),
        }),
    )
}
