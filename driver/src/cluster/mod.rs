//! StorageClusters, and the objects that are stored for volumes, in the Kubernetes API.
//!
//! Everything is read on demand and nothing is watched: calls are rare, an outdated address or phase would be wrong, and a
//! watch on every node would send each status change to all nodes.

mod channels;

pub(crate) mod record;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use forebay_api::StorageCluster;
use forebay_api::cluster::{InstancePhase, InstanceStatus, Sealing, Signing};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{PersistentVolume, Secret};
use kube::api::{Api, ListParams};
use kube::{Client, Config, ResourceExt};
use tokio::time::timeout;

use self::channels::Channels;
use crate::address::ServerAddress;
use crate::admin::Admin;
use crate::context::CLUSTER_NAMESPACE;
use crate::error::Error;
use crate::handle::InstanceName;
use crate::identity::DRIVER_NAME;
use crate::limits::{KUBERNETES_DEADLINE, KUBERNETES_PAGE_MAX, PROBE_DEADLINE};
use crate::placement::{Candidate, Pool};
use crate::transport::Served;

/// The Kubernetes API, in one namespace.
#[derive(Clone)]
pub(crate) struct Kubernetes {
    client: Client,
    namespace: Arc<str>,
}

impl fmt::Debug for Kubernetes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kubernetes").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

impl Kubernetes {
    /// Finds the API server as kubectl does, or by the pod's service account. Connects on the first call.
    pub(crate) async fn new(namespace: &str) -> anyhow::Result<Self> {
        let mut config = Config::infer().await?;
        config.connect_timeout = Some(PROBE_DEADLINE);
        config.read_timeout = Some(KUBERNETES_DEADLINE);
        config.write_timeout = Some(KUBERNETES_DEADLINE);
        Ok(Self { client: Client::try_from(config)?, namespace: namespace.into() })
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    fn clusters(&self) -> Api<StorageCluster> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn secret(&self, name: &str) -> Result<Option<Secret>, Error> {
        ask("read a Secret", KUBERNETES_DEADLINE, self.secrets().get_opt(name)).await
    }

    /// IDs of the volumes that have a PersistentVolume and belong to this namespace, sorted.
    pub(crate) async fn volume_ids(&self) -> Result<Vec<String>, Error> {
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let mut page = ListParams::default().limit(KUBERNETES_PAGE_MAX);
        let mut ids = Vec::new();
        loop {
            let found = ask("list PersistentVolumes", KUBERNETES_DEADLINE, api.list(&page)).await?;
            let ours = found.items.into_iter().filter_map(|volume| volume.spec?.csi).filter(|csi| {
                let of =
                    csi.volume_attributes.as_ref().and_then(|attributes| attributes.get(CLUSTER_NAMESPACE));
                csi.driver == DRIVER_NAME && of.is_some_and(|of| **of == *self.namespace)
            });
            ids.extend(ours.map(|csi| csi.volume_handle));
            match found.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = page.continue_token(&token),
                None => break,
            }
        }
        ids.sort_unstable();
        Ok(ids)
    }

    /// Whether the API responds, and permits this driver the required reads.
    pub(crate) async fn probe(&self) -> Result<(), Error> {
        let one = ListParams::default().limit(1);
        ask("list StorageClusters", PROBE_DEADLINE, self.clusters().list_metadata(&one)).await.map(drop)
    }
}

/// Waits for the API's response, up to a deadline.
async fn ask<T>(
    what: &'static str,
    deadline: Duration,
    request: impl Future<Output = Result<T, kube::Error>> + Send,
) -> Result<T, Error> {
    match timeout(deadline, request).await {
        Ok(result) => result.map_err(|source| Error::Kubernetes { what, source: Box::new(source) }),
        Err(_) => Err(Error::NotNow(format!(
            "the Kubernetes API did not answer within {} s: {what}",
            deadline.as_secs()
        ))),
    }
}

/// The StorageClusters of the driver's namespace.
#[derive(Clone, Debug)]
pub(crate) struct Clusters {
    kubernetes: Kubernetes,
    channels: Channels,
}

