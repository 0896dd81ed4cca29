//! Sysfs attributes below a root. A missing or malformed attribute is treated as absent: devices appear and disappear during a
//! read.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::limits::{ATTRIBUTE_BYTES_MAX, ENTRIES_MAX, TEXT_CHARS_MAX};

/// Reads an attribute, as one line and without surrounding whitespace; `None` if it is missing or empty.
pub(crate) fn text(path: &Path) -> Option<String> {
    // Opening a pipe would wait for its writer.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(ATTRIBUTE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let line = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    let line: String =
        line.chars().map(|c| if c.is_control() { ' ' } else { c }).take(TEXT_CHARS_MAX).collect();
    (!line.is_empty()).then_some(line)
}

/// Reads and parses an attribute.
pub(crate) fn parsed<T: FromStr>(path: &Path) -> Option<T> {
    text(path)?.parse().ok()
}

/// The entries of a directory with names that satisfy the condition, ordered by the number in the name.
pub(crate) fn entries(path: &Path, wanted: impl Fn(&str) -> bool) -> Vec<(String, PathBuf)> {
    let Ok(found) = fs::read_dir(path) else { return Vec::new() };
    let mut entries: Vec<(String, PathBuf)> = found
        .take(ENTRIES_MAX)
        .flatten()
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .filter(|(name, _)| wanted(name))
        .collect();
    // nvme9 before nvme10.
    entries.sort_by(|(a, _), (b, _)| (a.len(), a).cmp(&(b.len(), b)));
    entries
}
