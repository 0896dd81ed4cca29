//! Quality of service of a volume: its limits per second, and its priority.
//!
//! The limits are two meters by the generic cell rate algorithm (ITU-T I.371). Each holds the time at which the cost of
//! everything that was begun is paid. An operation begins if that time is at most [`QOS_BURST`] ahead, and moves it by the
//! operation's cost. So an operation of any size begins immediately on an idle volume, and the next ones wait for it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::limits::{QOS_BURST, QOS_BYTES_PER_SECOND_MIN, QOS_OPERATIONS_PER_SECOND_MIN, TURN_BYTES_MAX};

/// The order of volumes if several have READs and WRITEs to begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// Before all others.
    High,
    /// The default.
    #[default]
    Normal,
    /// After all others.
    Low,
}

impl Priority {
    /// All priorities, highest first.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];

    /// Bytes of READs and WRITEs that one turn of an event loop begins for all volumes of this priority. Never zero: a
    /// volume of low priority gets less, but does not starve.
    #[must_use]
    pub fn turn_bytes_max(self) -> u64 {
        match self {
            Self::High => TURN_BYTES_MAX * 4,
            Self::Normal => TURN_BYTES_MAX,
            Self::Low => TURN_BYTES_MAX / 4,
        }
    }
}

/// Limits and priority of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Qos {
    /// Bytes per second that are read, written or copied; 0: no limit.
    pub bytes_per_second: u64,
    /// Operations per second; 0: no limit.
    pub operations_per_second: u64,
    /// The volume's priority.
    pub priority: Priority,
}

impl Qos {
    /// Whether it has no limits and normal priority.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        for (name, value, least) in [
            ("bytes_per_second", self.bytes_per_second, QOS_BYTES_PER_SECOND_MIN),
            ("operations_per_second", self.operations_per_second, QOS_OPERATIONS_PER_SECOND_MIN),
        ] {
            if value != 0 && value < least {
                return Err(format!("qos.{name} must be 0 (no limit) or at least {least}"));
            }
        }
        Ok(())
    }
}

/// Enforces the limits of one volume, on all event loops.
#[derive(Debug, Default)]
pub struct Limiter {
    /// Read for each operation, so that a volume without limits takes no lock.
    limited: AtomicBool,
    priority: AtomicU8,
    throttled: AtomicU64,
    meters: Mutex<Meters>,
}

#[derive(Debug, Default)]
struct Meters {
    bytes: Meter,
    operations: Meter,
}

#[derive(Debug, Default)]
struct Meter {
    /// 0: no limit.
    per_second: u64,
    /// When everything that was begun is paid.
    paid: Option<Instant>,
}

impl Meter {
    fn set(&mut self, per_second: u64) {
        if self.per_second != per_second {
            // The debt at the former rate does not apply to the new one.
            *self = Self { per_second, paid: None };
        }
    }

    /// When the next operation may begin, if not now.
    fn due(&self, now: Instant) -> Option<Instant> {
        self.paid.and_then(|paid| paid.checked_sub(QOS_BURST)).filter(|due| *due > now)
    }

    fn charge(&mut self, now: Instant, amount: u64) {
        if self.per_second > 0 {
            let cost = Duration::from_secs_f64(amount as f64 / self.per_second as f64);
            self.paid = Some(self.paid.map_or(now, |paid| paid.max(now)) + cost);
        }
    }
}

impl Limiter {
    /// Applies limits and priority from now on.
    pub fn set(&self, qos: &Qos) {
        let mut meters = self.lock();
        meters.bytes.set(qos.bytes_per_second);
        meters.operations.set(qos.operations_per_second);
        self.limited.store(qos.bytes_per_second > 0 || qos.operations_per_second > 0, Ordering::Relaxed);
        self.priority.store(qos.priority as u8, Ordering::Relaxed);
    }

