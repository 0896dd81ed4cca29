//! The steps of a CREATE ([MS-SMB2] 3.3.5.9, [MS-FSA] 2.1.5.1).
//!
//! ```text
//! LongPath ──► (Opening)
//! AwaitingPath ◄─► Opening ──► AwaitingBreak ──► (again: Opening; the checks, if the file was created for this request)
//!                     │   ▲ └──► RemovingNames ──► (again: Opening)
//!                     │   └────────────┘
//!                     ├──► ReadingLink ──► the answer that it is a symbolic link
//!                     ├──► answer
//!                     └──► Preparing: Overwrite ──► SetAttributes ──► Reserve ──► SetEas ──► Stat ──► answer
//! ```

use std::fmt;
use std::sync::{Arc, Weak};

use super::answer::{respond, stopped_on_symlink};
use super::plan::{Plan, overwrites, plan};
use super::reconnect;
use crate::engine::commands::posix;
use crate::engine::creations::Creation;
use crate::engine::durable::DurableRequest;
use crate::engine::file::opener::{Cached, Opener};
use crate::engine::file::pins::PathPin;
use crate::engine::file::state::{Entrant, Entry, FileState};
use crate::engine::file::table::Entered;
use crate::engine::mail::Waiter;
use crate::engine::open::{NewOpen, Open};
use crate::engine::request::step::{Ctx, Machine, Step, Wake};
use crate::engine::watches::{CONTENTS, name_of};
use crate::fs::{BasicInfo, FsOpKind, FsReply, FsResult, Opened, OpenedFile, Stat};
use crate::ids::FileId;
use crate::status::NtStatus;
use crate::wire::change_notify::CompletionFilter;
use crate::wire::create::{CreateAction, CreateDisposition, CreateOptions, Request};
use crate::wire::create_context::ResponseContext;
use crate::wire::fscc::notify::NotifyAction;
use crate::wire::fscc::reparse::ReparseTag;
use crate::wire::{AccessMask, FileAttributes};

/// Options that FileModeInformation reports ([MS-FSCC] 2.4.31).
const MODE: CreateOptions = CreateOptions::WRITE_THROUGH
    .union(CreateOptions::SEQUENTIAL_ONLY)
    .union(CreateOptions::NO_INTERMEDIATE_BUFFERING)
    .union(CreateOptions::SYNCHRONOUS_IO_ALERT)
    .union(CreateOptions::SYNCHRONOUS_IO_NONALERT)
    .union(CreateOptions::DELETE_ON_CLOSE);

/// A CREATE in progress. One allocation from its first step to its answer.
struct Create {
    plan: Plan,
    state: State,
}

/// The event that a CREATE waits for.
enum State {
    /// No event: a step is running.
    Running,
    /// A backend that resolves short names in the path.
    LongPath,
    /// The end of a rename of a name on its path, or of the removal of its name.
    AwaitingPath,
    /// A backend that opens the file. Meanwhile the path cannot be renamed.
    Opening(PathPin),
    /// A backend that reads the target of the symbolic link.
    ReadingLink(Opened),
    /// A client that must give up caching rights on this file. A file that was created for this request stays open.
    AwaitingBreak { file: Arc<FileState>, made: Option<(Opened, PathPin)> },
    /// A backend that removes a name of the file; the vector holds the remaining removals.
    RemovingNames(Vec<FsOpKind>),
    /// A backend that prepares the file. The open is registered, so others can see it.
    Preparing(Registered, Preparation),
}

/// The steps that prepare a file after its open is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Preparation {
    Overwrite,
    SetAttributes,
    Reserve,
    SetEas,
    Stat,
}

/// An open that others can see but its client cannot.
struct Registered {
    open: Arc<Open>,
    stat: Stat,
    created: bool,
    /// The maximal access that the client could be granted.
    maximal: AccessMask,
    /// Whether the stream's file was created together with it.
    made_file: bool,
}

/// The outcome of a registration: the open, or what must end first.
enum Registration {
    Done(Registered),
    /// A break of caching rights on this file.
    AwaitsBreak(Arc<FileState>),
    /// The removal of the file's names, which disconnected opens still had to do.
    AwaitsRemoval(Vec<FsOpKind>),
    /// The removal of the name, by which the file was found before.
    NameGone,
}

