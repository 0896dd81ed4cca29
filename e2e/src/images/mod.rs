//! Everything a guest boots from, each an entry of the cache.

pub mod clients;
pub mod conformance;
pub mod initrd;
pub mod kernel;
pub mod node;
pub mod preloaded;
pub mod product;
pub mod prometheus;
pub mod prune;
pub mod qemu;
pub mod root;
pub mod smb_direct;
pub mod suites;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

use crate::cache::{Artefact, Cache, Recipe};
use crate::host::Archive;
use crate::progress::say;

/// All images of a lab.
#[derive(Debug)]
pub struct Images {
    /// QEMU, unpacked.
    pub qemu: Artefact,
    /// Kernel and modules.
    pub kernel: Artefact,
    /// Root file system, as a tree and as an image.
    pub root: Artefact,
    /// First file system of the boot.
    pub initrd: Artefact,
    /// The kernel's modules with SMB Direct, if a node requires them.
    pub smb_direct: Option<Artefact>,
}

impl Images {
    /// Returns all images. Builds those that are not in the cache. `refresh` looks for newer packages first.
    pub fn prepare(cache: &Cache, refresh: bool) -> Result<Self> {
        let versions = Versions::resolve(cache, refresh)?;
        let qemu = qemu::get(cache, &versions)?;
        let kernel = kernel::get(cache, &versions)?;
        let root = root::get(cache)?;
        let initrd = initrd::get(cache, &kernel, &root)?;
        Ok(Self { qemu, kernel, root, initrd, smb_direct: None })
    }

    /// Same, plus the modules for nodes with SMB Direct.
    pub fn prepare_with_smb_direct(cache: &Cache, refresh: bool) -> Result<Self> {
        let mut images = Self::prepare(cache, refresh)?;
        images.smb_direct = Some(smb_direct::get(cache, &Versions::resolve(cache, false)?, &images.kernel)?);
        Ok(images)
    }

    /// The modules of a node with or without SMB Direct.
    pub(crate) fn modules(&self, smb_direct: bool) -> Result<PathBuf> {
        let entry = match (smb_direct, &self.smb_direct) {
            (false, _) => &self.kernel,
            (true, Some(entry)) => entry,
            (true, None) => bail!("the modules with SMB Direct were not prepared"),
        };
        Ok(entry.file("modules.erofs"))
    }
}

/// A lock file: package versions resolved once from the archive and stored, so that later runs need no network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versions(BTreeMap<String, String>);

impl Versions {
    /// The versions of an earlier run, or the newest in the archive.
    pub fn resolve(cache: &Cache, refresh: bool) -> Result<Self> {
        let path = Self::path(cache);
        if !refresh && let Some(found) = Self::load(&path) {
            return Ok(found);
        }
        if cache.is_looking() {
            bail!("no versions have been looked up");
        }
        // Two concurrent runs must resolve the same versions, and must not share apt's lists while they are fetched.
        let lock = fs::File::create(cache.root().join("versions.lock"))?;
        flock(&lock, FlockOperation::LockExclusive)?;
        if !refresh && let Some(found) = Self::load(&path) {
            return Ok(found);
        }
        say("looking up package versions in the Debian archive");
        let archive = Archive::open(&cache.root().join("apt"), true)?;
        let mut found = BTreeMap::new();
        let qemu = qemu::PACKAGES.iter().map(|name| (*name, qemu::release_of(name)));
        for (package, release) in qemu.chain(node::PACKAGES.iter().copied()) {
            found.insert(package.to_owned(), archive.version(package, release)?);
        }
        let abi = kernel::newest_abi(&archive)?;
        for package in kernel::packages(&abi) {
            let version = archive.version(&package, kernel::RELEASE)?;
            found.insert(package, version);
        }
        found.insert("kernel-abi".to_owned(), abi);
        let text = serde_json::to_vec_pretty(&found)?;
        let mut file = tempfile::NamedTempFile::new_in(cache.root())?;
        std::io::Write::write_all(&mut file, &text)?;
        file.persist(&path)?;
        Ok(Self(found))
    }

    /// Path of the lock file, next to those of other recipes.
    fn path(cache: &Cache) -> PathBuf {
        let node: Vec<String> =
            node::PACKAGES.iter().map(|(name, release)| format!("{name}/{release}")).collect();
        let wanted = Recipe::default()
            .with("qemu", qemu::PACKAGES.join(" "))
            .with("kernel", kernel::SERIES)
            .with("node", node.join(" "))
            .key();
        cache.root().join(format!("versions-{wanted}.json"))
    }

    fn load(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok().map(Self)
    }

    /// The version resolved for this name.
    pub fn get(&self, name: &str) -> Result<&str> {
        self.0.get(name).map(String::as_str).with_context(|| format!("no version of {name} was resolved"))
    }

    /// `name=version` of these packages.
    pub fn pinned<S: AsRef<str>>(&self, names: &[S]) -> Result<Vec<String>> {
        names.iter().map(|name| Ok(format!("{}={}", name.as_ref(), self.get(name.as_ref())?))).collect()
    }
}
