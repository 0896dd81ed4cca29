//! Nodes in placement and takeovers: what they lack, which instances leave them, which hosts the bundled target allows.

use super::moves_tests::{fabric_cluster, fabric_running, node_with, target_cluster, target_file};
use super::*;
use forebay_api::node::{Fact, StorageNode};

fn storage_node(name: &str, nvme_tcp: Fact, nvme_rdma: Fact) -> Arc<StorageNode> {
    let mut node = StorageNode::new(name, forebay_api::StorageNodeSpec::default());
    let mut status = forebay_api::StorageNodeStatus::default();
    status.kernel.nvme_tcp = nvme_tcp;
    status.kernel.nvme_rdma = nvme_rdma;
    node.status = Some(status);
    Arc::new(node)
}

/// The fixtures have one path over TCP and one over RDMA.
#[test]
fn node_without_nvme_modules_is_not_a_spare() {
    let (cluster, mut observed) = fabric_running(json!({}));
    assert_eq!(condition(&desired(&cluster, &settings(), &observed), "TakeoverReady").reason, "SpareNode");
    observed.storage_nodes = vec![storage_node("n3", Fact::No, Fact::No)];
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(condition(&found, "TakeoverReady").reason, "NoSpareNode");
    let reported = found.status.nodes.iter().find(|n| n.name == "n3").expect("n3");
    assert_eq!((reported.fits, reported.reason.as_str()), (false, "FabricMissing"));
    assert!(reported.message.contains("modprobe"), "{}", reported.message);
    // One usable path of two is enough, and an unknown fact is no objection.
    for (tcp, rdma) in [(Fact::Yes, Fact::No), (Fact::Unknown, Fact::No), (Fact::No, Fact::Yes)] {
        observed.storage_nodes = vec![storage_node("n3", tcp, rdma)];
        assert_eq!(
            condition(&desired(&cluster, &settings(), &observed), "TakeoverReady").reason,
            "SpareNode"
        );
    }
}

#[test]
fn autoscaler_taints_move_instances_like_a_cordon() {
    for key in ["ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted"] {
        let (cluster, mut observed) = fabric_running(json!({}));
        let taint = json!({ "taints": [{ "key": key, "effect": "NoSchedule" }] });
        observed.nodes[0] = node_with("n1", "10.0.0.1", taint);
        let found = desired(&cluster, &settings(), &observed);
        let [step] = found.moves.as_slice() else { panic!("{key}: {:?}", found.moves) };
        assert_eq!((step.instance.as_str(), step.node.as_str()), ("a-0", "n3"), "{key}");
        assert_eq!(step.moved.as_ref().map(|m| m.why.as_str()), Some("NodeCordoned"));
    }
}

#[test]
fn node_of_another_platform_does_not_fit() {
    for (label, value) in [("kubernetes.io/os", "windows"), ("kubernetes.io/arch", "s390x")] {
        let mut observed = observed();
        let mut node = serde_json::to_value(&*observed.nodes[0]).expect("JSON");
        node["metadata"]["labels"] = json!({ label: value });
        observed.nodes[0] = Arc::new(serde_json::from_value(node).expect("a Node"));
        let found = desired(&cluster(json!({})), &settings(), &observed);
        let reported = found.status.nodes.iter().find(|n| n.name == "n1").expect("n1");
        assert_eq!((reported.fits, reported.reason.as_str()), (false, "PlatformMismatch"), "{label}");
        assert_eq!(found.status.instances[0].node, "n2");
    }
}

#[test]
fn node_without_enough_allocatable_resources_does_not_fit() {
    let spec = json!({ "limits": { "resources": { "requests": { "cpu": "2", "memory": "4Gi" } } } });
    for (amounts, fits) in [
        (json!({ "cpu": "4", "memory": "8Gi" }), true),
        (json!({ "cpu": "1500m", "memory": "8Gi" }), false),
        (json!({ "cpu": "4", "memory": "3Gi" }), false),
    ] {
        let mut observed = observed();
        let mut node = serde_json::to_value(&*observed.nodes[0]).expect("JSON");
        node["status"]["allocatable"] = amounts.clone();
        observed.nodes[0] = Arc::new(serde_json::from_value(node).expect("a Node"));
        let found = desired(&cluster(spec.clone()), &settings(), &observed);
        let reported = found.status.nodes.iter().find(|n| n.name == "n1").expect("n1");
        assert_eq!(reported.fits, fits, "{amounts}: {reported:?}");
    }
}