impl fmt::Debug for Create {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CREATE {:?}: {:?}", self.plan.path, self.state)
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running => f.write_str("Running"),
            Self::LongPath => f.write_str("LongPath"),
            Self::AwaitingPath => f.write_str("AwaitingPath"),
            Self::Opening(_) => f.write_str("Opening"),
            Self::ReadingLink(_) => f.write_str("ReadingLink"),
            Self::AwaitingBreak { made: None, .. } => f.write_str("AwaitingBreak"),
            Self::AwaitingBreak { made: Some(_), .. } => f.write_str("AwaitingBreak of a file that was made"),
            Self::RemovingNames(more) => write!(f, "RemovingNames, {} more", more.len()),
            Self::Preparing(_, preparation) => write!(f, "Preparing: {preparation:?}"),
        }
    }
}

pub(super) fn begin(
    ctx: &mut Ctx<'_>,
    request: &Request<'_>,
    durable: Option<DurableRequest>,
    creation: Option<Creation>,
) -> Step {
    match plan(ctx, request) {
        Ok(plan) => {
            // Only opens of the live volume, not of a snapshot, can be reclaimed.
            let durable = durable.filter(|_| !plan.volume.is_snapshot);
            let plan = Plan { durable, creation, ..plan };
            let create = Box::new(Create { plan, state: State::Running });
            if create.plan.may_have_short_names() { create.find_names() } else { create.start(ctx) }
        }
        Err(status) => status.into(),
    }
}

impl Machine for Create {
    fn completed(mut self: Box<Self>, ctx: &mut Ctx<'_>, result: FsResult) -> Step {
        match std::mem::replace(&mut self.state, State::Running) {
            State::LongPath => self.found_names(ctx, result),
            State::Opening(pin) => self.opened(ctx, pin, result),
            State::ReadingLink(opened) => self.stopped_on_link(ctx, opened, result),
            State::RemovingNames(removals) => self.remove_names(ctx, removals),
            State::Preparing(registered, preparation) => self.prepared(ctx, registered, preparation, result),
            State::Running | State::AwaitingPath | State::AwaitingBreak { .. } => {
                debug_assert!(false, "no backend was asked");
                Step::Fail(NtStatus::INTERNAL_ERROR)
            }
        }
    }

    fn woken(mut self: Box<Self>, ctx: &mut Ctx<'_>, wake: Wake) -> Step {
        match (std::mem::replace(&mut self.state, State::Running), wake) {
            (State::AwaitingPath, Wake::Ready) => self.open(ctx),
            (State::AwaitingPath, Wake::Cancelled | Wake::Closed) => {
                self.plan.volume.files().stop_waiting_for_paths(ctx.wake_token());
                Step::Fail(NtStatus::CANCELLED)
            }
            (State::AwaitingBreak { made: Some((made, pin)), .. }, Wake::Ready) => self.admit(ctx, pin, made),
            (State::AwaitingBreak { made: None, .. }, Wake::Ready) => self.open(ctx),
            (State::AwaitingBreak { file, made }, Wake::Cancelled | Wake::Closed) => {
                self.abandon(ctx, wake, &file, made)
            }
            (
                State::Running
                | State::LongPath
                | State::Opening(_)
                | State::ReadingLink(_)
                | State::RemovingNames(_)
                | State::Preparing(..),
                _,
            ) => {
                debug_assert!(false, "it waits for a backend");
                Step::Fail(NtStatus::INTERNAL_ERROR)
            }
        }
    }
}

impl Create {
    /// Submits an operation to a backend.
    fn submit(mut self: Box<Self>, state: State, op: FsOpKind) -> Step {
        self.state = state;
        Step::Submit(op, self)
    }

    /// Waits for another request.
    fn wait(mut self: Box<Self>, state: State) -> Step {
        self.state = state;
        Step::Wait(self)
    }

    fn find_names(self: Box<Self>) -> Step {
        let (volume, path) = (self.plan.volume.backend.clone(), self.plan.path.clone());
        self.submit(State::LongPath, FsOpKind::LongPath { volume, path })
    }

    fn found_names(mut self: Box<Self>, ctx: &mut Ctx<'_>, result: FsResult) -> Step {
        match result {
            Ok(FsReply::Path(path)) => self.plan.path = path,
            Ok(_) => return Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => return Step::Fail(status),
        }
        self.start(ctx)
    }

