//! The SMB 3.1.1 protocol core, pure: no I/O, no clock, no randomness, no runtime.
//!
//! * [`wire`]: every message of [MS-SMB2] and the information classes of [MS-FSCC], as checked views of bytes.
//! * [`crypto`]: key derivation, signing, sealing, preauthentication integrity.
//! * [`auth`]: SPNEGO and the NTLMv2 acceptor.
//! * [`descriptor`]: security descriptors that files keep.
//! * [`ids`], [`status`]: identifiers and results that all of them name.
//! * [`time`]: the present, as the caller's clocks say it.
//! * [`engine`]: the server side as state machines.
//! * [`rpc`]: remote procedure calls over named pipes, which list what is shared.
//! * [`fs`]: the contract with file-system backends; [`limits`]: every limit by name.
//!
//! Payload never enters this crate: READ and WRITE data stay in the transport's buffers.

pub mod auth;
pub mod crypto;
pub mod descriptor;
pub mod engine;
pub mod fs;
pub mod ids;
pub mod limits;
mod remote;
pub mod rpc;
pub mod status;
mod sync;
pub mod time;
pub mod wire;
