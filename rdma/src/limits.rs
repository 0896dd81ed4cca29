//! Every limit that a peer can push against, by name. Units last in names.

/// Memory of all payload buffers, in use and pooled.
pub const BUFFER_BYTES_MAX: usize = 4 << 30;
/// Payload buffers that stay pooled when nobody uses them.
pub const BUFFER_POOLED_BYTES_MAX: usize = 64 << 20;
