//! Reads small files below a root. A failure affects only the file concerned.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::limits::{ATTRIBUTE_BYTES_MAX, ENTRIES_MAX, LIST_BYTES_MAX, ODDITIES_MAX, TEXT_CHARS_MAX};
use crate::order;

/// A file that could not be read or parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Oddity {
    /// The path below the root.
    pub path: String,
    /// The problem.
    pub what: String,
}

/// Identifies a directory or file independently of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

/// A tree that is being read.
pub(crate) struct Tree<'a> {
    root: &'a Path,
    oddities: RefCell<Vec<Oddity>>,
}

impl<'a> Tree<'a> {
    pub(crate) fn new(root: &'a Path) -> Self {
        Self { root, oddities: RefCell::default() }
    }

    pub(crate) fn into_oddities(self) -> Vec<Oddity> {
        self.oddities.into_inner()
    }

    pub(crate) fn odd(&self, path: &str, what: impl ToString) {
        let mut oddities = self.oddities.borrow_mut();
        if oddities.len() < ODDITIES_MAX {
            oddities.push(Oddity { path: path.to_owned(), what: what.to_string() });
        }
    }

    fn join(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns an attribute as one line without surrounding space; `None` if it is missing, empty or has no value now.
    pub(crate) fn attribute(&self, path: &str) -> Option<String> {
        let text = self.read(path, ATTRIBUTE_BYTES_MAX)?;
        let line: String = text
            .trim_matches(|c: char| c.is_whitespace() || c == '\0')
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .take(TEXT_CHARS_MAX)
            .collect();
        (!line.is_empty()).then_some(line)
    }

    /// Returns an attribute that is a decimal number.
    pub(crate) fn number<T: std::str::FromStr>(&self, path: &str) -> Option<T> {
        let text = self.attribute(path)?;
        let number = text.parse().ok();
        if number.is_none() {
            self.odd(path, format!("{text:?} is not the number it should be"));
        }
        number
    }

    /// Returns a number that the kernel reports as -1 if it is unknown, such as `numa_node`.
    pub(crate) fn natural(&self, path: &str) -> Option<u32> {
        self.number::<i64>(path).and_then(|n| u32::try_from(n).ok())
    }

    /// Returns a file of many lines.
    pub(crate) fn list(&self, path: &str) -> Option<String> {
        self.read(path, LIST_BYTES_MAX)
    }

    fn read(&self, path: &str, bytes_max: usize) -> Option<String> {
        let read = || -> io::Result<Vec<u8>> {
            let path = self.join(path);
            // Opening a pipe would wait for its writer.
            if !fs::metadata(&path)?.is_file() {
                return Err(io::Error::other("is not a file"));
            }
            let mut bytes = Vec::new();
            let limit = u64::try_from(bytes_max).expect("limits are small");
            File::open(&path)?.take(limit).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        match read() {
            Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) => {
                self.note(path, &error);
                None
            }
        }
    }

    /// Returns the entries of a directory, ordered by name; empty if the directory is missing.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = match fs::read_dir(self.join(path)) {
            Ok(entries) => entries,
            Err(error) => {
                self.note(path, &error);
                return Vec::new();
            }
        };
        let mut names: Vec<String> =
            entries.take(ENTRIES_MAX).flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort_by(|a, b| order::compare(a, b));
        names
    }

    /// Returns the last component of a symbolic link's target.
    pub(crate) fn link_name(&self, path: &str) -> Option<String> {
        match fs::read_link(self.join(path)) {
            Ok(target) => target.file_name().and_then(|n| n.to_str()).map(str::to_owned),
            Err(error) => {
                self.note(path, &error);
                None
            }
        }
    }

    /// Returns the identity of a file, to detect whether two paths lead to the same one.
    pub(crate) fn identity(&self, path: &str) -> Option<Identity> {
        match fs::metadata(self.join(path)) {
            Ok(found) => Some(Identity { device: found.dev(), inode: found.ino() }),
            Err(error) => {
                self.note(path, &error);
                None
            }
        }
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.join(path).exists()
    }

    fn note(&self, path: &str, error: &io::Error) {
        if !has_no_value(error) {
            self.odd(path, error);
        }
    }
}

/// Whether an error means that there is no value: no such attribute, a device that has just disappeared, the carrier of a
/// network device that is not up, the network device of an unused GID.
fn has_no_value(error: &io::Error) -> bool {
    const EINVAL: i32 = 22;
    const ENXIO: i32 = 6;
    const ENODEV: i32 = 19;
    const EOPNOTSUPP: i32 = 95;
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        || matches!(error.raw_os_error(), Some(EINVAL | ENXIO | ENODEV | EOPNOTSUPP))
}
