//! CREATE ([MS-SMB2] 3.3.5.9, [MS-FSA] 2.1.5.1).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::engine::access::{self, DATA_CHANGING};
use crate::engine::durable::{self, Asked, Wanted};
use crate::engine::files::{Admission, FileState};
use crate::engine::names;
use crate::engine::open::{NewOpen, Open};
use crate::engine::oplocks::{Ask, Cached, Opener, Waiter};
use crate::engine::replay::{self, Begun, Creation};
use crate::engine::session::Share;
use crate::engine::step::{Ctx, Reply, Step, Wake};
use crate::engine::volume::Volume;
use crate::engine::watches::{CONTENTS, name_of};
use crate::fs::{
    BasicInfo, FsOpKind, FsReply, FsResult, ObjectKind, OpenMode, OpenRequest, Opened, RelPath, Stat,
};
use crate::status::NtStatus;
use crate::wire::change_notify::CompletionFilter;
use crate::wire::create::{
    CreateAction, CreateDisposition, CreateOptions, ImpersonationLevel, OplockLevel, Request, Response,
    ResponseFlags,
};
use crate::wire::create_context::{RequestContext, ResponseContext};
use crate::wire::fscc::notify::NotifyAction;
use crate::wire::{AccessMask, Fault, FileAttributes, FileTime, ShareAccess};

/// Options that mean something to servers, or nothing to anyone ([MS-SMB2] 2.2.13).
const OPTIONS_KNOWN: CreateOptions = CreateOptions(0x00ff_ffff);
/// Options that no file system here can follow ([MS-SMB2] 3.3.5.9).
const OPTIONS_UNSUPPORTED: CreateOptions = CreateOptions::CREATE_TREE_CONNECTION
    .union(CreateOptions::OPEN_BY_FILE_ID)
    .union(CreateOptions::RESERVE_OPFILTER);
/// Options that FileModeInformation tells ([MS-FSCC] 2.4.31).
const MODE: CreateOptions = CreateOptions::WRITE_THROUGH
    .union(CreateOptions::SEQUENTIAL_ONLY)
    .union(CreateOptions::NO_INTERMEDIATE_BUFFERING)
    .union(CreateOptions::SYNCHRONOUS_IO_ALERT)
    .union(CreateOptions::SYNCHRONOUS_IO_NONALERT)
    .union(CreateOptions::DELETE_ON_CLOSE);
/// Attributes that may be named in a CREATE ([MS-FSCC] 2.6, [MS-FSA] 2.1.5.1).
const ATTRIBUTES_KNOWN: FileAttributes = FileAttributes(0x0000_7fb7);
/// Attributes that a CREATE or SET_INFO sets; the others tell what the file is.
pub(super) const ATTRIBUTES_SETTABLE: FileAttributes = FileAttributes::READONLY
    .union(FileAttributes::HIDDEN)
    .union(FileAttributes::SYSTEM)
    .union(FileAttributes::ARCHIVE)
    .union(FileAttributes::TEMPORARY)
    .union(FileAttributes::OFFLINE)
    .union(FileAttributes::NOT_CONTENT_INDEXED);

/// A CREATE that makes sense, before the file is known.
struct Plan {
    volume: Arc<Volume>,
    tree_id: u32,
    /// TreeConnect.MaximalAccess.
    maximal: AccessMask,
    path: RelPath,
    desired: AccessMask,
    share: ShareAccess,
    disposition: CreateDisposition,
    options: CreateOptions,
    attributes: FileAttributes,
    allocation_size: u64,
    query_maximal_access: bool,
    query_on_disk_id: bool,
    /// RequestedOplockLevel.
    oplock_level: OplockLevel,
    /// The lease that was asked for, if that is what the level says.
    ask: Ask,
    /// It has not waited for a break yet.
    first: bool,
    durable: Option<Wanted>,
    /// Of a CREATE that can be sent again.
    creation: Option<Creation>,
}

/// An open that others can see already.
struct Pending {
    open: Arc<Open>,
    stat: Stat,
    created: bool,
}

/// What has to come to its end before a file can be opened.
enum InTheWay {
    /// Somebody is asked to give up what he may cache.
    Holder(Arc<FileState>),
    /// The file that was found goes with the open of a client that is away, and its name with it.
    Name(FsOpKind),
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
        Ok(plan) => open(Plan { durable, creation, ..plan }),
        Err(status) => status.into(),
    }
}

