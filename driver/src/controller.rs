//! The CSI Controller service: volumes are made, changed and removed through the server's admin API.

use std::collections::HashMap;

use forebay_proto::admin::{self, Protection, Quota, Volume};
use forebay_proto::csi::controller_server::Controller;
use forebay_proto::csi::controller_service_capability::{self as capability, rpc};
use forebay_proto::csi::{
    self, ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeRequest, ControllerGetVolumeResponse,
    ControllerModifyVolumeRequest, ControllerModifyVolumeResponse, ControllerPublishVolumeRequest,
    ControllerPublishVolumeResponse, ControllerServiceCapability, ControllerUnpublishVolumeRequest,
    ControllerUnpublishVolumeResponse, CreateSnapshotRequest, CreateSnapshotResponse, CreateVolumeRequest,
    CreateVolumeResponse, DeleteSnapshotRequest, DeleteSnapshotResponse, DeleteVolumeRequest,
    DeleteVolumeResponse, GetCapacityRequest, GetCapacityResponse, GetSnapshotRequest, GetSnapshotResponse,
    ListSnapshotsRequest, ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, controller_get_volume_response,
    list_volumes_response, validate_volume_capabilities_response,
};
use tonic::{Code, Request, Response, Status};

use crate::address::{self, ServerAddress};
use crate::admin::Admin;
use crate::capability::Capability;
use crate::capacity::{Capacity, to_csi};
use crate::context::VolumeContext;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::limits::CAPACITY_UNIT_BYTES;
use crate::names::VolumeId;
use crate::observe::observe;
use crate::options::MountOptions;
use crate::parameters::Parameters;
use crate::secrets::{Credentials, Given};

/// Labels that the driver keeps with a volume, beside the orchestrator's.
const LABEL_NAME: &str = "csi.forebay.io/name";
const LABEL_SERVER: &str = "csi.forebay.io/server";
/// What was asked for, which the server does not keep where there is no quota.
const LABEL_REQUESTED_BYTES: &str = "csi.forebay.io/requested-bytes";

/// In front of the server's page tokens.
const TOKEN_PREFIX: &str = "after:";

/// Makes, changes and removes volumes.
#[derive(Clone, Debug)]
pub(crate) struct ControllerService {
    admin: Admin,
    in_flight: InFlight,
}

impl ControllerService {
    pub(crate) fn new(admin: Admin) -> Self {
        Self { admin, in_flight: InFlight::default() }
    }

    /// CSI CreateVolume. The same name gives the same volume, as long as it is what was asked for.
    async fn create(&self, mut request: CreateVolumeRequest) -> Result<CreateVolumeResponse, Error> {
        let given = Given::take(&mut request.secrets);
        let volume_id = VolumeId::from_name(&request.name)?;
        Capability::parse_all(&request.volume_capabilities)?;
        let parameters = Parameters::parse(&request.parameters)?;
        if !request.mutable_parameters.is_empty() {
            return Err(Error::invalid("mutable_parameters", "there are none"));
        }
        let capacity = Capacity::parse(request.capacity_range.as_ref())?;
        if request.volume_content_source.is_some() {
            return Err(Error::invalid("volume_content_source", "snapshots and clones are not offered"));
        }
        let credentials = given?.for_volume(&volume_id);
        // Refused now and not when the first pod starts.
        check_mount_flags(&request.volume_capabilities, parameters.protection)?;

        let _claim = self.in_flight.claim(volume_id.as_str())?;
        let existing = self.admin.stat(&volume_id).await?;
        let is_there = existing.is_some();
        let desired = match existing {
            Some(existing) => {
                check_compatible(&existing, &request.name, capacity, &parameters, &credentials)?;
                // Once more as it is: the server compares the password, which nobody else can.
                admin::CreateVolumeRequest {
                    volume_id: volume_id.to_string(),
                    pool: existing.pool.clone(),
                    capacity_bytes: size_bytes(&existing),
                    quota: existing.quota,
                    protection: existing.protection,
                    credentials: Some(credentials.to_admin()),
                    labels: existing.labels,
                }
            }
            None => {
                let size_bytes = capacity.size_bytes()?;
                let mut labels: HashMap<String, String> = parameters.labels.clone().into_iter().collect();
                labels.insert(LABEL_NAME.into(), request.name.clone());
                labels.insert(LABEL_REQUESTED_BYTES.into(), size_bytes.to_string());
                if let Some(servers) = &parameters.server {
                    labels.insert(LABEL_SERVER.into(), address::format_list(servers));
                }
                admin::CreateVolumeRequest {
                    volume_id: volume_id.to_string(),
                    pool: parameters.pool.clone().unwrap_or_default(),
                    capacity_bytes: size_bytes,
                    quota: parameters.quota.into(),
                    protection: parameters.protection.into(),
                    credentials: Some(credentials.to_admin()),
                    labels,
                }
            }
        };
        // Before anything is made: a volume that nobody can mount is of no use.
        let advertised = match &parameters.server {
            Some(_) => Vec::new(),
            None => self.admin.addresses().await?,
        };
        let volume = match self.admin.create(desired).await {
            // All else was compared above.
            Err(Error::Admin(status)) if is_there && status.code() == Code::AlreadyExists => {
                return Err(Error::VolumeExists { volume_id: volume_id.to_string(), what: "password" });
            }
            other => other?,
        };
        Ok(CreateVolumeResponse { volume: Some(to_csi_volume(&volume, &advertised)) })
    }

