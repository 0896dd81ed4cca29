use super::*;
use forebay_api::cluster::{RequiredLinkLayer, Spread};
use forebay_api::node::{LinkLayer, StorageNodeSpec, StorageNodeStatus};
use serde_json::json;
use std::sync::Arc;

fn node(name: &str) -> Node {
    serde_json::from_value(json!({
        "metadata": { "name": name, "labels": { "zone": "a", "pool": "storage" } },
        "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
    }))
    .expect("a Node")
}

fn port(netdev: &str, link_layer: LinkLayer, rate_gbps: u32, usable: bool) -> RdmaPort {
    RdmaPort {
        port: 1,
        link_layer,
        state: if usable { "ACTIVE" } else { "DOWN" }.to_owned(),
        rate_gbps,
        netdev: (!netdev.is_empty()).then(|| netdev.to_owned()),
        usable,
        reason: if usable { String::new() } else { "the link is down".to_owned() },
        ..RdmaPort::default()
    }
}

fn storage(name: &str, devices: &[(&str, RdmaPort)]) -> StorageNode {
    let rdma_devices = devices
        .iter()
        .map(|(name, port)| RdmaDevice {
            name: (*name).to_owned(),
            ports: vec![port.clone()],
            ..RdmaDevice::default()
        })
        .collect();
    let mut node = StorageNode::new(name, StorageNodeSpec::default());
    node.status = Some(StorageNodeStatus { rdma_devices, ..StorageNodeStatus::default() });
    node
}

fn spec(placement: serde_json::Value) -> StorageClusterSpec {
    let backend = json!({ "name": "main", "kind": "Directory", "directory": { "path": "/mnt/a" } });
    serde_json::from_value(json!({ "backends": [backend], "placement": placement })).expect("a spec")
}

fn verdict(placement: serde_json::Value, node: &Node, storage: Option<&StorageNode>) -> Verdict {
    let storage: Vec<Arc<StorageNode>> = storage.into_iter().cloned().map(Arc::new).collect();
    let nodes = [Arc::new(node.clone())];
    judge(&spec(placement), &nodes, &storage, &Objections::new()).remove(0)
}

