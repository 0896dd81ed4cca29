//! Holding a namespace against all other hosts: who may take it, and whether we still have it.
//!
//! The rules, whatever the order in which hosts come, go and return:
//! * The reservation is of exclusive access, so the target refuses all that is not the holder's: there is one writer.
//! * It may be taken from an *earlier epoch of the same instance* only, and by preempt-and-abort, which ends what the
//!   earlier one still has on its way before it answers.
//! * Who sees a later epoch, or the same one on another host, steps back. Who sees another instance touches nothing.
//! * Each step is decided anew on a report, so that two who come at once see each other.

use crate::device::{ReservationError, Reservations};
use crate::host::HostId;
use crate::key::{Epoch, InstanceHash, ReservationKey};
use crate::limits::ACQUIRE_STEPS_MAX;
use crate::report::{Registrant, Report, ReservationType};

/// Who wants the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Me {
    /// Which instance.
    pub instance: InstanceHash,
    /// Which epoch of it.
    pub epoch: Epoch,
    /// The host identifier that the subsystem is connected with.
    pub host: HostId,
    /// The same instance before it was told of which cluster it is: its keys are those of earlier epochs, where their number
    /// is lower.
    pub former: Option<InstanceHash>,
    /// A key that is no epoch of ours, and may be preempted all the same: a person has said that whoever has it is gone for
    /// good.
    pub adopts: Option<ReservationKey>,
}

/// What a key is to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Of an epoch of this instance.
    Epoch(Epoch),
    /// Of this instance, before it was told of which cluster it is.
    Former(Epoch),
    /// To be adopted.
    Adopted,
    /// Any other.
    Stranger,
}

impl Me {
    /// An instance that goes on with nothing but earlier epochs of its own.
    #[must_use]
    pub fn new(instance: InstanceHash, epoch: Epoch, host: HostId) -> Self {
        Self { instance, epoch, host, former: None, adopts: None }
    }

    fn standing(&self, key: ReservationKey) -> Standing {
        if let Some(epoch) = key.epoch_of(self.instance) {
            return Standing::Epoch(epoch);
        }
        if self.adopts == Some(key) {
            return Standing::Adopted;
        }
        let former = self.former.and_then(|former| key.epoch_of(former));
        former.map_or(Standing::Stranger, Standing::Former)
    }

    /// Our key.
    #[must_use]
    pub fn key(&self) -> ReservationKey {
        ReservationKey::new(self.instance, self.epoch)
    }
}

/// Why the namespace is not ours. Nothing on it was changed, but our own registration perhaps.
#[derive(Debug, thiserror::Error)]
pub enum NotAcquired {
    /// A later epoch of this instance is registered: it was started elsewhere since, and we are the old one.
    #[error(
        "epoch {theirs} of this instance has the namespace (host {host}); this is epoch {ours} and steps back"
    )]
    Superseded {
        /// Ours.
        ours: Epoch,
        /// The later one.
        theirs: Epoch,
        /// Where it runs.
        host: HostId,
    },
    /// The same epoch was started twice.
    #[error(
        "epoch {epoch} of this instance runs on another host ({host}), too: an epoch must be started once"
    )]
    Twin {
        /// Which epoch.
        epoch: Epoch,
        /// Where the other is.
        host: HostId,
    },
    /// Somebody who is no epoch of this instance is registered.
    #[error(
        "host {host} is registered with the key {key}, which is not this instance's: another server or cluster uses the \
         namespace; if that is gone for good, adopt the namespace from this key (pool.nvmeof.adopt_key), or clear its reservations"
    )]
    Stranger {
        /// Which host.
        host: HostId,
        /// Its key.
        key: ReservationKey,
    },
    /// We hold a reservation of another type. Nobody who uses this crate takes one.
    #[error("this host holds a reservation of another type ({0:?}): release it")]
    OtherType(ReservationType),
    /// Others kept changing what we had just decided on.
    #[error("the reservation kept changing while it was taken")]
    Restless,
    /// A command failed.
    #[error(transparent)]
    Reservation(#[from] ReservationError),
}

/// How a namespace came to be ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquired {
    /// It was taken from an earlier epoch, whose machine may still have a file system of it in memory.
    pub preempted: bool,
}

/// What a look at the reservation says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// It is ours.
    Held,
    /// It is not. Stop writing at once, and do not take it again in this epoch without being told to: another may have
    /// written since.
    Lost(Loss),
}

/// How a reservation was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// Another host holds it.
    #[error("host {host} holds the reservation, with the key {key}")]
    Taken {
        /// Which host.
        host: HostId,
        /// Its key.
        key: ReservationKey,
    },
    /// Nobody holds one: the target was restarted and has forgotten it, or somebody cleared it.
    #[error("nobody holds a reservation: the target has forgotten it, or somebody has cleared it")]
    Forgotten,
    /// It is ours, but with another key: another process on this node took it for another epoch.
    #[error(
        "this host holds the reservation with the key {0}: another process of this instance runs on this node"
    )]
    OtherKey(ReservationKey),
    /// It is ours, but does not keep others out.
    #[error("this host holds the reservation, but as {0:?}")]
    OtherType(ReservationType),
}

