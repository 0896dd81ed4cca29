//! Preauthentication integrity: a SHA-512 chain over the messages that precede the keys (SMB 3.1.1).

use aws_lc_rs::digest;

/// `PreauthIntegrityHashValue`: starts as zeros, then H = SHA-512(H || message) for each message in order
/// ([MS-SMB2] 3.3.5.4, 3.3.5.5). Not a secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PreauthHash([u8; 64]);

impl PreauthHash {
    /// The value before the first message.
    pub const fn new() -> Self {
        PreauthHash([0; 64])
    }

    /// Adds one complete message, from its SMB2 header to its end, without transport framing.
    pub fn update(&mut self, message: &[u8]) {
        self.update_parts(&[message]);
    }

    /// Adds one complete message that consists of several pieces.
    pub fn update_parts(&mut self, message: &[&[u8]]) {
        let mut ctx = digest::Context::new(&digest::SHA512);
        ctx.update(&self.0);
        for part in message {
            ctx.update(part);
        }
        self.0.copy_from_slice(ctx.finish().as_ref());
    }

    /// The current value.
    pub fn as_bytes(&self) -> &[u8; 64] {
        &self.0
    }
}

impl Default for PreauthHash {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for PreauthHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PreauthHash({:02x}{:02x}{:02x}{:02x}..)", self.0[0], self.0[1], self.0[2], self.0[3])
    }
}
