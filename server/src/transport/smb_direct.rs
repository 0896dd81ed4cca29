//! SMB Direct ([MS-SMBD]): the protocol state machine over an RDMA verbs endpoint.
//!
//! Requests arrive in slots of the endpoint and are immediately copied out: they are small, because payload is not part of
//! messages. WRITE data are fetched from the peer's memory into a registered buffer, which is then written to the file. READ
//! data are sent from the registered buffer that they were read into to the peer's memory. No CPU touches either.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use forebay_rdma::{Completed, Device, Endpoint, Failure, Piece, Remote, Sizes};
use forebay_smb::engine::{Disconnect, Held, RemoteBuffer, Transmit};
use forebay_smb::fs::OpId;
use forebay_smbdirect::wire::Token;
use forebay_smbdirect::{self as smbdirect, BufferId, Config, Connection, MessageId, Received, Segment};
use tracing::{debug, info};

use super::frame::{WRITE_DATA, in_one_piece};
use crate::buffers::{Buffer, FrameBuffer, ReadBuffer};
use crate::limits::{RDMA_FRAMES_WAITING_MAX, RDMA_TRANSFERS_MAX};
use crate::memory::Allowance;
use crate::metrics::Metrics;

/// A connection over RDMA.
pub(crate) struct SmbDirect {
    peer: SocketAddr,
    /// `None` once it is closed.
    endpoint: Option<Endpoint>,
    protocol: Connection,
    /// Slots with no posted receive and no held data.
    slots: Vec<u16>,
    /// Received messages that are still in slots because no buffer was available. They reduce the peer's credits.
    unframed: VecDeque<Unframed>,
    /// Received frames that are not yet taken.
    frames: VecDeque<FrameBuffer>,
    /// Responses that wait until their RDMA WRITEs are posted.
    outbox: VecDeque<Outgoing>,
    /// Responses being sent: held buffer, length, and share of limits that is held until then.
    sending: HashMap<u64, (u32, u32, Held)>,
    next_message: u64,
    /// Unsent bytes of responses and of their RDMA WRITEs.
    bytes: u64,
    fetches: HashMap<u64, Fetch>,
    /// RDMA READs to post, in order.
    to_fetch: VecDeque<(Piece, Remote, u64)>,
    fetched: VecDeque<(OpId, FrameBuffer)>,
    done: Vec<Completed>,
    progress: Progress,
}

/// Since when the device has had work without completing any of it. The peer determines the number of retries and the delay
/// between them ([MS-SMBD] 3.1.4.1 leaves them to the connection request), and can make them infinite.
#[derive(Debug, Default)]
struct Progress(Option<Instant>);

impl Progress {
    /// Records that the device completed something.
    fn made(&mut self) {
        self.0 = None;
    }

    /// Records whether work is in progress.
    fn under_way(&mut self, is: bool, now: Instant) {
        self.0 = is.then(|| self.0.unwrap_or(now));
    }

    fn is_stalled(&self, now: Instant, time_max: Duration) -> bool {
        self.0.is_some_and(|since| now.saturating_duration_since(since) > time_max)
    }
}

struct Outgoing {
    /// RDMA WRITEs to post before the response.
    writes: VecDeque<(Piece, Remote)>,
    buffer: u32,
    length: u32,
    invalidate: Option<Token>,
    /// Its share of limits, held until it is sent.
    limited: Held,
}

/// A message that is still in the slots in which it was received.
struct Unframed {
    segments: Vec<Segment>,
    length: usize,
}

struct Fetch {
    buffer: u32,
    length: u32,
    left: u32,
}

/// Returns the configuration of a connection on `device`, and the sizes of its endpoint. `stall_time_max` limits the time for the
/// rest of a message.
pub(crate) fn settings(device: &Device, stall_time_max: Duration) -> (Config, Sizes) {
    let mut config = Config::passive();
    config.rest_timeout = stall_time_max;
    // A header and two pieces are enough: a response is in one piece.
    config.send_segments_max = (device.pieces_max().saturating_sub(1) as usize).clamp(1, 2);
    let work = device.work_max().min(u32::from(u16::MAX)) as u16;
    config.receive_credit_max = config.receive_credit_max.min(work.saturating_sub(1));
    config.send_depth = config.send_depth.min(work / 2);
    let sizes = Sizes {
        receives: config.receive_buffers(),
        receive_bytes: config.max_receive_size,
        sends: config.send_depth,
        transfers: RDMA_TRANSFERS_MAX.min(work / 2),
    };
    (config, sizes)
}