impl Clusters {
    pub(crate) fn new(kubernetes: Kubernetes) -> Self {
        Self { kubernetes, channels: Channels::default() }
    }

    pub(crate) fn kubernetes(&self) -> &Kubernetes {
        &self.kubernetes
    }

    /// The StorageCluster with this name.
    pub(crate) async fn find(&self, name: &str) -> Result<Option<StorageCluster>, Error> {
        ask("read the StorageCluster", KUBERNETES_DEADLINE, self.kubernetes.clusters().get_opt(name)).await
    }

    /// All StorageClusters, sorted by name.
    pub(crate) async fn list(&self) -> Result<Vec<StorageCluster>, Error> {
        let mut clusters = Vec::new();
        let mut page = ListParams::default().limit(KUBERNETES_PAGE_MAX);
        loop {
            let list =
                ask("list StorageClusters", KUBERNETES_DEADLINE, self.kubernetes.clusters().list(&page))
                    .await?;
            clusters.extend(list.items);
            match list.metadata.continue_ {
                Some(token) if !token.is_empty() => page.continue_token = Some(token),
                _ => break,
            }
        }
        clusters.sort_by_key(ResourceExt::name_any);
        Ok(clusters)
    }

    /// The admin API of an instance. Does not check its phase: the call itself is a better indication whether the instance
    /// serves.
    pub(crate) async fn connect(
        &self,
        cluster: &StorageCluster,
        instance: &InstanceName,
    ) -> Result<Admin, Error> {
        let status = status_of(cluster, instance)?;
        if status.admin_endpoint.is_empty() {
            return Err(not_yet(status, "no admin API"));
        }
        self.channels.to(&self.kubernetes, instance, &status.admin_endpoint).await
    }

    /// The instances of a cluster with their pools, for placement: all except those that will be removed, or just `only`.
    pub(crate) async fn survey(
        &self,
        cluster: &StorageCluster,
        only: Option<&InstanceName>,
    ) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for (name, status) in instances(cluster) {
            let is_asked = match only {
                Some(only) => name == *only,
                None => name.ordinal() < cluster.spec.instances,
            };
            if is_asked {
                candidates.push(self.candidate(cluster, name, status));
            }
        }
        join_all(candidates).await
    }

    async fn candidate(
        &self,
        cluster: &StorageCluster,
        name: InstanceName,
        status: &InstanceStatus,
    ) -> Candidate {
        Candidate {
            ordinal: name.ordinal(),
            volumes: status.volumes,
            pools: self.pools(cluster, &name, status).await,
            name: name.to_string(),
        }
    }

    /// The pools of one instance, or why they cannot be read.
    async fn pools(
        &self,
        cluster: &StorageCluster,
        name: &InstanceName,
        status: &InstanceStatus,
    ) -> Result<Vec<Pool>, String> {
        if status.phase != InstancePhase::Ready {
            return Err(describe(status));
        }
        let admin = self.connect(cluster, name).await.map_err(|error| error.to_string())?;
        let pools = admin.pools(PROBE_DEADLINE).await.map_err(|error| error.to_string())?;
        let percent = |pool: &str| {
            let backend = cluster.spec.backends.iter().find(|backend| backend.name == pool);
            backend.map_or(100, forebay_api::cluster::Backend::overcommit_percent)
        };
        let pools = pools.into_iter();
        Ok(pools.map(|reported| Pool { overcommit_percent: percent(&reported.name), reported }).collect())
    }

    /// The address at which clients mount the volumes of an instance, and its transports.
    pub(crate) async fn address_of(&self, instance: &InstanceName) -> Result<(ServerAddress, Served), Error> {
        let cluster = self.find(instance.cluster()).await?.ok_or_else(|| {
            let namespace = self.kubernetes.namespace();
            Error::NotNow(format!(
                "StorageCluster {} is not in namespace {namespace}; recreate it with the same backends",
                instance.cluster()
            ))
        })?;
        Ok((address(&cluster, instance)?, served(&cluster, instance)?))
    }
}

