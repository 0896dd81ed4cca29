//! fsx, the file system exerciser, in Rust: random operations on one file, with each result compared with the expected
//! content.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{Artefact, Cache, Recipe};
use crate::host;
use crate::progress::step;

const VERSION: &str = "0.3.2";

/// The cache entry: the program `bin/fsx`.
pub fn get(cache: &Cache) -> Result<Artefact> {
    let recipe = Recipe::default().with("version", VERSION).with("layout", "1");
    cache.get("fsx", &recipe, |into| step(&format!("building fsx {VERSION}"), || make(into)))
}

fn make(into: &Path) -> Result<()> {
    let target = into.join("target");
    let mut cargo = Command::new("cargo");
    cargo.args(["install", "fsx", "--quiet", "--locked", "--no-track", "--version", VERSION]);
    cargo.arg("--root").arg(into).arg("--target-dir").arg(&target);
    // These settings are only for our own build.
    cargo.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS").env_remove("CARGO_BUILD_TARGET");
    host::run(&mut cargo).context("cargo install fsx")?;
    std::fs::remove_dir_all(&target).context("remove what was built on the way")
}
