use serde_json::{Value, json};

use super::*;
use crate::fixture::{self, NODES, fresh, healthy, object};

/// Returns errors, warnings and notes as `severity subject: summary`.
fn found(snapshot: &Snapshot) -> Vec<String> {
    examine(snapshot)
        .iter()
        .filter(|f| f.severity != Severity::Ok)
        .map(|f| format!("{:?} {}: {}", f.severity, f.subject, f.summary))
        .collect()
}

fn finding(snapshot: &Snapshot, part: &str) -> Finding {
    let findings = examine(snapshot);
    let found = findings.iter().find(|f| f.severity != Severity::Ok && f.summary.contains(part));
    found.unwrap_or_else(|| panic!("{part:?} is not in {findings:#?}")).clone()
}

fn with_storage_node(change: impl Fn(&mut Value)) -> Snapshot {
    let mut node = fixture::storage_node(NODES[0]);
    change(&mut node);
    Snapshot { storage_nodes: Ok(vec![object(node), object(fixture::storage_node(NODES[1]))]), ..healthy() }
}

fn with_cluster(change: impl Fn(&mut Value)) -> Snapshot {
    let mut cluster = fixture::cluster();
    change(&mut cluster);
    Snapshot { clusters: Ok(vec![object(cluster)]), ..healthy() }
}

#[test]
fn healthy_cluster_has_no_findings() {
    assert_eq!(found(&healthy()), [""; 0]);
    let text = render(&examine(&healthy()), false, Paint::new(false));
    assert_eq!(text, "0 errors, 0 warnings, 0 notes; 25 checks passed\n");
}

#[test]
fn a_fresh_installation_has_no_errors() {
    assert_eq!(found(&fresh()), ["Note cluster: there is no StorageCluster and no StorageClass yet"]);
    assert!(!has_errors(&examine(&fresh())));
}

#[test]
fn findings_are_shown_with_evidence_and_fix() {
    let mut snapshot =
        with_storage_node(|node| node["status"]["rdmaDevices"][0]["ports"][0]["mtu"] = json!(1500));
    snapshot.csi_nodes = Ok(vec![object(fixture::csi_node(NODES[0]))]);
    let text = render(&examine(&snapshot), false, Paint::new(false));
    assert_eq!(
        text,
        "\
node storage-1
  warning  RDMA port mlx5_0/1 has a small MTU: RDMA sends packets of less than 4096 bytes
           seen  ens1f0np0 has MTU 1500, but at least 4200 is needed
           fix   ip link set ens1f0np0 mtu 9000, on every host and switch of the fabric (docs/guides/rdma.md)

node storage-2
  error    its kubelet has not registered the driver: no pod on it can use a volume
           seen  CSINode storage-2 does not list csi.forebay.io
           fix   read the node plugin's log; kubeletDir of the chart must be the kubelet's --root-dir

1 error, 1 warning, 0 notes; 24 checks passed
"
    );
    let all = render(&examine(&snapshot), true, Paint::new(true));
    assert!(all.contains("\x1b[32mok     \x1b[0m  Kubernetes v1.36.3\n"), "{all}");
    assert!(all.contains("\x1b[31merror  \x1b[0m"), "{all}");
}

