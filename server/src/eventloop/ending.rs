//! Ends connections: queued data are dropped, operations in flight complete, open files are closed.

use std::sync::atomic::Ordering;
use std::time::Instant;

use forebay_smb::engine::Disconnect;
use forebay_smb::status::NtStatus;
use forebay_smb::time::Now;
use tracing::{debug, info};

use super::EventLoop;
use super::client::{Client, Link};
use super::files::written_bytes;
use crate::io::Engine;
use crate::limits::FAREWELL_TIME_MAX;

impl<E: Engine> EventLoop<E> {
    pub(super) fn is_over(&self, client: &Client) -> bool {
        client.protocol.is_finished()
            && client.leaving.is_none()
            && client.ops == 0
            && !client.lanes.is_waiting()
            && client.link.is_idle()
    }

    pub(super) fn removed(&mut self, client: &Client) {
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

    /// Ends a connection: operations in flight complete first, then its open files are closed.
    pub(super) fn close(&mut self, now: Now, client: &mut Client, reason: &'static str) {
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
        // Nothing is sent any more, so a protocol violation is no longer possible.
        let _ = self.drain_effects(now, client);
    }

    /// Drops queued data and ends a receive in flight.
    pub(super) fn hang_up(&mut self, now: Now, client: &mut Client) {
        let lost = match &mut client.link {
            Link::Tcp(link) => {
                link.queue.clear();
                // It fails if the peer has already closed the connection.
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
            // The connection is gone, so a protocol violation is no longer possible.
            let _ = self.answer(now, client, op, Err(NtStatus::CONNECTION_DISCONNECTED));
        }
    }

    /// Ends a connection after all its requests were answered, so that the answers arrive: unanswered requests were not executed
    /// either, and the client repeats them on its next connection. An immediate close would reset the connection if bytes are
    /// unread, and a reset overtakes data that were sent before it.
    pub(super) fn take_leave(&mut self, now: Now, client: &mut Client) -> Result<(), Disconnect> {
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
}
