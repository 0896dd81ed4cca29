//! Direct TCP ([MS-SMB2] 2.1): each frame follows a zero byte and a 24-bit length.
//!
//! Data are first received into a staging buffer, many small frames at a time. The rest of an incomplete frame is received into
//! a separate buffer, placed so that the data of a WRITE start on a page; after it, only a few bytes are staged, so that the
//! payload of the next frame is received in place without a copy.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_smb::engine::{Disconnect, Segment, Transmit};
use forebay_smb::fs::Payload;

use super::acknowledged::{Unacknowledged, outstanding};
use super::frame::{TRANSFORM, WRITE_DATA, in_one_piece};
use crate::backend::directory::MappedRead;
use crate::buffers::{Buffer, FrameBuffer, ReadBuffer};
use crate::io::{Message, Operation, Part, SpareParts};
use crate::limits::{
    SEND_GATHER_BYTES_MAX, SEND_GATHER_MAPPED_BYTES_MAX, STAGING_AFTER_LARGE_BYTES, STAGING_BYTES,
};
use crate::memory::Allowance;

const PREFIX: usize = 4;
/// First bytes of a sealed frame.
const SEALED: &[u8] = b"\xfdSMB";

/// A connection over TCP.
pub(crate) struct TcpLink {
    pub(crate) socket: Arc<OwnedFd>,
    pub(crate) receiver: Receiver,
    pub(crate) queue: SendQueue,
    /// When the send in flight started.
    pub(crate) sending: Option<Instant>,
    /// State of data that the peer's machine has not acknowledged.
    pub(crate) unacknowledged: Unacknowledged,
}

impl TcpLink {
    pub(crate) fn new(socket: Arc<OwnedFd>) -> Self {
        Self {
            socket,
            receiver: Receiver::new(),
            queue: SendQueue::default(),
            sending: None,
            unacknowledged: Unacknowledged::default(),
        }
    }

    /// Queues a frame.
    pub(crate) fn push(
        &mut self,
        transmit: Transmit,
        memory: &Allowance,
        spare: &mut SpareParts,
    ) -> Result<(), Disconnect> {
        self.unacknowledged.sending(transmit.break_channels);
        self.queue.push(message(transmit, memory, spare)?);
        Ok(())
    }

    /// Whether the peer's machine has acknowledged nothing for too long; to be called about once a second.
    pub(crate) fn is_silent(&mut self, now: Instant) -> bool {
        if !self.unacknowledged.is_watched() {
            return false;
        }
        let queued = self.queue.bytes() > 0;
        outstanding(&*self.socket).is_ok_and(|found| self.unacknowledged.is_gone(now, found, queued))
    }
}

/// The receiving side of a connection.
pub(crate) struct Receiver {
    state: State,
    /// Whether the last frame did not fit in the staging buffer.
    large: bool,
    /// The time that the incomplete frame takes.
    rest: Rest,
}

/// How long the rest of an incomplete frame takes to arrive. Time in which the server does not receive does not count.
#[derive(Clone, Copy, Debug, Default)]
struct Rest {
    /// Duration of the completed receives.
    spent: Duration,
    /// When the receive in flight started.
    since: Option<Instant>,
}

impl Rest {
    fn begin(&mut self, now: Instant) {
        self.since = Some(now);
    }

    fn end(&mut self, now: Instant) {
        self.spent += self.since.take().map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
    }

