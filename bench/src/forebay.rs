//! Our own server in the comparison.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::place::{Place, Server};

/// Beside this binary, or in `$FOREBAY_BINARIES`.
pub(crate) fn default_binary() -> PathBuf {
    forebay_e2e::images::product::binaries().unwrap_or_default().join("forebay-server")
}

/// Starts it with one volume on the shared folder; the port is in the result.
pub(crate) fn start(place: &Place, name: &'static str, binary: &Path, option: &str) -> Result<(Server, u16)> {
    let _ = (place, option);
    if !binary.exists() {
        bail!(
            "{} is not built; run:  cargo build --release -p forebay-server -p forebay-bench",
            binary.display()
        );
    }
    bail!("{name} cannot serve yet")
}
