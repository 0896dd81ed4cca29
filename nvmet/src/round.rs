//! One round: reads the state, plans and executes, until nothing more can be done.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Instant;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tracing::{debug, info};

use crate::config::Config;
use crate::limits::{LOCK_TIME_MAX, PASSES_MAX};
use crate::observed::Observed;
use crate::plan::{Plan, Problem, Subject, Task, Tells, Wanted, plan};
use crate::source::{Grounds, Surveyor, There};
use crate::step::{Hands, Step};

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

/// The state after a round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) problems: Vec<Problem>,
    pub(crate) ports: Vec<PortState>,
    pub(crate) namespaces: Vec<NamespaceState>,
    /// Number of tasks that were executed.
    pub(crate) done: usize,
}

/// A wanted port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortState {
    pub(crate) shown: String,
    /// Whether it carries all subsystems that it can carry.
    pub(crate) up: bool,
}

/// A wanted namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamespaceState {
    pub(crate) nqn: String,
    pub(crate) id: u32,
    pub(crate) device: String,
    /// Whether it is offered, and its backing device or file exists.
    pub(crate) up: bool,
    /// 0 if unknown.
    pub(crate) bytes: u64,
}

/// The observed state and the planned changes.
#[derive(Debug)]
pub(crate) struct Look {
    pub(crate) observed: Observed,
    pub(crate) grounds: Grounds,
    pub(crate) plan: Plan,
}

/// Reads the state and plans, without changing anything.
pub(crate) fn look(
    root: &Path,
    config: &Config,
    wanted: &Wanted,
    surveyor: &mut Surveyor,
) -> io::Result<Look> {
    let observed = Observed::read(root)?;
    let grounds = match wanted.subsystems.is_empty() {
        true => Grounds::default(),
        false => surveyor.survey(config, &observed, Instant::now()),
    };
    let plan = plan(wanted, &observed, &grounds.by_key);
    Ok(Look { observed, grounds, plan })
}

/// Applies the configuration as far as possible.
///
/// # Errors
/// If nvmet cannot be read.
pub(crate) fn round(
    root: &Path,
    config: &Config,
    wanted: &Wanted,
    surveyor: &mut Surveyor,
    hands: &mut dyn Hands,
) -> io::Result<Report> {
    let mut done = 0;
    let mut failed = Vec::new();
    for _ in 0..PASSES_MAX {
        let looked = look(root, config, wanted, surveyor)?;
        let before = done;
        failed = work(&looked.plan.tasks, surveyor, hands, &mut done);
        // Tasks that failed would fail again.
        if done == before {
            let mut report = report(&looked, config, wanted, failed);
            report.done = done;
            return Ok(report);
        }
    }
    let looked = look(root, config, wanted, surveyor)?;
    let mut report = report(&looked, config, wanted, failed);
    report.done = done;
    Ok(report)
}

fn work(tasks: &[Task], surveyor: &mut Surveyor, hands: &mut dyn Hands, done: &mut usize) -> Vec<Problem> {
    let mut failed: Vec<Problem> = Vec::new();
    let mut blocked: BTreeSet<&Subject> = BTreeSet::new();
    for task in tasks {
        if blocked.contains(&task.subject) || task.needs.as_ref().is_some_and(|needs| blocked.contains(needs))
        {
            continue;
        }
        let taken = task.steps.iter().try_for_each(|step| {
            debug!(%step, "step");
            hands.take(step).map_err(|error| (step, error))
        });
        match taken {
            Ok(()) => {
                *done += 1;
                if !matches!(task.tells, Some(Tells::Size(_))) {
                    info!(subject = %task.subject, "{}", task.what);
                }
                if let (Some(tells), Subject::Namespace(key)) = (task.tells, &task.subject) {
                    surveyor.reported(key, tells);
                }
            }
            Err((step, error)) => {
                blocked.insert(&task.subject);
                failed.push(Problem { subject: task.subject.clone(), why: explain(step, &error) });
            }
        }
    }
    failed
}

