//! Training-shaped data: shards, small files, and their checksums.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::cache::hex;

/// Bytes per write or read, as in a checkpoint writer.
const BLOCK_BYTES: usize = 4 << 20;
/// Number of parallel readers and writers.
const WORKERS: usize = 4;

/// Bytes that look random and can be regenerated from their seed.
#[derive(Debug, Clone)]
pub struct Noise(u64);

impl Noise {
    /// The stream of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// The next number: SplitMix64.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Fills a buffer.
    pub fn fill(&mut self, buffer: &mut [u8]) {
        for chunk in buffer.chunks_mut(8) {
            let bytes = self.number().to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
    }

    /// This many bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut out = vec![0; count];
        self.fill(&mut out);
        out
    }
}

/// A file as it was written.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Sum {
    /// Path below the folder.
    pub path: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256 of its content.
    pub sha256: String,
}

/// Arguments of [`write_shards`].
#[derive(Debug, Serialize, Deserialize)]
pub struct Shards {
    /// Folder.
    pub folder: PathBuf,
    /// File name before the number.
    pub prefix: String,
    /// Number of files, one per rank.
    pub count: u32,
    /// Size of each.
    pub bytes: u64,
    /// Seed of the content.
    pub seed: u64,
}

/// Writes one file per rank, all ranks in parallel, and fsyncs each: a sharded checkpoint.
pub fn write_shards(shards: Shards) -> Result<Vec<Sum>> {
    fs::create_dir_all(&shards.folder)?;
    let write = |rank: u32| -> Result<Sum> {
        let name = format!("{}-{:05}-of-{:05}.bin", shards.prefix, rank, shards.count);
        let path = shards.folder.join(&name);
        let mut file = File::create(&path).with_context(|| path.display().to_string())?;
        let mut noise = Noise::new(shards.seed + u64::from(rank));
        let mut hash = Sha256::new();
        let mut left = shards.bytes;
        while left > 0 {
            let block = noise.bytes(left.min(BLOCK_BYTES as u64) as usize);
            hash.update(&block);
            file.write_all(&block).with_context(|| path.display().to_string())?;
            left -= block.len() as u64;
        }
        file.sync_all().with_context(|| format!("fsync {}", path.display()))?;
        Ok(Sum { path: name, bytes: shards.bytes, sha256: hex(&hash.finalize()) })
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..shards.count).map(|rank| scope.spawn(move || write(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a writer does not panic")).collect()
    })
}

/// Arguments of [`verify_sums`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sums {
    /// Folder.
    pub folder: PathBuf,
    /// The expected files.
    pub sums: Vec<Sum>,
}

/// Reads every file and compares size and checksum. Returns the number of bytes read.
pub fn verify_sums(Sums { folder, sums }: Sums) -> Result<u64> {
    let verify = |sum: &Sum| -> Result<u64> {
        let path = folder.join(&sum.path);
        let (bytes, sha256) = sum_of(&path)?;
        ensure!(bytes == sum.bytes, "{}: {bytes} bytes instead of {}", path.display(), sum.bytes);
        ensure!(sha256 == sum.sha256, "{}: content differs from what was written", path.display());
        Ok(bytes)
    };
    let share = sums.len().div_ceil(WORKERS).max(1);
    thread::scope(|scope| {
        let workers: Vec<_> = sums
            .chunks(share)
            .map(|sums| scope.spawn(move || sums.iter().map(verify).sum::<Result<u64>>()))
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("a reader does not panic")).sum()
    })
}

fn sum_of(path: &Path) -> Result<(u64, String)> {
    let doing = |what: &'static str| move || format!("{what} {}", path.display());
    let mut file = File::open(path).with_context(doing("open"))?;
    let mut hash = Sha256::new();
    let mut bytes = 0;
    let mut block = vec![0; BLOCK_BYTES.min(file.metadata().with_context(doing("stat"))?.len() as usize + 1)];
    loop {
        let count = file.read(&mut block).with_context(doing("read"))?;
        if count == 0 {
            return Ok((bytes, hex(&hash.finalize())));
        }
        hash.update(&block[..count]);
        bytes += count as u64;
    }
}

/// Arguments of [`make_tree`].
#[derive(Debug, Serialize, Deserialize)]
pub struct Tree {
    /// Folder, which is created.
    pub folder: PathBuf,
    /// Number of files.
    pub files: u32,
    /// Largest size; sizes vary below it.
    pub bytes_max: u64,
    /// Seed of names, sizes and contents.
    pub seed: u64,
}

/// Files in one folder of a [`Tree`].
const FILES_PER_FOLDER: u32 = 100;

