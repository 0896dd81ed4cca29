//! A StorageCluster with real servers as its instances, in a namespace of a real API server. The test plays the operator, which
//! starts the instances, reports them and creates the certificates.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use forebay_api::cluster::{
    Backend, BackendKind, DirectoryBackend, InstancePhase, InstanceStatus, QuotaKind, StorageClusterStatus,
};
use forebay_api::{StorageCluster, StorageClusterSpec, names};
use forebay_e2e::kubernetes::LocalApiServer;
use forebay_e2e::kubernetes::kubectl::Kubectl;
use forebay_proto::admin::admin_client::AdminClient;
use forebay_proto::csi::controller_client::ControllerClient;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{PersistentVolume, Secret};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use serde_json::json;
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use crate::process::{DEADLINE, Process, connect, driver_binary, server_binary};

pub const CLUSTER: &str = "c";
pub const BACKEND: &str = "fast";

/// kubectl with all rights.
pub fn kubectl() -> Kubectl {
    api_server().lock().unwrap().kubectl()
}

/// A kubeconfig with all rights.
pub fn admin_kubeconfig() -> PathBuf {
    api_server().lock().unwrap().kubeconfig()
}

/// A kubeconfig with the rights of a service account.
pub fn kubeconfig_of(namespace: &str, account: &str) -> PathBuf {
    let user = format!("system:serviceaccount:{namespace}:{account}");
    api_server().lock().unwrap().kubeconfig_for(&user, None).unwrap()
}

/// One API server for all tests; each test has its own namespace.
fn api_server() -> &'static Mutex<LocalApiServer> {
    static SERVER: OnceLock<Mutex<LocalApiServer>> = OnceLock::new();
    SERVER.get_or_init(|| {
        let server = LocalApiServer::start(crate::WITH_CONTROLLERS).unwrap();
        let crd = chart().join("crds/storageclusters.yaml");
        server.kubectl().run(&["apply", "-f", crd.to_str().unwrap()]).unwrap();
        let established = "--for=condition=Established";
        let name = "crd/storageclusters.storage.forebay.io";
        server.kubectl().run(&["wait", established, name, "--timeout=60s"]).unwrap();
        Mutex::new(server)
    })
}

fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/forebay")
}

/// The rules of the Role in a template of the chart, so that the driver has exactly its rights here.
fn rules(template: &str) -> String {
    let text = fs::read_to_string(chart().join("templates").join(template)).unwrap();
    let text = text.split("\n---").find(|document| document.contains("kind: Role\n")).unwrap();
    let rules = &text[text.find("\nrules:").unwrap()..];
    assert!(!rules.contains("{{"), "the rules hold more than text: {rules}");
    rules.to_owned()
}

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub pem: String,
}

