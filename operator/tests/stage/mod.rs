//! A real API server and etcd, the operator with exactly the chart's rights, and nodes.
//!
//! There is no kubelet and no scheduler, and no controller manager unless [`start_with_controllers`] starts one. The test plays
//! the StatefulSet controller and the kubelet in [`Stage::run_pod`], which creates the pod of an instance, starts a real
//! `forebay-server` with the configuration and certificates that the operator created for it, and reports the pod as ready when
//! the server is.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use forebay_api::StorageCluster;
use forebay_e2e::kubernetes::LocalApiServer;
use forebay_operator::desired::Settings;
use forebay_operator::leases::Leases;
use forebay_operator::metrics::Metrics;
use forebay_operator::progress::Progress;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, Secret, ServiceAccount};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, Config, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Timeout of every wait; test machines are busy.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// The API server that all tests of this binary share.
pub fn shared() -> &'static LocalApiServer {
    static SHARED: OnceLock<LocalApiServer> = OnceLock::new();
    SHARED.get_or_init(start_api_server)
}

/// Starts an API server for one test, with the chart's definitions.
pub fn start_api_server() -> LocalApiServer {
    with_definitions(LocalApiServer::start(false).expect("etcd and the API server start"))
}

/// Starts an API server with Kubernetes' own controllers: the StatefulSet controller creates pods, and objects without an owner
/// are removed.
pub fn start_with_controllers() -> LocalApiServer {
    with_definitions(
        LocalApiServer::start(true).expect("etcd, the API server and the controller manager start"),
    )
}

fn with_definitions(api: LocalApiServer) -> LocalApiServer {
    let crds = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/forebay/crds");
    api.kubectl()
        .run(&["apply", "--server-side", "--filename", crds])
        .expect("the API server takes the definitions");
    let wait = ["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"];
    api.kubectl().run(&wait).expect("the definitions are served");
    api
}

pub async fn client(kubeconfig: &Path, server: Option<String>) -> Client {
    let mut kubeconfig = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
    if let Some(server) = server {
        for cluster in &mut kubeconfig.clusters {
            cluster.cluster.as_mut().unwrap().server = Some(server.clone());
        }
    }
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .expect("a kubeconfig");
    Client::try_from(config).expect("a client")
}

