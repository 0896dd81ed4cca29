//! The pod of a rehearsal: writes and syncs a record every tenth of a second, notes when that takes long, and at the end reads
//! every record that was acknowledged.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};

use super::MARK;

const BEAT: Duration = Duration::from_millis(100);
/// A write that takes longer is shown: clients wait for a server.
const LONG: Duration = Duration::from_millis(500);
const RECORD_BYTES: usize = 4096;
/// Errors that are kept word for word.
const ERRORS_MAX: usize = 20;

/// A time in which the writer stood still.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Gap {
    /// By the clock of the pod's node, in milliseconds since 1970.
    pub(super) from: u64,
    pub(super) milliseconds: u64,
}

/// What the writer has seen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Seen {
    /// Records that were written and synced.
    pub(super) acknowledged: u64,
    pub(super) gaps: Vec<Gap>,
    /// Writes and syncs that failed.
    pub(super) failed: u64,
    pub(super) errors: Vec<String>,
    /// Acknowledged records that are not there at the end.
    pub(super) lost: u64,
}

/// Writes for this time, checks, and prints the result.
pub(super) fn run(folder: &Path, duration: Duration) -> anyhow::Result<()> {
    let path = folder.join("records");
    let mut seen = Seen::default();
    let mut acknowledged = Vec::new();
    let file = File::create(&path).with_context(|| format!("make {}", path.display()))?;
    println!("a record every {} ms", BEAT.as_millis());
    let until = Instant::now() + duration;
    for number in 0.. {
        let began = Instant::now();
        if began >= until {
            break;
        }
        let from = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let written =
            file.write_all_at(&record(number), number * RECORD_BYTES as u64).and_then(|()| file.sync_data());
        let took = began.elapsed();
        match written {
            Ok(()) => acknowledged.push(number),
            Err(error) => {
                seen.failed += 1;
                if seen.errors.len() < ERRORS_MAX {
                    seen.errors.push(format!("record {number}: {error}"));
                }
            }
        }
        if took > LONG {
            let milliseconds = took.as_millis() as u64;
            println!("the writer stood still for {milliseconds} ms");
            seen.gaps.push(Gap { from, milliseconds });
        }
        std::thread::sleep(BEAT.saturating_sub(took));
    }
    drop(file);
    let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
    fadvise(&file, 0, None, Advice::DontNeed).context("drop the cache")?;
    seen.acknowledged = acknowledged.len() as u64;
    seen.lost = lost(&file, &acknowledged);
    println!("{MARK}{}", serde_json::to_string(&seen)?);
    Ok(())
}

/// Counts the records that cannot be read or have other contents.
fn lost(file: &File, acknowledged: &[u64]) -> u64 {
    let mut found = [0; RECORD_BYTES];
    let is_lost = |number: &&u64| {
        file.read_exact_at(&mut found, **number * RECORD_BYTES as u64).is_err() || found != record(**number)
    };
    acknowledged.iter().filter(is_lost).count() as u64
}

fn record(number: u64) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    for word in record.chunks_exact_mut(8) {
        word.copy_from_slice(&(number + 1).to_le_bytes());
    }
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_corrupted_records_are_counted_as_lost() {
        let folder = tempfile::tempdir().expect("a folder");
        run(folder.path(), Duration::from_millis(350)).expect("written");
        let path = folder.path().join("records");
        let file = File::options().read(true).write(true).open(&path).expect("the records");
        let written = file.metadata().expect("metadata").len() / RECORD_BYTES as u64;
        assert!(written >= 2, "{written} records");
        let all: Vec<u64> = (0..written).collect();
        assert_eq!(lost(&file, &all), 0);
        file.write_all_at(b"x", 5).expect("damaged");
        file.set_len((written - 1) * RECORD_BYTES as u64).expect("shortened");
        assert_eq!(lost(&file, &all), 2);
        assert_eq!(lost(&file, &all[1..1]), 0);
    }
}
