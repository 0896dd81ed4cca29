//! CREATE that is sent again ([MS-SMB2] 3.3.5.9.10): a client that has lost the answer finds the open that it made by the
//! CreateGuid that it gave it, for as long as it has not used the open.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use super::commands::create;
use super::durable;
use super::files::FileState;
use super::names;
use super::open::Open;
use super::server::Server;
use super::step::{Ctx, Step};
use crate::fs::{FsOpKind, FsReply};
use crate::limits::ABANDONED_CREATES_MAX;
use crate::status::NtStatus;
use crate::sync::{AtomicBool, MutexGuard};
use crate::wire::HeaderFlags;
use crate::wire::create::{CreateAction, OplockLevel, Request};

/// Who asks and Open.CreateGuid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CreateKey {
    client_guid: [u8; 16],
    create_guid: [u8; 16],
}

/// What an open keeps so that its CREATE is answered again.
pub(crate) struct Replayable {
    key: CreateKey,
    /// Open.IsReplayEligible.
    eligible: AtomicBool,
    action: OnceLock<CreateAction>,
}

/// CREATEs that can be found again.
#[derive(Default)]
pub(crate) struct Creations {
    slots: HashMap<CreateKey, Slot>,
    /// Those whose connection was lost while they waited for others to give up what they cache, with the files of that.
    /// What they waited for is under way still: until it has come to its end they are in flight for their clients.
    abandoned: HashMap<CreateKey, Weak<FileState>>,
}

enum Slot {
    InFlight,
    Done(Weak<Open>),
}

/// A CREATE under way; dropped where it comes to nothing.
pub(crate) struct Creation {
    server: Arc<Server>,
    key: CreateKey,
}

/// What a CREATE with a CreateGuid is.
pub(crate) enum Begun {
    /// New.
    New(Creation),
    /// Sent again: this is what it made.
    Again(Arc<Open>),
}

/// # Errors
/// `STATUS_DUPLICATE_OBJECTID` where the CreateGuid is in use and this is no replay, `STATUS_FILE_NOT_AVAILABLE` where it
/// is one of a CREATE that is under way.
pub(crate) fn begin(ctx: &Ctx<'_>, create_guid: [u8; 16]) -> Result<Begun, NtStatus> {
    let key = CreateKey { client_guid: ctx.core.client_guid(), create_guid };
    let replay = ctx.request.header.flags.contains(HeaderFlags::REPLAY_OPERATION);
    let in_flight = if replay { NtStatus::FILE_NOT_AVAILABLE } else { NtStatus::DUPLICATE_OBJECTID };
    let mut creations = ctx.server.creations();
    // At any time a CREATE that waits, or did, is found in one of the two.
    if let Some(file) = creations.abandoned.get(&key).and_then(Weak::upgrade) {
        // A file's state is not looked at under this lock.
        drop(creations);
        if file.is_breaking() {
            return Err(in_flight);
        }
        creations = ctx.server.creations();
    }
    match creations.slots.get(&key) {
        Some(Slot::InFlight) => return Err(in_flight),
        Some(Slot::Done(open)) => match open.upgrade().filter(|open| !open.is_closing()) {
            Some(open) if replay => return Ok(Begun::Again(open)),
            Some(_) => return Err(NtStatus::DUPLICATE_OBJECTID),
            None => {}
        },
        None => {}
    }
    creations.abandoned.remove(&key);
    creations.slots.insert(key, Slot::InFlight);
    Ok(Begun::New(Creation { server: Arc::clone(ctx.server), key }))
}

impl Creation {
    /// For the open that it makes.
    pub(crate) fn replayable(&self) -> Replayable {
        Replayable { key: self.key, eligible: AtomicBool::new(false), action: OnceLock::new() }
    }

    /// Its connection is lost while it waits for a break of `file`.
    pub(crate) fn abandoned(self, file: &Arc<FileState>) {
        let mut creations = self.server.creations();
        if creations.abandoned.len() < ABANDONED_CREATES_MAX {
            creations.abandoned.insert(self.key, Arc::downgrade(file));
        }
    }

