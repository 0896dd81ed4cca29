//! Tests the plugin through its API: the test acts as the kubelet.

use std::fs;

use forebay_proto::device_plugin::ContainerAllocateRequest;
use forebay_proto::device_plugin::device_plugin_client::DevicePluginClient;
use forebay_proto::device_plugin::registration_server::{Registration, RegistrationServer};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tonic::Streaming;
use tonic::transport::Channel;

use super::*;

const DEADLINE: Duration = Duration::from_secs(60);

/// Passes registrations on to the test.
struct Kubelet(mpsc::UnboundedSender<RegisterRequest>);

#[tonic::async_trait]
impl Registration for Kubelet {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.0.send(request.into_inner()).expect("the test listens");
        Ok(Response::new(Empty {}))
    }
}

struct Stage {
    folder: TempDir,
    kubelet: JoinHandle<()>,
    registered: mpsc::UnboundedReceiver<RegisterRequest>,
    offer: watch::Sender<Offer>,
    stop: watch::Sender<bool>,
    running: JoinHandle<()>,
}

fn start_kubelet(folder: &Path) -> (JoinHandle<()>, mpsc::UnboundedReceiver<RegisterRequest>) {
    let (sender, registered) = mpsc::unbounded_channel();
    let (listener, own) = socket::listen_at(&folder.join(KUBELET_SOCKET)).expect("free");
    // The kubelet does not remove its socket.
    std::mem::forget(own);
    let serving = Server::builder()
        .add_service(RegistrationServer::new(Kubelet(sender)))
        .serve_with_incoming(UnixListenerStream::new(listener));
    (tokio::spawn(async move { serving.await.expect("it serves") }), registered)
}

fn usable() -> Offer {
    let nodes = ["rdma_cm", "uverbs0"].map(|name| format!("/dev/infiniband/{name}"));
    Offer { nodes: nodes.to_vec(), usable: true }
}

impl Stage {
    fn start(offer: Offer) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let (kubelet, registered) = start_kubelet(folder.path());
        let (offer, offers) = watch::channel(offer);
        let (stop, stopping) = watch::channel(false);
        let running = tokio::spawn(run(folder.path().to_owned(), offers, stopping));
        Self { folder, kubelet, registered, offer, stop, running }
    }

    /// Waits for the registration, and connects to the endpoint in it.
    async fn registered(&mut self) -> DevicePluginClient<Channel> {
        let request = timeout(DEADLINE, self.registered.recv()).await.expect("in time").expect("it runs");
        assert_eq!((request.version.as_str(), request.resource_name.as_str()), (VERSION, RESOURCE_RDMA));
        let path = self.folder.path().join(&request.endpoint);
        let endpoint = Endpoint::from_shared(format!("unix://{}", path.display())).expect("an endpoint");
        DevicePluginClient::new(endpoint.connect().await.expect("it listens before it registers"))
    }
}

async fn follow(client: &mut DevicePluginClient<Channel>) -> Streaming<ListAndWatchResponse> {
    client.list_and_watch(Empty {}).await.expect("a list").into_inner()
}

async fn next(list: &mut Streaming<ListAndWatchResponse>) -> Vec<Device> {
    timeout(DEADLINE, list.message()).await.expect("in time").expect("a list").expect("a response").devices
}

#[tokio::test]
async fn share_health_follows_the_nodes_rdma_ports() {
    let mut stage = Stage::start(Offer::default());
    let mut client = stage.registered().await;
    let options = client.get_device_plugin_options(Empty {}).await.expect("an answer").into_inner();
    assert!(!options.pre_start_required && !options.get_preferred_allocation_available);
    let mut list = follow(&mut client).await;
    assert_eq!(next(&mut list).await, [], "a node without RDMA has none");

    stage.offer.send_replace(usable());
    let devices = next(&mut list).await;
    assert_eq!(devices.len(), RDMA_SHARES_MAX);
    assert!(devices.iter().all(|d| d.health == "Healthy"), "{devices:?}");

    stage.offer.send_replace(Offer { usable: false, ..usable() });
    let devices = next(&mut list).await;
    assert_eq!(devices.len(), RDMA_SHARES_MAX);
    assert!(devices.iter().all(|d| d.health == "Unhealthy"), "{devices:?}");
}

#[tokio::test]
async fn allocate_returns_the_rdma_device_nodes() {
    let mut stage = Stage::start(usable());
    let mut client = stage.registered().await;
    let devices = next(&mut follow(&mut client).await).await;
    let ask = |id: &str| AllocateRequest {
        container_requests: vec![ContainerAllocateRequest { devices_ids: vec![id.to_owned()] }],
    };
    let given = client.allocate(ask(&devices[7].id)).await.expect("given").into_inner().container_responses;
    let [container] = given.as_slice() else { panic!("one container asked: {given:?}") };
    let specs: Vec<_> = container
        .devices
        .iter()
        .map(|d| (d.host_path.as_str(), d.container_path.as_str(), d.permissions.as_str()))
        .collect();
    assert_eq!(
        specs,
        [
            ("/dev/infiniband/rdma_cm", "/dev/infiniband/rdma_cm", "rw"),
            ("/dev/infiniband/uverbs0", "/dev/infiniband/uverbs0", "rw")
        ]
    );
    let status = client.allocate(ask("rdma-64")).await.expect_err("there are 64, from 0");
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    stage.offer.send_replace(Offer::default());
    let status = client.allocate(ask("rdma-0")).await.expect_err("nothing to give");
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
}

#[tokio::test]
async fn plugin_registers_again_after_a_kubelet_restart() {
    let mut stage = Stage::start(usable());
    let mut client = stage.registered().await;
    next(&mut follow(&mut client).await).await;

    // The kubelet empties its directory on startup.
    stage.kubelet.abort();
    for socket in [OWN_SOCKET, KUBELET_SOCKET] {
        fs::remove_file(stage.folder.path().join(socket)).expect("there");
    }
    (stage.kubelet, stage.registered) = start_kubelet(stage.folder.path());
    let mut client = stage.registered().await;
    assert_eq!(next(&mut follow(&mut client).await).await.len(), RDMA_SHARES_MAX);

    stage.stop.send_replace(true);
    timeout(DEADLINE, &mut stage.running).await.expect("in time").expect("no panic");
    assert!(!stage.folder.path().join(OWN_SOCKET).exists());
}

#[tokio::test]
async fn plugin_registers_again_after_the_kubelet_closes_the_list() {
    let mut stage = Stage::start(usable());
    let mut client = stage.registered().await;
    let mut list = follow(&mut client).await;
    next(&mut list).await;
    drop((list, client));
    stage.registered().await;
}

#[tokio::test]
async fn missing_device_plugin_directory_does_not_stop_the_driver() {
    let folder = tempfile::tempdir().expect("a directory");
    let (_offer, offers) = watch::channel(usable());
    let mut failing = false;
    let absent = folder.path().join("absent");
    let error = serve(&absent, &offers, &mut failing).await.expect_err("no folder").to_string();
    assert!(error.contains("--device-plugins"), "{error}");
    let (stop, stopping) = watch::channel(false);
    let running = tokio::spawn(run(absent, offers, stopping));
    stop.send_replace(true);
    timeout(DEADLINE, running).await.expect("in time").expect("no panic");
}