impl Authority {
    pub fn new() -> Self {
        let mut parameters = CertificateParams::new(Vec::new()).unwrap();
        parameters.distinguished_name.push(DnType::CommonName, "a cluster's authority");
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = parameters.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(parameters, key), pem }
    }

    /// Issues a certificate. Returns certificate and key as PEM.
    pub fn issue(&self, name: &str) -> (String, String) {
        let mut parameters = CertificateParams::new(vec![name.to_owned()]).unwrap();
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        (parameters.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

/// An instance: a server's process, and a folder that outlives it.
pub struct Instance {
    pub name: String,
    folder: PathBuf,
    pub pool: PathBuf,
    process: Option<Process>,
    admin_port: u16,
    smb_port: u16,
}

impl Instance {
    fn new(folder: &Path, pools: &Path, name: &str, namespace: &str, authority: &Authority) -> Self {
        let pool = pools.join(format!("{name}-pool"));
        let folder = folder.join(name);
        fs::create_dir(&folder).unwrap();
        let (certificate, key) = authority.issue(&names::admin_server_name(name, namespace));
        fs::write(folder.join("tls.crt"), certificate).unwrap();
        fs::write(folder.join("tls.key"), key).unwrap();
        fs::write(folder.join("ca.crt"), &authority.pem).unwrap();
        // Were free a moment ago; the server reports it if another process has taken one of the ports since.
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [admin_port, smb_port] = ports.map(|listener| listener.local_addr().unwrap().port());
        let path = |file: &str| folder.join(file).display().to_string();
        fs::write(
            folder.join("server.toml"),
            format!(
                "[instance]\nname = \"{name}\"\nepoch = 1\n[server]\nlisten = [\"127.0.0.1:{smb_port}\"]\n\
                 [admin]\nsocket = \"{}\"\nlisten = \"127.0.0.1:{admin_port}\"\ncertificate = \"{}\"\n\
                 key = \"{}\"\nclient_ca = \"{}\"\n[http]\nlisten = \"\"\n\
                 [[pool]]\nname = \"{BACKEND}\"\npath = \"{}\"\ncreate = true\nquota = \"none\"\n",
                path("admin.sock"),
                path("tls.crt"),
                path("tls.key"),
                path("ca.crt"),
                pool.display(),
            ),
        )
        .unwrap();
        Self { name: name.to_owned(), folder, pool, process: None, admin_port, smb_port }
    }

    /// Starts the server and waits until it answers.
    pub async fn start(&mut self) {
        let mut command = Command::new(server_binary());
        command.arg("run").arg("--config").arg(self.folder.join("server.toml"));
        self.process = Some(Process::start(&mut command, self.folder.join("log")));
        self.admin().await;
    }

    /// Kills the server; its volumes stay.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// The server's admin API by its local socket.
    pub async fn admin(&mut self) -> AdminClient<Channel> {
        let socket = self.folder.join("admin.sock");
        AdminClient::new(connect(self.process.as_mut().unwrap(), &socket).await)
    }

    pub async fn volumes(&mut self) -> Vec<String> {
        let mut admin = self.admin().await;
        let list = admin.list_volumes(forebay_proto::admin::ListVolumesRequest::default()).await.unwrap();
        list.into_inner().volumes.into_iter().map(|volume| volume.volume_id).collect()
    }

    fn status(&self) -> InstanceStatus {
        InstanceStatus {
            name: self.name.clone(),
            phase: InstancePhase::Ready,
            node: format!("node-of-{}", self.name),
            address: "127.0.0.1".into(),
            port: self.smb_port,
            admin_endpoint: format!("127.0.0.1:{}", self.admin_port),
            ..Default::default()
        }
    }
}

/// The cluster, its servers, and a driver in controller mode.
pub struct Town {
    pub namespace: String,
    pub client: Client,
    pub authority: Authority,
    pub instances: Vec<Instance>,
    /// The status that the operator would report.
    pub statuses: Vec<InstanceStatus>,
    pub drivers: Vec<Process>,
    pub controller: ControllerClient<Channel>,
    /// Last, so that it is dropped last.
    pub dir: TempDir,
}

impl Town {
    /// A cluster with this many instances, all ready.
    pub async fn new(instances: u32) -> Self {
        Self::with_pools(None, instances).await
    }

    /// Same, with the pools below `pools`.
    pub async fn with_pools(pools: Option<&Path>, instances: u32) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let namespace = format!("town-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new();

        let admin_config = {
            let server = api_server().lock().unwrap();
            server.kubectl().apply(&manifests(&namespace)).unwrap();
            server.kubeconfig()
        };
        let client = client_of(&admin_config).await;

        let mut all = Vec::new();
        for ordinal in 0..instances {
            let name = names::instance(CLUSTER, ordinal);
            let mut instance =
                Instance::new(dir.path(), pools.unwrap_or(dir.path()), &name, &namespace, &authority);
            instance.start().await;
            all.push(instance);
        }
        let driver = start_controller(dir.path(), &namespace, "csi.sock");
        let (drivers, controller) = (vec![driver.0], driver.1);
        let statuses = all.iter().map(Instance::status).collect();
        let mut town =
            Self { namespace, client, authority, instances: all, statuses, drivers, controller, dir };
        town.write_certificate(&town.authority.issue(names::CLIENT_DRIVER), &town.authority.pem).await;
        town.create_cluster(CLUSTER).await;
        town.write_status().await;
        let socket = town.dir.path().join("csi.sock");
        town.controller = ControllerClient::new(connect(&mut town.drivers[0], &socket).await);
        town
    }

    pub fn clusters(&self) -> Api<StorageCluster> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub async fn create_cluster(&self, name: &str) {
        let directory = DirectoryBackend {
            path: "/data/forebay".into(),
            create: true,
            quota: QuotaKind::None,
            overcommit_percent: 100,
        };
        let spec = StorageClusterSpec {
            instances: self.instances.len() as u32,
            backends: vec![Backend {
                name: BACKEND.into(),
                kind: BackendKind::Directory,
                directory: Some(directory),
                ..Backend::default()
            }],
            ..Default::default()
        };
        let cluster = StorageCluster::new(name, spec);
        self.clusters().create(&PostParams::default(), &cluster).await.unwrap();
    }

    /// Writes the status, as the operator would.
    pub async fn write_status(&self) {
        let generation = self.clusters().get(CLUSTER).await.unwrap().metadata.generation;
        let status = StorageClusterStatus {
            observed_generation: generation,
            instances: self.statuses.clone(),
            ..Default::default()
        };
        // A list with keys is merged by its keys: nothing else would remove an instance.
        let clear = Patch::Merge(json!({ "status": { "instances": null } }));
        self.clusters().patch_status(CLUSTER, &PatchParams::default(), &clear).await.unwrap();
        let patch = Patch::Merge(json!({ "status": status }));
        self.clusters().patch_status(CLUSTER, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Creates or replaces the Secret with the driver's client certificate.
    pub async fn write_certificate(&self, (certificate, key): &(String, String), authority: &str) {
        let data = [
            (names::tls::CERTIFICATE, certificate.as_str()),
            (names::tls::KEY, key),
            (names::tls::AUTHORITY, authority),
        ];
        let mut secret = Secret {
            type_: Some("kubernetes.io/tls".into()),
            data: Some(
                data.iter().map(|(k, v)| ((*k).to_owned(), ByteString(v.as_bytes().to_vec()))).collect(),
            ),
            ..Default::default()
        };
        let name = names::driver_secret(CLUSTER);
        secret.metadata.name = Some(name.clone());
        let _ = self.secrets().delete(&name, &DeleteParams::default()).await;
        self.secrets().create(&PostParams::default(), &secret).await.unwrap();
    }

    /// Creates a PersistentVolume.
    pub async fn apply_persistent_volume(&self, volume: serde_json::Value) {
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let volume = serde_json::from_value(volume).unwrap();
        api.create(&PostParams::default(), &volume).await.unwrap();
    }

    pub async fn record(&self, share: &str) -> Option<Secret> {
        self.secrets().get_opt(&names::volume_secret(share)).await.unwrap()
    }

    /// Writes a Secret as the driver leaves it if it crashes before it creates the volume.
    pub async fn write_record(&self, share: &str, instance: &str, password: &str) {
        let cluster = instance.rsplit_once('-').unwrap().0;
        let secret = json!({
            "metadata": {
                "name": names::volume_secret(share),
                "labels": {
                    names::LABEL_MANAGED_BY: names::MANAGED_BY_DRIVER,
                    names::LABEL_CLUSTER: cluster,
                    names::LABEL_INSTANCE: instance,
                    names::LABEL_VOLUME: share,
                },
            },
            "stringData": { "username": share, "password": password },
        });
        let secret = serde_json::from_value(secret).unwrap();
        self.secrets().create(&PostParams::default(), &secret).await.unwrap();
    }

    /// The number of Secrets of all volumes.
    pub async fn records(&self) -> usize {
        let driver = format!("{}={}", names::LABEL_MANAGED_BY, names::MANAGED_BY_DRIVER);
        self.secrets().list(&ListParams::default().labels(&driver)).await.unwrap().items.len()
    }

    /// A second controller of the same cluster.
    pub async fn another_controller(&mut self) -> ControllerClient<Channel> {
        let name = format!("csi-{}.sock", self.drivers.len());
        let (mut driver, _) = start_controller(self.dir.path(), &self.namespace, &name);
        let channel = connect(&mut driver, &self.dir.path().join(&name)).await;
        self.drivers.push(driver);
        ControllerClient::new(channel)
    }

    /// How many volumes each instance holds.
    pub async fn volumes(&mut self) -> Vec<usize> {
        let mut counts = Vec::new();
        for instance in &mut self.instances {
            counts.push(instance.volumes().await.len());
        }
        counts
    }
}

/// The account of the controller.
const CONTROLLER: &str = "forebay-csi-controller";

/// Grants the chart's cluster-wide rights to the account of this town's namespace.
pub fn grant_rights(namespace: &str) {
    let manifests =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../manifests/forebay.yaml")).unwrap();
    let is_role = |document: &&str| {
        document.contains("\nkind: ClusterRole\n") && document.contains(&format!("\n  name: {CONTROLLER}\n"))
    };
    kubectl().apply(manifests.split("\n---\n").find(is_role).unwrap()).unwrap();
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": { "name": format!("{CONTROLLER}-{namespace}") },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": CONTROLLER },
        "subjects": [{ "kind": "ServiceAccount", "name": CONTROLLER, "namespace": namespace }],
    });
    kubectl().apply(&binding.to_string()).unwrap();
}

/// Namespace and rights.
fn manifests(namespace: &str) -> String {
    let mut text = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {namespace}}}\n");
    for (account, template) in
        [("forebay-csi-controller", "rbac-csi-controller.yaml"), ("forebay-csi-node", "rbac-csi-node.yaml")]
    {
        text += &format!(
            "---\napiVersion: rbac.authorization.k8s.io/v1\nkind: Role\n\
             metadata: {{name: {account}, namespace: {namespace}}}{}\n\
             ---\napiVersion: rbac.authorization.k8s.io/v1\nkind: RoleBinding\n\
             metadata: {{name: {account}, namespace: {namespace}}}\n\
             roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: {account}}}\n\
             subjects: [{{kind: ServiceAccount, name: {account}, namespace: {namespace}}}]\n",
            rules(template)
        );
    }
    text
}

async fn client_of(kubeconfig: &Path) -> Client {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

/// A driver with the rights of its service account.
pub fn start_in_kubernetes(
    dir: &Path,
    namespace: &str,
    socket: &str,
    mode: &str,
    arguments: &[&str],
) -> Process {
    let mut command = Command::new(driver_binary());
    command.args(["--mode", mode, "--kubernetes", "--namespace", namespace]).args(arguments);
    command.arg("--endpoint").arg(format!("unix://{}", dir.join(socket).display()));
    command.env("KUBECONFIG", kubeconfig_of(namespace, &format!("forebay-csi-{mode}")));
    Process::start(&mut command, dir.join(format!("{socket}.log")))
}

fn start_controller(dir: &Path, namespace: &str, socket: &str) -> (Process, ControllerClient<Channel>) {
    let process = start_in_kubernetes(dir, namespace, socket, "controller", &[]);
    let endpoint = format!("unix://{}", dir.join(socket).display());
    let channel = Endpoint::from_shared(endpoint).unwrap().timeout(DEADLINE).connect_lazy();
    (process, ControllerClient::new(channel))
}
