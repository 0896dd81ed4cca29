//! Holds a namespace against all other hosts: which host may take it, and whether this host still has it.
//!
//! The rules apply in whatever order hosts start, stop and return:
//! * The reservation is of type Exclusive Access, so the target refuses every command of a host that is not the holder. There
//!   is one writer.
//! * A host may take it only from an *earlier epoch of the same instance*, and only by preempt-and-abort, which completes after
//!   it has ended the commands that the earlier epoch still has in flight.
//! * The preempt uses a *pending* key, which the target keeps even if this host fails. Our own key replaces it after we have
//!   received the response. An instance that finds its pending key, in the same start or a later one, has not received the
//!   response and waits until the earlier holder is cut off.
//! * An instance that finds a later epoch of itself, or its own epoch on another host, steps back. If it finds another
//!   instance, it changes nothing.
//! * Each step is decided from a fresh report, so that two hosts that start at the same time detect each other.

use crate::device::{ReservationError, Reservations};
use crate::host::HostId;
use crate::key::{Epoch, InstanceHash, ReservationKey};
use crate::limits::ACQUIRE_STEPS_MAX;
use crate::report::{Registrant, Report, ReservationType};

/// The instance that acquires the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Me {
    /// The instance.
    pub instance: InstanceHash,
    /// Its epoch.
    pub epoch: Epoch,
    /// The host identifier that the subsystem is connected with.
    pub host: HostId,
    /// The same instance before its cluster was known. Its keys count as earlier epochs if their number is lower.
    pub former: Option<InstanceHash>,
    /// A key that belongs to no epoch of ours but may be preempted anyway: an administrator has declared that the server with
    /// this key is permanently gone.
    pub adopts: Option<ReservationKey>,
}

/// How a key relates to this instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Belongs to an epoch of this instance.
    Epoch(Epoch),
    /// Belongs to this instance before its cluster was known.
    Former(Epoch),
    /// To be adopted.
    Adopted,
    /// Any other key.
    Stranger,
}

impl Me {
    /// An instance that takes over only from its own earlier epochs.
    #[must_use]
    pub fn new(instance: InstanceHash, epoch: Epoch, host: HostId) -> Self {
        Self { instance, epoch, host, former: None, adopts: None }
    }

    fn standing(&self, key: ReservationKey) -> Standing {
        if let Some(epoch) = key.epoch_of(self.instance) {
            return Standing::Epoch(epoch);
        }
        if self.adopts.is_some_and(|adopted| key.is_same_start(adopted)) {
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

    /// Our key until the commands of the hosts that we preempted have ended.
    #[must_use]
    pub fn pending_key(&self) -> ReservationKey {
        ReservationKey::pending(self.instance, self.epoch)
    }

    /// Whether the host that registered this key had confirmed that the commands of the previous holder have ended. For a key
    /// to be adopted, this is unknown.
    fn is_settled(&self, key: ReservationKey) -> bool {
        let settled = |instance| key.settled_epoch_of(instance).is_some();
        settled(self.instance) || self.former.is_some_and(settled)
    }
}

/// Why the namespace is not ours. Nothing on it has changed, except possibly our own registration.
#[derive(Debug, thiserror::Error)]
pub enum NotAcquired {
    /// A later epoch of this instance is registered: it was started elsewhere since, and this one is outdated.
    #[error(
        "epoch {theirs} of this instance has the namespace (host {host}); this is epoch {ours} and steps back"
    )]
    Superseded {
        /// Our epoch.
        ours: Epoch,
        /// The later epoch.
        theirs: Epoch,
        /// The host that runs it.
        host: HostId,
    },
    /// The same epoch was started twice.
    #[error(
        "epoch {epoch} of this instance runs on another host ({host}), too: an epoch must be started once"
    )]
    Twin {
        /// The epoch.
        epoch: Epoch,
        /// The other host.
        host: HostId,
    },
    /// A host is registered with a key that belongs to no epoch of this instance.
    #[error(
        "host {host} is registered with the key {key}, which is not this instance's: another server or cluster uses the \
         namespace; if that no longer exists, adopt the namespace from this key (pool.nvmeof.adopt_key), or clear its reservations"
    )]
    Stranger {
        /// The host.
        host: HostId,
        /// Its key.
        key: ReservationKey,
    },
    /// We hold a reservation of another type. No user of this crate acquires one.
    #[error("this host holds a reservation of another type ({0:?}): release it")]
    OtherType(ReservationType),
    /// Other hosts kept changing the state on which each decision was based.
    #[error("the reservation kept changing while it was taken")]
    Restless,
    /// A command failed.
    #[error(transparent)]
    Reservation(#[from] ReservationError),
}

