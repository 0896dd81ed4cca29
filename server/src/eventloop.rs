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

use crate::backend::{self, directory, errno::status};
use crate::buffers::{BufferPool, FrameBuffer, ReadBuffer};
use crate::clock;
use crate::io::workers::Workers;
use crate::io::{Completion, Engine, Operation, Purpose, Token, Waker};
use crate::limits::{
    AUTHENTICATION_TIME_MAX, CONNECTIONS_MAX, CONNECTIONS_UNAUTHENTICATED_MAX, FAREWELL_TIME_MAX,
    FS_OPS_IN_FLIGHT_MAX, READ_AHEAD_BYTES_MAX, SEND_QUEUE_BYTES_MAX, SEND_STALL_TIME_MAX,
    WRITE_BYTES_IN_FLIGHT_MAX,
};
use crate::metrics::Metrics;
use crate::transport::tcp::{Received, Receiver, SendQueue, message};

/// How often deadlines are looked at.
const TICK: Duration = Duration::from_secs(1);

/// What comes to a loop from other threads.
pub enum Note {
    /// A connection that was accepted.
    Accepted(OwnedFd, SocketAddr),
    /// A worker's answer.
    Answered(ConnectionId, OpId, FsResult),
    /// From another connection or an administrator.
    Mail(ConnectionId, Mail),
    /// Take no more requests, finish those in flight until the time, then end.
    Drain(Instant),
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

    /// Gives a connection to the loop that has the fewest. False, and the socket closed, where there are too many.
    pub fn accept(&self, socket: OwnedFd, peer: SocketAddr, metrics: &Metrics) -> bool {
        if self.connections() >= CONNECTIONS_MAX {
            return false;
        }
        let fewest = self.0.iter().min_by_key(|inbox| inbox.connections.load(Ordering::Relaxed));
        let inbox = fewest.expect("there is a loop");
        inbox.connections.fetch_add(1, Ordering::Relaxed);
        metrics.connections.inc();
        metrics.connections_unauthenticated.inc();
        inbox.post(Note::Accepted(socket, peer));
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
}

struct Client {
    id: ConnectionId,
    socket: Arc<OwnedFd>,
    peer: SocketAddr,
    protocol: Connection,
    receiver: Receiver,
    queue: SendQueue,
    /// When the send in flight was begun or last seen to move.
    sending: Option<Instant>,
    accepted: Instant,
    authenticated: bool,
    /// READs that wait for earlier ones to be sent.
    reads_waiting: VecDeque<FsOp>,
    read_bytes: u64,
    write_bytes: u64,
    ops: usize,
    closing: bool,
    /// Nothing more is sent; until then what still comes is taken to nowhere, so that the peer sees the last answers.
    leaving: Option<Instant>,
}

impl Client {
    fn token(&self, purpose: Purpose) -> Token {
        Token { connection: self.id.0, purpose }
    }

    /// All is answered, and the answers are sent.
    fn is_idle(&self) -> bool {
        !self.closing && self.protocol.requests_in_flight() == 0 && self.queue.bytes() == 0
    }

    /// Whether the peer has to wait until what it asked for is done.
    fn is_held_back(&self) -> bool {
        self.queue.bytes() > SEND_QUEUE_BYTES_MAX
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
            Note::Accepted(socket, peer) => self.accepted(now, socket, peer),
            Note::Answered(id, op, result) => self.with(now, id.0, |this, client| {
                client.ops -= 1;
                this.answer(now, client, op, result)
            }),
            Note::Mail(id, mail) => self.with(now, id.0, |_, client| client.protocol.deliver(now, mail)),
            Note::Drain(until) => self.draining = Some(until),
        }
    }

