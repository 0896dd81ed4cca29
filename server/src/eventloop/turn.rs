//! One turn of an event loop: how much of it a connection may have, and which connections go on in the next.
//!
//! The kernel copies what is in the page cache while operations are submitted, all of them before anything of it is sent. A
//! turn begins so many bytes of READs and WRITEs of each priority (`qos::Priority`); connections that have more to begin go on in
//! the next turn, those of high priority first, and then in the order in which they were put off. Connections that lack memory go on when their turn in the line for it has come.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_rdma::Wake;
use forebay_smb::engine::Disconnect;
use forebay_smb::fs::FsOpKind;
use forebay_smb::status::NtStatus;
use forebay_smb::time::Now;

use super::EventLoop;
use super::client::{Client, Link};
use super::files::written_bytes;
use crate::io::{Engine, Operation, Purpose, SpareParts, Waker};
use crate::limits::TRIM_INTERVAL;
use crate::metrics::Metrics;
use crate::qos::Priority;

/// What a client is in the lists of.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queued {
    /// It goes on in the next turn.
    next: bool,
    /// It lacks memory.
    short: bool,
    /// It may have something to send.
    send: bool,
}

/// The present turn.
pub(super) struct Turn {
    /// Bytes of each priority that were begun.
    bytes: [u64; Priority::ALL.len()],
    /// Connections that go on in the next, by priority.
    next: [VecDeque<u64>; Priority::ALL.len()],
    /// Clients that lack memory.
    short: VecDeque<u64>,
    /// Clients that may have something to send.
    send: Vec<u64>,
    wake: Wake,
    trimmed: Instant,
}

impl Turn {
    /// Of the loop that `waker` wakes.
    pub(super) fn new(waker: Waker) -> Self {
        Self {
            bytes: Default::default(),
            next: Default::default(),
            short: VecDeque::new(),
            send: Vec::new(),
            wake: Arc::new(move || waker.wake()),
            trimmed: Instant::now(),
        }
    }

    /// What wakes the loop.
    pub(super) fn wake(&self) -> Wake {
        Arc::clone(&self.wake)
    }

    /// How long the loop may wait for something to happen, where it would wait for `longest`.
    pub(super) fn time_max(&self, longest: Duration) -> Duration {
        if self.next.iter().all(VecDeque::is_empty) { longest } else { Duration::ZERO }
    }

    /// A READ or WRITE of so many bytes is begun for a volume of this priority.
    pub(super) fn count(&mut self, priority: Priority, bytes: usize) {
        self.bytes[priority as usize] += bytes as u64;
    }

    /// Whether the client may begin a READ or WRITE in this turn. If not, it goes on in the next.
    pub(super) fn has_room(&mut self, client: &mut Client) -> bool {
        let has_room = self.bytes[client.priority as usize] < client.priority.turn_bytes_max();
        if !has_room && !std::mem::replace(&mut client.queued.next, true) {
            self.next[client.priority as usize].push_back(client.id.0);
        }
        has_room
    }

    /// Remembers a client that lacks memory.
    pub(super) fn note_short(&mut self, client: &mut Client, metrics: &Metrics) {
        if client.memory.is_short() && !std::mem::replace(&mut client.queued.short, true) {
            metrics.memory_waits.inc();
            self.short.push_back(client.id.0);
        }
    }

    /// Remembers a client that may have something to send.
    pub(super) fn note_send(&mut self, client: &mut Client) {
        if !std::mem::replace(&mut client.queued.send, true) {
            self.send.push(client.id.0);
        }
    }

    /// Whether it is time to give back to the kernel what is not needed.
    pub(super) fn is_time_to_trim(&mut self) -> bool {
        let is_time = self.trimmed.elapsed() >= TRIM_INTERVAL;
        if is_time {
            self.trimmed = Instant::now();
        }
        is_time
    }
}

impl<E: Engine> EventLoop<E> {
    /// Begins a turn with those that the last one put off.
    pub(super) fn go_on(&mut self, now: Now) {
        self.turn.bytes = Default::default();
        for priority in 0..Priority::ALL.len() {
            for _ in 0..self.turn.next[priority].len() {
                let Some(id) = self.turn.next[priority].pop_front() else { break };
                self.with(now, id, |_, client| {
                    client.queued.next = false;
                    Ok(())
                });
            }
        }
    }

    /// Lets those go on that lack memory, and that have come to be the first to have it; all of them from time to time,
    /// since what a connection lacks may come back without a word.
    pub(super) fn serve_short(&mut self, now: Now, all: bool) {
        for _ in 0..self.turn.short.len() {
            let Some(id) = self.turn.short.pop_front() else { return };
            let Some(client) = self.clients.get_mut(&id) else { continue };
            if !client.memory.is_short() {
                client.queued.short = false;
            } else if all || client.memory.is_its_turn() {
                client.queued.short = false;
                self.with(now, id, |_, _| Ok(()));
            } else {
                self.turn.short.push_back(id);
            }
        }
    }

    /// Sends to each client what the turn has queued for it, in one piece: each send wakes the peer.
    pub(super) fn send_all(&mut self) {
        let mut ids = std::mem::take(&mut self.turn.send);
        for id in ids.drain(..) {
            let Some(client) = self.clients.get_mut(&id) else { continue };
            client.queued.send = false;
            if !client.closing {
                send(&mut self.engine, &mut self.turn, &mut self.spare, client);
            }
        }
        self.turn.send = ids;
    }

    /// Begins WRITEs that wait, as many as this turn and the memory have room for. True where any left the queue.
    pub(super) fn write_waiting(&mut self, now: Now, client: &mut Client) -> Result<bool, Disconnect> {
        let mut begun = false;
        while let Some(op) = client.writes_waiting.front() {
            let is_lost = client.closing && matches!(op.kind, FsOpKind::WriteRemote { .. });
            // What has been received is written, whatever becomes of the connection.
            if !client.closing && !self.turn.has_room(client) {
                break;
            }
            let Some(op) = client.writes_waiting.pop_front() else { break };
            if is_lost {
                client.write_bytes -= written_bytes(&op.kind);
                self.answer(now, client, op.id, Err(NtStatus::CONNECTION_DISCONNECTED))?;
            } else if let Some(op) = self.write(client, op)? {
                client.writes_waiting.push_front(op);
                break;
            }
            begun = true;
        }
        Ok(begun)
    }

    /// Answers READs that wait: their connection is gone. True where there were any.
    pub(super) fn give_up_reads(&mut self, now: Now, client: &mut Client) -> Result<bool, Disconnect> {
        let mut any = false;
        while let Some(op) = client.reads_waiting.pop_front() {
            any = true;
            self.answer(now, client, op.id, Err(NtStatus::CONNECTION_DISCONNECTED))?;
        }
        Ok(any)
    }
}

/// Sends what is queued, unless a send is in flight.
fn send(engine: &mut impl Engine, turn: &mut Turn, spare: &mut SpareParts, client: &mut Client) {
    let Link::Tcp(link) = &client.link else { return };
    // The kernel copies at the submission what is not copied yet.
    let copied = link.queue.next_mapped_bytes() > 0;
    if link.sending.is_some() || (copied && !turn.has_room(client)) {
        return;
    }
    let Link::Tcp(link) = &mut client.link else { return };
    let Some(message) = link.queue.take(spare) else { return };
    turn.count(client.priority, message.mapped_bytes());
    link.sending = Some(Instant::now());
    let operation = Operation::Send { socket: Arc::clone(&link.socket), message };
    engine.submit(client.token(Purpose::Send), operation);
}
