//! The answer to a CREATE ([MS-SMB2] 3.3.5.9).

use crate::engine::file::opener::Cached;
use crate::engine::open::Open;
use crate::engine::request::step::{Reply, Step};
use crate::fs::Stat;
use crate::status::NtStatus;
use crate::wire::create::{CreateAction, Response, ResponseFlags};
use crate::wire::create_context::ResponseContext;
use crate::wire::error::{self, ErrorContext, ErrorId, SymbolicLinkError};
use crate::wire::fscc::reparse::{ReparseDataBuffer, SymbolicLink};
use crate::wire::{Dialect, FileAttributes, FileTime};

/// The answer that returns an open to its client.
pub(crate) fn respond(
    open: &Open,
    stat: Stat,
    create_action: CreateAction,
    cached: Cached,
    mut contexts: Vec<ResponseContext<'_>>,
) -> Step {
    contexts.extend(cached.lease.map(ResponseContext::Lease));
    let stat = open.volume.change_times.apply(stat);
    let response = Response {
        oplock_level: cached.level,
        flags: if stat.reparse.is_some() { ResponseFlags::REPARSEPOINT } else { ResponseFlags::empty() },
        create_action,
        creation_time: FileTime(stat.times.creation),
        last_access_time: FileTime(stat.times.last_access),
        last_write_time: FileTime(stat.times.last_write),
        change_time: FileTime(stat.times.change),
        allocation_size: stat.allocation_size,
        end_of_file: stat.end_of_file,
        file_attributes: FileAttributes(stat.attributes),
        file_id: open.id,
        contexts,
    };
    let mut body = Vec::with_capacity(160);
    response.encode(&mut body);
    Step::Reply(Reply::ok(body))
}

/// The answer that a name is a symbolic link, with its target ([MS-SMB2] 2.2.2.2.1).
pub(super) fn stopped_on_symlink(dialect: Dialect, reparse_data: &[u8]) -> Step {
    let link = ReparseDataBuffer::parse(reparse_data).and_then(|buffer| SymbolicLink::parse(buffer.data));
    // Validated when the link was set.
    let Ok(link) = link else { return Step::Fail(NtStatus::IO_REPARSE_DATA_INVALID) };
    let mut link_error = Vec::new();
    SymbolicLinkError {
        // Clients look up one component after the other.
        unparsed_path_length: 0,
        flags: link.flags,
        substitute_name: link.substitute_name,
        print_name: link.print_name,
    }
    .encode(&mut link_error);
    let mut contexts = Vec::new();
    let response = if dialect == Dialect::SMB3_1_1 {
        let context = ErrorContext { error_id: ErrorId::DEFAULT, error_context_data: &link_error };
        ErrorContext::encode_list(&[context], &mut contexts);
        error::Response { error_context_count: 1, error_data: &contexts }
    } else {
        error::Response { error_context_count: 0, error_data: &link_error }
    };
    let mut body = Vec::new();
    response.encode(&mut body);
    Step::Reply(Reply { status: NtStatus::STOPPED_ON_SYMLINK, ..Reply::ok(body) })
}
