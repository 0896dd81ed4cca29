//! The SMB 3.1.1 protocol core, pure: no I/O, no clock, no randomness, no runtime.
//!
//! * [`wire`]: every message of [MS-SMB2] and the information classes of [MS-FSCC], as checked views of bytes.
//! * [`crypto`]: key derivation, signing, sealing, preauthentication integrity.
//! * [`auth`]: SPNEGO, NTLMv2 and Kerberos.
//! * [`descriptor`]: security descriptors stored with files.
//! * [`short_name`]: 8.3 names.
//! * [`ids`], [`status`]: identifiers and results that all modules use.
//! * [`time`]: the current time, read from the caller's clocks.
//! * [`engine`]: the server side as state machines.
//! * [`rpc`]: remote procedure calls over named pipes, for listing the shares.
//! * [`fs`]: the contract with file-system backends; [`limits`]: every limit by name.
//!
//! Payload never enters this crate: READ and WRITE data stay in the transport's buffers.
//!
//! # Example
//!
//! A transport passes frames to a [`Connection`](engine::Connection) and sends the frames that it returns:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Instant;
//!
//! use forebay_smb::engine::{Connection, ConnectionId, Encryption, Server, ServerConfig};
//! use forebay_smb::fs::Frame;
//! use forebay_smb::time::Now;
//! use forebay_smb::wire::{Capabilities, Command, Dialect, FileTime, Header, SecurityMode, negotiate};
//!
//! struct Received(Vec<u8>);
//!
//! impl Frame for Received {
//!     fn bytes(&self) -> &[u8] {
//!         &self.0
//!     }
//! }
//!
//! let server = Server::new(ServerConfig {
//!     guid: [7; 16],
//!     server_name: "FOREBAY".to_owned(),
//!     started: 0,
//!     min_dialect: Dialect::SMB2_1,
//!     target_names: Vec::new(),
//!     ntlm: true,
//!     kerberos: None,
//!     signing_required: false,
//!     encryption: Encryption::Offered,
//!     instance: 1,
//!     predecessors: Vec::new(),
//!     io_bytes_max: 8 << 20,
//!     caching: true,
//!     directory_leases: false,
//! });
//! // A real transport has a random number generator fit for keys here.
//! let entropy = Box::new(|bytes: &mut [u8]| bytes.fill(4));
//! let mut connection = Connection::new(server, ConnectionId(1), "a client".to_owned(), entropy);
//!
//! let mut frame = Vec::new();
//! Header::request(Command::NEGOTIATE, 0).encode(&mut frame);
//! negotiate::Request {
//!     security_mode: SecurityMode::SIGNING_ENABLED,
//!     capabilities: Capabilities::LARGE_MTU,
//!     client_guid: [3; 16],
//!     client_start_time: FileTime(0),
//!     dialects: vec![Dialect::SMB2_1, Dialect::SMB3_0_2],
//!     contexts: Vec::new(),
//! }
//! .encode(&mut frame);
//! let now = Now { instant: Instant::now(), wall: FileTime(0) };
//! connection.handle(now, Arc::new(Received(frame)), None)?;
//!
//! let transmit = connection.poll_transmit().expect("a response");
//! let response: Vec<u8> = transmit.segments.iter().flat_map(|part| part.bytes().to_vec()).collect();
//! assert_eq!(negotiate::Response::parse(&response)?.dialect_revision, Dialect::SMB3_0_2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod auth;
pub mod crypto;
pub mod descriptor;
pub mod engine;
pub mod fs;
pub mod ids;
pub mod limits;
mod remote;
pub mod rpc;
pub mod short_name;
pub mod status;
mod sync;
pub mod time;
pub mod wire;
