//! Binaries of other packages for the tests of one package: cargo makes only the package's own.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// The server's binary: that of `$FOREBAY_BINARIES`, where the tests run elsewhere than they were built, or built into
/// the folder where the test's own binary is (`CARGO_BIN_EXE_…`), with the same profile.
///
/// # Errors
/// It does not build.
pub fn server_binary(own: &Path) -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("FOREBAY_BINARIES") {
        return Ok(Path::new(&folder).join("forebay-server"));
    }
    let folder = own.parent().context("a binary lies in a folder")?;
    let target = folder.parent().context("a profile's folder lies in the target folder")?;
    let mut build = Command::new(std::env::var_os("CARGO").context("run this by cargo")?);
    build.args([
        "build",
        "--quiet",
        "--package",
        "forebay-server",
        "--bin",
        "forebay-server",
        "--target-dir",
    ]);
    build.arg(target).current_dir(env!("CARGO_MANIFEST_DIR"));
    if folder.ends_with("release") {
        build.arg("--release");
    }
    ensure!(build.status().context("run cargo")?.success(), "the server does not build");
    Ok(folder.join("forebay-server"))
}
