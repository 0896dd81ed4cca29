//! A real Kubernetes: upstream's own binaries, built from pinned Go modules, no registry and no container engine.
//!
//! The control plane runs as plain processes on this machine: alone on loopback, which is all that a test of a
//! reconciler needs, or joined to the lab's network where guests are its nodes.

pub mod cluster;
pub mod control_plane;
pub mod kubectl;
pub mod node;
pub mod oci;
pub mod pki;
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
