//! The stage of the server's life cycle: serving, draining, drained.

use std::sync::atomic::{AtomicU8, Ordering};

use tokio::sync::watch;

const SERVING: u8 = 0;
const DRAINING: u8 = 1;
const DRAINED: u8 = 2;

/// The requests of an administrator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Wish {
    drain: bool,
    exit: bool,
}

/// The state of the server's life cycle, shared by everything that reads or changes it.
#[derive(Debug)]
pub struct Life {
    phase: AtomicU8,
    wish: watch::Sender<Wish>,
}

impl Default for Life {
    fn default() -> Self {
        Self { phase: AtomicU8::new(SERVING), wish: watch::Sender::default() }
    }
}

impl Life {
    /// Whether it accepts no more connections and requests.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.phase.load(Ordering::Relaxed) >= DRAINING
    }

    /// Whether it is draining and no connection is left.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == DRAINED
    }

    pub(crate) fn begin_draining(&self) {
        self.phase.fetch_max(DRAINING, Ordering::Relaxed);
    }

    pub(crate) fn set_drained(&self) {
        self.phase.fetch_max(DRAINED, Ordering::Relaxed);
    }

    /// Requests draining, and with `exit` also the end after it. Earlier requests stay in force.
    pub fn drain(&self, exit: bool) {
        self.begin_draining();
        self.wish.send_modify(|wish| *wish = Wish { drain: true, exit: wish.exit || exit });
    }

    /// Returns once draining is requested.
    pub(crate) async fn drain_asked(&self) {
        self.asked(|wish| wish.drain).await;
    }

    /// Returns once the end is requested.
    pub(crate) async fn exit_asked(&self) {
        self.asked(|wish| wish.exit).await;
    }

    async fn asked(&self, of: impl Fn(&Wish) -> bool) {
        // The sender lives as long as `self`.
        let _ = self.wish.subscribe().wait_for(|wish| of(wish)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn drain_requests_are_kept_and_can_only_escalate() {
        let life = Life::default();
        assert!(!life.is_draining());
        life.drain(false);
        assert!(life.is_draining() && !life.is_drained());
        life.drain_asked().await;
        life.drain(true);
        life.drain(false);
        life.exit_asked().await;
        life.set_drained();
        life.begin_draining();
        assert!(life.is_drained());
    }
}
