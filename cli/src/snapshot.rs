//! Reads all objects once.

use std::fmt::Debug;

use anyhow::Context;
use forebay_api::{DRIVER, GROUP, StorageCluster, StorageNode, VERSION};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, StorageClass};
use kube::api::{Api, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::limits::{CONNECT_DEADLINE, PAGE_ENTRIES, PAGES_MAX, READ_DEADLINE};
use crate::options::{Connection, NAMESPACE, NAMESPACE_VARIABLE};

/// Label selector for the objects of Forebay.
const OURS: &str = "app.kubernetes.io/name=forebay";

/// The result of a read, or why it failed.
pub(crate) type Read<T> = Result<T, String>;

/// The parts of a Kubernetes cluster that concern Forebay.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    /// Namespace that was read; `None` means all.
    pub(crate) namespace: Option<String>,
    /// Version of the API server, such as `v1.36.3`.
    pub(crate) version: Read<String>,
    /// Kinds of Forebay's API group that are served in the version that this program supports; `None` if the group is not
    /// served.
    pub(crate) served: Read<Option<Vec<String>>>,
    pub(crate) clusters: Read<Vec<StorageCluster>>,
    pub(crate) storage_nodes: Read<Vec<StorageNode>>,
    pub(crate) nodes: Read<Vec<Node>>,
    /// Pods of Forebay.
    pub(crate) pods: Read<Vec<Pod>>,
    /// PersistentVolumes of Forebay's driver.
    pub(crate) volumes: Read<Vec<PersistentVolume>>,
    pub(crate) claims: Read<Vec<PersistentVolumeClaim>>,
    pub(crate) csi_nodes: Read<Vec<CSINode>>,
    pub(crate) csi_driver: Read<Option<CSIDriver>>,
    /// StorageClasses of Forebay's driver.
    pub(crate) storage_classes: Read<Vec<StorageClass>>,
}

impl Snapshot {
    /// Reads the snapshot. An error means that no API server responds; errors of single requests are stored in the fields.
    pub(crate) async fn take(connection: &Connection) -> anyhow::Result<Self> {
        let (config, namespace) = prepare(connection).await?;
        let server = config.cluster_url.to_string();
        let client = Client::try_from(config).context("set up the connection to the API server")?;
        // Requested first: if the API server does not respond, every other request would wait for its own timeout.
        let version = timeout(CONNECT_DEADLINE, client.apiserver_version()).await;
        let version = match version {
            Ok(Err(kube::Error::Api(status))) => Err(status.message.clone()),
            Ok(result) => Ok(result.with_context(|| format!("ask the API server at {server}"))?.git_version),
            Err(_) => anyhow::bail!("the API server at {server} does not answer"),
        };
        timeout(READ_DEADLINE, Box::pin(Self::read(&client, namespace, version))).await.with_context(|| {
            format!("the API server at {server} does not answer in {} s", READ_DEADLINE.as_secs())
        })
    }

    async fn read(client: &Client, namespace: Option<String>, version: Read<String>) -> Self {
        let all = ListParams::default();
        let clusters = namespaced::<StorageCluster>(client, namespace.as_deref());
        let drivers: Api<CSIDriver> = Api::all(client.clone());
        let (
            served,
            clusters,
            storage_nodes,
            nodes,
            pods,
            volumes,
            claims,
            csi_nodes,
            csi_driver,
            storage_classes,
        ) = tokio::join!(
            served(client),
            list(clusters, &all),
            list(Api::<StorageNode>::all(client.clone()), &all),
            list(Api::<Node>::all(client.clone()), &all),
            pods(client, namespace.as_deref()),
            list(Api::<PersistentVolume>::all(client.clone()), &all),
            list(Api::<PersistentVolumeClaim>::all(client.clone()), &all),
            list(Api::<CSINode>::all(client.clone()), &all),
            drivers.get_opt(DRIVER),
            list(Api::<StorageClass>::all(client.clone()), &all),
        );
        let is_ours = |volume: &PersistentVolume| {
            volume.spec.as_ref().and_then(|s| s.csi.as_ref()).is_some_and(|csi| csi.driver == DRIVER)
        };
        Self {
            namespace,
            version,
            served,
            clusters,
            storage_nodes,
            nodes,
            pods,
            volumes: volumes.map(|all| all.into_iter().filter(is_ours).collect()),
            claims,
            csi_nodes,
            csi_driver: csi_driver.map_err(|e| words(&e)),
            storage_classes: storage_classes
                .map(|all| all.into_iter().filter(|c| c.provisioner == DRIVER).collect()),
        }
    }
}

/// Returns the configuration, and the namespace to read, or `None` for all.
async fn prepare(connection: &Connection) -> anyhow::Result<(Config, Option<String>)> {
    let mut config = configuration(connection).await?;
    config.connect_timeout = Some(CONNECT_DEADLINE);
    let variable = std::env::var(NAMESPACE_VARIABLE).ok();
    let namespace = connection.scope(variable, || own_namespace(connection, &config));
    Ok((config, namespace))
}

/// Returns a client, and the namespace to read, or `None` for all.
pub(crate) async fn connect(connection: &Connection) -> anyhow::Result<(Client, Option<String>)> {
    let (config, namespace) = prepare(connection).await?;
    Ok((Client::try_from(config).context("set up the connection to the API server")?, namespace))
}

async fn configuration(connection: &Connection) -> anyhow::Result<Config> {
    let options = KubeConfigOptions { context: connection.context.clone(), ..KubeConfigOptions::default() };
    match &connection.kubeconfig {
        Some(path) => {
            let file =
                Kubeconfig::read_from(path).with_context(|| format!("--kubeconfig {}", path.display()))?;
            Ok(Config::from_custom_kubeconfig(file, &options).await?)
        }
        None if connection.context.is_some() => Config::from_kubeconfig(&options).await.context("--context"),
        None => Config::infer().await.context("find the API server: set KUBECONFIG or --kubeconfig"),
    }
}

/// In a pod, returns the pod's own namespace. A kubeconfig's default namespace is hardly ever Forebay's.
fn own_namespace(connection: &Connection, config: &Config) -> String {
    let in_pod = connection.kubeconfig.is_none()
        && connection.context.is_none()
        && std::env::var_os("KUBECONFIG").is_none()
        && std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
    if in_pod { config.default_namespace.clone() } else { NAMESPACE.to_owned() }
}

fn namespaced<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: kube::Resource<Scope = kube::core::NamespaceResourceScope>,
    K::DynamicType: Default,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Returns the pods of Forebay.
pub(crate) async fn pods(client: &Client, namespace: Option<&str>) -> Read<Vec<Pod>> {
    let ours = ListParams::default().labels(OURS);
    list(namespaced::<Pod>(client, namespace), &ours).await
}

pub(crate) async fn list<K: Clone + DeserializeOwned + Debug>(
    api: Api<K>,
    parameters: &ListParams,
) -> Read<Vec<K>> {
    let mut parameters = parameters.clone().limit(PAGE_ENTRIES);
    let mut items = Vec::new();
    for _ in 0..PAGES_MAX {
        let page = api.list(&parameters).await.map_err(|e| words(&e))?;
        items.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => break,
        }
    }
    Ok(items)
}

async fn served(client: &Client) -> Read<Option<Vec<String>>> {
    match client.list_api_group_resources(&format!("{GROUP}/{VERSION}")).await {
        Ok(list) => Ok(Some(list.resources.into_iter().map(|r| r.kind).collect())),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(words(&error)),
    }
}

/// Returns the API server's own message, if there is one.
pub(crate) fn words(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.trim().to_owned(),
        error => error.to_string(),
    }
}
