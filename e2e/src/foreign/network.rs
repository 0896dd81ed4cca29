//! A lane's network: a namespace that contains only a loopback device, so that suites can block connections with their own
//! rules and every port is free.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Sets up the namespace and holds it until this thread has entered it. Received data is acknowledged immediately: smbtorture
/// blocks a channel right after a response arrived on it. If its acknowledgment were still delayed, the server could not send
/// anything new on the channel, in particular no break.
const HOLD: &str = "ip link set lo up
ip route replace table local local 127.0.0.1 dev lo proto kernel scope host src 127.0.0.1 quickack 1
echo ready
exec cat";

/// Moves this thread into a new namespace. Its future children are there, too; other threads stay where they are.
pub(super) fn enter() -> Result<()> {
    let mut holder = Command::new("unshare")
        .args(["--net", "--", "sh", "-euc", HOLD])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("start unshare")?;
    let mut answer = String::new();
    if let Some(output) = holder.stdout.take() {
        BufReader::new(output).read_line(&mut answer)?;
    }
    let entered = match answer.trim_end() {
        "ready" => File::open(format!("/proc/{}/ns/net", holder.id()))
            .context("open the namespace")
            .and_then(|namespace| {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .context("enter the namespace")
            }),
        _ => Err(anyhow::anyhow!("the loopback of a new network namespace does not come up")),
    };
    // It ends when its standard input is closed.
    drop(holder.stdin.take());
    let mut complaint = String::new();
    if let Some(mut errors) = holder.stderr.take() {
        errors.read_to_string(&mut complaint)?;
    }
    holder.wait()?;
    match entered {
        Err(error) if !complaint.is_empty() => bail!("{error:#}: {}", complaint.trim_end()),
        entered => entered,
    }
}
