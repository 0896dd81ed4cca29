//! Computes the changes from the current connections to the required ones: a pure comparison.

use std::collections::BTreeSet;

use crate::keyring::KeySerial;
use crate::limits::PATHS_MAX;
use crate::options::{FabricPath, Subsystem, Transport};
use crate::sysfs::{Controller, Found};

/// Changes to make.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Paths to connect, in the order of the request.
    pub connect: Vec<FabricPath>,
    /// Paths to connect although a controller exists, because it does not use the required TLS: it is disconnected afterwards.
    pub replace: Vec<FabricPath>,
    /// Controllers that are required and exist, including lost ones that the kernel reconnects.
    pub keep: Vec<String>,
    /// Controllers that are not required.
    pub disconnect: Vec<String>,
}

/// Why no changes may be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPlanned {
    /// No path to the subsystem is given: it must be disconnected explicitly.
    #[error("no path to {0} is given")]
    NoPath(String),
    /// More than any real setup has.
    #[error("{0} paths are given; at most {PATHS_MAX} are taken")]
    TooManyPaths(usize),
    /// This node has connected it already, as another host. The kernel would make one device of both hosts' paths, and half of
    /// our commands would be sent as that host, which reservations refuse, or worse.
    #[error(
        "{controller} connects {nqn} already, as host {host}: disconnect it, or use that subsystem from one host only"
    )]
    OtherHost {
        /// The kernel's name.
        controller: String,
        /// The subsystem.
        nqn: String,
        /// Its host NQN.
        host: String,
    },
    /// Several paths would yield several devices.
    #[error(
        "several paths are given, but native multipath is off (nvme_core.multipath): switch it on, or give one path"
    )]
    MultipathOff,
    /// Traffic that must be encrypted would be sent in the clear.
    #[error("TLS is wanted, and {0} has none: leave that path out, or TLS")]
    InClear(Box<FabricPath>),
}

/// Compares. `tls` is the TLS key if TLS is required.
///
/// # Errors
/// If the required connections must not be made in the current state.
pub fn plan(
    wanted: &Subsystem,
    tls: Option<KeySerial>,
    paths: &[FabricPath],
    found: &Found,
) -> Result<Plan, NotPlanned> {
    let paths: Vec<&FabricPath> = {
        let mut seen = BTreeSet::new();
        paths.iter().filter(|path| seen.insert(*path)).collect()
    };
    if paths.is_empty() {
        return Err(NotPlanned::NoPath(wanted.nqn.to_string()));
    }
    if paths.len() > PATHS_MAX {
        return Err(NotPlanned::TooManyPaths(paths.len()));
    }
    if paths.len() > 1 && found.multipath == Some(false) {
        return Err(NotPlanned::MultipathOff);
    }
    check_transports(wanted, &paths)?;
    let there: Vec<&Controller> = found
        .subsystems
        .iter()
        .filter(|subsystem| subsystem.nqn == wanted.nqn.as_str())
        .flat_map(|subsystem| &subsystem.controllers)
        .filter(|controller| !controller.state.is_going())
        .collect();
    let ours = wanted.host.nqn().as_str();
    if let Some(other) = there.iter().find(|c| c.host_nqn.as_deref() != Some(ours)) {
        return Err(NotPlanned::OtherHost {
            controller: other.name.clone(),
            nqn: wanted.nqn.to_string(),
            host: other.host_nqn.clone().unwrap_or_else(|| "unknown".into()),
        });
    }
    let mut plan = Plan::default();
    let mut kept = BTreeSet::new();
    for path in paths {
        // One of two controllers for the same path is enough.
        let mut going = there.iter().filter(|c| c.goes(path) && !kept.contains(&c.name)).peekable();
        let any = going.peek().is_some();
        match going.find(|controller| controller.has_tls(tls)) {
            Some(controller) => {
                kept.insert(controller.name.clone());
                plan.keep.push(controller.name.clone());
            }
            None if any => plan.replace.push(path.clone()),
            None => plan.connect.push(path.clone()),
        }
    }
    plan.disconnect = there.iter().map(|c| c.name.clone()).filter(|name| !kept.contains(name)).collect();
    Ok(plan)
}

/// TLS applies to all paths or none.
pub(crate) fn check_transports<'a>(
    wanted: &Subsystem,
    paths: impl IntoIterator<Item = &'a &'a FabricPath>,
) -> Result<(), NotPlanned> {
    let clear = paths.into_iter().find(|path| wanted.tls.is_some() && path.transport != Transport::Tcp);
    clear.map_or(Ok(()), |path| Err(NotPlanned::InClear(Box::new((*path).clone()))))
}
