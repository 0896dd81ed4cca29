//! The frequency of this machine's time stamp counter. QEMU's emulation gives guests this counter as theirs, and a guest's
//! kernel measures its frequency at boot. On a busy host that measurement can be wrong by a factor of 21, and all clocks and
//! timers of the guest then run too fast. So the guests get the frequency on their command line.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

/// A reading is used only if the clock was read this soon before and after: this thread was not preempted in between.
const CLOSE: Duration = Duration::from_micros(5);
const ATTEMPTS: usize = 1000;
/// Long enough for an error of at most 0.1 %.
const WINDOW: Duration = Duration::from_millis(20);

/// Returns the frequency in kHz, or `None` if it cannot be measured or this machine has no such counter.
pub fn kilohertz() -> Option<u64> {
    let (first, from) = reading()?;
    std::thread::sleep(WINDOW);
    let (last, to) = reading()?;
    let ticks = u128::from(last.checked_sub(first)?);
    u64::try_from(ticks * 1_000_000 / to.duration_since(from).as_nanos()).ok()
}

/// The counter, and the time of its reading.
fn reading() -> Option<(u64, Instant)> {
    (0..ATTEMPTS).find_map(|_| {
        let before = Instant::now();
        let ticks = counter()?;
        let gap = before.elapsed();
        (gap <= CLOSE).then_some((ticks, before + gap / 2))
    })
}

#[cfg(target_arch = "x86_64")]
fn counter() -> Option<u64> {
    // SAFETY: RDTSC has no operands and no effect on memory. Linux lets processes execute it.
    Some(unsafe { std::arch::x86_64::_rdtsc() })
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> Option<u64> {
    None
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn two_tsc_measurements_agree() {
        let [one, two] = [(); 2].map(|()| kilohertz().expect("a frequency"));
        assert!(one.abs_diff(two) * 200 < one, "{one} kHz, {two} kHz");
    }
}
