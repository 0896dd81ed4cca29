//! The operator against a real API server and etcd, with exactly the chart's rights, and with real servers. [`stage`] plays the
//! kubelet and the StatefulSet controller, which do not run here.
#![allow(clippy::unwrap_used)]

#[path = "api_server/rotation.rs"]
mod rotation;
mod stage;
#[path = "api_server/takeover.rs"]
mod takeover;

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use forebay_api::StorageNode;
use forebay_api::cluster::InstancePhase;
use forebay_api::names;
use forebay_operator::leader::{Candidate, LEASE, Timing};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use stage::{Stage, client, eventually, shared, start_api_server, start_with_controllers};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_is_created_rolled_out_scaled_down_and_deleted() {
    let stage = Stage::new(shared(), "life", 2).await;
    let operator = stage.operate().await;
    stage.create("life", &json!({ "instances": 2, "storageClasses": [{ "name": "stage-life" }] })).await;

    // Create: the servers start, and the operator queries them over mutual TLS.
    stage.run_pod("life-0").await;
    stage.run_pod("life-1").await;
    let ready = stage.condition("life", "Ready", "True", "AllInstancesReady").await;
    let status = ready.status.unwrap();
    assert_eq!(status.summary.instances, "2/2");
    assert_eq!(status.summary.transport, "TCP");
    assert!(status.instances.iter().all(|i| i.capacity_bytes > 0 && !i.version.is_empty()), "{status:?}");
    assert_ne!(status.instances[0].node, status.instances[1].node);
    let record = stage.api::<ConfigMap>().get("life-placement").await.unwrap().data.unwrap();
    assert_eq!(record["life-0.pools"], "main", "its pool is there from now on");
    assert_eq!(record.len(), 4, "both have served, so both are bound");

    // Change: the new image is rolled out to one instance after the other.
    stage.change("life", &json!({ "image": "docker.io/forebay/forebay:2" })).await;
    for round in 0..2 {
        let sets = stage.api::<StatefulSet>();
        for instance in ["life-0", "life-1"] {
            eventually("the StatefulSets take the new image", || async {
                let set = sets.get(instance).await.map_err(|e| e.to_string())?;
                let image = set.spec.unwrap().template.spec.unwrap().containers[0].image.clone();
                if image.as_deref() != Some("docker.io/forebay/forebay:2") {
                    return Err(format!("{image:?}"));
                }
                let seen =
                    json!({ "status": { "observedGeneration": set.metadata.generation, "replicas": 1 } });
                sets.patch_status(instance, &PatchParams::default(), &Patch::Merge(&seen))
                    .await
                    .map(|_| ())
                    .map_err(|e| e.to_string())
            })
            .await;
        }
        let ending = eventually("a pod is restarted", || async {
            let ending = stage.ending().await;
            if ending.is_empty() { Err("none".to_owned()) } else { Ok(ending) }
        })
        .await;
        assert_eq!(ending, [format!("life-{round}")], "one at a time, in order");
        stage
            .cluster("life", "the draining is reported", |c| {
                c.status.iter().flat_map(|s| &s.instances).any(|i| i.phase == InstancePhase::Draining)
            })
            .await;
        assert_eq!(stage.ending().await.len(), 1, "the other one waits");
        stage.end_pod(&ending[0]).await;
        stage.run_pod(&ending[0]).await;
    }
    stage.condition("life", "Progressing", "False", "UpToDate").await;
    assert_eq!(operator.metrics.restarts.get(), 2);

    // An instance with a volume must not be removed.
    stage.condition("life", "Ready", "True", "AllInstancesReady").await;
    stage.make_volume("life-1", "precious");
    // As the driver records its volumes: the record alone must not protect them from destruction.
    let record = json!({ "metadata": { "name": "forebay-precious", "labels": {
        (names::LABEL_MANAGED_BY): names::MANAGED_BY_DRIVER, (names::LABEL_CLUSTER): "life",
        (names::LABEL_INSTANCE): "life-1",
    }, "finalizers": [names::FINALIZER_VOLUME] } });
    let record: Secret = serde_json::from_value(record).unwrap();
    stage.api::<Secret>().create(&PostParams::default(), &record).await.unwrap();
    stage.cluster("life", "the volume is counted", |c| c.status.as_ref().unwrap().summary.volumes == 1).await;
    stage.change("life", &json!({ "instances": 1 })).await;
    stage.condition("life", "Progressing", "True", "ScaleDownRefused").await;

    // Nor must the cluster, until its policy requests destruction.
    stage.clusters().delete("life", &DeleteParams::default()).await.unwrap();
    stage.condition("life", "Deletable", "False", "VolumesExist").await;
    assert!(stage.api::<StatefulSet>().get_opt("life-1").await.unwrap().is_some());
    stage.change("life", &json!({ "deletionPolicy": "Destroy" })).await;
    eventually("the StatefulSets are removed", || async {
        let left =
            stage.api::<StatefulSet>().list(&ListParams::default()).await.map_err(|e| e.to_string())?.items;
        if left.is_empty() { Ok(()) } else { Err(format!("{} are left", left.len())) }
    })
    .await;
    // The pods have not ended yet: the cluster stays.
    stage.condition("life", "Deletable", "True", "ServersEnding").await;
    stage.end_pod("life-0").await;
    stage.end_pod("life-1").await;
    stage.gone("life").await;
    assert!(stage.api::<ConfigMap>().get_opt("life-placement").await.unwrap().is_none());
    let secrets = stage.api::<Secret>().list(&ListParams::default()).await.unwrap().items;
    let secrets: Vec<_> = secrets.into_iter().filter_map(|s| s.metadata.name).collect();
    assert!(secrets.is_empty(), "{secrets:?}");
    assert!(Api::<StorageClass>::all(stage.client.clone()).get_opt("stage-life").await.unwrap().is_none());
    let events = stage.api::<Event>().list(&ListParams::default()).await.unwrap().items;
    for reason in ["InstancePlaced", "InstanceReady", "Restarting", "ScaleDownRefused", "DeletionWaits"] {
        assert!(events.iter().any(|e| e.reason.as_deref() == Some(reason)), "no Event {reason}");
    }
    // Each event is about its own object, although both have the same reason and occurred almost simultaneously.
    for instance in ["life-0", "life-1"] {
        let reported = |e: &Event| {
            e.reason.as_deref() == Some("Restarting")
                && e.note.as_deref().is_some_and(|n| n.starts_with(instance))
        };
        assert!(events.iter().any(reported), "the restart of {instance} is not reported");
    }
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconcile_reverts_foreign_changes_and_writes_nothing_needlessly() {
    let stage = Stage::new(shared(), "conflict", 1).await;
    let operator = stage.operate().await;
    stage.create("c", &json!({ "storageClasses": [{ "name": "stage-conflict" }] })).await;
    let sets = stage.api::<StatefulSet>();
    let made = eventually("the StatefulSet", || async {
        sets.get_opt("c-0").await.map_err(|e| e.to_string())?.ok_or_else(|| "not there".to_owned())
    })
    .await;
    // Another field manager takes a field; a ConfigMap and a certificate are deleted; a class is changed.
    let hands = PatchParams::apply("another-manager").force();
    let theirs = json!({ "apiVersion": "apps/v1", "kind": "StatefulSet", "spec": { "replicas": 0 } });
    sets.patch("c-0", &hands, &Patch::Apply(&theirs)).await.unwrap();
    stage.api::<ConfigMap>().delete("c-0-config", &DeleteParams::default()).await.unwrap();
    stage.api::<Secret>().delete("c-0-tls", &DeleteParams::default()).await.unwrap();
    let classes: Api<StorageClass> = Api::all(stage.client.clone());
    let expansion = json!({ "allowVolumeExpansion": false });
    classes.patch("stage-conflict", &PatchParams::default(), &Patch::Merge(&expansion)).await.unwrap();
    eventually("the foreign changes are reverted", || async {
        let set = sets.get("c-0").await.map_err(|e| e.to_string())?;
        let map = stage.api::<ConfigMap>().get_opt("c-0-config").await.map_err(|e| e.to_string())?;
        let secret = stage.api::<Secret>().get_opt("c-0-tls").await.map_err(|e| e.to_string())?;
        let class = classes.get("stage-conflict").await.map_err(|e| e.to_string())?;
        let right = set.spec.as_ref().unwrap().replicas == Some(1)
            && map.is_some()
            && secret.is_some()
            && class.allow_volume_expansion == Some(true);
        if right { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    assert_eq!(sets.get("c-0").await.unwrap().metadata.uid, made.metadata.uid, "it was not recreated");

    // A change without effect causes one reconciliation and no writes.
    let annotate = |n: u32| json!({ "metadata": { "annotations": { "another-manager": n.to_string() } } });
    let before = stage.api::<Secret>().get("c-0-tls").await.unwrap().metadata.resource_version;
    for n in 0..3 {
        let rounds = operator.metrics.reconciled("c");
        stage.clusters().patch("c", &PatchParams::default(), &Patch::Merge(&annotate(n))).await.unwrap();
        eventually("the change is reconciled", || async {
            let now = operator.metrics.reconciled("c");
            if now > rounds { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await;
    }
    assert_eq!(stage.api::<Secret>().get("c-0-tls").await.unwrap().metadata.resource_version, before);
    let rounds = operator.metrics.reconciled("c");
    assert!(rounds < 40, "{rounds} reconciliations for a handful of changes");
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_run_on_nodes_with_rdma_and_a_down_port_is_reported() {
    let stage = Stage::new(shared(), "rdma", 3).await;
    let port = |state: &str, address: &str| {
        json!({ "status": { "rdmaDevices": [{ "name": "mlx5_0", "ports": [{
            "port": 1, "linkLayer": "Ethernet", "state": state, "rateGbps": 100, "netdev": "ens1",
            "addresses": [address], "usable": state == "ACTIVE",
            "reason": if state == "ACTIVE" { "" } else { "the link is down" },
        }] }] } })
    };
    let nodes: Api<StorageNode> = Api::all(stage.client.clone());
    // The first cannot be parsed, the second has no device, and the third fits.
    let statuses = [port("ACTIVE", "no address"), json!({ "status": {} }), port("ACTIVE", "192.0.2.1")];
    for (n, status) in (1..).zip(&statuses) {
        let node = StorageNode::new(&stage.node(n), forebay_api::StorageNodeSpec::default());
        // The client cannot read the answer if it cannot read the object, but the API server has accepted it.
        let _ = nodes.create(&PostParams::default(), &node).await;
        let _ = nodes.patch_status(&stage.node(n), &PatchParams::default(), &Patch::Merge(status)).await;
    }
    let operator = stage.operate().await;
    let placement =
        json!({ "nodeSelector": { "stage": stage.namespace }, "rdma": { "requirement": "Required" } });
    stage.create("n", &json!({ "instances": 2, "placement": placement })).await;
    let placed = stage.condition("n", "InstancesPlaced", "False", "NoNodeFits").await.status.unwrap();
    assert_eq!(
        (placed.instances[0].node.as_str(), placed.instances[1].node.as_str()),
        (stage.node(3).as_str(), "")
    );
    let reasons: Vec<&str> = placed
        .nodes
        .iter()
        .filter(|v| v.name.starts_with(&stage.namespace))
        .map(|v| v.reason.as_str())
        .collect();
    assert_eq!(reasons, ["StorageNodeUnknown", "RdmaMissing", "Fits"]);
    // It serves; then its port goes down. It stays, because its volumes are there, and its node reports why it no longer fits.
    stage.run_pod("n-0").await;
    stage
        .cluster("n", "the instance serves", |c| {
            c.status.as_ref().unwrap().instances[0].phase == InstancePhase::Ready
        })
        .await;
    nodes
        .patch_status(&stage.node(3), &PatchParams::default(), &Patch::Merge(&port("DOWN", "192.0.2.1")))
        .await
        .unwrap();
    let down = stage
        .cluster("n", "the port that is down is reported", |c| {
            c.status
                .as_ref()
                .unwrap()
                .nodes
                .iter()
                .any(|v| v.name == stage.node(3) && v.reason == "RdmaPortDown")
        })
        .await;
    let instance = &down.status.unwrap().instances[0];
    assert_eq!((instance.node.as_str(), instance.phase), (stage.node(3).as_str(), InstancePhase::Ready));
    assert!(instance.message.contains("the link is down"), "{}", instance.message);
    operator.stop().await;
}

/// Forwards bytes to the API server until asked to break every connection.
struct Link {
    address: String,
    broken: tokio::sync::watch::Sender<u32>,
}

impl Link {
    async fn to(server: &str) -> Self {
        let target = server.strip_prefix("https://").unwrap().to_owned();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("https://{}", listener.local_addr().unwrap());
        let (broken, breaks) = tokio::sync::watch::channel(0);
        tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let (target, mut breaks) = (target.clone(), breaks.clone());
                breaks.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut far) = tokio::net::TcpStream::connect(target).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = breaks.changed() => {}
                    }
                });
            }
        });
        Self { address, broken }
    }

    fn cut(&self) {
        self.broken.send_modify(|n| *n += 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_recovers_changes_missed_by_broken_watches() {
    let stage = Stage::new(shared(), "watch", 1).await;
    let link = Link::to(&shared().server()).await;
    let operator = stage.operate_with(client(&stage.kubeconfig, Some(link.address.clone())).await);
    stage.create("w", &json!({})).await;
    stage.condition("w", "Progressing", "True", "Starting").await;
    for image in ["two", "three", "four"] {
        link.cut();
        stage.change("w", &json!({ "image": image })).await;
        link.cut();
        stage
            .cluster("w", "the change is seen", |c| {
                c.status
                    .as_ref()
                    .is_some_and(|s| s.image == image && s.observed_generation == c.metadata.generation)
            })
            .await;
    }
    // A node is deleted while there is no watch.
    link.cut();
    Api::<k8s_openapi::api::core::v1::Node>::all(stage.client.clone())
        .delete(&stage.node(1), &DeleteParams::default())
        .await
        .unwrap();
    stage.condition("w", "InstancesPlaced", "False", "NoNodeFits").await;
    operator.assert_working();
    operator.stop().await;
}

/// A StorageCluster that the definition allows but the operator cannot read does not block others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_cluster_does_not_block_other_clusters() {
    let stage = Stage::new(shared(), "guard", 1).await;
    stage.create("odd", &json!({ "paused": true })).await;
    // A time that the API server accepts but that is beyond the range of our type.
    let odd = json!({ "status": { "conditions": [{
        "type": "Odd", "status": "True", "reason": "Odd", "message": "", "lastTransitionTime": "9999-12-31T23:59:59Z",
    }] } });
    let resource = kube::core::ApiResource::erase::<forebay_api::StorageCluster>(&());
    let odds: Api<kube::api::DynamicObject> =
        Api::namespaced_with(stage.client.clone(), &stage.namespace, &resource);
    odds.patch_status("odd", &PatchParams::default(), &Patch::Merge(&odd))
        .await
        .expect("the status is taken");
    assert!(stage.clusters().get("odd").await.is_err(), "it cannot be read");
    let operator = stage.operate().await;
    stage.create("even", &json!({})).await;
    eventually("the other cluster is reconciled", || async {
        let sets = stage.api::<StatefulSet>().get_opt("even-0").await.map_err(|e| e.to_string())?;
        sets.map(drop).ok_or_else(|| "no StatefulSet".to_owned())
    })
    .await;
    eventually("the unreadable cluster is reported", || async {
        let events =
            stage.api::<Event>().list(&ListParams::default()).await.map_err(|e| e.to_string())?.items;
        let reported = events.iter().any(|e| e.reason.as_deref() == Some("Unreadable"));
        match (reported, operator.metrics.unreadable.get()) {
            (true, 1) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    assert_eq!(operator.progress.stalled(std::time::Instant::now()), None);
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_survives_an_api_server_restart() {
    let mut api = tokio::task::spawn_blocking(start_api_server).await.unwrap();
    let stage = Stage::new(&api, "restart", 1).await;
    let operator = stage.operate().await;
    stage.create("r", &json!({})).await;
    stage.condition("r", "Progressing", "True", "Starting").await;
    tokio::task::block_in_place(|| api.stop_api_server());
    operator.assert_working();
    tokio::task::block_in_place(|| api.start_api_server()).expect("it starts again");
    stage.change("r", &json!({ "image": "other" })).await;
    stage.cluster("r", "the change is seen", |c| c.status.as_ref().is_some_and(|s| s.image == "other")).await;
    let rounds = operator.metrics.reconciled("r");
    assert!(rounds < 60, "{rounds} reconciliations: it must not run hot against a dead API server");
    operator.stop().await;
}

/// Kubernetes' own StatefulSet controller and garbage collector run here; the test plays scheduler and kubelet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_works_with_the_kubernetes_controller_manager() {
    let api = tokio::task::spawn_blocking(start_with_controllers).await.unwrap();
    let mut stage = Stage::new(&api, "controllers", 2).await;
    stage.controllers = true;
    let operator = stage.operate().await;
    stage.create("k", &json!({ "instances": 2 })).await;
    for instance in ["k-0", "k-1"] {
        stage.run_pod(instance).await;
    }
    stage.condition("k", "Ready", "True", "AllInstancesReady").await;
    stage.change("k", &json!({ "image": "docker.io/forebay/forebay:2" })).await;
    for instance in ["k-0", "k-1"] {
        let ending = eventually("a pod is restarted", || async {
            let ending = stage.ending().await;
            if ending.is_empty() { Err("none".to_owned()) } else { Ok(ending) }
        })
        .await;
        assert_eq!(ending, [instance]);
        stage.end_pod(instance).await;
        stage.run_pod(instance).await;
        let image = stage.api::<Pod>().get(&format!("{instance}-0")).await.unwrap().spec.unwrap().containers
            [0]
        .image
        .clone();
        assert_eq!(image.as_deref(), Some("docker.io/forebay/forebay:2"));
    }
    stage.condition("k", "Progressing", "False", "UpToDate").await;
    assert_eq!(operator.metrics.restarts.get(), 2, "none was restarted twice");

    let ended = |instance: &'static str| {
        let pods = stage.api::<Pod>();
        async move {
            eventually("the garbage collector ends the pod", || async {
                let pod = pods.get_opt(&format!("{instance}-0")).await.map_err(|e| e.to_string())?;
                if pod.is_none_or(|p| p.metadata.deletion_timestamp.is_some()) {
                    Ok(())
                } else {
                    Err("it runs".to_owned())
                }
            })
            .await;
        }
    };
    // A person's edit of the record does not bring back a removed instance.
    let theirs = json!({ "data": { "k-1": stage.node(2) } });
    let hands = PatchParams { field_manager: Some("another-manager".to_owned()), ..PatchParams::default() };
    stage
        .api::<ConfigMap>()
        .patch("k-placement", &hands, &Patch::Merge(&json!({ "data": { "k-1": null } })))
        .await
        .unwrap();
    stage.api::<ConfigMap>().patch("k-placement", &hands, &Patch::Merge(&theirs)).await.unwrap();
    stage.change("k", &json!({ "instances": 1 })).await;
    ended("k-1").await;
    stage.end_pod("k-1").await;
    stage
        .cluster("k", "the instance is gone", |c| {
            c.status.as_ref().is_some_and(|s| {
                s.instances.len() == 1
                    && s.conditions.iter().any(|c| c.type_ == "Progressing" && c.reason == "UpToDate")
            })
        })
        .await;
    let record = stage.api::<ConfigMap>().get("k-placement").await.unwrap().data.unwrap();
    assert_eq!(record.keys().collect::<Vec<_>>(), ["k-0", "k-0.pools"]);

    // Volumes are also protected from the garbage collector.
    stage.make_volume("k-0", "precious");
    stage.cluster("k", "the volume is counted", |c| c.status.as_ref().unwrap().summary.volumes == 1).await;
    stage.clusters().delete("k", &DeleteParams::foreground()).await.unwrap();
    stage.condition("k", "Deletable", "False", "VolumesExist").await;
    stage
        .cluster("k", "the garbage collector is done", |c| {
            c.metadata.finalizers.iter().flatten().all(|f| f != "foregroundDeletion")
        })
        .await;
    let set = stage.api::<StatefulSet>().get("k-0").await.unwrap();
    assert!(set.metadata.deletion_timestamp.is_none() && set.metadata.owner_references.is_none());

    // Deleted with its data retained: only the record of their location remains.
    stage.change("k", &json!({ "deletionPolicy": "Retain" })).await;
    ended("k-0").await;
    stage.end_pod("k-0").await;
    stage.gone("k").await;
    let left = eventually("all other objects are removed", || async {
        let secrets =
            stage.api::<Secret>().list(&ListParams::default()).await.map_err(|e| e.to_string())?.items.len();
        let maps =
            stage.api::<ConfigMap>().list(&ListParams::default()).await.map_err(|e| e.to_string())?.items;
        let names: Vec<String> =
            maps.into_iter().filter_map(|m| m.metadata.name).filter(|n| n.starts_with("k-")).collect();
        if secrets == 0 && names.len() == 1 {
            Ok(names)
        } else {
            Err(format!("{secrets} Secrets, {names:?}"))
        }
    })
    .await;
    assert_eq!(left, ["k-placement"]);
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_lease_has_one_holder_and_passes_to_the_standby() {
    let stage = Stage::new(shared(), "leader", 0).await;
    let timing = Timing::new(Duration::from_secs(9));
    let candidate = |name: &str| {
        Arc::new(Candidate::new(stage.client.clone(), &stage.namespace, name.to_owned(), timing))
    };
    let holder = || async {
        let lease = stage.api::<Lease>().get(LEASE).await.unwrap().spec.unwrap();
        lease.holder_identity.unwrap_or_default()
    };
    let (one, two) = (candidate("one"), candidate("two"));
    let since = one.acquire().await;
    let holding = tokio::spawn({
        let one = Arc::clone(&one);
        async move { one.hold(since).await }
    });
    let waiting = tokio::spawn({
        let two = Arc::clone(&two);
        async move { two.acquire().await }
    });
    // The second does not get the Lease for longer than the Lease is valid.
    assert!(
        tokio::time::timeout(timing.duration * 2, async {
            while !waiting.is_finished() {
                tokio::time::sleep(timing.retry).await
            }
        })
        .await
        .is_err()
    );
    assert_eq!(holder().await, "one");
    // The first is killed: the second takes over.
    holding.abort();
    waiting.await.unwrap();
    assert_eq!(holder().await, "two");
    // The first comes back and detects that it has lost the Lease.
    tokio::time::timeout(timing.duration, one.hold(std::time::Instant::now()))
        .await
        .expect("it stops at once");
    // Held for so long that no time to renew it was left: it stops without an attempt.
    let long_ago = std::time::Instant::now() - timing.renew_deadline;
    tokio::time::timeout(timing.retry, one.hold(long_ago)).await.expect("it stops at once");
    // After its release it is available immediately.
    two.release().await;
    tokio::time::timeout(timing.renew_deadline, one.acquire()).await.expect("nothing to wait for");
    assert_eq!(holder().await, "one");
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_processes_hand_over_on_sigterm_and_sigkill() {
    let stage = Stage::new(shared(), "process", 1).await;
    let start = |name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay-operator"));
        command.args([
            "run",
            "--http-listen",
            "127.0.0.1:0",
            "--server-priority-class",
            "",
            "--namespace",
            &stage.namespace,
        ]);
        command.args(["--identity", name, "--lease-duration", "15"]).env("KUBECONFIG", &stage.kubeconfig);
        Process(command.stdin(Stdio::null()).spawn().expect("the operator starts"))
    };
    let holder = |wanted: &'static str| {
        let leases = stage.api::<Lease>();
        async move {
            eventually(&format!("the Lease is {wanted}'s"), || async {
                let lease = leases.get_opt(LEASE).await.map_err(|e| e.to_string())?;
                let holder = lease.and_then(|l| l.spec?.holder_identity).unwrap_or_default();
                if holder == wanted { Ok(()) } else { Err(holder) }
            })
            .await;
        }
    };
    let first = std::sync::Mutex::new(start("first"));
    holder("first").await;
    let mut second = start("second");
    stage.create("p", &json!({})).await;
    stage.condition("p", "Progressing", "True", "Starting").await;
    // SIGTERM: it exits successfully, and the other one continues.
    let pid = rustix::process::Pid::from_child(&first.lock().unwrap().0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    eventually("the first ends", || async {
        match first.lock().unwrap().0.try_wait().unwrap() {
            Some(status) if status.success() => Ok(()),
            Some(status) => panic!("it ended with {status}"),
            None => Err("it runs".to_owned()),
        }
    })
    .await;
    holder("second").await;
    stage.change("p", &json!({ "image": "other" })).await;
    stage.cluster("p", "the second works", |c| c.status.as_ref().is_some_and(|s| s.image == "other")).await;
    // Killed in the middle of its work: a third takes over after the Lease has expired.
    stage.change("p", &json!({ "image": "third" })).await;
    second.0.kill().unwrap();
    let _third = start("third");
    holder("third").await;
    stage.cluster("p", "the third works", |c| c.status.as_ref().is_some_and(|s| s.image == "third")).await;
}
