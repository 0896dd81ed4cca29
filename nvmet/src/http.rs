//! HTTP for monitoring: /metrics, /healthz, /readyz.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::State as Shared;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::daemon::{State, Watched};

/// The endpoints. /healthz returns 200, or 503 if a round hangs. /readyz returns 200 with "ready", or with "degraded" and a
/// list of problems; it returns 503 until the first round has ended.
pub(crate) fn router(watched: Arc<Watched>) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthy))
        .route("/readyz", get(ready))
        .with_state(watched)
}

async fn metrics(Shared(watched): Shared<Arc<Watched>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text(watched.state()))
}

async fn healthy(Shared(watched): Shared<Arc<Watched>>) -> impl IntoResponse {
    match watched.state().hangs(Instant::now()) {
        true => (StatusCode::SERVICE_UNAVAILABLE, "a round does not end: does a drive hang?\n"),
        false => (StatusCode::OK, "ok\n"),
    }
}

async fn ready(Shared(watched): Shared<Arc<Watched>>) -> impl IntoResponse {
    let state = watched.state();
    let problems = state.problems();
    let lines: String = problems.iter().map(|problem| format!("- {problem}\n")).collect();
    match (&state.report, problems.is_empty()) {
        (None, _) => (StatusCode::SERVICE_UNAVAILABLE, format!("starting\n{lines}")),
        (Some(_), true) => (StatusCode::OK, "ready\n".to_owned()),
        (Some(_), false) => (StatusCode::OK, format!("degraded\n{lines}")),
    }
}

fn text(state: State) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Metrics(state)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)
        .expect("writing to a string does not fail");
    text
}

#[derive(Debug)]
struct Metrics(State);

type Labelled<'a> = (Vec<(&'a str, &'a str)>, f64);

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let e = &mut encoder;
        let state = &self.0;
        for (name, help, value) in [
            (
                "forebay_target_rounds",
                "Times that the kernel was compared with the configuration",
                state.rounds,
            ),
            ("forebay_target_changes", "Changes made to the kernel's target", state.changes),
        ] {
            let family = e.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(value).encode(family)?;
        }
        let problems = state.problems().len() as f64;
        gauge(
            e,
            "forebay_target_problems",
            "What is not as the configuration says; the log names it",
            &[(vec![], problems)],
        )?;
        let Some(report) = &state.report else { return Ok(()) };
        let ports: Vec<_> = report
            .ports
            .iter()
            .map(|port| (vec![("port", port.shown.as_str())], f64::from(port.up)))
            .collect();
        gauge(e, "forebay_target_port_up", "Whether the port carries all subsystems", &ports)?;
        let ids: Vec<String> = report.namespaces.iter().map(|namespace| namespace.id.to_string()).collect();
        let labelled = |value: fn(&crate::round::NamespaceState) -> f64| -> Vec<Labelled<'_>> {
            let labels = report.namespaces.iter().zip(&ids);
            labels.map(|(n, id)| (vec![("nqn", n.nqn.as_str()), ("namespace", id)], value(n))).collect()
        };
        let up = labelled(|namespace| f64::from(namespace.up));
        gauge(
            e,
            "forebay_target_namespace_up",
            "Whether the namespace is offered, and its drive or file there",
            &up,
        )?;
        let bytes = labelled(|namespace| namespace.bytes as f64);
        gauge(
            e,
            "forebay_target_namespace_size_bytes",
            "Size of the namespace; 0 where it is not known",
            &bytes,
        )
    }
}

fn gauge(e: &mut DescriptorEncoder<'_>, name: &str, help: &str, values: &[Labelled<'_>]) -> fmt::Result {
    let mut family = e.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in values {
        if labels.is_empty() {
            return ConstGauge::new(*value).encode(family);
        }
        ConstGauge::new(*value).encode(family.encode_family(labels)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Problem, Subject};
    use crate::round::{NamespaceState, PortState, Report};

    fn example() -> State {
        let report = Report {
            problems: vec![Problem {
                subject: Subject::Port("tcp://10.0.0.1:4420".into()),
                why: "is away".into(),
            }],
            ports: vec![PortState { shown: "tcp://10.0.0.1:4420".into(), up: false }],
            namespaces: vec![NamespaceState {
                nqn: "nqn.a".into(),
                id: 1,
                device: "/dev/a".into(),
                up: true,
                bytes: 4096,
            }],
            done: 3,
        };
        State { report: Some(report), rounds: 2, troubles: vec!["no file".into()], ..State::default() }
    }

    #[test]
    fn every_metric_is_in_the_reference() {
        let table = forebay_testing::generated::metrics(&text(example()));
        let page = "docs/reference/metrics.md";
        forebay_testing::generated::part(page, "forebay-target", &table, "forebay-target metric");
    }

    #[test]
    fn metrics_report_problems_and_the_state_of_ports_and_namespaces() {
        let state = example();
        assert_eq!(state.problems(), ["no file", "port tcp://10.0.0.1:4420: is away"]);
        let text = text(state);
        for line in [
            "forebay_target_rounds_total 2",
            "forebay_target_problems 2.0",
            "forebay_target_port_up{port=\"tcp://10.0.0.1:4420\"} 0.0",
            "forebay_target_namespace_up{nqn=\"nqn.a\",namespace=\"1\"} 1.0",
            "forebay_target_namespace_size_bytes{nqn=\"nqn.a\",namespace=\"1\"} 4096.0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
}
