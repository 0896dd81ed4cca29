//! Two connections and the wire between them: real bytes in registered buffers, virtual time, and a referee that reads all
//! messages and implements the rules independently.

#![allow(dead_code, reason = "every test uses a part of it")]

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use forebay_smbdirect::wire::{DataTransfer, Flags, NegotiateRequest, NegotiateResponse, Token};
use forebay_smbdirect::{
    BufferId, Config, Connection, Disconnect, MessageId, Parameters, Received, Segment, SendError,
};

/// Buffers from this number on are for sending.
const SEND_BUFFERS: u32 = 1 << 20;

/// A message between two devices.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    /// The contents of the receiver's buffer.
    pub(crate) bytes: Vec<u8>,
    /// SEND_WITH_INV.
    pub(crate) invalidate: Option<Token>,
    /// Credits that it grants; zero in a Negotiate Request.
    pub(crate) granted: u16,
    /// Whether it costs a credit: all messages except those of the negotiation do.
    pub(crate) data: bool,
}

/// One side: a connection, its device, its upper layer.
pub(crate) struct Peer {
    pub(crate) connection: Connection,
    pub(crate) config: Config,
    pub(crate) now: Instant,
    /// All receive buffers, consecutively.
    receive: Vec<u8>,
    /// Posted receives, in the order in which the device uses them.
    posted: VecDeque<BufferId>,
    /// Buffers of an incomplete message.
    held: usize,
    /// Messages that the upper layer has not processed.
    delivered: VecDeque<Vec<BufferId>>,
    send: HashMap<BufferId, Vec<u8>>,
    queued: HashMap<MessageId, Vec<BufferId>>,
    next_buffer: u32,
    next_message: u64,
    /// SENDs that the other device has received, with the messages that they complete.
    taken: VecDeque<Option<MessageId>>,
    in_flight: VecDeque<Option<MessageId>>,
    /// Received upper-layer messages.
    pub(crate) received: Vec<Vec<u8>>,
    /// Tokens invalidated with them.
    pub(crate) invalidated: Vec<Option<Token>>,
    pub(crate) negotiated: Option<Parameters>,
    pub(crate) ended: Option<Disconnect>,
}

impl Peer {
    pub(crate) fn new(config: Config, now: Instant) -> Self {
        let mut connection = Connection::new(config, now).expect("a configuration that works");
        let buffers = config.receive_buffers();
        connection.receives_posted(buffers);
        Self {
            connection,
            config,
            now,
            receive: vec![0; config.max_receive_size as usize * usize::from(buffers)],
            posted: (0..u32::from(buffers)).map(BufferId).collect(),
            held: 0,
            delivered: VecDeque::new(),
            send: HashMap::new(),
            queued: HashMap::new(),
            next_buffer: SEND_BUFFERS,
            next_message: 0,
            taken: VecDeque::new(),
            in_flight: VecDeque::new(),
            received: Vec::new(),
            invalidated: Vec::new(),
            negotiated: None,
            ended: None,
        }
    }

    pub(crate) fn posted(&self) -> usize {
        self.posted.len()
    }

    /// Messages that the upper layer still holds.
    pub(crate) fn holding(&self) -> usize {
        self.delivered.len()
    }

    /// Messages with buffers that are not free yet.
    pub(crate) fn unsent(&self) -> usize {
        self.queued.len()
    }

