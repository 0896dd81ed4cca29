//! The features that Debian leaves out of its kernel: SMB Direct, in the client (cifs) and in a server for comparison
//! (ksmbd), and software iWARP (siw). Built out of tree from Debian's own source of exactly the same kernel version.
//!
//! Separate from the stock modules: only nodes that require them pay the cost, at boot (cifs then loads the whole RDMA stack)
//! and once for the build.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::available_parallelism;

use anyhow::{Context, Result};

use super::{Versions, kernel, root};
use crate::cache::{Artefact, Cache, Recipe};
use crate::host;
use crate::progress::step;

/// Packages that the build needs in addition to the kernel's headers and source.
const PACKAGES: &[&str] = &["gcc-14", "libc6-dev", "make", "xz-utils"];

/// The modules that the build must produce, by file.
const MODULES: &[&str] = &["cifs.ko", "cifs_md4.ko", "ksmbd.ko", "siw.ko", "smb_compress.ko", "smbdirect.ko"];

/// Unpacks the sources to build. fs/nls is placed next to fs/smb because sources in fs/smb include its headers.
const UNPACK: &str = r#"
series=$1
mkdir /build; cd /build
tree=linux-source-$series
tar -xJf "/usr/src/$tree.tar.xz" --strip-components=1 \
    "$tree/fs/smb" "$tree/fs/nls" "$tree/drivers/infiniband/sw/siw" "$tree/scripts/asn1_compiler.c"
"#;

/// Compiles. Kbuild reads the variables. C sources use the configuration that was fixed when Debian built the kernel, so
/// their options are passed in CFLAGS. BTF would need the kernel with its debug information.
const BUILD: &str = r#"
abi=$1 jobs=$2
headers=/usr/src/linux-headers-${abi%-*}-common
build=/lib/modules/$abi/build
# The headers' package comes without this tool.
gcc-14 -O2 -I"$headers/include" -o "$(readlink -f "$build/scripts")/asn1_compiler" /build/scripts/asn1_compiler.c
make -s -j"$jobs" -C "$build" M=/build/fs/smb CONFIG_DEBUG_INFO_BTF_MODULES= \
    CONFIG_SMBDIRECT=m CONFIG_CIFS_SMB_DIRECT=y CONFIG_SMB_SERVER_SMBDIRECT=y \
    KCFLAGS="-DCONFIG_SMBDIRECT_MODULE=1 -DCONFIG_CIFS_SMB_DIRECT=1 -DCONFIG_SMB_SERVER_SMBDIRECT=1" modules
make -s -j"$jobs" -C "$build" M=/build/drivers/infiniband/sw/siw CONFIG_DEBUG_INFO_BTF_MODULES= \
    CONFIG_RDMA_SIW=m KCFLAGS=-DCONFIG_RDMA_SIW_MODULE=1 modules
