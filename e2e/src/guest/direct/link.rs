//! The active side of SMB Direct over verbs, driven by one thread that waits for one event at a time.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use forebay_rdma::{
    BufferPool, CmEvent, Completed, Device, Endpoint, EventChannel, Notifier, Outgoing, Piece, Sizes, Window,
};
use forebay_smbdirect::wire::Token;
use forebay_smbdirect::{BufferId, Config, Connection, MessageId, Parameters, Received, Segment};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Time limit for each connection step, and for each response of the server, on an emulated node.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit for the server to disconnect once the connection is broken.
const LEAVING: Duration = Duration::from_secs(5);
/// This bit in its work request ID marks a message sent by [`Link::send_raw`].
const RAW: u64 = 1 << 63;
/// Bytes of a message that an endpoint sends as its header.
const HEADER_BYTES: usize = 32;
/// Memory for outgoing messages.
const BUFFER_BYTES_MAX: usize = 64 << 20;

/// The client's behaviour; correct by default.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    /// Receives posted before it connects, if fewer than required.
    pub receives: u16,
    /// Whether receives are reposted.
    pub posts_again: bool,
    /// Credits that every message grants, regardless of the correct number.
    pub grants: Option<u16>,
    /// RNR retry count of the server, used when no receive is posted; 7 means infinite.
    pub receiver_not_ready_retries: u8,
    /// Ignores incoming messages.
    pub deaf: bool,
    /// Maximum send size that it announces.
    pub max_send_size: Option<u32>,
}

impl Default for Manners {
    fn default() -> Self {
        Self {
            receives: u16::MAX,
            posts_again: true,
            grants: None,
            receiver_not_ready_retries: 0,
            deaf: false,
            max_send_size: None,
        }
    }
}

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The token that it invalidated, if any.
    pub invalidated: Option<u32>,
}

/// A connection.
#[derive(Debug)]
pub struct Link {
    /// Can be changed at any time.
    pub manners: Manners,
    endpoint: Endpoint,
    device: Arc<Device>,
    channel: Arc<EventChannel>,
    notifier: Arc<Notifier>,
    protocol: Connection,
    buffers: BufferPool,
    slots: Vec<u16>,
    messages: VecDeque<Message>,
    sending: HashMap<u64, u32>,
    marks: u64,
    is_up: bool,
    /// The connection manager has reported the end of the connection.
    is_over: bool,
    bindings: u32,
    ended: Option<String>,
}

impl Link {
    /// Requests a connection. Nothing is sent yet.
    pub fn connect(server: SocketAddr, manners: Manners) -> Result<Self> {
        let channel = Arc::new(EventChannel::new()?);
        let mut outgoing =
            Outgoing::resolve_address(&channel, server, PATIENCE).context("resolve the address")?;
        resolved(&channel)?;
        outgoing.resolve_route(PATIENCE).context("resolve the route")?;
        resolved(&channel)?;
        let device = outgoing.device()?;
        let mut config = Config::active();
        // Outgoing messages are contiguous.
        config.send_segments_max = 1;
        if let Some(size) = manners.max_send_size {
            config.max_send_size = size;
        }
        let sizes = Sizes {
            receives: config.receive_buffers(),
            receive_bytes: config.max_receive_size,
            sends: config.send_depth,
            transfers: 16,
        };
        let notifier = Arc::new(Notifier::new(&device)?);
        let endpoint = Endpoint::connecting(outgoing, &notifier, 0, sizes).context("make the endpoint")?;
        let mut link = Self {
            manners,
            endpoint,
            buffers: BufferPool::registered(BUFFER_BYTES_MAX, Arc::clone(&device)),
            device,
            channel,
            notifier,
            protocol: Connection::new(config, Instant::now())?,
            slots: (0..sizes.receives.min(manners.receives)).collect(),
            messages: VecDeque::new(),
            sending: HashMap::new(),
            marks: 0,
            is_up: false,
            is_over: false,
            bindings: 0,
            ended: None,
        };
        link.post_receives()?;
        link.endpoint.connect(manners.receiver_not_ready_retries).context("connect")?;
        Ok(link)
    }

    /// Whether the device is an iWARP one.
    pub fn is_iwarp(&self) -> bool {
        self.device.is_iwarp()
    }

    /// Waits until the server has accepted it.
    pub fn establish(&mut self) -> Result<()> {
        self.until("the server to accept it", |link| link.is_up.then_some(()))
    }

