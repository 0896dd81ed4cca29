//! Simulates the relevant parts of nvmet: a tree of files with its rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use tempfile::TempDir;

use crate::step::{Hands, Kernel, Step};

/// A simulated configfs tree of nvmet that enforces its rules.
pub(super) struct Fake {
    folder: TempDir,
    /// Remaining steps until it crashes.
    pub(super) left: Option<usize>,
    /// Addresses of the machine.
    pub(super) addresses: BTreeSet<String>,
    /// The executed steps.
    pub(super) taken: Vec<Step>,
}

impl Fake {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["subsystems", "ports", "hosts"] {
            fs::create_dir(folder.path().join(name)).expect("created");
        }
        Self { folder, left: None, addresses: ["192.168.77.1".to_owned()].into(), taken: Vec::new() }
    }

    pub(super) fn root(&self) -> PathBuf {
        self.folder.path().canonicalize().expect("the folder exists")
    }

    /// The whole tree: attributes with their values, links with their targets.
    pub(super) fn tree(&self) -> BTreeMap<String, String> {
        let mut tree = BTreeMap::new();
        walk(&self.root(), &self.root(), &mut tree);
        tree
    }

    pub(super) fn attribute(&self, at: &str) -> String {
        fs::read_to_string(self.root().join(at)).expect(at)
    }

    /// Executes steps on behalf of other programs.
    pub(super) fn take_as_other_program(&mut self, steps: &[Step]) {
        for step in steps {
            let taken = std::mem::take(&mut self.taken);
            self.take(step).unwrap_or_else(|error| panic!("{step}: {error}"));
            self.taken = taken;
        }
    }

    fn names(&self, at: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root().join(at)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    fn make(&self, at: &str) -> io::Result<()> {
        let path = self.root().join(at);
        fs::create_dir(&path)?;
        let (attributes, groups): (&[(&str, &str)], &[&str]) = match &at.split('/').collect::<Vec<_>>()[..] {
            ["subsystems", _] => (
                &[
                    ("attr_model", "Linux"),
                    ("attr_serial", "0123456789abcdef0123"),
                    ("attr_allow_any_host", "0"),
                ],
                &["allowed_hosts", "namespaces", "passthru"],
            ),
            ["subsystems", _, "namespaces", _] => (
                &[
                    ("device_path", "(null)"),
                    ("device_uuid", "11111111-2222-3333-4444-555555555555"),
                    ("enable", "0"),
                    ("resv_enable", "0"),
                    ("revalidate_size", ""),
                ],
                &[],
            ),
            ["ports", _] => (
                &[("addr_trtype", ""), ("addr_adrfam", ""), ("addr_traddr", ""), ("addr_trsvcid", "")],
                &["subsystems", "referrals", "ana_groups"],
            ),
            ["ports", _, "referrals", _] => (&[("enable", "0")], &[]),
            ["hosts", _] => (&[("dhchap_key", "")], &[]),
            other => panic!("nothing makes {other:?}"),
        };
        for (name, value) in attributes {
            fs::write(path.join(name), format!("{value}\n"))?;
        }
        groups.iter().try_for_each(|name| fs::create_dir(path.join(name)))
    }

    fn set(&self, at: &str, value: &str) -> io::Result<()> {
        let (item, name) = at.rsplit_once('/').expect("an attribute of something");
        let is_enabled = || self.attribute(&format!("{item}/enable")).trim() == "1";
        match name {
            "device_path" | "device_uuid" | "resv_enable" if is_enabled() => return Err(Errno::BUSY.into()),
            "revalidate_size" if !is_enabled() => return Err(Errno::INVAL.into()),
            "enable" if value == "1" => {
                assert_eq!(
                    self.attribute(&format!("{item}/resv_enable")).trim(),
                    "1",
                    "without reservations"
                );
                let path = self.attribute(&format!("{item}/device_path"));
                fs::metadata(path.trim())?;
            }
            "attr_model" | "attr_serial" if self.is_carried(item.trim_start_matches("subsystems/")) => {
                return Err(Errno::INVAL.into());
            }
            name if name.starts_with("addr_") && !self.names(&format!("{item}/subsystems")).is_empty() => {
                return Err(Errno::ACCESS.into());
            }
            _ => {}
        }
        if !self.root().join(at).exists() {
            return Err(Errno::NOENT.into());
        }
        fs::write(self.root().join(at), format!("{value}\n"))
    }

    fn is_carried(&self, nqn: &str) -> bool {
        self.names("ports")
            .iter()
            .any(|id| self.names(&format!("ports/{id}/subsystems")).iter().any(|n| n == nqn))
    }

    fn may_link(&self, to: &str, at: &str) -> io::Result<()> {
        let (group, _) = at.rsplit_once('/').expect("in a group");
        let (item, _) = group.rsplit_once('/').expect("of an item");
        if !self.root().join(to).exists() {
            return Err(Errno::NOENT.into());
        }
        if at.starts_with("ports/") && self.names(group).is_empty() {
            let attribute = |name: &str| self.attribute(&format!("{item}/{name}")).trim().to_owned();
            if attribute("addr_trtype") != "tcp"
                || attribute("addr_adrfam") != "ipv4"
                || attribute("addr_trsvcid").is_empty()
            {
                return Err(Errno::INVAL.into());
            }
            if !self.addresses.contains(&attribute("addr_traddr")) {
                return Err(Errno::ADDRNOTAVAIL.into());
            }
        }
        if at.starts_with("subsystems/")
            && self.attribute(&format!("{item}/attr_allow_any_host")).trim() == "1"
        {
            return Err(Errno::INVAL.into());
        }
        Ok(())
    }

    fn remove(&self, at: &str) -> io::Result<()> {
        let path = self.root().join(at);
        fs::metadata(&path)?;
        let holds = |group: &str| !self.names(&format!("{at}/{group}")).is_empty();
        match &at.split('/').collect::<Vec<_>>()[..] {
            ["subsystems", nqn] if self.is_carried(nqn) => return Err(Errno::BUSY.into()),
            ["subsystems", _] if holds("namespaces") || holds("allowed_hosts") => {
                return Err(Errno::NOTEMPTY.into());
            }
            ["ports", _] if holds("subsystems") || holds("referrals") => return Err(Errno::NOTEMPTY.into()),
            ["hosts", nqn] => {
                let allowing =
                    |s: &String| self.root().join(format!("subsystems/{s}/allowed_hosts/{nqn}")).is_symlink();
                if self.names("subsystems").iter().any(allowing) {
                    return Err(Errno::BUSY.into());
                }
            }
            _ => {}
        }
        fs::remove_dir_all(path)
    }
}

