//! Third-party SMB clients that Debian does not package, from the Python index, pinned by their hashes.
//!
//! Separate from the root: the guests do not need them, so the lab works on a machine without access to a Python index.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{Artefact, Cache, Recipe};
use crate::host;
use crate::progress::step;

const REQUIREMENTS: &str = "\
smbprotocol==1.17.0 --hash=sha256:bd1abff5417f5af83ca516a64ab8e5acece3dbdcf58d4e5e23e47f5165a77349
pyspnego==0.12.4 --hash=sha256:a29a34de1abe9e9b30d9aa1d363f8e49fc159eb7355b1f2ee86ccb3a2ce3bba9
";

/// Folder in which the root's Python looks for modules that are not from Debian.
pub const MOUNT_POINT: &str = "usr/local/lib/python3.13/dist-packages";

/// The cache entry: `site/`, a folder of modules.
pub fn get(cache: &Cache) -> Result<Artefact> {
    let recipe = Recipe::default().with("requirements", REQUIREMENTS);
    cache.get("python-clients", &recipe, |into| {
        step("fetching smbprotocol from the Python index", || {
            if Command::new("python3")
                .args(["-m", "pip", "--version"])
                .output()
                .map_or(true, |o| !o.status.success())
            {
                host::ensure_packages(&["python3", "python3-pip"])?;
            }
            let list = into.join("requirements.txt");
            fs::write(&list, REQUIREMENTS)?;
            let wheels = into.join("wheels");
            host::run(
                Command::new("python3")
                    .args([
                        "-m",
                        "pip",
                        "download",
                        "-q",
                        "--no-deps",
                        "--only-binary=:all:",
                        "--require-hashes",
                    ])
                    .arg("-r")
                    .arg(&list)
                    .arg("-d")
                    .arg(&wheels),
            )
            .context("fetch Python packages")?;
            let site = into.join("site");
            fs::create_dir(&site)?;
            for wheel in fs::read_dir(&wheels)? {
                host::run(
                    Command::new("python3").args(["-m", "zipfile", "-e"]).arg(wheel?.path()).arg(&site),
                )?;
            }
            Ok(())
        })
    })
}