#[test]
fn node_verdict_follows_its_best_rdma_port() {
    use LinkLayer::{Ethernet, InfiniBand};
    let roce = ("mlx5_0", port("ens1np0", Ethernet, 100, true));
    let ib = ("mlx5_1", port("ibp1", InfiniBand, 400, true));
    let down = ("mlx5_2", port("ens2np0", Ethernet, 200, false));
    let bare = ("mlx5_3", port("", Ethernet, 100, true));
    let required = |more: serde_json::Value| {
        let mut rdma = json!({ "requirement": "Required" });
        for (key, value) in more.as_object().expect("fields") {
            rdma[key.as_str()] = value.clone();
        }
        json!({ "rdma": rdma })
    };
    type Row = (serde_json::Value, Vec<(&'static str, RdmaPort)>, Reason, &'static str);
    let table: Vec<Row> = vec![
        (json!({}), vec![roce.clone()], Reason::Fits, "mlx5_0/1, 100 Gb/s"),
        (json!({}), vec![], Reason::RdmaMissing, "no RDMA device"),
        (json!({}), vec![down.clone()], Reason::RdmaPortDown, "mlx5_2/1: the link is down"),
        (json!({}), vec![down.clone(), roce.clone()], Reason::Fits, "mlx5_0/1"),
        (json!({ "minRateGbps": 200 }), vec![roce.clone()], Reason::RdmaTooSlow, "has 100 Gb/s"),
        // A faster port that is down does not help.
        (json!({ "minRateGbps": 200 }), vec![roce.clone(), down.clone()], Reason::RdmaTooSlow, "mlx5_0/1"),
        (json!({ "minRateGbps": 200 }), vec![roce.clone(), ib.clone()], Reason::Fits, "mlx5_1/1"),
        (
            json!({ "linkLayer": "InfiniBand" }),
            vec![roce.clone()],
            Reason::WrongLinkLayer,
            "mlx5_0/1 is Ethernet",
        ),
        (json!({ "linkLayer": "InfiniBand" }), vec![roce.clone(), ib.clone()], Reason::Fits, "mlx5_1/1"),
        (json!({ "linkLayer": "Ethernet" }), vec![ib.clone(), down.clone()], Reason::RdmaPortDown, "mlx5_2"),
        (json!({ "devices": ["bnxt_*"] }), vec![roce.clone()], Reason::DeviceNotSelected, "mlx5_0 (ens1np0)"),
        (json!({ "devices": ["bnxt_*", "mlx5_?"] }), vec![roce.clone()], Reason::Fits, "mlx5_0"),
        (json!({ "netdevs": ["ens*"] }), vec![bare.clone()], Reason::DeviceNotSelected, "no netdev"),
        (json!({ "netdevs": ["ens*np0"] }), vec![bare, roce.clone()], Reason::Fits, "mlx5_0"),
        (
            json!({ "devices": ["mlx5_1"], "netdevs": ["ens*"] }),
            vec![roce, ib],
            Reason::DeviceNotSelected,
            "mlx5_0",
        ),
    ];
    for (more, devices, reason, words) in table {
        let verdict = verdict(required(more.clone()), &node("n"), Some(&storage("n", &devices)));
        assert_eq!(verdict.reason, reason, "{more} {devices:?}: {}", verdict.message);
        assert!(verdict.message.contains(words), "{more}: {}", verdict.message);
    }
}

#[test]
fn readiness_selectors_taints_and_topology_decide_node_verdicts() {
    let roce = storage("n", &[("mlx5_0", port("e", LinkLayer::Ethernet, 100, true))]);
    let with = |change: serde_json::Value| {
        let mut value = serde_json::to_value(node("n")).expect("JSON");
        for (key, inner) in change.as_object().expect("fields") {
            value[key.as_str()] = inner.clone();
        }
        serde_json::from_value::<Node>(value).expect("a Node")
    };
    let tainted =
        with(json!({ "spec": { "taints": [{ "key": "gpu", "value": "yes", "effect": "NoSchedule" }] } }));
    let softly = with(json!({ "spec": { "taints": [{ "key": "gpu", "effect": "PreferNoSchedule" }] } }));
    let table = [
        (json!({}), node("n"), Reason::Fits),
        (json!({ "nodeSelector": { "pool": "storage" } }), node("n"), Reason::Fits),
        (json!({ "nodeSelector": { "pool": "gpu" } }), node("n"), Reason::SelectorMismatch),
        (json!({ "nodeSelector": { "absent": "" } }), node("n"), Reason::SelectorMismatch),
        (
            json!({}),
            with(json!({ "status": { "conditions": [{ "type": "Ready", "status": "Unknown" }] } })),
            Reason::NodeNotReady,
        ),
        (json!({}), with(json!({ "status": {} })), Reason::NodeNotReady),
        (json!({}), with(json!({ "spec": { "unschedulable": true } })), Reason::Cordoned),
        (json!({}), tainted.clone(), Reason::TaintNotTolerated),
        (json!({}), softly, Reason::Fits),
        (json!({ "tolerations": [{ "key": "gpu", "operator": "Exists" }] }), tainted.clone(), Reason::Fits),
        (json!({ "tolerations": [{ "operator": "Exists" }] }), tainted.clone(), Reason::Fits),
        (
            json!({ "tolerations": [{ "key": "gpu", "value": "yes", "effect": "NoSchedule" }] }),
            tainted.clone(),
            Reason::Fits,
        ),
        (
            json!({ "tolerations": [{ "key": "gpu", "value": "no" }] }),
            tainted.clone(),
            Reason::TaintNotTolerated,
        ),
        (
            json!({ "tolerations": [{ "key": "gpu", "operator": "Exists", "effect": "NoExecute" }] }),
            tainted,
            Reason::TaintNotTolerated,
        ),
        (
            json!({ "spread": { "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule" } }),
            node("n"),
            Reason::TopologyKeyMissing,
        ),
        (json!({ "spread": { "topologyKey": "rack" } }), node("n"), Reason::Fits),
    ];
    for (placement, node, reason) in table {
        let found = verdict(placement.clone(), &node, Some(&roce));
        assert_eq!(found.reason, reason, "{placement}: {}", found.message);
        assert_eq!(found.fits() && found.preferred, found.fits(), "RDMA is there, and preferred by default");
    }
}

#[test]
fn unknown_storage_node_disqualifies_only_if_rdma_is_required() {
    let required = json!({ "rdma": { "requirement": "Required" } });
    assert_eq!(verdict(required, &node("n"), None).reason, Reason::StorageNodeUnknown);
    let preferred = verdict(json!({}), &node("n"), None);
    assert!(preferred.fits() && !preferred.preferred && preferred.message.contains("no node agent"));
    assert_eq!(verdict(json!({ "rdma": { "requirement": "None" } }), &node("n"), None).message, "");
}

#[test]
fn unschedulable_and_occupied_nodes_do_not_fit() {
    let mut storage = storage("n", &[]);
    storage.spec.unschedulable = true;
    assert_eq!(verdict(json!({}), &node("n"), Some(&storage)).reason, Reason::Cordoned);
    let objections = [("n".to_owned(), (Reason::Occupied, "b-0 is there".to_owned()))].into();
    let none: [Arc<StorageNode>; 0] = [];
    let verdicts = judge(&spec(json!({})), &[Arc::new(node("n"))], &none, &objections);
    assert_eq!(verdicts[0].reason, Reason::Occupied);
}

fn fit(name: &str, preferred: bool, domain: &str) -> Verdict {
    Verdict {
        node: name.to_owned(),
        reason: Reason::Fits,
        message: String::new(),
        preferred,
        domain: domain.to_owned(),
    }
}

fn unfit(name: &str) -> Verdict {
    Verdict { reason: Reason::RdmaPortDown, ..fit(name, false, "") }
}

fn seats(list: &[(&str, &str, bool)]) -> BTreeMap<String, Seat> {
    list.iter()
        .map(|(i, n, bound)| ((*i).to_owned(), Seat { node: (*n).to_owned(), bound: *bound }))
        .collect()
}

fn instances(count: u32) -> Vec<String> {
    (0..count).map(|n| format!("a-{n}")).collect()
}

/// Returns instance and node, for instances that have one.
fn given(
    spec: &StorageClusterSpec,
    count: u32,
    old: &[(&str, &str, bool)],
    verdicts: &[Verdict],
) -> Vec<(String, String)> {
    let seats = assign(spec, &instances(count), &seats(old), verdicts);
    seats.into_iter().map(|(i, s)| (i, s.node)).collect()
}

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
}