    /// Queues a message in one buffer more than there are cuts.
    pub(crate) fn send(
        &mut self,
        bytes: &[u8],
        cuts: &[usize],
        invalidate: Option<Token>,
    ) -> Result<MessageId, SendError> {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| (*cut).min(bytes.len())).collect();
        cuts.sort_unstable();
        cuts.push(bytes.len());
        let (mut segments, mut begin) = (Vec::new(), 0);
        let id = MessageId(self.next_message);
        for end in cuts {
            let buffer = BufferId(self.next_buffer + segments.len() as u32);
            // With an offset, so that the segment's own start matters.
            let start = 1 + segments.len() as u32 * 3;
            let mut content = vec![0xdd; start as usize];
            content.extend_from_slice(&bytes[begin..end]);
            self.send.insert(buffer, content);
            segments.push(Segment { buffer, start, length: (end - begin) as u32 });
            begin = end;
        }
        self.connection.send(id, &segments, invalidate)?;
        self.next_message += 1;
        self.next_buffer += segments.len() as u32;
        self.queued.insert(id, segments.iter().map(|s| s.buffer).collect());
        Ok(id)
    }

    /// The connection's next message to post, gathered by the device.
    pub(crate) fn poll(&mut self) -> Option<Packet> {
        let transmit = self.connection.poll_transmit(self.now)?;
        assert!(transmit.segments().len() <= self.config.send_segments_max);
        let mut bytes = transmit.header().to_vec();
        for segment in transmit.segments() {
            let (start, length) = (segment.start as usize, segment.length as usize);
            let buffer = self.send.get(&segment.buffer).expect("the buffer is not free yet");
            bytes.extend_from_slice(&buffer[start..start + length]);
        }
        assert_eq!(bytes.len(), transmit.total_bytes() as usize);
        let packet = Packet { bytes, invalidate: transmit.invalidate(), granted: 0, data: false };
        self.in_flight.push_back(transmit.completes());
        assert!(self.in_flight.len() + self.taken.len() <= usize::from(self.config.send_depth));
        Some(packet)
    }

    /// The other device has received the oldest SEND.
    pub(crate) fn taken(&mut self) {
        let send = self.in_flight.pop_front().expect("something is in flight");
        self.taken.push_back(send);
    }

    /// Completes all SENDs that were received. Returns whether there were any.
    pub(crate) fn complete(&mut self) -> bool {
        let count = self.taken.len() as u16;
        for message in std::mem::take(&mut self.taken).into_iter().flatten() {
            for buffer in self.queued.remove(&message).expect("completed once") {
                self.send.remove(&buffer);
            }
        }
        if count > 0 {
            let result = self.connection.handle_sent(count);
            self.end(result);
        }
        count > 0
    }

    /// Delivers a message. The device needs a posted receive for it.
    pub(crate) fn deliver(&mut self, packet: &Packet) {
        let buffer = self.posted.pop_front().expect("receiver not ready: a message without a posted receive");
        let size = self.config.max_receive_size as usize;
        assert!(packet.bytes.len() <= size, "longer than the receive");
        let at = buffer.0 as usize * size;
        let content = at..at + packet.bytes.len();
        self.receive[content.clone()].copy_from_slice(&packet.bytes);
        let message = &self.receive[content];
        let result = match self.connection.handle_receive(self.now, buffer, message, packet.invalidate) {
            Ok(Received::Negotiated(parameters)) => {
                self.negotiated = Some(parameters);
                Ok(Some(buffer))
            }
            Ok(Received::Free) => Ok(Some(buffer)),
            Ok(Received::Held) => {
                self.held += 1;
                Ok(None)
            }
            Ok(Received::Message(message)) => {
                assert_eq!(message.segments.len(), self.held + 1, "every buffer that was held");
                self.held = 0;
                let mut whole = Vec::new();
                for s in message.segments {
                    let at = s.buffer.0 as usize * size + s.start as usize;
                    whole.extend_from_slice(&self.receive[at..at + s.length as usize]);
                }
                assert_eq!(whole.len(), message.length as usize);
                self.received.push(whole);
                self.invalidated.push(message.invalidated);
                self.delivered.push_back(message.segments.iter().map(|s| s.buffer).collect());
                Ok(None)
            }
            Err(reason) => Err(reason),
        };
        match result {
            Ok(Some(free)) => self.post(free),
            Ok(None) => {}
            Err(reason) => self.end(Err(reason)),
        }
    }

    fn post(&mut self, buffer: BufferId) {
        // The previous contents are lost.
        let size = self.config.max_receive_size as usize;
        self.receive[buffer.0 as usize * size..][..128].fill(0xee);
        self.posted.push_back(buffer);
        self.connection.receives_posted(1);
    }

    /// The upper layer has processed its oldest message.
    pub(crate) fn release(&mut self) {
        for buffer in self.delivered.pop_front().unwrap_or_default() {
            self.post(buffer);
        }
    }

    pub(crate) fn timeout(&mut self, now: Instant) {
        self.now = now;
        if self.connection.poll_timeout().is_some_and(|due| due <= now) {
            let result = self.connection.handle_timeout(now);
            self.end(result);
        }
    }

    pub(crate) fn end(&mut self, result: Result<(), Disconnect>) {
        if let Err(reason) = result {
            assert_eq!(self.connection.closed(), Some(reason), "the reason stays");
            self.ended.get_or_insert(reason);
        }
    }
}

/// The state of one side as far as the messages alone determine it.
#[derive(Default)]
struct Ledger {
    /// Credits that the side was granted and has not spent.
    credits: i64,
    /// Credits that it granted and that have not been spent on a message.
    given: i64,
    fragmented: u32,
}

/// Both sides and the wire.
pub(crate) struct Pair {
    pub(crate) peers: [Peer; 2],
    /// From each side to the other.
    pub(crate) wire: [VecDeque<Packet>; 2],
    ledgers: [Ledger; 2],
    pub(crate) now: Instant,
    /// All messages so far: the side that sent each one, and its first bytes.
    pub(crate) log: Vec<(usize, Vec<u8>)>,
}

pub(crate) const ACTIVE: usize = 0;
pub(crate) const PASSIVE: usize = 1;

