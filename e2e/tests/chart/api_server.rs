//! The chart on a real API server: every object is accepted, Pod Security holds, and rights are as limited as promised. There
//! are no nodes, and nothing is ever started.

use std::fs;
use std::time::Duration;

use forebay_e2e::kubernetes::LocalApiServer;
use forebay_e2e::kubernetes::kubectl::Kubectl;
use serde_json::{Value, json};

use crate::helm::{self, NAMESPACE, identity, objects, root, template, template_with};
use crate::rendered::VALUES;

/// The time limit for a controller of the API server to see what was applied.
const SEEN_WITHIN: Duration = Duration::from_secs(60);

/// Accepts any object of a kind that other projects would define.
const STAND_IN: &str = r"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: PLURAL.GROUP
  annotations: {api-approved.kubernetes.io: 'unapproved, a stand-in for tests'}
spec:
  group: GROUP
  scope: SCOPE
  names: {kind: KIND, plural: PLURAL}
  versions:
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}
";

#[test]
fn chart_installs_and_is_enforced_on_a_real_api_server() {
    let server = LocalApiServer::start(false).expect("an API server");
    let kubectl = server.kubectl();
    helm_installs_upgrades_and_uninstalls_all_but_the_crds(&kubectl);
    crds_are_established(&kubectl);
    manifests_are_accepted(&kubectl);
    every_set_of_values_is_accepted(&kubectl);
    examples_are_accepted(&kubectl);
    only_the_node_plugin_violates_restricted_pod_security(&kubectl);
    service_accounts_have_only_the_rights_that_they_need(&kubectl);
    node_agent_can_write_only_its_own_storage_node(&kubectl);
}

fn helm(kubectl: &Kubectl, arguments: &[&str]) -> String {
    let run = helm::run_at(Some(kubectl.kubeconfig()), arguments);
    run.unwrap_or_else(|error| panic!("{error:#}"))
}

/// Like a user does it. Without nodes, nothing is waited for.
fn helm_installs_upgrades_and_uninstalls_all_but_the_crds(kubectl: &Kubectl) {
    let ours = || {
        let everything = [
            "deployments,daemonsets,services,serviceaccounts,configmaps,roles,rolebindings,poddisruptionbudgets",
            "networkpolicies,pods,secrets,clusterroles,clusterrolebindings,csidrivers",
            "validatingadmissionpolicies,validatingadmissionpolicybindings",
        ];
        let list = kubectl
            .get(&["-A", "-l", "app.kubernetes.io/part-of=forebay", &everything.join(",")])
            .expect("a list");
        list["items"].as_array().expect("items").iter().map(identity).collect::<Vec<_>>()
    };
    let release = ["forebay", "charts/forebay", "--namespace", NAMESPACE];
    let notes = helm(kubectl, &[&["install"], &release[..], &["--create-namespace"]].concat());
    assert!(notes.contains("kind: StorageCluster"), "{notes}");
    let rendered = objects(&template(&["--set", "test.enabled=false"]).expect("the chart renders")).len();
    assert_eq!(ours().len(), rendered, "{:?}", ours());

    let fewer = helm::file("values/minimal.yaml");
    helm(kubectl, &[&["upgrade"], &release[..], &["--values", fewer.to_str().expect("UTF-8")]].concat());
    assert!(ours().iter().all(|name| !name.contains("NetworkPolicy")), "{:?}", ours());

    helm(kubectl, &["uninstall", "forebay", "--namespace", NAMESPACE]);
    assert_eq!(ours(), Vec::<String>::new());
    let definitions = kubectl.run(&["get", "crd", "-o", "name"]).expect("a list");
    assert!(definitions.contains("storageclusters.storage.forebay.io"), "{definitions}");
}

