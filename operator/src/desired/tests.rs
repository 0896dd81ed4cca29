use super::*;
use forebay_api::cluster::{InstancePhase, StorageClusterStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::json;

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).expect("a moment")
}

fn settings() -> Settings {
    Settings {
        namespace: "ns".to_owned(),
        image: "forebay:1".to_owned(),
        seccomp_profile: "localhost/forebay/server.json".to_owned(),
        priority_class: "system-cluster-critical".to_owned(),
        announcement: crate::limits::ANNOUNCEMENT,
        cluster_uid: "a-cluster".to_owned(),
        disruption_budgets: true,
    }
}

fn cluster(spec: Value) -> StorageCluster {
    let mut full = json!({
        "instances": 2,
        "backends": [{ "name": "main", "kind": "Directory", "directory": { "path": "/mnt/a" } }],
    });
    for (key, value) in spec.as_object().expect("fields") {
        full[key.as_str()] = value.clone();
    }
    serde_json::from_value(json!({
        "apiVersion": "storage.forebay.io/v1alpha1",
        "kind": "StorageCluster",
        "metadata": { "name": "a", "namespace": "ns", "uid": "u", "generation": 3 },
        "spec": full,
    }))
    .expect("a StorageCluster")
}

fn node(name: &str, ip: &str) -> Arc<Node> {
    Arc::new(
        serde_json::from_value(json!({
            "metadata": { "name": name },
            "status": {
                "conditions": [{ "type": "Ready", "status": "True" }],
                "addresses": [{ "type": "Hostname", "address": name }, { "type": "InternalIP", "address": ip }],
            },
        }))
        .expect("a Node"),
    )
}

fn observed() -> Observed {
    Observed {
        now: now(),
        nodes: vec![node("n1", "10.0.0.1"), node("n2", "10.0.0.2"), node("n3", "10.0.0.3")],
        certificates: CertificatesState {
            problem: None,
            renewal: None,
            issued: (0..4).map(|n| format!("a-{n}")).collect(),
            terms: Vec::new(),
        },
        ..Observed::default()
    }
}

/// Returns the kinds and names of the objects.
fn names_of(desired: &Desired) -> Vec<String> {
    desired
        .objects
        .iter()
        .map(|o| {
            format!(
                "{} {}",
                o["kind"].as_str().unwrap_or_default(),
                o["metadata"]["name"].as_str().unwrap_or_default()
            )
        })
        .collect()
}

fn removed(desired: &Desired) -> Vec<String> {
    desired.remove.iter().map(|t| format!("{} {}", t.kind, t.name)).collect()
}

fn condition<'d>(desired: &'d Desired, type_: &str) -> &'d Condition {
    desired
        .status
        .conditions
        .iter()
        .find(|c| c.type_ == type_)
        .unwrap_or_else(|| panic!("no condition {type_}"))
}

/// Simulates the API server, the StatefulSet controller and the kubelets: every object exists, every pod has been ready for
/// `ready_for_s`, every server responds.
fn settle(cluster: &mut StorageCluster, observed: &mut Observed, ready_for_s: i64) {
    let done = desired(cluster, &settings(), observed);
    for target in &done.remove {
        match target.kind {
            "StatefulSet" => {
                observed.target_sets.remove(&target.name);
                observed.stateful_sets.remove(&target.name);
                observed.pods.remove(&target.name);
            }
            "Service" => {
                observed.services.remove(&target.name);
            }
            _ => observed.config_maps.retain(|n| *n != target.name),
        }
    }
    for object in &done.objects {
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        match object["kind"].as_str().expect("a kind") {
            "StatefulSet" => {
                let mut set: StatefulSet = serde_json::from_value(object.clone()).expect("a StatefulSet");
                set.metadata.uid = Some(format!("set-{name}"));
                if object["metadata"]["labels"]["app.kubernetes.io/component"] == names::COMPONENT_TARGET {
                    observed.target_pods.retain(|p| p.name_any() != format!("{name}-0"));
                    observed.target_pods.push(pod(object, &name, ready_for_s));
                    observed.target_sets.insert(name, set);
                    continue;
                }
                observed.stateful_sets.insert(name.clone(), set);
                observed.pods.entry(name.clone()).or_insert_with(|| pod(object, &name, ready_for_s));
                let report = ServerReport {
                    version: "1".to_owned(),
                    transports: vec!["TCP".to_owned()],
                    capacity_bytes: 1 << 40,
                    free_bytes: 1 << 39,
                    pools: cluster
                        .spec
                        .backends
                        .iter()
                        .map(|b| (b.name.clone(), PoolStatus::default()))
                        .collect(),
                    ..ServerReport::default()
                };
                observed.reports.entry(name).or_insert(Report::Answered(Box::new(report)));
            }
            "Service" => {
                let mut service: Service = serde_json::from_value(object.clone()).expect("a Service");
                service.spec.as_mut().expect("a spec").cluster_ip =
                    Some(format!("10.96.0.{}", observed.services.len() + 1));
                observed.services.entry(name).or_insert(service);
            }
            "ConfigMap" => {
                if name == objects::placement_record("a") {
                    let record: BTreeMap<String, String> =
                        serde_json::from_value(object["data"].clone()).expect("strings");
                    observed.pools = objects::recorded_pools(&record);
                    observed.recorded.retain(|key| !done.forget.contains(key));
                    observed.recorded.extend(record.keys().cloned());
                    observed.bound = record.into_iter().filter(|(i, _)| ordinal("a", i).is_some()).collect();
                }
                if !observed.config_maps.contains(&name) {
                    observed.config_maps.push(name);
                }
            }
            _ => {}
        }
    }
    cluster.status = Some(done.status);
}

