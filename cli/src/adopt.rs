//! `kubectl forebay adopt`: continues instances with pools that have recorded a later epoch than Kubernetes has, or another
//! owner.
//!
//! A pool and the target's reservation keep the epoch in which they were used last. If Kubernetes' record of it was lost
//! (the cluster was rebuilt, the record was deleted), a new server has the older epoch, steps back, and reports what it
//! found. The next epoch is recorded from that. An epoch only ever goes up.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use forebay_api::{StorageCluster, names};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde::Deserialize;
use serde_json::json;
use tokio::time::timeout;

use crate::confirm;
use crate::limits::{ADOPT_DEADLINE, EPOCH_MAX};
use crate::options::Adopt;
use crate::snapshot;

/// The field manager of the recorded adoption: no other write touches its fields.
const FIELD_MANAGER: &str = "kubectl-forebay-adopt";

/// Why a server stepped back.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Refusal {
    /// The pool or the reservation was used in this later epoch.
    Superseded { epoch: u64 },
    /// The pool belongs to the instance of that name in another Kubernetes cluster.
    OtherOwner { pool: String, key: String },
}

/// The report that servers write to their termination log.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct Reported {
    reason: String,
    pool: String,
    recorded_epoch: u64,
    recorded_key: String,
}

/// Parses a server's termination message.
fn refusal(message: &str) -> Option<Refusal> {
    let reported = message.lines().rev().find_map(|line| serde_json::from_str::<Reported>(line.trim()).ok());
    match reported {
        Some(reported) if reported.reason == "Superseded" && reported.recorded_epoch > 0 => {
            return Some(Refusal::Superseded { epoch: reported.recorded_epoch });
        }
        Some(reported) if reported.reason == "OtherOwner" && is_key(&reported.recorded_key) => {
            return Some(Refusal::OtherOwner { pool: reported.pool, key: reported.recorded_key });
        }
        _ => {}
    }
    // Servers of earlier versions write a sentence instead.
    let number = |before: &str, after: &str| -> Option<u64> {
        let rest = &message[message.find(before)? + before.len()..];
        let digits = &rest[..rest.find(|c: char| !c.is_ascii_digit())?];
        rest[digits.len()..].starts_with(after).then(|| digits.parse().ok())?
    };
    number("was used in epoch ", " of this instance")
        .or_else(|| number("epoch ", " of this instance has the namespace"))
        .or_else(|| number("epoch ", " of this instance runs on another host"))
        .map(|epoch| Refusal::Superseded { epoch })
}

fn is_key(text: &str) -> bool {
    text.strip_prefix("0x")
        .is_some_and(|digits| digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Returns the termination messages of a pod's containers.
fn last_words(pod: &Pod) -> Vec<String> {
    let statuses = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten());
    let states = statuses.flat_map(|status| [status.state.as_ref(), status.last_state.as_ref()]);
    let ends = states.flatten().filter_map(|state| state.terminated.as_ref());
    ends.filter_map(|end| end.message.clone()).collect()
}

/// The change to record for one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    instance: String,
    /// The epoch that Kubernetes has; 0 if it has none.
    known: u64,
    /// What the server found.
    found: Refusal,
    /// The keys and values to write.
    data: BTreeMap<String, String>,
}

impl Step {
    fn tell(&self) -> String {
        match &self.found {
            Refusal::Superseded { epoch } => format!(
                "{}: its pool was used in epoch {epoch}, Kubernetes has {}; it continues in epoch {}",
                self.instance,
                self.known,
                epoch + 1
            ),
            Refusal::OtherOwner { pool, key } => format!(
                "{}: its pool {pool} belongs to the instance of that name of another Kubernetes cluster (key {key}); this cluster takes it over",
                self.instance
            ),
        }
    }
}