fn crds_are_established(kubectl: &Kubectl) {
    for (plural, group, scope, kind) in [
        ("servicemonitors", "monitoring.coreos.com", "Namespaced", "ServiceMonitor"),
        ("prometheusrules", "monitoring.coreos.com", "Namespaced", "PrometheusRule"),
        ("volumesnapshotclasses", "snapshot.storage.k8s.io", "Cluster", "VolumeSnapshotClass"),
    ] {
        let stand_in = STAND_IN.replace("PLURAL", plural).replace("GROUP", group);
        kubectl.apply(&stand_in.replace("SCOPE", scope).replace("KIND", kind)).expect("a stand-in");
    }
    let crds = root().join("manifests/crds.yaml");
    kubectl.apply(&fs::read_to_string(crds).expect("the definitions")).expect("the definitions are taken");
    kubectl
        .run(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"])
        .expect("established");
}

/// Strict: an unknown field is an error, not a warning.
fn take(kubectl: &Kubectl, yaml: &str, what: &str, further: &[&str]) {
    let flags = ["apply", "--server-side", "--validate=strict", "--field-manager=chart-test", "-f", "-"];
    let answer = kubectl.run_with(&[&flags, further].concat(), yaml.as_bytes());
    let answer = answer.unwrap_or_else(|error| panic!("{what}: {error:#}"));
    let (taken, wanted) = (answer.lines().count(), objects(yaml).len());
    assert_eq!(taken, wanted, "{what}: {answer}");
}

fn manifests_are_accepted(kubectl: &Kubectl) {
    take(
        kubectl,
        &fs::read_to_string(root().join("manifests/forebay.yaml")).expect("the manifests"),
        "manifests",
        &[],
    );
}

fn every_set_of_values_is_accepted(kubectl: &Kubectl) {
    // The test's pod is refused if its account, which is created along with it, does not exist yet.
    let all = objects(&template(&[]).expect("the chart renders"));
    for account in all.iter().filter(|object| object["kind"] == "ServiceAccount") {
        kubectl.apply(&account.to_string()).expect("an account");
    }
    for values in VALUES {
        take(kubectl, &template_with(values), values, &["--dry-run=server", "--force-conflicts"]);
    }
    let dashboards = template(&["--set", "monitoring.dashboards.enabled=true"]).expect("the chart renders");
    take(kubectl, &dashboards, "dashboards", &["--dry-run=server", "--force-conflicts"]);
}

fn examples_are_accepted(kubectl: &Kubectl) {
    let mut examples = 0;
    for entry in fs::read_dir(root().join("manifests/examples")).expect("examples") {
        let path = entry.expect("a file").path();
        let yaml = fs::read_to_string(&path).expect("an example");
        take(kubectl, &yaml, &path.display().to_string(), &["--dry-run=server"]);
        examples += 1;
    }
    assert!(examples >= 10, "{examples} examples");
    // The manifests that the notes after an installation ask users to apply.
    let notes = fs::read_to_string(root().join("charts/forebay/templates/NOTES.txt")).expect("the notes");
    let cluster =
        notes.split("<<EOF\n").nth(1).and_then(|text| text.split("EOF").next()).expect("a here-document");
    let cluster = cluster.replace("{{ .Release.Namespace }}", NAMESPACE);
    let cluster: Vec<_> = cluster.lines().map(|line| line.strip_prefix("     ").unwrap_or(line)).collect();
    take(kubectl, &cluster.join("\n"), "the notes' StorageCluster", &["--dry-run=server"]);
}

/// The pods that the chart's workloads would create, in another namespace.
fn pods(namespace: &str) -> Vec<(String, Value)> {
    let rendered = objects(&template(&[]).expect("the chart renders"));
    let specs = rendered.iter().filter_map(|object| {
        let spec =
            if object["kind"] == "Pod" { object.get("spec") } else { object.pointer("/spec/template/spec") };
        Some((object["metadata"]["name"].as_str()?.to_owned(), spec?.clone()))
    });
    specs
        .map(|(name, spec)| {
            let metadata = json!({"name": name, "namespace": namespace});
            let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
            (name, pod)
        })
        .collect()
}

fn only_the_node_plugin_violates_restricted_pod_security(kubectl: &Kubectl) {
    let namespace = "restricted";
    let labels = json!({"pod-security.kubernetes.io/enforce": "restricted"});
    let object =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}});
    kubectl.apply(&object.to_string()).expect("a namespace");
    let mut refused = Vec::new();
    for (name, pod) in pods(namespace) {
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": pod["spec"]["serviceAccountName"], "namespace": namespace}});
        kubectl.apply(&account.to_string()).expect("an account");
        match kubectl.run_with(&["create", "--dry-run=server", "-f", "-"], pod.to_string().as_bytes()) {
            Ok(_) => {}
            Err(error) if format!("{error:#}").contains("violates PodSecurity") => refused.push(name),
            Err(error) => panic!("{name}: {error:#}"),
        }
    }
    assert_eq!(refused, ["forebay-csi-node"], "only mounting needs more than `restricted`");
}

fn account(name: &str) -> String {
    format!("--as=system:serviceaccount:{NAMESPACE}:{name}")
}

fn may(kubectl: &Kubectl, who: &str, verb: &str, what: &str, namespace: &str) -> bool {
    // A "no" also sets the exit status, so errors must be distinguished from it.
    let mut command = kubectl.command(kubectl.program());
    command.args(["auth", "can-i", verb, what, "-n", namespace, &account(who)]);
    let output = command.output().expect("kubectl runs");
    match String::from_utf8_lossy(&output.stdout).trim() {
        "yes" => true,
        "no" => false,
        other => panic!("can-i {verb} {what}: {other} {}", String::from_utf8_lossy(&output.stderr)),
    }
}

