//! Every limit that a peer can run into, by name. Names end with the unit.

/// Memory of all payload buffers of a pool with its own budget.
pub const BUFFER_BYTES_MAX: usize = 4 << 30;
/// Memory that every connection can have regardless of others: enough to receive a request without payload, and to answer it.
pub const ACCOUNT_RESERVE_BYTES: usize = 128 << 10;