impl SmbDirect {
    /// Accepts a peer.
    ///
    /// # Errors
    /// The reason, for the log.
    pub(crate) fn accept(
        endpoint: Endpoint,
        config: Config,
        peer: SocketAddr,
        now: Instant,
    ) -> Result<Self, String> {
        let receives = config.receive_buffers();
        let protocol = Connection::new(config, now).map_err(|error| error.to_string())?;
        let mut link = Self {
            peer,
            endpoint: Some(endpoint),
            protocol,
            slots: (0..receives).collect(),
            unframed: VecDeque::new(),
            frames: VecDeque::new(),
            outbox: VecDeque::new(),
            sending: HashMap::new(),
            next_message: 0,
            bytes: 0,
            fetches: HashMap::new(),
            to_fetch: VecDeque::new(),
            fetched: VecDeque::new(),
            done: Vec::new(),
            progress: Progress::default(),
        };
        // The first message can arrive before the connection is reported as established.
        link.post_receives().map_err(|disconnect| disconnect.0.to_owned())?;
        let endpoint = link.endpoint.as_mut().expect("just given");
        endpoint.accept().map_err(|errno| errno.to_string())?;
        Ok(link)
    }

    /// Unsent bytes of responses.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Handles the establishment of the connection.
    pub(crate) fn established(&mut self, now: Instant) -> Result<(), Disconnect> {
        self.protocol.handle_established();
        self.pump(now)
    }

    /// Processes completions.
    pub(crate) fn ready(
        &mut self,
        now: Instant,
        metrics: &Metrics,
        memory: &mut Allowance,
    ) -> Result<(), Disconnect> {
        let mut done = std::mem::take(&mut self.done);
        let result = self.take_completed(now, metrics, memory, &mut done);
        done.clear();
        self.done = done;
        result?;
        self.post_receives()?;
        self.pump(now)
    }

    /// Handles the loss of the connection. Earlier completions provide the reason for the log.
    pub(crate) fn lost(
        &mut self,
        now: Instant,
        metrics: &Metrics,
        memory: &mut Allowance,
        reason: &'static str,
    ) -> Disconnect {
        let mut done = std::mem::take(&mut self.done);
        self.take_completed(now, metrics, memory, &mut done).err().unwrap_or(Disconnect(reason))
    }

    fn take_completed(
        &mut self,
        now: Instant,
        metrics: &Metrics,
        memory: &mut Allowance,
        done: &mut Vec<Completed>,
    ) -> Result<(), Disconnect> {
        let Some(endpoint) = &mut self.endpoint else { return Ok(()) };
        endpoint.poll(done).map_err(broken)?;
        for completed in done.drain(..) {
            match completed {
                Completed::Received { slot, length, invalidated } => {
                    self.received(now, slot, length, invalidated, memory)?;
                }
                Completed::Sent(mark) => {
                    self.progress.made();
                    if let Some((buffer, length, _limited)) = mark.and_then(|id| self.sending.remove(&id)) {
                        self.bytes -= u64::from(length);
                        metrics.bytes_sent.inc_by(length.into());
                        self.endpoint.as_mut().ok_or(CLOSED)?.release(buffer);
                    }
                    self.protocol.handle_sent(1).map_err(|reason| self.ended(reason))?;
                }
                Completed::Bound => {}
                Completed::Written(length) => {
                    self.progress.made();
                    self.bytes -= u64::from(length);
                }
                Completed::Fetched(mark, length) => {
                    self.progress.made();
                    if let Some(op) = mark {
                        self.fetched(op, length)?;
                    }
                }
                Completed::Failed(reason) => {
                    match reason {
                        Failure::Flushed => debug!(peer = %self.peer, %reason, "SMB Direct ended"),
                        Failure::Broken(_) => info!(peer = %self.peer, %reason, "SMB Direct ended"),
                    }
                    self.protocol.handle_lost();
                    return Err(Disconnect("connection reset"));
                }
            }
        }
        Ok(())
    }

