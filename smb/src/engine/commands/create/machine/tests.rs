//! Every transition of a CREATE, driven by hand: its backend operations, its waits and its final status.

use std::time::Instant;

use super::*;
use crate::engine::file::opener::RequestedCaching;
use crate::engine::file::pins::Move;
use crate::engine::file::table::models::{How, PLAIN, World};
use crate::engine::mail::ConnectionId;
use crate::engine::request::core::Core;
use crate::engine::request::step;
use crate::engine::session::{Share, models};
use crate::fs::{Ea, FileKey, FileTimes, Frame, FsHandle, RelPath};
use crate::time::Now;
use crate::wire::create::{ImpersonationLevel, OplockLevel};
use crate::wire::{Command, FileTime, Header, ShareAccess};

struct NoFrame;

impl Frame for NoFrame {
    fn bytes(&self) -> &[u8] {
        &[]
    }
}

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    /// An operation for a backend, and the state that waits for it.
    Submits(&'static str, String),
    Waits(String),
    Answers(NtStatus),
}

fn submits(op: &'static str, state: &str) -> Seen {
    Seen::Submits(op, format!("CREATE \"f\": {state}"))
}

fn waits(state: &str) -> Seen {
    Seen::Waits(format!("CREATE \"f\": {state}"))
}

fn name(op: &FsOpKind) -> &'static str {
    match op {
        FsOpKind::Open { .. } => "Open",
        FsOpKind::Close { unlink: None, .. } => "Close",
        FsOpKind::Close { unlink: Some(_), .. } => "Close and unlink",
        FsOpKind::Overwrite { .. } => "Overwrite",
        FsOpKind::SetBasic { .. } => "SetBasic",
        FsOpKind::SetAllocation { .. } => "SetAllocation",
        FsOpKind::SetEas { .. } => "SetEas",
        FsOpKind::Stat { .. } => "Stat",
        _ => "another",
    }
}

/// One CREATE of `f` and the connection that it arrived on.
struct Driver {
    world: World,
    core: Core,
    request: Option<step::Request>,
    machine: Option<Box<dyn Machine>>,
}

impl Driver {
    fn new() -> Self {
        let world = World::new();
        let core = Core::new(ConnectionId(1), "peer".to_owned(), Box::new(|bytes| bytes.fill(0)));
        let session = models::session(&world);
        let share = Share::Volume(Arc::clone(&world.volume));
        let tree = session.connect(share, AccessMask::FILE_ALL_ACCESS.0, false).expect("the first");
        let request = step::Request {
            header: Header::request(Command::CREATE, 1),
            frame: Arc::new(NoFrame),
            range: 0..0,
            session: Some(session),
            tree: Some(tree),
            related_file: None,
            related: false,
            wake_token: 0,
            sealed: false,
            began: now(),
            signing: None,
            by_rdma: false,
            invalidate: None,
            counted: None,
        };
        Self { world, core, request: Some(request), machine: None }
    }

    fn run(&mut self, step: impl FnOnce(&mut Ctx<'_>, Option<Box<dyn Machine>>) -> Step) -> Seen {
        let machine = self.machine.take();
        let request = self.request.take().expect("given back");
        let mut ctx = Ctx { core: &mut self.core, server: &self.world.server, now: now(), request };
        let step = step(&mut ctx, machine);
        self.request = Some(ctx.request);
        match step {
            Step::Submit(op, machine) => {
                let seen = Seen::Submits(name(&op), format!("{machine:?}"));
                self.machine = Some(machine);
                seen
            }
            Step::Wait(machine) => {
                let seen = Seen::Waits(format!("{machine:?}"));
                self.machine = Some(machine);
                seen
            }
            Step::Reply(reply) => Seen::Answers(reply.status),
            Step::Fail(status) => Seen::Answers(status),
            _ => panic!("no step of a CREATE"),
        }
    }

    fn begin(&mut self, disposition: CreateDisposition, allocation_size: u64) -> Seen {
        self.run(|ctx, _| {
            let mut plan = plan(ctx, &request(disposition)).expect("nothing to refuse");
            plan.allocation_size = allocation_size;
            Box::new(Create { plan, state: State::Running }).open(ctx)
        })
    }

    fn complete(&mut self, result: FsResult) -> Seen {
        self.run(|ctx, machine| machine.expect("it waits").completed(ctx, result))
    }

    fn wake(&mut self, wake: Wake) -> Seen {
        self.run(|ctx, machine| machine.expect("it waits").woken(ctx, wake))
    }

    /// Operations for backends that no request waits for.
    fn background(&mut self) -> Vec<&'static str> {
        self.core.fs.drain(..).map(|op| name(&op.kind)).collect()
    }