impl Hands for Fake {
    fn take(&mut self, step: &Step) -> io::Result<()> {
        match &mut self.left {
            Some(0) => return Err(io::Error::other("crashed")),
            Some(left) => *left -= 1,
            None => {}
        }
        match step {
            Step::Make(at) => self.make(at),
            Step::Set(at, value) => self.set(at, value),
            Step::Remove(at) => self.remove(at),
            Step::RemoveUnused(at) => match self.remove(at) {
                Err(error) if crate::step::is_used(&error) => Ok(()),
                result => result,
            },
            Step::Link { to, at } => {
                self.may_link(to, at)?;
                Kernel::at(&self.root()).take(step)
            }
            _ => Kernel::at(&self.root()).take(step),
        }?;
        self.taken.push(step.clone());
        Ok(())
    }
}

fn walk(at: &Path, root: &Path, tree: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(at).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.strip_prefix(root).expect("below").display().to_string();
        let kind = entry.file_type().expect("a kind");
        if kind.is_symlink() {
            let to = fs::read_link(&path).expect("a link");
            tree.insert(name, format!("-> {}", to.strip_prefix(root).expect("below").display()));
        } else if kind.is_dir() {
            tree.insert(name, "a folder".into());
            walk(&path, root, tree);
        } else {
            tree.insert(name, fs::read_to_string(&path).expect("text").trim().into());
        }
    }
}
