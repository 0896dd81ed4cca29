//! A disk that logs every write and flush: an XFS on a loop device, over a file that qemu-storage-daemon exports by FUSE.
//!
//! The loop device turns the file system's flushes into fsync(2) on the export, which QEMU's `blklogwrites` driver logs, so
//! the log has what a real disk would have received, in order.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::support::until;

/// The least that mkfs.xfs accepts.
const BYTES: u64 = 300 << 20;

/// A folder in memory, where there is one: the thousands of flushes of a run would keep a real disk busy for minutes.
pub(crate) fn scratch() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a directory")
}

/// A mounted XFS whose device is logged.
pub(crate) struct LoggedDisk {
    scratch: TempDir,
    daemon: Child,
    device: String,
}

/// Runs a program; what it prints.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

impl LoggedDisk {
    /// A new, empty one.
    ///
    /// # Errors
    /// The reason why there can be none here: it needs root, loop devices, FUSE, xfsprogs and qemu-storage-daemon.
    pub(crate) fn new() -> Result<Self, String> {
        let scratch = scratch();
        let at = |name: &str| scratch.path().join(name);
        for (name, bytes) in [("disk", BYTES), ("log", 0), ("export", 0)] {
            File::create(at(name)).and_then(|file| file.set_len(bytes)).expect("a file");
        }
        std::fs::create_dir(at("mounted")).expect("a mount point");
        let mut command = Command::new("qemu-storage-daemon");
        for (name, node) in [("disk", "disk"), ("log", "log")] {
            let file = at(name);
            command
                .arg("--blockdev")
                .arg(format!("driver=file,filename={},node-name={node}", file.display()));
        }
        command.args([
            "--blockdev",
            "driver=blklogwrites,file=disk,log=log,node-name=logged,log-sector-size=512",
        ]);
        let export = at("export");
        command
            .arg("--export")
            .arg(format!("type=fuse,id=export,node-name=logged,mountpoint={},writable=on", export.display()));
        let daemon = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| format!("qemu-storage-daemon: {error}"))?;
        let mut disk = Self { scratch, daemon, device: String::new() };
        let ended = until("the export", || {
            if let Ok(Some(status)) = disk.daemon.try_wait() {
                return Some(Some(status));
            }
            (export.metadata().ok()?.len() == BYTES).then_some(None)
        });
        if let Some(status) = ended {
            return Err(format!("qemu-storage-daemon ended with {status}"));
        }
        disk.device = run(Command::new("losetup").args(["--direct-io=on", "--find", "--show"]).arg(&export))?;
        run(Command::new("mkfs.xfs").args(["-q", "-K", "-m", "reflink=1"]).arg(&disk.device))?;
        run(Command::new("mount").args(["-t", "xfs"]).arg(&disk.device).arg(disk.path()))?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> PathBuf {
        self.scratch.path().join("mounted")
    }

    /// The log of its device.
    pub(crate) fn log(&self) -> PathBuf {
        self.scratch.path().join("log")
    }

    /// Bytes of its log: all that was completed by now lies before this.
    pub(crate) fn log_bytes(&self) -> u64 {
        self.log().metadata().expect("the log").len()
    }

    /// The device fails from now on: every read and write on it ends with EIO.
    pub(crate) fn fail(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Drop for LoggedDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.path(), rustix::mount::UnmountFlags::DETACH);
        if !self.device.is_empty() {
            let _ = run(Command::new("losetup").args(["--detach", &self.device]));
        }
        self.fail();
        let export = self.scratch.path().join("export");
        let _ = rustix::mount::unmount(export, rustix::mount::UnmountFlags::DETACH);
    }
}

/// A new image of the disk, as it was before its log.
pub(crate) fn image(path: &Path) -> File {
    let file = File::options().read(true).write(true).create_new(true).open(path).expect("an image");
    file.set_len(BYTES).expect("room for an image");
    file
}

/// A copy to be mounted.
pub(crate) fn copy(from: &Path, to: &Path) {
    run(Command::new("cp").args(["--sparse=always", "--reflink=auto"]).arg(from).arg(to)).expect("a copy");
}

/// A crash image, mounted: the file system replays its log. The image is removed with it.
pub(crate) struct Mounted<'a> {
    at: &'a Path,
    image: PathBuf,
}

impl<'a> Mounted<'a> {
    /// Mounts `image`, which nothing else uses, at `at`.
    pub(crate) fn new(image: PathBuf, at: &'a Path) -> Self {
        run(Command::new("mount").args(["-t", "xfs", "-o", "loop,nouuid"]).arg(&image).arg(at))
            .expect("the file system's log is replayed");
        Self { at, image }
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.at, rustix::mount::UnmountFlags::DETACH);
        let _ = std::fs::remove_file(&self.image);
    }
}
