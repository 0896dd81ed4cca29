//! The order in which a pool's namespace is taken: a state machine that runs one step at a time, on any [`World`].
//!
//! * Nothing is read for a decision, written or mounted before the reservation is ours and all I/O of an earlier holder has
//!   ended. Those steps require an [`Owned`], which only this module makes, from the target's answer.
//! * If the reservation was not ours all the time, nothing that an earlier server left in this machine's memory is written.
//! * The epoch is read before the log is replayed: a start with an epoch older than the pool's writes nothing.
//! * Once a file system of ours is known to exist, a start that fails keeps the reservation. The previous server's machine
//!   may still have that file system in memory, and only a reservation makes the target refuse its writes. The reservation
//!   is released if the epoch's record names another owner and no host held the reservation before: the owner needs it.

use forebay_nvmeof::{Acquired, Check, Loss};

use super::record::{Claim, PoolRecord, Refused};

/// Proof that this start took the reservation.
#[derive(Debug)]
pub(crate) struct Owned(());

/// What an earlier server of this machine left at the pool's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// Nothing is mounted there.
    Nothing,
    /// The pool's file system, in working order.
    Mounted,
    /// The pool's file system, which was shut down.
    Ended,
}

/// The content of the namespace.
#[derive(Debug)]
pub(crate) enum Found<F> {
    /// This pool's file system.
    Ours,
    /// Nothing, or an unfinished file system of this pool (`force`), and a file system may be made.
    Blank { force: bool },
    /// Nothing that we may use.
    NotOurs(F),
}

/// Executes the steps. Each implementation has its own errors.
pub(crate) trait World {
    /// Why a step failed.
    type Failure: std::fmt::Debug + From<Refused> + From<Loss>;

    /// Connects the namespace and opens its device.
    fn connect(&mut self) -> Result<(), Self::Failure>;
    /// Whether the reservation is ours.
    fn check(&mut self) -> Result<Check, Self::Failure>;
    /// What is mounted at the pool's directory; an unrelated file system is a failure.
    fn leftover(&mut self) -> Result<Leftover, Self::Failure>;
    /// Registers our key if this host has one of an earlier epoch; takes nothing from another host.
    fn announce(&mut self) -> Result<(), Self::Failure>;
    /// Takes the reservation; returns whether I/O of an earlier holder may still be in flight.
    fn acquire(&mut self) -> Result<Acquired, Self::Failure>;
    /// Waits until every earlier holder is certainly cut off and all of its I/O has ended.
    fn outwait(&mut self) -> Result<(), Self::Failure>;
    /// Records at the target that the wait is over; returns whether the reservation is ours.
    fn settle(&mut self) -> Result<Check, Self::Failure>;
    /// Shuts down the mounted file system without writing any of its data, and unmounts it.
    fn end_leftover(&mut self) -> Result<(), Self::Failure>;
    /// Examines the content of the namespace.
    fn look(&mut self, owned: &Owned) -> Result<Found<Self::Failure>, Self::Failure>;
    /// Makes a file system.
    fn format(&mut self, owned: &Owned, force: bool) -> Result<(), Self::Failure>;
    /// The last user of the pool, read from the unmounted file system without replaying its log; `None` if that shows none.
    fn recorded_before_replay(&mut self, owned: &Owned) -> Result<Option<PoolRecord>, Self::Failure>;
    /// Mounts it, which replays its log.
    fn mount(&mut self, owned: &Owned) -> Result<(), Self::Failure>;
    /// The last user of the pool, read from the mounted file system.
    fn recorded(&mut self, owned: &Owned) -> Result<Option<PoolRecord>, Self::Failure>;
    /// Records that what earlier starts had in memory may be lost.
    fn distrust_starts(&mut self, owned: &Owned) -> Result<(), Self::Failure>;
    /// Records which instance uses the pool now.
    fn record(&mut self, owned: &Owned, record: &PoolRecord) -> Result<(), Self::Failure>;
    /// Whether the reservation is still ours: the steps before may have taken longer than it may go unconfirmed.
    fn confirm(&mut self, owned: &Owned) -> Result<Check, Self::Failure>;
    /// Starts watching the reservation.
    fn watch(&mut self, owned: &Owned) -> Result<(), Self::Failure>;
    /// Unmounts what is mounted, if anything.
    fn unmount(&mut self);
    /// Releases the reservation.
    fn release(&mut self, owned: Owned);
}