    /// Continues with the final path.
    fn start(self: Box<Self>, ctx: &mut Ctx<'_>) -> Step {
        match supersede(ctx, &self.plan) {
            Ok(removals) => self.remove_names(ctx, removals),
            Err(status) => status.into(),
        }
    }

    /// Has a backend open the file as soon as no name on its path is being renamed, and the name is not being removed.
    fn open(self: Box<Self>, ctx: &mut Ctx<'_>) -> Step {
        let plan = &self.plan;
        let waiter = Waiter { connection: ctx.core.id, token: ctx.wake_token() };
        let Some(pin) = PathPin::new(&plan.volume.files, &plan.path, waiter) else {
            return self.wait(State::AwaitingPath);
        };
        let open = FsOpKind::Open { volume: plan.volume.backend.clone(), request: plan.open_request() };
        self.submit(State::Opening(pin), open)
    }

    /// Continues after the backend has opened the file: checks it against the file's other opens.
    fn opened(self: Box<Self>, ctx: &mut Ctx<'_>, pin: PathPin, result: FsResult) -> Step {
        let plan = &self.plan;
        match result {
            Ok(FsReply::Opened(opened)) if plan.stops_at(&opened) => {
                drop(pin);
                self.stop_at_reparse_point(ctx, *opened)
            }
            Ok(FsReply::Opened(opened)) => self.admit(ctx, pin, *opened),
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            // [MS-FSA] 2.1.5.1.1: the file would have to be created on a read-only volume.
            Err(NtStatus::OBJECT_NAME_NOT_FOUND)
                if plan.volume.read_only && plan.disposition == CreateDisposition::OPEN_IF =>
            {
                Step::Fail(NtStatus::MEDIA_WRITE_PROTECTED)
            }
            Err(status) => Step::Fail(status),
        }
    }

    /// Clients follow reparse points themselves. For a symbolic link, the answer contains its target.
    fn stop_at_reparse_point(self: Box<Self>, ctx: &mut Ctx<'_>, opened: Opened) -> Step {
        if opened.stat.reparse.is_some_and(|point| point.tag == ReparseTag::SYMLINK.0) {
            let read = FsOpKind::GetReparsePoint { handle: opened.handle.clone() };
            return self.submit(State::ReadingLink(opened), read);
        }
        drop_opened(ctx, &self.plan, opened);
        Step::Fail(NtStatus::IO_REPARSE_TAG_NOT_HANDLED)
    }

    fn stopped_on_link(self: Box<Self>, ctx: &mut Ctx<'_>, opened: Opened, result: FsResult) -> Step {
        drop_opened(ctx, &self.plan, opened);
        match result {
            Ok(FsReply::ReparseData(data)) => stopped_on_symlink(ctx.core.dialect(), &data),
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            // The reparse point was replaced in the meantime.
            Err(NtStatus::NOT_A_REPARSE_POINT) => self.open(ctx),
            Err(status) => Step::Fail(status),
        }
    }

    /// Registers the open, now or after everything that blocks it has ended.
    fn admit(self: Box<Self>, ctx: &mut Ctx<'_>, pin: PathPin, opened: Opened) -> Step {
        let access = self.plan.granted(&opened);
        match access.and_then(|access| register(ctx, &self.plan, &pin, &opened, access)) {
            Ok(Registration::Done(registered)) => {
                // From now on, renames detect the open.
                drop(pin);
                self.prepare(ctx, registered)
            }
            Ok(Registration::AwaitsBreak(file)) => self.await_break(ctx, pin, opened, file),
            Ok(Registration::AwaitsRemoval(removals)) => {
                drop_opened(ctx, &self.plan, opened);
                self.remove_names(ctx, removals)
            }
            Ok(Registration::NameGone) => {
                drop_opened(ctx, &self.plan, opened);
                self.open(ctx)
            }
            Err(status) => {
                drop_opened(ctx, &self.plan, opened);
                Step::Fail(status)
            }
        }
    }

    /// Waits for the end of a break. Before a client gives up its caching rights, it may write, rename or delete, so the
    /// file is looked up again.
    fn await_break(
        mut self: Box<Self>,
        ctx: &mut Ctx<'_>,
        pin: PathPin,
        opened: Opened,
        file: Arc<FileState>,
    ) -> Step {
        self.plan.first = false;
        // For `Machine::woken`.
        ctx.wake_token();
        let made = if opened.created {
            Some((opened, pin))
        } else {
            drop_opened(ctx, &self.plan, opened);
            None
        };
        self.wait(State::AwaitingBreak { file, made })
    }