    fn opens(&self) -> usize {
        self.world.volume.files().find(PLAIN.key).map_or(0, |file| file.open_count())
    }
}

fn now() -> Now {
    Now { instant: Instant::now(), wall: FileTime(0) }
}

fn request(create_disposition: CreateDisposition) -> Request<'static> {
    Request {
        requested_oplock_level: OplockLevel::NONE,
        impersonation_level: ImpersonationLevel::IMPERSONATION,
        smb_create_flags: 0,
        desired_access: AccessMask::FILE_READ_DATA,
        file_attributes: FileAttributes::empty(),
        share_access: ShareAccess(7),
        create_disposition,
        create_options: CreateOptions::NON_DIRECTORY_FILE,
        name: "f".to_owned(),
        contexts: Vec::new(),
    }
}

fn stat(attributes: FileAttributes) -> Stat {
    Stat {
        key: PLAIN.key,
        directory: false,
        end_of_file: 0,
        allocation_size: 0,
        links: 1,
        times: FileTimes::default(),
        attributes: attributes.0,
        reparse: None,
        mode: 0o644,
        uid: 0,
        gid: 0,
    }
}

fn opened(created: bool) -> FsResult {
    let handle = FsHandle(Arc::new(()));
    Ok(Opened { handle, created, stat: stat(FileAttributes::NORMAL), file: None, descriptors: None }.into())
}

const OPENING: &str = "Opening";
const FULL: FsResult = Err(NtStatus::DISK_FULL);

#[test]
fn an_open_takes_one_backend_round_trip() {
    for created in [false, true] {
        let mut create = Driver::new();
        assert_eq!(create.begin(CreateDisposition::OPEN_IF, 0), submits("Open", OPENING));
        assert_eq!(create.opens(), 0, "it is registered after the backend reply");
        assert_eq!(create.complete(opened(created)), Seen::Answers(NtStatus::SUCCESS));
        assert_eq!((create.opens(), create.background()), (1, vec![]));
    }
}

#[test]
fn backend_errors_are_returned_to_the_client() {
    let mut create = Driver::new();
    create.begin(CreateDisposition::OPEN, 0);
    assert_eq!(create.complete(FULL), Seen::Answers(NtStatus::DISK_FULL));
    create.begin(CreateDisposition::OPEN, 0);
    assert_eq!(create.complete(Ok(FsReply::Done)), Seen::Answers(NtStatus::INTERNAL_ERROR));
    assert_eq!((create.opens(), create.background()), (0, vec![]));
}

#[test]
fn an_overwrite_prepares_the_file_in_order() {
    let mut create = Driver::new();
    create.begin(CreateDisposition::OVERWRITE, 1 << 20);
    assert_eq!(create.complete(opened(false)), submits("Overwrite", "Preparing: Overwrite"));
    assert_eq!(create.opens(), 1, "other opens now see it");
    assert_eq!(create.complete(Ok(FsReply::Done)), submits("SetBasic", "Preparing: SetAttributes"));
    assert_eq!(create.complete(Ok(FsReply::Done)), submits("SetAllocation", "Preparing: Reserve"));
    assert_eq!(create.complete(Ok(FsReply::Done)), submits("Stat", "Preparing: Stat"));
    let stat = stat(FileAttributes::ARCHIVE);
    assert_eq!(create.complete(Ok(FsReply::Stat(stat))), Seen::Answers(NtStatus::SUCCESS));
    assert_eq!((create.opens(), create.background()), (1, vec![]));
}

