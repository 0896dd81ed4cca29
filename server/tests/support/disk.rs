//! A disk of qemu-storage-daemon: an XFS on a loop device, on a file that the daemon exports by FUSE.
//!
//! The loop device turns the file system's flushes into fsync(2) on the export, so QEMU's block drivers receive what a real
//! disk would, in order.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::until;

/// A folder in memory, if possible: the thousands of flushes of a run would keep a real disk busy for minutes.
pub fn scratch() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a directory")
}

/// Runs a program and returns its output.
pub fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A mounted XFS on such a disk.
pub struct Disk {
    scratch: TempDir,
    daemon: Child,
    device: String,
}

impl Disk {
    /// Creates a new, empty disk of this size. `options` returns additional arguments of the daemon. Its node `disk` is the
    /// file [`Disk::image`] in the folder that it gets; the node `top` is exported.
    ///
    /// # Errors
    /// The reason why this machine cannot have one: it needs root, loop devices, FUSE, xfsprogs and qemu-storage-daemon.
    pub fn new(bytes: u64, options: impl FnOnce(&Path) -> Vec<String>) -> Result<Self, String> {
        let scratch = scratch();
        let at = |name: &str| scratch.path().join(name);
        for (name, bytes) in [("disk", bytes), ("export", 0)] {
            File::create(at(name)).and_then(|file| file.set_len(bytes)).expect("a file");
        }
        std::fs::create_dir(at("mounted")).expect("a mount point");
        let export = at("export");
        let mut command = Command::new("qemu-storage-daemon");
        command
            .arg("--blockdev")
            .arg(format!("driver=file,filename={},node-name=disk", at("disk").display()));
        command.args(options(scratch.path())).arg("--export");
        command.arg(format!("type=fuse,id=export,node-name=top,mountpoint={},writable=on", export.display()));
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
            (export.metadata().ok()?.len() == bytes).then_some(None)
        });
        if let Some(status) = ended {
            return Err(format!("qemu-storage-daemon ended with {status}"));
        }
        // Through the page cache, which sends one request after the other. The export of QEMU 7.2 has one buffer for all
        // requests: while a WRITE waits in a driver or for its file, another request overwrites its data.
        disk.device =
            run(Command::new("losetup").args(["--direct-io=off", "--find", "--show"]).arg(&export))?;
        run(Command::new("mkfs.xfs").args(["-q", "-K", "-m", "reflink=1"]).arg(&disk.device))?;
        run(Command::new("mount").args(["-t", "xfs"]).arg(&disk.device).arg(disk.path()))?;
        Ok(disk)
    }

    /// The mount point.
    pub fn path(&self) -> PathBuf {
        self.scratch.path().join("mounted")
    }

    /// A file next to the mount point.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// The disk's data on stable storage.
    pub fn image(&self) -> PathBuf {
        self.beside("disk")
    }

    /// Makes the device fail from now on: every read and write on it returns EIO.
    pub fn fail(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.path(), rustix::mount::UnmountFlags::DETACH);
        if !self.device.is_empty() {
            let _ = run(Command::new("losetup").args(["--detach", &self.device]));
        }
        self.fail();
        let _ = rustix::mount::unmount(self.beside("export"), rustix::mount::UnmountFlags::DETACH);
    }
}

/// Copies an image, to be mounted.
pub fn copy(from: &Path, to: &Path) {
    run(Command::new("cp").args(["--sparse=always", "--reflink=auto"]).arg(from).arg(to)).expect("a copy");
}

/// A mounted image of a disk after a power cut: the file system replays its log. The image is removed when this is dropped.
pub struct Mounted<'a> {
    at: &'a Path,
    image: PathBuf,
}

impl<'a> Mounted<'a> {
    /// Mounts `image`, which nothing else uses, at `at`.
    pub fn new(image: PathBuf, at: &'a Path) -> Self {
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