/// The instances in the cluster's status.
pub(crate) fn instances(cluster: &StorageCluster) -> impl Iterator<Item = (InstanceName, &InstanceStatus)> {
    let name = cluster.name_any();
    let statuses = cluster.status.iter().flat_map(|status| &status.instances);
    statuses.filter_map(move |status| {
        let instance = InstanceName::parse(&status.name)?;
        (instance.cluster() == name).then_some((instance, status))
    })
}

/// Whether the instance was removed deliberately, which the operator does only if it holds no volumes.
pub(crate) fn is_removed(cluster: &StorageCluster, instance: &InstanceName) -> bool {
    let is_settled = cluster
        .status
        .as_ref()
        .is_some_and(|status| status.observed_generation == cluster.metadata.generation);
    is_settled
        && instance.ordinal() >= cluster.spec.instances
        && !instances(cluster).any(|(name, _)| name == *instance)
}

/// Whether the instance accepts no more volumes: the operator removes it as soon as it holds none.
pub(crate) fn is_leaving(cluster: &StorageCluster, instance: &InstanceName) -> bool {
    let reported = instances(cluster).find(|(name, _)| name == instance);
    instance.ordinal() >= cluster.spec.instances
        || reported.is_some_and(|(_, status)| status.phase == InstancePhase::Removing)
}

/// Whether new volumes can be placed there.
pub(crate) fn takes_volumes(cluster: &StorageCluster, instance: &InstanceName) -> bool {
    let reported = instances(cluster).find(|(name, _)| name == instance);
    instance.ordinal() < cluster.spec.instances
        && reported.is_some_and(|(_, status)| status.phase == InstancePhase::Ready)
}

fn status_of<'a>(cluster: &'a StorageCluster, instance: &InstanceName) -> Result<&'a InstanceStatus, Error> {
    let found = instances(cluster).find(|(name, _)| name == instance);
    found.map(|(_, status)| status).ok_or_else(|| {
        Error::NotNow(format!(
            "StorageCluster {} has no instance {instance} yet; see its conditions",
            cluster.name_any()
        ))
    })
}

fn address(cluster: &StorageCluster, instance: &InstanceName) -> Result<ServerAddress, Error> {
    let status = status_of(cluster, instance)?;
    if status.address.is_empty() || status.port == 0 {
        return Err(not_yet(status, "no address"));
    }
    let text = match status.address.contains(':') {
        true => format!("[{}]:{}", status.address, status.port),
        false => format!("{}:{}", status.address, status.port),
    };
    text.parse().map_err(|reason| Error::NotNow(format!("the address of instance {instance}: {reason}")))
}

fn served(cluster: &StorageCluster, instance: &InstanceName) -> Result<Served, Error> {
    let status = status_of(cluster, instance)?;
    let security = &cluster.spec.security;
    Ok(Served::Instance {
        transports: status.transports.clone(),
        port: status.port,
        is_protected: security.signing == Signing::Required || security.sealing == Sealing::Required,
    })
}

fn not_yet(status: &InstanceStatus, what: &str) -> Error {
    Error::NotNow(format!("instance {} has {what} yet: {}", status.name, describe(status)))
}

/// Why an instance does not serve, according to its status.
fn describe(status: &InstanceStatus) -> String {
    match status.message.as_str() {
        "" => format!("{:?}", status.phase),
        message => format!("{:?}: {message}", status.phase),
    }
}

#[cfg(test)]
mod tests {
    use forebay_api::{StorageClusterSpec, StorageClusterStatus};

    use super::*;

    fn cluster(instances: u32, statuses: &[InstanceStatus]) -> StorageCluster {
        let mut cluster = StorageCluster::new("c", StorageClusterSpec { instances, ..Default::default() });
        cluster.metadata.generation = Some(3);
        cluster.status = Some(StorageClusterStatus {
            observed_generation: Some(3),
            instances: statuses.to_vec(),
            ..Default::default()
        });
        cluster
    }

    fn instance(name: &str, address: &str) -> InstanceStatus {
        InstanceStatus { name: name.into(), address: address.into(), port: 445, ..Default::default() }
    }

    fn name(text: &str) -> InstanceName {
        InstanceName::parse(text).expect("a name")
    }