/// How a namespace was acquired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// No commands of an earlier holder are in flight.
    Settled {
        /// The namespace was taken from an earlier epoch; that machine may still have its file system in memory.
        preempted: bool,
    },
    /// We hold it with the pending key: we have not confirmed that the commands of the earlier holder have ended. Wait until
    /// that holder is certainly cut off, then call [`settle`]. Until then, data that is read may change, and data that is
    /// written may be overwritten.
    Pending,
}

/// The result of a check of the reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// We hold it.
    Held,
    /// We do not hold it. Stop writing immediately, and do not take it again in this epoch unless requested: another host may
    /// have written since.
    Lost(Loss),
}

/// How a reservation was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// Another host holds it.
    #[error("host {host} holds the reservation, with the key {key}")]
    Taken {
        /// The host.
        host: HostId,
        /// Its key.
        key: ReservationKey,
    },
    /// No host holds a reservation: the target was restarted and has lost it, or it was cleared.
    #[error("no host holds a reservation: the target has lost it, or it was cleared")]
    Forgotten,
    /// We hold it, but with another key: another process on this node took it for another epoch.
    #[error(
        "this host holds the reservation with the key {0}: another process of this instance runs on this node"
    )]
    OtherKey(ReservationKey),
    /// We hold it, but commands of an earlier holder may not have ended.
    #[error("this host holds the reservation, but commands of the former holder may not have ended")]
    Pending,
    /// We hold it, but it does not exclude other hosts.
    #[error("this host holds the reservation, but as {0:?}")]
    OtherType(ReservationType),
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Register(ReservationKey),
    /// Replaces the key of our registration.
    Replace {
        old: ReservationKey,
        new: ReservationKey,
    },
    /// With our pending key.
    Preempt(ReservationKey),
    /// With our key as registered.
    Reserve(ReservationKey),
    /// Replaces the pending key with our own key.
    Settle,
    /// We hold it, but an earlier holder's commands may be in flight.
    Outwait,
    Done,
}

/// What this call has established about commands that earlier holders have in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Former {
    /// Nothing: if our pending key is registered, it was registered before this call.
    Unknown,
    /// Our pending key was registered in this call, and it displaced no holder.
    Untouched,
    /// All commands of the hosts that it preempted have ended, as the target's response confirms.
    Ended,
}

impl Former {
    /// The state after a step has succeeded.
    fn after(self, step: Step, me: &Me) -> Self {
        match step {
            Step::Register(key) if key == me.pending_key() => Self::Untouched,
            // The pending key of another start carries the same meaning as ours.
            Step::Replace { old, new } if new == me.pending_key() && me.is_settled(old) => Self::Untouched,
            // The response does not cover the commands of hosts that a holder of a pending key has preempted.
            Step::Preempt(old) if self != Self::Unknown && me.is_settled(old) => Self::Ended,
            Step::Replace { .. } | Step::Preempt(_) => Self::Unknown,
            Step::Reserve(_) if self == Self::Untouched => Self::Ended,
            Step::Register(_) | Step::Reserve(_) | Step::Settle | Step::Outwait | Step::Done => self,
        }
    }
}

