//! The controller's guarantees about volumes, regardless of the server behind it.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::collections::HashMap;

use forebay_proto::csi::controller_client::ControllerClient;
use forebay_proto::csi::group_controller_client::GroupControllerClient;
use forebay_proto::csi::volume_capability::access_mode::Mode;
use forebay_proto::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use forebay_proto::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use forebay_proto::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerGetVolumeRequest, ControllerModifyVolumeRequest,
    CreateSnapshotRequest, CreateVolumeGroupSnapshotRequest, CreateVolumeRequest, DeleteSnapshotRequest,
    DeleteVolumeGroupSnapshotRequest, DeleteVolumeRequest, GetCapacityRequest, GetCapacityResponse,
    GetSnapshotRequest, GetVolumeGroupSnapshotRequest, ListSnapshotsRequest, ListVolumesRequest, Snapshot,
    ValidateVolumeCapabilitiesRequest, Volume, VolumeCapability, VolumeContentSource, VolumeGroupSnapshot,
    list_snapshots_response,
};
use tonic::transport::Channel;
use tonic::{Code, Status};

pub const MIB: i64 = 1 << 20;
pub const PASSWORD: &str = "correct-horse-battery";

pub fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

pub fn capability() -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume::default())),
        access_mode: Some(AccessMode { mode: Mode::MultiNodeMultiWriter.into() }),
    }
}

fn block() -> VolumeCapability {
    VolumeCapability { access_type: Some(AccessType::Block(BlockVolume {})), ..capability() }
}

pub fn range(required_bytes: i64, limit_bytes: i64) -> Option<CapacityRange> {
    Some(CapacityRange { required_bytes, limit_bytes })
}

pub fn create(name: &str, required_bytes: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.into(),
        capacity_range: range(required_bytes, 0),
        volume_capabilities: vec![capability()],
        secrets: map(&[("password", PASSWORD)]),
        ..Default::default()
    }
}

pub fn code<T>(result: Result<tonic::Response<T>, Status>) -> Code {
    result.map_or_else(|status| status.code(), |_| Code::Ok)
}

/// A controller with a server that has one pool, `pool`, and no volumes.
#[derive(Clone)]
pub struct World {
    pub controller: ControllerClient<Channel>,
    pub groups: GroupControllerClient<Channel>,
    /// Whether the pool has quotas; without quotas, capacities are only recorded.
    pub has_quota: bool,
    /// Whether the pool's files can share extents.
    pub has_snapshots: bool,
    /// The address that the server advertises.
    pub address: String,
}

impl World {
    pub async fn create(&mut self, request: CreateVolumeRequest) -> Result<Volume, Status> {
        let response = self.controller.create_volume(request).await?.into_inner();
        Ok(response.volume.expect("CSI: this field is REQUIRED"))
    }

    async fn delete(&mut self, volume_id: &str) -> Code {
        let request = DeleteVolumeRequest { volume_id: volume_id.into(), ..Default::default() };
        code(self.controller.delete_volume(request).await)
    }

    async fn expand(&mut self, volume_id: &str, capacity_range: Option<CapacityRange>) -> Result<i64, Code> {
        let request = ControllerExpandVolumeRequest {
            volume_id: volume_id.into(),
            capacity_range,
            ..Default::default()
        };
        let response = self.controller.controller_expand_volume(request).await.map_err(|s| s.code())?;
        assert!(!response.get_ref().node_expansion_required);
        Ok(response.get_ref().capacity_bytes)
    }

    async fn list(&mut self, max_entries: i32, token: &str) -> Result<(Vec<String>, String), Status> {
        let request = ListVolumesRequest { max_entries, starting_token: token.into() };
        let response = self.controller.list_volumes(request).await?.into_inner();
        let ids = response.entries.into_iter().map(|e| e.volume.expect("REQUIRED").volume_id).collect();
        Ok((ids, response.next_token))
    }

    async fn capacity(&mut self, parameters: &[(&str, &str)]) -> Result<GetCapacityResponse, Code> {
        let request = GetCapacityRequest { parameters: map(parameters), ..Default::default() };
        self.controller.get_capacity(request).await.map(|r| r.into_inner()).map_err(|s| s.code())
    }

