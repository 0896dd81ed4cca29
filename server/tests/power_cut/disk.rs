//! A disk that logs every write and flush with QEMU's `blklogwrites` driver.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::support::disk::Disk;
pub(crate) use crate::support::disk::{Mounted, copy, scratch};

/// The minimum size that mkfs.xfs accepts.
const BYTES: u64 = 300 << 20;

/// A mounted XFS on a logged device.
pub(crate) struct LoggedDisk(Disk);

impl LoggedDisk {
    /// Creates a new, empty disk.
    ///
    /// # Errors
    /// The errors of [`Disk::new`].
    pub(crate) fn new() -> Result<Self, String> {
        let options = |folder: &Path| {
            let log = folder.join("log");
            File::create(&log).expect("a file");
            [
                "--blockdev".to_owned(),
                format!("driver=file,filename={},node-name=log", log.display()),
                "--blockdev".to_owned(),
                "driver=blklogwrites,file=disk,log=log,node-name=top,log-sector-size=512".to_owned(),
            ]
            .to_vec()
        };
        Disk::new(BYTES, options).map(Self)
    }

    /// The mount point.
    pub(crate) fn path(&self) -> PathBuf {
        self.0.path()
    }

    /// The log of the device.
    pub(crate) fn log(&self) -> PathBuf {
        self.0.beside("log")
    }

    /// The size of the log: everything completed so far is before this offset.
    pub(crate) fn log_bytes(&self) -> u64 {
        self.log().metadata().expect("the log").len()
    }

    /// Makes the device fail from now on: every read and write on it returns EIO.
    pub(crate) fn fail(&mut self) {
        self.0.fail();
    }
}

/// Creates a new image of the disk as it was before its log.
pub(crate) fn image(path: &Path) -> File {
    let file = File::options().read(true).write(true).create_new(true).open(path).expect("an image");
    file.set_len(BYTES).expect("room for an image");
    file
}
