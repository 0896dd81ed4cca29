//! Shared by the tests of this crate: vectors as text, generated messages.

/// Bytes of hexadecimal digits.
pub(crate) fn hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("vectors are hex"))
        .collect()
}

/// The payload from which the expected values were computed.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + 3) as u8).collect()
}
