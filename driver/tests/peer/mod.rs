//! An admin API in memory, as described in admin.proto. On request, it does what a real server does not: it stays silent,
//! advertises nothing, or reports that a volume is in use.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use forebay_proto::admin::admin_server::{Admin, AdminServer};
use forebay_proto::admin::*;
use tokio::net::UnixListener;
use tokio::sync::{Notify, watch};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

pub const POOL_BYTES: u64 = 1 << 30;

#[derive(Clone)]
pub struct Peer(Arc<State>);

struct State {
    volumes: Mutex<BTreeMap<String, (Volume, String)>>,
    snapshots: Mutex<BTreeMap<String, Snapshot>>,
    addresses: Mutex<Vec<String>>,
    in_use: Mutex<Option<String>>,
    /// CreateVolume waits while this is true.
    silent: watch::Sender<bool>,
    waiting: AtomicUsize,
    end: Notify,
}

impl Peer {
    /// Serves on `socket` while the test's runtime exists, or until [`Self::end`].
    pub fn serve(socket: &Path) -> Self {
        let peer = Self(Arc::new(State {
            volumes: Mutex::default(),
            snapshots: Mutex::default(),
            addresses: Mutex::new(vec!["0.0.0.0:445".into(), "10.1.1.1:445".into()]),
            in_use: Mutex::default(),
            silent: watch::Sender::new(false),
            waiting: AtomicUsize::new(0),
            end: Notify::new(),
        }));
        let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
        let service = AdminServer::new(peer.clone());
        let state = peer.0.clone();
        tokio::spawn(async move {
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming_shutdown(incoming, async move { state.end.notified().await })
                .await
                .unwrap();
        });
        peer
    }

    pub fn set_addresses(&self, addresses: &[&str]) {
        *self.0.addresses.lock().unwrap() = addresses.iter().map(|a| (*a).to_owned()).collect();
    }

    pub fn set_in_use(&self, volume_id: &str) {
        *self.0.in_use.lock().unwrap() = Some(volume_id.to_owned());
    }

    pub fn set_silent(&self, silent: bool) {
        self.0.silent.send_replace(silent);
    }

    /// Closes the connections and the socket.
    pub fn end(&self) {
        self.0.end.notify_one();
    }

    /// Calls that wait because the peer is silent.
    pub fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::SeqCst)
    }

    pub fn volumes(&self) -> usize {
        self.0.volumes.lock().unwrap().len()
    }
}

fn provisioned(volumes: &BTreeMap<String, (Volume, String)>) -> u64 {
    volumes.values().map(|(v, _)| v.capacity_bytes).sum()
}

