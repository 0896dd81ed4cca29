//! The event loop: one thread, its engine and its connections.
//!
//! It owns its connections outright: nothing on the way of a READ or WRITE is shared with another thread. What comes
//! from elsewhere (new sockets, answers of worker threads, mail between connections) comes through the loop's inbox.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_smb::engine::{Connection, ConnectionId, Disconnect, Event, Mail, Server};
use forebay_smb::fs::{FsOp, FsOpKind, FsReply, FsResult, OpId};
use forebay_smb::status::NtStatus;
use rustix::io::Errno;
use tracing::{debug, info, warn};

use crate::backend::directory::OpenFile;
use crate::backend::{self, directory, errno::status};
use crate::buffers::{BufferPool, FrameBuffer, ReadBuffer};
use crate::clock;
use crate::io::workers::Workers;
use crate::io::{Completion, Engine, Operation, PastCache, Purpose, Token, Waker};
use crate::limits::{
    AUTHENTICATION_TIME_MAX, BUFFER_BYTES_MAX, CONNECTIONS_MAX, CONNECTIONS_UNAUTHENTICATED_MAX,
    DIRECT_READ_BYTES_MIN, FAREWELL_TIME_MAX, FS_OPS_IN_FLIGHT_MAX, READ_AHEAD_BYTES_MAX,
    SEND_QUEUE_BYTES_MAX, SEND_STALL_TIME_MAX, WRITE_BYTES_IN_FLIGHT_MAX,
};
use crate::metrics::Metrics;
use crate::namespace;
use crate::rdma::{self, Rdma};
use crate::transport::smb_direct::SmbDirect;
use crate::transport::tcp::{Received, TcpLink};

/// How often deadlines are looked at.
const TICK: Duration = Duration::from_millis(500);

/// What comes to a loop from other threads.
pub enum Note {
    /// A connection that was accepted.
    Accepted(Arrival, SocketAddr),
    /// A worker's answer.
    Answered(ConnectionId, OpId, FsResult),
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
    /// Over RDMA; not let in yet.
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
    /// The inbox of a loop whose engine `waker` wakes.
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
    pub workers: Arc<Workers>,
    /// Buffers of this loop; answers of workers come in them too.
    pub buffers: BufferPool,
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
    /// READs that wait for earlier ones to be sent.
    reads_waiting: VecDeque<FsOp>,
    /// WRITEs whose data are being fetched from the peer's memory.
    fetching: HashMap<OpId, FsOpKind>,
    read_bytes: u64,
    write_bytes: u64,
    ops: usize,
    closing: bool,
    /// Nothing more is sent; until then what still comes is taken to nowhere, so that the peer sees the last answers.
    leaving: Option<Instant>,
}

/// What carries a client's frames.
enum Link {
    Tcp(TcpLink),
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
    /// Where buffers for its payload come from.
    fn buffers<'a>(&'a self, shared: &'a Shared) -> &'a BufferPool {
        match &self.link {
            Link::Tcp(_) => &shared.buffers,
            Link::SmbDirect(link) => link.buffers(),
        }
    }

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
            || self.ops + self.reads_waiting.len() > FS_OPS_IN_FLIGHT_MAX
    }
}

/// One event loop.
pub struct EventLoop<E> {
    engine: E,
    shared: Shared,
    index: usize,
    inbox: Inbox,
    clients: HashMap<u64, Box<Client>>,
    /// Ids of those from which nobody has logged in, and so the oldest first.
    unauthenticated: BTreeSet<u64>,
    next_id: u64,
    /// From the first connection over RDMA on.
    rdma: Option<Rdma>,
    draining: Option<Instant>,
    last_tick: Instant,
    done: Vec<Completion>,
}

