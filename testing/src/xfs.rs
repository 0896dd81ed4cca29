//! An XFS for tests, because few machines have one for temporary folders.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::{Need, skip};

/// A little more than the minimum size for `mkfs.xfs`.
const BYTES: u64 = 640 << 20;

/// An XFS in a sparse file; unmounted when dropped.
#[derive(Debug)]
pub struct Xfs {
    folder: TempDir,
}

impl Xfs {
    /// Makes and mounts an XFS with project quota. Returns `None` if that is not possible and [`skip`] allows it: it
    /// requires root, for a loop device and a mount.
    ///
    /// # Panics
    /// If it is not possible and [`skip`] does not allow that.
    #[track_caller]
    pub fn new() -> Option<Self> {
        Self::or_skip(Self::make())
    }

    /// As [`Xfs::new`], but without quota, which more kernels support.
    ///
    /// # Panics
    /// As [`Xfs::new`].
    #[track_caller]
    pub fn without_quota() -> Option<Self> {
        let mounted = Self::format().and_then(|this| this.mount("loop").map(|()| this).map_err(absent));
        Self::or_skip(mounted)
    }

    #[track_caller]
    fn or_skip(made: Result<Self, (Need, String)>) -> Option<Self> {
        match made {
            Ok(xfs) => Some(xfs),
            Err((need, problem)) => {
                skip(need, problem);
                None
            }
        }
    }

    fn format() -> Result<Self, (Need, String)> {
        let said = |error: std::io::Error| (Need::Xfs, error.to_string());
        let this = Self { folder: TempDir::new().map_err(said)? };
        File::create(this.image()).and_then(|file| file.set_len(BYTES)).map_err(said)?;
        fs::create_dir(this.path()).map_err(said)?;
        run("mkfs.xfs", &["-q"], &[&this.image()]).map_err(absent)?;
        Ok(this)
    }

    fn make() -> Result<Self, (Need, String)> {
        let this = Self::format()?;
        if let Err(problem) = this.mount("loop,prjquota") {
            // If it can be mounted without quota, only quota is missing.
            this.mount("loop").map_err(absent)?;
            return Err((Need::XfsQuota, problem));
        }
        Ok(this)
    }

    fn mount(&self, options: &str) -> Result<(), String> {
        run("mount", &["-o", options], &[&self.image(), &self.path()])
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    /// Returns the mount point.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("pool")
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        // If it was never mounted, there is nothing to unmount.
        let _ = run("umount", &[], &[&self.path()]);
    }
}

fn absent(problem: String) -> (Need, String) {
    (Need::Xfs, problem)
}

fn run(program: &str, options: &[&str], paths: &[&Path]) -> Result<(), String> {
    // mkfs and mount are in directories that only root's PATH contains.
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    match Command::new(program).args(options).args(paths).env("PATH", path).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("{program}: {error}")),
    }
}
