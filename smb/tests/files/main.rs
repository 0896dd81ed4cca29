//! Conversations about files, against a file system in memory.
#![allow(
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    dead_code,
    reason = "tests, of which each uses a part of the calls"
)]

#[path = "../support/mod.rs"]
mod support;

mod app_instances;
mod budget;
mod caching;
mod calls;
mod cancelling;
mod copying;
mod creating;
mod deleting;
mod descriptors;
mod dir_leases;
mod directories;
mod durable;
mod durable_leases;
mod eas;
mod failover;
mod histories;
mod hostile;
mod information;
mod links;
mod locking;
mod lost;
mod memory;
mod moving;
mod pipes;
mod posix;
mod rdma;
mod reading_and_writing;
mod renaming;
mod reparse;
mod replay;
mod short_names;
mod streams;
mod transform;
mod volumes;
mod watching;
