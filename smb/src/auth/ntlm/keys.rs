//! Keys and proofs that NTLMv2 derives from a password hash ([MS-NLMP] 3.3.2, 3.4).

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

/// Upper case by the rules of Windows: one character for one, so that `ß` stays.
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

/// The side that signs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::auth) enum Side {
    Client,
    Server,
}

/// The first message signature of one side: GSS_GetMIC with sequence number 0 ([MS-NLMP] 3.4.4.2). SPNEGO needs only this
/// one. Assumes extended session security: the acceptor refuses clients without it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::vectors::hex;

    /// [MS-NLMP] 4.2.4
    #[test]
    fn ntlm_v2_matches_the_ms_nlmp_example() {
        let owf = ntowf_v2(&NtHash::from_password("Password"), "User", "Domain");
        assert_eq!(owf[..], hex("0c868a403bfd7a93a3001ef22ef02e3f"));
        let temp =
            hex("01010000000000000000000000000000aaaaaaaaaaaaaaaa0000000002000c0044006f006d00610069006e00\
                        01000c005300650072007600650072000000000000000000");
        let challenge = 0xEFCD_AB89_6745_2301_u64.to_le_bytes();
        let proof = nt_proof(&owf, &challenge, &temp);
        assert_eq!(proof[..], hex("68cd0ab851e51c96aabc927bebef6a1c"));
        let base_key = session_base_key(&owf, &proof);
        assert_eq!(base_key[..], hex("8de40ccadbc14a82f15cb0ad0de95ca3"));
        let mut exchanged = hex("c5dad2544fc9799094ce1ce90bc9d03e");
        rc4(&base_key, &mut exchanged);
        assert_eq!(exchanged, [0x55; 16]);
    }

    /// Expected values: impacket 0.13, ntlm.MAC.
    #[test]
    fn signatures_match_impacket() {
        use flags::{KEY_EXCH, STRENGTH_56, STRENGTH_128};
        for (negotiated, client, server) in [
            (
                KEY_EXCH | STRENGTH_128 | STRENGTH_56,
                "01000000566c27b883d6630500000000",
                "01000000b573a42621a940e400000000",
            ),
            (KEY_EXCH | STRENGTH_56, "010000003c517ff0d1cebcba00000000", "0100000025a34b9aaa332c8300000000"),
            (STRENGTH_128, "0100000052894add5dcf3cd900000000", "01000000f37bb99170135d0d00000000"),
            (KEY_EXCH, "010000004e353a6c5d66ff3400000000", "0100000079eda87dff78b04100000000"),
        ] {
            let signature = |side| first_signature(&[0x55; 16], negotiated, side, b"mechanism list");
            assert_eq!(signature(Side::Client)[..], hex(client), "{negotiated:08x}");
            assert_eq!(signature(Side::Server)[..], hex(server), "{negotiated:08x}");
        }
    }

    #[test]
    fn upcase_keeps_characters_without_a_single_character_mapping() {
        let upper: String = "jürgen ß ŉ ǆ ф".chars().map(upcase).collect();
        assert_eq!(upper, "JÜRGEN ß ŉ Ǆ Ф");
    }
}
