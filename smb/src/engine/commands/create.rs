//! CREATE ([MS-SMB2] 3.3.5.9, [MS-FSA] 2.1.5.1).

mod plan;

use std::sync::Arc;

pub(super) use self::plan::ATTRIBUTES_SETTABLE;
use self::plan::{Plan, overwrites, plan};
use crate::engine::durable::{self, Asked, Wanted};
use crate::engine::file_table::{Entered, Entrant, Entry};
use crate::engine::files::FileState;
use crate::engine::open::{NewOpen, Open};
use crate::engine::oplocks::{Cached, Opener, Waiter};
use crate::engine::paths::PathPin;
use crate::engine::replay::{self, Begun, Creation};
use crate::engine::step::{Ctx, Reply, Step, Wake};
use crate::engine::watches::{CONTENTS, name_of};
use crate::fs::{BasicInfo, FsOpKind, FsReply, FsResult, Opened, Stat};
use crate::status::NtStatus;
use crate::wire::change_notify::CompletionFilter;
use crate::wire::create::{CreateAction, CreateDisposition, CreateOptions, Request, Response, ResponseFlags};
use crate::wire::create_context::ResponseContext;
use crate::wire::fscc::notify::NotifyAction;
use crate::wire::{AccessMask, Fault, FileAttributes, FileTime};

/// Options that FileModeInformation tells ([MS-FSCC] 2.4.31).
const MODE: CreateOptions = CreateOptions::WRITE_THROUGH
    .union(CreateOptions::SEQUENTIAL_ONLY)
    .union(CreateOptions::NO_INTERMEDIATE_BUFFERING)
    .union(CreateOptions::SYNCHRONOUS_IO_ALERT)
    .union(CreateOptions::SYNCHRONOUS_IO_NONALERT)
    .union(CreateOptions::DELETE_ON_CLOSE);
/// An open that others can see already.
struct Pending {
    open: Arc<Open>,
    stat: Stat,
    created: bool,
}

/// What has to come to its end before a file can be opened.
enum InTheWay {
    /// A client is asked to give up what it may cache.
    Holder(Arc<FileState>),
    /// Names of the file that was found go with the opens of clients that are away.
    Names(Vec<FsOpKind>),
}

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let frame = Arc::clone(&ctx.request.frame);
    let message = frame.bytes().get(ctx.request.range.clone()).unwrap_or_default();
    let request = match Request::parse(message) {
        Ok(r) => r,
        // The message is in order, the name is none.
        Err(e) if e.fault == Fault::Surrogate => return NtStatus::OBJECT_NAME_INVALID.into(),
        Err(e) => return e.into(),
    };
    // With nothing cached nothing is durable either.
    if !ctx.server.config.caching {
        return begin(ctx, &request, None, None);
    }
    let asked = match Asked::of(&request.contexts, ctx.core.is_smb3()) {
        Ok(asked) => asked,
        Err(status) => return status.into(),
    };
    if let Some(claim) = asked.claim {
        return durable::reconnect(ctx, &request, claim, true);
    }
    let Some(Wanted::V2 { create_guid, .. }) = asked.wanted else {
        return begin(ctx, &request, asked.wanted, None);
    };
    match replay::begin(ctx, create_guid) {
        Ok(Begun::New(creation)) => begin(ctx, &request, asked.wanted, Some(creation)),
        Ok(Begun::Again(open)) => replay::answer(ctx, &request, open),
        Err(status) => status.into(),
    }
}

fn begin(
    ctx: &mut Ctx<'_>,
    request: &Request<'_>,
    durable: Option<Wanted>,
    creation: Option<Creation>,
) -> Step {
    match plan(ctx, request) {
        Ok(plan) => open(ctx, Plan { durable, creation, ..plan }),
        Err(status) => status.into(),
    }
}

/// Has a backend open it, once nothing on its path is being renamed.
fn open(ctx: &mut Ctx<'_>, plan: Plan) -> Step {
    let waiter = Waiter { connection: ctx.core.id, token: ctx.wake_token() };
    let Some(pin) = PathPin::new(&plan.volume, &plan.path, waiter) else {
        return wait_for_rename(plan, waiter.token);
    };
    let open = FsOpKind::Open { volume: plan.volume.backend.clone(), request: plan.open_request() };
    Step::Fs(open, Box::new(move |ctx, result| opened(ctx, plan, pin, result)))
}

