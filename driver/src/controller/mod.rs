//! The CSI Controller service: creates, changes and removes volumes through the admin API of the servers that hold them.

mod groups;
mod home;
mod listing;
mod provision;
mod snapshots;
mod volume;

use forebay_api::names;
use forebay_proto::admin::Volume;
use forebay_proto::csi::controller_server::Controller;
use forebay_proto::csi::controller_service_capability::{self as capability, rpc};
use forebay_proto::csi::volume_health::VolumeHealthEntry;
use forebay_proto::csi::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeHealthRequest, ControllerGetVolumeHealthResponse,
    ControllerGetVolumeRequest, ControllerGetVolumeResponse, ControllerModifyVolumeRequest,
    ControllerModifyVolumeResponse, ControllerPublishVolumeRequest, ControllerPublishVolumeResponse,
    ControllerServiceCapability, ControllerUnpublishVolumeRequest, ControllerUnpublishVolumeResponse,
    CreateSnapshotRequest, CreateSnapshotResponse, CreateVolumeRequest, CreateVolumeResponse,
    DeleteSnapshotRequest, DeleteSnapshotResponse, DeleteVolumeRequest, DeleteVolumeResponse,
    GetCapacityRequest, GetCapacityResponse, GetSnapshotRequest, GetSnapshotResponse, ListSnapshotsRequest,
    ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse, ValidateVolumeCapabilitiesRequest,
    ValidateVolumeCapabilitiesResponse, VolumeHealth, VolumeHealthErrorType, controller_get_volume_response,
    validate_volume_capabilities_response,
};
use tonic::{Request, Response, Status};

use self::home::Home;
pub(crate) use self::home::Servers;
use self::volume::{check_context, check_mount_flags, check_parameters, size_bytes, transport};
use crate::attributes::Attributes;
use crate::capability::Capability;
use crate::capacity::{Capacity, to_csi};
use crate::cluster::record::Record;
use crate::cluster::{Clusters, is_removed};
use crate::error::Error;
use crate::handle::{Handle, InstanceName};
use crate::in_flight::InFlight;
use crate::ledger::Ledger;
use crate::limits::{ADMIN_DEADLINE, CAPACITY_UNIT_BYTES};
use crate::names::VolumeId;
use crate::observe::observe;
use crate::parameters::Parameters;
use crate::placement::Pool;

/// Creates, changes and removes volumes.
#[derive(Clone, Debug)]
pub(crate) struct ControllerService {
    servers: Servers,
    /// Keyed by share, which is the same for the requested name of a volume and for its ID.
    in_flight: InFlight,
    ledger: Ledger,
}

impl ControllerService {
    pub(crate) fn new(servers: Servers) -> Self {
        Self { servers, in_flight: InFlight::default(), ledger: Ledger::default() }
    }

    /// CSI DeleteVolume. A volume that does not exist counts as deleted.
    async fn delete(&self, request: DeleteVolumeRequest) -> Result<DeleteVolumeResponse, Error> {
        if request.volume_id.is_empty() {
            return Err(Error::Missing("volume_id"));
        }
        // No volume can have this ID here: there is nothing to delete.
        let Ok(handle) = self.servers.handle(&request.volume_id) else { return Ok(DeleteVolumeResponse {}) };
        let _claim = self.in_flight.claim(handle.share().as_str())?;
        match (&self.servers, &handle) {
            (Servers::Kubernetes(clusters), Handle::Instance { instance, share }) => {
                Box::pin(Self::delete_in_cluster(clusters, instance, share)).await?;
            }
            _ => self.servers.home_of(&handle).await?.admin.delete(handle.share()).await?,
        }
        Ok(DeleteVolumeResponse {})
    }

