//! Reads the servers' volume metrics through the API server's proxy to their pods.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::{Client, ResourceExt};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::limits::SCRAPE_DEADLINE;
use crate::snapshot::{Read, words};

/// Kinds of operations, as the metrics name them.
pub(crate) const KINDS: [&str; 4] = ["read", "write", "flush", "metadata"];

/// The counters of one volume.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Counts {
    pub(crate) claim_namespace: String,
    pub(crate) claim: String,
    pub(crate) sessions: f64,
    pub(crate) open_files: f64,
    pub(crate) read_bytes: f64,
    pub(crate) written_bytes: f64,
    /// Operations that waited for the volume's limits.
    pub(crate) waited: f64,
    /// Number by kind, as in [`KINDS`].
    pub(crate) operations: [f64; KINDS.len()],
    /// Duration by kind, in seconds.
    pub(crate) seconds: [f64; KINDS.len()],
}

/// A server's metrics at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Scrape {
    pub(crate) instance: String,
    pub(crate) node: String,
    /// Volumes by id.
    pub(crate) volumes: BTreeMap<String, Counts>,
}

/// Queries all servers among these pods. Returns their metrics, and the errors of those that cannot be queried.
pub(crate) async fn servers(client: &Client, pods: &[Pod]) -> (Vec<Scrape>, Vec<String>) {
    let mut asked = JoinSet::new();
    for pod in pods.iter().filter(|pod| is_running_server(pod)) {
        let (client, pod) = (client.clone(), pod.clone());
        asked.spawn(async move {
            let found = timeout(SCRAPE_DEADLINE, ask(&client, &pod)).await;
            let found = found.unwrap_or_else(|_| Err("it does not answer".to_owned()));
            (pod.name_any(), found)
        });
    }
    let (mut scrapes, mut unread) = (Vec::new(), Vec::new());
    while let Some(asked) = asked.join_next().await {
        match asked {
            Ok((_, Ok(scrape))) => scrapes.push(scrape),
            Ok((pod, Err(why))) => unread.push(format!("metrics of pod {pod}: {why}")),
            Err(error) => unread.push(format!("metrics of a pod: {error}")),
        }
    }
    scrapes.sort_by(|a, b| a.instance.cmp(&b.instance));
    unread.sort();
    (scrapes, unread)
}

fn is_running_server(pod: &Pod) -> bool {
    let is_server = pod.labels().get("app.kubernetes.io/component").is_some_and(|c| c == "server");
    is_server && pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}

/// Returns the ports of a pod that have one of these names.
pub(crate) fn ports(pod: &Pod, names: &[&str]) -> Vec<i32> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let ports = containers.flat_map(|container| container.ports.iter().flatten());
    let named = ports.filter(|port| port.name.as_deref().is_some_and(|name| names.contains(&name)));
    named.map(|port| port.container_port).collect()
}

/// Returns the response of a pod's port to `/metrics`.
pub(crate) async fn metrics(client: &Client, pod: &Pod, port: i32) -> Read<String> {
    let namespace = pod.namespace().unwrap_or_default();
    let request = kube::core::Request::new(format!("/api/v1/namespaces/{namespace}/pods"))
        .get_subresource("proxy/metrics", &format!("{}:{port}", pod.name_any()))
        .map_err(|error| error.to_string())?;
    client.request_text(request).await.map_err(|error| words(&error))
}

async fn ask(client: &Client, pod: &Pod) -> Read<Scrape> {
    let port = ports(pod, &["metrics"]).first().copied().ok_or("it has no port called metrics")?;
    let text = metrics(client, pod, port).await?;
    let (volumes, served) = volumes(&text);
    if volumes.is_empty() && served > 0.0 {
        return Err("its version has no metrics of volumes; upgrade it".to_owned());
    }
    let instance = pod.labels().get(forebay_api::names::LABEL_INSTANCE).cloned();
    Ok(Scrape {
        instance: instance.unwrap_or_else(|| pod.name_any()),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        volumes,
    })
}