#[test]
fn instances_get_distinct_nodes_in_order_preferred_nodes_first() {
    let spec = spec(json!({}));
    let nodes = [fit("n1", false, ""), fit("n2", true, ""), unfit("n3"), fit("n4", true, "")];
    assert_eq!(given(&spec, 3, &[], &nodes), pairs(&[("a-0", "n2"), ("a-1", "n4"), ("a-2", "n1")]));
    assert_eq!(given(&spec, 4, &[], &nodes).len(), 3, "the fourth has no node");
    assert_eq!(given(&spec, 0, &[], &nodes), []);
    assert_eq!(given(&spec, 2, &[], &[]), []);
}

#[test]
fn unschedulable_instance_tries_the_nodes_in_rank_order_and_wraps_around() {
    let spec = spec(json!({}));
    let full = |name: &str, preferred| Verdict { reason: Reason::Unschedulable, ..fit(name, preferred, "") };
    let on = |node: &'static str, nodes: &[Verdict]| given(&spec, 1, &[("a-0", node, false)], nodes);
    // In rank order: n2, n4, n1, n3.
    let order = [("n2", "n4"), ("n4", "n1"), ("n1", "n3"), ("n3", "n2")];
    for (node, next) in order {
        let nodes = [fit("n1", false, ""), fit("n2", true, ""), fit("n3", false, ""), fit("n4", true, "")]
            .map(|v| if v.node == node { full(node, v.preferred) } else { v });
        assert_eq!(on(node, &nodes), pairs(&[("a-0", next)]), "after {node}");
    }
    // An instance that leaves its node for another reason gets the best node.
    assert_eq!(on("n2", &[fit("n1", true, ""), unfit("n2"), fit("n3", true, "")]), pairs(&[("a-0", "n1")]));
}

