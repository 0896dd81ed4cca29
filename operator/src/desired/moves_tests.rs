//! Moves of instances with pools on fabrics, with the fixtures of the other tests.

use super::*;
use crate::desired::record::{self, Record};
use crate::takeover::OUT_OF_SERVICE;

const NQN: &str = "nqn.2026-01.io.example:a";

pub(super) fn nvmeof(instances: u32) -> Value {
    let namespaces: Vec<Value> = (0..instances)
        .map(|n| json!({ "instance": n, "nqn": format!("{NQN}{n}"), "nguid": format!("{:032x}", n + 1) }))
        .collect();
    json!([{ "name": "main", "kind": "NVMeoF", "nvmeof": {
        "paths": ["tcp://192.0.2.1:4420", "rdma://192.0.2.2:4420"], "namespaces": namespaces, "format": true,
    } }])
}

fn network() -> Value {
    json!({ "addresses": ["192.0.2.200/24", "192.0.2.201/24"], "interface": "eth1" })
}

pub(super) fn fabric_cluster(more: Value) -> StorageCluster {
    let mut spec = json!({ "backends": nvmeof(2), "network": network() });
    for (key, value) in more.as_object().expect("fields") {
        spec[key.as_str()] = value.clone();
    }
    cluster(spec)
}

/// Applies moves as the API server would: in one write, after which everything is evaluated again.
pub(super) fn write_moves(observed: &mut Observed, moves: &[record::Move]) {
    let mut data: BTreeMap<String, String> = BTreeMap::new();
    for one in moves {
        data.extend(one.data());
    }
    let fresh = record::read(Some("1".to_owned()), &data);
    observed.record.version = fresh.version;
    observed.record.epochs.extend(fresh.epochs);
    observed.record.places.extend(fresh.places);
    observed.record.moved.extend(fresh.moved);
    observed.record.owners.extend(fresh.owners);
    observed.recorded.extend(data.keys().cloned());
    observed.bound.extend(data.into_iter().filter(|(i, _)| ordinal("a", i).is_some()));
}

/// As [`settle`], with moves; pods of earlier epochs are deleted when the operator requests it.
pub(super) fn see_through(cluster: &mut StorageCluster, observed: &mut Observed) {
    for _ in 0..8 {
        let found = desired(cluster, &settings(), observed);
        if !found.moves.is_empty() {
            write_moves(observed, &found.moves);
            continue;
        }
        for pod in &found.end {
            let instance = pod.name.strip_suffix("-0").expect("a pod of a StatefulSet").to_owned();
            observed.pods.remove(&instance);
            observed.reports.remove(&instance);
        }
        settle_fabric(cluster, observed);
    }
}

pub(super) fn settle_fabric(cluster: &mut StorageCluster, observed: &mut Observed) {
    let bound = observed.bound.clone();
    let recorded = observed.recorded.clone();
    settle(cluster, observed, 1000);
    // The fixtures' record holds what the operator applies. Moves have written the rest.
    observed.bound.extend(bound);
    observed.recorded.extend(recorded);
}

pub(super) fn fabric_running(more: Value) -> (StorageCluster, Observed) {
    let mut cluster = fabric_cluster(more);
    let mut observed = observed();
    see_through(&mut cluster, &mut observed);
    assert_eq!(
        phases(&cluster),
        vec![InstancePhase::Ready; cluster.spec.instances as usize],
        "{:?}",
        cluster.status
    );
    (cluster, observed)
}

pub(super) fn node_with(name: &str, ip: &str, spec: Value) -> Arc<Node> {
    let mut node = serde_json::to_value(&*node(name, ip)).expect("JSON");
    node["spec"] = spec;
    Arc::new(serde_json::from_value(node).expect("a Node"))
}

pub(super) fn config(desired: &Desired, name: &str) -> toml::Table {
    let map =
        desired.objects.iter().find(|o| o["metadata"]["name"] == name).unwrap_or_else(|| panic!("no {name}"));
    map["data"]["server.toml"].as_str().expect("a file").parse().expect("TOML")
}

