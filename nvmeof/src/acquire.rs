//! Holding a namespace against all other hosts: which host may take it, and whether we still have it.
//!
//! The rules, whatever the order in which hosts come, go and return:
//! * The reservation is of exclusive access, so the target refuses all that is not the holder's: there is one writer.
//! * It may be taken from an *earlier epoch of the same instance* only, and by preempt-and-abort, which ends the
//!   commands that the earlier one still has in flight before it answers.
//! * This is done with a *pending* key, which the target keeps whatever becomes of us. Our own key replaces it once we have seen
//!   the answer. An instance that finds the pending key, in the same start or a later one, has not seen the answer, and waits
//!   until the earlier holder is cut off.
//! * An instance that sees a later epoch of itself, or the same one on another host, steps back. If it sees another instance, it
//!   touches nothing.
//! * Each step is decided again on a report, so that two that come at once see each other.

use crate::device::{ReservationError, Reservations};
use crate::host::HostId;
use crate::key::{Epoch, InstanceHash, ReservationKey};
use crate::limits::ACQUIRE_STEPS_MAX;
use crate::report::{Registrant, Report, ReservationType};

/// The instance that acquires the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Me {
    /// Which instance.
    pub instance: InstanceHash,
    /// Which epoch of it.
    pub epoch: Epoch,
    /// The host identifier that the subsystem is connected with.
    pub host: HostId,
    /// The same instance before it knew its cluster: its keys are those of earlier epochs, where their number
    /// is lower.
    pub former: Option<InstanceHash>,
    /// A key that is no epoch of ours, and may be preempted all the same: an administrator has declared that the server with
    /// this key is permanently gone.
    pub adopts: Option<ReservationKey>,
}

/// What a key is to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Of an epoch of this instance.
    Epoch(Epoch),
    /// Of this instance, before it knew its cluster.
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

    /// Our key until what was taken from others has ended.
    #[must_use]
    pub fn pending_key(&self) -> ReservationKey {
        ReservationKey::pending(self.instance, self.epoch)
    }

    /// Whether the host that registered this key had seen the end of what it took the namespace from. Of a key to be adopted it
    /// is unknown which of the two it is.
    fn is_settled(&self, key: ReservationKey) -> bool {
        let settled = |instance| key.settled_epoch_of(instance).is_some();
        settled(self.instance) || self.former.is_some_and(settled)
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
    /// A host is registered with a key of no epoch of this instance.
    #[error(
        "host {host} is registered with the key {key}, which is not this instance's: another server or cluster uses the \
         namespace; if that no longer exists, adopt the namespace from this key (pool.nvmeof.adopt_key), or clear its reservations"
    )]
    Stranger {
        /// Which host.
        host: HostId,
        /// Its key.
        key: ReservationKey,
    },
    /// We hold a reservation of another type. No user of this crate takes one.
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
pub enum Acquired {
    /// Nothing of an earlier holder's is on its way.
    Settled {
        /// It was taken from an earlier epoch; that machine may still have a file system of it in memory.
        preempted: bool,
    },
    /// It is ours by the pending key: the end of what an earlier holder had on its way was not seen. Wait until that is cut off
    /// for certain, and [`settle`]. Until then, what is read may change, and what is written may be overwritten.
    Pending,
}

/// What a look at the reservation says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// It is ours.
    Held,
    /// It is not. Stop writing at once, and do not take it again in this epoch without a request: another may have
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
    /// No host holds one: the target was restarted and has lost it, or it was cleared.
    #[error("no host holds a reservation: the target has lost it, or it was cleared")]
    Forgotten,
    /// It is ours, but with another key: another process on this node took it for another epoch.
    #[error(
        "this host holds the reservation with the key {0}: another process of this instance runs on this node"
    )]
    OtherKey(ReservationKey),
    /// It is ours, but what an earlier holder had on its way may not have ended.
    #[error(
        "this host holds the reservation, but commands of the former holder may not have ended"
    )]
    Pending,
    /// It is ours, but does not keep others out.
    #[error("this host holds the reservation, but as {0:?}")]
    OtherType(ReservationType),
}

/// The next thing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Register(ReservationKey),
    /// Gives our registration another key.
    Replace {
        old: ReservationKey,
        new: ReservationKey,
    },
    /// By our pending key.
    Preempt(ReservationKey),
    /// By our key as it is registered.
    Reserve(ReservationKey),
    /// Our own key takes the pending one's place.
    Settle,
    /// It is ours, but for what may be on its way.
    Outwait,
    Done,
}

/// What this call knows of what earlier holders have on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Former {
    /// Nothing: if our pending key is there, it was before.
    Unknown,
    /// Our pending key is there since this call, and it displaced no holder.
    Untouched,
    /// All that was put out by it has ended, as the target has answered.
    Ended,
}

impl Former {
    /// After a step was answered.
    fn after(self, step: Step, me: &Me) -> Self {
        match step {
            Step::Register(key) if key == me.pending_key() => Self::Untouched,
            // Another start's pending key says the same as ours.
            Step::Replace { old, new } if new == me.pending_key() && me.is_settled(old) => Self::Untouched,
            // The end of what the one with a pending key has put out is not what is answered.
            Step::Preempt(old) if self != Self::Unknown && me.is_settled(old) => Self::Ended,
            Step::Replace { .. } | Step::Preempt(_) => Self::Unknown,
            Step::Reserve(_) if self == Self::Untouched => Self::Ended,
            Step::Register(_) | Step::Reserve(_) | Step::Settle | Step::Outwait | Step::Done => self,
        }
    }
}

/// Takes the namespace, or says why not. Blocks for as long as the target takes, which on a preemption waits for the
/// commands of the host that loses it.
///
/// Where a command is not answered ([`ReservationError::NoPath`]), call it again: whatever was done, the next call goes on with it.
///
/// # Errors
/// When it may not be taken, or the target refuses.
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
            // Another host was quicker: the next report says which one.
            Err(ReservationError::Conflict) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(NotAcquired::Restless)
}

/// After [`Acquired::Pending`], when every earlier holder is cut off for certain, with all that it had on its way: whether the
/// namespace is ours.
///
/// # Errors
/// When the target refuses or cannot be asked: call it again.
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

/// Shows our key where this host has one of an earlier epoch, and takes nothing: a process of that epoch that still runs here
/// stops when it sees it.
///
/// # Errors
/// When the namespace may not be taken, or the target refuses.
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
            // Another host by its identity, and perhaps the same machine: only a later number shows which one is later.
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
        // Registered earlier ones could reserve before us. Without a holder, this unregisters them and takes nothing.
        None => earlier,
    };
    // NVMe Base 7.2, 7.5: a host that acquires must be registered, and it has one key.
    let (ours, pending) = (me.key(), me.pending_key());
    let wanted = if puts_out.is_some() { pending } else { ours };
    let mine = match mine {
        None => return Ok(Step::Register(wanted)),
        Some(key) if key == pending || key == wanted => key,
        // Ours has to be pending, too: the start that registered the old key may have preempted another host.
        Some(old) if !me.is_settled(old) => return Ok(Step::Replace { old, new: pending }),
        Some(old) => return Ok(Step::Replace { old, new: wanted }),
    };
    match (holder, puts_out) {
        (Some((holder, kind)), _) if holder.host == me.host => match (kind, former) {
            // Earlier epochs may still be registered; that gives them no access.
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
