//! The server side of the protocol as state machines without I/O.
//!
//! A [`Server`] holds the state that outlives connections: volumes, accounts, sessions, opens, share modes and byte-range
//! locks.
//! A [`Connection`] turns frames into effects and completions into responses:
//!
//! ```text
//! frame ─► Connection::unseal ─► handle ─► FsOps ─► (event loop, backend) ─► complete ─► Transmit
//! ```
//!
//! Time ([`crate::time::Now`]) and randomness are parameters, so a whole conversation runs in a unit test.
//! Events of one connection that affect another (a lock that became free, a session that was closed) are sent as [`Mail`].
//!
//! The files are layered: each imports only lower layers or its own folder (smb/tests/layers.rs has the list).

#![allow(clippy::result_large_err, reason = "a Step is as large where it is no error")]

mod access;
mod activity;
mod app_instances;
mod change_times;
mod channel_sequence;
mod channels;
mod clients;
mod commands;
mod config;
mod connection;
mod creations;
mod credits;
mod durable;
mod file;
mod kept_opens;
mod lookup;
mod lost;
mod mail;
mod mailbox;
mod names;
mod open;
mod open_end;
mod pending_auth;
mod pipe;
mod replay;
mod reports;
mod request;
mod server;
mod session;
mod tally;
mod transforms;
mod volume;
mod watches;

pub use self::activity::{Activity, Done, Work};
pub use self::config::{Encryption, NetworkInterface, Predecessor, ServerConfig};
pub use self::connection::{Connection, Held, Sealer, Transmit, Unsealed};
pub use self::mail::{BreakNotice, ConnectionId, Mail};
pub use self::open::OpenInfo;
pub use self::reports::{Disconnect, Event};
pub use self::request::chain::{Segment, Segments};
pub use self::request::core::Entropy;
pub use self::request::step::RemoteWrite;
pub use self::server::{Server, SessionInfo, VolumeUse};
pub use self::volume::{Account, InUse, Protection, SnapshotConfig, VolumeConfig};
pub use crate::fs::Unlink;
pub use crate::remote::{RemoteBuffer, RemoteProof};
