//! The root file system of every node, which also runs third-party suites natively through chroot.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::cache::{Artefact, Cache, Recipe};
use crate::host;
use crate::progress::step;

/// Debian release of the nodes.
pub const RELEASE: &str = "trixie";

/// Source of the newest Samba for this release: suites and comparisons should use the newest version.
const BACKPORTS: &str = "trixie-backports";

/// One root for guests and for third-party suites: saving a megabyte does not justify a second recipe.
const PACKAGES: &[&str] = &[
    "acl",
    "attr",
    "busybox-static",
    "cifs-utils",
    "containernetworking-plugins",
    "e2fsprogs",
    "fio",
    "git",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "iptables",
    "iputils-ping",
    "jq",
    "keyutils",
    "kmod",
    "krb5-admin-server",
    "krb5-kdc",
    "krb5-user",
    "ktls-utils",
    "libglib2.0-0t64",
    "libnl-genl-3-200",
    "mount",
    "netcat-openbsd",
    "procps",
    "python3",
    "python3-cryptography",
    "python3-impacket",
    "python3-venv",
    "quota",
    "rdmacm-utils",
    "rsync",
    "runc",
    "samba",
    "samba-testsuite",
    "smbclient",
    "strace",
    "tar",
    "util-linux",
    "xfsprogs",
];

/// ksmbd's own tools. They are only unpacked, because the package conflicts with Samba's (both use port 445).
const KSMBD_TOOLS: &str = r#"into=$(mktemp -d); cd "$into"; APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get download -qq ksmbd-tools; dpkg-deb -x ksmbd-tools_*.deb "$1"; cd /; rm -r "$into""#;

/// Services must not start while packages are unpacked. Only Samba and the QUIC library that it needs come from the
/// backports.
const SETUP: &str = r#"mkdir -p "$1/usr/sbin" "$1/etc/apt/preferences.d"; printf '#!/bin/sh\nexit 101\n' > "$1/usr/sbin/policy-rc.d"; chmod +x "$1/usr/sbin/policy-rc.d"
printf 'Package: src:samba src:ngtcp2 src:nghttp3\nPin: release n=%s\nPin-Priority: 990\n' trixie-backports > "$1/etc/apt/preferences.d/samba""#;

/// Mount points for the boot, and an empty machine-id so that no two guests share one. Of cifs-utils, only the kernel's
/// upcall is needed: with its mount helper installed, mount(8) would no longer pass options unchanged.
const CUSTOMIZE: &str = r#"rm "$1"/usr/sbin/mount.cifs "$1"/usr/sbin/mount.smb3; mkdir -p "$1/opt/forebay" "$1/usr/lib/modules" "$1/srv" "$1/scratch"; : > "$1/etc/machine-id"; rm -rf "$1"/var/cache/apt/*.bin "$1"/var/lib/apt/lists/*"#;

/// The cache entry: `tree/`, `root.erofs`, `packages.txt`.
pub fn get(cache: &Cache) -> Result<Artefact> {
    let recipe = Recipe::default()
        .with("release", RELEASE)
        .with("backports", BACKPORTS)
        .with("packages", PACKAGES.join("\n"))
        .with("setup", SETUP)
        .with("ksmbd", KSMBD_TOOLS)
        .with("customize", CUSTOMIZE)
        .with("layout", "1");
    cache.get("root", &recipe, |into| {
        host::ensure_packages(host::BUILD_PACKAGES)?;
        host::require_root(cache, "the nodes' root file system is made once", "prepare")?;
        step(
            &format!("making the nodes' root file system (Debian {RELEASE}, {} packages)", PACKAGES.len()),
            || make(into),
        )
    })
}

fn make(into: &Path) -> Result<()> {
    let tree = into.join("tree");
    let mirror = host::mirror()?;
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
            .arg(format!("--customize-hook={KSMBD_TOOLS}"))
            .arg(format!("--customize-hook={CUSTOMIZE}"))
            .arg(RELEASE)
            .arg(&tree)
            .args([RELEASE, BACKPORTS].map(|release| format!("deb {mirror} {release} main"))),
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
