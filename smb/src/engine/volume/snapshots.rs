//! Snapshots of a volume, which clients name by the time at which they were taken ([MS-SMB2] 2.2.13.2.7, 2.2.32.2).
//!
//! Each snapshot is a separate read-only volume below the same share. It ends with its last open. A snapshot that was
//! removed is not found any more.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::engine::mailbox::Mailbox;
use crate::engine::volume::Volume;
use crate::fs::FsHandle;
use crate::sync::Mutex;

/// 100 ns.
const UNITS_PER_SECOND: u64 = 10_000_000;
const SECONDS_PER_DAY: u64 = 86_400;
/// Days from 0000-03-01, at which the calendar's cycles begin, to 1601-01-01.
const DAYS_TO_1601: u64 = 584_694;

/// A snapshot that clients may access.
#[derive(Clone, Debug)]
pub struct SnapshotConfig {
    /// When it was taken, FILETIME.
    pub taken: u64,
    /// Root of the snapshot in the backend. The same root denotes the same snapshot.
    pub backend: FsHandle,
}

struct Snapshot {
    taken: u64,
    volume: Arc<Volume>,
}

/// The snapshots of one volume, the newest first.
#[derive(Default)]
pub(crate) struct Snapshots(Mutex<Vec<Snapshot>>);

impl Snapshots {
    /// Replaces the snapshots. Those that stay keep their opens. Of the others, open files can still be read, but
    /// directories cannot be listed.
    pub(crate) fn set(&self, of: &Volume, mut configs: Vec<SnapshotConfig>, mailbox: &Arc<Mailbox>) {
        configs.sort_by_key(|config| std::cmp::Reverse(config.taken));
        let mut snapshots = self.0.lock().expect("no panic under this lock");
        let before = std::mem::take(&mut *snapshots);
        snapshots.extend(configs.into_iter().map(|SnapshotConfig { taken, backend }| {
            let same = before.iter().find(|snapshot| Arc::ptr_eq(&snapshot.volume.backend.0, &backend.0));
            let volume = match same {
                Some(snapshot) => Arc::clone(&snapshot.volume),
                None => Arc::new(Volume::snapshot_of(of, backend, Arc::clone(mailbox))),
            };
            Snapshot { taken, volume }
        }));
        for snapshot in before {
            if !snapshots.iter().any(|kept| Arc::ptr_eq(&kept.volume, &snapshot.volume)) {
                snapshot.volume.removed.store(true, Ordering::Release);
            }
        }
    }

    /// Returns the snapshot that was taken in this second. Clients name it by a token, which has no fraction.
    pub(crate) fn find(&self, time: u64) -> Option<Arc<Volume>> {
        let second = time / UNITS_PER_SECOND;
        let snapshots = self.0.lock().expect("no panic under this lock");
        let found = snapshots.iter().find(|snapshot| snapshot.taken / UNITS_PER_SECOND == second);
        found.map(|snapshot| Arc::clone(&snapshot.volume))
    }

    /// Returns the `@GMT-YYYY.MM.DD-HH.MM.SS` of all snapshots, each once.
    pub(crate) fn tokens(&self) -> Vec<String> {
        let snapshots = self.0.lock().expect("no panic under this lock");
        let mut tokens: Vec<String> = snapshots.iter().map(|snapshot| token(snapshot.taken)).collect();
        tokens.dedup();
        tokens
    }

    /// Returns the volumes of the snapshots.
    pub(crate) fn volumes(&self) -> Vec<Arc<Volume>> {
        let snapshots = self.0.lock().expect("no panic under this lock");
        snapshots.iter().map(|snapshot| Arc::clone(&snapshot.volume)).collect()
    }
}

/// The token of a FILETIME ([MS-SMB2] 2.2.32.2).
fn token(time: u64) -> String {
    let seconds = time / UNITS_PER_SECOND;
    let (days, second) = (seconds / SECONDS_PER_DAY, seconds % SECONDS_PER_DAY);
    let (year, month, day) = date(days + DAYS_TO_1601);
    let mut token = String::with_capacity(24);
    let _ = write!(
        token,
        "@GMT-{year:04}.{month:02}.{day:02}-{:02}.{:02}.{:02}",
        second / 3600,
        second / 60 % 60,
        second % 60
    );
    token
}

/// Converts days since 0000-03-01 of the Gregorian calendar to year, month and day. Years begin in March here, so that a
/// leap day ends one.
fn date(days: u64) -> (u64, u64, u64) {
    const DAYS_PER_400_YEARS: u64 = 146_097;
    let (era, day_of_era) = (days / DAYS_PER_400_YEARS, days % DAYS_PER_400_YEARS);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshot_tokens_encode_the_utc_date_and_time() {
        for (seconds_since_1970, expected) in [
            (-11_644_473_600_i64, "@GMT-1601.01.01-00.00.00"),
            (0, "@GMT-1970.01.01-00.00.00"),
            (951_782_399, "@GMT-2000.02.28-23.59.59"),
            (951_782_400, "@GMT-2000.02.29-00.00.00"),
            (951_868_800, "@GMT-2000.03.01-00.00.00"),
            (1_764_087_129, "@GMT-2025.11.25-16.12.09"),
            (1_798_761_599, "@GMT-2026.12.31-23.59.59"),
            (4_107_542_400, "@GMT-2100.03.01-00.00.00"),
        ] {
            let time = (seconds_since_1970 + 11_644_473_600).cast_unsigned() * UNITS_PER_SECOND;
            assert_eq!(token(time), expected);
            assert_eq!(token(time + 9_999_999), expected, "without the fraction");
        }
    }
}
