//! A connection ([MS-SMB2] 3.3.1.7): frames in, effects out.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use forebay_smbdirect::wire::Token;

pub use super::chain::Segment;
use super::chain::{Chain, Related, Response, assemble};
use super::channels::ChannelLink;
use super::commands;
use super::commands::close::close_open;
use super::commands::session_setup::PendingAuth;
use super::credits::CreditWindow;
use super::holder::send;
use super::lookup::Lookup;
use super::open::Open;
use super::remote::RemoteWrite;
use super::server::{BreakNotice, ConnectionId, Mail, Server};
use super::session::{Session, Share};
use super::step::{Ctx, Reply, Request, Resume, Step, Then, Wake};
use super::tally::Taken;
use super::transform::Transforms;
use super::volume::{Protection, Volume};
use crate::crypto::Cipher;
use crate::crypto::{
    Nonce, NonceSequence, OpeningKey, PreauthHash, SealedFrame, SealingKey, SigningAlgorithm, SigningKey,
    TRANSFORM_HEADER_LEN,
};
use crate::fs::{Frame, FsOp, FsOpKind, FsResult, OpId};
use crate::limits;
use crate::status::NtStatus;
use crate::time::Now;
use crate::wire::compound;
use crate::wire::header::UNSOLICITED_MESSAGE_ID;
use crate::wire::{Capabilities, Command, Dialect, Header, HeaderFlags, Ids, SecurityMode};

/// Why a connection must be ended now, without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("peer broke the protocol: {0}")]
pub struct Disconnect(pub &'static str);

/// A frame to send, in order of [`Connection::poll_transmit`].
pub struct Transmit {
    /// The frame in parts.
    pub segments: Vec<Segment>,
    /// What must be in the peer's memory before the frame; over RDMA only.
    pub remote_writes: Vec<RemoteWrite>,
    /// The token of the peer that the frame invalidates; over RDMA only.
    pub invalidate: Option<Token>,
    /// It tells a client of several channels of a break, for whose end others may wait: a channel that does not take it can be done
    /// without.
    pub is_break: bool,
    /// Present where it must be sealed: put the parts together, seal, and send header and ciphertext.
    pub seal: Option<Sealer>,
    /// What it takes of limits of its volume: to be dropped when the frame is sent, not before.
    pub held: Held,
}

/// What a frame takes of limits, for as long as this lives.
#[derive(Default)]
pub struct Held(Vec<Taken>);

impl Held {
    /// Takes in what another frame has.
    pub fn join(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Held({})", self.0.len())
    }
}

impl Transmit {
    fn new(mut responses: Vec<Response>, seal: Option<Sealer>) -> Self {
        let remote_writes = responses.iter_mut().filter_map(|r| r.remote.take()).collect();
        // A frame invalidates one token; Linux and Windows put nothing that has one into a compound.
        let invalidate = responses.iter().find_map(|r| r.invalidate);
        let held = Held(responses.iter_mut().filter_map(|r| r.counted.take()).collect());
        Self { segments: assemble(responses), remote_writes, invalidate, is_break: false, seal, held }
    }

    /// Bytes of all parts, before sealing.
    #[must_use]
    pub fn len(&self) -> usize {
        self.segments.iter().map(Segment::length).sum()
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }
}

/// Seals one frame.
pub struct Sealer {
    key: SealingKey,
    nonce: Nonce,
    session_id: u64,
}

impl Sealer {
    /// Encrypts the whole frame in place and returns the header that goes before it.
    ///
    /// # Errors
    /// [`Disconnect`] where the frame is longer than the cipher can seal.
    pub fn seal(self, plaintext: &mut [u8]) -> Result<[u8; TRANSFORM_HEADER_LEN], Disconnect> {
        self.key
            .seal_in_place(self.nonce, self.session_id, plaintext)
            .map_err(|_| Disconnect("a frame too long to seal"))
    }
}

/// A frame that was opened: the SMB2 messages lie in `range`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsealed {
    /// The session whose key opened it.
    pub session_id: u64,
    /// Where the plaintext lies in the frame that was given.
    pub range: Range<usize>,
}

/// Something worth a log line or a metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A dialect was agreed on.
    Negotiated {
        /// "3.1.1" …
        dialect: &'static str,
    },
    /// A session was set up.
    SessionEstablished {
        /// SessionId.
        session_id: u64,
        /// Who.
        username: String,
    },
    /// Authentication failed; the reason is for the log only.
    AuthenticationFailed {
        /// Who it claimed to be; empty where it did not come that far.
        username: String,
        /// Why.
        reason: String,
    },
    /// A session ended: with its last channel, which was this connection.
    SessionClosed {
        /// SessionId.
        session_id: u64,
    },
    /// The connection became a further channel of a session.
    ChannelBound {
        /// SessionId.
        session_id: u64,
        /// Who.
        username: String,
    },
    /// The connection is no channel of a session any more, but others are.
    ChannelClosed {
        /// SessionId.
        session_id: u64,
    },
    /// A tree connect was refused.
    TreeRefused {
        /// Who.
        username: String,
        /// The share asked for.
        share: String,
        /// With what.
        status: NtStatus,
    },
    /// The connection is to end so that its client connects again.
    Leaving {
        /// Why, for the log.
        why: &'static str,
    },
    /// A request was answered.
    Completed {
        /// The command.
        command: Command,
        /// The answer.
        status: NtStatus,
        /// When it came in.
        began: Instant,
        /// Payload read or written, in bytes.
        payload_bytes: u32,
        /// Which went by RDMA rather than in messages.
        by_rdma: bool,
    },
}

