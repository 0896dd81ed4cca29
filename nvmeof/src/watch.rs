//! Changes between two reads of sysfs.

use std::collections::BTreeMap;

use crate::nqn::Nqn;
use crate::sysfs::{AnaState, ControllerState, Found, FoundSubsystem, NamespaceId, Sysfs};

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A controller is new.
    Appeared {
        /// The kernel's name.
        controller: String,
        /// Its state.
        state: ControllerState,
    },
    /// A controller is gone: it was disconnected, or removed by the kernel (`ctrl_loss_tmo`).
    Gone {
        /// The kernel's name.
        controller: String,
    },
    /// A controller's state has changed.
    State {
        /// The kernel's name.
        controller: String,
        /// Before.
        from: ControllerState,
        /// Now.
        to: ControllerState,
    },
    /// The ANA state of a controller's path to the namespace; `None` if it has no path.
    Ana {
        /// The kernel's name.
        controller: String,
        /// Before.
        from: Option<AnaState>,
        /// Now.
        to: Option<AnaState>,
    },
    /// The namespace has appeared or disappeared.
    Namespace {
        /// Whether it exists.
        present: bool,
    },
    /// The namespace's size in bytes.
    Size {
        /// Before.
        from: u64,
        /// Now.
        to: u64,
    },
    /// The first path was gained, or the last one lost: whether any path accepts I/O.
    Usable {
        /// Whether any does.
        usable: bool,
    },
}

/// The state that is compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    controllers: BTreeMap<String, (ControllerState, Option<AnaState>)>,
    size_bytes: Option<u64>,
    usable: bool,
}

/// Watches the paths to one namespace. The kernel does not notify waiting processes of a change of `ana_state` or
/// `state` in sysfs, so they are polled; a poll takes less than a millisecond.
#[derive(Clone, Debug)]
pub struct Watch {
    sysfs: Sysfs,
    nqn: Nqn,
    namespace: NamespaceId,
    seen: Seen,
}

impl Watch {
    /// A watch that has read nothing yet: the first [`Watch::poll`] reports everything that exists.
    #[must_use]
    pub fn new(sysfs: Sysfs, nqn: Nqn, namespace: NamespaceId) -> Self {
        Self { sysfs, nqn, namespace, seen: Seen::default() }
    }

    /// Reads sysfs, and returns the changes since the last read, controllers first.
    pub fn poll(&mut self) -> Vec<Change> {
        let now = self.look(&self.sysfs.read());
        let changes = changes(&self.seen, &now);
        self.seen = now;
        changes
    }

    /// Whether any path to the namespace accepted I/O at the last poll.
    #[must_use]
    pub fn usable(&self) -> bool {
        self.seen.usable
    }

    /// How many controllers accepted I/O at the last poll, and how many there were.
    #[must_use]
    pub fn paths(&self) -> (usize, usize) {
        let takes_io = |(state, ana): &&(ControllerState, Option<AnaState>)| {
            *state == ControllerState::Live && ana.as_ref().is_none_or(AnaState::takes_io)
        };
        let up = if self.seen.usable { self.seen.controllers.values().filter(takes_io).count() } else { 0 };
        (up, self.seen.controllers.len())
    }

    /// The ANA states of all paths at the last poll, without duplicates, as the kernel names them.
    #[must_use]
    pub fn ana_states(&self) -> Vec<String> {
        let states =
            self.seen.controllers.values().filter_map(|(_, ana)| ana.as_ref().map(AnaState::to_string));
        states.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    }

    fn look(&self, found: &Found) -> Seen {
        let Some(subsystem) = found.subsystem(&self.nqn) else { return Seen::default() };
        let namespace = found.namespace(&self.nqn, &self.namespace).ok();
        let nsid = namespace.map(|n| n.nsid);
        Seen {
            controllers: controllers(subsystem, nsid),
            size_bytes: namespace.map(|n| n.size_bytes),
            usable: nsid.is_some_and(|nsid| subsystem.takes_io(nsid)),
        }
    }
}

fn controllers(
    subsystem: &FoundSubsystem,
    nsid: Option<u32>,
) -> BTreeMap<String, (ControllerState, Option<AnaState>)> {
    let one = |controller: &crate::sysfs::Controller| {
        let path = controller.paths.iter().find(|path| Some(path.nsid) == nsid);
        (controller.name.clone(), (controller.state.clone(), path.map(|path| path.ana_state.clone())))
    };
    subsystem.controllers.iter().map(one).collect()
}

fn changes(before: &Seen, now: &Seen) -> Vec<Change> {
    let mut changes = Vec::new();
    for controller in before.controllers.keys().filter(|name| !now.controllers.contains_key(*name)) {
        changes.push(Change::Gone { controller: controller.clone() });
    }
    for (name, (state, ana)) in &now.controllers {
        let controller = || name.clone();
        let known = before.controllers.get(name);
        match known {
            None => changes.push(Change::Appeared { controller: controller(), state: state.clone() }),
            Some((from, _)) if from != state => {
                changes.push(Change::State {
                    controller: controller(),
                    from: from.clone(),
                    to: state.clone(),
                });
            }
            Some(_) => {}
        }
        let from = known.and_then(|(_, ana)| ana.clone());
        if from != *ana {
            changes.push(Change::Ana { controller: controller(), from, to: ana.clone() });
        }
    }
    match (before.size_bytes, now.size_bytes) {
        (None, Some(_)) => changes.push(Change::Namespace { present: true }),
        (Some(_), None) => changes.push(Change::Namespace { present: false }),
        (Some(from), Some(to)) if from != to => changes.push(Change::Size { from, to }),
        _ => {}
    }
    if before.usable != now.usable {
        changes.push(Change::Usable { usable: now.usable });
    }
    changes
}
