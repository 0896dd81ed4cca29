//! Dashboards: they have what Grafana needs, and every query returns data in a real Prometheus that scrapes a real server.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_e2e::cache::{Artefact, Cache};
use forebay_e2e::images::prometheus;
use forebay_e2e::kubernetes::kubectl::output_of;
use forebay_e2e::kubernetes::service::Service;
use serde_json::Value;

use crate::helm::{NAMESPACE, objects, root, template};
use crate::server::{Server, free_port, until};

/// The dashboards by their uid.
fn dashboards() -> BTreeMap<String, Value> {
    let rendered =
        objects(&template(&["--set", "monitoring.dashboards.enabled=true"]).expect("the chart renders"));
    let maps = rendered.iter().filter(|object| {
        object["kind"] == "ConfigMap" && object["metadata"]["labels"]["grafana_dashboard"] == "1"
    });
    maps.map(|map| {
        let data = map["data"].as_object().expect("data");
        assert_eq!(data.len(), 1, "{data:?}");
        let (file, text) = data.iter().next().expect("a file");
        let dashboard: Value = serde_json::from_str(text.as_str().expect("text")).expect("JSON");
        let uid = dashboard["uid"].as_str().expect("a uid").to_owned();
        assert_eq!(*file, format!("{uid}.json"));
        (uid, dashboard)
    })
    .collect()
}

fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    dashboard["panels"].as_array().expect("panels").iter().filter(|panel| panel["type"] != "row")
}

#[test]
fn dashboards_have_the_fields_that_grafana_needs() {
    let all = dashboards();
    assert_eq!(all.keys().collect::<Vec<_>>(), ["forebay-cluster", "forebay-fleet", "forebay-volume"]);
    for (uid, dashboard) in &all {
        assert!(dashboard["title"].as_str().is_some_and(|title| title.starts_with("Forebay / ")), "{uid}");
        let variables: BTreeSet<&str> = dashboard["templating"]["list"]
            .as_array()
            .expect("variables")
            .iter()
            .map(|variable| variable["name"].as_str().expect("a name"))
            .collect();
        let mut ids = BTreeSet::new();
        let mut cells = BTreeSet::new();
        for panel in dashboard["panels"].as_array().expect("panels") {
            let title = panel["title"].as_str().expect("a title");
            assert!(ids.insert(panel["id"].as_u64().expect("an id")), "{uid}, {title}: its id is another's");
            let at = |key: &str| panel["gridPos"][key].as_u64().expect("a place");
            assert!(at("x") + at("w") <= 24, "{uid}, {title} is too wide");
            for x in at("x")..at("x") + at("w") {
                for y in at("y")..at("y") + at("h") {
                    assert!(cells.insert((x, y)), "{uid}, {title} lies on another panel");
                }
            }
        }
        for panel in panels(dashboard) {
            let title = &panel["title"];
            assert!(!panel["description"].as_str().unwrap_or_default().is_empty(), "{uid}, {title}");
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{uid}, {title}");
            for target in panel["targets"].as_array().expect("queries") {
                assert_eq!(target["datasource"], panel["datasource"], "{uid}, {title}");
                let text = target["expr"].as_str().expect("a query");
                for name in text.split('$').skip(1) {
                    let name: String =
                        name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                    let known = name.starts_with("__") || variables.contains(name.as_str());
                    assert!(known, "{uid}, {title}: there is no variable {name}");
                }
            }
        }
    }
}

/// A server that was used, and a Prometheus that scrapes it.
struct Site {
    promtool: PathBuf,
    prometheus: String,
    _prometheus: Service,
    _server: Server,
}

impl Site {
    fn start() -> Self {
        let cache = Cache::open().expect("the cache");
        let entry = prometheus::get(&cache).expect("Prometheus");
        let server = Server::start(Ipv4Addr::LOCALHOST.into());
        let web = free_port();
        let site = Self {
            promtool: prometheus::program(&entry, "promtool"),
            prometheus: format!("http://{web}"),
            _prometheus: scrape(&entry, server.folder(), server.http, web),
            _server: server,
        };
        until("the first scrape", || (!site.query("up == 1")?.is_empty()).then_some(()));
        site._server.be_used(6);
        site
    }

