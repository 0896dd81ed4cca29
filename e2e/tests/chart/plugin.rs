//! `kubectl forebay top`, `who` and `bundle` with a real API server, through its proxy, and a real server under load.

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use forebay_e2e::kubernetes::LocalApiServer;
use forebay_e2e::kubernetes::kubectl::{Kubectl, output_of};
use serde_json::{Value, json};

use crate::helm::{NAMESPACE, root};
use crate::server::{Server, VOLUME};

/// An address of this machine that the API server is allowed to proxy to: not loopback.
fn own_address() -> IpAddr {
    let mut ip = Command::new("ip");
    ip.args(["-json", "-4", "address", "show", "up", "scope", "global"]);
    let links: Value = serde_json::from_str(&output_of(ip, b"").expect("ip")).expect("JSON");
    let links = links.as_array().expect("links").iter();
    let mut addresses = links.flat_map(|link| link["addr_info"].as_array().cloned().unwrap_or_default());
    let found = addresses.find_map(|address| address["local"].as_str()?.parse().ok());
    found.expect(
        "this machine has no IPv4 address but loopback; give it one: ip link add forebay0 type dummy, \
                  ip addr add 10.254.0.1/24 dev forebay0, ip link set forebay0 up",
    )
}

fn pod(name: &str, namespace: &str, labels: &Value, spec: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace, "labels": labels}, "spec": spec})
}

#[test]
fn kubectl_plugin_finds_a_busy_claim_and_its_pods() {
    let address = own_address();
    let server = Server::start(address);
    let api = LocalApiServer::start(false).expect("an API server");
    let kubectl = api.kubectl();
    let plugin = |arguments: &[&str]| {
        let mut plugin = Command::new(server.programs.join("kubectl-forebay"));
        plugin.arg("--color=never").args(arguments).arg("--kubeconfig").arg(kubectl.kubeconfig());
        output_of(plugin, b"")
    };
    let refusal = plugin(&["top"]).expect_err("there is nothing yet");
    assert!(format!("{refusal:#}").contains("no server runs here"), "{refusal:#}");

    for namespace in [NAMESPACE, "team"] {
        kubectl.run(&["create", "namespace", namespace]).expect("a namespace");
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": namespace}});
        kubectl.apply(&account.to_string()).expect("an account");
    }
    let container = |ports: Value, mounts: Value| json!({"name": "main", "image": "x", "ports": ports, "volumeMounts": mounts});
    let ours = json!({"app.kubernetes.io/name": "forebay", "app.kubernetes.io/component": "server",
        "storage.forebay.io/instance": "main-0"});
    let ports = json!([{"name": "metrics", "containerPort": server.http.port()}]);
    let volume = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]);
    let mounts = json!([{"name": "data", "mountPath": "/data"}]);
    let objects = [
        pod(
            "main-0-0",
            NAMESPACE,
            &ours,
            &json!({"nodeName": "storage-1", "containers": [container(ports, json!([]))]}),
        ),
        pod(
            "rank-0",
            "team",
            &json!({}),
            &json!({"nodeName": "worker-1", "volumes": volume,
            "containers": [container(json!([]), mounts)]}),
        ),
        pod(
            "other",
            "team",
            &json!({}),
            &json!({"nodeName": "worker-1", "containers": [container(json!([]), json!([]))]}),
        ),
        json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": VOLUME}, "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"],
            "csi": {"driver": "csi.forebay.io", "volumeHandle": format!("main-0/{VOLUME}")}}}),
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", "namespace": "team"}, "spec": {
            "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, "volumeName": VOLUME}}),
    ];
    for object in objects {
        kubectl.apply(&object.to_string()).expect("an object");
    }
    // The status that kubelets would report.
    let running = |address: &str| {
        json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}}).to_string()
    };
    for (namespace, name, address) in
        [(NAMESPACE, "main-0-0", address.to_string()), ("team", "rank-0", "192.0.2.7".to_owned())]
    {
        let status = running(&address);
        let patch =
            ["patch", "pod", name, "-n", namespace, "--subresource=status", "--type=merge", "-p", &status];
        kubectl.run(&patch).expect("a status");
    }

    let mut load = server.load(9).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a client");
    let found = plugin(&["top", "--interval", "3", "-o", "json"]).expect("what is busy");
    let who = plugin(&["who", "team/data"]).expect("who uses it");
    assert!(load.wait().expect("its end").success());
    let found: Value = serde_json::from_str(&found).expect("JSON");
    let volume = &found["volumes"][0];
    let text = |key: &str| volume[key].as_str().unwrap_or_default();
    assert_eq!(
        (text("claimNamespace"), text("claim"), text("instance"), text("node")),
        ("team", "data", "main-0", "storage-1")
    );
    for key in ["readBytes", "reads", "latencySeconds", "sessions", "openFiles"] {
        assert!(volume[key].as_f64().is_some_and(|number| number > 0.0), "{key}: {volume}");
    }
    assert_eq!(found["unread"], json!([]));

    let lines: Vec<&str> = who.lines().collect();
    assert!(
        lines[0].starts_with("team/data: volume pvc-1 of instance main-0; ")
            && lines[0].ends_with(" open files"),
        "{who}"
    );
    assert!(!lines[0].contains("; 0 SMB sessions"), "{who}");
    assert_eq!(lines.len(), 4, "{who}");
    assert!(
        lines[3].starts_with("rank-0") && lines[3].contains("worker-1") && lines[3].contains("read-write"),
        "{who}"
    );

    let table = plugin(&["top", "--interval", "1", "-o", "wide"]).expect("a table");
    assert!(table.lines().nth(1).is_some_and(|line| line.starts_with("team/data   main-0")), "{table}");
    bundle(&kubectl, &plugin);
    pauses(&kubectl, &plugin);
    completes(&kubectl, &server.programs.join("kubectl-forebay"));
    let refusal = plugin(&["who", "team/none"]).expect_err("no such claim");
    assert!(format!("{refusal:#}").contains("there is no claim none in namespace team"), "{refusal:#}");
}