fn open(plan: Plan) -> Step {
    let open = FsOpKind::Open { volume: plan.volume.backend.clone(), request: plan.open_request() };
    Step::Fs(open, Box::new(move |ctx, result| opened(ctx, plan, result)))
}

/// Everything that can be refused without looking at the file.
fn plan(ctx: &mut Ctx<'_>, request: &Request<'_>) -> Result<Plan, NtStatus> {
    let tree = ctx.tree();
    let Share::Volume(volume) = &tree.share else {
        // No pipes.
        return Err(NtStatus::OBJECT_NAME_NOT_FOUND);
    };
    if volume.removed.load(Ordering::Acquire) {
        return Err(NtStatus::NETWORK_NAME_DELETED);
    }
    if request.impersonation_level > ImpersonationLevel::DELEGATE {
        return Err(NtStatus::BAD_IMPERSONATION_LEVEL);
    }
    let (options, disposition) = (request.create_options, request.create_disposition);
    let maximal = AccessMask(tree.access);
    let desired = access::desired(request.desired_access, maximal)?;
    check_options(request)?;
    if request.name.starts_with('\\') {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let name = names::parse(&request.name)?;
    if name.directory && options.contains(CreateOptions::NON_DIRECTORY_FILE) {
        return Err(NtStatus::OBJECT_NAME_INVALID);
    }
    if options.contains(CreateOptions::DELETE_ON_CLOSE) {
        // [MS-SMB2] 3.3.5.9
        if !desired.intersects(AccessMask::DELETE | AccessMask::MAXIMUM_ALLOWED) || volume.read_only {
            return Err(NtStatus::ACCESS_DENIED);
        }
        if name.path.is_root() || request.file_attributes.contains(FileAttributes::READONLY) {
            return Err(NtStatus::CANNOT_DELETE);
        }
    }
    if volume.read_only && !matches!(disposition, CreateDisposition::OPEN | CreateDisposition::OPEN_IF) {
        return Err(NtStatus::MEDIA_WRITE_PROTECTED);
    }
    let mut plan = Plan {
        volume: Arc::clone(volume),
        tree_id: tree.id,
        maximal,
        path: name.path,
        desired,
        share: request.share_access,
        disposition,
        options: if name.directory { options | CreateOptions::DIRECTORY_FILE } else { options },
        attributes: request.file_attributes & ATTRIBUTES_SETTABLE,
        allocation_size: 0,
        query_maximal_access: false,
        query_on_disk_id: false,
        oplock_level: OplockLevel::NONE,
        ask: Ask::Nothing,
        first: true,
        durable: None,
        creation: None,
    };
    if ctx.server.config.caching {
        plan.oplock_level = request.requested_oplock_level;
        plan.ask = Ask::oplock(plan.oplock_level);
    }
    for context in &request.contexts {
        plan.context(ctx, context)?;
    }
    Ok(plan)
}

/// [MS-SMB2] 3.3.5.9, [MS-FSA] 2.1.5.1
fn check_options(request: &Request<'_>) -> Result<(), NtStatus> {
    let (options, disposition) = (request.create_options, request.create_disposition);
    if disposition > CreateDisposition::OVERWRITE_IF
        || request.share_access.0 & !0x7 != 0
        || !options.without(OPTIONS_KNOWN).is_empty()
        || !request.file_attributes.without(ATTRIBUTES_KNOWN).is_empty()
    {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    if options.intersects(OPTIONS_UNSUPPORTED) {
        return Err(NtStatus::NOT_SUPPORTED);
    }
    if request.file_attributes.contains(FileAttributes::ENCRYPTED) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if options.contains(CreateOptions::DIRECTORY_FILE)
        && (options.contains(CreateOptions::NON_DIRECTORY_FILE)
            || request.file_attributes.contains(FileAttributes::TEMPORARY)
            || overwrites(disposition))
    {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    Ok(())
}

fn overwrites(disposition: CreateDisposition) -> bool {
    matches!(
        disposition,
        CreateDisposition::SUPERSEDE | CreateDisposition::OVERWRITE | CreateDisposition::OVERWRITE_IF
    )
}

impl Plan {
    fn context(&mut self, ctx: &Ctx<'_>, context: &RequestContext<'_>) -> Result<(), NtStatus> {
        match context {
            // There are no extended attributes; an empty list asks for none.
            RequestContext::EaBuffer(list) if !list.is_empty() => Err(NtStatus::EAS_NOT_SUPPORTED),
            // Nor snapshots.
            RequestContext::TimewarpToken(_) => Err(NtStatus::OBJECT_NAME_NOT_FOUND),
            RequestContext::AllocationSize(size) => {
                self.allocation_size = *size;
                Ok(())
            }
            RequestContext::QueryMaximalAccess(_) => {
                self.query_maximal_access = true;
                Ok(())
            }
            RequestContext::QueryOnDiskId => {
                self.query_on_disk_id = true;
                Ok(())
            }
            // [MS-SMB2] 2.2.13.2: names have at least four bytes.
            RequestContext::Unknown { name, .. } if name.len() < 4 => Err(NtStatus::INVALID_PARAMETER),
            // There is nothing to reconnect to where nothing is cached.
            RequestContext::DurableHandleReconnect(_) | RequestContext::DurableHandleReconnectV2 { .. } => {
                Err(NtStatus::OBJECT_NAME_NOT_FOUND)
            }
            // [MS-SMB2] 3.3.5.9.8, 3.3.5.9.11
            RequestContext::Lease(lease) if self.oplock_level == OplockLevel::LEASE => {
                self.ask = ctx.lease(lease);
                Ok(())
            }
            // Durable handles are looked at elsewhere; security descriptors are not kept (docs/spec-exceptions.md); the rest is to be ignored.
            _ => Ok(()),
        }
    }

    fn open_request(&self) -> OpenRequest {
        let mode = match self.disposition {
            // Nothing is made on a read-only volume.
            _ if self.volume.read_only => OpenMode::Existing,
            CreateDisposition::OPEN | CreateDisposition::OVERWRITE => OpenMode::Existing,
            CreateDisposition::CREATE => OpenMode::New,
            _ => OpenMode::Either,
        };
        let kind = if self.options.contains(CreateOptions::DIRECTORY_FILE) {
            ObjectKind::Directory
        } else if self.options.contains(CreateOptions::NON_DIRECTORY_FILE) {
            ObjectKind::File
        } else {
            ObjectKind::Any
        };
        let desired = if self.desired.contains(AccessMask::MAXIMUM_ALLOWED) {
            self.desired | self.maximal
        } else {
            self.desired
        };
        OpenRequest {
            path: self.path.clone(),
            mode,
            kind,
            read: desired.intersects(AccessMask::FILE_READ_DATA | AccessMask::FILE_EXECUTE),
            write: desired.intersects(DATA_CHANGING) || overwrites(self.disposition),
            write_through: self.options.contains(CreateOptions::WRITE_THROUGH),
            attributes: self.attributes.0,
            allocation_size: self.allocation_size,
        }
    }

    /// Whether what was found loses its contents.
    fn overwrites(&self, opened: &Opened) -> bool {
        !opened.created && overwrites(self.disposition)
    }

    /// Whether the client asked to cache.
    fn caches(&self) -> bool {
        !matches!(self.ask, Ask::Nothing)
    }

    /// What the file as it was found forbids.
    fn granted(&self, opened: &Opened) -> Result<AccessMask, NtStatus> {
        let attributes = FileAttributes(opened.stat.attributes);
        let access = access::grant(self.desired, self.maximal, attributes, opened.created)?;
        if opened.created {
            return Ok(access);
        }
        let delete = self.options.contains(CreateOptions::DELETE_ON_CLOSE);
        if delete && (attributes.contains(FileAttributes::READONLY)) {
            return Err(NtStatus::CANNOT_DELETE);
        }
        if overwrites(self.disposition) {
            if opened.stat.directory {
                return Err(NtStatus::INVALID_PARAMETER);
            }
            // [MS-FSA] 2.1.5.1.2.3: hidden and system files are only replaced by such.
            let kept = FileAttributes::HIDDEN | FileAttributes::SYSTEM;
            if attributes.contains(FileAttributes::READONLY)
                || !(attributes & kept).without(self.attributes).is_empty()
            {
                return Err(NtStatus::ACCESS_DENIED);
            }
        }
        Ok(access)
    }
}

/// The backend has opened it; now the other opens of the file are asked.
fn opened(ctx: &mut Ctx<'_>, plan: Plan, result: FsResult) -> Step {
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
    admit(ctx, plan, opened)
}

/// The others let it in, now or when they have given up what they may cache.
fn admit(ctx: &mut Ctx<'_>, plan: Plan, opened: Opened) -> Step {
    let pending = match plan.granted(&opened).and_then(|access| register(ctx, &plan, &opened, access)) {
        Ok(Ok(pending)) => pending,
        Ok(Err(InTheWay::Holder(file))) => return wait(ctx, plan, opened, file),
        Ok(Err(InTheWay::Name(deletion))) => {
            drop_opened(ctx, &plan, opened);
            return Step::Fs(deletion, Box::new(move |_, _| open(plan)));
        }
        Err(status) => {
            drop_opened(ctx, &plan, opened);
            return Step::Fail(status);
        }
    };
    if pending.created || !overwrites(plan.disposition) {
        return finish(ctx, plan, pending);
    }
    let truncate = FsOpKind::SetEndOfFile { handle: pending.open.handle.clone(), size: 0 };
    Step::Fs(
        truncate,
        Box::new(move |ctx, result| match result {
            Ok(_) => {
                // Somebody may have read it since it was opened.
                pending.open.file.data_replaced(pending.open.id, ctx.server);
                set_attributes(plan, pending)
            }
            Err(status) => give_up(ctx, &pending, status),
        }),
    )
}

/// What was made for this request goes with it, unless somebody else has found it meanwhile.
fn drop_opened(ctx: &mut Ctx<'_>, plan: &Plan, opened: Opened) {
    let unlink = opened.created && plan.volume.files().find(opened.stat.key).is_none();
    ctx.background(FsOpKind::Close { handle: opened.handle, unlink, stat: false });
}

/// Waits for the end of a break. Who gives something up may write, rename or delete first, so the file is looked for anew.
fn wait(ctx: &mut Ctx<'_>, mut plan: Plan, opened: Opened, file: Arc<FileState>) -> Step {
    plan.first = false;
    let token = ctx.wake_token();
    let made = if opened.created {
        Some(opened)
    } else {
        drop_opened(ctx, &plan, opened);
        None
    };
    Step::Park(Box::new(move |ctx, wake| match (wake, made) {
        (Wake::Ready, Some(made)) => admit(ctx, plan, made),
        (Wake::Ready, None) => open(plan),
        (Wake::Cancelled | Wake::Closed, made) => {
            file.stop_waiting_for_break(token);
            if let Some(made) = made {
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
    loop {
        let open = new_open(ctx, plan, opened, access);
        let admission = plan.volume.files().register(&open, &opener, waiter, ctx.server)?;
        match admission {
            Admission::Open => {
                return Ok(Ok(Pending { open, stat: opened.stat, created: opened.created }));
            }
            Admission::Wait => return Ok(Err(InTheWay::Holder(Arc::clone(&open.file)))),
            Admission::Displaces(others) => {
                if let Some(deletion) = displace(ctx, &others) {
                    return Ok(Err(InTheWay::Name(deletion)));
                }
            }
        }
    }
}

/// Ends opens of clients that are away. What has to be done first, where a file goes with them.
fn displace(ctx: &mut Ctx<'_>, others: &[Arc<Open>]) -> Option<FsOpKind> {
    let mut deletion = None;
    for other in others {
        match durable::displace(ctx.server, other) {
            Some(op @ FsOpKind::Close { unlink: true, .. }) => deletion = Some(op),
            Some(op) => ctx.background(op),
            None => {}
        }
    }
    deletion
}

fn new_open(ctx: &Ctx<'_>, plan: &Plan, opened: &Opened, access: AccessMask) -> Arc<Open> {
    let mut files = plan.volume.files();
    let open = Arc::new(Open::new(NewOpen {
        id: ctx.server.file_ids.next(),
        session_id: ctx.session().id,
        tree_id: plan.tree_id,
        volume: Arc::clone(&plan.volume),
        handle: opened.handle.clone(),
        file: files.state(opened.stat.key),
        directory: opened.stat.directory,
        access: access.0,
        share: plan.share.0,
        options: plan.options.0,
        channel_sequence: ctx.request.header.channel_sequence(),
        replayable: plan.creation.as_ref().map(Creation::replayable),
        path: plan.path.clone(),
    }));
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
    let stat = open.file.told(stat);
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
