//! Operator, node agent, CSI controller and the official sidecars work with the chart's accounts and are never refused. There
//! is no kubelet: nothing is served, and no volume is created.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use forebay_e2e::cache::Cache;
use forebay_e2e::kubernetes::LocalApiServer;
use forebay_e2e::kubernetes::kubectl::Kubectl;
use forebay_e2e::kubernetes::service::Service;
use forebay_e2e::kubernetes::tools::{self, Tools};
use forebay_e2e::sibling;
use serde_json::{Value, json};

use crate::helm::{NAMESPACE, objects, root, template};

const NODE: &str = "worker-1";
/// The time limit for a program to do its work; test machines are slow.
const DONE_WITHIN: Duration = Duration::from_secs(120);

#[test]
fn all_components_work_with_the_rbac_rules_of_the_chart() {
    let server = LocalApiServer::start(false).expect("an API server");
    let kubectl = server.kubectl();
    for file in ["manifests/crds.yaml", "manifests/forebay.yaml"] {
        kubectl.apply(&fs::read_to_string(root().join(file)).expect("the manifests")).expect(file);
    }
    kubectl
        .run(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"])
        .expect("established");
    let cluster =
        fs::read_to_string(root().join("manifests/examples/cluster-minimal.yaml")).expect("the example");
    node(&kubectl);
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir(folder.path().join("node")).expect("the node's folder");
    let mut lab = Lab { kubectl, folder: folder.path().to_owned(), running: Vec::new() };

    lab.start("forebay-csi-node", "driver", &binary("forebay-csi"));
    lab.until("the node is published", &["storagenode", NODE], |object| {
        object.pointer("/status/agentVersion").is_some()
    });

    lab.kubectl.apply(&cluster).expect("a StorageCluster");
    lab.start("forebay-operator", "operator", &binary("forebay-operator"));
    lab.until("an instance exists", &["statefulset", "main-0", "-n", NAMESPACE], |_| true);
    lab.until("a class exists", &["storageclass", "forebay"], |_| true);
    lab.until("the driver's certificate exists", &["secret", "main-csi-tls", "-n", NAMESPACE], |_| true);
    lab.until("the status is reported", &["storagecluster", "main", "-n", NAMESPACE], |object| {
        object.pointer("/status/instances/0/node").is_some_and(|node| node == NODE)
    });

    lab.start("forebay-csi-controller", "driver", &binary("forebay-csi"));
    let sidecars =
        Tools::prepare(&Cache::open().expect("the cache"), &[tools::SIDECARS]).expect("the sidecars");
    lab.start("forebay-csi-controller", "provisioner", &sidecars.path("csi-provisioner"));
    lab.start("forebay-csi-controller", "resizer", &sidecars.path("csi-resizer"));
    for lease in ["csi-forebay-io", "external-resizer-csi-forebay-io"] {
        lab.until(lease, &["lease", lease, "-n", NAMESPACE], |object| {
            object.pointer("/spec/holderIdentity").is_some()
        });
    }
    // The path of a claim: provisioner, driver, the operator's message, and back as an Event.
    let claim = fs::read_to_string(root().join("manifests/examples/claim.yaml")).expect("the example");
    lab.kubectl.apply(&claim).expect("a claim");
    // Plays the controller manager, which does not run here.
    let provisioner = "volume.kubernetes.io/storage-provisioner=csi.forebay.io";
    lab.kubectl.run(&["annotate", "pvc", "training", provisioner]).expect("a provisioner");
    let answer = lab.until("the claim is answered", &["events", "-n", "default"], |events| {
        notes(events)
            .iter()
            .any(|note| note.contains("failed to provision volume") || note.contains("StorageCluster main"))
    });
    assert!(notes(&answer).iter().any(|note| note.contains("StorageCluster main")), "{:?}", notes(&answer));

    let findings = lab.doctor();
    assert!(findings.contains("StorageCluster"), "{findings}");
    assert!(!findings.contains("could not be read"), "{findings}");

    for (name, log) in lab.logs() {
        assert!(!log.is_empty(), "{name} wrote no log");
        let refused = log.lines().find(|line| line.to_lowercase().contains("forbidden"));
        assert_eq!(refused, None, "{name} lacks a right");
    }
}

fn notes(events: &Value) -> Vec<&str> {
    let items = events["items"].as_array().into_iter().flatten();
    items.filter_map(|event| event["message"].as_str()).collect()
}

/// A node as registered by its kubelet.
fn node(kubectl: &Kubectl) {
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}});
    kubectl.apply(&object.to_string()).expect("a node");
    let status = json!({"status": {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }});
    let patch = ["patch", "node", NODE, "--subresource=status", "--type=merge", "-p"];
    kubectl.run(&[&patch[..], &[&status.to_string()]].concat()).expect("its status");
    // Every new node gets this taint, and a controller that does not run here would remove it.
    kubectl
        .run(&["patch", "node", NODE, "--type=merge", "-p", r#"{"spec":{"taints":null}}"#])
        .expect("no taint");
}

/// A program of the product, built from this tree or in `$FOREBAY_BINARIES`.
fn binary(name: &str) -> PathBuf {
    static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
        let own = Path::new(env!("CARGO_BIN_EXE_forebay-lab"));
        sibling::binaries(own, &["forebay-csi", "forebay-operator", "kubectl-forebay"]).expect("the programs")
    });
    BUILT.join(name)
}

struct Lab {
    kubectl: Kubectl,
    folder: PathBuf,
    running: Vec<(String, Service)>,
}