    fn time(&self, now: Instant) -> Duration {
        self.spent + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

enum State {
    /// `buffer[from..to]` is received but not yet taken.
    Staged { buffer: Buffer, from: usize, to: usize },
    /// The operation is in flight.
    Waiting,
    /// A frame that started in the staging buffer, and is received to its end.
    Partial { buffer: Buffer, start: isize, filled: usize, length: usize },
    /// A complete large frame.
    Whole(FrameBuffer),
    /// Nothing is held.
    Empty,
}

/// The result of taking a frame.
pub(crate) enum Received {
    /// A frame.
    Frame(FrameBuffer),
    /// Not enough data: receive more.
    More,
    /// A frame is waiting, but no buffer is available for it yet.
    Short,
}

impl Receiver {
    pub(crate) fn new() -> Self {
        Self { state: State::Empty, large: false, rest: Rest::default() }
    }

    /// Returns the operation that receives more; `None` while one is in flight or a frame must be taken first.
    pub(crate) fn operation(
        &mut self,
        socket: &Arc<OwnedFd>,
        memory: &Allowance,
    ) -> Result<Option<Operation>, Disconnect> {
        let socket = Arc::clone(socket);
        let (buffer, start, filled, least, most) = match std::mem::replace(&mut self.state, State::Waiting) {
            State::Partial { buffer, start, filled, length } => (buffer, start, filled, length, length),
            State::Empty => {
                let buffer = memory.owed(STAGING_BYTES)?;
                (buffer, 0, 0, 1, self.staging())
            }
            State::Staged { mut buffer, from, to } => {
                let held = to - from;
                if from > 0 {
                    let all = buffer.bytes_mut(0..to.cast_signed());
                    all.copy_within(from.., 0);
                }
                (buffer, 0, held, held + 1, self.staging().max(held + PREFIX + SEALED.len()))
            }
            other => {
                self.state = other;
                return Ok(None);
            }
        };
        if filled > 0 {
            self.rest.begin(Instant::now());
        }
        Ok(Some(Operation::Receive { socket, buffer, start, filled, least, most }))
    }

    /// How long the rest of a frame has been received.
    pub(crate) fn time_of_rest(&self, now: Instant) -> Duration {
        self.rest.time(now)
    }

    fn staging(&self) -> usize {
        if self.large { STAGING_AFTER_LARGE_BYTES } else { STAGING_BYTES }
    }

    /// Takes back the buffer of [`Receiver::operation`]. Returns false if the peer has sent its last byte.
    pub(crate) fn completed(
        &mut self,
        buffer: Buffer,
        start: isize,
        filled: usize,
        least: usize,
        most: usize,
    ) -> bool {
        if self.rest.since.is_some() {
            self.rest.end(Instant::now());
        }
        if filled < least {
            self.state = State::Empty;
            return false;
        }
        self.state = if least == most && start < 0 {
            State::Whole(FrameBuffer::new(buffer, start, filled))
        } else {
            State::Staged { buffer, from: 0, to: filled }
        };
        true
    }

    /// Drops received data that are not yet taken, complete and incomplete frames.
    pub(crate) fn discard(&mut self) {
        if !self.is_waiting() {
            self.state = State::Empty;
        }
    }

    /// Whether a receive is in flight.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting)
    }

    /// Returns the next received frame. `frame_bytes_max` is the longest that the peer may send now.
    pub(crate) fn next(
        &mut self,
        frame_bytes_max: u32,
        memory: &mut Allowance,
    ) -> Result<Received, Disconnect> {
        match std::mem::replace(&mut self.state, State::Empty) {
            State::Whole(frame) => {
                self.large = true;
                self.rest = Rest::default();
                Ok(Received::Frame(frame))
            }
            State::Staged { buffer, from, to } => self.split(buffer, from, to, frame_bytes_max, memory),
            other => {
                self.state = other;
                Ok(Received::More)
            }
        }
    }

    fn split(
        &mut self,
        buffer: Buffer,
        from: usize,
        to: usize,
        frame_bytes_max: u32,
        memory: &mut Allowance,
    ) -> Result<Received, Disconnect> {
        let staged = buffer.bytes(from.cast_signed()..to.cast_signed());
        if staged.is_empty() {
            // An idle connection holds only the buffer of its pending receive.
            return Ok(Received::More);
        }
        let Some((&[zero, a, b, c], rest)) = staged.split_first_chunk() else {
            self.state = State::Staged { buffer, from, to };
            return Ok(Received::More);
        };
        let length = u32::from_be_bytes([0, a, b, c]);
        if zero != 0 {
            return Err(Disconnect("a frame of another transport"));
        }
        if length > frame_bytes_max {
            return Err(Disconnect("a frame beyond the limit"));
        }
        let length = length as usize;
        if rest.len() < length.min(SEALED.len()) {
            self.state = State::Staged { buffer, from, to };
            return Ok(Received::More);
        }
        let start = if rest.starts_with(SEALED) { -WRITE_DATA - TRANSFORM } else { -WRITE_DATA };
        let there = rest.len().min(length);
        // Bytes in front of the buffer's data need no room in the data.
        let Some(mut frame) = memory.take(length.saturating_sub(start.unsigned_abs())) else {
            self.state = State::Staged { buffer, from, to };
            return Ok(Received::Short);
        };
        frame.bytes_mut(start..start + there.cast_signed()).copy_from_slice(&rest[..there]);
        if there < length {
            self.state = State::Partial { buffer: frame, start, filled: there, length };
            return Ok(Received::More);
        }
        self.large = false;
        self.rest = Rest::default();
        let from = from + PREFIX + length;
        if from < to {
            self.state = State::Staged { buffer, from, to };
        }
        Ok(Received::Frame(FrameBuffer::new(frame, start, length)))
    }
}

/// The sending side of a connection: whole frames, in order.
#[derive(Default)]
pub(crate) struct SendQueue {
    messages: VecDeque<Message>,
    /// Bytes queued or being sent.
    bytes: u64,
}

impl SendQueue {
    /// Bytes queued or being sent.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn push(&mut self, message: Message) {
        self.bytes += message.length() as u64;
        self.messages.push_back(message);
    }