    /// CSI DeleteVolume. A volume that is not there is deleted.
    async fn delete(&self, request: DeleteVolumeRequest) -> Result<DeleteVolumeResponse, Error> {
        if request.volume_id.is_empty() {
            return Err(Error::Missing("volume_id"));
        }
        if let Some(volume_id) = VolumeId::parse(&request.volume_id) {
            let _claim = self.in_flight.claim(volume_id.as_str())?;
            self.admin.delete(&volume_id).await?;
        }
        Ok(DeleteVolumeResponse {})
    }

    /// CSI ControllerExpandVolume: a change of quota, which mounted nodes see by themselves.
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
        let volume_id = self.known(&request.volume_id)?;
        let _claim = self.in_flight.claim(volume_id.as_str())?;
        let existing = self.existing(&volume_id).await?;
        let present_bytes = size_bytes(&existing);
        let capacity_bytes = if capacity.admits(present_bytes) && existing.quota() != Quota::None {
            present_bytes
        } else if present_bytes > capacity.limit_bytes() {
            return Err(Error::Capacity(format!("the volume has {present_bytes} bytes and never shrinks")));
        } else {
            let wanted = capacity.size_bytes()?.max(present_bytes);
            match existing.quota() {
                // Nothing limits it, so there is nothing to change.
                Quota::None => wanted,
                _ => self.admin.expand(&volume_id, wanted).await?.capacity_bytes,
            }
        };
        Ok(ControllerExpandVolumeResponse {
            capacity_bytes: to_csi(capacity_bytes),
            node_expansion_required: false,
        })
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
        let volume_id = self.known(&request.volume_id)?;
        let existing = self.existing(&volume_id).await?;
        let verdict = Capability::parse_all(&request.volume_capabilities)
            .and_then(|_| check_mount_flags(&request.volume_capabilities, existing.protection()))
            .and_then(|()| Parameters::parse(&request.parameters))
            .and_then(|parameters| check_parameters(&existing, &parameters))
            .and_then(|()| check_context(&existing, &request.volume_context));
        Ok(match verdict {
            Ok(()) => ValidateVolumeCapabilitiesResponse {
                confirmed: Some(validate_volume_capabilities_response::Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: HashMap::new(),
                }),
                message: String::new(),
            },
            Err(error) => ValidateVolumeCapabilitiesResponse { confirmed: None, message: error.to_string() },
        })
    }

    /// CSI GetCapacity: what can still be promised, over all pools or in the one that is asked for.
    async fn capacity(&self, request: GetCapacityRequest) -> Result<GetCapacityResponse, Error> {
        let parameters = Parameters::parse(&request.parameters)?;
        let pools = self.admin.pools().await?;
        if let Some(pool) = &parameters.pool
            && !pools.iter().any(|p| p.name == *pool)
        {
            return Err(Error::invalid("parameter pool", format!("there is no pool {pool:?}")));
        }
        let possible = request.volume_capabilities.is_empty()
            || Capability::parse_all(&request.volume_capabilities).is_ok();
        let (available, largest) = pools
            .iter()
            .filter(|p| possible && parameters.pool.as_ref().is_none_or(|name| p.name == *name))
            .map(|p| available_bytes(p, parameters.quota))
            .fold((0u64, 0u64), |(sum, max), bytes| (sum.saturating_add(bytes), max.max(bytes)));
        Ok(GetCapacityResponse {
            available_capacity: to_csi(available),
            maximum_volume_size: Some(to_csi(largest)),
            minimum_volume_size: Some(to_csi(CAPACITY_UNIT_BYTES)),
        })
    }

    /// CSI ListVolumes. The server takes any volume's id as a token; with the prefix a foreign one is known.
    async fn list(&self, request: ListVolumesRequest) -> Result<ListVolumesResponse, Error> {
        let page_size =
            u32::try_from(request.max_entries).map_err(|_| Error::invalid("max_entries", "is negative"))?;
        let page_token = match request.starting_token.as_str() {
            "" => "",
            token => token.strip_prefix(TOKEN_PREFIX).ok_or(Error::UnknownToken)?,
        };
        let page = self.admin.list(page_size, page_token.to_owned()).await?;
        let advertised = self.advertised(&page.volumes).await?;
        let entries = page.volumes.iter().map(|volume| list_volumes_response::Entry {
            volume: Some(to_csi_volume(volume, &advertised)),
            status: None,
        });
        let next_token = match page.next_page_token.as_str() {
            "" => String::new(),
            token => format!("{TOKEN_PREFIX}{token}"),
        };
        Ok(ListVolumesResponse { entries: entries.collect(), next_token })
    }

    /// CSI ControllerGetVolume.
    async fn get(&self, request: ControllerGetVolumeRequest) -> Result<ControllerGetVolumeResponse, Error> {
        if request.volume_id.is_empty() {
            return Err(Error::Missing("volume_id"));
        }
        let volume_id = self.known(&request.volume_id)?;
        let existing = self.existing(&volume_id).await?;
        let advertised = self.advertised(std::slice::from_ref(&existing)).await?;
        Ok(ControllerGetVolumeResponse {
            volume: Some(to_csi_volume(&existing, &advertised)),
            status: Some(controller_get_volume_response::VolumeStatus::default()),
        })
    }

    /// The id, where a volume can have it at all.
    fn known(&self, volume_id: &str) -> Result<VolumeId, Error> {
        VolumeId::parse(volume_id).ok_or_else(|| Error::NoVolume(volume_id.to_owned()))
    }

    async fn existing(&self, volume_id: &VolumeId) -> Result<Volume, Error> {
        self.admin.stat(volume_id).await?.ok_or_else(|| Error::NoVolume(volume_id.to_string()))
    }

    /// The server's addresses, asked for only where a volume has none of its own.
    async fn advertised(&self, volumes: &[Volume]) -> Result<Vec<ServerAddress>, Error> {
        if volumes.iter().all(|v| v.labels.contains_key(LABEL_SERVER)) {
            return Ok(Vec::new());
        }
        self.admin.addresses().await
    }
}