impl Lab {
    /// Starts a container of the chart with its own command line and its service account's token, like a pod on the node.
    fn start(&mut self, workload: &str, container: &str, program: &Path) {
        let path = self.kubeconfig(workload);
        let mut command = Command::new(program);
        command.env("KUBECONFIG", &path);
        self.configure(&mut command, workload, container);
        let name = format!("{workload}-{container}");
        let service = Service::start(&name, &command, &self.folder).expect("the program starts");
        self.running.push((name, service));
    }

    fn kubeconfig(&self, account: &str) -> PathBuf {
        let bound = ["--bound-object-kind=Node", "--bound-object-name", NODE];
        let token = ["create", "token", account, "-n", NAMESPACE, "--duration=1h"];
        let token = self.kubectl.run(&[&token[..], &bound].concat()).expect("a token");
        let view =
            self.kubectl.run(&["config", "view", "--raw", "--minify", "-o", "json"]).expect("a kubeconfig");
        let mut kubeconfig: Value = serde_json::from_str(&view).expect("JSON");
        kubeconfig["users"][0]["user"] = json!({"token": token.trim()});
        let path = self.folder.join(format!("{account}.kubeconfig"));
        fs::write(&path, kubeconfig.to_string()).expect("a kubeconfig");
        path
    }

    /// The output of the pod of `helm test`, with its account: an unfinished cluster, but nothing that it may not read.
    fn doctor(&self) -> String {
        let hooks = template(&["--show-only", "templates/tests/doctor.yaml"]).expect("the test's objects");
        for object in objects(&hooks).iter().filter(|object| object["kind"] != "Pod") {
            self.kubectl.apply(&object.to_string()).expect("the test's rights");
        }
        let mut command = Command::new(binary("kubectl-forebay"));
        command.args(["doctor", "--all", "--namespace", NAMESPACE]);
        command.env("KUBECONFIG", self.kubeconfig("forebay-test"));
        let output = command.output().expect("the doctor runs");
        let text = [output.stdout, output.stderr].concat();
        // 2 is for unknown results; errors in an unfinished cluster result in 1.
        assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&text));
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Arguments and environment as in the chart, with this machine's folders and ports.
    fn configure(&self, command: &mut Command, workload: &str, container: &str) {
        let manifests = fs::read_to_string(root().join("manifests/forebay.yaml")).expect("the manifests");
        let manifests = objects(&manifests);
        let is_workload = |object: &&Value| {
            object["metadata"]["name"] == workload && object.pointer("/spec/template").is_some()
        };
        let object = manifests.iter().find(is_workload).expect(workload);
        let containers =
            object.pointer("/spec/template/spec/containers").and_then(Value::as_array).expect("containers");
        let container =
            containers.iter().find(|candidate| candidate["name"] == container).expect("the container");
        let mut variables = vec![];
        for variable in container["env"].as_array().into_iter().flatten() {
            let value = match variable.pointer("/valueFrom/fieldRef/fieldPath").and_then(Value::as_str) {
                Some("metadata.namespace") => NAMESPACE,
                Some("spec.nodeName") => NODE,
                Some("metadata.name") => "pod",
                Some(other) => panic!("{other} is not known here"),
                None => variable["value"].as_str().expect("a value"),
            };
            variables.push((variable["name"].as_str().expect("a name"), value));
        }
        let folder = self.folder.to_str().expect("UTF-8");
        let here = |text: &str| {
            let mut text = text
                .replace("/run/csi", folder)
                .replace("/var/lib/kubelet/plugins/csi.forebay.io", &format!("{folder}/node"));
            text = text.replace("/var/lib/kubelet/plugins_registry", folder).replace("=/host", "=/");
            for port in ["0.0.0.0:8080", "0.0.0.0:8081", "0.0.0.0:8082", "0.0.0.0:9446", "127.0.0.1:9446"] {
                text = text.replace(port, "127.0.0.1:0");
            }
            variables.iter().fold(text, |text, (name, value)| text.replace(&format!("$({name})"), value))
        };
        // The first word of `command` is the program; otherwise the image's entry point is.
        let words = ["command", "args"].map(|field| container[field].as_array().cloned().unwrap_or_default());
        let program = words[0].iter().take(1).count();
        let words: Vec<_> = words.concat().into_iter().skip(program).collect();
        command.args(words.iter().map(|word| here(word.as_str().expect("a word"))));
        if words.iter().any(|word| word.as_str().is_some_and(|word| word.starts_with("--csi-address"))) {
            // Not every sidecar reads KUBECONFIG.
            command.arg("--kubeconfig").arg(self.folder.join(format!("{workload}.kubeconfig")));
        }
        command.envs(variables.iter().map(|(name, value)| (name, here(value))));
    }

    /// Waits for an object that fulfils `holds`.
    fn until(&mut self, what: &str, object: &[&str], holds: impl Fn(&Value) -> bool) -> Value {
        let (mut found, mut ended) = (None, None);
        let running = &mut self.running;
        let kubectl = &self.kubectl;
        let holds = || {
            // Stop waiting once one of the programs has ended.
            ended = running.iter_mut().find_map(|(_, service)| service.check().err());
            found = kubectl.find(object)?.filter(&holds);
            Ok(found.is_some() || ended.is_some())
        };
        let seen = kubectl.wait_until(what, DONE_WITHIN, holds, String::new);
        match seen.and_then(|()| ended.map_or(Ok(()), Err)) {
            Ok(()) => found.expect("just seen"),
            Err(error) => {
                let logs: String =
                    self.logs().iter().map(|(name, log)| format!("--- {name}\n{log}\n")).collect();
                panic!("{what}: {error:#}\n{logs}");
            }
        }
    }

    fn logs(&self) -> Vec<(&str, String)> {
        let log =
            |name: &str| fs::read_to_string(self.folder.join(format!("{name}.log"))).unwrap_or_default();
        self.running.iter().map(|(name, _)| (name.as_str(), log(name))).collect()
    }
}
