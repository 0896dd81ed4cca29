//! The CSI Identity service.

use std::time::Duration;

use forebay_proto::csi::identity_server::Identity;
use forebay_proto::csi::plugin_capability::{self, service, volume_expansion};
use forebay_proto::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse,
};
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

/// Who this is, what it offers, and whether it can work at this moment.
#[derive(Clone, Debug)]
pub(crate) struct IdentityService {
    /// Where this is a controller.
    pub(crate) servers: Option<Servers>,
    pub(crate) is_node: bool,
    pub(crate) probes: InFlight,
}

impl IdentityService {
    /// A controller can work when its server or the Kubernetes API answers, a node when its kernel has the SMB client.
    pub(crate) async fn is_ready(&self) -> bool {
        match self.check().await {
            Ok(()) => true,
            Err(error) => {
                warn!(error = error.to_string(), "not ready");
                false
            }
        }
    }

    async fn check(&self) -> Result<(), Error> {
        if let Some(servers) = &self.servers {
            servers.probe().await?;
        }
        if self.is_node {
            let claim = self.probes.claim("cifs")?;
            let deadline: Duration = PROBE_DEADLINE;
            // Loads the module where it is not loaded, which takes its time.
            run_until("cifs probe", deadline, move || {
                let _claim = claim;
                mount::is_available("cifs")
            })
            .await??;
        }
        Ok(())
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
            plugin_capability::Type::VolumeExpansion(plugin_capability::VolumeExpansion {
                r#type: volume_expansion::Type::Online.into(),
            }),
        ];
        let capabilities = types.into_iter().map(|t| PluginCapability { r#type: Some(t) }).collect();
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse { ready: Some(self.is_ready().await) }))
    }
}
