//! Snapshots: created and stored by the server that holds the volume, in the volume's pool.

use std::collections::HashMap;

use forebay_proto::admin;
use forebay_proto::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use forebay_proto::csi::{
    CreateSnapshotRequest, CreateSnapshotResponse, DeleteSnapshotRequest, DeleteSnapshotResponse,
    GetSnapshotRequest, GetSnapshotResponse, ListSnapshotsRequest, ListSnapshotsResponse, Snapshot,
    VolumeContentSource, list_snapshots_response,
};

use super::ControllerService;
use super::home::{Home, Servers};
use super::listing::{list_in_clusters, page_size, token_in, token_out};
use super::volume::{LABEL_NAME, size_bytes};
use crate::capacity::to_csi;
use crate::error::Error;
use crate::handle::Handle;
use crate::names::VolumeId;
use crate::parameters::{METADATA_PREFIX, check_size};
use crate::secrets::Given;

/// The source of a new volume.
#[derive(Clone, Debug)]
pub(super) struct Source {
    handle: Handle,
    is_snapshot: bool,
    /// Its pool.
    pub(super) pool: String,
    /// Minimum size of a volume that is created from it.
    pub(super) size_bytes: u64,
}

impl Source {
    /// The handle of the source.
    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Its IDs on the server, of the snapshot and of the volume; one of them is empty.
    pub(super) fn ids(&self) -> (String, String) {
        let id = self.handle.share().to_string();
        if self.is_snapshot { (id, String::new()) } else { (String::new(), id) }
    }
}