/// The next thing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Register,
    Replace(ReservationKey),
    Preempt(ReservationKey),
    Reserve,
    Done,
}

/// Takes the namespace, or says why not. Blocks for as long as the target takes, which on a preemption waits for the
/// commands of the host that loses it.
///
/// # Errors
/// When it may not be taken, or the target refuses.
pub fn acquire(target: &dyn Reservations, me: &Me) -> Result<Acquired, NotAcquired> {
    let mut preempted = false;
    for _ in 0..ACQUIRE_STEPS_MAX {
        let step = next(&target.report()?, me)?;
        preempted |= matches!(step, Step::Preempt(_) | Step::Replace(_));
        let done = match step {
            Step::Done => return Ok(Acquired { preempted }),
            Step::Register => target.register(me.key()),
            Step::Replace(old) => target.replace(old, me.key()),
            Step::Preempt(old) => target.preempt_and_abort(old, me.key()),
            Step::Reserve => target.reserve(me.key()),
        };
        match done {
            // Another was quicker: the next report says who.
            Ok(()) | Err(ReservationError::Conflict) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(NotAcquired::Restless)
}

/// Shows our key where this host has one of an earlier epoch, and takes nothing: a process of that epoch that still runs here
/// ends itself when it sees it.
///
/// # Errors
/// When the namespace may not be taken, or the target refuses.
pub fn announce(target: &dyn Reservations, me: &Me) -> Result<(), NotAcquired> {
    let Step::Replace(old) = next(&target.report()?, me)? else { return Ok(()) };
    match target.replace(old, me.key()) {
        Ok(()) | Err(ReservationError::Conflict) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether the namespace is still ours.
///
/// # Errors
/// When the target cannot be asked; that says nothing of the reservation.
pub fn check(target: &dyn Reservations, me: &Me) -> Result<Check, ReservationError> {
    Ok(judge(&target.report()?, me))
}

/// Gives the namespace back, for an orderly end. Nothing to do where it is not ours.
///
/// # Errors
/// When the target refuses.
pub fn release(target: &dyn Reservations, me: &Me) -> Result<(), ReservationError> {
    let report = target.report()?;
    if judge(&report, me) == Check::Held {
        target.release(me.key())?;
    }
    let ours = |r: &&Registrant| r.host == me.host && r.key == me.key();
    match report.registrants.iter().find(ours) {
        Some(_) => target.unregister(me.key()),
        None => Ok(()),
    }
}

fn next(report: &Report, me: &Me) -> Result<Step, NotAcquired> {
    let mut mine = None;
    let mut earlier = None;
    for registrant in &report.registrants {
        let Registrant { host, key, .. } = *registrant;
        let standing = me.standing(key);
        match standing {
            Standing::Stranger => return Err(NotAcquired::Stranger { host, key }),
            Standing::Epoch(theirs) if theirs > me.epoch => {
                return Err(NotAcquired::Superseded { ours: me.epoch, theirs, host });
            }
            // Another host by its identity, and perhaps the same machine: only a later number says who is the later one.
            Standing::Former(theirs) if theirs >= me.epoch => {
                return Err(NotAcquired::Superseded { ours: me.epoch, theirs, host });
            }
            Standing::Epoch(_) | Standing::Former(_) | Standing::Adopted => {}
        }
        if host == me.host {
            mine = Some(key);
        } else if standing == Standing::Epoch(me.epoch) {
            return Err(NotAcquired::Twin { epoch: me.epoch, host });
        } else {
            earlier = Some(key);
        }
    }
    // NVMe Base 7.2, 7.5: who acquires must be registered, and a host has one key.
    match mine {
        None => return Ok(Step::Register),
        Some(key) if key != me.key() => return Ok(Step::Replace(key)),
        Some(_) => {}
    }
    match (report.holder(), report.reservation) {
        (Some(holder), Some(kind)) if holder.host == me.host => match kind {
            // Earlier epochs may still be registered; that gives them no access.
            ReservationType::ExclusiveAccess => Ok(Step::Done),
            other => Err(NotAcquired::OtherType(other)),
        },
        (Some(holder), _) => Ok(Step::Preempt(holder.key)),
        // Registered earlier ones could reserve before us. With nobody holding, this unregisters them and takes nothing.
        (None, _) => Ok(earlier.map_or(Step::Reserve, Step::Preempt)),
    }
}

fn judge(report: &Report, me: &Me) -> Check {
    match (report.holder(), report.reservation) {
        (Some(holder), _) if holder.host != me.host => {
            Check::Lost(Loss::Taken { host: holder.host, key: holder.key })
        }
        (Some(holder), _) if holder.key != me.key() => Check::Lost(Loss::OtherKey(holder.key)),
        (Some(_), Some(ReservationType::ExclusiveAccess)) => Check::Held,
        (Some(_), Some(other)) => Check::Lost(Loss::OtherType(other)),
        _ => Check::Lost(Loss::Forgotten),
    }
}

#[cfg(test)]
#[path = "acquire_tests.rs"]
mod tests;
