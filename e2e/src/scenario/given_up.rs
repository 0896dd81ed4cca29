//! Reads and writes that the client's kernel ends by itself, with EAGAIN.
//!
//! Linux's client (7.2: cifs_issue_read, cifs_issue_write) ends a READ or WRITE with EAGAIN, for good, where its connection or
//! its handle was lost after the request had been prepared and before it is sent, instead of preparing it again. What is lost
//! on its way it sends again. Statuses that it takes for EAGAIN it traces, too: those would be a server's fault.

use anyhow::Result;

use crate::lab::Node;

/// How programs show it.
pub(super) const EAGAIN: &str = "Resource temporarily unavailable";

const WATCH: &str = "cd /sys/kernel/tracing 2>/dev/null && [ -e trace ] || mount -t tracefs tracefs /sys/kernel/tracing; \
     modprobe -a netfs cifs; cd /sys/kernel/tracing; echo > trace; \
     echo 1 > events/netfs/netfs_failure/enable; echo 1 > events/cifs/smb3_cmd_err/enable; echo 1 > tracing_on";
const ENDED: &str = "grep 'netfs_failure: .* e=-11$' /sys/kernel/tracing/trace || true";
const ANSWERED: &str = "grep 'smb3_cmd_err: .* cmd=[89] .* rc=-11$' /sys/kernel/tracing/trace || true";

/// Has the client's kernel trace them from now on.
pub(super) fn watch(client: &Node) -> Result<()> {
    client.run(WATCH).map(drop)
}

/// What the client's kernel traced since.
pub(super) struct GivenUp {
    /// What it ended by itself.
    pub(super) ended: Vec<String>,
    /// What a server answered so that it ended it in the same way.
    pub(super) answered: Vec<String>,
}

impl GivenUp {
    pub(super) fn by(client: &Node) -> Result<Self> {
        let traced = |grep| client.run(grep).map(|said| said.lines().map(str::to_owned).collect());
        Ok(Self { ended: traced(ENDED)?, answered: traced(ANSWERED)? })
    }

    /// How many errors of programs this explains: none where a server may have brought them about.
    pub(super) fn explains(&self) -> usize {
        if self.answered.is_empty() { self.ended.len() } else { 0 }
    }
}
