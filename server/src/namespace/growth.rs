//! Grows a pool's file system to the size of its namespace.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use tracing::{info, warn};

use super::content;
use super::state::State;
use crate::limits::GROWTH_BYTES_MIN;

/// The file system that grows.
#[derive(Clone, Debug)]
pub(crate) struct Growing {
    /// The namespace's device.
    pub(crate) device: PathBuf,
    /// Its mount point.
    pub(crate) path: PathBuf,
}

impl Growing {
    /// Grows it on a separate thread, if there is anything to grow: the target may take a long time.
    pub(crate) fn start(&self, state: &Arc<State>) {
        let (growing, state) = (self.clone(), Arc::clone(state));
        let started = std::thread::Builder::new().name("namespace-grow".into()).spawn(move || {
            let result = growing.grow(state.pool());
            if let Err(reason) = &result {
                warn!(pool = state.pool(), reason, "the file system does not grow with its namespace");
            }
            state.set_grown(result);
        });
        if let Err(error) = started {
            warn!(%error, "starting to grow a file system");
        }
    }

    fn grow(&self, pool: &str) -> Result<(), String> {
        let (size, used) = sizes(&self.device).map_err(|error| format!("looking at its size: {error}"))?;
        if size < used.saturating_add(GROWTH_BYTES_MIN) {
            return Ok(());
        }
        // -d: the data section, to the maximum size.
        let mut command = Command::new("xfs_growfs");
        let output = command.arg("-d").arg(&self.path).output();
        let output = output.map_err(|error| format!("starting xfs_growfs: {error}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("xfs_growfs: {}", said.trim().chars().take(500).collect::<String>()));
        }
        info!(pool, from_bytes = used, to_bytes = size, "the file system has grown with its namespace");
        Ok(())
    }
}

/// Bytes of the device, and of the file system on it.
fn sizes(device: &Path) -> io::Result<(u64, u64)> {
    let mut file = File::open(device)?;
    let size = file.seek(SeekFrom::End(0))?;
    let used = content::file_system_bytes(&file)?.ok_or(io::ErrorKind::InvalidData)?;
    Ok((size, used))
}