    /// Handles CANCEL or the loss of the connection while the request waits for a break.
    fn abandon(
        mut self: Box<Self>,
        ctx: &mut Ctx<'_>,
        wake: Wake,
        file: &Arc<FileState>,
        made: Option<(Opened, PathPin)>,
    ) -> Step {
        file.stop_waiting_for_break(ctx.wake_token());
        if let Some((made, _pin)) = made {
            drop_opened(ctx, &self.plan, made);
        }
        if let (Wake::Closed, Some(creation)) = (wake, self.plan.creation.take()) {
            creation.abandoned(file);
        }
        Step::Fail(NtStatus::CANCELLED)
    }

    /// Removes these names, then opens the file again.
    fn remove_names(self: Box<Self>, ctx: &mut Ctx<'_>, mut removals: Vec<FsOpKind>) -> Step {
        match removals.pop() {
            Some(removal) => self.submit(State::RemovingNames(removals), removal),
            None => self.open(ctx),
        }
    }

    /// FILE_OVERWRITE and FILE_SUPERSEDE replace contents and attributes ([MS-FSA] 2.1.5.1.2.3).
    fn prepare(self: Box<Self>, ctx: &mut Ctx<'_>, registered: Registered) -> Step {
        if registered.created && !self.plan.eas.is_empty() {
            return self.set_eas(registered);
        }
        if registered.created || !overwrites(self.plan.disposition) {
            return self.finish(ctx, registered);
        }
        let overwrite = FsOpKind::Overwrite {
            handle: registered.open.handle.clone(),
            // For clients with POSIX semantics, overwriting only affects contents.
            streams: !self.plan.posix && registered.open.volume.extended_attributes,
        };
        self.submit(State::Preparing(registered, Preparation::Overwrite), overwrite)
    }

    /// Continues after a preparation step has succeeded or failed.
    fn prepared(
        self: Box<Self>,
        ctx: &mut Ctx<'_>,
        mut registered: Registered,
        preparation: Preparation,
        result: FsResult,
    ) -> Step {
        if preparation == Preparation::Overwrite {
            // Another client may have read the file since it was opened. A failure can occur after the truncation.
            registered.open.file.data_replaced(registered.open.id, ctx.server);
        }
        let reply = match result {
            Ok(reply) => reply,
            Err(status) => return give_up(ctx, &registered, status),
        };
        match (preparation, reply) {
            (Preparation::Overwrite, _) => self.set_attributes(registered),
            (Preparation::SetAttributes, _) => self.reserve(registered),
            (Preparation::Reserve, _) => self.set_eas(registered),
            (Preparation::SetEas, _) => self.stat(registered),
            (Preparation::Stat, FsReply::Stat(stat)) => {
                registered.stat = stat;
                self.finish(ctx, registered)
            }
            (Preparation::Stat, _) => give_up(ctx, &registered, NtStatus::INTERNAL_ERROR),
        }
    }

    fn set_attributes(self: Box<Self>, registered: Registered) -> Step {
        let attributes = self.plan.attributes | FileAttributes::ARCHIVE;
        // Saves the round trip if nothing would change. A stream does not have the attributes of its file.
        if registered.stat.attributes == attributes.0 || registered.open.is_stream() {
            return self.reserve(registered);
        }
        let info = BasicInfo { attributes: Some(attributes.0), ..BasicInfo::default() };
        let set = FsOpKind::SetBasic { handle: registered.open.handle.clone(), info };
        self.submit(State::Preparing(registered, Preparation::SetAttributes), set)
    }

    fn reserve(self: Box<Self>, registered: Registered) -> Step {
        let size = self.plan.allocation_size;
        if size == 0 {
            return self.set_eas(registered);
        }
        let reserve = FsOpKind::SetAllocation { handle: registered.open.handle.clone(), size };
        self.submit(State::Preparing(registered, Preparation::Reserve), reserve)
    }

    /// SMB2_CREATE_EA_BUFFER ([MS-SMB2] 2.2.13.2.1). An overwritten file keeps its other extended attributes: on Linux,
    /// O_TRUNC only affects contents.
    fn set_eas(mut self: Box<Self>, registered: Registered) -> Step {
        let eas = std::mem::take(&mut self.plan.eas);
        if eas.is_empty() {
            return self.stat(registered);
        }
        let set = FsOpKind::SetEas { handle: registered.open.handle.clone(), eas };
        self.submit(State::Preparing(registered, Preparation::SetEas), set)
    }

