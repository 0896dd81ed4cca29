//! The operator of Forebay: makes StorageClusters run.
//!
//! [`desired`] says what ought to be, purely, from what is wanted and what is; [`reconcile`] looks, applies the difference
//! and tells; [`run`] watches and does that whenever something has changed, in the one process that holds the Lease.

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