fn wait_for_rename(plan: Plan, token: u64) -> Step {
    Step::Park(Box::new(move |ctx, wake| match wake {
        Wake::Ready => open(ctx, plan),
        Wake::Cancelled | Wake::Closed => {
            plan.volume.files().stop_waiting_for_paths(token);
            Step::Fail(NtStatus::CANCELLED)
        }
    }))
}

/// The backend has opened it; now the other opens of the file are asked.
fn opened(ctx: &mut Ctx<'_>, plan: Plan, pin: PathPin, result: FsResult) -> Step {
    let opened = match result {
        Ok(FsReply::Opened(opened)) => opened,
        Ok(_) => return Step::Fail(NtStatus::INTERNAL_ERROR),
        // [MS-FSA] 2.1.5.1.1: a file would have to be made on a read-only volume.
        Err(NtStatus::OBJECT_NAME_NOT_FOUND)
            if plan.volume.read_only && plan.disposition == CreateDisposition::OPEN_IF =>
        {
            return Step::Fail(NtStatus::MEDIA_WRITE_PROTECTED);
        }
        Err(status) => return Step::Fail(status),
    };
    admit(ctx, plan, pin, opened)
}

/// The others let it in, now or when they have given up what they may cache.
fn admit(ctx: &mut Ctx<'_>, plan: Plan, pin: PathPin, opened: Opened) -> Step {
    let pending = match plan.granted(&opened).and_then(|access| register(ctx, &plan, &pin, &opened, access)) {
        Ok(Ok(pending)) => pending,
        Ok(Err(InTheWay::Holder(file))) => return wait(ctx, plan, pin, opened, file),
        Ok(Err(InTheWay::Names(removals))) => {
            drop_opened(ctx, &plan, opened);
            return remove_names(ctx, plan, removals);
        }
        Err(status) => {
            drop_opened(ctx, &plan, opened);
            return Step::Fail(status);
        }
    };
    // Renames look at the open from now on.
    drop(pin);
    if pending.created || !overwrites(plan.disposition) {
        return finish(ctx, plan, pending);
    }
    let truncate = FsOpKind::SetEndOfFile { handle: pending.open.handle.clone(), size: 0 };
    Step::Fs(
        truncate,
        Box::new(move |ctx, result| {
            // Another client may have read it since it was opened. A failure may come after the truncation.
            pending.open.file.data_replaced(pending.open.id, ctx.server);
            match result {
                Ok(_) => set_attributes(plan, pending),
                Err(status) => give_up(ctx, &pending, status),
            }
        }),
    )
}

/// What was made for this request goes with it, unless somebody else has found it meanwhile.
fn drop_opened(ctx: &mut Ctx<'_>, plan: &Plan, opened: Opened) {
    let unlink =
        opened.created.then(|| plan.volume.files().undo(&plan.volume, opened.stat.key, &plan.path)).flatten();
    ctx.background(FsOpKind::Close { handle: opened.handle, unlink, stat: false });
}

/// Waits for the end of a break. Who gives something up may write, rename or delete first, so the file is looked for anew.
fn wait(ctx: &mut Ctx<'_>, mut plan: Plan, pin: PathPin, opened: Opened, file: Arc<FileState>) -> Step {
    plan.first = false;
    let token = ctx.wake_token();
    let made = if opened.created {
        Some((opened, pin))
    } else {
        drop_opened(ctx, &plan, opened);
        None
    };
    Step::Park(Box::new(move |ctx, wake| match (wake, made) {
        (Wake::Ready, Some((made, pin))) => admit(ctx, plan, pin, made),
        (Wake::Ready, None) => open(ctx, plan),
        (Wake::Cancelled | Wake::Closed, made) => {
            file.stop_waiting_for_break(token);
            if let Some((made, _pin)) = made {
                drop_opened(ctx, &plan, made);
            }
            if let (Wake::Closed, Some(creation)) = (wake, plan.creation) {
                creation.abandoned(&file);
            }
            Step::Fail(NtStatus::CANCELLED)
        }
    }))
}

