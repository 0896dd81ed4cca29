//! Reads and writes that the client's kernel itself completes with EAGAIN.
//!
//! Linux's client (7.2: cifs_issue_read, cifs_issue_write) fails a READ or WRITE with EAGAIN permanently if its connection or
//! handle is lost after the request was prepared and before it is sent, instead of preparing it again. It resends requests
//! that are lost in flight. The kernel also traces statuses that it maps to EAGAIN; those would be a server's fault.

use anyhow::{Result, ensure};

use crate::lab::Node;
use crate::progress::say;

/// The text that programs print for it.
pub(super) const EAGAIN: &str = "Resource temporarily unavailable";

const WATCH: &str = "cd /sys/kernel/tracing 2>/dev/null && [ -e trace ] || mount -t tracefs tracefs /sys/kernel/tracing; \
     modprobe -a netfs cifs; cd /sys/kernel/tracing; echo > trace; \
     echo 1 > events/netfs/netfs_failure/enable; echo 1 > tracing_on; \
     for event in cmd_err open_err exit_err reconnect reconnect_detected; do echo 1 > events/cifs/smb3_$event/enable; done";
const ENDED: &str = "grep 'netfs_failure: .* e=-11$' /sys/kernel/tracing/trace || true";
const ANSWERED: &str = "grep 'smb3_cmd_err: .* cmd=[89] .* rc=-11$' /sys/kernel/tracing/trace || true";

/// Makes the client's kernel trace them from now on.
pub(super) fn watch(client: &Node) -> Result<()> {
    client.run(WATCH).map(drop)
}

/// What the client's kernel has traced since then.
pub(super) struct GivenUp {
    /// Requests that the kernel itself ended.
    pub(super) ended: Vec<String>,
    /// Server responses that made the kernel end a request in the same way.
    pub(super) answered: Vec<String>,
}

impl GivenUp {
    pub(super) fn by(client: &Node) -> Result<Self> {
        let traced = |grep| client.run(grep).map(|said| said.lines().map(str::to_owned).collect());
        Ok(Self { ended: traced(ENDED)?, answered: traced(ANSWERED)? })
    }

    /// Fails unless these errors of programs are at most `allowed`, the kernel itself has caused each of them, and no server
    /// response can have. Returns their number.
    pub(super) fn explains(&self, errors: &[&String], allowed: usize) -> Result<usize> {
        let Self { ended, answered } = self;
        let of_kernel = errors.iter().all(|line| line.ends_with(&format!("{EAGAIN} (os error 11)")));
        let most = if answered.is_empty() { ended.len().min(allowed) } else { 0 };
        ensure!(
            of_kernel && errors.len() <= most,
            "programs were given errors, {errors:?}; the client's kernel gave up {ended:?} and was answered {answered:?}"
        );
        for line in errors {
            say(format!("by the client's own fault: {line}; its kernel says {ended:?}"));
        }
        Ok(errors.len())
    }
}