fn pod(set: &Value, instance: &str, ready_for_s: i64) -> Pod {
    let template = &set["spec"]["template"];
    let terms =
        &template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let since = now() - k8s_openapi::jiff::SignedDuration::from_secs(ready_for_s);
    let mut spec = template["spec"].clone();
    spec["nodeName"] = terms["nodeSelectorTerms"][0]["matchFields"][0]["values"][0].clone();
    serde_json::from_value(json!({
        "metadata": {
            "name": format!("{instance}-0"), "uid": format!("pod-{instance}"),
            "labels": template["metadata"]["labels"], "annotations": template["metadata"]["annotations"],
        },
        "spec": spec,
        "status": { "phase": "Running", "conditions": [
            { "type": "Ready", "status": "True", "lastTransitionTime": since.to_string() },
        ] },
    }))
    .expect("a Pod")
}

/// Returns a running cluster after the operator has settled it.
fn running(spec: Value) -> (StorageCluster, Observed) {
    let mut cluster = cluster(spec);
    let mut observed = observed();
    for _ in 0..3 {
        settle(&mut cluster, &mut observed, 1000);
    }
    assert_eq!(phases(&cluster), vec![InstancePhase::Ready; cluster.spec.instances as usize]);
    (cluster, observed)
}

fn phases(cluster: &StorageCluster) -> Vec<InstancePhase> {
    cluster.status.iter().flat_map(|s| &s.instances).map(|i| i.phase).collect()
}

fn change(cluster: &mut StorageCluster, field: &str, value: Value) {
    let mut spec = serde_json::to_value(&cluster.spec).expect("JSON");
    spec[field] = value;
    cluster.spec = serde_json::from_value(spec).expect("a spec");
}

/// The removal is in the status, and enough time passes.
fn announce(cluster: &mut StorageCluster, observed: &mut Observed) {
    for _ in 0..2 {
        let found = desired(cluster, &settings(), observed);
        assert!(!found.remove.iter().any(|t| t.kind == "StatefulSet"), "{:?}", found.remove);
        cluster.status = Some(found.status);
    }
    observed.now += crate::limits::ANNOUNCEMENT + Duration::from_secs(1);
}

fn volumes(observed: &mut Observed, instance: &str, count: u32) {
    let Some(Report::Answered(report)) = observed.reports.get_mut(instance) else {
        panic!("{instance} does not answer")
    };
    report.volumes = count;
}

fn snapshots(observed: &mut Observed, instance: &str, count: u32) {
    let Some(Report::Answered(report)) = observed.reports.get_mut(instance) else {
        panic!("{instance} does not answer")
    };
    report.snapshots = count;
}

#[path = "brake_tests.rs"]
mod brake_tests;
#[path = "epoch_tests.rs"]
mod epoch_tests;
#[path = "moves_tests.rs"]
mod moves_tests;
#[path = "nodes_tests.rs"]
mod nodes_tests;
#[path = "times_tests.rs"]
mod times_tests;

#[test]
fn new_cluster_gets_its_objects() {
    let found = desired(&cluster(json!({})), &settings(), &observed());
    assert_eq!(
        names_of(&found),
        [
            "ConfigMap a-placement",
            "ConfigMap a-0-config",
            "StatefulSet a-0",
            "ConfigMap a-1-config",
            "StatefulSet a-1",
            "PodDisruptionBudget a-servers"
        ]
    );
    assert!(found.remove.is_empty() && found.restart.is_none() && !found.release);
    let set = &found.objects[2];
    assert_eq!(set["spec"]["updateStrategy"]["type"], "OnDelete");
    let pod = &set["spec"]["template"]["spec"];
    assert_eq!(pod["securityContext"]["seccompProfile"]["localhostProfile"], "forebay/server.json");
    assert_eq!(pod["containers"][0]["image"], "forebay:1");
    assert_eq!(pod["terminationGracePeriodSeconds"], 90);
    assert_eq!(pod["volumes"][3]["hostPath"], json!({ "path": "/mnt/a", "type": "Directory" }));
    // No object has an owner: the garbage collector must not end servers that hold volumes.
    for object in &found.objects {
        assert!(object["metadata"].get("ownerReferences").is_none());
    }
}

#[test]
fn desired_state_is_stable_across_reconciliations() {
    let (cluster, observed) = running(json!({}));
    let first = desired(&cluster, &settings(), &observed);
    let mut later = cluster.clone();
    later.status = Some(first.status.clone());
    let second = desired(&later, &settings(), &observed);
    assert_eq!(first.objects, second.objects);
    assert_eq!(first.status, second.status);
    assert!(second.remove.is_empty() && second.restart.is_none());
    assert_eq!(second.again, RESYNC);
}

#[test]
fn instance_is_created_only_with_a_certificate_and_an_address() {
    let mut seen = observed();
    seen.certificates.issued = vec!["a-1".to_owned()];
    assert_eq!(
        names_of(&desired(&cluster(json!({})), &settings(), &seen)),
        ["ConfigMap a-placement", "ConfigMap a-1-config", "StatefulSet a-1", "PodDisruptionBudget a-servers"]
    );
    let network = json!({ "network": { "hostNetwork": false } });
    assert_eq!(
        names_of(&desired(&cluster(network.clone()), &settings(), &observed())),
        ["ConfigMap a-placement", "Service a-0", "Service a-1", "PodDisruptionBudget a-servers"]
    );
    let (cluster, _) = running(network);
    assert_eq!(cluster.status.expect("a status").instances[0].address, "10.96.0.1");
}

