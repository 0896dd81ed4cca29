//! Random histories of caching clients, checked against a model: leases, oplocks, share modes, byte-range locks and deletion.
//!
//! Each history has three clients and two files. The clients behave as [MS-SMB2] 3.2.4 and 3.2.5 require: they keep what they
//! read, write back later and keep handles if they may, and give that up after a break, immediately, late or never. After every
//! step, the following holds:
//! - a program that reads, from a cache or the server, gets what any program on any client wrote last;
//! - an open, READ, WRITE or LOCK is refused exactly if the model refuses it, with the model's status;
//! - a client writes to its cache only while no other client has the file open; a break revokes what was granted, with an
//!   acknowledgment if one is due; data that others have changed is no longer used;
//! - a request waits only as long as something blocks it;
//! - after everything is closed, nothing remains.
//!
//! A failure prints the seed and what happened; `FOREBAY_HISTORY=SEED` runs that history alone.

mod model;
mod random;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use world::{Counts, World};

const HISTORIES: u64 = 10_000;
const STEPS: usize = 40;

#[test]
fn clients_agree_on_every_file_in_all_histories() {
    if let Ok(seed) = std::env::var("FOREBAY_HISTORY") {
        World::new(seed.parse().expect("a seed")).run(STEPS);
        return;
    }
    let (next, total) = (AtomicU64::new(0), Mutex::new(Counts::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= HISTORIES {
                        return;
                    }
                    let counts = World::new(seed).run(STEPS);
                    let mut total = total.lock().unwrap();
                    for (what, count) in counts {
                        *total.entry(what).or_default() += count;
                    }
                }
            });
        }
    });
    let total = total.into_inner().unwrap();
    println!("{total:#?}");
    assert_eq!(total.len(), 12, "something never happened");
    assert!(total.values().all(|count| *count >= 100), "something happened too rarely: {total:?}");
}
