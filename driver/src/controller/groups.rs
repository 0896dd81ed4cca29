//! The CSI GroupController service: snapshots of several volumes of one server, all of the same moment.

use std::collections::BTreeSet;

use forebay_proto::admin;
use forebay_proto::csi::group_controller_server::GroupController;
use forebay_proto::csi::group_controller_service_capability::{self as capability, rpc};
use forebay_proto::csi::{
    CreateVolumeGroupSnapshotRequest, CreateVolumeGroupSnapshotResponse, DeleteVolumeGroupSnapshotRequest,
    DeleteVolumeGroupSnapshotResponse, GetVolumeGroupSnapshotRequest, GetVolumeGroupSnapshotResponse,
    GroupControllerGetCapabilitiesRequest, GroupControllerGetCapabilitiesResponse,
    GroupControllerServiceCapability, VolumeGroupSnapshot,
};
use tonic::{Request, Response, Status};

use super::ControllerService;
use super::home::Home;
use super::snapshots::{parameters, to_csi_snapshot};
use super::volume::LABEL_NAME;
use crate::error::Error;
use crate::handle::Handle;
use crate::names::VolumeId;
use crate::observe::observe;
use crate::secrets::Given;

impl ControllerService {
    /// CSI CreateVolumeGroupSnapshot. The same name returns the same group, if it is of the same volumes.
    async fn create_group(
        &self,
        mut request: CreateVolumeGroupSnapshotRequest,
    ) -> Result<CreateVolumeGroupSnapshotResponse, Error> {
        // Zeroized; the server needs none.
        let _ = Given::take(&mut request.secrets);
        let id = VolumeId::from_name(&request.name)?;
        if request.source_volume_ids.is_empty() {
            return Err(Error::Missing("source_volume_ids"));
        }
        let mut labels = parameters(&request.parameters)?;
        labels.insert(LABEL_NAME.into(), request.name.clone());
        let volumes: Vec<Handle> = request
            .source_volume_ids
            .iter()
            .map(|volume_id| self.servers.handle(volume_id))
            .collect::<Result<_, _>>()?;
        let first = &volumes[0];
        if let Some(other) = volumes.iter().find(|volume| volume.instance() != first.instance()) {
            return Err(Error::Refused(format!(
                "volumes {first} and {other} are on different instances: only volumes of one instance can have \
                 snapshots of the same moment"
            )));
        }
        let members = volumes
            .iter()
            .map(|volume| {
                let volume_id = volume.share().to_string();
                let snapshot_id = VolumeId::of_member(&request.name, &volume_id).to_string();
                admin::SnapshotGroupMember { snapshot_id, volume_id }
            })
            .collect();
        let _claim = self.in_flight.claim(&format!("group of snapshots {id}"))?;
        let home = self.servers.home_of(first).await?;
        let request = admin::CreateSnapshotGroupRequest { group_id: id.to_string(), members, labels };
        let snapshots = home.admin.create_snapshot_group(request).await?;
        Ok(CreateVolumeGroupSnapshotResponse { group_snapshot: Some(to_csi_group(&home, &id, &snapshots)) })
    }

    /// CSI DeleteVolumeGroupSnapshot. A group that does not exist counts as deleted.
    async fn remove_group(
        &self,
        mut request: DeleteVolumeGroupSnapshotRequest,
    ) -> Result<DeleteVolumeGroupSnapshotResponse, Error> {
        let _ = Given::take(&mut request.secrets);
        if request.group_snapshot_id.is_empty() {
            return Err(Error::Missing("group_snapshot_id"));
        }
        // No group can have this ID here: there is nothing to delete.
        let Ok(handle) = self.servers.handle(&request.group_snapshot_id) else {
            return Ok(DeleteVolumeGroupSnapshotResponse {});
        };
        let _claim = self.in_flight.claim(&format!("group of snapshots {}", handle.share()))?;
        if let Some((home, snapshots)) = self.find_group(&handle).await? {
            // An earlier call may have deleted a part of the group.
            check_snapshot_ids(&home, &snapshots, &request.snapshot_ids)?;
            home.admin.delete_snapshot_group(handle.share()).await?;
        }
        Ok(DeleteVolumeGroupSnapshotResponse {})
    }