    #[test]
    fn address_is_taken_from_the_instance_status() {
        let of = |statuses: &[InstanceStatus]| address(&cluster(2, statuses), &name("c-1"));
        let text = |statuses: &[InstanceStatus]| of(statuses).expect("an address").to_string();
        assert_eq!(text(&[instance("c-0", "10.0.0.1"), instance("c-1", "10.0.0.2")]), "10.0.0.2:445");
        assert_eq!(text(&[instance("c-1", "fd00::2")]), "[fd00::2]:445");
        let message = "no node has a RoCE port; plug one in".to_owned();
        let waiting = InstanceStatus { message, ..instance("c-1", "") };
        for (statuses, part) in [
            (vec![], "no instance c-1"),
            (vec![instance("c-0", "10.0.0.1")], "no instance c-1"),
            (vec![waiting], "no address yet: Pending: no node has a RoCE port"),
            (vec![InstanceStatus { port: 0, ..instance("c-1", "10.0.0.2") }], "no address yet"),
            (vec![instance("c-1", "10.0.0.2/..")], "neither a host name nor an IP address"),
        ] {
            let status = tonic::Status::from(of(&statuses).expect_err(part));
            assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
            assert!(status.message().contains(part), "{status}");
        }
    }

    #[test]
    fn served_transports_reflect_instance_status_and_cluster_security() {
        let transports = vec!["RDMA".to_owned(), "TCP".to_owned()];
        let status = InstanceStatus { transports: transports.clone(), ..instance("c-0", "10.0.0.1") };
        let mut cluster = cluster(1, &[status]);
        let reported = |cluster: &StorageCluster| served(cluster, &name("c-0")).expect("it is there");
        let open = Served::Instance { transports: transports.clone(), port: 445, is_protected: false };
        assert_eq!(reported(&cluster), open);
        cluster.spec.security.sealing = Sealing::Required;
        assert_eq!(reported(&cluster), Served::Instance { transports, port: 445, is_protected: true });
    }

    #[test]
    fn instance_counts_as_removed_only_once_the_operator_reports_it() {
        let two = [instance("c-0", ""), instance("c-1", "")];
        assert!(!is_removed(&cluster(2, &two), &name("c-1")));
        assert!(!is_removed(&cluster(1, &two), &name("c-1")), "it is still being removed");
        assert!(is_removed(&cluster(1, &two[..1]), &name("c-1")));
        assert!(!is_removed(&cluster(2, &two[..1]), &name("c-1")), "it is still being created");
        let mut stale = cluster(1, &two[..1]);
        stale.metadata.generation = Some(4);
        assert!(!is_removed(&stale, &name("c-1")), "the operator has not seen it");
        stale.status = None;
        assert!(!is_removed(&stale, &name("c-1")));
    }

    #[test]
    fn only_ready_instances_that_are_not_leaving_take_volumes() {
        use InstancePhase::{Draining, NotReady, Pending, Ready, Removing, Starting};
        let leaves = |instances, phase| {
            let status = InstanceStatus { phase, ..instance("c-1", "") };
            let cluster = cluster(instances, &[instance("c-0", ""), status]);
            (is_leaving(&cluster, &name("c-1")), takes_volumes(&cluster, &name("c-1")))
        };
        assert_eq!(leaves(2, Ready), (false, true));
        assert_eq!(leaves(1, Ready), (true, false), "the operator has not seen it yet");
        for phase in [Pending, Starting, Draining, NotReady] {
            assert_eq!(leaves(2, phase), (false, false), "{phase:?}");
        }
        assert_eq!(leaves(1, Removing), (true, false));
        assert_eq!(leaves(2, Removing), (true, false), "its removal has just been reverted");
        let none = cluster(2, &[]);
        assert_eq!((is_leaving(&none, &name("c-1")), takes_volumes(&none, &name("c-1"))), (false, false));
    }

    #[test]
    fn invalid_instance_names_in_the_status_are_ignored() {
        let odd = ["", "c", "other-0", "c-0", "c-x", "../c-1"].map(|n| instance(n, ""));
        let cluster = cluster(1, &odd);
        let names: Vec<String> = instances(&cluster).map(|(n, _)| n.to_string()).collect();
        assert_eq!(names, ["c-0"]);
    }
}
