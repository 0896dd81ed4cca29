//! Every limit that a peer can push against, by name. Units last in names.

/// Memory of all payload buffers of a pool that has a budget of its own.
pub const BUFFER_BYTES_MAX: usize = 4 << 30;
/// Memory that every connection can have whatever others have: what it needs to receive a request that carries no
/// payload, and to be answered.
pub const ACCOUNT_RESERVE_BYTES: usize = 128 << 10;
