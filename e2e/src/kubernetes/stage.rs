//! A cluster with Forebay on it, ours or a user's own. The story and the scenarios run on it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::cluster::Cluster;
use super::kubectl::{Kubectl, output_of};
use crate::images::product;
use crate::progress::say;
use crate::wait::Hopeless;

/// Namespace of the release.
pub const NAMESPACE: &str = "forebay-system";
/// Name of the release.
pub const RELEASE: &str = "forebay";
/// The StorageCluster.
pub const CLUSTER: &str = "main";
/// Namespace of the story on a user's own cluster.
const OWN_NAMESPACE: &str = "forebay-quickstart";
/// Deadline of a rollout or a job on emulated nodes that share two cores.
pub const LONG: Duration = Duration::from_secs(420);

/// See the module documentation.
#[derive(Debug)]
pub struct Stage {
    kubectl: Kubectl,
    helm: PathBuf,
    chart: PathBuf,
    helm_arguments: Vec<String>,
    cluster: Option<Cluster>,
}

impl Stage {
    /// Stage on a cluster of the lab.
    pub fn on(cluster: Cluster, chart: &Path) -> Result<Self> {
        let helm = cluster.tools().path("helm");
        // As few replicas as possible, since the nodes are emulated. But the operator's node may be the one that is lost.
        let helm_arguments =
            ["--set", "operator.replicas=2,csi.controller.replicas=1"].map(str::to_owned).to_vec();
        let chart = chart_at(chart)?;
        Ok(Self { kubectl: cluster.kubectl(), helm, chart, helm_arguments, cluster: Some(cluster) })
    }

    /// Stage on the cluster of the user's kubeconfig, in a separate namespace. The nodes must have the image, or a registry
    /// that provides it.
    pub fn existing(kubectl: PathBuf, helm: PathBuf, chart: &Path, arguments: &[String]) -> Result<Self> {
        let set = std::env::var_os("KUBECONFIG")
            .context("--existing-cluster takes the cluster of KUBECONFIG, which is not set")?;
        let kubectl = Kubectl::new(kubectl, PathBuf::from(set));
        let context = kubectl.run(&["config", "current-context"])?;
        say(format!("the existing cluster of the context {}, namespace {OWN_NAMESPACE}", context.trim()));
        if kubectl.find(&["namespace", OWN_NAMESPACE])?.is_none() {
            kubectl.run(&["create", "namespace", OWN_NAMESPACE])?;
        }
        let kubectl = kubectl.within(OWN_NAMESPACE);
        Ok(Self { kubectl, helm, chart: chart_at(chart)?, helm_arguments: arguments.to_vec(), cluster: None })
    }

    /// What a user should remove afterwards.
    pub fn farewell(&self) -> Option<String> {
        self.cluster.is_none().then(|| {
            format!(
                "What the story made is in the namespace {OWN_NAMESPACE}; Forebay stays installed.\n\
                 kubectl delete namespace {OWN_NAMESPACE}   removes the former, docs/guides/operations.md says how to uninstall.\n"
            )
        })
    }

    /// kubectl.
    pub fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    /// The lab's cluster, if it is one.
    pub fn cluster(&self) -> Option<&Cluster> {
        self.cluster.as_ref()
    }

    /// Runs helm in the release's namespace.
    pub fn helm(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.kubectl.command(&self.helm);
        command.args(["--namespace", NAMESPACE]).args(arguments);
        output_of(command, b"").with_context(|| format!("helm {}", arguments.join(" ")))
    }

    /// Installs or upgrades the chart, with these arguments added, and waits for its components.
    pub fn install(&self, arguments: &[&str]) -> Result<()> {
        let chart = self.chart.display().to_string();
        let own: Vec<&str> = self.helm_arguments.iter().map(String::as_str).collect();
        let mut all = vec!["upgrade", "--install", RELEASE, &chart, "--create-namespace"];
        all.extend(own);
        all.extend(arguments);
        self.helm(&all)?;
        self.wait_rolled_out()
    }

    /// Whether Forebay is already installed here.
    pub fn is_installed(&self) -> Result<bool> {
        let found = self.helm(&["list", "--short", "--filter", &format!("^{RELEASE}$")])?;
        Ok(!found.trim().is_empty())
    }

    /// The operator's image, which pods that use volumes also run: it has a shell and coreutils.
    pub fn image(&self) -> Result<String> {
        let path = "-o=jsonpath={.spec.template.spec.containers[0].image}";
        self.kubectl.run(&["get", "deployment", "forebay-operator", "-n", NAMESPACE, path])
    }

    /// Waits until every component of the chart runs according to its manifest.
    pub fn wait_rolled_out(&self) -> Result<()> {
        // The node plugins are replaced one by one.
        let timeout = format!("--timeout={}s", 2 * LONG.as_secs());
        for part in
            ["daemonset/forebay-csi-node", "deployment/forebay-operator", "deployment/forebay-csi-controller"]
        {
            let waits = ["rollout", "status", part, "-n", NAMESPACE, &timeout];
            let mut command = self.kubectl.command(self.kubectl.program());
            command.args(waits);
            output_of(command, b"").with_context(|| format!("wait for {part}"))?;
        }
        Ok(())
    }

