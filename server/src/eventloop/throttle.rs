//! Operations that wait because their volume has used up its limits (`qos`), or because its gate is closed (`gate`).
//!
//! Each volume has one line per event loop. Operations leave it in order of arrival, across connections.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_smb::engine::Disconnect;
use forebay_smb::fs::FsOp;
use forebay_smb::time::Now;

use super::EventLoop;
use super::client::Client;
use super::files::written_bytes;
use crate::backend;
use crate::gate::Gate;
use crate::io::Engine;
use crate::limits::GATE_POLL;
use crate::qos::Limiter;

/// A waiting operation and its connection.
struct Waiting {
    connection: u64,
    op: FsOp,
    bytes: u64,
}

/// The waiting operations of one volume. Never empty.
struct Line {
    limiter: Arc<Limiter>,
    /// Set if it holds changes because the volume's gate was closed.
    gate: Option<Arc<Gate>>,
    /// When the first operation may start.
    due: Instant,
    /// By number, in order of arrival.
    waiting: BTreeMap<u64, Waiting>,
}

/// All waiting operations of one event loop.
#[derive(Default)]
pub(super) struct Throttle {
    /// By the address of the limiter, which the line keeps alive.
    lines: HashMap<usize, Line>,
    /// The waiting operations of each connection (line and number), so that closing it costs no more than what it has.
    of_connections: HashMap<u64, BTreeSet<(usize, u64)>>,
    /// The number of the next waiting operation.
    next: u64,
    /// When the first line is due.
    due: Option<Instant>,
}

impl Throttle {
    /// How long the loop may wait for events, at most `longest`.
    pub(super) fn time_max(&self, longest: Duration) -> Duration {
        self.due.map_or(longest, |due| due.saturating_duration_since(Instant::now()).min(longest))
    }

    /// Returns an operation of `bytes` if it may start now, and keeps it otherwise.
    fn admit(&mut self, limiter: &Arc<Limiter>, bytes: u64, connection: u64, op: FsOp) -> Option<FsOp> {
        let key = Arc::as_ptr(limiter).addr();
        let line = match self.lines.entry(key) {
            Entry::Occupied(line) => line.into_mut(),
            Entry::Vacant(place) => {
                let Err(due) = limiter.begin(Instant::now(), bytes) else { return Some(op) };
                self.due = Some(self.due.map_or(due, |first| first.min(due)));
                place.insert(Line { limiter: Arc::clone(limiter), gate: None, due, waiting: BTreeMap::new() })
            }
        };
        line.waiting.insert(self.next, Waiting { connection, op, bytes });
        self.of_connections.entry(connection).or_default().insert((key, self.next));
        self.next += 1;
        None
    }

    /// Keeps a change until the gate of its volume opens. Its limits have already admitted it.
    fn hold(&mut self, limiter: &Arc<Limiter>, gate: &Arc<Gate>, connection: u64, op: FsOp) {
        let key = Arc::as_ptr(limiter).addr();
        let due = Instant::now() + GATE_POLL;
        let line = self.lines.entry(key).or_insert_with(|| Line {
            limiter: Arc::clone(limiter),
            gate: None,
            due,
            waiting: BTreeMap::new(),
        });
        line.gate = Some(Arc::clone(gate));
        line.due = line.due.min(due);
        line.waiting.insert(self.next, Waiting { connection, op, bytes: 0 });
        self.of_connections.entry(connection).or_default().insert((key, self.next));
        self.next += 1;
        self.find_due();
    }

