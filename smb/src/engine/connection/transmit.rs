//! Frames to send.

use forebay_smbdirect::wire::Token;

use crate::crypto::{Nonce, SealingKey, TRANSFORM_HEADER_LEN};
use crate::engine::reports::Disconnect;
use crate::engine::request::chain::{Responses, Segment, Segments, assemble};
use crate::engine::request::step::RemoteWrite;
use crate::engine::tally::Taken;

/// A frame to send, in order of [`Connection::poll_transmit`](crate::engine::Connection::poll_transmit).
pub struct Transmit {
    /// The frame in parts.
    pub segments: Segments,
    /// What must be in the peer's memory before the frame; over RDMA only.
    pub remote_writes: Vec<RemoteWrite>,
    /// The token of the peer that the frame invalidates; over RDMA only.
    pub invalidate: Option<Token>,
    /// Of a break, for which others may wait: how many channels the client has. A channel of several that does not take it can be done
    /// without. 0 for all else.
    pub break_channels: usize,
    /// Present where it must be sealed: put the parts together, seal, and send header and ciphertext.
    pub seal: Option<Sealer>,
    /// What it takes of limits of its volume: to be dropped when the frame is sent, not before.
    pub held: Held,
}

impl Transmit {
    pub(super) fn new(mut responses: Responses, seal: Option<Sealer>) -> Self {
        let remote_writes = responses.iter_mut().filter_map(|r| r.remote.take()).collect();
        // A frame invalidates one token; Linux and Windows put nothing that has one into a compound.
        let invalidate = responses.iter().find_map(|r| r.invalidate);
        let held = Held(responses.iter_mut().filter_map(|r| r.counted.take()).collect());
        Self { segments: assemble(responses), remote_writes, invalidate, break_channels: 0, seal, held }
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

/// Seals one frame.
pub struct Sealer {
    pub(super) key: SealingKey,
    pub(super) nonce: Nonce,
    pub(super) session_id: u64,
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
