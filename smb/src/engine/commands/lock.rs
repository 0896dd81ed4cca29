//! LOCK ([MS-SMB2] 3.3.5.14, [MS-FSA] 2.1.5.8, 2.1.5.9).

use std::sync::Arc;

use crate::engine::file::locks::LockRange;
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Reply, Step, Wake};
use crate::limits;
use crate::status::NtStatus;
use crate::wire::Capabilities;
use crate::wire::lock::{LockElement, LockFlags, Request, Response};

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let request = match Request::parse(ctx.request.message()) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    // [MS-SMB2] 3.3.5.14
    let Some(first) = request.locks.first().copied() else { return NtStatus::INVALID_PARAMETER.into() };
    if request.locks.len() > limits::LOCKS_PER_REQUEST_MAX {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    // [MS-SMB2] 3.3.5.2.9 permits every LOCK; Windows and Samba only permit unlocks.
    let expired = ctx.request.session.as_ref().is_some_and(|session| session.is_expired(ctx.now.instant));
    if expired && !first.flags.contains(LockFlags::UNLOCK) {
        return Step::Fail(NtStatus::NETWORK_SESSION_EXPIRED);
    }
    let open = match ctx.open(request.file_id) {
        Ok(o) => o,
        Err(status) => return status.into(),
    };
    if open.directory {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    let sequence = Sequence::of(ctx, &request);
    if let Some(sequence) = sequence
        && sequence.replayed(&open)
    {
        return done();
    }
    // [MS-FSA] 2.1.5.8, 2.1.5.9: locked ranges are not read from a cache.
    open.file.data_changed(open.id, ctx.server);
    if first.flags.contains(LockFlags::UNLOCK) {
        match unlock(ctx, &open, &request.locks) {
            Ok(()) => granted(&open, sequence),
            Err(status) => status.into(),
        }
    } else {
        lock(ctx, &open, &request.locks, sequence)
    }
}

/// The LockSequence of a request, by which a replay is detected ([MS-SMB2] 3.3.5.14).
#[derive(Clone, Copy)]
struct Sequence {
    index: usize,
    number: u8,
}

impl Sequence {
    /// `None` if the client does not number its requests, or does not replay them to this server.
    fn of(ctx: &Ctx<'_>, request: &Request) -> Option<Self> {
        let negotiated = ctx.core.negotiated.as_ref()?;
        let replays = ctx.core.is_smb3() && negotiated.capabilities.contains(Capabilities::MULTI_CHANNEL);
        let index = request.lock_sequence_index() as usize;
        (replays && (1..=64).contains(&index)).then(|| Self { index, number: request.lock_sequence_number() })
    }

    /// Whether it was already answered with success. If not, its entry is invalid from now on.
    fn replayed(self, open: &Open) -> bool {
        let entry = &mut open.state().lock_sequence[self.index];
        let same = *entry == self.number;
        if !same {
            *entry = 0xff;
        }
        same
    }
}

fn granted(open: &Open, sequence: Option<Sequence>) -> Step {
    if let Some(sequence) = sequence {
        open.state().lock_sequence[sequence.index] = sequence.number;
    }
    done()
}

fn done() -> Step {
    let mut body = Vec::with_capacity(4);
    Response.encode(&mut body);
    Step::Reply(Reply::ok(body))
}

/// [MS-SMB2] 3.3.5.14.1: one after the other; ranges that were released before an error stay released.
fn unlock(ctx: &mut Ctx<'_>, open: &Open, elements: &[LockElement]) -> Result<(), NtStatus> {
    let to_unlock = elements.iter().take_while(|element| element.flags == LockFlags::UNLOCK);
    let count = to_unlock.clone().count();
    if count > 0 && !open.file.unlock(open.id, to_unlock.map(|e| (e.offset, e.length)), ctx.server) {
        return Err(NtStatus::RANGE_NOT_LOCKED);
    }
    if count < elements.len() { Err(NtStatus::INVALID_PARAMETER) } else { Ok(()) }
}

/// [MS-SMB2] 3.3.5.14.2: locks all ranges or none.
fn lock(ctx: &mut Ctx<'_>, open: &Arc<Open>, elements: &[LockElement], sequence: Option<Sequence>) -> Step {
    let ranges: Vec<LockRange> = match elements.iter().map(range).collect() {
        Ok(r) => r,
        Err(status) => return Step::Fail(status),
    };
    let immediately = |e: &LockElement| e.flags.contains(LockFlags::FAIL_IMMEDIATELY);
    // A request can only wait for a single range.
    if elements.len() > 1 && !elements.iter().all(immediately) {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    // [MS-FSA] 2.1.5.8: a range ends with the last byte that can be addressed.
    if ranges.iter().any(|r| r.length > 0 && r.offset.checked_add(r.length - 1).is_none()) {
        return Step::Fail(NtStatus::INVALID_LOCK_RANGE);
    }
    match (elements, ranges.as_slice()) {
        ([element], [range]) if !immediately(element) => wait(ctx, Arc::clone(open), *range, sequence),
        _ => match open.file.lock(open.id, &ranges, &open.volume.used.locks) {
            Ok(()) => granted(open, sequence),
            Err(status) => Step::Fail(status),
        },
    }
}

fn range(element: &LockElement) -> Result<LockRange, NtStatus> {
    let exclusive = match element.flags.without(LockFlags::FAIL_IMMEDIATELY) {
        LockFlags::SHARED_LOCK => false,
        LockFlags::EXCLUSIVE_LOCK => true,
        _ => return Err(NtStatus::INVALID_PARAMETER),
    };
    Ok(LockRange { offset: element.offset, length: element.length, exclusive })
}

/// Takes the range, immediately or once it is free.
fn wait(ctx: &mut Ctx<'_>, open: Arc<Open>, range: LockRange, sequence: Option<Sequence>) -> Step {
    let token = ctx.wake_token();
    match open.file.lock_or_wait(open.id, range, &open.volume.used.locks, ctx.core.id, token) {
        Ok(true) => granted(&open, sequence),
        Ok(false) => Step::Park(Box::new(move |ctx, wake| match wake {
            Wake::Cancelled => {
                open.file.stop_waiting(token, ctx.server);
                Step::Fail(NtStatus::CANCELLED)
            }
            // A disconnected open, or one that the client has reclaimed, takes no lock for an earlier session.
            Wake::Ready if !open.is_closing() && open.session_id() == ctx.session().id => {
                // While this waited, a client that has replaced the contents may have been granted READ caching.
                open.file.data_changed(open.id, ctx.server);
                wait(ctx, open, range, sequence)
            }
            // [MS-FSA] 2.1.5.5: closing an open ends its waiting requests with this status.
            Wake::Ready | Wake::Closed => {
                open.file.stop_waiting(token, ctx.server);
                Step::Fail(NtStatus::RANGE_NOT_LOCKED)
            }
        })),
        Err(status) => Step::Fail(status),
    }
}