/// What was agreed on in NEGOTIATE.
pub(crate) struct Negotiated {
    pub(crate) dialect: Dialect,
    pub(crate) capabilities: Capabilities,
    pub(crate) cipher: Option<Cipher>,
    pub(crate) signing: SigningAlgorithm,
    pub(crate) transforms: Transforms,
    pub(crate) preauth: PreauthHash,
    pub(crate) io_bytes_max: u32,
    /// What the client said, for FSCTL_VALIDATE_NEGOTIATE_INFO.
    pub(crate) client_guid: [u8; 16],
    pub(crate) client_capabilities: Capabilities,
    pub(crate) client_security_mode: SecurityMode,
    pub(crate) client_dialects: Vec<Dialect>,
    /// What the server said.
    pub(crate) security_mode: SecurityMode,
}

/// A session as seen from one of its connections: its keys here.
pub(crate) struct Channel {
    pub(crate) session: Arc<Session>,
    pub(crate) signing: SigningKey,
    pub(crate) seal: Option<Sealing>,
    pub(crate) lookup: Lookup,
    /// A re-authentication under way.
    pub(crate) reauth: Option<PendingAuth>,
}

impl Channel {
    /// Whether a request of its session is protected as the session demands ([MS-SMB2] 3.3.5.2.4, 3.3.5.2.9).
    fn believes(&self, header: &Header, message: &[u8], sealed: bool) -> bool {
        // A sealed message is not signed, its tag has proved more.
        if sealed {
            return true;
        }
        if self.session.encrypt.load(Ordering::Relaxed) && header.command != Command::SESSION_SETUP {
            return false;
        }
        if header.flags.contains(HeaderFlags::SIGNED) {
            self.signing.verify(&[message])
        } else {
            !self.session.signing_required.load(Ordering::Relaxed)
        }
    }
}

/// The keys and nonces of a channel whose session can seal.
pub(crate) struct Sealing {
    pub(crate) sealing: SealingKey,
    pub(crate) opening: OpeningKey,
    pub(crate) nonces: NonceSequence,
}

enum Pending {
    Chain(u64, Then),
    Background,
}

struct Parked {
    chain: u64,
    message_id: u64,
    /// The session that asked.
    session_id: u64,
    /// It was asked under seal.
    sealed: bool,
    /// Bytes of its frame.
    bytes: u64,
    /// Their part, and its own, of what may wait at the volume.
    _counted: Option<[Taken; 2]>,
    resume: Resume,
}

/// Fills buffers with randomness fit for keys.
pub type Entropy = Box<dyn FnMut(&mut [u8]) + Send>;

/// What command handlers may touch of a connection.
pub(crate) struct Core {
    pub(crate) id: ConnectionId,
    pub(crate) peer: String,
    /// The transport reaches into the peer's memory.
    pub(crate) over_rdma: bool,
    pub(crate) negotiated: Option<Negotiated>,
    /// An SMB1 negotiate was answered with the wildcard dialect: an SMB2 one must follow.
    pub(crate) wildcard: bool,
    pub(crate) channels: HashMap<u64, Channel>,
    /// Sessions that are being authenticated.
    pub(crate) pending: HashMap<u64, PendingAuth>,
    /// Its part of the connections of the volume whose user was the first to log on.
    counted: Option<Taken>,
    pub(crate) entropy: Entropy,
    pub(crate) events: VecDeque<Event>,
    /// The key of a session that has ended here, for what is still to be answered.
    pub(crate) last_sealing: Option<(u64, Sealing)>,
    closed: bool,
    /// Nothing new is begun; the connection ends when what is in flight is answered.
    leaving: bool,
    fs: VecDeque<FsOp>,
    ops: HashMap<OpId, Pending>,
    next_op: u64,
}

impl Core {
    pub(crate) fn background(&mut self, op: FsOpKind) {
        self.submit(op, Pending::Background);
    }

    fn submit(&mut self, kind: FsOpKind, pending: Pending) {
        let id = OpId(self.next_op);
        self.next_op += 1;
        self.ops.insert(id, pending);
        self.fs.push_back(FsOp { id, kind });
    }

    /// Counts it for the volume whose user logs on, unless it is counted already.
    ///
    /// # Errors
    /// `STATUS_INSUFFICIENT_RESOURCES` where the volume has as many connections as it may have.
    pub(crate) fn count_for(&mut self, volume: &Volume) -> Result<(), NtStatus> {
        if self.counted.is_none() {
            let counted = volume.used.connections.take(1);
            self.counted = Some(counted.ok_or(NtStatus::INSUFFICIENT_RESOURCES)?);
        }
        Ok(())
    }

