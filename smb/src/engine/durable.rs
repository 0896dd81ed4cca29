//! Durable opens ([MS-SMB2] 3.3.5.9.6, 3.3.5.9.7, 3.3.5.9.10, 3.3.5.9.12): where their session loses its last channel they
//! are kept for a time, with share modes, byte-range locks and what they cache, until their client comes back for them.
//! Who cannot be let in beside such an open does not wait for a client that is away: the open ends.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::commands::close::{close_open, end_open};
use super::commands::create;
use super::names;
use super::open::Open;
use super::server::{ConnectionId, Mail, Server};
use super::session::{Session, Share};
use super::step::{Ctx, Step, Wake};
use super::tally::Taken;
use crate::fs::{FsOpKind, FsReply};
use crate::ids::FileId;
use crate::limits::{DURABLE_TIMEOUT_DEFAULT_MS, DURABLE_TIMEOUT_MS_MAX, KEPT_OPENS_MAX, RECONNECT_WAIT_MS};
use crate::status::NtStatus;
use crate::sync::MutexGuard;
use crate::time::{Due, ms};
use crate::wire::create::{CreateAction, OplockLevel, Request};
use crate::wire::create_context::{DurableFlags, Lease, LeaseState, RequestContext, ResponseContext};

/// What was granted to a durable open.
pub(crate) struct Durable {
    /// Open.DurableOwner.
    username: String,
    client_guid: [u8; 16],
    /// Open.DurableOpenTimeout.
    timeout_ms: u32,
    /// Open.CreateGuid, of version 2.
    create_guid: Option<[u8; 16]>,
}

/// A durable open is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// `DHnQ`.
    V1,
    /// `DH2Q`. That it be persistent is never granted.
    V2 { timeout_ms: u32, create_guid: [u8; 16] },
}

/// A durable open is asked for again, after a disconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// Open.DurableFileId.
    persistent: u64,
    /// Of `DH2C`.
    create_guid: Option<[u8; 16]>,
}

impl Claim {
    /// Version 1 names no CreateGuid, whatever the open was made with; an open of version 1 has one of zeros.
    fn names(&self, durable: &Durable) -> bool {
        self.create_guid.is_none_or(|guid| guid == durable.create_guid.unwrap_or_default())
    }
}

/// What the contexts of a CREATE say about durability.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) wanted: Option<Wanted>,
    pub(crate) claim: Option<Claim>,
}

