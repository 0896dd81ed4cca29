//! Examines the content of a namespace before anything is written to it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use uuid::Uuid;

/// The content of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Zeros in every place that was examined: the first and last [`EDGE_BYTES`], which hold file systems, partition tables
    /// and the labels of volume managers, and [`SAMPLES`] places between them.
    Blank,
    /// XFS.
    Xfs {
        /// Its UUID.
        uuid: Uuid,
        /// Its label.
        label: String,
        /// Whether mkfs.xfs was interrupted.
        unfinished: bool,
    },
    /// Anything else.
    Foreign,
}

/// Bytes that are examined at the beginning and at the end.
const EDGE_BYTES: u64 = 4 << 20;
/// Number of places between them, and the bytes that are examined in each.
const SAMPLES: u64 = 256;
const SAMPLE_BYTES: u64 = 64 << 10;

/// Beginning of an XFS superblock (xfs_sb.h, `struct xfs_dsb`).
const SUPERBLOCK_BYTES: usize = 512;

/// Examines a device.
pub(crate) fn look(device: &File, size_bytes: u64) -> io::Result<Content> {
    // This machine's page cache may date from before the reservation was ours.
    rustix::fs::fadvise(device, 0, None, rustix::fs::Advice::DontNeed)?;
    if let Some(found) = superblock(device, size_bytes)? {
        return Ok(found);
    }
    let edge = EDGE_BYTES.min(size_bytes);
    let step = size_bytes / (SAMPLES + 1);
    let between = (1..=SAMPLES).map(|nth| (nth * step, SAMPLE_BYTES));
    for (from, length) in [(0, edge), (size_bytes - edge, edge)].into_iter().chain(between) {
        if !is_zero(device, from, length.min(size_bytes - from))? {
            return Ok(Content::Foreign);
        }
    }
    Ok(Content::Blank)
}

/// Bytes of the device that its XFS uses, according to its superblock; `None` if there is no XFS.
pub(crate) fn file_system_bytes(device: &File) -> io::Result<Option<u64>> {
    rustix::fs::fadvise(device, 0, None, rustix::fs::Advice::DontNeed)?;
    let mut block = [0; SUPERBLOCK_BYTES];
    device.read_exact_at(&mut block, 0)?;
    // sb_blocksize, sb_dblocks.
    let block_bytes = u32::from_be_bytes(std::array::from_fn(|i| block[4 + i]));
    let blocks = u64::from_be_bytes(std::array::from_fn(|i| block[8 + i]));
    Ok(block.starts_with(b"XFSB").then(|| blocks.saturating_mul(block_bytes.into())))
}

fn superblock(device: &File, size_bytes: u64) -> io::Result<Option<Content>> {
    if size_bytes < SUPERBLOCK_BYTES as u64 {
        return Ok(None);
    }
    let mut block = [0; SUPERBLOCK_BYTES];
    device.read_exact_at(&mut block, 0)?;
    Ok(parse(&block))
}

fn parse(block: &[u8; SUPERBLOCK_BYTES]) -> Option<Content> {
    if !block.starts_with(b"XFSB") {
        return None;
    }
    // sb_uuid, sb_fname, sb_inprogress.
    let uuid = Uuid::from_bytes(std::array::from_fn(|i| block[32 + i]));
    let label = &block[108..120];
    let end = label.iter().position(|b| *b == 0).unwrap_or(label.len());
    let label = String::from_utf8_lossy(&label[..end]).into_owned();
    Some(Content::Xfs { uuid, label, unfinished: block[126] != 0 })
}

fn is_zero(device: &File, from: u64, length: u64) -> io::Result<bool> {
    let mut chunk = vec![0; SAMPLE_BYTES as usize];
    let mut at = from;
    let end = from + length;
    while at < end {
        let count = (end - at).min(SAMPLE_BYTES) as usize;
        device.read_exact_at(&mut chunk[..count], at)?;
        if chunk[..count].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += count as u64;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 30;

    fn namespace(writes: &[(u64, &[u8])]) -> Content {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(SIZE).expect("it is sparse");
        for (at, bytes) in writes {
            file.write_all_at(bytes, *at).expect("written");
        }
        look(&file, SIZE).expect("looked")
    }

    #[test]
    fn zeroed_namespace_is_blank_and_a_bit_in_a_label_area_is_foreign() {
        assert_eq!(namespace(&[]), Content::Blank);
        // GPT and its backup, LVM, ext4, the middle.
        for at in [0, 446, 512, 1080, SIZE - 512, SIZE - 1, SIZE / 257 * 128] {
            assert_eq!(namespace(&[(at, &[1])]), Content::Foreign, "{at}");
        }
    }

    #[test]
    fn xfs_is_detected_with_its_uuid_and_label() {
        let mut block = vec![0; 512];
        block[..4].copy_from_slice(b"XFSB");
        block[32..48].fill(7);
        block[108..115].copy_from_slice(b"forebay");
        let xfs = |unfinished| Content::Xfs {
            uuid: Uuid::from_bytes([7; 16]),
            label: "forebay".into(),
            unfinished,
        };
        assert_eq!(namespace(&[(0, &block)]), xfs(false));
        block[126] = 1;
        assert_eq!(namespace(&[(0, &block)]), xfs(true));
        // A label that fills its field.
        block[108..120].copy_from_slice(b"twelve bytes");
        let found = namespace(&[(0, &block)]);
        assert!(matches!(&found, Content::Xfs { label, .. } if label == "twelve bytes"), "{found:?}");
    }

    #[test]
    fn file_system_size_is_read_from_the_xfs_superblock() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4096).expect("it is sparse");
        assert_eq!(file_system_bytes(&file).expect("read"), None);
        file.write_all_at(b"XFSB\x00\x00\x10\x00\x00\x00\x00\x00\x00\x04\x00\x00", 0).expect("written");
        assert_eq!(file_system_bytes(&file).expect("read"), Some(1 << 30));
    }

    #[test]
    fn namespace_of_size_zero_is_blank() {
        let file = tempfile::tempfile().expect("a file");
        assert_eq!(look(&file, 0).expect("looked"), Content::Blank);
    }
}
