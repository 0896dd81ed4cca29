//! Problems of a running server, and the addresses at which clients can reach it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::address::Addresses;
use crate::advertise::{self, Advertised};
use crate::catalog::Catalog;
use crate::interfaces;
use crate::keytab::KeytabFile;
use crate::namespace;
use crate::rdma::later::Later;
use crate::rdma::listener::Listening;
use crate::tls::Certificates;

/// Looks for problems, each time it is queried.
pub struct Health {
    /// Volumes.
    pub catalog: Arc<Catalog>,
    /// Of the admin API over TLS.
    pub certificates: Option<Arc<Certificates>>,
    /// For Kerberos.
    pub keytab: Option<Arc<KeytabFile>>,
    /// As configured.
    pub advertise: Vec<Advertised>,
    /// Of the instance.
    pub addresses: Arc<Addresses>,
    /// The addresses of the SMB listeners.
    pub listening: Vec<SocketAddr>,
    /// The current RDMA listeners.
    pub rdma: Listening,
    /// RDMA devices that the server would use but cannot open in this process; `None` if it would use none.
    pub later: Option<Later>,
    /// Namespaces of the pools that have one.
    pub namespaces: Vec<Arc<namespace::State>>,
}

impl Health {
    /// The transports on which clients can connect now.
    #[must_use]
    pub fn transports(&self) -> Vec<String> {
        let rdma = (!self.rdma.addresses().is_empty()).then_some("rdma");
        ["tcp"].into_iter().chain(rdma).map(str::to_owned).collect()
    }

    /// The addresses that clients should mount.
    #[must_use]
    pub fn advertised(&self) -> Vec<String> {
        advertise::resolve(&self.advertise, &self.locals(), &self.listening).0
    }

    fn locals(&self) -> Vec<advertise::Local> {
        if self.advertise.iter().any(Advertised::chooses) { interfaces::locals() } else { Vec::new() }
    }

    /// One sentence for each problem. It may query file systems, so do not call it on threads that must not block.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (pool, name) in self.catalog.unserved() {
            problems.push(format!("volume {name} of pool {pool} is not served: the log says why"));
        }
        if let Err(error) = self.catalog.pools() {
            problems.push(error.to_string());
        }
        let now = Instant::now();
        problems.extend(self.namespaces.iter().flat_map(|namespace| namespace.problems(now)));
        problems.extend(self.addresses.problem());
        let locals = self.locals();
        for entry in advertise::resolve(&self.advertise, &locals, &self.listening).1 {
            problems.push(format!("server.advertise: {entry} is no address of this machine that is listened on and that other machines reach"));
        }
        problems.extend(self.certificates.as_ref().and_then(|certificates| certificates.problem()));
        problems.extend(self.keytab.as_ref().and_then(|keytab| keytab.problem()));
        problems
    }
}
