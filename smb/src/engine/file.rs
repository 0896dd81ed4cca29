//! The open files of a volume ([MS-FSA]): share modes, names, byte-range locks, and what clients cache of them.

pub(super) mod holder;
mod intervals;
pub(super) mod leased_directories;
pub(super) mod leases;
pub(super) mod links;
pub(super) mod local_open;
pub(super) mod locks;
pub(super) mod opener;
mod oplocks;
pub(super) mod paths;
pub(super) mod pins;
mod share;
pub(super) mod state;
pub(super) mod table;
