//! Invalid StorageClusters: the API server refuses them with a helpful message, or the operator sets a condition that explains
//! how to fix them. Nothing panics, nothing loops.
//!
//! The second line of every file in `bad/` has the expected result: `refused: <words>`, or
//! `condition: <Type>=<Status> <Reason>: <words>`.
#![allow(clippy::unwrap_used)]

mod stage;

use forebay_api::StorageCluster;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Resource as _, ResourceExt as _};
use serde_json::json;
use stage::{Stage, shared};

/// The maximum number of reconciliations of one bad cluster: for the cluster, its status, its nodes and other clusters.
const RECONCILES_MAX: u64 = 12;
/// Fewer files than this means that some are missing.
const FILES_MIN: usize = 57;

struct Bad {
    file: String,
    object: serde_json::Value,
    expected: String,
}

fn read() -> Vec<Bad> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bad");
    let mut found: Vec<Bad> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            Bad {
                file: path.file_name().unwrap().to_string_lossy().into_owned(),
                expected: text.lines().nth(1).unwrap().strip_prefix("# ").unwrap().to_owned(),
                object: serde_saphyr::from_str(&text).unwrap(),
            }
        })
        .collect();
    found.sort_by(|a, b| a.file.cmp(&b.file));
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_clusters_are_refused_or_get_a_condition() {
    let stage = Stage::new(shared(), "bad", 1).await;
    let classes: Api<StorageClass> = Api::all(stage.client.clone());
    let taken: StorageClass = serde_json::from_value(
        json!({ "metadata": { "name": "bad-taken" }, "provisioner": "another.example" }),
    )
    .unwrap();
    classes.create(&PostParams::default(), &taken).await.unwrap();
    let operator = stage.operate().await;
    let resource = ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk(forebay_api::GROUP, forebay_api::VERSION, "StorageCluster"),
        StorageCluster::plural(&()).as_ref(),
    );
    let api: Api<DynamicObject> = Api::namespaced_with(stage.client.clone(), &stage.namespace, &resource);
    let all = read();
    assert!(all.len() >= FILES_MIN, "{} files", all.len());
    let mut mistakes = Vec::new();
    let mut answered = Vec::new();
    for bad in &all {
        let object: DynamicObject = serde_json::from_value(bad.object.clone()).unwrap();
        let result = api.create(&PostParams::default(), &object).await;
        match (bad.expected.split_once(": ").unwrap(), result) {
            (("refused", words), Err(kube::Error::Api(status))) if status.code == 422 => {
                if !status.message.contains(words) {
                    mistakes.push(format!("{}: refused, but with: {}", bad.file, status.message));
                }
            }
            (("condition", words), Ok(made)) => answered.push((bad, words, made.name_any())),
            (_, result) => mistakes.push(format!("{}: {:?}", bad.file, result.map(|o| o.name_any()))),
        }
    }
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
    assert!(answered.len() >= 10);
    for (bad, expected, name) in &answered {
        let (condition, words) = expected.split_once(": ").unwrap();
        let (state, reason) = condition.split_once(' ').unwrap();
        let (type_, status) = state.split_once('=').unwrap();
        let reported = stage.condition(name, type_, status, reason).await;
        let conditions = reported.status.unwrap().conditions;
        let message = &conditions.iter().find(|c| c.type_ == type_).unwrap().message;
        assert!(message.contains(words), "{}: {message}", bad.file);
        assert_eq!(conditions.iter().find(|c| c.type_ == "Ready").unwrap().status, "False", "{}", bad.file);
    }
    operator.assert_working();

    // A valid cluster that is created afterwards is served as usual. By then, a loop would have made many rounds.
    stage.create("good", &json!({})).await;
    stage.condition("good", "Progressing", "True", "Starting").await;
    for (bad, _, name) in &answered {
        let rounds = operator.metrics.reconciled(name);
        assert!((1..=RECONCILES_MAX).contains(&rounds), "{}: {rounds} reconciliations", bad.file);
    }
    assert_eq!(
        classes.get("bad-taken").await.unwrap().provisioner,
        "another.example",
        "the foreign StorageClass is unchanged"
    );

    // They can be fixed and deleted.
    let repaired = json!({ "spec": { "image": null } });
    stage
        .clusters()
        .patch("bad-image-with-a-shell", &PatchParams::default(), &Patch::Merge(&repaired))
        .await
        .unwrap();
    stage.condition("bad-image-with-a-shell", "Valid", "True", "").await;
    for (_, _, name) in &answered {
        stage.clusters().delete(name, &DeleteParams::default()).await.unwrap();
    }
    for (_, _, name) in &answered {
        stage.gone(name).await;
    }
    operator.stop().await;
}