/// The volume as CSI has it.
fn to_csi_volume(volume: &Volume, advertised: &[ServerAddress]) -> csi::Volume {
    let servers = volume
        .labels
        .get(LABEL_SERVER)
        .and_then(|list| address::parse_list("server", list).ok())
        .unwrap_or_else(|| advertised.to_vec());
    let volume_context = VolumeId::parse(&volume.volume_id)
        .map(|share| VolumeContext::new(servers, share, volume.protection()).to_map())
        .unwrap_or_default();
    csi::Volume {
        capacity_bytes: to_csi(size_bytes(volume)),
        volume_id: volume.volume_id.clone(),
        volume_context,
        content_source: None,
        accessible_topology: Vec::new(),
    }
}

/// The hard limit, or what was asked for where there is none.
fn size_bytes(volume: &Volume) -> u64 {
    match volume.capacity_bytes {
        0 => volume.labels.get(LABEL_REQUESTED_BYTES).and_then(|text| text.parse().ok()).unwrap_or(0),
        bytes => bytes,
    }
}

/// What a pool can still promise to volumes with this quota. Promises that are not used yet count as used;
/// where nothing is promised what is free counts.
fn available_bytes(pool: &admin::Pool, quota: Quota) -> u64 {
    let is_limited = pool.quota != "none";
    match quota {
        Quota::Hard if !is_limited => 0,
        Quota::None if is_limited => 0,
        _ if is_limited => pool.free_bytes.min(pool.total_bytes.saturating_sub(pool.provisioned_bytes)),
        _ => pool.free_bytes,
    }
}

