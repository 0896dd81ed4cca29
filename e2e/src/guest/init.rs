//! PID 1 of a guest: sets up mounts, network and names, then starts the agent and reaps orphans.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{WaitOptions, wait};
use rustix::system::{RebootCommand, reboot};

use super::PORT;

/// Prefix of our parameters on the kernel's command line.
pub const PARAMETER: &str = "forebay.";
/// MTU of the lab's network: with jumbo frames an emulated guest handles only one packet in six.
pub const MTU: u32 = 9000;

/// Runs forever, or powers the guest off and prints the reason on its console.
pub fn main() -> ! {
    let error = match start() {
        Ok(never) => match never {},
        Err(error) => error,
    };
    eprintln!("forebay-guest init failed: {error:#}");
    rustix::fs::sync();
    let _ = reboot(RebootCommand::PowerOff);
    std::process::exit(1)
}

fn start() -> Result<std::convert::Infallible> {
    for (kind, at, data) in [
        ("devpts", "/dev/pts", "mode=620,ptmxmode=666"),
        ("tmpfs", "/dev/shm", "mode=1777"),
        ("tmpfs", "/run", "mode=755"),
        ("tmpfs", "/tmp", "mode=1777"),
        ("cgroup2", "/sys/fs/cgroup", ""),
        ("debugfs", "/sys/kernel/debug", ""),
    ] {
        let _ = fs::create_dir_all(at);
        let data = std::ffi::CString::new(data)?;
        // With nodev, no terminal on devpts could be opened.
        let flags = if kind == "devpts" { MountFlags::empty() } else { MountFlags::NODEV };
        mount(kind, at, kind, MountFlags::NOSUID | flags, data.as_c_str())
            .with_context(|| format!("mount {kind} at {at}"))?;
    }
    // As for the kubelet: the driver's mounts must be visible everywhere.
    mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)?;

    let parameters = parameters(&fs::read_to_string("/proc/cmdline")?);
    let get = |name: &str| {
        parameters.get(name).with_context(|| format!("no {PARAMETER}{name} on the command line"))
    };
    let node = get("node")?;
    rustix::system::sethostname(node.as_bytes())?;
    let mut hosts = "127.0.0.1 localhost\n".to_owned();
    for (name, address) in get("hosts")?.split(',').filter_map(|pair| pair.split_once(':')) {
        hosts.push_str(&format!("{address} {name}\n"));
    }
    fs::write("/etc/hosts", hosts)?;
    network(get("address")?)?;

    let port = port().with_context(|| format!("no virtio serial port named {PORT}"))?;
    let mut agent = Command::new(std::env::current_exe()?);
    agent.arg("agent").arg("--port").arg(port).current_dir("/root");
    agent.env("PATH", "/opt/forebay/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    agent.env("HOME", "/root").env("TERM", "linux").env("LC_ALL", "C.UTF-8");
    let agent = agent.spawn().context("start the agent")?;
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get() as u32 == agent.id() => {
                anyhow::bail!("the agent ended: {status:?}")
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("wait for children"),
        }
    }
}

fn parameters(command_line: &str) -> HashMap<String, String> {
    let ours = command_line.split_ascii_whitespace().filter_map(|word| word.strip_prefix(PARAMETER));
    ours.filter_map(|word| word.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn network(address: &str) -> Result<()> {
    let run = |program: &str, line: &str| -> Result<()> {
        let status =
            Command::new(program).args(line.split(' ')).env("PATH", "/usr/sbin:/usr/bin").status()?;
        anyhow::ensure!(status.success(), "{program} {line} ended with {status}");
        Ok(())
    };
    run("modprobe", "virtio_net")?;
    let interface = fs::read_dir("/sys/class/net")?
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .find(|name| name.starts_with('e'))
        .context("no network interface")?;
    run("ip", "link set lo up")?;
    run("ip", &format!("link set {interface} mtu {MTU} up"))?;
    run("ip", &format!("address add {address}/24 dev {interface}"))
}

/// The device of our port, found by name.
fn port() -> Option<PathBuf> {
    for entry in fs::read_dir("/sys/class/virtio-ports").ok()? {
        let entry = entry.ok()?;
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == PORT {
            return Some(Path::new("/dev").join(entry.file_name()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #[test]
    fn only_forebay_parameters_are_read_from_the_kernel_command_line() {
        let found =
            super::parameters("console=ttyS0 forebay.node=node1 quiet forebay.hosts=a:1,b:2 node=x\n");
        assert_eq!(found.len(), 2);
        assert_eq!(found["node"], "node1");
        assert_eq!(found["hosts"], "a:1,b:2");
    }
}