/// Derives the steps from the current state. Pure.
fn plan(
    cluster: &StorageCluster,
    record: &BTreeMap<String, String>,
    pods: &[Pod],
    only: Option<&str>,
    epoch: Option<u64>,
) -> anyhow::Result<Vec<Step>> {
    let name = cluster.name_any();
    ensure!(
        cluster.spec.uses_fabric(),
        "StorageCluster {name} has no pools on fabrics: only those have an epoch"
    );
    let instances: Vec<String> = (0..cluster.spec.instances).map(|n| names::instance(&name, n)).collect();
    if let Some(only) = only {
        ensure!(instances.iter().any(|i| i == only), "{only} is not one of {}", instances.join(", "));
    }
    let mut steps = Vec::new();
    for instance in instances.iter().filter(|i| only.is_none_or(|only| only == *i)) {
        let reported = cluster.status.iter().flat_map(|s| &s.instances).find(|i| i.name == *instance);
        let recorded =
            record.get(&names::epoch_key(instance)).and_then(|text| text.parse().ok()).unwrap_or(0);
        let known = reported.map_or(0, |t| t.epoch).max(recorded);
        let mine = |pod: &&Pod| pod.labels().get(names::LABEL_INSTANCE) == Some(instance);
        let words = pods.iter().filter(mine).flat_map(last_words);
        let mut found: Vec<Refusal> = words.filter_map(|text| refusal(&text)).collect();
        if let Some(epoch) = epoch {
            // An epoch that a person has found elsewhere, such as in a log.
            found = vec![Refusal::Superseded { epoch: epoch - 1 }];
        }
        // The highest epoch found. Another owner's key is adopted only if no epoch has to be recorded first.
        let highest = found.iter().filter_map(|f| match f {
            Refusal::Superseded { epoch } => Some(*epoch),
            Refusal::OtherOwner { .. } => None,
        });
        if let Some(highest) = highest.max() {
            // A lower one is recorded already and in progress.
            if highest >= known {
                ensure!(highest < EPOCH_MAX, "{instance}: epoch {highest} is the highest possible");
                steps.push(Step {
                    instance: instance.clone(),
                    known,
                    found: Refusal::Superseded { epoch: highest },
                    data: [(names::epoch_key(instance), (highest + 1).to_string())].into(),
                });
                continue;
            }
        }
        for other in found {
            let Refusal::OtherOwner { pool, key } = &other else { continue };
            let at = names::adopted_key(instance, pool);
            if record.get(&at) != Some(key) {
                let data = [(at, key.clone())].into();
                steps.push(Step { instance: instance.clone(), known, found: other, data });
                break;
            }
        }
    }
    Ok(steps)
}

/// Reads, asks for confirmation, writes. Returns the text for the terminal, and whether nothing was left to do or everything
/// was done.
pub(crate) fn run(options: &Adopt) -> anyhow::Result<(String, bool)> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    let (client, namespace) = runtime.block_on(connect(options))?;
    let (steps, record) = runtime.block_on(async {
        timeout(ADOPT_DEADLINE, look(&client, &namespace, options))
            .await
            .context("the API server does not answer")?
    })?;
    if steps.is_empty() {
        let text = "No server of this cluster reports a pool with a later epoch or another owner: there is nothing to adopt.\n";
        return Ok((text.to_owned(), true));
    }
    let mut text: String = steps.iter().map(|step| step.tell() + "\n").collect();
    if options.dry_run {
        text.push_str("Nothing was changed (--dry-run).\n");
        return Ok((text, true));
    }
    if !options.yes {
        print!("{text}");
        confirm()?;
        text.clear();
    }
    let data: BTreeMap<String, String> = steps.into_iter().flat_map(|step| step.data).collect();
    runtime.block_on(async {
        timeout(ADOPT_DEADLINE, write(&client, &namespace, &options.cluster, record, data))
            .await
            .context("the API server does not answer")?
    })?;
    text.push_str("Recorded. The operator restarts these servers now.\n");
    Ok((text, true))
}