#[test]
fn instance_that_has_served_stays_bound_to_a_deleted_node() {
    let (mut cluster, mut observed) = running(json!({}));
    assert_eq!(observed.bound.get("a-0").map(String::as_str), Some("n1"));
    observed.nodes.retain(|n| n.metadata.name.as_deref() != Some("n1"));
    observed.pods.remove("a-0");
    observed.reports.remove("a-0");
    settle(&mut cluster, &mut observed, 1000);
    let found = desired(&cluster, &settings(), &observed);
    let status = &found.status.instances[0];
    assert_eq!((status.node.as_str(), status.phase), ("n1", InstancePhase::NotReady));
    assert!(status.message.contains("no longer part of the Kubernetes cluster"), "{}", status.message);
    assert_eq!(status.address, "10.0.0.1", "the address is remembered");
    assert!(found.remove.is_empty());
    // The record of nodes is lost, but the status still has the nodes: nothing moves.
    observed.bound.clear();
    observed.stateful_sets.clear();
    assert_eq!(desired(&cluster, &settings(), &observed).status.instances[0].node, "n1");
}

#[test]
fn instance_that_never_served_is_placed_on_another_node() {
    let mut cluster = cluster(json!({ "instances": 1 }));
    let mut observed = observed();
    let first = desired(&cluster, &settings(), &observed);
    assert_eq!(first.status.instances[0].node, "n1");
    cluster.status = Some(first.status);
    observed.nodes[0] = Arc::new(
        serde_json::from_value(json!({ "metadata": { "name": "n1" }, "spec": { "unschedulable": true } }))
            .expect("a Node"),
    );
    assert_eq!(desired(&cluster, &settings(), &observed).status.instances[0].node, "n2");
    observed.nodes.truncate(1);
    let nowhere = desired(&cluster, &settings(), &observed);
    assert_eq!(nowhere.status.instances[0].phase, InstancePhase::Pending);
    assert_eq!(condition(&nowhere, "InstancesPlaced").reason, "NoNodeFits");
    assert!(condition(&nowhere, "InstancesPlaced").message.contains("kubectl uncordon n1"));
}

#[test]
fn rollout_restarts_one_pod_at_a_time_and_waits_for_health() {
    let (mut cluster, mut observed) = running(json!({ "instances": 3 }));
    change(&mut cluster, "image", json!("forebay:2"));
    // The StatefulSets get the new template first, and the pods follow.
    assert_eq!(desired(&cluster, &settings(), &observed).restart, None);
    settle(&mut cluster, &mut observed, 1000);
    let found = desired(&cluster, &settings(), &observed);
    let restart = found.restart.clone().expect("a restart");
    assert_eq!((restart.name.as_str(), restart.uid.as_str()), ("a-0-0", "pod-a-0"));
    assert_eq!(condition(&found, "Progressing").reason, "RollingOut");
    // No restart while the pod ends.
    observed.pods.get_mut("a-0").expect("it is there").metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    let ending = desired(&cluster, &settings(), &observed);
    assert_eq!((ending.restart, ending.status.instances[0].phase), (None, InstancePhase::Draining));
    // The pod is back, but has not been ready for long enough.
    observed.pods.remove("a-0");
    settle(&mut cluster, &mut observed, 3);
    let waiting = desired(&cluster, &settings(), &observed);
    assert_eq!(waiting.restart, None);
    assert_eq!(condition(&waiting, "Progressing").reason, "WaitingForHealth");
    assert_eq!(waiting.again, Duration::from_secs(7));
    // Ready for long enough, but its server does not respond; then it does.
    observed.now += Duration::from_secs(60);
    let answer = observed.reports.insert("a-0".to_owned(), Report::Silent("refused".to_owned()));
    assert_eq!(desired(&cluster, &settings(), &observed).restart, None);
    observed.reports.insert("a-0".to_owned(), answer.expect("it answered"));
    assert_eq!(desired(&cluster, &settings(), &observed).restart.expect("a restart").name, "a-1-0");
}

#[test]
fn rollout_replaces_a_broken_pod_first() {
    let (mut cluster, mut observed) = running(json!({ "instances": 3 }));
    let broken = observed.pods.get_mut("a-1").expect("it is there");
    broken.status = serde_json::from_value(json!({ "phase": "Pending", "containerStatuses": [{
        "name": "server", "image": "x", "imageID": "", "ready": false, "restartCount": 0, "started": false,
        "state": { "waiting": { "reason": "ImagePullBackOff", "message": "no such image" } },
    }] }))
    .expect("a status");
    observed.reports.remove("a-1");
    change(&mut cluster, "image", json!("forebay:2"));
    settle(&mut cluster, &mut observed, 1000);
    observed.reports.remove("a-1");
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(found.restart.clone().expect("a restart").name, "a-1-0");
    assert!(found.status.instances[1].message.contains("ImagePullBackOff: no such image"));
}

#[test]
fn changes_that_do_not_affect_servers_restart_no_pod() {
    let (mut cluster, mut observed) = running(json!({}));
    change(&mut cluster, "storageClasses", json!([{ "name": "fast" }]));
    change(&mut cluster, "upgrade", json!({ "minReadySeconds": 77 }));
    settle(&mut cluster, &mut observed, 1000);
    assert_eq!(desired(&cluster, &settings(), &observed).restart, None);
}

#[test]
fn on_delete_strategy_reports_outdated_pods_without_restarting_them() {
    let (mut cluster, mut observed) = running(json!({ "upgrade": { "strategy": "OnDelete" } }));
    change(&mut cluster, "limits", json!({ "maxIoKib": 1024 }));
    settle(&mut cluster, &mut observed, 1000);
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(found.restart, None);
    assert_eq!(condition(&found, "Progressing").reason, "WaitingForPodDeletion");
    assert!(condition(&found, "Progressing").message.contains("a-0-0, a-1-0"));
}

