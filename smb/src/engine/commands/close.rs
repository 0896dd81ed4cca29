//! CLOSE ([MS-SMB2] 3.3.5.10) and every other end of an open.

use crate::engine::core::Core;
use crate::engine::file_table::Ended;
use crate::engine::open::Open;
use crate::engine::server::Server;
use crate::engine::step::{Ctx, Reply, Step};
use crate::engine::watches::name_of;
use crate::fs::{FsOpKind, FsReply, Stat};
use crate::status::NtStatus;
use crate::wire::close::{Flags, Request, Response};
use crate::wire::fscc::notify::NotifyAction;
use crate::wire::{FileAttributes, FileTime};

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let request = match Request::parse(ctx.request.message()) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    let open = match ctx.open(request.file_id) {
        Ok(o) => o,
        Err(status) => return status.into(),
    };
    if !open.begin_close() {
        return Step::Fail(NtStatus::FILE_CLOSED);
    }
    ctx.session().remove_open(open.id);
    let ended = open.volume.files().leave(&open, ctx.server);
    watched_no_more(ctx.server, &open, &ended);
    let removes = matches!(ended, Ended::Goes(..));
    let query = request.flags.contains(Flags::POSTQUERY_ATTRIB);
    Step::Fs(
        close(&open, ended, query),
        Box::new(move |ctx, result| {
            match &result {
                Ok(_) if removes => removed(ctx.server, &open),
                // [MS-FSA] 2.1.5.5: a directory that is not empty when its last open ends stays, and CLOSE succeeds.
                Err(status) if removes && *status != NtStatus::DIRECTORY_NOT_EMPTY => {
                    // The open has ended all the same.
                    return Step::Fail(*status);
                }
                _ => {}
            }
            let stat = match result {
                Ok(FsReply::Stat(stat)) if query => Some(open.file.with_client_change_time(stat)),
                _ => None,
            };
            Step::Reply(Reply::ok(body(stat)))
        }),
    )
}

fn close(open: &Open, ended: Ended, stat: bool) -> FsOpKind {
    match ended {
        Ended::Goes(handle, unlink) => FsOpKind::Close { handle, unlink: Some(unlink), stat },
        Ended::Stays | Ended::Doomed => FsOpKind::Close { handle: open.handle.clone(), unlink: None, stat },
    }
}

/// [MS-FSA] 2.1.5.5: what an end means for who watches the directory that was open, be it by this open or by another one.
fn watched_no_more(server: &Server, open: &Open, ended: &Ended) {
    if !open.directory {
        return;
    }
    open.volume.watches.closed(open.id, server);
    if matches!(ended, Ended::Doomed) {
        let path = open.state().path.clone();
        open.volume.watches.deleted(&path, server);
    }
}

fn removed(server: &Server, open: &Open) {
    open.volume.watches.changed(NotifyAction::REMOVED, name_of(open.directory), open, server);
}

fn body(stat: Option<Stat>) -> Vec<u8> {
    let response = stat.map_or_else(Response::default, |stat| Response {
        flags: Flags::POSTQUERY_ATTRIB,
        creation_time: FileTime(stat.times.creation),
        last_access_time: FileTime(stat.times.last_access),
        last_write_time: FileTime(stat.times.last_write),
        change_time: FileTime(stat.times.change),
        allocation_size: stat.allocation_size,
        end_of_file: stat.end_of_file,
        file_attributes: FileAttributes(stat.attributes),
    });
    let mut body = Vec::with_capacity(60);
    response.encode(&mut body);
    body
}

/// Ends an open that its owner lost: with its tree connect, its session or its connection. The caller has won
/// [`Open::begin_close`] and removed it from its session.
pub(crate) fn close_open(core: &mut Core, server: &Server, open: &Open) {
    core.background(end_open(server, open));
}

/// As [`close_open`]; what a backend has to do then.
pub(crate) fn end_open(server: &Server, open: &Open) -> FsOpKind {
    let ended = open.volume.files().leave(open, server);
    watched_no_more(server, open, &ended);
    if matches!(ended, Ended::Goes(..)) {
        removed(server, open);
    }
    close(open, ended, false)
}
