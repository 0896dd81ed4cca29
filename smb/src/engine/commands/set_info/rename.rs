//! New names: FileRenameInformation and FileLinkInformation ([MS-FSA] 2.1.5.15.11, 2.1.5.15.6).

use std::sync::Arc;

use crate::engine::commands::handles::{self, CachedHandles};
use crate::engine::commands::info::done;
use crate::engine::file::local_open::LocalOpen;
use crate::engine::file::pins::Move;
use crate::engine::file::state::FileState;
use crate::engine::mail::Waiter;
use crate::engine::names::{self, Stream};
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Step, Wake};
use crate::engine::watches::{Change, name_of};
use crate::fs::{FsOpKind, FsReply, FsResult, RelPath};
use crate::status::NtStatus;
use crate::wire::change_notify::CompletionFilter;
use crate::wire::fscc::notify::NotifyAction;
use crate::wire::{AccessMask, ShareAccess};

/// The destination of a rename or a link.
pub(super) struct Target {
    pub(super) path: RelPath,
    /// Whether the name ended in `\`.
    directory: bool,
    pub(super) replace: bool,
    /// The named stream, if any. If the path is empty, the open is of a stream, and this is a stream of the same file.
    pub(super) stream: Option<Stream>,
}

impl Target {
    pub(super) fn new(open: &Open, name: &str, root_directory: u64, replace: bool) -> Result<Self, NtStatus> {
        // [MS-FSCC] 2.4.42.2: names are relative to the share's root, so RootDirectory is 0.
        if root_directory != 0 || name.is_empty() {
            return Err(NtStatus::INVALID_PARAMETER);
        }
        if let Some(stream) = name.strip_prefix(':').filter(|_| open.is_stream()) {
            let stream = Some(names::parse_stream(stream)?);
            return Ok(Self { path: RelPath::root(), directory: false, replace, stream });
        }
        let name = if open.posix { names::parse_posix(name)? } else { names::parse(name)? };
        let stream = name.stream.filter(|stream| *stream != Stream::Default);
        Ok(Self { path: name.path, directory: name.directory, replace, stream })
    }
}