    /// It is about to be answered.
    pub(crate) fn done(self, open: &Arc<Open>, action: CreateAction) {
        let Some(replayable) = &open.replayable else { return };
        if replayable.action.set(action).is_ok() {
            replayable.eligible.store(true, Ordering::Release);
            self.server.creations().slots.insert(self.key, Slot::Done(Arc::downgrade(open)));
        }
    }
}

impl Drop for Creation {
    fn drop(&mut self) {
        let mut creations = self.server.creations();
        if matches!(creations.slots.get(&self.key), Some(Slot::InFlight)) {
            creations.slots.remove(&self.key);
        }
    }
}

impl Open {
    /// The client works with it, so it has the answer to its CREATE: Open.IsReplayEligible becomes FALSE.
    pub(crate) fn used(&self, server: &Server) {
        let Some(replayable) = &self.replayable else { return };
        if replayable.eligible.load(Ordering::Relaxed) && replayable.eligible.swap(false, Ordering::AcqRel) {
            server.creations().slots.remove(&replayable.key);
        }
    }
}

impl Server {
    /// Forgets what no client waits for any more.
    pub(super) fn forget_abandoned(&self) {
        let abandoned = self.creations().abandoned.clone();
        let over = |file: &Weak<FileState>| file.upgrade().is_none_or(|file| !file.is_breaking());
        let over: HashSet<CreateKey> =
            abandoned.iter().filter(|(_, file)| over(file)).map(|(k, _)| *k).collect();
        self.creations().abandoned.retain(|key, _| !over.contains(key));
    }

    fn creations(&self) -> MutexGuard<'_, Creations> {
        self.creations.lock().expect("no panic under this lock")
    }
}

/// The answer to a CREATE that is sent again. Of the request only name and lease must be those of before.
pub(crate) fn answer(ctx: &mut Ctx<'_>, request: &Request<'_>, open: Arc<Open>) -> Step {
    match check(ctx, request, &open) {
        Ok(()) => {}
        Err(status) => return status.into(),
    }
    ctx.request.related_file = Some(open.id);
    let asked = request.requested_oplock_level;
    let stat = FsOpKind::Stat { handle: open.handle.clone() };
    Step::Fs(
        stat,
        Box::new(move |_, result| {
            let stat = match result {
                Ok(FsReply::Stat(stat)) => stat,
                Ok(_) => return Step::Fail(NtStatus::INTERNAL_ERROR),
                Err(status) => return Step::Fail(status),
            };
            let action = open.replayable.as_ref().and_then(|r| r.action.get().copied());
            let mut cached = open.cached();
            // Whoever asks for less than an oplock that it has is told of less, as by Windows; what it has stays.
            if cached.lease.is_none() && asked < cached.level {
                cached.level = asked;
            }
            let keeps = cached.level == OplockLevel::BATCH || cached.lease.is_some();
            let contexts = durable::granted(&open).filter(|_| keeps).into_iter().collect();
            create::respond(&open, stat, action.unwrap_or(CreateAction::OPENED), cached, contexts)
        }),
    )
}

fn check(ctx: &mut Ctx<'_>, request: &Request<'_>, open: &Open) -> Result<(), NtStatus> {
    let session = ctx.session();
    if names::parse(&request.name)?.path != open.state().path {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let lease = durable::lease_of(request).map(|lease| lease.lease_key);
    if lease.is_some() && lease != open.cached().lease.map(|l| l.lease_key) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if open.is_disconnected() {
        // Its session ended with the connection that its answer was lost with.
        let owner = |_: &Open, durable: &durable::Durable| {
            let ours = durable::is_owner(durable, &session.username);
            if ours { Ok(()) } else { Err(NtStatus::ACCESS_DENIED) }
        };
        return durable::reclaim(ctx, open.id.persistent, owner).map(drop);
    }
    if open.session_id() != session.id {
        // That session's end has not been noticed yet.
        let theirs = ctx.server.sessions().get(&open.session_id()).cloned();
        let ours = theirs.is_none_or(|s| s.username.eq_ignore_ascii_case(&session.username));
        return Err(if ours { NtStatus::FILE_NOT_AVAILABLE } else { NtStatus::ACCESS_DENIED });
    }
    if open.tree_id() == ctx.tree().id { Ok(()) } else { Err(NtStatus::INVALID_PARAMETER) }
}
