//! The servers that hold volumes, and their identification in a volume's ID and context.

use std::sync::Arc;

use forebay_api::StorageCluster;
use forebay_proto::admin::Volume;
use forebay_proto::csi;

use super::snapshots::content_source;
use super::volume::{LABEL_SERVER, size_bytes, transport};
use crate::address::{self, ServerAddress};
use crate::admin::Admin;
use crate::capacity::to_csi;
use crate::cluster::{Clusters, is_removed};
use crate::context::{Location, VolumeContext};
use crate::error::Error;
use crate::handle::{Handle, InstanceName};
use crate::names::VolumeId;
use crate::parameters::{Parameters, Setting};

/// Possible locations of volumes.
#[derive(Clone, Debug)]
pub(crate) enum Servers {
    /// On one server; a volume's ID is its share.
    One(Admin),
    /// On the instances of StorageClusters; a volume's ID is `<instance>/<share>`.
    Kubernetes(Clusters),
}

impl Servers {
    pub(crate) fn setting(&self) -> Setting {
        match self {
            Self::One(_) => Setting::OneServer,
            Self::Kubernetes(_) => Setting::Kubernetes,
        }
    }

    /// Whether the driver can work. One unreachable instance does not block the others.
    pub(crate) async fn probe(&self) -> Result<(), Error> {
        match self {
            Self::One(admin) => admin.probe().await,
            Self::Kubernetes(clusters) => clusters.kubernetes().probe().await,
        }
    }

    /// Parses this ID, if it is valid in this deployment.
    pub(super) fn handle(&self, volume_id: &str) -> Result<Handle, Error> {
        match (self, Handle::parse(volume_id)) {
            (Self::One(_), Some(handle @ Handle::Server { .. }))
            | (Self::Kubernetes(_), Some(handle @ Handle::Instance { .. })) => Ok(handle),
            _ => Err(Error::NoVolume(volume_id.to_owned())),
        }
    }

    /// The server in the volume's ID.
    pub(super) async fn home_of(&self, handle: &Handle) -> Result<Home, Error> {
        let none = || Error::NoVolume(handle.to_string());
        match (self, handle) {
            (Self::One(admin), Handle::Server { .. }) => Ok(Home::only(admin)),
            (Self::Kubernetes(clusters), Handle::Instance { instance, .. }) => {
                let cluster = clusters.find(instance.cluster()).await?.ok_or_else(none)?;
                if is_removed(&cluster, instance) {
                    return Err(none());
                }
                Home::on(clusters, &cluster, instance).await
            }
            _ => Err(none()),
        }
    }
}

/// One server.
#[derive(Clone, Debug)]
pub(super) struct Home {
    pub(super) admin: Admin,
    /// The instance, if there are several.
    seat: Option<Seat>,
}

#[derive(Clone, Debug)]
struct Seat {
    namespace: Arc<str>,
    instance: InstanceName,
}

impl Home {
    /// The only server.
    pub(super) fn only(admin: &Admin) -> Self {
        Self { admin: admin.clone(), seat: None }
    }

    pub(super) async fn on(
        clusters: &Clusters,
        cluster: &StorageCluster,
        instance: &InstanceName,
    ) -> Result<Self, Error> {
        let admin = clusters.connect(cluster, instance).await?;
        let namespace = clusters.kubernetes().namespace().into();
        Ok(Self { admin, seat: Some(Seat { namespace, instance: instance.clone() }) })
    }

    /// The ID of a volume that this server serves under this name.
    pub(super) fn volume_id(&self, share: &str) -> String {
        match &self.seat {
            None => share.to_owned(),
            Some(seat) => format!("{}/{share}", seat.instance),
        }
    }

    /// The server's addresses. Requested only if a volume's context contains addresses and the volume has none of its own.
    pub(super) async fn advertised(&self, volumes: &[Volume]) -> Result<Vec<ServerAddress>, Error> {
        if self.seat.is_some() || volumes.iter().all(|v| v.labels.contains_key(LABEL_SERVER)) {
            return Ok(Vec::new());
        }
        self.admin.addresses().await
    }

    /// Converts the volume to CSI.
    pub(super) fn to_csi(&self, volume: &Volume, advertised: &[ServerAddress]) -> csi::Volume {
        let location = match &self.seat {
            Some(seat) => {
                Location::Instance { namespace: seat.namespace.to_string(), name: seat.instance.clone() }
            }
            None => {
                let own = volume.labels.get(LABEL_SERVER);
                let own = own.and_then(|list| address::parse_list("server", list).ok());
                Location::Servers(own.unwrap_or_else(|| advertised.to_vec()))
            }
        };
        let volume_context = VolumeId::parse(&volume.volume_id)
            .map(|share| VolumeContext::new(location, share, volume.protection(), transport(volume)).to_map())
            .unwrap_or_default();
        csi::Volume {
            capacity_bytes: to_csi(size_bytes(volume)),
            volume_id: self.volume_id(&volume.volume_id),
            volume_context,
            content_source: content_source(self, volume),
            // Every node reaches every server.
            accessible_topology: Vec::new(),
        }
    }

    /// Whether it is the server in the ID.
    pub(super) fn is_home_of(&self, handle: &Handle) -> bool {
        self.seat.as_ref().map(|seat| &seat.instance) == handle.instance()
    }

    /// Whether an existing volume can have been created with these parameters.
    pub(super) fn check_parameters(&self, volume: &Volume, parameters: &Parameters) -> Result<(), Error> {
        let Some(seat) = &self.seat else { return Ok(()) };
        let volume_id = || self.volume_id(&volume.volume_id);
        if parameters.cluster.as_ref().is_some_and(|name| name != seat.instance.cluster()) {
            return Err(Error::VolumeExists { volume_id: volume_id(), what: "cluster" });
        }
        if parameters.cluster_namespace.as_ref().is_some_and(|name| **name != *seat.namespace) {
            return Err(Error::VolumeExists { volume_id: volume_id(), what: "clusterNamespace" });
        }
        Ok(())
    }

    /// Whether the context's location is this server.
    pub(super) fn check_location(&self, location: &Location) -> Result<(), Error> {
        let leads_here = match (&self.seat, location) {
            (None, Location::Servers(_)) => true,
            (Some(seat), Location::Instance { namespace, name }) => {
                **namespace == *seat.namespace && *name == seat.instance
            }
            _ => false,
        };
        match leads_here {
            true => Ok(()),
            false => Err(Error::invalid("volume_context", "is not this volume's")),
        }
    }
}
