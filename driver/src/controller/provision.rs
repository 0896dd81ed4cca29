//! CreateVolume: chooses the place of a volume, and creates it there exactly once.

use std::collections::HashMap;

use forebay_api::StorageCluster;
use forebay_proto::admin::{self, Volume};
use forebay_proto::csi::{CreateVolumeRequest, CreateVolumeResponse};
use kube::ResourceExt;
use tonic::Code;
use tracing::{info, warn};

use super::home::{Home, Servers};
use super::snapshots::Source;
use super::volume::{
    LABEL_NAME, LABEL_REQUESTED_BYTES, LABEL_SERVER, LABEL_TRANSPORT, check_compatible,
    check_mount_flags_of_new, size_bytes,
};
use super::{ControllerService, Record, set_attributes};
use crate::address;
use crate::attributes::Attributes;
use crate::capability::Capability;
use crate::capacity::Capacity;
use crate::cluster::{Clusters, is_leaving, is_removed, takes_volumes};
use crate::error::Error;
use crate::handle::InstanceName;
use crate::ledger::Placement;
use crate::names::VolumeId;
use crate::parameters::Parameters;
use crate::placement::Wanted;
use crate::secrets::{Credentials, Given};
use crate::transport::Transport;

/// The name of the PersistentVolume, which csi-provisioner passes with --extra-create-metadata.
const PARAMETER_PV_NAME: &str = "csi.storage.k8s.io/pv/name";

/// A checked request.
struct Order {
    name: String,
    share: VolumeId,
    capacity: Capacity,
    parameters: Parameters,
    source: Option<Source>,
}

impl ControllerService {
    /// CSI CreateVolume. The same name returns the same volume, if it matches the request.
    pub(super) async fn create(
        &self,
        mut request: CreateVolumeRequest,
    ) -> Result<CreateVolumeResponse, Error> {
        let has_secrets = !request.secrets.is_empty();
        // Zeroized in any case.
        let given = Given::take(&mut request.secrets);
        let share = VolumeId::from_name(&request.name)?;
        Capability::parse_all(&request.volume_capabilities)?;
        let parameters = Parameters::parse(&request.parameters, self.servers.setting())?;
        let attributes = Attributes::parse(&request.mutable_parameters)?;
        let capacity = Capacity::parse(request.capacity_range.as_ref())?;
        // Refused now, not when the first pod starts.
        let transport = parameters.transport.unwrap_or_default();
        check_mount_flags_of_new(&request.volume_capabilities, parameters.protection, transport)?;
        let source = self.source(request.volume_content_source.as_ref()).await?;
        let capacity = match &source {
            Some(source) => capacity.at_least(source.size_bytes)?,
            None => capacity,
        };
        let parameters = match &source {
            Some(source) => beside(source, parameters)?,
            None => parameters,
        };
        let order = Order { name: request.name, share, capacity, parameters, source };
        match &self.servers {
            Servers::One(admin) => {
                let credentials = given?.for_volume(&order.share);
                let _claim = self.in_flight.claim(order.share.as_str())?;
                let home = Home::only(admin);
                let existing = home.admin.stat(&order.share).await?;
                // Checked before anything is created: a volume that cannot be mounted is of no use.
                let advertised = match &order.parameters.server {
                    Some(_) => Vec::new(),
                    None => home.admin.addresses().await?,
                };
                let pool = order.parameters.pool.clone().unwrap_or_default();
                let volume = order.make(&home, existing, pool, &credentials).await?;
                set_attributes(&home, &volume, attributes).await?;
                Ok(CreateVolumeResponse { volume: Some(home.to_csi(&volume, &advertised)) })
            }
            Servers::Kubernetes(clusters) => {
                if has_secrets {
                    return Err(Error::invalid(
                        "secrets",
                        "the driver creates the credentials of each volume; do not name a provisioner-secret",
                    ));
                }
                order.check_name()?;
                let _claim = self.in_flight.claim(order.share.as_str())?;
                let (home, volume) = Box::pin(self.create_in_cluster(clusters, &order)).await?;
                set_attributes(&home, &volume, attributes).await?;
                Ok(CreateVolumeResponse { volume: Some(home.to_csi(&volume, &[])) })
            }
        }
    }

