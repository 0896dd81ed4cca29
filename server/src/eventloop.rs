//! The event loop: one thread, its engine and its connections.
//!
//! It owns its connections outright: a READ or WRITE takes no lock that another loop takes; what loops share on its way are
//! counters (`metrics`). What comes from elsewhere (new sockets, answers of lanes, mail between connections) comes through the
//! loop's inbox.

mod throttle;
mod turn;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_smb::engine::{Connection, ConnectionId, Disconnect, Event, Mail, Server};
use forebay_smb::fs::{FsOp, FsOpKind, FsReply, FsResult, OpId, Payload};
use forebay_smb::limits::PINNED_BYTES_PER_CONNECTION_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::time::Now;
use rustix::io::Errno;
use tracing::{debug, info, warn};

use crate::backend::directory::OpenFile;
use crate::backend::{self, directory, errno::status};
use crate::buffers::{BufferPool, FrameBuffer, ReadBuffer};
use crate::clock;
use crate::io::{Completion, Engine, Operation, PastCache, Purpose, Token, Waker};
use crate::lanes::{ClosesElsewhere, Lane, Lanes, Origin, Share};
use crate::limits::{
    AUTHENTICATION_TIME_MAX, CONNECTIONS_MAX, CONNECTIONS_UNAUTHENTICATED_MAX, DIRECT_READ_BYTES_MIN,
    FAREWELL_TIME_MAX, FS_OPS_IN_FLIGHT_MAX, READ_AHEAD_BYTES_MAX, SEND_QUEUE_BYTES_MAX, TRIM_BYTES_MAX,
    WRITE_BYTES_IN_FLIGHT_MAX,
};
use crate::memory::{Allowance, Memory};
use crate::metrics::Metrics;
use crate::namespace;
use crate::qos::Priority;
use crate::rdma::{self, Rdma};
use crate::transport::smb_direct::SmbDirect;
use crate::transport::tcp::{Received, TcpLink};

/// How often deadlines are looked at.
const TICK: Duration = Duration::from_millis(500);

/// What comes to a loop from other threads.
pub enum Note {
    /// A connection that was accepted.
    Accepted(Arrival, SocketAddr),
    /// The answer from a lane.
    Answered(ConnectionId, Lane, OpId, FsResult),
    /// It is known how the file of a READ is read past the page cache, and the READ can go on.
    Prepared(ConnectionId, FsOp),
    /// From another connection or an administrator.
    Mail(ConnectionId, Mail),
    /// Take no more requests, finish those in flight until the time, then end.
    Drain(Instant),
}

/// What a connection comes as.
#[derive(Debug)]
pub enum Arrival {
    /// Over TCP.
    Socket(OwnedFd),
    /// Over RDMA; not accepted yet.
    Rdma(forebay_rdma::Incoming),
}

/// The way to a loop from other threads.
#[derive(Clone)]
pub struct Inbox {
    notes: Arc<Mutex<Vec<Note>>>,
    waker: Waker,
    connections: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Inbox({} connections)", self.connections.load(Ordering::Relaxed))
    }
}

impl Inbox {
    /// The inbox of a loop; `waker` wakes its engine.
    #[must_use]
    pub fn new(waker: Waker) -> Self {
        Self { notes: Arc::default(), waker, connections: Arc::default() }
    }

    /// What wakes the loop.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Leaves a note.
    pub fn post(&self, note: Note) {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let first = notes.is_empty();
        notes.push(note);
        drop(notes);
        // Who finds the inbox empty wakes; the loop takes all that is there.
        if first {
            self.waker.wake();
        }
    }

