//! Facts of the running kernel.

use crate::modules::Modules;
use crate::tree::Tree;

/// Whether a kernel has a feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// The kernel has it, or a module provides it that can be loaded on demand.
    Yes,
    /// The kernel does not have it.
    No,
    /// The readable files do not show whether the kernel has it.
    #[default]
    Unknown,
}

/// Facts of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kernel {
    /// As `uname -r`.
    pub release: Option<String>,
    /// As `uname -m`; kernels before 6.1 have no file for it.
    pub architecture: Option<String>,
    /// `PRETTY_NAME` of os-release.
    pub operating_system: Option<String>,
    /// The SMB client.
    pub cifs: Presence,
    /// SMB Direct in that client.
    pub cifs_smb_direct: Presence,
    /// NVMe over TCP, the host side.
    pub nvme_tcp: Presence,
    /// NVMe over RDMA, the host side.
    pub nvme_rdma: Presence,
    /// The kernel's NVMe target.
    pub nvmet: Presence,
    /// io_uring for unprivileged programs.
    pub io_uring: Presence,
}

pub(crate) fn read(tree: &Tree<'_>) -> Kernel {
    let release = tree.attribute("proc/sys/kernel/osrelease");
    let modules = Modules::read(tree, release.as_deref());
    let config = Config::read(tree, release.as_deref());
    let cifs = match tree.list("proc/filesystems") {
        Some(list) if list.lines().any(|l| matches!(l.split_whitespace().last(), Some("cifs" | "smb3"))) => {
            Presence::Yes
        }
        _ => modules.presence("cifs"),
    };
    Kernel {
        architecture: tree.attribute("proc/sys/kernel/arch"),
        operating_system: operating_system(tree),
        cifs,
        cifs_smb_direct: smb_direct(tree, &modules, &config, cifs),
        nvme_tcp: modules.presence("nvme_tcp"),
        nvme_rdma: modules.presence("nvme_rdma"),
        nvmet: modules.presence("nvmet"),
        io_uring: match tree.attribute("proc/sys/kernel/io_uring_disabled").as_deref() {
            Some("0") => Presence::Yes,
            // 1: only for CAP_SYS_ADMIN and one group; 2: disabled for all.
            Some(_) => Presence::No,
            // Kernels before 6.6 do not have this setting.
            None => config.presence("CONFIG_IO_URING"),
        },
        release,
    }
}

/// SMB Direct is a build-time option of cifs, which no file states directly. The state of the loaded module takes
/// precedence, then the dependencies of the module on disk, then the kernel's configuration.
fn smb_direct(tree: &Tree<'_>, modules: &Modules, config: &Config, cifs: Presence) -> Presence {
    const NEEDS: [&str; 2] = ["rdma_cm", "smbdirect"];
    // Settings of SMB Direct exist if and only if it was compiled in.
    let settings = tree.names("proc/fs/cifs");
    if !settings.is_empty() {
        return yes_or_no(settings.iter().any(|s| s.starts_with("smbd_") || s == "rdma_readwrite_threshold"));
    }
    if modules.is_loaded("cifs") {
        return yes_or_no(NEEDS.iter().any(|used| modules.is_used_by(used, "cifs")));
    }
    if let Some(needed) = modules.dependencies("cifs") {
        // If RDMA is built into the kernel, the module does not depend on a module for it.
        let built_in = NEEDS.iter().any(|n| modules.is_built_in(n));
        let needs = needed.iter().any(|n| NEEDS.contains(&n.as_str()));
        if needs || !built_in {
            return yes_or_no(needs);
        }
    }
    if cifs == Presence::No {
        return Presence::No;
    }
    config.presence("CONFIG_CIFS_SMB_DIRECT")
}

fn yes_or_no(yes: bool) -> Presence {
    if yes { Presence::Yes } else { Presence::No }
}

/// The build configuration of the kernel, if it is available as text. (/proc/config.gz would require a decompressor.)
struct Config(Option<String>);

impl Config {
    fn read(tree: &Tree<'_>, release: Option<&str>) -> Self {
        let release = release.filter(|r| !r.contains('/'));
        Self(release.and_then(|release| {
            [
                format!("boot/config-{release}"),
                format!("lib/modules/{release}/config"),
                format!("usr/lib/modules/{release}/config"),
            ]
            .iter()
            .find_map(|path| tree.list(path))
        }))
    }

    fn presence(&self, option: &str) -> Presence {
        // Another option proves that this is a configuration, and not an empty or truncated file.
        let Some(text) = self.0.as_deref().filter(|t| t.contains("CONFIG_MMU=y")) else {
            return Presence::Unknown;
        };
        let value = text.lines().find_map(|l| l.strip_prefix(option)?.strip_prefix('='));
        yes_or_no(matches!(value.map(str::trim), Some("y" | "m")))
    }
}

/// os-release(5).
fn operating_system(tree: &Tree<'_>) -> Option<String> {
    let text = tree.list("etc/os-release").or_else(|| tree.list("usr/lib/os-release"))?;
    let value = text.lines().find_map(|l| l.strip_prefix("PRETTY_NAME="))?.trim();
    let quoted = |mark: char| value.strip_prefix(mark).and_then(|v| v.strip_suffix(mark));
    let value = quoted('"').or_else(|| quoted('\'')).unwrap_or(value);
    let name: String =
        value.chars().filter(|c| !c.is_control() && *c != '\\').take(crate::limits::TEXT_CHARS_MAX).collect();
    (!name.is_empty()).then_some(name)
}