/// The current phase.
#[derive(Debug)]
pub(crate) enum Attach<F> {
    /// Connecting the namespace.
    Connecting,
    /// Checking whether the reservation was ours all the time.
    Checking,
    /// Looking for a mounted file system.
    Searching { before: Check },
    /// A server of an earlier epoch may still run on this machine: it stops when it detects our key.
    Announcing { leftover: Leftover },
    /// Shutting down the mounted file system, which must not be relied on.
    Ending { unreserved: bool },
    /// Continuing with the mounted file system, if the reservation is still ours. The reservation is not acquired: another
    /// host may have held it between the two checks.
    GoingOn,
    /// Acquiring the reservation; nothing is mounted here. `unreserved`: no host held it when this start looked. If this
    /// host held it, an earlier start may have preempted another host.
    Taking { unreserved: bool },
    /// The reservation is ours, but I/O of an earlier holder may be in flight: waiting for it to end. If this start dies
    /// here, the next start waits.
    Outwaiting,
    /// That I/O has ended: recording this at the target.
    Settling,
    /// The reservation is ours: examining the namespace. `unreserved`: no host held it before.
    Looking { owned: Owned, unreserved: bool },
    /// Making a file system.
    Formatting { owned: Owned, force: bool },
    /// Reading the record before the log is replayed.
    Peeking { owned: Owned, unreserved: bool },
    /// Mounting the file system.
    Mounting { owned: Owned },
    /// Reading the record from the mounted file system. `fresh`: mounted by us.
    Judging { owned: Owned, fresh: bool },
    /// Marking earlier starts as unreliable.
    Distrusting { owned: Owned, record: bool },
    /// Writing our own record.
    Recording { owned: Owned },
    /// Confirming the reservation.
    Confirming { owned: Owned },
    /// Starting the watch.
    Watching { owned: Owned },
    /// Done.
    Attached,
    /// Failed with the file system mounted: unmounting it. The reservation stays.
    Unmounting { failure: F },
    /// Failed because the reservation or the pool is not ours: the mounted file system must write nothing.
    Abandoning { failure: F },
    /// Failed. Nothing of ours exists and no host held the reservation before this start: releasing it.
    Releasing { owned: Owned, failure: F },
    /// Failed.
    Failed(F),
}

/// Continues, or returns the phase that a failure leads to.
macro_rules! attempt {
    ($step:expr, $failed:expr) => {
        match $step {
            Ok(value) => value,
            Err(failure) => return $failed(failure),
        }
    };
}

