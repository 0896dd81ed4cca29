//! Fuzz targets over everything that reads what a peer sends. `fuzz/run` runs them; `smb/tests/codec_hostile.rs` runs the
//! same functions over the same corpora in every test run.

pub mod targets;