    /// [MS-SMBD] 3.1.5.2: sends a negotiate request, and waits for the response.
    pub fn negotiate(&mut self) -> Result<Parameters> {
        self.protocol.handle_established();
        self.until("an answer to the negotiation", |link| link.protocol.parameters())
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Exposes a part of a window's memory to the server and returns the token. If the window's previous token is still
    /// valid, the device ends the connection.
    pub fn bind(&mut self, window: &mut Window, at: usize, length: usize) -> Result<u32> {
        let token = self.endpoint.bind(window, at, length)?;
        let before = self.bindings;
        self.until("a token to be bound", |link| (link.bindings > before).then_some(token))
    }

    /// Sends a message.
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        let mut buffer = self.buffers.take(message.len())?;
        buffer.bytes_mut(0..message.len() as isize).copy_from_slice(message);
        let held = self.endpoint.hold(buffer, 0);
        let id = self.mark();
        let segment = Segment { buffer: BufferId(held), start: 0, length: message.len() as u32 };
        self.protocol.send(MessageId(id), &[segment], None)?;
        self.sending.insert(id, held);
        self.transmit()
    }

    /// Sends raw bytes instead of a message of the protocol.
    pub fn send_raw(&mut self, bytes: &[u8]) -> Result<()> {
        let (header, rest) = bytes.split_at(bytes.len().min(HEADER_BYTES));
        let mark = self.mark() | RAW;
        let mut pieces = Vec::new();
        if !rest.is_empty() {
            let mut buffer = self.buffers.take(rest.len())?;
            buffer.bytes_mut(0..rest.len() as isize).copy_from_slice(rest);
            let held = self.endpoint.hold(buffer, 0);
            self.sending.insert(mark, held);
            pieces.push(Piece { buffer: held, start: 0, length: rest.len() as u32 });
        }
        Ok(self.endpoint.send(header, &pieces, None, Some(mark))?)
    }

    fn mark(&mut self) -> u64 {
        self.marks += 1;
        self.marks
    }

    /// The next message.
    pub fn receive(&mut self) -> Result<Message> {
        self.until("a message", |link| link.messages.pop_front())
    }

    /// Waits until all sent messages have arrived.
    pub fn flush(&mut self) -> Result<()> {
        self.until("the end of what was sent", |link| link.sending.is_empty().then_some(()))
    }

    /// Runs until the connection has ended, and returns the reason.
    pub fn until_ended(&mut self, patience: Duration) -> Result<String> {
        let until = Instant::now() + patience;
        while self.ended.is_none() {
            if Instant::now() >= until {
                bail!("the connection has not ended within {} s", patience.as_secs());
            }
            self.step(until)?;
        }
        // If a leaving client destroys its queue pair first, the server never receives the error that the client caused.
        let (until, events) = (Instant::now() + LEAVING, self.channel.descriptor());
        while !self.is_over && Instant::now() < until {
            wait(&[&events], until)?;
            while let Some(event) = self.channel.next() {
                self.is_over |= matches!(event, CmEvent::Ended(..) | CmEvent::DeviceRemoved(_));
            }
        }
        Ok(self.ended.clone().expect("the loop ends with it"))
    }

