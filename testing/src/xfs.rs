//! An XFS with project quota, which few machines have where temporary folders are.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::{Need, skip};

/// The smallest that `mkfs.xfs` makes.
const BYTES: u64 = 320 << 20;

/// An XFS in a sparse file; unmounted when dropped.
#[derive(Debug)]
pub struct Xfs {
    folder: TempDir,
}

impl Xfs {
    /// Makes and mounts it. `None` where that is not possible and [`skip`] allows it: it needs root, for a loop device and a mount.
    ///
    /// # Panics
    /// Unless [`skip`] allows it.
    #[track_caller]
    pub fn new() -> Option<Self> {
        match Self::make() {
            Ok(xfs) => Some(xfs),
            Err((need, problem)) => {
                skip(need, problem);
                None
            }
        }
    }

    fn make() -> Result<Self, (Need, String)> {
        let said = |error: std::io::Error| (Need::Xfs, error.to_string());
        let absent = |problem| (Need::Xfs, problem);
        let this = Self { folder: TempDir::new().map_err(said)? };
        let image = this.folder.path().join("image");
        File::create(&image).and_then(|file| file.set_len(BYTES)).map_err(said)?;
        fs::create_dir(this.path()).map_err(said)?;
        run("mkfs.xfs", &["-q"], &[&image]).map_err(absent)?;
        if let Err(problem) = run("mount", &["-o", "loop,prjquota"], &[&image, &this.path()]) {
            // Where it can be mounted without quota, that alone is missing.
            run("mount", &["-o", "loop"], &[&image, &this.path()]).map_err(absent)?;
            return Err((Need::XfsQuota, problem));
        }
        Ok(this)
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("pool")
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        // Where it was never mounted there is nothing to unmount.
        let _ = run("umount", &[], &[&self.path()]);
    }
}

fn run(program: &str, options: &[&str], paths: &[&Path]) -> Result<(), String> {
    // mkfs and mount lie where only root's path leads.
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    match Command::new(program).args(options).args(paths).env("PATH", path).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("{program}: {error}")),
    }
}
