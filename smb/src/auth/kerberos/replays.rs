//! Authenticators already seen ([RFC 4120] 3.2.3): an attacker who has recorded a client's message cannot use it again.

use std::collections::HashMap;
use std::sync::Mutex;

use aws_lc_rs::digest;

use super::SKEW_SECONDS;
use super::refuse;
use crate::auth::AuthError;
use crate::limits;

type Digest = [u8; 16];

/// The authenticators of the last minutes.
#[derive(Debug, Default)]
pub(super) struct Replays(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// Until when each would be accepted, in seconds since 1970.
    until: HashMap<Digest, i64>,
    swept: i64,
}

impl Replays {
    /// Remembers an authenticator until it is too old to be accepted.
    ///
    /// # Errors
    /// [`AuthError::Refused`] if it was seen before, or if there are too many.
    pub(super) fn note(&self, authenticator: &[u8], until: i64, now: i64) -> Result<(), AuthError> {
        let hash = digest::digest(&digest::SHA256, authenticator);
        let digest: Digest = hash.as_ref()[..16].try_into().expect("a hash of 32 bytes");
        let mut seen = self.0.lock().expect("no panic under this lock");
        let is_full = seen.until.len() >= limits::KERBEROS_REPLAYS_MAX;
        // A clock that was set back must not keep them forever.
        if (now - seen.swept).abs() >= SKEW_SECONDS || is_full && now != seen.swept {
            seen.until.retain(|_, until| *until >= now);
            seen.swept = now;
        }
        if seen.until.contains_key(&digest) {
            return refuse("the same authenticator was sent before");
        }
        if seen.until.len() >= limits::KERBEROS_REPLAYS_MAX {
            return refuse("too many logons in ten minutes");
        }
        seen.until.insert(digest, until);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authenticator_is_accepted_once() {
        let replays = Replays::default();
        let note = |id: u64, now| replays.note(&id.to_le_bytes(), now + SKEW_SECONDS, now);
        assert_eq!(note(1, 1000), Ok(()));
        assert_eq!(note(2, 1000), Ok(()));
        assert!(note(1, 1000).is_err());
        assert!(note(1, 1000 + SKEW_SECONDS).is_err(), "its timestamp is still valid");
        assert_eq!(note(1, 1001 + 2 * SKEW_SECONDS), Ok(()), "evicted: its timestamp is invalid");
    }

    #[test]
    fn replay_cache_size_is_bounded() {
        let replays = Replays::default();
        for id in 0..limits::KERBEROS_REPLAYS_MAX as u64 {
            replays.note(&id.to_le_bytes(), 1300, 1000).expect("room");
        }
        assert!(replays.note(b"one more", 1300, 1000).is_err());
        assert_eq!(replays.note(b"one more", 1601, 1301), Ok(()), "the others have expired");
    }
}