#[test]
fn extended_attributes_are_set_on_created_and_overwritten_files() {
    let with_eas = |disposition, found| {
        let mut create = Driver::new();
        create.run(|ctx, _| {
            let mut plan = plan(ctx, &request(disposition)).expect("nothing to refuse");
            plan.eas = vec![Ea { name: b"a".to_vec(), value: b"1".to_vec() }];
            Box::new(Create { plan, state: State::Running }).open(ctx)
        });
        (create.complete(found), create)
    };
    let setting = submits("SetEas", "Preparing: SetEas");
    let (made, mut create) = with_eas(CreateDisposition::OPEN_IF, opened(true));
    assert_eq!(made, setting);
    assert_eq!(create.complete(Ok(FsReply::Done)), submits("Stat", "Preparing: Stat"));
    let stat = stat(FileAttributes::ARCHIVE);
    assert_eq!(create.complete(Ok(FsReply::Stat(stat))), Seen::Answers(NtStatus::SUCCESS));
    let (found, _) = with_eas(CreateDisposition::OPEN_IF, opened(false));
    assert_eq!(found, Seen::Answers(NtStatus::SUCCESS), "an existing file keeps its own");
    let (truncates, mut create) = with_eas(CreateDisposition::OVERWRITE, opened(false));
    assert_eq!(truncates, submits("Overwrite", "Preparing: Overwrite"));
    assert_eq!(create.complete(Ok(FsReply::Done)), submits("SetBasic", "Preparing: SetAttributes"));
    assert_eq!(create.complete(Ok(FsReply::Done)), setting);
    let (_, mut create) = with_eas(CreateDisposition::CREATE, opened(true));
    assert_eq!(create.complete(FULL), Seen::Answers(NtStatus::DISK_FULL));
    assert_eq!(create.background(), ["Close and unlink"], "no file remains without them");
}

#[test]
fn an_overwrite_skips_operations_without_effect() {
    let mut create = Driver::new();
    create.begin(CreateDisposition::OVERWRITE, 0);
    let Ok(FsReply::Opened(mut found)) = opened(false) else { panic!("it is open") };
    found.stat.attributes = FileAttributes::ARCHIVE.0;
    let truncates = create.complete(Ok(FsReply::Opened(found)));
    assert_eq!(truncates, submits("Overwrite", "Preparing: Overwrite"));
    assert_eq!(create.complete(Ok(FsReply::Done)), submits("Stat", "Preparing: Stat"));
}

#[test]
fn a_failed_preparation_fails_the_create_and_closes_the_file() {
    for failing in 0..4 {
        let mut create = Driver::new();
        create.begin(CreateDisposition::OVERWRITE_IF, 1 << 20);
        create.complete(opened(false));
        for _ in 0..failing {
            create.complete(Ok(FsReply::Done));
        }
        assert_eq!(create.complete(FULL), Seen::Answers(NtStatus::DISK_FULL), "after {failing}");
        assert_eq!((create.opens(), create.background()), (0, vec!["Close"]), "after {failing}");
    }
}

#[test]
fn create_waits_for_a_rename_before_it_calls_the_backend() {
    let mut create = Driver::new();
    let other = Waiter { connection: ConnectionId(2), token: 2 };
    let path = RelPath::new("f").expect("a path");
    let moving = Move::link(&create.world.volume.files, &path, other).expect("the only one");
    assert_eq!(create.begin(CreateDisposition::OPEN, 0), waits("AwaitingPath"));
    assert_eq!(create.wake(Wake::Ready), waits("AwaitingPath"), "the rename is in progress");
    drop(moving);
    assert_eq!(create.world.server.take_mail().len(), 1, "the CREATE is woken");
    assert_eq!(create.wake(Wake::Ready), submits("Open", OPENING));
    assert_eq!(create.complete(opened(false)), Seen::Answers(NtStatus::SUCCESS));
}

#[test]
fn a_cancelled_create_stops_waiting_for_a_rename() {
    for wake in [Wake::Cancelled, Wake::Closed] {
        let mut create = Driver::new();
        let other = Waiter { connection: ConnectionId(2), token: 2 };
        let path = RelPath::new("f").expect("a path");
        let moving = Move::link(&create.world.volume.files, &path, other).expect("the only one");
        create.begin(CreateDisposition::OPEN, 0);
        assert_eq!(create.wake(wake), Seen::Answers(NtStatus::CANCELLED));
        drop(moving);
        assert!(create.world.server.take_mail().is_empty(), "no wake-up is sent");
    }
}

