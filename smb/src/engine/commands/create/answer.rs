//! The answer to a CREATE ([MS-SMB2] 3.3.5.9).

use crate::engine::file::opener::Cached;
use crate::engine::open::Open;
use crate::engine::request::step::{Reply, Step};
use crate::fs::Stat;
use crate::wire::create::{CreateAction, Response, ResponseFlags};
use crate::wire::create_context::ResponseContext;
use crate::wire::{FileAttributes, FileTime};

/// The answer that gives an open to its client.
pub(crate) fn respond(
    open: &Open,
    stat: Stat,
    create_action: CreateAction,
    cached: Cached,
    mut contexts: Vec<ResponseContext<'_>>,
) -> Step {
    contexts.extend(cached.lease.map(ResponseContext::Lease));
    let stat = open.file.with_client_change_time(stat);
    let response = Response {
        oplock_level: cached.level,
        flags: ResponseFlags::empty(),
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
