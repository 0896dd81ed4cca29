//! The reference in docs/reference: custom resources, metrics and command line as in the code.

use std::fmt::Write as _;

use forebay_operator::certificates::Term;
use forebay_operator::metrics::{Instances, Metrics, Moved, OfCluster, Reconciled, Watched, Written};
use forebay_testing::generated;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

/// Fields with types of Kubernetes' own API, which are not documented again.
const KUBERNETES_TYPES: [&str; 3] = ["resources", "tolerations", "conditions"];

const PACKAGE: &str = "forebay-operator --test reference";

/// Writes one row for each field below `schema`, and the rules between fields.
fn fields(path: &str, schema: &Value, rows: &mut String, rules: &mut Vec<String>) {
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        if let Some(message) = rule["message"].as_str() {
            rules.push(format!("* `{path}`: {message}"));
        }
    }
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let mut meaning = field["description"].as_str().unwrap_or_default().trim().replace('\n', " ");
        let bound = |key| field[key].as_i64();
        match (bound("minimum"), bound("maximum")) {
            (Some(least), Some(most)) => meaning.push_str(&format!(" ({least} to {most})")),
            (Some(least), None) => meaning.push_str(&format!(" (at least {least})")),
            (None, Some(most)) => meaning.push_str(&format!(" (at most {most})")),
            (None, None) => {}
        }
        let is_foreign = KUBERNETES_TYPES.contains(&name.as_str());
        if is_foreign {
            meaning.push_str(" Fields as in the Kubernetes API.");
        }
        let required = if required.contains(&name.as_str()) { ", required" } else { "" };
        let default = field.get("default").map(|value| format!("`{value}`")).unwrap_or_default();
        let _ = writeln!(
            rows,
            "| `{path}` | {}{required} | {default} | {} |",
            kind(field),
            generated::cell(&meaning)
        );
        if is_foreign {
            continue;
        }
        fields(&path, field, rows, rules);
        for (key, mark) in [("items", "[]"), ("additionalProperties", "{}")] {
            if let Some(inner) = field.get(key) {
                fields(&format!("{path}{mark}"), inner, rows, rules);
            }
        }
    }
}

/// The values that a field accepts.
fn kind(field: &Value) -> String {
    if let Some(values) = field["enum"].as_array() {
        let words: Vec<String> =
            values.iter().filter_map(Value::as_str).map(|word| format!("`{word}`")).collect();
        return words.join(", ");
    }
    match field["type"].as_str() {
        Some("array") => format!("list of {}", kind(&field["items"])),
        Some("object") if field.get("additionalProperties").is_some() => "map".to_owned(),
        Some(kind) => kind.to_owned(),
        None => "integer or string".to_owned(),
    }
}

#[test]
fn every_field_of_the_custom_resources_is_in_the_reference() {
    for crd in forebay_api::definitions() {
        let kind = crd.spec.names.kind.clone();
        let version = crd.spec.versions.into_iter().next().expect("a version");
        let schema = version.schema.and_then(|schema| schema.open_api_v3_schema).expect("a schema");
        let schema = serde_json::to_value(schema).expect("JSON");
        let mut text = String::new();
        for part in ["spec", "status"] {
            let (mut rows, mut rules) = (String::new(), Vec::new());
            fields(part, &schema["properties"][part], &mut rows, &mut rules);
            let _ = write!(
                text,
                "### {kind}: {part}\n\n| field | type | default | meaning |\n|---|---|---|---|\n{rows}\n"
            );
            if !rules.is_empty() {
                let _ = write!(
                    text,
                    "The API server refuses what breaks these rules:\n\n{}\n\n",
                    rules.join("\n")
                );
            }
        }
        generated::part("docs/reference/custom-resources.md", &kind, &text, PACKAGE);
    }
}

#[test]
fn every_metric_is_in_the_reference() {
    let metrics = Metrics::default();
    let cluster = || "main".to_owned();
    drop(metrics.reconciles.get_or_create(&Reconciled { cluster: cluster(), result: "done" }));
    drop(metrics.instances.get_or_create(&Instances { cluster: cluster(), phase: "Ready" }));
    drop(metrics.writes.get_or_create(&Written { kind: "Pod".to_owned(), verb: "apply" }));
    drop(metrics.takeovers.get_or_create(&Moved { cluster: cluster(), reason: "NodeLost".to_owned() }));
    drop(metrics.watch_errors.get_or_create(&Watched { watch: "nodes" }));
    drop(metrics.takeover_paused.get_or_create(&OfCluster { cluster: cluster() }));
    let ready = Condition {
        type_: "Ready".to_owned(),
        status: "True".to_owned(),
        reason: "AllInstancesReady".to_owned(),
        message: String::new(),
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
        observed_generation: None,
    };
    metrics.set_conditions(&cluster(), &[ready]);
    let term = Term { secret: "main-ca".to_owned(), end: Timestamp::MAX, renewal: Timestamp::MAX };
    metrics.set_certificates(&cluster(), &[term]);
    let table = generated::metrics(&metrics.text());
    generated::part("docs/reference/metrics.md", "forebay-operator", &table, PACKAGE);
}

#[test]
fn the_command_line_is_in_the_reference() {
    let text = generated::help(env!("CARGO_BIN_EXE_forebay-operator"), "forebay-operator", None);
    generated::part("docs/reference/cli.md", "forebay-operator", &text, PACKAGE);
}
