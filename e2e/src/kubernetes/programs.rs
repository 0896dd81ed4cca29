//! Programs of users ([`crate::programs`]) in pods, on volumes with owners and modes for each file.

use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::stage::Stage;
use super::workload::{claim_of, create_class, pod_with};
use crate::programs::{Mounts, PROGRAMS};

/// A StorageClass with these mount options, and a claim of it. Removed when dropped.
struct Claim<'a> {
    stage: &'a Stage,
    name: String,
}

impl<'a> Claim<'a> {
    fn new(stage: &'a Stage, options: &[&str], parameters: &[(&str, &str)]) -> Result<Self> {
        let claim = Self { stage, name: format!("programs-{}", options.join("-")) };
        create_class(stage, &claim.name, options, parameters)?;
        stage.kubectl().apply(&claim_of(&claim.name, &claim.name, "512Mi"))?;
        Ok(claim)
    }

    /// A pod with the node's programs instead of the image's: the nodes have Python, git and the others.
    fn pod(&self, name: &str, node: &str, user: &str) -> Result<Pod<'a>> {
        let manifest = pod_with(&self.name, name, &self.stage.image()?, node, "sleep infinity");
        let replaced = |manifest: String, from: &str, to: &str| -> Result<String> {
            ensure!(manifest.contains(from), "the pod has {from:?}");
            Ok(manifest.replace(from, to))
        };
        let (mut volumes, mut mounts) = ("  volumes:\n".to_owned(), "    volumeMounts:\n".to_owned());
        let [from_volumes, from_mounts] = [&volumes, &mounts].map(String::clone);
        for (name, path) in OF_THE_NODE {
            volumes += &format!("  - {{name: {name}, hostPath: {{path: {path}, type: Directory}}}}\n");
            mounts += &format!("    - {{name: {name}, mountPath: {path}, readOnly: true}}\n");
        }
        let manifest = replaced(manifest, &from_volumes, &volumes)?;
        let manifest = replaced(manifest, &from_mounts, &mounts)?;
        let manifest = replaced(manifest, "    runAsNonRoot: true\n    runAsUser: 1000\n", user)?;
        let manifest = replaced(manifest, "{drop: [ALL]}", "{drop: [ALL], add: [CHOWN, FOWNER]}")?;
        self.stage.kubectl().apply(&manifest)?;
        let pod = Pod { stage: self.stage, name: name.to_owned() };
        self.stage.wait_pod(name)?;
        Ok(pod)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let kubectl = self.stage.kubectl();
        let _ = kubectl.run(&["delete", "pvc", &self.name, "--ignore-not-found", "--timeout=240s"]);
        let _ = kubectl.run(&["delete", "storageclass", &self.name, "--ignore-not-found"]);
    }
}

/// Removed when dropped.
struct Pod<'a> {
    stage: &'a Stage,
    name: String,
}

impl Pod<'_> {
    fn run(&self, script: &str) -> Result<String> {
        self.stage.exec(&self.name, script)
    }

    fn run_in(&self, folder: &str, script: &str) -> Result<String> {
        let script = format!(
            "exec >&2; export HOME=/tmp LC_ALL=C.UTF-8; local=$(mktemp -d)\nmkdir -p {folder}; cd {folder}\n{script}"
        );
        self.run(&script)
    }
}

impl Drop for Pod<'_> {
    fn drop(&mut self) {
        let _ =
            self.stage.kubectl().run(&["delete", "pod", &self.name, "--ignore-not-found", "--timeout=240s"]);
    }
}

/// Programs, and the certificates without which pip does not start.
const OF_THE_NODE: [(&str, &str); 2] = [("programs", "/usr"), ("certificates", "/etc/ssl")];

const USER: &str = "    runAsUser: 1000\n    runAsGroup: 1000\n";
const OTHER: &str = "    runAsUser: 2000\n    runAsGroup: 2000\n";
const ROOT: &str = "    runAsUser: 0\n    runAsGroup: 0\n";

/// Every program in a pod on one node, and its result in a pod on another.
pub(super) fn programs(stage: &Stage) -> Result<String> {
    let started = Instant::now();
    let mut notes = Vec::new();
    for (options, local_locks) in [(&["posix"][..], false), (&["posix", "nobrl"], true)] {
        // New directories belong to the owner of the directory that contains them.
        let claim = Claim::new(stage, options, &[("rootOwner", "1000:1000"), ("rootMode", "0755")])?;
        let here = claim.pod("programs-here", "compute1", USER)?;
        let root = here.run("stat -c %u:%g:%a /data")?;
        ensure!(root.trim() == "1000:1000:755", "the volume's root: {root}");
        let there = claim.pod("programs-there", "compute2", USER)?;
        let chosen = PROGRAMS.iter().filter(|program| (program.mounts == Mounts::LocalLocks) == local_locks);
        for (number, program) in chosen.enumerate() {
            let folder = format!("/data/{number}");
            let before = Instant::now();
            here.run_in(&folder, program.work).with_context(|| program.name)?;
            there
                .run_in(&folder, &format!("sleep 2\n{}", program.check))
                .with_context(|| format!("{}, on another node", program.name))?;
            notes.push(format!("{} {:.0} s", program.name, before.elapsed().as_secs_f64()));
        }
    }
    Ok(format!("{}; {:.0} s in all", notes.join(", "), started.elapsed().as_secs_f64()))
}

/// Files of two users on one volume, and changes of owner and mode that the other node sees.
pub(super) fn owners(stage: &Stage) -> Result<String> {
    let claim = Claim::new(stage, &["posix"], &[])?;
    let root = claim.pod("owners-root", "compute1", ROOT)?;
    root.run("chmod 1777 /data")?;
    let one = claim.pod("owners-one", "compute1", USER)?;
    let two = claim.pod("owners-two", "compute2", OTHER)?;
    let (first, second) = ([&one, &two], ["one", "two"]);
    for (pod, name) in first.iter().zip(second) {
        pod.run(&format!(
            "umask 077; echo secret > /data/{name}; test $(stat -c %a:%u /data/{name}) = 600:$(id -u)"
        ))?;
    }
    for (pod, name) in first.iter().rev().zip(second) {
        let denied = pod.run(&format!(
            "sleep 2; if cat /data/{name} 2>/dev/null || echo more 2>/dev/null >> /data/{name} || mv /data/{name} /data/mine 2>/dev/null; \
             then exit 1; fi; stat -c %a:%s /data/{name}"
        ));
        ensure!(
            denied.with_context(|| format!("{name}'s file"))?.trim() == "600:7",
            "{name}'s file has changed"
        );
    }
    root.run("chown 2000:3000 /data/one; chmod 640 /data/one; chmod 644 /data/two")?;
    let seen = two.run("sleep 2; stat -c %a:%u:%g /data/one; cat /data/one")?;
    ensure!(seen.trim() == "640:2000:3000\nsecret", "the new owner on the other node sees {seen}");
    let lost = one.run("sleep 2; if cat /data/one 2>/dev/null; then exit 1; fi; cat /data/two")?;
    ensure!(lost.trim() == "secret", "the former owner sees {lost}");
    Ok("files of mode 0600 stay private; chmod and chown are visible on the other node".to_owned())
}