impl<E: Engine> EventLoop<E> {
    /// The loop of `shared.loops` at `index`, to be run on the thread that made the engine.
    #[must_use]
    pub fn new(engine: E, shared: Shared, index: usize) -> Self {
        let inbox = shared.loops.0[index].clone();
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
            done: Vec::new(),
        }
    }

    /// Runs until it was told to drain and nothing is left.
    ///
    /// # Errors
    /// The engine is broken.
    pub fn run(mut self) -> Result<(), Errno> {
        while self.draining.is_none() || !self.clients.is_empty() {
            self.turn()?;
        }
        Ok(())
    }

    fn turn(&mut self) -> Result<(), Errno> {
        let mut done = std::mem::take(&mut self.done);
        self.engine.wait(TICK, &mut done)?;
        let now = clock::now();
        for completion in done.drain(..) {
            self.completed(now, completion);
        }
        self.done = done;
        for note in self.inbox.take() {
            self.noted(now, note);
        }
        if self.shared.server.has_mail() {
            self.shared.loops.route(&self.shared.server);
        }
        if self.last_tick.elapsed() >= TICK || self.draining.is_some() {
            self.last_tick = Instant::now();
            self.tick(now);
        }
        Ok(())
    }

    fn noted(&mut self, now: u64, note: Note) {
        match note {
            Note::Accepted(Arrival::Socket(socket), peer) => self.accepted(now, socket, peer),
            Note::Accepted(Arrival::Rdma(incoming), peer) => self.accepted_rdma(now, incoming, peer),
            Note::Answered(id, op, result) => self.with(now, id.0, |this, client| {
                client.ops -= 1;
                this.answer(now, client, op, result)
            }),
            Note::Prepared(id, op) => self.with(now, id.0, |_, client| {
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

    fn accepted(&mut self, now: u64, socket: OwnedFd, peer: SocketAddr) {
        let socket = Arc::new(socket);
        if self.draining.is_some() || prepare(&socket).and_then(|()| self.engine.adopt(&socket)).is_err() {
            return self.turned_away();
        }
        let id = self.next_id();
        self.admit(now, id, peer, Link::Tcp(TcpLink::new(socket)));
    }

    fn accepted_rdma(&mut self, now: u64, incoming: forebay_rdma::Incoming, peer: SocketAddr) {
        if self.draining.is_some() {
            return self.turned_away();
        }
        let id = self.next_id();
        match self.let_in(id, incoming, peer) {
            Ok(link) => self.admit(now, id, peer, Link::SmbDirect(Box::new(link))),
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
    ) -> Result<SmbDirect, String> {
        if self.rdma.is_none() {
            let bytes_max = BUFFER_BYTES_MAX / self.shared.loops.0.len();
            let rdma = Rdma::new(bytes_max)?;
            self.watch(rdma.events());
            self.rdma = Some(rdma);
        }
        let rdma = self.rdma.as_mut().expect("it was just made");
        let (link, watched) = rdma.accept(id.0, incoming, peer)?;
        if let Some(descriptor) = watched {
            self.watch(descriptor);
        }
        Ok(link)
    }

    fn watch(&mut self, descriptor: Arc<OwnedFd>) {
        let token = Token { connection: 0, purpose: Purpose::Readable };
        self.engine.submit(token, Operation::Readable { descriptor });
    }

    /// Events and completions of RDMA are there.
    fn rdma_ready(&mut self, now: u64) {
        let Some(rdma) = &mut self.rdma else { return };
        for (id, event) in rdma.take() {
            self.with(now, id, |this, client| {
                let Link::SmbDirect(link) = &mut client.link else { return Ok(()) };
                match event {
                    rdma::Event::Established => link.established(Instant::now()),
                    rdma::Event::Ready => link.ready(Instant::now(), &this.shared.metrics),
                    rdma::Event::Ended(reason) => {
                        Err(link.lost(Instant::now(), &this.shared.metrics, reason))
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

    fn admit(&mut self, now: u64, id: ConnectionId, peer: SocketAddr, link: Link) {
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
            reads_waiting: VecDeque::new(),
            fetching: HashMap::new(),
            read_bytes: 0,
            write_bytes: 0,
            ops: 0,
            closing: false,
            leaving: None,
        };
        self.clients.insert(id.0, Box::new(client));
        self.unauthenticated.insert(id.0);
        self.with(now, id.0, |_, _| Ok(()));
        self.make_room(now);
    }

    /// Too many that do not log in: the oldest goes, so that whoever holds connections open keeps nobody else out.
    fn make_room(&mut self, now: u64) {
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
        now: u64,
        id: u64,
        act: impl FnOnce(&mut Self, &mut Client) -> Result<(), Disconnect>,
    ) {
        // Taken out of the table so that it and the loop can be changed together.
        let Some(mut client) = self.clients.remove(&id) else { return };
        let result = act(self, &mut client).and_then(|()| self.pump(now, &mut client));
        if let Err(disconnect) = result {
            self.close(now, &mut client, disconnect.0);
        }
        if client.closing && self.is_over(&client) {
            self.removed(&client);
        } else {
            self.clients.insert(id, client);
        }
    }

    fn is_over(&self, client: &Client) -> bool {
        client.protocol.is_finished() && client.leaving.is_none() && client.ops == 0 && client.link.is_idle()
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
    fn pump(&mut self, now: u64, client: &mut Client) -> Result<(), Disconnect> {
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
            if client.is_held_back() || self.draining.is_some() {
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
            Link::SmbDirect(link) => return link.next(frame_bytes_max),
            Link::Tcp(link) => link,
        };
        if link.receiver.is_waiting() {
            return Ok(None);
        }
        match link.receiver.next(frame_bytes_max, &self.shared.buffers)? {
            Received::Frame(frame) => Ok(Some(frame)),
            Received::More => {
                self.receive(client)?;
                Ok(None)
            }
        }
    }

    fn receive(&mut self, client: &mut Client) -> Result<(), Disconnect> {
        if let Link::Tcp(link) = &mut client.link
            && let Some(operation) = link.receiver.operation(&link.socket, &self.shared.buffers)?
        {
            self.engine.submit(client.token(Purpose::Receive), operation);
        }
        Ok(())
    }

    /// Keeps a receive in flight whose bytes nobody looks at.
    fn receive_to_nowhere(&mut self, client: &mut Client) -> Result<(), Disconnect> {
        match &mut client.link {
            Link::SmbDirect(link) => link.discard(),
            Link::Tcp(link) => link.receiver.discard(),
        }
        self.receive(client)
    }

    fn frame(&mut self, now: u64, client: &mut Client, mut frame: FrameBuffer) -> Result<(), Disconnect> {
        let unsealed = client.protocol.unseal(frame.bytes_mut())?;
        let frame = match &unsealed {
            Some(unsealed) => frame.narrow(unsealed.range.clone()),
            None => frame,
        };
        client.protocol.handle(now, Arc::new(frame), unsealed.as_ref())
    }

    fn drain_effects(&mut self, now: u64, client: &mut Client) -> Result<(), Disconnect> {
        loop {
            while let Some(event) = client.protocol.poll_event() {
                self.event(now, client, &event);
            }
            while let Some(transmit) = client.protocol.poll_transmit() {
                if client.closing {
                    continue;
                }
                match &mut client.link {
                    Link::Tcp(link) => link.push(transmit, &self.shared.buffers)?,
                    Link::SmbDirect(link) => link.push(transmit, &self.shared.metrics)?,
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
            if !begun {
                break;
            }
        }
        // READs wait while enough is on its way: buffers stay few and in the cache.
        while client.read_bytes + client.link.bytes() < READ_AHEAD_BYTES_MAX || client.closing {
            let Some(op) = client.reads_waiting.pop_front() else { break };
            self.read(now, client, op)?;
        }
        if client.closing {
            return Ok(());
        }
        match &mut client.link {
            Link::SmbDirect(link) => link.pump(Instant::now()),
            Link::Tcp(link) => {
                if link.sending.is_none()
                    && let Some(message) = link.queue.take()
                {
                    link.sending = Some(Instant::now());
                    let operation = Operation::Send { socket: Arc::clone(&link.socket), message };
                    self.engine.submit(client.token(Purpose::Send), operation);
                }
                Ok(())
            }
        }
    }

    /// What a WRITE is to write has come from the peer's memory: from here on it is like any other.
    fn fetched(
        &mut self,
        now: u64,
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
        self.begin(now, client, FsOp { id: op, kind })
    }

    /// Begins an operation with the file system: contents of files on the engine, all else on a worker.
    fn begin(&mut self, now: u64, client: &mut Client, op: FsOp) -> Result<(), Disconnect> {
        match op.kind {
            FsOpKind::Read { .. } => client.reads_waiting.push_back(op),
            FsOpKind::Write { handle, offset, frame, range, write_through } => {
                let file = match directory::file(&handle) {
                    Ok(file) if directory::data::writes_directly(&file, offset, range.len()) => file,
                    _ => {
                        let kind = FsOpKind::Write { handle, offset, frame, range, write_through };
                        self.work(client, FsOp { id: op.id, kind });
                        return Ok(());
                    }
                };
                client.ops += 1;
                client.write_bytes += range.len() as u64;
                let durable = write_through || file.write_through();
                let operation = Operation::Write { file, frame, range, offset, written: 0, durable };
                self.engine.submit(client.token(Purpose::File(op.id, Instant::now())), operation);
            }
            FsOpKind::WriteRemote { ref source, length, .. } => {
                let Link::SmbDirect(link) = &mut client.link else {
                    return Err(Disconnect("a peer's memory where there is no RDMA"));
                };
                if link.fetch(op.id, source, length).is_err() {
                    return self.answer(now, client, op.id, Err(NtStatus::INSUFFICIENT_RESOURCES));
                }
                client.ops += 1;
                client.write_bytes += u64::from(length);
                client.fetching.insert(op.id, op.kind);
            }
            FsOpKind::Flush { handle } => match directory::file(&handle) {
                Ok(file) if file.flush_is_fsync() => {
                    client.ops += 1;
                    self.engine
                        .submit(client.token(Purpose::File(op.id, Instant::now())), Operation::Sync { file });
                }
                _ => self.work(client, FsOp { id: op.id, kind: FsOpKind::Flush { handle } }),
            },
            // What the kernel has in memory needs no other thread.
            kind => match backend::execute_cached(kind) {
                Ok(result) => self.answer(now, client, op.id, result)?,
                Err(kind) => self.work(client, FsOp { id: op.id, kind }),
            },
        }
        Ok(())
    }

    fn read(&mut self, now: u64, client: &mut Client, op: FsOp) -> Result<(), Disconnect> {
        let FsOpKind::Read { handle, offset, length } = op.kind else {
            return Err(Disconnect("only reads wait"));
        };
        let file = match directory::file(&handle) {
            Ok(file) if directory::data::reads_directly(&file, offset, length) => file,
            _ => {
                let kind = FsOpKind::Read { handle, offset, length };
                self.work(client, FsOp { id: op.id, kind });
                return Ok(());
            }
        };
        let length = length as usize;
        let direct = self.shared.direct_reads
            && length >= DIRECT_READ_BYTES_MIN
            && matches!(client.link, Link::SmbDirect(_));
        if direct && !file.direct_is_prepared() {
            let kind = FsOpKind::Read { handle, offset, length: length as u32 };
            self.prepare_direct(client, file, FsOp { id: op.id, kind });
            return Ok(());
        }
        let Ok(buffer) = client.buffers(&self.shared).take(length) else {
            return self.answer(now, client, op.id, Err(NtStatus::INSUFFICIENT_RESOURCES));
        };
        client.ops += 1;
        client.read_bytes += length as u64;
        let asked = direct.then(|| file.direct_length(offset, length, buffer.capacity())).flatten();
        let past_cache = PastCache { asked: asked.unwrap_or(0), came: 0 };
        let operation = Operation::Read { file, buffer, offset, length, filled: 0, past_cache };
        self.engine.submit(client.token(Purpose::File(op.id, Instant::now())), operation);
        Ok(())
    }

    /// Has a worker find out how a file is read past the page cache; the READ that asked comes back then.
    fn prepare_direct(&self, client: &mut Client, file: Arc<OpenFile>, op: FsOp) {
        client.ops += 1;
        let (id, inbox) = (client.id, self.inbox.clone());
        self.shared.workers.submit(move || {
            file.prepare_direct();
            inbox.post(Note::Prepared(id, op));
        });
    }

    fn work(&self, client: &mut Client, op: FsOp) {
        client.ops += 1;
        let (id, inbox) = (client.id, self.inbox.clone());
        let buffers = client.buffers(&self.shared).clone();
        self.shared.workers.submit(move || {
            let begun = Instant::now();
            let execute = AssertUnwindSafe(|| backend::execute(op.kind, &buffers));
            // The request is answered whatever happens: a client that waits for ever is worse than an error.
            let result = catch_unwind(execute).unwrap_or(Err(NtStatus::INTERNAL_ERROR));
            namespace::vouch(begun);
            inbox.post(Note::Answered(id, op.id, result));
        });
    }

    /// Answers once it is known that what was made durable was not lost by the target meanwhile.
    fn vouch(&self, client: &mut Client, op: OpId, begun: Instant, result: FsResult) {
        client.ops += 1;
        let (id, inbox) = (client.id, self.inbox.clone());
        self.shared.workers.submit(move || {
            namespace::vouch(begun);
            inbox.post(Note::Answered(id, op, result));
        });
    }

    fn answer(
        &mut self,
        now: u64,
        client: &mut Client,
        op: OpId,
        result: FsResult,
    ) -> Result<(), Disconnect> {
        client.protocol.complete(now, op, result)
    }

    fn completed(&mut self, now: u64, completion: Completion) {
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
    fn close(&mut self, now: u64, client: &mut Client, reason: &'static str) {
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
        }
        if client.leaving.take().is_some() {
            self.hang_up(now, client);
        }
        // Nothing is sent any more, so nothing can break the protocol any more.
        let _ = self.drain_effects(now, client);
    }

    /// Drops what is queued and ends the receive that may be in flight.
    fn hang_up(&mut self, now: u64, client: &mut Client) {
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
            if client.fetching.remove(&op).is_some() {
                client.ops -= 1;
            }
            // The connection is gone: nobody can break the protocol any more.
            let _ = self.answer(now, client, op, Err(NtStatus::CONNECTION_DISCONNECTED));
        }
    }

    /// Ends a connection whose requests are all answered, so that the answers arrive: what was not answered was not done
    /// either, and the client asks for it again on its next connection. Closing at once would reset the connection where
    /// bytes are unread, and a reset overtakes what was sent before it.
    fn take_leave(&mut self, now: u64, client: &mut Client) -> Result<(), Disconnect> {
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

    fn tick(&mut self, now: u64) {
        // Files that clients did not come back for. Nobody waits for the outcome.
        for op in self.shared.server.handle_timeout(now) {
            let buffers = self.shared.buffers.clone();
            self.shared.workers.submit(move || {
                let execute = AssertUnwindSafe(|| backend::execute(op, &buffers).map(drop));
                if !matches!(catch_unwind(execute), Ok(Ok(()))) {
                    warn!("a file that was kept for a client could not be closed in order");
                }
            });
        }
        self.shared.server.tick(now);
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
        let draining = self.draining;
        let late: Vec<(u64, &'static str)> = self
            .clients
            .values_mut()
            .filter_map(|client| overdue(client, draining).map(|reason| (client.id.0, reason)))
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
                Link::SmbDirect(link) => link.tick(Instant::now()),
                Link::Tcp(_) => Ok(()),
            });
        }
        let rdma_bytes = self.rdma.as_ref().map_or(0, Rdma::buffer_bytes);
        self.shared.metrics.buffer_bytes(self.index, self.shared.buffers.bytes_in_use() + rdma_bytes);
    }

    fn authenticated(&mut self, client: &mut Client) {
        if !std::mem::replace(&mut client.authenticated, true) {
            self.unauthenticated.remove(&client.id.0);
            self.shared.metrics.connections_unauthenticated.dec();
        }
    }

    fn event(&mut self, now: u64, client: &mut Client, event: &Event) {
        let peer = client.peer;
        match event {
            Event::Negotiated { dialect } => debug!(%peer, dialect, "negotiated"),
            Event::SessionEstablished { session_id, username } => {
                info!(%peer, session = session_id, user = username, "session established");
                self.authenticated(client);
                self.shared.metrics.sessions.inc();
            }
            Event::ChannelBound { session_id, username } => {
                info!(%peer, session = session_id, user = username, "channel bound");
                self.authenticated(client);
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
                let took = now.saturating_sub(*began);
                self.shared.metrics.request(*command, *status, took, *payload_bytes, *by_rdma);
            }
        }
    }
}

/// Why a connection is to be ended now, if it is.
fn overdue(client: &mut Client, draining: Option<Instant>) -> Option<&'static str> {
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
    let stalled = link.sending.is_some_and(|since| since.elapsed() > SEND_STALL_TIME_MAX);
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
            if filled == 0 && length > 0 {
                return Err(NtStatus::END_OF_FILE);
            }
            Ok(FsReply::Read(Box::new(ReadBuffer::new(buffer, filled))))
        }
        Operation::Write { range, written, .. } => {
            client.write_bytes -= range.len() as u64;
            result.map_err(status)?;
            // The kernel writes less than asked for only where there is no place.
            if written < range.len() {
                Err(NtStatus::DISK_FULL)
            } else {
                Ok(FsReply::Written(written as u32))
            }
        }
        Operation::Sync { file } => match result {
            Ok(()) => Ok(FsReply::Done),
            Err(errno) => {
                file.set_sync_failed();
                Err(status(errno))
            }
        },
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