/// Explains a kernel error at this step.
fn explain(step: &Step, error: &io::Error) -> String {
    let errno = Errno::from_io_error(error);
    let reason = match (step, errno) {
        (Step::Link { at, .. }, Some(errno)) if at.starts_with("ports/") => match errno {
            Errno::ADDRNOTAVAIL => "this machine has no such address yet",
            Errno::ADDRINUSE => "something else listens there",
            Errno::NODEV => "no RDMA device has this address",
            Errno::INVAL | Errno::PROTONOSUPPORT => {
                "the kernel has not got this transport: load nvmet-tcp or nvmet-rdma"
            }
            _ => "",
        },
        (Step::Set(at, _), Some(Errno::NOENT | Errno::ACCESS | Errno::PERM))
            if at.ends_with("/resv_enable") =>
        {
            "the kernel's target has no reservations: Linux 6.13 or later is needed"
        }
        (Step::MakeFile { .. } | Step::GrowFile { .. }, Some(errno)) => match errno {
            Errno::NOSPC | Errno::FBIG => "there is no space for it",
            Errno::OPNOTSUPP => "its file system cannot set space aside (fallocate)",
            _ => "",
        },
        (Step::WriteThrough(_), Some(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL)) => {
            "its file system cannot make every write durable: use ext4 or XFS, or accept that by allow_volatile_cache"
        }
        _ => "",
    };
    match reason {
        "" => format!("{step}: {error}"),
        reason => format!("{reason} ({step}: {error})"),
    }
}

pub(crate) fn report(looked: &Look, config: &Config, wanted: &Wanted, failed: Vec<Problem>) -> Report {
    let Look { observed, grounds, plan } = looked;
    let ours =
        |nqn: &str| observed.subsystems.get(nqn).is_some_and(|found| wanted.owner.owns_subsystem(found));
    let carried = |port: &crate::plan::Port| {
        let Ok(address) = port.address else { return false };
        let found = observed.ports.values().find(|found| {
            found.referrals.contains(&wanted.owner.referral())
                && found.transport == port.config.transport.as_str()
                && found.address.parse() == Ok(address)
                && found.service == port.config.service.to_string()
        });
        let wanted = config.subsystems.iter().map(|subsystem| subsystem.nqn.as_str());
        let mut offered = wanted.filter(|nqn| ours(nqn)).peekable();
        found.is_some_and(|found| {
            offered.peek().is_some()
                && offered.all(|nqn| found.subsystems.values().any(|carried| carried == nqn))
        })
    };
    let namespaces = config.subsystems.iter().flat_map(|subsystem| {
        subsystem.namespaces.iter().map(|namespace| {
            let nqn = subsystem.nqn.as_str();
            let found = observed.subsystems.get(nqn).filter(|_| ours(nqn));
            let found = found.and_then(|found| found.namespaces.get(&namespace.id));
            let bytes = match grounds.by_key.get(&(nqn.to_owned(), namespace.id)).map(|ground| &ground.there)
            {
                Some(There::Offered { bytes }) => Some(*bytes),
                _ => None,
            };
            let is_right = |found: &crate::observed::Namespace| {
                found.enabled && found.uuid == Some(namespace.uuid) && found.reservations == Some(true)
            };
            NamespaceState {
                nqn: nqn.to_owned(),
                id: namespace.id,
                device: namespace.source.path().display().to_string(),
                up: bytes.is_some() && found.is_some_and(is_right),
                bytes: bytes.unwrap_or(0),
            }
        })
    });
    Report {
        problems: plan.problems.iter().cloned().chain(failed).collect(),
        ports: wanted
            .ports
            .iter()
            .map(|port| PortState { shown: port.config.to_string(), up: carried(port) })
            .collect(),
        namespaces: namespaces.collect(),
        done: 0,
    }
}

/// Excludes other targets from reading and changing nvmet at the same time, until it is dropped. All targets on this machine,
/// in containers or not, lock nvmet's root.
///
/// # Errors
/// If another target holds the lock for too long.
pub(crate) fn lock(root: &Path) -> io::Result<File> {
    let file = File::open(root)?;
    let until = Instant::now() + LOCK_TIME_MAX;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            Err(Errno::WOULDBLOCK) => {
                return Err(io::Error::other("another forebay-target is at work and does not end"));
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}
