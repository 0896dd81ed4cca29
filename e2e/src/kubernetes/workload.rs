//! Claims and pods as users have them.

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, ensure};

use super::stage::{LONG, Stage};

/// The job of the documentation, as it stands there.
const TRAINING: &str = include_str!("../../../manifests/examples/training-two-pods.yaml");
/// The claim of the documentation, which asks for more than a lab's disk has.
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

/// The image in the example.
const EXAMPLE_IMAGE: &str = "docker.io/forebay/forebay:0.1.0";

/// The two-pod training job, of this image.
pub fn training(image: &str) -> String {
    TRAINING.replace(EXAMPLE_IMAGE, image)
}

/// A pod that mounts this claim, and else is one of [`pod`].
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

/// Writes file after file, each with its own checksum at its end, synced before it gets its name. One WRITE each, so that a
/// server that loses its memory between two of them cannot leave half of it.
const WRITER: &str = r#"
mkdir -p $folder
number=0
while :; do
    number=$((number + 1))
    head -c 32768 /dev/urandom > /tmp/body
    { cat /tmp/body; sha256sum < /tmp/body; } > /tmp/whole
    again dd if=/tmp/whole of=$folder/.new bs=64K conv=fsync status=none
    again mv $folder/.new $folder/$number
    echo "wrote $number"
    if [ $pause != 0 ]; then sleep $pause; fi
done
"#;

/// Verifies file after file of [`WRITER`]. A wrong sum ends it: what has its name was synced.
const READER: &str = r#"
number=0
while :; do
    number=$((number + 1))
    until [ -e $folder/$number ]; do sleep $nap; done
    again cp $folder/$number /tmp/file
    want=$(tail -c +32769 /tmp/file)
    [ "$(head -c 32768 /tmp/file | sha256sum)" = "$want" ] || { echo "wrong sum of $number"; exit 1; }
    echo "verified $number"
done
"#;

/// What writer and reader do when a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnError {
    /// They end.
    End,
    /// They do it again: what a power cut took before it was synced is reported to who wrote it.
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
    /// As fast as it can, which is all that an emulated node has to give.
    Fast,
    /// A file a second or so: several streams at once leave the nodes time for what is to be tried.
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
}

impl<'a> Stream<'a> {
    /// Starts both in a folder of their own, and waits until both get on.
    pub fn start(stage: &'a Stage, nodes: [&str; 2], on_error: OnError) -> Result<Self> {
        Self::start_on(stage, "training", "", nodes, on_error, Pace::Fast)
    }

    /// The same on another claim, by pods whose names begin with `prefix`.
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
            let script = format!("folder=/data/stream-{number}\n{pace}{on_error}{script}");
            stage.kubectl().apply(&pod_with(claim, name, &image, node, &script))?;
        }
        let stream = Self { stage, names };
        stream.wait_progress((0, 0))?;
        Ok(stream)
    }

    /// How far writer and reader are; an error when one of them has ended.
    pub fn progress(&self) -> Result<(u32, u32)> {
        let mut at = [0, 0];
        for (pod, at) in self.names.iter().zip(&mut at) {
            let phase = self.stage.kubectl().run(&["get", "pod", pod, "-o=jsonpath={.status.phase}"])?;
            let said = self.stage.kubectl().run(&["logs", pod, "--tail=5"]).unwrap_or_default();
            ensure!(phase != "Failed" && phase != "Succeeded", "the {pod} ended: {said}");
            let last =
                said.lines().rfind(|line| !line.contains(':')).and_then(|line| line.rsplit(' ').next());
            *at = last.and_then(|number| number.parse().ok()).unwrap_or(0);
        }
        Ok((at[0], at[1]))
    }

    /// Waits until both are further than this; how far they are.
    pub fn wait_progress(&self, than: (u32, u32)) -> Result<(u32, u32)> {
        let mut now = (0, 0);
        let mut ended = None;
        self.stage.wait("writer and reader get on", LONG, || match self.progress() {
            Ok(at) => {
                now = at;
                Ok(at.0 > than.0 && at.1 > than.1)
            }
            Err(error) if error.to_string().contains("ended") => {
                ended = Some(error);
                Ok(true)
            }
            Err(error) => Err(error),
        })?;
        ended.map_or(Ok(now), Err)
    }

    /// How often writer and reader did something again.
    pub fn repetitions(&self) -> Result<usize> {
        let logs = |pod: &String| self.stage.kubectl().run(&["logs", pod, "--tail=-1"]);
        Ok(self.names.iter().map(logs).collect::<Result<String>>()?.matches("again: ").count())
    }

    /// Ends both; how many files were written and verified.
    pub fn finish(self) -> Result<(u32, u32)> {
        let at = self.progress()?;
        let [writer, reader] = &self.names;
        self.stage.kubectl().run(&["delete", "pod", writer, reader, "--wait=true"])?;
        Ok(at)
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
    use super::*;

    #[test]
    fn the_examples_are_what_the_lab_expects_of_them() {
        assert!(claim("1Gi").contains("storage: 1Gi") && claim("1Gi").contains("name: training"));
        let job = training("here/forebay:1");
        assert!(job.contains("  name: training\n") && job.contains("claimName: training"));
        assert!(job.contains("image: here/forebay:1\n") && !job.contains(EXAMPLE_IMAGE));
    }
}
