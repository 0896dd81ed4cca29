//! Credits ([MS-SMBD] 3.1.5.1, 3.1.5.9): numbers only.
//!
//! Each of our credits corresponds to a receive that the peer has posted and announced, and vice versa. Every message except
//! those of the negotiation costs its sender one.

use crate::disconnect::Misbehaviour;
use crate::limits;

/// Credits of both sides; for metrics and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credits {
    /// Messages that we may send.
    pub send: u32,
    /// Receives posted and not completed.
    pub posted: u32,
    /// Posted receives that were announced to the peer.
    pub announced: u32,
    /// Posted receives that the peer requested, within our limit.
    pub target: u32,
}

/// Credits that the peer granted us.
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

    /// Pays for a message that grants `granting` credits. The most important rule: the last credit must not be spent without
    /// granting one.
    pub(crate) fn spend(&mut self, granting: u16) {
        assert!(self.held > 1 || (self.held == 1 && granting > 0), "the caller has looked whether it may");
        self.held -= 1;
    }
}

/// Credits that we grant the peer.
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

    /// The peer requested a total number of credits.
    pub(crate) fn requested(&mut self, credits: u16) {
        self.target = u32::from(credits).min(self.max);
    }

    /// A message of the negotiation was received: it uses a receive, but no credit.
    pub(crate) fn consume_unannounced(&mut self) {
        self.posted = self.posted.saturating_sub(1);
    }

    /// Any other message was received.
    pub(crate) fn consume(&mut self) -> Result<(), Misbehaviour> {
        self.announced = self.announced.checked_sub(1).ok_or(Misbehaviour::WithoutCredit)?;
        self.posted -= 1;
        Ok(())
    }

    /// Credits to grant with the next message; `last` if the message takes our last send credit.
    pub(crate) fn grantable(&self, last: bool) -> u16 {
        // [MS-SMBD] 3.1.5.9: only what is posted and not yet announced.
        let available = self.posted - self.announced;
        let missing = self.target.saturating_sub(self.announced);
        // The same section allows exceeding the target so that the last send credit can be spent. With two credits a peer can
        // answer by granting us one without spending its own last, which would require another grant.
        let needed = if last { limits::LAST_CREDIT_FLOOR.saturating_sub(self.announced).max(1) } else { 0 };
        available.min(missing.max(needed)).min(u16::MAX.into()) as u16
    }

    pub(crate) fn grant(&mut self, credits: u16) {
        self.announced += u32::from(credits);
        assert!(self.announced <= self.posted, "only posted receives are announced");
    }

    /// Whether the peer has so few credits left that it should be granted some without delay.
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
