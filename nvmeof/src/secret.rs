//! Keys in the text format of targets' tools, checked before they are passed to the kernel, which would only return EINVAL.

use std::fmt;

use zeroize::Zeroizing;

use crate::base64;

/// A secret of DH-HMAC-CHAP, `DHHC-1:<hash>:<Base64 of key and CRC-32>:` (NVMe Base 8.13.5.8). Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct DhChapKey(Zeroizing<String>);

/// A configured pre-shared key of TLS, `NVMeTLSkey-1:<hash>:<Base64 of key and CRC-32>:` (NVMe/TCP 3.6.1.5). Never shown.
/// The kernel gets a key that is derived from it for each pair of host and subsystem ([`crate::Tls`]).
#[derive(Clone, PartialEq, Eq)]
pub struct TlsPsk {
    transform: Option<Hash>,
    key: Zeroizing<Vec<u8>>,
}

/// Hash of a key, and of its cipher suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hash {
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
}

/// Why a text is not a key. Reveals nothing of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKey {
    /// The format is wrong.
    #[error("a key has the form {0}")]
    Form(&'static str),
    /// The hash is not one of the specification.
    #[error("the key names a hash that is unknown")]
    Hash,
    /// It is not Base64.
    #[error("the key's part between the last colons is not base64")]
    Base64,
    /// No key of that hash has this length.
    #[error("a key of {0} bytes does not go with its hash")]
    Length(usize),
    /// It was mistyped or truncated.
    #[error("the key's check sum does not match: it was mistyped or cut")]
    CheckSum,
}

/// Length of the CRC-32 that follows a key.
const CHECK_SUM_BYTES: usize = 4;

const DHCHAP_FORM: &str = "DHHC-1:<00 to 03>:<base64>:";
const PSK_FORM: &str = "NVMeTLSkey-1:<00 to 02>:<base64>:";

impl DhChapKey {
    /// Parses and checks a key.
    ///
    /// # Errors
    /// If it is not a key.
    pub fn parse(text: &str) -> Result<Self, InvalidKey> {
        // NVMe Base 8.13.5.8: 00 allows any of the three lengths, without a transformation.
        check(text, "DHHC-1", DHCHAP_FORM, |hash| match hash {
            "00" => Some(&[32, 48, 64]),
            "01" => Some(&[32]),
            "02" => Some(&[48]),
            "03" => Some(&[64]),
            _ => None,
        })?;
        Ok(Self(Zeroizing::new(text.to_owned())))
    }

    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl TlsPsk {
    /// Parses and checks a key.
    ///
    /// # Errors
    /// If it is not a key.
    pub fn parse(text: &str) -> Result<Self, InvalidKey> {
        // NVMe/TCP 3.6.1.5: 00 allows either length, without a transformation.
        let (hash, key) = check(text, "NVMeTLSkey-1", PSK_FORM, |hash| match hash {
            "00" => Some(&[32, 48]),
            "01" => Some(&[32]),
            "02" => Some(&[48]),
            _ => None,
        })?;
        let transform = match hash {
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            _ => None,
        };
        Ok(Self { transform, key })
    }

    /// The key itself.
    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }

    /// The transformation into a retained key; `None` if it is used as it is.
    pub(crate) fn transform(&self) -> Option<Hash> {
        self.transform
    }

    /// Hash of the cipher suite: the hash of the transformation, or the one that matches the key's length.
    pub(crate) fn hash(&self) -> Hash {
        let by_length = if self.key.len() == 32 { Hash::Sha256 } else { Hash::Sha384 };
        self.transform.unwrap_or(by_length)
    }
}

