//! What comes to event loops from other threads, and the way there.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use forebay_smb::engine::{ConnectionId, Mail, Server};
use forebay_smb::fs::{FsOp, FsResult, OpId};

use crate::io::Waker;
use crate::lanes::Lane;
use crate::limits::CONNECTIONS_MAX;
use crate::metrics::Metrics;

/// What comes to a loop from other threads.
pub enum Note {
    /// A connection that was accepted.
    Accepted(Arrival, SocketAddr),
    /// The answer from a lane.
    Answered(ConnectionId, Lane, OpId, FsResult),
    /// A lane gives back a change that the gate of its volume did not let through.
    Held(ConnectionId, Lane, FsOp),
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
    pub(super) connections: Arc<AtomicUsize>,
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
        // The thread that finds the inbox empty wakes the loop, which takes all that is there.
        if first {
            self.waker.wake();
        }
    }

    pub(super) fn take(&self) -> Vec<Note> {
        std::mem::take(&mut *self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// All loops, as other threads see them.
#[derive(Clone, Debug)]
pub struct Loops(pub(super) Arc<[Inbox]>);

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