async fn connect(options: &Adopt) -> anyhow::Result<(Client, String)> {
    let (client, namespace) = snapshot::connect(&options.connection).await?;
    let namespace = namespace.context("-A: a StorageCluster is adopted in one namespace")?;
    Ok((client, namespace))
}

/// Asks for confirmation on the terminal.
fn confirm() -> anyhow::Result<()> {
    ensure!(confirm::is_possible(), "there is no terminal to ask for confirmation: use --yes or --dry-run");
    let question = "Make sure that no other Kubernetes cluster runs servers on these namespaces: they lose access to them now.\nType yes to record this: ";
    ensure!(confirm::confirmed(question)?, "nothing was changed");
    Ok(())
}

async fn look(
    client: &Client,
    namespace: &str,
    options: &Adopt,
) -> anyhow::Result<(Vec<Step>, Option<ConfigMap>)> {
    let name = &options.cluster;
    let clusters: Api<StorageCluster> = Api::namespaced(client.clone(), namespace);
    let cluster = clusters.get(name).await.with_context(|| format!("StorageCluster {namespace}/{name}"))?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let record =
        maps.get_opt(&names::placement_record(name)).await.context("the record of nodes and epochs")?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let selector = format!("{}={name}", names::LABEL_CLUSTER);
    let pods = pods.list(&ListParams::default().labels(&selector)).await.context("the servers' pods")?.items;
    let data = record.as_ref().and_then(|r| r.data.clone()).unwrap_or_default();
    let steps = plan(&cluster, &data, &pods, options.instance.as_deref(), options.epoch)?;
    Ok((steps, record))
}

