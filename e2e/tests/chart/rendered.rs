//! The rendered chart: lint, the committed manifests, snapshots, and invariants of all rendered objects.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::helm::{self, NAMESPACE, identity, objects, template, template_with};

/// If set, the generated files are written instead of compared.
const REGENERATE: &str = "FOREBAY_REGENERATE";

/// Sets of values, `values/<name>.yaml`; their difference from the defaults is stored in `snapshots/<name>.txt`.
pub(crate) const VALUES: &[&str] = &["minimal", "monitored", "locked-down", "storage-fabric", "snapshots"];

fn check_generated(path: &Path, text: &str) {
    if std::env::var_os(REGENERATE).is_some() {
        fs::write(path, text).expect("the file can be written");
        return;
    }
    let committed = fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == text,
        "{} is out of date; {REGENERATE}=1 cargo test -p forebay-e2e --test chart writes it again:\n{}",
        path.display(),
        difference(&committed, text)
    );
}

#[test]
fn helm_lint_passes() {
    helm::run(&["lint", "--strict", "charts/forebay"]).expect("the defaults are fine");
    for values in VALUES {
        let path = helm::file(&format!("values/{values}.yaml"));
        helm::run(&["lint", "--strict", "charts/forebay", "--values", path.to_str().expect("UTF-8")])
            .expect(values);
    }
}

#[test]
fn committed_manifests_match_the_rendered_chart() {
    let root = helm::root();
    let mut all = format!(
        "# The chart with its defaults, for clusters without Helm. Generated from charts/forebay; do not edit.\n\
         # First manifests/crds.yaml, then this: kubectl apply --server-side -f manifests/forebay.yaml\n\
         ---\n\
         apiVersion: v1\n\
         kind: Namespace\n\
         metadata:\n  \
           name: {NAMESPACE}\n  \
           labels:\n    \
             # Node plugin and servers; docs/guides/security.md says what they need and why.\n    \
             pod-security.kubernetes.io/enforce: privileged\n"
    );
    all.push_str(&template(&["--set", "test.enabled=false"]).expect("the chart renders"));
    check_generated(&root.join("manifests/forebay.yaml"), &all);

    let mut definitions = String::from("# The definitions, from charts/forebay/crds; do not edit.\n");
    let mut files: Vec<_> = fs::read_dir(root.join("charts/forebay/crds"))
        .expect("the chart has definitions")
        .map(|entry| entry.expect("a file").path())
        .collect();
    files.sort();
    for path in files {
        let text = fs::read_to_string(&path).expect("a definition can be read");
        if !text.starts_with("---") {
            definitions.push_str("---\n");
        }
        definitions.push_str(&text);
    }
    check_generated(&root.join("manifests/crds.yaml"), &definitions);
}

#[test]
fn sets_of_values_render_as_in_their_snapshots() {
    let default = by_identity(&template(&[]).expect("the chart renders"));
    for values in VALUES {
        let changed = by_identity(&template_with(values));
        let mut text = String::new();
        for name in default.keys().chain(changed.keys()).collect::<BTreeSet<_>>() {
            match (default.get(name), changed.get(name)) {
                (Some(_), None) => writeln!(text, "removed {name}\n").expect("a string"),
                (Some(old), Some(new)) if old != new => {
                    writeln!(text, "changed {name}\n{}", difference(old, new)).expect("a string");
                }
                (None, Some(new)) => writeln!(text, "added {name}\n{new}").expect("a string"),
                _ => {}
            }
        }
        check_generated(&helm::file(&format!("snapshots/{values}.txt")), &text);
    }
}

#[test]
fn objects_are_unique_labelled_and_in_the_release_namespace() {
    for yaml in renderings() {
        let mut seen = BTreeSet::new();
        for object in objects(&yaml) {
            let name = identity(&object);
            assert!(seen.insert(name.clone()), "{name} occurs twice");
            if object["kind"] == "ValidatingAdmissionPolicy" || object["kind"] == "CSIDriver" {
                assert!(object["metadata"].get("namespace").is_none(), "{name}");
            }
            // The kubelets' Leases are in their own namespace.
            let of_leases =
                ["Role", "RoleBinding"].map(|kind| format!("{kind}/kube-node-lease/forebay-operator"));
            if let Some(namespace) =
                object["metadata"].get("namespace").filter(|_| !of_leases.contains(&name))
            {
                assert_eq!(namespace, NAMESPACE, "{name}");
            }
            let labels = &object["metadata"]["labels"];
            assert_eq!(labels["app.kubernetes.io/part-of"], "forebay", "{name}");
        }
    }
}

