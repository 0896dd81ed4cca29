//! Nonces that cannot repeat under one key.

/// A sequence of nonces for one sealing key.
///
/// All channels of a session seal with the same key ([MS-SMB2] 3.3.4.1.4), and a repeated GCM nonce reveals the
/// authentication key. Therefore each channel has its own sequence, with a `channel` number that no other sequence under the
/// same key has; the counter distinguishes the nonces of one sequence. Channels share no state on the hot path.
#[derive(Debug)]
pub struct NonceSequence {
    channel: [u8; 3],
    next: Option<u64>,
}

impl NonceSequence {
    /// Creates a sequence with a counter that starts at `start`. A random start (for example anywhere in the lower half)
    /// makes nonces hard to predict; uniqueness does not depend on it.
    pub fn new(channel: [u8; 3], start: u64) -> Self {
        NonceSequence { channel, next: Some(start) }
    }

    /// The next nonce. After the counter's last value the key is used up: a new session is required.
    pub fn next_nonce(&mut self) -> Result<Nonce, NonceExhausted> {
        let counter = self.next.ok_or(NonceExhausted)?;
        self.next = counter.checked_add(1);
        // CCM takes 11 bytes; GCM's twelfth stays zero. [MS-SMB2] 2.2.41
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&counter.to_le_bytes());
        bytes[8..11].copy_from_slice(&self.channel);
        Ok(Nonce(bytes))
    }
}

/// One nonce, for one message: it can be neither copied nor cloned, and sealing consumes it.
#[derive(Debug)]
pub struct Nonce(pub(super) [u8; 16]);

/// A [`NonceSequence`] has no value left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no nonce is left under this sealing key")]
pub struct NonceExhausted;
