//! A channel ([MS-SMB2] 3.3.1.14): a session on one of its connections.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::crypto::{NonceSequence, OpeningKey, SealingKey, SigningKey};
use crate::engine::lookup::Lookup;
use crate::engine::pending_auth::PendingAuth;
use crate::engine::session::Session;
use crate::wire::{Command, Header, HeaderFlags};

/// A session on one of its connections, with its keys for that connection.
pub(crate) struct Channel {
    pub(crate) session: Arc<Session>,
    pub(crate) signing: SigningKey,
    pub(crate) seal: Option<Sealing>,
    pub(crate) lookup: Lookup,
    /// A re-authentication in progress.
    pub(crate) reauth: Option<PendingAuth>,
}

impl Channel {
    /// Whether a request is protected as its session requires ([MS-SMB2] 3.3.5.2.4, 3.3.5.2.9).
    pub(in crate::engine) fn verifies(&self, header: &Header, message: &[u8], sealed: bool) -> bool {
        // A sealed message is not signed; its authentication tag proves more.
        if sealed {
            return true;
        }
        if self.session.encrypt.load(Ordering::Relaxed) && header.command != Command::SESSION_SETUP {
            return false;
        }
        if header.flags.contains(HeaderFlags::SIGNED) {
            self.signing.verify(&[message])
        } else {
            !self.session.signing_required.load(Ordering::Relaxed)
        }
    }
}

/// The keys and nonces of a channel of a session that can seal.
pub(crate) struct Sealing {
    pub(crate) sealing: SealingKey,
    pub(crate) opening: OpeningKey,
    pub(crate) nonces: NonceSequence,
}
