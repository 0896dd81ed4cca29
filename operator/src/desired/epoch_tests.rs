//! Epochs outlive every object that carries them: the cluster, its status, the kind of its backends.

use super::moves_tests::{fabric_cluster, fabric_running, nvmeof, see_through, silence, write_moves};
use super::*;
use crate::desired::record;

/// Returns the state after the last step of a deletion: only the record remains.
fn left_behind(observed: &Observed, gone: &Desired) -> Observed {
    let mut left = Observed { record: observed.record.clone(), ..super::observed() };
    let kept = |key: &String| !gone.forget.contains(key);
    left.bound = observed.bound.clone().into_iter().filter(|(i, _)| kept(i)).collect();
    left.recorded = observed.recorded.iter().filter(|key| kept(key)).cloned().collect();
    left.record.moved.clear();
    left
}

/// The pool and the target's reservation keep the epoch after the StorageCluster is deleted: they would reject a first epoch
/// permanently.
#[test]
fn recreated_cluster_continues_after_the_last_epoch() {
    for policy in ["Protect", "Retain", "Destroy"] {
        let (mut cluster, mut observed) = fabric_running(json!({ "deletionPolicy": policy }));
        silence(&mut observed, "n1", 60);
        see_through(&mut cluster, &mut observed);
        observed.silences.clear();
        cluster.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
        if policy != "Retain" {
            announce(&mut cluster, &mut observed);
        }
        decide(&mut cluster, &observed);
        observed.stateful_sets.clear();
        observed.pods.clear();
        let gone = desired(&cluster, &settings(), &observed);
        assert!(gone.release, "{policy}");
        assert!(!removed(&gone).contains(&"ConfigMap a-placement".to_owned()), "{policy}: the record stays");
        // The nodes are kept only if the volumes are.
        assert_eq!(
            gone.forget.contains(&"a-0".to_owned()),
            policy != "Retain",
            "{policy}: {:?}",
            gone.forget
        );
        assert!(!gone.forget.contains(&"a-0.epoch".to_owned()), "{policy}");

        let again = fabric_cluster(json!({ "deletionPolicy": policy }));
        let mut left = left_behind(&observed, &gone);
        let found = desired(&again, &settings(), &left);
        let epochs: Vec<u64> = found.moves.iter().map(|m| m.epoch).collect();
        if policy == "Retain" {
            assert!(found.moves.is_empty(), "its nodes and epochs are recorded: {:?}", found.moves);
            assert_eq!(found.status.instances[0].epoch, 2);
        } else {
            assert_eq!(epochs, [3, 2], "{policy}");
            write_moves(&mut left, &found.moves);
            assert_eq!(left.record.epochs["a-0"], 3);
        }
    }
}

/// A cluster on directories has no epochs: its record is removed with it, unless its volumes stay.
#[test]
fn record_without_epochs_is_deleted_with_its_cluster() {
    let (mut cluster, mut observed) = running(json!({}));
    cluster.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    announce(&mut cluster, &mut observed);
    decide(&mut cluster, &observed);
    observed.stateful_sets.clear();
    observed.pods.clear();
    let gone = desired(&cluster, &settings(), &observed);
    assert!(gone.release && removed(&gone).contains(&"ConfigMap a-placement".to_owned()));
}

/// An instance that could move once and now has a directory beside its namespace keeps the epoch of the namespace, even if
/// the status was lost.
#[test]
fn adding_a_directory_backend_keeps_the_epoch() {
    let mut backends = nvmeof(2);
    backends
        .as_array_mut()
        .expect("a list")
        .push(json!({ "name": "scratch", "kind": "Directory", "directory": { "path": "/mnt/scratch" } }));
    let cluster = fabric_cluster(json!({ "backends": backends }));
    let mut observed = observed();
    let data = [("a-0", "n1"), ("a-0.epoch", "4"), ("a-1", "n2"), ("a-1.epoch", "1")];
    let data: BTreeMap<String, String> = data.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    observed.record = record::read(Some("1".to_owned()), &data);
    observed.recorded = data.keys().cloned().collect();
    observed.bound = data.into_iter().filter(|(i, _)| ordinal("a", i).is_some()).collect();
    let found = desired(&cluster, &settings(), &observed);
    let map = found.objects.iter().find(|o| o["metadata"]["name"] == "a-0-config").expect("a configuration");
    let file: toml::Table = map["data"]["server.toml"].as_str().expect("a file").parse().expect("TOML");
    assert_eq!(file["instance"]["epoch"].as_integer(), Some(4));
    assert_eq!(found.status.instances[0].epoch, 4);
    assert!(!found.forget.contains(&"a-0.epoch".to_owned()), "{:?}", found.forget);
}

