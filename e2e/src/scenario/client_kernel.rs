//! What a client's kernel is doing, for the message of a scenario that failed.

use crate::lab::Node;

/// Requests that the client waits for, errors that its kernel traced ([`super::given_up::watch`]), its last messages, and the
/// kernel's stacks of processes that wait. Parts that a kernel does not have are left out.
const STATE: &str = "set +e; exec 2> /dev/null; date +%T; cat /proc/fs/cifs/DebugData
     grep -v '^#' /sys/kernel/tracing/trace | tail -n 40; dmesg | tail -n 20
     for task in /proc/[0-9]*/task/[0-9]*; do
         grep -qE 'cifs|netfs' $task/stack || continue
         echo \"$task $(cat $task/comm):\"; cat $task/stack
     done; true";

pub(super) fn state(client: &Node) -> String {
    let shown = client.run(STATE).unwrap_or_else(|error| format!("{error:#}"));
    format!("{}'s kernel:\n{shown}", client.name())
}
