//! Waits until other clients have closed the handles that they keep only for caching, before a name changes or is removed
//! ([MS-FSA] 2.1.5.15.3, 2.1.5.15.11).

use std::sync::Arc;

use crate::engine::file::state::FileState;
use crate::engine::mail::Waiter;
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Step, Wake};
use crate::fs::RelPath;
use crate::status::NtStatus;

/// Continues the request.
pub(super) type Next = Box<dyn FnOnce(&mut Ctx<'_>) -> Step + Send>;

/// Handles that clients may keep only for caching, and that a request waits for.
pub(super) enum CachedHandles {
    /// All handles of the file of `open`, except `open` itself.
    OtherOpens,
    /// All handles of another file.
    OfFile(Arc<FileState>),
    /// All handles below the directory of `open`; `true` on the first request.
    Below(RelPath, bool),
}

/// Breaks handle caching, then continues. Clients that still keep their handles have lost the right to cache them, or use
/// them.
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
