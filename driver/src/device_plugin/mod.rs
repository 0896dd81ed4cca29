//! Offers the node's RDMA devices to containers through the kubelet (device plugins, v1beta1).
//!
//! A container can access /dev/infiniband only if its device cgroup allows it. A mount does not change the cgroup unless the
//! container is privileged, but the kubelet's device plugins do. All containers share the same devices, so the plugin counts a
//! fixed number of shares.
//!
//! The kubelet drops a plugin when the kubelet restarts (it empties its directory) and when the stream of the device list ends.
//! In both cases, the plugin creates its socket and registers again.

mod offer;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use forebay_api::names::RESOURCE_RDMA;
use forebay_proto::device_plugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use forebay_proto::device_plugin::registration_client::RegistrationClient;
use forebay_proto::device_plugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions, DeviceSpec,
    Empty, ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
};
use futures::stream::{BoxStream, unfold};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};
use tracing::{debug, info, warn};

pub(crate) use self::offer::Offer;
use crate::limits::{KUBELET_DEADLINE, RDMA_SHARES_MAX};
use crate::registration::authority::Localhost;
use crate::socket::{self, SocketFile};

/// Version of the API.
const VERSION: &str = "v1beta1";

/// Sockets of the kubelet and the plugin, in the kubelet's directory.
const KUBELET_SOCKET: &str = "kubelet.sock";
const OWN_SOCKET: &str = "csi.forebay.io-rdma.sock";

/// Interval of the check that both sockets still exist, and delay before a retry after a failure.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// The kubelet's health values of devices that containers can and cannot get.
const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";

/// Offers the devices until `stop`. Failures are retried: a node mounts volumes without this plugin.
pub(crate) async fn run(folder: PathBuf, offer: watch::Receiver<Offer>, mut stop: watch::Receiver<bool>) {
    let mut failing = false;
    loop {
        let served = tokio::select! {
            served = serve(&folder, &offer, &mut failing) => served,
            // An error means that the sender was dropped, which also ends the driver.
            _ = stop.wait_for(|stop| *stop) => break,
        };
        match served {
            Ok(why) => info!(why, "offering the RDMA devices to the kubelet again"),
            Err(error) => {
                let error = format!("{error:#}");
                if failing {
                    debug!(error, "cannot offer the RDMA devices to the kubelet");
                } else {
                    warn!(error, "cannot offer the RDMA devices to the kubelet, trying again");
                }
                failing = true;
            }
        }
        tokio::select! {
            () = sleep(WATCH_INTERVAL) => {}
            _ = stop.wait_for(|stop| *stop) => break,
        }
    }
    // Dropping the future has removed the socket; the kubelet then correctly considers the devices gone.
}

/// Registers once and serves until the kubelet drops the registration. Returns why it ended.
async fn serve(
    folder: &Path,
    offer: &watch::Receiver<Offer>,
    failing: &mut bool,
) -> anyhow::Result<&'static str> {
    if !folder.is_dir() {
        bail!(
            "{} is not a directory: it belongs to the kubelet and must be mounted in this container (--device-plugins)",
            folder.display()
        );
    }
    let own = folder.join(OWN_SOCKET);
    let kubelet = folder.join(KUBELET_SOCKET);
    let (listener, own) = socket::listen_at(&own).context("offer devices to the kubelet")?;
    let (ended, mut ends) = mpsc::channel(1);
    let service = Service { offer: offer.clone(), ended };
    let serving = Server::builder()
        .add_service(DevicePluginServer::new(service))
        .serve_with_incoming(UnixListenerStream::new(listener).map(|stream| stream.map(Localhost::new)));
    let registered = async {
        // Before the kubelet is called, so that a concurrent restart is detected.
        let found = SocketFile::at(&kubelet).with_context(|| format!("look at {}", kubelet.display()))?;
        register(&kubelet).await.context("register with the kubelet as a device plugin")?;
        info!(resource = RESOURCE_RDMA, "the kubelet has registered the node's RDMA devices");
        *failing = false;
        Ok(tokio::select! {
            () = own.vanished(WATCH_INTERVAL) => "the plugin's socket has vanished",
            () = found.vanished(WATCH_INTERVAL) => "the kubelet's socket is another one",
            // `None` cannot occur here: the service, which holds a sender, lives as long as this.
            _ = ends.recv() => "the kubelet no longer follows the list of devices",
        })
    };
    tokio::select! {
        served = serving => {
            served.context("serve the device plugin's socket")?;
            bail!("the device plugin's socket was closed");
        }
        result = registered => result,
    }
}

/// Registers the plugin with the kubelet, which connects to the plugin's socket before it responds.
async fn register(kubelet: &Path) -> anyhow::Result<()> {
    let path = kubelet.to_str().context("the path of the kubelet's socket is not UTF-8")?;
    let endpoint = Endpoint::from_shared(format!("unix://{path}"))?.connect_timeout(KUBELET_DEADLINE);
    let request = RegisterRequest {
        version: VERSION.to_owned(),
        endpoint: OWN_SOCKET.to_owned(),
        resource_name: RESOURCE_RDMA.to_owned(),
        options: Some(DevicePluginOptions::default()),
    };
    timeout(KUBELET_DEADLINE, async {
        let mut client = RegistrationClient::new(endpoint.connect().await?);
        client.register(request).await?;
        anyhow::Ok(())
    })
    .await
    .with_context(|| format!("no answer within {} s", KUBELET_DEADLINE.as_secs()))?
}

struct Service {
    offer: watch::Receiver<Offer>,
    /// Signalled when the kubelet drops a list.
    ended: mpsc::Sender<()>,
}

/// Signals when it is dropped.
struct Following(mpsc::Sender<()>);

impl Drop for Following {
    fn drop(&mut self) {
        // If a signal is already pending, it is sufficient.
        let _ = self.0.try_send(());
    }
}

/// The shares reported to the kubelet: none if the node has no RDMA device.
fn devices(offer: &Offer) -> Vec<Device> {
    let shares = if offer.nodes.is_empty() { 0 } else { RDMA_SHARES_MAX };
    let health = if offer.usable { HEALTHY } else { UNHEALTHY };
    (0..shares).map(|n| Device { id: share(n), health: health.to_owned(), topology: None }).collect()
}

fn share(number: usize) -> String {
    format!("rdma-{number}")
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = BoxStream<'static, Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let mut offer = self.offer.clone();
        offer.mark_changed();
        let following = Following(self.ended.clone());
        let list = unfold((offer, following), |(mut offer, following)| async move {
            // The agent has ended, because the driver ends.
            offer.changed().await.ok()?;
            let devices = devices(&offer.borrow_and_update());
            Some((Ok(ListAndWatchResponse { devices }), (offer, following)))
        });
        Ok(Response::new(Box::pin(list)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("no share is preferred"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let nodes = self.offer.borrow().nodes.clone();
        if nodes.is_empty() {
            return Err(Status::failed_precondition("the node no longer has an RDMA device"));
        }
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            let known = |id: &String| (0..RDMA_SHARES_MAX).any(|n| *id == share(n));
            if let Some(unknown) = container.devices_ids.iter().find(|id| !known(id)) {
                return Err(Status::invalid_argument(format!("no device is called {unknown:?}")));
            }
            let devices = nodes.iter().map(|path| DeviceSpec {
                container_path: path.clone(),
                host_path: path.clone(),
                permissions: "rw".to_owned(),
            });
            container_responses
                .push(ContainerAllocateResponse { devices: devices.collect(), ..Default::default() });
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("there is nothing to prepare"))
    }
}

#[cfg(test)]
mod tests;
