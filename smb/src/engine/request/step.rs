//! The outcome of a command handler's step, and the state that a handler may access.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_smbdirect::wire::Token;

use crate::crypto::SigningKey;
use crate::engine::channel_sequence::Verdict;
use crate::engine::open::Open;
use crate::engine::request::core::Core;
use crate::engine::server::Server;
use crate::engine::session::{Session, Share, TreeConnect};
use crate::engine::tally::Taken;
use crate::engine::volume::Volume;
use crate::fs::{Frame, FsOpKind, FsResult, Payload};
use crate::ids::FileId;
use crate::remote::RemoteBuffer;
use crate::status::NtStatus;
use crate::time::Now;
use crate::wire::{Command, HEADER_LEN, Header, HeaderFlags, Malformed};

/// The outcome of one step of a request.
pub(crate) enum Step {
    /// Finished.
    Reply(Reply),
    /// Finished with the ERROR response ([MS-SMB2] 2.2.2).
    Fail(NtStatus),
    /// A backend must complete an operation first; then the closure continues the request.
    Fs(FsOpKind, Then),
    /// As [`Self::Fs`], for a WRITE or for a READ with its data in the answer: nothing is allocated for them.
    Transfer(FsOpKind, Transfer),
    /// Waits for another request. It is answered with STATUS_PENDING, and woken by
    /// [`Mail::Wake`](crate::engine::mail::Mail::Wake) with this request's wake token (`Ctx::wake_token`). The closure runs
    /// when the request is woken or cancelled.
    Park(Resume),
    /// As [`Self::Fs`], for a state machine.
    Submit(FsOpKind, Box<dyn Machine>),
    /// As [`Self::Park`], for a state machine.
    Wait(Box<dyn Machine>),
    /// The peer violated a rule for which the specification requires a disconnect.
    Disconnect(&'static str),
    /// Not answered: the connection ends when all other requests are answered, so that the client reconnects.
    Leave(&'static str),
}

/// Data that must be in the peer's memory before the response that reports it.
pub struct RemoteWrite {
    /// The data that was read.
    pub payload: Box<dyn Payload>,
    /// The destination.
    pub target: RemoteBuffer,
}

/// A READ or WRITE that a backend executes.
pub(crate) struct Transfer {
    pub(crate) open: Arc<Open>,
    pub(crate) offset: u64,
    /// For READ: fewer bytes result in STATUS_END_OF_FILE.
    pub(crate) minimum_count: u32,
    /// Continues the request.
    pub(crate) then: fn(&mut Ctx<'_>, Self, FsResult) -> Step,
}

/// The longest body that [`Reply::short`] is meant for, in bytes.
pub(in crate::engine) const SHORT_BODY_MAX: usize = 32;

/// A finished response.
pub(crate) struct Reply {
    /// Usually SUCCESS; warnings such as BUFFER_OVERFLOW keep their body.
    pub(crate) status: NtStatus,
    /// The body, encoded to follow the 64-byte header directly.
    pub(crate) body: Vec<u8>,
    /// READ data that follows the body.
    pub(crate) payload: Option<Box<dyn Payload>>,
    /// READ data that is sent by RDMA instead.
    pub(crate) remote: Option<RemoteWrite>,
    /// Its share of a limit until it is sent.
    pub(crate) counted: Option<Taken>,
}

impl Reply {
    /// Success with a body.
    pub(crate) fn ok(body: Vec<u8>) -> Self {
        Self { status: NtStatus::SUCCESS, body, payload: None, remote: None, counted: None }
    }

    /// Success with a short body, which `encode` appends. The buffer has capacity for the header, so that both take one
    /// allocation.
    pub(crate) fn short(encode: impl FnOnce(&mut Vec<u8>)) -> Self {
        let mut body = Vec::with_capacity(HEADER_LEN + SHORT_BODY_MAX);
        encode(&mut body);
        Self::ok(body)
    }
}

/// Continues a request after a backend's answer.
pub(crate) type Then = Box<dyn FnOnce(&mut Ctx<'_>, FsResult) -> Step + Send>;

/// Continues a parked request.
pub(crate) type Resume = Box<dyn FnOnce(&mut Ctx<'_>, Wake) -> Step + Send>;

/// A multi-step request as a printable value: it waits in an explicit state, not in the captures of a closure.
pub(crate) trait Machine: fmt::Debug + Send {
    /// Continues after a backend has answered.
    fn completed(self: Box<Self>, ctx: &mut Ctx<'_>, result: FsResult) -> Step;

    /// Continues after a wake: the event that it waits for may have occurred, or the request must end.
    fn woken(self: Box<Self>, ctx: &mut Ctx<'_>, wake: Wake) -> Step;
}

/// How a waiting request resumes.
pub(crate) enum Resumption {
    /// When the backend has answered.
    Completed(Then),
    /// Also when the backend has answered.
    Transferred(Transfer),
    /// When it is woken.
    Woken(Resume),
    /// On either event, depending on its state.
    Machine(Box<dyn Machine>),
}

impl Resumption {
    pub(in crate::engine) fn complete(self, ctx: &mut Ctx<'_>, result: FsResult) -> Step {
        match self {
            Self::Completed(then) => then(ctx, result),
            Self::Transferred(transfer) => (transfer.then)(ctx, transfer, result),
            Self::Machine(machine) => machine.completed(ctx, result),
            Self::Woken(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
        }
    }

    pub(in crate::engine) fn wake(self, ctx: &mut Ctx<'_>, wake: Wake) -> Step {
        match self {
            Self::Woken(resume) => resume(ctx, wake),
            Self::Machine(machine) => machine.woken(ctx, wake),
            Self::Completed(_) | Self::Transferred(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
        }
    }
}

/// Why a parked request resumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The event that it waited for may have occurred; check again.
    Ready,
    /// CANCEL: answer STATUS_CANCELLED.
    Cancelled,
    /// The open, tree, session or connection is being closed: answer STATUS_RANGE_NOT_LOCKED or a similar status.
    Closed,
}

/// One request of a compound, and the state that it may access.
pub(crate) struct Ctx<'a> {
    pub(crate) core: &'a mut Core,
    pub(crate) server: &'a Arc<Server>,
    pub(crate) now: Now,
    pub(crate) request: Request,
}

/// The request as the dispatcher resolved it.
pub(crate) struct Request {
    pub(crate) header: Header,
    /// The frame and this message's range in it (from its SMB2 header to the next message or the end).
    pub(crate) frame: Arc<dyn Frame>,
    pub(crate) range: std::ops::Range<usize>,
    /// Present for all but NEGOTIATE, SESSION_SETUP, ECHO and CANCEL.
    pub(crate) session: Option<Arc<Session>>,
    /// Present for commands on a tree.
    pub(crate) tree: Option<Arc<TreeConnect>>,
    /// The FileId that the previous related operation produced or used.
    pub(crate) related_file: Option<FileId>,
    /// SMB2_FLAGS_RELATED_OPERATIONS.
    pub(crate) related: bool,
    /// Identifies this request to [`Mail::Wake`](crate::engine::mail::Mail::Wake); 0 until [`Ctx::wake_token`] is called.
    pub(crate) wake_token: u64,
    /// Whether it arrived in a sealed frame.
    pub(crate) sealed: bool,
    /// When it arrived.
    pub(crate) began: Now,
    /// The key to sign the answer with if the session ends with this request.
    pub(crate) signing: Option<SigningKey>,
    /// Whether its payload is transferred by RDMA.
    pub(crate) by_rdma: bool,
    /// The peer's token that the answer invalidates.
    pub(crate) invalidate: Option<Token>,
    /// The open that counts this request as in flight.
    pub(crate) counted: Option<Counted>,
}

/// Counts a request as in flight on an open until it is dropped.
pub(crate) struct Counted {
    open: Arc<Open>,
    sequence: u16,
}

impl Drop for Counted {
    // [MS-SMB2] 3.3.4.1: the response is on its way, or the connection is gone.
    fn drop(&mut self) {
        self.open.channel_sequence.ended(self.sequence);
    }
}

impl Request {
    /// The message, starting with its SMB2 header.
    pub(crate) fn message(&self) -> &[u8] {
        self.frame.bytes().get(self.range.clone()).unwrap_or_default()
    }

    /// The volume of its tree.
    pub(crate) fn volume(&self) -> Option<&Arc<Volume>> {
        match &self.tree.as_ref()?.share {
            Share::Volume(volume) => Some(volume),
            Share::Ipc => None,
        }
    }
}

impl From<Malformed> for Step {
    // [MS-SMB2] 3.3.5.2.6: a malformed body.
    fn from(_: Malformed) -> Self {
        Self::Fail(NtStatus::INVALID_PARAMETER)
    }
}

impl From<NtStatus> for Step {
    fn from(status: NtStatus) -> Self {
        Self::Fail(status)
    }
}

impl Ctx<'_> {
    /// The session; the dispatcher has checked it.
    pub(crate) fn session(&self) -> Arc<Session> {
        Arc::clone(self.request.session.as_ref().expect("dispatcher resolved the session"))
    }

    /// Whether the payload of this request must not be sent by RDMA in the clear.
    pub(crate) fn must_protect(&self) -> bool {
        self.request.sealed || self.session().signing_required.load(Ordering::Relaxed)
    }

    /// Reserves the token with which [`Mail::Wake`](crate::engine::mail::Mail::Wake) resumes this request; required before
    /// [`Step::Park`].
    pub(crate) fn wake_token(&mut self) -> u64 {
        if self.request.wake_token == 0 {
            self.request.wake_token = self.server.next_wake();
        }
        self.request.wake_token
    }

    /// The tree; the dispatcher has checked it.
    pub(crate) fn tree(&self) -> Arc<TreeConnect> {
        Arc::clone(self.request.tree.as_ref().expect("dispatcher resolved the tree"))
    }

    /// Resolves a FileId of this request. In a related request, all ones refer to the previous request's FileId ([MS-SMB2]
    /// 3.3.5.2.7.2). `STATUS_FILE_CLOSED` if there is none.
    pub(crate) fn named(&mut self, id: FileId) -> Result<FileId, NtStatus> {
        // A related request always refers to the file of the request before it, regardless of the FileId in it.
        let id = match self.request.related_file.filter(|_| self.request.related) {
            Some(file) => file,
            None if self.request.related && id.is_related() => return Err(NtStatus::FILE_CLOSED),
            None => id,
        };
        self.request.related_file = Some(id);
        Ok(id)
    }

    /// The open of a FileId of this request, as [`Self::named`] resolves it. `STATUS_FILE_CLOSED` if this session and tree
    /// have no such open.
    pub(crate) fn open(&mut self, id: FileId) -> Result<Arc<Open>, NtStatus> {
        let id = self.named(id)?;
        let session = self.request.session.as_ref().ok_or(NtStatus::USER_SESSION_DELETED)?;
        let channel = self.core.channels.get_mut(&session.id).ok_or(NtStatus::USER_SESSION_DELETED)?;
        let open = channel.lookup.open(session, id).ok_or(NtStatus::FILE_CLOSED)?;
        let tree_id = self.request.tree.as_ref().map_or(0, |t| t.id);
        if open.tree_id() != tree_id || open.is_closing() {
            return Err(NtStatus::FILE_CLOSED);
        }
        self.server.creations.used(&open);
        self.count(&open)?;
        Ok(open)
    }

    /// Counts the request as in flight ([MS-SMB2] 3.3.5.2.10); for every request that names an open.
    fn count(&mut self, open: &Arc<Open>) -> Result<(), NtStatus> {
        if self.request.counted.is_some() || !self.core.is_smb3() {
            return Ok(());
        }
        let header = &self.request.header;
        let sequence = header.channel_sequence();
        match open.channel_sequence.begun(sequence, header.flags.contains(HeaderFlags::REPLAY_OPERATION)) {
            Verdict::Counted => {
                self.request.counted = Some(Counted { open: Arc::clone(open), sequence });
                Ok(())
            }
            Verdict::Stale
                if matches!(header.command, Command::WRITE | Command::SET_INFO | Command::IOCTL) =>
            {
                Err(NtStatus::FILE_NOT_AVAILABLE)
            }
            Verdict::Stale => Ok(()),
        }
    }

    /// As [`Self::open`], for READ and WRITE: their clients retry with a new handle if the old one ended with its session.
    pub(crate) fn open_for_io(&mut self, id: FileId) -> Result<Arc<Open>, Step> {
        self.open(id).map_err(|status| {
            if status == NtStatus::FILE_CLOSED && self.is_worth_a_return(id) {
                return Step::Leave("a handle of before it reconnected");
            }
            Step::Fail(status)
        })
    }

    /// Whether to make a client reconnect that reads or writes with this handle: the handle was lost with its session or
    /// with the server, and the client has not used it too often yet.
    fn is_worth_a_return(&self, id: FileId) -> bool {
        let earlier = self.server.is_of_predecessor(id);
        self.volume().is_some_and(|volume| volume.lost().is_worth_a_return(id, earlier))
    }

    /// Whether to make a client retry a request with this handle; same conditions as [`Self::is_worth_a_return`].
    pub(crate) fn is_worth_a_retry(&self, id: FileId) -> bool {
        let earlier = self.server.is_of_predecessor(id);
        self.volume().is_some_and(|volume| volume.lost().is_worth_a_retry(id, earlier))
    }

    /// The volume of the request's tree.
    pub(crate) fn volume(&self) -> Option<&Arc<Volume>> {
        self.request.volume()
    }

    /// Submits an operation that no request waits for (closing a handle after a failed CREATE).
    pub(crate) fn background(&mut self, op: FsOpKind) {
        self.core.background(op);
    }
}
