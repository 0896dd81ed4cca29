//! Targets for SMB Direct: its messages, and whole connections with an arbitrary peer.

use std::time::{Duration, Instant};

use forebay_smbdirect::wire::{
    BufferDescriptor, CryptoTransform, DataTransfer, Descriptors, NegotiateRequest, NegotiateResponse,
    RdmaTransform, Token,
};
use forebay_smbdirect::{BufferId, Config, Connection, Disconnect, MessageId, Received, Segment};

/// Parses every message and structure; the result must survive a round trip through encoding and parsing.
pub fn smbdirect_messages(data: &[u8]) {
    if let Ok(request) = NegotiateRequest::parse(data) {
        assert_eq!(NegotiateRequest::parse(&request.encode()), Ok(request));
    }
    if let Ok(response) = NegotiateResponse::parse(data) {
        assert_eq!(NegotiateResponse::parse(&response.encode()), Ok(response));
    }
    if let Ok(transfer) = DataTransfer::parse(data) {
        let (offset, length) = (transfer.data_offset as usize, transfer.data_length as usize);
        let payload = &data[offset..offset + length];
        let mut again = transfer.encode()[..DataTransfer::LEN].to_vec();
        again.resize(again.len().max(offset), 0);
        again.extend_from_slice(payload);
        assert_eq!(DataTransfer::parse(&again), Ok(transfer));
    }
    if let Ok(descriptors) = Descriptors::parse(data) {
        check_descriptors(&descriptors);
        let again: Vec<u8> = descriptors.iter().flat_map(|d| d.encode()).collect();
        assert_eq!(Descriptors::parse(&again), Ok(descriptors));
    }
    if let Ok(transform) = RdmaTransform::parse(data) {
        if let Some(descriptors) = &transform.descriptors {
            check_descriptors(descriptors);
        }
        check_crypto_transform(transform.transforms);
    }
    check_crypto_transform(data);
}

fn check_crypto_transform(data: &[u8]) {
    if let Ok(crypto) = CryptoTransform::parse(data) {
        let mut again = Vec::new();
        crypto.encode(&mut again);
        assert_eq!(CryptoTransform::parse(&again), Ok(crypto));
        assert!(crypto.padded_len() - again.len() < 8);
    }
}

/// Slices must be inside of the buffer, and have the requested length.
fn check_descriptors(descriptors: &Descriptors<'_>) {
    let total = descriptors.total_bytes();
    assert!(descriptors.slice(0, total + 1).is_none() && descriptors.slice(u64::MAX, 1).is_none());
    for (offset, length) in [(0, total), (total / 3, total / 2), (total, 0)] {
        let pieces: Vec<BufferDescriptor> = descriptors.slice(offset, length).expect("within").collect();
        assert_eq!(pieces.iter().map(|p| u64::from(p.length)).sum::<u64>(), length);
        for piece in &pieces {
            let inside = |d: BufferDescriptor| {
                let end = piece.offset.checked_add(u64::from(piece.length)).expect("no wrap");
                d.token == piece.token && d.offset <= piece.offset && end <= d.offset + u64::from(d.length)
            };
            assert!(piece.length > 0 && descriptors.iter().any(inside));
        }
    }
}

/// Number of receive buffers of the tested connections: few, so that they run out.
const BUFFERS: u16 = 9;

/// A connection with a correct transport; the input is the peer's behaviour.
pub fn smbdirect_connection(data: &[u8]) {
    let Some((&first, script)) = data.split_first() else { return };
    let base = if first & 1 == 0 { Config::passive() } else { Config::active() };
    let config = Config {
        receive_credit_max: BUFFERS - 1,
        send_credit_target: 4,
        max_send_size: 256,
        max_receive_size: 32_768,
        send_segments_max: 2,
        send_depth: 3,
        ..base
    };
    // The clock is only read for an arbitrary start: Instant has no other constructor.
    let mut transport = Transport::new(config, Instant::now());
    if transport.run(script).is_err() {
        let held = transport.connection.drain_held().count();
        assert_eq!(held, transport.held, "every buffer is named");
        assert!(transport.connection.closed().is_some());
        let now = transport.now;
        assert!(
            transport.connection.poll_transmit(now).is_none()
                && transport.connection.poll_timeout().is_none()
        );
        assert_eq!(transport.connection.drain_unsent().count(), transport.unsent);
    }
}