    /// Removes the operations that may start now. `ask_all` also checks lines that are not due: their limits may have been
    /// raised. `regardless` ignores all limits.
    fn take_due(&mut self, now: Instant, ask_all: bool, regardless: bool) -> Vec<Waiting> {
        let mut taken = Vec::new();
        if !ask_all && !regardless && self.due.is_none_or(|due| due > now) {
            return taken;
        }
        let of_connections = &mut self.of_connections;
        self.lines.retain(|key, line| {
            if !ask_all && !regardless && line.due > now {
                return true;
            }
            // Nothing continues before the gate opens, not even during shutdown: it would be returned immediately.
            if line.gate.as_ref().is_some_and(|gate| gate.is_closed()) {
                line.due = now + GATE_POLL;
                return true;
            }
            while let Some(first) = line.waiting.first_entry() {
                if !regardless && let Err(due) = line.limiter.begin(now, first.get().bytes) {
                    line.due = due;
                    return true;
                }
                let (number, waiting) = first.remove_entry();
                if let Entry::Occupied(mut of_it) = of_connections.entry(waiting.connection) {
                    of_it.get_mut().remove(&(*key, number));
                    if of_it.get().is_empty() {
                        of_it.remove();
                    }
                }
                taken.push(waiting);
            }
            false
        });
        self.find_due();
        taken
    }

    /// Removes the operations of a connection.
    fn take_of(&mut self, connection: u64) -> Vec<FsOp> {
        let Some(of_it) = self.of_connections.remove(&connection) else { return Vec::new() };
        let mut taken = Vec::new();
        for (key, number) in of_it {
            let Entry::Occupied(mut line) = self.lines.entry(key) else { continue };
            taken.extend(line.get_mut().waiting.remove(&number).map(|waiting| waiting.op));
            if line.get().waiting.is_empty() {
                line.remove();
            }
        }
        self.find_due();
        taken
    }

    fn find_due(&mut self) {
        self.due = self.lines.values().map(|line| line.due).min();
    }
}

impl<E: Engine> EventLoop<E> {
    /// Returns an operation if the limits of its volume admit it now. Otherwise it waits and starts later.
    pub(super) fn within_limits(&mut self, client: &mut Client, op: FsOp) -> Option<FsOp> {
        let Some((limiter, bytes)) = backend::demand(&op.kind) else { return Some(op) };
        client.priority = limiter.priority();
        // Limits delay neither the end of a connection nor the shutdown of the server.
        if !limiter.is_limited() || client.closing || self.draining.is_some() {
            return Some(op);
        }
        let (limiter, written) = (Arc::clone(limiter), written_bytes(&op.kind));
        let admitted = self.throttle.admit(&limiter, bytes, client.id.0, op);
        if admitted.is_none() {
            self.shared.metrics.throttled.inc();
            limiter.throttle();
            client.ops += 1;
            client.write_bytes += written;
        }
        admitted
    }

    /// Keeps a change while the gate of its volume is closed; it starts later.
    pub(super) fn hold(&mut self, client: &mut Client, op: FsOp) {
        let kind = &op.kind;
        let (Some(limiter), Some(gate)) = (backend::limiter(kind).cloned(), backend::gate(kind).cloned())
        else {
            unreachable!("only what goes through a gate is held by it")
        };
        client.ops += 1;
        client.write_bytes += written_bytes(kind);
        self.throttle.hold(&limiter, &gate, client.id.0, op);
    }

    /// Starts operations that have waited long enough.
    pub(super) fn go_on_throttled(&mut self, now: Now, ticks: bool) {
        for Waiting { connection, op, .. } in
            self.throttle.take_due(Instant::now(), ticks, self.draining.is_some())
        {
            self.with(now, connection, |this, client| this.begin_throttled(now, client, op));
        }
    }

    /// Starts the waiting operations of a closing connection: received data are written, everything else is answered.
    pub(super) fn give_up_throttled(&mut self, now: Now, client: &mut Client) {
        for op in self.throttle.take_of(client.id.0) {
            // Nothing is sent any more, so a protocol violation is no longer possible.
            let _ = self.begin_throttled(now, client, op);
        }
    }

    fn begin_throttled(&mut self, now: Now, client: &mut Client, op: FsOp) -> Result<(), Disconnect> {
        client.ops -= 1;
        client.write_bytes -= written_bytes(&op.kind);
        self.begin_admitted(now, client, op)
    }
}

#[cfg(test)]
mod tests {
    use forebay_smb::fs::{FsHandle, FsOpKind, OpId};