    fn accepted(&mut self, now: u64, socket: OwnedFd, peer: SocketAddr) {
        let socket = Arc::new(socket);
        if self.draining.is_some() || prepare(&socket).and_then(|()| self.engine.adopt(&socket)).is_err() {
            self.inbox.connections.fetch_sub(1, Ordering::Relaxed);
            self.shared.metrics.connections.dec();
            self.shared.metrics.connections_unauthenticated.dec();
            return;
        }
        let id = ConnectionId(self.next_id * self.shared.loops.0.len() as u64 + self.index as u64);
        self.next_id += 1;
        let entropy = Box::new(|bytes: &mut [u8]| {
            getrandom::fill(bytes).expect("the kernel has randomness once it has booted");
        });
        let protocol = Connection::new(Arc::clone(&self.shared.server), id, peer.to_string(), entropy);
        debug!(%peer, connection = id.0, "connected");
        let client = Client {
            id,
            socket,
            peer,
            protocol,
            receiver: Receiver::new(),
            queue: SendQueue::default(),
            sending: None,
            accepted: Instant::now(),
            authenticated: false,
            reads_waiting: VecDeque::new(),
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
        client.protocol.is_finished()
            && client.leaving.is_none()
            && client.ops == 0
            && client.sending.is_none()
            && !client.receiver.is_waiting()
    }

    fn removed(&mut self, client: &Client) {
        self.engine.forget(&client.socket);
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
            if client.is_held_back() || self.draining.is_some() || client.receiver.is_waiting() {
                break;
            }
            match client.receiver.next(client.protocol.frame_bytes_max(), &self.shared.buffers)? {
                Received::Frame(frame) => self.frame(now, client, frame)?,
                Received::More => {
                    if let Some(operation) =
                        client.receiver.operation(&client.socket, &self.shared.buffers)?
                    {
                        self.engine.submit(client.token(Purpose::Receive), operation);
                    }
                    break;
                }
            }
        }
        Ok(())
    }