/// A batch oplock of another open of the file.
fn holder(world: &World) -> Arc<Open> {
    world.open(&How { ask: RequestedCaching::oplock(OplockLevel::BATCH), ..PLAIN }).expect("the first")
}

#[test]
fn the_file_is_looked_up_again_after_an_oplock_break() {
    let mut create = Driver::new();
    let holder = holder(&create.world);
    create.begin(CreateDisposition::OPEN, 0);
    assert_eq!(create.complete(opened(false)), waits("AwaitingBreak"));
    assert_eq!(create.background(), ["Close"], "an existing file is not kept open");
    holder.file.acknowledge_oplock(holder.id, OplockLevel::II, &create.world.server).expect("asked");
    assert_eq!(create.wake(Wake::Ready), submits("Open", OPENING));
    assert_eq!(create.complete(opened(false)), Seen::Answers(NtStatus::SUCCESS));
    assert_eq!(create.opens(), 2);
}

#[test]
fn a_created_file_stays_open_during_an_oplock_break() {
    let mut create = Driver::new();
    // Another client has opened it in the meantime.
    let holder = holder(&create.world);
    create.begin(CreateDisposition::OPEN_IF, 0);
    assert_eq!(create.complete(opened(true)), waits("AwaitingBreak of a file that was made"));
    assert_eq!(create.background(), [""; 0]);
    holder.file.acknowledge_oplock(holder.id, OplockLevel::II, &create.world.server).expect("asked");
    assert_eq!(create.wake(Wake::Ready), Seen::Answers(NtStatus::SUCCESS));
    assert_eq!(create.opens(), 2);
}

#[test]
fn a_cancelled_create_stops_waiting_for_an_oplock_break() {
    for (created, wake) in [false, true].into_iter().zip([Wake::Cancelled, Wake::Closed]) {
        let mut create = Driver::new();
        let holder = holder(&create.world);
        create.begin(CreateDisposition::OPEN_IF, 0);
        create.complete(opened(created));
        assert_eq!(create.wake(wake), Seen::Answers(NtStatus::CANCELLED));
        assert_eq!(create.background(), ["Close"], "once");
        let _ = create.world.server.take_mail();
        holder.file.acknowledge_oplock(holder.id, OplockLevel::II, &create.world.server).expect("asked");
        assert!(create.world.server.take_mail().is_empty(), "no wake-up is sent");
    }
}

#[test]
fn names_are_unlinked_one_by_one_before_the_file_is_looked_up_again() {
    let close = || FsOpKind::Close { handle: FsHandle(Arc::new(())), unlink: None, stat: false };
    let mut create = Driver::new();
    let first = create.run(|ctx, _| {
        let plan = plan(ctx, &request(CreateDisposition::OPEN)).expect("nothing to refuse");
        Box::new(Create { plan, state: State::Running }).remove_names(ctx, vec![close(), close()])
    });
    assert_eq!(first, submits("Close", "RemovingNames, 1 more"));
    assert_eq!(create.complete(FULL), submits("Close", "RemovingNames, 0 more"), "may be unlinked already");
    assert_eq!(create.complete(Ok(FsReply::Done)), submits("Open", OPENING));
}

#[test]
fn a_sharing_violation_fails_the_create_and_closes_the_file() {
    let alone = How { share: ShareAccess::empty(), ..PLAIN };
    let mut create = Driver::new();
    create.world.open(&alone).expect("the first");
    create.begin(CreateDisposition::OPEN, 0);
    assert_eq!(create.complete(opened(false)), Seen::Answers(NtStatus::SHARING_VIOLATION));
    assert_eq!((create.opens(), create.background()), (1, vec!["Close"]));
}

#[test]
fn a_file_created_for_an_ended_session_is_removed() {
    let mut create = Driver::new();
    create.begin(CreateDisposition::OPEN_IF, 0);
    let key = FileKey { dev: 1, ino: 2, stream: 0 };
    create.request.as_ref().and_then(|r| r.session.as_ref()).expect("it has one").end();
    let Ok(FsReply::Opened(made)) = opened(true) else { panic!("it is open") };
    let made = Opened { stat: Stat { key, ..made.stat }, ..*made };
    assert_eq!(create.complete(Ok(made.into())), Seen::Answers(NtStatus::USER_SESSION_DELETED));
    assert_eq!(create.background(), ["Close and unlink"]);
}