#[test]
fn instance_is_removed_only_when_announced_and_empty() {
    let (mut cluster, mut observed) = running(json!({}));
    volumes(&mut observed, "a-1", 2);
    change(&mut cluster, "instances", json!(1));
    settle(&mut cluster, &mut observed, 1000);
    let refused = desired(&cluster, &settings(), &observed);
    assert_eq!(refused.status.instances[1].phase, InstancePhase::Removing);
    assert_eq!(condition(&refused, "Progressing").reason, "ScaleDownRefused");
    assert!(condition(&refused, "Progressing").message.contains("set spec.instances to 2"));
    assert!(refused.remove.is_empty());
    announce(&mut cluster, &mut observed);
    // The instance is empty, but the driver is about to make a volume there.
    volumes(&mut observed, "a-1", 0);
    observed.recorded_volumes.insert("a-1".to_owned(), 1);
    assert!(desired(&cluster, &settings(), &observed).remove.is_empty());
    observed.recorded_volumes.clear();
    // The number of volumes is unknown.
    let answer = observed.reports.remove("a-1").expect("it answered");
    assert!(desired(&cluster, &settings(), &observed).remove.is_empty());
    observed.reports.insert("a-1".to_owned(), answer);
    assert_eq!(
        removed(&desired(&cluster, &settings(), &observed)),
        ["StatefulSet a-1", "ConfigMap a-1-config"]
    );
    // The record is removed first, and by name: the operator cannot drop keys of a person by omitting them.
    let removing = desired(&cluster, &settings(), &observed);
    assert_eq!(removing.forget, ["a-1", "a-1.pools"]);
    settle(&mut cluster, &mut observed, 1000);
    settle(&mut cluster, &mut observed, 1000);
    assert_eq!(cluster.status.as_ref().expect("a status").instances.len(), 1);
    assert!(!observed.bound.contains_key("a-1"));
    assert!(desired(&cluster, &settings(), &observed).forget.is_empty());
}

#[test]
fn empty_instance_is_removed_only_after_the_announcement_period() {
    let (mut cluster, mut observed) = running(json!({}));
    change(&mut cluster, "instances", json!(1));
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.remove.is_empty());
    assert_eq!(found.status.instances[1].phase, InstancePhase::Removing);
    assert_eq!(found.status.instances[1].removing_since, None, "it cannot have been read yet");
    assert!(found.again <= WAIT);
    cluster.status = Some(found.status);
    let reported = desired(&cluster, &settings(), &observed);
    assert!(reported.remove.is_empty() && reported.status.instances[1].removing_since.is_some());
    cluster.status = Some(reported.status.clone());
    observed.now += crate::limits::ANNOUNCEMENT - Duration::from_secs(1);
    let waiting = desired(&cluster, &settings(), &observed);
    assert!(waiting.remove.is_empty(), "a CreateVolume may be on its way");
    assert_eq!(waiting.status, reported.status, "waiting changes nothing");
    // The instance was wanted again in the meantime, so the next announcement starts over.
    change(&mut cluster, "instances", json!(2));
    assert_eq!(desired(&cluster, &settings(), &observed).status.instances[1].removing_since, None);
    change(&mut cluster, "instances", json!(1));
    observed.now += Duration::from_secs(2);
    assert_eq!(
        removed(&desired(&cluster, &settings(), &observed)),
        ["StatefulSet a-1", "ConfigMap a-1-config"]
    );
}

#[test]
fn existing_pool_is_never_created_again() {
    let configuration = |found: &Desired, instance: &str| -> toml::Value {
        let map = found.objects.iter().find(|o| o["metadata"]["name"] == format!("{instance}-config"));
        toml::from_str(map.and_then(|m| m["data"]["server.toml"].as_str()).expect("a map")).expect("TOML")
    };
    let existing =
        |found: &Desired, pool: usize| configuration(found, "a-0")["pool"][pool]["existing"].as_bool();
    let revisions = |found: &Desired| -> Vec<Value> {
        let sets = found.objects.iter().filter(|o| o["kind"] == "StatefulSet");
        sets.map(|s| s["spec"]["template"]["metadata"]["annotations"].clone()).collect()
    };
    let mut new = cluster(json!({}));
    let mut seen = observed();
    let first = desired(&new, &settings(), &seen);
    assert_eq!(existing(&first, 0), Some(false));
    for _ in 0..3 {
        settle(&mut new, &mut seen, 1000);
    }
    let bound = desired(&new, &settings(), &seen);
    assert_eq!(existing(&bound, 0), Some(true));
    assert_eq!(
        bound.objects[0]["data"],
        json!({ "a-0": "n1", "a-0.pools": "main", "a-1": "n2", "a-1.pools": "main" })
    );
    assert_eq!(revisions(&first), revisions(&bound), "no restart for it");
    assert_eq!(bound.restart, None);
    // The instance is away with its disk, and comes back without it.
    seen.pods.remove("a-0");
    seen.reports.remove("a-0");
    assert_eq!(existing(&desired(&new, &settings(), &seen), 0), Some(true));
    // A further backend is new on the instance.
    let backend = |name: &str| json!({ "name": name, "kind": "Directory", "directory": { "path": format!("/mnt/{name}") } });
    change(&mut new, "backends", json!([backend("main"), backend("more")]));
    let added = desired(&new, &settings(), &seen);
    assert_eq!((existing(&added, 0), existing(&added, 1)), (Some(true), Some(false)));
}

fn deleted(policy: &str) -> (StorageCluster, Observed) {
    let (mut cluster, observed) = running(json!({ "deletionPolicy": policy }));
    cluster.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    (cluster, observed)
}