    fn received(
        &mut self,
        now: Instant,
        slot: u16,
        length: u32,
        invalidated: Option<u32>,
        memory: &mut Allowance,
    ) -> Result<(), Disconnect> {
        let endpoint = self.endpoint.as_ref().ok_or(CLOSED)?;
        let bytes = endpoint.received(slot, length);
        let buffer = BufferId(slot.into());
        match self.protocol.handle_receive(now, buffer, bytes, invalidated.map(Token)) {
            Ok(Received::Negotiated(_) | Received::Free) => self.slots.push(slot),
            Ok(Received::Held) => {}
            Ok(Received::Message(message)) => {
                let length = message.length as usize;
                let buffer = if self.unframed.is_empty() { frame_buffer(length, memory) } else { None };
                match buffer {
                    Some(buffer) => {
                        let frame = frame(buffer, length, message.segments, endpoint, &mut self.slots);
                        self.frames.push_back(frame);
                    }
                    None => self.unframed.push_back(Unframed { segments: message.segments.to_vec(), length }),
                }
            }
            Err(reason) => return Err(self.ended(reason)),
        }
        Ok(())
    }

    fn fetched(&mut self, op: u64, length: u32) -> Result<(), Disconnect> {
        let Some(fetch) = self.fetches.get_mut(&op) else { return Ok(()) };
        fetch.left -= length;
        if fetch.left > 0 {
            return Ok(());
        }
        let Fetch { buffer, length, .. } = self.fetches.remove(&op).expect("it was just found");
        let endpoint = self.endpoint.as_mut().ok_or(CLOSED)?;
        let buffer = endpoint.take(buffer).ok_or(Disconnect("a fetch that is done and is not"))?;
        self.fetched.push_back((OpId(op), FrameBuffer::new(buffer, 0, length as usize)));
        Ok(())
    }

    /// Posts receives in free slots. A peer that sends faster than its requests are processed runs out of receives.
    fn post_receives(&mut self) -> Result<(), Disconnect> {
        let Some(endpoint) = &mut self.endpoint else { return Ok(()) };
        let mut posted = 0;
        while self.frames.len() < RDMA_FRAMES_WAITING_MAX
            && let Some(slot) = self.slots.pop()
        {
            endpoint.post_receive(slot).map_err(broken)?;
            posted += 1;
        }
        if posted > 0 {
            self.protocol.receives_posted(posted);
        }
        Ok(())
    }

    /// Returns the next received frame. `frame_bytes_max` is the longest that the peer may send now.
    pub(crate) fn next(
        &mut self,
        frame_bytes_max: u32,
        memory: &mut Allowance,
    ) -> Result<Option<FrameBuffer>, Disconnect> {
        while let Some(Unframed { segments, length }) = self.unframed.front()
            && let Some(endpoint) = &self.endpoint
            && let Some(buffer) = frame_buffer(*length, memory)
        {
            self.frames.push_back(frame(buffer, *length, segments, endpoint, &mut self.slots));
            self.unframed.pop_front();
        }
        let Some(frame) = self.frames.pop_front() else { return Ok(None) };
        if frame.length() > frame_bytes_max as usize {
            return Err(Disconnect("a frame beyond the limit"));
        }
        self.post_receives()?;
        Ok(Some(frame))
    }

    /// Drops received frames that are not taken.
    pub(crate) fn discard(&mut self) {
        self.unframed.clear();
        self.frames.clear();
    }

    /// Queues a response.
    pub(crate) fn push(
        &mut self,
        transmit: Transmit,
        metrics: &Metrics,
        memory: &Allowance,
    ) -> Result<(), Disconnect> {
        let Transmit { segments, remote_writes, invalidate, seal, held: limited, .. } = transmit;
        let (buffer, range) = in_one_piece(segments, seal, memory)?;
        let length = range.len() as u32;
        let buffer = registered(buffer, range.start, length, memory)?;
        let mut writes = VecDeque::new();
        let mut bytes = u64::from(length);
        for write in remote_writes {
            let Ok(read) = write.payload.into_any().downcast::<ReadBuffer>() else {
                return Err(Disconnect("data read by another backend than this transport knows"));
            };
            let (data, length) = read.into_parts();
            let length = length as u32;
            if data.region().is_none() {
                metrics.rdma_copied_bytes.inc_by(length.into());
            }
            let data = registered(data, 0, length, memory)?;
            bytes += u64::from(length);
            let held = self.endpoint.as_mut().ok_or(CLOSED)?.hold(data, 0);
            writes.extend(pieces(held, &write.target, length));
        }
        let origin = range.start;
        let buffer = self.endpoint.as_mut().ok_or(CLOSED)?.hold(buffer, origin);
        self.bytes += bytes;
        self.outbox.push_back(Outgoing { writes, buffer, length, invalidate, limited });
        Ok(())
    }

