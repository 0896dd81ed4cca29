//! The alerts of the chart, and their runbook in docs/reference/alerts.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use forebay_e2e::cache::Cache;
use forebay_e2e::images::prometheus;
use forebay_e2e::kubernetes::kubectl::output_of;
use forebay_testing::generated;
use serde_json::{Value, json};

use crate::helm::{file, objects, root, template_with};

const PAGE: &str = "docs/reference/alerts.md";

fn groups() -> Value {
    let rendered = objects(&template_with("monitored"));
    let rule = rendered.iter().find(|object| object["kind"] == "PrometheusRule").expect("a PrometheusRule");
    rule["spec"]["groups"].clone()
}

#[test]
fn every_alert_has_a_runbook_and_every_runbook_an_alert() {
    let groups = groups();
    let alerts = groups[0]["rules"].as_array().expect("rules");
    let mut names = BTreeSet::new();
    for alert in alerts {
        let text = |pointer: &str| alert.pointer(pointer).and_then(|value| value.as_str()).expect(pointer);
        let name = text("/alert");
        let block = format!(
            "{}. Severity {}, after {}.\n\n```promql\n{}\n```",
            text("/annotations/summary"),
            text("/labels/severity"),
            text("/for"),
            text("/expr")
        );
        assert_eq!(text("/annotations/runbook"), format!("{PAGE}#{}", name.to_lowercase()));
        generated::part(PAGE, name, &block, "forebay-e2e --test chart alert");
        names.insert(name.to_owned());
    }
    assert!(names.len() > 10, "{names:?}");
    let page = fs::read_to_string(root().join(PAGE)).expect("the page");
    let runbooks: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("## Forebay"))
        .map(|rest| format!("Forebay{rest}"))
        .collect();
    assert_eq!(runbooks, names);
}

/// promtool accepts the rules, and each alert fires exactly when alerts.yaml says, with these labels.
#[test]
fn every_alert_fires_at_its_threshold_and_not_before() {
    let promtool = prometheus::program(
        &prometheus::get(&Cache::open().expect("the cache")).expect("Prometheus"),
        "promtool",
    );
    let folder = tempfile::tempdir().expect("a folder");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&promtool);
        command.current_dir(folder.path()).args(arguments);
        output_of(command, b"").unwrap_or_else(|error| panic!("promtool {arguments:?}: {error:#}"))
    };
    let mut groups = groups();
    fs::write(folder.path().join("rules.json"), json!({ "groups": groups }).to_string()).expect("written");
    run(&["check", "rules", "--lint-fatal", "rules.json"]);

    // The timing test does not need the texts.
    let mut severities = BTreeMap::new();
    for rule in groups[0]["rules"].as_array_mut().expect("rules") {
        rule.as_object_mut().expect("a rule").remove("annotations");
        let text = |pointer: &str| rule.pointer(pointer).and_then(Value::as_str).expect("text").to_owned();
        severities.insert(text("/alert"), text("/labels/severity"));
    }
    fs::write(folder.path().join("timing.json"), json!({ "groups": groups }).to_string()).expect("written");
    let cases: Value =
        serde_saphyr::from_str(&fs::read_to_string(file("alerts.yaml")).expect("the cases")).expect("YAML");
    let mut tested = BTreeSet::new();
    let tests: Vec<Value> = cases
        .as_array()
        .expect("cases")
        .iter()
        .map(|case| {
            let alert = case["alert"].as_str().expect("an alert");
            tested.insert(alert.to_owned());
            let mut labels = case["labels"].clone();
            labels["severity"] = json!(severities[alert]);
            let at = |time: &Value, fires: Value| {
                json!({ "eval_time": time, "alertname": alert, "exp_alerts": fires })
            };
            json!({
                "interval": "1m",
                "input_series": case["series"],
                "alert_rule_test": [
                    at(&case["quiet"], json!([])),
                    at(&case["fires"], json!([{ "exp_labels": labels }])),
                ],
            })
        })
        .collect();
    let test = json!({ "rule_files": ["timing.json"], "evaluation_interval": "1m", "tests": tests });
    fs::write(folder.path().join("test.json"), test.to_string()).expect("written");
    run(&["test", "rules", "test.json"]);
    assert_eq!(tested, severities.into_keys().collect());
}
