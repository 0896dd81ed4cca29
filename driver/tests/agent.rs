//! A node of a Kubernetes cluster: registered by a kubelet (played by the test) and published on a real API server with exactly
//! the chart's rights.
#![allow(clippy::unwrap_used)]

mod process;
#[path = "../../inventory/tests/tree/mod.rs"]
mod tree;

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use forebay_api::node::{Fact, StorageNodeStatus};
use forebay_e2e::kubernetes::LocalApiServer;
use forebay_proto::device_plugin::device_plugin_client::DevicePluginClient;
use forebay_proto::device_plugin::{self, ListAndWatchResponse, RegisterRequest};
use forebay_proto::registration::registration_client::RegistrationClient;
use forebay_proto::registration::{InfoRequest, RegistrationStatus};
use process::{DEADLINE, Process, connect, driver_binary};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Streaming};

const NODE: &str = "worker-1";
const ACCOUNT: &str = "system:serviceaccount:forebay-system:forebay-csi-node";

/// The node's objects and the chart's rights on an API server.
fn cluster() -> LocalApiServer {
    let api = LocalApiServer::start(false).unwrap();
    let kubectl = api.kubectl();
    for definition in forebay_api::definitions() {
        kubectl.apply(&serde_json::to_string(&definition).unwrap()).unwrap();
    }
    kubectl.run(&["wait", "--for=condition=Established", "--timeout=60s", "crd", "--all"]).unwrap();
    kubectl.run(&["create", "namespace", "forebay-system"]).unwrap();
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}});
    kubectl.apply(&node.to_string()).unwrap();
    let manifests =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../manifests/forebay.yaml")).unwrap();
    let rights: Vec<&str> = manifests
        .split("\n---\n")
        .filter(|document| {
            ["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"].iter().any(|kind| {
                document.contains(&format!("\nkind: {kind}\n"))
                    && document.contains("\n  name: forebay-csi-node\n")
            })
        })
        .collect();
    assert_eq!(rights.len(), 4, "{rights:?}");
    kubectl.apply(&rights.join("\n---\n")).unwrap();
    api
}

/// A kubelet that accepts every device plugin.
struct Kubelet(tokio::sync::mpsc::UnboundedSender<RegisterRequest>);

#[tonic::async_trait]
impl device_plugin::registration_server::Registration for Kubelet {
    async fn register(
        &self,
        request: Request<RegisterRequest>,
    ) -> Result<Response<device_plugin::Empty>, tonic::Status> {
        self.0.send(request.into_inner()).unwrap();
        Ok(Response::new(device_plugin::Empty {}))
    }
}

/// Waits until all of the 64 shares have this health.
async fn wait_for_health(list: &mut Streaming<ListAndWatchResponse>, health: &str) {
    let look = async {
        loop {
            let devices = list.message().await.unwrap().unwrap().devices;
            if devices.len() == 64 && devices.iter().all(|d| d.health == health) {
                return;
            }
        }
    };
    tokio::time::timeout(DEADLINE, look).await.unwrap();
}

/// A node's driver and its scratch directory: sockets, the kubelet's folder, the host's trees.
struct Node {
    dir: TempDir,
    driver: Process,
}

impl Node {
    fn start(kubeconfig: &Path, trees: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for folder in ["plugins", "plugins_registry", "device-plugins"] {
            fs::create_dir(at(folder)).unwrap();
        }
        for text in trees {
            tree::unpack(text, &at("host"));
        }
        let mut command = Command::new(driver_binary());
        command.args(["--mode", "node", "--kubernetes", "--node-id", NODE, "--log-format", "json"]);
        command.args(["--health-address", "127.0.0.1:0", "--log", "info,forebay_csi=debug"]);
        command.env("KUBECONFIG", kubeconfig);
        command
            .arg("--endpoint")
            .arg(at("plugins/csi.forebay.io/csi.sock"))
            .arg("--host-root")
            .arg(at("host"));
        command.arg("--plugins-registry").arg(at("plugins_registry"));
        command.arg("--device-plugins").arg(at("device-plugins"));
        let log = at("log");
        Self { driver: Process::start(&mut command, log), dir }
    }

    async fn kubelet(&mut self) -> RegistrationClient<tonic::transport::Channel> {
        let socket = self.dir.path().join("plugins_registry/csi.forebay.io-reg.sock");
        RegistrationClient::new(connect(&mut self.driver, &socket).await)
    }

