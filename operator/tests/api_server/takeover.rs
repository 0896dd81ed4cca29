//! Instances that leave their nodes: with real Leases and records, and operators that are killed between any two writes.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::{Method, Request, Response};
use futures::future::BoxFuture;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::events::v1::Event;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use tokio::sync::watch;
use tower::{Layer, Service};

use crate::stage::{Stage, eventually, shared, start_api_server};

/// Kubelets that renew the Leases of their nodes, until a node is switched off.
struct Kubelets {
    off: Arc<Mutex<Vec<String>>>,
    work: tokio::task::JoinHandle<()>,
}

impl Drop for Kubelets {
    fn drop(&mut self) {
        self.work.abort();
    }
}

impl Kubelets {
    async fn of(stage: &Stage, nodes: u8) -> Self {
        let api: Api<Lease> = Api::namespaced(stage.client.clone(), "kube-node-lease");
        let names: Vec<String> = (1..=nodes).map(|n| stage.node(n)).collect();
        for name in &names {
            let lease = json!({ "metadata": { "name": name }, "spec": { "holderIdentity": name } });
            let lease: Lease = serde_json::from_value(lease).unwrap();
            api.create(&PostParams::default(), &lease).await.expect("a Lease");
        }
        let off: Arc<Mutex<Vec<String>>> = Arc::default();
        let work = tokio::spawn({
            let off = Arc::clone(&off);
            async move {
                let mut tick = tokio::time::interval(Duration::from_secs(1));
                loop {
                    tick.tick().await;
                    let off = off.lock().unwrap().clone();
                    for name in names.iter().filter(|n| !off.contains(n)) {
                        let now = k8s_openapi::jiff::Timestamp::now();
                        let patch = json!({ "spec": { "renewTime": format!("{now:.6}") } });
                        let _ = api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await;
                    }
                }
            }
        });
        Self { off, work }
    }

    fn switch_off(&self, node: String) {
        self.off.lock().unwrap().push(node);
    }

    fn switch_on(&self) {
        self.off.lock().unwrap().clear();
    }

    /// Deletes the Leases: the nodes of a test that has ended must not count as silent in another test.
    async fn end(self, stage: &Stage, nodes: u8) {
        self.work.abort();
        let api: Api<Lease> = Api::namespaced(stage.client.clone(), "kube-node-lease");
        for n in 1..=nodes {
            api.delete(&stage.node(n), &DeleteParams::default()).await.expect("the Lease goes");
        }
    }
}

/// A client's connection that goes silent permanently after a number of writes.
#[derive(Clone)]
struct Few<S> {
    inner: S,
    left: Arc<AtomicU32>,
    spent: watch::Sender<bool>,
}

#[derive(Clone)]
struct FewLayer {
    left: Arc<AtomicU32>,
    spent: watch::Sender<bool>,
}

impl<S> Layer<S> for FewLayer {
    type Service = Few<S>;

    fn layer(&self, inner: S) -> Few<S> {
        Few { inner, left: Arc::clone(&self.left), spent: self.spent.clone() }
    }
}

impl<S, B> Service<Request<Body>> for Few<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    B: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.method() == Method::GET {
            return Box::pin(self.inner.call(request));
        }
        let left = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        let spent = self.spent.clone();
        match left {
            Ok(1) => {
                // The API server carries it out, but no watcher learns of it.
                let last = self.inner.call(request);
                Box::pin(async move {
                    let _ = last.await;
                    spent.send_replace(true);
                    std::future::pending().await
                })
            }
            Ok(_) => Box::pin(self.inner.call(request)),
            Err(_) => Box::pin(std::future::pending()),
        }
    }
}

async fn client_of_few_writes(stage: &Stage, writes: u32) -> (Client, watch::Receiver<bool>) {
    let kubeconfig = Kubeconfig::read_from(&stage.kubeconfig).unwrap();
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let (spent, is_spent) = watch::channel(false);
    let layer = FewLayer { left: Arc::new(AtomicU32::new(writes)), spent };
    (ClientBuilder::try_from(config).unwrap().with_layer(&layer).build(), is_spent)
}

