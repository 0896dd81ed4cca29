//! What a host has: RDMA devices and ports, network devices, NVMe drives, kernel facts.
//!
//! Everything is read from sysfs, procfs and a few files below a root that the caller names, so a container can read its
//! host's and a test a captured tree. Nothing is written, no program is called. A file that is missing, odd or
//! unreadable costs what it would have reported, never the rest: [`Inventory::oddities`] says which they were.
//!
//! Addresses are not in sysfs: the caller takes them from the network namespace it runs in and hands them to
//! [`assess`].

mod kernel;
mod limits;
mod modules;
mod net;
mod nvme;
mod order;
mod rdma;
mod tree;
mod usable;

use std::path::PathBuf;

pub use kernel::{Kernel, Presence};
pub use net::Netdev;
pub use nvme::NvmeDrive;
pub use rdma::{LinkLayer, RdmaDevice, RdmaPort, Transport};
pub use tree::Oddity;
pub use usable::{Addresses, Assessment, Unusable, assess};

use crate::tree::Tree;

/// A host with its file systems below some directory.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
}

/// What a host has, as it was at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// RDMA devices, in order of their name.
    pub rdma: Vec<RdmaDevice>,
    /// Network devices of the namespace that the sysfs shows, in order of their name.
    pub netdevs: Vec<Netdev>,
    /// Local NVMe drives, in order of their name.
    pub nvme: Vec<NvmeDrive>,
    /// Facts of the running kernel.
    pub kernel: Kernel,
    /// What could not be read or made sense of.
    pub oddities: Vec<Oddity>,
}

impl Host {
    /// The host with `sys`, `proc`, `lib/modules`, `boot` and `etc` in this directory; `/` for the host itself.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Reads it all. Takes milliseconds, but a driver that hangs can keep a read of sysfs from ending: call it where that
    /// does no harm.
    #[must_use]
    pub fn read(&self) -> Inventory {
        let tree = Tree::new(&self.root);
        let netdevs = net::read(&tree);
        let rdma = rdma::read(&tree, &netdevs);
        let nvme = nvme::read(&tree);
        let kernel = kernel::read(&tree);
        Inventory {
            rdma,
            netdevs: netdevs.into_iter().map(|n| n.netdev).collect(),
            nvme,
            kernel,
            oddities: tree.into_oddities(),
        }
    }
}
