//! Decides whether an instance's pod requests the RDMA devices of its node.
//!
//! The node plugin offers the devices as an extended resource. A pod that requests what its node does not have is never
//! started, and an instance cannot run anywhere else. So with `transport: Auto` a pod requests them only if the node offers
//! them, and keeps requesting them while it runs: a port that goes down is no reason to restart a server.

use std::time::Duration;

use forebay_api::cluster::{RdmaPlacement, Transport};
use forebay_api::names::RESOURCE_RDMA;
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec};

use super::rules::amount;
use super::{Report, View};
use crate::limits::RDMA_WAIT;
use crate::placement;

/// Directory of the RDMA device nodes, in a container as on its host.
const DEVICE_NODES: &str = "/dev/infiniband/";

/// Whether this node's kubelet allocates RDMA devices to pods: the node has a usable port, and the node plugin reports it.
#[must_use]
pub fn offered(node: &Node) -> bool {
    let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref());
    allocatable.and_then(|a| amount(a.get(RESOURCE_RDMA)?)).is_some_and(|shares| shares >= 1.0)
}

/// Whether the instance's pod must request the RDMA devices of its node.
#[must_use]
pub fn wanted(view: &View<'_>, instance: &str) -> bool {
    let network = &view.cluster.spec.network;
    // A pod's own network has no RDMA device.
    if !network.host_network && network.attachment.is_none() {
        return false;
    }
    match network.transport {
        Transport::TCP => false,
        // A pending pod shows more clearly what is missing than a server without RDMA does.
        Transport::RDMA => true,
        Transport::Auto => {
            kept(view, instance) || view.node(instance).is_some_and(|node| offered(node) && fits(view, node))
        }
    }
}

/// Returns when and why a pod must be recreated to get other devices, because devices are allocated to a pod only once.
#[must_use]
pub fn other_devices(view: &View<'_>, instance: &str, pod: &Pod) -> Option<(Duration, String)> {
    if !pod.spec.as_ref().is_some_and(asks) {
        return None;
    }
    if lacks_one(pod) {
        let since = pod.metadata.creation_timestamp.as_ref();
        let age = since.and_then(|t| Duration::try_from(view.observed.now.duration_since(t.0)).ok());
        let wait = RDMA_WAIT.saturating_sub(age.unwrap_or_default());
        return Some((wait, format!("the RDMA device allocated to {instance} no longer exists")));
    }
    let device = came_later(view, instance, pod)?;
    let why = format!("{instance} gets RDMA device {device}, which appeared after its container was created");
    Some((Duration::ZERO, why))
}

/// Whether the kubelet cannot create the container because a device that was allocated to the pod is gone. The kubelet
/// retries indefinitely, because only a new pod is allocated other devices.
fn lacks_one(pod: &Pod) -> bool {
    let statuses = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten());
    let mut waiting = statuses.filter_map(|c| c.state.as_ref()?.waiting.as_ref()?.message.as_deref());
    waiting.any(|why| why.contains(DEVICE_NODES))
}

/// Returns a device that appeared after the pod's container was made and that the placement would have used.
fn came_later(view: &View<'_>, instance: &str, pod: &Pod) -> Option<String> {
    if !view.node(instance).is_some_and(offered) {
        return None;
    }
    let Some(Report::Answered(report)) = view.observed.reports.get(instance) else { return None };
    let node = pod.spec.as_ref()?.node_name.as_deref()?;
    let storage = view.observed.storage_nodes.iter().find(|s| s.metadata.name.as_deref() == Some(node))?;
    let rdma = &view.cluster.spec.placement.rdma;
    let wanted = |device: &String| {
        let only = RdmaPlacement { devices: vec![device.clone()], ..rdma.clone() };
        placement::selected(&rdma.devices, Some(device))
            && placement::fitting_port(&only, node, Some(storage)).is_ok()
    };
    report.later_rdma_devices.iter().find(|device| wanted(device)).cloned()
}

/// Whether one of the node's ports meets the placement's requirements.
fn fits(view: &View<'_>, node: &Node) -> bool {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let storage = view.observed.storage_nodes.iter().find(|s| s.metadata.name.as_deref() == Some(name));
    let rdma = &view.cluster.spec.placement.rdma;
    placement::fitting_port(rdma, name, storage.map(AsRef::as_ref)).is_ok()
}

/// Whether the instance already requests the devices, and is not stuck waiting for them.
fn kept(view: &View<'_>, instance: &str) -> bool {
    let set = view.observed.stateful_sets.get(instance).and_then(|s| s.spec.as_ref());
    let asks = set.and_then(|s| s.template.spec.as_ref()).is_some_and(asks);
    asks && !view.observed.pods.get(instance).is_some_and(|pod| waits_in_vain(view, pod))
}

fn asks(pod: &PodSpec) -> bool {
    let limits = pod.containers.iter().filter_map(|c| c.resources.as_ref()?.limits.as_ref());
    limits.into_iter().any(|limits| limits.contains_key(RESOURCE_RDMA))
}

/// Whether the pod has been unschedulable for longer than a hiccup of the node plugin lasts.
fn waits_in_vain(view: &View<'_>, pod: &Pod) -> bool {
    let scheduled = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let refused = scheduled.filter(|c| c.type_ == "PodScheduled" && c.status == "False");
    let since = refused.filter_map(|c| c.last_transition_time.as_ref()).next();
    since.is_some_and(|since| {
        Duration::try_from(view.observed.now.duration_since(since.0)).is_ok_and(|waits| waits >= RDMA_WAIT)
    })
}