    /// Deletes the volume first, then its record: as long as the volume exists, its location is recorded.
    async fn delete_in_cluster(
        clusters: &Clusters,
        instance: &InstanceName,
        share: &VolumeId,
    ) -> Result<(), Error> {
        let kubernetes = clusters.kubernetes();
        // A volume of this name may exist elsewhere now; its record does not belong to this one.
        let record = Record::find(kubernetes, share).await?;
        let record = record.filter(|record| record.instance == *instance);
        match clusters.find(instance.cluster()).await? {
            None if record.is_some() => {
                return Err(Error::Refused(format!(
                    "StorageCluster {} was deleted without the volume's data: recreate it to \
                     delete the data, or give the data up: delete Secret {} and its finalizer {}",
                    instance.cluster(),
                    Record::name_of(share),
                    names::FINALIZER_VOLUME,
                )));
            }
            None => return Ok(()),
            Some(cluster) if is_removed(&cluster, instance) => {}
            Some(cluster) => clusters.connect(&cluster, instance).await?.delete(share).await?,
        }
        match record {
            Some(record) => record.remove(kubernetes).await,
            None => Ok(()),
        }
    }

    /// CSI ControllerExpandVolume: changes the quota, which mounted nodes detect without a call.
    async fn expand(
        &self,
        request: ControllerExpandVolumeRequest,
    ) -> Result<ControllerExpandVolumeResponse, Error> {
        if request.volume_id.is_empty() {
            return Err(Error::Missing("volume_id"));
        }
        if request.capacity_range.is_none() {
            return Err(Error::Missing("capacity_range"));
        }
        if request.volume_capability.is_some() {
            Capability::parse(request.volume_capability.as_ref())?;
        }
        let capacity = Capacity::parse(request.capacity_range.as_ref())?;
        let handle = self.servers.handle(&request.volume_id)?;
        let share = handle.share();
        let _claim = self.in_flight.claim(share.as_str())?;
        let home = self.servers.home_of(&handle).await?;
        let existing = existing(&home, share).await?;
        let present_bytes = size_bytes(&existing);
        let capacity_bytes = if capacity.admits(present_bytes) {
            present_bytes
        } else if present_bytes > capacity.limit_bytes() {
            return Err(Error::Capacity(format!("the volume has {present_bytes} bytes and cannot shrink")));
        } else {
            // Without a quota nothing is enforced, and the server stores the requested size.
            let wanted = capacity.size_bytes()?.max(present_bytes);
            size_bytes(&home.admin.expand(share, wanted).await?).max(wanted)
        };
        Ok(ControllerExpandVolumeResponse {
            capacity_bytes: to_csi(capacity_bytes),
            node_expansion_required: false,
        })
    }

    /// CSI ControllerModifyVolume: limits and priority, which the server applies immediately.
    async fn modify(
        &self,
        request: ControllerModifyVolumeRequest,
    ) -> Result<ControllerModifyVolumeResponse, Error> {
        if request.volume_id.is_empty() {
            return Err(Error::Missing("volume_id"));
        }
        let attributes = Attributes::parse(&request.mutable_parameters)?;
        let handle = self.servers.handle(&request.volume_id)?;
        let _claim = self.in_flight.claim(handle.share().as_str())?;
        let home = self.servers.home_of(&handle).await?;
        set_attributes(&home, &existing(&home, handle.share()).await?, attributes).await?;
        Ok(ControllerModifyVolumeResponse {})
    }