pub async fn eventually<T, F, Fut>(what: &str, mut probe: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, String>>,
{
    let started = Instant::now();
    loop {
        match probe().await {
            Ok(found) => return found,
            Err(why) => assert!(started.elapsed() < DEADLINE, "{what} has not come about: {why}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The server's binary.
fn server_binary() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        forebay_e2e::sibling::server_binary(Path::new(env!("CARGO_BIN_EXE_forebay-operator"))).unwrap()
    })
}

struct Server {
    child: Child,
    folder: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A namespace with an operator's account, and nodes that only this test's clusters select.
pub struct Stage {
    pub client: Client,
    pub namespace: String,
    pub kubeconfig: PathBuf,
    number: u8,
    /// Whether Kubernetes' own controllers run: they create the pods.
    pub controllers: bool,
    /// Pools outlive their server's restart, as a node's directory does.
    pools: tempfile::TempDir,
    servers: Mutex<HashMap<String, Server>>,
}

/// An operator that does not work yet because another one does. It watches the kubelets' Leases.
pub struct Standby {
    client: Client,
    pub leases: Leases,
    watching: JoinHandle<()>,
}

pub struct Operator {
    pub metrics: Arc<Metrics>,
    pub progress: Arc<Progress>,
    end: watch::Sender<bool>,
    work: JoinHandle<()>,
    watching: JoinHandle<()>,
}

impl Drop for Operator {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

impl Operator {
    /// Like kill -9: not even work in progress is completed.
    pub async fn kill(mut self) {
        self.work.abort();
        let _ = (&mut self.work).await;
    }

    pub async fn stop(mut self) {
        self.end.send_replace(true);
        (&mut self.work).await.expect("the operator ends without a panic");
    }

    pub fn assert_working(&self) {
        assert!(!self.work.is_finished(), "the operator has ended");
    }
}

/// The name of a pod as the StatefulSet controller chooses it.
fn pod_name(instance: &str) -> String {
    format!("{instance}-0")
}

impl Stage {
    pub async fn new(api: &LocalApiServer, name: &str, nodes: u8) -> Self {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let admin = client(&api.kubeconfig(), None).await;
        let namespace = format!("stage-{name}");
        let post = PostParams::default();
        let object: Namespace = serde_json::from_value(json!({ "metadata": { "name": namespace } })).unwrap();
        Api::<Namespace>::all(admin.clone()).create(&post, &object).await.expect("a namespace");
        let account: ServiceAccount =
            serde_json::from_value(json!({ "metadata": { "name": "forebay-server" } })).unwrap();
        Api::<ServiceAccount>::namespaced(admin.clone(), &namespace)
            .create(&post, &account)
            .await
            .expect("an account");
        let user = format!("system:serviceaccount:{namespace}:forebay-operator");
        let kubeconfig = api.kubeconfig_for(&user, None).expect("a kubeconfig");
        grant_the_charts_rights(&admin, &namespace).await;
        let stage = Self {
            client: admin,
            namespace,
            kubeconfig,
            number,
            controllers: false,
            pools: tempfile::tempdir().unwrap(),
            servers: Mutex::default(),
        };
        for n in 1..=nodes {
            stage.add_node(n).await;
        }
        stage
    }

    pub fn node(&self, n: u8) -> String {
        format!("{}-n{n}", self.namespace)
    }

    /// Each node has its own loopback address, so that servers on "different nodes" can use the same ports.
    fn address(&self, n: u8) -> String {
        format!("127.77.{}.{n}", self.number)
    }

    pub async fn add_node(&self, n: u8) {
        let name = self.node(n);
        let nodes: Api<Node> = Api::all(self.client.clone());
        let labels = json!({ "stage": self.namespace });
        let node: Node =
            serde_json::from_value(json!({ "metadata": { "name": name, "labels": labels } })).unwrap();
        nodes.create(&PostParams::default(), &node).await.expect("a node");
        let status = json!({ "status": {
            "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "" }],
            "addresses": [{ "type": "InternalIP", "address": self.address(n) }],
        } });
        nodes.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await.expect("its status");
        let untainted = json!({ "spec": { "taints": null } });
        nodes.patch(&name, &PatchParams::default(), &Patch::Merge(&untainted)).await.expect("no taints");
    }

    pub fn settings(&self) -> Settings {
        Settings {
            namespace: self.namespace.clone(),
            image: "docker.io/forebay/forebay:1".to_owned(),
            seccomp_profile: "RuntimeDefault".to_owned(),
            priority_class: String::new(),
            announcement: Duration::from_secs(1),
            cluster_uid: "a-cluster".to_owned(),
            disruption_budgets: true,
        }
    }

    pub async fn operate(&self) -> Operator {
        self.operate_with(client(&self.kubeconfig, None).await)
    }

    pub fn operate_with(&self, client: Client) -> Operator {
        self.operate_after(self.stand_by_with(client))
    }

    pub async fn stand_by(&self) -> Standby {
        self.stand_by_with(client(&self.kubeconfig, None).await)
    }

    fn stand_by_with(&self, client: Client) -> Standby {
        let leases = Leases::new(client.clone());
        let (watched, namespace) = (leases.clone(), self.namespace.clone());
        let watching = tokio::spawn(async move { watched.watch(&namespace).await });
        Standby { client, leases, watching }
    }

    pub fn operate_after(&self, standby: Standby) -> Operator {
        let Standby { client, leases, watching } = standby;
        let metrics = Arc::new(Metrics::default());
        let progress = Arc::new(Progress::default());
        let (end, ending) = watch::channel(false);
        let work = forebay_operator::run::operate(
            client,
            self.settings(),
            Arc::clone(&metrics),
            leases,
            forebay_operator::leader::Tenure::new(Duration::MAX),
            Arc::clone(&progress),
            ending,
        );
        Operator { metrics, progress, end, work: tokio::spawn(work), watching }
    }

    pub fn clusters(&self) -> Api<StorageCluster> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// A spec that selects this stage's nodes, with unprivileged ports.
    pub fn spec(&self, more: &Value) -> Value {
        let mut spec = json!({
            "placement": { "nodeSelector": { "stage": self.namespace } },
            "network": { "ports": { "smb": 14445, "smbDirect": 15445, "admin": 19444, "metrics": 19445 } },
            "backends": [{ "name": "main", "kind": "Directory", "directory": { "path": "/mnt/stage", "quota": "None" } }],
            "upgrade": { "minReadySeconds": 0 },
        });
        for (key, value) in more.as_object().unwrap() {
            spec[key.as_str()] = value.clone();
        }
        spec
    }

    pub async fn create(&self, name: &str, more: &Value) {
        let cluster = json!({
            "apiVersion": "storage.forebay.io/v1alpha1", "kind": "StorageCluster",
            "metadata": { "name": name }, "spec": self.spec(more),
        });
        let cluster: StorageCluster = serde_json::from_value(cluster).unwrap();
        self.clusters().create(&PostParams::default(), &cluster).await.expect("the StorageCluster is taken");
    }

    pub async fn change(&self, name: &str, spec: &Value) {
        let patch = json!({ "spec": spec });
        self.clusters()
            .patch(name, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .expect("the change is taken");
    }

    /// Plays StatefulSet controller and kubelet without a server: the pod exists and is ready.
    pub async fn pretend_pod(&self, instance: &str) {
        let sets: Api<StatefulSet> = self.api();
        let set = sets.get(instance).await.expect("the StatefulSet");
        let seen = json!({ "status": { "observedGeneration": set.metadata.generation, "replicas": 1 } });
        sets.patch_status(instance, &PatchParams::default(), &Patch::Merge(&seen)).await.expect("its status");
        let template = set.spec.unwrap().template;
        let metadata = template.metadata.unwrap();
        let node = set.metadata.annotations.unwrap()[forebay_api::names::ANNOTATION_NODE].clone();
        let mut spec = serde_json::to_value(template.spec.unwrap()).unwrap();
        spec["nodeName"] = node.into();
        let pod = json!({
            "metadata": { "name": pod_name(instance), "labels": metadata.labels, "annotations": metadata.annotations },
            "spec": spec,
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let pods: Api<Pod> = self.api();
        match pods.create(&PostParams::default(), &pod).await {
            // A pod of that name still exists: the StatefulSet controller waits, too.
            Err(kube::Error::Api(status)) if status.code == 409 => return,
            other => other.expect("the API server takes the pod"),
        };
        let ready = json!({ "status": { "phase": "Running", "conditions": [
            { "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z" },
        ] } });
        pods.patch_status(&pod_name(instance), &PatchParams::default(), &Patch::Merge(&ready))
            .await
            .expect("ready");
    }

    /// Waits until a StorageCluster fulfils a condition.
    pub async fn cluster(
        &self,
        name: &str,
        what: &str,
        is: impl Fn(&StorageCluster) -> bool,
    ) -> StorageCluster {
        let api = self.clusters();
        eventually(what, || async {
            let found = api.get(name).await.map_err(|e| e.to_string())?;
            let reported = || serde_json::to_string_pretty(&found.status).unwrap();
            if is(&found) { Ok(found) } else { Err(reported()) }
        })
        .await
    }

    pub async fn condition(&self, name: &str, type_: &str, status: &str, reason: &str) -> StorageCluster {
        let what = format!("{type_}={status} {reason} of {name}");
        self.cluster(name, &what, |c| {
            c.status
                .iter()
                .flat_map(|s| &s.conditions)
                .any(|c| c.type_ == type_ && c.status == status && (reason.is_empty() || c.reason == reason))
        })
        .await
    }

    pub async fn gone(&self, name: &str) {
        let api = self.clusters();
        eventually(&format!("the end of {name}"), || async {
            match api.get_opt(name).await.map_err(|e| e.to_string())? {
                None => Ok(()),
                Some(c) => Err(serde_json::to_string_pretty(&c.status).unwrap()),
            }
        })
        .await;
    }

    /// Plays StatefulSet controller and kubelet: creates the pod of an instance from the StatefulSet's current template, with a
    /// real server.
    pub async fn run_pod(&self, instance: &str) {
        let sets: Api<StatefulSet> = self.api();
        let set = eventually(&format!("StatefulSet {instance}"), || async {
            sets.get_opt(instance).await.map_err(|e| e.to_string())?.ok_or_else(|| "not there".to_owned())
        })
        .await;
        if !self.controllers {
            let seen = json!({ "status": { "observedGeneration": set.metadata.generation, "replicas": 1 } });
            sets.patch_status(instance, &PatchParams::default(), &Patch::Merge(&seen))
                .await
                .expect("its status");
        }
        let template = set.spec.unwrap().template;
        let metadata = template.metadata.unwrap();
        let node = set.metadata.annotations.unwrap()[forebay_api::names::ANNOTATION_NODE].clone();
        let mut spec = serde_json::to_value(template.spec.unwrap()).unwrap();
        spec["nodeName"] = node.clone().into();
        let pod = json!({
            "metadata": { "name": pod_name(instance), "labels": metadata.labels, "annotations": metadata.annotations },
            "spec": spec,
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let pods: Api<Pod> = self.api();
        if self.controllers {
            self.bind_pod(instance, &node).await;
        } else {
            pods.create(&PostParams::default(), &pod).await.expect("the API server takes the pod");
        }
        let n: u8 = node.rsplit_once("-n").unwrap().1.parse().unwrap();
        self.start_server(instance, &self.address(n)).await;
        let ready = json!({ "status": { "phase": "Running", "conditions": [
            { "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z" },
        ] } });
        pods.patch_status(&pod_name(instance), &PatchParams::default(), &Patch::Merge(&ready))
            .await
            .expect("ready");
    }

    /// Plays the scheduler: binds the pod that the StatefulSet controller has created to the node that it must run on.
    async fn bind_pod(&self, instance: &str, node: &str) {
        let name = pod_name(instance);
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name },
            "target": { "apiVersion": "v1", "kind": "Node", "name": node },
        });
        let pods: Api<Pod> = self.api();
        eventually(&format!("pod {name}"), || async {
            let bound: Result<Value, _> =
                pods.create_subresource("binding", &name, &PostParams::default(), &binding).await;
            bound.map(|_| ()).map_err(|e| e.to_string())
        })
        .await;
    }

    /// Starts the server with the configuration and certificates of the cluster. Only its paths differ, and it listens only on
    /// its node's address.
    async fn start_server(&self, instance: &str, address: &str) {
        let folder = tempfile::tempdir().unwrap();
        let map =
            self.api::<ConfigMap>().get(&format!("{instance}-config")).await.expect("its configuration");
        let tls = folder.path().join("tls");
        std::fs::create_dir(&tls).unwrap();
        let secret = self.api::<Secret>().get(&format!("{instance}-tls")).await.expect("its certificates");
        for (key, value) in secret.data.unwrap() {
            std::fs::write(tls.join(key), value.0).unwrap();
        }
        let pools = self.pools.path().join("main");
        std::fs::create_dir_all(&pools).unwrap();
        let socket = folder.path().join("admin.sock");
        let configuration = map.data.unwrap()["server.toml"]
            .replace("/etc/forebay/tls", tls.to_str().unwrap())
            .replace("/var/lib/forebay/pools/main", pools.to_str().unwrap())
            .replace("0.0.0.0", address)
            .replace("[admin]\n", &format!("[admin]\nsocket = {:?}\n", socket.to_str().unwrap()));
        let file = folder.path().join("server.toml");
        std::fs::write(&file, configuration).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let mut command = Command::new(tokio::task::spawn_blocking(server_binary).await.unwrap());
        command.arg("run").arg("--config").arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().expect("the server starts");
        let server = Server { child, folder };
        let path = server.folder.path().join("log");
        self.servers.lock().unwrap().insert(instance.to_owned(), server);
        eventually(&format!("the server of {instance}"), || async {
            let log = std::fs::read_to_string(&path).unwrap_or_default();
            let exited = self.servers.lock().unwrap().get_mut(instance).unwrap().child.try_wait().unwrap();
            assert!(exited.is_none(), "the server of {instance} has ended:\n{log}");
            let answers = tokio::net::TcpStream::connect((address, 19444)).await;
            answers.map(|_| ()).map_err(|e| format!("{e}\n{log}"))
        })
        .await;
    }

    /// Plays the kubelet when a Secret changes: the server finds new files without a notification.
    pub async fn refresh_certificates(&self, instance: &str) {
        let tls = self.servers.lock().unwrap()[instance].folder.path().join("tls");
        let secret = self.api::<Secret>().get(&format!("{instance}-tls")).await.expect("its certificates");
        for (key, value) in secret.data.unwrap() {
            std::fs::write(tls.join(key), value.0).unwrap();
        }
    }

    /// The address of an instance's admin API.
    pub fn admin_endpoint(&self, n: u8) -> std::net::SocketAddr {
        std::net::SocketAddr::new(self.address(n).parse().unwrap(), 19444)
    }

    /// Plays the kubelet when a pod is deleted: the server ends, and the pod is removed.
    pub async fn end_pod(&self, instance: &str) {
        self.servers.lock().unwrap().remove(instance);
        let at_once = DeleteParams::default().grace_period(0);
        match self.api::<Pod>().delete(&pod_name(instance), &at_once).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            other => {
                other.expect("the pod goes");
            }
        }
    }

    /// The instances with pods that the operator has deleted but that still exist.
    pub async fn ending(&self) -> Vec<String> {
        let pods = self.api::<Pod>().list(&kube::api::ListParams::default()).await.expect("pods").items;
        let ending = pods.into_iter().filter(|p| p.metadata.deletion_timestamp.is_some());
        ending.map(|p| p.name_any().strip_suffix("-0").unwrap().to_owned()).collect()
    }

    /// Creates a volume on an instance's server.
    pub fn make_volume(&self, instance: &str, volume: &str) {
        let servers = self.servers.lock().unwrap();
        let folder = servers[instance].folder.path();
        let mut command = Command::new(server_binary());
        command.args([
            "volume",
            "create",
            volume,
            "--size",
            "1MiB",
            "--quota",
            "none",
            "--username",
            volume,
            "--socket",
        ]);
        command.arg(folder.join("admin.sock")).env("FOREBAY_PASSWORD", "a-password-of-tests");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Grants the operator's Roles and bindings of manifests/ in another namespace.
async fn grant_the_charts_rights(admin: &Client, namespace: &str) {
    let manifests = include_str!("../../../manifests/forebay.yaml");
    let mut granted = 0;
    for document in manifests.split("\n---") {
        let kind = document.lines().find_map(|l| l.strip_prefix("kind: ")).unwrap_or_default();
        if !document.contains("name: forebay-operator\n") || !kind.contains("Role") {
            continue;
        }
        let mut object: Value = serde_saphyr::from_str(document).expect("YAML");
        // The Role for the kubelets' Leases is in their namespace, which all stages share.
        let theirs = object["metadata"]["namespace"] == "kube-node-lease";
        if theirs {
            let name = format!("{namespace}-forebay-operator");
            object["metadata"]["name"] = name.clone().into();
            if object["roleRef"].is_object() {
                object["roleRef"]["name"] = name.into();
            }
        } else if object["metadata"]["namespace"].is_string() {
            object["metadata"]["namespace"] = namespace.into();
        }
        for subject in object["subjects"].as_array_mut().into_iter().flatten() {
            // Without a controller manager there are no tokens: a certificate with that name has the same rights.
            *subject = json!({
                "kind": "User", "apiGroup": "rbac.authorization.k8s.io",
                "name": format!("system:serviceaccount:{namespace}:forebay-operator"),
            });
        }
        if kind.starts_with("Cluster") {
            let name = format!("{namespace}-forebay-operator");
            object["metadata"]["name"] = name.clone().into();
            if object["roleRef"].is_object() {
                object["roleRef"]["name"] = name.into();
            }
        }
        let plural = format!("{}s", kind.to_lowercase());
        let gvk = GroupVersionKind::gvk("rbac.authorization.k8s.io", "v1", kind);
        let resource = ApiResource::from_gvk_with_plural(&gvk, &plural);
        let api: Api<DynamicObject> = if kind.starts_with("Cluster") {
            Api::all_with(admin.clone(), &resource)
        } else {
            let of = if theirs { "kube-node-lease" } else { namespace };
            Api::namespaced_with(admin.clone(), of, &resource)
        };
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        api.create(&PostParams::default(), &object).await.expect("rights");
        granted += 1;
    }
    assert_eq!(granted, 6, "two Roles, a ClusterRole and their bindings of the operator");
}