#[test]
fn cluster_wide_problems_are_found() {
    type Change = fn(&mut Snapshot);
    let cases: [(Severity, &str, &str, Change); 13] = [
        (Severity::Error, "v1.30.2 is too old", "1.32 or later", |s| s.version = Ok("v1.30.2".into())),
        (Severity::Note, "unknown Kubernetes version \"devel\"", "", |s| s.version = Ok("devel".into())),
        (Severity::Error, "kinds are not installed", "v1alpha1 is not served", |s| {
            s.served = Ok(None);
            s.clusters = Err("404".into());
            s.storage_nodes = Err("404".into());
        }),
        (Severity::Error, "StorageNode is not installed", "serves only StorageCluster", |s| {
            s.served = Ok(Some(vec!["StorageCluster".into()]));
        }),
        (Severity::Error, "no CSIDriver", "attacher", |s| s.csi_driver = Ok(None)),
        (Severity::Error, "to be attached", "attachRequired", |s| {
            s.csi_driver = Ok(Some(object(json!({"metadata": {"name": "x"}, "spec": {}}))));
        }),
        (Severity::Warning, "no StorageClass uses", "no claim can", |s| s.storage_classes = Ok(vec![])),
        (Severity::Error, "names a StorageCluster that does not exist", "forebay-system/other", |s| {
            let mut class = fixture::storage_class();
            class["parameters"]["cluster"] = json!("other");
            s.storage_classes = Ok(vec![object(class)]);
        }),
        (Severity::Error, "forebay names no StorageCluster", "parameters.cluster", |s| {
            let mut class = fixture::storage_class();
            class["parameters"] = json!({});
            s.storage_classes = Ok(vec![object(class)]);
        }),
        (Severity::Warning, "claim training/new is pending", "StorageClass forebay", |s| {
            s.claims = Ok(vec![object(fixture::claim("new", "Pending"))]);
        }),
        (Severity::Error, "claim training/old has lost its volume", "", |s| {
            s.claims = Ok(vec![object(fixture::claim("old", "Lost"))]);
        }),
        (Severity::Warning, "Forebay's pods could not be read", "forbidden", |s| {
            s.pods = Err("forbidden".into())
        }),
        (Severity::Error, "no pod of deployment/forebay-operator in namespace forebay-system", "", |s| {
            s.pods.as_mut().expect("pods").remove(0);
        }),
    ];
    for (severity, summary, evidence, change) in cases {
        let mut snapshot = healthy();
        change(&mut snapshot);
        let finding = finding(&snapshot, summary);
        assert_eq!(finding.severity, severity, "{summary}");
        assert!(finding.evidence.contains(evidence), "{finding:?}");
        assert!(severity < Severity::Warning || !finding.fix.is_empty(), "{finding:?}");
        // One cause leads to one finding.
        assert_eq!(found(&snapshot).len(), 1, "{:?}", found(&snapshot));
    }
    // Claims of other StorageClasses are ignored.
    let mut other = fixture::claim("theirs", "Pending");
    other["spec"]["storageClassName"] = json!("standard");
    assert_eq!(found(&Snapshot { claims: Ok(vec![object(other)]), ..healthy() }), [""; 0]);
}

#[test]
fn pods_that_are_not_ready_are_reported_with_the_cause() {
    let spoiled = |status: Value| {
        let mut pod = fixture::pod("forebay-csi-node-1", "csi-node", NODES[0]);
        pod["status"] = status;
        let mut snapshot = healthy();
        snapshot.pods.as_mut().expect("pods")[2] = object(pod);
        let finding = finding(&snapshot, "pod forebay-csi-node-1 is not ready");
        assert_eq!(finding.severity, Severity::Error);
        assert!(
            finding.fix.ends_with("kubectl -n forebay-system describe pod forebay-csi-node-1"),
            "{finding:?}"
        );
        finding.evidence
    };
    let waiting = |reason: &str, message: &str| {
        json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{"name": "driver", "image": "", "imageID": "", "ready": false, "restartCount": 3,
                "state": {"waiting": {"reason": reason, "message": message}},
                "lastState": {"terminated": {"exitCode": 4}}}]})
    };
    assert_eq!(
        spoiled(waiting("ImagePullBackOff", "back-off pulling image")),
        "container driver: ImagePullBackOff: back-off pulling image; exited with code 4 (on storage-1)"
    );
    assert!(
        spoiled(waiting("CrashLoopBackOff", ""))
            .starts_with("container driver: CrashLoopBackOff; exited with code 4")
    );
    let unscheduled = json!({"phase": "Pending", "conditions": [
        {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient memory."}]});
    assert!(spoiled(unscheduled).contains("cannot be scheduled: 0/3 nodes are available"));
    assert_eq!(
        spoiled(json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False",
        "message": "containers with unready status: [driver]"}]})),
        "Running: containers with unready status: [driver] (on storage-1)"
    );
}