#[tonic::async_trait]
impl Admin for Peer {
    async fn get_server_info(
        &self,
        _: Request<GetServerInfoRequest>,
    ) -> Result<Response<GetServerInfoResponse>, Status> {
        let listen_addresses = self.0.addresses.lock().unwrap().clone();
        Ok(Response::new(GetServerInfoResponse { listen_addresses, ..Default::default() }))
    }

    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        self.0.waiting.fetch_add(1, Ordering::SeqCst);
        self.0.silent.subscribe().wait_for(|silent| !silent).await.unwrap();
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
        let request = request.into_inner();
        let credentials = request.credentials.unwrap();
        let mut volumes = self.0.volumes.lock().unwrap();
        if let Some((volume, password)) = volumes.get(&request.volume_id) {
            let same = *password == credentials.password
                && volume.username == credentials.username
                && volume.capacity_bytes == request.capacity_bytes
                && volume.source_snapshot_id == request.source_snapshot_id
                && volume.source_volume_id == request.source_volume_id
                && volume.labels == request.labels;
            return match same {
                true => Ok(Response::new(CreateVolumeResponse { volume: Some(volume.clone()) })),
                false => Err(Status::already_exists("other parameters")),
            };
        }
        if !matches!(request.pool.as_str(), "" | "pool") {
            return Err(Status::invalid_argument("no such pool"));
        }
        if provisioned(&volumes) + request.capacity_bytes > POOL_BYTES {
            return Err(Status::resource_exhausted("the pool is full"));
        }
        let volume = Volume {
            volume_id: request.volume_id.clone(),
            pool: "pool".into(),
            capacity_bytes: request.capacity_bytes,
            quota: Quota::Hard.into(),
            protection: request.protection,
            username: credentials.username.clone(),
            labels: request.labels,
            source_snapshot_id: request.source_snapshot_id,
            source_volume_id: request.source_volume_id,
            root: request.root,
            ..Default::default()
        };
        volumes.insert(request.volume_id, (volume.clone(), credentials.password.clone()));
        Ok(Response::new(CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let request = request.into_inner();
        if self.0.in_use.lock().unwrap().as_ref() == Some(&request.volume_id) && !request.force {
            return Err(Status::failed_precondition("the volume has open files"));
        }
        self.0.volumes.lock().unwrap().remove(&request.volume_id);
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn expand_volume(
        &self,
        request: Request<ExpandVolumeRequest>,
    ) -> Result<Response<ExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let mut volumes = self.0.volumes.lock().unwrap();
        let others = provisioned(&volumes);
        let (volume, _) = volumes.get_mut(&request.volume_id).ok_or_else(|| Status::not_found("none"))?;
        if others - volume.capacity_bytes + request.capacity_bytes > POOL_BYTES {
            return Err(Status::resource_exhausted("the pool is full"));
        }
        volume.capacity_bytes = volume.capacity_bytes.max(request.capacity_bytes);
        Ok(Response::new(ExpandVolumeResponse { volume: Some(volume.clone()) }))
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        let request = request.into_inner();
        let volumes = self.0.volumes.lock().unwrap();
        let start = request.page_token.as_str();
        if start.contains(|c: char| !matches!(c, 'a'..='z' | '0'..='9' | '-')) {
            return Err(Status::aborted("unknown page token"));
        }
        let size = if request.page_size == 0 { 1000 } else { request.page_size as usize };
        let mut rest =
            volumes.values().map(|(volume, _)| volume.clone()).filter(|v| v.volume_id.as_str() > start);
        let page: Vec<Volume> = rest.by_ref().take(size).collect();
        let last = page.last().map(|v| v.volume_id.clone()).unwrap_or_default();
        let next_page_token = rest.next().map(|_| last).unwrap_or_default();
        Ok(Response::new(ListVolumesResponse { volumes: page, next_page_token }))
    }

    async fn stat_volume(
        &self,
        request: Request<StatVolumeRequest>,
    ) -> Result<Response<StatVolumeResponse>, Status> {
        let volumes = self.0.volumes.lock().unwrap();
        let volume = volumes.get(&request.into_inner().volume_id).map(|(volume, _)| volume.clone());
        match volume {
            Some(volume) => Ok(Response::new(StatVolumeResponse { volume: Some(volume) })),
            None => Err(Status::not_found("no such volume")),
        }
    }

    async fn set_credentials(
        &self,
        _: Request<SetCredentialsRequest>,
    ) -> Result<Response<SetCredentialsResponse>, Status> {
        Err(Status::unimplemented("the driver does not call it"))
    }

    async fn set_qos(&self, request: Request<SetQosRequest>) -> Result<Response<SetQosResponse>, Status> {
        let request = request.into_inner();
        let mut volumes = self.0.volumes.lock().unwrap();
        let (volume, _) = volumes.get_mut(&request.volume_id).ok_or_else(|| Status::not_found("none"))?;
        volume.qos = request.qos;
        Ok(Response::new(SetQosResponse { volume: Some(volume.clone()) }))
    }

    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        let request = request.into_inner();
        let mut snapshots = self.0.snapshots.lock().unwrap();
        if let Some(found) = snapshots.get(&request.snapshot_id) {
            return match found.volume_id == request.volume_id {
                true => Ok(Response::new(CreateSnapshotResponse { snapshot: Some(found.clone()) })),
                false => Err(Status::already_exists("of another volume")),
            };
        }
        let volumes = self.0.volumes.lock().unwrap();
        let (volume, _) =
            volumes.get(&request.volume_id).ok_or_else(|| Status::not_found("no such volume"))?;
        let snapshot = Snapshot {
            snapshot_id: request.snapshot_id.clone(),
            volume_id: request.volume_id,
            pool: "pool".into(),
            capacity_bytes: volume.capacity_bytes,
            created: Some(prost_types::Timestamp { seconds: 1, nanos: 0 }),
            labels: request.labels,
            ..Default::default()
        };
        snapshots.insert(request.snapshot_id, snapshot.clone());
        Ok(Response::new(CreateSnapshotResponse { snapshot: Some(snapshot) }))
    }

