//! Random histories of clients that cache, checked against a model: leases, oplocks, share modes, byte-range locks and deletion.
//!
//! Each history has three clients and two files. The clients behave as [MS-SMB2] 3.2.4 and 3.2.5 want it: they keep
//! what they read, write later and keep handles where they may, and give that up when it is broken, at once or late or never.
//! After every step it holds that
//! - whatever a program reads, from a cache or the server, is what was written last by any program on any client;
//! - an open, READ, WRITE or LOCK is refused exactly where the model says so, with the status that it says;
//! - a client writes to its cache only while no other has the file open; a break takes away what was granted, with an
//!   acknowledgment where one is due; what others have changed is not used any longer;
//! - a request waits only as long as there is something to wait for;
//! - when everything is closed, nothing is left of it.
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