    /// CSI ValidateVolumeCapabilities.
    async fn validate(
        &self,
        request: ValidateVolumeCapabilitiesRequest,
    ) -> Result<ValidateVolumeCapabilitiesResponse, Error> {
        if request.volume_id.is_empty() {
            return Err(Error::Missing("volume_id"));
        }
        if request.volume_capabilities.is_empty() {
            return Err(Error::Missing("volume_capabilities"));
        }
        let handle = self.servers.handle(&request.volume_id)?;
        let share = handle.share();
        let home = self.servers.home_of(&handle).await?;
        let existing = existing(&home, share).await?;
        let verdict = Capability::parse_all(&request.volume_capabilities)
            .and_then(|_| {
                check_mount_flags(&request.volume_capabilities, existing.protection(), transport(&existing))
            })
            .and_then(|()| Parameters::parse(&request.parameters, self.servers.setting()))
            .and_then(|parameters| {
                home.check_parameters(&existing, &parameters)?;
                check_parameters(&existing, &parameters)
            })
            .and_then(|()| check_context(&home, &existing, &request.volume_context))
            .and_then(|()| Attributes::parse(&request.mutable_parameters).map(drop));
        Ok(match verdict {
            Ok(()) => ValidateVolumeCapabilitiesResponse {
                confirmed: Some(validate_volume_capabilities_response::Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
                }),
                message: String::new(),
            },
            Err(error) => ValidateVolumeCapabilitiesResponse { confirmed: None, message: error.to_string() },
        })
    }

    /// CSI GetCapacity: the bytes that can still be provisioned, over all pools or the requested ones. Volumes are reachable
    /// from everywhere, so a requested topology has no effect.
    async fn capacity(&self, request: GetCapacityRequest) -> Result<GetCapacityResponse, Error> {
        let parameters = Parameters::parse(&request.parameters, self.servers.setting())?;
        let (pools, names) = match &self.servers {
            Servers::One(admin) => {
                let pools = admin.pools(ADMIN_DEADLINE).await?;
                let pools: Vec<Pool> =
                    pools.into_iter().map(|reported| Pool { reported, overcommit_percent: 100 }).collect();
                let names = pools.iter().map(|pool| pool.reported.name.clone()).collect();
                (pools, names)
            }
            Servers::Kubernetes(clusters) => self.pools_of(clusters, &parameters).await?,
        };
        if let Some(pool) = &parameters.pool
            && !names.contains(pool)
        {
            return Err(Error::invalid("parameter pool", format!("there is no pool {pool:?}")));
        }
        let possible = request.volume_capabilities.is_empty()
            || Capability::parse_all(&request.volume_capabilities).is_ok();
        let (available, largest) = pools
            .iter()
            .filter(|p| possible && parameters.pool.as_ref().is_none_or(|name| p.reported.name == *name))
            .map(|p| p.available_bytes(parameters.quota))
            .fold((0u64, 0u64), |(sum, max), bytes| (sum.saturating_add(bytes), max.max(bytes)));
        Ok(GetCapacityResponse {
            available_capacity: to_csi(available),
            maximum_volume_size: Some(to_csi(largest)),
            minimum_volume_size: Some(to_csi(CAPACITY_UNIT_BYTES)),
        })
    }

    /// The pools of the requested cluster, or of all clusters, and the names of all backends. Instances that cannot be reached
    /// count as full.
    async fn pools_of(
        &self,
        clusters: &Clusters,
        parameters: &Parameters,
    ) -> Result<(Vec<Pool>, Vec<String>), Error> {
        let asked = match &parameters.cluster {
            Some(_) => vec![provision::cluster_of(clusters, parameters).await?],
            None => clusters.list().await?,
        };
        let names =
            asked.iter().flat_map(|cluster| &cluster.spec.backends).map(|backend| backend.name.clone());
        let names = names.collect();
        let mut pools = Vec::new();
        for cluster in &asked {
            let candidates = clusters.survey(cluster, None).await;
            pools.extend(candidates.into_iter().flat_map(|candidate| candidate.pools).flatten());
        }
        Ok((pools, names))
    }

    /// CSI ControllerGetVolume.
    async fn get(&self, request: ControllerGetVolumeRequest) -> Result<ControllerGetVolumeResponse, Error> {
        if request.volume_id.is_empty() {
            return Err(Error::Missing("volume_id"));
        }
        let handle = self.servers.handle(&request.volume_id)?;
        let share = handle.share();
        let home = self.servers.home_of(&handle).await?;
        let existing = existing(&home, share).await?;
        let advertised = home.advertised(std::slice::from_ref(&existing)).await?;
        Ok(ControllerGetVolumeResponse {
            volume: Some(home.to_csi(&existing, &advertised)),
            status: Some(controller_get_volume_response::VolumeStatus::default()),
        })
    }

    /// CSI ControllerGetVolumeHealth: a volume that its instance does not serve is inaccessible from all nodes.
    async fn health(
        &self,
        request: ControllerGetVolumeHealthRequest,
    ) -> Result<ControllerGetVolumeHealthResponse, Error> {
        if request.volume_id.is_empty() {
            return Err(Error::Missing("volume_id"));
        }
        let handle = self.servers.handle(&request.volume_id)?;
        let found = match self.servers.home_of(&handle).await {
            Ok(home) => existing(&home, handle.share()).await.map(drop),
            Err(error) => Err(error),
        };
        let health_statuses = match found {
            Ok(()) => Vec::new(),
            Err(error) if error.server_is_silent() => vec![VolumeHealthEntry {
                status: VolumeHealthErrorType::Inaccessible.into(),
                reason: "ServerNotReady".to_owned(),
                message: error.to_string(),
            }],
            Err(error) => return Err(error),
        };
        let health = VolumeHealth { volume_id: request.volume_id, health_statuses };
        Ok(ControllerGetVolumeHealthResponse { volume_health: Some(health) })
    }
}