#[test]
fn terminated_pod_is_only_a_note_if_another_pod_replaces_it() {
    let with = |component: &str, node: &str, deleted: bool| {
        let mut pod = fixture::pod("leftover", component, node);
        if deleted {
            pod["metadata"]["deletionTimestamp"] = json!("2026-11-21T12:00:00Z");
            pod["status"]["conditions"][1]["status"] = json!("False");
        } else {
            pod["status"] = json!({"phase": "Failed", "reason": "Evicted", "message": "low on memory"});
        }
        let mut snapshot = healthy();
        snapshot.pods.as_mut().expect("pods").insert(0, object(pod));
        snapshot
    };
    for deleted in [false, true] {
        for (component, node) in [("operator", "other"), ("csi-controller", "other"), ("csi-node", NODES[0])]
        {
            let snapshot = with(component, node, deleted);
            assert_eq!(
                found(&snapshot),
                ["Note cluster: pod leftover has terminated or is terminating; another pod replaces it"]
            );
            if !deleted {
                assert_eq!(
                    finding(&snapshot, "leftover").evidence,
                    format!("Failed: low on memory (on {node})")
                );
            }
            // The existing pods are still counted, and the leftover one is not.
            let text = render(&examine(&snapshot), true, Paint::new(false));
            assert!(text.contains("deployment/forebay-operator: 1 of 1 pods ready"), "{text}");
            assert!(text.contains("daemonset/forebay-csi-node: 2 of 2 pods ready"), "{text}");
        }
        // No other pod serves this node's pods, or this instance's volumes.
        for (component, node) in [("csi-node", "other"), ("server", NODES[0])] {
            let snapshot = with(component, node, deleted);
            assert_eq!(finding(&snapshot, "pod leftover is not ready").severity, Severity::Error);
        }
        // In this case the other pod is being deleted, too.
        let mut snapshot = with("operator", NODES[0], deleted);
        let pods = snapshot.pods.as_mut().expect("pods");
        pods[1].metadata.deletion_timestamp = pods[0].metadata.deletion_timestamp.clone();
        pods[1].status.as_mut().expect("a status").phase = Some("Failed".into());
        assert_eq!(finding(&snapshot, "pod leftover is not ready").severity, Severity::Error);
    }
}

#[test]
fn pod_of_the_chart_test_is_ignored() {
    let mut test = fixture::pod("forebay-test", "test", NODES[0]);
    test["status"] = json!({"phase": "Pending"});
    let mut snapshot = healthy();
    snapshot.pods.as_mut().expect("pods").push(object(test));
    assert_eq!(found(&snapshot), [""; 0]);
}

#[test]
fn storage_cluster_problems_are_found() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 10] = [
        ("Error storagecluster main: the operator cannot apply its objects", |c| {
            c["status"]["conditions"][1]["status"] = json!("True");
            c["status"]["conditions"][1]["reason"] = json!("ApplyFailed");
        }),
        ("Warning storagecluster main: it cannot have fewer instances yet", |c| {
            c["status"]["conditions"][1]["status"] = json!("True");
            c["status"]["conditions"][1]["reason"] = json!("ScaleDownRefused");
        }),
        ("Note storagecluster main: it is changing: RollingOut", |c| {
            c["status"]["conditions"][1]["status"] = json!("True");
            c["status"]["conditions"][1]["reason"] = json!("RollingOut");
        }),
        ("Error storagecluster main: not ready: InstancesNotReady", |c| {
            c["status"]["conditions"][0]["status"] = json!("False");
            c["status"]["conditions"][0]["reason"] = json!("InstancesNotReady");
        }),
        ("Error storagecluster main: CertificatesReady: Expired", |c| {
            c["status"]["conditions"][1] = json!({"type": "CertificatesReady", "status": "False", "reason": "Expired",
                "message": "m", "lastTransitionTime": "2026-11-21T12:00:00Z"});
        }),
        ("Error storagecluster main: the operator has not reconciled it", |c| c["status"] = json!({})),
        ("Warning storagecluster main: the operator has not acted on its latest spec yet", |c| {
            c["metadata"]["generation"] = json!(9);
        }),
        ("Note storagecluster main: it is paused: the operator changes nothing", |c| {
            c["spec"]["paused"] = json!(true)
        }),
        ("Error storagecluster main: instance main-1 is NotReady", |c| {
            c["status"]["instances"][1]["phase"] = json!("NotReady");
        }),
        ("Warning storagecluster main: it is being deleted", |c| {
            c["metadata"]["deletionTimestamp"] = json!("2026-11-21T12:00:00Z");
        }),
    ];
    for (expected, change) in cases {
        assert_eq!(found(&with_cluster(change)), [expected]);
    }
    let unplaced = with_cluster(|c| {
        c["status"]["instances"][1]["phase"] = json!("Pending");
        c["status"]["instances"][1]["node"] = json!("");
    });
    let placed = finding(&unplaced, "1 of 2 instances have a node");
    assert_eq!(placed.evidence, "cpu-1: RdmaMissing: it has no RDMA device");
    let quota = with_cluster(|c| {
        c["status"]["instances"][0]["phase"] = json!("NotReady");
        c["status"]["instances"][0]["message"] = json!("pool fast: project quota is not enforced");
    });
    let quota = finding(&quota, "main-0 cannot limit its volumes' sizes");
    assert!(quota.fix.contains("on storage-1") && quota.fix.contains("prjquota"), "{quota:?}");
}