    fn until<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> Result<T> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look(self) {
                return Ok(found);
            }
            if let Some(why) = &self.ended {
                bail!("waiting for {what}: {why}");
            }
            if Instant::now() >= until {
                bail!("waiting for {what}: not within {} s", PATIENCE.as_secs());
            }
            self.step(until)?;
        }
    }

    fn end(&mut self, why: impl ToString) {
        self.ended.get_or_insert_with(|| why.to_string());
    }

    /// Waits for an event and processes it.
    fn step(&mut self, until: Instant) -> Result<()> {
        self.transmit()?;
        let next = self.protocol.poll_timeout().map_or(until, |at| at.min(until));
        let (events, completions) = (self.channel.descriptor(), self.notifier.descriptor());
        wait(&[&events, &completions], next)?;
        while let Some(event) = self.channel.next() {
            match event {
                CmEvent::Established(_) => self.is_up = true,
                CmEvent::Ended(_, why) => {
                    self.is_over = true;
                    self.end(why);
                }
                CmEvent::DeviceRemoved(_) => self.end("the device is gone"),
                CmEvent::Connect(_) | CmEvent::Resolved(_) => {}
            }
        }
        // The IDs of endpoints; there is only one.
        self.notifier.take(&mut Vec::new())?;
        let mut done = Vec::new();
        self.endpoint.poll(&mut done)?;
        for completed in done {
            self.completed(completed)?;
        }
        if self.manners.posts_again {
            self.post_receives()?;
        }
        let now = Instant::now();
        if self.protocol.poll_timeout().is_some_and(|at| at <= now)
            && let Err(why) = self.protocol.handle_timeout(now)
        {
            self.end(why);
        }
        self.transmit()
    }

    fn completed(&mut self, completed: Completed) -> Result<()> {
        match completed {
            Completed::Received { slot, length, invalidated } => self.received(slot, length, invalidated),
            Completed::Sent(mark) => {
                if let Some(held) = mark.and_then(|mark| self.sending.remove(&mark)) {
                    self.endpoint.release(held);
                }
                if mark.is_none_or(|mark| mark & RAW == 0)
                    && let Err(why) = self.protocol.handle_sent(1)
                {
                    self.end(why);
                }
                Ok(())
            }
            Completed::Failed(why) => {
                self.end(why);
                Ok(())
            }
            Completed::Bound => {
                self.bindings += 1;
                Ok(())
            }
            Completed::Written(_) | Completed::Fetched(..) => Ok(()),
        }
    }

    fn received(&mut self, slot: u16, length: u32, invalidated: Option<u32>) -> Result<()> {
        if self.manners.deaf {
            self.slots.push(slot);
            return Ok(());
        }
        let bytes = self.endpoint.received(slot, length);
        let buffer = BufferId(slot.into());
        match self.protocol.handle_receive(Instant::now(), buffer, bytes, invalidated.map(Token)) {
            Ok(Received::Negotiated(_) | Received::Free) => self.slots.push(slot),
            Ok(Received::Held) => {}
            Ok(Received::Message(message)) => {
                let mut bytes = Vec::with_capacity(message.length as usize);
                for segment in message.segments {
                    let slot = u16::try_from(segment.buffer.0)?;
                    let part = self.endpoint.received(slot, segment.start + segment.length);
                    bytes.extend_from_slice(&part[segment.start as usize..]);
                    self.slots.push(slot);
                }
                let invalidated = message.invalidated.map(|token| token.0);
                self.messages.push_back(Message { bytes, invalidated });
            }
            Err(why) => self.end(why),
        }
        Ok(())
    }

    fn post_receives(&mut self) -> Result<()> {
        let mut posted = 0;
        while let Some(slot) = self.slots.pop() {
            self.endpoint.post_receive(slot)?;
            posted += 1;
        }
        if posted > 0 {
            self.protocol.receives_posted(posted);
        }
        Ok(())
    }

    fn transmit(&mut self) -> Result<()> {
        // Nothing can be posted on a broken connection.
        if self.ended.is_some() {
            return Ok(());
        }
        let negotiated = self.protocol.parameters().is_some();
        while self.endpoint.sends_left() > 0
            && let Some(message) = self.protocol.poll_transmit(Instant::now())
        {
            let mut header = message.header().to_vec();
            if let Some(grants) = self.manners.grants
                && negotiated
            {
                // [MS-SMBD] 2.2.3: CreditsGranted.
                header[2..4].copy_from_slice(&grants.to_le_bytes());
            }
            let pieces: Vec<Piece> = message
                .segments()
                .iter()
                .map(|segment| Piece {
                    buffer: segment.buffer.0,
                    start: segment.start,
                    length: segment.length,
                })
                .collect();
            self.endpoint.send(&header, &pieces, None, message.completes().map(|id| id.0))?;
        }
        Ok(())
    }
}

/// Waits until a connection step is complete.
fn resolved(channel: &Arc<EventChannel>) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        match channel.next() {
            Some(CmEvent::Resolved(_)) => return Ok(()),
            Some(CmEvent::Ended(_, why)) => bail!("{why}"),
            Some(_) => {}
            None => wait(&[&channel.descriptor()], until)?,
        }
    }
    bail!("the server is not found within {} s", PATIENCE.as_secs())
}

fn wait(descriptors: &[&std::os::fd::OwnedFd], until: Instant) -> Result<()> {
    let mut waited: Vec<PollFd<'_>> =
        descriptors.iter().map(|descriptor| PollFd::new(*descriptor, PollFlags::IN)).collect();
    let left = Timespec::try_from(until.saturating_duration_since(Instant::now()))?;
    match poll(&mut waited, Some(&left)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