/// A change that would lose track of volumes is refused; other changes are accepted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backends_cannot_be_removed_renamed_or_relocated() {
    let stage = Stage::new(shared(), "backends", 0).await;
    let backend = |name: &str, path: &str, quota: &str| json!({ "name": name, "kind": "Directory", "directory": { "path": path, "quota": quota } });
    let a = || backend("a", "/mnt/a", "None");
    stage.create("b", &json!({ "backends": [a(), backend("b", "/mnt/b", "None")] })).await;
    let patch = |backends: serde_json::Value| {
        let patch = json!({ "spec": { "backends": backends } });
        let api = stage.clusters();
        async move { api.patch("b", &PatchParams::default(), &Patch::Merge(&patch)).await }
    };
    for lost in [
        json!([a()]),
        json!([a(), backend("renamed", "/mnt/b", "None")]),
        json!([a(), backend("b", "/mnt/elsewhere", "None")]),
    ] {
        match patch(lost.clone()).await {
            Err(kube::Error::Api(status)) if status.code == 422 => {
                assert!(status.message.contains("lost from sight"), "{}", status.message);
            }
            other => panic!("{lost}: {other:?}"),
        }
    }
    let more = json!([backend("c", "/mnt/c", "None"), backend("b", "/mnt/b", "Project"), a()]);
    patch(more).await.expect("others can be added, and the rest changed");
}

/// A change of the spec cannot remove what clients have mounted or what stores volumes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mounted_addresses_ports_and_namespaces_are_immutable() {
    let stage = Stage::new(shared(), "mounted", 0).await;
    let nvmeof = |first: u32| {
        json!({ "name": "a", "kind": "NVMeoF", "nvmeof": { "paths": ["tcp://192.0.2.1:4420"], "namespaces": [
        { "instance": 0, "nqn": "nqn.2026-01.io.example:a", "nguid": format!("{first:032x}") },
        { "instance": 1, "nqn": "nqn.2026-01.io.example:a", "nguid": format!("{:032x}", 2) },
    ] } })
    };
    let target = |directory: &str| {
        json!({ "name": "t", "kind": "Target", "target": {
        "nodes": [{ "name": "n1", "directory": directory }], "sizeGib": 1,
    } })
    };
    let network = |addresses: serde_json::Value, smb: u16| json!({ "addresses": addresses, "ports": { "smb": smb, "metrics": 9500 } });
    let addresses = json!(["192.0.2.1/24", "192.0.2.2/24"]);
    let backends = json!([nvmeof(1), target("/mnt/t")]);
    stage
        .create(
            "m",
            &json!({ "instances": 2, "network": network(addresses.clone(), 445), "backends": backends }),
        )
        .await;
    let patch = |spec: serde_json::Value| {
        let api = stage.clusters();
        async move { api.patch("m", &PatchParams::default(), &Patch::Merge(&json!({ "spec": spec }))).await }
    };
    for (change, words) in [
        (json!({ "network": network(json!(["192.0.2.2/24", "192.0.2.1/24"]), 445) }), "network.addresses"),
        (json!({ "network": network(json!(["192.0.2.9/24", "192.0.2.2/24"]), 445) }), "network.addresses"),
        (json!({ "network": network(addresses.clone(), 1445) }), "network.ports.smb"),
        (json!({ "backends": [nvmeof(7), target("/mnt/t")] }), "namespace cannot be replaced"),
        (json!({ "backends": [nvmeof(1), target("/mnt/other")] }), "directory of a target's node"),
    ] {
        match patch(change.clone()).await {
            Err(kube::Error::Api(status)) if status.code == 422 => {
                assert!(status.message.contains(words), "{change}: {}", status.message);
            }
            other => panic!("{change}: {other:?}"),
        }
    }
    let more = json!({ "network": network(json!(["192.0.2.1/24", "192.0.2.2/24", "192.0.2.3/24"]), 445) });
    patch(more).await.expect("addresses can be added");
    let metrics = json!({ "network": { "ports": { "metrics": 9600 } } });
    patch(metrics).await.expect("no client has mounted the port of the metrics");
    patch(json!({ "instances": 0 })).await.expect("it can be emptied");
    patch(json!({ "network": network(json!(["192.0.2.9/24"]), 1445) }))
        .await
        .expect("then nothing is mounted");
}

/// A resource that no schema would allow, for example one from an older definition: the operator reports it and does not panic.
#[test]
fn malformed_spec_is_a_parse_error_not_a_panic() {
    for spec in [
        json!({}),
        json!({ "backends": "none" }),
        json!({ "backends": [], "instances": -1 }),
        json!({ "backends": [], "instances": 4_294_967_296_u64 }),
        json!({ "backends": [{ "name": 5 }] }),
    ] {
        let cluster = json!({
            "apiVersion": "storage.forebay.io/v1alpha1", "kind": "StorageCluster", "metadata": { "name": "x" },
            "spec": spec,
        });
        assert!(serde_json::from_value::<StorageCluster>(cluster).is_err());
    }
    assert_eq!(StorageCluster::kind(&()), "StorageCluster");
}