mkdir /build/updates
find /build -name '*.ko' -exec mv {} /build/updates/ \;
strip --strip-debug /build/updates/*.ko
"#;

/// Runs one of the scripts above in the builder. objtool reads /proc/sys, so that is mounted, in a namespace that ends with
/// the script.
const ENTER: &str = r#"
root=$1; shift
mount -t proc proc "$root/proc"
exec chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C sh -euc "$@"
"#;

/// The kernel's headers and source, pinned to the version of the booted kernel: modules of another version do not load.
fn packages(versions: &Versions) -> Result<Vec<String>> {
    let abi = versions.get("kernel-abi")?;
    let version = versions.get(&kernel::packages(abi)[1])?;
    let names = [format!("linux-headers-{abi}"), format!("linux-source-{}", kernel::SERIES)];
    Ok(names.iter().map(|name| format!("{name}={version}")).collect())
}

/// The cache entry: the modules of [`MODULES`].
fn modules(cache: &Cache, versions: &Versions) -> Result<Artefact> {
    let abi = versions.get("kernel-abi")?;
    let pinned = packages(versions)?;
    let recipe = Recipe::default()
        .with("pinned", pinned.join("\n"))
        .with("release", root::RELEASE)
        .with("packages", PACKAGES.join("\n"))
        .with("unpack", UNPACK)
        .with("build", BUILD)
        .with("modules", MODULES.join("\n"))
        .with("layout", "1");
    cache.get("smb-direct", &recipe, |into| {
        host::ensure_packages(host::BUILD_PACKAGES)?;
        host::require_root(
            cache,
            "the kernel's modules with SMB Direct are made once",
            "prepare --smb-direct",
        )?;
        make(&pinned, abi, into)
    })
}

fn make(pinned: &[String], abi: &str, into: &Path) -> Result<()> {
    let builder = into.join("builder");
    step(
        &format!("making a Debian {} with the compiler, headers and source of kernel {abi}", root::RELEASE),
        || {
            let mirror = host::mirror()?;
            let include = PACKAGES.iter().copied().chain(pinned.iter().map(String::as_str));
            host::run(
                Command::new("mmdebstrap")
                    .args(["--variant=minbase", "--mode=root", "--quiet"])
                    .arg("--keyring=/usr/share/keyrings/debian-archive-keyring.gpg")
                    .arg("--aptopt=APT::Install-Recommends \"false\"")
                    .arg("--dpkgopt=path-exclude=/usr/share/man/*")
                    .arg("--dpkgopt=path-exclude=/usr/share/doc/*")
                    .arg("--dpkgopt=path-exclude=/usr/share/locale/*")
                    .arg("--dpkgopt=force-unsafe-io")
                    .arg(format!("--include={}", include.collect::<Vec<_>>().join(",")))
                    .arg(root::RELEASE)
                    .arg(&builder)
                    .arg(format!("deb {mirror} {} main", root::RELEASE))
                    .arg(format!("deb {mirror} {} main", kernel::RELEASE)),
            )
            .with_context(|| {
                format!(
                    "install {} (where the archive has a newer kernel by now: forebay-lab prepare --refresh)",
                    pinned.join(" ")
                )
            })
        },
    )?;
    let enter = |script: &str, arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-euc", ENTER, "enter"]);
        host::run(command.arg(&builder).args([script, "build"]).args(arguments))
    };
    step("unpacking fs/smb and siw of the kernel's source", || enter(UNPACK, &[kernel::SERIES]))?;
    let jobs = available_parallelism().map_or(1, usize::from).to_string();
    step("compiling cifs and ksmbd with SMB Direct, and siw", || enter(BUILD, &[abi, &jobs]))?;
    for module in MODULES {
        let built = builder.join("build/updates").join(module);
        fs::copy(&built, into.join(module)).with_context(|| format!("the build made no {module}"))?;
    }
    fs::remove_dir_all(&builder)?;
    Ok(())
}

/// The cache entry: `modules.erofs`, the kernel's modules with ours in `updates/`, which modprobe prefers.
pub fn get(cache: &Cache, versions: &Versions, kernel: &Artefact) -> Result<Artefact> {
    let abi = versions.get("kernel-abi")?;
    let modules = modules(cache, versions)?;
    let recipe =
        Recipe::default().with("kernel", kernel.key()).with("modules", modules.key()).with("layout", "1");
    cache.get("smb-direct-kernel", &recipe, |into| {
        step("adding SMB Direct to the kernel's modules", || {
            add(&kernel.file("modules.erofs"), &modules, abi, into)
        })
    })
}

fn add(stock: &Path, modules: &Artefact, abi: &str, into: &Path) -> Result<()> {
    // depmod requires <base>/lib/modules/<abi>.
    let base = into.join("base");
    let all = base.join("lib/modules");
    fs::create_dir_all(base.join("lib"))?;
    host::run(Command::new("fsck.erofs").arg(format!("--extract={}", all.display())).arg(stock))?;
    let updates = all.join(abi).join("updates");
    fs::create_dir(&updates)?;
    for module in MODULES {
        fs::copy(modules.file(module), updates.join(module))?;
    }
    host::run(Command::new("depmod").arg("-b").arg(&base).arg(abi))?;
    host::run(Command::new("mkfs.erofs").arg(into.join("modules.erofs")).arg(&all))?;
    fs::remove_dir_all(&base)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn headers_and_source_match_the_kernel_version() {
        let abi = "7.2.12+deb13-amd64";
        let mut versions = BTreeMap::from([("kernel-abi".to_owned(), abi.to_owned())]);
        versions.extend(kernel::packages(abi).map(|name| (name, "7.2.12-1~bpo13+1".to_owned())));
        assert_eq!(
            packages(&Versions(versions)).expect("they are known"),
            ["linux-headers-7.2.12+deb13-amd64=7.2.12-1~bpo13+1", "linux-source-7.2=7.2.12-1~bpo13+1",]
        );
    }
}
