//! The codec: it reads what it wrote, and refuses what it cannot read without panics or large allocations.

#[path = "codec/allocation.rs"]
mod allocation;
#[path = "codec/corpus.rs"]
mod corpus;
#[path = "codec/hostile.rs"]
mod hostile;
#[path = "codec/known_bytes.rs"]
mod known_bytes;
#[path = "codec/roundtrip.rs"]
mod roundtrip;
#[path = "codec/samples.rs"]
mod samples;
/// The fuzz targets, run here over the committed corpora.
#[allow(unreachable_pub, reason = "public in the crate of the fuzz targets")]
#[path = "../../fuzz/src/targets.rs"]
mod targets;
