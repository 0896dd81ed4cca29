//! State that the requests of a connection share ([MS-SMB2] 3.3.1.7): negotiated properties, channels, and the queues to
//! backends and to the log.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::crypto::{Cipher, PreauthHash, SigningAlgorithm};
use crate::engine::channels::ChannelLink;
use crate::engine::clients::Clients;
use crate::engine::mail::{ConnectionId, Mail};
use crate::engine::open::Open;
use crate::engine::pending_auth::PendingAuth;
use crate::engine::reports::Event;
use crate::engine::request::channel::{Channel, Sealing};
use crate::engine::server::Server;
use crate::engine::tally::Taken;
use crate::engine::transforms::Transforms;
use crate::engine::volume::Volume;
use crate::fs::{FsOp, FsOpKind, OpId};
use crate::ids::IdMap;
use crate::status::NtStatus;
use crate::wire::{Capabilities, Dialect, SecurityMode};

/// Fills buffers with key-quality randomness.
pub type Entropy = Box<dyn FnMut(&mut [u8]) + Send>;

/// The result of NEGOTIATE.
pub(crate) struct Negotiated {
    pub(crate) dialect: Dialect,
    pub(crate) capabilities: Capabilities,
    pub(crate) cipher: Option<Cipher>,
    pub(crate) signing: SigningAlgorithm,
    pub(crate) transforms: Transforms,
    /// Both ends support the POSIX extensions.
    pub(crate) posix: bool,
    pub(crate) preauth: PreauthHash,
    pub(crate) io_bytes_max: u32,
    /// The values that the client sent, for FSCTL_VALIDATE_NEGOTIATE_INFO.
    pub(crate) client_guid: [u8; 16],
    pub(crate) client_capabilities: Capabilities,
    pub(crate) client_security_mode: SecurityMode,
    pub(crate) client_dialects: Vec<Dialect>,
    /// The value that the server sent.
    pub(crate) security_mode: SecurityMode,
}

/// The owner of an operation, which waits for its result.
pub(in crate::engine) enum OpOwner {
    /// The request of a chain.
    Chain(u64),
    /// Nothing.
    Background,
}

/// The state of a connection that command handlers may access.
pub(crate) struct Core {
    pub(crate) id: ConnectionId,
    pub(crate) peer: String,
    /// The transport can access the peer's memory.
    pub(crate) over_rdma: bool,
    pub(crate) negotiated: Option<Negotiated>,
    /// An SMB1 NEGOTIATE was answered with the wildcard dialect: an SMB2 NEGOTIATE must follow.
    pub(crate) wildcard: bool,
    pub(crate) channels: IdMap<u64, Channel>,
    /// Sessions that are being authenticated.
    pub(crate) pending: IdMap<u64, PendingAuth>,
    /// Its share of the connection limit of the volume that its first user opens.
    counted: Option<Taken>,
    pub(crate) entropy: Entropy,
    pub(crate) events: VecDeque<Event>,
    /// The keys of the last session that ended on this connection, for responses that are still to be sent.
    pub(crate) last_sealing: Option<(u64, Sealing)>,
    pub(in crate::engine) closed: bool,
    /// No new request begins; the connection ends when all requests in flight are answered.
    pub(in crate::engine) leaving: bool,
    /// Operations that no backend has taken yet.
    pub(in crate::engine) fs: VecDeque<FsOp>,
    /// Operations that no backend has completed yet, and their owners.
    pub(in crate::engine) ops: IdMap<OpId, OpOwner>,
    next_op: u64,
}

impl Core {
    pub(in crate::engine) fn new(id: ConnectionId, peer: String, entropy: Entropy) -> Self {
        Self {
            id,
            peer,
            over_rdma: false,
            negotiated: None,
            wildcard: false,
            channels: IdMap::default(),
            pending: IdMap::default(),
            counted: None,
            entropy,
            events: VecDeque::new(),
            last_sealing: None,
            closed: false,
            leaving: false,
            fs: VecDeque::new(),
            ops: IdMap::default(),
            next_op: 1,
        }
    }