    /// Random bytes.
    pub(crate) fn random<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        (self.entropy)(&mut bytes);
        bytes
    }

    /// The dialect; only asked for after NEGOTIATE.
    pub(crate) fn dialect(&self) -> Dialect {
        self.negotiated.as_ref().map_or(Dialect::SMB2_0_2, |n| n.dialect)
    }

    /// Connection.ClientGuid.
    pub(crate) fn client_guid(&self) -> [u8; 16] {
        self.negotiated.as_ref().map_or([0; 16], |n| n.client_guid)
    }

    /// Whether an SMB 3.x dialect was negotiated.
    pub(crate) fn is_smb3(&self) -> bool {
        !matches!(self.dialect(), Dialect::SMB2_0_2 | Dialect::SMB2_1)
    }

    /// MaxReadSize, MaxWriteSize and MaxTransactSize as negotiated.
    pub(crate) fn io_bytes_max(&self) -> u32 {
        self.negotiated.as_ref().map_or(0, |n| n.io_bytes_max)
    }

    /// Connection.RDMATransformIds; none but over RDMA.
    pub(crate) fn transforms(&self) -> Transforms {
        self.negotiated.as_ref().map_or(Transforms::default(), |n| n.transforms)
    }

    /// What a session's list of channels tells of this connection.
    pub(crate) fn link(&self) -> ChannelLink {
        ChannelLink { address: self.peer.clone(), over_rdma: self.over_rdma, transforms: self.transforms() }
    }

    /// Whether the transport is gone: nobody sees an answer any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Ends a session on all its channels and closes what it has open.
    pub(crate) fn end_session(&mut self, server: &Arc<Server>, now: Instant, session_id: u64) {
        let Some(channel) = self.channels.get(&session_id) else { return };
        server.sessions().remove(&session_id);
        for connection in channel.session.end() {
            if connection != self.id {
                server.post(connection, Mail::SessionEnded(session_id));
            }
        }
        self.leave_session(server, now, session_id);
    }

    /// What becomes of an open whose session has lost its last channel ([MS-SMB2] 3.3.7.1).
    fn lose(&mut self, server: &Arc<Server>, now: Instant, open: &Arc<Open>) {
        if open.is_closing() {
            return;
        }
        open.volume.lost().note(open.id);
        if !server.keep(now, open) && open.begin_close() {
            close_open(self, server, open);
        }
    }

    /// Ends a session whose client has come back with another: its channels are lost, whether that was noticed or not
    /// ([MS-SMB2] 3.3.5.5.3).
    pub(crate) fn replace_session(&mut self, server: &Arc<Server>, now: Instant, session_id: u64) {
        let Some(session) = server.sessions().remove(&session_id) else { return };
        let connections = session.end();
        // Here and now: the client asks for what was kept as soon as it has its answer.
        for open in session.take_opens() {
            self.lose(server, now, &open);
        }
        for connection in connections {
            if connection == self.id {
                self.leave_session(server, now, session_id);
            } else {
                // It may be used for another one.
                server.post(connection, Mail::SessionEnded(session_id));
            }
        }
    }

    /// Takes this connection's channel of a session away. With its last channel, or where it has ended already, what the
    /// session has open is closed here, or kept where the session was only lost.
    fn leave_session(&mut self, server: &Arc<Server>, now: Instant, session_id: u64) {
        let Some(channel) = self.channels.remove(&session_id) else { return };
        let left = channel.session.leave(self.id);
        if let Some(keys) = channel.seal {
            self.last_sealing = Some((session_id, keys));
        }
        server.channel_lost(self.id);
        for open in left.opens {
            if left.lost {
                self.lose(server, now, &open);
            } else if open.begin_close() {
                open.volume.lost().note(open.id);
                close_open(self, server, &open);
            }
        }
        self.events.push_back(if left.last {
            server.sessions().remove(&session_id);
            Event::SessionClosed { session_id }
        } else {
            Event::ChannelClosed { session_id }
        });
    }
}

/// The server's end of a connection.
pub struct Connection {
    server: Arc<Server>,
    core: Core,
    credits: CreditWindow,
    chains: HashMap<u64, Chain>,
    next_chain: u64,
    /// By wake token, which is the AsyncId too.
    parked: HashMap<u64, Parked>,
    /// Bytes of their frames.
    parked_bytes: u64,
    /// Bytes that all chains keep in memory.
    pinned_bytes: u64,
    transmit: VecDeque<Transmit>,
}

impl Connection {
    /// A fresh connection. `peer` names the other end in logs and lists; `entropy` fills buffers with randomness fit for
    /// keys.
    #[must_use]
    pub fn new(server: Arc<Server>, id: ConnectionId, peer: String, entropy: Entropy) -> Self {
        Self {
            server,
            core: Core {
                id,
                peer,
                over_rdma: false,
                negotiated: None,
                wildcard: false,
                channels: HashMap::new(),
                pending: HashMap::new(),
                counted: None,
                entropy,
                events: VecDeque::new(),
                last_sealing: None,
                closed: false,
                leaving: false,
                fs: VecDeque::new(),
                ops: HashMap::new(),
                next_op: 1,
            },
            credits: CreditWindow::new(),
            chains: HashMap::new(),
            next_chain: 1,
            parked: HashMap::new(),
            parked_bytes: 0,
            pinned_bytes: 0,
            transmit: VecDeque::new(),
        }
    }

    /// Its transport moves payload by RDMA: READ and WRITE may name the peer's memory.
    pub fn set_over_rdma(&mut self) {
        self.core.over_rdma = true;
    }

    /// The longest frame that the peer may send now, in bytes; a longer one: end the connection.
    #[must_use]
    pub fn frame_bytes_max(&self) -> u32 {
        if self.core.channels.is_empty() {
            limits::FRAME_BYTES_UNAUTHENTICATED_MAX
        } else {
            limits::FRAME_BYTES_MAX
        }
    }

