//! Messages from other threads to event loops, and their delivery.

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

/// A message from another thread to a loop.
pub enum Note {
    /// A connection that was accepted.
    Accepted(Arrival, SocketAddr),
    /// The answer from a lane.
    Answered(ConnectionId, Lane, OpId, FsResult),
    /// A change that a lane returns because the gate of its volume is closed.
    Held(ConnectionId, Lane, FsOp),
    /// The file of a READ is prepared for direct reads, and the READ can continue.
    Prepared(ConnectionId, FsOp),
    /// Mail from another connection or an administrator.
    Mail(ConnectionId, Mail),
    /// Accept no more requests, finish those in flight by this time, then stop.
    Drain(Instant),
}

/// A new connection, by transport.
#[derive(Debug)]
pub enum Arrival {
    /// Over TCP.
    Socket(OwnedFd),
    /// Over RDMA; not accepted yet.
    Rdma(forebay_rdma::Incoming),
}

/// The inbox of a loop, for other threads.
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
    /// Creates the inbox of a loop; `waker` wakes its engine.
    #[must_use]
    pub fn new(waker: Waker) -> Self {
        Self { notes: Arc::default(), waker, connections: Arc::default() }
    }

    /// Returns the waker of the loop.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Queues a note.
    pub fn post(&self, note: Note) {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let first = notes.is_empty();
        notes.push(note);
        drop(notes);
        // The thread that finds the inbox empty wakes the loop, which takes all notes.
        if first {
            self.waker.wake();
        }
    }

    pub(super) fn take(&self) -> Vec<Note> {
        std::mem::take(&mut *self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The inboxes of all loops, for other threads.
#[derive(Clone, Debug)]
pub struct Loops(pub(super) Arc<[Inbox]>);

impl Loops {
    /// Creates the list from the inboxes, in the order of the loops' indices.
    #[must_use]
    pub fn new(inboxes: Vec<Inbox>) -> Self {
        Self(inboxes.into())
    }

    /// Number of connections of all loops.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.iter().map(|inbox| inbox.connections.load(Ordering::Relaxed)).sum()
    }

    /// Assigns a connection to the loop with the fewest. Returns false, and closes the connection, if there are too many.
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

    /// Delivers mail of the protocol to other connections.
    pub fn route(&self, server: &Server) {
        for (id, mail) in server.take_mail() {
            self.0[self.index_of(id)].post(Note::Mail(id, mail));
        }
    }

    /// Makes every loop finish.
    pub fn drain(&self, until: Instant) {
        for inbox in self.0.iter() {
            inbox.post(Note::Drain(until));
        }
    }

    fn index_of(&self, id: ConnectionId) -> usize {
        (id.0 % self.0.len() as u64) as usize
    }
}
