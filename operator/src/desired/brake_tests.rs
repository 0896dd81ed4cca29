//! Takeovers pause while many nodes are silent, and a spare must be alive.

use super::moves_tests::{epochs, fabric_running, node_with, see_through, silence, write_moves};
use super::*;
use crate::brake::{Cause, Pause, Scope};
use crate::takeover::OUT_OF_SERVICE;

fn pause() -> Option<Pause> {
    let cause = Cause::ManyNodesSilent { scope: Scope::Cluster, silent: 3, of: 3 };
    Some(Pause { cause, settling: false })
}

/// The control plane is cut off from all workers, and evicts their pods after a while.
fn cut_off(observed: &mut Observed) {
    for node in ["n1", "n2", "n3"] {
        silence(observed, node, 60);
    }
    observed.reports.clear();
    observed.pause = pause();
}

#[test]
fn partition_and_its_recovery_move_no_instance_and_delete_no_pod() {
    let (mut cluster, mut observed) = fabric_running(json!({}));
    // A further node that still looks live: without the pause it would take over an instance.
    observed.nodes.push(node("n4", "10.0.0.4"));
    cut_off(&mut observed);
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.moves.is_empty() && found.end.is_empty() && found.restart.is_none(), "{:?}", found.moves);
    let reported = condition(&found, "TakeoverPaused");
    assert_eq!((reported.status.as_str(), reported.reason.as_str()), ("True", "ManyNodesSilent"));
    assert!(
        reported.message.contains("3 of 3") && reported.message.contains(OUT_OF_SERVICE),
        "{}",
        reported.message
    );
    assert!(
        found.status.instances[0].message.contains("takeovers are paused"),
        "{:?}",
        found.status.instances[0]
    );
    cluster.status = Some(found.status);
    // The partition heals: Leases are renewed, but pods are not ready yet and servers have not been queried yet.
    for node in ["n1", "n2", "n3"] {
        silence(&mut observed, node, 0);
    }
    let long_ago = (now() - k8s_openapi::jiff::SignedDuration::from_secs(900)).to_string();
    for pod in observed.pods.values_mut() {
        let mut value = serde_json::to_value(&*pod).expect("JSON");
        value["status"]["conditions"][0]["status"] = "False".into();
        value["status"]["conditions"][0]["lastTransitionTime"] = long_ago.clone().into();
        *pod = serde_json::from_value(value).expect("a Pod");
    }
    observed.pause = pause().map(|p| Pause { settling: true, ..p });
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.moves.is_empty() && found.end.is_empty(), "{:?}", found.moves);
    assert_eq!(condition(&found, "TakeoverPaused").status, "True");
    assert_eq!(epochs(&cluster), [("n1".to_owned(), 1), ("n2".to_owned(), 1)]);
}

#[test]
fn administrator_can_override_the_takeover_pause() {
    let (cluster, mut observed) = fabric_running(json!({}));
    observed.nodes.push(node("n4", "10.0.0.4"));
    cut_off(&mut observed);
    // One of the nodes.
    observed.nodes[0] =
        node_with("n1", "10.0.0.1", json!({ "taints": [{ "key": OUT_OF_SERVICE, "effect": "NoExecute" }] }));
    let found = desired(&cluster, &settings(), &observed);
    let to: Vec<_> = found.moves.iter().map(|m| (m.instance.as_str(), m.node.as_str())).collect();
    assert_eq!(to, [("a-0", "n4")]);
    // All silent nodes.
    let (mut cluster, mut observed) = fabric_running(json!({}));
    observed.nodes.extend([node("n4", "10.0.0.4"), node("n5", "10.0.0.5")]);
    cut_off(&mut observed);
    cluster.metadata.annotations =
        Some([(names::ANNOTATION_TAKE_OVER_ANYWAY.to_owned(), "true".to_owned())].into());
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(found.moves.len(), 2);
    let reported = condition(&found, "TakeoverPaused");
    assert_eq!((reported.status.as_str(), reported.reason.as_str()), ("False", "Overridden"));
}

#[test]
fn pods_are_not_force_deleted_while_takeovers_are_paused() {
    let (mut cluster, mut observed) = fabric_running(json!({}));
    // A planned move: the nodes fall silent before the old pod has ended.
    observed.nodes[0] = node_with("n1", "10.0.0.1", json!({ "unschedulable": true }));
    let step = desired(&cluster, &settings(), &observed);
    write_moves(&mut observed, &step.moves);
    moves_tests::settle_fabric(&mut cluster, &mut observed);
    cut_off(&mut observed);
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.end.iter().all(|pod| !pod.force), "{:?}", found.end);
    observed.pause = None;
    let found = desired(&cluster, &settings(), &observed);
    assert!(found.end.iter().any(|pod| pod.force), "{:?}", found.end);
}

/// Kubernetes still reports a spare in the same rack as ready, although it died with the node.
#[test]
fn spare_that_missed_a_lease_renewal_is_not_chosen() {
    let (mut cluster, mut observed) = fabric_running(json!({}));
    observed.nodes.push(node("n4", "10.0.0.4"));
    silence(&mut observed, "n1", 60);
    silence(&mut observed, "n3", 12);
    let found = desired(&cluster, &settings(), &observed);
    let to: Vec<_> = found.moves.iter().map(|m| (m.instance.as_str(), m.node.as_str())).collect();
    assert_eq!(to, [("a-0", "n4")]);
    // Nodes with observed Leases are preferred over unobserved ones.
    silence(&mut observed, "n3", 60);
    observed.nodes.push(node("n5", "10.0.0.5"));
    silence(&mut observed, "n5", 3);
    assert_eq!(desired(&cluster, &settings(), &observed).moves[0].node, "n5");
    see_through(&mut cluster, &mut observed);
    assert_eq!(epochs(&cluster)[0], ("n5".to_owned(), 2));
    observed.nodes.retain(|n| n.metadata.name.as_deref() != Some("n4"));
    let found = desired(&cluster, &settings(), &observed);
    assert_eq!(condition(&found, "TakeoverReady").reason, "NoSpareNode", "n1 and n3 are silent");
}
