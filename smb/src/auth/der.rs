//! The subset of DER that SPNEGO and Kerberos need ([X.690]): definite, minimal lengths only; every length is checked against
//! the available bytes.

use super::AuthError;

pub(super) const INTEGER: u8 = 0x02;
pub(super) const BIT_STRING: u8 = 0x03;
pub(super) const OCTET_STRING: u8 = 0x04;
pub(super) const OID: u8 = 0x06;
pub(super) const ENUMERATED: u8 = 0x0A;
pub(super) const GENERALIZED_TIME: u8 = 0x18;
pub(super) const GENERAL_STRING: u8 = 0x1B;
pub(super) const SEQUENCE: u8 = 0x30;
/// `[APPLICATION 0]`, the GSS-API's frame (RFC 2743 3.1).
pub(super) const APPLICATION_0: u8 = application(0);

/// The tag `[APPLICATION n]`, constructed.
pub(super) const fn application(n: u8) -> u8 {
    0x60 | n
}

/// The tag `[n]`, constructed.
pub(super) const fn context(n: u8) -> u8 {
    0xA0 | n
}

/// Reads consecutive values from a slice.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Reader(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All bytes not read yet, which need not be DER.
    pub(super) fn rest(self) -> &'a [u8] {
        self.0
    }

    /// The next value: its tag, its contents, and all its bytes.
    fn any(&mut self) -> Result<(u8, &'a [u8], &'a [u8]), AuthError> {
        let (&tag, rest) = self.0.split_first().ok_or(TRUNCATED)?;
        let (&first, rest) = rest.split_first().ok_or(TRUNCATED)?;
        let (len, rest) = match first {
            0..=0x7F => (usize::from(first), rest),
            // Tokens are much shorter than 16 MiB; 0x80 is the indefinite form, which DER forbids.
            0x81..=0x83 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7F)).ok_or(TRUNCATED)?;
                let len = bytes.iter().fold(0usize, |len, &byte| len << 8 | usize::from(byte));
                if bytes[0] == 0 || len < 0x80 {
                    return Err(AuthError::Malformed("DER length is not minimal"));
                }
                (len, rest)
            }
            _ => return Err(AuthError::Malformed("DER length of an unacceptable form")),
        };
        let (contents, rest) = rest.split_at_checked(len).ok_or(TRUNCATED)?;
        let whole = &self.0[..self.0.len() - rest.len()];
        self.0 = rest;
        Ok((tag, contents, whole))
    }

    /// The contents of the next value, which must have this tag.
    pub(super) fn expect(&mut self, tag: u8) -> Result<&'a [u8], AuthError> {
        match self.any()? {
            (found, contents, _) if found == tag => Ok(contents),
            _ => Err(AuthError::Malformed("unexpected DER tag")),
        }
    }

    /// All bytes of the next value, which must have this tag.
    pub(super) fn expect_whole(&mut self, tag: u8) -> Result<&'a [u8], AuthError> {
        match self.any()? {
            (found, _, whole) if found == tag => Ok(whole),
            _ => Err(AuthError::Malformed("unexpected DER tag")),
        }
    }

    /// The contents of the next value if it has this tag.
    pub(super) fn optional(&mut self, tag: u8) -> Result<Option<&'a [u8]>, AuthError> {
        if self.0.first() == Some(&tag) { self.expect(tag).map(Some) } else { Ok(None) }
    }

    pub(super) fn finish(self) -> Result<(), AuthError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(AuthError::Malformed("bytes after the end of a DER value"))
        }
    }
}

const TRUNCATED: AuthError = AuthError::Malformed("truncated DER value");

/// One value, with all of `bytes` as its contents.
pub(super) fn only(bytes: &[u8], tag: u8) -> Result<&[u8], AuthError> {
    let mut reader = Reader::new(bytes);
    let contents = reader.expect(tag)?;
    reader.finish()?;
    Ok(contents)
}

/// Encodes one value with these contents, given in pieces.
pub(super) fn encode(tag: u8, contents: &[&[u8]]) -> Vec<u8> {
    let len: usize = contents.iter().map(|piece| piece.len()).sum();
    let mut out = Vec::with_capacity(len + 5);
    out.push(tag);
    if len < 0x80 {
        out.push(len as u8);
    } else {
        let bytes = len.to_be_bytes();
        let significant = &bytes[len.leading_zeros() as usize / 8..];
        out.push(0x80 | significant.len() as u8);
        out.extend_from_slice(significant);
    }
    contents.iter().for_each(|piece| out.extend_from_slice(piece));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_round_trip() {
        for len in [0, 1, 127, 128, 255, 256, 65_535, 65_536] {
            let contents = vec![7; len];
            let value = encode(OCTET_STRING, &[&contents]);
            assert_eq!(only(&value, OCTET_STRING), Ok(&contents[..]), "{len}");
            assert!(only(&value[..value.len() - 1], OCTET_STRING).is_err(), "{len} truncated");
        }
    }

    #[test]
    fn invalid_der_encodings_are_refused() {
        for bad in [
            &[][..],
            &[4],
            &[4, 0x80],
            &[4, 0x81],
            &[4, 0x81, 1, 0],
            &[4, 0x82, 0, 1, 0],
            &[4, 0x84, 0, 0, 0, 1, 0],
            &[4, 0xFF],
            &[4, 1],
            &[4, 1, 0, 0],
            &[4, 0x83, 0xFF, 0xFF, 0xFF],
        ] {
            assert!(only(bad, OCTET_STRING).is_err(), "{bad:02x?}");
        }
    }
}