    /// Checks every guarantee in turn; leaves no volume.
    pub async fn check_guarantees(mut self) {
        self.create_is_idempotent().await;
        self.create_refuses_other_parameters_for_a_name().await;
        self.root_has_the_mode_of_the_class().await;
        self.unusual_names_become_hashed_ids().await;
        self.validation_and_get().await;
        self.expansion().await;
        self.modification().await;
        self.capacity_is_reported().await;
        self.list_is_paginated().await;
        match self.has_snapshots {
            true => {
                self.snapshots_and_clones().await;
                self.group_snapshots().await;
            }
            false => {
                let refused = self.snapshot("snap-1", "pvc-1").await.unwrap_err();
                assert_eq!(refused.code(), Code::FailedPrecondition);
                assert!(refused.message().contains("reflink=1"), "{refused}");
            }
        }
        self.deletion_is_idempotent().await;
    }

    async fn create_is_idempotent(&mut self) {
        let mut request = create("pvc-1", 64 * MIB);
        request.parameters =
            map(&[("pool", "pool"), ("protection", "seal"), ("csi.storage.k8s.io/pvc/name", "data")]);
        request.parameters.insert("transport".into(), "tcp".into());
        let first = self.create(request.clone()).await.unwrap();
        assert_eq!((first.volume_id.as_str(), first.capacity_bytes), ("pvc-1", 64 * MIB));
        let context = map(&[
            ("server", &*self.address),
            ("share", "pvc-1"),
            ("dialect", "3.1.1"),
            ("protection", "seal"),
            ("transport", "tcp"),
        ]);
        assert_eq!(first.volume_context, context);
        assert_eq!(self.create(request.clone()).await.unwrap(), first, "a second time");
        request.capacity_range = range(32 * MIB, 64 * MIB);
        assert_eq!(self.create(request).await.unwrap(), first, "a range that it satisfies");

        // A Secret can name the user; otherwise the volume's id is the user.
        let mut request = create("pvc-5", MIB);
        request.secrets = map(&[("username", "another"), ("password", PASSWORD)]);
        let named = self.create(request.clone()).await.unwrap();
        assert_eq!(self.create(request).await.unwrap(), named, "a second time");
        assert_eq!(self.delete("pvc-5").await, Code::Ok);

        // Rounded up to MiB, and to the default if no size is requested.
        let odd = self.create(create("pvc-2", 10 * MIB + 1)).await.unwrap();
        assert_eq!(odd.capacity_bytes, 11 * MIB);
        let mut request = create("pvc-3", 0);
        request.capacity_range = range(0, 20 * MIB);
        request.parameters = map(&[("server", "10.9.8.7,files.example:1445")]);
        let limited = self.create(request.clone()).await.unwrap();
        assert_eq!(limited.capacity_bytes, 20 * MIB);
        assert_eq!(limited.volume_context["server"], "10.9.8.7:445,files.example:1445");
        assert_eq!(self.create(request).await.unwrap(), limited, "a second time");
    }

    async fn create_refuses_other_parameters_for_a_name(&mut self) {
        type Change = fn(&mut CreateVolumeRequest);
        let changes: [(&str, Change); 9] = [
            ("capacity", |r| r.capacity_range = range(65 * MIB, 0)),
            ("capacity", |r| r.capacity_range = range(MIB, 63 * MIB)),
            ("pool", |r| r.parameters = map(&[("pool", "another")])),
            ("protection", |r| r.parameters = map(&[("protection", "optional")])),
            ("transport", |r| r.parameters = map(&[("transport", "auto")])),
            ("server", |r| r.parameters = map(&[("server", "10.9.8.7")])),
            ("rootMode", |r| r.parameters = map(&[("rootMode", "0750")])),
            ("username", |r| r.secrets = map(&[("username", "u2"), ("password", PASSWORD)])),
            ("password", |r| r.secrets = map(&[("password", "wrong-horse")])),
        ];
        for (what, change) in changes {
            let mut request = create("pvc-1", 64 * MIB);
            change(&mut request);
            let status = self.create(request).await.expect_err(what);
            assert_eq!(status.code(), Code::AlreadyExists, "{what}: {status}");
            assert!(status.message().contains(what), "{what}: {status}");
        }
        let mut request = create("pvc-9", 64 * MIB);
        request.parameters = map(&[("pool", "another")]);
        let status = self.create(request).await.expect_err("no such pool");
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        if self.has_quota {
            let status = self.create(create("pvc-9", 1 << 60)).await.expect_err("an exbibyte");
            assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        }
    }

