//! The alerts of the chart, and their runbook in docs/reference/alerts.md.

use std::collections::BTreeSet;
use std::fs;

use forebay_testing::generated;

use crate::helm::{objects, root, template_with};

const PAGE: &str = "docs/reference/alerts.md";

#[test]
fn every_alert_has_a_runbook_and_every_runbook_an_alert() {
    let rendered = objects(&template_with("monitored"));
    let rule = rendered.iter().find(|object| object["kind"] == "PrometheusRule").expect("a PrometheusRule");
    let alerts = rule["spec"]["groups"][0]["rules"].as_array().expect("rules");
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
