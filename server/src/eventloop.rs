//! The event loop: one thread, its engine and its connections.
//!
//! A loop owns its connections exclusively: a READ or WRITE takes no lock that another loop takes; the loops share only counters
//! (`metrics`) on that path. Input from other threads (new sockets, answers from lanes, mail between connections) arrives
//! through the loop's inbox.

mod accept;
mod client;
mod ending;
mod files;
mod inbox;
mod throttle;
mod turn;

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_smb::engine::{Disconnect, Event, Server};
use forebay_smb::fs::{FsResult, OpId};
use forebay_smb::ids::IdMap;
use forebay_smb::time::Now;
use rustix::io::Errno;
use tracing::{debug, info, warn};

use self::client::{Client, Link, overdue};
use self::files::file_result;
pub use self::inbox::{Arrival, Inbox, Loops, Note};
use crate::backend;
use crate::buffers::{BufferPool, FrameBuffer};
use crate::clock;
use crate::gate::Passage;
use crate::io::{Completion, Engine, Operation, Purpose, SpareParts, Token};
use crate::lanes::{ClosesElsewhere, Lane, Lanes, Origin};
use crate::limits::{READ_AHEAD_BYTES_MAX, TRIM_BYTES_MAX};
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::namespace;
use crate::rdma::{self, Rdma};
use crate::transport::tcp::Received;

/// How often deadlines are checked.
const TICK: Duration = Duration::from_millis(500);

/// State that all loops share.
#[derive(Clone)]
pub struct Shared {
    /// The protocol server.
    pub server: Arc<Server>,
    /// All loops.
    pub loops: Loops,
    /// Threads for blocking operations.
    pub lanes: Arc<Lanes>,
    /// The payload memory of the whole process.
    pub memory: Arc<Memory>,
    /// Buffers of this loop, also used by answers from lanes.
    pub buffers: BufferPool,
    /// Time limit for a peer to receive a message, and to send the rest of a frame.
    pub stall_time_max: Duration,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Whether READs over RDMA may bypass the page cache.
    pub direct_reads: bool,
}

/// One event loop.
pub struct EventLoop<E> {
    engine: E,
    shared: Shared,
    index: usize,
    inbox: Inbox,
    clients: IdMap<u64, Box<Client>>,
    /// Ids of the clients without a session, oldest first.
    unauthenticated: BTreeSet<u64>,
    next_id: u64,
    /// Set by the first connection over RDMA.
    rdma: Option<Rdma>,
    draining: Option<Instant>,
    last_tick: Instant,
    /// The clients that continue in the next turn, and those that wait for memory.
    turn: turn::Turn,
    spare: SpareParts,
    /// Operations that wait because of the limits of their volume.
    throttle: throttle::Throttle,
    done: Vec<Completion>,
}

impl<E: Engine> EventLoop<E> {
    /// Creates the loop of `shared.loops` at `index`. It must run on the thread that created the engine.
    #[must_use]
    pub fn new(engine: E, shared: Shared, index: usize) -> Self {
        let inbox = shared.loops.0[index].clone();
        let inbox_waker = inbox.waker();
        Self {
            engine,
            shared,
            index,
            inbox,
            clients: IdMap::default(),
            unauthenticated: BTreeSet::new(),
            next_id: 0,
            rdma: None,
            draining: None,
            last_tick: Instant::now(),
            turn: turn::Turn::new(inbox_waker),
            spare: SpareParts::default(),
            throttle: throttle::Throttle::default(),
            done: Vec::new(),
        }
    }

    /// Runs until a drain is requested and no connections are left.
    ///
    /// # Errors
    /// The engine is broken.
    pub fn run(self) -> Result<(), Errno> {
        // Dropped after the clients, because dropping them closes files.
        let _elsewhere = ClosesElsewhere::on_this_thread(self.shared.lanes.queues());
        self.turns()
    }

    fn turns(mut self) -> Result<(), Errno> {
        while self.draining.is_none() || !self.clients.is_empty() {
            self.turn()?;
        }
        Ok(())
    }

    fn turn(&mut self) -> Result<(), Errno> {
        let mut done = std::mem::take(&mut self.done);
        let time_max = self.throttle.time_max(self.turn.time_max(TICK));
        self.engine.wait(time_max, &mut done)?;
        let now = clock::now();
        self.go_on(now);
        for completion in done.drain(..) {
            self.completed(now, completion);
        }
        self.done = done;
        for note in self.inbox.take() {
            self.noted(now, note);
        }
        let ticks = self.last_tick.elapsed() >= TICK || self.draining.is_some();
        self.serve_short(now, ticks);
        self.go_on_throttled(now, ticks);
        if ticks {
            self.last_tick = Instant::now();
            self.tick(now);
        }
        self.send_all();
        // Last, so that all mail of this turn is delivered before the loop waits.
        if self.shared.server.has_mail() {
            self.shared.loops.route(&self.shared.server);
        }
        Ok(())
    }