/// CSI CreateVolume: a volume of this name that is not what is asked for is ALREADY_EXISTS.
fn check_compatible(
    existing: &Volume,
    name: &str,
    capacity: Capacity,
    parameters: &Parameters,
    credentials: &Credentials,
) -> Result<(), Error> {
    let exists = |what| Err(Error::VolumeExists { volume_id: existing.volume_id.clone(), what });
    if existing.labels.get(LABEL_NAME).is_some_and(|n| n != name) {
        return exists("name");
    }
    if !capacity.admits(size_bytes(existing)) {
        return exists("capacity");
    }
    check_parameters(existing, parameters)?;
    if existing.username != credentials.username {
        return exists("username");
    }
    Ok(())
}

/// What a StorageClass leaves open fits every volume.
fn check_parameters(existing: &Volume, parameters: &Parameters) -> Result<(), Error> {
    let exists = |what| Err(Error::VolumeExists { volume_id: existing.volume_id.clone(), what });
    if parameters.pool.as_ref().is_some_and(|p| *p != existing.pool) {
        return exists("pool");
    }
    if parameters.quota != Quota::Unspecified && parameters.quota != existing.quota() {
        return exists("quota");
    }
    if parameters.protection != Protection::Unspecified && parameters.protection != existing.protection() {
        return exists("protection");
    }
    let servers = parameters.server.as_deref().map(address::format_list);
    if servers.is_some() && servers.as_ref() != existing.labels.get(LABEL_SERVER) {
        return exists("server");
    }
    Ok(())
}

/// A context that is given must be this volume's.
fn check_context(existing: &Volume, map: &HashMap<String, String>) -> Result<(), Error> {
    if map.is_empty() {
        return Ok(());
    }
    let context = VolumeContext::parse(map)?;
    if context.share.as_str() != existing.volume_id {
        return Err(Error::invalid("volume_context.share", "is not this volume's"));
    }
    Ok(())
}

/// Whether a node would take the mount flags.
fn check_mount_flags(capabilities: &[csi::VolumeCapability], protection: Protection) -> Result<(), Error> {
    for capability in capabilities {
        let capability = Capability::parse(Some(capability))?;
        let flags = &capability.mount.mount_flags;
        MountOptions::build(crate::options::DIALECT_DEFAULT, protection, capability.group()?, flags)?;
    }
    Ok(())
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

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let types = [
            rpc::Type::CreateDeleteVolume,
            rpc::Type::ExpandVolume,
            rpc::Type::ListVolumes,
            rpc::Type::GetVolume,
            rpc::Type::GetCapacity,
            rpc::Type::SingleNodeMultiWriter,
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
        _: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        Err(Error::NotOffered("CreateSnapshot").into())
    }

    async fn delete_snapshot(
        &self,
        _: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        Err(Error::NotOffered("DeleteSnapshot").into())
    }

    async fn list_snapshots(
        &self,
        _: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        Err(Error::NotOffered("ListSnapshots").into())
    }

    async fn get_snapshot(
        &self,
        _: Request<GetSnapshotRequest>,
    ) -> Result<Response<GetSnapshotResponse>, Status> {
        Err(Error::NotOffered("GetSnapshot").into())
    }

    async fn controller_modify_volume(
        &self,
        _: Request<ControllerModifyVolumeRequest>,
    ) -> Result<Response<ControllerModifyVolumeResponse>, Status> {
        Err(Error::NotOffered("ControllerModifyVolume").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_promises_what_it_can_keep() {
        let pool = |quota: &str, free_bytes, provisioned_bytes| admin::Pool {
            quota: quota.into(),
            total_bytes: 100,
            free_bytes,
            provisioned_bytes,
            ..Default::default()
        };
        for (pool, quota, bytes) in [
            (pool("project", 90, 30), Quota::Unspecified, 70),
            (pool("project", 60, 30), Quota::Hard, 60),
            (pool("project", 90, 300), Quota::Hard, 0),
            (pool("project", 90, 0), Quota::None, 0),
            (pool("none", 90, 0), Quota::Unspecified, 90),
            (pool("none", 90, 0), Quota::None, 90),
            (pool("none", 90, 0), Quota::Hard, 0),
        ] {
            assert_eq!(available_bytes(&pool, quota), bytes, "{pool:?} {quota:?}");
        }
    }
}
