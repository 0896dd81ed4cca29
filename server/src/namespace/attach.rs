//! The order in which a pool's namespace is taken: a state machine that does one thing at a time, on whatever carries it out.
//!
//! * Nothing is read for a decision, written or mounted before the reservation is ours, and what an earlier holder had on its way
//!   has ended: those steps want an [`Owned`], which is made only here, of the target's answer.
//! * Nothing that an earlier server left in this machine's memory is written after the reservation was not ours all the time.
//! * The epoch is read before the log is replayed: one that is older than the pool's writes nothing.
//! * Once a file system of ours is known to be there, a start that fails keeps the reservation. The machine of the server
//!   before may still have that file system in memory, and only a reservation refuses what it writes of it. It is released
//!   where the epoch's record names another owner and no host held the reservation before: the owner needs it.

use forebay_nvmeof::{Acquired, Check, Loss};

use super::record::{Claim, PoolRecord, Refused};

/// That the reservation was taken by this start.
#[derive(Debug)]
pub(crate) struct Owned(());

/// What an earlier server of this machine has left at the pool's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// Nothing is mounted there.
    Nothing,
    /// The pool's file system, which works.
    Mounted,
    /// The pool's file system, which was ended.
    Ended,
}

/// What is on the namespace.
#[derive(Debug)]
pub(crate) enum Found<F> {
    /// This pool's file system.
    Ours,
    /// Nothing, or a file system of this pool that was not finished (`force`), and one may be made.
    Blank { force: bool },
    /// Nothing that we may use.
    NotOurs(F),
}

/// What carries the steps out. Each fails for reasons of its own.
pub(crate) trait World {
    /// Why a step failed.
    type Failure: std::fmt::Debug + From<Refused> + From<Loss>;

    /// Connects the namespace and opens its device.
    fn connect(&mut self) -> Result<(), Self::Failure>;
    /// Whether the reservation is ours.
    fn check(&mut self) -> Result<Check, Self::Failure>;
    /// What is mounted at the pool's directory; another file system is a failure.
    fn leftover(&mut self) -> Result<Leftover, Self::Failure>;
    /// Shows our key where this host has one of an earlier epoch; takes nothing from another host.
    fn announce(&mut self) -> Result<(), Self::Failure>;
    /// Takes the reservation, which says whether anything of an earlier holder's may still be on its way.
    fn acquire(&mut self) -> Result<Acquired, Self::Failure>;
    /// Waits until every earlier holder is cut off for certain, with all that it had on its way.
    fn outwait(&mut self) -> Result<(), Self::Failure>;
    /// Notes at the target that this was waited for; whether the reservation is ours.
    fn settle(&mut self) -> Result<Check, Self::Failure>;
    /// Ends what is mounted without writing anything of it, and unmounts it.
    fn end_leftover(&mut self) -> Result<(), Self::Failure>;
    /// Looks at the first blocks.
    fn look(&mut self, owned: &Owned) -> Result<Found<Self::Failure>, Self::Failure>;
    /// Makes a file system.
    fn format(&mut self, owned: &Owned, force: bool) -> Result<(), Self::Failure>;
    /// The last user of the pool, from the file system that is not mounted, without replaying its log; none where that does not
    /// show one.
    fn recorded_before_replay(&mut self, owned: &Owned) -> Result<Option<PoolRecord>, Self::Failure>;
    /// Mounts it, which replays its log.
    fn mount(&mut self, owned: &Owned) -> Result<(), Self::Failure>;
    /// The last user of the pool, from what is mounted.
    fn recorded(&mut self, owned: &Owned) -> Result<Option<PoolRecord>, Self::Failure>;
    /// Notes that what earlier starts had in memory may be lost.
    fn distrust_starts(&mut self, owned: &Owned) -> Result<(), Self::Failure>;
    /// Records which instance uses the pool now.
    fn record(&mut self, owned: &Owned, record: &PoolRecord) -> Result<(), Self::Failure>;
    /// Whether the reservation is still ours: what came before may have taken longer than it may go unconfirmed.
    fn confirm(&mut self, owned: &Owned) -> Result<Check, Self::Failure>;
    /// Begins to watch it.
    fn watch(&mut self, owned: &Owned) -> Result<(), Self::Failure>;
    /// Unmounts what is mounted, if anything.
    fn unmount(&mut self);
    /// Gives the reservation back.
    fn release(&mut self, owned: Owned);
}

/// How far it is.
#[derive(Debug)]
pub(crate) enum Attach<F> {
    /// To be connected.
    Connecting,
    /// To be asked whether the reservation was ours all the time.
    Checking,
    /// To be looked at what is mounted.
    Searching { before: Check },
    /// A server of an earlier epoch may still run on this machine: it stops when it sees our key.
    Announcing { leftover: Leftover },
    /// What is mounted is not to be relied on.
    Ending { unreserved: bool },
    /// What is mounted is to be gone on with, if the reservation is still ours. It is not taken: between the two looks another
    /// may have had it.
    GoingOn,
    /// Nothing is mounted here, and the reservation is to be taken. `unreserved`: no host held it when this start looked. Where
    /// this host did, an earlier start may have preempted another host.
    Taking { unreserved: bool },
    /// It is ours, but an earlier holder may have something on its way, which is to be waited for. A start that dies here leaves
    /// that to the next.
    Outwaiting,
    /// That has ended, and is to be noted.
    Settling,
    /// It is ours; what is on the namespace is to be looked at. `unreserved`: no host held it before.
    Looking { owned: Owned, unreserved: bool },
    /// A file system is to be made.
    Formatting { owned: Owned, force: bool },
    /// The record is to be read before the log is replayed.
    Peeking { owned: Owned, unreserved: bool },
    /// To be mounted.
    Mounting { owned: Owned },
    /// The record is to be read from what is mounted. `fresh`: mounted by us.
    Judging { owned: Owned, fresh: bool },
    /// Earlier starts are to be distrusted.
    Distrusting { owned: Owned, record: bool },
    /// Our own record is to be written.
    Recording { owned: Owned },
    /// The reservation is to be confirmed.
    Confirming { owned: Owned },
    /// The watch is to begin.
    Watching { owned: Owned },
    /// All is done.
    Attached,
    /// It failed with the file system mounted, which is to be unmounted. The reservation stays.
    Unmounting { failure: F },
    /// It failed since reservation or pool are another's: what is mounted must write nothing.
    Abandoning { failure: F },
    /// It failed, nothing of ours is there and no host held the reservation before this start: it is free again.
    Releasing { owned: Owned, failure: F },
    /// It failed.
    Failed(F),
}

/// Goes on, or to a phase that a failure leads to.
macro_rules! attempt {
    ($step:expr, $failed:expr) => {
        match $step {
            Ok(value) => value,
            Err(failure) => return $failed(failure),
        }
    };
}

impl<F: std::fmt::Debug + From<Refused> + From<Loss>> Attach<F> {
    /// The next thing, and what it leads to.
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
                    // Only where the reservation was ours all the time is what it has in memory still true.
                    (Check::Held, Leftover::Mounted) => Self::GoingOn,
                    (_, Leftover::Nothing) => Self::Taking { unreserved },
                    (_, Leftover::Mounted | Leftover::Ended) => Self::Ending { unreserved },
                }
            }
            Self::Announcing { leftover } => {
                // No more than that: from the moment in which we take it from another host, this one's kernel may write again.
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
                    // The owner would find a foreign key and not start. Nothing was written.
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
                // What fails here is the same failure: whatever stays mounted is refused by the target.
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

    /// All steps.
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
