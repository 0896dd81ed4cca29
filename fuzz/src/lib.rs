//! Fuzz targets for all code that parses a peer's input. `fuzz/run` runs them; `smb/tests/codec/hostile.rs` and
//! `smbdirect/tests/codec.rs` run the same functions over the same corpora in every test run.

pub mod smbdirect;
pub mod targets;
