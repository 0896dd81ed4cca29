//! A connection ([MS-SMB2] 3.3.1.7): frames in, effects out.

mod admit;
mod answer;
mod breaks;
mod progress;
mod receive;
mod transmit;

use std::collections::VecDeque;
use std::sync::Arc;

use self::progress::Parked;
pub use self::receive::Unsealed;
pub use self::transmit::{Held, Sealer, Transmit};
use crate::engine::credits::CreditWindow;
use crate::engine::mail::{ConnectionId, Mail};
use crate::engine::reports::{Disconnect, Event};
use crate::engine::request::chain::Chain;
use crate::engine::request::core::Core;
use crate::engine::request::core::Entropy;
use crate::engine::request::step::Wake;
use crate::engine::server::Server;
use crate::fs::FsOp;
use crate::ids::IdMap;
use crate::limits;
use crate::time::Now;

/// The server's end of a connection.
pub struct Connection {
    server: Arc<Server>,
    core: Core,
    credits: CreditWindow,
    chains: IdMap<u64, Chain>,
    next_chain: u64,
    /// Keyed by wake token, which is also the AsyncId.
    parked: IdMap<u64, Parked>,
    /// Total bytes of the frames of parked requests.
    parked_bytes: u64,
    /// Bytes that all chains keep in memory.
    pinned_bytes: u64,
    transmit: VecDeque<Transmit>,
}

impl Connection {
    /// Creates a connection. `peer` names the other end in logs and lists; `entropy` fills buffers with key-quality
    /// randomness.
    #[must_use]
    pub fn new(server: Arc<Server>, id: ConnectionId, peer: String, entropy: Entropy) -> Self {
        Self {
            server,
            core: Core::new(id, peer, entropy),
            credits: CreditWindow::new(),
            chains: IdMap::default(),
            next_chain: 1,
            parked: IdMap::default(),
            parked_bytes: 0,
            pinned_bytes: 0,
            transmit: VecDeque::new(),
        }
    }

    /// Marks the transport as RDMA: READ and WRITE may name the peer's memory.
    pub fn set_over_rdma(&mut self) {
        self.core.over_rdma = true;
    }

    /// The longest frame that the peer may send now, in bytes. If a longer one arrives, end the connection.
    #[must_use]
    pub fn frame_bytes_max(&self) -> u32 {
        if self.core.channels.is_empty() {
            limits::FRAME_BYTES_UNAUTHENTICATED_MAX
        } else {
            limits::FRAME_BYTES_MAX
        }
    }

    /// Whether a session is set up on this connection.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        !self.core.channels.is_empty()
    }

    /// Handles mail that another connection or an administrator caused.
    ///
    /// # Errors
    /// [`Disconnect`] if the connection has lost its last session.
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

    /// Closes the connection after its transport is gone: ends the sessions that have no other channel and closes their
    /// opens. [`Self::poll_fs`] continues to return operations for backends until [`Self::is_finished`].
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
            // No client is left to answer, and a protocol violation cannot end the connection twice.
            let _ = self.wake(now, token, Wake::Closed);
        }
        self.transmit.clear();
    }

    /// Whether the connection is closed and no operation is in flight.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.core.closed && self.core.ops.is_empty()
    }

    /// Whether the connection must end gracefully as soon as nothing is in flight, so that its client reconnects.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.core.leaving
    }

    /// Number of chains that are neither answered nor parked, for a graceful shutdown.
    #[must_use]
    pub fn requests_in_flight(&self) -> usize {
        self.chains.len() - self.parked.len().min(self.chains.len())
    }

    /// Bytes that requests keep in memory until they are answered: their frames and the answers in preparation. Above
    /// [`limits::PINNED_BYTES_PER_CONNECTION_MAX`], a transport receives nothing more.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }
}
