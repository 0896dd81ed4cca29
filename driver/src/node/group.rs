//! Mounts of a volume for different groups.
//!
//! An SMB mount has one group for all its files, and pods on one node can have different groups (fsGroup). The mount at the
//! staging path has the first pod's group. Each further group has its own mount beside it, named `<staging path>.gid-<number>`,
//! which is created when a pod of that group is published, because the kubelet stages a volume once per node. The kernel's
//! client uses one connection for all of them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::io_error;
use crate::error::Error;
use crate::mountinfo::{MountEntry, MountTable, resolve};

/// Separator between the staging path and the group's number.
const MARK: &str = ".gid-";

/// The mount of a volume with a given group, or the path to create it at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Mounted { path: PathBuf, entry: MountEntry },
    Free(PathBuf),
}

/// Reads only the mount table: mounts there may hang.
pub(super) fn find(table: &MountTable, staging: &Path, gid: u32) -> Result<Place, Error> {
    let mounted = |path: &Path| -> Result<Option<MountEntry>, Error> {
        let resolved = resolve(path).map_err(|e| io_error("resolve", path, e))?;
        Ok(resolved.and_then(|resolved| table.at(&resolved).cloned()))
    };
    match mounted(staging)? {
        None => Ok(Place::Free(staging.to_owned())),
        Some(entry) if entry.gid().is_none_or(|shown| shown == gid) => {
            Ok(Place::Mounted { path: staging.to_owned(), entry })
        }
        Some(_) => {
            let mut name = staging.as_os_str().to_owned();
            name.push(format!("{MARK}{gid}"));
            let path = PathBuf::from(name);
            Ok(match mounted(&path)? {
                Some(entry) => Place::Mounted { path, entry },
                None => Place::Free(path),
            })
        }
    }
}

/// The directories beside the staging path that were created for further groups.
pub(super) fn beside(staging: &Path) -> Result<Vec<PathBuf>, Error> {
    let (Some(parent), Some(name)) = (staging.parent(), staging.file_name()) else { return Ok(Vec::new()) };
    let entries = match std::fs::read_dir(parent) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io_error("list", parent, error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| io_error("list", parent, e))?;
        if is_beside(&entry.file_name(), name) {
            found.push(parent.join(entry.file_name()));
        }
    }
    Ok(found)
}

/// Whether `path` is the staging path, or a path beside it for another group.
pub(super) fn belongs(path: &Path, staging: &Path) -> bool {
    match (path.file_name(), staging.file_name()) {
        (Some(candidate), Some(name)) => path == staging || is_beside(candidate, name),
        _ => false,
    }
}

fn is_beside(candidate: &OsStr, name: &OsStr) -> bool {
    let rest = candidate.as_bytes().strip_prefix(name.as_bytes());
    let number = rest.and_then(|rest| rest.strip_prefix(MARK.as_bytes()));
    number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_directories_are_recognised_by_name() {
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["g", "g.gid-1", "g.gid-20", "g.gid-", "g.gid-x", "h.gid-1", "g.other"] {
            std::fs::create_dir(dir.path().join(name)).expect("new");
        }
        let mut found = beside(&dir.path().join("g")).expect("readable");
        found.sort();
        assert_eq!(found, [dir.path().join("g.gid-1"), dir.path().join("g.gid-20")]);
        assert!(beside(&dir.path().join("no/such")).expect("none").is_empty());
    }
}