fn spec(instances: u32) -> Value {
    let namespaces: Vec<Value> = (0..instances)
        .map(|n| json!({ "instance": n, "nqn": "nqn.2026-01.io.example:a", "nguid": format!("{:032x}", n + 1) }))
        .collect();
    json!({
        "instances": instances,
        "network": {
            "ports": { "smb": 14445, "smbDirect": 15445, "admin": 19444, "metrics": 19445 },
            "addresses": (0..instances).map(|n| format!("192.0.2.{}/24", 200 + n)).collect::<Vec<_>>(),
        },
        "backends": [{ "name": "main", "kind": "NVMeoF", "nvmeof": {
            "paths": ["tcp://192.0.2.1:4420"], "namespaces": namespaces,
        } }],
        "takeover": { "afterSeconds": 25 },
    })
}

async fn record(stage: &Stage, cluster: &str) -> std::collections::BTreeMap<String, String> {
    let map = stage.api::<ConfigMap>().get_opt(&format!("{cluster}-placement")).await.unwrap();
    map.and_then(|m| m.data).unwrap_or_default()
}

/// Polls the epochs as fast as it can until it is asked to stop: none may ever decrease.
struct Witness {
    end: Arc<AtomicBool>,
    work: tokio::task::JoinHandle<(u64, u64)>,
}

