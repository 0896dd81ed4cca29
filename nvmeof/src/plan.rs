//! What has to be done so that what is wanted is: a pure comparison.

use std::collections::BTreeSet;

use crate::keyring::KeySerial;
use crate::limits::PATHS_MAX;
use crate::options::{FabricPath, Subsystem, Transport};
use crate::sysfs::{Controller, Found};

/// What to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Paths to connect, in the order they were wanted.
    pub connect: Vec<FabricPath>,
    /// Paths to connect although a controller goes there, since that has not the TLS that is wanted: it goes afterwards.
    pub replace: Vec<FabricPath>,
    /// Controllers that are wanted and there, lost ones that the kernel reconnects among them.
    pub keep: Vec<String>,
    /// Controllers that are not wanted.
    pub disconnect: Vec<String>,
}

/// Why nothing may be done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPlanned {
    /// A subsystem that is not wanted by any path is to be disconnected as such.
    #[error("no path to {0} is given")]
    NoPath(String),
    /// More than any real setup has.
    #[error("{0} paths are given; at most {PATHS_MAX} are taken")]
    TooManyPaths(usize),
    /// This node has it connected already, as another host. The kernel would make one device of the paths of both, and half of
    /// our commands would go out as that host's, which reservations refuse, or worse.
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
    /// Several paths would be several devices.
    #[error(
        "several paths are given, but native multipath is off (nvme_core.multipath): switch it on, or give one path"
    )]
    MultipathOff,
    /// What is to be kept from the network would go over it.
    #[error("TLS is wanted, and {0} has none: leave that path out, or TLS")]
    InClear(Box<FabricPath>),
}

/// Compares. `tls` is the key of TLS where that is wanted.
///
/// # Errors
/// When what is wanted must not be done as things are.
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
        // Of two that go the same way one is enough.
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

/// TLS is for all paths or none.
pub(crate) fn check_transports<'a>(
    wanted: &Subsystem,
    paths: impl IntoIterator<Item = &'a &'a FabricPath>,
) -> Result<(), NotPlanned> {
    let clear = paths.into_iter().find(|path| wanted.tls.is_some() && path.transport != Transport::Tcp);
    clear.map_or(Ok(()), |path| Err(NotPlanned::InClear(Box::new((*path).clone()))))
}
