//! Files that are checked when they are read: each block of a file starts with the number of the file and of the block, so that
//! wrong data is not counted as throughput.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use anyhow::{Context, ensure};
use rustix::fs::{Advice, fadvise};

const BLOCK_BYTES: usize = 64 << 10;
/// Size of a read or write.
pub(super) const PIECE_BYTES: usize = 4 << 20;

/// A buffer for one file at a time. Its contents do not compress.
pub(super) struct Buffer(Vec<u8>);

impl Buffer {
    pub(super) fn new() -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = vec![0; PIECE_BYTES];
        for word in bytes.chunks_exact_mut(8) {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        Self(bytes)
    }

    /// Writes a file and syncs it.
    pub(super) fn write(&mut self, path: &Path, number: u64, bytes: u64) -> anyhow::Result<()> {
        let mut write = || -> std::io::Result<()> {
            let mut file = File::create(path)?;
            let mut at = 0;
            while at < bytes {
                let length = usize::try_from(bytes - at).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
                for (block, start) in heads(at, length) {
                    self.0[start..start + 16].copy_from_slice(&head(number, block));
                }
                file.write_all(&self.0[..length])?;
                at += length as u64;
            }
            file.sync_all()?;
            forget(&file)
        };
        write().with_context(|| format!("write {}", path.display()))
    }

    /// Reads a whole file and checks its size and blocks.
    pub(super) fn read(&mut self, path: &Path, number: u64, bytes: u64) -> anyhow::Result<()> {
        let mut file = File::open(path).with_context(|| format!("open {}", path.display()))?;
        let mut at = 0;
        loop {
            let length = fill(&mut file, &mut self.0).with_context(|| format!("read {}", path.display()))?;
            for (block, start) in heads(at, length) {
                ensure!(
                    self.0[start..start + 16] == head(number, block),
                    "{}: the data at byte {} is not what was written",
                    path.display(),
                    at + start as u64
                );
            }
            at += length as u64;
            if length < PIECE_BYTES {
                break;
            }
        }
        ensure!(at == bytes, "{}: {at} bytes of {bytes}", path.display());
        forget(&file).with_context(|| format!("drop the cache of {}", path.display()))
    }
}

/// Drops the file's pages from the client's cache: the next read goes to the server.
fn forget(file: &File) -> std::io::Result<()> {
    Ok(fadvise(file, 0, None, Advice::DontNeed)?)
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut File, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match file.read(&mut buffer[length..]) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

/// The blocks that begin within `length` bytes of a piece at offset `at`, and where in the piece. A last block without room for
/// a head has none.
fn heads(at: u64, length: usize) -> impl Iterator<Item = (u64, usize)> {
    let first = at / BLOCK_BYTES as u64;
    let starts = (0..length).step_by(BLOCK_BYTES).filter(move |start| length - start >= 16);
    starts.map(move |start| (first + (start / BLOCK_BYTES) as u64, start))
}

fn head(number: u64, block: u64) -> [u8; 16] {
    let mut head = [0; 16];
    head[..8].copy_from_slice(&number.to_le_bytes());
    head[8..].copy_from_slice(&block.to_le_bytes());
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_verifies_length_and_contents_of_written_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let mut buffer = Buffer::new();
        for bytes in [1, 16, 70_000, PIECE_BYTES as u64, 2 * PIECE_BYTES as u64 + 5] {
            buffer.write(&path, 7, bytes).expect("written");
            buffer.read(&path, 7, bytes).expect("read");
            assert!(buffer.read(&path, 7, bytes + 1).is_err(), "shorter than expected");
        }
        assert!(buffer.read(&path, 8, 2 * PIECE_BYTES as u64 + 5).is_err(), "the contents of another file");
        let mut contents = std::fs::read(&path).expect("contents");
        contents[PIECE_BYTES] ^= 1;
        std::fs::write(&path, contents).expect("written");
        let error = buffer.read(&path, 7, 2 * PIECE_BYTES as u64 + 5).expect_err("changed").to_string();
        assert!(error.contains(&format!("byte {PIECE_BYTES}")), "{error}");
    }
}
