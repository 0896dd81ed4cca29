//! One line per step on standard error, with the time since the start.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

static START: OnceLock<Instant> = OnceLock::new();

/// Prints a line with the time since the first line.
pub fn say(line: impl AsRef<str>) {
    let elapsed = START.get_or_init(Instant::now).elapsed();
    eprintln!("[{:7.1}s] {}", elapsed.as_secs_f64(), line.as_ref());
}

/// Runs a step and prints how long it took.
pub fn step<T, E>(what: &str, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    say(format!("{what} ..."));
    let started = Instant::now();
    let result = work();
    match &result {
        Ok(_) => say(format!("{what}: done in {}", seconds(started.elapsed()))),
        Err(_) => say(format!("{what}: FAILED after {}", seconds(started.elapsed()))),
    }
    result
}

/// Formats a duration for people.
pub fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}