impl Pair {
    pub(crate) fn new(active: Config, passive: Config) -> Self {
        let now = Instant::now();
        Self {
            peers: [Peer::new(active, now), Peer::new(passive, now)],
            wire: Default::default(),
            ledgers: Default::default(),
            now,
            log: Vec::new(),
        }
    }

    /// Like [`Pair::new`], after the negotiation.
    pub(crate) fn connected(active: Config, passive: Config) -> Self {
        let mut pair = Self::new(active, passive);
        pair.link();
        pair.settle();
        assert!(pair.peers.iter().all(|p| p.connection.parameters().is_some()), "both are connected");
        pair
    }

    pub(crate) fn link(&mut self) {
        for peer in &mut self.peers {
            peer.connection.handle_established();
        }
    }

    /// Puts the messages that one side wants to send on the wire. Returns whether there were any.
    pub(crate) fn pump(&mut self, side: usize) -> bool {
        let mut any = false;
        while let Some(mut packet) = self.peers[side].poll() {
            any = true;
            (packet.data, packet.granted) = self.judge(side, &packet.bytes);
            let head = packet.bytes.len().min(NegotiateResponse::LEN);
            self.log.push((side, packet.bytes[..head].to_vec()));
            self.wire[side].push_back(packet);
        }
        any
    }

    /// Delivers the oldest message from one side to the other. Returns `false` if there is none.
    pub(crate) fn deliver(&mut self, from: usize) -> bool {
        let Some(packet) = self.wire[from].pop_front() else { return false };
        let to = 1 - from;
        if self.peers[to].ended.is_some() {
            return true;
        }
        self.ledgers[to].credits += i64::from(packet.granted);
        self.ledgers[to].given -= i64::from(packet.data);
        self.peers[to].deliver(&packet);
        self.peers[from].taken();
        true
    }

    /// Processes everything outstanding, with an upper layer that processes messages immediately, until nothing happens.
    pub(crate) fn settle(&mut self) {
        let begin = self.log.len();
        loop {
            let mut any = false;
            for side in [ACTIVE, PASSIVE] {
                any |= self.pump(side);
                any |= self.deliver(side);
                any |= self.peers[side].complete();
                while self.peers[side].holding() > 0 {
                    any = true;
                    self.peers[side].release();
                }
            }
            if !any {
                return;
            }
            assert!(self.log.len() - begin < 100_000, "they never fall silent");
        }
    }

    /// Advances time; each side handles its timers when they are due.
    pub(crate) fn advance(&mut self, by: Duration) {
        let until = self.now + by;
        loop {
            let due = self.peers.iter().filter_map(|p| p.connection.poll_timeout()).min();
            self.now = due.unwrap_or(until).clamp(self.now, until);
            for peer in &mut self.peers {
                peer.timeout(self.now);
            }
            if due.is_none_or(|due| due > until) {
                self.now = until;
                for peer in &mut self.peers {
                    peer.now = until;
                }
                return;
            }
            self.settle();
        }
    }

    /// Checks the credit rules with the bytes on the wire. Returns whether it is a Data Transfer, and the credits that it
    /// grants.
    fn judge(&mut self, side: usize, bytes: &[u8]) -> (bool, u16) {
        let first = !self.log.iter().any(|(who, _)| *who == side);
        let granted = if first {
            match side {
                ACTIVE => {
                    NegotiateRequest::parse(bytes).expect("a request");
                    0
                }
                _ => NegotiateResponse::parse(bytes).expect("a response").credits_granted,
            }
        } else {
            let data = DataTransfer::parse(bytes).expect("well formed");
            let parameters = self.peers[side].connection.parameters().expect("connected");
            assert!(bytes.len() <= parameters.max_send_size as usize, "within the peer's receive");
            assert!(data.credits_requested > 0);
            assert!(data.flags == Flags::default() || data.flags == Flags::RESPONSE_REQUESTED);
            let ledger = &mut self.ledgers[side];
            assert!(ledger.credits > 0, "a message without a credit");
            assert!(
                ledger.credits > 1 || data.credits_granted > 0,
                "the last send credit is spent on a message that grants none"
            );
            ledger.credits -= 1;
            if data.data_length == 0 {
                assert_eq!((bytes.len(), data.data_offset, data.remaining_data_length), (20, 0, 0));
                assert_eq!(ledger.fragmented, 0, "an empty message between fragments");
            } else {
                assert_eq!(data.data_offset, 24);
                assert_eq!(bytes[20..24], [0; 4]);
                assert!(
                    ledger.fragmented == 0
                        || ledger.fragmented == data.data_length + data.remaining_data_length
                );
                ledger.fragmented = data.remaining_data_length;
            }
            data.credits_granted
        };
        self.ledgers[side].given += i64::from(granted);
        assert!(self.ledgers[side].given <= self.peers[side].posted() as i64, "more granted than posted");
        (!first, granted)
    }
}

/// Bytes that differ in all places.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