#[test]
fn paused_takeovers_are_an_error_and_an_override_is_a_warning() {
    let reported = |status: &str, reason: &str| {
        let condition = json!({ "type": "TakeoverPaused", "status": status, "reason": reason, "message": "3 of 4 nodes",
            "lastTransitionTime": "2026-11-21T12:00:00Z" });
        with_cluster(|cluster| {
            cluster["status"]["conditions"].as_array_mut().expect("conditions").push(condition.clone());
        })
    };
    assert_eq!(found(&reported("False", "NotPaused")), [""; 0]);
    assert_eq!(finding(&reported("True", "ManyNodesSilent"), "takeovers pause").severity, Severity::Error);
    assert_eq!(
        finding(&reported("False", "Overridden"), "takeovers never pause").severity,
        Severity::Warning
    );
}

#[test]
fn storage_node_problems_are_found() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 12] = [
        ("Error: the kernel has no SMB client: no pod on it can use a volume", |n| {
            n["status"]["kernel"]["cifs"] = json!("No");
        }),
        ("Note: it is unknown whether the kernel has the SMB client", |n| {
            n["status"]["kernel"]["cifs"] = json!("Unknown");
        }),
        ("Warning: its SMB client does not support SMB Direct: mounts use TCP", |n| {
            n["status"]["kernel"]["cifsSmbDirect"] = json!("No");
        }),
        ("Note: it is unknown whether its SMB client supports SMB Direct", |n| {
            n["status"]["kernel"]["cifsSmbDirect"] = json!("Unknown");
        }),
        ("Warning: io_uring is unavailable: a server on this node is slower", |n| {
            n["status"]["kernel"]["ioUring"] = json!("No");
        }),
        ("Warning: RDMA port mlx5_0/1 cannot be used", |n| {
            let port = &mut n["status"]["rdmaDevices"][0]["ports"][0];
            port["usable"] = json!(false);
            port["reason"] = json!("the port is DOWN");
        }),
        ("Warning: RDMA port mlx5_0/1 has a small MTU: RDMA sends packets of less than 4096 bytes", |n| {
            n["status"]["rdmaDevices"][0]["ports"][0]["mtu"] = json!(4199);
        }),
        ("Warning: its agent could not read everything: PartlyUnreadable", |n| {
            n["status"]["conditions"][0]["status"] = json!("False");
            n["status"]["conditions"][0]["reason"] = json!("PartlyUnreadable");
        }),
        ("Note: its agent and this program have different versions", |n| {
            n["status"]["agentVersion"] = json!("0.0.9");
        }),
        ("Note: no new instances are put here", |n| n["spec"]["unschedulable"] = json!(true)),
        // A second port without a cable is no problem.
        ("Note: RDMA port mlx5_1/1 cannot be used", |n| {
            let mut device = n["status"]["rdmaDevices"][0].clone();
            device["name"] = json!("mlx5_1");
            device["ports"][0]["usable"] = json!(false);
            n["status"]["rdmaDevices"].as_array_mut().expect("devices").push(device);
        }),
        ("Error: its agent has not reported", |n| {
            n["status"] = json!({"kernel": {"cifs": "Yes", "ioUring": "Yes"}});
        }),
    ];
    for (expected, change) in cases {
        let (severity, summary) = expected.split_once(": ").expect("a severity");
        assert_eq!(found(&with_storage_node(change)), [format!("{severity} node storage-1: {summary}")]);
    }
}

