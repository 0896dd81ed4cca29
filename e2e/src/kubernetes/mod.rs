//! A real Kubernetes: upstream's own binaries, built from pinned Go modules, without a registry or a container engine.
//!
//! The control plane runs as plain processes on this machine: either alone on loopback, which is sufficient to test a
//! reconciler, or connected to the lab's network with guests as nodes.

pub mod cluster;
pub mod control_plane;
pub mod external_storage;
pub mod kubectl;
pub mod node;
pub mod oci;
pub mod pki;
mod programs;
mod rdma;
pub mod room;
pub mod scenario;
pub mod service;
pub mod stage;
pub mod story;
mod takeover;
mod tap;
pub mod tools;
mod volumes;
pub mod workload;

pub use control_plane::{ControlPlane, LocalApiServer};