#[test]
fn protect_policy_blocks_deletion_while_volumes_or_snapshots_exist() {
    let (mut cluster, mut observed) = deleted("Protect");
    volumes(&mut observed, "a-0", 3);
    announce(&mut cluster, &mut observed);
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(condition(&found, "Deletable").reason, "VolumesExist");
    assert!(condition(&found, "Deletable").message.contains("3 on a-0"));
    assert!(found.remove.is_empty() && !found.release && found.destroy_volumes.is_empty());
    // Snapshots are data, too.
    snapshots(&mut observed, "a-0", 2);
    let both = desired(&cluster, &settings(), &observed);
    assert!(condition(&both, "Deletable").message.contains("3 and 2 snapshots on a-0"));
    volumes(&mut observed, "a-0", 0);
    let kept = desired(&cluster, &settings(), &observed);
    assert_eq!(condition(&kept, "Deletable").reason, "VolumesExist");
    assert!(condition(&kept, "Deletable").message.contains("VolumeSnapshots"));
    snapshots(&mut observed, "a-0", 0);
    // An instance that is away may hold snapshots.
    observed.reports.remove("a-1");
    assert_eq!(condition(&desired(&cluster, &settings(), &observed), "Deletable").reason, "VolumesUnknown");
}

/// Checks that the status announces the removal of the servers, and its policy, before the first server is removed.
fn decide(cluster: &mut StorageCluster, observed: &Observed) {
    let decided = desired(cluster, &settings(), observed);
    assert_eq!(condition(&decided, "Deletable").reason, "Decided");
    assert!(decided.remove.is_empty() && !decided.release);
    cluster.status = Some(decided.status);
}

#[test]
fn empty_cluster_is_deleted_in_steps() {
    let (mut cluster, mut observed) = deleted("Protect");
    observed.secrets = [("a-ca".to_owned(), None), ("a-0-tls".to_owned(), Some("a-0".to_owned()))].into();
    let announced = desired(&cluster, &settings(), &observed);
    assert_eq!(condition(&announced, "Deletable").reason, "Announcing");
    assert!(announced.remove.is_empty());
    announce(&mut cluster, &mut observed);
    decide(&mut cluster, &observed);
    let ending = desired(&cluster, &settings(), &observed);
    assert_eq!(removed(&ending), ["StatefulSet a-0", "StatefulSet a-1"]);
    assert!(!ending.release);
    // The operator is killed before it writes the status: the StatefulSets are gone, one pod drains, and its server no
    // longer responds.
    observed.stateful_sets.clear();
    observed.pods.remove("a-1");
    observed.reports.clear();
    let draining = desired(&cluster, &settings(), &observed);
    assert_eq!(condition(&draining, "Deletable").reason, "ServersEnding");
    assert!(!draining.release);
    cluster.status = Some(draining.status);
    observed.pods.clear();
    let gone = desired(&cluster, &settings(), &observed);
    assert!(gone.release && !gone.forget_credentials);
    for target in ["ConfigMap a-placement", "Secret a-ca", "Secret a-0-tls"] {
        assert!(removed(&gone).contains(&target.to_owned()), "{target}");
    }
}

#[test]
fn retain_policy_keeps_the_placement_record() {
    let (mut cluster, mut observed) = deleted("Retain");
    volumes(&mut observed, "a-0", 3);
    decide(&mut cluster, &observed);
    let ending = desired(&cluster, &settings(), &observed);
    assert_eq!(removed(&ending), ["StatefulSet a-0", "StatefulSet a-1"]);
    cluster.status = Some(ending.status);
    observed.stateful_sets.clear();
    observed.pods.clear();
    let gone = desired(&cluster, &settings(), &observed);
    assert!(gone.release);
    assert!(!removed(&gone).contains(&"ConfigMap a-placement".to_owned()));
    // A change of the policy comes too late: nothing was counted or destroyed.
    for late in ["Protect", "Destroy"] {
        change(&mut cluster, "deletionPolicy", json!(late));
        let gone = desired(&cluster, &settings(), &observed);
        assert!(gone.release && !gone.forget_credentials, "{late}");
        assert!(!removed(&gone).contains(&"ConfigMap a-placement".to_owned()), "{late}");
        let message = &condition(&gone, "Deletable").message;
        assert!(message.contains("the deletion has begun with Retain"), "{late}: {message}");
    }
    // A cluster of the same name gets its nodes back.
    let mut again = tests::cluster(json!({}));
    again.status = Some(StorageClusterStatus::default());
    let bound = [("a-0".to_owned(), "n3".to_owned()), ("a-1".to_owned(), "n1".to_owned())].into();
    let seen = Observed { bound, ..tests::observed() };
    let found = desired(&again, &settings(), &seen);
    assert_eq!(found.status.instances[0].node, "n3");
    assert_eq!(found.status.instances[1].node, "n1");
}

#[test]
fn destroy_policy_destroys_volumes_before_removing_servers() {
    let (mut cluster, mut observed) = deleted("Destroy");
    volumes(&mut observed, "a-1", 1);
    // The driver's record of the volume stays until the end.
    observed.recorded_volumes.insert("a-1".to_owned(), 1);
    announce(&mut cluster, &mut observed);
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(found.destroy_volumes, ["a-1"]);
    assert!(found.remove.is_empty());
    volumes(&mut observed, "a-1", 0);
    decide(&mut cluster, &observed);
    assert_eq!(removed(&desired(&cluster, &settings(), &observed)), ["StatefulSet a-0", "StatefulSet a-1"]);
    observed.stateful_sets.clear();
    observed.pods.clear();
    let gone = desired(&cluster, &settings(), &observed);
    assert!(gone.release && gone.forget_credentials);
}