#[test]
fn rbac_has_no_wildcards_and_no_cluster_wide_access_to_secrets() {
    for yaml in renderings() {
        let objects = objects(&yaml);
        let roles =
            objects.iter().filter(|object| object["kind"] == "Role" || object["kind"] == "ClusterRole");
        for role in roles {
            let name = identity(role);
            for rule in role["rules"].as_array().expect("rules") {
                let words = strings(&rule["apiGroups"])
                    .chain(strings(&rule["resources"]))
                    .chain(strings(&rule["verbs"]));
                for word in words {
                    assert_ne!(word, "*", "{name}: {rule}");
                    for escalation in [
                        "escalate",
                        "bind",
                        "impersonate",
                        "nodes/proxy",
                        "pods/exec",
                        "serviceaccounts/token",
                    ] {
                        assert_ne!(word, escalation, "{name}: {rule}");
                    }
                }
                if role["kind"] == "ClusterRole" {
                    assert!(
                        strings(&rule["resources"]).all(|resource| resource != "secrets"),
                        "{name}: {rule}"
                    );
                }
            }
        }
        // A ClusterRole is bound cluster-wide, a Role in the namespace, both only to accounts of this chart.
        for binding in objects
            .iter()
            .filter(|object| object["kind"].as_str().is_some_and(|kind| kind.ends_with("RoleBinding")))
        {
            for subject in binding["subjects"].as_array().expect("subjects") {
                let account =
                    format!("ServiceAccount/{NAMESPACE}/{}", subject["name"].as_str().expect("a name"));
                assert_eq!(subject["namespace"], NAMESPACE);
                assert!(
                    objects.iter().any(|object| identity(object) == account),
                    "{account} is not in the chart"
                );
            }
        }
    }
}

#[test]
fn every_container_has_probes_requests_and_a_read_only_root() {
    for yaml in renderings() {
        for object in objects(&yaml) {
            let name = identity(&object);
            let Some(pod) = object.pointer("/spec/template/spec") else { continue };
            for container in pod["containers"].as_array().expect("containers") {
                assert!(container.get("livenessProbe").is_some(), "{name}: {}", container["name"]);
            }
            let all = ["containers", "initContainers"]
                .into_iter()
                .filter_map(|kind| pod[kind].as_array())
                .flatten();
            for container in all {
                assert_eq!(
                    container["securityContext"]["readOnlyRootFilesystem"], true,
                    "{name}: {}",
                    container["name"]
                );
                assert!(
                    container.pointer("/resources/requests/cpu").is_some(),
                    "{name}: {}",
                    container["name"]
                );
                assert!(
                    container.pointer("/resources/limits/memory").is_some(),
                    "{name}: {}",
                    container["name"]
                );
            }
        }
    }
}

#[test]
fn every_schema_property_has_a_default_value() {
    let root = helm::root().join("charts/forebay");
    let values = fs::read_to_string(root.join("values.yaml")).expect("values.yaml");
    let schema: Value =
        serde_json::from_str(&fs::read_to_string(root.join("values.schema.json")).expect("the schema"))
            .expect("JSON");
    let values = objects(&values).pop().expect("values");
    let mut unknown = Vec::new();
    compare(&values, &schema, &schema, "", &mut unknown);
    assert!(unknown.is_empty(), "{unknown:?}");
}

/// Names in the schema that have no default in values.yaml: users would not find them.
fn compare(values: &Value, schema: &Value, whole: &Value, at: &str, unknown: &mut Vec<String>) {
    let schema = match schema.get("$ref").and_then(Value::as_str) {
        Some(reference) => whole.pointer(reference.trim_start_matches('#')).expect("the definition exists"),
        None => schema,
    };
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return };
    for (name, below) in properties {
        let path = format!("{at}/{name}");
        // Helm's own, and fields that a user fills in.
        if ["/global"].contains(&path.as_str()) || path.ends_with("/requests") || path.ends_with("/limits") {
            continue;
        }
        match values.get(name) {
            Some(value) => compare(value, below, whole, &path, unknown),
            None => unknown.push(path),
        }
    }
}

fn renderings() -> Vec<String> {
    let mut all = vec![template(&[]).expect("the chart renders")];
    all.extend(VALUES.iter().map(|values| template_with(values)));
    all
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// Documents by their identity, as text.
fn by_identity(yaml: &str) -> BTreeMap<String, String> {
    yaml.split("\n---\n")
        .map(|document| document.trim_start_matches("---\n"))
        .filter_map(|document| {
            let object = objects(document).pop()?;
            let lines: Vec<_> = document.lines().filter(|line| !line.starts_with("# Source:")).collect();
            Some((identity(&object), lines.join("\n").trim().to_owned() + "\n"))
        })
        .collect()
}

/// Removed (`-`) and added (`+`) lines, without unchanged ones.
fn difference(old: &str, new: &str) -> String {
    let (old, new): (Vec<_>, Vec<_>) = (old.lines().collect(), new.lines().collect());
    // Longest common subsequence, from the end.
    let mut common = vec![vec![0_u32; new.len() + 1]; old.len() + 1];
    for i in (0..old.len()).rev() {
        for j in (0..new.len()).rev() {
            common[i][j] = if old[i] == new[j] {
                common[i + 1][j + 1] + 1
            } else {
                common[i + 1][j].max(common[i][j + 1])
            };
        }
    }
    let (mut i, mut j, mut text) = (0, 0, String::new());
    while i < old.len() || j < new.len() {
        if i < old.len() && j < new.len() && old[i] == new[j] {
            (i, j) = (i + 1, j + 1);
        } else if j == new.len() || i < old.len() && common[i + 1][j] >= common[i][j + 1] {
            writeln!(text, "- {}", old[i]).expect("a string");
            i += 1;
        } else {
            writeln!(text, "+ {}", new[j]).expect("a string");
            j += 1;
        }
    }
    text
}