    fn noted(&mut self, now: Now, note: Note) {
        match note {
            Note::Accepted(Arrival::Socket(socket), peer) => self.accepted(now, socket, peer),
            Note::Accepted(Arrival::Rdma(incoming), peer) => self.accepted_rdma(now, incoming, peer),
            Note::Answered(id, lane, op, result) => self.with(now, id.0, |this, client| {
                client.lanes.ended(lane);
                client.ops -= 1;
                this.answer(now, client, op, result)
            }),
            Note::Held(id, lane, op) => self.with(now, id.0, |this, client| {
                client.lanes.ended(lane);
                client.ops -= 1;
                this.hold(client, op);
                Ok(())
            }),
            Note::Prepared(id, op) => self.with(now, id.0, |_, client| {
                client.lanes.ended(Lane::Data);
                client.ops -= 1;
                client.reads_waiting.push_back(op);
                Ok(())
            }),
            Note::Mail(id, mail) => self.with(now, id.0, |_, client| client.protocol.deliver(now, mail)),
            Note::Drain(until) => {
                self.draining = Some(until);
                self.shared.server.stop_keeping();
            }
        }
    }

    fn watch(&mut self, descriptor: Arc<OwnedFd>) {
        let token = Token { connection: 0, purpose: Purpose::Readable };
        self.engine.submit(token, Operation::Readable { descriptor });
    }

    /// Handles RDMA events and completions.
    fn rdma_ready(&mut self, now: Now) {
        let Some(rdma) = &mut self.rdma else { return };
        for (id, event) in rdma.take() {
            self.with(now, id, |this, client| {
                let Link::SmbDirect(link) = &mut client.link else { return Ok(()) };
                match event {
                    rdma::Event::Established => link.established(Instant::now()),
                    rdma::Event::Ready => {
                        link.ready(Instant::now(), &this.shared.metrics, &mut client.memory)
                    }
                    rdma::Event::Ended(reason) => {
                        Err(link.lost(Instant::now(), &this.shared.metrics, &mut client.memory, reason))
                    }
                }
            });
        }
    }

    /// Runs `act` on a client and handles all consequences.
    fn with(
        &mut self,
        now: Now,
        id: u64,
        act: impl FnOnce(&mut Self, &mut Client) -> Result<(), Disconnect>,
    ) {
        // Removed from the table so that the client and the loop can both be borrowed mutably.
        let Some(mut client) = self.clients.remove(&id) else { return };
        client.memory.begin();
        let result = act(self, &mut client).and_then(|()| self.pump(now, &mut client));
        if let Err(disconnect) = result {
            self.close(now, &mut client, disconnect.0);
        }
        client.memory.settle();
        if client.closing && self.is_over(&client) {
            self.removed(&client);
        } else {
            self.turn.note_short(&mut client, &self.shared.metrics);
            self.clients.insert(id, client);
        }
    }

    /// Handles frames, starts operations and sends, until nothing more can be done now.
    fn pump(&mut self, now: Now, client: &mut Client) -> Result<(), Disconnect> {
        loop {
            self.drain_effects(now, client)?;
            if client.closing {
                if client.leaving.is_some() {
                    self.receive_to_nowhere(client)?;
                }
                return Ok(());
            }
            if client.protocol.is_leaving() {
                if client.is_idle() {
                    self.take_leave(now, client)?;
                    continue;
                }
                break;
            }
            if client.is_held_back() || self.draining.is_some() || !client.memory.has_room() {
                break;
            }
            match self.next_frame(client)? {
                Some(frame) => self.frame(now, client, frame)?,
                None => break,
            }
        }
        Ok(())
    }

    /// Returns the next complete frame; otherwise starts to receive more.
    fn next_frame(&mut self, client: &mut Client) -> Result<Option<FrameBuffer>, Disconnect> {
        let frame_bytes_max = client.protocol.frame_bytes_max();
        let link = match &mut client.link {
            Link::SmbDirect(link) => return link.next(frame_bytes_max, &mut client.memory),
            Link::Tcp(link) => link,
        };
        if link.receiver.is_waiting() {
            return Ok(None);
        }
        match link.receiver.next(frame_bytes_max, &mut client.memory)? {
            Received::Frame(frame) => Ok(Some(frame)),
            Received::Short => Ok(None),
            Received::More => {
                self.receive(client)?;
                Ok(None)
            }
        }
    }

