//! The Forebay server: SMB volumes on local file systems.
//!
//! The protocol is [`forebay_smb`], which does no I/O; here are the event loops and transports that feed it, the file
//! systems behind its volumes, their records and quotas, and the daemon's configuration, administration and metrics.

pub mod address;
pub mod admin;
pub mod advertise;
pub mod backend;
pub mod buffers;
pub mod catalog;
pub mod check;
pub mod cli;
pub mod clock;
pub mod config;
pub mod daemon;
pub mod eventloop;
pub mod gate;
pub mod health;
pub mod http;
pub mod interfaces;
pub mod io;
pub mod keytab;
pub mod lanes;
pub mod life;
pub mod limits;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod namespace;
pub mod pool;
pub mod qos;
pub mod rdma;
#[cfg(test)]
mod scratch_disk;
mod slots;
pub mod snapshot;
mod starts;
pub mod tls;
pub mod transport;
pub mod volume;
