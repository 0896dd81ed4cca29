//! Session keys: SP800-108 KDF in counter mode with HMAC-SHA256 ([MS-SMB2] 3.1.4.2).

use std::fmt;

use aws_lc_rs::hmac;
use zeroize::Zeroize;

use super::{Cipher, PreauthHash};

/// `Session.SessionKey`: the first 16 bytes of the key exported by the authentication protocol, zero-padded on the right
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

/// A key for [`super::SealingKey`] or [`super::OpeningKey`], 16 or 32 bytes depending on its cipher. Wiped when dropped,
/// never printed.
#[derive(Clone)]
pub struct CipherKey {
    cipher: Cipher,
    bytes: [u8; 32],
}

impl CipherKey {
    /// Creates a key from bytes; `None` if their number does not match `cipher`.
    pub fn new(cipher: Cipher, key: &[u8]) -> Option<Self> {
        if key.len() != cipher.key_len() {
            return None;
        }
        let mut bytes = [0; 32];
        bytes[..key.len()].copy_from_slice(key);
        Some(CipherKey { cipher, bytes })
    }

    /// The cipher for which the key is.
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

/// The labels and contexts that the dialect requires ([MS-SMB2] 3.1.4.2).
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

/// `Session.ApplicationKey`, for the applications that use SMB.
pub fn application_key(derivation: KeyDerivation<'_>, session_key: &SessionKey) -> SessionKey {
    let mut key = [0; 16];
    derivation.derive(&session_key.0, (b"SMB2APP\0", b"SmbRpc\0"), b"SMBAppKey\0", &mut key);
    SessionKey(key)
}

/// The key of frames from client to server: the server's `Session.DecryptionKey`.
///
/// `full_session_key` is `Session.FullSessionKey`, the untruncated exported key; only the 256-bit ciphers use more than its
/// first 16 bytes.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::vectors::hex;

    /// Expected values: pyca/cryptography 50, KBKDFHMAC.
    #[test]
    fn derived_keys_match_pyca_cryptography() {
        let key = SessionKey::new(&hex("270e1ba896585eeb7af3472d3b4c75a7"));
        let v30 = KeyDerivation::Smb30;
        assert_eq!(signing_key(v30, &key).0[..], hex("4eeaf9e6bc024e1adf4a560f01570deb"));
        assert_eq!(application_key(v30, &key).0[..], hex("3bbd914bee354539ebcb3d6fac22f2f6"));
        let c2s = |d, key: &[u8], cipher| client_to_server_key(d, key, cipher).as_bytes().to_vec();
        let s2c = |d, key: &[u8], cipher| server_to_client_key(d, key, cipher).as_bytes().to_vec();
        assert_eq!(c2s(v30, key.as_bytes(), Cipher::Aes128Ccm), hex("cd25f0bccd79f6add9487f1d8778aaf8"));
        assert_eq!(s2c(v30, key.as_bytes(), Cipher::Aes128Ccm), hex("e13c79ad34090979428b6dc42347b8fd"));

        let mut hash = PreauthHash::new();
        hash.update(b"negotiate request");
        hash.update_parts(&[b"negotiate", b"", b" response"]);
        assert_eq!(
            hash.as_bytes()[..],
            hex("37311ce11673083a4dac7793e056d1525c9bea2864fa8795404f6191fbb3aacf\
                 294745e50a3bd0f09b69abba6e84a9fc5a5fcc3bec21db21c4f92edb6a81edf5")
        );
        let v311 = KeyDerivation::Smb311(&hash);
        assert_eq!(signing_key(v311, &key).0[..], hex("4fdd4bbc8d5fad677e830c17bb952b89"));
        assert_eq!(application_key(v311, &key).0[..], hex("0e0ff23578863a083018261ca8c6374d"));
        assert_eq!(c2s(v311, key.as_bytes(), Cipher::Aes128Gcm), hex("f38771d1d44613fdfae12c1f6bdeea89"));
        assert_eq!(s2c(v311, key.as_bytes(), Cipher::Aes128Gcm), hex("a92787b69f46b3b798a4f8d3ea944446"));
        let full: Vec<u8> = (0..32).collect();
        assert_eq!(
            c2s(v311, &full, Cipher::Aes256Gcm),
            hex("14d12fafdd08e848cae8fe14ccd7efd4a738ee7add0386981b51cc5d92386a6b")
        );
        assert_eq!(
            s2c(v311, &full, Cipher::Aes256Ccm),
            hex("10930a1a495e636a64e6cc1f73afbca04a9fb28b86c6c828ad73a95a2d58f0e9")
        );
        // A 128-bit cipher's key is derived from the first 16 bytes alone.
        assert_eq!(c2s(v311, &full, Cipher::Aes128Gcm), c2s(v311, &full[..16], Cipher::Aes128Gcm));
    }

    /// From Microsoft's "Encryption in SMB 3.0: A protocol perspective": a server's two keys.
    #[test]
    fn derived_keys_match_the_published_smb_3_0_exchange() {
        let key = SessionKey::new(&hex("b4546771b515f766a86735532dd6c4f0"));
        assert_eq!(
            server_to_client_key(KeyDerivation::Smb30, key.as_bytes(), Cipher::Aes128Ccm).as_bytes(),
            hex("8fe2b57ec34d2db5b1a9727f526bbdb5")
        );
        assert_eq!(
            client_to_server_key(KeyDerivation::Smb30, key.as_bytes(), Cipher::Aes128Ccm).as_bytes(),
            hex("261b72350558f2e9dcf613070383edbf")
        );
    }

    #[test]
    fn keys_are_never_printed() {
        let key = SessionKey::new(&[0xAB; 16]);
        assert_eq!(format!("{key:?}"), "SessionKey(..)");
        let key = CipherKey::new(Cipher::Aes128Gcm, &[0xAB; 16]).expect("16 bytes");
        assert_eq!(format!("{key:?}"), "CipherKey(Aes128Gcm, ..)");
        assert!(CipherKey::new(Cipher::Aes256Gcm, &[0xAB; 16]).is_none());
    }
}