    pub(crate) fn background(&mut self, op: FsOpKind) {
        self.submit(op, OpOwner::Background);
    }

    pub(in crate::engine) fn submit(&mut self, kind: FsOpKind, owner: OpOwner) {
        let id = OpId(self.next_op);
        self.next_op += 1;
        self.ops.insert(id, owner);
        self.fs.push_back(FsOp { id, kind });
    }

    /// Closes an open that its owner lost with its tree connect, its session or its connection. The caller has won
    /// [`Open::begin_close`] and removed it from its session.
    pub(crate) fn close_open(&mut self, server: &Server, open: &Open) {
        self.background(server.end_open(open));
    }

    /// Counts the connection for the volume of the user who logs on, unless it is already counted.
    ///
    /// # Errors
    /// `STATUS_INSUFFICIENT_RESOURCES` if the volume has reached its limit of connections.
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

    /// The dialect; call it only after NEGOTIATE.
    pub(crate) fn dialect(&self) -> Dialect {
        self.negotiated.as_ref().map_or(Dialect::SMB2_0_2, |n| n.dialect)
    }

    /// Whether both ends support the POSIX extensions.
    pub(crate) fn has_posix(&self) -> bool {
        self.negotiated.as_ref().is_some_and(|n| n.posix)
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

    /// Connection.RDMATransformIds; empty unless the transport is RDMA.
    pub(crate) fn transforms(&self) -> Transforms {
        self.negotiated.as_ref().map_or(Transforms::default(), |n| n.transforms)
    }

    /// The entry of this connection in a session's list of channels.
    pub(crate) fn link(&self) -> ChannelLink {
        ChannelLink { address: self.peer.clone(), over_rdma: self.over_rdma, transforms: self.transforms() }
    }

    /// Whether the transport is gone: no client receives an answer.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Ends a session on all its channels and closes its opens.
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

    /// Keeps or closes an open after its session has lost the last channel ([MS-SMB2] 3.3.7.1).
    fn keep_or_close(&mut self, server: &Arc<Server>, now: Instant, open: &Arc<Open>) {
        if open.is_closing() {
            return;
        }
        open.volume.lost().note(open.id);
        if !server.keep(now, open) && open.begin_close() {
            self.close_open(server, open);
        }
    }

    /// Ends a session after its client logged off ([MS-SMB2] 3.3.5.6) or returned with another session ([MS-SMB2]
    /// 3.3.5.5.3). In the latter case its channels are lost, whether or not that was detected. Durable opens are kept.
    pub(crate) fn lose_session(&mut self, server: &Arc<Server>, now: Instant, session_id: u64) {
        let Some(session) = server.sessions().remove(&session_id) else { return };
        let connections = session.end();
        // Done immediately: the client asks for the kept opens as soon as it has its answer.
        for open in session.take_opens() {
            self.keep_or_close(server, now, &open);
        }
        for connection in connections {
            if connection == self.id {
                self.leave_session(server, now, session_id);
            } else {
                // That connection may carry other sessions.
                server.post(connection, Mail::SessionEnded(session_id));
            }
        }
    }

    /// Removes this connection's channel from a session. If it was the last channel, or if the session has already ended,
    /// its opens are closed, or kept if the session was only lost.
    pub(in crate::engine) fn leave_session(&mut self, server: &Arc<Server>, now: Instant, session_id: u64) {
        let Some(channel) = self.channels.remove(&session_id) else { return };
        let left = channel.session.leave(self.id);
        if let Some(keys) = channel.seal {
            self.last_sealing = Some((session_id, keys));
        }
        server.channel_lost(self.id);
        for open in left.opens {
            if left.lost {
                self.keep_or_close(server, now, &open);
            } else if open.begin_close() {
                open.volume.lost().note(open.id);
                self.close_open(server, &open);
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