async fn write(
    client: &Client,
    namespace: &str,
    cluster: &str,
    record: Option<ConfigMap>,
    data: BTreeMap<String, String>,
) -> anyhow::Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let name = names::placement_record(cluster);
    let manager = Some(FIELD_MANAGER.to_owned());
    match record {
        Some(record) => {
            // Includes the resource version: if the operator has written since, the data read may be outdated.
            let patch = json!({ "metadata": { "resourceVersion": record.resource_version() }, "data": data });
            let parameters = PatchParams { field_manager: manager, ..PatchParams::default() };
            maps.patch(&name, &parameters, &Patch::Merge(&patch)).await.map(drop)
        }
        None => {
            let map: ConfigMap = serde_json::from_value(json!({
                "metadata": { "name": name, "labels": {
                    "app.kubernetes.io/name": "forebay",
                    "app.kubernetes.io/component": "server",
                    (names::LABEL_MANAGED_BY): names::MANAGED_BY_OPERATOR,
                    (names::LABEL_CLUSTER): cluster,
                } },
                "data": data,
            }))?;
            maps.create(&PostParams { field_manager: manager, ..PostParams::default() }, &map).await.map(drop)
        }
    }
    .with_context(|| format!("ConfigMap {namespace}/{name}: nothing was changed; try again"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn cluster(epoch: u64) -> StorageCluster {
        let mut value = fixture::cluster();
        value["spec"]["backends"] =
            json!([{ "name": "fast", "kind": "NVMeoF", "nvmeof": { "paths": [], "namespaces": [] } }]);
        for instance in value["status"]["instances"].as_array_mut().expect("instances") {
            instance["epoch"] = epoch.into();
        }
        fixture::object(value)
    }

    fn pod(instance: &str, message: &str) -> Pod {
        fixture::object(json!({
            "metadata": { "name": format!("{instance}-0"), "labels": { (names::LABEL_INSTANCE): instance } },
            "status": { "containerStatuses": [{ "name": "server", "image": "", "imageID": "", "ready": false, "restartCount": 3,
                "state": { "waiting": { "reason": "CrashLoopBackOff" } },
                "lastState": { "terminated": { "exitCode": 4, "message": message } } }] },
        }))
    }

    const JSON: &str = r#"{"reason":"Superseded","pool":"fast","epoch":1,"recordedEpoch":7,"recordedKey":"0x035e884900000007","message":"..."}"#;
    const SENTENCE: &str = "ERROR pool fast: the pool was used in epoch 7 of this instance; this is epoch 1, which is the older one and steps back";
    const RESERVED: &str =
        "pool fast: epoch 9 of this instance has the namespace (host x); this is epoch 1 and steps back";

    fn epochs(steps: &[Step]) -> Vec<(&str, &str)> {
        let data = steps.iter().flat_map(|s| &s.data);
        data.map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }

    #[test]
    fn plan_records_the_epoch_after_the_one_recorded_in_the_pool() {
        for (message, wanted) in [(JSON, "8"), (SENTENCE, "8"), (RESERVED, "10")] {
            let pods = [pod("main-0", &format!("starting\n{message}")), pod("main-1", "out of memory")];
            let steps = plan(&cluster(1), &BTreeMap::new(), &pods, None, None).expect("a plan");
            assert_eq!(epochs(&steps), [("main-0.epoch", wanted)], "{message}");
            assert!(steps[0].tell().contains("Kubernetes has 1"), "{}", steps[0].tell());
        }
    }

    #[test]
    fn epoch_is_raised_once_and_never_lowered() {
        let pods = [pod("main-0", JSON)];
        let record: BTreeMap<String, String> = [("main-0.epoch".to_owned(), "8".to_owned())].into();
        assert!(plan(&cluster(1), &record, &pods, None, None).expect("a plan").is_empty(), "in progress");
        assert!(plan(&cluster(12), &BTreeMap::new(), &pods, None, None).expect("a plan").is_empty());
        let lower = plan(&cluster(12), &BTreeMap::new(), &[], Some("main-0"), Some(5)).expect("a plan");
        assert!(lower.is_empty(), "regardless of other arguments");
    }

    #[test]
    fn instance_and_epoch_can_be_specified_explicitly() {
        let pods = [pod("main-0", JSON), pod("main-1", JSON)];
        let one = plan(&cluster(1), &BTreeMap::new(), &pods, Some("main-1"), None).expect("a plan");
        assert_eq!(epochs(&one), [("main-1.epoch", "8")]);
        let said = plan(&cluster(1), &BTreeMap::new(), &[], Some("main-1"), Some(20)).expect("a plan");
        assert_eq!(epochs(&said), [("main-1.epoch", "20")]);
        assert!(plan(&cluster(1), &BTreeMap::new(), &pods, Some("main-7"), None).is_err());
        let last = r#"{"reason":"Superseded","recordedEpoch":4294967295}"#;
        assert!(plan(&cluster(1), &BTreeMap::new(), &[pod("main-0", last)], None, None).is_err());
    }

    #[test]
    fn pool_of_another_cluster_is_adopted_by_its_key() {
        let reported =
            |key: &str| format!(r#"{{"reason":"OtherOwner","pool":"fast","recordedKey":"{key}"}}"#);
        let pods = [pod("main-0", &reported("0x035e884900000007"))];
        let steps = plan(&cluster(1), &BTreeMap::new(), &pods, None, None).expect("a plan");
        assert_eq!(epochs(&steps), [("main-0.adopt.fast", "0x035e884900000007")]);
        let record = steps[0].data.clone();
        assert!(plan(&cluster(1), &record, &pods, None, None).expect("a plan").is_empty());
        // Only a valid key is accepted from a server, because it is written to a configuration.
        let pods = [pod("main-0", &reported("0x\\\" rm"))];
        assert!(plan(&cluster(1), &BTreeMap::new(), &pods, None, None).expect("a plan").is_empty());
    }

    #[test]
    fn directory_backends_have_no_epoch_to_adopt() {
        let cluster: StorageCluster = fixture::object(fixture::cluster());
        assert!(plan(&cluster, &BTreeMap::new(), &[pod("main-0", JSON)], None, None).is_err());
    }
}