/// Writes many small files: a data set.
pub fn make_tree(tree: Tree) -> Result<Vec<Sum>> {
    let make = |number: u32| -> Result<Sum> {
        let name = format!("class-{:03}/sample-{number:06}.bin", number / FILES_PER_FOLDER);
        let mut noise = Noise::new(tree.seed.wrapping_add(u64::from(number) << 20));
        let size = noise.number() % tree.bytes_max + 1;
        let content = noise.bytes(size as usize);
        let path = tree.folder.join(&name);
        fs::write(&path, &content).with_context(|| path.display().to_string())?;
        Ok(Sum { path: name, bytes: size, sha256: hex(&Sha256::digest(&content)) })
    };
    for folder in 0..tree.files.div_ceil(FILES_PER_FOLDER) {
        fs::create_dir_all(tree.folder.join(format!("class-{folder:03}")))?;
    }
    let numbers: Vec<u32> = (0..tree.files).collect();
    let share = numbers.len().div_ceil(WORKERS).max(1);
    thread::scope(|scope| {
        let workers: Vec<_> = numbers
            .chunks(share)
            .map(|numbers| {
                scope.spawn(move || numbers.iter().map(|number| make(*number)).collect::<Result<Vec<_>>>())
            })
            .collect();
        let mut out = Vec::new();
        for worker in workers {
            out.extend(worker.join().expect("a writer does not panic")?);
        }
        Ok(out)
    })
}

/// A folder's content, in one value.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct TreeDigest {
    /// Number of files.
    pub files: u64,
    /// Sum of their sizes.
    pub bytes: u64,
    /// SHA-256 of all paths, kinds, sizes and contents.
    pub sha256: String,
}

/// Reads a whole folder.
pub fn digest_tree(folder: PathBuf) -> Result<TreeDigest> {
    let mut paths = Vec::new();
    let mut todo = vec![folder.clone()];
    while let Some(next) = todo.pop() {
        for entry in fs::read_dir(&next).with_context(|| next.display().to_string())? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                todo.push(entry.path());
            }
            paths.push((entry.path(), entry.file_type()?));
        }
    }
    paths.sort_by(|a, b| a.0.cmp(&b.0));
    let mut hash = Sha256::new();
    let (mut files, mut bytes) = (0, 0);
    for (path, kind) in paths {
        let below = path.strip_prefix(&folder).expect("it was found below the folder");
        hash.update(below.as_os_str().as_encoded_bytes());
        if kind.is_file() {
            let (size, sum) = sum_of(&path)?;
            hash.update(format!(" file {size} {sum}\n"));
            files += 1;
            bytes += size;
        } else if kind.is_dir() {
            hash.update(" folder\n");
        } else if kind.is_symlink() {
            hash.update(format!(" link {}\n", fs::read_link(&path)?.display()));
        } else {
            bail!("{}: neither file, folder nor link", path.display());
        }
    }
    Ok(TreeDigest { files, bytes, sha256: hex(&hash.finalize()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verification_finds_flipped_bytes_and_truncated_and_missing_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path().to_owned();
        let shards =
            || Shards { folder: at.clone(), prefix: "rank".into(), count: 3, bytes: 5_000_001, seed: 9 };
        let sums = write_shards(shards()).expect("written");
        let verify = || verify_sums(Sums { folder: at.clone(), sums: sums.clone() });
        assert_eq!(verify().expect("all there"), 15_000_003);
        let path = at.join(&sums[1].path);
        let good = fs::read(&path).expect("its content");
        let mut bad = good.clone();
        bad[4_200_000] ^= 1;
        for (content, said) in [(&bad[..], "content differs"), (&good[..100], "100 bytes instead")] {
            fs::write(&path, content).expect("damaged");
            let error = verify().expect_err("the damage is found");
            assert!(format!("{error:#}").contains(said), "{error:#}");
        }
        fs::remove_file(&path).expect("removed");
        verify().expect_err("the loss is found");
    }

    #[test]
    fn tree_digest_depends_on_names_and_contents() {
        let folder = tempfile::tempdir().expect("a folder");
        let tree = |name: &str, seed| {
            let at = folder.path().join(name);
            make_tree(Tree { folder: at.clone(), files: 120, bytes_max: 300, seed }).expect("made");
            at
        };
        let (one, same, other) = (tree("a", 1), tree("b", 1), tree("c", 2));
        let digest = |at: &Path| digest_tree(at.to_owned()).expect("read");
        assert_eq!(digest(&one).files, 120);
        assert_eq!(digest(&one), digest(&same));
        assert_ne!(digest(&one).sha256, digest(&other).sha256);
        fs::rename(same.join("class-000/sample-000003.bin"), same.join("class-000/renamed"))
            .expect("renamed");
        assert_ne!(digest(&one).sha256, digest(&same).sha256);
    }
}
