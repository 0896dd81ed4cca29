//! The kernel's NVMe target, configured through configfs. The fabric's scenarios connect to it.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Path of nvmet's configfs.
const NVMET: &str = "/sys/kernel/config/nvmet";

/// A subsystem with one namespace on a file, and the ports that offer it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Offer {
    /// Subsystem.
    pub nqn: String,
    /// The file, which must exist.
    pub file: PathBuf,
    /// The namespace's UUID.
    pub uuid: String,
    /// Allowed hosts.
    pub hosts: Vec<AllowedHost>,
    /// Ports.
    pub ports: Vec<Port>,
}

/// An allowed host.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AllowedHost {
    /// Host NQN.
    pub nqn: String,
    /// The key that the host must prove to have.
    pub key: Option<String>,
}

/// A port.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Port {
    /// Its number.
    pub id: u16,
    /// `tcp` or `rdma`.
    pub transport: String,
    /// IPv4 address.
    pub address: String,
    /// TCP port, or RDMA service.
    pub service: u16,
    /// Whether it accepts only TLS.
    #[serde(default)]
    pub tls: bool,
}

/// Capabilities of the kernel's target.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Offered {
    /// Whether it can authenticate hosts with keys.
    pub authentication: bool,
}

/// Offers the subsystem. Existing configuration that is already correct is not touched.
pub fn offer(offer: Offer) -> Result<Offered> {
    let root = Path::new(NVMET);
    let subsystem = root.join("subsystems").join(&offer.nqn);
    folder(&subsystem)?;
    set(&subsystem.join("attr_allow_any_host"), "0")?;
    // Otherwise the serial number changes with each restart.
    set(&subsystem.join("attr_serial"), "forebay-lab")?;
    let namespace = subsystem.join("namespaces/1");
    folder(&namespace)?;
    set(&namespace.join("device_path"), &offer.file.display().to_string())?;
    set(&namespace.join("device_uuid"), &offer.uuid)?;
    // Must be set before the namespace is enabled. Linux 6.13 and later.
    set(&namespace.join("resv_enable"), "1")?;
    set(&namespace.join("enable"), "1")?;
    let mut authentication = false;
    for host in &offer.hosts {
        let at = root.join("hosts").join(&host.nqn);
        folder(&at)?;
        authentication = at.join("dhchap_key").exists();
        if let Some(key) = host.key.as_ref().filter(|_| authentication) {
            set(&at.join("dhchap_key"), key)?;
        }
        link(&at, &subsystem.join("allowed_hosts").join(&host.nqn))?;
    }
    for port in &offer.ports {
        let at = root.join("ports").join(port.id.to_string());
        folder(&at)?;
        for (attribute, value) in [
            ("addr_trtype", port.transport.as_str()),
            ("addr_adrfam", "ipv4"),
            ("addr_traddr", &port.address),
            ("addr_trsvcid", &port.service.to_string()),
        ] {
            set(&at.join(attribute), value)?;
        }
        if port.tls {
            set(&at.join("addr_tsas"), "tls1.3")?;
            set(&at.join("addr_treq"), "required")?;
        }
        link(&subsystem, &at.join("subsystems").join(&offer.nqn))?;
    }
    Ok(Offered { authentication })
}

/// Removes everything that any program offers.
pub fn withdraw((): ()) -> Result<()> {
    let root = Path::new(NVMET);
    for port in entries(&root.join("ports"))? {
        for link in entries(&port.join("subsystems"))? {
            fs::remove_file(&link).with_context(|| link.display().to_string())?;
        }
        // The bundled target's mark.
        entries(&port.join("referrals"))?.iter().try_for_each(|referral| remove(referral))?;
        remove(&port)?;
    }
    for subsystem in entries(&root.join("subsystems"))? {
        for link in entries(&subsystem.join("allowed_hosts"))? {
            fs::remove_file(&link).with_context(|| link.display().to_string())?;
        }
        for namespace in entries(&subsystem.join("namespaces"))? {
            set(&namespace.join("enable"), "0")?;
            remove(&namespace)?;
        }
        remove(&subsystem)?;
    }
    entries(&root.join("hosts"))?.iter().try_for_each(|host| remove(host))
}

fn entries(at: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(at) {
        Ok(found) => found.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| at.display().to_string()),
    }
}

fn folder(at: &Path) -> Result<()> {
    match fs::create_dir(at) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("make {}", at.display()))
        }
        _ => Ok(()),
    }
}

fn remove(at: &Path) -> Result<()> {
    fs::remove_dir(at).with_context(|| format!("remove {}", at.display()))
}

fn link(to: &Path, at: &Path) -> Result<()> {
    match symlink(to, at) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("link {}", at.display()))
        }
        _ => Ok(()),
    }
}

/// Most attributes cannot be written while the namespace or port is enabled, not even with their current value.
fn set(attribute: &Path, value: &str) -> Result<()> {
    let now = fs::read_to_string(attribute).with_context(|| attribute.display().to_string())?;
    if now.trim() == value {
        return Ok(());
    }
    fs::write(attribute, value).with_context(|| format!("write {}", attribute.display()))
}