/// Pauses and resumes a StorageCluster.
fn pauses(kubectl: &Kubectl, plugin: &dyn Fn(&[&str]) -> anyhow::Result<String>) {
    let top = root();
    for crd in ["storageclusters", "storagenodes"] {
        let file = top.join(format!("charts/forebay/crds/{crd}.yaml"));
        let file = file.to_str().expect("UTF-8");
        kubectl.run(&["apply", "--server-side", "-f", file]).expect("a definition");
    }
    kubectl
        .run(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"])
        .expect("established");
    let cluster =
        std::fs::read_to_string(top.join("manifests/examples/cluster-minimal.yaml")).expect("an example");
    kubectl.apply(&cluster).expect("a StorageCluster");
    let listed = kubectl.run(&["get", "storageclusters", "-n", NAMESPACE, "-o", "name"]).expect("its name");
    let name = listed.trim().rsplit('/').next().unwrap_or_default().to_owned();
    let paused = || {
        let path = "jsonpath={.spec.paused}";
        kubectl.run(&["get", "storagecluster", &name, "-n", NAMESPACE, "-o", path]).expect("the spec")
    };
    for (command, says, is) in [
        ("pause", "paused. Servers continue", "true"),
        ("pause", "already paused", "true"),
        ("resume", "resumed", "false"),
        ("resume", "already not paused", "false"),
    ] {
        let said = plugin(&[command, &name]).expect(command);
        assert!(said.starts_with(&format!("{name}: {says}")), "{said}");
        assert_eq!(paused().trim(), is, "{command}");
    }
    let refusal = plugin(&["pause", "none"]).expect_err("no such cluster");
    assert!(format!("{refusal:#}").contains("there is no StorageCluster none in namespace"), "{refusal:#}");
}

/// kubectl's own completion calls the plugin.
fn completes(kubectl: &Kubectl, plugin: &Path) {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["kubectl-forebay", "kubectl_complete-forebay"] {
        std::os::unix::fs::symlink(plugin, folder.path().join(name)).expect("a link");
    }
    let mut command = Command::new(kubectl.program());
    command.args(["__complete", "forebay", "status", "--out"]).env("PATH", folder.path());
    let said = output_of(command, b"").expect("candidates");
    assert!(said.starts_with("--output\t"), "{said}");
}

/// A value that no bundle may contain.
const SECRET: &str = "hunter2";

/// The bundle contains everything except secrets, and lists what could not be read.
fn bundle(kubectl: &Kubectl, plugin: &dyn Fn(&[&str]) -> anyhow::Result<String>) {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "stringData": {"password": SECRET},
        "metadata": {"name": "main-csi", "namespace": NAMESPACE,
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": SECRET}}});
    kubectl.apply(&secret.to_string()).expect("a Secret");
    let env = json!([{"name": "ADMIN_PASSWORD", "value": SECRET}]);
    let ours = json!({"app.kubernetes.io/name": "forebay", "app.kubernetes.io/component": "operator"});
    let spec = json!({"containers": [{"name": "operator", "image": "x", "env": env}]});
    kubectl.apply(&pod("operator-0", NAMESPACE, &ours, &spec).to_string()).expect("a pod");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("bundle.tar.gz");
    let arguments = ["bundle", "--file", file.to_str().expect("UTF-8")];
    let said = plugin(&arguments).expect("a bundle");
    assert!(said.contains("files. Secrets were not read."), "{said}");
    let refusal = plugin(&arguments).expect_err("there is one");
    assert!(format!("{refusal:#}").contains("File exists"), "{refusal:#}");
    let mode = std::fs::metadata(&file).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "for its owner alone");

    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(&file).arg("-C").arg(folder.path()).arg("--strip-components=1");
    output_of(tar, b"").expect("tar");
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap_or_default();
    let list =
        |name: &str| -> Value { serde_json::from_str(&read(&format!("objects/{name}.json"))).expect(name) };
    let names = |list: &Value| -> Vec<String> {
        let items = list["items"].as_array().expect("items").iter();
        items.filter_map(|item| Some(item["metadata"]["name"].as_str()?.to_owned())).collect()
    };
    assert_eq!(names(&list("pods")), ["main-0-0", "operator-0"]);
    assert_eq!(names(&list("persistentvolumes")), [VOLUME]);
    assert_eq!(names(&list("persistentvolumeclaims")), ["data"]);
    assert_eq!(list("secret-names")[0]["name"], "main-csi");
    let metrics =
        std::fs::read_dir(folder.path().join("metrics")).expect("metrics").next().expect("a server's");
    let metrics = std::fs::read_to_string(metrics.expect("readable").path()).expect("metrics");
    assert!(metrics.contains("forebay_volume_read_bytes_total{volume="), "{metrics}");
    assert!(read("doctor.txt").contains("not installed"), "{}", read("doctor.txt"));
    // The chart is not installed, no kubelet has logs, and the kinds of snapshots do not exist.
    let read_me = read("README.txt");
    for missing in [
        "- status: Forebay is not installed here",
        "- logs/main-0-0/main.log: ",
        "- volumesnapshotcontents: ",
    ] {
        assert!(read_me.contains(missing), "{missing}: {read_me}");
    }
    let mut grep = Command::new("grep");
    grep.args(["-rl", SECRET]).arg(folder.path());
    let found = grep.output().expect("grep");
    assert_eq!(found.status.code(), Some(1), "{}", String::from_utf8_lossy(&found.stdout));
}
