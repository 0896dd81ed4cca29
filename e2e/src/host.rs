//! The developer's machine: its packages, its package archive, its commands.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::progress::say;

/// Packages needed to build the images.
pub const BUILD_PACKAGES: &[&str] =
    &["mmdebstrap", "debian-archive-keyring", "erofs-utils", "xz-utils", "kmod", "binutils", "util-linux"];

/// Libraries that QEMU of bookworm-backports is linked with.
pub const QEMU_PACKAGES: &[&str] = &[
    "libslirp0",
    "libvdeplug2",
    "libfdt1",
    "libpixman-1-0",
    "libpmem1",
    "libnuma1",
    "liburing2",
    "libaio1",
    "libcapstone4",
    "libfuse3-3",
    "libbpf1",
    "libudev1",
    "libdw1",
    "libzstd1",
    "liblzo2-2",
    "libsnappy1v5",
    "libgcrypt20",
    "libgnutls30",
    "libnettle8",
    "libpng16-16",
    "libjpeg62-turbo",
    "libsasl2-2",
    "libseccomp2",
    "libibverbs1",
    "librdmacm1",
    "libglib2.0-0",
];

/// Whether this process may install packages and chroot.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns an error that names the command to run as root, unless this process is root. `why` begins the sentence.
pub fn require_root(cache: &Cache, why: &str, command: &str) -> Result<()> {
    if !is_root() {
        bail!(
            "{why}, as root; run:  sudo FOREBAY_CACHE={} {} {command}",
            cache.root().display(),
            std::env::current_exe()?.display()
        );
    }
    Ok(())
}

/// Runs a command quietly. On failure, the error contains its whole output.
pub fn run(command: &mut Command) -> Result<String> {
    // depmod and mkfs are in directories that only root has in its PATH.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin"));
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("start {}", shown(command)))?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        bail!(
            "{} ended with {}:\n{}",
            shown(command),
            output.status,
            String::from_utf8_lossy(&said).trim_end()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn shown(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

/// Installs the missing packages if this process is root; otherwise returns an error that names the command that does.
pub fn ensure_packages(packages: &[&str]) -> Result<()> {
    let missing = missing_packages(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !is_root() {
        bail!(
            "packages are missing on this machine; run:  sudo apt-get install --no-install-recommends {list}"
        );
    }
    say(format!("installing on this machine with apt-get: {list}"));
    let install = || {
        run(Command::new("apt-get")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["install", "-qq", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=600"])
            .args(&missing))
    };
    // The lists may be absent, or too old for the packages that they name: update them once.
    if install().is_err() {
        run(Command::new("apt-get").args(["update", "-qq", "-o", "DPkg::Lock::Timeout=600"]))?;
        install()?;
    }
    Ok(())
}

fn missing_packages(packages: &[&str]) -> Result<Vec<String>> {
    // dpkg-query fails if it does not know one of the packages, and lists on stdout those that it does know.
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${binary:Package} ${db:Status-Status}\n"])
        .args(packages)
        .output()
        .context("run dpkg-query: the lab's images are made on Debian")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let installed: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(_, status)| *status == "installed")
        .map(|(name, _)| name.split(':').next().unwrap_or(name))
        .collect();
    Ok(packages.iter().filter(|name| !installed.contains(*name)).map(|name| (*name).to_owned()).collect())
}

/// The Debian archive of this machine, according to its apt configuration.
pub fn mirror() -> Result<String> {
    if let Ok(uri) = std::env::var("FOREBAY_MIRROR") {
        return Ok(uri);
    }
    let targets = || {
        run(Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(RELEASE)|$(COMPONENT)|$(REPO_URI)",
            "Created-By: Packages",
        ]))
    };
    let mut found = pick_mirror(&targets()?);
    if found.is_none() && is_root() {
        // apt lists only the archives that it has package lists of.
        run(Command::new("apt-get").args(["update", "-qq", "-o", "DPkg::Lock::Timeout=600"]))?;
        found = pick_mirror(&targets()?);
    }
    found.context("apt has no Debian main archive in its sources; set FOREBAY_MIRROR to the address of one")
}

/// The archive of the first plain release with a `main` component: not security, updates or another vendor's.
fn pick_mirror(targets: &str) -> Option<String> {
    targets
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, '|');
            Some((fields.next()?, fields.next()?, fields.next()?))
        })
        .find(|(release, component, uri)| {
            matches!(*release, "bookworm" | "trixie" | "stable" | "oldstable")
                && *component == "main"
                && uri.trim_end_matches('/').ends_with("/debian")
        })
        .map(|(_, _, uri)| uri.to_owned())
}

