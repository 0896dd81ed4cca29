//! FileRenameInformation of a named stream ([MS-FSA] 2.1.5.15.11.1).

use std::sync::Arc;

use super::rename::{self, Target};
use crate::engine::commands::info::done;
use crate::engine::file::pins::Move;
use crate::engine::names::Stream;
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Step};
use crate::engine::watches::Change;
use crate::fs::{FileKey, FsOpKind, StreamName};
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::change_notify::CompletionFilter;
use crate::wire::fscc::notify::NotifyAction;

/// The new name of a stream.
struct NewName {
    /// `None` for the default data stream.
    name: Option<StreamName>,
    replace: bool,
}

/// Renames a stream.
pub(super) fn rename(ctx: &mut Ctx<'_>, open: &Arc<Open>, target: Target) -> Result<Step, NtStatus> {
    let may = AccessMask(open.access).contains(AccessMask::DELETE) && !open.volume.read_only;
    if !may || open.file.delete_pending(open.id) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    let name = match target.stream {
        // Windows opens the file for this, which the open of the stream forbids.
        _ if !target.path.is_root() => return Err(NtStatus::SHARING_VIOLATION),
        None | Some(Stream::Default) => None,
        Some(Stream::Named(name)) => Some(name),
    };
    Ok(begin(ctx, Arc::clone(open), NewName { name, replace: target.replace }))
}

/// Waits until no rename touches the file, and blocks CREATEs of it.
fn begin(ctx: &mut Ctx<'_>, open: Arc<Open>, to: NewName) -> Step {
    let waiter = rename::waiter(ctx);
    let path = open.state().path.clone();
    match Move::link(&open.volume.files, &path, waiter) {
        Some(moving) => settle(ctx, open, moving, to),
        None => rename::wait(open, waiter, move |ctx, open| begin(ctx, open, to)),
    }
}

/// Waits until no stream of the file is being opened or removed.
fn settle(ctx: &mut Ctx<'_>, open: Arc<Open>, moving: Move, to: NewName) -> Step {
    let waiter = rename::waiter(ctx);
    if !moving.is_clear(waiter) {
        return rename::wait(open, waiter, move |ctx, open| settle(ctx, open, moving, to));
    }
    let before = open.state().stream.clone();
    if before == to.name {
        return done();
    }
    // Handles of others would continue to use the old name.
    if open.file.open_count() > 1 {
        return Step::Fail(NtStatus::SHARING_VIOLATION);
    }
    let key = open.file.key();
    // Clients that have the file open rely on its contents or cache them.
    let of_file = open.volume.files().find(key.file());
    if to.name.is_none() && of_file.is_some_and(|file| file.open_count() > 0) {
        return Step::Fail(NtStatus::SHARING_VIOLATION);
    }
    let after = to.name.as_ref().map(|name| FileKey { stream: name.number(), ..key });
    if after.is_some_and(|key| open.volume.files().find(key).is_some()) {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    let NewName { name, replace } = to;
    let op = FsOpKind::RenameStream { handle: open.handle.clone(), to: name.clone(), replace };
    Step::Fs(
        op,
        Box::new(move |ctx, result| {
            if let Err(status) = result {
                return Step::Fail(status);
            }
            if let Some(after) = after {
                open.volume.files().stream_renamed(&open.file, after.stream);
                open.volume.leases.moved(key, after);
                open.state().stream.clone_from(&name);
            }
            drop(moving);
            notify(ctx, &open, before.as_ref(), name.as_ref());
            done()
        }),
    )
}

fn notify(ctx: &Ctx<'_>, open: &Open, before: Option<&StreamName>, after: Option<&StreamName>) {
    let path = open.state().path.clone();
    let filter = CompletionFilter::STREAM_NAME;
    let named = [(NotifyAction::REMOVED_STREAM, before), (NotifyAction::ADDED_STREAM, after)];
    let changes: Vec<_> = named
        .into_iter()
        .filter(|(_, stream)| stream.is_some())
        .map(|(action, stream)| Change { action, filter, path: &path, stream })
        .collect();
    open.volume.watches.notify(&changes, ctx.server);
}