    /// Starts to fetch the data of a WRITE from the peer into a buffer; [`SmbDirect::next_fetched`] returns them.
    pub(crate) fn fetch(
        &mut self,
        op: OpId,
        source: &RemoteBuffer,
        length: u32,
        buffer: Buffer,
    ) -> Result<(), Disconnect> {
        let endpoint = self.endpoint.as_mut().ok_or(CLOSED)?;
        let buffer = endpoint.hold(buffer, 0);
        self.fetches.insert(op.0, Fetch { buffer, length, left: length });
        self.to_fetch.extend(pieces(buffer, source, length).map(|(piece, remote)| (piece, remote, op.0)));
        Ok(())
    }

    /// Returns the fetched data of a WRITE.
    pub(crate) fn next_fetched(&mut self) -> Option<(OpId, FrameBuffer)> {
        self.fetched.pop_front()
    }

    /// Starts everything that can start now.
    pub(crate) fn pump(&mut self, now: Instant) -> Result<(), Disconnect> {
        let Some(endpoint) = &mut self.endpoint else { return Ok(()) };
        while endpoint.reads_left() > 0
            && let Some((piece, remote, op)) = self.to_fetch.pop_front()
        {
            endpoint.read(piece, remote, Some(op)).map_err(broken)?;
        }
        while let Some(outgoing) = self.outbox.front_mut() {
            while endpoint.transfers_left() > 0
                && let Some((piece, remote)) = outgoing.writes.pop_front()
            {
                endpoint.write(piece, remote).map_err(broken)?;
                if outgoing.writes.front().is_none_or(|(next, _)| next.buffer != piece.buffer) {
                    endpoint.release(piece.buffer);
                }
            }
            if !outgoing.writes.is_empty() {
                break;
            }
            let Outgoing { buffer, length, invalidate, .. } = *outgoing;
            let limited = std::mem::take(&mut outgoing.limited);
            let id = self.next_message;
            self.next_message += 1;
            let segment = Segment { buffer: BufferId(buffer), start: 0, length };
            self.protocol.send(MessageId(id), &[segment], invalidate).map_err(|error| {
                info!(peer = %self.peer, %error, "SMB Direct: a response cannot be sent");
                Disconnect("a response cannot be sent")
            })?;
            self.sending.insert(id, (buffer, length, limited));
            self.outbox.pop_front();
        }
        while endpoint.sends_left() > 0
            && let Some(message) = self.protocol.poll_transmit(now)
        {
            let mut pieces = [Piece { buffer: 0, start: 0, length: 0 }; 2];
            let count = message.segments().len();
            for (piece, segment) in pieces.iter_mut().zip(message.segments()) {
                *piece = Piece { buffer: segment.buffer.0, start: segment.start, length: segment.length };
            }
            endpoint
                .send(
                    message.header(),
                    &pieces[..count],
                    message.invalidate().map(|token| token.0),
                    message.completes().map(|id| id.0),
                )
                .map_err(broken)?;
        }
        self.progress.under_way(endpoint.works(), now);
        Ok(())
    }

    /// Checks timeouts; to be called about once a second.
    pub(crate) fn tick(&mut self, now: Instant, stall_time_max: Duration) -> Result<(), Disconnect> {
        if self.protocol.poll_timeout().is_some_and(|at| at <= now) {
            self.protocol.handle_timeout(now).map_err(|reason| self.ended(reason))?;
        }
        if self.progress.is_stalled(now, stall_time_max) {
            return Err(Disconnect("the peer takes no data"));
        }
        self.pump(now)
    }

    /// Sends all queued responses, and then ends the connection.
    pub(crate) fn leave(&mut self, now: Instant) -> Result<(), Disconnect> {
        self.pump(now)?;
        self.protocol.shutdown(now).map_err(|reason| self.ended(reason))
    }