/// Share modes, pending deletion and what others may cache are looked at, and the open becomes visible to others, in one
/// step. Who or what must give way first where it cannot.
fn register(
    ctx: &mut Ctx<'_>,
    plan: &Plan,
    pin: &PathPin,
    opened: &Opened,
    access: AccessMask,
) -> Result<Result<Pending, InTheWay>, NtStatus> {
    let waiter = Waiter { connection: ctx.core.id, token: ctx.wake_token() };
    let opener = Opener {
        access: if plan.overwrites(opened) { access | AccessMask::FILE_WRITE_DATA } else { access },
        overwrites: plan.overwrites(opened),
        deletes: plan.options.contains(CreateOptions::DELETE_ON_CLOSE),
        existed: !opened.created,
        first: plan.first,
        ask: plan.ask,
    };
    let entrant = Entrant {
        key: opened.stat.key,
        pin,
        directory: opened.stat.directory,
        access,
        share: plan.share,
        opener,
        waiter,
        leases: &plan.volume.leases,
    };
    loop {
        let make = |entered| new_open(ctx, plan, opened, access, entered);
        let entry = plan.volume.files().enter(&entrant, ctx.server, make)?;
        match entry {
            Entry::Open(open) => {
                return Ok(Ok(Pending { open, stat: opened.stat, created: opened.created }));
            }
            Entry::Wait(file) => return Ok(Err(InTheWay::Holder(file))),
            Entry::Displaces(others) => {
                let removals = displace(ctx, &others);
                if !removals.is_empty() {
                    return Ok(Err(InTheWay::Names(removals)));
                }
            }
        }
    }
}

/// Ends opens of clients that are away. What has to be done first, where names go with them.
fn displace(ctx: &mut Ctx<'_>, others: &[Arc<Open>]) -> Vec<FsOpKind> {
    let mut removals = Vec::new();
    for other in others {
        match durable::displace(ctx.server, other) {
            Some(op @ FsOpKind::Close { unlink: Some(_), .. }) => removals.push(op),
            Some(op) => ctx.background(op),
            None => {}
        }
    }
    removals
}

/// Looks for the file anew when these names are gone.
fn remove_names(ctx: &mut Ctx<'_>, plan: Plan, mut removals: Vec<FsOpKind>) -> Step {
    match removals.pop() {
        Some(removal) => Step::Fs(removal, Box::new(move |ctx, _| remove_names(ctx, plan, removals))),
        None => open(ctx, plan),
    }
}

fn new_open(ctx: &Ctx<'_>, plan: &Plan, opened: &Opened, access: AccessMask, entered: Entered) -> Open {
    let new = NewOpen {
        id: ctx.server.file_ids.next(),
        session_id: ctx.session().id,
        tree_id: plan.tree_id,
        volume: Arc::clone(&plan.volume),
        handle: opened.handle.clone(),
        directory: opened.stat.directory,
        access: access.0,
        options: plan.options.0,
        channel_sequence: ctx.request.header.channel_sequence(),
        replayable: plan.creation.as_ref().map(Creation::replayable),
        path: plan.path.clone(),
    };
    let open = Open::new(new, entered);
    open.state().mode = (plan.options & MODE).0;
    open
}

/// FILE_OVERWRITE and FILE_SUPERSEDE replace the attributes too ([MS-FSA] 2.1.5.1.2.3).
fn set_attributes(plan: Plan, pending: Pending) -> Step {
    let attributes = plan.attributes | FileAttributes::ARCHIVE;
    let info = BasicInfo { attributes: Some(attributes.0), ..BasicInfo::default() };
    // Saves the round trip where nothing would change.
    if pending.stat.attributes == attributes.0 {
        return set_allocation(plan, pending);
    }
    Step::Fs(
        FsOpKind::SetBasic { handle: pending.open.handle.clone(), info },
        Box::new(move |ctx, result| match result {
            Ok(_) => set_allocation(plan, pending),
            Err(status) => give_up(ctx, &pending, status),
        }),
    )
}

fn set_allocation(plan: Plan, pending: Pending) -> Step {
    if plan.allocation_size == 0 {
        return stat_again(plan, pending);
    }
    let reserve = FsOpKind::SetAllocation { handle: pending.open.handle.clone(), size: plan.allocation_size };
    Step::Fs(
        reserve,
        Box::new(move |ctx, result| match result {
            Ok(_) => stat_again(plan, pending),
            Err(status) => give_up(ctx, &pending, status),
        }),
    )
}