    /// CSI GetVolumeGroupSnapshot.
    async fn get_group(
        &self,
        mut request: GetVolumeGroupSnapshotRequest,
    ) -> Result<GetVolumeGroupSnapshotResponse, Error> {
        let _ = Given::take(&mut request.secrets);
        if request.group_snapshot_id.is_empty() {
            return Err(Error::Missing("group_snapshot_id"));
        }
        let none = || Error::NoSnapshotGroup(request.group_snapshot_id.clone());
        let handle = self.servers.handle(&request.group_snapshot_id).map_err(|_| none())?;
        let (home, snapshots) = self.find_group(&handle).await?.ok_or_else(none)?;
        check_snapshot_ids(&home, &snapshots, &request.snapshot_ids)?;
        if request.snapshot_ids.iter().collect::<BTreeSet<_>>().len() > snapshots.len() {
            return Err(Error::invalid("snapshot_ids", "not all of them belong to the group"));
        }
        let group_snapshot = Some(to_csi_group(&home, handle.share(), &snapshots));
        Ok(GetVolumeGroupSnapshotResponse { group_snapshot })
    }

    /// The snapshots of a group and their server. `None` if the group does not exist, or its instance was removed.
    async fn find_group(&self, handle: &Handle) -> Result<Option<(Home, Vec<admin::Snapshot>)>, Error> {
        let home = match self.servers.home_of(handle).await {
            Ok(home) => home,
            Err(Error::NoVolume(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        // A group has fewer members than a page has entries.
        let group_id = handle.share().to_string();
        let request = admin::ListSnapshotsRequest { group_id: group_id.clone(), ..Default::default() };
        let mut snapshots = home.admin.snapshots(request).await?.snapshots;
        // A server without groups does not know the filter.
        snapshots.retain(|snapshot| snapshot.group_id == group_id);
        Ok((!snapshots.is_empty()).then_some((home, snapshots)))
    }
}

/// Whether the caller knows all snapshots of the group.
fn check_snapshot_ids(home: &Home, snapshots: &[admin::Snapshot], given: &[String]) -> Result<(), Error> {
    let given: BTreeSet<&str> = given.iter().map(String::as_str).collect();
    let mut ids = snapshots.iter().map(|snapshot| home.volume_id(&snapshot.snapshot_id));
    match ids.find(|id| !given.contains(&**id)) {
        Some(id) => Err(Error::invalid("snapshot_ids", format!("snapshot {id} of the group is missing"))),
        None => Ok(()),
    }
}

fn to_csi_group(home: &Home, id: &VolumeId, snapshots: &[admin::Snapshot]) -> VolumeGroupSnapshot {
    VolumeGroupSnapshot {
        group_snapshot_id: home.volume_id(id.as_str()),
        creation_time: snapshots.first().and_then(|snapshot| snapshot.created),
        snapshots: snapshots.iter().map(|snapshot| to_csi_snapshot(home, snapshot)).collect(),
        ready_to_use: true,
    }
}

#[tonic::async_trait]
impl GroupController for ControllerService {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<GroupControllerGetCapabilitiesResponse>, Status> {
        let r#type = rpc::Type::CreateDeleteGetVolumeGroupSnapshot.into();
        let capability = GroupControllerServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type })),
        };
        Ok(Response::new(GroupControllerGetCapabilitiesResponse { capabilities: vec![capability] }))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<CreateVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let name = request.name.clone();
        observe("CreateVolumeGroupSnapshot", &name, self.create_group(request)).await
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<DeleteVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let group_id = request.group_snapshot_id.clone();
        observe("DeleteVolumeGroupSnapshot", &group_id, self.remove_group(request)).await
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<GetVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let group_id = request.group_snapshot_id.clone();
        observe("GetVolumeGroupSnapshot", &group_id, self.get_group(request)).await
    }
}