    /// Waits until the StorageCluster's condition `Ready` is true for its current generation.
    pub fn wait_cluster_ready(&self) -> Result<()> {
        self.wait("the StorageCluster is Ready", LONG, || {
            let cluster = self.kubectl.get(&["storagecluster", CLUSTER, "-n", NAMESPACE])?;
            let generation = &cluster["metadata"]["generation"];
            let ready = condition(&cluster, "Ready");
            Ok(ready["status"] == "True" && ready["observedGeneration"] == *generation)
        })
    }

    /// Polls until the condition holds. A failure describes the whole cluster.
    pub fn wait(&self, what: &str, deadline: Duration, holds: impl FnMut() -> Result<bool>) -> Result<()> {
        self.kubectl.wait_until(what, deadline, holds, String::new)
    }

    /// Waits until a pod is running and ready.
    pub fn wait_pod(&self, name: &str) -> Result<()> {
        self.wait(&format!("pod {name} is ready"), LONG, || {
            let pod = self.kubectl.get(&["pod", name])?;
            let phase = &pod["status"]["phase"];
            if phase == "Failed" {
                let said = self.kubectl.run(&["logs", name, "--tail=20"]).unwrap_or_default();
                return Err(Hopeless::error(format!("it failed: {said}")));
            }
            Ok(condition(&pod, "Ready")["status"] == "True")
        })
    }

    /// Waits until a Job is complete. Fails as soon as the Job has failed.
    pub fn wait_job(&self, name: &str) -> Result<()> {
        self.wait(&format!("job {name} is complete"), LONG, || {
            let job = self.kubectl.get(&["job", name])?;
            if condition(&job, "Failed")["status"] == "True" {
                return Err(Hopeless::error(format!("it failed:\n{}", self.job_logs(name)?)));
            }
            Ok(condition(&job, "Complete")["status"] == "True")
        })
    }

    /// The logs of all pods of a Job.
    pub fn job_logs(&self, name: &str) -> Result<String> {
        self.kubectl.run(&["logs", "-l", &format!("job-name={name}"), "--prefix", "--tail=50"])
    }

    /// Runs a shell script in a pod.
    pub fn exec(&self, pod: &str, script: &str) -> Result<String> {
        self.kubectl.run(&["exec", pod, "--", "/bin/bash", "-euc", script])
    }

    /// Runs `kubectl forebay` with these arguments. Returns its output and exit code.
    pub fn forebay(&self, arguments: &[&str]) -> Result<(String, Option<i32>)> {
        let program = product::binaries()?.join("kubectl-forebay");
        ensure!(program.exists(), "{} is not built", program.display());
        let mut command: Command = self.kubectl.command(&program);
        let output = command.args(arguments).output().context("start kubectl forebay")?;
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        Ok((said.concat(), output.status.code()))
    }

    /// The output of `kubectl forebay status`. It is no error if something is not ready.
    pub fn forebay_status(&self) -> Result<String> {
        const NOT_READY: i32 = 1;
        let (said, code) = self.forebay(&["status"])?;
        ensure!(matches!(code, Some(0 | NOT_READY)), "kubectl forebay status: {said}");
        Ok(said)
    }

    /// Fails if a container of Forebay has restarted since the installation.
    pub fn nothing_restarted(&self) -> Result<String> {
        let pods = self.kubectl.get(&["pods", "-n", NAMESPACE])?;
        let mut containers = 0;
        for pod in pods["items"].as_array().into_iter().flatten() {
            for container in pod["status"]["containerStatuses"].as_array().into_iter().flatten() {
                ensure!(
                    container["restartCount"].as_u64() == Some(0),
                    "{}, container {}: restarted {} times; last end: {}",
                    pod["metadata"]["name"],
                    container["name"],
                    container["restartCount"],
                    container["lastState"]["terminated"]
                );
                containers += 1;
            }
        }
        ensure!(containers > 0, "no container in {NAMESPACE}");
        Ok(format!("{containers} containers"))
    }

    /// Everything that may help to find the cause of a failure.
    pub fn describe(&self) -> String {
        let mut out = String::new();
        let mut show = |title: &str, arguments: &[&str]| {
            let text = self.kubectl.run(arguments).unwrap_or_else(|error| format!("{error:#}"));
            out.push_str(&format!("--- {title}\n{}\n", text.trim_end()));
        };
        show("pods", &["get", "pods", "-A", "-o", "wide"]);
        show("cluster", &["get", "storagecluster", "-A", "-o", "yaml"]);
        show("nodes", &["get", "node,storagenode"]);
        show("claims", &["get", "pvc,pv,storageclass", "-A"]);
        show("events", &["get", "events", "-A", "--sort-by=.lastTimestamp"]);
        for component in ["operator", "csi-controller", "csi-node", "server"] {
            let label = format!("app.kubernetes.io/component={component}");
            let logs = ["logs", "-n", NAMESPACE, "-l", &label, "--all-containers", "--prefix", "--tail=15"];
            show(component, &logs);
        }
        out
    }
}

fn chart_at(chart: &Path) -> Result<PathBuf> {
    ensure!(
        chart.join("Chart.yaml").exists(),
        "no chart in {}; run in the sources' folder or use --chart",
        chart.display()
    );
    chart.canonicalize().context("the chart's folder")
}

/// A condition of an object's status; null if it has none of this type.
pub fn condition<'a>(object: &'a Value, kind: &str) -> &'a Value {
    const NONE: &Value = &Value::Null;
    let conditions = object["status"]["conditions"].as_array();
    conditions.and_then(|all| all.iter().find(|one| one["type"] == kind)).unwrap_or(NONE)
}
