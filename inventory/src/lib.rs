//! Inventory of a host: RDMA devices and ports, network devices, NVMe drives, kernel facts.
//!
//! Everything is read from sysfs, procfs and a few files below a root that the caller specifies, so a container can read its
//! host's tree and a test can read a captured one. Nothing is written, and no program is called. A file that is missing,
//! malformed or unreadable affects only its own facts: [`Inventory::oddities`] lists these files.
//!
//! Addresses are not in sysfs: the caller reads them from its own network namespace and passes them to [`assess`].

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

/// A host with its file systems below a root directory.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
}

/// Inventory of a host at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// RDMA devices, ordered by name.
    pub rdma: Vec<RdmaDevice>,
    /// Network devices of the namespace that the sysfs shows, ordered by name.
    pub netdevs: Vec<Netdev>,
    /// Local NVMe drives, ordered by name.
    pub nvme: Vec<NvmeDrive>,
    /// Facts of the running kernel.
    pub kernel: Kernel,
    /// Files that could not be read or parsed.
    pub oddities: Vec<Oddity>,
}

impl Host {
    /// Returns the host with `sys`, `proc`, `lib/modules`, `boot` and `etc` in this directory; `/` for the host itself.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Reads the inventory. Takes milliseconds, but a driver that hangs can block a read of sysfs: call this where blocking
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
