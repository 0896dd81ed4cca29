//! Frames to send.

use forebay_smbdirect::wire::Token;

use crate::crypto::{Nonce, SealingKey, TRANSFORM_HEADER_LEN};
use crate::engine::reports::Disconnect;
use crate::engine::request::chain::{Responses, Segment, Segments, assemble};
use crate::engine::request::step::RemoteWrite;
use crate::engine::tally::Taken;

/// A frame to send. Send frames in the order in which
/// [`Connection::poll_transmit`](crate::engine::Connection::poll_transmit) returns them.
pub struct Transmit {
    /// The frame in parts.
    pub segments: Segments,
    /// Data that must reach the peer's memory before the frame; over RDMA only.
    pub remote_writes: Vec<RemoteWrite>,
    /// The peer's token that the frame invalidates; over RDMA only.
    pub invalidate: Option<Token>,
    /// For a break, which other requests may wait for: the number of the client's channels. If there are several, a channel
    /// that does not accept the break is expendable. 0 for all other frames.
    pub break_channels: usize,
    /// Present if the frame must be sealed: join the parts, seal them, and send header and ciphertext.
    pub seal: Option<Sealer>,
    /// Its share of its volume's limits. Drop it when the frame is sent, not before.
    pub held: Held,
}

impl Transmit {
    pub(super) fn new(mut responses: Responses, seal: Option<Sealer>) -> Self {
        let remote_writes = responses.iter_mut().filter_map(|r| r.remote.take()).collect();
        // A frame invalidates one token. Linux and Windows never put requests with a token into a compound.
        let invalidate = responses.iter().find_map(|r| r.invalidate);
        let held = Held(responses.iter_mut().filter_map(|r| r.counted.take()).collect());
        Self { segments: assemble(responses), remote_writes, invalidate, break_channels: 0, seal, held }
    }

    /// Bytes of all parts, before sealing.
    #[must_use]
    pub fn len(&self) -> usize {
        self.segments.iter().map(Segment::length).sum()
    }

    /// Whether the frame is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }
}

/// A frame's share of limits, held until this is dropped.
#[derive(Default)]
pub struct Held(Vec<Taken>);

impl Held {
    /// Takes over the share of another frame.
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
    /// Encrypts the whole frame in place and returns the header that precedes it.
    ///
    /// # Errors
    /// [`Disconnect`] if the frame is longer than the cipher can seal.
    pub fn seal(self, plaintext: &mut [u8]) -> Result<[u8; TRANSFORM_HEADER_LEN], Disconnect> {
        self.key
            .seal_in_place(self.nonce, self.session_id, plaintext)
            .map_err(|_| Disconnect("a frame too long to seal"))
    }
}
