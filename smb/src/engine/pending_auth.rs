//! Authentications in progress ([MS-SMB2] 3.3.5.5).

use crate::auth::Acceptor;
use crate::crypto::PreauthHash;

/// An authentication in progress.
pub(crate) struct PendingAuth {
    pub(crate) acceptor: Acceptor,
    /// Session.PreauthIntegrityHashValue.
    pub(crate) preauth: PreauthHash,
    pub(crate) rounds: u8,
    /// It binds the connection to a session as a channel, and does not create a session.
    pub(crate) binding: bool,
}
