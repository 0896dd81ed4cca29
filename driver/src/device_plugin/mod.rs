//! The node's RDMA devices, offered to containers through the kubelet (device plugins, v1beta1).
//!
//! A container reaches /dev/infiniband only where its device cgroup allows it, which a mount does not change unless the
//! container is privileged; the kubelet's device plugins do. All containers share the same devices, so what is counted are
//! shares of a fixed number.
//!
//! The kubelet forgets a plugin when it restarts (it empties its folder) and when the list of devices ends. In both cases
//! the plugin makes its socket again and registers again.

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

/// Version of the interface.
const VERSION: &str = "v1beta1";

/// The kubelet's socket and the plugin's, in the kubelet's folder.
const KUBELET_SOCKET: &str = "kubelet.sock";
const OWN_SOCKET: &str = "csi.forebay.io-rdma.sock";

/// How often is looked whether both sockets are still there, and how long after a failure the kubelet is asked again.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// What the kubelet calls a device that containers may get, and one that they may not.
const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";

/// Offers the devices until `stop`. What fails is tried again: a node mounts volumes without it.
pub(crate) async fn run(folder: PathBuf, offer: watch::Receiver<Offer>, mut stop: watch::Receiver<bool>) {
    let mut failing = false;
    loop {
        let served = tokio::select! {
            served = serve(&folder, &offer, &mut failing) => served,
            // An error means that the sender is gone, which ends the driver as well.
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
    // The socket has gone with the future; the kubelet then takes the devices for gone, as they are.
}

/// Registers once and serves for as long as the kubelet knows of it. Says why it does not any more.
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
        // Before it is called, so that one that restarts meanwhile is seen.
        let found = SocketFile::at(&kubelet).with_context(|| format!("look at {}", kubelet.display()))?;
        register(&kubelet).await.context("register with the kubelet as a device plugin")?;
        info!(resource = RESOURCE_RDMA, "the kubelet has registered the node's RDMA devices");
        *failing = false;
        Ok(tokio::select! {
            () = own.vanished(WATCH_INTERVAL) => "the plugin's socket has vanished",
            () = found.vanished(WATCH_INTERVAL) => "the kubelet's socket is another one",
            // None while the service lives, which it does as long as this.
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

/// Tells the kubelet of the plugin. It connects to the plugin's socket before it answers.
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

/// Tells that it was dropped.
struct Following(mpsc::Sender<()>);

impl Drop for Following {
    fn drop(&mut self) {
        // If one is waiting already, that one is notified.
        let _ = self.0.try_send(());
    }
}

/// The shares as reported to the kubelet: none if the node has no RDMA device.
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
            // The agent is gone when the driver ends.
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
