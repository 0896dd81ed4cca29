//! Opens that ended without a CLOSE, with their sessions or with an earlier start of the server. A client that reconnects
//! marks its handles to be opened again, but a request that is already on its way to the connection carries the old handle:
//! cifs.ko first checks the mark and then waits for the connection. If the server answered with STATUS_FILE_CLOSED, the
//! application would get EBADF. The client reads or writes again with a new handle if the connection ends before the
//! response, and queries attributes again with a valid handle if the response requests it.

use std::collections::{HashMap, VecDeque};

use crate::ids::FileId;
use crate::limits::{LOST_OPENS_MAX, RETRIES_PER_OPEN_MAX, RETURNS_PER_OPEN_MAX};

/// The lost opens of one volume, independent of those of other volumes.
#[derive(Default)]
pub(crate) struct LostOpens {
    /// Opens that this start has issued.
    own: Recent,
    /// Handles of earlier starts. Issued handles look like handles that a client makes up, so they are stored separately
    /// and cannot evict others.
    earlier: Recent,
}

/// The most recent opens.
#[derive(Default)]
struct Recent {
    opens: HashMap<FileId, Attempts>,
    /// Oldest first.
    order: VecDeque<FileId>,
}

/// Attempts made so far for an open. They are limited, so that a client that never opens it again gets its response in the
/// end.
#[derive(Default)]
struct Attempts {
    returns: u8,
    retries: u8,
}

impl Recent {
    fn note(&mut self, id: FileId) {
        if self.opens.insert(id, Attempts::default()).is_none() {
            self.order.push_back(id);
        }
        if self.order.len() > LOST_OPENS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.opens.remove(&oldest);
        }
    }
}

impl LostOpens {
    /// Records an open that ended with its session.
    pub(crate) fn note(&mut self, id: FileId) {
        self.own.note(id);
    }

    /// Whether to end the connection that reads or writes with this handle. `earlier`: an earlier start issued the handle.
    pub(crate) fn is_worth_a_return(&mut self, id: FileId, earlier: bool) -> bool {
        let Some(attempts) = self.attempts(id, earlier) else { return false };
        attempts.returns = attempts.returns.saturating_add(1);
        attempts.returns <= RETURNS_PER_OPEN_MAX
    }

    /// Whether to have the client retry its query about this handle.
    pub(crate) fn is_worth_a_retry(&mut self, id: FileId, earlier: bool) -> bool {
        let Some(attempts) = self.attempts(id, earlier) else { return false };
        attempts.retries = attempts.retries.saturating_add(1);
        attempts.retries <= RETRIES_PER_OPEN_MAX
    }

    fn attempts(&mut self, id: FileId, earlier: bool) -> Option<&mut Attempts> {
        let recent = if earlier { &mut self.earlier } else { &mut self.own };
        if earlier && !recent.opens.contains_key(&id) {
            recent.note(id);
        }
        recent.opens.get_mut(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> FileId {
        FileId { persistent: number, volatile: number }
    }

    #[test]
    fn a_lost_handle_ends_a_limited_number_of_connections() {
        let mut lost = LostOpens::default();
        lost.note(id(1));
        for _ in 0..RETURNS_PER_OPEN_MAX {
            assert!(lost.is_worth_a_return(id(1), false) && lost.is_worth_a_return(id(2), true));
        }
        assert!(!lost.is_worth_a_return(id(1), false) && !lost.is_worth_a_return(id(2), true));
        assert!(lost.is_worth_a_retry(id(1), false));
        assert!(!lost.is_worth_a_return(id(3), false) && !lost.is_worth_a_retry(id(3), false), "never lost");
    }

    #[test]
    fn the_oldest_lost_opens_are_evicted() {
        let mut lost = LostOpens::default();
        for number in 0..=LOST_OPENS_MAX as u64 {
            lost.note(id(number));
        }
        assert_eq!((lost.own.order.len(), lost.own.opens.len()), (LOST_OPENS_MAX, LOST_OPENS_MAX));
        assert!(!lost.is_worth_a_return(id(0), false) && lost.is_worth_a_return(id(1), false));
    }
}