/// The scheduler's verdict counts, too, as long as the instance is not bound to its node.
#[test]
fn unschedulable_instance_moves_to_another_node() {
    let mut cluster = cluster(json!({ "instances": 1 }));
    let mut observed = observed();
    settle(&mut cluster, &mut observed, 1000);
    observed.reports.clear();
    let unscheduled = |since: &str| {
        json!({ "conditions": [{ "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes are available: 1 Insufficient cpu", "lastTransitionTime": since }] })
    };
    let since = |seconds: i64| (now() - k8s_openapi::jiff::SignedDuration::from_secs(seconds)).to_string();
    let mut wait = |seconds: i64| {
        let mut pod = serde_json::to_value(&observed.pods["a-0"]).expect("JSON");
        pod["status"] = unscheduled(&since(seconds));
        pod["spec"]["nodeName"] = Value::Null;
        observed.pods.insert("a-0".to_owned(), serde_json::from_value(pod).expect("a Pod"));
        observed.bound.clear();
        observed.recorded.clear();
        let mut fresh = cluster.clone();
        for instance in fresh.status.iter_mut().flat_map(|s| &mut s.instances) {
            instance.capacity_bytes = 0;
        }
        desired(&fresh, &settings(), &observed)
    };
    assert_eq!(wait(5).status.instances[0].node, "n1", "the scheduler may still find room");
    let found = wait(300);
    assert_eq!(found.status.instances[0].node, "n2");
    let reported = found.status.nodes.iter().find(|n| n.name == "n1").expect("n1");
    assert!(reported.message.contains("Insufficient cpu"), "{reported:?}");
}

/// Only the current node's rejection is visible: the earlier nodes must not be retried until all others have been tried.
#[test]
fn instance_tries_every_node_before_it_retries_one() {
    let mut cluster = cluster(json!({ "instances": 1 }));
    let mut observed = observed();
    let mut tried = Vec::new();
    for _ in 0..5 {
        settle(&mut cluster, &mut observed, 1000);
        // There is no room for the new pod either.
        let mut pod = serde_json::to_value(&observed.pods["a-0"]).expect("JSON");
        let since = now() - k8s_openapi::jiff::SignedDuration::from_secs(300);
        pod["status"] = json!({ "conditions": [{ "type": "PodScheduled", "status": "False",
            "reason": "Unschedulable", "message": "Insufficient cpu", "lastTransitionTime": since.to_string() }] });
        pod["spec"]["nodeName"] = Value::Null;
        observed.pods.insert("a-0".to_owned(), serde_json::from_value(pod).expect("a Pod"));
        observed.reports.clear();
        observed.bound.clear();
        observed.recorded.clear();
        let node = cluster.status.as_ref().expect("a status").instances[0].node.clone();
        let pinned = pinned_to(&observed.pods["a-0"]).expect("a node").to_owned();
        if node == pinned {
            tried.push(node);
            continue;
        }
        // The StatefulSet already names another node, and the pod for the previous node still exists: that does not count as
        // a rejection of the new node.
        let again = desired(&cluster, &settings(), &observed);
        assert_eq!(again.status.instances[0].node, node, "it stays there for a try");
        // The pod is recreated.
        observed.pods.remove("a-0");
    }
    assert_eq!(tried, ["n1", "n2", "n3"]);
}

#[test]
fn bundled_target_always_allows_the_current_node_of_an_instance() {
    let mut cluster = target_cluster();
    let mut observed = observed();
    observed.nodes.extend((0..300).map(|n| node(&format!("a{n:03}"), "10.1.0.1")));
    moves_tests::see_through(&mut cluster, &mut observed);
    // The instance's node has a name that sorts behind 256 others.
    let own = "n3".to_owned();
    observed.bound.insert("a-0".to_owned(), own.clone());
    let found = desired(&cluster, &settings(), &observed);
    let place = observed.record.places[&("a-0".to_owned(), "main".to_owned())].node.clone();
    let (_, file) = target_file(&found, &place);
    let wanted = forebay_nvmeof::HostIdentity::of_machine("a-cluster", "", "a-0", &own)
        .expect("an identity")
        .nqn()
        .as_str()
        .to_owned();
    let mine = file["subsystem"]
        .as_array()
        .expect("subsystems")
        .iter()
        .find(|s| s["nqn"].as_str().expect("an NQN").ends_with("a-0"));
    let hosts = mine.expect("its subsystem")["hosts"].as_array().expect("hosts").clone();
    assert!(hosts.len() <= 256);
    assert!(hosts.iter().any(|h| h.as_str() == Some(wanted.as_str())), "{} hosts, not its own", hosts.len());
    // Adding or removing a node does not roll the target's pod either.
    let text = |found: &Desired| target_file(found, &place).0["spec"]["template"].to_string();
    let before = text(&found);
    observed.nodes.push(node("a999", "10.1.0.9"));
    assert_eq!(
        before,
        text(&desired(&cluster, &settings(), &observed)),
        "the pod is not recreated when hosts change"
    );
}

