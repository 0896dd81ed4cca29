//! Incoming fragments ([MS-SMBD] 3.1.5.8): a list of pieces of receive buffers.

use crate::disconnect::Misbehaviour;
use crate::wire::Token;
use crate::{BufferId, Segment};

/// A complete upper-layer message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Its data in order: one segment for each receive buffer.
    pub segments: &'a [Segment],
    /// Its length in bytes.
    pub length: u32,
    /// Our token that the peer invalidated with it.
    pub invalidated: Option<Token>,
}

/// The message that is being received.
#[derive(Debug, Default)]
pub(crate) struct Reassembly {
    segments: Vec<Segment>,
    length: u32,
    remaining: u32,
    delivered: bool,
    invalidated: Option<Token>,
}

impl Reassembly {
    /// Discards a message that was delivered.
    pub(crate) fn begin(&mut self) {
        if self.delivered {
            self.segments.clear();
            self.length = 0;
            self.invalidated = None;
            self.delivered = false;
        }
    }

    /// [MS-SMBD] 3.1.5.8: the last token counts.
    pub(crate) fn invalidated(&mut self, token: Token) {
        self.invalidated = Some(token);
    }

    /// Appends a fragment; true if the message is complete.
    pub(crate) fn push(
        &mut self,
        segment: Segment,
        remaining: u32,
        fragments_max: u32,
    ) -> Result<bool, Misbehaviour> {
        if !self.segments.is_empty() && segment.length.checked_add(remaining) != Some(self.remaining) {
            return Err(Misbehaviour::Remaining {
                length: segment.length,
                remaining,
                expected: self.remaining,
            });
        }
        if remaining > 0 && self.segments.len() as u32 + 1 >= fragments_max {
            return Err(Misbehaviour::TooManyFragments { max: fragments_max });
        }
        self.segments.push(segment);
        self.length += segment.length;
        self.remaining = remaining;
        self.delivered = remaining == 0;
        Ok(self.delivered)
    }

    /// Whether a message has begun but is not complete.
    pub(crate) fn has_begun(&self) -> bool {
        self.remaining > 0
    }

    pub(crate) fn message(&self) -> Message<'_> {
        Message { segments: &self.segments, length: self.length, invalidated: self.invalidated }
    }

    /// Buffers of an incomplete message.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = BufferId> {
        self.begin();
        self.segments.drain(..).map(|s| s.buffer)
    }
}
