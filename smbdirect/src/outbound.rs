//! Outgoing upper-layer messages, cut into fragments ([MS-SMBD] 3.1.5.4).

use std::collections::VecDeque;

use crate::Segment;
use crate::limits;
use crate::wire::{DataTransfer, NegotiateRequest, NegotiateResponse, Token};

/// An upper-layer message, numbered by the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MessageId(pub u64);

/// Why a message cannot be queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The negotiation has not finished, or the connection is ending.
    #[error("not connected")]
    NotConnected,
    /// It has no bytes: only the connection itself sends empty messages.
    #[error("an empty message")]
    Empty,
    /// Longer than the peer can reassemble.
    #[error("a message of {length} bytes where the peer takes {max}")]
    TooLong {
        /// Its length in bytes.
        length: u64,
        /// The maximum.
        max: u32,
    },
    /// In more than [`limits::SEGMENTS_PER_MESSAGE_MAX`] pieces.
    #[error("a message in {0} pieces")]
    TooManySegments(usize),
    /// [`limits::SEND_QUEUE_MESSAGES_MAX`] messages are queued already: the peer does not accept the data that it requested.
    /// End the connection.
    #[error("too many messages wait for credits")]
    QueueFull,
}

/// The first bytes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    bytes: [u8; NegotiateResponse::LEN],
    len: usize,
}

impl Header {
    fn new(bytes: &[u8]) -> Self {
        let mut header = Self { bytes: [0; NegotiateResponse::LEN], len: bytes.len() };
        header.bytes[..bytes.len()].copy_from_slice(bytes);
        header
    }

    pub(crate) fn request(message: &NegotiateRequest) -> Self {
        Self::new(&message.encode())
    }

    pub(crate) fn response(message: &NegotiateResponse) -> Self {
        Self::new(&message.encode())
    }

    pub(crate) fn data(message: &DataTransfer) -> Self {
        // [MS-SMBD] 3.1.5.4: without payload there is no padding.
        let len = if message.data_length > 0 { DataTransfer::DATA_OFFSET } else { DataTransfer::LEN };
        Self::new(&message.encode()[..len])
    }
}

/// One message to post as one SEND.
#[derive(Clone, Copy, Debug)]
pub struct Transmit<'a> {
    pub(crate) header: Header,
    pub(crate) segments: &'a [Segment],
    pub(crate) invalidate: Option<Token>,
    pub(crate) completes: Option<MessageId>,
}

impl Transmit<'_> {
    /// The first bytes, at most 32. Sent inline if the device supports it, or from a slot of registered memory.
    #[must_use]
    pub fn header(&self) -> &[u8] {
        &self.header.bytes[..self.header.len]
    }

    /// The data after the header, in order; at most [`crate::Config::send_segments_max`] segments.
    #[must_use]
    pub const fn segments(&self) -> &[Segment] {
        self.segments
    }

    /// The peer's token to invalidate with this SEND (SEND_WITH_INV); can be ignored if the device does not support it.
    #[must_use]
    pub const fn invalidate(&self) -> Option<Token> {
        self.invalidate
    }

    /// The upper-layer message that this SEND finishes: its buffers are free once this SEND is completed.
    #[must_use]
    pub const fn completes(&self) -> Option<MessageId> {
        self.completes
    }

    /// Total number of bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u32 {
        self.header.len as u32 + self.segments.iter().map(|s| s.length).sum::<u32>()
    }
}

#[derive(Debug)]
struct Queued {
    id: MessageId,
    left: u32,
    invalidate: Option<Token>,
}

/// Properties of a fragment, besides its segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragment {
    pub(crate) length: u32,
    pub(crate) remaining: u32,
    pub(crate) invalidate: Option<Token>,
    pub(crate) completes: Option<MessageId>,
}

/// Messages in FIFO order ([MS-SMBD] 3.1.1.1 SendQueue), and the segments of all of them in sequence.
#[derive(Debug, Default)]
pub(crate) struct Outbound {
    messages: VecDeque<Queued>,
    segments: VecDeque<Segment>,
}

impl Outbound {
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(crate) fn push(
        &mut self,
        id: MessageId,
        segments: &[Segment],
        invalidate: Option<Token>,
        max: u32,
    ) -> Result<(), SendError> {
        let length = segments.iter().map(|s| u64::from(s.length)).sum::<u64>();
        match u32::try_from(length) {
            Ok(0) => return Err(SendError::Empty),
            Ok(left) if left <= max => {
                if segments.len() > limits::SEGMENTS_PER_MESSAGE_MAX {
                    return Err(SendError::TooManySegments(segments.len()));
                }
                if self.messages.len() >= limits::SEND_QUEUE_MESSAGES_MAX {
                    return Err(SendError::QueueFull);
                }
                self.messages.push_back(Queued { id, left, invalidate });
            }
            _ => return Err(SendError::TooLong { length, max }),
        }
        self.segments.extend(segments.iter().filter(|s| s.length > 0));
        Ok(())
    }

    /// Cuts the next fragment of the first message: up to `payload_max` bytes in up to `segments_max` segments.
    pub(crate) fn next(
        &mut self,
        payload_max: u32,
        segments_max: usize,
        segments: &mut Vec<Segment>,
    ) -> Option<Fragment> {
        let message = self.messages.front_mut()?;
        let mut length = 0;
        while length < payload_max.min(message.left) && segments.len() < segments_max {
            let first = self.segments.front_mut().expect("a message has the segments of its length");
            let taken = first.length.min(payload_max - length);
            segments.push(Segment { length: taken, ..*first });
            length += taken;
            first.start += taken;
            first.length -= taken;
            if first.length == 0 {
                self.segments.pop_front();
            }
        }
        message.left -= length;
        // [MS-SMBD] 3.1.5.4: sent with exactly one fragment.
        let invalidate = message.invalidate.take();
        let remaining = message.left;
        let completes = (remaining == 0).then_some(message.id);
        if remaining == 0 {
            self.messages.pop_front();
        }
        Some(Fragment { length, remaining, invalidate, completes })
    }

    /// Messages of which the last fragment was not returned yet.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = MessageId> {
        self.segments.clear();
        self.messages.drain(..).map(|m| m.id)
    }
}
