//! The server side of the protocol as state machines without I/O.
//!
//! A [`Server`] holds what outlives connections: volumes, accounts, sessions, opens, share modes and byte-range locks.
//! A [`Connection`] turns frames into effects and completions into responses:
//!
//! ```text
//! frame ─► Connection::unseal ─► handle ─► FsOps ─► (event loop, backend) ─► complete ─► Transmit
//! ```
//!
//! Time ([`crate::time::Now`]) and randomness are parameters, so a whole conversation runs in a unit test.
//! What one connection must tell another (a lock that became free, a session that was closed) travels as [`Mail`].

mod access;
mod chain;
mod channel;
mod channel_sequence;
mod channels;
mod commands;
mod connection;
mod core;
mod credits;
mod durable;
mod file_table;
mod files;
mod holder;
mod intervals;
mod leases;
mod links;
mod locks;
mod lookup;
mod lost;
mod mailbox;
mod names;
mod open;
mod oplocks;
mod paths;
mod remote;
mod replay;
mod reports;
mod server;
mod session;
mod share;
mod step;
mod tally;
mod transform;
mod volume;
mod watches;

pub use connection::{Connection, Disconnect, Entropy, Event, Held, Sealer, Segment, Transmit, Unsealed};
pub use file_table::Unlink;
pub use open::OpenInfo;
pub use remote::{RemoteBuffer, RemoteWrite};
pub use server::{
    BreakNotice, ConnectionId, Encryption, InUse, Mail, NetworkInterface, Predecessor, Server, ServerConfig,
    SessionInfo,
};
pub use transform::RemoteProof;
pub use volume::{Account, Protection, VolumeConfig};
