//! A small record in a file that is overwritten in place. Overwriting takes no space on a full file system, and an
//! interrupted write preserves the previous record.
//!
//! The file has two slots. A write overwrites the slot that holds the older record, or no record. Each slot has a sequence
//! number and a checksum, and a read returns the newest intact record.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use uuid::Uuid;

use crate::namespace;
use crate::volume::replace;

const MAGIC: [u8; 8] = *b"FBSLOT1\n";
/// Magic, sequence, length and checksum.
const HEADER_BYTES: usize = 8 + 8 + 4 + 16;
/// Name space of the checksums, which are UUIDs of version 5 (SHA-1, cut to 122 bits).
const CHECKSUMS: Uuid = Uuid::from_u128(0x3f0a_7cb1_55d2_4e38_8b1e_90c6_a4d7_e215);

/// What a file of slots holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// There is no such file.
    Missing,
    /// The newest intact record.
    Record(Vec<u8>),
    /// It is a file of slots, but none of them is intact.
    Damaged,
    /// It is not a file of slots: an older version wrote it.
    Plain(Vec<u8>),
}

struct Slot {
    sequence: u64,
    payload: Vec<u8>,
}

fn checksum(sequence: u64, payload: &[u8]) -> [u8; 16] {
    let summed = [&sequence.to_le_bytes(), payload].concat();
    Uuid::new_v5(&CHECKSUMS, &summed).into_bytes()
}

fn encode(slot_bytes: usize, sequence: u64, payload: &[u8]) -> io::Result<Vec<u8>> {
    let length = u32::try_from(payload.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let sum = checksum(sequence, payload);
    let mut bytes =
        [&MAGIC[..], &sequence.to_le_bytes()[..], &length.to_le_bytes()[..], &sum[..], payload].concat();
    if bytes.len() > slot_bytes {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    bytes.resize(slot_bytes, 0);
    Ok(bytes)
}

fn decode(bytes: &[u8]) -> Option<Slot> {
    let (header, rest) = bytes.split_at_checked(HEADER_BYTES)?;
    let sequence = u64::from_le_bytes(std::array::from_fn(|i| header[8 + i]));
    let length = u32::from_le_bytes(std::array::from_fn(|i| header[16 + i]));
    let payload = rest.get(..usize::try_from(length).ok()?)?;
    let whole = header.starts_with(&MAGIC) && header[20..] == checksum(sequence, payload);
    whole.then(|| Slot { sequence, payload: payload.to_vec() })
}

/// Both slots of a file; `None` if it is not a file of slots.
fn slots(bytes: &[u8], slot_bytes: usize) -> Option<[Option<Slot>; 2]> {
    if bytes.len() != 2 * slot_bytes {
        return None;
    }
    let (first, second) = bytes.split_at(slot_bytes);
    Some([decode(first), decode(second)])
}

fn newest(slots: [Option<Slot>; 2]) -> Option<Slot> {
    slots.into_iter().flatten().max_by_key(|slot| slot.sequence)
}

fn read_file(path: &Path, slot_bytes: usize) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?.take(2 * slot_bytes as u64 + 1).read_to_end(&mut bytes)?,
    };
    Ok(Some(bytes))
}

/// Reads the record in the file at `path`, with slots of `slot_bytes` bytes.
pub(crate) fn read(path: &Path, slot_bytes: usize) -> io::Result<Content> {
    Ok(read_file(path, slot_bytes)?.map_or(Content::Missing, |bytes| interpret(bytes, slot_bytes)))
}

fn interpret(bytes: Vec<u8>, slot_bytes: usize) -> Content {
    match slots(&bytes, slot_bytes) {
        None => Content::Plain(bytes),
        Some(slots) => newest(slots).map_or(Content::Damaged, |slot| Content::Record(slot.payload)),
    }
}