async fn existing(home: &Home, share: &VolumeId) -> Result<Volume, Error> {
    home.admin.stat(share).await?.ok_or_else(|| Error::NoVolume(home.volume_id(share.as_str())))
}

/// Applies those attributes that differ from the volume's.
async fn set_attributes(home: &Home, volume: &Volume, attributes: Attributes) -> Result<(), Error> {
    let Some(qos) = attributes.over(volume.qos.as_ref()) else { return Ok(()) };
    let share = VolumeId::parse(&volume.volume_id)
        .ok_or_else(|| Error::NoVolume(home.volume_id(&volume.volume_id)))?;
    home.admin.set_qos(&share, qos).await
}

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let name = request.name.clone();
        observe("CreateVolume", &name, self.create(request)).await
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("DeleteVolume", &volume_id, self.delete(request)).await
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("ControllerExpandVolume", &volume_id, self.expand(request)).await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("ValidateVolumeCapabilities", &volume_id, self.validate(request)).await
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        observe("ListVolumes", "", self.list(request.into_inner())).await
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        observe("GetCapacity", "", self.capacity(request.into_inner())).await
    }

    async fn controller_get_volume(
        &self,
        request: Request<ControllerGetVolumeRequest>,
    ) -> Result<Response<ControllerGetVolumeResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("ControllerGetVolume", &volume_id, self.get(request)).await
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<ControllerGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("ControllerGetVolumeHealth", &volume_id, self.health(request)).await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let types = [
            rpc::Type::CreateDeleteVolume,
            rpc::Type::ExpandVolume,
            rpc::Type::ListVolumes,
            rpc::Type::GetVolume,
            rpc::Type::GetVolumeHealth,
            rpc::Type::GetCapacity,
            rpc::Type::SingleNodeMultiWriter,
            rpc::Type::ModifyVolume,
            rpc::Type::CreateDeleteSnapshot,
            rpc::Type::ListSnapshots,
            rpc::Type::GetSnapshot,
            rpc::Type::CloneVolume,
        ];
        let capabilities = types.into_iter().map(|t| ControllerServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: t.into() })),
        });
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities: capabilities.collect() }))
    }

    async fn controller_publish_volume(
        &self,
        _: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        Err(Error::NotOffered("ControllerPublishVolume").into())
    }

    async fn controller_unpublish_volume(
        &self,
        _: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        Err(Error::NotOffered("ControllerUnpublishVolume").into())
    }

    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        let request = request.into_inner();
        let name = request.name.clone();
        observe("CreateSnapshot", &name, self.create_snapshot_of(request)).await
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        let request = request.into_inner();
        let snapshot_id = request.snapshot_id.clone();
        observe("DeleteSnapshot", &snapshot_id, self.remove_snapshot(request)).await
    }

    async fn list_snapshots(
        &self,
        request: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        observe("ListSnapshots", "", self.list_snapshots_of(request.into_inner())).await
    }

    async fn get_snapshot(
        &self,
        request: Request<GetSnapshotRequest>,
    ) -> Result<Response<GetSnapshotResponse>, Status> {
        let request = request.into_inner();
        let snapshot_id = request.snapshot_id.clone();
        observe("GetSnapshot", &snapshot_id, self.get_snapshot_by_id(request)).await
    }

    async fn controller_modify_volume(
        &self,
        request: Request<ControllerModifyVolumeRequest>,
    ) -> Result<Response<ControllerModifyVolumeResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("ControllerModifyVolume", &volume_id, self.modify(request)).await
    }
}
