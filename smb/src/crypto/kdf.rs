//! Session keys: SP800-108 KDF in counter mode with HMAC-SHA256 ([MS-SMB2] 3.1.4.2).

use std::fmt;

use aws_lc_rs::hmac;
use zeroize::Zeroize;

use super::{Cipher, PreauthHash};

/// `Session.SessionKey`: the first 16 bytes of what the authentication protocol exported, zero-padded on the right
/// ([MS-SMB2] 3.3.5.5.3). Wiped when dropped, never printed.
#[derive(Clone)]
pub struct SessionKey([u8; 16]);

impl SessionKey {
    /// The session key of an exported key of any length.
    pub fn new(exported: &[u8]) -> Self {
        let mut key = [0; 16];
        let len = exported.len().min(key.len());
        key[..len].copy_from_slice(&exported[..len]);
        SessionKey(key)
    }

    /// The key's bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl Drop for SessionKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKey(..)")
    }
}

/// A key for [`super::SealingKey`] or [`super::OpeningKey`], 16 or 32 bytes with its cipher. Wiped when dropped, never printed.
#[derive(Clone)]
pub struct CipherKey {
    cipher: Cipher,
    bytes: [u8; 32],
}

impl CipherKey {
    /// A key of given bytes; `None` if their number is not what `cipher` needs.
    pub fn new(cipher: Cipher, key: &[u8]) -> Option<Self> {
        if key.len() != cipher.key_len() {
            return None;
        }
        let mut bytes = [0; 32];
        bytes[..key.len()].copy_from_slice(key);
        Some(CipherKey { cipher, bytes })
    }

    /// The cipher that the key is for.
    pub fn cipher(&self) -> Cipher {
        self.cipher
    }

    /// The key's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.cipher.key_len()]
    }
}

impl Drop for CipherKey {
    fn drop(&mut self) {
        self.bytes.zeroize();
    }
}

impl fmt::Debug for CipherKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CipherKey({:?}, ..)", self.cipher)
    }
}

/// Which labels and contexts the dialect asks for ([MS-SMB2] 3.1.4.2).
#[derive(Clone, Copy, Debug)]
pub enum KeyDerivation<'a> {
    /// Dialects 3.0 and 3.0.2: constant contexts.
    Smb30,
    /// Dialect 3.1.1: the context is the preauthentication hash of the session's (or channel's) exchange.
    Smb311(&'a PreauthHash),
}

// The terminating zero of each label and context is part of it; "ServerIn " ends in a space.
impl KeyDerivation<'_> {
    fn derive(
        self,
        key: &[u8],
        smb30: (&'static [u8], &'static [u8]),
        smb311_label: &'static [u8],
        derived: &mut [u8],
    ) {
        match self {
            KeyDerivation::Smb30 => kdf(key, smb30.0, smb30.1, derived),
            KeyDerivation::Smb311(hash) => kdf(key, smb311_label, hash.as_bytes(), derived),
        }
    }
}

/// `Session.SigningKey` or `Channel.SigningKey` of the 3.x dialects. Dialects 2.0.2 and 2.1 sign with the session key itself.
pub fn signing_key(derivation: KeyDerivation<'_>, session_key: &SessionKey) -> SessionKey {
    let mut key = [0; 16];
    derivation.derive(&session_key.0, (b"SMB2AESCMAC\0", b"SmbSign\0"), b"SMBSigningKey\0", &mut key);
    SessionKey(key)
}

/// `Session.ApplicationKey`, for the applications above SMB.
pub fn application_key(derivation: KeyDerivation<'_>, session_key: &SessionKey) -> SessionKey {
    let mut key = [0; 16];
    derivation.derive(&session_key.0, (b"SMB2APP\0", b"SmbRpc\0"), b"SMBAppKey\0", &mut key);
    SessionKey(key)
}

/// The key of frames from client to server: the server's `Session.DecryptionKey`.
///
/// `full_session_key` is `Session.FullSessionKey`, the exported key uncut; only the 256-bit ciphers use more than
/// its first 16 bytes.
pub fn client_to_server_key(
    derivation: KeyDerivation<'_>,
    full_session_key: &[u8],
    cipher: Cipher,
) -> CipherKey {
    cipher_key(derivation, full_session_key, cipher, b"ServerIn \0", b"SMBC2SCipherKey\0")
}

/// The key of frames from server to client: the server's `Session.EncryptionKey`.
///
/// `full_session_key` as in [`client_to_server_key`].
pub fn server_to_client_key(
    derivation: KeyDerivation<'_>,
    full_session_key: &[u8],
    cipher: Cipher,
) -> CipherKey {
    cipher_key(derivation, full_session_key, cipher, b"ServerOut\0", b"SMBS2CCipherKey\0")
}

fn cipher_key(
    derivation: KeyDerivation<'_>,
    full_session_key: &[u8],
    cipher: Cipher,
    smb30_context: &'static [u8],
    smb311_label: &'static [u8],
) -> CipherKey {
    let mut key = CipherKey { cipher, bytes: [0; 32] };
    let len = cipher.key_len();
    let cut;
    let key_in: &[u8] = if len == 32 {
        full_session_key
    } else {
        cut = SessionKey::new(full_session_key);
        &cut.0
    };
    derivation.derive(key_in, (b"SMB2AESCCM\0", smb30_context), smb311_label, &mut key.bytes[..len]);
    key
}

/// SP800-108 5.1 with r = 32 and L = the length of `derived` in bits; one iteration is enough for 256 bits.
fn kdf(key_in: &[u8], label: &[u8], context: &[u8], derived: &mut [u8]) {
    debug_assert!(derived.len() <= 32);
    let key = hmac::Key::new(hmac::HMAC_SHA256, key_in);
    let mut ctx = hmac::Context::with_key(&key);
    ctx.update(&1u32.to_be_bytes());
    ctx.update(label);
    ctx.update(&[0]);
    ctx.update(context);
    ctx.update(&(derived.len() as u32 * 8).to_be_bytes());
    derived.copy_from_slice(&ctx.sign().as_ref()[..derived.len()]);
}
