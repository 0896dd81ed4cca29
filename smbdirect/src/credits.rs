//! Credits ([MS-SMBD] 3.1.5.1, 3.1.5.9): numbers only.
//!
//! A credit of ours stands for a receive that the peer has posted and announced, and the other way round. Every message but
//! those of the negotiation costs its sender one.

use crate::disconnect::Misbehaviour;
use crate::limits;

/// Where both sides stand; for metrics and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credits {
    /// Messages that we may send.
    pub send: u32,
    /// Receives posted and not completed.
    pub posted: u32,
    /// Those of them that the peer knows of.
    pub announced: u32,
    /// How many of them it wants to know of, as far as we go along.
    pub target: u32,
}

/// What the peer granted us.
#[derive(Debug, Default)]
pub(crate) struct SendCredits {
    held: u32,
}

impl SendCredits {
    pub(crate) fn held(&self) -> u32 {
        self.held
    }

    pub(crate) fn granted(&mut self, credits: u16) -> Result<(), Misbehaviour> {
        let held = self.held + u32::from(credits);
        if held > limits::SEND_CREDITS_MAX {
            return Err(Misbehaviour::TooManyCredits { held });
        }
        self.held = held;
        Ok(())
    }

    /// Pays for a message that grants `granting`. The rule of rules: the last credit is not spent without giving one.
    pub(crate) fn spend(&mut self, granting: u16) {
        assert!(self.held > 1 || (self.held == 1 && granting > 0), "the caller has looked whether it may");
        self.held -= 1;
    }
}

/// What we grant the peer.
#[derive(Debug)]
pub(crate) struct ReceiveCredits {
    posted: u32,
    announced: u32,
    target: u32,
    max: u32,
}

impl ReceiveCredits {
    pub(crate) fn new(max: u16) -> Self {
        Self { posted: 0, announced: 0, target: 0, max: max.into() }
    }

    pub(crate) fn posted(&mut self, count: u16) {
        self.posted += u32::from(count);
    }

    /// The peer said how many it wants in all.
    pub(crate) fn requested(&mut self, credits: u16) {
        self.target = u32::from(credits).min(self.max);
    }

    /// A message of the negotiation came: it needs a receive, but no credit.
    pub(crate) fn consume_unannounced(&mut self) {
        self.posted = self.posted.saturating_sub(1);
    }

    /// Any other message came.
    pub(crate) fn consume(&mut self) -> Result<(), Misbehaviour> {
        self.announced = self.announced.checked_sub(1).ok_or(Misbehaviour::WithoutCredit)?;
        self.posted -= 1;
        Ok(())
    }

    /// Credits to grant with a message that is about to go; `last` where it takes our last send credit.
    pub(crate) fn grantable(&self, last: bool) -> u16 {
        // [MS-SMBD] 3.1.5.9: only what is posted and not yet announced.
        let available = self.posted - self.announced;
        let missing = self.target.saturating_sub(self.announced);
        // The same section lets the target be exceeded so that the last send credit can be spent. With two credits in
        // hand a peer can answer by granting us one without spending its own last, which would call for another grant.
        let needed = if last { limits::LAST_CREDIT_FLOOR.saturating_sub(self.announced).max(1) } else { 0 };
        available.min(missing.max(needed)).min(u16::MAX.into()) as u16
    }

    pub(crate) fn grant(&mut self, credits: u16) {
        self.announced += u32::from(credits);
        assert!(self.announced <= self.posted, "only posted receives are announced");
    }

    /// Whether the peer has so few left that it should be granted some without delay.
    pub(crate) fn refill_due(&self) -> bool {
        self.announced <= self.target / limits::REFILL_DIVISOR && self.grantable(false) > 0
    }

    /// Whether the peer can send anything.
    pub(crate) fn any_announced(&self) -> bool {
        self.announced > 0
    }

    pub(crate) fn snapshot(&self, send: &SendCredits) -> Credits {
        Credits { send: send.held, posted: self.posted, announced: self.announced, target: self.target }
    }
}