fn service_accounts_have_only_the_rights_that_they_need(kubectl: &Kubectl) {
    let seen = || Ok(may(kubectl, "forebay-operator", "create", "statefulsets.apps", NAMESPACE));
    kubectl.wait_until("the rights are seen", SEEN_WITHIN, seen, String::new).expect("the operator's rights");
    const OURS: &str = NAMESPACE;
    const OTHERS: &str = "default";
    let operator = "forebay-operator";
    let controller = "forebay-csi-controller";
    let node = "forebay-csi-node";
    let server = "forebay-server";
    for (who, verb, what, namespace, expected) in [
        (operator, "patch", "storageclusters.storage.forebay.io/status", OURS, true),
        (operator, "patch", "storageclusters.storage.forebay.io", OTHERS, false),
        (operator, "create", "secrets", OURS, true),
        (operator, "get", "secrets", OTHERS, false),
        (operator, "create", "statefulsets.apps", OTHERS, false),
        (operator, "delete", "pods", OTHERS, false),
        (operator, "create", "pods", OURS, false),
        (operator, "patch", "nodes", OURS, false),
        (operator, "patch", "storageclasses.storage.k8s.io", OURS, true),
        (operator, "create", "clusterroles.rbac.authorization.k8s.io", OURS, false),
        (operator, "create", "roles.rbac.authorization.k8s.io", OURS, false),
        (operator, "update", "leases.coordination.k8s.io/forebay-operator", OURS, true),
        (operator, "update", "leases.coordination.k8s.io/csi-forebay-io", OURS, false),
        (operator, "get", "leases.coordination.k8s.io/worker", "kube-node-lease", true),
        (operator, "update", "leases.coordination.k8s.io/worker", "kube-node-lease", false),
        (operator, "list", "leases.coordination.k8s.io", "kube-node-lease", false),
        (controller, "create", "persistentvolumes", OURS, true),
        (controller, "create", "secrets", OURS, true),
        (controller, "get", "secrets", OTHERS, false),
        (controller, "get", "secrets", "kube-system", false),
        (controller, "update", "secrets", OURS, false),
        (controller, "patch", "storageclusters.storage.forebay.io", OURS, false),
        (controller, "update", "leases.coordination.k8s.io/csi-forebay-io", OURS, true),
        (controller, "update", "leases.coordination.k8s.io/external-resizer-csi-forebay-io", OURS, true),
        (controller, "update", "leases.coordination.k8s.io/forebay-operator", OURS, false),
        (controller, "create", "pods", OURS, false),
        (node, "get", "storageclusters.storage.forebay.io", OURS, true),
        (node, "patch", "storagenodes.storage.forebay.io/status", OURS, true),
        (node, "get", "secrets", OURS, false),
        (node, "get", "secrets", OTHERS, false),
        (node, "patch", "nodes", OURS, false),
        (node, "list", "pods", OTHERS, false),
        (server, "get", "secrets", OURS, false),
        (server, "get", "storageclusters.storage.forebay.io", OURS, false),
        (server, "get", "nodes", OURS, false),
    ] {
        assert_eq!(may(kubectl, who, verb, what, namespace), expected, "{who} {verb} {what} in {namespace}");
    }
}

fn node_agent_can_write_only_its_own_storage_node(kubectl: &Kubectl) {
    let storage_node = |name: &str| {
        let metadata = json!({"name": name});
        json!({"apiVersion": "storage.forebay.io/v1alpha1", "kind": "StorageNode", "metadata": metadata, "spec": {}})
    };
    let agent_of = |node: &str, object: &Value| {
        let extra = format!("--as-user-extra=authentication.kubernetes.io/node-name={node}");
        let mut arguments = vec![
            "apply",
            "--server-side",
            "--field-manager=forebay-node-agent",
            "--validate=ignore",
            "-f",
            "-",
        ];
        let who = account("forebay-csi-node");
        arguments.push(&who);
        if !node.is_empty() {
            arguments.push(&extra);
        }
        kubectl.run_with(&arguments, object.to_string().as_bytes())
    };
    // The policy takes effect once the API server has compiled it.
    let refused = || {
        let answer = agent_of("worker-1", &storage_node("worker-2"));
        Ok(answer.is_err_and(|error| format!("{error:#}").contains("may not write StorageNode 'worker-2'")))
    };
    let explain = || kubectl.run(&["get", "validatingadmissionpolicies", "-o", "yaml"]).unwrap_or_default();
    kubectl.wait_until("the policy is in force", SEEN_WITHIN, refused, explain).expect("the policy");

    agent_of("worker-1", &storage_node("worker-1")).expect("its own");
    let anonymous = agent_of("", &storage_node("worker-1")).expect_err("a token that names no node");
    assert!(format!("{anonymous:#}").contains("may not write StorageNode"), "{anonymous:#}");

    // The policy does not apply to an administrator.
    let own = identity(&storage_node("worker-1"));
    let spec = r#"{"spec":{"unschedulable":true}}"#;
    kubectl.run(&["patch", "storagenode", "worker-1", "--type=merge", "-p", spec]).expect(&own);
    kubectl.apply(&storage_node("worker-3").to_string()).expect("an administrator's");
}
