//! The images that the pods of Kubernetes' own tests run, made of the suite's program and of Debian's busybox.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cache::{Artefact, Cache, Recipe};
use crate::host::{self, Archive};
use crate::kubernetes::oci::{self, Image, Layer};
use crate::kubernetes::tools::{self, Tools};
use crate::progress::step;

/// The release of Debian that has busybox.
const RELEASE: &str = "trixie";
const PACKAGE: &str = "busybox-static";
/// The suite's names of these images, without their versions.
const AGNHOST: &str = "registry.k8s.io/e2e-test-images/agnhost";
const BUSYBOX: &str = "registry.k8s.io/e2e-test-images/busybox";
/// Tests with several volumes use no more of it than a shell and its tools.
const GLIBC: &str = "registry.k8s.io/e2e-test-images/glibc-dns-testing";

/// The sidecar for snapshots: the tag of its release in `e2e/tools/kubernetes/go.mod`.
pub const SNAPSHOTTER_IMAGE: (&str, &str) =
    ("csi-snapshotter", "registry.k8s.io/sig-storage/csi-snapshotter:v8.7.0");

/// Tools that [`get`] requires from [`Tools::prepare`].
pub const TOOLS: &[&[&str]] = &[tools::E2E, tools::SNAPSHOTS];

/// The cache entry: the archives `images.tar` and `csi-snapshotter.tar`.
pub fn get(cache: &Cache, tools: &Tools) -> Result<Artefact> {
    let (suite, agnhost) = (tools.path("e2e.test"), tools.path("agnhost"));
    let recipe = Recipe::default().with("tools", tools.keys()).with("layout", "2");
    cache.get("conformance", &recipe, |into| {
        step("making the images for Kubernetes' own tests", || {
            make(cache, &suite, &agnhost, &tools.path("csi-snapshotter"), into)
        })
    })
}

/// The archives' paths.
pub fn archives(entry: &Artefact) -> [PathBuf; 2] {
    ["images.tar", "csi-snapshotter.tar"].map(|name| entry.file(name))
}

fn make(cache: &Cache, suite: &Path, agnhost: &Path, snapshotter: &Path, into: &Path) -> Result<()> {
    let listed = host::run(Command::new(suite).arg("--list-images"))?;
    // Some tests use older versions.
    let named = |name: &str| -> BTreeSet<String> {
        listed
            .lines()
            .filter(|line| line.rsplit_once(':').is_some_and(|(image, _)| image == name))
            .map(str::to_owned)
            .collect()
    };
    let (agnhosts, busyboxes, shells) = (named(AGNHOST), named(BUSYBOX), named(GLIBC));
    let complete = [&agnhosts, &busyboxes, &shells].iter().all(|names| !names.is_empty());
    ensure!(complete, "the suite lists other images:\n{listed}");

    let archive = Archive::open(&cache.root().join("apt"), false)?;
    let unpacked = into.join("busybox");
    archive.unpack(&[format!("{PACKAGE}={}", archive.version(PACKAGE, RELEASE)?)], &unpacked)?;
    let busybox = ["usr/bin/busybox", "bin/busybox"].map(|path| unpacked.join(path));
    let busybox = busybox.iter().find(|path| path.is_file()).context("the package has no bin/busybox")?;
    let mut layer = Layer::default()
        .directory("bin", 0o755)
        .directory("etc", 0o755)
        .directory("root", 0o700)
        .directory("tmp", 0o1777)
        .file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")
        .file("etc/group", 0o644, b"root:x:0:\n")
        .file("agnhost", 0o755, &fs::read(agnhost)?)
        .file("bin/busybox", 0o755, &fs::read(busybox)?);
    for applet in host::run(Command::new(busybox).arg("--list"))?.split_whitespace() {
        if applet != "busybox" {
            layer = layer.link(&format!("bin/{applet}"), "busybox");
        }
    }
    let images: Vec<Image<'_>> = agnhosts
        .iter()
        .map(|name| Image { name, entry_point: &["/agnhost"], command: &["pause"] })
        .chain(busyboxes.iter().chain(&shells).map(|name| Image { name, entry_point: &[], command: &["sh"] }))
        .collect();
    oci::write(&into.join("images.tar"), &images, layer)?;
    fs::remove_dir_all(&unpacked)?;
    let (program, image) = SNAPSHOTTER_IMAGE;
    oci::write_program(&into.join("csi-snapshotter.tar"), image, program, &fs::read(snapshotter)?)
}