pub(super) fn silence(observed: &mut Observed, node: &str, seconds: u64) {
    observed.silences.insert(node.to_owned(), Duration::from_secs(seconds));
}

pub(super) fn epochs(cluster: &StorageCluster) -> Vec<(String, u64)> {
    cluster.status.iter().flat_map(|s| &s.instances).map(|i| (i.node.clone(), i.epoch)).collect()
}

#[test]
fn placement_is_recorded_before_objects_are_created() {
    let cluster = fabric_cluster(json!({}));
    let mut observed = observed();
    let first = desired(&cluster, &settings(), &observed);
    assert!(!names_of(&first).iter().any(|n| n.starts_with("StatefulSet")), "{:?}", names_of(&first));
    let reported: Vec<_> =
        first.moves.iter().map(|m| (m.instance.as_str(), m.node.as_str(), m.epoch)).collect();
    assert_eq!(reported, [("a-0", "n1", 1), ("a-1", "n2", 1)]);
    write_moves(&mut observed, &first.moves);
    let then = desired(&cluster, &settings(), &observed);
    assert!(then.moves.is_empty());
    assert_eq!(
        names_of(&then),
        [
            "ConfigMap a-placement",
            "ConfigMap a-0-config-1",
            "StatefulSet a-0",
            "ConfigMap a-1-config-1",
            "StatefulSet a-1",
            "PodDisruptionBudget a-servers"
        ]
    );
    // Keys that moves write are not applied in any other way: an operator that was suspended would restore outdated values.
    assert_eq!(then.objects[0]["data"], json!({}));
    assert!(then.forget.is_empty(), "{:?}", then.forget);
}