#[test]
fn reason_for_a_missing_pod_is_reported() {
    let mut cluster = fabric_cluster(json!({}));
    let mut observed = observed();
    moves_tests::see_through(&mut cluster, &mut observed);
    observed.pods.remove("a-0");
    observed.reports.remove("a-0");
    observed.creation_failures.insert(
        "a-0".to_owned(),
        "pods \"a-0-0\" is forbidden: violates PodSecurity \"baseline:latest\": privileged".to_owned(),
    );
    let found = desired(&cluster, &settings(), &observed);
    let reported = &found.status.instances[0];
    assert_eq!(reported.phase, InstancePhase::NotReady);
    assert!(reported.message.contains("violates PodSecurity"), "{}", reported.message);
}

/// A dead server of one cluster does not block the drain of healthy servers of another.
#[test]
fn every_cluster_has_its_own_disruption_budget() {
    let (cluster, mut observed) = fabric_running(json!({}));
    let found = desired(&cluster, &settings(), &observed);
    let budget = found.objects.iter().find(|o| o["kind"] == "PodDisruptionBudget").expect("one");
    let selected = budget["spec"]["selector"]["matchLabels"].as_object().expect("labels").clone();
    assert_eq!(selected[names::LABEL_CLUSTER], "a");
    let pod = observed.pods["a-0"].labels().clone();
    assert!(
        selected.iter().all(|(key, value)| pod.get(key).map(String::as_str) == value.as_str()),
        "{pod:?}"
    );
    observed.budgets = ["a-servers".to_owned(), "a-targets".to_owned()].into();
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(removed(&found), ["PodDisruptionBudget a-targets"], "there is no bundled target");
    let without = Settings { disruption_budgets: false, ..settings() };
    let found = desired(&cluster, &without, &observed);
    assert_eq!(removed(&found), ["PodDisruptionBudget a-servers", "PodDisruptionBudget a-targets"]);
}

#[test]
fn caching_and_io_settings_reach_the_server_configuration() {
    let (cluster, observed) = fabric_running(json!({}));
    let found = desired(&cluster, &settings(), &observed);
    let file = moves_tests::config(&found, "a-0-config-1");
    for key in ["caching", "directory_leases", "direct_reads"] {
        assert!(file["server"].get(key).is_none(), "{key}");
    }
    assert!(file["pool"][0]["nvmeof"].get("write_through").is_none());
    let mut backends = moves_tests::nvmeof(2);
    backends[0]["nvmeof"]["writeThrough"] = json!(false);
    let io = json!({ "caching": false, "directoryLeases": false, "directReads": true });
    let (cluster, observed) = fabric_running(json!({ "io": io, "backends": backends }));
    let found = desired(&cluster, &settings(), &observed);
    let file = moves_tests::config(&found, "a-0-config-1");
    assert_eq!(file["server"]["caching"].as_bool(), Some(false));
    assert_eq!(file["server"]["directory_leases"].as_bool(), Some(false));
    assert_eq!(file["server"]["direct_reads"].as_bool(), Some(true));
    assert_eq!(file["pool"][0]["nvmeof"]["write_through"].as_bool(), Some(false));
}

/// A pod without requests is evicted first.
#[test]
fn servers_and_targets_have_memory_requests() {
    let mut cluster = target_cluster();
    let mut observed = observed();
    moves_tests::see_through(&mut cluster, &mut observed);
    let requests = |found: &Desired| -> Vec<Value> {
        let sets = found.objects.iter().filter(|o| o["kind"] == "StatefulSet");
        sets.map(|s| {
            s["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"].clone()
        })
        .collect()
    };
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(requests(&found), ["256Mi", "256Mi", "64Mi", "64Mi"]);
    let wanted = serde_json::from_value(json!({ "requests": { "memory": "1Gi" } })).expect("resources");
    cluster.spec.backends[0].target.as_mut().expect("a target").resources = Some(wanted);
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(requests(&found), ["256Mi", "256Mi", "1Gi", "1Gi"]);
}
