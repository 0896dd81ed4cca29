//! The NT hash, which a server needs to verify NTLMv2. For an attacker who steals it, it is as good as the password.

use std::fmt;

use aws_lc_rs::constant_time;
use md4::{Digest, Md4};
use zeroize::{Zeroize, Zeroizing};

/// MD4 of the password in UTF-16LE ([MS-NLMP] 3.3.1 NTOWFv1). Wiped when dropped, never printed, compared in constant time.
#[derive(Clone)]
pub struct NtHash([u8; 16]);

impl NtHash {
    /// The hash of a password.
    pub fn from_password(password: &str) -> Self {
        // Full capacity reserved: a growing buffer would leave copies of the password behind.
        let mut utf16 = Zeroizing::new(Vec::with_capacity(password.len() * 2));
        for unit in password.encode_utf16() {
            utf16.extend_from_slice(&unit.to_le_bytes());
        }
        NtHash(Md4::digest(&*utf16).0)
    }

    /// Creates a hash from its bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        NtHash(bytes)
    }

    /// Parses the output of [`NtHash::to_hex`], in either case.
    pub fn from_hex(hex: &str) -> Result<Self, NtHashParseError> {
        let hex = hex.as_bytes();
        if hex.len() != 32 {
            return Err(NtHashParseError);
        }
        let mut hash = NtHash([0; 16]);
        for (byte, pair) in hash.0.iter_mut().zip(hex.chunks_exact(2)) {
            *byte = digit(pair[0]).ok_or(NtHashParseError)? << 4 | digit(pair[1]).ok_or(NtHashParseError)?;
        }
        Ok(hash)
    }

    /// 32 lower-case hexadecimal digits, for a volume's record. Wiped when dropped.
    pub fn to_hex(&self) -> Zeroizing<String> {
        let mut hex = Zeroizing::new(String::with_capacity(32));
        for byte in self.0 {
            for nibble in [byte >> 4, byte & 15] {
                hex.push(char::from_digit(u32::from(nibble), 16).expect("a nibble is a digit"));
            }
        }
        hex
    }

    pub(super) fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

fn digit(c: u8) -> Option<u8> {
    // A digit below 16 fits a byte.
    char::from(c).to_digit(16).map(|d| d as u8)
}

impl PartialEq for NtHash {
    fn eq(&self, other: &Self) -> bool {
        constant_time::verify_slices_are_equal(&self.0, &other.0).is_ok()
    }
}

impl Eq for NtHash {}

impl Drop for NtHash {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for NtHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NtHash(..)")
    }
}

/// The text is not an NT hash. The error does not contain the text, which could be a mistyped secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an NT hash is 32 hexadecimal digits")]
pub struct NtHashParseError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nt_hash_matches_the_ms_nlmp_example() {
        // [MS-NLMP] 4.2.2.1.2 NTOWFv1("Password")
        assert_eq!(*NtHash::from_password("Password").to_hex(), "a4f49c406510bdcab6824ee7c30fd852");
        assert_eq!(*NtHash::from_password("").to_hex(), "31d6cfe0d16ae931b73c59d7e0c089c0");
    }

    #[test]
    fn hex_round_trips_and_invalid_hex_is_refused() {
        let hash = NtHash::from_password("pä𝄞");
        assert_eq!(NtHash::from_hex(&hash.to_hex()), Ok(hash.clone()));
        assert_eq!(NtHash::from_hex(&hash.to_hex().to_uppercase()), Ok(hash));
        for bad in [
            "",
            "a4f4",
            "g4f49c406510bdcab6824ee7c30fd852",
            "+4f49c406510bdcab6824ee7c30fd852",
            "ä4f49c406510bdcab6824ee7c30fd85",
        ] {
            assert_eq!(NtHash::from_hex(bad), Err(NtHashParseError), "{bad}");
        }
    }

    #[test]
    fn debug_output_hides_the_hash() {
        assert_eq!(format!("{:?}", NtHash::from_password("secret")), "NtHash(..)");
    }
}