#[test]
fn server_configuration_has_its_epoch_address_and_namespace() {
    let (cluster, observed) = fabric_running(json!({}));
    let found = desired(&cluster, &settings(), &observed);
    let file = config(&found, "a-1-config-1");
    assert_eq!(file["instance"]["epoch"].as_integer(), Some(1));
    assert_eq!(file["instance"]["addresses"][0].as_str(), Some("192.0.2.201/24"));
    assert_eq!(file["instance"]["interface"].as_str(), Some("eth1"));
    assert_eq!(file["server"]["advertise"][0].as_str(), Some("192.0.2.201:445"));
    let pool = &file["pool"][0]["nvmeof"];
    assert_eq!(pool["node"].as_str(), Some("n2"), "the node's name, not the machine's");
    assert_eq!(pool["namespace"].as_str(), Some("nguid:00000000000000000000000000000002"));
    assert_eq!(pool["paths"].as_array().map(Vec::len), Some(2));
    let status = &cluster.status.as_ref().expect("a status").instances[1];
    assert_eq!((status.address.as_str(), status.admin_endpoint.as_str()), ("192.0.2.201", "10.0.0.2:9444"));
    assert_eq!((status.pools[0].kind.as_str(), status.pools[0].paths), ("NVMeoF", 2));
    assert_eq!(condition(&found, "TakeoverReady").reason, "SpareNode");
    let set = found.objects.iter().find(|o| o["kind"] == "StatefulSet").expect("one");
    let container = &set["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["securityContext"]["privileged"], true);
}

#[test]
fn dhchap_secret_is_mounted_into_the_servers_only() {
    let mut backends = nvmeof(2);
    backends[0]["nvmeof"]["dhchapSecret"] = json!({ "name": "keys", "mutual": true });
    let (cluster, observed) = fabric_running(json!({ "backends": backends }));
    let found = desired(&cluster, &settings(), &observed);
    let pool = &config(&found, "a-0-config-1")["pool"][0]["nvmeof"];
    assert_eq!(pool["dhchap_key"].as_str(), Some("/etc/forebay/nvmeof/main/host"));
    assert_eq!(pool["dhchap_controller_key"].as_str(), Some("/etc/forebay/nvmeof/main/controller"));
    let text = json!(found.objects).to_string();
    assert_eq!(text.matches(r#""secretName":"keys""#).count(), 2, "one for each server");
    assert!(pool.get("tls_key").is_none() && pool.get("tls_identity").is_none(), "{pool:?}");
}

#[test]
fn tls_secret_is_mounted_into_the_servers_only() {
    let mut backends = nvmeof(2);
    backends[0]["nvmeof"]["tlsSecret"] = json!({ "name": "keys" });
    for (identity, reported) in [(json!(null), 1), (json!(0), 0)] {
        if !identity.is_null() {
            backends[0]["nvmeof"]["tlsSecret"]["identity"] = identity;
        }
        let (cluster, observed) = fabric_running(json!({ "backends": backends }));
        let found = desired(&cluster, &settings(), &observed);
        let pool = &config(&found, "a-0-config-1")["pool"][0]["nvmeof"];
        assert_eq!(pool["tls_key"].as_str(), Some("/etc/forebay/nvmeof-tls/main/psk"));
        assert_eq!(pool["tls_identity"].as_integer(), Some(reported));
        assert!(pool.get("dhchap_key").is_none(), "{pool:?}");
        let text = json!(found.objects).to_string();
        assert_eq!(text.matches(r#""secretName":"keys""#).count(), 2, "one for each server");
        assert!(text.contains(r#""mountPath":"/etc/forebay/nvmeof-tls/main""#), "{text}");
    }
}

#[test]
fn lost_node_moves_its_instance_in_the_next_epoch() {
    let (mut cluster, mut observed) = fabric_running(json!({}));
    silence(&mut observed, "n1", 22);
    let waiting = desired(&cluster, &settings(), &observed);
    assert!(waiting.moves.is_empty());
    assert_eq!(waiting.again, Duration::from_secs(8));
    silence(&mut observed, "n1", 31);
    let lost = desired(&cluster, &settings(), &observed);
    let [step] = lost.moves.as_slice() else { panic!("{:?}", lost.moves) };
    assert_eq!((step.instance.as_str(), step.node.as_str(), step.epoch), ("a-0", "n3", 2));
    assert_eq!(step.moved.as_ref().map(|m| m.why.as_str()), Some("NodeLost"));
    // An operator that dies before the write has done nothing. If it dies after the write, the next operator continues from
    // there.
    write_moves(&mut observed, &lost.moves);
    let applied = desired(&cluster, &settings(), &observed);
    assert!(applied.moves.is_empty());
    assert!(names_of(&applied).contains(&"ConfigMap a-0-config-2".to_owned()));
    assert!(applied.end.is_empty(), "the StatefulSet would recreate a pod of the old epoch");
    settle_fabric(&mut cluster, &mut observed);
    let ending = desired(&cluster, &settings(), &observed);
    let [pod] = ending.end.as_slice() else { panic!("{:?}", ending.end) };
    assert_eq!((pod.name.as_str(), pod.force), ("a-0-0", true), "no kubelet is left to terminate it");
    assert_eq!(ending.restart, None);
    see_through(&mut cluster, &mut observed);
    assert_eq!(epochs(&cluster), [("n3".to_owned(), 2), ("n2".to_owned(), 1)]);
    let status = cluster.status.clone().expect("a status");
    assert_eq!(status.instances[0].address, "192.0.2.200", "the address has moved with it");
    let reported = status.instances[0].takeover.clone().expect("it is reported");
    assert_eq!((reported.from.as_str(), reported.to.as_str(), reported.epoch), ("n1", "n3", 2));
    assert!(reported.serving.is_some());
    // The node comes back: nothing moves back.
    observed.silences.clear();
    let back = desired(&cluster, &settings(), &observed);
    assert!(back.moves.is_empty() && back.end.is_empty() && back.restart.is_none());
}

#[test]
fn unreachable_admin_api_alone_moves_nothing() {
    let (cluster, mut observed) = fabric_running(json!({}));
    observed.reports.insert("a-0".to_owned(), Report::Silent("no route".to_owned()));
    silence(&mut observed, "n1", 3);
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.moves.is_empty() && found.end.is_empty());
    assert_eq!(found.status.instances[0].phase, InstancePhase::NotReady);
}

#[test]
fn missing_spare_is_reported_and_no_pod_is_deleted() {
    let (cluster, mut observed) = fabric_running(json!({}));
    observed.nodes.retain(|n| n.metadata.name.as_deref() != Some("n3"));
    silence(&mut observed, "n1", 60);
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.moves.is_empty() && found.end.is_empty());
    assert!(
        found.status.instances[0].message.contains("does not respond"),
        "{:?}",
        found.status.instances[0]
    );
    assert_eq!(condition(&found, "TakeoverReady").reason, "NoSpareNode");
    // A node that is itself silent does not take over anything.
    let (cluster, mut observed) = fabric_running(json!({}));
    silence(&mut observed, "n1", 60);
    silence(&mut observed, "n3", 60);
    assert!(desired(&cluster, &settings(), &observed).moves.is_empty());
}

#[test]
fn instances_of_two_lost_nodes_move_to_two_different_nodes() {
    let (cluster, mut observed) = fabric_running(json!({}));
    observed.nodes.push(node("n4", "10.0.0.4"));
    silence(&mut observed, "n1", 60);
    silence(&mut observed, "n2", 60);
    let found = desired(&cluster, &settings(), &observed);
    let to: Vec<_> = found.moves.iter().map(|m| (m.instance.as_str(), m.node.as_str())).collect();
    assert_eq!(to, [("a-0", "n3"), ("a-1", "n4")]);
}

#[test]
fn cordoned_nodes_hand_over_one_instance_at_a_time() {
    let (mut cluster, mut observed) = fabric_running(json!({}));
    observed.nodes.push(node("n4", "10.0.0.4"));
    observed.nodes[0] = node_with("n1", "10.0.0.1", json!({ "unschedulable": true }));
    observed.nodes[1] = node_with("n2", "10.0.0.2", json!({ "unschedulable": true }));
    let found = desired(&cluster, &settings(), &observed);
    let [step] = found.moves.as_slice() else { panic!("{:?}", found.moves) };
    assert_eq!((step.instance.as_str(), step.node.as_str(), step.epoch), ("a-0", "n3", 2));
    write_moves(&mut observed, &found.moves);
    settle_fabric(&mut cluster, &mut observed);
    let ending = desired(&cluster, &settings(), &observed);
    let [pod] = ending.end.as_slice() else { panic!("{:?}", ending.end) };
    assert!(!pod.force, "its server drains, and gives the namespace back");
    assert!(ending.moves.is_empty(), "the other waits");
    see_through(&mut cluster, &mut observed);
    assert_eq!(epochs(&cluster), [("n3".to_owned(), 2), ("n4".to_owned(), 2)]);
}

#[test]
fn move_request_can_name_the_destination_node() {
    let (cluster, mut observed) = fabric_running(json!({}));
    observed.nodes.push(node("n4", "10.0.0.4"));
    let pod = observed.pods.get_mut("a-1").expect("it is there");
    let mut annotations = pod.metadata.annotations.clone().unwrap_or_default();
    annotations.insert(names::ANNOTATION_MOVE.to_owned(), "n4".to_owned());
    pod.metadata.annotations = Some(annotations);
    let found = desired(&cluster, &settings(), &observed);
    let [step] = found.moves.as_slice() else { panic!("{:?}", found.moves) };
    assert_eq!((step.instance.as_str(), step.node.as_str()), ("a-1", "n4"));
    assert_eq!(step.moved.as_ref().map(|m| m.why.as_str()), Some("Asked"));
}

#[test]
fn lost_node_moves_nothing_while_takeover_is_disabled() {
    let (cluster, mut observed) = fabric_running(json!({ "takeover": { "enabled": false } }));
    silence(&mut observed, "n1", 600);
    observed.nodes[0] =
        node_with("n1", "10.0.0.1", json!({ "taints": [{ "key": OUT_OF_SERVICE, "effect": "NoExecute" }] }));
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.moves.is_empty());
    assert_eq!(condition(&found, "TakeoverReady").reason, "Disabled");
}

#[test]
fn lost_record_is_recreated_with_later_epochs() {
    let (mut cluster, mut observed) = fabric_running(json!({}));
    silence(&mut observed, "n1", 60);
    see_through(&mut cluster, &mut observed);
    observed.silences.clear();
    observed.record = Record::default();
    observed.bound.clear();
    observed.recorded.clear();
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.remove.is_empty(), "no server stops: {:?}", found.remove);
    let reported: Vec<_> =
        found.moves.iter().map(|m| (m.instance.as_str(), m.node.as_str(), m.epoch)).collect();
    assert_eq!(reported, [("a-0", "n3", 3), ("a-1", "n2", 2)]);
    // An old record is restored from a backup: the epoch does not go down.
    observed.record.epochs.insert("a-0".to_owned(), 1);
    observed.bound.insert("a-0".to_owned(), "n1".to_owned());
    assert_eq!(desired(&cluster, &settings(), &observed).status.instances[0].epoch, 2);
}

#[test]
fn epoch_of_a_removed_instance_is_kept() {
    let (mut cluster, mut observed) = fabric_running(json!({}));
    change(&mut cluster, "instances", json!(1));
    announce(&mut cluster, &mut observed);
    let found = desired(&cluster, &settings(), &observed);
    assert!(
        found.forget.contains(&"a-1".to_owned()) && !found.forget.contains(&"a-1.epoch".to_owned()),
        "{:?}",
        found.forget
    );
}

#[test]
fn instance_without_a_namespace_or_address_is_pending_with_a_message() {
    let found = desired(&fabric_cluster(json!({ "backends": nvmeof(1) })), &settings(), &observed());
    assert_eq!(found.moves.len(), 1);
    let second = &found.status.instances[1];
    assert_eq!(second.phase, InstancePhase::Pending);
    assert!(
        second.message.contains("no namespace for a-1: add one to nvmeof.namespaces"),
        "{}",
        second.message
    );
    let short = json!({ "network": { "addresses": ["192.0.2.200/24", "192.0.2/24"] } });
    let found = desired(&fabric_cluster(short), &settings(), &observed());
    assert!(found.status.instances[1].message.contains("no address of its own"));
}

#[test]
fn instance_with_a_directory_backend_never_moves() {
    let mut backends = nvmeof(2);
    backends
        .as_array_mut()
        .expect("a list")
        .push(json!({ "name": "d", "kind": "Directory", "directory": { "path": "/mnt/a" } }));
    let (cluster, mut observed) = running(json!({ "backends": backends, "network": network() }));
    silence(&mut observed, "n1", 600);
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.moves.is_empty() && found.end.is_empty());
    assert_eq!(found.status.instances[0].node, "n1");
    assert!(!found.status.conditions.iter().any(|c| c.type_ == "TakeoverReady"));
}

pub(super) fn target_cluster() -> StorageCluster {
    fabric_cluster(json!({ "backends": [{ "name": "main", "kind": "Target", "target": {
        "nodes": [{ "name": "n3", "directory": "/mnt/files" }, { "name": "n2", "devices": ["/dev/disk/by-id/nvme-x"] }],
        "sizeGib": 2,
    } }] }))
}

pub(super) fn target_file<'d>(desired: &'d Desired, node: &str) -> (&'d Value, toml::Table) {
    let name = target::name("a", node);
    let mut found = desired.objects.iter().filter(|o| o["metadata"]["name"] == name.as_str());
    let map = found.next().expect("a ConfigMap");
    let set = found.next().expect("a StatefulSet");
    (set, map["data"]["target.toml"].as_str().expect("a file").parse().expect("TOML"))
}

#[test]
fn bundled_target_exports_a_stable_namespace_per_instance_to_all_nodes() {
    let cluster = target_cluster();
    let mut observed = observed();
    let first = desired(&cluster, &settings(), &observed);
    assert!(
        !names_of(&first).iter().any(|n| n.contains("-target-")),
        "namespaces are exported only once they are recorded"
    );
    write_moves(&mut observed, &first.moves);
    let found = desired(&cluster, &settings(), &observed);
    let (set, file) = target_file(&found, "n3");
    assert_eq!(set["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privileged"], true);
    assert_eq!(file["target"]["name"].as_str(), Some(target::name("a", "n3").as_str()));
    let subsystem = &file["subsystem"][0];
    assert_eq!(subsystem["nqn"].as_str(), Some("nqn.2026-01.io.forebay:a.ns.main.a-0"));
    assert_eq!(subsystem["hosts"].as_array().map(Vec::len), Some(3));
    let namespace = &subsystem["namespace"][0];
    assert_eq!(namespace["file"].as_str(), Some("/mnt/files/main-a-0.img"));
    assert_eq!(namespace["size"].as_str(), Some("2GiB"));
    assert!(namespace.get("allow_volatile_cache").is_none(), "off by default");
    assert_eq!(file["port"][0]["address"].as_str(), Some("10.0.0.3"));
    let (_, other) = target_file(&found, "n2");
    assert_eq!(other["subsystem"][0]["namespace"][0]["device"].as_str(), Some("/dev/disk/by-id/nvme-x"));
    let pool = &config(&found, "a-0-config-1")["pool"][0]["nvmeof"];
    assert_eq!(pool["nqn"], subsystem["nqn"]);
    assert_eq!(pool["namespace"].as_str().and_then(|n| n.strip_prefix("uuid:")), namespace["uuid"].as_str());
    assert_eq!(pool["paths"][0].as_str(), Some("tcp://10.0.0.3:4420"));
    // The UUID never changes: hosts identify namespaces by it, and pools are stored on them.
    assert_eq!(namespace["uuid"].as_str(), Some("2dcd4991-7303-50bf-ac87-e5d3102e5248"));
    // Namespaces with a temporarily unknown state are not removed.
    let n3 = observed.nodes.pop().expect("n3");
    let without = desired(&cluster, &settings(), &observed);
    assert!(
        !names_of(&without).iter().any(|n| n.ends_with(&target::name("a", "n3"))),
        "{:?}",
        names_of(&without)
    );
    assert!(without.remove.is_empty(), "{:?}", without.remove);
    observed.nodes.push(n3);
    // The node of the target becomes silent: the namespaces keep their places.
    silence(&mut observed, "n3", 60);
    let step = desired(&cluster, &settings(), &observed);
    assert!(
        step.moves
            .iter()
            .all(|m| m.places["main"] == observed.record.places[&(m.instance.clone(), "main".to_owned())])
    );
}

#[test]
fn accepted_volatile_cache_is_passed_to_the_target() {
    let mut cluster = target_cluster();
    cluster.spec.backends[0].target.as_mut().expect("a target").allow_volatile_cache = true;
    let mut observed = observed();
    let first = desired(&cluster, &settings(), &observed);
    write_moves(&mut observed, &first.moves);
    let found = desired(&cluster, &settings(), &observed);
    for node in ["n2", "n3"] {
        let (_, file) = target_file(&found, node);
        let namespace = &file["subsystem"][0]["namespace"][0];
        assert_eq!(namespace["allow_volatile_cache"].as_bool(), Some(true), "{node}");
    }
}

#[test]
fn bundled_target_removes_its_subsystems_before_its_deletion() {
    let mut cluster = target_cluster();
    let mut observed = observed();
    see_through(&mut cluster, &mut observed);
    assert_eq!(observed.target_sets.len(), 2);
    cluster.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    let mut status = cluster.status.clone().expect("a status");
    status.deletion_policy = Some(forebay_api::cluster::DeletionPolicy::Retain);
    cluster.status = Some(status);
    observed.stateful_sets.clear();
    observed.pods.clear();
    let ending = desired(&cluster, &settings(), &observed);
    assert!(!ending.release);
    assert_eq!(condition(&ending, "Deletable").reason, "TargetsEnding");
    let set = ending
        .objects
        .iter()
        .find(|o| o["metadata"]["name"] == target::name("a", "n3").as_str())
        .expect("its set");
    let pod = &set["spec"]["template"]["spec"];
    assert_eq!(pod["initContainers"][0]["command"][3], "remove");
    assert!(
        !names_of(&ending).iter().any(|n| n.starts_with("ConfigMap")),
        "the target keeps its last configuration"
    );
    assert!(!removed(&ending).iter().any(|r| r.contains("-target-")), "{:?}", removed(&ending));
    settle(&mut cluster, &mut observed, 1);
    // The node of the other target is away, so that target cannot be emptied.
    observed.nodes.retain(|n| n.metadata.name.as_deref() != Some("n2"));
    let then = desired(&cluster, &settings(), &observed);
    assert_eq!(
        removed(&then).iter().filter(|r| r.starts_with("StatefulSet")).count(),
        2,
        "{:?}",
        removed(&then)
    );
    observed.target_sets.clear();
    assert!(desired(&cluster, &settings(), &observed).release);
}

#[test]
fn ready_condition_has_the_exit_message_of_the_server() {
    let (cluster, observed) = fabric_running(json!({}));
    let said =
        "forebay-server: pool main: the namespace holds something that is no pool: nothing was written";
    let ended = json!({ "terminated": { "exitCode": 4, "message": format!("a line before\n{said}\n") } });
    let waiting = json!({ "waiting": { "reason": "CrashLoopBackOff", "message": "back-off 10s" } });
    for (state, last_state) in [(&ended, &json!({})), (&waiting, &ended)] {
        let mut observed = observed.clone();
        observed.reports.remove("a-0");
        let pod = observed.pods.get_mut("a-0").expect("it runs");
        pod.status = serde_json::from_value(json!({
            "phase": "Running",
            "conditions": [{ "type": "Ready", "status": "False", "lastTransitionTime": now().to_string() }],
            "containerStatuses": [{
                "name": "server", "image": "i", "imageID": "i", "ready": false, "restartCount": 3,
                "started": false, "state": state, "lastState": last_state,
            }],
        }))
        .expect("a status");
        let found = desired(&cluster, &settings(), &observed);
        assert!(found.moves.is_empty(), "it is given time");
        let ready = condition(&found, "Ready");
        assert!(ready.status == "False" && ready.message.contains(said), "{}", ready.message);
        assert!(found.status.instances[0].message.contains(said), "{:?}", found.status.instances[0]);
    }
}

#[test]
fn failed_server_moves_only_if_it_has_served_and_its_target_is_up() {
    let mut cluster = target_cluster();
    let mut observed = observed();
    see_through(&mut cluster, &mut observed);
    let down = |observed: &Observed| {
        let mut observed = observed.clone();
        observed.reports.remove("a-0");
        let pod = observed.pods.get_mut("a-0").expect("it runs");
        let since = now() - k8s_openapi::jiff::SignedDuration::from_secs(500);
        pod.status = serde_json::from_value(json!({ "phase": "Running", "conditions": [
            { "type": "Ready", "status": "False", "lastTransitionTime": since.to_string() },
        ] }))
        .expect("a status");
        observed
    };
    let moves = |observed: &Observed| desired(&cluster, &settings(), observed).moves.len();
    assert_eq!(moves(&down(&observed)), 1);
    let mut never = down(&observed);
    never.pools.remove("a-0");
    assert_eq!(moves(&never), 0, "it has never served");
    let mut away = down(&observed);
    away.target_pods.clear();
    assert_eq!(moves(&away), 0, "its target is away");
}
