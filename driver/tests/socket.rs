//! The driver's process over its CSI socket, without a server: what it reports about itself, what it refuses, and what it logs.
#![allow(clippy::unwrap_used)]

mod process;
mod volumes;

use std::fs;
use std::path::Path;

use forebay_proto::csi::controller_client::ControllerClient;
use forebay_proto::csi::identity_client::IdentityClient;
use forebay_proto::csi::node_client::NodeClient;
use forebay_proto::csi::plugin_capability::{self, service, volume_expansion};
use forebay_proto::csi::volume_capability::{AccessType, BlockVolume, MountVolume};
use forebay_proto::csi::volume_content_source::{self, VolumeSource};
use forebay_proto::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest, CreateVolumeRequest,
    DeleteVolumeRequest, GetPluginCapabilitiesRequest, GetPluginInfoRequest, ListVolumesRequest,
    NodeGetCapabilitiesRequest, NodeGetInfoRequest, NodeStageVolumeRequest, ProbeRequest,
    ValidateVolumeCapabilitiesRequest, VolumeContentSource,
};
use process::{Process, connect, driver_binary, eventually, start_driver};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::Code;
use volumes::{PASSWORD, capability, map};

fn create() -> CreateVolumeRequest {
    volumes::create("pvc-1", 0)
}

#[tokio::test]
async fn controller_reports_its_capabilities_and_exits_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let mut driver = start_driver(dir.path(), "controller", &[]);
    let channel = connect(&mut driver, &dir.path().join("csi.sock")).await;
    let mut identity = IdentityClient::new(channel.clone());

    let info = identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(
        (info.name.as_str(), info.vendor_version.as_str()),
        ("csi.forebay.io", env!("CARGO_PKG_VERSION"))
    );
    let capabilities = identity
        .get_plugin_capabilities(GetPluginCapabilitiesRequest {})
        .await
        .unwrap()
        .into_inner()
        .capabilities;
    let has = |wanted: plugin_capability::Type| capabilities.iter().any(|c| c.r#type == Some(wanted));
    assert!(has(plugin_capability::Type::Service(plugin_capability::Service {
        r#type: service::Type::ControllerService.into()
    })));
    assert!(has(plugin_capability::Type::VolumeExpansion(plugin_capability::VolumeExpansion {
        r#type: volume_expansion::Type::Online.into()
    })));
    // There is no server.
    let probe = identity.probe(ProbeRequest {}).await.unwrap().into_inner();
    assert_eq!(probe.ready, Some(false));

    let status = NodeClient::new(channel).node_get_info(NodeGetInfoRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented, "the node service is not served");

    assert!(driver.terminate().await.success());
    assert!(!dir.path().join("csi.sock").exists());
}

#[tokio::test]
async fn node_reports_its_id_and_capabilities() {
    let dir = tempfile::tempdir().unwrap();
    let mut driver = start_driver(dir.path(), "node", &["--node-id", "worker-1"]);
    let channel = connect(&mut driver, &dir.path().join("csi.sock")).await;
    let mut node = NodeClient::new(channel.clone());
    let info = node.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.node_id.as_str(), info.max_volumes_per_node), ("worker-1", 0));
    let capabilities = node.node_get_capabilities(NodeGetCapabilitiesRequest {}).await.unwrap().into_inner();
    assert_eq!(capabilities.capabilities.len(), 6);
    let status = ControllerClient::new(channel).create_volume(create()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented, "the controller service is not served");
}

