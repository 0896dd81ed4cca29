//! The encoding of keys as text: Base64 (RFC 4648 4) with a trailing CRC-32.

use zeroize::Zeroizing;

/// Decodes Base64 with its padding; `None` if the text is anything else.
pub(crate) fn decode(text: &str) -> Option<Zeroizing<Vec<u8>>> {
    let text = text.as_bytes();
    if text.is_empty() || !text.len().is_multiple_of(4) {
        return None;
    }
    let padding = text.iter().rev().take_while(|b| **b == b'=').count();
    let mut bytes = Zeroizing::new(Vec::with_capacity(text.len() / 4 * 3));
    if padding > 2 {
        return None;
    }
    let digits = &text[..text.len() - padding];
    for group in digits.chunks(4) {
        let mut word = 0u32;
        for digit in group {
            word = word << 6 | value(*digit)?;
        }
        word <<= 6 * (4 - group.len());
        // Bits beyond the last byte must be zero, or one key would have several texts.
        let count = group.len() * 6 / 8;
        if word & ((1u32 << (24 - 8 * count)) - 1) != 0 {
            return None;
        }
        bytes.extend_from_slice(&word.to_be_bytes()[1..=count]);
    }
    Some(bytes)
}

fn value(digit: u8) -> Option<u32> {
    let value = match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(u32::from(value))
}

/// Encodes as Base64 with its padding.
pub(crate) fn encode(bytes: &[u8]) -> Zeroizing<String> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    // A later reallocation would leave copies behind.
    let mut text = Zeroizing::new(String::with_capacity(bytes.len().div_ceil(3) * 4));
    for group in bytes.chunks(3) {
        let mut word = [0; 4];
        word[1..=group.len()].copy_from_slice(group);
        let word = u32::from_be_bytes(word);
        for digit in 0..4 {
            let index = word >> (18 - 6 * digit) & 63;
            text.push(if digit <= group.len() { char::from(DIGITS[index as usize]) } else { '=' });
        }
    }
    text
}

/// CRC-32 of ISO 3309 (reflected, polynomial 0x04C11DB7), which NVMe appends to keys.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(
            crc ^ u32::from(*byte),
            |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_canonical_base64_is_decoded() {
        let plain = |text| decode(text).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        for (text, bytes) in [("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYmFy", "foobar")] {
            assert_eq!(plain(text).as_deref(), Some(bytes));
            assert_eq!(encode(bytes.as_bytes()).as_str(), text);
        }
        for text in ["", "Zg", "Zg=", "Zh==", "Zm9=", "Z===", "====", "Zm9v Zm9v", "Zm=v"] {
            assert_eq!(plain(text), None, "{text:?}");
        }
    }

    #[test]
    fn crc32_matches_the_standard_check_value() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
    }
}
