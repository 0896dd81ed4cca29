//! QEMU 10 from Debian's backports, unpacked: it emulates much faster than the 7.2 in Debian 12.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use super::Versions;
use crate::cache::{Artefact, Cache, Recipe};
use crate::host::{self, Archive};
use crate::progress::step;

/// Packages to unpack.
pub const PACKAGES: &[&str] = &["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];

/// The release of a package.
pub fn release_of(package: &str) -> &'static str {
    if package == "seabios" { "bookworm" } else { "bookworm-backports" }
}

/// The cache entry.
pub fn get(cache: &Cache, versions: &Versions) -> Result<Artefact> {
    let pinned = versions.pinned(PACKAGES)?;
    let recipe = Recipe::default().with("packages", pinned.join("\n"));
    let entry = cache.get("qemu", &recipe, |into| {
        step("unpacking QEMU", || Archive::open(&cache.root().join("apt"), false)?.unpack(&pinned, into))
    })?;
    if cache.is_looking() {
        return Ok(entry);
    }
    // A library may be missing although the entry exists: the cache can outlive the machine's installation.
    if command(entry.path()).arg("--version").output().map_or(true, |output| !output.status.success()) {
        host::ensure_packages(host::QEMU_PACKAGES)?;
        let output = command(entry.path()).arg("--version").output()?;
        if !output.status.success() {
            bail!("QEMU does not start: {}", String::from_utf8_lossy(&output.stderr).trim_end());
        }
    }
    Ok(entry)
}

/// A QEMU command with the paths of its firmware.
pub fn command(entry: &Path) -> Command {
    let mut command = Command::new(entry.join("usr/bin/qemu-system-x86_64"));
    for folder in ["usr/share/qemu", "usr/share/seabios"] {
        command.arg("-L").arg(entry.join(folder));
    }
    command
}
