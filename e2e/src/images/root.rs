//! The root file system of every node, which also serves foreign suites natively through a chroot.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::cache::{Artefact, Cache, Recipe};
use crate::host;
use crate::progress::step;

/// Debian release of the nodes.
pub const RELEASE: &str = "trixie";

/// One root for guests and for foreign suites: a megabyte saved is not worth a second recipe.
const PACKAGES: &[&str] = &[
    "acl",
    "attr",
    "busybox-static",
    "containernetworking-plugins",
    "e2fsprogs",
    "fio",
    "git",
    "iproute2",
    "iptables",
    "iputils-ping",
    "jq",
    "keyutils",
    "kmod",
    "mount",
    "netcat-openbsd",
    "procps",
    "python3-cryptography",
    "python3-impacket",
    "python3-minimal",
    "quota",
    "runc",
    "samba",
    "samba-testsuite",
    "smbclient",
    "strace",
    "tar",
    "util-linux",
    "xfsprogs",
];

/// Services must not start while packages are unpacked.
const SETUP: &str = r#"mkdir -p "$1/usr/sbin"; printf '#!/bin/sh\nexit 101\n' > "$1/usr/sbin/policy-rc.d"; chmod +x "$1/usr/sbin/policy-rc.d""#;

/// Mount points of the boot, and an empty machine-id so that no two guests share one.
const CUSTOMIZE: &str = r#"mkdir -p "$1/opt/forebay" "$1/usr/lib/modules" "$1/srv" "$1/scratch"; : > "$1/etc/machine-id"; rm -rf "$1"/var/cache/apt/*.bin "$1"/var/lib/apt/lists/*"#;

/// The entry: `tree/`, `root.erofs`, `packages.txt`.
pub fn get(cache: &Cache) -> Result<Artefact> {
    let recipe = Recipe::default()
        .with("release", RELEASE)
        .with("packages", PACKAGES.join("\n"))
        .with("setup", SETUP)
        .with("customize", CUSTOMIZE)
        .with("layout", "1");
    cache.get("root", &recipe, |into| {
        host::ensure_packages(host::BUILD_PACKAGES)?;
        if !host::is_root() {
            bail!(
                "the nodes' root file system is made once, as root; run:  sudo FOREBAY_CACHE={} {} prepare",
                cache.root().display(),
                std::env::current_exe()?.display()
            );
        }
        step(
            &format!("making the nodes' root file system (Debian {RELEASE}, {} packages)", PACKAGES.len()),
            || make(into),
        )
    })
}

fn make(into: &Path) -> Result<()> {
    let tree = into.join("tree");
    host::run(
        Command::new("mmdebstrap")
            .args(["--variant=minbase", "--mode=root", "--quiet"])
            .arg("--keyring=/usr/share/keyrings/debian-archive-keyring.gpg")
            .arg("--aptopt=APT::Install-Recommends \"false\"")
            .arg("--dpkgopt=path-exclude=/usr/share/man/*")
            .arg("--dpkgopt=path-exclude=/usr/share/doc/*")
            .arg("--dpkgopt=path-exclude=/usr/share/locale/*")
            .arg("--dpkgopt=force-unsafe-io")
            .arg(format!("--include={}", PACKAGES.join(",")))
            .arg(format!("--setup-hook={SETUP}"))
            .arg(format!("--customize-hook={CUSTOMIZE}"))
            .arg(RELEASE)
            .arg(&tree)
            .arg(host::mirror()?),
    )?;
    let packages = host::run(Command::new("dpkg-query").arg(format!("--root={}", tree.display())).args([
        "-W",
        "-f",
        "${Package} ${Version}\n",
    ]))?;
    fs::write(into.join("packages.txt"), packages)?;
    host::run(Command::new("mkfs.erofs").arg("-zlz4").arg(into.join("root.erofs")).arg(&tree))?;
    Ok(())
}