    /// The results of a query, or `None` if it fails.
    fn query(&self, query: &str) -> Option<Vec<Value>> {
        let mut promtool = Command::new(&self.promtool);
        promtool.args(["query", "instant", "--format=json", &self.prometheus, query]);
        let found = output_of(promtool, b"").ok()?;
        serde_json::from_str(&found).ok()
    }
}

/// Scrapes with the labels that Prometheus adds because of the chart's ServiceMonitor.
fn scrape(entry: &Artefact, folder: &Path, http: SocketAddr, web: SocketAddr) -> Service {
    let configuration = folder.join("prometheus.yaml");
    let text = format!(
        "global: {{scrape_interval: 1s}}\nscrape_configs:\n  - job_name: forebay-server-metrics\n    static_configs:\n      \
         - targets: [\"{http}\"]\n        labels: {{namespace: {NAMESPACE}, pod: main-0-x, \
         storage_forebay_io_cluster: main, storage_forebay_io_instance: main-0}}\n"
    );
    fs::write(&configuration, text).expect("written");
    let mut command = Command::new(prometheus::program(entry, "prometheus"));
    command.arg(format!("--config.file={}", configuration.display()));
    command.arg(format!("--storage.tsdb.path={}", folder.join("series").display()));
    command.arg(format!("--web.listen-address={web}"));
    Service::start("prometheus", &command, folder).expect("Prometheus")
}

/// A query with Grafana's variables set to match everything.
fn with_variables(query: &str) -> String {
    let query = query.replace("$__rate_interval", "1m");
    let mut parts = query.split('$');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(part.len());
        text.push_str(".*");
        text.push_str(&part[end..]);
    }
    text
}

#[test]
fn every_dashboard_query_returns_data() {
    let site = Site::start();
    let page = fs::read_to_string(root().join("docs/reference/metrics.md")).expect("the page");
    let mut asked = 0;
    for (uid, dashboard) in dashboards() {
        let variables = dashboard["templating"]["list"].as_array().expect("variables").iter();
        let of_variables = variables.filter_map(|variable| {
            // label_values(metric, label)
            let text = variable["definition"].as_str()?.strip_prefix("label_values(")?.strip_suffix(')')?;
            text.rsplit_once(", ").map(|(metric, label)| format!("count by ({label}) ({metric})"))
        });
        let of_panels = panels(&dashboard).flat_map(|panel| panel["targets"].as_array().expect("queries"));
        let queries: Vec<String> = of_variables
            .chain(of_panels.map(|target| target["expr"].as_str().expect("a query").to_owned()))
            .collect();
        for query in queries {
            let query = with_variables(&query);
            let found = site.query(&query).unwrap_or_else(|| panic!("{uid}: Prometheus refuses {query}"));
            asked += 1;
            // Operator, driver and namespaces report nothing here: at least, the reference must have their metrics.
            let mut names =
                query.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| w.starts_with("forebay_"));
            let elsewhere = ["forebay_operator_", "forebay_csi_", "forebay_namespace_"];
            if elsewhere.iter().any(|prefix| query.contains(prefix)) {
                let documented =
                    |name: &str| page.contains(&format!("`{}`", name.trim_end_matches("_bucket")));
                assert!(names.all(documented), "{uid}: {query}");
            } else {
                let number = |series: &Value| {
                    series["value"][1]
                        .as_str()
                        .is_some_and(|text| text.parse::<f64>().is_ok_and(f64::is_finite))
                };
                assert!(found.iter().any(number), "{uid}: nothing but {found:?} for {query}");
            }
        }
    }
    assert!(asked > 50, "{asked}");
    // The claim of a busy volume can be found by its name.
    let busiest = site
        .query("topk(1, sum by (claim_namespace, claim) (forebay_volume_read_bytes_total * on (volume, instance) group_left (claim_namespace, claim) forebay_volume_info))")
        .expect("an answer");
    let labels = &busiest[0]["metric"];
    assert_eq!((labels["claim_namespace"].as_str(), labels["claim"].as_str()), (Some("team"), Some("data")));
}
