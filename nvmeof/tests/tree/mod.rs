//! Trees of sysfs as text, unpacked into a scratch directory.
//!
//! A line is `path<TAB>content` (with `\n` for line ends), `path<TAB>-> target` for a symbolic link, or `path` for a directory;
//! `#` starts a comment. The trees follow the kernel's source, reduced to the relevant parts.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use forebay_nvmeof::{Found, HostIdentity, Nqn, Subsystem, Sysfs};
use tempfile::TempDir;

/// A scratch directory with `sys` in it.
pub struct Tree(TempDir);

pub const TWO_PATHS: &str = include_str!("../trees/two-paths.tree");
pub const NO_MULTIPATH: &str = include_str!("../trees/no-multipath.tree");
pub const LOCAL: &str = include_str!("../trees/local.tree");

/// The folder of the fabrics controllers.
const CONTROLLERS: &str = "sys/devices/virtual/nvme-fabrics/ctl";

impl Tree {
    pub fn of(trees: &[&str]) -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        trees.iter().for_each(|text| tree.unpack(text));
        tree
    }

    pub fn unpack(&self, text: &str) {
        for line in text.lines().filter(|l| !l.starts_with('#') && !l.is_empty()) {
            match line.split_once('\t') {
                None => fs::create_dir_all(self.path(line)).unwrap(),
                Some((path, content)) => {
                    let path = self.path(path);
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    match content.strip_prefix("-> ") {
                        Some(target) => symlink(target, path).unwrap(),
                        None => fs::write(path, content.replace("\\n", "\n") + "\n").unwrap(),
                    }
                }
            }
        }
    }

    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.0.path().join(path)
    }

    pub fn sysfs(&self) -> Sysfs {
        Sysfs::at(self.path("sys"))
    }

    pub fn read(&self) -> Found {
        self.sysfs().read()
    }

    /// Sets an attribute of a controller.
    pub fn set(&self, attribute: &str, value: &str) {
        let at = self.path(CONTROLLERS).join(attribute);
        assert!(at.exists(), "{}", at.display());
        fs::write(at, format!("{value}\n")).unwrap();
    }

    pub fn attribute(&self, attribute: &str) -> String {
        fs::read_to_string(self.path(CONTROLLERS).join(attribute)).unwrap().trim().to_owned()
    }

    /// Changes the tree as if a controller had been removed.
    pub fn remove(&self, subsystem: &str, controller: &str) {
        fs::remove_file(self.path(format!("sys/class/nvme/{controller}"))).unwrap();
        fs::remove_file(self.path(format!("sys/devices/virtual/nvme-subsystem/{subsystem}/{controller}")))
            .unwrap();
        fs::remove_dir_all(self.path(CONTROLLERS).join(controller)).unwrap();
    }
}

pub fn nqn() -> Nqn {
    "nqn.2026-01.io.example:pool".parse().unwrap()
}

/// The subsystem, with the host identity of the instance that connected the trees' controllers.
pub fn wanted() -> Subsystem {
    Subsystem::new(nqn(), HostIdentity::of("fast-0", "node-a").unwrap())
}
