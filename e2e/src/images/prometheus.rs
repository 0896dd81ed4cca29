//! Prometheus and promtool from Debian, unpacked, to validate dashboards and alerts.

use std::path::PathBuf;

use anyhow::Result;

use crate::cache::{Artefact, Cache, Recipe};
use crate::host::Archive;
use crate::progress::step;

const PACKAGE: &str = "prometheus";
/// The oldest supported release: it also runs on newer ones.
const RELEASE: &str = "bookworm";

/// The cache entry.
///
/// # Errors
/// The package cannot be fetched.
pub fn get(cache: &Cache) -> Result<Artefact> {
    let recipe = Recipe::default().with("package", format!("{PACKAGE}/{RELEASE}"));
    cache.get("prometheus", &recipe, |into| {
        step("unpacking Prometheus", || {
            let archive = Archive::open(&cache.root().join("apt"), false)?;
            archive.unpack(&[format!("{PACKAGE}={}", archive.version(PACKAGE, RELEASE)?)], into)
        })
    })
}

/// One of its programs: `prometheus` or `promtool`.
#[must_use]
pub fn program(entry: &Artefact, name: &str) -> PathBuf {
    entry.file(&format!("usr/bin/{name}"))
}