#[test]
fn severity_of_missing_rdma_depends_on_the_clusters_requirement() {
    let spoil = |n: &mut Value| {
        n["status"]["rdmaDevices"][0]["ports"][0]["usable"] = json!(false);
        n["status"]["rdmaDevices"][0]["ports"][0]["reason"] = json!("the port is DOWN");
    };
    let wanting = |requirement: &str, transport: &str| {
        let mut cluster = fixture::cluster();
        cluster["spec"]["placement"] = json!({"rdma": {"requirement": requirement}});
        cluster["spec"]["network"] = json!({"transport": transport});
        let snapshot = Snapshot { clusters: Ok(vec![object(cluster)]), ..with_storage_node(spoil) };
        finding(&snapshot, "cannot be used").severity
    };
    assert_eq!(wanting("Required", "Auto"), Severity::Error);
    assert_eq!(wanting("Required", "RDMA"), Severity::Error);
    assert_eq!(wanting("Preferred", "Auto"), Severity::Warning);
    assert_eq!(wanting("None", "TCP"), Severity::Note);

    // A mount uses TCP, regardless of the servers' placement.
    let mounting = |transport: &str| {
        let mut cluster = fixture::cluster();
        cluster["spec"]["placement"] = json!({"rdma": {"requirement": "Required"}});
        cluster["spec"]["network"] = json!({"transport": transport});
        let without = with_storage_node(|n| n["status"]["kernel"]["cifsSmbDirect"] = json!("No"));
        let snapshot = Snapshot { clusters: Ok(vec![object(cluster)]), ..without };
        finding(&snapshot, "does not support SMB Direct").severity
    };
    assert_eq!(mounting("Auto"), Severity::Warning);
    assert_eq!(mounting("RDMA"), Severity::Error);
    assert_eq!(mounting("TCP"), Severity::Note);

    // A node without RDMA is not reported unless RDMA is required.
    let none = |n: &mut Value| n["status"]["rdmaDevices"] = json!([]);
    assert_eq!(found(&with_storage_node(none)), [""; 0]);
    // The MTU of InfiniBand and iWARP is different.
    let infiniband = |n: &mut Value| {
        let port = &mut n["status"]["rdmaDevices"][0]["ports"][0];
        port["linkLayer"] = json!("InfiniBand");
        port["mtu"] = json!(2044);
    };
    assert_eq!(found(&with_storage_node(infiniband)), [""; 0]);
}

#[test]
fn nodes_without_the_plugin_are_distinguished_from_failing_plugins() {
    let mut control_plane = fixture::node("control-1");
    control_plane["spec"] =
        json!({"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]});
    let mut snapshot = healthy();
    snapshot.nodes.as_mut().expect("nodes").push(object(control_plane));
    let left_out = finding(&snapshot, "does not run here");
    assert_eq!((left_out.severity, left_out.subject.as_str()), (Severity::Note, "node control-1"));
    assert!(left_out.evidence.contains("control-plane:NoSchedule"), "{left_out:?}");

    let mut snapshot = healthy();
    snapshot.storage_nodes.as_mut().expect("storage nodes").remove(0);
    let silent = finding(&snapshot, "has not reported");
    assert_eq!(silent.severity, Severity::Error);
    assert!(silent.fix.ends_with("kubectl -n forebay-system logs forebay-csi-node-1"), "{silent:?}");

    let mut broken = fixture::node(NODES[1]);
    broken["status"]["conditions"][0]["status"] = json!("Unknown");
    broken["status"]["conditions"][0]["message"] = json!("Kubelet stopped posting node status.");
    let mut snapshot = healthy();
    snapshot.nodes.as_mut().expect("nodes")[1] = object(broken);
    assert!(finding(&snapshot, "its kubelet is not ready").evidence.contains("stopped posting"));
}

#[test]
fn nodes_with_nvme_of_backends_need_the_kernel_modules() {
    let mut cluster = fixture::cluster();
    cluster["spec"]["backends"] = json!([{"name": "drives", "kind": "Target", "target": {
        "transport": "TCP", "nodes": [{"name": "storage-1", "directory": "/mnt/f"}], "sizeGib": 1}}]);
    let with = |change: &dyn Fn(&mut Value)| {
        let mut node = fixture::storage_node(NODES[0]);
        change(&mut node);
        let mut snapshot = healthy();
        snapshot.clusters = Ok(vec![object(cluster.clone())]);
        snapshot.storage_nodes.as_mut().expect("storage nodes")[0] = object(node);
        snapshot
    };
    let target = finding(&with(&|n| n["status"]["kernel"]["nvmet"] = json!("No")), "no NVMe target");
    assert_eq!((target.severity, target.subject.as_str()), (Severity::Error, "node storage-1"));
    let host =
        finding(&with(&|n| n["status"]["kernel"]["nvmeTcp"] = json!("No")), "cannot reach their namespaces");
    assert_eq!(host.evidence, "no module nvme_tcp");
    assert_eq!(found(&with(&|_| {})), [""; 0]);
}

#[test]
fn findings_in_json_have_a_severity() {
    let value = serde_json::to_value(examine(&fresh())).expect("JSON");
    assert_eq!(value[0]["severity"], json!("ok"));
    assert_eq!(value[0]["subject"], json!("cluster"));
}

#[test]
fn minimum_kubernetes_version_matches_the_chart() {
    let (major, minor) = cluster::KUBERNETES_MIN;
    let chart = include_str!("../../../charts/forebay/Chart.yaml");
    assert!(chart.contains(&format!("\nkubeVersion: \">={major}.{minor}.")), "{chart}");
}