    fn stat(self: Box<Self>, registered: Registered) -> Step {
        let stat = FsOpKind::Stat { handle: registered.open.handle.clone() };
        self.submit(State::Preparing(registered, Preparation::Stat), stat)
    }

    /// Adds the open to its session and answers.
    fn finish(mut self: Box<Self>, ctx: &mut Ctx<'_>, registered: Registered) -> Step {
        let plan = &mut self.plan;
        let Registered { open, created, stat, maximal, made_file } = &registered;
        // Other channels may keep the session alive, but no client will ever receive this FileId, unless the client can find
        // it by a replay of this request.
        if ctx.core.is_closed() && plan.creation.is_none() {
            return give_up(ctx, &registered, NtStatus::USER_SESSION_DELETED);
        }
        if let Err(status) = ctx.session().add_open(Arc::clone(open)) {
            return give_up(ctx, &registered, status);
        }
        ctx.request.related_file = Some(open.id);
        let create_action = match plan.disposition {
            _ if *created => CreateAction::CREATED,
            CreateDisposition::SUPERSEDE => CreateAction::SUPERSEDED,
            CreateDisposition::OVERWRITE | CreateDisposition::OVERWRITE_IF => CreateAction::OVERWRITTEN,
            _ => CreateAction::OPENED,
        };
        notify(ctx, open, create_action, *made_file);
        if let Some(instance) = plan.app_instance {
            let weak: Weak<Open> = Arc::downgrade(open);
            let _ = open.app_instance.set(ctx.server.app_instances.add(instance, weak));
        }
        let cached = if plan.caches() { open.cached() } else { Cached::NOTHING };
        let mut contexts = Vec::new();
        if plan.query_maximal_access {
            // [MS-SMB2] 3.3.5.9.5
            contexts.push(ResponseContext::MaximalAccess {
                query_status: NtStatus::SUCCESS,
                maximal_access: *maximal,
            });
        }
        if plan.query_on_disk_id {
            // [MS-SMB2] 3.3.5.9.9
            contexts.push(ResponseContext::OnDiskId { disk_file_id: stat.key.ino, volume_id: stat.key.dev });
        }
        let mut sids = Vec::new();
        if plan.posix {
            contexts.push(posix::create_context(stat, &mut sids));
        }
        contexts.extend(reconnect::grant(ctx, open, plan.durable));
        if let Some(creation) = plan.creation.take() {
            creation.done(open, create_action);
        }
        respond(open, *stat, create_action, cached, contexts)
    }
}

/// Closes an opened file. Also removes it if it was created for this request, unless another client has found it in the
/// meantime.
fn drop_opened(ctx: &mut Ctx<'_>, plan: &Plan, opened: Opened) {
    // Removing a file that was created for its stream also removes the stream.
    let (handle, key) = match opened.file {
        Some(OpenedFile { handle, created: true }) => (handle, opened.stat.key.file()),
        _ => (opened.handle, opened.stat.key),
    };
    let unlink =
        opened.created.then(|| plan.volume.files().undo(&plan.volume.files, key, &plan.path)).flatten();
    let file = unlink.as_ref().and_then(|_| plan.volume.files().find(key));
    if let Some(file) = file {
        plan.volume.watches.leased.leaves(&file, &plan.path, ctx.server);
    }
    ctx.background(FsOpKind::Close { handle, unlink, stat: false });
}

/// Checks share modes, pending deletion and the caching rights of others, and makes the open visible to others, all in one
/// step. If that is not possible yet, returns what must end first.
fn register(
    ctx: &mut Ctx<'_>,
    plan: &Plan,
    pin: &PathPin,
    opened: &Opened,
    access: AccessMask,
) -> Result<Registration, NtStatus> {
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
        pin: pin.pinned(),
        directory: opened.stat.directory,
        end_of_file: opened.stat.end_of_file,
        made_file: opened.made_file(),
        caches: !opened.stat.directory || plan.leases_directories,
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
                if open.directory && open.cached().lease.is_some() {
                    // The pin prevents a rename of its path.
                    plan.volume.watches.leased.add(open.id, &plan.path, &open.file);
                }
                let made_file = open.is_stream() && opened.made_file();
                let (stat, created) = (opened.stat, opened.created);
                let registered =
                    Registered { open, stat, created, maximal: plan.permitted(opened), made_file };
                return Ok(Registration::Done(registered));
            }
            Entry::Wait(file) => return Ok(Registration::AwaitsBreak(file)),
            Entry::NameGone => return Ok(Registration::NameGone),
            Entry::Displaces(others) => {
                let removals = displace(ctx, &others);
                if !removals.is_empty() {
                    return Ok(Registration::AwaitsRemoval(removals));
                }
            }
        }
    }
}