#[test]
fn unserved_volumes_block_destruction_with_their_own_reason() {
    let (mut cluster, mut observed) = deleted("Destroy");
    volumes(&mut observed, "a-1", 2);
    let Some(Report::Answered(report)) = observed.reports.get_mut("a-1") else { panic!("it answers") };
    report.unserved = 1;
    announce(&mut cluster, &mut observed);
    assert_eq!(
        condition(&desired(&cluster, &settings(), &observed), "Deletable").reason,
        "DestroyingVolumes"
    );
    volumes(&mut observed, "a-1", 1);
    let damaged = desired(&cluster, &settings(), &observed);
    assert_eq!(condition(&damaged, "Deletable").reason, "VolumesUnserved");
    assert!(condition(&damaged, "Deletable").message.contains("1 on a-1"));
    assert!(!damaged.release && damaged.remove.is_empty());
}

#[test]
fn paused_cluster_is_observed_but_not_changed() {
    let (mut cluster, mut observed) = running(json!({}));
    change(&mut cluster, "paused", json!(true));
    change(&mut cluster, "image", json!("forebay:2"));
    observed.stateful_sets.remove("a-1");
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.objects.is_empty() && found.remove.is_empty() && found.restart.is_none());
    assert_eq!(condition(&found, "Paused").status, "True");
    cluster.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    let found = desired(&cluster, &settings(), &observed);
    assert!(!found.release && found.remove.is_empty());
    assert_eq!(condition(&found, "Deletable").reason, "Paused");
}

#[test]
fn foreign_storage_classes_are_kept_and_own_outdated_ones_recreated() {
    let spec = json!({ "storageClasses": [{ "name": "fast", "backend": "main", "protection": "Seal" }] });
    let cluster = cluster(spec);
    let mut seen = observed();
    let class = desired(&cluster, &settings(), &seen).objects.pop().expect("a class");
    assert_eq!(class["parameters"]["protection"], "seal");
    for call in ["stage", "publish"] {
        let secret =
            |what: &str| &class["parameters"][format!("csi.storage.k8s.io/node-{call}-secret-{what}")];
        assert_eq!((secret("name"), secret("namespace")), (&json!("forebay-${pv.name}"), &json!("ns")));
    }
    let mut found: StorageClass = serde_json::from_value(class).expect("a StorageClass");
    seen.storage_classes.insert("fast".to_owned(), found.clone());
    assert!(desired(&cluster, &settings(), &seen).remove.is_empty());
    found.parameters.as_mut().expect("parameters").insert("protection".to_owned(), "sign".to_owned());
    seen.storage_classes.insert("fast".to_owned(), found.clone());
    assert_eq!(removed(&desired(&cluster, &settings(), &seen)), ["StorageClass fast"]);
    // A copy has the labels and annotations of the class.
    let mut copy = found.clone();
    copy.metadata.name = Some("copy".to_owned());
    seen.storage_classes.insert("copy".to_owned(), copy);
    assert_eq!(removed(&desired(&cluster, &settings(), &seen)), ["StorageClass fast"]);
    let mut former = found.clone();
    former.metadata.name = Some("former".to_owned());
    former
        .metadata
        .annotations
        .as_mut()
        .expect("annotations")
        .insert("storage.forebay.io/class".into(), "former".into());
    seen.storage_classes.insert("former".to_owned(), former);
    assert_eq!(removed(&desired(&cluster, &settings(), &seen)), ["StorageClass fast", "StorageClass former"]);
    seen.storage_classes.remove("former");
    found.metadata.labels = None;
    seen.storage_classes.insert("fast".to_owned(), found);
    let foreign = desired(&cluster, &settings(), &seen);
    assert!(foreign.remove.is_empty());
    assert!(!names_of(&foreign).contains(&"StorageClass fast".to_owned()));
    assert_eq!(condition(&foreign, "Valid").reason, "StorageClassConflict");
}

#[test]
fn invalid_spec_changes_no_objects() {
    let (mut cluster, observed) = running(json!({}));
    change(&mut cluster, "image", json!("NO IMAGE"));
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.objects.is_empty() && found.remove.is_empty() && found.restart.is_none());
    assert_eq!(
        (condition(&found, "Valid").status.as_str(), condition(&found, "Valid").reason.as_str()),
        ("False", "InvalidImage")
    );
    assert_eq!(found.status.instances[0].phase, InstancePhase::Ready, "servers continue");
}

#[test]
fn nodes_with_conflicting_host_network_ports_are_avoided() {
    let mut seen = observed();
    seen.elsewhere =
        vec![("n1".to_owned(), "b-0".to_owned(), vec![445]), ("n2".to_owned(), "c-0".to_owned(), vec![9999])];
    let found = desired(&cluster(json!({ "instances": 1 })), &settings(), &seen);
    assert_eq!(found.status.instances[0].node, "n2");
    assert_eq!(found.status.nodes[0].reason, "Occupied");
}

#[test]
fn missing_backend_directory_is_reported_for_its_node() {
    let (mut cluster, mut observed) = running(json!({ "instances": 1 }));
    observed.pods.get_mut("a-0").expect("it is there").status = None;
    observed
        .mount_failures
        .insert("a-0".to_owned(), "hostPath type check failed: /mnt/a is not a directory".to_owned());
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(found.status.instances[0].phase, InstancePhase::NotReady);
    assert_eq!(
        (found.status.nodes[0].fits, found.status.nodes[0].reason.as_str()),
        (false, "BackendMissing")
    );
    settle(&mut cluster, &mut observed, 1);
    assert_eq!(cluster.status.expect("a status").instances[0].node, "n1", "it does not move");
}

