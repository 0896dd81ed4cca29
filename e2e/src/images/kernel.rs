//! Debian's stock kernel from trixie-backports, and the modules that a node needs, as a separate image.
//!
//! The modules are separate from the root file system, so that a new kernel does not require a new root. Modules built out of
//! tree (SMB Direct in cifs.ko is off in Debian's configuration) are in `updates/` of an image derived from this one:
//! [`super::smb_direct`].

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::Versions;
use crate::cache::{Artefact, Cache, Recipe};
use crate::host::{self, Archive};
use crate::progress::step;

/// The kernel series; its newest build is used.
pub const SERIES: &str = "7.2";
/// The Debian release that has it.
pub const RELEASE: &str = "trixie-backports";

/// Folders and files below `kernel/` to include in the image.
const MODULES: &[&str] = &[
    "arch/x86/crypto",
    "block",
    "crypto",
    "drivers/block",
    "drivers/char/hw_random",
    "drivers/infiniband/core",
    "drivers/infiniband/sw",
    "drivers/net/dummy.ko.xz",
    "drivers/net/net_failover.ko.xz",
    "drivers/net/veth.ko.xz",
    "drivers/net/virtio_net.ko.xz",
    "drivers/nvme",
    "drivers/virtio",
    "fs",
    "lib",
    "net/802",
    "net/bridge",
    "net/core",
    "net/dns_resolver",
    "net/ipv4",
    "net/ipv6",
    "net/llc",
    "net/netfilter",
    "net/sched",
    "net/tls",
];

/// Modules that the initrd must load before it can mount the root.
const BOOT_MODULES: &[&str] = &["virtio_pci", "virtio_blk", "erofs", "overlay"];

/// Debian splits the kernel into the image, the modules, and `modules.builtin` and `modules.order`.
pub fn packages(abi: &str) -> [String; 3] {
    ["linux-base", "linux-binary", "linux-modules"].map(|part| format!("{part}-{abi}"))
}

/// The newest ABI of the series in the archive, which does not keep old ones.
pub fn newest_abi(archive: &Archive) -> Result<String> {
    let pattern = format!(r"^linux-binary-{}\.[0-9]+\+deb13-amd64$", SERIES.replace('.', r"\."));
    newest(archive.names(&pattern)?).with_context(|| format!("the archive has no kernel {SERIES}"))
}

fn newest(names: Vec<String>) -> Option<String> {
    names
        .into_iter()
        .filter_map(|name| {
            let abi = name.strip_prefix("linux-binary-")?.to_owned();
            let patch: u32 = abi.strip_prefix(SERIES)?.strip_prefix('.')?.split('+').next()?.parse().ok()?;
            Some((patch, abi))
        })
        .max()
        .map(|(_, abi)| abi)
}

/// The cache entry: `vmlinuz`, `modules.erofs`, and `boot/` with the initrd's modules and their order in `boot/list`.
pub fn get(cache: &Cache, versions: &Versions) -> Result<Artefact> {
    let abi = versions.get("kernel-abi")?;
    let pinned = versions.pinned(&packages(abi))?;
    let recipe = Recipe::default()
        .with("packages", pinned.join("\n"))
        .with("modules", MODULES.join("\n"))
        .with("boot", BOOT_MODULES.join("\n"))
        .with("layout", "1");
    cache.get("kernel", &recipe, |into| {
        step(&format!("unpacking kernel {abi} and its modules"), || {
            let archive = Archive::open(&cache.root().join("apt"), false)?;
            make(&archive, &pinned, abi, into)
        })
    })
}

fn make(archive: &Archive, pinned: &[String], abi: &str, into: &Path) -> Result<()> {
    let debs = into.join("debs");
    archive.unpack(pinned, &debs)?;
    let from = debs.join("usr/lib/modules").join(abi);
    fs::copy(from.join("vmlinuz"), into.join("vmlinuz"))?;

    // depmod and modprobe require <base>/lib/modules/<abi>.
    let base = into.join("base");
    let to = base.join("lib/modules").join(abi);
    fs::create_dir_all(to.join("kernel"))?;
    for name in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
        fs::copy(from.join(name), to.join(name))?;
    }
    for module in MODULES.iter().filter(|module| from.join("kernel").join(module).exists()) {
        host::run(
            Command::new("cp")
                .current_dir(from.join("kernel"))
                .args(["-r", "--parents", module])
                .arg(to.join("kernel")),
        )?;
    }
    // Decompressed and stripped: this takes the host one second, but would take an emulated guest several.
    host::run(Command::new("sh").current_dir(&to).args([
        "-c",
        "find . -name '*.ko.xz' -print0 | xargs -0 -r -P2 -n50 xz -d && find . -name '*.ko' -print0 | xargs -0 -r strip --strip-debug",
    ]))?;
    host::run(Command::new("depmod").arg("-b").arg(&base).arg(abi))?;

    let boot = into.join("boot");
    fs::create_dir(&boot)?;
    let mut list: Vec<String> = Vec::new();
    for module in BOOT_MODULES {
        let lines = host::run(Command::new("modprobe").arg("-d").arg(&base).args([
            "-S",
            abi,
            "--show-depends",
            module,
        ]))?;
        // "insmod <path> " for each dependency in order; "builtin <name>" needs no action.
        for path in lines.lines().filter_map(|line| line.strip_prefix("insmod ")).map(str::trim) {
            let name = path.rsplit('/').next().unwrap_or(path).to_owned();
            if !list.contains(&name) {
                fs::copy(path, boot.join(&name))?;
                list.push(name);
            }
        }
    }
    fs::write(boot.join("list"), list.join("\n") + "\n")?;
    host::run(Command::new("mkfs.erofs").arg(into.join("modules.erofs")).arg(base.join("lib/modules")))?;
    fs::remove_dir_all(&debs)?;
    fs::remove_dir_all(&base)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_kernel_abi_is_chosen_numerically() {
        let names = [
            "linux-binary-7.2.9+deb13-amd64",
            "linux-binary-7.2.12+deb13-amd64",
            "linux-binary-7.3.4+deb13-amd64",
        ];
        assert_eq!(newest(names.map(str::to_owned).to_vec()).as_deref(), Some("7.2.12+deb13-amd64"));
        assert_eq!(newest(Vec::new()), None);
    }
}