impl Witness {
    fn of(stage: &Stage, cluster: &'static str) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let maps = stage.api::<ConfigMap>();
        let clusters = stage.clusters();
        let done = Arc::clone(&end);
        let work = tokio::spawn(async move {
            let (mut recorded, mut reported) = (0, 0);
            while !done.load(Ordering::SeqCst) {
                let map = maps.get_opt(&format!("{cluster}-placement")).await.unwrap();
                let epoch =
                    map.and_then(|m| m.data?.get(&format!("{cluster}-0.epoch"))?.parse().ok()).unwrap_or(0);
                assert!(epoch >= recorded, "the recorded epoch went from {recorded} to {epoch}");
                recorded = epoch;
                let found = clusters.get(cluster).await.unwrap();
                let epoch = found.status.and_then(|s| s.instances.first().map(|i| i.epoch)).unwrap_or(0);
                assert!(epoch >= reported, "the epoch in the status went from {reported} to {epoch}");
                reported = epoch;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            (recorded, reported)
        });
        Self { end, work }
    }

    async fn end(self) -> (u64, u64) {
        self.end.store(true, Ordering::SeqCst);
        self.work.await.expect("no epoch went down")
    }
}

async fn placed(stage: &Stage, instance: &str, node: String, epoch: &str) {
    let sets = stage.api::<StatefulSet>();
    eventually(&format!("{instance} belongs to {node} in epoch {epoch}"), || async {
        let set = sets.get_opt(instance).await.map_err(|e| e.to_string())?.ok_or("no StatefulSet")?;
        let on = set.metadata.annotations.unwrap()[forebay_api::names::ANNOTATION_NODE].clone();
        let annotations = set.spec.unwrap().template.metadata.unwrap().annotations.unwrap();
        let found = annotations.get("storage.forebay.io/epoch").cloned().unwrap_or_default();
        if on == node && found == epoch { Ok(()) } else { Err(format!("{on} {found}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeover_completes_if_the_operator_is_killed_after_every_write() {
    let stage = Stage::new(shared(), "lost", 2).await;
    let kubelets = Kubelets::of(&stage, 2).await;
    let operator = stage.operate().await;
    stage.create("l", &spec(1)).await;
    placed(&stage, "l-0", stage.node(1), "1").await;
    stage.pretend_pod("l-0").await;
    stage
        .cluster("l", "it is reported", |c| c.status.as_ref().is_some_and(|s| s.instances[0].epoch == 1))
        .await;
    operator.stop().await;
    let old = stage.api::<Pod>().get("l-0-0").await.unwrap().metadata.uid;
    let witness = Witness::of(&stage, "l");
    kubelets.switch_off(stage.node(1));
    // Each operator dies while the answer to its only write is in flight.
    let mut lives = 0;
    loop {
        let (client, spent) = client_of_few_writes(&stage, 1).await;
        let operator = stage.operate_with(client);
        let sets = stage.api::<StatefulSet>();
        let pods = stage.api::<Pod>();
        let over = eventually("a write, or the end", || async {
            if *spent.borrow() {
                return Ok(false);
            }
            // Plays the StatefulSet controller, which does this continuously.
            let set = sets.get("l-0").await.map_err(|e| e.to_string())?;
            let seen = json!({ "status": { "observedGeneration": set.metadata.generation, "replicas": 1 } });
            let _ = sets.patch_status("l-0", &PatchParams::default(), &Patch::Merge(&seen)).await;
            if pods.get_opt("l-0-0").await.map_err(|e| e.to_string())?.is_none() {
                return Ok(true);
            }
            Err("neither".to_owned())
        })
        .await;
        operator.kill().await;
        lives += 1;
        if over || pods.get_opt("l-0-0").await.unwrap().is_none() {
            break;
        }
        assert!(lives < 40, "{:?}", record(&stage, "l").await);
    }
    assert!(lives > 3, "each of them wrote something: {lives}");
    let data = record(&stage, "l").await;
    assert_eq!((data["l-0"].as_str(), data["l-0.epoch"].as_str()), (stage.node(2).as_str(), "2"));
    let operator = stage.operate().await;
    placed(&stage, "l-0", stage.node(2), "2").await;
    let config = stage.api::<ConfigMap>().get("l-0-config-2").await.unwrap().data.unwrap();
    assert!(config["server.toml"].contains(&format!("node = \"{}\"", stage.node(2))), "{config:?}");
    stage.pretend_pod("l-0").await;
    assert_ne!(stage.api::<Pod>().get("l-0-0").await.unwrap().metadata.uid, old);
    let reported = stage
        .cluster("l", "it is reported", |c| {
            c.status.as_ref().is_some_and(|s| {
                s.instances[0].epoch == 2
                    && s.instances[0].takeover.as_ref().is_some_and(|t| t.placed.is_some())
            })
        })
        .await;
    let instance = &reported.status.unwrap().instances[0];
    assert_eq!((instance.node.as_str(), instance.address.as_str()), (stage.node(2).as_str(), "192.0.2.200"));
    assert_eq!(instance.takeover.as_ref().unwrap().reason, "NodeLost");
    eventually("the map of the epoch before is removed", || async {
        match stage.api::<ConfigMap>().get_opt("l-0-config-1").await.map_err(|e| e.to_string())? {
            None => Ok(()),
            Some(_) => Err("it is there".to_owned()),
        }
    })
    .await;
    assert_eq!(witness.end().await, (2, 2), "one takeover, however many operators");
    operator.stop().await;
    kubelets.end(&stage, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_leader_knows_how_long_a_node_has_been_silent() {
    let stage = Stage::new(shared(), "standby", 2).await;
    let kubelets = Kubelets::of(&stage, 2).await;
    let operator = stage.operate().await;
    stage.create("s", &spec(1)).await;
    placed(&stage, "s-0", stage.node(1), "1").await;
    stage.pretend_pod("s-0").await;
    stage
        .cluster("s", "it is reported", |c| c.status.as_ref().is_some_and(|s| s.instances[0].epoch == 1))
        .await;
    let standby = stage.stand_by().await;
    // As if the operator itself was on the lost node.
    operator.kill().await;
    kubelets.switch_off(stage.node(1));
    eventually("the silence is too long", || async {
        let sight = standby.leases.judged("s").0.get(&stage.node(1)).copied();
        let silent = sight.map(|s| s.silent).unwrap_or_default();
        if silent >= Duration::from_secs(25) { Ok(()) } else { Err(format!("{silent:?}")) }
    })
    .await;
    let now = k8s_openapi::jiff::Timestamp::now();
    let operator = stage.operate_after(standby);
    placed(&stage, "s-0", stage.node(2), "2").await;
    let reported = stage
        .cluster("s", "it is reported", |c| {
            c.status.as_ref().is_some_and(|s| s.instances[0].takeover.is_some())
        })
        .await;
    let since = reported.status.unwrap().instances[0].takeover.as_ref().unwrap().since.as_ref().unwrap().0;
    assert!(since < now, "silent since {since}, before it worked at {now}");
    operator.stop().await;
    kubelets.end(&stage, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cordoned_node_is_handed_over_but_an_unreachable_server_stays() {
    let stage = Stage::new(shared(), "cordon", 2).await;
    let kubelets = Kubelets::of(&stage, 2).await;
    let operator = stage.operate().await;
    stage.create("o", &spec(1)).await;
    placed(&stage, "o-0", stage.node(1), "1").await;
    stage.pretend_pod("o-0").await;
    // No server answers at the admin API: the operator reports it, and removes nothing while the kubelet is alive.
    let silent = stage
        .cluster("o", "the silence is reported", |c| {
            c.status.as_ref().is_some_and(|s| s.instances[0].message.contains("does not answer"))
        })
        .await;
    assert_eq!(silent.status.unwrap().instances[0].epoch, 1);
    let rounds = operator.metrics.reconciled("o");
    eventually("the cluster is reconciled again", || async {
        let touch = json!({ "metadata": { "annotations": { "another-manager": operator.metrics.reconciled("o").to_string() } } });
        stage.clusters().patch("o", &PatchParams::default(), &Patch::Merge(&touch)).await.map_err(|e| e.to_string())?;
        if operator.metrics.reconciled("o") > rounds + 8 { Ok(()) } else { Err("not often enough".to_owned()) }
    })
    .await;
    assert_eq!(record(&stage, "o").await["o-0.epoch"], "1");

    let nodes: Api<Node> = Api::all(stage.client.clone());
    let cordon = json!({ "spec": { "unschedulable": true } });
    nodes.patch(&stage.node(1), &PatchParams::default(), &Patch::Merge(&cordon)).await.unwrap();
    placed(&stage, "o-0", stage.node(2), "2").await;
    // The StatefulSet controller sees the new template; then the pod is asked to terminate and gets its grace period.
    let pods = stage.api::<Pod>();
    let sets = stage.api::<StatefulSet>();
    let ending = eventually("the pod is asked to end", || async {
        let set = sets.get("o-0").await.map_err(|e| e.to_string())?;
        let seen = json!({ "status": { "observedGeneration": set.metadata.generation, "replicas": 1 } });
        sets.patch_status("o-0", &PatchParams::default(), &Patch::Merge(&seen))
            .await
            .map_err(|e| e.to_string())?;
        let pod = pods.get("o-0-0").await.map_err(|e| e.to_string())?;
        if pod.metadata.deletion_timestamp.is_some() { Ok(pod) } else { Err("it runs".to_owned()) }
    })
    .await;
    assert!(ending.metadata.deletion_grace_period_seconds.unwrap() >= 60);
    pods.delete("o-0-0", &DeleteParams::default().grace_period(0)).await.unwrap();
    stage.pretend_pod("o-0").await;
    let reported = stage
        .cluster("o", "the handover is reported", |c| {
            c.status
                .as_ref()
                .is_some_and(|s| s.instances[0].takeover.as_ref().is_some_and(|t| t.placed.is_some()))
        })
        .await;
    assert_eq!(reported.status.unwrap().instances[0].takeover.as_ref().unwrap().reason, "NodeCordoned");
    let events = stage.api::<Event>().list(&ListParams::default()).await.unwrap().items;
    assert!(events.iter().any(|e| e.reason.as_deref() == Some("HandingOver")));
    assert!(!events.iter().any(|e| e.reason.as_deref() == Some("TakingOver")));
    operator.stop().await;
    kubelets.end(&stage, 2).await;
}

/// The control plane receives nothing from any worker for longer than a node may be silent; then it does again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partition_from_all_workers_moves_no_instance() {
    // A separate API server: silent nodes affect every test that uses the same one.
    let api = start_api_server();
    let stage = Stage::new(&api, "storm", 4).await;
    let kubelets = Kubelets::of(&stage, 4).await;
    let standby = stage.stand_by().await;
    let leases = standby.leases.clone();
    let operator = stage.operate_after(standby);
    stage.create("p", &spec(2)).await;
    for (instance, node) in [("p-0", 1), ("p-1", 2)] {
        placed(&stage, instance, stage.node(node), "1").await;
        stage.pretend_pod(instance).await;
    }
    let paused = |wanted: &'static str| {
        move |c: &forebay_api::StorageCluster| {
            let conditions = c.status.iter().flat_map(|s| &s.conditions);
            conditions.into_iter().any(|c| c.type_ == "TakeoverPaused" && c.status == wanted)
        }
    };
    stage.cluster("p", "nothing pauses", paused("False")).await;
    let pods = stage.api::<Pod>();
    let uids = |of: Vec<Pod>| of.into_iter().map(|p| p.metadata.uid).collect::<Vec<_>>();
    let before = uids(pods.list(&ListParams::default()).await.unwrap().items);
    eventually("all nodes are known to live", || async {
        let (sights, _) = leases.judged("p");
        let fresh = sights.values().filter(|s| s.is_fresh()).count();
        if fresh == 4 && sights.len() == 4 { Ok(()) } else { Err(format!("{sights:?}")) }
    })
    .await;
    for n in 1..=4 {
        kubelets.switch_off(stage.node(n));
    }
    stage.condition("p", "TakeoverPaused", "True", "ManyNodesSilent").await;
    eventually("each of them was silent for longer than a node may be", || async {
        let (sights, _) = leases.judged("p");
        let patience = Duration::from_secs(25 + 6);
        if sights.values().all(|s| s.silent > patience) { Ok(()) } else { Err(format!("{sights:?}")) }
    })
    .await;
    let epochs = |data: &std::collections::BTreeMap<String, String>| {
        [data["p-0.epoch"].clone(), data["p-1.epoch"].clone()]
    };
    assert_eq!(epochs(&record(&stage, "p").await), ["1", "1"]);
    kubelets.switch_on();
    eventually("all nodes live again", || async {
        let (sights, _) = leases.judged("p");
        if sights.values().all(|s| s.is_fresh()) { Ok(()) } else { Err(format!("{sights:?}")) }
    })
    .await;
    stage.cluster("p", "takeovers resume", paused("False")).await;
    assert_eq!(epochs(&record(&stage, "p").await), ["1", "1"]);
    assert_eq!(uids(pods.list(&ListParams::default()).await.unwrap().items), before, "no pod was ended");
    let events = stage.api::<Event>().list(&ListParams::default()).await.unwrap().items;
    for reason in ["TakeoverPaused", "TakeoverResumed"] {
        assert!(events.iter().any(|e| e.reason.as_deref() == Some(reason)), "{reason}");
    }
    assert!(!events.iter().any(|e| e.reason.as_deref() == Some("TakingOver")));
    operator.stop().await;
}

/// A spare that went silent just before is not chosen, although Kubernetes reports it as ready.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_spare_is_not_chosen() {
    let stage = Stage::new(shared(), "rack", 4).await;
    let kubelets = Kubelets::of(&stage, 4).await;
    let operator = stage.operate().await;
    stage.create("r", &spec(1)).await;
    placed(&stage, "r-0", stage.node(1), "1").await;
    stage.pretend_pod("r-0").await;
    stage
        .cluster("r", "it is reported", |c| c.status.as_ref().is_some_and(|s| s.instances[0].epoch == 1))
        .await;
    // The first of the spares, which would be chosen by name.
    kubelets.switch_off(stage.node(2));
    kubelets.switch_off(stage.node(1));
    placed(&stage, "r-0", stage.node(3), "2").await;
    operator.stop().await;
    kubelets.end(&stage, 4).await;
}