#[test]
fn transition_time_changes_only_with_the_condition() {
    let (cluster, mut observed) = running(json!({}));
    observed.now += Duration::from_secs(3600);
    let later = desired(&cluster, &settings(), &observed);
    assert_eq!(Some(&later.status), cluster.status.as_ref());
    observed.reports.insert("a-0".to_owned(), Report::Silent("x".to_owned()));
    let broken = desired(&cluster, &settings(), &observed);
    assert_eq!(condition(&broken, "Ready").last_transition_time.0, observed.now);
    assert_eq!(condition(&broken, "Valid").last_transition_time.0, now());
}

#[test]
fn status_size_is_bounded_with_ten_thousand_nodes() {
    let mut seen = observed();
    for n in 0..10_000 {
        let mut node = Node::clone(&seen.nodes[0]);
        node.metadata.name = Some(format!("node-{n:05}"));
        node.status = None;
        seen.nodes.push(Arc::new(node));
    }
    let found = desired(&cluster(json!({ "instances": 5 })), &settings(), &seen);
    assert_eq!(found.status.nodes.len(), crate::limits::NODE_VERDICTS_MAX);
    let placed = condition(&found, "InstancesPlaced");
    assert!(placed.message.len() <= crate::limits::CONDITION_MESSAGE_MAX + 3);
    assert!(serde_json::to_string(&found.status).expect("JSON").len() < 200_000);
}

#[test]
fn instance_names_are_parsed_strictly() {
    for (name, expected) in [
        ("a-0", Some(0)),
        ("a-12", Some(12)),
        ("a-01", None),
        ("a-", None),
        ("a--1", None),
        ("ab-0", None),
        ("a-x", None),
    ] {
        assert_eq!(ordinal("a", name), expected, "{name}");
    }
}

#[test]
fn sizes_are_formatted_with_binary_units() {
    for (bytes, words) in
        [(0, "0"), (1023, "1023"), (1 << 40, "1.0Ti"), (15 << 30, "15Gi"), (i64::MAX, "8.0Ei")]
    {
        assert_eq!(status::bytes(bytes), words);
    }
}

/// Returns the resources and capabilities of an instance's container, and the server's configuration.
fn container_of(found: &Desired, instance: &str) -> (Value, Value, String) {
    let of = |kind: &str, name: &str| {
        let is = |o: &&Value| o["kind"] == kind && o["metadata"]["name"] == name;
        found.objects.iter().find(is).unwrap_or_else(|| panic!("no {kind} {name}"))
    };
    let container = &of("StatefulSet", instance)["spec"]["template"]["spec"]["containers"][0];
    let file = &of("ConfigMap", &format!("{instance}-config"))["data"]["server.toml"];
    (
        container["resources"].clone(),
        container["securityContext"]["capabilities"]["add"].clone(),
        file.as_str().expect("a file").to_owned(),
    )
}

/// Gives node `n1` an RDMA port; its kubelet has `shares` shares of it.
fn with_port(observed: &mut Observed, shares: &str) {
    let storage = json!({
        "apiVersion": "storage.forebay.io/v1alpha1", "kind": "StorageNode", "metadata": { "name": "n1" }, "spec": {},
        "status": { "rdmaDevices": [{ "name": "mlx5_0", "ports": [{
            "port": 1, "linkLayer": "Ethernet", "state": "ACTIVE", "rateGbps": 100, "netdev": "ens1", "usable": true,
        }] }] },
    });
    observed.storage_nodes = vec![Arc::new(serde_json::from_value(storage).expect("a StorageNode"))];
    offer(observed, shares);
}

fn offer(observed: &mut Observed, shares: &str) {
    let mut node = observed.nodes[0].as_ref().clone();
    let allocatable =
        [("storage.forebay.io/rdma".to_owned(), serde_json::from_value(json!(shares)).expect("it is"))];
    node.status.as_mut().expect("a status").allocatable = Some(allocatable.into());
    observed.nodes[0] = Arc::new(node);
}

const RDMA: &str = "storage.forebay.io/rdma";