/// Returns the hash that a text names, and the key.
fn check<'a>(
    text: &'a str,
    name: &str,
    form: &'static str,
    lengths: impl Fn(&str) -> Option<&'static [usize]>,
) -> Result<(&'a str, Zeroizing<Vec<u8>>), InvalidKey> {
    let mut parts = text.split(':');
    let mut part = || parts.next().ok_or(InvalidKey::Form(form));
    let (head, hash, key, tail) = (part()?, part()?, part()?, part()?);
    if head != name || !tail.is_empty() || parts.next().is_some() {
        return Err(InvalidKey::Form(form));
    }
    let lengths = lengths(hash).ok_or(InvalidKey::Hash)?;
    let mut bytes = base64::decode(key).ok_or(InvalidKey::Base64)?;
    let length = bytes.len().checked_sub(CHECK_SUM_BYTES).ok_or(InvalidKey::Length(0))?;
    if !lengths.contains(&length) {
        return Err(InvalidKey::Length(length));
    }
    let (key, sum) = bytes.split_at(length);
    if base64::crc32(key).to_le_bytes() != sum {
        return Err(InvalidKey::CheckSum);
    }
    bytes.truncate(length);
    Ok((hash, bytes))
}

impl fmt::Debug for DhChapKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DhChapKey(redacted)")
    }
}

impl fmt::Debug for TlsPsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsPsk(redacted)")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn dhchap(hash: &str, bytes: &[u8]) -> String {
        let sum = base64::crc32(bytes).to_le_bytes();
        format!("DHHC-1:{hash}:{}:", base64::encode(&[bytes, &sum].concat()).as_str())
    }

    pub(crate) fn psk(hash: &str, bytes: &[u8]) -> String {
        dhchap(hash, bytes).replace("DHHC-1", "NVMeTLSkey-1")
    }

    #[test]
    fn dhchap_key_with_matching_hash_length_and_crc_is_accepted() {
        for (hash, length) in [("00", 32), ("00", 48), ("00", 64), ("01", 32), ("02", 48), ("03", 64)] {
            assert!(DhChapKey::parse(&dhchap(hash, &vec![7; length])).is_ok(), "{hash} {length}");
        }
        // From the documentation of nvme-cli's gen-dhchap-key: a key generated by other software.
        let made = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
        assert_eq!(DhChapKey::parse(made).map(|_| ()), Ok(()));
    }

    #[test]
    fn dhchap_key_errors_are_specific_and_debug_is_redacted() {
        let good = dhchap("01", &[7; 32]);
        let refused = |text: &str| DhChapKey::parse(text).expect_err("an invalid key");
        assert_eq!(refused("secret"), InvalidKey::Form(DHCHAP_FORM));
        assert_eq!(refused(good.trim_end_matches(':')), InvalidKey::Form(DHCHAP_FORM));
        assert_eq!(refused(&format!("{good}:")), InvalidKey::Form(DHCHAP_FORM));
        assert_eq!(refused(&good.replace(":01:", ":04:")), InvalidKey::Hash);
        assert_eq!(refused(&good.replace(":01:", ":02:")), InvalidKey::Length(32));
        assert_eq!(refused("DHHC-1:01:A:"), InvalidKey::Base64);
        assert_eq!(refused("DHHC-1:01:AAA=:"), InvalidKey::Length(0));
        let mistyped = dhchap("01", &[7; 32]).replacen("Bw", "Cw", 1);
        assert_eq!(refused(&mistyped), InvalidKey::CheckSum);
        assert_eq!(format!("{:?}", DhChapKey::parse(&good)), "Ok(DhChapKey(redacted))");
    }

    #[test]
    fn tls_psk_interchange_format_is_validated() {
        let parsed = |hash: &str, length: usize| TlsPsk::parse(&psk(hash, &vec![9; length])).map(|_| ());
        assert_eq!(parsed("00", 32), Ok(()));
        assert_eq!(parsed("00", 48), Ok(()));
        assert_eq!(parsed("01", 32), Ok(()));
        assert_eq!(parsed("02", 48), Ok(()));
        assert_eq!(parsed("02", 32), Err(InvalidKey::Length(32)));
        assert_eq!(parsed("00", 64), Err(InvalidKey::Length(64)));
        assert_eq!(parsed("03", 64), Err(InvalidKey::Hash));
        assert_eq!(TlsPsk::parse(&dhchap("01", &[9; 32])).map(|_| ()), Err(InvalidKey::Form(PSK_FORM)));
        assert_eq!(format!("{:?}", TlsPsk::parse(&psk("01", &[9; 32]))), "Ok(TlsPsk(redacted))");
    }
}