#[tokio::test]
async fn invalid_requests_are_refused_with_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let mut driver = start_driver(dir.path(), "controller", &[]);
    let channel = connect(&mut driver, &dir.path().join("csi.sock")).await;
    let mut controller = ControllerClient::new(channel);

    type Change = fn(&mut CreateVolumeRequest);
    let changes: [(Code, &str, Change); 16] = [
        (Code::InvalidArgument, "name is required", |r| r.name.clear()),
        (Code::InvalidArgument, "200 bytes", |r| r.name = "x".repeat(200)),
        (Code::InvalidArgument, "volume_capabilities is required", |r| r.volume_capabilities.clear()),
        (Code::InvalidArgument, "block volumes", |r| {
            r.volume_capabilities[0].access_type = Some(AccessType::Block(BlockVolume {}));
        }),
        (Code::InvalidArgument, "\"colour\"; known are pool, quota", |r| {
            r.parameters = map(&[("colour", "blue")]);
        }),
        (Code::InvalidArgument, "must be hard or none", |r| r.parameters = map(&[("quota", "soft")])),
        (Code::InvalidArgument, "parameter server", |r| r.parameters = map(&[("server", "a/b")])),
        (Code::InvalidArgument, "\"a\"; known are bytesPerSecond", |r| {
            r.mutable_parameters = map(&[("a", "b")]);
        }),
        (Code::InvalidArgument, "provisioner-secret-name", |r| r.secrets.clear()),
        (Code::InvalidArgument, "secrets.password", |r| {
            r.secrets.insert("password".into(), "short".into());
        }),
        (Code::InvalidArgument, "mount_flags: ip is set", |r| {
            let flags = vec!["ip=10.0.0.1".into()];
            r.volume_capabilities[0].access_type =
                Some(AccessType::Mount(MountVolume { mount_flags: flags, ..Default::default() }));
        }),
        (Code::InvalidArgument, "a new volume has no snapshot", |r| {
            let flags = vec!["hard,snapshot=@GMT-2026.11.25-10.00.00".into()];
            r.volume_capabilities[0].access_type =
                Some(AccessType::Mount(MountVolume { mount_flags: flags, ..Default::default() }));
        }),
        (Code::InvalidArgument, "volume_content_source.volume.volume_id", |r| {
            let source = volume_content_source::Type::Volume(VolumeSource::default());
            r.volume_content_source = Some(VolumeContentSource { r#type: Some(source) });
        }),
        (Code::NotFound, "A/B does not exist", |r| {
            let source = volume_content_source::Type::Volume(VolumeSource { volume_id: "A/B".into() });
            r.volume_content_source = Some(VolumeContentSource { r#type: Some(source) });
        }),
        (Code::OutOfRange, "below required_bytes", |r| {
            r.capacity_range = Some(CapacityRange { required_bytes: 2, limit_bytes: 1 });
        }),
        // This request is valid, but there is no server.
        (Code::Unavailable, "server: ", |_| {}),
    ];
    for (code, part, change) in changes {
        let mut request = create();
        change(&mut request);
        let status = controller.create_volume(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{part}: {status}");
        assert!(status.message().contains(part), "{part}: {status}");
        assert!(!status.message().contains(PASSWORD), "{status}");
    }

    let status = controller.delete_volume(DeleteVolumeRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let impossible = DeleteVolumeRequest { volume_id: "No/Such".into(), ..Default::default() };
    controller.delete_volume(impossible).await.expect("an impossible id counts as deleted");
    let expand = ControllerExpandVolumeRequest { volume_id: "v".into(), ..Default::default() };
    let status = controller.controller_expand_volume(expand).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let validate = ValidateVolumeCapabilitiesRequest { volume_id: "v".into(), ..Default::default() };
    let status = controller.validate_volume_capabilities(validate).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let list = ListVolumesRequest { max_entries: -1, ..Default::default() };
    let status = controller.list_volumes(list).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let publish = ControllerPublishVolumeRequest::default();
    let status = controller.controller_publish_volume(publish).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented, "{status}");
}

#[tokio::test]
async fn logs_contain_no_secret_at_trace_level() {
    let dir = tempfile::tempdir().unwrap();
    let mut driver =
        start_driver(dir.path(), "all", &["--node-id", "n", "--log", "trace", "--log-format", "json"]);
    let channel = connect(&mut driver, &dir.path().join("csi.sock")).await;
    ControllerClient::new(channel.clone()).create_volume(create()).await.unwrap_err();
    let stage = NodeStageVolumeRequest {
        volume_id: "pvc-1".into(),
        staging_target_path: dir.path().join("staging").to_str().unwrap().into(),
        volume_capability: Some(capability()),
        secrets: map(&[("username", "u1"), ("password", PASSWORD)]),
        volume_context: map(&[("server", "127.0.0.1:9"), ("share", "pvc-1")]),
        ..Default::default()
    };
    NodeClient::new(channel).node_stage_volume(stage).await.unwrap_err();
    driver.terminate().await;
    let log = driver.log();
    assert!(log.contains(r#""rpc":"CreateVolume""#) && log.contains(r#""rpc":"NodeStageVolume""#), "{log}");
    assert!(!log.contains(PASSWORD), "{log}");
}

#[tokio::test]
async fn startup_errors_name_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = start_driver(dir.path(), "controller", &[]);
    connect(&mut first, &dir.path().join("csi.sock")).await;
    for (mode, arguments, part) in [
        ("controller", &[][..], "in use by another process"),
        ("node", &[][..], "a node needs --node-id"),
        ("controller", &["--log", "=="][..], "--log"),
        ("controller", &["--mount-deadline", "0"][..], "number of seconds"),
    ] {
        let output = std::process::Command::new(driver_binary())
            .args(["--mode", mode])
            .args(arguments)
            .arg("--endpoint")
            .arg(dir.path().join("csi.sock"))
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(part), "{part}: {error}");
    }
    first.assert_running();
}

/// The kernel chooses the port, and the log contains it.
async fn http_address(driver: &mut Process, dir: &Path, mode: &str) -> String {
    let log = dir.join(format!("csi-{mode}.log"));
    eventually(driver, || async {
        let log = fs::read_to_string(&log).unwrap();
        let found = log.split("\"address\":\"").nth(1).and_then(|rest| rest.split_once('"'));
        found.map(|(address, _)| address.to_owned()).ok_or("not logged yet")
    })
    .await
}

async fn get(address: &str, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

const HEALTH: [&str; 4] = ["--health-address", "127.0.0.1:0", "--log-format", "json"];

#[tokio::test]
async fn calls_are_counted_by_rpc_and_code() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["--node-id", "worker-1", "--metrics-address", "127.0.0.1:0", "--log-format", "json"];
    let mut driver = start_driver(dir.path(), "node", &arguments);
    let address = http_address(&mut driver, dir.path(), "node").await;
    let channel = connect(&mut driver, &dir.path().join("csi.sock")).await;
    let mut node = NodeClient::new(channel.clone());
    for _ in 0..3 {
        node.node_get_info(NodeGetInfoRequest {}).await.unwrap();
    }
    node.node_stage_volume(NodeStageVolumeRequest::default()).await.unwrap_err();
    ControllerClient::new(channel).create_volume(create()).await.unwrap_err();
    let text = get(&address, "/metrics").await;
    assert!(text.contains("\r\ncontent-type: application/openmetrics-text"), "{text}");
    for (labels, count) in [
        ("rpc=\"NodeGetInfo\",code=\"Ok\"", 3),
        ("rpc=\"NodeStageVolume\",code=\"InvalidArgument\"", 1),
        ("rpc=\"CreateVolume\",code=\"Unimplemented\"", 1),
    ] {
        let line = format!("\nforebay_csi_calls_total{{{labels}}} {count}\n");
        assert!(text.contains(&line), "{line}{text}");
    }
    assert!(text.contains("\nforebay_csi_call_duration_seconds_count{rpc=\"NodeGetInfo\"} 3\n"), "{text}");
    assert!(text.contains("\nforebay_csi_calls_in_progress{rpc=\"NodeGetInfo\"} 0\n"), "{text}");
}

#[tokio::test]
async fn health_is_reported_over_http() {
    let dir = tempfile::tempdir().unwrap();
    let mut driver = start_driver(dir.path(), "controller", &HEALTH);
    let address = http_address(&mut driver, dir.path(), "controller").await;
    connect(&mut driver, &dir.path().join("csi.sock")).await;
    for (path, answer) in [("/healthz", "200 OK"), ("/readyz", "503 Service Unavailable")] {
        let response = get(&address, path).await;
        assert!(response.starts_with(&format!("HTTP/1.1 {answer}")), "{path}: {response}");
    }
}

#[tokio::test]
async fn node_without_the_smb_client_reports_it_and_stays_ready() {
    let dir = tempfile::tempdir().unwrap();
    let mut driver = start_driver(dir.path(), "node", &[&HEALTH[..], &["--node-id", "n"]].concat());
    let address = http_address(&mut driver, dir.path(), "node").await;
    let channel = connect(&mut driver, &dir.path().join("csi.sock")).await;
    // The result depends on this kernel, but both answers must agree.
    let note = match IdentityClient::new(channel).probe(ProbeRequest {}).await {
        Ok(probe) => {
            assert_eq!(probe.into_inner().ready, Some(true));
            "ready\n"
        }
        Err(status) => {
            assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
            assert!(status.message().contains("cifs"), "{status}");
            "no volume can be mounted here"
        }
    };
    let answers = futures::future::join_all([(); 4].map(|()| get(&address, "/readyz"))).await;
    for answer in answers {
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains(note), "{answer}");
    }
}

#[tokio::test]
async fn driver_exits_when_it_loses_its_socket() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("csi.sock");
    let mut driver = start_driver(dir.path(), "controller", &HEALTH);
    connect(&mut driver, &socket).await;
    // Another process took the path: the old one must neither continue to serve nor remove a socket that is not its own.
    fs::remove_file(&socket).unwrap();
    let successor = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert!(!driver.ended().await.success());
    assert!(driver.log().contains("another process"), "{}", driver.log());
    std::os::unix::net::UnixStream::connect(&socket).expect("the successor's");
    drop(successor);
}

#[tokio::test]
async fn driver_without_its_socket_is_not_healthy() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("csi.sock");
    let mut driver = start_driver(dir.path(), "controller", &HEALTH);
    let address = http_address(&mut driver, dir.path(), "controller").await;
    connect(&mut driver, &socket).await;
    // The driver exits for this reason shortly: the test accepts whichever it sees first.
    fs::remove_file(&socket).unwrap();
    match tokio::net::TcpStream::connect(&address).await {
        Ok(mut stream) => {
            stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
            let mut response = String::new();
            let _ = stream.read_to_string(&mut response).await;
            assert!(response.is_empty() || response.starts_with("HTTP/1.1 503"), "{response}");
        }
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused),
    }
    assert!(!driver.ended().await.success());
}