    /// Keeps a receive in flight whose bytes nobody looks at.
    fn receive_to_nowhere(&mut self, client: &mut Client) -> Result<(), Disconnect> {
        client.receiver.discard();
        if let Some(operation) = client.receiver.operation(&client.socket, &self.shared.buffers)? {
            self.engine.submit(client.token(Purpose::Receive), operation);
        }
        Ok(())
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
                if !client.closing {
                    client.queue.push(message(transmit, &self.shared.buffers)?);
                }
            }
            let mut begun = false;
            while let Some(op) = client.protocol.poll_fs() {
                begun = true;
                self.begin(now, client, op)?;
            }
            if !begun {
                break;
            }
        }
        // READs wait while enough is on its way: buffers stay few and in the cache.
        while client.read_bytes + client.queue.bytes() < READ_AHEAD_BYTES_MAX || client.closing {
            let Some(op) = client.reads_waiting.pop_front() else { break };
            self.read(now, client, op)?;
        }
        if client.sending.is_none()
            && !client.closing
            && let Some(message) = client.queue.take()
        {
            client.sending = Some(Instant::now());
            let operation = Operation::Send { socket: Arc::clone(&client.socket), message };
            self.engine.submit(client.token(Purpose::Send), operation);
        }
        Ok(())
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
                self.engine.submit(client.token(Purpose::File(op.id)), operation);
            }
            FsOpKind::Flush { handle } => match directory::file(&handle) {
                Ok(file) if file.flush_is_fsync() => {
                    client.ops += 1;
                    self.engine.submit(client.token(Purpose::File(op.id)), Operation::Sync { file });
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
        let Ok(buffer) = self.shared.buffers.take(length as usize) else {
            return self.answer(now, client, op.id, Err(NtStatus::INSUFFICIENT_RESOURCES));
        };
        client.ops += 1;
        client.read_bytes += u64::from(length);
        let operation = Operation::Read { file, buffer, offset, length: length as usize, filled: 0 };
        self.engine.submit(client.token(Purpose::File(op.id)), operation);
        Ok(())
    }

    fn work(&self, client: &mut Client, op: FsOp) {
        client.ops += 1;
        let (id, inbox, buffers) = (client.id, self.inbox.clone(), self.shared.buffers.clone());
        self.shared.workers.submit(move || {
            let execute = AssertUnwindSafe(|| backend::execute(op.kind, &buffers));
            // The request is answered whatever happens: a client that waits for ever is worse than an error.
            let result = catch_unwind(execute).unwrap_or(Err(NtStatus::INTERNAL_ERROR));
            inbox.post(Note::Answered(id, op.id, result));
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
        self.with(now, token.connection, |this, client| {
            let (Purpose::Receive | Purpose::Send) = token.purpose else {
                let Purpose::File(op) = token.purpose else { return Ok(()) };
                client.ops -= 1;
                let result = file_result(client, operation, result);
                return this.answer(now, client, op, result);
            };
            match operation {
                Operation::Receive { buffer, start, filled, least, most, .. } => {
                    let all = client.receiver.completed(buffer, start, filled, least, most);
                    match result {
                        Err(_) => Err(Disconnect("connection reset")),
                        Ok(()) if !all => Err(Disconnect("closed by the peer")),
                        Ok(()) => Ok(()),
                    }
                }
                Operation::Send { message, .. } => {
                    client.sending = None;
                    client.queue.completed(&message);
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
            client.queue.clear();
            // Already gone where the peer was faster.
            let _ = rustix::net::shutdown(&*client.socket, rustix::net::Shutdown::Both);
            client.protocol.close(now);
        }
        if client.leaving.take().is_some() {
            // Ends the receive that may be in flight.
            let _ = rustix::net::shutdown(&*client.socket, rustix::net::Shutdown::Both);
        }
        // Nothing is sent any more, so nothing can break the protocol any more.
        let _ = self.drain_effects(now, client);
    }

    /// Ends a connection whose requests are all answered, so that the answers arrive: what was not answered was not done
    /// either, and the client asks for it again on its next connection. Closing at once would reset the connection where
    /// bytes are unread, and a reset overtakes what was sent before it.
    fn take_leave(&mut self, now: u64, client: &mut Client) -> Result<(), Disconnect> {
        client.closing = true;
        client.leaving = Some(Instant::now() + FAREWELL_TIME_MAX);
        debug!(peer = %client.peer, "taking leave");
        client.protocol.close(now);
        rustix::net::shutdown(&*client.socket, rustix::net::Shutdown::Write)
            .map_err(|_| Disconnect("connection reset"))
    }

    fn tick(&mut self, now: u64) {
        if self.draining.is_some() {
            let idle: Vec<u64> =
                self.clients.values().filter(|client| client.is_idle()).map(|client| client.id.0).collect();
            for id in idle {
                self.with(now, id, |this, client| this.take_leave(now, client));
            }
        }
        let late: Vec<(u64, &'static str)> = self
            .clients
            .values()
            .filter_map(|client| self.overdue(client).map(|reason| (client.id.0, reason)))
            .collect();
        for (id, reason) in late {
            self.with(now, id, |_, _| Err(Disconnect(reason)));
        }
        self.shared.metrics.buffer_bytes(self.index, self.shared.buffers.bytes_in_use());
    }

    fn overdue(&self, client: &Client) -> Option<&'static str> {
        if let Some(until) = client.leaving {
            return (Instant::now() >= until).then_some("the peer does not take leave");
        }
        if client.closing {
            return None;
        }
        if let Some(until) = self.draining {
            return (Instant::now() >= until).then_some("the server is shutting down");
        }
        if !client.authenticated && client.accepted.elapsed() > AUTHENTICATION_TIME_MAX {
            return Some("not logged in in time");
        }
        let stalled = client.sending.is_some_and(|since| since.elapsed() > SEND_STALL_TIME_MAX);
        stalled.then_some("the peer takes no data")
    }

    fn event(&mut self, now: u64, client: &mut Client, event: &Event) {
        let peer = client.peer;
        match event {
            Event::Negotiated { dialect } => debug!(%peer, dialect, "negotiated"),
            Event::SessionEstablished { session_id, username } => {
                info!(%peer, session = session_id, user = username, "session established");
                if !std::mem::replace(&mut client.authenticated, true) {
                    self.unauthenticated.remove(&client.id.0);
                    self.shared.metrics.connections_unauthenticated.dec();
                }
                self.shared.metrics.sessions.inc();
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
            Event::Completed { command, status, began, payload_bytes } => {
                self.shared.metrics.request(*command, *status, now.saturating_sub(*began), *payload_bytes);
            }
        }
    }
}

/// The answer that an operation of the engine amounts to.
fn file_result(client: &mut Client, operation: Operation, result: Result<(), Errno>) -> FsResult {
    match operation {
        Operation::Read { buffer, length, filled, .. } => {
            client.read_bytes -= length as u64;
            result.map_err(status)?;
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
        Operation::Receive { .. } | Operation::Send { .. } => Err(NtStatus::INTERNAL_ERROR),
    }
}

fn prepare(socket: &OwnedFd) -> Result<(), Errno> {
    rustix::net::sockopt::set_tcp_nodelay(socket, true)?;
    rustix::net::sockopt::set_socket_keepalive(socket, true)?;
    rustix::net::sockopt::set_tcp_keepidle(socket, Duration::from_secs(60))?;
    rustix::net::sockopt::set_tcp_keepintvl(socket, Duration::from_secs(10))?;
    rustix::net::sockopt::set_tcp_keepcnt(socket, 6)
}
