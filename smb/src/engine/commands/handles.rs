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

/// Whose handles are waited for.
pub(super) enum Whose {
    /// Those of the file that `open` is of, but its own.
    Others,
    /// All of another file.
    Of(Arc<FileState>),
    /// All below the directory that `open` is of; asked for the first time.
    Below(RelPath, bool),
}

/// Has handles closed, then goes on. Those who keep theirs have lost the right to, or use them.
pub(super) fn once_closed(ctx: &mut Ctx<'_>, open: Arc<Open>, whose: Whose, next: Next) -> Step {
    if !ctx.server.config.caching {
        return next(ctx);
    }
    let waiter = Waiter { connection: ctx.core.id, token: ctx.wake_token() };
    let waits = match &whose {
        Whose::Others => open.file.break_handles(Some(open.id), waiter, ctx.server),
        Whose::Of(file) => file.break_handles(None, waiter, ctx.server),
        Whose::Below(directory, first) => {
            open.volume.files().break_handles_below(directory, *first, waiter, ctx.server)
        }
    };
    if !waits {
        return next(ctx);
    }
    Step::Park(Box::new(move |ctx, wake| {
        if wake == Wake::Ready && !open.is_closing() {
            let whose = match whose {
                Whose::Below(directory, _) => Whose::Below(directory, false),
                whose => whose,
            };
            return once_closed(ctx, open, whose, next);
        }
        match &whose {
            Whose::Others => open.file.stop_waiting_for_break(waiter.token),
            Whose::Of(file) => file.stop_waiting_for_break(waiter.token),
            Whose::Below(..) => open.volume.files().stop_waiting_for_breaks(waiter.token),
        }
        Step::Fail(if wake == Wake::Cancelled { NtStatus::CANCELLED } else { NtStatus::FILE_CLOSED })
    }))
}