    use super::*;
    use crate::qos::{Priority, Qos};

    const MIB: u64 = 1 << 20;

    fn limiter(bytes_per_second: u64) -> Arc<Limiter> {
        let limiter = Arc::new(Limiter::default());
        limiter.set(&Qos { bytes_per_second, operations_per_second: 0, priority: Priority::Normal });
        limiter
    }

    fn op(id: u64) -> FsOp {
        FsOp { id: OpId(id), kind: FsOpKind::Flush { handle: FsHandle(Arc::new(())) } }
    }

    fn ids(taken: &[Waiting]) -> Vec<u64> {
        taken.iter().map(|waiting| waiting.op.id.0).collect()
    }

    #[test]
    fn throttled_volumes_keep_their_order_and_do_not_delay_each_other() {
        let mut throttle = Throttle::default();
        let (slow, fast) = (limiter(MIB), limiter(1 << 40));
        let start = Instant::now();
        assert!(throttle.admit(&slow, 4 * MIB, 1, op(1)).is_some());
        assert!(throttle.due.is_none());
        for (connection, id) in [(1, 2), (2, 3), (1, 4)] {
            assert!(throttle.admit(&slow, MIB, connection, op(id)).is_none());
        }
        assert!(throttle.admit(&fast, MIB, 1, op(5)).is_some());
        assert!(throttle.time_max(Duration::from_secs(60)) > Duration::from_secs(3));
        assert!(throttle.take_due(start, true, false).is_empty());
        assert_eq!(ids(&throttle.take_due(start + Duration::from_secs(5), false, false)), [2]);
        assert_eq!(ids(&throttle.take_due(start + Duration::from_secs(6), false, false)), [3]);
        assert_eq!(throttle.take_of(2).len(), 0);
        assert_eq!(throttle.take_of(1).len(), 1);
        assert!(throttle.due.is_none() && throttle.lines.is_empty() && throttle.of_connections.is_empty());
    }

    #[test]
    fn changes_held_by_a_gate_are_released_only_when_it_opens() {
        let mut throttle = Throttle::default();
        let (unlimited, gate) = (Arc::new(Limiter::default()), Arc::new(Gate::default()));
        let closed = gate.close(Duration::ZERO).expect("nothing is under way");
        throttle.hold(&unlimited, &gate, 1, op(1));
        throttle.hold(&unlimited, &gate, 2, op(2));
        assert!(throttle.time_max(Duration::from_secs(60)) <= GATE_POLL);
        let now = Instant::now() + GATE_POLL;
        assert!(throttle.take_due(now, true, true).is_empty());
        drop(closed);
        assert!(throttle.take_due(now, false, false).is_empty(), "asked again when it is due");
        assert_eq!(ids(&throttle.take_due(now + GATE_POLL, false, false)), [1, 2]);
        assert!(throttle.due.is_none() && throttle.lines.is_empty() && throttle.of_connections.is_empty());
    }

    #[test]
    fn raised_limit_and_shutdown_release_throttled_operations() {
        let mut throttle = Throttle::default();
        let slow = limiter(MIB);
        let now = Instant::now();
        assert!(throttle.admit(&slow, 100 * MIB, 1, op(1)).is_some());
        assert!(throttle.admit(&slow, MIB, 1, op(2)).is_none());
        slow.set(&Qos::default());
        assert_eq!(ids(&throttle.take_due(now, true, false)), [2], "a tick asks again");
        slow.set(&Qos { bytes_per_second: MIB, ..Qos::default() });
        assert!(throttle.admit(&slow, 100 * MIB, 1, op(3)).is_some());
        assert!(throttle.admit(&slow, MIB, 1, op(4)).is_none());
        assert!(throttle.admit(&slow, MIB, 2, op(5)).is_none());
        assert_eq!(ids(&throttle.take_due(now, false, true)), [4, 5]);
        assert!(throttle.due.is_none() && throttle.of_connections.is_empty());
    }
}