    /// Whether a session has been set up on it.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        !self.core.channels.is_empty()
    }

    /// Opens a sealed frame in place ([MS-SMB2] 3.3.5.2.1). `None`: it is not sealed.
    ///
    /// # Errors
    /// [`Disconnect`] where it cannot be opened.
    pub fn unseal(&mut self, frame: &mut [u8]) -> Result<Option<Unsealed>, Disconnect> {
        if !SealedFrame::claims(frame) {
            return Ok(None);
        }
        let header = SealedFrame::parse(frame).map_err(|_| Disconnect("malformed transform header"))?;
        let seal = self
            .core
            .channels
            .get(&header.session_id)
            .and_then(|c| c.seal.as_ref())
            .ok_or(Disconnect("sealed for a session that cannot seal here"))?;
        let length =
            seal.opening.open_in_place(frame).map_err(|_| Disconnect("sealed frame does not open"))?.len();
        let start = TRANSFORM_HEADER_LEN;
        Ok(Some(Unsealed { session_id: header.session_id, range: start..start + length }))
    }

    /// Takes a frame: SMB2 messages in plain text. `unsealed` as [`Self::unseal`] gave it, whose range is relative to
    /// the frame that was unsealed; `frame.bytes()` must be the plaintext alone.
    ///
    /// # Errors
    /// [`Disconnect`] where the specification asks for it; call [`Self::close`] then.
    pub fn handle(
        &mut self,
        now: Now,
        frame: Arc<dyn Frame>,
        unsealed: Option<&Unsealed>,
    ) -> Result<(), Disconnect> {
        if self.core.closed || self.core.leaving {
            return Ok(());
        }
        let sealed_for = unsealed.map(|u| u.session_id);
        if frame.bytes().starts_with(&crate::wire::smb1::PROTOCOL_ID) {
            return self.multi_protocol(now, frame.bytes());
        }
        let mut requests = Vec::new();
        let mut cancels = Vec::new();
        for message in compound::split(frame.bytes()) {
            let range = message.map_err(|_| Disconnect("malformed compound"))?;
            let bytes = frame.bytes().get(range.clone()).unwrap_or_default();
            let header = Header::parse(bytes).map_err(|_| Disconnect("malformed header"))?;
            if header.is_response() {
                return Err(Disconnect("a response sent to a server"));
            }
            if requests.len() >= limits::COMPOUND_MESSAGES_MAX {
                return Err(Disconnect("compound too long"));
            }
            if self.core.negotiated.is_none() && header.command != Command::NEGOTIATE {
                return Err(Disconnect("a request before NEGOTIATE"));
            }
            // [MS-SMB2] 3.3.5.2.3: CANCEL uses no message id of its own.
            if header.command == Command::CANCEL {
                cancels.push((header, range));
                continue;
            }
            if !self.credits.consume(header.message_id, self.charge(&header)) {
                return Err(Disconnect("message id outside the window"));
            }
            requests.push((header, range));
        }
        for (header, range) in cancels {
            let message = frame.bytes().get(range).unwrap_or_default();
            self.cancel(now, &header, message, sealed_for)?;
        }
        if requests.is_empty() {
            return Ok(());
        }
        let id = self.next_chain;
        self.next_chain += 1;
        let pinned_bytes = pinned_bytes(&*frame, &requests);
        self.pinned_bytes += pinned_bytes;
        let chain = Chain {
            frame,
            requests,
            pinned_bytes,
            next: 0,
            current: None,
            related: Related::default(),
            responses: Vec::new(),
            sealed_for,
            async_id: None,
        };
        self.advance(now, id, chain)?;
        self.notify_own();
        Ok(())
    }

    /// Takes a backend's answer.
    ///
    /// # Errors
    /// [`Disconnect`] where what follows in a compound breaks the protocol.
    pub fn complete(&mut self, now: Now, id: OpId, result: FsResult) -> Result<(), Disconnect> {
        match self.core.ops.remove(&id) {
            None | Some(Pending::Background) => Ok(()),
            Some(Pending::Chain(chain_id, then)) => {
                let Some(mut chain) = self.chains.remove(&chain_id) else { return Ok(()) };
                let Some(request) = chain.current.take() else { return Ok(()) };
                let mut ctx = Ctx { core: &mut self.core, server: &self.server, now, request };
                let step = then(&mut ctx, result);
                let request = ctx.request;
                if self.settle(chain_id, &mut chain, request, step)? {
                    self.advance(now, chain_id, chain)?;
                } else {
                    self.chains.insert(chain_id, chain);
                }
                self.notify_own();
                Ok(())
            }
        }
    }

    /// Takes what another connection or an administrator caused.
    ///
    /// # Errors
    /// [`Disconnect`] where the connection has lost its last session.
    pub fn deliver(&mut self, now: Now, mail: Mail) -> Result<(), Disconnect> {
        match mail {
            Mail::Wake(token) => self.wake(now, token, Wake::Ready),
            Mail::SessionClosed(session_id) => {
                if self.core.channels.contains_key(&session_id) {
                    self.core.leave_session(&self.server, now.instant, session_id);
                    if self.core.channels.is_empty() {
                        return Err(Disconnect("its session was closed"));
                    }
                }
                Ok(())
            }
            Mail::SessionEnded(session_id) => {
                self.core.leave_session(&self.server, now.instant, session_id);
                Ok(())
            }
            Mail::Break(notice) => {
                self.notify(notice);
                Ok(())
            }
        }
    }

    /// The next frame to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmit.pop_front()
    }

    /// The next operation for a backend.
    pub fn poll_fs(&mut self) -> Option<FsOp> {
        self.core.fs.pop_front()
    }

    /// The next thing to log or count.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.core.events.pop_front()
    }

    /// The transport is gone: ends the sessions that have no other channel and closes what they have open. Operations for
    /// backends go on to come out of [`Self::poll_fs`] until [`Self::is_finished`].
    pub fn close(&mut self, now: Now) {
        if self.core.closed {
            return;
        }
        self.core.closed = true;
        let sessions: Vec<u64> = self.core.channels.keys().copied().collect();
        for session_id in sessions {
            self.core.leave_session(&self.server, now.instant, session_id);
        }
        self.core.pending.clear();
        let tokens: Vec<u64> = self.parked.keys().copied().collect();
        for token in tokens {
            // Nobody is left to answer; a broken rule cannot end the connection twice.
            let _ = self.wake(now, token, Wake::Closed);
        }
        self.transmit.clear();
    }

    /// Closed, and no operation is in flight.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.core.closed && self.core.ops.is_empty()
    }

    /// The connection is to end, gracefully, as soon as nothing is in flight: so its client connects again.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.core.leaving
    }

    /// Requests that have not been answered, for a graceful end.
    #[must_use]
    pub fn requests_in_flight(&self) -> usize {
        self.chains.len() - self.parked.len().min(self.chains.len())
    }

    /// Bytes that requests keep in memory until they are answered: their frames, and answers that are being made. Beyond
    /// [`limits::PINNED_BYTES_PER_CONNECTION_MAX`] a transport receives nothing more.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    fn charge(&self, header: &Header) -> u16 {
        match &self.core.negotiated {
            Some(n) if n.capabilities.contains(Capabilities::LARGE_MTU) => header.credit_charge,
            _ => 1,
        }
    }

    /// SMB1 NEGOTIATE ([MS-SMB2] 3.3.5.3).
    fn multi_protocol(&mut self, now: Now, message: &[u8]) -> Result<(), Disconnect> {
        if self.core.negotiated.is_some() || self.core.wildcard || !self.credits.consume(0, 1) {
            return Err(Disconnect("an SMB1 message after NEGOTIATE"));
        }
        let (header, reply) =
            commands::negotiate::multi_protocol(&mut self.core, &self.server, now.wall, message)?;
        self.finish(Response::reply(header, reply));
        Ok(())
    }

    /// What a request has caused is told to its own client before a later request is answered.
    fn notify_own(&mut self) {
        for notice in self.server.take_breaks(self.core.id) {
            self.notify(notice);
        }
    }

    /// OPLOCK_BREAK that nobody asked for ([MS-SMB2] 3.3.4.6, 3.3.4.7).
    fn notify(&mut self, mut notice: BreakNotice) {
        let channel = self.core.channels.get(&notice.session_id);
        let Some(channel) = channel.filter(|_| !self.core.closed && !self.core.leaving) else {
            // The channel was lost while this was on its way.
            send(&self.server, &notice.sessions, &mut notice.tried, notice.notification);
            return;
        };
        let session = &channel.session;
        let volume = self.server.volume(&session.volume_id);
        let sealed = session.encrypt.load(Ordering::Relaxed)
            || volume.is_some_and(|v| v.protection == Protection::Seal);
        let header = Header {
            credit_charge: 0,
            credits: 0,
            flags: HeaderFlags::SERVER_TO_REDIR,
            ..Header::request(Command::OPLOCK_BREAK, UNSOLICITED_MESSAGE_ID)
        };
        let mut body = Vec::with_capacity(44);
        notice.notification.encode(&mut body);
        let is_break = session.connections().len() > 1;
        self.push(vec![Response::reply(header, Reply::ok(body))], sealed.then_some(notice.session_id));
        if let Some(transmit) = self.transmit.back_mut() {
            transmit.is_break = is_break;
        }
    }

    fn finish(&mut self, mut response: Response) {
        response.header.credits = self.credits.grant(1);
        self.transmit.push_back(Transmit::new(vec![response], None));
    }

    /// Runs a chain until it waits or ends.
    fn advance(&mut self, now: Now, id: u64, mut chain: Chain) -> Result<(), Disconnect> {
        while let Some((header, range)) = chain.requests.get(chain.next).cloned() {
            chain.next += 1;
            let mut request = Request {
                header,
                frame: Arc::clone(&chain.frame),
                range,
                session: None,
                tree: None,
                related_file: chain.related.file,
                related: header.flags.contains(HeaderFlags::RELATED_OPERATIONS),
                wake_token: 0,
                sealed: chain.sealed_for.is_some(),
                began: now,
                signing: None,
                by_rdma: false,
                invalidate: None,
                counted: None,
            };
            let step = match self.admit(&mut chain, &mut request) {
                Err(step) => step,
                Ok(()) => {
                    let mut ctx = Ctx { core: &mut self.core, server: &self.server, now, request };
                    let step = commands::dispatch(&mut ctx);
                    request = ctx.request;
                    step
                }
            };
            if !self.settle(id, &mut chain, request, step)? {
                self.chains.insert(id, chain);
                return Ok(());
            }
        }
        self.pinned_bytes -= chain.pinned_bytes;
        self.send(chain);
        Ok(())
    }

    /// Session, signature, tree and sizes of a request ([MS-SMB2] 3.3.5.2).
    fn admit(&mut self, chain: &mut Chain, request: &mut Request) -> Result<(), Step> {
        let fail = |status| Err(Step::Fail(status));
        let header = &mut request.header;
        // [MS-SMB2] 3.3.5.2.7.2
        if request.related {
            chain.related.broken |= chain.next == 1;
            if chain.related.broken {
                return fail(NtStatus::INVALID_PARAMETER);
            }
            header.session_id = chain.related.session_id;
            if let Ids::Sync { tree_id, .. } = &mut header.ids {
                *tree_id = chain.related.tree_id;
            }
        } else {
            chain.related.broken = false;
            chain.related.file = None;
            request.related_file = None;
            chain.related.create_error = None;
        }
        chain.related.session_id = header.session_id;
        chain.related.tree_id = header.tree_id();
        let command = header.command;
        // [MS-SMB2] 3.3.5.2.1.1: what is sealed for a session speaks for that session only.
        if chain.sealed_for.is_some_and(|s| header.session_id != s) {
            return Err(Step::Disconnect("a sealed request for another session"));
        }
        if command == Command::NEGOTIATE {
            return Ok(());
        }
        let session_id = header.session_id;
        let tree_id = header.tree_id();
        let optional = matches!(command, Command::SESSION_SETUP | Command::ECHO);
        let Some(channel) = self.core.channels.get_mut(&session_id) else {
            chain.related.broken = !optional;
            return if optional { Ok(()) } else { fail(NtStatus::USER_SESSION_DELETED) };
        };
        let session = Arc::clone(&channel.session);
        if session.closed.load(Ordering::Acquire) {
            return fail(NtStatus::USER_SESSION_DELETED);
        }
        if chain.sealed_for.is_some() && !session.seals.load(Ordering::Relaxed) {
            session.seals.store(true, Ordering::Relaxed);
        }
        // Who authenticates a channel's session anew gets even a refusal signed with the channel's key, as from Samba: a
        // client that signs believes nothing else.
        if command == Command::SESSION_SETUP {
            request.session = Some(Arc::clone(&session));
        }
        if !channel.believes(&request.header, request.message(), chain.sealed_for.is_some()) {
            return fail(NtStatus::ACCESS_DENIED);
        }
        request.session = Some(Arc::clone(&session));
        if !optional && !matches!(command, Command::LOGOFF | Command::TREE_CONNECT) {
            // [MS-SMB2] 3.3.5.2.11
            let Some(tree) = channel.lookup.tree(&session, tree_id) else {
                return fail(NtStatus::NETWORK_NAME_DELETED);
            };
            if tree.encrypt && chain.sealed_for.is_none() {
                return fail(NtStatus::ACCESS_DENIED);
            }
            if let Share::Volume(volume) = &tree.share
                && volume.removed.load(Ordering::Acquire)
                && !matches!(command, Command::TREE_DISCONNECT | Command::CLOSE)
            {
                return fail(NtStatus::NETWORK_NAME_DELETED);
            }
            request.tree = Some(tree);
        }
        // [MS-SMB2] 3.3.5.2.5
        if let Some(bytes) = commands::payload_bytes(command, request.message())
            && let Some(n) = &self.core.negotiated
        {
            let charge = if n.capabilities.contains(Capabilities::LARGE_MTU) {
                u32::from(request.header.credit_charge.max(1))
            } else {
                1
            };
            if bytes > n.io_bytes_max || bytes.div_ceil(limits::CREDIT_BYTES).max(1) > charge {
                return fail(NtStatus::INVALID_PARAMETER);
            }
        }
        // The answers of a compound are one frame, which has a longest length.
        if chain.requests.len() > 1 {
            let before: u64 = chain.responses.iter().map(Response::length).sum();
            let more = u64::from(commands::answer_bytes(command, request.message()));
            if before + more > u64::from(limits::FRAME_BYTES_MAX) {
                return fail(NtStatus::INSUFFICIENT_RESOURCES);
            }
        }
        // A file that was never created cannot be worked on.
        if request.related
            && command != Command::CREATE
            && let Some(status) = chain.related.create_error
        {
            return fail(status);
        }
        Ok(())
    }

    /// Records a step. True: the chain may go on; false: it waits.
    fn settle(
        &mut self,
        id: u64,
        chain: &mut Chain,
        mut request: Request,
        step: Step,
    ) -> Result<bool, Disconnect> {
        match step {
            Step::Fs(kind, then) => {
                chain.current = Some(request);
                self.core.submit(kind, Pending::Chain(id, then));
                Ok(false)
            }
            Step::Park(resume) => {
                let bytes = chain.frame.held_bytes() as u64;
                let counted = match self.may_wait(chain, &request, bytes) {
                    Ok(counted) => counted,
                    Err(status) => {
                        // Let the handler take back what it registered, then say why.
                        let mut ctx =
                            Ctx { core: &mut self.core, server: &self.server, now: request.began, request };
                        let _ = resume(&mut ctx, Wake::Cancelled);
                        let request = ctx.request;
                        return self.settle(id, chain, request, Step::Fail(status));
                    }
                };
                let token = request.wake_token;
                if chain.async_id.is_none() {
                    chain.async_id = Some(token);
                    self.interim(chain, &request, token);
                }
                let Header { message_id, session_id, .. } = request.header;
                let sealed = request.sealed;
                let parked =
                    Parked { chain: id, message_id, session_id, sealed, bytes, _counted: counted, resume };
                self.parked.insert(token, parked);
                self.parked_bytes += bytes;
                chain.current = Some(request);
                Ok(false)
            }
            Step::Disconnect(why) => Err(Disconnect(why)),
            Step::Leave(why) => {
                if !std::mem::replace(&mut self.core.leaving, true) {
                    self.core.events.push_back(Event::Leaving { why });
                }
                // Neither this request nor those with it are answered.
                chain.next = chain.requests.len();
                chain.responses.clear();
                Ok(true)
            }
            Step::Reply(reply) => {
                self.answer(chain, &mut request, reply);
                Ok(true)
            }
            Step::Fail(status) => {
                let reply = Reply { status, ..Reply::ok(super::chain::ERROR_BODY.to_vec()) };
                self.answer(chain, &mut request, reply);
                Ok(true)
            }
        }
    }

    /// Whether a request may wait whose frame has `bytes`; its part of what may wait at its volume.
    fn may_wait(&self, chain: &Chain, request: &Request, bytes: u64) -> Result<Option<[Taken; 2]>, NtStatus> {
        // [MS-SMB2] 3.3.5.2.7: in the middle of a compound only what has to wait for a break does.
        if chain.next != chain.requests.len()
            && !matches!(request.header.command, Command::CREATE | Command::SET_INFO)
        {
            return Err(NtStatus::INTERNAL_ERROR);
        }
        // No other request comes any more.
        if self.core.closed {
            return Ok(None);
        }
        let no_room = NtStatus::INSUFFICIENT_RESOURCES;
        if self.parked.len() >= limits::ASYNC_PER_CONNECTION_MAX
            || self.parked_bytes + bytes > limits::PARKED_BYTES_PER_CONNECTION_MAX
        {
            return Err(no_room);
        }
        let Some(Share::Volume(volume)) = request.tree.as_ref().map(|tree| &tree.share) else {
            return Ok(None);
        };
        let used = &volume.used;
        let counted = [used.waiting.take(1).ok_or(no_room)?, used.parked_bytes.take(bytes).ok_or(no_room)?];
        Ok(Some(counted))
    }

    fn answer(&mut self, chain: &mut Chain, request: &mut Request, reply: Reply) {
        let status = reply.status;
        chain.related.file = request.related_file;
        // TREE_CONNECT and SESSION_SETUP make ids that related requests inherit.
        chain.related.session_id = request.header.session_id;
        chain.related.tree_id = request.header.tree_id();
        if request.header.command == Command::CREATE {
            chain.related.create_error = status.is_error().then_some(status);
        }
        let payload_bytes = reply.payload.as_ref().map_or_else(
            || {
                if request.header.command == Command::WRITE {
                    commands::payload_bytes(Command::WRITE, request.message()).unwrap_or(0)
                } else {
                    0
                }
            },
            |p| p.length() as u32,
        );
        let payload_bytes = match &reply.remote {
            Some(remote) => remote.payload.length() as u32,
            None => payload_bytes,
        };
        self.core.events.push_back(Event::Completed {
            command: request.header.command,
            status,
            began: request.began.instant,
            payload_bytes,
            by_rdma: request.by_rdma,
        });
        let mut header = request.header.response(status);
        let async_id = chain.async_id.take();
        header.credits = if async_id.is_some() { 0 } else { self.credits.grant(request.header.credits) };
        if let Some(async_id) = async_id {
            header.ids = Ids::Async { async_id };
        }
        let mut response = Response::reply(header, reply);
        response.sign = self.signing_key(chain, request, status);
        response.invalidate = request.invalidate;
        // There is no key to sign with, but a client that signs believes it only with the flag, which Windows echoes.
        if status == NtStatus::USER_SESSION_DELETED && request.header.flags.contains(HeaderFlags::SIGNED) {
            response.header.flags.insert(HeaderFlags::SIGNED);
        }
        self.note_preauth(request, &response);
        chain.responses.push(response);
    }

    /// [MS-SMB2] 3.3.4.1.1: what was signed is answered signed, and so is the end of SESSION_SETUP.
    fn signing_key(&self, chain: &Chain, request: &Request, status: NtStatus) -> Option<SigningKey> {
        if chain.sealed_for.is_some() {
            return None;
        }
        let channel = self.core.channels.get(&request.header.session_id);
        // LOGOFF has taken the channel away already, but its answer is still signed.
        let (session, key) = match (channel, &request.signing) {
            (Some(c), _) => (Arc::clone(&c.session), c.signing.clone()),
            (None, Some(key)) => (Arc::clone(request.session.as_ref()?), key.clone()),
            (None, None) => return None,
        };
        let asked = request.header.flags.contains(HeaderFlags::SIGNED);
        let setup_done = request.header.command == Command::SESSION_SETUP && status == NtStatus::SUCCESS;
        // A request whose signature was wrong gets an unsigned refusal.
        if request.session.is_none() && !setup_done {
            return None;
        }
        (asked || setup_done || session.signing_required.load(Ordering::Relaxed)).then_some(key)
    }

    /// [MS-SMB2] 3.3.5.4, 3.3.5.5: the hash runs over requests and responses as they go over the wire, without the final
    /// SESSION_SETUP response.
    fn note_preauth(&mut self, request: &Request, response: &Response) {
        let message = || {
            let mut bytes = Vec::new();
            response.header.encode(&mut bytes);
            bytes.extend_from_slice(&response.body);
            bytes
        };
        match request.header.command {
            Command::NEGOTIATE => {
                if let Some(n) = &mut self.core.negotiated
                    && n.dialect == Dialect::SMB3_1_1
                {
                    n.preauth.update(request.message());
                    n.preauth.update(&message());
                }
            }
            Command::SESSION_SETUP if response.header.status == NtStatus::MORE_PROCESSING_REQUIRED => {
                if let Some(pending) = self.core.pending.get_mut(&response.header.session_id) {
                    let mut message = message();
                    // The legs of a binding are signed, and hashed as they go over the wire.
                    if let Some(key) = &response.sign {
                        key.sign_in_place(&mut message, &[]);
                    }
                    pending.preauth.update(&message);
                }
            }
            _ => {}
        }
    }

    fn interim(&mut self, chain: &mut Chain, request: &Request, async_id: u64) {
        let mut header = request.header.response(NtStatus::PENDING);
        header.credits = self.credits.grant(request.header.credits);
        header.ids = Ids::Async { async_id };
        let response = Response::error(header);
        // [MS-SMB2] 3.3.4.2: not signed. With AES-GMAC the last answer, under the same message id, has the same nonce.
        let mut responses = std::mem::take(&mut chain.responses);
        responses.push(response);
        self.push(responses, chain.sealed_for);
    }

    fn send(&mut self, chain: Chain) {
        self.push(chain.responses, chain.sealed_for);
    }

    fn push(&mut self, responses: Vec<Response>, sealed_for: Option<u64>) {
        if self.core.closed || responses.is_empty() {
            return;
        }
        let seal = sealed_for.and_then(|session_id| {
            let keys = match self.core.channels.get_mut(&session_id) {
                Some(channel) => channel.seal.as_mut(),
                None => self.core.last_sealing.as_mut().filter(|(id, _)| *id == session_id).map(|(_, k)| k),
            }?;
            // Without a nonce nothing is sent: the client notices, and a new session has new keys.
            let nonce = keys.nonces.next_nonce().ok()?;
            Some(Sealer { key: keys.sealing.clone(), nonce, session_id })
        });
        if sealed_for.is_some() && seal.is_none() {
            // The session ended under a sealed request: what it asked in secret is not answered in the open.
            return;
        }
        self.transmit.push_back(Transmit::new(responses, seal));
    }

    fn wake(&mut self, now: Now, token: u64, reason: Wake) -> Result<(), Disconnect> {
        let Some(parked) = self.parked.remove(&token) else { return Ok(()) };
        self.parked_bytes -= parked.bytes;
        let Some(mut chain) = self.chains.remove(&parked.chain) else { return Ok(()) };
        let Some(request) = chain.current.take() else { return Ok(()) };
        let mut ctx = Ctx { core: &mut self.core, server: &self.server, now, request };
        let step = (parked.resume)(&mut ctx, reason);
        let request = ctx.request;
        if self.settle(parked.chain, &mut chain, request, step)? {
            self.advance(now, parked.chain, chain)
        } else {
            self.chains.insert(parked.chain, chain);
            Ok(())
        }
    }

    /// [MS-SMB2] 3.3.5.16: by AsyncId or by MessageId; no answer of its own, and none for what is not waiting. One that does
    /// not prove that it comes from the session whose request it names is dropped.
    fn cancel(
        &mut self,
        now: Now,
        header: &Header,
        message: &[u8],
        sealed_for: Option<u64>,
    ) -> Result<(), Disconnect> {
        // [MS-SMB2] 3.3.5.2.1.1, as in `admit`.
        if sealed_for.is_some_and(|session_id| session_id != header.session_id) {
            return Err(Disconnect("a sealed request for another session"));
        }
        let Some(channel) = self.core.channels.get(&header.session_id) else { return Ok(()) };
        if channel.session.closed.load(Ordering::Acquire)
            || !channel.believes(header, message, sealed_for.is_some())
        {
            return Ok(());
        }
        let found = match header.ids {
            Ids::Async { async_id } => self.parked.get_key_value(&async_id),
            Ids::Sync { .. } => self.parked.iter().find(|(_, p)| p.message_id == header.message_id),
        };
        let is_its = |parked: &Parked| {
            parked.session_id == header.session_id && (sealed_for.is_some() || !parked.sealed)
        };
        match found.filter(|(_, parked)| is_its(parked)).map(|(token, _)| *token) {
            Some(token) => self.wake(now, token, Wake::Cancelled),
            None => Ok(()),
        }
    }
}

/// What a frame's requests keep in memory: the frame, and answers that are made in memory of the protocol's own. What READs
/// find lies in buffers of the transport's.
fn pinned_bytes(frame: &dyn Frame, requests: &[(Header, Range<usize>)]) -> u64 {
    let answers: u64 = requests
        .iter()
        .filter(|(header, _)| header.command != Command::READ)
        .map(|(header, range)| {
            let message = frame.bytes().get(range.clone()).unwrap_or_default();
            u64::from(commands::answer_bytes(header.command, message))
        })
        .sum();
    frame.held_bytes() as u64 + answers.min(limits::FRAME_BYTES_MAX.into())
}