/// Renames a file.
pub(super) fn rename(ctx: &mut Ctx<'_>, open: &Arc<Open>, target: Target) -> Result<Step, NtStatus> {
    if !AccessMask(open.access).contains(AccessMask::DELETE) || open.volume.read_only {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if target.stream.is_some() {
        return Err(NtStatus::OBJECT_NAME_INVALID);
    }
    let from = open.state().path.clone();
    if from.is_root() || target.path.is_root() || open.file.delete_pending(open.id) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if target.directory && !open.directory {
        return Err(NtStatus::OBJECT_NAME_INVALID);
    }
    // [MS-FSA] 2.1.5.15.11: clients that keep a handle only for caching close it, even if the name does not change.
    let moved = Arc::clone(open);
    let next = Box::new(move |ctx: &mut Ctx<'_>| {
        if from == target.path {
            return done();
        }
        if !moved.directory {
            return begin(ctx, moved, Kind::Rename, target);
        }
        let open = Arc::clone(&moved);
        let next = Box::new(move |ctx: &mut Ctx<'_>| begin(ctx, moved, Kind::Rename, target));
        handles::once_closed(ctx, open, CachedHandles::Below(from, true), next)
    });
    Ok(handles::once_closed(ctx, Arc::clone(open), CachedHandles::OtherOpens, next))
}

/// How a file gets a name.
#[derive(Clone, Copy)]
enum Kind {
    Rename,
    /// Keeps the old name.
    Link,
}

pub(super) fn waiter(ctx: &mut Ctx<'_>) -> Waiter {
    Waiter { connection: ctx.core.id, token: ctx.wake_token() }
}

/// Waits until no other rename touches these names.
fn begin(ctx: &mut Ctx<'_>, open: Arc<Open>, kind: Kind, target: Target) -> Step {
    let waiter = waiter(ctx);
    let moving = match kind {
        Kind::Rename => Move::rename(&open.volume.files, || open.state().path.clone(), &target.path, waiter),
        Kind::Link => Move::link(&open.volume.files, &target.path, waiter),
    };
    match moving {
        Some(moving) => settle(ctx, open, kind, moving, target),
        None => wait(open, waiter, move |ctx, open| begin(ctx, open, kind, target)),
    }
}

/// Waits until nothing at or below these names is being opened or removed.
fn settle(ctx: &mut Ctx<'_>, open: Arc<Open>, kind: Kind, moving: Move, target: Target) -> Step {
    let waiter = waiter(ctx);
    if !moving.is_clear(waiter) {
        return wait(open, waiter, move |ctx, open| settle(ctx, open, kind, moving, target));
    }
    if open.file.delete_pending(open.id) {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    match kind {
        Kind::Rename => clear(open, moving, target),
        Kind::Link => add_link(open, moving, target),
    }
}

pub(super) fn wait(
    open: Arc<Open>,
    waiter: Waiter,
    next: impl FnOnce(&mut Ctx<'_>, Arc<Open>) -> Step + Send + 'static,
) -> Step {
    Step::Park(Box::new(move |ctx, wake| {
        if wake == Wake::Ready && !open.is_closing() {
            return next(ctx, open);
        }
        open.volume.files().stop_waiting_for_paths(waiter.token);
        Step::Fail(if wake == Wake::Cancelled { NtStatus::CANCELLED } else { NtStatus::FILE_CLOSED })
    }))
}

fn clear(open: Arc<Open>, moving: Move, target: Target) -> Step {
    // Another rename has already given it this name.
    if moving.from() == moving.to() {
        return done();
    }
    // [MS-FSA] 2.1.5.15.11: a directory with open files in it cannot be renamed.
    if open.directory && open.volume.files().any_open_below(moving.from()) {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    // Nor can a file with open streams.
    if open.file.has_open_streams() {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    let parent = FsOpKind::StatPath { volume: open.volume.backend.clone(), path: moving.to().parent() };
    Step::Fs(parent, Box::new(move |ctx, result| with_parent(ctx, open, moving, target, result)))
}

/// Continues with the stat of the target's directory: all its opens must share it with an opener that adds a file.
fn with_parent(ctx: &mut Ctx<'_>, open: Arc<Open>, moving: Move, target: Target, result: FsResult) -> Step {
    let parent = match result {
        Ok(FsReply::Stat(stat)) if !stat.directory => return Step::Fail(NtStatus::OBJECT_PATH_NOT_FOUND),
        Ok(FsReply::Stat(stat)) => open.volume.files().find(stat.key),
        Ok(_) => return Step::Fail(NtStatus::INTERNAL_ERROR),
        Err(NtStatus::OBJECT_NAME_NOT_FOUND) => return Step::Fail(NtStatus::OBJECT_PATH_NOT_FOUND),
        Err(status) => return Step::Fail(status),
    };
    let tolerates = |directory: &FileState| {
        directory.tolerates(AccessMask::FILE_WRITE_DATA, ShareAccess::READ | ShareAccess::WRITE)
    };
    let Some(directory) = parent.filter(|directory| !tolerates(directory)) else {
        return with_room(open, moving, target);
    };
    // Clients may have it open only for caching.
    let handles = CachedHandles::OfFile(Arc::clone(&directory));
    let moved = Arc::clone(&open);
    let next = Box::new(move |_: &mut Ctx<'_>| {
        if tolerates(&directory) {
            with_room(moved, moving, target)
        } else {
            Step::Fail(NtStatus::SHARING_VIOLATION)
        }
    });
    handles::once_closed(ctx, open, handles, next)
}

/// Continues once a file can be added to the target's directory.
fn with_room(open: Arc<Open>, moving: Move, target: Target) -> Step {
    if !target.replace {
        return carry_out(open, moving, target);
    }
    let existing = FsOpKind::StatPath { volume: open.volume.backend.clone(), path: target.path.clone() };
    Step::Fs(
        existing,
        Box::new(move |ctx, result| {
            let replaced = match &result {
                Ok(FsReply::Stat(stat)) => open.volume.files().find(stat.key),
                _ => None,
            };
            let moved = Arc::clone(&open);
            let next = move |_: &mut Ctx<'_>| match may_replace(&moved, &target.path, result) {
                Ok(()) => carry_out(moved, moving, target),
                Err(status) => Step::Fail(status),
            };
            match replaced {
                Some(file) => handles::once_closed(ctx, open, CachedHandles::OfFile(file), Box::new(next)),
                None => next(ctx),
            }
        }),
    )
}

/// Whether a file with the target's name may be replaced. Windows refuses if it is open at all; here it is enough that all
/// its opens share deletion, as clients with POSIX semantics do (docs/reference/spec-exceptions.md).
fn may_replace(open: &Open, path: &RelPath, result: FsResult) -> Result<(), NtStatus> {
    let stat = match result {
        Ok(FsReply::Stat(stat)) => stat,
        Ok(_) => return Err(NtStatus::INTERNAL_ERROR),
        Err(NtStatus::OBJECT_NAME_NOT_FOUND | NtStatus::OBJECT_PATH_NOT_FOUND) => return Ok(()),
        Err(status) => return Err(status),
    };
    if stat.directory {
        return Err(NtStatus::ACCESS_DENIED);
    }
    let attributes = crate::wire::FileAttributes(stat.attributes);
    if attributes.contains(crate::wire::FileAttributes::READONLY) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    match open.volume.files().find(stat.key) {
        Some(file)
            if file.delete_pending_at(path) || !file.shares_delete(open.id) || file.has_open_streams() =>
        {
            Err(NtStatus::ACCESS_DENIED)
        }
        _ => Ok(()),
    }
}

fn carry_out(open: Arc<Open>, moving: Move, target: Target) -> Step {
    Step::Fs(
        moving.operation(&open.handle, target.replace),
        Box::new(move |ctx, result| match result {
            Ok(_) => {
                open.file.renamed(moving.from(), moving.to(), &open.handle);
                notify(ctx, &open, moving.from(), moving.to());
                done()
            }
            Err(status) => Step::Fail(status),
        }),
    )
}

/// [MS-FSA] 2.1.5.15.11: watching clients get both names together.
fn notify(ctx: &Ctx<'_>, open: &Open, from: &RelPath, to: &RelPath) {
    let watches = &open.volume.watches;
    let parent = open.parent_lease_key();
    if open.directory {
        watches.moved(from, to);
    }
    let (left, came) = if from.parent() == to.parent() {
        (NotifyAction::RENAMED_OLD_NAME, NotifyAction::RENAMED_NEW_NAME)
    } else {
        (NotifyAction::REMOVED, NotifyAction::ADDED)
    };
    let filter = name_of(open.directory);
    let change = |action, filter, path| Change { action, filter, path, stream: None };
    let names = [change(left, filter, from), change(came, filter, to)];
    if open.directory {
        return watches.report(&names, parent, ctx.server);
    }
    // Not in the specification: Windows reports this for files, too.
    let filter = CompletionFilter::ATTRIBUTES | CompletionFilter::CREATION;
    let [left, came] = names;
    let modified = change(NotifyAction::MODIFIED, filter, to);
    watches.report(&[left, came, modified], parent, ctx.server);
}

/// Gives a file an additional name.
pub(super) fn link(ctx: &mut Ctx<'_>, open: &Arc<Open>, target: Target) -> Result<Step, NtStatus> {
    if open.volume.read_only {
        return Err(NtStatus::MEDIA_WRITE_PROTECTED);
    }
    if open.directory {
        return Err(NtStatus::FILE_IS_A_DIRECTORY);
    }
    if open.is_stream() || target.stream.is_some() {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    if open.file.delete_pending(open.id) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    Ok(begin(ctx, Arc::clone(open), Kind::Link, target))
}

fn add_link(open: Arc<Open>, moving: Move, target: Target) -> Step {
    let existing = FsOpKind::StatPath { volume: open.volume.backend.clone(), path: target.path.clone() };
    Step::Fs(
        existing,
        Box::new(move |_, result| {
            if target.replace
                && let Err(status) = may_replace(&open, &target.path, result)
            {
                return Step::Fail(status);
            }
            let Target { path: to, replace, .. } = target;
            Step::Fs(
                FsOpKind::Link { handle: open.handle.clone(), to: to.clone(), replace },
                Box::new(move |ctx, result| match result {
                    Ok(_) => {
                        drop(moving);
                        let (action, filter) = (NotifyAction::ADDED, CompletionFilter::FILE_NAME);
                        let added = Change { action, filter, path: &to, stream: None };
                        open.volume.watches.report(&[added], open.parent_lease_key(), ctx.server);
                        done()
                    }
                    Err(status) => Step::Fail(status),
                }),
            )
        }),
    )
}