    /// Creates the record first, then the volume at the recorded place: a repeated call finds the record and continues from
    /// there, so there is never a second volume elsewhere.
    async fn create_in_cluster(&self, clusters: &Clusters, order: &Order) -> Result<(Home, Volume), Error> {
        let cluster = cluster_of(clusters, &order.parameters).await?;
        let network = &cluster.spec.network;
        if order.parameters.transport == Some(Transport::Rdma)
            && network.transport == forebay_api::cluster::Transport::TCP
        {
            let reason = format!("rdma: StorageCluster {} serves TCP only", cluster.name_any());
            return Err(Error::invalid("parameter transport", reason));
        }
        let (record, placement) = self.intend(clusters, &cluster, order).await?;
        if record.instance.cluster() != cluster.name_any() {
            return Err(order.exists_with_another("cluster"));
        }
        if is_removed(&cluster, &record.instance) {
            // It held no volumes when it was removed, so it cannot hold this one.
            let message = format!(
                "instance {} was removed before it created the volume; the next try places the volume again",
                record.instance
            );
            record.remove(clusters.kubernetes()).await?;
            return Err(Error::NotNow(message));
        }
        let home = Home::on(clusters, &cluster, &record.instance).await?;
        let existing = home.admin.stat(&order.share).await?;
        let is_there = existing.is_some();
        let record = match is_there {
            true => record,
            false => self.confirm(clusters, &cluster, record, placement.is_some()).await?,
        };
        let made = match &existing {
            Some(volume) => {
                order.make(&home, existing.clone(), volume.pool.clone(), record.credentials()?).await
            }
            None => {
                let placement = match placement {
                    Some(placement) => Ok(placement),
                    None => self.place(clusters, &cluster, order, Some(&record.instance)).await,
                };
                match placement {
                    // Held until the volume is created, so that the ledger includes it until then.
                    Ok(placement) => {
                        let pool = placement.place.pool.clone();
                        order.make(&home, None, pool, record.credentials()?).await
                    }
                    Err(error) => Err(error),
                }
            }
        };
        match made {
            Ok(volume) if is_there || record.still_stands(clusters.kubernetes()).await? => Ok((home, volume)),
            Ok(_) => {
                // Another controller, which is no longer the leader, has given up this place in the meantime.
                warn!(share = %order.share, instance = %record.instance, "the volume's Secret is gone, undoing");
                home.admin.delete(&order.share).await?;
                Err(Error::Overtaken(order.share.to_string()))
            }
            Err(error) => {
                if !is_there && error.is_final() {
                    self.give_up(clusters, &home, record).await;
                }
                Err(error)
            }
        }
    }

    /// The volume's record, existing or new.
    async fn intend(
        &self,
        clusters: &Clusters,
        cluster: &StorageCluster,
        order: &Order,
    ) -> Result<(Record, Option<Placement>), Error> {
        let kubernetes = clusters.kubernetes();
        if let Some(record) = Record::find(kubernetes, &order.share).await? {
            return Ok((record, None));
        }
        if cluster.metadata.deletion_timestamp.is_some() {
            return Err(being_deleted(&cluster.name_any()));
        }
        let source = order.source.as_ref().and_then(|source| source.handle().instance());
        let placement = self.place(clusters, cluster, order, source).await?;
        let instance = &placement.place.instance;
        let instance = InstanceName::parse(instance).expect("it comes from a name that was parsed");
        match Record::make(kubernetes, &order.share, &instance).await? {
            Some(record) => {
                info!(share = %order.share, %instance, pool = placement.place.pool, "the volume is placed");
                Ok((record, Some(placement)))
            }
            None => match Record::find(kubernetes, &order.share).await? {
                Some(record) => Ok((record, None)),
                None => Err(Error::Overtaken(order.share.to_string())),
            },
        }
    }

