//! The operator of Forebay: makes StorageClusters run.

pub mod crds;
