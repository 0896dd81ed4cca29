//! Authentications under way ([MS-SMB2] 3.3.5.5).

use crate::auth::Acceptor;
use crate::crypto::PreauthHash;

/// An authentication under way.
pub(crate) struct PendingAuth {
    pub(crate) acceptor: Acceptor,
    /// Session.PreauthIntegrityHashValue.
    pub(crate) preauth: PreauthHash,
    pub(crate) rounds: u8,
    /// It is to make the connection a channel of a session, not a session.
    pub(crate) binding: bool,
}