    /// Reads the cluster again after the record is written, and gives up the record if its instance is about to be removed. The
    /// operator first announces the removal and then counts records. So it counts the record of a call that missed the
    /// announcement here, and waits for all counted records: a record without a volume must not remain there.
    async fn confirm(
        &self,
        clusters: &Clusters,
        cluster: &StorageCluster,
        record: Record,
        is_new: bool,
    ) -> Result<Record, Error> {
        let name = cluster.name_any();
        let instance = &record.instance;
        let now = clusters.find(&name).await?.filter(|now| {
            now.metadata.uid == cluster.metadata.uid && now.metadata.deletion_timestamp.is_none()
        });
        let refusal = match now {
            None => being_deleted(&name),
            Some(now) if is_leaving(&now, instance) || is_new && !takes_volumes(&now, instance) => {
                Error::NotNow(format!(
                    "instance {instance} no longer accepts new volumes; the next try places the volume again"
                ))
            }
            Some(_) => return Ok(record),
        };
        info!(share = %record.share, %instance, refusal = refusal.to_string(), "the volume's place is given up");
        record.remove(clusters.kubernetes()).await?;
        Err(refusal)
    }

    async fn place(
        &self,
        clusters: &Clusters,
        cluster: &StorageCluster,
        order: &Order,
        instance: Option<&InstanceName>,
    ) -> Result<Placement, Error> {
        let candidates = clusters.survey(cluster, instance).await;
        let wanted = Wanted {
            size_bytes: order.capacity.size_bytes()?,
            backend: order.parameters.pool.as_deref(),
            quota: order.parameters.quota,
            instance: instance.map(InstanceName::as_str),
        };
        self.ledger
            .place(candidates, wanted)
            .map_err(|refusal| Error::Placement { cluster: cluster.name_any(), refusal })
    }

    /// The server refused permanently, so another instance may be tried: removes the record once it is certain that the volume
    /// does not exist.
    async fn give_up(&self, clusters: &Clusters, home: &Home, record: Record) {
        let (share, instance) = (record.share.clone(), record.instance.clone());
        let removed = match home.admin.stat(&share).await {
            Ok(None) => record.remove(clusters.kubernetes()).await,
            Ok(Some(_)) => return,
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            warn!(%share, %instance, error = error.to_string(), "the volume's Secret stays; the next try finds it");
        }
    }
}

impl Order {
    /// Creates the volume at `home`, or compares it with the existing one.
    async fn make(
        &self,
        home: &Home,
        existing: Option<Volume>,
        pool: String,
        credentials: &Credentials,
    ) -> Result<Volume, Error> {
        let is_there = existing.is_some();
        let wanted = self.source_ids();
        let desired = match existing {
            Some(existing) => {
                home.check_parameters(&existing, &self.parameters)?;
                check_compatible(&existing, &self.name, self.capacity, &self.parameters, credentials)?;
                let source = (existing.source_snapshot_id.clone(), existing.source_volume_id.clone());
                let is_beside = self.source.as_ref().is_none_or(|source| home.is_home_of(source.handle()));
                if source != wanted || !is_beside {
                    return Err(self.exists_with_another("source"));
                }
                // Repeats the request unchanged: only the server can compare the password.
                admin::CreateVolumeRequest {
                    volume_id: self.share.to_string(),
                    pool: existing.pool.clone(),
                    capacity_bytes: size_bytes(&existing),
                    quota: existing.quota,
                    protection: existing.protection,
                    credentials: Some(credentials.to_admin()),
                    labels: existing.labels,
                    source_snapshot_id: source.0,
                    source_volume_id: source.1,
                    root: existing.root,
                }
            }
            None => {
                let size_bytes = self.capacity.size_bytes()?;
                let (source_snapshot_id, source_volume_id) = wanted;
                let root = self.root();
                let mut labels: HashMap<String, String> =
                    self.parameters.labels.clone().into_iter().collect();
                labels.insert(LABEL_NAME.into(), self.name.clone());
                labels.insert(LABEL_REQUESTED_BYTES.into(), size_bytes.to_string());
                if let Some(transport) = self.parameters.transport {
                    labels.insert(LABEL_TRANSPORT.into(), transport.word().into());
                }
                if let Some(servers) = &self.parameters.server {
                    labels.insert(LABEL_SERVER.into(), address::format_list(servers));
                }
                admin::CreateVolumeRequest {
                    volume_id: self.share.to_string(),
                    pool,
                    capacity_bytes: size_bytes,
                    quota: self.parameters.quota.into(),
                    protection: self.parameters.protection.into(),
                    credentials: Some(credentials.to_admin()),
                    labels,
                    source_snapshot_id,
                    source_volume_id,
                    root,
                }
            }
        };
        let made = home.admin.create(desired).await;
        if let Ok(volume) = &made
            && let Some(missing) = self.ignored(volume)
        {
            // It would be mistaken for a copy, although it is empty, or its pods could not write.
            if !is_there {
                home.admin.delete(&self.share).await?;
            }
            return Err(Error::Refused(format!(
                "the server is older than the driver and cannot {missing}: upgrade it"
            )));
        }
        match made {
            // All other properties were compared above.
            Err(Error::Admin { status, .. }) if is_there && status.code() == Code::AlreadyExists => {
                Err(self.exists_with_another("password"))
            }
            other => other,
        }
    }

