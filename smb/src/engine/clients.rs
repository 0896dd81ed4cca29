//! Access to the clients of a server, for the state of files and directories.

use std::sync::Arc;
use std::time::Instant;

use crate::engine::mail::{ConnectionId, Mail};

/// Access to the clients of a server.
pub(crate) trait Clients {
    /// Hands mail to the event loop of a connection.
    fn post(&self, to: ConnectionId, what: Mail);

    /// The channels of a session, oldest first; none once it has ended.
    fn channels(&self, session_id: u64) -> Vec<ConnectionId>;

    /// The sessions of a client on a volume, oldest first.
    fn sessions_of_client(&self, client: [u8; 16], volume: &str) -> Vec<u64>;

    /// Calls `file` once a second, and when a channel is lost, while it has a break that awaits acknowledgment.
    fn watch(&self, file: Arc<dyn Breakable>);
}

/// A file with breaks that await acknowledgment, or directories with breaks that wait for a backend.
pub(crate) trait Breakable: Send + Sync {
    /// True while a break waits.
    fn tick(&self, now: Instant, clients: &dyn Clients) -> bool;

    /// Handles the loss of a connection on which a break may have been sent.
    fn channel_lost(&self, connection: ConnectionId, clients: &dyn Clients);
}

impl<T: Clients + ?Sized> Clients for Arc<T> {
    fn post(&self, to: ConnectionId, what: Mail) {
        (**self).post(to, what);
    }

    fn channels(&self, session_id: u64) -> Vec<ConnectionId> {
        (**self).channels(session_id)
    }

    fn sessions_of_client(&self, client: [u8; 16], volume: &str) -> Vec<u64> {
        (**self).sessions_of_client(client, volume)
    }

    fn watch(&self, file: Arc<dyn Breakable>) {
        (**self).watch(file);
    }
}