    /// Bytes of the next frame that are copied from the page cache when sent.
    pub(crate) fn next_mapped_bytes(&self) -> usize {
        self.messages.front().map_or(0, Message::mapped_bytes)
    }

    /// Returns the next message to send; gathers small messages.
    pub(crate) fn take(&mut self, spare: &mut SpareParts) -> Option<Message> {
        let mut message = self.messages.pop_front()?;
        let is_mapped = message.mapped_bytes() > 0;
        let bytes_max = if is_mapped { SEND_GATHER_MAPPED_BYTES_MAX } else { SEND_GATHER_BYTES_MAX };
        while let Some(next) = self.messages.front_mut()
            && message.gather(next, bytes_max)
        {
            self.messages.pop_front().into_iter().for_each(|gathered| spare.keep(gathered));
        }
        Some(message)
    }

    /// Records that a message from [`SendQueue::take`] is done.
    pub(crate) fn completed(&mut self, message: &Message) {
        self.bytes -= message.length() as u64;
    }

    /// Drops the queued messages.
    pub(crate) fn clear(&mut self) {
        for message in self.messages.drain(..) {
            self.bytes -= message.length() as u64;
        }
    }
}

/// Converts a frame to a message, and seals it if requested.
fn message(transmit: Transmit, memory: &Allowance, spare: &mut SpareParts) -> Result<Message, Disconnect> {
    let length = transmit.len();
    let Transmit { segments, seal, held, .. } = transmit;
    let Some(sealer) = seal else {
        let mut parts = spare.take();
        parts.reserve(1 + segments.len());
        parts.push(Part::Prefix(prefix(length)?));
        for segment in segments {
            parts.push(match segment {
                Segment::Bytes(bytes) => {
                    let charge = memory.charge(bytes.capacity());
                    Part::Bytes(bytes, charge)
                }
                Segment::Payload(payload) => data(payload)?,
            });
        }
        return Ok(Message::new(parts).holding(held));
    };
    let (mut buffer, range) = in_one_piece(segments, Some(sealer), memory)?;
    let begin = range.start - PREFIX.cast_signed();
    buffer.bytes_mut(begin..range.start).copy_from_slice(&prefix(range.len())?);
    let mut parts = spare.take();
    parts.push(Part::Whole(buffer, begin..range.end));
    Ok(Message::new(parts).holding(held))
}

/// Converts read data, in a buffer or in a mapping, to a part.
fn data(payload: Box<dyn Payload>) -> Result<Part, Disconnect> {
    let payload = match payload.into_any().downcast::<MappedRead>() {
        Ok(read) => return Ok(Part::Mapped(*read)),
        Err(payload) => payload,
    };
    match payload.downcast::<ReadBuffer>() {
        Ok(read) => Ok(Part::Payload(read)),
        Err(_) => Err(Disconnect("data read by another backend than this transport knows")),
    }
}