    async fn root_has_the_mode_of_the_class(&mut self) {
        let with = |mode| {
            let mut request = create("pvc-root", 64 * MIB);
            request.parameters = map(&[("rootMode", mode)]);
            request
        };
        let volume = self.create(with("1750")).await.unwrap();
        assert_eq!(self.create(with("01750")).await.unwrap(), volume, "a second time");
        assert_eq!(self.create(with("0750")).await.unwrap_err().code(), Code::AlreadyExists);
        assert_eq!(self.create(with("rwx")).await.unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(self.delete(&volume.volume_id).await, Code::Ok);
    }

    async fn unusual_names_become_hashed_ids(&mut self) {
        for name in ["n".repeat(128), "Snapshot of Größe #1".to_owned(), "../escape".to_owned()] {
            let volume = self.create(create(&name, MIB)).await.unwrap();
            assert!(volume.volume_id.starts_with("fb-") && volume.volume_id.len() <= 63, "{volume:?}");
            assert_eq!(self.create(create(&name, MIB)).await.unwrap(), volume, "a second time");
            assert_eq!(self.delete(&volume.volume_id).await, Code::Ok);
        }
    }

    async fn validation_and_get(&mut self) {
        let volume = self.get("pvc-1").await.unwrap();
        assert_eq!((volume.capacity_bytes, &*volume.volume_context["protection"]), (64 * MIB, "seal"));
        assert_eq!(self.get("pvc-9").await, Err(Code::NotFound));

        let request = |volume_id: &str, capability| ValidateVolumeCapabilitiesRequest {
            volume_id: volume_id.into(),
            volume_capabilities: vec![capability],
            volume_context: volume.volume_context.clone(),
            parameters: map(&[("pool", "pool")]),
            ..Default::default()
        };
        let good = request("pvc-1", capability());
        let response = self.controller.validate_volume_capabilities(good.clone()).await.unwrap().into_inner();
        let confirmed = response.confirmed.expect("the capabilities match");
        assert_eq!(confirmed.volume_capabilities, good.volume_capabilities);
        let mut elsewhere = good.clone();
        elsewhere.parameters = map(&[("pool", "another")]);
        let mut other = good;
        other.volume_context.insert("share".into(), "pvc-2".into());
        for bad in [request("pvc-1", block()), elsewhere, other] {
            let response = self.controller.validate_volume_capabilities(bad).await.unwrap().into_inner();
            assert!(response.confirmed.is_none() && !response.message.is_empty());
        }
        let unknown = self.controller.validate_volume_capabilities(request("pvc-9", capability())).await;
        assert_eq!(code(unknown), Code::NotFound);
    }

    async fn get(&mut self, volume_id: &str) -> Result<Volume, Code> {
        let request = ControllerGetVolumeRequest { volume_id: volume_id.into() };
        let response =
            self.controller.controller_get_volume(request).await.map_err(|s| s.code())?.into_inner();
        assert!(response.status.is_some(), "CSI: this field is REQUIRED");
        Ok(response.volume.expect("CSI: this field is REQUIRED"))
    }

    async fn expansion(&mut self) {
        assert_eq!(self.expand("pvc-1", range(100 * MIB, 0)).await, Ok(100 * MIB));
        assert_eq!(self.expand("pvc-1", range(100 * MIB, 0)).await, Ok(100 * MIB), "a second time");
        assert_eq!(self.expand("pvc-9", range(100 * MIB, 0)).await, Err(Code::NotFound));
        assert_eq!(self.expand("pvc-1", None).await, Err(Code::InvalidArgument));
        assert_eq!(self.expand("pvc-1", range(10 * MIB, 0)).await, Ok(100 * MIB), "never smaller");
        assert_eq!(self.expand("pvc-1", range(10 * MIB, 50 * MIB)).await, Err(Code::OutOfRange));
        if self.has_quota {
            assert_eq!(self.expand("pvc-1", range(1 << 60, 0)).await, Err(Code::ResourceExhausted));
        }
        assert_eq!(self.get("pvc-1").await.map(|v| v.capacity_bytes), Ok(100 * MIB), "it is kept");
        // The request that created it arrives again, late.
        self.create(create("pvc-1", 64 * MIB)).await.unwrap();
    }

    async fn modify(&mut self, volume_id: &str, attributes: &[(&str, &str)]) -> Code {
        let request = ControllerModifyVolumeRequest {
            volume_id: volume_id.into(),
            mutable_parameters: map(attributes),
            ..Default::default()
        };
        code(self.controller.controller_modify_volume(request).await)
    }

    async fn modification(&mut self) {
        let limit = [("bytesPerSecond", "500Mi"), ("priority", "low")];
        for _ in 0..2 {
            assert_eq!(self.modify("pvc-1", &limit).await, Code::Ok);
        }
        assert_eq!(self.modify("pvc-9", &limit).await, Code::NotFound);
        assert_eq!(self.modify("", &limit).await, Code::InvalidArgument);
        assert_eq!(self.modify("pvc-1", &[]).await, Code::Ok, "no key, no change");
        assert_eq!(self.modify("pvc-1", &[("operationsPerSecond", "1")]).await, Code::InvalidArgument);
        assert_eq!(self.modify("pvc-1", &[("operationsPerSecond", "20k")]).await, Code::Ok);
        let mut limited = create("pvc-limited", MIB);
        limited.mutable_parameters = map(&limit);
        for _ in 0..2 {
            self.create(limited.clone()).await.unwrap();
        }
        limited.name = "pvc-other".into();
        limited.mutable_parameters = map(&[("bytesPerSecond", "1")]);
        assert_eq!(self.create(limited).await.unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(self.delete("pvc-limited").await, Code::Ok);
    }

    async fn capacity_is_reported(&mut self) {
        let before = self.capacity(&[]).await.unwrap();
        assert!(before.available_capacity > 0);
        assert_eq!(before.maximum_volume_size, Some(before.available_capacity), "there is one pool");
        assert_eq!(before.minimum_volume_size, Some(MIB));
        assert_eq!(self.capacity(&[("pool", "another")]).await, Err(Code::InvalidArgument));
        assert!(self.capacity(&[("pool", "pool")]).await.is_ok());
        let mut request = GetCapacityRequest { volume_capabilities: vec![block()], ..Default::default() };
        let none = self.controller.get_capacity(request.clone()).await.unwrap().into_inner();
        assert_eq!(none.available_capacity, 0, "block volumes are not supported");
        request.volume_capabilities = vec![capability()];
        assert!(self.controller.get_capacity(request).await.unwrap().into_inner().available_capacity > 0);
        if self.has_quota {
            self.create(create("pvc-4", 10 * MIB)).await.unwrap();
            let after = self.capacity(&[]).await.unwrap();
            assert!(after.available_capacity <= before.available_capacity - 10 * MIB, "{after:?} {before:?}");
            assert_eq!(self.delete("pvc-4").await, Code::Ok);
        }
    }

    async fn list_is_paginated(&mut self) {
        let (all, token) = self.list(0, "").await.unwrap();
        assert_eq!((all.as_slice(), &*token), (&["pvc-1", "pvc-2", "pvc-3"].map(String::from)[..], ""));
        let (first, token) = self.list(2, "").await.unwrap();
        assert_eq!(first, all[..2]);
        let (rest, end) = self.list(2, &token).await.unwrap();
        assert_eq!((rest.as_slice(), &*end), (&all[2..], ""));
        for token in ["no such token", "pvc-1", "after:No Such"] {
            let status = self.list(0, token).await.expect_err("unknown");
            assert_eq!(status.code(), Code::Aborted, "{token}: {status}");
        }
    }

    async fn snapshot(&mut self, name: &str, volume_id: &str) -> Result<Snapshot, Status> {
        let request = CreateSnapshotRequest {
            name: name.into(),
            source_volume_id: volume_id.into(),
            parameters: map(&[("csi.storage.k8s.io/volumesnapshot/name", "nightly")]),
            ..Default::default()
        };
        let response = self.controller.create_snapshot(request).await?.into_inner();
        Ok(response.snapshot.expect("REQUIRED"))
    }

    async fn delete_snapshot(&mut self, snapshot_id: &str) -> Code {
        let request = DeleteSnapshotRequest { snapshot_id: snapshot_id.into(), ..Default::default() };
        code(self.controller.delete_snapshot(request).await)
    }

    async fn snapshots(&mut self, request: ListSnapshotsRequest) -> Result<(Vec<String>, String), Status> {
        let response = self.controller.list_snapshots(request).await?.into_inner();
        let id = |e: list_snapshots_response::Entry| e.snapshot.expect("REQUIRED").snapshot_id;
        Ok((response.entries.into_iter().map(id).collect(), response.next_token))
    }

    /// Runs beside the volumes pvc-1, pvc-2 and pvc-3; leaves nothing.
    async fn snapshots_and_clones(&mut self) {
        let of = |name: &str, bytes: i64, source| CreateVolumeRequest {
            volume_content_source: Some(VolumeContentSource { r#type: Some(source) }),
            ..create(name, bytes)
        };
        let of_snapshot = |name: &str, bytes: i64, id: &str| {
            of(name, bytes, Type::Snapshot(SnapshotSource { snapshot_id: id.into() }))
        };
        let of_volume = |name: &str, bytes: i64, id: &str| {
            of(name, bytes, Type::Volume(VolumeSource { volume_id: id.into() }))
        };
        let size = self.get("pvc-1").await.unwrap().capacity_bytes;

        let first = self.snapshot("snap-1", "pvc-1").await.unwrap();
        assert_eq!((&*first.source_volume_id, first.size_bytes, first.ready_to_use), ("pvc-1", size, true));
        assert!(first.creation_time.is_some_and(|time| time.seconds > 0));
        assert_eq!(self.snapshot("snap-1", "pvc-1").await.unwrap(), first, "a second time");
        for (name, volume_id, code) in [
            ("snap-1", "pvc-2", Code::AlreadyExists),
            ("snap-2", "pvc-9", Code::NotFound),
            ("snap-2", "a/b", Code::NotFound),
            ("snap-2", "", Code::InvalidArgument),
            ("", "pvc-1", Code::InvalidArgument),
        ] {
            let status = self.snapshot(name, volume_id).await.expect_err(name);
            assert_eq!(status.code(), code, "{name} of {volume_id}: {status}");
        }
        let unknown = CreateSnapshotRequest {
            name: "snap-2".into(),
            source_volume_id: "pvc-1".into(),
            parameters: map(&[("depth", "1")]),
            ..Default::default()
        };
        assert_eq!(code(self.controller.create_snapshot(unknown).await), Code::InvalidArgument);

        let get = GetSnapshotRequest { snapshot_id: "snap-1".into(), ..Default::default() };
        let found = self.controller.get_snapshot(get.clone()).await.unwrap().into_inner().snapshot;
        assert_eq!(found, Some(first));
        let none = GetSnapshotRequest { snapshot_id: "snap-9".into(), ..get };
        assert_eq!(code(self.controller.get_snapshot(none).await), Code::NotFound);

        for name in ["A snapshot with a long name", "snap-3"] {
            self.snapshot(name, "pvc-2").await.unwrap();
        }
        let (all, end) = self.snapshots(ListSnapshotsRequest::default()).await.unwrap();
        assert!(all.len() == 3 && all[0].starts_with("fb-") && all[1..] == ["snap-1", "snap-3"], "{all:?}");
        assert_eq!(end, "");
        let paged = |token: &str| ListSnapshotsRequest {
            max_entries: 2,
            starting_token: token.into(),
            ..Default::default()
        };
        let (page, token) = self.snapshots(paged("")).await.unwrap();
        assert_eq!(page, all[..2]);
        assert_eq!(self.snapshots(paged(&token)).await.unwrap(), (all[2..].to_vec(), String::new()));
        assert_eq!(self.snapshots(paged("snap-1")).await.unwrap_err().code(), Code::Aborted);
        for (snapshot_id, source_volume_id, expected) in [
            ("snap-1", "", &["snap-1"][..]),
            ("", "pvc-1", &["snap-1"]),
            ("snap-1", "pvc-2", &[]),
            ("snap-9", "", &[]),
            ("no/such", "", &[]),
            ("", "pvc-9", &[]),
        ] {
            let request = ListSnapshotsRequest {
                snapshot_id: snapshot_id.into(),
                source_volume_id: source_volume_id.into(),
                ..Default::default()
            };
            assert_eq!(
                self.snapshots(request).await.unwrap().0,
                expected,
                "{snapshot_id} {source_volume_id}"
            );
        }

        let restored = self.create(of_snapshot("pvc-4", size, "snap-1")).await.unwrap();
        let source = Type::Snapshot(SnapshotSource { snapshot_id: "snap-1".into() });
        assert_eq!(restored.content_source, Some(VolumeContentSource { r#type: Some(source) }));
        assert_eq!(self.create(of_snapshot("pvc-4", size, "snap-1")).await.unwrap(), restored);
        let unasked = CreateVolumeRequest { capacity_range: None, ..of_volume("pvc-5", 0, "pvc-1") };
        let clone = self.create(unasked).await.unwrap();
        assert_eq!(clone.capacity_bytes, size, "as large as its source where no size is asked for");
        let larger = self.create(of_volume("pvc-6", size + MIB, "pvc-4")).await.unwrap();
        assert_eq!(larger.capacity_bytes, size + MIB);
        let limited = CreateVolumeRequest { capacity_range: range(0, MIB), ..of_volume("pvc-7", 0, "pvc-1") };
        let elsewhere = CreateVolumeRequest {
            parameters: map(&[("pool", "other")]),
            ..of_volume("pvc-7", size, "pvc-1")
        };
        for (what, request, code) in [
            ("another snapshot", of_snapshot("pvc-4", size, "snap-3"), Code::AlreadyExists),
            ("no source", create("pvc-4", size), Code::AlreadyExists),
            ("a volume without a source", of_volume("pvc-2", size, "pvc-1"), Code::AlreadyExists),
            ("too small", of_snapshot("pvc-7", size - MIB, "snap-1"), Code::OutOfRange),
            ("limited", limited, Code::OutOfRange),
            ("another pool", elsewhere, Code::InvalidArgument),
            ("no such snapshot", of_snapshot("pvc-7", size, "snap-9"), Code::NotFound),
            ("no such volume", of_volume("pvc-7", size, "pvc-9"), Code::NotFound),
        ] {
            let status = self.create(request).await.expect_err(what);
            assert_eq!(status.code(), code, "{what}: {status}");
        }
        for snapshot_id in all.iter().map(String::as_str).chain(["snap-1", "never-there", "no/such"]) {
            assert_eq!(self.delete_snapshot(snapshot_id).await, Code::Ok, "{snapshot_id}");
        }
        assert_eq!(self.delete_snapshot("").await, Code::InvalidArgument);
        for volume_id in ["pvc-4", "pvc-5", "pvc-6"] {
            assert_eq!(self.delete(volume_id).await, Code::Ok, "{volume_id}");
        }
    }

    async fn group(&mut self, name: &str, volume_ids: &[&str]) -> Result<VolumeGroupSnapshot, Status> {
        let request = CreateVolumeGroupSnapshotRequest {
            name: name.into(),
            source_volume_ids: volume_ids.iter().map(|&id| id.to_owned()).collect(),
            parameters: map(&[("csi.storage.k8s.io/volumegroupsnapshot/name", "nightly")]),
            ..Default::default()
        };
        let response = self.groups.create_volume_group_snapshot(request).await?.into_inner();
        Ok(response.group_snapshot.expect("REQUIRED"))
    }

    async fn delete_group(&mut self, group_snapshot_id: &str, snapshot_ids: &[String]) -> Code {
        let request = DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: group_snapshot_id.into(),
            snapshot_ids: snapshot_ids.to_vec(),
            ..Default::default()
        };
        code(self.groups.delete_volume_group_snapshot(request).await)
    }

    async fn get_group(&mut self, id: &str, snapshot_ids: &[String]) -> Result<VolumeGroupSnapshot, Code> {
        let request = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: id.into(),
            snapshot_ids: snapshot_ids.to_vec(),
            ..Default::default()
        };
        let response = self.groups.get_volume_group_snapshot(request).await.map_err(|s| s.code())?;
        Ok(response.into_inner().group_snapshot.expect("REQUIRED"))
    }

    /// Runs beside the volumes pvc-1, pvc-2 and pvc-3; leaves nothing.
    async fn group_snapshots(&mut self) {
        let group = self.group("group-1", &["pvc-1", "pvc-2"]).await.unwrap();
        assert!(group.ready_to_use && group.creation_time.is_some_and(|time| time.seconds > 0), "{group:?}");
        let sources: Vec<&str> = group.snapshots.iter().map(|s| &*s.source_volume_id).collect();
        assert_eq!((&*group.group_snapshot_id, sources), ("group-1", vec!["pvc-1", "pvc-2"]));
        assert!(group.snapshots.iter().all(|s| s.ready_to_use && s.group_snapshot_id == "group-1"));
        assert_eq!(self.group("group-1", &["pvc-1", "pvc-2"]).await.unwrap(), group, "a second time");
        for (name, volume_ids, code) in [
            ("group-1", &["pvc-1", "pvc-3"][..], Code::AlreadyExists),
            ("group-1", &["pvc-1"], Code::AlreadyExists),
            ("group-2", &["pvc-1", "pvc-9"], Code::NotFound),
            ("group-2", &["pvc-1", "a/b"], Code::NotFound),
            ("group-2", &[], Code::InvalidArgument),
            ("", &["pvc-1"], Code::InvalidArgument),
        ] {
            let status = self.group(name, volume_ids).await.expect_err(name);
            assert_eq!(status.code(), code, "{name} of {volume_ids:?}: {status}");
        }

        let mut ids: Vec<String> = group.snapshots.iter().map(|s| s.snapshot_id.clone()).collect();
        let found = self.get_group("group-1", &ids).await.unwrap();
        assert_eq!((found.snapshots.len(), found.creation_time), (2, group.creation_time));
        assert_eq!(self.get_group("group-1", &ids[..1]).await, Err(Code::InvalidArgument));
        assert_eq!(self.get_group("group-9", &ids).await, Err(Code::NotFound));
        assert_eq!(self.get_group("no/such", &ids).await, Err(Code::NotFound));
        assert_eq!(self.get_group("", &ids).await, Err(Code::InvalidArgument));

        // Each is an ordinary snapshot, but is deleted with its group.
        let (mut all, _) = self.snapshots(ListSnapshotsRequest::default()).await.unwrap();
        all.sort();
        ids.sort();
        assert_eq!(all, ids);
        assert_eq!(self.delete_snapshot(&ids[0]).await, Code::InvalidArgument);
        let source = Type::Snapshot(SnapshotSource { snapshot_id: ids[0].clone() });
        let size = self
            .get("pvc-1")
            .await
            .unwrap()
            .capacity_bytes
            .max(self.get("pvc-2").await.unwrap().capacity_bytes);
        let restored = CreateVolumeRequest {
            volume_content_source: Some(VolumeContentSource { r#type: Some(source) }),
            ..create("pvc-4", size)
        };
        self.create(restored).await.unwrap();
        assert_eq!(self.delete("pvc-4").await, Code::Ok);

        assert_eq!(self.delete_group("group-1", &ids[1..]).await, Code::InvalidArgument);
        assert_eq!(self.delete_group("", &ids).await, Code::InvalidArgument);
        for group in ["group-1", "group-1", "never-there", "no/such"] {
            assert_eq!(self.delete_group(group, &ids).await, Code::Ok, "{group}");
        }
        assert_eq!(self.snapshots(ListSnapshotsRequest::default()).await.unwrap().0, Vec::<String>::new());
    }

    async fn deletion_is_idempotent(&mut self) {
        for volume_id in ["pvc-1", "pvc-2", "pvc-3", "pvc-1", "never-there"] {
            assert_eq!(self.delete(volume_id).await, Code::Ok, "{volume_id}");
        }
        assert_eq!(self.list(0, "").await.unwrap().0, Vec::<String>::new());
        // The name is free again for any volume.
        let volume = self.create(create("pvc-1", 5 * MIB)).await.unwrap();
        assert_eq!(volume.capacity_bytes, 5 * MIB);
        assert_eq!(self.delete("pvc-1").await, Code::Ok);
    }
}
