//! Helpers for the tests of several crates: requirements that a machine may lack, an XFS, and the disk images after a power
//! cut.
//!
//! A skipped test must not look like one that passed. A test that cannot run calls [`skip`], which makes it fail unless the
//! environment variable `FOREBAY_ALLOW_SKIP` names what is missing: `FOREBAY_ALLOW_SKIP=xfs,fuse cargo test …`.

pub mod disk_log;
pub mod generated;
mod xfs;

use std::fmt::{self, Display};
use std::io::Write;

pub use xfs::Xfs;

/// The requirements that can be missing, separated by commas.
pub const VARIABLE: &str = "FOREBAY_ALLOW_SKIP";

/// A requirement that not every machine meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Root's right to mount: CAP_SYS_ADMIN, outside of a container that drops it.
    Mounts,
    /// `mkfs.xfs` (Debian: xfsprogs), loop devices, XFS in the kernel.
    Xfs,
    /// A kernel with CONFIG_XFS_QUOTA.
    XfsQuota,
    /// `/dev/fuse`.
    Fuse,
    /// A disk that logs its requests: root, loop devices, FUSE, `qemu-storage-daemon`.
    LoggedDisk,
    /// keyctl(2), which the seccomp profiles of containers block.
    Keyrings,
    /// Network namespaces: root, or user namespaces.
    Networks,
    /// io_uring, with everything that the server's engine uses.
    IoUring,
    /// Reads that bypass the page cache of the file system of temporary folders (not on a tmpfs).
    PastCache,
}

impl Need {
    /// All requirements.
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

    /// Returns its name in the variable.
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

/// Reports that a test cannot run here, and why; the test must return after it.
///
/// # Panics
/// If the variable does not allow it.
#[track_caller]
pub fn skip(missing: Need, why: impl Display) {
    skip_where(&std::env::var(VARIABLE).unwrap_or_default(), missing, why);
}

/// Whether the variable allows this requirement to be missing, for suites that select in advance what to run.
///
/// # Panics
/// If the variable contains an unknown name.
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
        // Not eprintln!: the test runner captures its output, so a skipped test would look like one that passed.
        Ok(()) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED, {missing}: {why}");
        }
        Err(complaint) => panic!("{complaint}: {why}"),
    }
}

/// Checks whether `allowed` names the requirement; otherwise returns the message.
fn verdict(missing: Need, allowed: &str) -> Result<(), String> {
    let names = || allowed.split(',').map(str::trim).filter(|name| !name.is_empty());
    // A misspelled name would allow nothing, without any error.
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
    fn only_listed_requirements_may_be_missing() {
        assert_eq!(verdict(Need::Xfs, "fuse, xfs,"), Ok(()));
        for allowed in ["", "fuse", "xf", "xfs-"] {
            verdict(Need::Xfs, allowed).expect_err(allowed);
        }
    }

    #[test]
    fn unknown_requirement_name_is_an_error_for_every_skip() {
        let complaint = verdict(Need::Xfs, "xfs,fues").expect_err("a misspelled name");
        assert!(complaint.contains("\"fues\"") && complaint.contains("fuse"), "{complaint}");
    }

    #[test]
    #[should_panic(expected = "cannot run here (FOREBAY_ALLOW_SKIP=keyrings allows that): refused")]
    fn skip_fails_the_test_by_default() {
        skip_where("xfs", Need::Keyrings, "refused");
    }

    #[test]
    fn skip_returns_if_the_requirement_may_be_missing() {
        skip_where("xfs,keyrings", Need::Keyrings, "refused");
    }
}
