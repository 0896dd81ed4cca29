//! The controller's process with the real server's process.
#![allow(clippy::unwrap_used)]

mod process;
mod volumes;

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use forebay_proto::admin::admin_client::AdminClient;
use forebay_proto::admin::{Priority, StatVolumeRequest};
use forebay_proto::csi::controller_client::ControllerClient;
use forebay_proto::csi::group_controller_client::GroupControllerClient;
use forebay_proto::csi::{ControllerModifyVolumeRequest, DeleteVolumeRequest};
use forebay_testing::Xfs;
use process::{Process, connect, eventually, server_binary, start_driver};
use tonic::transport::Endpoint;
use volumes::World;

/// Starts a server with the pool `pool_path` and its admin API at `admin.sock` in `dir`.
async fn start_server(dir: &Path, pool_path: &Path, quota: &str) -> (Process, u16) {
    // Was free a moment ago; the server reports it if another process has taken the port since.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = dir.join("server.toml");
    let admin = dir.join("admin.sock");
    fs::write(
        &config,
        format!(
            "[server]\nlisten = [\"127.0.0.1:{port}\"]\n[admin]\nsocket = \"{}\"\n[http]\nlisten = \"\"\n\
             [[pool]]\nname = \"pool\"\npath = \"{}\"\nquota = \"{quota}\"\n",
            admin.display(),
            pool_path.display()
        ),
    )
    .unwrap();
    let mut command = Command::new(server_binary());
    command.arg("run").arg("--config").arg(&config);
    let mut server = Process::start(&mut command, dir.join("server.log"));
    let endpoint = Endpoint::from_shared(format!("unix://{}", admin.display())).unwrap();
    eventually(&mut server, || endpoint.connect()).await;
    (server, port)
}

/// The limits in a VolumeAttributesClass become the server's limits.
async fn limits_reach_the_server(world: &World, admin: &Path) {
    let mut world = world.clone();
    let endpoint = Endpoint::from_shared(format!("unix://{}", admin.display())).unwrap();
    let mut admin = AdminClient::new(endpoint.connect().await.unwrap());
    let mut made = volumes::create("pvc-limits", volumes::MIB);
    made.mutable_parameters = volumes::map(&[("bytesPerSecond", "500Mi"), ("priority", "low")]);
    let volume = world.create(made).await.unwrap();
    let request = ControllerModifyVolumeRequest {
        volume_id: volume.volume_id.clone(),
        mutable_parameters: volumes::map(&[("operationsPerSecond", "20k")]),
        ..Default::default()
    };
    let stat = StatVolumeRequest { volume_id: volume.volume_id.clone() };
    let mut found = Vec::new();
    for modify in [false, true] {
        if modify {
            world.controller.controller_modify_volume(request.clone()).await.unwrap();
        }
        let qos = admin.stat_volume(stat.clone()).await.unwrap().into_inner().volume.unwrap().qos.unwrap();
        found.push((qos.bytes_per_second, qos.operations_per_second, qos.priority()));
    }
    assert_eq!(found, [(500 << 20, 0, Priority::Low), (500 << 20, 20_000, Priority::Low)]);
    let request = DeleteVolumeRequest { volume_id: volume.volume_id, ..Default::default() };
    world.controller.delete_volume(request).await.unwrap();
}

async fn check_guarantees(pool_path: &Path, quota: &str, on_xfs: bool) {
    let dir = tempfile::tempdir().unwrap();
    let (mut server, port) = start_server(dir.path(), pool_path, quota).await;
    let mut driver = start_driver(dir.path(), "controller", &[]);
    let channel = connect(&mut driver, &dir.path().join("csi.sock")).await;
    let world = World {
        controller: ControllerClient::new(channel.clone()),
        groups: GroupControllerClient::new(channel),
        has_quota: quota == "project",
        has_snapshots: on_xfs,
        address: format!("127.0.0.1:{port}"),
    };
    limits_reach_the_server(&world, &dir.path().join("admin.sock")).await;
    world.check_guarantees().await;
    for process in [&mut driver, &mut server] {
        process.assert_running();
        assert!(!process.log().contains(volumes::PASSWORD));
    }
}

#[tokio::test]
async fn controller_meets_its_csi_guarantees_without_quota() {
    let pool = tempfile::tempdir_in("/dev/shm").unwrap();
    check_guarantees(pool.path(), "none", false).await;
}

#[tokio::test]
async fn controller_meets_its_csi_guarantees_with_snapshots() {
    if let Some(xfs) = Xfs::without_quota() {
        check_guarantees(&xfs.path(), "none", true).await;
    }
}

#[tokio::test]
async fn controller_meets_its_csi_guarantees_with_quota() {
    if let Some(xfs) = Xfs::new() {
        check_guarantees(&xfs.path(), "project", true).await;
    }
}
