//! What tests of several crates share: what a test may miss on a machine, an XFS, and what a power cut leaves of a disk.
//!
//! A test that does not run must not look like one that passed. It calls [`skip`], which fails it unless the environment variable
//! `FOREBAY_ALLOW_SKIP` names what is missing: `FOREBAY_ALLOW_SKIP=xfs,fuse cargo test …`.

pub mod disk_log;
pub mod generated;
mod xfs;

use std::fmt::{self, Display};
use std::io::Write;

pub use xfs::Xfs;

/// The names that are allowed to be missing, with commas between them.
pub const VARIABLE: &str = "FOREBAY_ALLOW_SKIP";

/// What not every machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Root's right to mount: CAP_SYS_ADMIN, outside of a container that takes it away.
    Mounts,
    /// `mkfs.xfs` (Debian: xfsprogs), loop devices, XFS in the kernel.
    Xfs,
    /// A kernel with CONFIG_XFS_QUOTA.
    XfsQuota,
    /// `/dev/fuse`.
    Fuse,
    /// A disk that logs its requests: root, loop devices, FUSE, `qemu-storage-daemon`.
    LoggedDisk,
    /// keyctl(2), which seccomp profiles of containers refuse.
    Keyrings,
    /// Network namespaces: root, or user namespaces.
    Networks,
    /// io_uring, with all that the server's engine uses.
    IoUring,
    /// Reads past the page cache of the file system of temporary folders (not on a tmpfs).
    PastCache,
}

impl Need {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Mounts,
        Self::Xfs,
        Self::XfsQuota,
        Self::Fuse,
        Self::LoggedDisk,
        Self::Keyrings,
        Self::Networks,
        Self::IoUring,
        Self::PastCache,
    ];

    /// Its name in the variable.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mounts => "mounts",
            Self::Xfs => "xfs",
            Self::XfsQuota => "xfs-quota",
            Self::Fuse => "fuse",
            Self::LoggedDisk => "logged-disk",
            Self::Keyrings => "keyrings",
            Self::Networks => "networks",
            Self::IoUring => "io-uring",
            Self::PastCache => "past-cache",
        }
    }
}

impl Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Says that a test cannot run here, and why; the test returns after it.
///
/// # Panics
/// Unless the variable allows it.
#[track_caller]
pub fn skip(missing: Need, why: impl Display) {
    skip_where(&std::env::var(VARIABLE).unwrap_or_default(), missing, why);
}

/// Whether the variable allows this to be missing: for suites that choose beforehand what to run.
///
/// # Panics
/// If the variable has a name that nothing has.
#[track_caller]
pub fn may_miss(need: Need) -> bool {
    let allowed = std::env::var(VARIABLE).unwrap_or_default();
    if let Err(complaint) = verdict(need, &allowed) {
        assert!(complaint.contains("cannot run here"), "{complaint}");
        return false;
    }
    true
}

#[track_caller]
fn skip_where(allowed: &str, missing: Need, why: impl Display) {
    match verdict(missing, allowed) {
        // Not eprintln!: the test runner keeps its output to itself: a skipped test would read as one that passed.
        Ok(()) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED, {missing}: {why}");
        }
        Err(complaint) => panic!("{complaint}: {why}"),
    }
}

/// Whether `allowed` names it; else what to say.
fn verdict(missing: Need, allowed: &str) -> Result<(), String> {
    let names = || allowed.split(',').map(str::trim).filter(|name| !name.is_empty());
    // A misspelled name would allow nothing, and nothing would tell.
    if let Some(strange) = names().find(|name| Need::ALL.iter().all(|need| need.name() != *name)) {
        let all = Need::ALL.map(Need::name).join(", ");
        return Err(format!("{VARIABLE} names {strange:?}, which is none of {all}"));
    }
    if names().any(|name| name == missing.name()) {
        return Ok(());
    }
    Err(format!("this test cannot run here ({VARIABLE}={missing} allows that)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_named_may_be_missing() {
        assert_eq!(verdict(Need::Xfs, "fuse, xfs,"), Ok(()));
        for allowed in ["", "fuse", "xf", "xfs-"] {
            verdict(Need::Xfs, allowed).expect_err(allowed);
        }
    }

    #[test]
    fn a_name_that_nothing_has_is_an_error_for_every_test_that_skips() {
        let complaint = verdict(Need::Xfs, "xfs,fues").expect_err("a misspelled name");
        assert!(complaint.contains("\"fues\"") && complaint.contains("fuse"), "{complaint}");
    }

    #[test]
    #[should_panic(expected = "cannot run here (FOREBAY_ALLOW_SKIP=keyrings allows that): refused")]
    fn a_test_that_cannot_run_fails() {
        skip_where("xfs", Need::Keyrings, "refused");
    }

    #[test]
    fn unless_that_is_allowed() {
        skip_where("xfs,keyrings", Need::Keyrings, "refused");
    }
}
