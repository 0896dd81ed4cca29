//! Our binaries on a separate read-only disk, so that a code change does not require a new root.
//!
//! The disk is rebuilt for each lab, in the lab's own folder. That takes less than a second, and an image that a guest has
//! mounted is never rewritten.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::host;

/// No guest can start without it.
const REQUIRED: &str = "forebay-guest";
/// Included if they are built.
const OPTIONAL: &[&str] = &["forebay-server", "forebay-csi", "forebay-target"];

/// Builds `<into>/product.erofs` from the binaries next to this one, or in `$FOREBAY_BINARIES`.
pub fn make(into: &Path) -> Result<PathBuf> {
    let from = binaries()?;
    let staging = into.join("product");
    let bin = staging.join("bin");
    fs::create_dir_all(&bin)?;
    let required = from.join(REQUIRED);
    if !required.exists() {
        anyhow::bail!("{} is not built; run:  cargo build -p forebay-e2e --bins", required.display());
    }
    for name in std::iter::once(&REQUIRED).chain(OPTIONAL) {
        let path = from.join(name);
        if path.exists() {
            // Stripped: the guest would never read the debug information, a third of a gigabyte.
            let copy = bin.join(name);
            host::run(Command::new("strip").arg("--strip-debug").arg("-o").arg(&copy).arg(&path))
                .or_else(|_| fs::copy(&path, &copy).map(|_| String::new()).map_err(anyhow::Error::from))
                .with_context(|| format!("copy {}", path.display()))?;
        }
    }
    let image = into.join("product.erofs");
    host::run(Command::new("mkfs.erofs").arg(&image).arg(&staging))?;
    fs::remove_dir_all(&staging)?;
    Ok(image)
}

/// The folder of our binaries.
pub fn binaries() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("FOREBAY_BINARIES") {
        return Ok(PathBuf::from(folder));
    }
    let own = std::env::current_exe()?;
    Ok(own.parent().context("this binary lies in a folder")?.to_owned())
}

/// Whether this binary is built and will be on the nodes.
pub fn has(name: &str) -> bool {
    binaries().is_ok_and(|folder| folder.join(name).exists())
}