impl ControllerService {
    /// Finds the source of a new volume.
    pub(super) async fn source(&self, wanted: Option<&VolumeContentSource>) -> Result<Option<Source>, Error> {
        let Some(wanted) = wanted else { return Ok(None) };
        let source = match &wanted.r#type {
            Some(Type::Snapshot(SnapshotSource { snapshot_id })) => {
                if snapshot_id.is_empty() {
                    return Err(Error::Missing("volume_content_source.snapshot.snapshot_id"));
                }
                let none = || Error::NoSnapshot(snapshot_id.clone());
                let handle = self.servers.handle(snapshot_id).map_err(|_| none())?;
                let (_, found) = self.find_snapshot(&handle).await?.ok_or_else(none)?;
                Source { handle, is_snapshot: true, pool: found.pool, size_bytes: found.capacity_bytes }
            }
            Some(Type::Volume(VolumeSource { volume_id })) => {
                if volume_id.is_empty() {
                    return Err(Error::Missing("volume_content_source.volume.volume_id"));
                }
                let handle = self.servers.handle(volume_id)?;
                let home = self.servers.home_of(&handle).await?;
                let found = super::existing(&home, handle.share()).await?;
                let size_bytes = size_bytes(&found);
                Source { handle, is_snapshot: false, pool: found.pool, size_bytes }
            }
            None => return Err(Error::invalid("volume_content_source", "names neither snapshot nor volume")),
        };
        Ok(Some(source))
    }

    /// The snapshot and its server. `None` if the snapshot does not exist, or its instance was removed.
    async fn find_snapshot(&self, handle: &Handle) -> Result<Option<(Home, admin::Snapshot)>, Error> {
        let home = match self.servers.home_of(handle).await {
            Ok(home) => home,
            Err(Error::NoVolume(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        let request =
            admin::ListSnapshotsRequest { snapshot_id: handle.share().to_string(), ..Default::default() };
        let found = home.admin.snapshots(request).await?.snapshots.into_iter().next();
        Ok(found.map(|snapshot| (home, snapshot)))
    }

    /// CSI CreateSnapshot. The same name returns the same snapshot, if it is of the same volume.
    pub(super) async fn create_snapshot_of(
        &self,
        mut request: CreateSnapshotRequest,
    ) -> Result<CreateSnapshotResponse, Error> {
        // Zeroized; the server needs none.
        let _ = Given::take(&mut request.secrets);
        if request.source_volume_id.is_empty() {
            return Err(Error::Missing("source_volume_id"));
        }
        let id = VolumeId::from_name(&request.name)?;
        let mut labels = parameters(&request.parameters)?;
        labels.insert(LABEL_NAME.into(), request.name);
        let handle = self.servers.handle(&request.source_volume_id)?;
        let _claim = self.in_flight.claim(&format!("snapshot {id}"))?;
        let home = self.servers.home_of(&handle).await?;
        let request = admin::CreateSnapshotRequest {
            snapshot_id: id.to_string(),
            volume_id: handle.share().to_string(),
            labels,
        };
        let snapshot = home.admin.create_snapshot(request).await?;
        Ok(CreateSnapshotResponse { snapshot: Some(to_csi_snapshot(&home, &snapshot)) })
    }

    /// CSI DeleteSnapshot. A snapshot that does not exist counts as deleted.
    pub(super) async fn remove_snapshot(
        &self,
        mut request: DeleteSnapshotRequest,
    ) -> Result<DeleteSnapshotResponse, Error> {
        let _ = Given::take(&mut request.secrets);
        if request.snapshot_id.is_empty() {
            return Err(Error::Missing("snapshot_id"));
        }
        // No snapshot can have this ID here: there is nothing to delete.
        let Ok(handle) = self.servers.handle(&request.snapshot_id) else {
            return Ok(DeleteSnapshotResponse {});
        };
        let _claim = self.in_flight.claim(&format!("snapshot {}", handle.share()))?;
        match self.servers.home_of(&handle).await {
            Ok(home) => home.admin.delete_snapshot(handle.share()).await?,
            Err(Error::NoVolume(_)) => {}
            Err(error) => return Err(error),
        }
        Ok(DeleteSnapshotResponse {})
    }

    /// CSI GetSnapshot.
    pub(super) async fn get_snapshot_by_id(
        &self,
        mut request: GetSnapshotRequest,
    ) -> Result<GetSnapshotResponse, Error> {
        let _ = Given::take(&mut request.secrets);
        if request.snapshot_id.is_empty() {
            return Err(Error::Missing("snapshot_id"));
        }
        let none = || Error::NoSnapshot(request.snapshot_id.clone());
        let handle = self.servers.handle(&request.snapshot_id).map_err(|_| none())?;
        let (home, snapshot) = self.find_snapshot(&handle).await?.ok_or_else(none)?;
        Ok(GetSnapshotResponse { snapshot: Some(to_csi_snapshot(&home, &snapshot)) })
    }

    /// CSI ListSnapshots. IDs that are not valid here yield an empty list.
    pub(super) async fn list_snapshots_of(
        &self,
        mut request: ListSnapshotsRequest,
    ) -> Result<ListSnapshotsResponse, Error> {
        let _ = Given::take(&mut request.secrets);
        let size = page_size(request.max_entries)?;
        let token = token_in(&request.starting_token)?;
        let (mut snapshot_id, mut volume_id, mut on) = (String::new(), String::new(), None);
        for (given, id) in
            [(&request.snapshot_id, &mut snapshot_id), (&request.source_volume_id, &mut volume_id)]
        {
            if given.is_empty() {
                continue;
            }
            let Ok(handle) = self.servers.handle(given) else { return Ok(ListSnapshotsResponse::default()) };
            *id = handle.share().to_string();
            on = Some(handle);
        }
        let filter = admin::ListSnapshotsRequest { snapshot_id, volume_id, ..Default::default() };
        let page = |home: Home, page_size: u32, page_token: String| {
            let request = admin::ListSnapshotsRequest { page_size, page_token, ..filter.clone() };
            async move {
                let page = home.admin.snapshots(request).await?;
                let entries: Vec<Snapshot> =
                    page.snapshots.iter().map(|snapshot| to_csi_snapshot(&home, snapshot)).collect();
                Ok((entries, page.next_page_token))
            }
        };
        let (snapshots, next) = match (&self.servers, &on) {
            (Servers::One(admin), _) => page(Home::only(admin), size, token.to_owned()).await?,
            (Servers::Kubernetes(_), Some(handle)) => match self.servers.home_of(handle).await {
                Ok(home) => page(home, size, token.to_owned()).await?,
                Err(Error::NoVolume(_)) => Default::default(),
                Err(error) => return Err(error),
            },
            (Servers::Kubernetes(clusters), None) => list_in_clusters(clusters, size, token, page).await?,
        };
        let entry = |snapshot| list_snapshots_response::Entry { snapshot: Some(snapshot) };
        let mut entries: Vec<_> = snapshots.into_iter().map(entry).collect();
        // Both IDs were given, and they belong to different instances.
        let is_other = |given: &str, found: Option<&str>| !given.is_empty() && found != Some(given);
        entries.retain(|entry| {
            let snapshot = entry.snapshot.as_ref();
            !is_other(&request.snapshot_id, snapshot.map(|s| &*s.snapshot_id))
                && !is_other(&request.source_volume_id, snapshot.map(|s| &*s.source_volume_id))
        });
        Ok(ListSnapshotsResponse { entries, next_token: token_out(&next) })
    }
}

/// The field of a class that decides what happens to a snapshot when its Kubernetes object is deleted. It is not for drivers.
const DELETION_POLICY: &str = "deletionPolicy";

/// A class of snapshots has no parameters of this driver. csi-snapshotter adds metadata of the VolumeSnapshot; classes of
/// Kubernetes' own tests have [`DELETION_POLICY`] among the parameters, too, where it has no effect. Returns the metadata.
pub(super) fn parameters(given: &HashMap<String, String>) -> Result<HashMap<String, String>, Error> {
    check_size("parameters", given)?;
    let mut metadata = HashMap::new();
    for (key, value) in given {
        if key.starts_with(METADATA_PREFIX) {
            metadata.insert(key.clone(), value.clone());
        } else if key != DELETION_POLICY {
            return Err(Error::UnknownParameter { key: key.clone(), known: "none, for snapshots" });
        }
    }
    Ok(metadata)
}

pub(super) fn to_csi_snapshot(home: &Home, snapshot: &admin::Snapshot) -> Snapshot {
    Snapshot {
        size_bytes: to_csi(snapshot.capacity_bytes),
        snapshot_id: home.volume_id(&snapshot.snapshot_id),
        source_volume_id: home.volume_id(&snapshot.volume_id),
        creation_time: snapshot.created,
        ready_to_use: true,
        group_snapshot_id: match &*snapshot.group_id {
            "" => String::new(),
            group => home.volume_id(group),
        },
    }
}

/// Converts the source of a volume to CSI.
pub(super) fn content_source(home: &Home, volume: &admin::Volume) -> Option<VolumeContentSource> {
    let r#type = if !volume.source_snapshot_id.is_empty() {
        Type::Snapshot(SnapshotSource { snapshot_id: home.volume_id(&volume.source_snapshot_id) })
    } else if !volume.source_volume_id.is_empty() {
        Type::Volume(VolumeSource { volume_id: home.volume_id(&volume.source_volume_id) })
    } else {
        return None;
    };
    Some(VolumeContentSource { r#type: Some(r#type) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_metadata_and_the_deletion_policy_are_accepted_as_parameters() {
        let map =
            |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let name = (format!("{METADATA_PREFIX}volumesnapshot/name"), "first".to_owned());
        let mut given: HashMap<String, String> = map(&[(DELETION_POLICY, "Delete")]);
        given.insert(name.0.clone(), name.1.clone());
        let metadata = parameters(&given).expect("accepted");
        assert_eq!(metadata, HashMap::from([name]), "the policy is not a label");
        given.insert("compression".into(), "on".into());
        assert!(
            matches!(parameters(&given), Err(Error::UnknownParameter { key, .. }) if key == "compression")
        );
    }
}