    fn take(&self) -> Vec<Note> {
        std::mem::take(&mut *self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// All loops, as other threads see them.
#[derive(Clone, Debug)]
pub struct Loops(Arc<[Inbox]>);

impl Loops {
    /// Of these inboxes, in the order of the loops' indices.
    #[must_use]
    pub fn new(inboxes: Vec<Inbox>) -> Self {
        Self(inboxes.into())
    }

    /// Connections of all loops.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.iter().map(|inbox| inbox.connections.load(Ordering::Relaxed)).sum()
    }

    /// Gives a connection to the loop that has the fewest. False, and the connection closed, where there are too many.
    pub fn accept(&self, arrival: Arrival, peer: SocketAddr, metrics: &Metrics) -> bool {
        if self.connections() >= CONNECTIONS_MAX {
            return false;
        }
        let fewest = self.0.iter().min_by_key(|inbox| inbox.connections.load(Ordering::Relaxed));
        let inbox = fewest.expect("there is a loop");
        inbox.connections.fetch_add(1, Ordering::Relaxed);
        metrics.connections.inc();
        metrics.connections_unauthenticated.inc();
        inbox.post(Note::Accepted(arrival, peer));
        true
    }

    /// Delivers what the protocol has for other connections.
    pub fn route(&self, server: &Server) {
        for (id, mail) in server.take_mail() {
            self.0[self.index_of(id)].post(Note::Mail(id, mail));
        }
    }

    /// Has every loop finish.
    pub fn drain(&self, until: Instant) {
        for inbox in self.0.iter() {
            inbox.post(Note::Drain(until));
        }
    }

    fn index_of(&self, id: ConnectionId) -> usize {
        (id.0 % self.0.len() as u64) as usize
    }
}

/// What all loops share.
#[derive(Clone)]
pub struct Shared {
    /// The protocol's server.
    pub server: Arc<Server>,
    /// All loops.
    pub loops: Loops,
    /// Threads for what blocks.
    pub lanes: Arc<Lanes>,
    /// The memory for payload of the whole process.
    pub memory: Arc<Memory>,
    /// Buffers of this loop; answers from lanes come in them too.
    pub buffers: BufferPool,
    /// Time a peer has to take what is being sent, and to send the rest of a frame.
    pub stall_time_max: Duration,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Whether READs over RDMA may go past the page cache.
    pub direct_reads: bool,
}

struct Client {
    id: ConnectionId,
    link: Link,
    peer: SocketAddr,
    protocol: Connection,
    accepted: Instant,
    authenticated: bool,
    /// Where its buffers come from.
    memory: Allowance,
    /// READs that wait for earlier ones to be sent, for memory or for their turn.
    reads_waiting: VecDeque<FsOp>,
    /// WRITEs that wait for memory or for their turn.
    writes_waiting: VecDeque<FsOp>,
    /// What it waits for others to have done.
    queued: turn::Queued,
    /// WRITEs with data that are being fetched from the peer's memory.
    fetching: HashMap<OpId, FsOpKind>,
    read_bytes: u64,
    write_bytes: u64,
    /// Of the volume of the operation that came last.
    priority: Priority,
    /// Operations that are not answered, but for those that wait in `lanes` or `reads_waiting`.
    ops: usize,
    /// What it has in the lanes, and what waits for room there.
    lanes: Share<FsOp>,
    closing: bool,
    /// Nothing more is sent; until then what still comes is taken to nowhere, so that the peer sees the last answers.
    leaving: Option<Instant>,
}

/// What carries a client's frames.
enum Link {
    Tcp(Box<TcpLink>),
    SmbDirect(Box<SmbDirect>),
}

impl Link {
    /// Bytes of responses that are not sent.
    fn bytes(&self) -> u64 {
        match self {
            Self::Tcp(link) => link.queue.bytes(),
            Self::SmbDirect(link) => link.bytes(),
        }
    }

    /// Whether the engine has nothing of it.
    fn is_idle(&self) -> bool {
        match self {
            Self::Tcp(link) => link.sending.is_none() && !link.receiver.is_waiting(),
            Self::SmbDirect(_) => true,
        }
    }
}

impl Client {
    fn token(&self, purpose: Purpose) -> Token {
        Token { connection: self.id.0, purpose }
    }

    /// All is answered, and the answers are sent.
    fn is_idle(&self) -> bool {
        !self.closing && self.protocol.requests_in_flight() == 0 && self.link.bytes() == 0
    }

    /// Whether the peer has to wait until what it asked for is done.
    fn is_held_back(&self) -> bool {
        self.link.bytes() > SEND_QUEUE_BYTES_MAX
            || self.write_bytes > WRITE_BYTES_IN_FLIGHT_MAX
            || self.protocol.pinned_bytes() > PINNED_BYTES_PER_CONNECTION_MAX
            || self.ops + self.reads_waiting.len() + self.writes_waiting.len() > FS_OPS_IN_FLIGHT_MAX
            || self.lanes.is_waiting()
    }
}

/// One event loop.
pub struct EventLoop<E> {
    engine: E,
    shared: Shared,
    index: usize,
    inbox: Inbox,
    clients: HashMap<u64, Box<Client>>,
    /// Ids of those without a session, and so the oldest first.
    unauthenticated: BTreeSet<u64>,
    next_id: u64,
    /// From the first connection over RDMA on.
    rdma: Option<Rdma>,
    draining: Option<Instant>,
    last_tick: Instant,
    /// Who goes on in the next turn, and who waits for memory.
    turn: turn::Turn,
    /// What waits because of its volume's limits.
    throttle: throttle::Throttle,
    done: Vec<Completion>,
}

impl<E: Engine> EventLoop<E> {
    /// The loop of `shared.loops` at `index`, to be run on the thread that made the engine.
    #[must_use]
    pub fn new(engine: E, shared: Shared, index: usize) -> Self {
        let inbox = shared.loops.0[index].clone();
        let inbox_waker = inbox.waker();
        Self {
            engine,
            shared,
            index,
            inbox,
            clients: HashMap::new(),
            unauthenticated: BTreeSet::new(),
            next_id: 0,
            rdma: None,
            draining: None,
            last_tick: Instant::now(),
            turn: turn::Turn::new(inbox_waker),
            throttle: throttle::Throttle::default(),
            done: Vec::new(),
        }
    }

    /// Runs until a drain was asked for and nothing is left.
    ///
    /// # Errors
    /// The engine is broken.
    pub fn run(self) -> Result<(), Errno> {
        // Dropped after the clients, with which files are closed.
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
        // Last: whatever this turn has caused is delivered before the loop waits.
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

    fn accepted(&mut self, now: Now, socket: OwnedFd, peer: SocketAddr) {
        let socket = Arc::new(socket);
        if self.draining.is_some() || prepare(&socket).and_then(|()| self.engine.adopt(&socket)).is_err() {
            return self.turned_away();
        }
        let id = self.next_id();
        let buffers = self.shared.buffers.clone();
        self.admit(now, id, peer, Link::Tcp(Box::new(TcpLink::new(socket))), buffers);
    }

    fn accepted_rdma(&mut self, now: Now, incoming: forebay_rdma::Incoming, peer: SocketAddr) {
        if self.draining.is_some() {
            return self.turned_away();
        }
        let id = self.next_id();
        match self.let_in(id, incoming, peer) {
            Ok((link, buffers)) => self.admit(now, id, peer, Link::SmbDirect(Box::new(link)), buffers),
            Err(reason) => {
                warn!(%peer, reason, "a connection over RDMA could not be accepted");
                self.turned_away();
            }
        }
    }

    fn let_in(
        &mut self,
        id: ConnectionId,
        incoming: forebay_rdma::Incoming,
        peer: SocketAddr,
    ) -> Result<(SmbDirect, BufferPool), String> {
        if self.rdma.is_none() {
            let rdma = Rdma::new(self.shared.memory.budget().clone(), self.index)?;
            self.watch(rdma.events());
            self.rdma = Some(rdma);
        }
        let rdma = self.rdma.as_mut().expect("it was just made");
        let (link, buffers, watched) = rdma.accept(id.0, incoming, peer, self.shared.stall_time_max)?;
        if let Some(descriptor) = watched {
            self.watch(descriptor);
        }
        Ok((link, buffers))
    }

    fn watch(&mut self, descriptor: Arc<OwnedFd>) {
        let token = Token { connection: 0, purpose: Purpose::Readable };
        self.engine.submit(token, Operation::Readable { descriptor });
    }

    /// Events and completions of RDMA are there.
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

    fn turned_away(&self) {
        self.inbox.connections.fetch_sub(1, Ordering::Relaxed);
        self.shared.metrics.connections.dec();
        self.shared.metrics.connections_unauthenticated.dec();
    }

    fn next_id(&mut self) -> ConnectionId {
        let id = ConnectionId(self.next_id * self.shared.loops.0.len() as u64 + self.index as u64);
        self.next_id += 1;
        id
    }

    fn admit(&mut self, now: Now, id: ConnectionId, peer: SocketAddr, link: Link, buffers: BufferPool) {
        let entropy = Box::new(|bytes: &mut [u8]| {
            getrandom::fill(bytes).expect("the kernel has randomness once it has booted");
        });
        let mut protocol = Connection::new(Arc::clone(&self.shared.server), id, peer.to_string(), entropy);
        let transport = match link {
            Link::Tcp(_) => "TCP",
            Link::SmbDirect(_) => {
                protocol.set_over_rdma();
                "SMB Direct"
            }
        };
        debug!(%peer, connection = id.0, transport, "connected");
        let client = Client {
            id,
            link,
            peer,
            protocol,
            accepted: Instant::now(),
            authenticated: false,
            memory: Allowance::new(buffers, self.shared.memory.stranger(), self.turn.wake()),
            reads_waiting: VecDeque::new(),
            writes_waiting: VecDeque::new(),
            queued: turn::Queued::default(),
            fetching: HashMap::new(),
            read_bytes: 0,
            write_bytes: 0,
            priority: Priority::default(),
            ops: 0,
            lanes: Share::default(),
            closing: false,
            leaving: None,
        };
        self.clients.insert(id.0, Box::new(client));
        self.unauthenticated.insert(id.0);
        self.with(now, id.0, |_, _| Ok(()));
        self.make_room(now);
    }

    /// Too many that do not log in: the oldest goes, so that a peer that holds connections open does not keep others out.
    fn make_room(&mut self, now: Now) {
        let max = CONNECTIONS_UNAUTHENTICATED_MAX.div_ceil(self.shared.loops.0.len());
        if self.unauthenticated.len() > max
            && let Some(oldest) = self.unauthenticated.pop_first()
        {
            self.shared.metrics.connections_refused.inc();
            self.with(now, oldest, |_, _| Err(Disconnect("too many connections without a login")));
        }
    }

    /// Does something with a client, and then all that follows from it.
    fn with(
        &mut self,
        now: Now,
        id: u64,
        act: impl FnOnce(&mut Self, &mut Client) -> Result<(), Disconnect>,
    ) {
        // Taken out of the table so that it and the loop can be changed together.
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

    fn is_over(&self, client: &Client) -> bool {
        client.protocol.is_finished()
            && client.leaving.is_none()
            && client.ops == 0
            && !client.lanes.is_waiting()
            && client.link.is_idle()
    }

    fn removed(&mut self, client: &Client) {
        if let Link::Tcp(link) = &client.link {
            self.engine.forget(&link.socket);
        }
        self.inbox.connections.fetch_sub(1, Ordering::Relaxed);
        self.shared.metrics.connections.dec();
        self.unauthenticated.remove(&client.id.0);
        if !client.authenticated {
            self.shared.metrics.connections_unauthenticated.dec();
        }
        debug!(peer = %client.peer, connection = client.id.0, "closed");
    }

    /// Handles frames, begins operations and sends, until nothing more can be done now.
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

    /// The next frame that is all there; begins to receive more where there is none.
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

    /// Keeps a receive in flight and drops its bytes.
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
                self.event(now, client, &event);
            }
            while let Some(transmit) = client.protocol.poll_transmit() {
                if client.closing {
                    continue;
                }
                match &mut client.link {
                    Link::Tcp(link) => link.push(transmit, &client.memory)?,
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
        // READs wait while enough is on its way: buffers stay few and in the cache.
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

    /// What a WRITE is to write has come from the peer's memory: from here on it is like any other.
    fn fetched(
        &mut self,
        now: Now,
        client: &mut Client,
        op: OpId,
        mut frame: FrameBuffer,
    ) -> Result<(), Disconnect> {
        let Some(kind) = client.fetching.remove(&op) else { return Ok(()) };
        let range = 0..frame.length();
        client.ops -= 1;
        client.write_bytes -= range.len() as u64;
        let FsOpKind::WriteRemote { handle, offset, proof, write_through, .. } = kind else { return Ok(()) };
        if let Some(Err(status)) = proof.map(|proof| proof.open(frame.bytes_mut())) {
            return self.answer(now, client, op, Err(status));
        }
        let kind = FsOpKind::Write { handle, offset, frame: Arc::new(frame), range, write_through };
        self.begin_admitted(now, client, FsOp { id: op, kind })
    }

    /// Begins an operation with the file system: contents of files on the engine, all else in a lane.
    fn begin(&mut self, now: Now, client: &mut Client, op: FsOp) -> Result<(), Disconnect> {
        match self.admit(client, op) {
            Some(op) => self.begin_admitted(now, client, op),
            None => Ok(()),
        }
    }

    /// The same for one that the limits of its volume let begin.
    fn begin_admitted(&mut self, now: Now, client: &mut Client, op: FsOp) -> Result<(), Disconnect> {
        match op.kind {
            FsOpKind::Read { .. } => match self.mapped(client, &op.kind) {
                Some(reply) => self.answer(now, client, op.id, Ok(reply))?,
                None => client.reads_waiting.push_back(op),
            },
            FsOpKind::Write { .. } | FsOpKind::WriteRemote { .. } => {
                client.write_bytes += written_bytes(&op.kind);
                client.writes_waiting.push_back(op);
            }
            // Too much waits to be closed: this one is answered when its turn has come.
            FsOpKind::Close { .. } if self.shared.lanes.queues().closes_are_late() => {
                self.work(client, op);
            }
            // What the kernel has in memory needs no other thread.
            kind => match backend::execute_cached(kind) {
                Ok(result) => self.answer(now, client, op.id, result)?,
                Err(kind) => self.work(client, FsOp { id: op.id, kind }),
            },
        }
        Ok(())
    }

    /// Begins a WRITE. It comes back where there is no memory for it.
    fn write(&mut self, client: &mut Client, op: FsOp) -> Result<Option<FsOp>, Disconnect> {
        match op.kind {
            FsOpKind::Write { handle, offset, frame, range, write_through } => {
                let file = match directory::file(&handle) {
                    Ok(file) if directory::data::writes_directly(&file, offset, range.len()) => file,
                    _ => {
                        client.write_bytes -= range.len() as u64;
                        let kind = FsOpKind::Write { handle, offset, frame, range, write_through };
                        self.work(client, FsOp { id: op.id, kind });
                        return Ok(None);
                    }
                };
                client.ops += 1;
                self.turn.count(client, range.len());
                let durable = write_through || file.write_through();
                let operation = Operation::Write { file, frame, range, offset, written: 0, durable };
                self.engine.submit(client.token(Purpose::File(op.id, Instant::now())), operation);
            }
            FsOpKind::WriteRemote { ref source, length, .. } => {
                let Link::SmbDirect(link) = &mut client.link else {
                    return Err(Disconnect("a peer's memory where there is no RDMA"));
                };
                let Some(buffer) = client.memory.take(length as usize) else { return Ok(Some(op)) };
                link.fetch(op.id, source, length, buffer)?;
                client.ops += 1;
                client.fetching.insert(op.id, op.kind);
            }
            _ => return Err(Disconnect("only writes wait")),
        }
        Ok(None)
    }

    /// Answers a READ if the kernel can copy its data from the page cache as it sends them.
    fn mapped(&self, client: &Client, kind: &FsOpKind) -> Option<FsReply> {
        let FsOpKind::Read { handle, offset, length, plain: true } = kind else { return None };
        let Link::Tcp(_) = client.link else { return None };
        let read = directory::file(handle).ok()?.mapped_read(*offset, *length)?;
        self.shared.metrics.file_read(read.length(), 0);
        Some(FsReply::Read(Box::new(read)))
    }

    /// Begins a READ. It comes back where there is no memory for it.
    fn read(&mut self, client: &mut Client, op: FsOp) -> Result<Option<FsOp>, Disconnect> {
        let FsOpKind::Read { handle, offset, length, plain } = op.kind else {
            return Err(Disconnect("only reads wait"));
        };
        let file = match directory::file(&handle) {
            Ok(file) if directory::data::reads_directly(&file, offset, length) => file,
            _ => {
                let kind = FsOpKind::Read { handle, offset, length, plain };
                self.work(client, FsOp { id: op.id, kind });
                return Ok(None);
            }
        };
        let length = length as usize;
        let direct = self.shared.direct_reads
            && length >= DIRECT_READ_BYTES_MIN
            && matches!(client.link, Link::SmbDirect(_));
        if direct && !file.direct_is_prepared() {
            let kind = FsOpKind::Read { handle, offset, length: length as u32, plain };
            self.prepare_direct(client, file, FsOp { id: op.id, kind });
            return Ok(None);
        }
        let Some(buffer) = client.memory.take(length) else {
            let kind = FsOpKind::Read { handle, offset, length: length as u32, plain };
            return Ok(Some(FsOp { id: op.id, kind }));
        };
        self.turn.count(client, length);
        client.ops += 1;
        client.read_bytes += length as u64;
        let asked = direct.then(|| file.direct_length(offset, length, buffer.capacity())).flatten();
        let past_cache = PastCache { asked: asked.unwrap_or(0), came: 0 };
        let operation = Operation::Read { file, buffer, offset, length, filled: 0, past_cache };
        self.engine.submit(client.token(Purpose::File(op.id, Instant::now())), operation);
        Ok(None)
    }

    /// Has it found out how a file is read past the page cache; the READ that asked comes back then.
    fn prepare_direct(&self, client: &mut Client, file: Arc<OpenFile>, op: FsOp) {
        client.ops += 1;
        client.lanes.begun(Lane::Data);
        let (id, inbox) = (client.id, self.inbox.clone());
        self.shared.lanes.queues().submit(Lane::Data, Origin::Connection(id.0), move || {
            file.prepare_direct();
            inbox.post(Note::Prepared(id, op));
        });
    }

    /// Has an operation carried out in its lane, once there is room for it.
    fn work(&self, client: &mut Client, op: FsOp) {
        client.lanes.queue(backend::lane(&op.kind), op);
    }

    fn run_in(&self, client: &mut Client, lane: Lane, op: FsOp) {
        client.ops += 1;
        let (id, inbox) = (client.id, self.inbox.clone());
        let origin = match lane {
            // After the descriptors that were dropped before.
            Lane::Close => Origin::Server,
            Lane::LookUp | Lane::Change | Lane::Data | Lane::Sync | Lane::Vouch => Origin::Connection(id.0),
        };
        let buffers = client.memory.buffers().clone();
        let queues = self.shared.lanes.queues().clone();
        self.shared.lanes.queues().submit(lane, origin, move || {
            let begun = Instant::now();
            let execute = AssertUnwindSafe(|| backend::execute(op.kind, &buffers));
            // The request is answered whatever happens: a client that waits for ever is worse than an error.
            let result = catch_unwind(execute).unwrap_or(Err(NtStatus::INTERNAL_ERROR));
            let answer = Note::Answered(id, lane, op.id, result);
            if lane.promises() && namespace::wants_vouching(begun) {
                // It may take as long as the target does not answer, and others need this thread.
                queues.submit(Lane::Vouch, origin, move || {
                    namespace::vouch(begun);
                    inbox.post(answer);
                });
            } else {
                inbox.post(answer);
            }
        });
    }

    /// Answers once it is known that what was made durable was not lost by the target meanwhile.
    fn vouch(&self, client: &mut Client, op: OpId, begun: Instant, result: FsResult) {
        client.ops += 1;
        client.lanes.begun(Lane::Vouch);
        let (id, inbox) = (client.id, self.inbox.clone());
        self.shared.lanes.queues().submit(Lane::Vouch, Origin::Connection(id.0), move || {
            namespace::vouch(begun);
            inbox.post(Note::Answered(id, Lane::Vouch, op, result));
        });
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
                    result.map_err(|_| Disconnect("connection reset"))
                }
                _ => Ok(()),
            }
        });
    }

    /// Ends a connection: what it has open is closed, what is in flight comes back first.
    fn close(&mut self, now: Now, client: &mut Client, reason: &'static str) {
        if !client.closing {
            client.closing = true;
            match reason {
                "closed by the peer" | "connection reset" => {
                    debug!(peer = %client.peer, reason, "disconnecting")
                }
                reason => info!(peer = %client.peer, reason, "disconnecting"),
            }
            self.hang_up(now, client);
            client.protocol.close(now);
            self.give_up_throttled(now, client);
        }
        if client.leaving.take().is_some() {
            self.hang_up(now, client);
        }
        // Nothing is sent any more, so nothing can break the protocol any more.
        let _ = self.drain_effects(now, client);
    }

    /// Drops what is queued and ends the receive that may be in flight.
    fn hang_up(&mut self, now: Now, client: &mut Client) {
        let lost = match &mut client.link {
            Link::Tcp(link) => {
                link.queue.clear();
                // Already gone where the peer was faster.
                let _ = rustix::net::shutdown(&*link.socket, rustix::net::Shutdown::Both);
                Vec::new()
            }
            Link::SmbDirect(link) => {
                let (endpoint, lost) = link.close();
                if let (Some(rdma), Some(endpoint)) = (&mut self.rdma, endpoint) {
                    rdma.close(endpoint);
                }
                lost
            }
        };
        for op in lost {
            if let Some(kind) = client.fetching.remove(&op) {
                client.ops -= 1;
                client.write_bytes -= written_bytes(&kind);
            }
            // The connection is gone: the protocol cannot be broken any more.
            let _ = self.answer(now, client, op, Err(NtStatus::CONNECTION_DISCONNECTED));
        }
    }

    /// Ends a connection after all its requests were answered, so that the answers arrive: what was not answered was not done
    /// either, and the client asks for it again on its next connection. Closing at once would reset the connection where
    /// bytes are unread, and a reset overtakes what was sent before it.
    fn take_leave(&mut self, now: Now, client: &mut Client) -> Result<(), Disconnect> {
        client.closing = true;
        client.leaving = Some(Instant::now() + FAREWELL_TIME_MAX);
        debug!(peer = %client.peer, "taking leave");
        client.protocol.close(now);
        match &mut client.link {
            Link::Tcp(link) => rustix::net::shutdown(&*link.socket, rustix::net::Shutdown::Write)
                .map_err(|_| Disconnect("connection reset")),
            Link::SmbDirect(link) => link.leave(Instant::now()),
        }
    }

    fn tick(&mut self, now: Now) {
        // Files that clients did not come back for. Nothing waits for the outcome.
        for op in self.shared.server.handle_timeout(now.instant) {
            let buffers = self.shared.buffers.clone();
            self.shared.lanes.queues().submit(backend::lane(&op), Origin::Server, move || {
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

    fn authenticated(&mut self, client: &mut Client, username: &str) {
        if !std::mem::replace(&mut client.authenticated, true) {
            self.unauthenticated.remove(&client.id.0);
            self.shared.metrics.connections_unauthenticated.dec();
            // [MS-SMB2] lets a connection carry sessions of several users; the first one's share is what it uses.
            client.memory.change(self.shared.memory.of_user(username));
        }
    }

    fn event(&mut self, now: Now, client: &mut Client, event: &Event) {
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
            Event::Completed { command, status, began, payload_bytes, by_rdma } => {
                let took = now.instant.saturating_duration_since(*began);
                self.shared.metrics.request(*command, *status, took, *payload_bytes, *by_rdma);
            }
        }
    }
}

/// Bytes that a WRITE writes.
fn written_bytes(kind: &FsOpKind) -> u64 {
    match kind {
        FsOpKind::Write { range, .. } => range.len() as u64,
        FsOpKind::WriteRemote { length, .. } => u64::from(*length),
        _ => 0,
    }
}

/// Why a connection is to be ended now, if it is.
fn overdue(client: &mut Client, draining: Option<Instant>, stall_time_max: Duration) -> Option<&'static str> {
    let now = Instant::now();
    if let Some(until) = client.leaving {
        return (now >= until).then_some("the peer does not take leave");
    }
    if client.closing {
        return None;
    }
    if let Some(until) = draining {
        return (now >= until).then_some("the server is shutting down");
    }
    if !client.authenticated && client.accepted.elapsed() > AUTHENTICATION_TIME_MAX {
        return Some("not logged in in time");
    }
    let Link::Tcp(link) = &mut client.link else { return None };
    if link.is_silent(now) {
        return Some("the peer's machine acknowledges nothing");
    }
    if link.receiver.time_of_rest(now) > stall_time_max {
        return Some("the peer does not send the rest of a frame");
    }
    let stalled = link.sending.is_some_and(|since| since.elapsed() > stall_time_max);
    stalled.then_some("the peer takes no data")
}

/// The answer that an operation of the engine amounts to.
fn file_result(
    client: &mut Client,
    metrics: &Metrics,
    operation: Operation,
    result: Result<(), Errno>,
) -> FsResult {
    match operation {
        Operation::Read { buffer, length, filled, past_cache, .. } => {
            client.read_bytes -= length as u64;
            result.map_err(status)?;
            metrics.file_read(filled, past_cache.came);
            if matches!(client.link, Link::SmbDirect(_)) {
                metrics.rdma_page_cache_bytes.inc_by(filled.saturating_sub(past_cache.came) as u64);
            }
            if filled == 0 && length > 0 {
                return Err(NtStatus::END_OF_FILE);
            }
            Ok(FsReply::Read(Box::new(ReadBuffer::new(buffer, filled))))
        }
        Operation::Write { range, written, .. } => {
            client.write_bytes -= range.len() as u64;
            result.map_err(status)?;
            if matches!(client.link, Link::SmbDirect(_)) {
                metrics.rdma_page_cache_bytes.inc_by(written as u64);
            }
            // The kernel writes less than asked for only where there is no place.
            if written < range.len() {
                Err(NtStatus::DISK_FULL)
            } else {
                Ok(FsReply::Written(written as u32))
            }
        }
        Operation::Receive { .. } | Operation::Send { .. } | Operation::Readable { .. } => {
            Err(NtStatus::INTERNAL_ERROR)
        }
    }
}

fn prepare(socket: &OwnedFd) -> Result<(), Errno> {
    rustix::net::sockopt::set_tcp_nodelay(socket, true)?;
    rustix::net::sockopt::set_socket_keepalive(socket, true)?;
    rustix::net::sockopt::set_tcp_keepidle(socket, Duration::from_secs(60))?;
    rustix::net::sockopt::set_tcp_keepintvl(socket, Duration::from_secs(10))?;
    rustix::net::sockopt::set_tcp_keepcnt(socket, 6)
}
