//! The content of the measured files: bytes depend on the file and on the offset, so that a misplaced block is detected.

/// The eight bytes of a file that begin at `8 * word`.
fn word(file: u64, word: u64) -> u64 {
    // The final steps of SplitMix64: cheap, and the result cannot be compressed by a file system or a link.
    let mut value = (file << 40 ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// Fills `out` with the content of file number `file` from `offset` on.
pub(crate) fn fill(file: u64, offset: u64, out: &mut [u8]) {
    let mut at = offset;
    let mut rest = out;
    while !rest.is_empty() {
        let bytes = word(file, at / 8).to_le_bytes();
        let piece = &bytes[(at % 8) as usize..];
        let count = piece.len().min(rest.len());
        rest[..count].copy_from_slice(&piece[..count]);
        rest = &mut rest[count..];
        at += count as u64;
    }
}

/// The same as a vector.
pub(crate) fn bytes(file: u64, offset: u64, count: usize) -> Vec<u8> {
    let mut out = vec![0; count];
    fill(file, offset, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_depends_only_on_file_and_offset() {
        let whole = bytes(3, 0, 1000);
        for (offset, count) in [(0, 1), (1, 7), (5, 20), (8, 8), (13, 987), (1000, 0)] {
            assert_eq!(bytes(3, offset as u64, count), whole[offset..offset + count], "{count} at {offset}");
        }
    }

    #[test]
    fn content_differs_between_files_and_offsets() {
        assert_ne!(bytes(1, 0, 64), bytes(2, 0, 64));
        assert_ne!(bytes(1, 0, 64), bytes(1, 4096, 64));
    }
}