    /// Ends the connection. Returns the endpoint, to be dropped where nothing waits for it, and the operations with data that
    /// were being fetched: they will not arrive any more.
    pub(crate) fn close(&mut self) -> (Option<Endpoint>, Vec<OpId>) {
        self.unframed.clear();
        self.frames.clear();
        self.outbox.clear();
        self.sending.clear();
        self.to_fetch.clear();
        self.bytes = 0;
        let fetched = self.fetched.drain(..).map(|(op, _)| op);
        let lost = fetched.chain(self.fetches.drain().map(|(op, _)| OpId(op))).collect();
        (self.endpoint.take(), lost)
    }

    fn ended(&self, reason: smbdirect::Disconnect) -> Disconnect {
        match reason {
            smbdirect::Disconnect::Shutdown => Disconnect("closed by the peer"),
            smbdirect::Disconnect::Lost => Disconnect("connection reset"),
            reason => {
                info!(peer = %self.peer, %reason, "SMB Direct ended");
                Disconnect("the peer broke SMB Direct")
            }
        }
    }
}

const CLOSED: Disconnect = Disconnect("connection reset");

fn broken(errno: rustix::io::Errno) -> Disconnect {
    debug!(%errno, "RDMA failed");
    Disconnect("connection reset")
}

/// Returns `buffer`, or a copy of it that the device can access.
fn registered(buffer: Buffer, start: isize, length: u32, memory: &Allowance) -> Result<Buffer, Disconnect> {
    if buffer.region().is_some() {
        return Ok(buffer);
    }
    let range = start..start + length as isize;
    let mut copy = memory.owed((range.end.max(1)) as usize)?;
    copy.bytes_mut(range.clone()).copy_from_slice(buffer.bytes(range));
    Ok(copy)
}

/// Takes a buffer for a frame of `length` bytes. The first bytes are stored in front of the buffer's data.
fn frame_buffer(length: usize, memory: &mut Allowance) -> Option<Buffer> {
    memory.take(length.saturating_sub(WRITE_DATA.unsigned_abs()))
}

/// Copies a message out of its slots, and frees the slots.
fn frame(
    mut buffer: Buffer,
    length: usize,
    segments: &[Segment],
    endpoint: &Endpoint,
    slots: &mut Vec<u16>,
) -> FrameBuffer {
    let mut at = -WRITE_DATA;
    for segment in segments {
        let slot = segment.buffer.0 as u16;
        let part = endpoint.received(slot, segment.start + segment.length);
        let end = at + segment.length as isize;
        buffer.bytes_mut(at..end).copy_from_slice(&part[segment.start as usize..]);
        at = end;
        slots.push(slot);
    }
    FrameBuffer::new(buffer, -WRITE_DATA, length)
}

/// Pairs the pieces of a held buffer with pieces of the peer's memory.
fn pieces(buffer: u32, remote: &RemoteBuffer, length: u32) -> impl Iterator<Item = (Piece, Remote)> {
    let mut start = 0;
    remote.pieces(length).map(move |there| {
        let piece = Piece { buffer, start, length: there.length };
        start += there.length;
        (piece, Remote { address: there.offset, token: there.token.0 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::STALL_TIME_DEFAULT_MAX as TIME_MAX;

    #[test]
    fn stalled_rdma_device_is_detected() {
        let second = Duration::from_secs(1);
        let began = Instant::now();
        let mut progress = Progress::default();
        assert!(!progress.is_stalled(began + 2 * TIME_MAX, TIME_MAX), "nothing is to be done");
        progress.under_way(true, began);
        // Posting more work is not progress.
        progress.under_way(true, began + TIME_MAX);
        assert!(!progress.is_stalled(began + TIME_MAX, TIME_MAX));
        assert!(progress.is_stalled(began + TIME_MAX + second, TIME_MAX));
        progress.made();
        progress.under_way(true, began + TIME_MAX);
        assert!(!progress.is_stalled(began + TIME_MAX + second, TIME_MAX));
        progress.under_way(false, began + TIME_MAX + second);
        assert!(!progress.is_stalled(began + 3 * TIME_MAX, TIME_MAX));
    }
}
