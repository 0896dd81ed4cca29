//! Test suites for file systems, in Rust, from the registry of crates.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{Cache, Recipe};
use crate::host;
use crate::progress::step;

/// A suite: a crate with a program of the same name.
#[derive(Debug, Clone, Copy)]
pub struct Suite {
    name: &'static str,
    version: &'static str,
}

/// The file system exerciser: random operations on one file, with each result compared with the expected content.
pub const FSX: Suite = Suite { name: "fsx", version: "0.3.2" };
/// The conformance tests for the system calls of a POSIX file system.
pub const PJDFSTEST: Suite = Suite { name: "pjdfstest", version: "0.2.2" };
/// All of them.
pub const ALL: [Suite; 2] = [FSX, PJDFSTEST];

impl Suite {
    /// The program, from the cache.
    pub fn get(self, cache: &Cache) -> Result<Vec<u8>> {
        let recipe = Recipe::default().with("version", self.version).with("layout", "1");
        let title = format!("building {} {}", self.name, self.version);
        let entry = cache.get(self.name, &recipe, |into| step(&title, || self.make(into)))?;
        let program = entry.file(&format!("bin/{}", self.name));
        fs::read(&program).with_context(|| format!("read {}", program.display()))
    }

    fn make(self, into: &Path) -> Result<()> {
        let target = into.join("target");
        let mut cargo = Command::new("cargo");
        cargo.args(["install", self.name, "--quiet", "--locked", "--no-track", "--version", self.version]);
        cargo.arg("--root").arg(into).arg("--target-dir").arg(&target);
        // These settings are only for our own build.
        cargo.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS").env_remove("CARGO_BUILD_TARGET");
        host::run(&mut cargo).with_context(|| format!("cargo install {}", self.name))?;
        fs::remove_dir_all(&target).context("remove what was built on the way")
    }
}
