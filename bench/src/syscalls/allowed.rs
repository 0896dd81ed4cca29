//! The system calls that a seccomp profile allows (OCI runtime specification, linux.seccomp).

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

#[derive(Deserialize)]
struct Profile {
    syscalls: Vec<Rule>,
}

#[derive(Deserialize)]
struct Rule {
    names: Vec<String>,
    action: String,
}

/// Names that the profile allows, regardless of arguments.
pub(super) fn read(path: &Path) -> Result<BTreeSet<String>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let profile: Profile =
        serde_json::from_str(&text).with_context(|| format!("{} is no seccomp profile", path.display()))?;
    let rules = profile.syscalls.into_iter().filter(|rule| rule.action == "SCMP_ACT_ALLOW");
    Ok(rules.flat_map(|rule| rule.names).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chart_seccomp_profile_allows_syscalls_of_posix_mounts_and_listings() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/forebay/files/seccomp-server.json");
        let allowed = read(&path).expect("the chart's profile");
        for name in ["fchown", "fchmod", "getxattrat", "io_uring_enter", "statx"] {
            assert!(allowed.contains(name), "{name}");
        }
        assert!(!allowed.contains("mount") && !allowed.contains("ptrace"));
    }
}
