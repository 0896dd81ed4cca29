//! CLOSE ([MS-SMB2] 3.3.5.10).

use crate::engine::file::table::LinkFate;
use crate::engine::open_end;
use crate::engine::request::step::{Ctx, Reply, Step};
use crate::fs::{FsReply, Stat};
use crate::status::NtStatus;
use crate::wire::close::{Flags, Request, Response};
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
    let ended = open_end::begin(&open, &ctx.server.creations, ctx.server);
    let removes = match ended {
        LinkFate::Unlinked { parent, stream, .. } => Some((parent, stream)),
        _ => None,
    };
    let query = request.flags.contains(Flags::POSTQUERY_ATTRIB);
    Step::Fs(
        open_end::close(&open, ended, query),
        Box::new(move |ctx, result| {
            match (&result, removes) {
                (Ok(_), Some((parent, stream))) => open_end::removed(&open, parent, stream, ctx.server),
                // [MS-FSA] 2.1.5.5: a directory that is not empty when its last open ends remains, and CLOSE succeeds.
                (Err(status), Some(_)) if *status != NtStatus::DIRECTORY_NOT_EMPTY => {
                    // The open has ended nevertheless.
                    return Step::Fail(*status);
                }
                _ => {}
            }
            let stat = match result {
                Ok(FsReply::Stat(stat)) if query => Some(open.volume.change_times.apply(stat)),
                _ => None,
            };
            Step::Reply(Reply::ok(body(stat)))
        }),
    )
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