    fn receive(&mut self, client: &mut Client) -> Result<(), Disconnect> {
        if let Link::Tcp(link) = &mut client.link
            && let Some(operation) = link.receiver.operation(&link.socket, &client.memory)?
        {
            self.engine.submit(client.token(Purpose::Receive), operation);
        }
        Ok(())
    }

    /// Keeps a receive in flight and discards its data.
    fn receive_to_nowhere(&mut self, client: &mut Client) -> Result<(), Disconnect> {
        match &mut client.link {
            Link::SmbDirect(link) => link.discard(),
            Link::Tcp(link) => link.receiver.discard(),
        }
        self.receive(client)
    }

    fn frame(&mut self, now: Now, client: &mut Client, mut frame: FrameBuffer) -> Result<(), Disconnect> {
        let unsealed = client.protocol.unseal(frame.bytes_mut())?;
        let frame = match &unsealed {
            Some(unsealed) => frame.narrow(unsealed.range.clone()),
            None => frame,
        };
        client.protocol.handle(now, Arc::new(frame), unsealed.as_ref())
    }

    fn drain_effects(&mut self, now: Now, client: &mut Client) -> Result<(), Disconnect> {
        loop {
            while let Some(event) = client.protocol.poll_event() {
                self.event(client, &event);
            }
            while let Some(transmit) = client.protocol.poll_transmit() {
                if client.closing {
                    continue;
                }
                match &mut client.link {
                    Link::Tcp(link) => link.push(transmit, &client.memory, &mut self.spare)?,
                    Link::SmbDirect(link) => link.push(transmit, &self.shared.metrics, &client.memory)?,
                }
            }
            let mut begun = false;
            while let Some(op) = client.protocol.poll_fs() {
                begun = true;
                self.begin(now, client, op)?;
            }
            if let Link::SmbDirect(link) = &mut client.link
                && let Some((op, frame)) = link.next_fetched()
            {
                begun = true;
                self.fetched(now, client, op, frame)?;
            }
            begun |= self.write_waiting(now, client)?;
            begun |= client.closing && self.give_up_reads(now, client)?;
            if !begun {
                break;
            }
        }
        // READs wait while enough data are in flight, so that few buffers are used and they stay in the CPU cache.
        while client.read_bytes + client.link.bytes() < READ_AHEAD_BYTES_MAX
            && !client.reads_waiting.is_empty()
            && self.turn.has_room(client)
        {
            let Some(op) = client.reads_waiting.pop_front() else { break };
            if let Some(op) = self.read(client, op)? {
                client.reads_waiting.push_front(op);
                break;
            }
        }
        while let Some((lane, op)) = client.lanes.next(self.shared.lanes.queues()) {
            self.run_in(client, lane, op);
        }
        if client.closing {
            return Ok(());
        }
        if let Link::SmbDirect(link) = &mut client.link {
            return link.pump(Instant::now());
        }
        self.turn.note_send(client);
        Ok(())
    }

    fn answer(
        &mut self,
        now: Now,
        client: &mut Client,
        op: OpId,
        result: FsResult,
    ) -> Result<(), Disconnect> {
        client.protocol.complete(now, op, result)
    }

    fn completed(&mut self, now: Now, completion: Completion) {
        let Completion { token, operation, result } = completion;
        if let Operation::Readable { descriptor } = operation {
            self.rdma_ready(now);
            if self.rdma.as_ref().is_some_and(|rdma| rdma.waits_for(&descriptor)) {
                self.watch(descriptor);
            }
            return;
        }
        self.with(now, token.connection, |this, client| {
            let (Purpose::Receive | Purpose::Send) = token.purpose else {
                let Purpose::File(op, begun) = token.purpose else { return Ok(()) };
                client.ops -= 1;
                let is_durable = operation.is_durable();
                let result = file_result(client, &this.shared.metrics, operation, result);
                if is_durable && result.is_ok() && namespace::wants_vouching(begun) {
                    this.vouch(client, op, begun, result);
                    return Ok(());
                }
                return this.answer(now, client, op, result);
            };
            let Link::Tcp(link) = &mut client.link else { return Ok(()) };
            match operation {
                Operation::Receive { buffer, start, filled, least, most, .. } => {
                    let all = link.receiver.completed(buffer, start, filled, least, most);
                    match result {
                        Err(_) => Err(Disconnect("connection reset")),
                        Ok(()) if !all => Err(Disconnect("closed by the peer")),
                        Ok(()) => Ok(()),
                    }
                }
                Operation::Send { message, .. } => {
                    link.sending = None;
                    link.queue.completed(&message);
                    this.shared.metrics.bytes_sent.inc_by(message.sent() as u64);
                    this.spare.keep(message);
                    result.map_err(|_| Disconnect("connection reset"))
                }
                _ => Ok(()),
            }
        });
    }

