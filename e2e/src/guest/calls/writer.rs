//! A writer that reports which files it has fsynced, and a check that those are intact.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::data::{Noise, Sums, verify_sums};

fn name(number: u64) -> String {
    format!("record-{number:08}")
}

fn content(seed: u64, number: u64) -> Vec<u8> {
    let mut noise = Noise::new(seed ^ (number << 24));
    let size = 1 + noise.number() as usize % (256 << 10);
    noise.bytes(size)
}

/// Writes and fsyncs file after file and prints `synced <number>` or `failed <number> <call>: <reason>`, until standard input
/// ends. Waits for `pause` after each file.
pub fn record(folder: &Path, seed: u64, pause: Duration) -> Result<()> {
    let over = over_with_input();
    let mut out = std::io::stdout();
    for number in 0.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let write = || -> Result<()> {
            let mut file = File::create(folder.join(name(number))).context("open")?;
            file.write_all(&content(seed, number)).context("write")?;
            file.sync_all().context("fsync")
        };
        match write() {
            Ok(()) => writeln!(out, "synced {number}")?,
            Err(error) => {
                writeln!(out, "failed {number} {error:#}")?;
                // Do not spin through an outage: the numbers are finite.
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        out.flush()?;
        std::thread::sleep(pause);
    }
    Ok(())
}

/// Set once standard input ends.
fn over_with_input() -> Arc<AtomicBool> {
    let over = Arc::new(AtomicBool::new(false));
    let ended = over.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ended.store(true, Ordering::Relaxed);
    });
    over
}

/// Repeatedly reads and compares everything and prints `verified <pass>` or `failed <pass> <reason>`, until standard input
/// ends.
pub fn verify_repeatedly(sums: &Sums) -> Result<()> {
    let over = over_with_input();
    let mut out = std::io::stdout();
    for pass in 0.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        match verify_sums(sums.clone()) {
            Ok(_) => writeln!(out, "verified {pass}")?,
            Err(error) => {
                writeln!(out, "failed {pass} {error:#}")?;
                // Do not spin through an outage.
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        out.flush()?;
    }
    Ok(())
}

/// Arguments of [`verify`].
#[derive(Debug, Serialize, Deserialize)]
pub struct Records {
    /// Folder.
    pub folder: PathBuf,
    /// The seed that was passed to [`record`].
    pub seed: u64,
    /// The files that were reported as synced.
    pub numbers: Vec<u64>,
}

/// Compares the files byte for byte. Returns the number of bytes.
pub fn verify(Records { folder, seed, numbers }: Records) -> Result<u64> {
    let mut bytes = 0;
    for number in numbers {
        let expected = content(seed, number);
        let path = folder.join(name(number));
        let found = fs::read(&path).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
        ensure!(
            found.len() == expected.len(),
            "{}: {} bytes of {}",
            path.display(),
            found.len(),
            expected.len()
        );
        let differs =
            || found.iter().zip(&expected).enumerate().filter(|(_, (found, expected))| found != expected);
        if let (Some((first, _)), Some((last, _))) = (differs().next(), differs().next_back()) {
            let zeros = if differs().all(|(_, (found, _))| *found == 0) { ", all of them zeros" } else { "" };
            bail!(
                "{}: content differs from what was fsynced: {} of {} bytes, from byte {first} to {last}{zeros}",
                path.display(),
                differs().count(),
                found.len()
            );
        }
        bytes += found.len() as u64;
    }
    Ok(bytes)
}
