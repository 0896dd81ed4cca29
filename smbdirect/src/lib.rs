//! The SMB Direct protocol ([MS-SMBD]) as a state machine, pure: no I/O, no clock, no randomness, no runtime.
//!
//! * [`wire`]: the messages, and the descriptors of a peer's memory.
//! * [`Connection`]: negotiation, credits both ways, fragments, keep-alive, for the connecting and the accepting side.
//! * [`Config`]: what a side supports and requests; [`limits`]: every limit by name.
//!
//! Payload never enters this crate. The transport owns registered buffers and identifies them by [`BufferId`]; data to send
//! and received data are passed as [`Segment`]s of them.
//!
//! # How a transport drives it
//!
//! ```text
//! ibv_post_recv × config.receive_buffers()  ─► receives_posted(n)     before rdma_connect or rdma_accept
//! RDMA_CM_EVENT_ESTABLISHED                 ─► handle_established()   can follow the first receive
//! completion of a receive                   ─► handle_receive(now, buffer, bytes, invalidated)
//!                                                Free:    post it again, receives_posted(1)
//!                                                Held:    leave it alone
//!                                                Message: to the upper layer; its buffers are free once it is processed
//! upper layer has a message                 ─► send(id, segments, invalidate)
//! after each of these                       ─► while poll_transmit(now): header, then segments, one ibv_post_send
//! completion of a send                      ─► handle_sent(n); the buffers of the message in `completes` are free
//! poll_timeout() has passed                 ─► handle_timeout(now)
//! an error completion, DISCONNECTED         ─► handle_lost()
//! Err(Disconnect) from any of these         ─► rdma_disconnect; drain_held(), drain_unsent() return what is outstanding
//! ```
//!
//! The transport must keep two promises so that a connection never stalls: it returns the receive buffers of a delivered
//! message without waiting for a send on the same connection, and it reports every receive to `receives_posted` once it is
//! posted.
//! In steady state nothing is allocated.
//!
//! # Example
//!
//! A client and a server negotiate; each message would be one send of the device:
//!
//! ```
//! use std::time::Instant;
//!
//! use forebay_smbdirect::{BufferId, Config, Connection};
//!
//! let now = Instant::now();
//! let mut client = Connection::new(Config::active(), now)?;
//! let mut server = Connection::new(Config::passive(), now)?;
//! for connection in [&mut client, &mut server] {
//!     connection.receives_posted(32);
//!     connection.handle_established();
//! }
//! let request = client.poll_transmit(now).expect("NEGOTIATE").header().to_vec();
//! server.handle_receive(now, BufferId(0), &request, None)?;
//! let response = server.poll_transmit(now).expect("its answer").header().to_vec();
//! client.handle_receive(now, BufferId(0), &response, None)?;
//! // Each may send as many messages as the other has granted.
//! assert!(client.credits().send > 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
mod connection;
mod credits;
mod disconnect;
pub mod limits;
mod outbound;
mod reassembly;
mod timers;
pub mod wire;

pub use config::{Config, InvalidConfig, Role};
pub use connection::{Connection, Parameters, Received};
pub use credits::Credits;
pub use disconnect::{Disconnect, Incompatibility, Misbehaviour, Timeout};
pub use outbound::{MessageId, SendError, Transmit};
pub use reassembly::Message;

/// A registered buffer, numbered by the transport. Buffers for sending and for receiving need not be distinguished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(pub u32);

/// A piece of a registered buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The buffer.
    pub buffer: BufferId,
    /// Offset from its start, in bytes.
    pub start: u32,
    /// Length in bytes.
    pub length: u32,
}