impl<F: std::fmt::Debug + From<Refused> + From<Loss>> Attach<F> {
    /// Runs the next step; returns the phase that it leads to.
    pub(crate) fn step<W: World<Failure = F>>(self, claim: &Claim, world: &mut W) -> Self {
        let unmounting = |failure| Self::Unmounting { failure };
        match self {
            Self::Connecting => {
                attempt!(world.connect(), Self::Failed);
                Self::Checking
            }
            Self::Checking => Self::Searching { before: attempt!(world.check(), Self::Failed) },
            Self::Searching { before } => {
                let leftover = attempt!(world.leftover(), Self::Failed);
                let unreserved = before == Check::Lost(Loss::Forgotten);
                match (before, leftover) {
                    (Check::Lost(Loss::OtherKey(_)), _) => Self::Announcing { leftover },
                    // The memory of a mounted file system is valid only if the reservation was ours all the time.
                    (Check::Held, Leftover::Mounted) => Self::GoingOn,
                    (_, Leftover::Nothing) => Self::Taking { unreserved },
                    (_, Leftover::Mounted | Leftover::Ended) => Self::Ending { unreserved },
                }
            }
            Self::Announcing { leftover } => {
                // Only announce the key: once we take the reservation from another host, this host's kernel may write again.
                attempt!(world.announce(), Self::Failed);
                match leftover {
                    Leftover::Nothing => Self::Taking { unreserved: false },
                    Leftover::Mounted | Leftover::Ended => Self::Ending { unreserved: false },
                }
            }
            Self::Ending { unreserved } => {
                attempt!(world.end_leftover(), Self::Failed);
                Self::Taking { unreserved }
            }
            Self::GoingOn => match attempt!(world.check(), Self::Failed) {
                Check::Held => Self::Judging { owned: Owned(()), fresh: false },
                Check::Lost(loss) => Self::Failed(loss.into()),
            },
            Self::Taking { unreserved } => match attempt!(world.acquire(), Self::Failed) {
                Acquired::Settled { preempted } => {
                    Self::Looking { owned: Owned(()), unreserved: unreserved && !preempted }
                }
                Acquired::Pending => Self::Outwaiting,
            },
            Self::Outwaiting => {
                attempt!(world.outwait(), Self::Failed);
                Self::Settling
            }
            Self::Settling => match attempt!(world.settle(), Self::Failed) {
                Check::Held => Self::Looking { owned: Owned(()), unreserved: false },
                Check::Lost(loss) => Self::Failed(loss.into()),
            },
            Self::Looking { owned, unreserved } => match attempt!(world.look(&owned), Self::Failed) {
                Found::Ours => Self::Peeking { owned, unreserved },
                Found::Blank { force } => Self::Formatting { owned, force },
                Found::NotOurs(failure) if unreserved => Self::Releasing { owned, failure },
                Found::NotOurs(failure) => Self::Failed(failure),
            },
            Self::Formatting { owned, force } => {
                attempt!(world.format(&owned, force), Self::Failed);
                Self::Mounting { owned }
            }
            Self::Peeking { owned, unreserved } => {
                let recorded = attempt!(world.recorded_before_replay(&owned), Self::Failed);
                match claim.judge(recorded.as_ref()) {
                    Ok(_) => Self::Mounting { owned },
                    // Otherwise the owner would find a foreign key and not start. Nothing was written.
                    Err(refused @ Refused::OtherOwner { .. }) if unreserved => {
                        Self::Releasing { owned, failure: refused.into() }
                    }
                    Err(refused) => Self::Failed(refused.into()),
                }
            }
            Self::Mounting { owned } => {
                attempt!(world.mount(&owned), Self::Failed);
                Self::Judging { owned, fresh: true }
            }
            Self::Judging { owned, fresh } => {
                let recorded = attempt!(world.recorded(&owned), unmounting);
                let abandoning = |refused: Refused| Self::Abandoning { failure: refused.into() };
                let record = attempt!(claim.judge(recorded.as_ref()), abandoning);
                match (fresh, record) {
                    (true, record) => Self::Distrusting { owned, record },
                    (false, true) => Self::Recording { owned },
                    (false, false) => Self::Confirming { owned },
                }
            }
            Self::Distrusting { owned, record } => {
                attempt!(world.distrust_starts(&owned), unmounting);
                if record { Self::Recording { owned } } else { Self::Confirming { owned } }
            }
            Self::Recording { owned } => {
                attempt!(world.record(&owned, &claim.ours), unmounting);
                Self::Confirming { owned }
            }
            Self::Confirming { owned } => match attempt!(world.confirm(&owned), unmounting) {
                Check::Held => Self::Watching { owned },
                Check::Lost(loss) => Self::Abandoning { failure: loss.into() },
            },
            Self::Watching { owned } => {
                attempt!(world.watch(&owned), unmounting);
                Self::Attached
            }
            Self::Unmounting { failure } => {
                world.unmount();
                Self::Failed(failure)
            }
            Self::Abandoning { failure } => {
                // Report the original failure: the target refuses the writes of whatever stays mounted.
                let _ = world.end_leftover();
                Self::Failed(failure)
            }
            Self::Releasing { owned, failure } => {
                world.release(owned);
                Self::Failed(failure)
            }
            end @ (Self::Attached | Self::Failed(_)) => end,
        }
    }

    /// Runs all steps.
    pub(crate) fn run<W: World<Failure = F>>(claim: &Claim, world: &mut W) -> Result<(), F> {
        let mut attach = Self::Connecting;
        loop {
            attach = match attach.step(claim, world) {
                Self::Attached => return Ok(()),
                Self::Failed(failure) => return Err(failure),
                under_way => under_way,
            };
        }
    }
}

#[cfg(test)]
#[path = "attach_tests.rs"]
mod tests;