impl Asked {
    /// # Errors
    /// `STATUS_INVALID_PARAMETER` where the contexts contradict each other.
    pub(crate) fn of(contexts: &[RequestContext<'_>], smb3: bool) -> Result<Self, NtStatus> {
        let (mut first, mut second) = (Self::default(), Self::default());
        for context in contexts {
            match *context {
                RequestContext::DurableHandleRequest => first.wanted = Some(Wanted::V1),
                RequestContext::DurableHandleReconnect(id) => {
                    first.claim = Some(Claim { persistent: id.persistent, create_guid: None });
                }
                // Version 2 is for SMB 3.x alone.
                RequestContext::DurableHandleRequestV2 { timeout_ms, create_guid, .. } if smb3 => {
                    second.wanted = Some(Wanted::V2 { timeout_ms, create_guid });
                }
                RequestContext::DurableHandleReconnectV2 { file_id, create_guid, .. } if smb3 => {
                    second.claim =
                        Some(Claim { persistent: file_id.persistent, create_guid: Some(create_guid) });
                }
                _ => {}
            }
        }
        let none = Self::default();
        // [MS-SMB2] 3.3.5.9.6, 3.3.5.9.7, 3.3.5.9.10: one version, and in version 2 one context.
        match (first, second) {
            (first, second) if second == none => Ok(first),
            (first, Self { wanted, claim }) if first == none && wanted.is_some() != claim.is_some() => {
                Ok(Self { wanted, claim })
            }
            _ => Err(NtStatus::INVALID_PARAMETER),
        }
    }
}

/// How long an open is kept, in milliseconds, where the client asked for `asked`.
fn timeout_ms(asked: u32) -> u32 {
    if asked == 0 { DURABLE_TIMEOUT_DEFAULT_MS } else { asked.min(DURABLE_TIMEOUT_MS_MAX) }
}

/// Makes an open durable where it can be; what the answer says of it.
pub(crate) fn grant(ctx: &Ctx<'_>, open: &Open, wanted: Option<Wanted>) -> Option<ResponseContext<'static>> {
    let wanted = wanted?;
    if open.directory || !open.keeps_handle() {
        return None;
    }
    let (timeout_ms, create_guid) = match wanted {
        Wanted::V1 => (DURABLE_TIMEOUT_DEFAULT_MS, None),
        Wanted::V2 { timeout_ms: asked, create_guid } => (timeout_ms(asked), Some(create_guid)),
    };
    let username = ctx.session().username.clone();
    let durable = Durable { username, client_guid: ctx.core.client_guid(), timeout_ms, create_guid };
    open.durable.set(durable).ok()?;
    granted(open)
}

fn keeps_writes(open: &Open) -> bool {
    let cached = open.cached();
    cached
        .lease
        .map_or(cached.level == OplockLevel::BATCH, |l| l.lease_state.contains(LeaseState::WRITE_CACHING))
}

/// What a CREATE's answer says of a durable open.
pub(crate) fn granted(open: &Open) -> Option<ResponseContext<'static>> {
    let Durable { timeout_ms, create_guid, .. } = open.durable.get()?;
    Some(match create_guid {
        None => ResponseContext::DurableHandle,
        Some(_) => ResponseContext::DurableHandleV2 { timeout_ms: *timeout_ms, flags: DurableFlags::empty() },
    })
}

/// The lease that a CREATE asks for.
pub(crate) fn lease_of(request: &Request<'_>) -> Option<Lease> {
    request.contexts.iter().find_map(|context| match context {
        RequestContext::Lease(lease) => Some(*lease),
        _ => None,
    })
}

/// CREATE with `DHnC` or `DH2C` ([MS-SMB2] 3.3.5.9.7, 3.3.5.9.12): nothing else of the request counts.
/// `first` where it has not waited yet.
pub(crate) fn reconnect(ctx: &mut Ctx<'_>, request: &Request<'_>, claim: Claim, first: bool) -> Step {
    let (session, tree) = (ctx.session(), ctx.tree());
    let Share::Volume(volume) = &tree.share else { return NtStatus::OBJECT_NAME_NOT_FOUND.into() };
    let client_guid = ctx.core.client_guid();
    let lease = lease_of(request);
    let check = |open: &Open, durable: &Durable| {
        let held = open.cached().lease;
        let kind = |lease: Option<Lease>| lease.map(|l| (l.lease_key, l.v2.is_some()));
        if !Arc::ptr_eq(&open.volume, volume)
            || !claim.names(durable)
            || kind(held) != kind(lease)
            || !open.keeps_handle()
            || (held.is_some() && durable.client_guid != client_guid)
        {
            return Err(NtStatus::OBJECT_NAME_NOT_FOUND);
        }
        // A lease is on a file of this name, and the client knows it by that.
        if held.is_some() && names::parse(&request.name).map(|n| n.path) != Ok(open.state().path.clone()) {
            return Err(NtStatus::INVALID_PARAMETER);
        }
        if !durable.username.eq_ignore_ascii_case(&session.username) {
            return Err(NtStatus::ACCESS_DENIED);
        }
        Ok(())
    };
    match reclaim(ctx, claim.persistent, check) {
        Ok(open) => answer(ctx, open),
        Err(NtStatus::OBJECT_NAME_NOT_FOUND) if first && is_held_elsewhere(ctx, claim) => wait(ctx, claim),
        Err(status) => status.into(),
    }
}

/// Whether another session of this user has it: its end may not have been noticed yet.
fn is_held_elsewhere(ctx: &Ctx<'_>, claim: Claim) -> bool {
    let id = ctx.server.file_ids.of(claim.persistent);
    let own = ctx.session();
    let others: Vec<Arc<Session>> = ctx.server.sessions().values().cloned().collect();
    others
        .iter()
        .filter(|s| s.id != own.id && s.username.eq_ignore_ascii_case(&own.username))
        .filter_map(|s| s.open(id))
        .any(|open| open.durable.get().is_some_and(|durable| claim.names(durable)))
}

/// A client whose connection is lost may be back before the loss is noticed: it waits for that, for a moment.
fn wait(ctx: &mut Ctx<'_>, claim: Claim) -> Step {
    let waiting = Waiting {
        persistent: claim.persistent,
        since: None,
        connection: ctx.core.id,
        token: ctx.wake_token(),
    };
    ctx.server.kept().waiting.push(waiting);
    // It may have been lost just now.
    if !is_held_elsewhere(ctx, claim) {
        ctx.server.kept().wake(ctx.server, |w| w.persistent == claim.persistent);
    }
    Step::Park(Box::new(move |ctx, wake| match wake {
        Wake::Ready => {
            let frame = Arc::clone(&ctx.request.frame);
            let message = frame.bytes().get(ctx.request.range.clone()).unwrap_or_default();
            match Request::parse(message) {
                Ok(request) => reconnect(ctx, &request, claim, false),
                Err(error) => error.into(),
            }
        }
        Wake::Cancelled | Wake::Closed => {
            let token = ctx.wake_token();
            ctx.server.kept().waiting.retain(|w| w.token != token);
            Step::Fail(NtStatus::CANCELLED)
        }
    }))
}

/// Gives a kept open to this request's session, where `check` does not object.
pub(crate) fn reclaim(
    ctx: &mut Ctx<'_>,
    persistent: u64,
    check: impl FnOnce(&Open, &Durable) -> Result<(), NtStatus>,
) -> Result<Arc<Open>, NtStatus> {
    let (session, tree) = (ctx.session(), ctx.tree());
    let sequence = ctx.request.header.channel_sequence();
    let attach = |open: &Open| open.attach(session.id, tree.id, sequence);
    let kept = ctx.server.kept().take(persistent, check, attach)?;
    if let Err(status) = session.add_open(Arc::clone(&kept.open)) {
        let mut all = ctx.server.kept();
        kept.open.detach();
        all.put(kept);
        return Err(status);
    }
    Ok(kept.open)
}

/// A kept open that its user names without having asked for it.
pub(crate) fn kept_of_user(ctx: &Ctx<'_>, id: FileId) -> Option<Arc<Open>> {
    let session = ctx.request.session.as_ref()?;
    let Share::Volume(volume) = &ctx.request.tree.as_ref()?.share else { return None };
    let kept = ctx.server.kept();
    let open = &kept.by_id.get(&id.persistent)?.open;
    let is_its = open.id == id
        && Arc::ptr_eq(&open.volume, volume)
        && open.durable.get().is_some_and(|durable| is_owner(durable, &session.username));
    (is_its && !open.is_closing()).then(|| Arc::clone(open))
}

/// A kept open's user asks for it, whatever else it says: for a CREATE that is sent again.
pub(crate) fn is_owner(durable: &Durable, username: &str) -> bool {
    durable.username.eq_ignore_ascii_case(username)
}

fn answer(ctx: &mut Ctx<'_>, open: Arc<Open>) -> Step {
    ctx.request.related_file = Some(open.id);
    let stat = FsOpKind::Stat { handle: open.handle.clone() };
    Step::Fs(
        stat,
        Box::new(move |ctx, result| match result {
            Ok(FsReply::Stat(stat)) => {
                create::respond(&open, stat, CreateAction::OPENED, open.cached(), Vec::new())
            }
            // The client does not know yet that it has it again.
            other => {
                let ours = ctx.session().remove_open(open.id).is_some();
                if ours && open.begin_close() {
                    close_open(ctx.core, ctx.server, &open);
                }
                Step::Fail(other.err().unwrap_or(NtStatus::INTERNAL_ERROR))
            }
        }),
    )
}

/// Ends a kept open that is in the way of another client; what a backend has to do for that.
pub(crate) fn displace(server: &Server, open: &Arc<Open>) -> Option<FsOpKind> {
    (server.kept().forget(open) && open.begin_close()).then(|| end_open(server, open))
}

/// Opens without a session.
#[derive(Default)]
pub(crate) struct KeptOpens {
    /// By Open.DurableFileId.
    by_id: HashMap<u64, Kept>,
    /// Who has come back for one that is not lost yet, as far as the server knows.
    waiting: Vec<Waiting>,
    /// The server stops: nothing is kept any more.
    stopped: bool,
    /// What backends have to do for opens that ended.
    left: Vec<FsOpKind>,
}

/// An open without a session.
struct Kept {
    open: Arc<Open>,
    until: Instant,
    /// Its part of what may be kept in its volume.
    _counted: Taken,
}

struct Waiting {
    persistent: u64,
    /// When the clock saw it first.
    since: Option<Instant>,
    connection: ConnectionId,
    token: u64,
}

impl KeptOpens {
    fn wake(&mut self, server: &Server, which: impl Fn(&Waiting) -> bool) {
        for waiting in self.waiting.extract_if(.., |w| which(w)) {
            server.post(waiting.connection, Mail::Wake(waiting.token));
        }
    }

