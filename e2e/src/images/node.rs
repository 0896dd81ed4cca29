//! The components that turn a guest into a Kubernetes node, on a separate read-only disk: container runtime, kubelet, and the
//! images that do not change with our sources.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::Versions;
use crate::cache::{Artefact, Cache, Recipe};
use crate::host::{self, Archive};
use crate::kubernetes::oci;
use crate::kubernetes::tools::{self, Tools};
use crate::progress::step;

/// containerd 2: the version in the nodes' own release does not support the current configuration format.
pub const PACKAGES: &[(&str, &str)] = &[("containerd", "forky")];

/// Sandbox of every pod.
pub const PAUSE_IMAGE: &str = "registry.k8s.io/pause:3.10.2";

/// The sidecars' images by program: the tags of their releases in `e2e/tools/kubernetes/go.mod`.
pub const SIDECAR_IMAGES: &[(&str, &str)] = &[
    ("csi-provisioner", "registry.k8s.io/sig-storage/csi-provisioner:v6.3.0"),
    ("csi-resizer", "registry.k8s.io/sig-storage/csi-resizer:v2.3.0"),
];

/// Tools that [`get`] requires from [`Tools::prepare`].
pub const TOOLS: &[&[&str]] = &[tools::NODE, tools::SIDECARS];

/// The cache entry: `node.erofs` with `bin/` and `images/`.
pub fn get(cache: &Cache, versions: &Versions, tools: &Tools) -> Result<Artefact> {
    let names: Vec<&str> = PACKAGES.iter().map(|(name, _)| *name).collect();
    let pinned = versions.pinned(&names)?;
    let images: String = SIDECAR_IMAGES.iter().map(|(_, image)| format!("{image}\n")).collect();
    let recipe = Recipe::default()
        .with("packages", pinned.join("\n"))
        .with("tools", tools.keys())
        .with("images", images + PAUSE_IMAGE)
        .with("pause", crate::cache::hex(&oci::pause()))
        .with("layout", "2");
    cache.get("node", &recipe, |into| {
        step("making the Kubernetes nodes' disk (containerd, kubelet, sidecar images)", || {
            make(cache, &pinned, tools, into)
        })
    })
}

fn make(cache: &Cache, pinned: &[String], tools: &Tools, into: &Path) -> Result<()> {
    let (debs, tree) = (into.join("debs"), into.join("tree"));
    Archive::open(&cache.root().join("apt"), false)?.unpack(pinned, &debs)?;
    let (bin, images) = (tree.join("bin"), tree.join("images"));
    fs::create_dir_all(&bin)?;
    fs::create_dir_all(&images)?;
    for name in ["containerd", "containerd-shim-runc-v2", "ctr"] {
        fs::copy(debs.join("usr/bin").join(name), bin.join(name))?;
    }
    for name in tools::NODE {
        fs::copy(tools.path(name), bin.join(name))?;
    }
    oci::write_program(&images.join("pause.tar"), PAUSE_IMAGE, "pause", &oci::pause())?;
    for (program, image) in SIDECAR_IMAGES {
        let archive = images.join(format!("{program}.tar"));
        oci::write_program(&archive, image, program, &fs::read(tools.path(program))?)?;
    }
    host::run(Command::new("mkfs.erofs").arg("-zlz4").arg(into.join("node.erofs")).arg(&tree))?;
    fs::remove_dir_all(&debs)?;
    fs::remove_dir_all(&tree)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sidecar_image_tags_match_the_go_modules() {
        let go_mod = include_str!("../../tools/kubernetes/go.mod");
        for (program, image) in SIDECAR_IMAGES.iter().chain([&crate::images::conformance::SNAPSHOTTER_IMAGE])
        {
            let release = image.rsplit(':').next().expect("a tag");
            let project = program.replace("csi-", "github.com/kubernetes-csi/external-");
            let pinned = go_mod.lines().any(|line| {
                let mut words = line.trim().trim_start_matches("require ").split_whitespace();
                words.next().is_some_and(|path| path.starts_with(&project)) && words.next() == Some(release)
            });
            assert!(pinned, "{image}");
        }
    }
}
