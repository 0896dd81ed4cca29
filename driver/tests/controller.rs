//! The controller's process with an admin API that the test controls.
#![allow(clippy::unwrap_used)]

mod peer;
mod process;
mod volumes;

use forebay_proto::csi::controller_client::ControllerClient;
use forebay_proto::csi::group_controller_client::GroupControllerClient;
use forebay_proto::csi::identity_client::IdentityClient;
use forebay_proto::csi::{
    ControllerGetVolumeHealthRequest, DeleteVolumeRequest, ProbeRequest, VolumeHealthErrorType,
};
use peer::Peer;
use process::{Process, connect, eventually, start_driver};
use tempfile::TempDir;
use tonic::Code;
use volumes::{MIB, World, code, create};

async fn start() -> (TempDir, Peer, Process, World) {
    let dir = tempfile::tempdir().unwrap();
    let peer = Peer::serve(&dir.path().join("admin.sock"));
    let mut driver = start_driver(dir.path(), "controller", &[]);
    let channel = connect(&mut driver, &dir.path().join("csi.sock")).await;
    let world = World {
        controller: ControllerClient::new(channel.clone()),
        groups: GroupControllerClient::new(channel),
        has_quota: true,
        has_snapshots: true,
        address: "10.1.1.1:445".into(),
    };
    (dir, peer, driver, world)
}

#[tokio::test]
async fn controller_meets_its_csi_guarantees() {
    let (_dir, peer, driver, world) = start().await;
    world.check_guarantees().await;
    assert_eq!(peer.volumes(), 0);
    assert!(!driver.log().contains(volumes::PASSWORD));
}

#[tokio::test]
async fn a_second_call_for_a_volume_is_aborted_while_the_first_waits() {
    let (_dir, peer, mut driver, mut world) = start().await;
    peer.set_silent(true);
    let mut first = world.controller.clone();
    let first = tokio::spawn(async move { first.create_volume(create("pvc-1", MIB)).await });
    eventually(&mut driver, || async { if peer.waiting() == 1 { Ok(()) } else { Err("not yet") } }).await;
    let status = world.create(create("pvc-1", MIB)).await.expect_err("in progress");
    assert_eq!(status.code(), Code::Aborted, "{status}");
    let delete = DeleteVolumeRequest { volume_id: "pvc-1".into(), ..Default::default() };
    assert_eq!(code(world.controller.delete_volume(delete).await), Code::Aborted);
    peer.set_silent(false);
    assert_eq!(code(first.await.unwrap()), Code::Ok);
    world.create(create("pvc-1", MIB)).await.unwrap();
}

#[tokio::test]
async fn driver_finishes_running_calls_before_it_exits() {
    let (dir, peer, mut driver, world) = start().await;
    peer.set_silent(true);
    let mut first = world.controller.clone();
    let first = tokio::spawn(async move { first.create_volume(create("pvc-1", MIB)).await });
    eventually(&mut driver, || async { if peer.waiting() == 1 { Ok(()) } else { Err("not yet") } }).await;
    let ending = tokio::spawn(async move {
        let status = driver.terminate().await;
        (status, driver.log())
    });
    let log = dir.path().join("csi-controller.log");
    while !std::fs::read_to_string(&log).unwrap().contains("SIGTERM") {
        assert!(!ending.is_finished(), "it did not wait for the call");
        tokio::task::yield_now().await;
    }
    peer.set_silent(false);
    assert_eq!(code(first.await.unwrap()), Code::Ok);
    let (status, log) = ending.await.unwrap();
    assert!(status.success(), "{log}");
}

#[tokio::test]
async fn volume_health_is_inaccessible_while_the_server_is_down() {
    let (_dir, peer, _driver, mut world) = start().await;
    world.create(create("pvc-1", MIB)).await.unwrap();
    let mut health = async |volume_id: &str| {
        let request = ControllerGetVolumeHealthRequest { volume_id: volume_id.into(), ..Default::default() };
        world.controller.controller_get_volume_health(request).await.map(|found| {
            let health = found.into_inner().volume_health.unwrap();
            assert_eq!(health.volume_id, volume_id);
            health.health_statuses
        })
    };
    assert_eq!(health("").await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(health("pvc-2").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(health("pvc-1").await.unwrap(), []);
    peer.end();
    let found = health("pvc-1").await.unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(
        (found[0].status(), found[0].reason.as_str()),
        (VolumeHealthErrorType::Inaccessible, "ServerNotReady")
    );
}

#[tokio::test]
async fn a_volume_in_use_is_not_deleted() {
    let (_dir, peer, _driver, mut world) = start().await;
    world.create(create("pvc-1", MIB)).await.unwrap();
    peer.set_in_use("pvc-1");
    let delete = DeleteVolumeRequest { volume_id: "pvc-1".into(), ..Default::default() };
    assert_eq!(code(world.controller.delete_volume(delete).await), Code::FailedPrecondition);
    assert_eq!(peer.volumes(), 1);
}

#[tokio::test]
async fn volume_without_a_reachable_address_is_not_created() {
    let (_dir, peer, _driver, mut world) = start().await;
    peer.set_addresses(&["0.0.0.0:445", "[::]:445"]);
    let status = world.create(create("pvc-1", MIB)).await.expect_err("no address");
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("advertised addresses"), "{status}");
    assert_eq!(peer.volumes(), 0);
    let mut request = create("pvc-1", MIB);
    request.parameters = volumes::map(&[("server", "10.9.9.9")]);
    let volume = world.create(request).await.unwrap();
    assert_eq!(volume.volume_context["server"], "10.9.9.9:445");
}

#[tokio::test]
async fn probe_reports_ready_once_the_server_is_reachable() {
    let dir = tempfile::tempdir().unwrap();
    let mut driver = start_driver(dir.path(), "controller", &[]);
    let channel = connect(&mut driver, &dir.path().join("csi.sock")).await;
    let mut identity = IdentityClient::new(channel);
    let probe = identity.probe(ProbeRequest {}).await.unwrap().into_inner();
    assert_eq!(probe.ready, Some(false));
    let _peer = Peer::serve(&dir.path().join("admin.sock"));
    eventually(&mut driver, || {
        let mut identity = identity.clone();
        async move {
            match identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready {
                Some(true) => Ok(()),
                other => Err(other),
            }
        }
    })
    .await;
}