    /// Plays the kubelet in a device plugin's registration. Returns what the driver registers, and the list that it then sends.
    async fn devices(&mut self) -> (RegisterRequest, Streaming<ListAndWatchResponse>) {
        let folder = self.dir.path().join("device-plugins");
        let listener = tokio::net::UnixListener::bind(folder.join("kubelet.sock")).unwrap();
        let (sender, mut registered) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(
            Server::builder()
                .add_service(device_plugin::registration_server::RegistrationServer::new(Kubelet(sender)))
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        let request = tokio::time::timeout(DEADLINE, registered.recv()).await.unwrap().unwrap();
        let channel = connect(&mut self.driver, &folder.join(&request.endpoint)).await;
        let list = DevicePluginClient::new(channel).list_and_watch(device_plugin::Empty {}).await.unwrap();
        (request, list.into_inner())
    }

    async fn readiness(&mut self) -> String {
        let address =
            self.driver.log().split("\"address\":\"").nth(1).unwrap().split_once('"').unwrap().0.to_owned();
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// Waits until the agent has checked this many more times with nothing to publish.
    fn wait_for_checks(&mut self, times: usize) {
        let looks =
            |driver: &Process| driver.log().matches("looked at the node, nothing has changed").count();
        let (started, before) = (Instant::now(), looks(&self.driver));
        while looks(&self.driver) < before + times {
            self.driver.assert_running();
            assert!(started.elapsed() < DEADLINE, "{}", self.driver.log());
            std::thread::yield_now();
        }
    }

    /// Waits until the published node fulfils `holds`.
    fn published(&mut self, api: &LocalApiServer, holds: impl Fn(&StorageNodeStatus) -> bool) -> Value {
        let started = Instant::now();
        loop {
            self.driver.assert_running();
            let object = api.kubectl().find(&["storagenode", NODE]).unwrap();
            if let Some(object) = object {
                let status = object.get("status").cloned().unwrap_or_else(|| json!({}));
                if holds(&serde_json::from_value(status).unwrap()) {
                    return object;
                }
                assert!(started.elapsed() < DEADLINE, "{object:#}\n{}", self.driver.log());
            }
            assert!(started.elapsed() < DEADLINE, "nothing is published:\n{}", self.driver.log());
        }
    }
}

/// A network device of this machine with an address that others could reach.
fn own_netdev() -> Option<(String, IpAddr)> {
    let of = |a: if_addrs::Interface| (a.name.clone(), a.ip());
    let fits =
        |(_, ip): &(String, IpAddr)| matches!(ip, IpAddr::V4(v4) if !v4.is_loopback() && !v4.is_link_local());
    if_addrs::get_if_addrs().unwrap().into_iter().map(of).find(fits)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_is_registered_and_its_status_is_published() {
    let api = cluster();
    let kubeconfig = api.kubeconfig_for(ACCOUNT, Some("system:serviceaccounts")).unwrap();
    let own = own_netdev();
    let has_port = own.is_some();
    let rxe = include_str!("../../inventory/tests/trees/rxe.tree");
    let rxe = own.as_ref().map_or(rxe.to_owned(), |(name, _)| rxe.replace("eth1", name));
    let kernel = "proc/sys/kernel/osrelease\t7.2.1\nproc/fs/cifs/smbd_max_send_size\t1364\nproc/filesystems\tnodev\\tcifs\\n\n";
    let verbs = "sys/class/infiniband_verbs/uverbs0/ibdev\trxe0\nsys/class/misc/rdma_cm/dev\t10:58\n";
    let nvme = include_str!("../../inventory/tests/trees/nvme.tree");
    let mut node = Node::start(&kubeconfig, &[&rxe, nvme, kernel, verbs]);

    let mut kubelet = node.kubelet().await;
    let info = kubelet.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.endpoint, node.dir.path().join("plugins/csi.forebay.io/csi.sock").to_str().unwrap());
    assert!(Path::new(&info.endpoint).exists(), "the kubelet calls it at once");
    let readiness = node.readiness().await;
    assert!(readiness.contains("503") && readiness.contains("has not registered"), "{readiness}");
    let status = RegistrationStatus { plugin_registered: true, error: String::new() };
    kubelet.notify_registration_status(status).await.unwrap();
    // Regardless of whether the kernel has an SMB client.
    let readiness = node.readiness().await;
    assert!(readiness.starts_with("HTTP/1.1 200") && readiness.contains("ready"), "{readiness}");

    // Containers can use the node's RDMA devices as long as a port is usable.
    let (registered, mut shares) = node.devices().await;
    assert_eq!(registered.resource_name, "storage.forebay.io/rdma");
    wait_for_health(&mut shares, if has_port { "Healthy" } else { "Unhealthy" }).await;

    let object = node.published(&api, |status| status.last_change_time.is_some());
    let of_node = api.kubectl().get(&["node", NODE]).unwrap();
    let owner = &object["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["kind"], &owner["uid"]), (&json!("Node"), &of_node["metadata"]["uid"]));
    let status: StorageNodeStatus = serde_json::from_value(object["status"].clone()).unwrap();
    let (summary, usable) = match &own {
        Some(_) => ("1/1 soft-RoCE 2G", true),
        None => ("0/1 soft-RoCE (no address)", false),
    };
    assert_eq!((status.summary.rdma.as_str(), status.summary.nvme), (summary, 6));
    let port = &status.rdma_devices[0].ports[0];
    assert_eq!((port.usable, port.rate_gbps, port.state.as_str()), (usable, 2, "ACTIVE"));
    assert!(own.is_none_or(|(_, ip)| port.addresses.contains(&ip)), "{port:?}");
    assert_eq!((status.kernel.cifs, status.kernel.cifs_smb_direct), (Fact::Yes, Fact::Yes));
    let condition = |status: &StorageNodeStatus, kind: &str| {
        status.conditions.iter().find(|c| c.type_ == kind).map(|c| c.status.clone())
    };
    assert_eq!(condition(&status, "Ready").as_deref(), Some("True"));

    // Fields of other managers stay, and nothing is written while nothing changes.
    let patch = json!({"spec": {"unschedulable": true}}).to_string();
    api.kubectl().run(&["patch", "storagenode", NODE, "--type=merge", "-p", &patch]).unwrap();
    let before = api.kubectl().get(&["storagenode", NODE]).unwrap();
    node.wait_for_checks(2);
    let later = api.kubectl().get(&["storagenode", NODE]).unwrap();
    assert_eq!(later["metadata"]["resourceVersion"], before["metadata"]["resourceVersion"], "{later:#}");
    let state = node.dir.path().join("host/sys/class/infiniband/rxe0/ports/1/state");
    fs::write(state, "1: DOWN\n").unwrap();
    let object = node.published(&api, |status| condition(status, "RdmaReady").as_deref() == Some("False"));
    if has_port {
        wait_for_health(&mut shares, "Unhealthy").await;
    }
    assert_eq!(object["spec"]["unschedulable"], json!(true));
    assert_eq!(object["status"]["summary"]["rdma"], json!("0/1 soft-RoCE (port down)"));
    assert_eq!(before["status"]["rdmaDevices"][0]["ports"][0]["state"], json!("ACTIVE"));
    let object = api.kubectl().get(&["storagenode", NODE, "--show-managed-fields"]).unwrap();
    let managers = object["metadata"]["managedFields"].as_array().unwrap();
    assert!(managers.iter().any(|m| m["manager"] == "forebay-node-agent"), "{managers:?}");

    assert!(node.driver.terminate().await.success(), "{}", node.driver.log());
    assert!(!node.dir.path().join("plugins_registry/csi.forebay.io-reg.sock").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn driver_exits_with_the_cause_if_the_kubelet_refuses_it() {
    // There is no API server; the node registers nevertheless.
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("kubeconfig");
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}]\n\
        contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n";
    fs::write(&kubeconfig, text).unwrap();
    let mut node = Node::start(&kubeconfig, &[]);
    // The driver retries: the kubelet may only be busy.
    for times in 1..=3 {
        let error = "a plugin of this name is registered".to_owned();
        // The driver may exit before its answer arrives.
        let mut kubelet = node.kubelet().await;
        let _ =
            kubelet.notify_registration_status(RegistrationStatus { plugin_registered: false, error }).await;
        let started = Instant::now();
        while node.driver.log().matches("refused to register the driver").count() < times {
            assert!(started.elapsed() < DEADLINE, "{}", node.driver.log());
            tokio::task::yield_now().await;
        }
    }
    let status = node.driver.ended().await;
    assert!(!status.success());
    let log = node.driver.log();
    assert!(
        log.contains("the kubelet refused to register the driver: a plugin of this name is registered"),
        "{log}"
    );
}