fn stat_again(plan: Plan, mut pending: Pending) -> Step {
    Step::Fs(
        FsOpKind::Stat { handle: pending.open.handle.clone() },
        Box::new(move |ctx, result| match result {
            Ok(FsReply::Stat(stat)) => {
                pending.stat = stat;
                finish(ctx, plan, pending)
            }
            Ok(_) => give_up(ctx, &pending, NtStatus::INTERNAL_ERROR),
            Err(status) => give_up(ctx, &pending, status),
        }),
    )
}

fn finish(ctx: &mut Ctx<'_>, plan: Plan, pending: Pending) -> Step {
    let Pending { open, created, stat } = &pending;
    // Other channels may keep the session alive, but nobody will ever learn this FileId.
    if ctx.core.is_closed() {
        return give_up(ctx, &pending, NtStatus::USER_SESSION_DELETED);
    }
    if let Err(status) = ctx.session().add_open(Arc::clone(open)) {
        return give_up(ctx, &pending, status);
    }
    ctx.request.related_file = Some(open.id);
    let create_action = match plan.disposition {
        _ if *created => CreateAction::CREATED,
        CreateDisposition::SUPERSEDE => CreateAction::SUPERSEDED,
        CreateDisposition::OVERWRITE | CreateDisposition::OVERWRITE_IF => CreateAction::OVERWRITTEN,
        _ => CreateAction::OPENED,
    };
    tell(ctx, open, create_action);
    let cached = if plan.caches() { open.cached() } else { Cached::NOTHING };
    let mut contexts = Vec::new();
    if plan.query_maximal_access {
        // [MS-SMB2] 3.3.5.9.5
        contexts.push(ResponseContext::MaximalAccess {
            query_status: NtStatus::SUCCESS,
            maximal_access: plan.maximal,
        });
    }
    if plan.query_on_disk_id {
        // [MS-SMB2] 3.3.5.9.9
        contexts.push(ResponseContext::OnDiskId { disk_file_id: stat.key.ino, volume_id: stat.key.dev });
    }
    contexts.extend(durable::grant(ctx, open, plan.durable));
    if let Some(creation) = plan.creation {
        creation.done(open, create_action);
    }
    respond(open, *stat, create_action, cached, contexts)
}

/// [MS-FSA] 2.1.5.1.1, 2.1.5.1.2: who watches hears of what was made or overwritten.
fn tell(ctx: &Ctx<'_>, open: &Open, action: CreateAction) {
    let watches = &open.volume.watches;
    match action {
        CreateAction::OPENED => {}
        CreateAction::CREATED => {
            watches.changed(NotifyAction::ADDED, name_of(open.directory), open, ctx.server);
        }
        _ => watches.modified(CONTENTS | CompletionFilter::ATTRIBUTES, open, ctx.server),
    }
}

/// The answer that gives an open to its client.
pub(crate) fn respond(
    open: &Open,
    stat: Stat,
    create_action: CreateAction,
    cached: Cached,
    mut contexts: Vec<ResponseContext<'_>>,
) -> Step {
    contexts.extend(cached.lease.map(ResponseContext::Lease));
    let stat = open.file.with_client_change_time(stat);
    let response = Response {
        oplock_level: cached.level,
        flags: ResponseFlags::empty(),
        create_action,
        creation_time: FileTime(stat.times.creation),
        last_access_time: FileTime(stat.times.last_access),
        last_write_time: FileTime(stat.times.last_write),
        change_time: FileTime(stat.times.change),
        allocation_size: stat.allocation_size,
        end_of_file: stat.end_of_file,
        file_attributes: FileAttributes(stat.attributes),
        file_id: open.id,
        contexts,
    };
    let mut body = Vec::with_capacity(160);
    response.encode(&mut body);
    Step::Reply(Reply::ok(body))
}

/// Ends an open that others have seen but the client has not.
fn give_up(ctx: &mut Ctx<'_>, pending: &Pending, status: NtStatus) -> Step {
    let Pending { open, created, .. } = pending;
    if open.begin_close() {
        if *created {
            open.volume.files().discard(open);
        }
        super::close::close_open(ctx.core, ctx.server, open);
    }
    Step::Fail(status)
}