/// Ends opens of disconnected clients. Returns the operations that remove names, which must complete first.
fn displace(ctx: &mut Ctx<'_>, others: &[FileId]) -> Vec<FsOpKind> {
    let ended = others.iter().filter_map(|other| ctx.server.displace(*other)).collect();
    names_first(ctx, ended)
}

/// Ends the opens that the same application has for this name on another client ([MS-SMB2] 3.3.5.9.13). Returns the same as
/// [`displace`]. Until the file is opened, the server assumes that all users of a volume may read all of it.
fn supersede(ctx: &mut Ctx<'_>, plan: &Plan) -> Result<Vec<FsOpKind>, NtStatus> {
    let Some(instance) = &plan.app_instance else { return Ok(Vec::new()) };
    let instances = &ctx.server.app_instances;
    let opens = instances.superseded(instance, &plan.volume.id, &plan.path, plan.stream.as_ref())?;
    let ended = opens.iter().filter_map(|open| ctx.server.supersede(*open)).collect();
    Ok(names_first(ctx, ended))
}

/// Submits the operations that end opens, except those that remove names: it returns them.
fn names_first(ctx: &mut Ctx<'_>, ended: Vec<FsOpKind>) -> Vec<FsOpKind> {
    let mut removals = Vec::new();
    for op in ended {
        match op {
            FsOpKind::Close { unlink: Some(_), .. } => removals.push(op),
            op => ctx.background(op),
        }
    }
    removals
}

fn new_open(ctx: &Ctx<'_>, plan: &Plan, opened: &Opened, access: AccessMask, entered: Entered) -> Open {
    let new = NewOpen {
        id: ctx.server.file_ids.next(),
        session_id: ctx.session().id,
        tree_id: plan.tree_id,
        volume: Arc::clone(&plan.volume),
        handle: opened.handle.clone(),
        file_handle: opened.file.as_ref().map(|file| file.handle.clone()),
        stream: plan.stream.clone(),
        directory: opened.stat.directory,
        access: access.0,
        options: plan.options.0,
        posix: plan.posix,
        channel_sequence: ctx.request.header.channel_sequence(),
        replayable: plan.creation.as_ref().map(Creation::replayable),
        parent_lease_key: plan.parent_lease_key,
        path: plan.path.clone(),
    };
    let open = Open::new(new, entered);
    open.state().mode = (plan.options & MODE).0;
    open
}

/// [MS-FSA] 2.1.5.1.1, 2.1.5.1.2: CHANGE_NOTIFY reports created and overwritten files.
fn notify(ctx: &Ctx<'_>, open: &Open, action: CreateAction, made_file: bool) {
    let watches = &open.volume.watches;
    if made_file {
        watches.changed(NotifyAction::ADDED, CompletionFilter::FILE_NAME, open, ctx.server);
    }
    match action {
        CreateAction::CREATED if open.is_stream() => {
            watches.stream_changed(NotifyAction::ADDED_STREAM, open, ctx.server);
        }
        CreateAction::OPENED => {}
        CreateAction::CREATED => {
            watches.changed(NotifyAction::ADDED, name_of(open.directory), open, ctx.server);
        }
        _ if open.is_stream() => watches.modified(CONTENTS, open, ctx.server),
        _ => watches.modified(CONTENTS | CompletionFilter::ATTRIBUTES, open, ctx.server),
    }
}

/// Ends an open that others can see but its client cannot.
fn give_up(ctx: &mut Ctx<'_>, registered: &Registered, status: NtStatus) -> Step {
    let Registered { open, created, .. } = registered;
    if open.begin_close() {
        if *created {
            open.volume.files().discard(&open.file, open.id);
        }
        ctx.core.close_open(ctx.server, open);
    }
    Step::Fail(status)
}

#[cfg(test)]
mod tests;