/// Returns the volumes by id, and the number of volumes that the server reports as served.
fn volumes(text: &str) -> (BTreeMap<String, Counts>, f64) {
    let mut volumes: BTreeMap<String, Counts> = BTreeMap::new();
    let mut served = 0.0;
    for Sample { name, labels, value } in text.lines().filter_map(Sample::parse) {
        if name == "forebay_pool_volumes" {
            served += value;
        }
        let label = |key: &str| labels.iter().find(|(k, _)| *k == key).map(|(_, v)| v.clone());
        let Some(counts) = label("volume").map(|id| volumes.entry(id).or_default()) else { continue };
        let kind = label("kind").and_then(|kind| KINDS.iter().position(|k| *k == kind));
        match (name, kind) {
            ("forebay_volume_info", _) => {
                counts.claim = label("claim").unwrap_or_default();
                counts.claim_namespace = label("claim_namespace").unwrap_or_default();
            }
            ("forebay_volume_sessions", _) => counts.sessions = value,
            ("forebay_volume_open_files", _) => counts.open_files = value,
            ("forebay_volume_read_bytes_total", _) => counts.read_bytes = value,
            ("forebay_volume_written_bytes_total", _) => counts.written_bytes = value,
            ("forebay_volume_throttled_operations_total", _) => counts.waited = value,
            ("forebay_volume_operations_total", Some(kind)) => counts.operations[kind] = value,
            ("forebay_volume_operation_seconds_total", Some(kind)) => counts.seconds[kind] = value,
            _ => {}
        }
    }
    (volumes, served)
}

/// One line of the OpenMetrics text format.
struct Sample<'a> {
    name: &'a str,
    labels: Vec<(&'a str, String)>,
    value: f64,
}

impl<'a> Sample<'a> {
    /// Parses a line; returns `None` for comments and lines that are not samples.
    fn parse(line: &'a str) -> Option<Self> {
        if line.starts_with('#') {
            return None;
        }
        let end = line.find(['{', ' '])?;
        let (name, mut rest) = line.split_at(end);
        let mut labels = Vec::new();
        if let Some(inside) = rest.strip_prefix('{') {
            rest = inside;
            loop {
                rest = rest.trim_start_matches(',');
                if let Some(after) = rest.strip_prefix('}') {
                    rest = after;
                    break;
                }
                let (key, after) = rest.split_once("=\"")?;
                let (value, after) = quoted(after)?;
                labels.push((key, value));
                rest = after;
            }
        }
        let value = rest.split_whitespace().next()?.parse().ok()?;
        Some(Self { name, labels, value })
    }
}

/// Returns a label's value up to its closing quote, and the rest of the text.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_parsed_from_a_servers_metrics() {
        let text = r#"# HELP forebay_volume_info 1 for each volume.
# TYPE forebay_volume_info gauge
forebay_volume_info{volume="v",pool="p",claim_namespace="team",claim="da\"ta\\",persistentvolume="pvc-1"} 1
forebay_pool_volumes{pool="p"} 2
forebay_volume_sessions{volume="v"} 2
forebay_volume_open_files{volume="v"} 7
forebay_volume_read_bytes_total{volume="v"} 4096
forebay_volume_written_bytes_total{volume="v"} 1.5e3
forebay_volume_throttled_operations_total{volume="v"} 3
forebay_volume_operations_total{volume="v",kind="read"} 10
forebay_volume_operations_total{volume="v",kind="other"} 99
forebay_volume_operation_seconds_total{volume="v",kind="metadata"} 0.25
forebay_volume_sessions{volume="w"} 0
forebay_volume_open_files{volume="broken
# EOF
"#;
        let (volumes, served) = volumes(text);
        assert_eq!(served, 2.0);
        assert_eq!(volumes.keys().collect::<Vec<_>>(), ["v", "w"]);
        let expected = Counts {
            claim_namespace: "team".to_owned(),
            claim: "da\"ta\\".to_owned(),
            sessions: 2.0,
            open_files: 7.0,
            read_bytes: 4096.0,
            written_bytes: 1500.0,
            waited: 3.0,
            operations: [10.0, 0.0, 0.0, 0.0],
            seconds: [0.0, 0.0, 0.0, 0.25],
        };
        assert_eq!(volumes["v"], expected);
        assert_eq!(volumes["w"], Counts::default());
    }
}
