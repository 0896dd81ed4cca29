//! The custom resources of Forebay, group `storage.forebay.io`, version `v1alpha1`, and the names that all programs
//! that work with them must agree on.
//!
//! The CustomResourceDefinitions are generated from these types ([`definitions`]) into `charts/forebay/crds`.

// The schema derive repeats each type inside a function; columns of one type are no duplicates.
#[allow(unreachable_pub, clippy::duplicated_attributes)]
pub mod cluster;
#[allow(unreachable_pub, clippy::duplicated_attributes)]
pub mod fabric;
pub mod names;
#[allow(unreachable_pub, clippy::duplicated_attributes)]
pub mod node;

pub use cluster::{StorageCluster, StorageClusterSpec, StorageClusterStatus};
pub use node::{StorageNode, StorageNodeSpec, StorageNodeStatus};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

/// API group of every resource here.
pub const GROUP: &str = "storage.forebay.io";
/// API version of every resource here.
pub const VERSION: &str = "v1alpha1";
/// Name of the CSI driver.
pub const DRIVER: &str = "csi.forebay.io";

/// The definitions, in the order in which they are to be applied.
#[must_use]
pub fn definitions() -> Vec<CustomResourceDefinition> {
    vec![StorageCluster::crd(), StorageNode::crd()]
}
