//! The operator of Forebay: runs StorageClusters.
//!
//! [`desired`] computes the desired state from the spec and the observed state, as a pure function; [`reconcile`] observes,
//! applies the difference and reports; [`run`] watches and triggers that on every change, in the one process that holds the
//! Lease.

pub mod admin;
pub mod brake;
pub mod certificates;
pub mod crds;
pub mod desired;
pub mod events;
pub mod http;
pub mod leader;
pub mod leases;
pub mod limits;
pub mod metrics;
pub mod observe;
pub mod placement;
pub mod progress;
pub mod reconcile;
pub mod reports;
pub mod run;
pub mod takeover;
pub mod teller;
