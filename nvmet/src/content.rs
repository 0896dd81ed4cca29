//! Contents of a drive, partition or file to be offered: blank, a Forebay pool, or data that must not be touched. Only reads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{Advice, fadvise};

/// Label of the file systems of pools, as set by the server.
const POOL_LABEL: &[u8] = b"forebay";
/// Size of the checked areas at both ends: they hold the headers of file systems, partition tables and volume managers.
const EDGE_BYTES: u64 = 4 << 20;
const CHUNK_BYTES: u64 = 64 << 10;
/// Size of the read part of an XFS superblock (xfs_sb.h, `struct xfs_dsb`).
const SUPERBLOCK_BYTES: usize = 512;

/// The detected content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Zeros in the first and last [`EDGE_BYTES`].
    Blank,
    /// XFS with the label of our pools. The server of the pool checks its owner.
    Pool,
    /// Other data, with a description for users.
    Other(String),
}

/// A byte sequence at an offset that identifies a format.
struct Signature {
    at: u64,
    bytes: &'static [u8],
    what: &'static str,
}

const fn signature(at: u64, bytes: &'static [u8], what: &'static str) -> Signature {
    Signature { at, bytes, what }
}

/// Formats that are reported by name. Any nonzero data is refused, known or not; the last entries are weak evidence.
const SIGNATURES: &[Signature] = &[
    signature(512, b"EFI PART", "a partition table (GPT)"),
    signature(4096, b"EFI PART", "a partition table (GPT)"),
    signature(1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    signature(0, b"LABELONE", "a physical volume of LVM"),
    signature(512, b"LABELONE", "a physical volume of LVM"),
    signature(1024, b"LABELONE", "a physical volume of LVM"),
    signature(1536, b"LABELONE", "a physical volume of LVM"),
    signature(0, b"\xfc\x4e\x2b\xa9", "a member of a RAID (md)"),
    signature(4096, b"\xfc\x4e\x2b\xa9", "a member of a RAID (md)"),
    signature(0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    signature(0x10040, b"_BHRfS_M", "a btrfs file system"),
    signature(4086, b"SWAPSPACE2", "swap space"),
    signature(0, b"bluestore block device", "a BlueStore of Ceph"),
    signature(4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca", "a cache or backing device of bcache"),
    signature(3, b"NTFS    ", "an NTFS file system"),
    signature(0x8001, b"CD001", "an ISO 9660 file system"),
    signature(1024, b"\xe2\xe1\xf5\xe0", "an EROFS file system"),
    signature(510, b"\x55\xaa", "a partition table (MBR) or boot sector"),
];

/// Detects the content.
pub(crate) fn look(file: &File, bytes: u64) -> io::Result<Content> {
    // Cached pages of this machine can be older than data that hosts have written.
    fadvise(file, 0, None, Advice::DontNeed)?;
    let mut block = [0; SUPERBLOCK_BYTES];
    if bytes >= SUPERBLOCK_BYTES as u64 {
        file.read_exact_at(&mut block, 0)?;
    }
    if block.starts_with(b"XFSB") {
        // sb_fname.
        let label = &block[108..120];
        let end = label.iter().position(|byte| *byte == 0).unwrap_or(label.len());
        return Ok(match &label[..end] {
            POOL_LABEL => Content::Pool,
            [] => Content::Other("an XFS file system without a label".into()),
            other => {
                Content::Other(format!("an XFS file system labelled {:?}", String::from_utf8_lossy(other)))
            }
        });
    }
    for Signature { at, bytes: expected, what } in SIGNATURES {
        let mut found = vec![0; expected.len()];
        if at + found.len() as u64 <= bytes {
            file.read_exact_at(&mut found, *at)?;
            if found == *expected {
                return Ok(Content::Other((*what).into()));
            }
        }
    }
    let edge = EDGE_BYTES.min(bytes);
    for from in [0, bytes - edge] {
        if let Some(at) = first_byte(file, from, edge)? {
            return Ok(Content::Other(format!("data (from byte {at} on) that is no pool")));
        }
    }
    Ok(Content::Blank)
}

/// The offset of the first nonzero byte.
fn first_byte(file: &File, from: u64, length: u64) -> io::Result<Option<u64>> {
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    let end = from + length;
    let mut at = from;
    while at < end {
        let part = &mut chunk[..(end - at).min(CHUNK_BYTES) as usize];
        file.read_exact_at(part, at)?;
        if let Some(index) = part.iter().position(|byte| *byte != 0) {
            return Ok(Some(at + index as u64));
        }
        at += part.len() as u64;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1 << 30;

    fn content(writes: &[(u64, &[u8])]) -> Content {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(BYTES).expect("it is sparse");
        for (at, bytes) in writes {
            file.write_all_at(bytes, *at).expect("written");
        }
        look(&file, BYTES).expect("looked")
    }

    fn other(content: Content) -> String {
        match content {
            Content::Other(what) => what,
            content => panic!("{content:?}"),
        }
    }

    #[test]
    fn zeroed_device_is_blank_and_known_signatures_are_named() {
        assert_eq!(content(&[]), Content::Blank);
        for Signature { at, bytes, what } in SIGNATURES {
            assert_eq!(other(content(&[(*at, bytes)])), *what);
        }
    }

    #[test]
    fn nonzero_byte_at_either_end_is_detected_as_data() {
        // md 0.90 and DRBD store their metadata at the end.
        for at in [1, EDGE_BYTES - 1, BYTES - EDGE_BYTES, BYTES - 65536, BYTES - 1] {
            assert_eq!(other(content(&[(at, &[1])])), format!("data (from byte {at} on) that is no pool"));
        }
    }

    #[test]
    fn only_xfs_with_the_pool_label_is_accepted_as_a_pool() {
        let with = |label: &[u8]| {
            let mut block = vec![0; 512];
            block[..4].copy_from_slice(b"XFSB");
            block[108..108 + label.len()].copy_from_slice(label);
            content(&[(0, &block), (8192, b"data")])
        };
        assert_eq!(with(b"forebay"), Content::Pool);
        assert_eq!(other(with(b"")), "an XFS file system without a label");
        assert_eq!(other(with(b"forebay-2")), "an XFS file system labelled \"forebay-2\"");
        assert_eq!(other(with(b"twelve bytes")), "an XFS file system labelled \"twelve bytes\"");
    }

    #[test]
    fn device_smaller_than_a_label_is_blank() {
        for bytes in [0, 100, 5000] {
            let file = tempfile::tempfile().expect("a file");
            file.set_len(bytes).expect("it is sparse");
            assert_eq!(look(&file, bytes).expect("looked"), Content::Blank);
        }
    }
}