fn prefix(length: usize) -> Result<[u8; PREFIX], Disconnect> {
    match u32::try_from(length).map(u32::to_be_bytes) {
        Ok(bytes @ [0, ..]) => Ok(bytes),
        _ => Err(Disconnect("a response longer than a frame can be")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::{BufferPool, PAGE};
    use forebay_rdma::{Account, Group};
    use forebay_smb::fs::Frame;

    fn framed(payload: &[u8]) -> Vec<u8> {
        [&prefix(payload.len()).expect("it fits"), payload].concat()
    }

    /// Feeds `wire` in pieces of at most `piece` bytes and returns the resulting frames.
    fn frames(wire: &[u8], piece: usize, frame_bytes_max: u32) -> Result<Vec<FrameBuffer>, Disconnect> {
        let mut memory = Allowance::alone();
        let socket = Arc::new(OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket")));
        let mut receiver = Receiver::new();
        let mut found = Vec::new();
        let mut wire = wire;
        loop {
            while let Received::Frame(frame) = receiver.next(frame_bytes_max, &mut memory)? {
                found.push(frame);
            }
            let operation = receiver.operation(&socket, &memory)?.expect("nothing is in flight");
            let Operation::Receive { mut buffer, start, mut filled, least, most, .. } = operation else {
                panic!("a receive")
            };
            assert!(receiver.is_waiting());
            while filled < least && !wire.is_empty() {
                let n = wire.len().min(piece).min(most - filled);
                let at = start + filled.cast_signed();
                buffer.bytes_mut(at..at + n.cast_signed()).copy_from_slice(&wire[..n]);
                filled += n;
                wire = &wire[n..];
            }
            if !receiver.completed(buffer, start, filled, least, most) {
                return Ok(found);
            }
        }
    }

    #[test]
    fn frames_are_reassembled_from_pieces_of_any_size() {
        let large: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        let mut sealed = large.clone();
        sealed[..4].copy_from_slice(SEALED);
        let sent: Vec<&[u8]> =
            vec![b"one", b"", b"three", &large, &sealed, b"six", &large[..20_000], b"eight"];
        let wire: Vec<u8> = sent.iter().flat_map(|frame| framed(frame)).collect();
        for piece in [1, 3, 5, 100, 4096, 16_384, 1 << 20] {
            let found = frames(&wire, piece, 1 << 20).expect("well formed");
            let found: Vec<&[u8]> = found.iter().map(Frame::bytes).collect();
            assert!(found == sent, "pieces of {piece}");
        }
    }

    #[test]
    fn frame_timeout_counts_only_time_spent_receiving() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut rest = Rest::default();
        assert_eq!(rest.time(at(100)), Duration::ZERO);
        rest.begin(at(0));
        assert_eq!(rest.time(at(3)), Duration::from_secs(3));
        rest.end(at(3));
        assert_eq!(rest.time(at(60)), Duration::from_secs(3));
        rest.begin(at(60));
        assert_eq!(rest.time(at(61)), Duration::from_secs(4));
    }

    #[test]
    fn frame_without_a_buffer_waits_for_memory() {
        let account = Account::new(Group::new(1 << 20), 1 << 20);
        let mut memory = Allowance::new(BufferPool::new(1 << 20), account, Arc::new(|| ()));
        let held = memory.take(400 << 10).expect("memory");
        let socket = Arc::new(OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket")));
        let mut receiver = Receiver::new();
        let operation = receiver.operation(&socket, &memory).expect("memory").expect("nothing is in flight");
        let Operation::Receive { mut buffer, start, least, most, .. } = operation else {
            panic!("a receive")
        };
        let wire = [framed(b"small"), framed(&[7; 400 << 10])].concat();
        buffer.bytes_mut(0..most.cast_signed()).copy_from_slice(&wire[..most]);
        assert!(receiver.completed(buffer, start, most, least, most));
        assert!(
            matches!(receiver.next(1 << 20, &mut memory), Ok(Received::Frame(frame)) if frame.length() == 5)
        );
        for _ in 0..2 {
            assert!(matches!(receiver.next(1 << 20, &mut memory), Ok(Received::Short)));
            assert!(memory.is_short());
        }
        drop(held);
        assert!(matches!(receiver.next(1 << 20, &mut memory), Ok(Received::More)));
        let operation = receiver.operation(&socket, &memory).expect("memory").expect("the rest");
        let Operation::Receive { least, filled, .. } = operation else { panic!("a receive") };
        assert_eq!((least, filled), (400 << 10, most - 4 - 5 - 4));
    }

    #[test]
    fn write_data_is_page_aligned() {
        let large = vec![1; 1 << 20];
        let mut sealed = large.clone();
        sealed[..4].copy_from_slice(SEALED);
        let wire = [framed(&large), framed(&sealed)].concat();
        let found = frames(&wire, 1 << 20, 2 << 20).expect("well formed");
        assert_eq!(found[0].bytes()[112..].as_ptr().align_offset(PAGE), 0);
        assert_eq!(found[1].bytes()[164..].as_ptr().align_offset(PAGE), 0);
    }

    #[test]
    fn oversized_frames_and_other_transports_are_refused() {
        assert!(frames(&framed(&[0; 1001]), 100, 1000).is_err());
        assert_eq!(frames(&framed(&[0; 1000]), 100, 1000).expect("allowed").len(), 1);
        assert!(frames(b"\x81\0\0\x44 netbios", 100, 1000).is_err());
        assert!(frames(b"GET / HTTP/1.1\r\n\r\n", 100, 1000).is_err());
    }

    #[test]
    fn incomplete_frame_at_the_end_is_dropped() {
        let whole = framed(&[7; 50_000]);
        assert!(frames(&whole[..40_000], 4096, 1 << 20).expect("well formed").is_empty());
        assert!(frames(&whole[..2], 4096, 1 << 20).expect("well formed").is_empty());
    }
}