struct Transport {
    connection: Connection,
    now: Instant,
    /// Receives posted.
    posted: u32,
    /// Buffers of an incomplete message.
    held: usize,
    /// Messages that are queued and not yet handed out.
    unsent: usize,
    next: u64,
}

impl Transport {
    fn new(config: Config, now: Instant) -> Self {
        let mut connection = Connection::new(config, now).expect("valid");
        connection.receives_posted(BUFFERS);
        Self { connection, now, posted: BUFFERS.into(), held: 0, unsent: 0, next: 0 }
    }

    /// The script consists of one-byte commands, some with a length and bytes.
    fn run(&mut self, mut script: &[u8]) -> Result<(), Disconnect> {
        while let Some((&command, rest)) = script.split_first() {
            script = rest;
            match command % 8 {
                0 => self.connection.handle_established(),
                1 => self.transmit(),
                2 => self.connection.handle_sent(u16::from(command / 8) % 4)?,
                3 => self.upper_layer(command),
                4 => {
                    self.now += Duration::from_secs(u64::from(command / 8) * 2);
                    self.connection.handle_timeout(self.now)?;
                }
                5 if command == 0xfd => self.connection.shutdown(self.now)?,
                _ => {
                    let length = script.first().map_or(0, |&l| usize::from(l)).min(script.len());
                    let (message, rest) = script.split_at(length);
                    script = rest;
                    self.receive(message.get(1..).unwrap_or_default())?;
                }
            }
            let credits = self.connection.credits();
            assert!(credits.announced <= credits.posted && credits.posted == self.posted);
        }
        Ok(())
    }

    fn receive(&mut self, message: &[u8]) -> Result<(), Disconnect> {
        if self.posted == 0 {
            // The device would have refused it.
            return Ok(());
        }
        let token = (message.len() % 7 == 3).then_some(Token(message.len() as u32));
        let received = self.connection.handle_receive(self.now, BufferId(7), message, token);
        let free = match received? {
            Received::Negotiated(parameters) => {
                assert!(parameters.max_send_size >= 128 && parameters.max_receive_size <= 32_768);
                1
            }
            Received::Free => 1,
            Received::Held => {
                self.held += 1;
                0
            }
            Received::Message(whole) => {
                assert_eq!(whole.segments.iter().map(|s| s.length).sum::<u32>(), whole.length);
                let last = whole.segments.last().expect("never empty");
                assert!(last.start as usize + last.length as usize <= message.len());
                assert_eq!(whole.segments.len(), self.held + 1);
                std::mem::take(&mut self.held) as u16 + 1
            }
        };
        // The receive is consumed in every case; a free buffer is posted again.
        self.posted = self.posted - 1 + u32::from(free);
        self.connection.receives_posted(free);
        Ok(())
    }

    fn upper_layer(&mut self, command: u8) {
        let length = u32::from(command) * 3;
        let half = length / 2;
        let segments = [
            Segment { buffer: BufferId(1), start: 5, length: half },
            Segment { buffer: BufferId(2), start: 0, length: length - half },
        ];
        self.next += 1;
        if self.unsent < 64 && self.connection.send(MessageId(self.next), &segments, Some(Token(1))).is_ok() {
            self.unsent += 1;
        }
    }

    fn transmit(&mut self) {
        while let Some(transmit) = self.connection.poll_transmit(self.now) {
            assert!(transmit.segments().len() <= 2);
            if transmit.header().len() <= DataTransfer::DATA_OFFSET {
                assert!(transmit.total_bytes() <= 256);
            }
            if transmit.completes().is_some() {
                self.unsent -= 1;
            }
        }
    }
}