/// Takes the namespace, or returns why it cannot. Blocks until the target responds; on a preemption, the target waits for the
/// commands of the host that loses the namespace.
///
/// If a command gets no response ([`ReservationError::NoPath`]), call it again: the next call continues from the state on the
/// target.
///
/// # Errors
/// If the namespace may not be taken, or the target refuses.
pub fn acquire(target: &dyn Reservations, me: &Me) -> Result<Acquired, NotAcquired> {
    let (mut preempted, mut former) = (false, Former::Unknown);
    for _ in 0..ACQUIRE_STEPS_MAX {
        let step = next(&target.report()?, me, former)?;
        preempted |= matches!(step, Step::Preempt(_) | Step::Replace { .. });
        let done = match step {
            Step::Done => return Ok(Acquired::Settled { preempted }),
            Step::Outwait => return Ok(Acquired::Pending),
            Step::Register(key) => target.register(key),
            Step::Replace { old, new } => target.replace(old, new),
            Step::Preempt(old) => target.preempt_and_abort(old, me.pending_key()),
            Step::Reserve(key) => target.reserve(key),
            Step::Settle => target.replace(me.pending_key(), me.key()),
        };
        match done {
            Ok(()) => former = former.after(step, me),
            // Another host was faster: the next report shows which one.
            Err(ReservationError::Conflict) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(NotAcquired::Restless)
}

/// Completes [`Acquired::Pending`] after every earlier holder and all its commands are certainly cut off. Returns whether the
/// namespace is ours.
///
/// # Errors
/// If the target refuses or cannot be reached: call it again.
pub fn settle(target: &dyn Reservations, me: &Me) -> Result<Check, ReservationError> {
    let before = check(target, me)?;
    if before != Check::Lost(Loss::Pending) {
        return Ok(before);
    }
    match target.replace(me.pending_key(), me.key()) {
        Ok(()) | Err(ReservationError::Conflict) => check(target, me),
        Err(error) => Err(error),
    }
}

/// Replaces the key of an earlier epoch of this host with ours, and takes nothing: a process of that epoch that still runs here
/// stops when it detects the new key.
///
/// # Errors
/// If the namespace may not be taken, or the target refuses.
pub fn announce(target: &dyn Reservations, me: &Me) -> Result<(), NotAcquired> {
    let Step::Replace { old, new } = next(&target.report()?, me, Former::Unknown)? else { return Ok(()) };
    match target.replace(old, new) {
        Ok(()) | Err(ReservationError::Conflict) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether the namespace is still ours.
///
/// # Errors
/// If the target cannot be reached; this says nothing about the reservation.
pub fn check(target: &dyn Reservations, me: &Me) -> Result<Check, ReservationError> {
    Ok(judge(&target.report()?, me))
}

/// Releases the namespace on an orderly shutdown. Does nothing if it is not ours.
///
/// # Errors
/// If the target refuses.
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

fn next(report: &Report, me: &Me, former: Former) -> Result<Step, NotAcquired> {
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
            // A different host by its identity, but possibly the same machine: only a higher number shows which one is later.
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
    let holder = report.holder().zip(report.reservation);
    let puts_out = match holder {
        Some((holder, _)) if holder.host == me.host => None,
        Some((holder, _)) => Some(holder.key),
        // Earlier epochs that are registered could reserve before us. Without a holder, the preempt unregisters them and takes
        // nothing.
        None => earlier,
    };
    // NVMe Base 7.2, 7.5: a host that acquires must be registered, and it has one key.
    let (ours, pending) = (me.key(), me.pending_key());
    let wanted = if puts_out.is_some() { pending } else { ours };
    let mine = match mine {
        None => return Ok(Step::Register(wanted)),
        Some(key) if key == pending || key == wanted => key,
        // Our key must be pending, too: the start that registered the old key may have preempted another host.
        Some(old) if !me.is_settled(old) => return Ok(Step::Replace { old, new: pending }),
        Some(old) => return Ok(Step::Replace { old, new: wanted }),
    };
    match (holder, puts_out) {
        (Some((holder, kind)), _) if holder.host == me.host => match (kind, former) {
            // Earlier epochs may still be registered; this gives them no access.
            (ReservationType::ExclusiveAccess, _) if mine == ours => Ok(Step::Done),
            (ReservationType::ExclusiveAccess, Former::Ended) => Ok(Step::Settle),
            (ReservationType::ExclusiveAccess, _) => Ok(Step::Outwait),
            (other, _) => Err(NotAcquired::OtherType(other)),
        },
        (_, Some(key)) => Ok(Step::Preempt(key)),
        (_, None) => Ok(Step::Reserve(mine)),
    }
}

fn judge(report: &Report, me: &Me) -> Check {
    let Some((holder, kind)) = report.holder().zip(report.reservation) else {
        return Check::Lost(Loss::Forgotten);
    };
    let Registrant { host, key, .. } = *holder;
    if host != me.host {
        return Check::Lost(Loss::Taken { host, key });
    }
    match kind {
        _ if key != me.key() && key != me.pending_key() => Check::Lost(Loss::OtherKey(key)),
        ReservationType::ExclusiveAccess if key == me.key() => Check::Held,
        ReservationType::ExclusiveAccess => Check::Lost(Loss::Pending),
        other => Check::Lost(Loss::OtherType(other)),
    }
}

#[cfg(test)]
#[path = "acquire_tests.rs"]
mod tests;
