//! Waiting until others have closed the handles that they keep for the cache alone: before a name changes or goes
//! ([MS-FSA] 2.1.5.15.3, 2.1.5.15.11).

use std::sync::Arc;

use crate::engine::file::state::FileState;
use crate::engine::mail::Waiter;
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Step, Wake};
use crate::fs::RelPath;
use crate::status::NtStatus;

/// Goes on with the request.
pub(super) type Next = Box<dyn FnOnce(&mut Ctx<'_>) -> Step + Send>;

/// Handles that clients may keep for the cache alone, and that are waited for.
pub(super) enum CachedHandles {
    /// Those of the file that `open` is of, but its own.
    OtherOpens,
    /// All of another file.
    OfFile(Arc<FileState>),
    /// All below the directory that `open` is of; asked for the first time.
    Below(RelPath, bool),
}

/// Has handles closed, then goes on. Clients that keep theirs have lost the right to, or use them.
pub(super) fn once_closed(ctx: &mut Ctx<'_>, open: Arc<Open>, handles: CachedHandles, next: Next) -> Step {
    if !ctx.server.config.caching {
        return next(ctx);
    }
    let waiter = Waiter { connection: ctx.core.id, token: ctx.wake_token() };
    let waits = match &handles {
        CachedHandles::OtherOpens => open.file.break_handles(Some(open.id), waiter, ctx.server),
        CachedHandles::OfFile(file) => file.break_handles(None, waiter, ctx.server),
        CachedHandles::Below(directory, first) => {
            open.volume.files().break_handles_below(directory, *first, waiter, ctx.server)
        }
    };
    if !waits {
        return next(ctx);
    }
    Step::Park(Box::new(move |ctx, wake| {
        if wake == Wake::Ready && !open.is_closing() {
            let handles = match handles {
                CachedHandles::Below(directory, _) => CachedHandles::Below(directory, false),
                handles => handles,
            };
            return once_closed(ctx, open, handles, next);
        }
        match &handles {
            CachedHandles::OtherOpens => open.file.stop_waiting_for_break(waiter.token),
            CachedHandles::OfFile(file) => file.stop_waiting_for_break(waiter.token),
            CachedHandles::Below(..) => open.volume.files().stop_waiting_for_breaks(waiter.token),
        }
        Step::Fail(if wake == Wake::Cancelled { NtStatus::CANCELLED } else { NtStatus::FILE_CLOSED })
    }))
}
