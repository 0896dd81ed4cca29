//! Claims and pods of users.

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::stage::{LONG, Stage};
use crate::lab::Node;
use crate::wait::Hopeless;

/// The job from the documentation, unchanged.
const TRAINING: &str = include_str!("../../../manifests/examples/training-two-pods.yaml");
/// The claim from the documentation, which requests more than a lab's disk has.
const CLAIM: &str = include_str!("../../../manifests/examples/claim.yaml");

/// The claim `training` of this size, e.g. `1Gi`.
pub fn claim(size: &str) -> String {
    assert!(CLAIM.contains("storage: 10Gi"), "the example's size");
    CLAIM.replace("storage: 10Gi", &format!("storage: {size}"))
}

/// A claim of a class.
pub fn claim_of(class: &str, name: &str, size: &str) -> String {
    format!(
        "apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}}}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: {class}
  resources: {{requests: {{storage: {size}}}}}
"
    )
}

/// The class of the story.
pub(super) const CLASS: &str = "forebay";

/// Creates a copy of [`CLASS`] with these mount options and further parameters.
pub(super) fn create_class(
    stage: &Stage,
    name: &str,
    mount_options: &[&str],
    parameters: &[(&str, &str)],
) -> Result<()> {
    let mut class = stage.kubectl().get(&["storageclass", CLASS])?;
    class["metadata"] = json!({ "name": name });
    class["mountOptions"] = json!(mount_options);
    for (key, value) in parameters {
        class["parameters"][key] = json!(value);
    }
    stage.kubectl().apply(&class.to_string()).map(drop)
}

/// Returns the line of the cifs mount below this pod's volumes. Fails if there is none.
pub(super) fn mounted(node: &Node, claim_volume: &str) -> Result<String> {
    let mounts = node.run("grep ' cifs ' /proc/mounts || true")?;
    let line = mounts.lines().find(|line| line.contains(claim_volume));
    line.map(str::to_owned).with_context(|| format!("no mount of {claim_volume} in\n{mounts}"))
}

/// The volume of a claim.
pub(super) fn volume(stage: &Stage, claim: &str) -> Result<String> {
    let name = stage.kubectl().run(&["get", "pvc", claim, "-o=jsonpath={.spec.volumeName}"])?;
    ensure!(!name.is_empty(), "the claim {claim} is not bound");
    Ok(name)
}

/// The image in the example.
const EXAMPLE_IMAGE: &str = "docker.io/forebay/forebay:0.1.0";

/// The two-pod training job, of this image.
pub fn training(image: &str) -> String {
    TRAINING.replace(EXAMPLE_IMAGE, image)
}

/// A pod like [`pod`], but with this claim.
pub fn pod_with(claim: &str, name: &str, image: &str, node: &str, script: &str) -> String {
    pod(name, image, Some(node), script).replace("claimName: training", &format!("claimName: {claim}"))
}

/// A pod of this image that mounts the claim `training` at /data and runs this script.
pub fn pod(name: &str, image: &str, node: Option<&str>, script: &str) -> String {
    let node =
        node.map(|node| format!("  nodeSelector: {{kubernetes.io/hostname: {node}}}\n")).unwrap_or_default();
    let script: String = script.lines().map(|line| format!("        {}\n", line.trim_end())).collect();
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: {name}}}}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
{node}  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    seccompProfile: {{type: RuntimeDefault}}
  containers:
  - name: main
    image: {image}
    imagePullPolicy: IfNotPresent
    command: [/bin/bash, -euc]
    args:
    - |
{script}    volumeMounts:
    - {{name: data, mountPath: /data}}
    - {{name: tmp, mountPath: /tmp}}
    resources: {{requests: {{cpu: 20m, memory: 32Mi}}}}
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
  volumes:
  - name: data
    persistentVolumeClaim: {{claimName: training}}
  - name: tmp
    emptyDir: {{}}
"
    )
}

/// Writes file after file, each with its checksum at its end, and syncs it before renaming it into place. Each file is one
/// WRITE, so a server that loses its memory between two WRITEs cannot leave half a file.
const WRITER: &str = r#"
mkdir -p $folder
number=0
while :; do
    number=$((number + 1))
    head -c 32768 /dev/urandom > $tmp/body
    { cat $tmp/body; sha256sum < $tmp/body; } > $tmp/whole
    again dd if=$tmp/whole of=$folder/.new bs=64K conv=fsync status=none
    again mv $folder/.new $folder/$number
    echo "wrote $number"
    if [ $pause != 0 ]; then sleep $pause; fi
done
"#;

