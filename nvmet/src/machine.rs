//! This machine: nvmet's root, kernel modules, addresses of interfaces.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, mount};

use crate::config::{Address, Config, Transport};
use crate::plan::Port;

/// Where configfs is mounted.
const CONFIGFS: &str = "/sys/kernel/config";
/// The kernel's target in configfs.
pub(crate) const NVMET: &str = "/sys/kernel/config/nvmet";

/// Why the kernel's target is not available.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoTarget {
    /// The module configfs is missing.
    #[error("the kernel has no {CONFIGFS}: load module configfs ({0})")]
    NoConfigfs(String),
    /// configfs cannot be mounted.
    #[error("mount configfs on {CONFIGFS}: {0}")]
    NotMounted(io::Error),
    /// The module nvmet is missing.
    #[error("{NVMET} is not there: load modules nvmet and nvmet-tcp or nvmet-rdma ({0})")]
    NoNvmet(String),
}

/// Makes the kernel's target available and returns its root. Requests each transport module only once.
///
/// # Errors
/// If it cannot be made available from here.
pub(crate) fn prepare(config: &Config, asked: &mut BTreeSet<Transport>) -> Result<PathBuf, NoTarget> {
    let root = PathBuf::from(NVMET);
    if !root.is_dir() {
        if !Path::new(CONFIGFS).is_dir() {
            let result = load(&["configfs"]);
            if !Path::new(CONFIGFS).is_dir() {
                return Err(NoTarget::NoConfigfs(result));
            }
        }
        if !is_mounted() {
            mount("configfs", CONFIGFS, "configfs", MountFlags::empty(), None)
                .map_err(|errno| NoTarget::NotMounted(errno.into()))?;
        }
        if !root.is_dir() {
            let result = load(&["nvmet"]);
            if !root.is_dir() {
                return Err(NoTarget::NoNvmet(result));
            }
        }
    }
    for (transport, name) in [(Transport::Tcp, "nvmet_tcp"), (Transport::Rdma, "nvmet_rdma")] {
        let is_wanted = config.ports.iter().any(|port| port.transport == transport);
        if is_wanted && asked.insert(transport) && !Path::new("/sys/module").join(name).is_dir() {
            // If this fails, the kernel requests the module when the first port is used.
            load(&[name]);
        }
    }
    Ok(root)
}

/// Returns the root if it exists.
pub(crate) fn find() -> Option<PathBuf> {
    let root = PathBuf::from(NVMET);
    root.is_dir().then_some(root)
}

fn is_mounted() -> bool {
    is_mounted_in(&std::fs::read_to_string("/proc/self/mounts").unwrap_or_default())
}

/// In a container, the node's directory is mounted at this path, whether or not it contains configfs.
fn is_mounted_in(mounts: &str) -> bool {
    mounts.lines().any(|line| {
        let mut fields = line.split(' ').skip(1);
        fields.next() == Some(CONFIGFS) && fields.next() == Some("configfs")
    })
}

/// Runs modprobe and returns its message.
fn load(names: &[&str]) -> String {
    match Command::new("modprobe").arg("-a").args(names).output() {
        Ok(output) if output.status.success() => "modprobe found nothing to do".into(),
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => format!("modprobe: {error}"),
    }
}

/// The ports with their current addresses.
pub(crate) fn ports(config: &Config) -> Vec<Port> {
    let port =
        |config: &crate::config::Port| Port { config: config.clone(), address: address(&config.address) };
    config.ports.iter().map(port).collect()
}

fn address(wanted: &Address) -> Result<IpAddr, String> {
    let name = match wanted {
        Address::Ip(ip) => return Ok(*ip),
        Address::Interface(name) => name,
    };
    let found = if_addrs::get_if_addrs().map_err(|error| format!("list addresses: {error}"))?;
    first(found.into_iter().filter(|interface| interface.name == *name).map(|interface| interface.ip()))
        .ok_or_else(|| format!("interface {name} is not there, or has no address"))
}

/// The first address that other machines can use: IPv4 before IPv6, because IPv6 link-local addresses always exist.
fn first(found: impl Iterator<Item = IpAddr>) -> Option<IpAddr> {
    let usable = found.filter(|ip| match ip {
        IpAddr::V4(ip) => !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    });
    usable.min_by_key(IpAddr::is_ipv6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_configfs_mount_counts_as_mounted() {
        assert!(is_mounted_in("proc /proc proc rw 0 0\nnone /sys/kernel/config configfs rw 0 0\n"));
        assert!(!is_mounted_in("sysfs /sys sysfs rw 0 0\nsysfs /sys/kernel/config sysfs rw,nosuid 0 0\n"));
        assert!(!is_mounted_in(""));
    }

    #[test]
    fn interface_address_prefers_ipv4_and_skips_link_local() {
        let of = |texts: &[&str]| first(texts.iter().map(|text| text.parse().expect("an address")));
        let is = |text: &str| Some(text.parse::<IpAddr>().expect("an address"));
        assert_eq!(of(&["fe80::1", "fd00::2", "10.0.0.9", "10.0.0.1"]), is("10.0.0.9"));
        assert_eq!(of(&["fe80::1", "fd00::2", "169.254.1.1"]), is("fd00::2"));
        assert_eq!(of(&["fe80::1"]), None);
        assert!(address(&Address::Interface("lo".into())).is_ok());
        let why = address(&Address::Interface("forebay-none".into())).expect_err("none");
        assert_eq!(why, "interface forebay-none is not there, or has no address");
    }
}
