//! What NTLMv2 computes from a password hash ([MS-NLMP] 3.3.2, 3.4).

use hmac::{Hmac, KeyInit, Mac};
use md5::{Digest, Md5};
use rc4::{Rc4, StreamCipher};
use zeroize::{Zeroize, Zeroizing};

use super::message::flags;
use crate::auth::NtHash;

/// A 16-byte secret, wiped when dropped.
pub(in crate::auth) type Key = Zeroizing<[u8; 16]>;

pub(in crate::auth) fn hmac_md5(key: &[u8], parts: &[&[u8]]) -> [u8; 16] {
    let mut mac = Hmac::<Md5>::new_from_slice(key).expect("HMAC takes a key of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().0
}

pub(in crate::auth) fn rc4(key: &[u8; 16], data: &mut [u8]) {
    Rc4::new_from_slice(key).expect("RC4 takes 16 bytes").apply_keystream(data);
}

/// NTOWFv2 ([MS-NLMP] 3.3.2): the user in upper case, the domain as the client sent it.
pub(in crate::auth) fn ntowf_v2(hash: &NtHash, user: &str, domain: &str) -> Key {
    let mut name = Vec::with_capacity((user.len() + domain.len()) * 2);
    let upper = user.chars().map(upcase);
    for c in upper.chain(domain.chars()) {
        for unit in c.encode_utf16(&mut [0; 2]) {
            name.extend_from_slice(&unit.to_le_bytes());
        }
    }
    Zeroizing::new(hmac_md5(hash.as_bytes(), &[&name]))
}

/// Upper case as Windows does it: one character for one, so that `ß` stays.
fn upcase(c: char) -> char {
    let mut upper = c.to_uppercase();
    match (upper.next(), upper.next()) {
        (Some(upper), None) => upper,
        _ => c,
    }
}

/// NTProofStr over the server's challenge and the rest of the client's response ("temp", [MS-NLMP] 3.3.2).
pub(in crate::auth) fn nt_proof(owf: &Key, server_challenge: &[u8; 8], temp: &[u8]) -> [u8; 16] {
    hmac_md5(&**owf, &[server_challenge, temp])
}

/// SessionBaseKey ([MS-NLMP] 3.3.2); in NTLMv2 also the KeyExchangeKey (3.4.5.1).
pub(in crate::auth) fn session_base_key(owf: &Key, nt_proof: &[u8; 16]) -> Key {
    Zeroizing::new(hmac_md5(&**owf, &[nt_proof]))
}

/// The MIC over all three messages, the third with its MIC field as zeros ([MS-NLMP] 3.1.5.1.2).
pub(in crate::auth) fn mic(exported_session_key: &[u8; 16], messages: &[&[u8]]) -> [u8; 16] {
    hmac_md5(exported_session_key, messages)
}

/// Who signs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::auth) enum Side {
    Client,
    Server,
}

/// The first message signature of one side: GSS_GetMIC with sequence number 0 ([MS-NLMP] 3.4.4.2), of which SPNEGO
/// needs one. Extended session security is assumed: the acceptor refuses to go without.
pub(in crate::auth) fn first_signature(
    exported: &[u8; 16],
    negotiated: u32,
    side: Side,
    message: &[u8],
) -> [u8; 16] {
    let (sign_magic, seal_magic): (&[u8], &[u8]) = match side {
        Side::Client => (
            b"session key to client-to-server signing key magic constant\0",
            b"session key to client-to-server sealing key magic constant\0",
        ),
        Side::Server => (
            b"session key to server-to-client signing key magic constant\0",
            b"session key to server-to-client sealing key magic constant\0",
        ),
    };
    const SEQUENCE_NUMBER: [u8; 4] = [0; 4];
    // [MS-NLMP] 3.4.5.2
    let sign_key = md5(&[exported, sign_magic]);
    let digest = hmac_md5(&*sign_key, &[&SEQUENCE_NUMBER, message]);
    let mut checksum: [u8; 8] = *digest.first_chunk().expect("an MD5 has 16 bytes");
    if negotiated & flags::KEY_EXCH != 0 {
        // [MS-NLMP] 3.4.5.3
        let strength = match negotiated {
            n if n & flags::STRENGTH_128 != 0 => 16,
            n if n & flags::STRENGTH_56 != 0 => 7,
            _ => 5,
        };
        rc4(&md5(&[&exported[..strength], seal_magic]), &mut checksum);
    }
    let mut signature = [0; 16];
    signature[0] = 1;
    signature[4..12].copy_from_slice(&checksum);
    checksum.zeroize();
    signature
}

fn md5(parts: &[&[u8]]) -> Key {
    let mut hash = Md5::new();
    parts.iter().for_each(|part| hash.update(part));
    Zeroizing::new(hash.finalize().0)
}