#[test]
fn bound_instances_stay_and_unbound_ones_move_only_off_unfit_nodes() {
    let spec = spec(json!({}));
    let nodes = [fit("n1", true, ""), fit("n2", true, ""), unfit("n3")];
    // Bound to a node that does not fit, and to one that is gone.
    let bound = [("a-0", "n3", true), ("a-1", "gone", true)];
    assert_eq!(given(&spec, 3, &bound, &nodes), pairs(&[("a-0", "n3"), ("a-1", "gone"), ("a-2", "n1")]));
    // Unbound instances stay on a node that fits, even if a better one ranks first, and leave one that does not fit.
    assert_eq!(given(&spec, 1, &[("a-0", "n2", false)], &nodes), pairs(&[("a-0", "n2")]));
    assert_eq!(given(&spec, 1, &[("a-0", "n3", false)], &nodes), pairs(&[("a-0", "n1")]));
    // Two instances claim the same node: the bound one gets it.
    let clash = [("a-0", "n1", false), ("a-1", "n1", true)];
    assert_eq!(given(&spec, 2, &clash, &nodes), pairs(&[("a-0", "n2"), ("a-1", "n1")]));
}

#[test]
fn instances_are_spread_over_topology_domains() {
    let nodes = [fit("n1", true, "x"), fit("n2", true, "x"), fit("n3", true, "x"), fit("n4", true, "y")];
    let soft = spec(json!({ "spread": { "topologyKey": "zone" } }));
    assert_eq!(
        given(&soft, 4, &[], &nodes),
        pairs(&[("a-0", "n1"), ("a-1", "n4"), ("a-2", "n2"), ("a-3", "n3")])
    );
    let mut hard = soft.clone();
    hard.placement.spread = Some(Spread {
        topology_key: "zone".to_owned(),
        max_skew: 1,
        when_unsatisfiable: WhenUnsatisfiable::DoNotSchedule,
    });
    assert_eq!(given(&hard, 4, &[], &nodes), pairs(&[("a-0", "n1"), ("a-1", "n4"), ("a-2", "n2")]));
}

#[test]
fn message_for_an_unplaced_instance_counts_the_reasons() {
    let nodes = [unfit("n1"), unfit("n2"), fit("n3", true, "")];
    let taken = seats(&[("a-0", "n3", true)]);
    let words = explain(&nodes, &taken);
    assert!(words.contains("of 3 nodes: 2 RdmaPortDown, 1 already runs another instance"), "{words}");
    assert_eq!(explain(&[], &taken), "there are no nodes");
}

#[test]
fn unknown_link_layer_satisfies_no_requirement() {
    assert!(RequiredLinkLayer::Ethernet.is(LinkLayer::Ethernet));
    assert!(!RequiredLinkLayer::Ethernet.is(LinkLayer::Unknown));
    assert!(!RequiredLinkLayer::InfiniBand.is(LinkLayer::Unknown));
}

#[test]
fn glob_patterns_match_device_names() {
    for (pattern, name, expected) in [
        ("mlx5_*", "mlx5_0", true),
        ("mlx5_*", "mlx4_0", false),
        ("*", "", true),
        ("**", "x", true),
        ("?", "", false),
        ("a?c", "abc", true),
        ("*a*b", "xaxxb", true),
        ("*a*b", "xaxxbc", false),
        ("", "", true),
        ("", "x", false),
    ] {
        assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
    }
    // Takes exponential time in a recursive implementation.
    assert!(!matches(&"*a".repeat(30), &"a".repeat(29)));
}
