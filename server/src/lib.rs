//! The Forebay server: SMB volumes on local file systems.
//!
//! The protocol is [`forebay_smb`], which does no I/O; here are the event loops and transports that feed it, the file
//! systems behind its volumes, their records and quotas, and the daemon's configuration, administration and metrics.

pub mod backend;
pub mod buffers;
pub mod clock;
pub mod io;
pub mod limits;