    /// What a server that is older than the driver ignored in the request for `made`.
    fn ignored(&self, made: &Volume) -> Option<&'static str> {
        let source = (made.source_snapshot_id.clone(), made.source_volume_id.clone());
        match () {
            () if source != self.source_ids() => Some("create volumes from snapshots or volumes"),
            () if self.root().is_some_and(|root| made.root != Some(root)) => {
                Some("set the owner of a volume's root")
            }
            () => None,
        }
    }

    /// The owner and mode of the root. A copy has those of its source.
    fn root(&self) -> Option<admin::Root> {
        self.parameters.root.filter(|_| self.source.is_none())
    }

    fn source_ids(&self) -> (String, String) {
        self.source.as_ref().map(Source::ids).unwrap_or_default()
    }

    fn exists_with_another(&self, what: &'static str) -> Error {
        Error::VolumeExists { volume_id: self.share.to_string(), what }
    }

    /// The Secret is looked up by the share's name here, and by the PersistentVolume's name when it is mounted.
    fn check_name(&self) -> Result<(), Error> {
        match self.parameters.labels.get(PARAMETER_PV_NAME) {
            Some(name) if name != self.share.as_str() => Err(Error::invalid(
                "name",
                format!(
                    "a PersistentVolume called {name:?} would not find its Secret; use csi-provisioner's default \
                     --volume-name-prefix"
                ),
            )),
            _ => Ok(()),
        }
    }
}

/// The parameters of a volume that is created from `source`: it shares extents with the source, so it must be in the same pool.
fn beside(source: &Source, parameters: Parameters) -> Result<Parameters, Error> {
    if parameters.pool.as_ref().is_some_and(|pool| *pool != source.pool) {
        let reason = format!("a volume is stored with its source, in {}", source.pool);
        return Err(Error::invalid("parameters", reason));
    }
    if let (Some(instance), Some(cluster)) = (source.handle().instance(), &parameters.cluster)
        && instance.cluster() != cluster
    {
        let reason = format!("a volume is stored with its source, in {}", instance.cluster());
        return Err(Error::invalid("parameter cluster", reason));
    }
    Ok(Parameters { pool: Some(source.pool.clone()), ..parameters })
}

fn being_deleted(cluster: &str) -> Error {
    Error::Refused(format!("StorageCluster {cluster} is being deleted"))
}

/// The StorageCluster in the parameters.
pub(super) async fn cluster_of(
    clusters: &Clusters,
    parameters: &Parameters,
) -> Result<StorageCluster, Error> {
    let name = parameters.cluster.as_deref().ok_or(Error::Missing("parameter cluster"))?;
    let namespace = clusters.kubernetes().namespace();
    if let Some(other) = parameters.cluster_namespace.as_deref().filter(|other| *other != namespace) {
        return Err(Error::invalid(
            "parameter clusterNamespace",
            format!("this driver and its operator work in namespace {namespace}, not in {other}"),
        ));
    }
    clusters.find(name).await?.ok_or_else(|| {
        let reason = format!("there is no StorageCluster {name} in namespace {namespace}");
        Error::invalid("parameter cluster", reason)
    })
}