    /// Wakes those that have waited long enough.
    fn tick(&mut self, server: &Server, now: Instant) {
        let enough = ms(RECONNECT_WAIT_MS);
        for waiting in &mut self.waiting {
            waiting.since.get_or_insert(now);
        }
        self.wake(server, |w| w.since.is_some_and(|since| now.saturating_duration_since(since) >= enough));
    }

    fn put(&mut self, kept: Kept) {
        self.by_id.insert(kept.open.id.persistent, kept);
    }

    fn take(
        &mut self,
        persistent: u64,
        check: impl FnOnce(&Open, &Durable) -> Result<(), NtStatus>,
        attach: impl FnOnce(&Open),
    ) -> Result<Kept, NtStatus> {
        let found = self.by_id.get(&persistent).filter(|kept| !kept.open.is_closing());
        let (open, durable) = found
            .and_then(|kept| Some((&kept.open, kept.open.durable.get()?)))
            .ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
        check(open, durable)?;
        // At once, so that nobody finds it neither kept nor in use.
        attach(open);
        self.by_id.remove(&persistent).ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)
    }

    fn forget(&mut self, open: &Open) -> bool {
        self.by_id.remove(&open.id.persistent).is_some()
    }

    fn take_all(&mut self, which: impl Fn(&Open, Instant) -> bool) -> Vec<Arc<Open>> {
        self.by_id.extract_if(|_, kept| which(&kept.open, kept.until)).map(|(_, kept)| kept.open).collect()
    }