/// Verifies file after file of [`WRITER`], and stores all checksums. A wrong checksum ends it: a file is synced before it
/// gets its name.
const READER: &str = r#"
number=0
while :; do
    number=$((number + 1))
    until [ -e $folder/$number ]; do sleep $nap; done
    again cp $folder/$number $tmp/file
    want=$(tail -c +32769 $tmp/file)
    [ "$(head -c 32768 $tmp/file | sha256sum)" = "$want" ] || { echo "wrong sum of $number"; exit 1; }
    sum=$(sha256sum < $tmp/file)
    echo "${sum%% *}  $folder/$number" >> $tmp/sums
    echo "verified $number"
done
"#;

/// Verifies everything that [`READER`] has verified a second time, in its pod, to show that it is still there. Prints the
/// number of files.
const AGAIN: &str = "sha256sum --check --quiet --strict $tmp/sums >&2 && grep -c . $tmp/sums";

/// Folder of the writer's and reader's own files.
const TMP: &str = "tmp=/tmp\n";

/// What writer and reader do when a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnError {
    /// They end.
    End,
    /// They retry: data that a power cut destroyed before it was synced is reported to its writer as an error.
    Again,
}

impl OnError {
    fn shell(self) -> &'static str {
        match self {
            Self::End => "again() { \"$@\"; }\n",
            Self::Again => {
                "again() { until \"$@\"; do echo \"again: $*\"; sleep 1; \
                 if [ \"$1\" = mv ] && [ ! -e \"$2\" ] && [ -e \"$3\" ]; then return; fi; done; }\n"
            }
        }
    }
}

/// How fast a writer writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// As fast as it can, which takes all that an emulated node has.
    Fast,
    /// About one file per second: several parallel streams leave the nodes time for the test itself.
    Slow,
}

impl Pace {
    fn shell(self) -> &'static str {
        match self {
            Self::Fast => "pause=0 nap=0.2\n",
            Self::Slow => "pause=1 nap=1\n",
        }
    }
}

/// A writer and a reader of one volume, on two nodes.
#[derive(Debug)]
pub struct Stream<'a> {
    stage: &'a Stage,
    /// Their pods.
    names: [String; 2],
    /// The reader's node.
    reads_on: String,
}

impl<'a> Stream<'a> {
    /// Starts both in a separate folder, and waits until both make progress.
    pub fn start(stage: &'a Stage, nodes: [&str; 2], on_error: OnError) -> Result<Self> {
        Self::start_on(stage, "training", "", nodes, on_error, Pace::Fast)
    }