#[test]
fn instance_requests_the_rdma_resource_that_its_node_offers() {
    let mut observed = observed();
    with_port(&mut observed, "64");
    let resources = json!({ "limits": { "resources": { "limits": { "memory": "1Gi" } } } });
    let found = desired(&cluster(resources), &settings(), &observed);
    let (resources, capabilities, file) = container_of(&found, "a-0");
    assert_eq!(resources, json!({ "limits": { "memory": "1Gi", RDMA: "1" }, "requests": { RDMA: "1" } }));
    assert_eq!(
        capabilities,
        json!(["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "NET_BIND_SERVICE", "SYS_ADMIN", "IPC_LOCK"])
    );
    assert!(file.contains("iwarp_port = 5445") && !file.contains("rdma = "), "{file}");
    // The other instance's node has no port.
    let (resources, capabilities, _) = container_of(&found, "a-1");
    assert_eq!(resources, json!({ "limits": { "memory": "1Gi" } }));
    assert_eq!(
        capabilities,
        json!(["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "NET_BIND_SERVICE", "SYS_ADMIN"])
    );
}

#[test]
fn rdma_resource_is_requested_only_if_configured_and_available() {
    let asks = |spec: Value, shares: &str| {
        let mut observed = observed();
        with_port(&mut observed, shares);
        let found = desired(&cluster(spec), &settings(), &observed);
        let (resources, _, file) = container_of(&found, "a-0");
        (!resources["limits"][RDMA].is_null(), file.contains("rdma = \"off\""))
    };
    let rdma = |placement: Value| json!({ "placement": { "rdma": placement } });
    assert_eq!(asks(json!({}), "64"), (true, false));
    assert_eq!(asks(json!({}), "0"), (false, false), "the kubelet would not start the pod");
    assert_eq!(asks(rdma(json!({ "minRateGbps": 200 })), "64"), (false, false), "too slow");
    assert_eq!(asks(json!({ "network": { "transport": "TCP" } }), "64"), (false, true));
    let required = json!({
        "network": { "transport": "RDMA" }, "placement": { "rdma": { "requirement": "Required" } },
    });
    assert_eq!(asks(required, "0"), (true, false), "the pending pod shows what is missing");
}

#[test]
fn server_falls_back_to_tcp_only_if_it_cannot_be_scheduled_with_rdma() {
    let mut cluster = cluster(json!({ "instances": 1 }));
    let mut observed = observed();
    with_port(&mut observed, "64");
    for _ in 0..3 {
        settle(&mut cluster, &mut observed, 1000);
    }
    offer(&mut observed, "0");
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.restart.is_none(), "{:?}", found.restart);
    assert_eq!(container_of(&found, "a-0").0["limits"][RDMA], "1");

    // The pod was recreated in the meantime, and no node fits it.
    let waiting = |observed: &mut Observed, seconds: i64| {
        let since = observed.now - k8s_openapi::jiff::SignedDuration::from_secs(seconds);
        let pod = observed.pods.get_mut("a-0").expect("it runs");
        pod.spec.as_mut().expect("a spec").node_name = None;
        pod.status = serde_json::from_value(json!({ "phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "lastTransitionTime": since.to_string(),
        }] }))
        .expect("a status");
    };
    waiting(&mut observed, 10);
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(container_of(&found, "a-0").0["limits"][RDMA], "1", "the node plugin may be restarting");
    waiting(&mut observed, 61);
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(
        container_of(&found, "a-0").0["limits"][RDMA],
        Value::Null,
        "it falls back to TCP and continues to serve"
    );
    // The StatefulSet is updated first, and then the pod is recreated.
    settle(&mut cluster, &mut observed, 1000);
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(found.restart.map(|r| r.name), Some("a-0-0".to_owned()));
}

#[test]
fn server_is_restarted_to_get_a_later_rdma_device() {
    let mut cluster = cluster(json!({
        "instances": 1, "placement": { "rdma": { "devices": ["mlx5_*"], "minRateGbps": 100 } },
    }));
    let mut observed = observed();
    with_port(&mut observed, "64");
    for _ in 0..3 {
        settle(&mut cluster, &mut observed, 1000);
    }
    let restart = |later: &str, observed: &Observed| {
        let mut observed = observed.clone();
        let Some(Report::Answered(report)) = observed.reports.get_mut("a-0") else { panic!("it answers") };
        report.later_rdma_devices = vec![later.to_owned()];
        desired(&cluster, &settings(), &observed).restart
    };
    assert_eq!(restart("bnxt_re0", &observed), None, "not one of those chosen");
    assert_eq!(restart("mlx5_1", &observed), None, "the node does not have it any more");
    let found = restart("mlx5_0", &observed).expect("a restart");
    assert_eq!(found.name, "a-0-0");
    assert!(
        found.why.contains("RDMA device mlx5_0, which appeared after its container was created"),
        "{}",
        found.why
    );
    offer(&mut observed, "0");
    assert_eq!(restart("mlx5_0", &observed), None, "the new container would not get it");
}

#[test]
fn pod_with_a_vanished_rdma_device_is_recreated() {
    let mut cluster = cluster(json!({ "instances": 1 }));
    let mut observed = observed();
    with_port(&mut observed, "64");
    for _ in 0..3 {
        settle(&mut cluster, &mut observed, 1000);
    }
    let restart = |seconds: i64, says: &str| {
        let mut observed = observed.clone();
        let since = observed.now - k8s_openapi::jiff::SignedDuration::from_secs(seconds);
        let pod = observed.pods.get_mut("a-0").expect("it runs");
        pod.metadata.creation_timestamp = serde_json::from_value(json!(since.to_string())).expect("a time");
        pod.status = serde_json::from_value(json!({ "phase": "Pending", "containerStatuses": [{
            "name": "server", "image": "x", "imageID": "", "ready": false, "restartCount": 0, "started": false,
            "state": { "waiting": { "reason": "CreateContainerError", "message": says } },
        }] }))
        .expect("a status");
        observed.reports.remove("a-0");
        desired(&cluster, &settings(), &observed).restart.map(|r| r.why)
    };
    let gone = "failed to generate spec: lstat /dev/infiniband/uverbs1: no such file or directory";
    assert_eq!(restart(59, gone), None, "it may be coming");
    assert!(
        restart(60, gone).expect("a restart").contains("the RDMA device allocated to a-0 no longer exists")
    );
    assert_eq!(restart(60, "no such image"), None);
}

#[test]
fn storage_classes_carry_the_transport_of_their_cluster() {
    let parameter = |spec: Value| {
        let mut spec = spec;
        spec["storageClasses"] = json!([{ "name": "s" }]);
        let found = desired(&cluster(spec), &settings(), &observed());
        let class = found.objects.iter().find(|o| o["kind"] == "StorageClass").expect("a class").clone();
        class["parameters"]["transport"].clone()
    };
    assert_eq!(parameter(json!({})), Value::Null);
    assert_eq!(parameter(json!({ "network": { "transport": "TCP" } })), "tcp");
    assert_eq!(parameter(json!({ "network": { "transport": "RDMA" } })), "rdma");
}

#[test]
fn objects_of_directory_clusters_are_unchanged() {
    let (cluster, observed) = running(json!({ "storageClasses": [{ "name": "c" }] }));
    let found = desired(&cluster, &settings(), &observed);
    // If this hash changes, upgrading the operator may restart every existing server.
    assert_eq!(objects::hash(&json!(found.objects)), "3ff098cb15eabdba6d82cae68904ad38");
}