    pub(crate) fn opens(&self) -> impl Iterator<Item = &Arc<Open>> {
        self.by_id.values().map(|kept| &kept.open)
    }
}

impl Server {
    pub(crate) fn kept(&self) -> MutexGuard<'_, KeptOpens> {
        self.kept_opens.lock().expect("no panic under this lock")
    }

    /// Keeps an open whose session has lost its last channel ([MS-SMB2] 3.3.7.1). False where it must be closed.
    pub(crate) fn keep(&self, now: Instant, open: &Arc<Open>) -> bool {
        let Some(durable) = open.durable.get() else { return false };
        if !open.keeps_handle() {
            return false;
        }
        // Beside an open that does not cache writes others may work, who must not wait for locks of a client that is away.
        if open.file.locks_of(open.id) > 0 && !keeps_writes(open) {
            return false;
        }
        let mut kept = self.kept();
        if kept.stopped || kept.by_id.len() >= KEPT_OPENS_MAX || open.volume.removed.load(Ordering::Acquire) {
            return false;
        }
        let Some(counted) = open.volume.used.kept.take(1) else { return false };
        open.detach();
        // Who waits for a lock on a connection that is lost but not gone yet must not get it.
        open.file.end_waits(open.id, self);
        kept.put(Kept { open: Arc::clone(open), until: now + ms(durable.timeout_ms), _counted: counted });
        kept.wake(self, |w| w.persistent == open.id.persistent);
        true
    }

    /// When [`Self::handle_timeout`] is to be called next.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Due> {
        let kept = self.kept();
        if !kept.left.is_empty() {
            return Some(Due::Now);
        }
        kept.by_id.values().map(|kept| Due::At(kept.until)).min()
    }

    /// Ends what has been kept long enough for clients that did not come back. What it returns is for a backend to do;
    /// nobody waits for the outcome.
    #[must_use]
    pub fn handle_timeout(&self, now: Instant) -> Vec<FsOpKind> {
        // A handle that somebody's rename or write has taken from a lease is of no use any more.
        let all: Vec<Arc<Open>> = self.kept().opens().cloned().collect();
        let useless: HashSet<FileId> =
            all.iter().filter(|open| !open.keeps_handle()).map(|open| open.id).collect();
        let late = self.kept().take_all(|open, until| until <= now || useless.contains(&open.id));
        self.end_kept(late);
        self.forget_abandoned();
        self.kept().tick(self, now);
        std::mem::take(&mut self.kept().left)
    }

    /// Nothing is kept any more, for the server ends; [`Self::handle_timeout`] has what is to be done for that.
    pub fn stop_keeping(&self) {
        let all = {
            let mut kept = self.kept();
            kept.stopped = true;
            kept.take_all(|_, _| true)
        };
        self.end_kept(all);
    }

    /// Ends what is kept in a volume that goes.
    pub(crate) fn end_kept_of(&self, volume: &str) {
        let all = self.kept().take_all(|open, _| open.volume.id == volume);
        self.end_kept(all);
    }

    fn end_kept(&self, opens: Vec<Arc<Open>>) {
        for open in opens {
            if open.begin_close() {
                let op = end_open(self, &open);
                self.kept().left.push(op);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q1: RequestContext<'_> = RequestContext::DurableHandleRequest;
    const C1: RequestContext<'_> =
        RequestContext::DurableHandleReconnect(FileId { persistent: 7, volatile: 8 });
    const Q2: RequestContext<'_> = RequestContext::DurableHandleRequestV2 {
        timeout_ms: 5,
        flags: DurableFlags::PERSISTENT,
        create_guid: [1; 16],
    };
    const C2: RequestContext<'_> = RequestContext::DurableHandleReconnectV2 {
        file_id: FileId { persistent: 7, volatile: 8 },
        create_guid: [1; 16],
        flags: DurableFlags::empty(),
    };

    #[test]
    fn contexts_that_contradict_each_other_are_refused() {
        let of = |contexts: &[RequestContext<'_>]| Asked::of(contexts, true);
        let claim = |create_guid| Some(Claim { persistent: 7, create_guid });
        assert_eq!(of(&[RequestContext::QueryOnDiskId]), Ok(Asked::default()));
        assert_eq!(of(&[Q1]), Ok(Asked { wanted: Some(Wanted::V1), claim: None }));
        assert_eq!(of(&[C1]), Ok(Asked { wanted: None, claim: claim(None) }));
        assert_eq!(of(&[Q1, C1]).map(|a| a.claim), Ok(claim(None)), "the request is ignored");
        let wanted = Some(Wanted::V2 { timeout_ms: 5, create_guid: [1; 16] });
        assert_eq!(of(&[Q2]), Ok(Asked { wanted, claim: None }));
        assert_eq!(of(&[C2]), Ok(Asked { wanted: None, claim: claim(Some([1; 16])) }));
        for contexts in [[Q1, Q2], [Q1, C2], [C1, Q2], [C1, C2], [Q2, C2]] {
            assert_eq!(of(&contexts), Err(NtStatus::INVALID_PARAMETER), "{contexts:?}");
        }
        assert_eq!(Asked::of(&[Q2, C2], false), Ok(Asked::default()), "SMB 2.x knows neither");
    }

    #[test]
    fn a_client_gets_the_time_it_asks_for_up_to_the_limit() {
        assert_eq!(timeout_ms(0), DURABLE_TIMEOUT_DEFAULT_MS);
        assert_eq!(timeout_ms(1), 1);
        assert_eq!(timeout_ms(u32::MAX), DURABLE_TIMEOUT_MS_MAX);
    }
}