    /// The same on another claim, with pod names that begin with `prefix`.
    pub fn start_on(
        stage: &'a Stage,
        claim: &str,
        prefix: &str,
        nodes: [&str; 2],
        on_error: OnError,
        pace: Pace,
    ) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let image = stage.image()?;
        let names = ["writer", "reader"].map(|name| format!("{prefix}{name}"));
        for ((name, node), script) in names.iter().zip(nodes).zip([WRITER, READER]) {
            let (pace, on_error) = (pace.shell(), on_error.shell());
            let script = format!("folder=/data/stream-{number}\n{TMP}{pace}{on_error}{script}");
            stage.kubectl().apply(&pod_with(claim, name, &image, node, &script))?;
        }
        let stream = Self { stage, names, reads_on: nodes[1].to_owned() };
        stream.wait_progress((0, 0))?;
        Ok(stream)
    }

    /// The progress of writer and reader. Fails if one of them has ended.
    pub fn progress(&self) -> Result<(u32, u32)> {
        let [writer, reader] = &self.names;
        Ok((self.progress_of(writer)?, self.progress_of(reader)?))
    }

    fn progress_of(&self, pod: &str) -> Result<u32> {
        let phase = self.stage.kubectl().run(&["get", "pod", pod, "-o=jsonpath={.status.phase}"])?;
        let said = self.stage.kubectl().run(&["logs", pod, "--tail=5"]).unwrap_or_default();
        let runs = phase != "Failed" && phase != "Succeeded";
        Hopeless::unless(runs, || format!("the {pod} ended: {said}"))?;
        let last = said.lines().rfind(|line| !line.contains(':')).and_then(|line| line.rsplit(' ').next());
        Ok(last.and_then(|number| number.parse().ok()).unwrap_or(0))
    }

    /// Waits until both have progressed beyond `than`. Returns their progress.
    pub fn wait_progress(&self, than: (u32, u32)) -> Result<(u32, u32)> {
        let mut now = (0, 0);
        self.stage.wait("writer and reader get on", LONG, || {
            now = self.progress()?;
            Ok(now.0 > than.0 && now.1 > than.1)
        })?;
        Ok(now)
    }

    /// Verifies again every file that was verified before, bypassing the cache of the reader's node. Returns the number of
    /// files. Call it after events that may have lost fsynced data: the reader itself checks each file once.
    pub fn verify_again(&self) -> Result<u32> {
        if let Some(cluster) = self.stage.cluster() {
            cluster.lab().node(&self.reads_on).run("echo 3 > /proc/sys/vm/drop_caches")?;
        }
        let said = self.stage.exec(&self.names[1], &format!("{TMP}{AGAIN}"));
        let count = said.context("files that were verified before")?.trim().parse()?;
        ensure!(count > 0, "nothing was verified before");
        Ok(count)
    }

    /// Number of operations that writer and reader have repeated.
    pub fn repetitions(&self) -> Result<usize> {
        let logs = |pod: &String| self.stage.kubectl().run(&["logs", pod, "--tail=-1"]);
        Ok(self.names.iter().map(logs).collect::<Result<String>>()?.matches("again: ").count())
    }

    /// Ends both. Returns how many files were written and verified, after all were verified again at the end.
    pub fn finish(self) -> Result<(u32, u32)> {
        let [writer, reader] = &self.names;
        let (written, _) = self.progress()?;
        self.stage.kubectl().run(&["delete", "pod", writer, "--wait=true"])?;
        self.stage.wait("the reader has verified all that was written", LONG, || {
            Ok(self.progress_of(reader)? >= written)
        })?;
        let verified = self.verify_again()?;
        ensure!(verified >= written, "{verified} files verified of {written}");
        self.stage.kubectl().run(&["delete", "pod", reader, "--wait=true"])?;
        Ok((written, verified))
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        let _ = self.stage.kubectl().run(&[
            "delete",
            "pod",
            &self.names[0],
            &self.names[1],
            "--ignore-not-found",
            "--wait=false",
        ]);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn examples_have_the_fields_that_the_lab_replaces() {
        assert!(claim("1Gi").contains("storage: 1Gi") && claim("1Gi").contains("name: training"));
        let job = training("here/forebay:1");
        assert!(job.contains("  name: training\n") && job.contains("claimName: training"));
        assert!(job.contains("image: here/forebay:1\n") && !job.contains(EXAMPLE_IMAGE));
    }

    /// Runs a part of a stream on this machine, until it ends or prints this line.
    fn run(folder: &Path, script: &str, last: &str) -> (bool, Vec<String>) {
        let script = format!(
            "folder={0}/data\ntmp={0}/$1\nmkdir -p $tmp\n{1}{2}{script}",
            folder.display(),
            Pace::Fast.shell(),
            OnError::End.shell()
        );
        let mut child = Command::new("bash")
            .args(["-euc", &script, "stream", if script.contains("urandom") { "writer" } else { "reader" }])
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("bash");
        let mut lines = Vec::new();
        for line in BufReader::new(child.stdout.take().expect("a pipe")).lines() {
            lines.push(line.expect("text"));
            if lines.last().is_some_and(|line| line == last) {
                let _ = child.kill();
            }
        }
        (child.wait().expect("its end").success(), lines)
    }

    #[test]
    fn second_verification_finds_files_lost_after_the_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let (_, written) = run(folder.path(), WRITER, "wrote 4");
        assert_eq!(written[..4], ["wrote 1", "wrote 2", "wrote 3", "wrote 4"]);
        let (_, verified) = run(folder.path(), READER, "verified 3");
        assert_eq!(verified[..3], ["verified 1", "verified 2", "verified 3"]);
        let again = || run(folder.path(), AGAIN, "");
        let (good, said) = again();
        assert!(good && said[0].parse::<u32>().expect("a number") >= 3, "{said:?}");

        let second = folder.path().join("data/2");
        let content = fs::read(&second).expect("written");
        for lost in [vec![0; content.len()], content[..content.len() / 2].to_vec(), Vec::new()] {
            fs::write(&second, lost).expect("lost");
            assert!(!again().0);
        }
        fs::remove_file(&second).expect("lost");
        assert!(!again().0);
        fs::write(&second, content).expect("back");
        assert!(again().0);
        // The reader detects a file that was never complete.
        fs::write(folder.path().join("data/4"), "torn").expect("torn");
        fs::remove_file(folder.path().join("reader/sums")).expect("from the start");
        let (good, said) = run(folder.path(), READER, "");
        assert!(!good && said.last().is_some_and(|line| line == "wrong sum of 4"), "{said:?}");
    }
}
