//! The CSI Identity service.

use std::sync::Arc;

use forebay_proto::csi::identity_server::Identity;
use forebay_proto::csi::plugin_capability::{self, service, volume_expansion};
use forebay_proto::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse,
};
use tokio::sync::Mutex;
use tonic::{Request, Response, Status};
use tracing::warn;

use crate::controller::Servers;
use crate::deadline::run_until;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::limits::PROBE_DEADLINE;
use crate::mount;

/// The driver's name.
pub(crate) const DRIVER_NAME: &str = "csi.forebay.io";

/// The kernel's SMB client.
const CLIENT: &str = "cifs";

/// Reports the driver's name and capabilities, and whether it can work now.
#[derive(Clone, Debug)]
pub(crate) struct IdentityService {
    /// Set on a controller.
    pub(crate) servers: Option<Servers>,
    pub(crate) is_node: bool,
    pub(crate) look: Look,
}

/// Checks whether the kernel has the SMB client, one check at a time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Look {
    turn: Arc<Mutex<()>>,
    running: InFlight,
}

impl Look {
    async fn for_client(&self) -> Result<(), Error> {
        let _turn = self.turn.lock().await;
        // Stays claimed while a check hangs.
        let claim = self.running.claim(CLIENT)?;
        // Loads the module if it is not loaded, which takes time.
        run_until("cifs probe", PROBE_DEADLINE, move || {
            let _claim = claim;
            mount::is_available(CLIENT)
        })
        .await?
        .map_err(Error::from)
    }
}

impl IdentityService {
    /// A controller can work if its server or the Kubernetes API responds, a node if its kernel has the SMB client.
    async fn check(&self) -> Result<(), Error> {
        if let Some(servers) = &self.servers {
            servers.probe().await?;
        }
        if self.is_node { self.look.for_client().await } else { Ok(()) }
    }
}

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: DRIVER_NAME.into(),
            vendor_version: env!("CARGO_PKG_VERSION").into(),
            manifest: Default::default(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let types = [
            plugin_capability::Type::Service(plugin_capability::Service {
                r#type: service::Type::ControllerService.into(),
            }),
            plugin_capability::Type::Service(plugin_capability::Service {
                r#type: service::Type::GroupControllerService.into(),
            }),
            plugin_capability::Type::VolumeExpansion(plugin_capability::VolumeExpansion {
                r#type: volume_expansion::Type::Online.into(),
            }),
        ];
        let capabilities = types.into_iter().map(|t| PluginCapability { r#type: Some(t) }).collect();
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        let ready = match self.check().await {
            Ok(()) => true,
            // CSI Probe: a required dependency is missing.
            Err(error @ Error::Mount(_)) => return Err(error.into()),
            Err(error) => {
                warn!(error = error.to_string(), "not ready");
                false
            }
        };
        Ok(Response::new(ProbeResponse { ready: Some(ready) }))
    }
}