fn with_machine(observed: &mut Observed, node: usize, machine: &str) {
    let mut value = serde_json::to_value(&*observed.nodes[node]).expect("JSON");
    value["status"]["nodeInfo"] = json!({ "systemUUID": machine, "machineID": "", "bootID": "", "kernelVersion": "",
        "osImage": "", "containerRuntimeVersion": "", "kubeletVersion": "", "kubeProxyVersion": "",
        "operatingSystem": "linux", "architecture": "amd64" });
    observed.nodes[node] = Arc::new(serde_json::from_value(value).expect("a Node"));
}

/// A target distinguishes instances of the same name in two Kubernetes clusters, and two machines of the same name.
#[test]
fn new_instance_identifies_itself_by_cluster_uid_and_machine_id() {
    let mut cluster = fabric_cluster(json!({}));
    let mut observed = observed();
    with_machine(&mut observed, 0, "machine-1");
    with_machine(&mut observed, 2, "machine-3");
    see_through(&mut cluster, &mut observed);
    let file = moves_tests::config(&desired(&cluster, &settings(), &observed), "a-0-config-1");
    assert_eq!(file["instance"]["cluster_uid"].as_str(), Some("a-cluster"));
    assert_eq!(file["instance"]["takeover_after_s"].as_integer(), Some(30));
    assert_eq!(file["pool"][0]["nvmeof"]["machine_id"].as_str(), Some("machine-1"));
    // The configuration changes only with the epoch, regardless of changes to the Node object.
    let node = observed.nodes.remove(0);
    let file = moves_tests::config(&desired(&cluster, &settings(), &observed), "a-0-config-1");
    assert_eq!(file["pool"][0]["nvmeof"]["machine_id"].as_str(), Some("machine-1"));
    observed.nodes.insert(0, node);
    silence(&mut observed, "n1", 60);
    let lost = desired(&cluster, &settings(), &observed);
    write_moves(&mut observed, &lost.moves);
    let file = moves_tests::config(&desired(&cluster, &settings(), &observed), "a-0-config-2");
    assert_eq!(file["pool"][0]["nvmeof"]["machine_id"].as_str(), Some("machine-3"));
}

/// An array allows only the hosts that its administrator has configured, so an instance that was identified by names alone
/// stays so. The bundled target allows both identities, and the instance uses its own from its next epoch on.
#[test]
fn older_instance_keeps_its_name_based_identity_on_external_arrays() {
    let (cluster, mut observed) = fabric_running(json!({}));
    observed.record.owners.clear();
    let file = moves_tests::config(&desired(&cluster, &settings(), &observed), "a-0-config-1");
    assert!(file["instance"].get("cluster_uid").is_none(), "{file:?}");
    silence(&mut observed, "n1", 60);
    assert_eq!(desired(&cluster, &settings(), &observed).moves[0].owner, None);

    let mut cluster = moves_tests::target_cluster();
    let mut observed = super::observed();
    see_through(&mut cluster, &mut observed);
    observed.record.owners.clear();
    let found = desired(&cluster, &settings(), &observed);
    let hosts = |found: &Desired| {
        let (_, file) = moves_tests::target_file(found, "n3");
        file["subsystem"][0]["hosts"].as_array().expect("hosts").len()
    };
    assert_eq!(hosts(&found), 6, "each of three nodes by both identities");
    let step = desired(&cluster, &settings(), &{
        silence(&mut observed, "n1", 60);
        observed.clone()
    });
    if let Some(moved) = step.moves.first() {
        assert!(moved.owner.is_some(), "{moved:?}");
    }
}

/// A key that a person has confirmed is passed to the server.
#[test]
fn adopted_reservation_key_is_passed_to_the_server_of_its_pool() {
    let (cluster, mut observed) = fabric_running(json!({}));
    let data = [("a-0.adopt.main".to_owned(), "0x035e884900000007".to_owned())].into();
    observed.record.adopted = record::read(None, &data).adopted;
    let found = desired(&cluster, &settings(), &observed);
    let file = moves_tests::config(&found, "a-0-config-1");
    assert_eq!(file["pool"][0]["nvmeof"]["adopt_key"].as_str(), Some("0x035e884900000007"));
    let other = moves_tests::config(&found, "a-1-config-1");
    assert!(other["pool"][0]["nvmeof"].get("adopt_key").is_none());
    assert!(record::is_kept("a-0.adopt.main") && record::is_kept("a-0.owner"));
}