    fn tick(&mut self, now: Now) {
        // Close files of clients that did not reconnect. Nothing waits for the result.
        for op in self.shared.server.handle_timeout(now.instant) {
            let buffers = self.shared.buffers.clone();
            self.shared.lanes.queues().submit(backend::lane(&op), Origin::Server, move || {
                let _change = backend::gate(&op).cloned().map(Passage::wait);
                let execute = AssertUnwindSafe(|| backend::execute(op, &buffers).map(drop));
                if !matches!(catch_unwind(execute), Ok(Ok(()))) {
                    warn!("a file that was kept for a client could not be closed in order");
                }
            });
        }
        self.shared.server.tick(now.instant);
        if self.shared.server.has_mail() {
            self.shared.loops.route(&self.shared.server);
        }
        if self.draining.is_some() {
            let idle: Vec<u64> =
                self.clients.values().filter(|client| client.is_idle()).map(|client| client.id.0).collect();
            for id in idle {
                self.with(now, id, |this, client| this.take_leave(now, client));
            }
        }
        let (draining, stall_time_max) = (self.draining, self.shared.stall_time_max);
        let late: Vec<(u64, &'static str)> = self
            .clients
            .values_mut()
            .filter_map(|client| {
                overdue(client, draining, stall_time_max).map(|reason| (client.id.0, reason))
            })
            .collect();
        for (id, reason) in late {
            self.with(now, id, |_, _| Err(Disconnect(reason)));
        }
        let over_rdma: Vec<u64> = self
            .clients
            .values()
            .filter(|client| matches!(client.link, Link::SmbDirect(_)) && !client.closing)
            .map(|client| client.id.0)
            .collect();
        for id in over_rdma {
            self.with(now, id, |_, client| match &mut client.link {
                Link::SmbDirect(link) => link.tick(Instant::now(), stall_time_max),
                Link::Tcp(_) => Ok(()),
            });
        }
        if self.turn.is_time_to_trim() {
            self.shared.buffers.trim(TRIM_BYTES_MAX);
            self.rdma.iter().for_each(Rdma::trim);
        }
        let rdma_bytes = self.rdma.as_ref().map_or(0, Rdma::buffer_bytes);
        self.shared.metrics.buffer_bytes(self.index, self.shared.buffers.bytes_in_use() + rdma_bytes);
    }

    fn event(&mut self, client: &mut Client, event: &Event) {
        let peer = client.peer;
        match event {
            Event::Negotiated { dialect } => debug!(%peer, dialect, "negotiated"),
            Event::SessionEstablished { session_id, username } => {
                info!(%peer, session = session_id, user = username, "session established");
                self.authenticated(client, username);
                self.shared.metrics.sessions.inc();
            }
            Event::ChannelBound { session_id, username } => {
                info!(%peer, session = session_id, user = username, "channel bound");
                self.authenticated(client, username);
            }
            Event::ChannelClosed { session_id } => {
                info!(%peer, session = session_id, "channel closed");
            }
            Event::AuthenticationFailed { username, reason } => {
                warn!(%peer, user = username, reason, "authentication failed");
                self.shared.metrics.authentication_failures.inc();
            }
            Event::SessionClosed { session_id } => {
                info!(%peer, session = session_id, "session closed");
                self.shared.metrics.sessions.dec();
            }
            Event::TreeRefused { username, share, status } => {
                warn!(%peer, user = username, share, %status, "tree connect refused");
            }
            Event::Leaving { why } => {
                info!(%peer, why, "ending the connection so that the client returns");
                self.shared.metrics.returns.inc();
            }
            Event::Completed { command, status, began, payload_bytes, by_rdma, activity } => {
                // Not the turn's time: a request that is answered in the turn in which it arrived would have taken no time.
                let took = began.elapsed();
                self.shared.metrics.request(*command, *status, took, *payload_bytes, *by_rdma);
                if let Some(activity) = activity {
                    activity.completed(*command, *payload_bytes, took);
                }
            }
        }
    }
}
