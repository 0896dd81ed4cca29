//! One turn of an event loop: the share of each connection, and the connections that continue in the next turn.
//!
//! The kernel copies cached data while operations are submitted, and nothing is sent before all of them are submitted. A turn
//! therefore starts a limited number of bytes of READs and WRITEs of each priority (`qos::Priority`). Connections with more work
//! continue in the next turn, high priority first, then in the order in which they were deferred. Connections that lack memory
//! continue when they are first in line for it.

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

/// The lists that a client is in.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queued {
    /// It continues in the next turn.
    next: bool,
    /// It lacks memory.
    short: bool,
    /// It may have something to send.
    send: bool,
}

/// The current turn.
pub(super) struct Turn {
    /// Bytes started in each priority.
    bytes: [u64; Priority::ALL.len()],
    /// Connections that continue in the next turn, by priority.
    next: [VecDeque<u64>; Priority::ALL.len()],
    /// Clients that lack memory.
    short: VecDeque<u64>,
    /// Clients that may have something to send.
    send: Vec<u64>,
    wake: Wake,
    trimmed: Instant,
}

impl Turn {
    /// Creates the turn of the loop that `waker` wakes.
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

    /// Returns the function that wakes the loop.
    pub(super) fn wake(&self) -> Wake {
        Arc::clone(&self.wake)
    }

    /// How long the loop may wait for events, at most `longest`.
    pub(super) fn time_max(&self, longest: Duration) -> Duration {
        if self.next.iter().all(VecDeque::is_empty) { longest } else { Duration::ZERO }
    }

    /// Counts a started READ or WRITE of `bytes` bytes for a volume of this priority.
    pub(super) fn count(&mut self, priority: Priority, bytes: usize) {
        self.bytes[priority as usize] += bytes as u64;
    }

    /// Whether the client may start a READ or WRITE in this turn. If not, it continues in the next.
    pub(super) fn has_room(&mut self, client: &mut Client) -> bool {
        let has_room = self.bytes[client.priority as usize] < client.priority.turn_bytes_max();
        if !has_room && !std::mem::replace(&mut client.queued.next, true) {
            self.next[client.priority as usize].push_back(client.id.0);
        }
        has_room
    }

    /// Records a client that lacks memory.
    pub(super) fn note_short(&mut self, client: &mut Client, metrics: &Metrics) {
        if client.memory.is_short() && !std::mem::replace(&mut client.queued.short, true) {
            metrics.memory_waits.inc();
            self.short.push_back(client.id.0);
        }
    }

    /// Records a client that may have something to send.
    pub(super) fn note_send(&mut self, client: &mut Client) {
        if !std::mem::replace(&mut client.queued.send, true) {
            self.send.push(client.id.0);
        }
    }

    /// Whether it is time to return unused memory to the kernel.
    pub(super) fn is_time_to_trim(&mut self) -> bool {
        let is_time = self.trimmed.elapsed() >= TRIM_INTERVAL;
        if is_time {
            self.trimmed = Instant::now();
        }
        is_time
    }
}

impl<E: Engine> EventLoop<E> {
    /// Starts a turn with the clients that the last turn deferred.
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

    /// Continues clients that lacked memory and are now first in line for it. With `all`, which is set from time to time,
    /// continues all of them, since memory can become available without a notification.
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

    /// Sends everything that the turn has queued for a client in one piece: each send wakes the peer.
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

    /// Starts as many waiting WRITEs as this turn and the memory allow. Returns true if any left the queue.
    pub(super) fn write_waiting(&mut self, now: Now, client: &mut Client) -> Result<bool, Disconnect> {
        let mut begun = false;
        while let Some(op) = client.writes_waiting.front() {
            let is_lost = client.closing && matches!(op.kind, FsOpKind::WriteRemote { .. });
            // Received data are written even if the connection is gone.
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

    /// Answers the waiting READs of a closed connection. Returns true if there were any.
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
    // At submission, the kernel copies data that are not copied yet.
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