/// Stores `payload` as the record, on stable storage. Only the first write of a file takes space.
pub(crate) fn write(path: &Path, slot_bytes: usize, payload: &[u8]) -> io::Result<()> {
    let begun = Instant::now();
    let there = read_file(path, slot_bytes)?.and_then(|bytes| slots(&bytes, slot_bytes));
    let Some(there) = there else {
        // Fill both slots, so that the file holds a record at any moment.
        let first = encode(slot_bytes, 1, payload)?;
        return replace(path, &[&first[..], &first[..]].concat());
    };
    let sequence_of = |slot: &Option<Slot>| slot.as_ref().map_or(0, |slot| slot.sequence);
    let [first, second] = [sequence_of(&there[0]), sequence_of(&there[1])];
    let at = if first <= second { 0 } else { slot_bytes as u64 };
    let bytes = encode(slot_bytes, first.max(second) + 1, payload)?;
    let file = File::options().write(true).open(path)?;
    file.write_all_at(&bytes, at)?;
    file.sync_data()?;
    namespace::vouch(begun);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch_disk::Disk;

    const BYTES: usize = 2048;

    fn record(path: &Path) -> Content {
        read(path, BYTES).expect("it is read")
    }

    #[test]
    fn newest_record_is_read_and_other_formats_are_recognized() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("record");
        assert_eq!(record(&path), Content::Missing);
        std::fs::write(&path, "7\n").expect("the format before slots");
        assert_eq!(record(&path), Content::Plain(b"7\n".to_vec()));
        for payload in ["first", "second, which is longer", "", "fourth"] {
            write(&path, BYTES, payload.as_bytes()).expect("written");
            assert_eq!(record(&path), Content::Record(payload.as_bytes().to_vec()));
            assert_eq!(path.metadata().expect("there").len(), 2 * BYTES as u64);
        }
        assert!(write(&path, BYTES, &[0; BYTES]).is_err(), "it does not fit");
        assert_eq!(record(&path), Content::Record(b"fourth".to_vec()));
        std::fs::write(&path, [1; 2 * BYTES]).expect("damaged");
        assert_eq!(record(&path), Content::Damaged);
    }

    /// Tests a cut after any number of bytes, and any subset of the written sectors.
    #[test]
    fn interrupted_write_keeps_the_previous_record() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("record");
        write(&path, BYTES, b"oldest").expect("written");
        write(&path, BYTES, b"older").expect("written");
        for round in 0..3_u8 {
            let before = std::fs::read(&path).expect("read");
            let old = record(&path);
            write(&path, BYTES, &[b'a' + round; 1500]).expect("written");
            let after = std::fs::read(&path).expect("read");
            let new = record(&path);
            for cut in 0..before.len() {
                let content = interpret([&after[..cut], &before[cut..]].concat(), BYTES);
                assert!(content == old || content == new, "cut after {cut} bytes");
            }
            for sectors in 0..1_u32 << (before.len() / 512) {
                let sector = |nth: usize| if sectors >> nth & 1 == 1 { &after } else { &before };
                let bytes: Vec<u8> = (0..before.len() / 512)
                    .flat_map(|nth| sector(nth)[nth * 512..][..512].to_vec())
                    .collect();
                let content = interpret(bytes, BYTES);
                assert!(content == old || content == new, "sectors {sectors:b}");
            }
        }
    }

    #[test]
    fn record_written_on_a_full_file_system_survives_a_power_loss() {
        let Some(disk) = Disk::new("record_written_on_a_full_file_system_survives_a_power_loss") else {
            return;
        };
        let path = disk.path().join("record");
        write(&path, BYTES, b"first").expect("there is space");
        disk.fill();
        assert!(replace(&disk.path().join("other"), b"other").is_err(), "it is full");
        for payload in [b"second", b"third!"] {
            write(&path, BYTES, payload).expect("it takes no space");
            disk.lose_power();
            assert_eq!(record(&path), Content::Record(payload.to_vec()));
        }
    }
}
