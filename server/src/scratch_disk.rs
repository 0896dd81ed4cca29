//! An XFS in a file, for tests of its state after a power loss. It needs root, loop devices and xfsprogs. If one of them is
//! missing, the test is skipped, which `FOREBAY_ALLOW_SKIP=xfs` must permit.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_testing::{Need, skip};
use rustix::io::Errno;
use tempfile::TempDir;

/// The minimum of mkfs.xfs.
const BYTES: u64 = 300 << 20;
const UNMOUNT_TIME_MAX: Duration = Duration::from_secs(20);

/// A mounted file system that can lose its power.
pub(crate) struct Disk {
    scratch: TempDir,
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)))
}

impl Disk {
    /// A new disk; `None` if the test `name` is skipped.
    pub(crate) fn new(name: &str) -> Option<Self> {
        let scratch = TempDir::new().expect("a directory");
        let disk = Self { scratch };
        std::fs::create_dir(disk.path()).expect("a mount point");
        File::create(disk.image()).and_then(|file| file.set_len(BYTES)).expect("an image");
        let made = run(Command::new("mkfs.xfs").arg("-q").arg(disk.image())).and_then(|()| disk.mount());
        match made {
            Ok(()) => Some(disk),
            Err(why) => {
                skip(Need::Xfs, format!("{name}: {why}"));
                None
            }
        }
    }

    fn image(&self) -> PathBuf {
        self.scratch.path().join("image")
    }

    /// Its mount point.
    pub(crate) fn path(&self) -> PathBuf {
        self.scratch.path().join("mounted")
    }

    fn mount(&self) -> Result<(), String> {
        run(Command::new("mount").args(["-t", "xfs", "-o", "loop"]).arg(self.image()).arg(self.path()))
    }

    /// Everything that is not on stable storage is lost. Nothing may be open on the disk.
    pub(crate) fn lose_power(&self) {
        let directory = File::open(self.path()).expect("the root");
        forebay_nvmeof::shut_down_file_system(&directory).expect("it can be ended");
        drop(directory);
        // A process that another test starts inherits all descriptors of this one until it executes its own program.
        let until = Instant::now() + UNMOUNT_TIME_MAX;
        while let Err(errno) = rustix::mount::unmount(self.path(), rustix::mount::UnmountFlags::empty()) {
            assert!(errno == Errno::BUSY && Instant::now() < until, "something is open: {errno}");
            std::thread::yield_now();
        }
        self.mount().expect("its log is replayed");
    }

    /// The state after the end of a machine that had flushed the log and nothing else. `look` gets the unmounted device and
    /// a mount point; afterwards the disk is mounted again.
    pub(crate) fn with_dirty_log<T>(&self, look: impl FnOnce(&Path, &Path) -> T) -> T {
        let directory = File::open(self.path()).expect("the root");
        directory.sync_all().expect("synced");
        rustix::fs::syncfs(&directory).expect("synced");
        std::fs::write(self.path().join("later"), "x").expect("made");
        forebay_nvmeof::shut_down_file_system(&directory).expect("it can be ended");
        drop(directory);
        rustix::mount::unmount(self.path(), rustix::mount::UnmountFlags::empty()).expect("nothing is open");
        let output = Command::new("losetup").args(["--find", "--show"]).arg(self.image()).output();
        let output = output.expect("losetup, which mount uses, too");
        let device = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let looked = look(Path::new(&device), &self.path());
        run(Command::new("losetup").args(["--detach", &device])).expect("detached");
        self.mount().expect("its log is replayed");
        looked
    }

    /// Uses up all space that is left, as volumes can.
    pub(crate) fn fill(&self) {
        let directory = self.path().join("filler");
        let _ = std::fs::create_dir(&directory);
        let large = File::options().create(true).append(true).open(directory.join("large"));
        let large = large.expect("its directory was made while there was space");
        let mut at = large.metadata().expect("it is open").len();
        let mut step = 64_u64 << 20;
        while step >= 4096 {
            match rustix::fs::fallocate(&large, rustix::fs::FallocateFlags::empty(), at, step) {
                Ok(()) => at += step,
                Err(_) => step /= 2,
            }
        }
        // The kernel reserves some space that only small files use up.
        let there = std::fs::read_dir(&directory).expect("it is there").count();
        let small = |nth: usize| std::fs::write(directory.join(nth.to_string()), "x").is_err();
        assert!((there..there + 1_000_000).any(small), "it never becomes full");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// Whether a path exists.
pub(crate) fn exists(path: impl AsRef<Path>) -> bool {
    path.as_ref().symlink_metadata().is_ok()
}
