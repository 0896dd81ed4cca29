//! Determines which cache entries are no longer used.

use std::collections::BTreeSet;

use anyhow::Result;

use super::{
    Versions, clients, conformance, initrd, kernel, node, prometheus, qemu, root, smb_direct, suites,
};
use crate::cache::Cache;
use crate::kubernetes::tools::{self, Tools};

/// Kinds that scripts/prepare.sh and scripts/image.sh create, name and remove.
const OF_SCRIPTS: [&str; 2] = ["binaries", "image-base"];

/// Kinds with recipes that contain values unknown here (the images of a run, this boot of the machine): the most recently
/// used entry is kept.
const NEWEST: [&str; 2] = ["preloaded", "kvm-trial"];

/// Removes the entries that the current recipes do not use, with `all` also those that they use, and returns their names.
/// Builds nothing, and keeps the entries that a running lab holds.
pub fn prune(cache: &Cache, all: bool) -> Result<Vec<String>> {
    let keep = if all { BTreeSet::new() } else { in_use(cache)? };
    cache.prune(|name| OF_SCRIPTS.contains(&kind(name)) || keep.contains(name))
}

fn kind(name: &str) -> &str {
    name.split('/').next().unwrap_or_default()
}

fn in_use(cache: &Cache) -> Result<BTreeSet<String>> {
    let cache = cache.looking();
    // Each one separately: a missing entry must not hide the rest. Only the request counts.
    let versions = Versions::resolve(&cache, false).ok();
    let kernel = versions.as_ref().and_then(|versions| {
        qemu::get(&cache, versions).ok();
        kernel::get(&cache, versions).ok()
    });
    if let (Some(versions), Some(kernel)) = (&versions, &kernel) {
        smb_direct::get(&cache, versions, kernel).ok();
    }
    if let (Ok(root), Some(kernel)) = (root::get(&cache), kernel) {
        initrd::get(&cache, &kernel, &root).ok();
    }
    clients::get(&cache).ok();
    for suite in suites::ALL {
        suite.get(&cache).ok();
    }
    prometheus::get(&cache).ok();
    for name in tools::ALL.iter().copied().flatten() {
        Tools::prepare(&cache, &[&[name]]).ok();
    }
    if let Ok(tools) = Tools::prepare(&cache, conformance::TOOLS) {
        conformance::get(&cache, &tools).ok();
    }
    if let (Ok(tools), Some(versions)) = (Tools::prepare(&cache, node::TOOLS), versions) {
        node::get(&cache, &versions, &tools).ok();
    }
    let mut keep = cache.asked();
    let mut newest = cache.list()?;
    newest.sort_by_key(|entry| entry.used);
    for wanted in NEWEST {
        keep.extend(newest.iter().rfind(|entry| kind(&entry.name) == wanted).map(|entry| entry.name.clone()));
    }
    Ok(keep)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, Instant, SystemTime};

    /// Entries that no recipe creates, used a day apart.
    fn entry(cache: &Cache, kind: &str, digit: char, days: u64) -> String {
        let name = format!("{kind}/{}", digit.to_string().repeat(20));
        let path = cache.root().join(&name);
        fs::create_dir_all(&path).expect("an entry");
        let lock = fs::File::create(path.with_extension("lock")).expect("its lock");
        lock.set_modified(SystemTime::now() - Duration::from_secs(days * 86_400)).expect("its time");
        name
    }

    fn everything(cache: &Cache) {
        let mut versions: BTreeMap<String, &str> = BTreeMap::from([("kernel-abi".into(), "7.2.1")]);
        versions.extend(qemu::PACKAGES.iter().map(|name| ((*name).to_owned(), "1")));
        versions.extend(node::PACKAGES.iter().map(|(name, _)| ((*name).to_owned(), "1")));
        versions.extend(kernel::packages("7.2.1").map(|name| (name, "1")));
        fs::write(Versions::path(cache), serde_json::to_vec(&versions).expect("JSON")).expect("versions");
        // Some recipes include the keys of other entries.
        loop {
            let asked = in_use(cache).expect("names");
            let missing: Vec<_> = asked.iter().filter(|name| !cache.root().join(name).exists()).collect();
            if missing.is_empty() {
                return;
            }
            for name in missing {
                let path = cache.root().join(name);
                fs::create_dir_all(path.join("go/bin")).expect("an entry");
                // In case this machine has no Go.
                let go = path.join("go/bin/go");
                fs::write(&go, "#!/bin/sh\necho go1.26.6\n").expect("a program");
                fs::set_permissions(&go, fs::Permissions::from_mode(0o755)).expect("executable");
            }
        }
    }

    #[test]
    fn prune_keeps_entries_used_by_current_recipes_and_scripts() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path().to_owned()).expect("a cache");
        everything(&cache);
        let used = in_use(&cache).expect("names");
        let kinds: BTreeSet<&str> = used.iter().map(|name| kind(name)).filter(|kind| *kind != "go").collect();
        let expected = [
            "conformance",
            "fsx",
            "initrd",
            "kernel",
            "node",
            "pjdfstest",
            "prometheus",
            "python-clients",
            "qemu",
            "root",
            "smb-direct",
            "smb-direct-kernel",
            "tool",
        ];
        assert_eq!(kinds, BTreeSet::from(expected));
        let tools = used.iter().filter(|name| kind(name) == "tool").count();
        assert_eq!(tools, tools::ALL.iter().copied().flatten().count());

        let kept = [
            entry(&cache, "binaries", 'a', 9),
            entry(&cache, "image-base", 'a', 9),
            entry(&cache, "preloaded", 'b', 8),
            entry(&cache, "kvm-trial", 'b', 8),
        ];
        let mut doomed: Vec<String> = ["preloaded", "kvm-trial", "tool", "go", "node", "qemu", "root"]
            .map(|kind| entry(&cache, kind, 'c', 9))
            .into();
        let mut removed = prune(&cache, false).expect("pruned");
        removed.sort();
        doomed.sort();
        assert_eq!(removed, doomed);
        for name in used.iter().chain(&kept) {
            assert!(cache.root().join(name).is_dir(), "{name}");
        }

        // A program that another test starts at this moment holds copies of our locks until exec.
        let until = Instant::now() + Duration::from_secs(10);
        let expected = BTreeSet::from([kept[0].clone(), kept[1].clone()]);
        loop {
            prune(&cache, true).expect("pruned");
            let left = cache.list().expect("a list").into_iter().map(|entry| entry.name);
            let left: BTreeSet<_> = left.collect();
            if left == expected {
                break;
            }
            assert!(Instant::now() < until, "{left:?}");
        }
    }

    #[test]
    fn an_empty_cache_stays_empty() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path().to_owned()).expect("a cache");
        assert_eq!(prune(&cache, false).expect("pruned"), [""; 0]);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "something was made");
    }
}
