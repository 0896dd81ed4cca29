//! Direct mounts with the kernel's own client, with options that a CSI driver would never use.

use std::ffi::CString;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};
use rustix::mount::{MountFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

/// Arguments of [`mount`].
#[derive(Serialize, Deserialize)]
pub struct Mount {
    /// Server address.
    pub server: String,
    /// Share.
    pub share: String,
    /// Mount point, which is created.
    pub at: PathBuf,
    /// `(name, value)`, with an empty value for a flag. None may contain a comma, which would end an option early.
    pub options: Vec<(String, String)>,
}

/// Mounts a share. On failure, the error contains the kernel's own message.
pub fn mount(mount: Mount) -> Result<()> {
    // Without a mount.cifs helper the kernel parses an address from the source, but resolves no names.
    let _ = Command::new("modprobe").arg("cifs").status();
    fs::create_dir_all(&mount.at)?;
    let source = format!("//{}/{}", mount.server, mount.share);
    let words = mount.options.iter().map(|(name, value)| match value.as_str() {
        "" => name.clone(),
        value => format!("{name}={value}"),
    });
    let data = CString::new(words.collect::<Vec<_>>().join(","))?;
    if let Err(error) = rustix::mount::mount(&source, &mount.at, "cifs", MountFlags::empty(), data.as_c_str())
    {
        let said = Command::new("dmesg").output().map(|output| output.stdout).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let tail: Vec<&str> = said.lines().rev().take(4).collect();
        bail!("mount {source}: {error} ({})", tail.into_iter().rev().collect::<Vec<_>>().join(" | "));
    }
    Ok(())
}

/// Unmounts, and removes the mount point.
pub fn unmount(at: PathBuf) -> Result<()> {
    rustix::mount::unmount(&at, UnmountFlags::empty())?;
    fs::remove_dir(&at)?;
    Ok(())
}
