//! Changes to configfs and to files, one change per step.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, IFlags, RenameFlags};
use rustix::io::Errno;

/// One change. Paths without a leading `/` are below nvmet's root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Creates a directory: a port, a subsystem, a namespace, a host, a mark.
    Make(String),
    /// Removes a directory.
    Remove(String),
    /// Removes a directory unless it is in use.
    RemoveUnused(String),
    /// Writes an attribute.
    Set(String, String),
    /// Links `at` to `to`.
    Link { to: String, at: String },
    /// Removes a link.
    Unlink(String),
    /// Creates a file and allocates all its space.
    MakeFile { path: PathBuf, bytes: u64 },
    /// Enlarges a file and allocates all its space.
    GrowFile { path: PathBuf, bytes: u64 },
    /// Makes the kernel complete a write to a file only when it is durable.
    WriteThrough(PathBuf),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Make(at) => write!(f, "make {at}"),
            Self::Remove(at) | Self::RemoveUnused(at) => write!(f, "remove {at}"),
            Self::Set(at, value) => write!(f, "set {at} to {value}"),
            Self::Link { to, at } => write!(f, "link {at} to {to}"),
            Self::Unlink(at) => write!(f, "unlink {at}"),
            Self::MakeFile { path, bytes } => write!(f, "make {} of {bytes} bytes", path.display()),
            Self::GrowFile { path, bytes } => write!(f, "grow {} to {bytes} bytes", path.display()),
            Self::WriteThrough(path) => write!(f, "make every write to {} durable", path.display()),
        }
    }
}

/// Executes steps: the kernel's nvmet, or a fake in tests.
pub(crate) trait Hands {
    /// Executes one step.
    ///
    /// # Errors
    /// The kernel's errors.
    fn take(&mut self, step: &Step) -> io::Result<()>;
}

/// The kernel's nvmet.
#[derive(Debug)]
pub(crate) struct Kernel {
    root: PathBuf,
}

impl Kernel {
    /// The nvmet at this root.
    pub(crate) fn at(root: &Path) -> Self {
        Self { root: root.into() }
    }
}

impl Hands for Kernel {
    fn take(&mut self, step: &Step) -> io::Result<()> {
        match step {
            Step::Make(at) => fs::create_dir(self.root.join(at)),
            Step::Remove(at) => absent_is_fine(fs::remove_dir(self.root.join(at))),
            Step::RemoveUnused(at) => match absent_is_fine(fs::remove_dir(self.root.join(at))) {
                Err(error) if is_used(&error) => Ok(()),
                result => result,
            },
            Step::Set(at, value) => {
                // Creates no file if the kernel has no such attribute.
                OpenOptions::new().write(true).open(self.root.join(at))?.write_all(value.as_bytes())
            }
            // The kernel resolves the target relative to our working directory: it must be absolute.
            Step::Link { to, at } => symlink(self.root.join(to), self.root.join(at)),
            Step::Unlink(at) => absent_is_fine(fs::remove_file(self.root.join(at))),
            Step::MakeFile { path, bytes } => make_file(path, *bytes),
            Step::GrowFile { path, bytes } => {
                let file = OpenOptions::new().write(true).open(path)?;
                allocate(&file, *bytes)?;
                file.sync_all()
            }
            Step::WriteThrough(path) => {
                let file = File::open(path)?;
                let flags = rustix::fs::ioctl_getflags(&file)? | IFlags::SYNC;
                rustix::fs::ioctl_setflags(&file, flags)?;
                // The attribute does not make earlier writes durable.
                file.sync_all()
            }
        }
    }
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Whether a directory remains because others link to it or have put entries into it.
pub(crate) fn is_used(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::BUSY | Errno::NOTEMPTY))
}

/// Creates the file under its name only when it is complete; never replaces an existing file.
fn make_file(path: &Path, bytes: u64) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::other("it has no name"));
    };
    fs::create_dir_all(folder)?;
    let mut aside = std::ffi::OsString::from(".");
    aside.push(name);
    aside.push(".forebay-new");
    let aside = folder.join(aside);
    let make = || {
        // Left over from a crash.
        absent_is_fine(fs::remove_file(&aside))?;
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
        allocate(&file, bytes)?;
        file.sync_all()?;
        let here = rustix::fs::CWD;
        rustix::fs::renameat_with(here, &aside, here, path, RenameFlags::NOREPLACE)?;
        File::open(folder)?.sync_all()
    };
    let result = make();
    if result.is_err() {
        // A partially allocated file is of no use. Only the original failure is reported.
        let _ = fs::remove_file(&aside);
    }
    result
}

fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn backing_file_is_preallocated_and_never_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("deep/data.img");
        let mut kernel = Kernel::at(folder.path());
        let mut take = |step: Step| kernel.take(&step);
        take(Step::MakeFile { path: path.clone(), bytes: 1 << 20 }).expect("created");
        let made = fs::metadata(&path).expect("a file");
        assert!(made.len() == 1 << 20 && made.blocks() * 512 >= 1 << 20 && made.mode() & 0o777 == 0o600);
        let again = take(Step::MakeFile { path: path.clone(), bytes: 2 << 20 }).expect_err("the file exists");
        assert_eq!(again.kind(), ErrorKind::AlreadyExists);
        take(Step::GrowFile { path: path.clone(), bytes: 3 << 20 }).expect("grown");
        assert_eq!(fs::metadata(&path).expect("a file").len(), 3 << 20);
        let names: Vec<_> = fs::read_dir(folder.path().join("deep")).expect("a folder").flatten().collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }

    #[test]
    fn failed_file_creation_leaves_no_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data.img");
        let step = Step::MakeFile { path, bytes: 1 << 62 };
        assert!(Kernel::at(folder.path()).take(&step).is_err());
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }
}