    async fn create_snapshot_group(
        &self,
        request: Request<CreateSnapshotGroupRequest>,
    ) -> Result<Response<CreateSnapshotGroupResponse>, Status> {
        let CreateSnapshotGroupRequest { group_id, members, labels } = request.into_inner();
        let existing = self.0.snapshots.lock().unwrap().values().filter(|s| s.group_id == group_id).count();
        if existing > 0 && existing != members.len() {
            return Err(Status::already_exists("of other volumes"));
        }
        let exists = |m: &SnapshotGroupMember| self.0.volumes.lock().unwrap().contains_key(&m.volume_id);
        if !members.iter().all(exists) {
            return Err(Status::not_found("no such volume"));
        }
        let mut made = Vec::new();
        for SnapshotGroupMember { snapshot_id, volume_id } in members {
            if existing > 0 && !self.0.snapshots.lock().unwrap().contains_key(&snapshot_id) {
                return Err(Status::already_exists("of other volumes"));
            }
            let request = CreateSnapshotRequest { snapshot_id, volume_id, labels: labels.clone() };
            let snapshot = self.create_snapshot(Request::new(request)).await?.into_inner().snapshot.unwrap();
            let snapshot = Snapshot { group_id: group_id.clone(), ..snapshot };
            self.0.snapshots.lock().unwrap().insert(snapshot.snapshot_id.clone(), snapshot.clone());
            made.push(snapshot);
        }
        Ok(Response::new(CreateSnapshotGroupResponse { snapshots: made }))
    }

    async fn delete_snapshot_group(
        &self,
        request: Request<DeleteSnapshotGroupRequest>,
    ) -> Result<Response<DeleteSnapshotGroupResponse>, Status> {
        let group_id = request.into_inner().group_id;
        self.0.snapshots.lock().unwrap().retain(|_, snapshot| snapshot.group_id != group_id);
        Ok(Response::new(DeleteSnapshotGroupResponse {}))
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        let id = request.into_inner().snapshot_id;
        let mut snapshots = self.0.snapshots.lock().unwrap();
        if snapshots.get(&id).is_some_and(|snapshot| !snapshot.group_id.is_empty()) {
            return Err(Status::invalid_argument("it belongs to a group"));
        }
        snapshots.remove(&id);
        Ok(Response::new(DeleteSnapshotResponse {}))
    }

    async fn list_snapshots(
        &self,
        request: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        let request = request.into_inner();
        let snapshots = self.0.snapshots.lock().unwrap();
        let size = if request.page_size == 0 { 1000 } else { request.page_size as usize };
        let fits = |wanted: &str, found: &str| wanted.is_empty() || wanted == found;
        let mut rest = snapshots
            .values()
            .filter(|s| fits(&request.snapshot_id, &s.snapshot_id))
            .filter(|s| fits(&request.volume_id, &s.volume_id))
            .filter(|s| fits(&request.group_id, &s.group_id))
            .filter(|s| s.snapshot_id > request.page_token);
        let page: Vec<Snapshot> = rest.by_ref().take(size).cloned().collect();
        let last = page.last().map(|s| s.snapshot_id.clone()).unwrap_or_default();
        let next_page_token = rest.next().map(|_| last).unwrap_or_default();
        Ok(Response::new(ListSnapshotsResponse { snapshots: page, next_page_token }))
    }

    async fn list_pools(&self, _: Request<ListPoolsRequest>) -> Result<Response<ListPoolsResponse>, Status> {
        let pool = Pool {
            name: "pool".into(),
            kind: "directory".into(),
            total_bytes: POOL_BYTES,
            free_bytes: POOL_BYTES,
            provisioned_bytes: provisioned(&self.0.volumes.lock().unwrap()),
            quota: "project".into(),
            ..Default::default()
        };
        Ok(Response::new(ListPoolsResponse { pools: vec![pool] }))
    }

    async fn list_sessions(
        &self,
        _: Request<ListSessionsRequest>,
    ) -> Result<Response<ListSessionsResponse>, Status> {
        Err(Status::unimplemented("the driver does not call it"))
    }

    async fn list_open_files(
        &self,
        _: Request<ListOpenFilesRequest>,
    ) -> Result<Response<ListOpenFilesResponse>, Status> {
        Err(Status::unimplemented("the driver does not call it"))
    }

    async fn close_session(
        &self,
        _: Request<CloseSessionRequest>,
    ) -> Result<Response<CloseSessionResponse>, Status> {
        Err(Status::unimplemented("the driver does not call it"))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        Err(Status::unimplemented("the driver does not call it"))
    }
}