/// A private apt with its own lists, for any release of Debian. It does not touch the installed packages.
#[derive(Debug)]
pub struct Archive {
    options: Vec<String>,
    mirror: String,
    folder: PathBuf,
}

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const RELEASES: &[&str] = &["bookworm", "bookworm-backports", "trixie", "trixie-backports", "forky"];

impl Archive {
    /// Fetches the lists into `folder` if they are not there yet or if `refresh` is set.
    pub fn open(folder: &Path, refresh: bool) -> Result<Self> {
        ensure_packages(BUILD_PACKAGES)?;
        let mirror = mirror()?;
        std::fs::create_dir_all(folder.join("lists/partial"))?;
        let sources: String = RELEASES
            .iter()
            .map(|release| format!("deb [signed-by={KEYRING}] {mirror} {release} main\n"))
            .collect();
        let list = folder.join("sources.list");
        let options = [
            format!("Dir::Etc::sourcelist={}", list.display()),
            "Dir::Etc::sourceparts=-".to_owned(),
            format!("Dir::State::lists={}", folder.join("lists").display()),
            "Dir::Cache::pkgcache=".to_owned(),
            "Dir::Cache::srcpkgcache=".to_owned(),
            // The unprivileged download user cannot access a cache in a home folder.
            "APT::Sandbox::User=root".to_owned(),
        ];
        let options = options.into_iter().flat_map(|option| ["-o".to_owned(), option]).collect();
        let archive = Self { options, mirror, folder: folder.to_owned() };
        let complete = folder.join("complete");
        if refresh || !complete.exists() || std::fs::read_to_string(&list).ok().as_deref() != Some(&sources) {
            std::fs::write(&list, &sources)?;
            run(Command::new("apt-get").args(&archive.options).args(["update", "-qq"]))?;
            std::fs::write(&complete, "")?;
        }
        Ok(archive)
    }

    /// The archive's address.
    pub fn mirror(&self) -> &str {
        &self.mirror
    }

    /// The newest version of a package in a release.
    pub fn version(&self, package: &str, release: &str) -> Result<String> {
        let text = run(Command::new("apt-cache").args(&self.options).args(["madison", package]))?;
        // "qemu-system-x86 | 1:10.0.2… | http://…/debian bookworm-backports/main amd64 Packages", newest first
        text.lines()
            .filter_map(|line| {
                let mut fields = line.split('|').map(str::trim);
                Some((fields.next()?, fields.next()?, fields.next()?))
            })
            .find(|(name, _, place)| {
                let found = place.split(' ').nth(1).and_then(|place| place.split('/').next());
                *name == package && found == Some(release)
            })
            .map(|(_, version, _)| version.to_owned())
            .with_context(|| format!("the archive has no {package} in {release}"))
    }

    /// Names of packages that match this regular expression.
    pub fn names(&self, pattern: &str) -> Result<Vec<String>> {
        let text =
            run(Command::new("apt-cache").args(&self.options).args(["search", "--names-only", pattern]))?;
        Ok(text.lines().filter_map(|line| line.split_once(' ')).map(|(name, _)| name.to_owned()).collect())
    }

    /// Downloads these packages (`name=version`) and unpacks them into `into` without installing them.
    pub fn unpack(&self, packages: &[String], into: &Path) -> Result<()> {
        let download = tempfile::Builder::new().prefix("debs-").tempdir_in(&self.folder)?;
        run(Command::new("apt-get")
            .current_dir(download.path())
            .args(&self.options)
            .args(["download", "-qq"])
            .args(packages))?;
        std::fs::create_dir_all(into)?;
        for entry in std::fs::read_dir(download.path())? {
            run(Command::new("dpkg-deb").arg("-x").arg(entry?.path()).arg(into))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirror_is_the_main_release_and_not_security_or_a_vendor() {
        let targets = "bookworm|stable|https://vendor.example/linux/debian\n\
                       bookworm-security|main|http://mirror.example/debian-security/\n\
                       nodistro|main|https://other.example/debian\n\
                       bookworm|main|http://mirror.example/debian/\n\
                       bookworm|contrib|http://mirror2.example/debian/\n";
        assert_eq!(pick_mirror(targets).as_deref(), Some("http://mirror.example/debian/"));
        assert_eq!(pick_mirror("noble|main|http://mirror.example/ubuntu\n"), None);
    }
}