    /// Whether there is any limit.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.limited.load(Ordering::Relaxed)
    }

    /// The volume's priority.
    #[must_use]
    pub fn priority(&self) -> Priority {
        Priority::ALL[usize::from(self.priority.load(Ordering::Relaxed))]
    }

    /// Counts an operation that has to wait.
    pub fn throttle(&self) {
        self.throttled.fetch_add(1, Ordering::Relaxed);
    }

    /// Operations that had to wait.
    #[must_use]
    pub fn throttled(&self) -> u64 {
        self.throttled.load(Ordering::Relaxed)
    }

    /// Counts an operation of `bytes` that begins now.
    ///
    /// # Errors
    /// When to try again: the limits do not permit it to begin now, and it is not counted.
    pub fn begin(&self, now: Instant, bytes: u64) -> Result<(), Instant> {
        let mut meters = self.lock();
        let due = meters.bytes.due(now).max(meters.operations.due(now));
        if let Some(due) = due {
            return Err(due);
        }
        meters.bytes.charge(now, bytes);
        meters.operations.charge(now, 1);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Meters> {
        self.meters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn limiter(bytes_per_second: u64, operations_per_second: u64) -> Limiter {
        let limiter = Limiter::default();
        limiter.set(&Qos { bytes_per_second, operations_per_second, priority: Priority::Normal });
        limiter
    }

    /// Bytes that begin within `time` if there are always operations of `bytes` waiting.
    fn begun(limiter: &Limiter, start: Instant, time: Duration, bytes: u64) -> u64 {
        let (mut now, mut begun) = (start, 0);
        while now < start + time {
            match limiter.begin(now, bytes) {
                Ok(()) => begun += bytes,
                Err(due) => {
                    assert!(due > now, "a wait of no time would spin");
                    now = due;
                }
            }
        }
        begun
    }

    #[test]
    fn volume_gets_its_bytes_per_second_plus_one_burst() {
        let start = Instant::now();
        for bytes in [4096, MIB, 8 * MIB] {
            let begun = begun(&limiter(100 * MIB, 0), start, Duration::from_secs(10), bytes);
            let most = 1000 * MIB + 10 * MIB + bytes;
            assert!((1000 * MIB..=most).contains(&begun), "{bytes}: {begun}");
        }
    }

    #[test]
    fn tighter_of_the_operation_and_byte_limits_applies() {
        let start = Instant::now();
        let ten_seconds = Duration::from_secs(10);
        let operations = begun(&limiter(0, 50), start, ten_seconds, 1);
        assert!((500..=506).contains(&operations), "{operations}");
        let bytes = begun(&limiter(MIB, 50), start, ten_seconds, MIB);
        assert!((10 * MIB..=12 * MIB).contains(&bytes), "{bytes}");
    }

    #[test]
    fn idle_volume_admits_the_largest_operation_but_saves_only_one_burst() {
        let limiter = limiter(MIB, 0);
        let start = Instant::now();
        assert_eq!(limiter.begin(start, 8 * MIB), Ok(()));
        let due = limiter.begin(start, 1).expect_err("the previous operation is not paid for yet");
        assert_eq!(due, start + Duration::from_secs(8) - QOS_BURST);
        let later = start + Duration::from_secs(3600);
        let burst = begun(&limiter, later, Duration::from_nanos(1), 4096);
        assert!(burst <= MIB / 10 + 2 * 4096, "{burst}");
    }

    #[test]
    fn changed_limits_apply_at_once_and_clear_the_debt() {
        let limiter = limiter(MIB, 0);
        let now = Instant::now();
        assert_eq!(limiter.begin(now, 8 * MIB), Ok(()));
        let same = Qos { bytes_per_second: MIB, ..Qos::default() };
        limiter.set(&same);
        assert!(limiter.begin(now, 1).is_err(), "nothing has changed");
        limiter.set(&Qos { bytes_per_second: 100 * MIB, ..same });
        assert_eq!(limiter.begin(now, 1), Ok(()));
        limiter.set(&Qos { priority: Priority::Low, ..Qos::default() });
        assert!(!limiter.is_limited() && limiter.priority() == Priority::Low);
    }

    #[test]
    fn limits_below_the_minimum_are_refused() {
        for (bytes_per_second, operations_per_second) in [(1, 0), (0, 1), (MIB - 1, 100)] {
            let qos = Qos { bytes_per_second, operations_per_second, priority: Priority::Normal };
            let error = qos.check().expect_err("too small");
            assert!(error.contains("per_second") && error.contains("at least"), "{error}");
        }
        assert_eq!(
            Qos { bytes_per_second: MIB, operations_per_second: 10, ..Qos::default() }.check(),
            Ok(())
        );
        assert_eq!(Qos::default().check(), Ok(()));
    }

    #[test]
    fn every_priority_has_a_share_of_every_turn() {
        let shares = Priority::ALL.map(Priority::turn_bytes_max);
        assert!(shares.is_sorted_by(|a, b| a > b) && shares[2] > 0, "{shares:?}");
    }
}
